"""cross_entropy: -log softmax(a logits)[target] in the last dimension, with label smoothing s, z-loss z and softcap c.

    x = c tanh(a logits / c),   lse = log sum_j exp x_j,   loss = lse - (1 - s) x_t - s mean(x) + z lse^2
    backward: dx_j = (p_j (1 + 2 z lse) - s / V - (1 - s) [j = t]) dloss,   p_j = exp(x_j - lse),
              dlogits_j = a (1 - (x_j / c)^2) dx_j

An online pass over a row finds its maximum and sum of exponentials. For a mean or a sum, the gradient up to a factor
depends on the row alone: forward writes it while the row is still in L2, so forward and backward read the logits once.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, packed
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.loss import _cluster
from ridgeline.ops.loss._arguments import OPTIONS, SCHEMA, check_classes, fault
from ridgeline.ops.loss._rows import forward_rows, kept_counts, launch_bwd, launch_fwd
from ridgeline.select import by_kind, eager, run


@kernel_op(
    f"cross_entropy_fwd(Tensor logits, Tensor target, ScalarType dtype, int need, {SCHEMA}, str? impl) "
    "-> (Tensor, Tensor, Tensor)"
)
def _forward(
    logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, need: int, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss, the gradient and statistics (`split_saved`). need: 1 for statistics, 2 for both."""
    *options, reduction, impl = options
    loss = torch.empty(target.shape if reduction == "none" else (), dtype=dtype, device=logits.device)
    d = torch.empty(logits.shape if need == 2 else (0,), dtype=logits.dtype, device=logits.device)
    kept = kept_counts(target.numel(), reduction) + (2 * target.numel() if need else 0)
    saved = torch.empty((kept,), dtype=torch.float32, device=logits.device)
    run(CROSS_ENTROPY, "fwd", impl, (loss, d, saved), logits, target, need, *options, reduction)
    return loss, d, saved


@kernel_op(
    f"cross_entropy_bwd(Tensor logits, Tensor target, Tensor dloss, Tensor saved, {SCHEMA}, str? impl) -> Tensor"
)
def _backward(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    target, dloss, saved, *options, impl = rest
    d = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    run(CROSS_ENTROPY, "bwd", impl, (d,), logits, target, dloss, saved, False, *options)
    return d


@kernel_op(
    "cross_entropy_finish(Tensor(a!) made, Tensor logits, Tensor target, Tensor dloss, Tensor saved, "
    f"{SCHEMA}, str? impl) -> ()"
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


def by_torch(
    logits: torch.Tensor, target: torch.Tensor, *, z_loss: float = 0.0, softcap: float | None = None,
    logit_scale: float = 1.0, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:  # fmt: skip
    """PyTorch's own, with the scale, the softcap, the z-loss and the dtype, which it lacks, added."""
    if dtype is not None:
        options |= {"z_loss": z_loss, "softcap": softcap, "logit_scale": logit_scale}
        return by_torch(logits.to(torch.promote_types(logits.dtype, dtype)), target, **options).to(dtype)
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


@by_kind(2)
def _look(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float | None, logit_scale: float, reduction: str, dtype: torch.dtype | None, impl: str | None
) -> tuple[Any, ...]:  # fmt: skip
    """Checks a call and chooses. Returns too the loss's dtype and the options as the launchers take them."""
    wrong = fault(logits, target, ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, dtype)
    if wrong:
        raise RidgelineError(f"cross_entropy: {wrong}")
    plain = eager(CROSS_ENTROPY, impl, logits)
    check_classes("cross_entropy", target, logits.shape[-1], ignore_index)
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
    sharding=lambda reduction="mean", **_: f"logits ...V, target ... -> {'...' if reduction == 'none' else ''}",
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
    "torch", "PyTorch's own: log_softmax is written in forward and read in backward", by_torch, served=True
)
CROSS_ENTROPY.compiled("the formula fused by torch.compile: reads logits twice forward and once backward")
CROSS_ENTROPY.kernel(
    "triton",
    "one online pass per row; forward writes the gradient while the row is in L2, unless reduction='none'",
    kind="triton",
    fwd=partial(launch_fwd, forward_rows, True),
    bwd=launch_bwd,
    served=True,
)
CROSS_ENTROPY.kernel(
    "cuda_cluster",
    "each row in the shared memory of a thread-block cluster: loss and gradient from a single read",
    kind="cuda",
    fwd=partial(launch_fwd, _cluster.rows, False),
    bwd=launch_bwd,
    supports=_cluster.fits,
    served=True,
    arch=90,
    shared=227 << 10,
)
