"""cross_entropy by thread-block clusters (cross_entropy.cu): each row is read once, and its gradient written once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import dtype_name
from ridgeline.tiles import cluster_rows

KERNEL = CudaKernel(Path(__file__).with_name("cross_entropy.cu"), "cross_entropy_fwd", "PPPPPPqiqqf")
COLUMNS = 4096, 1 << 19  # rows have more columns than the first, and at most the second


def rule(size: int) -> tuning.Config:
    """Returns the tile for rows of `size` bytes: 32 bytes per thread in one block, else blocks of 64 KiB."""
    cluster = 1 if size <= 32768 else min(16, triton.next_power_of_2(-(-size // 65536)))
    part = -(-size // cluster)
    threads = min(512 if cluster > 1 else 1024, max(64, -(-part // 1024) * 32))
    return {
        "CLUSTER": cluster,
        "THREADS": threads,
        "BLOCKS": max(1, min(4, 2048 // threads, 221184 // (part + 1024))),
        "STAGES": 1,
    }


def rows(
    losses: torch.Tensor,
    stats: torch.Tensor,
    d: torch.Tensor,
    logits: torch.Tensor,
    labels: Any,
    counts: torch.Tensor,
    rules: Any,
    need: int,
    mean: bool,
) -> None:
    """Computes the rows' losses and what `need` asks for; no smoothing, cap or scale, as `fits` has found."""
    x = logits.view(-1, logits.shape[-1])
    count, columns = x.shape
    where, size = device.of(x), cluster_rows.whole(columns, x.element_size()) * x.element_size()

    def config() -> dict[str, Any]:
        key = f"{dtype_name(x)} {columns}"
        space = partial(cluster_rows.space, size, where.shared_memory, 256)
        found = tuning.config(where, "cross_entropy", KERNEL.name, key, partial(rule, size), space)
        kind = {"XTYPE": CTYPE[x.dtype], "YTYPE": CTYPE[x.dtype]}
        return cluster_rows.plan(columns, 1, x.itemsize, x.itemsize, **found) | kind

    values = losses, stats, d, x, labels.data, counts, count, columns, x.stride(0), labels.ignore, rules.z or 0.0
    launch(
        KERNEL,
        lambda c: (c["CLUSTER"] * count,),
        *values,
        config=config,
        key=columns,
        NEED=need,
        MEAN=int(mean),
    )


def fits(logits: torch.Tensor, target: torch.Tensor | None = None, *rest: Any) -> str | None:
    """Returns why clusters do not take a call, or None, by public arguments or a launcher's inputs (9 in forward)."""
    reason = cluster_rows.refusal(logits.shape[-1], COLUMNS, 2 << 20, (logits,))
    if reason or not logits.is_contiguous():
        return reason or "it takes contiguous logits"
    if target is not None and not target.is_contiguous():
        return "it takes a contiguous target"
    if len(rest) == 7:
        _, _, smoothing, _, cap, scale, reduction = rest
        if smoothing or cap or scale != 1 or (reduction == "none" and logits.dtype != torch.float32):
            return "it supports no label smoothing, softcap or logit_scale, and reduction='none' only in float32"
    return None
