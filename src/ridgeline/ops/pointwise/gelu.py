"""gelu: y = x * P(Z <= x) for a standard normal Z, exactly (erf) or by its tanh form.

    exact:  y = x/2 (1 + erf(x / sqrt 2))          tanh:  y = x/2 (1 + tanh z),  z = sqrt(2/pi) (x + 0.044715 x^3)

One pass: x is read once and y written once. The functions are in `tiles/activations.py`.
Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016 (arXiv:1606.08415).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter looks for it in a kernel's module

from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.pointwise._generator import Pointwise, alike, start_cuda
from ridgeline.tiles.activations import gelu as exact
from ridgeline.tiles.activations import gelu_slope, gelu_tanh, gelu_tanh_slope


@triton.jit
def _exact_grad(dy, x):
    return dy * gelu_slope(x)[1]


@triton.jit
def _tanh_grad(dy, x):
    return dy * gelu_tanh_slope(x)[1]


KERNELS = Pointwise("gelu", ["x"], {"none": exact, "tanh": gelu_tanh}, {"none": _exact_grad, "tanh": _tanh_grad})


def reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu(x: torch.Tensor, approximate: str = "none", *, impl: str | None = None) -> torch.Tensor:
    """The Gaussian error linear unit of each element, as `torch.nn.functional.gelu`. Gradients flow to x.

    x: floating point, any shape and strides. approximate: "none" (erf) or "tanh". Returns x's shape and dtype.
    Raises RidgelineError if `approximate` is invalid, if x is not floating point, or if `impl` cannot run the call.
    """
    if approximate not in ("none", "tanh"):
        raise RidgelineError(f'gelu: approximate must be "none" or "tanh", but is {approximate!r}')
    if isinstance(x, torch.Tensor) and not x.is_floating_point():
        raise RidgelineError(f"gelu: x must be floating point (float32, float16, bfloat16), but is {x.dtype}")
    (plain,) = KERNELS.look(x, impl)
    return plain(x, approximate) if plain else KERNELS(impl, x, mode=approximate)


def cost(x: torch.Tensor, approximate: str = "none") -> tuple[Cost, Cost]:
    return Cost(nbytes(x), nbytes(x), 10 * x.numel()), Cost(2 * nbytes(x), nbytes(x), 18 * x.numel())


LARGE, SMALL = Spec(16384, 16384), Spec(1024, 1024)
KERNELS.op = GELU = Op(
    gelu,
    reference=reference,
    cost=cost,
    sharding="x * -> *",
    cases=[
        Case("33x129 tanh", (Spec(33, 129), "tanh")),
        Case("33x129", (Spec(33, 129),)),
        Case("2048 tanh", (Spec(2048), "tanh"), use="quick"),
        Case("1024x1024 tanh", (SMALL, "tanh"), use="quick"),
        Case("16384x16384 tanh", (LARGE, "tanh"), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x16384", (LARGE,), dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

GELU.eager("naive", "the formula in eager PyTorch: nine passes over memory", reference)


def _torch(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


GELU.eager("torch", "PyTorch's own kernel: one pass", _torch, served=True)
GELU.compiled("the formula fused into one Triton kernel by torch.compile")

FILE = Path(__file__).with_name("gelu.cu")


def _cuda(name: str, suffix: str, packed: bool, idea: str) -> None:
    fwd, bwd = CudaKernel(FILE, f"gelu_fwd{suffix}", "PPq"), CudaKernel(FILE, f"gelu_bwd{suffix}", "PPPq")

    def start(kernel: CudaKernel, y: torch.Tensor, *args: Any) -> None:
        *ins, _, mode = args
        start_cuda(kernel, (y,), tuple(ins), packed=packed, DTYPE=CTYPE[y.dtype], TANH=int(mode == "tanh"))

    GELU.kernel(name, idea, kind="cuda", fwd=partial(start, fwd), bwd=partial(start, bwd), supports=alike)


_cuda("cuda_double", "_double", False, "one element per thread; double literals make it compute in float64")
_cuda("cuda", "", False, "float literals: float32 arithmetic throughout")
_cuda("cuda_packed", "", True, "16-byte loads and stores: fewer instructions for the same bytes")
KERNELS.triton("a block of elements per program; wide loads left to the compiler; strides and broadcasting")
