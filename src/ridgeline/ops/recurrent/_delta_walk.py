"""The delta rule's chains with a gate per token, in Gluon for Hopper: a sequence and head a program.

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
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout

C = gl.constexpr(64)  # rows of a chunk
HALF = gl.constexpr(64)  # columns of v of a warpgroup


class WalkMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns), states (B, heads, chunks, V, K), numbers (B, heads, chunks, 5, C)."""

    q: Any
    k: Any
    v: Any  # or do
    squares: Any  # P in the first 64 columns of a row, and L in the next
    decays: Any
    rows: Any  # written: o, or U / beta, or the gradient of v
    states: Any  # written: the states before chunks, or their gradients after chunks; None for o
    solved: Any  # U / beta, in reverse


class Walk(NamedTuple):
    first: Any  # (B heads, K, V) in float32 or None
    last: Any
    whole: Any  # a chunk's decay
    sums: Any  # of the gradient of beta, in reverse
    tokens: Any
    heads: Any
    chunks: Any  # room of a head
    begin: Any
    beyond: Any
    group: Any
    all_rows: Any


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


@gluon.jit
def _numbers_of(rings, place, row: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each row of the chunk."""
    tile = rings.decays.index(place)._reinterpret(gl.float32, [4, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return tile.index(row).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _begin_state(walk, head, ME: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    state = gl.zeros([HALF, K], gl.float32, LAYOUT)
    if walk.first is not None:
        column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
        depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
        state = gl.load(walk.first + head.to(gl.int64) * (K * V) + (depth * V + column))
    return state


@gluon.jit
def _end_state(walk, head, state, ME: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    if walk.last is not None:
        column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
        depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
        gl.store(walk.last + head.to(gl.int64) * (K * V) + (depth * V + column), state)


@gluon.jit
def _forward(ME: gl.constexpr, maps, walk, rings, outs, kept, scale, OUT: gl.constexpr):
    """A warpgroup's columns of v. outs, kept: where its rows and its states leave shared memory."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[3]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    head = gl.program_id(0)
    n, h = head // walk.heads, head % walk.heads
    none = gl.zeros([HALF, C], gl.float32, NARROW)
    state = _begin_state(walk, head, ME, K, 2 * HALF)
    out_tile = outs.index(ME)
    for chunk in range(walk.begin, walk.beyond):
        t = chunk - walk.begin
        place, odd = t % STAGES, (t // STAGES) & 1
        whole = gl.load(walk.whole + head.to(gl.int64) * walk.chunks + chunk)
        low = state.to(kind)
        if not OUT:
            tma.store_wait(1)  # of the previous chunk's two, the states
            flat(kept.index(ME)).store(low)
            fence_async_shared()
            store(maps.states, [n, h, chunk, ME * HALF, 0], kept.index(ME))
        left = gl.convert_layout(low, operand_layout(NARROW))
        mbarrier.wait(rings.ready.index(place), odd)
        tk = flat(rings.k.index(place))
        x = warpgroup_mma(left, tk.permute((1, 0)), none, use_acc=False, is_async=True)
        if OUT:
            out = warpgroup_mma(left, flat(rings.q.index(place)).permute((1, 0)), none, use_acc=False, is_async=True)
        tv = flat(rings.v.index(2 * place + ME)).permute((1, 0)).load(NARROW).to(gl.float32)
        factor = _numbers_of(rings, place, 3, NARROW)
        if OUT:
            x = warpgroup_mma_wait(1, deps=(x,))
        else:
            x = warpgroup_mma_wait(0, deps=(x,))
        x = tv - _numbers_of(rings, place, 1, NARROW) * x
        y = gl.convert_layout((factor * x).to(kind), operand_layout(NARROW))
        y = warpgroup_mma(y, flat(rings.solve.index(place)).permute((1, 0)), none, use_acc=False, is_async=True)
        state *= whole
        if OUT:
            out, y = warpgroup_mma_wait(0, deps=(out, y))
        else:
            y = warpgroup_mma_wait(0, deps=(y,))
        y = x - y
        u = factor * y
        right = gl.convert_layout((_numbers_of(rings, place, 2, NARROW) * u).to(kind), operand_layout(WIDE))
        pending = warpgroup_mma(right, tk, state, is_async=True)
        if OUT:
            out *= _numbers_of(rings, place, 0, NARROW)
            right = gl.convert_layout(u.to(kind), operand_layout(NARROW))
            state = warpgroup_mma_wait(0, deps=(pending,))
            out = warpgroup_mma(right, flat(rings.pair.index(place)).permute((1, 0)), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            found = (scale * out).to(kind)
            tma.store_wait(0)
        else:
            found = y.to(kind)
            tma.store_wait(1)
        flat(out_tile).permute((1, 0)).store(found)
        fence_async_shared()
        store(maps.rows, [n, h, chunk * C, ME * HALF], out_tile)
        if not OUT:
            state = warpgroup_mma_wait(0, deps=(pending,))
        barrier()
        mbarrier.arrive(rings.free.index(place), count=1)
    _end_state(walk, head, state, ME, K, 2 * HALF)
    tma.store_wait(0)


@gluon.jit
def _fill(maps, walk, rings, MODE: gl.constexpr):
    """The warp that brings tiles. MODE: 0 for outputs, 1 for states, 2 in reverse."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    head = gl.program_id(0)
    n, h = head // walk.heads, head % walk.heads
    of_k = h // walk.group
    SIZE: gl.constexpr = (
        maps.k.block_type.nbytes + 2 * maps.v.block_type.nbytes + maps.squares.block_type.nbytes
        + maps.decays.block_type.nbytes
    )  # fmt: skip
    MORE: gl.constexpr = 0 if MODE == 1 else maps.q.block_type.nbytes + maps.squares.block_type.nbytes
    LAST: gl.constexpr = 2 * maps.solved.block_type.nbytes if MODE == 2 else 0
    for t in range(walk.beyond - walk.begin):
        place, odd = t % STAGES, (t // STAGES) & 1
        chunk = walk.begin + t
        if MODE == 2:
            chunk = walk.beyond - 1 - t
        row = chunk * C
        mbarrier.wait(rings.free.index(place), odd ^ 1)
        ready = rings.ready.index(place)
        mbarrier.expect(ready, SIZE + MORE + LAST)
        load(maps.k, [n, of_k, row, 0], ready, rings.k.index(place))
        load(maps.decays, [n, h, chunk, 0, 0], ready, rings.decays.index(place))
        load(maps.v, [n, h, row, 0], ready, rings.v.index(2 * place))
        load(maps.v, [n, h, row, HALF], ready, rings.v.index(2 * place + 1))
        load(maps.squares, [n, h, row, C], ready, rings.solve.index(place))
        if MODE != 1:
            load(maps.squares, [n, h, row, 0], ready, rings.pair.index(place))
            load(maps.q, [n, of_k, row, 0], ready, rings.q.index(place))
        if MODE == 2:
            load(maps.solved, [n, h, row, 0], ready, rings.solved.index(2 * place))
            load(maps.solved, [n, h, row, HALF], ready, rings.solved.index(2 * place + 1))


@gluon.jit
def _ring(source, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit(do_not_specialize=["scale"])
def walk_chunks(maps, walk, scale, MODE: gl.constexpr, STAGES: gl.constexpr):
    """MODE: 0 for outputs, 1 for the states before chunks and U / beta, 2 in reverse for gradients."""
    k, v, solve = _ring(maps.k, STAGES), _ring(maps.v, 2 * STAGES), _ring(maps.squares, STAGES)
    q, pair, solved = k, solve, v
    if MODE != 1:
        q, pair = _ring(maps.q, STAGES), _ring(maps.squares, STAGES)
    if MODE == 2:
        solved = _ring(maps.solved, 2 * STAGES)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    rings = Rings(q, k, v, solve, pair, _ring(maps.decays, STAGES), solved, ready, free)
    outs = _ring(maps.rows, 2)
    kept = outs
    if MODE != 0:
        kept = _ring(maps.states, 2)
    fence_async_shared()
    if MODE == 2:
        gl.warp_specialize(
            [
                (_backward, (0, maps, walk, rings, outs, kept, scale)),
                (_backward, (1, maps, walk, rings, outs, kept, scale)),
                (_fill, (maps, walk, rings, MODE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_forward, (0, maps, walk, rings, outs, kept, scale, MODE == 0)),
                (_forward, (1, maps, walk, rings, outs, kept, scale, MODE == 0)),
                (_fill, (maps, walk, rings, MODE)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _backward(ME: gl.constexpr, maps, walk, rings, outs, kept, scale):
    """A warpgroup's columns of v with time reversed: the gradients of states, of v and of beta."""
    STAGES: gl.constexpr = rings.k.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[3]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    head = gl.program_id(0)
    n, h = head // walk.heads, head % walk.heads
    none = gl.zeros([HALF, C], gl.float32, NARROW)
    state = _begin_state(walk, head, ME, K, 2 * HALF)
    out_tile = outs.index(ME)
    rows = gl.arange(0, C, gl.SliceLayout(0, NARROW))
    for t in range(walk.beyond - walk.begin):
        chunk = walk.beyond - 1 - t
        place, odd = t % STAGES, (t // STAGES) & 1
        whole = gl.load(walk.whole + head.to(gl.int64) * walk.chunks + chunk)
        low = state.to(kind)
        tma.store_wait(1)
        flat(kept.index(ME)).store(low)
        fence_async_shared()
        store(maps.states, [n, h, chunk, ME * HALF, 0], kept.index(ME))
        left = gl.convert_layout(low, operand_layout(NARROW))
        mbarrier.wait(rings.ready.index(place), odd)
        tk, tq = flat(rings.k.index(place)), flat(rings.q.index(place))
        turned = flat(rings.v.index(2 * place + ME)).permute((1, 0))
        dx = warpgroup_mma(left, tk.permute((1, 0)), none, use_acc=False, is_async=True)
        other = warpgroup_mma(turned, flat(rings.pair.index(place)), none, use_acc=False, is_async=True)
        right = turned.load(NARROW).to(gl.float32) * (_numbers_of(rings, place, 0, NARROW) * scale)
        right = gl.convert_layout(right.to(kind), operand_layout(WIDE))
        dx, other = warpgroup_mma_wait(0, deps=(dx, other))
        factor = _numbers_of(rings, place, 3, NARROW)
        dx = _numbers_of(rings, place, 2, NARROW) * dx + scale * other
        y = gl.convert_layout((factor * dx).to(kind), operand_layout(NARROW))
        y = warpgroup_mma(y, flat(rings.solve.index(place)), none, use_acc=False, is_async=True)
        state *= whole
        y = warpgroup_mma_wait(0, deps=(y,))
        dx -= y
        dv = factor * dx
        state = warpgroup_mma(right, tq, state, is_async=True)
        right = gl.convert_layout((-_numbers_of(rings, place, 1, NARROW) * dv).to(kind), operand_layout(WIDE))
        state = warpgroup_mma(right, tk, state, is_async=True)
        solved = flat(rings.solved.index(2 * place + ME)).permute((1, 0)).load(NARROW).to(gl.float32)
        sums = gl.sum(dx * solved, 0)
        at = walk.sums + ME * walk.all_rows + (n.to(gl.int64) * walk.tokens + chunk * C) * walk.heads + h
        gl.store(at + rows * walk.heads, sums, mask=rows < walk.tokens - chunk * C)
        tma.store_wait(1)
        flat(out_tile).permute((1, 0)).store(dv.to(kind))
        fence_async_shared()
        store(maps.rows, [n, h, chunk * C, ME * HALF], out_tile)
        state = warpgroup_mma_wait(0, deps=(state,))
        barrier()
        mbarrier.arrive(rings.free.index(place), count=1)
    _end_state(walk, head, state, ME, K, 2 * HALF)
    tma.store_wait(0)
