"""int4_linear for few rows in CUDA C++ (int4.cu): codes go from memory into mma's registers, without barriers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import dtype_name
from ridgeline.ops.matmul._few_bits import ROOM, add, group_of

MMA = CudaKernel(Path(__file__).with_name("int4.cu"), "int4_mma", "PPPPPiiiq")
MOST = 16  # rows of x: two tiles of mma
STEP = 128  # columns that the four lanes of a row load at once
_Maybe = torch.Tensor | None


def unfit(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *_: Any) -> str | None:
    """Returns why the kernel does not take a call, or None."""
    if x.shape[-1] != 2 * q.shape[1]:
        return f"q must have x's {x.shape[-1]} columns"
    if group_of(q, scale) % STEP:
        return f"it takes groups of a multiple of {STEP} columns, and these are of {group_of(q, scale)}"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes x in float16 or bfloat16, not {x.dtype}"
    if x.numel() > MOST * x.shape[-1] or not x.numel() or not q.numel():
        return f"it takes 1 to {MOST} rows of x"
    if x.data_ptr() % 16 or q.data_ptr() % 16:
        return "it reads 16 bytes at a time: x and q must begin at multiples of 16 bytes"
    return None


def left(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why a call is left to Triton's kernel, or None; from sizes and dtypes alone."""
    few = 0 < x.numel() <= MOST * x.shape[-1] and x.dtype != torch.float32 and q.numel()
    return None if few and group_of(q, scale) % STEP == 0 else f"for 1 to {MOST} rows, groups of {STEP} and half types"


def fwd(
    y: torch.Tensor, parts: torch.Tensor, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe,
    bias: _Maybe, activation: str
) -> None:  # fmt: skip
    """Fills y (M, N). x: (M, K) with contiguous rows. q, scale, zero: contiguous."""
    (M, K), N, gpu = x.shape, q.shape[0], device.of(x)
    tiles = triton.cdiv(M, 8)

    def rule() -> tuning.Config:
        """Two blocks for each multiprocessor, if x then fits in shared memory. More rows of x share a block's codes
        less often, so a block has more rows of W."""
        warps = 8 * tiles
        most, fits = K // STEP, (100 << 10) // (2048 * tiles)
        parts = max(1, round(2 / tiles * gpu.multiprocessors / triton.cdiv(N, 16 * warps)))
        return {"WARPS": warps, "SPLITS": min(most, max(parts, triton.cdiv(most, fits)))}

    def space() -> list[tuning.Config]:
        c = rule()
        return [{"WARPS": w, "SPLITS": s} for w in (4, 8, 16) for s in (c["SPLITS"], 2 * c["SPLITS"])]

    def chosen() -> tuning.Config:
        key = " ".join([dtype_name(x), *(str(triton.next_power_of_2(n)) for n in (M, N, K))])
        c = tuning.config(gpu, "int4_linear", "mma", key, rule, space)
        return c | {"SPLITS": max(1, min(c["SPLITS"], ROOM // max(1, M * N), K // STEP))}

    def config() -> dict[str, Any]:
        c = chosen()
        room = 2048 * tiles * triton.cdiv(K // STEP, c["SPLITS"])
        return {"WARPS": c["WARPS"], "block": 32 * c["WARPS"], "shared": room}

    key = M, N, K
    facts: dict[str, Any] = {
        "XTYPE": CTYPE[x.dtype],
        "STYPE": CTYPE[scale.dtype],
        "BFLOAT16": int(x.dtype == torch.bfloat16),
        "ZEROS": int(zero is not None),
        "SHARED_BY": group_of(q, scale) // STEP,
        "TILES": tiles,
        "PDL": int(early(gpu)["PDL"]),
    }
    launch(
        MMA,
        lambda c: (triton.cdiv(N, 16 * c["WARPS"]), chosen()["SPLITS"]),
        *(parts, q, scale, zero, x, M, N, K, x.stride(0)),
        **facts,
        config=config,
        key=key,
    )
    add(y, parts, bias, activation, lambda: chosen()["SPLITS"], key, least=1)
