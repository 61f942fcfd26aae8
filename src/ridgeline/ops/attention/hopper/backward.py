"""The backward of attention's `gluon`: one pass on Hopper with five products. (D >= 200: backward_wide.py.)

A piece of work is 128 keys. Two consumer groups have 64 of them each, with the sums of dK and dV in registers, and TMA
loads tiles of 64 queries. Scores are transposed, keys down, so that the probabilities and their gradients dS go from
registers into the products for dV and dK. dS also goes through shared memory to a third group, which multiplies it with
K for all 128 keys and adds the result to dQ (backward_dq.py). The groups do not run in lockstep, so the tensor cores
have work from all three.
Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), algorithm 2; Shah et al., FlashAttention-3, 2024
(arXiv:2407.08608), section 3.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ridgeline.boundary import launch
from ridgeline.ops.attention.hopper.backward_dq import announcer, dq_consumer, make_announcements
from ridgeline.ops.attention.hopper.backward_pipeline import (
    KEYS,
    Buffer,
    Maps,
    Memory,
    make_queue,
    make_row_ring,
    producer,
)
from ridgeline.ops.attention.hopper.backward_work import Rules, Scale, Sizes, WorkScheduler, probabilities, read_work
from ridgeline.ops.attention.hopper.pipeline import ROWS, ring_place
from ridgeline.ops.attention.hopper.products import (
    Sums,
    await_sums,
    no_sums,
    pack_pairs,
    pairs_to_float,
    pairs_to_operand,
    start_scores,
    start_sums,
    store_sums,
)
from ridgeline.tiles.hopper import make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout


@gluon.jit
def store_keys(ME: gl.constexpr, out, sums, memory, work, scheduler):
    """Stores dK or dV of a group's keys, through its values' shared memory, which only it reads.

    With FLOAT they leave the registers in float32 for a contiguous tensor."""
    row = work.k_start + ME * ROWS
    FLOAT: gl.constexpr = scheduler.RULES.FLOAT
    if FLOAT:
        store_sums(out + work.key_number(row, scheduler.columns) * FLOAT, sums, work.scheduler.columns - row, FLOAT)
    else:
        room = flat(memory.v.tiles.index(ME))
        D: gl.constexpr = sums.main.shape[1]
        if len(sums.rest) > 0:
            room.slice(0, D, 1).store(sums.main.to(out.dtype))
            room.slice(D, sums.rest[0].shape[1], 1).store(sums.rest[0].to(out.dtype))
        else:
            room.store(sums.main.to(out.dtype))
        fence_async_shared()
        store(out, work.keys(row), memory.v.tiles.index(ME))
        tma.store_wait(0)


@gluon.jit
def store_share(ME: gl.constexpr, shares, n, x, COLUMN: gl.constexpr, WIDE: gl.constexpr):
    """Stores WIDE columns of a group's float32 sums over a part, from COLUMN on, as the n-th tile of `shares`."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))[:, None]
    j = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(shares + (n.to(gl.int64) * KEYS + ME) * (ROWS * WIDE) + (i * WIDE + j + COLUMN), x)


@gluon.jit
def store_shares(ME: gl.constexpr, shares, dk, dv, work, WIDE: gl.constexpr):
    """Stores a part's dK and dV in float32."""
    D: gl.constexpr = dk.main.shape[1]
    store_share(ME, shares, 2 * work.share, dk.main, 0, WIDE)
    store_share(ME, shares, 2 * work.share + 1, dv.main, 0, WIDE)
    if len(dk.rest) > 0:
        store_share(ME, shares, 2 * work.share, dk.rest[0], D, WIDE)
        store_share(ME, shares, 2 * work.share + 1, dv.rest[0], D, WIDE)


@gluon.jit
def scale_sums(sums, scale):
    if len(sums.rest) > 0:
        return Sums(sums.main * scale, (sums.rest[0] * scale,))
    else:  # the compiler also compiles what follows a return
        return Sums(sums.main * scale, ())


@gluon.jit
def pass_ds(ME: gl.constexpr, ds, done, memory):
    """Stores dS for the third group. Returns where; a fence and `ready` must follow."""
    STAGES: gl.constexpr = memory.ds.tiles.type.shape[0] // KEYS
    place, odd = ring_place(done, STAGES)
    mbarrier.wait(memory.ds.free.index(place), odd ^ 1)
    memory.ds.tiles.index(KEYS * place + ME).store(ds)
    return place


@gluon.jit
def add_queries(ME: gl.constexpr, n, done, work, k, v, dk, dv, zero, memory, scheduler):
    """Adds all blocks of queries that see the keys to dK and dV. k and v: in registers, with TIGHT in shared memory.

    Returns dK, dV and the number of blocks done.
    """
    TIGHT: gl.constexpr = scheduler.RULES.TIGHT
    REST: gl.constexpr = scheduler.RULES.REST
    GROUP: gl.constexpr = scheduler.RULES.GROUP
    dtype: gl.constexpr = k.dtype
    s_layout: gl.constexpr = zero.type.layout
    across: gl.constexpr = gl.SliceLayout(0, s_layout)
    left: gl.constexpr = operand_layout(dv.main.type.layout)
    # lse is loaded during dK's product, unless masks leave no registers for it.
    LATE: gl.constexpr = TIGHT and (scheduler.RULES.LEFT or scheduler.RULES.RIGHT)
    count = GROUP * work.blocks
    lse = gl.zeros([ROWS], gl.float32, across)
    if count > 0:
        lse = memory.q.take_number(done, across)
    for t in range(count):
        row = work.block(t if GROUP == 1 else t % work.blocks) * ROWS
        q = memory.q.tile(done)
        scores = start_scores(k, q, zero, REST)
        do = memory.do.take(done)
        s = warpgroup_mma_wait(0, deps=(scores,))
        if TIGHT:
            mbarrier.wait(memory.v.ready, n & 1)
        products = start_scores(v, do, zero, REST)
        p, to_ds = probabilities(s, lse, row, work.k_start + ME * ROWS, work, scheduler)
        delta = memory.do.number(done, across)
        if TIGHT:
            packed = pack_pairs(p, dtype)
            half = pairs_to_operand(packed, dtype, left)
            p = pairs_to_float(pack_pairs(to_ds, dtype) if scheduler.RULES.CAP else packed, dtype, s_layout)
        else:
            half = gl.convert_layout(p.to(dtype), left)
            p = to_ds
        dv_next = start_sums(half, do, dv)
        dp = warpgroup_mma_wait(2 if REST else 1, deps=(products,))
        ds = (p * (dp - delta[None, :])).to(dtype)
        place = pass_ds(ME, ds, done, memory)
        dk_next = start_sums(ds, q, dk)
        fence_async_shared()  # during that product: it waits for the stores, and they for the product before
        mbarrier.arrive(memory.ds.ready.index(place), count=1)
        dv = await_sums(dv_next, 1)
        # After the last block there may be none: then this one's are loaded again, unused.
        following = gl.where(t + 1 < count, done + 1, done)
        if not LATE:
            lse = memory.q.take_number(following, across)
        dk = await_sums(dk_next, 0)
        if LATE:
            lse = memory.q.take_number(following, across)
        memory.q.release(done)
        done += 1
    return dk, dv, done


@gluon.jit
def key_consumer(ME: gl.constexpr, dk_out, dv_out, shares, memory, scheduler):
    """A consumer group: dK and dV of its keys, and dS for dQ.

    Keys and values are in registers, which halves the reads of shared memory for scores and dP. With TIGHT there are
    too few registers: keys and values stay in shared memory, and dS is computed from rounded probabilities, which need
    half the registers. With REST, D is half of a tile's columns plus at most REST, and dK and dV are in two parts.
    """
    REST: gl.constexpr = scheduler.RULES.REST
    WIDE: gl.constexpr = memory.k.tiles.type.shape[-1]
    D: gl.constexpr = WIDE // 2 if REST else WIDE
    zero = gl.zeros([ROWS, ROWS], gl.float32, sums_layout(ROWS))
    own: gl.constexpr = operand_layout(sums_layout(ROWS))
    k = flat(memory.k.tiles.index(ME))
    v = flat(memory.v.tiles.index(ME))
    n, done = 0, 0
    item = memory.queue.take(0)
    while item < scheduler.pieces:
        work = read_work(memory.queue, n, item, scheduler)
        dk, dv = no_sums(ROWS, D, REST), no_sums(ROWS, D, REST)
        mbarrier.wait(memory.k.ready, n & 1)
        if scheduler.RULES.TIGHT:
            dk, dv, done = add_queries(ME, n, done, work, k, v, dk, dv, zero, memory, scheduler)
        else:
            keys = k.load(own)
            mbarrier.wait(memory.v.ready, n & 1)
            values = v.load(own)
            dk, dv, done = add_queries(ME, n, done, work, keys, values, dk, dv, zero, memory, scheduler)
        mbarrier.wait(memory.v.ready, n & 1)  # in case there was no block
        mbarrier.arrive(memory.k.free, count=1)
        if work.share < 0:
            store_keys(ME, dv_out, dv, memory, work, scheduler)
            store_keys(ME, dk_out, scale_sums(dk, scheduler.scale), memory, work, scheduler)
        elif scheduler.SPLIT:
            store_shares(ME, shares, dk, dv, work, WIDE)
        mbarrier.arrive(memory.v.free, count=1)
        n += 1
        item = memory.queue.take(n) if memory.queue.STAY else scheduler.pieces


@gluon.jit(do_not_specialize=["sizes"])
def _bwd(order, listed, shares, maps, sizes, scale, RULES: gl.constexpr):
    PACKED: gl.constexpr = listed is not None
    STAGES: gl.constexpr = RULES.STAGES
    STAY: gl.constexpr = RULES.STAY
    D: gl.constexpr = maps.q.block_type.shape[-1]
    W: gl.constexpr = maps.dq_sums.block_type.shape[1] // 2
    dtype: gl.constexpr = maps.q.dtype
    q = make_row_ring(maps.q, maps.lse, STAGES)
    do = make_row_ring(maps.do, maps.delta, STAGES, q.free)  # released with q
    k = gl.allocate_shared_memory(dtype, [KEYS] + maps.k.block_type.shape, maps.k.layout)
    v = gl.allocate_shared_memory(dtype, [KEYS] + maps.k.block_type.shape, maps.k.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds = gl.allocate_shared_memory(dtype, [KEYS * STAGES, ROWS, ROWS], ds_layout)
    sums = gl.allocate_shared_memory(gl.float32, [D // W] + maps.dq_sums.block_type.shape, maps.dq_sums.layout)
    ds_buffer = Buffer(ds, make_barriers(STAGES, KEYS), make_barriers(STAGES, 1))
    k_buffer = Buffer(k, make_barriers(1, 1).index(0), make_barriers(1, KEYS + 1).index(0))
    v_buffer = Buffer(v, make_barriers(1, 1).index(0), make_barriers(1, KEYS).index(0))
    memory = Memory(q, do, k_buffer, v_buffer, ds_buffer, sums, make_queue(STAY, PACKED), make_announcements())
    fence_async_shared()
    scheduler = WorkScheduler(sizes, scale, RULES, PACKED, KEYS * ROWS, shares is not None)
    gl.warp_specialize(
        [
            (key_consumer, (0, maps.dk, maps.dv, shares, memory, scheduler)),
            (key_consumer, (1, maps.dk, maps.dv, shares, memory, scheduler)),
            (dq_consumer, (W, maps.dq_sums, memory, order + 1, scheduler)),
            (producer, (maps, memory, order, listed, scheduler)),
            (announcer, (order + 1, memory.added)),
        ],
        [4, 4, 1, 1],
        [208, 72, 24, 24],
    )


def start(
    programs: int, rest: int, options: tuple[bool, bool, bool, int, int, bool], order: Any, listed: Any, shares: Any,
    maps: Any, sizes: Any, scale: Any, last: tuple[bool, int, bool]
) -> None:  # fmt: skip
    """Starts the kernel with so many programs. maps, sizes, scale, options (to ORDERED): in the bundles' order.

    last: PREFIX, FLOAT and CAP."""
    tight = maps[0].box[-1] == 128
    rules = Rules(*options, tight, not tight, 2 if tight else 4, rest, *last)
    bundles = Maps(*maps), Sizes(*sizes), Scale(*scale)
    launch(_bwd, (programs,), order, listed, shares, *bundles, RULES=rules, num_warps=4, maxnreg=128)
