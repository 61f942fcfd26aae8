"""rms_norm: y = x / sqrt(average x^2 + eps) * weight over the last dimension.

    backward:  x_hat = x rstd,  g = dy weight
               dx = rstd (g - x_hat average(g x_hat))        dweight = sum over rows of dy x_hat

A row is read once, into registers. The floor is one read of x and one write of y; backward reads dy and x and writes
dx. The kernels are shared by all norms, see `_norms.py`.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.rowwise import _cluster
from ridgeline.ops.rowwise._norms import Near, Norm, alike, widened
from ridgeline.ops.rowwise._rows import BENCH

NORM = Norm("rms_norm", center=False, add=False)


def reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, memory_efficient: bool = False
) -> torch.Tensor:
    v = widened(x)
    y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    memory_efficient: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Each row of x over its root mean square, times `weight`, as `torch.nn.functional.rms_norm` on the last dimension.

    x: at least one dimension, any strides, floating point. weight: (columns,), of any floating dtype, or None.
    eps: at least 0; None means torch's default, the machine epsilon of float32 (of float64 for float64).
    Returns a tensor of x's shape and dtype. Gradients flow to x and weight; backward saves x and a float32 per row.
    memory_efficient: backward saves the result instead of x, which frees x if the next layer saves the result anyway.
    No weight may then be zero (checked on a CPU, or with RIDGELINE_CHECK=1), and weight's gradient has the result's
    rounding.
    Raises RidgelineError if weight or eps is none of these, if devices differ, or if `impl` cannot run the call.
    """
    return NORM(impl, x, None, weight, None, eps, memory_efficient)


def _torch(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, memory_efficient: bool = False
) -> torch.Tensor:
    v, w = alike(x, weight)
    return F.rms_norm(v, x.shape[-1:], w, eps).to(x.dtype)


def cost(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, memory_efficient: bool = False
) -> tuple[Cost, Cost]:
    return NORM.cost(x, None, weight, None)


HALF = ("float16", "bfloat16")
NORM.op = RMS_NORM = Op(
    rms_norm,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129), Spec(129))),
        Case("40x64 no weight", (Spec(40, 64),)),
        Case("3x30x70", (Spec(3, 30, 70), Spec(70))),
        Case("33x130 weight in float32", (Spec(33, 130), Spec(130, dtype="float32")), dtypes=HALF),
        Case("33x72 frozen weight", (Spec(33, 72), Spec(72, grad=False))),
        Case("33x129 memory_efficient", (Spec(33, 129), Near(129)), {"memory_efficient": True}),
        Case("7x8200", (Spec(7, 8200), Spec(8200))),
        Case("64x10007", (Spec(64, 10007), Spec(10007)), dtypes=("float16", "bfloat16")),
        Case("33x17000", (Spec(33, 17000), Spec(17000)), dtypes=HALF),
        Case("3x40000 frozen weight", (Spec(3, 40000), Spec(40000, grad=False))),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024)), use="quick"),
        *(Case(f"{m}x{n}", (Spec(m, n), Spec(n)), dtypes=("bfloat16",), use="bench") for m, n in BENCH),
    ],
)

RMS_NORM.eager("naive", "the formula in eager PyTorch, in float32: six passes", reference)
RMS_NORM.eager("torch", "PyTorch's own kernel", _torch, served=True)
RMS_NORM.compiled("the formula fused by torch.compile: backward is two kernels")
NORM.triton()
_cluster.register(NORM)
