"""upsample_nearest2d: y_ij = x_kl of the pixel before: k = floor(i / scale), l = floor(j / scale), for each image and channel.

    backward: dx_kl is the sum of dy_ij over the pixels that are copies of x_kl

Backward looks from each pixel of dx for its copies, so nothing is added twice in one place and no atomics are needed. Twice in both
directions, which is what networks do, has a form of its own: a pack of x becomes whole packs of y.
Source: PyTorch's `interpolate(mode="nearest")`, whose rounding it keeps: floor of i times 1 / scale in float32.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("upsample_nearest2d.cu")
_FWD, _BWD = CudaKernel(FILE, "upsample_fwd", "PPqiiiiiff"), CudaKernel(FILE, "upsample_bwd", "PPqiiiiiff")
_FWD2, _BWD2 = CudaKernel(FILE, "upsample2_fwd", "PPqii"), CudaKernel(FILE, "upsample2_bwd", "PPqii")
LAST, Scale = torch.channels_last, float | tuple[float, float] | list[float]
ITEMS = (4, 2), (2, 1)  # units of a thread: forward and backward, of rows and of channels


def _pair(scale: Any) -> list[float]:
    return [float(s) for s in scale] if isinstance(scale, tuple | list) else [float(scale)] * 2


def _form(x: torch.Tensor) -> torch.memory_format:
    """Channels last where x is so and not row by row."""
    return LAST if x.is_contiguous(memory_format=LAST) and not x.is_contiguous() else torch.contiguous_format


def _grown(size: int, scale: float) -> int:
    return size * int(scale) if scale == int(scale) else math.floor(size * scale)


def _start(back: bool, out: torch.Tensor, given: torch.Tensor, scale: list[float], *_: Any) -> None:
    """A number of the result a thread, y of x or dx of dy. What is strided is laid out as the result first."""
    given = given.contiguous(memory_format=_form(out))
    x, y = (out, given) if back else (given, out)
    sizes = *x.shape[2:], *y.shape[2:], x.shape[1], *[1 / s for s in scale]
    launch(_BWD if back else _FWD, (-(-out.numel() // 256),), out, given, out.numel(), *sizes, block=256, **_macros(x, y))


def _start2(back: bool, out: torch.Tensor, given: torch.Tensor, *_: Any) -> None:
    """Twice in both directions, a unit of x or dx at a time: 8 bytes, or 16 of a pixel's channels."""
    given = given.contiguous(memory_format=_form(out))
    if given.data_ptr() % 16:
        given = given.clone()
    x, y = (out, given) if back else (given, out)
    macros = _macros(x, y)
    unit, items = (16 if macros["LAST"] else 8) // x.element_size(), ITEMS[back][macros["LAST"]]
    channels = x.shape[1] // unit if macros["LAST"] else 1
    units, across = x.numel() // unit, x.shape[3] * channels if macros["LAST"] else x.shape[3] // unit
    blocks = -(-units // (256 * items))
    launch(_BWD2 if back else _FWD2, (blocks,), out, given, units, across, channels, block=256, ITEMS=items, **macros)


def _macros(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    index = "unsigned" if max(x.numel(), y.numel()) < 1 << 31 else "long long"
    return {"DTYPE": CTYPE[x.dtype], "INDEX": index, "LAST": int(_form(y) is LAST)}


@kernel_op("upsample_nearest2d_fwd(Tensor x, float[] scale, str? impl) -> Tensor")
def _forward(x: torch.Tensor, scale: list[float], impl: str | None) -> torch.Tensor:
    n, c, h, w = x.shape
    y = torch.empty((n, c, _grown(h, scale[0]), _grown(w, scale[1])), dtype=x.dtype, device=x.device, memory_format=_form(x))
    if y.numel():
        run(UPSAMPLE, "fwd", impl, (y,), x, scale)
    return y


@kernel_op("upsample_nearest2d_bwd(Tensor dy, float[] scale, int h, int w, bool last, str? impl) -> Tensor")
def _backward(dy: torch.Tensor, scale: list[float], h: int, w: int, last: bool, impl: str | None) -> torch.Tensor:
    form = LAST if last else torch.contiguous_format
    dx = torch.empty((*dy.shape[:2], h, w), dtype=dy.dtype, device=dy.device, memory_format=form)
    if dx.numel():
        run(UPSAMPLE, "bwd", impl, (dx,), dy, scale, w, last)
    return dx


class _Upsample(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: list[float], impl: str | None) -> torch.Tensor:
        ctx.facts = scale, x.shape[2], x.shape[3], _form(x) is LAST, impl
        return _forward(x, scale, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _backward(dy, *ctx.facts), None, None


def reference(x: torch.Tensor, scale_factor: Scale) -> torch.Tensor:
    places = []
    for size, scale in zip(x.shape[2:], _pair(scale_factor), strict=True):
        step = torch.tensor(1 / scale, dtype=torch.float32, device=x.device)
        place = (torch.arange(_grown(size, scale), dtype=torch.float32, device=x.device) * step).floor()
        places.append(place.long().clamp(max=size - 1))
    return x.index_select(2, places[0]).index_select(3, places[1])


def _naive(x: torch.Tensor, scale_factor: Scale) -> torch.Tensor:
    return reference(x.to(torch.promote_types(x.dtype, torch.float32)), scale_factor).to(x.dtype)


def _torch(x: torch.Tensor, scale_factor: Scale) -> torch.Tensor:
    return F.interpolate(x, scale_factor=_pair(scale_factor), mode="nearest")


def upsample_nearest2d(x: torch.Tensor, scale_factor: Scale, *, impl: str | None = None) -> torch.Tensor:
    """Images in another size, each pixel a copy of x's, as `torch.nn.functional.interpolate(x, scale_factor=..., mode="nearest")`.

    x: (N, C, H, W), floating point; row by row and channels last are taken as they are, and y is as x is. scale_factor: a number above
    0, or one for H and one for W; integer ones and two are quickest. y: (N, C, floor(H scale), floor(W scale)). Gradients flow to x.
    Raises RidgelineError where x is no such tensor, a scale is none, y would have no pixel, or `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"upsample_nearest2d: x must be a tensor, and is {type(x).__name__}")
    if x.dim() != 4 or not x.is_floating_point():
        raise RidgelineError(f"upsample_nearest2d: x must be (N, C, H, W) of floating point, and is {tuple(x.shape)} of {x.dtype}")
    given = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * 2
    known = all([isinstance(s, int | float) and not isinstance(s, bool) and 0 < s < math.inf for s in given])
    if len(given) != 2 or not known:
        raise RidgelineError(f"upsample_nearest2d: scale_factor must be a number above 0 or a pair of such, and is {scale_factor!r}")
    scale = _pair(scale_factor)
    if _grown(x.shape[2], scale[0]) < 1 or _grown(x.shape[3], scale[1]) < 1:
        raise RidgelineError(f"upsample_nearest2d: y must have a pixel; x is {tuple(x.shape)} and scale_factor {scale_factor}")
    plain = eager(UPSAMPLE, impl, x, scale)
    if plain is not None and plain.call is not None:
        return plain.call(x, scale)
    return differentiate(_Upsample, x, scale, impl) if torch.is_grad_enabled() and x.requires_grad else _forward(x, scale, impl)


def cost(x: torch.Tensor, scale_factor: Scale) -> tuple[Cost, Cost]:
    pixels = math.prod([_grown(n, s) for n, s in zip(x.shape[2:], _pair(scale_factor), strict=True)])
    y = x.shape[0] * x.shape[1] * pixels
    return Cost(nbytes(x), y * x.element_size(), 0), Cost(y * x.element_size(), nbytes(x), y)


def _twice(t: torch.Tensor, scale: Any, width: int = 0, last: bool | None = None) -> str | None:
    """What the packed rung takes, of x, or of dy with x's width and layout."""
    if _pair(scale) != [2.0, 2.0]:
        return f"it makes images twice as high and as wide, and scale_factor is {scale}"
    if _form(t) is LAST if last is None else last:
        return None if t.shape[1] * t.element_size() % 16 == 0 else "it takes channels, where they are last, of a multiple of 16 bytes"
    return None if (width or t.shape[3]) * t.element_size() % 8 == 0 else "it takes rows of a multiple of 8 bytes"


class Last(Spec):
    """Images whose channels are the innermost dimension."""

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
    cases=[
        _case(Spec(2, 5, 7, 12), 2),
        _case(Last(2, 16, 7, 5), 2),
        _case(Last(2, 3, 7, 5), 2),
        _case(Spec(2, 3, 7, 5), (3, 2)),
        _case(Spec(2, 3, 13, 10), (1.5, 2.7)),
        _case(Last(2, 3, 13, 10), (0.4, 1.3)),
        _case(Spec(1, 1, 1, 1), 5),
        _case(Spec(0, 3, 4, 4), 2),
        _case(Spec(4, 16, 64, 64), 2, use="quick"),
        _bench(Spec(32, 64, 128, 128), "float32", "float16"),
        _bench(Last(32, 64, 128, 128), "float16"),
        _bench(Spec(16, 32, 80, 80), "float32", "float16"),
    ],
)

# Not deterministic: on a GPU backward adds up by atomics.
UPSAMPLE.eager("naive", "the formula in eager PyTorch, in float32: rows are picked, then columns; backward adds up by index", _naive, deterministic=False)
UPSAMPLE.eager("torch", "PyTorch's own", _torch, served=True)
UPSAMPLE.compiled("PyTorch's own by torch.compile: one gather", _torch)
UPSAMPLE.kernel(
    "cuda", "a pixel of the result a thread, at any scale; backward looks for a pixel's copies and adds them in float32", kind="cuda", served=True,
    fwd=partial(_start, False), bwd=partial(_start, True), gain=1.0, counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)  # fmt: skip
UPSAMPLE.kernel(
    "cuda_packed", "twice: 8 bytes of x become 16 in each of two rows (of channels that are last 16, in four pixels), several on their way a thread",
    kind="cuda", fwd=partial(_start2, False), bwd=partial(_start2, True), supports=_twice, served=True, gain=2.0, counter="smsp__inst_executed.sum",
)  # fmt: skip
