"""The formula of flex_attention in plain PyTorch: the reference of its implementations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ridgeline.ops.attention.common.band import Band
from ridgeline.ops.attention.flex.blocks import BlockMask
from ridgeline.ops.attention.flex.score import ScoreMod

PIECE = 1 << 27  # scores that the formula holds in memory at a time


def _piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mod: ScoreMod | None, seen: torch.Tensor | None, scale: float,
    first: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse of some batches and heads. first: the numbers of the first of them."""
    precise = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // max(k.shape[1], 1)
    keys, values = [t.to(precise).repeat_interleave(group, 1) for t in (k, v)]
    s = q.to(precise) @ keys.mT * scale
    if mod is not None and mod.eager is not None:
        index = [torch.arange(n, device=q.device) for n in s.shape]
        b, h = (index[0] + first[0])[:, None, None, None], (index[1] + first[1])[:, None, None]
        s = mod.eager(s, b, h, index[2][:, None], index[3], *mod.tensors).to(precise)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    most = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    empty = most == -math.inf
    most = most.masked_fill(empty, 0)
    e = (s - most).exp()
    total = e.sum(-1, keepdim=True).masked_fill(empty, 1)
    o = ((e / total) @ values).to(q.dtype)
    return o, (most + total.log()).masked_fill(empty, -math.inf)[..., 0]


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mod: ScoreMod | None, mask: BlockMask | None,
    band: Band | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse; a head at a time if the scores would take too much memory, and backward recomputes them."""
    (batch, heads, rows, _), groups, columns = q.shape, max(k.shape[1], 1), k.shape[2]
    seen = mask.dense() if mask is not None else None if band is None else band.seen(rows, columns, q.device)
    if batch * heads * rows * columns <= PIECE:
        return _piece(q, k, v, mod, seen, scale, (0, 0))
    if seen is not None:
        seen = seen.expand(batch, heads, rows, columns)
    found: list[Any] = []
    for b in range(batch):
        for g in range(groups):
            own = slice(g * (heads // groups), (g + 1) * (heads // groups))
            some = q[b : b + 1, own], k[b : b + 1, g : g + 1], v[b : b + 1, g : g + 1]
            hidden = None if seen is None else seen[b : b + 1, own]
            given = *some, mod, hidden, scale, (b, own.start)
            found.append(checkpoint(_piece, *given, use_reentrant=False, preserve_rng_state=False))
    o, lse = [torch.cat([one[n] for one in found], 1).unflatten(1, (batch, heads)) for n in (0, 1)]
    return o[0], lse[0]
