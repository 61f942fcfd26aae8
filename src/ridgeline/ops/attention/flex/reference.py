"""The formula of flex_attention in plain PyTorch: the reference of its implementations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ridgeline.boundary import first_order
from ridgeline.ops.attention.common.band import Band
from ridgeline.ops.attention.flex.blocks import BlockMask
from ridgeline.ops.attention.flex.score import ScoreMod

PIECE = 1 << 27  # scores that the formula holds in memory at a time


def _new_scores(s: torch.Tensor, mod: ScoreMod | None, seen: torch.Tensor | None, first: tuple[int, int]) -> Any:
    """Returns the new scores of scaled ones, -inf where a key is not seen."""
    if mod is not None and mod.eager is not None:
        index = [torch.arange(n, device=s.device) for n in s.shape]
        b, h = (index[0] + first[0])[:, None, None, None], (index[1] + first[1])[:, None, None]
        s = mod.eager(s, b, h, index[2][:, None], index[3], *mod.tensors).to(s.dtype)
    return s if seen is None else s.masked_fill(~seen, -math.inf)


def _repeated(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns q and then keys or values, one for each head of queries, in float32 at least."""
    precise = torch.promote_types(q.dtype, torch.float32)
    return [q.to(precise)] + [t.to(precise).repeat_interleave(q.shape[1] // max(t.shape[1], 1), 1) for t in tensors]


def _piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mod: ScoreMod | None, seen: torch.Tensor | None, scale: float,
    first: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse of some batches and heads. first: the numbers of the first of them."""
    queries, keys, values = _repeated(q, k, v)
    s = _new_scores(queries @ keys.mT * scale, mod, seen, first)
    most = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    empty = most == -math.inf
    most = most.masked_fill(empty, 0)
    e = (s - most).exp()
    total = e.sum(-1, keepdim=True).masked_fill(empty, 1)
    return ((e / total) @ values).to(q.dtype), (most + total.log()).masked_fill(empty, -math.inf)[..., 0]


class _Recomputed(torch.autograd.Function):
    """`_piece`, whose backward computes the scores again."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        o, lse = _piece(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = rest
        return o, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> Any:
        (q, k, v, o, lse), (mod, seen, scale, first) = ctx.saved_tensors, ctx.rest
        queries, keys, values = _repeated(q, k, v)
        slopes = do.to(queries.dtype)
        with torch.enable_grad():
            s = (queries @ keys.mT * scale).detach().requires_grad_()
            new = _new_scores(s, mod, seen, first)
        p = (new.detach() - lse.masked_fill(lse == -math.inf, math.inf)[..., None]).exp()
        ds = p * (slopes @ values.mT - ((o * slopes).sum(-1) - dlse.masked_fill(lse == -math.inf, 0))[..., None])
        (ds,) = torch.autograd.grad(new, s, ds)
        each = k.shape[1], q.shape[1] // max(k.shape[1], 1)
        dk, dv = [(t.mT @ x).unflatten(1, each).sum(2).to(k.dtype) for t, x in ((ds, queries * scale), (p, slopes))]
        return (ds @ keys * scale).to(q.dtype), dk, dv, None, None, None, None


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mod: ScoreMod | None, mask: BlockMask | None,
    band: Band | None, scale: float, recomputed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse; a head at a time if the scores would take too much memory, and backward recomputes them.

    recomputed: whether it always does, from lse, as kernels do."""
    (batch, heads, rows, _), groups, columns = q.shape, max(k.shape[1], 1), k.shape[2]
    seen = mask.dense() if mask is not None else None if band is None else band.seen(rows, columns, q.device)
    piece = _Recomputed.apply if recomputed else _piece
    if batch * heads * rows * columns <= PIECE:
        return piece(q, k, v, mod, seen, scale, (0, 0))
    if seen is not None:
        seen = seen.expand(batch, heads, rows, columns)
    found: list[Any] = []
    for b in range(batch):
        for g in range(groups):
            own = slice(g * (heads // groups), (g + 1) * (heads // groups))
            some = q[b : b + 1, own], k[b : b + 1, g : g + 1], v[b : b + 1, g : g + 1]
            given = *some, mod, None if seen is None else seen[b : b + 1, own], scale, (b, own.start)
            if recomputed:
                found.append(piece(*given))
            else:
                found.append(checkpoint(piece, *given, use_reentrant=False, preserve_rng_state=False))
    o, lse = [torch.cat([one[n] for one in found], 1)[0].unflatten(0, (batch, heads)) for n in (0, 1)]
    return o, lse
