"""The implementation `triton_persistent` of matmul: persistent programs and tensor descriptors, in plain Triton.

One program per multiprocessor computes tiles of y in the grouped order of `triton`. TMA loads and stores tiles by
descriptor, so threads compute no addresses and TMA handles the edges. The loops over tiles and over K are flattened
into one: a tile's first loads are in flight while the previous tile is still multiplied and stored. Unlike in `gluon`,
every warp does everything.
Source: CUTLASS's persistent kernels (NVIDIA, 2023); Triton's compiler decides what overlaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.op import dtype_name
from ridgeline.ops.matmul import _hopper
from ridgeline.ops.matmul._epilogue import Epilogue, finish


@triton.jit
def _lines(source, batch, line, k, LINES: tl.constexpr, BK: tl.constexpr, BY_K: tl.constexpr):
    """Loads LINES x BK elements of a matrix whose rows in memory run along K or across it."""
    if BY_K:
        x = source.load([batch, line, k]).reshape(LINES, BK)
    else:
        x = source.load([batch, k, line]).reshape(BK, LINES).T
    return x


@triton.jit
def _keep(y, out, x, batch, m, n, M, N):
    """Stores a tile of y, or half of one: with TMA, or from threads if y's rows are no multiple of 16 bytes."""
    if out is None:
        rows, columns = m + tl.arange(0, x.shape[0]), n + tl.arange(0, x.shape[1])
        finish(x, y, Epilogue(None, None, None), rows, columns, M, N, batch.to(tl.int64) * M * N, "")
    else:
        out.store([batch, m, n], x.to(y.dtype.element_ty).reshape(1, x.shape[0], x.shape[1]))


class Tile(NamedTuple):
    """A program's tile. PIECES: parts in which it is stored. FLAT: whether the loops over tiles and K are one."""

    BM: int
    BN: int
    BK: int
    GROUP: int
    PIECES: int
    FLAT: int


@triton.jit(do_not_specialize=["M", "N", "K", "batches", "a_step", "b_step"])
def _stay(
    y,
    out,
    a,
    b,
    M,
    N,
    K,
    batches,
    a_step,
    b_step,
    tile: tl.constexpr,
    A_BY_K: tl.constexpr,
    B_BY_K: tl.constexpr,
):
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    GROUP: tl.constexpr = tile.GROUP
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), down * across * batches, tl.num_programs(0), flatten=tile.FLAT):
        batch, place = t // (down * across), t % (down * across)
        first = place // (GROUP * across) * GROUP
        size = min(down - first, GROUP)
        m = (first + place % (GROUP * across) % size) * BM
        n = place % (GROUP * across) // size * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            left = _lines(a, batch * a_step, m, k, BM, BK, A_BY_K)
            right = _lines(b, batch * b_step, n, k, BN, BK, B_BY_K)
            total = tl.dot(left, right.T, total, input_precision="tf32")
        if tile.PIECES == 2:  # results in half the shared memory make room for another stage
            one, other = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            _keep(y, out, one, batch, m, n, M, N)
            _keep(y, out, other, batch, m, n + BN // 2, M, N)
        else:
            _keep(y, out, total, batch, m, n, M, N)


def fwd(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: str) -> None:
    """y = a @ b. a: (B, M, K) or (M, K); b: (B, K, N) or (K, N); y: contiguous."""
    y = y[None] if y.dim() == 2 else y
    (batch, M, N), K, gpu = y.shape, a.shape[-1], device.of(y)
    (a, a_by_k), (b, b_by_k) = _hopper.by_k(a), _hopper.by_k(b.mT)
    size = y.element_size()
    whole = N * size % 16 == 0
    sizes = [str(min(16384, triton.next_power_of_2(d))) for d in (batch, M, N, K)]
    key = " ".join([dtype_name(a), *sizes, *(["threads"] * (not whole))])
    found = tuning.config(
        gpu,
        "matmul",
        "persistent",
        key,
        lambda: rule(gpu, size, batch, M, N, K, whole),
        lambda: space(gpu, size, whole),
    )
    tile = Tile(**{k: v for k, v in found.items() if k in Tile._fields})
    left = TensorMap(a, (1, tile.BM, tile.BK) if a_by_k else (1, tile.BK, tile.BM))
    right = TensorMap(b, (1, tile.BN, tile.BK) if b_by_k else (1, tile.BK, tile.BN))
    out = TensorMap(y, (1, tile.BM, tile.BN // tile.PIECES)) if whole else None
    tiles = triton.cdiv(M, tile.BM) * triton.cdiv(N, tile.BN) * batch
    numbers = M, N, K, batch, int(a.shape[0] > 1), int(b.shape[0] > 1)
    facts: dict[str, Any] = {k: v for k, v in found.items() if k not in Tile._fields}
    facts |= {"tile": tile, "A_BY_K": a_by_k, "B_BY_K": b_by_k}
    launch(_stay, (min(tiles, gpu.multiprocessors),), y, out, left, right, *numbers, **facts)


def refusal(a: torch.Tensor, b: torch.Tensor, precision: str = "", *_: Any) -> str | None:
    """Returns why tensor descriptors cannot take these operands, or None."""
    if a.dtype == torch.float32 and (precision or torch.get_float32_matmul_precision()) in ("ieee", "highest"):
        return "it multiplies float32 as TF32, but torch.get_float32_matmul_precision() is 'highest'"
    return _hopper.refusal(a, b)


# Cycles per step of 128 bytes along K on an H100, by BN, with 128 rows: as in `gluon`, which does the same products.
STEPS = {256: 1140, 128: 627, 64: 546}


def _tile(gpu: device.Device, size: int, wide: int) -> tuning.Config:
    """Returns a tile with as many stages as fit, at most 4 in float32: Triton keeps transposed copies of operands."""
    pieces = 2 if wide == 256 else 1
    room = (gpu.shared_memory - 1024 - 128 * wide // pieces * size) // (128 * (128 + wide))
    stages = max(2, min(room, 8 if size == 2 else 4))
    return {
        "BM": 128,
        "BN": wide,
        "BK": 128 // size,
        "GROUP": 8,
        "PIECES": pieces,
        "FLAT": 1,
        "num_warps": 8,
        "num_stages": stages,
    }


def _tiles(gpu: device.Device, size: int, whole: bool) -> list[tuning.Config]:
    """Returns the tiles that fit. whole: y's rows are multiples of 16 bytes; else stores take registers."""
    found = [_tile(gpu, size, wide) for wide in (STEPS if size == 2 else (128, 64)) if whole or wide == 128]
    return [tile for tile in found if tile["num_stages"] > 2] or found[-1:]


def rule(gpu: device.Device, size: int, batch: int, M: int, N: int, K: int, whole: bool) -> tuning.Config:
    """Returns the tile with the fewest cycles, 3000 for prologue and epilogue: `_hopper.rule` without split K."""

    def cycles(tile: tuning.Config) -> int:
        waves = triton.cdiv(triton.cdiv(M, 128) * triton.cdiv(N, tile["BN"]) * batch, gpu.multiprocessors)
        return waves * (triton.cdiv(K, tile["BK"]) * STEPS[tile["BN"]] + 3000)

    return min(_tiles(gpu, size, whole), key=cycles)


def space(gpu: device.Device, size: int, whole: bool) -> list[tuning.Config]:
    return [
        {**tile, "GROUP": group, "FLAT": flat}
        for tile in _tiles(gpu, size, whole)
        for group in (8, 16)
        for flat in (0, 1)
    ]
