"""Decoding with transformers' static caches: one call of `decode_attention` appends a step's keys and attends.

A step's mask is then no mask but `Lengths`: int32 (B, 1, 1, 1), how many keys the cache holds before the step. The
attention layer is given `Appending` in place of its cache; it hands the new keys through, unwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline.op import RidgelineError

MOST = 16  # queries of decode_attention
NAMES = ("cache", "past_key_values")  # of the cache, as an attention layer's argument


def lengths(batch: int, before: torch.Tensor) -> torch.Tensor:
    """Returns the mask that stands for plain causality after `before` keys."""
    return before.to(torch.int32).reshape(1, 1, 1, 1).expand(batch, 1, 1, 1).contiguous()


def is_lengths(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.int32


def dense(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Returns transformers' boolean mask (B, 1, queries, keys) of lengths."""
    at = mask + torch.arange(queries, device=mask.device)[:, None]
    return torch.arange(keys, device=mask.device) <= at


class Appending:
    """Stands for a cache during one call of an attention layer: it hands new keys and values through."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.served = layer, False

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        return keys, values

    def written(self, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Writes a step by the cache's own code after all, and returns the cache's keys and values."""
        self.served = True
        return self.layer.update(keys, values)


def appending(module: Any, named: dict[str, Any]) -> Appending | None:
    """Returns what stands for the cache in this call of an attention layer, or None if its cache is to be written."""
    if torch.is_grad_enabled() or not is_lengths(named.get("attention_mask")):
        return None
    from transformers.cache_utils import StaticLayer

    cache = next((named[n] for n in NAMES if named.get(n) is not None), None)
    layers = getattr(cache, "layers", None) or ()
    number = getattr(module, "layer_idx", None)
    layer: Any = layers[number] if isinstance(number, int) and number < len(layers) else None
    return Appending(layer) if type(layer) is StaticLayer and layer.is_initialized else None


def served(module: nn.Module, forward: Any, given: tuple[Any, ...], named: dict[str, Any], to: Appending) -> Any:
    """An attention layer's forward with `to` in place of its cache."""
    named = named | {n: to for n in NAMES if named.get(n) is not None}
    found = forward(module, *given, ridgeline_cache=to, **named)
    if not to.served:
        raise RidgelineError(
            f"hf: {type(module).__name__} gives its keyword arguments to no attention, so static caches are not "
            "served; patch the model with only= and without 'rotary'"
        )
    return found


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, to: Appending | None,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Returns (B, S, Hq, D). query: (B, Hq, S, D). key, value: the new ones, or with no `to` the whole cache's."""
    q, before = query.transpose(1, 2), mask.flatten()
    held = (key, value) if to is None else (to.layer.keys, to.layer.values)
    k_cache, v_cache = (t.transpose(1, 2) for t in held)
    if to is None:
        before = before + q.shape[1]
    else:
        options = options | {"k": key.transpose(1, 2), "v": value.transpose(1, 2)}
    o: Any = ridgeline.decode_attention(q, k_cache, v_cache, before, **options)
    if to is not None:
        to.layer.cumulative_length.add_(q.shape[1])
        to.served = True
    return o
