"""What the delta ops share around their engine: the plain recurrence, costs, and what serves a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ridgeline.op import Cost, Op, nbytes
from ridgeline.ops.recurrent.common.calls import (
    Engine,
    Found,
    Given,
    decays,
    finished,
    one_step,
    per_head,
    precision,
    refusal,
    stepped,
    unrolled,
)
from ridgeline.ops.recurrent.triton import step
from ridgeline.ops.recurrent.triton.delta_chunks import DeltaCall, delta_bwd, delta_fwd
from ridgeline.select import eager

Maybe = torch.Tensor | None
EPSILON = 1e-6  # beside a squared norm


class Delta(NamedTuple):
    """The arguments of a delta op: beta for the delta rule, a and b for RWKV-7."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: Maybe = None
    a: Maybe = None
    b: Maybe = None
    normalize: bool = False


def unit(t: torch.Tensor) -> torch.Tensor:
    """Rows over their L2 norm, in float32 or wider."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return wide * (wide.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def delta_recurrence(args: Delta, given: Given, scale: float) -> Any:
    """The plain recurrence in float32 or wider, a token at a time: S' = e^g S, S = S' + beta k (v - S'^T k)^T; with a
    and b, S = e^g S + b (a^T S) + k v^T."""
    HV, wide, kind = args.v.shape[2], torch.promote_types(args.v.dtype, torch.float32), args.v.dtype
    q, k = (unit(args.q), unit(args.k)) if args.normalize else (args.q, args.k)

    def corrected(S: torch.Tensor, k: Any, v: Any, decay: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept, key = S * decay.unsqueeze(-1), k.unsqueeze(-1)
        missing = v.unsqueeze(-2) - (key * kept).sum(-2, keepdim=True)
        S = kept + key * missing * beta.unsqueeze(-1)
        return S, S

    def low(S: torch.Tensor, k: Any, v: Any, decay: Any, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        read = (a.unsqueeze(-1) * S).sum(-2, keepdim=True)
        S = S * decay.unsqueeze(-1) + b.unsqueeze(-1) * read + k.unsqueeze(-1) * v.unsqueeze(-2)
        return S, S

    def all_heads(t: torch.Tensor) -> torch.Tensor:
        return per_head(t, HV).to(wide)

    more = (args.a, args.b) if args.beta is None else (args.beta.unsqueeze(-1),)
    decay = decays(args.g, HV, wide)
    assert decay is not None
    tokens = all_heads(k), args.v.to(wide), decay, *[all_heads(t) for t in more if t is not None]
    others = args.k, args.g, args.beta, args.a, args.b
    found = unrolled(low if args.beta is None else corrected, q, args.v, tokens, others, given, scale)
    return (found[0].to(kind), found[1]) if given.return_state else found.to(kind)


def delta_found(op: Op, impl: str | None, args: Delta, given: Given, usual: float) -> Found:
    """usual: the scale if none is given."""
    plain = eager(op, impl, args.q, args.k, args.v, args.a, args.b)
    scale, g = usual if given.scale is None else float(given.scale), args.g
    return Found(plain, scale, plain is None and one_step(args.q, given), g.dim() < 4 or g.stride(-1) == 1)


def delta_served(
    through: Engine, known: Found, impl: str | None, args: tuple[Any, ...], normalize: bool, first: Maybe,
    return_state: bool, ends: Maybe, inplace: bool,
) -> Any:  # fmt: skip
    """Runs a call by the implementation that serves it. args: those of `Delta` that are tensors."""
    plain, scale, step, tidy, sure = known
    if plain is not None:
        return delta_recurrence(
            Delta(*args)._replace(normalize=normalize), Given(first, return_state, ends, inplace, scale), scale
        )
    if not tidy:
        args = *args[:3], args[3].contiguous(), *args[4:]
    if step:
        return stepped(through.step(*args, first, normalize, scale, impl, sure), first, return_state, sure)
    state = first if first is None or first.is_contiguous() else first.contiguous()
    o, state = through.run(*args, state, ends, normalize, scale, precision(), impl)
    return finished(o, state, Given(first, return_state, ends, inplace, scale))


def delta_cost(args: Delta, given: dict[str, Any]) -> tuple[Cost, Cost]:
    """Everything is read once and o written once; products in chunks of 64, a multiply and an add each."""
    some = [t for t in args[:7] if t is not None]
    first, (B, T, HV, V), K = given.get("initial_state"), args.v.shape, args.k.shape[3]
    state = 0 if first is None else nbytes(first)
    kept = 4 * B * HV * K * V if given.get("return_state") else 0
    forward = B * T * HV * (64 * (3 * K + 2 * V) + 6 * K * V + (64 * 64) // 3)
    backward = Cost(nbytes(*some, args.v) + state + kept, nbytes(*some) + state, forward * 5 // 2)
    return Cost(nbytes(*some) + state, nbytes(args.v) + kept, forward), backward


def delta_flops(name: str) -> dict[str, Any]:
    """Formulas for FlopCounterMode, by the registered ops' arguments."""
    return {
        f"{name}_fwd": lambda *args: delta_cost(Delta(*args[:7]), {})[0].flops,
        f"{name}_bwd": lambda *args: delta_cost(Delta(*args[2:9]), {})[1].flops,
        f"{name}step": lambda q, k, v, *_: 6 * k.shape[3] * v.numel(),
    }


def _start(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    """Chunks, or a decoder's step."""
    call = DeltaCall(*inputs)
    if call.q.shape[1] == 1 and call.ends is None:
        token = step.Token(call.q, call.k, call.v, call.g, None, call.a, call.b, call.beta, call.normalize)
        step.start(o, last, token, call.first, call.scale)
    else:
        delta_fwd(o, last, *inputs)


DELTA_KERNEL: dict[str, Any] = {
    "kind": "triton", "fwd": _start, "bwd": delta_bwd, "supports": refusal, "served": True, "gain": 2.0,
}  # fmt: skip
DELTA_IDEA = "chunks solved by halves, states in registers; each chunk's gradients from the states around it"
