"""The Triton kernel of `reduce_sum`: sums along any dimensions of a tensor with any strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.reduction._layout import groups
from ridgeline.ops.reduction._sums import across, add_up, ceil, parts_like


class Strides(NamedTuple):
    """Those of x along the sums' two dimensions and the two summed ones, and those of y."""

    x_outer: int
    x_a: int
    x_far: int
    x_r: int
    y_outer: int
    y_a: int


@triton.jit
def _fwd(
    y,
    parts,
    x,
    A,
    R,
    steps,
    size,
    strides,
    BA: tl.constexpr,
    BR: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    RUN: tl.constexpr,
):
    """Sums tiles of BR elements for each of BA sums; the contiguous dimension comes last.

    FEW elements, loaded by one thread, are added first; then RUN tiles are added before they join the total.
    """
    tiles = tl.cdiv(A, BA)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    a = (tl.program_id(0) % tiles).to(tl.int64) * BA + tl.arange(0, BA)
    r = tl.arange(0, BR)
    a, r = (a[:, None], r[None, :]) if ROWS else (a[None, :], r[:, None])
    x += outer * strides.x_outer + a * strides.x_a
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
            far = (step // blocks).to(tl.int64) * strides.x_far
            found = tl.load(x + far + at * strides.x_r, mask=(a < A) & (at < R), other=0).to(wide)
            if ROWS:
                part += tl.sum(tl.reshape(found, (BA, BR // FEW, FEW)), 2)
            else:
                part += tl.sum(tl.reshape(found, (FEW, BR // FEW, BA)), 0)
        total += part
    place = outer * strides.y_outer + a * strides.y_a
    sums = across(total, min(16, BR // FEW), ROWS)
    if SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * size + place, sums, mask=a < A)
    else:
        tl.store(y + place, sums.to(y.dtype.element_ty), mask=a < A)


def sum_tiles(y: torch.Tensor, x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> None:
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    x, (outer, x_outer, y_outer), (A, x_a, y_a), (far, x_far), (R, x_r) = groups(x, dims)
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
        few = pack if x_r == 1 and all([s % pack == 0 for s in (x_outer, x_a, x_far)]) else 1
    else:  # rows of the tile that one thread loads
        few = max(1, BA * BR // (32 * warps * pack))
    programs, steps = outer * ceil(A, BA), far * ceil(R, BR)
    splits = max(1, min(8 * gpu.multiprocessors // programs, steps, (1 << 22) // y.numel()))
    parts = parts_like(x, splits if splits > 1 else 0, y.numel())
    facts = {"BA": BA, "BR": BR, "FEW": min(few, BR), "ROWS": rows, "SPLIT": splits > 1, "RUN": 16, "num_warps": warps}
    strides = Strides(x_outer, x_a, x_far, x_r, y_outer, y_a)
    launch(_fwd, (programs, splits), y, parts, x, A, R, steps, y.numel(), strides, **facts)
    if splits > 1:
        add_up(y, parts)
