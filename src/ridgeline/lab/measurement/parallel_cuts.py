"""The sections of `ridgeline parallel bench` whose ranks share one batch: split sequences, split layers, pipelines.

Each rung is checked against one process, then timed beside the same work in one process. The prediction is a rank's
part of that time, as its formula says, and what it moves, as if nothing overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import ridgeline
from ridgeline.lab.measurement.parallel_clock import Link, Row, Work, expected, in_use, moved, slowest, timed
from ridgeline.lm.model import Transformer
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, pipeline, sequence, splits, ways
from ridgeline.parallel.rung import Traffic, observed

PARTS = ("ring", "tensor", "pipeline")
LADDERS: dict[str, list[Any]] = {"ring": ways.LADDER, "tensor": splits.LADDER, "pipeline": pipeline.LADDER}
MOST_CHECKED = 2048  # tokens of the sequence whose attention is checked, in float32


def ladder(part: str, work: Work) -> list[Any]:
    """Returns the rungs of a part."""
    chosen = [rung for rung in LADDERS[part] if not work.only or rung.name in work.only]
    if not chosen:
        names = ", ".join(rung.name for rung in LADDERS[part])
        raise RidgelineError(f"parallel bench: {part} has no rung of these; it has {names}")
    return chosen


def fitted(work: Work, world: int) -> Work:
    """Returns the work as these ranks can cut it: a pipeline's layers and a ring's tokens are multiples of theirs."""
    layers, tokens = 2 * world, 2 * world
    model = replace(work.model, layers=-(-work.model.layers // layers) * layers, tied=False)
    many = work.microbatches or 2 * world
    return replace(work, model=model, context=-(-work.context // tokens) * tokens, microbatches=many)


def rows(part: str, work: Work, device: torch.device, link: Link) -> Iterator[Row]:
    """Yields the rows of a part; each rank calls it."""
    made = {"ring": ring_rows, "tensor": tensor_rows, "pipeline": pipeline_rows}[part]
    yield from made(work, device, link)


def formulas(part: str, work: Work, plain: Transformer, world: int) -> list[Row]:
    """Returns what each rung moves and holds, by formula, as seen by rank 0."""
    found: list[Row] = []
    for rung in ladder(part, work):
        held, fit = None, fitted(work, world)
        if part == "ring":
            traffic = rung.traffic(shape(fit, world), fit.model.groups, world, 4)
        elif part == "tensor":
            traffic, held = rung.traffic(plain, world, work.batch, work.context), rung.held(plain, world)
        else:
            with torch.device("meta"):
                plain = Transformer(fit.model, work.impl)
            many = fit.microbatches or 1
            traffic = rung.traffic(plain, 0, world, many * work.batch, work.context, many)
            held = rung.held(plain, 0, world)
        found.append({
            "part": part, "rung": rung.name, "world": world, "idea": rung.idea, "sent": traffic.sent(world),
            "calls_predicted": dict(traffic.calls), "bytes_predicted": dict(traffic.bytes),
            "memory_predicted": expected(held) if held else None,
        })  # fmt: skip
    return found


def agreed(wrong: str | None) -> str | None:
    """Returns what is wrong here, or that another rank is wrong, or None."""
    [bad] = slowest([float(wrong is not None)])
    return wrong or ("another rank is wrong" if bad else None)


def apart(name: str, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if torch.allclose(found, wanted, rtol=1e-4, atol=1e-6):
        return None
    return f"{name} is off by {(found - wanted).abs().max().item():.2g}"


def first(wrongs: Iterator[str | None]) -> str | None:
    return next((wrong for wrong in wrongs if wrong), None)


# --- a sequence


def shape(work: Work, world: int) -> tuple[int, int, int, int]:
    """Returns the shape of a rank's queries."""
    return work.batch, work.model.heads, work.context // world, work.model.dim


def ring_rows(work: Work, device: torch.device, link: Link) -> Iterator[Row]:
    """Causal attention, forward and backward, of sequences that are split over the ranks."""
    world = groups.size()
    work = fitted(work, world)
    dice, half = torch.Generator().manual_seed(0), device.type == "cuda"
    many, shared = work.model.heads, work.model.groups

    def made(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(work.batch, n, tokens, work.model.dim, generator=dice).to(device)
                for n in (many, shared, shared, many)]  # fmt: skip

    def step(call: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
        *qkv, do = given
        qkv = [t.detach().requires_grad_() for t in qkv]
        o = call(*qkv)
        o.backward(do)
        return [o.detach(), *[t.grad for t in qkv if t.grad is not None]]

    attend = partial(ridgeline.attention, causal=True, impl=None if work.impl == "ridgeline" else work.impl)
    short = made(min(work.context, MOST_CHECKED // (2 * world) * 2 * world))
    wanted = step(attend, short)
    timing = [t.bfloat16() if half else t for t in made(work.context)]
    [base] = timed([lambda: step(attend, timing)], device, work)
    yield {"part": "ring", "rung": "alone", "seconds": base, "wrong": None, "checked": False}
    for rung in ladder("ring", work):
        refused = rung.refuses(many, shared, world)
        if refused:
            yield {"part": "ring", "rung": rung.name, "wrong": None, "refused": refused, "checked": False}
            continue
        call = partial(rung.run, causal=True)
        layout = rung.layout
        mine = [sequence.shard(t, dim=2, layout=layout) for t in short]
        found = [sequence.unshard(t, dim=2, layout=layout) for t in step(call, mine)]
        near = 20.0 if half else 1.0  # tf32 may be on
        names = ("o", "dq", "dk", "dv")
        wrong = first(
            None if (a - b).norm() <= near * 1e-4 * b.norm() else f"{name} is off by {(a - b).norm() / b.norm():.2g}"
            for name, a, b in zip(names, found, wanted, strict=True)
        )
        row: Row = {"part": "ring", "rung": rung.name, "wrong": agreed(wrong), "checked": True}
        if row["wrong"]:
            yield row
            continue
        mine = [sequence.shard(t, dim=2, layout=layout) for t in timing]
        run = partial(step, call, mine)
        with observed() as seen:
            run()
        [seconds] = timed([run], device, work)
        predicted = rung.traffic(shape(work, world), shared, world, mine[0].element_size())
        row |= {"seconds": seconds, "alone": base["median"], "share": rung.share(world)}
        yield whole_step(row | moved(predicted, seen, link))


def whole_step(row: Row) -> Row:
    """Adds the predicted time of the step: a rank's share of the time alone, and its transfers."""
    return row | {"step_predicted": row["share"] * row["alone"] + row["predicted"]}


# --- layers


def batch_of(work: Work, rows_: int, device: torch.device) -> list[torch.Tensor]:
    """Returns tokens and targets, the same on every rank."""
    dice = torch.Generator().manual_seed(1)
    return [torch.randint(work.model.vocabulary, (rows_, work.context), generator=dice).to(device) for _ in range(2)]


def model_of(work: Work, device: torch.device) -> Transformer:
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(work.model, work.impl)


def trained(model: Any, optimizer: Any, data: list[torch.Tensor]) -> torch.Tensor:
    """Runs a step, and returns the loss."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(*data)
    loss.backward()
    optimizer.step()
    return loss.detach()


def remembered(row: Row, step: Callable[[], Any], parameters: list[Any], optimizer: Any, device: torch.device) -> Row:
    """Runs a first step, and adds the memory after init, before and after the optimizer's step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    memory = {"init": in_use(parameters, optimizer, device)}
    real, optimizer.step = optimizer.step, lambda: memory.update(before=in_use(parameters, optimizer, device))
    step()
    optimizer.step = real
    optimizer.step()
    return row | {"memory": memory | {"after": in_use(parameters, optimizer, device)}}


def tensor_rows(work: Work, device: torch.device, link: Link) -> Iterator[Row]:
    """A training step of a model whose layers are split; all ranks have the same batch."""
    world = groups.size()
    data = batch_of(work, work.batch, device)
    alone = model_of(work, device)
    [base] = timed([partial(trained, alone, torch.optim.AdamW(alone.parameters()), data)], device, work)
    yield {"part": "tensor", "rung": "alone", "seconds": base, "wrong": None, "checked": False}
    del alone
    with torch.device("meta"):
        plain = Transformer(work.model, work.impl)
    for rung in ladder("tensor", work):
        row: Row = {"part": "tensor", "rung": rung.name, "wrong": None, "checked": True}
        refused = rung.refuses(plain, world, work.context)
        if refused:
            yield row | {"refused": refused, "checked": False}
            continue
        row["wrong"] = agreed(split_is_wrong(rung, work, data, device))
        if row["wrong"]:
            yield row
            continue
        model = model_of(work, device)
        rung.wrap(model)
        optimizer = torch.optim.AdamW(model.parameters())
        step = partial(trained, model, optimizer, data)
        row = remembered(row, step, list(model.parameters()), optimizer, device)
        with observed() as seen:
            step()
        [seconds] = timed([step], device, work)
        row |= {"seconds": seconds, "alone": base["median"], "share": rung.share(plain, world)}
        row |= moved(rung.traffic(plain, world, work.batch, work.context), seen, link)
        yield whole_step(row | {"memory_predicted": expected(rung.held(plain, world))})
        del model, optimizer, step


def split_is_wrong(rung: splits.Split, work: Work, data: list[torch.Tensor], device: torch.device) -> str | None:
    """Trains two layers for two steps by a rung and in one process, and returns what differs, or None."""
    work = replace(work, model=replace(work.model, layers=min(2, work.model.layers)))
    one, own = model_of(work, device), model_of(work, device)
    made = rung.wrap(own)
    for model in (one, own):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            trained(model, optimizer, data)
    found = made.state_dict()
    return first(apart(f"{name} after two steps", found[name], t) for name, t in one.state_dict().items())


# --- a pipeline


def pipeline_rows(work: Work, device: torch.device, link: Link) -> Iterator[Row]:
    """A training step of a pipeline: a rank has some layers, and micro-batches pass through the ranks."""
    world, here = groups.size(), groups.rank()
    work = fitted(work, world)
    many = work.microbatches or 1
    data = batch_of(work, many * work.batch, device)
    alone = model_of(work, device)
    [base] = timed([partial(trained, alone, torch.optim.AdamW(alone.parameters()), data)], device, work)
    about = {"part": "pipeline", "layers": work.model.layers, "microbatches": many}
    yield about | {"rung": "alone", "seconds": base, "wrong": None, "checked": False}
    del alone
    with torch.device("meta"):
        plain = Transformer(work.model, work.impl)
    for rung in ladder("pipeline", work):
        row: Row = about | {"rung": rung.name, "wrong": None, "checked": True}
        if rung.stages > 1 and many % world:
            refused = f"micro-batches must be a multiple of the {world} ranks, and are {many}"
            yield row | {"refused": refused, "checked": False}
            continue
        row["wrong"] = agreed(pipeline_is_wrong(rung, work, data, device))
        if row["wrong"]:
            yield row
            continue
        pipe = rung.wrap(model_of(work, device), many)
        optimizer = torch.optim.AdamW(pipe.parameters())
        step = partial(piped, pipe, optimizer, data)
        row = remembered(row, step, list(pipe.parameters()), optimizer, device)
        with observed() as seen:
            step()
        [seconds] = timed([step], device, work)
        sent = rung.traffic(plain, here, world, many * work.batch, work.context, many)
        idle = rung.idle(world, many)
        row |= {"live": pipe.live.most, "live_predicted": rung.live(here, world, many), "idle_predicted": idle}
        row |= {"seconds": seconds, "alone": base["median"], "share": 1 / world / (1 - idle)}
        row["idle"] = 1 - base["median"] / world / seconds["median"]
        row |= moved(sent, Traffic().add("send", seen.bytes["send"], seen.calls["send"]), link)
        yield whole_step(row | {"memory_predicted": expected(rung.held(plain, here, world))})
        del pipe, optimizer, step


def piped(pipe: pipeline.Pipeline, optimizer: Any, data: list[torch.Tensor]) -> None:
    optimizer.zero_grad(set_to_none=True)
    pipe.step(*data)
    optimizer.step()


def pipeline_is_wrong(
    rung: pipeline.Schedule, work: Work, data: list[torch.Tensor], device: torch.device
) -> str | None:
    """Trains two steps by a rung and in one process, and returns what differs in this rank's layers, or None."""
    one, own = model_of(work, device), model_of(work, device)
    pipe = rung.wrap(own, work.microbatches or 1)
    mine = {id(p) for p in pipe.parameters()}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    whole = torch.optim.SGD(one.parameters(), lr=0.1)
    for _ in range(2):
        trained(one, whole, data)
        piped(pipe, optimizer, data)
    pairs = zip(own.named_parameters(), one.parameters(), strict=True)
    return first(apart(f"{name} after two steps", p, q) for (name, p), q in pairs if id(p) in mine)
