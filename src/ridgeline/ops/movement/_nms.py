"""Kernels of nms: bits of pairs that overlap too much, and one program that walks them and keeps boxes.

Boxes are numbered by falling score. Bit j of row i says that box i, if kept, suppresses box j > i. The walk takes 256
boxes at a time. Which of them stay is the fixed point of "kept, unless a kept box before it suppresses it", found by
repetition from all bits at once: as many rounds as the longest chain of boxes that suppress each other, and one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import INTERPRETED, launch

STEP = tl.constexpr(256)  # boxes of a step
WORDS = tl.constexpr(8)  # of 32 bits, for them
ROWS, ACROSS = 8, 32  # boxes and words of a tile of pairs: a thread compares 8 boxes with 4


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _any(words, BY_BITS: tl.constexpr):
    """The bitwise or over rows. BY_BITS: one bit after the other, which the interpreter does far quicker."""
    if BY_BITS:
        found = tl.sum(words, 0) * 0
        for bit in tl.static_range(32):
            found |= tl.max((words >> bit) & 1, 0) << bit
    else:
        found = tl.reduce(words, 0, _or)
    return found


@triton.jit
def _corner(boxes, box, steps, inside, N: tl.constexpr):
    return tl.load(boxes + box * steps[0] + N * steps[1], mask=inside, other=0).to(tl.float32)


@triton.jit
def _side(boxes, order, classes, steps, at, count):
    """The corners, area and class of the boxes in these places of the order."""
    inside = at < count
    box = tl.load(order + at, mask=inside, other=0)
    left, top = _corner(boxes, box, steps, inside, 0), _corner(boxes, box, steps, inside, 1)
    right, bottom = _corner(boxes, box, steps, inside, 2), _corner(boxes, box, steps, inside, 3)
    kind = at * 0
    if classes is not None:
        kind = tl.load(classes + box * steps[2], mask=inside, other=0).to(tl.int64)
    return left, top, right, bottom, (right - left) * (bottom - top), kind


@triton.jit
def _pairs(
    bits, gone, kept, boxes, order, classes, steps, count, width, threshold, BM: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """The bits of BM rows and BW words, where a step needs them; sets what the walk begins with."""
    word = tl.program_id(0) * BW + tl.arange(0, BW)
    places = (word * 32)[:, None] + tl.arange(0, 32)[None, :]
    if tl.program_id(1) == 0:
        tl.store(gone + word, word * 0, mask=word < width)
        tl.store(kept + places, tl.full((BW, 32), -1, tl.int64), mask=places < count)
    first = tl.program_id(1) * BM
    if (tl.program_id(0) * BW + BW) * 32 > first // STEP * STEP:
        at = (first + tl.arange(0, BM))[:, None, None]
        other = places[None, :, :]
        left, top, right, bottom, area, kind = _side(boxes, order, classes, steps, at.to(tl.int64), count)
        x0, y0, x1, y1, its, its_kind = _side(boxes, order, classes, steps, other.to(tl.int64), count)
        wide = tl.maximum(tl.minimum(right, x1) - tl.maximum(left, x0), 0.0)
        high = tl.maximum(tl.minimum(bottom, y1) - tl.maximum(top, y0), 0.0)
        common = wide * high
        over = (tl.div_rn(common, area + its - common) > threshold) & (other > at) & (other < count)
        over = over & (kind == its_kind)
        packed = tl.sum(over.to(tl.int32) << tl.arange(0, 32)[None, None, :], 2)
        row = (first + tl.arange(0, BM))[:, None]
        tl.store(bits + row.to(tl.int64) * width + word[None, :], packed, mask=(row < count) & (word < width)[None, :])


@triton.jit
def _settled(avail, diagonal, BY_BITS: tl.constexpr):
    """Which of the boxes that are left a step keeps: words of bits. diagonal: (STEP, WORDS)."""
    keep = avail
    changed = tl.sum(avail * 0) + 1
    while changed > 0:
        on = tl.reshape((keep[:, None] >> tl.arange(0, 32)[None, :]) & 1, (STEP, 1))
        new = avail & ~_any(tl.where(on != 0, diagonal, 0), BY_BITS)
        changed = tl.sum((new != keep).to(tl.int32))
        keep = new
    return keep


@triton.jit
def _walk(kept, found, bits, gone, order, count, width, WIDE: tl.constexpr, BY_BITS: tl.constexpr):
    """Writes the kept boxes' indices and their number. gone: the bits of boxes that are suppressed so far."""
    total = tl.full((), 0, tl.int32)
    place = tl.arange(0, WORDS)
    for step in range(tl.cdiv(count, STEP)):
        row = tl.arange(0, STEP) + step * STEP
        lines = bits + row.to(tl.int64)[:, None] * width
        words = place + step * WORDS
        exists = tl.reshape((row < count).to(tl.int32), (WORDS, 32))
        avail = tl.sum(exists << tl.arange(0, 32)[None, :], 1) & ~tl.load(gone + words)
        keep = _settled(avail, tl.load(lines + words[None, :], mask=(row < count)[:, None], other=0), BY_BITS)
        stays = tl.reshape((keep[:, None] >> tl.arange(0, 32)[None, :]) & 1, (STEP,))
        to = total + tl.cumsum(stays, 0) - stays
        tl.store(kept + to, tl.load(order + row, mask=row < count, other=0), mask=stays != 0)
        total += tl.sum(stays)
        for start in range(step * WORDS + WORDS, width, WIDE):
            later = tl.arange(0, WIDE) + start
            some = tl.load(lines + later[None, :], mask=(stays != 0)[:, None] & (later < width)[None, :], other=0)
            before = tl.load(gone + later, mask=later < width, other=0)
            tl.store(gone + later, before | _any(some, BY_BITS), mask=later < width)
        tl.debug_barrier()  # other threads read `gone` in the next step
    tl.store(found, total.to(tl.int64))


def start(
    kept: torch.Tensor, found: torch.Tensor, boxes: torch.Tensor, order: torch.Tensor, classes: Any, threshold: float
) -> None:
    """Fills the kept indices, then -1, and their number. order: the boxes' indices by falling score."""
    count = boxes.shape[0]
    width = triton.cdiv(count, STEP.value) * WORDS.value
    bits = torch.empty((count, width), dtype=torch.int32, device=boxes.device)
    gone = torch.empty((width,), dtype=torch.int32, device=boxes.device)
    steps = (*boxes.stride(), None if classes is None else classes.stride(0))
    grid = triton.cdiv(width, ACROSS), triton.cdiv(count, ROWS)
    # No fused multiply-adds, so that a pair at the threshold is decided as on a CPU.
    facts: dict[str, Any] = {"BM": ROWS, "BW": ACROSS, "num_warps": 8, "enable_fp_fusion": False}
    launch(_pairs, grid, bits, gone, kept, boxes, order, classes, steps, count, width, threshold, **facts)
    wide = min(64, triton.next_power_of_2(max(1, width - WORDS.value)))
    facts = {"WIDE": wide, "BY_BITS": INTERPRETED, "num_warps": 16 if wide == 64 else 8}
    launch(_walk, (1,), kept, found, bits, gone, order, count, width, **facts)


def too_many(boxes: torch.Tensor, *_: Any, **options: Any) -> str | None:
    """Why kernels cannot take so many boxes, or None: they need a bit for each pair."""
    return None if boxes.shape[0] <= 1 << 18 else "its bits of all pairs would take more than 8 GiB"
