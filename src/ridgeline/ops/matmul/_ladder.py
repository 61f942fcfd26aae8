"""Shared by sgemm and hgemm, the step-by-step matrix products: checks of operands and launches of CUDA C++."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec
from ridgeline.ops.matmul.matmul import agree
from ridgeline.ops.matmul.matmul import cost as matmul_cost
from ridgeline.select import eager

MOST = (1 << 31) - 256  # of a side: an index in a tile may pass its end


def product(op: Op, forward: Any, a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
    """Returns a @ b of two matrices, by the implementation that serves the call."""
    agree(op.name, a=a, b=b)
    if not a.is_floating_point():
        raise RidgelineError(f"{op.name}: a and b must be floating point, got {a.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise RidgelineError(f"{op.name}: a must be (M, K) and b (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    plain = eager(op, impl, a, b)
    if plain is not None and plain.call is not None:
        with torch.autocast(a.device.type, enabled=False):  # autocast must not change the dtype
            return plain.call(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise RidgelineError(
            f"{op.name}: impl={impl!r} has no backward, but a or b requires a gradient; detach them or use impl='torch'"
        )
    return forward(a, b, impl)


def cost(a: torch.Tensor, b: torch.Tensor) -> tuple[Cost, None]:
    """Returns matmul's forward cost; these kernels have no backward."""
    return matmul_cost(a, b)[0], None


def case(dtype: str, M: int, N: int, K: int, use: str = "check") -> Case:
    name = f"{M}" if M == N == K else f"{M}x{N}x{K}"
    return Case(name, (Spec(M, K, grad=False), Spec(K, N, grad=False)), dtypes=(dtype,), use=use)


def rows(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Returns why kernels do not take these matrices, or None: rows must be contiguous."""
    for name, t in (("a", a), ("b", b)):
        if t.shape[1] > 1 and t.stride(1) != 1:
            return f"it takes contiguous rows, but {name} has strides {t.stride()}; pass {name}.contiguous()"
    return (
        f"it takes sizes of at most 2^31 - 256, but a is {tuple(a.shape)} and b {tuple(b.shape)}"
        if max(*a.shape, b.shape[1]) > MOST
        else None
    )


def pitch(t: torch.Tensor) -> int:
    """Returns the elements from a row to the next, 0 for a single row."""
    return t.stride(0) if t.shape[0] > 1 else 0


def aligned(*tensors: torch.Tensor) -> bool:
    """Returns whether all rows begin at multiples of 16 bytes."""
    return all([t.data_ptr() % 16 == 0 == pitch(t) * t.element_size() % 16 for t in tensors])


def lines(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Returns why kernels that copy 16 bytes at a time do not take these matrices, or None."""
    return rows(a, b) or (None if aligned(a, b) else "it takes rows that begin at multiples of 16 bytes")


def start(
    kernel: CudaKernel, tile: tuple[int, int, int], y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **constants: Any
) -> None:
    """Starts a block for each BM x BN tile of y; it walks K in steps of BK."""
    (M, K), N, (BM, BN, BK) = a.shape, b.shape[1], tile
    even = K > 0 and not (M % BM or N % BN or K % BK)
    constants = {k: v(even) if callable(v) else v for k, v in constants.items()}
    blocks = -(-M // BM) * -(-N // BN)
    facts = {"EVEN": int(even), "ALIGNED": int(aligned(a, b)), **constants}
    launch(kernel, (blocks,), y, a, b, M, N, K, pitch(a), pitch(b), **facts)
