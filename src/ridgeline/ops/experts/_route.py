"""Which rows an expert gets, and the sums of what the experts return: the pairs (token, expert) in the experts' order.

A pair p = t k + j is token t's choice j. Its place among all pairs sorted by expert, where pairs of one expert keep
their order, is the number of pairs of lower experts, plus those of its own before it. Programs count the pairs of a
block; the counts of the blocks before it are summed; then each pair counts its like in its block. Nothing is sorted,
and no count depends on a race. A pair whose index is no expert's comes after all, and makes its token NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch

ALONE = 4  # so many blocks of pairs are one program's
Maybe = torch.Tensor | None


class Pairs(NamedTuple):
    """The pairs' experts and what is found: order[r] is the pair in place r, place its inverse, ends the groups'."""

    indices: Any
    order: Any
    place: Any
    ends: Any


@triton.jit
def _experts(pairs, p, n, E):
    """The experts of pairs p; E for those that are none's."""
    e = tl.load(pairs.indices + p, mask=p < n, other=-1)
    return tl.where((e < 0) | (e >= E), E, e).to(tl.int32)


@triton.jit
def _one_hot(pairs, p, n, E, POW: tl.constexpr):
    """(pairs, POW): 1 in the column of a pair's expert."""
    e = _experts(pairs, p, n, E)
    return ((e[:, None] == tl.arange(0, POW)[None, :]) & (p < n)[:, None]).to(tl.int32)


@triton.jit
def _count(table, pairs, n, E, BLOCK: tl.constexpr, POW: tl.constexpr):
    """table: how many pairs of a block each expert has, a row for each block."""
    b = tl.program_id(0)
    counts = tl.sum(_one_hot(pairs, b * BLOCK + tl.arange(0, BLOCK), n, E, POW), 0)
    tl.store(table + b * POW + tl.arange(0, POW), counts)


@triton.jit
def _scan(table, blocks, POW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replaces counts of a block by those of all blocks before it; the row after the last block holds all."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, blocks, ROWS):
        b = start + tl.arange(0, ROWS)
        at, here = table + b[:, None] * POW + column[None, :], (b < blocks)[:, None]
        counts = tl.load(at, mask=here, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, 0) - counts, mask=here)
        before += tl.sum(counts, 0)
    tl.store(table + blocks * POW + column, before)


@triton.jit
def _put(pairs, table, n, E, BLOCK: tl.constexpr, POW: tl.constexpr):
    """table: that of `_scan`, or None if there is one program, which counts itself."""
    column, blocks, block = tl.arange(0, POW), tl.cdiv(n, BLOCK), tl.program_id(0)
    before = tl.zeros((POW,), tl.int32)
    if table is None:
        total = tl.zeros((POW,), tl.int32)
        for b in range(blocks):
            total += tl.sum(_one_hot(pairs, b * BLOCK + tl.arange(0, BLOCK), n, E, POW), 0)
        last = blocks
    else:
        total = tl.load(table + blocks * POW + column)
        before = tl.load(table + block * POW + column)
        last = block + 1
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(pairs.ends + column, ends, mask=column < E)
    base = ends - total + before
    for b in range(block, last):
        p, q = b * BLOCK + tl.arange(0, BLOCK), b * BLOCK + tl.arange(0, BLOCK)
        mine = _one_hot(pairs, p, n, E, POW)
        same = _experts(pairs, p, n, E)[:, None] == _experts(pairs, q, n, E)[None, :]
        place = tl.sum(mine * base[None, :], 1) + tl.sum((same & (q[None, :] < p[:, None])).to(tl.int32), 1)
        tl.store(pairs.place + p, place, mask=p < n)
        tl.store(pairs.order + place, p, mask=p < n)
        base += tl.sum(mine, 0)


class Summed(NamedTuple):
    """Rows of pairs (n, H) in their places, contiguous; weights (T, k) in order of tokens, or None for 1."""

    rows: Any
    weights: Any
    place: Any
    last_end: Any


@triton.jit
def _combine(y, given, k, H, BLOCK: tl.constexpr):
    """y_t = sum over j, in order, of weight times the pair's row, in float32."""
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(given.last_end)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        place = tl.load(given.place + t * k + j)
        x = tl.load(given.rows + place.to(tl.int64) * H + h, mask=h < H, other=0.0).to(tl.float32)
        if given.weights is not None:
            x *= tl.load(given.weights + t * k + j).to(tl.float32)
        total += tl.where(place < last, x, float("nan"))
    tl.store(y + t * H + h, total.to(y.dtype.element_ty), mask=h < H)


@triton.jit
def _gather(out, x, order, each, n, H, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out_r = x_(order_r // each)."""
    r, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.load(order + r, mask=r < n, other=0) // each).to(tl.int64)
    here = (r < n)[:, None] & (h < H)[None, :]
    values = tl.load(x + row[:, None] * H + h[None, :], mask=here, other=0.0)
    tl.store(out + r[:, None].to(tl.int64) * H + h[None, :], values, mask=here)


@triton.jit
def _weights(dweights, sums, dy, bias, pairs, k, H, E, BLOCK: tl.constexpr):
    """dweight = the sum of its row, plus dy's product with the expert's bias, if there is one."""
    p = tl.program_id(0).to(tl.int64)
    place = tl.load(pairs.place + p)
    d = tl.load(sums + place)
    if bias is not None:
        e = tl.load(pairs.indices + p)
        e = tl.where((e < 0) | (e >= E), 0, e).to(tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, H, BLOCK):
            h = start + tl.arange(0, BLOCK)
            b = tl.load(bias + e * H + h, mask=h < H, other=0.0).to(tl.float32)
            total += b * tl.load(dy + p // k * H + h, mask=h < H, other=0.0).to(tl.float32)
        d += tl.sum(total, 0)
    d = tl.where(place < tl.load(pairs.ends + E - 1), d, float("nan"))
    tl.store(dweights + p, d.to(dweights.dtype.element_ty))


def route(pairs: Pairs) -> None:
    """Fills order, place and ends."""
    n, (E,) = pairs.indices.numel(), pairs.ends.shape
    POW = triton.next_power_of_2(E + 1)
    block = max(16, min(64, 16384 // POW))
    blocks = triton.cdiv(n, block)
    tile: dict[str, Any] = {"BLOCK": block, "POW": POW, "num_warps": 8 if block * POW >= 8192 else 4}
    if blocks <= ALONE:
        return launch(_put, (1,), pairs, None, n, E, **tile)
    table, columns = torch.empty((blocks + 1, POW), dtype=torch.int32, device=pairs.ends.device), min(POW, 16)
    launch(_count, (blocks,), table, pairs, n, E, **tile)
    launch(_scan, (POW // columns,), table, blocks, POW=POW, ROWS=256, COLUMNS=columns, num_warps=8)
    launch(_put, (blocks,), pairs, table, n, E, **tile)


def gather(out: torch.Tensor, x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Fills out (T k, H) with the tokens x (T, H) of the pairs in their places, and returns it; all contiguous."""
    n, H = out.shape
    block = min(1024, triton.next_power_of_2(H))
    rows = 8192 // block if n >= 4096 else 1  # many short programs take as long to start as to run
    tile = {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(8, rows * block // 512))}
    launch(_gather, (triton.cdiv(n, rows), triton.cdiv(H, block)), out, x, order, k, n, H, **tile)
    return out


def combine(y: torch.Tensor, rows: torch.Tensor, weights: Maybe, pairs: Pairs, k: int) -> None:
    """Fills y (T, H) from rows (T k, H); all contiguous."""
    T, H = y.shape
    block = min(1024, triton.next_power_of_2(H))
    given = Summed(rows, weights, pairs.place, pairs.ends[-1:])
    warps = max(1, min(4, block // 256))
    launch(_combine, (T, triton.cdiv(H, block)), y, given, k, H, BLOCK=block, num_warps=warps)


def weight_grads(dweights: torch.Tensor, sums: torch.Tensor, dy: torch.Tensor, bias: Maybe, pairs: Pairs) -> None:
    """Fills dweights (T, k) from sums (n,), float32, in their places; dy (T, H); bias (E, H); all contiguous."""
    (T, k), H, (E,) = dweights.shape, dy.shape[1], pairs.ends.shape
    block = min(1024, triton.next_power_of_2(H))
    launch(_weights, (T * k,), dweights, sums, dy, bias, pairs, k, H, E, BLOCK=block, num_warps=2)
