"""sum_to: x summed over the dimensions in which a smaller shape was broadcast to it, as the backward of broadcasting.

    y_j = sum_i x_i over all i that j was broadcast to          backward: dx_i = dy_j

Any set of dimensions is summed in one pass: neighbours are merged, tiles take the innermost kept and the innermost
summed dimension, and the others are found from a tile's number. The kernel is reduce_sum's. The floor is one read of x.
Source: the rule is that of NumPy's broadcasting; torch.Tensor.sum_to_size has the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Implementation, Op, RidgelineError, dense_only, nbytes
from ridgeline.ops.reduction._arguments import Positive, axes, left_to_torch, letters, result_dtype, tiny
from ridgeline.ops.reduction._sums import no_kernel, sum_tiles
from ridgeline.select import by_kind, eager, find, run

INTS = ("int32", "int64", "int16", "int8", "uint8", "bool")


@kernel_op("sum_to_fwd(Tensor x, int[] shape, ScalarType dtype, str? impl) -> Tensor")
def _forward(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, impl: str | None) -> torch.Tensor:
    y = x.new_empty(shape, dtype=dtype)
    if not x.numel():
        return y.zero_()
    run(SUM_TO, "fwd", impl, (y,), x, shape)
    return y


class _SumTo(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, impl: str | None
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _forward(x, shape, dtype, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy.to(ctx.dtype).expand(ctx.shape), None, None, None


def reference(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.sum_to_size(shape)


@by_kind(1)
def _look(x: torch.Tensor, shape: tuple[int, ...], impl: str | None) -> tuple[Implementation | None, torch.dtype, bool]:
    """Checks a call and chooses. Returns too the result's dtype, and whether anything is summed."""
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"sum_to: x must be a tensor, but is {type(x).__name__}")
    if not isinstance(shape, tuple) or any([type(n) is not int or n < 0 for n in shape]):
        raise RidgelineError(f"sum_to: shape must be sizes, such as (3, 1), but is {shape!r}")
    lead = x.dim() - len(shape)
    if lead < 0 or any([n not in (1, m) for n, m in zip(shape, x.shape[lead:], strict=True)]):
        raise RidgelineError(f"sum_to: shape must broadcast to x's shape {tuple(x.shape)}, but is {tuple(shape)}")
    out = result_dtype(x, None)
    reason = left_to_torch(x, out)
    if reason:
        dense_only("sum_to", [x])
    plain = find(SUM_TO, impl or "torch") if reason else eager(SUM_TO, impl, x, shape)
    if reason and plain is not None and plain.is_kernel:
        raise RidgelineError(f"sum_to: impl={impl!r} cannot run this call: {reason}")
    return plain, out, x.numel() != torch.Size(shape).numel()


def sum_to(x: torch.Tensor, shape: Sequence[int], *, impl: str | None = None) -> torch.Tensor:
    """x summed to a shape that broadcasts to x's, as `torch.Tensor.sum_to_size`. Gradients flow to x.

    Sums over the leading dimensions that `shape` lacks and over those where it has 1: the gradient of a tensor of that
    shape, from the gradient of its broadcast. If no dimension is summed, it returns a view of x.
    x: any shape and strides. shape: sizes. Sums are in float32 for floats and in 64 bits for integers, and bitwise
    reproducible. Returns x's dtype, or int64 for integers; under autocast float32 for halves, as torch's sum.
    Raises RidgelineError if `shape` does not broadcast to x's shape, or if `impl` cannot run the call.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else shape
    plain, out, summed = _look(x, sizes, impl)
    if not summed and x.numel():
        return x.reshape(sizes)
    if plain is not None and plain.call is not None:
        return plain.call(x, sizes)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_SumTo, x, sizes, out, impl)
    return _forward(x, sizes, out, impl)


def cost(x: torch.Tensor, shape: Sequence[int]) -> tuple[Cost, None]:
    return Cost(nbytes(x), torch.Size(shape).numel() * result_dtype(x, None).itemsize, x.numel()), None


def _tiles(y: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    sum_tiles(y, x, axes(x.shape, shape), True, y.dtype)


def _tiny(x: torch.Tensor, shape: tuple[int, ...], *_: Any) -> str | None:
    return tiny(x, axes(x.shape, shape))


def _case(*shape: int, to: tuple[int, ...], **facts: Any) -> Case:
    name = f"{'x'.join(map(str, shape))} to {'x'.join(map(str, to)) or 'a number'}"
    return Case(name, (Positive(*shape, grad=facts.get("use") != "bench"), to), **facts)


ALL = (*FLOATS, "int32")
BENCH: dict[str, Any] = {"dtypes": ("float32", "bfloat16"), "use": "bench"}
SUM_TO = Op(
    sum_to,
    reference=reference,
    cost=cost,
    sharding=letters,
    cases=[
        _case(5, 70, 9, to=(70, 1)),
        _case(33, 129, to=(129,), dtypes=ALL),
        _case(33, 129, to=(33, 1)),
        _case(3, 4, 3, 4, 3, to=(3, 1, 3, 1, 3), dtypes=ALL),
        _case(3, 4, 3, 4, 3, to=(4, 1, 4, 1)),
        _case(2, 3, 2, 3, 2, 3, 5, to=(1, 3, 1, 3, 1, 3, 1)),
        _case(9, 1000, 2, to=(1, 1, 1)),
        _case(4097, to=()),
        _case(0, 3, to=(3,)),
        _case(64, 32, 32, 32, to=(32, 1, 1), use="quick"),
        _case(256, 64, 112, 112, to=(64, 1, 1), **BENCH),
        _case(32, 64, 128, 256, to=(32, 1, 128, 1), **BENCH),
        _case(16, 32, 64, 32, 64, to=(16, 1, 64, 1, 64), **BENCH),
    ],
)

SUM_TO.eager("torch", "PyTorch's own sum, of all these dimensions at once", reference, served=True)
SUM_TO.compiled("torch.compile's")
SUM_TO.kernel(
    "triton",
    "reduce_sum's tiles: any set of dimensions in one pass, few sums split into parts that are added in order",
    kind="triton",
    fwd=_tiles,
    bwd=no_kernel,
    dtypes=(*FLOATS, *INTS),
    served=True,
    unless=_tiny,
)
