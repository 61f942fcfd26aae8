"""What people wrote about an op: its equations, its docstring and its notes, as parts of its page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath

from ridgeline.lab.presentation.reference import computed, signature
from ridgeline.lab.presentation.site.links import Links
from ridgeline.lab.presentation.site.markdown import docstring, lowered
from ridgeline.op import Op, RidgelineError, op_modules


@cache
def equations(root: Path) -> dict[str, str]:
    """The section of each op in docs/equations.md. Raises RidgelineError if a name stands there twice."""
    parts = re.split(r"^## (\w+)$", (root / "docs/equations.md").read_text(), flags=re.MULTILINE)[1:]
    names, texts = parts[::2], parts[1::2]
    if len(set(names)) < len(names):
        raise RidgelineError("docs/equations.md has two sections of one name")
    return dict(zip(names, (text.strip() for text in texts), strict=True))


def lead(op: Op) -> str:
    """What an op computes, in a line whose characters mean nothing to Markdown."""
    return docstring(computed(op))


def use(op: Op, root: Path, links: Links, here: str) -> str:
    """The signature and the docstring, as an entry that other pages can link to."""
    path = Path(inspect.getfile(op.function))
    text = inspect.cleandoc(op.function.__doc__ or "")
    body = docstring(text, inspect.signature(op.function).parameters, linked_op(op.name, ""))
    declared = " ".join(signature(path.read_text(), op.name).split()).replace("( ", "(").replace(", )", ")")
    source = links.source(PurePosixPath(path.relative_to(root)), here) if path.is_relative_to(root) else ""
    more = f"\n\n[Source file]({source})" if source else ""
    return f"````{{py:function}} {declared}\n:module: ridgeline\n\n{body}\n````{more}"


def linked_op(own: str, folder: str) -> Callable[[str], str]:
    """Makes a link of another op's name between backticks. folder: where the pages of ops are, as seen from here."""
    ops = set(op_modules()) - {own}

    def link(code: str) -> str:
        name = code.strip("`").removeprefix("ridgeline.")
        return f"[{code}]({folder}{name}.md)" if name in ops else code

    return link


def notes(op: Op, root: Path, links: Links, here: str) -> str:
    """The op's notes below the page's own headings."""
    path = root / f"docs/notes/{op.name}.md"
    if not path.exists():
        return "There are no notes yet."
    text = links.moved(path.read_text(), PurePosixPath(f"docs/notes/{op.name}.md"), here)
    return lowered(re.sub(r"\A# .*\n", "", text).strip(), 1)
