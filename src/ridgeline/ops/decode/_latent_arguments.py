"""What mla_decode's arguments must be."""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.op import RidgelineError
from ridgeline.ops.decode import _arguments as shared
from ridgeline.ops.decode._cache import capacity


def check(q: Any, cache: Any, lengths: Any, given: dict[str, Any], latent: Any, scale: Any) -> None:
    """Raises RidgelineError if the arguments do not fit together, before anything is written."""
    needed = {"q": q, "cache": cache, "lengths": lengths}
    wrong = shared.tensors_fault("mla_decode", needed, given) or shared.query_fault(q, "H")
    wrong = wrong or _sizes_fault(q, latent, scale) or _cache_fault(q, cache, given)
    wrong = wrong or shared.lengths_fault(lengths, q.shape[0])
    wrong = (
        wrong
        or shared.angles_fault(given["cos"], given["sin"], q.shape[-1] - latent)
        or _new_fault(q, cache, given["kv"])
    )
    if wrong is None:
        last = -1 if given["kv"] is None else q.shape[1] - 1
        wrong = shared.values_fault(lengths, capacity(cache, given["block_table"]), given["cos"], None, last)
    if wrong:
        raise RidgelineError(f"mla_decode: {wrong}")


def _sizes_fault(q: torch.Tensor, latent: Any, scale: Any) -> str | None:
    D = q.shape[-1]
    if type(latent) is not int or latent % 16 or not 16 <= latent <= 512:
        return f"latent must be a multiple of 16 from 16 to 512, but is {latent!r}"
    if D % 8 or not 8 <= D - latent <= 128:
        return f"D must be latent and 8 to 128 columns more, a multiple of 8, but is {D} for latent {latent}"
    if not q.shape[2]:
        return f"q must have at least one head, but is {tuple(q.shape)}"
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        return f"scale must be a finite number, such as 1/sqrt(192), but is {scale!r}"
    return None


def _cache_fault(q: torch.Tensor, cache: torch.Tensor, given: dict[str, Any]) -> str | None:
    (B, _, _, D), shape, table, scale = q.shape, cache.shape, given["block_table"], given["kv_scale"]
    eight = cache.dtype == torch.float8_e4m3fn
    if cache.dtype != q.dtype and not eight:
        return f"the cache must have q's dtype ({q.dtype}) or be float8_e4m3fn, but is {cache.dtype}"
    if len(shape) != 3 or shape[2] != D or (table is None and shape[0] != B):
        wanted = f"({'blocks, block' if table is not None else f'{B}, S_max'}, {D})"
        return f"the cache must be {wanted}, but is {tuple(shape)}"
    for name, t in (("q", q), ("cache", cache), ("kv", given["kv"])):
        if t is not None and t.dim() and t.stride(-1) != 1:
            return f"the last dimension of {name} must be contiguous (stride 1), but has stride {t.stride(-1)}"
    if scale is not None and not eight:
        return f"kv_scale is for a cache of float8_e4m3fn, and this one is {cache.dtype}"
    if scale is not None and (scale.dtype != torch.float32 or scale.shape not in ((), (1,), shape[:2])):
        return f"kv_scale must be (), (1,) or {tuple(shape[:2])} in float32, but is {scale.dtype} {tuple(scale.shape)}"
    return shared.table_fault(table, B, shape[1])


def _new_fault(q: torch.Tensor, cache: torch.Tensor, kv: Any) -> str | None:
    B, S, _, D = q.shape
    if kv is not None and (kv.shape != (B, S, D) or kv.dtype != q.dtype):
        return f"kv must be {(B, S, D)} in q's dtype ({q.dtype}), but is {kv.dtype} {tuple(kv.shape)}"
    if kv is not None and any(n > 1 and not s for n, s in zip(cache.shape, cache.stride(), strict=True)):
        return "the cache is written, but is expanded and cannot be changed in place; give its clone()"
    return None
