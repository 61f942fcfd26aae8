"""Answers all of the language-model lab for one size on one HTML page, of this machine and of recorded runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.lm import lab, parts, survey, views
from ridgeline.lm.lab import units
from ridgeline.lm.parts import PARTS, Row
from ridgeline.lm.setup import SHAPE, chosen_device, flags, shape, tokens_of
from ridgeline.op import RidgelineError

BENCH = 0.35  # of the time
LEAST = 20.0  # seconds that a part may take at least, if there are as many: a process starts in up to ten
SIZELESS = ("precision", "attention", "scale", "survey", "leaderboard")  # verbs whose command names no size
DROP = ("out", "minutes", "recorded", "record", "part", "commit")


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("lm-report"), metavar="FOLDER", help="write index.html there (lm-report)")
    add("--minutes", type=float, default=5.0, metavar="N", help="the time to keep to (5)")
    add("--recorded", type=Path, nargs="+", metavar="FILE", help="measure nothing: show these recorded runs")
    add("--record", type=Path, metavar="FILE", help="also keep what is measured as a run's file")
    add("--commit", metavar="SHA", help="the commit, where the source tree is a copy without git")
    add("--part", choices=PARTS, help=argparse.SUPPRESS)  # this process measures one part


def gathered(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of all parts, each within its share of what is left of the time."""
    end = time.monotonic() + 60 * options.minutes
    some = argparse.ArgumentParser()
    survey.arguments(some)
    changes = {"sizes": [options.size], "precisions": [options.precision], "context": options.context,
               "batch": options.batch, "device": options.device, "minutes": BENCH * options.minutes,
               "limit": 60 * BENCH * options.minutes, "most": 2 * options.context}  # fmt: skip
    if changed(options):
        yield parts.row("bench", options, direction="all", status="left out",
                        reason="lm survey times named sizes only, and this one was changed by flags")  # fmt: skip
    else:
        yield from survey.rows(argparse.Namespace(**vars(some.parse_args([])) | changes))
    waiting = sum(share for _, share in PARTS.values())
    for name, (_, share) in PARTS.items():
        spare = max(0.0, end - time.monotonic())
        until = time.monotonic() + max(spare * share / waiting, min(LEAST, spare))
        waiting -= share
        yield from one(name, options, until)


def changed(options: argparse.Namespace) -> bool:
    return any(getattr(options, name) is not None for name in SHAPE)


def one(name: str, options: argparse.Namespace, until: float) -> Iterator[Row]:
    """Yields the rows of a part, from a process of its own that ends in time."""
    lines = lab.Lines(lab.command("report", options, DROP, part=name))
    try:
        while (row := lines.next(until - time.monotonic())) is not None:
            if "done" in row:
                return
            yield row
        why = lines.fault()
        status = "failed" if why else "left out"
        yield parts.row(name, options, direction="all", status=status, reason=why or "there was no time for all of it")
    finally:
        lines.end()


def source(run: dict[str, Any], rows: list[Row], recorded: bool, many: bool) -> dict[str, Any]:
    """Returns what the page says of a run."""
    about = lab.about(run)
    badge = f"recorded {about['date']}, commit {about['commit']}" if recorded else "this machine" if many else ""
    return about | {"recorded": recorded, "badge": badge, "rows": rows}


def stored(path: Path) -> dict[str, Any]:
    """Returns what the page says of a recorded run, with the boards that the same GPU's answers to the course hold."""
    run, rows = lab.recording(path)
    held = {r["part"] for r in rows}
    return source(run, rows + ([] if "leaderboard" in held else lab.boards(path.stem)), recorded=True, many=True)


def missing(rows: list[Row], options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Returns what was left out or failed: what, why, and the command that does it."""
    words = " ".join(word for word in parts.model(options))
    found = []
    for row in rows:
        if row["status"] in ("left out", "failed"):
            verb = {"context": "survey", "overhead": "profile", "first": "bench --first"}.get(row["part"], row["part"])
            command = f"ridgeline lm {verb} {'' if verb in SIZELESS else words}"
            what = f"{row['part']}, {row['case']} {row['dtype']} {row['impl']}"
            why = row.get("reason", "") if row["status"] == "left out" else f"failed: {row.get('reason')}"
            found.append((what, why, command.strip()))
    return list(dict.fromkeys(found))


def headline(first: dict[str, Any]) -> tuple[str, str]:
    """Returns the sentence at the top and the one beneath it."""
    steps: dict[tuple[str, str], dict[str, Row]] = {}
    for row in first["rows"]:
        if row["part"] == "bench" and row["direction"] == "step" and row.get("seconds"):
            steps.setdefault((row["case"], row["dtype"]), {})[row["impl"]] = row
    both = [(w, r) for w, r in steps.items() if "ours" in r and ("plain" in r or "compiled" in r)]
    if not both:
        return f"A language model on {first['name']}", "No step was timed in two ways."
    (case, dtype), found = both[0]
    ours = found["ours"]["seconds"]["median"]
    others = {n: found[n]["seconds"]["median"] for n in ("compiled", "plain") if n in found}
    best = min(others, key=others.__getitem__)
    a, b = found["ours"]["seconds"], found[best]["seconds"]
    apart = a["high"] < b["low"] or b["high"] < a["low"]
    ratio = units.times(others[best] / ours)
    said = (
        f"at {ratio} the speed of the {best} formulas" if apart else f"as fast as the {best} formulas, within the noise"
    )
    rate = f"{found['ours']['tokens_per_second']:,.0f} tokens/s"
    beneath = f"A training step of {case} tokens in {dtype} takes {units.seconds(ours)}: {rate}."
    return f"{first['name']}: a step of {case.split()[0]} {said}", beneath


def render(sources: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Returns the page. sources: from `source`, the main one first."""
    sections: list[dict[str, Any]] = []
    for name, short, title, lead, view in views.SECTIONS:
        shown = [(s, view(s["rows"])) for s in sources]
        shown = [(s, found) for s, found in shown if found.tables or found.pictures or found.said]
        if shown:
            sections.append({"id": name, "short": short, "title": title, "lead": lead, "shown": shown})
    left = [] if sources[0]["recorded"] else missing(sources[0]["rows"], options)
    top, beneath = headline(sources[0])
    states = [("Recorded", ". ".join(headline(other)), "bench") for other in sources[1:]]
    if left:
        states.append(("Left out", f"{len(left)} parts, to keep to {options.minutes:g} minutes", "left"))
    return lab.page("page.html.j2", title=sources[0]["name"], sections=sections, sources=sources, left=left,
                    headline=top, beneath=beneath, states=states, minutes=options.minutes, sizes=views.sizes(),
                    percent=units.percent)  # fmt: skip


def writable(out: Path) -> None:
    """Raises RidgelineError, before anything is measured, if the page cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a"):
            pass
    except OSError as error:
        raise RidgelineError(f"lm report: {out} cannot be written: {error.strerror}") from error


def main(options: argparse.Namespace) -> int:
    """Measures, and writes the page."""
    if options.part:
        parts.work(options)
        return 0
    if not 0 < options.minutes < 1440:
        raise RidgelineError(f"lm report: --minutes must be above 0 and under a day (1440), and is {options.minutes:g}")
    shape(options), chosen_device(options), tokens_of(options)
    out = options.out / "index.html"
    writable(out)
    if options.recorded:
        sources = [stored(path) for path in options.recorded]
    else:
        device = chosen_device(options).type
        run = lab.Recording(options.record or options.out / "run.jsonl", device, options.commit)
        for row in gathered(options):
            run.write(row)
            if not options.json:
                lab.say(survey.line(row))
        files = sorted(lab.recorded().glob("*.jsonl")) if device == "cpu" else []
        mine = source(*lab.recording(run.path), recorded=False, many=bool(files))
        sources = [mine, *map(stored, files)]
    out.write_text(render(sources, options))
    lab.say(str(out))
    return 0
