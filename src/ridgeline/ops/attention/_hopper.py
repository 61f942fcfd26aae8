"""The rung `gluon` of attention: forward on Hopper by warps with parts of their own.

One warp fetches tiles of q, k and v by the copy engine (TMA) into rings of shared memory; two or three groups of four warps have 64 rows
of queries each, keep their sums in registers and share the keys. A group starts the products for a block's scores and, with the
probabilities of the block before, those for its output, and takes the exponentials while these run. With two groups each waits for its
turn to start products, so that one has the matrix units while the other takes exponentials. Programs stay: each takes tiles of queries
in an order that gives all as much to do, and starts the next tile's scores before it ends a tile.
Source: Shah et al., FlashAttention-3, 2024 (arXiv:2407.08608). Backward is the rung `triton`'s.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.attention._triton import LOG2E, UNBOUNDED

_load: gl.constexpr = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store: gl.constexpr = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
ROWS = gl.constexpr(64)  # queries of a group of warps: as many as a matrix instruction takes


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
    def fill(self, source, n, batch, head, row):
        place = n % self.SIZE
        mbarrier.wait(self.free.index(place), ((n // self.SIZE) & 1) ^ 1)
        mbarrier.expect(self.ready.index(place), source.block_type.nbytes)
        _load(source, [batch, head, row, 0], self.ready.index(place), self.tiles.index(place))

    @gluon.jit
    def tile(self, n):
        return self.tiles.index(n % self.SIZE).reshape([self.tiles.type.shape[3], self.tiles.type.shape[4]])

    @gluon.jit
    def take(self, n, wanted=True):
        mbarrier.wait(self.ready.index(n % self.SIZE), (n // self.SIZE) & 1, pred=wanted)
        return self.tile(n)

    @gluon.jit
    def give(self, n, wanted=True):
        mbarrier.arrive(self.free.index(n % self.SIZE), count=1, pred=wanted)


@gluon.jit
def _ring(source, SIZE: gl.constexpr, READERS: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SIZE):
        mbarrier.init(ready.index(n), count=1)
        mbarrier.init(free.index(n), count=READERS)
    return Ring(gl.allocate_shared_memory(source.dtype, [SIZE] + source.block_type.shape, source.layout), ready, free)


@aggregate
class Plan:
    """Which tiles of queries a program takes in which order, and what each sees.

    Tiles of a section of heads come before the next section's, so that the heads that run share the L2 cache, the heaviest first. PAIRS:
    a program takes the heaviest and the lightest tile of a head, then the next such pair; else it takes every so many-th tile, from left
    to right and then from right to left. Either gives all programs as much to do.
    """

    turns: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    section: gl.tensor
    tiles: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    shift: gl.tensor
    left: gl.tensor
    right: gl.tensor
    factor: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    PAIRS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, turns, heads, group, section, tiles, rows, columns, shift, left, right, factor, BM, BN, LEFT, RIGHT, PAIRS):
        self.turns = turns
        self.heads = heads
        self.group = group
        self.section = section
        self.tiles = tiles
        self.rows = rows
        self.columns = columns
        self.shift = shift
        self.left = left
        self.right = right
        self.factor = factor
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.PAIRS = gl.constexpr(PAIRS)

    @gluon.jit
    def count(self):
        tiles = self.tiles
        if self.PAIRS:
            tiles = (tiles + 1) // 2 * 2
        return self.turns * tiles

    @gluon.jit
    def step(self, n):
        """The number of this program's n-th tile."""
        program = gl.program_id(0)
        if self.PAIRS:
            t = ((n // 2) * gl.num_programs(0) + program) * 2 + (n & 1)
        else:
            if (n & 1) == 1:
                program = gl.num_programs(0) - 1 - program
            t = n * gl.num_programs(0) + program
        return t

    @gluon.jit
    def place(self, t):
        """A tile's head, counted through batches, its first row, and the blocks of keys from and up to which its rows see some."""
        if self.PAIRS:
            half = (self.tiles + 1) // 2
            first = t // 2 // (self.section * half)
            within = t // 2 - first * (self.section * half)
        else:
            first = t // (self.section * self.tiles)
            within = t - first * (self.section * self.tiles)
        size = gl.minimum(self.section, self.turns - first * self.section)
        tile = self.tiles - 1 - within // size
        if self.PAIRS:  # noqa: SIM102  # this one is decided by the compiler
            if (t & 1) == 1:
                tile = within // size
        row = tile * self.BM
        high = gl.cdiv(self.columns, self.BN)
        if self.RIGHT:
            high = gl.minimum(high, gl.maximum(row + self.BM - 1 + self.shift + self.right + self.BN, 0) // self.BN)
        low = 0
        if self.LEFT:
            low = gl.maximum(row + self.shift - self.left, 0) // self.BN
        high = gl.maximum(high, 1)
        return first * self.section + within % size, row, gl.minimum(low, high - 1), high

    @gluon.jit
    def whole(self, row, low):
        """The blocks from and up to which all of a group's rows see every key."""
        high = self.columns // self.BN
        if self.RIGHT:
            high = gl.minimum(high, gl.maximum(row + self.shift + self.right + 1, 0) // self.BN)
        if self.LEFT:
            low = gl.cdiv(gl.maximum(row + ROWS - 1 + self.shift - self.left, 0), self.BN)
        return low, high

    @gluon.jit
    def hide(self, s, row, block):
        """Scores of keys that a row does not see become -inf."""
        i = row + self.shift + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))[:, None]
        j = block * self.BN + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
        seen = j + 0 * i < self.columns
        if self.RIGHT:
            seen = seen & (j <= i + self.right)
        if self.LEFT:
            seen = seen & (j >= i - self.left)
        return gl.where(seen, s, float("-inf"))


@gluon.jit
def _fetch(queries, keys, values, qs, ks, vs, plan):
    """The warp that fills the rings."""
    GROUPS: gl.constexpr = plan.BM // ROWS
    n, block = 0, 0
    t = plan.step(0)
    while t < plan.count():
        turn, row, low, high = plan.place(t)
        b, h = turn // plan.heads, turn % plan.heads
        for g in gl.static_range(GROUPS):
            qs.fill(queries, n * GROUPS + g, b, h, row + g * ROWS)
        for past in range(high - low):
            start = (high - 1 - past) * plan.BN
            ks.fill(keys, block, b, h // plan.group, start)
            vs.fill(values, block, b, h // plan.group, start)
            block += 1
        n += 1
        t = plan.step(n)


@gluon.jit
def _named(ME: gl.constexpr, WAIT: gl.constexpr):
    """A barrier of two groups: to wait at it, or to say that the other need not."""
    if WAIT:
        if ME == 0:
            gl.inline_asm_elementwise("bar.sync 13, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
        else:
            gl.inline_asm_elementwise("bar.sync 14, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    else:
        if ME == 0:
            gl.inline_asm_elementwise("bar.arrive 13, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
        else:
            gl.inline_asm_elementwise("bar.arrive 14, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """Neighbours of a row as one register of two: single halves, carried around a loop, take a register each and two moves more."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    else:
        packed = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return packed


@gluon.jit
def _unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """As the left side of a product. In registers of its own, which only a zero that the compiler does not know makes sure of: the
    loop's next values would be written where the product still reads."""
    packed = packed ^ (gl.num_programs(1) - 1)
    even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


@gluon.jit
def _soften(s, top, total, factor, dtype: gl.constexpr):
    """Exponentials of scores, packed, and the running maximum (base 2, scaled) and sum; what was summed before shrinks by the last."""
    most = gl.maximum(top, gl.max(s, 1) * factor)
    shrink = gl.exp2(top - most)
    p = gl.exp2(s * factor - most[:, None])
    return _pack(p, dtype), most, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _attend(ME: gl.constexpr, out, lse, qs, ks, vs, plan, TURNS: gl.constexpr):
    """A group of warps: its rows of all tiles of this program."""
    GROUPS: gl.constexpr = plan.BM // ROWS
    BN: gl.constexpr = plan.BN
    D: gl.constexpr = out.block_type.shape[3]
    dtype: gl.constexpr = out.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    nothing = gl.full([ROWS], 0.0, gl.float32, rows)
    lowest = gl.full([ROWS], -1.0e30, gl.float32, rows)  # no -inf: their difference would be NaN
    n, block = 0, 1
    if TURNS and ME == 1:
        _named(0, False)
    t = plan.step(0)
    turn, row, low, high = plan.place(t)
    q = qs.take(ME)
    keys = ks.take(0)
    if TURNS:
        _named(ME, True)
    scores = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    if TURNS:
        _named(1 - ME, False)
    s = warpgroup_mma_wait(0, deps=(scores,))
    ks.give(0)
    p, top, total, shrink = _soften(plan.hide(s, row + ME * ROWS, high - 1), lowest, nothing, plan.factor, dtype)
    while t < plan.count():
        row += ME * ROWS
        from_, upto = plan.whole(row, low)
        q = qs.tile(n * GROUPS + ME)
        acc = gl.zeros([ROWS, D], gl.float32, o_layout)
        for past in range(1, high - low):
            here = high - 1 - past
            values = vs.take(block - 1)
            keys = ks.take(block)
            left = _unpack(p, dtype, p_layout)
            if TURNS:
                _named(ME, True)
            scores = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
            products = warpgroup_mma(left, values, acc, is_async=True)
            if TURNS:
                _named(1 - ME, False)
            s = warpgroup_mma_wait(1, deps=(scores,))
            ks.give(block)
            if (here >= upto) | (here < from_):
                s = plan.hide(s, row, here)
            p, top, total, shrink = _soften(s, top, total, plan.factor, dtype)
            acc = warpgroup_mma_wait(0, deps=(products,))
            vs.give(block - 1)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            block += 1
        # The next tile's first scores, while this one's last products run.
        t = plan.step(n + 1)
        more = t < plan.count()
        turn_next, row_next, low, high = plan.place(gl.minimum(t, plan.count() - 1))
        q = qs.take((n + 1) * GROUPS + ME, more)
        values = vs.take(block - 1)
        keys = ks.take(block, more)
        left = _unpack(p, dtype, p_layout)
        if TURNS:
            _named(ME, True)
        scores = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        products = warpgroup_mma(left, values, acc, is_async=True)
        if TURNS:
            _named(1 - ME, False)
        s = warpgroup_mma_wait(1, deps=(scores,))
        ks.give(block, more)
        s = plan.hide(s, row_next + ME * ROWS, high - 1)
        p, top_next, total_next, shrink = _soften(s, lowest, nothing, plan.factor, dtype)
        acc = warpgroup_mma_wait(0, deps=(products,))
        vs.give(block - 1)
        some = total > 0.0
        total = gl.where(some, total, 1.0)
        i = row + gl.arange(0, ROWS, rows)
        sums = gl.where(some, (top + gl.log2(total)) * 0.6931471805599453, float("-inf"))
        gl.store(lse + turn.to(gl.int64) * plan.rows + i, sums, mask=i < plan.rows)
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
        qs.tile(n * GROUPS + ME).store(acc.to(dtype))  # where q was
        fence_async_shared()
        _store(out, [turn // plan.heads, turn % plan.heads, row, 0], qs.tiles.index((n * GROUPS + ME) % qs.SIZE))
        tma.store_wait(0)
        qs.give(n * GROUPS + ME)
        turn, row, top, total = turn_next, row_next, top_next, total_next
        block += 1
        n += 1
    if TURNS and ME == 0:
        _named(0, True)


@gluon.jit(do_not_specialize=["turns", "heads", "group", "section", "tiles", "rows", "columns", "shift", "left", "right"])
def _fwd(lse, queries, keys, values, out, turns, heads, group, section, tiles, rows, columns, shift, left, right, factor, GROUPS: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PAIRS: gl.constexpr, BN: gl.constexpr):  # fmt: skip
    plan = Plan(turns, heads, group, section, tiles, rows, columns, shift, left, right, factor, GROUPS * ROWS, BN, LEFT, RIGHT, PAIRS)
    qs = _ring(queries, 2 * GROUPS, 1)
    ks = _ring(keys, STAGES, GROUPS)
    vs = _ring(values, STAGES, GROUPS)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, out, lse, qs, ks, vs, plan, True)),
                (_attend, (1, out, lse, qs, ks, vs, plan, True)),
                (_fetch, (queries, keys, values, qs, ks, vs, plan)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, out, lse, qs, ks, vs, plan, False)),
                (_attend, (1, out, lse, qs, ks, vs, plan, False)),
                (_attend, (2, out, lse, qs, ks, vs, plan, False)),
                (_fetch, (queries, keys, values, qs, ks, vs, plan)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def whole(t: torch.Tensor) -> bool:
    """Whether the copy engine can see a tensor: it begins at a multiple of 16 bytes, its rows too, and it is not expanded."""
    return t.data_ptr() % 16 == 0 and not any([n > 1 and (step % 8 or not step) for n, step in zip(t.shape[:3], t.stride(), strict=False)])


def refusal(x: torch.Tensor, *rest: Any, **_: Any) -> str | None:
    """Why these kernels do not take a call, of public arguments or of a launcher's inputs (backward's begin with do and dlse), or None."""
    q, *rest = rest[1:] if len(rest) > 15 else (x, *rest)
    k, v, *rest = rest[:2] + rest[4:] if len(rest) > 13 else rest
    if rest:
        mask, packed, _, scale, softcap, *_ = rest
        if mask is not None or packed is not None or softcap or scale <= 0:
            return "it takes no mask, no packed sequences, no softcap and a scale above 0"
    if q.shape[-1] > 128 or not (q.numel() and k.numel()):
        return f"D must be at most 128 and no size 0; q is {tuple(q.shape)} and k {tuple(k.shape)}"
    for t in (q, k, v):
        if not whole(t):
            return "it copies whole 16 bytes: q, k and v must begin at multiples of 16 bytes, and so must their rows, and none be expanded"
    return None


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, cu_q: None, cu_k: None,
    scale: float, softcap: float, left: int, right: int, bottom: bool, max_q: int, max_k: int, precision: str,
) -> None:  # fmt: skip
    """Fills o and lse; see `attention_fwd` in _attention.py."""
    (batch, heads, rows, D), columns = q.shape, k.shape[2]
    ahead, back = right < UNBOUNDED, left < UNBOUNDED
    groups = 3 if D <= 64 and rows > (4096 if ahead else 1536) else 2
    pairs = ahead and not back and columns <= 8192  # of longer ones all heads' tiles at once divide better
    turns, tiles = batch * heads, triton.cdiv(rows, 64 * groups)
    shared = 4 * columns * D * k.shape[1] // heads  # bytes of keys and values for each head of queries
    section = max(1, min(turns, (24 << 20) // max(1, shared))) if pairs or back else turns if ahead else 1
    count = turns * (triton.cdiv(tiles, 2) if pairs else tiles)
    facts: dict[str, Any] = {"GROUPS": groups, "STAGES": 3 if D <= 64 else 2, "LEFT": back, "RIGHT": ahead, "PAIRS": pairs, "BN": 128}
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 128 if groups == 3 else 168}
    numbers = turns, heads, heads // k.shape[1], section, tiles, rows, columns, columns - rows if bottom else 0, left, right
    wide = triton.next_power_of_2(D)
    maps = [TensorMap(t, (1, 1, n, wide), min(128, 2 * wide)) for t, n in ((q, 64), (k, 128), (v, 128), (o, 64))]
    grid = (min(count, device.of(q).multiprocessors),)
    launch(_fwd, grid, lse, *maps, *numbers, scale * LOG2E, **facts, **options)
