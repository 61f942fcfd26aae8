"""The backward of flex_attention, in two passes without atomics: attention's, with a user's functions.

A tile of keys walks the queries that see it, for dK and dV, over the mask's lists by columns; then a tile of queries
walks its keys, for dQ. With s' = f(s) for the scaled scores s, and a user's function for f's derivative:

    p = exp(s' - lse),  ds' = p (do v^T - delta),  ds = ds' f'(s),  dQ = scale ds k,  dK = scale ds^T q
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.ops.attention.flex.launcher import UNBOUNDED, Call, heads, start, step_unit
from ridgeline.ops.attention.flex.walk import Place, after, before, probabilities, slope, walk
from ridgeline.ops.attention.triton.backward import (
    Gradients,
    Queries,
    RowTerms,
    Sides,
    scaled_tile,
    start_delta,
)
from ridgeline.ops.attention.triton.scheduler import (
    key_blocks,
    key_tile,
    query_blocks,
    query_tile,
    section_of,
    seen_band,
)
from ridgeline.ops.attention.triton.tiles import (
    add_product,
    head_rows,
    heads_from,
    load_tile,
    rows_from,
    scores,
    store_tile,
    zeros,
)


class KeyTile(NamedTuple):
    """A tile of keys j: theirs and their values."""

    k: Any
    v: Any
    j: Any


class QueryTile(NamedTuple):
    """A tile of queries i: theirs, the gradients of their outputs, lse and delta."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    i: Any


class KeyRows(NamedTuple):
    """The keys and values of a head in memory."""

    k: Any
    v: Any


@triton.jit
def _queries_of(sides, terms, b, h, sizes, RULES: tl.constexpr):
    """Returns the `Queries` of a head, in memory."""
    at = (b * (sizes.heads * sizes.group) + h).to(tl.int64) * sizes.rows
    q, do = heads_from(sides.q, b, h, 0, RULES), heads_from(sides.do, b, h, 0, RULES)
    return Queries(q, do, terms.lse + at, terms.delta + at, sizes.rows)


@triton.jit
def _add_queries(
    sums, mine, x, start, place, of_score, of_mask, scale, RULES: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Adds a block of queries of a head, from row `start` on, to dK and dV. Scores are transposed: keys down."""
    m = tl.arange(0, BM)
    i, j = (start + m)[None, :], mine.j[:, None]
    limit = place.band.rows - start
    queries = load_tile(head_rows(x.q, 0, 0, start, RULES), m, limit, RULES, not MASKED)
    if MASKED:
        lse = tl.load(x.lse + start + m, mask=m < limit, other=float("inf"))
        delta = tl.load(x.delta + start + m, mask=m < limit, other=0.0)
    else:
        lse = tl.load(x.lse + start + m)
        delta = tl.load(x.delta + start + m)
    raw = before(scores(mine.k, queries, RULES), scale, RULES, SCORE)
    s, seen = after(raw, place, i, j, of_score, of_mask, RULES, SCORE, MASK, MASKED)
    p = probabilities(s, lse[None, :], scale, RULES, mine.k.main.dtype)
    slopes = load_tile(head_rows(x.do, 0, 0, start, RULES), m, limit, RULES, not MASKED)
    dv = add_product(sums.dv, p, slopes, RULES)
    ds = p * (scores(mine.v, slopes, RULES) - delta[None, :])
    ds = slope(ds, raw, place, i, j, of_score, seen, SLOPE, MASKED)
    return Gradients(add_product(sums.dk, ds, queries, RULES), dv)


@triton.jit(do_not_specialize=["lists", "sizes"])
def _bwd(
    grads, sides, terms, lists, of_score, of_mask, sizes, scale, RULES: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Computes dK and dV: a program per tile of keys, over all queries of its group's heads that see it."""
    tile = key_tile(None, sizes, BN)
    b, h, group = tile.batch, tile.head_in_batch, sizes.group
    n = tl.arange(0, BN)
    limit = tile.columns - tile.start
    keys = load_tile(head_rows(sides.k, b, h, tile.start, RULES), n, limit, RULES)
    values = load_tile(head_rows(sides.v, b, h, tile.start, RULES), n, limit, RULES)
    mine = KeyTile(keys, values, tile.start + n)
    band = seen_band(tile, sizes, RULES)
    sums = Gradients(zeros(BN, RULES), zeros(BN, RULES))
    for head in range(h * group, h * group + group):
        x = _queries_of(sides, terms, b, head, sizes, RULES)
        place = Place(b, head, band)
        if lists is None:
            blocks = query_blocks(tile, band, RULES, BM, BN, False)
            for SECTION in tl.static_range(3):
                if RULES.RIGHT if SECTION == 0 else True if SECTION == 1 else RULES.TAIL:
                    low, high = section_of(blocks, SECTION)
                    for start in range(low, high, BM):
                        sums = _add_queries(
                            sums, mine, x, start, place, of_score, of_mask, scale, RULES, SCORE, SLOPE, MASK, BM,
                            SECTION != 1
                        )  # fmt: skip
        else:
            SPLIT: tl.constexpr = RULES.BLOCK // BM
            for PART in tl.static_range(2):
                listed = walk(lists, b, head, tile.start, PART, RULES.BLOCK)
                block = tl.load(listed.at)
                for t in range(listed.blocks * SPLIT):
                    start = block * RULES.BLOCK + t % SPLIT * BM
                    block = tl.load(listed.at + (t + 1) // SPLIT)
                    sums = _add_queries(
                        sums, mine, x, start, place, of_score, of_mask, scale, RULES, SCORE, SLOPE, MASK, BM, PART == 0
                    )
    store_tile(head_rows(grads.dk, b, h, tile.start, RULES), scaled_tile(sums.dk, scale, RULES), n, limit, RULES)
    store_tile(head_rows(grads.dv, b, h, tile.start, RULES), sums.dv, n, limit, RULES)


@triton.jit
def _add_keys(
    dq, mine, x, start, place, of_score, of_mask, scale, RULES: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, MASK: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Adds a block of keys, from `start` on, to dQ."""
    n = tl.arange(0, BN)
    i, j = mine.i[:, None], (start + n)[None, :]
    limit = place.band.columns - start
    keys = load_tile(rows_from(x.k, start, RULES), n, limit, RULES, not MASKED)
    values = load_tile(rows_from(x.v, start, RULES), n, limit, RULES, not MASKED)
    raw = before(scores(mine.q, keys, RULES), scale, RULES, SCORE)
    s, seen = after(raw, place, i, j, of_score, of_mask, RULES, SCORE, MASK, MASKED)
    p = probabilities(s, mine.lse[:, None], scale, RULES, mine.q.main.dtype)
    ds = p * (scores(mine.do, values, RULES) - mine.delta[:, None])
    ds = slope(ds, raw, place, i, j, of_score, seen, SLOPE, MASKED)
    return add_product(dq, ds, keys, RULES)


@triton.jit(do_not_specialize=["lists", "sizes"])
def _bwd_dq(
    dq, sides, terms, lists, of_score, of_mask, sizes, scale, RULES: tl.constexpr, SCORE: tl.constexpr,
    SLOPE: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Computes dQ: a program per tile of queries, over all keys that it sees."""
    tile = query_tile(None, sizes, RULES, BM)
    b, h, group = tile.batch, tile.head_in_batch, sizes.group
    m = tl.arange(0, BM)
    i, limit = tile.start + m, tile.rows - tile.start
    queries = load_tile(head_rows(sides.q, b, h, tile.start, RULES), m, limit, RULES)
    slopes = load_tile(head_rows(sides.do, b, h, tile.start, RULES), m, limit, RULES)
    at = tile.head.to(tl.int64) * sizes.rows + tile.start
    lse = tl.load(terms.lse + at + m, mask=m < limit, other=float("inf"))
    delta = tl.load(terms.delta + at + m, mask=m < limit, other=0.0)
    mine = QueryTile(queries, slopes, lse, delta, i)
    x = KeyRows(head_rows(sides.k, b, h // group, 0, RULES), head_rows(sides.v, b, h // group, 0, RULES))
    band = seen_band(tile, sizes, RULES)
    place = Place(b, h, band)
    sums = zeros(BM, RULES)
    if lists is None:
        blocks = key_blocks(tile, band, RULES, BM, BN, False)
        for SECTION in tl.static_range(3):
            if RULES.LEFT if SECTION == 0 else True if SECTION == 1 else RULES.TAIL:
                low, high = section_of(blocks, SECTION)
                for start in range(low, high, BN):
                    sums = _add_keys(
                        sums, mine, x, start, place, of_score, of_mask, scale, RULES, SCORE, SLOPE, MASK, BN,
                        SECTION != 1
                    )  # fmt: skip
    else:
        SPLIT: tl.constexpr = RULES.BLOCK // BN
        for PART in tl.static_range(2):
            listed = walk(lists, b, h, tile.start, PART, RULES.BLOCK)
            block = tl.load(listed.at)
            for t in range(listed.blocks * SPLIT):
                start = block * RULES.BLOCK + t % SPLIT * BN
                block = tl.load(listed.at + (t + 1) // SPLIT)
                sums = _add_keys(
                    sums, mine, x, start, place, of_score, of_mask, scale, RULES, SCORE, SLOPE, MASK, BN, PART == 0
                )
    store_tile(head_rows(dq, b, h, tile.start, RULES), scaled_tile(sums, scale, RULES), m, limit, RULES)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, *rest: Any
) -> None:  # fmt: skip
    """Fills dq, dk and dv; see `flex_attention_bwd` in kernels.py. Always deterministic."""
    call = Call(q, k, v, *rest)
    terms = RowTerms(torch.empty_like(lse), torch.empty_like(lse))
    start_delta(terms, o, do, dlse, lse, apart=call.apart)
    inputs = k, v, q, do
    unit = step_unit((dk, dv, *inputs))
    given = Gradients(heads(dk, unit), heads(dv, unit)), Sides(*[heads(t, unit) for t in inputs]), terms
    start(_bwd, "bwd", given, call, unit, call.left < UNBOUNDED)
    unit = step_unit((dq, *inputs))
    given = heads(dq, unit), Sides(*[heads(t, unit) for t in inputs]), terms
    start(_bwd_dq, "bwd_dq", given, call, unit, call.right < UNBOUNDED)
