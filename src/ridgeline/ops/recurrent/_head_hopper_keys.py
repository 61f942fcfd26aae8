"""The gradients of k and v of linear attention with a gate per head or none, in Gluon for Hopper: a sequence and head a
program, which goes through the chunks in reverse.

Its state R is the gradient of the state after a chunk. Two warpgroups have half of R's rows (k's columns) each, in
float32 registers, and half of the columns of dk and dv. dk needs a warpgroup's own rows of R alone, and dv all rows, so
both write them for products to shared memory. All tiles are halves of 64 columns.
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

from ridgeline.ops.recurrent._head_hopper_tiles import (
    EVERY,
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
    """Tensor maps of a chunk's rows, half of their columns."""

    q: Any
    k: Any
    v: Any
    do: Any
    dk: Any  # None where it is in float32
    dv: Any
    marks: Any  # quarters of the states that the pass for dq kept, or None


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
    meets: Any  # <state, R> by the rows of both, (heads' states, WIDE)
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
    marks: Any
    decays: Any
    ready: Any
    free: Any
    marks_ready: Any
    marks_free: Any
    held: Any  # R as products take it: rows by columns, halves of each
    written: Any
    read: Any


@gluon.jit
def _spots(states, scan, place, ME: gl.constexpr, h: gl.constexpr):
    LAYOUT: gl.constexpr = sums_layout(HALF)
    row = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    column = h * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    base = states + (place.n * scan.heads + place.h).to(gl.int64) * (WIDE * WIDE)
    return base + (row * WIDE + column)


@gluon.jit
def _twice(a, b, left, right, none, TURNED: gl.constexpr):
    """A product over 128 columns, begun: two tiles of each factor."""
    rights = flat(b.index(right)), flat(b.index(right + 1))
    if TURNED:
        rights = rights[0].permute((1, 0)), rights[1].permute((1, 0))
    found = warpgroup_mma(flat(a.index(left)), rights[0], none, use_acc=False, is_async=True)
    return warpgroup_mma(flat(a.index(left + 1)), rights[1], found, is_async=True)


@gluon.jit
def _meet(scan, rings, place, slot, turn, r0, r1, ME: gl.constexpr):
    """What a kept state and R have with each other, by their rows."""
    NARROW: gl.constexpr = sums_layout(HALF)
    mbarrier.wait(rings.marks_ready.index(0), turn & 1)
    both = flat(rings.marks.index(2 * ME)).load(NARROW).to(gl.float32) * r0
    both += flat(rings.marks.index(2 * ME + 1)).load(NARROW).to(gl.float32) * r1
    found = gl.sum(both, 1)
    barrier()
    mbarrier.arrive(rings.marks_free.index(0), count=1)
    row = gl.arange(0, HALF, gl.SliceLayout(1, NARROW))
    gl.store(scan.meets + (place.kept // EVERY + slot) * WIDE + (ME * HALF + row), found)


@gluon.jit
def _halves(outs, n: gl.constexpr):
    """A tile of `outs` for bfloat16."""
    tile = outs.index(n)
    return flat(tile._reinterpret(gl.bfloat16, tile.shape, tile.layout))


@gluon.jit
def _begin_around(pairs, scratch):
    """Brings a chunk's own pairs, keys by queries, to where a product with its earlier keys takes them: in bfloat16, as
    float16 has not its range. In float16 its second part follows."""
    tma.store_wait(0)
    first = pairs.to(gl.bfloat16)
    _halves(scratch, 0).store(first)
    if scratch.dtype == gl.float16:
        _halves(scratch, 2).store((pairs - first.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    barrier()


@gluon.jit
def _weights(scores, products, decays, stage, outs, GATE: gl.constexpr, AROUND: gl.constexpr):
    """The weights of keys (rows) with queries in dv and in dk, as left factors."""
    LAYOUT: gl.constexpr = scores.type.layout
    kind: gl.constexpr = outs.dtype
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    seen = j >= i
    scores = gl.where(seen, scores, 0.0)
    if GATE:
        apart = of_columns(decays, stage, SUMS, LAYOUT) - of_rows(decays, stage, SUMS, LAYOUT)
        decay = gl.exp2(gl.where(seen, apart, 0.0))
        scores *= decay
        if AROUND:
            _begin_around(scores * products, outs)
        products *= decay
    products = gl.where(seen, products, 0.0)
    left: gl.constexpr = operand_layout(LAYOUT)
    return gl.convert_layout(scores.to(kind), left), gl.convert_layout(products.to(kind), left)


@gluon.jit
def _around(outs, none):
    """Begins the product of what `_begin_around` brought: rows are gates, and columns queries."""
    LAYOUT: gl.constexpr = none.type.layout
    i, j = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    chosen = gl.convert_layout(gl.where(j < i, 1.0, 0.0).to(gl.bfloat16), operand_layout(LAYOUT))
    earlier = warpgroup_mma(chosen, _halves(outs, 0), none, use_acc=False, is_async=True)
    if outs.dtype == gl.float16:
        earlier = warpgroup_mma(chosen, _halves(outs, 2), earlier, is_async=True)
    return earlier


@gluon.jit
def _end_around(scan, place, chunk, earlier):
    """Keeps what a chunk's own pairs bring to each gate: those of an earlier key and this query or a later one."""
    LAYOUT: gl.constexpr = earlier.type.layout
    row = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    later = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :] >= row[:, None]
    gl.store(scan.own + (place.kept + chunk) * C + row, gl.sum(gl.where(later, earlier, 0.0), 1))


@gluon.jit
def _walk(ME: gl.constexpr, maps, scan, rings, outs, scale):
    """A warpgroup's halves. outs: where results leave shared memory, dk's halves and then dv's."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    GATE: gl.constexpr = scan.gate is not None
    place = place_of(scan)
    none = gl.zeros([C, C], gl.float32, NARROW)
    r0, r1 = none, none
    if scan.first is not None:
        r0 = gl.load(_spots(scan.first, scan, place, ME, 0)) / scale
        r1 = gl.load(_spots(scan.first, scan, place, ME, 1)) / scale
    row = gl.arange(0, C, gl.SliceLayout(1, NARROW))
    turn = 0 * place.count
    if maps.marks is not None:
        if place.count % EVERY == 0:
            _meet(scan, rings, place, place.count // EVERY, turn, r0, r1, ME)
            turn += 1
    for t in range(place.count):
        chunk = place.count - 1 - t
        stage, odd = t % STAGES, (t // STAGES) & 1
        two = 2 * stage
        low0, low1 = r0.to(kind), r1.to(kind)  # before products are in flight, which the assembler would wait for
        mbarrier.wait(rings.ready.index(stage), odd)
        if GATE:
            r0 *= of_rows(rings.decays, stage, WHOLE, NARROW)
            r1 *= of_rows(rings.decays, stage, WHOLE, NARROW)
        products = _twice(rings.v, rings.do, two, two, none, True)
        scores = _twice(rings.k, rings.q, two, two, none, True)
        mbarrier.wait(rings.read, (t & 1) ^ 1)
        flat(rings.held.index(2 * ME)).store(low0)
        flat(rings.held.index(2 * ME + 1)).store(low1)
        fence_async_shared()
        barrier()
        mbarrier.arrive(rings.written, count=1)
        if maps.marks is not None:
            if chunk % EVERY == 0:
                _meet(scan, rings, place, chunk // EVERY, turn, r0, r1, ME)
                turn += 1
        products, scores = warpgroup_mma_wait(0, deps=(products, scores))
        scores, products = _weights(scores, products, rings.decays, stage, outs, GATE, scan.own is not None and ME == 0)
        if ME == 0:  # noqa: SIM102
            if scan.own is not None:
                earlier = _around(outs, none)
        right = flat(rings.q.index(two + ME)).permute((1, 0)).load(NARROW)
        if GATE:
            right = (of_columns(rings.decays, stage, SINCE, NARROW) * right.to(gl.float32)).to(kind)
        right = gl.convert_layout(right, operand_layout(NARROW))
        next0 = warpgroup_mma(right, flat(rings.do.index(two)), r0, is_async=True)
        next1 = warpgroup_mma(right, flat(rings.do.index(two + 1)), r1, is_async=True)
        of_k = _twice(rings.v, rings.held, two, 2 * ME, none, True)
        if ME == 0:  # noqa: SIM102
            if scan.own is not None:
                earlier = warpgroup_mma_wait(4, deps=(earlier,))
                _end_around(scan, place, chunk, earlier)
        mbarrier.wait(rings.written, t & 1)
        of_v = warpgroup_mma(
            flat(rings.k.index(two)), flat(rings.held.index(ME)), none, use_acc=False, is_async=True
        )
        of_v = warpgroup_mma(flat(rings.k.index(two + 1)), flat(rings.held.index(2 + ME)), of_v, is_async=True)
        next0, next1, of_k = warpgroup_mma_wait(2, deps=(next0, next1, of_k))
        if GATE:
            of_k *= of_rows(rings.decays, stage, UNTIL, NARROW)
        if scan.sums is not None:
            mine = flat(rings.k.index(two + ME)).load(NARROW).to(gl.float32)
            gl.store(scan.sums + ME * scan.apart + (place.kept + chunk) * C + row, gl.sum(mine * of_k, 1))
        of_k = warpgroup_mma(products, flat(rings.q.index(two + ME)), of_k, is_async=True)
        r0, r1, of_v = warpgroup_mma_wait(1, deps=(next0, next1, of_v))
        barrier()
        mbarrier.arrive(rings.read, count=1)
        if GATE:
            of_v *= of_rows(rings.decays, stage, UNTIL, NARROW)
        of_v = warpgroup_mma(scores, flat(rings.do.index(two + ME)), of_v, is_async=True)
        of_k = warpgroup_mma_wait(1, deps=(of_k,))
        if maps.dk is None:
            put(scan.dk, scan, place, chunk, ME, scale * of_k)
        tma.store_wait(0)
        if maps.dk is not None:
            flat(outs.index(ME)).store((scale * of_k).to(kind))
        of_v = warpgroup_mma_wait(0, deps=(of_v,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        flat(outs.index(2 + ME)).store((scale * of_v).to(kind))
        fence_async_shared()
        barrier()
        spot = at(scan, place, place.h, chunk, ME * HALF)
        if maps.dk is not None:
            store(maps.dk, spot, outs.index(ME))
        store(maps.dv, spot, outs.index(2 + ME))
    if scan.last is not None:
        gl.store(_spots(scan.last, scan, place, ME, 0), scale * r0)
        gl.store(_spots(scan.last, scan, place, ME, 1), scale * r1)
    tma.store_wait(0)


@gluon.jit
def _bring_marks(maps, rings, place, slot, turn):
    mbarrier.wait(rings.marks_free.index(0), (turn & 1) ^ 1)
    ready = rings.marks_ready.index(0)
    mbarrier.expect(ready, 4 * maps.marks.block_type.nbytes)
    at_slot = (place.kept // EVERY + slot).to(gl.int32)
    for part in gl.static_range(4):
        load(maps.marks, [at_slot, part // 2 * HALF, part % 2 * HALF], ready, rings.marks.index(part))


@gluon.jit
def _fill(maps, scan, rings):
    """The warp that brings tiles."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    place = place_of(scan)
    of_k = place.h // scan.group
    turn = 0 * place.count
    if maps.marks is not None:
        if place.count % EVERY == 0:
            _bring_marks(maps, rings, place, place.count // EVERY, turn)
            turn += 1
    for t in range(place.count):
        chunk = place.count - 1 - t
        stage, odd = t % STAGES, (t // STAGES) & 1
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, 8 * maps.k.block_type.nbytes)
        for half in gl.static_range(2):
            spot = at(scan, place, place.h, chunk, half * HALF)
            load(maps.v, spot, ready, rings.v.index(2 * stage + half))
            load(maps.do, spot, ready, rings.do.index(2 * stage + half))
        for half in gl.static_range(2):
            spot = at(scan, place, of_k, chunk, half * HALF)
            load(maps.k, spot, ready, rings.k.index(2 * stage + half))
            load(maps.q, spot, ready, rings.q.index(2 * stage + half))
        if maps.marks is not None:
            if chunk % EVERY == 0:
                _bring_marks(maps, rings, place, chunk // EVERY, turn)
                turn += 1


@gluon.jit
def _sum_gates(scan, rings):
    if scan.gate is not None:
        fill_decays(scan, rings.decays, rings.ready, rings.free, True)


@gluon.jit(do_not_specialize=["scale"])
def walk_keys(scan, maps, scale, STAGES: gl.constexpr):
    """dk and dv of all chunks, in reverse, and what a gate's gradient needs of them."""
    q, k, v, do = ring(maps.q, 2 * STAGES), ring(maps.k, 2 * STAGES), ring(maps.v, 2 * STAGES), ring(maps.do, 2 * STAGES)
    held = ring(maps.k, 4)
    marks = held
    if maps.marks is not None:
        marks = ring(maps.marks, 4)
    ready, free = make_barriers(STAGES, 1 + (scan.gate is not None)), make_barriers(STAGES, 2)
    written, read = make_barriers(1, 2), make_barriers(1, 2)
    rings = KeyRings(
        q, k, v, do, marks, numbers(STAGES), ready, free, make_barriers(1, 1), make_barriers(1, 2), held,
        written.index(0), read.index(0),
    )  # fmt: skip
    outs = ring(maps.dv, 4)
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
