"""copy: y = x in a new contiguous tensor. Nothing is computed, so the ladder climbs to the memory bandwidth itself.

Each rung keeps more bytes in flight. Latency times bandwidth asks for about 40 KB per multiprocessor of an H100, and
threads that each wait for 4 bytes hold at most 8 KB. `ridgeline doctor` reports the best rung as the copy roof.
Source: Little's law; McCalpin, STREAM: sustainable memory bandwidth in high performance computers, 1995.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import Function, differentiate, kernel_op, launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.movement._bytes import DRAM, DTYPES, ISSUED, UNITS, aligned, copied
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("copy.cu")
_UNITS, _BULK = CudaKernel(FILE, "copy_units", "PPq"), CudaKernel(FILE, "copy_bulk", "PPq")
CHUNK, STAGES, BLOCKS = 16 << 10, 6, 2  # bytes and length of a block's ring; blocks per multiprocessor


def _scalar(y: torch.Tensor, x: torch.Tensor) -> None:
    launch(_UNITS, (-(-x.numel() // 256),), y, x, x.numel(), block=256, UNIT=UNITS[x.element_size()])


def _bulk(y: torch.Tensor, x: torch.Tensor) -> None:
    blocks = min(BLOCKS * device.of(x).multiprocessors, max(1, -(-nbytes(x) // CHUNK)))
    launch(_BULK, (blocks,), y, x, nbytes(x), block=32, shared=CHUNK * STAGES, CHUNK=CHUNK, STAGES=STAGES)


@kernel_op("copy_fwd(Tensor x, str? impl) -> Tensor")
def _forward(x: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        run(COPY, "fwd", impl, (y,), x)
    return y


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, impl: str | None) -> torch.Tensor:
        return _forward(x, impl)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, None


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def copy(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """A contiguous copy of x, as `x.clone(memory_format=torch.contiguous_format)`. Gradients pass to x unchanged.

    x: any shape, strides and dtype. Raises RidgelineError if x is not a dense tensor, or if `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"copy: x must be a tensor, but is {type(x).__name__}")
    plain = eager(COPY, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x)
    return differentiate(_Copy, x, impl) if torch.is_grad_enabled() and x.requires_grad else _forward(x, impl)


def cost(x: torch.Tensor) -> tuple[Cost, None]:
    return Cost(nbytes(x), nbytes(x), 0), None


def _contiguous(x: torch.Tensor, *_: Any) -> str | None:
    return None if x.is_contiguous() else "it takes a contiguous tensor"


COPY = Op(
    copy,
    reference=reference,
    cost=cost,
    sharding="x * -> *",
    roof="copy",
    cases=[
        Case("33x129", (Spec(33, 129),)),
        Case("16x40", (Spec(16, 40),)),
        Case("100003 of int8", (Spec(100003, dtype="int8"),), dtypes=("float32",)),
        Case("3000 of int64", (Spec(3000, dtype="int64", high=1 << 40),), dtypes=("float32",)),
        Case("1", (Spec(1),)),
        Case("0", (Spec(0),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        Case("16384x16384", (Spec(16384, 16384, grad=False),), dtypes=("float32", "bfloat16"), use="bench"),
    ],
)

_facts: dict[str, Any] = {"kind": "cuda", "dtypes": DTYPES}
COPY.eager("torch", "PyTorch's own: clone", reference, served=True)
COPY.kernel(
    "cuda",
    "one element per thread: 8 KB in flight in a multiprocessor full of threads",
    fwd=_scalar,
    supports=_contiguous,
    gain=0.7,
    counter=DRAM,
    **_facts,
)
COPY.kernel(
    "cuda_packed",
    "16 bytes per thread: fewer instructions, more bytes in flight; PyTorch copies strided inputs",
    fwd=copied,
    served=True,
    gain=1.5,
    counter=ISSUED,
    **_facts,
)
COPY.kernel(
    "cuda_loads",
    "two loads of 16 bytes per thread before its first store: half the blocks",
    fwd=partial(copied, loads=2),
    supports=_contiguous,
    gain=1.02,
    counter=DRAM,
    **_facts,
)
COPY.kernel(
    "cuda_bulk",
    "bulk copies of 16 KB through a ring in shared memory: no registers, 192 KB in flight",
    fwd=_bulk,
    supports=aligned,
    arch=90,
    gain=1.0,
    counter=ISSUED,
    **_facts,
)
