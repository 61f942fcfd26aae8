"""Shared by ops that move bytes: accepted dtypes, the widest unit that addresses allow, profiler metrics and a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import nbytes

# CUDA's types by size in bytes.
UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
DTYPES = (
    *("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "int32", "int64", "bool"),
)
# Metrics of Nsight Compute: bandwidth as a share of the peak, instructions issued, sectors per store.
DRAM, ISSUED = "dram__throughput.avg.pct_of_peak_sustained_elapsed", "smsp__inst_executed.sum"
SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"


def unit_of(*numbers: int) -> int:
    """The largest power of two, up to 16, that divides all these pointers and sizes in bytes."""
    return next(unit for unit in (16, 8, 4, 2, 1) if not any(n % unit for n in numbers))


def aligned(x: torch.Tensor, *_: Any) -> str | None:
    """Why a rung that moves 16 bytes at a time cannot take x, or None."""
    if not x.is_contiguous():
        return "it takes a contiguous tensor"
    return None if x.data_ptr() % 16 == 0 else "it takes a tensor whose address is a multiple of 16 bytes"


_LOADS = CudaKernel(Path(__file__).with_name("copy.cu"), "copy_loads", "PPq")


def copied(y: torch.Tensor, x: torch.Tensor, loads: int = 1) -> None:
    """Copies x into contiguous y in the widest unit that both addresses allow; PyTorch copies strided inputs.

    loads: how many units a thread loads before its first store.
    """
    if not x.is_contiguous():
        y.copy_(x)
        return
    unit = unit_of(x.data_ptr(), y.data_ptr())
    launch(_LOADS, (-(-nbytes(x) // (256 * loads * unit)),), y, x, nbytes(x), block=256, UNIT=UNITS[unit], LOADS=loads)
