"""transpose in Gluon for Hopper: TMA loads and stores tiles, and all warps transpose them.

A program takes every n-th tile. Tiles arrive in a ring, several ahead. A thread loads a square of P x P elements, 16
bytes wide, into registers and stores it transposed into one of OUTS tiles, from which TMA writes. Both are swizzled
over 128 bytes: row r holds its 16-byte unit u at u ^ r % 8. Eight neighbours take the squares of a diagonal, so the
units they read, and those they write, lie in eight different columns. TMA clips the edges.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.tiles.hopper import load, make_barriers, store


@gluon.constexpr_function
def _threads(size, warps):
    """The layout of a tile of y, whose rows are columns of x, over the threads."""
    if size == 2:
        return gl.BlockedLayout([1, 2], [8, 4], [warps, 1], [1, 0])
    return gl.BlockedLayout([4, 2], [2, 16], [warps, 1], [0, 1])


@gluon.jit
def _place(t, rows, columns, SIDE: gl.constexpr, GROUP: gl.constexpr):
    """A tile's matrix, first row and first column: tiles follow each other row by row in bands of GROUP across."""
    down, across = gl.cdiv(rows, SIDE), gl.cdiv(columns, SIDE)
    batch = t // (down * across)
    t -= batch * (down * across)
    band = t // (GROUP * down)
    t -= band * (GROUP * down)
    width = gl.minimum(GROUP, across - band * GROUP)
    return batch, t // width * SIDE, (band * GROUP + t % width) * SIDE


@gluon.jit
def _fetch(x, ring, ready, t, tiles, stage, rows, columns, SIDE: gl.constexpr, GROUP: gl.constexpr):
    """Loads tile t into a stage if there is a tile of that number."""
    batch, row, column = _place(t, rows, columns, SIDE, GROUP)
    mbarrier.expect(ready.index(stage), x.block_type.nbytes, pred=t < tiles)
    load(x, [batch, row, column], ready.index(stage), ring.index(stage), pred=t < tiles)


@gluon.jit(do_not_specialize=["batches", "rows", "columns"])
def _fwd(
    y, out, x, batches, rows, columns, SIDE: gl.constexpr, STAGES: gl.constexpr, OUTS: gl.constexpr,
    GROUP: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = _threads(x.dtype.primitive_bitwidth // 8, num_warps)
    ring = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    outs = gl.allocate_shared_memory(x.dtype, [OUTS] + x.block_type.shape, x.layout)
    ready = make_barriers(STAGES, 1)
    fence_async_shared()
    first, step = gl.program_id(0), gl.num_programs(0)
    tiles = batches * gl.cdiv(rows, SIDE) * gl.cdiv(columns, SIDE)
    for n in gl.static_range(STAGES):
        _fetch(x, ring, ready, first + n * step, tiles, n, rows, columns, SIDE, GROUP)
    stage, odd, place = 0, 0, 0
    for t in range(first, tiles, step):
        batch, row, column = _place(t, rows, columns, SIDE, GROUP)
        mbarrier.wait(ready.index(stage), odd)
        turned = ring.index(stage).reshape([SIDE, SIDE]).permute((1, 0)).load(layout)
        # The board's previous tile has been stored, and the compiler's barrier here means all have read the stage.
        tma.store_wait(OUTS - 1)
        _fetch(x, ring, ready, t + STAGES * step, tiles, stage, rows, columns, SIDE, GROUP)
        board = outs.index(place)
        board.reshape([SIDE, SIDE]).store(turned)
        fence_async_shared()
        store(out, [batch, column, row], board)
        stage += 1
        odd ^= (stage == STAGES).to(gl.int32)
        stage = gl.where(stage == STAGES, 0, stage)
        place = gl.where(place == OUTS - 1, 0, place + 1)
    tma.store_wait(0)


def fwd(y: torch.Tensor, x: torch.Tensor) -> None:
    """Tiles of 64 x 64 4-byte or 128 x 128 2-byte elements, 16 and 32 KB, six per program, as in `boxes`."""
    gpu, size, (rows, columns), batches = device.of(x), x.element_size(), x.shape[-2:], prod(x.shape[:-2])
    side = 256 // size
    tiles = batches * -(-rows // side) * -(-columns // side)
    boxes = [
        TensorMap(t, (1, side, side), 128) for t in (y.view(batches, columns, rows), x.view(batches, rows, columns))
    ]
    facts: dict[str, Any] = {"SIDE": side, "STAGES": 4, "OUTS": 2, "GROUP": 16, "num_warps": 8}
    launch(_fwd, (min(tiles, gpu.multiprocessors * (size // 2)),), y, *boxes, batches, rows, columns, **facts)
