"""add_layer_norm: sum = x + residual, then layer_norm of the sum over the last dimension.

    forward:   y = (sum - average sum) / sqrt(variance sum + eps) * weight + bias
    backward:  x_hat = (sum - mean) rstd,  g = dy weight
               dx = dresidual = rstd (g - average(g) - x_hat average(g x_hat)) + dsum

The residual step of a Transformer block in one pass. The float32 sum is normalised before it is rounded and returned;
normalising the rounded sum, as two ops do, loses precision in half precision. The floor is one read of x and residual
and one write of y and the sum; backward reads the sum and both gradients and writes one. The kernels are shared by all
norms, see `_norms.py`.
Source: Ba, Kiros and Hinton, Layer Normalization, 2016 (arXiv:1607.06450).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.rowwise import _cluster
from ridgeline.ops.rowwise._norm_formulas import alike, widened
from ridgeline.ops.rowwise._norms import Norm
from ridgeline.ops.rowwise._rows import BENCH, Maybe

NORM = Norm("add_layer_norm", center=True, add=True)
Pair = tuple[torch.Tensor, torch.Tensor]


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, eps: float = 1e-5
) -> Pair:
    total = widened(x) + widened(residual)
    v = total - total.mean(-1, keepdim=True)
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * weight
    return (y if bias is None else y + bias).to(x.dtype), total.to(x.dtype)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of x + residual over the last dimension, and the sum itself: (y, sum).

    x, residual: one shape (at least one dimension) and floating dtype, any strides. weight, bias: (columns,), of any
    floating dtype; bias may be None. eps: at least 0, added to the variance. y and sum have x's shape and dtype; y
    comes from the float32 sum, not from the rounded one that is returned.
    Gradients flow to all inputs, from either result; backward saves the sum and two float32 per row.
    Raises RidgelineError if shapes, dtypes or devices do not fit together, or if `impl` cannot run the call.
    """
    return NORM(impl, x, residual, weight, bias, eps)


def _torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, eps: float = 1e-5
) -> Pair:
    total = x + residual
    v, w, b = alike(total, weight, bias)
    return F.layer_norm(v, x.shape[-1:], w, b, eps).to(x.dtype), total


def cost(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: Maybe = None, eps: float = 1e-5
) -> tuple[Cost, Cost]:
    return NORM.cost(x, residual, weight, bias)


HALF = ("float16", "bfloat16")
NORM.op = ADD_LAYER_NORM = Op(
    add_layer_norm,
    reference=reference,
    cost=cost,
    sharding="x ...N, residual ...N, weight N, bias N -> ...N",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(33, 129), Spec(129), Spec(129))),
        Case("3x30x70 no bias", (Spec(3, 30, 70), Spec(3, 30, 70), Spec(70))),
        Case(
            "33x130 weights in float32",
            (Spec(33, 130), Spec(33, 130), Spec(130, dtype="float32"), Spec(130, dtype="float32")),
            dtypes=HALF,
        ),
        Case("7x8200", (Spec(7, 8200), Spec(7, 8200), Spec(8200), Spec(8200))),
        Case("64x10007", (Spec(64, 10007), Spec(64, 10007), Spec(10007), Spec(10007)), dtypes=("float16", "bfloat16")),
        Case("33x17000", (Spec(33, 17000), Spec(33, 17000), Spec(17000), Spec(17000)), dtypes=HALF),
        Case(
            "3x40000 frozen weight", (Spec(3, 40000), Spec(3, 40000), Spec(40000, grad=False), Spec(40000, grad=False))
        ),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024, 1024), Spec(1024), Spec(1024)), use="quick"),
        *(
            Case(f"{m}x{n}", (Spec(m, n), Spec(m, n), Spec(n), Spec(n)), dtypes=("bfloat16",), use="bench")
            for m, n in BENCH
        ),
    ],
)

ADD_LAYER_NORM.eager("naive", "the formula in eager PyTorch, in float32: twelve passes", reference)
ADD_LAYER_NORM.eager("torch", "PyTorch's addition, then its norm of the rounded sum", _torch, served=True)
ADD_LAYER_NORM.compiled("the formula fused by torch.compile: backward is two kernels")
NORM.triton()
_cluster.register(NORM)
