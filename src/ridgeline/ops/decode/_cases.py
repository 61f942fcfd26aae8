"""Random arguments of a decoder's step, and the sizes at which decode_attention is timed."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Spec


class Filled(Spec):
    """Lengths of which every one is `high`, or with a step counts down from it."""

    def make(self, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
        return torch.full(self.shape, self.high, dtype=torch.int32, device=device)


class Table(Spec):
    """A block table (B, most) that owns every block once, in a mixed order."""

    def make(self, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
        count = self.shape[0] * self.shape[1]
        if torch.device(device).type == "meta":
            return torch.empty(self.shape, dtype=torch.int32, device=device)
        return torch.randperm(count, device=device, generator=generator).to(torch.int32).view(self.shape)


class Scales(Spec):
    """Scales of a quantised cache, or its zeros: float32, from 0.5 to 1.5 times `size`."""

    size: float

    def __init__(self, *shape: int, size: float):
        super().__init__(*shape, dtype="float32", grad=False)
        object.__setattr__(self, "size", size)

    def make(self, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
        return self.size * (0.5 + torch.rand(self.shape, device=device, generator=generator))


BATCHES, KEYS, D = (1, 8, 32, 128), (1024, 8192, 32768), 128
# The dtype of a cache, the largest number (0: all), its width, and the size of its scales.
FORMS = {"fp8": ("float8_e4m3fn", 0, D, 1.0), "int8": ("int8", 0, D, 0.02), "int4": ("uint8", 256, D // 2, 0.3)}


def _bench(
    batch: int, keys: int, note: str = "", *, block: int = 0, queries: int = 1, heads: tuple[int, int] = (32, 8),
    new: bool = False, form: str = "", **given: Any,
) -> Case:  # fmt: skip
    """A step over full caches. note: ends the case's name. new: the queries' keys and values are appended."""
    kind, high, width, size = FORMS.get(form, (None, 0, D, 0.0))
    shape = (batch * keys // block, block) if block else (batch, keys)
    cache = Spec(*shape, heads[1], width, dtype=kind, grad=False, high=high)
    if new:
        given |= dict.fromkeys(("k", "v"), Spec(batch, queries, heads[1], D, grad=False))
    if block:
        given["block_table"] = Table(batch, keys // block)
    if form:  # one scale a head for fp8, one a token and head for integers
        scale = Scales(heads[1], size=size) if form == "fp8" else Scales(*shape, heads[1], size=size)
        given |= {"k_scale": scale, "v_scale": scale}
    name = f"{batch}x{heads[0]}/{heads[1]}x{queries} of {keys}x{D}{note}"
    lengths = Filled(batch, high=keys - queries if new else keys)
    q = Spec(batch, queries, heads[0], D, grad=False)
    return Case(name, (q, cache, cache, lengths), given, ("bfloat16",), "bench")


def benches() -> list[Case]:
    """The cases to record on a GPU. 128 x 32768 keys are 17 GB, and each rung has a copy of its own."""
    angles: dict[str, Any] = {n: Spec(8192, D // 2, grad=False) for n in ("cos", "sin")}
    return [
        *(_bench(b, n) for b in BATCHES for n in KEYS),
        *(
            _bench(b, n, f" in blocks of {block}", block=block)
            for block in (16, 64) for b in BATCHES for n in KEYS if b * n <= 1 << 18
        ),
        _bench(8, 8192, " appended", new=True),
        _bench(8, 8192, " appended, rotated", new=True, **angles),
        *(_bench(b, 8192, f" in {form}", form=form) for form in FORMS for b in (32, 8)),
        *(_bench(16, 8192, queries=queries, heads=(64, 8)) for queries in (8, 1)),
        _bench(8, 8192, " invariant", invariant=True),
    ]  # fmt: skip
