"""Chunks of all heads that share q and k, in Gluon for Hopper: the gradients of k and v, and q's within the chunk.

Rows are keys. The weights of a head's pairs are added up over the heads in registers, so the chunk's own parts of dq
and dk are one product each, after the last head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.ops.recurrent.hopper.shared_outputs import (
    ACROSS,
    EARLIER,
    EDGE,
    HALF,
    KEY,
    LATER,
    OF_SKIP,
    OF_STEP,
    STEP,
    SUMS,
    UNTIL,
    K,
    Rings,
    bring,
    grad_spot,
    numbers_of,
    place_of,
    power,
    put_out,
    ring,
    row_spot,
)
from ridgeline.tiles.hopper import barrier, make_barriers
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout


@gluon.jit
def _pair(ME: gl.constexpr, OTHER: gl.constexpr, rings, scale):
    """The products of a block's keys (rows) with a block's queries."""
    none = gl.zeros([HALF, HALF], gl.float32, sums_layout(HALF))
    queries = flat(rings.q.index(OTHER)).permute((1, 0))
    found = warpgroup_mma(flat(rings.k.index(ME)), queries, none, use_acc=False, is_async=True)
    return scale * warpgroup_mma_wait(0, deps=(found,))


@gluon.jit
def _finish(ME: gl.constexpr, job, grads, rings, pairs, dk, own, far, scale, KIND: gl.constexpr):
    """The chunk's own parts, from the sums of all heads' weights."""
    WIDE: gl.constexpr = sums_layout(K)
    place = place_of(job)
    own, far = (scale * own).to(KIND), (scale * far).to(KIND)
    barrier()
    pairs.index(2 * ME).store(own)
    if ME == 0:
        pairs.index(1).store(far)
    fence_async_shared()
    barrier()
    mbarrier.arrive(rings.made.index(0), count=1)
    mbarrier.wait(rings.made.index(0), 1)
    none = gl.zeros([HALF, K], gl.float32, WIDE)
    dq = warpgroup_mma(pairs.index(2 * ME).permute((1, 0)), flat(rings.k.index(ME)), none, use_acc=False, is_async=True)
    if ME == 1:
        dq = warpgroup_mma(pairs.index(1).permute((1, 0)), flat(rings.k.index(0)), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    spots, there = grad_spot(grads.own, job, place, ME, WIDE)
    gl.store(spots, dq, mask=there)
    mbarrier.wait(rings.begun.index(0), 1)
    left = gl.convert_layout(own, operand_layout(WIDE))
    dk = warpgroup_mma(left, flat(rings.q.index(ME)), dk, is_async=True)
    if ME == 0:
        left = gl.convert_layout(far, operand_layout(WIDE))
        dk = warpgroup_mma(left, flat(rings.q.index(1)), dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    spots, there = grad_spot(grads.k, job, place, ME, WIDE)
    gl.store(spots, dk.to(grads.k.dtype.element_ty), mask=there)


@gluon.jit
def _keys(ME: gl.constexpr, maps, job, grads, rings, pairs, outs, scale):
    """A block of keys in all heads. own and far: sums of the weights with queries of the block and of the next."""
    STAGES: gl.constexpr = rings.numbers.type.shape[0]
    kind: gl.constexpr = maps.v.dtype
    LAYOUT: gl.constexpr = sums_layout(HALF)
    WIDE: gl.constexpr = sums_layout(K)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    place = place_of(job)
    row, column = gl.arange(0, HALF, BY_ROW), gl.arange(0, HALF, BY_COLUMN)
    seen = column[None, :] >= row[:, None]  # by a query, the column
    none = gl.zeros([HALF, HALF], gl.float32, LAYOUT)
    own, far, dk = none, none, gl.zeros([HALF, K], gl.float32, WIDE)
    mbarrier.wait(rings.begun.index(0), 0)
    pairs.index(2 * ME).store(gl.where(seen, _pair(ME, ME, rings, scale), 0.0).to(kind))
    if ME == 0:
        pairs.index(1).store(_pair(0, 1, rings, scale).to(kind))
    barrier()
    mbarrier.arrive(rings.made.index(0), count=1)
    tk = flat(rings.k.index(ME))
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        head = place.head + t
        mbarrier.wait(rings.ready.index(stage), odd)
        tv, tdo = flat(rings.v.index(2 * stage + ME)), flat(rings.do.index(2 * stage + ME))
        after = flat(rings.after.index(stage))
        dv = warpgroup_mma(tk, after, none, use_acc=False, is_async=True)
        v = tv.load(LAYOUT).to(gl.float32)
        until, steps = numbers_of(rings, stage, UNTIL + ME, BY_ROW), numbers_of(rings, stage, STEP + ME, BY_ROW)
        left = gl.convert_layout((v * (until * steps)[:, None]).to(kind), operand_layout(WIDE))
        adding = warpgroup_mma(left, after.permute((1, 0)), dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        of_key = until * steps * gl.sum(v * dv, 1)
        gl.store(row_spot(grads, job, place, head, KEY, ME) + row, of_key)
        dv *= until[:, None]
        apart = numbers_of(rings, stage, SUMS + ME, BY_COLUMN)[None, :]
        apart -= numbers_of(rings, stage, SUMS + ME, BY_ROW)[:, None]
        decays = power(gl.minimum(apart, 0.0))  # those of queries before the key meet zeros
        weights = (pairs.index(2 * ME).load(LAYOUT).to(gl.float32) * decays).to(kind)
        weights = gl.convert_layout(weights, operand_layout(LAYOUT))
        dk = warpgroup_mma_wait(0, deps=(adding,))
        products = warpgroup_mma(tv, tdo.permute((1, 0)), none, use_acc=False, is_async=True)
        dv = warpgroup_mma(weights, tdo, dv, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        products *= decays * steps[:, None]
        own += products
        products *= pairs.index(2 * ME).load(LAYOUT).to(gl.float32)
        later, earlier = gl.sum(products, 1), gl.sum(products, 0)
        gl.store(row_spot(grads, job, place, head, EARLIER, ME) + column, earlier)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        if ME == 0:
            tdo_far = flat(rings.do.index(2 * stage + 1))
            decays = numbers_of(rings, stage, EDGE, BY_ROW)[:, None]
            decays = decays * power(numbers_of(rings, stage, SUMS + 1, BY_COLUMN))[None, :]
            weights = (pairs.index(1).load(LAYOUT).to(gl.float32) * decays).to(kind)
            weights = gl.convert_layout(weights, operand_layout(LAYOUT))
            products = warpgroup_mma(tv, tdo_far.permute((1, 0)), none, use_acc=False, is_async=True)
            dv = warpgroup_mma(weights, tdo_far, dv, is_async=True)
            products = warpgroup_mma_wait(1, deps=(products,))
            products *= decays * steps[:, None]
            far += products
            products *= pairs.index(1).load(LAYOUT).to(gl.float32)
            later += gl.sum(products, 1)
            earlier = gl.sum(products, 0)
            gl.store(row_spot(grads, job, place, head, ACROSS, 1) + column, earlier)
            dv = warpgroup_mma_wait(0, deps=(dv,))
        do = tdo.load(LAYOUT).to(gl.float32)
        v = tv.load(LAYOUT).to(gl.float32)
        barrier()
        mbarrier.arrive(rings.free.index(stage), count=1)
        gl.store(row_spot(grads, job, place, head, LATER, ME) + row, later)
        gl.store(row_spot(grads, job, place, head, OF_STEP, ME) + row, gl.sum(v * dv, 1))
        dv *= steps[:, None]
        if job.skip is not None:
            gl.store(row_spot(grads, job, place, head, OF_SKIP, ME) + row, gl.sum(v * do, 1))
            dv += gl.load(job.skip + head) * do
        put_out(maps, job, place, head, dv, outs.index(ME), ME)
    own = gl.where(seen, own, 0.0)
    _finish(ME, job, grads, rings, pairs, dk, own, far, scale, kind)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["scale"])
def shared_keys(grads, job, maps, scale, STAGES: gl.constexpr):
    """q lies where the first heads' rows of v come, so it comes once more after the last head."""
    kind: gl.constexpr = maps.v.dtype
    v, do, after = ring(maps.v, 2 * STAGES), ring(maps.do, 2 * STAGES), ring(maps.after, STAGES)
    numbers, k, outs = ring(maps.numbers, STAGES), ring(maps.k, 2), ring(maps.out, 2)
    pairs = gl.allocate_shared_memory(kind, [3, HALF, HALF], gl.NVMMASharedLayout(128, 16, 2))
    q = v._reinterpret(kind, [STAGES] + maps.q.block_type.shape, maps.q.layout)
    ready, free, begun, made = (
        make_barriers(STAGES, 1), make_barriers(STAGES, 2), make_barriers(1, 1), make_barriers(1, 2)
    )  # fmt: skip
    rings = Rings(v, do, after, after, numbers, q, k, ready, free, begun, made)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_keys, (0, maps, job, grads, rings, pairs, outs, scale)),
            (_keys, (1, maps, job, grads, rings, pairs, outs, scale)),
            (bring, (maps, job, rings, True)),
        ],
        [4, 1],
        [240, 24],
    )
