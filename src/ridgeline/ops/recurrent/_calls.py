"""The recurrent ops over gates alone: the plain recurrence, the registered torch ops, and their autograd function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Cost, Op, nbytes
from ridgeline.ops.recurrent import _chunks
from ridgeline.select import eager, run

Maybe = torch.Tensor | None


class Given(NamedTuple):
    """The options that all these ops have."""

    initial_state: Maybe
    return_state: bool
    cu_seqlens: Maybe
    inplace: bool
    scale: float | None


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Maybe, u: Maybe, given: Given, scale: float
) -> Any:  # fmt: skip
    """The plain recurrence, a token at a time, in float32 or wider: S = e^g S + k v^T, o = scale S^T q; with u,
    o = scale (S + u k v^T)^T q before the gate."""
    wide = torch.promote_types(q.dtype, torch.float32)
    shared, HV = v.shape[2] // max(q.shape[2], 1), v.shape[2]
    many = q.repeat_interleave(shared, 2).to(wide), k.repeat_interleave(shared, 2).to(wide), v.to(wide)
    decay = None
    if g is not None:
        decay = g.to(wide).repeat_interleave(HV // g.shape[2], 2).exp()
        decay = decay.unsqueeze(-1) if g.dim() == 3 else decay
    bonus = None if u is None else u.to(wide).repeat_interleave(HV // u.shape[0], 0).unsqueeze(-1)
    ends = given.cu_seqlens
    places = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    if ends is not None:
        places = [(0, start, end) for start, end in pairwise(ends.tolist())]
    outputs, last = [], []
    for n, (b, start, end) in enumerate(places):
        S = q.new_zeros((HV, q.shape[3], v.shape[3]), dtype=wide)
        if given.initial_state is not None:
            S = given.initial_state[n].to(wide)
        rows = []
        for t in range(start, end):
            pair = many[1][b, t, :, :, None] * many[2][b, t, :, None, :]
            seen = S + pair * bonus if bonus is not None else None
            S = S + pair if decay is None else S * decay[b, t].unsqueeze(-1) + pair
            rows.append(((S if seen is None else seen) * many[0][b, t, :, :, None]).sum(1))
        outputs.append(torch.stack(rows) if rows else v.new_zeros((0, *v.shape[2:]), dtype=wide))
        last.append(S)
    o = torch.stack(outputs) if ends is None and outputs else torch.cat(outputs)[None] if outputs else v.to(wide)
    state = torch.stack(last) if last else v.new_zeros((0, HV, q.shape[3], v.shape[3]), dtype=wide)
    if not o.numel():  # a gradient of nothing is zero for every argument
        o = o + sum((t.sum() * 0 for t in (q, k, v, g, u) if t is not None), start=o.new_zeros(()))
    return finished((o * scale).to(q.dtype), state, given)


@torch.compiler.assume_constant_result  # torch.compile guards on the setting
def precision() -> str:
    """Returns the precision of float32 products, by PyTorch's setting."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def pairs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Maybe, given: Given, scale: float) -> Any:
    """All pairs of tokens at once, as attention without its softmax; a gate per token or none, no packed sequences."""
    wide, shared = torch.promote_types(q.dtype, torch.float32), v.shape[2] // max(q.shape[2], 1)
    q, k, v = (t.to(wide).transpose(1, 2) for t in (q, k, v))
    q, k = (t.repeat_interleave(shared, 1) for t in (q, k))
    T = q.shape[2]
    G = torch.zeros_like(v[..., 0]) if g is None else g.to(wide).transpose(1, 2).cumsum(2)
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    weights = (G[..., None] - G[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    o = (q @ k.mT * weights) @ v
    last = (k * (G[..., -1:] - G).exp()[..., None]).mT @ v
    if given.initial_state is not None:
        first = given.initial_state.to(wide)
        o, last = o + q * G.exp()[..., None] @ first, last + first * G[..., -1].exp()[..., None, None]
    return finished((o * scale).transpose(1, 2), last, given)


def finished(o: torch.Tensor, state: torch.Tensor, given: Given) -> Any:
    """Returns what a public function does: o, or o and the final state, which `inplace` writes over the first."""
    if given.inplace and given.initial_state is not None:
        state = given.initial_state.copy_(state)
    return (o, state) if given.return_state else o


def one_step(q: torch.Tensor, given: Given) -> bool:
    """Whether a call is a decoder's step that replaces its state in place."""
    return given.inplace and given.initial_state is not None and q.shape[1] == 1 and given.cu_seqlens is None


def stepped(o: torch.Tensor, state: torch.Tensor, given: Given) -> Any:
    """As `finished`, where a kernel has written over the first state."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version((state,))
    return (o, state) if given.return_state else o


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? u, Tensor? first, Tensor? ends, float scale, str precision"


def _gathered(t: Maybe, like: Maybe) -> Maybe:
    """Sums a gradient per value head over those that share a head, in the dtype of what it is the gradient of."""
    if t is None or like is None:
        return None
    if t.shape != like.shape:
        at = like.dim() - t.dim() + (2 if like.dim() > 2 else 0)
        t = t.unflatten(at, (like.shape[at], -1)).sum(at + 1)
    return t.to(like.dtype)


def engine(name: str) -> Callable[..., Any]:
    """Registers `<name>_fwd` and `<name>_bwd` and returns a function of q, k, v, g, u, state, cu_seqlens, scale, impl
    that returns o and the final state, both differentiable."""
    registered: dict[str, Op] = {}

    def op() -> Op:
        from ridgeline.op import get

        return registered.setdefault(name, get(name))

    @kernel_op(f"{name}_fwd({_INPUTS}, str? impl) -> (Tensor, Tensor)")
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = q.shape[0] if rest[3] is None else rest[3].numel() - 1
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
        last = torch.empty(shape, dtype=torch.float32, device=v.device)
        run(op(), "fwd", rest[-1], (o, last), q, k, v, *rest[:-1])
        return o, last

    @kernel_op(
        f"{name}_bwd(Tensor do, Tensor? dlast, {_INPUTS}, str? impl) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    def backward(
        do: torch.Tensor, dlast: Maybe, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Maybe, u: Maybe,
        first: Maybe, *rest: Any
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """The gradients of q, k, v, g, u and the first state; empty tensors for those that are not there."""
        do = do if do.stride(-1) == 1 else do.contiguous()
        dlast = dlast if dlast is None or dlast.is_contiguous() else dlast.contiguous()
        B, T, HV, K = *v.shape[:3], q.shape[3]
        fresh: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        kind = q.dtype if q.shape[2] == HV else torch.float32
        dq, dk = (torch.empty((B, T, HV, K), dtype=kind, device=q.device) for _ in range(2))
        dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
        dg = None if g is None else torch.empty((B, T, HV, K)[: g.dim()], **fresh)
        du = None if u is None else torch.empty((HV, K), **fresh)
        dfirst = None if first is None else torch.empty(first.shape, **fresh)
        run(op(), "bwd", rest[-1], (dq, dk, dv, dg, du, dfirst), do, dlast, q, k, v, g, u, first, *rest[:-1])  # type: ignore[arg-type]
        found = _gathered(dq, q), _gathered(dk, k), dv, _gathered(dg, g), _gathered(du, u), dfirst
        return tuple([torch.empty(0, **fresh) if t is None else t for t in found])

    class Recurrent(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*args[:7])
            ctx.facts = args[7:]
            ctx.set_materialize_grads(False)
            return forward(*args)

        @staticmethod
        @first_order
        def backward(ctx: Any, do: Any, dlast: Any) -> Any:
            if do is None and dlast is None:
                return (None,) * 10
            saved = ctx.saved_tensors
            do = torch.zeros_like(saved[2]) if do is None else do
            grads = backward(do, dlast, *saved, *ctx.facts)
            there = [g if t is not None else None for g, t in zip(grads, saved[:6], strict=True)]
            return *there, *(None,) * 4

    @kernel_op(
        f"{name}_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? u, Tensor(a!) state, float scale, str? impl) "
        "-> Tensor"
    )
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        """o of one token; the state is replaced in place."""
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        run(op(), "fwd", rest[-1], (o, rest[2]), q, k, v, *rest[:3], None, rest[3], "ieee")
        return o

    def call(*args: Any, inplace: bool = False) -> Any:
        if inplace:
            return step(*args[:6], args[7], args[9]), args[5]
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in args[:6]]):
            return differentiate(Recurrent, *args)
        return forward(*args)

    return call


def served(op: Op, through: Any, impl: str | None, q: Any, k: Any, v: Any, g: Maybe, u: Maybe, given: Given,
           scale: float) -> Any:  # fmt: skip
    """Runs a call by the implementation that serves it."""
    plain = eager(op, impl, q, k, v)
    if plain is not None:
        return recurrence(q, k, v, g, u, given, scale)
    first, here = given.initial_state, one_step(q, given)
    first = first if first is None or here or first.is_contiguous() else first.contiguous()
    if g is not None and g.dim() == 4 and g.stride(-1) != 1:
        g = g.contiguous()
    u = u if u is None or u.is_contiguous() else u.contiguous()
    if here:
        o, state = through(q, k, v, g, u, first, None, scale, "", impl, inplace=True)
        return stepped(o, state, given)
    o, state = through(q, k, v, g, u, first, given.cu_seqlens, scale, precision(), impl)
    return finished(o, state, given)


def refusal(*args: Any, **_: Any) -> str | None:
    """Why the kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    for t in args[:5]:  # the state, where it is given, has been checked
        if isinstance(t, torch.Tensor) and t.dim() == 4 and t.dtype == args[0].dtype and t.shape[-1] > _chunks.MOST:
            return f"a head has at most {_chunks.MOST} columns, got {t.shape[-1]}"
        if isinstance(t, torch.Tensor) and t.dim() == 4 and t.stride(-1) != 1 and t.shape[-1] > 1:
            return "the last dimension must be contiguous"
    return None


def cost(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *gates: Maybe, **given: Any) -> tuple[Cost, Cost]:
    """Everything is read once and o written once; products in chunks of 64, a multiply and an add each."""
    some = [t for t in (q, k, v, *gates) if t is not None]
    first, (B, T, HV, V), K = given.get("initial_state"), v.shape, q.shape[3]
    state = 0 if first is None else nbytes(first)
    kept = 4 * B * HV * K * V if given.get("return_state") else 0
    pairs = B * T * HV
    forward = Cost(nbytes(*some) + state, nbytes(v) + kept, pairs * (2 * 64 * (K + V) + 4 * K * V))
    flops = pairs * (5 * 64 * (K + V) + 12 * K * V)
    return forward, Cost(nbytes(*some, v) + state + kept, nbytes(*some) + state, flops)


KERNEL: dict[str, Any] = {
    "kind": "triton", "fwd": _chunks.fwd, "bwd": _chunks.bwd, "supports": refusal, "served": True, "gain": 2.0,
}  # fmt: skip
IDEA = "chunks as matrix products, the state in registers; each gradient is the same scan with other roles"


def formulas(name: str, op_cost: Any) -> dict[str, Any]:
    """Returns formulas for FlopCounterMode by the names of an op's registered ops."""
    step = {f"{name}_step": lambda q, k, v, *_: 6 * k.shape[3] * v.numel()}
    return step | dict(zip((f"{name}_fwd", f"{name}_bwd"), counted(op_cost), strict=True))


def counted(op_cost: Any) -> Any:
    """Returns formulas for FlopCounterMode from an op's cost, by the registered ops' arguments."""
    return (
        lambda q, k, v, g, u, *_: op_cost(q, k, v)[0].flops,
        lambda do, dlast, q, k, v, g, u, *_: op_cost(q, k, v)[1].flops,
    )
