"""The report as one HTML file that asks the network for nothing: its style, its scripts and its charts are inside it."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline.lab import roofline
from ridgeline.lab.report import view
from ridgeline.lab.report.view import Source

HERE = Path(__file__).parent


def render(
    sources: list[Source],
    *,
    kernels: list[dict[str, Any]] | None = None,
    checks: list[dict[str, Any]] | None = None,
    changes: dict[str, Any] | None = None,
    notes: list[str] | None = None,
) -> str:
    """The page. sources: the runs that it shows, the main one first. Every name in them is escaped, and no script but our own runs.

    kernels: as `measure.kernels` makes them; checks: {"title", "passed", "failed", "note"}; changes: as `view.changes` makes them.
    """
    import vl_convert
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    bundle, js = vl_convert.javascript_bundle(), (HERE / "page.js").read_text()
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = {id(source): _source(source) for source in sources}
    return environment.get_template("page.html.j2").render(
        sources=list(shown.values()),
        ops=[_op(name, sources, shown) for name in view.names(sources)],
        many=len(sources) > 1,
        kernels=kernels or [],
        checks=checks or [],
        changes=changes,
        notes=notes or [],
        groups=roofline.GROUPS,
        themes={paper: roofline.theme(paper) for paper in roofline.PAPER},
        css=(HERE / "page.css").read_text(),
        bundle=bundle,
        js=js,
        hashes=" ".join(
            f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (bundle, js)
        ),
    )


def _source(source: Source) -> dict[str, Any]:
    found = roofline.points(source.bench)
    flat = sorted({row["op"] for row in source.bench if row["status"] == "ok"} - {point["op"] for point in found})
    return {
        "name": source.name,
        "label": source.label,
        "recorded": source.recorded,
        "date": source.run["time"][:10],
        "commit": source.run["commit"],
        "runs": len({row["run"] for row in source.bench}),
        "headline": view.headline(source),
        "beneath": view.beneath(source),
        "tiles": view.tiles(source),
        "facts": view.facts(source),
        "chart": roofline.chart(source.rows).to_dict() if found else None,
        "drawn": len(found),
        "flat": ", ".join(flat),
    }


def _op(name: str, sources: list[Source], shown: dict[int, dict[str, Any]]) -> dict[str, Any]:
    about, ideas = _registered(name)
    panels = [
        {"source": shown[id(source)], "ladder": view.ladder(source, name, ideas), "tables": view.tables(source, name)}
        for source in sources
        if source.works(name)
    ]
    return {"name": name, "about": about, "panels": panels}


def _registered(name: str) -> tuple[str, dict[str, str]]:
    """What the registry says of an op: the first line of its page, and each rung's idea. A run may hold ops that are no more."""
    from ridgeline.op import get, op_modules

    if name not in op_modules():
        return "", {}
    op = get(name)
    line = (import_module(op.function.__module__).__doc__ or "").strip().split("\n")[0]
    return line.split(": ", 1)[-1], {i.name: i.idea for i in op.implementations.values()}
