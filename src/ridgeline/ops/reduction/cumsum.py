"""cumsum: y_i = x_0 + x_1 + ... + x_i, along one dimension.

    backward: dx_i = dy_i + dy_(i+1) + ..., the same from the end

A row is summed in one pass: a block sums a tile in its registers, and looks back at what the tiles before it add up to, as far as they have
said, instead of waiting for a pass of its own. The floor is a read and a write. Floats are added in one order whatever block is first.
Source: Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back, 2016 (NVR-2016-002).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.reduction._cumsum import best, by_ring, by_tiles, short, whole
from ridgeline.ops.reduction._kinds import KINDS, WHOLE
from ridgeline.ops.reduction._layout import result_dtype
from ridgeline.select import eager, run


@kernel_op("cumsum_fwd(Tensor x, int dim, ScalarType dtype, bool reverse, str? impl) -> Tensor")
def _forward(x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool, impl: str | None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        run(CUMSUM, "bwd" if reverse else "fwd", impl, (y,), x, dim, dtype, reverse)
    return y


class _Cumsum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
        ctx.facts = dim, dtype, True, impl
        return _forward(x, dim, dtype, False, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _forward(dy, *ctx.facts), None, None, None


def reference(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.cumsum(x, dim, dtype=dtype)


def cumsum(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, impl: str | None = None) -> torch.Tensor:
    """The sums of x from the first element along `dim` up to each, as `torch.cumsum`. Gradients flow to x.

    x: any shape and strides, of real numbers. dtype: what x is cast to first, and the result's type; None is x's, or int64 where x holds
    integers, or float32 of halves under autocast. Integers are exact, and wrap around in their type; halves add in float32; floats give
    the same bits every time.
    Returns a contiguous tensor of x's shape. Raises RidgelineError on a `dim` that x does not have, complex numbers, or an `impl` that
    cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.is_complex():
        raise RidgelineError(
            f"cumsum: x must be a tensor of real numbers, and is {x.dtype if isinstance(x, torch.Tensor) else type(x).__name__}"
        )
    most = max(1, x.dim())
    if not isinstance(dim, int | torch.SymInt) or not -most <= dim < most:
        raise RidgelineError(
            f"cumsum: dim must be an int from {-most} to {most - 1} for an x of {x.dim()} dimensions, and is {dim!r}"
        )
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype.is_complex):
        raise RidgelineError(f"cumsum: dtype must be None or a real one (torch.float32, int32, ...), and is {dtype!r}")
    result = result_dtype(x, dtype)
    if x.dtype not in KINDS or result.is_floating_point or x.is_floating_point() or result.itemsize < x.dtype.itemsize:
        x = x.to(result)
    plain = eager(CUMSUM, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x, dim, result)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_Cumsum, x, dim % most, result, impl)
    return _forward(x, dim % most, result, False, impl)


def cost(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> tuple[Cost, Cost]:
    size = result_dtype(x, dtype).itemsize
    return Cost(nbytes(x), size * x.numel(), x.numel()), Cost(size * x.numel(), nbytes(x), x.numel())


def _whole(*shape: int, high: int = 1 << 20) -> Spec:
    return Spec(*shape, dtype="int32", high=high)


INT32, ONE = {"dtype": torch.int32}, ("int32",)
CUMSUM = Op(
    cumsum,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129), -1)),
        Case("33x129 dim 0", (Spec(33, 129), 0)),
        Case("3x1000x5 dim 1", (Spec(3, 1000, 5), 1)),
        Case("2x4000x3 dim 1", (Spec(2, 4000, 3), 1)),
        Case("100001", (Spec(100001), 0)),
        Case("3x300000", (Spec(3, 300000), 1)),
        Case("7x3", (Spec(7, 3), 1)),
        Case("1", (Spec(1), 0)),
        Case("4x0", (Spec(4, 0), 1)),
        Case("70000 int32", (_whole(70000, high=1 << 30), 0), dtypes=ONE),
        Case("70001 int32 to int32", (_whole(70001, high=1 << 30), 0), INT32, dtypes=ONE),
        Case("600000 uint8", (Spec(600000, dtype="uint8", high=255), 0), dtypes=("uint8",)),
        Case(
            "600000 uint8 to uint8",
            (Spec(600000, dtype="uint8", high=255), 0),
            {"dtype": torch.uint8},
            dtypes=("uint8",),
        ),
        Case("2^20 int32", (_whole(1 << 20), 0), INT32, dtypes=ONE, use="quick"),
        Case("1024x4096", (Spec(1024, 4096), 1), use="quick"),
        Case("2^30 int32 to int32", (_whole(1 << 30), 0), INT32, dtypes=ONE, use="bench"),
        Case("2^28", (Spec(1 << 28, grad=False), 0), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x16384", (Spec(16384, 16384), -1), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x4096 dim 0", (Spec(16384, 4096, grad=False), 0), dtypes=("float32",), use="bench"),
    ],
)

CUMSUM.eager("torch", "PyTorch's own: one pass that looks back, or a block for some rows", reference, served=True)
CUMSUM.compiled("torch.compile's scan, where it makes one")


def _last(x: torch.Tensor, dim: int = 0, *rest: Any) -> str | None:
    shape = x.shape or (1,)
    return (
        None
        if math.prod(shape[dim % len(shape) + 1 :]) == 1
        else "it takes the last dimension, and what follows this has sizes"
    )


def _rung(name: str, idea: str, start: Any, **facts: Any) -> None:
    CUMSUM.kernel(name, idea, kind="cuda", fwd=start, bwd=start, dtypes=(*FLOATS, *WHOLE), **facts)


_rung(
    "cuda_phases",
    "tiles' totals, their sums, then the tiles again: x is read twice",
    partial(by_tiles, True),
    supports=_last,
    counter="dram__bytes_read.sum",
)
_rung(
    "cuda_lookback",
    "one pass: a tile looks back at the totals of those before it, in a fixed order",
    partial(by_tiles, False),
    supports=_last,
    gain=1.5,
    counter="dram__bytes_read.sum",
)
_rung(
    "cuda",
    "16-byte loads; a block a row where they are many, a thread a column along other dimensions",
    best,
    served=True,
    gain=1.1,
    counter="smsp__inst_executed.sum",
)
_rung(
    "cuda_ring",
    "the copy engine brings tiles ahead, sums leave from registers; a block looks at one total of each other, none of them waited for long",
    by_ring,
    served=True,
    arch=90,
    supports=whole,
    unless=short,
    gain=1.1,
    counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
