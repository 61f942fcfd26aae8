"""The report as one HTML file that asks the network for nothing: style, scripts and data are inside it.

The data of a fold or a chart is packed as gzip in base64. `page.js` unpacks it when the reader opens the fold or
scrolls to the chart, so the first screen is plain HTML.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from base64 import b64encode
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ridgeline.lab.analysis import roofline
from ridgeline.lab.measurement.model import table as model_table
from ridgeline.lab.presentation.micro import pictures, tables
from ridgeline.lab.presentation.report import view
from ridgeline.lab.presentation.report.shell import HERE, rendered
from ridgeline.lab.presentation.report.view import Source

if TYPE_CHECKING:
    from ridgeline.lab.presentation.report.measure import Left


def render(
    sources: list[Source],
    *,
    kernels: list[dict[str, Any]] | None = None,
    checks: list[dict[str, Any]] | None = None,
    changes: dict[str, Any] | None = None,
    left: list[Left] | None = None,
    minutes: float | None = None,
    micro: list[dict[str, Any]] | None = None,
) -> str:
    """Returns the page. sources: the runs that it shows, the main one first.

    kernels: from `measure.tables`; checks: from `view.checked`; changes: from `view.changes`; left: what the time of
    `minutes` had no room for; micro: records of `ridgeline micro`. Every name is escaped, and only the page's own
    scripts may run.
    """
    import vl_convert

    bundle, js = vl_convert.javascript_bundle(), (HERE / "page.js").read_text()
    hashes = (f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (bundle, js))
    kernels, checks, left = kernels or [], checks or [], left or []
    compiled = {table["op"]: table for table in kernels}
    shown = {id(s): _source(s, len(sources) > 1, [] if n else checks) for n, s in enumerate(sources)}
    timed = view.names(sources)
    names = [*timed, *(op for op in compiled if op not in timed)]
    words = {"groups": roofline.GROUPS, "themes": {paper: roofline.theme(paper) for paper in roofline.PAPER}}
    return rendered(
        "page.html.j2",
        sources=list(shown.values()),
        states=view.states(sources[0], checks, kernels, changes, left, minutes),
        families=_families([_op(name, sources, shown, compiled.get(name)) for name in names]),
        gpus=view.overview(kernels) if kernels else [],
        checks=checks,
        micro=[_micro(record, n) for n, record in enumerate(micro or [])],
        changes=changes,
        left=left,
        minutes=minutes,
        groups=roofline.GROUPS,
        step_heads=model_table.HEADS,
        words=packed(words),
        bundle=packed(bundle),
        js=js,
        scripts=f"{' '.join(hashes)} 'unsafe-eval'",
    )


def _micro(record: dict[str, Any], n: int) -> dict[str, Any]:
    """A card's own numbers: its sweeps as charts, and a table of each part."""
    shown = tables.tables(record)
    days = sorted({about["time"][:10] for about in record["parts"].values()})
    drawn = [
        {
            "id": f"micro-{n}-{part}",
            "title": pictures.TITLES[part],
            "hint": pictures.HINTS[part],
            "data": packed(chart.to_dict(validate=False)),
        }
        for part, chart in pictures.charts(record).items()
    ]
    return {
        "name": record["gpu"],
        "when": f"measured {' and '.join([*days[:1], *days[1:][-1:]])}",
        "charts": drawn,
        "tables": shown,
        "sources": tables.named(shown),
    }


def packed(value: Any) -> str:
    """Returns a value's JSON, or a text itself, as gzip in base64."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _source(source: Source, many: bool, checks: list[dict[str, Any]]) -> dict[str, Any]:
    found = roofline.points(source.bench)
    flat = sorted({row["op"] for row in source.bench if row["status"] == "ok"} - {point["op"] for point in found})
    runs = len({row["run"] for row in source.bench})
    date, commit = source.run["time"][:10], source.run["commit"]
    old = f"recorded up to {date}, {runs} runs" if runs > 1 else f"recorded {date}, commit {commit}"
    return {
        "name": source.name,
        "recorded": source.recorded,
        "badge": old if source.recorded else "this machine" if many else "",
        "headline": view.headline(source, checks),
        "beneath": view.beneath(source),
        "tiles": view.tiles(source),
        "facts": view.facts(source),
        "steps": [
            {"title": title, "rows": [(row["variant"], model_table.cells(row)) for row in rows]}
            for title, rows in model_table.timed(source.rows).items()
        ],
        "chart": packed(roofline.chart(source.rows).to_dict(validate=False)) if found else "",
        "drawn": len(found),
        "flat": ", ".join(flat),
    }


def _op(
    name: str, sources: list[Source], shown: dict[int, dict[str, Any]], compiled: dict[str, Any] | None
) -> dict[str, Any]:
    """An op's line of the page, with the best implementation on each source, and what is in its fold."""
    about, ideas = _registered(name)
    panels, bests = [], []
    for source in sources:
        ladder = view.ladder(source, name, ideas) if source.works(name) else None
        bests.append(view.largest(source, name))
        if source.works(name):
            place = {key: shown[id(source)][key] for key in ("name", "badge", "recorded")}
            panels.append(place | {"ladder": ladder, "tables": view.tables(source, name)})
    return {
        "name": name,
        "about": about,
        "family": _family(name),
        "bests": bests,
        "data": packed({"op": name, "panels": panels, "kernels": compiled}),
    }


def _families(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for op in ops:
        found.setdefault(op["family"], []).append(op)
    return [{"name": name, "ops": members} for name, members in found.items()]


def _family(name: str) -> str:
    from ridgeline.op import op_modules

    return op_modules().get(name, "ridgeline.ops.others.").split(".")[2]


def _registered(name: str) -> tuple[str, dict[str, str]]:
    """Returns what the registry says of an op: its first line of documentation, and each implementation's idea.

    Both are empty for an op of an old run that no longer exists.
    """
    from ridgeline.op import get, op_modules

    if name not in op_modules():
        return "", {}
    op = get(name)
    line = (import_module(op.function.__module__).__doc__ or "").strip().split("\n")[0]
    return line.split(": ", 1)[-1], {i.name: i.idea for i in op.implementations.values()}
