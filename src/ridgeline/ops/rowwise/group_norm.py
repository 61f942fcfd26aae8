"""group_norm: y = (x - mean) rstd w + b, with mean and rstd = 1 / sqrt(variance + eps) per image and group of channels.

    backward, xh = (x - mean) rstd, means over the group:  dx = rstd (w dy - mean(w dy) - xh mean(w dy xh))
    dw = sum of dy xh, db = sum of dy, over images and space

A group is read once if it fits the registers of one program, or the shared memory of a thread-block cluster
(group_norm.cu). Otherwise it is read in chunks, twice, the second time from L2. Backward's sums over space, one per
channel and concurrent image, are added by a second kernel in a fixed order. The floor is one read of x and one write of
y; backward reads dy and x and writes dx.
Source: Wu and He, Group Normalization, 2018 (arXiv:1803.08494). Chunks take the variance around a first guess of the
mean; clusters merge their parts' as in Chan, Golub and LeVeque, 1979.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, early, first_order, kernel_op, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.rowwise._norms import known_eps
from ridgeline.ops.rowwise._rows import ceil, key_of, power
from ridgeline.select import eager, run


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
    mean: Any
    rstd: Any


class Shape(NamedTuple):
    """Groups of an image, channels of a group, and positions of a channel."""

    groups: int
    width: int
    size: int


class Steps(NamedTuple):
    """The strides, over images, channels and positions, of what forward writes and reads."""

    y: Any
    x: Any


class BackwardSteps(NamedTuple):
    """The same of backward."""

    dx: Any
    dy: Any
    x: Any


@triton.jit
def _grid(BC: tl.constexpr, BS: tl.constexpr, FAR: tl.constexpr):
    """A tile's channels and positions. FAR: its offsets need 64 bits."""
    c, place = tl.arange(0, BC)[:, None], tl.arange(0, BS)[None, :]
    if FAR:
        c, place = c.to(tl.int64), place.to(tl.int64)
    return c, place


@triton.jit
def _at(tensor, steps, image, channel, start, c, place):
    """Pointers to a tile that begins at `channel` and `start`."""
    return tensor + (image * steps[0] + channel * steps[1] + start * steps[2]) + (c * steps[1] + place * steps[2])


@triton.jit
def _of(parameter, channel, mask, default: tl.constexpr):
    """Each channel's weight or bias in float32, or the default if there is none."""
    if parameter is None:
        found = tl.full((1, 1), default, tl.float32)
    else:
        found = tl.load(parameter + channel, mask=mask, other=0).to(tl.float32)
    return found


@triton.jit
def _fwd(
    results, inputs, shape, eps, steps, FAR: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64)
    image, first = group // shape.groups, group % shape.groups * shape.width
    c, place = _grid(BC, BS, FAR)
    inside, channel = c < shape.width, first + c
    mask, count = inside & (place < shape.size), shape.width * (shape.size * 1.0)
    value = tl.load(_at(inputs.x, steps.x, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
    middle = tl.sum(value) / count
    off = tl.where(mask, value - middle, 0.0)
    off -= tl.where(mask, tl.sum(off) / count, 0.0)  # the rounding error of the mean
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(off * off) / count + eps))
    tl.store(results.mean + group, middle)
    tl.store(results.rstd + group, scale)
    result = off * scale * _of(inputs.w, channel, inside, 1.0) + _of(inputs.b, channel, inside, 0.0)
    tl.store(_at(results.y, steps.y, image, first, 0, c, place), result.to(results.y.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_wide(
    results, inputs, shape, eps, steps, FAR: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, STAGES: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64)
    image, first = group // shape.groups, group % shape.groups * shape.width
    c, place = _grid(BC, BS, FAR)
    across, count = tl.cdiv(shape.size, BS), shape.width * (shape.size * 1.0)
    tiles = tl.cdiv(shape.width, BC) * across
    mask = (c < shape.width) & (place < shape.size)
    value = tl.load(_at(inputs.x, steps.x, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
    guess = tl.sum(value) / tl.sum(mask.to(tl.float32))
    total, square = tl.zeros((BC, BS), tl.float32), tl.zeros((BC, BS), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        c0, s0 = (tile // across * BC).to(tl.int64), (tile % across * BS).to(tl.int64)
        mask = (c0 + c < shape.width) & (s0 + place < shape.size)
        at = _at(inputs.x, steps.x, image, first + c0, s0, c, place)
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
        at = _at(inputs.x, steps.x, image, first + c0, s0, c, place)
        value = tl.load(at, mask=mask, other=0, eviction_policy="evict_first").to(tl.float32)
        result = (value - guess - shift) * scale * _of(inputs.w, channel, inside, 1.0) + _of(
            inputs.b, channel, inside, 0.0
        )
        tl.store(
            _at(results.y, steps.y, image, first + c0, s0, c, place), result.to(results.y.dtype.element_ty), mask=mask
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
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    slot, first = tl.program_id(0) // shape.groups, (tl.program_id(0) % shape.groups).to(tl.int64) * shape.width
    c, place = _grid(BC, BS, FAR)
    inside, channel = c < shape.width, first + c
    mask, count = inside & (place < shape.size), shape.width * (shape.size * 1.0)
    weight = _of(saved.w, channel, inside, 1.0)
    whole_dw, whole_db = tl.zeros((BC, 1), tl.float32), tl.zeros((BC, 1), tl.float32)
    for turn in tl.range(slot, images, tl.num_programs(0) // shape.groups, num_stages=1):
        image = tl.full((), 0, tl.int64) + turn
        group = image * shape.groups + tl.program_id(0) % shape.groups
        middle, scale = tl.load(saved.mean + group), tl.load(saved.rstd + group)
        value = tl.load(_at(saved.x, steps.x, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
        slope = tl.load(_at(dy, steps.dy, image, first, 0, c, place), mask=mask, other=0).to(tl.float32)
        value = tl.where(mask, (value - middle) * scale, 0.0)
        dw, db = tl.sum(slope * value, 1)[:, None], tl.sum(slope, 1)[:, None]
        whole_dw += dw
        whole_db += db
        if dx is not None:
            slant, level = tl.sum(dw * weight) / count, tl.sum(db * weight) / count
            result = scale * (slope * weight - level - value * slant)
            tl.store(_at(dx, steps.dx, image, first, 0, c, place), result.to(dx.dtype.element_ty), mask=mask)
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
                _at(saved.x, steps.x, image, first + c0, s0, c, place), mask=mask, other=0, eviction_policy="evict_last"
            )
            slope = tl.load(
                _at(dy, steps.dy, image, first + c0, s0, c, place), mask=mask, other=0, eviction_policy="evict_last"
            )
            value, slope = (value.to(tl.float32) - middle) * scale, slope.to(tl.float32)
            some_dw, some_db = tl.sum(slope * value, 1)[:, None], tl.sum(slope, 1)[:, None]
            dw, db = tl.where(s0 == 0, some_dw, dw + some_dw), tl.where(s0 == 0, some_db, db + some_db)
            if sums is not None:  # a channel's last tile adds its sums to those of earlier images
                last, later = inside & (s0 + BS >= shape.size), turn > slot
                at = sums + slot.to(tl.int64) * 2 * shape.groups * shape.width + channel
                tl.store(at, dw + tl.load(at, mask=last & later, other=0), mask=last)
                at += shape.groups * shape.width
                tl.store(at, db + tl.load(at, mask=last & later, other=0), mask=last)
            weight = _of(saved.w, channel, inside, 1.0)
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
                    _at(saved.x, steps.x, image, first + c0, s0, c, place),
                    mask=mask,
                    other=0,
                    eviction_policy="evict_first",
                )
                slope = tl.load(
                    _at(dy, steps.dy, image, first + c0, s0, c, place),
                    mask=mask,
                    other=0,
                    eviction_policy="evict_first",
                )
                value = (value.to(tl.float32) - middle) * scale
                result = scale * (slope.to(tl.float32) * _of(saved.w, channel, inside, 1.0) - height - value * along)
                tl.store(_at(dx, steps.dx, image, first + c0, s0, c, place), result.to(dx.dtype.element_ty), mask=mask)


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


# The most elements of a group, its sides rounded up to powers of two, that a block holds in registers.
WHOLE = {_fwd: 16384, _bwd: 8192}
FAR = 65535  # elements of a step beyond which a tile of 32768 elements may span 2^31


def _planes(x: torch.Tensor) -> torch.Tensor:
    """x as (images, channels, space): a view of NCHW or channels_last memory, a copy if space has several strides."""
    return x if x.dim() == 3 else x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def _last(plane: torch.Tensor) -> bool:
    """Whether channels are closer together in memory than positions."""
    return plane.shape[2] == 1 or plane.stride(1) < plane.stride(2)


def _dense(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter if parameter is None or parameter.is_contiguous() else parameter.contiguous()


def _launch(
    kernel: Any, wide: Any, x: torch.Tensor, groups: int, grid: int, args: tuple[Any, ...], steps: tuple[Any, ...],
    *facts: float, **flags: bool
) -> None:  # fmt: skip
    """One program per image (backward: concurrent image) and group, in tiles of BC channels by BS positions."""
    _, channels, size = x.shape
    width, last, dtype, where = channels // groups, _last(x), x.dtype, device.of(x)
    bc, bs = power(max(width, 1)), power(max(size, 1))
    whole, inputs, odd = bc * bs <= WHOLE[kernel], 1 if kernel is _fwd else 2, (width if last else size) % 8 > 0

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
        half as large if rows are not aligned, which needs more registers. Backward adds up after each chunk and
        prefetches the next one meanwhile.
        """
        tile = bc * bs if whole else 16384 // inputs // (1 + odd)
        ahead = not whole and inputs == 2 and where.backend == "cuda"
        return {
            "TILE": tile,
            "num_warps": min(1024 // where.warp, max(1, tile // (16 * where.warp))),
            "STAGES": 1 + ahead,
        }

    def config() -> dict[str, Any]:
        key = key_of(dtype, bc, bs, "last" if last else "first", *["odd"] * odd)
        found = dict(tuning.config(where, "group_norm", (kernel if whole else wide).__name__[1:], key, rule, space))
        tile = found.pop("TILE")
        if last:
            return {"BC": min(bc, tile), "BS": min(bs, max(1, tile // bc)), **found}
        return {"BC": min(bc, max(1, tile // bs)), "BS": min(bs, tile), **found}

    far = max(max(s[1:]) for s in steps if s) > FAR
    chosen, key = kernel if whole else wide, (bc, bs, last, odd)
    shape = Shape(groups, width, size)
    launch(chosen, (grid,), *args, shape, *facts, steps, config=config, key=key, FAR=far, **flags)


def _launch_fwd(
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, w: Any, b: Any, groups: int, eps: float
) -> None:
    x, y = _planes(x), _planes(y)
    args = Results(y, mean, rstd), Inputs(x, _dense(w), _dense(b))
    _launch(_fwd, _fwd_wide, x, groups, x.shape[0] * groups, args, Steps(y.stride(), x.stride()), eps)


def _slots(x: torch.Tensor, need: int) -> tuple[int, torch.Tensor | None, bool]:
    """How many images backward takes at once, room for their sums if wanted, and whether the second kernel is early."""
    images, channels, _ = x.shape
    where = device.of(x)
    slots = min(images, where.multiprocessors)
    if need == 1:
        return slots, None, False
    return slots, torch.empty((slots, 2, channels), dtype=torch.float32, device=x.device), early(where)["PDL"]


def _add_up(sums: torch.Tensor | None, dw: Any, db: Any, need: int) -> None:
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


def _launch_bwd(
    dx: Any, dw: Any, db: Any, dy: torch.Tensor, x: torch.Tensor, w: Any, b: Any, mean: Any, rstd: Any, groups: int,
    need: int
) -> None:  # fmt: skip
    """need: bit 0 for dx, 1 for dw, 2 for db; the others stay empty."""
    x, dy, dx = _planes(x), _planes(dy), _planes(dx) if need & 1 else None
    slots, sums, pdl = _slots(x, need)
    # A launch's first argument must be a tensor, and dx may be missing.
    args = dy, dx, sums, Saved(x, _dense(w), mean, rstd), x.shape[0]
    steps = BackwardSteps(None if dx is None else dx.stride(), dy.stride(), x.stride())
    _launch(_bwd, _bwd_wide, x, groups, slots * groups, args, steps, PDL=pdl)
    _add_up(sums, dw, db, need)


FILE = Path(__file__).with_name("group_norm.cu")
_GROUP_FWD = CudaKernel(FILE, "group_fwd", "PPPPPPiiqqqqf")
_GROUP_BWD = CudaKernel(FILE, "group_bwd", "PPPPPPPiiiqqqqqq")


@cache
def _bands(last: bool, itemsize: int, width: int, channels: int) -> list[int]:
    """The numbers of channels that a cluster may take: a group's; in channels_last memory, groups' in 4 to 32 packs."""
    pack = 16 // itemsize
    unit = math.lcm(width, pack)
    return [c for c in range(unit, 32 * pack + 1, unit) if channels % c == 0 and c >= 4 * pack] if last else [width]


@cache
def _plan(
    last: bool, itemsize: int, slope: int, width: int, size: int, limit: int, **found: int
) -> dict[str, Any] | None:
    """The macros and launch options that a configuration gives for groups of `width` channels.

    None if no cluster holds a band in `limit` bytes per block. slope: backward, the bytes of dy's elements; forward, 0.
    """
    channels, items, pack = found["CHANNELS"], found["ITEMS"], 16 // itemsize
    warps = ceil(size, items * (32 * pack // channels)) if last else width * ceil(size, items * 32 * pack)
    cluster = power(ceil(warps, found["WARPS"]))
    warps = ceil(warps, cluster)
    sums = 8 * (warps * (channels if last else 1) + (cluster + 1) * channels) + 12 * channels
    shared = ceil(512 * warps * items * (itemsize + slope) // itemsize + sums, 128) * 128 + 128
    if cluster > 16 or warps > 32 or shared > limit:
        return None
    blocks = max(1, min(limit // (shared + 1024), (24 if slope else 40) // warps))
    facts = {
        "LAST": int(last),
        "WIDTH": width,
        "BACKWARD": int(slope > 0),
        "CLUSTER": cluster,
        "WARPS": warps,
        "BLOCKS": blocks,
    }
    return {**found, **facts, "block": 32 * warps, "cluster": cluster, "shared": shared}


@cache
def _cluster_space(
    last: bool, itemsize: int, slope: int, width: int, channels: int, size: int, limit: int
) -> list[tuning.Config]:
    """The configurations that fit, the rule's first.

    The rule prefers at least three blocks per multiprocessor, bands of at least 128 bytes, 8 warps per block and 8
    packs per thread.
    """
    # In NCHW, packs that share a channel evenly between warps.
    even = ceil(size * itemsize, 512 * ceil(size * itemsize, 4096))
    found: list[Any] = []
    for c, w, i in product(
        _bands(last, itemsize, width, channels), (8, 16, 24, 32, 4), dict.fromkeys((8 if last else even, 8, 12, 16, 4))
    ):
        config = {"CHANNELS": c, "ITEMS": i, "WARPS": w}
        plan = _plan(last, itemsize, slope, width, size, limit, **config)
        if plan:
            found.append((-min(3, limit // (plan["shared"] + 1024)), c * itemsize < 128, len(found), config))
    return [config for *_, config in sorted(found, key=lambda f: f[:3])]


def _shape(x: torch.Tensor, groups: int, slope: int) -> tuple[bool, int, int, int, int, int, int]:
    """The arguments of `_cluster_space` for x."""
    _, channels, size = x.shape
    return _last(x), x.element_size(), slope, channels // groups, channels, size, device.of(x).shared_memory


def _cluster_launch(
    kernel: CudaKernel, x: torch.Tensor, groups: int, images: int, slope: int, args: tuple[Any, ...],
    planes: tuple[Any, ...], *facts: float, **flags: Any
) -> None:  # fmt: skip
    """One cluster per image (backward: concurrent image) and band. planes: the tensors whose steps the kernel takes."""
    shape = last, itemsize, _, width, channels, size, limit = _shape(x, groups, slope)

    def config() -> dict[str, Any]:
        key, space = key_of(x.dtype, "last" if last else "first", groups, channels, size), _cluster_space(*shape)
        found = tuning.config(device.of(x), "group_norm", kernel.name, key, lambda: space[0], lambda: space)
        return {**(_plan(last, itemsize, slope, width, size, limit, **found) or {}), "XTYPE": CTYPE[x.dtype]}

    steps = [step for t in planes for step in ((0, 0) if t is None else (t.stride(0), t.stride(2 if last else 1)))]
    grid = lambda c: (c["CLUSTER"] * images * channels // c["CHANNELS"],)  # noqa: E731
    launch(
        kernel, grid, *args, groups, size, *steps, *facts, config=config, key=(last, groups, channels, size), **flags
    )


def _ctype(t: torch.Tensor | None) -> str:
    return "void" if t is None else CTYPE[t.dtype]


def _cluster_fwd(
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, w: Any, b: Any, groups: int, eps: float
) -> None:
    x, y = _planes(x), _planes(y)
    types = {"YTYPE": _ctype(y), "WTYPE": _ctype(w), "BTYPE": _ctype(b)}
    _cluster_launch(
        _GROUP_FWD, x, groups, x.shape[0], 0, (y, mean, rstd, x, _dense(w), _dense(b)), (y, x), eps, **types
    )


def _cluster_bwd(
    dx: Any, dw: Any, db: Any, dy: torch.Tensor, x: torch.Tensor, w: Any, b: Any, mean: Any, rstd: Any, groups: int,
    need: int
) -> None:  # fmt: skip
    """Like `_launch_bwd`, which runs what does not fit clusters together with dy. A dy of another layout is copied."""
    plane = _planes(x)
    if not _cluster_space(*_shape(plane, groups, dy.element_size())):
        return _launch_bwd(dx, dw, db, dy, x, w, b, mean, rstd, groups, need)
    if _unfit(_planes(dy), _last(plane)):
        dy = _alike(x, dy.dtype).copy_(dy)
    x, dy, dx = plane, _planes(dy), _planes(dx) if need & 1 else None
    slots, sums, pdl = _slots(x, need)
    types = {"YTYPE": _ctype(dy), "WTYPE": _ctype(w), "BTYPE": "void", "PDL": int(pdl)}
    args = dy, dx, sums, x, _dense(w), mean, rstd, x.shape[0]
    _cluster_launch(_GROUP_BWD, x, groups, slots, dy.element_size(), args, (dx, dy, x), **types)
    _add_up(sums, dw, db, need)


def _unfit(plane: torch.Tensor, last: bool) -> bool:
    """Whether a thread cannot copy 16 bytes at a time: of positions, or of channels in channels_last memory."""
    steps = plane.stride(0), plane.stride(2 if last else 1)
    return (
        plane.stride(1 if last else 2) != 1
        or plane.data_ptr() % 16 > 0
        or any([s * plane.element_size() % 16 for s in steps])
    )


def fits(x: torch.Tensor, *rest: Any) -> str | None:
    """Why clusters cannot run a call, or None; takes a public call's arguments or a launcher's inputs (backward: 8)."""
    backward = len(rest) == 7
    x, groups = rest[0] if backward else x, next(a for a in rest if isinstance(a, int))
    if any([t.dtype not in CTYPE for t in (x, *rest) if isinstance(t, torch.Tensor)]):
        return "it takes float32, float16 and bfloat16"
    least = WHOLE[_bwd if backward else _fwd]
    if x.dim() < 3 or x.numel() <= x.shape[0] * groups * least:
        return f"it takes groups of more than {least} elements; smaller ones fit the registers of tiles"
    try:
        plane = x.view(*x.shape[:2], -1)
    except RuntimeError:
        return "it takes spatial dimensions that can be viewed as one"
    shape = _shape(plane, groups, 0)
    if _unfit(plane, shape[0]) or (not shape[0] and plane.shape[2] * x.element_size() % 16):
        inner = "each position's channels" if shape[0] else "each channel"
        return f"it copies 16 bytes at a time: {inner} must begin and end at multiples of 16 bytes"
    return (
        None
        if _cluster_space(*shape)
        else "no cluster of up to 16 blocks holds a group (in channels_last, groups of whole packs of 16 bytes)"
    )


@kernel_op(
    "group_norm_fwd(Tensor x, Tensor? w, Tensor? b, int groups, float eps, ScalarType? dtype, str? impl)"
    " -> (Tensor, Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, w: Any, b: Any, groups: int, eps: float, dtype: Any, impl: str | None
) -> tuple[torch.Tensor, ...]:
    y = _alike(x, dtype)
    mean, rstd = [torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device) for _ in range(2)]
    run(GROUP_NORM, "fwd", impl, (y, mean, rstd), x, w, b, groups, eps)
    return y, mean, rstd


@kernel_op(
    "group_norm_bwd(Tensor dy, Tensor x, Tensor? w, Tensor? b, Tensor mean, Tensor rstd, int groups, int need, "
    "str? impl)"
    " -> (Tensor, Tensor, Tensor)"
)
def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: Any, b: Any, mean: Any, rstd: Any, groups: int, need: int, impl: str | None
) -> Any:
    dx = _alike(x) if need & 1 else x.new_empty(0)
    dw, db = [x.new_empty(p.shape, dtype=p.dtype) if need & bit else x.new_empty(0) for p, bit in ((w, 2), (b, 4))]
    run(GROUP_NORM, "bwd", impl, (dx, dw, db), dy, x, w, b, mean, rstd, groups, need)
    return dx, dw, db


def _alike(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor in x's memory format: channels_last if x's channels are adjacent, else contiguous."""
    if x.dim() < 3 or x.is_contiguous() or x.stride(1) != 1:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_permuted(x.shape, (0, *range(2, x.dim()), 1), dtype=dtype or x.dtype, device=x.device)


class _GroupNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: Any, b: Any, groups: int, eps: float, dtype: Any, impl: str | None
    ) -> torch.Tensor:
        y, mean, rstd = _forward(x, w, b, groups, eps, dtype, impl)
        ctx.save_for_backward(x, w, b, mean, rstd)
        ctx.facts = groups, impl
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        groups, impl = ctx.facts
        wanted = ctx.needs_input_grad[:3]
        grads = _backward(dy, *ctx.saved_tensors, groups, wanted[0] + 2 * wanted[1] + 4 * wanted[2], impl)
        return *[g if w else None for g, w in zip(grads, wanted, strict=True)], None, None, None, None


def reference(
    x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> torch.Tensor:
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (num_groups, -1)).flatten(2)
    off = rows - rows.mean(-1, keepdim=True)
    y = (off * torch.rsqrt(off.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    each = (-1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.reshape(each)
    return (y if bias is None else y + bias.reshape(each)).to(x.dtype)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Each image's groups of channels normalised to mean 0 and variance 1, as `torch.nn.functional.group_norm`.

    x: (images, channels, ...), floating point, in NCHW or channels_last memory without a copy. num_groups: a divisor of
    channels. weight, bias: (channels,), of any floating dtype, or None. eps: at least 0, added to a group's variance.
    Returns a tensor of x's shape, dtype and memory format; under autocast it is float32, as torch's is.
    Gradients flow to x, weight and bias.
    Raises RidgelineError if shapes, dtypes or devices do not fit, or if `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_floating_point():
        given = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"group_norm: x must be a floating-point tensor (images, channels, ...), but is {given}")
    shape = x.shape
    if not isinstance(num_groups, int) or num_groups < 1 or shape[1] % num_groups:
        raise RidgelineError(f"group_norm: num_groups must divide the {shape[1]} channels of x, but is {num_groups!r}")
    grad = x.requires_grad
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None:
            if (
                not isinstance(p, torch.Tensor)
                or p.shape != shape[1:2]
                or p.device != x.device
                or not p.is_floating_point()
            ):
                given = f"{tuple(p.shape)} {p.dtype} on {p.device}" if isinstance(p, torch.Tensor) else type(p).__name__
                wanted = f"floating point of shape ({shape[1]},) on {x.device}"
                raise RidgelineError(f"group_norm: {name} must be {wanted}, but is {given}")
            grad = grad or p.requires_grad
    if type(eps) is not float or not eps >= 0:
        eps = known_eps("group_norm", eps)
    plain = eager(GROUP_NORM, impl, x, num_groups, weight, bias, eps)
    if plain is not None and plain.call is not None:
        return plain.call(x, num_groups, weight, bias, eps)
    dtype = torch.float32 if x.is_cuda and x.dtype != torch.float32 and torch.is_autocast_enabled("cuda") else None
    if grad and torch.is_grad_enabled():
        return differentiate(_GroupNorm, x, weight, bias, num_groups, eps, dtype, impl)
    return _forward(x, weight, bias, num_groups, eps, dtype, impl)[0]


def _torch(x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> torch.Tensor:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # torch's backward fails with a bias but no weight
    if all([p is None or p.dtype == x.dtype for p in (weight, bias)]):
        return torch.group_norm(x, num_groups, weight, bias, eps)
    w, b = [None if p is None else p.float() for p in (weight, bias)]  # torch's CUDA kernel takes one dtype
    return torch.group_norm(x.float(), num_groups, w, b, eps).to(x.dtype)


def cost(
    x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[Cost, Cost]:
    parameters = [p for p in (weight, bias) if p is not None]
    scale = [] if weight is None else [weight]
    return (
        Cost(nbytes(x, *parameters), nbytes(x), 8 * x.numel()),
        Cost(2 * nbytes(x) + nbytes(*scale), nbytes(x, *parameters), 14 * x.numel()),
    )


class Last(Spec):
    """Random data in channels_last memory."""

    def make(self, *args: Any) -> torch.Tensor:
        x = super().make(*args)
        return x.detach().to(memory_format=torch.channels_last).requires_grad_(x.requires_grad)


def _case(name: str, x: Spec, groups: int, dtype: str | None = None, **facts: Any) -> Case:
    channels = x.shape[1]
    return Case(name, (x, groups, Spec(channels, dtype=dtype), Spec(channels, dtype=dtype)), **facts)


BENCH: dict[str, Any] = {"dtypes": ("bfloat16", "float32"), "use": "bench"}
GROUP_NORM = Op(
    group_norm,
    reference=reference,
    cost=cost,
    cases=[
        _case("3x12x7x9, 4 groups", Spec(3, 12, 7, 9), 4),
        _case("3x20x7x5, 4 groups, channels last", Last(3, 20, 7, 5), 4),
        _case("4x6x100x90, 2 groups", Spec(4, 6, 100, 90), 2),
        _case("4x6x100x90, 2 groups, channels last", Last(4, 6, 100, 90), 2),
        _case("1x40x52x36, 4 groups, channels last", Last(1, 40, 52, 36), 4),
        _case("2x8x9, 2 groups, float32 parameters", Spec(2, 8, 9), 2, "float32", dtypes=("float16", "bfloat16")),
        Case("70x40, 5 groups, no parameters", (Spec(70, 40), 5)),
        _case("1x4x2x1, 4 groups", Spec(1, 4, 2, 1), 4),
        _case("no images", Spec(0, 4, 3), 2),
        _case("2x64x32x32, 8 groups", Spec(2, 64, 32, 32), 8, use="quick"),
        _case("32x512x64x64, 32 groups", Spec(32, 512, 64, 64), 32, **BENCH),
        _case("32x512x64x64, 32 groups, channels last", Last(32, 512, 64, 64), 32, **BENCH),
    ],
)

GROUP_NORM.eager("naive", "the formula in eager PyTorch, in float32: ten passes over memory", reference)
GROUP_NORM.eager("torch", "PyTorch's own kernels: statistics, then a pass that scales", _torch, served=True)
GROUP_NORM.compiled("the formula fused by torch.compile")
GROUP_NORM.kernel(
    "triton",
    "one group per program: in registers, or in chunks that are read twice, the second time from L2",
    kind="triton",
    fwd=_launch_fwd,
    bwd=_launch_bwd,
    served=True,
)
GROUP_NORM.kernel(
    "cuda_cluster",
    "a group (channels_last: several, 128 bytes wide) in a cluster's shared memory: read once",
    kind="cuda",
    fwd=_cluster_fwd,
    bwd=_cluster_bwd,
    served=True,
    arch=90,
    shared=227 << 10,
    supports=fits,
)
