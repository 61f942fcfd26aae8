"""quack: matrix products, and kernels along the rows of a matrix, in the CuTe DSL for Hopper and later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "quack", "quack-kernels", "cuda"


def _softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    from quack.softmax import softmax

    if dim % x.dim() != x.dim() - 1 or dtype not in (None, x.dtype):
        raise RidgelineError("quack's softmax supports only the last dimension and the input's dtype")
    return softmax(x.reshape(-1, x.shape[-1])).view(x.shape)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, memory_efficient: bool = False
) -> torch.Tensor:
    from quack.rmsnorm import rmsnorm

    if memory_efficient:
        raise RidgelineError("quack's rmsnorm has no memory_efficient")
    return rmsnorm(x, weight, eps=eps)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Any:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


def _cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean",
    dtype: torch.dtype | None = None, **others: Any
) -> Any:  # fmt: skip
    from quack.cross_entropy import cross_entropy

    if any(others.values()):
        raise RidgelineError("quack's cross_entropy has no label smoothing, z-loss or softcap")
    rows, labels = logits.reshape(-1, logits.shape[-1]), target.flatten()
    return cross_entropy(rows, labels, ignore_index=ignore_index, reduction=reduction).to(dtype or logits.dtype)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns quack's product in its default configuration: its search would compile dozens for every shape."""
    from quack.gemm_interface import gemm

    if a.dtype.itemsize != 2 or a.requires_grad or b.requires_grad:
        raise RidgelineError("quack's gemm is timed in half precision only, and has no gradients")
    return gemm(a, b, tuned=False)


PEERS = {
    "matmul": _matmul,
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "cross_entropy": _cross_entropy,
}
