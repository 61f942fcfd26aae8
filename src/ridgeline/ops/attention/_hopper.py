"""The implementation `gluon` of attention: a persistent, warp-specialised forward kernel for Hopper.

One warp loads tiles of q, k and v with TMA into rings in shared memory. Two or three warpgroups have 64 rows of queries
each, keep their sums in registers and share the keys. A group starts the products for a block's scores, then those for
its output with the previous block's probabilities. It computes exponentials while the latter run, then packs them into
the registers that those products read. After a tile's first block, maxima are computed only if a sum gets too large
(_hopper_softmax.py). Other groups use the matrix units meanwhile, and two groups may take turns at starting products.
Each program takes tiles of queries in an order that balances the work (_hopper_plan.py), and starts the next tile's
scores before it finishes a tile.
Source: Shah et al., FlashAttention-3, 2024 (arXiv:2407.08608). Backward is in _hopper_backward.py.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.attention._hopper_plan import Plan, _couples, _groups, _masks
from ridgeline.ops.attention._hopper_rings import ROWS, _halves, _pack, _ring, _same, _scores, _store, _write
from ridgeline.ops.attention._hopper_softmax import (
    NONE,
    _begin,
    _beyond,
    _declare,
    _rise,
    _shrink,
    _soften,
    _sums,
    _watch,
)
from ridgeline.ops.attention._packed import order
from ridgeline.ops.attention._triton import LOG2E, UNBOUNDED, _parts


@gluon.jit
def _fetch(listed, queries, keys, values, qs, ks, vs, plan, board):
    """The producer warp: fills the rings and describes each tile on the board, whose slots share q's barriers.

    The board has a tile's head (-1: no more tiles) and first row, the range of key blocks that it sees, and its batch.
    For packed sequences the warp takes the next untaken tile of the list, and also writes where the sequence begins and
    its length.
    """
    GROUPS: gl.constexpr = plan.BM // ROWS
    n, block = 0, 0
    if plan.PACKED:
        gdc_wait()  # for the list; nothing is written before
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        count = gl.load(listed + 1) * plan.heads
        t = gl.program_id(0)
    else:
        count = plan.turns * plan.tiles
        t = plan.step(0)
    while t < count:
        if plan.PACKED:
            taken = gl.atomic_add(listed + 0 * lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")
            h, row, begin, rows, begins, columns = plan.find(listed, t)
            shift = plan.shift * (columns - rows)
        else:
            turn, row = plan.place(t)
            begin, rows, columns, shift = turn // plan.heads, plan.rows, plan.columns, plan.shift
            h, begins = turn - begin * plan.heads, begin
        low, high = plan.reach(row, columns, shift)
        for g in gl.static_range(GROUPS):
            qs.await_free(n * GROUPS + g)
        if plan.PACKED:
            _write(board, n, h, row, low, high, begin, rows, columns, shift)
        else:
            _write(board, n, h, row, low, high, begin, 0, 0, 0)
        for g in gl.static_range(GROUPS):
            qs.fill(queries, n * GROUPS + g, plan.at(h, row + g * ROWS, begin, rows))
        for past in range(high - low):
            at = plan.at(h // plan.group, (high - 1 - past) * plan.BN, begins, columns)
            ks.fill(keys, block, at)
            vs.fill(values, block, at)
            block += 1
        n += 1
        if plan.PACKED:
            t = gl.num_programs(0) + _same(gl.sum(gl.where(lane == 0, taken, 0), 0))
        else:
            t = plan.step(n)
    for g in gl.static_range(GROUPS):
        qs.await_free(n * GROUPS + g)
    _write(board, n, -1, 0, 0, 1, 0, 0, 0, 0)
    for g in gl.static_range(GROUPS):
        qs.end(n * GROUPS + g)


@gluon.constexpr_function
def _line(ME, WAIT):
    return f"bar.{'sync' if WAIT else 'arrive'} {13 + ME}, 256; mov.u32 $0, 0;"


@gluon.jit
def _named(ME: gl.constexpr, WAIT: gl.constexpr):
    """A named barrier between two groups: waits at it, or arrives without waiting."""
    gl.inline_asm_elementwise(_line(ME, WAIT), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_on(ME: gl.constexpr, ks, vs, block, LAG: gl.constexpr, TURNS: gl.constexpr):
    """Releases a block's keys, and the values LAG blocks before. Returns the number of the next block."""
    ks.take(block)
    vs.take(block - LAG)
    if TURNS:
        _named(ME, True)
        _named(1 - ME, False)
    ks.give(block)
    vs.give(block - LAG)
    return block + 1


@gluon.jit
def _skip_unseen(ME: gl.constexpr, ks, vs, plan, block, row, low, high, shift, more, TURNS: gl.constexpr):
    """Releases a tile's last blocks, which no row of this group sees. Returns the next block, and `Plan.seen_by`."""
    seen = plan.seen_by(row + ME * ROWS, low, high, shift)
    if more:
        for _ in range(high - seen):
            block = _pass_on(ME, ks, vs, block, 0, TURNS)
    return block, seen


@gluon.jit
def _attend(ME: gl.constexpr, out, lse, qs, ks, vs, plan, board, TURNS: gl.constexpr, REST: gl.constexpr):
    """A consumer group: its rows of all tiles of this program.

    With REST, D is half of a tile's columns plus at most REST, and o is in two parts. If q has room for only one tile
    (D > 128), the next one begins when this one has released it.
    """
    GROUPS: gl.constexpr = plan.BM // ROWS
    AHEAD: gl.constexpr = qs.SIZE > GROUPS
    BN: gl.constexpr = plan.BN
    WIDE: gl.constexpr = out.block_type.shape[-1]
    D: gl.constexpr = WIDE // 2 if REST else WIDE
    dtype: gl.constexpr = out.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(REST, 16), 16]
    )
    rest_p: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=rest_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    none = gl.full([ROWS], NONE, gl.float32, rows)
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    if REST:
        more_acc = gl.zeros([ROWS, REST], gl.float32, rest_layout)
    n, block = 0, 0
    if TURNS and ME == 1:
        _named(0, False)
    q = qs.take(ME)
    head, row, low, high, begin, length, columns, shift = plan.read(board, 0)
    more = head >= 0
    block, high = _skip_unseen(ME, ks, vs, plan, block, row, low, high, shift, more, TURNS)
    keys = ks.take(block, more)
    if TURNS:
        _named(ME, True)
    scores = _scores(q, keys, zero, REST)
    if TURNS:
        _named(1 - ME, False)
    s = warpgroup_mma_wait(0, deps=(scores,))
    ks.give(block, more)
    s = plan.hide_last(s, row + ME * ROWS, high - 1, columns, shift)
    top = _rise(s, none, plan.factor)
    s = _soften(s, top, plan.factor)
    p, total = _pack(s, dtype), _sums(s)
    _declare(ME)
    block += 1
    while head >= 0:
        row += ME * ROWS
        from_, upto = plan.whole(row, low, columns, shift)
        q = qs.tile(n * GROUPS + ME)
        if GROUPS == 3:  # noqa: SIM102  # decided at compile time; two groups gain nothing
            # Without rows this group computes only the tile's first block, with the values of the last.
            if row >= length:
                for _ in range(1, high - low):
                    block = _pass_on(ME, ks, vs, block, 1, TURNS)
                low = high - 1
        for past in range(1, high - low):
            here = high - 1 - past
            values = vs.take(block - 1)
            keys = ks.take(block)
            left = _halves(p, dtype, p_layout)
            if TURNS:
                _named(ME, True)
            scores = _scores(q, keys, zero, REST)
            if REST:
                products = warpgroup_mma(left, values.slice(0, D, 1), acc, use_acc=past > 1, is_async=True)
                others = warpgroup_mma(
                    _halves(p, dtype, rest_p), values.slice(D, REST, 1), more_acc, use_acc=past > 1, is_async=True
                )
            else:
                products = warpgroup_mma(left, values, acc, use_acc=past > 1, is_async=True)
            if TURNS:
                _named(1 - ME, False)
            s = warpgroup_mma_wait(2 if REST else 1, deps=(scores,))
            # Decided at compile time: where the inner branch ends, ptxas waits for all products.
            if plan.MASKS == 2:
                if (here >= upto - 1) | (here < from_):
                    s = plan.hide(s, row, here, columns, shift)
                    top = _begin(s, top, plan.factor)
            elif plan.MASKS == 3:  # noqa: SIM102
                if here < from_:  # every row has seen a key in the first block
                    s = plan.hide_left(s, row, here, shift)
            s = _soften(s, top, plan.factor)
            sums = _watch(ME, _sums(s), dtype)
            if REST:
                acc, more_acc, s = warpgroup_mma_wait(0, deps=(products, others, s))
            else:
                acc, s = warpgroup_mma_wait(0, deps=(products, s))  # the next p lies where this product reads the last
            if _beyond(ME):
                scores = _scores(q, keys, zero, REST)
                s = warpgroup_mma_wait(0, deps=(scores,))
                if plan.MASKS == 2:
                    s = plan.hide(s, row, here, columns, shift)
                elif plan.MASKS == 3:
                    s = plan.hide_left(s, row, here, shift)
                old, top = top, _rise(s, top, plan.factor)
                less = gl.exp2(old - top)
                s = _soften(s, top, plan.factor)
                sums, total, acc = _sums(s), _shrink(total, less), _shrink(acc, less)
                if REST:
                    more_acc = _shrink(more_acc, less)
            ks.give(block)
            vs.give(block - 1)
            p = _pack(s, dtype)
            total += sums
            block += 1
        # Starts the next tile's first scores while this one's last products run.
        last, many = block - 1, high - low > 1
        if AHEAD:
            q = qs.take((n + 1) * GROUPS + ME)
            head_next, row_next, low, high, begin_next, length_next, columns, shift = plan.read(board, n + 1)
            more = head_next >= 0
            block, high = _skip_unseen(ME, ks, vs, plan, block, row_next, low, high, shift, more, TURNS)
            keys = ks.take(block, more)
        values = vs.take(last)
        left = _halves(p, dtype, p_layout)
        if TURNS:
            _named(ME, True)
        if AHEAD:
            scores = _scores(q, keys, zero, REST)
        if REST:
            products = warpgroup_mma(left, values.slice(0, D, 1), acc, use_acc=many, is_async=True)
            others = warpgroup_mma(
                _halves(p, dtype, rest_p), values.slice(D, REST, 1), more_acc, use_acc=many, is_async=True
            )
        else:
            products = warpgroup_mma(left, values, acc, use_acc=many, is_async=True)
        if TURNS:
            _named(1 - ME, False)
        if AHEAD:
            s = warpgroup_mma_wait(2 if REST else 1, deps=(scores,))
            s = plan.hide_last(s, row_next + ME * ROWS, high - 1, columns, shift)
            top_next = _rise(s, none, plan.factor)
            s = _soften(s, top_next, plan.factor)
            total_next = _sums(s)
        if REST:
            acc, more_acc, s = warpgroup_mma_wait(0, deps=(products, others, s))
        else:
            acc, s = warpgroup_mma_wait(0, deps=(products, s))
        vs.give(last)
        if AHEAD:
            ks.give(block, more)
            p = _pack(s, dtype)
        divisor = gl.convert_layout(gl.sum(total, 1), rows)
        some = divisor != 0.0
        divisor = gl.where(some, divisor, 1.0)
        i = row + gl.arange(0, ROWS, rows)
        sums = gl.where(some, (top + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        if plan.PACKED:
            first = head.to(gl.int64) * plan.rows + begin
        else:
            first = (begin * plan.heads + head).to(gl.int64) * plan.rows
        gl.store(lse + first + i, sums, mask=i < length)
        acc = _shrink(acc, 1.0 / divisor)
        where = qs.tile(n * GROUPS + ME)  # q's place, now free
        if REST:
            more_acc = _shrink(more_acc, 1.0 / divisor)
            where.slice(0, D, 1).store(acc.to(dtype))
            where.slice(D, REST, 1).store(more_acc.to(dtype))
        else:
            where.store(acc.to(dtype))
        fence_async_shared()
        _store(out, plan.at(head, row, begin, length), qs.tiles.index((n * GROUPS + ME) % qs.SIZE))
        tma.store_wait(0)
        qs.give(n * GROUPS + ME)
        if not AHEAD:
            q = qs.take((n + 1) * GROUPS + ME)
            head_next, row_next, low, high, begin_next, length_next, columns, shift = plan.read(board, n + 1)
            more = head_next >= 0
            block, high = _skip_unseen(ME, ks, vs, plan, block, row_next, low, high, shift, more, TURNS)
            keys = ks.take(block, more)
            if TURNS:
                _named(ME, True)
            scores = _scores(q, keys, zero, REST)
            if TURNS:
                _named(1 - ME, False)
            s = warpgroup_mma_wait(0, deps=(scores,))
            ks.give(block, more)
            s = plan.hide_last(s, row_next + ME * ROWS, high - 1, columns, shift)
            top_next = _rise(s, none, plan.factor)
            s = _soften(s, top_next, plan.factor)
            p, total_next = _pack(s, dtype), _sums(s)
        head, row, begin, length, top, total = head_next, row_next, begin_next, length_next, top_next, total_next
        block += 1
        n += 1
    if TURNS and ME == 0:
        _named(0, True)


@gluon.jit(
    do_not_specialize=[
        "turns",
        "heads",
        "group",
        "couples",
        "section",
        "tiles",
        "rows",
        "columns",
        "shift",
        "left",
        "right",
    ]
)
def _fwd(
    lse, listed, queries, keys, values, out, turns, heads, group, couples, section, tiles, rows, columns, shift, left,
    right, factor, GROUPS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, BN: gl.constexpr, REST: gl.constexpr, MASKS: gl.constexpr
):  # fmt: skip
    PACKED: gl.constexpr = listed is not None
    BM: gl.constexpr = GROUPS * ROWS
    plan = Plan(
        turns,
        heads,
        group,
        couples,
        section,
        tiles,
        rows,
        columns,
        shift,
        left,
        right,
        factor,
        BM,
        BN,
        LEFT,
        RIGHT,
        PACKED,
        MASKS,
    )
    qs = _ring(queries, GROUPS if queries.block_type.shape[-1] > 128 else 2 * GROUPS, 1)
    ks = _ring(keys, STAGES, GROUPS)
    vs = _ring(values, STAGES, GROUPS)
    board = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, out, lse, qs, ks, vs, plan, board, TURNS, REST)),
                (_attend, (1, out, lse, qs, ks, vs, plan, board, TURNS, REST)),
                (_fetch, (listed, queries, keys, values, qs, ks, vs, plan, board)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, out, lse, qs, ks, vs, plan, board, TURNS, REST)),
                (_attend, (1, out, lse, qs, ks, vs, plan, board, TURNS, REST)),
                (_attend, (2, out, lse, qs, ks, vs, plan, board, TURNS, REST)),
                (_fetch, (listed, queries, keys, values, qs, ks, vs, plan, board)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def whole(t: torch.Tensor) -> bool:
    """Returns whether TMA can address t: it and its rows begin at multiples of 16 bytes, and it is not expanded."""
    return t.data_ptr() % 16 == 0 and not any(
        [n > 1 and (step % 8 or not step) for n, step in zip(t.shape[:-1], t.stride(), strict=False)]
    )


def refusal(
    x: torch.Tensor, *rest: Any, mask: Any = None, softcap: Any = None, scale: Any = None, **_: Any
) -> str | None:
    """Returns why these kernels do not take a call, or None.

    Takes public arguments or a launcher's inputs; backward's begin with do and dlse.
    """
    q, *rest = rest[1:] if len(rest) > 15 else (x, *rest)
    k, v, *rest = rest[:2] + rest[4:] if len(rest) > 13 else rest
    if len(rest) > 8:  # else public arguments
        mask, _cu_q, _cu_k, scale, softcap, *_rest = rest
    if mask is not None or softcap or (scale is not None and scale <= 0):
        return "it takes no mask, no softcap, and only a scale above 0"
    if 128 < q.shape[-1] <= 192:  # padded to 256, slower than `triton`'s two parts
        return f"D must be at most 128 or above 192, got {q.shape[-1]}"
    if not (q.numel() and k.numel()):
        return f"no size may be 0, but q is {tuple(q.shape)} and k {tuple(k.shape)}"
    for t in (q, k, v):
        if not whole(t):
            return (
                "it copies 16 bytes at a time: q, k, v and their rows must begin at multiples of 16 bytes, not expanded"
            )
    return None


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, scale: float, softcap: float, left: int, right: int,
    bottom: bool, max_q: int, max_k: int, precision: str
) -> None:  # fmt: skip
    """Fills o and lse; see `attention_fwd` in _attention.py.

    For packed sequences max_q, or else their average length, decides the height of tiles.
    """
    (batch, heads, rows, D), columns = q.shape, k.shape[2]
    ahead, back, packed = right < UNBOUNDED, left < UNBOUNDED, cu_q is not None
    longest = rows if cu_q is None else min(rows, max_q or rows // max(1, cu_q.numel() - 1))
    groups = _groups(D, batch * heads, longest, ahead, packed, device.of(q).multiprocessors)
    turns, tiles = batch * heads, triton.cdiv(rows, 64 * groups)
    listed, group, wide, couples = None, heads // k.shape[1], triton.next_power_of_2(D), 0
    BN = 64 if D > 128 or (D > 64 and groups == 3) else 128
    stages, rest = 4 if wide * BN <= 8192 else 2, _parts(D)[1] if 64 < D <= 128 else 0
    # Turns help up to 2048 queries, except for causal calls at D 64, and cost time in long causal calls.
    by_turns = groups == 2 and D > 64 and not (ahead and not back and longest > 8192)
    facts: dict[str, Any] = {"GROUPS": groups, "TURNS": by_turns, "STAGES": stages}
    facts |= {"LEFT": back, "RIGHT": ahead, "BN": BN}
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 128 if groups == 3 else 168}
    if cu_q is not None:
        listed, most = order(q, k, cu_q, cu_q if cu_k is None else cu_k, bottom, left, right, 64 * groups, BN)
        section = min(heads, 32 * group) if ahead and not back else group
        shift, count = int(bottom), most * heads
        options["launch_pdl"] = True
    else:
        shared = 4 * columns * D * k.shape[1] // heads  # bytes of keys and values per head of queries
        shift, programs, high = columns - rows if bottom else 0, device.of(q).multiprocessors, 64 * groups
        if ahead and not back and 0 <= shift + right <= columns - rows + high:  # else pairs are not equally heavy
            most = min((32 << 20) // max(1, shared), triton.cdiv(4 * programs, tiles))
            couples = _couples(turns, tiles, programs, most, min((shift + right) // high, 8 * tiles))
        section = max(1, min(turns, (24 << 20) // max(1, shared)) if back else turns - 2 * couples)
        count = turns * tiles
    facts |= {"REST": rest, "MASKS": _masks(64 * groups, BN, columns, shift, right, back, ahead, bottom, packed)}
    numbers = turns, heads, group, couples, section, tiles, rows, columns, shift, left, right
    box = (1, 1, 1) if packed else (1, 1)
    maps = [TensorMap(t, (*box, n, wide), min(128, 2 * wide), packed) for t, n in ((q, 64), (k, BN), (v, BN), (o, 64))]
    grid = (min(count, device.of(q).multiprocessors),)
    launch(_fwd, grid, lse, listed, *maps, *numbers, scale * LOG2E, **facts, **options)
