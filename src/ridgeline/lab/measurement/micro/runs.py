"""A run of some microbenchmarks on this GPU, and its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from ridgeline.lab.measurement.micro.bench import Card, Micro
from ridgeline.lab.measurement.micro.parts import SCHEMA, micros
from ridgeline.lab.measurement.store import commit

Row = dict[str, Any]


def run(
    card: Card,
    parts: Sequence[str],
    report: Callable[[str, int, int], None],
    machine: Row,
    at: tuple[str, bool] | None = None,
) -> Row:
    """Runs some parts (all, if none is named) on a card, and returns the record of the run.

    report: called with what runs next, how many microbenchmarks are done, and of how many. machine: `machine.facts`.
    at: the commit, and whether the source tree differs from it, where there is no git.
    """
    wanted = micros(parts)
    digits, dirty = at or commit()
    about: dict[str, Row] = {}
    rows: list[Row] = []
    for n, micro in enumerate(wanted):
        report(f"{micro.part}: {micro.name}", n, len(wanted))
        begin = time.monotonic()
        if micro.part not in about:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            about[micro.part] = {"time": now, "commit": digits, "dirty": dirty, "mhz": card.tick(), "seconds": 0.0}
        rows += measured(card, micro)
        about[micro.part]["seconds"] = round(about[micro.part]["seconds"] + time.monotonic() - begin, 2)
    return {
        "schema": SCHEMA,
        "gpu": machine["gpu"],
        "machine": machine,
        "multiprocessors": card.multiprocessors,
        "parts": about,
        "rows": rows,
    }


def measured(card: Card, micro: Micro) -> Iterator[Row]:
    """The rows of one microbenchmark; one with a reason, if it cannot run on this card or fails."""
    from ridgeline.cuda import CudaError

    place = {"part": micro.part, "name": micro.name}
    if reason := micro.refuses(card.gpu.capability):
        yield place | {"at": "", "reason": reason}
        return
    try:
        for at, figures in micro.measure(card):
            yield place | {"at": at, "figures": figures}
    except CudaError as error:  # one failure becomes one row, and the others are measured
        yield place | {"at": "", "reason": str(error).splitlines()[0]}
