"""Counts the seen keys in each block of a mask, and writes masks out, from a user's function."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch


@triton.jit
def dense_mask(b, h, q, k, data, steps):
    """The mask function of a mask in memory. steps: its strides over batches, heads and queries."""
    at = q.to(tl.int64) * tl.load(steps + 2) + k + (b * tl.load(steps) + h * tl.load(steps + 1))
    return tl.load(data + at) != 0


@triton.jit(do_not_specialize=["heads", "rows", "columns"])
def _count(counts, heads, rows, columns, of_mask, MASK: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Counts the seen keys of one block of a batch's head."""
    block = tl.program_id(0)
    across, along = tl.cdiv(columns, BLOCK), tl.cdiv(rows, BLOCK)
    head = block // (across * along)
    first, other = block // across % along * BLOCK, block % across * BLOCK
    found = tl.zeros((TILE,), tl.int32)
    for t in range((BLOCK // TILE) * (BLOCK // TILE)):
        i = (first + t // (BLOCK // TILE) * TILE + tl.arange(0, TILE))[:, None]
        j = (other + t % (BLOCK // TILE) * TILE + tl.arange(0, TILE))[None, :]
        q, k = tl.minimum(i, rows - 1), tl.minimum(j, columns - 1)
        if of_mask is None:
            seen = MASK(head // heads, head % heads, q, k)
        else:
            seen = MASK(head // heads, head % heads, q, k, *of_mask)
        found += tl.sum(((i < rows) & (j < columns) & seen).to(tl.int32), 1)
    tl.store(counts + block, tl.sum(found, 0))


@triton.jit(do_not_specialize=["heads", "rows", "columns"])
def _write(mask, heads, rows, columns, of_mask, MASK: tl.constexpr, TILE: tl.constexpr):
    """Writes a tile of a mask into memory."""
    tile = tl.program_id(0)
    across, along = tl.cdiv(columns, TILE), tl.cdiv(rows, TILE)
    head = tile // (across * along)
    i = (tile // across % along * TILE + tl.arange(0, TILE))[:, None]
    j = (tile % across * TILE + tl.arange(0, TILE))[None, :]
    q, k = tl.minimum(i, rows - 1), tl.minimum(j, columns - 1)
    if of_mask is None:
        seen = MASK(head // heads, head % heads, q, k)
    else:
        seen = MASK(head // heads, head % heads, q, k, *of_mask)
    inside = (i < rows) & (j < columns)
    at = mask + (head.to(tl.int64) * rows + i) * columns + j
    tl.store(at, (inside & seen).to(tl.uint8), mask=inside)


def count(counts: torch.Tensor, function: Any, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, ...]) -> None:
    """Fills counts (B, H, row blocks, column blocks), int32. sizes: heads, rows, columns and the size of a block."""
    *given, block = sizes
    facts: dict[str, Any] = {"MASK": function, "BLOCK": block, "TILE": min(block, 64), "num_warps": 4}
    launch(_count, (counts.numel(),), counts, *given, tensors or None, **facts)


def write(mask: torch.Tensor, function: Any, tensors: tuple[torch.Tensor, ...]) -> None:
    """Fills a mask (B, H, rows, columns), uint8."""
    batch, heads, rows, columns = mask.shape
    grid = (batch * heads * triton.cdiv(rows, 64) * triton.cdiv(columns, 64),)
    launch(_write, grid, mask, heads, rows, columns, tensors or None, MASK=function, TILE=64, num_warps=4)
