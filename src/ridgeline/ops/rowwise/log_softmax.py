"""log_softmax: y_i = x_i - max x - log sum_j exp(x_j - max x), along one dimension.

    backward: dx = dy - exp(y) sum_j dy_j, from the saved y alone

The kernels and launchers, shared with softmax, are in `_softmax.py`. Each byte of x and y moves once.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.op import Cost, Op, nbytes
from ridgeline.ops.rowwise import _regimes
from ridgeline.ops.rowwise._softmax import CASES, Softmax, full_precision

KERNELS = Softmax("log_softmax", log=True)


def reference(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    if dtype is not None:
        x = x.to(torch.promote_types(x.dtype, dtype))
    shifted = x - x.max(dim, keepdim=True).values.detach()
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def log_softmax(
    x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """The logarithm of softmax along `dim`, as `torch.nn.functional.log_softmax`. Gradients flow to x.

    x: any shape and strides, floating point. dtype: x is cast to it first, and it is the result's; float32 for
    half-precision x costs no extra pass. Returns a tensor of x's shape, contiguous along `dim` if kernels run the call.
    A row that is all -inf, or holds +inf or NaN, gives NaN.
    Raises RidgelineError if `dim` or `dtype` is invalid, or if `impl` cannot run the call.
    """
    return KERNELS(x, dim, dtype, impl)


def cost(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> tuple[Cost, Cost]:
    y = x.numel() * (dtype or x.dtype).itemsize
    return Cost(nbytes(x), y, 5 * x.numel()), Cost(2 * y, nbytes(x), 4 * x.numel())


def _torch(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    return F.log_softmax(x, dim, dtype=dtype)


KERNELS.op = LOG_SOFTMAX = Op(log_softmax, reference=reference, cost=cost, sharding="x *!dim -> *!dim", cases=CASES)

LOG_SOFTMAX.eager(
    "naive", "the formula in eager PyTorch: max, subtract, exp, sum, log, subtract", reference, supports=full_precision
)
LOG_SOFTMAX.eager("torch", "PyTorch's own kernel: one row per block", _torch, served=True)
LOG_SOFTMAX.compiled("the formula fused into one or two kernels by torch.compile")
KERNELS.tiles_rung()
_regimes.warp_rung(LOG_SOFTMAX, log=True)
KERNELS.cluster_rung()
