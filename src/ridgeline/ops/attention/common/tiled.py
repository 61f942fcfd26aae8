"""The implementation `tiled` of attention: FlashAttention's loops in eager PyTorch, written to be read.

For each tile of queries, forward keeps a running maximum of the scores and a running sum of exponentials relative to
it. When a tile of keys raises the maximum, the earlier sums are rescaled. Backward recomputes the probabilities as
exp(s - lse); delta = rowsum(o do) - dlse is the term that softmax's derivative subtracts in each row.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import Function, first_order
from ridgeline.ops.attention.common.band import Band

TILE = 128  # at least so many queries and keys, and at most 16 tiles: each costs a dozen kernels


class _Tiled(Function):
    """q and the mask are (B, Hkv, G, ...), for the G heads that share a head of k and v."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, sinks: Any, band: Any, scale: float,
        softcap: float,
    ) -> Any:  # fmt: skip
        rest = mask, band, scale, softcap
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        for i in _tiles(q):
            top = torch.full_like(lse[..., i], -torch.inf)
            total, acc = torch.zeros_like(top), torch.zeros_like(o[..., i, :], dtype=top.dtype)
            if sinks is not None:  # a key without a value
                top = sinks.to(top.dtype)[..., None].expand_as(top)
                total = (top > -torch.inf).to(top.dtype)
            for j in [j for j in _tiles(k) if band is None or band.meets(i, j)]:
                s, _ = _scores(q, k, i, j, *rest)
                new = torch.maximum(top, s.amax(-1))
                base = new.masked_fill(new == -torch.inf, 0)
                p, shrink = (s - base[..., None]).exp(), (top - base).exp()
                acc = acc * shrink[..., None] + p @ v[:, :, None, j].to(p.dtype)
                total, top = total * shrink + p.sum(-1), new
            o[..., i, :] = (acc / total.masked_fill(total == 0, 1)[..., None]).to(o.dtype)
            lse[..., i] = top + total.log()
        ctx.save_for_backward(q, k, v, o, lse, mask, sinks)
        ctx.facts = rest[1:]
        return o, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor) -> Any:
        q, k, v, o, lse, mask, sinks = ctx.saved_tensors
        delta = (o.to(lse.dtype) * do).sum(-1) - dlse
        dq, dk, dv = [torch.zeros_like(t, dtype=lse.dtype) for t in (q, k, v)]
        for j in _tiles(k):
            keys, values = k[:, :, None, j].to(lse.dtype), v[:, :, None, j].to(lse.dtype)
            for i in [i for i in _tiles(q) if ctx.facts[0] is None or ctx.facts[0].meets(i, j)]:
                s, slope = _scores(q, k, i, j, mask, *ctx.facts)
                queries, slopes = q[..., i, :].to(lse.dtype), do[..., i, :].to(lse.dtype)
                p = (s - lse[..., i, None].masked_fill(lse[..., i, None] == -torch.inf, torch.inf)).exp()
                ds = p * (slopes @ values.mT - delta[..., i, None]) * slope * ctx.facts[1]
                dv[:, :, j] += (p.mT @ slopes).sum(2)
                dk[:, :, j] += (ds.mT @ queries).sum(2)
                dq[..., i, :] += ds @ keys
        dsinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[..., None] - lse).exp()
            dsinks = (share.masked_fill(lse == -torch.inf, 0) * -delta).sum((0, 3)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, dsinks, None, None, None


def _tiles(x: torch.Tensor) -> list[slice]:
    length = x.shape[-2]
    size = max(TILE, -(-length // 16))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _scores(
    q: torch.Tensor, k: torch.Tensor, i: slice, j: slice, mask: torch.Tensor | None, band: Band | None,
    scale: float, softcap: float
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """Returns a tile's scores, -inf where a key is not seen, and the softcap's slope."""
    precise, slope = torch.promote_types(q.dtype, torch.float32), 1.0
    s = q[..., i, :].to(precise) @ k[:, :, None, j].to(precise).mT * scale
    if softcap:
        bent = torch.tanh(s / softcap)
        s, slope = softcap * bent, 1 - bent * bent
    if mask is not None:
        s = s.masked_fill(~mask[..., i, j], -torch.inf) if mask.dtype == torch.bool else s + mask[..., i, j]
    if band is not None:
        s = s.masked_fill(~band.moved(i.start, j.start).seen(s.shape[-2], s.shape[-1], s.device), -torch.inf)
    return s, slope


def tiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
    band: Band | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse, as `formula`."""
    sizes = k.shape[1], q.shape[1] // max(k.shape[1], 1)
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2]).unflatten(1, sizes)
    grouped = None if sinks is None else sinks.unflatten(0, sizes)
    o, lse = _Tiled.apply(q.unflatten(1, sizes), k, v, mask, grouped, band, scale, softcap)
    return o.flatten(1, 2), lse.flatten(1, 2)
