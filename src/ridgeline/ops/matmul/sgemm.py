"""sgemm: y = a @ b in float32 without tensor cores, in nine steps from shared-memory tiles to double buffers.

    y_mn = sum_k a_mk b_kn

All arithmetic is float32 (never TF32), so the roof is 2 M N K operations at the rate of the float32 units. Each step
reuses loaded numbers more: from shared memory, then from registers, then while the next ones are in flight.
Source: days 6 and 7 of "100 days of GPU"; Volkov and Demmel, Benchmarking GPUs to tune dense linear algebra, SC 2008,
for products in registers; warp tiles as in CUTLASS.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import kernel_op
from ridgeline.cuda import CudaKernel
from ridgeline.op import Op
from ridgeline.ops.matmul._ladder import case, cost, product, rows, start
from ridgeline.select import run

FILE = Path(__file__).with_name("sgemm.cu")
# v9: 64 GM x 64 GN results per block, 4 GM x 4 GN per thread.
TILE: dict[str, Any] = {"GM": 2, "GN": 2, "BK": 8, "BAND": 8}


@kernel_op("sgemm_fwd(Tensor a, Tensor b, str? impl) -> Tensor")
def _forward(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = a.new_empty((a.shape[0], b.shape[1]))
    run(SGEMM, "fwd", impl, (y,), a, b)
    return y


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def _torch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.matmul with TF32 off, whatever the setting; torch.compile keeps to the setting."""
    if torch.compiler.is_compiling() or not a.is_cuda or (before := torch.get_float32_matmul_precision()) == "highest":
        return torch.matmul(a, b)
    torch.set_float32_matmul_precision("highest")
    try:
        return torch.matmul(a, b)
    finally:
        torch.set_float32_matmul_precision(before)


def sgemm(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns `a @ b` for two float32 matrices, in float32 arithmetic (never TF32, under autocast too).

    Exception: under torch.compile, and in gradients, PyTorch's setting for TF32 applies.

    a: (M, K) and b: (K, N), float32, on one device. PyTorch multiplies other floating-point dtypes. Returns (M, N),
    contiguous. The kernels take contiguous rows, any distance apart; PyTorch takes any strides. The default is
    impl="torch", which has gradients; the kernels show each step and have none.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    return product(SGEMM, _forward, a, b, impl)


_case = partial(case, "float32")
SGEMM = Op(
    sgemm,
    reference=reference,
    cost=cost,
    sharding="a mk, b kn -> mn",
    cases=[
        _case(67, 35, 45),
        _case(1, 1, 1),
        _case(130, 260, 36),
        _case(256, 128, 64),
        _case(33, 129, 0),
        _case(1, 300, 77),
        _case(256, 256, 256, "quick"),
        _case(1024, 1024, 1024, "quick"),
        _case(4096, 4096, 4096, "bench"),
        _case(5120, 4096, 4096, "bench"),
    ],
)


KERNELS = {v: CudaKernel(FILE, f"sgemm_v{v}", "PPPiiiqq") for v in range(1, 10)}


def _strips(*tensors: torch.Tensor) -> None:
    """As much of K as fits: 16 rows of a and 16 columns of b fill shared memory."""
    strip = device.of(tensors[0]).shared_memory // (2 * 16 * 4) // 4 * 4
    start(KERNELS[1], (16, 16, strip), *tensors, RUNG=1, STRIP=strip, shared=2 * 16 * strip * 4)


def _buffers(*tensors: torch.Tensor) -> None:
    """Two blocks per multiprocessor, with 128 registers per thread; one if edges need more registers."""
    tile = 64 * TILE["GM"], 64 * TILE["GN"], TILE["BK"]
    start(KERNELS[9], tile, *tensors, RUNG=9, BLOCKS=lambda even: 1 + even, **TILE)


SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
READS = "smsp__inst_executed_op_shared_ld.sum"
FETCHES = "smsp__inst_executed_op_global_ld.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
ISSUES = "smsp__issue_active.avg.pct_of_peak_sustained_active"


def _rung(v: int, launcher: Any, gain: float, counter: str, idea: str) -> None:
    facts: dict[str, Any] = {"supports": rows, "dtypes": ("float32",), "gain": gain, "counter": counter}
    SGEMM.kernel(f"cuda_v{v}", idea, kind="cuda", fwd=launcher, **facts)


def _tiles(v: int, side: int, depth: int) -> Any:
    return partial(start, KERNELS[v], (side, side, depth), RUNG=v)


SGEMM.eager("torch", "PyTorch's own torch.matmul with TF32 off: cuBLAS on an NVIDIA GPU", _torch, served=True)
_rung(
    1, _strips, 0.0, SECTORS, "16 x 16 results from strips of a and b as long as shared memory holds; coalesced reads"
)
_rung(2, _tiles(2, 16, 16), 2.0, WARPS, "a window of 16 along K instead of strips: more blocks fit an SM")
_rung(3, _tiles(3, 32, 32), 2.0, READS, "2 x 2 results per thread: each number from shared memory is used twice")
_rung(4, _tiles(4, 32, 32), 1.05, FETCHES, "16 bytes per read of global memory: a quarter of the reads")
FOURS = "4 x 4 results per thread, 4 along K per read of a; reads of b have 2-way bank conflicts"
_rung(5, _tiles(5, 64, 16), 1.5, CONFLICTS, FOURS)
_rung(6, _tiles(6, 128, 8), 1.7, READS, "8 x 8 results as outer products in registers: each number is used 8 times")
_rung(7, _tiles(7, 128, 8), 1.15, READS, "b read by fours along N: a quarter of its reads of shared memory")
_rung(
    8,
    _tiles(8, 128, 8),
    1.15,
    READS,
    "a's tile transposed on its way to shared memory, so that it is read by fours too",
)
_rung(9, _buffers, 1.15, ISSUES, "double buffers in shared memory and registers overlap loads and products; warp tiles")
