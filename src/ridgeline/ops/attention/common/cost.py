"""The cost of a call of attention: pairs of a query and a key that see each other, and floating-point operations."""

from __future__ import annotations

from typing import Any

from ridgeline.ops.attention.common.arguments import Options

# Benchmarks off the grid: the default backward, and one with unordered sums, as peers have.
ORDERS: tuple[dict[str, Any], ...] = ({}, {"note": " out of order", "deterministic": False})


def pairs(sq: int, sk: int, chosen: Options) -> int:
    """Returns how many pairs of a query and a key see each other."""
    band = chosen.band(sq, sk)
    return sq * sk if band is None else band.pairs(sq, sk)


def count(q: Any, k: Any, mask: Any, cu_q: Any, cu_k: Any, chosen: Options) -> int:
    """Returns the operations of the forward pass in the torch ops' arguments; lengths of packed sequences are read."""
    if mask is not None:
        seen = q.shape[2] * k.shape[2]
    elif cu_q is None:
        seen = pairs(q.shape[2], k.shape[2], chosen)
    else:
        lengths = [cu.diff().tolist() for cu in (cu_q, cu_q if cu_k is None else cu_k)]
        seen = sum(pairs(sq, sk, chosen) for sq, sk in zip(*lengths, strict=True))
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * seen


def _backward(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, mask: Any, cu_q: Any, cu_k: Any, sinks: Any,
    *rest: Any,
) -> int:  # fmt: skip
    return count(q, k, mask, cu_q, cu_k, Options(*rest[:6])) * 5 // 2


def _partial(q: Any, k: Any, v: Any, *rest: Any) -> int:
    cu, scale, softcap, left, right, *_ = rest
    return count(q, k, None, cu, None, Options(scale, softcap, left, right, False, 0))


def count_cached(q: Any, cu_q: Any, lengths: Any, chosen: Options) -> int:
    """Returns the same of attention_varlen with a cache, (tokens, heads, D); lengths are read."""
    each = zip(cu_q.diff().tolist(), lengths.tolist(), strict=True)
    return 4 * q.shape[1] * q.shape[2] * sum(pairs(sq, sk, chosen) for sq, sk in each)


FLOPS: dict[str, Any] = {
    "attention_fwd": lambda q, k, v, mask, cu_q, cu_k, sinks, *o: count(q, k, mask, cu_q, cu_k, Options(*o[:6])),
    "attention_bwd": _backward,
    "attention_bwd_sinks": _backward,
    "attention_partial_fwd": _partial,
    "attention_partial_bwd": lambda do, dlse, q, k, v, o, lse, *rest: _partial(q, k, v, *rest) * 5 // 2,
}
CACHED_FLOPS: dict[str, Any] = {
    "attention_cached_fwd": lambda q, k, v, cu_q, lengths, table, *o: count_cached(
        q, cu_q, lengths, Options(*[*o[:5], 0])
    ),
}
