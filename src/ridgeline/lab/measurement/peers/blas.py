"""cuBLAS and cuBLASLt, each chosen by PyTorch's switch.

The implementation `torch` leaves the choice to PyTorch.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "torch", "torch", "cuda"


def _product(library: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from torch.backends.cuda import preferred_blas_library as prefer

    before = prefer()
    prefer(library)
    try:
        return a @ b
    finally:
        prefer(before)


@cache
def _function() -> Any:
    """Returns the autograd.Function that computes backward's products with the same library as forward's."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, library: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            ctx.library = library
            return _product(library, a, b)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            da = _product(ctx.library, dy, b.mT) if ctx.needs_input_grad[1] else None
            return None, da, _product(ctx.library, a.mT, dy) if ctx.needs_input_grad[2] else None

    return Product


def _matmul(library: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    if not a.is_cuda or torch.version.hip:
        raise RidgelineError(f"{library} needs an NVIDIA GPU, and a is on {a.device}")
    if a.dim() != 2 or b.dim() != 2:
        raise RidgelineError(
            f"{library} is timed for products of two matrices only; a is {tuple(a.shape)} and b {tuple(b.shape)}"
        )
    return _function().apply(library, a, b)


PEERS = {"matmul": {name: partial(_matmul, name) for name in ("cublas", "cublaslt")}}
