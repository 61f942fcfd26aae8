"""The microbenchmarks by part, and a run of some parts on this GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.micro import atomics, instructions, latency, launches, memory
from ridgeline.lab.measurement.store import commit

if TYPE_CHECKING:
    from ridgeline.lab.measurement.micro.bench import Card, Micro

Row = dict[str, Any]
SCHEMA = 1
PARTS = {
    "latency": "Latency of instructions and of memory",
    "chase": "Latency of a load by working set",
    "bandwidth": "Bandwidth",
    "banks": "Bank conflicts of shared memory by stride",
    "coalescing": "Bandwidth of DRAM by stride and width",
    "occupancy": "Bandwidth of DRAM by bytes in flight (Little's law)",
    "instructions": "Throughput of instructions",
    "matrix": "Matrix instructions by shape and dtype",
    "atomics": "Atomics by different addresses and scope",
    "launches": "Launches, graphs, events",
    "streams": "Small kernels on several streams",
}


def micros(parts: Sequence[str]) -> list[Micro]:
    """The microbenchmarks of some parts (all, if none is named). Raises RidgelineError for an unknown part."""
    from ridgeline.op import RidgelineError

    if unknown := [part for part in parts if part not in PARTS]:
        raise RidgelineError(f"there is no part {unknown[0]!r} of micro; the parts are {', '.join(PARTS)}")
    every = [*latency.MICROS, *memory.MICROS, *instructions.MICROS, *atomics.MICROS, *launches.MICROS]
    return [micro for part in PARTS for micro in every if micro.part == part and (not parts or part in parts)]


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
