"""Attention by transformers' two interfaces: `forward` computes it, `mask` says what causality and window leave seen.

`mask` returns None (nothing), a boolean (B, S) tensor (padding), an int32 (1, S) tensor (the number of each token's
packed sequence), an int32 (B, 1, 1, 1) tensor (the keys before a step of decoding with a static cache) or transformers'
boolean (B, 1, Sq, Sk). All but the last reach kernels that need no mask in memory.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline.hf import decoding, positions
from ridgeline.hf.report import fall_back
from ridgeline.op import RidgelineError

NAME = "ridgeline"
# What `forward` honours or may ignore, of the keywords that attention layers give to the interface.
KEYWORDS = frozenset(
    ("attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids",
     "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "output_attentions", "cache_position",
     "use_cache")
)  # fmt: skip


def register() -> None:
    """Puts the two entries into transformers' tables: all that is changed for the process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask)


def _kinds() -> dict[Any, str]:
    """Returns the code of the mask functions that we know, and what each is."""
    from transformers import masking_utils as m

    def same(*_: Any) -> bool:
        return True

    made: dict[str, tuple[Any, ...]] = {
        "causal_mask_function": (), "bidirectional_mask_function": (), "and_masks": (same,),
        "sliding_window_overlay": (1,), "packed_sequence_mask_function": (None,),
        "remap_positions_for_packed_sequence": (same, None),
    }  # fmt: skip
    known = {}
    for name, given in made.items():
        function = getattr(m, name, None)
        if function is not None:
            known[(function(*given) if given else function).__code__] = name
    return known


_KNOWN: dict[Any, str] = {}


def _parts(function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]] | None:
    """Returns a mask function's parts and what each has closed over, or None if one is unknown."""
    if not _KNOWN:
        _KNOWN.update(_kinds())
    kind = _KNOWN.get(getattr(function, "__code__", None))
    if kind is None:
        return None
    held = inspect.getclosurevars(function).nonlocals
    inner = held.get("mask_functions", ()) if kind == "and_masks" else ()
    if kind == "remap_positions_for_packed_sequence":
        inner = (held.get("mask_function"),)
    found = [] if inner else [(kind, dict(held))]
    for each in inner:
        more = _parts(each)
        if more is None:
            return None
        found += more
    return found


def _sequences(
    parts: list[tuple[str, dict[str, Any]]] | None, batch_size: int, square: bool
) -> tuple[bool, torch.Tensor | None]:
    """Returns whether kernels without a mask in memory do for these parts, and the packed sequences' numbers."""
    if parts is None:
        return False, None
    packed = [held for kind, held in parts if kind == "packed_sequence_mask_function"]
    if not packed:
        return True, None
    numbers = packed[0].get("packed_sequence_mask")
    fits = len(packed) == 1 and square and isinstance(numbers, torch.Tensor)
    if fits and not positions.readable(numbers):  # type: ignore[arg-type]
        return positions.rise(), None  # transformers could not tell whether any are packed
    fits = fits and batch_size == 1
    return fits, numbers if fits else None


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: torch.Tensor | None = None, **named: Any,
) -> torch.Tensor | None:  # fmt: skip
    """transformers' mask interface; see the top of this file for what is returned."""
    from transformers import masking_utils

    whole = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
    named["allow_is_causal_skip"] = named["allow_is_bidirectional_skip"] = False
    whole |= {"attention_mask": attention_mask, **named}

    def dense() -> torch.Tensor | None:
        return masking_utils.sdpa_mask(batch_size, q_length, kv_length, **whole)

    if _is_step(q_length, q_offset, kv_offset, mask_function, attention_mask):
        return decoding.lengths(batch_size, q_offset)
    if torch.compiler.is_compiling() or isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor):
        standard = not isinstance(q_offset, torch.Tensor) and attention_mask is None
        parts = _parts(mask_function) if standard and not torch.compiler.is_compiling() else None
    else:
        parts = _parts(mask_function)
    # The last query is the last key's, as causal="bottom_right" takes it; not so in the empty part of a static cache.
    aligned = parts is not None and q_offset + q_length == kv_offset + kv_length
    plain, numbers = _sequences(parts, batch_size, q_length == kv_length)
    if not aligned or not plain:
        return dense()
    if numbers is not None:
        return dense() if attention_mask is not None else numbers.to(torch.int32)
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:]
    if seen.shape[1] != kv_length or not positions.readable(seen):
        return dense()
    causal = any(kind == "causal_mask_function" for kind, _ in parts or ())
    # Padding after the tokens is masked by causality: no token sees it.
    nothing, after = torch.stack([seen.all(), (seen[:, :-1] >= seen[:, 1:]).all()]).tolist()
    if nothing or (causal and after and q_length == kv_length):
        return None
    return seen if q_length == kv_length else dense()


def _is_step(queries: int, before: Any, first: Any, mask_function: Any, attention_mask: torch.Tensor | None) -> bool:
    """Whether this is a step of decoding with a static cache, under causality alone; it reads attention_mask."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not isinstance(before, torch.Tensor):
        return False
    if queries > decoding.MOST or before.numel() != 1 or isinstance(first, torch.Tensor) or first != 0:
        return False
    parts = _parts(mask_function)
    if parts is None or [kind for kind, _ in parts] != ["causal_mask_function"]:
        return False
    return attention_mask is None or (positions.readable(attention_mask) and bool(attention_mask.all()))


class _Packing:
    """Where the tokens of a padded or packed batch are: index (tokens,) into B * S, and cu_seqlens (sequences + 1,)."""

    index: torch.Tensor | None
    cu_seqlens: torch.Tensor

    def __init__(self, given: torch.Tensor):
        if given.dtype == torch.bool:  # padding
            lengths = given.sum(1)
            self.index = given.flatten().nonzero().flatten()
        else:  # numbers of packed sequences, which rise by one
            starts = (given[0, 1:] != given[0, :-1]).nonzero().flatten() + 1
            ends = torch.cat([starts, starts.new_full((1,), given.shape[1])])
            lengths, self.index = torch.diff(ends, prepend=ends.new_zeros(1)), None
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: _Packing, options: dict[str, Any]
) -> torch.Tensor:
    """Attention within sequences, from and to (B, H, S, D); the places of padding get zeros."""
    batch, heads, length, width = q.shape
    flat = [t.transpose(1, 2).reshape(batch * length, t.shape[1], width) for t in (q, k, v)]
    if where.index is not None:
        flat = [t.index_select(0, where.index) for t in flat]
    q, k, v = flat
    o: Any = ridgeline.attention_varlen(q, k, v, where.cu_seqlens, where.cu_seqlens, **options)
    if where.index is not None:
        o = o.new_zeros(batch * length, heads, width).index_copy(0, where.index, o)
    return o.view(batch, length, heads, width)


def _refusal(q: torch.Tensor, v: torch.Tensor, dropout: float, named: dict[str, Any]) -> str | None:
    """Returns why our kernels cannot compute a call, or None."""
    if dropout:
        return f"attention has dropout {dropout} in training"
    if named.get("output_attentions"):
        return "the attention weights are asked for"
    unknown = [n for n in ("position_bias", "head_mask", "alibi") if named.get(n) is not None]
    if unknown:
        return f"attention is given {unknown[0]}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or not 16 <= q.shape[-1] <= 256:
        return f"heads have {q.shape[-1]} dimensions in q and {v.shape[-1]} in v; kernels take multiples of 8 up to 256"
    return None


def forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, is_causal: bool | None = None, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """transformers' attention interface. query: (B, Hq, Sq, D); key, value: (B, Hkv, Sk, D); returns (B, Sq, Hq, D)."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    to: decoding.Appending | None = named.pop("ridgeline_cache", None)
    reason = _refusal(query, value, dropout, named)
    step = decoding.is_lengths(attention_mask)
    if step and (reason is not None or torch.is_grad_enabled()):
        if to is not None:
            key, value = to.written(key, value)
        attention_mask, step = decoding.dense(attention_mask, query.shape[2], key.shape[2]), False
    given = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    if reason is not None:
        fall_back(module, "attention", reason)
        given = {n: t for n, t in given.items() if t is not None}
        return _own(module, query, key, value, attention_mask, causal, dropout=dropout, **given, **named)
    usual = scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) < 1e-12
    # None takes attention's quick path.
    options: dict[str, Any] = {"scale": None if usual else scaling, "softcap": softcap, "sinks": s_aux}
    if step:
        near = None if sliding_window is None else sliding_window - 1
        return decoding.attend(query, key, value, attention_mask, to, options | {"window": near}), None
    q_length, kv_length = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 4:
        options["mask"] = attention_mask[..., :kv_length]
    else:
        options["causal"] = bool(causal) and ("bottom_right" if q_length != kv_length else True)
        if sliding_window is not None and sliding_window < kv_length:
            options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    cu = named.get("cu_seq_lens_q")
    if attention_mask is not None and attention_mask.dim() == 2:
        where = getattr(attention_mask, "_packing", None)
        if where is None:  # layers share the mask, and so what is read off it
            where = attention_mask._packing = _Packing(attention_mask)
        return _varlen(query, key, value, where, options), None
    if attention_mask is None and cu is not None and query.shape[0] == 1 and q_length == kv_length:
        where = _Packing.__new__(_Packing)
        where.index, where.cu_seqlens = None, cu.to(torch.int32)
        return _varlen(query, key, value, where, options), None
    o: Any = ridgeline.attention(query, key, value, **options)
    return o.transpose(1, 2), None


def _own(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Any, causal: bool, **named: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention: by torch's where that takes the call, else the eager one of the module's own file."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    by_torch = not named.get("output_attentions") and all(
        named.get(n) is None for n in ("softcap", "s_aux", "head_mask", "alibi")
    )
    window = named.get("sliding_window")
    if by_torch and given is None and window is None and q.shape[2] == k.shape[2]:
        return sdpa_attention_forward(module, q, k, v, None, is_causal=causal, **named)
    seen, (rows, columns) = given, (q.shape[2], k.shape[2])
    if given is None or given.dim() == 2:
        at = torch.arange(columns - rows, columns, device=q.device)[:, None]
        keys = torch.arange(columns, device=q.device)
        seen = (keys <= at) if causal else torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        if window is not None:
            seen = seen & (keys > at - window) & (keys < at + window)
        seen = seen[None, None]
        if given is not None and given.dtype == torch.bool:
            seen = seen & given[:, None, None, :]
        elif given is not None:
            seen = seen & (given[:, None, :, None] == given[:, None, None, :])
    if by_torch:
        return sdpa_attention_forward(module, q, k, v, seen, is_causal=False, **named)
    if seen.dtype == torch.bool:
        low = torch.finfo(q.dtype).min
        seen = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, low)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise RidgelineError(
            f"attention of {type(module).__name__}: its file has no eager_attention_forward to fall to"
        )
    return eager(module, q, k, v, seen, **named)
