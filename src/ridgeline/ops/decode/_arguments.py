"""What decode_attention's arguments must be."""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.op import RidgelineError, dense_only, readable
from ridgeline.ops.decode._cache import capacity, kind_of

MOST = 16  # queries of a sequence


def check(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, given: dict[str, Any], window: Any, softcap: Any, scale: Any
) -> None:
    """Raises RidgelineError if the arguments do not fit together, before anything is written."""
    wrong = _fault(q, k_cache, v_cache, lengths, given)
    if wrong is None and window is not None and (type(window) is not int or window < 0):
        wrong = f"window must be None or how many earlier keys a query sees, at least 0, but is {window!r}"
    if wrong is None and softcap is not None and not (isinstance(softcap, int | float) and 0 < softcap < math.inf):
        wrong = f"softcap must be None or a finite number above 0, but is {softcap!r}"
    if wrong is None and scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        wrong = f"scale must be None for 1/sqrt(D) or a finite number, but is {scale!r}"
    if wrong is None and given["tree"] is not None and window is not None:
        wrong = "window and tree cannot be given together"
    if wrong:
        raise RidgelineError(f"decode_attention: {wrong}")


def _fault(q: Any, k_cache: Any, v_cache: Any, lengths: Any, given: dict[str, Any]) -> str | None:
    """Returns what is wrong with the tensors, or None."""
    needed = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    wrong = tensors_fault("decode_attention", needed, given) or query_fault(q, "Hq")
    if wrong:
        return wrong
    D = q.shape[-1]
    if D % 8 or not 16 <= D <= 256:
        return f"D must be a multiple of 8 from 16 to 256, but is {D}"
    return (
        _cache_fault(q, k_cache, v_cache, given)
        or _new_fault(q, k_cache, lengths, given)
        or _scale_fault(k_cache, given)
    )


def tensors_fault(op: str, needed: dict[str, Any], given: dict[str, Any]) -> str | None:
    """Returns which argument is no dense tensor of q's device without a gradient, or None. needed: q and others."""
    q = needed["q"]
    for name, t in (needed | given).items():
        if not isinstance(t, torch.Tensor) and (t is not None or name in needed):
            return f"{name} must be a tensor, but is {type(t).__name__}"
        if t is not None and t.device != q.device:
            return f"{name} is on {t.device} but q on {q.device}; they must share one device"
        if t is not None and torch.is_grad_enabled() and t.requires_grad:
            return f"it has no gradients, but {name} requires one; give it detached or under torch.no_grad()"
    dense_only(op, (needed | given).values())
    return None


def query_fault(q: torch.Tensor, heads: str) -> str | None:
    floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    if q.dim() != 4 or not 1 <= q.shape[1] <= MOST or q.dtype not in floats:
        found = f"{q.dtype} {tuple(q.shape)}"
        return f"q must be (B, 1 to {MOST}, {heads}, D) in float32, float16 or bfloat16, but is {found}"
    return None


def _cache_fault(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: dict[str, Any]) -> str | None:
    kind, table = kind_of(k_cache), given["block_table"]
    B, _, heads, D = q.shape
    if k_cache.dtype != v_cache.dtype or (not kind and k_cache.dtype != q.dtype):
        kinds = f"{k_cache.dtype} and {v_cache.dtype}"
        return f"the caches must have q's dtype ({q.dtype}), or both be int8, float8_e4m3fn or uint8, but are {kinds}"
    width = D // 2 if kind == "int4" else D
    shape = k_cache.shape
    if len(shape) != 4 or shape != v_cache.shape or shape[3] != width or (table is None and shape[0] != B):
        wanted = f"({'blocks, block' if table is not None else f'{B}, S_max'}, Hkv, {width})"
        return f"the caches must both be {wanted}, but are {tuple(shape)} and {tuple(v_cache.shape)}"
    if not shape[2] or heads % shape[2]:
        return f"q must have a multiple of the caches' heads, but has {heads} for {shape[2]}"
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", given["k"]), ("v", given["v"])):
        if t is not None and t.stride(-1) != 1:
            return f"the last dimension of {name} must be contiguous (stride 1), but has stride {t.stride(-1)}"
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if kind and (t.storage_offset() % 2 or any([step % 2 for step in t.stride()[:3]])):
            return f"an 8-bit {name} must begin at an even byte and have even strides, but has {t.stride()}"
    return table_fault(table, B, shape[1])


def table_fault(table: Any, B: int, block: int) -> str | None:
    """Returns what is wrong with a block table whose blocks hold `block` tokens, or None; there may be no table."""
    if table is not None:
        if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != B or table.stride(1) != 1:
            return f"block_table must be ({B}, blocks) in int32, but is {table.dtype} {tuple(table.shape)}"
        if block % 16:
            return f"a block must hold a multiple of 16 tokens, but holds {block}"
    return None


def _new_fault(q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, given: dict[str, Any]) -> str | None:
    B, S, heads, D = q.shape
    wrong = lengths_fault(lengths, B) or angles_fault(given["cos"], given["sin"], D)
    if wrong:
        return wrong
    k, v, cos, tree = (given[n] for n in ("k", "v", "cos", "tree"))
    if (k is None) != (v is None):
        return "k and v must be given together"
    if k is not None and (k.shape != (B, S, cache.shape[2], D) or v.shape != k.shape):
        return (
            f"k and v must be {(B, S, cache.shape[2], D)} in q's dtype, but are {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k is not None and (k.dtype != q.dtype or v.dtype != q.dtype):
        return f"k and v must have q's dtype ({q.dtype}), but have {k.dtype} and {v.dtype}"
    positions, sinks = given["positions"], given["sinks"]
    if positions is not None and (positions.shape != (B, S) or positions.dtype.is_floating_point):
        return f"positions must be integers ({B}, {S}), but are {positions.dtype} {tuple(positions.shape)}"
    if positions is not None and positions.stride(1) != 1:
        return "positions must be contiguous in their last dimension"
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_floating_point() or not sinks.is_contiguous()):
        return f"sinks must be contiguous floating-point logits ({heads},), but are {sinks.dtype} {tuple(sinks.shape)}"
    if tree is not None and (tree.shape != (B, S, S) or tree.dtype != torch.bool or tree.stride(2) != 1):
        return f"tree must be ({B}, {S}, {S}) in bool, but is {tree.dtype} {tuple(tree.shape)}"
    if k is not None and any(n > 1 and not s for n, s in zip(cache.shape, cache.stride(), strict=True)):
        return "the caches are written, but one is expanded and cannot be changed in place; give its clone()"
    return values_fault(lengths, capacity(cache, given["block_table"]), cos, positions, -1 if k is None else S - 1)


def lengths_fault(lengths: torch.Tensor, B: int) -> str | None:
    if lengths.dtype != torch.int32 or lengths.shape != (B,) or not lengths.is_contiguous():
        found = f"{lengths.dtype} {tuple(lengths.shape)} with strides {lengths.stride()}"
        return f"lengths must be contiguous ({B},) in int32, but is {found}"
    return None


def angles_fault(cos: Any, sin: Any, D: int) -> str | None:
    """Returns what is wrong with the angles of D columns, or None."""
    if (cos is None) != (sin is None):
        return "cos and sin must be given together"
    if cos is not None and (cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= D):
        return (
            f"cos and sin must both be (positions, at most {D // 2}), but are {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos is not None and (cos.stride() != sin.stride() or cos.stride(1) != 1):
        return "cos and sin must have the same strides, the last of them 1"
    return None


def values_fault(lengths: torch.Tensor, most: int, cos: Any, positions: Any, last: int) -> str | None:
    """Returns what is wrong with values that the host may read, or None. last: the last query's place after lengths."""
    if cos is not None and readable(cos) and len(lengths):
        places = positions if positions is not None else lengths.clamp(min=0) + last
        held = places[lengths >= 0]
        if held.numel() and (int(held.max()) >= cos.shape[0] or (positions is not None and int(held.min()) < 0)):
            return f"positions must be below cos's {cos.shape[0]} rows, but reach {int(held.max())}"
    if readable(lengths) and lengths.numel() and (int(lengths.max()) > most or int(lengths.min()) < -1):
        return f"lengths must be from -1 to the cache's {most} tokens, but are {lengths.tolist()}"
    return None


def _scale_fault(cache: torch.Tensor, given: dict[str, Any]) -> str | None:
    kind, heads = kind_of(cache), cache.shape[2]
    for name in ("k_scale", "v_scale", "k_zero", "v_zero"):
        t = given[name]
        if t is None:
            if name.endswith("scale") and kind in ("int8", "int4"):
                return f"a cache of {kind} needs {name}"
            continue
        if not kind:
            return f"{name} is for a quantised cache, and this one is {cache.dtype}"
        if t.dtype != torch.float32 or t.shape not in ((), (1,), (heads,), cache.shape[:3]):
            wanted = f"(), (1,), ({heads},) or {tuple(cache.shape[:3])} in float32"
            return f"{name} must be {wanted}, but is {t.dtype} {tuple(t.shape)}"
        if kind == "float8" and name.endswith("zero"):
            return "a cache of float8_e4m3fn has no zeros"
    sizes = {
        name: None if given[name] is None else given[name].dim() == 3
        for name in ("k_scale", "v_scale", "k_zero", "v_zero")
    }
    if sizes["k_scale"] != sizes["v_scale"] or sizes["k_zero"] != sizes["v_zero"]:
        return "k and v must have scales of one kind, and zeros of one kind"
    if sizes["k_zero"] is not None and sizes["k_zero"] != sizes["k_scale"]:
        return "zeros must be per token and head exactly if scales are"
    return None
