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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.op import dtype_name
from ridgeline.ops.decode._cache import capacity, kind_of
from ridgeline.tiles.float8 import decoded, encoded

LOG2E = 1.4426950408889634
LEAST, MOST = 256, 128  # parts hold at least so many keys; the most parts of a sequence
FIXED = 64  # parts of a long sequence if they may depend on its own length only


class Queries(NamedTuple):
    q: Any  # (B, S, heads, D)
    sinks: Any  # (heads,) or None
    tree: Any  # (B, S, S) or None
    steps: Any  # of q's first three dimensions
    tree_steps: Any


class Cached(NamedTuple):
    """One cache: numbers, scales and zeros, with the steps of their first three dimensions."""

    data: Any
    scale: Any
    zero: Any
    steps: Any
    scale_steps: Any
    zero_steps: Any


class Tokens(NamedTuple):
    """What is known of the sequences' tokens."""

    lengths: Any
    table: Any  # (B, most) or None
    table_step: Any
    capacity: Any


class New(NamedTuple):
    """New keys and values, (B, S, key heads, D), or None; and the rotation of q and the new keys, or None."""

    k: Any
    v: Any
    cos: Any
    sin: Any
    positions: Any
    k_steps: Any
    v_steps: Any
    angle_step: Any
    position_step: Any
    angles: Any  # rows of cos


class Results(NamedTuple):
    o: Any  # (B, S, heads, D), contiguous
    lse: Any  # (B, heads, S), float32
    pieces: Any  # float32: values, maxima and sums of each part; None if there is one part


class Numbers(NamedTuple):
    queries: Any
    heads: Any  # of keys
    group: Any
    parts: Any
    scale: Any  # times log2(e) without softcap
    softcap: Any
    left: Any


class Rules(NamedTuple):
    """What the compiler knows."""

    D: Any
    R: Any  # pairs that are rotated; 0 without rotation
    INTERLEAVED: Any
    KIND: Any  # of the cache: "", "int8", "int4", "float8"
    PER_TOKEN: Any  # scales are per token and head
    BLOCK: Any  # tokens of a block; 0: contiguous
    CAP: Any
    WINDOW: Any
    FIXED: Any  # parts depend on the sequence's length alone
    NATIVE: Any  # whether the GPU converts 8-bit floating-point numbers
    PRECISION: Any
    PDL: Any


@triton.jit
def _columns(HALF: tl.constexpr, RULES: tl.constexpr, BD: tl.constexpr):
    """The columns of a tile: all of D, or of int4 the even (HALF 0) or odd (1) ones."""
    return 2 * tl.arange(0, BD) + HALF if RULES.KIND == "int4" else tl.arange(0, BD)


@triton.jit
def _rotated(x, at, known, place, d, new, RULES: tl.constexpr):
    """Loads columns d of rows at x + at, rotated by the angles of their places; unknown rows are 0."""
    inside = known[:, None] & (d < RULES.D)[None, :]
    own = tl.load(x + at[:, None] + d[None, :], mask=inside, other=0.0)
    if RULES.R:
        if RULES.INTERLEAVED:
            partner, pair, first = d ^ 1, d // 2, d % 2 == 0
        else:
            partner, pair, first = tl.where(d < RULES.R, d + RULES.R, d - RULES.R), d % RULES.R, d < RULES.R
        turns = d < 2 * RULES.R
        both = inside & turns[None, :]
        other = tl.load(x + at[:, None] + partner[None, :], mask=both, other=0.0).to(tl.float32)
        good = both & ((place >= 0) & (place < new.angles))[:, None]
        angle = place[:, None] * new.angle_step + pair[None, :]
        c = tl.load(new.cos + angle, mask=good, other=float("nan")).to(tl.float32)
        s = tl.load(new.sin + angle, mask=good, other=float("nan")).to(tl.float32)
        turned = own.to(tl.float32) * c + tl.where(first[None, :], -other, other) * s
        own = tl.where(both, turned.to(own.dtype), own)
    return own


@triton.jit
def _where(cache, tokens, b, h, n, known, RULES: tl.constexpr):
    """Offsets of tokens n of sequence b in the cache, in its scales and in its zeros."""
    if RULES.BLOCK:
        row = tl.load(tokens.table + b * tokens.table_step + n // RULES.BLOCK, mask=known, other=0).to(tl.int64)
        place = (n % RULES.BLOCK).to(tl.int64)
    else:
        row, place = n * 0 + b, n.to(tl.int64)
    h = h.to(tl.int64)
    at = row * cache.steps[0] + place * cache.steps[1] + h * cache.steps[2]
    scale = at * 0
    zero = at * 0
    if cache.scale is not None:
        scale = row * cache.scale_steps[0] + place * cache.scale_steps[1] + h * cache.scale_steps[2]
    if cache.zero is not None:
        zero = row * cache.zero_steps[0] + place * cache.zero_steps[1] + h * cache.zero_steps[2]
    return at, scale, zero


@triton.jit
def _whole(u, OFFSET: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr):
    """Bytes u, of which BITS bits are used, minus OFFSET, in a floating dtype.

    The bits of u become the last bits of a power of two's mantissa, which is quicker than to convert integers."""
    if TO == tl.bfloat16 and BITS < 8:
        return (u.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
    elif TO == tl.float16:
        return (u.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    else:
        return ((u.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)).to(TO)


@triton.jit
def _stored(cache, at, known, RULES: tl.constexpr, BD: tl.constexpr, TO: tl.constexpr):
    """The numbers of a tile of keys as they are stored, in a dtype for products: one tile or, of int4, two.

    Rows and columns that are not known hold any finite number: q or p is 0 there."""
    d = tl.arange(0, BD)
    width: tl.constexpr = RULES.D // 2 if RULES.KIND == "int4" else RULES.D
    raw = tl.load(cache.data + at[:, None] + d[None, :], mask=known[:, None] & (d < width)[None, :], other=0.0)
    if RULES.KIND == "int4":
        shift: tl.constexpr = 8.0 if cache.zero is None else 0.0
        return _whole(raw & 15, shift, 4, TO), _whole(raw >> 4, shift, 4, TO)
    elif RULES.KIND == "int8":
        made = _whole(raw.to(tl.uint8, bitcast=True) ^ 128, 128.0, 8, TO)
        return made, made
    elif RULES.KIND == "float8":
        made = decoded(raw, RULES.NATIVE).to(TO)
        return made, made
    else:
        return raw.to(TO), raw.to(TO)


@triton.jit
def _facts(cache, scale, zero, known):
    """Scales and zeros of a tile of keys; 1 and 0 where there are none."""
    s = known.to(tl.float32)
    z = tl.zeros_like(s)
    if cache.scale is not None:
        s = tl.load(cache.scale + scale, mask=known, other=0.0)
    if cache.zero is not None:
        z = tl.load(cache.zero + zero, mask=known, other=0.0)
    return s, z


@triton.jit
def _scores(q, q2, k, k2, sums, s, z, seen, scale, softcap, RULES: tl.constexpr):
    """Scores in base 2 of a tile of rows and keys, -inf where a row does not see a key."""
    x = tl.dot(q, tl.trans(k), input_precision=RULES.PRECISION)
    if RULES.KIND == "int4":
        x = tl.dot(q2, tl.trans(k2), x, input_precision=RULES.PRECISION)
    if RULES.KIND != "":
        x = (x - sums[:, None] * z[None, :]) * s[None, :]
    x *= scale
    if RULES.CAP:
        e = tl.exp2(-2.8853900817779268 * tl.abs(x) / softcap)  # tanh without overflow
        x = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e) * softcap * 1.4426950408889634
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _absorb(state, x, v, v2, s, z, RULES: tl.constexpr):
    """Adds a tile of keys to the rows' running maximum, sum and values, as the online softmax does."""
    row_max, row_sum, offset, acc, acc2 = state
    new_max = tl.maximum(row_max, tl.max(x, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(x - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if RULES.KIND != "":
        if v.dtype == tl.float16:  # small scales would leave float16's range
            most = tl.maximum(tl.max(tl.abs(s), 0), 1e-30)
            s /= most
            acc, acc2, offset = acc / most, acc2 / most, offset / most
        p *= s[None, :]
        offset = offset * rescale + tl.sum(p * z[None, :], 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=RULES.PRECISION)
    if RULES.KIND == "int4":
        acc2 = tl.dot(p.to(v.dtype), v2, acc2 * rescale[:, None], input_precision=RULES.PRECISION)
    if RULES.KIND != "":  # noqa: SIM102
        if v.dtype == tl.float16:
            acc, acc2, offset = acc * most, acc2 * most, offset * most
    return new_max, row_sum, offset, acc, acc2


@triton.jit
def _levels(x, x2, known, written, scale, zero, cache, RULES: tl.constexpr):
    """Quantises new tokens, and stores what is made per token of those that are written. Returns the levels of both
    tiles, with their scales and zeros."""
    low: tl.constexpr = -128.0 if RULES.KIND == "int8" else -448.0 if RULES.KIND == "float8" else 0.0
    high: tl.constexpr = 127.0 if RULES.KIND == "int8" else 448.0 if RULES.KIND == "float8" else 15.0
    even: tl.constexpr = 12582912.0  # adding and subtracting 1.5 x 2^23 rounds to an integer, half to even
    x, x2 = x.to(tl.float32), x2.to(tl.float32)
    if RULES.PER_TOKEN:
        most, least = tl.maximum(tl.max(x, 1), tl.max(x2, 1)), tl.minimum(tl.min(x, 1), tl.min(x2, 1))
        if cache.zero is not None:
            s = tl.maximum((most - least) / (high - low), 1e-12)
            z = low - (least / s + even - even)
            tl.store(cache.zero + zero, z, mask=written)
        else:
            s = tl.maximum(tl.maximum(most, -least), 1e-12) / (7.0 if RULES.KIND == "int4" else high)
            z = tl.zeros_like(s)
        tl.store(cache.scale + scale, s, mask=written)
    else:
        s, z = _facts(cache, scale, zero, known)
    shift = z + 8.0 if RULES.KIND == "int4" and cache.zero is None else z
    safe = tl.where(s == 0.0, 1.0, s)[:, None]
    y, y2 = x / safe + shift[:, None], x2 / safe + shift[:, None]
    if RULES.KIND != "float8":
        y, y2 = y + even - even, y2 + even - even
    y, y2 = tl.minimum(tl.maximum(y, low), high), tl.minimum(tl.maximum(y2, low), high)
    return y, y2, s, z


@triton.jit
def _append(cache, tokens, b, h, n, known, x, x2, RULES: tl.constexpr, BD: tl.constexpr, TO: tl.constexpr):
    """Writes new tokens at n. Returns them as `_stored` would read them, with their scales and zeros."""
    written = known & (n < tokens.capacity)
    at, scale, zero = _where(cache, tokens, b, h, n, written, RULES)
    d = tl.arange(0, BD)
    width: tl.constexpr = RULES.D // 2 if RULES.KIND == "int4" else RULES.D
    inside = written[:, None] & (d < width)[None, :]
    to = cache.data + at[:, None] + d[None, :]
    s = known.to(tl.float32)
    z = tl.zeros_like(s)
    if RULES.KIND == "":
        x = x.to(cache.data.dtype.element_ty)
        tl.store(to, x, mask=inside)
        x, x2 = x.to(TO), x.to(TO)
    else:
        y, y2, s, z = _levels(x, x2, known, written, scale, zero, cache, RULES)
        if RULES.KIND == "int4":
            tl.store(to, (y.to(tl.int32) | y2.to(tl.int32) << 4).to(tl.uint8), mask=inside)
            shift: tl.constexpr = 8.0 if cache.zero is None else 0.0
            x, x2 = (y - shift).to(TO), (y2 - shift).to(TO)
        elif RULES.KIND == "float8":
            code = encoded(y, RULES.NATIVE)
            tl.store(to, code, mask=inside)
            x, x2 = decoded(code, RULES.NATIVE).to(TO), x2.to(TO)
        else:
            tl.store(to, y.to(cache.data.dtype.element_ty), mask=inside)
            x, x2 = y.to(TO), y2.to(TO)
        s = tl.where(known, s, 0.0)
    return x, x2, s, z


@triton.jit
def _span(length, first, numbers, RULES: tl.constexpr, BN: tl.constexpr):
    """The cached keys that any query sees, how many of them a part has, and how many parts are not empty."""
    low = tl.maximum(first - numbers.left, 0) // BN * BN if RULES.WINDOW else 0
    size = tl.maximum(length - low, 0)
    count = 64 if RULES.FIXED else numbers.parts
    share = tl.maximum(tl.cdiv(tl.cdiv(size, count), BN) * BN, 256 if RULES.FIXED else BN)
    return low, share, tl.maximum(tl.cdiv(size, share), 1)


@triton.jit
def _seen(j, place, n, known, row, inside, total, b, queries, numbers, RULES: tl.constexpr):
    """Which keys n each row sees: those up to its place, in its window; of the newest S, those of its tree."""
    seen = inside[:, None] & known[None, :]
    if queries.tree is not None:
        branch = n - (total - numbers.queries)
        recent = branch >= 0
        at = b * queries.tree_steps[0] + j[:, None] * queries.tree_steps[1] + branch[None, :]
        path = tl.load(queries.tree + at, mask=seen & recent[None, :], other=0)
        seen &= (recent[None, :] == 0) | (path != 0)
    else:
        seen &= n[None, :] <= place[:, None]
        if RULES.WINDOW:
            seen &= n[None, :] >= place[:, None] - numbers.left
    return seen


@triton.jit
def _attend(
    results, queries, keys, values, tokens, new, numbers, RULES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    part, turn = tl.program_id(0) % numbers.parts, tl.program_id(0) // numbers.parts
    b, h = (turn // numbers.heads).to(tl.int64), turn % numbers.heads
    length = tl.minimum(tl.load(tokens.lengths + b), tokens.capacity)
    first = length if new.k is not None else length - numbers.queries  # the place of the first query
    low, share, active = _span(length, first, numbers, RULES, BN)
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
    q = _rotated(queries.q, q_at, inside, turns, _columns(0, RULES, BD), new, RULES)
    q2 = q
    sums = tl.sum(q.to(tl.float32), 1)
    if RULES.KIND == "int4":
        q2 = _rotated(queries.q, q_at, inside, turns, _columns(1, RULES, BD), new, RULES)
        sums += tl.sum(q2.to(tl.float32), 1)
    state = (
        tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32),
        tl.zeros((BM, BD), tl.float32), tl.zeros((BM, BD), tl.float32),
    )  # fmt: skip
    begin = low + part * share
    for start in range(begin, tl.minimum(begin + share, length), BN):
        n = start + tl.arange(0, BN)
        known = n < length
        if RULES.WINDOW:  # what no query sees may be given away already
            known &= n >= first - numbers.left
        at, scale, zero = _where(keys, tokens, b, h, n, known, RULES)
        k, k2 = _stored(keys, at, known, RULES, BD, q.dtype)
        s, z = _facts(keys, scale, zero, known)
        seen = _seen(j, place, n, known, row, inside, total, b, queries, numbers, RULES)
        x = _scores(q, q2, k, k2, sums, s, z, seen, numbers.scale, numbers.softcap, RULES)
        at, scale, zero = _where(values, tokens, b, h, n, known, RULES)
        v, v2 = _stored(values, at, known, RULES, BD, q.dtype)
        s, z = _facts(values, scale, zero, known)
        state = _absorb(state, x, v, v2, s, z, RULES)
    if new.k is not None:  # noqa: SIM102  # the compiler knows this, and not the next
        if part == active - 1:
            i = tl.arange(0, BS)
            fresh = (i < numbers.queries) & (length >= 0)
            n = length + i
            new_place = n
            if new.positions is not None:
                new_place = tl.load(new.positions + b * new.position_step + i, mask=fresh, other=0)
            k_at = b * new.k_steps[0] + i * new.k_steps[1] + h * new.k_steps[2]
            k = _rotated(new.k, k_at, fresh, new_place, _columns(0, RULES, BD), new, RULES)
            v_at = b * new.v_steps[0] + i * new.v_steps[1] + h * new.v_steps[2]
            d = _columns(0, RULES, BD)
            v = tl.load(new.v + v_at[:, None] + d[None, :], mask=fresh[:, None] & (d < RULES.D)[None, :], other=0.0)
            k2, v2 = k, v
            if RULES.KIND == "int4":
                d = _columns(1, RULES, BD)
                k2 = _rotated(new.k, k_at, fresh, new_place, d, new, RULES)
                v2 = tl.load(
                    new.v + v_at[:, None] + d[None, :], mask=fresh[:, None] & (d < RULES.D)[None, :], other=0.0
                )
            # Programs of several tiles of rows write the same bytes.
            k, k2, s, z = _append(keys, tokens, b, h, n, fresh, k, k2, RULES, BD, q.dtype)
            seen = _seen(j, place, n, fresh, row, inside, total, b, queries, numbers, RULES)
            x = _scores(q, q2, k, k2, sums, s, z, seen, numbers.scale, numbers.softcap, RULES)
            v, v2, s, z = _append(values, tokens, b, h, n, fresh, v, v2, RULES, BD, q.dtype)
            state = _absorb(state, x, v, v2, s, z, RULES)
    if RULES.PDL:
        gdc_launch_dependents()
    _finish(results, queries, state, part, turn, b, j, row, r, inside, numbers, RULES, BD)


@triton.jit
def _finish(results, queries, state, part, turn, b, j, row, r, inside, numbers, RULES: tl.constexpr, BD: tl.constexpr):
    """Writes a part's rows: finished if there is one part, else as pieces."""
    row_max, row_sum, offset, acc, acc2 = state
    heads = numbers.heads * numbers.group
    if RULES.KIND != "":
        acc -= offset[:, None]
        acc2 -= offset[:, None]
    if results.pieces is None:
        known = j < numbers.queries
        if queries.sinks is not None:
            row_max, row_sum, rescale = _sunk(queries.sinks, row, known, row_max, row_sum)
            acc *= rescale[:, None]
            acc2 *= rescale[:, None]
        empty = row_sum == 0.0
        whole = tl.where(empty, 1.0, row_sum)[:, None]
        at = results.o + ((b * numbers.queries + j) * heads + row)[:, None] * RULES.D
        _keep(at, acc / whole, acc2 / whole, known, RULES, BD)
        lse = tl.where(empty, float("-inf"), (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453)
        tl.store(results.lse + (b * heads + row) * numbers.queries + j, lse, mask=known)
    else:
        size = numbers.queries * numbers.group
        at = ((turn * numbers.parts + part) * size + r).to(tl.int64)
        count = (tl.num_programs(0) * size).to(tl.int64)
        known = r < size
        _keep(results.pieces + at[:, None] * RULES.D, acc, acc2, known, RULES, BD)
        tl.store(results.pieces + count * RULES.D + at, row_max, mask=known)
        tl.store(results.pieces + count * (RULES.D + 1) + at, row_sum, mask=known)


@triton.jit
def _keep(at, acc, acc2, known, RULES: tl.constexpr, BD: tl.constexpr):
    """Stores rows of values, of int4 the even and the odd columns."""
    d = _columns(0, RULES, BD)
    tl.store(at + d[None, :], acc.to(at.dtype.element_ty), mask=known[:, None] & (d < RULES.D)[None, :])
    if RULES.KIND == "int4":
        d = _columns(1, RULES, BD)
        tl.store(at + d[None, :], acc2.to(at.dtype.element_ty), mask=known[:, None] & (d < RULES.D)[None, :])


@triton.jit
def _sunk(sinks, row, known, row_max, row_sum):
    """Lets each head's sink join its rows' sums. Returns the new maxima and sums, and what values are rescaled by."""
    sink = tl.load(sinks + row, mask=known, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - base)
    return base, row_sum * rescale + tl.exp2(sink - base), rescale


@triton.jit
def _combine(
    results, sinks, tokens, numbers, APPENDED: tl.constexpr, RULES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Combines a row's parts in order, SOME at a time."""
    size = numbers.queries * numbers.group
    turn, r = tl.program_id(0) // size, tl.program_id(0) % size
    b, h = (turn // numbers.heads).to(tl.int64), turn % numbers.heads
    j, row = r // numbers.group, h * numbers.group + r % numbers.group
    length = tl.minimum(tl.load(tokens.lengths + b), tokens.capacity)
    _, _, active = _span(length, length if APPENDED else length - numbers.queries, numbers, RULES, BN)
    count = (tl.num_programs(0) * numbers.parts).to(tl.int64)
    p, d = tl.arange(0, SOME), tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    row_sum, row_max = 0.0, float("-inf")
    if RULES.PDL:
        gdc_wait()
    for start in range(0, active, SOME):
        inside = start + p < active
        at = ((turn * numbers.parts + start + p) * size + r).to(tl.int64)
        tops = tl.load(results.pieces + count * RULES.D + at, mask=inside, other=float("-inf"))
        sums = tl.load(results.pieces + count * (RULES.D + 1) + at, mask=inside, other=0.0)
        some = tl.load(
            results.pieces + at[:, None] * RULES.D + d[None, :],
            mask=inside[:, None] & (d < RULES.D)[None, :],
            other=0.0,
        )
        most = tl.maximum(row_max, tl.max(tops, 0))
        base = tl.where(most == float("-inf"), 0.0, most)
        weights, shrink = tl.exp2(tops - base), tl.exp2(row_max - base)
        acc = acc * shrink + tl.sum(some * weights[:, None], 0)
        row_sum = row_sum * shrink + tl.sum(sums * weights, 0)
        row_max = most
    if sinks is not None:
        row_max, row_sum, rescale = _sunk(sinks, row, True, row_max, row_sum)
        acc *= rescale
    empty = row_sum == 0.0
    whole = tl.where(empty, 1.0, row_sum)
    o = results.o + ((b * numbers.queries + j) * numbers.heads * numbers.group + row) * RULES.D
    tl.store(o + d, (acc / whole).to(results.o.dtype.element_ty), mask=d < RULES.D)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(whole)) * 0.6931471805599453)
    tl.store(results.lse + (b * numbers.heads * numbers.group + row) * numbers.queries + j, lse)


def parts_of(multiprocessors: int, turns: int, keys: int, invariant: bool) -> int:
    """How many parts the keys of a sequence have at most: one program per multiprocessor, or two if there are too many
    sequences and heads for two parts each."""
    if invariant:
        return min(FIXED, max(1, triton.cdiv(keys, LEAST)))
    share = multiprocessors // max(turns, 1)
    return max(1, min(share if share > 1 else 2 * multiprocessors // max(turns, 1), keys // LEAST, MOST))


def rule(gpu: device.Device, size: int, rows: int, width: int) -> tuning.Config:
    """Tiles of keys of up to 16 KiB, so that two programs of three stages fit an H100's multiprocessor.

    size: bytes of a key as its tile holds it."""
    if gpu.backend == "cpu":
        return {"BN": 16, "num_warps": 4, "num_stages": 1}
    bn = max(16, min(128, 1 << (16384 // size).bit_length() - 1))
    stages = max(1, min(3, (gpu.shared_memory - 24576) // (2 * bn * size)))
    return {"BN": bn, "num_warps": 8 if rows * width >= 8192 else 4, "num_stages": stages}


def space() -> list[tuning.Config]:
    return [
        {"BN": bn, "num_warps": warps, "num_stages": stages}
        for bn in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]


def _three(t: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Steps of a scale over (row, place, head), whatever its shape."""
    if t is None:
        return None
    if t.dim() < 2:
        return (0, 0, t.stride(0) if t.numel() > 1 else 0)
    return t.stride()[:3]  # type: ignore[return-value]


def _new(k: Any, v: Any, cos: Any, sin: Any, positions: Any) -> New:
    steps = [None if t is None else t.stride()[:3] for t in (k, v)]
    angles = (0, 0) if cos is None else (cos.stride(0), cos.shape[0])
    position = 0 if positions is None else positions.stride(0)
    return New(k, v, cos, sin, positions, steps[0], steps[1], angles[0], position, angles[1])


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: Any,
    k: Any, v: Any, block_table: Any, cos: Any, sin: Any, positions: Any, sinks: Any, k_scale: Any, v_scale: Any,
    k_zero: Any, v_zero: Any, tree: Any, scale: float, left: int, softcap: float, interleaved: bool, invariant: bool,
    precision: str,
) -> None:  # fmt: skip
    """Fills o and lse, and appends k and v. left: how many earlier keys a query sees; -1: all."""
    (B, S, heads, D), shared = q.shape, k_cache.shape[2]
    gpu, group, most, kind = device.of(q), heads // shared, capacity(k_cache, block_table), kind_of(k_cache)
    half = D // 2 if kind == "int4" else D
    rows, bd = S * group, max(16, triton.next_power_of_2(half))
    bm = min(64, max(16, triton.next_power_of_2(rows)))
    turns = B * shared
    parts = parts_of(gpu.multiprocessors, turns * triton.cdiv(rows, bm), most, invariant)
    pieces = torch.empty(parts * turns * rows * (D + 2), dtype=torch.float32, device=q.device) if parts > 1 else None
    second = early(gpu)
    bits = 1 if kind else q.element_size()
    k_codes, v_codes = (t.view(torch.uint8) if kind == "float8" else t for t in (k_cache, v_cache))

    def config() -> dict[str, Any]:
        key = f"{dtype_name(q)}{' ' + kind if kind else ''} {bm}x{bd}"
        return tuning.config(gpu, "decode_attention", "fwd", key, partial(rule, gpu, bd * bits, bm, bd), space)

    rules = Rules(
        D, 0 if cos is None else cos.shape[1], interleaved, kind, k_scale is not None and k_scale.dim() == 3,
        0 if block_table is None else k_cache.shape[1], softcap > 0, left >= 0, invariant,
        gpu.capability >= 89, precision, parts > 1 and second["PDL"],
    )  # fmt: skip
    results = Results(o, lse, pieces)
    tokens = Tokens(lengths, block_table, 0 if block_table is None else block_table.stride(0), most)
    numbers = Numbers(S, shared, group, parts, scale if softcap else scale * LOG2E, softcap, left)
    given = (
        results,
        Queries(q, sinks, tree, q.stride()[:3], None if tree is None else tree.stride()[:2]),
        Cached(k_codes, k_scale, k_zero, k_cache.stride()[:3], _three(k_scale), _three(k_zero)),
        Cached(v_codes, v_scale, v_zero, v_cache.stride()[:3], _three(v_scale), _three(v_zero)),
        tokens,
        _new(k, v, cos, sin, positions),
        numbers,
    )
    grid, tile = (parts * turns, triton.cdiv(rows, bm)), {"BM": bm, "BS": 16, "BD": bd}
    launch(_attend, grid, *given, config=config, key=("decode", bm), RULES=rules, **tile)
    if pieces is not None:
        facts = {"APPENDED": k is not None, "RULES": rules, "BN": config()["BN"], "BD": triton.next_power_of_2(D)}
        facts |= {"SOME": 16, "num_warps": 4} | {n: v for n, v in second.items() if n == "launch_pdl"}
        launch(_combine, (turns * rows,), results, sinks, tokens, numbers, **facts)
