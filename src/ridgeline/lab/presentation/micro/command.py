"""The verb `micro`: measures this GPU or finds a record, then prints, writes and keeps it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ridgeline.lab.analysis import roofline
from ridgeline.lab.measurement import store
from ridgeline.lab.measurement.micro import kept, parts
from ridgeline.lab.presentation.micro import pictures, tables

Row = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    if options.json in parts.PARTS:  # argparse takes a part that follows --json for a file
        options.parts, options.json = [*options.parts, options.json], "-"
    parts.micros(options.parts)  # a wrong part is an error now
    if options.json not in (None, "-"):
        probe = Path(options.json).with_name(".writable")  # and a folder that cannot be written
        roofline.write(probe, b"")
        probe.unlink()
    record, note = _record(options)
    if options.parts:
        record = _only(record, options.parts)
    if options.json not in (None, "-"):
        roofline.write(Path(options.json), kept.text(record).encode())
    if options.record:
        path = kept.keep(record, kept.recorded())
        note = f"{note} Recorded in {path}.".strip()
    if options.json == "-":
        print(kept.text(record), end="")
    else:
        tables.show(record, note)
    for path in pictures.write(record, options.out) if options.out else ():
        print(path)
    return 0


def _record(options: argparse.Namespace) -> tuple[Row, str]:
    """A record, measured now or before, and a sentence that says when and where if it was before."""
    import torch

    from ridgeline.op import RidgelineError

    if options.run:
        record = kept.load(options.run)
        return record, f"Measured on {when(record)}."
    if options.device not in (None, "cuda"):
        if options.record:
            raise RidgelineError(
                "--record keeps what is measured now or read by --run; --device shows what is recorded"
            )
        record = _recorded(options.device)
        return record, f"Recorded, not measured now: {when(record)}."
    if torch.cuda.is_available():
        return _measured(options), ""
    if options.record or options.device:
        raise RidgelineError("micro measures a GPU, and PyTorch finds none on this machine")
    found = kept.every()
    if not found:
        raise RidgelineError(
            "micro measures a GPU, and PyTorch finds none on this machine; no run of a card is recorded"
        )
    record = next(iter(found.values()))
    others = f" Others: --device {', '.join([*found][1:])}." if len(found) > 1 else ""
    return record, f"There is no GPU here; these figures are recorded: {when(record)}.{others}"


def when(record: Row) -> str:
    """A record's card, day and commits: "an NVIDIA H200 on 2026-11-26, commit 1234567"."""
    days = sorted({about["time"][:10] for about in record["parts"].values()})
    commits = sorted(
        {about["commit"] + (" with changes" if about["dirty"] else "") for about in record["parts"].values()}
    )
    return f"one {record['gpu']} on {', '.join(days) or 'no day'}, commit {', '.join(commits) or 'unknown'}"


def _recorded(card: str) -> Row:
    from ridgeline.op import RidgelineError

    found = kept.every()
    if card.lower() in found:
        return found[card.lower()]
    has = f"the recorded cards are {', '.join(found)}" if found else "no card is recorded yet"
    raise RidgelineError(f"micro has no recorded run of {card!r}; {has}, and `cuda` is this machine's GPU")


def _only(record: Row, wanted: list[str]) -> Row:
    """A record with some of its parts. Raises RidgelineError if it has none of them."""
    from ridgeline.op import RidgelineError

    about = {part: said for part, said in record["parts"].items() if part in wanted}
    if not about:
        has = ", ".join(record["parts"]) or "nothing"
        raise RidgelineError(f"this run of {record['gpu']} did not measure {', '.join(wanted)}; it measured {has}")
    return record | {"parts": about, "rows": [row for row in record["rows"] if row["part"] in wanted]}


def _measured(options: argparse.Namespace) -> Row:
    import torch

    from ridgeline import cuda
    from ridgeline.lab.measurement.machine import facts
    from ridgeline.lab.measurement.micro import runs
    from ridgeline.lab.measurement.micro.bench import Card
    from ridgeline.lab.tables import progress
    from ridgeline.op import RidgelineError

    if torch.version.hip:
        raise RidgelineError("micro measures NVIDIA GPUs: its kernels are CUDA C++")
    if reason := cuda.unavailable():
        raise RidgelineError(reason)
    at = (store.short_commit(options.commit), True) if options.commit else None
    machine = facts("cuda")
    with progress() as report:
        record = runs.run(Card(), options.parts, report, machine, at)
    kept.keep(record, kept.cached())
    return record
