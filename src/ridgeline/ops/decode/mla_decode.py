"""mla_decode: a decoder's step of multi-head latent attention: appends latents to a cache and attends to all of it.

    kv written at lengths, lengths + 1, ...        o = softmax(scale q C^T) C[:, :latent] over the tokens that q sees

All heads share the cache C, a latent part and a rotated part a token; the matrices that make keys and values of latents
are folded into q and into what follows. Each token is read once and used as key and as value.
Source: DeepSeek-AI, DeepSeek-V2, 2024 (arXiv:2405.04434).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.boundary import bumped, kernel_op, written
from ridgeline.op import Case, Cost, Implementation, Op, Spec, nbytes
from ridgeline.ops.decode import _latent_gluon
from ridgeline.ops.decode._cache import Half, Maybe, capacity
from ridgeline.ops.decode._cases import Filled, Table
from ridgeline.ops.decode._history import history, query_places, seen_keys, turned
from ridgeline.ops.decode._latent_arguments import check
from ridgeline.replay import Sure
from ridgeline.select import by_kind, eager, run


@kernel_op(
    "mla_decode_fwd(Tensor q, Tensor(a!) cache, Tensor lengths, Tensor? kv, Tensor? block_table, Tensor? cos, "
    "Tensor? sin, Tensor(b!)? kv_scale, int latent, float scale, bool interleaved, bool invariant, str precision, "
    "str? impl) -> (Tensor, Tensor)"
)
def _forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (B, S, H, latent) and lse (B, H, S)."""
    o = torch.empty((*q.shape[:3], rest[7]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    run(MLA_DECODE, "fwd", rest[-1], (o, lse), q, *rest[:-1])
    return o, lse


@torch.no_grad()
def reference(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, *, kv: Maybe = None, block_table: Maybe = None,
    latent: int = 512, scale: float, cos: Maybe = None, sin: Maybe = None, interleaved: bool = False,
    kv_scale: Maybe = None, invariant: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Every sequence padded to the cache's capacity. It keeps all scores in memory, and no kernel's tricks."""
    S, heads = q.shape[1:3]
    place = query_places(cache, lengths, block_table, S, kv is not None)
    new = None if kv is None else kv[:, :, None]
    if cos is not None and sin is not None:
        images = q[..., latent:], (q[:, :, :1] if new is None else new)[..., latent:]
        q_rope, kv_rope = turned(*images, cos, sin, place, interleaved)
        q = torch.cat((q[..., :latent], q_rope), -1)
        new = None if new is None else torch.cat((new[..., :latent], kv_rope), -1)
    scales = kv_scale[..., None] if kv_scale is not None and kv_scale.dim() == 2 else kv_scale
    whole = Half(cache[:, :, None], scales, None)
    (keys,), known, index = history([whole], None if new is None else [new], lengths, block_table, place, q.dtype)
    keys = keys[:, :, 0]
    scores = q.flatten(1, 2).to(keys.dtype) @ keys.mT
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).unflatten(1, (S, heads)) * scale
    scores = scores.masked_fill(~seen_keys(index, place, known)[:, :, None], -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().flatten(1, 2)
    o = (p.to(keys.dtype) @ keys[..., :latent]).unflatten(1, (S, heads)).to(q.dtype)
    return (o, lse.transpose(1, 2).contiguous()) if return_lse else o


@torch.no_grad()
def _naive(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, *, kv: Maybe = None, block_table: Maybe = None,
    latent: int = 512, return_lse: bool = False, **given: Any,
) -> Any:  # fmt: skip
    """One sequence at a time, cut to its length, which the host reads."""
    o = q.new_zeros((*q.shape[:3], latent))
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
    for b, length in enumerate(lengths.tolist()):
        if length < 0:
            continue
        one, mine, room = slice(b, b + 1), dict(given), length + (0 if kv is None else q.shape[1])
        mine["kv"], tokens = None if kv is None else kv[one], cache
        if block_table is not None:
            mine["block_table"] = block_table[one, : -(-room // cache.shape[1])]
        else:
            tokens, scale = cache[one, :room], given.get("kv_scale")
            mine["kv_scale"] = scale[one, :room] if scale is not None and scale.dim() == 2 else scale
        result = reference(q[one], tokens, lengths[one], latent=latent, return_lse=True, **mine)
        o[b], lse[b] = result[0][0], result[1][0]
    return (o, lse) if return_lse else o


def mla_decode(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, *, kv: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, latent: int = 512, scale: float, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, interleaved: bool = False, kv_scale: torch.Tensor | None = None,
    invariant: bool = False, return_lse: bool = False, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Appends latents to a cache in place, then lets all heads attend to it. It has no gradients.

    q: (B, S, H, D), the S queries (1 to 16) at the end of each sequence, with the keys' matrix absorbed; float32,
    float16 or bfloat16. D is `latent` (a multiple of 16 to 512) and 8 to 128 columns for rotation: 576 in DeepSeek's.
    cache: (B, S_max, D), or with block_table (B, most), int32: (blocks, block, D), where a sequence's tokens from n
    block on lie in block block_table[b, n]; block is a multiple of 16, and entries past the length may be anything. Its
    first `latent` columns are the values too. It has q's dtype or is float8_e4m3fn.
    lengths: (B,), int32: how many tokens the cache holds before the call. -1 marks padding: its result is 0, and
    nothing is written. Values on a GPU are not validated; no value is read by the host.
    kv: (B, S, D), written at lengths, lengths + 1, ..., and seen by the queries up to their own place; None: the cache
    holds them already, and lengths counts them. Tokens past the cache's end are not written.
    scale: what scores are multiplied by, 1/sqrt(128 + 64) in DeepSeek's: the head before absorption.
    cos, sin: (most, r): the columns of q and kv after the latent ones are rotated as `rope` does, at their places.
    kv_scale: float32, for a float8_e4m3fn cache: () or (1,), or the cache's first two sizes, a scale per token: a
    number is stored * scale. Scales per token are made for new tokens and written; one for all is only read.
    invariant: the result does not depend on what else is in the batch.
    Returns o (B, S, H, latent), of q's dtype, or with return_lse (o, lse), lse (B, H, S), float32. A row that sees
    nothing has o 0 and lse -inf.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    others = kv, block_table, cos, sin, kv_scale
    plain, by_token, sure = _look(q, cache, lengths, *others, latent, scale, impl)
    if plain is not None and plain.call is not None:
        given: dict[str, Any] = dict(zip(OTHERS, others, strict=True))
        given |= {"latent": latent, "scale": scale, "interleaved": interleaved, "invariant": invariant}
        return plain.call(q, cache, lengths, **given, return_lse=return_lse)
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    o, lse = _forward(q, cache, lengths, *others, latent, float(scale), interleaved, invariant, precision, impl, sure)
    if kv is not None and (sure is None or by_token):
        written(cache, kv_scale if by_token else None)
    elif kv is not None:
        bumped((cache,))
    return (o, lse) if return_lse else o


OTHERS = "kv", "block_table", "cos", "sin", "kv_scale"


@by_kind(8, optional=5, strides=True, gradients=True, sure=True)
def _look(
    q: Any, cache: Any, lengths: Any, kv: Any, block_table: Any, cos: Any, sin: Any, kv_scale: Any, latent: int,
    scale: float, impl: str | None,
) -> tuple[Implementation | None, bool, Sure | None]:  # fmt: skip
    """Checks a call and chooses. Returns too whether new tokens get a scale of their own."""
    given = dict(zip(OTHERS, (kv, block_table, cos, sin, kv_scale), strict=True))
    check(q, cache, lengths, given, latent, scale)
    return eager(MLA_DECODE, impl, q, **given), kv_scale is not None and kv_scale.dim() == 2, None


def cost(q: torch.Tensor, cache: torch.Tensor, lengths: Any, *, latent: int = 512, **given: Any) -> Any:
    """One read of q, of all tokens that the cache can hold, and of new ones; one write of o and of those.

    Lengths are on the device, so the cost is that of full caches."""
    B, S, heads, D = q.shape
    tokens, scale = B * capacity(cache, given.get("block_table")), given.get("kv_scale")
    cached = tokens * (D * cache.element_size() + (4 if scale is not None and scale.dim() == 2 else 0))
    new = 0 if given.get("kv") is None else nbytes(given["kv"])
    results = B * S * heads * latent * q.element_size()
    return Cost(nbytes(q) + cached + new, results + new, 2 * S * heads * (D + latent) * tokens), None


def _case(q: tuple[int, ...], latent: int, room: int, *, block: int = 0, new: bool = False, use: str = "check",
          full: bool = False, **given: Any) -> Case:  # fmt: skip
    B, S, heads, D = q
    shape = (B * room // block, block, D) if block else (B, room, D)
    given |= {"latent": latent, "scale": 192**-0.5}
    if new:
        given["kv"] = Spec(B, S, D, grad=False)
    if block:
        given["block_table"] = Table(B, room // block)
    most = room - S if new else room
    lengths = Filled(B, high=most) if full else Spec(B, dtype="int32", high=most + 1)
    name = f"{B}x{S}x{heads} of {room}x{D}{f' in blocks of {block}' if block else ''}{' appended' if new else ''}"
    name += "".join(f", {n}" for n in ("cos", "return_lse") if n in given).replace("cos", "rotated")
    args = (Spec(*q, grad=False), Spec(*shape, grad=False), lengths)
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",)}.get(use, ("float32", "float16", "bfloat16"))
    return Case(name, args, given, dtypes, use)


def _bench(batch: int, heads: int, keys: int, queries: int = 1, block: int = 0) -> Case:
    return _case((batch, queries, heads, 576), 512, keys, block=block, new=True, use="bench", full=True)


_angles = Spec(80, 8, grad=False)
MLA_DECODE = Op(
    mla_decode,
    reference=reference,
    cost=cost,
    mutates=(1,),
    flops={"mla_decode_fwd": lambda q, cache, lengths, kv, table, *rest: (
        cost(q, cache, lengths, block_table=table, latent=rest[3])[0].flops
    )},
    residue=2e-6,
    cases=[
        _case((3, 1, 4, 48), 32, 37),
        _case((3, 2, 5, 48), 32, 37, new=True, return_lse=True),
        _case((2, 5, 16, 64), 48, 70, new=True, cos=_angles, sin=_angles),
        _case((3, 2, 8, 48), 32, 96, block=16, new=True),
        _case((2, 1, 16, 576), 512, 40, new=True),
        _case((4, 1, 16, 576), 512, 256, use="quick", full=True),
        *(_bench(b, h, 8192) for b, h in ((1, 16), (32, 16), (1, 128), (32, 128), (128, 128))),
        *(_bench(b, h, 8192, block=64) for b, h in ((32, 16), (128, 128))),
        _bench(32, 16, 8192, block=16),
        _bench(32, 128, 8192, queries=2),
    ],
)  # fmt: skip
MLA_DECODE.eager("naive", "a sequence at a time, its five steps over the scores in memory", _naive)
MLA_DECODE.eager("torch", "all sequences at once, padded to the cache's capacity", reference, served=True)
MLA_DECODE.kernel(
    "triton",
    "one pass over the cache: a tile of tokens is key and value; parts of a sequence combined in order",
    **_latent_gluon.TRITON,
)
MLA_DECODE.kernel(
    "gluon",
    "Hopper: two warpgroups share each tile's result, one's softmax beside the other's products; a warp loads",
    **_latent_gluon.GLUON,
)
