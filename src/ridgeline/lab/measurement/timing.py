"""Checks the implementations of one case, and times those that are right against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.calls import CALLS, DIRECTIONS
from ridgeline.lab.measurement.candidates import FULL, Candidate, judge, release, stumbles
from ridgeline.lab.measurement.work import Work

if TYPE_CHECKING:
    from ridgeline.lab.measurement.clock import Function, Measurement, Timer
    from ridgeline.lab.measurement.law import Law
    from ridgeline.op import Case, Op

Row = dict[str, Any]


def bench_case(
    op: Op,
    case: Case,
    dtype: str,
    device: str,
    candidates: list[Candidate],
    roof: Row,
    *,
    budget: float,
    timer: Timer | None = None,
) -> Iterator[Row]:
    """Check and bench rows, as they come, of every candidate on one case in one dtype, forward and backward."""
    import torch

    from ridgeline.lab.measurement.clock import cache_bytes, device_timer
    from ridgeline.lab.measurement.law import Law, leaves

    costs = dict(zip(DIRECTIONS, op.cost(*(made := case.make(dtype, "meta"))[0], **made[1]), strict=False))
    if not leaves([*made[0], *made[1].values()]):  # nothing takes a gradient
        costs = {"forward": costs["forward"]}
    works = [
        Work(op.name, case.name, dtype, d, c, roof, cache_bytes(device)) for d, c in costs.items() if c is not None
    ]
    try:
        law = Law.of(op, case.name, dtype, device)
    except torch.OutOfMemoryError:
        release(device)
        for work in works:
            yield from (
                work.row(c.rung, "oom", "the oracle in float64 needs more memory than there is") for c in candidates
            )
        return
    for candidate in candidates:
        if candidate.status == "ok" and (row := judge(law, candidate, case.name, dtype, device)):
            yield row
    law.forget()
    release(device)
    for work in works:
        yield from _timed(work, law, candidates, budget, timer or device_timer(device), device)
    del law
    release(device)


def _timed(
    work: Work, law: Law, candidates: list[Candidate], budget: float, timer: Timer, device: str
) -> Iterator[Row]:
    """One direction: a row per candidate, in their order."""
    rows: dict[str, Row] = {}
    makers: dict[str, Callable[[], Function]] = {}
    for candidate in candidates:
        rung, worst = candidate.rung, candidate.law.get(work.direction)
        if candidate.status != "ok":
            rows[rung.name] = work.row(rung, candidate.status, candidate.reason)
        elif work.direction != "forward" and not rung.differentiable:
            rows[rung.name] = work.row(rung, "unsupported", "it has no backward")
        elif candidate.broken[work.direction]:
            rows[rung.name] = work.row(rung, "wrong", candidate.broken[work.direction], law=worst)
        else:
            make = partial(CALLS[work.direction], law, rung)
            if reason := stumbles(candidate, make):
                rows[rung.name] = work.row(rung, "wrong", reason, law=worst)
            else:
                makers[rung.name] = make
    found = timed(makers, budget, timer, device, work.cost.write)
    for candidate in candidates:
        name, worst = candidate.rung.name, candidate.law.get(work.direction)
        if name in found:
            full = found[name] is None
            reason = FULL if full else None
            rows[name] = work.row(candidate.rung, "oom" if full else "ok", reason, found[name], worst)
    best = min(
        (row["seconds"]["median"] for row in rows.values() if row["peer"] and row["status"] == "ok"), default=None
    )
    for candidate in candidates:
        row = rows[candidate.rung.name]
        if best is not None and row["status"] == "ok":
            row["ratio"] = best / row["seconds"]["median"]
        yield row


def timed(
    makers: dict[str, Callable[[], Function]], budget: float, timer: Timer, device: str, writes: int | None = None
) -> dict[str, Measurement | None]:
    """The times of functions that are measured together, or in smaller groups if memory is too small for all at once.

    None for a function that does not fit alone.
    """
    import torch

    from ridgeline.lab.measurement.clock import measure

    if not makers:
        return {}
    functions: dict[str, Function] = {}
    held: dict[str, int | None] = {}
    try:
        for name, make in makers.items():
            before = torch.cuda.memory_allocated() if device.startswith("cuda") else None
            functions[name] = make()
            held[name] = None if before is None else torch.cuda.memory_allocated() - before
        found = measure(functions, budget=budget, timer=timer, writes=writes)
        return {name: replace(m, held_bytes=held[name]) for name, m in found.items()}
    except torch.OutOfMemoryError:
        if len(makers) == 1:
            return dict.fromkeys(makers)
    functions.clear()
    release(device)
    names = list(makers)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    first, second = (timed({name: makers[name] for name in half}, budget / 2, timer, device, writes) for half in halves)
    return first | second
