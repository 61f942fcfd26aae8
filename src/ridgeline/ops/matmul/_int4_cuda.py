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
SERVED = 8  # with more, x costs as much as the weight, and Triton's kernel is as quick or quicker
STEP = 128  # columns that the four lanes of a row load at once
MEMORY = 96 << 10  # bytes of x in shared memory, at most: every GPU from sm_80 on has them
_Maybe = torch.Tensor | None


def bytes_of(M: int, K: int, splits: int) -> int:
    """Returns the bytes of a block's part of x: rows in eights."""
    return 2048 * triton.cdiv(M, 8) * triton.cdiv(K // STEP, splits)


def most(M: int, N: int, K: int) -> int:
    """Returns the parts of K that there may be: their sums have room for so many."""
    return max(1, min(K // STEP, ROOM // max(1, M * N)))


def wide(x: torch.Tensor, q: torch.Tensor) -> bool:
    """Returns whether x does not fit into shared memory, however K is split, or a result into the space for sums."""
    M, N, K = x.numel() // max(1, x.shape[-1]), q.shape[0], x.shape[-1]
    return M * N > ROOM or bytes_of(M, K, most(M, N, K)) > MEMORY


def unfit(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *_: Any) -> str | None:
    """Returns why the kernel does not take a call, or None."""
    if x.shape[-1] != 2 * q.shape[1]:
        return f"q must have x's {x.shape[-1]} columns"
    if group_of(q, scale) % STEP:
        return f"it takes groups of a multiple of {STEP} columns, and these are of {group_of(q, scale)}"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes x in float16 or bfloat16, not {x.dtype}"
    if x.numel() > MOST * x.shape[-1] or not x.numel() or not q.numel():
        return f"it takes 1 to {MOST} rows of x, and no size 0"
    if wide(x, q):
        return f"it takes results of at most {ROOM} elements, and {MEMORY} bytes of x for a part of K"
    if x.data_ptr() % 16 or q.data_ptr() % 16:
        return "it reads 16 bytes at a time: x and q must begin at multiples of 16 bytes"
    return None


def left(x: torch.Tensor, q: _Maybe = None, scale: _Maybe = None, *_: Any, **__: Any) -> str | None:
    """Returns why a call is left to Triton's kernel, or None; from sizes and dtypes alone, or from x's."""
    served = 0 < x.numel() <= SERVED * x.shape[-1] and x.dtype != torch.float32
    if served and q is not None and scale is not None:
        served = q.numel() > 0 and group_of(q, scale) % STEP == 0 and not wide(x, q)
    what = f"{SERVED} rows in half precision, with groups of {STEP} and sizes that fit its space"
    return None if served else f"it serves up to {what}"


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
        parts = max(1, round(2 / tiles * gpu.multiprocessors / triton.cdiv(N, 16 * warps)))
        return {"WARPS": warps, "SPLITS": parts}

    def space() -> list[tuning.Config]:
        c = rule()
        return [{"WARPS": w, "SPLITS": s} for w in (4, 8, 16) for s in (c["SPLITS"], 2 * c["SPLITS"])]

    def chosen() -> tuning.Config:
        key = " ".join([dtype_name(x), *(str(triton.next_power_of_2(n)) for n in (M, N, K))])
        c = tuning.config(gpu, "int4_linear", "mma", key, rule, space)
        least = triton.cdiv(K // STEP, MEMORY // (2048 * tiles))
        return c | {"SPLITS": min(max(c["SPLITS"], least), most(M, N, K))}

    def config() -> dict[str, Any]:
        c = chosen()
        return {"WARPS": c["WARPS"], "block": 32 * c["WARPS"], "shared": bytes_of(M, K, c["SPLITS"])}

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
