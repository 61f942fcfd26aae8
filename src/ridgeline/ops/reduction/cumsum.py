"""cumsum: y_i = x_0 + x_1 + ... + x_i, along one dimension.

    backward: dx_i = dy_i + dy_(i+1) + ..., the sum from the end

A row takes one pass: a block sums a tile in registers and looks back at the totals that earlier tiles have published,
instead of waiting for a separate pass. The floor is one read and one write. Floats are added in a fixed order,
whichever block comes first.
Source: Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back, 2016 (NVR-2016-002).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.reduction._arguments import INTEGERS, KINDS, result_dtype
from ridgeline.ops.reduction._cumsum import best, by_ring, by_tiles, last_dim, short, whole
from ridgeline.select import by_kind, eager, run


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
    """The sums of x along `dim` up to and including each element, as `torch.cumsum`. Gradients flow to x.

    x: any shape and strides, real. dtype: x is cast to it first, and it is the result's; None means x's, int64 for
    integers, or float32 for halves under autocast. Integers are exact and wrap around; halves add in float32; floats
    are bitwise reproducible. Returns a contiguous tensor of x's shape.
    Raises RidgelineError if x is complex, if `dim` or `dtype` is invalid, or if `impl` cannot run the call.
    """
    plain, dim, result, cast = _look(x, dim, dtype, impl)
    if cast:
        x = x.to(result)
    if plain is not None and plain.call is not None:
        return plain.call(x, dim, result)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_Cumsum, x, dim, result, impl)
    return _forward(x, dim, result, False, impl)


@by_kind(1)
def _look(
    x: Any, dim: int, dtype: torch.dtype | None, impl: str | None
) -> tuple[Implementation | None, int, torch.dtype, bool]:
    """Checks a call and chooses. Returns too the dimension, at least 0, the result's dtype and whether x is cast."""
    if not isinstance(x, torch.Tensor) or x.is_complex():
        found = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"cumsum: x must be a tensor of real numbers, but is {found}")
    most = max(1, x.dim())
    if not isinstance(dim, int | torch.SymInt) or not -most <= dim < most:
        wanted = f"an int from {-most} to {most - 1} for an x of {x.dim()} dimensions"
        raise RidgelineError(f"cumsum: dim must be {wanted}, but is {dim!r}")
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype.is_complex):
        raise RidgelineError(f"cumsum: dtype must be None or a real one (torch.float32, int32, ...), but is {dtype!r}")
    result = result_dtype(x, dtype)
    cast = (
        x.dtype not in KINDS or result.is_floating_point or x.is_floating_point() or result.itemsize < x.dtype.itemsize
    ) and x.dtype != result
    return eager(CUMSUM, impl, x.to(result) if cast else x), dim % most, result, cast


def cost(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> tuple[Cost, Cost]:
    size = result_dtype(x, dtype).itemsize
    return Cost(nbytes(x), size * x.numel(), x.numel()), Cost(size * x.numel(), nbytes(x), x.numel())


def _whole(n: int, dtype: str = "int32", high: int = 1 << 20) -> Spec:
    return Spec(n, dtype=dtype, high=high)


INT32, UINT8, ONE = {"dtype": torch.int32}, {"dtype": torch.uint8}, ("int32",)
CUMSUM = Op(
    cumsum,
    reference=reference,
    cost=cost,
    sharding="x *!dim -> *!dim",
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
        Case("600000 uint8", (_whole(600000, "uint8", 255), 0), dtypes=("uint8",)),
        Case("600000 uint8 to uint8", (_whole(600000, "uint8", 255), 0), UINT8, dtypes=("uint8",)),
        Case("2^20 int32", (_whole(1 << 20), 0), INT32, dtypes=ONE, use="quick"),
        Case("1024x4096", (Spec(1024, 4096), 1), use="quick"),
        Case("2^30 int32 to int32", (_whole(1 << 30), 0), INT32, dtypes=ONE, use="bench"),
        Case("2^28", (Spec(1 << 28, grad=False), 0), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x16384", (Spec(16384, 16384), -1), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x4096 dim 0", (Spec(16384, 4096, grad=False), 0), dtypes=("float32",), use="bench"),
    ],
)


def _rung(name: str, idea: str, start: Any, gain: float, counter: str, **facts: Any) -> None:
    facts |= {"kind": "cuda", "dtypes": (*FLOATS, *INTEGERS), "gain": gain, "counter": counter}
    CUMSUM.kernel(name, idea, fwd=start, bwd=start, **facts)


READ, ISSUED = "dram__bytes_read.sum", "smsp__inst_executed.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
CUMSUM.eager("torch", "PyTorch's own: one pass with look-back, or one block for several rows", reference, served=True)
CUMSUM.compiled("torch.compile's scan, where it generates one")
idea = "totals of tiles, their prefix sums, then the tiles again: x is read twice"
_rung("cuda_phases", idea, partial(by_tiles, True), 0.0, READ, supports=last_dim)
idea = "one pass: each tile looks back at the totals of earlier tiles, in a fixed order"
_rung("cuda_lookback", idea, partial(by_tiles, False), 1.5, READ, supports=last_dim)
idea = "16-byte loads; one block per row for many rows, one thread per column for other dimensions"
_rung("cuda", idea, best, 1.1, ISSUED, served=True)
idea = "bulk copies prefetch tiles; a block looks at one total of each other block, rarely waiting"
TMA = {"served": True, "arch": 90, "shared": 227 << 10}
_rung("cuda_ring", idea, by_ring, 1.1, DRAM, supports=whole, unless=short, **TMA)
