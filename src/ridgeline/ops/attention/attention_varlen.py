"""attention_varlen: attention within sequences of different lengths, packed one after the other without padding.

    sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1;  o, lse and gradients as in attention, for each

With a cache (`lengths`), keys lie in blocks that a table names, or in a row per sequence: prefill in chunks.
The kernels are attention's: a program looks up its tile's sequence, so nothing is padded and the host reads no lengths.
Source: the packed form of Dao, FlashAttention-2, 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dense_only, nbytes, readable
from ridgeline.ops.attention.common.arguments import check, in_autocast, options
from ridgeline.ops.attention.common.cached import by_cache_kernels, cached_options, check_cache
from ridgeline.ops.attention.common.cost import CACHED_FLOPS, ORDERS, pairs
from ridgeline.ops.attention.common.kernels import GLUON, OPS, TRITON, by_kernels
from ridgeline.ops.attention.common.packed import (
    by_naive,
    by_reference,
    by_tiles,
    by_torch,
    packed_heads,
    rounds_scores,
)
from ridgeline.select import eager

Maybe = torch.Tensor | None


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, *, block_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, causal: bool | str = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None, window_align: str | None = None,
    prefix: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False, deterministic: bool | None = None
) -> Any:  # fmt: skip
    given: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "window_align": window_align}
    given |= {"prefix": prefix, "softcap": softcap, "sinks": sinks, "return_lse": return_lse}
    given |= {"block_table": block_table, "lengths": lengths}
    return by_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, **given)


def _torch_refuses(
    q: torch.Tensor, *_: Any, softcap: Any = None, sinks: Any = None, return_lse: bool = False, **__: Any
) -> str | None:
    missing = softcap is not None or sinks is not None or return_lse
    return "scaled_dot_product_attention has no softcap, no sinks and no lse" if missing else None


def _faults(cu: dict[str, Any], q: torch.Tensor, k: torch.Tensor, longest: dict[str, Any]) -> str | None:
    for name, t in cu.items():
        if not isinstance(t, torch.Tensor) or t.dtype != torch.int32:
            kind = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
            return f"{name} must be an int32 tensor, got {kind}"
        if t.dim() != 1 or not t.numel():
            return f"{name} must be (sequences + 1,), got {tuple(t.shape)}"
        if t.device != q.device:
            return f"{name} and q must be on one device, got {t.device} and {q.device}"
    counts = [t.numel() for t in cu.values()]
    if counts[0] != counts[1]:
        return f"cu_seqlens_q and cu_seqlens_k must have the same length, got {counts[0]} and {counts[1]} elements"
    for name, value in longest.items():
        if value is not None and (type(value) is not int or value < 0):
            return f"{name} must be None or an int of at least 0, got {value!r}"
    for (name, t), x, most in zip(cu.items(), (q, k), longest.values(), strict=True):
        if readable(t) and not q.is_meta:
            ends = t.tolist()
            if ends[0] or ends[-1] != x.shape[0] or sorted(ends) != ends:
                some = ends if len(ends) < 9 else [*ends[:8], "..."]
                return f"{name} must rise from 0 to the number of tokens, {x.shape[0]}, got {some}"
            if most is not None and most < max([b - a for a, b in pairwise(ends)], default=0):
                return f"max_seqlen_{name[-1]} is {most}, but a sequence of {name} is longer"
    return None


def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, *, block_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, causal: bool | str = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None, window_align: str | None = None,
    prefix: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False, deterministic: bool | None = None, impl: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns `attention` within sequences that are packed one after the other.

    Gradients flow to q, k, v and sinks.

    q: (tokens, Hq, D); k, v: (tokens, Hkv, D), with as many sequences, whose lengths may differ from q's. Heads, D,
    dtypes and strides are as in `attention`.
    cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32, rising from 0 to the number of tokens: where each sequence
    begins, and the end.
    lengths: (sequences,), int32, instead of cu_seqlens_k: k and v are caches that hold so many keys of each sequence,
    those of its queries included, which are its last tokens. k, v: (sequences, S_max, Hkv, D); or with block_table
    (sequences, most), int32: (blocks, block, Hkv, D), where a sequence's keys from n block on lie in block
    block_table[b, n]; block is a multiple of 16, and entries past the length may be anything. causal (True or
    "bottom_right") and window then count from each query's own place in its sequence. A cache has no gradients.
    max_seqlen_q, max_seqlen_k: the longest lengths, if known; no implementation needs them.
    causal, window, window_align, prefix, scale, softcap, sinks, return_lse, deterministic: as in `attention`;
    "bottom_right" aligns each sequence, and the first `prefix` keys are each sequence's.
    Returns o, with q's shape and dtype; with return_lse (o, lse), where lse is (Hq, tokens), float32, also
    differentiable.
    Values on the GPU are not validated (that would synchronise): wrong cu_seqlens give meaningless results, but no
    access out of bounds. Tokens after the last sequence see nothing. On the CPU, and with RIDGELINE_CHECK=1, wrong
    values raise.
    Raises RidgelineError if shapes, strides, dtypes, devices or options do not match the above, or if `impl` cannot run
    the call.
    """
    q, k, v = in_autocast(q, k, v)
    given: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "window_align": window_align}
    given |= {"prefix": prefix, "softcap": softcap, "sinks": sinks, "return_lse": return_lse}
    rules = causal, scale, window, softcap, deterministic, window_align, prefix
    if lengths is not None or block_table is not None:
        check_cache(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, lengths, sinks, *rules)
        return _cached(q, k, v, cu_seqlens_q, block_table, lengths, max_seqlen_q or 0, impl, given)
    check("attention_varlen", 3, q, k, v, sinks, *rules)
    cu = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    dense_only("attention_varlen", cu.values())
    wrong = _faults(cu, q, k, {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
    if wrong:
        raise RidgelineError(f"attention_varlen: {wrong}")
    assert cu_seqlens_k is not None
    plain = eager(ATTENTION_VARLEN, impl, q, k, v, **given)
    if plain is not None:
        return plain.call(q, k, v, cu_seqlens_q, cu_seqlens_k, **given)  # type: ignore[misc]
    chosen = options(q.shape[-1], causal, scale, window, softcap, window_align, prefix)
    longest = max_seqlen_q or 0, max_seqlen_k or 0
    other = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.contiguous()
    packed = packed_heads(q), packed_heads(k), packed_heads(v), None, cu_seqlens_q.contiguous(), other
    sinks = None if sinks is None else sinks.contiguous()
    o, lse = by_kernels(*packed, sinks, chosen, longest, deterministic, impl)
    # Not o[0], whose backward copies the incoming gradient into zeros.
    return (o.squeeze(0).transpose(0, 1), lse.squeeze(0)) if return_lse else o.squeeze(0).transpose(0, 1)


def _cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, table: Maybe, lengths: Any, max_q: int,
    impl: str | None, given: dict[str, Any]
) -> Any:  # fmt: skip
    """Returns what attention_varlen does against caches."""
    caches = {"block_table": table, "lengths": lengths}
    plain = eager(ATTENTION_VARLEN, impl, q, k, v, **given, **caches)
    if plain is not None:
        return plain.call(q, k, v, cu_q, **given, **caches)  # type: ignore[misc]
    if impl == "gluon":
        raise RidgelineError(f"attention_varlen: impl='gluon' cannot run this call: {NO_CACHE}")
    chosen = cached_options(q.shape[-1], **given)
    o, lse = by_cache_kernels(q, k, v, cu_q, lengths, table, chosen, max_q, impl)
    return (o, lse) if given["return_lse"] else o


class Packed(Spec):
    """cu_seqlens for `high` tokens in sequences with lengths in the ratio of `parts`."""

    parts: tuple[int, ...]

    def __init__(self, *parts: int, tokens: int = 0):
        super().__init__(len(parts) + 1, dtype="int32", grad=False, high=tokens or sum(parts))
        object.__setattr__(self, "parts", parts)

    def ends(self) -> list[int]:
        return [sum(self.parts[:n]) * self.high // max(sum(self.parts), 1) for n in range(len(self.parts) + 1)]

    def make(self, dtype: Any, device: Any, generator: Any) -> torch.Tensor:
        made = torch.tensor(self.ends(), dtype=torch.int32, device=device)
        made.ends = self.ends()  # type: ignore[attr-defined]  # the cost of a tensor without data needs them
        return made


class Held(Spec):
    """How many keys of each sequence a cache holds."""

    parts: tuple[int, ...]

    def __init__(self, *parts: int):
        super().__init__(len(parts), dtype="int32", grad=False, high=max(parts) + 1)
        object.__setattr__(self, "parts", parts)

    def make(self, dtype: Any, device: Any, generator: Any) -> torch.Tensor:
        made = torch.tensor(self.parts, dtype=torch.int32, device=device)
        made.held = list(self.parts)  # type: ignore[attr-defined]  # as `ends` of Packed
        return made


class Table(Spec):
    """A block table that gives sequences of these lengths blocks in a mixed order, and nonsense past their ends."""

    used: tuple[int, ...]

    def __init__(self, block: int, *parts: int):
        used = tuple(-(-n // block) for n in parts)
        super().__init__(len(parts), max(used) + 1, dtype="int32", grad=False, high=sum(used) + 1)
        object.__setattr__(self, "used", used)

    def make(self, dtype: Any, device: Any, generator: Any) -> torch.Tensor:
        made = torch.full(self.shape, -(1 << 31), dtype=torch.int32, device=device)
        if made.is_meta:
            return made
        left = torch.randperm(self.high, device=device, generator=generator).to(torch.int32)
        for row, count in zip(made, self.used, strict=True):
            row[:count], left = left[:count], left[count:]
        return made


def cost(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: Maybe = None, *,
    block_table: Maybe = None, lengths: Maybe = None, return_lse: bool = False, sinks: Maybe = None, **given: Any,
) -> tuple[Cost, Cost | None]:  # fmt: skip
    """Returns attention's costs by lengths: from `ends` or `held` of tensors that have it, else from values."""

    def between(cu: Any) -> list[int]:
        return [b - a for a, b in pairwise(getattr(cu, "ends", None) or cu.tolist())]

    rows, queries = 4 * q.shape[0] * q.shape[1], between(cu_q)
    more = 0 if sinks is None else nbytes(sinks)
    written = nbytes(q) + (rows if return_lse else 0)
    chosen = options(q.shape[-1], **given) if lengths is None else cached_options(q.shape[-1], **given)
    keys = between(cu_k) if lengths is None else getattr(lengths, "held", None) or lengths.tolist()
    flops = 4 * q.shape[1] * q.shape[2] * sum(pairs(sq, sk, chosen) for sq, sk in zip(queries, keys, strict=True))
    if lengths is not None:
        owned = 2 * sum(keys) * k.shape[2] * k.shape[3] * k.element_size()
        return Cost(nbytes(q, cu_q, lengths) + owned, written, flops), None
    assert cu_k is not None
    backward = Cost(3 * nbytes(q) + nbytes(k, v, cu_q, cu_k) + rows + more, nbytes(q, k, v) + more, flops * 5 // 2)
    return Cost(nbytes(q, k, v, cu_q, cu_k) + more, written, flops), backward


def _case(
    name: str, heads: int, kv: int, D: int, parts: tuple[int, ...], keys: tuple[int, ...] = (), use: str = "check",
    **given: Any
) -> Case:  # fmt: skip
    keys, name = keys or parts, name + given.pop("note", "")
    k = Spec(sum(keys), kv, D)
    if use == "bench":  # peers need these
        given |= {"max_seqlen_q": max(parts), "max_seqlen_k": max(keys)}
    dtypes = {"check": ("float32", "float16", "bfloat16"), "quick": ("float32",), "bench": ("bfloat16",)}[use]
    return Case(name, (Spec(sum(parts), heads, D), k, k, Packed(*parts), Packed(*keys)), given, dtypes=dtypes, use=use)


def _chunks(
    name: str, heads: int, kv: int, D: int, parts: tuple[int, ...], keys: tuple[int, ...], block: int = 0,
    use: str = "check", **given: Any
) -> Case:  # fmt: skip
    """A case of chunks of queries against a cache, in blocks if `block` is not 0."""
    count = sum(-(-n // block) for n in keys) + 1 if block else len(keys)
    k = Spec(count, block or max(keys) + 3, kv, D, grad=False)
    given["lengths"] = Held(*keys)
    if block:
        given["block_table"] = Table(block, *keys)
    dtypes = ("bfloat16",) if use == "bench" else ("float32", "float16", "bfloat16")
    return Case(name, (Spec(sum(parts), heads, D, grad=False), k, k, Packed(*parts)), given, dtypes, use)


LENGTHS = (3072, 64, 8192, 512, 192, 1536, 768, 2048)  # drawn from 64 to 8192, 16384 in total
OPS[True] = ATTENTION_VARLEN = Op(
    attention_varlen,
    reference=reference,
    cost=cost,
    sharding=lambda block_table=None, lengths=None, **_: (
        None if lengths is not None else "q ThD, k KhD, v KhD, cu_seqlens_q C, cu_seqlens_k C, sinks h -> ThD, hT"
    ),
    standards=("torch", "tiled"),
    residue=2e-6,  # for rows that see one key
    flops=CACHED_FLOPS,
    cases=[
        _case("130 tokens", 2, 1, 16, (33, 97), (80, 47)),
        _case("70 tokens, one empty, causal", 2, 2, 24, (33, 0, 37), causal=True),
        _case(
            "60 tokens, bottom right, window", 2, 1, 16, (1, 40, 19), (8, 30, 40), causal="bottom_right", window=(12, 0)
        ),
        _case("50 tokens, softcap, lse", 2, 2, 32, (17, 33), (25, 20), softcap=3.0, return_lse=True),
        _chunks("50 tokens, blocks of 16", 4, 2, 16, (33, 0, 1, 16), (80, 5, 0, 47), 16, causal=True),
        _chunks("40 tokens, blocks of 48, lse", 2, 1, 40, (7, 33), (7, 101), 48, window=(9, 2), return_lse=True),
        _chunks("40 tokens, contiguous cache, softcap", 2, 2, 24, (7, 33), (60, 33), causal=True, softcap=3.0),
        _case("60 tokens, sinks, lse", 4, 2, 16, (1, 40, 19), (8, 0, 52), sinks=Spec(4, grad=False), return_lse=True),
        _case("70 tokens, prefix", 2, 1, 16, (33, 0, 37), (30, 5, 60), causal="bottom_right", prefix=35),
        _case("60 tokens, aligned window", 2, 1, 16, (20, 40), (50, 60), window=(20, 12), window_align="bottom_right"),
        _case("1024 tokens", 4, 4, 64, (600, 24, 400), use="quick", causal=True),
        *(
            _case(name, heads, kv, D, LENGTHS, use="bench", causal="causal" in name, **order)
            for order in ORDERS
            for name, heads, kv, D in (
                ("16x16384x128 causal", 16, 16, 128),
                ("32/8x16384x128 causal", 32, 8, 128),
                ("32x16384x64", 32, 32, 64),
                ("8x16384x256 causal", 8, 8, 256),
            )
        ),
        *(
            _chunks(f"{name} causal in blocks of {block}", 32, 8, 128, parts, keys, block, "bench", causal=True)
            for block in (16, 64, 128)
            for name, parts, keys in (
                ("32/8x4x2048 of 8192x128", (2048,) * 4, (8192,) * 4),
                ("32/8x2047+63x1 of 4096x128", (2047, *(1,) * 63), (4096,) * 64),
            )
        ),
    ],
)


NO_CACHE = "it takes no cache; `triton` does"


def _hopper_refuses(*args: Any, lengths: Maybe = None, **given: Any) -> str | None:
    return NO_CACHE if lengths is not None else GLUON["supports"](*args, **given)


ATTENTION_VARLEN.eager(
    "naive",
    "the formula in eager PyTorch: scores of all pairs of tokens, other sequences masked",
    by_naive,
    supports=rounds_scores,
)
ATTENTION_VARLEN.eager(
    "tiled",
    "FlashAttention's loop over tiles in eager PyTorch, with other sequences masked",
    by_tiles,
    served=True,
)
ATTENTION_VARLEN.eager(
    "torch",
    "PyTorch's own, with a mask of tokens by tokens that separates sequences",
    by_torch,
    supports=_torch_refuses,
    served=True,
)
ATTENTION_VARLEN.kernel(
    "triton",
    "attention's kernels: a program looks up its tile's sequence, or its blocks: no padding, no copy",
    **TRITON,
)
ATTENTION_VARLEN.kernel(
    "gluon",
    "attention's Hopper kernels: programs take tiles from a list, the longest sequences first",
    **GLUON | {"supports": _hopper_refuses},
)
