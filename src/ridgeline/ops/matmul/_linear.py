"""linear on Hopper: the launchers, which operands they take, and which calls are left to PyTorch."""

from typing import Any

import torch

from ridgeline.ops.matmul import _hopper
from ridgeline.ops.matmul._epilogue import ACTIVATIONS
from ridgeline.ops.matmul.matmul import untimed

_Maybe = torch.Tensor | None


def fwd(
    y: torch.Tensor, z: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, residual: _Maybe,
    activation: str, how: str
) -> None:  # fmt: skip
    _hopper.product(y, x, weight.mT, z=z if z.numel() else None, bias=bias, residual=residual, activation=activation)


def refusal(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> str | None:
    """Returns why these operands are not taken, or None. Takes public arguments or a launcher's inputs."""
    if any([t.data_ptr() % 16 for t in _residuals(*rest, *options.values())]):
        return "residual must begin at a multiple of 16 bytes"
    return odd(x, weight, *rest, **options) or _hopper.refusal(x, weight.mT)


def _residuals(*rest: Any) -> list[torch.Tensor]:
    return [t for t in rest if isinstance(t, torch.Tensor) and t.dim() > 1]


def odd(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **options: Any) -> str | None:
    """As `refusal`, for operands and a residual of any alignment."""
    rest = (*rest, *options.values())
    if weight.shape[0] % 8 and (_residuals(*rest) or any([r in ACTIVATIONS and r for r in rest if isinstance(r, str)])):
        return (
            f"with an activation or a residual N must be a multiple of 8 (rows of 16 bytes), but is {weight.shape[0]}"
        )
    return _hopper.empty(x, weight)


def unless(
    x: torch.Tensor, weight: torch.Tensor, bias: _Maybe = None, residual: _Maybe = None, activation: str | None = None,
    *_: Any
) -> str | None:  # fmt: skip
    """Returns why a call is left to PyTorch, or None: only a fused activation or residual saves a pass over memory."""
    N, K = weight.shape
    if residual is None and not activation:
        return "without an activation or a residual, PyTorch's linear is as fast"
    return "N must be a multiple of 8" if N % 8 else untimed(x.numel() // K if K else 0, N, K)


def padded(
    y: torch.Tensor, z: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, residual: _Maybe,
    activation: str, how: str
) -> None:  # fmt: skip
    if residual is not None and residual.data_ptr() % 16:
        residual = residual.clone()
    fwd(y, z, _hopper.aligned(x), _hopper.aligned(weight), bias, residual, activation, how)


# Facts of the implementations `gluon` and `gluon_padded`.
WHOLE: dict[str, Any] = {"fwd": fwd, "bwd": fwd, "supports": refusal, "unless": unless}
PADDED: dict[str, Any] = {"fwd": padded, "bwd": padded, "supports": odd, "unless": unless}
