"""The README's chart as an SVG: how fast the default implementations are against the fastest peer."""

from __future__ import annotations

from html import escape

from ridgeline.lab import units
from ridgeline.lab.analysis.roofline import FONT
from ridgeline.lab.presentation.served import Comparison

WIDTH, LEFT, EDGE, TOP = 820, 216, 24, 104  # pixels: the picture, where bars begin, what is free on its right and above
BAR, GAP, ROW, BETWEEN = 15, 2, 32, 13  # pixels: a bar, the gap to the op's next, an op's row, the gap to the next op
LETTER = 7.2  # pixels, about: the width of a letter
PAPER = {  # GitHub's papers, so that the card's edge is all that shows
    "light": {"paper": "#ffffff", "edge": "#d1d9e0", "ink": "#1f2328", "quiet": "#59636e", "grid": "#e4e7eb"},
    "dark": {"paper": "#0d1117", "edge": "#3d444d", "ink": "#f0f6fc", "quiet": "#9198a1", "grid": "#262c36"},
}
INKS = {
    "light": {"forward": "#4f52c9", "backward": "#1a9a87", "both": "#b0307f"},
    "dark": {"forward": "#8085f2", "backward": "#2fb3a0", "both": "#df6fb2"},
}
WORDS = {"forward": "forward", "backward": "backward", "both": "forward and backward in one"}


def draw(compared: list[Comparison], gpu: str) -> str:
    """The text of an SVG with a bar per op and direction; the same comparisons give the same bytes."""
    shown = [c for c in compared if c.speedup]
    most = max([1.0, *(c.speedup or 0 for c in shown)])
    scale = min((WIDTH - LEFT - EDGE - LETTER * (len(c.against) + 8)) / max(c.speedup or 0, 0.1) for c in shown)
    body: list[str] = []
    labels: list[str] = []
    y = float(TOP)
    for op, case in dict.fromkeys((c.op, c.case) for c in shown):
        bars = [c for c in shown if (c.op, c.case) == (op, case)]
        labels.append(_text(LEFT - 14, y + 13, op, "name", "end"))
        labels.append(_text(LEFT - 14, y + 29, case, "quiet", "end"))
        top = y + (ROW - len(bars) * (BAR + GAP) + GAP) / 2
        for n, c in enumerate(bars):
            length, at = (c.speedup or 0) * scale, top + n * (BAR + GAP)
            body.append(_bar(c, at, length))
            end = scale if length < scale < length + 90 else length  # a label would cross the line at 1x
            labels.append(_label(c, at, LEFT + end + 8))
        y += ROW + BETWEEN
    grid = []
    for tick in range(int(most * 2) + 1):
        x = LEFT + tick / 2 * scale
        grid.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{y - 5:.0f}"/>')
        grid.append(_text(x, y + 11, f"{tick / 2:g}x", "quiet", "middle"))
    x = LEFT + scale
    peer = f'<line class="peer" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{y - 5:.0f}"/>'
    labels.append(_text(x, TOP - 11, "fastest peer = 1x", "quiet", "middle"))
    legend, x = [], 20
    for direction in WORDS:
        if any(c.direction == direction for c in shown):
            legend.append(f'<rect class="{direction}" x="{x}" y="61" width="12" height="12" rx="2"/>')
            legend.append(_text(x + 18, 71.5, WORDS[direction], "quiet"))
            x += 34 + 7 * len(WORDS[direction])
    said = f"Speed of the default implementation, fastest peer = 1x, on one {gpu}"
    head = [
        _text(20, 30, "Speed against the fastest peer", "title"),
        _text(
            20,
            49,
            f"Default implementation, largest benchmarked case of each op, one {gpu}. Longer is faster.",
            "quiet",
        ),
    ]
    height = y + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img" aria-label="{escape(said)}">',
            _style(),
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>',
            *head,
            *legend,
            *grid,
            *body,
            peer,
            *labels,
            "</svg>\n",
        ]
    )


def _bar(compared: Comparison, y: float, length: float) -> str:
    said = f"{compared.op}, {WORDS[compared.direction]}: {units.times(compared.speedup or 0)} {compared.against}"
    return (
        f'<rect class="{compared.direction}" x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" rx="2">'
        f"<title>{escape(said)}</title></rect>"
    )


def _label(compared: Comparison, y: float, x: float) -> str:
    """The speed-up and the peer's name, behind a bar."""
    return (
        f'<text class="label" x="{x:.1f}" y="{y + 12:.1f}"><tspan class="ratio">{units.times(compared.speedup or 0)}'
        f'</tspan><tspan class="quiet" dx="6">{escape(compared.against)}</tspan></text>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _style() -> str:
    """The style sheet, for light paper and for dark."""

    def colours(paper: str) -> str:
        tones = PAPER[paper]
        rules = [
            f".paper{{fill:{tones['paper']};stroke:{tones['edge']}}}.label{{stroke:{tones['paper']}}}",
            f"text{{fill:{tones['ink']}}}.quiet{{fill:{tones['quiet']}}}",
            f".grid{{stroke:{tones['grid']}}}.peer{{stroke:{tones['ink']}}}",
            *(f".{name}{{fill:{ink}}}" for name, ink in INKS[paper].items()),
        ]
        return "".join(rules)

    fixed = (
        f"text{{font:13px {FONT}}}.title{{font-size:18px;font-weight:600}}.name{{font-size:14px;font-weight:600}}"
        ".quiet{font-size:12.5px}.ratio{font-weight:600}.peer{stroke-width:1.5;stroke-dasharray:4 3}"
        ".label{stroke-width:4px;stroke-linejoin:round;paint-order:stroke}"
    )
    dark = f"@media (prefers-color-scheme:dark){{{colours('dark')}}}"
    return f"<style>{fixed}{colours('light')}{dark}</style>"
