"""Chunks of all heads that share q and k, in Gluon for Hopper: outputs, and the gradient of q that states bring.

A program takes a chunk of 128 rows and goes through heads. What they share, q, k and their products, is brought and
made once; what they add up to stays in registers. A warp brings each head's tiles by TMA, some heads ahead, and two
warpgroups take a block of 64 rows each.
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

from ridgeline.ops.recurrent.hopper.delta_chains import coordinates, room_of, sequence_at
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout

ROWS = gl.constexpr(128)  # of a chunk
HALF = gl.constexpr(64)  # of a block
K = gl.constexpr(128)  # columns of q and k
V = gl.constexpr(64)
# Rows of `HeadMaps.numbers` in blocks of 64: see `write_numbers`.
SUMS = gl.constexpr(0)
EDGE = gl.constexpr(2)
UNTIL = gl.constexpr(4)
STEP = gl.constexpr(6)
# Numbers of `RowGrads.rows`.
QUERY = gl.constexpr(0)
PAST = gl.constexpr(1)
KEY = gl.constexpr(2)
LATER = gl.constexpr(3)
EARLIER = gl.constexpr(4)
ACROSS = gl.constexpr(5)
OF_STEP = gl.constexpr(6)
OF_SKIP = gl.constexpr(7)


class HeadMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns), states (B, heads, chunks, K, V), numbers (B, heads, chunks, 4, 128)."""

    q: Any
    k: Any
    v: Any
    do: Any
    before: Any  # states before chunks
    after: Any  # gradients of states after chunks
    numbers: Any
    out: Any  # o or dv


class HeadJob(NamedTuple):
    numbers: Any  # as in the map; unread here
    skip: Any  # D or None
    ends: Any  # cu_seqlens or None
    sequences: Any
    tokens: Any
    heads: Any  # of v
    chunks: Any  # room of a head
    share: Any  # heads that share one of q
    span: Any  # heads of a program
    parts: Any  # programs for the heads that share one


class RowGrads(NamedTuple):
    own: Any  # q's from the chunk's own pairs, (B, T, q's heads * parts, K) in float32
    q: Any  # as these, in the data's dtype where there is one part
    k: Any
    rows: Any  # numbers of each row, (8, B, heads, chunks, rows) in float32
    stride: Any


class Place(NamedTuple):
    """Where a program is."""

    batch: Any
    n: Any  # its sequence
    of: Any  # q's head
    part: Any  # of all parts of q's heads
    head: Any  # its first head
    count: Any  # heads
    start: Any  # the sequence's first token
    tokens: Any
    first: Any  # the chunk's first row
    kept: Any  # the chunk's place among a head's


@gluon.jit
def place_of(job):
    kept, pair = gl.program_id(0), gl.program_id(1)
    part, pair = pair % job.parts, pair // job.parts
    own = job.heads // job.share
    batch, of = pair // own, pair % own
    n, start, tokens, first = batch, 0 * batch, 0 * batch + job.tokens, kept * ROWS
    if job.ends is not None:
        n = sequence_at(job.ends, job.sequences, kept, ROWS)
        start = gl.load(job.ends + n).to(gl.int32)
        tokens = gl.load(job.ends + n + 1).to(gl.int32) - start
        first = (kept - room_of(job.ends, n, ROWS).to(gl.int32)) * ROWS
    head = of * job.share + part * job.span
    count = gl.where(first < tokens, gl.minimum(job.span, job.share - part * job.span), 0)
    return Place(batch, n, of, of * job.parts + part, head, count, start, tokens, first, kept)


@gluon.jit
def rows_at(job, place, head, block: gl.constexpr):
    return coordinates(job.ends, place.n, place.start, place.tokens, head, place.first + block * HALF, 0)


class Rings(NamedTuple):
    v: Any  # blocks
    do: Any
    before: Any
    after: Any
    numbers: Any
    q: Any  # both blocks of the chunk
    k: Any
    ready: Any
    free: Any
    begun: Any  # q and k are there
    made: Any  # q has been read


@gluon.jit
def ring(source, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit
def numbers_of(rings, stage, row: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each row of a block."""
    tile = rings.numbers.index(stage)._reinterpret(gl.float32, [8, HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return tile.index(row).load(LAYOUT)


@gluon.jit
def power(x):
    """2^x, in one instruction."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def bring(maps, job, rings, AGAIN: gl.constexpr):
    """The warp that brings tiles. AGAIN: q lies where the heads' rows come, so it comes before and after them."""
    STAGES: gl.constexpr = rings.numbers.type.shape[0]
    place = place_of(job)
    begun = rings.begun.index(0)
    SHARED: gl.constexpr = 2 * maps.q.block_type.nbytes + (2 * maps.k.block_type.nbytes if maps.k is not None else 0)
    mbarrier.expect(begun, SHARED)
    for block in gl.static_range(2):
        load(maps.q, rows_at(job, place, place.of, block), begun, rings.q.index(block))
        if maps.k is not None:
            load(maps.k, rows_at(job, place, place.of, block), begun, rings.k.index(block))
    if AGAIN:
        mbarrier.wait(rings.made.index(0), 0)
    SIZE: gl.constexpr = (
        (2 * maps.v.block_type.nbytes if maps.v is not None else 0)
        + (2 * maps.do.block_type.nbytes if maps.do is not None else 0)
        + (maps.before.block_type.nbytes if maps.before is not None else 0)
        + (maps.after.block_type.nbytes if maps.after is not None else 0)
        + maps.numbers.block_type.nbytes
    )
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        head = place.head + t
        mbarrier.wait(rings.free.index(stage), odd ^ 1)
        ready = rings.ready.index(stage)
        mbarrier.expect(ready, SIZE)
        load(maps.numbers, [place.batch, head, place.kept, 0, 0], ready, rings.numbers.index(stage))
        if maps.v is not None:
            load(maps.v, rows_at(job, place, head, 0), ready, rings.v.index(2 * stage))
            load(maps.v, rows_at(job, place, head, 1), ready, rings.v.index(2 * stage + 1))
        if maps.do is not None:
            load(maps.do, rows_at(job, place, head, 0), ready, rings.do.index(2 * stage))
            load(maps.do, rows_at(job, place, head, 1), ready, rings.do.index(2 * stage + 1))
        if maps.before is not None:
            load(maps.before, [place.batch, head, place.kept, 0, 0], ready, rings.before.index(stage))
        if maps.after is not None:
            load(maps.after, [place.batch, head, place.kept, 0, 0], ready, rings.after.index(stage))
    if AGAIN:
        mbarrier.wait(rings.made.index(0), 1)
        mbarrier.expect(begun, 2 * maps.q.block_type.nbytes)
        for block in gl.static_range(2):
            load(maps.q, rows_at(job, place, place.of, block), begun, rings.q.index(block))


@gluon.jit
def put_out(maps, job, place, head, found, tile, ME: gl.constexpr):
    """A block's rows leave through shared memory."""
    tma.store_wait(0)
    flat(tile).store(found.to(maps.out.dtype))
    fence_async_shared()
    store(maps.out, rows_at(job, place, head, ME), tile)


@gluon.jit
def _outputs(ME: gl.constexpr, maps, job, rings, outs, scale):
    """A block's outputs of all heads. ME: the block."""
    STAGES: gl.constexpr = rings.numbers.type.shape[0]
    kind: gl.constexpr = maps.v.dtype
    LAYOUT: gl.constexpr = sums_layout(HALF)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    place = place_of(job)
    seen = gl.arange(0, HALF, BY_ROW)[:, None] >= gl.arange(0, HALF, BY_COLUMN)[None, :]
    none = gl.zeros([HALF, HALF], gl.float32, LAYOUT)
    mbarrier.wait(rings.begun.index(0), 0)
    tq = flat(rings.q.index(ME))
    own = warpgroup_mma(tq, flat(rings.k.index(ME)).permute((1, 0)), none, use_acc=False, is_async=True)
    own = gl.where(seen, scale * warpgroup_mma_wait(0, deps=(own,)), 0.0)
    far = none
    if ME == 1:
        far = warpgroup_mma(tq, flat(rings.k.index(0)).permute((1, 0)), none, use_acc=False, is_async=True)
        far = scale * warpgroup_mma_wait(0, deps=(far,))
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        head = place.head + t
        mbarrier.wait(rings.ready.index(stage), odd)
        pending = warpgroup_mma(tq, flat(rings.before.index(stage)), none, use_acc=False, is_async=True)
        sums = numbers_of(rings, stage, SUMS + ME, BY_ROW)
        apart = sums[:, None] - numbers_of(rings, stage, SUMS + ME, BY_COLUMN)[None, :]
        steps = numbers_of(rings, stage, STEP + ME, BY_COLUMN)[None, :]
        weights = own * (power(gl.minimum(apart, 0.0)) * steps)
        left = gl.convert_layout(weights.to(kind), operand_layout(LAYOUT))
        since = power(sums)
        if ME == 1:
            edge = numbers_of(rings, stage, EDGE, BY_COLUMN) * numbers_of(rings, stage, STEP, BY_COLUMN)
            weights = far * (since[:, None] * edge[None, :])
            more = gl.convert_layout(weights.to(kind), operand_layout(LAYOUT))
            since = numbers_of(rings, stage, EDGE + 1, BY_ROW)
        found = warpgroup_mma_wait(0, deps=(pending,))
        found *= (scale * since)[:, None]
        tv = flat(rings.v.index(2 * stage + ME))
        found = warpgroup_mma(left, tv, found, is_async=True)
        if ME == 1:
            found = warpgroup_mma(more, flat(rings.v.index(2 * stage)), found, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        if job.skip is not None:
            found += gl.load(job.skip + head) * tv.load(LAYOUT).to(gl.float32)
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        put_out(maps, job, place, head, found, outs.index(ME), ME)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale"])
def shared_outputs(job, maps, scale, STAGES: gl.constexpr):
    v, before, numbers = ring(maps.v, 2 * STAGES), ring(maps.before, STAGES), ring(maps.numbers, STAGES)
    q, k, outs = ring(maps.q, 2), ring(maps.k, 2), ring(maps.out, 2)
    ready, free, begun = make_barriers(STAGES, 1), make_barriers(STAGES, 2), make_barriers(1, 1)
    rings = Rings(v, v, before, before, numbers, q, k, ready, free, begun, begun)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_outputs, (0, maps, job, rings, outs, scale)),
            (_outputs, (1, maps, job, rings, outs, scale)),
            (bring, (maps, job, rings, False)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def row_spot(grads, job, place, head, number: gl.constexpr, ME: gl.constexpr):
    """Where the numbers of a block's rows are."""
    kept = (place.batch * job.heads + head).to(gl.int64) * job.chunks + place.kept
    return grads.rows + number * grads.stride + kept * ROWS + ME * HALF


@gluon.jit
def grad_spot(grad, job, place, ME: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a block's rows of q's or k's gradient are, and which there are."""
    first = place.first + ME * HALF
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    token = place.batch.to(gl.int64) * job.tokens + place.start + first
    width = job.heads // job.share * job.parts * K
    inner = row * width + gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    return grad + token * width + place.part * K + inner, row < place.tokens - first


@gluon.jit
def _queries(ME: gl.constexpr, maps, job, grads, rings, scale):
    """A block's gradient of q, to which the chunk's own part is added, and numbers of its rows in each head."""
    STAGES: gl.constexpr = rings.numbers.type.shape[0]
    kind: gl.constexpr = maps.do.dtype
    LAYOUT: gl.constexpr = sums_layout(HALF)
    WIDE: gl.constexpr = sums_layout(K)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    place = place_of(job)
    row = gl.arange(0, HALF, BY_ROW)
    none = gl.zeros([HALF, HALF], gl.float32, LAYOUT)
    dq = gl.zeros([HALF, K], gl.float32, WIDE)
    half: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    mbarrier.wait(rings.begun.index(0), 0)
    tq = flat(rings.q.index(ME))
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        head = place.head + t
        mbarrier.wait(rings.ready.index(stage), odd)
        state = flat(rings.before.index(stage))
        y = warpgroup_mma(tq, state, none, use_acc=False, is_async=True)
        do = flat(rings.do.index(2 * stage + ME)).load(LAYOUT).to(gl.float32)
        if ME == 1:
            since = numbers_of(rings, stage, EDGE + 1, BY_ROW)
        else:
            since = power(numbers_of(rings, stage, SUMS, BY_ROW))
        left = gl.convert_layout((do * since[:, None]).to(kind), operand_layout(WIDE))
        pending = warpgroup_mma(left, state.permute((1, 0)), dq, is_async=True)
        one = rings.before.index(stage)._reinterpret(kind, [2, HALF, V], half).index(ME).load(LAYOUT)
        other = rings.after.index(stage)._reinterpret(kind, [2, HALF, V], half).index(ME).load(LAYOUT)
        past = gl.sum(one.to(gl.float32) * other.to(gl.float32), 1)
        y = warpgroup_mma_wait(1, deps=(y,))
        seen = scale * since * gl.sum(do * y, 1)
        dq = warpgroup_mma_wait(0, deps=(pending,))
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        gl.store(row_spot(grads, job, place, head, QUERY, ME) + row, seen)
        gl.store(row_spot(grads, job, place, head, PAST, ME) + row, past)
    spots, there = grad_spot(grads.own, job, place, ME, WIDE)
    dq = scale * dq + gl.load(spots, mask=there, other=0.0)
    spots, there = grad_spot(grads.q, job, place, ME, WIDE)
    gl.store(spots, dq.to(grads.q.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["scale"])
def shared_queries(grads, job, maps, scale, STAGES: gl.constexpr):
    do, before, after = ring(maps.do, 2 * STAGES), ring(maps.before, STAGES), ring(maps.after, STAGES)
    numbers, q = ring(maps.numbers, STAGES), ring(maps.q, 2)
    ready, free, begun = make_barriers(STAGES, 1), make_barriers(STAGES, 2), make_barriers(1, 1)
    rings = Rings(do, do, before, after, numbers, q, q, ready, free, begun, begun)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_queries, (0, maps, job, grads, rings, scale)),
            (_queries, (1, maps, job, grads, rings, scale)),
            (bring, (maps, job, rings, False)),
        ],
        [4, 1],
        [240, 24],
    )
