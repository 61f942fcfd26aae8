"""Launchers of `reduce_sum.cu`: sums of whole tensors whose elements are contiguous."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel
from ridgeline.ops.reduction._layout import normal, result_dtype, side_by_side
from ridgeline.ops.reduction._sums import CTYPES, Parts, Rule, ceil, parts_like

FILE = Path(__file__).with_name("reduce_sum.cu")
RULE: Rule = {"THREADS": 512, "LOADS": 4, "BLOCKS": 128}
BEST = Parts(FILE, "best", "best_add", 1)
_kernel = cache(partial(CudaKernel, FILE))


def takes_whole(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, packs: bool = False
) -> str | None:
    """Why a rung that sums whole tensors cannot take a call, or None."""
    if x.dim() > len(normal(x, dim, dtype)):
        return f"it sums whole tensors, but dim is {dim} of {x.dim()} dimensions"
    if result_dtype(x, dtype) not in CTYPES:
        return f"its results are {', '.join(str(d)[6:] for d in CTYPES)}, but dtype is {dtype}"
    if not side_by_side(x):
        return f"it takes contiguous elements, but the strides are {tuple(x.stride())}"
    if packs and x.data_ptr() % 16:
        return f"its packs begin at multiples of 16 bytes, but x begins {x.data_ptr() % 16} bytes later"
    return None


def teach(name: str, each: int, blocks: int, y: torch.Tensor, x: torch.Tensor, *_: Any) -> None:
    """THREADS x `each` elements per block, or `blocks` blocks that loop (if negative, -blocks per multiprocessor)."""
    count = ceil(x.numel(), 256 * each)
    if blocks:
        count = min(count, blocks if blocks > 0 else -blocks * device.of(x).multiprocessors)
    facts: dict[str, Any] = {"DTYPE": CTYPES[x.dtype], "YTYPE": CTYPES[y.dtype], "LOADS": 1}
    parts = parts_like(x, count, dtype=x.dtype)
    launch(_kernel(name, "PPq"), (count,), parts, x, x.numel(), **facts, THREADS=256, block=256)
    if count > 1 << 18:  # too many for one block
        each = ceil(count, 1024)
        count, parts, many = ceil(count, each), parts_like(x, ceil(count, each), dtype=x.dtype), parts
        launch(_kernel("few", "PPii"), (count,), parts, many, many.numel(), each, **facts, THREADS=256, block=256)
    launch(_kernel("add", "PPi"), (1,), y, parts, count, **facts, THREADS=1024, block=1024)


def best(y: torch.Tensor, x: torch.Tensor, *_: Any, rule: Rule = RULE) -> None:
    BEST.start(rule, y, x)
