"""quack: row kernels in the CuTe DSL, for Hopper and later. Its softmax takes matrices, along the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "quack", "quack-kernels", "cuda"


def _softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    from quack.softmax import softmax

    if dim % x.dim() != x.dim() - 1 or dtype not in (None, x.dtype):
        raise RidgelineError("quack's softmax is along the last dimension, in the input's dtype")
    return softmax(x.reshape(-1, x.shape[-1])).view(x.shape)


PEERS = {"softmax": _softmax}
