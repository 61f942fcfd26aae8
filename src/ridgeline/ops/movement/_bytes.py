"""What ops that only move bytes share: the dtypes they take, and the widest unit that a call's addresses allow."""

from __future__ import annotations

from typing import Any

import torch

UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}  # CUDA's types by their bytes
DTYPES = (
    *("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64", "bool"),
)


def unit_of(*numbers: int) -> int:
    """The most bytes, up to 16, that pointers and sizes in bytes all divide by."""
    return next(unit for unit in (16, 8, 4, 2, 1) if not any(n % unit for n in numbers))


def aligned(x: torch.Tensor, *_: Any) -> str | None:
    """Why a call is not for a rung that takes whole rows by 16 bytes, or None."""
    if not x.is_contiguous():
        return "it takes a contiguous tensor"
    return None if x.data_ptr() % 16 == 0 else "it takes a tensor that begins at a multiple of 16 bytes"
