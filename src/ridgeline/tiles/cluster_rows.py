"""Rows over clusters of blocks: what cluster_rows.cuh makes of a configuration, which rows it takes, and what there is to search.

A configuration: a row lies in CLUSTER blocks, a part in each; THREADS share a part; a block is GROUPS of such threads, each with rows
of its own, and has STAGES rows of a group on their way at once; BLOCKS of them fit a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import torch


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@cache
def plan(columns: int, inputs: int, read: int, written: int, **found: int) -> dict[str, Any]:
    """A configuration and what it makes of rows of that many columns: macros, and the options of the launch.

    inputs: tensors whose rows are read, of elements of `read` bytes; what is written has elements of `written` bytes.
    """
    cluster, threads, groups, stages = found["CLUSTER"], found["THREADS"], found.get("GROUPS", 1), found["STAGES"]
    align, pack = 16 // min(read, written), 16 // max(read, written)
    part = _ceil(columns, cluster * align) * align
    items = _ceil(part, threads * pack)
    own = stages * (part * inputs * read + 8) + 16 + cluster * threads // 2  # rows, barriers, and two floats of each warp twice
    shared = groups * (_ceil(own, 16) * 16)
    if groups > 1:
        shared = max(shared, 4 * threads * items * pack)  # the groups' sums of columns
    return {**found, "ITEMS": items, "block": threads * groups, "cluster": cluster, "shared": shared}


def refusal(
    columns: int, limits: tuple[int, int], most: int, rows: Sequence[torch.Tensor], vectors: Sequence[torch.Tensor] = ()
) -> str | None:
    """Why clusters do not take these tensors, of `columns` each row, or None where they do.

    limits: rows of more columns than the first, and at most the second, in at most `most` bytes, those of all tensors together.
    vectors: read too, a value a column.
    """
    low, high = limits
    size = columns * sum([t.element_size() for t in rows])
    if not low < columns <= high or size > most:
        return f"it takes rows of {low + 1} to {high} columns in at most {most} bytes; these have {columns} columns in {size} bytes"
    if any([t.data_ptr() % 16 for t in (*rows, *vectors)]) or any([columns * t.element_size() % 16 for t in rows]):
        return "it copies whole 16 bytes: tensors must begin, and rows end, at multiples of 16 bytes"
    if any([t.dim() > 1 and (t.stride(-1) != 1 or t.stride(-2) * t.element_size() % 16) for t in rows]):
        return "it copies whole 16 bytes: rows must be contiguous, and begin at multiples of 16 bytes"
    return None


def space(size: int, shared: int, each: int, stages: Sequence[int] = (1,)) -> list[dict[str, int]]:
    """Configurations for rows of `size` bytes, all inputs together, with 48 KiB on their way to a multiprocessor of `shared` bytes of
    shared memory, and 32 to `each` bytes a thread."""
    found = []
    for c, t, b, s in product((1, 2, 4, 8, 16), (32, 64, 128, 256, 512, 1024), (1, 2, 3, 4, 6, 8, 16, 32), stages):
        part = _ceil(size, c)
        fits = b * (s * part + c * t // 2 + 1100) <= shared and 384 <= b * t <= 2048
        if fits and b * s * part >= 49152 and 32 <= part // t <= each:
            found.append({"CLUSTER": c, "THREADS": t, "BLOCKS": b, "STAGES": s})
    return found
