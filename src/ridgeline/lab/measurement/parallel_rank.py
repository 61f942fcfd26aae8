"""`ridgeline parallel bench rank`: one rank of a world that is not there, under FSDP2, on one GPU or the CPU.

The group is torch's fake one. Its gathers are made to repeat this rank's shard, and its scatters to take this rank's
part, so that numbers stay ordinary. So the rank's own compute, the host's time and the memory are true; what the
network adds is predicted from a cluster's links, and labelled so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import ridgeline.optim
from ridgeline.lab.measurement.clock import interval, median
from ridgeline.lab.measurement.parallel_clock import Row, Work, expected, in_use, machine, synchronize
from ridgeline.lm.model import Transformer
from ridgeline.parallel import apply, groups, sharded
from ridgeline.parallel.cluster import Cluster
from ridgeline.parallel.rung import Traffic, observed


class _Echo:
    """A collective of FSDP2 whose other ranks are copies of this one. world: ranks; scatters: else it gathers."""

    def __init__(self, world: int, scatters: bool) -> None:
        self.world, self.scatters = world, scatters

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **__: Any) -> None:
        whole, own = output_tensor.view(-1), input_tensor.view(-1)
        if self.scatters:
            groups.reduce_scatter(whole, own, group=group)
            whole.copy_(own[: whole.numel()])
        else:
            groups.all_gather(whole, own, group=group)
            slots = whole.view(self.world, -1)
            slots[1:].copy_(own)
            if slots.data_ptr() != own.data_ptr():  # FSDP2 puts the shard in place itself
                slots[0].copy_(own)


def sharded_model(work: Work, world: int, device: torch.device) -> Any:
    """Returns rank 0's part of a model, whose layers are gathered one at a time and computed again in backward."""
    torch.manual_seed(0)
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = Transformer(work.model, work.impl)
    finally:
        torch.set_default_dtype(kind)
    apply(model, groups.mesh(device.type, shard=world), checkpointing=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gather: Any = _Echo(world, False)
            scatter: Any = _Echo(world, True)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return model


def link_seconds(traffic: Traffic, world: int, cluster: Cluster) -> float:
    """Returns the seconds of a step's transfers in rings, were nothing under them, on a cluster's links."""
    near = world <= cluster.node
    rate = min(cluster.nvlink, cluster.collective) if near else min(cluster.nvlink, cluster.node * cluster.nic)
    hops = sum(traffic.calls.values()) * (world - 1) * (cluster.hop_near if near else cluster.hop_far)
    return traffic.sent(world) / rate + hops + sum(traffic.calls.values()) * cluster.start


def row(work: Work, world: int, device: torch.device, cluster: Cluster) -> Row:
    """Returns what rank 0 of a world does in a training step."""
    with groups.pretend(world):
        model = sharded_model(work, world, device)
        kind = ridgeline.optim.AdamW if work.impl == "ridgeline" else torch.optim.AdamW
        optimizer: Any = kind(model.parameters(), lr=1e-4)
        ids = torch.randint(work.model.vocabulary, (work.batch, work.context + 1)).to(device)
        last: list[torch.Tensor] = []

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            last[:] = [loss.detach()]

        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        with observed() as seen:
            step()
        samples, hosts = [], []
        for n in range(work.warmups + max(5, min(50, int(work.budget / max(_once(step, device)[0], 1e-9))))):
            whole, host = _once(step, device)
            if n >= work.warmups:
                samples.append(whole)
                hosts.append(host)
        held = in_use([p.to_local() for p in model.parameters()], optimizer, device)
        finite = bool(last[0].isfinite())
        plain = _plain(work, device)
        formula, memory = sharded.LADDER[-1].traffic(plain, world), sharded.LADDER[-1].held(plain, world)
        dist.barrier()
    low, high = interval(samples)
    tokens = work.batch * work.context
    return {
        "part": "rank", "rung": work.impl, "world": world, "device": machine(device), "impl": work.impl,
        "tokens": tokens, "wrong": None if finite else "the loss is not finite", "checked": True,
        "seconds": {"median": median(samples), "low": low, "high": high, "runs": float(len(samples))},
        "host": median(hosts), "memory": held, "memory_predicted": expected(memory),
        "calls": dict(seen.calls), "calls_predicted": dict(formula.calls), "bytes_moved": dict(seen.bytes),
        "bytes_predicted": dict(formula.bytes), "sent": seen.sent(world), "cluster": cluster.name,
        "predicted": link_seconds(formula, world, cluster), "rate": tokens / median(samples),
    }  # fmt: skip


def _plain(work: Work, device: torch.device) -> Transformer:
    with torch.device("meta"):
        plain = Transformer(work.model, work.impl)
    return plain.bfloat16() if device.type == "cuda" else plain


def _once(step: Any, device: torch.device) -> tuple[float, float]:
    """Returns the seconds until the device has ended a step, and until the host had started all of it."""
    synchronize(device)
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    synchronize(device)
    return time.perf_counter() - start, host
