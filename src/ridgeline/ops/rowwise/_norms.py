"""Shared by the norms: kernels, launchers, torch ops and autograd of layer_norm, rms_norm, and both after a sum.

    forward:   v = x (+ residual)      x_hat = (v - mean) rstd,  mean = 0 for rms_norm
               w = offset + weight     y = x_hat w + bias        (rms_norm has the offset, layer_norm the bias)
    backward:  g = dy w                dx = rstd (g - average(g) - x_hat average(g x_hat)) (+ dsum)
               dweight = sum over rows of dy x_hat           dbias = sum over rows of dy

Forward reads a row once, into registers. Backward is persistent: one program per multiprocessor loops over tiles of
rows, prefetching the next ones, and keeps its part of dweight and dbias in float32 registers. It writes them once at
its end, and a second kernel adds the programs' parts in a fixed order. Rows too wide for registers are read twice: for
their sums, then for the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import gcd, inf
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, early, first_order, kernel_op, launch, tracing
from ridgeline.op import Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.rowwise._rows import TILE_LIMIT, as_rows, ceil, empty_rows, key_of, power, tiles
from ridgeline.select import by_kind, eager, run

Maybe = torch.Tensor | None


class Results(NamedTuple):
    """What forward writes: y, the sum after an addition, and what backward needs of each row's mean and rstd."""

    y: torch.Tensor
    total: Maybe
    mean: Maybe
    rstd: Maybe


class Inputs(NamedTuple):
    """What forward reads: rows, and the weight and bias of their columns."""

    x: torch.Tensor
    residual: Maybe
    weight: Maybe
    bias: Maybe


class Layout(NamedTuple):
    """The rows that forward reads; `units` is their columns, in units of UNIT as the strides are."""

    rows: int
    units: int
    x_stride: int
    residual_stride: int


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


# Kernels get sizes and strides in units of UNIT columns, so the compiler knows their divisors, and loads are 16 bytes
# wide in rows of 3000 columns too. Arguments that are None are compiled away.


@triton.jit
def _average(total, columns, dtype: tl.constexpr):
    """total / columns, rounded to nearest for float32, where a row's error would affect all its elements.

    Half precision hides it, and an exact division costs each thread as much as several elements.
    """
    if dtype == tl.float32:
        return tl.div_rn(total, columns * 1.0)
    else:
        return total * (1.0 / columns)


@triton.jit
def _scale(squares, columns, eps, dtype: tl.constexpr):
    """1 / sqrt(average + eps), rounded as the average is."""
    square = _average(squares, columns, dtype) + eps
    if dtype == tl.float32:
        return tl.div_rn(1.0, tl.sqrt_rn(square))
    else:
        return tl.rsqrt(square)


@triton.jit
def _factor(weight, OFFSET: tl.constexpr):
    """offset + weight in float32."""
    if OFFSET == 0:
        return weight.to(tl.float32)
    else:
        return weight.to(tl.float32) + OFFSET


@triton.jit
def _fwd(
    results,
    inputs,
    layout,
    eps,
    MEAN: tl.constexpr,
    OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = layout.units * UNIT
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    column = tl.arange(0, BN)[None, :]
    if inputs.weight is not None and BN <= 8192:  # wider tiles lack registers and load the weight later
        w = tl.load(inputs.weight + column, mask=column < columns, other=1)
    if inputs.bias is not None and BN <= 8192:
        b = tl.load(inputs.bias + column, mask=column < columns, other=0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(layout.rows, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        mask = (row < layout.rows) & (column < columns)
        value = tl.load(inputs.x + row * layout.x_stride * UNIT + column, mask=mask, other=0).to(tl.float32)
        if inputs.residual is not None:
            value += tl.load(inputs.residual + row * layout.residual_stride * UNIT + column, mask=mask, other=0).to(
                tl.float32
            )
            total = results.total
            tl.store(total + row * layout.units * UNIT + column, value.to(total.dtype.element_ty), mask=mask)
        if MEAN:
            center = _average(tl.sum(value, 1), columns, dtype)[:, None]
            value = tl.where(column < columns, value - center, 0)
            if results.mean is not None:
                tl.store(results.mean + row, center, mask=row < layout.rows)
        scale = _scale(tl.sum(value * value, 1), columns, eps, dtype)[:, None]
        if results.rstd is not None:
            tl.store(results.rstd + row, scale, mask=row < layout.rows)
        value *= scale
        if LLAMA:
            value = value.to(dtype).to(tl.float32)
        if inputs.weight is not None:
            if BN > 8192:
                w = tl.load(inputs.weight + column, mask=column < columns, other=1)
            value *= _factor(w, OFFSET)
        if inputs.bias is not None:
            if BN > 8192:
                b = tl.load(inputs.bias + column, mask=column < columns, other=0)
            value += b.to(tl.float32)
        y = results.y
        tl.store(y + row * layout.units * UNIT + column, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_wide(
    results,
    inputs,
    layout,
    eps,
    MEAN: tl.constexpr,
    OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
    UNIT: tl.constexpr,
    BN: tl.constexpr,
):
    """One row per program, in chunks: each lane's mean and squared distances by Welford's update, merged as by Chan."""
    columns = layout.units * UNIT
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    lane = tl.arange(0, BN)
    row = tl.program_id(0).to(tl.int64)
    average = tl.zeros((BN,), tl.float32)
    squares = tl.zeros((BN,), tl.float32)
    for chunk in range(tl.cdiv(columns, BN)):
        column = chunk * BN + lane
        mask = column < columns
        value = tl.load(inputs.x + row * layout.x_stride * UNIT + column, mask=mask, other=0).to(tl.float32)
        if inputs.residual is not None:
            value += tl.load(inputs.residual + row * layout.residual_stride * UNIT + column, mask=mask, other=0).to(
                tl.float32
            )
            total = results.total
            tl.store(total + row * layout.units * UNIT + column, value.to(total.dtype.element_ty), mask=mask)
        if MEAN:
            apart = tl.where(mask, value - average, 0)
            average += apart / (chunk + 1)
            squares += apart * tl.where(mask, value - average, 0)
        else:
            squares += value * value
    center = 0.0
    if MEAN:
        count = (tl.maximum(columns - lane + BN - 1, 0) // BN).to(tl.float32)  # columns of a lane
        center = _average(tl.sum(count * average, 0), columns, dtype)
        squares += count * (average - center) * (average - center)
        if results.mean is not None:
            tl.store(results.mean + row, center)
    scale = _scale(tl.sum(squares, 0), columns, eps, dtype)
    if results.rstd is not None:
        tl.store(results.rstd + row, scale)
    for start in range(0, columns, BN):
        column = start + lane
        mask = column < columns
        value = tl.load(inputs.x + row * layout.x_stride * UNIT + column, mask=mask, other=0).to(tl.float32)
        if inputs.residual is not None:
            value += tl.load(inputs.residual + row * layout.residual_stride * UNIT + column, mask=mask, other=0).to(
                tl.float32
            )
        value = (value - center) * scale
        if LLAMA:
            value = value.to(dtype).to(tl.float32)
        if inputs.weight is not None:
            value *= _factor(tl.load(inputs.weight + column, mask=mask, other=0), OFFSET)
        if inputs.bias is not None:
            value += tl.load(inputs.bias + column, mask=mask, other=0).to(tl.float32)
        y = results.y
        tl.store(y + row * layout.units * UNIT + column, value.to(y.dtype.element_ty), mask=mask)


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
        w = _factor(tl.load(weight + column, mask=mask, other=1), OFFSET)
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
            turn = _average(tl.sum(g * x_hat, 1), columns, dtype)[:, None]
            if MEAN:
                along = _average(tl.sum(g, 1), columns, dtype)[:, None]
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


# Launchers. Tensors are (rows, columns) with contiguous rows, statistics are float32 (rows,), outputs are contiguous.
# `name` and `center` (whether a mean is subtracted) belong to the norm and are filled in at registration.


def strides(columns: int, *tensors: Maybe) -> tuple[int, list[int]]:
    """The largest unit up to 8 that divides the columns and all strides, and the strides in units."""
    steps = [0 if t is None else t.stride(0) for t in tensors]
    unit = gcd(8, columns, *steps)
    return unit, [step // unit for step in steps]


def _launch_fwd(
    name: str, center: bool, y: torch.Tensor, total: Maybe, mean: Maybe, rstd: Maybe,
    x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: float, offset: float, rounding: str
) -> None:  # fmt: skip
    rows, columns = x.shape
    unit, steps = strides(columns, x, residual)
    given = Inputs(x, residual, weight, bias)
    args = Results(y, total, mean, rstd), given, Layout(rows, columns // unit, *steps), eps
    inputs: tuple[torch.Tensor, ...] = (x,) if residual is None else (x, residual)
    facts: dict[str, Any] = {"MEAN": center, "OFFSET": offset, "LLAMA": rounding == "llama", "UNIT": unit}
    bn = power(columns)
    narrow = unit * x.element_size() < 16
    if bn * 4 * len(inputs) > TILE_LIMIT:
        bn = (8192 if narrow else 16384) // len(inputs)
        launch(_fwd_wide, (rows,), *args, **facts, BN=bn, num_warps=16)
        return
    if narrow and bn < 8192:  # loads of single elements need registers for addresses: halve the tiles
        inputs *= 2
    # The work per row costs a thread as much as several elements.
    each = 64 if center and x.element_size() < 4 else 32
    config, grid = tiles(name, _fwd, rows, bn, *inputs, each=each)
    launch(_fwd, grid, *args, **facts, config=config, key=(name, bn, narrow))


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


def _launch_bwd(
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


class Norm:
    """The torch ops, the autograd function and the checks of one norm. Calling it runs the norm.

    center: whether a mean is subtracted (layer_norm). add: whether x + residual is normalised, and returned too.
    """

    op: Op

    def __init__(self, name: str, *, center: bool, add: bool):
        self.name, self.center, self.add = name, center, add
        tensors = "Tensor? weight, Tensor? bias"
        self.fwd = fwd = kernel_op(
            f"{name}_fwd(Tensor x, Tensor? residual, {tensors}, float eps, float offset, str rounding, int stats, "
            "str? impl) -> Tensor[]"
        )(self._forward)
        self.bwd = bwd = kernel_op(
            f"{name}_bwd(Tensor dy, Tensor? dsum, Tensor saved, {tensors}, Tensor? mean, Tensor rstd, "
            "float offset, bool from_output, int need, str? impl) -> Tensor[]"
        )(self._backward)
        stats = 2 if center else 1

        class Differentiable(Function):
            @staticmethod
            def forward(
                ctx: Any, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: float, offset: float,
                rounding: str, thrifty: bool, impl: str | None
            ) -> Any:  # fmt: skip
                made = fwd(x, residual, weight, bias, eps, offset, rounding, 1 if thrifty else stats, impl)
                saved = made[0] if thrifty else made[1] if add else x
                ctx.save_for_backward(saved, weight, bias, made[-2] if center and not thrifty else None, made[-1])
                ctx.facts = offset, thrifty, impl
                if not add:
                    return made[0]
                if not torch.compiler.is_compiling():
                    ctx.set_materialize_grads(False)  # no zeros for a result that goes unused
                return made[0], made[1]

            @staticmethod
            @first_order
            def backward(ctx: Any, dy: Maybe, dsum: Maybe = None) -> Any:
                if dy is None:
                    return dsum, dsum, *[None] * 7
                saved, weight, bias, mean, rstd = ctx.saved_tensors
                offset, thrifty, impl = ctx.facts
                _, _, scaled, shifted, *_ = ctx.needs_input_grad
                made = bwd(dy, dsum, saved, weight, bias, mean, rstd, offset, thrifty, scaled + 2 * shifted, impl)
                dx = made[0]
                return dx, dx if add else None, made[1] if scaled else None, made[-1] if shifted else None, *[None] * 5

        Differentiable.__name__ = Differentiable.__qualname__ = name
        self.function = Differentiable
        self.look = by_kind(4, optional=3)(self._look)

    def __call__(
        self,
        impl: str | None,
        x: torch.Tensor,
        residual: Maybe,
        weight: Maybe,
        bias: Maybe,
        eps: float | None,
        thrifty: bool = False,
        offset: float = 0.0,
        rounding: str = "once",
    ) -> Any:
        """Runs `impl`, or the implementation chosen for the call. thrifty: backward uses the output, not the input."""
        plain, eps, offset, widen = self.look(x, residual, weight, bias, impl, eps, thrifty, offset, rounding)
        if widen:
            wide = x.float(), None if residual is None else residual.float()
            made = self(impl, *wide, weight, bias, eps, thrifty, offset)
            return (made[0], made[1].to(x.dtype)) if self.add else made
        if plain is not None:
            given = (x, *((residual,) if self.add else ()), weight, *((bias,) if self.center else ()))
            return plain(*given, eps, **({} if self.center else {"offset": offset, "rounding": rounding}))
        if torch.is_grad_enabled():
            for t in (x, residual, weight, bias):
                if t is not None and t.requires_grad:
                    args = x, residual, weight, bias, eps, offset, rounding, thrifty, impl
                    return differentiate(self.function, *args)
        made = self.fwd(x, residual, weight, bias, eps, offset, rounding, 0, impl)
        return (made[0], made[1]) if self.add else made[0]

    def _invertible(self, x: torch.Tensor, weight: Maybe, offset: float, rounding: str) -> None:
        """Raises RidgelineError if backward could not, or should not, take the normalised row from the result."""
        made = result_dtype(x, weight, rounding)
        if made != x.dtype:
            raise RidgelineError(
                f"{self.name}: memory_efficient=True saves the result in place of x, but rounding='llama' makes it "
                f"{made} where x is {x.dtype}; give a weight in {x.dtype}, or leave memory_efficient out"
            )
        if weight is None or not torch.is_grad_enabled() or not readable(weight):
            return
        if not (widened(weight) + offset if offset else weight).all():
            what = "offset + weight" if offset else "the weight"
            reason = f"memory_efficient=True divides by {what} in backward, but {what} has a zero"
            raise RidgelineError(f"{self.name}: {reason}")

    def _look(
        self, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, impl: str | None, eps: float | None,
        thrifty: bool, offset: float, rounding: str
    ) -> tuple[Callable[..., Any] | None, float, float, bool]:  # fmt: skip
        """Checks a call. Returns what runs it as `_plain` does, eps, offset, and whether it runs in float32.

        Autocast makes half precision float32, as for torch's own; the sum is rounded to the given dtype."""
        plain = self._plain(impl, x, residual, weight, bias)
        if eps is None and self.name == "rms_norm":  # torch's default there, also for half precision
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        eps, offset = known_eps(self.name, eps), known_offset(self.name, offset, rounding, weight)
        if thrifty:
            self._invertible(x, weight, offset, rounding)
        halves = x.dtype in (torch.float16, torch.bfloat16)
        return plain, eps, offset, halves and rounding == "once" and x.is_cuda and torch.is_autocast_enabled("cuda")

    def _plain(
        self, impl: str | None, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe
    ) -> Callable[..., Any] | None:
        """The plain-PyTorch implementation that runs a call, or None if kernels do.

        Raises RidgelineError if the inputs do not fit together.
        """
        named = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        for name, t in named.items():
            optional = not (name == "x" or (name == "residual" and self.add) or (name == "weight" and self.add))
            if not isinstance(t, torch.Tensor) and not (t is None and optional):
                wanted = f"a tensor{' or None' if optional else ''}"
                raise RidgelineError(f"{self.name}: {name} must be {wanted}, but is {type(t).__name__}")
        if not x.dim():
            raise RidgelineError(f"{self.name}: x must have at least one dimension, but has none")
        for name, t in named.items():
            if t is None:
                continue
            if not t.is_floating_point():
                wanted = "floating point (float32, float16, bfloat16)"
                raise RidgelineError(f"{self.name}: {name} must be {wanted}, but is {t.dtype}")
            if t.device != x.device:
                found = f"{name} is on {t.device} but x on {x.device}"
                raise RidgelineError(f"{self.name}: {found}; they must share one device")
            if name in ("weight", "bias") and t.shape != x.shape[-1:]:
                wanted, found = f"the shape ({x.shape[-1]},) of x's last dimension", tuple(t.shape)
                raise RidgelineError(f"{self.name}: {name} must have {wanted}, but has {found}")
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise RidgelineError(
                f"{self.name}: residual must have x's shape and dtype, {tuple(x.shape)} in {x.dtype}, "
                f"but has {tuple(residual.shape)} in {residual.dtype}"
            )
        chosen = eager(self.op, impl, *[t for t in named.values() if t is not None])
        return None if chosen is None else chosen.call

    def _forward(
        self, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: float, offset: float,
        rounding: str, stats: int, impl: str | None
    ) -> list[torch.Tensor]:  # fmt: skip
        """y, the sum if there is one, and the last `stats` of each row's mean and rstd."""
        y = empty_rows(x, -1, result_dtype(x, weight, rounding))
        total = empty_rows(x, -1, None) if self.add else None
        mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats > 1 else None
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats else None
        if not tracing() and x.numel():
            outs: Any = as_rows(y, -1), _rows(total), _flat(mean), _flat(rstd)
            inputs = as_rows(x, -1), _rows(residual), _vector(weight), _vector(bias)
            run(self.op, "fwd", impl, outs, *inputs, eps, offset, rounding)
        return [t for t in (y, total, mean, rstd) if t is not None]

    def _backward(
        self, dy: torch.Tensor, dsum: Maybe, saved: torch.Tensor, weight: Maybe, bias: Maybe, mean: Maybe,
        rstd: torch.Tensor, offset: float, from_output: bool, need: int, impl: str | None
    ) -> list[torch.Tensor]:  # fmt: skip
        """dx, and dweight and dbias as the bits of `need` say."""
        dx = empty_rows(saved, -1, None)
        dweight = (
            torch.empty(weight.shape, dtype=weight.dtype, device=dy.device) if need & 1 and weight is not None else None
        )
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=dy.device) if need & 2 and bias is not None else None
        made = [t for t in (dx, dweight, dbias) if t is not None]
        if tracing():
            return made
        if not dy.numel():
            return [t.zero_() for t in made]
        parts = None
        if len(made) > 1:
            size = (device.of(dy).multiprocessors, len(made) - 1, dy.shape[-1])
            parts = torch.empty(size, dtype=torch.float32, device=dy.device)
        inputs = (
            as_rows(dy, -1),
            _rows(dsum),
            as_rows(saved, -1),
            _vector(weight),
            _vector(bias),
            _flat(mean),
            rstd.view(-1),
        )
        outs: Any = as_rows(dx, -1), dweight, dbias, parts
        run(self.op, "bwd", impl, outs, *inputs, offset, from_output)
        return made

    def triton(self) -> None:
        """Registers the kernels above as the implementation `triton`."""
        self.op.kernel(
            "triton",
            "a row in registers, read once; backward is persistent and keeps dweight and dbias in registers",
            kind="triton",
            served=True,
            fwd=partial(_launch_fwd, self.name, self.center),
            bwd=partial(_launch_bwd, self.name, self.center),
        )

    def cost(
        self, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, rounding: str = "once"
    ) -> tuple[Cost, Cost]:
        """Forward reads x (and the residual) and writes y (and the sum).

        Backward reads what was saved and the gradients of what was written, and writes dx, which is the residual's
        gradient too. Weights are read, and their gradients written, once.
        """
        one, count = nbytes(x), 2 if self.add else 1
        written = x.numel() * result_dtype(x, weight, rounding).itemsize + (count - 1) * one
        weights = sum([nbytes(t) for t in (weight, bias) if t is not None])
        scale = 0 if weight is None else nbytes(weight)
        return (
            Cost(count * one + weights, written, (6 if self.center else 4) * x.numel()),
            Cost(one + written + scale, one + weights, (11 if self.center else 9) * x.numel()),
        )


ROUNDINGS = ("once", "llama")


def known_eps(name: str, eps: Any) -> float:
    """A norm's eps as a float. Raises RidgelineError if it is not a number of at least 0."""
    if not isinstance(eps, int | float) or not eps >= 0:
        raise RidgelineError(f"{name}: eps must be a number of at least 0, but is {eps!r}")
    return float(eps)


def result_dtype(x: torch.Tensor, weight: Maybe, rounding: str) -> torch.dtype:
    """The dtype of y: x's, or for "llama" that of x times the weight."""
    return x.dtype if weight is None or rounding == "once" else torch.promote_types(x.dtype, weight.dtype)


def scaled(x_hat: torch.Tensor, weight: Maybe, offset: float, rounding: str, dtype: torch.dtype) -> torch.Tensor:
    """y in plain PyTorch, from the normalised row. dtype: x's."""
    if weight is None:
        return x_hat.to(dtype)
    w = widened(weight) + offset if offset else weight
    if rounding == "once":
        return (x_hat * w).to(dtype)
    return (x_hat.to(dtype) * w).to(torch.promote_types(dtype, weight.dtype))


def torch_rms_norm(x: torch.Tensor, weight: Maybe, eps: float, offset: float, rounding: str) -> torch.Tensor:
    """rms_norm by PyTorch's own kernel."""
    if rounding == "llama":
        return scaled(F.rms_norm(x, x.shape[-1:], None, eps), weight, offset, rounding, x.dtype)
    v, w = alike(x, widened(weight) + offset if weight is not None and offset else weight)
    return F.rms_norm(v, x.shape[-1:], w, eps).to(x.dtype)


def known_offset(name: str, offset: Any, rounding: Any, weight: Maybe) -> float:
    """A norm's offset as a float. Raises RidgelineError if it cannot be one, or if there is no such rounding."""
    if rounding not in ROUNDINGS:
        raise RidgelineError(f"{name}: rounding must be 'once' or 'llama', but is {rounding!r}")
    if not isinstance(offset, int | float) or not abs(offset) < inf:
        raise RidgelineError(f"{name}: offset must be a finite number, but is {offset!r}")
    if offset and weight is None:
        raise RidgelineError(f"{name}: offset={offset!r} is added to the weight, but weight is None")
    return float(offset)


def _rows(t: Maybe) -> Maybe:
    return None if t is None else as_rows(t, -1)


def _flat(t: Maybe) -> Maybe:
    return None if t is None else t.view(-1)


def _vector(t: Maybe) -> Maybe:
    return t if t is None or t.is_contiguous() else t.contiguous()


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or float64 unchanged: how references compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def alike(x: torch.Tensor, *vectors: Maybe) -> tuple[Any, ...]:
    """x and vectors of one dtype, as torch's own norms need on a GPU: unchanged, or all widened if one differs."""
    same = all([t is None or t.dtype == x.dtype for t in vectors])
    return (x, *vectors) if same else (widened(x), *[None if t is None else widened(t) for t in vectors])


@dataclass(frozen=True, init=False)
class Near(Spec):
    """Random data around a value; by default like the weights of a norm in training."""

    scale: float = 0.1
    about: float = 1.0

    def __init__(self, *shape: int, scale: float = 0.1, about: float = 1.0, **facts: Any):
        super().__init__(*shape, **facts)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "about", about)

    def make(self, *args: Any) -> torch.Tensor:
        x = super().make(*args)
        with torch.no_grad():
            return x.mul_(self.scale).add_(self.about)
