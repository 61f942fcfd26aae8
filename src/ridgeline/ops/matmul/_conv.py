"""conv2d's kernels: matrix products whose left operand is gathered from images (an implicit im2col).

`_conv` makes y, and the gradient of x. A program has BM pixels and BN channels of the result. It walks the taps of the
window, and for each tap the channels in steps of BK. A tap that falls outside the image loads zeros.
The gradient of x is a convolution of dy with the weight's channels exchanged. With a stride, pixels of x fall into
stride x stride classes, whose pixels use the same taps of the weight; each class is a convolution without a stride.
`_weight` makes the weight's gradient: the product of dy's channels with the pixels of one tap, summed over all pixels.
These are split into parts; the epilogue's `add_up` adds the parts in order, so reruns are bitwise equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name
from ridgeline.ops.matmul._activated import bend
from ridgeline.ops.matmul._epilogue import Epilogue, add_up


class Images(NamedTuple):
    """Images with their strides. The weight has `image` for its output channels and `channel` for its input channels;
    the other way round, it is the weight of the gradient of x."""

    data: Any
    image: int
    channel: int
    row: int
    column: int


class Sizes(NamedTuple):
    """images of H x W pixels with C channels give images of P x Q pixels with K channels."""

    images: int
    H: int
    W: int
    C: int
    P: int
    Q: int
    K: int


class Axis(NamedTuple):
    """One direction of the window. `apart`, `inverse`, `common`: see `_class`; forward, `apart` is None."""

    taps: int
    stride: int
    padding: int
    dilation: int
    apart: Any
    inverse: int
    common: int


@triton.jit
def _class(axis, which):
    """The pixels u of class `which` are pixels which + u * classes of the result. Tap i = 0, 1, .. of `count` reads
    pixel u * rate + start + i * step of the input with tap first + i * apart of the weight.

    Backward, pixel h gets dy at (h + padding - tap * dilation) / stride where that is whole. So taps of a class are
    `apart` = stride / common from each other, common = gcd(stride, dilation); the first one is a multiple of the
    `inverse` of dilation / common modulo `apart`.
    """
    if axis.apart is None:
        classes, rate, start, step = 1, axis.stride, -axis.padding, axis.dilation
        first, apart, count = 0, 1, axis.taps
    else:
        at = which + axis.padding
        classes, rate, apart, step = axis.stride, 1, axis.apart, -(axis.dilation // axis.common)
        first = (at // axis.common) * axis.inverse % axis.apart
        start = (at - first * axis.dilation) // axis.stride
        count = tl.maximum(tl.cdiv(axis.taps - first, axis.apart), 0)
        count = tl.where(at % axis.common == 0, count, 0)
    return classes, rate, start, step, first, apart, count


@triton.jit
def _conv(
    y,
    epilogue,
    x,
    w,
    sizes,
    rows,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    CHAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    images, H, W, C, P, Q, K = sizes
    across_classes = columns.stride if columns.apart is not None else 1
    a, b = tl.program_id(1) // across_classes, tl.program_id(1) % across_classes
    down, down_rate, top, down_step, first_r, apart_r, count_r = _class(rows, a)
    across, across_rate, left, across_step, first_s, apart_s, count_s = _class(columns, b)
    U, V = tl.cdiv(P - a, down), tl.cdiv(Q - b, across)
    tiles = tl.cdiv(K, BN)
    m = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    image, u, v = m // (U * V), m // V % U, m % V
    h = tl.where(image < images, u * down_rate + top, -(1 << 29))  # rows past the end read zeros
    g = v * across_rate + left
    at_x = x.data + image.to(tl.int64) * x.image + h.to(tl.int64) * x.row + g.to(tl.int64) * x.column
    at_w = w.data + (n % K)[None, :].to(tl.int64) * w.image + k[:, None].to(tl.int64) * w.channel
    i, j, c = 0, 0, 0
    total = tl.zeros((BM, BN), tl.float32)
    before = total
    for step in range(count_r * count_s * tl.cdiv(C, BK)):
        above, beside = h + i * down_step, g + j * across_step
        inside = (above >= 0) & (above < H) & (beside >= 0) & (beside < W)
        from_x = at_x + (tl.cast(i * down_step, tl.int64) * x.row + tl.cast(j * across_step, tl.int64) * x.column)
        tap = tl.cast(first_r + i * apart_r, tl.int64) * w.row + tl.cast(first_s + j * apart_s, tl.int64) * w.column
        from_w = at_w + (tap + tl.cast(c, tl.int64) * w.channel)
        of_x = from_x[:, None] + (c + k)[None, :].to(tl.int64) * x.channel
        if EVEN:
            pixels, weights = tl.load(of_x, mask=inside[:, None], other=0.0), tl.load(from_w)
        else:
            pixels = tl.load(of_x, mask=inside[:, None] & (c + k < C)[None, :], other=0.0)
            weights = tl.load(from_w, mask=(c + k < C)[:, None], other=0.0)
        total = tl.dot(pixels, weights, total, input_precision=PRECISION)
        if CHAIN and (step + 1) % CHAIN == 0:
            before += total
            total = tl.zeros((BM, BN), tl.float32)
        c += BK
        j = tl.where(c >= C, j + 1, j)
        c = tl.where(c >= C, 0, c)
        i = tl.where(j >= count_s, i + 1, i)
        j = tl.where(j >= count_s, 0, j)
    if CHAIN:
        total += before
    pixel = ((image * P + a + u * down) * Q + b + v * across)[:, None].to(tl.int64)
    here = (image < images)[:, None] & (n < K)[None, :]
    if epilogue.bias is not None:
        total += tl.load(epilogue.bias + n, mask=n < K, other=0.0).to(tl.float32)[None, :]
    if epilogue.z is not None:
        tl.store(epilogue.z + pixel * K + n[None, :], total.to(y.dtype.element_ty), mask=here)
    total = bend(total, ACTIVATION, y.dtype.element_ty)
    tl.store(y + pixel * K + n[None, :], total.to(y.dtype.element_ty), mask=here)


@triton.jit
def _weight(
    sums,
    dy,
    x,
    sizes,
    rows,
    columns,
    length,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The part of `length` pixels, a multiple of BK, of sums (parts, K, taps, C)."""
    images, H, W, C, P, Q, K = sizes
    over, tiles = tl.cdiv(C, BN), tl.cdiv(K, BM)
    tap = tl.program_id(0) // (over * tiles)
    k = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    c = tl.program_id(0) // tiles % over * BN + tl.arange(0, BN)
    r, s = tap // columns.taps, tap % columns.taps
    first = tl.program_id(1) * length
    pixel = first + tl.arange(0, BK)
    pixels = images * P * Q
    image, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
    at_dy = dy + (k % K)[:, None] + pixel[None, :].to(tl.int64) * K
    at_x = x.data + (c % C)[None, :].to(tl.int64) * x.channel
    to_image, to_row, to_column = BK // (P * Q), BK // Q % P, BK % Q
    total = tl.zeros((BM, BN), tl.float32)
    before = total
    for step in range(tl.cdiv(tl.minimum(length, pixels - first), BK)):
        h, g = p * rows.stride - rows.padding + r * rows.dilation, q * columns.stride - columns.padding
        g += s * columns.dilation
        inside = (image < images) & (h >= 0) & (h < H) & (g >= 0) & (g < W)
        from_x = image.to(tl.int64) * x.image + h.to(tl.int64) * x.row + g.to(tl.int64) * x.column
        left = tl.load(at_dy, mask=(image < images)[None, :], other=0.0)
        right = tl.load(at_x + from_x[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        if CHAIN and (step + 1) % CHAIN == 0:
            before += total
            total = tl.zeros((BM, BN), tl.float32)
        at_dy += BK * tl.cast(K, tl.int64)
        q += to_column
        p = tl.where(q >= Q, p + 1, p) + to_row
        q = tl.where(q >= Q, q - Q, q)
        image = tl.where(p >= P, image + 1, image) + to_image
        p = tl.where(p >= P, p - P, p)
    if CHAIN:
        total += before
    columns_all = rows.taps * columns.taps * C
    at = sums + (tl.program_id(1).to(tl.int64) * K + k[:, None]) * columns_all + tap * C + c[None, :]
    tl.store(at, total, mask=(k < K)[:, None] & (c < C)[None, :])


Pair = tuple[int, int]


class Window(NamedTuple):
    """A convolution's options, (rows, columns) each."""

    stride: Pair
    padding: Pair
    dilation: Pair

    def result(self, x: torch.Tensor | tuple[int, ...], weight: torch.Tensor) -> tuple[int, ...]:
        """Returns y's shape."""
        shape = x if isinstance(x, tuple) else tuple(x.shape)
        reach = [d * (t - 1) + 1 for t, d in zip(weight.shape[2:], self.dilation, strict=True)]
        size = [
            (n + 2 * p - t) // s + 1 for n, p, t, s in zip(shape[2:], self.padding, reach, self.stride, strict=True)
        ]
        return shape[0], weight.shape[0], *size

    def axes(self, weight: torch.Tensor, backward: bool = False) -> tuple[Axis, Axis]:
        down, across = (
            _axis(*options, backward)
            for options in zip(weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        )
        return down, across


def _axis(taps: int, stride: int, padding: int, dilation: int, backward: bool) -> Axis:
    common = math.gcd(stride, dilation)
    apart = stride // common
    inverse = pow(dilation // common, -1, apart) if apart > 1 else 0
    return Axis(taps, stride, padding, dilation, apart if backward else None, inverse, common)


def _images(t: torch.Tensor) -> Images:
    return Images(t, t.stride(0), t.stride(1), t.stride(2), t.stride(3))


def forward(
    y: torch.Tensor, z: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window,
    activation: str, precision: str
) -> None:  # fmt: skip
    """Fills y and, if it has elements, z, both channels_last. x and weight have any strides."""
    sizes = Sizes(x.shape[0], x.shape[2], x.shape[3], x.shape[1], y.shape[2], y.shape[3], y.shape[1])
    epilogue = Epilogue(z if z.numel() else None, bias, None)
    _start(y, epilogue, x, _images(weight), sizes, window.axes(weight), 1, activation, precision)


def backward(
    dx: torch.Tensor,
    dw: torch.Tensor,
    dz: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    window: Window,
    to_x: bool,
    to_weight: bool,
    how: str,
) -> None:
    if to_x:
        _to_x(dx, dz, weight, window, how)
    if to_weight:
        _to_weight(dw, dz, x, window, how)


def _to_x(dx: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, window: Window, precision: str) -> None:
    """Fills dx, channels_last."""
    sizes = Sizes(dy.shape[0], dy.shape[2], dy.shape[3], dy.shape[1], dx.shape[2], dx.shape[3], dx.shape[1])
    turned = _images(weight.transpose(0, 1))
    axes, classes = window.axes(weight, backward=True), window.stride[0] * window.stride[1]
    _start(dx, Epilogue(None, None, None), dy, turned, sizes, axes, classes, "", precision)


def _start(
    y: torch.Tensor, epilogue: Epilogue, x: torch.Tensor, w: Images, sizes: Sizes, axes: tuple[Axis, Axis],
    classes: int, activation: str, precision: str
) -> None:  # fmt: skip
    rows = [
        -(-n // (axis.stride if axis.apart is not None else 1))
        for n, axis in zip((sizes.P, sizes.Q), axes, strict=True)
    ]
    M, K, C = sizes.images * rows[0] * rows[1], sizes.K, sizes.C
    gpu, more = device.of(x), activation not in ("", "relu")

    def config() -> dict[str, Any]:
        sizes = [str(min(1 << 20, triton.next_power_of_2(d))) for d in (M, K, C)]
        key = " ".join([dtype_name(x), *sizes, *(["more"] * more)])
        chosen = tuning.config(
            gpu, "conv2d", "conv", key, lambda: _rule(gpu, x.dtype, precision, M * classes, K, C), lambda: _SPACE
        )
        even = C % chosen["BK"] == 0
        chain = max(1, 512 // chosen["BK"]) if _long(x, precision) else 0
        return chosen | {"EVEN": even, "CHAIN": chain}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return triton.cdiv(M, c["BM"]) * triton.cdiv(K, c["BN"]), classes

    options = {"PRECISION": precision, "ACTIVATION": activation}
    launch(_conv, grid, y, epilogue, _images(x), w, sizes, *axes, config=config, key=(M, K, C, more), **options)


def _long(x: torch.Tensor, precision: str) -> bool:
    """Returns whether sums of float32 are sums of sums, as in `matmul`."""
    return x.dtype == torch.float32 and precision == "ieee"


def _to_weight(dw: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, window: Window, precision: str) -> None:
    """Fills dw; dw and dy are channels_last."""
    sizes = Sizes(x.shape[0], x.shape[2], x.shape[3], x.shape[1], dy.shape[2], dy.shape[3], dy.shape[1])
    K, C, taps = sizes.K, sizes.C, dw.shape[2] * dw.shape[3]
    pixels = sizes.images * sizes.P * sizes.Q
    if not pixels:
        dw.zero_()
        return
    gpu = device.of(x)
    key = f"{dtype_name(x)} {' '.join(str(min(1 << 20, triton.next_power_of_2(d))) for d in (pixels, K, C))}"
    tile = tuning.config(gpu, "conv2d", "weight", key, lambda: _weight_rule(gpu, x, precision, K, C))
    tiles = triton.cdiv(K, tile["BM"]) * triton.cdiv(C, tile["BN"]) * taps
    # Two waves of programs; each has at least 16 steps, so that few sums are written.
    most = max(1, min(triton.cdiv(2 * gpu.multiprocessors, tiles), pixels // (16 * tile["BK"])))
    length = triton.cdiv(triton.cdiv(pixels, most), tile["BK"]) * tile["BK"]
    parts = triton.cdiv(pixels, length)
    sums = torch.empty((parts, 1, K, taps * C), dtype=torch.float32, device=x.device)
    options: dict[str, Any] = tile | {
        "CHAIN": max(1, 32 // tile["BK"]) if _long(x, precision) else 0,  # cuDNN's sums of 100 pixels err this little
        "PRECISION": precision,
    }
    launch(_weight, (tiles, parts), sums, dy, _images(x), sizes, *window.axes(dw), length, **options)
    add_up(dw.permute(0, 2, 3, 1).view(1, K, taps * C), sums, Epilogue(None, None, None), "")


def _rule(gpu: device.Device, dtype: torch.dtype, precision: str, M: int, K: int, C: int) -> tuning.Config:
    """Returns the tile: as large as leaves a program for most multiprocessors."""
    if dtype == torch.float32:
        ieee = precision == "ieee"
        return {"BM": 64, "BN": 64, "BK": 16 if ieee or C < 32 else 32, "num_warps": 4, "num_stages": 2}
    deep = 64 if C >= 64 and gpu.capability in (90, 100) else 32 if C >= 32 else 16
    bn = 128 if K > 64 else 64 if K > 32 else 32
    bm = 128 if triton.cdiv(M, 128) * triton.cdiv(K, bn) >= 0.7 * gpu.multiprocessors else 64
    tiles = triton.cdiv(M, 128) * triton.cdiv(K, 128)
    if gpu.capability == 90 and bn == 128 and deep == 64 and tiles > gpu.multiprocessors:
        # Two programs of 128 x 128 on a multiprocessor; where they are too few for one round, three of half the size.
        few = 2 * tiles < 3 * gpu.multiprocessors
        return {"BM": 64 if few else 128, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
    stages = 2 if gpu.backend != "cuda" else 4 if bn == 128 or deep < 64 else 3
    stages = min(stages, 3) if gpu.shared_memory < 160 << 10 else stages
    return {"BM": bm, "BN": bn, "BK": deep, "num_warps": 8 if bm * bn >= 128 * 128 else 4, "num_stages": stages}


def _weight_rule(gpu: device.Device, x: torch.Tensor, precision: str, K: int, C: int) -> tuning.Config:
    bm, bn = (128 if n > 64 else 64 if n > 32 else 32 for n in (K, C))
    if x.dtype == torch.float32:
        deep = 16 if precision == "ieee" else 32
        return {"BM": min(bm, 64), "BN": min(bn, 64), "BK": deep, "num_warps": 4, "num_stages": 2}
    stages = 2 if gpu.backend != "cuda" else 4 if gpu.shared_memory >= 160 << 10 else 3
    # Elements of other layouts than channels_last need an address each.
    deep = 64 if gpu.capability in (90, 100) and x.stride(1) == 1 else 32
    return {"BM": bm, "BN": bn, "BK": deep, "num_warps": 8 if bm * bn >= 128 * 128 else 4, "num_stages": stages}


_SPACE = [
    {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": stages}
    for bm, bn, warps in ((128, 256, 8), (128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4))
    for bk, stages in ((64, 3), (64, 4), (32, 4))
]
