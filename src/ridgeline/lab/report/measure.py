"""What `report` measures by itself: checks and times through the lab's own verbs, and what the compilers say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.verdict import Row

ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")


def say(text: str) -> None:
    """One line of progress in a terminal, over the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def bench(quick: bool) -> list[Row]:
    """This machine's roof, and every op checked and timed on it, as the verb `bench` does; the run is kept in the cache."""
    from ridgeline.lab import bench
    from ridgeline.lab.check import default_device
    from ridgeline.op import registry

    with bench.progress() as report:
        return bench.record(list(registry().values()), default_device(None), quick=quick, box=30 if quick else 90, report=report).rows


def interpreted(seconds: float) -> tuple[list[Row], str]:
    """Triton's kernels checked in Triton's interpreter, in a process of its own: (check rows, how much the time box left out).

    Raises RidgelineError where that process breaks.
    """
    from ridgeline.op import RidgelineError

    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "ridgeline.lab.report.interpreter", str(seconds)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True, timeout=seconds + 240)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or not rows:
        raise RidgelineError(f"checking in Triton's interpreter broke off with exit code {done.returncode}; its words are above")
    left = rows.pop()["left"]
    return rows, f"{left} more did not fit into the time box; `TRITON_INTERPRET=1 ridgeline check` goes through all." if left else ""


def kernels(ops: Iterable[str], until: float, report: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[str]]:
    """Every op's kernels compiled for every known GPU: (a table per op, notes on what was left out).

    until: the `time.monotonic()` after which no further kernel is compiled.
    """
    from ridgeline.lab import inspect
    from ridgeline.op import RidgelineError, get

    tables, left_out = [], []
    for op in map(get, ops):
        case, dtype = inspect.default_case(op, None, None)
        table: dict[str, Any] = {"op": op.name, "case": case.name, "dtype": dtype, "rows": [], "not_built": []}
        for implementation in (i for i in op.implementations.values() if i.is_kernel):
            for arch in ARCHES:
                place = {"impl": implementation.name, "group": implementation.kind, "arch": arch}
                if time.monotonic() > until:
                    left_out.append(f"{op.name} {implementation.name} for {arch}")
                    continue
                report(f"compiling {op.name} {implementation.name} for {arch}")
                try:
                    found = inspect.resources(op, implementation, case, dtype, arch)
                except RidgelineError as error:
                    table["not_built"].append(place | {"reason": str(error).split("cannot run this call: ")[-1]})
                    continue
                rows = [place | _resources(r) for r in found]
                table["rows"] += [row for i, row in enumerate(rows) if row not in rows[:i]]
        order = list(op.implementations)
        table["rows"].sort(key=lambda row: (order.index(row["impl"]), row["direction"] != "forward", row["kernel"]))
        table["spills"] = sum(row["spilled"] for row in table["rows"])
        tables.append(table)
    notes = [f"The time box left no time to compile {', '.join(left_out)}; `ridgeline inspect` does it."] if left_out else []
    return tables, notes


def _resources(r: Any) -> dict[str, Any]:
    def counts(by_name: dict[str, int]) -> str:
        return ", ".join(f"{n} x {name}" for name, n in by_name.items()) or units.DASH

    return {
        "kernel": r.kernel,
        "direction": r.direction,
        "registers": r.registers,
        "spilled": r.spill_stores + r.spill_loads > 0,
        "spills": f"{r.spill_stores} B out, {r.spill_loads} B in" if r.spill_stores + r.spill_loads else "none",
        "shared": units.size(r.shared) if r.shared else "none",
        "loads": counts(r.loads),
        "stores": counts(r.stores),
        "matrix": counts(r.matrix),
        "occupancy": f"{units.percent(r.occupancy)}{f' ({r.limit})' if r.limit else ''}",
    }
