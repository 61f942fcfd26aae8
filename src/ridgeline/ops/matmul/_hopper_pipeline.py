"""What the Hopper kernels of matrix products share: which tiles a program has, the ring of loads, the stores of chunks.

One producer warp fills the ring with TMA; GROUPS consumer warpgroups empty it. `_hopper.py` tells how they overlap.
"""

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
from triton.language.core import _aggregate as aggregate

from ridgeline.tiles.hopper import load as _load
from ridgeline.tiles.hopper import store as _store

_reinterpret: gl.constexpr = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)
GROUPS = gl.constexpr(2)  # consumer groups of four warps


@aggregate
class Tiles:
    """The tiles that a program computes: every num_programs-th, in bands of GROUP rows of tiles for reuse in L2.

    The order is by matrix of the batch, then by part of K, then by tile.
    """

    M: gl.tensor
    N: gl.tensor
    steps: gl.tensor
    batch: gl.tensor
    parts: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    GROUP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, M, N, steps, batch, parts, BM, BN, GROUP):
        self.M = M
        self.N = N
        self.steps = steps
        self.batch = batch
        self.parts = parts
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def count(self):
        return gl.cdiv(self.M, self.BM) * gl.cdiv(self.N, self.BN) * self.parts * self.batch

    @gluon.jit
    def place(self, t):
        """Returns a tile's first row and column, its matrix, its part of K, and that part's steps [low, high)."""
        down, across = gl.cdiv(self.M, self.BM), gl.cdiv(self.N, self.BN)
        layer = t // (down * across)
        t -= layer * (down * across)
        first = t // (self.GROUP * across) * self.GROUP
        t -= first * across
        size = gl.minimum(down - first, self.GROUP)
        part = layer % self.parts
        low, high = part * self.steps // self.parts, (part + 1) * self.steps // self.parts
        return (first + t % size) * self.BM, t // size * self.BN, layer // self.parts, part, low, high


@aggregate
class Ring:
    """A ring of steps of K in shared memory: a tile of b (or two halves) and each group's rows of a per step."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    A_BY_K: gl.constexpr  # whether rows in memory are along K
    B_BY_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, ready, free, A_BY_K, B_BY_K):
        self.a = a
        self.b = b
        self.ready = ready
        self.free = free
        self.STAGES = gl.constexpr(ready.type.shape[0])
        self.A_BY_K = gl.constexpr(A_BY_K)
        self.B_BY_K = gl.constexpr(B_BY_K)

    @gluon.jit
    def after(self, place, odd):
        """Returns the next place, and whether its round is odd."""
        place += 1
        end = place == self.STAGES
        return gl.where(end, 0, place), odd ^ end.to(gl.int32)

    @gluon.jit
    def multiply(self, place, odd, acc, ME: gl.constexpr, ADD: gl.constexpr):
        """Waits for a step's tiles and starts their products."""
        mbarrier.wait(self.ready.index(place), odd)
        return warpgroup_mma(self.left(place, ME), self.right(place), acc, use_acc=ADD, is_async=True)

    @gluon.jit
    def left(self, place, ME: gl.constexpr):
        a = self.a.index(place * GROUPS + ME)
        a = a.reshape([a.shape[1], a.shape[2]])
        return a if self.A_BY_K else a.permute((1, 0))

    @gluon.jit
    def right(self, place, PIECE: gl.constexpr = 0, PIECES: gl.constexpr = 1):
        """Returns a step's columns, or one of PIECES equal parts of them."""
        shape: gl.constexpr = _shared_out(self.b.type.shape, self.STAGES, PIECES, self.B_BY_K)
        b = _reinterpret(self.b, self.b.dtype, shape, self.b.type.layout).index(place * PIECES + PIECE)
        b = b.reshape([b.shape[1], b.shape[2]])
        return b.permute((1, 0)) if self.B_BY_K else b

    @gluon.jit
    def add_up(self, place, odd, sums, low, high, ME: gl.constexpr):
        """Returns the sums over steps [low, high), whose first is already started, and the ring's next place."""
        acc = warpgroup_mma_wait(1, deps=(sums,))
        for _ in range(low + 1, high):
            before = place
            place, odd = self.after(place, odd)
            sums = self.multiply(place, odd, acc, ME, True)
            acc = warpgroup_mma_wait(1, deps=(sums,))
            self.give(before)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        self.give(place)
        place, odd = self.after(place, odd)
        return acc, place, odd

    @gluon.jit
    def give(self, place):
        mbarrier.arrive(self.free.index(place), count=1)


@gluon.constexpr_function
def _shared_out(shape, stages, pieces, by_k):
    """Returns a ring's shape with the `pieces` tiles of a step joined: rows, or columns by 128 bytes, are adjacent."""
    many = shape[0] // stages
    return (
        [stages * pieces, 1, many * shape[2] // pieces, shape[3]]
        if by_k
        else [stages * pieces, 1, shape[2], many * shape[3] // pieces]
    )


@gluon.jit
def make_ring(operands, tile: gl.constexpr, MORE: gl.constexpr = 0):
    """Makes the ring. MORE: arrivals at a step besides the producer warp's."""
    a, b, up = operands
    STAGES: gl.constexpr = tile.STAGES
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1 + MORE)
        mbarrier.init(free.index(n), count=GROUPS)
    a_tiles = gl.allocate_shared_memory(a.dtype, [GROUPS * STAGES] + a.block_type.shape, a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [(1 if up is None else 2) * STAGES] + b.block_type.shape, b.layout)
    return Ring(a_tiles, b_tiles, ready, free, tile.A_BY_K, tile.B_BY_K)


@gluon.jit
def _at(batch, line, k, BY_K: gl.constexpr):
    return (batch, line, k) if BY_K else (batch, k, line)


class Operands(NamedTuple):
    """The tensor maps of a product's operands. up: the second right-hand side of a gated unit, or None."""

    a: Any
    b: Any
    up: Any


class Tile(NamedTuple):
    """How a program multiplies: rows of a group, columns, the ring's stages, boards of a group, GROUP and LAG.

    A_BY_K, B_BY_K: whether the operands' rows in memory run along K.
    """

    ROWS: int
    BN: int
    STAGES: int
    BOARDS: int
    GROUP: int
    LAG: int
    A_BY_K: bool = True
    B_BY_K: bool = True


@gluon.jit
def fetch_tiles(operands, a_step, b_step, ring, tiles):
    """The producer warp, which fills the ring. A matrix shared by the whole batch has a step of 0."""
    a, b, up = operands
    ROWS: gl.constexpr = tiles.BM // GROUPS
    HALVES: gl.constexpr = 1 if up is None else 2
    BK: gl.constexpr = a.block_type.shape[2 if ring.A_BY_K else 1]  # rows of 128 bytes, TMA's swizzle
    place, odd = 0, 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n, batch, _part, low, high = tiles.place(t)
        for step in range(low, high):
            mbarrier.wait(ring.free.index(place), odd ^ 1)
            ready = ring.ready.index(place)
            mbarrier.expect(ready, GROUPS * a.block_type.nbytes + HALVES * b.block_type.nbytes)
            for g in gl.static_range(GROUPS):
                _load(
                    a,
                    _at(batch * a_step, m + g * ROWS, step * BK, ring.A_BY_K),
                    ready,
                    ring.a.index(place * GROUPS + g),
                )
            _load(b, _at(batch * b_step, n, step * BK, ring.B_BY_K), ready, ring.b.index(place * HALVES))
            if up is not None:
                _load(up, _at(batch * b_step, n, step * BK, ring.B_BY_K), ready, ring.b.index(place * HALVES + 1))
            place, odd = ring.after(place, odd)


@gluon.jit
def send_chunk(out, y, x, board, batch, m, n, M, N, PENDING: gl.constexpr):
    """Stores a chunk through a board in shared memory with TMA, once at most PENDING earlier stores are under way.

    If TMA cannot take the tensor's rows (out is None), the threads store them instead, coalesced.
    """
    ROWS: gl.constexpr = board.type.shape[1]
    CHUNK: gl.constexpr = board.type.shape[2]
    flat = board.reshape([ROWS, CHUNK])
    if out is None:
        flat.store(x.to(board.dtype))
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        i = m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        j = n + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
        gl.store(y + (batch.to(gl.int64) * M + i) * N + j, flat.load(layout), mask=(i < M) & (j < N))
    else:
        tma.store_wait(PENDING)
        flat.store(x.to(board.dtype))
        fence_async_shared()
        _store(out, [batch, m, n], board)
