"""Norms by thread-block clusters (norms.cu): configurations, and launchers that take what the Triton launchers take."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import torch

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel, resident_clusters
from ridgeline.ops.rowwise import _norm_backward
from ridgeline.ops.rowwise._norm_options import result_dtype
from ridgeline.ops.rowwise._rows import ceil, key_of, power
from ridgeline.tiles import cluster_rows

FILE = Path(__file__).with_name("norms.cu")
_FWD = CudaKernel(FILE, "norm_fwd", "PPPPPPPPqiqqf")
_BWD = CudaKernel(FILE, "norm_bwd", "PPPPPPPPqiqqq")
_SHARED = 200 << 10  # the most bytes of rows in a block
_PART = 16384  # the most columns in a block: 32 for each of 512 threads


def forward_rule(size: int, centred: bool) -> tuning.Config:
    """For rows of `size` bytes, all inputs together: one block if 32 bytes per thread hold them, else parts of 64 KiB.

    Parts have 32 KiB if the mean is subtracted, which takes more instructions and registers.
    """
    cluster = 1 if size <= 32768 else min(16, power(ceil(size, 32768 if centred else 65536)))
    part = ceil(size, cluster)
    most = 256 if cluster > 1 and centred else 512 if cluster > 1 or centred else 1024
    threads = min(most, max(64, ceil(part, 1024 << centred) * 32))
    return {
        "CLUSTER": cluster,
        "THREADS": threads,
        "BLOCKS": max(1, min(6, (1024 if centred else 2048) // threads, 221184 // (part + 1024))),
        "STAGES": 1,
    }


def backward_rule(columns: int, size: int, heavy: bool) -> tuning.Config:
    """For rows of `columns` and `size` bytes: 16 columns per thread, and parts of 1024 columns if clusters allow it.

    A block takes as many rows at once as make 512 threads, so that other rows hide the wait for a row's sums. heavy:
    the registers of 1024 threads are too few.
    """
    cluster = min(16, max(1, power(columns // 1024 + 1) // 2))
    part = ceil(size, cluster)
    threads = min(512 if heavy else 1024, ceil(columns, cluster * 512) * 32)
    groups = max(1, min(512 // threads, _SHARED // (2 * part), 16 if threads == 32 else 15))
    return {
        "CLUSTER": cluster,
        "THREADS": threads,
        "GROUPS": groups,
        "STAGES": max(1, min(3, _SHARED // (groups * part))),
        "BLOCKS": 1,
    }


def backward_space(columns: int, size: int, where: device.Device) -> list[tuning.Config]:
    """Configurations with 8 to 32 columns per thread and 48 KiB in flight."""
    found = []
    for c, each, g, s in product((1, 2, 4, 8, 16), (8, 16, 32), (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32), (2, 3, 4)):
        part, t = ceil(size, c), ceil(columns, c * each * 32) * 32
        fits = g * (s * part + c * t // 2 + 64) <= where.shared_memory - 1280 and 256 <= g * t <= 1024
        if fits and g * s * part >= 49152 and (g < 16 or t == 32):  # 15 barriers
            found.append({"CLUSTER": c, "THREADS": t, "GROUPS": g, "STAGES": s, "BLOCKS": 1})
    return found


def _types(x: torch.dtype, weights: torch.dtype) -> dict[str, str]:
    return {"XTYPE": CTYPE[x], "YTYPE": CTYPE[x], "WTYPE": CTYPE[weights]}


def launch_fwd(
    op: str,
    centred: bool,
    y: Any,
    sum: Any,
    mean: Any,
    rstd: Any,
    x: torch.Tensor,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: float,
    offset: float,
    rounding: str,
) -> None:
    rows, columns = x.shape
    where, inputs = device.of(x), 1 + (residual is not None)
    size = cluster_rows.whole(columns, x.element_size()) * x.element_size() * inputs
    weights = x.dtype if weight is None else weight.dtype

    def config() -> dict[str, Any]:
        key = key_of(x.dtype, weights, columns)
        rule, space = partial(forward_rule, size, centred), partial(cluster_rows.space, size, where.shared_memory, 128)
        found = tuning.config(where, op, "norm_fwd", key, rule, space)
        return cluster_rows.plan(columns, inputs, x.itemsize, x.itemsize, **found) | _types(x.dtype, weights)

    flags: dict[str, Any] = {
        "BACKWARD": 0,
        "MEAN": int(centred),
        "ADD": inputs - 1,
        "WEIGHT": int(weight is not None),
        "BIAS": int(bias is not None),
        "OFFSET": offset,
        "LLAMA": int(rounding == "llama"),
    }
    values = (
        y,
        sum,
        mean,
        rstd,
        x,
        residual,
        weight,
        bias,
        rows,
        columns,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
    )
    launch(_FWD, lambda c: (c["CLUSTER"] * rows,), *values, config=config, key=(op, columns), **flags)


def launch_bwd(
    op: str, centred: bool, dx: Any, dweight: Any, dbias: Any, parts: Any, dy: torch.Tensor, dsum: Any,
    saved: torch.Tensor, weight: Any, bias: Any, mean: Any, rstd: Any, offset: float, from_output: bool
) -> None:  # fmt: skip
    rows, columns = saved.shape
    where, inputs = device.of(saved), 2 + (dsum is not None)
    whole = cluster_rows.whole(columns, saved.element_size())
    size, heavy = whole * saved.element_size() * inputs, centred or dsum is not None or whole < columns
    weights = saved.dtype if weight is None else weight.dtype
    wanted = {"DW": int(dweight is not None), "DB": int(dbias is not None)}
    flags: dict[str, Any] = {
        "BACKWARD": 1,
        "MEAN": int(centred),
        "ADD": inputs - 2,
        "WEIGHT": int(weight is not None),
        **wanted,
    }
    flags |= {"PDL": int(parts is not None), "OFFSET": offset}

    def config() -> dict[str, Any]:
        key = key_of(saved.dtype, weights, columns)
        rule, space = partial(backward_rule, whole, size, heavy), partial(backward_space, whole, size, where)
        found = tuning.config(where, op, "norm_bwd", key, rule, space)
        plan = cluster_rows.plan(columns, inputs, saved.itemsize, saved.itemsize, **found)
        return plan | _types(saved.dtype, weights) | {"CLUSTERS": resident_clusters(where, plan["CLUSTER"])}

    # With unaligned rows there are eight more parts than clusters, one for each position at which rows begin.
    apart = 8 if whole < columns else 0

    def clusters(c: dict[str, Any]) -> int:
        return min(c["CLUSTERS"], ceil(rows, c["GROUPS"]), where.multiprocessors - apart)

    strides = dy.stride(0), 0 if dsum is None else dsum.stride(0), saved.stride(0)
    values = dx, parts, dy, dsum, saved, weight, mean, rstd, rows, columns, *strides
    launch(_BWD, lambda c: (c["CLUSTER"] * clusters(c),), *values, config=config, key=(op, columns), **flags)
    if parts is not None:
        _norm_backward.add_up(dweight, dbias, parts, clusters(config()) + min(apart, rows), gcd(8, columns))


NARROWEST = 1024  # clusters are not used up to so many columns
# Tiles are faster up to so many columns, if rounding up to a power of two adds at most such a factor.
# TILED: forward, by whether the mean is subtracted. TILED_BACKWARD: either way.
TILED = {False: (8192, 1.4), True: (4096, 1.25)}
TILED_BACKWARD = (8192, 2.0)


def in_tiles(columns: int, size: int, limits: tuple[int, float]) -> bool:
    """Whether tiles are faster for rows of that many columns of elements of `size` bytes."""
    most, waste = limits
    return columns <= most and power(columns) <= waste * columns and not cluster_rows.shifted(columns, size)


def fits(centred: bool, x: torch.Tensor, *rest: Any) -> str | None:
    """Why clusters cannot run a call, or None; takes a public call's arguments or a launcher's inputs (backward: 9)."""
    backward = len(rest) == 8
    if any(value is True for value in rest):
        return "it computes the gradient from the input, but memory_efficient=True saves the output"
    tensors = [t for t in rest if isinstance(t, torch.Tensor)]
    shaped = [t for t in (rest[:2] if backward else tensors) if t is not None and t.shape == x.shape and t.dim() > 1]
    rows = [x, *shaped]
    vectors = [t for t in (rest[2:4] if backward else tensors) if t is not None and t.dim() == 1]
    columns = x.shape[-1] if x.dim() else 1
    reason = cluster_rows.refusal(columns, (NARROWEST, 16 * _PART), 16 * _SHARED, rows, vectors)
    if reason is None and not backward and in_tiles(columns, x.element_size(), TILED[centred]):
        reason = f"for rows of {columns} columns tiles are faster"
    if reason is None and (any([t.dtype != x.dtype for t in rows]) or len({t.dtype for t in vectors}) > 1):
        reason = "it takes tensors of one dtype, and a weight and bias of one dtype"
    two_roundings = any([isinstance(value, str) and value == "llama" for value in rest])
    if reason is None and two_roundings and any([result_dtype(x, t, "llama") != x.dtype for t in vectors]):
        reason = "it writes the result in x's dtype, but rounding='llama' makes it as wide as the weight"
    return reason


def _backward(op: str, centred: bool, dx: torch.Tensor, *rest: Any) -> None:
    """By clusters, or in tiles for rows on which tiles are as fast."""
    tiled = in_tiles(dx.shape[1], dx.element_size(), TILED_BACKWARD)
    (_norm_backward.launch_bwd if tiled else launch_bwd)(op, centred, dx, *rest)


def register(norm: Any) -> None:
    """Registers the clusters as the implementation `cuda_cluster` of a norm."""
    norm.op.kernel(
        "cuda_cluster",
        "rows spread over clusters of blocks by bulk copies; backward overlaps rows to hide their sums",
        kind="cuda",
        served=True,
        arch=90,
        shared=227 << 10,
        supports=partial(fits, norm.center),
        fwd=partial(launch_fwd, norm.name, norm.center),
        bwd=partial(_backward, norm.name, norm.center),
    )
