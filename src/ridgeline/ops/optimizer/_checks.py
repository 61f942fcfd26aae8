"""Checks of the optimizers' arguments, with one-sentence errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch

from ridgeline.op import RidgelineError

NUMBERS = (Real, torch.SymInt, torch.SymFloat)


def checked(op: str, names: Sequence[str], lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raises RidgelineError unless the lists are equally long, of dense floating-point tensors that fit together."""
    counts = [len(some) for some in lists]
    if len(set(counts)) > 1:
        found = ", ".join(map(str, counts))
        raise RidgelineError(f"{op}: {', '.join(names)} must be equally long lists, but have {found} tensors")
    for name, some in zip(names, lists, strict=True):
        for n, t in enumerate(some):
            first = lists[0][n]
            if not isinstance(t, torch.Tensor):
                raise RidgelineError(f"{op}: {name} must be tensors, but number {n} is {type(t).__name__}")
            if t.layout != torch.strided:
                raise RidgelineError(f"{op}: {name} must be dense tensors, but number {n} is {str(t.layout)[6:]}")
            if not t.is_floating_point():
                raise RidgelineError(f"{op}: {name} must be floating point, but number {n} is {str(t.dtype)[6:]}")
            if t.shape != first.shape:
                found = f"{tuple(t.shape)}, but of {names[0]} {tuple(first.shape)}"
                raise RidgelineError(f"{op}: number {n} of {name} is {found}")
            if t.device != first.device:
                found = f"on {t.device}, but of {names[0]} on {first.device}"
                raise RidgelineError(f"{op}: number {n} of {name} is {found}")


def listed(op: str, name: str, given: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument that must be an iterable of them."""
    if isinstance(given, list | tuple):
        return given
    if isinstance(given, torch.Tensor | str) or not isinstance(given, Iterable):
        wanted = "a list of tensors (a single tensor only if all are)"
        raise RidgelineError(f"{op}: {name} must be {wanted}, but is {type(given).__name__}")
    return list(given)


def number(op: str, name: str, given: Any) -> float:
    """A number, or the number in a tensor of one element."""
    if isinstance(given, NUMBERS) or (isinstance(given, torch.Tensor) and given.numel() == 1):
        return float(given)
    shown = f"a tensor of {given.numel()} elements" if isinstance(given, torch.Tensor) else repr(given)
    raise RidgelineError(f"{op}: {name} must be a number, but is {shown}")
