"""Data parallel training as a ladder: each rank has the whole model and its part of the batch.

Gradients are averaged over the ranks after backward or during it. Parameters and buffers come from rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups
from ridgeline.parallel.rung import Held, Rung, Traffic, nbytes, trainable

MB = 2**20
FIRST_MB = 1.0  # the engine's first bucket, small so that communication begins early


class Replicas(nn.Module):
    """A module of which each rank has a copy; gradients are averaged.

    unused: parameters may have no gradient on some ranks. It costs one small all-reduce a step; a parameter that no
    rank has used keeps None. Without it such a parameter raises RidgelineError."""

    def __init__(self, module: nn.Module, *, group: Any = None, unused: bool = False) -> None:
        super().__init__()
        self.module, self.group, self.unused = module, group, unused
        self.params, self.communicates = trainable(module), True
        self.names = {p: name for name, p in module.named_parameters()}
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                _in_place(t, lambda whole: dist.broadcast(whole, group=group, group_src=0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside this context a backward pass only adds to the gradients; the one after it communicates."""
        self.communicates = False
        try:
            yield
        finally:
            self.communicates = True

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Completes the averages. Call it after the backward passes of a step, on each rank."""
        if not self.params:
            return
        used = [p.grad is not None for p in self.params]
        if self.unused:
            flags = torch.tensor(used, dtype=torch.int32, device=self.params[0].device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
            used = flags.bool().tolist()
        elif not all(used):
            name = self.names[self.params[used.index(False)]]
            raise RidgelineError(f"parallel: {name} has no gradient after backward; unused=True allows that")
        with groups.answered("the average of gradients"):
            self.average(used)

    def average(self, used: Sequence[bool]) -> None:
        """Averages the gradients of the parameters that are used on some rank."""
        raise NotImplementedError


def _in_place(t: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> None:
    """Runs a collective that changes a tensor, by way of a copy if the tensor is not contiguous."""
    whole = t.detach()
    if whole.is_contiguous():
        run(whole)
        return
    copy = whole.contiguous()
    run(copy)
    whole.copy_(copy)


def gradient(p: torch.Tensor) -> torch.Tensor:
    """Returns a parameter's gradient; where there is none, zeros that become its gradient."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    if p.grad.layout != torch.strided:
        raise RidgelineError("parallel: gradients must be dense, and one is sparse; use an embedding with sparse=False")
    return p.grad


class NaiveReplicas(Replicas):
    """After backward, one all-reduce for each parameter, one after the other."""

    def average(self, used: Sequence[bool]) -> None:
        for p, there in zip(self.params, used, strict=True):
            if there:
                _in_place(gradient(p), lambda g: dist.all_reduce(g, group=self.group))
                gradient(p).div_(groups.size(self.group))


class FlatReplicas(Replicas):
    """After backward, one all-reduce for all gradients of a dtype in one tensor."""

    def average(self, used: Sequence[bool]) -> None:
        kinds: dict[Any, list[torch.Tensor]] = {}
        for p, there in zip(self.params, used, strict=True):
            if there:
                kinds.setdefault((p.device, p.dtype), []).append(gradient(p))
        for grads in kinds.values():
            flat = torch.cat([g.reshape(-1) for g in grads])
            dist.all_reduce(flat, group=self.group)
            spread(flat.div_(groups.size(self.group)), grads)


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies a flat tensor into the tensors that it was made of."""
    torch._foreach_copy_(
        list(tensors), [f.view_as(t) for f, t in zip(flat.split([t.numel() for t in tensors]), tensors)]
    )


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    params: list[nn.Parameter] = field(default_factory=list)
    left: int = 0  # gradients to come in this step
    flat: torch.Tensor | None = None
    work: Any = None


def buckets_of(params: Sequence[nn.Parameter], limit: float, first: float | None = None) -> list[list[nn.Parameter]]:
    """Returns parameters, the last first, in lists of one dtype. A list is closed once it has `limit` bytes.

    first: the limit of the first list of each dtype, if another."""
    done: list[list[nn.Parameter]] = []
    open_: dict[Any, list[nn.Parameter]] = {}
    begun = set()
    for p in reversed(params):
        kind = (p.device, p.dtype)
        some = open_.setdefault(kind, [])
        some.append(p)
        if nbytes(some) >= (limit if first is None or kind in begun else first):
            done.append(open_.pop(kind))
            begun.add(kind)
    return done + list(open_.values())


class BucketReplicas(Replicas):
    """During backward, an all-reduce for each bucket as soon as its last gradient is there, in one order on all ranks.

    bucket_mb: a bucket is closed once it has so many MiB; 0 gives each parameter its own, which is reduced in place."""

    def __init__(self, module: nn.Module, *, bucket_mb: float = 25.0, group: Any = None, unused: bool = False) -> None:
        super().__init__(module, group=group, unused=unused)
        self.buckets = [Bucket(params, len(params)) for params in buckets_of(self.params, bucket_mb * MB)]
        self.place = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.next = 0
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, p: torch.Tensor) -> None:
        if not self.communicates:
            return
        assert isinstance(p, nn.Parameter)
        bucket = self.place[p]
        bucket.left -= 1
        if bucket.left < 0:
            raise RidgelineError(
                f"parallel: {self.names[p]} got a second gradient before finish_gradient_synchronization(); "
                "run all backward passes but the last inside accumulate()"
            )
        while self.next < len(self.buckets) and self.buckets[self.next].left == 0:
            self._launch(self.buckets[self.next])
            self.next += 1

    def _launch(self, bucket: Bucket) -> None:
        with torch.no_grad():
            grads = [gradient(p) for p in bucket.params]
            alone = len(grads) == 1 and grads[0].is_contiguous()
            bucket.flat = grads[0] if alone else torch.cat([g.reshape(-1) for g in grads])
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def average(self, used: Sequence[bool]) -> None:
        world, there = groups.size(self.group), dict(zip(self.params, used, strict=True))
        for bucket in self.buckets[self.next :]:  # a parameter of it was unused, so no hook has launched it
            self._launch(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            assert bucket.flat is not None
            bucket.flat.div_(world)
            grads = [gradient(p) for p in bucket.params]
            if bucket.flat is not grads[0]:
                spread(bucket.flat, grads)
            bucket.flat = bucket.work = None
            bucket.left = len(bucket.params)
            for p in bucket.params:
                if not there[p]:
                    p.grad = None
        self.next = 0


# --- the ladder


@dataclass
class Data(Rung):
    """A rung that averages gradients. limit: bytes of a bucket; None for one without buckets."""

    make: Callable[..., nn.Module] = NaiveReplicas
    options: dict[str, Any] = field(default_factory=dict)
    copies: float = 0.0  # of all gradients, for communication

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.make(module, **self.options)

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        params = trainable(module)
        traffic = Traffic()
        for some in self.sent_together(params):
            traffic.add("all_reduce", nbytes(some))
        if self.options.get("unused"):
            traffic.add("all_reduce", 4 * len(params))
        return traffic

    def sent_together(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Returns the parameters whose gradients go in one call."""
        return buckets_of(params, self.options.get("bucket_mb", 0.0) * MB)

    def held(self, module: nn.Module, world: int, moments: int = 2) -> Held:
        held = super().held(module, world, moments)
        held.buffers = round(self.copies * held.gradients)
        return held


@dataclass
class FlatData(Data):
    def sent_together(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return buckets_of(params, float("inf"))


@dataclass
class Engine(Data):
    """torch.nn.parallel.DistributedDataParallel. Gradients are views of its buckets."""

    def finish(self, wrapped: nn.Module) -> None:
        pass  # its hooks have waited at the end of backward

    def sent_together(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        limit = self.options["bucket_cap_mb"] * MB
        return buckets_of(params, limit, min(limit, FIRST_MB * MB))


def buckets(bucket_mb: float) -> Data:
    """Returns the rung of buckets of so many MiB."""
    idea = "gradients travel in buckets: fewer calls, and still during backward"
    return Data(f"buckets-{bucket_mb:g}", idea, BucketReplicas, {"bucket_mb": bucket_mb}, copies=1.0)


def engine(bucket_mb: float = 25.0) -> Engine:
    """Returns the rung of DistributedDataParallel with buckets of so many MiB."""
    options = {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": True}
    return Engine("engine", "torch's DistributedDataParallel, whose gradients lie in the buckets",
                  DistributedDataParallel, options)  # fmt: skip


LADDER: list[Data] = [
    Data("naive", "after backward, an all-reduce for each parameter", NaiveReplicas),
    FlatData("flat", "all gradients in one tensor: one call, the latency once", FlatReplicas, copies=1.0),
    Data("hooks", "each gradient leaves as soon as backward has made it", BucketReplicas, {"bucket_mb": 0.0}),
    buckets(25.0),
    engine(),
]
SWEEP = [buckets(mb) for mb in (1.0, 10.0, 100.0, 1000.0)]  # the assignment's sizes
