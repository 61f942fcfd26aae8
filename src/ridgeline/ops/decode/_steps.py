"""A step of decoding by the library's other ops: in five kinds of kernels, then in two.

The first is the usual decoder's: concatenate, repeat, q k, softmax, p v. Both need room in the cache for new tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import INTERPRETED
from ridgeline.op import RidgelineError, get
from ridgeline.ops.decode._cache import Maybe, capacity, kind_of
from ridgeline.ops.decode._history import query_places, seen_keys


def _refuse(rung: str, reason: str) -> None:
    raise RidgelineError(f"decode_attention: impl={rung!r} cannot run this call: {reason}")


def _has(option: Any) -> bool:
    return option is not None and option is not False


def _appended(
    rung: str, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, k: Maybe, v: Maybe, table: Maybe
) -> torch.Tensor:  # fmt: skip
    """Writes new tokens by concat_kv, and returns how many keys each sequence has then."""
    if INTERPRETED and k_cache.dtype == torch.bfloat16:
        _refuse(rung, "Triton's interpreter computes bfloat16 wrongly")
    room = capacity(k_cache, table)
    if k is None:
        return lengths.clamp(0, room)
    if table is not None:
        _refuse(rung, "concat_kv appends to no blocks")
    get("concat_kv").function(k_cache, v_cache, k, v, lengths.where(lengths >= 0, room))
    return (lengths + k.shape[1]).where(lengths >= 0, 0).clamp(max=room)


@torch.no_grad()
def five_kernels(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *, k: Maybe = None,
    v: Maybe = None, block_table: Maybe = None, tree: Maybe = None, scale: float | None = None,
    window: int | None = None, **given: Any,
) -> torch.Tensor:  # fmt: skip
    """concat_kv, repeat_kv, a product, masked_softmax, a product."""
    names = ("cos", "sinks", "softcap", "return_lse", "invariant")
    if block_table is not None or kind_of(k_cache) or any(_has(given.get(n)) for n in names):
        others = "rotation, sinks, softcap, lse or invariance"
        _refuse("five_kernels", f"it takes a contiguous cache of q's dtype, without {others}")
    place = query_places(k_cache, lengths, None, q.shape[1], k is not None)
    held = _appended("five_kernels", k_cache, v_cache, lengths, k, v, None)
    repeat, group = get("repeat_kv").function, q.shape[2] // k_cache.shape[2]
    keys, values = (repeat(t.transpose(1, 2), group, lengths=held) for t in (k_cache, v_cache))
    index = torch.arange(k_cache.shape[1], device=q.device).expand(len(lengths), -1)
    seen = seen_keys(index, place, index < held[:, None], tree, window)[:, None]
    scores = q.transpose(1, 2) @ keys.mT
    p = get("masked_softmax").function(scores, seen, q.shape[-1] ** -0.5 if scale is None else scale)
    o: torch.Tensor = (p @ values).transpose(1, 2)
    return o


@torch.no_grad()
def two_kernels(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *, k: Maybe = None,
    v: Maybe = None, block_table: Maybe = None, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, return_lse: bool = False, **given: Any,
) -> Any:  # fmt: skip
    """concat_kv, and attention_varlen over the cache."""
    if kind_of(k_cache) or any(given.get(n) is not None for n in ("cos", "sinks", "tree")):
        _refuse("two_kernels", "it takes a cache of q's dtype, without rotation, sinks or tree")
    held = _appended("two_kernels", k_cache, v_cache, lengths, k, v, block_table)
    B, S, heads, _ = q.shape
    ends = torch.arange(0, B * S + 1, S, dtype=torch.int32, device=q.device)
    options = {"causal": True, "scale": scale, "window": None if window is None else (window, 0), "softcap": softcap}
    cache = {"block_table": block_table, "lengths": held, "max_seqlen_q": S}
    found = get("attention_varlen").function(
        q.flatten(0, 1), k_cache, v_cache, ends, **cache, **options, return_lse=return_lse
    )
    if return_lse:
        return found[0].view(q.shape), found[1].view(heads, B, S).transpose(0, 1)
    return found.view(q.shape)
