"""Kernels and launchers of `reduce_sum` and `dot`: partial sums, and what adds them up, in CUDA C++ and in Triton."""

from __future__ import annotations

from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.ops.reduction._arguments import groups, normal, result_dtype, side_by_side

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
    long = count > 64 and size <= 8192  # few programs, which wait for one load after the other
    wide = min(16 if long else 64, triton.next_power_of_2(size))
    tile = {"DEEP": (4096 if long else 1024) // wide, "WIDE": wide, "num_warps": 8 if long else 4}
    launch(_add, (ceil(size, wide),), y, parts, count, size, **tile)


def parts_like(x: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Room for partial sums of x: int64 for integers, else float64 or the given dtype."""
    return x.new_empty(shape, dtype=dtype if x.is_floating_point() else torch.int64)


def no_kernel(*_: Any) -> None:
    """The backward of ops whose gradient is a view or a product: it starts no kernel."""


class Line(NamedTuple):
    """Sizes of the innermost kept dimension A and the innermost summed one R, with the strides of x and y along them.

    steps: tiles that are added. size: elements of y."""

    A: int
    R: int
    steps: int
    size: int
    x_a: int
    x_r: int
    y_a: int


@triton.jit
def _place(number, dims, PART: tl.constexpr, PARTS: tl.constexpr):
    """The offset of what has this number among dimensions, innermost first.

    dims: the dimensions' sizes, then their strides in PARTS - 1 tensors; PART says in which of them.
    """
    at = number * 0
    count: tl.constexpr = len(dims) // PARTS
    for d in tl.static_range(count):
        if d + 1 == count:
            at += number * dims[PART * count + d]
        else:
            at += number % dims[d] * dims[PART * count + d]
            number = number // dims[d]
    return at


@triton.jit
def _fwd(
    y,
    parts,
    x,
    line,
    outer,
    far,
    BA: tl.constexpr,
    BR: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    RUN: tl.constexpr,
):
    """Sums tiles of BR elements for each of BA sums; the contiguous dimension comes last.

    FEW elements, loaded by one thread, are added first; then RUN tiles are added before they join the total.
    outer: sizes of the other kept dimensions, their strides in x and in y. far: the same of summed ones, without y.
    """
    A, R = line.A, line.R
    tiles = tl.cdiv(A, BA)
    which = (tl.program_id(0) // tiles).to(tl.int64)
    a = (tl.program_id(0) % tiles).to(tl.int64) * BA + tl.arange(0, BA)
    r = tl.arange(0, BR)
    a, r = (a[:, None], r[None, :]) if ROWS else (a[None, :], r[:, None])
    x += _place(which, outer, 1, 3) + a * line.x_a
    wide: tl.constexpr = tl.float32 if x.dtype.element_ty.is_floating() else tl.int64
    blocks = tl.cdiv(R, BR)
    length = tl.cdiv(line.steps, tl.num_programs(1))
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, line.steps)
    total = tl.zeros((BA, BR // FEW) if ROWS else (BR // FEW, BA), wide)
    for some in range(begin, end, RUN):
        part = tl.zeros((BA, BR // FEW) if ROWS else (BR // FEW, BA), wide)
        for step in range(some, tl.minimum(some + RUN, end)):
            at = (step % blocks).to(tl.int64) * BR + r
            beyond = _place((step // blocks).to(tl.int64), far, 1, 2)
            found = tl.load(x + beyond + at * line.x_r, mask=(a < A) & (at < R), other=0).to(wide)
            if ROWS:
                part += tl.sum(tl.reshape(found, (BA, BR // FEW, FEW)), 2)
            else:
                part += tl.sum(tl.reshape(found, (FEW, BR // FEW, BA)), 0)
        total += part
    place = _place(which, outer, 2, 3) + a * line.y_a
    sums = across(total, min(16, BR // FEW), ROWS)
    if SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * line.size + place, sums, mask=a < A)
    else:
        tl.store(y + place, sums.to(y.dtype.element_ty), mask=a < A)


def sum_tiles(y: torch.Tensor, x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> None:
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    kept, (A, x_a, y_a), added, (R, x_r) = groups(x, dims)
    sizes, x_outer, y_outer = zip(*reversed(kept), strict=True)
    depths, x_far = zip(*reversed(added), strict=True)
    outer, far = prod(sizes), prod(depths)
    pack = 16 // x.element_size()
    rows = A == 1 or x_r <= x_a
    gpu = device.of(x)
    # Elements per tile: 128 bytes per thread, or half as many where more would spill registers.
    most = min((2048 if gpu.capability >= 90 else 1024) * pack, 16384)
    fast = min(triton.next_power_of_2(R if rows else A), most if rows else 64 * pack)
    slow = min(triton.next_power_of_2(A if rows else R), most // fast)
    BA, BR = (slow, fast) if rows else (fast, slow)
    warps = max(1, min(8, BA * BR // 1024))
    if rows:  # neighbours in one load
        few = pack if x_r == 1 and all([s % pack == 0 for s in (*x_outer, x_a, *x_far)]) else 1
    else:  # rows of the tile that one thread loads
        few = max(1, BA * BR // (32 * warps * pack))
    programs, steps = outer * ceil(A, BA), far * ceil(R, BR)
    # As many programs as run at once, by registers: a second round would be nearly empty, and starts cost more.
    splits = max(1, min(24 // warps * gpu.multiprocessors // programs, steps, (1 << 22) // y.numel()))
    parts = parts_like(x, splits if splits > 1 else 0, y.numel())
    facts = {"BA": BA, "BR": BR, "FEW": min(few, BR), "ROWS": rows, "SPLIT": splits > 1, "RUN": 16, "num_warps": warps}
    line = Line(A, R, steps, y.numel(), x_a, x_r, y_a)
    launch(_fwd, (programs, splits), y, parts, x, line, (*sizes, *x_outer, *y_outer), (*depths, *x_far), **facts)
    if splits > 1:
        add_up(y, parts)


SUMS = Path(__file__).with_name("reduce_sum.cu")
SUM_RULE: Rule = {"THREADS": 512, "LOADS": 4, "BLOCKS": 128}
BEST = Parts(SUMS, "best", "best_add", 1)
_kernel = cache(CudaKernel)


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
    launch(_kernel(SUMS, name, "PPq"), (count,), parts, x, x.numel(), **facts, THREADS=256, block=256)
    if count > 1 << 18:  # too many for one block
        each = ceil(count, 1024)
        count, parts, many = ceil(count, each), parts_like(x, ceil(count, each), dtype=x.dtype), parts
        launch(_kernel(SUMS, "few", "PPii"), (count,), parts, many, many.numel(), each, **facts, THREADS=256, block=256)
    launch(_kernel(SUMS, "add", "PPi"), (1,), y, parts, count, **facts, THREADS=1024, block=1024)


def best(y: torch.Tensor, x: torch.Tensor, *_: Any, rule: Rule = SUM_RULE) -> None:
    BEST.start(rule, y, x)


PRODUCTS = Path(__file__).with_name("dot.cu")


@triton.jit
def _dot(parts, a, b, n, steps, a_step, b_step, BLOCK: tl.constexpr):
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
    launch(_dot, (len(parts),), parts, a, b, a.numel(), steps, a.stride(0), b.stride(0), BLOCK=block, num_warps=8)
    add_up(y, parts)


def paired(a: torch.Tensor, b: torch.Tensor, bytes: int = 1) -> str | None:
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
    return paired(a, b)


def atomic(names: tuple[str, str, str], each: int, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Clears the sum, adds to it, copies it to y. each: elements per thread; 0: a full GPU's threads share them all."""
    facts: dict[str, Any] = {"DTYPE": CTYPE[a.dtype], "YTYPE": CTYPE[y.dtype], "THREADS": 256, "LOADS": 1}
    zero, kernel, end = map(partial(_kernel, PRODUCTS), names, ("P", "PPPq", "PP"))
    sums, n = a.new_empty(2, dtype=torch.float16 if each else torch.float32), a.numel()
    # One thread more than packs, for an odd element.
    blocks = ceil(n // each + 1, 256) if each else min(ceil(n, 256), 8 * device.of(a).multiprocessors)
    launch(zero, (1,), sums, **facts, block=32)
    launch(kernel, (blocks,), sums, a, b, n, **facts, block=256)
    launch(end, (1,), y, sums, **facts, block=32)


IN_ORDER = Parts(PRODUCTS, "in_order", "add", 2)
DOT_RULE: Rule = {"THREADS": 1024, "LOADS": 2, "BLOCKS": 128}


def in_order(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, rule: Rule = DOT_RULE) -> None:
    IN_ORDER.start(rule, y, a, b)
