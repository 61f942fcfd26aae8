"""A way to train on several ranks, as an object: its idea, what it moves and holds, how it wraps a model.

`Traffic` is what a step asks of torch.distributed and of sums over symmetric memory, predicted by formula or seen by
`observed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "one_shot", "two_shot")
# Ops of torch.distributed: the collective, and which argument is its whole tensor (or a list of them).
OPS = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.send": ("send", 0),
    "ridgeline_parallel.one_shot": ("one_shot", 0),
    "ridgeline_parallel.two_shot": ("two_shot", 0),
    "symm_mem.one_shot_all_reduce": ("one_shot", 0),
}


def share_sent(collective: str, world: int) -> float:
    """Returns the bytes that each rank sends, in a ring or as others read its memory, over the whole tensor's bytes."""
    if world == 1:
        return 0.0
    ring = (world - 1) / world
    shares = {"all_reduce": 2 * ring, "all_gather": ring, "reduce_scatter": ring, "all_to_all": ring}
    shares |= {"one_shot": world - 1, "two_shot": 2 * ring}
    return shares.get(collective, 1.0)


@dataclass
class Traffic:
    """Calls of each collective, and the bytes of their whole tensors: what a gather gives, what a reduction takes."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, collective: str, size: int, calls: int = 1) -> Traffic:
        self.calls[collective] += calls
        self.bytes[collective] += size
        return self

    def sent(self, world: int) -> float:
        """Returns the bytes that a rank sends, where each collective is a ring."""
        return sum(size * share_sent(name, world) for name, size in self.bytes.items())

    def __str__(self) -> str:
        says = [f"{n} {name} of {self.bytes[name]:,} B" for name, n in sorted(self.calls.items())]
        return ", ".join(says) or "nothing"


class _Observer(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        found = OPS.get(name)
        if name == "c10d.alltoall_base_":
            splits = [n for n in args[4] if n]  # of what is sent; none: equal pieces. With one it is a ring's step
            self.traffic.add("send" if len(splits) == 1 else "all_to_all", args[1].nbytes)
        elif found:
            self.traffic.add(found[0], sum(t.nbytes for t in _tensors(args[found[1]])))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


@contextmanager
def observed() -> Iterator[Traffic]:
    """Gives the traffic of what runs inside this context, in this thread and in backward passes on the CPU."""
    traffic = Traffic()
    with _Observer(traffic):
        yield traffic


@dataclass
class Held:
    """Bytes that a rank holds between steps, and at most beside them in a step."""

    weights: int
    gradients: int
    states: int  # of the optimizer
    buffers: int = 0  # of communication, at the peak


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are trained, each once."""
    return [p for p in module.parameters() if p.requires_grad]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


@dataclass
class Rung:
    """A step by a rung: `wrap` and `optimizer` once; then forward, backward, `finish` and the optimizer's step."""

    name: str
    idea: str

    def wrap(self, module: nn.Module) -> nn.Module:
        """Returns the module as it runs on each rank of the world; it has `.module`."""
        raise NotImplementedError

    def optimizer(self, wrapped: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """Returns the optimizer of a wrapped module."""
        return kind(wrapped.parameters(), **options)

    def finish(self, wrapped: nn.Module) -> None:
        """Completes the gradients after backward."""
        wrapped.finish_gradient_synchronization()  # type: ignore[operator]

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        """Returns what a step of the plain module moves, by formula."""
        raise NotImplementedError

    def held(self, module: nn.Module, world: int, moments: int = 2) -> Held:
        """Returns the bytes that a rank holds, by formula. moments: states of the optimizer per parameter."""
        weights, grads = nbytes(module.parameters()), nbytes(trainable(module))
        return Held(weights, grads, moments * grads)
