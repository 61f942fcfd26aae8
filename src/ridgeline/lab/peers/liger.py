"""Liger: Triton kernels for training. Its softmax is along the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "liger_kernel", "liger-kernel", "triton"


def _softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    if dim % x.dim() != x.dim() - 1 or dtype not in (None, x.dtype):
        raise RidgelineError("Liger's softmax is along the last dimension, in the input's dtype")
    return LigerSoftmaxFunction.apply(x)


PEERS = {"softmax": _softmax}
