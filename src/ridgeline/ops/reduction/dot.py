"""dot: y = sum_i a_i b_i.

    backward: da = dy b,  db = dy a

a and b are read once; the ladder shows what many threads that add to one address cost, and what to do instead.
The first rungs, after PyTorch's fastAtomicAdd, sum in float16, which is exact for integers up to 2048 and overflows
above 65504. Sums of 0.1 x 0.1 stall at 32, so such data would not test a kernel. Their cases hold -1, 0 and 1, mostly
0: all partial sums are exact in any order, and one element lost or counted twice shows.
Source: PyTorch's KernelUtils.cuh; for the ordered sum Mark Harris, Optimizing Parallel Reduction in CUDA, 2007.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.reduction._arguments import Positive, Signs, Strided
from ridgeline.ops.reduction._sums import atomic, by_programs, in_order, no_kernel, paired, together
from ridgeline.select import by_kind, eager, run

TAKEN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@kernel_op("dot_fwd(Tensor a, Tensor b, str? impl) -> Tensor")
def _forward(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = a.new_empty(())
    if not a.numel():
        return y.zero_()
    run(DOT, "fwd", impl, (y,), a, b)
    return y


class _Dot(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _forward(a, b, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return dy * b if ctx.needs_input_grad[0] else None, dy * a if ctx.needs_input_grad[1] else None, None


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.dot(a, b)


def _fused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.to(torch.promote_types(a.dtype, torch.float32)) * b).sum().to(a.dtype)


@by_kind(2)
def _look(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> tuple[Implementation | None]:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise RidgelineError(f"dot: a and b must be tensors, but are {type(a).__name__} and {type(b).__name__}")
    if a.dim() != 1 or a.shape != b.shape:
        raise RidgelineError(
            f"dot: a and b must be equally long vectors, but are {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise RidgelineError(f"dot: a is {a.dtype} on {a.device} but b {b.dtype} on {b.device}; they must agree")
    if a.dtype not in TAKEN:
        raise RidgelineError(f"dot: a and b must be {', '.join(str(d)[6:] for d in TAKEN)}, but are {str(a.dtype)[6:]}")
    return (eager(DOT, impl, a, b),)


def dot(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The dot product of two vectors, as `torch.dot`. Gradients flow to both.

    a, b: (N,), any strides, on one device, of one dtype: float32, float16, bfloat16 or float64. Returns a scalar, (),
    in that dtype. Sums are in float32 (float64 for float64) and bitwise reproducible.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """
    (plain,) = _look(a, b, impl)
    if plain is not None and plain.call is not None:
        return plain.call(a, b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return differentiate(_Dot, a, b, impl)
    return _forward(a, b, impl)


def cost(a: torch.Tensor, b: torch.Tensor) -> tuple[Cost, Cost]:
    return Cost(nbytes(a, b), a.element_size(), 2 * a.numel()), Cost(nbytes(a, b), nbytes(a, b), 2 * a.numel())


def _signs(n: int, use: str = "check", dtypes: tuple[str, ...] = FLOATS) -> Case:
    """About 2^15 elements of a are not 0; a float16 sum of random signs has room for eight times as many."""
    a, b = Signs(n, high=max(2, n >> 15), grad=use == "check"), Signs(n, grad=use == "check")
    return Case(f"{n >> 20} Mi signs" if n >> 20 else f"{n} signs", (a, b), dtypes=dtypes, use=use)


WIDE = ("float32", "bfloat16")


def _case(name: str, n: int, kind: type[Spec] = Positive, dtypes: tuple[str, ...] = WIDE, use: str = "check") -> Case:
    return Case(name, (kind(n, grad=use == "check"), kind(n, grad=use == "check")), dtypes=dtypes, use=use)


DOT = Op(
    dot,
    reference=reference,
    cost=cost,
    sharding="a k, b k -> ",
    cases=[
        _case("1000", 1000),
        _case("1031 strided", 1031, Strided, FLOATS),
        _case("300007", 300007),
        _case("1", 1, dtypes=FLOATS),
        _case("nothing", 0, dtypes=FLOATS),
        _signs(1023),
        _signs(70001),
        _signs(1 << 20, "quick", ("float32", "float16")),
        _signs(32 << 20, "bench", ("float16",)),
        _case("32 Mi", 32 << 20, use="bench"),
    ],
)

DOT.eager("torch", "PyTorch's own: cuBLAS on an NVIDIA GPU", reference, served=True)
DOT.compiled("torch.compile of the product and its float32 sum", _fused)


def _rung(name: str, idea: str, fwd: Callable[..., None], kind: str = "cuda", **facts: Any) -> None:
    DOT.kernel(name, idea, kind=kind, fwd=fwd, bwd=no_kernel, **facts)


DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
ATOMICS = "l1tex__t_set_accesses_pipe_lsu_mem_global_op_atom.sum"
# Atomics add in the order in which threads arrive, so reruns differ unless all sums are exact.
unordered: dict[str, Any] = {"deterministic": False, "counter": ATOMICS}
for end, each, gain, idea in (
    ("half", 1, 0.0, "one atomic per thread on one half: the GPU compares and swaps until it succeeds"),
    ("half2", 2, 6.0, "two elements per thread, one native atomic on a pair of halves"),
    ("padded", 1, 0.5, "one element per thread, paired with a zero to use the native atomic"),
):
    fwd, fits = partial(atomic, ("half_zero", f"half_{end}", "half_end"), each), partial(paired, bytes=2 * each)
    _rung(f"atomic_{end}", idea, fwd, supports=fits, dtypes=("float16",), gain=gain, **unordered)
idea = "sums in registers and shared memory first; one float32 atomic per block"
fwd = partial(atomic, ("block_zero", "block_one", "block_end"), 0)
# Not for float32: float32 sums of that many float32 products would fail the tolerance check.
_rung("atomic_block", idea, fwd, supports=paired, dtypes=("float16", "bfloat16"), gain=1000.0, **unordered)
_rung("triton", "any strides: one part per program, added in order", by_programs, "triton", served=True)
idea = "16-byte loads, two of each vector in flight; an early-started second kernel adds the parts"
_rung("cuda", idea, in_order, supports=together, served=True, gain=1.04, counter=DRAM)
