"""sample by thread-block clusters (sample.cu): launch plans, and which calls they take."""

from __future__ import annotations

from ctypes import c_float
from pathlib import Path
from typing import Any

import torch

from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel

KERNEL = CudaKernel(Path(__file__).with_name("sample.cu"), "sample_fwd", "PPPPPPPPPPqqqfiffiiiii")
CLUSTER, THREADS, ITEMS = 8, 512, 64
MOST = CLUSTER * THREADS * ITEMS  # columns: a register for each


def fits(logits: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Why clusters cannot take a call, or None."""
    if logits.dtype not in CTYPE:
        return f"it takes float32, float16 or bfloat16, but logits are {logits.dtype}"
    if logits.shape[1] > MOST:
        return f"a row must lie in the registers of {CLUSTER} blocks: at most {MOST} columns, not {logits.shape[1]}"
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        return "the logits of a row must be contiguous"
    return None


def _plan(logits: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """The columns of a block, and the macros: 16-byte loads where rows begin and end at multiples of 16 bytes."""
    B, V = logits.shape
    vector = 16 // logits.itemsize
    aligned = not (V % vector or logits.data_ptr() % 16 or (B > 1 and logits.stride(0) % vector))
    vector = vector if aligned else 1
    part = -(-V // (CLUSTER * vector)) * vector
    chunks = -(-part // (THREADS * vector))
    return part, {"XTYPE": CTYPE[logits.dtype], "VECTOR": vector, "CHUNKS": chunks}


def fwd(
    token: torch.Tensor, logprob: torch.Tensor, logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any,
    min_p: Any, mask: Any, seed: Any, offset: Any, low: int, high: int, position: int, *numbers: Any,
) -> None:  # fmt: skip
    """Fills token and logprob, both (B,)."""
    B, V = logits.shape
    part, macros = _plan(logits)
    allowed = (0, 0) if mask is None else mask.stride()
    bits = None if mask is None else mask.view(torch.uint8)
    t, p, m = (c_float(numbers[n]).value for n in (0, 2, 3))
    tensors = token, logprob, logits, bits, temperature, top_k, top_p, min_p, seed, offset
    values = *tensors, logits.stride(0), *allowed, t, min(numbers[1], V), p, m, low, high, position, V, part
    facts: dict[str, Any] = {"CLUSTER": CLUSTER, "THREADS": THREADS, "MASK": int(mask is not None)}
    launch(KERNEL, (CLUSTER * B,), *values, block=THREADS, cluster=CLUSTER, **facts, **macros)
