"""The launchers of index_add: copies and atomics, or every place of y by one thread; what its rungs take, and what is wrong with a call."""

from __future__ import annotations

import math
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import readable
from ridgeline.ops.movement._bytes import copied

FILE = Path(__file__).with_name("index_add.cu")
_BWD = CudaKernel(FILE, "index_add_bwd", "PPPqqqqf")
_FEW, _PASS = CudaKernel(FILE, "index_add_few", "PPPPqqqqf"), CudaKernel(FILE, "index_add_pass", "PPPPqqqqf")
_COPY, _SORTED = CudaKernel(FILE, "index_add_copy", "PPPPqqq"), CudaKernel(FILE, "index_add_sorted", "PPPPqqqqf")
_STARTS, _SEGMENTS = CudaKernel(FILE, "index_add_starts", "PPqq"), CudaKernel(FILE, "index_add_segments", "PPPPPPqqqqf")
FEW = 1024  # indices that a block looks through or sorts; more are torch's to sort
# Of a block of index_add_pass: loads of x and elements of source rows that a thread has on their way, and threads at most.
LOADS, AHEAD, THREADS = 4, 8, 256
_PLAIN = {"ROWS": 1, "LANES": 32, "BATCH": 8, "OTYPE": "int", "COPY": 1, "LOADS": 1, "THREADS": 256}
INT = {torch.int32: "int", torch.int64: "long long"}


def _facts(
    y: torch.Tensor, dim: int, index: torch.Tensor, *others: torch.Tensor
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The sizes (outer, size, n, inner) that y and a source have around `dim`, and the macros: packs of 16 bytes where all lie at such."""
    inner, pack = math.prod(y.shape[dim + 1 :]), 16 // y.element_size()
    whole = inner % pack == 0 and not any([t.data_ptr() % 16 for t in (y, *others)])
    macros = {"DTYPE": CTYPE[y.dtype], "ITYPE": INT[index.dtype], "PACK": pack if whole else 1}
    return (math.prod(y.shape[:dim]), y.shape[dim], index.shape[0], inner), macros | _PLAIN


def _blocks(threads: int, block: int = 256) -> tuple[int]:
    return (min(-(-threads // block), (1 << 31) - 1),)


def unordered(
    kernel: CudaKernel, most: int, y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool
) -> None:
    """The copy, then a kernel that adds to it. most: blocks a multiprocessor, of a grid that walks; 0 for as many as there is work."""
    index, source = index.contiguous(), source.contiguous()
    sizes, macros = _facts(y, dim, index, source)
    copied(y, x)
    count = y.numel() // max(1, sizes[1]) if kernel.name.endswith("small") else source.numel()
    blocks = _blocks(count // (macros["PACK"] if kernel.name.endswith("packed") else 1), 128)[0]
    blocks = min(blocks, most * device.of(y).multiprocessors) if most else blocks
    launch(kernel, (blocks,), y, index, source, *sizes, alpha, block=128, **macros)


def _given(y: Any, x: Any, dim: int, index: Any, source: Any) -> tuple[Any, Any, Any, tuple[int, ...], dict[str, Any]]:
    """x, index and source as kernels take them, the sizes, and the macros."""
    index, source = index.contiguous(), source.contiguous()
    if not x.is_contiguous():
        y.copy_(x)
        x = y  # a thread reads what it then writes
    return x, index, source, *_facts(y, dim, index, x, source)


def passed(y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool) -> None:
    """The copy and the sums in one kernel, whose blocks have the same part of every slice."""
    x, index, source, sizes, macros = _given(y, x, dim, index, source)
    (outer, size, _, inner), pack = sizes, 16 // y.element_size()
    part = size * inner
    copy = pack if x.data_ptr() % 16 == 0 and (outer == 1 or part % pack == 0) else 1
    loads = LOADS if y.numel() > 2048 * copy * device.of(y).multiprocessors else 1  # small ones: more blocks
    threads = min(THREADS, max(32, 1 << (-(-part // (copy * loads)) - 1).bit_length()))
    macros |= {"COPY": copy, "LOADS": loads, "THREADS": threads, "BATCH": min(4, AHEAD // macros["PACK"])}
    grid = -(-part // (threads * loads * copy)), min(outer, 65535)
    launch(_PASS, grid, y, x, index, source, *sizes, alpha, block=threads, **macros)


def ordered(y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool) -> None:
    """Every place of y by one thread. Rows that no index names are copied by the same kernel, or where they are most by one before; of few
    indices that one has the order as well, and the rows that they name are made while it still runs."""
    x, index, source, sizes, macros = _given(y, x, dim, index, source)
    outer, size, n, inner = sizes
    rows = size <= 4 * n or _apart(n, inner, y)
    packs = inner // macros["PACK"]
    if n <= FEW and rows:
        launch(
            _FEW, _blocks(outer * size * -(-packs // 128) * 32), y, x, index, source, *sizes, alpha, block=256, **macros
        )
        return
    macros["LANES"] = lanes = min(32, 1 << (max(1, packs) - 1).bit_length())
    threads = outer * (size if rows else n) * -(-packs // lanes) * lanes
    if n <= FEW:
        copy = 16 // y.element_size() if x.data_ptr() % 16 == 0 else 1
        order, after = torch.empty((n, 4), dtype=torch.int32, device=y.device), early(device.of(y))
        blocks = 1 if x is y else 1 + _blocks(-(-y.numel() // copy))[0]
        own = macros | {
            "PACK": 1,
            "LANES": 32,
            "COPY": copy,
            "PDL": after["PDL"],
        }  # what it does not use is the same in all calls
        launch(_COPY, (blocks,), y, x, index, order, y.numel(), size, n, block=256, **own)
        launch(_SORTED, _blocks(threads), y, x, order, source, *sizes, alpha, block=256, **macros, **after)
        return
    if not rows and x is not y:
        copied(y, x)
    if size < (1 << 31) - 1:  # half the passes; what is out of range stays so
        index, macros["ITYPE"] = index.clamp(-1, size).to(torch.int32), "int"
    sorted_, order = torch.sort(index, stable=True)
    starts = torch.empty(size + 1 if rows else 0, dtype=torch.int32, device=y.device)
    if rows:
        launch(_STARTS, _blocks(size + 1), starts, sorted_, size, n, block=256, **macros)
    macros |= {"ROWS": int(rows), "OTYPE": INT[order.dtype]}
    launch(_SEGMENTS, _blocks(threads), y, x, sorted_, order, starts, source, *sizes, alpha, block=256, **macros)


def launch_bwd(dsource: Any, dy: Any, dim: int, index: Any, source: None, alpha: float, deterministic: bool) -> None:
    dy, index = dy.contiguous(), index.contiguous()
    sizes, macros = _facts(dy, dim, index, dsource)
    launch(_BWD, _blocks(dsource.numel() // macros["PACK"]), dsource, dy, index, *sizes, alpha, block=256, **macros)


def fault_of(x: Any, dim: Any, index: Any, source: Any, alpha: Any, deterministic: Any) -> str | None:
    """What is wrong with a call, or None."""
    for name, t in (("x", x), ("index", index), ("source", source)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, and is {type(t).__name__}"
        if t.device != x.device:
            return f"{name} is on {t.device} and x on {x.device}; one device is needed"
    if x.dim() == 0:
        return "x must have one dimension or more, and is a number"
    if not isinstance(dim, int | torch.SymInt) or not -x.dim() <= dim < x.dim():
        return f"dim must be an int from {-x.dim()} to {x.dim() - 1} for an x of {x.dim()} dimensions, and is {dim!r}"
    if index.dtype not in INT or index.dim() != 1:
        return f"index must be a vector of int64 or int32, and is {index.dtype} of shape {tuple(index.shape)}"
    dim %= x.dim()
    if source.dtype != x.dtype or source.shape != (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]):
        return (
            f"source must be x with {index.shape[0]} rows, as many as there are indices, in dimension {dim}; "
            f"x is {x.dtype} {tuple(x.shape)} and source {source.dtype} {tuple(source.shape)}"
        )
    if x.shape[dim] == 0 and index.shape[0] > 0:
        return f"index must be empty where x has no rows in dimension {dim}, and holds {index.shape[0]}"
    if not isinstance(alpha, Real | torch.SymInt | torch.SymFloat):
        return f"alpha must be a number, and is {type(alpha).__name__}"
    if deterministic not in (None, True, False):
        return f"deterministic must be None, True or False, and is {deterministic!r}"
    if readable(index) and index.numel() and not (index.min() >= 0 and index.max() < x.shape[dim]):
        wrong = index.min() if index.min() < 0 else index.max()
        return f"index must be in 0 to {x.shape[dim] - 1}, and holds {wrong}"
    return None


def small(x: Any, dim: int, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] <= 16 else f"it takes 16 indices at most, and these are {index.shape[0]}"


def packs(x: torch.Tensor, dim: int, index: Any, source: Any = None, *rest: Any) -> str | None:
    """A launcher's y and copies of strided inputs begin at 16 bytes, as all that PyTorch allocates."""
    size, pack = math.prod(x.shape[dim % max(1, x.dim()) + 1 :]), 16 // x.element_size()
    lies = source is None or source.data_ptr() % 16 == 0 or not source.is_contiguous()
    return (
        None
        if size % pack == 0 and lies
        else f"it adds {pack} neighbours at once, and these rows of {size} are not made of such"
    )


def _in_no_order(x: torch.Tensor, index: torch.Tensor, deterministic: Any) -> bool:
    """Whether packed atomics serve: allowed, and quicker. Of 1 Mi into 50000x256 float16 they take 296 us for 325 on an H200, but 421 for 376
    on an H100, whose L2 is smaller; of float32 726 for 450, and 1035 for 562."""
    return deterministic is False and index.shape[0] > FEW and x.element_size() == 2 and device.of(x).l2 > ROOMY


def slow(x: Any, dim: Any, index: torch.Tensor, source: Any, alpha: Any = 1, deterministic: Any = None) -> str | None:
    if _in_no_order(x, index, deterministic):
        return None
    return "its sums have no order: deterministic=False asks for it, and it is quicker where indices are many, halves are added, by a GPU with a large cache"


def left(x: Any, dim: Any, index: torch.Tensor, source: Any, alpha: Any = 1, deterministic: Any = None) -> str | None:
    if index.shape[0] >= 1 << 31:
        return "its places in the order are int, and the indices are more"
    return "deterministic=False asks for atomics" if _in_no_order(x, index, deterministic) else None


def few(x: Any, dim: Any, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] <= FEW else f"it takes {FEW} indices at most, and these are {index.shape[0]}"


def _apart(n: int, inner: int, x: torch.Tensor) -> bool:
    return n <= 64 and inner * x.element_size() >= 512


def apart(x: Any, dim: int, index: torch.Tensor, *rest: Any, **named: Any) -> str | None:
    """Few indices of long rows, each of which is sooner made by threads of its own (114 us for 120 of 15 into 32x1024x1024 on an H100), or of
    much to copy, which by itself is sooner copied, or at most 1.3% later (94.4 us for 96.4 of 1024 into 32 Mi, 94.1 for 93.4 of 15, 99.8
    for 98.5 of 1024 into 32768x1024)."""
    n, inner = index.shape[0], math.prod(x.shape[dim % max(1, x.dim()) + 1 :])
    copied = x.shape[dim] > 4 * n and x.numel() * x.element_size() >= 1 << 24
    if _apart(n, inner, x) or (n <= FEW and copied):
        return "its indices are few, and its rows long or many"
    return "its indices are many" if n > FEW else None


def countable(x: Any, dim: Any, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] < 1 << 31 else f"it takes less than 2^31 indices, and these are {index.shape[0]}"
