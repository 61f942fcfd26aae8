"""A matrix quantised both ways in one pass: its codes, and those of its transpose, each with scales along its own rows.

8-bit matrix units take operands along the summed dimension only. So a training step needs a matrix in two layouts:
along its rows for one product, along its columns for another. A program reads a square of B x B numbers once,
and stores its codes and their transpose. Squares and a tensor have one scale for both; rows and 1 x 128 blocks have
others, and so other codes. Scales of rows and of a tensor take a pass over x of their own before.
Source: the fused cast and transpose of NVIDIA's TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.quantization._groups import (
    BLOCK,
    LARGEST,
    PARTS,
    ROW,
    TENSOR,
    Group,
    Plane,
    coded,
    ends,
    native,
    reach,
    scaled,
)


@triton.jit
def _square(x, B: tl.constexpr):
    """The numbers of this program's square, their rows and columns, and which of them exist."""
    wide = tl.cdiv(x.columns, B)
    row = ((tl.program_id(0) // wide).to(tl.int64) * B + tl.arange(0, B))[:, None]
    column = ((tl.program_id(0) % wide).to(tl.int64) * B + tl.arange(0, B))[None, :]
    inside = (row < x.rows) & (column < x.columns)
    v = tl.load(x.data + row * x.row_stride + column * x.column_stride, mask=inside, other=0).to(tl.float32)
    return v, row, column, inside


@triton.jit
def _lines(down, across, x, B: tl.constexpr):
    """The largest sizes of a square's rows, into down (squares across, rows), and of its columns, into across."""
    v, row, column, _ = _square(x, B)
    _, sizes = ends(v, True)
    wide = tl.cdiv(x.columns, B)
    at_row = down + (tl.program_id(0) % wide).to(tl.int64) * x.rows + row
    tl.store(at_row, tl.max(sizes, 1)[:, None], mask=row < x.rows)
    at_column = across + (tl.program_id(0) // wide).to(tl.int64) * x.columns + column
    tl.store(at_column, tl.max(sizes, 0)[None, :], mask=column < x.columns)


@triton.jit
def _most(scales, parts, count, length, TOP: tl.constexpr, B: tl.constexpr):
    """The scales of B lines, from the largest sizes of their parts (count, length)."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    high = tl.zeros((B,), tl.float32)
    at = parts + i
    for _ in range(count):
        high = tl.maximum(high, tl.load(at, mask=i < length, other=0))
        at += length
    scale, _ = scaled(high, high, TOP, True)
    tl.store(scales + i, scale, mask=i < length)


@triton.jit
def _both(
    q,
    turned,
    scales,
    scales_turned,
    parts,
    x,
    count,
    KIND: tl.constexpr,
    TOP: tl.constexpr,
    PARTS: tl.constexpr,
    B: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The codes of a square of x, and their transpose. KIND: what shares a scale: "tensor", "row", "line", "square".

    parts: a tensor's extremes, as `reach` leaves them. Scales of rows are given, of lines and squares found here.
    """
    v, row, column, inside = _square(x, B)
    rows, columns = x.rows, x.columns
    down, across = tl.cdiv(rows, B), tl.cdiv(columns, B)
    i, j = (tl.program_id(0) // across).to(tl.int64), (tl.program_id(0) % across).to(tl.int64)
    if KIND == "row":
        scale = tl.load(scales + row, mask=row < rows, other=1.0)
        scale_turned = tl.load(scales_turned + column, mask=column < columns, other=1.0)
    elif KIND == "tensor":
        part = tl.arange(0, PARTS)
        high = tl.max(tl.load(parts + count + part, mask=part < count, other=0), 0)
        scale, _ = scaled(high, high, TOP, True)
        if tl.program_id(0) == 0:
            tl.store(scales, scale)
            tl.store(scales_turned, scale)
    else:
        _, sizes = ends(v, True)
        high, high_turned = tl.max(sizes, 1, keep_dims=True), tl.max(sizes, 0, keep_dims=True)
        if KIND == "square":
            high = tl.max(high, 0, keep_dims=True)
        scale, _ = scaled(high, high, TOP, True)
        if KIND == "square":
            one = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
            tl.store(scales + i * across + j + one, scale)
            tl.store(scales_turned + j * down + i + one, scale)
        else:
            scale_turned, _ = scaled(high_turned, high_turned, TOP, True)
            tl.store(scales + row * across + j, scale, mask=row < rows)
            tl.store(scales_turned + column * down + i, scale_turned, mask=column < columns)
    code = coded(v, scale, 0, TOP, NATIVE, x.data.dtype.element_ty)
    tl.store(q + row * columns + column, code, mask=inside)
    if KIND == "row" or KIND == "line":
        code = coded(v, scale_turned, 0, TOP, NATIVE, x.data.dtype.element_ty)
    tl.store(turned + column * rows + row, code, mask=inside)


KINDS: dict[Group, str] = {TENSOR: "tensor", ROW: "row", (1, BLOCK): "line", (BLOCK, BLOCK): "square"}


def room(group: Group, rows: int, columns: int) -> int:
    """Returns how many numbers `quantize_both` needs to find the scales."""
    if group == ROW:
        return -(-columns // BLOCK) * rows + -(-rows // BLOCK) * columns
    return 2 * PARTS if group == TENSOR else 0


def quantize_both(
    q: torch.Tensor, turned: torch.Tensor, scale: torch.Tensor, scale_turned: torch.Tensor, parts: torch.Tensor,
    x: torch.Tensor, group: Group
) -> None:  # fmt: skip
    """Writes the codes of x (M, K) and of its transpose, contiguous, and the float32 scales of both."""
    rows, columns = x.shape
    gpu, top = device.of(x), LARGEST[q.dtype]
    given, warps = Plane(x, rows, columns, *x.stride()), 256 // gpu.warp
    count = 0
    if group == ROW:
        down = parts[: -(-columns // BLOCK) * rows]
        across = parts[down.numel() :]
        launch(
            _lines,
            (triton.cdiv(rows, BLOCK) * triton.cdiv(columns, BLOCK),),
            down,
            across,
            given,
            B=BLOCK,
            num_warps=warps,
        )
        for found, some, length in ((scale, down, rows), (scale_turned, across, columns)):
            facts: dict[str, Any] = {"TOP": top, "B": BLOCK, "num_warps": 128 // gpu.warp}
            launch(_most, (triton.cdiv(length, BLOCK),), found, some, some.numel() // length, length, **facts)
    elif group == TENSOR:
        bk = min(4096, triton.next_power_of_2(columns))
        bm = 8192 // bk
        tiles = triton.cdiv(rows, bm) * triton.cdiv(columns, bk)
        count = min(PARTS, tiles)
        launch(reach, (count,), parts, given, tiles, BM=bm, BK=bk, SYMMETRIC=True, num_warps=warps)
    # Blocks need whole squares; smaller ones leave room for more programs and for the addresses of unaligned rows.
    side = BLOCK if group[1] else BLOCK // 2
    squares = triton.cdiv(rows, side) * triton.cdiv(columns, side)
    facts = {"KIND": KINDS[group], "TOP": top, "PARTS": PARTS, "B": side, "NATIVE": native(x)}
    facts["num_warps"] = warps if group[1] else warps // 2
    codes = q.view(torch.uint8), turned.view(torch.uint8)
    launch(_both, (squares,), *codes, scale, scale_turned, parts, given, count, **facts)
