"""The pictures of a record's sweeps: chase, bank conflicts, strides, and bandwidth by bytes in flight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lab import units
from ridgeline.lab.analysis import roofline
from ridgeline.lab.measurement.micro import memory
from ridgeline.lab.presentation.micro.tables import short, width

if TYPE_CHECKING:
    import altair

Row = dict[str, Any]
RULE = "by the rule"  # the first name of a scale, so that it gets the quiet first colour of the theme
NARROW = "width < 400 ? 2 : 5"  # columns of a legend
UP: dict[str, Any] = {"titleAngle": 0, "titleAlign": "left", "titleAnchor": "end", "titleX": 0, "titleY": -12}
TITLES = {
    "chase": "Cycles of one load, by the bytes that a chase of shuffled addresses visits",
    "banks": "Cycles of a warp's load of shared memory, by the stride of its lanes",
    "coalescing": "Bytes of DRAM that were asked for, by the stride of neighbouring threads",
    "occupancy": "Bandwidth of DRAM, by the bytes that each multiprocessor has in flight",
}
HINTS = {
    "chase": "Each step is a cache that has become too small. The dashed line is the size of L2.",
    "banks": "Shared memory has 32 banks of 4 bytes: odd strides of 4 bytes meet each once, stride 32 one of them.",
    "coalescing": "DRAM moves sectors of 32 bytes: from a stride of 32 bytes on, each element costs a whole one.",
    "occupancy": "Little's law: bandwidth is bytes in flight divided by latency, until DRAM gives no more. "
    "The rule begins at the least bytes in flight.",
}


def charts(record: Row, size: int | str = "container", height: int = 280) -> dict[str, altair.LayerChart]:
    """The chart of each sweep that a record has, by part. Colours are left to `roofline.theme`."""
    made = {}
    for part, draw in (("chase", _chase), ("banks", _banks), ("coalescing", _coalescing), ("occupancy", _occupancy)):
        rows = [row for row in record["rows"] if row["part"] == part and "figures" in row]
        if rows:
            made[part] = draw(record, rows).properties(width=size, height=height)
    return made


def _median(row: Row, unit: str) -> float:
    return float(row["figures"][unit]["median"])


def _series(points: list[Row], x: Any, y: Any, names: list[str]) -> altair.LayerChart:
    """Measured points on lines, one colour for each name, over the rule's quiet dashes."""
    import altair as alt

    scale = alt.Scale(domain=[RULE, *names])
    shown = [name for name in (RULE, *names) if any(p["name"] == name for p in points)]
    legend = (
        alt.Legend(values=shown, orient="top", offset=36, symbolOpacity=1, columns=alt.ExprRef(NARROW))
        if len(shown) > 1
        else None
    )
    colour = alt.Color("name:N", title=None, legend=legend, scale=scale)
    tips = [alt.Tooltip(f"{name}:N") for name in ("name", "at", "measured")]
    dashes = alt.Chart(alt.Data(values=[p for p in points if p["name"] == RULE]))
    lines = alt.Chart(alt.Data(values=[p for p in points if p["name"] != RULE]))
    ruled = dashes.mark_line(strokeDash=[4, 3], strokeWidth=1.2, strokeJoin="round").encode(x, y, colour, detail="of:N")
    drawn = lines.mark_line(strokeWidth=2, strokeJoin="round").encode(x, y, colour)
    dots = lines.mark_point(filled=True, size=45, opacity=1).encode(x, y, colour, tooltip=tips)
    return alt.layer(*([ruled] if RULE in shown else []), drawn, dots)


def _chase(record: Row, rows: list[Row]) -> altair.LayerChart:
    import altair as alt

    points: list[Row] = [
        {
            "name": "a load",
            "x": float(row["at"]),
            "y": _median(row, "cycles"),
            "at": units.size(float(row["at"])),
            "measured": f"{units.digits(_median(row, 'cycles'))} cycles, {units.seconds(_median(row, 's'))}",
        }
        for row in rows
    ]
    ticks = [float(1 << power) for power in range(12, 32, 2) if (1 << power) <= points[-1]["x"]]
    words = (
        "datum.value >= 1073741824 ? datum.value / 1073741824 + ' GiB' : "
        "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
    )
    across = alt.Axis(values=ticks, labelExpr=words, labelOverlap=True)
    x = alt.X("x:Q", title="working set", axis=across, scale=alt.Scale(type="log", base=2))
    y = alt.Y("y:Q", title="cycles", axis=alt.Axis(**UP))
    made = _series(points, x, y, ["a load"])
    l2 = _l2(record)
    if l2 is None or not points[0]["x"] < l2 < points[-1]["x"]:
        return made
    mark = alt.Chart(alt.Data(values=[{"x": l2, "label": f"L2, {units.size(l2)}"}]))
    line = mark.mark_rule(color=alt.ExprRef("quiet"), strokeDash=[4, 3]).encode(x="x:Q")
    text = mark.mark_text(align="right", baseline="top", dx=-6, color=alt.ExprRef("quiet"), fontSize=12)
    return alt.layer(made, line, text.encode(x="x:Q", y=alt.value(0), text="label:N"))


def _l2(record: Row) -> float | None:
    """The bytes of the card's L2, if Ridgeline knows the card."""
    import ridgeline.device as devices
    from ridgeline.lab.measurement.store import slug

    card = devices.KNOWN.get(slug(record["gpu"]))
    return float(card.l2) if card else None


def _banks(record: Row, rows: list[Row]) -> altair.LayerChart:
    import altair as alt

    points = []
    for row in rows:
        at, bytes_ = int(row["at"]), width(row["name"])
        points.append(
            {"name": f"{bytes_} bytes", "x": at, "y": _median(row, "cycles"), "at": f"stride {at}",
             "measured": f"{units.digits(_median(row, 'cycles'))} cycles; by the rule {memory.ways(bytes_, at)}"}
        )  # fmt: skip
        points.append({"name": RULE, "of": row["name"], "x": at, "y": memory.ways(bytes_, at)})
    x = alt.X(
        "x:Q",
        title="stride, in elements",
        axis=alt.Axis(values=list(range(0, 33, 4)), grid=False),
        scale=alt.Scale(nice=False),
    )
    y = alt.Y("y:Q", title="cycles", axis=alt.Axis(values=[1, 2, 4, 8, 16, 32], **UP), scale=_log(points, 2))
    return _series(points, x, y, [f"{bytes_} bytes" for bytes_ in memory.WIDTHS])


def _coalescing(record: Row, rows: list[Row]) -> altair.LayerChart:
    import altair as alt

    first = {row["name"]: _median(row, "B/s") for row in rows if row["at"] == "1"}
    points = []
    for row in rows:
        at, bytes_ = int(row["at"]), width(row["name"])
        points.append(
            {"name": f"{bytes_} bytes", "x": at, "y": _median(row, "B/s"), "at": f"stride {at}",
             "measured": units.scaled(_median(row, "B/s"), "B/s")}
        )  # fmt: skip
        if row["name"] in first:
            ruled = first[row["name"]] * memory.useful(bytes_, at)
            points.append({"name": RULE, "of": row["name"], "x": at, "y": ruled})
    powers = alt.Axis(values=[1, 2, 4, 8, 16, 32], grid=False)
    x = alt.X("x:Q", title="stride, in elements", axis=powers, scale=alt.Scale(type="log", base=2))
    y = alt.Y("y:Q", title="bytes asked for, a second", axis=_decades(points), scale=_log(points))
    return _series(points, x, y, [f"{bytes_} bytes" for bytes_ in memory.WIDTHS])


def _occupancy(record: Row, rows: list[Row]) -> altair.LayerChart:
    import altair as alt

    names = list(dict.fromkeys(short(row["name"]) for row in rows))
    points: list[Row] = [
        {
            "name": short(row["name"]),
            "x": _median(row, "B/SM") / 1024,
            "y": _median(row, "B/s"),
            "at": f"{row['at']} warps, {units.size(_median(row, 'B/SM'))} in flight",
            "measured": units.scaled(_median(row, "B/s"), "B/s"),
        }
        for row in rows
    ]
    # The rule from the least bytes in flight: their bandwidth is those bytes over the latency.
    least, top = min(points, key=lambda p: p["x"]), max(p["y"] for p in points)
    slope = least["y"] / least["x"]
    most = max(p["x"] for p in points)
    ends = [(least["x"], least["y"]), (min(most, top / slope), min(top, most * slope)), (most, min(top, most * slope))]
    points += [{"name": RULE, "of": "rule", "x": u, "y": v} for u, v in ends]
    ticks = [2.0**power for power in range(-1, 10) if least["x"] <= 2.0**power <= most]
    x = alt.X(
        "x:Q",
        title="KiB in flight on each multiprocessor",
        axis=alt.Axis(values=ticks),
        scale=alt.Scale(type="log", base=2),
    )
    y = alt.Y("y:Q", title="bytes a second", axis=_decades(points), scale=_log(points))
    return _series(points, x, y, names)


def _log(points: list[Row], base: int = 10) -> altair.Scale:
    """A logarithmic scale upwards, a little wider than the points."""
    import altair as alt

    heights = [p["y"] for p in points]
    return alt.Scale(type="log", base=base, domain=[min(heights) / 1.15, max(heights) * 1.15], nice=False)


def _decades(points: list[Row]) -> altair.Axis:
    """An axis upwards of bytes a second, with lines at 1, 2 and 5 times the powers of ten."""
    import altair as alt

    low, high = min(p["y"] for p in points), max(p["y"] for p in points)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [s * 10.0**power for power in powers for s in (1, 2, 5) if low / 1.15 <= s * 10.0**power <= high * 1.15]
    words = "replace(replace(format(datum.value, '~s'), 'T', ' TB/s'), 'G', ' GB/s')"
    return alt.Axis(values=steps, labelExpr=words, **UP)


def write(record: Row, folder: Path) -> list[Path]:
    """Writes each picture as `micro-PART.svg` and `.png`, and both on dark paper, with no browser and no network."""
    import vl_convert

    written = []
    for part, chart in charts(record, 860, 420).items():
        for paper in roofline.PAPER:
            config = roofline.theme(paper) | {"background": roofline.PAPER[paper]["paper"], "padding": 20}
            picture = vl_convert.vegalite_to_svg(chart.to_dict() | {"config": config})
            stem = folder / f"micro-{part}{'' if paper == 'light' else '-dark'}"
            written += [stem.with_suffix(".svg"), stem.with_suffix(".png")]
            roofline.write(written[-2], picture.encode())
            roofline.write(written[-1], vl_convert.svg_to_png(picture, scale=2))
    return written
