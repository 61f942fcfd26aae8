"""The scores of a block in the Triton kernels, which keys they leave out, and the running softmax of a tile of queries.

A row keeps the maximum of its scores, and its sums relative to that maximum. A block that raises the maximum rescales
the sums. Exponentials have base 2, unless scores are scaled apart (`Rules.APART`).
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.attention.triton.scheduler import in_band
from ridgeline.ops.attention.triton.tiles import add_product, load_tile, rows_from, scale_rows, scores, zeros
from ridgeline.tiles.activations import capped
from ridgeline.tiles.online_softmax import exact_exp, log


class Scale(NamedTuple):
    """How products become scores. factor: scale in base 2 or, with APART, what float32 rounds off the scale."""

    scale: Any
    factor: Any
    cap: Any


class Mask(NamedTuple):
    """A mask (batch, heads, queries, keys): uint8, 0 for keys that are not seen, or added to scores."""

    data: Any
    batch_step: Any
    head_step: Any
    row_step: Any
    column_step: Any


class Softmax(NamedTuple):
    """The running sums of a tile of queries: of values, of exponentials; and the maximum that both are relative to."""

    acc: Any
    row_sum: Any
    row_max: Any


class RowSums(NamedTuple):
    """lse (batch, heads, rows); and sinks (heads,), logits that join their heads' sums of exponentials, or None."""

    lse: Any
    sinks: Any


@triton.jit
def no_keys(BM: tl.constexpr, RULES: tl.constexpr):
    """Returns the `Softmax` of BM queries that have seen no key."""
    return Softmax(zeros(BM, RULES), tl.zeros((BM,), tl.float32), tl.full((BM,), float("-inf"), tl.float32))


@triton.jit
def load_sink(sinks, head, APART: tl.constexpr):
    """Loads heads' sinks, in base 2 unless APART."""
    sink = tl.load(sinks + head).to(tl.float32)
    return sink if APART else sink * 1.4426950408889634


@triton.jit
def add_sink(row_sum, row_max, sink, APART: tl.constexpr):
    """Lets a sink join rows' sums. Returns the new sums and maxima, and what the sums of values are rescaled by."""
    new = tl.maximum(row_max, sink)
    base = tl.where(new == float("-inf"), 0.0, new)
    if APART:
        rescale, share = exact_exp(row_max - base, tl.float32), exact_exp(sink - base, tl.float32)
    else:
        rescale, share = tl.exp2(row_max - base), tl.exp2(sink - base)
    return row_sum * rescale + share, new, rescale


@triton.jit
def normalizer(row_sum, row_max, APART: tl.constexpr):
    """Returns the final factor of rows' sums of values, and lse, -inf for rows that saw no key."""
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    lse = row_max + log(row_sum) if APART else (row_max + tl.log2(row_sum)) * 0.6931471805599453
    return 1.0 / row_sum, lse


@triton.jit
def head_mask(mask, batch, head):
    """Returns the mask from a head on."""
    data = mask.data + (tl.cast(batch, tl.int64) * mask.batch_step + tl.cast(head, tl.int64) * mask.head_step)
    return Mask(data, mask.batch_step, mask.head_step, mask.row_step, mask.column_step)


@triton.jit
def scaled(x, scale, APART: tl.constexpr):
    """Returns x times the scale. With APART, factor is its rounding error, which would bias all scores alike."""
    return tl.fma(x, scale.scale, x * scale.factor) if APART else x * scale.scale


@triton.jit
def masked_scores(s, i, j, band, mask, scale, RULES: tl.constexpr, MASKED: tl.constexpr):
    """Returns the scores of products s of queries i and keys j, -inf where a key is not seen, and the softcap's slope.

    With APART they are scaled and capped here; otherwise `power` scales them.
    """
    slope = 1.0
    if RULES.CAP:
        s, slope = capped(scaled(s, scale, RULES.APART), scale.cap, True)
    elif RULES.APART:
        s = scaled(s, scale, RULES.APART)
    if MASKED:
        seen = in_band(i, j, band, RULES)
        if mask is not None:
            at = mask.data + i.to(tl.int64) * mask.row_step + j.to(tl.int64) * mask.column_step
            bias = tl.load(at, mask=seen & (i < band.rows), other=0)
            if bias.dtype == tl.uint8:
                seen = seen & (bias != 0)
            else:
                s += bias.to(tl.float32)
        s = tl.where(seen, s, float("-inf"))
    return s, slope


@triton.jit
def power(s, row_max, factor, APART: tl.constexpr, dtype: tl.constexpr):
    """Returns the exponentials of scores relative to `row_max`, which is scaled and in base 2 unless APART."""
    return exact_exp(s - row_max, dtype) if APART else tl.exp2(s * factor - row_max)


@triton.jit
def add_block(
    state, q, k, v, k_start, i, band, mask, scale, RULES: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr
):
    """Adds the block of BN keys and values from `k_start` on to the `Softmax` of queries i."""
    n = tl.arange(0, BN)
    limit = band.columns - k_start
    keys = load_tile(rows_from(k, k_start, RULES), n, limit, RULES, not MASKED)
    s = scores(q, keys, RULES)
    s, _ = masked_scores(s, i[:, None], k_start + n[None, :], band, mask, scale, RULES, MASKED)
    row_max = tl.max(s, 1) if RULES.APART else tl.max(s, 1) * scale.factor
    row_max = tl.maximum(state.row_max, row_max)
    base = tl.where(row_max == float("-inf"), 0.0, row_max) if MASKED else row_max  # a row that has seen no key yet
    p = power(s, base[:, None], scale.factor, RULES.APART, q.main.dtype)
    if RULES.APART:
        rescale = exact_exp(state.row_max - base, q.main.dtype)
    else:
        rescale = tl.exp2(state.row_max - base)
    values = load_tile(rows_from(v, k_start, RULES), n, limit, RULES, not MASKED)
    acc = add_product(scale_rows(state.acc, rescale, RULES), p, values, RULES)
    return Softmax(acc, state.row_sum * rescale + tl.sum(p, 1), row_max)
