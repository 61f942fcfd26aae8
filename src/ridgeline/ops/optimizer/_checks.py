"""What optimizers are given, or one sentence of what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch

from ridgeline.op import RidgelineError

NUMBERS = (Real, torch.SymInt, torch.SymFloat)


def checked(op: str, names: Sequence[str], lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raises RidgelineError unless the lists are equally long, and hold plain floating-point tensors that fit together."""
    counts = [len(some) for some in lists]
    if len(set(counts)) > 1:
        raise RidgelineError(
            f"{op}: {', '.join(names)} must be equally long lists, and have {', '.join(map(str, counts))} tensors"
        )
    for name, some in zip(names, lists, strict=True):
        for n, t in enumerate(some):
            first = lists[0][n]
            if not isinstance(t, torch.Tensor):
                raise RidgelineError(f"{op}: {name} must be tensors, and number {n} is {type(t).__name__}")
            if t.layout != torch.strided:
                raise RidgelineError(f"{op}: {name} must be dense tensors, and number {n} is {str(t.layout)[6:]}")
            if not t.is_floating_point():
                raise RidgelineError(f"{op}: {name} must be floating point, and number {n} is {str(t.dtype)[6:]}")
            if t.shape != first.shape:
                raise RidgelineError(
                    f"{op}: number {n} of {name} is {tuple(t.shape)}, and of {names[0]} {tuple(first.shape)}"
                )
            if t.device != first.device:
                raise RidgelineError(
                    f"{op}: number {n} of {name} is on {t.device}, and of {names[0]} on {first.device}"
                )


def listed(op: str, name: str, given: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument that is an iterable of them."""
    if isinstance(given, list | tuple):
        return given
    if isinstance(given, torch.Tensor | str) or not isinstance(given, Iterable):
        raise RidgelineError(
            f"{op}: {name} must be a list of tensors, or a tensor where all are, and is {type(given).__name__}"
        )
    return list(given)


def number(op: str, name: str, given: Any) -> float:
    """A number, which a tensor of one element is too."""
    if isinstance(given, NUMBERS) or (isinstance(given, torch.Tensor) and given.numel() == 1):
        return float(given)
    shown = f"a tensor of {given.numel()} elements" if isinstance(given, torch.Tensor) else repr(given)
    raise RidgelineError(f"{op}: {name} must be a number, and is {shown}")
