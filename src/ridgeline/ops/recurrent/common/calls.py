"""The recurrent ops over gates alone: the plain recurrence, the registered torch ops, and their autograd function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from ridgeline.boundary import Function, bumped, differentiate, first_order, kernel_op, written
from ridgeline.op import Cost, Implementation, Op, nbytes
from ridgeline.ops.recurrent.triton import channel_chunks, chunks
from ridgeline.replay import Sure
from ridgeline.select import eager, run

Maybe = torch.Tensor | None
AXIS = 65535  # programs of a grid's second axis, which counts sequences and heads
SEGMENT = 64  # tokens of the plain recurrence between the states that backward keeps


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
    wide, HV = torch.promote_types(q.dtype, torch.float32), v.shape[2]
    decay = decays(g, HV, wide)
    bonus = None if u is None else u.to(wide).repeat_interleave(HV // u.shape[0], 0).unsqueeze(-1)

    def step(
        S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: Maybe = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pair = k.unsqueeze(-1) * v.unsqueeze(-2)
        seen = S + pair * bonus if bonus is not None else None
        S = S + pair if kept is None else S * kept.unsqueeze(-1) + pair
        return S, S if seen is None else seen

    tokens = per_head(k, HV).to(wide), v.to(wide), *([] if decay is None else [decay])
    return unrolled(step, q, v, tokens, (k, g, u), given, scale)


def per_head(t: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats what value heads share: dimension 2."""
    return t.repeat_interleave(heads // max(t.shape[2], 1), 2)


def decays(g: Maybe, heads: int, wide: torch.dtype) -> Maybe:
    """e^g, (B, T, heads, 1 or K)."""
    if g is None:
        return None
    decay = per_head(g.to(wide), heads).exp()
    return decay.unsqueeze(-1) if g.dim() == 3 else decay


def unrolled(
    step: Any, q: torch.Tensor, v: torch.Tensor, tokens: tuple[torch.Tensor, ...], others: Any, given: Given,
    scale: float,
) -> Any:  # fmt: skip
    """Runs step(state, a token's rows), which returns the next state and the one that q reads, over all tokens.

    tokens: (B, T, HV, columns). Backward computes segments of SEGMENT tokens again, so that few states are kept."""
    wide, HV, ends = torch.promote_types(q.dtype, torch.float32), v.shape[2], given.cu_seqlens
    tokens = per_head(q, HV).to(wide), *tokens
    state = v.new_zeros((q.shape[0] if ends is None else ends.numel() - 1, HV, q.shape[3], v.shape[3]), dtype=wide)
    if given.initial_state is not None:
        state = given.initial_state.to(wide)

    def walk(S: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for query, *token in zip(*[t.unbind(-3) for t in parts], strict=True):
            S, seen = step(S, *token)
            rows.append((seen * query.unsqueeze(-1)).sum(-2))
        return S, torch.stack(rows, -3)

    def run(S: torch.Tensor, *sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        T, outputs = sequence[0].shape[-3], []
        again = torch.is_grad_enabled() and T > SEGMENT
        for parts in zip(*[t.split(SEGMENT, -3) for t in sequence], strict=True) if T else ():
            S, rows = checkpoint(walk, S, *parts, use_reentrant=False) if again else walk(S, *parts)
            outputs.append(rows)
        return S, torch.cat(outputs, -3) if outputs else v.new_zeros((*S.shape[:-3], 0, *v.shape[2:]), dtype=wide)

    if ends is None:
        state, o = run(state, *tokens)
    else:
        found = [run(state[n], *[t[0, i:j] for t in tokens]) for n, (i, j) in enumerate(pairwise(ends.tolist()))]
        state = torch.stack([S for S, _ in found]) if found else state
        o = torch.cat([rows for _, rows in found])[None] if found else v.to(wide)
    if not o.numel():  # a gradient of nothing is zero for every argument
        o = o + sum((t.sum() * 0 for t in (q, v, *others) if t is not None), start=o.new_zeros(()))
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


def stepped(o: torch.Tensor, state: Any, return_state: bool, sure: Sure | None) -> Any:
    """As `finished`, where a kernel has written over the first state. sure: what a guard knows of the call."""
    if sure is None:
        written(state)
    else:
        bumped((state,))
    return (o, state) if return_state else o


def _gathered(t: Maybe, like: Maybe) -> Maybe:
    """Sums a gradient per value head over those that share a head, in the dtype of what it is the gradient of."""
    if t is None or like is None:
        return None
    if t.shape != like.shape:
        at = like.dim() - t.dim() + (2 if like.dim() > 2 else 0)
        t = t.unflatten(at, (like.shape[at], -1)).sum(at + 1)
    return t.to(like.dtype)


def parts_of(grad: torch.Tensor, heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns room for the parts of a gradient of q or k: itself, or a part for each of `heads` value heads.

    dtype: the data's. Parts are float32, but for bfloat16 data where eight heads or more share a head: then a part's
    rounding is one of many, and the sum's own weighs as much, unless the parts cancel. Emulated with 64 heads, the
    error is 1.4 times that of float32 parts where parts are independent, and 9.8 times where their mean is a tenth."""
    B, T, H, K = grad.shape
    dtype = dtype if dtype == torch.bfloat16 and heads >= 8 * H else torch.float32
    return grad if H == heads else torch.empty((B, T, heads, K), dtype=dtype, device=grad.device)


def join_parts(grad: torch.Tensor, parts: torch.Tensor) -> None:
    """Sums the parts of a gradient over the heads that share its head."""
    if parts is not grad:
        grad.copy_(parts.unflatten(2, (grad.shape[2], -1)).sum(3, dtype=torch.float32))


def _in_place(name: str, op: Callable[[], Op], tensors: str, options: str, others: int) -> Any:
    """Registers `<name>_step`: o of one token; the state is replaced in place."""
    arguments = f"{tensors.replace('Tensor? first', 'Tensor(a!) state')}, {options}float scale, str? impl"

    @kernel_op(f"{name}_step({arguments}) -> Tensor")
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        some, state, (*facts, impl) = rest[:others], rest[others], rest[others + 1 :]
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        run(op(), "fwd", impl, (o, state), q, k, v, *some, state, None, *facts, "ieee")
        return o

    return step


class Engine(NamedTuple):
    """The functions of an op's registered torch ops.

    run: of q, k, v, others, state, cu_seqlens, options, scale, precision and impl; o and the final state, both
        differentiable. step: of q, k, v, others, state, options, scale and impl; o of one token, and the state is
        replaced in place."""

    run: Callable[..., Any]
    step: Callable[..., Any]


def engine(
    name: str, others: tuple[str, ...] = ("g", "u"), narrow: tuple[str, ...] = (), options: str = "", shared: bool =
    False,
) -> Engine:  # fmt: skip
    """Registers `<name>_fwd`, `<name>_bwd` and `<name>_step`.

    others: tensors or None. narrow: those whose gradients have their dtype if it is that of q and nothing is shared.
    options: more arguments of the ops.
    shared: launchers sum the gradients of q and k over the value heads that share them."""
    registered: dict[str, Op] = {}
    tensors = f"Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {n}' for n in others)}, Tensor? first"
    arguments = f"{tensors}, Tensor? ends, {options}float scale, str precision, str? impl"
    count = 4 + len(others)  # arguments with gradients

    def op() -> Op:
        from ridgeline.op import get

        return registered.setdefault(name, get(name))

    @kernel_op(f"{name}_fwd({arguments}) -> (Tensor, Tensor)")
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ends = rest[len(others) + 1]
        sequences = q.shape[0] if ends is None else ends.numel() - 1
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
        last = torch.empty(shape, dtype=torch.float32, device=v.device)
        run(op(), "fwd", rest[-1], (o, last), q, k, v, *rest[:-1])
        return o, last

    @kernel_op(f"{name}_bwd(Tensor do, Tensor? dlast, {arguments}) -> ({', '.join(['Tensor'] * count)})")
    def backward(
        do: torch.Tensor, dlast: Maybe, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k, v, others and the first state; empty tensors for those that are not there."""
        do = do if do.stride(-1) == 1 else do.contiguous()
        dlast = dlast if dlast is None or dlast.is_contiguous() else dlast.contiguous()
        B, T, HV, K = *v.shape[:3], q.shape[3]
        fresh: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        heads = q.shape[2] if shared else HV
        kind = q.dtype if q.shape[2] == heads else torch.float32
        dq, dk = (torch.empty((B, T, heads, K), dtype=kind, device=q.device) for _ in range(2))
        made: list[Any] = [dq, dk, torch.empty(v.shape, dtype=v.dtype, device=q.device)]
        for n, t in zip(others, rest, strict=False):
            shape = None if t is None else (HV, K)[: t.dim()] if t.dim() < 3 else (B, T, HV, K)[: t.dim()]
            same = n in narrow and t is not None and t.dim() == 4 and t.dtype == q.dtype and t.shape[2] == heads
            dtype = q.dtype if same else torch.float32
            made.append(None if shape is None else torch.empty(shape, dtype=dtype, device=q.device))
        first = rest[len(others)]
        made.append(None if first is None else torch.empty(first.shape, **fresh))
        run(op(), "bwd", rest[-1], tuple(made), do, dlast, q, k, v, *rest[:-1])
        found = [_gathered(t, like) for t, like in zip(made[:-1], (q, k, v, *rest), strict=False)]
        return tuple([torch.empty(0, **fresh) if t is None else t for t in (*found, made[-1])])

    class Recurrent(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.save_for_backward(*args[: count + 1])
            ctx.facts = args[count + 1 :]
            ctx.set_materialize_grads(False)
            return forward(*args)

        @staticmethod
        @first_order
        def backward(ctx: Any, do: Any, dlast: Any) -> Any:
            if do is None and dlast is None:
                return (None,) * (count + 1 + len(ctx.facts))
            saved = ctx.saved_tensors
            do = torch.zeros_like(saved[2]) if do is None else do
            grads = backward(do, dlast, *saved, *ctx.facts)
            there = [g if t is not None else None for g, t in zip(grads, saved[:count], strict=True)]
            return *there, *(None,) * (1 + len(ctx.facts))

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in args[:count]]):
            return differentiate(Recurrent, *args)
        return forward(*args)

    return Engine(call, _in_place(name, op, tensors, options, len(others)))


class Found(NamedTuple):
    """What a look at a call's arguments found. step: whether it is a decoder's step, in place. tidy: whether kernels
    take the gates as they are. sure: what a guard knows of the call."""

    plain: Implementation | None
    scale: float
    step: bool
    tidy: bool = True
    sure: Sure | None = None


def found(
    op: Op, impl: str | None, given: Given, q: Any, k: Any, v: Any, usual: float, g: Maybe = None, u: Maybe = None
) -> Found:  # fmt: skip
    """usual: the scale if none is given."""
    plain, scale = eager(op, impl, q, k, v), usual if given.scale is None else float(given.scale)
    tidy = (g is None or g.dim() < 4 or g.stride(-1) == 1) and (u is None or u.is_contiguous())
    return Found(plain, scale, plain is None and one_step(q, given), tidy)


def served(
    through: Engine, known: Found, impl: str | None, q: Any, k: Any, v: Any, g: Maybe, u: Maybe, first: Maybe,
    return_state: bool, ends: Maybe, inplace: bool,
) -> Any:  # fmt: skip
    """Runs a call by the implementation that serves it."""
    plain, scale, step, tidy, sure = known
    if plain is not None:
        return recurrence(q, k, v, g, u, Given(first, return_state, ends, inplace, scale), scale)
    if not tidy:
        g = g.contiguous() if g is not None and g.dim() == 4 and g.stride(-1) != 1 else g
        u = None if u is None else u.contiguous()
    if step:
        return stepped(through.step(q, k, v, g, u, first, scale, impl, sure), first, return_state, sure)
    state = first if first is None or first.is_contiguous() else first.contiguous()
    o, state = through.run(q, k, v, g, u, state, ends, scale, precision(), impl)
    return finished(o, state, Given(first, return_state, ends, inplace, scale))


def refusal(*args: Any, **_: Any) -> str | None:
    """Why the kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    for t in args[:5]:  # the state, where it is given, has been checked
        if isinstance(t, torch.Tensor) and t.dim() == 4 and t.dtype == args[0].dtype and t.shape[-1] > chunks.MOST:
            return f"a head has at most {chunks.MOST} columns, got {t.shape[-1]}"
        if isinstance(t, torch.Tensor) and t.dim() == 4 and t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel():
            return "the last dimension must be contiguous"
    ends = next((a for a in args if isinstance(a, torch.Tensor) and a.dtype in (torch.int32, torch.int64)), None)
    sequences = args[0].shape[0] if ends is None else max(args[0].shape[0], ends.numel() - 1)
    rows = [t for t in args[:5] if isinstance(t, torch.Tensor) and t.dim() == 4 and t.shape[:2] == args[0].shape[:2]]
    heads = max([t.shape[2] for t in rows], default=1)
    if sequences * heads > AXIS:
        return f"it takes at most {AXIS} sequences times heads, got {sequences} times {heads}"
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


def _engine(q: torch.Tensor, g: Maybe, steps: bool) -> Any:
    """The kernels of a call: those of gates per channel in half precision, or the scan of all others."""
    by_channel = g is not None and g.dim() == 4 and q.dtype != torch.float32
    return channel_chunks if by_channel and not steps else chunks


def _fwd(o: torch.Tensor, last: torch.Tensor, *inputs: Any) -> None:
    q, g, ends = inputs[0], inputs[3], inputs[6]
    _engine(q, g, q.shape[1] == 1 and ends is None).fwd(o, last, *inputs)


def _bwd(*args: Any) -> None:
    """args: the gradients, do, dlast, and then a launcher's inputs."""
    _engine(args[8], args[11], False).bwd(*args)


KERNEL: dict[str, Any] = {
    "kind": "triton", "fwd": _fwd, "bwd": _bwd, "supports": refusal, "served": True, "gain": 2.0,
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
