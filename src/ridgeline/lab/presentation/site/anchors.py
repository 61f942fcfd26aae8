"""The anchors of headings on the site: on a Chinese page, those of the English one."""

from __future__ import annotations

import re

current: list[tuple[str, str]] = []  # of the page that is being read: its headings, and what the English ones are


def begin(headings: list[list[str]]) -> None:
    """Begins a page. headings: its headings with those of the English page, in order; empty on an English page."""
    current[:] = [(_bare(own), _bare(english)) for own, english in headings]


def slug(title: str) -> str:
    """Returns the anchor of a heading."""
    found = next((pair for pair in current if pair[0] == _bare(title)), None)
    if found is None:
        return slugified(title)
    current.remove(found)
    return slugified(found[1])


def slugified(title: str) -> str:
    """Returns the anchor that MyST makes of a heading, as GitHub does."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def _bare(title: str) -> str:
    """A heading without the marks of Markdown."""
    return title.replace("`", "").replace("*", "").replace("\\", "").strip()
