"""attention_varlen against caches of keys and values, in blocks or contiguous: its arguments and its torch op.

The queries of a sequence are its last tokens: query i of rows is at place length - rows + i. All is aligned there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ridgeline import select
from ridgeline.boundary import kernel_op, tracing
from ridgeline.op import RidgelineError, dense_only, readable
from ridgeline.ops.attention.common.arguments import Options, fault, options, precision
from ridgeline.ops.attention.common.kernels import OPS
from ridgeline.ops.attention.triton import cached

Maybe = torch.Tensor | None


def capacity(cache: torch.Tensor, table: Maybe) -> int:
    """Returns the most keys of a sequence."""
    return cache.shape[1] * (1 if table is None else table.shape[1])


def check_cache(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, table: Any, lengths: Any, sinks: Any, *rest: Any
) -> None:  # fmt: skip
    """Raises RidgelineError if the arguments of a call with a cache do not fit together. rest: as in `check`."""
    dense_only("attention_varlen", (q, k, v, cu_q, table, lengths))
    *_, align, prefix = rest
    wrong = (
        _fault(q, k, v, cu_q, cu_k, table, lengths)
        or fault(3, q, k[0], v[0], sinks, *rest)
        or _values(q, k, cu_q, table, lengths)
    )
    if not wrong and (sinks is not None or prefix):
        wrong = "with a cache it takes no sinks and no prefix"
    if not wrong and align == "top_left":
        wrong = 'with a cache a window counts from each query\'s own place, so window_align cannot be "top_left"'
    if wrong:
        raise RidgelineError(f"attention_varlen: {wrong}")


def _fault(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, table: Any, lengths: Any) -> str | None:
    if lengths is None:
        return "block_table needs lengths, how many keys of each sequence the cache holds"
    if cu_k is not None:
        return "cu_seqlens_k and lengths cannot be given together; lengths says how many keys a cache holds"
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "lengths": lengths, "block_table": table}
    for name, t in named.items():
        if not isinstance(t, torch.Tensor) and (t is not None or name != "block_table"):
            return f"{name} must be a tensor, got {type(t).__name__}"
        if t is not None and t.device != q.device:
            return f"{name} and q must be on one device, got {t.device} and {q.device}"
        if t is not None and torch.is_grad_enabled() and t.requires_grad:
            return f"with a cache it has no gradients, but {name} requires one; detach it or use torch.no_grad()"
    for name, t in (("k", k), ("v", v)):
        if t.dim() != 4 or not t.shape[0] or not t.shape[1]:
            wanted = "(B, S_max, Hkv, D)" if table is None else "(blocks, block, Hkv, D)"
            return f"with lengths, {name} must be a cache {wanted} of at least one token, got {tuple(t.shape)}"
    if k.shape != v.shape:
        return f"k and v must be caches of one shape, got {tuple(k.shape)} and {tuple(v.shape)}"
    for name, t in (("cu_seqlens_q", cu_q), ("lengths", lengths)):
        if t.dtype != torch.int32 or t.dim() != 1:
            return f"{name} must be one-dimensional and int32, got {t.dtype} {tuple(t.shape)}"
    sequences = lengths.numel()
    if cu_q.numel() != sequences + 1:
        return f"cu_seqlens_q must have one element more than lengths, got {cu_q.numel()} and {sequences}"
    if table is None:
        return None if k.shape[0] == sequences else f"k must be a cache of {sequences} sequences, got {k.shape[0]}"
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != sequences:
        return f"block_table must be ({sequences}, blocks) in int32, got {table.dtype} {tuple(table.shape)}"
    return f"a block must hold a multiple of 16 tokens, got {k.shape[1]}" if k.shape[1] % 16 else None


def _values(q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, table: Maybe, lengths: torch.Tensor) -> str | None:
    """Returns what is wrong with the numbers in the tensors, where the host may read them."""
    if not readable(lengths) or q.is_meta or not lengths.numel():
        return None
    ends, held, most = cu_q.tolist(), lengths.tolist(), capacity(k, table)
    if ends[0] or ends[-1] != q.shape[0] or any(b < a for a, b in pairwise(ends)):
        return f"cu_seqlens_q must rise from 0 to the number of tokens, {q.shape[0]}, got {ends[:9]}"
    if min(held) < 0 or max(held) > most:
        return f"lengths must be from 0 to the cache's {most} tokens, got {held[:9]}"
    if table is not None:
        owned = table[_used(k, table, lengths)]
        if owned.numel() and (int(owned.min()) < 0 or int(owned.max()) >= k.shape[0]):
            return (
                f"block_table must name blocks from 0 to {k.shape[0] - 1} up to each length, got {owned.tolist()[:9]}"
            )
    return None


def _used(k: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns which entries of the table hold keys."""
    return torch.arange(table.shape[1], device=k.device) * k.shape[1] < lengths[:, None]


def gathered(
    k: torch.Tensor, v: torch.Tensor, table: Maybe, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the caches as attention takes them, (1, Hkv, B capacity, D), 0 where no key is."""
    held = torch.arange(capacity(k, table), device=k.device) < lengths[:, None]
    found = []
    for cache in (k, v):
        if table is not None:
            cache = cache[torch.where(_used(k, table, lengths), table, 0).long()].flatten(1, 2)
        found.append(torch.where(held[..., None, None], cache, 0).flatten(0, 1).transpose(0, 1)[None])
    return found[0], found[1]


def sees_cached(cu_q: torch.Tensor, lengths: torch.Tensor, queries: int, room: int, chosen: Options) -> torch.Tensor:
    """Returns (queries, B room), True where a token sees a key of its own sequence, within its band."""
    token = torch.arange(queries, device=cu_q.device, dtype=torch.int32)
    number = torch.searchsorted(cu_q, token, right=True) - 1
    # One more sequence, without keys, for the tokens after the last one.
    begin, held = cu_q, torch.cat([lengths, torch.zeros_like(cu_q[:1])])
    rows = torch.cat([cu_q.diff(), torch.zeros_like(cu_q[:1])])
    i = token - begin[number] + (held - rows)[number]
    key = torch.arange(lengths.numel() * room, device=cu_q.device)
    mine, j = key // max(room, 1), key % max(room, 1)
    apart = j - i[:, None]
    seen = (mine == number[:, None]) & (j < held[number][:, None])
    return seen & (apart >= -chosen.left) & (apart <= chosen.right)


def cached_options(D: int, **given: Any) -> Options:
    """Returns the options of a call with a cache: all is aligned at the last key."""
    return options(D, **given)._replace(bottom=True)


@kernel_op(
    "attention_cached_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor lengths, Tensor? table, float scale, "
    "float softcap, int left, int right, bool bottom, int max_q, str precision, str? impl) -> (Tensor, Tensor)"
)
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (T, Hq, D) and lse (Hq, T)."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    if not tracing():
        select.select(OPS[True], rest[-1] or "triton", q, k, v, kernels=True)  # raises if it cannot run here
        cached.fwd(o, lse, q, k, v, *rest[:-1])
    return o, lse


def by_cache_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, lengths: torch.Tensor, table: Maybe,
    chosen: Options, max_q: int, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o (T, Hq, D) and lse (Hq, T), without gradients."""
    held, owned = lengths.contiguous(), None if table is None else table.contiguous()
    return _forward(q, k, v, cu_q.contiguous(), held, owned, *chosen[:5], max_q, precision(), impl)
