"""quick_gelu: y = x sigmoid(1.702 x), the activation of CLIP: gelu with a logistic instead of the normal curve.

    backward: dx = dy (s + 1.702 x s (1 - s)),  s = sigmoid(1.702 x)

One pass reads x and writes y. Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016 (arXiv:1606.08415).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.op import Case, Cost, Op, Spec, nbytes
from ridgeline.ops.pointwise._generator import Pointwise
from ridgeline.tiles.activations import silu_slope


@triton.jit
def _fwd(x):
    return x * tl.sigmoid(1.702 * x)


@triton.jit
def _bwd(dy, x):
    return dy * silu_slope(1.702 * x)[1]


KERNELS = Pointwise("quick_gelu", ["x"], {"": _fwd}, {"": _bwd}, floating=True)


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def quick_gelu(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """`x * sigmoid(1.702 * x)`, element by element. Gradients flow to x.

    x: any shape and strides, floating point. Returns a tensor of x's shape and dtype.
    Raises RidgelineError if x is not floating point, or if `impl` cannot run the call.
    """
    (plain,) = KERNELS.look(x, impl)
    return plain(x) if plain else KERNELS(impl, x)


def cost(x: torch.Tensor) -> tuple[Cost, Cost]:
    return Cost(nbytes(x), nbytes(x), 5 * x.numel()), Cost(2 * nbytes(x), nbytes(x), 9 * x.numel())


KERNELS.op = QUICK_GELU = Op(
    quick_gelu,
    reference=reference,
    cost=cost,
    sharding="x * -> *",
    cases=[
        Case("33x129", (Spec(33, 129),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        Case("16384x16384", (Spec(16384, 16384),), dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

QUICK_GELU.eager("naive", "the formula in eager PyTorch: three passes over memory", reference, served=True)
QUICK_GELU.compiled("the formula fused into one Triton kernel by torch.compile")
KERNELS.triton("a block of elements per program; wide loads left to the compiler; backward in one pass")
