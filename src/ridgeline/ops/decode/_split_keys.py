"""Decode attention in Triton: a program per sequence, key head and part of the keys; then the parts are combined.

Reading the cache takes nearly all the time, so a program reads each key once for all the queries and heads that share
it: row r of its tile is query r // group of head r % group. A sequence's keys are split into parts of equal length, by
its own length, which only the GPU knows; programs past the last part end at once. New tokens are never read back from
the cache: the program of the last part rotates and stores them, and attends to them from registers.
Scales and zeros of a quantised cache leave the products: with k = (c - z) s, q k = s (q c - z sum q), and likewise
p v = sum (p s) c - sum (p s z).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.op import dtype_name
from ridgeline.ops.decode._cache import capacity, kind_of
from ridgeline.ops.decode._parts import (
    LOG2E,
    Cached,
    Numbers,
    Queries,
    Results,
    Rules,
    Tokens,
    absorb,
    columns,
    combine,
    finish,
    fitted,
    new_tokens,
    offsets,
    parts_of,
    quantised,
    rotated,
    scale_and_zero,
    span,
    stored,
    three_steps,
    visible,
)  # fmt: skip
from ridgeline.tiles.float8 import decoded, encoded


@triton.jit
def _scores(q, k, sums, s, z, seen, scale, softcap, RULES: tl.constexpr):
    """Scores in base 2 of a tile of rows and keys, -inf where a row does not see a key."""
    WAYS: tl.constexpr = RULES.WAYS
    x = tl.dot(q[0], tl.trans(k[0]), input_precision=RULES.PRECISION)
    for way in tl.static_range(1, WAYS):
        x = tl.dot(q[way], tl.trans(k[way]), x, input_precision=RULES.PRECISION)
    if RULES.KIND != "":
        x = (x - sums[:, None] * z[None, :]) * s[None, :]
    x *= scale
    if RULES.CAP:
        e = tl.exp2(-2.8853900817779268 * tl.abs(x) / softcap)  # tanh without overflow
        x = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e) * softcap * 1.4426950408889634
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _append(cache, tokens, b, h, n, known, x, RULES: tl.constexpr, BD: tl.constexpr, TO: tl.constexpr):
    """Writes new tokens at n. Returns them as `stored` would read them, with their scales and zeros."""
    WAYS: tl.constexpr = RULES.WAYS
    written = known & (n < tokens.capacity)
    at, scale, zero = offsets(cache, tokens, b, h, n, written, RULES)
    d = tl.arange(0, BD)
    inside = written[:, None] & (d < RULES.D // RULES.WAYS)[None, :]
    to = cache.data + at[:, None] + d[None, :]
    s = known.to(tl.float32)
    z = tl.zeros_like(s)
    made = ()
    if RULES.KIND == "":
        kept = x[0].to(cache.data.dtype.element_ty)
        tl.store(to, kept, mask=inside)
        made = (kept.to(TO),)
    else:
        levels, s, z = quantised(x, known, written, scale, zero, cache, RULES)
        codes = tl.zeros(levels[0].shape, tl.int32)
        for way in tl.static_range(WAYS):
            y = levels[way]
            if RULES.KIND == "int4":
                codes |= y.to(tl.int32) << 4 * way
                y -= 8.0
            elif RULES.KIND == "int8":
                codes |= (y.to(tl.int32) & 255) << 8 * way
            else:
                code = encoded(y, RULES.NATIVE)
                codes |= code.to(tl.int32) << 8 * way
                y = decoded(code, RULES.NATIVE)
            made = made + (y.to(TO),)
        tl.store(to, codes.to(tl.int16), mask=inside)
        s = tl.where(known, s, 0.0)
    return made, s, z


@triton.jit
def _newest(new, b, h, length, fresh, i, RULES: tl.constexpr, BD: tl.constexpr):
    """New tokens i of a sequence: tiles of keys, rotated, and of values."""
    WAYS: tl.constexpr = RULES.WAYS
    place = length + i
    if new.positions is not None:
        place = tl.load(new.positions + b * new.position_step + i, mask=fresh, other=0)
    k_at = b * new.k_steps[0] + i * new.k_steps[1] + h * new.k_steps[2]
    v_at = b * new.v_steps[0] + i * new.v_steps[1] + h * new.v_steps[2]
    k = ()
    v = ()
    for way in tl.static_range(WAYS):
        d = columns(way, RULES, BD)
        inside = fresh[:, None] & (d < RULES.D)[None, :]
        k = k + (rotated(new.k, k_at, fresh, place, d, new, RULES),)
        v = v + (tl.load(new.v + v_at[:, None] + d[None, :], mask=inside, other=0.0),)
    return k, v


@triton.jit
def _begin(q, at, inside, turns, new, RULES: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Tiles of queries, rotated, and of values that are 0 yet."""
    WAYS: tl.constexpr = RULES.WAYS
    tiles = ()
    acc = ()
    for way in tl.static_range(WAYS):
        tiles = tiles + (rotated(q, at, inside, turns, columns(way, RULES, BD), new, RULES),)
        acc = acc + (tl.zeros((BM, BD), tl.float32),)
    return tiles, acc


@triton.jit
def _attend(
    results, queries, keys, values, tokens, new, numbers, RULES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    WAYS: tl.constexpr = RULES.WAYS
    part, turn = tl.program_id(0) % numbers.parts, tl.program_id(0) // numbers.parts
    b, h = (turn // numbers.heads).to(tl.int64), turn % numbers.heads
    length = tl.minimum(tl.load(tokens.lengths + b), tokens.capacity)
    first = length if new.k is not None else length - numbers.queries  # the place of the first query
    low, share, active = span(length, first, numbers, RULES, BN)
    if (part >= active) & (part > 0):
        return
    total = first + numbers.queries
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    j, row = r // numbers.group, h * numbers.group + r % numbers.group
    inside = (j < numbers.queries) & (length >= 0)
    place = first + j
    turns = place
    if new.positions is not None:
        turns = tl.load(new.positions + b * new.position_step + j, mask=inside, other=0)
    q_at = b * queries.steps[0] + j * queries.steps[1] + row * queries.steps[2]
    q, acc = _begin(queries.q, q_at, inside, turns, new, RULES, BM, BD)
    scale = numbers.scale
    TO: tl.constexpr = tl.float16 if RULES.KIND != "" and q[0].dtype == tl.bfloat16 else q[0].dtype
    if TO != q[0].dtype:
        q, power = fitted(q, RULES.WAYS, TO)
        scale = (numbers.scale * power)[:, None]
    sums = tl.sum(q[0].to(tl.float32), 1)
    for way in tl.static_range(1, WAYS):
        sums += tl.sum(q[way].to(tl.float32), 1)
    state = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32), acc
    begin = low + part * share
    for start in range(begin, tl.minimum(begin + share, length), BN):
        n = start + tl.arange(0, BN)
        known = n < length
        if RULES.WINDOW:  # what no query sees may be given away already
            known &= n >= first - numbers.left
        at, at_scale, at_zero = offsets(keys, tokens, b, h, n, known, RULES)
        k = stored(keys, at, known, RULES, BD, TO)
        s, z = scale_and_zero(keys, at_scale, at_zero, known, RULES)
        seen = visible(j, place, n, known, row, inside, total, b, queries, numbers, RULES)
        x = _scores(q, k, sums, s, z, seen, scale, numbers.softcap, RULES)
        at, at_scale, at_zero = offsets(values, tokens, b, h, n, known, RULES)
        v = stored(values, at, known, RULES, BD, TO)
        s, z = scale_and_zero(values, at_scale, at_zero, known, RULES)
        state = absorb(state, x, v, s, z, RULES)
    if new.k is not None:  # noqa: SIM102  # the compiler knows this, and not the next
        if part == active - 1:
            i = tl.arange(0, BS)
            fresh = (i < numbers.queries) & (length >= 0)
            k, v = _newest(new, b, h, length, fresh, i, RULES, BD)
            # Programs of several tiles of rows write the same bytes.
            k, s, z = _append(keys, tokens, b, h, length + i, fresh, k, RULES, BD, TO)
            seen = visible(j, place, length + i, fresh, row, inside, total, b, queries, numbers, RULES)
            x = _scores(q, k, sums, s, z, seen, scale, numbers.softcap, RULES)
            v, s, z = _append(values, tokens, b, h, length + i, fresh, v, RULES, BD, TO)
            state = absorb(state, x, v, s, z, RULES)
    if RULES.PDL:
        gdc_launch_dependents()
    finish(results, queries, state, part, turn, tl.num_programs(0), b, j, row, r, numbers, RULES, BD)


def rule(gpu: device.Device, size: int, rows: int, width: int, paged: bool) -> tuning.Config:
    """Tiles of keys of up to 16 KiB, so that two programs of three stages fit an H100's multiprocessor.

    size: bytes of a key as its tile holds it. paged: reading the block table takes two stages more, which need no room.
    """
    if gpu.backend == "cpu":
        return {"BN": 16, "num_warps": 4, "num_stages": 1}
    bn = max(16, min(128, 1 << (16384 // size).bit_length() - 1))
    stages = max(1, min(3, (gpu.shared_memory - 24576) // (2 * bn * size))) + 2 * paged
    return {"BN": bn, "num_warps": 8 if rows * width > 8192 else 4, "num_stages": stages}


def space() -> list[tuning.Config]:
    return [
        {"BN": bn, "num_warps": warps, "num_stages": stages}
        for bn in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4, 5)
    ]


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: Any,
    k: Any, v: Any, block_table: Any, cos: Any, sin: Any, positions: Any, sinks: Any, k_scale: Any, v_scale: Any,
    k_zero: Any, v_zero: Any, tree: Any, scale: float, left: int, softcap: float, interleaved: bool, invariant: bool,
    precision: str,
) -> None:  # fmt: skip
    """Fills o and lse, and appends k and v. left: how many earlier keys a query sees; -1: all."""
    (B, S, heads, D), shared = q.shape, k_cache.shape[2]
    gpu, group, most, kind = device.of(q), heads // shared, capacity(k_cache, block_table), kind_of(k_cache)
    ways = {"": 1, "int4": 4}.get(kind, 2)
    rows, bd = S * group, max(16, triton.next_power_of_2(D // ways))
    bm = min(64, max(16, triton.next_power_of_2(rows)))
    turns = B * shared
    each = 1 if kind == "" and block_table is None else 2  # a second program hides the wait for the table or the codes
    parts = parts_of(gpu.multiprocessors, turns * triton.cdiv(rows, bm), most, invariant, each)
    pieces = torch.empty(parts * turns * rows * (D + 2), dtype=torch.float32, device=q.device) if parts > 1 else None
    second = early(gpu)
    bits = 2 if kind else q.element_size()
    keys, values = (t.view(torch.int16) if kind else t for t in (k_cache, v_cache))

    def config() -> dict[str, Any]:
        key = f"{dtype_name(q)}{' ' + kind if kind else ''} {bm}x{bd}{'' if block_table is None else ' blocks'}"
        found = partial(rule, gpu, bd * bits, bm, bd, block_table is not None)
        return tuning.config(gpu, "decode_attention", "fwd", key, found, space)

    rules = Rules(
        D, 0 if cos is None else cos.shape[1], interleaved, kind, ways, k_scale is not None and k_scale.dim() == 3,
        0 if block_table is None else k_cache.shape[1], softcap > 0, left >= 0, invariant,
        gpu.capability >= 89, precision, parts > 1 and second["PDL"],
    )  # fmt: skip
    results = Results(o, lse, pieces)
    tokens = Tokens(lengths, block_table, 0 if block_table is None else block_table.stride(0), most)
    numbers = Numbers(S, shared, group, parts, scale if softcap else scale * LOG2E, softcap, left)
    given = (
        results,
        Queries(q, sinks, tree, q.stride()[:3], None if tree is None else tree.stride()[:2]),
        Cached(keys, k_scale, k_zero, keys.stride()[:3], three_steps(k_scale), three_steps(k_zero)),
        Cached(values, v_scale, v_zero, values.stride()[:3], three_steps(v_scale), three_steps(v_zero)),
        tokens,
        new_tokens(k, v, cos, sin, positions),
        numbers,
    )
    grid, tile = (parts * turns, triton.cdiv(rows, bm)), {"BM": bm, "BS": 16, "BD": bd}
    launch(_attend, grid, *given, config=config, key=("decode", bm), RULES=rules, **tile)
    if pieces is not None:
        facts = {"APPENDED": k is not None, "RULES": rules, "BN": config()["BN"], "BD": triton.next_power_of_2(D)}
        facts |= {"SOME": 16, "num_warps": 4} | {n: v for n, v in second.items() if n == "launch_pdl"}
        launch(combine, (turns * rows,), results, sinks, tokens, numbers, **facts)
