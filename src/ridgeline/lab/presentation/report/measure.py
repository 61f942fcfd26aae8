"""What `report` measures, as the lab's own verbs do, in processes that end when their share of the time is over."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement import query, store
from ridgeline.lab.measurement.query import Row
from ridgeline.lab.presentation.report.budget import LATE, Clock, Pace
from ridgeline.lab.presentation.report.worker import Send, Worker, collect

if TYPE_CHECKING:
    from ridgeline.op import Op

CASE = 0.4  # seconds of timing per case and direction on a CPU
MOST = 4  # processes a stage has at the most: each holds PyTorch, some 0.5 GiB


@dataclass
class Left:
    """What there was no time for: `count` of `of` things, and the command that does them."""

    count: int
    of: int
    what: str
    command: str


@dataclass
class Proofs:
    """Findings without timing: the interpreter's check rows, the compilers' facts per op, what was left out."""

    checks: list[Row] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def say(text: str) -> None:
    """Shows one line of progress in a terminal, in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def bench(quick: bool, until: float, clock: Clock) -> tuple[list[Row], list[Left]]:
    """Measures this machine's roof, then checks and times every op on it, as `ridgeline bench` does.

    Returns the run's rows and what was left out. The roof is always measured; the rest stops at the clock's `until`.
    The run is kept in the user's cache.
    """
    worker = Worker("timing on this machine", _bench, quick, until)
    collect([worker], until, lambda: say(_progress(worker)), clock, first=True)
    path, cases = next(tuple(message[1:]) for message in worker.found if message[0] == "run")
    done = cases if worker.ended else max((m[2] for m in worker.found if m[0] == "at"), default=0)
    rows = store.load(Path(path))
    compiled = [row for row in query.of(rows, "bench") if row["kind"] == "compile"]
    wanted = {query.key(row)[:3] for row in compiled}
    late = {query.key(row)[:3] for row in compiled if row["reason"] == LATE}
    left = [
        Left(cases - done, cases, "benchmark cases", "ridgeline bench"),
        Left(len(late), len(wanted), "timings of torch.compile", "ridgeline bench OP"),
    ]
    return rows, [item for item in left if item.count > 0]


def _progress(worker: Worker) -> str:
    message = worker.found[-1]
    return f"timing {message[1]} ({message[2]} of {message[3]} cases done)" if message[0] == "at" else "timing"


def _bench(send: Send, quick: bool, until: float) -> None:
    """Sends ("run", path, number of cases) once the roof is measured, then ("at", case, cases done, cases)."""
    from ridgeline.lab.measurement.machine import default_device
    from ridgeline.lab.measurement.record import record
    from ridgeline.op import registry

    device, ops = default_device(None), list(registry().values())
    gpu = device.startswith("cuda")
    pace = Pace(until, gpu, send)
    gc.collect()
    gc.freeze()  # what is loaded by now stays: each case's own collection need not look at it
    record(
        ops,
        device,
        quick=quick,
        budget=None if gpu else CASE,
        pace=pace,
        report=lambda text, done, total: send("at", text, done, total) if pace.told else None,
    )


def proofs(ops: list[str], interpret: bool, until: float, clock: Clock, processes: int | None = None) -> Proofs:
    """Compiles all kernels and, if `interpret`, checks Triton's in its interpreter, both until the clock's `until`."""
    from ridgeline.lab.presentation.report import compiler, interpreter

    builds = max(1, min(MOST, processes or len(os.sched_getaffinity(0))))
    halves = max(1, builds // 2) if interpret else 0  # interpreters, which are over first
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    builders = [
        Worker("compiling", compiler.build, ops, n, builds, TRITON_INTERPRET=None, **one) for n in range(builds)
    ]
    checkers = [
        Worker("checking in Triton's interpreter", interpreter.check, ops, n, halves, TRITON_INTERPRET="1", **one)
        for n in range(halves)
    ]

    def progress() -> None:
        done, compiled = (sum(len(w.found) for w in some) for some in (checkers, builders))
        say(f"{f'checked {done} results in the interpreter, ' if checkers else ''}compiled {compiled} of {len(pieces)}")

    pieces = compiler.pieces(ops)
    collect([*builders, *checkers], until, progress, clock)
    checks = [message[1] for worker in checkers for message in worker.found]
    wanted = sum(len(kernels) for *_, kernels in interpreter.groups(ops)) if interpret else 0
    made = [message[1:] for worker in builders for message in worker.found]
    left = [
        Left(wanted - len(checks), wanted, "checks in Triton's interpreter", "TRITON_INTERPRET=1 ridgeline check"),
        Left(len(pieces) - len(made), len(pieces), "compilations for a GPU", "ridgeline inspect OP --arch ARCH"),
    ]
    return Proofs(checks, tables(pieces, made), [item for item in left if item.count > 0])


def tables(pieces: list[Any], made: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Returns per op {"op", "rows", "not_built", "spills", "left": how many were not compiled, by architecture}."""
    from ridgeline.device import ARCHES

    found: dict[str, dict[str, Any]] = {}
    ops: dict[str, Op] = {}
    for op, _, arch in pieces:
        ops[op.name] = op
        table = found.setdefault(op.name, {"op": op.name, "rows": [], "not_built": [], "left": {}})
        table["left"][arch] = table["left"].get(arch, 0) + 1
    for name, impl, arch, rows, reason in made:
        table = found[name]
        place = {"impl": impl, "group": ops[name].implementations[impl].kind, "arch": arch}
        table["left"][arch] -= 1
        table["not_built"] += [place | {"reason": reason}] if reason else []
        for row in rows:
            if place | row not in table["rows"]:
                table["rows"].append(place | row)
    arches = list(ARCHES)
    for name, table in found.items():
        rungs = list(ops[name].implementations)
        table["rows"].sort(
            key=lambda r: (rungs.index(r["impl"]), r["direction"] != "forward", r["kernel"], arches.index(r["arch"]))
        )
        table["not_built"].sort(key=lambda r: (rungs.index(r["impl"]), arches.index(r["arch"])))
        table["left"] = {arch: count for arch, count in table["left"].items() if count}
        table["spills"] = sum(row["spilled"] for row in table["rows"])
    return list(found.values())
