"""What the products of 8-bit numbers share: their tiles, their scales' shapes, and what they accept."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.op import Spec, dtype_name

BLOCK = 128  # numbers along K, and along N, that share a scale of fp8's blocks
OUT = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def place(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The rows and columns of this program's tile; GROUP rows of tiles go down before the next column, for L2's sake."""
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    first = pid // (GROUP * across) * GROUP
    size = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    m = (first + pid % (GROUP * across) % size) * BM + tl.arange(0, BM)
    n = pid % (GROUP * across) // size * BN + tl.arange(0, BN)
    return m, n


@triton.jit
def finish(y, total, bias, m, n, M, N, bias_step):
    """Adds the bias and stores a tile of float32 sums."""
    if bias is not None:
        total += tl.load(bias + n.to(tl.int64) * bias_step, mask=n < N, other=0).to(tl.float32)[None, :]
    at = y + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def grid(M: int, N: int) -> Any:
    return lambda c: (triton.cdiv(M, c["BM"]) * triton.cdiv(N, c["BN"]),)


def config(op: str, a: torch.Tensor, b: torch.Tensor, wide: bool, whole: bool = True) -> dict[str, Any]:
    """Tiles of bytes. wide: the sums leave room for tiles of 128 x 256 in the registers. whole: bytes are multiplied as they are."""
    gpu, (M, K), N = device.of(a), a.shape, b.shape[1]
    odd = not whole or any(1 not in t.stride() or max(t.stride()) % 16 for t in (a, b))  # loads of single bytes, which take registers

    def rule() -> tuning.Config:
        c = {"BM": 128, "BN": 128, "BK": 128, "GROUP": 8, "num_warps": 256 // gpu.warp, "num_stages": 4 if gpu.capability >= 90 else 3}
        if odd or gpu.backend != "cuda":
            c |= {"num_stages": 1}
        if M <= 64:
            return c | {"BM": max(16, triton.next_power_of_2(M)), "BN": 64, "num_warps": c["num_warps"] if odd else 128 // gpu.warp}
        if odd:
            return c | {"BM": 64, "BN": 64}
        if wide and gpu.capability == 90 and M * N >= gpu.multiprocessors * 128 * 256:
            return c | {"BN": 256, "num_stages": 3}
        return c

    def space() -> list[tuning.Config]:
        tiles = [(128, 128, 8, 4), (128, 128, 4, 4), (64, 128, 4, 4), (64, 256, 4, 4), (256, 128, 8, 3), (128, 256, 8, 3)]
        tiles = [t for t in tiles if wide or max(t[:2]) <= 128]
        return [{"BM": m, "BN": n, "BK": 128, "GROUP": g, "num_warps": w, "num_stages": s} for m, n, w, s in tiles for g in (4, 8, 16)]

    key = " ".join([dtype_name(a), *(["odd"] * odd), *(str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K))])
    chosen = tuning.config(gpu, op, "fwd", key, rule, space)
    return chosen | {"EVEN": K % chosen["BK"] == 0}


def along_rows(t: torch.Tensor, M: int) -> bool:
    """Whether t has one number, or one for each of M rows: (M,) or (M, 1)."""
    return t.numel() == 1 or tuple(t.shape) in ((M,), (M, 1))


def along_columns(t: torch.Tensor, N: int) -> bool:
    """Whether t has one number, or one for each of N columns: (N,) or (1, N)."""
    return t.numel() == 1 or tuple(t.shape) in ((N,), (1, N))


def step(t: torch.Tensor | None, dim: int) -> int:
    """From one number to the next along a dimension: 0 where there is but one."""
    return 0 if t is None or t.numel() == 1 else t.stride(dim)


def fault(dtype: torch.dtype, a: Any, b: Any, bias: Any, out_dtype: Any, **others: Any) -> str | None:
    """What is wrong with the operands, the bias and the result's dtype, or None. others: tensors by their names, None among them."""
    for name, t in {"a": a, "b": b, **others, "bias": bias}.items():
        if t is None and name in ("bias", "zero_a"):
            continue
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, and is {type(t).__name__}"
        if t.device != a.device:
            return f"{name} is on {t.device} and a on {a.device}; one device is needed"
        if name.startswith("scale") and t.dtype not in (torch.float32, torch.float64):
            return f"{name} must be float32, and is {t.dtype}"
    if a.dtype != dtype or b.dtype != dtype:
        return f"a and b must be {dtype}, and are {a.dtype} and {b.dtype}"
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return f"a must be (M, K) and b (K, N), and they are {tuple(a.shape)} and {tuple(b.shape)}"
    if out_dtype not in (*OUT, torch.float64):
        return f"out_dtype must be torch.bfloat16, float16 or float32, and is {out_dtype!r}"
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or not bias.is_floating_point()):
        return f"bias must be ({b.shape[1]},) and floating point, and is {tuple(bias.shape)} {bias.dtype}"
    return None


def unlike(*tensors: Any) -> str | None:
    """Why kernels do not take scales of these dtypes, or None: (a, b, scale_a, scale_b, ...)."""
    other = [t.dtype for t in tensors[2:4] if t.dtype != torch.float32]
    return f"it takes scales in float32, and one is {other[0]}" if other else None


class Columns(Spec):
    """A random matrix with contiguous columns."""

    def make(self, *args: Any) -> torch.Tensor:
        return super().make(*args).detach().mT.contiguous().mT


class Scale(Spec):
    """Random scales about 0.01, in float32."""

    def make(self, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
        return super().make(torch.float32, *rest).detach().abs() / 64
