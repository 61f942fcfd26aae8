"""What ops that move bytes share: the dtypes they take, the widest unit that a call's addresses allow, and the copy that they begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import nbytes

UNITS = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned",
    8: "unsigned long long",
    16: "uint4",
}  # CUDA's types by their bytes
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


_LOADS = CudaKernel(Path(__file__).with_name("copy.cu"), "copy_loads", "PPq")


def copied(y: torch.Tensor, x: torch.Tensor, loads: int = 1) -> None:
    """y, contiguous, becomes x, by the widest unit that both pointers divide by; what is strided is gathered by PyTorch.
    loads: of a thread before its first store."""
    if not x.is_contiguous():
        y.copy_(x)
        return
    unit = unit_of(x.data_ptr(), y.data_ptr())
    launch(_LOADS, (-(-nbytes(x) // (256 * loads * unit)),), y, x, nbytes(x), block=256, UNIT=UNITS[unit], LOADS=loads)
