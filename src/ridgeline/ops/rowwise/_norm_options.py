"""The options of the norms: eps, offset and rounding, what may be wrong with them, and the result's dtype."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from ridgeline.op import RidgelineError
from ridgeline.ops.rowwise._rows import Maybe

ROUNDINGS = ("once", "llama")


def known_eps(name: str, eps: Any) -> float:
    """A norm's eps as a float. Raises RidgelineError if it is not a number of at least 0."""
    if not isinstance(eps, int | float) or not eps >= 0:
        raise RidgelineError(f"{name}: eps must be a number of at least 0, but is {eps!r}")
    return float(eps)


def known_offset(name: str, offset: Any, rounding: Any, weight: Maybe) -> float:
    """A norm's offset as a float. Raises RidgelineError if it cannot be one, or if there is no such rounding."""
    if rounding not in ROUNDINGS:
        raise RidgelineError(f"{name}: rounding must be 'once' or 'llama', but is {rounding!r}")
    if not isinstance(offset, int | float) or not abs(offset) < inf:
        raise RidgelineError(f"{name}: offset must be a finite number, but is {offset!r}")
    if offset and weight is None:
        raise RidgelineError(f"{name}: offset={offset!r} is added to the weight, but weight is None")
    return float(offset)


def result_dtype(x: torch.Tensor, weight: Maybe, rounding: str) -> torch.dtype:
    """The dtype of y: x's, or for "llama" that of x times the weight."""
    if weight is None or rounding == "once" or weight.dtype == x.dtype:
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)
