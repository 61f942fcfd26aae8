"""rms_norm: y = x / sqrt(average x^2 + eps) * (offset + weight) over the last dimension.

    backward:  x_hat = x rstd,  g = dy (offset + weight)
               dx = rstd (g - x_hat average(g x_hat))        dweight = sum over rows of dy x_hat

A row is read once, into registers. The floor is one read of x and one write of y; backward reads dy and x and writes
dx. The kernels are shared by all norms, see `_norms.py`.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import torch

from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.rowwise import _cluster
from ridgeline.ops.rowwise._norm_formulas import Near, scaled, torch_rms_norm, widened
from ridgeline.ops.rowwise._norms import Norm
from ridgeline.ops.rowwise._rows import BENCH

NORM = Norm("rms_norm", center=False, add=False)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    memory_efficient: bool = False,
) -> torch.Tensor:
    v = widened(x)
    return scaled(v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps), weight, offset, rounding, x.dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    memory_efficient: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Each row of x over its root mean square, times `offset + weight`; by default as `torch.nn.functional.rms_norm` on
    the last dimension.

    x: at least one dimension, any strides, floating point. weight: (columns,), of any floating dtype, or None.
    eps: at least 0; None means torch's default, the machine epsilon of float32 (of float64 for float64).
    offset: a finite number that is added to the weight in float32. Gemma's norms store weights around 0: offset=1.0.
    rounding: "once" computes in float32 and rounds the result to x's dtype, as Gemma and OLMo do. "llama" rounds the
    normalised row to x's dtype before it multiplies by offset + weight, and the product to the promoted dtype of x and
    weight; without an offset these are Llama's two roundings. Gradients are those of the unrounded formula either way.
    Returns x's shape, in x's dtype ("llama": the promoted one). Gradients flow to x and weight; backward saves x and a
    float32 per row.
    memory_efficient: backward saves the result instead of x, which frees x if the next layer saves the result anyway.
    No offset + weight may then be zero (checked on a CPU, or with RIDGELINE_CHECK=1), and weight's gradient has the
    result's rounding.
    Under autocast on a GPU, "once" returns float32 as torch does; "llama" is as without autocast.
    Raises RidgelineError if an argument is none of these, if devices differ, if there is an offset but no weight, if
    memory_efficient would save a result wider than x, or if `impl` cannot run the call.
    """
    return NORM(impl, x, None, weight, None, eps, memory_efficient, offset, rounding)


def _torch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    memory_efficient: bool = False,
) -> torch.Tensor:
    return torch_rms_norm(x, weight, eps, offset, rounding)


def cost(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    rounding: str = "once",
    memory_efficient: bool = False,
) -> tuple[Cost, Cost]:
    return NORM.cost(x, None, weight, None, rounding)


HALF = ("float16", "bfloat16")
NORM.op = RMS_NORM = Op(
    rms_norm,
    reference=reference,
    cost=cost,
    sharding="x ...N, weight N -> ...N",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(129))),
        Case("40x64 no weight", (Spec(40, 64),)),
        Case("3x30x70", (Spec(3, 30, 70), Spec(70))),
        Case("33x130 weight in float32", (Spec(33, 130), Spec(130, dtype="float32")), dtypes=HALF),
        Case("33x72 frozen weight", (Spec(33, 72), Spec(72, grad=False))),
        Case("33x129 memory_efficient", (Spec(33, 129), Near(129)), {"memory_efficient": True}),
        Case("33x130 offset", (Spec(33, 130), Near(130, about=0)), {"offset": 1.0}),
        Case("33x130 llama", (Spec(33, 130), Spec(130)), {"rounding": "llama"}, dtypes=HALF),
        Case("9x264 llama, weight in float32", (Spec(9, 264), Spec(264, dtype="float32")), {"rounding": "llama"}, HALF),
        Case(
            "33x129 offset, memory_efficient",
            (Spec(33, 129), Near(129, about=0)),
            {"offset": 1.0, "memory_efficient": True},
        ),
        Case("7x8200", (Spec(7, 8200), Spec(8200))),
        Case("64x10007", (Spec(64, 10007), Spec(10007)), dtypes=("float16", "bfloat16")),
        Case("33x17000", (Spec(33, 17000), Spec(17000)), dtypes=HALF),
        Case("3x40000 frozen weight", (Spec(3, 40000), Spec(40000, grad=False))),
        Case(
            "3x40000 offset, llama", (Spec(3, 40000), Near(40000, about=0)), {"offset": 1.0, "rounding": "llama"}, HALF
        ),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024)), use="quick"),
        *(Case(f"{m}x{n}", (Spec(m, n), Spec(n)), dtypes=("bfloat16",), use="bench") for m, n in BENCH),
    ],
)

RMS_NORM.eager("naive", "the formula in eager PyTorch, in float32: six passes", reference)
RMS_NORM.eager("torch", "PyTorch's own kernel", _torch, served=True)
RMS_NORM.compiled("the formula fused by torch.compile: backward is two kernels")
NORM.triton()
_cluster.register(NORM)
