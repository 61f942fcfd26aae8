"""Figures, tables and flags as text, for the verbs that plan and simulate."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence

PREFIXES = {"k": 2**10, "m": 2**20, "g": 2**30}


def figure(x: float, digits: int = 3) -> str:
    """Returns a number with at most three digits that count, with commas: no prediction is better than that."""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else str(x)
    places = digits - 1 - math.floor(math.log10(abs(x)))
    return f"{round(x, places):,.{max(0, places)}f}"


def seconds(x: float) -> str:
    """Returns seconds with their unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if x >= scale:
            return f"{figure(x / scale)} {unit}"
    return "0 s" if x <= 0 else f"{figure(x / 1e-6)} us"


def percent(x: float) -> str:
    """Returns a share as per cent, without decimals above 10."""
    return f"{100 * x:.0f}%" if abs(x) >= 0.0995 or not x else f"{100 * x:.1f}%"


def giga(x: float) -> str:
    """Returns bytes in GB."""
    return f"{figure(x / 1e9, 2 if x < 1e11 else 3)} GB"


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table with aligned columns, the first `left` of them to the left."""
    widths = [max(len(row[n]) for row in [names, *rows]) for n in range(len(names))]
    lines = [
        [c.ljust(w) if n < left else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths))] for row in (names, *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def count(text: str) -> int:
    """A flag's type: a whole number of 1 or more; 4M is 4 x 2^20, 64k is 64 x 2^10."""
    found = re.fullmatch(r"([\d_,]*\.?\d+)\s*([kKmMgG]?)", text.strip())
    value = float(found[1].replace(",", "").replace("_", "")) * PREFIXES.get(found[2].lower(), 1) if found else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"takes a whole number of 1 or more, as 4096, 64k or 4M, and got {text!r}")
    return int(value)


def positive(text: str) -> float:
    """A flag's type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"takes a number above 0, and got {text!r}")
    return value


def gpus_of(n: int) -> str:
    """Returns a number of GPUs in words."""
    return f"{n:,} GPU{'s' * (n != 1)}"


def wrapped(text: str, width: int) -> list[str]:
    """Returns text in lines of at most `width` characters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line] if line else lines
