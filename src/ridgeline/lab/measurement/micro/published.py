"""What papers, guides and data sheets say of the A100 and of Hopper, beside which measured figures stand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

CARDS = ("a100", "hopper")


@cache
def published() -> dict[str, Any]:
    """{"sources": {short name: title}, "values": [[part, name, at, unit, card, value, short name], ...]}."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
    return found


def values(part: str, name: str, at: str, unit: str, card: str) -> list[tuple[float, str]]:
    """The published figures of a row in a unit on a card of CARDS, each with its source's short name."""
    place = [part, name, at, unit, card]
    return [(value, source) for *where, value, source in published()["values"] if where == place]


def sources() -> dict[str, str]:
    found: dict[str, str] = published()["sources"]
    return found
