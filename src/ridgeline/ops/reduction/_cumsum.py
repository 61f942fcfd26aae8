"""Launchers of cumsum: rows by tiles, each tile in its own block or in a ring; whole rows per block; columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.cuda import CudaKernel
from ridgeline.ops.reduction._arguments import KINDS

FILE = Path(__file__).with_name("cumsum.cu")
_TILES, _TOTALS = CudaKernel(FILE, "cumsum_tiles", "PPPqqq"), CudaKernel(FILE, "cumsum_totals", "Pq")
_ROWS, _COLUMNS = CudaKernel(FILE, "cumsum_rows", "PPq"), CudaKernel(FILE, "cumsum_columns", "PPPqqqqq")
_CLEAR, _RING = CudaKernel(FILE, "cumsum_clear", "Pq"), CudaKernel(FILE, "cumsum_ring", "PPPqqq")
GROUP = 32  # tiles per group, as in cumsum.cu
# The ring: threads per group and groups; packs per thread, by elements per pack; the most bytes of shared memory.
RING = {"THREADS": 192, "GROUPS": 3}
RING_ITEMS = {8: 6, 4: 10, 2: 8}
RING_BYTES = 215 << 10
LONG = 1 << 15  # the ring needs at least this many elements per multiprocessor
FEW = 32  # fewer long columns are transposed into rows; rows of at most four times as many bytes take one thread each


def _sizes(x: torch.Tensor, dim: int) -> tuple[int, int, int]:
    shape = x.shape or (1,)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _macros(
    y: torch.Tensor, x: torch.Tensor, rows: int, n: int, reverse: bool, packed: bool, threads: int
) -> dict[str, Any]:
    """Macros: packs of 16 bytes of the wider type (at most 8 elements) if rows are aligned, and packs per thread."""
    pack = min(8, 16 // max(y.element_size(), x.element_size()))
    whole = packed and (n % pack == 0 or (rows == 1 and not reverse))
    pack = pack if whole and not any([t.data_ptr() % (pack * t.element_size()) for t in (y, x)]) else 1
    floating, wide = y.is_floating_point(), y.element_size() == 8
    sums = ("float", "double") if floating else ("unsigned long long" if wide else "unsigned", "unsigned long long")
    macros = {"XTYPE": KINDS[x.dtype], "YTYPE": KINDS[y.dtype], "STYPE": sums[0], "TTYPE": sums[1], "PACK": pack}
    macros |= {"ITEMS": {8: 4, 4: 10, 2: 8, 1: 12}[pack], "THREADS": threads, "REVERSE": int(reverse)}
    return macros | {"PHASE": 0, "block": threads}


def _tiled(phased: bool, packed: bool, y: torch.Tensor, x: torch.Tensor, dim: int, reverse: bool) -> None:
    """Rows by tiles, in one pass or, if phased, in three."""
    x = x.contiguous()
    rows, n, _ = _sizes(x, dim)
    macros = _macros(y, x, rows, n, reverse, packed, 128)
    # With longer tiles, fewer wait for each other.
    macros["ITEMS"] = {8: 8, 4: 20}.get(macros["PACK"], macros["ITEMS"])
    tiles = -(-n // (128 * macros["PACK"] * macros["ITEMS"]))
    every = rows * tiles
    state = torch.empty(2 * (1 + every + rows * -(-tiles // GROUP)), dtype=torch.int64, device=x.device)
    if phased:
        for phase in (1, 2):
            launch(_TILES, (every,), y, x, state, rows, n, tiles, **macros | {"PHASE": phase})
            if phase == 1:
                launch(_TOTALS, (rows,), state, tiles, **macros | {"block": 1024})
        return
    after = early(device.of(x))
    launch(_CLEAR, (-(-state.numel() // 256),), state, state.numel(), **macros | {"block": 256, "PDL": after["PDL"]})
    launch(_TILES, (every,), y, x, state, rows, n, tiles, **macros, **after)


def _columns(y: torch.Tensor, x: torch.Tensor, dim: int, reverse: bool) -> None:
    """One thread per column, or, for few columns, one per chunk of a column in two passes."""
    outer, n, inner = _sizes(x, dim)
    macros = _macros(y, x, 1, 1, reverse, False, 256)
    many = 2048 * device.of(x).multiprocessors
    chunks = 1 if n < 256 else max(1, min(256, n // 64, many // (outer * inner)))
    chunk = -(-n // chunks)
    chunks = -(-n // chunk)
    totals = torch.empty(outer * chunks * inner, dtype=torch.int64, device=x.device) if chunks > 1 else None
    grid = (-(-outer * chunks * inner // 256),)
    for out in (None, y) if chunks > 1 else (y,):
        launch(_COLUMNS, grid, x, out, totals, outer, n, inner, chunk, chunks, **macros)


def best(y: torch.Tensor, x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool) -> None:
    x = x.contiguous()
    outer, n, inner = _sizes(x, dim)
    if inner > 1 and n >= 1024 and inner < FEW and outer * inner < 1 << 14:
        turned = x.view(outer, n, inner).mT.contiguous()
        made = torch.empty_like(turned, dtype=y.dtype)
        best(made, turned, 2, dtype, reverse)
        y.view(outer, n, inner).copy_(made.mT)
    elif inner > 1 or n * y.element_size() <= 4 * FEW:
        _columns(y, x, dim, reverse)
    else:
        macros = _macros(y, x, outer, n, reverse, True, 256)
        warps = -(-n // (32 * macros["PACK"] * macros["ITEMS"]))
        if warps > 8 and outer < 2 * device.of(x).multiprocessors:
            _tiled(False, True, y, x, dim, reverse)
        else:
            threads = min(256, 32 << (warps - 1).bit_length())
            if macros["PACK"] == 8 and n >= 64 * 256:  # long rows fill larger tiles evenly
                macros["ITEMS"] = 8
            launch(_ROWS, (outer,), y, x, n, **macros | {"THREADS": threads, "block": threads})


def by_ring(y: torch.Tensor, x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool) -> None:
    x = x.contiguous()
    rows, n, _ = _sizes(x, dim)
    macros = _macros(y, x, rows, n, reverse, True, RING["THREADS"])
    macros |= RING | {"ITEMS": RING_ITEMS[macros["PACK"]]}
    packs = RING["THREADS"] * macros["ITEMS"]  # per tile
    size = packs * macros["PACK"] * x.element_size()  # bytes of a tile
    tiles, macros["STAGES"] = -(-n // (packs * macros["PACK"])), min(16, RING_BYTES // size)
    state = torch.empty(2 * rows * tiles, dtype=torch.int64, device=x.device)
    launch(_CLEAR, (-(-state.numel() // 256),), state, state.numel(), **macros | {"block": 256})
    macros |= {"shared": macros["STAGES"] * size, "block": RING["GROUPS"] * RING["THREADS"] + 64}
    grid = (min(device.of(x).multiprocessors, rows * tiles),)
    launch(_RING, grid, y, x, state, rows, n, tiles, cooperative=1, **macros)


def last_dim(x: torch.Tensor, dim: int = 0, *rest: Any) -> str | None:
    if _sizes(x, dim % max(1, x.dim()))[2] == 1:
        return None
    return "it takes the last dimension, but later dimensions have more than one element"


def whole(x: torch.Tensor, dim: int, *rest: Any) -> str | None:
    """Why bulk copies, of packs of 16 bytes at multiples of 16, cannot move the rows, or None."""
    if last_dim(x, dim):
        return last_dim(x, dim)
    begins = x.data_ptr() % 16 == 0 or not x.is_contiguous()
    if begins and _sizes(x, dim % max(1, x.dim()))[1] * x.element_size() % 16 == 0:
        return None
    return "it takes rows that begin and end at multiples of 16 bytes"


def short(x: torch.Tensor, dim: int, *rest: Any, **named: Any) -> str | None:
    """Why the ring is slower, or None: rows enough for a block each, or few tiles."""
    rows, n, _ = _sizes(x, dim % max(1, x.dim()))
    many = device.of(x).multiprocessors
    return "its rows are many, or short" if rows >= 2 * many or rows * n < LONG * many else None


def by_tiles(phased: bool, y: torch.Tensor, x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool) -> None:
    _tiled(phased, False, y, x, dim, reverse)
