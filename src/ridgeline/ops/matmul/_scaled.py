"""Shared by the 8-bit products: their tiles, the shapes of their scales, and the checks of their arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import Spec, dtype_name

BLOCK = 128  # elements along K, and along N, that share a scale of an fp8 block
OUT = (torch.bfloat16, torch.float16, torch.float32)


class Line(NamedTuple):
    """A number for each row or column, with their stride: 0 if there is one for all. data may be None."""

    data: Any
    stride: int


@triton.jit
def place(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Returns the rows and columns of this program's tile, in bands of GROUP rows of tiles for reuse in L2."""
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    first = pid // (GROUP * across) * GROUP
    size = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    m = (first + pid % (GROUP * across) % size) * BM + tl.arange(0, BM)
    n = pid % (GROUP * across) // size * BN + tl.arange(0, BN)
    return m, n


@triton.jit
def finish(y, total, bias, m, n, M, N, ADD: tl.constexpr = False):
    """Adds the bias and stores a tile of float32 sums. ADD: adds them to what y holds."""
    if bias.data is not None:
        total += tl.load(bias.data + n.to(tl.int64) * bias.stride, mask=n < N, other=0).to(tl.float32)[None, :]
    at = y + m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if ADD:
        total += tl.load(at, mask=inside, other=0).to(tl.float32)
    tl.store(at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _columns(sums, b, N, K, b_k, b_n, BK: tl.constexpr, BN: tl.constexpr):
    """Sums b's columns."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    total = tl.zeros((BK, BN), tl.int32)
    for start in range(0, K, BK):
        k = (start + tl.arange(0, BK)).to(tl.int64)[:, None]
        total += tl.load(b + k * b_k + n * b_n, mask=(k < K) & (n < N), other=0).to(tl.int32)
    tl.store(sums + n, tl.sum(total, 0)[None, :], mask=n < N)


def add_columns(sums: torch.Tensor, b: torch.Tensor) -> None:
    """sums (N,), int32 = the sums of the columns of b (K, N)."""
    wide: dict[str, Any] = {"BK": 512, "BN": 16} if b.stride(0) == 1 else {"BK": 64, "BN": 128}
    launch(_columns, (triton.cdiv(b.shape[1], wide["BN"]),), sums, b, *b.shape[::-1], *b.stride(), **wide)


def blocks(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> int | None:
    """Returns how many columns of b share a block's scale, 1 or 128; 0 for scales by rows, None for neither."""
    (M, K), N = a.shape, b.shape[1]
    deep = -(-K // BLOCK)
    if tuple(scale_a.shape) == (M, deep):
        for wide in (BLOCK, 1):
            if tuple(scale_b.shape) == (deep, -(-N // wide)):
                return wide
    return 0 if along_rows(scale_a, M) and along_columns(scale_b, N) else None


def grid(M: int, N: int) -> Any:
    return lambda c: (triton.cdiv(M, c["BM"]) * triton.cdiv(N, c["BN"]),)


def config(
    op: str, a: torch.Tensor, b: torch.Tensor, wide: bool, whole: bool = True, single: bool = False
) -> dict[str, Any]:
    """Returns the tile of an 8-bit product.

    wide: registers hold 128 x 256. whole: bytes are multiplied as they are. single: scales by blocks of single columns.
    """
    gpu, (M, K), N = device.of(a), a.shape, b.shape[1]
    # odd: loads of single bytes, which take registers.
    odd = not whole or any(1 not in t.stride() or max(t.stride()) % 16 for t in (a, b))

    def tile(BM: int, BN: int, threads: int, stages: int, BK: int = BLOCK) -> tuning.Config:
        return {"BM": BM, "BN": BN, "BK": BK, "GROUP": 8, "num_warps": threads // gpu.warp, "num_stages": stages}

    few, down = M <= 64, max(16, triton.next_power_of_2(M))

    def tiles(BM: int, BN: int) -> int:
        return triton.cdiv(M, BM) * triton.cdiv(N, BN)

    def rule() -> tuning.Config:
        stages = 1 if odd or gpu.backend != "cuda" else 4 if gpu.shared_memory >= 227 << 10 else 3
        if few:
            return tile(
                down, 64 if odd or tiles(down, 64) >= 2 * gpu.multiprocessors else 32, 256 if odd else 128, stages
            )
        if odd:
            return tile(64, 64, 256, stages)
        if single and gpu.capability >= 100:  # whose sums move to registers, beside a tile of scales
            return tile(64, 128, 128, stages)
        if wide and gpu.capability == 90 and tiles(128, 256) >= gpu.multiprocessors:
            return tile(128, 256, 256, 3)
        if gpu.capability == 90 and tiles(128, 128) < gpu.multiprocessors:
            return tile(64, 128, 128, stages)
        return tile(128, 128, 256, min(stages, 3) if wide else stages)  # wide: 3 stages leave room for a second program

    def space() -> list[tuning.Config]:
        if few:
            return [tile(down, n, threads, s) for n in (32, 64, 128) for threads in (64, 128) for s in (4, 6, 8)]
        shapes: list[tuple[int, ...]] = [(128, 128, 256, 4), (128, 128, 256, 3), (64, 128, 128, 4), (128, 64, 128, 4)]
        if wide:
            shapes += [
                (128, 128, 128, 4),
                (64, 256, 128, 4),
                (256, 128, 256, 3),
                (128, 256, 256, 3),
                (128, 256, 256, 2, 256),
            ]
        return [tile(*shape) | {"GROUP": g} for shape in shapes for g in (4, 8, 16)]

    key = " ".join([dtype_name(a), *(["odd"] * odd), *(str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K))])
    chosen = tuning.config(gpu, op, "fwd", key, rule, space)
    return chosen | {"EVEN": K % chosen["BK"] == 0}


def along_rows(t: torch.Tensor, M: int) -> bool:
    """Returns whether t has one number, or one for each of M rows: (M,) or (M, 1)."""
    return t.numel() == 1 or tuple(t.shape) in ((M,), (M, 1))


def along_columns(t: torch.Tensor, N: int) -> bool:
    """Returns whether t has one number, or one for each of N columns: (N,) or (1, N)."""
    return t.numel() == 1 or tuple(t.shape) in ((N,), (1, N))


def line(t: torch.Tensor | None, dim: int) -> Line:
    """Returns numbers along a dimension as kernels take them."""
    return Line(t, step(t, dim))


def step(t: torch.Tensor | None, dim: int) -> int:
    """Returns the stride along a dimension, 0 for a single number or None."""
    return 0 if t is None or t.numel() == 1 else t.stride(dim)


def fault(dtypes: tuple[torch.dtype, ...], a: Any, b: Any, bias: Any, out_dtype: Any, **others: Any) -> str | None:
    """Returns what is wrong with the operands, the bias or out_dtype, or None. others: scales and zero_a by name."""
    for name, t in {"a": a, "b": b, **others, "bias": bias}.items():
        if t is None and name in ("bias", "zero_a"):
            continue
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
        if t.is_nested:
            return f"{name} must be dense, got a nested tensor; pass its to_padded_tensor(0)"
        if t.device != a.device:
            return f"all tensors must be on one device; {name} is on {t.device}, a on {a.device}"
        if name.startswith("scale") and t.dtype not in (torch.float32, torch.float64):
            return f"{name} must be float32, got {t.dtype}"
    scales = [t.dtype for name, t in others.items() if name.startswith("scale")]
    if len(set(scales)) > 1:
        return f"scale_a and scale_b must have one dtype, got {scales[0]} and {scales[1]}"
    if a.dtype not in dtypes or b.dtype not in dtypes:
        return f"a and b must be {' or '.join(map(str, dtypes))}, got {a.dtype} and {b.dtype}"
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return f"a must be (M, K) and b (K, N), got {tuple(a.shape)} and {tuple(b.shape)}"
    reference = out_dtype == torch.float64 == others["scale_a"].dtype  # the reference computes in float64
    if out_dtype not in OUT and not reference:
        return f"out_dtype must be torch.bfloat16, float16 or float32, got {out_dtype!r}"
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or not bias.is_floating_point()):
        return f"bias must be ({b.shape[1]},) and floating point, got {tuple(bias.shape)} {bias.dtype}"
    return None


def unlike(*tensors: Any) -> str | None:
    """Returns why kernels do not take these scales' dtypes, or None. tensors: a, b, scale_a, scale_b, ..."""
    other = [t.dtype for t in tensors[2:4] if t.dtype != torch.float32]
    return f"it takes float32 scales, but one is {other[0]}" if other else None


class Scale(Spec):
    """Random float32 scales of about 0.01."""

    def make(self, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
        return super().make(torch.float32, *rest).detach().abs() / 64


class ScaleColumns(Scale):
    """The same with contiguous columns, as torch._scaled_mm wants them for blocks, so that no copy is timed."""

    def make(self, *args: Any) -> torch.Tensor:
        return super().make(*args).mT.contiguous().mT


class Inside(Spec):
    """A matrix inside a larger one, so that it and most of its rows begin at odd addresses."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        rows, columns = made.shape
        room = made.new_empty((rows + 1, columns + 1 + columns % 2))[1:, 1 : columns + 1]
        return room.copy_(made.detach())
