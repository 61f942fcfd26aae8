"""What the templates share: the gradient of silu, the check of an input, and autograd for a bare function."""

from collections.abc import Callable

import torch

SCHEMA = "silu(Tensor x) -> Tensor"


def checked(x: torch.Tensor) -> torch.Tensor:
    """The input as the kernel takes it: contiguous float32."""
    if x.dtype != torch.float32:
        raise TypeError(f"silu takes float32, not {x.dtype}")
    return x.contiguous()


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def setup_context(ctx, inputs, output) -> None:
    """For `register_autograd`: what backward needs."""
    ctx.save_for_backward(inputs[0])


def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
    """For `register_autograd`."""
    return gradient(*ctx.saved_tensors, dy)


def differentiable(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that starts a kernel, with its gradient, for autograd."""

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
            return gradient(*ctx.saved_tensors, dy)

    return Silu.apply
