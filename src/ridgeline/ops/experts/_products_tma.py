"""Products of groups of rows on Hopper, y_r = x_r W_g + b_g, by tensor descriptors: `_products` with copies by TMA.

Programs stay and walk the tiles of all groups. Rows come and go by maps in which each group ends at its end
(`TensorMap`, ragged): rows beyond are read as zeros and not written, so a tile may begin at any row. The loops over
tiles and over K are one: a tile's first loads are in flight while the one before is stored. Rows cannot be gathered;
`_route.gather` copies them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.experts._products import Maybe, Rows, Sizes, find, last_tiles, power

FAR = tl.constexpr(TensorMap.FAR)
HOPPER: dict[str, Any] = {
    "dtypes": ("float16", "bfloat16"), "arch": 90, "newest": 90, "shared": 227 << 10, "served": True,
}  # fmt: skip
TILE: dict[str, Any] = {"BM": 128, "BK": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}


@triton.jit
def rows_from(source, end, row, column):
    """A tile of the rows from `row` of a group that ends at `end`, with zeros beyond."""
    x = source.load([FAR, end, 0, FAR - end + row, column])
    return x.reshape(x.shape[3], x.shape[4])


@triton.jit
def _fwd(
    y,
    out,
    x,
    w,
    bias,
    ends,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    POW: tl.constexpr,
    BY_K: tl.constexpr,
):
    """out, x: ragged maps of y and x. w: a map of the weights, whose rows in memory run along K or across it."""
    T, K, N, G = sizes
    across, steps = tl.cdiv(N, BN), tl.cdiv(K, BK)
    last = last_tiles(ends, G, T, BM, POW)
    mine = tl.cdiv(tl.max(last, 0) * across - tl.program_id(0), tl.num_programs(0))
    t, k = tl.program_id(0) - tl.num_programs(0), 0
    g, row, end, column = 0, 0, 0, 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(mine * steps):
        if k == 0:
            t += tl.num_programs(0)
            g, row, end, column = find(last, ends, t, across, sizes, BM, BN, GROUP)
        # Rows past the last end are group G, which has no weight: both tiles are zeros.
        left = rows_from(x, tl.where(g < G, end, row), row, k)
        if BY_K:
            acc = tl.dot(left, w.load([g, column, k]).reshape(BN, BK).T, acc)
        else:
            acc = tl.dot(left, w.load([g, k, column]).reshape(BK, BN), acc)
        k += BK
        if k >= K:
            if bias is not None:
                n = column + tl.arange(0, BN)
                acc += tl.load(bias + tl.cast(g, tl.int64) * N + n, mask=(n < N) & (g < G), other=0.0).to(tl.float32)[
                    None, :
                ]
            # In halves, which leave room for another stage.
            one, other = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            dtype = y.dtype.element_ty
            at = FAR - end + row
            out.store([FAR, end, 0, at, column], one.to(dtype).reshape(1, 1, 1, BM, BN // 2))
            out.store([FAR, end, 0, at, column + BN // 2], other.to(dtype).reshape(1, 1, 1, BM, BN // 2))
            acc = tl.zeros((BM, BN), tl.float32)
            k = 0


def whole(t: torch.Tensor) -> bool:
    """Whether TMA can address a tensor's rows: contiguous ones that begin at multiples of 16 bytes."""
    size = t.element_size()
    apart = [s for n, s in zip(t.shape[:-1], t.stride(), strict=False) if n > 1]
    return t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and not any([s < 1 or s * size % 16 for s in apart])


def refusal(*operands: torch.Tensor) -> str | None:
    """Returns why TMA cannot move these matrices and their products, or None."""
    for t in operands:
        if 0 in t.shape or t.shape[0] > TensorMap.FAR:
            return f"it takes 1 to 2^30 rows or groups, and a matrix is {tuple(t.shape)}"
        sides = t.shape[1:]  # of the rows that are moved, and of a weight's products
        if any([n * t.element_size() % 16 for n in sides]) or not (whole(t) or (t.dim() == 3 and whole(t.mT))):
            found = f"{tuple(t.shape)} with strides {tuple(t.stride())}"
            return f"it copies 16 bytes at a time, so rows must be multiples of 16 bytes apart, and a matrix is {found}"
    return None


def unless(rows: int, groups: int) -> str | None:
    """Returns why automatic choice leaves a call to `triton`, or None."""
    return None if rows > 96 * groups else f"tiles of 128 rows are too tall for {rows} rows of {groups} groups"


def product(y: torch.Tensor, x: Rows, w: torch.Tensor, ends: torch.Tensor, bias: Maybe, precision: str) -> None:
    """`_products.product` for rows of x in their places, and for matrices that `refusal` does not refuse."""
    (T, N), (G, K, _) = y.shape, w.shape
    by_k, wide = not whole(w), 256 if N > 128 else 128
    maps = [TensorMap(t[None, None], (1, 1, 1, 128, n), ragged=True) for t, n in ((y, wide // 2), (x.data, 64))]
    weight = TensorMap(w.mT, (1, wide, 64)) if by_k else TensorMap(w, (1, 64, wide))
    most = (T // 128 + min(G + 1, T)) * triton.cdiv(N, wide)
    grid = (min(most, device.of(y).multiprocessors),)
    sizes = Sizes(T, K, N, G)
    launch(_fwd, grid, y, *maps, weight, bias, ends, sizes, BN=wide, POW=power(G), BY_K=by_k, **TILE)
