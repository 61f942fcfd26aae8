"""Products of groups of rows with a matrix each, y_r = x_r W_g + b_g, for groups that only the device knows.

Programs walk the tiles of the groups in order. A program finds a tile's group in the groups' ends, so the host reads
nothing, and a group without rows has no tile. Rows of x may be gathered: then no permuted copy of them is made. Rows
past the last end are a group of their own, whose tiles are zeros. Ends out of order lead to no row outside.
Source: Tillet, Triton's tutorial of group GEMM, 2023; Gale et al., MegaBlocks, 2022 (arXiv:2211.15841).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name

Maybe = torch.Tensor | None
SHORT, FEW = 64, 1 << 18  # so many float32 sums of so many terms are made in float64


class Rows(NamedTuple):
    """A matrix with its strides. order: row r of the product takes row order[r] // each; None: row r."""

    data: Any
    row: Any
    column: Any
    order: Any
    each: Any


class Weights(NamedTuple):
    """A matrix (k, n) for each group, with its strides."""

    data: Any
    group: Any
    k: Any
    n: Any


class Sizes(NamedTuple):
    """T rows of K elements and of N results, in G groups."""

    T: Any
    K: Any
    N: Any
    G: Any


@triton.jit
def bounds(ends, g, G, T):
    """The first row of group g and the end of its rows, in [0, T]. Group G is the rows past the last end."""
    start = tl.load(ends + g - 1, mask=(g > 0) & (g <= G), other=0)
    end = tl.load(ends + g, mask=g < G, other=0)
    start = tl.where(g > G, T, tl.minimum(tl.maximum(start, 0), T))
    return start, tl.where(g >= G, T, tl.minimum(tl.maximum(end, 0), T))


@triton.jit
def last_tiles(ends, G, T, BM: tl.constexpr, POW: tl.constexpr):
    """How many tiles of BM rows there are up to the end of each group, (POW,)."""
    start, end = bounds(ends, tl.arange(0, POW), G, T)
    return tl.cumsum(tl.cdiv(tl.maximum(end - start, 0), BM), 0)


@triton.jit
def find(last, ends, t, across, sizes, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The group of tile t, its first row, the end of its group's rows and its first column.

    Tiles of a group run down GROUP tiles of rows before the next column."""
    before_it = last * across <= t
    g = tl.sum(before_it.to(tl.int32), 0)
    before = tl.max(tl.where(before_it, last, 0), 0)
    start, end = bounds(ends, g, sizes.G, sizes.T)
    down, place = tl.cdiv(end - start, BM), t - before * across
    first = place // (GROUP * across) * GROUP
    size = min(down - first, GROUP)
    row = start + (first + place % (GROUP * across) % size) * BM
    return g, row, end, place % (GROUP * across) // size * BN


@triton.jit
def source(x, r):
    """The rows of x that rows r of a product take, as int64."""
    if x.order is not None:
        r = tl.load(x.order + r) // x.each
    return r.to(tl.int64)


@triton.jit
def empty(BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """Zeros for `added`."""
    return tl.zeros((BM, BN), tl.float64 if PRECISION == "double" else tl.float32)


@triton.jit
def added(acc, left, right, PRECISION: tl.constexpr):
    """acc + left right. In "double" sums are float64. In "ieee" a product is summed on its own, since one chain of many
    additions has several times torch's error; and it is added by an fma, since the compiler makes one chain of a sum of
    products."""
    if PRECISION == "double":
        acc = tl.dot(left.to(tl.float64), right.to(tl.float64), acc, input_precision="ieee", out_dtype=tl.float64)
    elif PRECISION == "ieee":
        acc = tl.fma(tl.dot(left, right, input_precision=PRECISION), 1.0, acc)
    else:
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _fwd(
    y,
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
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    T, K, N, G = sizes
    across = tl.cdiv(N, BN)
    last = last_tiles(ends, G, T, BM, POW)
    tiles = tl.max(last, 0) * across
    k = tl.arange(0, BK)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        g, row, end, column = find(last, ends, t, across, sizes, BM, BN, GROUP)
        r, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
        # Rows past the end repeat the last one, and columns wrap around: unlike a mask, that costs nothing.
        rows = source(x, tl.minimum(r, end - 1))
        columns = n % N
        group = tl.minimum(g, G - 1).to(tl.int64)
        at_x = x.data + rows[:, None] * x.row + k[None, :].to(tl.int64) * x.column
        at_w = w.data + group * w.group + k[:, None].to(tl.int64) * w.k + columns[None, :].to(tl.int64) * w.n
        depth = tl.where(g < G, K, 0)
        acc = empty(BM, BN, PRECISION)
        for start in range(0, depth, BK):
            if EVEN:
                left, right = tl.load(at_x), tl.load(at_w)
            else:
                left = tl.load(at_x, mask=k[None, :] < K - start, other=0.0)
                right = tl.load(at_w, mask=k[:, None] < K - start, other=0.0)
            acc = added(acc, left, right, PRECISION)
            at_x += BK * tl.cast(x.column, tl.int64)
            at_w += BK * tl.cast(w.k, tl.int64)
        if bias is not None:
            here = (n < N) & (g < G)
            acc += tl.load(bias + group * N + n, mask=here, other=0.0).to(tl.float32)[None, :]
        at_y = y + r[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at_y, acc.to(y.dtype.element_ty), mask=(r[:, None] < end) & (n[None, :] < N))


def rows_of(x: torch.Tensor, order: Maybe = None, each: int = 1) -> Rows:
    return Rows(x, x.stride(0), x.stride(1), order, each)


def power(groups: int) -> int:
    """The length of vectors with an element for each group and one for the rows past the last end."""
    return triton.next_power_of_2(max(groups + 1, 2))


def dot_precision(x: torch.Tensor, precision: str, terms: int, results: int) -> str:
    """What `added` is told for x's dtype and so many sums of so many terms, or fewer. Only "ieee" has sums of sums."""
    if x.dtype != torch.float32:
        return "tf32"
    short = terms <= SHORT and results <= FEW and device.of(x).backend != "hip"  # which compiles no float64 products
    return "double" if precision == "ieee" and short else precision


def product(y: torch.Tensor, x: Rows, w: torch.Tensor, ends: torch.Tensor, bias: Maybe, precision: str) -> None:
    """Fills y (T, N), contiguous, from w (G, K, N), any strides; bias (G, N), contiguous. ends: int32, contiguous."""
    (T, N), (G, K, _) = y.shape, w.shape
    exact = dot_precision(y, precision, K, T * N)

    def config() -> dict[str, Any]:
        gpu = device.of(y)
        chosen = tuning.config(
            gpu, "grouped_matmul", "fwd", _key(y, T, K, N, G), lambda: rule(gpu, y.dtype, exact, T, N, K, G), _space
        )
        return chosen | {"EVEN": K % chosen["BK"] == 0}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return (programs(device.of(y), c, y.element_size(), T, N, G),)

    given = y, x, Weights(w, *w.stride()), bias, ends, Sizes(T, K, N, G)
    launch(_fwd, grid, *given, config=config, key=(T, K, N, G), POW=power(G), PRECISION=exact)


def _key(y: torch.Tensor, *sizes: int) -> str:
    return " ".join([dtype_name(y), *(str(min(65536, triton.next_power_of_2(d))) for d in sizes)])


def programs(gpu: device.Device, c: dict[str, Any], size: int, T: int, N: int, G: int, wide: int = 1) -> int:
    """As many programs as run at once, or one for each tile if those are small or few. wide: weights' tiles in one."""
    most = (T // c["BM"] + min(G + 1, T)) * triton.cdiv(N, c["BN"])
    held = (c["BM"] + wide * c["BN"]) * c["BK"] * size * c["num_stages"]
    at_once = max(1, gpu.shared_memory // (held + 1024)) if c["BM"] >= 64 else 1 << 12
    return min(most, at_once * gpu.multiprocessors)


def rule(gpu: device.Device, dtype: torch.dtype, exact: str, T: int, N: int, K: int, G: int) -> tuning.Config:
    """Returns the tile: about as many rows as a group has on average, so that few of a tile's rows are none.

    Few rows are twice the average, since a group whose rows fill two tiles has its weight read twice; or by GROUP, from
    the cache."""
    average = T / max(1, G)
    rows = 16 if average <= 8 else 32 if average <= 48 else 64 if average <= 96 else 128
    stages = 3 if gpu.backend == "cuda" else 2
    if dtype == torch.float32:
        deep = 32 if exact.startswith("tf32") else 16
        tall, warps = (32, 8) if exact == "double" else (max(32, min(rows, 64)), 4)
        return {"BM": tall, "BN": 64, "BK": deep, "GROUP": 8, "num_warps": warps, "num_stages": 2}
    if rows < 64:
        few = (T // rows + min(G, T)) * triton.cdiv(N, 64) < gpu.multiprocessors
        deep = 128 if K % 128 == 0 else 64
        stages += deep == 64 and gpu.shared_memory >= 160 << 10
        return {"BM": rows, "BN": 32 if few else 64, "BK": deep, "GROUP": 8, "num_warps": 4, "num_stages": stages}
    wide = 256 if rows == 128 and N >= 1024 and gpu.shared_memory >= 227 << 10 else 128
    warps = 8 if rows == 128 else 4
    return {"BM": rows, "BN": wide, "BK": 64, "GROUP": 8, "num_warps": warps, "num_stages": stages}


def _space() -> list[tuning.Config]:
    return [
        {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8, "num_warps": warps, "num_stages": stages}
        for bm, bn, warps in ((128, 256, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4), (64, 128, 4), (16, 64, 4))
        for bk, stages in ((64, 3), (64, 4), (128, 3))
    ]
