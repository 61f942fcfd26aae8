"""Kernels of nms: bits of pairs that overlap too much, and a chain of programs that keeps boxes.

Boxes are numbered by falling score. Bit j of row i says that box i, if kept, suppresses box j > i. A program has 256
boxes and waits for what those before it keep; the bits between both are loaded in the meantime. Which of them stay is
the fixed point of "kept, unless a kept box before it suppresses it", found by repetition from all bits at once: as many
rounds as the longest chain of boxes that suppress each other, and one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import INTERPRETED, launch

STEP = tl.constexpr(256)  # boxes of a step
WORDS = tl.constexpr(8)  # of 32 bits, for them
ROWS, ACROSS = 4, 32  # boxes and words of a tile of pairs: a thread compares 4 boxes with 4


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
    bits, said, kept, boxes, order, classes, steps, count, width, threshold, BM: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """The bits of BM rows and BW words, where a step needs them; sets what the walk begins with."""
    word = tl.program_id(0) * BW + tl.arange(0, BW)
    places = (word * 32)[:, None] + tl.arange(0, 32)[None, :]
    if tl.program_id(1) == 0:
        tl.store(said + word, tl.zeros((BW,), tl.int64), mask=word < width)
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
def _walk(kept, found, bits, said, order, count, width, BY_BITS: tl.constexpr):
    """Settles a step of boxes: writes the kept ones' indices, and the last step their number.

    said: for 32 boxes each the bits of those that are kept, and above them one more than the boxes kept up to their
    step; 0 until they are known. Programs of a GPU start in order, so the steps that one waits for have started.
    """
    step = tl.program_id(0)
    row = tl.arange(0, STEP)
    words = tl.arange(0, WORDS) + step * WORDS
    mine = row + step * STEP
    diagonal = tl.load(
        bits + mine.to(tl.int64)[:, None] * width + words[None, :], mask=(mine < count)[:, None], other=0
    )
    index = tl.load(order + mine, mask=mine < count, other=0)
    gone = diagonal * 0
    total = tl.zeros((STEP,), tl.int64)
    for before in range(step):
        lines = bits + (row + before * STEP).to(tl.int64)[:, None] * width + words[None, :]
        some = tl.load(lines)  # on its way while the program waits
        words_before = said + before * WORDS + row // 32
        known = tl.load(words_before, volatile=True)
        while tl.min(known, 0) == 0:
            known = tl.load(words_before, volatile=True)
        stays = (known >> (row % 32)) & 1
        gone |= tl.where((stays != 0)[:, None], some, 0)
        total = (known >> 32) - 1
    exists = tl.reshape((mine < count).to(tl.int32), (WORDS, 32))
    avail = tl.sum(exists << tl.arange(0, 32)[None, :], 1) & ~_any(gone, BY_BITS)
    keep = _settled(avail, diagonal, BY_BITS)
    stays = tl.reshape((keep[:, None] >> tl.arange(0, 32)[None, :]) & 1, (STEP,))
    first = tl.max(total, 0)
    until = first + tl.sum(stays)
    # An atomic reaches programs that have another L2 (AMD).
    tl.atomic_xchg(said + words, (keep.to(tl.int64) & 0xFFFFFFFF) | ((until + 1) << 32), sem="relaxed")
    tl.store(kept + first + tl.cumsum(stays, 0) - stays, index, mask=stays != 0)
    if step == tl.num_programs(0) - 1:
        tl.store(found, until)


def start(
    kept: torch.Tensor, found: torch.Tensor, boxes: torch.Tensor, order: torch.Tensor, classes: Any, threshold: float
) -> None:
    """Fills the kept indices, then -1, and their number. order: the boxes' indices by falling score."""
    count = boxes.shape[0]
    width = triton.cdiv(count, STEP.value) * WORDS.value
    bits = torch.empty((count, width), dtype=torch.int32, device=boxes.device)
    said = torch.empty((width,), dtype=torch.int64, device=boxes.device)
    steps = (*boxes.stride(), None if classes is None else classes.stride(0))
    grid = triton.cdiv(width, ACROSS), triton.cdiv(count, ROWS)
    # No fused multiply-adds, so that a pair at the threshold is decided as on a CPU.
    facts: dict[str, Any] = {"BM": ROWS, "BW": ACROSS, "num_warps": 8, "enable_fp_fusion": False}
    launch(_pairs, grid, bits, said, kept, boxes, order, classes, steps, count, width, threshold, **facts)
    facts = {"BY_BITS": INTERPRETED, "num_warps": 4}
    launch(_walk, (width // WORDS.value,), kept, found, bits, said, order, count, width, **facts)


def too_many(boxes: torch.Tensor, *_: Any, **options: Any) -> str | None:
    """Why kernels cannot take so many boxes, or None: they need a bit for each pair."""
    return None if boxes.shape[0] <= 1 << 18 else "its bits of all pairs would take more than 8 GiB"
