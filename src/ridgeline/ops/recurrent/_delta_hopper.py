"""Gradients of q, k and the gate in a chunk of the delta rule with a gate per token, in Gluon for Hopper.

A warpgroup takes a chunk of 64 rows of a head, and two share a multiprocessor. TMA brings all of a chunk's rows and the
state before it at once, and the gradient of the state after it into the same place when that state has been read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sequence_row, sums_layout

C = gl.constexpr(64)  # rows of a chunk


class ChunkMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns), and states (B, heads, chunks, V, K)."""

    q: Any
    k: Any
    do: Any
    dv: Any
    u: Any
    before: Any
    later: Any
    dq: Any  # or the tensor itself, in float32
    dk: Any


class ChunkNumbers(NamedTuple):
    """Numbers of rows in float32, (B, heads, chunks, n, C), and the gate's gradient (B, T, heads)."""

    decays: Any
    lengths: Any
    whole: Any
    dg: Any
    ends: Any  # cu_seqlens or None
    sequences: Any
    tokens: Any
    heads: Any
    chunks: Any  # room of a head
    begin: Any
    group: Any


@gluon.jit
def room_of(ends, n, unit):
    """Where the chunks, or segments, of packed sequence n are kept: each has room for one more than it may need."""
    return gl.load(ends + n) // unit + n


@gluon.jit
def sequence_at(ends, sequences, spot, unit):
    """The last packed sequence whose room begins at `spot` or before."""
    n, beyond = 0 * spot, 0 * spot + sequences
    while beyond - n > 1:
        middle = (n + beyond) // 2
        here = room_of(ends, middle, unit) <= spot
        n, beyond = gl.where(here, middle, n), gl.where(here, beyond, middle)
    return n


@gluon.jit
def coordinates(ends, n, start, tokens, head, row, column):
    """Of a sequence's row in a tensor map."""
    if ends is None:
        return n, head, row, column
    else:
        far, end, high = sequence_row(start, tokens, row)
        return far, end, head, high, column


@gluon.jit
def _pairs_of(words, dtype: gl.constexpr):
    """Two neighbours in float32, from a word of both."""
    if dtype == gl.bfloat16:
        even = (words << 16).to(gl.float32, bitcast=True)
        odd = (words & -65536).to(gl.float32, bitcast=True)
    else:
        even = (words & 0xFFFF).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        odd = (words >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return even, odd


@gluon.jit
def _row_numbers(place, LAYOUT: gl.constexpr):
    return gl.load(place + gl.arange(0, C, gl.SliceLayout(1, LAYOUT)))


@gluon.jit
def _column_numbers(place, LAYOUT: gl.constexpr):
    return gl.load(place + gl.arange(0, C, gl.SliceLayout(0, LAYOUT)))


@gluon.jit
def _weights(sums, LAYOUT: gl.constexpr):
    """e^(G_i - G_j) for j <= i, else 0."""
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    apart = _row_numbers(sums, LAYOUT)[:, None] - _column_numbers(sums, LAYOUT)[None, :]
    return gl.exp2(gl.where(i >= j, apart, float("-inf")))


@gluon.jit
def _through_lengths(found, wide, shrink):
    """From the gradient of rows whose lengths are constants that of the rows."""
    return found - wide * (shrink * shrink * gl.sum(found * wide, 1))[:, None]


@gluon.jit
def _put(target, found, where, at, row, width, left, FLOAT: gl.constexpr):
    """Writes rows through a tile in shared memory, or in float32 from registers."""
    if FLOAT:
        LAYOUT: gl.constexpr = found.type.layout
        i = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None]
        j = gl.arange(0, found.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        gl.store(target + row + (i * width + j), found, mask=i < left)
    else:
        flat(where).store(found.to(target.dtype))
        fence_async_shared()
        barrier()
        store(target, at, where)


@gluon.jit
def _product_sum(one, other, dtype: gl.constexpr, PIECES: gl.constexpr):
    """The sum of the products of two matrices of 16 bits in shared memory, a word of two at a time."""
    ROWS: gl.constexpr = one.type.shape[-2] // PIECES
    WORDS: gl.constexpr = one.type.shape[-1] // 2
    flat_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])
    x = one._reinterpret(gl.int32, [PIECES, ROWS, WORDS], flat_words)
    y = other._reinterpret(gl.int32, [PIECES, ROWS, WORDS], flat_words)
    sums = gl.zeros([ROWS, WORDS], gl.float32, layout)
    for n in gl.static_range(PIECES):
        even, odd = _pairs_of(x.index(n).load(layout), dtype)
        even_too, odd_too = _pairs_of(y.index(n).load(layout), dtype)
        sums += even * even_too
        sums += odd * odd_too
    return gl.sum(gl.sum(sums, 1), 0)


@gluon.jit(do_not_specialize=["scale"])
def chunk_gradients(maps, numbers, scale, NORMALIZE: gl.constexpr, PARTS: gl.constexpr, FLOAT: gl.constexpr):
    """PARTS: of bfloat16 that hold a term of the gate's sums."""
    head, spot = gl.program_id(1), gl.program_id(0)
    n, h = head // numbers.heads, head % numbers.heads
    batch, chunk, start, tokens = n, numbers.begin + spot, 0 * n, 0 * n + numbers.tokens
    if numbers.ends is not None:
        n = sequence_at(numbers.ends, numbers.sequences, chunk, C)
        chunk -= room_of(numbers.ends, n, C)
        start = gl.load(numbers.ends + n)
        tokens = gl.load(numbers.ends + n + 1) - start
    first = chunk * C
    if first < tokens:
        _chunk(maps, numbers, scale, batch, n, h, spot, first, start, tokens, NORMALIZE, PARTS, FLOAT)


@gluon.jit
def _chunk(
    maps, numbers, scale, batch, n, h, spot, first, start, tokens, NORMALIZE: gl.constexpr, PARTS: gl.constexpr,
    FLOAT: gl.constexpr
):  # fmt: skip
    kind: gl.constexpr = maps.k.dtype
    K: gl.constexpr = maps.k.block_type.shape[-1]
    BY_ROWS: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    own = coordinates(numbers.ends, n, start, tokens, h, first, 0)
    shared = coordinates(numbers.ends, n, start, tokens, h // numbers.group, first, 0)
    head = batch * numbers.heads + h
    u = gl.allocate_shared_memory(kind, maps.u.block_type.shape, maps.u.layout)
    q = gl.allocate_shared_memory(kind, maps.q.block_type.shape, maps.q.layout)
    k = gl.allocate_shared_memory(kind, maps.k.block_type.shape, maps.k.layout)
    given = gl.allocate_shared_memory(kind, [2] + maps.do.block_type.shape, maps.do.layout)
    before = gl.allocate_shared_memory(kind, maps.before.block_type.shape, maps.before.layout)
    do, dv = given.index(0), given.index(1)
    after = given._reinterpret(kind, maps.later.block_type.shape, maps.later.layout)
    ready = make_barriers(5, 1)
    fence_async_shared()
    barrier()
    mbarrier.expect(ready.index(0), maps.u.block_type.nbytes + maps.do.block_type.nbytes)
    load(maps.u, own, ready.index(0), u)
    load(maps.do, own, ready.index(0), do)
    mbarrier.expect(ready.index(1), maps.q.block_type.nbytes + maps.k.block_type.nbytes)
    load(maps.q, shared, ready.index(1), q)
    load(maps.k, shared, ready.index(1), k)
    mbarrier.expect(ready.index(2), maps.dv.block_type.nbytes)
    load(maps.dv, own, ready.index(2), dv)
    mbarrier.expect(ready.index(3), maps.before.block_type.nbytes)
    load(maps.before, [batch, h, spot, 0, 0], ready.index(3), before)
    place = head.to(gl.int64) * numbers.chunks + spot
    decays, lengths = numbers.decays + place * (5 * C), numbers.decays
    if NORMALIZE:
        lengths = numbers.lengths + place * (2 * C)
    whole = gl.load(numbers.whole + place)
    tu, tdo, tdv, tq, tk = flat(u), flat(do), flat(dv), flat(q), flat(k)
    i, j = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))[:, None], gl.arange(0, C, gl.SliceLayout(0, BY_ROWS))[None, :]
    none = gl.zeros([C, C], gl.float32, BY_ROWS)
    far = gl.zeros([C, K], gl.float32, WIDE)

    # The pairs' gradients and their transposes, and both ways of k's pairs as one matrix.
    mbarrier.wait(ready.index(0), 0)
    one = warpgroup_mma(tdo, tu.permute((1, 0)), none, use_acc=False, is_async=True)
    by_column = _column_numbers(decays + 3 * C, BY_ROWS)
    by_row_q = gl.full([C], scale, gl.float32, gl.SliceLayout(1, BY_ROWS))
    by_row_k = gl.full([C], -1.0, gl.float32, gl.SliceLayout(1, BY_ROWS))
    if NORMALIZE:
        by_column *= _column_numbers(lengths + C, BY_ROWS)
        by_row_q *= _row_numbers(lengths, BY_ROWS)
        by_row_k *= _row_numbers(lengths + C, BY_ROWS)
    weights = _weights(decays + 4 * C, BY_ROWS) * by_column[None, :]
    mbarrier.wait(ready.index(1), 0)
    seen = warpgroup_mma(tq, tk.permute((1, 0)), none, use_acc=False, is_async=True)
    one, seen = warpgroup_mma_wait(0, deps=(one, seen))
    pairs_q = weights * one * by_row_q[:, None]
    both = pairs_q * seen
    pairs_q = pairs_q.to(kind)
    mbarrier.wait(ready.index(2), 0)
    one = warpgroup_mma(tdv, tu.permute((1, 0)), none, use_acc=False, is_async=True)
    seen = warpgroup_mma(tk, tk.permute((1, 0)), none, use_acc=False, is_async=True)
    weights = gl.where(i > j, weights, 0.0) * by_row_k[:, None]
    one, seen = warpgroup_mma_wait(0, deps=(one, seen))
    pairs_k = weights * one
    both += pairs_k * seen
    pairs_k = pairs_k.to(kind)
    high = both.to(gl.bfloat16)
    low = high
    if PARTS > 1:
        low = (both - high.to(gl.float32)).to(gl.bfloat16)

    # From the state before the chunk.
    mbarrier.wait(ready.index(3), 0)
    dq = warpgroup_mma(tdo, flat(before), far, use_acc=False, is_async=True)
    dk = warpgroup_mma(tdv, flat(before), far, use_acc=False, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    barrier()  # all have read do and dv
    squares = given._reinterpret(kind, [2 * given.type.shape[-1] // C, C, C], gl.NVMMASharedLayout(128, 16, 2))
    squares.index(0).store(pairs_q)
    squares.index(1).store(pairs_k)
    fence_async_shared()
    barrier()
    dq *= (scale * _row_numbers(decays, WIDE))[:, None]
    since = gl.sum(tq.load(WIDE).to(gl.float32) * dq, 1)
    dq = warpgroup_mma(squares.index(0), tk, dq, is_async=True)
    dk *= -_row_numbers(decays + C, WIDE)[:, None]
    since += gl.sum(tk.load(WIDE).to(gl.float32) * dk, 1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dk = warpgroup_mma(squares.index(1), tk, dk, is_async=True)
    dk = warpgroup_mma(squares.index(1).permute((1, 0)), tk, dk, is_async=True)
    dk = warpgroup_mma(squares.index(0).permute((1, 0)), tq, dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    barrier()  # all have read the pairs and q
    mbarrier.expect(ready.index(4), maps.later.block_type.nbytes)
    load(maps.later, [batch, h, spot, 0, 0], ready.index(4), after)
    if NORMALIZE:
        dq = _through_lengths(dq, tq.load(WIDE).to(gl.float32), _row_numbers(lengths, WIDE))
        barrier()
    left = tokens - first
    token = batch.to(gl.int64) * numbers.tokens + start + first
    row = (token * numbers.heads + h) * K
    _put(maps.dq, dq, q, own, row, numbers.heads * K, left, FLOAT)

    # From the gradient of the state after it.
    mbarrier.wait(ready.index(4), 0)
    db = warpgroup_mma(tu, flat(after), far, use_acc=False, is_async=True)
    held = _product_sum(before, after, kind, 4)
    barrier()  # all have read the state before
    space = before._reinterpret(kind, [before.type.shape[-2] // C] + maps.k.block_type.shape, maps.k.layout)
    terms = before._reinterpret(gl.bfloat16, [before.type.shape[-2] * K // C // C, C, C], gl.NVMMASharedLayout(128, 16, 2))
    terms.index(0).store(high)
    if PARTS > 1:
        terms.index(1).store(low)
    fence_async_shared()
    barrier()
    chosen = gl.where(j >= i, 1.0, none).to(gl.bfloat16)
    chosen = gl.convert_layout(chosen, operand_layout(BY_ROWS))
    later = warpgroup_mma(chosen, terms.index(0), none, use_acc=False, is_async=True)
    if PARTS > 1:
        later = warpgroup_mma(chosen, terms.index(1), later, is_async=True)
    db, later = warpgroup_mma_wait(0, deps=(db, later))
    db *= (_row_numbers(decays + 2 * C, WIDE) * _row_numbers(decays + 3 * C, WIDE))[:, None]
    wide = tk.load(WIDE).to(gl.float32)
    until = gl.sum(wide * db, 1)
    dk += db
    if NORMALIZE:
        dk = _through_lengths(dk, wide, _row_numbers(lengths + C, WIDE))
    barrier()
    _put(maps.dk, dk, space.index(space.type.shape[0] - 1), own, row, numbers.heads * K, left, FLOAT)
    until = gl.convert_layout(until, gl.SliceLayout(0, BY_ROWS))[None, :]
    since = gl.convert_layout(since, gl.SliceLayout(0, BY_ROWS))[None, :]
    dg = gl.sum(gl.where(i > j, later + until, since + none), 1) + whole * held
    rows = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))
    at = numbers.dg + token * numbers.heads + h
    gl.store(at + rows * numbers.heads, dg, mask=rows < left)
    tma.store_wait(0)
