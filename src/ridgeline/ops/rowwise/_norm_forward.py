"""Forward of the norms in Triton: kernels for rows in registers and for wider rows, and their launcher.

    v = x (+ residual)      x_hat = (v - mean) rstd,  mean = 0 for rms_norm
    w = offset + weight     y = x_hat w + bias        (rms_norm has the offset, layer_norm the bias)

A row is read once, into registers. Rows too wide for registers are read twice: for their sums, then for the results.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.ops.rowwise._rows import TILE_LIMIT, Maybe, power, tiles


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


# Kernels get sizes and strides in units of UNIT columns, so the compiler knows their divisors, and loads are 16 bytes
# wide in rows of 3000 columns too. Arguments that are None are compiled away.


@triton.jit
def averaged(total, columns, dtype: tl.constexpr):
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
    square = averaged(squares, columns, dtype) + eps
    if dtype == tl.float32:
        return tl.div_rn(1.0, tl.sqrt_rn(square))
    else:
        return tl.rsqrt(square)


@triton.jit
def factor(weight, OFFSET: tl.constexpr):
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
            center = averaged(tl.sum(value, 1), columns, dtype)[:, None]
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
            value *= factor(w, OFFSET)
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
        center = averaged(tl.sum(count * average, 0), columns, dtype)
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
            value *= factor(tl.load(inputs.weight + column, mask=mask, other=0), OFFSET)
        if inputs.bias is not None:
            value += tl.load(inputs.bias + column, mask=mask, other=0).to(tl.float32)
        y = results.y
        tl.store(y + row * layout.units * UNIT + column, value.to(y.dtype.element_ty), mask=mask)


# Launchers. Tensors are (rows, columns) with contiguous rows, statistics are float32 (rows,), outputs are contiguous.
# `name` and `center` (whether a mean is subtracted) belong to the norm and are filled in at registration.


def strides(columns: int, *tensors: Maybe) -> tuple[int, list[int]]:
    """The largest unit up to 8 that divides the columns and all strides, and the strides in units."""
    steps = [0 if t is None else t.stride(0) for t in tensors]
    unit = gcd(8, columns, *steps)
    return unit, [step // unit for step in steps]


def launch_fwd(
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
