"""What nvidia-smi's utilisation says of a load, beside the multiprocessors at work, their occupancy and the rate.

Utilisation is the share of time in which any kernel ran. A kernel of one thread makes it 100%. So three loads are
shown: one thread, a kernel that memory limits, and a product.
"""

from __future__ import annotations

import csv
import io
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.lab.measurement import nsight
from ridgeline.lab.measurement.clock import answer, nvidia_smi

Row = dict[str, Any]
SECONDS = 1.2  # of load before nvidia-smi is asked; it looks back for up to a second
WORKING = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
ASKED = ("utilization.gpu", "utilization.memory", "clocks.sm", "power.draw")


@dataclass(frozen=True)
class Load:
    """Work for the GPU: a name, a function that enqueues it once, and what it moves or computes. unit: of `amount`."""

    name: str
    run: Callable[[], Any]
    amount: float
    unit: str


def loads() -> list[Load]:
    """The three loads, on the current GPU."""
    import torch

    source = torch.ones(1 << 28, device="cuda")
    target, a = torch.empty_like(source), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    return [
        Load("one thread that waits", lambda: torch.cuda._sleep(2_000_000), 0, ""),
        Load("negation of 1 GiB", lambda: torch.neg(source, out=target), 2 * source.nbytes, "B/s"),
        Load("bf16 product of 8192", lambda: torch.mm(a, a, out=product), 2 * 8192**3, "FLOP/s"),
    ]


def shown() -> list[Row]:
    """A row for each load: what nvidia-smi says while it runs, its rate, and ncu's figures where ncu is installed.

    It takes about two seconds a load, and ten more with ncu.
    """
    rows = [_watched(load) for load in loads()]
    counted = counters()
    if len(counted) == len(rows):  # each load starts one kernel
        for row, figures in zip(rows, counted, strict=True):
            row.update(figures)
    return rows


def _watched(load: Load) -> Row:
    """Runs a load until nvidia-smi has answered."""
    import torch

    load.run()
    torch.cuda.synchronize()
    begun, calls, query = time.perf_counter(), 0, None
    last: list[Any] = []
    while query is None or query.poll() is None:
        load.run()
        calls += 1
        event = torch.cuda.Event()
        event.record()
        last.append(event)
        if len(last) > 8:  # some calls ahead of the GPU, so that it never waits
            last.pop(0).synchronize()
        if query is None and time.perf_counter() - begun > SECONDS:
            query = nvidia_smi(*ASKED)
            if query is None:
                break
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    told = dict(zip(ASKED, answer(query), strict=False))
    rate = load.amount * calls / seconds if load.amount else None
    return {"load": load.name, "rate": rate, "unit": load.unit, **{name: told.get(name) for name in ASKED}}


def counters() -> list[Row]:
    """The share of multiprocessors at work and their occupancy for each load, by ncu; empty where ncu cannot tell."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ridgeline.lab.analysis.utilisation"]
        outcome = nsight.metrics(command, Path(folder), [WORKING, OCCUPANCY])
    return parse_counters(outcome.said) if outcome.ok else []


def parse_counters(table: str) -> list[Row]:
    """The figures of each kernel in ncu's table, in its order, as shares."""
    lines = table.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [*csv.DictReader(io.StringIO("\n".join(lines[start:])))]
    found = []
    for row in rows:
        if row.get("ID", "").isdigit():  # the first row holds the units
            figures = {"working": row.get(WORKING), "occupancy": row.get(OCCUPANCY)}
            found.append({name: float(text.replace(",", "")) / 100 for name, text in figures.items() if text})
    return found


def main() -> None:
    """Runs each load once, for ncu."""
    import torch

    made = loads()
    for load in made:
        load.run()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        for load in made:
            load.run()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
