"""Gradients of q, k and the gate in a chunk of the delta rule with a gate per token, in Gluon for Hopper, in half
precision.

A warpgroup takes a chunk of 64 rows of a head, and two share a multiprocessor. TMA brings all of a chunk's rows and the
state before it at once, and the gradient of the state after it into the place of two of them as soon as these have been
read. Gradients of pairs stay in registers both ways round, so no product waits for shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.ops.recurrent._delta_hopper_gradients import (
    _load_rows,
    _load_states,
    _pairs_of,
    _put,
    _through_lengths,
    coordinates,
    room_of,
    sequence_at,
)
from ridgeline.tiles.hopper import barrier, make_barriers
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout

C = gl.constexpr(64)  # rows of a chunk


@gluon.jit
def _numbers(place, lengths, LAYOUT: gl.constexpr, NORMALIZE: gl.constexpr):
    """A number of each row, over the row's length."""
    at = gl.arange(0, C, LAYOUT)
    found = gl.load(place + at)
    if NORMALIZE:
        found *= gl.load(lengths + at)
    return found


@gluon.jit
def _over_length(factor, lengths, LAYOUT: gl.constexpr, NORMALIZE: gl.constexpr):
    found = gl.full([C], factor, gl.float32, LAYOUT)
    if NORMALIZE:
        found *= gl.load(lengths + gl.arange(0, C, LAYOUT))
    return found


@gluon.jit
def _pairs(tiles, ready, decays, lengths, scale, NORMALIZE: gl.constexpr):
    """The gradients of the weights of q with k and these transposed, those of k with k on both sides of the diagonal,
    and the sum of both times these weights."""
    u, do, dv, q, k = tiles
    kind: gl.constexpr = q.dtype
    LAYOUT: gl.constexpr = sums_layout(C)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    i, j = gl.arange(0, C, ROW)[:, None], gl.arange(0, C, COLUMN)[None, :]
    none = gl.zeros([C, C], gl.float32, LAYOUT)
    beta, of_k = decays + 3 * C, lengths + C
    mbarrier.wait(ready.index(0), 0)
    found = warpgroup_mma(do, u.permute((1, 0)), none, use_acc=False, is_async=True)
    decay = gl.load(decays + 4 * C + gl.arange(0, C, ROW))[:, None]
    apart = decay - gl.load(decays + 4 * C + gl.arange(0, C, COLUMN))[None, :]
    weights = gl.exp2(gl.where(i >= j, apart, -apart))
    mbarrier.wait(ready.index(1), 0)
    seen = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    column = _numbers(beta, of_k, COLUMN, NORMALIZE)
    found, seen = warpgroup_mma_wait(0, deps=(found, seen))
    turned = warpgroup_mma(u, do.permute((1, 0)), none, use_acc=False, is_async=True)
    found *= gl.where(i >= j, weights * column[None, :] * _over_length(scale, lengths, ROW, NORMALIZE)[:, None], 0.0)
    both = found * seen
    pairs = found.to(kind)
    mbarrier.wait(ready.index(2), 0)
    turned = warpgroup_mma_wait(0, deps=(turned,))
    found = warpgroup_mma(dv, u.permute((1, 0)), none, use_acc=False, is_async=True)
    seen = warpgroup_mma(k, k.permute((1, 0)), none, use_acc=False, is_async=True)
    row = _numbers(beta, of_k, ROW, NORMALIZE)
    column = _over_length(scale, lengths, COLUMN, NORMALIZE)
    turned = (turned * gl.where(i <= j, weights * row[:, None] * column[None, :], 0.0)).to(kind)
    found, seen = warpgroup_mma_wait(0, deps=(found, seen))
    other = warpgroup_mma(u, dv.permute((1, 0)), none, use_acc=False, is_async=True)
    column = _numbers(beta, of_k, COLUMN, NORMALIZE)
    found *= gl.where(i > j, weights * column[None, :] * _over_length(-1.0, of_k, ROW, NORMALIZE)[:, None], 0.0)
    both = (both + found * seen).to(kind)
    column = _over_length(-1.0, of_k, COLUMN, NORMALIZE)
    weights = gl.where(i < j, weights * row[:, None] * column[None, :], 0.0)
    other = warpgroup_mma_wait(0, deps=(other,))
    found = (found + weights * other).to(kind)
    return pairs, turned, found, both


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
def _chunk(
    maps, numbers, scale, batch, n, h, spot, first, start, tokens, NORMALIZE: gl.constexpr, FLOAT: gl.constexpr
):  # fmt: skip
    """A chunk's gradients. Places are used again: the gradient of the state lies where do and dv were; dq, what is
    summed for the gate, and dk where q was."""
    kind: gl.constexpr = maps.k.dtype
    K: gl.constexpr = maps.k.block_type.shape[-1]
    LAYOUT: gl.constexpr = sums_layout(K)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    NARROW: gl.constexpr = sums_layout(C)
    own = coordinates(numbers.ends, n, start, tokens, h, first, 0)
    shared = coordinates(numbers.ends, n, start, tokens, h // numbers.group, first, 0)
    u = gl.allocate_shared_memory(kind, maps.u.block_type.shape, maps.u.layout)
    q = gl.allocate_shared_memory(kind, maps.q.block_type.shape, maps.q.layout)
    k = gl.allocate_shared_memory(kind, maps.k.block_type.shape, maps.k.layout)
    given = gl.allocate_shared_memory(kind, [2] + maps.do.block_type.shape, maps.do.layout)
    before = gl.allocate_shared_memory(kind, maps.before.block_type.shape, maps.before.layout)
    after = given._reinterpret(kind, maps.later.block_type.shape, maps.later.layout)
    terms = q._reinterpret(kind, [K // C, C, C], gl.NVMMASharedLayout(128, 16, 2)).index(0)
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
    at = gl.arange(0, C, ROWS)
    since_q, since_k = scale * gl.load(decays + at), -gl.load(decays + C + at)
    until = gl.load(decays + 2 * C + at) * gl.load(decays + 3 * C + at)
    tiles = flat(u), flat(given.index(0)), flat(given.index(1)), flat(q), flat(k)
    pairs, turned, symmetric, both = _pairs(tiles, ready, decays, lengths, scale, NORMALIZE)
    none = gl.zeros([C, K], gl.float32, LAYOUT)
    mbarrier.wait(ready.index(3), 0)
    dq = warpgroup_mma(flat(given.index(0)), flat(before), none, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dq *= since_q[:, None]
    since = gl.sum(flat(q).load(LAYOUT).to(gl.float32) * dq, 1)
    dq = warpgroup_mma(gl.convert_layout(pairs, operand_layout(LAYOUT)), flat(k), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dk = warpgroup_mma(flat(given.index(1)), flat(before), none, use_acc=False, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    barrier()  # all have read do and dv
    _load_states(maps.later, [batch, h, spot, 0, 0], ready.index(4), after)
    dk *= since_k[:, None]
    since += gl.sum(flat(k).load(LAYOUT).to(gl.float32) * dk, 1)
    dk = warpgroup_mma(gl.convert_layout(symmetric, operand_layout(LAYOUT)), flat(k), dk, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(turned, operand_layout(LAYOUT)), flat(q), dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    if NORMALIZE:
        dq = _through_lengths(dq, flat(q).load(LAYOUT).to(gl.float32), gl.load(lengths + at))
    barrier()  # all have read q
    token = batch.to(gl.int64) * numbers.tokens + start + first
    place, left = (token * numbers.heads + h) * K, tokens - first
    _put(maps.dq, dq, q, own, place, numbers.heads * K, left, FLOAT)
    dg = _over_rows(since, True)
    tma.store_wait(0)
    dg += _later_sums(terms, both)
    mbarrier.wait(ready.index(4), 0)
    found = warpgroup_mma(flat(u), flat(after), none, use_acc=False, is_async=True)
    held = _products(before, after, kind, 4)
    found = warpgroup_mma_wait(0, deps=(found,))
    found *= until[:, None]
    wide = flat(k).load(LAYOUT).to(gl.float32)
    until = gl.sum(wide * found, 1)
    dk += found
    if NORMALIZE:
        dk = _through_lengths(dk, wide, gl.load(lengths + C + at))
    barrier()  # all have read the terms
    _put(maps.dk, dk, q, own, place, numbers.heads * K, left, FLOAT)
    dg += _over_rows(until, False) + whole * gl.sum(gl.sum(held, 1), 0)
    rows = gl.arange(0, C, gl.SliceLayout(1, NARROW))
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
