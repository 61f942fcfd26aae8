"""Tensor maps (TMA) of rows (B, T, heads, columns), by which Gluon kernels of the recurrent ops move them."""

from __future__ import annotations

import torch

from ridgeline.cuda import TensorMap


def mapped(t: torch.Tensor) -> bool:
    """Whether TMA takes the tensor's rows: they begin at multiples of 16 bytes, and none is repeated."""
    steps = [s for s, n in zip(t.stride()[:3], t.shape, strict=False) if n > 1]
    return t.data_ptr() % 16 == 0 and all([s > 0 and s * t.element_size() % 16 == 0 for s in steps])


def rows_map(t: torch.Tensor, rows: int, width: int, packed: bool, swizzle: int = 128) -> TensorMap:
    """A map whose boxes are `rows` tokens of a head and `width` columns. packed: boxes end with their sequence."""
    return TensorMap(t.transpose(1, 2), (*[1] * (2 + packed), rows, width), swizzle, packed)
