"""Attention forward for few queries of many keys, as in a decoder with a cache: flash decoding, in Triton.

    part p of the keys gives each row a maximum m_p, a sum l_p and values a_p
    m = max m_p,  o = sum 2^(m_p - m) a_p / sum 2^(m_p - m) l_p

Reading keys and values takes nearly all the time. One program per head would use few multiprocessors, and read keys
once for each head that shares them. Here a tile of rows holds the queries of all heads that share keys, and the keys
are split into parts, one program each. A second kernel combines the parts in order, as the online softmax does, so
results are bitwise reproducible. A single part is written directly.
Source: Dao, Haziza, Massa and Sizov, Flash-Decoding for long-context inference, 2023
(https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.op import dtype_name
from ridgeline.ops.attention.triton import forward
from ridgeline.ops.attention.triton.launcher import Call, heads, step_unit
from ridgeline.ops.attention.triton.scheduler import Band, seen_keys
from ridgeline.ops.attention.triton.softmax import (
    Mask,
    RowSums,
    add_block,
    add_sink,
    head_mask,
    load_sink,
    no_keys,
    normalizer,
    power,
)
from ridgeline.ops.attention.triton.tiles import Rows, address, head_rows, load_tile, scale_rows, store_tile

ROWS, TILE, KEYS = 64, 32768, 512  # at most so many rows and bytes of a tile; at least so many keys to split
BUSY = 264  # heads that keep a GPU busy: two per multiprocessor of an H100
GRAIN, LEAST, MOST = 128, 256, 128  # parts have a multiple of so many keys, at least so many; the most parts


class Sizes(NamedTuple):
    """The numbers of a call that kernels do not specialise on."""

    rows: Any
    columns: Any
    heads: Any  # of keys
    group: Any  # heads of queries per head of keys
    parts: Any  # that a head's keys are split into
    window_left: Any
    window_right: Any
    prefix: Any


@triton.jit
def part_of_keys(part, sizes, band, RULES: tl.constexpr, BN: tl.constexpr):
    """Returns the range of keys of a part, of those that any query sees."""
    blocks = seen_keys(0, band.rows - 1, band, RULES, BN, True)
    share = tl.cdiv(tl.cdiv(tl.maximum(blocks.high - blocks.low, 0), sizes.parts), BN) * BN
    low = blocks.low + part * share
    return low, tl.minimum(low + share, blocks.high)


@triton.jit(do_not_specialize=["sizes"])
def _fwd(
    o, ends, pieces, q, k, v, mask, sizes, scale, RULES: tl.constexpr, PDL: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr
):  # fmt: skip
    """Row r of a tile is query r // group of head r % group, among the heads that share keys."""
    part, turn = tl.program_id(0) % sizes.parts, tl.program_id(0) // sizes.parts
    b, h = turn // sizes.heads, turn % sizes.heads
    r = tl.arange(0, BM)
    size, i, own = sizes.rows * sizes.group, r // sizes.group, h * sizes.group + r % sizes.group
    queries = load_tile(Rows(head_rows(q, b, own, i, RULES).data[:, None], 0), r, size, RULES)
    keys, values = head_rows(k, b, h, 0, RULES), head_rows(v, b, h, 0, RULES)
    if mask is not None:  # each row has its own head
        mask = head_mask(mask, b, own)
        mask = Mask(mask.data[:, None], 0, 0, mask.row_step, mask.column_step)
    shift = sizes.columns - sizes.rows if RULES.BOTTOM else 0
    prefix = sizes.prefix if RULES.PREFIX else 0
    band = Band(sizes.rows, sizes.columns, sizes.window_left - shift, sizes.window_right + shift, prefix)
    low, high = part_of_keys(part, sizes, band, RULES, BN)
    state = no_keys(BM, RULES)
    for k_start in range(low, high, BN):
        state = add_block(state, queries, keys, values, k_start, i, band, mask, scale, RULES, BN, True)
    if PDL:
        gdc_launch_dependents()
    if pieces is None:
        acc, row_sum, row_max = state.acc, state.row_sum, state.row_max
        if ends.sinks is not None:
            sink = load_sink(ends.sinks, own, RULES.APART)
            row_sum, row_max, rescale = add_sink(row_sum, row_max, sink, RULES.APART)
            acc = scale_rows(acc, rescale, RULES)
        factors, sums = normalizer(row_sum, row_max, RULES.APART)
        rows = Rows(head_rows(o, b, own, i, RULES).data[:, None], 0)
        store_tile(rows, scale_rows(acc, factors, RULES), r, size, RULES)
        at = (turn.to(tl.int64) * sizes.group + r % sizes.group) * sizes.rows + i
        tl.store(ends.lse + at, sums, mask=r < size)
    else:
        store_piece(pieces, state, r, size, RULES)


@triton.jit
def store_piece(pieces, state, r, size, RULES: tl.constexpr):
    """Stores a part's unscaled sums: values, then maxima, then sums, each for all programs."""
    count = tl.num_programs(0) * size
    at = tl.program_id(0) * size
    store_tile(Rows(pieces + at * RULES.D, RULES.D // RULES.UNIT), state.acc, r, size, RULES)
    tl.store(pieces + count * RULES.D + at + r, state.row_max, mask=r < size)
    tl.store(pieces + count * (RULES.D + 1) + at + r, state.row_sum, mask=r < size)


@triton.jit(do_not_specialize=["rows", "heads", "group", "parts"])
def _join(
    o, ends, pieces, rows, heads, group, parts, APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr, SOME: tl.constexpr
):  # fmt: skip
    """Combines a row's parts into o and lse, SOME at a time."""
    size = rows * group
    turn, r = tl.program_id(0) // size, tl.program_id(0) % size
    count = tl.num_programs(0) * parts
    p, d = tl.arange(0, SOME), tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    row_sum, row_max = 0.0, float("-inf")
    if PDL:
        gdc_wait()
    for start in range(0, parts, SOME):
        inside = start + p < parts
        at = (turn * parts + start + p) * size + r
        maxima = tl.load(pieces + count * D + at, mask=inside, other=float("-inf"))
        sums = tl.load(pieces + count * (D + 1) + at, mask=inside, other=0.0)
        some = tl.load(pieces + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        new = tl.maximum(row_max, tl.max(maxima, 0))
        base = tl.where(new == float("-inf"), 0.0, new)  # no key seen yet
        weights = power(maxima, base, 1.0, APART, o.data.dtype.element_ty)
        rescale = power(row_max, base, 1.0, APART, o.data.dtype.element_ty)
        acc = acc * rescale + tl.sum(some * weights[:, None], 0)
        row_sum = row_sum * rescale + tl.sum(sums * weights, 0)
        row_max = new
    if ends.sinks is not None:
        sink = load_sink(ends.sinks, turn % heads * group + r % group, APART)
        row_sum, row_max, rescale = add_sink(row_sum, row_max, sink, APART)
        acc = acc * rescale
    factor, total = normalizer(row_sum, row_max, APART)
    at = address(o, turn // heads, turn % heads * group + r % group, r // group, UNIT)
    tl.store(at + d, (acc * factor).to(o.data.dtype.element_ty), mask=d < D)
    tl.store(ends.lse + (turn.to(tl.int64) * group + r % group) * rows + r // group, total)


def few(q: torch.Tensor, k: torch.Tensor, packed: bool = False) -> bool:
    """Returns whether a call has few queries of many keys, by sizes alone.

    The rows of a key head must fit a tile. In addition, heads must share keys, which a tile per head would read again,
    or be too few to keep a GPU busy.
    """
    if packed or not k.shape[1]:
        return False
    (batch, heads, rows, D), (_, shared, columns, _) = q.shape, k.shape
    most = min(ROWS, TILE // (D * q.element_size())) * shared
    return (
        columns >= KEYS
        and 0 < batch * rows * heads
        and rows * heads <= most
        and (heads > shared or batch * heads < BUSY)
    )


def aside(q: torch.Tensor, k: torch.Tensor, *rest: Any, **_: Any) -> str | None:
    """Returns why forward is left to this kernel, or None. Takes public arguments or a launcher's inputs."""
    packed = q.dim() == 3 or (len(rest) > 2 and rest[2] is not None)
    return (
        "for few queries of many keys, `triton` is faster forward, since it splits the keys"
        if few(q, k, packed)
        else None
    )


@lru_cache(1 << 10)
def _split(
    multiprocessors: int, turns: int, rows: int, columns: int, left: int, right: int, bottom: bool, prefix: int
) -> int:
    """Returns into how many parts a head's keys are split.

    The aim is one program per multiprocessor, or two if there are too many heads for two parts each; two everywhere is
    slower (docs/notes/attention.md).
    """
    shift = columns - rows if bottom else 0
    low, high = max(shift - left, 0), min(columns, max(rows + shift + right, prefix))
    blocks = triton.cdiv(max(high - low, 1), GRAIN)
    share = multiprocessors // turns
    parts = max(1, min(share if share > 1 else 2 * multiprocessors // turns, blocks * GRAIN // LEAST, MOST))
    return triton.cdiv(blocks, triton.cdiv(blocks, parts))


def _rule(gpu: device.Device, dtype: torch.dtype, rows: int, width: int) -> tuning.Config:
    """Returns tiles of keys of up to 16 KiB: two programs fit three stages on an H100, or two on an A100.

    Eight warps if four would have too few registers. Not timed.
    """
    if gpu.backend == "cpu":
        return {"BN": 16, "num_warps": 4, "num_stages": 1}
    most = min(16384 // dtype.itemsize // width, 4096 // rows, 128)
    deep = gpu.shared_memory >= 227 << 10 and dtype != torch.float32
    warps = 8 if rows * width * dtype.itemsize >= 10240 else 4
    return {"BN": max(16, 1 << most.bit_length() - 1), "num_warps": warps, "num_stages": 3 if deep else 2}


def _space() -> list[tuning.Config]:
    return [
        {"BN": bn, "num_warps": warps, "num_stages": stages}
        for bn in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]


def fwd(o: torch.Tensor, lse: torch.Tensor, *inputs: Any) -> None:
    """Fills o and lse, by the other forward if the queries are not few; see `attention_fwd` in common/kernels.py."""
    call = Call(*inputs)
    q, k, v = call.q, call.k, call.v
    if not few(q, k, call.cu_q is not None):
        return forward.fwd(o, lse, *inputs)
    (batch, query_heads, rows, D), shared, columns = q.shape, k.shape[1], k.shape[2]
    gpu, unit, group = device.of(q), step_unit((o, q, k, v)), query_heads // shared
    BM, rules = max(16, triton.next_power_of_2(rows * group)), call.rules(unit)
    width = rules.BD + rules.BE
    split = _split(gpu.multiprocessors, batch * shared, rows, columns, call.left, call.right, call.bottom, call.prefix)
    pieces = q.new_empty(split * batch * query_heads * rows * (D + 2), dtype=torch.float32) if split > 1 else None

    def config() -> dict[str, Any]:
        key = f"{dtype_name(q)}{'' if q.dtype != torch.float32 else ' ' + call.precision} {BM}x{width}"
        return tuning.config(gpu, "attention", "few", key, partial(_rule, gpu, q.dtype, BM, width), _space)

    second = early(gpu)
    sizes = Sizes(rows, columns, shared, group, split, call.left, call.right, call.prefix or None)
    ends = RowSums(lse, call.sinks)
    out, *inputs_ = [heads(t, unit) for t in (o, q, k, v)]
    given = out, ends, pieces, *inputs_, call.masked(), sizes, call.scales()
    facts: dict[str, Any] = {"RULES": rules, "PDL": split > 1 and second["PDL"], "BM": BM}
    launch(_fwd, (split * batch * shared,), *given, config=config, key=("few",), **facts)
    if pieces is None:
        return None
    facts = {"APART": call.apart, "D": D, "BD": triton.next_power_of_2(D), "UNIT": unit, "SOME": 32, "num_warps": 4}
    launch(_join, (batch * query_heads * rows,), out, ends, pieces, rows, shared, group, split, **facts, **second)
    return None
