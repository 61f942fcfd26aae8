"""Text as MyST Markdown: docstrings, code fences, tables, and links between pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from html import escape

SPECIAL = re.compile(r"([\\*_<>\[\]$#|~])")


def plain(text: str) -> str:
    """Text whose characters mean nothing to Markdown, but for code between backticks."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if n % 2 else SPECIAL.sub(r"\\\1", part) for n, part in enumerate(parts))


def fence(text: str, language: str = "", title: str = "") -> str:
    """A block of code. title: the caption above it."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    if title:
        return f"{ticks}{{code-block}} {language or 'text'}\n:caption: {title}\n\n{text.rstrip()}\n{ticks}"
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def fold(summary: str, body: str) -> str:
    """A part of a page that is folded until a reader opens it. summary: HTML."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[int] = ()) -> str:
    """A Markdown table, in a box that scrolls on a narrow screen. right: the columns of figures.

    Raises ValueError if a row has more or fewer cells than the head."""
    head, right, cells = list(head), set(right), [list(row) for row in rows]
    if wrong := next((row for row in cells if len(row) != len(head)), None):
        raise ValueError(f"a row has {len(wrong)} cells, and the head {len(head)}: {wrong}")
    rule = ["--:" if n in right else "---" for n in range(len(head))]
    lines = [head, rule, *([cell.replace("\n", " ") for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def docstring(text: str, parameters: Iterable[str] = (), link: Callable[[str], str] = str) -> str:
    """A docstring as Markdown.

    A line that begins with names of parameters and a colon begins an item; indented lines are a block of code. link
    turns a piece of code, backticks included, into a link where there is something to link to.
    """
    known, out, block = set(parameters), list[str](), list[str]()
    for line in itemised(text, known).splitlines():
        names = re.match(r"(\w+(?:, \w+)*): ", line)
        if line.startswith("    "):
            block.append(line[4:])
            continue
        if block and line.strip():
            out += ["", fence("\n".join(block).strip("\n")), ""]
        block = block + [""] if block and not line.strip() else []
        if names and set(names[1].split(", ")) <= known:
            code = ", ".join(f"`{name}`" for name in names[1].split(", "))
            out += ["", f"- {code}: {plain(line[names.end() :])}"]
        elif re.match(r"(Returns?|Raises|Yields) ", line):
            out += ["", plain(line)]
        else:
            inside = bool(out) and out[-1].startswith(("- ", "  ")) and line.strip()
            out.append(f"  {plain(line)}" if inside else plain(line))
    if block:
        out += ["", fence("\n".join(block).strip("\n"))]
    parts = re.split(r"(^```.*?^```$)", "\n".join(out).strip(), flags=re.MULTILINE | re.DOTALL)
    parts = [part if n % 2 else re.sub(r"\n{3,}", "\n\n", part) for n, part in enumerate(parts)]
    linked = [part if n % 2 else re.sub(r"`[^`\n]+`", lambda m: link(m[0]), part) for n, part in enumerate(parts)]
    return "".join(linked)


def itemised(text: str, known: set[str]) -> str:
    """A docstring in which each item of a parameter begins a line."""

    def broken(match: re.Match[str]) -> str:
        end = match[1].removesuffix(";")
        return f"{end}\n{match[2]}: " if set(match[2].split(", ")) <= known else match[0]

    return re.sub(r"([.);]) (\w+(?:, \w+)*): ", broken, text)


def html(text: str) -> str:
    """Text in HTML, with code between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def lowered(text: str, levels: int) -> str:
    """A page's text with its headings that many levels lower; code is left alone."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if n % 2 else re.sub(r"^(#+ )", "#" * levels + r"\1", part, flags=re.MULTILINE)
        for n, part in enumerate(parts)
    )
