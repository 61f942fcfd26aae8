"""group_norm by thread-block clusters (group_norm.cu): a group is read once, into the shared memory of a cluster."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.ops.rowwise import _group_tiles
from ridgeline.ops.rowwise._channels import channels_last, empty_in_format, planes
from ridgeline.ops.rowwise._rows import ceil, dense, key_of, power

FILE = Path(__file__).with_name("group_norm.cu")
_GROUP_FWD = CudaKernel(FILE, "group_fwd", "PPPPPPiiqqqqf")
_GROUP_BWD = CudaKernel(FILE, "group_bwd", "PPPPPPPPiiiqqqqqq")


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
    return channels_last(x), x.element_size(), slope, channels // groups, channels, size, device.of(x).shared_memory


def _cluster_launch(
    kernel: CudaKernel, x: torch.Tensor, groups: int, images: int, slope: int, args: tuple[Any, ...],
    stepped: tuple[Any, ...], *facts: float, **flags: Any
) -> None:  # fmt: skip
    """One cluster per image (backward: concurrent image) and band. stepped: tensors whose steps the kernel takes."""
    shape = last, itemsize, _, width, channels, size, limit = _shape(x, groups, slope)

    def config() -> dict[str, Any]:
        key, space = key_of(x.dtype, "last" if last else "first", groups, channels, size), _cluster_space(*shape)
        found = tuning.config(device.of(x), "group_norm", kernel.name, key, lambda: space[0], lambda: space)
        return {**(_plan(last, itemsize, slope, width, size, limit, **found) or {}), "XTYPE": CTYPE[x.dtype]}

    steps = [step for t in stepped for step in ((0, 0) if t is None else (t.stride(0), t.stride(2 if last else 1)))]
    grid = lambda c: (c["CLUSTER"] * images * channels // c["CHANNELS"],)  # noqa: E731
    launch(
        kernel, grid, *args, groups, size, *steps, *facts, config=config, key=(last, groups, channels, size), **flags
    )


def _ctype(t: torch.Tensor | None) -> str:
    return "void" if t is None else CTYPE[t.dtype]


def launch_fwd(
    y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, w: Any, b: Any, groups: int, eps: float,
    silu: bool
) -> None:  # fmt: skip
    x, y = planes(x), planes(y)
    types = {"YTYPE": _ctype(y), "WTYPE": _ctype(w), "BTYPE": _ctype(b), "SILU": int(silu)}
    _cluster_launch(_GROUP_FWD, x, groups, x.shape[0], 0, (y, mean, rstd, x, dense(w), dense(b)), (y, x), eps, **types)


def launch_bwd(
    dx: Any, dw: Any, db: Any, dy: torch.Tensor, x: torch.Tensor, w: Any, b: Any, mean: Any, rstd: Any, groups: int,
    silu: bool, need: int
) -> None:  # fmt: skip
    """Runs backward in clusters, or in tiles if x and dy do not fit a cluster. A dy of another layout is copied."""
    plane = planes(x)
    if not _cluster_space(*_shape(plane, groups, dy.element_size())):
        return _group_tiles.launch_bwd(dx, dw, db, dy, x, w, b, mean, rstd, groups, silu, need)
    if _unfit(planes(dy), channels_last(plane)):
        dy = empty_in_format(x, dy.dtype).copy_(dy)
    x, dy, dx = plane, planes(dy), planes(dx) if need & 1 else None
    slots, sums, pdl = _group_tiles.slots_of(x, need)
    b = dense(b) if silu else None
    types = {"YTYPE": _ctype(dy), "WTYPE": _ctype(w), "BTYPE": _ctype(b), "SILU": int(silu), "PDL": int(pdl)}
    args = dy, dx, sums, x, dense(w), b, mean, rstd, x.shape[0]
    _cluster_launch(_GROUP_BWD, x, groups, slots, dy.element_size(), args, (dx, dy, x), **types)
    _group_tiles.add_up(sums, dw, db, need)


def _unfit(plane: torch.Tensor, last: bool) -> bool:
    """Whether a thread cannot copy 16 bytes at a time: of positions, or of channels in channels_last memory."""
    steps = plane.stride(0), plane.stride(2 if last else 1)
    return (
        plane.stride(1 if last else 2) != 1
        or plane.data_ptr() % 16 > 0
        or any([s * plane.element_size() % 16 for s in steps])
    )


def fits(x: torch.Tensor, *rest: Any, **_: Any) -> str | None:
    """Why clusters cannot run a call, or None; takes a public call's arguments or a launcher's inputs (backward: 9)."""
    backward = len(rest) == 8
    x, groups = rest[0] if backward else x, next(a for a in rest if isinstance(a, int))
    if any([t.dtype not in CTYPE for t in (x, *rest) if isinstance(t, torch.Tensor)]):
        return "it takes float32, float16 and bfloat16"
    least = _group_tiles.WHOLE[1 + backward]
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
