"""What the sections of `ridgeline parallel bench` share: the work, the clock of all ranks, the link, counted bytes.

A run's time is that of its slowest rank, from a barrier on. Predictions use the latency of a hop and the bandwidth of a
link, both taken from the engine's all-reduce in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.lab.measurement.clock import interval, median
from ridgeline.lm.sizes import Size
from ridgeline.parallel import groups
from ridgeline.parallel.rung import Held, Traffic

Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What to measure, the same on each rank."""

    parts: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of a collective's whole tensor
    model: Size
    context: int
    batch: int  # sequences of a rank
    impl: str
    budget: float  # seconds for the timing of a row
    buckets: tuple[float, ...] = ()  # MiB
    only: tuple[str, ...] = ()  # rungs
    warmups: int = 5
    microbatches: int | None = None  # of a pipeline; twice the ranks by default


@dataclass
class Link:
    """T = hops x latency + bytes sent / bandwidth."""

    latency: float
    bandwidth: float
    world: int

    def seconds(self, traffic: Traffic) -> float:
        hops = {"all_reduce": 2 * (self.world - 1), "all_gather": self.world - 1, "reduce_scatter": self.world - 1}
        hops["two_shot"] = 2
        steps = sum(calls * hops.get(name, 1) for name, calls in traffic.calls.items())
        sent = traffic.sent(self.world)
        return steps * self.latency + (sent / self.bandwidth if sent else 0.0)  # a rank alone sends nothing


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(values: Sequence[float]) -> list[float]:
    """Returns the largest of all ranks, for each value."""
    everyone: list[Any] = [None] * groups.size()
    dist.all_gather_object(everyone, list(values))
    return [max(some) for some in zip(*everyone, strict=True)]


def once(run: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of one run on this rank, from a barrier to an idle device."""
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def timed(runs: Sequence[Callable[[], Any]], device: torch.device, work: Work) -> list[dict[str, float]]:
    """Times several functions, one after the other in each round. Returns their medians with 95% intervals."""
    for _ in range(work.warmups):
        for run in runs:
            run()
    [first] = slowest([sum(once(run, device) for run in runs)])
    rounds = min(100, max(5, int(work.budget * len(runs) / max(first, 1e-9))))
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, some in zip(runs, samples, strict=True):
            some.append(once(run, device))
    found = []
    for some in samples:
        worst = slowest(some)
        low, high = interval(worst)
        found.append({"median": median(worst), "low": low, "high": high, "runs": float(rounds)})
    return found


def link_of(device: torch.device, work: Work) -> Link:
    """Returns the link as the engine's all-reduce shows it: latency by 1 KiB, bandwidth by 4 MiB."""
    world = groups.size()
    small, large = torch.ones(2**8, device=device), torch.ones(2**20, device=device)
    runs = [lambda: dist.all_reduce(small.fill_(1)), lambda: dist.all_reduce(large.fill_(1))]
    short, long = (one["median"] for one in timed(runs, device, work))
    sent = Traffic().add("all_reduce", large.nbytes - small.nbytes).sent(world)
    return Link(short / max(1, 2 * (world - 1)), sent / max(long - short, 1e-9), world)


def machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def moved(predicted: Traffic, seen: Traffic, link: Link) -> Row:
    """Returns what a row says of calls and bytes, predicted and seen."""
    return {
        "calls": dict(seen.calls), "calls_predicted": dict(predicted.calls), "bytes_moved": dict(seen.bytes),
        "bytes_predicted": dict(predicted.bytes), "sent": seen.sent(link.world), "predicted": link.seconds(predicted),
    }  # fmt: skip


def expected(held: Held) -> dict[str, int]:
    """Returns the bytes that a rank should hold at each point of a step, and those of its buffers at the peak."""
    before = held.weights + held.gradients
    return {"init": held.weights, "before": before, "after": before + held.states, "buffers": held.buffers}


def states(kept: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of an optimizer: states, and the parameters and gradients that only it has."""
    inner = getattr(kept, "local", None) or getattr(kept, "optim", None) or kept
    for state in inner.state.values():
        yield from (t for t in state.values() if isinstance(t, torch.Tensor))
    for group in inner.param_groups:
        for p in group["params"]:
            yield p
            if p.grad is not None:
                yield p.grad


def counted(parameters: Iterable[torch.Tensor], optimizer: Any) -> int:
    """Returns the bytes of the tensors that a rank holds for its model and optimizer, each storage once."""
    found: dict[int, int] = {}
    with torch.no_grad():
        tensors = [*parameters, *states(optimizer)]
        for t in [*tensors, *[p.grad for p in tensors if p.is_leaf and p.grad is not None]]:
            local = t.to_local() if hasattr(t, "to_local") else t
            found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(found.values())


def in_use(parameters: Iterable[torch.Tensor], optimizer: Any, device: torch.device) -> int:
    """Returns a GPU's peak since the last call; on a CPU, the bytes counted."""
    if device.type != "cuda":
        return counted(parameters, optimizer)
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
