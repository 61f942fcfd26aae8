"""Linear attention's chain with a gate per head or none, in Gluon for Hopper: a sequence and head a program.

Rows of out are scale * sum over j <= i of (a_i . b_j) e^(G_i - G_j) c_j: o of q, k, v, or dq of do, v, k. A warp brings
tiles by TMA some chunks ahead, and another sums the gates. Two warpgroups go through the chunks, each with half of
c's columns and their state in float32 registers, which never meets the other's.
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


class ScanMaps(NamedTuple):
    """Tensor maps of a chunk's rows: of a and b whole, of the others half of their columns."""

    a: Any
    b: Any
    c: Any
    out: Any  # None where it is in float32
    own: Any  # q where dq is made for a gate's gradient, else None
    marks: Any  # the states before all heads' chunks, (chunks, columns of c, columns of b), or None


class Scan(NamedTuple):
    out: Any
    gate: Any  # (B, T, heads) or None
    gate_batch: Any
    gate_token: Any
    gate_head: Any
    gate_group: Any
    first: Any  # (sequences, heads, K, V) in float32, or None
    last: Any
    sums: Any  # what each row of `own` has with the state alone: (2, heads' chunks, C) in float32, or None
    apart: Any  # from the first half of columns to the second
    ends: Any  # cu_seqlens or None
    tokens: Any
    heads: Any
    room: Any  # chunks that a head has room for
    group_a: Any  # value heads that share a head of a
    group_b: Any
    group_c: Any
    group_own: Any


class ScanRings(NamedTuple):
    a: Any
    b: Any
    c: Any  # halves
    own: Any  # halves of one chunk
    decays: Any
    ready: Any
    free: Any
    own_ready: Any
    own_free: Any


@gluon.jit
def _state_spots(states, scan, place, ME: gl.constexpr, TURNED: gl.constexpr):
    """Where a warpgroup's part of a state, columns of c by columns of b, is in (sequences, heads, K, V)."""
    LAYOUT: gl.constexpr = sums_layout(WIDE)
    column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    depth = gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))[None, :]
    base = states + (place.n * scan.heads + place.h).to(gl.int64) * (WIDE * WIDE)
    if TURNED:
        return base + (column * WIDE + depth)
    else:
        return base + (depth * WIDE + column)


@gluon.jit
def _walk(ME: gl.constexpr, maps, scan, rings, held, outs, scale, TURNED: gl.constexpr):
    """A warpgroup's columns of c. held: the state as products take it; outs: where results leave shared memory."""
    STAGES: gl.constexpr = rings.b.type.shape[0]
    kind: gl.constexpr = maps.b.dtype
    NARROW: gl.constexpr = sums_layout(C)
    LAYOUT: gl.constexpr = sums_layout(WIDE)
    GATE: gl.constexpr = scan.gate is not None
    place = place_of(scan)
    none = gl.zeros([C, C], gl.float32, NARROW)
    state = gl.zeros([HALF, WIDE], gl.float32, LAYOUT)
    if scan.first is not None:
        state = gl.load(_state_spots(scan.first, scan, place, ME, TURNED))
    i = gl.arange(0, C, gl.SliceLayout(1, NARROW))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
    mine = held.index(ME)
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        low = state.to(kind)  # before products are in flight, which the assembler would wait for
        mbarrier.wait(rings.ready.index(stage), odd)
        if GATE:
            state *= of_rows(rings.decays, stage, WHOLE, LAYOUT)
        ta, tb = flat(rings.a.index(stage)), flat(rings.b.index(stage))
        tc = flat(rings.c.index(2 * stage + ME))
        pairs = warpgroup_mma(ta, tb.permute((1, 0)), none, use_acc=False, is_async=True)
        if maps.marks is not None:
            tma.store_wait(0 if maps.out is None else 1)  # the state before has been read
        flat(mine).store(low)
        fence_async_shared()
        barrier()
        if maps.marks is not None:
            store(maps.marks, [(place.kept + t).to(gl.int32), ME * HALF, 0], mine)
        found = warpgroup_mma(ta, flat(mine).permute((1, 0)), none, use_acc=False, is_async=True)
        right = tc.permute((1, 0)).load(NARROW)
        if GATE:
            right = (of_columns(rings.decays, stage, UNTIL, NARROW) * right.to(gl.float32)).to(kind)
        right = gl.convert_layout(right, operand_layout(LAYOUT))
        pending = warpgroup_mma(right, tb, state, is_async=True)
        pairs = warpgroup_mma_wait(2, deps=(pairs,))
        if GATE:
            apart = of_rows(rings.decays, stage, SUMS, NARROW) - of_columns(rings.decays, stage, SUMS, NARROW)
            pairs *= gl.exp2(gl.where(j <= i, apart, -float("inf")))
        else:
            pairs = gl.where(j <= i, pairs, 0.0)
        weights = gl.convert_layout(pairs.to(kind), operand_layout(NARROW))
        found = warpgroup_mma_wait(1, deps=(found,))
        if GATE:
            found *= of_rows(rings.decays, stage, SINCE, NARROW)
        if scan.sums is not None:
            mbarrier.wait(rings.own_ready.index(0), t & 1)
            own = flat(rings.own.index(ME)).load(NARROW)
            spots = scan.sums + ME * scan.apart + (place.kept + t) * C + gl.arange(0, C, gl.SliceLayout(1, NARROW))
            gl.store(spots, gl.sum(own.to(gl.float32) * found, 1))
            barrier()
            mbarrier.arrive(rings.own_free.index(0), count=1)
        found = warpgroup_mma(weights, tc, found, is_async=True)
        state, found = warpgroup_mma_wait(0, deps=(pending, found))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        if maps.out is None:
            put(scan.out, scan, place, t, ME, scale * found)
        else:
            out = outs.index(ME)
            tma.store_wait(0)
            flat(out).store((scale * found).to(kind))
            fence_async_shared()
            barrier()
            store(maps.out, at(scan, place, place.h, t, ME * HALF), out)
    if scan.last is not None:
        gl.store(_state_spots(scan.last, scan, place, ME, TURNED), state)
    tma.store_wait(0)


@gluon.jit
def _fill(maps, scan, rings):
    """The warp that brings tiles."""
    STAGES: gl.constexpr = rings.b.type.shape[0]
    place = place_of(scan)
    of_a, of_b, of_c = place.h // scan.group_a, place.h // scan.group_b, place.h // scan.group_c
    SIZE: gl.constexpr = maps.a.block_type.nbytes + maps.b.block_type.nbytes + 2 * maps.c.block_type.nbytes
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE)
        load(maps.b, at(scan, place, of_b, t, 0), ready, rings.b.index(stage))
        load(maps.a, at(scan, place, of_a, t, 0), ready, rings.a.index(stage))
        load(maps.c, at(scan, place, of_c, t, 0), ready, rings.c.index(2 * stage))
        load(maps.c, at(scan, place, of_c, t, HALF), ready, rings.c.index(2 * stage + 1))
        if maps.own is not None:
            mbarrier.wait(rings.own_free.index(0), (t & 1) ^ 1)
            mbarrier.expect(rings.own_ready.index(0), 2 * maps.own.block_type.nbytes)
            of_own = place.h // scan.group_own
            load(maps.own, at(scan, place, of_own, t, 0), rings.own_ready.index(0), rings.own.index(0))
            load(maps.own, at(scan, place, of_own, t, HALF), rings.own_ready.index(0), rings.own.index(1))


@gluon.jit
def _sum_gates(scan, rings):
    if scan.gate is not None:
        fill_decays(scan, rings.decays, rings.ready, rings.free, False)


@gluon.jit(do_not_specialize=["scale"])
def walk_heads(scan, maps, scale, STAGES: gl.constexpr, TURNED: gl.constexpr):
    """The outputs of all chunks, in order. TURNED: whether states are kept with c's columns first, as of dq."""
    kind: gl.constexpr = maps.b.dtype
    held = gl.allocate_shared_memory(kind, [2, 1, HALF, WIDE], gl.NVMMASharedLayout(128, 16, 3))
    own = held
    if maps.own is not None:
        own = ring(maps.own, 2)
    ready, free = make_barriers(STAGES, 1 + (scan.gate is not None)), make_barriers(STAGES, 2)
    rings = ScanRings(
        ring(maps.a, STAGES), ring(maps.b, STAGES), ring(maps.c, 2 * STAGES), own, numbers(STAGES), ready, free,
        make_barriers(1, 1), make_barriers(1, 2),
    )  # fmt: skip
    outs = held
    if maps.out is not None:
        outs = ring(maps.out, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk, (0, maps, scan, rings, held, outs, scale, TURNED)),
            (_walk, (1, maps, scan, rings, held, outs, scale, TURNED)),
            (_fill, (maps, scan, rings)),
            (_sum_gates, (scan, rings)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
