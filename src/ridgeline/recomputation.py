"""Layers that save less for backward: what is cheap to make again is made again there.

    gated_mlp       y = (activation(x G^T) * (x U^T)) D^T saves x and both first products, not their gated product
    Normalised      a norm's result that products make again from the norm's input instead of saving it
    linear          y = x W^T + b, which takes a Normalised x so
    linears         several such products of one x, whose gradients of x are summed inside backward's products

The gated product takes a sixth of what a layer of Llama saves for backward, and 1% of a step to make again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import ridgeline
from ridgeline.boundary import Function, called, differentiate
from ridgeline.op import get
from ridgeline.select import eager

Tensor = torch.Tensor


def autocast(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast computes in on a tensor's device, or None without it, as on the meta device."""
    kind = x.device.type
    return None if kind == "meta" or not torch.is_autocast_enabled(kind) else torch.get_autocast_dtype(kind)


def gate(first: Tensor, second: Tensor, activation: str) -> Tensor:
    """Returns activation(first) * second. activation: "silu", "gelu" or "gelu_tanh"."""
    if activation == "silu":
        return ridgeline.silu_mul(first, second)
    return ridgeline.gelu_mul(first, second, "tanh" if activation == "gelu_tanh" else "none")


class Normalised:
    """How the result of a norm is made again: by `make(x)`. Its users share one copy in backward.

    make: a function of the norm's input, called without gradients.
    """

    def __init__(self, make: Callable[[Tensor], Tensor], x: Tensor):
        self.make, self.x = make, x.detach()
        self.users, self.made = 0, None  # type: tuple[int, Tensor | None]

    @staticmethod
    def of(y: Tensor) -> Normalised | None:
        """Returns how a tensor is made again, if a norm has said so."""
        return getattr(y, "_normalised", None)

    def tag(self, y: Tensor) -> Tensor:
        """Says on a tensor that this makes it."""
        y._normalised = self  # type: ignore[attr-defined]
        return y

    def again(self, x: Tensor) -> Tensor:
        """Returns the norm of x, which forward's users saved; the last of them gives the copy away."""
        made = self.made
        if made is None:
            with torch.no_grad():
                made = self.make(x)
        self.users -= 1
        self.made = made if self.users > 0 else None
        return made


def _save(x: Tensor) -> tuple[Tensor, Normalised | None]:
    """Returns what to save of an input, and how it is made again, or None if it is saved itself."""
    source = Normalised.of(x)
    if source is None:
        return x, None
    source.users += 1
    return source.x, source


class _Linears(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kept: Tensor | None, source: Normalised | None, count: int, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        """given: count weights, then as many biases."""
        weights: Any = given[:count]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, *weights)
        ctx.source = source
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, given[count:], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        kept, *weights = ctx.saved_tensors
        count, need = len(weights), ctx.needs_input_grad[4:]
        x = kept if ctx.source is None else ctx.source.again(kept)
        rows, dx, shape = None if x is None else x.reshape(-1, x.shape[-1]), None, None
        found: list[Tensor | None] = [None] * (2 * count)
        for i, dy in enumerate(dys):
            if dy is None:
                continue
            given, shape = dy.reshape(-1, dy.shape[-1]), (*dy.shape[:-1], weights[i].shape[1])
            if ctx.needs_input_grad[0]:  # in place: out of place, addmm would copy dx first
                dx = given @ weights[i] if dx is None else dx.addmm_(given, weights[i])
            found[i] = given.mT @ rows if rows is not None and need[i] else None
            found[count + i] = given.sum(0) if need[count + i] else None
        return None if dx is None else dx.view(shape), None, None, None, *found


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """Returns `x W^T + b` for each weight W, as `torch.nn.functional.linear` does.

    x: (..., K). weights: (N, K) each; N may differ. biases: (N,) or None each; None means none.
    Backward sums the gradients of x in the products' own accumulators, rounding once a product, and makes a normalised
    x again from the norm's input, which is all that is saved of it. Under autocast, while PyTorch traces and where no
    gradient is wanted, these are torch's own functions.
    """
    given = [*weights, *(biases or [None] * len(weights))]
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *given))
    if not wanted or torch.compiler.is_compiling() or autocast(x) is not None:
        return tuple(F.linear(x, w, b) for w, b in zip(weights, given[len(weights) :], strict=True))
    kept = _save(x) if any(w.requires_grad for w in weights) else (None, None)
    return differentiate(_Linears, x, *kept, len(weights), *given)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, which saves a normalised x as the norm's input, to make it again in backward."""
    if Normalised.of(x) is None or not weight.requires_grad:
        return F.linear(x, weight, bias)
    return linears(x, [weight], [bias])[0]


@cache
def _again() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    get("gated_linear")  # registers it
    return called["gated_linear_again"]


def _undo_gate(dy: Tensor, z: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of z and up, and activation(z) * up again: in one pass if kernels serve the gate."""
    op = get("silu_mul" if activation == "silu" else "gelu_mul")
    if eager(op, None, z, up) is None:
        return _again()(dy.contiguous(), z.contiguous(), up.contiguous(), activation)
    z, up = z.detach().requires_grad_(), up.detach().requires_grad_()
    with torch.enable_grad():
        y = gate(z, up, activation)
    dz, dup = torch.autograd.grad(y, (z, up), dy)
    return dz, dup, y.detach()


class _GatedMLP(Function):
    """first, second: the products' weights, or both in first if second is None: gate in its first half."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: Tensor, second: Tensor | None, down: Tensor, bias: Tensor | None, activation: str,
        again: bool, kept: Tensor, source: Normalised | None,
    ) -> Tensor:  # fmt: skip
        """again: backward makes the first two products again, too."""
        weights = first.chunk(2) if second is None else (first, second)
        y: Any = ridgeline.gated_linear(x, *weights, activation=activation, return_products=not again)
        y, *products = (y,) if again else y
        ctx.save_for_backward(kept, first, second, down, *products)
        ctx.source, ctx.activation = source, activation
        return F.linear(y, down, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        kept, first, second, down, *products = ctx.saved_tensors
        need = ctx.needs_input_grad
        x = kept if ctx.source is None else ctx.source.again(kept)
        gates, ups = first.chunk(2) if second is None else (first, second)
        rows, given = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        z, up = [p.reshape(len(rows), -1) for p in products] or [rows @ gates.mT, rows @ ups.mT]
        dz, dup, y = _undo_gate(given @ down, z, up, ctx.activation)
        d_down = given.mT @ y if need[3] else None
        d_bias = given.sum(0) if need[4] else None
        del y, z, up
        dx = (dz @ gates).addmm_(dup, ups).view(x.shape) if need[0] else None
        d_first = d_second = None
        if need[1] and second is None:
            d_first = torch.empty_like(first)
            torch.mm(dz.mT, rows, out=d_first[: len(gates)])
            torch.mm(dup.mT, rows, out=d_first[len(gates) :])
        elif need[1]:
            d_first = dz.mT @ rows
        if need[2]:
            d_second = dup.mT @ rows
        return dx, d_first, d_second, d_down, d_bias, None, None, None, None


def gated_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, down_weight: Tensor, bias: Tensor | None = None, *,
    activation: str = "silu", recompute_products: bool = False,
) -> Tensor:  # fmt: skip
    """Returns `(activation(x G^T) * (x U^T)) D^T + bias`, (..., H). Gradients flow to x, the weights and the bias.

    x: (..., K). gate_weight, up_weight: (N, K), or (2 N, K) with the gate first, and None. down_weight: (H, N).
    activation: "silu", "gelu" or "gelu_tanh". Backward makes the gated product again from its factors, which it has to
    read anyway; with recompute_products it makes the factors again too, for two products more.
    The first two products are `gated_linear`'s, the others torch's. Autocast casts all inputs first.
    Raises RidgelineError as `gated_linear` does.
    """
    given: list[Any] = [x, gate_weight, up_weight, down_weight, bias]
    dtype = autocast(x)
    if dtype is not None:
        given = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in given]
    if torch.compiler.is_compiling() or not (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    ):
        first, second = given[1].chunk(2) if up_weight is None else given[1:3]
        y: Any = ridgeline.gated_linear(given[0], first, second, activation=activation)
        return F.linear(y, given[3], given[4])
    return differentiate(_GatedMLP, *given, activation, recompute_products, *_save(given[0]))
