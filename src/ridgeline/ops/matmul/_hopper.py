"""The rung `gluon` of the matrix products: Hopper, by warps with parts of their own.

One warp fetches tiles of a and b by the copy engine (TMA) into a ring of shared memory; two or three groups of four warps share a tile of
b, have rows of a each, and keep their sums in registers. Programs stay: while a group turns its sums into results and sends them off, in
chunks of 128 bytes a row, the others multiply and the ring fills for the next tile. For that the groups begin apart, LAG steps of
K from one to the next, and stay so. Edges are the engine's: zeros are read beyond them, and nothing is written there.

Where tiles would leave multiprocessors idle, K is split: each part's sums go to memory in float32, and `_sum` adds them up in order.
Source: the scheme is that of CUTLASS's warp-specialised persistent kernels (NVIDIA, 2023), there with pairs of blocks that share loads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.op import dtype_name

_load: gl.constexpr = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store: gl.constexpr = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
BK = gl.constexpr(64)  # elements of K a step: a row of 128 bytes, over which the engine swizzles


@aggregate
class Tiles:
    """Which tiles a program computes: every so many-th, in bands of GROUP rows of tiles, so that those that run share what L2 holds; all
    tiles of a part of K before the next part's, all of a matrix of the batch before the next one's."""

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
        """A tile's first row and column, its matrix in the batch, its part, and the steps of K from and up to which that goes."""
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
    """Steps of K in shared memory, for each a tile of b and of every group's rows of a; one warp fills them, all groups read and free."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    GROUPS: gl.constexpr
    A_BY_K: gl.constexpr  # whether rows in memory are along K
    B_BY_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, ready, free, GROUPS, A_BY_K, B_BY_K):
        self.a = a
        self.b = b
        self.ready = ready
        self.free = free
        self.STAGES = gl.constexpr(ready.type.shape[0])
        self.GROUPS = gl.constexpr(GROUPS)
        self.A_BY_K = gl.constexpr(A_BY_K)
        self.B_BY_K = gl.constexpr(B_BY_K)

    @gluon.jit
    def after(self, place, odd):
        """The next place, and whether its round is odd."""
        place += 1
        end = place == self.STAGES
        return gl.where(end, 0, place), odd ^ end.to(gl.int32)

    @gluon.jit
    def left(self, place, ME: gl.constexpr):
        tile = self.a.index(place * self.GROUPS + ME)
        tile = tile.reshape([tile.shape[1], tile.shape[2]])
        return tile if self.A_BY_K else tile.permute((1, 0))

    @gluon.jit
    def right(self, place):
        tile = self.b.index(place)
        tile = tile.reshape([tile.shape[1], tile.shape[2]])
        return tile.permute((1, 0)) if self.B_BY_K else tile

    @gluon.jit
    def give(self, place):
        mbarrier.arrive(self.free.index(place), count=1)


@gluon.jit
def _at(batch, line, k, BY_K: gl.constexpr):
    return (batch, line, k) if BY_K else (batch, k, line)


@gluon.jit
def _fetch(a, b, a_step, b_step, ring, tiles):
    """The warp that fills the ring. A matrix that the whole batch shares has a step of 0."""
    ROWS: gl.constexpr = tiles.BM // ring.GROUPS
    place, odd = 0, 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n, batch, _part, low, high = tiles.place(t)
        for step in range(low, high):
            mbarrier.wait(ring.free.index(place), odd ^ 1)
            ready = ring.ready.index(place)
            mbarrier.expect(ready, ring.GROUPS * a.block_type.nbytes + b.block_type.nbytes)
            for g in gl.static_range(ring.GROUPS):
                _load(a, _at(batch * a_step, m + g * ROWS, step * BK, ring.A_BY_K), ready, ring.a.index(place * ring.GROUPS + g))
            _load(b, _at(batch * b_step, n, step * BK, ring.B_BY_K), ready, ring.b.index(place))
            place, odd = ring.after(place, odd)


@gluon.jit
def _chunks(x, COUNT: gl.constexpr):
    """A tensor's columns in so many pieces."""
    if COUNT == 1:
        return (x,)
    else:  # noqa: RET505  # the compiler reads on past a return
        left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        return _chunks(left, COUNT // 2) + _chunks(right, COUNT // 2)


@gluon.jit
def _multiply(ME: gl.constexpr, y, out, ring, boards, tiles, LAG: gl.constexpr):
    """A group of warps: its rows of all tiles of this program. `boards` are where results wait for the engine, some for each group."""
    ROWS: gl.constexpr = tiles.BM // ring.GROUPS
    BN: gl.constexpr = tiles.BN
    CHUNK: gl.constexpr = boards.type.shape[-1]
    BOARDS: gl.constexpr = boards.type.shape[0] // ring.GROUPS
    dtype: gl.constexpr = boards.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    place, odd = 0, 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n, batch, part, low, high = tiles.place(t)
        if ME * LAG > 0 and t == gl.program_id(0):
            mbarrier.wait(ring.ready.index(gl.minimum(ME * LAG, high - low - 1)), 0)
        acc = gl.zeros([ROWS, BN], gl.float32, layout)
        mbarrier.wait(ring.ready.index(place), odd)
        sums = warpgroup_mma(ring.left(place, ME), ring.right(place), acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(sums,))
        for _ in range(low + 1, high):
            before = place
            place, odd = ring.after(place, odd)
            mbarrier.wait(ring.ready.index(place), odd)
            sums = warpgroup_mma(ring.left(place, ME), ring.right(place), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(sums,))
            ring.give(before)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        ring.give(place)
        place, odd = ring.after(place, odd)
        pieces = _chunks(acc, BN // CHUNK)
        for c in gl.static_range(BN // CHUNK):
            board = boards.index(ME * BOARDS + c % BOARDS)
            tma.store_wait(BOARDS - 1)
            board.reshape([ROWS, CHUNK]).store(pieces[c].to(dtype))
            fence_async_shared()
            _store(out, [part * tiles.batch + batch, m + ME * ROWS, n + c * CHUNK], board)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "batch", "parts", "a_step", "b_step"])
def _fwd(y, out, a, b, M, N, steps, batch, parts, a_step, b_step, A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BOARDS: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr):  # fmt: skip
    tiles = Tiles(M, N, steps, batch, parts, GROUPS * ROWS, BN, GROUP)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(free.index(n), count=GROUPS)
    a_tiles = gl.allocate_shared_memory(a.dtype, [GROUPS * STAGES] + a.block_type.shape, a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    ring = Ring(a_tiles, b_tiles, ready, free, GROUPS, A_BY_K, B_BY_K)
    boards = gl.allocate_shared_memory(out.dtype, [GROUPS * BOARDS] + out.block_type.shape, out.layout)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, y, out, ring, boards, tiles, LAG)),
                (_multiply, (1, y, out, ring, boards, tiles, LAG)),
                (_fetch, (a, b, a_step, b_step, ring, tiles)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, y, out, ring, boards, tiles, LAG)),
                (_multiply, (1, y, out, ring, boards, tiles, LAG)),
                (_multiply, (2, y, out, ring, boards, tiles, LAG)),
                (_fetch, (a, b, a_step, b_step, ring, tiles)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
