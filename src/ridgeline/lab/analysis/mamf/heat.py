"""Heat maps of rates over the shapes of products: as a table for a terminal, and as an SVG file."""

from __future__ import annotations

from html import escape
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.analysis.mamf.shapes import Shape

SHADES = ("#f3f1fb", "#d9d4f3", "#b9b1ea", "#958be0", "#7468d4", "#4f52c9", "#37399b", "#22246b")
CELL, LEFT, TOP = 34, 70, 64
MOST = 16  # columns of the table in a terminal


def plane(rates: dict[Shape, float]) -> tuple[list[int], list[int], dict[tuple[int, int], float]]:
    """The rows m, the columns n, and the best rate over k of each cell."""
    cells: dict[tuple[int, int], float] = {}
    for (m, n, _), rate in rates.items():
        cells[m, n] = max(rate, cells.get((m, n), 0.0))
    return sorted({m for m, _ in cells}), sorted({n for _, n in cells}), cells


def table(rates: dict[Shape, float]) -> tuple[list[str], list[list[Any]]]:
    """The heads and the rows of a table of percentages of the best rate; every other side if there are too many."""
    from rich.text import Text

    rows, columns, cells = plane(rates)
    best = max(cells.values())
    rows, columns = (some[:: -(-len(some) // MOST)] for some in (rows, columns))
    made = []
    for m in rows:
        line: list[Any] = [str(m)]
        for n in columns:
            if (m, n) in cells:
                share = cells[m, n] / best
                line.append(Text(f"{share:.0%}", style="green" if share > 0.9 else "yellow" if share > 0.7 else "red"))
            else:
                line.append("")
        made.append(line)
    return ["m \\ n", *map(str, columns)], made


def svg(rates: dict[Shape, float], title: str) -> str:
    """The text of an SVG: a square for each m and n, darker the nearer to the best rate."""
    rows, columns, cells = plane(rates)
    best = max(cells.values())
    width, height = LEFT + CELL * max(len(columns), 12) + 20, TOP + CELL * len(rows) + 70
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'style="background:#fff;font:11px system-ui,sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<text x="16" y="24" style="font-size:15px">{escape(title)}</text>',
        f'<text x="16" y="44">rows m, columns n; best {escape(units.scaled(best, "FLOP/s"))}</text>',
    ]
    for y, m in enumerate(rows):
        body.append(f'<text x="{LEFT - 8}" y="{TOP + y * CELL + 21}" text-anchor="end">{m}</text>')
        for x, n in enumerate(columns):
            if (m, n) in cells:
                share = cells[m, n] / best
                words = f"{m} x {n}: {units.scaled(cells[m, n], 'FLOP/s')}, {units.percent(share)} of the best"
                at = f'x="{LEFT + x * CELL}" y="{TOP + y * CELL}" width="{CELL - 1}" height="{CELL - 1}"'
                body.append(f'<rect {at} fill="{_shade(share)}"><title>{words}</title></rect>')
                ink = "#fff" if share > 0.8 else "#1f2328"
                place = f'x="{LEFT + x * CELL + CELL / 2 - 0.5:g}" y="{TOP + y * CELL + 21}"'
                body.append(f'<text {place} text-anchor="middle" fill="{ink}">{100 * share:.0f}</text>')
    for x, n in enumerate(columns):
        if x % max(1, len(columns) // 8) == 0:
            below = TOP + CELL * len(rows) + 16
            body.append(f'<text x="{LEFT + x * CELL + CELL / 2:g}" y="{below}" text-anchor="middle">{n}</text>')
    body.append(f'<text x="16" y="{height - 14}">Numbers are percentages of the best rate.</text></svg>')
    return "\n".join(body) + "\n"


def _shade(share: float) -> str:
    """The colour of a share of the best rate; half of the best and less is the lightest."""
    return SHADES[min(len(SHADES) - 1, max(0, int((share - 0.5) * 2 * len(SHADES))))]
