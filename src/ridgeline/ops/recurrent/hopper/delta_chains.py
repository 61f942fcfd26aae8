"""The delta rule's chains in Gluon for Hopper: a sequence and head a program.

A warp brings each chunk's tiles by TMA, some chunks ahead. Two warpgroups go through the chunks, each with half of v's
columns: their states never meet, so they wait for tiles alone. All is transposed, as in `chain_states`. With a gate per
channel rows come with their decays, those of k that read and those that write apart.
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

from ridgeline.ops.recurrent.hopper.delta_gradients import coordinates, room_of, sequence_at
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout

C = gl.constexpr(64)  # rows of a chunk
HALF = gl.constexpr(64)  # columns of v of a warpgroup


class WalkMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns), states (B, heads, chunks, V, K), numbers (B, heads, chunks, 5, C)."""

    q: Any
    k: Any
    v: Any  # or do
    squares: Any  # P in the first 64 columns of a row, and L in the next; with a gate per channel P, (B, heads, ...)
    decays: Any
    rows: Any  # written: o, or U / beta, or the gradient of v; None for N and M
    states: Any  # written: the states before chunks, or their gradients after chunks; or None
    solved: Any  # U / beta, in reverse; or None
    # with a gate per channel; else None
    b: Any = None  # rows of k that write
    solve: Any = None  # L
    whole: Any = None  # a chunk's decay, (B, heads, chunks, K)


class Walk(NamedTuple):
    whole: Any  # a chunk's decay, with a gate per token
    first: Any  # (sequences, heads, K, V) in float32 or None
    last: Any
    starts: Any  # the state before each segment, (B, heads, rooms, V, K) in float32, or None
    made: Any  # N and M of each segment, turned: (B, heads, rooms, V + K, K) in float32, if they alone are wanted
    sums: Any  # of the gradient of beta over the first half of v's columns, in reverse
    others: Any  # over the second half
    ends: Any  # cu_seqlens or None
    sequences: Any
    tokens: Any
    heads: Any
    chunks: Any  # room of a head
    begin: Any  # the first chunk
    span: Any  # chunks of a segment
    rooms: Any  # for segments, of a head
    group: Any


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
def _place(walk, REVERSE: gl.constexpr):
    head, spot = gl.program_id(1), gl.program_id(0)
    turn = spot < 0
    if walk.made is not None and not REVERSE:
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
    low = walk.begin + segment * walk.span
    count = gl.maximum(gl.minimum(low + walk.span, (tokens + C - 1) // C) - low, 0)
    none = segment > last
    if walk.made is not None:  # the last segment needs no N, and the first no M
        none = none | (segment == (0 if REVERSE else last)) | (turn & (segment == 0))
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
    solved: Any  # halves
    ready: Any
    free: Any
    b: Any
    whole: Any
    brought: Any  # of `solved` where it has room for one chunk


@gluon.jit
def _numbers_of(rings, stage, row: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each row of the chunk."""
    tile = rings.decays.index(stage)._reinterpret(gl.float32, [4, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return tile.index(row).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _whole_of(walk, rings, stage, early, LAYOUT: gl.constexpr):
    """A chunk's decay, or that of each channel. early: the first, loaded before."""
    if rings.whole is None:
        found = early
    else:
        K: gl.constexpr = rings.whole.type.shape[-1]
        tile = rings.whole.index(stage)._reinterpret(gl.float32, [1, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        found = tile.index(0).load(gl.SliceLayout(0, LAYOUT))[None, :]
    return found


@gluon.jit
def _early_whole(walk, rings, at):
    found = 1.0
    if rings.whole is None:
        found = gl.load(walk.whole + at)
    return found


@gluon.jit
def _begin_state(walk, place, ME: gl.constexpr, REVERSE: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    state = gl.zeros([HALF, K], gl.float32, LAYOUT)
    here = place.last if REVERSE else place.first
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
def _end_state(walk, place, state, ME: gl.constexpr, REVERSE: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    there = place.first if REVERSE else place.last
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
def _forward(ME: gl.constexpr, maps, walk, rings, outs, kept, scale, OUT: gl.constexpr, ENDS: gl.constexpr):
    """A warpgroup's columns of v. outs, kept: where its rows and its states leave shared memory."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[-1]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    place = _place(walk, False)
    own = gl.program_id(1).to(gl.int64) * walk.chunks + place.kept
    none = gl.zeros([HALF, C], gl.float32, NARROW)
    state = _begin_state(walk, place, ME, False, K, 2 * HALF)
    out_tile = outs.index(ME)
    for t in range(place.count):
        chunk = place.low + t
        stage, odd = t % STAGES, (t // STAGES) & 1
        whole = _early_whole(walk, rings, own + chunk)
        low = state.to(kind)
        if not OUT and not ENDS:
            tma.store_wait(1)  # of the previous chunk's two, the states
            flat(kept.index(ME)).store(low)
            fence_async_shared()
            store(maps.states, [place.batch, place.h, place.kept + chunk, ME * HALF, 0], kept.index(ME))
        left = gl.convert_layout(low, operand_layout(NARROW))
        mbarrier.wait(rings.ready.index(stage), odd)
        tk = flat(rings.k.index(stage))
        x = warpgroup_mma(left, tk.permute((1, 0)), none, use_acc=False, is_async=True)
        if OUT:
            out = warpgroup_mma(left, flat(rings.q.index(stage)).permute((1, 0)), none, use_acc=False, is_async=True)
        tv = flat(rings.v.index(2 * stage + ME)).permute((1, 0)).load(NARROW).to(gl.float32)
        if ENDS:
            tv = gl.where(place.turn, 0.0, tv)
        factor = _numbers_of(rings, stage, 3, NARROW)
        if OUT:
            x = warpgroup_mma_wait(1, deps=(x,))
        else:
            x = warpgroup_mma_wait(0, deps=(x,))
        x = tv - _numbers_of(rings, stage, 1, NARROW) * x
        y = gl.convert_layout((factor * x).to(kind), operand_layout(NARROW))
        y = warpgroup_mma(y, flat(rings.solve.index(stage)).permute((1, 0)), none, use_acc=False, is_async=True)
        state *= _whole_of(walk, rings, stage, whole, WIDE)
        if OUT:
            out, y = warpgroup_mma_wait(0, deps=(out, y))
        else:
            y = warpgroup_mma_wait(0, deps=(y,))
        y = x - y
        u = factor * y
        right = gl.convert_layout((_numbers_of(rings, stage, 2, NARROW) * u).to(kind), operand_layout(WIDE))
        pending = warpgroup_mma(right, flat(rings.b.index(stage)), state, is_async=True)
        if OUT:
            out *= _numbers_of(rings, stage, 0, NARROW)
            right = gl.convert_layout(u.to(kind), operand_layout(NARROW))
            state = warpgroup_mma_wait(0, deps=(pending,))
            out = warpgroup_mma(right, flat(rings.pair.index(stage)).permute((1, 0)), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            found = (scale * out).to(kind)
            tma.store_wait(0)
        elif not ENDS:
            found = y.to(kind)
            tma.store_wait(1)
        if not ENDS:
            flat(out_tile).permute((1, 0)).store(found)
            fence_async_shared()
            store(maps.rows, _at(walk, place, place.h, chunk, ME * HALF), out_tile)
        if not OUT:
            state = warpgroup_mma_wait(0, deps=(pending,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
    _end_state(walk, place, state, ME, False, K, 2 * HALF)
    tma.store_wait(0)


@gluon.jit
def _fill(maps, walk, rings, MODE: gl.constexpr):
    """The warp that brings tiles. MODE: 0 for outputs, 1 for states, 2 in reverse."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    place = _place(walk, MODE == 2)
    of_k = place.h // walk.group
    CHANNELS: gl.constexpr = maps.b is not None
    if CHANNELS:
        of_k = place.h
    SIZE: gl.constexpr = (
        maps.k.block_type.nbytes + 2 * maps.v.block_type.nbytes + maps.squares.block_type.nbytes
        + maps.decays.block_type.nbytes
        + (maps.b.block_type.nbytes + maps.whole.block_type.nbytes if CHANNELS else 0)
    )  # fmt: skip
    MORE: gl.constexpr = 0 if MODE == 1 else maps.q.block_type.nbytes + maps.squares.block_type.nbytes
    LAST: gl.constexpr = 2 * maps.solved.block_type.nbytes if maps.solved is not None else 0
    ONE: gl.constexpr = CHANNELS and maps.solved is not None
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        chunk = place.low + t
        if MODE == 2:
            chunk = place.low + place.count - 1 - t
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE + MORE + (0 if ONE else LAST))
        load(maps.k, _at(walk, place, of_k, chunk, 0), ready, rings.k.index(stage))
        load(maps.decays, [place.batch, place.h, place.kept + chunk, 0, 0], ready, rings.decays.index(stage))
        load(maps.v, _at(walk, place, place.h, chunk, 0), ready, rings.v.index(2 * stage))
        load(maps.v, _at(walk, place, place.h, chunk, HALF), ready, rings.v.index(2 * stage + 1))
        if CHANNELS:
            own = [place.batch, place.h, place.kept + chunk, 0, 0]
            load(maps.b, _at(walk, place, of_k, chunk, 0), ready, rings.b.index(stage))
            load(maps.whole, [place.batch, place.h, place.kept + chunk, 0], ready, rings.whole.index(stage))
            load(maps.solve, own, ready, rings.solve.index(stage))
            if MODE != 1:
                load(maps.squares, own, ready, rings.pair.index(stage))
        else:
            load(maps.squares, _at(walk, place, place.h, chunk, C), ready, rings.solve.index(stage))
            if MODE != 1:
                load(maps.squares, _at(walk, place, place.h, chunk, 0), ready, rings.pair.index(stage))
        if MODE != 1:
            load(maps.q, _at(walk, place, of_k, chunk, 0), ready, rings.q.index(stage))
        if maps.solved is not None:
            spot = stage
            if ONE:  # a chunk's, brought when the one before has been read
                spot = 0 * stage
                ready = rings.brought.index(0)
                if t > 0:
                    mbarrier.wait(rings.free.index((t - 1) % STAGES), ((t - 1) // STAGES) & 1)
                mbarrier.expect(ready, LAST)
            load(maps.solved, _at(walk, place, place.h, chunk, 0), ready, rings.solved.index(2 * spot))
            load(maps.solved, _at(walk, place, place.h, chunk, HALF), ready, rings.solved.index(2 * spot + 1))


@gluon.jit
def _ring(source, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit(do_not_specialize=["scale"])
def walk_chunks(walk, maps, scale, MODE: gl.constexpr, STAGES: gl.constexpr):
    """MODE: 0 for outputs, 1 for the states before chunks and U / beta, 2 in reverse for gradients."""
    k, v, solve = _ring(maps.k, STAGES), _ring(maps.v, 2 * STAGES), _ring(maps.squares, STAGES)
    q, pair, solved, b, whole = k, solve, v, k, None
    if maps.b is not None:
        b, whole = _ring(maps.b, STAGES), _ring(maps.whole, STAGES)
    if MODE != 1:
        q, pair = _ring(maps.q, STAGES), _ring(maps.squares, STAGES)
    if maps.solved is not None:
        solved = _ring(maps.solved, 2 * STAGES if maps.b is None else 2)
    ready, free, brought = make_barriers(STAGES, 1), make_barriers(STAGES, 2), make_barriers(1, 1)
    rings = Rings(q, k, v, solve, pair, _ring(maps.decays, STAGES), solved, ready, free, b, whole, brought)
    outs, kept = v, v
    if maps.states is not None:
        kept = _ring(maps.states, 2)
    if maps.rows is not None and maps.b is not None and MODE == 2:  # a state has left when its chunk's rows are made
        outs = kept._reinterpret(maps.rows.dtype, [4] + maps.rows.block_type.shape, maps.rows.layout)
    elif maps.rows is not None:
        outs = _ring(maps.rows, 2)
    fence_async_shared()
    if MODE == 2:
        gl.warp_specialize(
            [
                (_backward, (0, maps, walk, rings, outs, kept, scale, maps.rows is None)),
                (_backward, (1, maps, walk, rings, outs, kept, scale, maps.rows is None)),
                (_fill, (maps, walk, rings, MODE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_forward, (0, maps, walk, rings, outs, kept, scale, MODE == 0, maps.rows is None)),
                (_forward, (1, maps, walk, rings, outs, kept, scale, MODE == 0, maps.rows is None)),
                (_fill, (maps, walk, rings, MODE)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _backward(ME: gl.constexpr, maps, walk, rings, outs, kept, scale, ENDS: gl.constexpr):
    """A warpgroup's columns of v with time reversed: the gradients of states, of v and of beta."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[-1]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    place = _place(walk, True)
    own = gl.program_id(1).to(gl.int64) * walk.chunks + place.kept
    none = gl.zeros([HALF, C], gl.float32, NARROW)
    state = _begin_state(walk, place, ME, True, K, 2 * HALF)
    SHARED: gl.constexpr = maps.b is not None and not ENDS  # rows and states leave by one place
    out_tile = outs.index(ME * (2 if SHARED else 1))
    rows = gl.arange(0, C, gl.SliceLayout(0, NARROW))
    for t in range(place.count):
        chunk = place.low + place.count - 1 - t
        stage, odd = t % STAGES, (t // STAGES) & 1
        whole = _early_whole(walk, rings, own + chunk)
        low = state.to(kind)
        if not ENDS and not SHARED:
            tma.store_wait(1)
            flat(kept.index(ME)).store(low)
            fence_async_shared()
            store(maps.states, [place.batch, place.h, place.kept + chunk, ME * HALF, 0], kept.index(ME))
        left = gl.convert_layout(low, operand_layout(NARROW))
        mbarrier.wait(rings.ready.index(stage), odd)
        tk, tq = flat(rings.k.index(stage)), flat(rings.q.index(stage))
        turned = flat(rings.v.index(2 * stage + ME)).permute((1, 0))
        tb = flat(rings.b.index(stage))
        dx = warpgroup_mma(left, tb.permute((1, 0)), none, use_acc=False, is_async=True)
        other = warpgroup_mma(turned, flat(rings.pair.index(stage)), none, use_acc=False, is_async=True)
        right = turned.load(NARROW).to(gl.float32) * (_numbers_of(rings, stage, 0, NARROW) * scale)
        right = gl.convert_layout(right.to(kind), operand_layout(WIDE))
        if SHARED:
            tma.store_wait(0)
            barrier()
            flat(kept.index(ME)).store(low)
            fence_async_shared()
            barrier()
            store(maps.states, [place.batch, place.h, place.kept + chunk, ME * HALF, 0], kept.index(ME))
        dx, other = warpgroup_mma_wait(0, deps=(dx, other))
        factor = _numbers_of(rings, stage, 3, NARROW)
        dx = _numbers_of(rings, stage, 2, NARROW) * dx + scale * other
        y = gl.convert_layout((factor * dx).to(kind), operand_layout(NARROW))
        y = warpgroup_mma(y, flat(rings.solve.index(stage)), none, use_acc=False, is_async=True)
        state *= _whole_of(walk, rings, stage, whole, WIDE)
        y = warpgroup_mma_wait(0, deps=(y,))
        dx -= y
        dv = factor * dx
        state = warpgroup_mma(right, tq, state, is_async=True)
        right = gl.convert_layout((-_numbers_of(rings, stage, 1, NARROW) * dv).to(kind), operand_layout(WIDE))
        state = warpgroup_mma(right, tk, state, is_async=True)
        if not ENDS:
            spot = 2 * stage + ME
            if SHARED:
                spot = 0 * stage + ME
                mbarrier.wait(rings.brought.index(0), t & 1)
            solved = flat(rings.solved.index(spot)).permute((1, 0)).load(NARROW).to(gl.float32)
            sums = gl.sum(dx * solved, 0)
            token = place.batch.to(gl.int64) * walk.tokens + place.start + chunk * C
            at = (walk.others if ME else walk.sums) + token * walk.heads + place.h
            gl.store(at + rows * walk.heads, sums, mask=rows < place.tokens - chunk * C)
            tma.store_wait(0 if SHARED else 1)
            if SHARED:
                barrier()
            flat(out_tile).permute((1, 0)).store(dv.to(kind))
            fence_async_shared()
            store(maps.rows, _at(walk, place, place.h, chunk, ME * HALF), out_tile)
        state = warpgroup_mma_wait(0, deps=(state,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
    _end_state(walk, place, state, ME, True, K, 2 * HALF)
    tma.store_wait(0)
