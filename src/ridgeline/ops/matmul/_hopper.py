"""The implementation `gluon` of the matrix products: persistent, warp-specialised kernels for Hopper.

One producer warp loads tiles of a and b with TMA into a ring in shared memory. Two consumer warpgroups share a tile of
b, own half of a's rows each, and keep their sums in registers. While one group stores its results, in chunks of 128
bytes per row, the other multiplies, and the ring fills for the next tile. To overlap that way, the second group starts
LAG steps of K after the first. TMA handles the edges: it reads zeros beyond them and writes nothing there.

If there are too few tiles for all multiprocessors, K is split: partial sums go to memory in float32, and a second
kernel adds them in order. For a gated unit, half of b's tile comes from each of the two right-hand sides: the products
are the same, and only the epilogue combines them.
Source: CUTLASS's warp-specialised persistent kernels (NVIDIA, 2023), which also share loads between pairs of blocks.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.op import dtype_name, nbytes
from ridgeline.ops.matmul._epilogue import Epilogue, add_up
from ridgeline.ops.matmul._hopper_pipeline import GROUPS, Operands, Tile, Tiles, fetch_tiles, make_ring, send_chunk
from ridgeline.tiles.hopper import load as _load
from ridgeline.tiles.warpgroup import column_chunks


class Results(NamedTuple):
    """The tensor maps of what is stored: y or its parts, the activation's input and a @ up; None if TMA stores none."""

    out: Any
    z: Any
    z_up: Any


class Added(NamedTuple):
    """What is added to the products: a pointer to the bias and the residual's tensor map, or None."""

    bias: Any
    residual: Any


@gluon.jit
def _share(u):
    """Returns 1 / (1 + 2^u), exact enough for 16-bit results, in three instructions instead of Triton's nine."""
    code: gl.constexpr = "{.reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e;}"
    return gl.inline_asm_elementwise(code, "=f,f", [u], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    """gelu(x) = x P(Z <= x), with P(Z <= x) = 1 / (1 + 2^(x q)) and q a polynomial in x^2.

    q is fitted for |x| up to 5.6, to 3.5e-5 of the smaller tail and 2e-9 absolute; beyond, the tail is underestimated.
    """
    if ACTIVATION == "silu":
        x *= _share(x * -1.4426950408889634)
    elif ACTIVATION == "gelu_tanh":
        x *= _share(x * (x * x * -0.10294323965 - 2.3022081985))
    elif ACTIVATION == "gelu":
        z = x * x
        q = ((-2.8224656e-09 * z + 2.45359581e-07) * z - 8.38778655e-06) * z + 0.000127740857
        q = ((q * z + 0.000252738427) * z - 0.105174506) * z - 2.30199259
        x *= _share(x * q)
    return x


@gluon.jit
def _multiply(
    ME: gl.constexpr,
    y,
    results,
    added,
    ring,
    boards,
    arrived,
    tiles,
    ACTIVATION: gl.constexpr,
    LAG: gl.constexpr,
    GATED: gl.constexpr,
):
    """A consumer group: its rows of all tiles of this program. boards: staging buffers for its TMA stores."""
    ROWS: gl.constexpr = tiles.BM // GROUPS
    WIDE: gl.constexpr = tiles.BN * (2 if GATED else 1)
    out, z, z_up = results
    bias, residual = added
    CHUNK: gl.constexpr = boards.type.shape[3]
    CHUNKS: gl.constexpr = tiles.BN // CHUNK
    BOARDS: gl.constexpr = boards.type.shape[0] // GROUPS
    KEPT: gl.constexpr = 0 if z is None else 2 if GATED else 1
    gl.static_assert(
        CHUNKS * (KEPT + 1) % BOARDS == 0,
        "a tile must end with the last board, since the next one begins with the first",
    )
    PENDING: gl.constexpr = 0 if KEPT > 0 and residual is not None else BOARDS - 1
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    M, N = tiles.M, tiles.N
    place, odd, n_th = 0, 0, 0
    for t in range(gl.program_id(0), tiles.count(), gl.num_programs(0)):
        m, n, batch, part, low, high = tiles.place(t)
        m += ME * ROWS
        batch += part * tiles.batch
        if ME * LAG > 0 and n_th == 0:
            mbarrier.wait(ring.ready.index(gl.minimum(ME * LAG, high - low - 1)), 0)
        acc = gl.zeros([ROWS, WIDE], gl.float32, layout)
        sums = ring.multiply(place, odd, acc, ME, False)
        if residual is not None:  # loaded during the products
            tma.store_wait(0)
            mbarrier.expect(arrived.index(ME), CHUNKS * residual.block_type.nbytes)
            for c in gl.static_range(CHUNKS):
                _load(residual, [batch, m, n + c * CHUNK], arrived.index(ME), boards.index(ME * BOARDS + c))
        acc, place, odd = ring.add_up(place, odd, sums, low, high, ME)
        pieces = column_chunks(acc, WIDE // CHUNK)
        if residual is not None:
            mbarrier.wait(arrived.index(ME), n_th & 1)
        for c in gl.static_range(CHUNKS):
            x = pieces[c]
            at = n + c * CHUNK
            if bias is not None:
                j = at + gl.arange(0, CHUNK, gl.SliceLayout(0, x.type.layout))
                x += gl.load(bias + j, mask=j < N, other=0.0).to(gl.float32)[None, :]
            if residual is not None:
                board = boards.index(ME * BOARDS + c)
                more = board.reshape([ROWS, CHUNK]).load(x.type.layout).to(gl.float32)
            if z is not None:
                if residual is None:
                    board = boards.index(ME * BOARDS + c * (KEPT + 1) % BOARDS)
                send_chunk(z, y, x, board, batch, m, at, M, N, PENDING)
            if z_up is not None:
                board = boards.index(ME * BOARDS + (c * (KEPT + 1) + 1) % BOARDS)
                send_chunk(z_up, y, pieces[c + CHUNKS], board, batch, m, at, M, N, PENDING)
            x = _activate(x, ACTIVATION)
            if GATED:
                x *= pieces[c + CHUNKS]
            if residual is not None:
                x += more
            else:
                board = boards.index(ME * BOARDS + (c * (KEPT + 1) + KEPT) % BOARDS)
            send_chunk(out, y, x, board, batch, m, at, M, N, PENDING)
        n_th += 1  # noqa: SIM113  # Gluon knows no enumerate
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "batch", "parts", "a_step", "b_step"])
def _fwd(
    y,
    results,
    added,
    operands,
    M,
    N,
    steps,
    batch,
    parts,
    a_step,
    b_step,
    tile: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    GATED: gl.constexpr = operands.up is not None
    dtype: gl.constexpr = y.dtype.element_ty
    CHUNK: gl.constexpr = 1024 // dtype.primitive_bitwidth
    ROWS: gl.constexpr = tile.ROWS
    LAG: gl.constexpr = tile.LAG
    tiles = Tiles(M, N, steps, batch, parts, GROUPS * ROWS, tile.BN // 2 if GATED else tile.BN, tile.GROUP)
    ring = make_ring(operands, tile)
    arrived = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(GROUPS):
        mbarrier.init(arrived.index(n), count=1)
    boards = gl.allocate_shared_memory(
        dtype, [GROUPS * tile.BOARDS, 1, ROWS, CHUNK], gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 3)
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, y, results, added, ring, boards, arrived, tiles, ACTIVATION, LAG, GATED)),
            (_multiply, (1, y, results, added, ring, boards, arrived, tiles, ACTIVATION, LAG, GATED)),
            (fetch_tiles, (operands, a_step, b_step, ring, tiles)),
        ],
        [4, 1],
        [240, 24],
    )


def whole(t: torch.Tensor) -> bool:
    """Returns whether TMA can address t: contiguous rows that begin at multiples of 16 bytes."""
    steps = [(n, s * t.element_size()) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]
    last = t.shape[-1] > 1 and steps.pop()[1] != t.element_size()
    return (
        not last
        and t.data_ptr() % 16 == 0
        and not any([s % 16 for _, s in steps])
        and (t.shape[-2] == 1 or t.stride(-2) > 0)
    )


def refusal(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why TMA cannot load these operands in place, or None."""
    for name, t in (("a", a), ("b", b)):
        t = t if t.dim() > 1 else t[None] if name == "a" else t[:, None]
        if not (whole(t) or whole(t.mT)):
            return (
                f"it copies 16 bytes at a time: {name} must begin at a multiple of 16 bytes, and so must each of its "
                f"rows or columns, which must be contiguous; its shape is {tuple(t.shape)}, its strides {t.stride()}"
            )
    return empty(a, b)


def by_k(t: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Returns (batch, lines, K) as TMA addresses it, with batch 1 if shared, and whether its rows run along K."""
    t = t[None] if t.dim() == 2 else t
    t = t[:1] if t.stride(0) == 0 else t
    return (t, True) if whole(t) else (t.mT, False)


def begins(t: torch.Tensor) -> int:
    """Returns the alignment of t's rows in bytes, up to 128; below it, 128 bytes of a row straddle two cache lines."""
    return gcd(t.stride(-2) * t.element_size(), 128) if t.shape[-2] > 1 else 128


def product(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, up: torch.Tensor | None = None, z: torch.Tensor | None = None,
    z_up: torch.Tensor | None = None, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    activation: str = ""
) -> None:  # fmt: skip
    """y = activation(a @ b + bias) + residual, or activation(a @ b) * (a @ up).

    a: (batch, M, K); b, up: (batch, K, N), any of them without batch; `whole`, or transposed so, b and up alike.
    y, residual, z (the activation's input) and z_up (a @ up): (batch, M, N), contiguous; the last three `whole`.
    """
    y = y[None] if y.dim() == 2 else y
    (batch, M, N), K, gpu = y.shape, a.shape[-1], device.of(y)
    given: dict[str, Any] = {"gated": up is not None, "more": residual is not None, "kept": z is not None}
    a, a_by_k = by_k(a)
    b, b_by_k = by_k(b.mT)
    starts = begins(a), begins(b)
    words = [*(k for k in given if given[k]), *(["straddling"] * (min(starts) < 128))]
    key = " ".join([dtype_name(a), *(str(min(16384, triton.next_power_of_2(d))) for d in (batch, M, N, K)), *words])

    def chosen() -> tuning.Config:
        memory = nbytes(*[t for t in (a, b, up, y, z, z_up, residual) if t is not None])
        torn = 0 if b_by_k or starts[1] == 128 else nbytes(b) if up is None else nbytes(b, up)
        return rule(gpu, batch, M, N, K, **given, starts=starts, memory=memory, torn=torn)

    made = dict(tuning.config(gpu, "matmul", "hopper", key, chosen, lambda: space(**given)))
    parts = min(made.pop("PARTS"), triton.cdiv(K, 64))
    result = y
    if parts > 1:
        sums = y.new_empty((parts, batch, M, triton.cdiv(N, 8) * 8), dtype=torch.float32)
        result = sums.view(parts * batch, M, -1)
        epilogue, last = Epilogue(z, bias, residual), activation
        z = bias = residual = None
        activation = ""
    rows, wide = made["ROWS"], made["BN"] // (2 if up is not None else 1)

    def board(t: torch.Tensor | None) -> TensorMap | None:
        # `whole` allows a single row of any length, but TMA writes multiples of 16 bytes.
        if t is None or not whole(t) or t.shape[-1] * t.element_size() % 16:
            return None
        return TensorMap(t[None] if t.dim() == 2 else t, (1, rows, 128 // t.element_size()), 128)

    left = TensorMap(a, (1, rows, 64) if a_by_k else (1, 64, rows), 128)
    box = (1, wide, 64) if b_by_k else (1, 64, wide)
    rights = [None if t is None else TensorMap(t, box, 128) for t in (b, None if up is None else by_k(up.mT)[0])]
    tiles = triton.cdiv(M, 2 * rows) * triton.cdiv(N, wide) * parts * batch
    numbers = M, N, triton.cdiv(K, 64), batch, parts, int(a.shape[0] > 1), int(b.shape[0] > 1)
    facts: dict[str, Any] = {"ACTIVATION": activation, "num_warps": 4, "maxnreg": 168}
    facts["tile"] = Tile(**made, A_BY_K=a_by_k, B_BY_K=b_by_k)
    maps = Results(board(result), board(z), board(z_up)), Added(bias, board(residual)), Operands(left, *rights)
    launch(_fwd, (min(tiles, gpu.multiprocessors),), result, *maps, *numbers, **facts)
    if parts > 1:
        add_up(y, sums, epilogue, last)


# ROWS, BN, STAGES, BOARDS: as many as fit in shared memory.
TILES = ((64, 256, 4, 2), (128, 128, 4, 1), (64, 128, 6, 2), (64, 64, 8, 1))
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def _tiles(gated: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the tiles; half of a gated unit's tile must be a chunk of at least 64 columns."""
    return TILES[:-1] if gated else TILES


def tile_of(rows: int, wide: int, stages: int, boards: int, more: bool, gated: bool = False) -> tuning.Config:
    """Returns a tile's configuration: a residual needs boards for its whole tile and leaves one stage less.

    A tile of one chunk has one board. GROUP makes a wave of 132 tiles as close to a square as possible.
    """
    boards = wide // 64 if more else min(boards, wide // (128 if gated else 64))
    made = {"ROWS": rows, "BN": wide, "STAGES": stages - more, "BOARDS": boards}
    return {**made, "LAG": min(2, stages - more - 2), "GROUP": 16 if wide > 2 * rows else 8}


# Cycles per 128-byte row from L2 while all multiprocessors load, by the alignment of rows in bytes: 128 is a cache
# line, 32 a sector.
ROW = {16: 4.4, 32: 3.5, 64: 2.9, 128: 2.4}
# L2 bytes that tell Hopper cards with HBM3e (an H200: 60 MiB, 2400 bytes of memory a cycle) from those with HBM3 (an
# H100: 50 MiB, 1700).
FAST_MEMORY = 55 << 20


def rule(
    gpu: device.Device,
    batch: int,
    M: int,
    N: int,
    K: int,
    gated: bool,
    more: bool,
    kept: bool,
    starts: tuple[int, int] = (128, 128),
    tiles: tuple[tuple[int, int, int, int], ...] = TILES,
    splits: tuple[int, ...] = SPLITS,
    memory: int = 0,
    torn: int = 0,
) -> tuning.Config:
    """Returns the tile and the number of parts of K with the fewest estimated cycles, fitted on an H100.

    docs/notes/matmul.md has the timings. A step of K costs the largest of three: ROWS x BN / 16 cycles of the matrix
    units plus an eighth; a ROW for each row that it loads (`starts`: the alignment of a's and of b's rows); and, in
    small tiles, a wait of 300 cycles and more. In a partial last wave each multiprocessor gets more of L2: a ROW times
    the active share to the power 0.4.
    All tiles take at least `memory` (bytes of operands and results) at 1700 bytes a cycle, 2400 on an H200. A tile
    reads half a line more of `torn` bytes: b's, if its rows run along N and straddle cache lines. The larger of compute
    and memory counts, plus a twentieth of the smaller.
    A tile's prologue and epilogue take 3000 cycles. A second kernel takes 3000, plus 500 per part that it reads, plus
    one for every 2200 bytes that the parts and it move. The groups start together (LAG 0) if a program has one tile or
    if rows straddle cache lines, where bands of 8 tiles are also faster than bands of 16.
    """

    def count(tile: tuple[int, int, int, int], parts: int) -> int:
        return triton.cdiv(M, 2 * tile[0]) * triton.cdiv(N * (2 if gated else 1), tile[1]) * batch * parts

    def cycles(tile: tuple[int, int, int, int], parts: int) -> float:
        rows, wide, *_ = tile
        steps = triton.cdiv(triton.cdiv(K, 64), parts)

        def wave(share: float) -> float:
            loads = sum(
                n * max(ROW[128], ROW[start] * share**0.4) for n, start in zip((2 * rows, wide), starts, strict=True)
            )
            return steps * max(rows * wide / 14, loads, 300 + 1.27 * (2 * rows + wide)) + 3000

        least = (memory + torn * (64 if gated else 32) / wide) / (2400 if gpu.l2 > FAST_MEMORY else 1700)
        whole, left = divmod(count(tile, parts), gpu.multiprocessors)
        added = 3000 + 500 * parts + 4 * batch * M * N * (2 * parts + 1) / 2200 if parts > 1 else 0
        waves = whole * wave(1) + (wave(left / gpu.multiprocessors) if left else 0)
        return max(waves, least) + min(waves, least) / 20 + added

    splits = (1,) if gated else splits
    ways = [
        (tile, parts) for tile in (_tiles(gated) if gated else tiles) for parts in splits if parts <= triton.cdiv(K, 64)
    ]
    tile, parts = min(ways, key=lambda way: cycles(*way))
    alone = {"LAG": 0} if count(tile, parts) <= gpu.multiprocessors else {}
    straddling = {"LAG": 0, "GROUP": 8} if min(starts) < 128 else {}
    return {**tile_of(*tile, more, gated), **alone, **straddling, "PARTS": parts}


def space(gated: bool, more: bool, kept: bool) -> list[tuning.Config]:
    splits = (1,) if gated else (1, 2, 3, 4, 8)
    tiles = [{**tile_of(*tile, more, gated), "GROUP": g} for tile in _tiles(gated) for g in (8, 16)]
    return [{**tile, "LAG": lag, "PARTS": p} for tile in tiles for lag in (0, tile["LAG"]) for p in splits]


def fwd(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: str) -> None:
    """y = a @ b. a: (B, M, K) or (M, K); b: (B, K, N) or (K, N); y: contiguous."""
    product(y, a, b)


@triton.jit
def _align(out, t, rows, columns, pitch, t_batch, t_row, t_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    i = (tl.program_id(0) // across % down * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    j = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    x = tl.load(t + batch * t_batch + i * t_row + j * t_column, mask=(i < rows) & (j < columns), other=0)
    # Stores zeros up to the pitch, which no product reads: that mask allows 16-byte stores for any number of columns.
    tl.store(out + (batch * rows + i) * pitch + j, x, mask=(i < rows) & (j < pitch))


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Returns a matrix or batch of matrices as it is if TMA can load it, else an aligned copy."""
    return t if whole(t) or whole(t.mT) else copied(t.mT).mT if t.stride(-2) == 1 else copied(t)


def copied(t: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose rows begin at multiples of 16 bytes, or of 128 (an L2 cache line) if they are long."""
    t = t[None] if t.dim() == 2 else t[:1] if t.stride(0) == 0 else t
    batch, rows, columns = t.shape
    size = t.element_size()
    whole_of = (128 if columns * size > 1024 else 16) // size
    copy = t.new_empty((batch, rows, triton.cdiv(columns, whole_of) * whole_of))
    turned = t.stride(1) == 1 and t.stride(2) != 1  # tall tiles read whole sectors of columns
    tile: dict[str, Any] = (
        {"ROWS": 64, "COLUMNS": 128, "num_warps": 8} if turned else {"ROWS": 16, "COLUMNS": 128, "num_warps": 4}
    )
    grid = (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"]) * batch,)
    launch(_align, grid, copy, t, rows, columns, copy.shape[-1], *t.stride(), **tile)
    return copy[..., :columns]


def padded(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: str) -> None:
    """`fwd` for any strides."""
    product(y, aligned(a), aligned(b))


def empty(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return None if a.numel() and b.numel() else "it takes no dimension of size 0"
