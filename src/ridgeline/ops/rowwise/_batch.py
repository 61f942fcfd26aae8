"""batch_norm in Triton: statistics of each channel by parts, what they become, and the passes that apply them.

x is (images, channels, positions) with any strides, so NCHW and channels_last are one kernel: a tile has some images,
some positions and some channels, of which one dimension is long and adjacent in memory. A program merges its tiles'
means and squares as in Chan, Golub and LeVeque, 1979; a second kernel merges the parts, all at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.rowwise._channels import channels_last, planes

PARTS = 512  # the most parts of a channel
ELEMENTS = 4096  # of a tile


class Shape(NamedTuple):
    """Images, channels, and positions of an image."""

    images: int
    channels: int
    size: int


class Affine(NamedTuple):
    """What x is normalised by, per channel: spread is 1 / sqrt(variance + eps), or the variance if EVAL."""

    mean: Any
    spread: Any
    w: Any
    b: Any
    eps: float


class Rules(NamedTuple):
    """What the compiler knows."""

    RELU: bool
    EVAL: bool


@triton.jit
def _block(block, first, shape, BB: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr):
    """The images, positions and channels of a tile, and which of them exist."""
    across = tl.cdiv(shape.size, BS)
    b = (block // across * BB + tl.arange(0, BB)).to(tl.int64)[:, None, None]
    s = (block % across * BS + tl.arange(0, BS)).to(tl.int64)[None, :, None]
    c = (first * BC + tl.arange(0, BC)).to(tl.int64)[None, None, :]
    return b, s, c, (b < shape.images) & (s < shape.size) & (c < shape.channels)


@triton.jit
def _at(tensor, steps, b, s, c):
    return tensor + b * steps[0] + c * steps[1] + s * steps[2]


@triton.jit
def _of(parameter, c, shape, default: tl.constexpr):
    """Each channel's number in float32, or the default if there are none."""
    if parameter is None:
        found = tl.full(c.shape, default, tl.float32)
    else:
        found = tl.load(parameter + c, mask=c < shape.channels, other=0).to(tl.float32)
    return found


@triton.jit
def _affine(given, c, shape, RULES: tl.constexpr):
    """Each channel's mean, 1 / sqrt(variance + eps), weight and bias."""
    rstd = _of(given.spread, c, shape, 1.0)
    if RULES.EVAL:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(rstd + given.eps))
    return _of(given.mean, c, shape, 0.0), rstd, _of(given.w, c, shape, 1.0), _of(given.b, c, shape, 0.0)


@triton.jit
def _sum(t):
    return tl.sum(tl.sum(t, 0), 0)


@triton.jit
def _statistics(parts, x, steps, shape, BB: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr):
    """parts (3, P, C) = count, mean and sum of squares around the mean of each part of each channel."""
    blocks = tl.cdiv(shape.images, BB) * tl.cdiv(shape.size, BS)
    each = tl.cdiv(blocks, tl.num_programs(1))
    begin = tl.program_id(1) * each
    count = tl.zeros((BC,), tl.float32)
    mean, squares = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for block in range(begin, tl.minimum(begin + each, blocks)):
        b, s, c, inside = _block(block, tl.program_id(0), shape, BB, BS, BC)
        value = tl.load(_at(x, steps, b, s, c), mask=inside, other=0).to(tl.float32)
        new = _sum(inside.to(tl.float32))
        some = tl.maximum(new, 1.0)
        middle = _sum(value) / some
        off = tl.where(inside, value - middle[None, None, :], 0.0)
        total = tl.maximum(count + new, 1.0)
        delta = tl.where(new > 0, middle - mean, 0.0)
        squares += _sum(off * off) + delta * delta * (count * new / total)
        mean += delta * (new / total)
        count += new
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    at = tl.program_id(1) * shape.channels + channel
    plane = tl.num_programs(1) * shape.channels
    known = channel < shape.channels
    tl.store(parts + at, count, mask=known)
    tl.store(parts + plane + at, mean, mask=known)
    tl.store(parts + 2 * plane + at, squares, mask=known)


@triton.jit
def _settle(mean, rstd, running, parts, shape, eps, momentum, COUNT, P: tl.constexpr, BC: tl.constexpr):
    """Merges COUNT parts into each channel's mean and rstd, and moves the running mean and variance towards them."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    part = tl.arange(0, P)[:, None]
    known = (part < COUNT) & (c < shape.channels)[None, :]
    at = part * shape.channels + c[None, :]
    plane = COUNT * shape.channels
    count = tl.load(parts + at, mask=known, other=0.0)
    some = tl.load(parts + plane + at, mask=known, other=0.0)
    squares = tl.load(parts + 2 * plane + at, mask=known, other=0.0)
    number = shape.images * (shape.size * 1.0)
    middle = tl.sum(some * count, 0) / number
    off = some - middle[None, :]
    total = tl.sum(squares + off * off * count, 0)
    inside = c < shape.channels
    tl.store(mean + c, middle, mask=inside)
    tl.store(rstd + c, tl.div_rn(1.0, tl.sqrt_rn(total / number + eps)), mask=inside)
    if running.mean is not None:
        old = tl.load(running.mean + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(running.mean + c, (old + momentum * (middle - old)).to(running.mean.dtype.element_ty), mask=inside)
    if running.spread is not None:
        old = tl.load(running.spread + c, mask=inside, other=0.0).to(tl.float32)
        unbiased = total / tl.maximum(number - 1.0, 1.0)
        tl.store(
            running.spread + c, (old + momentum * (unbiased - old)).to(running.spread.dtype.element_ty), mask=inside
        )


@triton.jit
def _apply(y, x, add, given, steps, shape, RULES: tl.constexpr, BB: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr):
    """y = relu((x - mean) rstd w + b + add), without what is not asked for. steps: of y, x and add."""
    b, s, c, inside = _block(tl.program_id(1), tl.program_id(0), shape, BB, BS, BC)
    mean, rstd, w, bias = _affine(given, c, shape, RULES)
    value = tl.load(_at(x, steps[1], b, s, c), mask=inside, other=0).to(tl.float32)
    value = (value - mean) * (rstd * w) + bias
    if add is not None:
        value += tl.load(_at(add, steps[2], b, s, c), mask=inside, other=0).to(tl.float32)
    if RULES.RELU:
        value = tl.where(value > 0, value, tl.where(value != value, value, 0.0))  # NaN stays
    tl.store(_at(y, steps[0], b, s, c), value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(dy, y, steps, b, s, c, inside, RULES: tl.constexpr):
    """dy, or 0 where relu cut y off."""
    g = tl.load(_at(dy, steps[0], b, s, c), mask=inside, other=0).to(tl.float32)
    if RULES.RELU:
        kept = tl.load(_at(y, steps[2], b, s, c), mask=inside, other=0)
        g = tl.where(kept <= 0, 0.0, g)  # as torch: NaN passes
    return g


class Sums(NamedTuple):
    """The gradients of weight and bias; None if they are not asked for, or if another kernel writes them."""

    dw: Any
    db: Any


@triton.jit
def _write(to, c, inside, of_product, of_g):
    """dw = the sums of g xh, db = those of g."""
    if to.dw is not None:
        tl.store(to.dw + c, of_product.to(to.dw.dtype.element_ty), mask=inside)
    if to.db is not None:
        tl.store(to.db + c, of_g.to(to.db.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    parts, to, dy, x, y, given, steps, shape, RULES: tl.constexpr, BB: tl.constexpr, BS: tl.constexpr,
    BC: tl.constexpr
):  # fmt: skip
    """parts (2, P, C) = each part's sums of g and of g xh, for the gradient g before relu. steps: of dy, x and y.

    to: dw and db if there is one part."""
    blocks = tl.cdiv(shape.images, BB) * tl.cdiv(shape.size, BS)
    each = tl.cdiv(blocks, tl.num_programs(1))
    begin = tl.program_id(1) * each
    of_g, of_product = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for block in range(begin, tl.minimum(begin + each, blocks)):
        b, s, c, inside = _block(block, tl.program_id(0), shape, BB, BS, BC)
        g = _gradient(dy, y, steps, b, s, c, inside, RULES)
        mean, rstd, _, _ = _affine(given, c, shape, RULES)
        value = tl.load(_at(x, steps[1], b, s, c), mask=inside, other=0).to(tl.float32)
        off = tl.where(inside, (value - mean) * rstd, 0.0)
        of_g += _sum(g)
        of_product += _sum(g * off)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    at = tl.program_id(1) * shape.channels + channel
    known = channel < shape.channels
    tl.store(parts + at, of_g, mask=known)
    tl.store(parts + tl.num_programs(1) * shape.channels + at, of_product, mask=known)
    _write(to, channel, known, of_product, of_g)


@triton.jit
def _total(sums, to, parts, shape, COUNT, P: tl.constexpr, BC: tl.constexpr):
    """sums (2, C) = the sums of g and of g xh over all parts, which are db and dw too."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    part = tl.arange(0, P)[:, None]
    inside = c < shape.channels
    known = (part < COUNT) & inside[None, :]
    at = part * shape.channels + c[None, :]
    of_g = tl.sum(tl.load(parts + at, mask=known, other=0.0), 0)
    of_product = tl.sum(tl.load(parts + COUNT * shape.channels + at, mask=known, other=0.0), 0)
    tl.store(sums + c, of_g, mask=inside)
    tl.store(sums + shape.channels + c, of_product, mask=inside)
    _write(to, c, inside, of_product, of_g)


class Gradients(NamedTuple):
    """What the last pass of backward writes; None if it is not asked for."""

    dx: Any
    dadd: Any


@triton.jit
def _spread(
    dy, to, x, y, sums, given, steps, shape, RULES: tl.constexpr, BB: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr
):
    """dx = rstd w (g - mean(g) - xh mean(g xh)), or rstd w g if EVAL; dadd = g. steps: of dy, x, y, dx and dadd."""
    b, s, c, inside = _block(tl.program_id(1), tl.program_id(0), shape, BB, BS, BC)
    g = _gradient(dy, y, steps, b, s, c, inside, RULES)
    if to.dadd is not None:
        tl.store(_at(to.dadd, steps[4], b, s, c), g.to(to.dadd.dtype.element_ty), mask=inside)
    if to.dx is not None:
        mean, rstd, w, _ = _affine(given, c, shape, RULES)
        if not RULES.EVAL:
            number = shape.images * (shape.size * 1.0)
            value = tl.load(_at(x, steps[1], b, s, c), mask=inside, other=0).to(tl.float32)
            off = (value - mean) * rstd
            g -= _of(sums, c, shape, 0.0) / number + off * (_of(sums + shape.channels, c, shape, 0.0) / number)
        tl.store(_at(to.dx, steps[3], b, s, c), (g * (rstd * w)).to(to.dx.dtype.element_ty), mask=inside)


class Plan(NamedTuple):
    """How a tensor is cut into tiles: their sizes, how many there are, and in how many parts a channel is read."""

    shape: Shape
    tile: dict[str, Any]
    chunks: int  # of channels
    blocks: int  # of images and positions
    parts: int


def plan(x: torch.Tensor) -> Plan:
    """x: (images, channels, positions)."""
    B, C, S = x.shape
    up = triton.next_power_of_2
    bc = min(up(C), 64) if channels_last(x) else 1
    bs = min(up(S), ELEMENTS // bc if bc > 1 else 1024)
    bb = max(1, min(up(B), ELEMENTS // (bc * bs)))
    chunks, blocks = triton.cdiv(C, bc), triton.cdiv(B, bb) * triton.cdiv(S, bs)
    gpu = device.of(x)
    programs = 4 * gpu.multiprocessors
    parts = max(1, min(blocks, triton.cdiv(programs, max(1, chunks)), PARTS))
    return Plan(Shape(B, C, S), {"BB": bb, "BS": bs, "BC": bc, "num_warps": 256 // gpu.warp}, chunks, blocks, parts)


def _merging(plan: Plan) -> dict[str, Any]:
    """The tile of the kernels that merge parts: all parts of some channels."""
    p = triton.next_power_of_2(plan.parts)
    return {"P": p, "BC": max(1, min(32, ELEMENTS // p))}


def _rows(plan: Plan, tile: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(plan.shape.channels, tile["BC"]),)


def _adjacent(*parameters: Any) -> Any:
    """Numbers per channel as kernels take them: contiguous."""
    return tuple(None if t is None else t.contiguous() for t in parameters)


def launch_fwd(
    y: torch.Tensor, mean: Any, rstd: Any, x: torch.Tensor, running_mean: Any, running_var: Any, w: Any, b: Any,
    add: Any, training: bool, momentum: float, eps: float, relu: bool
) -> None:  # fmt: skip
    """Fills y, and in training mean and rstd (C,); moves the running statistics."""
    x, to, add = planes(x), planes(y), None if add is None else planes(add)
    cut = plan(x)
    w, b, moved_mean, moved_var = _adjacent(w, b, running_mean, running_var)
    if training:
        merging = _merging(cut)
        parts = torch.empty((3, cut.parts, cut.shape.channels), dtype=torch.float32, device=x.device)
        launch(_statistics, (cut.chunks, cut.parts), parts, x, x.stride(), cut.shape, **cut.tile)
        facts = Affine(moved_mean, moved_var, None, None, 0.0), parts, cut.shape, eps, momentum, cut.parts
        launch(_settle, _rows(cut, merging), mean, rstd, *facts, **merging)
        for own, moved in ((running_mean, moved_mean), (running_var, moved_var)):
            if own is not moved:
                own.copy_(moved)
    given = Affine(mean, rstd, w, b, eps) if training else Affine(moved_mean, moved_var, w, b, eps)
    steps = to.stride(), x.stride(), None if add is None else add.stride()
    rules = Rules(relu, not training)
    launch(_apply, (cut.chunks, cut.blocks), to, x, add, given, steps, cut.shape, RULES=rules, **cut.tile)


def launch_bwd(
    dx: Any, dw: Any, db: Any, dadd: Any, dy: torch.Tensor, x: torch.Tensor, y: Any, mean: Any, spread: Any, w: Any,
    training: bool, eps: float, need: int
) -> None:  # fmt: skip
    """Fills the gradients that `need` names, others being None: 1 dx, 2 dw, 4 db, 8 dadd. y: of relu, else None."""
    x, dy, y = planes(x), planes(dy), None if y is None else planes(y)
    cut, rules = plan(x), Rules(y is not None, not training)
    mean, spread, w = _adjacent(mean, spread, w)
    given = Affine(mean, spread, w, None, eps)
    steps = (dy.stride(), x.stride(), None if y is None else y.stride())
    sums = None
    if need & 6 or (need & 1 and training):
        several, merging, to = cut.parts > 1, _merging(cut), Sums(dw, db)
        room = torch.empty((2 * (cut.parts + several), cut.shape.channels), dtype=torch.float32, device=x.device)
        sums, parts = room[:2], room[2 * several :]  # of a single part they are the same
        first = Sums(None, None) if several else to
        launch(_sums, (cut.chunks, cut.parts), parts, first, dy, x, y, given, steps, cut.shape, RULES=rules, **cut.tile)
        if several:
            launch(_total, _rows(cut, merging), sums, to, parts, cut.shape, cut.parts, **merging)
    made = Gradients(None if dx is None else planes(dx), None if dadd is None else planes(dadd))
    if need & 9:
        steps = (*steps, *(None if t is None else t.stride() for t in made))
        grid = cut.chunks, cut.blocks
        launch(_spread, grid, dy, made, x, y, sums, given, steps, cut.shape, RULES=rules, **cut.tile)
