"""decode_attention: a step of a decoder: appends new keys and values to a cache and attends to all of it.

    k, v written at places lengths, lengths + 1, ...        o = softmax(scale q K^T) V over the keys that q sees

q has 1 to 16 queries at the end of each sequence; query s sees the keys up to its own place. The floor is one read of
the cached keys and values. The document's five kernels (concatenate, repeat, q k, softmax, p v) are the first rung.
Source: Dao, Haziza, Massa and Sizov, Flash-Decoding for long-context inference, 2023
(https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.boundary import bumped, kernel_op, written
from ridgeline.op import Case, Cost, Implementation, Op, Spec, nbytes
from ridgeline.ops.decode import _split_keys
from ridgeline.ops.decode._arguments import check
from ridgeline.ops.decode._cases import Filled, Scales, Table, benches
from ridgeline.ops.decode._history import halves, history, query_places, seen_keys, turned
from ridgeline.ops.decode._steps import five_kernels, two_kernels
from ridgeline.replay import Sure
from ridgeline.select import by_kind, eager, run

Maybe = torch.Tensor | None


@kernel_op(
    "decode_attention_fwd(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? k, Tensor? v, "
    "Tensor? block_table, Tensor? cos, Tensor? sin, Tensor? positions, Tensor? sinks, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor(e!)? k_zero, Tensor(f!)? v_zero, Tensor? tree, float scale, int left, float softcap, "
    "bool interleaved, bool invariant, str precision, str? impl) -> (Tensor, Tensor)"
)
def _forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (B, S, Hq, D) and lse (B, Hq, S)."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    run(DECODE_ATTENTION, "fwd", rest[-1], (o, lse), q, *rest[:-1])
    return o, lse


@torch.no_grad()
def reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *, k: Maybe = None,
    v: Maybe = None, block_table: Maybe = None, cos: Maybe = None, sin: Maybe = None, positions: Maybe = None,
    interleaved: bool = False, scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: Maybe = None, k_scale: Maybe = None, v_scale: Maybe = None, k_zero: Maybe = None, v_zero: Maybe = None,
    tree: Maybe = None, invariant: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Every sequence padded to the cache's capacity. It keeps all scores in memory, and no kernel's tricks."""
    place = query_places(k_cache, lengths, block_table, q.shape[1], k is not None)
    if cos is not None and sin is not None:
        at, other = place if positions is None else positions, q[:, :, : k_cache.shape[2]] if k is None else k
        q, other = turned(q, other, cos, sin, at, interleaved)
        k = None if k is None else other
    new = None if k is None or v is None else (k, v)
    caches = halves((k_cache, k_scale, k_zero), (v_cache, v_scale, v_zero))
    (keys, values), known, index = history(caches, new, lengths, block_table, place, q.dtype)
    seen = seen_keys(index, place, known, tree, window)
    return _attended(q, keys, values, seen, scale, softcap, sinks, return_lse)


def _attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float | None,
    softcap: float | None, sinks: Maybe, return_lse: bool,
) -> Any:  # fmt: skip
    grouped = q.to(keys.dtype).unflatten(2, (keys.shape[2], -1))  # query heads share keys, which are not repeated
    scores = torch.einsum("bshgd,bnhd->bhgsn", grouped, keys).flatten(1, 2)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)), -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()[..., : keys.shape[1]]
    shared = p.to(values.dtype).unflatten(1, (values.shape[2], -1))
    o = torch.einsum("bhgsn,bnhd->bshgd", shared, values).flatten(2, 3).to(q.dtype)
    return (o, lse.to(torch.promote_types(torch.float32, lse.dtype))) if return_lse else o


@torch.no_grad()
def _naive(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *, return_lse: bool = False,
    **given: Any,
) -> Any:  # fmt: skip
    """One sequence at a time, cut to its length, which the host reads."""
    o, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
    if given.get("sinks") is not None:
        lse = lse.copy_(given["sinks"][:, None])
    table, by_token = given.get("block_table"), ("k_scale", "v_scale", "k_zero", "v_zero")
    for b, length in enumerate(lengths.tolist()):
        if length < 0:
            continue
        mine = dict(given)
        for name in ("k", "v", "positions", "tree"):
            mine[name] = None if given.get(name) is None else given[name][b : b + 1]
        one = slice(b, b + 1)
        room = length + (q.shape[1] if given.get("k") is not None else 0)
        if table is None:
            caches = k_cache[one, :room], v_cache[one, :room]
            mine |= {n: given[n][one, :room] for n in by_token if given.get(n) is not None and given[n].dim() == 3}
        else:
            caches = k_cache, v_cache
            mine["block_table"] = table[one, : -(-room // k_cache.shape[1])]
        o[b], lse[b] = [t[0] for t in reference(q[one], *caches, lengths[one], **mine, return_lse=True)]
    return (o, lse) if return_lse else o


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    interleaved: bool = False, scale: float | None = None, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_zero: torch.Tensor | None = None, v_zero: torch.Tensor | None = None, tree: torch.Tensor | None = None,
    invariant: bool = False, return_lse: bool = False, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Appends new keys and values to a cache in place, then attends to it. It has no gradients.

    q: (B, S, Hq, D), the S queries (1 to 16) at the end of each sequence; float32, float16 or bfloat16; D a multiple of
    8 from 16 to 256. lengths: (B,), int32: how many keys the cache holds before the call. -1 marks padding: its result
    is 0, and nothing is written. Values on a GPU are not validated; no value is read by the host.
    k_cache, v_cache: (B, S_max, Hkv, D), Hq a multiple of Hkv; or with block_table (B, most), int32: (blocks, block,
    Hkv, D), where a sequence's tokens from n block on lie in block block_table[b, n]; block is a multiple of 16, and
    entries past the length may be anything. They have q's dtype, or are int8, float8_e4m3fn, or int4: uint8 (..., D/2),
    the number at an even column in the low half of its byte.
    k_scale, v_scale: float32, for a quantised cache: () or (1,), (Hkv,), or per token and head, the cache's first three
    sizes; a number is (stored - zero) * scale. k_zero, v_zero: alike, or None for 0 (8 for int4). Scales and zeros per
    token are made for new tokens and written; others are only read.
    k, v: (B, S, Hkv, D), written at lengths, lengths + 1, ..., and seen by the queries; None: the cache holds them
    already, and lengths counts them. Tokens past the cache's end are not written.
    cos, sin: (most, r): q and k are rotated as `rope` does, at `positions` (B, S), or at their places in the sequence.
    scale: 1/sqrt(D) by default. window: how many earlier keys a query sees; None: all. softcap: scores become
    softcap * tanh(scores / softcap). sinks: (Hq,), logits that join each row's sum.
    tree: (B, S, S), bool: which of the newest S keys each query sees, instead of those up to its own place.
    invariant: the result does not depend on what else is in the batch.
    Returns o, of q's shape and dtype, or with return_lse (o, lse), lse (B, Hq, S), float32. A row that sees nothing has
    o 0 and lse -inf, or its sink.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    made = k_scale, v_scale, k_zero, v_zero
    others = k, v, block_table, cos, sin, positions, sinks, *made, tree
    plain, numbers, by_token, sure = _look(q, k_cache, v_cache, lengths, *others, scale, window, softcap, impl)
    if plain is not None and plain.call is not None:
        given: dict[str, Any] = dict(zip(OTHERS, others, strict=True))
        given |= {"interleaved": interleaved, "scale": scale, "window": window, "softcap": softcap}
        return plain.call(q, k_cache, v_cache, lengths, **given, invariant=invariant, return_lse=return_lse)
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    o, lse = _forward(q, k_cache, v_cache, lengths, *others, *numbers, interleaved, invariant, precision, impl, sure)
    if k is not None and (sure is None or by_token):
        written(k_cache, v_cache, *(made if by_token else ()))
    elif k is not None:
        bumped((k_cache, v_cache))
    return (o, lse) if return_lse else o


OTHERS = "k", "v", "block_table", "cos", "sin", "positions", "sinks", "k_scale", "v_scale", "k_zero", "v_zero", "tree"


@by_kind(16, optional=12, strides=True, gradients=True, sure=True)
def _look(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, k: Any, v: Any, block_table: Any, cos: Any, sin: Any,
    positions: Any, sinks: Any, k_scale: Any, v_scale: Any, k_zero: Any, v_zero: Any, tree: Any, scale: float | None,
    window: int | None, softcap: float | None, impl: str | None,
) -> tuple[Implementation | None, tuple[float, int, float], bool, Sure | None]:  # fmt: skip
    """Checks a call and chooses. Returns too scale, window and softcap as the launchers take them, and whether new
    tokens get scales of their own."""
    others = k, v, block_table, cos, sin, positions, sinks, k_scale, v_scale, k_zero, v_zero, tree
    given = dict(zip(OTHERS, others, strict=True))
    check(q, k_cache, v_cache, lengths, given, window, softcap, scale)
    plain = eager(DECODE_ATTENTION, impl, q, **given)
    numbers = q.shape[-1] ** -0.5 if scale is None else float(scale), -1 if window is None else window, softcap or 0.0
    return plain, numbers, k_scale is not None and k_scale.dim() == 3, None


def cost(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: Any, *, return_lse: bool = False,
    **given: Any
) -> Any:  # fmt: skip
    """One read of q, of what the cache can hold (numbers or codes, scales and zeros) and of what is new; one write of o
    and of the new tokens in the cache's form.

    Lengths are on the device, so the cost is that of full caches, of which the new tokens are the end."""
    B, S, heads, D = q.shape
    table = given.get("block_table")
    keys = B * k_cache.shape[1] * (1 if table is None else table.shape[1])
    facts = [given[n] for n in ("k_scale", "v_scale", "k_zero", "v_zero") if given.get(n) is not None]
    token = 2 * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()  # a token's bytes in both caches
    token += sum(nbytes(t[0, 0]) for t in facts if t.dim() == 3)
    shared = nbytes(lengths, *(t for t in facts if t.dim() < 3))
    shared += 0 if table is None else nbytes(table)
    fresh = B * S if given.get("k") is not None else 0
    new = nbytes(given["k"], given["v"]) if fresh else 0
    read = nbytes(q) + max(keys - fresh, 0) * token + shared + new
    written = nbytes(q) + fresh * token + (4 * B * S * heads if return_lse else 0)
    return Cost(read, written, 4 * S * heads * D * keys), None


def _scales(*shape: int) -> dict[str, Any]:
    return {n: Scales(*shape, size=0.02) for n in ("k_scale", "v_scale")}


def _small(name: str, q: tuple[int, ...], heads: int, room: int, new: bool = False, **given: Any) -> Case:
    codes, high = given.pop("codes", (None, 0))
    width = q[3] // 2 if codes == "uint8" else q[3]
    cache = Spec(q[0], room, heads, width, dtype=codes, grad=False, high=high)
    if new:
        given |= {n: Spec(*q[:2], heads, q[3], grad=False) for n in ("k", "v")}
    lengths = Spec(q[0], dtype="int32", high=room - q[1] + 1)
    return Case(name, (Spec(*q, grad=False), cache, cache, lengths), given)


DECODE_ATTENTION = Op(
    decode_attention,
    reference=reference,
    cost=cost,
    mutates=(1, 2),
    graphed=True,
    flops={"decode_attention_fwd": lambda q, k_cache, v_cache, lengths, k, v, table, *_: (
        cost(q, k_cache, v_cache, lengths, k=k, v=v, block_table=table)[0].flops
    )},
    residue=2e-6,
    cases=[
        _small("3x1x4/2 of 37x16", (3, 1, 4, 16), 2, 37),
        _small("3x1x4/2 of 37x16 appended", (3, 1, 4, 16), 2, 37, True),
        _small("2x5x6/1 of 70x40 appended, rotated", (2, 5, 6, 40), 1, 70, True, cos=Spec(80, 20, grad=False),
               sin=Spec(80, 20, grad=False)),
        _small("2x3x2 of 50x24 window, softcap", (2, 3, 2, 24), 2, 50, window=11, softcap=3.0, scale=0.4),
        _small("2x4x2/1 of 64x16 sinks, lse", (2, 4, 2, 16), 1, 64, True, sinks=Spec(2, grad=False), return_lse=True),
        _small("2x4x2/1 of 64x16 tree", (2, 4, 2, 16), 1, 64, True, tree=Spec(2, 4, 4, dtype="bool", high=2)),
        Case(
            "3x2x4/2 of 6 blocks of 16",
            (Spec(3, 2, 4, 16, grad=False), *[Spec(18, 16, 2, 16, grad=False)] * 2, Spec(3, dtype="int32", high=94)),
            {"block_table": Table(3, 6), **{n: Spec(3, 2, 2, 16, grad=False) for n in ("k", "v")}},
        ),
        _small("3x2x4/2 of 40x16 int8", (3, 2, 4, 16), 2, 40, codes=("int8", 0), **_scales(2)),
        _small("3x1x4/2 of 40x32 int4", (3, 1, 4, 32), 2, 40, codes=("uint8", 256), **_scales(3, 40, 2)),
        _small("3x1x4/2 of 40x32 int4 with zeros", (3, 1, 4, 32), 2, 40, codes=("uint8", 256), **_scales(3, 40, 2),
               k_zero=Scales(3, 40, 2, size=8.0), v_zero=Scales(3, 40, 2, size=8.0)),
        Case("4x1x8/2 of 256x64", (Spec(4, 1, 8, 64, grad=False), *[Spec(4, 256, 2, 64, grad=False)] * 2,
             Filled(4, high=256)), dtypes=("float32",), use="quick"),
        *benches(),
    ],
)  # fmt: skip
DECODE_ATTENTION.eager(
    "naive", "a sequence at a time, its steps in memory: the cache's bytes moved about 7 times", _naive, reads=True
)
DECODE_ATTENTION.eager("torch", "all sequences at once, padded to the cache's capacity", reference, served=True)
DECODE_ATTENTION.eager(
    "five_kernels",
    "concat_kv in place, repeat_kv, q k, masked_softmax, p v: its bytes 1 + 2 x group times",
    five_kernels,
)
DECODE_ATTENTION.eager(
    "two_kernels", "concat_kv in place, attention_varlen over the cache: its bytes once, few programs", two_kernels
)
DECODE_ATTENTION.kernel(
    "triton",
    "one pass over the cache: a program per part of the keys, new tokens from registers, parts combined in order",
    kind="triton",
    fwd=_split_keys.fwd,
    served=True,
)
