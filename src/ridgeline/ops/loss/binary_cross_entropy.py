"""binary_cross_entropy: the loss of logits x and targets t from 0 to 1, with weights w, and p for the positive part.

    loss = w ((1 - t) softplus(x) + p t softplus(-x)),   softplus(x) = max(x, 0) + log(1 + exp(-|x|))
    backward: dx = w ((1 - t) sigmoid(x) - p t sigmoid(-x)) dloss,   dt = w (p softplus(-x) - softplus(x)) dloss

Both terms are at least 0, so nothing cancels, and exp(-|x|) cannot overflow. A mean or a sum is made in two stages, in
a fixed order: each program adds its share, and one program adds the shares in float64. The floor is one read of logits
and targets; backward reads them again and writes the gradient.
Source: the stable form is that of PyTorch's documentation of BCEWithLogitsLoss, without its subtraction.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import FLOATS, Case, Cost, Implementation, Op, RidgelineError, Spec, dense_only, nbytes
from ridgeline.ops.loss import _binary
from ridgeline.select import by_kind, eager, run

TARGETS = (*(getattr(torch, d) for d in FLOATS), torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64)


@kernel_op(
    "binary_cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, Tensor? pos_weight, ScalarType dtype, "
    "str reduction, str? impl) -> Tensor"
)
def _forward(
    x: torch.Tensor, t: torch.Tensor, w: Any, p: Any, dtype: torch.dtype, reduction: str, impl: str | None
) -> torch.Tensor:
    loss = torch.empty_like(x, dtype=dtype) if reduction == "none" else x.new_empty((), dtype=dtype)
    if not x.numel():
        return loss.fill_(float("nan") if reduction == "mean" else 0.0)
    run(BINARY_CROSS_ENTROPY, "fwd", impl, (loss,), x, t, w, p, reduction)
    return loss


@kernel_op(
    "binary_cross_entropy_bwd(Tensor logits, Tensor target, Tensor? weight, Tensor? pos_weight, Tensor dloss, "
    "str reduction, int need, str? impl) -> (Tensor, Tensor)"
)
def _backward(
    x: torch.Tensor, t: torch.Tensor, w: Any, p: Any, dloss: torch.Tensor, reduction: str, need: int, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dt = [torch.empty_like(s) if need & bit else s.new_empty(0) for s, bit in ((x, 1), (t, 2))]
    if x.numel():
        run(BINARY_CROSS_ENTROPY, "bwd", impl, (dx, dt), x, t, w, p, dloss, reduction, need)
    return dx, dt


class _BinaryCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, t: torch.Tensor, w: Any, p: Any, dtype: torch.dtype, reduction: str,
        impl: str | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, t, w, p)
        ctx.facts = reduction, impl
        return _forward(x, t, w, p, dtype, reduction, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        reduction, impl = ctx.facts
        wanted = ctx.needs_input_grad[:2]
        grads = _backward(*ctx.saved_tensors, dloss, reduction, wanted[0] + 2 * wanted[1], impl)
        return *[g if w else None for g, w in zip(grads, wanted, strict=True)], *[None] * 5


def reference(
    logits: torch.Tensor, target: torch.Tensor, *, weight: Any = None, pos_weight: Any = None, reduction: str = "mean"
) -> torch.Tensor:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    t = target.to(x.dtype)
    positive = t if pos_weight is None else pos_weight * t
    loss = -(1 - t) * F.logsigmoid(-x) - positive * F.logsigmoid(x)
    loss = loss if weight is None else weight * loss
    return (loss if reduction == "none" else getattr(loss, reduction)()).to(logits.dtype)


def _torch(
    logits: torch.Tensor, target: torch.Tensor, *, weight: Any = None, pos_weight: Any = None, reduction: str = "mean"
) -> torch.Tensor:
    options = {"weight": weight, "pos_weight": pos_weight, "reduction": reduction}
    loss = F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), **options)
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


def binary_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None, reduction: str = "mean", impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """The binary cross-entropy of logits, as `torch.nn.functional.binary_cross_entropy_with_logits`, in one pass.

    -w (p t log sigmoid(x) + (1 - t) log(1 - sigmoid(x))), in a form that neither overflows nor cancels.

    logits: floating point, any shape and strides. target: of that shape; floating point, soft or 0 and 1, or bool,
    uint8, int32 or int64. weight, pos_weight (w and p): floating point, of a shape that broadcasts to the logits'.
    reduction: "mean" over all elements, "sum", or "none" for a loss per element. Sums are bitwise reproducible.
    Returns the loss in the logits' dtype; under autocast in float32, as torch's. Arithmetic is float32.
    Gradients flow to logits and target, each in one pass; weight and pos_weight take none.
    Raises RidgelineError if shapes, dtypes, devices or the reduction do not match the above, if weight or pos_weight
    requires a gradient, or if `impl` cannot run the call.
    """
    plain, dtype = _look(logits, target, weight, pos_weight, reduction, impl)
    if plain is not None and plain.call is not None:
        return plain.call(logits, target, weight=weight, pos_weight=pos_weight, reduction=reduction)
    if torch.is_grad_enabled():
        for name, t in (("weight", weight), ("pos_weight", pos_weight)):
            if t is not None and t.requires_grad:
                raise RidgelineError(f"binary_cross_entropy: {name} takes no gradient; give {name}.detach()")
        if logits.requires_grad or target.requires_grad:
            return differentiate(_BinaryCrossEntropy, logits, target, weight, pos_weight, dtype, reduction, impl)
    return _forward(logits, target, weight, pos_weight, dtype, reduction, impl)


@by_kind(4, optional=2)
def _look(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, pos_weight: torch.Tensor | None,
    reduction: str, impl: str | None
) -> tuple[Implementation | None, torch.dtype]:  # fmt: skip
    """Checks a call and chooses. Returns too the loss's dtype."""
    for name, t in (("logits", logits), ("target", target), ("weight", weight), ("pos_weight", pos_weight)):
        if t is None and name.endswith("weight"):
            continue
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"binary_cross_entropy: {name} must be a tensor, but is {type(t).__name__}")
        if not t.is_floating_point() and (name != "target" or t.dtype not in TARGETS):
            also = " or bool, uint8, int32 or int64" if name == "target" else ""
            raise RidgelineError(
                f"binary_cross_entropy: {name} must be floating point{also}, but is {str(t.dtype)[6:]}"
            )
        if t.device != logits.device:
            raise RidgelineError(f"binary_cross_entropy: {name} is on {t.device}, but logits on {logits.device}")
        if name == "target" and t.shape != logits.shape:
            shapes = f"{tuple(logits.shape)}, but is {tuple(t.shape)}"
            raise RidgelineError(f"binary_cross_entropy: target must have the logits' shape {shapes}")
        sizes = zip(reversed(t.shape), reversed(logits.shape), strict=False)
        if t.dim() > logits.dim() or any([n not in (1, m) for n, m in sizes]):
            shapes = f"{tuple(logits.shape)}, but is {tuple(t.shape)}"
            raise RidgelineError(f"binary_cross_entropy: {name} must broadcast to the logits' shape {shapes}")
    if reduction not in ("none", "mean", "sum"):
        raise RidgelineError(f'binary_cross_entropy: reduction must be "none", "mean" or "sum", but is {reduction!r}')
    dense_only("binary_cross_entropy", [target, weight, pos_weight])
    wide = torch.is_autocast_enabled("cuda" if logits.is_cuda else "cpu")
    return eager(BINARY_CROSS_ENTROPY, impl, logits), torch.float32 if wide else logits.dtype


def cost(
    logits: torch.Tensor, target: torch.Tensor, *, weight: Any = None, pos_weight: Any = None, reduction: str = "mean"
) -> tuple[Cost, Cost]:
    given = nbytes(logits, target, *[t for t in (weight, pos_weight) if t is not None])
    losses = (logits.numel() if reduction == "none" else 1) * logits.element_size()
    made = sum(nbytes(t) for t in (logits, target) if t.requires_grad) or nbytes(logits)
    read = given + losses
    return Cost(given, losses, 10 * logits.numel()), Cost(read, made, 10 * logits.numel())


class Share(Spec):
    """Uniform numbers from 0 to 1, plus `high`."""

    def make(self, *args: Any) -> torch.Tensor:
        made = torch.sigmoid(super().make(*args).detach()) + self.high
        return made.requires_grad_(self.grad and made.is_floating_point())


class Wide(Spec):
    """Random data times `high`."""

    def make(self, *args: Any) -> torch.Tensor:
        return (super().make(*args).detach() * self.high).requires_grad_(self.grad)


def _case(name: str, *shape: int, x: Spec | None = None, t: Spec | None = None, **facts: Any) -> Case:
    own = {n: facts.pop(n) for n in ("dtypes", "use") if n in facts}
    return Case(name, (x or Spec(*shape), t or Share(*shape, grad=False)), facts, **own)


BENCH: dict[str, Any] = {"dtypes": ("bfloat16", "float32"), "use": "bench"}
BINARY_CROSS_ENTROPY = Op(
    binary_cross_entropy,
    reference=reference,
    cost=cost,
    sharding=lambda reduction="mean", **_: (
        None
        if reduction == "mean"  # of parts it would be a mean of means
        else f"logits *, target *, weight *, pos_weight * -> {'*' if reduction == 'none' else ''}"
    ),
    cases=[
        _case("33x129", 33, 129),
        _case("33x129 none", 33, 129, reduction="none"),
        _case("33x129 none, targets' gradient", 33, 129, t=Share(33, 129), reduction="none"),
        _case("7x80 weights, sum", 7, 80, weight=Share(7, 1, grad=False), pos_weight=Share(80, grad=False, high=2),
              reduction="sum"),
        _case("5x6x7 weights", 5, 6, 7, t=Share(5, 6, 7), weight=Share(5, 6, 7, grad=False),
              pos_weight=Share(6, 1, grad=False, high=1)),
        _case("100x70 labels", 100, 70, t=Spec(100, 70, dtype="int64", high=2)),
        _case("100x70 large", 100, 70, x=Wide(100, 70, high=50), t=Spec(100, 70, dtype="uint8", high=2),
              reduction="none"),
        _case("70001", 70001),
        _case("one", 1),
        _case("nothing", 0, 3, reduction="sum"),
        _case("1024x1024", 1024, 1024, use="quick"),
        _case("8192x8192", 8192, 8192, **BENCH),
        _case("8192x8192 none", 8192, 8192, reduction="none", **BENCH),
        _case("65536x1000 weights", 65536, 1000, weight=Share(65536, 1, grad=False), pos_weight=Share(1000, grad=False),
              **BENCH),
    ],
)  # fmt: skip

BINARY_CROSS_ENTROPY.eager("naive", "the formula in eager PyTorch, in float32: ten passes over memory", reference)
BINARY_CROSS_ENTROPY.eager("torch", "PyTorch's own: several kernels, then one that adds", _torch, served=True)
BINARY_CROSS_ENTROPY.compiled("the formula fused by torch.compile")
BINARY_CROSS_ENTROPY.kernel(
    "triton",
    "one pass; log(1 + e) by a polynomial instead of log's instructions; shares added in order",
    kind="triton",
    fwd=_binary.launch_fwd,
    bwd=_binary.launch_bwd,
    served=True,
)
