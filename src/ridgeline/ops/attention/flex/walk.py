"""The scores of a block with a user's functions, and the lists of blocks that a tile walks."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.attention.triton.scheduler import in_band
from ridgeline.ops.attention.triton.softmax import power, scaled


class FlexRules(NamedTuple):
    """What a kernel is compiled for: the fields of attention's `Rules`, the size of a mask's blocks, and a slope."""

    LEFT: bool
    RIGHT: bool
    BOTTOM: bool
    CAP: bool
    APART: bool  # whether exponentials have base e
    D: int
    BD: int
    BE: int
    UNIT: int
    PRECISION: str
    PREFIX: bool
    BLOCK: int  # rows and columns of a block of the mask, 0 without a mask
    TAIL: bool  # without a mask: whether the last blocks need comparisons


class FlexSizes(NamedTuple):
    """The numbers of a call that kernels do not specialise on: attention's `Sizes`, and heads that share keys."""

    rows: Any
    columns: Any
    heads: Any
    batch: Any
    section: Any
    window_left: Any
    window_right: Any
    prefix: Any
    group: Any


class Lists(NamedTuple):
    """The lists of blocks of a mask, (batch, heads, blocks, 3 + blocks). Steps are 0 where all share them."""

    data: Any
    batch_step: Any
    head_step: Any
    row_step: Any


class Place(NamedTuple):
    """Whose scores these are: numbers of batch and head of the queries, and the band of keys by their positions."""

    b: Any
    h: Any
    band: Any


class Walk(NamedTuple):
    """The list of a tile: the number of its first block in memory, and how many blocks it has."""

    at: Any
    blocks: Any


@triton.jit
def walk(lists, b, h, start, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the list of the tile from row `start` on: of partly masked blocks (PART 0), or of full ones."""
    row = lists.data + (tl.cast(b, tl.int64) * lists.batch_step + h * lists.head_step + start // BLOCK * lists.row_step)
    partly = tl.load(row)
    if PART == 0:
        return Walk(row + 2, partly)
    return Walk(row + 2 + partly, tl.load(row + 1))


@triton.jit
def before(s, scale, RULES: tl.constexpr, SCORE: tl.constexpr):
    """Returns the scores that a user's function takes: the scaled products. Without one `power` may scale them."""
    return scaled(s, scale, RULES.APART) if RULES.APART or SCORE is not None else s


@triton.jit
def after(
    s, place, i, j, of_score, of_mask, RULES: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr,
    MASKED: tl.constexpr
):  # fmt: skip
    """Returns the new scores of queries i and keys j, -inf where a key is not seen, and whether it is seen."""
    q, k = inside(i, j, place.band, MASKED)
    if SCORE is not None:
        s = SCORE(s, place.b, place.h, q, k) if of_score is None else SCORE(s, place.b, place.h, q, k, *of_score)
        s = s.to(tl.float32)
    seen = True
    if MASKED:
        if MASK is None:
            seen = in_band(i, j, place.band, RULES)
        elif of_mask is None:
            seen = (j < place.band.columns) & MASK(place.b, place.h, q, k)
        else:
            seen = (j < place.band.columns) & MASK(place.b, place.h, q, k, *of_mask)
        s = tl.where(seen, s, float("-inf"))
    return s, seen


@triton.jit
def inside(i, j, band, MASKED: tl.constexpr):
    """Returns positions at which a user's function may load: below the numbers of queries and of keys."""
    return tl.minimum(i, band.rows - 1), tl.minimum(j, band.columns - 1) if MASKED else j


@triton.jit
def slope(ds, s, place, i, j, of_score, seen, SLOPE: tl.constexpr, MASKED: tl.constexpr):
    """Returns the gradient of the scores that a user's function took, from that of the ones it returned."""
    if SLOPE is not None:
        q, k = inside(i, j, place.band, MASKED)
        if of_score is None:
            ds = SLOPE(ds, s, place.b, place.h, q, k)
        else:
            ds = SLOPE(ds, s, place.b, place.h, q, k, *of_score)
        ds = ds.to(tl.float32)
        if MASKED:
            ds = tl.where(seen, ds, 0.0)
    return ds


@triton.jit
def probabilities(s, lse, scale, RULES: tl.constexpr, dtype: tl.constexpr):
    """Returns the softmax of new scores from lse, for backward."""
    return power(s, lse, scale.factor, RULES.APART, dtype)
