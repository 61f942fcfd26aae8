"""A ladder as a chart in HTML: a bar for each rung, with its time, its gain and its share of the roof."""

from __future__ import annotations

from typing import Any

from ridgeline.lab import units
from ridgeline.lab.presentation.served import known
from ridgeline.lab.presentation.site.markdown import html

Row = dict[str, Any]
WORDS = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward in one"}


def draw(direction: str, steps: list[Row], peers: list[Row], default: str | None) -> str:
    """A figure of one piece of work.

    steps: the ladder's rows with their gains, in its order; peers: other libraries' rows, which stand below; default:
    the rung that serves this call.
    """
    lines = [_line(row, row["impl"], row.get("gain"), row["impl"] == default) for row in steps if timed(row)]
    lines += [_line(row, known(row), None, False, "peer") for row in peers if timed(row)]
    said = f"{WORDS[direction]}: each implementation's time, gain and share of the roof"
    head = (
        '<div class="rung head"><span>implementation</span><span>time</span><span>gain</span>'
        "<span>share of the roof</span></div>"
    )
    return f'<figure class="ladder" aria-label="{said}">\n<figcaption>{WORDS[direction]}</figcaption>\n{head}\n' + (
        "\n".join(lines) + "\n</figure>"
    )


def timed(row: Row) -> bool:
    """Whether a row holds a time."""
    return row["status"] == "ok" and bool(row["seconds"])


def _line(row: Row, name: str, gain: float | None, default: bool, kind: str = "") -> str:
    share = row["share"]
    older = " (older run)" if row["type"] == "older" else ""
    classes = " ".join(filter(None, ("rung", kind or row["kind"], "default" if default else "")))
    mark = ' <span class="mark">default</span>' if default else ""
    spread = units.spread(row["seconds"])
    return (
        f'<div class="{classes}"><span class="name">{html(name)}{mark}{older}</span>'
        f'<span class="time" title="{spread}">{units.seconds(row["seconds"]["median"])}</span>'
        f'<span class="gain">{units.times(gain) if gain else ""}</span>'
        f'<span class="share"><i style="--share:{min(share, 1):.3f}"></i><b>{units.share(row)}</b></span></div>'
    )
