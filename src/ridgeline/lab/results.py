"""What is recorded of each GPU: the newest rows of every piece of work, from as many runs as it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.lab import store, verdict

Row = dict[str, Any]
Work = tuple[str, str, str, str]
GPU = "h100"  # whose figures come first


def newest(folder: Path) -> list[Row]:
    """The rows of the newest recorded run of a GPU, and of older ones for the work that it did not time: of benchmarks that still are,
    without those of a grid. Empty where no run is recorded.

    Two kinds of older rows are for ladders alone, since times of two runs are not compared: those of rungs that the newest run of a
    piece of work left out, of the type "older", and each rung's newest counter, if it is the one that the rung still names.
    """
    from ridgeline.op import registry  # imports torch

    rows: list[Row] = []
    ops = registry()
    rungs = {(op.name, rung.name): rung for op in ops.values() for rung in op.implementations.values()}
    cases = {(op.name, case.name) for op in ops.values() for case in op.cases if case.use == "bench"}
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        run = store.load(path)
        if "--grid" in verdict.one(run, "run")["command"].split():
            continue
        known = [row for row in run if row["type"] != "bench" or (row["op"], row["case"]) in cases]
        if not rows:
            rows += known
            continue
        timed = {verdict.key(row) for row in verdict.of(rows, "bench")}
        told = {
            (row["type"] == "counter", *verdict.key(row), row["impl"])
            for row in rows
            if "impl" in row and "direction" in row
        }
        for row in known:
            counter = row["type"] == "counter"
            if row["type"] == "bench" and verdict.key(row) not in timed:
                rows.append(row)
            elif (
                (row["type"] == "bench" or counter)
                and row["status"] == "ok"
                and (counter, *verdict.key(row), row["impl"]) not in told
            ):
                rung = rungs.get((row["op"], row["impl"]))
                if rung and (not counter or rung.counter == row["counter"]):
                    rows.append(row | {"type": "counter" if counter else "older"})
    return rows


def gpus(results: Path) -> dict[Path, list[Row]]:
    """The newest rows of every GPU on which anything was timed, by its folder, `GPU` first."""
    folders = sorted(results.glob("*/"), key=lambda folder: (folder.name != GPU, folder.name))
    found = {folder: newest(folder) for folder in folders if folder.name != "cpu"}
    return {folder: rows for folder, rows in found.items() if works(rows)}


def works(rows: list[Row]) -> dict[Work, list[Row]]:
    """The timed rungs of each piece of work, fastest first."""
    found: dict[Work, list[Row]] = {}
    for row in verdict.of(rows, "bench"):
        if row["status"] == "ok":
            found.setdefault(verdict.key(row), []).append(row)
    return {work: sorted(rungs, key=lambda r: r["seconds"]["median"]) for work, rungs in found.items()}
