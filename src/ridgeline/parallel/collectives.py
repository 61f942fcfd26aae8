"""Collectives by send and receive around a ring, to teach, beside the engine's and sums over symmetric memory.

With N ranks and tensors of S bytes, each rank sends (N-1)/N S in a gather or a reduce-scatter, twice that in an
all-reduce, and (N-1) S in the alternate all-reduce, which passes whole tensors on.
Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, symmetric
from ridgeline.parallel.rung import Traffic


def pass_on(give: torch.Tensor, take: torch.Tensor, group: Any = None) -> None:
    """Sends a tensor to the next rank of the ring while one comes from the rank before."""
    world, here = groups.size(group), groups.rank(group)
    ops = [
        dist.P2POp(dist.isend, give, group=group, group_peer=(here + 1) % world),
        dist.P2POp(dist.irecv, take, group=group, group_peer=(here - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _parts(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Returns one part of a contiguous tensor for each rank."""
    world = groups.size(group)
    if x.numel() % world or not x.is_contiguous():
        raise RidgelineError(
            f"parallel: a ring of {world} ranks takes contiguous tensors of a multiple of {world} elements, "
            f"but got {x.numel()}"
        )
    return list(x.view(world, -1))


def ring_all_gather(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the tensors of all ranks, one after the other along the first dimension: (N * x.shape[0], ...).

    Each hop passes on the part that came last."""
    world, here = groups.size(group), groups.rank(group)
    out = x.new_empty((world * x.shape[0], *x.shape[1:]))
    parts = _parts(out, group)
    parts[here].copy_(x.reshape(-1))
    for hop in range(world - 1):
        pass_on(parts[(here - hop) % world], parts[(here - hop - 1) % world], group)
    return out


def ring_reduce_scatter(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns this rank's part of the sum over ranks: (x.shape[0] / N, ...). x: the same shape on each rank.

    A part starts at the rank after its owner and collects each rank's share on its way home."""
    world, here = groups.size(group), groups.rank(group)
    parts = _parts(x.contiguous(), group)
    if x.shape[0] % world:
        raise RidgelineError(f"parallel: a reduce-scatter over {world} ranks cannot divide {x.shape[0]} rows")
    going = parts[(here - 1) % world].clone()
    coming = torch.empty_like(going)
    for hop in range(world - 1):
        pass_on(going, coming, group)
        going, coming = coming.add_(parts[(here - hop - 2) % world]), going
    return going.view(x.shape[0] // world, *x.shape[1:])


def ring_all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the sum over ranks: a reduce-scatter, then a gather of its parts. Pads where N does not divide x."""
    world = groups.size(group)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % world))
    return ring_all_gather(ring_reduce_scatter(flat, group), group)[: x.numel()].view_as(x)


def alternate_all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the sum over ranks: whole tensors go round, and each rank adds all of them.

    Its ranks add in different orders, so their results may differ by rounding."""
    total, going, coming = x.clone(), x.contiguous(), torch.empty_like(x)
    for _ in range(groups.size(group) - 1):
        pass_on(going, coming, group)
        total += coming
        going, coming = coming, torch.empty_like(x) if going is x else going
    return total


def engine_all_gather(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the tensors of all ranks along the first dimension, by torch.distributed."""
    out = x.new_empty((groups.size(group) * x.shape[0], *x.shape[1:]))
    groups.all_gather(out, x.contiguous(), group=group)
    return out


def engine_reduce_scatter(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns this rank's part of the sum over ranks, by torch.distributed."""
    out = x.new_empty((x.shape[0] // groups.size(group), *x.shape[1:]))
    groups.reduce_scatter(out, x.contiguous(), group=group)
    return out


def engine_all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Returns the sum over ranks, by torch.distributed."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


@dataclass(frozen=True)
class Collective:
    """A rung of a collective. what: the collective. sends: whole tensors that a rank sends, from the world's size."""

    name: str
    what: str
    idea: str
    run: Callable[..., torch.Tensor]
    hops: Callable[[int], int] | None = None  # sends of a rank; None for one call of the engine
    part: Callable[[int], float] = lambda world: 1 / world  # of the whole tensor, in one hop
    kernel: str | None = None  # "one_shot" or "two_shot" for a kernel over symmetric memory
    most: float = inf  # bytes that one call takes

    def refuses(self, device: torch.device) -> str | None:
        """Returns why the ranks cannot run it on such tensors, or None. The first call is a collective."""
        return symmetric.refuses(device) if self.kernel else None

    def traffic(self, size: int, world: int) -> Traffic:
        """Returns the calls and bytes of one run. size: bytes of the whole tensor."""
        if self.kernel:
            return Traffic().add(self.kernel, size, max(1, ceil(size / self.most))) if world > 1 else Traffic()
        if self.hops is None:
            return Traffic().add(self.what, size)
        hops = self.hops(world)
        return Traffic().add("send", round(hops * size * self.part(world)), hops) if hops else Traffic()


LADDER = [
    Collective("ring", "all_gather", "N - 1 hops, each of one part", ring_all_gather, lambda n: n - 1),
    Collective("engine", "all_gather", "torch.distributed's", engine_all_gather),
    Collective("ring", "reduce_scatter", "a part collects its sum on its way home", ring_reduce_scatter,
               lambda n: n - 1),
    Collective("engine", "reduce_scatter", "torch.distributed's", engine_reduce_scatter),
    Collective(
        "alternate", "all_reduce", "whole tensors go round: N - 1 times the bytes", alternate_all_reduce,
        lambda n: n - 1, lambda n: 1.0,
    ),
    Collective("ring", "all_reduce", "reduce-scatter, then gather: twice a part per hop", ring_all_reduce,
               lambda n: 2 * (n - 1)),
    Collective("engine", "all_reduce", "torch.distributed's", engine_all_reduce),
    Collective("one-shot", "all_reduce", "one kernel reads all ranks' memory: few bytes meet once",
               symmetric.one_shot_all_reduce, kernel="one_shot", most=symmetric.HALF),
    Collective("two-shot", "all_reduce", "a kernel sums a part and reads the others' sums: a ring's bytes",
               symmetric.two_shot_all_reduce, kernel="two_shot", most=symmetric.HALF),
    Collective("engine-one-shot", "all_reduce", "torch's own one-shot kernel, with a copy of x before it",
               symmetric.engine_all_reduce, kernel="one_shot"),
]  # fmt: skip
