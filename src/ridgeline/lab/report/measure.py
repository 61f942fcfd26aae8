"""What `report` measures by itself: checks and times through the lab's own verbs, and what the compilers say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING, Any

from ridgeline.lab import units
from ridgeline.lab.verdict import Row

if TYPE_CHECKING:
    from ridgeline.op import Implementation, Op

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
        return bench.record(
            list(registry().values()), default_device(None), quick=quick, box=30 if quick else 90, report=report
        ).rows


def interpreted(seconds: float) -> tuple[list[Row], str]:
    """Triton's kernels checked in Triton's interpreter, in a process of its own: (check rows, how much the time box left out).

    Raises RidgelineError where that process breaks.
    """
    from ridgeline.op import RidgelineError

    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "ridgeline.lab.report.interpreter", str(seconds)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, text=True, timeout=seconds + 240
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or not rows:
        raise RidgelineError(
            f"checking in Triton's interpreter broke off with exit code {done.returncode}; its words are above"
        )
    left = rows.pop()["left"]
    return (
        rows,
        f"{left} more did not fit into the time box; `TRITON_INTERPRET=1 ridgeline check` goes through all."
        if left
        else "",
    )


def kernels(ops: Iterable[str], until: float, report: Callable[[str], None]) -> tuple[list[dict[str, Any]], list[str]]:
    """Every op's kernels compiled for every known GPU: (a table per op, a note on what was left out).

    until: the `time.monotonic()` after which no further kernel is compiled. What is quickest to compile and most looked at comes first:
    CUDA C++ for Hopper, whose figures are recorded, each ladder's last rung before any ladder's last but one.
    """
    from ridgeline.op import get

    known = [get(name) for name in ops]
    tables: dict[str, dict[str, Any]] = {
        op.name: {"op": op.name, "rows": [], "not_built": [], "left": 0} for op in known
    }
    pieces = _order(known)
    for op, implementation, arch in pieces:
        table, place = tables[op.name], {"impl": implementation.name, "group": implementation.kind, "arch": arch}
        if time.monotonic() > until:
            table["left"] += 1
            continue
        report(f"compiling {op.name} {implementation.name} for {arch}")
        rows, reason = _built(op, implementation, arch)
        table["not_built"] += [place | {"reason": reason}] if reason else []
        for row in rows:
            if place | row not in table["rows"]:
                table["rows"].append(place | row)
    for op in known:
        rungs, table = list(op.implementations), tables[op.name]
        table["rows"].sort(
            key=lambda r: (rungs.index(r["impl"]), r["direction"] != "forward", r["kernel"], ARCHES.index(r["arch"]))
        )
        table["not_built"].sort(key=lambda r: (rungs.index(r["impl"]), ARCHES.index(r["arch"])))
        table["spills"] = sum(row["spilled"] for row in table["rows"])
    left = sum(table["left"] for table in tables.values())
    note = f"The time box left no time to compile {left} of {len(pieces)}, each a rung for a GPU; `ridgeline inspect` compiles any."
    return list(tables.values()), [note] if left else []


def _order(ops: list[Op]) -> list[tuple[Op, Implementation, str]]:
    """Every rung in kernels for every known GPU, in the order in which they are compiled."""

    def place(piece: tuple[Op, Implementation, str]) -> tuple[bool, bool, int]:
        op, rung, arch = piece
        alike = [r for r in op.implementations.values() if r.kind == rung.kind]
        return arch != "sm_90", rung.kind != "cuda", len(alike) - alike.index(rung)

    rungs = [(op, rung) for op in ops for rung in op.implementations.values() if rung.is_kernel]
    return sorted([(*rung, arch) for rung, arch in product(rungs, ARCHES)], key=place)


def _built(op: Op, implementation: Implementation, arch: str) -> tuple[list[dict[str, Any]], str]:
    """What the kernels of a rung take in the op's first case that it runs; where it runs none, why not the first."""
    from ridgeline.lab import inspect
    from ridgeline.op import RidgelineError

    first, _ = inspect.default_case(op, None, None)
    reason = ""
    for case in (first, *(c for c in op.cases if c is not first)):
        dtype = min(case.dtypes, key=lambda d: (d not in implementation.dtypes, d != "bfloat16"))
        try:
            found = inspect.resources(op, implementation, case, dtype, arch)
        except RidgelineError as error:
            reason = reason or str(error).split("cannot run this call: ")[-1]
        else:
            return [_resources(r) | {"case": case.name, "dtype": dtype} for r in found], ""
    return [], reason


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
