"""Which rows an expert gets, and the sums of what the experts return: the pairs (token, expert) in the experts' order.

A pair p = t k + j is token t's choice j. Its place among all pairs sorted by expert, where pairs of one expert keep
their order, is the number of pairs of lower experts, plus those of its own before it. Programs count the pairs of
their spans; then each adds up what is before its span. Nothing is sorted, and no count depends on a race. A pair
whose index is no expert's comes after all, and makes its token NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch

SPANS = 128  # at most: the rows of the table of counts
Maybe = torch.Tensor | None


class Pairs(NamedTuple):
    """The pairs' experts and what is found: order[r] is the pair in place r, place its inverse, ends the groups'."""

    indices: Any
    order: Any
    place: Any
    ends: Any


@triton.jit
def _one_hot(pairs, p, n, E, POW: tl.constexpr):
    """(pairs, POW): 1 in the column of a pair's expert; column E is for those that are none's."""
    e = tl.load(pairs.indices + p, mask=p < n, other=-1)
    e = tl.where((e < 0) | (e >= E), E, e)
    return ((e[:, None] == tl.arange(0, POW)[None, :]) & (p < n)[:, None]).to(tl.int32)


@triton.jit
def _count(table, pairs, n, E, BLOCK: tl.constexpr, POW: tl.constexpr):
    span = tl.cdiv(tl.cdiv(n, BLOCK), tl.num_programs(0))
    total = tl.zeros((POW,), tl.int32)
    for block in range(tl.program_id(0) * span, (tl.program_id(0) + 1) * span):
        total += tl.sum(_one_hot(pairs, block * BLOCK + tl.arange(0, BLOCK), n, E, POW), 0)
    tl.store(table + tl.program_id(0) * POW + tl.arange(0, POW), total)


@triton.jit
def _put(pairs, table, n, E, BLOCK: tl.constexpr, POW: tl.constexpr, ROWS: tl.constexpr):
    """table: the counts of each span, or None if there is one program, which counts itself. ROWS: read at once."""
    column = tl.arange(0, POW)
    span = tl.cdiv(tl.cdiv(n, BLOCK), tl.num_programs(0))
    total = tl.zeros((POW,), tl.int32)
    before = tl.zeros((POW,), tl.int32)
    if table is None:
        for block in range(span):
            total += tl.sum(_one_hot(pairs, block * BLOCK + tl.arange(0, BLOCK), n, E, POW), 0)
    else:
        for start in range(0, tl.num_programs(0), ROWS):
            s = start + tl.arange(0, ROWS)
            at = table + s[:, None] * POW + column[None, :]
            counts = tl.load(at, mask=s[:, None] < tl.num_programs(0), other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where(s[:, None] < tl.program_id(0), counts, 0), 0)
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(pairs.ends + column, ends, mask=column < E)
    base = ends - total + before
    for block in range(tl.program_id(0) * span, (tl.program_id(0) + 1) * span):
        p = block * BLOCK + tl.arange(0, BLOCK)
        mine = _one_hot(pairs, p, n, E, POW)
        place = tl.sum(mine * (tl.cumsum(mine, 0) - mine + base[None, :]), 1)
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
def _gather(out, x, order, each, H, BLOCK: tl.constexpr):
    """out_r = x_(order_r // each)."""
    r, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.load(order + r) // each).to(tl.int64)
    tl.store(out + r * H + h, tl.load(x + row * H + h, mask=h < H, other=0.0), mask=h < H)


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
    table = torch.empty((SPANS, POW), dtype=torch.int32, device=pairs.ends.device)
    block = max(16, min(128, 8192 // POW))
    spans = min(SPANS, triton.cdiv(n, block))
    warps = 8 if block * POW >= 8192 else 4
    tile: dict[str, Any] = {"BLOCK": block, "POW": POW, "num_warps": warps}
    one = spans <= 4
    if not one:
        launch(_count, (spans,), table, pairs, n, E, **tile)
    rows = max(1, min(SPANS, 4096 // POW))
    launch(_put, (1 if one else spans,), pairs, None if one else table, n, E, ROWS=rows, **tile)


def gather(out: torch.Tensor, x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Fills out (T k, H) with the tokens x (T, H) of the pairs in their places, and returns it; all contiguous."""
    n, H = out.shape
    block = min(2048, triton.next_power_of_2(H))
    launch(
        _gather, (n, triton.cdiv(H, block)), out, x, order, k, H, BLOCK=block, num_warps=max(1, min(4, block // 256))
    )
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
