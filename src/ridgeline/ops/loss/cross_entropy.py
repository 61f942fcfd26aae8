"""cross_entropy: -log softmax(a logits)[target] in the last dimension, with label smoothing s, z-loss z and softcap c.

    x = c tanh(a logits / c),   lse = log sum_j exp x_j,   loss = lse - (1 - s) x_t - s mean(x) + z lse^2
    backward: dx_j = (p_j (1 + 2 z lse) - s / V - (1 - s) [j = t]) dloss,   p_j = exp(x_j - lse),
              dlogits_j = a (1 - (x_j / c)^2) dx_j

An online pass over a row finds its maximum and sum of exponentials. For a mean or a sum, the gradient up to a factor
depends on the row alone: forward writes it while the row is still in L2, so forward and backward read the logits once.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch, packed
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dtype_name, nbytes, readable
from ridgeline.ops.loss import _cluster
from ridgeline.select import by_kind, eager, run
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
def _counted(counts, labels, FEW: tl.constexpr):
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
        whole = tl.div_rn(whole, _counted(counts, labels, FEW))
    tl.store(out + tl.program_id(0), whole.to(out.dtype.element_ty))


@triton.jit
def _logit(x, rules):
    """Returns scaled and capped float32 logits, and the cap's slope."""
    if rules.scale is not None:
        x *= rules.scale
    return capped(x, rules.cap, rules.cap is not None)


@triton.jit
def _load(x, column, mask, rules, POLICY: tl.constexpr):
    """Returns scaled and capped logits as float32, -inf outside the mask, and the cap's slope."""
    given = tl.load(x + column, mask=mask, other=float("-inf"), eviction_policy=POLICY)
    values, slope = _logit(given.to(tl.float32), rules)
    return (tl.where(mask, values, float("-inf")) if rules.cap is not None else values), slope


@triton.jit
def _peel(start, columns, tile: tl.constexpr):
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
def _gradient(d, x, span, slab, row, rules, tile: tl.constexpr):
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
def _stream(x, span, base, rules, tile: tl.constexpr, POLICY: tl.constexpr):
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
def _loss(most, whole, away, base, chosen, classes, rules):
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
    start, span = _peel(_at(row, labels.inner, x.outer_stride, x.inner_stride), columns, tile)
    logits = x.data + start
    chosen, _slope = _logit(tl.load(logits + tl.where(known, label, 0) - span.head).to(tl.float32), rules)
    base = tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)  # sums are of differences from it, which stay small
    policy: tl.constexpr = "evict_last" if NEED == 2 else ""
    read = Span(span.head, tl.where(live, span.body, 0), columns)
    most, whole, away = _stream(logits, read, base, rules, tile, policy)
    loss = _loss(most, whole, away, base, chosen, columns, rules)
    loss = tl.where(live, tl.where(known, loss, float("nan")), 0.0)
    tl.store(losses + row, loss.to(losses.dtype.element_ty))
    most, whole = tl.where(live, most, 0.0), tl.where(live, whole, 1.0)  # ignored rows were not read
    if NEED:
        tl.store(stats + row, most)
        tl.store(stats + labels.rows + row, whole)
    if NEED == 2:
        upstream = tl.div_rn(1.0, _counted(counts, labels, FEW)) if MEAN else 1.0
        out, _ = _peel(row * columns, columns, tile)
        slab = Slab(columns, 0, columns)
        _gradient(d + out, logits, span, slab, Row(label, live, most, whole, upstream), rules, tile)


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
            upstream = tl.div_rn(upstream, _counted(counts, labels, FEW))
        top, total = tl.load(stats + row), tl.load(stats + labels.rows + row)
        start, span = _peel(_at(row, labels.inner, x.outer_stride, x.inner_stride), slab.columns, tile)
        out, _ = _peel(row * slab.columns, slab.columns, tile)
        facts = Row(label, label != labels.ignore, top, total, upstream)
        _gradient(d + out, x.data + start, span, slab, facts, rules, tile)


_SPACE = [{"K": k, "num_warps": w, "STAGES": s} for k in (1, 2, 4, 8) for w in (8, 16, 32) for s in (1, 2, 3)]


def _planes(logits: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns logits as (outer, inner, V) with V contiguous, and tensors with a value per row as (outer, inner).

    Three dimensions are kept as they are, so that logits[:, :-1] is not copied.
    """
    if logits.dim() != 3:
        logits, rows = logits.reshape(1, rows[0].numel(), logits.shape[-1]), tuple([r.reshape(1, -1) for r in rows])
    return [logits if logits.stride(2) == 1 else logits.contiguous(), *rows]


def _launch_rows(kernel: Any, x: torch.Tensor, *args: Any, persist: bool = False, **constants: Any) -> None:
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


def _rules(smoothing: float, z: float, cap: float, scale: float, *, number: bool = False) -> Rules:
    """Returns the options as kernels take them. number: smoothing of 0 too, with which `_bwd` has fewer registers."""
    return Rules(None if scale == 1 else scale, cap or None, smoothing if number else smoothing or None, z or None)


def _labels_of(target: torch.Tensor, ignore: int) -> Labels:
    """Returns a target (outer, inner) as kernels take it."""
    outer_stride, inner_stride = target.stride()
    return Labels(target, target.numel(), target.shape[1], outer_stride, inner_stride, ignore)


def _parts(rows: int, reduction: str) -> int:
    """Returns how many partial counts of rows forward keeps for backward."""
    return PARTS.value if reduction == "mean" and rows > FEW else 0


def _split(saved: torch.Tensor, rows: int, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits what forward keeps: counts of rows; all rows' maxima, then their sums of exponentials."""
    parts = _parts(rows, reduction)
    return saved[:parts].view(torch.int32), saved[parts:]


def _launch_fwd(
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
    """Fills loss, d and saved. counts_few: `each` counts the rows itself if they are few, as `_rows` does."""
    *values, reduction = options
    x, t = _planes(logits, target)
    labels, rows, mean = _labels_of(t, ignore), t.numel(), reduction == "mean"
    losses, (counts, stats) = loss, _split(saved, rows, reduction)
    if reduction != "none":
        losses = torch.empty((rows,), dtype=torch.float32, device=x.device)
    few = FEW if rows <= FEW and counts_few else 0
    if mean and not few:
        if not counts.numel():
            counts = torch.empty((PARTS.value,), dtype=torch.int32, device=x.device)
        launch(_count, (PARTS.value,), counts, labels, BLOCK=256, num_warps=4)
    each(losses, stats, d, x, labels, counts, _rules(*values), need, mean)
    if reduction == "none":
        return
    if rows > 65536:
        parts = torch.empty((PARTS.value,), dtype=torch.float32, device=x.device)
        launch(_total, (PARTS.value,), parts, losses, rows, counts, labels, MEAN=False, FEW=0, BLOCK=1024, num_warps=4)
        losses, rows = parts, PARTS.value
    launch(_total, (1,), loss, losses, rows, counts, labels, MEAN=mean, FEW=few, BLOCK=4096, num_warps=16)


def _rows(
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
    few = FEW if labels.rows <= FEW and not counts.numel() else 0  # counts may cover more rows than these
    given = losses, stats, d, Planes(x, *x.stride()[:2]), labels, counts, x.shape[2], rules
    _launch_rows(_fwd, x, *given, NEED=need, FEW=few, MEAN=mean)


def _launch_bwd(
    d: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    dloss: torch.Tensor,
    saved: torch.Tensor,
    made: bool,
    ignore: int,
    *options: Any,
) -> None:
    *values, reduction = options
    each = reduction == "none"
    x, t, g = _planes(logits, target, dloss) if each else (*_planes(logits, target), dloss)
    counts, stats = _split(saved, t.numel(), reduction)
    upstream = Planes(g, *(g.stride() if each else (0, 0)))
    given = d, Planes(x, *x.stride()[:2]), _labels_of(t, ignore), upstream, stats, counts
    slab, few = Slab(x.shape[2], 0, x.shape[2]), FEW if t.numel() <= FEW else 0
    flags = {"MADE": made, "EACH": each, "MEAN": reduction == "mean", "FEW": few}
    _launch_rows(_bwd, x, *given, slab, _rules(*values, number=True), persist=made, **flags)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale, str reduction"


@kernel_op(
    f"cross_entropy_fwd(Tensor logits, Tensor target, ScalarType dtype, int need, {_OPTIONS}, str? impl) "
    "-> (Tensor, Tensor, Tensor)"
)
def _forward(
    logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, need: int, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss, the gradient and statistics (`_split`). need: 1 for statistics, 2 for both."""
    *options, reduction, impl = options
    loss = torch.empty(target.shape if reduction == "none" else (), dtype=dtype, device=logits.device)
    d = torch.empty(logits.shape if need == 2 else (0,), dtype=logits.dtype, device=logits.device)
    kept = _parts(target.numel(), reduction) + (2 * target.numel() if need else 0)
    saved = torch.empty((kept,), dtype=torch.float32, device=logits.device)
    run(CROSS_ENTROPY, "fwd", impl, (loss, d, saved), logits, target, need, *options, reduction)
    return loss, d, saved


@kernel_op(
    f"cross_entropy_bwd(Tensor logits, Tensor target, Tensor dloss, Tensor saved, {_OPTIONS}, str? impl) -> Tensor"
)
def _backward(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    target, dloss, saved, *options, impl = rest
    d = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    run(CROSS_ENTROPY, "bwd", impl, (d,), logits, target, dloss, saved, False, *options)
    return d


@kernel_op(
    "cross_entropy_finish(Tensor(a!) made, Tensor logits, Tensor target, Tensor dloss, Tensor saved, "
    f"{_OPTIONS}, str? impl) -> ()"
)
def _finish(made: torch.Tensor, logits: torch.Tensor, *rest: Any) -> None:
    """Turns forward's gradient, for dloss = 1, into that for `dloss`: a kernel that only looks if it is 1."""
    target, dloss, saved, *options, impl = rest
    run(CROSS_ENTROPY, "bwd", impl, (made,), logits, target, dloss, saved, True, *options)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, need: int, *options: Any
    ) -> torch.Tensor:
        hooks = packed() if need == 2 else None
        loss, made, saved = _forward(logits, target, dtype, 1 if hooks == "recomputed" else need, *options)
        ctx.options = options
        ctx.fresh = need == 2
        ctx.made = made if need == 2 and hooks is None else None
        if hooks is None:
            ctx.save_for_backward(logits, target, saved)
        else:  # hooks see only what is saved so; where they drop it, a placeholder will do
            ctx.save_for_backward(
                logits, target, saved, made if hooks == "kept" else logits.new_empty(()).expand(logits.shape)
            )
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        logits, target, saved, *hooked = ctx.saved_tensors
        options = ctx.options
        nothing = (None,) * (3 + len(options))
        # Given away once, as the caller's own; a second backward computes another.
        if ctx.fresh:
            made, ctx.made, ctx.fresh = hooked[0] if hooked else ctx.made, None, False
            _finish(made, logits, target, dloss, saved, *options)
            return made, *nothing
        return _backward(logits, target, dloss, saved, *options), *nothing


def reference(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, reduction: str = "mean",
    dtype: torch.dtype | None = None
) -> torch.Tensor:  # fmt: skip
    if dtype not in (None, logits.dtype):
        wide = logits.to(torch.promote_types(logits.dtype, dtype))
        options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        options |= {"softcap": softcap, "logit_scale": logit_scale, "reduction": reduction}
        return reference(wide, target, **options).to(dtype)
    ignored = target == ignore_index
    known = (target >= 0) & (target < logits.shape[-1])
    logits = logits.masked_fill(ignored[..., None], 0.0)
    if logit_scale != 1:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = logits.log_softmax(-1)
    loss = -(1 - label_smoothing) * logp.gather(-1, target.where(known, 0)[..., None])[..., 0]
    if label_smoothing:
        loss = loss - label_smoothing * logp.mean(-1)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1) ** 2
    loss = (loss * torch.ones_like(loss).masked_fill(~known, float("nan"))).masked_fill(ignored, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (~ignored).sum() if reduction == "mean" else loss.sum()


def _torch(
    logits: torch.Tensor, target: torch.Tensor, *, z_loss: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:  # fmt: skip
    """PyTorch's own, with the scale, the softcap, the z-loss and the dtype, which it lacks, added."""
    if dtype is not None:
        options |= {"z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
        return _torch(logits.to(torch.promote_types(logits.dtype, dtype)), target, **options).to(dtype)
    rows, labels = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1)
    reduction = options.get("reduction", "mean")
    if logit_scale != 1:
        rows = rows * logit_scale
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    loss = F.cross_entropy(rows, labels, **options)
    if z_loss:
        ignored = labels == options.get("ignore_index", -100)
        extra = (z_loss * rows.logsumexp(-1) ** 2).masked_fill(ignored, 0.0)
        loss = loss + (
            extra if reduction == "none" else extra.sum() / (~ignored).sum() if reduction == "mean" else extra.sum()
        )
    return loss.reshape(target.shape) if reduction == "none" else loss


def _fault(
    logits: Any, target: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, logit_scale: Any,
    reduction: Any, dtype: Any = None
) -> str | None:  # fmt: skip
    """Returns what is wrong with a call, or None."""
    for name, t in (("logits", logits), ("target", target)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
    if not logits.is_floating_point():
        return f"logits must be floating point (float32, float16, bfloat16), got {logits.dtype}"
    if target.dtype != torch.int64:
        return f"target must hold class indices in int64, got {target.dtype}"
    if not logits.dim() or not logits.shape[-1] or target.shape != logits.shape[:-1]:
        shapes = f"{tuple(target.shape)} and {tuple(logits.shape)}"
        return f"target must have the logits' shape without the last dimension (at least one class), got {shapes}"
    if target.device != logits.device:
        return f"target and logits must be on one device, got {target.device} and {logits.device}"
    if not isinstance(ignore_index, int):
        return f"ignore_index must be an int, got {ignore_index!r}"
    for name, value in (
        ("label_smoothing", label_smoothing),
        ("z_loss", z_loss),
        ("softcap", 0.0 if softcap is None else softcap),
        ("logit_scale", logit_scale),
    ):
        if not isinstance(value, int | float):
            return f"{name} must be a number, got {value!r}"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing must be between 0 and 1, got {label_smoothing}"
    if not 0 <= z_loss < float("inf"):
        return f"z_loss must be finite and at least 0, got {z_loss}"
    if softcap is not None and not 0 < softcap < float("inf"):
        return f"softcap must be None or a finite number above 0, got {softcap}"
    if not 0 < logit_scale < float("inf"):
        return f"logit_scale must be a finite number above 0, got {logit_scale}"
    if reduction not in ("none", "mean", "sum"):
        return f'reduction must be "none", "mean" or "sum", got {reduction!r}'
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"dtype must be None or a floating-point dtype (torch.float32, ...), got {dtype!r}"
    return None


def _all_classes(op: str, target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raises RidgelineError for an invalid target that the host may read (`op.readable`)."""
    if readable(target) and (wrong := (target != ignore_index) & ((target < 0) | (target >= classes))).any():
        raise RidgelineError(
            f"{op}: targets must be 0 to {classes - 1} or ignore_index {ignore_index}, got {target[wrong][0]}"
        )


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, reduction: str = "mean",
    dtype: torch.dtype | None = None, impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns the cross-entropy loss, -log softmax(logits)[target], with the classes in the last dimension.

    As `torch.nn.functional.cross_entropy`, which has them in the second. Gradients flow to logits.

    logits: (..., V), floating point, any strides; never modified. target: (...), int64 class indices.
    ignore_index: a target with this value has loss and gradient 0, whatever its logits.
    label_smoothing: the share, 0 to 1, of the target that is spread over all classes.
    logit_scale: a number above 0 that multiplies the logits before all else, as in Cohere's models.
    softcap: then replaces logits by softcap * tanh(logits / softcap).
    z_loss: adds z_loss * logsumexp(logits)^2, of these logits, to each row.
    reduction: "mean" over the rows that are not ignored (NaN if there are none), "sum", or "none" for a loss per row.
    dtype: the loss's. None means the logits', or float32 under autocast, as in PyTorch; torch.float32 keeps all digits
    of the float32 arithmetic beside narrower logits.
    Values on the GPU are not validated (that would synchronise): an invalid class gives NaN. On the CPU, and with
    RIDGELINE_CHECK=1, it raises.
    Raises RidgelineError if shapes, dtypes, devices or options do not match the above or `impl` cannot run the call.
    """
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction
    plain, made, *facts = _look(logits, target, *options, dtype, impl)
    if plain is None:
        return _call(logits, target, made, *facts, impl)
    named = dict(zip(OPTIONS, options, strict=True))
    return plain.call(logits, target, dtype=dtype, **named)


OPTIONS = "ignore_index", "label_smoothing", "z_loss", "softcap", "logit_scale", "reduction"


@by_kind(2)
def _look(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float | None, logit_scale: float, reduction: str, dtype: torch.dtype | None, impl: str | None
) -> tuple[Any, ...]:  # fmt: skip
    """Checks a call and chooses. Returns too the loss's dtype and the options as the launchers take them."""
    fault = _fault(logits, target, ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, dtype)
    if fault:
        raise RidgelineError(f"cross_entropy: {fault}")
    plain = eager(CROSS_ENTROPY, impl, logits)
    _all_classes("cross_entropy", target, logits.shape[-1], ignore_index)
    if dtype is None:
        dtype = torch.float32 if torch.is_autocast_enabled("cuda" if logits.is_cuda else "cpu") else logits.dtype
    values = float(label_smoothing), float(z_loss), float(softcap or 0), float(logit_scale)
    return plain, dtype, ignore_index, *values, reduction


def _call(logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, *options: Any) -> torch.Tensor:
    if not torch.is_grad_enabled() or not logits.requires_grad:
        return _forward(logits, target, dtype, 0, *options)[0]
    need = 1 if options[-2] == "none" or torch.compiler.is_compiling() else 2
    return differentiate(_CrossEntropy, logits, target, dtype, need, *options)


def cost(
    logits: torch.Tensor, target: torch.Tensor, *, reduction: str = "mean", **_: Any
) -> tuple[Cost, Cost | None, Cost | None]:
    """Returns the costs of forward, of backward from the logits, and of both in a step, which reads the logits once."""
    losses = (target.numel() if reduction == "none" else 1) * logits.element_size()
    given, count = nbytes(logits, target), logits.numel()
    if not logits.requires_grad:
        return Cost(given, losses, 5 * count), None, None
    return (
        Cost(given, losses, 5 * count),
        Cost(given, nbytes(logits), 5 * count),
        Cost(given, losses + nbytes(logits), 8 * count),
    )


class Extreme(Spec):
    """Random data times `high`, with -inf in every third column."""

    def make(self, *args: Any) -> torch.Tensor:
        x = super().make(*args)
        with torch.no_grad():
            x *= self.high
            x[..., 1::3] = float("-inf")
        return x


class Ignored(Spec):
    """Random classes below `high`, every third one -100."""

    def make(self, *args: Any) -> torch.Tensor:
        target = super().make(*args)
        if target.dim():
            target[..., ::3] = -100
        return target


def _labels(*shape: int, high: int, some: type[Spec] = Spec) -> Spec:
    return some(*shape, dtype="int64", high=high)


WIDE = ((8192, 32000), (8192, 128256), (4096, 151936), (4096, 50257))
ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}
CROSS_ENTROPY = Op(
    cross_entropy,
    reference=reference,
    cost=cost,
    flops={
        "cross_entropy_fwd": lambda logits, target, dtype, need, *_: (8 if need == 2 else 5) * logits.numel(),
        "cross_entropy_bwd": lambda logits, *_: 5 * logits.numel(),
        "cross_entropy_finish": lambda *_: 0,
    },
    cases=[
        Case("33x129", (Spec(33, 129), _labels(33, high=129))),
        Case("33x129 float32", (Spec(33, 129), _labels(33, high=129)), {"dtype": torch.float32}),
        Case("2x9x907 all", (Spec(2, 9, 907), _labels(2, 9, high=907, some=Ignored)), ALL),
        Case("17x1008 sum, ignored", (Spec(17, 1008), _labels(17, high=1008, some=Ignored)), {"reduction": "sum"}),
        Case(
            "2x9x1000 none, all",
            (Spec(2, 9, 1000), _labels(2, 9, high=1000, some=Ignored)),
            {"reduction": "none"} | ALL,
        ),
        Case("7x1", (Spec(7, 1), _labels(7, high=1)), {"label_smoothing": 0.5}),
        Case("129", (Spec(129), _labels(high=129)), {"softcap": 30.0}),
        Case("33x300 scale", (Spec(33, 300), _labels(33, high=300)), {"logit_scale": 0.3}),
        Case(
            "2x9x907 none, scale, all",
            (Spec(2, 9, 907), _labels(2, 9, high=907, some=Ignored)),
            {"logit_scale": 3.0, "reduction": "none"} | ALL,
        ),
        Case("no rows", (Spec(0, 4), _labels(0, high=4)), {"reduction": "sum"}),
        Case("5x40 nothing but ignored", (Spec(5, 40), _labels(5, high=1)), {"ignore_index": 0}),
        Case("20x400 extreme", (Extreme(20, 400, high=10000), _labels(20, high=1)), {"z_loss": 1e-4}),
        Case("20x400 extreme, smooth", (Extreme(20, 400, high=10000), _labels(20, high=400)), {"label_smoothing": 0.1}),
        Case("4x50257", (Spec(4, 50257), _labels(4, high=50257)), {"label_smoothing": 0.1}),
        Case("33x8200 ignored", (Spec(33, 8200), _labels(33, high=8200, some=Ignored)), {"z_loss": 1e-4}),
        Case("33x10007", (Spec(33, 10007), _labels(33, high=10007)), dtypes=("float16", "bfloat16")),
        Case("64x8192", (Spec(64, 8192), _labels(64, high=8192)), use="quick"),
        *(Case(f"{m}x{n}", (Spec(m, n), _labels(m, high=n)), dtypes=("bfloat16",), use="bench") for m, n in WIDE),
        *(
            Case(
                f"{m}x{n} no gradient", (Spec(m, n, grad=False), _labels(m, high=n)), dtypes=("bfloat16",), use="bench"
            )
            for m, n in WIDE[:3]
        ),
    ],
)

CROSS_ENTROPY.eager("naive", "the formula in eager PyTorch: log_softmax, then gather, both through memory", reference)
CROSS_ENTROPY.eager(
    "torch", "PyTorch's own: log_softmax is written in forward and read in backward", _torch, served=True
)
CROSS_ENTROPY.compiled("the formula fused by torch.compile: reads logits twice forward and once backward")
CROSS_ENTROPY.kernel(
    "triton",
    "one online pass per row; forward writes the gradient while the row is in L2, unless reduction='none'",
    kind="triton",
    fwd=partial(_launch_fwd, _rows, True),
    bwd=_launch_bwd,
    served=True,
)
CROSS_ENTROPY.kernel(
    "cuda_cluster",
    "each row in the shared memory of a thread-block cluster: loss and gradient from a single read",
    kind="cuda",
    fwd=partial(_launch_fwd, _cluster.rows, False),
    bwd=_launch_bwd,
    supports=_cluster.fits,
    served=True,
    arch=90,
    shared=227 << 10,
)
