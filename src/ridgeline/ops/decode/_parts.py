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
from ridgeline.tiles.integers import whole

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
def columns(HALF: tl.constexpr, RULES: tl.constexpr, BD: tl.constexpr):
    """The columns of a tile: all of D, or of int4 the even (HALF 0) or odd (1) ones."""
    return 2 * tl.arange(0, BD) + HALF if RULES.KIND == "int4" else tl.arange(0, BD)


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
def stored(cache, at, known, RULES: tl.constexpr, BD: tl.constexpr, TO: tl.constexpr):
    """The numbers of a tile of keys as they are stored, in a dtype for products: one tile or, of int4, two.

    Rows and columns that are not known hold any finite number: q or p is 0 there."""
    d = tl.arange(0, BD)
    width: tl.constexpr = RULES.D // 2 if RULES.KIND == "int4" else RULES.D
    raw = tl.load(cache.data + at[:, None] + d[None, :], mask=known[:, None] & (d < width)[None, :], other=0.0)
    if RULES.KIND == "int4":
        shift: tl.constexpr = 8.0 if cache.zero is None else 0.0
        return whole(raw & 15, shift, 4, TO), whole(raw >> 4, shift, 4, TO)
    elif RULES.KIND == "int8":
        made = whole(raw.to(tl.uint8, bitcast=True) ^ 128, 128.0, 8, TO)
        return made, made
    elif RULES.KIND == "float8":
        made = decoded(raw, RULES.NATIVE).to(TO)
        return made, made
    else:
        return raw.to(TO), raw.to(TO)


@triton.jit
def scale_and_zero(cache, scale, zero, known):
    """Scales and zeros of a tile of keys; 1 and 0 where there are none."""
    s = known.to(tl.float32)
    z = tl.zeros_like(s)
    if cache.scale is not None:
        s = tl.load(cache.scale + scale, mask=known, other=0.0)
    if cache.zero is not None:
        z = tl.load(cache.zero + zero, mask=known, other=0.0)
    return s, z


@triton.jit
def absorb(state, x, v, v2, s, z, RULES: tl.constexpr):
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
def quantised(x, x2, known, written, scale, zero, cache, RULES: tl.constexpr):
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
        s, z = scale_and_zero(cache, scale, zero, known)
    shift = z + 8.0 if RULES.KIND == "int4" and cache.zero is None else z
    safe = tl.where(s == 0.0, 1.0, s)[:, None]
    y, y2 = x / safe + shift[:, None], x2 / safe + shift[:, None]
    if RULES.KIND != "float8":
        y, y2 = y + even - even, y2 + even - even
    y, y2 = tl.minimum(tl.maximum(y, low), high), tl.minimum(tl.maximum(y2, low), high)
    return y, y2, s, z


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
        count = (programs * size).to(tl.int64)
        known = r < size
        _keep(results.pieces + at[:, None] * RULES.D, acc, acc2, known, RULES, BD)
        tl.store(results.pieces + count * RULES.D + at, row_max, mask=known)
        tl.store(results.pieces + count * (RULES.D + 1) + at, row_sum, mask=known)


@triton.jit
def _keep(at, acc, acc2, known, RULES: tl.constexpr, BD: tl.constexpr):
    """Stores rows of values, of int4 the even and the odd columns."""
    d = columns(0, RULES, BD)
    tl.store(at + d[None, :], acc.to(at.dtype.element_ty), mask=known[:, None] & (d < RULES.D)[None, :])
    if RULES.KIND == "int4":
        d = columns(1, RULES, BD)
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


def parts_of(multiprocessors: int, turns: int, keys: int, invariant: bool) -> int:
    """How many parts the keys of a sequence have at most: one program per multiprocessor, or two if there are too many
    sequences and heads for two parts each."""
    if invariant:
        return min(FIXED, max(1, triton.cdiv(keys, LEAST)))
    share = multiprocessors // max(turns, 1)
    return max(1, min(share if share > 1 else 2 * multiprocessors // max(turns, 1), keys // LEAST, MOST))


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
