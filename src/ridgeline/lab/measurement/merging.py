"""Merges runs that were made elsewhere into the recorded rows, and says what a merge replaced."""

from __future__ import annotations

import argparse
from typing import Any

from ridgeline.lab.measurement import results, store
from ridgeline.lab.measurement.compare import compare, listing

Row = dict[str, Any]


def merge_files(options: argparse.Namespace) -> int:
    """Merges runs that were made elsewhere, each in one step, and prints what each replaces."""
    from ridgeline.op import RidgelineError

    if options.ops or options.record:
        raise RidgelineError("--merge measures nothing: it takes neither ops nor --record")
    runs = [store.load(store.find(run)) for run in options.merge]
    for rows in runs:
        results.file_of(rows)  # a run that cannot be recorded is an error before any is merged
    for rows in runs:
        tell(results.merge(rows, options.commit))
    return 0


def tell(merge: results.Merge) -> None:
    """Prints to stderr what a merge replaced, and each new time that lies outside the old one's interval."""
    from rich.console import Console

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
