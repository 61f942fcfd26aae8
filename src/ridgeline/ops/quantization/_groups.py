"""Shared by quantisation: numbers with one scale form a group: a block, a row or a whole tensor.

    scale = max |x| / 127 (int8), / 448 (e4m3) or / 57344 (e5m2), at least 2^-126        q = round(x / scale)
    asymmetric int8: scale = (max - min) / 255, with 0 in the range; zero = round(-128 - min / scale)
                     q = round(x / scale) + zero

All in float32. A scale is a product with 1 / 127 and the like, rounded to float32, as torch divides by a constant on a
GPU (not on a CPU). x / scale is correctly rounded, then rounded to the nearest code, ties to even, and saturates. So
every GPU and the CPU give the same codes. A group with an infinity or NaN has an infinite scale, and dequantizes to
NaN.
Blocks, and rows of one tile, are read once. For a whole tensor, at most PARTS programs read it for the extremes; a
second pass reads it from its end, which is still in L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import INTERPRETED, launch
from ridgeline.op import RidgelineError, dense_only
from ridgeline.tiles.float8 import decoded, encoded, encoded_e5m2, encoded_in_fours, halves

PARTS = 512  # programs that find a tensor's extremes
LEAST = 2.0**-126  # the least scale
TINY = tl.constexpr(LEAST)
FUSED = tl.constexpr(not INTERPRETED)  # the interpreter rounds twice in a fused multiply-add
# Without it, torch.compile's quotients differ in their last bits, and so do codes.
RIGHT: dict[str, Any] = {"eager_numerics.division_rounding": True}
BLOCK = 128  # numbers along a side of fp8's blocks
MOST = {torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}  # the largest numbers of the 8-bit formats
LARGEST = {torch.int8: 127, **MOST}
Group = tuple[int, int]  # rows and columns that share a scale; 0 for all
TENSOR, ROW = (0, 0), (1, 0)


class Plane(NamedTuple):
    """A matrix with its sizes and strides."""

    data: Any
    rows: int
    columns: int
    row_stride: int
    column_stride: int


class PerGroup(NamedTuple):
    """A number for each group, with the strides from group to group. data may be None."""

    data: Any
    row_stride: int
    column_stride: int


@triton.jit
def _whole(v):
    """v rounded to an integer, ties to even; 0 for NaN. Adding 1.5 * 2^23 leaves a float32 no fractional bits."""
    v = tl.where(v == v, tl.minimum(tl.maximum(v, -1024.0), 1024.0), 0.0)
    return (v + 12582912.0) - 12582912.0


@triton.jit
def ends(v, SYMMETRIC: tl.constexpr):
    """Values whose extremes set the scale: 0 and |v|, or v and v. NaN becomes infinity, since max would skip it."""
    if SYMMETRIC:
        return tl.zeros_like(v), tl.where(v == v, tl.abs(v), float("inf"))
    else:
        return tl.where(v == v, v, 0.0), tl.where(v == v, v, float("inf"))


@triton.jit
def scaled(low, high, TOP: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The scale and the zero of groups with these extremes, 0 included. TOP: the largest code."""
    if SYMMETRIC:
        scale = high * (1 / TOP)
    else:
        scale = (high * 0.5 - low * 0.5) * (2 / 255)  # halving is exact, and keeps the difference finite
    scale = tl.where(scale < TINY, TINY, scale)
    if SYMMETRIC:
        return scale, tl.zeros_like(scale)
    else:
        return scale, tl.minimum(tl.maximum(_whole(-128.0 - tl.div_rn(low, scale)), -128.0), 127.0)


@triton.jit
def quotient(v, scale, kind: tl.constexpr):
    """v / scale as a correctly rounded division gives it, where v's group has found that scale, but for a zero's sign.

    kind: the dtype that v came in. The scale's reciprocal is made once, and fused multiply-adds correct the product
    with it: once for halves, for which all pairs of significands have been tried, twice for float32 (Markstein).
    """
    lift = tl.where(scale < 8.673617379884035e-19, 1.2089258196146292e24, 1.0)  # 2^80, so no remainder is subnormal
    scale *= lift
    endless = scale == float("inf")  # its quotients are zeros, or NaN for infinities and NaN
    inverse = tl.where(endless, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
    less = tl.where(endless, 0.0, -scale)
    lifted = v * lift
    found = lifted * inverse
    found = tl.fma(tl.fma(found, less, lifted), inverse, found)
    if kind.primitive_bitwidth > 16:
        found = tl.fma(tl.fma(found, less, lifted), inverse, found)
    return found


@triton.jit
def coded(v, scale, zero, TOP: tl.constexpr, NATIVE: tl.constexpr, kind: tl.constexpr):
    """v as 8-bit codes: int8, e4m3 (TOP 448) or e5m2 (TOP 57344). kind: v's dtype in memory; None if the scale is a
    given one, which may be too small for v."""
    QUICK: tl.constexpr = FUSED and kind is not None and (NATIVE or TOP == 127)
    shares = quotient(v, scale, kind) if QUICK else tl.div_rn(v, scale)
    if NATIVE:  # only 8-bit floats: every tile has a multiple of four numbers a thread
        return encoded_in_fours(shares, v, "e4m3" if TOP == 448 else "e5m2")
    elif TOP == 448:
        return encoded(shares, False)
    elif TOP == 57344:
        return encoded_e5m2(shares)
    else:
        return tl.minimum(tl.maximum(_whole(shares) + zero, -128.0), 127.0).to(tl.int32).to(tl.int8)


@triton.jit
def _tiles(
    q,
    scales,
    x,
    across,
    GM: tl.constexpr,
    BM: tl.constexpr,
    G: tl.constexpr,
    GK: tl.constexpr,
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Blocks of fp8: a program takes BM rows of G blocks of GK columns; BM is GM, or GM is 1."""
    rows, columns = x.rows, x.columns
    if GM > 1:  # a two-dimensional grid saves the registers of the division below
        down, right = tl.program_id(0), tl.program_id(1)
    else:
        wide = tl.cdiv(columns, G * GK)  # 64-bit if columns is, and so is what follows
        down, right = tl.program_id(0) // wide, tl.program_id(0) % wide
    down = down.to(tl.int64)
    row = (down * BM + tl.arange(0, BM))[:, None, None]
    group = right * G + tl.arange(0, G)[None, :, None]
    column = group * GK + tl.arange(0, GK)[None, None, :]
    inside = (row < rows) & (column < columns)
    at = x.data + row * x.row_stride + column.to(tl.int64) * x.column_stride
    v = tl.load(at, mask=inside, other=0).to(tl.float32)
    _, sizes = ends(v, True)
    high = tl.max(sizes, 2, keep_dims=True)
    if GM > 1:
        high = tl.max(high, 0, keep_dims=True)
    scale, zero = scaled(high, high, TOP, True)
    code = coded(v, scale, zero, TOP, NATIVE, x.data.dtype.element_ty)
    tl.store(q + row * columns + column, code, mask=inside)
    first = down * (BM // GM) + tl.arange(0, BM // GM)[:, None, None]
    tl.store(scales + first * across + group, scale, mask=(first * GM < rows) & (group < across))


@triton.jit
def _rows(
    q,
    scales,
    zeros,
    x,
    BK: tl.constexpr,
    ONE: tl.constexpr,
    TOP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One row per program: in registers if it is ONE tile, else read again from L2."""
    row = tl.program_id(0).to(tl.int64)
    columns, x_column = x.columns, x.column_stride
    values = x.data + row * x.row_stride
    q += row * columns
    column = tl.arange(0, BK).to(tl.int64)
    v = tl.load(values + column * x_column, mask=column < columns, other=0).to(tl.float32)
    lows, highs = ends(v, SYMMETRIC)
    if not ONE:
        for start in range(BK, columns, BK):
            at = start + column
            more = tl.load(values + at * x_column, mask=at < columns, other=0).to(tl.float32)
            low, high = ends(more, SYMMETRIC)
            lows, highs = tl.minimum(lows, low), tl.maximum(highs, high)
    scale, zero = scaled(tl.minimum(tl.min(lows, 0), 0.0), tl.maximum(tl.max(highs, 0), 0.0), TOP, SYMMETRIC)
    tl.store(scales + row, scale)
    if not SYMMETRIC:
        tl.store(zeros + row, zero.to(tl.int32))
    code = coded(v, scale, zero, TOP, NATIVE, x.data.dtype.element_ty)
    tl.store(q + column, code, mask=column < columns)
    if not ONE:
        for start in range(BK, columns, BK):
            at = start + column
            more = tl.load(values + at * x_column, mask=at < columns, other=0).to(tl.float32)
            code = coded(more, scale, zero, TOP, NATIVE, x.data.dtype.element_ty)
            tl.store(q + start + column, code, mask=at < columns)


@triton.jit
def _tile(x, tile, BM: tl.constexpr, BK: tl.constexpr):
    """The numbers of a tile, their offsets in q, and which of them exist."""
    wide = tl.cdiv(x.columns, BK)
    row = ((tile // wide).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    column = ((tile % wide).to(tl.int64) * BK + tl.arange(0, BK))[None, :]
    inside = (row < x.rows) & (column < x.columns)
    at = x.data + row * x.row_stride + column * x.column_stride
    return tl.load(at, mask=inside, other=0).to(tl.float32), row * x.columns + column, inside


@triton.jit
def reach(parts, x, tiles, BM: tl.constexpr, BK: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Extremes of some tiles, into parts (2, programs)."""
    lows, highs = tl.zeros((BM, BK), tl.float32), tl.zeros((BM, BK), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        v, _, _ = _tile(x, tile, BM, BK)
        low, high = ends(v, SYMMETRIC)
        lows, highs = tl.minimum(lows, low), tl.maximum(highs, high)
    tl.store(parts + tl.program_id(0), tl.min(tl.min(lows, 1), 0))
    tl.store(parts + tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(highs, 1), 0))


@triton.jit
def _spread(
    q,
    scales,
    zeros,
    parts,
    x,
    tiles,
    count,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TOP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    NATIVE: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Every program finds the tensor's scale from the parts, and writes the codes of some tiles."""
    part = tl.arange(0, PARTS)
    low = tl.load(parts + part, mask=part < count, other=0)
    high = tl.load(parts + count + part, mask=part < count, other=0)
    scale, zero = scaled(tl.min(low, 0), tl.max(high, 0), TOP, SYMMETRIC)
    if tl.program_id(0) == 0:
        tl.store(scales, scale)
        if not SYMMETRIC:
            tl.store(zeros, zero.to(tl.int32))
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        v, at, inside = _tile(x, tiles - 1 - tile, BM, BK)
        code = coded(v, scale, zero, TOP, NATIVE, None if GIVEN else x.data.dtype.element_ty)
        tl.store(q + at, code, mask=inside)


@triton.jit
def _back(
    y,
    q,
    scales,
    zeros,
    GM: tl.constexpr,
    BM: tl.constexpr,
    G: tl.constexpr,
    GK: tl.constexpr,
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """(q - zero) * scale of BM rows of G groups of GK columns."""
    rows, columns = q.rows, q.columns
    wide = tl.cdiv(columns, G * GK)
    row = ((tl.program_id(0) // wide).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    group = ((tl.program_id(0) % wide).to(tl.int64) * G + tl.arange(0, G))[None, :]
    known = (row < rows) & (group * GK < columns)
    at = scales.data + row // GM * scales.row_stride + group * scales.column_stride
    scale = tl.load(at, mask=known, other=0)[:, :, None]
    column = group[:, :, None] * GK + tl.arange(0, GK)[None, None, :]
    inside = (row[:, :, None] < rows) & (column < columns)
    code = tl.load(q.data + row[:, :, None] * q.row_stride + column * q.column_stride, mask=inside, other=0)
    if TOP == 448:
        v = decoded(code, NATIVE)
    elif TOP == 57344:
        v = halves(code, True, NATIVE).to(tl.float32)
    else:
        v = code.to(tl.float32)
    if zeros.data is not None:
        at_zero = zeros.data + row // GM * zeros.row_stride + group * zeros.column_stride
        v -= tl.load(at_zero, mask=known, other=0).to(tl.float32)[:, :, None]
    tl.store(y + row[:, :, None] * columns + column, (v * scale).to(y.dtype.element_ty), mask=inside)


def native(t: torch.Tensor) -> bool:
    """Whether the tensor's GPU has e4m3 instructions."""
    gpu = device.of(t)
    return gpu.backend == "cuda" and gpu.capability >= 89 and not INTERPRETED


def plane(x: torch.Tensor) -> torch.Tensor:
    """x as (rows, columns) of its last dimension: a view if the other dimensions are one stride apart, else a copy."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def quantize(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, parts: torch.Tensor, x: torch.Tensor, group: Group
) -> None:
    """Writes the codes of x, contiguous, the scales in float32 and, if asymmetric, the zeros in int32.

    parts: room for a tensor's extremes, or its two extremes themselves."""
    values = plane(x)
    rows, columns = values.shape
    gpu, fp8 = device.of(x), q.dtype != torch.int8
    codes = q.view(torch.uint8) if fp8 else q
    facts: dict[str, Any] = {"TOP": LARGEST[q.dtype], "SYMMETRIC": zero is None, "NATIVE": fp8 and native(x)}
    warps = 256 // gpu.warp
    given = Plane(values, rows, columns, *values.stride())
    if group == ROW:
        most = 16384 if x.element_size() == 2 else 8192
        bk = min(most, max(128, triton.next_power_of_2(columns)))
        facts |= {"BK": bk, "ONE": columns <= bk, "num_warps": min(16, max(1, bk // 1024)) * 32 // gpu.warp or 1}
        launch(_rows, (rows,), codes, scale, zero, given, **facts)
    elif group == TENSOR:
        bk = min(4096, triton.next_power_of_2(columns))
        tile: dict[str, Any] = {"BM": 8192 // bk, "BK": bk, "num_warps": warps}
        tiles = triton.cdiv(rows, tile["BM"]) * triton.cdiv(columns, bk)
        count = min(PARTS, tiles)
        given_ends = parts.numel() == 2
        if given_ends:
            count = 1
        else:
            launch(reach, (count,), parts, given, tiles, SYMMETRIC=facts["SYMMETRIC"], **tile)
        grid = (min(tiles, 8 * gpu.multiprocessors),)
        launch(
            _spread,
            grid,
            codes,
            scale,
            zero,
            parts,
            given,
            tiles,
            count,
            PARTS=PARTS,
            **tile,
            **facts,
            GIVEN=given_ends,
        )
    else:
        gm, across = group[0], triton.cdiv(columns, BLOCK)
        g = 1 if gm > 1 else min(32, triton.next_power_of_2(across))
        bm = gm if gm > 1 else 32 // g
        tile = {"GM": gm, "BM": bm, "G": g, "GK": BLOCK, "TOP": facts["TOP"], "NATIVE": facts["NATIVE"]}
        tile["num_warps"] = warps // 2
        if gm > 1:  # unaligned rows load number by number: fewer per thread, to save registers for addresses
            tile["num_warps"] = warps * (4 if columns % 16 or values.stride(0) % 16 else 2)
        down, right = triton.cdiv(rows, bm), triton.cdiv(across, g)
        launch(_tiles, (down, right) if gm > 1 else (down * right,), codes, scale, given, across, **tile)


def group_of(q: torch.Tensor, scale: torch.Tensor) -> Group | None:
    """Which numbers of q share a scale, from the shapes alone; None if they do not fit."""
    if scale.numel() == 1 and scale.dim() <= max(1, q.dim()):
        return TENSOR
    if not q.dim() or scale.dim() != q.dim():
        return None
    across = -(-q.shape[-1] // BLOCK)
    for down, wanted in (
        (1, (*q.shape[:-1], 1)),
        (1, (*q.shape[:-1], across)),
        (BLOCK, (-(-q.shape[0] // BLOCK), across)),
    ):
        if tuple(scale.shape) == wanted and (down == 1 or q.dim() == 2):
            return ROW if wanted[-1] == 1 and down == 1 else (down, BLOCK)
    return None


def dequantize(y: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: Group) -> None:
    """Writes (q - zero) * scale to y, contiguous."""
    values = plane(q.view(torch.uint8) if q.dtype != torch.int8 else q)
    rows, columns = values.shape
    groups = []
    for t in (scale, zero):
        seen = plane(t) if t is not None and t.numel() > 1 else None
        strides = (0, 0) if seen is None else (seen.stride(0), seen.stride(1) if group[1] else 0)
        groups.append(PerGroup(t, *strides))
    gk = group[1] if group[1] > 1 else min(4096, triton.next_power_of_2(columns))
    g = min(32, triton.next_power_of_2(triton.cdiv(columns, gk))) if gk == BLOCK else 1
    bm, fp8 = max(1, 8192 // (g * gk)), q.dtype != torch.int8
    tile: dict[str, Any] = {"GM": max(1, group[0]), "BM": bm, "G": g, "GK": gk, "num_warps": 256 // device.of(q).warp}
    grid = (triton.cdiv(rows, bm) * triton.cdiv(columns, g * gk),)
    given = y, Plane(values, rows, columns, *values.stride()), *groups
    launch(_back, grid, *given, TOP=LARGEST[q.dtype], NATIVE=fp8 and native(q), **tile)


# --- for the reference


def extremes(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest number of each group, 0 included, infinite for NaN, in the shape of the scales."""
    low, high = (torch.where(x.isnan(), other, x) for other in (0.0, float("inf")))
    if group == TENSOR:
        low, high = (torch.cat([t.flatten(), t.new_zeros(1)]) for t in (low, high))
        return low.amin(), high.amax()
    columns = x.shape[-1]
    down, across = group[0], group[1] or columns + 1
    pad = (0, -columns % across if group[1] else 1, *((0, -x.shape[-2] % down) if down > 1 else ()))  # with zeros
    found = []
    for t in (-low, high):
        t = torch.nn.functional.pad(t, pad)
        t = t.reshape(*t.shape[:-1], t.shape[-1] // across, across).amax(-1)
        if down > 1:
            t = t.reshape(*t.shape[:-2], t.shape[-2] // down, down, t.shape[-1]).amax(-2)
        found.append(t.clamp(min=0))
    return -found[0], found[1]


def spread(scale: torch.Tensor, like: torch.Tensor, group: Group) -> torch.Tensor:
    """The scales expanded to one for each number of `like`, or to a shape that broadcasts with it."""
    if group[1] != BLOCK:
        return scale
    if group[0] > 1:
        scale = scale.repeat_interleave(group[0], -2)[..., : like.shape[-2], :]
    return scale.repeat_interleave(BLOCK, -1)[..., : like.shape[-1]]


def checked(op: str, x: object) -> torch.Tensor:
    """x, checked to be a dense floating-point tensor."""
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"{op}: x must be a tensor, but is {type(x).__name__}")
    if x.is_nested:  # it has no shape
        dense_only(op, (x,))
    if not x.is_floating_point() or x.element_size() < 2:
        raise RidgelineError(f"{op}: x must be floating point (float32, float16, bfloat16), but is {x.dtype}")
    return x
