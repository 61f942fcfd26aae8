"""group_norm in Triton: kernels for groups in registers and for larger ones, and their launchers.

A group is read once if it fits the registers of one program. Otherwise it is read in chunks, twice, the second time
from L2; chunks take the variance around a first guess of the mean. A second kernel adds backward's sums over space, one
per channel and concurrent image, in a fixed order. SiLU is applied as results are stored; backward computes what it was
applied to again, from x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.ops.rowwise._channels import channels_last, planes
from ridgeline.ops.rowwise._rows import ceil, dense, key_of, power
from ridgeline.tiles.activations import silu, silu_slope


class Results(NamedTuple):
    """What forward writes: y, and each group's mean and rstd."""

    y: Any
    mean: Any
    rstd: Any


class Inputs(NamedTuple):
    """What forward reads: images, and each channel's weight and bias."""

    x: Any
    w: Any
    b: Any


class Saved(NamedTuple):
    """What backward has from forward."""

    x: Any
    w: Any
    b: Any
    mean: Any
    rstd: Any


class Shape(NamedTuple):
    """Groups of an image, channels of a group, and positions of a channel."""

    groups: int
    width: int
    size: int


@triton.jit
def _grid(BC: tl.constexpr, BS: tl.constexpr, FAR: tl.constexpr):
    """A tile's channels and positions. FAR: its offsets need 64 bits."""
    c, place = tl.arange(0, BC)[:, None], tl.arange(0, BS)[None, :]
    if FAR:
        c, place = c.to(tl.int64), place.to(tl.int64)
    return c, place


@triton.jit
def _at(tensor, steps, N: tl.constexpr, image, channel, start, c, place):
    """Pointers to a tile that begins at `channel` and `start`.

    steps: strides over images, channels and positions of forward's y and x, or backward's dx, dy and x; N: whose."""
    over, along = steps[3 * N + 1], steps[3 * N + 2]
    return tensor + (image * steps[3 * N] + channel * over + start * along) + (c * over + place * along)


@triton.jit
def _of(parameter, channel, mask, default: tl.constexpr):
    """Each channel's weight or bias in float32, or the default if there is none."""
    if parameter is None:
        found = tl.full((1, 1), default, tl.float32)
    else:
        found = tl.load(parameter + channel, mask=mask, other=0).to(tl.float32)
    return found


@triton.jit
def _before(slope, value, weight, bias, SILU: tl.constexpr, dtype: tl.constexpr):
    """The gradient before the activation, from that after it and the normalised value."""
    if SILU:
        _, rate = silu_slope(value * weight + bias, dtype)
        slope *= rate
    return slope


@triton.jit
def _fwd(
    results, inputs, shape, eps, steps, FAR: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
    SILU: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    image, first = group // shape.groups, group % shape.groups * shape.width
    c, place = _grid(BC, BS, FAR)
    inside, channel = c < shape.width, first + c
    mask, count = inside & (place < shape.size), shape.width * (shape.size * 1.0)
    value = tl.load(_at(inputs.x, steps, 1, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
    middle = tl.sum(value) / count
    off = tl.where(mask, value - middle, 0.0)
    off -= tl.where(mask, tl.sum(off) / count, 0.0)  # the rounding error of the mean
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(off * off) / count + eps))
    tl.store(results.mean + group, middle)
    tl.store(results.rstd + group, scale)
    result = off * scale * _of(inputs.w, channel, inside, 1.0) + _of(inputs.b, channel, inside, 0.0)
    if SILU:
        result = silu(result, results.y.dtype.element_ty)
    tl.store(_at(results.y, steps, 0, image, first, 0, c, place), result.to(results.y.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_wide(
    results, inputs, shape, eps, steps, FAR: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr,
    SILU: tl.constexpr
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    image, first = group // shape.groups, group % shape.groups * shape.width
    c, place = _grid(BC, BS, FAR)
    across, count = tl.cdiv(shape.size, BS), shape.width * (shape.size * 1.0)
    tiles = tl.cdiv(shape.width, BC) * across
    mask = (c < shape.width) & (place < shape.size)
    value = tl.load(_at(inputs.x, steps, 1, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
    guess = tl.sum(value) / tl.sum(mask.to(tl.float32))
    total, square = tl.zeros((BC, BS), tl.float32), tl.zeros((BC, BS), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        c0, s0 = (tile // across * BC).to(tl.int64), (tile % across * BS).to(tl.int64)
        mask = (c0 + c < shape.width) & (s0 + place < shape.size)
        at = _at(inputs.x, steps, 1, image, first + c0, s0, c, place)
        off = tl.where(mask, tl.load(at, mask=mask, other=0, eviction_policy="evict_last").to(tl.float32) - guess, 0.0)
        total += off
        square += off * off
    shift = tl.sum(total) / count
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(tl.sum(square) / count - shift * shift, 0.0) + eps))
    tl.store(results.mean + group, guess + shift)
    tl.store(results.rstd + group, scale)
    for back in tl.range(0, tiles, num_stages=STAGES):  # the newest in the cache first
        tile = tiles - 1 - back
        c0, s0 = (tile // across * BC).to(tl.int64), (tile % across * BS).to(tl.int64)
        channel, inside = first + c0 + c, c0 + c < shape.width
        mask = inside & (s0 + place < shape.size)
        at = _at(inputs.x, steps, 1, image, first + c0, s0, c, place)
        value = tl.load(at, mask=mask, other=0, eviction_policy="evict_first").to(tl.float32)
        result = (value - guess - shift) * scale * _of(inputs.w, channel, inside, 1.0) + _of(
            inputs.b, channel, inside, 0.0
        )
        if SILU:
            result = silu(result, results.y.dtype.element_ty)
        tl.store(
            _at(results.y, steps, 0, image, first + c0, s0, c, place), result.to(results.y.dtype.element_ty), mask=mask
        )


@triton.jit
def _bwd(
    dy,
    dx,
    sums,
    saved,
    images,
    shape,
    steps,
    FAR: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    slot, first = tl.program_id(0) // shape.groups, (tl.program_id(0) % shape.groups).to(tl.int64) * shape.width
    c, place = _grid(BC, BS, FAR)
    inside, channel = c < shape.width, first + c
    mask, count = inside & (place < shape.size), shape.width * (shape.size * 1.0)
    weight, bias = _of(saved.w, channel, inside, 1.0), _of(saved.b, channel, inside, 0.0)
    whole_dw, whole_db = tl.zeros((BC, 1), tl.float32), tl.zeros((BC, 1), tl.float32)
    for turn in tl.range(slot, images, tl.num_programs(0) // shape.groups, num_stages=1):
        image = tl.full((), 0, tl.int64) + turn
        group = image * shape.groups + tl.program_id(0) % shape.groups
        middle, scale = tl.load(saved.mean + group), tl.load(saved.rstd + group)
        value = tl.load(_at(saved.x, steps, 2, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
        slope = tl.load(_at(dy, steps, 1, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
        value = tl.where(mask, (value - middle) * scale, 0.0)
        slope = _before(slope, value, weight, bias, SILU, dy.dtype.element_ty)
        dw, db = tl.sum(slope * value, 1)[:, None], tl.sum(slope, 1)[:, None]
        whole_dw += dw
        whole_db += db
        if dx is not None:
            slant, level = tl.sum(dw * weight) / count, tl.sum(db * weight) / count
            result = scale * (slope * weight - level - value * slant)
            tl.store(_at(dx, steps, 0, image, first, 0, c, place), result.to(dx.dtype.element_ty), mask=mask)
    if sums is not None:
        at = sums + slot.to(tl.int64) * 2 * shape.groups * shape.width + channel
        tl.store(at, whole_dw, mask=inside)
        tl.store(at + shape.groups * shape.width, whole_db, mask=inside)


@triton.jit
def _bwd_wide(
    dy,
    dx,
    sums,
    saved,
    images,
    shape,
    steps,
    FAR: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    slot, first = tl.program_id(0) // shape.groups, (tl.program_id(0) % shape.groups).to(tl.int64) * shape.width
    c, place = _grid(BC, BS, FAR)
    across, count = tl.cdiv(shape.size, BS), shape.width * (shape.size * 1.0)
    tiles = tl.cdiv(shape.width, BC) * across
    for turn in tl.range(slot, images, tl.num_programs(0) // shape.groups, num_stages=1):
        image = tl.full((), 0, tl.int64) + turn
        group = image * shape.groups + tl.program_id(0) % shape.groups
        middle, scale = tl.load(saved.mean + group), tl.load(saved.rstd + group)
        dw, db = tl.zeros((BC, 1), tl.float32), tl.zeros((BC, 1), tl.float32)
        slant, level = tl.zeros((BC, 1), tl.float32), tl.zeros((BC, 1), tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            c0, s0 = (tile // across * BC).to(tl.int64), (tile % across * BS).to(tl.int64)
            channel, inside = first + c0 + c, c0 + c < shape.width
            mask = inside & (s0 + place < shape.size)
            value = tl.load(
                _at(saved.x, steps, 2, image, first + c0, s0, c, place),
                mask=mask,
                other=0,
                eviction_policy="evict_last",
            )
            slope = tl.load(
                _at(dy, steps, 1, image, first + c0, s0, c, place), mask=mask, other=0, eviction_policy="evict_last"
            )
            value, slope = (value.to(tl.float32) - middle) * scale, slope.to(tl.float32)
            weight, bias = _of(saved.w, channel, inside, 1.0), _of(saved.b, channel, inside, 0.0)
            slope = _before(slope, value, weight, bias, SILU, dy.dtype.element_ty)
            some_dw, some_db = tl.sum(slope * value, 1)[:, None], tl.sum(slope, 1)[:, None]
            dw, db = tl.where(s0 == 0, some_dw, dw + some_dw), tl.where(s0 == 0, some_db, db + some_db)
            if sums is not None:  # a channel's last tile adds its sums to those of earlier images
                last, later = inside & (s0 + BS >= shape.size), turn > slot
                at = sums + slot.to(tl.int64) * 2 * shape.groups * shape.width + channel
                tl.store(at, dw + tl.load(at, mask=last & later, other=0), mask=last)
                at += shape.groups * shape.width
                tl.store(at, db + tl.load(at, mask=last & later, other=0), mask=last)
            slant += some_dw * weight
            level += some_db * weight
        if dx is not None:
            along, height = tl.sum(slant) / count, tl.sum(level) / count
            for back in tl.range(0, tiles, num_stages=STAGES):  # the newest in the cache first
                tile = tiles - 1 - back
                c0, s0 = (tile // across * BC).to(tl.int64), (tile % across * BS).to(tl.int64)
                channel, inside = first + c0 + c, c0 + c < shape.width
                mask = inside & (s0 + place < shape.size)
                value = tl.load(
                    _at(saved.x, steps, 2, image, first + c0, s0, c, place),
                    mask=mask,
                    other=0,
                    eviction_policy="evict_first",
                )
                slope = tl.load(
                    _at(dy, steps, 1, image, first + c0, s0, c, place),
                    mask=mask,
                    other=0,
                    eviction_policy="evict_first",
                )
                value, slope = (value.to(tl.float32) - middle) * scale, slope.to(tl.float32)
                weight, bias = _of(saved.w, channel, inside, 1.0), _of(saved.b, channel, inside, 0.0)
                slope = _before(slope, value, weight, bias, SILU, dy.dtype.element_ty)
                result = scale * (slope * weight - height - value * along)
                tl.store(_at(dx, steps, 0, image, first + c0, s0, c, place), result.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_weights(sums, dw, db, slots, channels, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    """Adds up the sums of dy xh and of dy, (slots, 2, channels)."""
    if PDL:
        gdc_wait()
    channel = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    whole_dw, whole_db = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, slots, BM):
        slot = start + tl.arange(0, BM)[:, None]
        mask = (slot < slots) & (channel < channels)
        at = sums + slot.to(tl.int64) * 2 * channels + channel
        whole_dw += tl.load(at, mask=mask, other=0)
        whole_db += tl.load(at + channels, mask=mask, other=0)
    if dw is not None:
        tl.store(dw + channel, tl.sum(whole_dw, 0)[None, :].to(dw.dtype.element_ty), mask=channel < channels)
    if db is not None:
        tl.store(db + channel, tl.sum(whole_db, 0)[None, :].to(db.dtype.element_ty), mask=channel < channels)


# The most elements of a group, its sides rounded up to powers of two, that a block holds in registers: of one input in
# forward, of two in backward.
WHOLE = {1: 16384, 2: 8192}
FAR = 65535  # elements of a step beyond which a tile of 32768 elements may span 2^31


def _launch(
    kernel: Any, wide: Any, x: torch.Tensor, groups: int, grid: int, args: tuple[Any, ...], steps: tuple[Any, ...],
    *facts: float, SILU: bool, **flags: bool
) -> None:  # fmt: skip
    """One program per image (backward: concurrent image) and group, in tiles of BC channels by BS positions."""
    _, channels, size = x.shape
    width, last, dtype, where = channels // groups, channels_last(x), x.dtype, device.of(x)
    bc, bs = power(max(width, 1)), power(max(size, 1))
    inputs, odd = 1 if kernel is _fwd else 2, (width if last else size) % 8 > 0
    whole, heavy = bc * bs <= WHOLE[inputs], SILU and dtype == torch.float32

    def space() -> list[tuning.Config]:
        sizes, stages = ((bc * bs,), (1,)) if whole else ((2048, 4096, 8192, 16384, 32768), (1, 2, 3))
        found = [{"TILE": t, "num_warps": w, "STAGES": s} for t in sizes for w in (1, 2, 4, 8, 16, 32) for s in stages]
        return [
            c
            for c in found
            if c["num_warps"] * where.warp <= 1024 and 4 <= c["TILE"] * inputs // (c["num_warps"] * where.warp) <= 64
        ]

    def rule() -> tuning.Config:
        """16 values per thread.

        Chunks are large, so that few programs fill a multiprocessor and the cache keeps what they read again. They are
        half as large if rows are not aligned, and again for SiLU in float32, which need more registers. Backward adds
        up after each chunk and prefetches the next one meanwhile.
        """
        tile = bc * bs if whole else 16384 // inputs // (1 + odd) // (1 + heavy)
        ahead = not whole and inputs == 2 and where.backend == "cuda"
        return {
            "TILE": tile,
            "num_warps": min(1024 // where.warp, max(1, tile // (16 * where.warp))),
            "STAGES": 1 + ahead,
        }

    def config() -> dict[str, Any]:
        key = key_of(dtype, bc, bs, "last" if last else "first", *["odd"] * odd, *["silu"] * SILU)
        found = dict(tuning.config(where, "group_norm", (kernel if whole else wide).__name__[1:], key, rule, space))
        tile = found.pop("TILE")
        if last:
            return {"BC": min(bc, tile), "BS": min(bs, max(1, tile // bc)), **found}
        return {"BC": min(bc, max(1, tile // bs)), "BS": min(bs, tile), **found}

    far = max(s for n, s in enumerate(steps) if n % 3) > FAR
    chosen, key = kernel if whole else wide, (bc, bs, last, odd, SILU)
    shape = Shape(groups, width, size)
    launch(chosen, (grid,), *args, shape, *facts, steps, config=config, key=key, FAR=far, SILU=SILU, **flags)


def launch_fwd(
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, w: Any, b: Any, groups: int, eps: float,
    silu: bool
) -> None:  # fmt: skip
    x, y = planes(x), planes(y)
    args = Results(y, mean, rstd), Inputs(x, dense(w), dense(b))
    _launch(_fwd, _fwd_wide, x, groups, x.shape[0] * groups, args, (*y.stride(), *x.stride()), eps, SILU=silu)


def slots_of(x: torch.Tensor, need: int) -> tuple[int, torch.Tensor | None, bool]:
    """How many images backward takes at once, room for their sums if wanted, and whether the second kernel is early."""
    images, channels, _ = x.shape
    where = device.of(x)
    slots = min(images, where.multiprocessors)
    if need == 1:
        return slots, None, False
    return slots, torch.empty((slots, 2, channels), dtype=torch.float32, device=x.device), early(where)["PDL"]


def add_up(sums: torch.Tensor | None, dw: Any, db: Any, need: int) -> None:
    if sums is not None:
        slots, _, channels = sums.shape
        dw, db = dw if need & 2 else None, db if need & 4 else None
        launch(
            _bwd_weights,
            (ceil(channels, 32),),
            sums,
            dw,
            db,
            slots,
            channels,
            BM=64,
            BN=32,
            num_warps=4,
            **early(device.of(sums)),
        )


def launch_bwd(
    dx: Any, dw: Any, db: Any, dy: torch.Tensor, x: torch.Tensor, w: Any, b: Any, mean: Any, rstd: Any, groups: int,
    silu: bool, need: int
) -> None:  # fmt: skip
    """need: bit 0 for dx, 1 for dw, 2 for db; the others stay empty."""
    x, dy, dx = planes(x), planes(dy), planes(dx) if need & 1 else None
    slots, sums, pdl = slots_of(x, need)
    # A launch's first argument must be a tensor, and dx may be missing.
    args = dy, dx, sums, Saved(x, dense(w), dense(b) if silu else None, mean, rstd), x.shape[0]
    steps = *(dy if dx is None else dx).stride(), *dy.stride(), *x.stride()
    _launch(_bwd, _bwd_wide, x, groups, slots * groups, args, steps, SILU=silu, PDL=pdl)
    add_up(sums, dw, db, need)
