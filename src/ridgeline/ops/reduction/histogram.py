"""histogram: how many elements of x lie in each of `bins` equal parts of a range.

    count_b = #{ x : low <= x <= high,  floor((x - low) bins / (high - low)) = b },   high itself in the last bin

A block counts in shared memory and adds its counts to memory at the end, so the traffic is one read of x. Counts are
exact: elements whose bin float32 cannot decide, near an edge, are decided in float64.
Source: Podlozhnyuk, Histogram calculation in CUDA, 2007, for copies of the counts that keep threads apart.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import kernel_op, launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.reduction._arguments import INTEGERS, KINDS
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("histogram.cu")
_GLOBAL, _SHARED = (CudaKernel(FILE, f"histogram_{name}", "PPPPqidd") for name in ("global", "shared"))
_CLEAR = CudaKernel(FILE, "histogram_clear", "Pq")
MOST = 1 << 24  # bins that float32 can tell apart
THREADS = 512  # of a block that counts in shared memory; two blocks fit a multiprocessor
ROOM = 1 << 14  # counts in a block's shared memory, over all copies, so that two blocks fit


def _copies(bins: int) -> int:
    """Copies of the counts in shared memory: up to one per lane of a warp, as room allows."""
    return min(32, 1 << (max(1, ROOM // bins).bit_length() - 1))


def _room(x: torch.Tensor) -> int:
    """Bytes of a block's shared memory that may hold counts."""
    return device.of(x).shared_memory - 1024


def _launch(
    shared: bool, most: int, packed: bool, counts: Any, x: Any, bins: int, least: Any, greatest: Any, *ends: float
) -> None:
    x = x.contiguous()
    pack = 16 // x.element_size() if packed and x.data_ptr() % 16 == 0 else 1
    macros = {"XTYPE": KINDS[x.dtype], "FLOATING": int(x.is_floating_point()), "PACK": pack}
    macros |= {"COPIES": min(most, _copies(bins))}
    macros |= {"LOADS": {1: 1, 8: 2, 16: 1}.get(pack, 4), "THREADS": THREADS}
    launch(_CLEAR, (-(-bins // 256),), counts, bins, **macros)
    size = 4 * (bins + 1) * macros["COPIES"]
    where = device.of(x)
    values = counts, x, least, greatest, x.numel(), bins, *ends
    if not shared or size > _room(x):
        launch(_GLOBAL, (min(-(-x.numel() // 256), 8 * where.multiprocessors),), *values, block=256, **macros)
        return
    blocks = min(-(-x.numel() // (THREADS * pack)), max(1, min(2, where.shared_memory // size)) * where.multiprocessors)
    launch(_SHARED, (blocks,), *values, block=THREADS, shared=size, **macros)


@kernel_op(
    "histogram_fwd(Tensor x, int bins, Tensor? least, Tensor? greatest, float low, float high, str? impl) -> Tensor"
)
def _forward(x: Any, bins: int, least: Any, greatest: Any, low: float, high: float, impl: str | None) -> torch.Tensor:
    counts = torch.empty(bins, dtype=torch.int64, device=x.device)
    run(HISTOGRAM, "fwd", impl, (counts,), x, bins, least, greatest, low, high)
    return counts


def reference(x: torch.Tensor, bins: int, range: tuple[float, float] | None = None) -> torch.Tensor:
    if not x.numel():
        return torch.zeros(bins, dtype=torch.int64, device=x.device)
    v = x.detach().reshape(-1).double()
    low, high = (torch.tensor(end, dtype=v.dtype, device=v.device) for end in range) if range else v.aminmax()
    low, high = low - (low == high).double(), high + (low == high).double()
    part = ((v - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    inside = (v >= low) & (v <= high) & (part >= 0)
    return torch.histc(torch.where(inside, part + 0.5, -1.0), bins, 0, bins).long()


def histogram(
    x: torch.Tensor, bins: int, range: tuple[float, float] | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """How many elements of x lie in each of `bins` equal parts of `range`, like `torch.histc`, but exact and in int64.

    x: any shape and strides, integers or floating point. bins: 1 or more. range: (low, high), both included; None means
    x's extremes, widened by one on both sides if they are equal. Elements outside, and NaN, are not counted. Bins are
    decided as float64 arithmetic does.
    Without a range x must be finite; that is checked on a CPU, or with RIDGELINE_CHECK=1.
    Returns (bins,), int64. It has no gradients.
    Raises RidgelineError if x, bins or range is invalid, or if `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.is_complex() or x.dtype == torch.bool:
        given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"histogram: x must be a tensor of integers or floating-point numbers, but is {given}")
    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins < 1 << 31:
        raise RidgelineError(f"histogram: bins must be an int of at least 1, but is {bins!r}")
    if range is not None and not _is_range(range):
        wanted = "None or (low, high), both finite, with low below high"
        raise RidgelineError(f"histogram: range must be {wanted}, but is {range!r}")
    if range is None and readable(x) and x.is_floating_point() and not x.isfinite().all():
        raise RidgelineError("histogram: x must be finite if no range is given, but holds NaN or infinities")
    plain = eager(HISTOGRAM, impl, x, bins, range)
    if plain is not None and plain.call is not None:
        return plain.call(x, bins, range)
    if not x.numel():
        return reference(x, bins, range)
    least, greatest = (None, None) if range else x.detach().aminmax()
    low, high = range or (0.0, 0.0)
    return _forward(x.detach(), bins, least, greatest, float(low), float(high), impl)


def _is_range(given: Any) -> bool:
    pair = isinstance(given, tuple | list) and len(given) == 2 and all([isinstance(end, int | float) for end in given])
    return pair and all([abs(end) <= sys.float_info.max for end in given]) and given[0] < given[1]


def cost(x: torch.Tensor, bins: int, range: tuple[float, float] | None = None) -> tuple[Cost, None]:
    return Cost(nbytes(x) * (1 if range else 2), 8 * bins, 4 * x.numel()), None


def _whole(n: int, high: int) -> Spec:
    return Spec(n, dtype="int32", high=high)


MANY, WIDE = 1 << 28, 1 << 20
HISTOGRAM = Op(
    histogram,
    reference=reference,
    cost=cost,
    sharding=lambda range=None, **_: None if range is None else "x * -> ",
    cases=[
        Case("33x129 into 10", (Spec(33, 129, grad=False), 10)),
        Case("33x129 into 256 of -2 to 3", (Spec(33, 129, grad=False), 256, (-2.0, 3.0))),
        Case("100003 into 64", (Spec(100003, grad=False), 64, (-1.0, 1.0))),
        Case("5000 into 1", (Spec(5000, grad=False), 1)),
        Case("5000 into 20000", (Spec(5000, grad=False), 20000, (-3, 3))),
        Case("5000 into 100000", (Spec(5000, grad=False), 100000, (-3, 3))),
        Case("one", (Spec(1, grad=False), 7)),
        Case("none", (Spec(0, grad=False), 7)),
        Case("40000 int32 into 256", (_whole(40000, 1000), 256), dtypes=("int32",)),
        Case("40001 uint8 into 256", (Spec(40001, dtype="uint8", high=255), 256, (0, 256)), dtypes=("uint8",)),
        Case("4 Mi into 256", (Spec(1 << 22, grad=False), 256, (-4.0, 4.0)), use="quick"),
        Case(
            "256 Mi into 256", (Spec(MANY, grad=False), 256, (-4.0, 4.0)), dtypes=("float32", "bfloat16"), use="bench"
        ),
        Case("256 Mi int32 into 256", (_whole(MANY, WIDE), 256, (0, WIDE)), dtypes=("int32",), use="bench"),
    ],
)

HISTOGRAM.eager("torch", "torch.histc of bins computed in float64: exact, in many passes", reference, served=True)


def _supports(copies: int, x: torch.Tensor, bins: int, *_: Any) -> str | None:
    """copies: the fewest copies of the counts in a block's shared memory; 0 if counts may also lie in global memory."""
    if bins > MOST:
        return f"it takes at most {MOST} bins, which float32 can tell apart, but bins is {bins}"
    if copies and (4 * bins + 4 > _room(x) or _copies(bins) < copies):
        return f"it counts in shared memory, which has no room for {'copies of ' * (copies > 1)}{bins} bins"
    return None


def _unless(x: torch.Tensor, bins: int, *_: Any) -> str | None:
    return "the kernels find bins in float32, which cannot tell so many apart" if bins > MOST else None


def _rung(name: str, idea: str, shared: bool, most: int, packed: bool, **facts: Any) -> None:
    start = partial(_launch, shared, most, packed)
    fits = partial(_supports, 0 if packed or not shared else min(most, 2))
    HISTOGRAM.kernel(name, idea, kind="cuda", fwd=start, supports=fits, dtypes=(*FLOATS, *INTEGERS), **facts)


REQUESTS = "l1tex__t_set_accesses_pipe_lsu_mem_global_op_red.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
_rung("cuda_global", "one global atomic per element: all hit few addresses", False, 1, False, counter=REQUESTS)
idea = "a block counts in shared memory, then adds to global memory once"
_rung("cuda_shared", idea, True, 1, False, gain=4.0, counter=REQUESTS)
idea = "one copy of the counts per lane, in its own bank: a warp's lanes never collide"
_rung("cuda_copies", idea, True, 32, False, gain=1.5, counter=CONFLICTS)
idea = "16-byte loads, up to four in flight per thread; as many copies as there is room for"
_rung("cuda", idea, True, 32, True, served=True, unless=_unless, gain=1.5, counter=DRAM)
