"""writes what the README and docs/ show of a recorded GPU: its roofline, and the measured tables

python -m ridgeline.lab.readme            writes README.md, docs/measured.md and docs/roofline.svg from results/h100
python -m ridgeline.lab.readme --check    exit code 1 where the tables are not those of the newest rows
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from ridgeline.lab import roofline, store, units, verdict
from ridgeline.op import RidgelineError

Row = dict[str, Any]
Work = tuple[str, str, str, str]
GPU = "h100"
KERNELS = ("cuda", "triton", "gluon")
MARKED = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)


def newest(folder: Path) -> list[Row]:
    """The rows of the newest recorded run of a GPU, and of older ones for the ops that it did not time."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        timed = {row["op"] for row in verdict.of(rows, "bench")}
        rows += [row for row in store.load(path) if not timed or (row["type"] == "bench" and row["op"] not in timed)]
    if not rows:
        raise RidgelineError(f"{folder} holds no recorded run; `ridgeline bench --record` on that GPU writes one")
    return rows


def works(rows: list[Row]) -> dict[Work, list[Row]]:
    """The timed rungs of each piece of work, fastest first."""
    found: dict[Work, list[Row]] = {}
    for row in verdict.of(rows, "bench"):
        if row["status"] == "ok":
            found.setdefault(verdict.key(row), []).append(row)
    return {work: sorted(rungs, key=lambda r: r["seconds"]["median"]) for work, rungs in found.items()}


def largest(found: dict[Work, list[Row]]) -> dict[Work, list[Row]]:
    """Of each op, dtype and direction the case with the most bytes; the first of those that are as large."""
    chosen: dict[tuple[str, str, str], Work] = {}
    for work, rungs in found.items():
        kind = (work[0], *work[2:])
        if kind not in chosen or rungs[0]["bytes"] > found[chosen[kind]][0]["bytes"]:
            chosen[kind] = work
    return {work: found[work] for work in found if work in chosen.values()}


def table(found: dict[Work, list[Row]]) -> str:
    """A Markdown table: for each piece of work the fastest kernel of ours beside the fastest peer."""
    lines = [
        "| op | case | | fastest here | time | rate | of the roof | fastest peer | its share |",
        "|---|---|---|---|--:|--:|--:|---|--:|",
    ]
    for (op, case, dtype, direction), rungs in found.items():
        ours = next((r for r in rungs if r["kind"] in KERNELS and not r["peer"]), None)
        peer = next((r for r in rungs if r["peer"]), None)
        if ours is None:
            continue
        figures = [f"`{ours['impl']}`", units.seconds(ours["seconds"]["median"]), roofline.rate(ours), f"**{ours['share']:.2f}**"]
        beside = [f"`{peer['impl']}`", f"{peer['share']:.2f}"] if peer else ["none", ""]
        lines.append("| " + " | ".join([f"`{op}`", case, f"{dtype} {direction}", *figures, *beside]) + " |")
    return "\n".join(lines) + "\n"


def pages(folder: Path, readme: str) -> tuple[str, str]:
    """The text of README.md and of docs/measured.md."""
    rows = newest(folder)
    machine, roof, found = verdict.one(rows, "run")["machine"], verdict.one(rows, "roof"), works(rows)
    head = (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, PyTorch {machine['torch']}, Triton {machine['triton']}. "
        f"Its roof in that run: copy {units.scaled(roof['copy']['median'], 'B/s')}, matrix products "
        + ", ".join(f"{dtype} {units.scaled(rate['median'], 'FLOP/s')}" for dtype, rate in roof["matmul"].items())
        + ".\n"
    )
    body = (
        "# Measured\n\nWritten by `make readme` from the newest rows in `results/`; the clock is described in [design.md](design.md).\n\n"
    )
    short = head + "\n" + table(largest(found)) + "\nEvery case: [docs/measured.md](docs/measured.md).\n"
    return MARKED.sub(lambda _: short, readme), body + head + "\n" + table(found)


def main() -> int:
    """Writes the pages and the picture, or with --check says whether the pages are current."""
    folder, readme, measured = store.HOUSE / "results" / GPU, store.HOUSE / "README.md", store.HOUSE / "docs/measured.md"
    texts = dict(zip((readme, measured), pages(folder, readme.read_text()), strict=True))
    if "--check" in sys.argv:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        print(f"not those of the newest rows: {', '.join(stale)}; write them with: make readme" if stale else "the tables are current")
        return bool(stale)
    for path, text in texts.items():
        roofline.write(path, text.encode())
    roofline.render(newest(folder), measured.parent)
    print(f"wrote {readme}, {measured} and {measured.parent}/roofline.svg")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        sys.exit(f"ridgeline: {error}")
