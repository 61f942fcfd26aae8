"""The order in which programs take tiles of packed sequences: a list made on the GPU.

Programs of the next kernel take tiles from the list by a counter. Sequences with the most keys to see come first, so
that the last tiles are short; tiles without rows are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.ops.attention.common.arguments import UNBOUNDED

SOME = tl.constexpr(16)  # sequences per program
HEAD = 8  # numbers before the list, among them the counter and the number of tiles


class Sizes(NamedTuple):
    """The numbers of a call that the kernel does not specialise on."""

    sequences: Any
    tokens: Any  # on the tiles' side
    others: Any  # on the other
    most: Any  # tiles
    bottom: Any
    window_left: Any
    window_right: Any


class Rules(NamedTuple):
    """What the kernel is compiled for."""

    LEFT: bool
    RIGHT: bool
    BM: int  # rows of a tile
    BN: int  # keys of a block


@triton.jit
def _bounds(cu, n, batch, tokens, LAST: tl.constexpr):
    """Returns where sequences begin and their lengths; never out of bounds, whatever cu holds.

    With LAST, tokens after the last sequence count as one more.
    """
    begin = tl.load(cu + n, mask=n <= batch if LAST else n < batch, other=tokens)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    end = tl.load(cu + n + 1, mask=n < batch, other=tokens if LAST else 0)
    return begin, tl.minimum(tl.maximum(end, begin), tokens) - begin


@triton.jit
def _weights(cu_q, cu_k, n, sizes, RULES: tl.constexpr):
    """Returns sequences' tiles, and the most key blocks that one of them sees."""
    _, rows = _bounds(cu_q, n, sizes.sequences, sizes.tokens, True)
    _, seen = _bounds(cu_k, n, sizes.sequences, sizes.others, False)
    if RULES.RIGHT:
        seen = tl.minimum(seen, tl.maximum(rows + sizes.bottom * (seen - rows) + sizes.window_right, 0))
        if RULES.LEFT:
            seen = tl.minimum(seen, tl.minimum(sizes.window_left + sizes.window_right, 1 << 29) + RULES.BM)
    return tl.cdiv(rows, RULES.BM), tl.cdiv(seen, RULES.BN)


@triton.jit(do_not_specialize=["sizes"])
def _order(listed, cu_q, cu_k, sizes, RULES: tl.constexpr, PDL: tl.constexpr):
    """Lists every tile by seven of eight numbers.

    They are the place of its sequence's first tile in the list and the number of its tiles; where its queries begin and
    how many there are; the same for its keys; and the sequence's number.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * SOME + tl.arange(0, SOME)
    tiles, weight = _weights(cu_q, cu_k, n, sizes, RULES)
    base = tl.zeros((SOME,), tl.int64)  # 64 bits, for invalid lengths
    total = tl.zeros((), tl.int64)
    for start in range(0, sizes.sequences + 1, 128):
        m = start + tl.arange(0, 128)
        other, heavy = _weights(cu_q, cu_k, m, sizes, RULES)
        earlier = (heavy[None, :] > weight[:, None]) | ((heavy[None, :] == weight[:, None]) & (m[None, :] < n[:, None]))
        base += tl.sum(tl.where(earlier, other[None, :].to(tl.int64), 0), 1)
        total += tl.sum(other.to(tl.int64), 0)
    if tl.program_id(0) == 0:
        tl.store(listed, 0)
        tl.store(listed + 1, tl.minimum(total, sizes.most).to(tl.int32))
    begin, rows = _bounds(cu_q, n, sizes.sequences, sizes.tokens, True)
    begins, columns = _bounds(cu_k, n, sizes.sequences, sizes.others, False)
    for start in range(0, tl.max(tiles, 0), 64):
        tile = start + tl.arange(0, 64)[None, :]
        place = base[:, None] + tile
        here = (tile < tiles[:, None]) & (place < sizes.most)
        at = listed + 8 + place * 8
        tl.store(at, base.to(tl.int32)[:, None] + 0 * tile, mask=here)
        tl.store(at + 1, tiles[:, None] + 0 * tile, mask=here)
        tl.store(at + 2, begin[:, None] + 0 * tile, mask=here)
        tl.store(at + 3, rows[:, None] + 0 * tile, mask=here)
        tl.store(at + 4, begins[:, None] + 0 * tile, mask=here)
        tl.store(at + 5, columns[:, None] + 0 * tile, mask=here)
        tl.store(at + 6, n[:, None] + 0 * tile, mask=here)


def list_tiles(
    q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, bottom: bool, left: int, right: int,
    BM: int, BN: int
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Returns the list for tiles of BM queries and BN keys, and an upper bound of the number of tiles.

    The next kernel may start early (`boundary.early`). Backward, whose tiles are of keys, swaps the two sides, and left
    and right.
    """
    sequences, tokens = cu_q.numel() - 1, q.shape[2]
    most = tokens // BM + sequences + 1
    listed = torch.empty(HEAD + 8 * most, dtype=torch.int32, device=q.device)
    sizes = Sizes(sequences, tokens, k.shape[2], most, int(bottom), left, right)
    rules = Rules(left < UNBOUNDED, right < UNBOUNDED, BM, BN)
    programs, pdl = triton.cdiv(sequences + 1, SOME.value), early(device.of(q))["PDL"]
    launch(_order, (programs,), listed, cu_q, cu_k, sizes, RULES=rules, PDL=pdl, num_warps=4)
    return listed, most
