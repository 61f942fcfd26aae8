"""What attention's kernels on Hopper are made of: rings in shared memory and their barriers, ragged tensor maps, halves of registers,
products in two parts; and, backward, pieces of work handed out, additions by the copy engine and their order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from ridgeline.cuda import TensorMap

_load: gl.constexpr = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store: gl.constexpr = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier: gl.constexpr = getattr(gl, "barrier", None) or gl.thread_barrier
ROWS = gl.constexpr(64)  # queries of a group of warps: as many as a matrix instruction takes
FAR = gl.constexpr(TensorMap.FAR)
KEYS = gl.constexpr(
    2
)  # backward's groups of warps that read keys' tiles: with 64 keys each to D 128, with the same 64 beyond


@builtin
def _reduce(desc, coord, src, _semantic=None):
    """The copy engine adds a tile in shared memory to one in memory. (Triton before 3.9 has no Python name for it.)"""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.constexpr_function
def _bits(size):
    return size.bit_length() - 1


@gluon.jit
def _place(n, SIZE: gl.constexpr):
    """Where in a ring of that size the n-th thing lies, and whether its round is odd."""
    if SIZE & (SIZE - 1):
        place, odd = n % SIZE, (n // SIZE) & 1
    else:  # fewer instructions than for numbers with a sign
        place, odd = n & (SIZE - 1), (n >> _bits(SIZE)) & 1
    return place, odd


@aggregate
class Ring:
    """Tiles in shared memory that one warp fills and others read and free, in turn. A tile (1, 1, rows, D) is read as (rows, D)."""

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
        """Says that the n-th tile is there, and leaves it as it is."""
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
    """A number that all threads of a warp have, as the compiler then knows too."""
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _in(begin, length, row):
    """Where a row of a sequence is in a ragged tensor map (`TensorMap`), by its first two coordinates and its last but one."""
    return FAR, begin + length, FAR - length + row


@gluon.jit
def _write(board, n, head, row, low, high, begin, rows, columns, shift):
    """What groups of warps must know of the n-th tile; `_read` gives it."""
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
    """What `_write` wrote; without ALL the last three, which a dense call has as arguments, are 0."""
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
        """The n-th tile, that was waited for before."""
        place, _ = _place(n, self.SIZE)
        return _flat(self.tiles.index(place))

    @gluon.jit
    def number(self, n, layout: gl.constexpr):
        place, _ = _place(n, self.SIZE)
        return self.numbers.index(place).reshape([ROWS]).load(layout)

    @gluon.jit
    def take_number(self, n, layout: gl.constexpr):
        """The numbers of the n-th tile's rows, once both are there."""
        self.take(n)
        return self.number(n, layout)

    @gluon.jit
    def give(self, n):
        place, _ = _place(n, self.SIZE)
        mbarrier.arrive(self.free.index(place), count=1)


@gluon.jit
def _rows(source, numbers, SIZE: gl.constexpr, free=None):
    """With `free` given, another ring's, places of both are given back together, by that one's `give`."""
    ready = _counters(SIZE, 1)
    if free is None:
        free = _counters(SIZE, KEYS)
    tiles = gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout)
    return Rows(
        tiles, gl.allocate_shared_memory(gl.float32, [SIZE] + numbers.block_type.shape, numbers.layout), ready, free
    )


@gluon.jit
def _counters(SIZE: gl.constexpr, COUNT: gl.constexpr):
    """As many barriers, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SIZE):
        mbarrier.init(made.index(n), count=COUNT)
    return made


@gluon.jit
def _barriers(SIZE: gl.constexpr, FILLS: gl.constexpr, READERS: gl.constexpr):
    return _counters(SIZE, FILLS), _counters(SIZE, READERS)


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
class Told:
    """Numbers of blocks of queries, from the group of warps that adds to dQ to the warp that tells other programs of it."""

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
        """The n-th number, once all but the last so many things that the copy engine was told to write are written."""
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
    """Shared memory: rings of q and do, a tile of k and of v for each group of warps, rings of dS, the numbers of pieces, and what of dQ
    has been added to."""

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
    """Neighbours of a row as one register of two: single halves, carried around a loop, take a register each and two moves more."""
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
    """Two to a register, as the left side of a product."""
    even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


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
def _scores(q, keys, zero, REST: gl.constexpr):
    """Starts q K^T; with REST of half of the dimensions and so many more, since what is beyond is zeros."""
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
    """A number in memory, as it may have been some time ago."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [place.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _await(place, count, seen):
    """Until a number in memory, that was `seen` before, is at least `count`."""
    code: gl.constexpr = "{ .reg .pred p; setp.ge.s32 p, $3, $2; @p bra past; again: ld.acquire.gpu.global.s32 $0, [$1]; setp.lt.s32 p, $0, $2; @p bra again; past: }"
    gl.inline_asm_elementwise(
        code, "=&r,l,r,r", [place.to(gl.int64), count, seen], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _awaiting(but):
    return f"cp.async.bulk.wait_group {but}; mov.u32 $0, 0;"


@gluon.jit
def _added(BUT: gl.constexpr):
    """Until all but the last so many things that the copy engine was told to write are written, as this program sees it."""
    code: gl.constexpr = _awaiting(BUT)
    gl.inline_asm_elementwise(code, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    _barrier()


@gluon.jit
def _as_held(sums):
    """A tile of (64, W) in the order in which the threads hold it, as (2 W, 32): four numbers of a thread lie together, and its warp's
    threads one after the other, so that no two of them write to one bank. `_in_rows` undoes it."""
    W: gl.constexpr = sums.shape[1]
    held = sums.reshape([4, 2, 8, W // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))  # warp, half, row, eight columns, two, one
    return held.reshape([2 * W, 32])


@gluon.jit
def _add(dq, dq_sums, at, room, before):
    """A tile of dQ goes to its sums in memory, by way of a room in shared memory."""
    room.reshape([room.shape[1], 32]).slice(0, 2 * dq.shape[1], 0).store(_as_held(dq))
    fence_async_shared()
    if before == 0:
        _store(dq_sums, at, room)
    else:
        _reduce(dq_sums, at, room)
