"""index_add: y = x, and y[index[k]] += alpha * source[k] for every k, along one dimension.

    backward: dx = dy,  dsource[k] = alpha dy[index[k]]

An index may name a row several times, so either additions are atomic, or one thread owns each element of y. The default
does the second. Few indices are searched by every warp or sorted by one block beside the copy; torch sorts many. Each
row's sources are added in order, in float32.
Source: PyTorch's and OneFlow's kernels for the teaching rungs (documents of index_add); sorting by destination is the
classic gradient of an embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.cuda import CudaKernel
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.movement._bytes import DRAM
from ridgeline.ops.movement._index_add import (
    FILE,
    INT,
    apart,
    countable,
    fault_of,
    few,
    launch_bwd,
    left,
    ordered,
    packs,
    passed,
    slow,
    small,
    unordered,
)
from ridgeline.select import by_kind, eager, run


@kernel_op(
    "index_add_fwd(Tensor x, Tensor index, Tensor source, int dim, float alpha, bool deterministic, str? impl)"
    " -> Tensor"
)
def _forward(
    x: Any, index: Any, source: Any, dim: int, alpha: float, deterministic: bool, impl: str | None
) -> torch.Tensor:
    y = x.new_empty(x.shape)
    if y.numel():
        run(INDEX_ADD, "fwd", impl, (y,), x, dim, index, source, alpha, deterministic)
    return y


@kernel_op("index_add_bwd(Tensor dy, Tensor index, int dim, float alpha, str? impl) -> Tensor")
def _backward(dy: torch.Tensor, index: torch.Tensor, dim: int, alpha: float, impl: str | None) -> torch.Tensor:
    dsource = dy.new_empty((*dy.shape[:dim], index.shape[0], *dy.shape[dim + 1 :]))
    if dsource.numel():
        run(INDEX_ADD, "bwd", impl, (dsource,), dy, dim, index, None, alpha, True)
    return dsource


class _IndexAdd(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, index: Any, source: Any, dim: int, alpha: float, deterministic: bool, impl: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.facts = dim, alpha, impl
        return _forward(x, index, source, dim, alpha, deterministic, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dsource = _backward(dy, *ctx.saved_tensors, *ctx.facts) if ctx.needs_input_grad[2] else None
        return dy if ctx.needs_input_grad[0] else None, None, dsource, None, None, None, None


def reference(
    x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1, deterministic: bool | None = None
) -> torch.Tensor:
    return torch.index_add(x, dim, index, source, alpha=alpha)


@by_kind(3)
def _look(
    x: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    dim: int,
    alpha: float,
    deterministic: bool | None,
    impl: str | None,
) -> tuple[Implementation | None, int]:
    fault = fault_of(x, dim, index, source, alpha, deterministic)
    if fault:
        raise RidgelineError(f"index_add: {fault}")
    return eager(INDEX_ADD, impl, x, dim, index, source, alpha, deterministic), dim % x.dim()


def index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1,
    deterministic: bool | None = None, impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """x with `alpha * source` added to rows `index` of dimension `dim`, as `torch.index_add`. Gradients flow to both.

    x: one or more dimensions, any dtype and strides. index: (n,), int64 or int32; all rows of a repeated index are
    added.
    source: x's dtype, and x's shape with n in dimension `dim`. Sums are in float32, in the order of the source, and
    bitwise reproducible.
    deterministic: False allows faster packed atomics, which add in x's dtype and in any order. They are used for many
    indices and 16-bit dtypes, on GPUs with a larger L2 than an H100.
    Returns a contiguous tensor of x's shape. Values on a GPU are not validated: an index out of range gives NaN in the
    nearest row. On a CPU, or with RIDGELINE_CHECK=1, it raises.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """
    plain, along = _look(x, index, source, dim, alpha, deterministic, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, dim, index, source, alpha=alpha)
    same = deterministic is not False or torch.are_deterministic_algorithms_enabled()
    given = x, index, source, along, float(alpha), same, impl
    if torch.is_grad_enabled() and (x.requires_grad or source.requires_grad):
        return differentiate(_IndexAdd, *given)
    return _forward(*given)


def cost(
    x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1, deterministic: bool | None = None
) -> tuple[Cost, Cost]:
    forward = Cost(nbytes(x, index, source), nbytes(x), 2 * source.numel())
    return forward, Cost(min(nbytes(x), nbytes(source)) + nbytes(index), nbytes(source), source.numel())


def _case(shape: tuple[int, ...], dim: int, n: int, use: str, dtype: str = "int64", **facts: Any) -> Case:
    grad = use == "check"
    source = Spec(*shape[:dim], n, *shape[dim + 1 :], grad=grad)
    name = (
        f"{n} into {'x'.join(map(str, shape))}{f' dim {dim}' if dim else ''}{' alpha' if facts.get('kwargs') else ''}"
    )
    return Case(name, (Spec(*shape, grad=grad), dim, Spec(n, dtype=dtype, high=shape[dim]), source), use=use, **facts)


INDEX_ADD = Op(
    index_add,
    reference=reference,
    cost=cost,
    sharding="x *!dim, index I, source *!dim -> *!dim",
    flops={"index_add_bwd": lambda dy, index, dim, *_: dy.numel() // dy.shape[dim] * index.numel()},
    cases=[
        _case((33, 129), 1, 65, "check"),
        _case((40, 64), 0, 15, "check", kwargs={"alpha": -0.5}),
        _case((9, 300), 0, 1, "check", dtype="int32"),
        _case((5, 7, 24), 1, 1500, "check", dtype="int32"),
        _case((9000,), 0, 2000, "check"),
        _case((300, 72), 0, 1100, "check", kwargs={"alpha": 2.0}),
        _case((2, 1300, 40), 1, 300, "check"),
        _case((5003,), 0, 1024, "check", dtype="int32"),
        _case((3, 5), 0, 0, "check"),
        _case((4096, 256), 0, 32768, "quick"),
        # Counters are read for the first case: in the others the copy dominates. Atomics on halves compile to loops.
        _case((50000, 256), 0, 1 << 20, "bench", dtypes=("float32", "float16")),
        *(
            _case(shape, 0, n, "bench", dtypes=("float32",))
            for n in (15, 1024)
            for shape in ((1 << 25,), (1 << 15, 1 << 10), (1 << 5, 1 << 10, 1 << 10))
            if n == 15 or len(shape) < 3
        ),
    ],
)


# On a GPU, PyTorch's atomics add in any order.
INDEX_ADD.eager("torch", "PyTorch's own: a copy, then atomics", reference, served=True, deterministic=False)
INDEX_ADD.kernel_dtypes |= set(INT)  # of the indices; each rung says which dtypes of x it takes
ATOMICS = "l1tex__t_set_accesses_pipe_lsu_mem_global_op_red.sum"


def _atomic(name: str, idea: str, most: int, **facts: Any) -> None:
    kernel = CudaKernel(FILE, f"index_add_{name}", "PPPqqqqf")
    INDEX_ADD.kernel(f"cuda_{name}", idea, kind="cuda", fwd=partial(unordered, kernel, most), bwd=launch_bwd, **facts)


_atomic("small", "at most 16 indices: each thread loops over them, so nothing needs to be atomic", 8, supports=small)
# The next three add by atomics, whose order, and so rounding, differs between runs.
_atomic(
    "large",
    "one atomic per element of the source, by as many threads as the GPU holds",
    8,
    deterministic=False,
    counter=ATOMICS,
)
_atomic(
    "atomic",
    "one thread per element of the source, as in OneFlow: no loop, more warps resident",
    0,
    deterministic=False,
    gain=1.0,
    counter="sm__warps_active.avg.pct_of_peak_sustained_active",
)
_atomic(
    "packed",
    "16 bytes per atomic (two halves before Hopper): an eighth of the requests",
    0,
    deterministic=False,
    supports=packs,
    served=True,
    unless=slow,
    gain=4.0,
    counter=ATOMICS,
)
_served: dict[str, Any] = {"kind": "cuda", "bwd": launch_bwd, "served": True, "counter": DRAM}
INDEX_ADD.kernel(
    "cuda",
    "no atomics: the threads that own a row find its indices and add in order, in float32",
    fwd=ordered,
    supports=countable,
    unless=left,
    gain=1.5,
    **_served,
)
INDEX_ADD.kernel(
    "cuda_pass",
    "at most 1024 indices: one pass, which searches them while its part of x is loading",
    fwd=passed,
    supports=few,
    unless=apart,
    gain=1.1,
    **_served,
)
