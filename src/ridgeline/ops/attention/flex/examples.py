"""FlexAttention's own examples as functions: alibi, softcap, sliding window, documents and prefix.

Each Triton function has its formula in PyTorch beside it, for the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.op import Spec
from ridgeline.ops.attention.common.band import Band
from ridgeline.ops.attention.flex.blocks import BlockMask, block_mask
from ridgeline.ops.attention.flex.score import ScoreMod
from ridgeline.tiles.activations import capped

CAP: tl.constexpr = tl.constexpr(20.0)


@triton.jit
def alibi(score, b, h, q, k, slopes):
    return score + tl.load(slopes + h) * (k - q).to(tl.float32)


@triton.jit
def softcap(score, b, h, q, k):
    new, _ = capped(score, CAP, True)
    return new


@triton.jit
def softcap_slope(grad, score, b, h, q, k):
    _, slope = capped(score, CAP, True)
    return grad * slope


@triton.jit
def window(b, h, q, k, left):
    return (k <= q) & (q - k <= tl.load(left))


@triton.jit
def documents(b, h, q, k, ids):
    return (k <= q) & (tl.load(ids + q) == tl.load(ids + k))


@triton.jit
def prefix(b, h, q, k, lengths):
    return (k <= q) | (k < tl.load(lengths + b))


def _cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return CAP.value * torch.tanh(score / CAP.value)


def score_mods(name: str, heads: int, device: Any) -> ScoreMod:
    """Returns the example of this name, "alibi" or "softcap"."""
    if name == "softcap":
        return ScoreMod(softcap, softcap_slope, eager=_cap)
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads).to(device)
    return ScoreMod(alibi, tensors=[slopes], additive=True, eager=lambda s, b, h, q, k, slopes: s + slopes[h] * (k - q))


def masks(name: str, size: int, batch: int, length: int, device: Any, block: int = 128) -> BlockMask:
    """Returns the example of this name: "window", "documents" or "prefix".

    size: how many keys before its own a query sees; a document's length on average; the prefix of the last batch, and
    of the others evenly less.
    """
    given: dict[str, Any] = {"Sq": length, "Sk": length, "block": block}
    if name == "window":
        read, function = torch.tensor(size, dtype=torch.int32), window
        eager: Any = lambda b, h, q, k, left: (k <= q) & (q - k <= left)  # noqa: E731
        pairs = Band(-size, 0).pairs(length, length)
    elif name == "documents":
        dice = torch.Generator().manual_seed(0)
        read = (torch.rand(length, generator=dice) < 1 / size).cumsum(0).to(torch.int32)
        function, eager = documents, lambda b, h, q, k, ids: (k <= q) & (ids[q] == ids[k])
        pairs = sum(n * (n + 1) // 2 for n in read.bincount().tolist())
    else:
        read = torch.arange(1, batch + 1, dtype=torch.int32) * size // batch
        function, eager = prefix, lambda b, h, q, k, lengths: (k <= q) | (k < lengths[b])
        given["B"] = batch
        pairs = sum(Band(-length, 0, n).pairs(length, length) for n in read.tolist())
    made = block_mask(function, tensors=[read.to(device)], eager=eager, device=device, **given)
    made.expect(pairs)
    return made


class Example(Spec):
    """A ScoreMod or a BlockMask of the examples, as an argument of a case. sizes: as `score_mods` or `masks` take."""

    name: str
    sizes: tuple[int, ...]

    def __init__(self, name: str, *sizes: int):
        super().__init__(grad=False)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "sizes", sizes)

    def make(self, dtype: torch.dtype, device: Any, generator: torch.Generator | None) -> Any:
        if self.name in ("alibi", "softcap"):
            return score_mods(self.name, self.sizes[0], device)
        size, batch, length, *block = self.sizes
        return masks(self.name, size, batch, length, device, *block)
