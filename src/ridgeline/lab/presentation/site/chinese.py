"""The sources of the site in Chinese, from those in English and the catalogues.

python -m ridgeline.lab.presentation.site.chinese build/site build/site-zh
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from os.path import relpath
from pathlib import Path, PurePosixPath

from ridgeline import cli
from ridgeline.lab import passages, translated
from ridgeline.lab.measurement import store
from ridgeline.lab.presentation.site.markdown import plain
from ridgeline.op import op_modules
from ridgeline.translation import Catalogue, commands, read

FRONT = {"index": "README", "contributing": "CONTRIBUTING", "changelog": "CHANGELOG", "notes/index": "notes/README"}
HEADINGS, MISSING = "_headings.json", "_missing.json"
GLOSSARY = "glossary"
LINK = re.compile(r"\[((?:[^\[\]`\n]|`[^`\n]*`)*)\]\(((?:\.\./)*)(source/[^)\s]*)\.md(#[^)\s]*)?\)")
# What stays: a case's name, a list of links to ops, and an op's formula.
CASE = re.compile(
    r"(?:<small>|NVIDIA |(?:rows|columns|middle) (?:of )?)*\{0\}(?:[^.:;]|&gt;)*"
    r"|(?:\[[\w{}]+\]\(\{\d+\}\)[:, ]*)+(?:y = [^ ]+ [^ ]+ [^ ]+)?"
)
Missing = dict[str, Counter[str]]


def write(source: Path, out: Path, root: Path) -> Missing:
    """Writes the Chinese sources of the site in place of what is there; returns the messages without a translation."""
    folder, missing, slugs = root / "docs/zh", Missing(), dict[str, list[tuple[str, str]]]()
    shutil.rmtree(out, ignore_errors=True)
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        here = path.relative_to(source)
        if here.parts[0] == "source":
            continue
        at = out / here
        at.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copy(path, at)
            continue
        name, text = str(here.with_suffix("")), path.read_text()
        lacks = list[str]()
        made = text if name == GLOSSARY else page(text, name, folder, lacks)
        if lacks:
            keys = [key for p in lacks for key in translated.unknown(p, translated.shared(folder))]
            missing[name] = Counter(key for key in keys if not CASE.fullmatch(key))
            if not name.startswith(("ops/", "api/")) or name.endswith("/index"):
                made = noticed(made)
        slugs[name] = list(zip(passages.headings(made), passages.headings(text), strict=True))
        at.write_text(to_english_sources(made, name))
    (out / HEADINGS).write_text(json.dumps(slugs, ensure_ascii=False))
    (out / MISSING).write_text(json.dumps(missing, ensure_ascii=False))
    return missing


def page(text: str, name: str, folder: Path, missing: list[str]) -> str:
    """Returns a page of the site in Chinese. missing: takes the passages that no catalogue holds."""
    own, shared = own_catalogue(name, folder), translated.shared(folder)
    if name.startswith(("index", "changelog")):
        own, shared = Catalogue(), own | shared
    change = translated.translator(own, shared, missing)
    return passages.changed(text, with_default(change) if name.startswith("cli/") else change)


def with_default(change: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a change of an option's text that leaves what stands behind it: its default, or that it is required."""

    def changed(passage: str) -> str:
        if item := re.fullmatch(r"(\[`[^`]+`\]\([^)]*\)): (.+?)\.", passage):
            return f"{item[1]}：{change(item[2])}。"
        text, default, given, required = re.fullmatch(
            r"(.*?)( \(default: ((?:[^()]|\([^()]*\))*)\)| (\(required\)))?", passage, re.DOTALL
        ).groups()  # type: ignore[union-attr]
        if not default or f"{text}{default}" in of_commands().texts:
            return change(passage)
        return change(text) + ("（必需）" if required else f"（默认：{given}）")

    return changed


def own_catalogue(name: str, folder: Path) -> Catalogue:
    """Returns what a page uses beside the catalogues of sentences: of an op's page, that of its notes."""
    if name.startswith("cli/"):
        return of_commands()
    kind, _, stem = name.partition("/")
    if kind == "ops" and stem in op_modules():
        name = f"notes/{stem}"
    return Catalogue.of(read(folder / f"{FRONT.get(name, name)}.po"))


@cache
def of_commands() -> Catalogue:
    """Returns the command line's catalogue as the pages of verbs write its texts."""
    texts = {plain(text): plain(said) for text, said in commands().texts.items()}
    for text, said in commands().texts.items():
        texts[plain(text[:1].upper() + text[1:]) + "."] = plain(said) + "。"
    for verb, (_, line) in cli.VERBS.items():
        if found := commands().texts.get(line):
            texts[f"[`ridgeline {verb}`]({{0}}): {plain(line)}."] = f"[`ridgeline {verb}`]({{0}})：{plain(found)}。"
    return Catalogue(texts)


def noticed(text: str) -> str:
    """Returns a page with the line below its heading that says that it is not all translated."""
    return re.sub(r"^(# .*\n)", lambda m: f"{m[1]}\n*{translated.OPEN}*\n", text, count=1, flags=re.MULTILINE)


def to_english_sources(text: str, name: str) -> str:
    """Returns a page whose links to pages of source code lead to the English site, which alone has them."""

    def anchor(match: re.Match[str]) -> str:
        target = relpath(match[3], PurePosixPath("zh", name).parent)
        return f'<a class="reference internal" href="{target}.html{match[4] or ""}">{match[1]}</a>'

    parts = re.split(r"(^(?:`{3})[^`{\n]*\n.*?^`{3}$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if n % 2 else LINK.sub(anchor, part) for n, part in enumerate(parts))


if __name__ == "__main__":
    found = write(Path(sys.argv[1]), Path(sys.argv[2]), store.HOUSE)
    print(f"wrote {sys.argv[2]}; {sum(map(len, found.values()))} messages of {len(found)} pages are not translated")
