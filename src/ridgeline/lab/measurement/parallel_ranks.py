"""What each rank of `ridgeline parallel bench` does: check a rung against one process, then time it.

`parallel_clock.py` says how; `parallel_cuts.py` has split sequences, layers and pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.lab.measurement import parallel_cuts as cuts
from ridgeline.lab.measurement.parallel_clock import (
    Link,
    Row,
    Work,
    expected,
    in_use,
    link_of,
    machine,
    moved,
    slowest,
    timed,
)
from ridgeline.lm.model import Transformer
from ridgeline.op import RidgelineError
from ridgeline.parallel import collectives, data, fsdp, groups, optimizer, sharded
from ridgeline.parallel.rung import Rung, Traffic, observed

STRATEGIES = ("data", "optimizer", "fsdp")
PARTS = ("collectives", *STRATEGIES, *cuts.PARTS)
RATE = 0.1  # of the check's SGD


# --- collectives


def wanted(what: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns what a collective of these tensors gives this rank."""
    if what == "all_gather":
        return torch.cat(tensors)
    total = torch.stack(tensors).sum(0)
    return total.chunk(groups.size())[groups.rank()] if what == "reduce_scatter" else total


def collective_rows(work: Work, device: torch.device, link: Link) -> Iterator[Row]:
    world, here = groups.size(), groups.rank()
    for size in work.sizes:
        rungs = [c for c in collectives.LADDER if not work.only or c.name in work.only]
        count = max(1, size // (4 * world)) * world
        runs, rows = [], []
        for rung in rungs:
            row: Row = {"part": "collectives", "what": rung.what, "rung": rung.name, "bytes": 4 * count, "wrong": None}
            if refused := rung.refuses(device):
                yield row | {"refused": refused, "checked": False}
                continue
            mine = count // world if rung.what == "all_gather" else count
            made = [torch.randint(-8, 8, (mine,), generator=torch.Generator().manual_seed(r)).float()
                    for r in (range(world) if 4 * count <= 2**24 else [here])]  # fmt: skip
            x = made[here if len(made) > 1 else 0].to(device)
            if rung.kernel:
                rung.run(x)  # the first call makes the memory
            with observed() as seen:
                y = rung.run(x)
            if len(made) > 1 and not torch.equal(y.cpu(), wanted(rung.what, made)):
                row["wrong"] = "the result is not the sum or the tensors of all ranks"
            predicted = rung.traffic(4 * count, world)
            rows.append(row | moved(predicted, seen, link) | {"checked": len(made) > 1})
            runs.append(lambda rung=rung, x=x: rung.run(x))
        for row, seconds in zip(rows, timed(runs, device, work), strict=True):
            algorithm = row["bytes"] / seconds["median"]
            yield row | {"seconds": seconds, "algorithm": algorithm, "bus": row["sent"] / seconds["median"]}


# --- strategies


@dataclass
class Step:
    """A training step of a rung on this rank's part of the batch."""

    rung: Rung
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    target: torch.Tensor
    memory: dict[str, int] = field(default_factory=dict)

    def __call__(self) -> None:
        self.gradients()
        self.optimizer.step()

    def gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.wrapped(self.tokens, self.target).backward()
        self.rung.finish(self.wrapped)


class Alone(Rung):
    """No communication: each rank trains by itself."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return sharded.Applied(module)

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        return Traffic()


def ladder(part: str, work: Work) -> list[Rung]:
    """Returns the rungs of a part."""
    found: list[Rung]
    if part == "data":
        found = [*data.LADDER, *[data.buckets(mb) for mb in work.buckets]]
    else:
        found = list(optimizer.LADDER if part == "optimizer" else sharded.LADDER)
    chosen = [rung for rung in found if not work.only or rung.name in work.only]
    if not chosen:
        raise RidgelineError(f"parallel bench: {part} has no rung of these; it has {', '.join(r.name for r in found)}")
    return chosen


def begun(rung: Rung, work: Work, device: torch.device, kind: type[torch.optim.Optimizer], **options: Any) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(work.model, work.impl)
    dice = torch.Generator().manual_seed(1 + groups.rank())
    tokens, target = (
        torch.randint(work.model.vocabulary, (work.batch, work.context), generator=dice).to(device) for _ in range(2)
    )
    wrapped = rung.wrap(model)
    return Step(rung, wrapped, rung.optimizer(wrapped, kind, **options), tokens, target)


@torch.no_grad()
def weights(wrapped: Any) -> dict[str, torch.Tensor]:
    """Returns a wrapped model's whole parameters by their plain names."""
    if isinstance(wrapped, fsdp.FSDP):
        return wrapped.full_state_dict()
    named = wrapped.module.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p.detach()).clone() for name, p in named}


def check(rung: Rung, work: Work, device: torch.device, optimizers: tuple[Any, dict[str, Any]]) -> str | None:
    """Trains two layers for two steps by a rung and in one process, and returns None or what differs."""
    work = replace(work, model=replace(work.model, layers=min(2, work.model.layers)))
    kind, options = optimizers
    step = begun(rung, work, device, kind, **options)
    whole = begun(Alone("alone", ""), work, device, kind, **options)
    parts = [[torch.empty_like(t) for _ in range(groups.size())] for t in (step.tokens, step.target)]
    for some, mine in zip(parts, (step.tokens, step.target), strict=True):
        dist.all_gather(some, mine)
    whole.tokens, whole.target = (torch.cat(some) for some in parts)
    for _ in range(2):
        step()
        whole()
    ours = weights(step.wrapped)
    for name, wanted_ in weights(whole.wrapped).items():
        if not torch.allclose(ours[name], wanted_, rtol=1e-4, atol=1e-6):
            return f"{name} is off by {(ours[name] - wanted_).abs().max().item():.2g} after two steps"
    return None


def strategy_rows(part: str, work: Work, device: torch.device, link: Link) -> Iterator[Row]:
    sgd = (torch.optim.SGD, {"lr": RATE})
    adamw = (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-3})
    checks = adamw if part == "optimizer" else sgd
    alone = begun(Alone("alone", ""), work, device, torch.optim.AdamW)
    [base] = timed([alone], device, work)
    yield {"part": part, "rung": "alone", "seconds": base, "wrong": None, "checked": False}
    del alone
    for rung in ladder(part, work):
        wrong = check(rung, work, device, checks)
        [bad] = slowest([float(wrong is not None)])
        row: Row = {"part": part, "rung": rung.name, "wrong": wrong, "checked": True}
        if bad:
            yield row | {"wrong": wrong or "another rank is wrong"}
            continue
        with torch.device("meta"):
            plain = Transformer(work.model, work.impl)
        predicted, held = rung.traffic(plain, groups.size()), rung.held(plain, groups.size())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step = begun(rung, work, device, torch.optim.AdamW)
        memory = {"init": in_use(step.wrapped.parameters(), step.optimizer, device)}
        step.gradients()
        memory["before"] = in_use(step.wrapped.parameters(), step.optimizer, device)
        step.optimizer.step()
        memory["after"] = in_use(step.wrapped.parameters(), step.optimizer, device)
        step()  # the engine lays out its buckets anew after the first
        with observed() as seen:
            step()
        [seconds] = timed([step], device, work)
        apart = seconds["low"] > base["high"]  # else noise
        exposed = 1 - base["median"] / seconds["median"] if apart else None
        row |= {"seconds": seconds, "exposed": exposed, "memory": memory, "memory_predicted": expected(held)}
        yield row | moved(predicted, seen, link)
        del step


def formulas(work: Work, world: int) -> list[Row]:
    """Returns what each strategy moves and holds, by formula; nothing runs, and no memory is taken."""
    with torch.device("meta"):
        plain = Transformer(work.model, work.impl)
    found: list[Row] = []
    for part in work.parts:
        if part in cuts.PARTS:
            found += cuts.formulas(part, work, plain, world)
        for rung in ladder(part, work) if part in STRATEGIES else []:
            traffic, held = rung.traffic(plain, world), rung.held(plain, world)
            found.append({
                "part": part, "rung": rung.name, "world": world, "idea": rung.idea, "sent": traffic.sent(world),
                "calls_predicted": dict(traffic.calls), "bytes_predicted": dict(traffic.bytes),
                "memory_predicted": expected(held),
            })  # fmt: skip
    return found


def rows(work: Work, device: torch.device) -> list[Row]:
    """Returns the rows of all parts; each rank calls it."""
    found: list[Row] = []
    where = {"world": groups.size(), "backend": dist.get_backend(), "device": machine(device), "impl": work.impl}
    with groups.answered("the benchmark"):
        link = link_of(device, work)
        for part in work.parts:
            if part in cuts.PARTS:
                found_here = cuts.rows(part, work, device, link)
            elif part in STRATEGIES:
                found_here = strategy_rows(part, work, device, link)
            else:
                found_here = collective_rows(work, device, link)
            found += [where | {"latency": link.latency, "bandwidth": link.bandwidth} | row for row in found_here]
    return found


def ranked(work: Work) -> list[Row]:
    """Runs as one rank of `parallel.groups.spawn`. Only rank 0 returns rows."""
    nccl = dist.get_backend() == "nccl"
    found = rows(work, torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu"))
    return deepcopy(found) if groups.rank() == 0 else []
