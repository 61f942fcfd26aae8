"""The backward of attention's `gluon`: one pass on Hopper with five products. (D >= 200: _hopper_backward_wide.py.)

A piece of work is 128 keys. Two warpgroups have 64 of them each, with the sums of dK and dV in registers, and TMA loads
tiles of 64 queries. Scores are transposed, keys down, so that the probabilities and their gradients dS go from
registers into the products for dV and dK. dS also goes through shared memory to a third group, which multiplies it with
K for all 128 keys and lets TMA add the result to dQ, in float32 in memory. The groups do not run in lockstep, so the
tensor cores have work from all three.
By default a tile of dQ receives its additions in the order of the pieces' numbers, so reruns are bitwise equal: each
piece waits for the one before, which a separate warp signals. With `deterministic=False` they are added as they come.
A kernel converts the sums to dq afterwards. If there are too few pieces for the GPU, some or all are split: each
program has some of the queries, and a kernel adds dK and dV.
Packed sequences' pieces come from a list (_packed.py), the longest sequences first.
Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), algorithm 2; Shah et al., FlashAttention-3, 2024
(arXiv:2407.08608), section 3.
"""

import heapq
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.attention import _packed
from ridgeline.ops.attention._hopper import whole
from ridgeline.ops.attention._hopper_backward_wide import _bwd_wide
from ridgeline.ops.attention._hopper_pieces import Call, _fetch, _piece, _queries, _tell
from ridgeline.ops.attention._hopper_rings import (
    KEYS,
    ROWS,
    Memory,
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
from ridgeline.ops.attention._triton import (
    LOG2E,
    UNBOUNDED,
    _head,
    _lies,
    _parts,
    _save,
    _start_delta,
    _steps,
    _turn,
    _unit,
)


@gluon.jit
def _put(ME: gl.constexpr, out, x, rest, here, work, REST: gl.constexpr):
    """Stores dK or dV of a group's keys, through its values' shared memory, which only it reads."""
    D: gl.constexpr = x.shape[1]
    room = _flat(here.vs.index(ME))
    if REST:
        room.slice(0, D, 1).store(x.to(out.dtype))
        room.slice(D, REST, 1).store(rest.to(out.dtype))
    else:
        room.store(x.to(out.dtype))
    fence_async_shared()
    _store(out, work.keys(work.first + ME * ROWS), here.vs.index(ME))
    tma.store_wait(0)


@gluon.jit
def _hand_in(ME: gl.constexpr, shares, n, x, COLUMN: gl.constexpr, WIDE: gl.constexpr):
    """Stores WIDE columns of a group's float32 sums over a part, from COLUMN on, as the n-th tile of `shares`."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))[:, None]
    j = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(shares + (n.to(gl.int64) * KEYS + ME) * (ROWS * WIDE) + (i * WIDE + j + COLUMN), x)


@gluon.jit
def _keys(ME: gl.constexpr, dk_out, dv_out, shares, here, call, TIGHT: gl.constexpr, REST: gl.constexpr):
    """A consumer group: dK and dV of its keys, and dS for dQ.

    Keys and values are in registers, which halves the reads of shared memory for scores and dP. With TIGHT there are
    too few registers: keys and values stay in shared memory, and dS is computed from rounded probabilities, which need
    half the registers. With REST, D is half of a tile's columns plus at most REST, and dK and dV are in two parts.
    """
    WIDE: gl.constexpr = dk_out.block_type.shape[-1]
    D: gl.constexpr = WIDE // 2 if REST else WIDE
    STAGES: gl.constexpr = here.ds.type.shape[0] // KEYS
    dtype: gl.constexpr = dk_out.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=d_layout, k_width=2)
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(REST, 16), 16]
    )
    rest_p: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=rest_layout, k_width=2)
    across: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    own: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_layout, k_width=2)
    # lse is loaded during dK's product, unless masks leave no registers for it.
    LATE: gl.constexpr = TIGHT and (call.LEFT or call.RIGHT)
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
        mbarrier.wait(here.k_ready, n & 1)
        if not TIGHT:
            mine = k.load(own)
            mbarrier.wait(here.v_ready, n & 1)
            values = v.load(own)
        count = call.GROUP * work.blocks
        top = gl.zeros([ROWS], gl.float32, across)
        if count > 0:
            top = here.qs.take_number(done, across)
        for t in range(count):
            row = work.block(t if call.GROUP == 1 else t % work.blocks) * ROWS
            q = here.qs.tile(done)
            scores = _scores(k if TIGHT else mine, q, zero, REST)
            do = here.dos.take(done)
            s = warpgroup_mma_wait(0, deps=(scores,))
            if TIGHT:
                mbarrier.wait(here.v_ready, n & 1)
            products = _scores(v if TIGHT else values, do, zero, REST)
            p = gl.exp2(s * call.factor - top[None, :])
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
                more_dv_next = warpgroup_mma(
                    gl.convert_layout(half, rest_p), do.slice(D, REST, 1), more_dv, is_async=True
                )
            else:
                dv_next = warpgroup_mma(half, do, dv, is_async=True)
            dp = warpgroup_mma_wait(2 if REST else 1, deps=(products,))
            ds = (p * (dp - delta[None, :])).to(dtype)
            place, odd = _place(done, STAGES)
            mbarrier.wait(here.ds_free.index(place), odd ^ 1)
            here.ds.index(KEYS * place + ME).store(ds)
            if REST:
                dk_next = warpgroup_mma(gl.convert_layout(ds, p_layout), q.slice(0, D, 1), dk, is_async=True)
                more_dk_next = warpgroup_mma(gl.convert_layout(ds, rest_p), q.slice(D, REST, 1), more_dk, is_async=True)
            else:
                dk_next = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
            fence_async_shared()  # during that product: it waits for the stores, and they for the product before
            mbarrier.arrive(here.ds_ready.index(place), count=1)
            if REST:
                dv, more_dv = warpgroup_mma_wait(2, deps=(dv_next, more_dv_next))
            else:
                dv = warpgroup_mma_wait(1, deps=(dv_next,))
            # After the last block there may be none: then this one's are loaded again, unused.
            following = gl.where(t + 1 < count, done + 1, done)
            if not LATE:
                top = here.qs.take_number(following, across)
            if REST:
                dk, more_dk = warpgroup_mma_wait(0, deps=(dk_next, more_dk_next))
            else:
                dk = warpgroup_mma_wait(0, deps=(dk_next,))
            if LATE:
                top = here.qs.take_number(following, across)
            here.qs.give(done)
            done += 1
        mbarrier.wait(here.v_ready, n & 1)  # in case there was no block
        mbarrier.arrive(here.k_free, count=1)
        if not REST:
            more_dk, more_dv = dk, dv
        if work.share < 0:
            _put(ME, dv_out, dv, more_dv, here, work, REST)
            _put(ME, dk_out, dk * call.scale, more_dk * call.scale, here, work, REST)
        elif call.SPLIT:
            _hand_in(ME, shares, 2 * work.share, dk, 0, WIDE)
            _hand_in(ME, shares, 2 * work.share + 1, dv, 0, WIDE)
            if REST:
                _hand_in(ME, shares, 2 * work.share, more_dk, D, WIDE)
                _hand_in(ME, shares, 2 * work.share + 1, more_dv, D, WIDE)
        mbarrier.arrive(here.v_free, count=1)
        n += 1
        item = here.tickets.take(n) if here.tickets.STAY else call.pieces


@gluon.jit(
    do_not_specialize=[
        "pieces",
        "entire",
        "parts",
        "heads",
        "section",
        "turns",
        "tiles",
        "columns",
        "shift",
        "left",
        "right",
    ]
)
def _bwd(
    order, listed, shares, queries, keys, values, do, dk_out, dv_out, dq_sums, tops, deltas, pieces, entire, parts,
    heads, section, turns, tiles, columns, shift, left, right, scale, factor, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    DOWN: gl.constexpr, GROUP: gl.constexpr, ORDERED: gl.constexpr, TIGHT: gl.constexpr, STAY: gl.constexpr,
    STAGES: gl.constexpr, REST: gl.constexpr
):  # fmt: skip
    PACKED: gl.constexpr = listed is not None
    D: gl.constexpr = queries.block_type.shape[-1]
    W: gl.constexpr = dq_sums.block_type.shape[1] // 2
    dtype: gl.constexpr = queries.dtype
    qs = _rows(queries, tops, STAGES)
    dos = _rows(do, deltas, STAGES, qs.free)  # released with q
    ks = gl.allocate_shared_memory(dtype, [KEYS] + keys.block_type.shape, keys.layout)
    vs = gl.allocate_shared_memory(dtype, [KEYS] + keys.block_type.shape, keys.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds = gl.allocate_shared_memory(dtype, [KEYS * STAGES, ROWS, ROWS], ds_layout)
    rooms = gl.allocate_shared_memory(gl.float32, [D // W] + dq_sums.block_type.shape, dq_sums.layout)
    ds_ready, ds_free = _barriers(STAGES, KEYS, 1)
    k_ready, k_free = _barriers(1, 1, KEYS + 1)
    v_ready, v_free = _barriers(1, 1, KEYS)
    drawn, taken = _barriers(2, 1, KEYS + 1)
    board = gl.allocate_shared_memory(gl.int32, [2, 8 if PACKED else 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tickets = Tickets(board, drawn, taken, STAY, PACKED)
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
    fence_async_shared()
    call = Call(
        pieces,
        entire,
        parts,
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
        KEYS * ROWS,
        shares is not None,
    )
    gl.warp_specialize(
        [
            (_keys, (0, dk_out, dv_out, shares, here, call, TIGHT, REST)),
            (_keys, (1, dk_out, dv_out, shares, here, call, TIGHT, REST)),
            (_queries, (W, dq_sums, rooms, here, order + 1, call, ORDERED, REST)),
            (_fetch, (queries, do, tops, deltas, keys, values, here, order, listed, call)),
            (_tell, (order + 1, here.told)),
        ],
        [4, 4, 1, 1],
        [208, 72, 24, 24],
    )


@triton.jit
def _in_rows(at, place, D: tl.constexpr, W: tl.constexpr):
    """Loads W columns, from a multiple of 8 on, of a tile (64, D) stored in the order of `_as_held`; 0 beyond D."""
    n = place * 64 + tl.arange(0, 64 * W)
    held = tl.load(at + n, mask=n < 64 * D, other=0.0)
    return held.reshape(W // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, W)


@triton.jit(do_not_specialize=["rows", "tiles", "batch"])
def _narrow(
    dq, sums, order, cu, dq_steps, rows, tiles, heads, batch, scale, D: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Converts dq's float32 sums; a tile without additions is 0."""
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
    _save(
        _head(dq, dq_steps, turn // heads[1], turn % heads[1], start, UNIT),
        one,
        two,
        m,
        dq_steps[2],
        d,
        e,
        limit,
        D,
        UNIT,
    )


@triton.jit(do_not_specialize=["columns", "entire", "parts", "section", "turns", "blocks"])
def _join(
    dk, dv, shares, dk_steps, dv_steps, columns, entire, parts, section, turns, blocks, heads, scale,
    DOWN: tl.constexpr, W: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """Adds dk and dv over the parts of split pieces (numbered as in `Call.work`), first to last."""
    SPAN: tl.constexpr = 128
    row, d = tl.program_id(1) * 16 + tl.arange(0, 16), tl.arange(0, W)
    at = shares + tl.program_id(0).to(tl.int64) * parts * (2 * SPAN * W) + row[:, None] * W + d[None, :]
    keys, values = tl.zeros((16, W), tl.float32), tl.zeros((16, W), tl.float32)
    for _ in range(parts):
        keys += tl.load(at)
        values += tl.load(at + SPAN * W)
        at += 2 * SPAN * W
    tile, turn = _turn(entire + tl.program_id(0), blocks, turns, section, DOWN)
    begin, b, h = tile * SPAN, turn // heads, turn % heads
    limit = columns - begin
    _save(_head(dk, dk_steps, b, h, begin, UNIT), keys * scale, None, row, dk_steps[2], d, None, limit, D, UNIT)
    _save(_head(dv, dv_steps, b, h, begin, UNIT), values, None, row, dv_steps[2], d, None, limit, D, UNIT)


@lru_cache(1024)
def _share_out(
    most: int, turns: int, down: bool, group: int, tiles: int, shift: int, left: int, right: int, wide: int,
    programs: int
) -> tuple[int, int]:  # fmt: skip
    """Returns how many pieces, of `most` per head, stay whole, and into how many parts each of the others is split.

    Pieces of equal length are split in a last, partial round of programs. Pieces of unequal length are all split if
    heads share keys and there are at most two pieces per program. (With `group` 1 that is slower: a part waits for the
    head's first piece, whose parts end elsewhere.) Costs are in blocks of queries, from timings on an H100
    (docs/notes/attention.md): each piece or part has 256 / wide besides its own; a part's result costs a twelfth for
    the whole GPU, and the kernel that adds the parts 320 / wide. At most eight parts per program bound the memory.
    """
    # The blocks of queries that see a piece, as in `Call.work`.
    ends = [(n * 128 - right - shift, n * 128 + 127 + left - shift + 64) for n in range(most)]
    lengths = [max(0, min(tiles, high // 64) - max(low, 0) // 64) for low, high in ends]
    longest, even, pieces = max(lengths), min(lengths) == max(lengths), most * turns
    rounds = pieces // programs if even else 0
    rest = pieces - rounds * programs
    if not even and (group == 1 or pieces > 2 * programs):
        return pieces, 1

    def end(parts: int) -> float:
        beside = rest * parts / 12 + 320 / wide if parts > 1 else 0
        own = group * triton.cdiv(longest, parts) + 256 / wide
        if even:
            return triton.cdiv(rest * parts, programs) * own + beside
        # Parts start in the order of their numbers. Many parts take longer than this, since they wait for each other.
        busy = [0.0] * programs
        for length in lengths[::-1] if down else lengths:
            costs = [group * ((n + 1) * length // parts - n * length // parts) + 256 / wide for n in range(parts)]
            for cost in costs * turns:
                heapq.heapreplace(busy, busy[0] + cost)
        return max(*busy, sum(busy) / programs + own / 4 if parts > 1 else 0) + beside

    parts = min((n for n in range(1, min(8, longest) + 1) if n == 1 or rest * n <= 8 * programs), key=end, default=1)
    least = 0.05 if wide == 128 else 0.01  # without persistent programs a partial last round costs less
    gains = end(1) - end(parts) > least * (rounds * (group * longest + 256 / wide) + end(1))
    return (rounds * programs, parts) if gains else (pieces, 1)


# Bytes of L2: an H200 (60 MiB) has more, and keeps what the programs of twice as many heads share; an H100 (50) has
# less.
ROOMY = 55 << 20


def _section(
    q: torch.Tensor, k: torch.Tensor, longest: int, span: int, ordered: bool, ahead: bool, back: bool, packed: bool
) -> tuple[int, bool]:  # fmt: skip
    """Returns how many heads form a section, and whether causal pieces come lightest first (`Call.work`).

    All choices are from measurements on an H200 and an H100 (docs/notes/attention.md).

    With ordered sums, causal pieces wait least if the lightest come first, in sections whose q, do and sums fit in L2
    (4 heads at D 256; at most 16 above D 64 on an H100). But then the longest pieces come last. That costs more than
    waiting if one of them exceeds an eighth of a program's work (slightly more on an H100, a fourth at D 256), as with
    shared heads. All other sections exceed L2: four or more programs per head (eight at D 256) stay in step, and reuse
    what one of them has loaded. Windows, and full attention at D <= 64 without shared heads, gain nothing from that. An
    H100, with its smaller L2 and slower memory, needs twice as many programs per head above D 64, if a head has so
    many, and four times as many if heads are long and not shared: 8192 keys in ordered full attention, 16384 unordered.
    """
    (batch, heads, _, D), (kv, columns) = q.shape, k.shape[1:3]
    turns, group, gpu, pieces = batch * kv, heads // kv, device.of(q), triton.cdiv(columns, span)  # pieces: of a head
    roomy = gpu.l2 > ROOMY
    share = 2 * gpu.multiprocessors / (turns * (pieces + 1))  # the longest causal piece as a share of a program's work
    light = share <= (1 / 4 if D > 128 else 1 / 8 if roomy else 0.128)
    down = ordered and ahead and (back or (roomy or group == 1 if packed else light))
    shared = 8 * max(1, longest) * D * group  # bytes of q, do and dq's sums that the programs of a head share
    section = 4 if D > 128 and not packed else (24 << 20) // shared
    if down and D > 64 and not roomy:
        section = min(section, 16)
    if not down and not back:
        if D > 128:
            section = 8 if roomy and (ahead or not ordered) else 4
        elif D > 64 or ahead:
            long = pieces >= (64 if ordered else 128) and not (ordered and ahead) and not packed
            few = 4 if long and group == 1 else 8
            section = 16 if roomy or D <= 64 else max(few, gpu.multiprocessors // max(1, pieces))
            if (group > 1 and (roomy or ahead)) or (ordered and ahead):
                section *= 2
        elif group > 1:
            section = 8
    return max(1, min(turns, section)), down


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, mask: None, cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None, scale: float, softcap: float, left: int, right: int, bottom: bool, max_q: int,
    max_k: int, precision: str, deterministic: bool
) -> None:  # fmt: skip
    """Fills dq, dk and dv; see `attention_bwd` in _attention.py.

    No block of queries has rows of two packed sequences: a sequence's first block is cu // 64 + the sequence's number.
    """
    do = do if whole(do) else do.clone(memory_format=torch.contiguous_format)
    (batch, heads, rows, D), (kv, columns) = q.shape, k.shape[1:3]
    turns, group, wide = batch * kv, heads // kv, triton.next_power_of_2(D)
    span = 64 if wide > 128 else 128  # keys of a piece
    ahead, back, packed = right < UNBOUNDED, left < UNBOUNDED, cu_q is not None
    sequences = None if cu_q is None else cu_q.numel() - 1
    # Without max_q, some sequences are assumed to be four times as long as the average.
    longest = rows if sequences is None else min(rows, max_q or 4 * rows // max(1, sequences))
    tiles = triton.cdiv(rows, 64) if sequences is None else rows // 64 + sequences + 1
    listed, most = None, triton.cdiv(columns, span)
    if cu_q is not None:  # from the keys' side, left and right are swapped
        listed, most = _packed.order(k, q, cu_q if cu_k is None else cu_k, cu_q, bottom, right, left, span, 64)
    tops = torch.empty((batch * heads * tiles, 64), dtype=torch.float32, device=q.device)
    deltas = torch.empty((batch * heads * tiles, 64), dtype=torch.float32, device=q.device)
    # In the order of `_as_held`.
    sums = torch.empty((batch * heads * tiles, 2 * D, 32), dtype=torch.float32, device=q.device)
    order = torch.empty((1 + batch * heads * tiles,), dtype=torch.int32, device=q.device)
    _start_delta(deltas, tops, o, do, dlse, lse, order, cu_q)
    section, down = _section(q, k, longest, span, deterministic, ahead, back, packed)
    box, room = (1, 1, 1) if packed else (1, 1), 32 if wide > 128 else min(wide, 64)
    maps = [TensorMap(t, (*box, 64, wide), min(128, 2 * wide), packed) for t in (q, k, v, do, dk, dv)]
    maps += [TensorMap(sums, (1, 2 * room, 32), 128), TensorMap(tops, (1, 64)), TensorMap(deltas, (1, 64))]
    shift = int(bottom) if packed else columns - rows if bottom else 0
    # Pieces that stay whole, parts of each of the others, and the parts' dK and dV in float32.
    entire, parts, shares = turns * most, 1, None
    programs = device.of(q).multiprocessors
    if not packed and wide <= 128:
        entire, parts = _share_out(most, turns, down, group, tiles, shift, left, right, wide, programs)
    left_over = turns * most - entire
    pieces = entire + left_over * parts
    if left_over:
        shares = torch.empty((left_over * parts, 2, span, wide), dtype=torch.float32, device=q.device)
    numbers = heads, section, turns, tiles, columns, shift, left, right, scale, scale * LOG2E
    facts: dict[str, Any] = {"LEFT": back, "RIGHT": ahead, "DOWN": down, "GROUP": group, "ORDERED": deterministic}
    if wide > 128:
        launch(_bwd_wide, (pieces,), order, listed, *maps, pieces, *numbers, **facts, num_warps=4, maxnreg=128)
    else:
        facts |= {"TIGHT": wide == 128, "STAY": wide < 128, "STAGES": 2 if wide == 128 else 4}
        programs = pieces if wide == 128 else min(pieces, programs)  # persistence takes registers, which 128 lacks
        facts |= {"REST": _parts(D)[1] if D > 64 else 0, "num_warps": 4, "maxnreg": 128}
        launch(_bwd, (programs,), order, listed, shares, *maps, pieces, entire, parts, *numbers, **facts)
    if shares is not None:
        unit = _unit((dk, dv))
        key_steps = [tuple(s // unit for s in _steps(t)[:3]) for t in (dk, dv)]
        places = columns, entire, parts, section, turns, most, kv, scale
        launch(_join, (left_over, 8), dk, dv, shares, *key_steps, *places, DOWN=down, W=wide, D=D, UNIT=unit)
    unit, (part, rest), given = _unit((dq,)), _parts(D), (dq, sums, order, cu_q)
    steps = tuple(s // unit for s in _steps(dq)[:3])
    shape: dict[str, Any] = {"D": D, "BD": part, "BE": rest, "UNIT": unit, "num_warps": 8 if wide >= 128 else 4}
    launch(
        _narrow, (tiles * batch * heads,), *given, steps, rows, tiles, (batch * heads, heads), sequences, scale, **shape
    )
