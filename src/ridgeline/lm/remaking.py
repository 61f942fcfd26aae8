"""Tensors that backward makes again instead of keeping them: `Remade` puts recipes into autograd's place for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ridgeline.recomputation import autocast


class Recipe:
    """How to make a tensor again: f(*inputs) under the autocast of its forward."""

    def __init__(self, y: torch.Tensor, f: Callable[..., torch.Tensor], inputs: tuple[Any, ...]) -> None:
        self.y: torch.Tensor | None = y  # until the forward is over
        self.f, self.inputs = f, [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        self.autocast, self.device = autocast(y), y.device.type
        self.uses = self.left = 0
        self.made: torch.Tensor | None = None

    def casting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.autocast) if self.autocast else nullcontext()

    def make(self) -> torch.Tensor:
        """Makes the tensor, and keeps it until each use in this backward has had it."""
        if self.made is None:
            self.left = self.uses
            with torch.no_grad(), self.casting():
                self.made = self.f(*self.inputs)
        made, self.left = self.made, self.left - 1
        if not self.left:
            self.made = None
        return made


class Remade:
    """Inside this context, autograd keeps how to make some tensors again, in place of the tensors.

    `of(y, f, *inputs)` says that y is f(*inputs); it keeps the inputs, so it pays only if autograd keeps them anyway.
    """

    def __init__(self) -> None:
        self.recipes: dict[int, Recipe] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def of(self, y: torch.Tensor, f: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.recipes[y.untyped_storage()._cdata] = Recipe(y, f, inputs)
        return y

    def pack(self, saved: torch.Tensor) -> Any:
        recipe = self.recipes.get(saved.untyped_storage()._cdata)
        y = recipe.y if recipe else None
        if recipe is None or y is None or saved.numel() != y.numel() or not saved.is_contiguous():
            return saved
        recipe.uses += 1
        return recipe, saved.shape

    @staticmethod
    def unpack(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else kept[0].make().view(kept[1])

    def __enter__(self) -> Remade:
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
        for recipe in self.recipes.values():
            recipe.y = None
        self.recipes.clear()
