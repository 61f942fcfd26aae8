"""The texts of the lessons, their titles, the commands that they mark as runnable, and their recorded figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ridgeline.lab import translated, units
from ridgeline.lab.analysis.lesson.wording import say
from ridgeline.lab.measurement import query, store
from ridgeline.op import RidgelineError
from ridgeline.translation import language

RUN = re.compile(r"<!-- run -->\n+```\w*\n(.*?)```", re.DOTALL)
ROWS = re.compile(r"(<!-- rows ([^>]+?) -->\n).*?(<!-- /rows -->)", re.DOTALL)


def folder() -> Path:
    """Returns where the lessons are. Raises RidgelineError outside a source tree."""
    found = store.HOUSE / "docs" / "lessons"
    if not found.is_dir():
        raise RidgelineError(say("folder"))
    return found


def lessons() -> dict[int, Path]:
    """Returns the lessons that exist, by number."""
    return {int(path.stem): path for path in sorted(folder().glob("[0-9][0-9].md"))}


def lesson(number: int) -> str:
    """Returns the text of a lesson. Raises RidgelineError if there is none."""
    known = lessons()
    if number not in known:
        raise RidgelineError(say("unwritten", number=number, numbers=", ".join(map(str, known))))
    return read(known[number])


def read(path: Path) -> str:
    """Returns a lesson in the language of the command line."""
    text = path.read_text()
    return translated.page(text, f"lessons/{path.stem}", translated.FOLDER) if language() == "zh" else text


def title(text: str) -> str:
    """Returns the first heading, without the lesson's number."""
    return re.sub(r"^# (?:\d+\. )?", "", text.splitlines()[0])


def summary(text: str) -> str:
    """Returns the first line below the heading: what the lesson teaches."""
    return next(line for line in text.splitlines()[1:] if line)


def commands(text: str) -> list[str]:
    """Returns the blocks of shell commands that a lesson marks as runnable here."""
    return RUN.findall(text)


def plain(text: str) -> str:
    """Returns a lesson without the marks that only tools read."""
    return re.sub(r"<!--.*?-->\n?", "", text)


def filled(text: str, recorded: list[dict[str, Any]]) -> str:
    """Returns a lesson whose figures are those of the recorded rows.

    A mark `<!-- rows OP | CASE | DTYPE | DIRECTION | RUNGS -->` names them.
    RUNGS are separated by commas; without them, all are shown.
    """
    return ROWS.sub(lambda found: found[1] + figures(recorded, found[2]) + found[3], text)


def figures(recorded: list[dict[str, Any]], mark: str) -> str:
    """Returns the table of a mark: times of rungs, slowest first. Raises RidgelineError if nothing is recorded."""
    op, case, dtype, direction, *named = [part.strip() for part in mark.split("|")]
    wanted = named[0].replace(",", " ").split() if named else []
    rows = [row for row in query.of(recorded, "bench") if query.key(row) == (op, case, dtype, direction)]
    timed = [row for row in rows if row["status"] == "ok" and (not wanted or row["impl"] in wanted)]
    missing = set(wanted) - {row["impl"] for row in timed}
    if missing or not timed:
        raise RidgelineError(f"a lesson quotes {mark}, and no row is recorded of {', '.join(sorted(missing)) or op}")
    timed.sort(key=lambda row: -row["seconds"]["median"])
    lines = [f"| {op}, {case}, {dtype}, {direction} | time | of the roof |", "|---|--:|--:|"]
    lines += [
        f"| `{r['impl']}` | {units.seconds(r['seconds']['median'])} | {units.percent(r['share'])} |" for r in timed
    ]
    return "\n".join(lines) + "\n"
