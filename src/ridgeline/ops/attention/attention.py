"""attention: o = softmax(scale q k^T) v for each head, without the scores in memory.

    backward: P from lse,  delta = rowsum(o do) - dlse,  dV = P^T do,  dS = P (do v^T - delta)
              dQ = scale dS k,  dK = scale dS^T q

Tiles of queries walk tiles of keys and keep a running maximum and sum per row (`gluon`: the first tile's maximum). So
the time is that of the matrix products, and inputs and outputs pass through memory once. docs/attention.md tells which
file has what.
Source: Dao, FlashAttention-2, 2023 (arXiv:2307.08691); Rabe and Staats, Self-attention does not need O(n^2) memory,
2021 (arXiv:2112.05682); Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, dense_only, get, nbytes
from ridgeline.ops.attention.common.arguments import Options, check, in_autocast, options
from ridgeline.ops.attention.common.cost import FLOPS, ORDERS, pairs
from ridgeline.ops.attention.common.kernels import GLUON, OPS, TRITON, by_kernels
from ridgeline.ops.attention.common.reference import formula, in_pieces, rounds_scores
from ridgeline.ops.attention.common.tiled import tiled
from ridgeline.select import by_kind, eager


def _formula(
    how: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    **given: Any,
) -> Any:
    chosen = options(q.shape[-1], **given)
    o, lse = how(q, k, v, mask, sinks, chosen.band(q.shape[2], k.shape[2]), chosen.scale, chosen.softcap)
    return (o, lse) if return_lse else o


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None, causal: bool | str = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None, window_align: str | None = None,
    prefix: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False, deterministic: bool | None = None,
) -> Any:  # fmt: skip
    given: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "window_align": window_align}
    return _formula(in_pieces, q, k, v, mask, return_lse, sinks, prefix=prefix, softcap=softcap, **given)


NAIVE = partial(_formula, formula)


@cache
def _compiled() -> Any:
    return torch.compile(NAIVE, dynamic=False, fullgraph=True)


def _compile(*args: Any, **given: Any) -> Any:
    return _compiled()(*args, **given)


def _torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None, causal: bool | str = False,
    scale: float | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    if mask is not None:
        mask = (mask if mask.dtype == torch.bool else mask.to(q.dtype)).expand(*q.shape[:3], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(causal), scale=scale, enable_gqa=grouped)


def _torch_refuses(
    q: torch.Tensor, k: Any = None, v: Any = None, *, mask: Any = None, causal: Any = False, window: Any = None,
    softcap: Any = None, return_lse: bool = False, prefix: Any = None, sinks: Any = None, **_: Any
) -> str | None:  # fmt: skip
    if prefix or sinks is not None:
        return "scaled_dot_product_attention has no prefix and no sinks"
    if causal == "bottom_right" or window not in (None, (None, None), (-1, -1)) or softcap is not None or return_lse:
        return "scaled_dot_product_attention has no window, softcap, lse or causal='bottom_right'"
    there = q.is_cuda and not torch.compiler.is_compiling()
    if there and any([isinstance(t, torch.Tensor) and t.data_ptr() % 16 for t in (q, k, v, mask)]):
        return "scaled_dot_product_attention fails on tensors that do not begin at multiples of 16 bytes"
    return "scaled_dot_product_attention takes a mask or causal, not both" if mask is not None and causal else None


def _check_mask(mask: Any, q: torch.Tensor, k: torch.Tensor) -> str | None:
    shape = *q.shape[:3], k.shape[2]
    if not isinstance(mask, torch.Tensor):
        return f"mask must be a tensor or None, got {type(mask).__name__}"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"mask must be torch.bool (True: seen) or floating point (added to the scores), got {mask.dtype}"
    if mask.device != q.device:
        return f"mask and q must be on one device, got {mask.device} and {q.device}"
    if mask.dim() > 4 or any([n not in (1, m) for n, m in zip(reversed(mask.shape), reversed(shape), strict=False)]):
        return f"mask must broadcast to (batch, heads, queries, keys), here {shape}, got {tuple(mask.shape)}"
    return None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None, causal: bool | str = False,
    scale: float | None = None, window: tuple[int | None, int | None] | None = None, window_align: str | None = None,
    prefix: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    score_mod: object = None, block_mask: object = None, return_lse: bool = False, deterministic: bool | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns softmax(scale q k^T) v for each head, as `torch.nn.functional.scaled_dot_product_attention`.

    Gradients flow to q, k, v and sinks.

    q: (B, Hq, Sq, D); k, v: (B, Hkv, Sk, D); float32, float16 or bfloat16, of one dtype and device. Hq is a multiple of
    Hkv: Hq/Hkv neighbouring heads share keys and values, which are not repeated. D is a multiple of 8 from 16 to 256.
    The last stride is 1, the others are free, so (B, S, H, D).transpose(1, 2) costs no copy.
    mask: broadcasts to (B, Hq, Sq, Sk); torch.bool, True for keys that are seen, or floating point, added to the
    scores. It gets no gradient.
    causal: True lets query i see keys up to i; "bottom_right" up to i + Sk - Sq, as a decoder with a cache needs.
    window: (left, right), how many keys before and after its own position a query sees; None or -1 is unbounded.
    window_align: "bottom_right" shifts positions by Sk - Sq, for windows without causal; "top_left" or None does not.
    With causal the window is aligned as causal is.
    prefix: with causal and without a window, how many first keys all queries see (a prefix LM).
    scale: 1/sqrt(D) by default. softcap: replaces scores by softcap * tanh(scores / softcap), before masks.
    sinks: (Hq,), floating point of any dtype: logits that join the softmax of each row of their head, as a key without
    a value would; neither scaled nor capped. -inf counts for nothing.
    score_mod, block_mask: a `ridgeline.ScoreMod`, your own function of the scores, and a mask by blocks of
    `ridgeline.block_mask`; the call is then `ridgeline.flex_attention`'s, which has no mask, softcap and sinks.
    deterministic: False allows faster backward passes whose gradients vary in the last bits; by default they are equal.
    Returns o, with q's shape, dtype and order of dimensions; with return_lse (o, lse), where lse is the natural
    logarithm of each row's sum of exponentials, its sink's included, (B, Hq, Sq), float32, also differentiable. A row
    that sees no key has o 0, lse -inf or its sink, and no gradient but the sink's.
    float32 products follow `torch.get_float32_matmul_precision()`. On Hopper, up to D 128, "highest" adds up three
    TF32 products for each, with the error of a float32 product. Autocast casts q, k and v first.
    Raises RidgelineError if shapes, strides, dtypes, devices or options do not match the above, or if `impl` cannot run
    the call.
    """
    if score_mod is not None or block_mask is not None:
        refused = {"mask": mask, "softcap": softcap, "sinks": sinks}
        flex: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "causal": causal, "scale": scale}
        flex |= {"window": window, "window_align": window_align, "prefix": prefix, "return_lse": return_lse}
        return _flex(q, k, v, refused, deterministic, impl=impl, **flex)
    q, k, v = in_autocast(q, k, v)
    wants = causal, scale, window, window_align, prefix, softcap
    plain, chosen = _look(q, k, v, mask, sinks, *wants, return_lse, deterministic, impl)
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        wrong = "mask requires a gradient, but attention computes none for it; pass mask.detach()"
        raise RidgelineError(f"attention: {wrong}")
    if plain is not None:
        return plain.call(q, k, v, **_given(mask, sinks, *wants), return_lse=return_lse)
    sinks = None if sinks is None else sinks.contiguous()
    o, lse = by_kernels(q, k, v, mask, None, None, sinks, chosen, (0, 0), deterministic, impl)
    return (o, lse) if return_lse else o


def _flex(q: Any, k: Any, v: Any, refused: dict[str, Any], deterministic: Any, **given: Any) -> Any:
    """Runs `flex_attention`, whose gradients are always bitwise reproducible."""
    found = [name for name, value in refused.items() if value is not None]
    if found:
        instead = "put what it does into the functions"
        raise RidgelineError(f"attention: {found[0]} does not go with score_mod and block_mask; {instead}")
    if isinstance(deterministic, torch.Tensor) or deterministic not in (None, True, False):
        raise RidgelineError(f"attention: deterministic must be None, True or False, got {deterministic!r}")
    op = get("flex_attention")
    return op.function(q, k, v, **given)


def _given(
    mask: Any, sinks: Any, causal: Any, scale: Any, window: Any, window_align: Any, prefix: Any, softcap: Any
) -> dict[str, Any]:
    given = {"mask": mask, "sinks": sinks, "causal": causal, "scale": scale, "window": window}
    return given | {"window_align": window_align, "prefix": prefix, "softcap": softcap}


@by_kind(5, optional=2, strides=True)
def _look(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
    causal: bool | str, scale: float | None, window: tuple[int | None, int | None] | None, window_align: str | None,
    prefix: int | None, softcap: float | None, return_lse: bool, deterministic: bool | None, impl: str | None,
) -> tuple[Implementation | None, Options]:  # fmt: skip
    """Checks a call, but for the mask's gradient, and chooses. Returns too the options of kernels."""
    check("attention", 4, q, k, v, sinks, causal, scale, window, softcap, deterministic, window_align, prefix)
    if mask is not None:
        dense_only("attention", (mask,))
        wrong = _check_mask(mask, q, k)
        if wrong:
            raise RidgelineError(f"attention: {wrong}")
    given = _given(mask, sinks, causal, scale, window, window_align, prefix, softcap)
    plain = eager(ATTENTION, impl, q, k, v, **given, return_lse=return_lse)
    return plain, options(q.shape[-1], causal, scale, window, softcap, window_align, prefix)


def cost(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Any = None, return_lse: bool = False,
    sinks: Any = None, **given: Any
) -> tuple[Cost, Cost]:  # fmt: skip
    """Returns the costs: two products forward, five backward, which reads do, q, k, v, o and lse.

    A mask counts as all pairs, plus its own bytes. Sinks cost their own bytes.
    """
    chosen = options(q.shape[-1], **given)
    count = q.shape[2] * k.shape[2] if mask is not None else pairs(q.shape[2], k.shape[2], chosen)
    flops, masks = 4 * q.shape[0] * q.shape[1] * q.shape[3] * count, 0 if mask is None else nbytes(mask)
    rows, more = 4 * q.shape[0] * q.shape[1] * q.shape[2], 0 if sinks is None else nbytes(sinks)
    forward = Cost(nbytes(q, k, v) + masks + more, nbytes(q) + (rows if return_lse else 0), flops)
    return forward, Cost(3 * nbytes(q) + nbytes(k, v) + rows + masks + more, nbytes(q, k, v) + more, flops * 5 // 2)


def _case(batch: int, heads: int, length: int, D: int, use: str = "bench", kv: int = 0, **given: Any) -> Case:
    note = given.pop("note", "")
    name = f"{batch}x{heads}{f'/{kv}' if kv else ''}x{length}x{D}{' causal' if given.get('causal') else ''}"
    name += f" window {given['window'][0]}" if "window" in given else ""
    name += f" softcap {given['softcap']:g}" if "softcap" in given else ""
    name += " deterministic" if given.get("deterministic") else note
    keys = Spec(batch, kv or heads, length, D)
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "grid": ("bfloat16", "float32")}[use]
    return Case(name, (Spec(batch, heads, length, D), keys, keys), given, dtypes=dtypes, use=use)


def _small(name: str, q: tuple[int, ...], k: tuple[int, ...], **given: Any) -> Case:
    return Case(name, (Spec(*q), Spec(*k), Spec(*k)), given)


def _decode(batch: int, rows: int, columns: int, **given: Any) -> Case:
    """A step of a decoder with a cache, forward only."""
    q, keys = Spec(batch, 32, rows, 128, grad=False), Spec(batch, 8, columns, 128, grad=False)
    name = f"{batch}x32/8x{rows} of {columns}x128{' bottom right' if given else ''}"
    return Case(name, (q, keys, keys), given, dtypes=("bfloat16",), use="bench")


GRID = [
    (16384 // s, 2048 // d, s, d, c) for d in (64, 128) for s in (1024, 2048, 4096, 8192, 16384) for c in (False, True)
]
OFF = [
    (4, 25, 4096, 80),
    (4, 21, 4096, 96),
    (4, 8, 4096, 256),
    (16, 16, 1000, 128),
    (5, 16, 3000, 128),
    (4, 16, 4097, 128),
]
ATTENTION = OPS[False] = Op(
    attention,
    reference=reference,
    cost=cost,
    sharding="q bhSD, k bhKD, v bhKD, mask bhSK, sinks h -> bhSD, bhS",
    flops=FLOPS,
    standards=("torch", "tiled"),
    residue=2e-6,  # for rows that see one key
    cases=[
        _small("3x1x18x16x16", (3, 1, 18, 16), (3, 1, 16, 16)),
        _small("1x2x40x33x24 causal", (1, 2, 40, 24), (1, 2, 33, 24), causal=True),
        _small("1x2x33x45x16 lse", (1, 2, 33, 16), (1, 2, 45, 16), return_lse=True),
        _small(
            "1x2x85x170x16 bottom right, window",
            (1, 2, 85, 16),
            (1, 2, 170, 16),
            causal="bottom_right",
            window=(50, None),
        ),
        _small("1x4/2x50x41x32 window, softcap", (1, 4, 50, 32), (1, 2, 41, 32), window=(7, 9), softcap=2.0, scale=0.3),
        _small(
            "1x2x40x17x40 rows without keys", (1, 2, 40, 40), (1, 2, 17, 40), causal="bottom_right", return_lse=True
        ),
        # dQ in several pieces, then D in two parts.
        Case("1x2x70x300x40", (Spec(1, 2, 70, 40), *[Spec(1, 2, 300, 40)] * 2), dtypes=("float16",)),
        Case("1x2x70x150x80 causal", (Spec(1, 2, 70, 80), *[Spec(1, 2, 150, 80)] * 2), {"causal": True}, ("float16",)),
        Case("1x2x100x90x256", (Spec(1, 2, 100, 256), *[Spec(1, 2, 90, 256)] * 2), dtypes=("float16",)),
        Case(
            "2x2x65x97x16 mask",
            (Spec(2, 2, 65, 16), *[Spec(2, 1, 97, 16)] * 2),
            {"mask": Spec(2, 1, 65, 97, dtype="bool", high=2)},
        ),
        Case(
            "1x2x80x100x16 bias",
            (Spec(1, 2, 80, 16), *[Spec(1, 2, 100, 16)] * 2),
            {"mask": Spec(2, 1, 100, grad=False), "softcap": 5.0},
        ),
        _small(
            "2x4/2x70x37x16 causal, sinks, lse",
            (2, 4, 70, 16),
            (2, 2, 37, 16),
            causal="bottom_right",
            sinks=Spec(4, grad=False),
            return_lse=True,
        ),
        _small("1x2x75x90x32 prefix", (1, 2, 75, 32), (1, 2, 90, 32), causal=True, prefix=41),
        _small(
            "1x2x33x80x16 window bottom right",
            (1, 2, 33, 16),
            (1, 2, 80, 16),
            window=(9, 5),
            window_align="bottom_right",
        ),
        _case(2, 4, 256, 64, "quick"),
        _case(1, 8, 512, 64, "quick", causal=True),
        *(_case(b, h, s, d, causal=c, deterministic=fixed) for fixed in (False, True) for b, h, s, d, c in GRID),
        *(_case(b, h, s, d, **order) for order in ORDERS for b, h, s, d in OFF),
        *(_case(4, h, 4096, d, causal=True, **order) for order in ORDERS for h, d in ((10, 200), (8, 256))),
        *(_case(8, 1, s, d, "grid") for d in (16, 32, 64, 128) for s in (256, 1024, 4096, 8192, 16384)),
        *(_case(1, 1, 1 << s, d, "grid", causal=True) for d in (16, 32, 64, 128) for s in range(7, 17)),
        *(_case(4, 32, 4096, d, kv=8, causal=True, **order) for order in ORDERS for d in (64, 128)),
        *(_case(4, 32, 4096, 128, kv=8, **order) for order in ORDERS),
        *(_case(1, 16, 16384, 128, causal=True, window=(1024, 0), **order) for order in ORDERS),
        *(
            _case(1, h, s, 128, kv=kv, causal=True, **order)
            for order in ORDERS
            for h, kv, s in ((32, 8, 2048), (8, 1, 8192))
        ),
        _case(1, 8, 4096, 256, kv=4, causal=True, softcap=50.0),  # Gemma 2 2B's
        _case(1, 32, 4096, 128, kv=16, causal=True, softcap=50.0),  # Gemma 2 27B's
        *(_decode(b, 1, s) for b, s in ((1, 8192), (1, 32768), (16, 8192))),
        _decode(4, 8, 8192, causal="bottom_right"),
    ],
)

ATTENTION.eager(
    "naive", "the formula in eager PyTorch: passes over all scores in memory", NAIVE, supports=rounds_scores
)
ATTENTION.eager(
    "tiled",
    "FlashAttention's loop over tiles in eager PyTorch; backward recomputes the scores from lse",
    partial(_formula, tiled),
    served=True,
)
ATTENTION.eager(
    "torch",
    "PyTorch's own: its choice of FlashAttention-2, cuDNN or memory-efficient kernels on an NVIDIA GPU",
    _torch,
    supports=_torch_refuses,
    served=True,
)
ATTENTION.eager(
    "compile",
    "the formula fused by torch.compile: fewer passes over the scores in memory",
    _compile,
    kind="compile",
    supports=rounds_scores,
)
ATTENTION.kernel(
    "triton",
    "one program per tile, scores in registers, unmasked blocks in their own loop; backward in two passes",
    **TRITON,
)
ATTENTION.kernel(
    "gluon",
    "Hopper: warpgroups alternate products and exponentials, a warp loads; backward in one pass",
    **GLUON,
)
