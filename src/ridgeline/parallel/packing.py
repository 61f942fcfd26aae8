"""Sequences that are packed one after the other and split over ranks: which calls a block of attention needs.

Sequence n has the tokens ends[n] to ends[n + 1] - 1 of the packed row, wherever ranks begin. Between two different
pieces of tokens at most one sequence lies in both, so that each pair is one rectangle; a piece beside itself is one
call of packed sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from ridgeline.parallel.blocks import FREE, Piece, pieces

Ends = tuple[int, ...]


def read(cu_seqlens: Any) -> Ends | None:
    """Returns cu_seqlens as a tuple, or None if it is no such thing. The host waits for a tensor on a GPU."""
    if isinstance(cu_seqlens, torch.Tensor):
        whole = cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
        return tuple(cu_seqlens.tolist()) if whole else None
    whole = isinstance(cu_seqlens, tuple | list) and all([type(n) is int for n in cu_seqlens])
    return tuple(cu_seqlens) if whole else None


def fault(cu_seqlens: Any, ends: Ends | None, tokens: int) -> str | None:
    """Returns what is wrong with cu_seqlens, `read` as ends, of a packed row of so many tokens, or None."""
    if ends is None:
        given = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
        return f"cu_seqlens must be a tuple of ints, or an int32 or int64 tensor of one dimension, got {given}"
    if len(ends) < 2 or ends[0] or ends[-1] != tokens or list(ends) != sorted(ends):
        some = list(ends) if len(ends) < 9 else [*ends[:8], "..."]
        return f"cu_seqlens must rise from 0 to the tokens of all ranks, {tokens}, got {some}"
    return None


def number(ends: Ends, token: int) -> int:
    """Returns which sequence a token lies in."""
    return bisect_right(ends, token) - 1


def local_ends(mine: tuple[int, ...], size: int, ends: Ends) -> Ends | None:
    """Returns where the sequences end in a rank's own row of tokens, or None if it has one sequence."""
    found, last = [0], number(ends, mine[0])
    for n, begin in enumerate(mine):
        if number(ends, begin) != last:
            found.append(n * size)
        found += [n * size + end - begin for end in dict.fromkeys(ends) if begin < end < begin + size]
        last = number(ends, begin + size - 1)
    return (*found, size * len(mine)) if len(found) > 1 else None


@lru_cache(maxsize=4096)
def packed_pieces(
    mine: tuple[int, ...], theirs: tuple[int, ...], size: int, left: int, right: int, ends: Ends | None
) -> tuple[Piece, ...]:
    """Returns the calls for queries and keys in pieces of `size` tokens that begin at these positions of the row.

    A query sees the keys of its own sequence from `left` tokens before it to `right` after; ends None: of the row."""
    if ends is None or number(ends, min(mine + theirs)) == number(ends, max(mine + theirs) + size - 1):
        return pieces(mine, theirs, size, left, right)
    if mine == theirs and left >= FREE and right in (0, FREE):
        everything = slice(0, size * len(mine))
        return (Piece(everything, everything, left, right, local_ends(mine, size, ends)),)
    found = []
    for i, a in enumerate(mine):
        for j, b in enumerate(theirs):
            if a == b:
                own, other = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                found.append(Piece(own, other, left, right, local_ends((a,), size, ends)))
                continue
            n = number(ends, max(a, b))
            if n != number(ends, min(a, b) + size - 1):
                continue  # no sequence lies in both
            q0, k0 = max(ends[n], a), max(ends[n], b)
            q1, k1 = min(ends[n + 1], a + size), min(ends[n + 1], b + size)
            least, most = k0 - q1 + 1, k1 - q0 - 1  # of key positions less query positions
            if most < -left or least > right:
                continue
            band = FREE if least >= -left else left - (q0 - k0), FREE if most <= right else right + (q0 - k0)
            q, k = slice(i * size + q0 - a, i * size + q1 - a), slice(j * size + k0 - b, j * size + k1 - b)
            found.append(Piece(q, k, *band))
    return tuple(found)


def places(ends: Ends) -> torch.Tensor:
    """Returns each token's place in its own sequence, int64."""
    return torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])
