"""The figures of one subject on one GPU, in a file of its own: `results/<subject>/<gpu>.jsonl`.

Subjects are what no op's row holds: launch gaps, streams, ways to bind a kernel, rates of many products.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ridgeline.lab.measurement import query, store
from ridgeline.op import RidgelineError

Row = dict[str, Any]
SAME = ("gpu", "torch", "cuda")  # facts of the machine that must agree where a file is continued


class Sheet:
    """The writer of a subject's file: a row about the machine, then rows of the type "figure", each appended at once.

    `rows` holds the figures so far. resume: goes on with a file that is there, if it is of the same subject, GPU and
    PyTorch; else the file is begun anew. at: the commit, where the source tree is a copy without git.
    Raises RidgelineError if the file is of something else, or cannot be read or written.
    """

    def __init__(self, path: Path, subject: str, machine: Row, at: str | None = None, resume: bool = False):
        self.path, self.subject = path, subject
        self.name, about = store.heading(machine, _command(), at)
        self.rows = self._kept(machine) if resume and path.exists() else []
        if not resume:
            path.unlink(missing_ok=True)
        store.append(path, [{"schema": store.SCHEMA, "run": self.name, **about}])

    def write(self, what: str, status: str = "ok", **facts: Any) -> Row:
        """Appends a figure and returns its row. what: its name within the subject."""
        row = {"schema": store.SCHEMA, "type": "figure", "run": self.name, "subject": self.subject, "what": what}
        row |= {"status": status, **facts}
        store.append(self.path, [row])
        self.rows.append(row)
        return row

    def _kept(self, machine: Row) -> list[Row]:
        rows = store.load(self.path)
        others = {row["subject"] for row in query.of(rows, "figure")} - {self.subject}
        if others:
            raise RidgelineError(f"{self.path} holds {', '.join(sorted(others))}; name another file for {self.subject}")
        for run in query.of(rows, "run"):
            if differs := [fact for fact in SAME if run["machine"][fact] != machine[fact]]:
                fact = differs[0]
                was, now = run["machine"][fact], machine[fact]
                raise RidgelineError(
                    f"{self.path} was measured with {fact} {was or 'none'}, and this machine has {now or 'none'}; "
                    "name another file"
                )
        return query.of(rows, "figure")


def _command() -> str | None:
    """How this script was called, if it is one of the examples and no verb."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or script.name == "__main__.py":
        return None
    return " ".join(["python", script.name, *sys.argv[1:]])


def recorded(subject: str, root: Path) -> dict[Path, list[Row]]:
    """The rows of a subject of each recorded GPU, by its file; empty if there is none. root: the source tree."""
    return {path: store.load(path) for path in sorted((root / "results" / subject).glob("*.jsonl"))}
