"""Launchers of transpose's kernels."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel, TensorMap
from ridgeline.op import dtype_name
from ridgeline.ops.movement._bytes import UNITS, copied, unit_of

FILE = Path(__file__).with_name("transpose.cu")
NAIVE, TILE = CudaKernel(FILE, "transpose_naive", "PPii"), CudaKernel(FILE, "transpose_tile", "PPii")
_PACKED, _SHIFTED = (CudaKernel(FILE, f"transpose_{name}", "PPii") for name in ("packed", "shifted"))
_TMA = CudaKernel(FILE, "transpose_tma", "PMMiii")
GROUP = 16  # tiles across a band


def _tiles(x: torch.Tensor, high: int, wide: int) -> int:
    rows, columns = x.shape[-2:]
    return prod(x.shape[:-2]) * -(-rows // high) * -(-columns // wide)


def small(kernel: CudaKernel, layout: int, y: torch.Tensor, x: torch.Tensor) -> None:
    """Tiles of 32 x 32, one element per thread at a time."""
    launch(kernel, (_tiles(x, 32, 32),), y, x, *x.shape[-2:], block=256, UNIT=UNITS[x.element_size()], LAYOUT=layout)


def packed(y: torch.Tensor, x: torch.Tensor) -> None:
    """Moves the widest packs that divide rows of both. Elements of one or two bytes whose rows 4 bytes do not divide
    move in granules of 16 bytes all the same, wherever rows begin."""
    if 1 in x.shape[-2:]:
        copied(y, x)
        return
    size, (rows, columns) = x.element_size(), x.shape[-2:]
    pack = unit_of(rows * size, columns * size, x.data_ptr(), y.data_ptr())
    macros: dict[str, Any] = {"block": 256, "UNIT": UNITS[size]}
    if pack < 4 and size < 4:  # at 8191x8193 of two bytes 114 us, single elements 152; of four bytes 237 and 175
        side, units = 256 // size, 16 // size
        grid = (prod(x.shape[:-2]) * -(-(rows + units - 1) // side) * -(-columns // side),)
        shared = (side // units + 1) * (units * 272 + 16)  # PITCH and STEP in transpose.cu
        launch(_SHIFTED, grid, y, x, rows, columns, shared=shared, GROUP=4, **macros)
        return
    pack = pack if pack >= 4 else size  # registers are transposed in words
    side = max(64, 16 * pack // size) if pack < 16 else 256 // size
    grid, shared = (_tiles(x, side, side),), side * side * size
    launch(_PACKED, grid, y, x, rows, columns, shared=shared, PACK=pack, SIDE=side, GROUP=GROUP, **macros)


def _rule(size: int) -> tuning.Config:
    """Squares 128 bytes wide: enough for a tile of 16 KB (32 KB with 2-byte elements), six tiles per block."""
    squares = {1: (1, 1), 2: (2, 2), 4: (2, 2), 8: (4, 2)}[size]
    heavy = size == 2
    tile = {"DOWN": squares[0], "ACROSS": squares[1]}
    return tile | {"STAGES": 4, "OUTS": 2, "BLOCKS": 1 if heavy else 2, "GROUP": GROUP}


def _bytes(c: dict[str, int]) -> int:
    """Shared memory of a block: its rings, and room to align them to 1024 bytes."""
    return (c["STAGES"] + c["OUTS"]) * c["DOWN"] * c["ACROSS"] * c["EDGE"] * 128 + 1024


def _space(edge: int) -> list[tuning.Config]:
    """Tiles, rings and orders to try that fit a multiprocessor's shared memory."""
    tiles, rings, orders = (
        ((1, 1), (1, 2), (2, 1), (2, 2)),
        ((4, 2, 1), (4, 2, 2), (3, 1, 2), (6, 2, 1), (2, 2, 3)),
        (1, 8, 16, 1 << 20),
    )
    names = "DOWN", "ACROSS", "STAGES", "OUTS", "BLOCKS", "GROUP"
    found = [dict(zip(names, (*t, *r, o), strict=True)) for t in tiles for r in rings for o in orders]
    return [c for c in found if c["BLOCKS"] * (_bytes(c | {"EDGE": edge}) + 1024) <= 228 << 10]


def boxes(y: torch.Tensor, x: torch.Tensor) -> None:
    """Persistent blocks; a tile's squares are 128 bytes wide and as many rows high as that has elements."""
    gpu, size, (rows, columns), batches = device.of(x), x.element_size(), x.shape[-2:], prod(x.shape[:-2])
    edge = 128 // size
    views = y.view(batches, columns, rows), x.view(batches, rows, columns)

    def config() -> dict[str, Any]:
        c = tuning.config(gpu, "transpose", "tma", dtype_name(x), partial(_rule, size), partial(_space, edge))
        sizes = {"block": min(256, 64 * c["DOWN"] * c["ACROSS"]), "shared": _bytes(c | {"EDGE": edge})}
        return c | sizes | {"X_HIGH": c["DOWN"] * edge, "Y_HIGH": c["ACROSS"] * edge}

    def grid(c: dict[str, Any]) -> tuple[int]:
        return (min(gpu.multiprocessors * c["BLOCKS"], _tiles(x, c["X_HIGH"], c["Y_HIGH"])),)

    maps = TensorMap(views[0], (1, "Y_HIGH", edge), 128), TensorMap(views[1], (1, "X_HIGH", edge), 128)
    launch(_TMA, grid, y, *maps, batches, rows, columns, config=config, key=dtype_name(x), UNIT=UNITS[size])
