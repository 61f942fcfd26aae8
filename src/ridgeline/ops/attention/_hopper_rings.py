"""What the backward on Hopper is made of: rings in shared memory and their barriers, pieces of work handed out, additions by the copy
engine and their order, halves of registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention._hopper import ROWS, _barrier, _field, _load, _place, _read, _write

_memory = gl.shared_memory_descriptor
_reinterpret: gl.constexpr = getattr(_memory, "_reinterpret", None) or _memory.reinterpret  # Triton 3.9 renamed it
KEYS = gl.constexpr(2)  # groups of warps with 64 keys each


@builtin
def _reduce(desc, coord, src, _semantic=None):
    """The copy engine adds a tile in shared memory to one in memory. (Triton before 3.9 has no Python name for it.)"""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _flat(tile):
    return tile.reshape([tile.type.shape[-2], tile.type.shape[-1]])


@aggregate
class Rows:
    """A ring of tiles of q or do, and a number of each row beside them."""

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
    def fill(self, source, numbers, n, rows, at):
        place, odd = _place(n, self.SIZE)
        mbarrier.wait(self.free.index(place), odd ^ 1)
        mbarrier.expect(self.ready.index(place), source.block_type.nbytes + numbers.block_type.nbytes)
        _load(source, rows, self.ready.index(place), self.tiles.index(place))
        _load(numbers, [at, 0], self.ready.index(place), self.numbers.index(place))

    @gluon.jit
    def take(self, n):
        place, odd = _place(n, self.SIZE)
        mbarrier.wait(self.ready.index(place), odd)
        return _flat(self.tiles.index(place))

    @gluon.jit
    def number(self, n, layout: gl.constexpr):
        place, _ = _place(n, self.SIZE)
        return self.numbers.index(place).reshape([ROWS]).load(layout)

    @gluon.jit
    def give(self, n):
        place, _ = _place(n, self.SIZE)
        mbarrier.arrive(self.free.index(place), count=1)


@gluon.jit
def _rows(source, numbers, SIZE: gl.constexpr):
    ready, free = _barriers(SIZE, 1, KEYS)
    tiles = gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout)
    return Rows(tiles, gl.allocate_shared_memory(gl.float32, [SIZE] + numbers.block_type.shape, numbers.layout), ready, free)


@gluon.jit
def _barriers(SIZE: gl.constexpr, FILLS: gl.constexpr, READERS: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SIZE):
        mbarrier.init(ready.index(n), count=FILLS)
        mbarrier.init(free.index(n), count=READERS)
    return ready, free


@aggregate
class Tickets:
    """The numbers of the pieces of work that this program takes: with STAY it draws the next when it has fetched what the one before
    needs, so that it loads while it ends; else it has one. Of packed sequences others do not get the number, but what the piece is."""

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
    def write(self, n, head, first, low, blocks, base, begins, columns, shift):
        """Of packed sequences: the program's n-th piece. A head that is no head is the end."""
        mbarrier.wait(self.free.index(n & 1), ((n >> 1) & 1) ^ 1)
        _write(self.numbers, n, head, first, low, blocks, base, begins, columns, shift)
        mbarrier.arrive(self.ready.index(n & 1), count=1)

    @gluon.jit
    def take(self, n):
        """The number of the n-th piece; of packed sequences its head, and `read` gives all."""
        item = gl.program_id(0)
        if self.PACKED:
            mbarrier.wait(self.ready.index(n & 1), (n >> 1) & 1)
            item = _field(self.numbers.index(n & 1).load(gl.BlockedLayout([8], [32], [4], [0])), 0)
        elif self.STAY:
            mbarrier.wait(self.ready.index(n & 1), (n >> 1) & 1)
            item = gl.max(self.numbers.index(n & 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(self.free.index(n & 1), count=1)
        return item

    @gluon.jit
    def read(self, n):
        fields = _read(self.numbers, n)
        mbarrier.arrive(self.free.index(n & 1), count=1)
        return fields


@aggregate
class Memory:
    """Shared memory: rings of q and do, a tile of k and of v for each group of warps, rings of dS, and the numbers of pieces."""

    qs: Rows
    dos: Rows
    ks: gl.shared_memory_descriptor
    vs: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    ds_ready: gl.shared_memory_descriptor
    ds_free: gl.shared_memory_descriptor
    tickets: Tickets

    @gluon.constexpr_function
    def __init__(self, qs, dos, ks, vs, k_ready, k_free, v_ready, v_free, ds, ds_ready, ds_free, tickets):
        self.qs = qs
        self.dos = dos
        self.ks = ks
        self.vs = vs
        self.k_ready = k_ready
        self.k_free = k_free
        self.v_ready = v_ready
        self.v_free = v_free
        self.ds = ds
        self.ds_ready = ds_ready
        self.ds_free = ds_free
        self.tickets = tickets


@gluon.jit
def _singles(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Two to a register, in float32."""
    if dtype == gl.bfloat16:
        even = (packed << 16).to(gl.float32, bitcast=True)
        odd = (packed & -65536).to(gl.float32, bitcast=True)
    else:
        even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


@gluon.jit
def _look(place):
    """A number in memory, as it may have been some time ago."""
    return gl.inline_asm_elementwise("ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [place.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _await(place, count, seen):
    """Until a number in memory, that was `seen` before, is at least `count`."""
    code: gl.constexpr = "{ .reg .pred p; setp.ge.s32 p, $3, $2; @p bra past; again: ld.acquire.gpu.global.s32 $0, [$1]; setp.lt.s32 p, $0, $2; @p bra again; past: }"  # fmt: skip
    gl.inline_asm_elementwise(code, "=&r,l,r,r", [place.to(gl.int64), count, seen], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _added(BUT: gl.constexpr):
    """Until all but the last so many things that the copy engine was told to write are written, and others see them."""
    if BUT == 0:
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    elif BUT == 1:
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 1; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.static_assert(BUT == 2)
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 2; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    _barrier()
