"""Losses over a vocabulary that is split over the ranks of a group: one all-gather of four numbers a row.

    of its own classes a rank knows, for each row:  m = max x,  l = sum exp(x - m),  x_t if the target is here, mean x
    top = max m,  total = sum l exp(m - top),  lse = top + log total
    loss = lse - (1 - s) x_t - s mean(x) + z lse^2

Every rank then has the loss, and makes the gradient of its own classes as one device does. Label smoothing's mean is
that of all classes. `linear_cross_entropy` sums dx over the ranks while dW is made.
Source: Shoeybi et al., Megatron-LM, 2019 (arXiv:1909.08053), which takes three all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED, Function, differentiate, first_order
from ridgeline.op import RidgelineError, get, readable
from ridgeline.parallel import groups
from ridgeline.parallel.agreement import agree

MEMORY = 256 << 20  # bytes of a rank's logits at a time, or a fourth of them if that is more


class Rules(NamedTuple):
    """The options of the loss, and the classes of this rank."""

    group: Any
    first: int
    classes: int
    ignore: int
    smoothing: float
    z: float
    cap: float
    scale: float


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, group: Any = None, classes: int | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, reduction: str = "mean", dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `ridgeline.cross_entropy` of logits whose classes are split over a group's ranks, on every rank.

    logits: (..., V / ranks), this rank's classes; gradients flow to them. target: (...), int64, in all classes, the
    same on every rank. group: None means all ranks.
    classes: V; None means that ranks have equally many. Rank r has the classes from r ceil(V / ranks) on, as a DTensor
    with Shard has, so the last rank may have fewer.
    The other options are as in `ridgeline.cross_entropy`. Backward moves nothing.
    Raises RidgelineError, on every rank, if the arguments do not match the above or each other. On a GPU the ranks
    compare their calls, and validate targets, only with RIDGELINE_CHECK=1.
    """
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, dtype
    rows = logits.shape[:-1] if isinstance(logits, torch.Tensor) and logits.dim() else ()
    width = logits.shape[-1] if isinstance(logits, torch.Tensor) and logits.dim() else 0
    wrong = _fault(logits, target, rows, width, group, classes, *options)
    rules = _rules("cross_entropy", logits, target, width, wrong, group, classes, options)
    flat = logits.reshape(-1, width)
    losses = differentiate(
        _CrossEntropy, flat if flat.is_contiguous() else flat.contiguous(), target.reshape(-1), rules
    )
    return _reduced(losses, target, ignore_index, reduction, _dtype(logits, dtype))


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    group: Any = None, classes: int | None = None, split_rows: bool = False, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    reduction: str = "mean", chunk_memory: int | None = None, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `ridgeline.linear_cross_entropy` of a weight whose rows are split over a group's ranks, on every rank.

    x: (..., H), the same on every rank; weight: (V / ranks, H) and bias (V / ranks,), this rank's classes, as in
    `cross_entropy` above; target: (...), int64. Gradients flow to x, weight and bias; x's is summed over the ranks, in
    float32, while the weight's is made.
    split_rows: x is this rank's share of the rows, (rows / ranks, H), and target that of all, (rows,), rank after rank:
    rows are gathered, and x's gradient is scattered to the ranks as it is summed (sequence parallelism).
    chunk_memory: bytes of this rank's logits at a time; by default 256 MiB, or a fourth of them if that is more. The
    last chunk's logits are kept; backward computes the others again.
    The other options are as in `ridgeline.cross_entropy`; the loss is in float32 by default.
    Raises RidgelineError, on every rank, if the arguments do not match the above or each other.
    """
    if isinstance(x, torch.Tensor) and torch.is_autocast_enabled(x.device.type):
        own = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = (t if t is None or t.dtype == torch.float64 else t.to(own) for t in (x, weight, bias))  # type: ignore[assignment]
    options = ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, dtype
    wrong = _linear_fault(x, weight, bias, target, group, split_rows, chunk_memory)
    width = 0 if wrong else weight.shape[0]
    if not wrong:
        rows = target.shape if split_rows else x.shape[:-1]
        wrong = _fault(x, target, rows, width, group, classes, *options)
    more = tuple(x.shape) if isinstance(x, torch.Tensor) else None, split_rows, chunk_memory
    rules = _rules("linear_cross_entropy", x, target, width, wrong, group, classes, options, more)
    facts = rules, groups.size(group) if split_rows else 1, chunk_memory
    flat = x.reshape(-1, x.shape[-1])
    losses = differentiate(_LinearCrossEntropy, flat.contiguous(), weight, bias, target.reshape(-1), facts)
    return _reduced(losses, target, ignore_index, reduction, _dtype(losses, dtype))


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, rules: Rules) -> torch.Tensor:
        losses, stats = _combined(_part(logits, target, rules), target, logits.shape[1], rules)
        ctx.save_for_backward(logits, target, stats)
        ctx.rules = rules
        return losses

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        logits, target, stats = ctx.saved_tensors
        d = torch.empty_like(logits)
        _gradient(d, logits, target, dloss.contiguous(), stats, ctx.rules)
        return d, None, None


class _LinearCrossEntropy(Function):
    """x is (rows, H); with several sources, x holds one source's rows and all are gathered."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, facts: Any
    ) -> torch.Tensor:
        rules, sources, memory = facts
        if sources > 1:
            whole = x.new_empty((sources * x.numel(),))
            groups.all_gather(whole, x.view(-1), group=rules.group)
            x = whole.view(-1, x.shape[1])
        chunks = _Chunks(x, target, sources, widest(rules), memory)
        parts, logits = [], x.new_empty((0, weight.shape[0]))
        for chunk in chunks:
            logits = _logits(chunks.rows(x, chunk), weight, bias)
            parts.append(_part(logits, chunks.rows(target, chunk), rules).unflatten(1, (sources, -1)))
        part = torch.cat(parts, 2).flatten(1) if parts else x.new_empty((4, 0), dtype=torch.float32)
        losses, stats = _combined(part, target, weight.shape[0], rules)
        needed = any(ctx.needs_input_grad)
        ctx.save_for_backward(x, weight, bias, target, stats, logits if needed else None)
        ctx.facts = facts
        return losses

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        x, weight, bias, target, stats, kept = ctx.saved_tensors
        rules, sources, memory = ctx.facts
        chunks = _Chunks(x, target, sources, widest(rules), memory)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = weight.dtype if len(chunks) <= 4 else wide  # a sum in half precision is rounded at most four times
        dw = torch.zeros(weight.shape, dtype=sums, device=x.device) if wants_weight else None
        db = torch.zeros(weight.shape[:1], dtype=wide, device=x.device) if wants_bias else None
        arriving: list[tuple[torch.Tensor, Any]] = []
        for chunk in chunks:
            rows, labels, slopes = [chunks.rows(t, chunk) for t in (x, target, dloss)]
            last = chunk.stop == chunks.height
            d = kept.clone() if last else _logits(rows, weight, bias)
            some = chunks.rows(stats[0], chunk), chunks.rows(stats[1], chunk)
            _gradient(d, d, labels, slopes, torch.stack(some), rules)
            if wants_x:
                arriving.append(_summed(_product(d, weight, wide), sources, rules.group))
            if dw is not None:
                dw.addmm_(d.to(sums).mT, rows.to(sums))
            if db is not None:
                db += d.sum(0, dtype=wide)
        dx = chunks.joined(arriving).to(x.dtype) if wants_x else None
        dw, db = [g if g is None else g.to(weight.dtype) for g in (dw, db)]
        return dx, dw, db, None, None


def widest(rules: Rules) -> int:
    """Returns the most classes of a rank: all ranks must cut rows alike."""
    return -(-rules.classes // groups.size(rules.group))


class _Chunks:
    """A call's rows in chunks; with several sources, a chunk has the same rows of each."""

    def __init__(self, x: torch.Tensor, target: torch.Tensor, sources: int, classes: int, memory: int | None) -> None:
        row, count = classes * x.element_size(), target.numel()
        self.sources, self.height = sources, count // sources
        wanted = memory or max(MEMORY, -(-count // 4) * row)
        self.size = max(1, wanted // (row * sources))
        self.like = x

    def __len__(self) -> int:
        return -(-self.height // self.size)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.height, self.size):
            yield slice(start, min(start + self.size, self.height))

    def rows(self, t: torch.Tensor, chunk: slice) -> torch.Tensor:
        """Returns a chunk of t (rows, ...), contiguous."""
        return t.unflatten(0, (self.sources, self.height))[:, chunk].flatten(0, 1).contiguous()

    def joined(self, arriving: list[tuple[torch.Tensor, Any]]) -> torch.Tensor:
        """Waits for the chunks of dx, and returns them together."""
        for _, work in arriving:
            if work is not None:
                work.wait()
        parts = [t for t, _ in arriving]
        return torch.cat(parts) if parts else torch.zeros_like(self.like)


def _summed(part: torch.Tensor, sources: int, group: Any) -> tuple[torch.Tensor, Any]:
    """Starts to sum a part of dx over the ranks: to all of them, or with several sources to each its rows."""
    if groups.size(group) == 1:
        return part, None
    if sources == 1:
        return part, dist.all_reduce(part, group=group, async_op=True)
    out = part.new_empty((part.shape[0] // sources, part.shape[1]))
    return out, groups.reduce_scatter(out.view(-1), part.view(-1), group=group, async_op=True)


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _product(d: torch.Tensor, weight: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Returns d W, summed and kept in float32."""
    if d.dtype == wide or not d.is_cuda:
        return d.to(wide) @ weight.to(wide)
    return torch.mm(d, weight, out_dtype=wide)


# --- a rank's own classes


def _by_kernels(logits: torch.Tensor) -> bool:
    there = logits.is_cuda or INTERPRETED or devices.stand_in is not None
    return there and logits.dtype in get("linear_cross_entropy").kernel_dtypes


def _bent(logits: torch.Tensor, rules: Rules) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns scaled and capped logits in float32 (or float64), and the cap's slope."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) * rules.scale
    if not rules.cap:
        return x, 1.0
    bent = torch.tanh(x / rules.cap)
    return bent * rules.cap, 1 - bent * bent


def _part(logits: torch.Tensor, target: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Returns (4, rows): maximum, sum of exponentials, the target's logit if it is here, the mean less the maximum."""
    if _by_kernels(logits):
        options = rules.ignore, rules.smoothing, rules.cap, rules.scale
        return torch.ops.ridgeline.cross_entropy_part_fwd(logits, target, rules.first, rules.classes, *options)
    x, _ = _bent(logits, rules)
    top = x.amax(1)
    total = (x - top.masked_fill(top == -torch.inf, 0)[:, None]).exp().sum(1)
    at = (target - rules.first).clamp(0, logits.shape[1] - 1)
    return torch.stack([top, total, x.gather(1, at[:, None])[:, 0], x.mean(1) - top])


def _gradient(
    d: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, stats: torch.Tensor, rules: Rules
) -> None:
    """Fills d, which may be the logits, with the gradient of this rank's classes."""
    if _by_kernels(logits):
        options = rules.first, rules.classes, rules.ignore, rules.smoothing, rules.z, rules.cap, rules.scale
        torch.ops.ridgeline.cross_entropy_part_bwd(d, logits, target, dloss.float(), stats, *options)
        return
    (top, total), (x, slope) = stats, _bent(logits, rules)
    live, known = target != rules.ignore, (target >= 0) & (target < rules.classes)
    p = (x - top[:, None]).exp() / total[:, None]
    if rules.z:
        p = p * (1 + 2 * rules.z * (top + total.log()))[:, None]
    hit = (torch.arange(rules.first, rules.first + x.shape[1], device=x.device) == target[:, None]).to(x.dtype)
    made = (p - rules.smoothing / rules.classes - (1 - rules.smoothing) * hit) * slope * rules.scale
    made = torch.where(live[:, None], made * dloss.masked_fill(~known, torch.nan)[:, None].to(x.dtype), 0)
    d.copy_(made)


def _combined(
    part: torch.Tensor, target: torch.Tensor, columns: int, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's loss, and its maximum and sum of exponentials over all classes, (2, rows)."""
    world = groups.size(rules.group)
    found = part.new_empty((world, *part.shape))
    if world == 1:
        found[0] = part
    else:
        groups.all_gather(found.view(-1), part.contiguous().view(-1), group=rules.group)
    tops, totals, chosen, means = found.unbind(1)
    live, known = target != rules.ignore, (target >= 0) & (target < rules.classes)
    top = tops.amax(0)
    near = top.masked_fill(top == -torch.inf, 0)
    total = (totals * (tops - near).exp()).sum(0)
    wide = widest(rules)
    owner = (target.where(known, 0) // wide).clamp(max=world - 1)
    loss = total.log() + (top - chosen.gather(0, owner[None])[0])
    if rules.smoothing:
        sizes = [max(0, min(wide, rules.classes - rank * wide)) for rank in range(world)]
        shares = torch.tensor(sizes, dtype=part.dtype, device=part.device) / rules.classes
        mean = ((means + (tops - near)) * shares[:, None]).sum(0)  # less the maximum of all
        loss = (1 - rules.smoothing) * loss + rules.smoothing * (total.log() - mean)
    if rules.z:
        loss = loss + rules.z * (near + total.log()).square()
    loss = loss.masked_fill(~known, torch.nan).masked_fill(~live, 0)
    return loss, torch.stack([near.masked_fill(~live, 0), total.masked_fill(~live, 1)])


def _reduced(
    losses: torch.Tensor, target: torch.Tensor, ignore: int, reduction: str, dtype: torch.dtype
) -> torch.Tensor:
    if reduction == "none":
        return losses.view(target.shape).to(dtype)
    loss = losses.sum()
    return (loss / (target != ignore).sum() if reduction == "mean" else loss).to(dtype)


# --- what may be wrong with a call


def _dtype(logits: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype


def _rules(
    name: str, x: Any, target: Any, width: int, wrong: str | None, group: Any, classes: int | None,
    options: tuple[Any, ...], more: tuple[Any, ...] = (),
) -> Rules:  # fmt: skip
    """Returns the options, once every rank has found its call right."""
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"{name}: {wrong}")
    world = groups.size(group)
    ignore, smoothing, z, cap, scale, _reduction, _ = options
    whole = width * world if classes is None else classes
    if not wrong and readable(target):
        bad = target[(target != ignore) & ((target < 0) | (target >= whole))]
        wrong = f"targets must be 0 to {whole - 1} or ignore_index {ignore}, got {bad[0]}" if bad.numel() else None
    alike: dict[str, Any] = {"options": tuple(str(o) for o in options), "shapes": more}
    if classes is None:
        alike["number of classes on a rank (else give classes)"] = width
    if isinstance(target, torch.Tensor):
        alike["shape of target"] = tuple(target.shape)
        if not wrong and readable(target):
            alike["target"] = hash(tuple(target.reshape(-1).tolist()))
    agree(name, group, x, wrong, dtype=str(x.dtype), **alike)
    first = groups.rank(group) * -(-whole // world)
    return Rules(group, first, whole, ignore, float(smoothing), float(z), float(cap or 0), float(scale))


def _fault(
    x: Any, target: Any, rows: tuple[int, ...], width: int, group: Any, classes: Any, ignore: Any, smoothing: Any,
    z: Any, cap: Any, scale: Any, reduction: Any, dtype: Any,
) -> str | None:  # fmt: skip
    """Returns what is wrong with a rank's call, or None."""
    for name, t in (("the input", x), ("target", target)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
    if not x.is_floating_point() or not width:
        return f"the input must be floating point with at least one class on each rank, got {x.dtype} {tuple(x.shape)}"
    if target.dtype != torch.int64 or target.device != x.device or target.shape != torch.Size(rows):
        given = f"{target.dtype} {tuple(target.shape)} on {target.device}"
        return f"target must be int64 {tuple(rows)} on {x.device}, got {given}"
    if classes is not None:
        world, rank = groups.size(group), groups.rank(group)
        own = max(0, min(-(-classes // world), classes - rank * -(-classes // world)))
        if own != width:
            return f"of {classes} classes rank {rank} of {world} has {own}, but its input has {width}"
    if not isinstance(ignore, int) or reduction not in ("none", "mean", "sum"):
        return f'ignore_index must be an int, reduction "none", "mean" or "sum", got {ignore!r} and {reduction!r}'
    for name, value, low, high in (("label_smoothing", smoothing, 0, 1), ("z_loss", z, 0, 1e30)):
        if not isinstance(value, int | float) or not low <= value <= high:
            return f"{name} must be a number from {low} {'to 1' if high == 1 else 'on'}, got {value!r}"
    for name, value in (("softcap", 1.0 if cap is None else cap), ("logit_scale", scale)):
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            return f"{name} must be a finite number above 0, got {value!r}"
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return f"dtype must be None or a floating-point dtype, got {dtype!r}"
    return None


def _linear_fault(x: Any, weight: Any, bias: Any, target: Any, group: Any, split_rows: Any, memory: Any) -> str | None:
    given = {"x": x, "weight": weight, "target": target} | ({} if bias is None else {"bias": bias})
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or weight.dtype != x.dtype:
        return (
            f"x must be (..., H) and weight (V / ranks, H) of one dtype, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        return f"bias must be ({weight.shape[0]},) in {x.dtype}, got {tuple(bias.shape)} in {bias.dtype}"
    if split_rows and (x.dim() != 2 or target.shape != (groups.size(group) * x.shape[0],)):
        shapes = f"{tuple(x.shape)} and {tuple(target.shape)}"
        return f"with split_rows x must be (rows / ranks, H) and target (rows,), got {shapes}"
    if memory is not None and (type(memory) is not int or memory < 1):
        return f"chunk_memory must be None or a number of bytes above 0, got {memory!r}"
    return None
