"""The built site: its links lead somewhere, and its pages open from the file system without errors or a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import browser
import pages
from ridgeline import cli
from ridgeline.lab.presentation.site import verbs
from ridgeline.op import op_modules

SITE = pages.ROOT / "site"
HTML = sorted(p for p in SITE.rglob("*.html") if "_downloads" not in p.parts)
READ = [p for p in HTML if p.relative_to(SITE).parts[0] != "source"]
PARTS = 4  # of the pages, so that processes share them
needs_browser = pytest.mark.skipif(browser.executable() is None, reason=browser.INSTALL)


class Anchors(HTMLParser):
    """The addresses that a page links to or loads, and the names in it that addresses may end with."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and (name == "id" or (tag == "a" and name == "name")):
                self.names.add(value)


@pytest.fixture(scope="module")
def parsed() -> dict[Path, Anchors]:
    return {path: Anchors(path) for path in HTML}


def test_every_op_and_verb_has_its_page() -> None:
    wanted = [f"ops/{name}.html" for name in op_modules()] + [f"cli/{verb}.html" for verb in cli.VERBS]
    wanted += [f"cli/{verb}-{name}.html" for verb in cli.VERBS for name in verbs.below(verbs.parser(verb))]
    wanted += [f"from/{p.stem}.html" for p in (pages.ROOT / "docs/from").glob("*.md")]
    missing = [name for name in wanted if not (SITE / name).exists()]
    assert not missing


def test_links_lead_somewhere(parsed: dict[Path, Anchors]) -> None:
    wrong = []
    for path, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("https", "mailto", "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = unquote(parts.fragment)
            if parts.scheme or not target.exists():
                wrong.append(f"{path.relative_to(SITE)}: {link}")
            elif name and target in parsed and name not in parsed[target].names:
                wrong.append(f"{path.relative_to(SITE)}: {link} (no such place in the page)")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_nothing_is_loaded_from_a_network(parsed: dict[Path, Anchors]) -> None:
    for path in HTML:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"(https?:[^\"]*)\"", path.read_text())
        assert not loaded, path
    for style in SITE.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*['\"]?(https?:[^'\")]*)", style.read_text()), style


def test_equations_are_set_in_type() -> None:
    for name in op_modules():
        text = (SITE / f"ops/{name}.html").read_text()
        assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"' in text, name
        assert not re.search(r"<m[a-z]+>\\", text), f"{name}: a command of LaTeX was not understood"


def test_what_a_page_of_an_op_holds() -> None:
    for name in op_modules():
        text = (SITE / f"ops/{name}.html").read_text()
        for part in ("equation", "use", "when-it-serves-what", "the-ladder", "errors-and-memory", "notes"):
            assert f'id="{part}"' in text, f"{name} has no section {part}"


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.Browser() as opened:
        yield opened


@needs_browser
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_pages_open(chromium: browser.Browser, width: int, dark: bool, part: int) -> None:
    """Without errors on the console, without a request to a network, and no wider than the screen."""
    page = chromium.open(READ[part], width=width, dark=dark)
    page.call("Network.setBlockedURLs", urls=["http://*", "https://*"])
    wide = []
    for path in READ[part::PARTS]:
        page.call("Page.navigate", url=path.as_uri())
        assert page.until(browser.LOADED), path
        if page.js("document.documentElement.scrollWidth") > width:
            wide.append(str(path.relative_to(SITE)))
    assert not page.said()
    assert not [url for url in page.asked() if not url.startswith("file:")]
    assert not wide, "wider than the screen"


@needs_browser
def test_search_finds_an_op(chromium: browser.Browser) -> None:
    page = chromium.open(SITE / "search.html")
    page.call("Page.navigate", url=f"{(SITE / 'search.html').as_uri()}?q=rms_norm")
    assert page.until("[...document.querySelectorAll('#search-results a')].some(a => a.href.includes('ops/rms_norm'))")
    assert not page.said()


@needs_browser
def test_dark_and_light(chromium: browser.Browser) -> None:
    paper = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    page = chromium.open(SITE / "ops/rms_norm.html", dark=True)
    assert page.js(paper) < 60
    page.dark(False)
    assert page.until(f"{paper} > 200")
