"""Show what each implementation of an op gained over the one before."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ridgeline.lab import results, store, units
from ridgeline.lab.compare import machine
from ridgeline.lab.tables import CACHED, console, figure, table, timing
from ridgeline.lab.verdict import key, of

Row = dict[str, Any]


def ladder(rows: list[Row], op: str) -> dict[tuple[str, str, str, str], list[Row]]:
    """Per op, case, dtype and direction: the rows of the op, each with its `gain` over the timed rung before, if one run timed both.

    In the registry's order, or of an op that is no more in the rows' order; peers from other packages are left out. The first timed rung
    has no gain. Where a rung's counter was read, `counted` is that row.
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
    """What was timed of an op: by the newest run on this machine's GPU (`here`), else what is recorded of a GPU, else by the newest run on
    any machine. gpu: what is recorded of that one, by its folder's name."""
    from ridgeline.op import RidgelineError

    mine = None if gpu or here == "cpu" else store.latest(here, op)
    if mine:
        return store.load(mine)
    recorded = {folder.name: rows for folder, rows in results.gpus(store.recorded()).items()}
    if gpu and gpu not in recorded:
        raise RidgelineError(
            f"nothing is recorded of {gpu!r}; of these GPUs something is: {', '.join(recorded) or 'none'}"
        )
    for name, rows in recorded.items():
        if gpu in (None, name) and any(row["op"] == op for row in of(rows, "bench")):
            return rows
    path = None if gpu else store.latest(None, op)
    if path is None:
        raise RidgelineError(
            f"no recorded run{f' on {gpu}' if gpu else ''} has timed {op}; ridgeline bench {op} makes one"
        )
    return store.load(path)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument(
        "--run",
        help="a run: its file, its name, or how its name starts; this GPU's newest that timed the op by default",
    )
    parser.add_argument(
        "--gpu", help="all that is recorded of a GPU, such as h100: the default where there is none here"
    )
    parser.add_argument("--case", help="one case only")
    parser.add_argument("--dtype", help="one dtype only")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(options: argparse.Namespace) -> int:
    from ridgeline.lab.check import default_device
    from ridgeline.lab.machine import facts
    from ridgeline.op import RidgelineError, get

    op = get(options.op)
    if options.run and options.gpu:
        raise RidgelineError("--run is one run, --gpu all that is recorded of a GPU: give one of them")
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
        where = source(rows) if options.run else f"what is recorded of {machine(rows)}"
        raise RidgelineError(f"{where} has no times of {op.name}{' in ' + chosen if chosen else ''}")
    if options.json:
        print(json.dumps(found))
    else:
        show(found, rows)
    return 0


def source(rows: list[Row]) -> str:
    """Which runs rows are of: "run 20261123-045822-c1d9ede", or "runs A, B"."""
    runs = sorted({row["run"] for row in rows})
    return f"run{'s' * (len(runs) > 1)} {', '.join(runs)}"


def counted(row: Row) -> str:
    """A counter, its value, and that of the rung before: "smsp__inst_executed.sum 1.23 M inst, before 4.56 M"."""

    def short(value: float) -> str:
        return (units.scaled(value, "") if abs(value) >= 1e3 else units.digits(value)).strip()

    before = f", before {short(row['before'])}" if "before" in row else ""
    return f"{row['counter']} {short(row['value'])} {row['unit']}".strip() + before


def show(found: list[Row], rows: list[Row]) -> None:
    """A table per case, dtype and direction; a rung that was not timed shows why."""
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
