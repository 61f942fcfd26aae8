"""The verb `report`: gathers what the page shows, from this machine or from recorded runs, and writes it in one step."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline.lab import results, roofline, store
from ridgeline.lab.report import measure, page, view
from ridgeline.lab.report.measure import say
from ridgeline.lab.report.view import Source

MINUTES = {"kernels": 1.5, "interpreter": 1.5}
QUICK = 0.25


def run(options: argparse.Namespace) -> int:
    out = (options.out or Path("report")) / "index.html"
    for needed in ("altair", "jinja2", "vl_convert"):
        import_module(needed)  # what is missing is said before minutes of measuring
    _writable(out)
    gathered = _recorded(options.run) if options.run else _measured(options.quick)
    roofline.write(out, page.render(**gathered).encode())
    print(out)
    return 0


def _writable(out: Path) -> None:
    """Finds out before measuring whether the page can be written."""
    probe = out.with_name(".writable")
    roofline.write(probe, b"")
    probe.unlink()


def _recorded(runs: list[str]) -> dict[str, Any]:
    sources = [Source(store.load(store.find(run)), recorded=True) for run in runs]
    checks = [{"title": source.name, "note": "", **view.checked(source.checks)} for source in sources if source.checks]
    return {"sources": sources, "checks": checks, "changes": _changes(sources[0])}


def _measured(quick: bool) -> dict[str, Any]:
    """Measures this machine; beside it, where it has no GPU, the recorded figures of every GPU."""
    from ridgeline.op import registry

    scale = QUICK if quick else 1.0
    mine = Source(measure.bench(quick))
    beside = [] if mine.gpu else [Source(rows, recorded=True) for rows in results.gpus(store.recorded()).values()]
    checks = [{"title": f"On {mine.name}", "note": "", **view.checked(mine.checks)}]
    if not mine.gpu:
        rows, note = measure.interpreted(60 * MINUTES["interpreter"] * scale)
        checks.append(
            {"title": "Triton's kernels, in Triton's interpreter on this CPU", "note": note, **view.checked(rows)}
        )
    tables, left_out = measure.kernels(registry(), time.monotonic() + 60 * MINUTES["kernels"] * scale, say)
    say("")
    return {
        "sources": [mine, *beside],
        "kernels": tables,
        "checks": checks,
        "changes": _changes(mine),
        "notes": left_out,
    }


def _changes(now: Source) -> dict[str, Any] | None:
    """What is different from the last run on such a machine, where there is one."""
    before = store.latest(store.slug(now.machine["gpu"]), before=now.run["run"])
    return view.changes(now, Source(store.load(before))) if before else None
