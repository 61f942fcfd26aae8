"""List the lessons, open one, or check your own kernel against its exercise."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SECONDS = 240  # that a learner's file may take


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", nargs="?", type=int, metavar="N", help="open this lesson (default: list them)")
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="a Python file with a function named as the exercise asks: test it, compile it, time it on a GPU",
    )
    parser.add_argument("--json", action="store_true", help="print the list, or what the check found, as JSON")


def main(options: argparse.Namespace) -> int:
    import json

    from ridgeline.lab.analysis.lesson import pages
    from ridgeline.op import RidgelineError

    if options.check and options.number is None:
        raise RidgelineError("--check needs the number of a lesson, as in: ridgeline lesson 3 --check my_kernel.py")
    if options.check:
        return _check(options)
    if options.number is None:
        rows = [{"number": n, "title": pages.title(t), "about": pages.summary(t)} for n, t in _texts().items()]
        if options.json:
            print(json.dumps(rows))
        else:
            _list(rows)
        return 0
    text = pages.plain(pages.lesson(options.number))
    if options.json:
        print(json.dumps({"number": options.number, "title": pages.title(text), "text": text}))
    else:
        _open(text)
    return 0


def _texts() -> dict[int, str]:
    from ridgeline.lab.analysis.lesson import pages

    return {number: pages.read(path) for number, path in pages.lessons().items()}


def _list(rows: list[Row]) -> None:
    from ridgeline.lab.analysis.lesson.exercises import EXERCISES
    from ridgeline.lab.analysis.lesson.wording import say
    from ridgeline.lab.tables import console, print_table

    lines = [
        (
            f"{row['number']}",
            row["title"],
            f"{EXERCISES[row['number']].signature}" if row["number"] in EXERCISES else "",
        )
        for row in rows
    ]
    out = console()
    print_table(say("list"), ["", say("name"), say("exercise")], [], lines, out)
    out.print(say("list-more"), markup=False)


def _open(text: str) -> None:
    """Prints a lesson: in a terminal page by page, into a file or a pipe as plain text."""
    from rich.markdown import Markdown

    from ridgeline.lab.tables import console

    out = console()
    if out.is_terminal:
        with out.pager(styles=True):
            out.print(Markdown(text))
    else:
        out.print(Markdown(text))


def _check(options: argparse.Namespace) -> int:
    """Returns 1 if a test fails or the kernel does not compile, else 0."""
    import json

    from ridgeline.lab.analysis.lesson import checking
    from ridgeline.lab.analysis.lesson.exercises import EXERCISES
    from ridgeline.lab.analysis.lesson.wording import say
    from ridgeline.op import RidgelineError

    if options.number not in EXERCISES:
        numbers = ", ".join(map(str, EXERCISES))
        raise RidgelineError(say("unexercised", number=options.number, numbers=numbers))
    if not options.check.is_file():
        raise RidgelineError(say("file", path=options.check, error="no such file"))
    found = checking.check(options.number, options.check, SECONDS)
    if options.json:
        print(json.dumps(found))
    else:
        checking.show(options.number, found)
    return int(not found["ok"])
