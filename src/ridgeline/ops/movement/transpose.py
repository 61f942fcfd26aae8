"""transpose: y_..cr = x_..rc, the last two dimensions swapped, in a new contiguous tensor.

A warp that reads a row of x writes a column of y, one sector per element. So tiles go through shared memory and are
transposed there, padded or swizzled against bank conflicts. The last implementations keep more bytes in flight: tiles
moved by TMA, then 16-byte packs that threads transpose in registers.
Source: Ruetsch and Micikevicius, Optimizing matrix transpose in CUDA, NVIDIA 2009.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.movement._bytes import DRAM, DTYPES, ISSUED, SECTORS, aligned
from ridgeline.ops.movement._transpose import NAIVE, TILE, boxes, packed, small, too_large
from ridgeline.select import eager, run


@kernel_op("transpose_fwd(Tensor x, str? impl) -> Tensor")
def _forward(x: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))
    if x.numel():
        run(TRANSPOSE, "fwd", impl, (y,), x)
    return y


class _Transpose(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.impl = impl
        return _forward(x, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _forward(dy.contiguous(), ctx.impl), None


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format)


def transpose(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """x with its last two dimensions swapped, as a new contiguous tensor. Gradients flow to x.

    x: (..., R, C), any strides and dtype. Contiguous inputs are fastest, above all with rows of a multiple of 16 bytes.
    Raises RidgelineError if x is not a dense tensor of two or more dimensions, or if `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"transpose: x must be a tensor, but is {type(x).__name__}")
    if x.dim() < 2:
        raise RidgelineError(f"transpose: x must have at least two dimensions, but has shape {tuple(x.shape)}")
    plain = eager(TRANSPOSE, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x)
    return differentiate(_Transpose, x, impl) if torch.is_grad_enabled() and x.requires_grad else _forward(x, impl)


def cost(x: torch.Tensor) -> tuple[Cost, Cost]:
    return Cost(nbytes(x), nbytes(x), 0), Cost(nbytes(x), nbytes(x), 0)


def _contiguous(x: torch.Tensor, *_: Any) -> str | None:
    return too_large(x) if x.is_contiguous() else "it takes a contiguous tensor"


def _boxes(x: torch.Tensor, *_: Any) -> str | None:
    """Why tensor maps cannot describe x or its transpose, or None."""
    if any(n * x.element_size() % 16 for n in x.shape[-2:]):
        return "it takes matrices whose sides are multiples of 16 bytes"
    return too_large(x) or aligned(x)


def _gluon(y: torch.Tensor, x: torch.Tensor) -> None:
    from ridgeline.ops.movement._transpose_hopper import fwd

    fwd(y, x)


def _bench(name: str, *shape: int, dtypes: tuple[str, ...] = ("float32",)) -> Case:
    return Case(name, (Spec(*shape, grad=False),), dtypes=dtypes, use="bench")


TRANSPOSE = Op(
    transpose,
    reference=reference,
    cost=cost,
    sharding="x ...mn -> ...nm",
    cases=[
        Case("33x129", (Spec(33, 129),)),
        Case("72x200", (Spec(72, 200),)),
        Case("3 of 136x264", (Spec(3, 136, 264),)),
        Case("2x2 of 70x34", (Spec(2, 2, 70, 34),)),
        *(
            Case(f"{shape} of {d}", (Spec(*shape, dtype=d, high=high),), dtypes=("float32",))
            for d, high in (("int8", 0), ("int16", 1 << 15), ("int64", 1 << 40))
            for shape in ((2, 160, 272), (35, 130), (36, 132))
        ),
        Case("1x5", (Spec(1, 5),)),
        Case("3 of 0x5", (Spec(3, 0, 5),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        _bench("8192x8192", 8192, 8192, dtypes=("float32", "bfloat16")),
        _bench("16384x8192", 16384, 8192, dtypes=("bfloat16",)),
        _bench("32768x32768", 32768, 32768),
        _bench("8191x8193", 8191, 8193, dtypes=("float32", "bfloat16")),
        _bench("64 of 1024x2048", 64, 1024, 2048, dtypes=("bfloat16",)),
    ],
)
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


def _rung(
    name: str, idea: str, start: Any, gain: float, counter: str, supports: Any = _contiguous, **facts: Any
) -> None:
    facts = {"kind": "cuda", "dtypes": DTYPES, "gain": gain, "counter": counter, **facts}
    TRANSPOSE.kernel(name, idea, fwd=start, bwd=start, supports=supports, **facts)


TRANSPOSE.eager("torch", "PyTorch's own: mT, then a contiguous copy", reference, served=True)
TRANSPOSE.compiled("torch.compile: a Triton tile whose layout the compiler transposes")
_rung("cuda", "one element per thread: loads coalesce, stores do not", partial(small, NAIVE, 0), 1.0, SECTORS)
_rung("cuda_tile", "shared memory tile: stores coalesce too, but reads conflict", partial(small, TILE, 0), 2.0, SECTORS)
_rung("cuda_padded", "a 33rd column: no bank conflicts", partial(small, TILE, 1), 1.3, CONFLICTS)
_rung("cuda_swizzled", "an xor swizzle: no conflicts and no padding", partial(small, TILE, 2), 1.0, CONFLICTS)
TMA = {"supports": _boxes, "arch": 90, "shared": 227 << 10}
_rung("cuda_tma", "TMA moves tiles through a ring; persistent blocks transpose", boxes, 1.2, DRAM, **TMA)
GLUON: dict[str, Any] = {
    "kind": "gluon",
    "dtypes": ("float32", "float16", "bfloat16", "int32", "int16"),
    "arch": 90,
    "newest": 90,
}
_rung("gluon", "cuda_tma in Gluon: a layout assigns squares to threads", _gluon, 1.0, DRAM, _boxes, **GLUON)
SERVED: dict[str, Any] = {"supports": too_large, "unless": too_large, "served": True}
_rung(
    "cuda_packed", "16 bytes per load and store; threads transpose squares in registers", packed, 1.05, ISSUED, **SERVED
)
