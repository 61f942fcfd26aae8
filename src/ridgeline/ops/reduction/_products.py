"""Kernels and launchers of `dot`."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.ops.reduction._sums import Parts, Rule, across, add_up, ceil, parts_like

FILE = Path(__file__).with_name("dot.cu")


@triton.jit
def _fwd(parts, a, b, n, steps, a_step, b_step, BLOCK: tl.constexpr):
    """One program's part of the product: `steps` adjacent blocks."""
    sums = tl.zeros((1, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)[None, :]
    for _ in range(steps):
        left = tl.load(a + first * a_step, mask=first < n, other=0).to(tl.float32)
        sums += left * tl.load(b + first * b_step, mask=first < n, other=0).to(tl.float32)
        first += BLOCK
    tl.store(parts + tl.program_id(0) + tl.zeros((1, 1), tl.int32), across(sums, 16, True))


def by_programs(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    block = 4096
    steps = max(1, a.numel() // (block * 64 * device.of(a).multiprocessors))
    parts = parts_like(a, ceil(a.numel(), block * steps), 1)
    launch(_fwd, (len(parts),), parts, a, b, a.numel(), steps, a.stride(0), b.stride(0), BLOCK=block, num_warps=8)
    add_up(y, parts)


def side_by_side(a: torch.Tensor, b: torch.Tensor, bytes: int = 1) -> str | None:
    """Why a kernel that loads `bytes` at once cannot take a and b, or None."""
    if a.numel() > 1 and not a.stride(0) == b.stride(0) == 1:
        return f"it takes contiguous elements, but the strides are {a.stride(0)} and {b.stride(0)}"
    if a.data_ptr() % bytes or b.data_ptr() % bytes:
        beyond = f"{a.data_ptr() % bytes} and {b.data_ptr() % bytes}"
        return f"its packs begin at multiples of {bytes} bytes, but a and b begin {beyond} bytes later"
    return None


def together(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if (a.data_ptr() - b.data_ptr()) % 16:
        return "a and b must begin at the same offset from a multiple of 16 bytes"
    return side_by_side(a, b)


_kernel = cache(partial(CudaKernel, FILE))


def atomic(names: tuple[str, str, str], each: int, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Clears the sum, adds to it, copies it to y. each: elements per thread; 0: a full GPU's threads share them all."""
    facts: dict[str, Any] = {"DTYPE": CTYPE[a.dtype], "YTYPE": CTYPE[y.dtype], "THREADS": 256, "LOADS": 1}
    zero, kernel, end = map(_kernel, names, ("P", "PPPq", "PP"))
    sums, n = a.new_empty(2, dtype=torch.float16 if each else torch.float32), a.numel()
    # One thread more than packs, for an odd element.
    blocks = ceil(n // each + 1, 256) if each else min(ceil(n, 256), 8 * device.of(a).multiprocessors)
    launch(zero, (1,), sums, **facts, block=32)
    launch(kernel, (blocks,), sums, a, b, n, **facts, block=256)
    launch(end, (1,), y, sums, **facts, block=32)


IN_ORDER = Parts(FILE, "in_order", "add", 2)
RULE: Rule = {"THREADS": 1024, "LOADS": 2, "BLOCKS": 128}


def in_order(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, rule: Rule = RULE) -> None:
    IN_ORDER.start(rule, y, a, b)
