"""Forwards that replace those of norms, gated feed-forward layers and attention's rotary embedding, on instances.

Each is a function of a module, set as `functools.partial(function, module, ...)` in the module's `forward` attribute,
so that it is copied and pickled with the module, and deleting the attribute restores the class's own.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import ridgeline
from ridgeline import recomputation
from ridgeline.hf import decoding, forms


def rms_norm(
    module: nn.Module, hidden_states: torch.Tensor, *, eps: str, weight: str | None, options: dict[str, Any],
    again: bool = False,
) -> torch.Tensor:  # fmt: skip
    """RMSNorm by `ridgeline.rms_norm`. eps, weight: the names of the module's attributes.

    again: products that take the result may make it again in backward.
    """
    scale, epsilon = getattr(module, weight) if weight else None, getattr(module, eps)
    y = _norm(scale, epsilon, options, hidden_states)
    if again and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        make = partial(_norm, None if scale is None else scale.detach(), epsilon, options)
        return recomputation.Normalised(make, hidden_states).tag(y)
    return y


def gated_rms_norm(
    module: nn.Module, hidden_states: torch.Tensor, gate: torch.Tensor | None = None, *, names: dict[str, str],
    norm_before_gate: bool,
) -> torch.Tensor:  # fmt: skip
    """A norm with a gate by `ridgeline.gated_rms_norm`; without one, by `ridgeline.rms_norm` of each group.

    names: the module's attribute for each role of `forms.GatedNorm`."""
    own = {role: getattr(module, name) for role, name in names.items()}
    size = own.get("group_size")
    if "groups" in own:
        size = hidden_states.shape[-1] // own["groups"]
    if gate is None:
        size = hidden_states.shape[-1] if size is None else size
        rows = hidden_states.unflatten(-1, (-1, size))
        return (ridgeline.rms_norm(rows, None, own["eps"]).flatten(-2) * own["weight"]).to(hidden_states.dtype)
    options: dict[str, Any] = {"activation": own.get("activation", "silu"), "group_size": size}
    options["norm_before_gate"] = own.get("norm_before_gate", norm_before_gate)
    return ridgeline.gated_rms_norm(hidden_states, gate, own["weight"], own["eps"], **options)


def _norm(weight: torch.Tensor | None, eps: float, options: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    y = ridgeline.rms_norm(x, weight, eps, **options)
    # Under autocast the op returns float32, where these modules return their input's dtype.
    return y if options.get("rounding") == "llama" else y.to(x.dtype)


def plain_linear(layer: Any) -> bool:
    """Whether calling a layer computes x W^T + b and nothing else: no adapter, no quantised weight, no hook."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not hooks


def layer_norm(module: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
    """torch.nn.LayerNorm over the last dimension, by `ridgeline.layer_norm`."""
    return ridgeline.layer_norm(input, module.weight, module.bias, eps=module.eps)


def linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A linear layer that saves the input of the norm before it, not the norm's result."""
    return recomputation.linear(x, module.weight, module.bias)


class _Waiting(threading.local):
    """Products that a layer has made for its neighbours, until they are called; one attention layer's at a time."""

    x: weakref.ref[torch.Tensor] | None = None
    made: ClassVar[dict[nn.Module, torch.Tensor]] = {}

    def put(self, x: torch.Tensor, made: dict[nn.Module, torch.Tensor]) -> None:
        self.x, self.made = weakref.ref(x), made  # type: ignore[misc]

    def take(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        return self.made.pop(module, None) if self.x is not None and self.x() is x else None


_WAITING = _Waiting()


def joint_linear(module: nn.Module, x: torch.Tensor, *, owner: nn.Module, names: tuple[str, ...]) -> torch.Tensor:
    """One of the linear layers `names` of `owner`, which all take the same x: the first computes all of them.

    So backward sums the gradients of x inside its products. A layer that is no plain nn.Linear with a plain weight,
    is replaced or has hooks computes its own product, and so do its neighbours; without gradients each does, too.
    """
    if torch.compiler.is_compiling() or recomputation.autocast(x) is not None:
        return F.linear(x, module.weight, module.bias)  # type: ignore[arg-type]
    made = _WAITING.take(module, x)
    if made is not None:
        return made
    layers: list[Any] = [getattr(owner, name, None) for name in names]
    if module is not layers[0] or not torch.is_grad_enabled() or not all(map(_joins, layers)):
        return recomputation.linear(x, module.weight, module.bias)  # type: ignore[arg-type]
    own, *rest = recomputation.linears(x, [m.weight for m in layers], [m.bias for m in layers])
    _WAITING.put(x, dict(zip(layers[1:], rest, strict=True)))
    return own


def _joins(layer: Any) -> bool:
    """Whether a layer, in the place where its owner looks it up, computes x W^T + b by `joint_linear` alone."""
    if type(layer) is not nn.Linear or isinstance(layer.weight, DTensor):
        return False
    forward = layer.__dict__.get("forward")
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return isinstance(forward, partial) and forward.func is joint_linear and not hooks


def gated_mlp(
    module: nn.Module, x: torch.Tensor, *, gate: str, up: str, down: str, activation: str, again: bool = False
) -> torch.Tensor:
    """down(activation(gate(x)) * up(x)): one function if all three are plain layers, else their own products."""
    first, second, last = getattr(module, gate), getattr(module, up), getattr(module, down)
    if not (plain_linear(first) and plain_linear(second) and first.bias is None and second.bias is None):
        return last(recomputation.gate(first(x), second(x), activation))
    if not plain_linear(last):
        return last(ridgeline.gated_linear(x, first.weight, second.weight, activation=activation))
    options: Any = {"activation": activation, "recompute_products": again}
    return recomputation.gated_mlp(x, first.weight, second.weight, last.weight, last.bias, **options)


def merged_mlp(
    module: nn.Module, x: torch.Tensor, *, gate_up: str, down: str, activation: str, again: bool = False
) -> torch.Tensor:
    """down(activation(g) * u) for (g, u) the halves of gate_up(x)."""
    first, last = getattr(module, gate_up), getattr(module, down)
    if not (plain_linear(first) and plain_linear(last) and first.bias is None):
        g, u = first(x).chunk(2, -1)
        return last(recomputation.gate(g, u, activation))
    options: Any = {"activation": activation, "recompute_products": again}
    return recomputation.gated_mlp(x, first.weight, None, last.weight, last.bias, **options)


def activation_name(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """Returns which activation a function of tensors is, told by its values, or None."""
    x = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
    with torch.no_grad(), torch.device("cpu"):
        try:
            y = function(x.clone())
        except (TypeError, RuntimeError):
            return None
        known = {"silu": F.silu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh")}
        return next((n for n, z in known.items() if y.shape == z.shape and (y - z).abs().max() < 1e-9), None)


def rotary(
    facts: forms.Rotary, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' apply_rotary_pos_emb by `ridgeline.rope`. cos, sin: (1 or B, S, angles)."""
    if unsqueeze_dim == 2:
        q, k = rotary(facts, q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
    batch, length, width = cos.shape
    if facts.table == "halves":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    elif facts.table == "pairs":
        cos, sin = cos[..., ::2], sin[..., ::2]
    positions = None
    if batch > 1:
        positions = torch.arange(batch * length, device=cos.device).view(batch, length)
    turned = ridgeline.rope(
        q, k, cos.flatten(0, 1), sin.flatten(0, 1), positions=positions, interleaved=facts.interleaved
    )
    return turned


_FORWARDS: dict[type, Callable[..., Any]] = {}


def rebound(function: Callable[..., Any], replacements: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a function with the same code that finds other functions under some names of its file.

    The code, not a copy of the source, is shared; only the dictionary in which it looks names up is another.
    """
    inner = getattr(function, "__wrapped__", None)
    names, cells = dict(function.__globals__), function.__closure__
    if inner is None:
        names |= replacements
        names.pop("__name__")  # torch.compile would look the names up in the module of that name
    else:
        changed = rebound(inner, replacements)
        cells = tuple(types.CellType(changed) if c.cell_contents is inner else c for c in cells or ())
        names = function.__globals__
    code = function.__code__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    if inner is not None:
        made.__wrapped__ = changed  # type: ignore[attr-defined]
    return made


def prepare_attention(kind: type) -> Callable[..., Any]:
    """Returns the forward of an attention class with our rotary function; made once a class."""
    if kind not in _FORWARDS:
        facts = forms.rotary(kind)
        assert facts is not None
        _FORWARDS[kind] = rebound(kind.forward, {forms.ROTARY: partial(rotary, facts)})  # type: ignore[attr-defined]
    return _FORWARDS[kind]


def attention(module: nn.Module, *given: Any, **named: Any) -> Any:
    """An attention layer's own forward, which finds `rotary` in the place of its file's rotary function."""
    forward = _FORWARDS.get(type(module))
    if forward is None:  # unpickled in another process
        forward = prepare_attention(type(module))
    to = decoding.appending(module, named)
    if to is not None:
        return decoding.served(module, forward, given, named, to)
    return forward(module, *given, **named)


def can_rebind(kind: type, name: str = forms.ROTARY) -> bool:
    """Whether `rebound` can rebuild the forward of a class: plain functions, wrapped by functools.wraps."""
    function = kind.forward  # type: ignore[attr-defined]
    while inspect.isfunction(function):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return name in function.__code__.co_names
        if not any(c.cell_contents is inner for c in function.__closure__ or ()):
            return False
        function = inner
    return False
