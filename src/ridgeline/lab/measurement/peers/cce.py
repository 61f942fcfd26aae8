"""Cut Cross-Entropy: a Triton kernel that never writes logits to memory.

`cce` has its default, which skips gradients too small for the dtype to represent; `cce_exact` computes all.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "cut_cross_entropy", "cut-cross-entropy", "triton"


def _linear_cross_entropy(
    filter_eps: str | None, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor,
    bias: torch.Tensor | None = None, *, ignore_index: int = -100, softcap: float | None = None,
    reduction: str = "mean", chunk_memory: int | None = None, dtype: torch.dtype | None = None, **others: Any
) -> torch.Tensor:  # fmt: skip
    import torch
    from cut_cross_entropy import linear_cross_entropy

    if bias is not None or any(others.values()):
        raise RidgelineError("cut_cross_entropy is timed without bias, label smoothing and z-loss")
    options = {"ignore_index": ignore_index, "softcap": softcap, "reduction": reduction, "filter_eps": filter_eps}
    return linear_cross_entropy(x, weight, target, **options).to(dtype or torch.float32)


PEERS = {
    "linear_cross_entropy": {
        "cce": partial(_linear_cross_entropy, "high"),
        "cce_exact": partial(_linear_cross_entropy, None),
    }
}
