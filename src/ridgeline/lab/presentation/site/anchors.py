"""The anchors of headings on the site: on a Chinese page, those of the English one."""

from __future__ import annotations

current: list[tuple[str, str]] = []  # of the page that is being read: its headings, and what the English ones are


def begin(headings: list[list[str]]) -> None:
    """Begins a page. headings: its headings with those of the English page, in order; empty on an English page."""
    current[:] = [(_bare(own), _bare(english)) for own, english in headings]


def slug(title: str) -> str:
    """Returns the anchor of a heading."""
    from myst_parser.mdit_to_docutils.base import default_slugify  # type: ignore[import-not-found]

    found = next((pair for pair in current if pair[0] == _bare(title)), None)
    if found is None:
        return str(default_slugify(title))
    current.remove(found)
    return str(default_slugify(found[1]))


def _bare(title: str) -> str:
    """A heading without the marks of Markdown."""
    return title.replace("`", "").replace("*", "").replace("\\", "").strip()
