"""Shared by sums: partial sums and the kernels that add them up, in CUDA C++ and in Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CTYPE, CudaKernel

CTYPES = CTYPE | {torch.int64: "long long", torch.int32: "int"}
Rule = dict[str, int]


def ceil(a: int, b: int) -> int:
    return -(-a // b)


class Parts:
    """A CUDA C++ kernel whose blocks each leave a partial sum, and one that adds them: `name` and `adder` of a file.

    operands: how many tensors it reads; each is contiguous, and all have the same offset from a multiple of 16 bytes. A
    block sums THREADS x LOADS packs of 16 bytes, `steps` times; there are at most BLOCKS blocks per multiprocessor.
    """

    def __init__(self, file: Path, name: str, adder: str, operands: int):
        self.kernel, self.adder = CudaKernel(file, name, "PP" + "P" * operands + "qi"), CudaKernel(file, adder, "PPi")

    def start(self, rule: Rule, y: torch.Tensor, *operands: torch.Tensor) -> None:
        x, gpu = operands[0], device.of(operands[0])
        whole = ceil(x.numel(), rule["THREADS"] * rule["LOADS"] * (16 // x.element_size()))
        steps = ceil(whole, rule["BLOCKS"] * gpu.multiprocessors)
        blocks = ceil(whole, steps)
        parts = parts_like(x, blocks if blocks > 1 else 0)
        facts: dict[str, Any] = {"DTYPE": CTYPES[x.dtype], "YTYPE": CTYPES[y.dtype], "LOADS": rule["LOADS"]}
        first = {"THREADS": rule["THREADS"], "block": rule["THREADS"], "PDL": early(gpu)["PDL"]}
        launch(self.kernel, (blocks,), y, parts, *operands, x.numel(), steps, **facts, **first)
        if blocks > 1:
            launch(self.adder, (1,), y, parts, blocks, **facts, THREADS=1024, block=1024, **early(gpu))


@triton.jit
def across(tile, FEW: tl.constexpr, ROWS: tl.constexpr):
    """Sums over a tile's rows (or columns), kept as a dimension of 1: first FEW neighbours in float32, then float64."""
    one: tl.constexpr = tile.shape[0]
    other: tl.constexpr = tile.shape[1]
    wide: tl.constexpr = tl.float64 if tile.dtype == tl.float32 else tile.dtype
    if ROWS:
        few = tl.sum(tl.reshape(tile, (one, other // FEW, FEW)), 2)
    else:
        few = tl.sum(tl.reshape(tile, (one // FEW, FEW, other)), 1)
    return tl.sum(few.to(wide), 1 if ROWS else 0, keep_dims=True)


@triton.jit
def _add(y, parts, count, size, DEEP: tl.constexpr, WIDE: tl.constexpr):
    """Adds `count` rows of parts, DEEP at a time, always in the same order."""
    at = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)[None, :]
    sums = tl.zeros((DEEP, WIDE), parts.dtype.element_ty)
    for start in range(0, count, DEEP):
        row = (start + tl.arange(0, DEEP)).to(tl.int64)[:, None]
        sums += tl.load(parts + row * size + at, mask=(row < count) & (at < size), other=0)
    tl.store(y + at, tl.sum(sums, 0)[None, :].to(y.dtype.element_ty), mask=at < size)


def add_up(y: torch.Tensor, parts: torch.Tensor) -> None:
    """Writes the sum of the rows of parts to y, which is contiguous."""
    count, size = parts.shape
    wide = min(64, triton.next_power_of_2(size))
    launch(_add, (ceil(size, wide),), y, parts, count, size, DEEP=1024 // wide, WIDE=wide, num_warps=4)


def parts_like(x: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Room for partial sums of x: int64 for integers, else float64 or the given dtype."""
    return x.new_empty(shape, dtype=dtype if x.is_floating_point() else torch.int64)


def no_kernel(*_: Any) -> None:
    """The backward of ops whose gradient is a view or a product: it starts no kernel."""
