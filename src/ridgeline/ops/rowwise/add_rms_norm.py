"""add_rms_norm: sum = x + residual,  y = sum / sqrt(average sum^2 + eps) * (offset + weight) over the last dimension.

    backward:  x_hat = sum rstd,  g = dy (offset + weight)
               dx = dresidual = rstd (g - x_hat average(g x_hat)) + dsum

The residual step of a Transformer block in one pass. The float32 sum is normalised before it is rounded and returned;
normalising the rounded sum, as two ops do, loses precision in half precision. The floor is one read of x and residual
and one write of y and the sum; backward reads the sum and both gradients and writes one. The kernels are shared by all
norms, see `_norms.py`.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import torch

from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.rowwise import _cluster
from ridgeline.ops.rowwise._norm_formulas import Near, scaled, torch_rms_norm, widened
from ridgeline.ops.rowwise._norms import Norm
from ridgeline.ops.rowwise._rows import BENCH

NORM = Norm("add_rms_norm", center=False, add=True)
Pair = tuple[torch.Tensor, torch.Tensor]


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
) -> Pair:
    v = widened(x) + widened(residual)
    x_hat = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return scaled(x_hat, weight, offset, rounding, x.dtype), v.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual over the last dimension, and the sum itself: (y, sum).

    x, residual: one shape (at least one dimension) and floating dtype, any strides. weight: (columns,), of any floating
    dtype. eps: at least 0, added to the mean square. offset and rounding are `rms_norm`'s. y and sum have x's shape and
    dtype (y with rounding="llama" the promoted dtype of x and weight); y comes from the float32 sum, not from the
    rounded one that is returned.
    Gradients flow to x, residual and weight, from either result; backward saves the sum and a float32 per row.
    Raises RidgelineError if shapes, dtypes or devices do not fit together, or if `impl` cannot run the call.
    """
    return NORM(impl, x, residual, weight, None, eps, False, offset, rounding)


def _torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
) -> Pair:
    total = x + residual
    return torch_rms_norm(total, weight, eps, offset, rounding), total


def cost(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Cost, Cost]:
    return NORM.cost(x, residual, weight, None, rounding)


HALF = ("float16", "bfloat16")
NORM.op = ADD_RMS_NORM = Op(
    add_rms_norm,
    reference=reference,
    cost=cost,
    sharding="x ...N, residual ...N, weight N -> ...N",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(33, 129), Spec(129))),
        Case("3x30x70", (Spec(3, 30, 70), Spec(3, 30, 70), Spec(70))),
        Case("33x130 weight in float32", (Spec(33, 130), Spec(33, 130), Spec(130, dtype="float32")), dtypes=HALF),
        Case(
            "33x130 offset, llama",
            (Spec(33, 130), Spec(33, 130), Near(130, about=0)),
            {"offset": 1.0, "rounding": "llama"},
            dtypes=HALF,
        ),
        Case(
            "9x264 llama, weight in float32",
            (Spec(9, 264), Spec(9, 264), Spec(264, dtype="float32")),
            {"rounding": "llama"},
            dtypes=HALF,
        ),
        Case("7x8200", (Spec(7, 8200), Spec(7, 8200), Spec(8200))),
        Case("64x10007", (Spec(64, 10007), Spec(64, 10007), Spec(10007))),
        Case("33x17000", (Spec(33, 17000), Spec(33, 17000), Spec(17000)), dtypes=HALF),
        Case("3x40000 offset", (Spec(3, 40000), Spec(3, 40000), Near(40000, about=0)), {"offset": 1.0}, dtypes=HALF),
        Case("3x40000 frozen weight", (Spec(3, 40000), Spec(3, 40000), Spec(40000, grad=False))),
        Case("1024x2048", (Spec(1024, 2048), Spec(1024, 2048), Spec(2048)), dtypes=("float16",)),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024, 1024), Spec(1024)), dtypes=HALF, use="quick"),
        *(Case(f"{m}x{n}", (Spec(m, n), Spec(m, n), Spec(n)), dtypes=("bfloat16",), use="bench") for m, n in BENCH),
    ],
)

ADD_RMS_NORM.eager("naive", "the formula in eager PyTorch, in float32: nine passes", reference)
ADD_RMS_NORM.eager("torch", "PyTorch's addition, then its norm of the rounded sum", _torch, served=True)
ADD_RMS_NORM.compiled("the formula fused by torch.compile: backward is two kernels")
NORM.triton()
_cluster.register(NORM)
