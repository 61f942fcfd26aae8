"""Measures one run, and keeps each row as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ridgeline.lab.measurement import machine, results
from ridgeline.lab.measurement.candidates import release
from ridgeline.lab.measurement.judge import compiling
from ridgeline.lab.measurement.plan import Pace, Plan, plan
from ridgeline.lab.measurement.store import Run
from ridgeline.lab.measurement.timing import bench_case

if TYPE_CHECKING:
    from ridgeline.op import Op

Report = Callable[[str, int, int], None]


def record(
    ops: list[Op],
    device: str,
    *,
    quick: bool = False,
    grid: bool = False,
    peers: bool = False,
    budget: float | None = None,
    impl: str | None = None,
    without: str | None = None,
    case: str | None = None,
    dtype: str | None = None,
    record: bool = False,
    commit: str | None = None,
    pace: Pace | None = None,
    counters: bool = False,
    report: Report = lambda text, done, total: None,
    merged: Callable[[results.Merge], object] = lambda merge: None,
) -> Run:
    """A run in the user's cache: the machine, its roof, and every chosen case of the ops, checked and timed.

    Each row is written as it comes. budget: seconds of timing per case, dtype and direction.
    grid: time the cases of an op's grid, such as the sequence lengths and head sizes of attention.
    without: implementations that are left out of every op that has them.
    record: merge the finished cases into `results/`, also where an error or an interruption ends the run early;
    `merged` gets the outcome. commit: the commit of a source tree without git.
    counters: also read the counter that each implementation names, by Nsight Compute.
    pace: puts the cases in order once the roof is measured, and picks the implementations that there is time for.
    report: called with what runs now, the number of finished cases and the number of all.
    """
    from ridgeline.op import RidgelineError

    gpu = device.startswith("cuda")
    if budget is not None and not 0 < budget < 86400:
        raise RidgelineError(f"--budget is in seconds, above 0 and under a day, and is {budget}")
    uses = ("grid",) if grid else ("bench",) if gpu and not quick else ("quick",)
    planned = plan(ops, uses, impl=impl, without=without, case=case, dtype=dtype, peers=peers, pace=pace)
    if counters and not gpu:
        raise RidgelineError("--counters needs a GPU")
    if record:
        results.recordable(machine.facts(device)["gpu"], quick or grid)
    run = Run(machine.facts(device), at=commit)
    budget = budget or (0.4 if quick else 1.0 if gpu else 0.8)
    stages = [_cases(run, planned, device, quick, budget, report)]
    if counters:
        stages.append(_counters(run, planned, report))
    finished = 0  # rows of cases that were timed to their end
    try:
        for _ in chain(*stages):
            finished = len(run.rows)
        report("done", len(planned.tasks), len(planned.tasks))
    finally:
        if record and finished:
            merged(results.merge(run.rows[:finished]))
    return run


def _cases(run: Run, planned: Plan, device: str, quick: bool, budget: float, report: Report) -> Iterator[None]:
    """Writes the roof, then the rows of each case; yields after each case."""
    from ridgeline.lab.measurement.roof import measure_roof

    count = len(planned.tasks)
    report("the roof", 0, count)
    roof = measure_roof(device, quick, lambda text: report(f"the roof: {text}", 0, count))
    run.write({"type": "roof", **roof})
    release(device)
    planned.order(run)
    with compiling():
        for done, (op, case, dtype) in enumerate(planned.tasks):
            report(f"{op.name} {case.name} {dtype}", done, count)
            for row in bench_case(op, case, dtype, device, planned.candidates(op, count - done), roof, budget=budget):
                run.write(row)
            yield


def _counters(run: Run, planned: Plan, report: Report) -> Iterator[None]:
    """Writes the row of each counter; yields after each."""
    from ridgeline.lab.measurement import counters

    count = len(planned.tasks)
    report("the implementations' counters", count, count)
    for row in counters.read(planned.tasks, planned.implementations):
        run.write(row)
        yield
