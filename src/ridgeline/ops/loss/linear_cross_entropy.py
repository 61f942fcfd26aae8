"""linear_cross_entropy: cross_entropy(x W^T + b, target), a language model's last layer and loss without all logits.

    logits = x W^T + b,   loss = cross_entropy(logits, target),   dlogits as in cross_entropy,
    dx = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

The logits are the largest tensor of a training step: 8192 x 128256 take 2.1 GB in half precision, and their gradient
the same again. Here only a part of them is in memory at a time. dW accumulates in its own dtype, so there are at most
four groups of rows:

    If a group's logits fit:  logits = x W^T;  loss, and dlogits in place of logits;  dx = dlogits W;  dW += dlogits^T x
    If they do not fit:       slabs of classes. Each slab updates every row's running maximum and sum. The last slab is
                              still in memory when the loss is known, so its logits become their gradient in place;
                              the other slabs' logits are computed again.

With memory for a share m of all logits, a step has three products, plus a share 1 - 4m of a fourth if 4m < 1: a group's
logits are computed again except those in memory when its losses are known, however rows are grouped.
Sources: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv:2411.09009); Hsu et al., Liger
Kernel, 2024 (arXiv:2410.10989), which takes chunks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch, packed
from ridgeline.op import Case, Cost, Op, OwnDtype, RidgelineError, Spec, dense_only, nbytes
from ridgeline.ops.loss import _arguments, _cluster, _rows, cross_entropy
from ridgeline.ops.loss._rows import (
    Labels,
    Planes,
    Row,
    Rules,
    Slab,
    Span,
    counted,
    logit,
    peel_row,
    row_loss,
    stream_row,
    write_gradient,
)
from ridgeline.ops.loss.cross_entropy import CROSS_ENTROPY, Ignored
from ridgeline.select import by_kind, eager, run, why_not
from ridgeline.tiles.online_softmax import exact_exp

ROUNDINGS = 4  # at most, of dW and of dx, which accumulate in their own dtype over so many groups or slabs
LEAST = 216 << 20  # default bytes of logits for large calls: up to 864 MiB in four groups
SLAB = 128  # a slab has a multiple of so many classes


class Plan(NamedTuple):
    """How a call is split: rows per group, classes per slab, and whether dx accumulates in float32."""

    rows: int
    classes: int
    sums: bool = False


def plan(rows: int, classes: int, hidden: int, size: int, memory: int) -> Plan:
    """Returns the plan with the fewest products for `memory` bytes of logits, of `size` bytes per element.

    0 bytes: a fourth of the logits, or LEAST if that is at least a fifth.
    """
    row = classes * size
    memory = memory or (LEAST if 5 * LEAST >= rows * row else -(-rows // ROUNDINGS) * row)
    fit = memory // row
    if rows <= ROUNDINGS * fit:
        groups = -(-rows // max(fit, 1)) or 1
        return Plan(-(-rows // groups) or 1, classes)
    group = -(-rows // ROUNDINGS)
    wide = max(SLAB, memory // (group * size) // SLAB * SLAB)
    if sums := ROUNDINGS * wide < classes:
        wide = max(SLAB, (memory // group - 4 * hidden) // size // SLAB * SLAB)
    return Plan(group, min(wide, classes), sums)


@triton.jit
def _merged(stats, state, row, rows, most, whole, away, rules, dtype: tl.constexpr):
    """Returns a row's maximum and sums over this slab and those before."""
    top, total = tl.load(stats + row), tl.load(stats + rows + row)
    new = tl.maximum(most, top)
    near = tl.where(new == float("-inf"), 0.0, new)
    whole = whole * exact_exp(most - near, dtype) + total * exact_exp(top - near, dtype)
    if rules.smoothing is not None:
        away += tl.load(state + 2 * rows + row)
    return new, whole, away


@triton.jit
def _fold(
    losses,
    stats,
    state,
    x,
    labels,
    counts,
    slab,
    rules,
    tile: tl.constexpr,
    NEED: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Folds a slab of a row into its running values.

    stats: maximum and sum of exponentials. state: the target's logit, a base and the sum of differences from it. After
    the LAST slab the loss is known; with NEED 2 that slab becomes its gradient in place.
    """
    row = tl.program_id(0).to(tl.int64)
    rows, columns, first, classes = labels.rows, slab.columns, slab.first, slab.classes
    label = tl.load(labels.data + row * labels.inner_stride)
    live, known = label != labels.ignore, (label >= 0) & (label < classes)
    here = known & (label >= first) & (label < first + columns)
    start, span = peel_row(row * columns, columns, tile)
    x += start
    chosen, _slope = logit(tl.load(x + tl.where(here, label - first, 0) - span.head).to(tl.float32), rules)
    if FIRST:  # the base is any logit of the row; differences from it stay small
        zeroth, _slope = logit(tl.load(x - span.head).to(tl.float32), rules)
        base = tl.where(tl.abs(zeroth) < float("inf"), zeroth, 0.0)
        tl.store(state + row, base)
    else:
        base = tl.load(state + row)
        chosen = tl.where(here, chosen, tl.load(state + rows + row))
    policy: tl.constexpr = "evict_last" if LAST and NEED == 2 else ""
    read = Span(span.head, tl.where(live, span.body, 0), columns)
    most, whole, away = stream_row(x, read, base, rules, tile, policy)
    if not FIRST:
        most, whole, away = _merged(stats, state, row, rows, most, whole, away, rules, x.dtype.element_ty)
    if LAST:
        loss = row_loss(most, whole, away, base, chosen, classes, rules)
        loss = tl.where(live, tl.where(known, loss, float("nan")), 0.0)
        tl.store(losses + row, loss.to(losses.dtype.element_ty))
        most, whole = tl.where(live, most, 0.0), tl.where(live, whole, 1.0)
    else:
        tl.store(state + rows + row, chosen)
        if rules.smoothing is not None:
            tl.store(state + 2 * rows + row, away)
    tl.store(stats + row, most)
    tl.store(stats + rows + row, whole)
    if LAST and NEED == 2:
        upstream = tl.div_rn(1.0, counted(counts, labels, 0)) if MEAN else 1.0
        write_gradient(x, x, span, slab, Row(label, live, most, whole, upstream), rules, tile)


def _add(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, more: bool) -> None:
    """out = a @ b or, with `more`, out += a @ b; out has their dtype or float32, and the product is rounded once."""
    if out.dtype != a.dtype and a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out) if more else torch.mm(a, b, out_dtype=out.dtype, out=out)
        return
    a, b = a.to(out.dtype), b.to(out.dtype)
    torch.addmm(out, a, b, out=out) if more else torch.mm(a, b, out=out)


class _Work:
    """A call's groups and slabs: their logits, in reused memory, and their part of the gradients.

    It uses only operations that `replay.py` can record.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: int,
        grads: tuple[torch.Tensor, ...],
    ):
        """grads: dx, dW and, in float32, db; without elements if not wanted."""
        self.x, self.weight, self.bias = x, weight, bias
        self.plan = cut = plan(x.shape[0], weight.shape[0], weight.shape[1], x.element_size(), memory)
        self.dx, self.dw, self.db = [t if t.numel() else None for t in grads]
        self.memory = torch.empty((cut.rows, cut.classes), dtype=x.dtype, device=x.device)
        self.sums = torch.empty(
            (cut.rows, x.shape[1]) if cut.sums and self.dx is not None else (0,), dtype=torch.float32, device=x.device
        )

    def groups(self) -> Iterator[slice]:
        rows = self.x.shape[0]
        return (slice(start, min(start + self.plan.rows, rows)) for start in range(0, rows, self.plan.rows))

    def slabs(self) -> list[slice]:
        """Returns the slabs: all of one size, except the first, which has the remainder."""
        classes, wide = self.weight.shape[0], self.plan.classes
        ends = range((classes - 1) % wide + 1, classes + 1, wide)
        return [slice(max(0, end - wide), end) for end in ends]

    def slab(self, slab: slice) -> Slab:
        """Returns a slab as kernels take it."""
        return Slab(slab.stop - slab.start, slab.start, self.weight.shape[0])

    def logits(self, rows: slice, slab: slice) -> torch.Tensor:
        """Returns x W^T + b as cross_entropy's kernels take it: (1, rows, classes)."""
        x, weight = self.x[rows], self.weight[slab]
        out = self.memory.view(-1)[: x.shape[0] * weight.shape[0]].view(x.shape[0], weight.shape[0])
        if self.bias is None:
            torch.mm(x, weight.mT, out=out)
        else:
            torch.addmm(self.bias[slab], x, weight.mT, out=out)
        return out[None]

    def differentiate(self, d: torch.Tensor, rows: slice, slab: slice, more: bool) -> None:
        """Adds these logits' part of the gradients. more: dx already has a part of these rows."""
        if self.dx is not None:
            sums = self.sums[: d.shape[0]] if self.plan.sums else self.dx[rows]
            _add(sums, d, self.weight[slab], more)
        if self.dw is not None:
            _add(self.dw[slab], d.mT, self.x[rows], rows.start > 0)
        if self.db is not None:
            db, first = self.db[slab], rows.start == 0
            part = torch.sum(d, 0, dtype=torch.float32, out=db if first else torch.empty_like(db))
            if not first:
                torch.add(db, part, out=db)

    def finish(self, rows: slice) -> None:
        if self.dx is not None and self.plan.sums:
            self.dx[rows] = self.sums[: rows.stop - rows.start]


def _fwd(
    loss: torch.Tensor, dx: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, saved: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, need: int, memory: int, *options: Any,
) -> None:  # fmt: skip
    """Fills loss, what backward needs of each row and, with need 2, the gradients for dloss = 1."""
    work = _Work(x, weight, bias, memory, (dx, dw, db))
    *slabs, last = work.slabs()

    def each(losses: Any, stats: Any, _d: Any, _x: Any, labels: Labels, counts: Any, *options: Any) -> None:
        rules, need, mean = options
        one = torch.empty((), dtype=torch.float32, device=x.device).fill_(1) if slabs and need == 2 else losses
        own = torch.empty((5 * work.plan.rows if slabs else 0,), dtype=torch.float32, device=x.device)
        for rows in work.groups():
            some = _some(labels, rows)
            kept = stats[2 * rows.start : 2 * rows.stop] if need else own[3 * work.plan.rows :]
            if not slabs:
                logits = work.logits(rows, last)
                _whole(losses[rows], kept, logits, some, counts, *options)
            for slab in (*slabs, last) if slabs else ():
                logits = work.logits(rows, slab)
                ends = {"FIRST": not slab.start, "LAST": slab is last, "NEED": need, "MEAN": mean}
                given = losses[rows], kept, own, logits, some, counts, work.slab(slab), rules
                _rows.launch_rows(_fold, logits, *given, **ends)
            if need == 2:
                work.differentiate(logits[0], rows, last, False)
                number = rules._replace(smoothing=rules.smoothing or 0.0)
                _again(work, rows, slabs, True, (some, one, kept, counts), number, mean)
                work.finish(rows)

    nothing = torch.empty((0,), dtype=x.dtype, device=x.device)
    flat = loss if loss.dim() == 0 else loss.view(-1)
    # One group, which clusters do not take.
    small = not slabs and work.plan.rows >= x.shape[0] and weight.shape[0] <= _cluster.COLUMNS[0]
    _rows.launch_fwd(each, small, flat, nothing, saved, x, target, need, *options)


def _some(labels: Labels, rows: slice) -> Labels:
    """Returns the labels of these rows, all in one plane."""
    return _rows.labels_of(labels.data[:, rows], labels.ignore)


def _whole(
    losses: torch.Tensor,
    kept: torch.Tensor,
    logits: torch.Tensor,
    labels: Labels,
    counts: torch.Tensor,
    rules: Rules,
    need: int,
    mean: bool,
) -> None:
    """Computes rows with all classes by cross_entropy's kernels, in clusters if they take the call."""
    values = [value or 0.0 for value in (rules.smoothing, rules.z, rules.cap)]
    options = labels.ignore, *values, rules.scale or 1.0, "mean" if losses.dtype == torch.float32 else "none"
    refused = why_not(CROSS_ENTROPY.implementations["cuda_cluster"], logits[0], labels.data[0], need, *options)
    rows = _rows.forward_rows if refused else _cluster.rows
    rows(losses, kept, logits, logits, labels, counts, rules, need, mean)


def _again(
    work: _Work, rows: slice, slabs: list[slice], more: bool, facts: tuple[Any, ...], rules: Rules, mean: bool
) -> None:
    """Computes these slabs' logits again, and from them the gradients.

    facts: the rows' labels, their upstream gradient, (1, rows) or one for all rows, their statistics, and the counts.
    """
    labels, upstream, kept, counts = facts
    each = upstream.dim() == 2
    given = labels, Planes(upstream, *(upstream.stride() if each else (0, 0))), kept, counts
    for slab in slabs:
        logits = work.logits(rows, slab)
        facts = *given, work.slab(slab), rules
        _rows.launch_gradient(logits, logits, *facts, made=False, each=each, mean=mean, few=0)
        work.differentiate(logits[0], rows, slab, more or slab is not slabs[0])


def _bwd(
    dx: torch.Tensor,
    dw: torch.Tensor,
    db: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    dloss: torch.Tensor,
    saved: torch.Tensor,
    memory: int,
    ignore: int,
    *options: Any,
) -> None:
    """Computes all logits again, in forward's groups, and from them the gradients."""
    *values, reduction = options
    work, rules = _Work(x, weight, bias, memory, (dx, dw, db)), _rows.rules_of(*values, number=True)
    mean = reduction == "mean"
    counts, stats = _rows.split_saved(saved, target.numel(), reduction)
    labels = _rows.labels_of(target[None], ignore)
    if mean and not counts.numel():  # forward keeps none for few rows
        counts = _rows.launch_count(counts, labels)
    for rows in work.groups():
        upstream = dloss.reshape(1, -1)[:, rows] if reduction == "none" else dloss
        facts = _some(labels, rows), upstream, stats[2 * rows.start : 2 * rows.stop], counts
        _again(work, rows, work.slabs(), False, facts, rules, mean)
        work.finish(rows)


@triton.jit
def _times(x, factor, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, tl.cast(n, tl.int64), tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(x + at, (tl.load(x + at, mask=at < n).to(tl.float32) * factor).to(x.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["nx", "nw", "nb"])
def _scale(dx, dw, db, dloss, nx, nw, nb, BLOCK: tl.constexpr):
    """Multiplies the gradients by dloss, unless it is 1."""
    factor = tl.load(dloss).to(tl.float32)
    if factor != 1:
        _times(dx, factor, nx, BLOCK)
        _times(dw, factor, nw, BLOCK)
        _times(db, factor, nb, BLOCK)


@kernel_op(
    "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, ScalarType dtype, int need, "
    f"bool[] wanted, int memory, {_arguments.SCHEMA}, str? impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, dtype: torch.dtype,
    need: int, wanted: Sequence[bool], memory: int, *options: Any
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns the loss, the wanted gradients (of bias in float32) and what is kept. need: as cross_entropy's."""
    *options, reduction, impl = options
    loss = torch.empty((target.numel(),) if reduction == "none" else (), dtype=dtype, device=x.device)
    outputs = loss, *_gradients(x, weight, bias, [w and need == 2 for w in wanted])
    kept = _rows.kept_counts(target.numel(), reduction) + (2 * target.numel() if need else 0)
    saved = torch.empty((kept,), dtype=torch.float32, device=x.device)
    given = x, weight, bias, target, need, memory, *options, reduction
    run(LINEAR_CROSS_ENTROPY, "fwd", impl, (*outputs, saved), *given)
    return *outputs, saved


@kernel_op(
    "linear_cross_entropy_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor dloss, Tensor saved, "
    f"bool[] wanted, int memory, {_arguments.SCHEMA}, str? impl) -> (Tensor, Tensor, Tensor)"
)
def _backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, dloss: torch.Tensor,
    saved: torch.Tensor, wanted: Sequence[bool], memory: int, *options: Any
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    *options, impl = options
    grads = _gradients(x, weight, bias, wanted)
    run(LINEAR_CROSS_ENTROPY, "bwd", impl, grads, x, weight, bias, target, dloss, saved, memory, *options)
    return grads


@kernel_op("linear_cross_entropy_finish(Tensor(a!) dx, Tensor(b!) dw, Tensor(c!) db, Tensor dloss) -> ()")
def _finish(dx: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, dloss: torch.Tensor) -> None:
    """Turns forward's gradients, for dloss = 1, into those for `dloss`, in place."""
    sizes = dx.numel(), dw.numel(), db.numel()
    launch(_scale, (min(4096, triton.cdiv(max(sizes), 4096)),), dx, dw, db, dloss, *sizes, BLOCK=4096, num_warps=8)


@kernel_op(
    "cross_entropy_part_fwd(Tensor logits, Tensor target, int first, int classes, int ignore_index, "
    "float label_smoothing, float softcap, float logit_scale) -> Tensor"
)
def _part(
    logits: torch.Tensor, target: torch.Tensor, first: int, classes: int, ignore: int, *values: float
) -> torch.Tensor:  # fmt: skip
    """Returns four numbers for each row of the classes `first` on, of `classes` in all, (4, rows), in float32.

    They are the maximum, the sum of exponentials relative to it, the target's logit if it is here, and the mean less
    the maximum (only with label smoothing). logits: (rows, columns), contiguous.
    """
    (rows, columns), (smoothing, cap, scale) = logits.shape, values
    found = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    state = torch.empty((3 * rows,), dtype=torch.float32, device=logits.device)
    given = state, found, state, logits[None], _rows.labels_of(target[None], ignore), state
    rules = _rows.rules_of(smoothing, 0.0, cap, scale)
    ends: dict[str, Any] = {"FIRST": True, "LAST": False, "NEED": 0, "MEAN": False}
    _rows.launch_rows(_fold, logits[None], *given, Slab(columns, first, classes), rules, **ends)
    base, chosen, away = state.view(3, rows)
    found[2] = chosen
    found[3] = away / columns + (base - found[0]) if smoothing else 0.0
    return found


@kernel_op(
    "cross_entropy_part_bwd(Tensor(a!) d, Tensor logits, Tensor target, Tensor dloss, Tensor stats, int first, "
    "int classes, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale) -> ()"
)
def _part_gradient(
    d: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, stats: torch.Tensor, first: int,
    classes: int, ignore: int, *values: float
) -> None:  # fmt: skip
    """Fills d, which may be the logits, with the gradient of these classes.

    dloss: (rows,); stats: (2, rows), every row's maximum and sum over all classes.
    """
    each = dloss[None]
    given = _rows.labels_of(target[None], ignore), Planes(each, *each.stride()), stats, stats
    slab, rules = Slab(logits.shape[1], first, classes), _rows.rules_of(*values, number=True)
    _rows.launch_gradient(d[None], logits[None], *given, slab, rules, made=False, each=True, mean=False, few=0)


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Allocates the wanted gradients; the others have no elements."""
    new = torch.empty if x.shape[0] else torch.zeros  # without rows nothing is added
    dx, dw = (
        new(t.shape if w else (0,), dtype=t.dtype, device=t.device) for t, w in zip((x, weight), wanted, strict=False)
    )
    return dx, dw, new(bias.shape if bias is not None and wanted[2] else (0,), dtype=torch.float32, device=x.device)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, target: torch.Tensor, facts: tuple[Any, ...]
    ) -> torch.Tensor:
        """facts: the dtype, the memory and the options, in one argument, since torch inspects each argument."""
        dtype, memory, *options = facts
        need = 1 if options[-2] == "none" or x.dtype == torch.float16 else 2
        some = ctx.needs_input_grad
        wanted = some[0], some[1], some[2]
        hooks = packed() if need == 2 else None
        now = 1 if hooks == "recomputed" else need
        loss, *made, saved = _forward(x, weight, bias, target, dtype, now, wanted, memory, *options)
        ctx.facts = wanted, memory, options
        ctx.made = tuple(made) if need == 2 and hooks is None else None
        ctx.fresh = need == 2
        if hooks is None:
            ctx.save_for_backward(x, weight, bias, target, saved)
        else:  # hooks see only what is saved so; where they drop it, placeholders will do
            if hooks == "recomputed":
                shapes = [t.shape if w else (0,) for t, w in zip((x, weight, bias), wanted, strict=True)]
                made = [m.new_empty(()).expand(s) for m, s in zip(made, shapes, strict=True)]
            ctx.save_for_backward(x, weight, bias, target, saved, *made)
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        x, weight, bias, target, saved, *hooked = ctx.saved_tensors
        wanted, memory, options = ctx.facts
        made, fresh = hooked or ctx.made, ctx.fresh
        ctx.made, ctx.fresh = None, False  # given away once, as the caller's own; a second backward computes others
        if not fresh:
            made = _backward(x, weight, bias, target, dloss, saved, wanted, memory, *options)
        elif torch.compiler.is_compiling():
            made = [m * dloss for m in made]
        else:
            _finish(*made, dloss)
        dx, dw, db = [m if w else None for m, w in zip(made, wanted, strict=True)]
        return dx, dw, db if bias is None or db is None else db.to(bias.dtype), None, None


def reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    chunk_memory: int | None = None, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:  # fmt: skip
    dtype = torch.promote_types(x.dtype, torch.float32) if dtype is None else dtype
    return cross_entropy.reference(F.linear(x, weight, bias), target, dtype=dtype, **options)


def _torch(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:  # fmt: skip
    dtype = torch.promote_types(x.dtype, torch.float32) if dtype is None else dtype
    return cross_entropy.by_torch(F.linear(x, weight, bias), target, dtype=dtype, **options)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """Casts as autocast does; anything else passes unchanged, and is refused later."""
    return t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t


def _fault(x: Any, weight: Any, target: Any, bias: Any, chunk_memory: Any) -> str | None:
    """Returns what is wrong with x, weight, bias or chunk_memory, or None."""
    for name, t in (("x", x), ("weight", weight), *([("bias", bias)] if bias is not None else [])):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
        if t.is_nested:
            dense_only("linear_cross_entropy", (t,))
        if not t.is_floating_point() or t.element_size() < 2:
            return f"{name} must be floating point (float32, float16, bfloat16), got {t.dtype}"
        if t.dtype != x.dtype or t.device != x.device:
            given = f"{t.dtype} on {t.device} and {x.dtype} on {x.device}"
            return f"{name} and x must agree in dtype and device, got {given}"
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return f"x must be (..., H) and weight (V, H), got {tuple(x.shape)} and {tuple(weight.shape)}"
    if not weight.shape[0]:
        return f"weight must have at least one class, got {tuple(weight.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}"
    if chunk_memory is not None and (type(chunk_memory) is not int or not 0 < chunk_memory < 1 << 63):
        return f"chunk_memory must be None or a number of bytes above 0, got {chunk_memory!r}"
    return None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, reduction: str = "mean", chunk_memory: int | None = None,
    dtype: torch.dtype | None = None, impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns `cross_entropy(x @ weight.T + bias, target)` without all logits in memory.

    Gradients flow to x, weight and bias.

    x: (..., H); weight: (V, H); bias: (V,) or None; of one dtype, float32, float16 or bfloat16. target: (...), int64.
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction: as in `cross_entropy`.
    chunk_memory: bytes of logits in memory at a time. The default is a fourth of all, or 216 MiB if that is at least a
    fifth. With less, some logits are computed twice, for up to a third more products per step. At least 128 classes of
    a fourth of the rows are held and, below a sixteenth of the logits, the float32 gradient of x for these rows.
    Another 40 bytes per row are needed besides.
    dtype: the loss's. None means float32 (float64 for float64 tensors): a loss in half precision has two digits.
    Autocast casts x, weight and bias as for `linear`.

    For "mean" and "sum", forward computes the gradients, so that a step has three products. For "none", and in float16,
    whose gradients need the scale of the loss, backward computes the logits again.
    Products are torch's, summed in float32. If cuBLAS splits a sum, it may add the parts in half precision, unless
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction (or allow_fp16_...) is False. The gradients of
    weight and of x are each rounded at most four times, and once more if dloss is no power of two.
    Raises RidgelineError if shapes, dtypes, devices or options do not match the above or `impl` cannot run the call.
    """
    kind = "cuda" if isinstance(x, torch.Tensor) and x.is_cuda else "cpu"
    if torch.is_autocast_enabled(kind):
        x, weight, bias = (_cast(t, torch.get_autocast_dtype(kind)) for t in (x, weight, bias))
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction
    plain, *facts = _look(x, weight, target, bias, *options, chunk_memory, dtype, impl)
    if plain is not None:
        named = dict(zip(_arguments.OPTIONS, options, strict=True))
        return plain.call(x, weight, target, bias, dtype=facts[0], **named)
    if x.dim() == 2:
        return _call(x, weight, bias, target, *facts, impl)
    loss = _call(x.reshape(target.numel(), x.shape[-1]), weight, bias, target.reshape(-1), *facts, impl)
    return loss.view(target.shape) if reduction == "none" else loss


@by_kind(4, optional=1)
def _look(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float, reduction: str,
    chunk_memory: int | None, dtype: torch.dtype | None, impl: str | None
) -> tuple[Any, ...]:  # fmt: skip
    """Checks a call and chooses. Returns too the loss's dtype, the memory and the options as the launchers take them"""
    fault = _fault(x, weight, target, bias, chunk_memory)
    if fault is None:
        logits = torch.empty((), dtype=x.dtype, device=x.device).expand(*x.shape[:-1], weight.shape[0])
        values = ignore_index, label_smoothing, z_loss, softcap, logit_scale
        fault = _arguments.fault(logits, target, *values, reduction, dtype)
    if fault:
        raise RidgelineError(f"linear_cross_entropy: {fault}")
    dtype = torch.promote_types(x.dtype, torch.float32) if dtype is None else dtype
    plain = eager(LINEAR_CROSS_ENTROPY, impl, x, weight, bias)
    _arguments.check_classes("linear_cross_entropy", target, weight.shape[0], ignore_index)
    facts = float(label_smoothing), float(z_loss), float(softcap or 0), float(logit_scale)
    return plain, dtype, chunk_memory or 0, ignore_index, *facts, reduction


def _call(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, *facts: Any
) -> torch.Tensor:
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return differentiate(_LinearCrossEntropy, x, weight, bias, target, facts)
    dtype, memory, *options = facts
    return _forward(x, weight, bias, target, dtype, 0, (False,) * 3, memory, *options)[0]


def cost(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    reduction: str = "mean", **_: Any
) -> tuple[Cost, Cost | None, Cost | None]:  # fmt: skip
    """Returns the costs: one product forward, three in a step, no logits in memory.

    reduction="none" counts no fourth product, since torch, which keeps all logits, needs none.
    """
    given = nbytes(x, weight, target) + (0 if bias is None else nbytes(bias))
    losses, product = (target.numel() if reduction == "none" else 1) * x.element_size(), 2 * x.numel() * weight.shape[0]
    grads = nbytes(x, weight) + (0 if bias is None else nbytes(bias))
    return Cost(given, losses, product), Cost(given, grads, 2 * product), Cost(given, losses + grads, 3 * product)


def _labels(*shape: int, high: int, some: type[Spec] = Spec) -> Spec:
    return some(*shape, dtype="int64", high=high)


OWN = {"dtype": OwnDtype()}
ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}
LARGE: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("8192x4096x128256", 8192, 4096, 128256, {}),
    ("8192x4096x128256 in 1.25 GiB", 8192, 4096, 128256, {"chunk_memory": 208 << 20}),  # plus 1.04 GiB of gradients
    ("8192x4096x128256 none", 8192, 4096, 128256, {"reduction": "none"}),
    ("16384x2048x32000", 16384, 2048, 32000, {}),
]
# With all options a mean of so few rows is not tested: the formula itself fails the tolerance check about once in ten
# random draws. A loss per row passed in each of 60.
NONE = {"reduction": "none"} | ALL
LINEAR_CROSS_ENTROPY = Op(
    linear_cross_entropy,
    reference=reference,
    cost=cost,
    sharding=lambda reduction="mean", **_: (
        f"x ...H, weight VH, target ..., bias V -> {'...' if reduction == 'none' else ''}"
    ),
    flops={
        "linear_cross_entropy_fwd": lambda x, weight, bias, target, dtype, need, *_: (
            (6 if need == 2 else 2) * x.numel() * weight.shape[0]
        ),
        # The logits are computed again.
        "linear_cross_entropy_bwd": lambda x, weight, *_: 6 * x.numel() * weight.shape[0],
        "linear_cross_entropy_finish": lambda *_: 0,
        "cross_entropy_part_fwd": lambda logits, *_: 5 * logits.numel(),
        "cross_entropy_part_bwd": lambda d, logits, *_: 5 * logits.numel(),
    },
    cases=[
        Case("33x16x129", (Spec(33, 16), Spec(129, 16), _labels(33, high=129))),
        Case("33x16x129 own dtype", (Spec(33, 16), Spec(129, 16), _labels(33, high=129)), OWN),
        Case(
            "2x9x24x300 none, bias, all",
            (Spec(2, 9, 24), Spec(300, 24), _labels(2, 9, high=300, some=Ignored), Spec(300)),
            NONE,
        ),
        Case(
            "40x16x100 sum, groups",
            (Spec(40, 16), Spec(100, 16), _labels(40, high=100)),
            {"reduction": "sum", "chunk_memory": 4400},
        ),
        Case(
            "33x16x400 none, bias, slabs, all",  # float32: groups of 9 rows, slabs of 16 and 3 x 128 classes
            (Spec(33, 16), Spec(400, 16), _labels(33, high=400, some=Ignored), Spec(400)),
            {"chunk_memory": 4608} | NONE,
        ),
        Case(
            "33x16x400 bias, slabs",
            (Spec(33, 16), Spec(400, 16), _labels(33, high=400, some=Ignored), Spec(400)),
            {"chunk_memory": 2304},
            ("float16", "bfloat16"),  # the last bit of a float32 mean varies
        ),
        Case(
            "33x16x400 none, slabs, scale",
            (Spec(33, 16), Spec(400, 16), _labels(33, high=400)),
            {"logit_scale": 0.3, "softcap": 3.0, "reduction": "none", "chunk_memory": 4608},
        ),
        Case("33x16x129 scale", (Spec(33, 16), Spec(129, 16), _labels(33, high=129)), {"logit_scale": 0.0625}),
        Case("33x16x900 slabs, sums", (Spec(33, 16), Spec(900, 16), _labels(33, high=900)), {"chunk_memory": 5184}),
        Case(
            "30x16x300 none",
            (Spec(30, 16), Spec(300, 16), _labels(30, high=300)),
            {"reduction": "none", "chunk_memory": 6144},
        ),
        *(
            # The loss is in bfloat16, as the peers' is.
            Case(name, (Spec(m, h), Spec(v, h), _labels(m, high=v)), options | OWN, ("bfloat16",), "bench")
            for name, m, h, v, options in LARGE
        ),
        Case("256x128x4096", (Spec(256, 128), Spec(4096, 128), _labels(256, high=4096)), use="quick"),
    ],
)
LINEAR_CROSS_ENTROPY.eager("naive", "the layer, then cross_entropy's formula, in eager PyTorch", reference)
LINEAR_CROSS_ENTROPY.eager(
    "torch", "PyTorch's own layer and loss: logits and their gradient in memory", _torch, served=True
)
LINEAR_CROSS_ENTROPY.compiled("torch.compile of layer and loss: fuses the loss, but keeps the logits in memory")
LINEAR_CROSS_ENTROPY.kernel(
    "triton",
    "chunks of rows: cuBLAS products; cross_entropy's kernels turn logits into their gradient in place",
    kind="triton",
    fwd=_fwd,
    bwd=_bwd,
    served=True,
)
