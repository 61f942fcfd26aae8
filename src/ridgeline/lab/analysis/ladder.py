"""Show what each implementation of an op gained over the one before."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.measurement import results, store
from ridgeline.lab.measurement.compare import machine, title
from ridgeline.lab.measurement.query import key, of
from ridgeline.lab.tables import CACHED, console, figure, table, timing

Row = dict[str, Any]


def ladder(rows: list[Row], op: str) -> dict[tuple[str, str, str, str], list[Row]]:
    """The op's rows per op, case, dtype and direction, each with its `gain` over the timed implementation before.

    The order is the registry's, or the rows' order if the op no longer exists; peers from other packages are left out.
    The gain is None for the first, and where one run did not time both. `counted` is the counter's row, or None.
    """
    from ridgeline.op import get, op_modules

    order = list(get(op).implementations) if op in op_modules() else []
    climbed: dict[tuple[str, str, str, str], list[Row]] = {}
    read = {(*key(row), row["impl"]): row for row in rows if row["type"] == "counter" and row["status"] == "ok"}
    of_op = [row for row in rows if row["type"] in ("bench", "older") and row["op"] == op]
    for row in sorted(of_op, key=lambda row: order.index(row["impl"]) if row["impl"] in order else len(order)):
        if row["peer"] and row["impl"] not in ("torch", "compile"):
            continue
        steps = climbed.setdefault(key(row), [])
        below = [step for step in steps if step["status"] == "ok"][-1:]
        timed = row["status"] == "ok" and [step["run"] for step in below] == [row["run"]]
        gain = below[0]["seconds"]["median"] / row["seconds"]["median"] if timed else None
        steps.append(row | {"gain": gain, "counted": read.get((*key(row), row["impl"]))})
    return climbed


def newest(op: str, here: str, gpu: str | None = None) -> list[Row]:
    """Rows that timed an op, from the first place that has any.

    The places: the newest cached run on this machine's GPU (`here`), the recorded GPUs, this one first, and the newest
    cached run on any machine. gpu: a recorded GPU, such as "h100"; then only its rows count.

    Raises RidgelineError if nothing timed the op.
    """
    from ridgeline.op import RidgelineError

    mine = None if gpu or here == "cpu" else store.latest(here, op)
    if mine:
        return store.load(mine)
    recorded = {path.stem: rows for path, rows in results.gpus(store.recorded()).items()}
    if gpu and gpu not in recorded:
        raise RidgelineError(f"{gpu!r} is not a recorded GPU; the recorded ones: {', '.join(recorded) or 'none'}")
    for name in sorted(recorded, key=lambda name: name != here):
        rows = recorded[name]
        if gpu in (None, name) and any(row["op"] == op for row in of(rows, "bench")):
            return rows
    path = None if gpu else store.latest(None, op)
    if path is None:
        raise RidgelineError(
            f"no run{f' recorded on {gpu}' if gpu else ''} has timed {op}; `ridgeline bench {op}` times it"
        )
    return store.load(path)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument(
        "--run",
        help="a run: its file, its name or how its name starts (default: the newest one on this GPU that timed the op)",
    )
    parser.add_argument("--gpu", help="a recorded GPU, such as h100 (default: one of them, if this machine has none)")
    parser.add_argument("--case", help="one case only")
    parser.add_argument("--dtype", help="one dtype only")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(options: argparse.Namespace) -> int:
    from ridgeline.lab.measurement.machine import default_device, facts
    from ridgeline.op import RidgelineError, get

    op = get(options.op)
    if options.run and options.gpu:
        raise RidgelineError("--run names one run and --gpu a recorded GPU: give only one of them")
    here = store.slug(facts(default_device(None))["gpu"])
    rows = store.load(store.find(options.run)) if options.run else newest(op.name, here, options.gpu)
    wanted = {"case": options.case, "dtype": options.dtype}
    found = [
        step
        | (
            {"idea": rung.idea, "must": rung.gain}
            if (rung := op.implementations.get(step["impl"]))
            else {"idea": "", "must": 0}
        )
        for steps in ladder(rows, op.name).values()
        for step in steps
        if all(value in (None, step[name]) for name, value in wanted.items())
    ]
    if not found:
        chosen = " ".join(value for value in wanted.values() if value)
        raise RidgelineError(f"{title(rows)} has no times of {op.name}{' in ' + chosen if chosen else ''}")
    if options.json:
        print(json.dumps(found))
    else:
        show(found, rows)
    return 0


def source(rows: list[Row]) -> str:
    """The runs that rows come from: "run 20261123-045822-c1d9ede", or "runs A, B"."""
    runs = sorted({row["run"] for row in rows})
    return f"run{'s' * (len(runs) > 1)} {', '.join(runs)}"


def counted(row: Row) -> str:
    """A counter, its value, and that of the rung before: "smsp__inst_executed.sum 1.23 M inst, before 4.56 M"."""

    def short(value: float) -> str:
        return (units.scaled(value, "") if abs(value) >= 1e3 else units.digits(value)).strip()

    before = f", before {short(row['before'])}" if "before" in row else ""
    return f"{row['counter']} {short(row['value'])} {row['unit']}".strip() + before


def show(found: list[Row], rows: list[Row]) -> None:
    """Prints a table per case, dtype and direction; an implementation that was not timed shows why."""
    from rich.text import Text

    out = console()
    out.print(f"{source(found)} on {machine(rows)}", style="dim", markup=False)
    for work in dict.fromkeys(key(row) for row in found):
        made = table(" ".join(work), ["rung", "idea"], ["time", "gain", "predicted", "of roof"])
        for row in found:
            if key(row) != work:
                continue
            name = Text(row["impl"])
            if row["status"] == "ok":
                gain = figure(row["gain"], units.times)
                idea = f"{row['idea']} [{counted(row['counted'])}]" if row["counted"] else row["idea"]
                idea += " (of an older run)" if row["type"] == "older" else ""
                must = figure(row["must"] or None, units.times)
                made.add_row(name, Text(idea), timing(row["seconds"]), gain, must, units.share(row))
            else:
                made.add_row(name, Text(f"{row['status']}: {row['reason']}"), *[units.DASH] * 4, style="dim")
        out.print(made)
    for row in rows:
        if row["type"] == "counter" and row["status"] == "failed":
            out.print(f"counters: {row['reason']}", style="red", markup=False)
    if any(row["status"] == "ok" and row.get("cached") for row in found):
        out.print(CACHED, style="dim")
