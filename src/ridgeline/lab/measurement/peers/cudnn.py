"""cuDNN's convolution by the algorithm that cuDNN timed as the fastest, forward and backward.

The implementation `torch` leaves the choice to cuDNN's heuristics.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "torch", "torch", "cuda"


@cache
def _function() -> Any:
    """Returns the autograd.Function whose backward has the switch on too."""
    import torch

    def fastest() -> Any:
        return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=torch.backends.cudnn.allow_tf32)

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, window: tuple[Any, ...]) -> Any:
            ctx.save_for_backward(x, weight)
            ctx.window, ctx.bias = window, None if bias is None else [*bias.shape]
            with fastest():
                return torch.ops.aten.convolution(x, weight, bias, *window)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            need = [*ctx.needs_input_grad[:3]]
            with fastest():
                grads = torch.ops.aten.convolution_backward(dy, *ctx.saved_tensors, ctx.bias, *ctx.window, need)
            return *grads, None

    return Convolution


def _conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None,
    groups: int = 1, **options: Any
) -> torch.Tensor:  # fmt: skip
    import torch

    if not x.is_cuda or torch.version.hip:
        raise RidgelineError(f"cuDNN needs an NVIDIA GPU, and x is on {x.device}")
    pairs = []
    for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = options.get(name, usual)
        pairs.append([value, value] if isinstance(value, int) else [*value])
    z = _function().apply(x, weight, bias, (*pairs, False, [0, 0], groups))
    return z if activation is None else _activate(z, activation)


def _activate(z: torch.Tensor, activation: str) -> torch.Tensor:
    from torch.nn import functional as F

    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    y: torch.Tensor = getattr(F, activation)(z)
    return y


PEERS = {"conv2d": {"cudnn_fastest": _conv2d}}
