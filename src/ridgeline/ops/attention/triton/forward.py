"""The forward of the implementation `triton` of attention: a kernel for any GPU, dense and packed.

A program takes a tile of queries and walks the keys that they see. It keeps a running maximum and sum per row, and
rescales its sums when the maximum grows. Blocks of keys that every row of the tile sees in full come in a loop without
comparisons; those at the diagonal, at a window's edge or at the ragged end have loops of their own.
Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.ops.attention.common.arguments import UNBOUNDED
from ridgeline.ops.attention.triton.launcher import Call, heads, start, step_unit
from ridgeline.ops.attention.triton.scheduler import key_blocks, query_tile, section_of, seen_band
from ridgeline.ops.attention.triton.softmax import (
    RowSums,
    add_block,
    add_sink,
    head_mask,
    load_sink,
    no_keys,
    normalizer,
)
from ridgeline.ops.attention.triton.tiles import head_rows, load_tile, scale_rows, store_tile


@triton.jit(do_not_specialize=["sizes"])
def _fwd(
    o,
    ends,
    q,
    k,
    v,
    mask,
    cu,
    sizes,
    group,
    scale,
    RULES: tl.constexpr,
    TAIL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    tile = query_tile(cu, sizes, RULES, BM)
    b, h = tile.batch, tile.head_in_batch
    i = tile.start + tl.arange(0, BM)
    first, limit = tile.q_start + tile.start, tile.rows - tile.start
    queries = load_tile(head_rows(q, b, h, first, RULES), tl.arange(0, BM), limit, RULES)
    keys = head_rows(k, b, h // group, tile.k_start, RULES)
    values = head_rows(v, b, h // group, tile.k_start, RULES)
    if mask is not None:
        mask = head_mask(mask, b, h)
    band = seen_band(tile, sizes, RULES)
    blocks = key_blocks(tile, band, RULES, BM, BN, mask is not None)
    state = no_keys(BM, RULES)
    for SECTION in tl.static_range(3):
        if RULES.LEFT if SECTION == 0 else mask is None if SECTION == 1 else TAIL:
            low, high = section_of(blocks, SECTION)
            for k_start in range(low, high, BN):
                state = add_block(state, queries, keys, values, k_start, i, band, mask, scale, RULES, BN, SECTION != 1)
    acc, row_sum, row_max = state.acc, state.row_sum, state.row_max
    if ends.sinks is not None:
        sink = load_sink(ends.sinks, h, RULES.APART)
        row_sum, row_max, rescale = add_sink(row_sum, row_max, sink, RULES.APART)
        acc = scale_rows(acc, rescale, RULES)
    factors, sums = normalizer(row_sum, row_max, RULES.APART)
    acc = scale_rows(acc, factors, RULES)
    store_tile(head_rows(o, b, h, first, RULES), acc, tl.arange(0, BM), limit, RULES)
    tl.store(ends.lse + tile.head.to(tl.int64) * sizes.rows + tile.q_start + i, sums, mask=i < tile.rows)


def fwd(o: torch.Tensor, lse: torch.Tensor, *inputs: Any) -> None:
    """Fills o and lse; see `attention_fwd` in common/kernels.py. max_q and max_k are not used."""
    call = Call(*inputs)
    unit = step_unit((o, call.q, call.k, call.v))
    given = heads(o, unit), RowSums(lse, call.sinks), *[heads(t, unit) for t in (call.q, call.k, call.v)]
    start(_fwd, "fwd", given, call, unit, call.right < UNBOUNDED)
