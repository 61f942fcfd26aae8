"""Shared by ops on rows: tensors viewed as (rows, columns), and tiles of whole rows for Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ridgeline import device, tuning

Maybe = torch.Tensor | None
TILE_LIMIT = 131072  # bytes of a row, all inputs in float32, that a block can hold in registers
_TILES = [
    {"BM": m, "num_warps": w, "STAGES": s}
    for m in (1, 2, 4, 8, 16, 32)
    for w in (1, 2, 4, 8, 16, 32)
    for s in (1, 2, 3)
]
# Benchmark shapes: short rows to wide ones, then widths that are no power of two, or no multiple of 16 bytes.
BENCH = [
    (32768, 1024),
    (16384, 4096),
    (8192, 8192),
    (8192, 16384),
    (2048, 65536),
    (1024, 262144),
    (16384, 5120),
    (8191, 3000),
    (4096, 50257),
]


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@cache
def key_of(*parts: Any) -> str:
    """The key of a configuration, such as "bfloat16 4096"."""
    return " ".join(str(part).removeprefix("torch.") for part in parts)


def as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as (rows, columns), `dim` last and contiguous: a view if the other dimensions share one stride, else a copy."""
    if x.dim() == 2 and dim in (-1, 1) and x.stride(1) == 1:
        return x
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim]) if x.dim() > 1 else x.reshape(1, -1)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def dense(vector: Maybe) -> Maybe:
    """A vector with contiguous elements, if there is one."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def empty_rows(like: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """An empty tensor whose rows along `dim` are contiguous, so that `as_rows` of it is a view."""
    if dtype in (None, like.dtype) and like.is_contiguous() and dim in (-1, like.dim() - 1):
        return torch.empty_like(like)
    if like.dim() < 2 or (dim in (-1, like.dim() - 1) and like.is_contiguous()):
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    order = list(range(like.dim()))
    order.append(order.pop(dim))
    return torch.empty_permuted(like.shape, order, dtype=dtype or like.dtype, device=like.device)


def tiles(
    op: str, kernel: Any, rows: int, bn: int, *inputs: torch.Tensor, each: int = 32
) -> tuple[Callable[[], dict[str, Any]], Callable[[Any], tuple[int]]]:
    """`config` and `grid` for `launch`, for a kernel that takes tiles of BM rows and `bn` columns, a power of two.

    The configuration also has STAGES and num_warps. each: values per thread, of all inputs, if nothing is tuned.
    """
    where, dtype, count = device.of(inputs[0]), inputs[0].dtype, len(inputs)

    def rule() -> tuning.Config:
        """16 KiB per program."""
        bm = max(1, 16384 // (bn * dtype.itemsize * count))
        return {
            "BM": bm,
            "num_warps": min(1024 // where.warp, max(4, bm * bn * count // (each * where.warp))),
            "STAGES": 1,
        }

    def space() -> list[tuning.Config]:
        most = 1024 // where.warp
        return [
            c
            for c in _TILES
            if c["num_warps"] <= most and 8 <= c["BM"] * bn * count // (where.warp * c["num_warps"]) <= 64
        ]

    def config() -> dict[str, Any]:
        return {"BN": bn, **tuning.config(where, op, kernel.__name__[1:], key_of(dtype, bn), rule, space)}

    def grid(c: dict[str, Any]) -> tuple[int]:
        """One program per tile; if a loop prefetches, as many as fill the multiprocessors with 32 warps each."""
        count = ceil(rows, c["BM"])
        return (count if c["STAGES"] == 1 else min(count, where.multiprocessors * max(1, 32 // c["num_warps"])),)

    return config, grid
