"""matmul on Hopper by thread-block clusters (cluster.cu): each block loads a share of a tile, and TMA multicasts it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel, TensorMap, resident_clusters
from ridgeline.op import dtype_name
from ridgeline.ops.matmul import _hopper

KERNEL = CudaKernel(Path(__file__).with_name("cluster.cu"), "matmul_cluster", "PMMMiiiiii")
STAGES = {256: 4, 128: 6, 64: 8}  # by BN: as many as fit in shared memory
# By BN, DOWN, ACROSS: cycles per step of 64 along K on an H100, for rows aligned to L2 cache lines and for rows that
# straddle two lines.
STEPS = {
    (256, 2, 1): (1170, 1365),
    (256, 2, 2): (1140, 1318),
    (128, 2, 2): (660, 693),
    (128, 2, 1): (770, 963),
    (64, 1, 2): (636, 810),
    (64, 1, 1): (560, 870),
}


def refusal(a: torch.Tensor, b: torch.Tensor, *_: Any) -> str | None:
    """Returns why clusters cannot take these operands, or None."""
    N = b.shape[-1] if b.dim() > 1 else 1
    if N % 8:
        return f"TMA writes rows of a multiple of 16 bytes, but a row of the result has {N} elements"
    return _hopper.refusal(a, b)


def rule(gpu: device.Device, batch: int, M: int, N: int, K: int, lines: float) -> tuning.Config:
    """Returns the tile and cluster shape with the fewest estimated cycles.

    lines: L2 cache lines that a row of 128 bytes touches on average, 1 to 2. A wave is one tile for each resident
    block (30 clusters of four on an H100); its prologue and epilogue take 2500 cycles.
    """

    def cycles(way: tuple[int, int, int]) -> float:
        wide, down, across = way
        clusters = max(1, resident_clusters(gpu, down * across))
        waves = triton.cdiv(triton.cdiv(M, 128 * down) * triton.cdiv(N, wide * across) * batch, clusters)
        whole, straddling = STEPS[way]
        return waves * (triton.cdiv(K, 64) * (whole + (straddling - whole) * (lines - 1)) + 2500)

    wide, down, across = min(STEPS, key=cycles)
    return {"BN": wide, "STAGES": STAGES[wide], "DOWN": down, "ACROSS": across, "GROUP": 8, "LAG": 0}


def space() -> list[tuning.Config]:
    ways = product(STAGES, ((1, 1), (2, 1), (1, 2), (2, 2)), (4, 8, 16), (0, 2))
    return [
        {"BN": w, "STAGES": STAGES[w], "DOWN": d, "ACROSS": a, "GROUP": g, "LAG": lag} for w, (d, a), g, lag in ways
    ]


def fwd(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: str) -> None:
    """y = a @ b. a: (B, M, K) or (M, K); b: (B, K, N) or (K, N); y: contiguous."""
    y = y[None] if y.dim() == 2 else y
    (batch, M, N), K, gpu = y.shape, a.shape[-1], device.of(y)
    (a, a_by_k), (b, b_by_k) = _hopper.by_k(a), _hopper.by_k(b.mT)
    lines = 2 - min(_hopper.begins(a), _hopper.begins(b)) / 128
    words = ["straddling"] * (lines > 1)
    key = " ".join([dtype_name(a), *(str(min(16384, triton.next_power_of_2(d))) for d in (batch, M, N, K)), *words])
    made = tuning.config(gpu, "matmul", "cluster", key, lambda: rule(gpu, batch, M, N, K, lines), space)
    wide, stages, down, across = made["BN"], made["STAGES"], made["DOWN"], made["ACROSS"]
    left = TensorMap(a, (1, 128 // across, 64) if a_by_k else (1, 64 // across, 64), 128)
    right = TensorMap(b, (1, wide // down, 64) if b_by_k else (1, 64 // down, 64), 128)
    tiles = triton.cdiv(M, 128 * down), triton.cdiv(N, wide * across), batch
    # At least one: if none fits, the driver's error says why.
    clusters = max(1, min(tiles[0] * tiles[1] * batch, resident_clusters(gpu, down * across)))
    numbers = *tiles, triton.cdiv(K, 64), int(a.shape[0] > 1), int(b.shape[0] > 1)
    facts: dict[str, Any] = {
        "BFLOAT16": int(a.dtype == torch.bfloat16),
        "A_BY_K": int(a_by_k),
        "B_BY_K": int(b_by_k),
        **made,
    }
    facts |= {"block": 384, "cluster": down * across, "shared": stages * (128 * (128 + wide) + 16) + 4 * 8192 + 1024}
    launch(KERNEL, (clusters * down * across,), y, TensorMap(y, (1, 64, 64), 128), left, right, *numbers, **facts)
