"""Checks a learner's file in processes of its own, and prints what was found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.analysis.lesson.advice import advise
from ridgeline.lab.analysis.lesson.exercises import EXERCISES
from ridgeline.lab.analysis.lesson.wording import say
from ridgeline.op import RidgelineError
from ridgeline.translation import language, told

Row = dict[str, Any]
WORKER = "ridgeline.lab.analysis.lesson.worker"
ARCH = "sm_90"


def check(number: int, path: Path, seconds: int) -> Row:
    """Returns what was found: `tests`, `resources`, `timed`, `next` (a sentence, or None) and whether all is `ok`.

    Tests run in Triton's interpreter on the CPU, and on a GPU, if there is one, as they are. If they pass, the kernel
    is compiled beside our rungs, and on a GPU timed between them.
    """
    import torch

    gpu = torch.cuda.is_available()
    found: Row = {"lesson": number, "op": EXERCISES[number].op, "resources": [], "timed": [], "next": None}
    tests, died = run("test", number, path, "cpu", seconds)
    if gpu and not died and all(row["ok"] is not False for row in tests):
        on_gpu, died = run("test", number, path, "cuda", seconds)
        tests = tests + on_gpu if tests and tests[0]["ok"] else on_gpu
    found |= {"tests": tests, "died": died, "gpu": gpu, "ok": not died and all(r["ok"] is not False for r in tests)}
    if not found["ok"]:
        return found
    rows, died = run("compile", number, path, "cpu", seconds)
    broken = died or next((row["failed"] for row in rows if "failed" in row), None)
    if broken:
        return found | {"ok": False, "died": broken}
    if gpu:
        found["timed"], found["died"] = run("time", number, path, "cuda", seconds)
    return found | {"resources": rows, "next": advise(EXERCISES[number], rows, found["timed"], path)}


def run(what: str, number: int, path: Path, device: str, seconds: int) -> tuple[list[Row], str | None]:
    """Returns the rows that a worker leaves, and why it left none. Raises RidgelineError if it refuses the file."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if what == "test" and device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", WORKER, what, str(number), str(path), device, str(rows), language()]
        try:
            ended = subprocess.run(command, env=environment, timeout=seconds, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return [], say("slow", seconds=seconds)
        if ended.returncode < 0:
            return [], say("crash", signal=signal.Signals(-ended.returncode).name)
        if ended.returncode or not rows.exists():
            raise RuntimeError(f"the check's own process failed:\n{ended.stderr[-3000:]}")
        found = json.loads(rows.read_text())
    if found and "refused" in found[0]:
        raise RidgelineError(found[0]["refused"])
    return found, None


def show(number: int, found: Row) -> None:
    """Prints the tests with a hint for each failure, the resources, the times, and what to try next."""
    from ridgeline.lab.tables import console

    out = console()
    tests, exercise = found["tests"], EXERCISES[number]
    for row in tests:
        mark, style = {True: ("passed", "green"), False: ("failed", "red"), None: ("not run", "dim")}[row["ok"]]
        colon = "：" if language() == "zh" else ": "
        reason = f"{colon}{row['reason']}" if row["reason"] else ""
        out.print(f"{_eight(say(mark))} {told(row['test'])}{reason}", style=style, markup=False)
        if row["ok"] is False:
            out.print(f"         {say(row['hint'])}", markup=False)
    failed = sum(row["ok"] is False for row in tests)
    if failed:
        out.print(say("fails", failed=failed, all=len(tests)), style="bold", markup=False)
        if failed > 1:
            out.print(say("order"), style="dim", markup=False)
        if len(tests) == 1 and len(exercise.probes) > 1:
            out.print(say("first"), style="dim", markup=False)
    elif tests and all(row["ok"] for row in tests):
        out.print(say("passes"), style="bold", markup=False)
    if found["died"]:
        out.print(found["died"], style="red", markup=False)
    if found["resources"]:
        _resources(number, found["resources"], out)
    if found["timed"]:
        _timed(found["timed"], out)
    elif found["resources"]:
        out.print(say("no-gpu", arch=ARCH), style="dim", markup=False)
    if found["next"]:
        out.print(found["next"], style="bold", markup=False)


def _eight(mark: str) -> str:
    """Returns a mark padded to eight columns of a terminal."""
    from rich.cells import cell_len

    return mark + " " * (8 - cell_len(mark))


def _resources(number: int, rows: list[Row], out: Any) -> None:
    from ridgeline.lab.tables import print_table

    exercise = EXERCISES[number]
    recorded = _recorded(exercise.op, exercise.case, exercise.dtype)
    lines: list[tuple[str, ...]] = []
    for row in rows:
        spilled = f"{row['spill_stores']}" if row["spill_stores"] else "none"
        widths = [_widths(row["loads"]), _widths(row["stores"])]
        facts = [f"{row['threads']}", f"{row['registers']}", spilled, f"{row['shared']:,}", *widths]
        facts += [f"{row['occupancy']:.0%}", recorded.get(row["impl"], units.DASH)]
        lines.append((row["impl"], row["kernel"], *facts))
    alike = Counter(lines)
    lines = [(rung, f"{n} x {kernel}" if n > 1 else kernel, *facts) for (rung, kernel, *facts), n in alike.items()]
    title = say("resources", call=f"{exercise.op}, {exercise.case}, {exercise.dtype}", arch=ARCH)
    figures = ["threads", "regs", "spills", "shared", "loads", "stores", "warps", "one H200"]
    print_table(title, [say("rung"), "kernel"], figures, lines, out)


def _widths(counts: dict[str, int]) -> str:
    return " ".join(counts) or "none"


def _recorded(op: str, case: str, dtype: str) -> dict[str, str]:
    """Returns the times of our rungs that are recorded on one H200."""
    from ridgeline.lab.measurement import query, results, store

    rows = query.of(results.newest(store.recorded() / "h200.jsonl"), "bench")
    some = [row for row in rows if query.key(row) == (op, case, dtype, "forward") and row["status"] == "ok"]
    return {row["impl"]: units.seconds(row["seconds"]["median"]) for row in some}


def _timed(rows: list[Row], out: Any) -> None:
    from ridgeline.lab.tables import print_table, timing

    done = sorted((r for r in rows if r["status"] == "ok"), key=lambda row: -row["seconds"]["median"])
    lines = [(r["impl"], timing(r["seconds"])) for r in done]
    print_table(say("timed"), [say("rung")], [say("time")], lines, out)
    for row in rows:
        if row["status"] != "ok":
            out.print(f"{row['impl']}: {row['status']}: {row['reason']}", style="red", markup=False)
