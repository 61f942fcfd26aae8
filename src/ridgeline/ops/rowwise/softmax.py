"""softmax: y_i = exp(x_i - max x) / sum_j exp(x_j - max x), along one dimension.

    backward: dx = y (dy - sum_j dy_j y_j), from the saved y alone

The kernels and launchers, shared with log_softmax, are in `_softmax.py`.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.op import Case, Cost, Op, Spec, nbytes
from ridgeline.ops.rowwise import _regimes
from ridgeline.ops.rowwise._softmax import CASES, ROW_LIMIT, Softmax, both, columns_of, full_precision

KERNELS = Softmax("softmax", log=False)


def reference(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    if dtype is not None:
        x = x.to(torch.promote_types(x.dtype, dtype))
    shifted = x - x.max(dim, keepdim=True).values.detach()
    e = shifted.exp()
    return e / e.sum(dim, keepdim=True)


def softmax(
    x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """exp(x) scaled to sum to 1 along `dim`, as `torch.nn.functional.softmax`. Gradients flow to x.

    x: any shape and strides, floating point. dtype: x is cast to it first, and it is the result's; float32 for
    half-precision x costs no extra pass. Returns a tensor of x's shape, contiguous along `dim` if kernels run the call.
    A row that is all -inf, or holds +inf or NaN, gives NaN.
    Raises RidgelineError if `dim` or `dtype` is invalid, or if `impl` cannot run the call.
    """
    return KERNELS(x, dim, dtype, impl)


def cost(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> tuple[Cost, Cost]:
    y = x.numel() * (dtype or x.dtype).itemsize
    return Cost(nbytes(x), y, 5 * x.numel()), Cost(2 * y, nbytes(x), 4 * x.numel())


def _fits_row(x: torch.Tensor, *rest: Any) -> str | None:
    if columns_of(x, *rest) <= ROW_LIMIT:
        return None
    columns = columns_of(x, *rest)
    return f"it holds a row in the registers of one block: at most {ROW_LIMIT} columns, but this has {columns}"


SQUARES = [
    Case(f"32x64x{s}x{s}", (Spec(32, 64, s, s),), dtypes=("float32",), use="bench") for s in (16, 32, 64, 128, 512)
]
KERNELS.op = SOFTMAX = Op(
    softmax, reference=reference, cost=cost, sharding="x *!dim -> *!dim", cases=[*CASES, *SQUARES]
)

SOFTMAX.eager(
    "naive",
    "the formula in eager PyTorch: five passes (max, subtract, exp, sum, divide)",
    reference,
    supports=full_precision,
)
SOFTMAX.eager(
    "torch",
    "PyTorch's own kernel: one row per block",
    lambda x, dim=-1, dtype=None: F.softmax(x, dim, dtype=dtype),
    served=True,
)
SOFTMAX.compiled("the formula fused into one or two kernels by torch.compile")
SOFTMAX.kernel(
    "triton_row",
    "one row per program, as in the lecture: read once, kept in registers",
    kind="triton",
    supports=_fits_row,
    **both(KERNELS.row),
)
_regimes.ladder(SOFTMAX)
KERNELS.tiles_rung()
_regimes.warp_rung(SOFTMAX, log=False)
KERNELS.cluster_rung()
