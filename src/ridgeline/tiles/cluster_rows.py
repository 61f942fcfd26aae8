"""Rows spread over clusters of blocks: launch plans for cluster_rows.cuh, which rows it takes, and the search space.

A configuration: a row lies in CLUSTER blocks, a part in each; THREADS share a part. A block consists of GROUPS of such
threads, each with its own rows, and keeps STAGES rows per group in flight. BLOCKS fit a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import torch


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def shifted(columns: int, size: int) -> bool:
    """Whether rows of elements of `size` bytes are no multiple of 16 bytes, so that most begin unaligned."""
    return columns * size % 16 != 0


def whole(columns: int, size: int) -> int:
    """The columns of a row that lie in packs of up to 16 bytes wherever it begins: what rules count."""
    return columns - 16 // size if shifted(columns, size) else columns


@cache
def plan(columns: int, inputs: int, read: int, written: int, **found: int) -> dict[str, Any]:
    """A configuration with what follows from it for rows of that many columns: macros and launch options.

    inputs: how many tensors are read, with elements of `read` bytes; results have elements of `written` bytes.
    """
    cluster, threads, groups, stages = found["CLUSTER"], found["THREADS"], found.get("GROUPS", 1), found["STAGES"]
    align, pack, shift = 16 // min(read, written), 16 // max(read, written), shifted(columns, read)
    part = _ceil(columns, cluster * align) * align
    items = max(1, _ceil(part // pack - shift, threads))
    rows = stages * inputs * (part * read + 16 * shift)
    own = rows + 8 * (stages + 2) + cluster * threads // 2  # with barriers, and two floats per warp, twice
    shared = groups * (_ceil(own, 16) * 16)
    if groups > 1:
        shared = max(shared, 4 * (threads * items + 2 * shift) * pack)  # the groups' sums of columns
    return {
        **found,
        "ITEMS": items,
        "SHIFTED": int(shift),
        "block": threads * groups,
        "cluster": cluster,
        "shared": shared,
    }


def refusal(
    columns: int, limits: tuple[int, int], most: int, rows: Sequence[torch.Tensor], vectors: Sequence[torch.Tensor] = ()
) -> str | None:
    """Why clusters cannot take these tensors, whose rows have `columns` columns, or None.

    limits: rows must have more columns than the first, at most the second, and at most `most` bytes over all tensors.
    vectors: also read, with one value per column.
    """
    low, high = limits
    size = columns * sum([t.element_size() for t in rows])
    if not low < columns <= high or size > most:
        found = f"these have {columns} columns in {size} bytes"
        return f"it takes rows of {low + 1} to {high} columns in at most {most} bytes, but {found}"
    faults = [t.data_ptr() % 16 for t in (*rows, *vectors)]
    for t in rows:
        if t.dim() > 1 and t.shape[-2] > 1 and t.stride(-1) == 1:  # others are copied first
            gap = (t.stride(-2) - columns) * t.element_size()
            faults.append(gap % 16 or (gap < 0 and shifted(columns, t.element_size())))
    if any(faults):
        return "it copies 16 bytes at a time: tensors, and the gaps between rows, must be aligned to 16 bytes"
    return None


def space(size: int, shared: int, each: int, stages: Sequence[int] = (1,)) -> list[dict[str, int]]:
    """Configurations for rows of `size` bytes, all inputs together.

    Each keeps 48 KiB in flight per multiprocessor, which has `shared` bytes of shared memory, and gives a thread 32 to
    `each` bytes.
    """
    found = []
    for c, t, b, s in product((1, 2, 4, 8, 16), (32, 64, 128, 256, 512, 1024), (1, 2, 3, 4, 6, 8, 16, 32), stages):
        part = _ceil(size, c)
        fits = b * (s * part + c * t // 2 + 1280) <= shared and 384 <= b * t <= 2048
        if fits and b * s * part >= 49152 and 32 <= part // t <= each:
            found.append({"CLUSTER": c, "THREADS": t, "BLOCKS": b, "STAGES": s})
    return found
