"""Backward of the norms in Triton: kernels for rows in registers and for wider rows, and their launcher.

    g = dy w                dx = rstd (g - average(g) - x_hat average(g x_hat)) (+ dsum)
    dweight = sum over rows of dy x_hat           dbias = sum over rows of dy

It is persistent: one program per multiprocessor loops over tiles of rows, prefetching the next ones, and keeps its part
of dweight and dbias in float32 registers. It writes them once at its end, and a second kernel adds the programs' parts
in a fixed order. Rows too wide for registers are read twice: for their sums, then for the results.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.ops.rowwise._norm_forward import averaged, factor, strides
from ridgeline.ops.rowwise._rows import Maybe, ceil, key_of, power


class Scratch(NamedTuple):
    """Backward's own, in float32: its programs' parts of dweight and dbias, and a wide row's averages."""

    parts: Maybe
    dots: Maybe


class Incoming(NamedTuple):
    """The gradients of y and of the sum."""

    dy: torch.Tensor
    dsum: Maybe


class Saved(NamedTuple):
    """What backward has from forward: rows (input, sum or output), the parameters, and each row's mean and rstd."""

    rows: torch.Tensor
    weight: Maybe
    bias: Maybe
    mean: Maybe
    rstd: torch.Tensor


class BackwardLayout(NamedTuple):
    """As `Layout`, of the rows that backward reads."""

    rows: int
    units: int
    dy_stride: int
    dsum_stride: int
    saved_stride: int


@triton.jit
def _x_hat(value, center, scale, b, inverse, FROM_OUTPUT: tl.constexpr):
    """The normalised row, from what forward saved: its input, or its output."""
    if FROM_OUTPUT:
        return (value - b) * inverse
    else:
        return (value - center) * scale


@triton.jit
def _vectors(weight, bias, column, mask, OFFSET: tl.constexpr, FROM_OUTPUT: tl.constexpr):
    """The columns' offset + weight and, if x_hat comes from the output, what recovers it: the bias and an inverse."""
    w = 1.0
    b = 0.0
    inverse = 1.0
    if weight is not None:
        w = factor(tl.load(weight + column, mask=mask, other=1), OFFSET)
        if FROM_OUTPUT and OFFSET != 0:
            w = tl.where(mask, w, 1.0)  # an offset of -1 would make it zero beyond the last column
        if FROM_OUTPUT:
            inverse = tl.div_rn(1.0, w)
    if bias is not None and FROM_OUTPUT:
        b = tl.load(bias + column, mask=mask, other=0).to(tl.float32)
    return w, b, inverse


@triton.jit
def _bwd(
    dx,
    scratch,
    incoming,
    saved,
    layout,
    MEAN: tl.constexpr,
    OFFSET: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    NEED: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of BM rows and a block of BN columns: all columns or, if `dots` holds the rows' averages, some of them.

    NEED: bit 0 for the weight's gradient, 1 for the bias's.
    """
    DW: tl.constexpr = NEED & 1
    DB: tl.constexpr = NEED >> 1
    columns = layout.units * UNIT
    dtype: tl.constexpr = incoming.dy.dtype.element_ty
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    w, b, inverse = _vectors(saved.weight, saved.bias, column, column < columns, OFFSET, FROM_OUTPUT)
    dw = tl.zeros((BM, BN), tl.float32)
    db = tl.zeros((BM, BN), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(layout.rows, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        mask = (row < layout.rows) & (column < columns)
        slope = tl.load(incoming.dy + row * layout.dy_stride * UNIT + column, mask=mask, other=0).to(tl.float32)
        value = tl.load(saved.rows + row * layout.saved_stride * UNIT + column, mask=mask, other=0).to(tl.float32)
        scale = tl.load(saved.rstd + row, mask=row < layout.rows, other=0)
        center = 0.0
        if saved.mean is not None:
            center = tl.load(saved.mean + row, mask=row < layout.rows, other=0)
        x_hat = _x_hat(value, center, scale, b, inverse, FROM_OUTPUT)
        if DW:  # here, so that dy's registers are freed early
            dw += slope * x_hat
        if DB:
            db += slope
        g = slope * w
        along = 0.0
        if scratch.dots is not None:
            turn = tl.load(scratch.dots + row, mask=row < layout.rows, other=0)
            if MEAN:
                along = tl.load(scratch.dots + layout.rows + row, mask=row < layout.rows, other=0)
        else:
            turn = averaged(tl.sum(g * x_hat, 1), columns, dtype)[:, None]
            if MEAN:
                along = averaged(tl.sum(g, 1), columns, dtype)[:, None]
        grad = (g - along - x_hat * turn) * scale
        if incoming.dsum is not None:
            grad += tl.load(incoming.dsum + row * layout.dsum_stride * UNIT + column, mask=mask, other=0).to(tl.float32)
        tl.store(dx + row * layout.units * UNIT + column, grad.to(dx.dtype.element_ty), mask=mask)
    if PDL:
        gdc_launch_dependents()  # not earlier: the next kernel's blocks would displace blocks of this one
    part = tl.program_id(0).to(tl.int64) * (DW + DB) * columns
    if DW:
        tl.store(scratch.parts + part + column, tl.sum(dw, 0)[None, :], mask=column < columns)
    if DB:
        tl.store(scratch.parts + part + DW * columns + column, tl.sum(db, 0)[None, :], mask=column < columns)


@triton.jit
def _dots(
    dots,
    dy,
    saved,
    layout,
    MEAN: tl.constexpr,
    OFFSET: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
):
    """Writes a row's average(g x_hat) to `dots` and, with a mean, average(g)."""
    columns = layout.units * UNIT
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(saved.rstd + row)
    center = 0.0
    if saved.mean is not None:
        center = tl.load(saved.mean + row)
    turn = tl.zeros((BN,), tl.float32)
    along = tl.zeros((BN,), tl.float32)
    for start in range(0, columns, BN):
        column = start + tl.arange(0, BN)
        mask = column < columns
        w, b, inverse = _vectors(saved.weight, saved.bias, column, mask, OFFSET, FROM_OUTPUT)
        g = tl.load(dy + row * layout.dy_stride * UNIT + column, mask=mask, other=0).to(tl.float32) * w
        turn += g * _x_hat(
            tl.load(saved.rows + row * layout.saved_stride * UNIT + column, mask=mask, other=0).to(tl.float32),
            center,
            scale,
            b,
            inverse,
            FROM_OUTPUT,
        )
        along += g
    tl.store(dots + row, tl.sum(turn, 0) / columns)
    if MEAN:
        tl.store(dots + layout.rows + row, tl.sum(along, 0) / columns)


@triton.jit
def _reduce(
    parts, dweight, dbias, count, units, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr
):
    """Adds up the programs' parts by blocks of columns: dweight in the first row of programs, dbias in the last."""
    if PDL:
        gdc_wait()
    columns = units * UNIT
    which = tl.program_id(1)
    part = tl.arange(0, BM)[:, None]
    column = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    found = tl.load(
        parts + (part * tl.num_programs(1) + which) * columns + column,
        mask=(part < count) & (column < columns),
        other=0,
    )
    total = tl.sum(found, 0)[None, :]
    if dweight is not None:
        tl.store(dweight + column, total.to(dweight.dtype.element_ty), mask=(column < columns) & (which == 0))
    if dbias is not None:
        tl.store(
            dbias + column,
            total.to(dbias.dtype.element_ty),
            mask=(column < columns) & (which == tl.num_programs(1) - 1),
        )


REGISTERS = 8192  # the most columns of a row that backward holds in registers, with their sums


def bwd_rule(where: device.Device, bn: int, columns: int, size: int, wide: bool, narrow: bool) -> tuning.Config:
    """At least 56 KiB in flight, in tiles of at least 4096 elements; 32 elements per thread.

    size: bytes per element, all inputs together. wide: a row of two inputs fills the tile, which leaves 16 elements per
    thread. narrow: loads are of single elements, whose addresses need registers, so tiles are smaller, with 8 elements
    per thread.
    """
    bm = max(1, min(32, (2048 if narrow else 4096 if bn <= 2048 else 8192) // bn))
    each = 8 if narrow else 16 if wide else 32
    stages = 1 + min(ceil(57344, bm * columns * size), (where.shared_memory - 8192) // (bm * bn * size))
    return {
        "BM": bm,
        "num_warps": max(4, min(1024 // where.warp, bm * bn // (each * where.warp))),
        "STAGES": max(1, min(3 if narrow else 5, stages)),
    }


@cache
def bwd_space(where: device.Device, bn: int, size: int) -> list[tuning.Config]:
    """Tiles whose stages fit shared memory, with 8 to 64 elements per thread."""
    found = [
        {"BM": m, "num_warps": w, "STAGES": s}
        for m in (1, 2, 4, 8, 16, 32)
        for w in (4, 8, 16, 32)
        for s in (2, 3, 4, 5)
    ]
    room, most = where.shared_memory - 8192, 1024 // where.warp

    def fits(c: tuning.Config) -> bool:
        tile = c["BM"] * bn
        return (
            c["num_warps"] <= most
            and tile * size * (c["STAGES"] - 1) <= room
            and 8 <= tile // (where.warp * c["num_warps"]) <= 64
        )

    return [c for c in found if fits(c)]


def launch_bwd(
    name: str, center: bool, dx: torch.Tensor, dweight: Maybe, dbias: Maybe, parts: Maybe, dy: torch.Tensor,
    dsum: Maybe, saved: torch.Tensor, weight: Maybe, bias: Maybe, mean: Maybe, rstd: torch.Tensor, offset: float,
    from_output: bool
) -> None:  # fmt: skip
    rows, columns = dx.shape
    unit, steps = strides(columns, dy, dsum, saved)
    known, layout = Saved(saved, weight, bias, mean, rstd), BackwardLayout(rows, columns // unit, *steps)
    where, bn = device.of(dx), power(columns)
    count = where.multiprocessors
    dots = None
    facts: dict[str, Any] = {"MEAN": center, "OFFSET": offset, "FROM_OUTPUT": from_output, "UNIT": unit}
    options: dict[str, Any]
    narrow = unit * dy.element_size() < 16
    if bn > REGISTERS:
        dots = torch.empty((2 if center else 1, rows), dtype=torch.float32, device=dx.device)
        launch(_dots, (rows,), dots, dy, known, layout, **facts, BN=8192, num_warps=8)
        blocks = ceil(columns, 2048)
        count = min(count, ceil(8 * count, blocks))
        grid: tuple[int, ...] = (count, blocks)
        options = {"BM": 1 if narrow else 2, "BN": 2048, "STAGES": 2, "num_warps": 8}
    else:
        grid = (count,)
        size, wide = sum([t.element_size() for t in (dy, dsum, saved) if t is not None]), bn > 4096 and dsum is None

        def config() -> dict[str, Any]:
            key = key_of(dy.dtype, columns, "narrow") if narrow else key_of(dy.dtype, columns)
            rule, space = partial(bwd_rule, where, bn, columns, size, wide, narrow), partial(bwd_space, where, bn, size)
            return {"BN": bn, **tuning.config(where, name, "bwd", key, rule, space)}

        options = {"config": config, "key": (name, columns)}
    facts |= {"NEED": (dweight is not None) + 2 * (dbias is not None)}
    pdl = early(where)["PDL"] and parts is not None
    args = dx, Scratch(parts, dots), Incoming(dy, dsum), known, layout
    launch(_bwd, grid, *args, **facts, PDL=pdl, **options)
    if parts is not None:
        add_up(dweight, dbias, parts, count, unit)


def add_up(dweight: Maybe, dbias: Maybe, parts: torch.Tensor, count: int, unit: int) -> None:
    """Writes dweight and dbias from the first `count` of their parts, (multiprocessors, 1 or 2, columns) in float32."""
    columns, bm = parts.shape[2], power(count)
    bn = max(32, 8192 // bm)
    grid = ceil(columns, bn), parts.shape[1]
    launch(
        _reduce,
        grid,
        parts,
        dweight,
        dbias,
        count,
        columns // unit,
        BM=bm,
        BN=bn,
        UNIT=unit,
        num_warps=8,
        **early(device.of(parts)),
    )
