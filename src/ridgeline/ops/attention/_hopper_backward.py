"""Backward of the rung `gluon` of attention: one pass on Hopper, five products.

A piece of work is 128 keys. Two groups of four warps have 64 of them each, with the sums of dK and dV in registers; tiles of 64 queries come
by the copy engine. Scores stand on their side, keys down, so that the probabilities and their gradients dS go from registers into the
products for dV and dK. dS also goes through shared memory to a third group, which multiplies it with K for all 128 keys and has the copy
engine add the result to dQ, in float32 in memory. No group waits for another in step: the tensor cores have work from three.
By default additions to a tile of dQ come in the order of the pieces' numbers, each waiting for the one before, so that reruns give the
same bits; at D <= 64 the last piece adds what memory holds to its own and writes dq, else a kernel makes dq of the sums afterwards.
`deterministic=False` adds as they come, but for short sequences at D <= 64, where the order costs nothing and spares that kernel.
Packed sequences' pieces come from a list (_packed.py), the heaviest sequences first.
Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), algorithm 2; Shah et al., FlashAttention-3, 2024 (arXiv:2407.08608), section 3.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.attention import _packed, _triton
from ridgeline.ops.attention._hopper import whole
from ridgeline.ops.attention._hopper_rings import (
    KEYS,
    ROWS,
    Memory,
    Tickets,
    _add,
    _added,
    _await,
    _barriers,
    _finish,
    _flat,
    _halves,
    _held,
    _in,
    _load,
    _look,
    _pack,
    _place,
    _rows,
    _same,
    _scores,
    _singles,
    _store,
)
from ridgeline.ops.attention._triton import UNBOUNDED, _head, _lies, _parts, _save, _start_delta, _steps, _unit


@aggregate
class Call:
    """What is the same for all pieces of work; of packed sequences, for those of one."""

    pieces: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    turns: gl.tensor
    tiles: gl.tensor  # blocks of queries of a head; of packed sequences of all there can be, or of one
    columns: gl.tensor
    shift: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    DOWN: gl.constexpr
    GROUP: gl.constexpr
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pieces, heads, section, turns, tiles, columns, shift, left, right, scale, LEFT, RIGHT, DOWN, GROUP, PACKED):
        self.pieces = pieces
        self.heads = heads
        self.section = section
        self.turns = turns
        self.tiles = tiles
        self.columns = columns
        self.shift = shift
        self.left = left
        self.right = right
        self.scale = scale
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.DOWN = gl.constexpr(DOWN)
        self.GROUP = gl.constexpr(GROUP)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def of(self, tiles, columns, shift):
        """This of a packed sequence of so many blocks of queries, keys, and keys more than queries where that matters."""
        return Call(self.pieces, self.heads, self.section, self.turns, tiles, columns, shift, self.left, self.right, self.scale, self.LEFT, self.RIGHT, self.DOWN, self.GROUP, self.PACKED)  # fmt: skip

    @gluon.jit
    def find(self, item, listed):
        """The piece of that number."""
        if self.PACKED:
            item = _same(item)
            at = listed + 8 + item // self.turns * 8
            tile, begins, columns = gl.load(at), gl.load(at + 2), gl.load(at + 3)  # all, before one is waited for
            begin, rows, number = gl.load(at + 4), gl.load(at + 5), gl.load(at + 6)
            item -= _same(tile) * self.turns
            begins, columns, begin, rows = _same(begins), _same(columns), _same(begin), _same(rows)
            base = begin // ROWS + _same(number)
            work = self.of(gl.cdiv(rows, ROWS), columns, self.shift * (columns - rows)).work(item, base, begin, rows, begins)
        else:
            work = self.work(item, item, item, item, item)  # the last four are of packed sequences alone
        return work

    @gluon.jit
    def work(self, item, base, begin, rows, begins):
        """The piece of that number, of packed sequences among a sequence's: tiles of keys of a section of heads come before the next
        section's, so that the heads at work share the L2 cache; of causal calls the heaviest first, but with DOWN the lightest."""
        blocks = gl.cdiv(self.columns, KEYS * ROWS)
        first = item // (self.section * blocks) * self.section
        within = item - first * blocks
        size = gl.minimum(self.section, self.turns - first)
        turn = first + within % size
        n = within // size
        if self.DOWN:
            n = blocks - 1 - n
        n *= KEYS * ROWS
        low, high = 0, self.tiles
        if self.RIGHT:
            low = gl.minimum(gl.maximum(n - self.right - self.shift, 0) // ROWS, self.tiles)
        if self.LEFT:
            high = gl.minimum(high, gl.maximum(n + KEYS * ROWS - 1 + self.left - self.shift + ROWS, 0) // ROWS)
        shared = self.heads // self.GROUP
        return Work(self, turn // shared, turn % shared, n, low, gl.maximum(high - low, 0), base, begin, rows, begins)

    @gluon.jit
    def count(self, listed):
        pieces = self.pieces
        if self.PACKED:
            pieces = _same(gl.load(listed + 1)) * self.turns
        return pieces


@aggregate
class Work:
    """A piece of work: 128 keys, and the blocks of queries that see some of them, of all heads of queries that share them."""

    call: Call
    batch: gl.tensor
    head: gl.tensor
    first: gl.tensor  # of its keys
    low: gl.tensor  # block of queries
    blocks: gl.tensor
    # Of packed sequences:
    base: gl.tensor  # the number of the sequence's first block of queries
    begin: gl.tensor  # where the sequence's queries begin
    rows: gl.tensor  # how many they are
    begins: gl.tensor  # where its keys begin

    @gluon.constexpr_function
    def __init__(self, call, batch, head, first, low, blocks, base, begin, rows, begins):
        self.call = call
        self.batch = batch
        self.head = head
        self.first = first
        self.low = low
        self.blocks = blocks
        self.base = base
        self.begin = begin
        self.rows = rows
        self.begins = begins

    @gluon.jit
    def queries(self, g, block, column=0):
        """Where a block of queries lies."""
        if self.call.PACKED:
            far, end, last = _in(self.begin, self.rows, block * ROWS)
            at = far, end, self.head * self.call.GROUP + g, last, column
        else:
            at = self.batch, self.head * self.call.GROUP + g, block * ROWS, column
        return at

    @gluon.jit
    def keys(self, row):
        """Where keys lie, from one on."""
        if self.call.PACKED:
            far, end, last = _in(self.begins, self.call.columns, row)
            at = far, end, self.head, last, 0
        else:
            at = self.batch, self.head, row, 0
        return at

    @gluon.jit
    def numbered(self, block):
        """Which of a head's blocks of queries a block is."""
        if self.call.PACKED:
            block += self.base
        return block

    @gluon.jit
    def block(self, n):
        """The n-th block of queries of a head."""
        if not self.call.DOWN:
            n = self.blocks - 1 - n
        return self.low + n

    @gluon.jit
    def turn(self, g):
        """The g-th head of queries that shares the keys, counted through batches."""
        return self.batch * self.call.heads + self.head * self.call.GROUP + g

    @gluon.jit
    def others(self, block):
        """How many pieces add to a block of queries before this one does, and how many after it. Those before have lower numbers, so that
        they have been begun, and come to the block earlier: with DOWN, where the last keys come first, it is two blocks for each piece
        between."""
        me = self.first // (KEYS * ROWS)
        low, high = 0, gl.cdiv(self.call.columns, KEYS * ROWS) - 1
        if self.call.LEFT:
            unseen = (block - KEYS) * ROWS + 1 - self.call.left + self.call.shift
            low = gl.minimum(gl.cdiv(gl.maximum(unseen, 0), KEYS * ROWS), me)
        if self.call.RIGHT:
            high = gl.minimum(high, ((block + 1) * ROWS - 1 + self.call.shift + self.call.right) // (KEYS * ROWS))
        before, after = me - low, high - me
        if self.call.DOWN:
            before, after = after, before
        return before, after

    @gluon.jit
    def hide(self, p, row, first):
        """Probabilities of keys (down, from `first`) that a query (across) does not see become 0."""
        j = first + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))[:, None]
        i = row + self.call.shift + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
        seen = j + 0 * i < self.call.columns
        if self.call.RIGHT:
            seen = seen & (j <= i + self.call.right)
        if self.call.LEFT:
            seen = seen & (j >= i - self.call.left)
        return gl.where(seen, p, 0.0)

    @gluon.jit
    def edge(self, row):
        """Whether a query of the block that begins with this row does not see all of the keys."""
        found = self.first + KEYS * ROWS > self.call.columns
        if self.call.RIGHT:
            found = found | (row + self.call.shift + self.call.right < self.first + KEYS * ROWS - 1)
        if self.call.LEFT:
            found = found | (row + ROWS - 1 + self.call.shift - self.call.left > self.first)
        return found


@gluon.jit
def _fetch(queries, do, tops, deltas, keys, values, here, counter, listed, call):
    """The warp that fills shared memory."""
    n, done = 0, 0
    pieces = call.count(listed)
    item = here.tickets.draw(0, counter)
    while item < pieces:
        work = call.find(item, listed)
        if call.PACKED:
            own = work.call
            here.tickets.write(n, work.head, work.first, work.low, work.blocks, work.base, work.begins, own.columns, own.shift)
        some = work.blocks > 0
        block = work.block(0)
        if some:
            here.qs.fill(queries, tops, done, work.queries(0, block), work.turn(0) * call.tiles + work.numbered(block))
        mbarrier.wait(here.k_free, (n & 1) ^ 1)
        mbarrier.expect(here.k_ready, KEYS * keys.block_type.nbytes)
        for w in gl.static_range(KEYS):
            _load(keys, work.keys(work.first + w * ROWS), here.k_ready, here.ks.index(w))
        if some:
            here.dos.fill(do, deltas, done, work.queries(0, block), work.turn(0) * call.tiles + work.numbered(block))
        mbarrier.wait(here.v_free, (n & 1) ^ 1)
        mbarrier.expect(here.v_ready, KEYS * keys.block_type.nbytes)
        for w in gl.static_range(KEYS):
            _load(values, work.keys(work.first + w * ROWS), here.v_ready, here.vs.index(w))
        for g in range(call.GROUP):
            for t in range(gl.where(g == 0, 1, 0), work.blocks):
                block = work.block(t)
                at = work.turn(g) * call.tiles + work.numbered(block)
                here.qs.fill(queries, tops, done + t, work.queries(g, block), at)
                here.dos.fill(do, deltas, done + t, work.queries(g, block), at)
            done += work.blocks
        n += 1
        item = here.tickets.draw(n, counter) if here.tickets.STAY else pieces
    if call.PACKED:
        here.tickets.write(n, call.pieces, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def _piece(here, n, item, call):
    """The program's n-th piece of work; of packed sequences without where its queries lie, which the warp that fetches knows."""
    if call.PACKED:
        head, first, low, blocks, base, begins, columns, shift = here.tickets.read(n)
        work = Work(call.of(call.tiles, columns, shift), 0 * head, head, first, low, blocks, base, head, head, begins)
    else:
        work = call.find(item, None)
    return work


@gluon.jit
def _keys(ME: gl.constexpr, dk_out, dv_out, here, call, TIGHT: gl.constexpr, REST: gl.constexpr):
    """A group of warps: dK and dV of its keys, and dS for dQ. Keys and values are in registers, which spares shared memory half of what
    scores and dP read. With TIGHT registers are few: they stay where they are, and dS is made of the rounded probabilities, which need
    half the registers; with REST D is half of a tile's columns and at most so many more, and dK and dV are in two parts."""
    WIDE: gl.constexpr = dk_out.block_type.shape[-1]
    D: gl.constexpr = WIDE // 2 if REST else WIDE
    STAGES: gl.constexpr = here.ds.type.shape[0] // KEYS
    dtype: gl.constexpr = dk_out.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(REST, 16), 16])
    rest_p: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=rest_layout, k_width=2)
    across: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    own: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    k = _flat(here.ks.index(ME))
    v = _flat(here.vs.index(ME))
    n, done = 0, 0
    item = here.tickets.take(0)
    while item < call.pieces:
        work = _piece(here, n, item, call)
        dk = gl.zeros([ROWS, D], gl.float32, d_layout)
        dv = gl.zeros([ROWS, D], gl.float32, d_layout)
        if REST:
            more_dk = gl.zeros([ROWS, REST], gl.float32, rest_layout)
            more_dv = gl.zeros([ROWS, REST], gl.float32, rest_layout)
        factor = call.scale * 1.4426950408889634
        mbarrier.wait(here.k_ready, n & 1)
        if not TIGHT:
            mine = k.load(own)
            mbarrier.wait(here.v_ready, n & 1)
            values = v.load(own)
        within = 0
        for _ in range(call.GROUP * work.blocks):
            row = work.block(within) * ROWS
            within = gl.where(within + 1 == work.blocks, 0, within + 1)
            q = here.qs.take(done)
            scores = _scores(k if TIGHT else mine, q, zero, REST)
            do = here.dos.take(done)
            top = here.qs.number(done, across)
            s = warpgroup_mma_wait(0, deps=(scores,))
            if TIGHT:
                mbarrier.wait(here.v_ready, n & 1)
            products = _scores(v if TIGHT else values, do, zero, REST)
            p = gl.exp2(s * factor - top[None, :])
            if work.edge(row):
                p = work.hide(p, row, work.first + ME * ROWS)
            delta = here.dos.number(done, across)
            if TIGHT:
                packed = _pack(p, dtype)
                half = _halves(packed, dtype, p_layout)
                p = _singles(packed, dtype, s_layout)
            else:
                half = gl.convert_layout(p.to(dtype), p_layout)
            if REST:
                dv_next = warpgroup_mma(half, do.slice(0, D, 1), dv, is_async=True)
                more_dv_next = warpgroup_mma(gl.convert_layout(half, rest_p), do.slice(D, REST, 1), more_dv, is_async=True)
            else:
                dv_next = warpgroup_mma(half, do, dv, is_async=True)
            dp = warpgroup_mma_wait(2 if REST else 1, deps=(products,))
            ds = (p * (dp - delta[None, :])).to(dtype)
            place, odd = _place(done, STAGES)
            mbarrier.wait(here.ds_free.index(place), odd ^ 1)
            here.ds.index(KEYS * place + ME).store(ds)
            fence_async_shared()
            mbarrier.arrive(here.ds_ready.index(place), count=1)
            if REST:
                dk_next = warpgroup_mma(gl.convert_layout(ds, p_layout), q.slice(0, D, 1), dk, is_async=True)
                more_dk_next = warpgroup_mma(gl.convert_layout(ds, rest_p), q.slice(D, REST, 1), more_dk, is_async=True)
                dv, more_dv = warpgroup_mma_wait(2, deps=(dv_next, more_dv_next))
            else:
                dk_next = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
                dv = warpgroup_mma_wait(1, deps=(dv_next,))
            here.dos.give(done)
            if REST:
                dk, more_dk = warpgroup_mma_wait(0, deps=(dk_next, more_dk_next))
            else:
                dk = warpgroup_mma_wait(0, deps=(dk_next,))
            here.qs.give(done)
            done += 1
        mbarrier.wait(here.v_ready, n & 1)  # where there was no block
        mbarrier.arrive(here.k_free, count=1)
        at = work.first + ME * ROWS
        if REST:
            v.slice(0, D, 1).store(dv.to(dtype))
            v.slice(D, REST, 1).store(more_dv.to(dtype))
        else:
            v.store(dv.to(dtype))  # where v was, which nobody else reads
        fence_async_shared()
        _store(dv_out, work.keys(at), here.vs.index(ME))
        tma.store_wait(0)
        if REST:
            v.slice(0, D, 1).store((dk * call.scale).to(dtype))
            v.slice(D, REST, 1).store((more_dk * call.scale).to(dtype))
        else:
            v.store((dk * call.scale).to(dtype))
        fence_async_shared()
        _store(dk_out, work.keys(at), here.vs.index(ME))
        tma.store_wait(0)
        mbarrier.arrive(here.v_free, count=1)
        n += 1
        item = here.tickets.take(n) if here.tickets.STAY else call.pieces


@gluon.jit
def _queries(
    OWN: gl.constexpr, sums, dq_sums, dq_out, parts, here, order, call, ORDERED: gl.constexpr, FINISH: gl.constexpr, REST: gl.constexpr
):
    """A group of warps: dQ of all keys, added to what is in memory: after the piece of work that comes to the block first and finds
    nothing there; with ORDERED after all that are before it. With FINISH the last of them begins with the sum of the others and writes
    dq: for that there are registers at D <= 64. `order` says how many have added.

    Three things are taken for granted. What the copy engine has added is in L2, where all look, when it says so: the count is told by a
    relaxed addition, since a release waits for what nobody needs here (the whole takes up to 1.4 times as long). Ordinary loads past L1
    find it there too. And where a piece is a program (D 128) those with lower numbers begin first.
    """
    STAGES: gl.constexpr = here.ds.type.shape[0] // KEYS
    PARTS: gl.constexpr = parts.type.shape[0]
    W: gl.constexpr = parts.type.shape[2] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(REST, 16), 16])
    zero = gl.zeros([ROWS, W], gl.float32, layout)
    one = _flat(here.ks.index(0))
    two = _flat(here.ks.index(1))
    n, done = 0, 0
    item = here.tickets.take(0)
    while item < call.pieces:
        work = _piece(here, n, item, call)
        mbarrier.wait(here.k_ready, n & 1)
        last, tell = order, False
        for g in range(call.GROUP):
            at = work.turn(g)
            seen = -1
            for t in range(work.blocks):
                block = work.block(t)
                place, odd = _place(done, STAGES)
                before, after = work.others(block)
                number = work.numbered(block)
                if FINISH:  # what others have added is read, not added to: their word for it must be acquired
                    seen = gl.where(after == 0, -1, seen)
                _await(order + at * call.tiles + number, before if ORDERED else gl.minimum(before, 1), seen)
                mbarrier.wait(here.ds_ready.index(place), odd)
                for part in gl.static_range(PARTS):
                    start = zero
                    if part > 0 and REST:
                        start = gl.zeros([ROWS, REST], gl.float32, rest_layout)
                    if FINISH:  # noqa: SIM102  # this one is decided by the compiler
                        if (after == 0) & (before > 0):
                            tile = sums + (at * call.tiles + number).to(gl.int64) * (64 * OWN) + part * 64 * W
                            start = _held(tile, 2 * (OWN - part * W), zero)
                    dq = warpgroup_mma(
                        here.ds.index(KEYS * place).permute((1, 0)),
                        one.slice(part * W, start.shape[1], 1),
                        start,
                        use_acc=FINISH,
                        is_async=True,
                    )
                    dq = warpgroup_mma(
                        here.ds.index(KEYS * place + 1).permute((1, 0)), two.slice(part * W, start.shape[1], 1), dq, is_async=True
                    )
                    if part == 0:
                        next_ = work.block(gl.minimum(t + 1, work.blocks - 1))
                        seen = _look(order + at * call.tiles + work.numbered(next_))
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    if part == PARTS - 1:
                        mbarrier.arrive(here.ds_free.index(place), count=1)
                    tma.store_wait(PARTS - 1)
                    if FINISH:
                        if after == 0:
                            _finish(dq * call.scale, dq_out, work.queries(g, block, part * W), parts.index(part))
                        else:
                            _add(dq, dq_sums, [at * call.tiles + number, part * 2 * W, 0], parts.index(part), before)
                    else:
                        _add(dq, dq_sums, [at * call.tiles + number, part * 2 * W, 0], parts.index(part), before)
                if tell:  # the block before this one is in memory by now
                    _added(PARTS)
                    gl.atomic_add(last, 1, sem="relaxed", scope="gpu")
                tell = ORDERED or before == 0
                last = order + at * call.tiles + number
                done += 1
        mbarrier.arrive(here.k_free, count=1)
        _added(0)
        if tell:
            gl.atomic_add(last, 1, sem="relaxed", scope="gpu")
        n += 1
        item = here.tickets.take(n) if here.tickets.STAY else call.pieces


@gluon.jit(do_not_specialize=["pieces", "heads", "section", "turns", "tiles", "columns", "shift", "left", "right"])
def _bwd(order, listed, sums, queries, keys, values, do, dk_out, dv_out, dq_out, dq_sums, tops, deltas, pieces, heads, section, turns, tiles, columns, shift, left, right, scale, LEFT: gl.constexpr, RIGHT: gl.constexpr, GROUP: gl.constexpr, ORDERED: gl.constexpr, TIGHT: gl.constexpr, STAY: gl.constexpr, STAGES: gl.constexpr, OWN: gl.constexpr, FINISH: gl.constexpr, REST: gl.constexpr):  # fmt: skip
    PACKED: gl.constexpr = listed is not None
    D: gl.constexpr = queries.block_type.shape[-1]
    W: gl.constexpr = dq_sums.block_type.shape[1] // 2
    dtype: gl.constexpr = queries.dtype
    qs = _rows(queries, tops, STAGES)
    dos = _rows(do, deltas, STAGES)
    ks = gl.allocate_shared_memory(dtype, [KEYS] + keys.block_type.shape, keys.layout)
    vs = gl.allocate_shared_memory(dtype, [KEYS] + keys.block_type.shape, keys.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds = gl.allocate_shared_memory(dtype, [KEYS * STAGES, ROWS, ROWS], ds_layout)
    parts = gl.allocate_shared_memory(gl.float32, [D // W] + dq_sums.block_type.shape, dq_sums.layout)
    ds_ready, ds_free = _barriers(STAGES, KEYS, 1)
    k_ready, k_free = _barriers(1, 1, KEYS + 1)
    v_ready, v_free = _barriers(1, 1, KEYS)
    drawn, taken = _barriers(2, 1, KEYS + 1)
    board = gl.allocate_shared_memory(gl.int32, [2, 8 if PACKED else 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tickets = Tickets(board, drawn, taken, STAY, PACKED)
    here = Memory(qs, dos, ks, vs, k_ready.index(0), k_free.index(0), v_ready.index(0), v_free.index(0), ds, ds_ready, ds_free, tickets)
    fence_async_shared()
    call = Call(pieces, heads, section, turns, tiles, columns, shift, left, right, scale, LEFT, RIGHT, ORDERED and RIGHT, GROUP, PACKED)
    gl.warp_specialize(
        [
            (_keys, (0, dk_out, dv_out, here, call, TIGHT, REST)),
            (_keys, (1, dk_out, dv_out, here, call, TIGHT, REST)),
            (_queries, (OWN, sums, dq_sums, dq_out, parts, here, order + 1, call, ORDERED, FINISH, REST)),
            (_fetch, (queries, do, tops, deltas, keys, values, here, order, listed, call)),
        ],
        [4, 4, 1],
        [208, 72, 24],
    )


@triton.jit
def _in_rows(at, place, D: tl.constexpr, W: tl.constexpr):
    """W columns of a tile of (64, D) that lies in the order of `_as_held`, from a multiple of 8 on; 0 beyond D."""
    n = place * 64 + tl.arange(0, 64 * W)
    held = tl.load(at + n, mask=n < 64 * D, other=0.0)
    return held.reshape(W // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, W)


@triton.jit(do_not_specialize=["rows", "tiles", "batch"])
def _narrow(dq, sums, order, cu, dq_steps, rows, tiles, heads, batch, scale, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """dq of its sums in float32. What nobody has added to is 0."""
    turn = tl.program_id(0) % heads[0]
    tile = tl.program_id(0) // heads[0]
    m, d, e = tl.arange(0, 64), tl.arange(0, BD), tl.arange(0, BE) if BE else None
    start, limit = _lies(tile * 64, rows, cu, batch, 64)
    number = turn.to(tl.int64) * tiles + tile
    some = tl.load(order + 1 + number) > 0
    one = tl.where(some, _in_rows(sums + number * 64 * D, 0, D, BD) * scale, 0.0)
    two = None
    if BE:
        two = tl.where(some, _in_rows(sums + number * 64 * D, BD, D, BE) * scale, 0.0)
    _save(_head(dq, dq_steps, turn // heads[1], turn % heads[1], start, UNIT), one, two, m, dq_steps[2], d, e, limit, D, UNIT)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, mask: None, cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None, scale: float, softcap: float, left: int, right: int, bottom: bool, max_q: int, max_k: int,
    precision: str, deterministic: bool,
) -> None:  # fmt: skip
    """Fills dq, dk and dv; see `attention_bwd` in _attention.py. Packed sequences have numbers of blocks of queries of their own, so that
    none has rows of two: cu // 64 + the sequence's number is its first one's."""
    if q.shape[-1] > 128:  # sums of dK and dV would not fit the registers
        options = scale, softcap, left, right, bottom, max_q, max_k, precision, deterministic
        return _triton.bwd(dq, dk, dv, do, dlse, q, k, v, o, lse, mask, cu_q, cu_k, *options)
    do = do if whole(do) else do.clone(memory_format=torch.contiguous_format)
    (batch, heads, rows, D), (kv, columns) = q.shape, k.shape[1:3]
    turns, group, wide = batch * kv, heads // kv, triton.next_power_of_2(D)
    ahead, back, packed = right < UNBOUNDED, left < UNBOUNDED, cu_q is not None
    sequences = None if cu_q is None else cu_q.numel() - 1
    longest = rows if sequences is None else min(rows, max_q or rows // max(1, sequences))
    tiles = triton.cdiv(rows, 64) if sequences is None else rows // 64 + sequences + 1
    listed, most = None, triton.cdiv(columns, 128)
    if cu_q is not None:  # seen from keys, what is to the left is to the right
        listed, most = _packed.order(k, q, cu_q if cu_k is None else cu_k, cu_q, bottom, right, left, 128, 64)
    tops = torch.empty((batch * heads * tiles, 64), dtype=torch.float32, device=q.device)
    deltas = torch.empty((batch * heads * tiles, 64), dtype=torch.float32, device=q.device)
    sums = torch.empty((batch * heads * tiles, 2 * D, 32), dtype=torch.float32, device=q.device)  # as `_as_held` has them
    order = torch.empty((1 + batch * heads * tiles,), dtype=torch.int32, device=q.device)
    ordered = deterministic or (wide < 128 and columns <= 4096 and not packed)  # there faster than out of order: dq needs no other kernel
    finish = ordered and wide < 128 and not packed
    _start_delta(deltas, tops, o, do, dlse, lse, order, cu_q, dq=dq if finish else None)
    shared = 8 * max(1, longest) * D * group  # bytes of q, do and dq's sums that the programs of a head share
    section = max(1, min(turns, (24 << 20) // shared))
    box, width = (1, 1, 1) if packed else (1, 1), min(wide, 64)
    maps = [TensorMap(t, (*box, 64, wide), min(128, 2 * wide), packed) for t in (q, k, v, do, dk, dv)]
    maps += [TensorMap(dq, (*box, 64, width), min(128, 2 * width), packed), TensorMap(sums, (1, 2 * width, 32), 128)]
    maps += [TensorMap(tops, (1, 64)), TensorMap(deltas, (1, 64))]
    shift = int(bottom) if packed else columns - rows if bottom else 0
    numbers = turns * most, heads, section, turns, tiles, columns, shift, left, right, scale
    facts: dict[str, Any] = {"LEFT": back, "RIGHT": ahead, "GROUP": group, "ORDERED": ordered, "STAGES": 2 if wide == 128 else 4}
    facts |= {"TIGHT": wide == 128, "STAY": wide < 128, "OWN": D if finish else 0, "FINISH": finish, "REST": _parts(D)[1] if D > 64 else 0}
    grid = (turns * most if wide == 128 else min(turns * most, device.of(q).multiprocessors),)  # at 128 there are no registers left to stay
    launch(_bwd, grid, order, listed, sums, *maps, *numbers, **facts, num_warps=4, maxnreg=128)
    if not finish:
        unit, (part, rest), given = _unit((dq,)), _parts(D), (dq, sums, order, cu_q)
        steps = tuple(s // unit for s in _steps(dq)[:3])
        shape: dict[str, Any] = {"D": D, "BD": part, "BE": rest, "UNIT": unit, "num_warps": 8 if wide == 128 else 4}
        launch(_narrow, (tiles * batch * heads,), *given, steps, rows, tiles, (batch * heads, heads), sequences, scale, **shape)
