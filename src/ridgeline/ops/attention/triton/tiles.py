"""Tiles of rows of a head in the Triton kernels: their addresses, loads, stores and products.

A tile has its D columns in one or two parts, since D = 80 fits 64 + 16 columns better than 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Heads(NamedTuple):
    """A tensor (batch, heads, rows, D) in memory. Steps are strides in units of `Rules.UNIT` elements."""

    data: Any
    batch_step: Any
    head_step: Any
    row_step: Any


class Rules(NamedTuple):
    """What a kernel is compiled for, apart from the sizes of its tiles."""

    LEFT: bool  # whether queries see a limited number of keys before them
    RIGHT: bool  # and after them
    BOTTOM: bool  # whether the last query is at the last key, instead of the first at the first
    CAP: bool  # whether scores have a softcap
    APART: bool  # whether scores are scaled apart from the exponential, which then has base e
    D: int
    BD: int  # columns of a tile's first part
    BE: int  # and of its second, 0 for none
    UNIT: int  # of steps, in elements
    PRECISION: str  # of float32 products
    PREFIX: bool = False  # whether all queries see a number of first keys


class Parts(NamedTuple):
    """A tile's columns, in two parts; of a tile in one part, `rest` is unused."""

    main: Any
    rest: Any


class Rows(NamedTuple):
    """The rows of one head in memory, from some row on."""

    data: Any
    step: Any


@triton.jit
def address(x, batch, head, row, UNIT: tl.constexpr):
    """Returns the address of a row of a head of `Heads`."""
    step = tl.cast(batch, tl.int64) * x.batch_step + tl.cast(head, tl.int64) * x.head_step
    return x.data + (step + tl.cast(row, tl.int64) * x.row_step) * UNIT


@triton.jit
def head_rows(x, batch, head, row, RULES: tl.constexpr):
    """Returns the rows of a head of `Heads`, from a row on."""
    return Rows(address(x, batch, head, row, RULES.UNIT), x.row_step)


@triton.jit
def heads_from(x, batch, head, row, RULES: tl.constexpr):
    """Returns the `Heads` of one batch, from a head and a row on."""
    return Heads(address(x, batch, head, row, RULES.UNIT), 0, x.head_step, x.row_step)


@triton.jit
def rows_from(x, start, RULES: tl.constexpr):
    """Returns the rows from a later one on."""
    return Rows(x.data + tl.cast(start, tl.int64) * RULES.UNIT * x.step, x.step)


@triton.jit
def load_columns(x, row, limit, d, D: tl.constexpr, UNIT: tl.constexpr, ALL: tl.constexpr):
    """Loads columns d of rows; 0 from row `limit` on (unless ALL are below it), and from column D on."""
    at = x.data + row[:, None] * (x.step * UNIT) + d[None, :]
    EVEN: tl.constexpr = d.shape[0] <= D
    if ALL and EVEN:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=d[None, :] < D, other=0.0)
    if EVEN:
        return tl.load(at, mask=row[:, None] < limit, other=0.0)
    return tl.load(at, mask=(row[:, None] < limit) & (d[None, :] < D), other=0.0)


@triton.jit
def load_tile(x, row, limit, RULES: tl.constexpr, ALL: tl.constexpr = False):
    """Loads rows in `Parts`; 0 from row `limit` on, unless ALL are below it."""
    main = load_columns(x, row, limit, tl.arange(0, RULES.BD), RULES.D, RULES.UNIT, ALL)
    rest = main
    if RULES.BE:
        x = Rows(x.data + RULES.BD, x.step)
        rest = load_columns(x, row, limit, tl.arange(0, RULES.BE), RULES.D - RULES.BD, RULES.UNIT, ALL)
    return Parts(main, rest)


@triton.jit
def store_columns(x, values, row, limit, d, D: tl.constexpr, UNIT: tl.constexpr):
    at = x.data + row[:, None] * (x.step * UNIT)
    tl.store(at + d[None, :], values.to(x.data.dtype.element_ty), mask=(row[:, None] < limit) & (d[None, :] < D))


@triton.jit
def store_tile(x, tile, row, limit, RULES: tl.constexpr):
    """Stores a tile's rows below `limit`."""
    store_columns(x, tile.main, row, limit, tl.arange(0, RULES.BD), RULES.D, RULES.UNIT)
    if RULES.BE:
        x = Rows(x.data + RULES.BD, x.step)
        store_columns(x, tile.rest, row, limit, tl.arange(0, RULES.BE), RULES.D - RULES.BD, RULES.UNIT)


@triton.jit
def scale_rows(tile, factors, RULES: tl.constexpr):
    """Multiplies each row of a tile of sums by a number."""
    return Parts(tile.main * factors[:, None], tile.rest * factors[:, None] if RULES.BE else tile.rest)


@triton.jit
def zeros(ROWS: tl.constexpr, RULES: tl.constexpr):
    """Returns sums for a tile of results, in float32."""
    MAIN: tl.constexpr = RULES.BD
    REST: tl.constexpr = RULES.BE if RULES.BE else 1
    return Parts(tl.zeros((ROWS, MAIN), tl.float32), tl.zeros((ROWS, REST), tl.float32))


@triton.jit
def scores(a, b, RULES: tl.constexpr):
    """Returns a b^T, over both parts of the dimensions."""
    s = tl.dot(a.main, tl.trans(b.main), input_precision=RULES.PRECISION)
    return tl.dot(a.rest, tl.trans(b.rest), s, input_precision=RULES.PRECISION) if RULES.BE else s


@triton.jit
def add_product(acc, p, x, RULES: tl.constexpr):
    """Returns acc + p x, in both parts."""
    PRECISION: tl.constexpr = RULES.PRECISION
    main = add_columns(acc.main, p, x.main, PRECISION)
    return Parts(main, add_columns(acc.rest, p, x.rest, PRECISION) if RULES.BE else acc.rest)


@triton.jit
def add_columns(acc, p, x, PRECISION: tl.constexpr):
    """Returns acc + p x. In full float32 a block is summed apart: one chain over all blocks would round more."""
    if x.dtype == tl.float32 and PRECISION != "tf32":
        # fma, since the compiler turns a plain addition into one chain.
        acc = tl.fma(tl.dot(p, x, input_precision=PRECISION), 1.0, acc)
    else:
        acc = tl.dot(p.to(x.dtype), x, acc, input_precision=PRECISION)
    return acc
