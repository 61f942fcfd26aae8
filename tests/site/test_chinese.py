"""The built site in Chinese: every page is there, says what is not translated, and leads to its English page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import pages
from ridgeline.lab import passages, translated
from ridgeline.lab.presentation import catalogues
from ridgeline.lab.presentation.site import anchors, chinese
from ridgeline.translation import PLACE, read

SITE, SOURCES, FOLDER = pages.ROOT / "site", pages.ROOT / "build/site-zh", pages.ROOT / "docs/zh"
ENGLISH = sorted(
    path.relative_to(SITE)
    for path in SITE.rglob("*.html")
    if path.relative_to(SITE).parts[0] not in ("zh", "source", "_downloads", "_static")
)


def missing() -> dict[str, dict[str, int]]:
    """The messages without a translation on each page, without those of ops' notes, which are pages of their own."""
    found = json.loads((SOURCES / "_missing.json").read_text())
    shared = translated.shared(FOLDER)
    notes = {
        key
        for name, path in catalogues.sources(pages.ROOT).items()
        if name.startswith("notes/")
        for passage in passages.passages(path.read_text())
        for key in translated.unknown(passage, shared)
    }
    return {name: {key: n for key, n in keys.items() if key not in notes} for name, keys in found.items()}


def test_every_page_is_there_in_both_languages() -> None:
    wrong = []
    for path in ENGLISH:
        there = SITE / "zh" / path
        text = there.read_text() if there.exists() else ""
        if '<html class="no-js" lang="zh-CN"' not in text or 'hreflang="en"' not in text:
            wrong.append(str(path))
        if 'hreflang="zh-CN"' not in (SITE / path).read_text():
            wrong.append(f"{path} does not lead to its Chinese page")
    assert not wrong, wrong[:10]


@pytest.mark.parametrize("kind", catalogues.GENERATED)
def test_generated_pages_are_translated_as_declared(kind: str) -> None:
    """What machines write depends on the machine a little, so an open kind may lack less than is said."""
    keys = {key for name, found in missing().items() if Path(name).match(kind) for key in found}
    assert len(keys) <= catalogues.declared(FOLDER)[kind], sorted(keys)[:10]


def test_an_open_page_says_so() -> None:
    names = {catalogue: page for page, catalogue in chinese.FRONT.items()}
    for name, count in catalogues.declared(FOLDER).items():
        page = SITE / "zh" / f"{names.get(name, name)}.html"
        if page.exists() and not name.endswith("/*"):
            assert (translated.OPEN in page.read_text()) == bool(count), name


def test_anchors_are_the_english_ones() -> None:
    from myst_parser.slugs import github_slugify

    for title in ("The law", "`f(x)`, twice", "What's left? 3 things", "A_b - c"):
        assert anchors.slugified(title) == github_slugify(title)
    page = (SITE / "zh/ops/softmax.html").read_text()
    for part in ("equation", "use", "the-ladder", "errors-and-memory", "notes"):
        assert f'id="{part}"' in page


def test_catalogues_are_read_as_babel_reads_them() -> None:
    from babel.messages.pofile import read_po

    for path in sorted(FOLDER.rglob("*.po")):
        with path.open("rb") as file:
            theirs = {m.id: m.string for m in read_po(file) if m.id}
        assert theirs == {entry.source: entry.translation for entry in read(path)}, path


def test_no_place_is_left_in_a_page() -> None:
    for path in sorted(SOURCES.rglob("*.md")):
        text = re.sub(r"`+[^`]*`+", "", re.sub(r"^(`{3,}).*?^\1", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))
        assert not [line for line in text.splitlines() if PLACE.search(line) and re.search(r"[\u4e00-\u9fff]", line)], (
            path
        )
