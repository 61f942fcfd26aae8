"""mul: y = a * b, the elementwise template: packs, strides, broadcasting and type promotion on the simplest function.

One pass reads a and b and writes y. Backward is da = dy b, db = dy a, summed over broadcast dimensions.
Source: the elementwise template of OneFlow, as the catalogue of CUDA optimisations describes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter looks for it in a kernel's module

from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Case, Cost, Op, Spec
from ridgeline.ops.pointwise._generator import Pointwise, alike, pair_cost, start_cuda


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _mul_grad(dy, a, b):
    return dy * b, dy * a


KERNELS = Pointwise("mul", ["a", "b"], {"": _mul}, {"": _mul_grad})


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def mul(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The product of two tensors, element by element, as `torch.mul`. Gradients flow to both.

    a, b: tensors on one device whose shapes broadcast; the result has PyTorch's promoted dtype.
    Raises RidgelineError if an argument is not a tensor, if devices differ, or if `impl` cannot run the call.
    """
    (plain,) = KERNELS.look(a, b, impl)
    return plain(a, b) if plain else KERNELS(impl, a, b)


def cost(a: torch.Tensor, b: torch.Tensor) -> tuple[Cost, Cost]:
    return pair_cost(a, b, 1, 2)


MI = 1 << 20
KERNELS.op = MUL = Op(
    mul,
    reference=reference,
    cost=cost,
    sharding="a *, b * -> *",
    cases=[
        Case("1001", (Spec(1001), Spec(1001))),
        Case("rows 33x129 * 129", (Spec(33, 129), Spec(129))),
        Case("columns 33x129 * 33x1", (Spec(33, 129), Spec(33, 1))),
        Case("outer 3x1x65 * 5x1", (Spec(3, 1, 65), Spec(5, 1))),
        Case("mixed 33x129 * float32", (Spec(33, 129), Spec(33, 129, dtype="float32"))),
        Case("1 Mi", (Spec(MI), Spec(MI)), use="quick"),
        Case("32 Mi", (Spec(32 * MI), Spec(32 * MI)), dtypes=("float32", "float16"), use="bench"),
        Case("512 Mi", (Spec(512 * MI), Spec(512 * MI)), dtypes=("float32", "float16"), use="bench"),
    ],
)

FILE = Path(__file__).with_name("mul.cu")


def _cuda(name: str, packed: bool, idea: str) -> None:
    kernel = CudaKernel(FILE, "mul_fwd", "PPPq")

    def fwd(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> None:
        dtypes = {"RESULT": CTYPE[y.dtype], "LEFT": CTYPE[a.dtype], "RIGHT": CTYPE[b.dtype]}
        start_cuda(kernel, (y,), (a, b), packed=packed, **dtypes)

    def bwd(da: torch.Tensor, db: torch.Tensor, dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> None:
        for gradient, other in ((da, b), (db, a)):
            if gradient.numel():
                fwd(gradient, dy, other)

    MUL.kernel(name, idea, kind="cuda", fwd=fwd, bwd=bwd, supports=alike)


MUL.eager("torch", "PyTorch's own kernel", torch.mul, served=True)
_cuda("cuda", False, "one element per thread; backward runs the same kernel twice")
_cuda("cuda_packed", True, "packs of up to 16 bytes in a grid-stride loop; halves two at a time")
KERNELS.triton("contiguous blocks, or tiles of rows for strided or broadcast operands; backward in one pass")
