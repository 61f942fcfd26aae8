"""Describe this machine: hardware, software, what can run, measured bandwidth and FLOP/s."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KINDS = {"eager": "plain PyTorch", "compile": "torch.compile", "cuda": "CUDA C++", "triton": "Triton", "gluon": "Gluon"}
# Bandwidths by the share of writes in the bytes moved. Runs before 2026-11-22 have no "spread".
SEGMENTS = ((0.0, "read"), (1 / 3, "add"), (1 / 2, "copy"), (4 / 5, "spread"), (1.0, "write"))


@cache
def facts(device: str) -> Row:
    """The machine as run rows hold it; device: "cpu" or "cuda"."""
    import torch
    import triton

    from ridgeline import device as devices
    from ridgeline.lab.clock import answer, nvidia_smi

    gpu = device.startswith("cuda")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gpu:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {
        "gpu": devices.here().name if gpu else None,
        "arch": devices.here().arch if gpu else "cpu",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "driver": next(iter(answer(nvidia_smi("driver_version"))), None) if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "os": platform.platform(terse=True),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def what_runs(device: str) -> dict[str, str | None]:
    """Per kind of implementation: None where it runs on this device, else the reason why not."""
    from ridgeline import device as devices
    from ridgeline.select import cannot_run

    target = devices.here() if device.startswith("cuda") else devices.CPU
    return {kind: cannot_run(kind, target) for kind in KINDS}


def measure_roof(device: str, quick: bool = False, report: Callable[[str], None] = lambda text: None) -> Row:
    """The fields of a roof row, measured now (see `lab/roof.py`)."""
    from ridgeline.lab import roof

    return roof.measure_roof(device, quick, report)


def bandwidth(roof: Row, read: float, write: float, end: str = "median") -> float:
    """The roof in bytes/s for a mix of bytes read and written: seconds per byte drawn straight between the measured mixes.

    end: "median", or "low" or "high" of the measured intervals.
    """
    share = write / (read + write)
    for (left, before), (right, after) in pairwise([(at, name) for at, name in SEGMENTS if name in roof]):
        if share <= right:
            part = (share - left) / (right - left)
            return 1 / ((1 - part) / roof[before][end] + part / roof[after][end])
    raise ValueError(f"bytes read and written must not be negative, and are {read} and {write}")


def roof_seconds(roof: Row, dtype: str, read: int, write: int, flops: int, end: str = "median") -> tuple[float, str]:
    """The least time for that work on a measured roof, and what bounds it: "memory" or "compute".

    The matrix rate is the dtype's or float32's, whichever is more: nothing keeps an op from computing in float32.
    """
    rates = [roof["matmul"][d][end] for d in (dtype, "float32") if d in roof["matmul"]]
    compute = flops / max(rates) if rates else 0.0
    memory = (read + write) / bandwidth(roof, read, write, end) if read + write else 0.0
    return max((memory, "memory"), (compute, "compute"))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda; the GPU where there is one by default")
    parser.add_argument("--quick", action="store_true", help="measure the roof in a third of the time")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(options: argparse.Namespace) -> int:
    from rich.console import Console

    from ridgeline.lab.check import default_device

    device = default_device(options.device)
    machine, runs = facts(device), what_runs(device)
    with Console(stderr=True).status("") as status:
        roof = measure_roof(device, options.quick, lambda text: status.update(f"measuring: {text}"))
    if options.json:
        print(json.dumps({"machine": machine, "runs": runs, "roof": roof}))
    else:
        show(machine, runs, roof)
    return 0


def show(machine: Row, runs: dict[str, str | None], roof: Row) -> None:
    from rich.table import Table
    from rich.text import Text

    from ridgeline.lab import units
    from ridgeline.lab.tables import console, table

    out = console()
    about = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        text = units.size(value) if name == "memory_bytes" else str(value or units.DASH)
        about.add_row(Text(name.removesuffix("_bytes"), style="dim"), Text(text))
    out.print(about)
    out.print()
    can = Table.grid(padding=(0, 2))
    for kind, reason in runs.items():
        can.add_row(KINDS[kind], Text("runs", style="green") if reason is None else Text(reason, style="yellow"))
    out.print(can)
    made = table(None, ["roof"], ["measured", "interval", "at"])
    for share, name in SEGMENTS:
        if name in roof:
            made.add_row(
                name, units.scaled(roof[name]["median"], "B/s"), units.spread(roof[name]), f"{share:.0%} writes"
            )
    for dtype, figure in roof["matmul"].items():
        shape = "x".join(map(str, figure["shape"]))
        dtype += f", twice {figure['twice']}" if "twice" in figure else ""
        made.add_row(f"matrix product, {dtype}", units.scaled(figure["median"], "FLOP/s"), units.spread(figure), shape)
    made.add_row("an empty kernel", units.seconds(roof["launch_us"] * 1e-6))
    out.print(made)
