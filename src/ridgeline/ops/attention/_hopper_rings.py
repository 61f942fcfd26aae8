"""Building blocks of attention's Hopper kernels: rings in shared memory, barriers, ragged tensor maps, packed halves.

For backward also: the distribution of pieces of work, and TMA's additions and their order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from ridgeline.cuda import TensorMap

_load: gl.constexpr = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store: gl.constexpr = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier: gl.constexpr = getattr(gl, "barrier", None) or gl.thread_barrier
ROWS = gl.constexpr(64)  # queries per warpgroup: the rows of a matrix instruction
FAR = gl.constexpr(TensorMap.FAR)
KEYS = gl.constexpr(2)  # backward's groups that read tiles of keys: 64 keys each up to D 128, the same 64 above


@builtin
def _reduce(desc, coord, src, _semantic=None):
    """TMA adds a tile in shared memory to one in memory. (Triton before 3.9 has no Python name for it.)"""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.constexpr_function
def _bits(size):
    return size.bit_length() - 1


@gluon.jit
def _place(n, SIZE: gl.constexpr):
    """Returns the n-th item's place in a ring of SIZE, and whether its round is odd."""
    if SIZE & (SIZE - 1):
        place, odd = n % SIZE, (n // SIZE) & 1
    else:  # unsigned division takes fewer instructions
        place, odd = n & (SIZE - 1), (n >> _bits(SIZE)) & 1
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
        place, odd = _place(n, self.SIZE)
        mbarrier.wait(self.free.index(place), odd ^ 1)

    @gluon.jit
    def fill(self, source, n, at):
        self.await_free(n)
        place, _ = _place(n, self.SIZE)
        mbarrier.expect(self.ready.index(place), source.block_type.nbytes)
        _load(source, at, self.ready.index(place), self.tiles.index(place))

    @gluon.jit
    def end(self, n):
        """Marks the n-th tile as filled without loading anything."""
        place, _ = _place(n, self.SIZE)
        mbarrier.arrive(self.ready.index(place), count=1)

    @gluon.jit
    def tile(self, n):
        place, _ = _place(n, self.SIZE)
        return self.tiles.index(place).reshape([self.tiles.type.shape[-2], self.tiles.type.shape[-1]])

    @gluon.jit
    def take(self, n, wanted=True):
        place, odd = _place(n, self.SIZE)
        mbarrier.wait(self.ready.index(place), odd, pred=wanted)
        return self.tile(n)

    @gluon.jit
    def give(self, n, wanted=True):
        place, _ = _place(n, self.SIZE)
        mbarrier.arrive(self.free.index(place), count=1, pred=wanted)


@gluon.jit
def _ring(source, SIZE: gl.constexpr, READERS: gl.constexpr):
    ready, free = _barriers(SIZE, 1, READERS)
    return Ring(gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout), ready, free)


@gluon.jit
def _same(x):
    """Tells the compiler that all threads of a warp have the same number."""
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _in(begin, length, row):
    """Returns a sequence row's first two and last-but-one coordinates in a ragged tensor map (`TensorMap`)."""
    return FAR, begin + length, FAR - length + row


@gluon.jit
def _write(board, n, head, row, low, high, begin, rows, columns, shift):
    """Writes what the groups must know of the n-th tile; `_read` reads it."""
    field = gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    left = gl.where(field == 0, head, gl.where(field == 1, row, gl.where(field == 2, low, high)))
    right = gl.where(field == 4, begin, gl.where(field == 5, rows, gl.where(field == 6, columns, shift)))
    board.index(n & 1).store(gl.where(field < 4, left, right))
    _barrier()


@gluon.jit
def _field(fields, N: gl.constexpr):
    number = gl.arange(0, 8, fields.type.layout)
    return _same(gl.sum(gl.where(number == N, fields, 0), 0))


@gluon.jit
def _read(board, n, ALL: gl.constexpr = True):
    """Reads what `_write` wrote; without ALL the last three are 0, since a dense call has them as arguments."""
    fields = board.index(n & 1).load(gl.BlockedLayout([8], [32], [4], [0]))
    head, row, low, high, begin = (
        _field(fields, 0),
        _field(fields, 1),
        _field(fields, 2),
        _field(fields, 3),
        _field(fields, 4),
    )
    rows, columns, shift = 0, 0, 0
    if ALL:
        rows, columns, shift = _field(fields, 5), _field(fields, 6), _field(fields, 7)
    return head, row, low, high, begin, rows, columns, shift


@gluon.jit
def _flat(tile):
    return tile.reshape([tile.type.shape[-2], tile.type.shape[-1]])


@aggregate
class Rows:
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
        place, odd = _place(n, self.SIZE)
        mbarrier.wait(self.free.index(place), odd ^ 1)

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
        return self.tile(n)

    @gluon.jit
    def tile(self, n):
        """Returns the n-th tile, which `take` has waited for."""
        place, _ = _place(n, self.SIZE)
        return _flat(self.tiles.index(place))

    @gluon.jit
    def number(self, n, layout: gl.constexpr):
        place, _ = _place(n, self.SIZE)
        return self.numbers.index(place).reshape([ROWS]).load(layout)

    @gluon.jit
    def take_number(self, n, layout: gl.constexpr):
        """Waits for the n-th tile, and returns its rows' numbers."""
        self.take(n)
        return self.number(n, layout)

    @gluon.jit
    def give(self, n):
        place, _ = _place(n, self.SIZE)
        mbarrier.arrive(self.free.index(place), count=1)


@gluon.jit
def _rows(source, numbers, SIZE: gl.constexpr, free=None):
    """Makes the ring. free: another ring's barriers, whose `give` then releases both places together."""
    ready = _counters(SIZE, 1)
    if free is None:
        free = _counters(SIZE, KEYS)
    tiles = gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout)
    return Rows(
        tiles, gl.allocate_shared_memory(gl.float32, [SIZE] + numbers.block_type.shape, numbers.layout), ready, free
    )


@gluon.jit
def _counters(SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Makes SIZE barriers, each for COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SIZE):
        mbarrier.init(made.index(n), count=COUNT)
    return made


@gluon.jit
def _barriers(SIZE: gl.constexpr, FILLS: gl.constexpr, READERS: gl.constexpr):
    return _counters(SIZE, FILLS), _counters(SIZE, READERS)


@aggregate
class Tickets:
    """The numbers of the pieces of work that this program takes.

    With STAY it draws the next one once the previous one's loads are issued, so that loads overlap its end; otherwise
    it has only one. For packed sequences the other warps get the piece's description instead of its number.
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
    def write(self, n, head, first, low, blocks, base, begins, columns, shift):
        """For packed sequences: writes the program's n-th piece. An invalid head marks the end."""
        mbarrier.wait(self.free.index(n & 1), ((n >> 1) & 1) ^ 1)
        _write(self.numbers, n, head, first, low, blocks, base, begins, columns, shift)
        mbarrier.arrive(self.ready.index(n & 1), count=1)

    @gluon.jit
    def take(self, n):
        """Returns the number of the n-th piece; for packed sequences its head, and `read` returns the rest."""
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
class Told:
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
    def say(self, n, number, BUT: gl.constexpr):
        """Passes on the n-th number once all but the last BUT of TMA's writes are done."""
        mbarrier.wait(self.free.index(n & 1), ((n >> 1) & 1) ^ 1)
        self.numbers.index(n & 1).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        _added(BUT)
        mbarrier.arrive(self.ready.index(n & 1), count=1)

    @gluon.jit
    def hear(self, n):
        mbarrier.wait(self.ready.index(n & 1), (n >> 1) & 1)
        number = gl.max(self.numbers.index(n & 1).load(gl.BlockedLayout([1], [32], [1], [0])), 0)
        mbarrier.arrive(self.free.index(n & 1), count=1)
        return number


@gluon.jit
def _told():
    ready, free = _barriers(2, 1, 1)
    return Told(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), ready, free)


@aggregate
class Memory:
    """Shared memory: rings of q and do, each group's tile of k and of v, rings of dS, pieces, additions to dQ."""

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
    told: Told

    @gluon.constexpr_function
    def __init__(self, qs, dos, ks, vs, k_ready, k_free, v_ready, v_free, ds, ds_ready, ds_free, tickets, told):
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
        self.told = told


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """Packs two neighbours into a register: single halves carried around a loop take a register and two moves each."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    return packed


@gluon.jit
def _halves(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks two per register, as the left operand of a product."""
    even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


@gluon.jit
def _singles(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks two per register, to float32."""
    if dtype == gl.bfloat16:
        even = (packed << 16).to(gl.float32, bitcast=True)
        odd = (packed & -65536).to(gl.float32, bitcast=True)
    else:
        even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


@gluon.jit
def _scores(q, keys, zero, REST: gl.constexpr):
    """Starts q K^T; with REST over half of the dimensions and REST more, since the others are zeros."""
    if REST:
        HALF: gl.constexpr = q.shape[1] // 2
        s = warpgroup_mma(
            q.slice(0, HALF, 1), keys.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q.slice(HALF, REST, 1), keys.slice(HALF, REST, 1).permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s


@gluon.jit
def _look(place):
    """Loads a number from memory, relaxed: it may be old."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [place.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _await(place, count, seen):
    """Waits until a number in memory, `seen` before, is at least `count`."""
    code: gl.constexpr = (
        "{ .reg .pred p; setp.ge.s32 p, $3, $2; @p bra past; again: ld.acquire.gpu.global.s32 $0, [$1]; "
        "setp.lt.s32 p, $0, $2; @p bra again; past: }"
    )
    gl.inline_asm_elementwise(
        code, "=&r,l,r,r", [place.to(gl.int64), count, seen], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _awaiting(but):
    return f"cp.async.bulk.wait_group {but}; mov.u32 $0, 0;"


@gluon.jit
def _added(BUT: gl.constexpr):
    """Waits until all but the last BUT of TMA's writes are done, as this program sees them."""
    code: gl.constexpr = _awaiting(BUT)
    gl.inline_asm_elementwise(code, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    _barrier()


@gluon.jit
def _as_held(sums):
    """Reorders a tile (64, W) to (2 W, 32), the order in which threads hold it.

    Four numbers of a thread are adjacent, then the threads of its warp follow, which avoids bank conflicts. `_in_rows`
    undoes it.
    """
    W: gl.constexpr = sums.shape[1]
    held = sums.reshape([4, 2, 8, W // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))  # warp, half, row, eight columns, two, one
    return held.reshape([2 * W, 32])


@gluon.jit
def _add(dq, dq_sums, at, room, before):
    """Adds a tile of dQ to its sums in memory, through a buffer in shared memory."""
    room.reshape([room.shape[1], 32]).slice(0, 2 * dq.shape[1], 0).store(_as_held(dq))
    fence_async_shared()
    if before == 0:
        _store(dq_sums, at, room)
    else:
        _reduce(dq_sums, at, room)
