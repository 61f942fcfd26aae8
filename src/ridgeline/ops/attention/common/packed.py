"""attention_varlen in plain PyTorch: which keys packed queries see, and its plain rungs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.ops.attention.common.arguments import Options, options
from ridgeline.ops.attention.common.cached import cached_options, capacity, gathered, sees_cached
from ridgeline.ops.attention.common.reference import formula, in_pieces
from ridgeline.ops.attention.common.reference import rounds_scores as rounds_scores
from ridgeline.ops.attention.common.tiled import tiled

Maybe = torch.Tensor | None


def packed_heads(x: torch.Tensor) -> torch.Tensor:
    """Returns packed tokens as attention takes them: (1, heads, tokens, D)."""
    return x.transpose(0, 1)[None]


def _sees(cu_q: torch.Tensor, cu_k: torch.Tensor, queries: int, keys: int, chosen: Options) -> torch.Tensor:
    """Returns (queries, keys), True where a token sees another: in its own sequence, within its band."""

    def placed(cu: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.arange(tokens, device=cu.device, dtype=torch.int32)
        number = torch.searchsorted(cu, token, right=True)
        return number, token - cu[number - 1]

    (mine, i), (other, j) = placed(cu_q, queries), placed(cu_k, keys)
    same = (mine[:, None] == other) & (mine < cu_q.numel())[:, None]
    if chosen.bottom:
        i = i + torch.cat([torch.zeros_like(cu_q[:1]), cu_k.diff() - cu_q.diff(), torch.zeros_like(cu_q[:1])])[mine]
    apart = j - i[:, None]
    inside = (apart >= -chosen.left) & (apart <= chosen.right)
    return same & (inside | (j < chosen.prefix) if chosen.prefix else inside)


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: Maybe, block_table: Maybe,
    lengths: Maybe, given: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Options]:  # fmt: skip
    """Returns q, k and v as attention takes them, which keys each query sees, and the options. Caches are gathered."""
    if lengths is None:
        chosen = options(q.shape[-1], **given)
        mask = _sees(cu_q, cu_k, q.shape[0], k.shape[0], chosen)  # type: ignore[arg-type]
        return packed_heads(q), packed_heads(k), packed_heads(v), mask, chosen
    chosen = cached_options(q.shape[-1], **given)
    mask = sees_cached(cu_q, lengths, q.shape[0], capacity(k, block_table), chosen)
    return packed_heads(q), *gathered(k, v, block_table, lengths), mask, chosen


def by_formula(
    how: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: Maybe = None, *,
    block_table: Maybe = None, lengths: Maybe = None, return_lse: bool = False, sinks: Maybe = None, **given: Any
) -> Any:  # fmt: skip
    *qkv, mask, chosen = _plain(q, k, v, cu_q, cu_k, block_table, lengths, given)
    o, lse = how(*qkv, mask, sinks, None, chosen.scale, chosen.softcap)
    return (o.squeeze(0).transpose(0, 1), lse.squeeze(0)) if return_lse else o.squeeze(0).transpose(0, 1)


def by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: Maybe = None, *,
    block_table: Maybe = None, lengths: Maybe = None, return_lse: bool = False, **given: Any,
) -> torch.Tensor:  # fmt: skip
    queries, keys, values, mask, chosen = _plain(q, k, v, cu_q, cu_k, block_table, lengths, given)
    mask = mask.expand(1, q.shape[1], -1, -1)
    grouped = queries.shape[1] != keys.shape[1]
    o = F.scaled_dot_product_attention(queries, keys, values, mask, scale=chosen.scale, enable_gqa=grouped)
    return o.squeeze(0).transpose(0, 1)


by_reference, by_naive, by_tiles = [partial(by_formula, how) for how in (in_pieces, formula, tiled)]
