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
def _products(one, other, dtype: gl.constexpr, PIECES: gl.constexpr):
    """The products of two matrices of 16 bits in shared memory, a word of two at a time, with some of them summed."""
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
    return sums


@gluon.jit
def _pairs(tiles, ready, decays, lengths, scale, NORMALIZE: gl.constexpr):
    """The gradients of the weights of q with k and of k with k; and the sum of both times these weights."""
    u, do, dv, q, k = tiles
    LAYOUT: gl.constexpr = sums_layout(C)
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    none = gl.zeros([C, C], gl.float32, LAYOUT)
    by_column = _column_numbers(decays + 3 * C, LAYOUT)
    by_row_q = gl.full([C], scale, gl.float32, gl.SliceLayout(1, LAYOUT))
    by_row_k = gl.full([C], -1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    if NORMALIZE:
        by_column *= _column_numbers(lengths + C, LAYOUT)
        by_row_q *= _row_numbers(lengths, LAYOUT)
        by_row_k *= _row_numbers(lengths + C, LAYOUT)
    apart = _row_numbers(decays + 4 * C, LAYOUT)[:, None] - _column_numbers(decays + 4 * C, LAYOUT)[None, :]
    mbarrier.wait(ready.index(0), 0)
    found = warpgroup_mma(do, u.permute((1, 0)), none, use_acc=False, is_async=True)
    weights = gl.exp2(gl.where(i >= j, apart, float("-inf"))) * by_column[None, :]
    mbarrier.wait(ready.index(1), 0)
    seen = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    found, seen = warpgroup_mma_wait(0, deps=(found, seen))
    pairs_q = weights * found * by_row_q[:, None]
    both = pairs_q * seen
    pairs_q = pairs_q.to(q.dtype)
    mbarrier.wait(ready.index(2), 0)
    found = warpgroup_mma(dv, u.permute((1, 0)), none, use_acc=False, is_async=True)
    seen = warpgroup_mma(k, k.permute((1, 0)), none, use_acc=False, is_async=True)
    weights = gl.where(i > j, weights, 0.0) * by_row_k[:, None]
    found, seen = warpgroup_mma_wait(0, deps=(found, seen))
    pairs_k = weights * found
    return pairs_q, pairs_k.to(q.dtype), (both + pairs_k * seen).to(q.dtype)


@gluon.jit
def _from_before(tiles, squares, before, pairs_q, pairs_k, since_q, since_k, K: gl.constexpr):
    """The gradients of q, and of k but for what the state after the chunk brings, and each row's part of its gate's
    gradient by the state before the chunk."""
    _u, do, dv, q, k = tiles
    LAYOUT: gl.constexpr = sums_layout(K)
    none = gl.zeros([C, K], gl.float32, LAYOUT)
    dq = warpgroup_mma(do, before, none, use_acc=False, is_async=True)
    dk = warpgroup_mma(dv, before, none, use_acc=False, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    barrier()  # all have read do and dv, in whose place the pairs lie now
    squares.index(0).store(pairs_q)
    squares.index(1).store(pairs_k)
    fence_async_shared()
    barrier()
    dq *= since_q[:, None]
    since = gl.sum(q.load(LAYOUT).to(gl.float32) * dq, 1)
    dq = warpgroup_mma(squares.index(0), k, dq, is_async=True)
    dk *= since_k[:, None]
    since += gl.sum(k.load(LAYOUT).to(gl.float32) * dk, 1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dk = warpgroup_mma(squares.index(1), k, dk, is_async=True)
    dk = warpgroup_mma(squares.index(1).permute((1, 0)), k, dk, is_async=True)
    dk = warpgroup_mma(squares.index(0).permute((1, 0)), q, dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    barrier()  # all have read the pairs and q
    return dq, dk, since


@gluon.jit
def _later_sums(terms, both):
    """For each gate the sum of `both` over pairs of an earlier row and its row or a later one."""
    LAYOUT: gl.constexpr = both.type.layout
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    none = gl.zeros([C, C], gl.float32, LAYOUT)
    terms.store(both)
    fence_async_shared()
    barrier()
    chosen = gl.convert_layout(gl.where(j >= i, 1.0, none).to(both.dtype), operand_layout(LAYOUT))
    later = warpgroup_mma(chosen, terms, none, use_acc=False, is_async=True)
    later = warpgroup_mma_wait(0, deps=(later,))
    return gl.sum(gl.where(i > j, later, 0.0), 1)


@gluon.jit
def _over_rows(numbers, LATER: gl.constexpr):
    """For each row the sum of numbers over its row and later ones, or over earlier ones."""
    LAYOUT: gl.constexpr = sums_layout(C)
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    numbers = gl.convert_layout(numbers, gl.SliceLayout(0, LAYOUT))[None, :] + gl.zeros([C, C], gl.float32, LAYOUT)
    chosen = (j >= i) if LATER else (j < i)
    return gl.sum(gl.where(chosen, numbers, 0.0), 1)


@gluon.jit
def _load_rows(maps, ready, tiles, own, shared):
    u, do, dv, q, k = tiles
    mbarrier.expect(ready.index(0), maps.u.block_type.nbytes + maps.do.block_type.nbytes)
    load(maps.u, own, ready.index(0), u)
    load(maps.do, own, ready.index(0), do)
    mbarrier.expect(ready.index(1), maps.q.block_type.nbytes + maps.k.block_type.nbytes)
    load(maps.q, shared, ready.index(1), q)
    load(maps.k, shared, ready.index(1), k)
    mbarrier.expect(ready.index(2), maps.dv.block_type.nbytes)
    load(maps.dv, own, ready.index(2), dv)


@gluon.jit
def _load_states(source, at, ready, to):
    mbarrier.expect(ready, source.block_type.nbytes)
    load(source, at, ready, to)


@gluon.jit
def _chunk(
    maps, numbers, scale, batch, n, h, spot, first, start, tokens, NORMALIZE: gl.constexpr, FLOAT: gl.constexpr
):  # fmt: skip
    """A chunk's gradients. Places are used again: the pairs and then the gradient of the state lie where do and dv
    were; dq, then what is summed for the gate, and then dk where q was."""
    kind: gl.constexpr = maps.k.dtype
    K: gl.constexpr = maps.k.block_type.shape[-1]
    V: gl.constexpr = maps.u.block_type.shape[-1]
    LAYOUT: gl.constexpr = sums_layout(K)
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    own = coordinates(numbers.ends, n, start, tokens, h, first, 0)
    shared = coordinates(numbers.ends, n, start, tokens, h // numbers.group, first, 0)
    u = gl.allocate_shared_memory(kind, maps.u.block_type.shape, maps.u.layout)
    q = gl.allocate_shared_memory(kind, maps.q.block_type.shape, maps.q.layout)
    k = gl.allocate_shared_memory(kind, maps.k.block_type.shape, maps.k.layout)
    given = gl.allocate_shared_memory(kind, [2] + maps.do.block_type.shape, maps.do.layout)
    before = gl.allocate_shared_memory(kind, maps.before.block_type.shape, maps.before.layout)
    after = given._reinterpret(kind, maps.later.block_type.shape, maps.later.layout)
    squares = given._reinterpret(kind, [2 * V // C, C, C], square)
    terms = q._reinterpret(kind, [K // C, C, C], square).index(0)
    ready = make_barriers(5, 1)
    fence_async_shared()
    barrier()
    _load_rows(maps, ready, (u, given.index(0), given.index(1), q, k), own, shared)
    _load_states(maps.before, [batch, h, spot, 0, 0], ready.index(3), before)
    place = (batch * numbers.heads + h).to(gl.int64) * numbers.chunks + spot
    decays, lengths = numbers.decays + place * (5 * C), numbers.decays
    if NORMALIZE:
        lengths = numbers.lengths + place * (2 * C)
    whole = gl.load(numbers.whole + place)
    tiles = flat(u), flat(given.index(0)), flat(given.index(1)), flat(q), flat(k)
    since_q, since_k = scale * _row_numbers(decays, LAYOUT), -_row_numbers(decays + C, LAYOUT)
    until = _row_numbers(decays + 2 * C, LAYOUT) * _row_numbers(decays + 3 * C, LAYOUT)
    pairs_q, pairs_k, both = _pairs(tiles, ready, decays, lengths, scale, NORMALIZE)
    mbarrier.wait(ready.index(3), 0)
    dq, dk, since = _from_before(tiles, squares, flat(before), pairs_q, pairs_k, since_q, since_k, K)
    _load_states(maps.later, [batch, h, spot, 0, 0], ready.index(4), after)
    if NORMALIZE:
        dq = _through_lengths(dq, flat(q).load(LAYOUT).to(gl.float32), _row_numbers(lengths, LAYOUT))
        barrier()
    token = batch.to(gl.int64) * numbers.tokens + start + first
    row, left = (token * numbers.heads + h) * K, tokens - first
    _put(maps.dq, dq, q, own, row, numbers.heads * K, left, FLOAT)
    dg = _over_rows(since, True)
    tma.store_wait(0)
    dg += _later_sums(terms, both)
    mbarrier.wait(ready.index(4), 0)
    found = warpgroup_mma(flat(u), flat(after), gl.zeros([C, K], gl.float32, LAYOUT), use_acc=False, is_async=True)
    held = _products(before, after, kind, 4)
    wide = flat(k).load(LAYOUT).to(gl.float32)
    found = warpgroup_mma_wait(0, deps=(found,))
    found *= until[:, None]
    until = gl.sum(wide * found, 1)
    dk += found
    if NORMALIZE:
        dk = _through_lengths(dk, wide, _row_numbers(lengths + C, LAYOUT))
    barrier()  # all have read the terms
    _put(maps.dk, dk, q, own, row, numbers.heads * K, left, FLOAT)
    dg += _over_rows(until, False) + whole * gl.sum(gl.sum(held, 1), 0)
    rows = gl.arange(0, C, gl.SliceLayout(1, sums_layout(C)))
    gl.store(numbers.dg + token * numbers.heads + h + rows * numbers.heads, dg, mask=rows < left)
    tma.store_wait(0)
    u._keep_alive()  # no numbers of sums may lie where products and copies still read
    q._keep_alive()
    k._keep_alive()
    given._keep_alive()
    before._keep_alive()
    ready._keep_alive()


@gluon.jit(do_not_specialize=["scale"])
def chunk_gradients(numbers, maps, scale, NORMALIZE: gl.constexpr, FLOAT: gl.constexpr):
    """A chunk of a head. FLOAT: dq and dk are in float32."""
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
        _chunk(maps, numbers, scale, batch, n, h, spot, first, start, tokens, NORMALIZE, FLOAT)
