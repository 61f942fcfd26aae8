"""Liger: Triton kernels for training, along the last dimension, and its experts.

Some backwards overwrite the saved tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

PACKAGE, INSTALL, KIND = "liger_kernel", "liger-kernel", "triton"


def _softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    if dim % x.dim() != x.dim() - 1 or dtype not in (None, x.dtype):
        raise RidgelineError("Liger's softmax supports only the last dimension and the input's dtype")
    return LigerSoftmaxFunction.apply(x)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, *, memory_efficient: bool = False
) -> torch.Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if memory_efficient:
        raise RidgelineError("Liger's rms_norm has no memory_efficient")
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)


def _layer_norm(
    x: torch.Tensor, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, memory_efficient: bool = False
) -> torch.Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    if weight is None or bias is None or memory_efficient:
        raise RidgelineError("Liger's layer_norm needs a weight and a bias, and has no memory_efficient")
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Any:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "gemma", False)


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def _gelu_mul(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if approximate != "tanh":
        raise RidgelineError("Liger's gelu_mul supports only approximate='tanh'")
    return LigerGELUMulFunction.apply(gate, up)


def _linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    reduction: str = "mean", chunk_memory: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns Liger's loss. It chooses the size of its chunks, and ignores chunk_memory."""
    import torch
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    given = (
        x.reshape(-1, x.shape[-1]),
        weight,
        target.flatten(),
        bias,
        None,
        ignore_index,
        z_loss,
        label_smoothing,
        reduction,
        softcap,
    )
    loss = LigerFusedLinearCrossEntropyFunction.apply(*given)[0].to(dtype or torch.float32)
    return loss.view(target.shape) if reduction == "none" else loss


def _moe(
    x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *,
    activation: str = "silu", **others: Any
) -> torch.Tensor:  # fmt: skip
    """Returns Liger's experts. It searches configurations when a layer's sizes come first, and waits for the GPU."""
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    if activation != "silu" or any([option is not None and option is not False for option in others.values()]):
        raise RidgelineError("Liger's experts are timed with silu, without biases, limits and scales")
    return LigerFusedMoEFunction.apply(x, gate_up, down, indices.to(torch.int32), weights)


PEERS = {
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_rms_norm,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "linear_cross_entropy": _linear_cross_entropy,
    "moe": _moe,
}
