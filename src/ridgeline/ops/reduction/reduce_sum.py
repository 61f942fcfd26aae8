"""reduce_sum: the sum of all elements, or along some dimensions; the classic ladder for learning to write GPU kernels.

    y = sum_i x_i          backward: dx_i = dy

x is read once, so the floor is its bytes over the memory bandwidth. v0 to v8 sum whole tensors: each block sums its
share in shared memory and leaves a part, and a second kernel adds the parts. The tree of additions is fixed, so the
error stays within a few roundings and reruns are bitwise equal.
Source: Mark Harris, Optimizing Parallel Reduction in CUDA, 2007, as CUDA courses teach it, with its last warp made safe
for Volta.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Implementation, Op, RidgelineError, dense_only, nbytes
from ridgeline.ops.reduction._arguments import Positive, left_to_torch, normal, result_dtype, takes_dtypes, tiny
from ridgeline.ops.reduction._sums import best, no_kernel, sum_tiles, takes_whole, teach
from ridgeline.select import by_kind, eager, find, run

INTS = ("int32", "int64", "int16", "int8", "uint8", "bool")


@kernel_op("reduce_sum_fwd(Tensor x, int[] dims, bool keepdim, ScalarType dtype, str? impl) -> Tensor")
def _forward(
    x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, impl: str | None
) -> torch.Tensor:
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    y = x.new_empty(shape, dtype=dtype)
    if not x.numel():
        return y.zero_()
    run(REDUCE_SUM, "fwd", impl, (y,), x, dims, keepdim, dtype)
    return y


class _ReduceSum(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, impl: str | None
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.dims = x.shape, x.dtype, () if keepdim else dims
        return _forward(x, dims, keepdim, dtype, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        for d in ctx.dims:
            dy = dy.unsqueeze(d)
        return dy.to(ctx.dtype).expand(ctx.shape), None, None, None, None


def reference(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.sum(x, dim, keepdim, dtype=dtype)


@by_kind(1)
def _look(
    x: torch.Tensor, dim: Any, dtype: torch.dtype | None, impl: str | None
) -> tuple[Implementation | None, tuple[int, ...], torch.dtype]:
    dims = normal(x, dim, dtype)
    out = result_dtype(x, dtype)
    reason = left_to_torch(x, out)
    if reason:
        dense_only("reduce_sum", [x])
    plain = find(REDUCE_SUM, impl or "torch") if reason else eager(REDUCE_SUM, impl, x, dims)
    if reason and plain is not None and plain.is_kernel:
        raise RidgelineError(f"reduce_sum: impl={impl!r} cannot run this call: {reason}")
    return plain, dims, out


def reduce_sum(
    x: torch.Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """The sum of all elements, or along `dim`, as `torch.sum`. Gradients flow to x.

    x: any shape and strides. dim: a dimension, several, or None for all; keepdim keeps them with size 1. dtype: the
    result's; by default x's, or int64 for integers. Sums are in float32 for floats and in 64 bits for integers,
    whatever the dtype, and bitwise reproducible.
    Raises RidgelineError if `dim` is out of range or repeated, if `keepdim` or `dtype` is invalid, or if `impl` cannot
    run the call.
    """
    if keepdim is not False and keepdim is not True:
        raise RidgelineError(f"reduce_sum: keepdim must be True or False, but is {keepdim!r}")
    plain, dims, out = _look(x, dim, dtype, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, dims, keepdim, dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_ReduceSum, x, dims, keepdim, out, impl)
    return _forward(x, dims, keepdim, out, impl)


def cost(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> tuple[Cost, None]:
    kept = [n for d, n in enumerate(x.shape) if d not in normal(x, dim, dtype)]
    return Cost(nbytes(x), torch.Size(kept).numel() * result_dtype(x, dtype).itemsize, x.numel()), None


def _bench(name: str, *shape: int, dim: Any = None, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Case:
    return Case(name, (Positive(*shape, grad=False), dim), dtypes=dtypes, use="bench")


ALL = (*FLOATS, "int32")
REDUCE_SUM = Op(
    reduce_sum,
    reference=reference,
    cost=cost,
    sharding="x * -> */dim",
    cases=[
        Case("11x3x129", (Positive(11, 3, 129),), dtypes=ALL),
        Case("rows of 33x129", (Positive(33, 129, grad=False), -1), dtypes=(*FLOATS[:2], "int32", "int8", "uint8")),
        Case("rows of 35x130", (Positive(35, 130), -1)),
        Case("1000003", (Positive(1000003),), dtypes=("float32", "bfloat16", "int32")),
        Case("columns of 129x33", (Positive(129, 33), 0), dtypes=ALL),
        Case("middle of 5x70x9", (Positive(5, 70, 9), 1, True), dtypes=ALL),
        Case("ends of 5x70x9", (Positive(5, 70, 9), (0, -1), True), dtypes=ALL),
        Case("5x6x7x8", (Positive(5, 6, 7, 8), (0, 2)), dtypes=ALL),
        Case("3x4x3x4x3", (Positive(3, 4, 3, 4, 3), (0, 2, 4)), dtypes=ALL),
        Case("rows of 3x9000", (Positive(3, 9000), 1)),
        Case("columns of 9000x3", (Positive(9000, 3), 0)),
        Case("to float32", (Positive(33, 129), 1, False, torch.float32), dtypes=("float16", "bfloat16")),
        Case("to int32", (Positive(4097), None, False, torch.int32), dtypes=("int32",)),
        Case("one", (Positive(1),), dtypes=ALL),
        Case("a number", (Positive(),), dtypes=ALL),
        Case("nothing", (Positive(0),), dtypes=ALL),
        Case("no rows", (Positive(0, 3), 0), dtypes=ALL),
        Case("4 Mi", (Positive(1 << 22, grad=False),), dtypes=("float32", "int32"), use="quick"),
        _bench("32 Mi", 1 << 25, dtypes=("float32",)),
        _bench("2^30", 1 << 30, dtypes=("int32",)),
        _bench("rows of 16384x16384", 16384, 16384, dim=1),
        _bench("columns of 16384x16384", 16384, 16384, dim=0),
        _bench("middle of 64x4096x1024", 64, 4096, 1024, dim=1),
    ],
)

idea = "PyTorch's own: four loads in flight per thread; the last block adds the blocks' sums"
REDUCE_SUM.eager("torch", idea, reference, served=True)
REDUCE_SUM.compiled("torch.compile's: two Triton kernels, sums of blocks and their sum")


def _rung(name: str, idea: str, fwd: Any, supports: Any, dtypes: tuple[str, ...], **facts: Any) -> None:
    facts = {"kind": "cuda", "supports": supports, "dtypes": dtypes, **facts}
    REDUCE_SUM.kernel(name, idea, fwd=fwd, bwd=no_kernel, **facts)


ISSUED, STALLED = "smsp__inst_executed.sum", "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
LANES = "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio"
BANKS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
SHARED, LOADS = "smsp__inst_executed_pipe_lsu.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
for name, each, blocks, gain, counter, idea in (
    ("v0", 1, 0, 0.0, LANES, "a tree in shared memory; a remainder picks every 2nd, 4th, ... thread; one element each"),
    ("v1", 1, 0, 2.0, LANES, "the same tree by the first threads: whole warps idle, but banks conflict"),
    ("v2", 1, 0, 1.1, BANKS, "the upper half added to the lower: no bank conflicts"),
    ("v3", 2, 0, 1.8, ISSUED, "the first addition while loading: half the blocks, no thread that only loads"),
    ("v4", 2, 0, 1.3, STALLED, "the last warp alone, without block barriers"),
    ("v5", 2, 0, 1.05, ISSUED, "all steps unrolled: no loop and no tests known at compile time"),
    ("v6", 1, 1024, 1.3, DRAM, "1024 blocks that loop over the tensor: one tree for many elements"),
    ("v7", 1, 1024, 1.03, SHARED, "warp shuffles: one slot of shared memory per warp"),
    ("v8", 4, -8, 1.02, LOADS, "16-byte loads, and as many blocks as the GPU holds at once"),
):
    fits = partial(takes_whole, packs=name == "v8")
    _rung(name, idea, partial(teach, name, each, blocks), fits, ("float32", "int32"), gain=gain, counter=counter)
idea = "any strides and dimensions, by tiles; each thread adds what it loads first; few sums are split"
_rung("triton", idea, sum_tiles, takes_dtypes, (*FLOATS, *INTS), kind="triton", served=True, unless=tiny)
idea = "short blocks scheduled dynamically, two 16-byte loads in flight; the final sum starts early"
_rung("cuda_best", idea, best, takes_whole, ALL, served=True, unless=tiny, gain=1.04, counter=DRAM)
