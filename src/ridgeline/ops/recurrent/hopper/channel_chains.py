"""The chain of a gate per channel, in Gluon for Hopper, forward: a sequence and head a program, mild gates, bfloat16.

A warp brings each chunk's rows by TMA, some chunks ahead. A warpgroup gives q and k their decays, in place, and makes
their weights. One or two others go through the chunks, each with 64 of v's columns: their states never meet. So q, k,
v and g are read once, and nothing but o is written. The state and o are transposed.
A chunk's rows meet in one product, which takes gates that add up to few halvings (`triton/channels.py`). A chain with
other gates is marked as left, and what it has written is written over.
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
SPAN = gl.constexpr(60.0)  # the most halvings of a chunk's decay
LOG2E = gl.constexpr(1.4426950408889634)


class ChainMaps(NamedTuple):
    """Tensor maps of rows (B, heads, T, columns)."""

    q: Any
    k: Any
    v: Any  # 64 columns
    g: Any
    out: Any  # 64 columns


class Chains(NamedTuple):
    left: Any  # of each sequence and head: 1 where the gates are too strong, written here
    strong: Any  # the same of the first chunk, written before
    first: Any  # (sequences, heads, K, V) in float32 or None
    last: Any
    bonus: Any  # (heads of k, K) or None
    ends: Any  # cu_seqlens or None
    tokens: Any
    heads: Any
    group: Any


class Spot(NamedTuple):
    """Where a program is."""

    n: Any  # its sequence
    h: Any
    start: Any  # the sequence's first token
    tokens: Any
    count: Any  # its chunks; -1 where the chain is left


@gluon.jit
def spot_of(chains):
    chain = gl.program_id(0)
    n, h = chain // chains.heads, chain % chains.heads
    start, tokens = 0 * n, 0 * n + chains.tokens
    if chains.ends is not None:
        start = gl.load(chains.ends + n)
        tokens = gl.load(chains.ends + n + 1) - start
    count = gl.where(gl.load(chains.strong + chain) != 0, -1, (tokens + C - 1) // C)
    return Spot(n, h, start, tokens, count)


@gluon.jit
def rows_at(chains, spot, head, chunk, column):
    if chains.ends is None:
        return spot.n, head, chunk * C, column
    else:
        far, end, high = sequence_row(spot.start, spot.tokens, chunk * C)
        return far, end, head, high, column


@gluon.jit
def power(x):
    """2^x, and 0 below float32's normal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any  # halves
    g: Any
    pair: Any  # weights of q with k
    whole: Any  # chunks' decays
    ones: Any
    ready: Any
    made: Any
    free: Any


@gluon.jit
def _bonus_of(chains, head, K: gl.constexpr, LAYOUT: gl.constexpr):
    depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    return gl.load(chains.bonus + head * K + depth).to(gl.float32)[None, :]


@gluon.jit
def _prepare(maps, chains, rings):
    """The warpgroup that makes q and k with their decays, and their weights."""
    STAGES: gl.constexpr = rings.q.type.shape[0]
    PAIRS: gl.constexpr = rings.pair.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[-1]
    kind: gl.constexpr = maps.k.dtype
    SHIFT: gl.constexpr = chains.bonus is not None
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    THIN: gl.constexpr = sums_layout(8)
    spot = spot_of(chains)
    i = gl.arange(0, C, gl.SliceLayout(1, NARROW))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
    summed = gl.convert_layout(gl.where(i >= j, 1.0, 0.0).to(kind), operand_layout(WIDE))
    wide, narrow = gl.zeros([C, K], gl.float32, WIDE), gl.zeros([C, C], gl.float32, NARROW)
    thin = gl.zeros([K, 8], gl.float32, THIN)
    strong = gl.zeros([K], gl.int32, gl.SliceLayout(1, THIN))
    for t in range(spot.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        tq, tk, tg = flat(rings.q.index(stage)), flat(rings.k.index(stage)), flat(rings.g.index(stage))
        mbarrier.wait(rings.ready.index(stage), odd)
        since = warpgroup_mma(summed, tg, wide, use_acc=False, is_async=True)
        total = warpgroup_mma(tg.permute((1, 0)), rings.ones.permute((1, 0)), thin, use_acc=False, is_async=True)
        mine = tq.load(WIDE).to(gl.float32)
        since, total = warpgroup_mma_wait(0, deps=(since, total))
        since *= LOG2E
        total = gl.max(total, 1) * LOG2E  # the columns are the same
        strong = gl.where(total >= -SPAN, strong, 1)  # a NaN is strong
        diagonal = gl.zeros([C], gl.float32, gl.SliceLayout(1, WIDE))
        theirs = tk.load(WIDE).to(gl.float32)
        if SHIFT:
            diagonal = gl.sum(mine * theirs * _bonus_of(chains, spot.h // chains.group, K, WIDE), 1)
            mine *= power(since - tg.load(WIDE).to(gl.float32) * LOG2E)
        else:
            mine *= power(since)
        mine = mine.to(kind)
        tq.store(mine)
        tk.store((theirs * power(-since)).to(kind))
        fence_async_shared()
        barrier()
        left = gl.convert_layout(mine, operand_layout(NARROW))
        found = warpgroup_mma(left, tk.permute((1, 0)), narrow, use_acc=False, is_async=True)
        before = t - PAIRS
        mbarrier.wait(rings.free.index((before + STAGES) % STAGES), (before // STAGES) & 1, pred=before >= 0)
        found = warpgroup_mma_wait(0, deps=(found,))
        if SHIFT:
            own = gl.convert_layout(diagonal, gl.SliceLayout(1, NARROW))[:, None]
            found = gl.where(i > j, found, gl.where(i == j, own, 0.0))
        else:
            found = gl.where(i >= j, found, 0.0)
        flat(rings.pair.index(t % PAIRS)).store(found.to(kind))
        rings.whole.index(t % PAIRS).store(power(total))
        fence_async_shared()
        barrier()
        mbarrier.arrive(rings.made.index(stage), count=1)
    gl.store(chains.left + gl.program_id(0), gl.where(spot.count < 0, 1, gl.max(strong, 0)))


@gluon.jit
def _state_at(chains, spot, ME: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(K)
    column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    depth = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.program_id(0).to(gl.int64) * (K * V) + (depth * V + column)


@gluon.jit
def _walk(ME: gl.constexpr, maps, chains, rings, outs, scale):
    """A warpgroup's columns of v. outs: where its rows leave shared memory."""
    STAGES: gl.constexpr = rings.q.type.shape[0]
    PAIRS: gl.constexpr = rings.pair.type.shape[0]
    PARTS: gl.constexpr = outs.type.shape[0]
    K: gl.constexpr = maps.k.block_type.shape[-1]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(K)
    spot = spot_of(chains)
    narrow = gl.zeros([HALF, C], gl.float32, NARROW)
    state = gl.zeros([HALF, K], gl.float32, WIDE)
    if chains.first is not None:
        state = gl.load(chains.first + _state_at(chains, spot, ME, K, PARTS * HALF))
    out_tile = outs.index(ME)
    for t in range(spot.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        left = gl.convert_layout(state.to(kind), operand_layout(NARROW))
        mbarrier.wait(rings.ready.index(stage), odd)
        mbarrier.wait(rings.made.index(stage), odd)
        tv = flat(rings.v.index(PARTS * stage + ME)).permute((1, 0))
        out = warpgroup_mma(left, flat(rings.q.index(stage)).permute((1, 0)), narrow, use_acc=False, is_async=True)
        pair = flat(rings.pair.index(t % PAIRS)).permute((1, 0))
        out = warpgroup_mma(tv, pair, out, is_async=True)
        pending = warpgroup_mma(tv, flat(rings.k.index(stage)), state, is_async=True)
        out = warpgroup_mma_wait(1, deps=(out,))
        found = (scale * out).to(kind)
        tma.store_wait(0)
        flat(out_tile).permute((1, 0)).store(found)
        fence_async_shared()
        store(maps.out, rows_at(chains, spot, spot.h, t, ME * HALF), out_tile)
        whole = rings.whole.index(t % PAIRS).load(gl.SliceLayout(0, WIDE))[None, :]
        state = warpgroup_mma_wait(0, deps=(pending,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        state *= whole
    if chains.last is not None:  # noqa: SIM102  # decided at compile time
        if spot.count >= 0:
            gl.store(chains.last + _state_at(chains, spot, ME, K, PARTS * HALF), state)
    tma.store_wait(0)


@gluon.jit
def _fill(maps, chains, rings, PARTS: gl.constexpr):
    """The warp that brings tiles."""
    STAGES: gl.constexpr = rings.q.type.shape[0]
    spot = spot_of(chains)
    of_k = spot.h // chains.group
    SIZE: gl.constexpr = 3 * maps.k.block_type.nbytes + PARTS * maps.v.block_type.nbytes
    for t in range(spot.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE)
        load(maps.g, rows_at(chains, spot, of_k, t, 0), ready, rings.g.index(stage))
        load(maps.q, rows_at(chains, spot, of_k, t, 0), ready, rings.q.index(stage))
        load(maps.k, rows_at(chains, spot, of_k, t, 0), ready, rings.k.index(stage))
        for part in gl.static_range(PARTS):
            load(maps.v, rows_at(chains, spot, spot.h, t, part * HALF), ready, rings.v.index(PARTS * stage + part))


@gluon.jit
def ring(source, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit
def ones_tile(kind: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
    tile = gl.allocate_shared_memory(kind, [8, C], gl.NVMMASharedLayout(128, 16, 2))
    tile.store(gl.full([8, C], 1.0, kind, LAYOUT))
    return tile


@gluon.jit(do_not_specialize=["scale"])
def forward_chains(chains, maps, scale, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The outputs of all chunks, and the last states."""
    K: gl.constexpr = maps.k.block_type.shape[-1]
    q, k, g, v = ring(maps.q, STAGES), ring(maps.k, STAGES), ring(maps.g, STAGES), ring(maps.v, PARTS * STAGES)
    outs = ring(maps.out, PARTS)
    pair = gl.allocate_shared_memory(maps.k.dtype, [2, C, C], gl.NVMMASharedLayout(128, 16, 2))
    whole = gl.allocate_shared_memory(gl.float32, [2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready, made, free = make_barriers(STAGES, 1), make_barriers(STAGES, 1), make_barriers(STAGES, PARTS)
    rings = Rings(q, k, v, g, pair, whole, ones_tile(maps.k.dtype), ready, made, free)
    fence_async_shared()
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_prepare, (maps, chains, rings)),
                (_walk, (0, maps, chains, rings, outs, scale)),
                (_walk, (1, maps, chains, rings, outs, scale)),
                (_fill, (maps, chains, rings, PARTS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_prepare, (maps, chains, rings)),
                (_walk, (0, maps, chains, rings, outs, scale)),
                (_fill, (maps, chains, rings, PARTS)),
            ],
            [4, 1],
            [104, 24],
        )
