"""vLLM's build of FlashAttention over caches in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.peers._caches import Step
from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "vllm", "vllm", "cuda"


def _decode(*args: torch.Tensor, **options: Any) -> torch.Tensor:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    step = Step.of("vLLM's FlashAttention", *args, **options)
    if step.table is None:
        raise RidgelineError("vLLM's FlashAttention is timed over caches in blocks, the only ones that vLLM has")
    B, S = step.q.shape[:2]
    ends = torch.arange(0, B * S + 1, S, dtype=torch.int32, device=step.q.device)
    given = {"cu_seqlens_q": ends, "max_seqlen_q": S, "max_seqlen_k": step.table.shape[1] * step.k.shape[1]}
    given |= {"seqused_k": step.lengths, "block_table": step.table, "causal": True, "softmax_scale": step.scale}
    found: torch.Tensor = flash_attn_varlen_func(step.q.flatten(0, 1), step.k, step.v, **given)
    return found.view(step.q.shape)


PEERS = {"decode_attention": _decode}
