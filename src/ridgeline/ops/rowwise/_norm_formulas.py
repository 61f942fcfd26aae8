"""Shared by the norms' references, their rungs in plain PyTorch and their cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.op import Spec
from ridgeline.ops.rowwise._rows import Maybe


def scaled(x_hat: torch.Tensor, weight: Maybe, offset: float, rounding: str, dtype: torch.dtype) -> torch.Tensor:
    """y in plain PyTorch, from the normalised row. dtype: x's."""
    if weight is None:
        return x_hat.to(dtype)
    w = widened(weight) + offset if offset else weight
    if rounding == "once":
        return (x_hat * w).to(dtype)
    return (x_hat.to(dtype) * w).to(torch.promote_types(dtype, weight.dtype))


def torch_rms_norm(x: torch.Tensor, weight: Maybe, eps: float, offset: float, rounding: str) -> torch.Tensor:
    """rms_norm by PyTorch's own kernel."""
    if rounding == "llama":
        return scaled(F.rms_norm(x, x.shape[-1:], None, eps), weight, offset, rounding, x.dtype)
    v, w = alike(x, widened(weight) + offset if weight is not None and offset else weight)
    return F.rms_norm(v, x.shape[-1:], w, eps).to(x.dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or float64 unchanged: how references compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def alike(x: torch.Tensor, *vectors: Maybe) -> tuple[Any, ...]:
    """x and vectors of one dtype, as torch's own norms need on a GPU: unchanged, or all widened if one differs."""
    same = all([t is None or t.dtype == x.dtype for t in vectors])
    return (x, *vectors) if same else (widened(x), *[None if t is None else widened(t) for t in vectors])


@dataclass(frozen=True, init=False)
class Near(Spec):
    """Random data around a value; by default like the weights of a norm in training."""

    scale: float = 0.1
    about: float = 1.0

    def __init__(self, *shape: int, scale: float = 0.1, about: float = 1.0, **facts: Any):
        super().__init__(*shape, **facts)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "about", about)

    def make(self, *args: Any) -> torch.Tensor:
        x = super().make(*args)
        with torch.no_grad():
            return x.mul_(self.scale).add_(self.about)
