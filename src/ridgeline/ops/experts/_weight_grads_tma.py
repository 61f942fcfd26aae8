"""Gradients of the groups' weights on Hopper: dW_g = sum_r a_r^T b_r over a group's rows r, by tensor descriptors.

Programs stay and walk the tiles of all groups. Rows come by ragged maps, as in `_products_tma`: those beyond a group's
end are zeros, so none is masked, and a group without rows gets its zeros from one step of them. The loops over tiles
and rows are one. A program sums a tile over all of a group's rows, in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.experts import _weight_grads
from ridgeline.ops.experts._products import Rows, Sizes, bounds, power
from ridgeline.ops.experts._products_tma import rows_from, whole


@triton.jit
def _steps(begin, end, BR: tl.constexpr):
    """A tile has one step at least: without rows, of zeros."""
    return tl.maximum(tl.cdiv(end - begin, BR), 1)


@triton.jit
def _bwd(
    dw,
    out,
    a,
    b,
    ends,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    POW: tl.constexpr,
):
    """One loop over the steps of all tiles of this program: every num_programs-th, from the first group on."""
    T, M, N, G = sizes
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    each, stride = down * across, tl.num_programs(0)
    groups = tl.arange(0, POW)
    begins, lasts = bounds(ends, groups, G, T)
    # How many tiles up to a group's last are this program's, and how many up to the one before it.
    mine = tl.cdiv((groups + 1) * each - tl.program_id(0), stride) - tl.cdiv(groups * each - tl.program_id(0), stride)
    total = tl.sum(tl.where(groups < G, mine * _steps(begins, lasts, BR), 0), 0)
    t, step, steps = tl.program_id(0) - stride, 0, 1
    g, m, n, row, end = 0, 0, 0, 0, 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(total):
        if step == 0:
            t += stride
            g, place = t // each, t % each
            first = place // (GROUP * across) * GROUP
            size = min(down - first, GROUP)
            m = (first + place % (GROUP * across) % size) * BM
            n = place % (GROUP * across) // size * BN
            row, end = bounds(ends, g, G, T)
            end = tl.maximum(row, end)
            steps = _steps(row, end, BR)
        acc = tl.dot(rows_from(a, end, row, m).T, rows_from(b, end, row, n), acc)
        row += BR
        step += 1
        if step == steps:
            one, other = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            dtype = dw.dtype.element_ty
            out.store([g, m, n], one.to(dtype).reshape(1, BM, BN // 2))
            out.store([g, m, n + BN // 2], other.to(dtype).reshape(1, BM, BN // 2))
            acc = tl.zeros((BM, BN), tl.float32)
            step = 0


def weight_grad(dw: torch.Tensor, a: Rows, b: Rows, T: int, ends: torch.Tensor, precision: str, add: bool) -> None:
    """`_weight_grads.weight_grad` for rows in their places; what TMA cannot store, or is to be added, goes there."""
    if not add and not whole(dw) and whole(dw.mT):
        dw, a, b = dw.mT, b, a
    if add or not whole(dw) or a.order is not None or b.order is not None:
        return _weight_grads.weight_grad(dw, a, b, T, ends, precision, add)
    G, M, N = dw.shape
    wide = 256 if N > 128 else 128
    maps = [TensorMap(r.data[None, None], (1, 1, 1, 64, n), ragged=True) for r, n in ((a, 128), (b, wide))]
    grid = (min(G * triton.cdiv(M, 128) * triton.cdiv(N, wide), device.of(dw).multiprocessors),)
    tile: dict[str, Any] = {"BM": 128, "BN": wide, "BR": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}
    launch(_bwd, grid, dw, TensorMap(dw, (1, 128, wide // 2)), *maps, ends, Sizes(T, M, N, G), POW=power(G), **tile)
