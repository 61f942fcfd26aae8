"""Blocks of a paged cache, given out to sequences and taken back."""

from __future__ import annotations

from ridgeline.op import RidgelineError


class Blocks:
    """Numbers from 0 to count - 1, each of a block that holds `size` tokens.

    The block returned last is given out first, so that a run touches few of them."""

    def __init__(self, count: int, size: int) -> None:
        if size < 16 or size % 16:
            raise RidgelineError(f"lm: a block must hold a multiple of 16 tokens, but holds {size}")
        if count < 1:
            raise RidgelineError(f"lm: there must be at least one block, but there are {count}")
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def of(self, tokens: int) -> int:
        """Returns how many blocks hold so many tokens."""
        return -(-tokens // self.size)

    def extend(self, held: list[int], tokens: int) -> bool:
        """Adds blocks to those held until they hold so many tokens. Returns whether there were enough; else none is
        added."""
        lacking = max(0, self.of(tokens) - len(held))
        if lacking > self.free:
            return False
        held += [self._free.pop() for _ in range(lacking)]
        return True

    def release(self, held: list[int]) -> None:
        """Takes all the held blocks back."""
        self._free += reversed(held)
        held.clear()
