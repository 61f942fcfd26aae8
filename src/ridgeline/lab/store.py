"""Runs as files of JSON lines: appended in one step under a lock, so that two writers or a kill lose nothing that was recorded."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA = 1
Row = dict[str, Any]
NUMBER = (int, float)
# What readers rely on: of each type of row the fields that it must have, and what they are.
FIELDS: dict[str, dict[str, Any]] = {
    "run": dict.fromkeys(("time", "commit", "command"), str) | {"dirty": bool, "machine": dict},
    "roof": dict.fromkeys(("read", "write", "copy", "add", "matmul"), dict) | {"launch_us": NUMBER},
    "check": dict.fromkeys(("op", "case", "dtype", "impl"), str) | {"outputs": dict},
    "bench": dict.fromkeys(("op", "case", "dtype", "direction", "impl", "kind", "status", "bound"), str)
    | dict.fromkeys(("bytes", "read", "write", "flops", "roof_seconds"), NUMBER)
    | {"peer": bool},
    "counter": {"status": str},
}
MACHINE = ("gpu", "arch", "cpu", "cores", "memory_bytes", "driver", "cuda", "torch", "triton", "python", "os")
HOUSE = Path(__file__).resolve().parents[3]


def slug(gpu: str | None) -> str:
    """The folder name of a GPU: "h100" for "NVIDIA H100 80GB HBM3", "cpu" for none."""
    if gpu is None:
        return "cpu"
    words = re.sub(r"NVIDIA|AMD|Tesla|\b\d+\s?GB\b|\bHBM\w*|\bSXM\w*", " ", gpu).lower()
    return "-".join(re.findall(r"[a-z0-9]+", words)) or "gpu"


@cache
def commit() -> tuple[str, bool]:
    """This Ridgeline's commit by seven digits, and whether the working tree differs from it; ("unknown", False) without git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(HOUSE), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    digits = git("rev-parse", "--short=7", "HEAD")
    if not digits or not (HOUSE / "pyproject.toml").exists():
        return "unknown", False
    return digits[:7], bool(git("status", "--porcelain", "--untracked-files=no"))


def recorded() -> Path:
    """Where `--record` writes: `results/` of the source tree, else of the current folder."""
    return (HOUSE if (HOUSE / "pyproject.toml").exists() else Path.cwd()) / "results"


def cached() -> Path:
    """Where other runs go: `ridgeline/` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline"


def append(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows to a file in one write under a lock. What a killed writer left of a line is cut off first."""
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = _heal(file)
            if os.write(file, lines) != len(lines):
                os.ftruncate(file, end)
                raise OSError("the disk is full")
        finally:
            os.close(file)
    except OSError as error:
        raise _refuse(f"cannot write results to {path}: {error.strerror or error}") from error


def _heal(file: int) -> int:
    """Cuts off a last line without an end; returns the size that is left."""
    size = end = os.fstat(file).st_size
    while end and os.pread(file, 1, end - 1) != b"\n":
        start = max(0, end - 4096)
        end = start + os.pread(file, end - start, start).rfind(b"\n") + 1
    if end != size:
        os.ftruncate(file, end)
    return end


def _refuse(message: str) -> ValueError:
    from ridgeline.op import RidgelineError  # imports torch, which reading results need not

    return RidgelineError(message)


def load(path: Path | str) -> list[Row]:
    """The rows of a run. A torn last line is left out; a corrupt or newer file raises."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise _refuse(f"cannot read results from {path}: {error.strerror}") from error
    *lines, torn = text.split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            schema = int(row["schema"])
            known = isinstance(row["type"], str) and isinstance(row["run"], str)
        except (ValueError, TypeError, KeyError) as error:
            raise _refuse(
                f"{path} is not a results file of Ridgeline, or is corrupt: line {number} is not a row"
            ) from error
        if schema > SCHEMA:
            raise _refuse(f"{path} was written by a newer Ridgeline (schema {schema}); this one reads schema {SCHEMA}")
        if not known:
            raise _refuse(f"{path} is corrupt: line {number} has no type or run")
        if fault := _fault(row):
            raise _refuse(f"{path} is corrupt: line {number}, a {row['type']} row, has no valid {fault!r}")
        rows.append(row)
    if not rows:
        raise _refuse(f"{path} holds no rows{' but a torn one' if torn else ''}")
    return rows


def _fault(row: Row) -> str | None:
    """The first field that a row of its type must have and that this one lacks, or has as something else."""
    kind = row["type"]
    for name, wanted in FIELDS.get(kind, {}).items():
        if not isinstance(row.get(name), wanted):
            return name
    if kind == "run":
        return next((name for name in MACHINE if name not in row["machine"]), None)
    figures = {}
    if kind == "roof":
        figures = {name: row[name] for name in ("read", "write", "copy", "add", "spread") if name in row} | row[
            "matmul"
        ]
    elif kind == "bench" and row["status"] == "ok":
        figures = {"seconds": row.get("seconds")}
        if not isinstance(row.get("share"), NUMBER):
            return "share"
    return next((name for name, figure in figures.items() if not _measured(figure)), None)


def _measured(figure: Any) -> bool:
    """Whether this is a median above zero with its interval."""
    return isinstance(figure, dict) and all(
        isinstance(figure.get(end), NUMBER) and figure[end] > 0 for end in ("median", "low", "high")
    )


class Run:
    """The writer of one run: `run.write(row)` appends a row at once. The file appears with the first row."""

    def __init__(self, machine: Row, record: bool = False, command: str | None = None):
        digits, dirty = commit()
        now = datetime.now(UTC)
        self.slug = slug(machine["gpu"])
        self.name = self._claim((recorded() if record else cached()) / self.slug, f"{now:%Y%m%d-%H%M%S}-{digits}")
        self.rows: list[Row] = []
        command = command or " ".join(["ridgeline", *sys.argv[1:]])
        self.write(
            {
                "type": "run",
                "time": f"{now:%Y-%m-%dT%H:%M:%SZ}",
                "commit": digits,
                "dirty": dirty,
                "command": command,
                "machine": machine,
            }
        )

    def _claim(self, folder: Path, name: str) -> str:
        """Makes the file, under a name that no other run of the same second has."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(1, 100):
                unique = name if number == 1 else f"{name}-{number}"
                self.path = folder / f"{unique}.jsonl"
                try:
                    os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                    return unique
                except FileExistsError:
                    continue
        except OSError as error:
            raise _refuse(f"cannot write results to {folder}: {error.strerror}") from error
        raise _refuse(f"cannot write results to {folder}: a hundred runs are called {name}")

    def write(self, *rows: Row) -> None:
        """Appends rows, each with the schema version and this run's name."""
        full = [{"schema": SCHEMA, "type": row["type"], "run": self.name, **row} for row in rows]
        append(self.path, full)
        self.rows += full


def runs(slug: str | None = None) -> list[Path]:
    """The files of all runs of a machine (of all machines by default), the oldest first."""
    found = [p for root in (recorded(), cached()) for p in root.glob(f"{slug or '*'}/*.jsonl") if p.stat().st_size]
    return sorted(found, key=lambda p: p.stem)


def latest(slug: str | None = None, op: str | None = None, before: str | None = None) -> Path | None:
    """The newest run of a machine that timed an op (or any), older than the run `before` where that is given; None where there is none.

    A file that cannot be read is passed over, with a line on stderr that says why: one bad file must not stop what needs none of it.
    """
    from ridgeline.op import RidgelineError

    for path in reversed(runs(slug)):
        try:
            if (before is None or path.stem < before) and _timed(path, op):
                return path
        except RidgelineError as error:
            print(f"ridgeline: passed over: {error}", file=sys.stderr)
    return None


def _timed(path: Path, op: str | None) -> bool:
    return any(row["type"] == "bench" and op in (None, row["op"]) for row in load(path))


def find(run: str) -> Path:
    """A run by its file, its name, or the start of its name; "latest" is the newest one."""
    if Path(run).is_file():
        return Path(run)
    found = [p for p in runs() if p.stem.startswith(run)] if run != "latest" else runs()[-1:]
    exact = [p for p in found if p.stem == run]
    if len(exact or found) == 1:
        return (exact or found)[0]
    names = ", ".join(p.stem for p in (found or runs())[-5:]) or "none yet"
    raise _refuse(
        f"{'several runs start' if found else 'no run or file is called or starts'} with {run!r}; the newest are {names}"
    )
