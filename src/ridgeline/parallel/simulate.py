"""`ridgeline parallel simulate`: a step's timeline, slow links between sites, stops, and the public runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ridgeline.op import RidgelineError
from ridgeline.parallel import failures, pictures, published, recorded, wan
from ridgeline.parallel.cost import Job, Layout, predict, stack
from ridgeline.parallel.plan import band_of, flags, job_of, margin, wanted_of
from ridgeline.parallel.schedule import Timeline, simulate
from ridgeline.parallel.search import checked
from ridgeline.parallel.wording import count, figure, giga, percent, positive, seconds, table

DRAWN = 6000  # spans of a picture
NEAR = 7  # spans on either side of the turn that a rank's picture enlarges


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser)
    add = parser.add_argument
    add("--micro", type=count, metavar="N", help="sequences of a micro-batch (the quickest)")
    add("--stages", action="store_true", help="the timeline of all stages, not of one rank")
    add("--trace", type=Path, metavar="FILE", help="write the timeline as a Chrome trace")
    add("--picture", type=Path, metavar="FILE", help="write the timeline as SVG")
    add("--wan", action="store_true", help="sites that exchange weights over slow links, each with all these GPUs")
    add("--sites", type=count, metavar="N", help="instead of the cluster's sites, for --wan")
    add("--gbps", type=positive, metavar="N", help="10^9 bits/s between sites, instead of the cluster's, for --wan")
    add("--failures", action="store_true", help="goodput where GPUs stop and checkpoints take time")
    add("--against", choices=("published", "recorded"), help="hold the model against public runs, or our own steps")


def chosen(job: Job, options: argparse.Namespace) -> Layout:
    """Returns the quickest layout of the flags' sizes. Raises RidgelineError as `search.checked` does."""
    best = checked(job, wanted_of(options)).best
    if options.micro:
        sizes = sorted({one.layout.micro for one in best}, key=lambda n: abs(n - options.micro))
        if sizes[0] != options.micro:
            raise RidgelineError(
                f"parallel simulate: no layout that fits takes micro-batches of {options.micro} sequences; "
                f"the nearest that does is {sizes[0]}"
            )
        best = [one for one in best if one.layout.micro == options.micro]
    return best[0].layout


def trace(found: Timeline, job: Job, layout: Layout) -> dict[str, Any]:
    """Returns a timeline as a Chrome trace: a process for the step, a thread for each lane, times in microseconds."""
    lanes = {name: n for n, name in enumerate(found.lanes())}
    title = f"{job.shape.name}, {layout.text}"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for name, n in lanes.items():
        events.append({"ph": "M", "pid": 0, "tid": n, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 0, "tid": n, "name": "thread_sort_index", "args": {"sort_index": n}})
    for s in found.spans:
        one = {"ph": "X", "pid": 0, "tid": lanes[s.lane], "name": s.label, "cat": s.kind}
        events.append(one | {"ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def drawing(found: Timeline, job: Job, layout: Layout) -> str:
    """Returns a timeline's picture: of one with many spans, the first part; of a rank, some layers enlarged too."""
    spans = sorted(found.spans, key=lambda s: s.start)
    cut, end = "", found.seconds
    if len(spans) > DRAWN:
        spans, left = spans[:DRAWN], len(spans) - DRAWN
        end = max(s.end for s in spans)
        cut = f"The first {seconds(end)} of {seconds(found.seconds)}: {left:,} later spans are left out."
    lanes: dict[str, list[tuple[float, float, str, str]]] = {name: [] for name in sorted(found.lanes(), key=placed)}
    for s in spans:
        lanes[s.lane].append((s.start, s.end, s.kind, s.label))
    panels = [pictures.Panel("", lanes, 0.0, end)]
    if "compute" in lanes and len(spans) > 4 * NEAR:  # around the first turn from forward to backward
        work = lanes["compute"]
        turn = next((n for n, one in enumerate(work) if one[2] == "backward"), 0)
        first, last = work[max(0, turn - NEAR)], work[min(len(work) - 1, turn + NEAR)]
        panels[0] = pictures.Panel("The whole step", lanes, 0.0, end)
        panels.append(pictures.Panel("Where backward begins, enlarged", lanes, first[0], last[1]))
    title = f"{job.shape.name} on {layout.world:,} GPUs: a step of {seconds(found.seconds)}"
    return pictures.timeline(title, f"{job.cluster.title}; {layout.text}. Simulated.", panels, cut)


def placed(lane: str) -> tuple[int, str]:
    """Returns where a lane goes: stages by number, compute above communication."""
    number = lane.partition(" ")[2]
    return (int(number), lane) if number else (lane == "communication", lane)


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Simulates a step, writes what the flags ask for, and returns what it says."""
    job = job_of(options)
    layout = chosen(job, options)
    found, cost = simulate(job, layout, options.stages)
    if options.trace:
        options.trace.write_text(json.dumps(trace(found, job, layout)))
    if options.picture:
        options.picture.write_text(drawing(found, job, layout))
    return {
        "layout": layout.text, "seconds": found.seconds, "closed_form": cost.seconds, "spans": len(found.spans),
        "apart": found.seconds / cost.seconds - 1, "band": band_of(job),
    }  # fmt: skip


def slow_links(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the exchanges of sites that each have the flags' GPUs."""
    job = job_of(options)
    sites = options.sites or max(2, job.cluster.sites)
    egress = options.gbps * 1e9 / 8 if options.gbps else job.cluster.wan
    if not egress:
        raise RidgelineError(
            f"parallel simulate: the cluster {job.cluster.name} has no link between sites; "
            "give --gbps, or --cluster two-sites"
        )
    layout = chosen(job, options)
    at_site = predict(job, layout).seconds
    latency = job.cluster.wan_latency or 0.03
    found = wan.exchanges(at_site, job.shape.parameters, sites, egress, latency)
    rows = [
        {"exchange": name, "local_steps": one.local, "move_seconds": one.move, "utilisation": one.utilisation,
         "in_background": one.hidden, "stale_steps": one.stale}
        for name, those in found.items() for one in those
    ]  # fmt: skip
    return {"sites": sites, "bytes_per_second": egress, "step": at_site, "layout": layout.text, "rows": rows}


def stops(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the goodput of a job, for its GPUs and for more and fewer."""
    job = job_of(options)
    nbytes = job.shape.parameters * (14 if job.stack.state == "mixed" else 6)  # weights and moments
    rows = []
    most = job.cluster.most or max(options.gpus, 65_536)
    if options.gpus > most:
        raise RidgelineError(f"parallel simulate: the cluster {job.cluster.name} has no more GPUs than {most}")
    for gpus in sorted(n for n in {options.gpus, 1024, 4096, 16_384, 65_536} if n <= most):
        g = failures.goodput(job.cluster, gpus, nbytes)
        rows.append({"gpus": gpus, "between_stops": g.between_stops, "save": g.save, "interval": g.interval,
                     "saving": g.saving, "lost": g.lost, "restarting": g.restarting, "goodput": g.share})  # fmt: skip
    return {"model": job.shape.name, "checkpoint_bytes": nbytes, "rows": rows}


def public() -> list[dict[str, Any]]:
    """Returns the public runs beside what the model predicts of them."""
    return published.rows()


def own() -> list[dict[str, Any]]:
    """Returns our own recorded steps beside what the model predicts of them."""
    rows = []
    for one in recorded.STEPS:
        guess = recorded.predict(one)
        rows.append({"step": one.name, "recorded": one.seconds, "low": one.low, "high": one.high, "bound": guess.bound,
                     "use": "calibrates" if one.name in recorded.CALIBRATES else "",
                     "predicted": guess.seconds, "error": guess.seconds / one.seconds - 1,
                     "source": one.source})  # fmt: skip
    return rows


def signed(x: float) -> str:
    return f"{100 * x:+.0f}%" if abs(x) >= 0.0995 else f"{100 * x:+.1f}%"


def say_public(rows: list[dict[str, Any]]) -> None:
    for name in published.calibrating():
        one = published.stack(name)
        constants = f"compute {figure(one.compute)}, link {figure(one.link)}, jitter {figure(one.jitter, 2)}"
        print(f"{name}: {constants}; {one.source}")
        lines = [
            [r["run"], r["unit"], f"{r['published']:,.0f}", figure(r["predicted"]), signed(r["error"]), r["use"]]
            for r in rows if r["stack"] == name
        ]  # fmt: skip
        print(table(("run", "unit", "published", "predicted", "error", "use"), lines, 2))
        print(f"  held out: two thirds within ±{percent(published.spread(name))}\n")


def say(options: argparse.Namespace, found: Any) -> None:
    """Prints what a part of the verb found."""
    if options.against == "published":
        say_public(found)
    elif options.against == "recorded":
        lines = [
            [r["step"], seconds(r["recorded"]), seconds(r["predicted"]), signed(r["error"]), r["bound"], r["use"],
             r["source"]]
            for r in found
        ]  # fmt: skip
        print(table(("step on one H200", "recorded", "predicted", "error", "bound by", "use", "source"), lines))
        ours = stack("ridgeline")
        print(
            f"  the host takes {seconds(ours.host_tensor)} a parameter tensor and {seconds(ours.host_step)} a step, "
            "by the parts of the steps that calibrate"
        )
    elif options.wan:
        print(f"{found['sites']} sites, each {found['layout']}: a step of {seconds(found['step'])} at a site")
        lines = [
            [r["exchange"], f"{r['local_steps']}", seconds(r["move_seconds"]), percent(r["utilisation"]),
             percent(r["in_background"]), f"{r['stale_steps']:,}"] for r in found["rows"]
        ]  # fmt: skip
        heads = "exchange", "local steps", "takes", "computes", "in background", "stale by (steps)"
        print(table(heads, lines))
    elif options.failures:
        print(f"{found['model']}: a checkpoint of {giga(found['checkpoint_bytes'])}")
        lines = [
            [f"{r['gpus']:,}", seconds(r["between_stops"]), seconds(r["save"]), seconds(r["interval"]),
             percent(r["saving"]), percent(r["lost"]), percent(r["restarting"]), percent(r["goodput"])]
            for r in found["rows"]
        ]  # fmt: skip
        names = "GPUs", "stop every", "a save", "save every", "saving", "lost", "restarting", "goodput"
        print(table(names, lines))
    else:
        print(f"{found['layout']}: {seconds(found['seconds'])} {margin(found['band'])}, {found['spans']:,} spans")
        print(
            f"  the closed form says {seconds(found['closed_form'])}; the simulation is {signed(found['apart'])} apart"
        )
        for name in ("trace", "picture"):
            if getattr(options, name):
                print(f"  {name}: {getattr(options, name)}")


def main(options: argparse.Namespace) -> int:
    """Prints a simulated step, or what one of the other flags asks for."""
    if sum(map(bool, (options.wan, options.failures, options.against))) > 1:
        raise RidgelineError("parallel simulate: --wan, --failures and --against are one at a time")
    if options.against:
        found: Any = public() if options.against == "published" else own()
    elif options.wan:
        found = slow_links(options)
    else:
        found = stops(options) if options.failures else step(options)
    if options.json:
        print(json.dumps(found))
    else:
        say(options, found)
    return 0
