"""States before chunks, or in reverse their gradients after chunks, in Gluon for Hopper.

A program takes a sequence and four heads that share q and k: a warpgroup each, and one warp that brings tiles by TMA.
A state is held transposed, so that v's rows are the operand in registers, where they get their decays.
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

from ridgeline.ops.recurrent._delta_hopper_chains import coordinates, room_of
from ridgeline.ops.recurrent._shared_heads_hopper import HALF, ROWS, K, V, ring
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout

HEADS = gl.constexpr(4)  # of a program


class StateMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns), numbers (B, heads, chunks, 4, 128), states (B, heads, chunks, K, V)."""

    a: Any  # k, or in reverse q
    c: Any  # v or do
    numbers: Any
    marks: Any


class StateJob(NamedTuple):
    numbers: Any
    first: Any  # (sequences, heads, K, V) in float32 or None
    last: Any
    ends: Any  # cu_seqlens or None
    tokens: Any
    heads: Any
    chunks: Any
    share: Any


class StatePlace(NamedTuple):
    batch: Any
    n: Any
    of: Any
    head: Any
    most: Any  # the last of the heads
    start: Any
    tokens: Any
    kept: Any  # where the sequence's first chunk is kept among a head's
    count: Any  # chunks


@gluon.jit
def _place(job):
    n, spot = gl.program_id(1), gl.program_id(0)
    each = (job.share + HEADS - 1) // HEADS
    of, part = spot // each, spot % each
    batch, start, tokens, kept = n, 0 * n, 0 * n + job.tokens, 0 * n
    if job.ends is not None:
        batch = 0 * n
        start = gl.load(job.ends + n).to(gl.int32)
        tokens = gl.load(job.ends + n + 1).to(gl.int32) - start
        kept = room_of(job.ends, n, ROWS).to(gl.int32)
    most = (of + 1) * job.share - 1
    return StatePlace(
        batch, n, of, of * job.share + part * HEADS, most, start, tokens, kept, (tokens + ROWS - 1) // ROWS
    )


class StateRings(NamedTuple):
    a: Any
    c: Any  # of all heads
    numbers: Any
    ready: Any
    free: Any


@gluon.jit
def _bring(maps, job, rings, REVERSE: gl.constexpr):
    STAGES: gl.constexpr = rings.a.type.shape[0]
    place = _place(job)
    SIZE: gl.constexpr = maps.a.block_type.nbytes + HEADS * (maps.c.block_type.nbytes + maps.numbers.block_type.nbytes)
    for t in range(2 * place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        block = t
        if REVERSE:
            block = 2 * place.count - 1 - t
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE)
        at = coordinates(job.ends, place.n, place.start, place.tokens, place.of, block * HALF, 0)
        load(maps.a, at, ready, rings.a.index(stage))
        for which in gl.static_range(HEADS):
            head = gl.minimum(place.head + which, place.most)
            kept = place.kept + block // 2
            at = coordinates(job.ends, place.n, place.start, place.tokens, head, block * HALF, 0)
            load(maps.c, at, ready, rings.c.index(HEADS * stage + which))
            at = [place.batch, head, kept, 0, (block % 2) * HALF]
            load(maps.numbers, at, ready, rings.numbers.index(HEADS * stage + which))


@gluon.jit
def _factors(rings, spot, half: gl.constexpr, REVERSE: gl.constexpr, LAYOUT: gl.constexpr):
    """The decay of each row of a block, until the chunk's end and times its step, or in reverse, where the second block
    comes first, since the chunk's begin."""
    tile = rings.numbers.index(spot)._reinterpret(gl.float32, [4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if not REVERSE:
        return tile.index(2).load(LAYOUT) * tile.index(3).load(LAYOUT)
    elif half == 1:
        return gl.exp2(tile.index(0).load(LAYOUT))
    else:
        return tile.index(1).load(LAYOUT)


@gluon.jit
def _walk(ME: gl.constexpr, maps, job, rings, outs, factor, REVERSE: gl.constexpr):
    """A head's states."""
    STAGES: gl.constexpr = rings.a.type.shape[0]
    kind: gl.constexpr = maps.c.dtype
    LAYOUT: gl.constexpr = sums_layout(HALF)
    WIDE: gl.constexpr = sums_layout(K)
    place = _place(job)
    there = place.head + ME <= place.most
    head = gl.minimum(place.head + ME, place.most)
    column = gl.arange(0, V, gl.SliceLayout(1, WIDE))[:, None]
    depth = gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    state = gl.zeros([V, K], gl.float32, WIDE)
    given = (place.n * job.heads + head).to(gl.int64) * (K * V)
    if job.first is not None:
        state = gl.load(job.first + given + (depth * V + column))
    own = job.numbers + ((place.batch * job.heads + head).to(gl.int64) * job.chunks + place.kept) * (4 * ROWS)
    for t in range(place.count):
        chunk = t
        if REVERSE:
            chunk = place.count - 1 - t
        whole = gl.load(own + chunk * (4 * ROWS) + (2 * ROWS - 1))
        tma.store_wait(0)
        flat(outs.index(ME)).permute((1, 0)).store(state.to(kind))
        fence_async_shared()
        if there:
            store(maps.marks, [place.batch, head, place.kept + chunk, 0, 0], outs.index(ME))
        state *= whole
        for half in gl.static_range(2):
            turn = 2 * t + half
            stage, odd = turn % STAGES, (turn // STAGES) & 1
            spot = HEADS * stage + ME
            mbarrier.wait(rings.ready.index(stage), odd)
            c = flat(rings.c.index(spot)).permute((1, 0)).load(LAYOUT).to(gl.float32)
            c *= (factor * _factors(rings, spot, half, REVERSE, gl.SliceLayout(0, LAYOUT)))[None, :]
            left = gl.convert_layout(c.to(kind), operand_layout(WIDE))
            state = warpgroup_mma(left, flat(rings.a.index(stage)), state, is_async=True)
            state = warpgroup_mma_wait(0, deps=(state,))
            barrier()
            mbarrier.arrive(rings.free.index(stage), count=1)
    if job.last is not None:  # noqa: SIM102  # decided at compile time
        if there:
            gl.store(job.last + given + (depth * V + column), state)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["factor"])
def shared_states(job, maps, factor, REVERSE: gl.constexpr, STAGES: gl.constexpr):
    """factor: of what is added to states."""
    a, c, numbers = ring(maps.a, STAGES), ring(maps.c, HEADS * STAGES), ring(maps.numbers, HEADS * STAGES)
    outs = ring(maps.marks, HEADS)
    rings = StateRings(a, c, numbers, make_barriers(STAGES, 1), make_barriers(STAGES, HEADS))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk, (0, maps, job, rings, outs, factor, REVERSE)),
            (_walk, (1, maps, job, rings, outs, factor, REVERSE)),
            (_walk, (2, maps, job, rings, outs, factor, REVERSE)),
            (_walk, (3, maps, job, rings, outs, factor, REVERSE)),
            (_bring, (maps, job, rings, REVERSE)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 24],
    )
