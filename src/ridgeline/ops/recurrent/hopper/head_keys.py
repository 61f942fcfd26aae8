"""The gradients of k and v of linear attention with a gate per head or none, in Gluon for Hopper: a sequence and head a
program, which goes through the chunks in reverse.

Its state R is the gradient of the state after a chunk. Two warpgroups have half of R's rows (k's columns) each, in
float32 registers, and half of the columns of dk and dv. dk needs a warpgroup's own rows of R alone, and dv all rows, so
both write them for products to shared memory. One makes the weights of keys with queries in dv, the other those in dk.
For a gate's gradient R is kept, as the pass for dq keeps the states.
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

from ridgeline.ops.recurrent.hopper.head_tiles import (
    HALF,
    SINCE,
    SUMS,
    UNTIL,
    WHOLE,
    WIDE,
    C,
    at,
    fill_decays,
    numbers,
    of_columns,
    of_rows,
    place_of,
    put,
    ring,
)
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout


class KeyMaps(NamedTuple):
    """Tensor maps of a chunk's rows; of results half of their columns."""

    q: Any
    k: Any
    v: Any
    do: Any
    dk: Any  # None where it is in float32
    dv: Any
    marks: Any  # R after all heads' chunks, (chunks, K, V), or None


class KeyScan(NamedTuple):
    dk: Any
    gate: Any  # (B, T, heads) or None
    gate_batch: Any
    gate_token: Any
    gate_head: Any
    gate_group: Any
    first: Any  # the last state's gradient, (sequences, heads, K, V) in float32, or None
    last: Any  # the first state's, or None
    sums: Any  # what each row of k has with R alone, (2, heads' chunks, C) in float32, or None
    apart: Any  # from the first half of columns to the second
    own: Any  # pairs around each gate within its chunk, (heads' chunks, C)
    ends: Any  # cu_seqlens or None
    tokens: Any
    heads: Any
    room: Any  # chunks that a head has room for
    group: Any  # value heads that share a head of q and k


class KeyRings(NamedTuple):
    q: Any
    k: Any
    v: Any
    do: Any
    decays: Any
    ready: Any
    free: Any
    held: Any  # R as products take it, in halves of its rows
    weights: Any  # of keys (rows) with queries: in dv, and in dk
    written: Any  # both
    read: Any


@gluon.jit
def _spots(states, scan, place, ME: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(WIDE)
    row = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))[None, :]
    base = states + (place.n * scan.heads + place.h).to(gl.int64) * (WIDE * WIDE)
    return base + (row * WIDE + column)


@gluon.jit
def _half(tile, n: gl.constexpr):
    """Half of a tile's columns: in shared memory it follows the other half."""
    both = tile._reinterpret(tile.dtype, [2, C, HALF], gl.NVMMASharedLayout(128, 16, 2))
    return both.index(n)


@gluon.jit
def _for_pairs(outs, n: gl.constexpr):
    """A tile of `outs` for bfloat16."""
    tile = outs.index(n)
    return flat(tile._reinterpret(gl.bfloat16, tile.shape, tile.layout))


@gluon.jit
def _around(pairs, outs, none):
    """Begins the sums of a chunk's own pairs, keys by queries, over the keys before each gate: rows are gates, columns
    queries. They are bfloat16, as float16 has not the range; in float16 a second part follows."""
    LAYOUT: gl.constexpr = none.type.layout
    tma.store_wait(1)  # all but R
    first = pairs.to(gl.bfloat16)
    _for_pairs(outs, 1).store(first)
    if outs.dtype == gl.float16:
        _for_pairs(outs, 3).store((pairs - first.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    chosen = gl.convert_layout(gl.where(j < i, 1.0, 0.0).to(gl.bfloat16), operand_layout(LAYOUT))
    earlier = warpgroup_mma(chosen, _for_pairs(outs, 1), none, use_acc=False, is_async=True)
    if outs.dtype == gl.float16:
        earlier = warpgroup_mma(chosen, _for_pairs(outs, 3), earlier, is_async=True)
    return earlier


@gluon.jit
def _end_around(scan, place, chunk, earlier):
    """Keeps what a chunk's own pairs bring to each gate: those of an earlier key and this query or a later one."""
    LAYOUT: gl.constexpr = earlier.type.layout
    row = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    later = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :] >= row[:, None]
    gl.store(scan.own + (place.kept + chunk) * C + row, gl.sum(gl.where(later, earlier, 0.0), 1))


@gluon.jit
def _weigh(pairs, decays, stage, GATE: gl.constexpr):
    """Pairs of keys (rows) with queries from theirs on, with their decays."""
    LAYOUT: gl.constexpr = pairs.type.layout
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    if GATE:
        apart = of_columns(decays, stage, SUMS, LAYOUT) - of_rows(decays, stage, SUMS, LAYOUT)
        return pairs * gl.exp2(gl.where(j >= i, apart, -float("inf")))
    else:
        return gl.where(j >= i, pairs, 0.0)


@gluon.jit
def _of_values(tk, held, none, ME: gl.constexpr):
    """Begins k R, half of its columns."""
    found = warpgroup_mma(_half(tk, 0), _half(flat(held.index(0)), ME), none, use_acc=False, is_async=True)
    return warpgroup_mma(_half(tk, 1), _half(flat(held.index(1)), ME), found, is_async=True)


@gluon.jit
def _give(maps, scan, rings, place, outs, of_k, of_v, stage, chunk, scale, ME: gl.constexpr):
    """Ends the last two products of a chunk, which are dk and dv, frees its tiles, and writes the results."""
    of_k = warpgroup_mma_wait(1, deps=(of_k,))
    if maps.dk is None:
        put(scan.dk, scan, place, chunk, ME, scale * of_k)
    tma.store_wait(0)
    if maps.dk is not None:
        flat(outs.index(ME)).store((scale * of_k).to(outs.dtype))
    of_v = warpgroup_mma_wait(0, deps=(of_v,))
    barrier()
    mbarrier.arrive(rings.read, count=1)
    mbarrier.arrive(rings.free.index(stage), count=1)
    flat(outs.index(2 + ME)).store((scale * of_v).to(outs.dtype))
    fence_async_shared()
    barrier()
    spot = at(scan, place, place.h, chunk, ME * HALF)
    if maps.dk is not None:
        store(maps.dk, spot, outs.index(ME))
    store(maps.dv, spot, outs.index(2 + ME))


@gluon.jit
def _walk(ME: gl.constexpr, maps, scan, rings, outs, scale):
    """A warpgroup's halves. outs: where results leave shared memory, dk's halves and then dv's."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    LAYOUT: gl.constexpr = sums_layout(WIDE)
    GATE: gl.constexpr = scan.gate is not None
    AROUND: gl.constexpr = scan.own is not None and ME == 1
    place = place_of(scan)
    none = gl.zeros([C, C], gl.float32, NARROW)
    r = gl.zeros([HALF, WIDE], gl.float32, LAYOUT)
    if scan.first is not None:
        r = gl.load(_spots(scan.first, scan, place, ME)) / scale
    mine = flat(rings.held.index(ME))
    for t in range(place.count):
        chunk = place.count - 1 - t
        stage, odd = t % STAGES, (t // STAGES) & 1
        low = r.to(kind)  # before products are in flight, which the assembler would wait for
        mbarrier.wait(rings.ready.index(stage), odd)
        if GATE:
            r *= of_rows(rings.decays, stage, WHOLE, LAYOUT)
        tq, tk = flat(rings.q.index(stage)), flat(rings.k.index(stage))
        tv, tdo = flat(rings.v.index(stage)), flat(rings.do.index(stage))
        if ME == 0:
            pairs = warpgroup_mma(tk, tq.permute((1, 0)), none, use_acc=False, is_async=True)
        else:
            pairs = warpgroup_mma(tv, tdo.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(rings.read, (t & 1) ^ 1)
        mine.store(low)
        pairs = warpgroup_mma_wait(0, deps=(pairs,))
        rings.weights.index(ME).store(_weigh(pairs, rings.decays, stage, GATE).to(kind))
        fence_async_shared()
        barrier()
        mbarrier.arrive(rings.written, count=1)
        if maps.marks is not None:
            store(maps.marks, [(place.kept + chunk).to(gl.int32), ME * HALF, 0], rings.held.index(ME))
        right = _half(tq, ME).permute((1, 0)).load(NARROW)
        if GATE:
            right = (of_columns(rings.decays, stage, SINCE, NARROW) * right.to(gl.float32)).to(kind)
        right = gl.convert_layout(right, operand_layout(LAYOUT))
        next = warpgroup_mma(right, tdo, r, is_async=True)
        of_k = warpgroup_mma(tv, mine.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(rings.written, t & 1)
        if AROUND:
            other = rings.weights.index(0).load(NARROW).to(gl.float32)
            earlier = _around(other * pairs, outs, none)
            next, of_k, earlier = warpgroup_mma_wait(0, deps=(next, of_k, earlier))
            of_v = _of_values(tk, rings.held, none, ME)
            _end_around(scan, place, chunk, earlier)
        else:
            of_v = _of_values(tk, rings.held, none, ME)
            next, of_k = warpgroup_mma_wait(2, deps=(next, of_k))
        r = next
        if GATE:
            of_k *= of_rows(rings.decays, stage, UNTIL, NARROW)
        if scan.sums is not None:
            row = gl.arange(0, C, gl.SliceLayout(1, NARROW))
            own = _half(tk, ME).load(NARROW).to(gl.float32)
            gl.store(scan.sums + ME * scan.apart + (place.kept + chunk) * C + row, gl.sum(own * of_k, 1))
        of_k = warpgroup_mma(rings.weights.index(1), _half(tq, ME), of_k, is_async=True)
        of_v = warpgroup_mma_wait(1, deps=(of_v,))
        if GATE:
            of_v *= of_rows(rings.decays, stage, UNTIL, NARROW)
        of_v = warpgroup_mma(rings.weights.index(0), _half(tdo, ME), of_v, is_async=True)
        _give(maps, scan, rings, place, outs, of_k, of_v, stage, chunk, scale, ME)
    if scan.last is not None:
        gl.store(_spots(scan.last, scan, place, ME), scale * r)
    tma.store_wait(0)


@gluon.jit
def _fill(maps, scan, rings):
    """The warp that brings tiles."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    place = place_of(scan)
    of_k = place.h // scan.group
    for t in range(place.count):
        chunk = place.count - 1 - t
        stage, odd = t % STAGES, (t // STAGES) & 1
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, 4 * maps.k.block_type.nbytes)
        spot = at(scan, place, place.h, chunk, 0)
        load(maps.v, spot, ready, rings.v.index(stage))
        load(maps.do, spot, ready, rings.do.index(stage))
        spot = at(scan, place, of_k, chunk, 0)
        load(maps.k, spot, ready, rings.k.index(stage))
        load(maps.q, spot, ready, rings.q.index(stage))


@gluon.jit
def _sum_gates(scan, rings):
    if scan.gate is not None:
        fill_decays(scan, rings.decays, rings.ready, rings.free, True)


@gluon.jit(do_not_specialize=["scale"])
def walk_keys(scan, maps, scale, STAGES: gl.constexpr):
    """dk and dv of all chunks, in reverse, and what a gate's gradient needs of them."""
    kind: gl.constexpr = maps.k.dtype
    q, k, v, do = ring(maps.q, STAGES), ring(maps.k, STAGES), ring(maps.v, STAGES), ring(maps.do, STAGES)
    outs = ring(maps.dv, 4)
    weights = gl.allocate_shared_memory(kind, [2, C, C], gl.NVMMASharedLayout(128, 16, 2))
    gates: gl.constexpr = 1 if scan.gate is not None else 0
    held = gl.allocate_shared_memory(kind, [2, 1, HALF, WIDE], gl.NVMMASharedLayout(128, 16, 3))
    ready, free = make_barriers(STAGES, 1 + gates), make_barriers(STAGES, 2)
    written, read = make_barriers(1, 2), make_barriers(1, 2)
    rings = KeyRings(
        q, k, v, do, numbers(STAGES), ready, free, held, weights, written.index(0), read.index(0)
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk, (0, maps, scan, rings, outs, scale)),
            (_walk, (1, maps, scan, rings, outs, scale)),
            (_fill, (maps, scan, rings)),
            (_sum_gates, (scan, rings)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
