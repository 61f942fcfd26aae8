"""Where a file of the source tree stands on the site, and Markdown whose links lead there."""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path, PurePosixPath

from ridgeline.lab.presentation.site.markdown import fence
from ridgeline.op import RidgelineError, op_modules

FRONT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
    ".cu": "cuda",
    ".cuh": "cuda",
    ".cpp": "cpp",
    ".toml": "toml",
    ".j2": "html+jinja",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


class Links:
    """The map from files of a source tree to pages of the site. `needed` holds the files that need a page of source."""

    def __init__(self, root: Path):
        self.root, self.ops = root, set(op_modules())
        self.needed: set[PurePosixPath] = set()

    def place(self, path: PurePosixPath, anchor: str = "") -> tuple[str, str]:
        """The page of a file of the source tree, and the anchor in it. Raises RidgelineError if there is no file."""
        name = str(path)
        if path.parent == PurePosixPath("docs/notes") and path.stem in self.ops:
            return f"ops/{path.stem}.md", anchor or "notes"
        if name == "docs/ops.md":
            return (f"ops/{anchor}.md", "") if anchor in self.ops else ("ops/index.md", "")
        if name == "docs/equations.md":
            return (f"ops/{anchor}.md", "equation") if anchor in self.ops else ("ops/index.md", "")
        if not (self.root / path).exists():
            raise RidgelineError(f"a page links to {name}, which does not exist")
        if name in ("docs/notes", "docs/notes/README.md"):
            return "notes/index.md", anchor
        if name == "docs/measured":
            return "measured/h100.md", anchor
        if name in FRONT:
            return FRONT[name], anchor
        if name == "docs/zh/glossary.md":
            return "glossary.md", anchor
        if path.parts[0] == "docs":
            return str(path.relative_to("docs")), anchor
        if path.parts[0] == "results":
            return name, ""
        if (self.root / path).is_dir():
            return "source/index.md", ""
        self.needed.add(path)
        return f"source/{name}.md", ""

    def source(self, path: PurePosixPath, page: str) -> str:
        """The address of the page of a source file, as seen from a page of the site."""
        return relpath(self.place(path)[0], PurePosixPath(page).parent)

    def moved(self, text: str, here: PurePosixPath, page: str) -> str:
        """A Markdown text of the source tree with its links as they are on the site's page; code is left alone."""

        def changed(match: re.Match[str]) -> str:
            target, _, anchor = match[2].partition("#")
            if "://" in target or target.startswith("mailto:"):
                return match[0]
            path = PurePosixPath(relpath(here.parent / target)) if target else here
            to, mark = self.place(path, anchor)
            if to == page:
                return f"{match[1]}#{mark}{match[3]}" if mark else match[0]
            return f"{match[1]}{relpath(to, PurePosixPath(page).parent)}{'#' * bool(mark)}{mark}{match[3]}"

        parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
        return "".join(part if n % 2 else LINK.sub(changed, part) for n, part in enumerate(parts))

    def pages(self) -> dict[str, str]:
        """A page with the source of each needed file, and the list of these pages."""
        made = {}
        for path in sorted(self.needed):
            language = LANGUAGES.get(path.suffix, "text")
            body = fence((self.root / path).read_text(), language)
            made[f"source/{path}.md"] = f"---\norphan: true\n---\n\n# {path.name}\n\n`{path}`\n\n{body}\n"
        listed = "\n".join(f"- [{path}]({path}.md)" for path in sorted(self.needed))
        made["source/index.md"] = f"---\norphan: true\n---\n\n# Source files\n\nThose that pages link to.\n\n{listed}\n"
        return made
