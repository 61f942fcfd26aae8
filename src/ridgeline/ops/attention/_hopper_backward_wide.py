"""The backward of attention's `gluon` for D from 200 to 256: three warpgroups with one sum each.

A piece of work is 64 keys. dK and dV take 128 registers per thread each, so no group can hold both. The first group
computes the scores, the probabilities and dV. The second reads the probabilities from shared memory and computes dP, dS
and dK. The third computes dQ from dS, as for narrower heads: five products again. Data between groups has shared memory
of its own: all threads write it, a proxy fence follows, every reader waits at a barrier, and it is free again once the
reader has it in registers or its product has ended.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.ops.attention._hopper_pieces import Call, _fetch, _piece, _queries, _tell
from ridgeline.ops.attention._hopper_rings import (
    KEYS,
    ROWS,
    Memory,
    Ring,
    Tickets,
    _barriers,
    _flat,
    _halves,
    _pack,
    _place,
    _rows,
    _scores,
    _singles,
    _store,
    _told,
)


@gluon.jit
def _lain(pairs):
    """Reorders pairs of a tile (64, 64), as (64, 32), to the order in which a product's threads hold them.

    Four pairs of a thread are adjacent, then the threads of its warp follow. `_stood` undoes it.
    """
    return pairs.reshape([4, 2, 8, 4, 2, 4]).permute((3, 0, 2, 5, 4, 1)).reshape([ROWS, ROWS // 2])


@gluon.jit
def _stood(lain, like):
    return gl.convert_layout(
        lain.reshape([4, 4, 8, 4, 2, 2]).permute((1, 5, 2, 0, 4, 3)).reshape([ROWS, ROWS // 2]), like.type.layout
    )


@gluon.jit
def _values(dv_out, here, given, call):
    """The first group: the probabilities, which it passes on, and dV."""
    D: gl.constexpr = dv_out.block_type.shape[-1]
    dtype: gl.constexpr = dv_out.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16]
    )
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    k = _flat(here.ks.index(0))
    item = here.tickets.take(0)
    if item < call.pieces:
        work = _piece(here, 0, item, call)
        dv = gl.zeros([ROWS, D], gl.float32, d_layout)
        mbarrier.wait(here.k_ready, 0)
        within = 0
        for done in range(call.GROUP * work.blocks):
            row = work.block(within) * ROWS
            within = gl.where(within + 1 == work.blocks, 0, within + 1)
            q = here.qs.take(done)
            scores = _scores(k, q, zero, 0)
            top = here.qs.number(done, gl.SliceLayout(0, s_layout))
            s = warpgroup_mma_wait(0, deps=(scores,))
            p = gl.exp2(s * call.factor - top[None, :])
            if work.edge(row):
                p = work.hide(p, row, work.first)
            packed = _pack(p, dtype)
            do = here.dos.take(done)
            dv_next = warpgroup_mma(_halves(packed, dtype, gl.DotOperandLayout(0, d_layout, 2)), do, dv, is_async=True)
            given.await_free(done)
            given.tile(done).store(_lain(packed))
            fence_async_shared()
            given.end(done)
            here.qs.give(done)
            dv = warpgroup_mma_wait(0, deps=(dv_next,))
            here.dos.give(done)
        total = call.GROUP * work.blocks
        here.dos.await_free(total)  # memory that nobody will fill
        place, _ = _place(total, here.dos.SIZE)
        _flat(here.dos.tiles.index(place)).store(dv.to(dtype))
        fence_async_shared()
        _store(dv_out, work.keys(work.first), here.dos.tiles.index(place))
        tma.store_wait(0)


@gluon.jit
def _slopes(dk_out, here, given, call):
    """The second group: dS from the given probabilities, and dK."""
    D: gl.constexpr = dk_out.block_type.shape[-1]
    STAGES: gl.constexpr = here.ds.type.shape[0]
    dtype: gl.constexpr = dk_out.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D // 2, 16]
    )
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    pairs = _pack(zero, dtype)
    lain: gl.constexpr = _lain(pairs).type.layout
    v = _flat(here.vs.index(0))
    item = here.tickets.take(0)
    if item < call.pieces:
        work = _piece(here, 0, item, call)
        dk = gl.zeros([ROWS, D], gl.float32, d_layout)
        mbarrier.wait(here.v_ready, 0)
        for done in range(call.GROUP * work.blocks):
            do = here.dos.take(done)
            products = _scores(v, do, zero, 0)
            delta = here.dos.number(done, gl.SliceLayout(0, s_layout))
            p = _stood(given.take(done).load(lain), pairs)
            dp = warpgroup_mma_wait(0, deps=(products,))
            ds = (_singles(p, dtype, s_layout) * (dp - delta[None, :])).to(dtype)
            place, odd = _place(done, STAGES)
            mbarrier.wait(here.ds_free.index(place), odd ^ 1)
            here.ds.index(place).store(ds)
            fence_async_shared()
            mbarrier.arrive(here.ds_ready.index(place), count=1)
            given.give(done)
            here.dos.give(done)
            q = here.qs.take(done)
            dk_next = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, d_layout, 2)), q, dk, is_async=True)
            dk = warpgroup_mma_wait(0, deps=(dk_next,))
            here.qs.give(done)
        v.store((dk * call.scale).to(dtype))  # in v's place, which only this group reads
        fence_async_shared()
        _store(dk_out, work.keys(work.first), here.vs.index(0))
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["pieces", "heads", "section", "turns", "tiles", "columns", "shift", "left", "right"])
def _bwd_wide(
    order, listed, queries, keys, values, do, dk_out, dv_out, dq_sums, tops, deltas, pieces, heads, section, turns,
    tiles, columns, shift, left, right, scale, factor, LEFT: gl.constexpr, RIGHT: gl.constexpr, DOWN: gl.constexpr,
    GROUP: gl.constexpr, ORDERED: gl.constexpr
):  # fmt: skip
    PACKED: gl.constexpr = listed is not None
    dtype: gl.constexpr = queries.dtype
    qs = _rows(queries, tops, 2)
    dos = _rows(do, deltas, 2)
    ks = gl.allocate_shared_memory(dtype, [1] + keys.block_type.shape, keys.layout)
    vs = gl.allocate_shared_memory(dtype, [1] + values.block_type.shape, values.layout)
    ds = gl.allocate_shared_memory(dtype, [1, ROWS, ROWS], gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype))
    pairs = gl.allocate_shared_memory(gl.int32, [1, ROWS, ROWS // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    rooms = gl.allocate_shared_memory(gl.float32, [2] + dq_sums.block_type.shape, dq_sums.layout)
    ds_ready, ds_free = _barriers(1, 1, 1)
    given_ready, given_free = _barriers(1, 1, 1)
    k_ready, k_free = _barriers(1, 1, 2)
    v_ready, v_free = _barriers(1, 1, 1)
    drawn, taken = _barriers(2, 1, KEYS + 1)
    board = gl.allocate_shared_memory(gl.int32, [2, 8 if PACKED else 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tickets = Tickets(board, drawn, taken, False, PACKED)
    here = Memory(
        qs,
        dos,
        ks,
        vs,
        k_ready.index(0),
        k_free.index(0),
        v_ready.index(0),
        v_free.index(0),
        ds,
        ds_ready,
        ds_free,
        tickets,
        _told(),
    )
    given = Ring(pairs, given_ready, given_free)
    fence_async_shared()
    call = Call(
        pieces,
        pieces,
        pieces,
        heads,
        section,
        turns,
        tiles,
        columns,
        shift,
        left,
        right,
        scale,
        factor,
        LEFT,
        RIGHT,
        DOWN,
        GROUP,
        PACKED,
        ROWS,
        False,
    )
    gl.warp_specialize(
        [
            (_values, (dv_out, here, given, call)),
            (_slopes, (dk_out, here, given, call)),
            (_queries, (64, dq_sums, rooms, here, order + 1, call, ORDERED, 0)),
            (_fetch, (queries, do, tops, deltas, keys, values, here, order, listed, call)),
            (_tell, (order + 1, here.told)),
        ],
        [4, 4, 1, 1],
        [208, 72, 24, 24],
    )
