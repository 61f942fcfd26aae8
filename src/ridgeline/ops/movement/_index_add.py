"""Launchers of index_add, by atomics or by one thread per element of y; what its rungs support; checks of arguments."""

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
FEW = 1024  # indices that a block searches or sorts; torch sorts more
ROOMY = 55 << 20  # bytes of L2 above which packed atomics are faster for 16-bit dtypes: an H200 has 60 MiB, an H100 50
# For a thread of index_add_pass: loads of x, elements of source rows in flight; for a block: the most threads.
LOADS, AHEAD, THREADS = 4, 8, 256
_PLAIN = {"ROWS": 1, "LANES": 32, "BATCH": 8, "OTYPE": "int", "COPY": 1, "LOADS": 1, "THREADS": 256}
INT = {torch.int32: "int", torch.int64: "long long"}


def _facts(
    y: torch.Tensor, dim: int, index: torch.Tensor, *others: torch.Tensor
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Sizes (outer, size, n, inner) of y and a source around `dim`, and macros: packs of 16 bytes if all is aligned."""
    inner, pack = math.prod(y.shape[dim + 1 :]), 16 // y.element_size()
    whole = inner % pack == 0 and not any([t.data_ptr() % 16 for t in (y, *others)])
    macros = {"DTYPE": CTYPE[y.dtype], "ITYPE": INT[index.dtype], "PACK": pack if whole else 1}
    return (math.prod(y.shape[:dim]), y.shape[dim], index.shape[0], inner), macros | _PLAIN


def _blocks(threads: int, block: int = 256) -> tuple[int]:
    return (min(-(-threads // block), (1 << 31) - 1),)


def unordered(
    kernel: CudaKernel, most: int, y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool
) -> None:
    """Copies x, then adds to y. most: blocks per multiprocessor for a grid that loops; 0 for a thread per work unit."""
    index, source = index.contiguous(), source.contiguous()
    sizes, macros = _facts(y, dim, index, source)
    copied(y, x)
    count = y.numel() // max(1, sizes[1]) if kernel.name.endswith("small") else source.numel()
    blocks = _blocks(count // (macros["PACK"] if kernel.name.endswith("packed") else 1), 128)[0]
    blocks = min(blocks, most * device.of(y).multiprocessors) if most else blocks
    launch(kernel, (blocks,), y, index, source, *sizes, alpha, block=128, **macros)


def _given(y: Any, x: Any, dim: int, index: Any, source: Any) -> tuple[Any, Any, Any, tuple[int, ...], dict[str, Any]]:
    """x, index and source as the kernels take them, the sizes and the macros."""
    index, source = index.contiguous(), source.contiguous()
    if not x.is_contiguous():
        y.copy_(x)
        x = y  # safe: each thread reads an element before it writes it
    return x, index, source, *_facts(y, dim, index, x, source)


def passed(y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool) -> None:
    """Copies and adds in one kernel; a block has the same part of every slice."""
    x, index, source, sizes, macros = _given(y, x, dim, index, source)
    (outer, size, _, inner), pack = sizes, 16 // y.element_size()
    part = size * inner
    copy = pack if x.data_ptr() % 16 == 0 and (outer == 1 or part % pack == 0) else 1
    loads = LOADS if y.numel() > 2048 * copy * device.of(y).multiprocessors else 1  # more blocks for small tensors
    threads = min(THREADS, max(32, 1 << (-(-part // (copy * loads)) - 1).bit_length()))
    macros |= {"COPY": copy, "LOADS": loads, "THREADS": threads, "BATCH": min(4, AHEAD // macros["PACK"])}
    grid = -(-part // (threads * loads * copy)), min(outer, 65535)
    launch(_PASS, grid, y, x, index, source, *sizes, alpha, block=threads, **macros)


def ordered(y: Any, x: Any, dim: int, index: Any, source: Any, alpha: float, deterministic: bool) -> None:
    """Adds with one thread per element of y, in one of three ways.

    The kernel that adds also copies the rows that no index names, or, if those are most rows, an earlier kernel copies.
    For few indices that earlier kernel sorts them too, and the adding kernel starts while it still runs.
    """
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
        # Macros that the copy does not use are the same in all calls.
        own = macros | {"PACK": 1, "LANES": 32, "COPY": copy, "PDL": after["PDL"]}
        launch(_COPY, (blocks,), y, x, index, order, y.numel(), size, n, block=256, **own)
        launch(_SORTED, _blocks(threads), y, x, order, source, *sizes, alpha, block=256, **macros, **after)
        return
    if not rows and x is not y:
        copied(y, x)
    if size < (1 << 31) - 1:  # int32 halves the passes; clamping keeps indices out of range
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
    """Why the arguments are refused, or None."""
    for name, t in (("x", x), ("index", index), ("source", source)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, but is {type(t).__name__}"
        if t.device != x.device:
            return f"{name} is on {t.device} but x on {x.device}; they must share one device"
    if x.dim() == 0:
        return "x must have at least one dimension, but is a scalar"
    if not isinstance(dim, int | torch.SymInt) or not -x.dim() <= dim < x.dim():
        return f"dim must be an int from {-x.dim()} to {x.dim() - 1} for an x of {x.dim()} dimensions, but is {dim!r}"
    if index.dtype not in INT or index.dim() != 1:
        return f"index must be a vector of int64 or int32, but is {index.dtype} of shape {tuple(index.shape)}"
    dim %= x.dim()
    if source.dtype != x.dtype or source.shape != (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]):
        return (
            f"source must be like x, with {index.shape[0]} rows, one per index, in dimension {dim}; "
            f"x is {x.dtype} {tuple(x.shape)} and source {source.dtype} {tuple(source.shape)}"
        )
    if x.shape[dim] == 0 and index.shape[0] > 0:
        return f"index must be empty where x has no rows in dimension {dim}, but holds {index.shape[0]}"
    if not isinstance(alpha, Real | torch.SymInt | torch.SymFloat):
        return f"alpha must be a number, but is {type(alpha).__name__}"
    if deterministic not in (None, True, False):
        return f"deterministic must be None, True or False, but is {deterministic!r}"
    if readable(index) and index.numel() and not (index.min() >= 0 and index.max() < x.shape[dim]):
        wrong = index.min() if index.min() < 0 else index.max()
        return f"index must be in 0 to {x.shape[dim] - 1}, but holds {wrong}"
    return None


def small(x: Any, dim: int, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] <= 16 else f"it takes at most 16 indices, but there are {index.shape[0]}"


def packs(x: torch.Tensor, dim: int, index: Any, source: Any = None, *rest: Any) -> str | None:
    """Why rows are not whole aligned packs, or None; y and copies of strided inputs are always aligned."""
    size, pack = math.prod(x.shape[dim % max(1, x.dim()) + 1 :]), 16 // x.element_size()
    lies = source is None or source.data_ptr() % 16 == 0 or not source.is_contiguous()
    if size % pack == 0 and lies:
        return None
    return f"it adds {pack} neighbours at once, but rows of {size} elements here are not whole aligned packs"


def _in_no_order(x: torch.Tensor, index: torch.Tensor, deterministic: Any) -> bool:
    """Whether packed atomics are allowed and faster: for 16-bit dtypes, many indices, a large L2 (H200, not H100)."""
    return deterministic is False and index.shape[0] > FEW and x.element_size() == 2 and device.of(x).l2 > ROOMY


def slow(x: Any, dim: Any, index: torch.Tensor, source: Any, alpha: Any = 1, deterministic: Any = None) -> str | None:
    if _in_no_order(x, index, deterministic):
        return None
    return (
        "its sums have no order: deterministic=False allows it, where it is faster: many indices, halves, a large cache"
    )


def left(x: Any, dim: Any, index: torch.Tensor, source: Any, alpha: Any = 1, deterministic: Any = None) -> str | None:
    if index.shape[0] >= 1 << 31:
        return "there are more indices than its integers count"
    return "deterministic=False asks for atomics" if _in_no_order(x, index, deterministic) else None


def few(x: Any, dim: Any, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] <= FEW else f"it takes at most {FEW} indices, but there are {index.shape[0]}"


def _apart(n: int, inner: int, x: torch.Tensor) -> bool:
    return n <= 64 and inner * x.element_size() >= 512


def apart(x: Any, dim: int, index: torch.Tensor, *rest: Any, **named: Any) -> str | None:
    """Why another rung is as fast: separate threads for few long rows, or a separate copy where much is copied."""
    n, inner = index.shape[0], math.prod(x.shape[dim % max(1, x.dim()) + 1 :])
    copied = x.shape[dim] > 4 * n and x.numel() * x.element_size() >= 1 << 24
    if _apart(n, inner, x) or (n <= FEW and copied):
        return "its indices are few, and its rows long or many"
    return "its indices are many" if n > FEW else None


def countable(x: Any, dim: Any, index: torch.Tensor, *rest: Any) -> str | None:
    return None if index.shape[0] < 1 << 31 else f"it takes fewer than 2^31 indices, but there are {index.shape[0]}"
