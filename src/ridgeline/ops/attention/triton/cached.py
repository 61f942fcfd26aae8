"""Packed queries of any lengths against a cache of keys and values, in blocks or contiguous: prefill in chunks.

A program takes a tile of queries of one sequence, as in `forward.py`, and finds its keys through the sequence's row of
the block table. A tile of keys may cross blocks: each key has its own address, unless a block holds whole tiles.
Entries past a sequence's keys are never read. Keys past its end are 0, so that memory no key owns stays out.
Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023
(arXiv:2309.06180).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name
from ridgeline.ops.attention.common.arguments import UNBOUNDED
from ridgeline.ops.attention.triton.launcher import Call, heads, step_unit
from ridgeline.ops.attention.triton.scheduler import Tile, find_sequence, key_blocks, place, section_of, seen_band
from ridgeline.ops.attention.triton.softmax import Softmax, masked_scores, no_keys, normalizer, power
from ridgeline.ops.attention.triton.tiles import (
    Rows,
    add_product,
    address,
    head_rows,
    load_tile,
    scale_rows,
    scores,
    store_tile,
)
from ridgeline.tiles.online_softmax import exact_exp


class Owners(NamedTuple):
    """Whose queries and keys are whose: cu_seqlens of queries, each sequence's keys, and the block table or None."""

    cu: Any
    lengths: Any
    table: Any
    row_step: Any  # of the table
    blocks: Any  # of the cache


class Sizes(NamedTuple):
    """The numbers of a call that the kernel does not specialise on."""

    rows: Any  # tokens
    room: Any  # the most keys of a sequence
    heads: Any
    group: Any  # heads of queries per head of keys
    batch: Any  # sequences
    window_left: Any
    window_right: Any


class Keys(NamedTuple):
    """A sequence's keys: its number, or its row of the block table; and the head."""

    sequence: Any
    table: Any
    blocks: Any
    head: Any


@triton.jit
def cached_tile(owners, sizes, BM: tl.constexpr):
    """Returns the program's tile of BM queries. Its sequence counts as empty if the tile is past its queries."""
    tiles = sizes.rows // BM + sizes.batch + 1
    number, head = place(tl.program_id(0), tiles, sizes.heads, sizes.heads, False)
    tile, begin, rows, _, _ = find_sequence(number, owners.cu, owners.cu, sizes.rows, sizes.rows, sizes.batch, BM)
    # A sequence's tiles are numbered from begin // BM + its own number on.
    sequence = tl.minimum(tl.maximum(number - begin // BM - tile, 0), sizes.batch)
    known = (sequence < sizes.batch) & (tile * BM < rows)
    held = tl.load(owners.lengths + sequence, mask=known, other=0)
    columns = tl.minimum(tl.maximum(held, 0), sizes.room)
    return Tile(tile * BM, head, sequence, head, begin, rows, 0, columns)


@triton.jit
def load_keys(x, at, k_start, limit, RULES: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, ALL: tl.constexpr):
    """Loads BN keys or values from `k_start` on, in `Parts`; 0 from row `limit` on, unless ALL are below it."""
    n = tl.arange(0, BN)
    j = k_start + n
    if at.table is None:
        rows = address(x, at.sequence, at.head, j, RULES.UNIT)
    elif BLOCK % BN == 0:
        block = tl.load(at.table + k_start // BLOCK)
        block = tl.minimum(tl.maximum(block, 0), at.blocks - 1)
        rows = address(x, block, at.head, j % BLOCK, RULES.UNIT)
    else:
        if ALL:
            block = tl.load(at.table + j // BLOCK)
        else:
            block = tl.load(at.table + j // BLOCK, mask=n < limit, other=0)
        block = tl.minimum(tl.maximum(block, 0), at.blocks - 1)
        rows = address(x, block, at.head, j % BLOCK, RULES.UNIT)
    return load_tile(Rows(rows[:, None], 0), n, limit, RULES, ALL)


@triton.jit
def add_cached(
    state, q, k, v, at, k_start, i, band, scale, RULES: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr
):  # fmt: skip
    """Adds the BN keys and values from `k_start` on to the `Softmax` of queries i, as `add_block` does."""
    limit = band.columns - k_start
    keys = load_keys(k, at, k_start, limit, RULES, BLOCK, BN, not MASKED)
    s = scores(q, keys, RULES)
    j = k_start + tl.arange(0, BN)
    s, _ = masked_scores(s, i[:, None], j[None, :], band, None, scale, RULES, MASKED)
    row_max = tl.max(s, 1) if RULES.APART else tl.max(s, 1) * scale.factor
    row_max = tl.maximum(state.row_max, row_max)
    base = tl.where(row_max == float("-inf"), 0.0, row_max) if MASKED else row_max  # a row that has seen no key yet
    p = power(s, base[:, None], scale.factor, RULES.APART, q.main.dtype)
    if RULES.APART:
        rescale = exact_exp(state.row_max - base, q.main.dtype)
    else:
        rescale = tl.exp2(state.row_max - base)
    values = load_keys(v, at, k_start, limit, RULES, BLOCK, BN, not MASKED)
    acc = add_product(scale_rows(state.acc, rescale, RULES), p, values, RULES)
    return Softmax(acc, state.row_sum * rescale + tl.sum(p, 1), row_max)


@triton.jit(do_not_specialize=["sizes"])
def _fwd_cached(
    o, lse, q, k, v, owners, sizes, scale, RULES: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    tile = cached_tile(owners, sizes, BM)
    m = tl.arange(0, BM)
    i = tile.start + m
    first, limit = tile.q_start + tile.start, tile.rows - tile.start
    queries = load_tile(head_rows(q, 0, tile.head, first, RULES), m, limit, RULES)
    table = owners.table
    if table is not None:
        table += tile.batch.to(tl.int64) * owners.row_step
    at = Keys(tile.batch, table, owners.blocks, tile.head // sizes.group)
    band = seen_band(tile, sizes, RULES)
    blocks = key_blocks(tile, band, RULES, BM, BN, False)
    state = no_keys(BM, RULES)
    for SECTION in tl.static_range(3):
        if RULES.LEFT if SECTION == 0 else True:
            low, high = section_of(blocks, SECTION)
            for k_start in range(low, high, BN):
                state = add_cached(state, queries, k, v, at, k_start, i, band, scale, RULES, BLOCK, BN, SECTION != 1)
    factors, sums = normalizer(state.row_sum, state.row_max, RULES.APART)
    store_tile(head_rows(o, 0, tile.head, first, RULES), scale_rows(state.acc, factors, RULES), m, limit, RULES)
    tl.store(lse + tile.head.to(tl.int64) * sizes.rows + tile.q_start + i, sums, mask=i < tile.rows)


def _rule(gpu: device.Device, dtype: torch.dtype, precision: str, width: int, most: int) -> tuning.Config:
    """Returns tiles of BM queries, no more than `most`, and BN keys. Not timed."""
    wide, roomy = width > 128, gpu.shared_memory >= 227 << 10 and gpu.capability < 100
    if gpu.backend == "cpu":
        found = 32, 32, 4, 1
    elif dtype == torch.float32:
        simple = precision == "ieee" or gpu.backend == "hip"
        found = (32, 16 if wide else 32, 4, 1) if simple else (32 if wide else 64, 32, 4, 1 if wide else 2)
    elif gpu.backend == "hip":
        found = (64, 32, 4, 1) if wide else (128, 64, 4, 1)
    elif roomy:
        found = (128, 64, 8, 2 if wide else 3)
    else:
        found = (64, 32, 8 if wide else 4, 2)
    rows, columns, warps, stages = found
    if most < rows:
        rows, warps = max(16, most), 4
    return {"BM": rows, "BN": columns, "num_warps": warps, "num_stages": stages}


def _space() -> list[tuning.Config]:
    return [
        {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}
        for bm, warps in ((128, 8), (64, 4), (32, 4), (16, 4))
        for bn in (32, 64, 128)
        for stages in (2, 3, 4)
    ]


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor,
    lengths: torch.Tensor, table: torch.Tensor | None, scale: float, softcap: float, left: int, right: int,
    bottom: bool, max_q: int, precision: str
) -> None:  # fmt: skip
    """Fills o (T, Hq, D) and lse (Hq, T); see `attention_cached_fwd` in common/cached.py.

    max_q, or else the average number of queries, bounds the height of tiles; no value is read by the host.
    """
    (tokens, query_heads, _), (blocks, block, shared, _), sequences = q.shape, k.shape, lengths.numel()
    if not q.numel():
        return
    seen = [t.transpose(0, 1)[None] for t in (o, q)] + [t.transpose(1, 2) for t in (k, v)]
    options = scale, softcap, left, right, bottom, 0, max_q, 0, precision
    call, unit, gpu = (
        Call(seen[1], seen[2], seen[3], None, None, None, None, *options),
        step_unit(tuple(seen)),
        device.of(q),
    )
    rules = call.rules(unit)
    width, most = rules.BD + rules.BE, triton.next_power_of_2(max(1, max_q or tokens // max(sequences, 1)))
    most = min(most, 128)

    def config() -> dict[str, Any]:
        words = [dtype_name(q), *([precision] if q.dtype == torch.float32 else []), f"{most}x{width}"]
        key = " ".join([*words, *(["causal"] * (right < UNBOUNDED))])
        return tuning.config(
            gpu, "attention", "cached", key, partial(_rule, gpu, q.dtype, precision, width, most), _space
        )

    def grid(c: dict[str, Any]) -> tuple[int]:
        return ((tokens // c["BM"] + sequences + 1) * query_heads,)

    out, queries, keys, values = [heads(t, unit) for t in seen]
    room = block * (1 if table is None else table.shape[1])
    sizes = Sizes(tokens, room, query_heads, query_heads // shared, sequences, left, right)
    owners = Owners(cu_q, lengths, table, 0 if table is None else table.stride(0), blocks)
    given = out, lse, queries, keys, values, owners, sizes, call.scales()
    facts = {"RULES": rules, "BLOCK": 1 if table is None else block}
    launch(_fwd_cached, grid, *given, config=config, key=("cached", tokens, room), **facts)
