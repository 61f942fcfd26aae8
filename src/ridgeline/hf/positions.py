"""Whether a model was given its position_ids, noted by hooks: while a CUDA graph is captured nobody can read them.

transformers takes position_ids for packed sequences if they do not rise by one. Outside a capture it reads them to
tell. In a capture it cannot, and asks for a mask of packed sequences every time. A model that was given no position_ids
and makes them in a known way has none packed.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ridgeline.hf import forms, syntax

NAME = "position_ids"


class _Calls(threading.local):
    """The models whose forwards this thread is in, the outermost first, and whether their positions rise by one."""

    def __init__(self) -> None:
        self.models: list[tuple[weakref.ref[nn.Module], bool]] = []


_CALLS = _Calls()


def readable(tensor: torch.Tensor) -> bool:
    """Whether the host may read a tensor's values: they are there, no graph is captured and nobody traces."""
    from transformers.utils import is_tracing

    return not (tensor.is_meta or is_tracing(tensor))


def rise() -> bool:
    """Whether the positions of the innermost call of a patched model surely rise by one in each row."""
    return not torch.compiler.is_compiling() and bool(_CALLS.models) and _CALLS.models[-1][1]


@lru_cache(maxsize=256)
def _place(function: Any) -> int | None:
    """The place of position_ids among a forward's arguments after self; None if it makes them in no known way."""
    names = list(inspect.signature(function).parameters)[1:]
    known = syntax.made_if_none(function, NAME) in forms.POSITIONS
    return names.index(NAME) if known and NAME in names else None


def _before(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        at = _place(type(module).forward)
        found = named.get(NAME) is None and at is not None and all(t is None for t in given[at : at + 1])
        _leave(module)  # an interruption may have left a call of it behind
        _CALLS.models.append((weakref.ref(module), found))


def _after(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _leave(module)


def _leave(module: nn.Module) -> None:
    """Forgets the call of a model that this thread is in, and all calls inside it."""
    for place, (model, _) in enumerate(_CALLS.models):
        if model() is module:
            del _CALLS.models[place:]
            return


def watch(model: nn.Module) -> None:
    """Notes position_ids from now on."""
    model.register_forward_pre_hook(_before, with_kwargs=True)
    model.register_forward_hook(_after, always_call=True)


def unwatch(model: nn.Module) -> None:
    """Undoes `watch`."""
    for hooks, options in (
        (model._forward_pre_hooks, [model._forward_pre_hooks_with_kwargs]),
        (model._forward_hooks, [model._forward_hooks_with_kwargs, model._forward_hooks_always_called]),
    ):
        for key in [k for k, hook in hooks.items() if hook in (_before, _after)]:
            for held in (hooks, *options):
                held.pop(key, None)  # type: ignore[attr-defined]
