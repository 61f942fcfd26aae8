"""Backward of a gate per channel in Gluon for Hopper: two chains of a sequence and head, mild gates, bfloat16.

`mark_states` goes forward and writes the state before each chunk. `gradient_chains` goes backward with the state's
gradient and makes all gradients of a chunk while its rows are on the chip. A warpgroup has 64 channels: it needs no sum
over channels. Its rows are turned, so that a product leaves the next one's left side in registers. Another warpgroup
makes the weights of do with v and of k with q, and dv. Gradients leave from the places of the rows they belong to.
`own_gradients_at_once` in `triton/channels.py` has the same sums for dg.
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

from ridgeline.ops.recurrent.hopper.channel_chains import (
    HALF,
    LOG2E,
    SPAN,
    C,
    Spot,
    ones_tile,
    power,
    ring,
    rows_at,
    spot_of,
)
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import column_chunks, flat, operand_layout, sums_layout


class GradientMaps(NamedTuple):
    """Tensor maps of rows (B, heads, T, columns); q, k, g and their gradients 64 columns."""

    q: Any
    k: Any
    v: Any
    g: Any
    do: Any
    dq: Any
    dk: Any
    dv: Any
    dg: Any
    states: Any  # (all chunks * K, V): before chunks


class Backward(NamedTuple):
    left: Any  # (sequences, heads): 1 where the gates are too strong, written by the second kernel
    strong: Any  # the same of the first chunk, written before, and then by the first kernel of a part of the channels
    states: Any  # before chunks, (all chunks, K, V)
    first: Any  # (sequences, heads, K, V) in float32 or None: the state, or its gradient after the last token
    last: Any  # the gradient of the first state, or None
    bonus: Any  # (heads of k, K) or None
    of_bonus: Any  # its gradient's parts, (all chunks, K) in float32 and zeros, or None
    ends: Any  # cu_seqlens or None
    tokens: Any
    heads: Any
    group: Any
    chunks: Any  # room of a head


@gluon.jit
def _spot(chains, PARTS: gl.constexpr):
    """Where a program of `gradient_chains` is: each part of the channels has marked the chains with strong gates."""
    spot = spot_of(chains)
    count = spot.count
    if PARTS == 2:
        strong = gl.load(chains.strong + (gl.num_programs(0) + gl.program_id(0)))
        count = gl.where(strong != 0, -1, count)
    return Spot(spot.n, spot.h, spot.start, spot.tokens, count)


@gluon.jit
def _room(chains, spot):
    """Where a chain's chunks are kept."""
    if chains.ends is None:
        return gl.program_id(0) * chains.chunks
    else:
        return spot.h * chains.chunks + spot.start // C + spot.n


@gluon.jit
def _places(WIDTH: gl.constexpr, V: gl.constexpr):
    """Where a warpgroup's rows of a state lie, from their first number on."""
    LAYOUT: gl.constexpr = sums_layout(WIDTH)
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    return row * V + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _state_at(state, ME: gl.constexpr, PART: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    first = gl.program_id(0).to(gl.int64) * (K * V) + (ME * HALF * V + PART * WIDTH)
    return state + first + _places(WIDTH, V)


@gluon.jit
def _first_state(chains, ME: gl.constexpr, PART: gl.constexpr, WIDTH: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    state = gl.zeros([HALF, WIDTH], gl.float32, sums_layout(WIDTH))
    if chains.first is not None:
        state = gl.load(_state_at(chains.first, ME, PART, WIDTH, K, V))
    return state


@gluon.jit
def _mask(kind: gl.constexpr, WHICH: gl.constexpr):
    """A tile of zeros, ones and signs by which products sum over a chunk's rows x what counts for a gate y. 0: earlier
    rows and its own; 1: earlier ones; 2 and 3: RWKV-6's signs of pairs that end, or begin, at x; 4: later rows and its
    own."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None]
    y = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    early = y < C // 2
    if WHICH == 0:
        made = gl.where(x <= y, 1.0, 0.0)
    elif WHICH == 1:
        made = gl.where(x < y, 1.0, 0.0)
    elif WHICH == 2:
        made = gl.where(early, gl.where(y >= x, -1.0, 0.0), gl.where(y < x, 1.0, 0.0))
    elif WHICH == 3:
        made = gl.where(early, gl.where(y > x, 1.0, 0.0), gl.where(y <= x, -1.0, 0.0))
    else:
        made = gl.where(x >= y, 1.0, 0.0)
    tile = gl.allocate_shared_memory(kind, [C, C], gl.NVMMASharedLayout(128, 16, 2))
    tile.store(made.to(kind))
    return tile


class MarkRings(NamedTuple):
    k: Any  # halves
    v: Any
    g: Any  # halves
    upto: Any
    ones: Any
    ready: Any
    free: Any


@gluon.jit
def _mark(ME: gl.constexpr, maps, chains, rings, PARTS: gl.constexpr):
    STAGES: gl.constexpr = rings.v.type.shape[0]
    V: gl.constexpr = maps.v.block_type.shape[-1]
    kind: gl.constexpr = maps.k.dtype
    NARROW: gl.constexpr = sums_layout(C)
    WIDE: gl.constexpr = sums_layout(V)
    THIN: gl.constexpr = sums_layout(8)
    spot = spot_of(chains)
    narrow, thin = gl.zeros([HALF, C], gl.float32, NARROW), gl.zeros([HALF, 8], gl.float32, THIN)
    state = _first_state(chains, ME, 0, V, PARTS * HALF, V)
    places = _places(V, V)
    mark = chains.states + (_room(chains, spot).to(gl.int64) * PARTS + ME) * (HALF * V)
    strong = gl.zeros([HALF], gl.int32, gl.SliceLayout(1, THIN))
    for t in range(spot.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        gl.store(mark + places, state.to(kind))  # leaves by itself: through the copy engine it would be waited for
        mark += PARTS * HALF * V
        mbarrier.wait(rings.ready.index(stage), odd)
        tg = flat(rings.g.index(PARTS * stage + ME)).permute((1, 0))
        since = warpgroup_mma(tg, rings.upto, narrow, use_acc=False, is_async=True)
        total = warpgroup_mma(tg, rings.ones.permute((1, 0)), thin, use_acc=False, is_async=True)
        theirs = flat(rings.k.index(PARTS * stage + ME)).permute((1, 0)).load(NARROW).to(gl.float32)
        since, total = warpgroup_mma_wait(0, deps=(since, total))
        total = gl.max(total, 1) * LOG2E  # the columns are the same
        strong = gl.where(total >= -SPAN, strong, 1)  # a NaN is strong
        theirs = gl.convert_layout((theirs * power(since * -LOG2E)).to(kind), operand_layout(WIDE))
        pending = warpgroup_mma(theirs, flat(rings.v.index(stage)), state, is_async=True)
        whole = gl.convert_layout(power(total), gl.SliceLayout(1, WIDE))[:, None]
        state = warpgroup_mma_wait(0, deps=(pending,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        state *= whole
    found = gl.where(spot.count < 0, 1, gl.max(strong, 0))
    gl.store(chains.left + (ME * gl.num_programs(0) + gl.program_id(0)), found)


@gluon.jit
def _fill_marks(maps, chains, rings, PARTS: gl.constexpr):
    """The warp that brings tiles."""
    STAGES: gl.constexpr = rings.v.type.shape[0]
    spot = spot_of(chains)
    of_k = spot.h // chains.group
    SIZE: gl.constexpr = 2 * PARTS * maps.k.block_type.nbytes + maps.v.block_type.nbytes
    for t in range(spot.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE)
        for part in gl.static_range(PARTS):
            load(maps.g, rows_at(chains, spot, of_k, t, part * HALF), ready, rings.g.index(PARTS * stage + part))
            load(maps.k, rows_at(chains, spot, of_k, t, part * HALF), ready, rings.k.index(PARTS * stage + part))
        load(maps.v, rows_at(chains, spot, spot.h, t, 0), ready, rings.v.index(stage))


@gluon.jit
def mark_states(chains, maps, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Writes the states before all chunks, and marks the chains with strong gates."""
    kind: gl.constexpr = maps.k.dtype
    k, v, g = ring(maps.k, PARTS * STAGES), ring(maps.v, STAGES), ring(maps.g, PARTS * STAGES)
    ready, free = make_barriers(STAGES, 1), make_barriers(STAGES, PARTS)
    rings = MarkRings(k, v, g, _mask(kind, 0), ones_tile(kind), ready, free)
    fence_async_shared()
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_mark, (0, maps, chains, rings, PARTS)),
                (_mark, (1, maps, chains, rings, PARTS)),
                (_fill_marks, (maps, chains, rings, PARTS)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_mark, (0, maps, chains, rings, PARTS)),
                (_fill_marks, (maps, chains, rings, PARTS)),
            ],
            [1],
            [24],
        )


class Rings(NamedTuple):
    """All tiles have 64 rows and columns."""

    q: Any
    k: Any
    v: Any
    g: Any
    do: Any
    dq: Any
    state: Any  # the one before the chunk, and then the decayed gradient of the one after it
    weights: Any  # of do with v
    own: Any  # RWKV-6: a row's pair with itself, by u and by do and v
    lower: Any  # masks
    upto: Any
    before: Any
    endings: Any
    begins: Any
    ones: Any
    ready: Any  # rows
    loaded: Any  # the state
    weighed: Any  # the weights are
    given: Any  # rows with decays are
    turned: Any  # the state's gradient is
    seen: Any  # v and the state's gradient have been used
    used: Any  # the weights have been used
    done: Any  # rows with decays and the state's gradient have been used
    free: Any


@gluon.jit
def upper_half(x):
    """Without the bits that bfloat16 does not hold. A rounding conversion and its inverse cost four times as much."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0xffff0000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sum_parts(x, tile, dg, MORE: gl.constexpr):
    """Sums in two bfloat16 parts; with MORE added to dg."""
    LAYOUT: gl.constexpr = operand_layout(x.type.layout)
    kind: gl.constexpr = tile.dtype
    high = upper_half(x)
    low = gl.convert_layout((x - high).to(kind), LAYOUT)
    high = gl.convert_layout(high.to(kind), LAYOUT)
    dg = warpgroup_mma(low, tile, dg, use_acc=MORE, is_async=True)
    dg = warpgroup_mma(high, tile, dg, is_async=True)
    return warpgroup_mma_wait(0, deps=(dg,))


@gluon.jit
def _halvings(tg, tile, narrow):
    found = warpgroup_mma(tg, tile, narrow, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(found,)) * LOG2E


@gluon.jit
def _whole_decay(tg, rings, LAYOUT: gl.constexpr):
    """The chunk's decay, a number for each channel."""
    thin = gl.zeros([HALF, 8], gl.float32, sums_layout(8))
    total = warpgroup_mma(tg, rings.ones.permute((1, 0)), thin, use_acc=False, is_async=True)
    total = warpgroup_mma_wait(0, deps=(total,))
    return gl.convert_layout(power(gl.max(total, 1) * LOG2E), gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _decay_rows(tq, tk, tg, rings, scale, narrow, SHIFT: gl.constexpr):
    """Gives q and k their decays, in place."""
    LAYOUT: gl.constexpr = narrow.type.layout
    kind: gl.constexpr = tq.dtype
    until = _halvings(tg, rings.upto, narrow)
    since = until
    if SHIFT:
        since = _halvings(tg, rings.before, narrow)
    tq.store((tq.load(LAYOUT).to(gl.float32) * (scale * power(since))).to(kind))
    tk.store((tk.load(LAYOUT).to(gl.float32) * power(-until)).to(kind))


@gluon.jit
def _pairs_of_gates(tq, tk, rings, narrow, SHIFT: gl.constexpr):
    """Of the chunk's own pairs those that lie on both sides of a gate, as the differences that
    `_gradients_at_once` in `triton/channels.py` describes."""
    LAYOUT: gl.constexpr = narrow.type.layout
    tw = flat(rings.weights)
    y = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    pair = warpgroup_mma(tk, tw.permute((1, 0)), narrow, use_acc=False, is_async=True)
    pair = warpgroup_mma_wait(0, deps=(pair,))
    found = tq.load(LAYOUT).to(gl.float32) * pair
    pair = warpgroup_mma(tq, tw, narrow, use_acc=False, is_async=True)
    pair = warpgroup_mma_wait(0, deps=(pair,))
    if SHIFT:
        dg = _sum_parts(found, rings.endings, narrow, False)
        dg = _sum_parts(tk.load(LAYOUT).to(gl.float32) * pair, rings.begins, dg, True)
    else:  # a sum of all in the first half leaves the pairs that end or begin before
        found -= tk.load(LAYOUT).to(gl.float32) * pair
        dg = _sum_parts(found, rings.lower, narrow, False)
        dg -= gl.where(y < C // 2, gl.sum(gl.where(y == 0, dg, 0.0), 1)[:, None], 0.0)
    return dg


@gluon.jit
def _store_decayed(to, found, tg, tile, FACTOR: gl.constexpr, scale):
    """Stores what a row has, times its decay, or the inverse, by halves of the rows."""
    NARROW: gl.constexpr = sums_layout(C // 2)
    narrow = gl.zeros([HALF, C // 2], gl.float32, NARROW)
    parts = column_chunks(found, 2)
    for part in gl.static_range(2):
        rows = tile.slice(part * (C // 2), C // 2, 0).permute((1, 0))
        since = warpgroup_mma(tg, rows, narrow, use_acc=False, is_async=True)
        since = warpgroup_mma_wait(0, deps=(since,))
        x = gl.convert_layout(parts[part], NARROW) * (scale * power(since * FACTOR))
        to.slice(part * (C // 2), C // 2, 1).store(x.to(to.dtype))


@gluon.jit
def _turned(rings, stage, which: gl.constexpr, ME: gl.constexpr, PARTS: gl.constexpr, narrow):
    """The state, or its gradient, times do or v."""
    rows = rings.do if which == 0 else rings.v
    found = narrow
    for part in gl.static_range(PARTS):
        left = flat(rings.state.index(PARTS * ME + part))
        right = flat(rows.index(PARTS * stage + part)).permute((1, 0))
        found = warpgroup_mma(left, right, found, use_acc=part > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=(found,))


@gluon.jit
def _turn(tile, state, whole):
    """Decays the state's gradient, and leaves it in place of the state. Returns the sums of their products, too."""
    LAYOUT: gl.constexpr = state.type.layout
    state *= whole
    held = gl.sum(tile.load(LAYOUT).to(gl.float32) * state, 1)
    tile.store(state.to(tile.dtype))
    return state, held


@gluon.jit
def _publish():
    """Products and copies see what all of the warps have stored."""
    fence_async_shared()
    barrier()


@gluon.jit
def _add_product(a, b, found):
    found = warpgroup_mma(a, b, found, is_async=True)
    return warpgroup_mma_wait(0, deps=(found,))


@gluon.jit
def _of_reads(tq, tk, strict, weights, found, dg):
    """The state times do, `found`: adds q's part of it to the gates' sums, and the chunk's own keys to it."""
    LAYOUT: gl.constexpr = found.type.layout
    x = gl.convert_layout((tq.load(LAYOUT).to(gl.float32) * found).to(tq.dtype), operand_layout(LAYOUT))
    dg = _add_product(x, strict.permute((1, 0)), dg)
    return _add_product(tk, weights.permute((1, 0)), found), dg


@gluon.jit
def _of_writes(tq, tk, strict, weights, seen, found, dg, SHIFT: gl.constexpr):
    """The same for the state's gradient times v, with k, and the chunk's own queries."""
    LAYOUT: gl.constexpr = found.type.layout
    x = (tk.load(LAYOUT).to(gl.float32) * found).to(tk.dtype)
    dg = warpgroup_mma(gl.convert_layout(x, operand_layout(LAYOUT)), strict, dg, is_async=True)
    barrier()
    mbarrier.arrive(seen.index(0), count=1)
    dg = warpgroup_mma_wait(0, deps=(dg,))
    if not SHIFT:
        dg -= x.to(gl.float32)  # its own pairs do not cross a gate
    return _add_product(tq, weights, found), dg


@gluon.jit
def _store_rows(to, found, tg, tile, FACTOR: gl.constexpr, scale, SHIFT: gl.constexpr):
    if SHIFT:
        to.store(found.to(to.dtype))
    else:
        _store_decayed(to, found, tg, tile, FACTOR, scale)


@gluon.jit
def _gradients(ME: gl.constexpr, maps, chains, rings, scale, PARTS: gl.constexpr):
    """A warpgroup's channels: dq, dk and dg, and the state's gradient."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    K: gl.constexpr = PARTS * HALF
    kind: gl.constexpr = maps.k.dtype
    SHIFT: gl.constexpr = chains.bonus is not None
    NARROW: gl.constexpr = sums_layout(C)
    spot = _spot(chains, PARTS)
    narrow = gl.zeros([HALF, C], gl.float32, NARROW)
    state = _first_state(chains, ME, 0, HALF, K, K)
    if PARTS == 2:
        other = _first_state(chains, ME, 1, HALF, K, K)
    tw, tdq = flat(rings.weights), rings.dq.index(ME)
    strict = rings.before if SHIFT else rings.upto
    if SHIFT:
        depth = gl.arange(0, HALF, gl.SliceLayout(1, NARROW))
        u = gl.load(chains.bonus + spot.h // chains.group * HALF + depth).to(gl.float32)[:, None]
        of_bonus = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, NARROW))
    for step in range(spot.count):
        at = rows_at(chains, spot, spot.h, spot.count - 1 - step, ME * HALF)
        stage, odd = step % STAGES, (step // STAGES) & 1
        part = PARTS * stage + ME
        mbarrier.wait(rings.ready.index(stage), odd)
        tq, tk, tg = flat(rings.q.index(part)), flat(rings.k.index(part)), flat(rings.g.index(part))
        tq, tk, tg = tq.permute((1, 0)), tk.permute((1, 0)), tg.permute((1, 0))
        tma.store_wait(0)  # the chunk before has left
        barrier()
        mbarrier.arrive(rings.free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        whole = _whole_decay(tg, rings, NARROW)
        if SHIFT:
            of_q, of_k = tq.load(NARROW), tk.load(NARROW)
            rings.own.index(0).store(scale * gl.sum(of_q.to(gl.float32) * of_k.to(gl.float32) * u, 0))
        _decay_rows(tq, tk, tg, rings, scale, narrow, SHIFT)
        _publish()
        mbarrier.arrive(rings.given.index(0), count=1)
        mbarrier.wait(rings.weighed.index(0), step & 1)
        dg = _pairs_of_gates(tq, tk, rings, narrow, SHIFT)
        mbarrier.wait(rings.loaded.index(0), step & 1)
        found = _turned(rings, stage, 0, ME, PARTS, narrow)
        state, held = _turn(flat(rings.state.index(PARTS * ME)), state, whole)
        if PARTS == 2:
            other, more = _turn(flat(rings.state.index(PARTS * ME + 1)), other, whole)
            held += more
        dg += gl.convert_layout(held, gl.SliceLayout(1, NARROW))[:, None]  # now: later it would hold the state's tile
        _publish()
        mbarrier.arrive(rings.turned.index(0), count=1)
        found, dg = _of_reads(tq, tk, strict, tw, found, dg)
        if SHIFT:
            found *= scale * power(_halvings(tg, strict, narrow))
            both = rings.own.index(1).load(gl.SliceLayout(0, NARROW))[None, :]
            found += both * u * of_k.to(gl.float32)
            of_bonus += gl.sum(both * of_q.to(gl.float32) * of_k.to(gl.float32), 1)
        _store_rows(flat(tdq).permute((1, 0)), found, tg, rings.lower, LOG2E, scale, SHIFT)
        _publish()
        store(maps.dq, at, tdq)
        found = _turned(rings, stage, 1, ME, PARTS, narrow)
        found, dg = _of_writes(tq, tk, strict, tw, rings.seen, found, dg, SHIFT)
        if SHIFT:
            found *= power(-_halvings(tg, rings.upto, narrow))
            found += both * u * of_q.to(gl.float32)
        state = _add_product(tq, flat(rings.do.index(PARTS * stage)), state)
        if PARTS == 2:
            other = _add_product(tq, flat(rings.do.index(PARTS * stage + 1)), other)
        barrier()
        mbarrier.arrive(rings.used.index(0), count=1)
        mbarrier.wait(rings.done.index(0), step & 1)
        _store_rows(tk, found, tg, rings.lower, -LOG2E, 1.0, SHIFT)
        tg.store(dg.to(kind))
        _publish()
        store(maps.dk, at, rings.k.index(part))
        store(maps.dg, at, rings.g.index(part))
    if spot.count >= 0:
        if chains.last is not None:
            gl.store(_state_at(chains.last, ME, 0, HALF, K, K), state)
            if PARTS == 2:
                gl.store(_state_at(chains.last, ME, 1, HALF, K, K), other)
        if SHIFT:  # noqa: SIM102  # decided at compile time
            if spot.count > 0:
                gl.store(chains.of_bonus + (_room(chains, spot) * HALF + depth), of_bonus)
    tma.store_wait(0)


@gluon.jit
def _meet(maps, chains, rings, scale, PARTS: gl.constexpr):
    """The warpgroup that makes the weights and dv."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    kind: gl.constexpr = maps.k.dtype
    SHIFT: gl.constexpr = chains.bonus is not None
    NARROW: gl.constexpr = sums_layout(C)
    spot = _spot(chains, PARTS)
    x = gl.arange(0, C, gl.SliceLayout(1, NARROW))[:, None]
    y = gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
    narrow = gl.zeros([C, C], gl.float32, NARROW)
    for step in range(spot.count):
        stage, odd = step % STAGES, (step // STAGES) & 1
        base = PARTS * stage
        mbarrier.wait(rings.ready.index(stage), odd)
        found = narrow
        for part in gl.static_range(PARTS):
            tv, tdo = flat(rings.v.index(base + part)), flat(rings.do.index(base + part))
            found = warpgroup_mma(tdo, tv.permute((1, 0)), found, use_acc=part > 0, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        mbarrier.wait(rings.used.index(0), (step - 1) & 1, pred=step > 0)
        if SHIFT:
            rings.own.index(1).store(scale * gl.sum(gl.where(x == y, found, 0.0), 1))
            found = gl.where(x > y, found, 0.0)
        else:
            found = gl.where(x >= y, found, 0.0)
        flat(rings.weights).store(found.to(kind))
        fence_async_shared()
        tma.store_wait(0)  # the chunk before has left
        barrier()
        mbarrier.arrive(rings.weighed.index(0), count=1)
        mbarrier.arrive(rings.free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        mbarrier.wait(rings.given.index(0), step & 1)
        found = narrow
        for part in gl.static_range(PARTS):
            tq, tk = flat(rings.q.index(base + part)), flat(rings.k.index(base + part))
            found = warpgroup_mma(tk, tq.permute((1, 0)), found, use_acc=part > 0, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        if SHIFT:
            own = rings.own.index(0).load(gl.SliceLayout(1, NARROW))[:, None]
            found = gl.where(x < y, found, gl.where(x == y, own, 0.0))
        else:
            found = gl.where(x <= y, found, 0.0)
        pairs = gl.convert_layout(found.to(kind), operand_layout(NARROW))
        mbarrier.wait(rings.turned.index(0), step & 1)
        for width in gl.static_range(PARTS):
            dv = warpgroup_mma(pairs, flat(rings.do.index(base + width)), narrow, use_acc=False, is_async=True)
            for part in gl.static_range(PARTS):
                tk, tstate = flat(rings.k.index(base + part)), flat(rings.state.index(PARTS * part + width))
                dv = warpgroup_mma(tk, tstate, dv, is_async=True)
            dv = warpgroup_mma_wait(0, deps=(dv,))
            if width == PARTS - 1:
                barrier()
                mbarrier.arrive(rings.done.index(0), count=1)
            if width == 0:
                mbarrier.wait(rings.seen.index(0), step & 1)
            flat(rings.v.index(base + width)).store(dv.to(kind))
        fence_async_shared()
        barrier()
        for width in gl.static_range(PARTS):
            at = rows_at(chains, spot, spot.h, spot.count - 1 - step, width * HALF)
            store(maps.dv, at, rings.v.index(base + width))
    gl.store(chains.left + gl.program_id(0), gl.where(spot.count < 0, 1, 0))
    tma.store_wait(0)


@gluon.jit
def _bring(maps, chains, spot, rings, step, PARTS: gl.constexpr):
    """A chunk's rows."""
    STAGES: gl.constexpr = rings.ready.type.shape[0]
    stage, odd = step % STAGES, (step // STAGES) & 1
    mbarrier.wait(rings.free.index(stage), odd ^ 1)
    ready = rings.ready.index(stage)
    mbarrier.expect(ready, 5 * PARTS * maps.k.block_type.nbytes)
    t, of_k = spot.count - 1 - step, spot.h // chains.group
    for part in gl.static_range(PARTS):
        at = rows_at(chains, spot, of_k, t, part * HALF)
        load(maps.g, at, ready, rings.g.index(PARTS * stage + part))
        load(maps.q, at, ready, rings.q.index(PARTS * stage + part))
        load(maps.k, at, ready, rings.k.index(PARTS * stage + part))
        at = rows_at(chains, spot, spot.h, t, part * HALF)
        load(maps.v, at, ready, rings.v.index(PARTS * stage + part))
        load(maps.do, at, ready, rings.do.index(PARTS * stage + part))


@gluon.jit
def _fill(maps, chains, rings, PARTS: gl.constexpr):
    """The warp that brings tiles."""
    spot = _spot(chains, PARTS)
    room = _room(chains, spot)
    if spot.count > 0:
        _bring(maps, chains, spot, rings, 0, PARTS)
    for step in range(spot.count):
        mbarrier.wait(rings.seen.index(0), (step - 1) & 1, pred=step > 0)
        mbarrier.wait(rings.done.index(0), (step - 1) & 1, pred=step > 0)
        mbarrier.expect(rings.loaded.index(0), PARTS * PARTS * maps.states.block_type.nbytes)
        row = (room + spot.count - 1 - step) * (PARTS * HALF)
        for part in gl.static_range(PARTS):
            for width in gl.static_range(PARTS):
                at = [row + part * HALF, width * HALF]
                load(maps.states, at, rings.loaded.index(0), rings.state.index(PARTS * part + width))
        if step + 1 < spot.count:
            _bring(maps, chains, spot, rings, step + 1, PARTS)


@gluon.jit(do_not_specialize=["scale"])
def gradient_chains(chains, maps, scale, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The gradients of all chunks, and that of the first state."""
    kind: gl.constexpr = maps.k.dtype
    SHIFT: gl.constexpr = chains.bonus is not None
    q, k, g = ring(maps.q, PARTS * STAGES), ring(maps.k, PARTS * STAGES), ring(maps.g, PARTS * STAGES)
    v, do = ring(maps.v, PARTS * STAGES), ring(maps.do, PARTS * STAGES)
    dq, state = ring(maps.dq, PARTS), ring(maps.states, PARTS * PARTS)
    weights = gl.allocate_shared_memory(kind, [C, C], gl.NVMMASharedLayout(128, 16, 2))
    lower = _mask(kind, 4)
    upto = lower.permute((1, 0))
    own, before, endings, begins = upto, upto, upto, upto
    if SHIFT:
        own = gl.allocate_shared_memory(gl.float32, [2, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        before, endings, begins = _mask(kind, 1), _mask(kind, 2), _mask(kind, 3)
    rings = Rings(
        q, k, v, g, do, dq, state, weights, own, lower, upto, before, endings, begins, ones_tile(kind),
        make_barriers(STAGES, 1), make_barriers(1, 1), make_barriers(1, 1), make_barriers(1, PARTS),
        make_barriers(1, PARTS), make_barriers(1, PARTS), make_barriers(1, PARTS), make_barriers(1, 1),
        make_barriers(STAGES, PARTS + 1),
    )  # fmt: skip
    fence_async_shared()
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_gradients, (0, maps, chains, rings, scale, PARTS)),
                (_gradients, (1, maps, chains, rings, scale, PARTS)),
                (_meet, (maps, chains, rings, scale, PARTS)),
                (_fill, (maps, chains, rings, PARTS)),
            ],
            [4, 4, 1],
            [200, 88, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_gradients, (0, maps, chains, rings, scale, PARTS)),
                (_meet, (maps, chains, rings, scale, PARTS)),
                (_fill, (maps, chains, rings, PARTS)),
            ],
            [4, 1],
            [232, 24],
        )
