"""gated_linear on Hopper: the launchers, which operands they take, and which calls are left to PyTorch."""

from typing import Any

import torch

from ridgeline.ops.matmul import _hopper
from ridgeline.ops.matmul.matmul import untimed

_T = torch.Tensor


def fwd(y: _T, z: _T, z_up: _T, x: _T, weight: _T, up: _T, activation: str, how: str) -> None:
    kept: dict[str, Any] = {"z": z, "z_up": z_up} if z.numel() else {}
    _hopper.product(y, x, weight.mT, up=up.mT, activation=activation, **kept)


def padded(y: _T, z: _T, z_up: _T, x: _T, weight: _T, up: _T, activation: str, how: str) -> None:
    weight, up = _hopper.aligned(weight), _hopper.aligned(up)
    if _hopper.whole(weight) != _hopper.whole(up):  # copy the column-major one to rows
        weight, up = (t if _hopper.whole(t) else _hopper.copied(t)[0] for t in (weight, up))
    fwd(y, z, z_up, _hopper.aligned(x), weight, up, activation, how)


def odd(x: _T, weight: _T, *_: Any, **__: Any) -> str | None:
    if weight.shape[0] % 8:
        return "TMA writes rows of a multiple of 16 bytes, so N must be a multiple of 8"
    return _hopper.empty(x, weight)


def unless(x: _T, weight: _T, *_: Any, **__: Any) -> str | None:
    """Returns why a call is left to PyTorch, or None."""
    N, K = weight.shape
    return odd(x, weight) or untimed(x.numel() // K, N, K)


def refusal(x: _T, weight: _T, up: _T, *_: Any, **__: Any) -> str | None:
    if _hopper.whole(weight) != _hopper.whole(up):
        return "gate and up must both have rows, or both have columns, that begin at multiples of 16 bytes"
    return odd(x, weight) or _hopper.refusal(x, weight.mT) or _hopper.refusal(x, up.mT)


# Facts of the implementations `gluon` and `gluon_padded`.
WHOLE: dict[str, Any] = {"fwd": fwd, "bwd": fwd, "supports": refusal, "unless": unless}
PADDED: dict[str, Any] = {"fwd": padded, "bwd": padded, "supports": odd, "unless": unless}
