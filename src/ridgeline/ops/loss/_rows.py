"""The kernels of cross_entropy: a row's loss and gradient, from all of its columns or from a slab of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name
from ridgeline.tiles.activations import capped
from ridgeline.tiles.online_softmax import exact_exp

PARTS = tl.constexpr(64)  # programs that count or sum rows
FEW = 512  # up to so many rows, every program counts them itself, which is faster than another launch


class Labels(NamedTuple):
    """The target, (outer, inner), and its strides: `rows` labels in all. Rows with the label `ignore` do not count."""

    data: Any
    rows: int
    inner: int
    outer_stride: int
    inner_stride: int
    ignore: int


class Planes(NamedTuple):
    """A tensor (outer, inner, ...) with the strides of its first two dimensions."""

    data: Any
    outer_stride: int
    inner_stride: int


class Slab(NamedTuple):
    """The `columns` columns of the logits from `first` on of all `classes`."""

    columns: int
    first: int
    classes: int


class Rules(NamedTuple):
    """The options of the loss; None if one is off."""

    scale: float | None
    cap: float | None
    smoothing: float | None
    z: float | None


class Tile(NamedTuple):
    """How a program goes along a row: K x W columns at a time. With PEEL rows begin inside a 16-byte pack of VEC."""

    K: int
    W: int
    VEC: int
    PEEL: bool
    STAGES: int


class Span(NamedTuple):
    """The columns of a row: those before its first 16-byte pack, those in whole packs, and all."""

    head: Any
    body: Any
    columns: Any


class Row(NamedTuple):
    """A row's label, whether it counts, its maximum, its sum of exponentials, and the gradient of its loss."""

    label: Any
    live: Any
    top: Any
    total: Any
    upstream: Any


@triton.jit
def _at(row, inner, outer_stride, inner_stride):
    """Returns the offset of a row of (outer, inner)."""
    return row // inner * outer_stride + row % inner * inner_stride


@triton.jit
def _count(counts, labels, BLOCK: tl.constexpr):
    """Counts the rows that are not ignored, in PARTS parts."""
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0) * BLOCK, labels.rows, PARTS * BLOCK):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        at = labels.data + _at(row, labels.inner, labels.outer_stride, labels.inner_stride)
        found += (tl.load(at, mask=row < labels.rows, other=labels.ignore) != labels.ignore).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, 0))


@triton.jit
def counted(counts, labels, FEW: tl.constexpr):
    """Returns how many rows are not ignored: counted here if there are at most FEW, else from `_count`'s parts."""
    if FEW:
        row = tl.arange(0, FEW).to(tl.int64)
        at = labels.data + _at(row, labels.inner, labels.outer_stride, labels.inner_stride)
        label = tl.load(at, mask=row < labels.rows, other=labels.ignore)
        found = tl.sum((label != labels.ignore).to(tl.int32), 0)
    else:
        found = tl.sum(tl.load(counts + tl.arange(0, PARTS)), 0)
    return found.to(tl.float32)


@triton.jit
def _total(out, values, n, counts, labels, MEAN: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Sums n losses, one part per program; with MEAN, divides by the count of rows."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(values + at, mask=at < n, other=0)
    whole = tl.sum(sums, 0)
    if MEAN:
        whole = tl.div_rn(whole, counted(counts, labels, FEW))
    tl.store(out + tl.program_id(0), whole.to(out.dtype.element_ty))


@triton.jit
def logit(x, rules):
    """Returns scaled and capped float32 logits, and the cap's slope."""
    if rules.scale is not None:
        x *= rules.scale
    return capped(x, rules.cap, rules.cap is not None)


@triton.jit
def _load(x, column, mask, rules, POLICY: tl.constexpr):
    """Returns scaled and capped logits as float32, -inf outside the mask, and the cap's slope."""
    given = tl.load(x + column, mask=mask, other=float("-inf"), eviction_policy=POLICY)
    values, slope = logit(given.to(tl.float32), rules)
    return (tl.where(mask, values, float("-inf")) if rules.cap is not None else values), slope


@triton.jit
def peel_row(start, columns, tile: tl.constexpr):
    """Returns where a row's first 16-byte pack begins, and the row's columns as a Span."""
    head, body = columns * 0, columns
    VEC: tl.constexpr = tile.VEC
    if tile.PEEL:
        head = tl.minimum((VEC - start % VEC) % VEC, columns).to(tl.int32)
        body = (columns - head) // VEC * VEC
        start = tl.multiple_of(start + head, VEC)
    return start, Span(head, body, columns)


@triton.jit
def _edges(span, VEC: tl.constexpr):
    """Returns the columns of a row outside whole packs, relative to its first pack, and their mask."""
    i = tl.arange(0, 2 * VEC)
    column = tl.where(i < VEC, i - span.head, span.body + i - VEC)
    return column, tl.where(i < VEC, i < span.head, column < span.columns - span.head)


@triton.jit
def _columns(tile: tl.constexpr):
    """Returns the columns of a tile, (K, W)."""
    W: tl.constexpr = tile.W
    return tl.arange(0, tile.K)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def _slopes(x, column, mask, hit, row, factor, spread, pull, rules):
    """Returns the gradient of logits."""
    values, slope = _load(x, column, tl.where(row.live, mask, False), rules, "evict_first")
    p = exact_exp(values - row.top, x.dtype.element_ty) * factor
    return ((p - spread - tl.where(column == hit, pull, 0.0)) * row.upstream * slope).to(x.dtype.element_ty)


@triton.jit
def write_gradient(d, x, span, slab, row, rules, tile: tl.constexpr):
    """Writes the slab's columns of a row of the gradient: NaN if the label is invalid, 0 if it is ignored."""
    known = (row.label >= 0) & (row.label < slab.classes)
    upstream = tl.where(row.live, tl.where(known, row.upstream, float("nan")), 0.0)
    if rules.scale is not None:
        upstream *= rules.scale
    row = Row(row.label, row.live, row.top, row.total, upstream)
    factor, spread, pull = tl.div_rn(1.0, row.total), 0.0, 1.0
    if rules.z is not None:
        factor *= 1 + 2 * rules.z * (row.top + tl.log(row.total))
    if rules.smoothing is not None:
        spread, pull = rules.smoothing / slab.classes, 1 - rules.smoothing
    hit = (row.label - slab.first - span.head).to(tl.int32)
    for start in tl.range(0, span.body, tile.K * tile.W, num_stages=tile.STAGES):
        column = start + _columns(tile)
        mask = column < span.body
        tl.store(d + column, _slopes(x, column, mask, hit, row, factor, spread, pull, rules), mask=mask)
    if tile.PEEL:
        column, mask = _edges(span, tile.VEC)
        tl.store(d + column, _slopes(x, column, mask, hit, row, factor, spread, pull, rules), mask=mask)


@triton.jit
def stream_row(x, span, base, rules, tile: tl.constexpr, POLICY: tl.constexpr):
    """Returns a row's maximum, its sum of exponentials and its sum of differences from `base`."""
    dtype: tl.constexpr = x.dtype.element_ty
    W: tl.constexpr = tile.W
    top = tl.full((W,), float("-inf"), tl.float32)
    total = tl.zeros((W,), tl.float32)
    sums = tl.zeros((W,), tl.float32)
    for first in tl.range(0, span.body, tile.K * tile.W, num_stages=tile.STAGES):
        column = first + _columns(tile)
        mask = column < span.body
        values, _ = _load(x, column, mask, rules, POLICY)
        new = tl.maximum(top, tl.max(values, 0))
        near = tl.where(new == float("-inf"), 0.0, new)  # if all are -inf, exponentials are 0, not exp(-inf + inf)
        total = total * exact_exp(top - near, dtype) + tl.sum(exact_exp(values - near[None, :], dtype), 0)
        top = new
        if rules.smoothing is not None:
            sums += tl.sum(tl.where(mask, values - base, 0.0), 0)
    most, away = tl.max(top, 0), tl.sum(sums, 0)
    if tile.PEEL:
        column, mask = _edges(span, tile.VEC)
        values, _ = _load(x, column, mask, rules, "")
        most = tl.maximum(most, tl.max(values, 0))
        near = tl.where(most == float("-inf"), 0.0, most)
        whole = tl.sum(total * exact_exp(top - near, dtype), 0) + tl.sum(exact_exp(values - near, dtype), 0)
        away += tl.sum(tl.where(mask, values - base, 0.0), 0)
    else:
        near = tl.where(most == float("-inf"), 0.0, most)
        whole = tl.sum(total * exact_exp(top - near, dtype), 0)
    return most, whole, away


@triton.jit
def row_loss(most, whole, away, base, chosen, classes, rules):
    if rules.smoothing is not None:
        share = rules.smoothing
        loss = tl.log(whole) + (most - base) - (1 - share) * (chosen - base) - share * (away / classes)
    else:  # two roundings fewer if the base is not the target's logit
        loss = tl.log(whole) + (most - chosen)
    if rules.z is not None:
        lse = most + tl.log(whole)
        loss += rules.z * lse * lse
    return loss


@triton.jit
def _fwd(
    losses,
    stats,
    d,
    x,
    labels,
    counts,
    columns,
    rules,
    tile: tl.constexpr,
    NEED: tl.constexpr,
    MEAN: tl.constexpr,
    FEW: tl.constexpr,
):
    """Computes a row's loss, with NEED 1 what backward needs of it, and with NEED 2 the gradient for dloss = 1."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels.data + _at(row, labels.inner, labels.outer_stride, labels.inner_stride))
    live, known = label != labels.ignore, (label >= 0) & (label < columns)
    start, span = peel_row(_at(row, labels.inner, x.outer_stride, x.inner_stride), columns, tile)
    logits = x.data + start
    chosen, _slope = logit(tl.load(logits + tl.where(known, label, 0) - span.head).to(tl.float32), rules)
    base = tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)  # sums are of differences from it, which stay small
    policy: tl.constexpr = "evict_last" if NEED == 2 else ""
    read = Span(span.head, tl.where(live, span.body, 0), columns)
    most, whole, away = stream_row(logits, read, base, rules, tile, policy)
    loss = row_loss(most, whole, away, base, chosen, columns, rules)
    loss = tl.where(live, tl.where(known, loss, float("nan")), 0.0)
    tl.store(losses + row, loss.to(losses.dtype.element_ty))
    most, whole = tl.where(live, most, 0.0), tl.where(live, whole, 1.0)  # ignored rows were not read
    if NEED:
        tl.store(stats + row, most)
        tl.store(stats + labels.rows + row, whole)
    if NEED == 2:
        upstream = tl.div_rn(1.0, counted(counts, labels, FEW)) if MEAN else 1.0
        out, _ = peel_row(row * columns, columns, tile)
        slab = Slab(columns, 0, columns)
        write_gradient(d + out, logits, span, slab, Row(label, live, most, whole, upstream), rules, tile)


@triton.jit
def _bwd(
    d,
    x,
    labels,
    dloss,
    stats,
    counts,
    slab,
    rules,
    tile: tl.constexpr,
    MADE: tl.constexpr,
    EACH: tl.constexpr,
    MEAN: tl.constexpr,
    FEW: tl.constexpr,
):
    """Writes the slab's columns of the gradient.

    MADE: forward has written the gradient for dloss = 1, so nothing is left to do if dloss is 1.
    """
    end = tl.where(tl.load(dloss.data) == 1, 0, labels.rows) if MADE else labels.rows
    for index in range(tl.program_id(0), end, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        label = tl.load(labels.data + _at(row, labels.inner, labels.outer_stride, labels.inner_stride))
        each = _at(row, labels.inner, dloss.outer_stride, dloss.inner_stride) if EACH else 0
        upstream = tl.load(dloss.data + each).to(tl.float32)
        if MEAN:
            upstream = tl.div_rn(upstream, counted(counts, labels, FEW))
        top, total = tl.load(stats + row), tl.load(stats + labels.rows + row)
        start, span = peel_row(_at(row, labels.inner, x.outer_stride, x.inner_stride), slab.columns, tile)
        out, _ = peel_row(row * slab.columns, slab.columns, tile)
        facts = Row(label, label != labels.ignore, top, total, upstream)
        write_gradient(d + out, x.data + start, span, slab, facts, rules, tile)


_SPACE = [{"K": k, "num_warps": w, "STAGES": s} for k in (1, 2, 4, 8) for w in (8, 16, 32) for s in (1, 2, 3)]


def _planes(logits: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns logits as (outer, inner, V) with V contiguous, and tensors with a value per row as (outer, inner).

    Three dimensions are kept as they are, so that logits[:, :-1] is not copied.
    """
    if logits.dim() != 3:
        logits, rows = logits.reshape(1, rows[0].numel(), logits.shape[-1]), tuple([r.reshape(1, -1) for r in rows])
    return [logits if logits.stride(2) == 1 else logits.contiguous(), *rows]


def launch_rows(kernel: Any, x: torch.Tensor, *args: Any, persist: bool = False, **constants: Any) -> None:
    """Starts a kernel over rows of x (outer, inner, V): one program per row, or with persist enough to fill the GPU."""
    where, size, bucket = device.of(x), x.element_size(), triton.next_power_of_2(x.shape[2])
    rows, vec = x.shape[0] * x.shape[1], 16 // size
    peel = x.shape[2] % 16 != 0 and x.is_contiguous() and x.data_ptr() % 16 == 0

    def rule() -> tuning.Config:
        """16 warps with two 16-byte loads per thread; 32 warps if rows exceed 128 KiB.

        With 32, few enough rows are in progress to stay in L2 until they are read again.
        """
        most = min(32 if bucket * size > 131072 else 16, 1024 // where.warp)
        warps = max(1, min(most, bucket // (where.warp * vec)))
        return {"K": 2 if bucket > 4096 else 1, "num_warps": warps, "STAGES": 1}

    def config() -> dict[str, Any]:
        key = f"{dtype_name(x)} {bucket}"
        found = tuning.config(where, "cross_entropy", kernel.__name__[1:], key, rule, lambda: _SPACE)
        warps = found["num_warps"]
        tile = Tile(found["K"], warps * where.warp * vec, vec, peel, found["STAGES"])
        return {"num_warps": warps, "tile": tile}

    def grid(c: dict[str, Any]) -> tuple[int]:
        return (min(rows, where.multiprocessors * 2048 // (c["num_warps"] * where.warp)) if persist else rows,)

    launch(kernel, grid, *args, config=config, key=(bucket, peel), **constants)


def rules_of(smoothing: float, z: float, cap: float, scale: float, *, number: bool = False) -> Rules:
    """Returns the options as kernels take them. number: smoothing of 0 too, with which `_bwd` has fewer registers."""
    return Rules(None if scale == 1 else scale, cap or None, smoothing if number else smoothing or None, z or None)


def labels_of(target: torch.Tensor, ignore: int) -> Labels:
    """Returns a target (outer, inner) as kernels take it."""
    outer_stride, inner_stride = target.stride()
    return Labels(target, target.numel(), target.shape[1], outer_stride, inner_stride, ignore)


def kept_counts(rows: int, reduction: str) -> int:
    """Returns how many partial counts of rows forward keeps for backward."""
    return PARTS.value if reduction == "mean" and rows > FEW else 0


def split_saved(saved: torch.Tensor, rows: int, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits what forward keeps: counts of rows; all rows' maxima, then their sums of exponentials."""
    parts = kept_counts(rows, reduction)
    return saved[:parts].view(torch.int32), saved[parts:]


def launch_count(counts: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Counts the rows that are not ignored, in `counts` or, if it has no elements, in new memory, and returns them."""
    if not counts.numel():
        counts = torch.empty((PARTS.value,), dtype=torch.int32, device=labels.data.device)
    launch(_count, (PARTS.value,), counts, labels, BLOCK=256, num_warps=4)
    return counts


def launch_fwd(
    each: Callable[..., None],
    counts_few: bool,
    loss: torch.Tensor,
    d: torch.Tensor,
    saved: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    need: int,
    ignore: int,
    *options: Any,
) -> None:
    """Fills loss, d and saved. counts_few: `each` counts the rows itself if they are few, as `forward_rows` does."""
    *values, reduction = options
    x, t = _planes(logits, target)
    labels, rows, mean = labels_of(t, ignore), t.numel(), reduction == "mean"
    losses, (counts, stats) = loss, split_saved(saved, rows, reduction)
    if reduction != "none":
        losses = torch.empty((rows,), dtype=torch.float32, device=x.device)
    few = FEW if rows <= FEW and counts_few else 0
    if mean and not few:
        counts = launch_count(counts, labels)
    each(losses, stats, d, x, labels, counts, rules_of(*values), need, mean)
    if reduction == "none":
        return
    if rows > 65536:
        parts = torch.empty((PARTS.value,), dtype=torch.float32, device=x.device)
        launch(_total, (PARTS.value,), parts, losses, rows, counts, labels, MEAN=False, FEW=0, BLOCK=1024, num_warps=4)
        losses, rows = parts, PARTS.value
    launch(_total, (1,), loss, losses, rows, counts, labels, MEAN=mean, FEW=few, BLOCK=4096, num_warps=16)


def forward_rows(
    losses: torch.Tensor,
    stats: torch.Tensor,
    d: torch.Tensor,
    x: torch.Tensor,
    labels: Labels,
    counts: torch.Tensor,
    rules: Rules,
    need: int,
    mean: bool,
) -> None:
    """Computes the rows' losses and what `need` asks for, one row per program."""
    few = FEW if labels.rows <= FEW and not counts.numel() else 0  # counts may cover more rows than these
    given = losses, stats, d, Planes(x, *x.stride()[:2]), labels, counts, x.shape[2], rules
    launch_rows(_fwd, x, *given, NEED=need, FEW=few, MEAN=mean)


def launch_gradient(
    d: torch.Tensor, x: torch.Tensor, labels: Labels, upstream: Planes, stats: torch.Tensor, counts: torch.Tensor,
    slab: Slab, rules: Rules, *, made: bool, each: bool, mean: bool, few: int
) -> None:  # fmt: skip
    """Writes d, the gradient of the slab x of the logits. few: rows are counted again here if they are at most so many.

    made: d holds the gradient for dloss = 1 already. each: `upstream` has a value per row. mean: it is the mean's.
    """
    given = d, Planes(x, *x.stride()[:2]), labels, upstream, stats, counts, slab, rules
    launch_rows(_bwd, x, *given, persist=made, MADE=made, EACH=each, MEAN=mean, FEW=few)


def launch_bwd(
    d: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    saved: torch.Tensor,
    made: bool,
    ignore: int,
    *options: Any,
) -> None:
    """Fills d. made: it holds the gradient for dloss = 1 already."""
    *values, reduction = options
    each = reduction == "none"
    x, t, g = _planes(logits, target, dloss) if each else (*_planes(logits, target), dloss)
    counts, stats = split_saved(saved, t.numel(), reduction)
    upstream = Planes(g, *(g.stride() if each else (0, 0)))
    given = labels_of(t, ignore), upstream, stats, counts, Slab(x.shape[2], 0, x.shape[2])
    few, mean = FEW if t.numel() <= FEW else 0, reduction == "mean"
    launch_gradient(d, x, *given, rules_of(*values, number=True), made=made, each=each, mean=mean, few=few)
