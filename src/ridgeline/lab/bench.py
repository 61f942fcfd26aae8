"""Check implementations, then time them against each other and the limits of the hardware."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ridgeline.lab import model_bench, units
from ridgeline.lab.check import (
    check_row,
    choice,
    chosen_implementations,
    chosen_ops,
    chosen_work,
    compiling,
    default_device,
)
from ridgeline.lab.machine import facts, measure_roof, roof_seconds
from ridgeline.lab.store import UNTIMED
from ridgeline.lab.tables import CACHED, console, figure, table, timing

if TYPE_CHECKING:
    from ridgeline.lab.clock import Function, Measurement, Timer
    from ridgeline.lab.law import Law
    from ridgeline.lab.report.budget import Pace
    from ridgeline.lab.results import Merge
    from ridgeline.lab.store import Run
    from ridgeline.op import Case, Cost, Implementation, Op

Row = dict[str, Any]
ABOVE = 1.03  # a figure this far above the interval of its roof (the machine's measured limit) is a mistake
PEERS = ("torch", "compile")
FULL = "it needs more memory than there is"


@dataclass
class Work:
    """One case of one op in one dtype and direction: what its rows have in common."""

    op: str
    case: str
    dtype: str
    direction: str
    cost: Cost
    roof: Row
    cache: int

    @property
    def cached(self) -> bool:
        """Whether the working set is small enough for the cache to help."""
        return self.cost.bytes < 4 * self.cache

    def row(
        self,
        rung: Implementation,
        status: str,
        reason: str | None = None,
        found: Measurement | None = None,
        law: float | None = None,
    ) -> Row:
        from ridgeline.lab.peers import Peer

        cost = self.cost
        least, bound = roof_seconds(self.roof, self.dtype, cost.read, cost.write, cost.flops)
        row: Row = {"type": "bench", "op": self.op, "case": self.case, "dtype": self.dtype, "direction": self.direction}
        row |= {
            "impl": rung.name,
            "kind": rung.kind,
            "peer": rung.name in PEERS or isinstance(rung, Peer),
            "status": status,
            "reason": reason,
        }
        row |= {"bytes": cost.bytes, "read": cost.read, "write": cost.write, "flops": cost.flops}
        row |= {"roof_seconds": least, "bound": bound, "cached": self.cached} | UNTIMED | {"law": law}
        if found is None:
            return row
        row |= {
            "seconds": found.seconds,
            "host_us": found.host_us,
            "share": least / found.median,
            "peak_bytes": found.peak_bytes,
        }
        row |= {"held_bytes": found.held_bytes, "mhz": found.mhz, "throttled": found.throttled}
        if refusal := self._too_good(found.median):
            row |= {"status": "refused", "reason": refusal}
        return row

    def _too_good(self, seconds: float) -> str | None:
        """The reason why a time cannot be true (it beats the roof and no cache explains it), or None."""
        least, bound = roof_seconds(self.roof, self.dtype, self.cost.read, self.cost.write, self.cost.flops, end="high")
        if least < seconds * ABOVE or (bound == "memory" and self.cached):
            return None
        above = units.percent(least / seconds - 1)
        return f"{units.seconds(seconds)} is {above} above the measured roof's interval, which cannot be"


@dataclass
class Candidate:
    """An implementation that may be timed. law, broken: what the tolerance check found, per direction."""

    rung: Implementation
    status: str = "ok"
    reason: str | None = None
    law: dict[str, float] = field(default_factory=dict)
    broken: dict[str, str | None] = field(default_factory=dict)


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

    from ridgeline.lab.clock import cache_bytes, device_timer
    from ridgeline.lab.law import Law, leaves

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


def judge(law: Law, candidate: Candidate, case: str, dtype: str, device: str) -> Row | None:
    """The check row of a candidate, or None if the check did not finish; the outcome is noted on the candidate."""
    import torch

    row = None
    try:
        row, verdict = check_row(law, candidate.rung, case, dtype, device)
        if verdict is None:
            candidate.status, candidate.reason = "unsupported", row["reason"]
            return row
        for direction in DIRECTIONS:
            candidate.law[direction] = verdict.worst(direction)
            candidate.broken[direction] = verdict.reason(direction)
    except torch.OutOfMemoryError:
        release(device)
        candidate.status, candidate.reason = "oom", FULL
    except Exception as error:  # whatever a broken kernel raises is its row's reason, and the others go on
        candidate.status, candidate.reason = "wrong", blame(candidate, error)
    return row


def untimed(rung: Implementation) -> Candidate | None:
    """A candidate that is not timed, if the implementation would run in Triton's interpreter; else None."""
    from ridgeline.boundary import INTERPRETED

    return (
        Candidate(rung, "unsupported", "Triton's interpreter is not timed") if INTERPRETED and rung.is_kernel else None
    )


def blame(candidate: Candidate, error: Exception) -> str:
    """What an implementation raised, as a reason.

    Raises RidgelineError after an error of the GPU itself, since nothing else can run then.
    """
    from ridgeline.op import RidgelineError

    text = str(error).strip().splitlines() or [""]
    reason = f"it raised {type(error).__name__}: {text[0]}"
    if "CUDA error" in str(error):
        raise RidgelineError(
            f"{candidate.rung.op.name} {candidate.rung.name} broke the GPU's context: {reason}"
        ) from error
    return reason


def stumbles(candidate: Candidate, make: Callable[[], Function]) -> str | None:
    """Returns what a function raises when it is called twice, or None. Running out of memory is left to `timed`."""
    import torch

    try:
        function = make()
        function()
        function()
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # as in judge
        return blame(candidate, error)
    return None


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


def forward(law: Law, rung: Implementation) -> Function:
    """The forward call as a function of no arguments. Tensors that it changes in place are restored before each run."""
    from ridgeline.op import tensors_of

    if not law.op.mutates:
        return partial(rung, *law.args, **law.kwargs)
    args = law.op.fresh(law.args)
    changed, given = (tensors_of(some[n] for n in law.op.mutates) for some in (args, law.args))

    def before() -> None:
        for tensor, original in zip(changed, given, strict=True):
            tensor.copy_(original)

    call: Any = partial(rung, *args, **law.kwargs)
    call.before = before
    return call


def backward(law: Law, rung: Implementation) -> Function:
    """The backward alone as a function of no arguments; the graph is kept.

    Incoming gradients have the outputs' memory format.
    """
    import torch

    from ridgeline.lab.law import as_tuple, leaves

    pairs = [
        (o, g)
        for o, g in zip(as_tuple(rung(*law.args, **law.kwargs)), law.incoming, strict=True)
        if g is not None and o.requires_grad
    ]
    outputs = [o for o, _ in pairs]
    incoming = [g if g.stride() == o.stride() else torch.empty_like(o, requires_grad=False).copy_(g) for o, g in pairs]
    return partial(torch.autograd.grad, outputs, leaves(law.args), incoming, retain_graph=True, allow_unused=True)


def both(law: Law, rung: Implementation) -> Function:
    """Forward and then backward as a function of no arguments, as in training: the gradient of a loss is 1."""
    import torch

    from ridgeline.lab.law import as_tuple, leaves

    incoming = [g if g is None or g.dim() else torch.ones_like(g) for g in law.incoming]

    def step() -> Any:
        outputs = as_tuple(rung(*law.args, **law.kwargs))
        pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if g is not None and o.requires_grad]
        return torch.autograd.grad([o for o, _ in pairs], leaves(law.args), [g for _, g in pairs], allow_unused=True)

    return step


CALLS = {"forward": forward, "backward": backward, "both": both}
DIRECTIONS = tuple(CALLS)


def timed(
    makers: dict[str, Callable[[], Function]], budget: float, timer: Timer, device: str, writes: int | None = None
) -> dict[str, Measurement | None]:
    """The times of functions that are measured together, or in smaller groups if memory is too small for all at once.

    None for a function that does not fit alone.
    """
    import torch

    from ridgeline.lab.clock import measure

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


def release(device: str) -> None:
    """Frees memory that is no longer used."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


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
    report: Callable[[str, int, int], None] = lambda text, done, total: None,
    merged: Callable[[Merge], None] = lambda merge: None,
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
    from ridgeline.lab import peers as installed
    from ridgeline.lab import results
    from ridgeline.lab.counters import read as read_counters
    from ridgeline.lab.store import Run
    from ridgeline.op import RidgelineError

    if budget is not None and not 0 < budget < 86400:
        raise RidgelineError(f"--budget is in seconds, above 0 and under a day, and is {budget}")
    gpu = device.startswith("cuda")
    uses = ("grid",) if grid else ("bench",) if gpu and not quick else ("quick",)
    budget = budget or (0.4 if quick else 1.0 if gpu else 0.8)
    tasks = chosen_work(ops, uses, case, dtype)
    for op in ops:
        chosen_implementations(op, impl)  # raises for a wrong name before anything is measured
        if not chosen_implementations(op, impl, without):
            raise RidgelineError(f"{op.name}: --without {without} leaves no implementation")
    if without and (unknown := {*without.split(",")} - {name for op in ops for name in op.implementations}):
        names = ", ".join(op.name for op in ops)
        raise RidgelineError(f"--without {', '.join(sorted(unknown))}: none of {names} has that implementation")
    if counters and not gpu:
        raise RidgelineError("--counters needs a GPU")
    if record:
        recordable(facts(device)["gpu"], quick or grid)
    run = Run(facts(device), at=commit)
    finished = 0  # rows of cases that were timed to their end
    try:
        report("the roof", 0, len(tasks))
        roof = measure_roof(device, quick, lambda text: report(f"the roof: {text}", 0, len(tasks)))
        run.write({"type": "roof", **roof})
        release(device)
        tasks = pace.order(tasks, run) if pace else tasks
        with compiling():
            for done, (op, c, d) in enumerate(tasks):
                report(f"{op.name} {c.name} {d}", done, len(tasks))
                candidates = [untimed(rung) or Candidate(rung) for rung in chosen_implementations(op, impl, without)]
                if pace:
                    candidates = pace.fit(candidates, len(tasks) - done)
                if peers:
                    candidates += [
                        Candidate(peer, "skipped" if missing else "ok", missing) for peer, missing in installed.of(op)
                    ]
                for row in bench_case(op, c, d, device, candidates, roof, budget=budget):
                    run.write(row)
                finished = len(run.rows)
        if counters:
            report("the implementations' counters", len(tasks), len(tasks))
            for row in read_counters(tasks, lambda op: chosen_implementations(op, impl, without)):
                run.write(row)
                finished = len(run.rows)
        report("done", len(tasks), len(tasks))
    finally:
        if record and finished:
            merged(results.merge(run.rows[:finished]))
    return run


def recordable(gpu: str | None, others: bool) -> None:
    """Raises RidgelineError before anything is measured if a run cannot be recorded.

    gpu: the GPU's name, None on a CPU. others: whether other cases than benchmark ones are chosen.
    """
    from ridgeline.lab import store
    from ridgeline.op import RidgelineError

    if gpu is None:
        raise RidgelineError("--record is for GPUs and this run is on a CPU: without it the run is kept in the cache")
    if others:
        raise RidgelineError("--record keeps benchmark cases alone: leave out --quick and --grid")
    path = store.recorded() / f"{store.slug(gpu)}.jsonl"
    with store.locked(path.parent):
        if path.exists():
            store.load(path)


def arguments(parser: argparse.ArgumentParser) -> None:
    choice(parser)
    parser.add_argument(
        "--peers", action="store_true", help="also time other packages that have the op, where installed"
    )
    parser.add_argument("--quick", action="store_true", help="small cases and short timing")
    parser.add_argument("--grid", action="store_true", help="the cases of each op's grid of sizes")
    parser.add_argument(
        "--record", action="store_true", help="also merge the run into results/<gpu>.jsonl, and say what it replaces"
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        metavar="RUN",
        help="measure nothing: merge runs made elsewhere into results/ (files or names)",
    )
    parser.add_argument(
        "--commit", metavar="SHA", help="the commit of a source tree without git; the run is marked `dirty`"
    )
    parser.add_argument("--without", metavar="NAMES", help="leave out these implementations, separated by commas")
    parser.add_argument(
        "--counters", action="store_true", help="also read each implementation's own counter, with Nsight Compute (ncu)"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="seconds of timing per case, dtype and direction"
    )
    model_bench.arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.merge:
        return merge_files(options)
    if options.model is not None:
        return model_bench.main(options)
    device = default_device(options.device)
    names = ("quick", "grid", "peers", "budget", "impl", "without", "case", "dtype", "record", "counters", "commit")
    chosen = {name: getattr(options, name) for name in names}
    merges: list[Merge] = []
    try:
        with progress() as report:
            run = record(chosen_ops(options.ops), device, **chosen, report=report, merged=merges.append)
        if options.json:
            print(json.dumps(run.rows))
        else:
            show(run.rows)
        print(f"ridgeline: the run is {run.path}", file=sys.stderr)
    finally:
        for merge in merges:
            tell(merge)
    return 0


def merge_files(options: argparse.Namespace) -> int:
    """Merges runs that were made elsewhere, each in one step, and prints what each replaces."""
    from ridgeline.lab import results, store
    from ridgeline.op import RidgelineError

    if options.ops or options.record:
        raise RidgelineError("--merge measures nothing: it takes neither ops nor --record")
    runs = [store.load(store.find(run)) for run in options.merge]
    for rows in runs:
        results.file_of(rows)  # a run that cannot be recorded is an error before any is merged
    for rows in runs:
        tell(results.merge(rows, options.commit))
    return 0


def tell(merge: Merge) -> None:
    """Prints to stderr what a merge replaced, and each new time that lies outside the old one's interval."""
    from rich.console import Console

    from ridgeline.lab.compare import compare, listing

    def counted(rows: list[Row]) -> str:
        ops = [row.get("op") or row["model"] for row in rows]
        return f"{len(rows)} ({', '.join(f'{op} {ops.count(op)}' for op in dict.fromkeys(ops))})" if ops else "none"

    out = Console(stderr=True)
    out = out if out.is_terminal else Console(stderr=True, width=120)
    lines = [f"{merge.path}: rows replaced: {counted(merge.before)}; added: {counted(merge.added)}"]
    notes = {
        "left to ladders, since the new run timed their work without them": merge.older,
        "removed, since nothing shows them any more": merge.lost,
        "not recorded, since newer ones are, or since their cases are no benchmarks": merge.left_out,
    }
    lines += [f"rows {what}: {counted(rows)}" for what, rows in notes.items() if rows]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    moved = [row for row in compare(merge.before, merge.after) if row["change"] != "same"]
    if moved:
        out.print(listing("outside the old interval", moved))


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, to be passed to `record` as `report`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def show(rows: list[Row]) -> None:
    """Prints a table per case, dtype and direction, then what was not timed, with the reason."""
    from rich.text import Text

    from ridgeline.lab.roofline import rate
    from ridgeline.lab.verdict import key

    out = console()
    bench = [row for row in rows if row["type"] == "bench"]
    for work in dict.fromkeys(key(row) for row in bench):
        group = [row for row in bench if key(row) == work and row["status"] == "ok"]
        if not group:
            continue
        best = min(row["seconds"]["median"] for row in group)
        made = table(
            " ".join(work), ["impl"], ["time", "rate", "of roof", "to peer", "host us", "memory", "held", "law"]
        )
        for row in group:
            cells = rate(row), units.share(row), figure(row["ratio"], units.times), figure(row["host_us"], units.digits)
            style = "green" if row["seconds"]["median"] == best else ""
            sizes = units.size(row["peak_bytes"]), units.size(row.get("held_bytes"))
            made.add_row(
                Text(row["impl"]), timing(row["seconds"]), *cells, *sizes, units.digits(row["law"]), style=style
            )
        out.print(made)
    lost: dict[tuple[str, str, str, str], list[str]] = {}
    for row in bench:
        if row["status"] != "ok":
            lost.setdefault((row["op"], row["impl"], row["status"], row["reason"]), []).append(
                f"{row['case']} {row['dtype']} {row['direction']}"
            )
    for (op, impl, status, reason), where in lost.items():
        place = where[0] if len(where) == 1 else f"{len(where)} times"
        style = "dim" if status in ("unsupported", "skipped") else "red"
        out.print(f"{op} {impl}: {status} ({place}): {reason}", style=style, markup=False)
    if any(row["cached"] for row in bench):
        out.print(CACHED, style="dim")
