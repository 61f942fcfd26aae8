"""What the functions for experts share: autocast, and what may be wrong with their arguments."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import OWN, RidgelineError, dense_only


def cast(*given: Any) -> tuple[Any, ...]:
    """Returns the tensors, in autocast's dtype if it is enabled for the first one's device."""
    kind = "cuda" if isinstance(given[0], torch.Tensor) and given[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind):
        return given
    to = torch.get_autocast_dtype(kind)

    def half(t: Any) -> bool:
        return isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64

    return tuple([t.to(to) if half(t) else t for t in given])


@torch.compiler.assume_constant_result  # torch.compile guards on the setting
def precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def tensors(op: str, **given: Any) -> None:
    """Raises RidgelineError unless all are dense tensors on the device of the first; None may be given."""
    first, x = next(iter(given.items()))
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        dense_only(op, (t,))
        if t.device != x.device:
            raise RidgelineError(f"{op}: {first} and {name} must be on one device, got {x.device} and {t.device}")


def alike(op: str, **given: torch.Tensor) -> None:
    """Raises RidgelineError unless all have the dtype of the first, which is floating point."""
    first, x = next(iter(given.items()))
    if not x.is_floating_point():
        raise RidgelineError(f"{op}: {first} must be floating point (float32, float16, bfloat16), got {x.dtype}")
    for name, t in given.items():
        if t.dtype != x.dtype:
            raise RidgelineError(f"{op}: {first} and {name} must agree in dtype, got {x.dtype} and {t.dtype}")


def values(t: torch.Tensor) -> Any:
    """Returns a tensor's values as lists, or None if it has none yet, as while tracing."""
    known = not (torch.compiler.is_compiling() or t.is_meta or type(t) not in OWN)
    return t.tolist() if known and not torch._C._are_functorch_transforms_active() else None


@kernel_op("grouped_matmul_collect(Tensor(a!) total, Tensor more) -> ()")
def _collect(total: torch.Tensor, more: torch.Tensor) -> None:
    """Adds to a buffer. A registered op, since torch.compile of PyTorch 2.11 drops an add_ of a Function's backward."""
    total.add_(more)


class Into(torch.autograd.Function):
    """Passes a weight on. Backward adds the weight's gradient to a float32 buffer instead of returning it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _collect(ctx.main_grad, grad)
        return None, None


def check_main_grad(op: str, main_grad: torch.Tensor, weight: torch.Tensor) -> None:
    if main_grad.dtype != torch.float32 or main_grad.shape != weight.shape or main_grad.requires_grad:
        wanted = f"a float32 buffer {tuple(weight.shape)} that needs no gradient"
        found = f"{main_grad.dtype} {tuple(main_grad.shape)}" + ", which needs one" * main_grad.requires_grad
        raise RidgelineError(f"{op}: main_grad must be {wanted}, got {found}")
