"""conv2d's implementation `triton_boxes`: the copy engine (TMA) gathers pixels, for windows without a stride.

A tile's pixels are a box of adjacent ones, over a few images, rows and columns, so a tap moves the whole box. The copy
engine reads it at that place; outside an image it reads zeros, and it writes no pixel outside one. Threads compute no
addresses. A box's sides are the powers of two that waste the fewest pixels at the edges of these images.
Programs stay, as in matmul's `triton_persistent`: the next tile's loads are in flight while one is stored.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.op import dtype_name
from ridgeline.ops.matmul._activated import bend
from ridgeline.ops.matmul._conv import Window
from ridgeline.ops.matmul._epilogue import Epilogue, add_up

_Maybe = torch.Tensor | None


class Box(NamedTuple):
    """The sides of a box of pixels."""

    images: int
    rows: int
    columns: int


class Taps(NamedTuple):
    """The window: its first tap reads pixel (top, left) from an output's own. TURNED: the weight's channels are
    exchanged and its taps in reverse order, for the gradient of x."""

    ROWS: int
    COLUMNS: int
    top: int
    left: int
    down: int
    across: int
    TURNED: int


class Tile(NamedTuple):
    BN: int
    BK: int
    PIECES: int  # parts in which it is stored
    ACTIVATION: str


@triton.jit
def _place(box, down, across, BOX: tl.constexpr):
    """The first image, row and column of a box."""
    return (
        box // (down * across) * BOX.images,
        box // across % down * BOX.rows,
        box % across * BOX.columns,
    )


@triton.jit
def _keep(y, out, z, bias, x, image, h, w, n, K, BOX: tl.constexpr, ACTIVATION: tl.constexpr):
    """Stores a tile, or half of one."""
    dtype: tl.constexpr = y.dtype.element_ty
    columns = n + tl.arange(0, x.shape[1])
    if bias is not None:
        x += tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    if z is not None:
        z.store([image, h, w, n], x.to(dtype).reshape(BOX.images, BOX.rows, BOX.columns, x.shape[1]))
    x = bend(x, ACTIVATION, dtype)
    out.store([image, h, w, n], x.to(dtype).reshape(BOX.images, BOX.rows, BOX.columns, x.shape[1]))


@triton.jit(do_not_specialize=["boxes", "down", "across", "C", "K"])
def _conv(
    y,
    out,
    z,
    bias,
    x,
    weight,
    boxes,
    down,
    across,
    C,
    K,
    BOX: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    BM: tl.constexpr = BOX.images * BOX.rows * BOX.columns
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    ACTIVATION: tl.constexpr = TILE.ACTIVATION  # Triton 3.6 passes no string of a bundle on
    steps, tiles = tl.cdiv(C, BK), tl.cdiv(K, BN)
    for t in tl.range(tl.program_id(0), boxes * tiles, tl.num_programs(0), flatten=True):
        image, h, w = _place(t // tiles, down, across, BOX)
        n = t % tiles * BN
        total = tl.zeros((BM, BN), tl.float32)
        for step in range(TAPS.ROWS * TAPS.COLUMNS * steps):
            tap, c = step // steps, step % steps * BK
            i, j = tap // TAPS.COLUMNS, tap % TAPS.COLUMNS
            at_h, at_w = h + TAPS.top + i * TAPS.down, w + TAPS.left + j * TAPS.across
            left = x.load([image, at_h, at_w, c]).reshape(BM, BK)
            if TAPS.TURNED:
                right = weight.load([c, TAPS.ROWS * TAPS.COLUMNS - 1 - tap, n]).reshape(BK, BN)
            else:
                right = weight.load([n, tap, c]).reshape(BN, BK).T
            total = tl.dot(left, right, total)
        if TILE.PIECES == 2:  # results in half the shared memory make room for another stage
            one, other = total.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            _keep(y, out, z, bias, one, image, h, w, n, K, BOX, ACTIVATION)
            _keep(y, out, z, bias, other, image, h, w, n + BN // 2, K, BOX, ACTIVATION)
        else:
            _keep(y, out, z, bias, total, image, h, w, n, K, BOX, ACTIVATION)


@triton.jit(do_not_specialize=["boxes", "down", "across", "C", "K", "length"])
def _weight(
    sums,
    dy,
    x,
    boxes,
    down,
    across,
    C,
    K,
    length,
    BOX: tl.constexpr,
    TAPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The part of `length` boxes of sums (parts, K, taps, C)."""
    BK: tl.constexpr = BOX.images * BOX.rows * BOX.columns
    over, tiles = tl.cdiv(C, BN), tl.cdiv(K, BM)
    tap = tl.program_id(0) // (over * tiles)
    k, c = tl.program_id(0) % tiles * BM, tl.program_id(0) // tiles % over * BN
    top = TAPS.top + tap // TAPS.COLUMNS * TAPS.down
    left = TAPS.left + tap % TAPS.COLUMNS * TAPS.across
    first = tl.program_id(1) * length
    total = tl.zeros((BM, BN), tl.float32)
    for box in range(first, tl.minimum(first + length, boxes)):
        image, h, w = _place(box, down, across, BOX)
        of_dy = dy.load([image, h, w, k]).reshape(BK, BM)
        of_x = x.load([image, h + top, w + left, c]).reshape(BK, BN)
        total = tl.dot(of_dy.T, of_x, total)
    rows, columns = k + tl.arange(0, BM), c + tl.arange(0, BN)
    at = (tl.program_id(1).to(tl.int64) * K + rows[:, None]) * (TAPS.ROWS * TAPS.COLUMNS * C) + tap * C
    tl.store(sums + at + columns[None, :], total, mask=(rows < K)[:, None] & (columns < C)[None, :])


@cache
def box_of(pixels: int, images: int, rows: int, columns: int) -> Box:
    """Returns the box of that many pixels that covers images with the fewest; the widest of equal ones."""
    sides = [1 << n for n in range(pixels.bit_length())]
    found = [Box(pixels // (r * c), r, c) for r in sides for c in sides if r * c <= pixels and max(r, c) <= 256]
    found = [b for b in found if b.images <= 256]
    return min(found, key=lambda b: (_covered(b, images, rows, columns), -b.columns, -b.rows))


def _counts(box: Box, *sizes: int) -> tuple[int, int, int]:
    images, rows, columns = (triton.cdiv(n, side) for n, side in zip(sizes, box, strict=True))
    return images, rows, columns


def _covered(box: Box, *sizes: int) -> int:
    images, rows, columns = _counts(box, *sizes)
    return images * rows * columns


def _pixels(t: torch.Tensor) -> torch.Tensor:
    """Returns images (N, H, W, C), without a copy."""
    return t.permute(0, 2, 3, 1)


def _by_taps(weight: torch.Tensor) -> torch.Tensor:
    """Returns a channels_last weight (K, taps, C), without a copy."""
    return weight.permute(0, 2, 3, 1).flatten(1, 2)


def forward(
    y: torch.Tensor, z: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, window: Window,
    activation: str, precision: str
) -> None:  # fmt: skip
    top, left = window.padding
    taps = Taps(weight.shape[2], weight.shape[3], -top, -left, *window.dilation, 0)
    _start(y, z if z.numel() else None, bias, x, _by_taps(weight), taps, activation)


def backward(
    dx: torch.Tensor, dw: torch.Tensor, dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, window: Window,
    to_x: bool, to_weight: bool, precision: str
) -> None:  # fmt: skip
    if to_x and dx.numel():
        rows, columns = weight.shape[2:]
        (top, left), (down, across) = window.padding, window.dilation
        start = top - down * (rows - 1), left - across * (columns - 1)
        _start(dx, None, None, dz, _by_taps(weight), Taps(rows, columns, *start, down, across, 1), "")
    if to_weight:
        _to_weight(dw, dz, x, window)


def _start(
    y: torch.Tensor, z: _Maybe, bias: _Maybe, x: torch.Tensor, weight: torch.Tensor, taps: Taps, activation: str
) -> None:
    N, K, P, Q = y.shape
    C, gpu = x.shape[1], device.of(x)
    sizes = [str(min(1 << 20, triton.next_power_of_2(n))) for n in (N * P * Q, K, C)]
    more = z is not None or activation not in ("", "relu")
    key = " ".join([dtype_name(x), *sizes, *(["more"] * more)])
    chosen = tuning.config(
        gpu, "conv2d", "boxes", key, lambda: _rule(gpu, (N, P, Q), K, C, taps.ROWS * taps.COLUMNS, more)
    )
    box, tile = box_of(chosen["BM"], N, P, Q), Tile(chosen["BN"], 64, chosen["PIECES"], activation)
    counts = _counts(box, N, P, Q)
    boxes = counts[0] * counts[1] * counts[2]
    written = *box, tile.BN // tile.PIECES
    maps = [None if t is None else TensorMap(_pixels(t), written) for t in (y, z)]
    source = TensorMap(_pixels(x), (*box, tile.BK))
    read = (tile.BK, 1, tile.BN) if taps.TURNED else (tile.BN, 1, tile.BK)
    facts: dict[str, Any] = {"BOX": box, "TAPS": taps, "TILE": tile}
    facts |= {k: chosen[k] for k in ("num_warps", "num_stages")}
    programs = min(boxes * triton.cdiv(K, tile.BN), gpu.multiprocessors * chosen["BLOCKS"])
    arguments = *maps, bias, source, TensorMap(weight, read), boxes, counts[1], counts[2], C, K
    launch(_conv, (programs,), y, *arguments, **facts)


def _to_weight(dw: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, window: Window) -> None:
    (N, K, P, Q), C, gpu = dy.shape, x.shape[1], device.of(x)
    if not dy.numel():
        dw.zero_()
        return
    box = box_of(64, N, P, Q)
    counts = _counts(box, N, P, Q)
    boxes = counts[0] * counts[1] * counts[2]
    bm, bn = (128 if n > 64 else 64 for n in (K, C))
    rows, columns = dw.shape[2:]
    taps = Taps(rows, columns, -window.padding[0], -window.padding[1], *window.dilation, 0)
    tiles = triton.cdiv(K, bm) * triton.cdiv(C, bn) * rows * columns
    # Two waves of programs; each has at least 16 boxes, so that few sums are written.
    most = max(1, min(triton.cdiv(2 * gpu.multiprocessors, tiles), boxes // 16))
    length = triton.cdiv(boxes, most)
    parts = triton.cdiv(boxes, length)
    sums = torch.empty((parts, 1, K, rows * columns * C), dtype=torch.float32, device=x.device)
    maps = TensorMap(_pixels(dy), (*box, bm)), TensorMap(_pixels(x), (*box, bn))
    facts: dict[str, Any] = {
        "BOX": box,
        "TAPS": taps,
        "BM": bm,
        "BN": bn,
        "num_warps": 8 if bm + bn > 128 else 4,
        "num_stages": 4,
    }
    launch(_weight, (tiles, parts), sums, *maps, boxes, counts[1], counts[2], C, K, length, **facts)
    add_up(_by_taps(dw).flatten(1)[None], sums, Epilogue(None, None, None), "")


def _rule(gpu: device.Device, sizes: tuple[int, int, int], K: int, C: int, taps: int, more: bool) -> tuning.Config:
    """Returns the tile with the fewest cycles, by those of a step and of a tile's ends, in part guessed.

    Those of 128 x 128 and 128 x 256 are matmul's on an H100. Two small tiles share a multiprocessor."""
    roomy = gpu.shared_memory >= 227 << 10
    found = [(128, 256, 1140, 1), (128, 128, 627, 1), (128, 64, 350, 2), (64, 128, 400, 1)]
    found = [f for f in found if roomy and f[1] <= max(64, triton.next_power_of_2(K)) and not (more and f[1] == 256)]

    def cycles(one: tuple[int, int, int, int]) -> int:
        bm, bn, step, blocks = one
        tiles = _covered(box_of(bm, *sizes), *sizes) * triton.cdiv(K, bn)
        return triton.cdiv(tiles, gpu.multiprocessors * blocks) * (triton.cdiv(C, 64) * taps * step * blocks + 3000)

    bm, bn, _, blocks = min(found or [(64, 64, 1, 1)], key=cycles)
    pieces = 2 if bn == 256 else 1
    room = gpu.shared_memory // blocks - 1024 - bm * bn // pieces * 2 * (2 if more else 1)
    stages = max(2, min(room // (64 * 2 * (bm + bn)), 6))
    warps = 8 if bm * bn >= 128 * 128 else 4
    return {"BM": bm, "BN": bn, "PIECES": pieces, "BLOCKS": blocks, "num_warps": warps, "num_stages": stages}


def refusal(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> str | None:
    """Returns why boxes cannot serve a call, or None. Takes public arguments, or a launcher's of either direction."""
    if options.get("groups", 1) != 1:
        return "it takes one group"
    given = [x, weight, *[t for t in rest if isinstance(t, torch.Tensor) and t.dim() == 4]]
    windows = [r for r in rest if isinstance(r, Window)]
    stride = windows[0].stride if windows else options.get("stride", 1)
    if stride not in (1, (1, 1), [1, 1]):
        return "a box of pixels has neighbours only, so stride must be 1"
    for t in given:
        if t.shape[1] % 8 or (t is given[-1] and t.shape[0] % 8):  # the weight is last
            return "the copy engine takes channels of a multiple of 16 bytes"
        if not t.is_contiguous(memory_format=torch.channels_last) or t.data_ptr() % 16:
            return "the copy engine takes channels_last tensors that begin at multiples of 16 bytes"
        if 0 in t.shape:
            return "the copy engine takes no empty tensors"
    return None
