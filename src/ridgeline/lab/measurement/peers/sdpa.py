"""PyTorch's attention by one backend, FlashAttention-2 or cuDNN.

The implementation `torch` chooses among them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.peers._caches import Step
from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "torch", "torch", "cuda"


def _attention(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False,
    scale: float | None = None, **others: Any
) -> torch.Tensor:  # fmt: skip
    """Returns attention of the named backend alone, backward included. Raises if it does not support the call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if any(others[name] is not None for name in ("window", "softcap", "mask") if name in others) or others.get(
        "return_lse"
    ):
        raise RidgelineError(
            "scaled_dot_product_attention has no window, softcap or lse, and these backends take no mask"
        )
    if causal == "bottom_right" and q.shape[2] != k.shape[2]:
        raise RidgelineError("scaled_dot_product_attention aligns causal masks at the top left only")
    try:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return scaled_dot_product_attention(
                q, k, v, is_causal=bool(causal), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise RidgelineError(f"PyTorch's {backend} does not take this call on {q.device.type}") from error
        raise


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, *, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    causal: bool | str = False, lengths: Any = None, block_table: Any = None, **others: Any,
) -> torch.Tensor:  # fmt: skip
    """Returns attention over packed sequences by FlashAttention-2, which aligns causal masks at the bottom right."""
    from inspect import signature

    from torch.nn.attention.varlen import varlen_attn

    if lengths is not None or cu_seqlens_k is None:
        raise RidgelineError("PyTorch's varlen_attn is timed over packed keys, and this call has a cache")
    if not q.is_cuda or max_seqlen_q is None or max_seqlen_k is None or any(others.values()):
        raise RidgelineError(
            "PyTorch's varlen_attn needs a GPU, max_seqlen_q and max_seqlen_k, "
            "and is timed without window, softcap, scale and lse"
        )
    if causal is True and cu_seqlens_q is not cu_seqlens_k and max_seqlen_q != max_seqlen_k:
        raise RidgelineError("PyTorch's varlen_attn aligns causal masks at the bottom right only")
    named = signature(varlen_attn).parameters
    given: dict[str, Any] = (
        {"is_causal": bool(causal)} if "is_causal" in named else {"window_size": (-1, 0 if causal else -1)}
    )
    if "enable_gqa" in named:
        given["enable_gqa"] = q.shape[1] != k.shape[1]
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen_attn(q, k, v, *lengths, **given)  # type: ignore[return-value]


def _decode(backend: str, *args: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns one query's attention to full caches."""
    step = Step.of("scaled_dot_product_attention", *args, **options)
    step.refuse("block_table")
    if step.q.shape[1] != 1:
        raise RidgelineError("scaled_dot_product_attention aligns causal masks at the top left only")
    return _attention(backend, *step.heads_first(), scale=step.scale).transpose(1, 2)


PEERS = {
    "attention": {
        "sdpa_fa2": partial(_attention, "FLASH_ATTENTION"),
        "sdpa_cudnn": partial(_attention, "CUDNN_ATTENTION"),
    },
    "attention_varlen": {"sdpa_fa2": _varlen},
    "decode_attention": {
        "sdpa_fa2": partial(_decode, "FLASH_ATTENTION"),
        "sdpa_cudnn": partial(_decode, "CUDNN_ATTENTION"),
    },
}
