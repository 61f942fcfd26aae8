"""flex_attention: attention with a user's own function of the scores, and a mask by blocks that skips what it hides.

    s = scale q k^T,  o = softmax(f(s, b, h, i, j)) v,  over the keys j that the mask leaves to query i
    backward: P from lse,  dV = P^T do,  dS = f'(S) P (do v^T - delta),  dQ = scale dS k,  dK = scale dS^T q

f is a `triton.jit` function, compiled into the kernels. Blocks of keys that no query of a tile sees are neither loaded
nor computed, so the time follows the blocks. `attention(score_mod=, block_mask=)` comes here.
Source: Dong, Feng, Guessous, Liang and He, Flex Attention: A Programming Model for Generating Optimized Attention
Kernels, 2024 (arXiv:2412.05496).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.attention.flex.arguments import (
    BlockMask,
    Facts,
    Options,
    as_score_mod,
    check_call,
    facts_of,
    in_autocast,
    options,
    pairs_of,
    without_formula,
)
from ridgeline.ops.attention.flex.examples import Example
from ridgeline.ops.attention.flex.kernels import FLOPS, TRITON, by_kernels
from ridgeline.ops.attention.flex.pytorch import torch_flex, torch_refuses
from ridgeline.ops.attention.flex.reference import formula
from ridgeline.select import by_kind, eager


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, score_mod: Any = None, block_mask: BlockMask | None = None,
    causal: bool | str = False, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    window_align: str | None = None, prefix: int | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    given: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "window_align": window_align}
    return _formula(q, k, v, score_mod, block_mask, return_lse, prefix=prefix, **given)


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any = None, block_mask: BlockMask | None = None,
    return_lse: bool = False, recomputed: bool = False, **given: Any
) -> Any:  # fmt: skip
    chosen = options(q.shape[-1], **given)
    band = chosen.band(q.shape[2], k.shape[2])
    o, lse = formula(q, k, v, as_score_mod(score_mod), block_mask, band, chosen.scale, recomputed)
    return (o, lse) if return_lse else o


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, score_mod: object = None,
    block_mask: BlockMask | None = None, causal: bool | str = False, scale: float | None = None,
    window: tuple[int | None, int | None] | None = None, window_align: str | None = None, prefix: int | None = None,
    return_lse: bool = False, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns softmax(score_mod(scale q k^T)) v for each head, over the keys that block_mask leaves.

    Gradients flow to q, k and v, and are bitwise reproducible.

    q: (B, Hq, Sq, D); k, v: (B, Hkv, Sk, D); as `ridgeline.attention` takes them.
    score_mod: a `ridgeline.ScoreMod`, or a bare `triton.jit` function of (score, b, h, q, k), which has no gradient.
    block_mask: made by `ridgeline.block_mask` for these lengths; blocks without a seen key cost nothing.
    causal, window, window_align, prefix: as `ridgeline.attention` has them, beside a score_mod; not with a block_mask.
    scale: 1/sqrt(D) by default.
    Returns o, with q's shape, dtype and order of dimensions; with return_lse (o, lse), where lse is the natural
    logarithm of each row's sum of exponentials of new scores, (B, Hq, Sq), float32, also differentiable. A row that
    sees no key has o 0, lse -inf and no gradient.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts q, k and v first.
    Raises RidgelineError if shapes, strides, dtypes, devices or options do not match the above, if a gradient is asked
    for and the score_mod has none, or if `impl` cannot run the call.
    """
    q, k, v = in_autocast(q, k, v)
    mod = as_score_mod(score_mod)
    wants = causal, scale, window, window_align, prefix
    plain, chosen = _look(q, k, v, facts_of(mod, block_mask), *wants, return_lse, impl)
    if plain is not None:
        given: dict[str, Any] = dict(zip(("causal", "scale", "window", "window_align", "prefix"), wants, strict=True))
        return plain.call(q, k, v, score_mod=mod, block_mask=block_mask, return_lse=return_lse, **given)
    o, lse = by_kernels(q, k, v, mod, block_mask, chosen, impl)
    return (o, lse) if return_lse else o


@by_kind(3, strides=True)
def _look(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: Facts, causal: bool | str, scale: float | None,
    window: tuple[int | None, int | None] | None, window_align: str | None, prefix: int | None, return_lse: bool,
    impl: str | None,
) -> tuple[Implementation | None, Options]:  # fmt: skip
    """Checks a call and chooses. Returns too the options of kernels."""
    check_call(q, k, v, facts, causal, scale, window, window_align, prefix)
    plain = eager(FLEX, impl, q, k, v)
    if plain is not None and not facts.formula:
        wanted = "plain PyTorch runs this call, and needs the ScoreMod's eager=, its function in PyTorch"
        raise RidgelineError(f"flex_attention: {wanted}")
    return plain, options(q.shape[-1], causal, scale, window, None, window_align, prefix)


def cost(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, score_mod: Any = None, block_mask: BlockMask | None = None,
    return_lse: bool = False, **given: Any,
) -> tuple[Cost, Cost]:  # fmt: skip
    """Returns the costs of attention over the pairs that see each other. A score_mod's operations are not counted."""
    flops = 4 * q.shape[3] * pairs_of(q, k, block_mask, options(q.shape[-1], **given))
    read = [t for one in (score_mod, block_mask) for t in getattr(one, "tensors", ())]
    more, rows = nbytes(*read), 4 * q.shape[0] * q.shape[1] * q.shape[2]
    forward = Cost(nbytes(q, k, v) + more, nbytes(q) + (rows if return_lse else 0), flops)
    return forward, Cost(3 * nbytes(q) + nbytes(k, v) + rows + more, nbytes(q, k, v), flops * 5 // 2)


def _small(name: str, q: tuple[int, ...], k: tuple[int, ...], **given: Any) -> Case:
    return Case(name, (Spec(*q), Spec(*k), Spec(*k)), given)


def _bench(name: str, batch: int, length: int, D: int = 128, use: str = "bench", **given: Any) -> Case:
    shape = batch, 16, length, D
    dtypes = ("bfloat16",) if use == "bench" else ("float32",)
    return Case(f"{batch}x16x{length}x{D} {name}", (Spec(*shape),) * 3, given, dtypes, use)


def _sharding(score_mod: Any = None, block_mask: Any = None, **_: Any) -> str | None:
    """Functions take the numbers of batches and heads, which a rank does not know; a mask that all share does not."""
    shared = block_mask is None or block_mask.shape[:2] == (1, 1)
    return "q bhSD, k bhKD, v bhKD -> bhSD, bhS" if score_mod is None and shared else None


FLEX = Op(
    flex_attention,
    reference=reference,
    cost=cost,
    sharding=_sharding,
    flops=FLOPS,
    standards=("torch", "recomputed"),
    residue=2e-6,  # for rows that see one key
    cases=[
        _small("3x1x18x17x16 softcap", (3, 1, 18, 16), (3, 1, 17, 16), score_mod=Example("softcap", 1), causal=True),
        _small(
            "1x4/2x70x75x16 alibi, lse",
            (1, 4, 70, 16),
            (1, 2, 75, 16),
            score_mod=Example("alibi", 4),
            window=(20, 4),
            return_lse=True,
        ),
        _small("1x2x70x70x40 window", (1, 2, 70, 40), (1, 2, 70, 40), block_mask=Example("window", 9, 1, 70, 32)),
        _small(
            "1x2/1x100x100x16 documents, softcap",
            (1, 2, 100, 16),
            (1, 1, 100, 16),
            score_mod=Example("softcap", 2),
            block_mask=Example("documents", 20, 1, 100, 32),
        ),
        _small("2x1x130x130x80 prefix", (2, 1, 130, 80), (2, 1, 130, 80), block_mask=Example("prefix", 90, 2, 130, 32)),
        _bench("alibi", 1, 128, 64, "quick", score_mod=Example("alibi", 16), causal=True),
        *(
            case
            for D in (64, 128)
            for case in (
                _bench("alibi", 4, 4096, D, score_mod=Example("alibi", 16), causal=True),
                _bench("window 1024", 4, 4096, D, block_mask=Example("window", 1024, 4, 4096)),
                _bench("documents of 512", 4, 4096, D, block_mask=Example("documents", 512, 4, 4096)),
                _bench("prefix 2048", 4, 4096, D, block_mask=Example("prefix", 2048, 4, 4096)),
                _bench("softcap", 4, 4096, D, score_mod=Example("softcap", 16), causal=True),
            )
        ),
        _bench("window 1024", 1, 16384, block_mask=Example("window", 1024, 1, 16384)),
    ],
)

FLEX.eager(
    "naive",
    "the formula in eager PyTorch: passes over all scores in memory",
    reference,
    supports=without_formula,
)
FLEX.eager(
    "recomputed",
    "backward computes the scores again from lse, so that nothing of their size is kept for it",
    partial(_formula, recomputed=True),
    supports=without_formula,
    served=True,
)
FLEX.eager(
    "torch",
    "PyTorch's own: FlexAttention, whose functions Inductor compiles into its template of Triton",
    torch_flex,
    kind="compile",
    supports=torch_refuses,
)
FLEX.kernel(
    "triton",
    "attention's tiles with the user's functions compiled in, over lists of the blocks that the mask leaves",
    **TRITON,
)
