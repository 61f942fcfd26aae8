"""batch_norm in Triton: statistics of each channel by parts, what they become, and the passes that apply them.

x is (images, channels, positions). A tile has rows of adjacent numbers: 16 bytes of one channel's positions, or in
channels_last memory up to 64 channels of a position. A thread keeps sums of its own numbers over all tiles of a part,
so that nothing waits for other threads before the end. Each part sums around a number near its mean; another kernel
merges the parts' means and squares as in Chan, Golub and LeVeque, 1979.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.rowwise._channels import channels_last, planes

PARTS = 512  # the most parts of a channel
READ, WRITTEN = 2048, 4096  # numbers of a tile, where they are summed and where results are written
BROAD = 256  # the most channels of a row that is written
LIVE = 4  # programs that sum statistics on a multiprocessor at once: one round of them, by their registers


class Shape(NamedTuple):
    """Images, channels, positions of an image, rows, and chunks of channels.

    times, shift: a row's image is the upper 32 bits of row times `times`, shifted right; with one image, 0."""

    images: int
    channels: int
    size: int
    rows: int
    chunks: int
    times: int
    shift: int


class Tile(NamedTuple):
    """ROWS rows of WIDTH positions of one channel, or with LAST of WIDTH channels.

    ALIGNED: all tensors' rows begin at a multiple of it. WIDE: rows are numbered in 64 bits, or each is an image. EVEN:
    no chunk of channels reaches past the last."""

    ROWS: int
    WIDTH: int
    LAST: bool
    ALIGNED: int
    WIDE: bool
    EVEN: bool


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
def _channel(first, TILE: tl.constexpr):
    """The channels of a tile: (WIDTH,) if LAST, else (1,)."""
    many: tl.constexpr = TILE.WIDTH if TILE.LAST else 1
    return first * many + tl.arange(0, many)


@triton.jit
def _rows(block, end, first, shape, TILE: tl.constexpr):
    """Image and position of each row of a tile, its channels, and (ROWS, columns) which exist before row `end`."""
    count: tl.constexpr = TILE.ROWS
    width: tl.constexpr = 1 if TILE.LAST else TILE.WIDTH
    if TILE.WIDE:
        row = tl.cast(block, tl.int64) * count + tl.arange(0, count)
    else:
        row = block * count + tl.arange(0, count)
    image, place = row * 0, row
    if shape.images != 1:
        if TILE.WIDE:
            image = row // (shape.size // width)
        else:
            image = (tl.umulhi(row.to(tl.uint32), tl.cast(shape.times, tl.uint32)) >> shape.shift).to(tl.int32)
        place = row - image * (shape.size // width)
    c = _channel(first, TILE)
    return image.to(tl.int64), place.to(tl.int64) * width, c, (row < end)[:, None] & (c < shape.channels)[None, :]


@triton.jit
def _at(tensor, steps, image, place, first, TILE: tl.constexpr):
    """(ROWS, WIDTH) pointers."""
    width: tl.constexpr = TILE.WIDTH
    aligned: tl.constexpr = TILE.ALIGNED
    across = tl.arange(0, width).to(tl.int64)
    start = image * steps[0] + place * steps[2]
    if TILE.LAST:
        start += first.to(tl.int64) * width * steps[1]
        across = across * steps[1]
    else:
        start += first.to(tl.int64) * steps[1]
        across = across * steps[2]
    return tensor + tl.multiple_of(start, aligned)[:, None] + across[None, :]


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
def _sum(t, TILE: tl.constexpr):
    """Each channel's sum over a tile."""
    down = tl.sum(t, 0)
    if TILE.LAST:
        found = down
    else:
        found = tl.sum(down[None, :], 1)
    return found


@triton.jit
def _part(shape, TILE: tl.constexpr):
    """A program's chunk of channels and part, how many parts there are, its first tile and row, and its last row."""
    first, part = tl.program_id(0) % shape.chunks, tl.program_id(0) // shape.chunks
    parts, rows = tl.num_programs(0) // shape.chunks, shape.rows
    if TILE.WIDE:
        rows = tl.cast(rows, tl.int64)
    each = tl.cdiv(tl.cdiv(rows, TILE.ROWS), parts)
    begin = part * each
    return first, part, parts, begin, tl.minimum((begin + each) * TILE.ROWS, rows)


@triton.jit
def _get(tensor, steps, image, place, first, inside, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """A tile, 0 where there is none. WHOLE: all its rows exist."""
    at = _at(tensor, steps, image, place, first, TILE)
    if WHOLE and TILE.EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=inside, other=0)
    return found


@triton.jit
def _read(x, steps, block, end, first, shape, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """A tile in float32, and which of its numbers exist."""
    image, place, _, inside = _rows(block, end, first, shape, TILE)
    return _get(x, steps, image, place, first, inside, WHOLE, TILE).to(tl.float32), inside


@triton.jit
def _statistics(parts, x, steps, shape, TILE: tl.constexpr):
    """parts (3, P, C) = count, mean and sum of squares around the mean of each part of each channel.

    A part sums x - near and its square, near being the first tile's mean. The variance then keeps its digits, whatever
    the mean: that tile's distance from the part's mean is part of the variance."""
    first, part, several, begin, end = _part(shape, TILE)
    c = _channel(first, TILE)
    each: tl.constexpr = 1 if TILE.LAST else TILE.WIDTH
    value, inside = _read(x, steps, begin, end, first, shape, False, TILE)
    near = _sum(value, TILE) / tl.maximum(tl.minimum(end - begin * TILE.ROWS, TILE.ROWS) * each, 1).to(tl.float32)
    sums, squares = tl.zeros_like(value), tl.zeros_like(value)
    whole = begin + tl.maximum(end // TILE.ROWS - begin, 0) // 4 * 4
    for block in range(begin, whole, 4):
        value, _inside = _read(x, steps, block, end, first, shape, True, TILE)
        value1, _inside = _read(x, steps, block + 1, end, first, shape, True, TILE)
        value2, _inside = _read(x, steps, block + 2, end, first, shape, True, TILE)
        value3, _inside = _read(x, steps, block + 3, end, first, shape, True, TILE)
        off, off1 = value - near[None, :], value1 - near[None, :]
        off2, off3 = value2 - near[None, :], value3 - near[None, :]
        sums += (off + off1) + (off2 + off3)
        squares = off3 * off3 + (off2 * off2 + (off1 * off1 + (off * off + squares)))
    for block in range(whole, tl.cdiv(end, TILE.ROWS)):
        value, inside = _read(x, steps, block, end, first, shape, False, TILE)
        off = value - tl.where(inside, near[None, :], 0.0)
        sums += off
        squares = off * off + squares
    count = tl.maximum(end - begin * TILE.ROWS, 0).to(tl.float32) * each
    apart = _sum(sums, TILE) / tl.maximum(count, 1.0)
    around = tl.maximum(_sum(squares, TILE) - apart * apart * count, 0.0)
    at, plane, known = part * shape.channels + c, several * shape.channels, c < shape.channels
    tl.store(parts + at, tl.zeros_like(apart) + count, mask=known)
    tl.store(parts + plane + at, near + apart, mask=known)
    tl.store(parts + 2 * plane + at, tl.where(apart == apart, around, apart), mask=known)  # NaN stays


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
    off = tl.where(count > 0, some - middle[None, :], 0.0)  # a part of nothing has no mean
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
def _written(shape, TILE: tl.constexpr):
    """A program's chunk of channels and tile. Images come in reverse: L2 still has the last ones from the sums.
    In channels_last memory that is slower."""
    block = tl.program_id(0) // shape.chunks
    if not TILE.LAST:
        block = tl.num_programs(0) // shape.chunks - 1 - block
    return tl.program_id(0) % shape.chunks, block


@triton.jit
def _apply(y, x, add, given, steps, shape, RULES: tl.constexpr, TILE: tl.constexpr):
    """y = relu((x - mean) rstd w + b + add), without what is not asked for. steps: of y, x and add."""
    first, block = _written(shape, TILE)
    image, place, c, inside = _rows(block, shape.rows, first, shape, TILE)
    mean, rstd, w, bias = _affine(given, c, shape, RULES)
    value = tl.load(_at(x, steps[1], image, place, first, TILE), mask=inside, other=0).to(tl.float32)
    value = (value - mean[None, :]) * (rstd * w)[None, :] + bias[None, :]
    if add is not None:
        value += tl.load(_at(add, steps[2], image, place, first, TILE), mask=inside, other=0).to(tl.float32)
    if RULES.RELU:
        value = tl.where(value > 0, value, tl.where(value != value, value, 0.0))  # NaN stays
    tl.store(_at(y, steps[0], image, place, first, TILE), value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(dy, y, steps, image, place, first, inside, RULES: tl.constexpr, TILE: tl.constexpr):
    """dy, or 0 where relu cut y off."""
    g = tl.load(_at(dy, steps[0], image, place, first, TILE), mask=inside, other=0).to(tl.float32)
    if RULES.RELU:
        kept = tl.load(_at(y, steps[2], image, place, first, TILE), mask=inside, other=0)
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
def _sums(parts, to, dy, x, y, given, steps, shape, RULES: tl.constexpr, TILE: tl.constexpr):
    """parts (2, P, C) = each part's sums of g and of g xh, for the gradient g before relu. steps: of dy, x and y.

    to: dw and db if there is one part."""
    first, part, several, begin, end = _part(shape, TILE)
    c = _channel(first, TILE)
    mean, rstd, _, _ = _affine(given, c, shape, RULES)
    image, place, _, inside = _rows(begin, end, first, shape, TILE)
    of_g = tl.zeros(_at(x, steps[1], image, place, first, TILE).shape, tl.float32)
    of_product = of_g
    for block in range(begin, tl.cdiv(end, TILE.ROWS), 2):
        image, place, _, inside = _rows(block, end, first, shape, TILE)
        image1, place1, _, inside1 = _rows(block + 1, end, first, shape, TILE)
        value = tl.load(_at(x, steps[1], image, place, first, TILE), mask=inside, other=0)
        value1 = tl.load(_at(x, steps[1], image1, place1, first, TILE), mask=inside1, other=0)
        g = _gradient(dy, y, steps, image, place, first, inside, RULES, TILE)
        g1 = _gradient(dy, y, steps, image1, place1, first, inside1, RULES, TILE)
        of_g += g + g1
        off, off1 = value.to(tl.float32) - mean[None, :], value1.to(tl.float32) - mean[None, :]
        of_product = g1 * off1 + (g * off + of_product)
    g, product = _sum(of_g, TILE), _sum(of_product, TILE) * rstd
    at, known = part * shape.channels + c, c < shape.channels
    tl.store(parts + at, g, mask=known)
    tl.store(parts + several * shape.channels + at, product, mask=known)
    _write(to, c, known, product, g)


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
def _spread(dy, to, x, y, sums, given, steps, shape, RULES: tl.constexpr, TILE: tl.constexpr):
    """dx = rstd w (g - mean(g) - xh mean(g xh)), or rstd w g if EVAL; dadd = g. steps: of dy, x, y, dx and dadd."""
    first, block = _written(shape, TILE)
    image, place, c, inside = _rows(block, shape.rows, first, shape, TILE)
    g = _gradient(dy, y, steps, image, place, first, inside, RULES, TILE)
    if to.dadd is not None:
        at = _at(to.dadd, steps[4], image, place, first, TILE)
        tl.store(at, g.to(to.dadd.dtype.element_ty), mask=inside)
    if to.dx is not None:
        mean, rstd, w, _ = _affine(given, c, shape, RULES)
        if not RULES.EVAL:
            number = shape.images * (shape.size * 1.0)
            value = tl.load(_at(x, steps[1], image, place, first, TILE), mask=inside, other=0).to(tl.float32)
            of_g = _of(sums, c, shape, 0.0) / number
            of_product = rstd * (_of(sums + shape.channels, c, shape, 0.0) / number)
            g -= of_g[None, :] + (value - mean[None, :]) * of_product[None, :]
        at = _at(to.dx, steps[3], image, place, first, TILE)
        tl.store(at, (g * (rstd * w)[None, :]).to(to.dx.dtype.element_ty), mask=inside)


class Plan(NamedTuple):
    """How tensors are cut into tiles, to be summed and to be written, and in how many parts a channel is summed."""

    shape: Shape
    read: Tile
    written: Tile
    parts: int
    warps: int


def _aligned(x: torch.Tensor, last: bool, tensors: tuple[torch.Tensor, ...]) -> int:
    """The largest power of two, of at most 16 bytes, that divides where rows of all tensors begin."""
    sizes = x.shape
    adjacent, others = (1, (0, 2)) if last else (2, (0, 1))
    width = 16 // x.element_size() if last else math.gcd(16 // x.element_size(), sizes[2])
    for t in tensors:
        if sizes[adjacent] > 1 and t.stride(adjacent) != 1:
            return 1
        width = math.gcd(width, *(t.stride(d) for d in others if sizes[d] > 1))
    return width


def _divided(by: int) -> tuple[int, int]:
    """Returns what divides a number of 31 bits by one above 1: the upper 32 bits of its product with the first, shifted
    right by the second. Source: Granlund and Montgomery, 1994."""
    bits = max(1, (by - 1).bit_length())
    return min((1 << 31 + bits) // by + 1, (1 << 32) - 1), bits - 1


def plan(x: torch.Tensor, *others: Any, live: int = LIVE) -> Plan:
    """x: (images, channels, positions). others: tensors of its shape that are read or written with it, or None."""
    B, C, S = x.shape
    tensors = x, *(t for t in others if t is not None)
    last = channels_last(x)
    aligned = _aligned(x, last, tensors)
    if last and all(t.stride(0) == S * t.stride(2) for t in tensors):
        B, S = 1, B * S  # positions of all images follow each other
    width, broad = (min(triton.next_power_of_2(C), most) if last else aligned for most in (64, BROAD))
    chunks, rows = triton.cdiv(C, width) if last else C, B * S // (1 if last else width)
    gpu = device.of(x)
    sizes = (READ, WRITTEN) if gpu.backend != "cpu" else (256, 512)  # the interpreter adds rows up one by one
    each = 1 if last else width
    wide = max(rows + (PARTS + 4) * max(sizes), S) >= 2**31 or S == each
    read, written = [
        Tile(max(1, n // across), across, last, aligned, wide, not last or C % across == 0)
        for n, across in zip(sizes, (width, broad), strict=True)
    ]
    most = live * gpu.multiprocessors // max(1, chunks)
    parts = max(1, min(triton.cdiv(rows, 4 * read.ROWS), most, PARTS))
    return Plan(Shape(B, C, S, rows, chunks, *_divided(S // each)), read, written, parts, 256 // gpu.warp)


def _sum_by_parts(plan: Plan, kernel: Any, *args: Any, **facts: Any) -> None:
    grid = (plan.shape.chunks * plan.parts,)
    launch(kernel, grid, *args, plan.shape, TILE=plan.read, num_warps=plan.warps, **facts)


def _pass(plan: Plan, kernel: Any, *args: Any, **facts: Any) -> None:
    chunks = triton.cdiv(plan.shape.channels, plan.written.WIDTH) if plan.written.LAST else plan.shape.channels
    grid = (chunks * triton.cdiv(plan.shape.rows, plan.written.ROWS),)
    launch(kernel, grid, *args, plan.shape._replace(chunks=chunks), TILE=plan.written, num_warps=plan.warps, **facts)


def _merging(plan: Plan) -> dict[str, Any]:
    """The tile of the kernels that merge parts: all parts of some channels."""
    p = triton.next_power_of_2(plan.parts)
    return {"P": p, "BC": max(1, min(32, 4096 // p))}


def _each(plan: Plan, tile: dict[str, Any]) -> tuple[int]:
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
    cut = plan(x, to, add)
    w, b, moved_mean, moved_var = _adjacent(w, b, running_mean, running_var)
    if training:
        merging = _merging(cut)
        parts = torch.empty((3, cut.parts, cut.shape.channels), dtype=torch.float32, device=x.device)
        _sum_by_parts(cut, _statistics, parts, x, x.stride())
        facts = Affine(moved_mean, moved_var, None, None, 0.0), parts, cut.shape, eps, momentum, cut.parts
        launch(_settle, _each(cut, merging), mean, rstd, *facts, **merging)
        for own, moved in ((running_mean, moved_mean), (running_var, moved_var)):
            if own is not moved:
                own.copy_(moved)
    given = Affine(mean, rstd, w, b, eps) if training else Affine(moved_mean, moved_var, w, b, eps)
    steps = to.stride(), x.stride(), None if add is None else add.stride()
    _pass(cut, _apply, to, x, add, given, steps, RULES=Rules(relu, not training))


def launch_bwd(
    dx: Any, dw: Any, db: Any, dadd: Any, dy: torch.Tensor, x: torch.Tensor, y: Any, mean: Any, spread: Any, w: Any,
    training: bool, eps: float, need: int
) -> None:  # fmt: skip
    """Fills the gradients that `need` names, others being None: 1 dx, 2 dw, 4 db, 8 dadd. y: of relu, else None."""
    x, dy, y = planes(x), planes(dy), None if y is None else planes(y)
    made = Gradients(None if dx is None else planes(dx), None if dadd is None else planes(dadd))
    # Gradients' sums take more registers in channels_last memory.
    cut, rules = plan(x, dy, y, *made, live=3 if channels_last(x) else LIVE), Rules(y is not None, not training)
    mean, spread, w = _adjacent(mean, spread, w)
    given = Affine(mean, spread, w, None, eps)
    steps = (dy.stride(), x.stride(), None if y is None else y.stride())
    sums = None
    if need & 6 or (need & 1 and training):
        several, merging, to = cut.parts > 1, _merging(cut), Sums(dw, db)
        room = torch.empty((2 * (cut.parts + several), cut.shape.channels), dtype=torch.float32, device=x.device)
        sums, parts = room[:2], room[2 * several :]  # of a single part they are the same
        first = Sums(None, None) if several else to
        _sum_by_parts(cut, _sums, parts, first, dy, x, y, given, steps, RULES=rules)
        if several:
            launch(_total, _each(cut, merging), sums, to, parts, cut.shape, cut.parts, **merging)
    if need & 9:
        steps = (*steps, *(None if t is None else t.stride() for t in made))
        _pass(cut, _spread, dy, made, x, y, sums, given, steps, RULES=rules)
