"""All that the language-model lab takes from `ridgeline.lab`: its statistics, its clock, its units and its tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline.lab import units
from ridgeline.lab.measurement import clock, store
from ridgeline.lab.measurement.clock import Measurement, interval, median
from ridgeline.lab.measurement.machine import facts
from ridgeline.lab.measurement.roof import CPU_SIDES, SHAPES
from ridgeline.lab.tables import print_table, table_text
from ridgeline.op import RidgelineError

__all__ = ["interval", "median", "print_table", "table_text", "units"]


def whole(text: str) -> int:
    """A flag's type: an integer of at least 0."""
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"takes a whole number of 0 or more, and got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A flag's type: an integer of at least 1."""
    if not text.strip().isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"takes a whole number of 1 or more, and got {text!r}")
    return int(text)


def wholes(text: str) -> list[int]:
    """A flag's type: integers of at least 0, with commas between them."""
    return [whole(part) for part in text.split(",")]


def above_zero(verb: str, **flags: Sequence[int]) -> None:
    """Raises RidgelineError if a list of a flag has a 0."""
    for name, values in flags.items():
        if 0 in values:
            raise RidgelineError(f"lm {verb}: --{name} takes whole numbers of 1 or more, and got 0")


def names(text: str) -> list[str]:
    """A flag's type: names, with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def say(text: str) -> None:
    """Prints a line as it is."""
    print(text, flush=True)


def figures(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median of times with its 95% interval, their mean and their standard deviation."""
    low, high = interval(seconds)
    return {
        "median": median(seconds),
        "low": low,
        "high": high,
        "mean": statistics.mean(seconds),
        "deviation": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
    }


def measure(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, budget: float, min_reps: int = 5, **options: Any
) -> dict[str, Measurement]:
    """Times functions without arguments on a device, interleaved, from a cold cache: `ridgeline.lab.measure`."""
    timer = clock.device_timer(device.type)
    return clock.measure(functions, budget=budget, min_reps=min_reps, timer=timer, details=False, **options)


def product_rate(device: torch.device, dtype: torch.dtype, budget: float = 1.0) -> float:
    """Returns the highest rate of matrix products that torch reaches here, in FLOP/s, over the roof's list of shapes.

    budget: seconds, about. On a GPU these are short bursts; a long run may get less, since power limits the clock."""
    gpu = device.type == "cuda"
    shapes = SHAPES if gpu else [(side,) * 3 for side in CPU_SIDES]
    best = 0.0
    for m, n, k in shapes:
        work = 2 * m * n * k
        if best and 20 * work / best > budget:
            continue
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        found = measure({"mm": partial(torch.matmul, a, b.mT)}, device, budget / len(shapes), min_reps=3)
        best = max(best, work / found["mm"].median)
    return best


def read_rate(device: torch.device) -> tuple[float, str]:
    """Returns the bytes a second that this device reads at most, and "recorded" or "measured".

    A GPU's is the newest in the recorded results of its name, if there is one; else it is measured here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for path in sorted(store.recorded().glob("*.jsonl")):
            rows = store.load(path)
            mine = {r["run"] for r in rows if r["type"] == "run" and r["machine"]["gpu"] == name}
            roofs = [r for r in rows if r["type"] == "roof" and r["run"] in mine]
            if roofs:
                return float(roofs[-1]["read"]["median"]), "recorded"
    x = torch.randn((1 << 28 if device.type == "cuda" else 1 << 24), device=device)
    ways: dict[str, Callable[[], Any]] = {"sum": x.sum, "amax": x.amax}
    found = measure(ways, device, 0.3, min_reps=3)
    return x.nbytes / min(f.median for f in found.values()), "measured"


def machine() -> dict[str, Any]:
    """Returns what a recorded row says of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


def record_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the rows to this file of JSON lines")


def recordable(path: Path | None) -> None:
    """Raises RidgelineError, before anything is measured, if rows cannot be appended to a file; makes its folder."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise RidgelineError(f"lm: --record {path} cannot be written: {error.strerror}") from error


def record(path: Path, rows: Sequence[dict[str, Any]], verb: str) -> None:
    """Appends rows to a file of JSON lines in one write, after cutting off a line that a killed run left torn. What is
    not finite becomes null. Raises RidgelineError if the file cannot be written."""
    stamp = {"type": f"lm {verb}", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine()}
    finite = [json.loads(json.dumps(store.rounded(row)), parse_constant=lambda _: None) for row in rows]
    store.append(path, [stamp | row for row in finite])


def command(verb: str, options: argparse.Namespace, drop: Sequence[str] = (), **changes: Any) -> list[str]:
    """Returns the command line that runs a verb with these options in a process of its own."""
    words = [sys.executable, "-m", "ridgeline", "lm", verb]
    kept = {name: value for name, value in vars(options).items() if name not in ("lm_verb", *drop)}
    for name, value in (kept | changes).items():
        if value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        words.append(flag if value is True else f"{flag}={value}")
    return words


def environment() -> dict[str, str]:
    """Returns the environment in which another process imports the same ridgeline."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def child(words: Sequence[str]) -> dict[str, Any]:
    """Runs a command that prints one line of JSON, and returns it.

    A process that dies gives {"error": ...}; its own sentence of bad input raises RidgelineError."""
    done = subprocess.run(words, env=environment(), text=True, capture_output=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if last.startswith("{"):
        return json.loads(last)
    said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    if done.returncode == 2 and said.startswith("ridgeline: "):
        raise RidgelineError(said.removeprefix("ridgeline: "))
    if done.returncode == -9:
        return {"error": "out of memory: the system killed the process"}
    return {"error": f"the process ended with {done.returncode} and said: {said}"}


def printed(options: argparse.Namespace, verb: str) -> Any:
    """Returns what a verb of `ridgeline lm` prints as JSON with these options, run in this process."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        importlib.import_module(f"ridgeline.lm.{verb}").main(options)
    return json.loads(text.getvalue().strip().splitlines()[-1])


class Lines:
    """A process that prints rows of JSON, a line each. `next` waits for one, `fault` says how the process ended."""

    def __init__(self, words: Sequence[str]) -> None:
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `end`
        self.process = subprocess.Popen(words, env=environment(), text=True, stdout=subprocess.PIPE, stderr=self.said)
        self.queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.queue.put(json.loads(line))
        self.queue.put(None)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next row, or None if the process has ended or none comes for so long."""
        try:
            return self.queue.get(timeout=max(0.01, seconds))
        except queue.Empty:
            return None

    def ready(self) -> list[dict[str, Any]]:
        """Returns the rows that are there."""
        found = []
        while not self.queue.empty():
            row = self.queue.get()
            if row is None:
                self.queue.put(None)  # for those who wait
                break
            found.append(row)
        return found

    def fault(self) -> str | None:
        """Returns None while the process runs, or what it said last."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return None
        self.said.seek(0)
        last = (self.said.read().strip().splitlines() or ["nothing"])[-1]
        return f"the process ended with {code} and said: {last}"

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.said.close()


class Recording:
    """A run's file, as `ridgeline bench` writes them: a row about the machine, then rows of the type "lm".

    The file is begun anew. at: the commit, where the source tree is a copy without git."""

    def __init__(self, path: Path, device: str, at: str | None = None) -> None:
        digits, dirty = (store.short_commit(at), True) if at else store.commit()
        now = time.gmtime()
        self.path, self.name = path, f"{time.strftime('%Y%m%d-%H%M%S', now)}-{digits}"
        path.unlink(missing_ok=True)
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now), "commit": digits, "dirty": dirty}
        command = " ".join(["ridgeline", *sys.argv[1:]])
        self.write(about | {"command": command, "machine": facts(device)}, "run")

    def write(self, row: dict[str, Any], kind: str = "lm") -> None:
        """Appends a row at once."""
        store.append(self.path, [{"schema": store.SCHEMA, "type": kind, "run": self.name, **store.rounded(row)}])


def recording(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the row about the machine and the "lm" rows of a run's file.

    Raises RidgelineError if it is corrupt, of another schema, or no run of the language-model lab."""
    rows = store.load(path)
    about, found = [r for r in rows if r["type"] == "run"], [r for r in rows if r["type"] == "lm"]
    if not about or not found:
        raise RidgelineError(f"lm: {path} holds no run of `ridgeline lm report` or `ridgeline lm survey`")
    return about[0], found


def page(template: str, **parts: Any) -> str:
    """Returns a page in the look of the lab's report, from a template of this folder."""
    from ridgeline.lab.presentation.report import shell

    return shell.rendered(template, Path(__file__).parent, **parts)


def about(run: dict[str, Any]) -> dict[str, Any]:
    """Returns what a page says of a run: the machine's name, the date, the commit and further facts."""
    m = run["machine"]
    facts_ = [
        ("GPU", f"{m['gpu']} ({m['arch']})" if m["gpu"] else "none"),
        ("CPU", f"{m['cpu']}, {m['cores']} cores"),
        ("Memory", units.size(m["memory_bytes"])),
        ("PyTorch", m["torch"]),
        *((name, m[name.lower()]) for name in ("Triton", "CUDA", "Driver", "Python")),
        ("Measured", run["time"].replace("T", " ").removesuffix("Z") + " UTC"),
        ("Commit", run["commit"] + (", with changes" if run["dirty"] else "")),
        ("Command", run["command"]),
    ]
    return {
        "name": m["gpu"] or m["cpu"],
        "gpu": bool(m["gpu"]),
        "date": run["time"][:10],
        "commit": run["commit"],
        "facts": [(name, str(value)) for name, value in facts_ if value],
    }


def recorded() -> Path:
    """Returns the folder of the recorded runs, a file for each GPU."""
    return store.recorded() / "lm"


def boards(gpu: str) -> list[dict[str, Any]]:
    """Returns rows of the part "leaderboard" from what `lm leaderboard --record` left for a GPU in results/course.

    Raises RidgelineError if its file is torn."""
    path = store.recorded() / "course" / f"{gpu}.jsonl"
    newest: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RidgelineError(f"lm: {path} line {number} is no JSON") from error
        if row["type"] == "lm leaderboard" and "seconds" in row:
            newest[row["board"]] = row
    found = []
    for board, row in newest.items():
        at, step = f", {row['time'][:10]}", board == "step"
        base = {"part": "leaderboard", "dtype": "bfloat16", "status": "ok", "direction": "step" if step else "both"}
        if step:
            base |= {"case": f"{row['batch']} x {row['context']}{at}", "peak_bytes": row["peak_memory_bytes"]}
            seconds, floor = {"ridgeline": row["seconds"]}, sum(row["floor_seconds"].values())
        else:
            base |= {"case": f"attention 1 x {row['context']}{at}"}
            seconds, floor = row["seconds"], row["floor_seconds"]
        found += [base | {"impl": impl, "seconds": one, "floor_seconds": floor} for impl, one in seconds.items()]
    return found


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that memory ran out, on a GPU or on the CPU."""
    signs = "can't allocate memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in signs)


def memory_of(device: torch.device) -> int:
    """Returns the bytes of memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release(device: torch.device) -> None:
    """Frees memory that nothing refers to."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
