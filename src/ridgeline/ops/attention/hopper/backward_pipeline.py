"""The pipeline of attention's backward on Hopper: shared memory, the queue of work, and the producer warp."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention.hopper.pipeline import ROWS, field_of, read_record, ring_place, write_record
from ridgeline.tiles.hopper import load, make_barriers
from ridgeline.tiles.warpgroup import flat

KEYS = gl.constexpr(2)  # groups that read tiles of keys: 64 keys each up to D 128, the same 64 above


class Maps(NamedTuple):
    """Tensor maps: of inputs and results, of dQ's sums, and of a number per query, lse and delta.

    With FLOAT, dk and dv are the tensors."""

    q: Any
    k: Any
    v: Any
    do: Any
    dk: Any
    dv: Any
    dq_sums: Any
    lse: Any
    delta: Any


class Buffer(NamedTuple):
    """Tiles in shared memory, and barriers that say that they are filled, and free again."""

    tiles: Any
    ready: Any
    free: Any


class Memory(NamedTuple):
    """Shared memory: rings of q and do, each group's tile of k and of v, a ring of dS, and what warps tell each other.

    `sums`: buffers through which dQ's sums go to memory.
    """

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    sums: Any
    queue: Any
    added: Any


@aggregate
class RowRing:
    """A ring of tiles of q or do, with a number per row."""

    tiles: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, numbers, ready, free):
        self.tiles = tiles
        self.numbers = numbers
        self.ready = ready
        self.free = free
        self.SIZE = gl.constexpr(tiles.type.shape[0])

    @gluon.jit
    def await_free(self, n):
        place, odd = ring_place(n, self.SIZE)
        mbarrier.wait(self.free.index(place), odd ^ 1)

    @gluon.jit
    def fill(self, source, numbers, n, at, number_at):
        place, odd = ring_place(n, self.SIZE)
        mbarrier.wait(self.free.index(place), odd ^ 1)
        mbarrier.expect(self.ready.index(place), source.block_type.nbytes + numbers.block_type.nbytes)
        load(source, at, self.ready.index(place), self.tiles.index(place))
        load(numbers, [number_at, 0], self.ready.index(place), self.numbers.index(place))

    @gluon.jit
    def take(self, n):
        """Waits until the n-th tile is filled, and returns it."""
        place, odd = ring_place(n, self.SIZE)
        mbarrier.wait(self.ready.index(place), odd)
        return self.tile(n)

    @gluon.jit
    def tile(self, n):
        """Returns the n-th tile, which `take` has waited for."""
        place, _ = ring_place(n, self.SIZE)
        return flat(self.tiles.index(place))

    @gluon.jit
    def number(self, n, layout: gl.constexpr):
        place, _ = ring_place(n, self.SIZE)
        return self.numbers.index(place).reshape([ROWS]).load(layout)

    @gluon.jit
    def take_number(self, n, layout: gl.constexpr):
        """Waits for the n-th tile, and returns its rows' numbers."""
        self.take(n)
        return self.number(n, layout)

    @gluon.jit
    def release(self, n):
        place, _ = ring_place(n, self.SIZE)
        mbarrier.arrive(self.free.index(place), count=1)


@gluon.jit
def make_row_ring(source, numbers, SIZE: gl.constexpr, free=None):
    """Makes the ring. free: another ring's barriers, whose `release` then releases both places together."""
    ready = make_barriers(SIZE, 1)
    if free is None:
        free = make_barriers(SIZE, KEYS)
    tiles = gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout)
    return RowRing(
        tiles, gl.allocate_shared_memory(gl.float32, [SIZE] + numbers.block_type.shape, numbers.layout), ready, free
    )


@aggregate
class WorkQueue:
    """The numbers of the pieces of work that this program takes.

    With STAY it draws the next one once the previous one's loads are issued, so that loads overlap its end; otherwise
    it has only one. For packed sequences the other warps get the piece's record instead of its number.
    """

    numbers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAY: gl.constexpr
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, ready, free, STAY, PACKED):
        self.numbers = numbers
        self.ready = ready
        self.free = free
        self.STAY = gl.constexpr(STAY)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def draw(self, n, counter):
        item = gl.program_id(0)
        if self.STAY:
            item = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
            if not self.PACKED:
                mbarrier.wait(self.free.index(n & 1), ((n >> 1) & 1) ^ 1)
                self.numbers.index(n & 1).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
                mbarrier.arrive(self.ready.index(n & 1), count=1)
        return item

    @gluon.jit
    def write(self, n, head, k_start, low, blocks, block_base, k_offset, columns, shift):
        """For packed sequences: writes the program's n-th piece. An invalid head marks the end."""
        mbarrier.wait(self.free.index(n & 1), ((n >> 1) & 1) ^ 1)
        write_record(self.numbers, n, head, k_start, low, blocks, block_base, k_offset, columns, shift)
        mbarrier.arrive(self.ready.index(n & 1), count=1)

    @gluon.jit
    def take(self, n):
        """Returns the number of the n-th piece; for packed sequences its head, and `read` returns the rest."""
        item = gl.program_id(0)
        if self.PACKED:
            mbarrier.wait(self.ready.index(n & 1), (n >> 1) & 1)
            item = field_of(self.numbers.index(n & 1).load(gl.BlockedLayout([8], [32], [4], [0])), 0)
        elif self.STAY:
            mbarrier.wait(self.ready.index(n & 1), (n >> 1) & 1)
            item = gl.max(self.numbers.index(n & 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(self.free.index(n & 1), count=1)
        return item

    @gluon.jit
    def read(self, n):
        fields = read_record(self.numbers, n)
        mbarrier.arrive(self.free.index(n & 1), count=1)
        return fields


@gluon.jit
def make_queue(STAY: gl.constexpr, PACKED: gl.constexpr):
    drawn, taken = make_barriers(2, 1), make_barriers(2, KEYS + 1)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 8 if PACKED else 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return WorkQueue(numbers, drawn, taken, STAY, PACKED)


@gluon.jit
def load_keys(source, buffer, n, work, TILES: gl.constexpr):
    """Loads a piece's keys or values, once the n-th piece's are free."""
    mbarrier.wait(buffer.free, (n & 1) ^ 1)
    mbarrier.expect(buffer.ready, TILES * source.block_type.nbytes)
    for w in gl.static_range(TILES):
        load(source, work.keys(work.k_start + w * ROWS), buffer.ready, buffer.tiles.index(w))


@gluon.jit
def producer(maps, memory, counter, listed, scheduler):
    """The producer warp, which fills shared memory."""
    TILES: gl.constexpr = memory.k.tiles.type.shape[0]
    n, done = 0, 0
    pieces = scheduler.count(listed)
    item = memory.queue.draw(0, counter)
    while item < pieces:
        work = scheduler.find(item, listed)
        if scheduler.PACKED:
            own = work.scheduler
            memory.queue.write(
                n, work.head, work.k_start, work.low, work.blocks, work.block_base, work.k_offset, own.columns,
                own.shift
            )  # fmt: skip
        some = work.blocks > 0
        block = work.block(0)
        if some:
            memory.q.fill(maps.q, maps.lse, done, work.queries(0, block), work.number(0, block, scheduler.tiles))
        load_keys(maps.k, memory.k, n, work, TILES)
        if some:
            memory.do.fill(maps.do, maps.delta, done, work.queries(0, block), work.number(0, block, scheduler.tiles))
        load_keys(maps.v, memory.v, n, work, TILES)
        for g in range(scheduler.RULES.GROUP):
            for t in range(gl.where(g == 0, 1, 0), work.blocks):
                block = work.block(t)
                at = work.number(g, block, scheduler.tiles)
                memory.q.fill(maps.q, maps.lse, done + t, work.queries(g, block), at)
                memory.do.fill(maps.do, maps.delta, done + t, work.queries(g, block), at)
            done += work.blocks
        n += 1
        item = memory.queue.draw(n, counter) if memory.queue.STAY else pieces
    if scheduler.PACKED:
        memory.queue.write(n, scheduler.pieces, 0, 0, 0, 0, 0, 0, 0)
