"""hgemm: y = a @ b in float16 with float32 sums, in four steps from wmma to Hopper's wgmma.

    y_mn = sum_k a_mk b_kn

The matrix units multiply 16 x 8 x 16 or more at once, so the limit is how fast tiles reach them. The steps: through
registers, with ldmatrix from swizzled rows, with asynchronous copies ahead of use, and straight from shared memory that
a producer warp fills, as in matmul's `gluon`. The roof is 2 M N K operations at the rate of the matrix units.
Source: NVIDIA's PTX ISA for the fragments; the last two follow CUTLASS's multistage and warp-specialised kernels.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import kernel_op, launch
from ridgeline.cuda import CudaKernel, TensorMap
from ridgeline.op import Op
from ridgeline.ops.matmul._hopper import empty
from ridgeline.ops.matmul._ladder import case, cost, lines, product, rows, start
from ridgeline.select import run

FILE = Path(__file__).with_name("hgemm.cu")
RING: dict[str, Any] = {"BN": 256, "BK": 64, "STAGES": 3, "BAND": 8}  # for cp.async: tiles of 128 x BN
HOPPER: dict[str, Any] = {"BN": 256, "BK": 64, "STAGES": 4, "BAND": 8}


@kernel_op("hgemm_fwd(Tensor a, Tensor b, str? impl) -> Tensor")
def _forward(a: torch.Tensor, b: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = a.new_empty((a.shape[0], b.shape[1]))
    run(HGEMM, "fwd", impl, (y,), a, b)
    return y


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def hgemm(a: torch.Tensor, b: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns `a @ b` for two float16 matrices, summed in float32 and rounded once.

    a: (M, K) and b: (K, N), float16, on one device. PyTorch multiplies other floating-point dtypes. Returns (M, N),
    contiguous. The kernels take contiguous rows, the faster ones only rows that begin at multiples of 16 bytes; PyTorch
    takes any strides. The default is impl="torch", which has gradients; the kernels show each step and have none.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    return product(HGEMM, _forward, a, b, impl)


_case = partial(case, "float16")
HGEMM = Op(
    hgemm,
    reference=reference,
    cost=cost,
    sharding="a mk, b kn -> mn",
    cases=[
        _case(67, 35, 45),
        _case(67, 136, 72),
        _case(1, 1, 1),
        _case(300, 520, 200),
        _case(256, 512, 128),
        _case(33, 128, 0),
        _case(256, 256, 256, "quick"),
        _case(1024, 1024, 1024, "quick"),
        _case(4096, 4096, 4096, "bench"),
        _case(5120, 4096, 4096, "bench"),
    ],
)

WMMA, MMA, STAGED = (CudaKernel(FILE, f"hgemm_{name}", "PPPiiiqq") for name in ("wmma", "mma", "stages"))
WGMMA = CudaKernel(FILE, "hgemm_wgmma", "PMMiii")


def _staged(*tensors: torch.Tensor) -> None:
    stage = 2 * RING["BK"] * (128 + RING["BN"])
    ring = RING | {"STAGES": min(RING["STAGES"], device.of(tensors[0]).shared_memory // stage)}
    start(STAGED, (128, RING["BN"], RING["BK"]), *tensors, RUNG=3, shared=ring["STAGES"] * stage, **ring)


def _hopper(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Starts one persistent block per multiprocessor."""
    (M, K), N = a.shape, b.shape[1]
    blocks = min(device.of(a).multiprocessors, -(-M // 128) * -(-N // 256))
    facts: dict[str, Any] = {"EVEN": int(not (M % 128 or N % 256)), "ALIGNED": 1, "RUNG": 4}
    facts |= {"block": 288, "shared": 1024 + HOPPER["STAGES"] * 64 * (128 + 256) * 2}
    launch(WGMMA, (blocks,), y, TensorMap(a, (128, 64), 128), TensorMap(b, (64, 64), 128), M, N, K, **facts, **HOPPER)


def _boxes(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Returns why TMA cannot load these matrices, or None."""
    fixed = any([t.shape[0] > 1 and t.stride(0) == 0 for t in (a, b)])
    return lines(a, b) or empty(a, b) or ("it takes no matrix whose rows are expanded from one" if fixed else None)


KERNEL: dict[str, Any] = {"kind": "cuda", "dtypes": ("float16",)}
HGEMM.eager("torch", "PyTorch's own torch.matmul: cuBLAS on an NVIDIA GPU", reference, served=True)
HGEMM.kernel(
    "cuda_wmma",
    "128 x 128 tiles in padded shared memory, multiplied as 16 x 16 fragments (wmma)",
    fwd=partial(start, WMMA, (128, 128, 32), RUNG=1),
    supports=rows,
    counter="sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    arch=70,
    **KERNEL,
)
HGEMM.kernel(
    "cuda_mma",
    "ldmatrix from swizzled rows and 16 x 8 x 16 mma: no bank conflicts, no padding",
    fwd=partial(start, MMA, (128, 128, 32), RUNG=2),
    supports=rows,
    gain=1.2,
    counter="l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    arch=80,
    **KERNEL,
)
HGEMM.kernel(
    "cuda_stages",
    "cp.async with three stages in flight, bypassing registers; 128 x 256 tiles in bands that share L2",
    fwd=_staged,
    supports=lines,
    gain=1.8,
    counter="smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    arch=80,
    **KERNEL,
)
HGEMM.kernel(
    "cuda_wgmma",
    "Hopper: persistent blocks; a warp loads with TMA, two warpgroups multiply from shared memory (wgmma)",
    fwd=_hopper,
    supports=_boxes,
    gain=1.4,
    counter="sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    arch=90,
    newest=90,
    **KERNEL,
)
