"""upsample_nearest2d: y_ij = x_kl with k = floor(i / scale_h), l = floor(j / scale_w), for each image and channel.

    backward: dx_kl is the sum of dy_ij over the pixels that are copies of x_kl

Backward finds the copies of each pixel of dx and adds them up, so it needs no atomics. A factor of two in both
directions, the usual one, has kernels of its own: a pack of x becomes whole packs of y.
Source: PyTorch's `interpolate(mode="nearest")`, whose rounding it keeps: floor of i times 1 / scale in float32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.movement._bytes import DRAM, ISSUED
from ridgeline.ops.movement._upsample import LAST, form_of, grown, pair, start, start_twice, too_large
from ridgeline.select import by_kind, eager, run


@kernel_op("upsample_nearest2d_fwd(Tensor x, float down, float across, str? impl) -> Tensor")
def _forward(x: torch.Tensor, down: float, across: float, impl: str | None) -> torch.Tensor:
    n, c, h, w = x.shape
    y = torch.empty((n, c, grown(h, down), grown(w, across)), dtype=x.dtype, device=x.device, memory_format=form_of(x))
    if y.numel():
        run(UPSAMPLE, "fwd", impl, (y,), x, (down, across))
    return y


@kernel_op("upsample_nearest2d_bwd(Tensor dy, float down, float across, int h, int w, bool last, str? impl) -> Tensor")
def _backward(
    dy: torch.Tensor, down: float, across: float, h: int, w: int, last: bool, impl: str | None
) -> torch.Tensor:
    form = LAST if last else torch.contiguous_format
    dx = torch.empty((*dy.shape[:2], h, w), dtype=dy.dtype, device=dy.device, memory_format=form)
    if dx.numel():
        run(UPSAMPLE, "bwd", impl, (dx,), dy, (down, across), w, last)
    return dx


class _Upsample(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, down: float, across: float, impl: str | None) -> torch.Tensor:
        ctx.facts = down, across, x.shape[2], x.shape[3], form_of(x) is LAST, impl
        return _forward(x, down, across, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _backward(dy, *ctx.facts), None, None, None


def reference(x: torch.Tensor, scale_factor: float | tuple[float, float]) -> torch.Tensor:
    places = []
    for size, scale in zip(x.shape[2:], pair(scale_factor), strict=True):
        step = torch.tensor(1 / scale, dtype=torch.float32, device=x.device)
        place = (torch.arange(grown(size, scale), dtype=torch.float32, device=x.device) * step).floor()
        places.append(place.long().clamp(max=size - 1))
    return x.index_select(2, places[0]).index_select(3, places[1])


def _naive(x: torch.Tensor, scale_factor: float | tuple[float, float]) -> torch.Tensor:
    return reference(x.to(torch.promote_types(x.dtype, torch.float32)), scale_factor).to(x.dtype)


def _torch(x: torch.Tensor, scale_factor: float | tuple[float, float]) -> torch.Tensor:
    return F.interpolate(x, scale_factor=pair(scale_factor), mode="nearest")


@by_kind(1)
def _look(x: torch.Tensor, scale_factor: Any, impl: str | None) -> tuple[Implementation | None, tuple[float, ...]]:
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"upsample_nearest2d: x must be a tensor, but is {type(x).__name__}")
    if x.dim() != 4 or not x.is_floating_point():
        found = f"{tuple(x.shape)} of {x.dtype}"
        raise RidgelineError(f"upsample_nearest2d: x must be (N, C, H, W) of floating point, but is {found}")
    given = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * 2
    known = all([isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < 1 << 31 for s in given])
    if len(given) != 2 or not known:
        wanted = "a number above 0 and below 2^31, or a pair of them"
        raise RidgelineError(f"upsample_nearest2d: scale_factor must be {wanted}, but is {scale_factor!r}")
    scale = pair(scale_factor)
    if grown(x.shape[2], scale[0]) < 1 or grown(x.shape[3], scale[1]) < 1:
        found = f"x is {tuple(x.shape)} and scale_factor {scale_factor}"
        raise RidgelineError(f"upsample_nearest2d: y must have at least one pixel; {found}")
    return eager(UPSAMPLE, impl, x, scale), scale


def upsample_nearest2d(
    x: torch.Tensor, scale_factor: float | tuple[float, float], *, impl: str | None = None
) -> torch.Tensor:
    """Images resized by nearest neighbour, as `torch.nn.functional.interpolate(x, scale_factor=..., mode="nearest")`.

    x: (N, C, H, W), floating point; contiguous or channels-last inputs are not copied, and y has the same memory
    format.
    scale_factor: a number above 0 and below 2^31, or one for H and one for W; integers, above all 2, are fastest.
    Returns (N, C, floor(H scale), floor(W scale)) in x's dtype; under autocast, halves give float32, as in torch.
    Gradients flow to x.
    Raises RidgelineError if x or scale_factor is none of these, if y would have no pixel, or if `impl` cannot run the
    call.
    """
    halves = (torch.float16, torch.bfloat16)
    if isinstance(x, torch.Tensor) and x.is_cuda and x.dtype in halves and torch.is_autocast_enabled("cuda"):
        x = x.float()
    plain, scale = _look(x, scale_factor, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, scale)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_Upsample, x, *scale, impl)
    return _forward(x, *scale, impl)


def cost(x: torch.Tensor, scale_factor: float | tuple[float, float]) -> tuple[Cost, Cost]:
    pixels = math.prod([grown(n, s) for n, s in zip(x.shape[2:], pair(scale_factor), strict=True)])
    y = x.shape[0] * x.shape[1] * pixels
    return Cost(nbytes(x), y * x.element_size(), 0), Cost(y * x.element_size(), nbytes(x), y)


def _twice(t: torch.Tensor, scale: Any, width: int = 0, last: bool | None = None) -> str | None:
    """Why the packed rung cannot take x, or dy with x's width and layout, or None."""
    if too_large(t, scale, width):
        return too_large(t, scale, width)
    if pair(scale) != (2.0, 2.0):
        return f"it makes images twice as high and wide, but scale_factor is {scale}"
    if form_of(t) is LAST if last is None else last:
        whole = t.shape[1] * t.element_size() % 16 == 0
        return None if whole else "channels-last images need channels of a multiple of 16 bytes"
    return None if (width or t.shape[3]) * t.element_size() % 8 == 0 else "rows must be a multiple of 8 bytes"


class Last(Spec):
    """Images in channels-last memory format."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return made.detach().contiguous(memory_format=LAST).requires_grad_(made.requires_grad)


def _case(x: Spec, scale: Any, **facts: Any) -> Case:
    last = ", channels last" if isinstance(x, Last) else ""
    return Case(f"{'x'.join(map(str, x.shape))} by {scale}{last}", (x, scale), **facts)


def _bench(x: Spec, *dtypes: str) -> Case:
    return _case(x, 2, dtypes=dtypes, use="bench")


UPSAMPLE = Op(
    upsample_nearest2d,
    reference=reference,
    cost=cost,
    sharding="x bcHW -> bcHW",
    flops={"upsample_nearest2d_fwd": lambda *_: 0, "upsample_nearest2d_bwd": lambda dy, *_: dy.numel()},
    cases=[
        _case(Spec(2, 5, 7, 12), 2),
        _case(Last(2, 16, 7, 5), 2),
        _case(Last(2, 3, 7, 5), 2),
        _case(Spec(2, 3, 7, 5), (3, 2)),
        _case(Spec(2, 3, 13, 10), (1.5, 2.7)),
        _case(Last(2, 3, 13, 10), (0.4, 1.3)),
        _case(Last(2, 3, 2, 2), 0.5),
        _case(Spec(1, 1, 1, 1), 5),
        _case(Spec(0, 3, 4, 4), 2),
        _case(Spec(4, 16, 64, 64), 2, use="quick"),
        _bench(Spec(32, 64, 128, 128), "float32", "float16"),
        _bench(Last(32, 64, 128, 128), "float16"),
        _bench(Spec(16, 32, 80, 80), "float32", "float16"),
    ],
)

# On a GPU, backward of the eager formula adds by atomics.
UPSAMPLE.eager(
    "naive", "the formula in eager PyTorch, in float32: select rows, then columns", _naive, deterministic=False
)
UPSAMPLE.eager("torch", "PyTorch's own: interpolate", _torch, served=True)
UPSAMPLE.compiled("torch.compile of PyTorch's own: one gather", _torch)
_served: dict[str, Any] = {"kind": "cuda", "served": True, "unless": too_large}
UPSAMPLE.kernel(
    "cuda",
    "one thread per output element, any scale; backward adds a pixel's copies in float32",
    fwd=partial(start, False),
    bwd=partial(start, True),
    supports=too_large,
    gain=1.0,
    counter=DRAM,
    **_served,
)
UPSAMPLE.kernel(
    "cuda_packed",
    "scale 2: 8 bytes of x become 16 in each of two rows (channels last: 16 bytes in four pixels)",
    fwd=partial(start_twice, False),
    bwd=partial(start_twice, True),
    supports=_twice,
    gain=2.0,
    counter=ISSUED,
    **_served,
)
