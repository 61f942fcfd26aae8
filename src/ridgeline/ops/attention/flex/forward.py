"""The forward of flex_attention: attention's kernel with a user's functions, over the blocks that a mask leaves.

Without a block mask a tile walks the sections of attention's scheduler. With one it walks two lists: partly masked
blocks, where the mask's function runs, and full ones, where it does not. The number of the next block is loaded one
block ahead.
Source: Dong, Feng, Guessous, Liang and He, Flex Attention, 2024 (arXiv:2412.05496).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.ops.attention.flex.launcher import UNBOUNDED, Call, heads, start, step_unit
from ridgeline.ops.attention.flex.walk import Place, after, before, walk
from ridgeline.ops.attention.triton.scheduler import key_blocks, query_tile, section_of, seen_band
from ridgeline.ops.attention.triton.softmax import Softmax, no_keys, normalizer, power
from ridgeline.ops.attention.triton.tiles import (
    add_product,
    head_rows,
    load_tile,
    rows_from,
    scale_rows,
    scores,
    store_tile,
)


class Inputs(NamedTuple):
    """q, k and v in memory."""

    q: Any
    k: Any
    v: Any


class Memory(NamedTuple):
    """The keys and values of a head in memory."""

    k: Any
    v: Any


@triton.jit
def _add_block(
    state, q, x, k_start, place, i, of_score, of_mask, scale, RULES: tl.constexpr, SCORE: tl.constexpr,
    MASK: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Adds the block of BN keys and values from `k_start` on to the `Softmax` of queries i."""
    n = tl.arange(0, BN)
    limit = place.band.columns - k_start
    keys = load_tile(rows_from(x.k, k_start, RULES), n, limit, RULES, not MASKED)
    s = before(scores(q, keys, RULES), scale, RULES, SCORE)
    s, _ = after(s, place, i[:, None], k_start + n[None, :], of_score, of_mask, RULES, SCORE, MASK, MASKED)
    row_max = tl.max(s, 1) if RULES.APART else tl.max(s, 1) * scale.factor
    row_max = tl.maximum(state.row_max, row_max)
    # A row that has seen no key yet. A user's function may hide keys of any block.
    base = tl.where(row_max == float("-inf"), 0.0, row_max) if MASKED or SCORE is not None else row_max
    p = power(s, base[:, None], scale.factor, RULES.APART, q.main.dtype)
    rescale = power(state.row_max, base, 1.0, RULES.APART, q.main.dtype)
    values = load_tile(rows_from(x.v, k_start, RULES), n, limit, RULES, not MASKED)
    acc = add_product(scale_rows(state.acc, rescale, RULES), p, values, RULES)
    return Softmax(acc, state.row_sum * rescale + tl.sum(p, 1), row_max)


@triton.jit(do_not_specialize=["sizes", "lists"])
def _fwd(
    o, lse, inputs, lists, of_score, of_mask, sizes, scale, RULES: tl.constexpr, SCORE: tl.constexpr,
    MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    tile = query_tile(None, sizes, RULES, BM)
    b, h = tile.batch, tile.head_in_batch
    i = tile.start + tl.arange(0, BM)
    limit = tile.rows - tile.start
    q = load_tile(head_rows(inputs.q, b, h, tile.start, RULES), tl.arange(0, BM), limit, RULES)
    group = sizes.group
    x = Memory(head_rows(inputs.k, b, h // group, 0, RULES), head_rows(inputs.v, b, h // group, 0, RULES))
    band = seen_band(tile, sizes, RULES)
    place = Place(b, h, band)
    state = no_keys(BM, RULES)
    if lists is None:
        blocks = key_blocks(tile, band, RULES, BM, BN, False)
        for SECTION in tl.static_range(3):
            if RULES.LEFT if SECTION == 0 else True if SECTION == 1 else RULES.TAIL:
                low, high = section_of(blocks, SECTION)
                for k_start in range(low, high, BN):
                    state = _add_block(
                        state, q, x, k_start, place, i, of_score, of_mask, scale, RULES, SCORE, MASK, BN, SECTION != 1
                    )
    else:
        SPLIT: tl.constexpr = RULES.BLOCK // BN
        for PART in tl.static_range(2):
            listed = walk(lists, b, h, tile.start, PART, RULES.BLOCK)
            block = tl.load(listed.at)
            for t in range(listed.blocks * SPLIT):
                k_start = block * RULES.BLOCK + t % SPLIT * BN
                block = tl.load(listed.at + (t + 1) // SPLIT)
                state = _add_block(
                    state, q, x, k_start, place, i, of_score, of_mask, scale, RULES, SCORE, MASK, BN, PART == 0
                )
    factors, sums = normalizer(state.row_sum, state.row_max, RULES.APART)
    acc = scale_rows(state.acc, factors, RULES)
    store_tile(head_rows(o, b, h, tile.start, RULES), acc, tl.arange(0, BM), limit, RULES)
    tl.store(lse + tile.head.to(tl.int64) * sizes.rows + i, sums, mask=i < tile.rows)


def fwd(o: torch.Tensor, lse: torch.Tensor, *inputs: Any) -> None:
    """Fills o and lse; see `flex_attention_fwd` in kernels.py."""
    call = Call(*inputs)
    unit = step_unit((o, call.q, call.k, call.v))
    given = heads(o, unit), lse, Inputs(*[heads(t, unit) for t in (call.q, call.k, call.v)])
    start(_fwd, "fwd", given, call, unit, call.right < UNBOUNDED)
