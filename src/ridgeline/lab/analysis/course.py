"""Answers to the assignment's problems in the guide's table, from rows that `ridgeline lm VERB --record` wrote.

A cell holds `<!-- course NAME -->…<!-- /course -->`, and `make readme` writes the answer in between. What is not
recorded is a dash, or nothing in a cell that has a predicted answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lm.setup import SHAPE
from ridgeline.op import RidgelineError

Row = dict[str, Any]
MARK = re.compile(r"(<!-- course ([\w-]+) -->).*?(<!-- /course -->)")
FOLDER = "results/course"  # a file for each GPU; the H200's comes first
MIB, GIB = 2**20, 2**30


def recorded(root: Path) -> list[Row]:
    """The rows of the first GPU that has any, the oldest first. Raises RidgelineError if a file is torn."""
    for path in sorted((root / FOLDER).glob("*.jsonl"), key=lambda path: (path.stem != "h200", path.stem)):
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                if row["type"].startswith("lm ") and row["machine"]["gpu"]:
                    rows.append(row)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RidgelineError(f"{path} line {number} is not a row that `ridgeline lm` recorded") from error
        if rows:
            return rows
    return []


def filled(text: str, root: Path) -> str:
    """A text with its answers filled. Raises RidgelineError if it asks for one that there is not."""
    rows = recorded(root) if MARK.search(text) else []

    def answer(mark: re.Match[str]) -> str:
        if mark[2] not in ANSWERS:
            raise RidgelineError(f"a page wants the answer {mark[2]!r}; there are {', '.join(ANSWERS)}")
        find, otherwise = ANSWERS[mark[2]]
        said = find(rows)
        return f"{mark[1]}{otherwise if said is None else said}{mark[3]}"

    return MARK.sub(answer, text)


def of(rows: list[Row], verb: str, **facts: Any) -> list[Row]:
    """The rows of a verb that have these facts, the oldest first."""
    return [r for r in rows if r["type"] == f"lm {verb}" and all(r.get(k) == v for k, v in facts.items())]


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"


def warm_up(rows: list[Row]) -> str | None:
    """The mean step after each number of warm-ups, and what the first step of a process takes."""
    studied = {row["warmups"]: row for row in of(rows, "bench", size="small") if "seconds" in row}
    if len(studied) < 2:
        return None
    means = ", ".join(units.seconds(studied[n]["seconds"]["mean"]) for n in sorted(studied))
    counts = ", ".join(map(str, sorted(studied)))
    said = f"mean of a step after {counts} warm-ups: {means}"
    first = [row["first"] for row in of(rows, "bench", size="small") if "first" in row][-1:]
    if first:
        parts = {name: value for name, value in first[0].items() if name != "whole"}
        name = max(parts, key=parts.__getitem__)
        said += f"; the first step {units.seconds(first[0]['whole'])}, of which {name} {units.seconds(parts[name])}"
    return said


def points(rows: list[Row], impl: str, **facts: Any) -> dict[tuple[int, int], Row]:
    """The newest row of attention at each length and head dimension; it has times, or the reason for none."""
    return {(row["seq"], row["dim"]): row for row in of(rows, "attention", impl=impl, **facts)}


def milliseconds(row: Row, way: str) -> str:
    return units.seconds(row["seconds"][way]["median"])


def plain_attention(rows: list[Row]) -> str | None:
    """The longest point of the 20 that plain attention reaches, and what becomes of the next one."""
    found = points(rows, "plain", batch=8, dtype="float32", causal=False)
    done = [at for at, row in found.items() if "seconds" in row]
    if not done:
        return None
    seq, dim = max(done)
    row = found[seq, dim]
    said = f"d {dim}, context {seq}: forward {milliseconds(row, 'forward')}, backward {milliseconds(row, 'backward')}"
    said += f", {gib(row['in_use_bytes'])} before backward"
    failed = sorted(at for at, row in found.items() if at[0] > seq and "error" in row)
    return said + (f"; {failed[0][0]}: {found[failed[0]]['error'].partition(':')[0]}" if failed else "")


def against(rows: list[Row], ours: str, way: str, **facts: Any) -> str | None:
    """Two implementations of attention at the longest point that both reach."""
    mine, plain = points(rows, ours, **facts), points(rows, "plain", **facts)
    both = [at for at in mine.keys() & plain.keys() if "seconds" in mine[at] and "seconds" in plain[at]]
    if not both:
        return None
    seq, dim = max(both)
    times = f"{milliseconds(mine[seq, dim], way)}, plain {milliseconds(plain[seq, dim], way)}"
    return f"{facts['dtype']}, d {dim}, context {seq}, {way}: {ours} {times}"


def scale(rows: list[Row]) -> str | None:
    """The exponents of time against size."""
    made = {row["name"]: row for row in of(rows, "scale") if row.get("exponent") is not None}
    return ", ".join(f"{name}^{row['exponent']:.2f}" for name, row in made.items()) or None


def lecture(rows: list[Row]) -> str | None:
    """The last of the lecture's products, and of its MLPs."""
    found = {row["description"].partition("(")[0]: row for row in of(rows, "lecture6")}
    shown = [found[name] for name in ("matmul", "run_mlp") if name in found]
    return ", ".join(f"`{row['description']}` {units.seconds(row['seconds']['median'])}" for row in shown) or None


# A step of xl as the assignment has it: with nothing of the model changed by flags.
STEP: Row = dict.fromkeys((*SHAPE, "autocast")) | {"size": "xl", "context": 2048, "batch": 4, "mode": "step"}
STEP |= {"precision": "float32", "compile": False}


def memory(rows: list[Row], **facts: Any) -> str | None:
    """The measured peak of a step of xl at context 2048."""
    found = [row for row in of(rows, "memory", **STEP | {"checkpoint": 0} | facts) if row.get("measured_bytes")]
    return f"; measured peak of a step {gib(found[-1]['measured_bytes'])}" if found else None


def checkpoint(rows: list[Row]) -> str | None:
    """The measured peak and time of each way that the predictions name."""
    found = {row["way"]: row for row in of(rows, "checkpoint", **STEP)}
    names = {"keep everything": "all kept", "1 a checkpoint": "a checkpoint a layer", "cheap results again": "cheap"}
    said = [
        f"{name} {gib(found[way]['measured_bytes'])} and {units.seconds(found[way]['seconds'])}"
        for way, name in names.items()
        if way in found and found[way].get("measured_bytes")
    ]
    return f"; measured: {', '.join(said)}" if said else None


# What finds an answer, and what stands where there is none.
ANSWERS: dict[str, tuple[Callable[[list[Row]], str | None], str]] = {
    "warm-up": (warm_up, units.DASH),
    "attention": (plain_attention, units.DASH),
    "compiled": (lambda rows: against(rows, "compiled", "forward", batch=8, dtype="float32"), units.DASH),
    "flash": (lambda rows: against(rows, "triton", "both", batch=1, dtype="bfloat16"), units.DASH),
    "scale": (scale, units.DASH),
    "lecture": (lecture, units.DASH),
    "memory": (lambda rows: memory(rows, heads=None, impl="ridgeline"), ""),
    "residuals": (lambda rows: memory(rows, heads=16, impl="ridgeline"), ""),
    "checkpoint": (checkpoint, ""),
}
