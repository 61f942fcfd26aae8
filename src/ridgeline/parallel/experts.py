"""A mixture of experts that are spread over the ranks of a group: tokens travel to their experts, and results back.

    rank r has the experts r E / N to (r + 1) E / N - 1, and its own tokens;  a pair p = t k + j is token t's choice j
    forward   counts of pairs by expert;  x_t to each pair's expert;  its result o_tj back;  y_t = sum_j w_tj o_tj
    backward  dy_t to the experts;  there dz = w_tj g h'(z), dw_tj = g . h as in `ridgeline.moe`;  dx_tj and dw_tj back

Pairs leave sorted by expert, so that the counts say which expert an arriving row is for, and nothing else need be sent.
A rank's rows of one expert lie source after source: its sums have the order that one process with all tokens has.
Weights travel beside x, so that backward needs neither the experts' results nor a rounded product of w and dy.
Sources: Lepikhin et al., GShard, 2020 (arXiv:2006.16668); Gale et al., MegaBlocks, 2022 (arXiv:2211.15841).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ridgeline
from ridgeline.boundary import Function, alone, differentiate, first_order, last_backward
from ridgeline.op import get, readable
from ridgeline.parallel import groups
from ridgeline.parallel.agreement import agree
from ridgeline.select import eager

_T = torch.Tensor
_Maybe = torch.Tensor | None


class Unit(NamedTuple):
    """The options of an expert."""

    activation: str
    limit: float | None
    interleaved: bool


class Facts(NamedTuple):
    """What a call is, apart from its tensors."""

    group: Any
    unit: Unit
    training: bool


def moe(
    x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *,
    group: Any = None, gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
    activation: str = "silu", limit: float | None = None, interleaved: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns `ridgeline.moe` of this rank's tokens and the experts of all ranks of a group, (..., H).

    x: (..., H), this rank's tokens; ranks may have different numbers of them, also none. weights, indices: (..., k);
    indices name the E experts of all ranks. group: None means all ranks; without torch.distributed it is one rank.
    gate_up: (E / ranks, 2 I, H), down: (E / ranks, H, I), gate_up_bias, down_bias: this rank's experts, equally many on
    each; rank r has those from r E / ranks on. The other options are as in `ridgeline.moe`.
    Gradients flow to x, weights and this rank's experts, whose gradients are sums over all ranks' tokens: do not sum
    them over the group again. Every rank must call backward, and x and weights need gradients on all ranks or on none.
    An expert's result is rounded once; a token's sum is float32, in the order of its choices, and rounded once.
    The host waits for the GPU once in forward: it reads how many rows each rank sends and receives, because
    torch.distributed takes these sizes, and that of the tensor to receive into, as numbers. So a call is neither in a
    CUDA graph nor traced whole by torch.compile. Backward reads nothing.
    Raises RidgelineError, on every rank, if the arguments do not match the above or each other. On a GPU the ranks
    compare their calls only with RIDGELINE_CHECK=1; without it, an index of no expert gives its token NaN.
    """
    x, *experts = _cast(x, gate_up, down, gate_up_bias, down_bias)
    gate_up, down, *biases = experts
    unit = Unit(activation, limit, bool(interleaved))
    if groups.size(group) == 1:
        return _alone(x, weights, indices, *experts, unit)
    wrong = _fault(x, weights, indices, gate_up, down, biases, group) or _unit_fault(*unit[:2])
    needed = [torch.is_grad_enabled() and getattr(t, "requires_grad", False) for t in (x, weights, *experts)]
    training = any(needed)
    alike: dict[str, Any] = {}
    if not wrong:
        alike = {
            "dtypes of x and weights": f"{x.dtype} and {weights.dtype}",
            "shapes of gate_up and down": f"{tuple(gate_up.shape)} and {tuple(down.shape)}",
            "biases": [b is not None for b in biases],
            "options": [str(o) for o in unit],
            "needs of gradients (of x, of weights, of anything)": [*needed[:2], training],
        }
    agree("moe", group, x if isinstance(x, torch.Tensor) else torch.empty(0), wrong, **alike)
    rows, weights, indices = (t.reshape(-1, t.shape[-1]).contiguous() for t in (x, weights, indices))
    given = rows, weights, gate_up, down, *[None if b is None else b.contiguous() for b in biases]
    return differentiate(_Moe, *given, indices, Facts(group, unit, training)).view(x.shape)


class _Moe(Function):
    """x: (T, H); weights, indices: (T, k); the experts are this rank's."""

    @staticmethod
    def forward(
        ctx: Any, x: _T, weights: _T, gate_up: _T, down: _T, gate_up_bias: _Maybe, down_bias: _Maybe, indices: _T,
        facts: Facts
    ) -> _T:  # fmt: skip
        route = _route(indices, gate_up.shape[0], facts.group)
        rows = route.there(x[route.tokens])
        shares = route.there(weights.view(-1)[route.pairs]) if facts.training else None
        experts = gate_up, down, gate_up_bias, down_bias
        out, saved = _forward(rows, route.local, experts, facts.unit, facts.training)
        y = _summed(route.back(out), route.place, weights)
        if facts.training:
            ctx.save_for_backward(rows, shares, *experts, *saved, *route.kept)
        ctx.facts, ctx.sizes, ctx.many = facts, (route.sent, route.received), len(saved)
        ctx.lone = alone(x)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        rows, shares, *rest = ctx.saved_tensors
        experts, saved, kept = rest[:4], rest[4 : 4 + ctx.many], rest[4 + ctx.many :]
        route, of, facts = Route(ctx.facts.group, *ctx.sizes, *kept), ctx.needs_input_grad, ctx.facts
        wanted = of[0], of[1], of[2] or of[4], of[3] or of[5]
        incoming = route.there(dy[route.tokens])
        back = torch.ops.ridgeline.moe_consume if ctx.lone and last_backward() else torch.ops.ridgeline.moe_bwd
        given = incoming, rows, shares, route.local, experts, saved, facts.unit, wanted
        drows, dshares, *grads = _backward(*given, back)
        dx = _summed(route.back(drows), route.place, None) if of[0] else None
        dweights = route.back(dshares)[route.place] if of[1] else None
        return dx, dweights, *[g if w else None for g, w in zip(grads, of[2:6], strict=True)], None, None


# --- the way of the pairs


class Route(NamedTuple):
    """Which pairs a rank sends and receives, and what becomes of them."""

    group: Any
    sent: list[int]  # rows for each rank
    received: list[int]  # rows from each rank
    pairs: torch.Tensor  # (sum of sent,): the pairs, sorted by expert
    tokens: torch.Tensor  # (sum of sent,): their tokens
    place: torch.Tensor  # (T, k): where a pair is among those sent; behind them if its index is no expert's
    local: torch.Tensor  # (sum of received,): which of this rank's experts an arriving row is for

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """What backward needs besides numbers."""
        return self.pairs, self.tokens, self.place, self.local

    def there(self, t: torch.Tensor) -> torch.Tensor:
        """Sends rows to the ranks of their experts, and returns those that arrive, source after source."""
        out = t.new_empty((sum(self.received), *t.shape[1:]))
        dist.all_to_all_single(out, t, self.received, self.sent, group=self.group)
        return out

    def back(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the rows that arrived to where they are from; then a row of NaN for pairs that were not sent."""
        many = sum(self.sent)
        out = t.new_empty((many + 1, *t.shape[1:]))
        dist.all_to_all_single(out[:many], t.contiguous(), self.sent, self.received, group=self.group)
        out[many:].fill_(math.nan)
        return out


def _route(indices: torch.Tensor, own: int, group: Any) -> Route:
    """Exchanges the counts of pairs by expert. own: the experts of a rank."""
    world, k, like = groups.size(group), indices.shape[1], indices.device
    every = torch.arange(world * own, device=like)
    expert = torch.where((indices >= 0) & (indices < world * own), indices, world * own).view(-1)
    sorted_experts, order = expert.sort(stable=True)
    ends = torch.searchsorted(sorted_experts, every.to(expert.dtype), right=True, out_int32=True)
    leaving = torch.diff(ends, prepend=ends.new_zeros(1)).view(world, own)
    coming = leaving.clone()  # in a pretended world a rank receives what it sends
    dist.all_to_all_single(coming, leaving, group=group)
    # The one wait for the GPU: torch.distributed takes the sizes of transfers and results as numbers.
    sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=like)
    pairs = order[: sum(sent)]
    local = torch.arange(own, device=like).repeat(world).repeat_interleave(coming.view(-1), output_size=sum(received))
    return Route(group, sent, received, pairs, pairs // k, place.clamp_(max=sum(sent)).view(indices.shape), local)


def _summed(rows: torch.Tensor, place: torch.Tensor, weights: _Maybe) -> torch.Tensor:
    """Returns each token's sum of its rows, times their weights if there are any, in order and in float32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    y = torch.zeros((place.shape[0], rows.shape[1]), dtype=wide, device=rows.device)
    for j in range(place.shape[1]):
        part = rows[place[:, j]].to(wide)
        y += part if weights is None else part * weights[:, j, None].to(wide)
    return y.to(rows.dtype)


# --- a rank's own experts


def _forward(
    rows: torch.Tensor, local: torch.Tensor, experts: tuple[Any, ...], unit: Unit, keep: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns each row's result, without its weight, and what backward takes."""
    gate_up, down, *biases = experts
    one, choice = torch.ones((rows.shape[0], 1), dtype=torch.float32, device=rows.device), local[:, None]
    if eager(get("moe"), None, rows, *experts) is None:
        given = rows, one, choice, gate_up, down, *biases
        out, *saved = torch.ops.ridgeline.moe_fwd(*given, *unit, keep, _precision(), None)
        return out, saved
    return _alone(rows, one, choice, gate_up, down, *biases, unit), []


def _backward(
    incoming: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor, local: torch.Tensor, experts: Any, saved: Any,
    unit: Unit, wanted: tuple[bool, ...], back: Any,
) -> list[Any]:  # fmt: skip
    """Returns the gradients of rows, shares (n,) and the experts. incoming: the token's gradient, for each row.

    wanted: of rows, of shares, of gate_up and its bias, of down and its bias. back: the registered op."""
    gate_up, down, *biases = experts
    if saved:
        given = incoming, rows, shares[:, None], local[:, None], gate_up, down, *biases
        found = back(*given, *saved, *unit, *wanted, _precision(), None)
        return [found[0], found[1].view(-1) if wanted[1] else found[1], *found[2:]]
    need = *wanted, wanted[2], wanted[3]
    with torch.enable_grad():  # without kernels the results are made again
        own: list[Any] = [
            t if t is None else t.detach().requires_grad_(n)
            for t, n in zip((rows, shares, *experts), need, strict=True)
        ]
        y = _alone(own[0], own[1][:, None], local[:, None], *own[2:], unit)
        of = [n for n, t in enumerate(own) if t is not None and t.requires_grad]
        made = dict(zip(of, torch.autograd.grad(y, [own[n] for n in of], incoming), strict=True))
    return [made.get(n) for n in range(6)]


def _alone(*given: Any) -> torch.Tensor:
    """`ridgeline.moe`, with the biases and the unit by place."""
    *tensors, gate_up_bias, down_bias, unit = given
    return ridgeline.moe(*tensors, gate_up_bias=gate_up_bias, down_bias=down_bias, **unit._asdict())


# --- what may be wrong with a call


def _cast(*given: Any) -> tuple[Any, ...]:
    """Returns the tensors, in autocast's dtype if it is enabled for the first one's device."""
    kind = given[0].device.type if isinstance(given[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return given
    to = torch.get_autocast_dtype(kind)
    kept = None, torch.float64
    return tuple(t if getattr(t, "dtype", None) in kept or not t.is_floating_point() else t.to(to) for t in given)


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _fault(x: Any, weights: Any, indices: Any, gate_up: Any, down: Any, given: list[Any], group: Any) -> str | None:
    """Returns what is wrong with a rank's tensors, or None. given: the biases."""
    biases = {n: t for n, t in zip(("gate_up_bias", "down_bias"), given, strict=True) if t is not None}
    own = {"x": x, "gate_up": gate_up, "down": down} | biases
    for name, t in (own | {"weights": weights, "indices": indices}).items():
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided:
            kind = t.layout if isinstance(t, torch.Tensor) else type(t).__name__
            return f"{name} must be a dense tensor, got {kind}"
        if t.device != x.device:
            return f"x and {name} must be on one device, got {x.device} and {t.device}"
        if name in own and (t.dtype != x.dtype or not t.is_floating_point()):
            return f"x and {name} must have one floating-point dtype, got {x.dtype} and {t.dtype}"
    if gate_up.dim() != 3 or down.dim() != 3 or x.shape[-1:] != gate_up.shape[2:] or 0 in gate_up.shape:
        shapes = f"{tuple(x.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        return f"x must be (..., H), gate_up (E / ranks, 2 I, H) and down (E / ranks, H, I), got {shapes}"
    E, width, H = gate_up.shape
    if width % 2 or down.shape != (E, H, width // 2):
        shapes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        return f"weights must be gate_up (E / ranks, 2 I, H) and down (E / ranks, H, I), got {shapes}"
    whole, rows = indices.dtype in (torch.int32, torch.int64), x.shape[:-1]
    if not whole or indices.shape[:-1] != rows or indices.dim() != x.dim() or not indices.shape[-1]:
        return f"indices must be int32 or int64 {(*rows, 'k')}, got {indices.dtype} {tuple(indices.shape)}"
    if weights.shape != indices.shape or not weights.is_floating_point():
        wanted = f"floating point {tuple(indices.shape)}"
        return f"weights must be {wanted}, got {weights.dtype} {tuple(weights.shape)}"
    for name, bias in biases.items():
        size = E, width if name == "gate_up_bias" else H
        if bias.shape != size:
            return f"{name} must be {size}, got {tuple(bias.shape)}"
    every = E * groups.size(group)
    if readable(indices) and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < every:
        found = f"{int(indices.min())} to {int(indices.max())}"
        return f"indices must be from 0 to {every - 1}, {E} experts on each rank, got {found}"
    return None


def _unit_fault(activation: Any, limit: Any) -> str | None:
    if activation not in ("silu", "swiglu_oai"):
        return f"activation must be 'silu' or 'swiglu_oai', got {activation!r}"
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit < math.inf):
        return f"limit must be None or a finite number above 0, got {limit!r}"
    return None
