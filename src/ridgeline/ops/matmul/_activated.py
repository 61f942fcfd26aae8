"""Activations of conv2d and mlp: those of the products' epilogue, and ReLU, whose slope follows from its result."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.op import RidgelineError
from ridgeline.ops.matmul import _epilogue
from ridgeline.ops.matmul._epilogue import activate, slope

ACTIVATIONS: dict[str, Any] = _epilogue.ACTIVATIONS | {"relu": torch.relu}
BLOCK = 1024


def known(op: str, activation: Any, none: bool = True) -> None:
    """Raises RidgelineError unless it is the name of an activation, or, with `none`, None."""
    if (activation is None and none) or (isinstance(activation, str) and activation in ACTIVATIONS and activation):
        return
    names = f"{'None, ' * none}'relu', 'silu', 'gelu' or 'gelu_tanh'"
    raise RidgelineError(f"{op}: activation must be {names}, but is {activation!r}")


@triton.jit
def bend(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    else:
        x = activate(x, ACTIVATION, dtype)
    return x


@triton.jit
def _unbend(dz, y, dy, z, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """dz = dy activation'(z) and, if given, y = activation(z); for ReLU, z may be its result."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < size
    x = tl.load(z + i, mask=here).to(tl.float32)
    d = tl.load(dy + i, mask=here).to(tl.float32)
    if ACTIVATION == "relu":
        value = tl.where(x < 0, 0.0, x)
        d = tl.where(x <= 0, 0.0, d)  # an infinite dy gives no NaN where ReLU is 0
    else:
        value, by = slope(x, ACTIVATION, z.dtype.element_ty)
        d *= by
    tl.store(dz + i, d.to(dz.dtype.element_ty), mask=here)
    if y is not None:
        tl.store(y + i, value.to(y.dtype.element_ty), mask=here)


def unbend(dz: torch.Tensor, y: torch.Tensor | None, dy: torch.Tensor, z: torch.Tensor, activation: str) -> None:
    """Fills dz and, if given, y; all have their elements in the same order."""
    options: dict[str, Any] = {"BLOCK": BLOCK, "ACTIVATION": activation, "num_warps": 4}
    launch(_unbend, (triton.cdiv(z.numel(), BLOCK),), dz, y, dy, z, z.numel(), **options)
