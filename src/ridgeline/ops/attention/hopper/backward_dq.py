"""dQ in attention's backward on Hopper: a consumer group multiplies dS with K, and TMA adds the result to memory.

The first piece that adds to a block of dQ stores instead, and the others wait for it; with ORDERED each waits for all
pieces before it, so that reruns are bitwise equal. A count per block says how many additions are done. A warp of its
own raises it, since that must wait for the additions to be visible.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention.hopper.backward_work import read_work
from ridgeline.ops.attention.hopper.pipeline import ROWS, ring_place
from ridgeline.tiles.hopper import barrier, make_barriers, store
from ridgeline.tiles.warpgroup import flat, sums_layout


@builtin
def add_tile(desc, coord, src, _semantic=None):
    """TMA adds a tile in shared memory to one in memory. (Triton before 3.9 has no Python name for it.)"""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def load_count(place):
    """Loads a number from memory, relaxed: it may be old."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [place.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_count(place, count, seen):
    """Waits until a number in memory, `seen` before, is at least `count`."""
    code: gl.constexpr = (
        "{ .reg .pred p; setp.ge.s32 p, $3, $2; @p bra past; again: ld.acquire.gpu.global.s32 $0, [$1]; "
        "setp.lt.s32 p, $0, $2; @p bra again; past: }"
    )
    gl.inline_asm_elementwise(
        code, "=&r,l,r,r", [place.to(gl.int64), count, seen], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def await_writes_code(but):
    return f"cp.async.bulk.wait_group {but}; mov.u32 $0, 0;"


@gluon.jit
def await_writes(BUT: gl.constexpr):
    """Waits until all but the last BUT of TMA's writes are done, as this program sees them."""
    code: gl.constexpr = await_writes_code(BUT)
    gl.inline_asm_elementwise(code, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def as_held(sums):
    """Reorders a tile (64, W) to (2 W, 32), the order in which threads hold it.

    Four numbers of a thread are adjacent, then the threads of its warp follow, which avoids bank conflicts. `in_rows`
    undoes it.
    """
    W: gl.constexpr = sums.shape[1]
    held = sums.reshape([4, 2, 8, W // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))  # warp, half, row, eight columns, two, one
    return held.reshape([2 * W, 32])


@gluon.jit
def add_sums(dq, sums, at, buffer, before):
    """Adds a tile of dQ to its sums in memory, through a buffer in shared memory; the first piece stores it."""
    buffer.reshape([buffer.shape[1], 32]).slice(0, 2 * dq.shape[1], 0).store(as_held(dq))
    fence_async_shared()
    if before == 0:
        store(sums, at, buffer)
    else:
        add_tile(sums, at, buffer)


@aggregate
class Announcements:
    """Passes numbers of blocks from the group that adds to dQ to the warp that announces them to other programs."""

    numbers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, ready, free):
        self.numbers = numbers
        self.ready = ready
        self.free = free

    @gluon.jit
    def send(self, n, number, BUT: gl.constexpr):
        """Passes on the n-th number once all but the last BUT of TMA's writes are done."""
        mbarrier.wait(self.free.index(n & 1), ((n >> 1) & 1) ^ 1)
        self.numbers.index(n & 1).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        await_writes(BUT)
        mbarrier.arrive(self.ready.index(n & 1), count=1)

    @gluon.jit
    def receive(self, n):
        mbarrier.wait(self.ready.index(n & 1), (n >> 1) & 1)
        number = gl.max(self.numbers.index(n & 1).load(gl.BlockedLayout([1], [32], [1], [0])), 0)
        mbarrier.arrive(self.free.index(n & 1), count=1)
        return number


@gluon.jit
def make_announcements():
    ready, free = make_barriers(2, 1), make_barriers(2, 1)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Announcements(numbers, ready, free)


@gluon.jit
def start_dq(memory, place, COLUMN: gl.constexpr, zero):
    """Starts dS^T K for dQ's columns from COLUMN on."""
    TILES: gl.constexpr = memory.k.tiles.type.shape[0]
    COLUMNS: gl.constexpr = zero.shape[1]
    dq = zero
    for w in gl.static_range(TILES):
        ds, keys = memory.ds.tiles.index(TILES * place + w).permute((1, 0)), flat(memory.k.tiles.index(w))
        dq = warpgroup_mma(ds, keys.slice(COLUMN, COLUMNS, 1), dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def add_columns(dq, sums, number, COLUMN: gl.constexpr, buffers, before):
    """Adds a tile of dQ's columns, from COLUMN on, to memory, through as many buffers in turn as they need."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    SIZE: gl.constexpr = buffers.type.shape[2] // 2
    W: gl.constexpr = dq.shape[1]
    if W <= SIZE:
        tma.store_wait(BUFFERS - 1)
        add_sums(dq, sums, [number, COLUMN * 2, 0], buffers.index(COLUMN // SIZE % BUFFERS), before)
    else:
        left, right = gl.split(dq.reshape([ROWS, 2, W // 2]).permute((0, 2, 1)))
        add_columns(left, sums, number, COLUMN, buffers, before)
        add_columns(right, sums, number, COLUMN + W // 2, buffers, before)


@gluon.jit
def dq_consumer(W: gl.constexpr, sums, memory, order, scheduler):
    """The third group: dQ for all keys, added to memory through buffers in shared memory.

    `order` counts the additions to each block. W columns are multiplied at a time (the last time REST), and leave
    through as many buffers as they need.

    `announcer` announces a block once all of TMA's additions to it are written. Two things are assumed. First, an
    addition that TMA makes after a relaxed load (`seen`) of the count comes after the additions counted there: the load
    decides whether TMA is asked to add at all. Second, if a piece is a program (from D 72 on), lower numbers start
    first.
    """
    TILES: gl.constexpr = memory.k.tiles.type.shape[0]
    STAGES: gl.constexpr = memory.ds.tiles.type.shape[0] // TILES
    PARTS: gl.constexpr = memory.k.tiles.type.shape[-1] // W
    NEED: gl.constexpr = 2 * W // memory.sums.type.shape[2]  # buffers per part
    ORDERED: gl.constexpr = scheduler.RULES.ORDERED
    REST: gl.constexpr = scheduler.RULES.REST
    LAST: gl.constexpr = max(REST, 16)
    # A block is announced one part into the next if later pieces follow closely: those of 64 keys, and causal ones with
    # the heaviest first. Otherwise it is announced a block later, when TMA has finished sooner (as measured).
    EARLY: gl.constexpr = NEED > 1 or (scheduler.RULES.RIGHT and not scheduler.RULES.DOWN)
    ANNOUNCE: gl.constexpr = 0 if EARLY else PARTS - 1  # after this part of a block, the one before is announced
    zero = gl.zeros([ROWS, W], gl.float32, sums_layout(W))
    rest_zero = gl.zeros([ROWS, LAST], gl.float32, sums_layout(LAST))
    n, done, sent = 0, 0, 0
    item = memory.queue.take(0)
    while item < scheduler.pieces:
        work = read_work(memory.queue, n, item, scheduler)
        mbarrier.wait(memory.k.ready, n & 1)
        last, pending = 0, False
        for g in range(scheduler.RULES.GROUP):
            seen = -1
            for t in range(work.blocks):
                block = work.block(t)
                place, odd = ring_place(done, STAGES)
                before, number = work.before(block), work.number(g, block, scheduler.tiles)
                await_count(order + number, before if ORDERED else gl.minimum(before, 1), seen)
                mbarrier.wait(memory.ds.ready.index(place), odd)
                for part in gl.static_range(PARTS):
                    dq = start_dq(memory, place, part * W, zero if part == 0 or not REST else rest_zero)
                    if part == 0:
                        next_ = work.block(gl.minimum(t + 1, work.blocks - 1))
                        seen = load_count(order + work.number(g, next_, scheduler.tiles))
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    if part == PARTS - 1:
                        mbarrier.arrive(memory.ds.free.index(place), count=1)
                    add_columns(dq, sums, number, part * W, memory.sums, before)
                    if part == ANNOUNCE:  # noqa: SIM102  # decided at compile time
                        if pending:  # the block before this one is in memory now
                            memory.added.send(sent, last, (ANNOUNCE + 1) * NEED)
                            sent += 1
                pending = ORDERED or before == 0
                last = number
                done += 1
        mbarrier.arrive(memory.k.free, count=1)
        if pending:
            memory.added.send(sent, last, 0)
            sent += 1
        n += 1
        item = memory.queue.take(n) if memory.queue.STAY else scheduler.pieces
    memory.added.send(sent, -1, 0)


@gluon.jit
def announcer(order, added):
    """The warp that announces additions to blocks of dQ to other programs.

    The announcement must be a release: TMA reports a write before all others can see it, and a relaxed announcement
    overtook the write once in a hundred calls at D 256. The release waits for visibility, a third of a block's time or
    more, but no other warp here waits for this one unless it is two blocks behind.
    """
    n = 0
    number = added.receive(0)
    while number >= 0:
        gl.atomic_add(order + number, 1, sem="release", scope="gpu")
        n += 1
        number = added.receive(n)
