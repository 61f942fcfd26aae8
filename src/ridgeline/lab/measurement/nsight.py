"""Runs Nsight Systems (nsys) and Nsight Compute (ncu), or reports that they are not installed."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 600  # seconds for one run under a tool
METRICS = {
    "Duration": "time",
    "DRAM Throughput": "DRAM",
    "Memory Throughput": "memory",
    "Compute (SM) Throughput": "compute",
    "L2 Hit Rate": "L2 hits",
    "Registers Per Thread": "registers",
    "Achieved Occupancy": "occupancy",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a tool: success, a sentence, the files it wrote and, from ncu, figures per kernel."""

    name: str
    ok: bool
    said: str
    files: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def nsys(command: list[str], folder: Path) -> Outcome:
    """Records a timeline of a command between `cudaProfilerStart` and `Stop`: CUDA calls, kernels, NVTX ranges."""
    report = folder / "nsys.nsys-rep"
    between = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    flags = [
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        *between,
        "--force-overwrite=true",
        f"--output={report}",
    ]
    return _run("nsys", flags, command, report)


def ncu(command: list[str], folder: Path) -> Outcome:
    """Measures every kernel that a command starts between `cudaProfilerStart` and `Stop`, without locking clocks.

    NVTX ranges cannot select the kernels: a range belongs to one thread, and PyTorch runs backwards in another.
    """
    report = folder / "ncu.ncu-rep"
    where = ["--profile-from-start", "off", "--nvtx", "--force-overwrite", "--export", str(report)]
    outcome = _run("ncu", ["--clock-control", "none", "--set", "detailed", *where], command, report)
    if not outcome.ok:
        return outcome
    table = _table(report, "details")
    return Outcome("ncu", True, outcome.said, outcome.files, kernels(table.said)) if table.ok else table


def metrics(command: list[str], folder: Path, names: list[str]) -> Outcome:
    """Reads metrics of every kernel that a command starts between `cudaProfilerStart` and `Stop`.

    `said` of the outcome is ncu's table as CSV."""
    report = folder / "ncu.ncu-rep"
    where = ["--profile-from-start", "off", "--force-overwrite", "--export", str(report)]
    outcome = _run("ncu", ["--clock-control", "none", "--metrics", ",".join(names), *where], command, report)
    return _table(report, "raw") if outcome.ok else outcome


def _table(report: Path, page: str) -> Outcome:
    """Reads a page of ncu's report; `said` of the outcome is CSV."""
    try:
        done = subprocess.run(
            ["ncu", "--import", str(report), "--page", page, "--csv"], capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Outcome("ncu", False, f"ncu took longer than {PATIENCE} s to read its report")
    if done.returncode:
        return Outcome("ncu", False, f"ncu could not read its report: {(done.stderr or done.stdout).strip()[-200:]}")
    return Outcome("ncu", True, done.stdout)


def kernels(table: str) -> list[dict[str, Any]]:
    """Returns the most telling metrics of each kernel, with units, from ncu's details as CSV."""
    lines = table.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        kernel = found.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            kernel.setdefault(METRICS[row["Metric Name"]], f"{row['Metric Value']} {row['Metric Unit']}".strip())
    return list(found.values())


def _run(tool: str, flags: list[str], command: list[str], report: Path) -> Outcome:
    program = shutil.which(tool)
    if program is None:
        return Outcome(tool, False, f"{tool} is not installed, or not on PATH")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])}
    try:
        done = subprocess.run([program, *flags, *command], capture_output=True, text=True, timeout=PATIENCE, env=env)
    except subprocess.TimeoutExpired:
        return Outcome(tool, False, f"{tool} took longer than {PATIENCE} s and was stopped")
    if done.returncode == 0 and report.exists():
        return Outcome(tool, True, f"written to {report}", [str(report)])
    words = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    reason = next(
        (line for line in words if "ERR_" in line or "==ERROR==" in line), words[-1] if words else "no output"
    )
    return Outcome(tool, False, f"{tool} failed with exit code {done.returncode}: {reason.strip()}")
