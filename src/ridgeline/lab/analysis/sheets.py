"""Tables of pages that recorded figures of one subject fill: streams, bindings, the largest rates of products.

A page holds `<!-- figures SUBJECT | PART -->`, and `make readme` writes the table below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.analysis.mamf import found as figures
from ridgeline.lab.analysis.mamf import heat
from ridgeline.lab.measurement import query, sheet
from ridgeline.op import RidgelineError

Row = dict[str, Any]
MARK = re.compile(r"(<!-- figures ([^|>]+?) \| ([^>]+?) -->\n).*?(<!-- /figures -->)", re.DOTALL)
FIRST = "h200"  # whose figures come first
COMMANDS = {
    "streams": "python examples/streams.py --record results/streams/h200.jsonl",
    "bindings": "python examples/bindings/cost.py --record results/bindings/h200.jsonl",
    "mamf": "ridgeline mamf --out results/mamf/h200.jsonl",
}


def pages(root: Path) -> dict[Path, str]:
    """The texts of a source tree's pages that hold such tables, filled."""
    found = {path: path.read_text() for path in sorted((root / "docs").glob("**/*.md"))}
    return {path: filled(text, root) for path, text in found.items() if MARK.search(text)}


def filled(text: str, root: Path) -> str:
    """A text with its tables filled from the results of a source tree; where nothing is recorded, it says how to."""
    return MARK.sub(lambda mark: f"{mark[1]}{table(mark[2], mark[3], root)}\n{mark[4]}", text)


def table(subject: str, part: str, root: Path) -> str:
    """The Markdown of one part of a subject. Raises RidgelineError if there is no such subject or part."""
    if subject not in COMMANDS:
        raise RidgelineError(f"a page wants figures of {subject!r}; there are {', '.join(COMMANDS)}")
    found = sheet.recorded(subject, root)
    if not found:
        return f"No run is recorded yet. On a machine with a GPU, `{COMMANDS[subject]}` records one."
    rows = found[_first(found)]
    gpu = query.one(rows, "run")["machine"]["gpu"]
    made = TABLES.get(subject, grouped)(query.of(rows, "figure"), part)
    return f"{made}\n\nMeasured on one {gpu}."


def grouped(rows: list[Row], part: str) -> str:
    """A table of what was timed and its time, of the rows of one group."""
    some = [row for row in rows if row["group"] == part]
    if not some:
        raise RidgelineError(f"no figures are recorded of {part!r}")
    lines = [f"| {part} | time |", "|---|--:|"]
    lines += [f"| {row['what']} | {_time(row['seconds'])} {units.spread(row['seconds'])} |" for row in some]
    return "\n".join(lines)


def bindings(rows: list[Row], part: str) -> str:
    """A table of ways to bind a kernel: the host's time of a call, and the time to build."""
    lines = ["| way | a call | with a gradient | until the first result |", "|---|--:|--:|--:|"]
    for row in rows:
        name = "PyTorch's own `silu`" if row["what"] == "torch" else f"`{row['what']}`"
        build = units.seconds(row["build_seconds"]) if row["build_seconds"] else ""
        lines.append(f"| {name} | {_time(row['seconds'])} | {_time(row['training'])} | {build} |")
    return "\n".join(lines)


def mamf(rows: list[Row], part: str) -> str:
    """The largest rates by dtype ("rates"), the dips and their reasons ("dips"), or the heat map ("map")."""
    if part == "map":
        return "![How near each shape comes to the best rate](mamf.svg)"
    names = dict.fromkeys(row["dtype"] for row in rows)
    found = [figures.summary(rows, rows, name) for name in names if figures.of(rows, name)]
    if part == "dips":
        return "\n".join(f"- {about['dtype']}: {text}" for about in found for text in about["dips"]) or "No dips."
    lines = ["| dtype | best shape | rate | best run | median of all | shapes |", "|---|---|--:|--:|--:|--:|"]
    for about in found:
        rates = [units.scaled(about[rate], "FLOP/s") for rate in ("rate", "best", "median")]
        shape = " x ".join(map(str, about["shape"]))
        lines.append(f"| {about['dtype']} | {shape} | {' | '.join(rates)} | {about['shapes']} |")
    return "\n".join(lines)


def pictures(root: Path) -> dict[Path, str]:
    """The pictures that recorded figures draw."""
    found = sheet.recorded("mamf", root)
    if not found:
        return {}
    rows = found[_first(found)]
    name = next(row["dtype"] for row in query.of(rows, "figure") if row["what"] == "product")
    gpu = query.one(rows, "run")["machine"]["gpu"]
    drawn = heat.svg(figures.rates(figures.of(query.of(rows, "figure"), name)), f"Products in {name} on one {gpu}")
    return {root / "docs/mamf.svg": drawn}


def _first(found: dict[Path, list[Row]]) -> Path:
    return min(found, key=lambda path: (path.stem != FIRST, path.stem))


def _time(figure: dict[str, float]) -> str:
    return units.seconds(figure["median"])


# Tables of subjects with a form of their own.
TABLES: dict[str, Callable[[list[Row], str], str]] = {"bindings": bindings, "mamf": mamf}
