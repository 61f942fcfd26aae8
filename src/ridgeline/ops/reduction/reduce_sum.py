"""reduce_sum: the sum of all elements, or along some dimensions; the ladder on which one learns to write for a GPU.

    y = sum_i x_i          backward: dx_i = dy

x is read once, and nothing else takes time: the floor is its bytes over the bandwidth of memory. v0 to v8 take sums of a whole tensor:
each block adds up its share in shared memory and leaves a part, and a second kernel adds up the parts. A tree of sums, and the same one
each time: so the error stays that of a few roundings, and reruns are equal bit for bit.
Source: Mark Harris, Optimizing Parallel Reduction in CUDA, 2007, as a course on CUDA teaches it, its last warp made safe for Volta.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, nbytes
from ridgeline.ops.reduction._layout import groups, left_to_torch, normal, result_dtype, side_by_side
from ridgeline.ops.reduction._sums import CTYPES, Parts, Positive, Rule, across, add_up, ceil, no_kernel, parts_like
from ridgeline.select import eager, find, run

INTS = ("int32", "int64", "int16", "int8", "uint8", "bool")
FILE = Path(__file__).with_name("reduce_sum.cu")


@triton.jit
def _fwd(y, parts, x, A, R, steps, size, x_outer, x_a, x_far, x_r, y_outer, y_a, BA: tl.constexpr, BR: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    """A tile is BA sums and BR elements of each; where they lie side by side comes last. FEW elements, which one thread has loaded, are
    added before all else, and RUN tiles by themselves."""
    tiles = tl.cdiv(A, BA)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    a = (tl.program_id(0) % tiles).to(tl.int64) * BA + tl.arange(0, BA)
    r = tl.arange(0, BR)
    a, r = (a[:, None], r[None, :]) if ROWS else (a[None, :], r[:, None])
    x += outer * x_outer + a * x_a
    wide: tl.constexpr = tl.float32 if x.dtype.element_ty.is_floating() else tl.int64
    blocks = tl.cdiv(R, BR)
    length = tl.cdiv(steps, tl.num_programs(1))
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, steps)
    total = tl.zeros((BA, BR // FEW) if ROWS else (BR // FEW, BA), wide)
    for some in range(begin, end, RUN):
        part = tl.zeros((BA, BR // FEW) if ROWS else (BR // FEW, BA), wide)
        for step in range(some, tl.minimum(some + RUN, end)):
            at = (step % blocks).to(tl.int64) * BR + r
            far = (step // blocks).to(tl.int64) * x_far
            found = tl.load(x + far + at * x_r, mask=(a < A) & (at < R), other=0).to(wide)
            if ROWS:
                part += tl.sum(tl.reshape(found, (BA, BR // FEW, FEW)), 2)
            else:
                part += tl.sum(tl.reshape(found, (FEW, BR // FEW, BA)), 0)
        total += part
    place = outer * y_outer + a * y_a
    sums = across(total, min(16, BR // FEW), ROWS)
    if SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * size + place, sums, mask=a < A)
    else:
        tl.store(y + place, sums.to(y.dtype.element_ty), mask=a < A)


def _launch(y: torch.Tensor, x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> None:
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    x, (outer, x_outer, y_outer), (A, x_a, y_a), (far, x_far), (R, x_r) = groups(x, dims)
    pack = 16 // x.element_size()
    rows = A == 1 or x_r <= x_a
    most = min(2048 * pack, 16384)  # elements of a tile: 128 bytes a thread
    fast = min(triton.next_power_of_2(R if rows else A), most if rows else 64 * pack)
    slow = min(triton.next_power_of_2(A if rows else R), most // fast)
    BA, BR = (slow, fast) if rows else (fast, slow)
    warps = max(1, min(8, BA * BR // 1024))
    if rows:  # neighbours that are loaded at once
        few = pack if x_r == 1 and all([s % pack == 0 for s in (x_outer, x_a, x_far)]) else 1
    else:  # rows of the tile that a thread comes to
        few = max(1, BA * BR // (32 * warps * pack))
    programs, steps = outer * ceil(A, BA), far * ceil(R, BR)
    splits = max(1, min(8 * device.of(x).multiprocessors // programs, steps, (1 << 22) // y.numel()))
    parts = parts_like(x, splits if splits > 1 else 0, y.numel())
    facts = {"BA": BA, "BR": BR, "FEW": min(few, BR), "ROWS": rows, "SPLIT": splits > 1, "RUN": 16, "num_warps": warps}
    launch(_fwd, (programs, splits), y, parts, x, A, R, steps, y.numel(), x_outer, x_a, x_far, x_r, y_outer, y_a, **facts)
    if splits > 1:
        add_up(y, parts)


@kernel_op("reduce_sum_fwd(Tensor x, int[] dims, bool keepdim, ScalarType dtype, str? impl) -> Tensor")
def _forward(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    y = x.new_empty(shape, dtype=dtype)
    if not x.numel():
        return y.zero_()
    run(REDUCE_SUM, "fwd", impl, (y,), x, dims, keepdim, dtype)
    return y


class _ReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.dims = x.shape, x.dtype, () if keepdim else dims
        return _forward(x, dims, keepdim, dtype, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        for d in ctx.dims:
            dy = dy.unsqueeze(d)
        return dy.to(ctx.dtype).expand(ctx.shape), None, None, None, None


def reference(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.sum(x, dim, keepdim, dtype=dtype)


def reduce_sum(
    x: torch.Tensor,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """The sum of all elements, or along `dim`, as `torch.sum`. Gradients flow to x.

    x: any shape and strides. dim: a dimension, several, or None for all of them; keepdim leaves them with one element each. dtype: the
    result's; by default x's, and int64 of whole numbers. Sums are in float32, of whole numbers in 64 bits, whatever the dtype; the
    same bits every time.
    Raises RidgelineError on a `dim` that x has not or has twice, a `dtype` that is none, or an `impl` that cannot run the call.
    """
    dims = normal(x, dim, dtype)
    out = result_dtype(x, dtype)
    if reason := left_to_torch(x, out):
        rung = find(REDUCE_SUM, impl or "torch")
        if rung.call is None:
            raise RidgelineError(f"reduce_sum: impl={impl!r} cannot run this call: {reason}")
        return rung.call(x, dims, keepdim, dtype)
    plain = eager(REDUCE_SUM, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x, dims, keepdim, dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_ReduceSum, x, dims, keepdim, out, impl)
    return _forward(x, dims, keepdim, out, impl)


def cost(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> tuple[Cost, None]:
    kept = [n for d, n in enumerate(x.shape) if d not in normal(x, dim, dtype)]
    return Cost(nbytes(x), torch.Size(kept).numel() * result_dtype(x, dtype).itemsize, x.numel()), None


def _bench(name: str, *shape: int, dim: Any = None, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Case:
    return Case(name, (Positive(*shape, grad=False), dim), dtypes=dtypes, use="bench")


ALL = (*FLOATS, "int32")
REDUCE_SUM = Op(
    reduce_sum,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Positive(33, 129),), dtypes=ALL),
        Case("rows of 33x129", (Positive(33, 129), -1), dtypes=(*ALL, "int8", "uint8")),
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

REDUCE_SUM.eager(
    "torch", "PyTorch's own: four loads a thread on their way, partial sums by blocks, the last block adds them", reference, served=True
)
REDUCE_SUM.compiled("torch.compile's: two Triton kernels, sums of blocks and the sum of these")


def _whole(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, packs: bool = False) -> str | None:
    """Why a rung that sums whole tensors does not take a call, or None."""
    if x.dim() > len(normal(x, dim, dtype)):
        return f"it sums all of a tensor, and is asked for dimension {dim} of {x.dim()}"
    if result_dtype(x, dtype) not in CTYPES:
        return f"it leaves a sum in {', '.join(str(d)[6:] for d in CTYPES)}, and {dtype} is wanted"
    if not side_by_side(x):
        return f"it takes elements that lie side by side, and the strides are {tuple(x.stride())}"
    if packs and x.data_ptr() % 16:
        return f"its packs begin at multiples of 16 bytes, and x begins {x.data_ptr() % 16} beyond"
    return None


def _teach(kernel: CudaKernel, each: int, blocks: int, y: torch.Tensor, x: torch.Tensor, *_: Any) -> None:
    """THREADS * each elements a block, or so many blocks (negative: so many a multiprocessor) that go over all of them."""
    count = ceil(x.numel(), 256 * each)
    if blocks:
        count = min(count, blocks if blocks > 0 else -blocks * device.of(x).multiprocessors)
    facts: dict[str, Any] = {"DTYPE": CTYPES[x.dtype], "YTYPE": CTYPES[y.dtype], "LOADS": 1, "PDL": 0}
    parts = parts_like(x, count, dtype=x.dtype)
    launch(kernel, (count,), parts, x, x.numel(), **facts, THREADS=256, block=256)
    if count > 1 << 18:  # for one block that would be work
        each = ceil(count, 1024)
        count, parts, many = ceil(count, each), parts_like(x, ceil(count, each), dtype=x.dtype), parts
        launch(_FEW, (count,), parts, many, many.numel(), each, **facts, THREADS=256, block=256)
    launch(_ADD, (1,), y, parts, count, **facts, THREADS=1024, block=1024)


_FEW, _ADD, _BEST = CudaKernel(FILE, "few", "PPii"), CudaKernel(FILE, "add", "PPi"), Parts(FILE, "best", "best_add", 1)
BANKS, STALLED = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "smsp__inst_executed.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
THREADS = "smsp__thread_inst_executed_per_inst_executed.ratio"
for name, each, blocks, gain, counter, idea in (
    ("v0", 1, 0, 0.0, THREADS, "a tree in shared memory, by every second, fourth, ... thread, found by a remainder: one element a thread"),
    ("v1", 1, 0, 2.0, THREADS, "the same tree by the first threads: whole warps rest, no remainder; strided addresses conflict in banks"),
    ("v2", 1, 0, 1.1, BANKS, "the upper half added to the lower: neighbours in neighbouring banks"),
    ("v3", 2, 0, 1.8, STALLED, "the first addition while loading: half as many blocks, no thread that only loads"),
    ("v4", 2, 0, 1.3, "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "the last warp alone, without barriers of the block"),
    ("v5", 2, 0, 1.05, STALLED, "all steps written out: no loop, no test that is known beforehand"),
    ("v6", 1, 1024, 1.3, DRAM, "1024 blocks that go over the whole tensor: one tree for many elements"),
    ("v7", 1, 1024, 1.03, "smsp__inst_executed_pipe_lsu.sum", "sums handed from register to register in a warp, one slot of shared memory a warp"),
    ("v8", 4, -8, 1.02, "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "16-byte loads, and as many blocks as the GPU holds at once"),
):  # fmt: skip
    REDUCE_SUM.kernel(
        name,
        idea,
        kind="cuda",
        fwd=partial(_teach, CudaKernel(FILE, name, "PPq"), each, blocks),
        bwd=no_kernel,
        supports=partial(_whole, packs=name == "v8"),
        dtypes=("float32", "int32"),
        gain=gain,
        counter=counter,
    )

RULE: Rule = {"THREADS": 256, "LOADS": 8, "BLOCKS": 128}


def _best(y: torch.Tensor, x: torch.Tensor, *_: Any, rule: Rule = RULE) -> None:
    _BEST.start(rule, y, x)


def _fits(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> str | None:
    return left_to_torch(x, result_dtype(x, dtype))


REDUCE_SUM.kernel(
    "triton",
    "any strides and dimensions: tiles of sums and their elements, parts where sums are few, tiles added up by sixteens",
    kind="triton",
    fwd=_launch,
    bwd=no_kernel,
    supports=_fits,
    dtypes=(*FLOATS, *INTS),
    served=True,
)
REDUCE_SUM.kernel(
    "cuda_best",
    "short blocks, handed out as multiprocessors become free, eight 16-byte loads a thread on their way; the sum of parts starts early",
    kind="cuda",
    fwd=_best,
    bwd=no_kernel,
    supports=_whole,
    dtypes=(*FLOATS, "int32"),
    served=True,
    gain=1.1,
    counter=DRAM,
)
