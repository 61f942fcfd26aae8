"""Kernels of gated_rms_norm: rows in registers, read once; wider rows are read twice.

    norm first:  y = x rstd w act(gate)        gate first:  u = x act(gate),  y = u rstd w

A row is one group of columns, which has a mean square of its own. In backward each program keeps its part of dweight in
registers; `_norm_backward.add_up` adds the parts in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.rowwise._norm_backward import add_up
from ridgeline.ops.rowwise._norm_forward import averaged, strides
from ridgeline.ops.rowwise._rows import Maybe, ceil, power
from ridgeline.tiles.activations import sigmoid_slope, silu_slope

FORWARD, BACKWARD = 16384, 8192  # the most columns of a row in registers, half as many in float32, which spilled
PROGRAMS = 4  # of backward, for each multiprocessor


class Given(NamedTuple):
    """What both directions read."""

    x: Any
    gate: Any
    weight: Any


class Layout(NamedTuple):
    """rows; a group's columns and the steps of rows in units of UNIT columns; groups of a row."""

    rows: Any
    units: Any
    groups: Any
    x_step: Any
    gate_step: Any
    dy_step: Any


class Order(NamedTuple):
    """What a kernel is compiled for."""

    NORM_FIRST: bool
    SILU: bool
    WIDE: bool  # rows are wider than a tile
    UNIT: int


@triton.jit
def _gate(g, order: tl.constexpr, dtype: tl.constexpr):
    """act(g), and its derivative."""
    if order.SILU:
        return silu_slope(g, dtype)
    return sigmoid_slope(g, dtype)


@triton.jit
def _values(given, layout, row, group, column, mask, order: tl.constexpr):
    """A tile of x, act(gate) and act'(gate), in float32."""
    at = group * layout.units * order.UNIT + column
    dtype: tl.constexpr = given.x.dtype.element_ty
    x = tl.load(given.x + row * layout.x_step * order.UNIT + at, mask=mask, other=0).to(tl.float32)
    g = tl.load(given.gate + row * layout.gate_step * order.UNIT + at, mask=mask, other=0).to(tl.float32)
    value, slope = _gate(g, order, dtype)
    return x, value, slope


@triton.jit
def _write(place, x, act, scale, given, group, size, column, mask, order: tl.constexpr):
    w = tl.load(given.weight + group * size + column, mask=column < size, other=0).to(tl.float32)
    v = x * scale * act * w if order.NORM_FIRST else x * act * scale * w
    tl.store(place + column, v.to(place.dtype.element_ty), mask=mask)


@triton.jit
def gated_fwd(y, rstd, given, layout, eps, order: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    size, group = layout.units * order.UNIT, tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = given.x.dtype.element_ty
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    place = y + (row * layout.groups + group) * size
    column = tl.arange(0, BN)[None, :]
    mask = (row < layout.rows) & (column < size)
    x, act, _ = _values(given, layout, row, group, column, mask, order)
    v = x if order.NORM_FIRST else x * act
    squares = v * v
    if order.WIDE:
        for start in range(BN, size, BN):
            mask = (row < layout.rows) & (start + column < size)
            x, act, _ = _values(given, layout, row, group, start + column, mask, order)
            v = x if order.NORM_FIRST else x * act
            squares += v * v
    square = averaged(tl.sum(squares, 1), size, dtype) + eps
    scale = tl.div_rn(1.0, tl.sqrt_rn(square)) if dtype == tl.float32 else tl.rsqrt(square)
    scale = scale[:, None]
    if order.WIDE:
        for start in range(0, size, BN):
            mask = (row < layout.rows) & (start + column < size)
            x, act, _ = _values(given, layout, row, group, start + column, mask, order)
            _write(place, x, act, scale, given, group, size, start + column, mask, order)
    else:
        _write(place, x, act, scale, given, group, size, column, mask, order)
    tl.store(rstd + row * layout.groups + group, scale, mask=row < layout.rows)


@triton.jit
def _slopes(dy, given, layout, row, group, column, mask, scale, order: tl.constexpr):
    """dy, x, act, act', the weight, the normalised row and the gradient of that."""
    size = layout.units * order.UNIT
    x, act, slope = _values(given, layout, row, group, column, mask, order)
    w = tl.load(given.weight + group * size + column, mask=column < size, other=0).to(tl.float32)
    at = row * layout.dy_step * order.UNIT + group * size + column
    dy = tl.load(dy + at, mask=mask, other=0).to(tl.float32)
    if order.NORM_FIRST:
        return dy, x, act, slope, w, x * scale, dy * w * act
    return dy, x, act, slope, w, x * act * scale, dy * w


@triton.jit
def gated_dots(dots, dy, given, rstd, layout, order: tl.constexpr, BN: tl.constexpr):
    """For wide rows: the average of a normalised row times its gradient."""
    size, group = layout.units * order.UNIT, tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(rstd + row * layout.groups + group)
    total = tl.zeros([1, BN], tl.float32)
    for start in range(0, size, BN):
        column = (start + tl.arange(0, BN))[None, :]
        _, _, _, _, _, normal, d = _slopes(dy, given, layout, row, group, column, column < size, scale, order)
        total += normal * d
    tl.store(dots + row * layout.groups + group, tl.sum(tl.sum(total, 1), 0) / size)


@triton.jit
def gated_bwd(
    dx, dgate, parts, dots, dy, given, rstd, layout, order: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Tiles of BM rows, and all columns of a group, or a block of them where `dots` holds the rows' averages."""
    size, group = layout.units * order.UNIT, tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = given.x.dtype.element_ty
    column = (tl.program_id(2) * BN + tl.arange(0, BN))[None, :]
    dw = tl.zeros([BM, BN], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(layout.rows, BM), tl.num_programs(0)):
        row = (tile * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        mask = (row < layout.rows) & (column < size)
        scale = tl.load(rstd + row * layout.groups + group, mask=row < layout.rows, other=0)
        slopes = _slopes(dy, given, layout, row, group, column, mask, scale, order)
        d_y, x, act, slope, w, normal, d = slopes
        if order.WIDE:
            turn = tl.load(dots + row * layout.groups + group, mask=row < layout.rows, other=0)
        else:
            turn = averaged(tl.sum(d * normal, 1), size, dtype)[:, None]
        found = (d - normal * turn) * scale
        if order.NORM_FIRST:
            dw += d_y * normal * act
            of_gate = d_y * w * normal * slope
        else:
            dw += d_y * normal
            of_gate = found * x * slope
            found *= act
        at = (row * layout.groups + group) * size + column
        tl.store(dx + at, found.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + at, of_gate.to(dgate.dtype.element_ty), mask=mask)
    if parts is not None:
        place = parts + tl.program_id(0).to(tl.int64) * layout.groups * size + group * size
        tl.store(place + column, tl.sum(dw, 0)[None, :], mask=column < size)


def _order(activation: str, norm_first: bool, wide: bool, unit: int) -> Order:
    return Order(norm_first, activation == "silu", wide, unit)


def _tile(gpu: device.Device, size: int, most: int, bytes_each: int, unit: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: 16 elements of each input for each thread, 2048 or more in all.

    Narrow loads, of fewer than 16 bytes, need registers for addresses: half as many elements."""
    bn, each = min(power(size), most // (1 + bytes_each // 4)), 8 if unit * bytes_each < 16 else 16
    bm = max(1, min(32, (512 if gpu.backend == "cpu" else 128 * each) // bn))
    return bm, bn, min(max(4, bm * bn // (each * gpu.warp)), 1024 // gpu.warp)


def launch_fwd(
    y: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float,
    activation: str, norm_first: bool, groups: int,
) -> None:  # fmt: skip
    """x, gate: (rows, columns) with contiguous rows; y contiguous; rstd (rows, groups)."""
    rows, size = x.shape[0], x.shape[1] // groups
    unit, steps = strides(size, x, gate)
    bm, bn, warps = _tile(device.of(x), size, FORWARD, x.element_size(), unit)
    layout, order = (
        Layout(rows, size // unit, groups, steps[0], steps[1], 0),
        _order(activation, norm_first, bn < size, unit),
    )
    given = Given(x, gate, weight)
    launch(gated_fwd, (ceil(rows, bm), groups), y, rstd, given, layout, eps, order=order, BM=bm, BN=bn, num_warps=warps)


def launch_bwd(
    dx: torch.Tensor, dgate: torch.Tensor, dweight: Maybe, parts: Maybe, dy: torch.Tensor, x: torch.Tensor,
    gate: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, activation: str, norm_first: bool, groups: int,
) -> None:  # fmt: skip
    """As `launch_fwd`; parts: (programs, 1, columns), float32, or None without dweight."""
    rows, size, gpu = x.shape[0], x.shape[1] // groups, device.of(x)
    unit, steps = strides(size, x, gate, dy)
    bm, bn, warps = _tile(gpu, size, BACKWARD, x.element_size(), unit)
    wide = bn < size
    if wide:
        bm, bn, warps = 1, 2048, 4
    layout, order = (
        Layout(rows, size // unit, groups, steps[0], steps[1], steps[2]),
        _order(activation, norm_first, wide, unit),
    )
    given, dots = Given(x, gate, weight), None
    if wide:
        dots = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
        launch(gated_dots, (rows, groups), dots, dy, given, rstd, layout, order=order, BN=4096, num_warps=8)
    count = ceil(rows, bm) if parts is None else parts.shape[0]
    launch(
        gated_bwd, (count, groups, ceil(size, bn)), dx, dgate, parts, dots, dy, given, rstd, layout, order=order,
        BM=bm, BN=bn, num_warps=warps,
    )  # fmt: skip
    if parts is not None:
        add_up(dweight, None, parts, count, unit)
