"""An op's rungs in order, with what each gained over the one before."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ridgeline.lab import store, units
from ridgeline.lab.compare import machine
from ridgeline.lab.tables import CACHED, console, figure, table, timing
from ridgeline.lab.verdict import key

Row = dict[str, Any]


def ladder(rows: list[Row], op: str) -> dict[tuple[str, str, str, str], list[Row]]:
    """Per op, case, dtype and direction: a run's rows of the op, each with its `gain` over the timed rung before.

    In the order of the rows, which is the ladder's; peers from other packages are left out. The first timed rung has no gain. Where the
    run read a rung's counter, `counted` is that row.
    """
    climbed: dict[tuple[str, str, str, str], list[Row]] = {}
    read = {(*key(row), row["impl"]): row for row in rows if row["type"] == "counter" and row["status"] == "ok"}
    for row in rows:
        if row["type"] != "bench" or row["op"] != op or (row["peer"] and row["impl"] not in ("torch", "compile")):
            continue
        steps = climbed.setdefault(key(row), [])
        timed = [step for step in steps if step["status"] == "ok"]
        gain = timed[-1]["seconds"]["median"] / row["seconds"]["median"] if timed and row["status"] == "ok" else None
        steps.append(row | {"gain": gain, "counted": read.get((*key(row), row["impl"]))})
    return climbed


def newest(op: str, here: str) -> list[Row]:
    """The newest run that timed the op: on this machine if there is one, else on any."""
    from ridgeline.op import RidgelineError

    path = store.latest(here, op) or store.latest(None, op)
    if path is None:
        raise RidgelineError(f"no recorded run has timed {op}; ridgeline bench {op} makes one")
    return store.load(path)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument("--run", help="a run: its file, its name, or how its name starts; the newest that timed the op by default")
    parser.add_argument("--case", help="one case only")
    parser.add_argument("--dtype", help="one dtype only")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(options: argparse.Namespace) -> int:
    from ridgeline.lab.check import default_device
    from ridgeline.lab.machine import facts
    from ridgeline.op import RidgelineError, get

    op = get(options.op)
    rows = store.load(store.find(options.run)) if options.run else newest(op.name, store.slug(facts(default_device(None))["gpu"]))
    wanted = {"case": options.case, "dtype": options.dtype}
    found = [
        step | ({"idea": rung.idea, "must": rung.gain} if (rung := op.implementations.get(step["impl"])) else {"idea": "", "must": 0})
        for steps in ladder(rows, op.name).values()
        for step in steps
        if all(value in (None, step[name]) for name, value in wanted.items())
    ]
    if not found:
        chosen = " ".join(value for value in wanted.values() if value)
        raise RidgelineError(f"run {rows[0]['run']} has not timed {op.name}{' in ' + chosen if chosen else ''}")
    if options.json:
        print(json.dumps(found))
    else:
        show(found, rows)
        if not options.run and default_device(None) == "cpu" and (others := elsewhere(op.name)):
            console().print(f"GPUs that timed it: --run {' or '.join(others)}", style="dim", markup=False)
    return 0


def elsewhere(op: str) -> list[str]:
    """The newest committed run of each GPU that timed the op, by its name and the GPU's folder: "20261122-082959-d0b7641 (h100)"."""
    folders = sorted(folder.name for folder in store.recorded().glob("*/") if folder.name != "cpu")
    return [f"{path.stem} ({folder})" for folder in folders if (path := store.latest(folder, op))]


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
    out.print(f"run {rows[0]['run']} on {machine(rows)}", style="dim", markup=False)
    for work in dict.fromkeys(key(row) for row in found):
        made = table(" ".join(work), ["rung", "idea"], ["time", "gain", "predicted", "of roof"])
        for row in found:
            if key(row) != work:
                continue
            name = Text(row["impl"])
            if row["status"] == "ok":
                gain = figure(row["gain"], units.times)
                idea = f"{row['idea']} [{counted(row['counted'])}]" if row["counted"] else row["idea"]
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
