"""The backward of attention's `gluon` for D from 200 to 256: three warpgroups with one sum each.

A piece of work is 64 keys. dK and dV take 128 registers per thread each, so no group can hold both. The first group
computes the scores, the probabilities and dV. The second reads the probabilities from shared memory and computes dP, dS
and dK. The third computes dQ from dS, as for narrower heads: five products again. Data between groups has shared memory
of its own: all threads write it, a proxy fence follows, every reader waits at a barrier, and it is free again once the
reader has it in registers or its product has ended.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.boundary import launch
from ridgeline.ops.attention.hopper.backward_dq import announcer, dq_consumer, make_announcements
from ridgeline.ops.attention.hopper.backward_pipeline import Buffer, Maps, Memory, make_queue, make_row_ring, producer
from ridgeline.ops.attention.hopper.backward_work import Rules, Scale, Sizes, WorkScheduler, probabilities, read_work
from ridgeline.ops.attention.hopper.pipeline import ROWS, Ring, ring_place
from ridgeline.ops.attention.hopper.products import (
    Sums,
    pack_pairs,
    pairs_to_float,
    pairs_to_operand,
    start_scores,
    store_sums,
)
from ridgeline.tiles.hopper import make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout


@gluon.jit
def in_order(pairs):
    """Reorders pairs of a tile (64, 64), as (64, 32), to the order in which a product's threads hold them.

    Four pairs of a thread are adjacent, then the threads of its warp follow. `from_order` undoes it.
    """
    return pairs.reshape([4, 2, 8, 4, 2, 4]).permute((3, 0, 2, 5, 4, 1)).reshape([ROWS, ROWS // 2])


@gluon.jit
def from_order(ordered, like):
    return gl.convert_layout(
        ordered.reshape([4, 4, 8, 4, 2, 2]).permute((1, 5, 2, 0, 4, 3)).reshape([ROWS, ROWS // 2]), like.type.layout
    )


@gluon.jit
def value_consumer(dv_out, memory, given, scheduler):
    """The first group: the probabilities, which it passes on, and dV."""
    D: gl.constexpr = memory.v.tiles.type.shape[-1]
    FLOAT: gl.constexpr = scheduler.RULES.FLOAT
    dtype: gl.constexpr = memory.v.tiles.dtype
    s_layout: gl.constexpr = sums_layout(ROWS)
    d_layout: gl.constexpr = sums_layout(D // 2)
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    k = flat(memory.k.tiles.index(0))
    item = memory.queue.take(0)
    if item < scheduler.pieces:
        work = read_work(memory.queue, 0, item, scheduler)
        dv = gl.zeros([ROWS, D], gl.float32, d_layout)
        mbarrier.wait(memory.k.ready, 0)
        within = 0
        for done in range(scheduler.RULES.GROUP * work.blocks):
            row = work.block(within) * ROWS
            within = gl.where(within + 1 == work.blocks, 0, within + 1)
            q = memory.q.take(done)
            scores = start_scores(k, q, zero, 0)
            lse = memory.q.number(done, gl.SliceLayout(0, s_layout))
            s = warpgroup_mma_wait(0, deps=(scores,))
            p, to_ds = probabilities(s, lse, row, work.k_start, work, scheduler)
            packed = pack_pairs(p, dtype)
            do = memory.do.take(done)
            dv_next = warpgroup_mma(pairs_to_operand(packed, dtype, operand_layout(d_layout)), do, dv, is_async=True)
            given.await_free(done)
            if scheduler.RULES.CAP:
                packed = pack_pairs(to_ds, dtype)
            given.tile(done).store(in_order(packed))
            fence_async_shared()
            given.end(done)
            memory.q.release(done)
            dv = warpgroup_mma_wait(0, deps=(dv_next,))
            memory.do.release(done)
        if FLOAT:
            to = dv_out + work.key_number(work.k_start, scheduler.columns) * FLOAT
            store_sums(to, Sums(dv, ()), work.scheduler.columns - work.k_start, FLOAT)
        else:
            total = scheduler.RULES.GROUP * work.blocks
            memory.do.await_free(total)  # memory that nobody will fill
            place, _ = ring_place(total, memory.do.SIZE)
            flat(memory.do.tiles.index(place)).store(dv.to(dtype))
            fence_async_shared()
            store(dv_out, work.keys(work.k_start), memory.do.tiles.index(place))
            tma.store_wait(0)


@gluon.jit
def wide_key_consumer(dk_out, memory, given, scheduler):
    """The second group: dS from the given probabilities, and dK."""
    D: gl.constexpr = memory.k.tiles.type.shape[-1]
    FLOAT: gl.constexpr = scheduler.RULES.FLOAT
    STAGES: gl.constexpr = memory.ds.tiles.type.shape[0]
    dtype: gl.constexpr = memory.k.tiles.dtype
    s_layout: gl.constexpr = sums_layout(ROWS)
    d_layout: gl.constexpr = sums_layout(D // 2)
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    pairs = pack_pairs(zero, dtype)
    order: gl.constexpr = in_order(pairs).type.layout
    v = flat(memory.v.tiles.index(0))
    item = memory.queue.take(0)
    if item < scheduler.pieces:
        work = read_work(memory.queue, 0, item, scheduler)
        dk = gl.zeros([ROWS, D], gl.float32, d_layout)
        mbarrier.wait(memory.v.ready, 0)
        for done in range(scheduler.RULES.GROUP * work.blocks):
            do = memory.do.take(done)
            products = start_scores(v, do, zero, 0)
            delta = memory.do.number(done, gl.SliceLayout(0, s_layout))
            p = from_order(given.take(done).load(order), pairs)
            dp = warpgroup_mma_wait(0, deps=(products,))
            ds = (pairs_to_float(p, dtype, s_layout) * (dp - delta[None, :])).to(dtype)
            place, odd = ring_place(done, STAGES)
            mbarrier.wait(memory.ds.free.index(place), odd ^ 1)
            memory.ds.tiles.index(place).store(ds)
            fence_async_shared()
            mbarrier.arrive(memory.ds.ready.index(place), count=1)
            given.release(done)
            memory.do.release(done)
            q = memory.q.take(done)
            dk_next = warpgroup_mma(gl.convert_layout(ds, operand_layout(d_layout)), q, dk, is_async=True)
            dk = warpgroup_mma_wait(0, deps=(dk_next,))
            memory.q.release(done)
        if FLOAT:
            to = dk_out + work.key_number(work.k_start, scheduler.columns) * FLOAT
            store_sums(to, Sums(dk * scheduler.scale, ()), work.scheduler.columns - work.k_start, FLOAT)
        else:
            v.store((dk * scheduler.scale).to(dtype))  # in v's place, which only this group reads
            fence_async_shared()
            store(dk_out, work.keys(work.k_start), memory.v.tiles.index(0))
            tma.store_wait(0)


@gluon.jit(do_not_specialize=["sizes"])
def _bwd_wide(order, listed, maps, sizes, scale, RULES: gl.constexpr):
    PACKED: gl.constexpr = listed is not None
    dtype: gl.constexpr = maps.q.dtype
    q = make_row_ring(maps.q, maps.lse, 2)
    do = make_row_ring(maps.do, maps.delta, 2)
    k = gl.allocate_shared_memory(dtype, [1] + maps.k.block_type.shape, maps.k.layout)
    v = gl.allocate_shared_memory(dtype, [1] + maps.v.block_type.shape, maps.v.layout)
    ds = gl.allocate_shared_memory(dtype, [1, ROWS, ROWS], gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype))
    pairs = gl.allocate_shared_memory(gl.int32, [1, ROWS, ROWS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums = gl.allocate_shared_memory(gl.float32, [2] + maps.dq_sums.block_type.shape, maps.dq_sums.layout)
    ds_buffer = Buffer(ds, make_barriers(1, 1), make_barriers(1, 1))
    given = Ring(pairs, make_barriers(1, 1), make_barriers(1, 1))
    k_buffer = Buffer(k, make_barriers(1, 1).index(0), make_barriers(1, 2).index(0))
    v_buffer = Buffer(v, make_barriers(1, 1).index(0), make_barriers(1, 1).index(0))
    memory = Memory(q, do, k_buffer, v_buffer, ds_buffer, sums, make_queue(False, PACKED), make_announcements())
    fence_async_shared()
    scheduler = WorkScheduler(sizes, scale, RULES, PACKED, ROWS, False)
    gl.warp_specialize(
        [
            (value_consumer, (maps.dv, memory, given, scheduler)),
            (wide_key_consumer, (maps.dk, memory, given, scheduler)),
            (dq_consumer, (64, maps.dq_sums, memory, order + 1, scheduler)),
            (producer, (maps, memory, order, listed, scheduler)),
            (announcer, (order + 1, memory.added)),
        ],
        [4, 4, 1, 1],
        [208, 72, 24, 24],
    )


def start_wide(
    programs: int,
    options: tuple[bool, bool, bool, int, int, bool],
    order: Any,
    listed: Any,
    maps: Any,
    sizes: Any,
    scale: Any,
    last: tuple[bool, int, bool],
) -> None:
    """Starts the kernel with so many programs. maps, sizes, scale, options (to ORDERED): in the bundles' order.

    last: PREFIX, FLOAT and CAP."""
    rules = Rules(*options, False, False, 2, 0, *last)
    bundles = Maps(*maps), Sizes(*sizes), Scale(*scale)
    launch(_bwd_wide, (programs,), order, listed, *bundles, RULES=rules, num_warps=4, maxnreg=128)
