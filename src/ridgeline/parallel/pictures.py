"""Pictures of scaling and of timelines: SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ridgeline.parallel.wording import wrapped

COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")
STYLE = (  # of these pictures alone, since a page may hold several
    "<style>.plan{background:#fff;font:13px system-ui,sans-serif}.plan text{fill:#334155}"
    ".plan .grid{stroke:#e2e8f0}.plan .strong{font-weight:600}.plan .mark{fill:#fff}.plan .paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){.plan{background:#0f172a}.plan text{fill:#cbd5e1}"
    ".plan .grid{stroke:#334155}.plan .paper{fill:#0f172a}}</style>"
)
WIDTH, LEFT, RIGHT, TOP, LOW = 860.0, 62.0, 840.0, 74.0, 350.0
START = 122.0  # where the lanes of a timeline begin, right of their names


@dataclass(frozen=True)
class Bend:
    """A mark on a curve, and the reason that stands below the picture."""

    x: float
    y: float
    reason: str


@dataclass(frozen=True)
class Curve:
    """A curve of points, how far below and above them a run may be, as shares, and its bends."""

    name: str
    points: Sequence[tuple[float, float]]
    band: tuple[float, float]
    bends: Sequence[Bend]


def frame(title: str, under: str, height: float) -> list[str]:
    """Returns the start of a picture."""
    return [
        f'<svg class="plan" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img">',
        f"<title>{escape(title)}</title>{STYLE}",
        f'<rect class="paper" width="{WIDTH:.0f}" height="{height:.0f}"/>',
        f'<text class="strong" x="16" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="16" y="43">{escape(under)}</text>',
    ]


def scaling(title: str, under: str, curves: Sequence[Curve], top: float) -> str:
    """Returns shares of the datasheet's rate over the number of GPUs, by powers of two, with numbered reasons.

    top: the largest share of the axis."""
    xs = [x for c in curves for x, _ in c.points]
    first, last = math.log2(min(xs)), math.log2(max(xs))

    def at(x: float, y: float) -> tuple[float, float]:
        place = (math.log2(x) - first) / (last - first)
        return LEFT + place * (RIGHT - LEFT), LOW - y / top * (LOW - TOP)

    reasons = [(n, c, bend) for n, c in enumerate(curves) for bend in c.bends]
    lines = [(n, k + 1, wrapped(bend.reason, 112)) for k, (n, _, bend) in enumerate(reasons)]
    height = LOW + 62 + sum(17 * len(text) + 6 for _, _, text in lines)
    parts = frame(title, under, height)
    for n, curve in enumerate(curves):
        x = LEFT + n * 380
        parts.append(f'<rect x="{x}" y="54" width="12" height="12" fill="{COLOURS[n]}"/>')
        low, high = curve.band
        band = f"±{100 * low:.0f}%" if low == high else f"-{100 * low:.0f}% +{100 * high:.0f}%"
        parts.append(f'<text x="{x + 18}" y="65">{escape(curve.name)} ({band})</text>')
    for k in range(int(top * 10) + 1):
        y = at(min(xs), k / 10)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * k}%</text>')
    for x in sorted(set(xs)):
        if math.log2(x) % 2 == 1 or x == max(xs):
            place = min(at(x, 0)[0], WIDTH - 30)
            parts.append(f'<text x="{place:.1f}" y="{LOW + 18}" text-anchor="middle">{x:,.0f}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{LOW + 36}" text-anchor="middle">GPUs</text>')
    for n, curve in enumerate(curves):
        edge = [at(x, min(top, y * (1 + curve.band[1]))) for x, y in curve.points]
        edge += [at(x, y * (1 - curve.band[0])) for x, y in reversed(curve.points)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        parts.append(f'<polygon points="{points}" fill="{COLOURS[n]}" fill-opacity="0.13"/>')
    for n, curve in enumerate(curves):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in curve.points))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[n]}" stroke-width="2.2"/>')
    for k, (n, _, bend) in enumerate(reasons):
        x, y = at(bend.x, bend.y)
        y += -17 if n == 0 else 17
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{COLOURS[n]}"/>')
        parts.append(f'<text class="mark" style="fill:#fff" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" '
                     f'font-size="11" font-weight="600">{k + 1}</text>')  # fmt: skip
    y = LOW + 62.0
    for n, k, text in lines:
        parts.append(f'<circle cx="24" cy="{y - 4:.1f}" r="9" fill="{COLOURS[n]}"/>')
        parts.append(f'<text style="fill:#fff" x="24" y="{y:.1f}" text-anchor="middle" font-size="11" '
                     f'font-weight="600">{k}</text>')  # fmt: skip
        for line in text:
            parts.append(f'<text x="42" y="{y:.1f}">{escape(line)}</text>')
            y += 17
        y += 6
    return "".join(parts) + "</svg>\n"


# What a span of a timeline is, and its colour.
KINDS = {
    "forward": "#2563eb",
    "backward": "#d97706",
    "communication": "#059669",
    "exposed": "#dc2626",
    "optimizer": "#7c3aed",
    "stragglers": "#94a3b8",
}


@dataclass(frozen=True)
class Panel:
    """Spans on lanes between two times. lanes: by name, (start, end, kind, label) in seconds; kind: one of KINDS."""

    name: str
    lanes: Mapping[str, Sequence[tuple[float, float, str, str]]]
    start: float
    end: float


def timeline(title: str, under: str, panels: Sequence[Panel], cut: str = "") -> str:
    """Returns panels of spans over time, one below the other. cut: a sentence that says what is left out."""
    heights = [tall(panel) * len(panel.lanes) for panel in panels]
    height = 92 + sum(h + 52 for h in heights) + (12 if cut else 0)
    parts = frame(title, under, height)
    used = {kind for panel in panels for spans in panel.lanes.values() for *_, kind, _ in spans}
    x, y = START, 84.0
    for kind, colour in KINDS.items():
        if kind in used:
            parts.append(f'<rect x="{x:.0f}" y="56" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{x + 17:.0f}" y="67">{kind}</text>')
            x += 36 + 7.4 * len(kind)
    for panel, size in zip(panels, heights):
        if panel.name:
            y += 14
            parts.append(f'<text class="strong" x="{START}" y="{y - 2:.0f}">{escape(panel.name)}</text>')
            y += 4
        parts += drawn(panel, y)
        y += size + 34
    if cut:
        parts.append(f'<text x="{START}" y="{y + 4:.0f}">{escape(cut)}</text>')
    return "".join(parts) + "</svg>\n"


def tall(panel: Panel) -> float:
    """Returns the height of a lane."""
    return 30 if len(panel.lanes) <= 8 else max(9, 260 // len(panel.lanes))


def drawn(panel: Panel, top: float) -> list[str]:
    """Returns a panel's lanes, spans and axis."""
    high, wide = tall(panel), RIGHT - START
    each = wide / (panel.end - panel.start)
    parts = []
    for n, (name, spans) in enumerate(panel.lanes.items()):
        y = top + n * high
        if high >= 13 or n % (1 + int(13 // high)) == 0:
            parts.append(f'<text x="{START - 8}" y="{y + high / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<line class="grid" x1="{START}" y1="{y + high - 1}" x2="{RIGHT}" y2="{y + high - 1}"/>')
        for start, stop, kind, label in spans:
            if stop <= panel.start or start >= panel.end:
                continue
            left = START + (max(start, panel.start) - panel.start) * each
            size = max(0.4, (min(stop, panel.end) - max(start, panel.start)) * each)
            gap = 0.6 if size > 3 else 0
            parts.append(
                f'<rect x="{left:.2f}" y="{y + 1}" width="{size - gap:.2f}" height="{high - 3}" fill="{KINDS[kind]}">'
                f"<title>{escape(label)}</title></rect>"
            )
            if size > 7 * len(label) + 4 and high >= 16:
                parts.append(f'<text style="fill:#fff" x="{left + size / 2:.1f}" y="{y + high / 2 + 4:.1f}" '
                             f'text-anchor="middle" font-size="11">{escape(label)}</text>')  # fmt: skip
    bottom = top + high * len(panel.lanes) + 16
    for when in ticks(panel.start, panel.end):
        x = START + (when - panel.start) * each
        parts.append(
            f'<text x="{min(x, RIGHT - 12):.1f}" y="{bottom}" text-anchor="middle">{scale(when, panel.end)}</text>'
        )
    return parts


def ticks(start: float, end: float) -> list[float]:
    """Returns four to ten round times of an axis."""
    step = 10.0 ** math.floor(math.log10((end - start) / 4))
    step *= next(m for m in (5, 2, 1) if (end - start) / (step * m) >= 4)
    first = math.ceil(start / step - 1e-9)
    return [n * step for n in range(first, int(end / step + 1e-9) + 1)]


def scale(x: float, end: float) -> str:
    """Returns a time of an axis that ends at `end`."""
    return f"{x:.3g} s" if end >= 2 else f"{1e3 * x:.3g} ms"
