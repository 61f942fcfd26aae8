"""The delta rule's chain with a gate per token, in Gluon for Hopper, forward: a sequence and head a program.

A warp brings each chunk's tiles by TMA, some chunks ahead. Two warpgroups go through the chunks, each with half of v's
columns: their states never meet, so they wait for tiles alone. All is transposed, as in `chain_states`.
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
HALF = gl.constexpr(64)  # columns of v of a warpgroup


class WalkMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns) and numbers (B, heads, chunks, 4, C)."""

    q: Any
    k: Any
    v: Any
    squares: Any  # P in the first 64 columns of a row, and L in the next
    decays: Any
    out: Any  # o; None for N and M


class Walk(NamedTuple):
    whole: Any  # a chunk's decay
    first: Any  # (sequences, heads, K, V) in float32 or None
    last: Any
    starts: Any  # the state before each segment, (B, heads, rooms, V, K) in float32, or None
    made: Any  # N and M of each segment, turned: (B, heads, rooms, V + K, K) in float32, if they alone are wanted
    ends: Any  # cu_seqlens or None
    sequences: Any
    tokens: Any
    heads: Any
    chunks: Any  # room of a head
    span: Any  # chunks of a segment
    rooms: Any  # for segments, of a head
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


class Place(NamedTuple):
    """Where a program is."""

    batch: Any
    n: Any  # its sequence
    h: Any
    start: Any  # the sequence's first token
    tokens: Any
    kept: Any  # where its first chunk is kept among a head's
    room: Any  # where its segment is, among all heads'
    first: Any  # whether the segment is the sequence's first
    last: Any
    turn: Any  # whether M is made, else N
    low: Any  # the segment's first chunk
    count: Any  # its chunks; -1 where nothing is to be made


@gluon.jit
def _place(walk):
    head, spot = gl.program_id(1), gl.program_id(0)
    turn = spot < 0
    if walk.made is not None:
        turn = spot % 2 == 1
        spot = spot // 2
    n, h = head // walk.heads, head % walk.heads
    batch, segment, start, tokens, kept = n, spot, 0 * n, 0 * n + walk.tokens, 0 * n
    unit = walk.span * C
    if walk.ends is not None:
        n = sequence_at(walk.ends, walk.sequences, spot, unit)
        segment = spot - room_of(walk.ends, n, unit)
        start = gl.load(walk.ends + n)
        tokens = gl.load(walk.ends + n + 1) - start
        kept = room_of(walk.ends, n, C)
    last = gl.maximum((tokens + unit - 1) // unit, 1) - 1
    low = segment * walk.span
    count = gl.maximum(gl.minimum(low + walk.span, (tokens + C - 1) // C) - low, 0)
    none = segment > last
    if walk.made is not None:  # the last segment needs no N, and the first no M
        none = none | (segment == last) | (turn & (segment == 0))
    count = gl.where(none, -1, count)
    room = head.to(gl.int64) * walk.rooms + spot
    return Place(batch, n, h, start, tokens, kept, room, segment == 0, segment == last, turn, low, count)


@gluon.jit
def _at(walk, place, head, chunk, column):
    return coordinates(walk.ends, place.n, place.start, place.tokens, head, chunk * C, column)


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any  # halves
    solve: Any
    pair: Any
    decays: Any
    ready: Any
    free: Any


@gluon.jit
def _numbers_of(rings, stage, row: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each row of the chunk."""
    tile = rings.decays.index(stage)._reinterpret(gl.float32, [4, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return tile.index(row).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _begin_state(walk, place, ME: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    state = gl.zeros([HALF, K], gl.float32, LAYOUT)
    here = place.first
    if walk.starts is None:
        here = here | (place.count >= 0)  # not in segments
    if walk.first is not None:  # noqa: SIM102  # decided at compile time, as below
        if here & (place.turn == 0):
            base = walk.first + (place.n * walk.heads + place.h).to(gl.int64) * (K * V)
            state = gl.load(base + (depth * V + column))
    if walk.made is not None:
        state = gl.where(place.turn & (depth == column), 1.0, state)
    elif walk.starts is not None:  # noqa: SIM102
        if here == 0:
            state = gl.load(walk.starts + place.room * (K * V) + (column * K + depth))
    return state


@gluon.jit
def _end_state(walk, place, state, ME: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    there = place.last
    if walk.starts is None:
        there = there | (place.count >= 0)
    column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    if walk.made is not None:
        if place.count >= 0:
            row = column + gl.where(place.turn, V, 0)
            gl.store(walk.made + place.room * (K * (V + K)) + (row * K + depth), state)
    elif walk.last is not None:  # noqa: SIM102
        if there & (place.count >= 0):
            base = walk.last + (place.n * walk.heads + place.h).to(gl.int64) * (K * V)
            gl.store(base + (depth * V + column), state)


@gluon.jit
def _walk(ME: gl.constexpr, maps, walk, rings, outs, scale, OUT: gl.constexpr):
    """A warpgroup's columns of v. outs: where its rows leave shared memory; without OUT only the last state does."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[-1]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    place = _place(walk)
    own = gl.program_id(1).to(gl.int64) * walk.chunks + place.kept
    none = gl.zeros([HALF, C], gl.float32, NARROW)
    state = _begin_state(walk, place, ME, K, 2 * HALF)
    out_tile = outs.index(ME)
    for t in range(place.count):
        chunk = place.low + t
        stage, odd = t % STAGES, (t // STAGES) & 1
        whole = gl.load(walk.whole + own + chunk)
        left = gl.convert_layout(state.to(kind), operand_layout(NARROW))
        mbarrier.wait(rings.ready.index(stage), odd)
        tk = flat(rings.k.index(stage))
        x = warpgroup_mma(left, tk.permute((1, 0)), none, use_acc=False, is_async=True)
        if OUT:
            out = warpgroup_mma(left, flat(rings.q.index(stage)).permute((1, 0)), none, use_acc=False, is_async=True)
        tv = flat(rings.v.index(2 * stage + ME)).permute((1, 0)).load(NARROW).to(gl.float32)
        if not OUT:
            tv = gl.where(place.turn, 0.0, tv)
        factor = _numbers_of(rings, stage, 3, NARROW)
        if OUT:
            x = warpgroup_mma_wait(1, deps=(x,))
        else:
            x = warpgroup_mma_wait(0, deps=(x,))
        x = tv - _numbers_of(rings, stage, 1, NARROW) * x
        y = gl.convert_layout((factor * x).to(kind), operand_layout(NARROW))
        y = warpgroup_mma(y, flat(rings.solve.index(stage)).permute((1, 0)), none, use_acc=False, is_async=True)
        state *= whole
        if OUT:
            out, y = warpgroup_mma_wait(0, deps=(out, y))
        else:
            y = warpgroup_mma_wait(0, deps=(y,))
        u = factor * (x - y)
        right = gl.convert_layout((_numbers_of(rings, stage, 2, NARROW) * u).to(kind), operand_layout(WIDE))
        pending = warpgroup_mma(right, tk, state, is_async=True)
        if OUT:
            out *= _numbers_of(rings, stage, 0, NARROW)
            right = gl.convert_layout(u.to(kind), operand_layout(NARROW))
            state = warpgroup_mma_wait(0, deps=(pending,))
            out = warpgroup_mma(right, flat(rings.pair.index(stage)).permute((1, 0)), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            found = (scale * out).to(kind)
            tma.store_wait(0)
            flat(out_tile).permute((1, 0)).store(found)
            fence_async_shared()
            store(maps.out, _at(walk, place, place.h, chunk, ME * HALF), out_tile)
        else:
            state = warpgroup_mma_wait(0, deps=(pending,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
    _end_state(walk, place, state, ME, K, 2 * HALF)
    tma.store_wait(0)


@gluon.jit
def _fill(maps, walk, rings, OUT: gl.constexpr):
    """The warp that brings tiles."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    place = _place(walk)
    of_k = place.h // walk.group
    SIZE: gl.constexpr = (
        maps.k.block_type.nbytes + 2 * maps.v.block_type.nbytes + maps.squares.block_type.nbytes
        + maps.decays.block_type.nbytes
    )  # fmt: skip
    MORE: gl.constexpr = maps.q.block_type.nbytes + maps.squares.block_type.nbytes if OUT else 0
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        chunk = place.low + t
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE + MORE)
        load(maps.k, _at(walk, place, of_k, chunk, 0), ready, rings.k.index(stage))
        load(maps.decays, [place.batch, place.h, place.kept + chunk, 0, 0], ready, rings.decays.index(stage))
        load(maps.v, _at(walk, place, place.h, chunk, 0), ready, rings.v.index(2 * stage))
        load(maps.v, _at(walk, place, place.h, chunk, HALF), ready, rings.v.index(2 * stage + 1))
        load(maps.squares, _at(walk, place, place.h, chunk, C), ready, rings.solve.index(stage))
        if OUT:
            load(maps.squares, _at(walk, place, place.h, chunk, 0), ready, rings.pair.index(stage))
            load(maps.q, _at(walk, place, of_k, chunk, 0), ready, rings.q.index(stage))


@gluon.jit
def _ring(source, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit(do_not_specialize=["scale"])
def walk_chunks(walk, maps, scale, STAGES: gl.constexpr):
    """The outputs of all chunks; without maps.out N and M of each segment."""
    OUT: gl.constexpr = maps.out is not None
    k, v, solve = _ring(maps.k, STAGES), _ring(maps.v, 2 * STAGES), _ring(maps.squares, STAGES)
    q, pair, outs = k, solve, v
    if OUT:
        q, pair, outs = _ring(maps.q, STAGES), _ring(maps.squares, STAGES), _ring(maps.out, 2)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    rings = Rings(q, k, v, solve, pair, _ring(maps.decays, STAGES), ready, free)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk, (0, maps, walk, rings, outs, scale, OUT)),
            (_walk, (1, maps, walk, rings, outs, scale, OUT)),
            (_fill, (maps, walk, rings, OUT)),
        ],
        [4, 1],
        [240, 24],
    )
