"""Any permutation in Triton: dimensions are merged, and tiles are wide on both sides.

After dimensions that stay neighbours are merged, y's last dimension is either x's innermost too, and rows of it move
whole, or a tile spans both innermost dimensions, and several of the next one if they are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.op import RidgelineError
from ridgeline.ops.movement._bytes import aligned

MOST = (1 << 31) - 256  # of a side, for kernels whose tiles reach past it
Dims = list[tuple[int, int]]  # sizes, and strides in x


class Rows(NamedTuple):
    """How many rows; their columns, and x's step between these; sizes and x's steps that number rows, inner first."""

    rows: int
    columns: int
    step: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]


class Units(NamedTuple):
    """The batches; rows i that follow each other in y, rows j that do in x, or almost; their columns.
    Steps in x between i, j and columns, in y between j; sizes and steps of batches."""

    batches: int
    down: int
    across: int
    columns: int
    x_down: int
    x_across: int
    step: int
    y_across: int
    sizes: tuple[int, ...]
    x_steps: tuple[int, ...]
    y_steps: tuple[int, ...]


class Squares(NamedTuple):
    """The batches; columns and rows of x; x's steps between both, y's between columns; sizes and steps of batches."""

    batches: int
    columns: int
    rows: int
    x_column: int
    x_row: int
    y_column: int
    sizes: tuple[int, ...]
    x_steps: tuple[int, ...]
    y_steps: tuple[int, ...]


@triton.jit
def _times(n, VEC: tl.constexpr):
    """n, a multiple of VEC, so that the compiler sees it; it looks for multiples of 16 alone."""
    return n // VEC * VEC


@triton.jit
def _place(number, sizes, steps, VEC: tl.constexpr):
    """The offset of a row or batch of this number."""
    at = number * 0
    for d in tl.static_range(len(sizes)):
        if d + 1 == len(sizes):
            at += number * _times(steps[d], VEC)
        else:
            at += number % sizes[d] * _times(steps[d], VEC)
            number = number // sizes[d]
    return at


@triton.jit
def _rows(y, x, shape, XVEC: tl.constexpr, YVEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Moves BM rows, or BN columns of one, of y: its rows are adjacent."""
    across = tl.cdiv(shape.columns, BN)
    row = ((tl.program_id(0) // across) * BM).to(tl.int64) + tl.arange(0, BM)[:, None]
    column = ((tl.program_id(0) % across) * BN).to(tl.int64) + tl.arange(0, BN)[None, :]
    inside = (row < shape.rows) & (column < _times(shape.columns, YVEC))
    at = _place(row, shape.sizes, shape.steps, XVEC) + column * shape.step
    moved = tl.load(x + at, mask=inside)
    tl.store(y + row * _times(shape.columns, YVEC) + column, moved, mask=inside)


@triton.jit
def _units(y, x, shape, XVEC: tl.constexpr, YVEC: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr):
    """Moves BI x BJ short rows, so that both sides have neighbours: BJ rows of x and BI rows of y."""
    down = tl.cdiv(shape.down, BI)
    tiles = down * tl.cdiv(shape.across, BJ)
    tile, batch = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i = (tile % down * BI + tl.arange(0, BI)).to(tl.int64)[None, :, None]
    j = (tile // down * BJ + tl.arange(0, BJ)).to(tl.int64)[:, None, None]
    c = tl.arange(0, BC)[None, None, :]
    columns = _times(shape.columns, YVEC)
    inside = (i < shape.down) & (j < shape.across) & (c < columns)
    x += _place(batch, shape.sizes, shape.x_steps, XVEC)
    y += _place(batch, shape.sizes, shape.y_steps, YVEC)
    at = i * _times(shape.x_down, XVEC) + j * _times(shape.x_across, XVEC) + c.to(tl.int64) * shape.step
    tl.store(y + (i * columns + j * _times(shape.y_across, YVEC) + c), tl.load(x + at, mask=inside), mask=inside)


@triton.jit
def _squares(
    y, x, shape, XVEC: tl.constexpr, YVEC: tl.constexpr, FAR: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr
):  # fmt: skip
    """Moves tiles of BC columns and BR rows of x, of BB batches. FAR: offsets within a tile need 64 bits."""
    across, down = tl.cdiv(shape.columns, BC), tl.cdiv(shape.rows, BR)
    tile = tl.program_id(0) % (across * down)
    batch = (tl.program_id(0) // (across * down) * BB).to(tl.int64) + tl.arange(0, BB)[:, None, None]
    c0, r0 = (tile % across * BC).to(tl.int64), (tile // across * BR).to(tl.int64)
    c, r = tl.arange(0, BC)[None, :, None], tl.arange(0, BR)[None, None, :]
    if FAR:
        c, r = c.to(tl.int64), r.to(tl.int64)
    some = batch < shape.batches
    x_row, y_column = _times(shape.x_row, XVEC), _times(shape.y_column, YVEC)
    x += c0 * shape.x_column + r0 * x_row + _place(batch, shape.sizes, shape.x_steps, XVEC)
    y += c0 * y_column + r0 + _place(batch, shape.sizes, shape.y_steps, YVEC)
    inside = some & (c0 + c < _times(shape.columns, XVEC)) & (r0 + r < shape.rows)
    moved = tl.load(x + (c * shape.x_column + r * x_row), mask=inside)
    inside = some & (c0 + c < shape.columns) & (r0 + r < _times(shape.rows, YVEC))
    tl.store(y + (c * y_column + r), moved, mask=inside)


def merged(sizes: Any, strides: Any) -> Dims:
    """The dimensions of a view that x has and a contiguous y, without those of size 1, merged where they may be."""
    found: Dims = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == stride * size:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found or [(1, 1)]


def order_of(x: torch.Tensor, dims: Any) -> tuple[int, ...]:
    """The dimensions in their new order; without `dims` the last two are swapped."""
    many = x.dim()
    return tuple(dims) if dims is not None else (*range(many - 2), many - 1, many - 2)


def inverse(dims: Sequence[int]) -> tuple[int, ...]:
    """The order that undoes this one."""
    return tuple(dims) if len(dims) == 2 else tuple(sorted(range(len(dims)), key=dims.__getitem__))


def matrices(x: torch.Tensor, dims: Any) -> torch.Tensor | None:
    """x as contiguous matrices (batches, rows, columns) that the permutation transposes, or None."""
    if not x.is_contiguous():
        return None
    dims = order_of(x, dims)
    found = merged([x.shape[d] for d in dims], [x.stride(d) for d in dims])
    if len(found) == 1:
        return x.view(1, 1, x.numel())
    (columns, step), (rows, _) = found[-2:]
    if step != 1 or len(found) > 3:
        return None
    return x.view(found[0][0] if len(found) == 3 else 1, rows, columns)


def too_large(x: torch.Tensor, dims: Any = None, *_: Any) -> str | None:
    """Why the kernels cannot take a tensor of these sizes: tiles may reach past a side, and each is a block."""
    order = order_of(x, dims)
    shape = [x.shape[d] for d in order]
    strides = [prod(x.shape[d % x.dim() + 1 :]) for d in order]
    found = merged(shape, strides)
    sides = [n for n, _ in found[-2:]] if len(found) > 1 else [1]
    tiles = prod([n for n, _ in found[:-2]]) * prod([-(-n // 32) for n in sides])
    if max(sides) <= MOST and tiles < 1 << 31:
        return None
    return "a side or the number of tiles exceeds what the kernels' integers count"


def checked_order(x: Any, dims: Any) -> tuple[int, ...]:
    """The dimensions in their new order, at least 0. Raises RidgelineError if there is none."""
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"transpose: x must be a tensor, but is {type(x).__name__}")
    many = x.dim()
    if dims is None:
        if many < 2:
            raise RidgelineError(
                f"transpose: without dims x must have at least two dimensions, but has shape {tuple(x.shape)}"
            )
        return order_of(x, None)
    if isinstance(dims, Sequence) and all([type(d) is int and -many <= d < many for d in dims]):
        order = tuple([d % many for d in dims])
        if sorted(order) == list(range(many)):
            return order
    raise RidgelineError(f"transpose: dims must name each of the {many} dimensions of x once, but is {dims!r}")


def contiguous_only(x: torch.Tensor, dims: Any = None, *_: Any) -> str | None:
    if not x.is_contiguous():
        return "it takes a contiguous tensor"
    if matrices(x, dims) is None:
        return "it transposes matrices, and merged dimensions do not make this permutation one"
    return too_large(x, dims)


def boxes_only(x: torch.Tensor, dims: Any = None, *_: Any) -> str | None:
    """Why tensor maps cannot describe x or its transpose, or None."""
    reason = contiguous_only(x, dims)
    planes = None if reason else matrices(x, dims)
    if planes is not None and any(n * x.element_size() % 16 for n in planes.shape[-2:]):
        return "it takes matrices whose sides are multiples of 16 bytes"
    return reason or aligned(x)


def letters(x: torch.Tensor, dims: Any = None, **_: Any) -> str:
    names = "abcdefghijklmnopqrstuvwxyz"[: x.dim()]
    return f"x {names} -> {''.join([names[d] for d in checked_order(x, dims)])}"


def _vec(size: int, *numbers: int) -> int:
    """The most elements, up to 16 bytes, that divide all these numbers."""
    packs = [v for v in (16, 8, 4, 2, 1) if v * size <= 16]
    return next(v for v in packs if not any(n % v for n in numbers))


def _up(n: int, most: int) -> int:
    return min(triton.next_power_of_2(n), most)


def permute(y: torch.Tensor, x: torch.Tensor, dims: Any) -> None:
    """Fills contiguous y with x's dimensions in this order."""
    if x.dtype in (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2):
        y, x = y.view(torch.uint8), x.view(torch.uint8)
    found, size = merged([x.shape[d] for d in dims], [x.stride(d) for d in dims]), x.element_size()
    inner = min(range(len(found)), key=lambda d: (found[d][1] or MOST, -d))
    if inner == len(found) - 1:
        return _move_rows(y, x, found, size)
    return _move_squares(y, x, found, inner, size)


SHORT = 128  # bytes of a row that alone is too short for memory's pages


def _move_rows(y: torch.Tensor, x: torch.Tensor, found: Dims, size: int) -> None:
    *outer, (columns, step) = found
    if columns * size < SHORT and len(outer) > 1:
        near = min(range(len(outer)), key=lambda d: (outer[d][1] or MOST, -d))
        if near != len(outer) - 1:
            return _move_units(y, x, found, near, size)
    steps = tuple(s for _, s in reversed(outer))
    bn = _up(columns, 4096 // size)
    bm = _up(prod([n for n, _ in outer]), max(1, 8192 // size // bn))
    shape = Rows(prod([n for n, _ in outer]), columns, step, tuple(n for n, _ in reversed(outer)), steps)
    facts: dict[str, Any] = {
        "XVEC": _vec(size, *steps),
        "YVEC": _vec(size, columns),
        "BM": bm,
        "BN": bn,
        "num_warps": 4,
    }
    launch(_rows, (triton.cdiv(shape.rows, bm) * triton.cdiv(columns, bn),), y, x, shape, **facts)


def _move_units(y: torch.Tensor, x: torch.Tensor, found: Dims, near: int, size: int) -> None:
    """near: the dimension whose rows are closest to each other in x."""
    room = [prod([n for n, _ in found[d + 1 :]]) for d in range(len(found))]
    (down, x_down), (across, x_across), (columns, step) = found[-2], found[near], found[-1]
    batches = [d for d in reversed(range(len(found) - 2)) if d != near]
    sizes, x_steps = (tuple(found[d][n] for d in batches) for n in (0, 1))
    y_steps = tuple(room[d] for d in batches)
    count, bc = prod(sizes), triton.next_power_of_2(columns)
    bj = _up(across, max(1, 256 // size // bc))
    bi = _up(down, max(1, 16384 // size // (bc * bj)))
    if not sizes:
        sizes, x_steps, y_steps = (1,), (0,), (0,)
    shape = Units(count, down, across, columns, x_down, x_across, step, room[near], sizes, x_steps, y_steps)
    facts: dict[str, Any] = {"XVEC": _vec(size, columns, x_down, x_across, *x_steps), "YVEC": _vec(size, columns)}
    tiles = triton.cdiv(down, bi) * triton.cdiv(across, bj) * count
    launch(_units, (tiles,), y, x, shape, **facts, BI=bi, BJ=bj, BC=bc, num_warps=4 if bi * bj * bc < 4096 else 8)


def _move_squares(y: torch.Tensor, x: torch.Tensor, found: Dims, inner: int, size: int) -> None:
    room = [prod([n for n, _ in found[d + 1 :]]) for d in range(len(found))]
    (columns, x_column), (rows, x_row) = found[inner], found[-1]
    batches = [d for d in reversed(range(len(found) - 1)) if d != inner]
    x_steps, y_steps = tuple(found[d][1] for d in batches), tuple(room[d] for d in batches)
    sizes = tuple(found[d][0] for d in batches)
    vecs = {"XVEC": _vec(size, columns, x_row, *x_steps), "YVEC": _vec(size, rows, room[inner], *y_steps)}
    odd = min(vecs.values()) * size < 4  # a load for each element, so fewer of them
    side = 256 // size // (1 + odd) if size < 8 else 32
    most = 16384 // size // (1 + 3 * odd)
    bc, br = _up(columns, side), _up(rows, side)
    bc, br = _up(columns, max(side, min(most // br, 1024))), _up(rows, max(side, min(most // bc, 1024)))
    bb = _up(prod(sizes), max(1, most // (bc * br)))
    shape = Squares(prod(sizes), columns, rows, x_column, x_row, room[inner], sizes, x_steps, y_steps)
    far = max(br * x_row + bc * x_column, bc * room[inner]) >= 1 << 31
    facts: dict[str, Any] = vecs | {"FAR": far, "BB": bb, "BC": bc, "BR": br}
    tiles = triton.cdiv(columns, bc) * triton.cdiv(rows, br) * triton.cdiv(shape.batches, bb)
    launch(_squares, (tiles,), y, x, shape, num_warps=8 if bb * bc * br >= 4096 else 4, **facts)
