"""The last layer and the loss: logits that are computed only when they are read, and a loss that does without them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import ridgeline
from ridgeline import recomputation
from ridgeline.op import RidgelineError

Step = tuple[Any, ...]


def _compute(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: tuple[Step, ...]) -> Any:
    y = F.linear(hidden, weight, bias)
    for name, *values in steps:
        y = _STEPS[name](y, *values)
    return y


_STEPS: dict[str, Callable[..., Any]] = {
    "mul": operator.mul,
    "div": operator.truediv,
    "tanh": torch.tanh,
    "to": lambda y, dtype: y.to(dtype),
}


class _Later(torch.autograd.Function):
    """Gives deferred logits their place in the graph; backward computes them again, as forward never did."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, steps: tuple[Step, ...], dtype: torch.dtype) -> Any:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.steps = steps
        return DeferredLogits._make(hidden, weight, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        given: list[Any] = [t if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = _compute(given[0], given[1], given[2], ctx.steps)
        wanted: list[Any] = [t for t, need in zip(given, ctx.needs_input_grad) if need]
        found = iter(torch.autograd.grad(y, wanted, dy))
        return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None


class DeferredLogits(torch.Tensor):
    """Logits (..., V) of a last layer, computed when anything but their shape, dtype or device is asked for.

    Products with numbers, quotients, tanh and casts stay deferred, so that scaled and capped logits reach the loss
    unmade. Any other operation, in Python or below, gets a plain tensor.
    """

    source: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    steps: tuple[Step, ...]
    made: torch.Tensor | None
    version: int
    grad_mode: bool
    autocast: torch.dtype | None

    @staticmethod
    def _make(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> DeferredLogits:
        shape = (*hidden.shape[:-1], weight.shape[0])
        return torch.Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def of(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: tuple[Step, ...] = ()
    ) -> DeferredLogits:
        casts = [s[1] for s in steps if s[0] == "to"]
        dtype = casts[-1] if casts else _dtype(hidden)
        made = _Later.apply(hidden, weight, bias, steps, dtype)
        made.source, made.steps, made.version = (hidden, weight, bias), steps, _version(weight)
        made.grad_mode, made.autocast = torch.is_grad_enabled(), recomputation.autocast(hidden)
        made.made = None
        return made

    def tensor(self) -> torch.Tensor:
        """Returns the logits as a plain tensor; gradients flow to the hidden states and the weight."""
        if self.made is None:
            hidden, weight, bias = self.source
            freed = weight.numel() and not weight.is_meta and not weight.untyped_storage().size()  # by FSDP
            if freed or _version(weight) != self.version:
                raise RidgelineError(
                    "the logits cannot be made any more, as the weight of lm_head has changed or FSDP has freed it; "
                    "read outputs.logits before backward() or optimizer.step()"
                )
            kind = "cpu" if hidden.is_meta else hidden.device.type  # meta has no autocast
            with (
                torch.set_grad_enabled(self.grad_mode),
                torch.autocast(kind, self.autocast or torch.bfloat16, self.autocast is not None),
            ):
                self.made = _compute(hidden, weight, bias, self.steps)
        return self.made

    def _then(self, *step: Any) -> DeferredLogits:
        with torch.set_grad_enabled(self.grad_mode):
            return DeferredLogits.of(*self.source, (*self.steps, step))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = torch._C.DisableTorchFunctionSubclass()
        if func in _FACTS:
            with own:
                return func(*args, **kwargs)
        first = args[0] if args else None
        if type(first) is cls and not kwargs:
            step = _step(func, args[1:])
            if step is not None:
                with own:
                    return first._then(*step)
        plain = torch.utils._pytree.tree_map_only(DeferredLogits, lambda t: t.tensor(), (args, kwargs))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # autograd detaches what a function returns
            return args[0]
        plain = torch.utils._pytree.tree_map_only(DeferredLogits, lambda t: t.tensor().detach(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


_FACTS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "ndim", "requires_grad",
                 "is_leaf", "grad_fn", "_version", "is_sparse", "is_quantized")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.is_floating_point,
     torch.is_floating_point, torch.Tensor.is_complex, torch.is_complex, torch.Tensor.get_device}  # fmt: skip


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


def _dtype(hidden: torch.Tensor) -> torch.dtype:
    cast = recomputation.autocast(hidden)
    return cast if cast is not None and hidden.dtype != torch.float64 else hidden.dtype


def _step(func: Any, rest: tuple[Any, ...]) -> Step | None:
    """Returns what an operation on deferred logits adds to them, or None if they must be made."""
    number = len(rest) == 1 and type(rest[0]) in (int, float)
    if number and func in (torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.mul):
        return "mul", rest[0]
    if number and func in (torch.Tensor.div, torch.Tensor.__truediv__, torch.div, torch.Tensor.true_divide):
        return "div", rest[0]
    if not rest and func in (torch.tanh, torch.Tensor.tanh):
        return ("tanh",)
    if not rest and func is torch.Tensor.float:
        return "to", torch.float32
    if func is torch.Tensor.to and len(rest) == 1 and isinstance(rest[0], torch.dtype):
        return "to", rest[0]
    return None


def scale_and_cap(steps: tuple[Step, ...]) -> tuple[float, float | None] | None:
    """Returns logit_scale and softcap of deferred steps, or None if they are anything else."""
    todo, scale = [s for s in steps if s != ("to", torch.float32)], 1.0
    tanh = next((i for i, s in enumerate(todo) if s[0] == "tanh"), None)
    before = todo if tanh is None else todo[: tanh - 1]
    for name, *values in before:
        if name not in ("mul", "div"):
            return None
        scale = scale * values[0] if name == "mul" else scale / values[0]
    if tanh is None:
        return scale, None
    cap = todo[tanh - 1 :]
    if tanh == 0 or len(cap) != 3 or [s[0] for s in cap] != ["div", "tanh", "mul"] or cap[0][1] != cap[2][1]:
        return None
    return scale, float(cap[0][1])


def lm_head(module: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """The last layer: deferred logits; plain ones while PyTorch traces, or if the weight is sharded."""
    weight = module.weight
    sharded = isinstance(weight, DTensor) or type(module) is not nn.Linear
    if torch.compiler.is_compiling() or sharded or torch.jit.is_tracing():
        return F.linear(hidden, weight, module.bias)
    return DeferredLogits.of(hidden, weight, module.bias)


def causal_loss(
    original: Callable[..., Any], logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
    ignore_index: int = -100, shift_labels: Any = None, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """transformers' loss of causal language models, by `linear_cross_entropy` if the logits are deferred; float32."""
    found = scale_and_cap(logits.steps) if type(logits) is DeferredLogits else None
    if found is None or logits.shape[-1] != vocab_size:
        given = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
        return original(logits=logits, labels=labels, vocab_size=vocab_size, **given, **named)
    hidden, weight, bias = logits.source
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(hidden.device)
    loss = ridgeline.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), weight, target, bias, ignore_index=ignore_index, logit_scale=found[0],
        softcap=found[1], reduction="mean" if num_items_in_batch is None else "sum",
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch
