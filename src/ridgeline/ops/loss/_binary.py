"""Kernels and launchers of binary_cross_entropy: losses and their two-stage sum, and the gradients.

Tensors of any strides and broadcast weights are walked by rows and columns: after dimensions are merged, the innermost
is the columns, and the others are found from a row's number. Tensors that share one dense layout are a single row.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.tiles.online_softmax import exact_exp

TILE = 2048
BLOCKS = 32  # of a sum, for each multiprocessor, at most


class Given(NamedTuple):
    """What both kernels read; the weights may be None."""

    x: Any
    t: Any
    w: Any
    p: Any


class Walk(NamedTuple):
    """The rows, their columns, and the sizes of the dimensions that rows number, innermost first."""

    rows: int
    columns: int
    sizes: tuple[int, ...]


@triton.jit
def _times(n, VEC: tl.constexpr):
    """n, a multiple of VEC, so that the compiler sees it; it looks for multiples of 16 alone."""
    return n // VEC * VEC


@triton.jit
def _tile(walk, number, BM: tl.constexpr, BN: tl.constexpr):
    """A tile's rows and columns."""
    across = tl.cdiv(walk.columns, BN)
    row = ((number // across) * BM).to(tl.int64) + tl.arange(0, BM)[:, None]
    return row, ((number % across) * BN).to(tl.int64) + tl.arange(0, BN)[None, :]


@triton.jit
def _at(tensor, steps, walk, row, column, VEC: tl.constexpr):
    """Pointers to a tile's elements, and which exist. steps: the strides, innermost first; None where it is broadcast,
    so that a value that all rows or all columns share is loaded once."""
    inside = tl.full((1, 1), 1, tl.int1)
    where = tensor + tl.full((1, 1), 0, tl.int64)
    if steps[0] is not None:
        where += column * steps[0]
        inside = inside & (column < _times(walk.columns, VEC))
    rest = row
    for d in tl.static_range(len(walk.sizes)):
        if steps[d + 1] is not None:
            step = steps[d + 1]
            if steps[0] is not None:
                step = _times(step, VEC)
            if d + 1 == len(walk.sizes):
                where += rest * step
            else:
                where += (rest % walk.sizes[d]) * step
            inside = inside & (row < walk.rows)
        rest = rest // walk.sizes[d]
    return where, inside


@triton.jit
def _of(tensor, steps, walk, row, column, VEC: tl.constexpr):
    """A tile's elements in float32; 1 if there is no tensor."""
    if tensor is None:
        found = tl.full((1, 1), 1.0, tl.float32)
    else:
        where, inside = _at(tensor, steps, walk, row, column, VEC)
        found = tl.load(where, mask=inside, other=0).to(tl.float32)
    return found


@triton.jit
def _put(tensor, steps, walk, row, column, values, VEC: tl.constexpr):
    where, inside = _at(tensor, steps, walk, row, column, VEC)
    tl.store(where, values.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x, dtype: tl.constexpr):
    """softplus(x), softplus(-x), exp(-|x|). log(1 + e) is a polynomial, within 4e-9 or, in half precision, 1.3e-6."""
    e = exact_exp(-tl.abs(x), dtype)
    if dtype == tl.float32:
        s = tl.div_rn(e, 2.0 + e)  # log(1 + e) = 2 artanh s
        q = s * s
        tail = (((0.14089155 * q + 0.139803041) * q + 0.200124549) * q + 0.333331573) * q
        low = 2.0 * s + 2.0 * s * tail
    else:
        p = (((0.0141405311 * e - 0.0664003178) * e + 0.149222202) * e - 0.235037732) * e + 0.331094284
        low = ((p * e - 0.499869639) * e + 0.999998731) * e
    return tl.where(x > 0, x, 0.0) + low, tl.where(x > 0, 0.0, -x) + low, e


@triton.jit
def _load(given, steps, walk, row, column, VEC: tl.constexpr):
    """A tile's x, t, w and p in float32."""
    x, t = _of(given.x, steps[0], walk, row, column, VEC), _of(given.t, steps[1], walk, row, column, VEC)
    return x, t, _of(given.w, steps[2], walk, row, column, VEC), _of(given.p, steps[3], walk, row, column, VEC)


@triton.jit
def _fwd(
    losses, given, steps, walk, each, SUM: tl.constexpr, VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Each loss, or SUM: one program's sum of `each` adjacent tiles."""
    if PDL:
        gdc_launch_dependents()
    tiles = tl.cdiv(walk.rows, BM) * tl.cdiv(walk.columns, BN)
    begin = tl.program_id(0) * each
    total = tl.zeros((BM, BN), tl.float32)
    for number in range(begin, tl.minimum(begin + each, tiles)):
        row, column = _tile(walk, number, BM, BN)
        x, t, w, p = _load(given, steps, walk, row, column, VEC)
        up, down, _ = _softplus(x, given.x.dtype.element_ty)
        loss = w * ((1.0 - t) * up + p * t * down)  # no term cancels another
        if SUM:
            total += tl.where((row < walk.rows) & (column < walk.columns), loss, 0.0)
        else:
            _put(losses, steps[4], walk, row, column, loss, VEC)
    if SUM:
        tl.store(losses + tl.program_id(0), tl.sum(tl.sum(total.to(tl.float64), 1), 0))


@triton.jit
def _total(loss, parts, count, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Adds the programs' sums, always in the same order."""
    if PDL:
        gdc_wait()
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(parts + at, mask=at < count, other=0.0)
    tl.store(loss, (tl.sum(sums, 0) * scale).to(loss.dtype.element_ty))


@triton.jit
def _bwd(
    dloss, made, given, steps, walk, scale, VEC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """dx = w ((1 - t) sigmoid(x) - p t sigmoid(-x)) dloss, dt = w (p softplus(-x) - softplus(x)) dloss."""
    row, column = _tile(walk, tl.program_id(0), BM, BN)
    x, t, w, p = _load(given, steps, walk, row, column, VEC)
    g = _of(dloss, steps[4], walk, row, column, VEC) * scale * w
    dtype: tl.constexpr = given.x.dtype.element_ty
    up, down, e = _softplus(x, dtype)
    if made.dx is not None:
        near = tl.div_rn(1.0, 1.0 + e) if dtype == tl.float32 else 1.0 / (1.0 + e)
        chance, other = tl.where(x < 0, e * near, near), tl.where(x < 0, near, e * near)  # sigmoid(x), sigmoid(-x)
        _put(made.dx, steps[5], walk, row, column, g * ((1.0 - t) * chance - p * t * other), VEC)
    if made.dt is not None:
        _put(made.dt, steps[6], walk, row, column, g * (p * down - up), VEC)


class Made(NamedTuple):
    """The gradients; None if not wanted."""

    dx: Any
    dt: Any


def _walk(x: torch.Tensor, *others: Any) -> tuple[Walk, tuple[Any, ...]]:
    """Merges the dimensions of tensors of one shape, ordered as x's strides are. Returns each one's strides too."""
    tensors = (x, *others)
    known = [t for t in tensors if t is not None]
    dims = sorted([d for d in range(x.dim()) if x.shape[d] != 1], key=x.stride().__getitem__, reverse=True)
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in known]
    for d in dims:
        strides = [t.stride(d) for t in known]
        if sizes and all([s[-1] == n * x.shape[d] for s, n in zip(steps, strides, strict=True)]):
            sizes[-1] *= x.shape[d]
            for s, n in zip(steps, strides, strict=True):
                s[-1] = n
        else:
            sizes.append(x.shape[d])
            for s, n in zip(steps, strides, strict=True):
                s.append(n)
    if not sizes:
        sizes, steps = [1], [[0] for _ in known]
    found = iter([tuple(n or None for n in reversed(s)) for s in steps])
    walk = Walk(prod(sizes[:-1]), sizes[-1], tuple(reversed(sizes[:-1])))
    return walk, tuple(None if t is None else next(found) for t in tensors)


def _tiling(walk: Walk, steps: tuple[Any, ...]) -> dict[str, Any]:
    """The sides of a tile, and how many elements one load may take: what divides the columns and all outer strides."""
    BN = min(TILE, triton.next_power_of_2(walk.columns))
    outer = [n for s in steps if s and s[0] for n in s[1:] if n]
    vec = next(v for v in (8, 4, 2, 1) if not any(n % v for n in (walk.columns, *outer)))
    return {"BM": min(TILE // BN, triton.next_power_of_2(walk.rows)), "BN": BN, "VEC": vec, "num_warps": 4}


def _tiles(walk: Walk, tile: dict[str, Any]) -> int:
    return triton.cdiv(walk.rows, tile["BM"]) * triton.cdiv(walk.columns, tile["BN"])


def _given(x: torch.Tensor, t: torch.Tensor, w: Any, p: Any) -> Given:
    w, p = (None if v is None else v.expand(x.shape) for v in (w, p))
    return Given(x, t.view(torch.uint8) if t.dtype == torch.bool else t, w, p)


def launch_fwd(loss: torch.Tensor, x: torch.Tensor, t: torch.Tensor, w: Any, p: Any, reduction: str) -> None:
    """Fills the losses, or their mean or sum."""
    if reduction != "none":
        return _launch_sum(loss, _given(x, t, w, p), 1.0 / max(x.numel(), 1) if reduction == "mean" else 1.0)
    given = _given(x, t, w, p)
    walk, steps = _walk(*given, loss)
    tile = _tiling(walk, steps)
    launch(_fwd, (_tiles(walk, tile),), loss, given, steps, walk, 1, SUM=False, PDL=False, **tile)
    return None


def _launch_sum(loss: torch.Tensor, given: Given, scale: float) -> None:
    gpu = device.of(given.x)
    walk, steps = _walk(*given)
    tile = _tiling(walk, steps)
    each = triton.cdiv(_tiles(walk, tile), BLOCKS * gpu.multiprocessors)
    count = triton.cdiv(_tiles(walk, tile), each)
    parts = torch.empty((count,), dtype=torch.float64, device=given.x.device)
    soon = early(gpu)
    launch(_fwd, (count,), parts, given, steps, walk, each, SUM=True, PDL=soon["PDL"], **tile)
    launch(_total, (1,), loss, parts, count, scale, BLOCK=1024, num_warps=4, **soon)


def launch_bwd(
    dx: torch.Tensor, dt: torch.Tensor, x: torch.Tensor, t: torch.Tensor, w: Any, p: Any, dloss: torch.Tensor,
    reduction: str, need: int
) -> None:  # fmt: skip
    """Fills the gradients that `need` names: 1 dx, 2 dt."""
    given, made = _given(x, t, w, p), Made(dx if need & 1 else None, dt if need & 2 else None)
    scale = 1.0 / max(x.numel(), 1) if reduction == "mean" else 1.0
    walk, steps = _walk(*given, dloss.expand(x.shape), *made)
    tile = _tiling(walk, steps)
    launch(_bwd, (_tiles(walk, tile),), dloss, made, given, steps, walk, scale, **tile)
