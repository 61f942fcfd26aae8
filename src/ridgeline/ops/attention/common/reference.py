"""The formula of attention in plain PyTorch: the reference of all implementations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ridgeline.ops.attention.common.band import Band

PIECE = 1 << 27  # scores that the reference holds in memory at a time


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    band: Band | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and lse, with all scores in memory.

    A row that sees no key has o 0, and lse -inf or its head's sink. A sink is a key without a value.
    """
    (batch, heads, rows, D), groups, columns = q.shape, k.shape[1], k.shape[2]
    # Queries that share keys become more rows of one head.
    folded = q.reshape(batch, groups, heads // max(groups, 1) * rows, D)
    s = (folded @ k.mT).view(batch, heads, rows, columns) * scale
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if band is not None:
        s = s.masked_fill(~band.seen(rows, columns, q.device), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(batch, heads, rows, 1)], -1)
    most = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    empty = most == -math.inf
    most = most.masked_fill(empty, 0)
    e = (s - most).exp()
    total = e.sum(-1, keepdim=True).masked_fill(empty, 1)
    p = (e / total)[..., :columns].to(q.dtype)
    o = (p.view(batch, groups, folded.shape[2], columns) @ v).view(q.shape)
    return o, (most + total.log()).masked_fill(empty, -math.inf)[..., 0]


def in_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    band: Band | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`formula`, by heads and rows of queries if the scores would take too much memory; backward recomputes them."""
    (batch, heads, rows, _), groups, columns = q.shape, k.shape[1], k.shape[2]
    if batch * heads * rows * columns <= PIECE:
        return formula(q, k, v, mask, sinks, band, scale, softcap)
    size = max(1, PIECE // (heads // groups * columns))
    whole = None if mask is None else mask.expand(batch, heads, rows, columns)
    found: list[list[torch.Tensor]] = [[], []]
    for b, images in enumerate(zip(q.split(1), k.split(1), v.split(1), strict=True)):
        per_head = [t.split(t.shape[1] // groups, 1) for t in images]
        for h, (queries, keys, values) in enumerate(zip(*per_head, strict=True)):
            made = []
            for n, some in enumerate(queries.split(size, 2)):
                first, own = n * size, slice(h * (heads // groups), (h + 1) * (heads // groups))
                hidden = None if whole is None else whole[b : b + 1, own, first : first + size]
                moved = None if band is None else band.moved(first, 0)
                args = some, keys, values, hidden, None if sinks is None else sinks[own], moved, scale, softcap
                made.append(checkpoint(formula, *args, use_reentrant=False, preserve_rng_state=False))
            for kept, pieces in zip(found, zip(*made, strict=True), strict=True):
                kept.append(torch.cat(pieces, 2))
    o, lse = [torch.cat(pieces, 1).view(batch, heads, *pieces[0].shape[2:]) for pieces in found]
    return o, lse


def rounds_scores(q: torch.Tensor, *_: Any, return_lse: bool = False, **__: Any) -> str | None:
    """Returns why the formula in eager PyTorch does not take a call, or None."""
    half = return_lse and q.dtype in (torch.float16, torch.bfloat16)
    return "it rounds scores to half precision, which is too coarse for lse in float32" if half else None
