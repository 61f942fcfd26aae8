"""The backward of the implementation `triton` of attention, in two passes without atomics.

A tile of keys walks the queries that see it, for dK and dV; then a tile of queries walks the keys, for dQ. Both
recompute the probabilities from lse. A kernel before them computes delta, the term that softmax's derivative subtracts.
lse holds the sinks, so these change nothing but their own gradient, which comes from lse and delta:

    p_sink = exp(sink - lse),  dsink = -sum over its head's rows of p_sink delta

Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.ops.attention.common.arguments import UNBOUNDED, column_parts
from ridgeline.ops.attention.triton.launcher import Call, heads, start, step_unit
from ridgeline.ops.attention.triton.scheduler import (
    key_blocks,
    key_tile,
    query_blocks,
    query_tile,
    row_tile,
    section_of,
    seen_band,
)
from ridgeline.ops.attention.triton.softmax import head_mask, load_sink, masked_scores, power, scaled
from ridgeline.ops.attention.triton.tiles import (
    Parts,
    Rules,
    add_product,
    head_rows,
    heads_from,
    load_tile,
    rows_from,
    scores,
    store_tile,
    zeros,
)


class RowTerms(NamedTuple):
    """Per query, (batch, heads, rows): lse, in base 2 unless APART and infinite for rows without keys; and delta."""

    lse: Any
    delta: Any


class Sides(NamedTuple):
    """The tensors of the formulas: of the keys' side k and v, of the queries' side q and do."""

    k: Any
    v: Any
    q: Any
    do: Any


class Queries(NamedTuple):
    """The queries of the heads that share keys, from the first of these heads on, in memory."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    rows: Any  # per head, of lse and delta


class Gradients(NamedTuple):
    """The sums of a tile of keys."""

    dk: Any
    dv: Any


@triton.jit(do_not_specialize=["rows", "padded", "batch"])
def _delta(terms, o, do, dlse, lse, order, cu, rows, padded, heads, batch, RULES: tl.constexpr, BM: tl.constexpr):
    """Computes delta = rowsum(o do) - dlse, and lse in base 2 or, with APART, unchanged; sets `order` to 0.

    A row that sees no key, or is padding up to `padded`, gets an infinite lse, so that its probabilities are 0. With
    cu, tiles end with their packed sequence, and results are stored by tile number. heads: over the batch, and per
    sequence.
    """
    head = tl.program_id(0) % heads[0]
    tile = tl.program_id(0) // heads[0]
    m0 = tile * BM
    b, h = head // heads[1], head % heads[1]
    m = tl.arange(0, BM)
    first, limit = row_tile(tile, rows, cu, batch, BM)
    inside = m < limit
    outputs = load_tile(head_rows(o, b, h, first, RULES), m, limit, RULES)
    slopes = load_tile(head_rows(do, b, h, first, RULES), m, limit, RULES)
    delta = tl.sum(outputs.main.to(tl.float32) * slopes.main.to(tl.float32), 1)
    if RULES.BE:
        delta += tl.sum(outputs.rest.to(tl.float32) * slopes.rest.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + head.to(tl.int64) * rows + first + m, mask=inside, other=0.0)
    sums = tl.load(lse + head.to(tl.int64) * rows + first + m, mask=inside, other=float("-inf"))
    delta = tl.where(sums == float("-inf"), 0.0, delta)  # whatever its dlse
    if not RULES.APART:
        sums *= 1.4426950408889634
    at = head.to(tl.int64) * padded + m0
    tl.store(terms.delta + at + m, delta, mask=m < padded - m0)
    tl.store(terms.lse + at + m, tl.where(sums == float("-inf"), float("inf"), sums), mask=m < padded - m0)
    if order is not None:
        tl.store(order + 1 + at // 64 + m // 64, 0, mask=m < padded - m0)
        tl.store(order, 0, mask=tl.program_id(0) == 0)


@triton.jit
def _add_queries(
    sums, k, v, x, g, start, j, band, mask, scale, RULES: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr
):
    """Adds a block of queries of the g-th of the heads that share keys, from row `start` on, to dK and dV of keys j.

    Scores are transposed: keys down, queries across.
    """
    m = tl.arange(0, BM)
    i = start + m
    limit = band.rows - start
    queries = load_tile(head_rows(x.q, 0, g, start, RULES), m, limit, RULES, not MASKED)
    of_lse = x.lse + (g * x.rows + start)
    of_delta = x.delta + (g * x.rows + start)
    if MASKED:
        lse = tl.load(of_lse + m, mask=i < band.rows, other=float("inf"))
        delta = tl.load(of_delta + m, mask=i < band.rows, other=0.0)
    else:
        lse = tl.load(of_lse + m)
        delta = tl.load(of_delta + m)
    if mask is not None:
        mask = head_mask(mask, 0, g)
    s = scores(k, queries, RULES)
    s, slope = masked_scores(s, i[None, :], j[:, None], band, mask, scale, RULES, MASKED)
    p = power(s, lse[None, :], scale.factor, RULES.APART, k.main.dtype)
    slopes = load_tile(head_rows(x.do, 0, g, start, RULES), m, limit, RULES, not MASKED)
    dv = add_product(sums.dv, p, slopes, RULES)
    ds = p * (scores(v, slopes, RULES) - delta[None, :])
    if RULES.CAP:
        ds = ds * slope
    return Gradients(add_product(sums.dk, ds, queries, RULES), dv)


@triton.jit(do_not_specialize=["sizes"])
def _bwd(
    dk, dv, sides, terms, mask, cu, sizes, group, scale, RULES: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr
):  # fmt: skip
    """Computes dK and dV: a program per tile of keys, over all queries of its group's heads that see it."""
    tile = key_tile(cu, sizes, BN)
    b, h = tile.batch, tile.head_in_batch
    n = tl.arange(0, BN)
    j = tile.start + n
    first, limit = tile.k_start + tile.start, tile.columns - tile.start
    keys = load_tile(head_rows(sides.k, b, h, first, RULES), n, limit, RULES)
    values = load_tile(head_rows(sides.v, b, h, first, RULES), n, limit, RULES)
    band = seen_band(tile, sizes, RULES)
    blocks = query_blocks(tile, band, RULES, BM, BN, mask is not None)
    q = heads_from(sides.q, b, h * group, tile.q_start, RULES)
    do = heads_from(sides.do, b, h * group, tile.q_start, RULES)
    at = (b * sizes.heads + h).to(tl.int64) * group * sizes.rows + tile.q_start
    x = Queries(q, do, terms.lse + at, terms.delta + at, sizes.rows)
    if mask is not None:
        mask = head_mask(mask, b, h * group)
    sums = Gradients(zeros(BN, RULES), zeros(BN, RULES))
    for SECTION in tl.static_range(3):
        if RULES.RIGHT if SECTION == 0 else mask is None if SECTION == 1 else TAIL:
            low, high = section_of(blocks, SECTION)
            size = tl.maximum(high - low, 0)
            count = size // BM if SECTION == 1 else tl.cdiv(size, BM)
            for t in range(group * count):
                # The pipeliner computes the first addresses even of a loop that does not run.
                g = tl.cast(t // tl.maximum(count, 1), tl.int64)
                start = low + t % tl.maximum(count, 1) * BM
                sums = _add_queries(sums, keys, values, x, g, start, j, band, mask, scale, RULES, BM, SECTION != 1)
    dks = scaled_tile(sums.dk, scale, RULES)
    store_tile(head_rows(dk, b, h, first, RULES), dks, n, limit, RULES)
    store_tile(head_rows(dv, b, h, first, RULES), sums.dv, n, limit, RULES)


@triton.jit
def scaled_tile(tile, scale, RULES: tl.constexpr):
    return Parts(scaled(tile.main, scale, RULES.APART), scaled(tile.rest, scale, RULES.APART))


@triton.jit
def _add_keys(
    dq, tiles, terms, k, v, start, i, band, mask, scale, RULES: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr
):
    """Adds a block of keys, from `start` on, to dQ of queries i. tiles: of q and do; terms: of the queries."""
    n = tl.arange(0, BN)
    limit = band.columns - start
    keys = load_tile(rows_from(k, start, RULES), n, limit, RULES, not MASKED)
    values = load_tile(rows_from(v, start, RULES), n, limit, RULES, not MASKED)
    s = scores(tiles.q, keys, RULES)
    s, slope = masked_scores(s, i[:, None], start + n[None, :], band, mask, scale, RULES, MASKED)
    p = power(s, terms.lse[:, None], scale.factor, RULES.APART, tiles.q.main.dtype)
    ds = p * (scores(tiles.do, values, RULES) - terms.delta[:, None])
    if RULES.CAP:
        ds = ds * slope
    return add_product(dq, ds, keys, RULES)


@triton.jit(do_not_specialize=["sizes"])
def _bwd_dq(
    dq, sides, terms, mask, cu, sizes, group, scale, RULES: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr
):  # fmt: skip
    """Computes dQ: a program per tile of queries, over all keys that it sees."""
    tile = query_tile(cu, sizes, RULES, BM)
    b, h = tile.batch, tile.head_in_batch
    m = tl.arange(0, BM)
    i = tile.start + m
    first, limit = tile.q_start + tile.start, tile.rows - tile.start
    queries = load_tile(head_rows(sides.q, b, h, first, RULES), m, limit, RULES)
    slopes = load_tile(head_rows(sides.do, b, h, first, RULES), m, limit, RULES)
    at = tile.head.to(tl.int64) * sizes.rows
    lse = tl.load(terms.lse + at + tile.q_start + i, mask=i < tile.rows, other=float("inf"))
    delta = tl.load(terms.delta + at + tile.q_start + i, mask=i < tile.rows, other=0.0)
    tiles, own = Sides(None, None, queries, slopes), RowTerms(lse, delta)
    keys = head_rows(sides.k, b, h // group, tile.k_start, RULES)
    values = head_rows(sides.v, b, h // group, tile.k_start, RULES)
    if mask is not None:
        mask = head_mask(mask, b, h)
    band = seen_band(tile, sizes, RULES)
    blocks = key_blocks(tile, band, RULES, BM, BN, mask is not None)
    sums = zeros(BM, RULES)
    for SECTION in tl.static_range(3):
        if RULES.LEFT if SECTION == 0 else mask is None if SECTION == 1 else TAIL:
            low, high = section_of(blocks, SECTION)
            for start in range(low, high, BN):
                sums = _add_keys(sums, tiles, own, keys, values, start, i, band, mask, scale, RULES, BN, SECTION != 1)
    store_tile(head_rows(dq, b, h, first, RULES), scaled_tile(sums, scale, RULES), m, limit, RULES)


def start_delta(
    terms: RowTerms, o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, lse: torch.Tensor,
    order: torch.Tensor | None = None, cu: torch.Tensor | None = None, apart: bool = False
) -> None:  # fmt: skip
    """Fills both terms, with at least the rows of each head; zeroes `order` (1 + one number per 64 rows) if given.

    With cu it goes by 64 rows of a packed sequence, numbered as in `find_sequence`.
    """
    (batch, query_heads, rows, D), (width, rest) = o.shape, column_parts(o.shape[-1])
    padded, unit, size = terms.delta.numel() // max(batch * query_heads, 1), step_unit((o, do)), max(16, 4096 // width)
    if cu is not None:
        size = 64
    rules = Rules(False, False, False, False, apart, D, width, rest, unit, "")
    numbers = rows, padded, (batch * query_heads, query_heads), None if cu is None else cu.numel() - 1
    launch(
        _delta, (triton.cdiv(padded, size) * batch * query_heads,), terms, heads(o, unit), heads(do, unit), dlse, lse,
        order, cu, *numbers, RULES=rules, BM=size, num_warps=8 if size * width > 4096 else 4
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "rows"])
def _bwd_sinks(dsinks, sinks, terms, batch, rows, APART: tl.constexpr, SIZE: tl.constexpr):
    """Computes a head's dsink over its rows, first to last. Rows beyond q's have an infinite lse."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    sink = load_sink(sinks, head, APART)
    total = tl.zeros((SIZE,), tl.float32)
    for first in range(0, tl.cast(batch, tl.int64) * rows, SIZE):
        n = first + tl.arange(0, SIZE)
        inside = n < tl.cast(batch, tl.int64) * rows
        at = n + (n // rows * (heads - 1) + head) * rows
        lse = tl.load(terms.lse + at, mask=inside, other=float("inf"))
        delta = tl.load(terms.delta + at, mask=inside, other=0.0)
        total += power(sink, lse, 1.0, APART, tl.float32) * delta
    tl.store(dsinks + head, (-tl.sum(total, 0)).to(dsinks.dtype.element_ty))


def sum_sinks(
    dsinks: torch.Tensor | None, sinks: torch.Tensor | None, terms: RowTerms, batch: int, apart: bool = False
) -> None:
    """Fills dsinks unless it is None. terms: filled by `start_delta`, with at least the rows of each head."""
    if dsinks is None or sinks is None:
        return
    heads, count = sinks.shape[0], terms.lse.numel()
    facts: dict[str, Any] = {"APART": apart, "SIZE": 2048, "num_warps": 8}
    launch(_bwd_sinks, (heads,), dsinks, sinks, terms, batch, count // max(batch * heads, 1), **facts)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dsinks: torch.Tensor | None, do: torch.Tensor,
    dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    *rest: Any
) -> None:  # fmt: skip
    """Fills dq, dk, dv and, unless it is None, dsinks; see `attention_bwd` in common/kernels.py.

    Always deterministic.
    """
    call = Call(q, k, v, *rest[:-1])
    terms = RowTerms(torch.empty_like(lse), torch.empty_like(lse))
    start_delta(terms, o, do, dlse, lse, apart=call.apart)
    sum_sinks(dsinks, call.sinks, terms, q.shape[0], call.apart)
    inputs = k, v, q, do
    unit = step_unit((dk, dv, *inputs))
    given = heads(dk, unit), heads(dv, unit), Sides(*[heads(t, unit) for t in inputs]), terms
    start(_bwd, "bwd", given, call, unit, call.left < UNBOUNDED)
    unit = step_unit((dq, *inputs))
    given = heads(dq, unit), Sides(*[heads(t, unit) for t in inputs]), terms
    start(_bwd_dq, "bwd_dq", given, call, unit, call.right < UNBOUNDED)
