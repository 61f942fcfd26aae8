"""layer_norm: y = (x - average x) / sqrt(variance x + eps) * weight + bias over the last dimension.

    backward:  x_hat = (x - mean) rstd,  g = dy weight        dx = rstd (g - average(g) - x_hat average(g x_hat))
               dweight = sum over rows of dy x_hat            dbias = sum over rows of dy

A row is read once, into registers, and its variance is computed around its mean there. The floor is one read of x and
one write of y; backward reads dy and x and writes dx. The kernels are shared by all norms, see `_norms.py`.
Source: Ba, Kiros and Hinton, Layer Normalization, 2016 (arXiv:1607.06450).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.rowwise import _cluster
from ridgeline.ops.rowwise._norm_formulas import Near, alike, widened
from ridgeline.ops.rowwise._norms import Norm
from ridgeline.ops.rowwise._rows import BENCH, Maybe

NORM = Norm("layer_norm", center=True, add=False)


def reference(
    x: torch.Tensor, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *, memory_efficient: bool = False
) -> torch.Tensor:
    v = widened(x)
    v = v - v.mean(-1, keepdim=True)
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Each row of x minus its mean, over its standard deviation, as `torch.nn.functional.layer_norm` on the last
    dimension.

    x: at least one dimension, any strides, floating point. weight, bias: (columns,), of any floating dtype, or None.
    eps: at least 0, added to the variance.
    Returns x's shape and dtype. Gradients flow to x, weight and bias; backward saves x and two float32 per row.
    memory_efficient: backward saves the result instead of x, which frees x if the next layer saves the result anyway.
    No weight may then be zero (checked on a CPU, or with RIDGELINE_CHECK=1), and gradients lose precision where a bias
    is many times its weight.
    Raises RidgelineError if weight, bias or eps is none of these, if devices differ, or if `impl` cannot run the call.
    """
    return NORM(impl, x, None, weight, bias, eps, memory_efficient)


def _torch(
    x: torch.Tensor, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *, memory_efficient: bool = False
) -> torch.Tensor:
    v, w, b = alike(x, weight, bias)
    return F.layer_norm(v, x.shape[-1:], w, b, eps).to(x.dtype)


def cost(
    x: torch.Tensor, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, *, memory_efficient: bool = False
) -> tuple[Cost, Cost]:
    return NORM.cost(x, None, weight, bias)


HALF = ("float16", "bfloat16")
NORM.op = LAYER_NORM = Op(
    layer_norm,
    reference=reference,
    cost=cost,
    sharding="x ...N, weight N, bias N -> ...N",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(129), Spec(129))),
        Case("40x64 no weight", (Spec(40, 64),)),
        Case("3x30x70 no bias", (Spec(3, 30, 70), Spec(70))),
        Case(
            "33x130 weights in float32",
            (Spec(33, 130), Spec(130, dtype="float32"), Spec(130, dtype="float32")),
            dtypes=HALF,
        ),
        Case("33x72 frozen weight", (Spec(33, 72), Spec(72, grad=False), Spec(72))),
        Case("33x129 mean 100", (Near(33, 129, scale=1, about=100), Spec(129, grad=False), Spec(129, grad=False))),
        Case("33x129 memory_efficient", (Spec(33, 129), Near(129), Near(129, about=0)), {"memory_efficient": True}),
        Case("7x8200", (Spec(7, 8200), Spec(8200), Spec(8200))),
        Case("64x10007", (Spec(64, 10007), Spec(10007), Spec(10007)), dtypes=("float16", "bfloat16")),
        Case("33x17000", (Spec(33, 17000), Spec(17000), Spec(17000)), dtypes=HALF),
        Case("3x40000 frozen weight", (Spec(3, 40000), Spec(40000, grad=False), Spec(40000, grad=False))),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024), Spec(1024)), use="quick"),
        *(Case(f"{m}x{n}", (Spec(m, n), Spec(n), Spec(n)), dtypes=("bfloat16",), use="bench") for m, n in BENCH),
    ],
)

LAYER_NORM.eager("naive", "the formula in eager PyTorch, in float32: nine passes", reference)
LAYER_NORM.eager("torch", "PyTorch's own kernels", _torch, served=True)
LAYER_NORM.compiled("the formula fused by torch.compile: backward is two kernels")
NORM.triton()
_cluster.register(NORM)
