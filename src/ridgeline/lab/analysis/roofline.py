"""Place every implementation on the machine's roofline, and say what limits it.

Log-log: the measured roofs are lines, every rung is a point; written as SVG and PNG with no browser and no network.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.lab import units
from ridgeline.lab.analysis import verdict
from ridgeline.lab.measurement import query
from ridgeline.lab.measurement.query import Row

if TYPE_CHECKING:
    import altair

GROUPS = {"plain": "plain PyTorch", "peer": "peers", "cuda": "CUDA C++", "triton": "Triton", "gluon": "Gluon"}
INKS = {
    "light": {"plain": "#7b8494", "peer": "#b9770e", "cuda": "#23855b", "triton": "#4f52c9", "gluon": "#b0307f"},
    "dark": {"plain": "#9aa3b2", "peer": "#e3a83f", "cuda": "#4cc38a", "triton": "#8f93ff", "gluon": "#ee7fc0"},
}
PAPER = {
    "light": {"ink": "#1d2433", "quiet": "#5b6475", "grid": "#e4e6eb", "paper": "#ffffff"},
    "dark": {"ink": "#e6e9f0", "quiet": "#a2aabb", "grid": "#2b3342", "paper": "#12161f"},
}
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
LEAST = 0.01  # FLOP per byte under which a point is not drawn: it would lie decades to the left of all others
DISTANT = 0.8  # below this share of the roof a picture names an op
LINE = 15  # pixels from one name to the next
NARROW = "width < 480"  # a phone: the chart's words get shorter
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif"


def group(row: Row) -> str:
    """Which colour a rung has: what it is written in, or that it is a peer."""
    return "peer" if row["peer"] else row["kind"] if row["kind"] in GROUPS else "plain"


def computes(row: Row) -> bool:
    """Whether a row's work has arithmetic to speak of: a copy has none, nor has adding a few rows to a large tensor."""
    return row["flops"] > LEAST * row["bytes"]


def points(bench: list[Row]) -> list[dict[str, Any]]:
    """Every timed rung that computes anything, as a point: FLOP per byte across, FLOP/s up."""
    found = []
    for row in bench:
        if row["status"] != "ok" or not computes(row):
            continue
        median = row["seconds"]["median"]
        found.append(
            {
                "x": row["flops"] / row["bytes"],
                "y": row["flops"] / median,
                "group": GROUPS[group(row)],
                "time": f"{units.seconds(median)} {units.spread(row['seconds'])}",
                "rate": units.rate(row),
                "of the roof": units.percent(row["share"]),
                "share": row["share"],
                **{name: row[name] for name in ("op", "impl", "case", "dtype", "direction")},
            }
        )
    return found


def ceilings(roof: Row, dtypes: set[str]) -> list[dict[str, Any]]:
    """The matrix rates of the dtypes (float32's for one that has none, as of int32), with the ridge point of each.

    Those within 8% of each other are one roof.
    """
    wanted = {d if d in roof["matmul"] else "float32" for d in dtypes}
    rates = sorted(((f["median"], d) for d, f in roof["matmul"].items() if d in wanted), reverse=True)
    merged: list[tuple[float, list[str]]] = []
    for value, dtype in rates:
        if merged and merged[-1][0] < value * 1.08:
            merged[-1][1].append(dtype)
        else:
            merged.append((value, [dtype]))
    bandwidth = roof["copy"]["median"]
    return [
        {
            "rate": value,
            "ridge": value / bandwidth,
            "roof": f"{', '.join(sorted(names))}: {units.scaled(value, 'FLOP/s')}",
            "short": f"{', '.join(SHORT.get(d, d) for d in sorted(names))}: {units.scaled(value, 'FLOP/s')}",
            "label": f"ridge {units.digits(value / bandwidth)} FLOP/B",
        }
        for value, names in merged
    ]


def chart(
    rows: list[Row], interactive: bool = True, width: int | str = "container", height: int = 430
) -> altair.LayerChart:
    """The roofline of a run's rows; names stand at ops whose best implementation is far from the roof.

    interactive: every timed implementation, a legend that filters, and menus for op, dtype and direction; otherwise
    the fastest of each colour. Colours are left to the configuration (see `theme`), for light and dark paper.
    """
    import altair as alt

    roof = query.one(rows, "roof")
    found = points(query.of(rows, "bench"))
    found = found if interactive else _fastest(found, ("op", "case", "dtype", "direction", "group"))
    flats = ceilings(roof, {p["dtype"] for p in found})
    spots = found + [{"x": c["ridge"], "y": c["rate"]} for c in flats]
    left, right = min(p["x"] for p in spots) / 3, max(p["x"] for p in spots) * 30  # there the roofs' names stand
    low = min([p["y"] for p in found] + [roof["copy"]["median"] * left]) / 2
    high = max(p["y"] for p in spots) * 3
    wide, tall = alt.Scale(type="log", domain=[left, right]), alt.Scale(type="log", domain=[low, high])
    x = alt.X("x:Q", title="arithmetic intensity, FLOP per byte", axis=_decades(left, right), scale=wide)
    up = _decades(low, high, titleAngle=0, titleAlign="left", titleAnchor="end", titleX=0, titleY=-12)
    y = alt.Y("y:Q", title="FLOP/s reached", axis=up, scale=tall)
    rungs = _rungs(found, interactive).encode(x, y)
    ridge = min((c["ridge"] for c in flats), default=right)
    frame = Frame(left, right, low, high, width if isinstance(width, int) else 860, height)
    named = _on(_names(found, ridge, frame))
    leaders = named.mark_rule(color=alt.ExprRef("ink"), strokeWidth=0.7, opacity=0.5)
    leaders = leaders.encode(x, y, alt.X2("column:Q"), alt.Y2("line:Q"))
    named = named.encode(alt.X("column:Q", scale=wide), alt.Y("line:Q", scale=tall), text="name:N")
    place: dict[str, Any] = {"align": "left", "baseline": "middle", "dx": 4, "fontSize": 12}
    halo = {"stroke": alt.ExprRef("paper"), "strokeWidth": 4, "opacity": 0.85}
    names = [leaders, named.mark_text(**place, **halo), named.mark_text(**place, color=alt.ExprRef("ink"))]
    layers = [layer.encode(x, y) for layer in _roofs(roof, flats, left, right)]
    return alt.layer(*layers, rungs, *names).properties(width=width, height=height)


class Frame(NamedTuple):
    """The domains of both axes, and how many pixels they have."""

    left: float
    right: float
    low: float
    high: float
    width: float
    height: float

    def pixels(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is, from the left and from above."""
        across = math.log(x / self.left) / math.log(self.right / self.left)
        return across * self.width, math.log(self.high / y) / math.log(self.high / self.low) * self.height

    def point(self, across: float, down: float) -> tuple[float, float]:
        """What stands there: the inverse of `pixels`."""
        x = self.left * (self.right / self.left) ** (across / self.width)
        return x, self.high / (self.high / self.low) ** (down / self.height)


def _names(found: list[dict[str, Any]], ridge: float, frame: Frame) -> list[dict[str, Any]]:
    """The best point of each op and direction that is far from the roof, with its name and the name's place.

    Names stand in a column: on the left of the ridge beside the points, as high as theirs; on the right below them.
    """
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for p in found:
        work = p["op"], p["direction"]
        if work not in best or p["share"] > best[work]["share"]:
            best[work] = p
    far = [p for p in best.values() if p["share"] < DISTANT]
    placed = []
    memory = sorted((p for p in far if p["x"] < ridge), key=lambda p: (-p["y"], p["x"], p["op"]))
    if memory:
        wanted = [frame.pixels(p["x"], p["y"])[1] for p in memory]
        downs: list[float] = []
        for down in wanted:
            downs.append(max(down, downs[-1] + LINE) if downs else down)
        up = min((sum(downs) - sum(wanted)) / len(downs), LINE)
        across = max(frame.pixels(p["x"], p["y"])[0] for p in found if p["x"] < ridge) + 28
        placed += [(p, across, down - up) for p, down in zip(memory, downs, strict=True)]
    compute = sorted((p for p in far if p["x"] >= ridge), key=lambda p: (-p["x"], p["y"], p["op"]))
    if compute:
        dots = [frame.pixels(p["x"], p["y"]) for p in compute]
        across, down = max(u for u, _ in dots) + 14, max(v for _, v in dots) + LINE
        placed += [(p, across, down + n * LINE) for n, p in enumerate(compute)]
    named = []
    for p, across, down in placed:
        column, line = frame.point(across, down)
        name = p["op"] + (" backward" if p["direction"] == "backward" else "")
        named.append({"name": name, "x": p["x"], "y": p["y"], "column": column, "line": line})
    return named


def _decades(low: float, high: float, **options: Any) -> altair.Axis:
    """An axis with a line at every power of ten."""
    import altair as alt

    powers = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return alt.Axis(
        values=powers,
        labelExpr="datum.value < 1 ? format(datum.value, '~g') : format(datum.value, '~s')",
        labelOverlap=True,
        **options,
    )


def _on(values: list[dict[str, Any]]) -> altair.Chart:
    import altair as alt

    return alt.Chart(alt.Data(values=values))


def _roofs(roof: Row, flats: list[dict[str, Any]], left: float, right: float) -> list[altair.Chart]:
    """The roofs as lines with their names, and where they meet."""
    import altair as alt

    ink = alt.ExprRef("ink")
    bandwidth = roof["copy"]["median"]
    memory = f"memory: copy {units.scaled(bandwidth, 'B/s')}"
    ends = [(memory, u, u * bandwidth) for u in (left, max(c["ridge"] for c in flats))]
    ends += [(c["roof"], u, c["rate"]) for c in flats for u in (c["ridge"], right)]
    middle = left**0.3 * min(c["ridge"] for c in flats) ** 0.7
    name: dict[str, Any] = {"align": "right", "baseline": "bottom", "dx": -8, "dy": -4}
    if math.log(middle / left) < 0.2 * math.log(right / left):  # above the line it would reach over the axis
        name = {"align": "left", "baseline": "top", "dx": 8, "dy": 4}
    bold = {
        "color": ink,
        "fontSize": alt.ExprRef(f"{NARROW} ? 11 : 12.5"),
        "fontWeight": 600,
        "text": alt.ExprRef(f"{NARROW} ? datum.short : datum.roof"),
    }
    ridges = _on([{"label": c["label"], "x": c["ridge"], "y": c["rate"]} for c in flats])
    return [
        _on([{"roof": name, "x": u, "y": v} for name, u, v in ends])
        .mark_line(color=ink, strokeWidth=2)
        .encode(detail="roof:N", tooltip=["roof:N"]),
        _on([{"x": right, "y": c["rate"], **c} for c in flats]).mark_text(
            align="right", baseline="bottom", dx=-4, dy=-5, **bold
        ),
        _on(
            [{"x": middle, "y": middle * bandwidth, "roof": memory, "short": units.scaled(bandwidth, "B/s")}]
        ).mark_text(**name, **bold),
        ridges.mark_point(shape="diamond", size=90, fill=alt.ExprRef("paper"), stroke=ink, opacity=1).encode(
            tooltip=["label:N"]
        ),
        ridges.mark_text(
            align="right",
            baseline="bottom",
            dx=-8,
            dy=-4,
            color=alt.ExprRef("quiet"),
            fontSize=11.5,
            text=alt.ExprRef(f"{NARROW} ? '' : datum.label"),
        ),
    ]


def _rungs(found: list[dict[str, Any]], interactive: bool) -> altair.Chart:
    """The points: coloured by what a rung is written in, backward ones as triangles."""
    import altair as alt

    present = [name for name in GROUPS.values() if any(p["group"] == name for p in found)]
    directions = [way for way in ("forward", "backward", "both") if any(p["direction"] == way for p in found)]
    legend = alt.Legend(
        values=present, orient="top", offset=36, columns=alt.ExprRef(f"{NARROW} ? 2 : 5"), symbolOpacity=1
    )
    dots = _on(found).mark_point(filled=True, size=60, opacity=0.85)
    dots = dots.encode(
        color=alt.Color("group:N", title=None, legend=legend).scale(domain=list(GROUPS.values())),
        shape=alt.Shape(
            "direction:N",
            title=None,
            legend=None
            if interactive or len(directions) < 2
            else alt.Legend(orient="top", offset=36, values=directions),
        ).scale(domain=["forward", "backward", "both"], range=["circle", "triangle-down", "square"]),
        tooltip=[
            alt.Tooltip(f"{name}:N")
            for name in ("op", "impl", "case", "dtype", "direction", "time", "rate", "of the roof")
        ],
    )
    if not interactive:
        return dots
    chosen = alt.selection_point(fields=["group"], bind="legend", name="written_in")
    menus = [_menu(name, sorted({p[name] for p in found})) for name in ("direction", "dtype", "op")]
    dots = dots.encode(opacity=alt.condition(chosen, alt.value(0.85), alt.value(0.05))).add_params(chosen, *menus)
    for menu in menus:
        dots = dots.transform_filter(menu)
    return dots


def theme(paper: str) -> dict[str, Any]:
    """The chart's colours on "light" or "dark" paper, as a Vega configuration."""
    tones = PAPER[paper]
    axis = {
        "labelColor": tones["quiet"],
        "titleColor": tones["quiet"],
        "gridColor": tones["grid"],
        "domain": False,
        "ticks": False,
    }
    return {
        "font": FONT,
        "background": None,
        "view": {"stroke": None},
        "axis": axis
        | {
            "titleFontWeight": "normal",
            "labelFontSize": 12,
            "titleFontSize": 13,
            "titlePadding": 10,
            "labelPadding": 6,
        },
        "legend": {
            "labelColor": tones["ink"],
            "labelFontSize": 13,
            "symbolSize": 90,
            "symbolBaseFillColor": tones["quiet"],
        },
        "range": {"category": list(INKS[paper].values())},
        "params": [{"name": name, "value": tones[name]} for name in ("ink", "quiet", "paper")],
    }


def svg(rows: list[Row]) -> str:
    """The text of an SVG for light and dark paper, which ends with the mark that `current` reads."""
    import vl_convert

    spec = chart(rows, interactive=False, width=860, height=470).to_dict()
    config = theme("light") | {"background": PAPER["light"]["paper"], "padding": 20}
    picture = vl_convert.vegalite_to_svg(spec | {"config": config}).replace("</svg>", f"{_dark()}</svg>")
    return f"{picture.strip()}\n{_mark(rows, picture.strip())}\n"


def current(text: str, rows: list[Row]) -> bool:
    """Whether the text is what `svg` made of these rows.

    The renderer's bytes may differ where other fonts are installed, so its input is compared, and the text with the
    mark that it was written with.
    """
    picture, _, mark = text.strip().rpartition("\n")
    return mark == _mark(rows, picture)


def _mark(rows: list[Row], picture: str) -> str:
    """A comment with digests of what a picture is drawn from and of the picture."""
    import hashlib
    import json

    spec = chart(rows, interactive=False, width=860, height=470).to_dict()
    spec.pop("$schema", None)
    drawn_from = json.dumps([spec, theme("light"), _dark()], sort_keys=True)
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (drawn_from, picture)]
    return f"<!-- drawn from {digests[0]}: {digests[1]} -->"


def _dark() -> str:
    """A style sheet that gives each colour of light paper that of dark paper."""
    pairs = [(PAPER["light"][name], PAPER["dark"][name]) for name in PAPER["light"]]
    pairs += [(INKS["light"][name], INKS["dark"][name]) for name in INKS["light"]]
    rules = [f'[fill="{old}"]{{fill:{new}}}[stroke="{old}"]{{stroke:{new}}}' for old, new in pairs]
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def render(rows: list[Row], folder: Path, name: str = "roofline", papers: tuple[str, ...] = ("light",)) -> list[Path]:
    """Writes the roofline as `name.svg` and `name.png` (dark paper: `name-dark`), with no browser and no network."""
    import vl_convert

    spec = chart(rows, interactive=False, width=860, height=470).to_dict()
    written = []
    for paper in papers:
        picture = vl_convert.vegalite_to_svg(
            spec | {"config": theme(paper) | {"background": PAPER[paper]["paper"], "padding": 20}}
        )
        stem = folder / (name if paper == "light" else f"{name}-{paper}")
        written += [stem.with_suffix(".svg"), stem.with_suffix(".png")]
        write(written[-2], picture.encode())
        write(written[-1], vl_convert.svg_to_png(picture, scale=2))
    return written


def write(path: Path, content: bytes) -> None:
    """Writes a whole file in one step, its folder made. Raises RidgelineError where that is not allowed."""
    from ridgeline.op import RidgelineError

    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError as error:
        raise RidgelineError(
            f"cannot write to {path.parent}: {error.strerror}; name a folder that can be written"
        ) from error


def _menu(field: str, values: list[str]) -> Any:
    import altair as alt

    return alt.selection_point(
        fields=[field],
        name=f"only_{field}",
        bind=alt.binding_select(options=[None, *values], labels=["all", *values], name=field),
    )


def _fastest(found: list[dict[str, Any]], of: tuple[str, ...]) -> list[dict[str, Any]]:
    """The highest point of those that are alike in some fields."""
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for point in found:
        alike = tuple([point[name] for name in of])
        if alike not in best or point["y"] > best[alike]["y"]:
            best[alike] = point
    return list(best.values())


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops (default: all that the run timed)")
    parser.add_argument("--run", default="latest", help="a run's file or name (default: the newest)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write roofline.svg and roofline.png there, and both on dark paper"
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def main(options: argparse.Namespace) -> int:
    import json

    from ridgeline.lab.measurement import store
    from ridgeline.op import RidgelineError

    rows = store.load(store.find(options.run))
    timed = sorted({row["op"] for row in query.of(rows, "bench")})
    unknown = [op for op in options.ops if op not in timed]
    if unknown:
        raise RidgelineError(
            f"{', '.join(unknown)} is not in run {rows[0]['run']}, which timed {', '.join(timed) or 'nothing'}"
        )
    rows = [row for row in rows if row["type"] != "bench" or not options.ops or row["op"] in options.ops]
    judged = verdict.judged(rows)
    written = render(rows, options.out, papers=("light", "dark")) if options.out else []
    if options.json:
        roof = query.one(rows, "roof")
        flats = ceilings(roof, set(roof["matmul"]))
        print(
            json.dumps(
                {
                    "run": rows[0]["run"],
                    "roof": roof,
                    "ceilings": flats,
                    "rungs": judged,
                    "files": [str(p) for p in written],
                },
                indent=1,
            )
        )
        return 0
    _print(judged)
    for path in written:
        print(path)
    return 0


def _print(judged: list[dict[str, Any]]) -> None:
    from ridgeline.lab.tables import console, figure, print_table

    out = console()
    for work in dict.fromkeys(query.key(row) for row in judged):
        some = [row for row in judged if query.key(row) == work]
        rows = [(row["impl"], row["verdict"], figure(row["share"], units.percent)) for row in some]
        print_table(" ".join(work), ["rung", "why"], ["of roof"], rows, out)
