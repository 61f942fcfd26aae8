"""Attention over a sequence that is split over the ranks of a group, by `attention`'s own kernels.

    ring      keys and values go round, heads not repeated; float32 partial results merge, dk and dv travel in float32
    gathered  one all-gather of keys and values, one reduce-scatter of their float32 gradients
    ulysses   two all-to-alls: each rank gets whole sequences of its share of the heads

In the ring a hop's transfer runs under the hop before. docs/notes/ring_attention.md has the bytes and calls of each.
Sources: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, 2023 (arXiv:2310.01889); Jacobs et al.,
DeepSpeed Ulysses, 2023 (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

import ridgeline
from ridgeline.boundary import Function, differentiate, first_order
from ridgeline.parallel import groups, packing
from ridgeline.parallel.agreement import agree
from ridgeline.parallel.blocks import (
    FREE,
    Given,
    add_sinks,
    block_backward,
    block_forward,
    merge,
    sinks_backward,
)
from ridgeline.parallel.ring import pass_on
from ridgeline.parallel.sequence import AllToAll, in_order, layout_fault, starts


class Facts(NamedTuple):
    """What a call is, apart from its tensors."""

    group: Any
    layout: str
    left: int
    right: int
    given: Given
    gathered: bool
    ends: packing.Ends | None  # of packed sequences

    def pieces(self, rank: int, source: int, length: int) -> tuple[Any, ...]:
        """Returns the calls of a rank's queries with a source's keys."""
        world = groups.size(self.group)
        mine, size = starts(rank, world, length, self.layout)
        theirs, _ = starts(source, world, length, self.layout)
        return packing.packed_pieces(mine, theirs, size, self.left, self.right, self.ends)

    def hops(self, length: int) -> int:
        """Returns how often keys move on until every rank has seen all that it needs."""
        return _hops(self._replace(group=None), groups.size(self.group), length)


@lru_cache(maxsize=256)
def _hops(facts: Facts, world: int, length: int) -> int:
    needed = [0]
    for rank in range(world):
        mine, size = starts(rank, world, length, facts.layout)
        for hop in range(1, world):
            theirs, _ = starts((rank - hop) % world, world, length, facts.layout)
            if packing.packed_pieces(mine, theirs, size, facts.left, facts.right, facts.ends):
                needed.append(hop)
    return max(needed)


class _Split(Function):
    """q, k and v are a rank's tokens, (batch, heads, tokens, D)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, facts: Facts) -> Any:
        wide = torch.promote_types(q.dtype, torch.float32)
        o = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        for part, there in _blocks(torch.stack((k, v)), facts):
            for p in part:
                keys, values = there[:, :, :, p.k]
                made = block_forward(q[:, :, p.q], keys, values, p, facts.given)
                merge(o[:, :, p.q], lse[:, :, p.q], *made)
        if sinks is not None:
            add_sinks(o, lse, sinks)
        out = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.facts = facts
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        facts: Facts = ctx.facts
        do = torch.zeros_like(o) if do is None else do if do.stride(-1) == 1 else do.contiguous()
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

        def added(part: Any, there: torch.Tensor) -> torch.Tensor:
            """Adds one source's part of dq, and returns its dk and dv."""
            dkv = torch.zeros(there.shape, dtype=lse.dtype, device=q.device)
            for p in part:
                slopes = do[:, :, p.q], None if dlse is None else dlse[:, :, p.q]
                keys, values = there[:, :, :, p.k]
                given = q[:, :, p.q], keys, values, o[:, :, p.q], lse[:, :, p.q]
                made = block_backward(*slopes, *given, p, facts.given)
                dq[:, :, p.q] += made[0]
                dkv[0, :, :, p.k] += made[1]
                dkv[1, :, :, p.k] += made[2]
            return dkv

        kv = torch.stack((k, v))
        dk, dv = (_gathered_backward if facts.gathered else _ring_backward)(kv, facts, added)
        dsinks = sinks_backward(do, dlse, o, lse, sinks) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _blocks(kv: torch.Tensor, facts: Facts) -> Any:
    """Yields each source's keys and values, (2, batch, heads, tokens, D), with the pieces that this rank needs."""
    world, rank, length = groups.size(facts.group), groups.rank(facts.group), kv.shape[3]
    everyone = _all(kv, facts.group) if facts.gathered else None
    hops = world - 1 if facts.gathered else facts.hops(length)
    for hop in range(hops + 1):
        source = (rank - hop) % world
        arriving = pass_on(kv, facts.group) if everyone is None and hop < hops else None
        yield facts.pieces(rank, source, length), (kv if everyone is None else everyone[source])
        if arriving is not None:
            kv = arriving.wait()


def _all(kv: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns all ranks' keys and values, (ranks, *kv.shape)."""
    if groups.size(group) == 1:
        return kv[None]
    out = kv.new_empty((groups.size(group) * kv.numel(),))
    groups.all_gather(out, kv.view(-1), group=group)
    return out.view(-1, *kv.shape)


def _ring_backward(kv: torch.Tensor, facts: Facts, added: Any) -> torch.Tensor:
    """Returns dk and dv. Sums for a source begin at the rank after it, go round with its keys, and end at home."""
    hops, own, travelling = facts.hops(kv.shape[3]), None, None
    for hop, (part, there) in enumerate(_blocks(kv, facts)):
        made = added(part, there)
        if hop == 0:
            own = made
            continue
        if travelling is not None:
            made += travelling.wait()
        travelling = pass_on(made, facts.group) if hop < hops else pass_on(made, facts.group, -hops)
    assert own is not None
    return own if travelling is None else own.add_(travelling.wait())


def _gathered_backward(kv: torch.Tensor, facts: Facts, added: Any) -> torch.Tensor:
    """Returns dk and dv, each rank's from all ranks in one reduce-scatter."""
    world, rank = groups.size(facts.group), groups.rank(facts.group)
    made = [added(part, there) for part, there in _blocks(kv, facts)]
    if world == 1:
        return made[0]
    whole = torch.stack([made[(rank - source) % world] for source in range(world)])
    out = whole.new_empty((kv.numel(),))
    groups.reduce_scatter(out, whole.view(-1), group=facts.group)
    return out.view(kv.shape)


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, cu_seqlens: Any = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, layout: str = "zigzag",
    scale: float | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns `ridgeline.attention` of a sequence that is split over a group's ranks, for this rank's queries.

    Keys and values go round the ranks, and each hop's transfer runs under the block before it. Gradients flow to q, k
    and v. Partial results and the travelling gradients are float32, so that o and gradients are as exact as on one GPU.

    q: (B, Hq, S / ranks, D); k, v: (B, Hkv, S / ranks, D), as in `attention`; the same on every rank.
    group: a process group; None means all ranks.
    layout: which tokens a rank holds (see `sequence.shard`). "zigzag" gives ranks equal work if causal; with a window,
    "plain" stops after the last rank that the window reaches.
    cu_seqlens: where packed sequences begin in the row of all ranks' tokens, and its end, as in `attention_varlen`:
    tuple of ints, or a tensor, for which the host waits if it is on a GPU. B is then 1. Ranks may begin anywhere in a
    sequence. The ring stops after the last rank that a sequence reaches.
    causal, window, scale, softcap, sinks, return_lse: as in `attention`, over positions in the whole sequence. A rank's
    gradient of sinks is that of its own queries, as of any weight.
    On a GPU, blocks run in `attention`'s kernels, on Hopper in `gluon`.
    Raises RidgelineError, on every rank, if the arguments do not match the above or each other. On a GPU the ranks
    compare their calls only with RIDGELINE_CHECK=1.
    """
    facts = group, causal, window, layout, scale, softcap
    return _split("ring_attention", q, k, v, sinks, cu_seqlens, facts, return_lse, False)


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, cu_seqlens: Any = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, layout: str = "zigzag",
    scale: float | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`ring_attention` with one all-gather of keys and values instead of a ring: fewer calls, more memory.

    Every rank holds all keys and values, and in backward their float32 gradients."""
    facts = group, causal, window, layout, scale, softcap
    return _split("gathered_attention", q, k, v, sinks, cu_seqlens, facts, return_lse, True)


def _split(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, cu_seqlens: Any, given: tuple[Any, ...],
    return_lse: bool, gathered: bool,
) -> Any:  # fmt: skip
    group, causal, window, layout, scale, softcap = given
    q, k, v = _cast(q, k, v)
    wrong = layout_fault(layout) or _fault(q, k, v, causal, window, scale, softcap)
    ends = None if cu_seqlens is None else packing.read(cu_seqlens)
    wrong = wrong or _packed_fault(q, sinks, cu_seqlens, ends, group)
    if not wrong and not k.shape[2] == q.shape[2] > 0:
        wrong = f"q and k must have the same number of tokens, at least 1, got {q.shape[2]} and {k.shape[2]}"
    if not wrong and layout == "zigzag" and q.shape[2] % 2:
        wrong = f"layout 'zigzag' needs an even number of tokens on each rank, got {q.shape[2]}"
    agree(name, group, q, wrong, **_common(q, k, given[1:]), **_marks(ends, sinks))
    left, right = [FREE if w is None or w < 0 else w for w in window or (None, None)]
    options = Given(q.shape[-1] ** -0.5 if scale is None else float(scale), float(softcap or 0))
    facts = Facts(group, layout, left, 0 if causal else right, options, gathered, ends)
    k, v = [t if t.stride(-1) == 1 else t.contiguous() for t in (k, v)]
    o, lse = differentiate(_Split, q if q.stride(-1) == 1 else q.contiguous(), k, v, sinks, facts)
    return (o, lse) if return_lse else o


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    cu_seqlens: Any = None,
    layout: str = "plain",
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Returns `ridgeline.attention` of a split sequence: an all-to-all gives each rank whole sequences of some heads.

    q: (B, Hq, S / ranks, D); k, v: (B, Hkv, S / ranks, D); Hq and Hkv are multiples of the ranks.
    cu_seqlens, sinks: as in `ring_attention`, but a rank's gradient of sinks is that of its own heads.
    layout: which tokens a rank holds (see `sequence.shard`). options: of `attention`, but for return_lse.
    The result is `attention`'s own, bit for bit. Raises RidgelineError, on every rank, if heads do
    not divide or the arguments do not match.
    """
    world = groups.size(group)
    q, k, v = _cast(q, k, v)
    allowed = "causal", "scale", "window", "window_align", "prefix", "softcap", "deterministic", "impl"
    strange = [name for name in options if name not in allowed]
    wrong = layout_fault(layout) or _fault(q, k, v, options.get("causal", False), options.get("window"))
    if strange:
        wrong = f"it takes attention's options {', '.join(allowed)}, got {', '.join(strange)}"
    ends = None if cu_seqlens is None else packing.read(cu_seqlens)
    wrong = wrong or _packed_fault(q, sinks, cu_seqlens, ends, group)
    if not wrong and (q.shape[1] % world or k.shape[1] % world):
        both = f"{q.shape[1]} and {k.shape[1]}"
        wrong = f"the heads of q and of k must be multiples of the {world} ranks, got {both}; ring_attention takes any"
    if not wrong and layout == "zigzag" and q.shape[2] % 2:
        wrong = f"layout 'zigzag' needs an even number of tokens on each rank, got {q.shape[2]}"
    agree("ulysses_attention", group, q, wrong, **_common(q, k, (*options.items(), layout)), **_marks(ends, sinks))
    (batch, heads, length, D), shared = q.shape, k.shape[1]
    sizes = heads // world, shared // world, shared // world
    # One transfer: for each rank its heads of q, k and v.
    packed = torch.cat([t.unflatten(1, (world, -1)) for t in (q, k, v)], 2).movedim(1, 0)
    whole = in_order(AllToAll.apply(packed, group), length, 2, layout)
    if sinks is not None:
        options["sinks"] = sinks.chunk(world)[groups.rank(group)]
    o: Any
    if ends is None:
        o = ridgeline.attention(*whole.split(sizes, 1), **options)
    else:
        cu = torch.tensor(ends, dtype=torch.int32, device=q.device)
        rows = [t[0].transpose(0, 1) for t in whole.split(sizes, 1)]
        o = ridgeline.attention_varlen(rows[0], rows[1], rows[2], cu, cu, **options)
        o = o.transpose(0, 1)[None]
    tokens = torch.cat([o.narrow(2, b, size) for b, size in _everyone(world, length, layout)], 2)
    back = AllToAll.apply(tokens.unflatten(2, (world, length)).movedim(2, 0), group)
    return back.transpose(0, 1).reshape(batch, heads, length, D)


def _everyone(world: int, length: int, layout: str) -> list[tuple[int, int]]:
    """Returns where each rank's pieces begin, rank after rank, with their length."""
    placed = [starts(rank, world, length, layout) for rank in range(world)]
    return [(b, size) for begins, size in placed for b in begins]


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """Casts to autocast's dtype, as `attention` does."""
    if not all([isinstance(t, torch.Tensor) for t in tensors]):
        return tensors
    kind = tensors[0].device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple([t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors])


def _common(q: Any, k: Any, options: tuple[Any, ...]) -> dict[str, Any]:
    """Returns what all ranks must have alike."""
    shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in (q, k)]
    return {"shape of q": shapes[0], "shape of k": shapes[1], "dtype": str(getattr(q, "dtype", "")), "options": options}


def _marks(ends: Any, sinks: Any) -> dict[str, Any]:
    """Returns what else all ranks must have alike."""
    return {"cu_seqlens": ends, "sinks": "none" if sinks is None else "some"}


def _packed_fault(q: Any, sinks: Any, cu_seqlens: Any, ends: packing.Ends | None, group: Any) -> str | None:
    """Returns what is wrong with sinks or cu_seqlens, or None. q has passed `_fault`."""
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor):
            return f"sinks must be a tensor or None, got {type(sinks).__name__}"
        if sinks.shape != (q.shape[1],) or not sinks.is_floating_point() or sinks.device != q.device:
            return (
                f"sinks must be a floating-point logit for each head of q, ({q.shape[1]},), on q's device, "
                f"got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}"
            )
    if cu_seqlens is None:
        return None
    if q.shape[0] != 1:
        return f"with cu_seqlens q must have a batch of 1, since sequences lie one after the other, got {q.shape[0]}"
    return packing.fault(cu_seqlens, ends, q.shape[2] * groups.size(group))


def _fault(q: Any, k: Any, v: Any, causal: Any, window: Any, scale: Any = None, softcap: Any = None) -> str | None:
    """Returns what is wrong with a rank's tensors and options, or None."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
        if t.dim() != 4 or not t.is_floating_point() or t.dtype != q.dtype or t.device != q.device:
            return (
                f"q, k and v must be (batch, heads, tokens, D), of one floating-point dtype and device, "
                f"got {name} {tuple(t.shape)} in {t.dtype} on {t.device}"
            )
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        return f"k and v must have the same shape, and q's batch and D, got {shapes}"
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        return f"q must have a multiple of k's heads, got {q.shape[1]} and {k.shape[1]}"
    if q.shape[3] % 8 or not 16 <= q.shape[3] <= 256:
        return f"D must be a multiple of 8 from 16 to 256, got {q.shape[3]}"
    if causal not in (False, True):
        return f"causal must be False or True, got {causal!r}"
    pair = window is None or (isinstance(window, tuple | list) and len(window) == 2)
    if not pair or any([w is not None and (type(w) is not int or w < -1) for w in window or ()]):
        return f"window must be None or (left, right), each at least 0, or None or -1 for unbounded, got {window!r}"
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        return f"scale must be None for 1/sqrt(D) or a finite number, got {scale!r}"
    if softcap is not None and not (isinstance(softcap, int | float) and 0 < softcap < math.inf):
        return f"softcap must be None or a finite number above 0, got {softcap!r}"
    return None
