"""Images in NCHW or channels_last memory, as kernels of groups of channels take them."""

from __future__ import annotations

import math

import torch


def planes(x: torch.Tensor) -> torch.Tensor:
    """x as (images, channels, space): a view of NCHW or channels_last memory, a copy if space has several strides."""
    return x if x.dim() == 3 else x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def channels_last(plane: torch.Tensor) -> bool:
    """Whether channels are closer together in memory than positions."""
    return plane.shape[2] == 1 or plane.stride(1) < plane.stride(2)


def empty_in_format(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor in x's memory format: channels_last if x's channels are adjacent, else contiguous."""
    if x.dim() < 3 or x.is_contiguous() or x.stride(1) != 1:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_permuted(x.shape, (0, *range(2, x.dim()), 1), dtype=dtype or x.dtype, device=x.device)
