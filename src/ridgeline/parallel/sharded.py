"""Training with sharded weights as a ladder: `fsdp`'s by parts and by layers, then the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ridgeline.parallel import data
from ridgeline.parallel.fsdp import FSDP, SHARDED, divided
from ridgeline.parallel.fsdp2 import apply, blocks
from ridgeline.parallel.rung import Held, Rung, Traffic, nbytes


def parts(module: nn.Module) -> list[nn.Module]:
    """Returns the members of a model's layers that have weights to shard: attention and MLP."""
    return [m for block in blocks(module) for m in block.children() if any(isinstance(x, SHARDED) for x in m.modules())]


def padded(p: torch.Tensor, world: int, dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of a parameter whose rows are padded to the same number on each rank."""
    return -(-p.shape[0] // world) * world * p.shape[1:].numel() * (dtype or p.dtype).itemsize


@dataclass
class Sharding(Rung):
    """A rung that shards weights. units: from the module, those that are gathered one at a time."""

    units: Callable[[nn.Module], list[nn.Module]] = blocks
    compute_dtype: torch.dtype | None = None
    engine: bool = False

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.engine:
            return Applied(
                apply(data.Replicas(module).module, units=self.units(module), compute_dtype=self.compute_dtype)
            )
        return FSDP(module, self.compute_dtype, units=self.units(module))

    def _sizes(self, module: nn.Module, world: int) -> list[tuple[bool, int, int, int, int]]:
        """Returns for each unit whether it is the root, its gathered bytes, what it scatters and what it reduces whole,
        and the gathered bytes that backward needs."""
        found = []
        for unit, slots in divided(module, self.units(module), SHARDED):
            some = [(p, where) for p, where, sharded in slots if sharded or self.engine]
            copies = [p for p, _, sharded in slots if not (sharded or self.engine) and p.requires_grad]
            size = sum(padded(p, world, self.compute_dtype) for p, _ in some)
            again = any(isinstance(m, nn.Linear) for _, where in some for m, _ in where)
            trained = sum(padded(p, world, self.compute_dtype) for p, _ in some if p.requires_grad)
            found.append((unit is module, size, trained, nbytes(copies), size if again else 0))
        return found

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        traffic = Traffic()
        for root, size, trained, copies, again in self._sizes(module, world):
            for bytes_ in (size, 0 if self.engine and root else again):
                if bytes_:
                    traffic.add("all_gather", bytes_)
            if trained:
                traffic.add("reduce_scatter", trained)
            if copies:
                traffic.add("all_reduce", copies)
        return traffic

    def held(self, module: nn.Module, world: int, moments: int = 2) -> Held:
        own = trained = 0
        for _, slots in divided(module, self.units(module), SHARDED):
            for p, _, sharded in slots:
                size = padded(p, world) // world if sharded or self.engine else p.nbytes
                own += size
                trained += size if p.requires_grad else 0
        sizes = [size for root, size, *_ in self._sizes(module, world) if not root]
        roots = sum(size for root, size, *_ in self._sizes(module, world) if root)
        pairs = [a + b for a, b in pairwise(sizes)] or sizes or [0]
        return Held(own, trained, moments * trained, roots + max(pairs) + max(sizes, default=0))


class Applied(nn.Module):
    """A module under `parallel.apply`, as the other rungs' wrappers are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """The engine has waited at the end of backward."""


LADDER = [
    Sharding("parts", "each attention and each MLP is gathered before it runs, and then let go", parts),
    Sharding("blocks", "a layer's weights travel together: fewer and larger messages"),
    Sharding("engine", "torch's fully_shard: all parameters, on streams of its own", engine=True),
]
