"""What decode kernels share: bundles of arguments, tiles of a cache, the online softmax, and how parts combine.

A cache's tokens lie contiguous or in blocks, in full precision or quantised; `_cache.py` has the same in plain PyTorch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ridgeline.tiles.float8 import decoded
from ridgeline.tiles.integers import halves, quarters

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
    WAYS: Any  # neighbouring columns in one element of the cache as the kernel reads it
    PER_TOKEN: Any  # scales are per token and head
    BLOCK: Any  # tokens of a block; 0: contiguous
    CAP: Any
    WINDOW: Any
    FIXED: Any  # parts depend on the sequence's length alone
    NATIVE: Any  # whether the GPU converts 8-bit floating-point numbers
    PRECISION: Any
    PDL: Any


@triton.jit
def columns(WAY: tl.constexpr, RULES: tl.constexpr, BD: tl.constexpr):
    """The columns of tile WAY: all of D, or every second or fourth."""
    return RULES.WAYS * tl.arange(0, BD) + WAY


@triton.jit
def rotated(x, at, known, place, d, new, RULES: tl.constexpr):
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
def offsets(cache, tokens, b, h, n, known, RULES: tl.constexpr):
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
def _floats(raw, RULES: tl.constexpr):
    """The 8-bit floating-point numbers in elements of 16 bits, lower bits first: two tiles of float16."""
    if RULES.NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        pairs = raw.to(tl.uint16, bitcast=True)
        even, odd = (pairs & 255).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        return decoded(even, RULES.NATIVE).to(tl.float16), decoded(odd, RULES.NATIVE).to(tl.float16)


@triton.jit
def stored(cache, at, known, RULES: tl.constexpr, BD: tl.constexpr, TO: tl.constexpr):
    """The numbers of a tile of keys as they are stored, in a dtype for products: a tile for each of the WAYS.

    Rows and columns that are not known hold any finite number: q or p is 0 there."""
    WAYS: tl.constexpr = RULES.WAYS
    d = tl.arange(0, BD)
    inside = known[:, None] & (d < RULES.D // RULES.WAYS)[None, :]
    raw = tl.load(cache.data + at[:, None] + d[None, :], mask=inside, other=0)
    made = (raw,)
    if RULES.KIND == "int4":
        eight = tl.full(raw.shape, 8, tl.int32)
        made = quarters(raw.to(tl.uint16, bitcast=True), eight, tl.float16, RULES.NATIVE)
    elif RULES.KIND == "int8":
        made = halves(raw.to(tl.uint16, bitcast=True), tl.float16, RULES.NATIVE)
    elif RULES.KIND == "float8" and RULES.WAYS == 2:
        made = _floats(raw, RULES)
    elif RULES.KIND == "float8":
        made = (decoded(raw, RULES.NATIVE),)
    cast = ()
    for way in tl.static_range(WAYS):
        cast = cast + (made[way].to(TO),)
    return cast


@triton.jit
def fitted(q, WAYS: tl.constexpr, TO: tl.constexpr):
    """Tiles of queries in the dtype of products with quantised keys, and the power of two that divides each row so that
    float16 holds it."""
    most = tl.max(tl.abs(q[0]).to(tl.float32), 1)
    for way in tl.static_range(1, WAYS):
        most = tl.maximum(most, tl.max(tl.abs(q[way]).to(tl.float32), 1))
    power = (most.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power == 0.0, 1.0, power)
    made = ()
    for way in tl.static_range(WAYS):
        made = made + ((q[way].to(tl.float32) / power[:, None]).to(TO),)
    return made, power


@triton.jit
def scale_and_zero(cache, scale, zero, known, RULES: tl.constexpr):
    """Scales and zeros of a tile of keys; 1 and 0 where there are none.

    int4's zeros count from 8, as its numbers do, so that the two do not cancel."""
    s = known.to(tl.float32)
    z = tl.zeros_like(s)
    if cache.scale is not None:
        s = tl.load(cache.scale + scale, mask=known, other=0.0)
    if cache.zero is not None:
        around: tl.constexpr = 8.0 if RULES.KIND == "int4" else 0.0
        z = tl.load(cache.zero + zero, mask=known, other=around) - around
    return s, z


@triton.jit
def absorb(state, x, v, s, z, RULES: tl.constexpr):
    """Adds a tile of keys to the rows' running maximum, sum and values, as the online softmax does."""
    WAYS: tl.constexpr = RULES.WAYS
    row_max, row_sum, offset, acc = state
    new_max = tl.maximum(row_max, tl.max(x, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(x - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    shrink, most = rescale, 1.0
    if RULES.KIND != "":
        if v[0].dtype == tl.float16:  # small scales would leave float16's range
            most = tl.maximum(tl.max(tl.abs(s), 0), 1e-30)
            s /= most
            shrink /= most
        p *= s[None, :]
        offset = offset * rescale + tl.sum(p * z[None, :], 1) * most
    sums = ()
    for way in tl.static_range(WAYS):
        made = tl.dot(p.to(v[way].dtype), v[way], acc[way] * shrink[:, None], input_precision=RULES.PRECISION)
        if RULES.KIND != "" and v[way].dtype == tl.float16:
            made *= most
        sums = sums + (made,)
    return new_max, row_sum, offset, sums


@triton.jit
def quantised(x, known, written, scale, zero, cache, RULES: tl.constexpr):
    """Quantises new tokens, and stores what is made per token of those that are written. Returns the levels of all
    tiles, with their scales and zeros."""
    low: tl.constexpr = -128.0 if RULES.KIND == "int8" else -448.0 if RULES.KIND == "float8" else 0.0
    high: tl.constexpr = 127.0 if RULES.KIND == "int8" else 448.0 if RULES.KIND == "float8" else 15.0
    even: tl.constexpr = 12582912.0  # adding and subtracting 1.5 x 2^23 rounds to an integer, half to even
    if RULES.PER_TOKEN:
        most, least = tl.max(x[0].to(tl.float32), 1), tl.min(x[0].to(tl.float32), 1)
        for way in tl.static_range(1, len(x)):
            most = tl.maximum(most, tl.max(x[way].to(tl.float32), 1))
            least = tl.minimum(least, tl.min(x[way].to(tl.float32), 1))
        if cache.zero is not None:
            s = tl.maximum((most - least) / (high - low), 1e-12)
            z = low - (least / s + even - even)
            tl.store(cache.zero + zero, z, mask=written)
            z -= 8.0 if RULES.KIND == "int4" else 0.0
        else:
            s = tl.maximum(tl.maximum(most, -least), 1e-12) / (7.0 if RULES.KIND == "int4" else high)
            z = tl.zeros_like(s)
        tl.store(cache.scale + scale, s, mask=written)
    else:
        s, z = scale_and_zero(cache, scale, zero, known, RULES)
    shift = z + 8.0 if RULES.KIND == "int4" else z
    safe = tl.where(s == 0.0, 1.0, s)[:, None]
    levels = ()
    for way in tl.static_range(len(x)):
        y = x[way].to(tl.float32) / safe + shift[:, None]
        if RULES.KIND != "float8":
            y = y + even - even
        levels = levels + (tl.minimum(tl.maximum(y, low), high),)
    return levels, s, z


@triton.jit
def span(length, first, numbers, RULES: tl.constexpr, BN: tl.constexpr):
    """The cached keys that any query sees, how many of them a part has, and how many parts are not empty."""
    low = tl.maximum(first - numbers.left, 0) // BN * BN if RULES.WINDOW else 0
    size = tl.maximum(length - low, 0)
    count = 64 if RULES.FIXED else numbers.parts
    share = tl.maximum(tl.cdiv(tl.cdiv(size, count), BN) * BN, 256 if RULES.FIXED else BN)
    return low, share, tl.maximum(tl.cdiv(size, share), 1)


@triton.jit
def visible(j, place, n, known, row, inside, total, b, queries, numbers, RULES: tl.constexpr):
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
def finish(
    results, queries, state, part, turn, programs, b, j, row, r, numbers, RULES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Writes a part's rows: finished if there is one part, else as pieces. programs: parts of all turns together."""
    row_max, row_sum, offset, acc = state
    heads = numbers.heads * numbers.group
    if results.pieces is None:
        known = j < numbers.queries
        rescale = tl.full(row_sum.shape, 1.0, tl.float32)
        if queries.sinks is not None:
            row_max, row_sum, rescale = _sunk(queries.sinks, row, known, row_max, row_sum)
        empty = row_sum == 0.0
        whole = tl.where(empty, 1.0, row_sum)
        at = results.o + ((b * numbers.queries + j) * heads + row)[:, None] * RULES.D
        _keep(at, acc, offset, rescale, whole, known, RULES, BD)
        lse = tl.where(empty, float("-inf"), (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453)
        tl.store(results.lse + (b * heads + row) * numbers.queries + j, lse, mask=known)
    else:
        size = numbers.queries * numbers.group
        at = ((turn * numbers.parts + part) * size + r).to(tl.int64)
        count = (programs * size).to(tl.int64)
        known = r < size
        one = tl.full(row_sum.shape, 1.0, tl.float32)
        _keep(results.pieces + at[:, None] * RULES.D, acc, offset, one, one, known, RULES, BD)
        tl.store(results.pieces + count * RULES.D + at, row_max, mask=known)
        tl.store(results.pieces + count * (RULES.D + 1) + at, row_sum, mask=known)


@triton.jit
def _keep(at, acc, offset, rescale, whole, known, RULES: tl.constexpr, BD: tl.constexpr):
    """Stores rows of values, less what their zeros add, times one number per row and divided by another."""
    WAYS: tl.constexpr = RULES.WAYS
    for way in tl.static_range(WAYS):
        d = columns(way, RULES, BD)
        values = acc[way]
        if RULES.KIND != "":
            values -= offset[:, None]
        values = (values * rescale[:, None] / whole[:, None]).to(at.dtype.element_ty)
        tl.store(at + d[None, :], values, mask=known[:, None] & (d < RULES.D)[None, :])


@triton.jit
def _sunk(sinks, row, known, row_max, row_sum):
    """Lets each head's sink join its rows' sums. Returns the new maxima and sums, and what values are rescaled by."""
    sink = tl.load(sinks + row, mask=known, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - base)
    return base, row_sum * rescale + tl.exp2(sink - base), rescale


@triton.jit
def combine(
    results, sinks, tokens, numbers, APPENDED: tl.constexpr, RULES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Combines a row's parts in order, SOME at a time."""
    size = numbers.queries * numbers.group
    turn, r = tl.program_id(0) // size, tl.program_id(0) % size
    b, h = (turn // numbers.heads).to(tl.int64), turn % numbers.heads
    j, row = r // numbers.group, h * numbers.group + r % numbers.group
    length = tl.minimum(tl.load(tokens.lengths + b), tokens.capacity)
    _, _, active = span(length, length if APPENDED else length - numbers.queries, numbers, RULES, BN)
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


def parts_of(multiprocessors: int, turns: int, keys: int, invariant: bool, each: int = 1) -> int:
    """How many parts the keys of a sequence have at most: `each` programs per multiprocessor, or two if there are too
    many sequences and heads for two parts each."""
    if invariant:
        return min(FIXED, max(1, triton.cdiv(keys, LEAST)))
    share = multiprocessors // max(turns, 1)
    share = each * share if share > 1 else 2 * multiprocessors // max(turns, 1)
    return max(1, min(share, keys // LEAST, MOST))


def three_steps(t: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Steps of a scale over (row, place, head), whatever its shape."""
    if t is None:
        return None
    if t.dim() < 2:
        return (0, 0, t.stride(0) if t.numel() > 1 else 0)
    return t.stride()[:3]  # type: ignore[return-value]


def new_tokens(k: Any, v: Any, cos: Any, sin: Any, positions: Any) -> New:
    steps = [None if t is None else t.stride()[:3] for t in (k, v)]
    angles = (0, 0) if cos is None else (cos.stride(0), cos.shape[0])
    position = 0 if positions is None else positions.stride(0)
    return New(k, v, cos, sin, positions, steps[0], steps[1], angles[0], position, angles[1])
