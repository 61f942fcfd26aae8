"""Writes the figures of the README, the lessons and other pages, docs/ops.md, docs/measured/ and the pictures.

python -m ridgeline.lab.presentation.readme            writes them
python -m ridgeline.lab.presentation.readme --check    names those that are not current; exit code 1 if there are any
"""

from __future__ import annotations

import sys
from pathlib import Path

from ridgeline.lab.analysis import course, roofline, sheets
from ridgeline.lab.analysis.lesson.pages import filled as filled_lesson
from ridgeline.lab.measurement import query, store
from ridgeline.lab.measurement.results import GPU, gpus, works
from ridgeline.lab.presentation import bars, front, measured, reference
from ridgeline.lab.presentation.served import Row, largest
from ridgeline.op import RidgelineError, registry

MARKS = ("headline", "table")  # the README's blocks, each between <!-- name --> and <!-- /name -->


def pages(root: Path, recorded: dict[Path, list[Row]]) -> dict[Path, str]:
    """The texts of a source tree's generated files, without the rooflines.

    recorded: the rows of each GPU, by its results. Raises RidgelineError if those that the README quotes are missing.
    """
    ops, first = registry(), root / f"results/{GPU}.jsonl"
    if first not in recorded:
        raise RidgelineError(f"{first} holds no recorded run; `ridgeline bench --record` on that GPU writes one")
    names = {path: query.one(rows, "run")["machine"]["gpu"] for path, rows in recorded.items()}
    timed = {path: {op for op, *_ in works(rows)} for path, rows in recorded.items()}
    noted = {path.stem for path in (root / "docs/notes").glob("*.md")}
    found = works(recorded[first])
    ten = front.ten(found, ops)
    links = {f"{path.stem}.md": (path.stem.upper(), timed[path]) for path in recorded}
    made = {
        root / "docs/bars.svg": bars.draw(ten, names[first]),
        root / "docs/ops.md": reference.page(ops, links, noted),
    }
    for path, rows in recorded.items():
        others = {f"{other.stem}.md": names[other] for other in recorded if other != path}
        made[root / f"docs/measured/{path.stem}.md"] = measured.page(path, rows, ops, others, noted)
    if lessons := recorded.get(root / "results/h200.jsonl"):
        for path in sorted((root / "docs/lessons").glob("*.md")):
            made[path] = filled_lesson(path.read_text(), lessons)
    for path, text in sheets.pages(root).items():
        made[path] = sheets.filled(made.get(path, text), root)
    guide = root / "docs/guide.md"
    if guide.exists():
        made[guide] = course.filled(made.get(guide, guide.read_text()), root)
    made |= sheets.pictures(root)
    steps = next((path for path in recorded if query.of(recorded[path], "model")), first)
    where = "" if steps == first else f" on one {names[steps]}"
    blocks = {
        "headline": front.headline(found, ops, names[first], query.of(recorded[steps], "model"), where),
        "table": front.table(ten, f"docs/measured/{first.stem}.md"),
    }
    readme = root / "README.md"
    return made | {readme: filled(readme.read_text(), blocks)}


def filled(text: str, blocks: dict[str, str]) -> str:
    """A text with what stands between its marks replaced. Raises RidgelineError if it lacks a mark."""
    for name in MARKS:
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not closed:
            raise RidgelineError(f"README.md needs the lines {begin.strip()} and {end}, between which its figures go")
        text = before + begin + blocks[name] + end + after
    return text


def rooflines(root: Path, recorded: dict[Path, list[Row]]) -> dict[Path, list[Row]]:
    """The rows that each GPU's picture is drawn from, by the picture: those of each op's largest case."""
    ops, drawn = registry(), {}
    for path, rows in recorded.items():
        shown = [row for rungs in largest(works(rows), ops).values() for row in rungs]
        facts = [query.one(rows, "run"), query.one(rows, "roof")]
        drawn[root / f"docs/measured/{path.stem}.svg"] = facts + shown
    return drawn


def stale(root: Path) -> list[str]:
    """The generated files of a source tree that are missing, not current, or of a GPU that is no longer recorded."""
    recorded = gpus(root / "results")
    texts, pictures = pages(root, recorded), rooflines(root, recorded)
    wrong = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    wrong += [p for p, rows in pictures.items() if not p.exists() or not roofline.current(p.read_text(), rows)]
    wrong += left_over(root, {*texts, *pictures})
    return sorted(str(path.relative_to(root)) for path in wrong)


def left_over(root: Path, made: set[Path]) -> list[Path]:
    """Files in docs/measured/ that are not among those made."""
    return [path for path in (root / "docs/measured").glob("*") if path not in made]


def main() -> int:
    """Writes the files, or with --check names those that are not current."""
    root = store.HOUSE
    if "--check" in sys.argv:
        wrong = stale(root)
        print(f"not current: {', '.join(wrong)}; write them with: make readme" if wrong else "all pages are current")
        return bool(wrong)
    recorded = gpus(root / "results")
    texts = pages(root, recorded)
    texts |= {path: roofline.svg(rows) for path, rows in rooflines(root, recorded).items()}
    for path, text in texts.items():
        roofline.write(path, text.encode())
    for path in left_over(root, set(texts)):
        path.unlink()
    print(f"wrote {', '.join(sorted(str(path.relative_to(root)) for path in texts))}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        sys.exit(f"ridgeline: {error}")
