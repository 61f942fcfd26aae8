"""sample in Triton: a program per row, which searches the cuts bit by bit in the ordered bits of the logits."""

from __future__ import annotations

from ctypes import c_float
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.tiles.philox import philox

SCALE = tl.constexpr(float(1 << 40))  # a mass is a whole number of 2^-40 of the largest, so sums have no order
TINY = tl.constexpr(1e-37)  # temperatures below it are greedy


class Matrix(NamedTuple):
    """A matrix and its strides in elements; data is None if there is none."""

    data: Any
    row: Any
    column: Any


class PerRow(NamedTuple):
    """Parameters of rows (B,), and of the call (one element), in memory; None: given as numbers."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    offset: Any


@triton.jit
def _values(x, mask, row, i, V):
    value = tl.load(x.data + row * x.row + i * x.column, mask=i < V, other=float("-inf")).to(tl.float32)
    if mask.data is not None:
        allowed = tl.load(mask.data + row * mask.row + i * mask.column, mask=i < V, other=0)
        value = tl.where(allowed != 0, value, float("-inf"))
    return value


@triton.jit
def _key(value):
    """Bits whose unsigned order is that of the values; both zeros have the same."""
    bits = tl.where(value == 0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _exponent(value, top, temperature):
    return tl.where(value == top, 0.0, (value - top) / temperature)


@triton.jit
def _mass(value, top, temperature):
    return (tl.exp(_exponent(value, top, temperature)) * SCALE).to(tl.int64)


@triton.jit
def _extremes(x, mask, row, V, BLOCK: tl.constexpr):
    """The largest value, and whether one is NaN."""
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        value = _values(x, mask, row, start + tl.arange(0, BLOCK), V)
        wrong |= (value != value).to(tl.int32)
        most = tl.where(value > most, value, most)
    return tl.max(most, 0), tl.max(wrong, 0)


@triton.jit
def _kth(x, mask, row, k, V, BLOCK: tl.constexpr):
    """The key of the k-th largest value, and how many of its ties stay; all of them if k >= V."""
    key = row.to(tl.uint32) * 0
    bit = (key + 1) << 31
    for _ in range(tl.where(k < V, 32, 0)):
        attempt = key | bit
        bit = bit >> 1
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            count += ((_key(_values(x, mask, row, i, V)) >= attempt) & (i < V)).to(tl.int32)
        key = tl.where(tl.sum(count, 0) >= k, attempt, key)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tl.where(k < V, V, 0), BLOCK):
        i = start + tl.arange(0, BLOCK)
        above += ((_key(_values(x, mask, row, i, V)) > key) & (i < V)).to(tl.int32)
    return key, tl.where(k < V, k - tl.sum(above, 0), V)


@triton.jit
def _mass_of(x, mask, row, key, top, temperature, V, BLOCK: tl.constexpr):
    """The mass above a key, and that of one value with this key times its count."""
    above = tl.zeros((BLOCK,), tl.int64)
    ties = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, V, BLOCK):
        value = _values(x, mask, row, start + tl.arange(0, BLOCK), V)
        own, mass = _key(value), _mass(value, top, temperature)
        above += tl.where(own > key, mass, 0)
        ties = tl.where(own == key, mass, ties)
    return tl.sum(above, 0), tl.max(ties, 0)


@triton.jit
def _nucleus(x, mask, row, p, cut, ties, top, temperature, V, BLOCK: tl.constexpr):
    """The cut (a key, and how many of its ties stay) of the fewest values whose mass is at least p of what is left."""
    active = p < 1
    above, each = _mass_of(x, mask, row, cut, top, temperature, V, BLOCK)
    total = above + each * ties
    wanted = tl.maximum(tl.ceil(total.to(tl.float64) * p).to(tl.int64), 1)
    key = cut * 0
    bit = (key + 1) << 31
    for _ in range(tl.where(active, 32, 0)):
        attempt = key | bit
        bit = bit >> 1
        above, each = _mass_of(x, mask, row, attempt - 1, top, temperature, V, BLOCK)
        key = tl.where((attempt <= cut) | (above >= wanted), attempt, key)
    above, each = _mass_of(x, mask, row, key, top, temperature, V, BLOCK)
    need = (wanted - above + each - 1) // tl.maximum(each, 1)
    return tl.where(active, key, cut), tl.where(active, need.to(tl.int32), ties)


@triton.jit
def _kept(x, mask, row, i, seen, cut, ties, least, top, temperature, V):
    """The masses that are left, 0 elsewhere, and how many ties there are up to here."""
    value = _values(x, mask, row, i, V)
    key = _key(value)
    tie = ((key == cut) & (i < V)).to(tl.int32)
    rank = seen + tl.cumsum(tie, 0) - tie
    keep = (key > cut) | ((tie != 0) & (rank < ties))
    keep &= (value == top) | (tl.exp(_exponent(value, top, temperature)) >= least)
    return tl.where(keep, _mass(value, top, temperature), 0), seen + tl.sum(tie, 0)


@triton.jit
def _uniform(rows, row, low, high, position):
    """31 random bits of a row."""
    if rows.seed is not None:
        given = tl.load(rows.seed)
        low = given
        high = given >> 32
    if rows.offset is not None:
        position = tl.load(rows.offset)
    word, _, _, _ = philox(row.to(tl.uint32), position.to(tl.uint32), low.to(tl.uint32), high.to(tl.uint32))
    return (word >> 1).to(tl.int64)


@triton.jit(do_not_specialize=["t", "k", "p", "m", "low", "high", "position"])
def _fwd(token, logprob, x, mask, rows, t, k, p, m, low, high, position, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if rows.temperature is not None:
        t = tl.load(rows.temperature + row)
    if rows.top_k is not None:
        k = tl.minimum(tl.maximum(tl.load(rows.top_k + row), 1), V).to(tl.int32)
    if rows.top_p is not None:
        p = tl.load(rows.top_p + row)
    if rows.min_p is not None:
        m = tl.load(rows.min_p + row)
    k = tl.where(t < TINY, 1, k)
    t = tl.where(t < TINY, 1.0, t)
    top, wrong = _extremes(x, mask, row, V, BLOCK)
    cut, ties = _kth(x, mask, row, k, V, BLOCK)
    if p < 1:
        cut, ties = _nucleus(x, mask, row, p, cut, ties, top, t, V, BLOCK)
    total = row * 0
    seen = ties * 0
    for start in range(0, V, BLOCK):
        mass, seen = _kept(x, mask, row, start + tl.arange(0, BLOCK), seen, cut, ties, m, top, t, V)
        total += tl.sum(mass, 0)
    bits = _uniform(rows, row, low, high, position)
    goal = (total >> 32) * bits * 2 + ((total & 0xFFFFFFFF) * bits >> 31)  # floor(total * bits / 2^31)
    before, found = row * 0, ties * 0 + V
    seen = ties * 0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mass, seen = _kept(x, mask, row, i, seen, cut, ties, m, top, t, V)
        found = tl.minimum(found, tl.min(tl.where(before + tl.cumsum(mass, 0) > goal, i, V), 0))
        before += tl.sum(mass, 0)
    none = (wrong != 0) | (top == float("-inf")) | (t != t)
    found = tl.where(found < V, found, 0)
    value = tl.load(x.data + row * x.row + found * x.column).to(tl.float32)
    chance = _exponent(value, top, t) - tl.log(total.to(tl.float32) / SCALE)
    tl.store(token + row, tl.where(none, -1, found).to(tl.int64))
    tl.store(logprob + row, tl.where(none, float("nan"), chance))


def fwd(
    token: torch.Tensor, logprob: torch.Tensor, logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any,
    min_p: Any, mask: Any, seed: Any, offset: Any, low: int, high: int, position: int, *numbers: Any,
) -> None:  # fmt: skip
    """Fills token and logprob, both (B,)."""
    B, V = logits.shape
    x = Matrix(logits, *logits.stride())
    allowed = Matrix(None, 0, 0) if mask is None else Matrix(mask.view(torch.uint8), *mask.stride())
    rows = PerRow(temperature, top_k, top_p, min_p, seed, offset)
    block = min(4096, max(16, triton.next_power_of_2(V)))
    t, p, m = (c_float(numbers[n]).value for n in (0, 2, 3))
    values = t, min(numbers[1], V), p, m, low, high, position, V
    warps = max(1, min(16, block // 256))
    launch(_fwd, (B,), token, logprob, x, allowed, rows, *values, BLOCK=block, num_warps=warps)
