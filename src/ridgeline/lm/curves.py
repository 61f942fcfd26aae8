"""Curves over steps: as text for a terminal, and as one SVG picture that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#64748b", "#0891b2", "#be185d")
MARKS = "*o+x"
STYLE = (  # of these pictures alone, since a page may hold several
    "<style>.curves{background:#fff;font:12px system-ui,sans-serif}"
    ".curves text{fill:#334155}.curves .grid{stroke:#e2e8f0}"
    "@media(prefers-color-scheme:dark){.curves{background:#0f172a}"
    ".curves text{fill:#cbd5e1}.curves .grid{stroke:#334155}}</style>"
)


def bounds(curves: dict[str, Points]) -> tuple[float, float, float, float]:
    """Returns the smallest and largest x and y of all finite points, a little apart if they are equal."""
    points = [p for curve in curves.values() for p in curve if math.isfinite(p[1])] or [(0.0, 0.0)]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), max(ys)
    pad = 0 if high > low else max(abs(high), 1.0) / 2
    return min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, low - pad, high + pad


def text(curves: dict[str, Points], width: int = 72, height: int = 12) -> str:
    """Returns curves as lines of text: each has its own mark, and the first is on top."""
    left, right, low, high = bounds(curves)
    rows = [[" "] * width for _ in range(height)]
    for mark, points in reversed(list(zip(MARKS, curves.values()))):
        for x, y in points:
            if math.isfinite(y):
                column = round((x - left) / (right - left) * (width - 1))
                rows[round((high - y) / (high - low) * (height - 1))][column] = mark
    marks = {0: f"{high:8.3f}", height - 1: f"{low:8.3f}"}
    lines = [f"{marks.get(n, ''):>8} |{''.join(row).rstrip()}" for n, row in enumerate(rows)]
    names = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS, curves))
    return "\n".join([*lines, f"{'':8} +{'-' * width}", f"{'':9} {left:<10g}{names:^{width - 20}}{right:>10g}"])


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def frame(
    title: str, box: tuple[float, float, float, float], label: tuple[str, str], shown: Callable[[float], str]
) -> tuple[list[str], Callable[[float, float], str]]:
    """Returns an SVG's axes, 800 by 400, and the function from a point to its place. box: left, right, low, high."""
    left, right, low, high = box

    def at(x: float, y: float) -> str:
        return f"{70 + (x - left) / (right - left) * 710:.1f},{360 - (y - low) / (high - low) * 320:.1f}"

    parts = [STYLE, f'<text x="70" y="22" font-weight="600">{escape(title)}</text>']
    for y in ticks(low, high):
        (x1, y1), (x2, _) = (at(x, y).split(",") for x in (left, right))
        parts.append(f'<line class="grid" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y1}"/>')
        parts.append(f'<text x="64" y="{float(y1) + 4:.1f}" text-anchor="end">{escape(shown(y))}</text>')
    places = {x: at(x, low).split(",")[0] for x in ticks(left, right)}
    parts += [f'<text x="{place}" y="377" text-anchor="middle">{x:g}</text>' for x, place in places.items()]
    parts.append(f'<text x="425" y="395" text-anchor="middle">{escape(label[0])}</text>')
    parts.append(f'<text x="70" y="37">{escape(label[1])}</text>')
    return parts, at


def legend(names: Sequence[str]) -> list[str]:
    """Returns an SVG's legend, from the right at the top."""
    parts = []
    for n, name in enumerate(names):
        parts.append(f'<rect x="640" y="{46 + 16 * n}" width="10" height="10" fill="{COLOURS[n % len(COLOURS)]}"/>')
        parts.append(f'<text x="655" y="{55 + 16 * n}">{escape(name)}</text>')
    return parts


def picture(parts: Sequence[str], height: int = 400) -> str:
    start = f'<svg class="curves" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" role="img">'
    return f"{start}{''.join(parts)}</svg>\n"


def svg(title: str, curves: dict[str, Points], x: str, y: str) -> str:
    """Returns curves as an SVG picture with axes named x and y."""
    parts, at = frame(title, bounds(curves), (x, y), lambda value: f"{value:g}")
    for n, points in enumerate(curves.values()):
        path = " ".join(at(*p) for p in points if math.isfinite(p[1]))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[n % len(COLOURS)]}" stroke-width="1.5"/>')
    return picture([*parts, *legend(list(curves))])


def stacked(title: str, xs: Sequence[float], areas: Mapping[str, Sequence[float]], x: str, y: str, scale: str) -> str:
    """Returns areas on top of each other as an SVG picture. areas: by name, a value for each x; scale: their unit."""
    totals = [sum(values) for values in zip(*areas.values())]
    box = xs[0], max(xs[-1], xs[0] + 1), 0.0, max(totals) or 1.0
    parts, at = frame(title, box, (x, y), lambda value: f"{value:g} {scale}")
    base = [0.0] * len(xs)
    for n, values in enumerate(areas.values()):
        top = [b + v for b, v in zip(base, values)]
        path = [at(*p) for p in zip(xs, top)] + [at(*p) for p in reversed(list(zip(xs, base)))]
        parts.append(f'<polygon points="{" ".join(path)}" fill="{COLOURS[n % len(COLOURS)]}" fill-opacity="0.8"/>')
        base = top
    return picture([*parts, *legend(list(areas))])
