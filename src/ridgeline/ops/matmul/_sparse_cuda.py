"""sparse_matmul in CUDA C++: by mma.sp on sm_80 and later (sparse.cu), by wgmma.sp on Hopper (sparse_hopper.cu)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel, TensorMap, resident_clusters
from ridgeline.op import dtype_name
from ridgeline.ops.matmul._ladder import MOST

HERE = Path(__file__).parent
MMA = CudaKernel(HERE / "sparse.cu", "sparse_mma", "PPPPPiiiqq")
WGMMA = CudaKernel(HERE / "sparse_hopper.cu", "sparse_wgmma", "PMMMPPiiii")
_Maybe = torch.Tensor | None
STAGE = 128 * 64 * 3 + 1024  # bytes of sparse.cu's stage: values, x, and their columns
# By BM, DOWN, ACROSS: cycles per step of 64 along K, from bytes of shared memory and L2; not measured yet.
STEPS = {(256, 2, 1): 620, (256, 2, 2): 600, (256, 1, 1): 800, (128, 2, 1): 360, (128, 1, 1): 490}
RING = {256: (5, 1), 128: (7, 2)}  # by BM: STAGES and BOARDS, as many as fit in shared memory


def unfit(x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *_: Any) -> str | None:
    """Returns why mma.sp's kernel does not take these, or None."""
    for name, t in (("x", x), ("values", values)):
        if not t.is_contiguous() or t.data_ptr() % 16 or t.shape[1] * t.element_size() % 16:
            what = f"a row of {name} has {t.shape[1]} elements, and strides {t.stride()}"
            return f"it copies 16 bytes at a time from contiguous rows that begin at multiples of 16 bytes; {what}"
    if not metadata.is_contiguous() or metadata.data_ptr() % 16:
        return "it takes contiguous metadata that begins at a multiple of 16 bytes"
    if not x.numel() or not values.numel():
        return "it takes no dimension of size 0"
    if max(*x.shape, *values.shape) > MOST:
        return f"it takes sizes of at most 2^31 - 256, but x is {tuple(x.shape)} and values {tuple(values.shape)}"
    return None


def unfit_wgmma(x: torch.Tensor, values: torch.Tensor, *rest: Any) -> str | None:
    """Returns why wgmma.sp's kernel does not take these, or None."""
    if values.shape[0] % 8:
        return f"TMA writes rows of a multiple of 16 bytes, but a row of the result has {values.shape[0]} elements"
    return unfit(x, values, *rest)


def left(x: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why a call is left to a dense copy of the weight, or None; from sizes alone."""
    return (
        "its copies need K to be a multiple of 16"
        if values.shape[1] % 8 or not x.numel() or not values.numel()
        else None
    )


def left_wgmma(x: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return "TMA needs N to be a multiple of 8" if values.shape[0] % 8 else left(x, values)


def mma(y: torch.Tensor, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: _Maybe) -> None:
    """y = x W^T + bias. x (M, K), values (N, K / 2), metadata: contiguous."""
    (M, K), N = x.shape, values.shape[0]
    stages = min(4, device.of(x).shared_memory // STAGE, 3 if device.of(x).capability < 90 else 4)
    facts: dict[str, Any] = {"EVEN": int(not (M % 128 or N % 128)), "ALIGNED": 1, "BAND": 8, "STAGES": stages}
    facts |= {"BFLOAT16": int(x.dtype == torch.bfloat16), "BIAS": int(bias is not None), "shared": stages * STAGE}
    blocks = triton.cdiv(M, 128) * triton.cdiv(N, 128)
    launch(MMA, (blocks,), y, x, values, metadata, bias, M, N, K, K, K // 2, block=256, **facts)


def rule(gpu: device.Device, M: int, N: int, K: int) -> tuning.Config:
    """Returns the tile and cluster shape with the fewest estimated cycles; a tile's ends take 3000.

    The second group starts later if a block has several tiles, so that it multiplies while the first stores."""

    def waves(way: tuple[int, int, int]) -> int:
        tall, down, across = way
        clusters = max(1, resident_clusters(gpu, down * across))
        return triton.cdiv(triton.cdiv(N, 128 * down) * triton.cdiv(M, tall * across), clusters)

    way = min(STEPS, key=lambda way: waves(way) * (triton.cdiv(K, 64) * STEPS[way] + 3000))
    return made(*way, group=8, lag=2 if waves(way) > 1 else 0)


def made(tall: int, down: int, across: int, group: int, lag: int) -> tuning.Config:
    stages, boards = RING[tall]
    ways = {"BM": tall, "STAGES": stages, "BOARDS": boards, "DOWN": down, "ACROSS": across}
    return {**ways, "GROUP": group, "LAG": lag}


def space() -> list[tuning.Config]:
    return [made(*way, group, lag) for way in STEPS for group in (4, 8, 16) for lag in (0, 2)]


def wgmma(y: torch.Tensor, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: _Maybe) -> None:
    """`mma` on Hopper."""
    (M, K), N, gpu = x.shape, values.shape[0], device.of(x)
    key = " ".join([dtype_name(x), *(str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K))])
    chosen = tuning.config(gpu, "sparse_matmul", "hopper", key, lambda: rule(gpu, M, N, K), space)
    tall, stages, down, across = chosen["BM"], chosen["STAGES"], chosen["DOWN"], chosen["ACROSS"]
    tiles = triton.cdiv(N, 128 * down), triton.cdiv(M, tall * across)
    # At least one: if none fits, the driver's error says why.
    clusters = max(1, min(tiles[0] * tiles[1], resident_clusters(gpu, down * across)))
    maps = TensorMap(y[None], (1, 64, 64), 128), TensorMap(x, (tall // down, 64), 128)
    right = TensorMap(values, (128 // across, 32), 64)
    facts: dict[str, Any] = {"BFLOAT16": int(x.dtype == torch.bfloat16), "BIAS": int(bias is not None), **chosen}
    facts |= {"block": 384, "cluster": down * across}
    facts["shared"] = stages * (128 * tall + 128 * 72 + 16) + 2 * chosen["BOARDS"] * 8192 + 1024
    launch(WGMMA, (clusters * down * across,), y, *maps, right, metadata, bias, N, *tiles, triton.cdiv(K, 64), **facts)
