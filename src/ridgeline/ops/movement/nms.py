"""nms: non-maximum suppression of boxes. By falling score, a box stays unless one that stayed before overlaps it.

    overlap(a, b) = area of a and b / (area of a + area of b - area of a and b) > threshold

All pairs are compared in parallel, one bit each. A chain of programs then keeps boxes, 256 a program, and writes
the kept indices; the host reads nothing, so a CUDA graph can hold a call. The floor is the pairs: 14 operations each.
Source: Girshick et al., Rich feature hierarchies, 2014 (arXiv:1311.2524); the rule and the order are torchvision's.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dense_only, nbytes
from ridgeline.ops.movement._nms import start, too_many
from ridgeline.ops.movement.radix_sort import radix_sort
from ridgeline.select import eager, run


@kernel_op("nms_fwd(Tensor boxes, Tensor order, Tensor? classes, float threshold, str? impl) -> (Tensor, Tensor)")
def _forward(
    boxes: torch.Tensor, order: torch.Tensor, classes: torch.Tensor | None, threshold: float, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.empty(boxes.shape[:1], dtype=torch.int64, device=boxes.device)
    found = torch.empty((), dtype=torch.int64, device=boxes.device)
    if not boxes.shape[0]:
        return kept, found.zero_()
    run(NMS, "fwd", impl, (kept, found), boxes, order, classes, threshold)
    return kept, found


def reference(
    boxes: torch.Tensor, scores: torch.Tensor, threshold: float, *, classes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    order = scores.sort(stable=True, descending=True).indices
    left, top, right, bottom = boxes.detach()[order].float().unbind(1)  # the rule is of float32, also for an oracle
    area = (right - left) * (bottom - top)
    wide = (torch.minimum(right[:, None], right) - torch.maximum(left[:, None], left)).clamp(min=0)
    common = (torch.minimum(bottom[:, None], bottom) - torch.maximum(top[:, None], top)).clamp(min=0) * wide
    over = (common / (area[:, None] + area - common) > threshold).triu(1)
    if classes is not None:
        over &= classes[order][:, None] == classes[order]
    keep, before = torch.ones_like(order, dtype=torch.bool), None
    while before is None or not torch.equal(keep, before):  # each round is right for one box more of every chain
        keep, before = ~(over & keep[:, None]).any(0), keep
    return torch.where(torch.arange(len(order), device=order.device) < keep.sum(), _first(order, keep), -1), keep.sum()


def _first(order: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The order, with what is kept before all else."""
    return order[(~keep).to(torch.int8).sort(stable=True).indices]


def nms(
    boxes: torch.Tensor, scores: torch.Tensor, threshold: float, *, classes: torch.Tensor | None = None,
    impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The boxes that non-maximum suppression keeps, as `torchvision.ops.nms`, or with classes as `batched_nms`.

    By falling score, equal ones in their order, a box is kept unless its overlap (intersection over union) with a kept
    box, of its own class if there are classes, is above the threshold.
    boxes: (N, 4), floating point: left, top, right, bottom; N at most 262144 on a GPU. scores: (N,), floating point.
    threshold: a number. classes: (N,), int64 or int32. Overlaps are computed in float32, whatever the dtype.
    Returns (kept, count). kept: (N,), int64, the kept boxes' indices by falling score, then -1. count: (), int64, how
    many there are. A tensor of just that length would make the host wait: take `kept[:count]` where waiting does not
    matter, else treat -1 as no box. There are no gradients. On a GPU it needs 12.5 MB for 10,000 boxes, a bit a pair.
    Raises RidgelineError if shapes, dtypes, devices or the threshold do not match the above, or if `impl` cannot run
    the call.
    """
    _check(boxes, scores, threshold, classes)
    plain = eager(NMS, impl, boxes)
    if plain is not None and plain.call is not None:
        return plain.call(boxes, scores, float(threshold), classes=classes)
    order = radix_sort(scores, descending=True)[1]
    return _forward(boxes.detach(), order, classes, float(threshold), impl)


def _check(boxes: Any, scores: Any, threshold: Any, classes: Any) -> None:
    for name, t in (("boxes", boxes), ("scores", scores), ("classes", classes)):
        if t is None and name == "classes":
            continue
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"nms: {name} must be a tensor, but is {type(t).__name__}")
        shape = (*boxes.shape[:1], 4) if name == "boxes" else boxes.shape[:1]
        if t.shape != shape or (name == "boxes" and t.dim() != 2):
            wanted = "(N, 4)" if name == "boxes" else f"({boxes.shape[0]},), as there are boxes"
            raise RidgelineError(f"nms: {name} must have shape {wanted}, but has {tuple(t.shape)}")
        if name == "classes":
            if t.dtype not in (torch.int64, torch.int32):
                raise RidgelineError(f"nms: classes must be int64 or int32, but are {str(t.dtype)[6:]}")
        elif not t.is_floating_point():
            raise RidgelineError(f"nms: {name} must be floating point, but are {str(t.dtype)[6:]}")
        if t.device != boxes.device:
            raise RidgelineError(f"nms: {name} are on {t.device}, but boxes on {boxes.device}")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or threshold != threshold:
        raise RidgelineError(f"nms: threshold must be a number, but is {threshold!r}")
    dense_only("nms", [boxes, scores, classes])


def cost(
    boxes: torch.Tensor, scores: torch.Tensor, threshold: float, *, classes: torch.Tensor | None = None
) -> tuple[Cost, None]:
    given = nbytes(boxes, scores, *([] if classes is None else [classes]))
    return Cost(given, 8 * boxes.shape[0] + 8, 7 * boxes.shape[0] * max(0, boxes.shape[0] - 1)), None


class Boxes(Spec):
    """Boxes with sides of 10 to 110 in a square; `high` is its side."""

    def make(self, dtype: torch.dtype, device: Any, generator: torch.Generator | None) -> torch.Tensor:
        if torch.device(device).type == "meta":
            return torch.empty(self.shape, dtype=dtype, device=device)
        made = torch.rand((*self.shape[:-1], 4), dtype=torch.float32, device=device, generator=generator)
        corner = made[..., :2] * self.high
        return torch.cat([corner, corner + 10 + 100 * made[..., 2:]], -1).to(dtype)


def _case(n: int, high: int, threshold: float = 0.5, classes: int = 0, **facts: Any) -> Case:
    kinds = {"classes": Spec(n, dtype="int64", high=classes)} if classes else {}
    name = f"{n} boxes, {threshold}{f', {classes} classes' if classes else ''}"
    return Case(name, (Boxes(n, 4, high=high), Spec(n, grad=False), threshold), kinds, **facts)


NMS = Op(
    nms,
    reference=reference,
    cost=cost,
    flops={"nms_fwd": lambda boxes, *_: 7 * boxes.shape[0] * max(0, boxes.shape[0] - 1)},
    cases=[
        _case(100, 200),
        _case(290, 150, 0.3),
        _case(70, 60, 0.7, classes=5),
        _case(1, 200),
        _case(0, 200),
        _case(33, 60, 0.1),
        _case(1000, 1000, use="quick"),
        _case(10000, 2000, dtypes=("float32",), use="bench"),
        _case(10000, 2000, classes=80, dtypes=("float32",), use="bench"),
        _case(1000, 1000, dtypes=("float32",), use="bench"),
    ],
)

idea = "all overlaps in float32 in memory, then rounds until nothing changes, which the host watches"
NMS.eager("torch", idea, reference, served=True, reads=True)
NMS.kernel("triton", "one bit a pair; a chain of programs settles 256 boxes each, without the host", kind="triton",
           fwd=start, served=True, supports=too_many, unless=too_many)  # fmt: skip
