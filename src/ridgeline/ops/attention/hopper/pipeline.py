"""The pipeline between the producer warp and the consumers: rings of tiles in shared memory, and records of tiles.

A warp fills a place of a ring with TMA, whose end completes the barrier `ready`. Each consumer then arrives at `free`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ridgeline.tiles.hopper import barrier, load, make_barriers
from ridgeline.tiles.warpgroup import uniform

ROWS = gl.constexpr(64)  # queries per warpgroup: the rows of a matrix instruction


@gluon.constexpr_function
def log2_of(size):
    return size.bit_length() - 1


@gluon.jit
def ring_place(n, SIZE: gl.constexpr):
    """Returns the n-th item's place in a ring of SIZE, and whether its round is odd."""
    if SIZE & (SIZE - 1):
        place, odd = n % SIZE, (n // SIZE) & 1
    else:  # unsigned division takes fewer instructions
        place, odd = n & (SIZE - 1), (n >> log2_of(SIZE)) & 1
    return place, odd


@aggregate
class Ring:
    """A ring of tiles in shared memory: one warp fills, others release. A tile (1, 1, rows, D) is read as (rows, D)."""

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, ready, free):
        self.tiles = tiles
        self.ready = ready
        self.free = free
        self.SIZE = gl.constexpr(tiles.type.shape[0])

    @gluon.jit
    def await_free(self, n):
        place, odd = ring_place(n, self.SIZE)
        mbarrier.wait(self.free.index(place), odd ^ 1)

    @gluon.jit
    def fill(self, source, n, at):
        self.await_free(n)
        place, _ = ring_place(n, self.SIZE)
        mbarrier.expect(self.ready.index(place), source.block_type.nbytes)
        load(source, at, self.ready.index(place), self.tiles.index(place))

    @gluon.jit
    def end(self, n):
        """Marks the n-th tile as filled without loading anything."""
        place, _ = ring_place(n, self.SIZE)
        mbarrier.arrive(self.ready.index(place), count=1)

    @gluon.jit
    def tile(self, n):
        """Returns the n-th tile, which `take` has waited for."""
        place, _ = ring_place(n, self.SIZE)
        return self.tiles.index(place).reshape([self.tiles.type.shape[-2], self.tiles.type.shape[-1]])

    @gluon.jit
    def take(self, n, wanted=True):
        """Waits until the n-th tile is filled, and returns it."""
        place, odd = ring_place(n, self.SIZE)
        mbarrier.wait(self.ready.index(place), odd, pred=wanted)
        return self.tile(n)

    @gluon.jit
    def release(self, n, wanted=True):
        place, _ = ring_place(n, self.SIZE)
        mbarrier.arrive(self.free.index(place), count=1, pred=wanted)


@gluon.jit
def make_ring(source, SIZE: gl.constexpr, READERS: gl.constexpr):
    """Makes a ring of SIZE boxes of a tensor map, for so many readers."""
    ready, free = make_barriers(SIZE, 1), make_barriers(SIZE, READERS)
    return Ring(gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout), ready, free)


@gluon.jit
def write_record(records, n, head, row, low, high, start, rows, columns, shift):
    """Writes what consumers must know of the n-th tile, eight numbers; `read_record` reads them."""
    field = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    left = gl.where(field == 0, head, gl.where(field == 1, row, gl.where(field == 2, low, high)))
    right = gl.where(field == 4, start, gl.where(field == 5, rows, gl.where(field == 6, columns, shift)))
    records.index(n & 1).store(gl.where(field < 4, left, right))
    barrier()


@gluon.jit
def field_of(fields, N: gl.constexpr):
    number = gl.arange(0, 8, fields.type.layout)
    return uniform(gl.sum(gl.where(number == N, fields, 0), 0))


@gluon.jit
def read_record(records, n, ALL: gl.constexpr = True):
    """Reads what `write_record` wrote; without ALL the last three are 0, since a dense call has them as arguments."""
    fields = records.index(n & 1).load(gl.BlockedLayout([8], [32], [4], [0]))
    head, row, low = field_of(fields, 0), field_of(fields, 1), field_of(fields, 2)
    high, start = field_of(fields, 3), field_of(fields, 4)
    rows, columns, shift = 0, 0, 0
    if ALL:
        rows, columns, shift = field_of(fields, 5), field_of(fields, 6), field_of(fields, 7)
    return head, row, low, high, start, rows, columns, shift
