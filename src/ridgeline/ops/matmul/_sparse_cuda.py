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
MMA = CudaKernel(HERE / "sparse.cu", "sparse_mma", "PPPPPPPiii")
WGMMA = CudaKernel(HERE / "sparse_hopper.cu", "sparse_wgmma", "PMMMPPPPiiiii")
_Maybe = torch.Tensor | None
# By BM, DOWN, ACROSS: cycles per step of 128 bytes of x along K, from bytes of shared memory and L2; not measured yet.
STEPS = {
    (256, 2, 1): 620,
    (256, 2, 2): 600,
    (256, 1, 1): 800,
    (128, 2, 1): 360,
    (128, 1, 1): 490,
    (64, 2, 1): 280,
    (64, 1, 1): 340,
}
# By bytes of a number and BM: STAGES and BOARDS, as many as fit in shared memory.
RING = {2: {256: (5, 1), 128: (7, 2), 64: (10, 1)}, 1: {256: (4, 2), 128: (7, 2), 64: (10, 1)}}


def step_bytes(tall: int, size: int) -> int:
    """Returns the bytes of a step: x, values, the columns of two or four blocks of metadata, and two barriers."""
    return 128 * tall + 128 * 64 + 1024 * (3 - size) + 16


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
    odd = values.shape[1] * x.element_size() % 16 or not x.numel() or not values.numel()
    return "its copies need rows of values of a multiple of 16 bytes" if odd else None


def left_wgmma(x: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return "TMA needs N to be a multiple of 8" if values.shape[0] % 8 else left(x, values)


def _facts(y: torch.Tensor, x: torch.Tensor, bias: _Maybe) -> dict[str, int]:
    return {"BFLOAT16": int(y.dtype == torch.bfloat16), "INT8": 2 - x.element_size(), "BIAS": int(bias is not None)}


def mma(
    y: torch.Tensor, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: _Maybe,
    scale_x: _Maybe = None, scale_w: _Maybe = None,
) -> None:  # fmt: skip
    """y = x W^T + bias. x (M, K), values (N, K / 2), metadata: contiguous. scales, of int8: float32 (M,) and (N,)."""
    (M, K), N, gpu = x.shape, values.shape[0], device.of(x)
    stage = step_bytes(128, x.element_size()) - 16
    stages = min(4 if gpu.capability == 90 else 3, gpu.shared_memory // stage)
    facts: dict[str, Any] = {"EVEN": int(not (M % 128 or N % 128)), "ALIGNED": 1, "BAND": 8, "STAGES": stages}
    facts |= _facts(y, x, bias) | {"shared": stages * stage, "block": 256}
    blocks, halves = triton.cdiv(M, 128) * triton.cdiv(N, 128), K * x.element_size() // 2
    launch(MMA, (blocks,), y, x, values, metadata, bias, scale_x, scale_w, M, N, halves, **facts)


def rule(gpu: device.Device, M: int, N: int, steps: int, size: int = 2) -> tuning.Config:
    """Returns the tile and cluster shape with the fewest estimated cycles; a tile's ends take 3000.

    The second group starts later if a block has several tiles, so that it multiplies while the first stores.
    """

    def waves(way: tuple[int, int, int]) -> int:
        tall, down, across = way
        clusters = max(1, resident_clusters(gpu, down * across))
        return triton.cdiv(triton.cdiv(N, 128 * down) * triton.cdiv(M, tall * across), clusters)

    way = min(STEPS, key=lambda way: waves(way) * (steps * STEPS[way] + 3000))
    return made(*way, group=8, lag=2 if waves(way) > 1 else 0, size=size)


def made(tall: int, down: int, across: int, group: int, lag: int, size: int) -> tuning.Config:
    stages, boards = RING[size][tall]
    ways = {"BM": tall, "STAGES": stages, "BOARDS": boards, "DOWN": down, "ACROSS": across}
    return {**ways, "GROUP": group, "LAG": lag}


def space(size: int = 2) -> list[tuning.Config]:
    return [made(*way, group, lag, size) for way in STEPS for group in (4, 8, 16) for lag in (0, 2)]


def wgmma(
    y: torch.Tensor, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: _Maybe,
    scale_x: _Maybe = None, scale_w: _Maybe = None,
) -> None:  # fmt: skip
    """`mma` on Hopper."""
    (M, K), N, gpu, size = x.shape, values.shape[0], device.of(x), x.element_size()
    key = " ".join([dtype_name(x), *(str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K))])
    steps = triton.cdiv(K * size, 128)
    chosen = tuning.config(
        gpu, "sparse_matmul", "hopper", key, lambda: rule(gpu, M, N, steps, size), lambda: space(size)
    )
    tall, stages, down, across = chosen["BM"], chosen["STAGES"], chosen["DOWN"], chosen["ACROSS"]
    tiles = triton.cdiv(N, 128 * down), triton.cdiv(M, tall * across)
    # At least one: if none fits, the driver's error says why.
    clusters = max(1, min(tiles[0] * tiles[1], resident_clusters(gpu, down * across)))
    maps = TensorMap(y[None], (1, 64, 64), 128), TensorMap(x, (tall // down, 128 // size), 128)
    right = TensorMap(values, (128 // across, 64 // size), 64)
    facts: dict[str, Any] = {**_facts(y, x, bias), **chosen, "block": 384, "cluster": down * across}
    facts["shared"] = stages * step_bytes(tall, size) + 2 * chosen["BOARDS"] * 8192 + 1024
    given = y, *maps, right, metadata, bias, scale_x, scale_w, M, N, *tiles, metadata.shape[0]
    launch(WGMMA, (clusters * down * across,), *given, **facts)
