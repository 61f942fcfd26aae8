"""FlashAttention 4, in the CuTe DSL, here for sm_90.

Tensors are (batch, tokens, heads, D), or packed (tokens, heads, D).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.peers._caches import Step
from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "flash_attn.cute", "flash-attn-4", "cuda"


def _options(
    causal: Any, window: Any, scale: float | None, softcap: Any, return_lse: bool, same: bool
) -> dict[str, Any]:
    """Returns the options under FlashAttention's names. same: queries and keys are equally many: alignment is moot."""
    if return_lse or softcap is not None:
        raise RidgelineError("FlashAttention 4 has no gradient for lse, and none with a softcap")
    if not same and causal != "bottom_right" and (causal or window):
        raise RidgelineError("FlashAttention 4 aligns causal masks and windows at the bottom right")
    left, right = [None if w in (None, -1) else w for w in window or (None, None)]
    # With a left bound it needs both bounds, and not `causal`.
    banded = left is not None or right is not None
    return {"causal": bool(causal) and not banded, "softmax_scale": scale} | (
        {"window_size": (left, 0 if causal else right)} if banded else {}
    )


def _tuple(result: Any) -> torch.Tensor:
    """Returns o; some versions of FlashAttention return (o, lse)."""
    return result[0] if isinstance(result, tuple) else result


def _wanted(ordered: bool, deterministic: bool | None) -> None:
    if ordered and deterministic is False:
        raise RidgelineError("the call has deterministic=False, and this peer is the deterministic one")


def _attention(
    ordered: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Any = None, causal: Any = False,
    scale: Any = None, window: Any = None, softcap: Any = None, return_lse: bool = False,
    deterministic: bool | None = None
) -> torch.Tensor:  # fmt: skip
    from flash_attn.cute import flash_attn_func

    _wanted(ordered, deterministic)
    if mask is not None:
        raise RidgelineError("FlashAttention 4 takes no mask")
    options = _options(causal, window, scale, softcap, return_lse, q.shape[2] == k.shape[2])
    queries, keys, values = [t.transpose(1, 2) for t in (q, k, v)]
    return _tuple(flash_attn_func(queries, keys, values, deterministic=ordered, **options)).transpose(1, 2)


def _varlen(
    ordered: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, *, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    causal: Any = False, scale: Any = None, window: Any = None, softcap: Any = None, return_lse: bool = False,
    deterministic: bool | None = None, lengths: Any = None, block_table: Any = None
) -> torch.Tensor:  # fmt: skip
    from flash_attn.cute import flash_attn_varlen_func

    _wanted(ordered, deterministic)
    if lengths is not None or cu_seqlens_k is None:
        if ordered:
            raise RidgelineError("a call with a cache has no gradients, which alone this peer computes otherwise")
        options = _options(causal, window, scale, softcap, return_lse, True)  # all is aligned at the last key
        return _over_cache(q, k, v, lengths, block_table, options, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    options = _options(
        causal, window, scale, softcap, return_lse, q.shape[0] == k.shape[0] and max_seqlen_q == max_seqlen_k
    )
    given = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    # By name, since versions differ in the order of parameters.
    return _tuple(flash_attn_varlen_func(q, k, v, **given, deterministic=ordered, **options))


def _over_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Any, table: Any, options: dict[str, Any], **given: Any
) -> torch.Tensor:  # fmt: skip
    """Returns attention to caches of `lengths` keys. Raises RidgelineError with FlashAttention's own reason if it has
    none."""
    from flash_attn.cute import flash_attn_varlen_func

    given |= {"seqused_k": lengths} | ({} if table is None else {"page_table": table})
    try:
        return _tuple(flash_attn_varlen_func(q, k, v, **given, **options))
    except (AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0] or "an assertion without a text"
        raise RidgelineError(f"FlashAttention 4 does not take this cache: {reason}") from error


def _decode(*args: torch.Tensor, **options: Any) -> torch.Tensor:
    step = Step.of("FlashAttention 4", *args, **options)
    given = _options(True, None, step.scale, None, False, True)
    return _over_cache(step.q, step.k, step.v, step.lengths, step.table, given)


PEERS = {
    "attention": {"fa4": partial(_attention, False), "fa4_deterministic": partial(_attention, True)},
    "attention_varlen": {"fa4": partial(_varlen, False), "fa4_deterministic": partial(_varlen, True)},
    "decode_attention": {"fa4": _decode},
}
