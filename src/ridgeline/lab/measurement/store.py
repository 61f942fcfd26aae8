"""Files of JSON lines: a run's own file grows row by row, and a GPU's recorded file is replaced as a whole.

Both are written under a lock, so that two writers lose nothing. A kill loses at most the line being appended.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from ridgeline.lab.measurement import columns

SCHEMA = 3
DIGITS = 6  # significant digits of a recorded figure
READ = (2, 3)  # the schemas that are read: a line of schema 2 has its rows one by one
Row = dict[str, Any]
NUMBER = (int, float)
BENCH = (
    dict.fromkeys(("op", "case", "dtype", "direction", "impl", "kind", "status", "bound"), str)
    | dict.fromkeys(("bytes", "read", "write", "flops", "roof_seconds"), NUMBER)
    | {"peer": bool}
)
# The fields that a row of each type must have, with their types.
FIELDS: dict[str, dict[str, Any]] = {
    "run": dict.fromkeys(("time", "commit", "command"), str) | {"dirty": bool, "machine": dict},
    "roof": dict.fromkeys(("read", "write", "copy", "add", "matmul"), dict) | {"launch_us": NUMBER},
    "check": dict.fromkeys(("op", "case", "dtype", "impl"), str) | {"outputs": dict},
    "bench": BENCH,
    "older": BENCH,
    "counter": {"status": str},
    "model": dict.fromkeys(("model", "title", "variant", "dtype", "status"), str)
    | dict.fromkeys(("batch", "seq"), int),
    "lm": dict.fromkeys(("part", "case", "dtype", "direction", "impl", "status"), str),
    "figure": dict.fromkeys(("subject", "what", "status"), str),
}
# Fields that may be None; a row without one is read as if it held None.
OPTIONAL: dict[str, Row] = dict.fromkeys(("bench", "older"), {"reason": None} | columns.UNTIMED)
# Fields that the rows of one piece of work in one run share: a line of a recorded file holds them once.
WORK = ("schema", "type", "run", "op", "case", "dtype", "direction", "bytes", "read", "write", "flops", "roof_seconds",
        "bound", "cached")  # fmt: skip
MACHINE = ("gpu", "arch", "cpu", "cores", "memory_bytes", "driver", "cuda", "torch", "triton", "python", "os")
HOUSE = Path(__file__).resolve().parents[4]


def slug(gpu: str | None) -> str:
    """The short name of a GPU, for files and folders: "h100" for "NVIDIA H100 80GB HBM3", "cpu" for none."""
    if gpu is None:
        return "cpu"
    words = re.sub(r"NVIDIA|AMD|Tesla|\b\d+\s?GB\b|\bHBM\w*|\bSXM\w*", " ", gpu).lower()
    return "-".join(re.findall(r"[a-z0-9]+", words)) or "gpu"


@cache
def commit() -> tuple[str, bool]:
    """The commit's first seven digits, and whether the source tree differs from it; ("unknown", False) without git.

    Recording one run must not make the next one dirty, so `results/` may differ.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(HOUSE), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    digits = git("rev-parse", "--short=7", "HEAD")
    if not digits or not (HOUSE / "pyproject.toml").exists():
        return "unknown", False
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
    return digits[:7], bool(changed)


def recorded() -> Path:
    """Where `--record` keeps a file per GPU: `results/` of the source tree, else of the current folder."""
    return (HOUSE if (HOUSE / "pyproject.toml").exists() else Path.cwd()) / "results"


def cached() -> Path:
    """Where runs are kept, in a folder per machine: `ridgeline/` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline"


def append(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows to a file in one write under a lock, after cutting off a line that a killed writer left torn."""
    lines = _text(rows)
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
        raise refusal(f"cannot write results to {path}: {error.strerror or error}") from error


def _text(lines: Iterable[Row]) -> bytes:
    return "".join(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n" for line in lines).encode()


def rounded(value: Any) -> Any:
    """A row with its figures in six significant digits, as recorded files hold them."""
    if isinstance(value, float) and isfinite(value):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder and holds its lock: one process at a time reads and replaces files there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise refusal(f"cannot write results to {folder}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def replace(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a file in one step: a kill leaves the old file or the new one. The caller holds the folder's lock."""
    lines = _text(_lines(rows))
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise refusal(f"cannot write results to {path}: {error.strerror}") from error


def _lines(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows as lines of a recorded file: neighbours of one piece of work and run share a line, as columns under `rows`.

    A run on the machine of an earlier one names that run instead.
    """
    machines: list[tuple[Row, str]] = []
    rows = (row | {"schema": SCHEMA} for row in rows)
    for _, some in groupby(rows, lambda row: [row.get(name) for name in WORK]):
        group = list(some)
        if group[0]["type"] in OPTIONAL:
            common = {name: group[0][name] for name in WORK if name in group[0]}
            yield common | {"rows": columns.pack([{k: v for k, v in r.items() if k not in WORK} for r in group])}
            continue
        for row in group:
            machine = row.get("machine") if row["type"] == "run" else None
            known = next((name for other, name in machines if other == machine), None)
            if machine and not known:
                machines.append((machine, row["run"]))
            yield row | {"machine": known} if known else row


def _heal(file: int) -> int:
    """Cuts off a last line without an end; returns the size that is left."""
    size = end = os.fstat(file).st_size
    while end and os.pread(file, 1, end - 1) != b"\n":
        start = max(0, end - 4096)
        end = start + os.pread(file, end - start, start).rfind(b"\n") + 1
    if end != size:
        os.ftruncate(file, end)
    return end


def refusal(message: str) -> ValueError:
    """A RidgelineError."""
    from ridgeline.op import RidgelineError  # imports torch, which reading results does not need

    return RidgelineError(message)


def load(path: Path | str) -> list[Row]:
    """The rows of a run, or of a recorded GPU. A torn last line is left out.

    Rows of an older schema are read as rows of this one. Raises RidgelineError if the file is corrupt or has a schema
    that is not read.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise refusal(f"cannot read results from {path}: {error.strerror}") from error
    *lines, torn = text.split(b"\n")
    rows: list[Row] = []
    machines: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        schema = SCHEMA
        try:
            row = json.loads(line)
            schema = int(row["schema"])
            known = isinstance(row["type"], str) and isinstance(row["run"], str)
            parts = row.pop("rows", [{}])
            found = [row | part for part in (columns.unpack(parts) if isinstance(parts, dict) else parts)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if schema in READ:
                raise refusal(
                    f"{path} is not a results file of Ridgeline, or is corrupt: line {number} is not a row"
                ) from error
        if schema not in READ:
            age, reads = "a newer" if schema > SCHEMA else "an older", " and ".join(map(str, READ))
            raise refusal(f"{path} was written by {age} Ridgeline (schema {schema}); this one reads schemas {reads}")
        if not known:
            raise refusal(f"{path} is corrupt: line {number} has no type or run")
        for row in found:
            row["schema"] = SCHEMA
            if row["type"] == "run":
                machine = row.get("machine")
                row["machine"] = machines.get(machine) if isinstance(machine, str) else machine
                machines[row["run"]] = row["machine"]
            if fault := _fault(row):
                raise refusal(f"{path} is corrupt: line {number}, a {row['type']} row, has no valid {fault!r}")
            missing = {name: None for name in OPTIONAL.get(row["type"], {}) if name not in row}
            rows.append(row | missing)  # after the others, so that a file that is written again stays the same
    if not rows:
        raise refusal(f"{path} holds no rows{' but a torn one' if torn else ''}")
    return rows


def _fault(row: Row) -> str | None:
    """The first required field that is missing or has the wrong type; None for a valid row."""
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
    elif kind in (*OPTIONAL, "model") and row["status"] == "ok":
        figures = {name: row.get(name) for name in ("seconds", *(["tokens_per_second"] if kind == "model" else []))}
        if not isinstance(row.get("share"), NUMBER):
            return "share"
    elif kind in ("lm", "figure") and row.get("seconds") is not None:
        figures = {"seconds": row["seconds"]}
    return next((name for name, figure in figures.items() if not _measured(figure)), None)


def _measured(figure: Any) -> bool:
    """Whether this is a median above zero with its interval."""
    return isinstance(figure, dict) and all(
        isinstance(figure.get(end), NUMBER) and figure[end] > 0 for end in ("median", "low", "high")
    )


def short_commit(sha: str) -> str:
    """The first seven digits of a commit that a user named. Raises RidgelineError if it is no commit."""
    if not re.fullmatch(r"[0-9a-f]{7,40}", sha):
        raise refusal(f"--commit takes 7 to 40 hexadecimal digits of a commit, and is {sha!r}")
    return sha[:7]


def heading(machine: Row, command: str | None = None, at: str | None = None) -> tuple[str, Row]:
    """A name for a run that starts now, and its first row: the commit, the command and the machine.

    at: the commit, where the source tree is a copy without git; the run is then marked `dirty`.
    """
    digits, dirty = (short_commit(at), True) if at else commit()
    now = datetime.now(UTC)
    row = {"type": "run", "time": f"{now:%Y-%m-%dT%H:%M:%SZ}", "commit": digits, "dirty": dirty}
    row |= {"command": command or " ".join(["ridgeline", *sys.argv[1:]]), "machine": machine}
    return f"{now:%Y%m%d-%H%M%S}-{digits}", row


class Run:
    """The writer of one run in the user's cache: `run.write(row)` appends a row at once.

    at: the commit, where the source tree is a copy without git; the run is then marked `dirty`.
    """

    def __init__(self, machine: Row, command: str | None = None, at: str | None = None):
        name, about = heading(machine, command, at)
        self.slug = slug(machine["gpu"])
        self.name = self._claim(cached() / self.slug, name)
        self.rows: list[Row] = []
        self.write(about)

    def _claim(self, folder: Path, name: str) -> str:
        """Makes the file under a name that no other run has."""
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
            raise refusal(f"cannot write results to {folder}: {error.strerror}") from error
        raise refusal(f"cannot write results to {folder}: a hundred runs are called {name}")

    def write(self, *rows: Row) -> None:
        """Appends rows, each with the schema version and this run's name."""
        full = [{"schema": SCHEMA, "type": row["type"], "run": self.name, **row} for row in rows]
        append(self.path, full)
        self.rows += full


def runs(slug: str | None = None) -> list[Path]:
    """The files of all cached runs of a machine (of all machines by default), the oldest first."""
    return sorted((p for p in cached().glob(f"{slug or '*'}/*.jsonl") if p.stat().st_size), key=lambda p: p.stem)


def recordings() -> list[Path]:
    """The files of the recorded GPUs."""
    return sorted(recorded().glob("*.jsonl"))


def latest(slug: str | None = None, op: str | None = None, before: str | None = None) -> Path | None:
    """The newest cached run of a machine (default: any) that timed an op (default: any), or None.

    before: only runs older than the one of that name. Files that cannot be read are skipped, with one line on stderr.
    """
    from ridgeline.op import RidgelineError

    skipped: list[RidgelineError] = []
    found = None
    for path in reversed(runs(slug)):
        try:
            if (before is None or path.stem < before) and _timed(path, op):
                found = path
                break
        except RidgelineError as error:
            skipped.append(error)
    if skipped:
        more = f" (and {len(skipped) - 1} more)" if skipped[1:] else ""
        print(f"ridgeline: skipped: {skipped[0]}{more}", file=sys.stderr)
    return found


def _timed(path: Path, op: str | None) -> bool:
    return any(row["type"] == "bench" and op in (None, row["op"]) for row in load(path))


def find(run: str) -> Path:
    """The file of a run or of a recorded GPU.

    run: a file, a run's name or how it starts, a recorded GPU such as "h100", or "latest": the newest cached run,
    or a recorded GPU where nothing is cached. Raises RidgelineError if that is no file, or several.
    """
    if Path(run).is_file():
        return Path(run)
    known = {path.stem: path for path in recordings()}
    if run in known:
        return known[run]
    found = [p for p in runs() if p.stem.startswith(run)]
    if run == "latest":
        found = runs()[-1:] or recordings()[:1]
    exact = [p for p in found if p.stem == run]
    if len(exact or found) == 1:
        return (exact or found)[0]
    fault = "several runs start" if found else "no run, recorded GPU or file is called or starts"
    names = ", ".join(p.stem for p in (found or runs())[-5:]) or "none yet"
    also = f"; recorded GPUs: {', '.join(known)}" if known and not found else ""
    raise refusal(f"{fault} with {run!r}; the newest runs: {names}{also}")
