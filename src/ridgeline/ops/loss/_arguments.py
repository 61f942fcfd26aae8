"""The arguments that cross_entropy and linear_cross_entropy share, and what may be wrong with them."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import RidgelineError, readable

OPTIONS = "ignore_index", "label_smoothing", "z_loss", "softcap", "logit_scale", "reduction"
SCHEMA = "int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale, str reduction"


def fault(
    logits: Any, target: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, logit_scale: Any,
    reduction: Any, dtype: Any = None
) -> str | None:  # fmt: skip
    """Returns what is wrong with a call, or None."""
    for name, t in (("logits", logits), ("target", target)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
    if not logits.is_floating_point():
        return f"logits must be floating point (float32, float16, bfloat16), got {logits.dtype}"
    if target.dtype != torch.int64:
        return f"target must hold class indices in int64, got {target.dtype}"
    if not logits.dim() or not logits.shape[-1] or target.shape != logits.shape[:-1]:
        shapes = f"{tuple(target.shape)} and {tuple(logits.shape)}"
        return f"target must have the logits' shape without the last dimension (at least one class), got {shapes}"
    if target.device != logits.device:
        return f"target and logits must be on one device, got {target.device} and {logits.device}"
    if not isinstance(ignore_index, int):
        return f"ignore_index must be an int, got {ignore_index!r}"
    for name, value in (
        ("label_smoothing", label_smoothing),
        ("z_loss", z_loss),
        ("softcap", 0.0 if softcap is None else softcap),
        ("logit_scale", logit_scale),
    ):
        if not isinstance(value, int | float):
            return f"{name} must be a number, got {value!r}"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing must be between 0 and 1, got {label_smoothing}"
    if not 0 <= z_loss < float("inf"):
        return f"z_loss must be finite and at least 0, got {z_loss}"
    if softcap is not None and not 0 < softcap < float("inf"):
        return f"softcap must be None or a finite number above 0, got {softcap}"
    if not 0 < logit_scale < float("inf"):
        return f"logit_scale must be a finite number above 0, got {logit_scale}"
    if reduction not in ("none", "mean", "sum"):
        return f'reduction must be "none", "mean" or "sum", got {reduction!r}'
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"dtype must be None or a floating-point dtype (torch.float32, ...), got {dtype!r}"
    return None


def check_classes(op: str, target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raises RidgelineError for an invalid target that the host may read (`op.readable`)."""
    if readable(target) and (wrong := (target != ignore_index) & ((target < 0) | (target >= classes))).any():
        raise RidgelineError(
            f"{op}: targets must be 0 to {classes - 1} or ignore_index {ignore_index}, got {target[wrong][0]}"
        )
