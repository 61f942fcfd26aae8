"""conv2d's registered ops and its autograd.Function. Backward reads z, the activation's input, or for ReLU y itself.

The rung that serves has gradients of x and the weight by cuDNN, which is faster there than our kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import Function, first_order, kernel_op
from ridgeline.op import LOADED
from ridgeline.ops.matmul import _conv, _conv_boxes
from ridgeline.ops.matmul._activated import unbend
from ridgeline.ops.matmul._conv import Window
from ridgeline.ops.matmul.matmul import precision, sum_of_rows
from ridgeline.select import run

_T = torch.Tensor
_Maybe = torch.Tensor | None
LAST = torch.channels_last
SERVED = "triton_fused"
OPTIONS = "int down, int across, int top, int left, int apart, int beside"  # stride, padding, dilation: rows, columns


def _window(down: int, across: int, top: int, left: int, apart: int, beside: int) -> Window:
    return Window((down, across), (top, left), (apart, beside))


def _empty(shape: Any, like: _T) -> _T:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=LAST)


@kernel_op(
    f"conv2d_fwd(Tensor x, Tensor weight, Tensor? bias, {OPTIONS}, str activation, bool keep, str precision, "
    "str? impl) -> (Tensor, Tensor)"
)
def _fwd_op(x: _T, weight: _T, bias: _Maybe, *rest: Any) -> tuple[_T, _T]:
    *options, activation, keep, how, impl = rest
    window = _window(*options)
    shape = window.result(x, weight)
    y, z = _empty(shape, x), _empty(shape, x) if keep else x.new_empty(0)
    run(LOADED["conv2d"], "fwd", impl, (y, z), x, weight, bias, window, activation, how)
    return y, z


@kernel_op(
    f"conv2d_bwd(Tensor dz, Tensor x, Tensor weight, {OPTIONS}, bool to_x, bool to_weight, str precision, str? impl) "
    "-> (Tensor, Tensor)"
)
def _bwd_op(dz: _T, x: _T, weight: _T, *rest: Any) -> tuple[_T, _T]:
    *options, to_x, to_weight, how, impl = rest
    dx, dw = (_empty(t.shape, t) if want else t.new_empty(0) for t, want in ((x, to_x), (weight, to_weight)))
    run(LOADED["conv2d"], "bwd", impl, (dx, dw), dz, x, weight, _window(*options), to_x, to_weight, how)
    return dx, dw


@kernel_op("conv2d_undo(Tensor dy, Tensor z, str activation) -> Tensor")
def _undo_op(dy: _T, z: _T, activation: str) -> _T:
    dz = torch.empty_like(z)
    unbend(dz, None, dy, z, activation)
    return dz


def fused(y: _T, z: _T, x: _T, weight: _T, bias: _Maybe, window: Window, *rest: Any) -> None:
    """Fills y and z by boxes where they are faster, for 1 x 1 windows, and else by gathers."""
    pointwise = weight.shape[2] * weight.shape[3] == 1
    boxes = pointwise and device.of(x).capability == 90 and x.dtype != torch.float32
    boxes = boxes and _conv_boxes.refusal(x, weight, bias, window) is None
    (_conv_boxes if boxes else _conv).forward(y, z, x, weight, bias, window, *rest)


class Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, x: _T, weight: _T, bias: _Maybe, options: tuple[int, ...], activation: str, train: bool,
        impl: str | None
    ) -> _T:  # fmt: skip
        keep = train and activation not in ("", "relu")
        y, z = _fwd_op(x, weight, bias, *options, activation, keep, precision(), impl)
        ctx.save_for_backward(x, weight, z if keep else y if activation else None)  # ReLU's slope follows from y
        ctx.facts = options, activation, impl
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        x, weight, z = ctx.saved_tensors
        options, activation, impl = ctx.facts
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        dz = dy.contiguous(memory_format=LAST)
        if activation:
            dz = _undo_op(dz, z, activation)
        dx = dw = None
        # float32 products would follow cuDNN's own switch.
        if (to_x or to_weight) and impl in (None, SERVED) and x.dtype != torch.float32:
            wanted = [to_x, to_weight, False]
            window = _window(*options)
            dx, dw, _ = torch.ops.aten.convolution_backward(dz, x, weight, None, *window, False, [0, 0], 1, wanted)
        elif to_x or to_weight:
            dx, dw = _bwd_op(dz, x, weight, *options, to_x, to_weight, precision(), impl)
        db = sum_of_rows(dz.permute(0, 2, 3, 1).reshape(-1, dz.shape[1])) if to_bias else None
        return dx if to_x else None, dw if to_weight else None, db, None, None, None, None
