"""int4_linear and int8_linear in CUDA C++ (few_rows.cu): a few rows of x, where unpacking codes is what takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Op

KERNEL = CudaKernel(Path(__file__).with_name("few_rows.cu"), "few_rows", "PPPPPPii")
MOST = 8  # rows of x
Maybe = torch.Tensor | None


def _fwd(
    y: torch.Tensor, _: torch.Tensor, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: Maybe, bias: Maybe,
    activation: str
) -> None:  # fmt: skip
    """Four warps in a block, two rows of the weight for each."""
    (M, K), N = x.shape, q.shape[0]
    bits = 8 if q.dtype == torch.int8 else 4
    facts: dict[str, Any] = {
        "XTYPE": CTYPE[x.dtype],
        "STYPE": CTYPE[scale.dtype],
        "BITS": bits,
        "MANY": M,
        "GROUP": K if bits == 8 else K // scale.shape[1],
        "ROWS": 2,
        "AHEAD": 8 if M <= 2 else 4,
        "block": 128,
    }
    launch(KERNEL, (triton.cdiv(N, 8),), y, q, scale, zero, bias, x, N, K, **facts)


def _unfit(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *rest: Any, **options: Any) -> str | None:
    """Returns why the kernel does not take a call, or None."""
    K, each = x.shape[-1], 4 if q.dtype == torch.int8 else 8
    groups = scale.shape[1] if scale.dim() == 2 else 1
    if not K or not 0 < x.numel() // K <= MOST or not q.shape[0]:
        return f"it takes 1 to {MOST} rows of x"
    if K * q.shape[0] >= 1 << 31 or (K // groups) % each or K * x.element_size() % 16 or K % groups:
        return f"it takes rows of x of a multiple of 16 bytes, and groups of a multiple of {each}"
    if (rest and isinstance(rest[-1], str) and rest[-1]) or options.get("activation"):
        return "it has no activation"
    if options.get("g_idx") is not None:
        return "it takes groups in order"
    if torch.compiler.is_compiling() or x.is_meta or q.is_meta:
        return None
    return "x and q must begin at multiples of 16 and 4 bytes" if x.data_ptr() % 16 or q.data_ptr() % 4 else None


def best(op: Op, others: Any) -> None:
    """Registers the implementation after Triton's. others: the launcher of backward."""
    op.kernel(
        "cuda",
        "up to 8 rows of x on the CUDA cores: a code's bits become a float32 number by one operation and a subtraction",
        kind="cuda",
        fwd=_fwd,
        bwd=others,
        supports=_unfit,
        served=True,
    )
