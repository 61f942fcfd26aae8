"""histogram: how many elements of x lie in each of `bins` equal parts of a range.

    count_b = #{ x : low <= x <= high,  floor((x - low) bins / (high - low)) = b },   high itself in the last bin

A block counts in its shared memory and adds up in the end, so that memory sees a read of x and little else. Counts are exact: what float32
finds next to an edge is looked at again in float64.
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
from ridgeline.ops.reduction._kinds import KINDS, WHOLE
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("histogram.cu")
_GLOBAL, _SHARED = (CudaKernel(FILE, f"histogram_{name}", "PPPPqidd") for name in ("global", "shared"))
_CLEAR = CudaKernel(FILE, "histogram_clear", "Pq")
MOST = 1 << 24  # bins that float32 tells apart
THREADS = 512  # of a block that counts in shared memory, two a multiprocessor
ROOM = 1 << 14  # counts in a block's shared memory, all copies together, beside another block's


def _copies(bins: int) -> int:
    """Copies of the counts in shared memory: one for each lane of a warp, while there is room."""
    return min(32, 1 << (max(1, ROOM // bins).bit_length() - 1))


def _room(x: torch.Tensor) -> int:
    """Bytes of a block's shared memory for counts."""
    return device.of(x).shared_memory - 1024


def _launch(
    shared: bool,
    most: int,
    packed: bool,
    counts: Any,
    x: Any,
    bins: int,
    least: Any,
    greatest: Any,
    low: float,
    high: float,
) -> None:
    x = x.contiguous()
    pack = 16 // x.element_size() if packed and x.data_ptr() % 16 == 0 else 1
    macros = {
        "XTYPE": KINDS[x.dtype],
        "FLOATING": int(x.is_floating_point()),
        "PACK": pack,
        "COPIES": min(most, _copies(bins)),
    }
    macros |= {"LOADS": {1: 1, 8: 2, 16: 1}.get(pack, 4), "THREADS": THREADS}
    launch(_CLEAR, (-(-bins // 256),), counts, bins, **macros)
    size = 4 * (bins + 1) * macros["COPIES"]
    where = device.of(x)
    values = counts, x, least, greatest, x.numel(), bins, low, high
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
    """How many elements of x lie in each of `bins` equal parts of `range`, as `torch.histc` counts, but in int64 and exactly.

    x: any shape and strides, integers or floating point. bins: 1 or more. range: (low, high), or None for x's least and greatest, and one
    below and above where these are the same. What lies outside, and NaN, counts nowhere; `high` counts in the last bin. An element's
    bin is what float64 says. Without a range x must be finite: else it raises on a CPU, and everywhere with RIDGELINE_CHECK=1.
    Returns (bins,) in int64. No gradients flow. Raises RidgelineError on other bins or ranges, or an `impl` that cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.is_complex() or x.dtype == torch.bool:
        given = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"histogram: x must be a tensor of integers or floating-point numbers, and is {given}")
    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins < 1 << 31:
        raise RidgelineError(f"histogram: bins must be an int of 1 or more, and is {bins!r}")
    if range is not None and not _is_range(range):
        raise RidgelineError(
            f"histogram: range must be None or (low, high), finite and low below high, and is {range!r}"
        )
    if range is None and readable(x) and x.is_floating_point() and not x.isfinite().all():
        raise RidgelineError("histogram: x must be finite where no range is given, and holds NaN or infinities")
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


MANY = 1 << 28
HISTOGRAM = Op(
    histogram,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129 into 10", (Spec(33, 129, grad=False), 10)),
        Case("33x129 into 256 of -2 to 3", (Spec(33, 129, grad=False), 256, (-2.0, 3.0))),
        Case("100003 into 64", (Spec(100003, grad=False), 64, (-1.0, 1.0))),
        Case("5000 into 1", (Spec(5000, grad=False), 1)),
        Case("5000 into 20000", (Spec(5000, grad=False), 20000, (-3, 3))),
        Case("5000 into 100000", (Spec(5000, grad=False), 100000, (-3, 3))),
        Case("one", (Spec(1, grad=False), 7)),
        Case("none", (Spec(0, grad=False), 7)),
        Case("40000 int32 into 256", (Spec(40000, dtype="int32", high=1000), 256), dtypes=("int32",)),
        Case("40001 uint8 into 256", (Spec(40001, dtype="uint8", high=255), 256, (0, 256)), dtypes=("uint8",)),
        Case("4 Mi into 256", (Spec(1 << 22, grad=False), 256, (-4.0, 4.0)), use="quick"),
        Case(
            "256 Mi into 256", (Spec(MANY, grad=False), 256, (-4.0, 4.0)), dtypes=("float32", "bfloat16"), use="bench"
        ),
        Case(
            "256 Mi int32 into 256",
            (Spec(MANY, dtype="int32", high=1 << 20), 256, (0, 1 << 20)),
            dtypes=("int32",),
            use="bench",
        ),
    ],
)

HISTOGRAM.eager("torch", "torch.histc of each element's bin in float64: exact, in many passes", reference, served=True)


def _supports(copies: int, x: torch.Tensor, bins: int, *_: Any) -> str | None:
    """copies: 0 for counts that may lie anywhere; else in a block's shared memory, as many times at least."""
    if bins > MOST:
        return f"it takes {MOST} bins at most, which float32 tells apart, and {bins} are asked for"
    if copies and (4 * bins + 4 > _room(x) or _copies(bins) < copies):
        return f"it counts in shared memory, where {bins} bins have no room{' for copies' if copies > 1 else ''}"
    return None


def _unless(x: torch.Tensor, bins: int, *_: Any) -> str | None:
    return "float32, in which the kernels find bins, does not tell so many apart" if bins > MOST else None


def _rung(name: str, idea: str, shared: bool, most: int, packed: bool, **facts: Any) -> None:
    start, fits = (
        partial(_launch, shared, most, packed),
        partial(_supports, 0 if packed or not shared else min(most, 2)),
    )
    HISTOGRAM.kernel(name, idea, kind="cuda", fwd=start, supports=fits, dtypes=(*FLOATS, *WHOLE), **facts)


REQUESTS = "l1tex__t_set_accesses_pipe_lsu_mem_global_op_red.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
_rung(
    "cuda_global", "an atomic on memory for each element: all meet at few addresses", False, 1, False, counter=REQUESTS
)
_rung(
    "cuda_shared",
    "a block counts in shared memory, and adds up to memory once",
    True,
    1,
    False,
    gain=4.0,
    counter=REQUESTS,
)
_rung(
    "cuda_copies",
    "a copy of the counts for each lane, in its own bank: a warp's lanes never meet",
    True,
    32,
    False,
    gain=1.5,
    counter=CONFLICTS,
)
_rung(
    "cuda",
    "16-byte loads, four of a thread on their way (of halves two, of bytes one); copies while there is room",
    True,
    32,
    True,
    served=True,
    unless=_unless,
    gain=1.5,
    counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
