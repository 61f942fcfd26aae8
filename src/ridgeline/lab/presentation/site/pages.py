"""All pages of the site: those written by hand in docs/, moved, and those of ops, modules and verbs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path, PurePosixPath
from typing import Any

from ridgeline.lab.presentation.measured import families
from ridgeline.lab.presentation.site import api, op_page, prose, verbs
from ridgeline.lab.presentation.site.links import Links
from ridgeline.op import Op, get, registry

# The side bar: captions, and the pages below each, in order. A page of docs/ that is not named here goes last.
BAR = {
    "Start": ["guide", "add_a_kernel", "bindings", "measuring", "mamf"],
    "Lessons": ["lessons/*"],
    "Reference": ["ops/index", "api/index", "cli/index"],
    "Coming from": ["from/*"],
    "Measured": ["measured/*"],
    "How it is built": ["design", "attention", "compiler", "notes/index", "contributing", "changelog"],
}
Row = dict[str, Any]
SWITCH = " [中文](README.zh.md)"  # the README's link to itself in Chinese; every page of the site has its own
NOT_PAGES = ("ops.md", "equations.md")  # of docs/: what they hold is on the pages of ops


def write(root: Path, out: Path, jobs: int, seconds: float, checks: Callable[[], list[Row]]) -> None:
    """Writes all pages of a source tree into a folder, in place of what is there.

    seconds: the time for compiling kernels whose figures are not recorded. checks: gives the errors of ops that no GPU
    has timed on record.
    """
    shutil.rmtree(out, ignore_errors=True)
    links, ops = Links(root), registry()
    made = by_hand(root, links) | api.pages(ops) | verbs.pages()
    made["ops/index.md"] = index_of_ops(ops)
    until = time.monotonic() + seconds
    errors = checks()
    parts = [(list(ops)[n::jobs], root, until, errors) for n in range(jobs)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for texts, needed in pool.map(some_ops, *zip(*parts, strict=True)):
            made |= texts
            links.needed |= needed
    made["index.md"] += side_bar(made)
    made |= links.pages()
    for name, text in made.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in ("static", "templates"):
        shutil.copytree(root / "docs/site" / folder, out / "_site" / folder)
    shutil.copy(root / "docs/site/conf.py", out)
    for picture in (*(root / "docs").glob("**/*.svg"), *(root / "results").glob("**/*.jsonl")):
        at = out / picture.relative_to(root / "docs" if picture.suffix == ".svg" else root)
        at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, at)


def some_ops(
    names: list[str], root: Path, until: float, errors: list[Row]
) -> tuple[dict[str, str], set[PurePosixPath]]:
    """The pages of some ops, and the source files that they link to; runs in a process of its own."""
    links = Links(root)
    made = {
        f"ops/{name}.md": op_page.page(get(name), root, links, until, [row for row in errors if row["op"] == name])
        for name in names
    }
    return made, links.needed


def by_hand(root: Path, links: Links) -> dict[str, str]:
    """The pages written by hand, and those that `make readme` writes, with their links as they are on the site."""
    made = {}
    files = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for path in (*files, *sorted((root / "docs").glob("**/*.md"))):
        here = PurePosixPath(path.relative_to(root))
        own = here.parent == PurePosixPath("docs/notes") and here.stem in links.ops
        chinese = here.parts[:2] == ("docs", "zh") and here.name != "glossary.md"
        if own or chinese or (here.parent == PurePosixPath("docs") and here.name in NOT_PAGES):
            continue
        page = links.place(here)[0]
        made[page] = links.moved(path.read_text().replace(SWITCH, ""), here, page)
    rest = sorted(page for page in made if page.startswith("notes/") and page != "notes/index.md")
    made["notes/index.md"] += "\n\n" + verbs.toctree([PurePosixPath(page).stem for page in rest]) + "\n"
    return made


def index_of_ops(ops: dict[str, Op]) -> str:
    """The list of all ops by family."""
    text = [
        "# All ops",
        "A page for each function: its equation, its use, its ladder of implementations and its notes.",
    ]
    for family, members in families(ops.values()):
        text += [
            f"## {family.capitalize()}",
            "\n".join(f"- [{op.name}]({op.name}.md): {prose.lead(op)}" for op in members),
        ]
        text.append(verbs.toctree([op.name for op in members]))
    return "\n\n".join(text) + "\n"


def side_bar(made: dict[str, str]) -> str:
    """The lists of pages for the side bar."""
    text, seen = [], {"index.md"}
    top = [name for name in made if name.count("/") == 0 or name.startswith(("from/", "lessons/", "measured/"))]
    for caption, names in BAR.items():
        found = []
        for name in names:
            matching = [n for n in sorted({*top, *(f"{x}.md" for x in names)}) if PurePosixPath(n).match(f"{name}.md")]
            found += [n for n in matching if n in made]
        seen |= set(found)
        text.append((caption, found))
    rest = [name for name in top if name not in seen]
    text[-1][1].extend(rest)
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
        + "\n".join(n.removesuffix(".md") for n in names)
        + "\n```\n"
        for caption, names in text
        if names
    )
