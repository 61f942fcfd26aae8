"""dot: y = sum_i a_i b_i, the ladder of what many threads cost that add to one address, and of what to do instead.

    backward: da = dy b,  db = dy a

a and b are read once. The first rungs, after PyTorch's fastAtomicAdd, keep the sum in float16, which holds whole numbers up to 2048 and
nothing above 65504: of products of 0.1 x 0.1 it stays at 32, where half a step is more than a product, so that such data tell nothing of
a kernel. Their cases are therefore of -1, 0 and 1, few of them not 0: every sum on the way is a whole number far below 2048, exact in
whatever order the threads come, and one element lost or counted twice shows.
Source: PyTorch's KernelUtils.cuh; for the sum in order Mark Harris, Optimizing Parallel Reduction in CUDA, 2007.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.reduction._data import Positive, Signs, Strided
from ridgeline.ops.reduction._products import atomic, by_programs, in_order, side_by_side, together
from ridgeline.ops.reduction._sums import no_kernel
from ridgeline.select import by_kind, eager, run


@kernel_op("dot_fwd(Tensor a, Tensor b, str? impl) -> Tensor")
def _forward(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = a.new_empty(())
    if not a.numel():
        return y.zero_()
    run(DOT, "fwd", impl, (y,), a, b)
    return y


TAKEN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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


@by_kind(2)
def _look(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> tuple[Implementation | None]:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise RidgelineError(f"dot: a and b must be tensors, and are {type(a).__name__} and {type(b).__name__}")
    if a.dim() != 1 or a.shape != b.shape:
        raise RidgelineError(
            f"dot: a and b must be vectors of one length, and are {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise RidgelineError(f"dot: a is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; they must agree")
    if a.dtype not in TAKEN:
        raise RidgelineError(f"dot: a and b must be {', '.join(str(d)[6:] for d in TAKEN)}, and are {str(a.dtype)[6:]}")
    return (eager(DOT, impl, a, b),)


def dot(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The dot product of two vectors, as `torch.dot`. Gradients flow to both.

    a, b: (N,), any strides, of one device and dtype: float32, float16, bfloat16 or float64. Returns a number, (), in that dtype; sums
    are in float32 (of float64 in it), and the same bits every time.
    Raises RidgelineError where shapes, dtypes or devices do not fit, or `impl` cannot run the call.
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
    """As many of a's elements are not 0 as a float16 sum has room for, eight times over: some 2**15."""
    grad = use == "check"
    name = f"{n >> 20} Mi" if n >> 20 else str(n)
    return Case(
        name + " signs", (Signs(n, high=max(2, n >> 15), grad=grad), Signs(n, grad=grad)), dtypes=dtypes, use=use
    )


def _case(
    name: str,
    n: int,
    kind: type[Spec] = Positive,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    use: str = "check",
) -> Case:
    return Case(name, (kind(n, grad=use == "check"), kind(n, grad=use == "check")), dtypes=dtypes, use=use)


DOT = Op(
    dot,
    reference=reference,
    cost=cost,
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
        _case("32 Mi", 32 << 20, dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

DOT.eager("torch", "PyTorch's own: cuBLAS on an NVIDIA GPU", reference, served=True)
DOT.compiled(
    "torch.compile of the product and its sum in float32",
    lambda a, b: (a.to(torch.promote_types(a.dtype, torch.float32)) * b).sum().to(a.dtype),
)


def _rung(name: str, idea: str, fwd: Callable[..., None], kind: str = "cuda", **facts: Any) -> None:
    DOT.kernel(name, idea, kind=kind, fwd=fwd, bwd=no_kernel, **facts)


ATOMICS, DRAM = (
    "l1tex__t_set_accesses_pipe_lsu_mem_global_op_atom.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
# What atomics add they add in the order in which the threads come, so that reruns differ, but for whole numbers.
unordered: dict[str, Any] = {"deterministic": False, "counter": ATOMICS}
for end, each, gain, idea in (
    (
        "half",
        1,
        0.0,
        "an atomic a thread on one half, which the GPU does by reading, adding and swapping, until nobody was quicker",
    ),
    (
        "half2",
        2,
        6.0,
        "two elements a thread, an atomic on a pair of halves, which the GPU has: half as many, and each done at once",
    ),
    (
        "padded",
        1,
        0.5,
        "one element a thread again, its half in a pair beside a zero: the quick atomic where there is only one value",
    ),
):
    fwd, fits = partial(atomic, ("half_zero", f"half_{end}", "half_end"), each), partial(side_by_side, bytes=2 * each)
    _rung(f"atomic_{end}", idea, fwd, supports=fits, dtypes=("float16",), gain=gain, **unordered)
idea, fwd = (
    "sums in registers and shared memory first: one atomic a block, in float32",
    partial(atomic, ("block_zero", "block_one", "block_end"), 0),
)
# Of float32 products, so many sums in float32 would err more than the law allows.
_rung("atomic_block", idea, fwd, supports=side_by_side, dtypes=("float16", "bfloat16"), gain=1000.0, **unordered)
_rung("triton", "any strides: a program's part, and the parts added in their order", by_programs, "triton", served=True)
idea = "16-byte loads, two of each vector on their way a thread; blocks leave parts, which a second kernel that starts early adds in order"
_rung("cuda", idea, in_order, supports=together, served=True, gain=1.04, counter=DRAM)  # 2 us of a second start, of 50
