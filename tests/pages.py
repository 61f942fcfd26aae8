"""The code blocks of the hand-written pages, with the marks that say how the tests run them.

A mark is an HTML comment directly before a block, which no reader sees:

    <!-- gpu -->                     it needs a GPU; the tests list it
    <!-- not run: reason -->         the tests list it with the reason
    <!-- with: "cuda"="cpu" -->      it runs with these texts replaced
    <!-- setup: code -->             Python that runs before it
    <!-- file: path -->, <!-- append: path -->     its text is written to a file of a copy of the source tree
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "ops.md"),
    *sorted((ROOT / "docs/from").glob("*.md")),
    *sorted((ROOT / "docs/notes").glob("*.md")),
]
COMMAND = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:ridgeline|make|git|pip|\.venv/bin/python|python3?) .*)$")
FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?:(?: {4}[^\n]*)?\n)*? {4}[^\n]*\n(?:(?: {4}[^\n]*)?\n)*")
MARK = re.compile(r"<!-- (gpu|not run|with|setup|file|append)(?::\s*(.*?))?\s*-->\n+\Z", re.DOTALL)


@dataclass
class Block:
    """A block of code: where it stands, its language ("" for commands), its text and its marks."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The command lines, without comments."""
        found = [match[1] for line in self.text.splitlines() if (match := COMMAND.match(line.strip()))]
        return [re.split(r"\s{2,}#|\s# ", command)[0].strip() for command in found]

    @property
    def runs(self) -> bool:
        """Whether the tests run it: Python or commands, and no mark against it."""
        return self.is_code and not {"gpu", "not run"} & set(self.marks)

    @property
    def is_code(self) -> bool:
        return self.language == "python" or (self.language in ("", "sh", "console") and bool(self.commands))

    def replaced(self, text: str) -> str:
        """A text of the block with the replacements of its mark `with`."""
        for pair in shlex.split(self.marks.get("with", ""), posix=True):
            old, _, new = pair.partition("=")
            text = text.replace(old, new)
        return text


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page in order: fenced ones, and indented ones that hold commands."""
    text = page.read_text()
    blank = FENCE.sub(lambda m: re.sub(r"[^\n]", "x", m[0]), text)
    found = [(m.start(), m["language"].strip(), m["text"]) for m in FENCE.finditer(text)]
    for match in INDENTED.finditer(blank):
        body = text[match.start() : match.end()]
        if any(COMMAND.match(line.strip()) for line in body.splitlines()):
            found.append((match.start(), "", "\n".join(line[4:] for line in body.splitlines())))
    return [
        Block(page, text.count("\n", 0, start) + 1, language, body, marks(text[:start]))
        for start, language, body in sorted(found)
    ]


def marks(before: str) -> dict[str, str]:
    """The marks that end a text."""
    found: dict[str, str] = {}
    while match := MARK.search(before[before.rfind("<!-- ") :]):
        found[match[1]] = match[2] or ""
        before = before[: before.rfind("<!-- ")]
    return found


def everything() -> list[Block]:
    """The code blocks of all pages."""
    return [block for page in PAGES for block in blocks(page)]
