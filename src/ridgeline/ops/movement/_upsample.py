"""Launchers of upsample_nearest2d's kernels, and its sizes and memory formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel

FILE = Path(__file__).with_name("upsample_nearest2d.cu")
_FWD, _BWD = CudaKernel(FILE, "upsample_fwd", "PPqiiiiiff"), CudaKernel(FILE, "upsample_bwd", "PPqiiiiiff")
_FWD2, _BWD2 = CudaKernel(FILE, "upsample2_fwd", "PPqii"), CudaKernel(FILE, "upsample2_bwd", "PPqii")
LAST = torch.channels_last
ITEMS = (1, 1), (1, 1)  # units per thread: (contiguous, channels last) for forward and for backward


def pair(scale: Any) -> tuple[float, ...]:
    return tuple([float(s) for s in scale]) if isinstance(scale, tuple | list) else (float(scale),) * 2


def form_of(x: torch.Tensor) -> torch.memory_format:
    """Channels last if x is channels last and not contiguous, else contiguous."""
    return LAST if not x.is_contiguous() and x.is_contiguous(memory_format=LAST) else torch.contiguous_format


def grown(size: int, scale: float) -> int:
    return size * int(scale) if scale == int(scale) else math.floor(size * scale)


def too_large(t: torch.Tensor, scale: Any, width: int = 0, *_: Any) -> str | None:
    """Why kernels cannot take x, from its sizes and y's, or dy, which comes with x's width."""
    sides = list(t.shape[1:]) if width else [*t.shape[1:], *map(grown, t.shape[2:], pair(scale))]
    if max(sides) < 1 << 31 and t.shape[0] * t.shape[1] * max(sides[1], sides[-2]) * max(sides[2], sides[-1]) < 1 << 39:
        return None
    return "a side, or the number of pixels of all images, exceeds the kernels' integers"


def start(back: bool, out: torch.Tensor, given: torch.Tensor, scale: Sequence[float], *_: Any) -> None:
    """One thread per element of the result: y from x, or dx from dy. Strided inputs are first copied to its format."""
    given = given.contiguous(memory_format=form_of(out))
    x, y = (out, given) if back else (given, out)
    sizes = *x.shape[2:], *y.shape[2:], x.shape[1], *[1 / s for s in scale]
    grid, macros = (-(-out.numel() // 256),), _macros(out, given)
    launch(_BWD if back else _FWD, grid, out, given, out.numel(), *sizes, block=256, **macros)


def start_twice(back: bool, out: torch.Tensor, given: torch.Tensor, *_: Any) -> None:
    """A factor of two in both directions, by units of x or dx: 8 bytes, or 16 of a pixel's channels."""
    given = given.contiguous(memory_format=form_of(out))
    if given.data_ptr() % 16:
        given = given.clone()
    x = out if back else given
    macros = _macros(out, given)
    unit, items = (16 if macros["LAST"] else 8) // x.element_size(), ITEMS[back][macros["LAST"]]
    channels = x.shape[1] // unit if macros["LAST"] else 1
    units, across = x.numel() // unit, x.shape[3] * channels if macros["LAST"] else x.shape[3] // unit
    blocks = -(-units // (256 * items))
    launch(_BWD2 if back else _FWD2, (blocks,), out, given, units, across, channels, block=256, ITEMS=items, **macros)


def _macros(out: torch.Tensor, given: torch.Tensor) -> dict[str, Any]:
    index = "unsigned" if max(out.numel(), given.numel()) < 1 << 31 else "long long"
    return {"DTYPE": CTYPE[out.dtype], "INDEX": index, "LAST": int(form_of(out) is LAST)}
