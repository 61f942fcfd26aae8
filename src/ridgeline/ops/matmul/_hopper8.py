"""The implementation `gluon` of the 8-bit products: the warp-specialised scheme of `_hopper`, for int8 and fp8.

A step covers 128 of K, again 128 bytes per row. The matrix units take 8-bit operands along K only, so the rows of a and
of b.T must run along K. int8 products accumulate in int32 over all of K, as `_hopper` does in float32. fp8 sums in the
matrix units keep only about 14 bits, so each step promotes them to float32: a group multiplies 128 of its columns, adds
them to float32 sums (times the scales of their blocks), then does its other 128. The other group multiplies meanwhile,
since it starts half a step apart. A separate warp loads the scales of blocks into the ring.
Source: the promotion is DeepSeek-V3's (arXiv:2412.19437, section 3.3.2); the staggered groups are as in DeepGEMM
(DeepSeek-AI, 2025).
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.op import dtype_name
from ridgeline.ops.matmul import _hopper
from ridgeline.ops.matmul._hopper import whole
from ridgeline.ops.matmul._hopper_pipeline import GROUPS, Operands, Tile, Tiles, fetch_tiles, make_ring, send_chunk
from ridgeline.ops.matmul._scaled import BLOCK, add_columns, blocks, step, unlike
from ridgeline.tiles.warpgroup import column_chunks

# Triton 3.9 renamed it.
_gather: gl.constexpr = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

DEEP = gl.constexpr(BLOCK)


class Result(NamedTuple):
    """What is stored: a pointer to y, and its tensor map, None if TMA cannot store its rows."""

    y: Any
    out: Any


class Scaling(NamedTuple):
    """What turns sums of 8-bit products into results; zero_a, sums (of b's columns) and bias may be None."""

    a: Any
    b: Any
    zero_a: Any
    sums: Any
    bias: Any


class Strides(NamedTuple):
    """The strides of scales, zero points and bias. A block is 128 of K."""

    a_row: Any
    a_block: Any
    b_column: Any
    b_block: Any
    zero: Any
    bias: Any


class Held(NamedTuple):
    """Scales in shared memory: those of rows of a, and those of columns of b."""

    left: Any
    right: Any


@gluon.jit
def _across(t, at, N, t_step, x):
    """Loads a number per column, from column `at` on; 0 beyond the edge."""
    j = at + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    return gl.load(t + j.to(gl.int64) * t_step, mask=j < N, other=0)[None, :]


@gluon.jit
def _down(t, i, M, t_step):
    """Loads a number per row; beyond the edge the last one, for results that are never stored."""
    return gl.load(t + gl.minimum(i, M - 1).to(gl.int64) * t_step)


@gluon.jit
def _weigh(scaling, strides, held, ring, tiles):
    """The warp that loads each step's scales, by blocks."""
    left, right = held
    ROWS: gl.constexpr = left.type.shape[1]
    PIECES: gl.constexpr = right.type.shape[1]
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place, odd = 0, 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n, _batch, _part, low, high = tiles.place(t)
        i = gl.minimum(m + gl.arange(0, ROWS, lanes), tiles.M - 1) * strides.a_row
        other = gl.minimum(m + ROWS + gl.arange(0, ROWS, lanes), tiles.M - 1) * strides.a_row
        j = gl.minimum(n // DEEP + gl.arange(0, PIECES, lanes), gl.cdiv(tiles.N, DEEP) - 1) * strides.b_column
        for k in range(low, high):
            mbarrier.wait(ring.free.index(place), odd ^ 1)
            _gather(left.index(place * GROUPS), scaling.a + (i + k * strides.a_block))
            _gather(left.index(place * GROUPS + 1), scaling.a + (other + k * strides.a_block))
            _gather(right.index(place), scaling.b + (j + k * strides.b_block))
            async_copy.mbarrier_arrive(ring.ready.index(place), increment_count=False)
            place, odd = ring.after(place, odd)


@gluon.jit
def _add_floats(
    place,
    odd,
    low,
    high,
    held,
    ring,
    begun,
    begins,
    tiles,
    ME: gl.constexpr,
    PIECES: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Returns the float32 sums of a group's rows of a tile, in pieces by columns, and the ring's next place.

    BLOCKS: scales are per 128 of K and 128 columns of b. begins: the step at which `begun` releases the other group,
    once its first products are under way.
    """
    ROWS: gl.constexpr = tiles.BM // GROUPS
    WIDE: gl.constexpr = tiles.BN // PIECES
    gl.static_assert(WIDE <= DEEP, "a piece of a tile lies in one block of columns")
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 32])
    none = gl.zeros([ROWS, WIDE], gl.float32, layout)
    total, other, part = none, none, none
    # Not a constant, or the compiler would give the two pieces' products separate registers.
    never = tiles.M < 0
    for k in range(low, high):
        mbarrier.wait(ring.ready.index(place), odd)
        left = ring.left(place, ME)
        part = warpgroup_mma(left, ring.right(place, 0, PIECES), part, use_acc=never, is_async=True)
        if ME == 0 and k == begins:
            mbarrier.arrive(begun.index(0), count=1)
        if BLOCKS:  # loaded during the products
            rows = held.left.index(place * GROUPS + ME).load(gl.SliceLayout(1, layout))
            scale = rows * held.right.index(place).slice(0, 1).load(gl.SliceLayout(1, layout))
        part = warpgroup_mma_wait(0, deps=(part,))
        if PIECES == 1:
            ring.give(place)
        total += part * scale[:, None] if BLOCKS else part
        if PIECES == 2:
            # Waits for nothing: keeps the compiler from adding later, when both pieces' products would need registers.
            total, part = warpgroup_mma_wait(0, deps=(total, part))
            part = warpgroup_mma(left, ring.right(place, 1, PIECES), part, use_acc=never, is_async=True)
            if BLOCKS:
                scale = rows * held.right.index(place).slice(1, 1).load(gl.SliceLayout(1, layout))
            part = warpgroup_mma_wait(0, deps=(part,))
            ring.give(place)
            other += part * scale[:, None] if BLOCKS else part
        place, odd = ring.after(place, odd)
    return total, other, place, odd


@gluon.jit
def _add_whole(place, odd, low, high, ring, tiles, ME: gl.constexpr):
    """Returns the int32 sums of a group's rows of a tile, and the ring's next place."""
    # Triton has no int8 product wider than 224 columns.
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(tiles.BN, 128), 32]
    )
    acc = gl.zeros([tiles.BM // GROUPS, tiles.BN], gl.int32, layout)
    started = ring.multiply(place, odd, acc, ME, False)
    return ring.add_up(place, odd, started, low, high, ME)


@gluon.jit
def _scales_of(m, n, scaling, strides, tiles):
    """Loads the scales of a tile's columns and of a group's rows."""
    j = n + gl.arange(0, tiles.BN, gl.BlockedLayout([max(1, tiles.BN // 128)], [32], [4], [0]))
    columns = gl.load(scaling.b + j.to(gl.int64) * strides.b_column, mask=j < tiles.N, other=0)
    i = m + gl.arange(0, tiles.BM // GROUPS, gl.BlockedLayout([1], [32], [4], [0]))
    return columns, _down(scaling.a, i, tiles.M, strides.a_row)


@gluon.jit
def _multiply(
    ME: gl.constexpr,
    result,
    scaling,
    strides,
    held,
    ring,
    boards,
    begun,
    tiles,
    LAG: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """A consumer group: its rows of all tiles. Scales by rows are loaded as a tile begins, and used as it ends."""
    ROWS: gl.constexpr = tiles.BM // GROUPS
    CHUNK: gl.constexpr = boards.type.shape[3]
    CHUNKS: gl.constexpr = tiles.BN // CHUNK
    BOARDS: gl.constexpr = boards.type.shape[0] // GROUPS
    gl.static_assert(
        CHUNKS % BOARDS == 0, "a tile must end with the last board, since the next one begins with the first"
    )
    WHOLE: gl.constexpr = ring.a.dtype == gl.int8
    PIECES: gl.constexpr = 2 if tiles.BN > DEEP and not WHOLE else 1
    place, odd, n_th = 0, 0, 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n, batch, _part, low, high = tiles.place(t)
        m += ME * ROWS
        if not BLOCKS:
            columns, lines = _scales_of(m, n, scaling, strides, tiles)
        if WHOLE:
            if ME * LAG > 0 and n_th == 0:
                mbarrier.wait(ring.ready.index(gl.minimum(ME * LAG, high - low - 1)), 0)
        elif ME == 1 and n_th == 0:
            mbarrier.wait(begun.index(0), 0)
        if WHOLE:
            acc, place, odd = _add_whole(place, odd, low, high, ring, tiles, ME)
            pieces = column_chunks(acc, CHUNKS)
        else:
            begins = gl.where(n_th == 0, gl.minimum(low + LAG, high - 1), -1)
            acc, other, place, odd = _add_floats(
                place, odd, low, high, held, ring, begun, begins, tiles, ME, PIECES, BLOCKS
            )
            pieces = column_chunks(acc, CHUNKS // PIECES)
            if PIECES == 2:
                pieces = pieces + column_chunks(other, CHUNKS // PIECES)
        x = pieces[0]
        i = m + gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
        if not BLOCKS:
            held.left.index(ME).store(lines)
            held.right.index(ME).store(columns)
            rows = held.left.index(ME).load(gl.SliceLayout(1, x.type.layout))[:, None]
        if scaling.zero_a is not None:
            zero = _down(scaling.zero_a, i, tiles.M, strides.zero).to(gl.int32)[:, None]
        for c in gl.static_range(CHUNKS):
            at = n + c * CHUNK
            x = pieces[c]
            if scaling.zero_a is not None:
                x -= zero * _across(scaling.sums, at, tiles.N, 1, x)
            x = x.to(gl.float32)
            if not BLOCKS:
                x *= rows
                x *= held.right.index(ME).slice(c * CHUNK, CHUNK).load(gl.SliceLayout(0, x.type.layout))[None, :]
            if scaling.bias is not None:
                x += _across(scaling.bias, at, tiles.N, strides.bias, x).to(gl.float32)
            send_chunk(
                result.out,
                result.y,
                x,
                boards.index(ME * BOARDS + c % BOARDS),
                batch,
                m,
                at,
                tiles.M,
                tiles.N,
                BOARDS - 1,
            )
        n_th += 1  # noqa: SIM113  # Gluon knows no enumerate
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "a_row", "a_block", "b_column", "b_block", "zero_step", "bias_step"])
def _fwd(
    result,
    operands,
    scaling,
    M,
    N,
    steps,
    a_row,
    a_block,
    b_column,
    b_block,
    zero_step,
    bias_step,
    tile: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    dtype: gl.constexpr = result.y.dtype.element_ty
    CHUNK: gl.constexpr = 1024 // dtype.primitive_bitwidth
    ROWS: gl.constexpr = tile.ROWS
    LAG: gl.constexpr = tile.LAG
    tiles = Tiles(M, N, steps, gl.to_tensor(1), gl.to_tensor(1), GROUPS * ROWS, tile.BN, tile.GROUP)
    strides = Strides(a_row, a_block, b_column, b_block, zero_step, bias_step)
    begun = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(begun.index(0), count=1)
    ring = make_ring(operands, tile, 32 if BLOCKS else 0)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if BLOCKS:
        left = gl.allocate_shared_memory(gl.float32, [GROUPS * tile.STAGES, ROWS], layout)
        right = gl.allocate_shared_memory(gl.float32, [tile.STAGES, 2 if tile.BN > DEEP else 1], layout)
    else:
        left = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], layout)
        right = gl.allocate_shared_memory(gl.float32, [GROUPS, tile.BN], layout)
    held = Held(left, right)
    boards = gl.allocate_shared_memory(
        dtype, [GROUPS * tile.BOARDS, 1, ROWS, CHUNK], gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 3)
    )
    fence_async_shared()
    if BLOCKS:
        gl.warp_specialize(
            [
                (_multiply, (0, result, scaling, strides, held, ring, boards, begun, tiles, LAG, BLOCKS)),
                (_multiply, (1, result, scaling, strides, held, ring, boards, begun, tiles, LAG, BLOCKS)),
                (fetch_tiles, (operands, 0, 0, ring, tiles)),
                (_weigh, (scaling, strides, held, ring, tiles)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, result, scaling, strides, held, ring, boards, begun, tiles, LAG, BLOCKS)),
                (_multiply, (1, result, scaling, strides, held, ring, boards, begun, tiles, LAG, BLOCKS)),
                (fetch_tiles, (operands, 0, 0, ring, tiles)),
            ],
            [4, 1],
            [240, 24],
        )


def _wide(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> int | None:
    """Returns how many columns of b share a block's scale, or 0 if scales span all of K (as with K of one block)."""
    wide = 0 if a.dtype == torch.int8 else blocks(a, b, scale_a, scale_b)
    return 0 if wide == 1 and a.shape[1] <= BLOCK else wide


def refusal(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *rest: Any, **options: Any
) -> str | None:
    """Returns why these operands are not taken, or None. Takes public arguments or a launcher's inputs."""
    for name, t, lines in (("a", a, "rows"), ("b", b.mT, "columns")):
        if not whole(t):
            given = a if t is a else b
            return (
                f"matrix units need K contiguous, and TMA 16-byte alignment: {name}'s {lines} must be contiguous "
                f"and begin at multiples of 16 bytes; its shape is {tuple(given.shape)}, its strides {given.stride()}"
            )
    return odd(a, b, scale_a, scale_b, *rest, **options)


def odd(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *rest: Any, **options: Any
) -> str | None:
    """As `refusal`, for operands of any strides."""
    results = [options.get("out_dtype"), *[r for r in rest if isinstance(r, torch.dtype)]]
    if a.dtype != torch.int8 and torch.float32 in results:
        return "the matrix units add 8-bit floats in about 14 bits over 128 of K, too coarse for a float32 result"
    if _wide(a, b, scale_a, scale_b) == 1:
        return f"it takes b's scales per block of {BLOCK} columns, or scales by rows; these are of single columns"
    if any(
        [sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)]) >= 1 << 31 for t in (scale_a, scale_b)]
    ):
        return "it indexes scales in 32 bits, which their strides exceed"
    return unlike(a, b, scale_a, scale_b) or _hopper.empty(a, b)


FEW = "its tiles have 128 rows; other implementations have smaller tiles for so few rows"


def unless(a: torch.Tensor, b: torch.Tensor, *scales: Any, **_: Any) -> str | None:
    """Returns why a call of few rows is left to other implementations, or None: a tile has 128 rows."""
    if a.shape[0] > 64:
        return None
    if (
        a.shape[0] > 16
        and b.shape[1] >= 8192
        and a.dtype != torch.int8
        and len(scales) > 1
        and _wide(a, b, *scales[:2])
    ):
        return None
    return FEW


def padded_unless(a: torch.Tensor, b: torch.Tensor, *scales: Any, **options: Any) -> str | None:
    """Returns why a call is left to `triton`, or None: for short products, copying the operands costs what it saves.

    `triton` loads such bytes one by one in tiles of 64 x 64 and steps of 128 of K, over the 132 multiprocessors of a
    Hopper GPU. Operands that need no copy are for `gluon`. Tracing never asks, since `triton` serves every call there.
    """
    if whole(a) and whole(b.mT):
        return unless(a, b, *scales, **options)
    (M, K), N = a.shape, b.shape[1]
    steps = triton.cdiv(triton.cdiv(M, 64) * triton.cdiv(N, 64), 132) * triton.cdiv(K, BLOCK)
    return "for so little work, copying the operands takes as long as it saves" if steps < 8 else None


# As `_hopper.TILES`, without 128 x 128 per group: 128 registers of products and 128 of sums leave no room for scales.
TILES = ((64, 256, 4, 2), (64, 128, 5, 2), (64, 64, 8, 1))


def rule(gpu: device.Device, M: int, N: int, K: int, starts: tuple[int, int] = (128, 128)) -> tuning.Config:
    """As `_hopper.rule`: a step has twice the elements at twice the rate, so the same bytes and time."""
    half, memory = triton.cdiv(K, 2), M * K + K * N + 2 * M * N
    made = _hopper.rule(
        gpu, 1, M, N, half, gated=False, more=False, kept=False, starts=starts, tiles=TILES, splits=(1,), memory=memory
    )
    return {n: v for n, v in made.items() if n != "PARTS"}


def space() -> list[tuning.Config]:
    made = [{**_hopper.tile_of(*tile, False), "GROUP": group} for tile in TILES for group in (8, 16)]
    return [tile | {"LAG": lag} for tile in made for lag in (0, tile["LAG"])]


def product(
    op: str,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    zero_a: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """y = (a - zero_a) @ b * scale_a * scale_b + bias. a: (M, K) and b.mT: (N, K), `whole`; y: (M, N), contiguous.

    sums: of b's columns, needed with zero_a.
    """
    (M, K), N, gpu = a.shape, b.shape[1], device.of(y)
    left, right = a[None], b.mT[None]
    starts = _hopper.begins(left), _hopper.begins(right)
    sizes = [str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K)]
    by_blocks = bool(_wide(a, b, scale_a, scale_b))
    words = [word for word, on in (("straddling", min(starts) < 128), ("blocks", by_blocks)) if on]
    key = " ".join([dtype_name(a), *sizes, *words])
    made: dict[str, Any] = tuning.config(gpu, op, "hopper", key, lambda: rule(gpu, M, N, K, starts), space)
    steps = (*scale_a.stride(), *scale_b.stride()[::-1]) if by_blocks else (step(scale_a, 0), 0, step(scale_b, -1), 0)
    more = step(zero_a, 0), 0 if bias is None else bias.stride(0)
    rows, wide = made["ROWS"], made["BN"]
    out = (
        TensorMap(y[None], (1, rows, 128 // y.element_size()), 128)
        if whole(y) and N * y.element_size() % 16 == 0
        else None
    )
    operands = Operands(TensorMap(left, (1, rows, BLOCK), 128), TensorMap(right, (1, wide, BLOCK), 128), None)
    tiles = triton.cdiv(M, 2 * rows) * triton.cdiv(N, wide)
    given = Result(y, out), operands, Scaling(scale_a, scale_b, zero_a, sums, bias)
    numbers = M, N, triton.cdiv(K, BLOCK), *steps, *more
    facts: dict[str, Any] = {"tile": Tile(**made), "BLOCKS": by_blocks, "num_warps": 4, "maxnreg": 168}
    launch(_fwd, (min(tiles, gpu.multiprocessors),), *given, *numbers, **facts)


def fp8(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any, _: Any
) -> None:
    product("fp8_matmul", y, a, b, scale_a, scale_b, bias=bias)


def int8(y: torch.Tensor, sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
    scale_a, scale_b, zero_a, bias, _ = rest
    if zero_a is not None:
        add_columns(sums, b)
    product(
        "int8_matmul", y, a, b, scale_a, scale_b, zero_a=zero_a, sums=sums if zero_a is not None else None, bias=bias
    )


def _along_k(t: torch.Tensor) -> torch.Tensor:
    """Returns (lines, K) as it is if TMA can load it, else an aligned copy, whose padding beyond K TMA never reads."""
    return t if whole(t) else _hopper.copied(t.view(torch.int8))[0].view(t.dtype)


def fp8_padded(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
    """`fp8` for any strides."""
    fp8(y, _along_k(a), _along_k(b.mT).mT, *rest)


def int8_padded(y: torch.Tensor, sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
    """`int8` for any strides."""
    int8(y, sums, _along_k(a), _along_k(b.mT).mT, *rest)


HOPPER: dict[str, Any] = {"kind": "gluon", "arch": 90, "newest": 90, "served": True}
# Facts of the implementations `gluon` and `gluon_padded`.
WHOLE: dict[str, Any] = {**HOPPER, "supports": refusal, "unless": unless}
PADDED: dict[str, Any] = {**HOPPER, "supports": odd, "unless": padded_unless}
IDEA = "`gluon`, after copying operands that do not lie along K in rows that TMA can load"
