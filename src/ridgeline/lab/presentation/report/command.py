"""The verb `report`: gathers what the page shows, from this machine or recorded runs, and writes it in one step."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline.lab.analysis import roofline
from ridgeline.lab.measurement import results, store
from ridgeline.lab.measurement.micro import kept
from ridgeline.lab.presentation.report import chinese, measure, page, view
from ridgeline.lab.presentation.report.budget import MINUTES, QUICK_MINUTES, Budget
from ridgeline.lab.presentation.report.measure import say
from ridgeline.lab.presentation.report.view import Source


def run(options: argparse.Namespace) -> int:
    minutes = _minutes(options)
    budget = Budget(minutes)
    out = (options.out or Path("report")) / "index.html"
    for needed in ("altair", "jinja2", "vl_convert"):
        import_module(needed)  # a missing package is an error now, not after minutes of measuring
    _writable(out)
    gathered = _recorded(options.run) if options.run else _measured(options.quick, budget)
    gathered["micro"] = _micro(gathered["sources"])
    roofline.write(out, chinese.spoken(page.render(**gathered)).encode())
    print(out)
    return 0


def _minutes(options: argparse.Namespace) -> float:
    from ridgeline.op import RidgelineError

    given: float | None = options.minutes
    minutes = (QUICK_MINUTES if options.quick else MINUTES) if given is None else given
    if not 0 < minutes < 1440:
        raise RidgelineError(f"--minutes must be above 0 and under a day (1440), and is {minutes:g}")
    return minutes


def _writable(out: Path) -> None:
    """Raises RidgelineError, before anything is measured, if the page cannot be written."""
    probe = out.with_name(".writable")
    roofline.write(probe, b"")
    probe.unlink()


def _recorded(runs: list[str]) -> dict[str, Any]:
    sources = [Source(store.load(store.find(run)), recorded=True) for run in runs]
    checks = [view.checked(source.name, source.checks) for source in sources if source.checks]
    return {"sources": sources, "checks": checks, "changes": _changes(sources[0])}


def _measured(quick: bool, budget: Budget) -> dict[str, Any]:
    """Measures this machine. Without a GPU, also reads what is recorded on GPUs."""
    from ridgeline.op import op_modules

    rows, left = measure.bench(quick, budget.until("times"), budget.clock)
    mine = Source(rows)
    beside = [] if mine.gpu else [Source(found, recorded=True) for found in results.gpus(store.recorded()).values()]
    proofs = measure.proofs(list(op_modules()), not mine.gpu, budget.until("proofs"), budget.clock)
    checks = [view.checked(f"Every implementation that runs on {mine.name}", mine.checks)]
    if not mine.gpu:
        checks.append(view.checked("Triton's kernels, in Triton's interpreter on this CPU", proofs.checks))
    say("")
    return {
        "sources": [mine, *beside],
        "kernels": proofs.tables,
        "checks": checks,
        "changes": _changes(mine),
        "left": [*left, *proofs.left],
        "minutes": budget.minutes,
    }


def _micro(sources: list[Source]) -> list[dict[str, Any]]:
    """What `ridgeline micro` measured on the GPUs that the page shows."""
    gpus = dict.fromkeys(source.machine["gpu"] for source in sources if source.gpu)
    return [record for record in map(kept.of, gpus) if record is not None]


def _changes(now: Source) -> dict[str, Any] | None:
    """Returns the differences from the last run on such a machine, if there is one."""
    before = store.latest(store.slug(now.machine["gpu"]), before=now.run["run"])
    return view.changes(now, Source(store.load(before))) if before else None
