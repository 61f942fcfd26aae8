"""An op for testing the lab, in no registry: twice(x) = 2 x, in Triton and CUDA C++, tuned, with a product inside."""

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, select, tuning
from ridgeline.boundary import kernel_op, launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import Case, Cost, Op, Spec, nbytes

SPACE = [{"BLOCK": 1024, "num_warps": 4}, {"BLOCK": 2048, "num_warps": 4}, {"BLOCK": 4096, "num_warps": 8}]
CU = Path(__file__).with_name("toy.cu")
_cuda_twice = CudaKernel(CU, "toy_twice", "PPq")
_cuda_local = CudaKernel(CU, "toy_local", "PPq")


@triton.jit
def _fwd(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def _dot(x, y, n):
    i = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)
    a = tl.load(x + i)
    tl.store(y + i, tl.dot(a, a).to(y.dtype.element_ty))


def _tuned(x: torch.Tensor, kernel: str) -> Any:
    key = str(x.dtype)[6:]
    return lambda: tuning.config(
        device.of(x), "twice", kernel, key, lambda: dict(SPACE[0]), lambda: [dict(c) for c in SPACE]
    )


def _triton(y: torch.Tensor, x: torch.Tensor) -> None:
    launch(_fwd, lambda c: (triton.cdiv(x.numel(), c["BLOCK"]),), x, y, x.numel(), config=_tuned(x, "fwd"), key="fwd")


def _triton_dot(y: torch.Tensor, x: torch.Tensor) -> None:
    launch(_dot, (1,), x, y, x.numel(), num_warps=4)


def _cuda(y: torch.Tensor, x: torch.Tensor) -> None:
    launch(_cuda_twice, (triton.cdiv(x.numel(), 1024),), x, y, x.numel(), block=256)


def _local(y: torch.Tensor, x: torch.Tensor) -> None:
    launch(_cuda_local, (1,), x, y, x.numel(), block=64)


@kernel_op("toy_twice(Tensor x, str? impl) -> Tensor")
def _forward(x: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = torch.empty_like(x)
    select.run(OP, "fwd", impl, (y,), x)
    return y


@kernel_op("toy_twice_bwd(Tensor dy, str? impl) -> Tensor")
def _backward(dy: torch.Tensor, impl: str | None) -> torch.Tensor:
    dx = torch.empty_like(dy)
    select.run(OP, "bwd", impl, (dx,), dy)
    return dx


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.impl = impl
        return _forward(x, impl)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _backward(dy, ctx.impl), None


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def twice(x: torch.Tensor, impl: str | None = None) -> torch.Tensor:
    eager = select.eager(OP, impl, x)
    return eager.call(x) if eager else _Twice.apply(x, impl)  # type: ignore[misc]


OP = Op(
    twice,
    reference=reference,
    cases=[Case("bench", (Spec(4096, 4096),), use="bench"), Case("small", (Spec(64, 64),))],
    cost=lambda x: (Cost(nbytes(x), nbytes(x), x.numel()), Cost(nbytes(x), nbytes(x), x.numel())),
)
OP.eager("torch", "PyTorch", reference, served=True)
OP.kernel("cuda", "CUDA C++", kind="cuda", fwd=_cuda, dtypes=("float32",))
OP.kernel("local", "an array that is indexed", kind="cuda", fwd=_local, dtypes=("float32",))
OP.kernel("dot", "a matrix product", kind="triton", fwd=_triton_dot)
OP.kernel("triton", "Triton", kind="triton", fwd=_triton, bwd=_triton, served=True)


def resources(impl: str, dtype: str, arch: str, **options: Any) -> Any:
    """Called in a process that compiles kernels."""
    from ridgeline.lab.analysis import inspect

    return inspect.resources(OP, OP.implementations[impl], OP.case("bench"), dtype, arch, **options)
