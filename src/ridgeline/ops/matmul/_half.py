"""matmul with float16 sums: on GeForce cards the matrix units add in float16 at twice the rate of float32.

A sum of float16 runs over at most CHUNK columns of a, rounded after each 16; these sums are added in float32. So the
error does not grow with K, and a sum overflows only where CHUNK products exceed 65504 together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import RidgelineError
from ridgeline.ops.matmul._operands import Matrix, Sizes

CHUNK = 64  # columns of a float16 sum, at most: the error then passes the tolerance check of float32 sums
NAMES = ("float32", "float16")
GRID_Y = 65535


@triton.jit
def _fwd(
    y,
    a,
    b,
    batches,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """As matmul's `_fwd`; batches: the strides of a batch's matrices. BK is at most CHUNK."""
    M, N, K = sizes
    batch, pid = tl.program_id(1).to(tl.int64), tl.program_id(0)
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * across) * GROUP
    size = min(down - first, GROUP)
    m = (first + pid % (GROUP * across) % size) * BM + tl.arange(0, BM)
    n = pid % (GROUP * across) // size * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_k, b_k = tl.cast(a.column_stride, tl.int64), tl.cast(b.row_stride, tl.int64)
    at_a = a.data + batch * batches[0] + (m % M)[:, None].to(tl.int64) * a.row_stride + k[None, :] * a_k
    at_b = b.data + batch * batches[1] + k[:, None] * b_k + (n % N)[None, :].to(tl.int64) * b.column_stride
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            left, right = tl.load(at_a), tl.load(at_b)
        else:
            left = tl.load(at_a, mask=k[None, :] < K - start, other=0.0)
            right = tl.load(at_b, mask=k[:, None] < K - start, other=0.0)
        total += tl.dot(left, right, out_dtype=tl.float16).to(tl.float32)
        at_a += BK * a_k
        at_b += BK * b_k
    at_y = y + batch * M * N + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at_y, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def fwd(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> None:
    """y = a @ b. a: (B, M, K) or (M, K); b: (B, K, N) or (K, N), any strides; y is contiguous."""
    if a.dim() == 3 and a.shape[0] > GRID_Y:
        for some in zip(y.split(GRID_Y), a.split(GRID_Y), b.split(GRID_Y), strict=True):
            fwd(*some)
        return
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    gpu = device.of(a)

    def config() -> dict[str, Any]:
        key = " ".join(str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K))
        chosen = tuning.config(gpu, "matmul", "half", key, lambda: _rule(gpu, M, N), lambda: _SPACE)
        return chosen | {"EVEN": K % chosen["BK"] == 0}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return triton.cdiv(M, c["BM"]) * triton.cdiv(N, c["BN"]), a.shape[0] if a.dim() == 3 else 1

    left, right = (Matrix(t, *t.stride()[-2:]) for t in (a, b))
    batches = tuple(t.stride(0) if t.dim() == 3 else 0 for t in (a, b))
    launch(_fwd, grid, y, left, right, batches, Sizes(M, N, K), config=config, key=(M, N, K))


def _rule(gpu: device.Device, M: int, N: int) -> tuning.Config:
    small = M * N < gpu.multiprocessors * 128 * 128
    stages = 3 if gpu.backend == "cuda" else 2
    wide, warps = (64, 4) if small else (128, 8)
    return {"BM": 128 if not small else 64, "BN": wide, "BK": 32, "GROUP": 8, "num_warps": warps, "num_stages": stages}


_SPACE = [
    {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8, "num_warps": warps, "num_stages": stages}
    for bm, bn, warps in ((128, 256, 8), (128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 64, 4))
    for bk, stages in ((64, 2), (32, 3), (32, 4))
]


def check(accumulate: Any, a: torch.Tensor) -> None:
    """Raises RidgelineError unless accumulate is known and fits a's dtype."""
    if accumulate not in NAMES:
        raise RidgelineError(f"matmul: accumulate must be 'float32' or 'float16', but is {accumulate!r}")
    if accumulate == "float16" and a.dtype != torch.float16:
        raise RidgelineError(f"matmul: accumulate='float16' is for float16 inputs, but a and b are {a.dtype}")


def refusal(a: torch.Tensor, b: torch.Tensor, how: str = "", *_: Any, accumulate: str = "") -> str | None:
    """Returns why a call cannot have float16 sums, or None. how: `accumulate`, or a launcher's precision."""
    return None if "float16" in (how, accumulate) else "it sums in float16, which only accumulate='float16' allows"


def unless(a: torch.Tensor, b: torch.Tensor, how: str = "", *_: Any, accumulate: str = "") -> str | None:
    """Returns why float16 sums are not chosen, or None."""
    if refusal(a, b, how, accumulate=accumulate):
        return "sums are float32 unless accumulate='float16'"
    quick = _quick(a.device.index if a.is_cuda else None)
    return None if quick else "only GeForce cards add in float16 faster than in float32"


@torch.compiler.assume_constant_result  # a device stays what it is
def _quick(index: int | None) -> bool:
    card = device.stand_in or (device.CPU if index is None else device.gpu(index))
    return "GeForce" in card.name
