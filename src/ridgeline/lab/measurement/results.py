"""The recorded rows of each GPU: `results/<gpu>.jsonl` has the newest row of every piece of work and implementation.

A piece of work is one op, case, dtype and direction. Benchmark cases and implementations that no longer exist are
dropped. A whole training step is one model, batch, sequence length and variant. The `run` and `roof` rows of their
runs stand beside them: the machine, and its measured limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.lab.measurement import query, store
from ridgeline.lab.measurement.model import table as model_table
from ridgeline.lab.measurement.model.step import SIZES

Row = dict[str, Any]
Work = tuple[str, str, str, str]
Place = tuple[Any, ...]  # the key of a row: of a timed op or a counter, or of a whole training step
GPU = "h100"  # whose figures come first
KINDS = ("bench", "older", "counter")
TIMED = ("bench", "older", "model")
FACTS = ("run", "roof")  # the rows of a run that its other rows lead to


def newest(path: Path) -> list[Row]:
    """The recorded rows of a GPU, without cases and implementations that no longer exist; empty if there is no file.

    Rows of the type "older" are for ladders alone: the newest run of their work left their implementation out, and
    times of two runs are not compared. The last `run` and `roof` rows are the newest run's.
    """
    if not path.exists():
        return []
    exists = _existing()
    return [row for row in store.load(path) if row["type"] in FACTS or exists(row)]


def gpus(results: Path) -> dict[Path, list[Row]]:
    """The newest rows of every recorded GPU that has timed anything, by its file, `GPU` first."""
    paths = sorted(results.glob("*.jsonl"), key=lambda path: (path.stem != GPU, path.stem))
    found = {path: newest(path) for path in paths if path.stem != "cpu"}
    return {path: rows for path, rows in found.items() if works(rows)}


def works(rows: list[Row]) -> dict[Work, list[Row]]:
    """The timed implementations of each piece of work, fastest first."""
    found: dict[Work, list[Row]] = {}
    for row in query.of(rows, "bench"):
        if row["status"] == "ok":
            found.setdefault(query.key(row), []).append(row)
    return {work: sorted(rungs, key=lambda r: r["seconds"]["median"]) for work, rungs in found.items()}


def _existing() -> Callable[[Row], bool]:
    """Whether a row is kept: its benchmark case and implementation still exist, and it is read by something."""
    from ridgeline.op import registry  # imports torch

    ops = registry()
    rungs = {(op.name, rung.name): rung for op in ops.values() for rung in op.implementations.values()}
    cases = {(op.name, case.name) for op in ops.values() for case in op.cases if case.use == "bench"}

    def exists(row: Row) -> bool:
        if row["type"] == "model":
            return row["model"] in SIZES
        if row["type"] not in KINDS or (row.get("op"), row.get("case")) not in cases:
            return False
        rung = rungs.get((row["op"], row["impl"]))
        if row["type"] == "counter":
            return rung is not None and row["status"] == "ok" and rung.counter == row["counter"]
        if row["type"] == "older":
            return rung is not None and row["status"] == "ok"
        return rung is not None or row["peer"]

    return exists


def _order() -> Callable[[Row], tuple[Any, ...]]:
    """The order of a file: runs by name, then ops by name, and cases and implementations as the op lists them."""
    from ridgeline.op import registry

    ops = registry()
    cases = {(op.name, case.name): n for op in ops.values() for n, case in enumerate(op.cases)}
    rungs = {(op.name, name): n for op in ops.values() for n, name in enumerate(op.implementations)}
    directions = ("forward", "backward", "both")

    def order(row: Row) -> tuple[Any, ...]:
        if row["type"] in FACTS:
            return 0, row["run"], FACTS.index(row["type"])
        if row["type"] == "model":
            return 2, [*SIZES].index(row["model"]), row["batch"], row["seq"], row["variant"]
        op, case, dtype, direction = query.key(row)
        kind, rung = KINDS.index(row["type"]), rungs.get((op, row["impl"]), len(rungs))
        age = row["run"] if row["type"] == "older" else ""
        return 1, op, cases[op, case], dtype, directions.index(direction), kind, age, rung, row["impl"]

    return order


def place(row: Row) -> Place:
    """Returns the key under which a row replaces older ones."""
    if row["type"] == "model":
        return ("model", *model_table.place(row))
    return ("counter" if row["type"] == "counter" else "op", *query.key(row), row["impl"])


@dataclass
class Merge:
    """The outcome of a merge. before, after: the timed rows that were replaced, and those that took their places.

    added: rows that replaced none. older: recorded rows that only ladders show from now on, since the new run timed
    their work without them. lost: recorded rows that are gone. left_out: new rows that were not recorded.
    """

    path: Path
    before: list[Row]
    after: list[Row]
    added: list[Row]
    older: list[Row]
    lost: list[Row]
    left_out: list[Row]


def join(recorded: Iterable[Row], new: Iterable[Row] = ()) -> list[Row]:
    """The rows of a GPU's file: of each piece of work and implementation the row of the newest run, in a stable order.

    Of two rows of one run the one in `new` is kept. Runs that no row leads to are left out.
    """
    exists = _existing()
    facts: dict[tuple[str, str], Row] = {}
    found: dict[Place, Row] = {}
    for row in (*recorded, *new):
        if row["type"] in FACTS:
            facts[row["run"], row["type"]] = row
        elif exists(row | {"type": "bench"} if row["type"] == "older" else row):
            at = place(row)
            if at not in found or found[at]["run"] <= row["run"]:
                found[at] = row
    last: dict[Work, str] = {}
    for (what, *_), row in found.items():
        if what == "op":
            work = query.key(row)
            last[work] = max(last.get(work, ""), row["run"])
    rows = []
    for row in found.values():
        if row["type"] in ("bench", "older"):
            row = row | {"type": "bench" if row["run"] == last[query.key(row)] else "older"}
        if exists(row):
            rows.append(row)
    for run in {row["run"] for row in rows}:
        for kind in FACTS:
            if (run, kind) not in facts:
                raise store.refusal(
                    f"the rows of run {run} come without its {kind!r} row, which says what they were held against"
                )
            rows.append(facts[run, kind])
    return sorted(rows, key=_order())


def merge(rows: list[Row], at: str | None = None, folder: Path | None = None) -> Merge:
    """Merges the rows of one or several runs on one GPU into its file, in one step under a lock.

    at: the commit of those runs that do not know theirs; they are then marked `dirty`. folder: `results/` by default.
    Raises RidgelineError if the rows are of a CPU or of several GPUs, or if the file cannot be read or written.
    """
    path = file_of(rows, folder)
    rows = [pack(row) for row in (named(rows, store.short_commit(at)) if at else rows)]
    with store.locked(path.parent):
        recorded = [pack(row) for row in store.load(path)] if path.exists() else []
        rows = apart(rows, recorded)
        joined = join(recorded, rows)
        if joined != recorded:
            store.replace(path, joined)
    old, now = ({place(row): row for row in some if row["type"] in TIMED} for some in (recorded, joined))
    fresh = {place(row): row for row in rows if row["type"] in TIMED}
    taken = {at: row for at, row in now.items() if at in fresh and fresh[at]["run"] == row["run"]}
    changed = [at for at, row in taken.items() if at in old and old[at]["run"] != row["run"]]
    return Merge(
        path,
        before=[old[at] for at in changed],
        after=[taken[at] for at in changed],
        added=[row for at, row in taken.items() if at not in old],
        older=[row for at, row in old.items() if row["type"] == "bench" and now.get(at, row)["type"] == "older"],
        lost=[row for at, row in old.items() if at not in now],
        left_out=[row for at, row in fresh.items() if at not in taken],
    )


def file_of(rows: list[Row], folder: Path | None = None) -> Path:
    """The file that rows are recorded in: that of the one GPU that they were measured on."""
    names = {store.slug(row["machine"]["gpu"]) for row in query.of(rows, "run")}
    if len(names) != 1 or names == {"cpu"}:
        raise store.refusal(
            f"only runs on one GPU are recorded in one file, and these are on {', '.join(sorted(names)) or 'none'}"
        )
    return (folder or store.recorded()) / f"{names.pop()}.jsonl"


def named(rows: list[Row], commit: str) -> list[Row]:
    """The rows with that commit for runs that know none, in their names too; such runs are `dirty`."""
    unknown = {row["run"] for row in query.of(rows, "run") if row["commit"] == "unknown"}
    if not unknown:
        raise store.refusal("--commit names the commit of runs that do not know theirs, and all of these do")
    names = {run: re.sub(r"^(\d{8}-\d{6})-unknown", rf"\1-{commit}", run) for run in unknown}
    facts = {"commit": commit, "dirty": True}
    return [
        row | {"run": names[row["run"]]} | (facts if row["type"] == "run" else {}) if row["run"] in names else row
        for row in rows
    ]


def apart(rows: list[Row], recorded: list[Row]) -> list[Row]:
    """The rows with another name for each run whose name is taken: two machines may start a run in the same second."""
    known = {row["run"]: row for row in query.of(recorded, "run")}
    names = {}
    for row in query.of(rows, "run"):
        name, number = row["run"], 1
        while name in known and known[name] != row | {"run": name}:
            number += 1
            name = f"{row['run']}-{number}"
        names[row["run"]] = name
    return [row | {"run": names.get(row["run"], row["run"])} for row in rows]


def pack(row: Row) -> Row:
    """A row as the file holds it: figures in six significant digits, and no fields that are None in a timed row."""
    optional = store.OPTIONAL.get(row["type"], {})
    return store.rounded({k: v for k, v in row.items() if v is not None or k not in optional})


def recordable(gpu: str | None, others: bool) -> None:
    """Raises RidgelineError before anything is measured if a run cannot be recorded.

    gpu: the GPU's name, None on a CPU. others: whether other cases than benchmark ones are chosen.
    """
    from ridgeline.op import RidgelineError

    if gpu is None:
        raise RidgelineError("--record is for GPUs and this run is on a CPU: without it the run is kept in the cache")
    if others:
        raise RidgelineError("--record keeps benchmark cases alone: leave out --quick and --grid")
    path = store.recorded() / f"{store.slug(gpu)}.jsonl"
    with store.locked(path.parent):
        if path.exists():
            store.load(path)
