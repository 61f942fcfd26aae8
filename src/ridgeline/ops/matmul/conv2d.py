"""conv2d: y[n, k, p, q] = activation(b[k] + sum over r, s, c of w[k, c, r, s] x[n, c, p stride + r dilation - pad, ..])

    backward: dz = dy activation'(z),  dx = dz convolved with w's channels exchanged,  dw = dz x by taps,  db = sum dz

It is a matrix product of pixels (rows) with the weight (columns), over taps and channels. Its left operand is gathered
from x by address, so no im2col matrix is written. Bias and activation work on the float32 sums in registers.
Source: Chetlur et al., cuDNN, 2014 (arXiv:1410.0759), which calls it an implicit GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import differentiate
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _conv, _conv_boxes
from ridgeline.ops.matmul._activated import ACTIVATIONS, known
from ridgeline.ops.matmul._conv import Pair, Window
from ridgeline.ops.matmul._conv_calls import SERVED, Convolution, fused
from ridgeline.ops.matmul.matmul import agree, in_autocast
from ridgeline.select import by_kind, eager

_T = torch.Tensor
_Maybe = torch.Tensor | None
LAST = torch.channels_last


def reference(
    x: _T, weight: _T, bias: _Maybe = None, stride: int | Pair = 1, padding: int | Pair = 0,
    dilation: int | Pair = 1, groups: int = 1, activation: str | None = None,
) -> _T:  # fmt: skip
    return ACTIVATIONS[activation or ""](F.conv2d(x, weight, bias, stride, padding, dilation, groups))


def _pair(name: str, value: Any, least: int) -> Pair:
    given = value if isinstance(value, tuple | list) else (value, value)
    if len(given) != 2 or not all([type(n) is int and n >= least for n in given]):
        wanted = f"a whole number of at least {least}, or a pair of them"
        raise RidgelineError(f"conv2d: {name} must be {wanted}, but is {value!r}")
    return given[0], given[1]


def _check(x: Any, weight: Any, bias: Any, window: Window, groups: Any, activation: Any) -> None:
    agree("conv2d", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    known("conv2d", activation)
    if type(groups) is not int or groups < 1:
        raise RidgelineError(f"conv2d: groups must be a whole number of at least 1, but is {groups!r}")
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        given = f"{tuple(x.shape)} and {tuple(weight.shape)} with groups={groups}"
        raise RidgelineError(f"conv2d: x must be (N, C, H, W) and weight (K, C / groups, R, S), but they are {given}")
    if not weight.numel() or not x.is_floating_point():
        given = f"{tuple(weight.shape)} of {weight.dtype}"
        raise RidgelineError(f"conv2d: weight must have elements and be floating point, but is {given}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RidgelineError(f"conv2d: bias must be {tuple(weight.shape[:1])}, but is {tuple(bias.shape)}")
    if min(window.result(x, weight)[2:]) < 1:
        given = f"images are {tuple(x.shape[2:])} and windows {tuple(weight.shape[2:])}; {window}"
        raise RidgelineError(f"conv2d: y must have at least one pixel; {given}")


def conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0, dilation: int | tuple[int, int] = 1, groups: int = 1,
    activation: str | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(conv2d(x, weight) + bias)`, (N, K, P, Q), as `torch.nn.functional.conv2d`.

    x: (N, C, H, W); weight: (K, C / groups, R, S); bias: (K,) or None; one dtype and device. Gradients flow to all.
    stride, padding, dilation: whole numbers, or pairs for rows and columns. groups: kernels take 1; PyTorch the rest.
    activation: None, "relu", "silu", "gelu" or "gelu_tanh", on float32 sums, which are rounded once.
    Kernels return y in channels_last memory. They read x and weight in place, whatever their strides, and are made for
    channels_last; NCHW memory is slow, and nothing is copied. Backward copies an incoming gradient that is not
    channels_last. By default half-precision dx and dw are cuDNN's, whose reruns may differ unless PyTorch is told to be
    deterministic; those of `impl="triton"` are bitwise reproducible.
    float32 products follow `torch.get_float32_matmul_precision()`, not cuDNN's own switch. Autocast casts all inputs.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, weight, bias = in_autocast(x, weight, bias)
    plain, window, numbers = _look(x, weight, bias, stride, padding, dilation, groups, activation, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, weight, bias, *window, groups, activation)
    train = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    bias = None if bias is None else bias.contiguous()
    y: torch.Tensor = differentiate(Convolution, x, weight, bias, numbers, activation or "", train, impl)
    return y


@by_kind(3, optional=1, plain=True)
def _look(
    x: Any, weight: Any, bias: Any, stride: int | Pair, padding: int | Pair, dilation: int | Pair, groups: int,
    activation: str | None, impl: str | None,
) -> tuple[Any, Window, tuple[int, ...]]:  # fmt: skip
    """Checks a call and chooses. Returns too the options, and as the launchers take them."""
    window = Window(_pair("stride", stride, 1), _pair("padding", padding, 0), _pair("dilation", dilation, 1))
    _check(x, weight, bias, window, groups, activation)
    plain = eager(CONV2D, impl, x, weight, bias, groups=groups, activation=activation)
    if plain is None and groups != 1:
        raise RidgelineError(f"conv2d: impl={impl!r} takes groups=1, but groups is {groups}; impl='torch' takes any")
    return plain, window, (*window.stride, *window.padding, *window.dilation)


MOST = 256 * 9  # numbers of x in a sum; beyond, products slower than cuDNN's cost more than the passes saved


def _unless(
    x: _T, weight: _T, bias: _Maybe = None, *_: Any, groups: int = 1, activation: Any = None, **__: Any
) -> str | None:  # fmt: skip
    """Returns why a call is left to PyTorch, or None: only a fused epilogue saves passes over memory."""
    if groups != 1:
        return "kernels take one group"
    if min(weight.shape[:2]) < 32:
        return "few channels do not fill the tiles"
    if weight.shape[1] * weight.shape[2] * weight.shape[3] > MOST:
        return "cuDNN's products are faster for so long sums, by more than the passes over memory take"
    if x.dtype == torch.float32:
        return "cuDNN is at least as fast in float32"
    return "cuDNN is at least as fast without a bias and an activation" if bias is None or not activation else None


def _refusal(x: _T, weight: _T, *_: Any, **options: Any) -> str | None:
    if options.get("groups", 1) != 1:
        return "it takes one group"
    pixels = max(x.shape[0] * x.shape[2] * x.shape[3], x.shape[0])
    return "it counts pixels in 32 bits" if pixels >= 1 << 30 else None


def cost(x: _T, weight: _T, bias: _Maybe = None, **options: Any) -> tuple[Cost, Cost]:
    """Returns the costs. An activation's input or result, which backward reads, is counted there."""
    given = [options.get(n, d) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1))]
    window = Window(*[_pair("option", g, 0) for g in given])
    N, K, P, Q = window.result(x, weight)
    y = N * K * P * Q
    flops, size = 2 * y * weight[0].numel(), y * x.element_size()
    inputs, more = nbytes(x, weight), nbytes(bias) if bias is not None else 0
    kept = size if options.get("activation") else 0
    return Cost(inputs + more, size, flops), Cost(inputs + size + kept, inputs + more, 2 * flops)


def _counted(dz: _T, x: _T, weight: _T, *rest: Any) -> int:
    return 2 * dz.numel() * weight[0].numel() * (rest[6] + rest[7])


class Last(Spec):
    """Random data in channels_last memory."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return made.detach().to(memory_format=LAST).requires_grad_(made.requires_grad)


def _case(
    x: tuple[int, int, int, int], K: int, R: int = 3, use: str = "check", bias: bool = True, kind: type[Spec] = Last,
    **options: Any
) -> Case:  # fmt: skip
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    options = {"padding": R // 2} | options
    words = [f"{n} {v}" if n != "activation" else v for n, v in options.items() if (n, v) != ("padding", R // 2)]
    name = " ".join([f"{'x'.join(map(str, x))} -> {K}", f"{R}x{R}", *words, *(["NCHW"] * (kind is Spec))])
    return Case(name, (kind(*x), kind(K, x[1], R, R), *([Spec(K)] * bias)), options, dtypes=dtypes, use=use)


# ResNet-50's convolutions of 32 images, plain and with bias and ReLU; then a VAE's, with SiLU.
RESNET = [((32, C, n, n), C) for C, n in ((64, 56), (128, 28), (256, 14), (512, 7))]
DOWN = [((32, 128, 56, 56), 128), ((32, 256, 28, 28), 256), ((32, 512, 14, 14), 512)]
ONES = [((32, 256, 56, 56), 64), ((32, 64, 56, 56), 256), ((32, 512, 28, 28), 128), ((32, 256, 14, 14), 1024)]
VAE = [((8, C, 64, 64), K) for C, K in ((128, 128), (256, 256), (512, 512), (512, 256))]
CONV2D = Op(
    conv2d,
    reference=reference,
    cost=cost,
    sharding=lambda groups=1, **_: "x bCHW, weight kCRS, bias k -> bkPQ" if groups == 1 else None,
    flops={"conv2d_undo": lambda *_: 0, "conv2d_bwd": _counted},
    cases=[
        _case((2, 6, 7, 10), 11),
        _case((2, 33, 8, 7), 20, bias=False, kind=Spec),
        _case((2, 16, 9, 10), 17, stride=2, activation="relu"),
        _case((1, 20, 11, 8), 35, dilation=2, activation="silu"),
        _case((3, 9, 10, 11), 8, 4, stride=(3, 2), padding=(2, 0), dilation=(2, 3)),
        _case((2, 40, 7, 9), 24, 1, stride=2, activation="gelu_tanh"),
        _case((2, 16, 6, 9), 8, activation="silu"),
        _case((5, 72, 10, 11), 24, padding=(2, 0), dilation=(2, 3)),
        _case((4, 64, 16, 16), 64, use="quick", activation="relu"),
        *(_case(x, K, use="bench", bias=False) for x, K in RESNET),
        *(_case(x, K, use="bench", activation="relu") for x, K in RESNET),
        *(_case(x, K, use="bench", bias=False, stride=2) for x, K in DOWN),
        *(_case(x, K, 1, use="bench", bias=False) for x, K in ONES),
        _case((32, 256, 56, 56), 512, 1, use="bench", bias=False, stride=2),
        _case((32, 64, 56, 56), 256, 1, use="bench", activation="relu"),
        *(_case(x, K, use="bench") for x, K in VAE),
        _case((8, 512, 64, 64), 512, use="bench", activation="silu"),
    ],
)

CONV2D.eager(
    "torch", "PyTorch's conv2d (cuDNN), then a pass for the bias and one for the activation", reference, served=True
)
CONV2D.compiled("cuDNN's product; bias and activation fused into one pass by torch.compile")
CONV2D.kernel(
    "triton",
    "an implicit matrix product: tiles gathered by address, bias and activation on the sums in registers",
    kind="triton",
    fwd=_conv.forward,
    bwd=_conv.backward,
    supports=_refusal,
)
CONV2D.kernel(
    "triton_boxes",
    "stride 1: TMA gathers boxes of pixels, with zeros outside images; programs stay",
    kind="triton",
    fwd=_conv_boxes.forward,
    bwd=_conv_boxes.backward,
    supports=_conv_boxes.refusal,
    dtypes=("float16", "bfloat16"),
    arch=90,
    newest=90,  # no later card has timed it
)
# cuDNN's sums over pixels have no order, unless PyTorch is told to be deterministic.
CONV2D.kernel(
    SERVED,
    "forward by gathers, 1x1 windows by boxes; gradients of x and weight by cuDNN",
    kind="triton",
    fwd=fused,
    bwd=_conv.backward,
    supports=_refusal,
    unless=_unless,
    leaves=("fwd",),
    deterministic=False,
    served=True,
)
