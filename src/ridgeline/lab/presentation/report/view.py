"""The contents of the page, from rows alone: plain values that the template lays out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ridgeline.lab import units
from ridgeline.lab.analysis import ladder as ladders
from ridgeline.lab.analysis import roofline, verdict
from ridgeline.lab.analysis.verdict import WAYS, Row
from ridgeline.lab.measurement import query
from ridgeline.lab.measurement.compare import compare
from ridgeline.lab.measurement.limits import CODES
from ridgeline.lab.tables import figure, timing

if TYPE_CHECKING:
    from ridgeline.lab.presentation.report.measure import Left

STATUS = {
    "wrong": "wrong result",
    "oom": "out of memory",
    "refused": "figure refused",
    "unsupported": "cannot run",
    "skipped": "skipped",
}

RANK = ("backward", "forward", "both")
MOST = 20  # differences from the last run that are listed


@dataclass
class Source:
    """One run as the page sees it. recorded: measured elsewhere, at another time."""

    rows: list[Row]
    recorded: bool = False

    def __post_init__(self) -> None:
        self.run, self.roof = query.one(self.rows, "run"), query.one(self.rows, "roof")
        self.bench, self.checks = query.of(self.rows, "bench"), query.of(self.rows, "check")
        self.machine: dict[str, Any] = self.run["machine"]
        self.gpu = self.machine["gpu"] is not None

    @property
    def name(self) -> str:
        """The GPU's or the CPU's name without its trademarks and clock."""
        return " ".join(re.sub(r"\((R|TM)\)|@.*|\bCPU\b", " ", self.machine["gpu"] or self.machine["cpu"]).split())

    @property
    def label(self) -> str:
        return f"{self.name}, recorded" if self.recorded else self.name

    def works(self, op: str) -> dict[tuple[str, str, str, str], list[Row]]:
        """The op's bench rows by what was timed, in the order of the file."""
        found: dict[tuple[str, str, str, str], list[Row]] = {}
        for row in self.bench:
            if row["op"] == op:
                found.setdefault(query.key(row), []).append(row)
        return found


def ours(row: Row) -> bool:
    """Whether a timed row is a kernel of Ridgeline's."""
    return row["status"] == "ok" and not row["peer"] and row["kind"] in WAYS


def best(rows: list[Row]) -> Row | None:
    """The fastest timed row: of Ridgeline's kernels where there are any, else of all."""
    timed = [r for r in rows if ours(r)] or [r for r in rows if r["status"] == "ok"]
    return min(timed, key=lambda r: r["seconds"]["median"], default=None)


def champions(source: Source) -> list[Row]:
    """The best implementation of every case that memory or arithmetic limits, not the cache or the host."""
    launch_us = source.roof["launch_us"]
    works: dict[tuple[str, ...], list[Row]] = {}
    for row in source.bench:
        works.setdefault(query.key(row), []).append(row)
    found = [best(rows) for rows in works.values()]
    whole = [r for r in found if r and verdict.bound(r, launch_us, source.gpu) in ("memory", "compute")]
    return [r for r in whole if not r.get("cached")] or whole


def headline(source: Source, checks: list[dict[str, Any]]) -> str:
    """The main result in one sentence: on a GPU how fast its kernels are, on a CPU whether results are right."""
    found = champions(source)
    if any(ours(r) for r in found):
        said = f"{source.name}: Ridgeline's kernels run at {_share(found)} of the hardware's limit"
        ratios = [r["ratio"] for r in found if r.get("ratio")]
        return f"{said}, {units.times(median(ratios))} as fast as the best alternative." if ratios else f"{said}."
    name = source.name if source.gpu else f"{source.name}, no GPU"
    passed, failed = totals(checks)
    if failed:
        return f"{name}: {failed:,} of {count(passed + failed, 'checked result')} are wrong."
    if passed:
        said = f"all {passed:,} checked results are" if passed > 1 else "the one checked result is"
        return f"{name}: {said} correct."
    return f"{name}: {count(len(names([source])), 'operation')} timed." if found else f"{name}: nothing was timed."


def totals(checks: list[dict[str, Any]]) -> tuple[int, int]:
    """How many checks passed, and how many did not."""
    return sum(c["passed"] for c in checks), sum(len(c["failed"]) for c in checks)


def _share(rows: list[Row]) -> str:
    return units.percent(median(r["share"] for r in rows))


def beneath(source: Source) -> str:
    """Returns the work that the headline's figures are taken over."""
    found = champions(source)
    if not found:
        return "Only the limits below were measured."
    cases = count(len(found), "benchmark case")
    if any(ours(r) for r in found):
        return (
            f"Medians over {cases}, each with its fastest kernel. Limit: the fastest possible time at the bandwidth "
            "and FLOP/s measured on this GPU. Alternatives: PyTorch, torch.compile and other packages."
        )
    fit = " that fit into its cache" if all(r.get("cached") for r in found) else ""
    reached = f"reaches {_share(found)} of its measured limit: the median over {cases}{fit}"
    if source.gpu:
        return f"On this GPU, the fastest implementation {reached}."
    return (
        "Ridgeline's kernels need a GPU: here they are checked in an interpreter and compiled, but not timed. "
        f"PyTorch on this CPU {reached}, each with its fastest implementation."
    )


def count(number: int, what: str) -> str:
    """A number with its noun: "1 case", "1,203 cases"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


@dataclass
class State:
    """One line of the first screen: what was done, and whether it went well ("good", "bad" or "")."""

    label: str
    text: str
    tone: str = ""
    link: str = ""


def states(
    source: Source,
    checks: list[dict[str, Any]],
    kernels: list[dict[str, Any]],
    changes: dict[str, Any] | None,
    left: list[Left],
    minutes: float | None,
) -> list[State]:
    """Returns what was measured on the main machine, what is wrong, and what was left out."""
    timed, wrong = ([r for r in source.bench if r["status"] == status] for status in ("ok", "wrong"))
    machine = source.machine
    memory = f"{units.size(machine['memory_bytes'])} of memory"
    what = (
        f"{machine['gpu']} ({machine['arch']})" if source.gpu else f"{source.name}, {count(machine['cores'], 'core')}"
    )
    software = f"PyTorch {machine['torch']}, Triton {machine['triton']}"
    ops = {row["op"] for row in timed}
    found = [
        State("Machine", f"{what}, {memory}{'' if source.gpu else ', no GPU'}; {software}", "", "machine"),
        State("Timed", f"{count(len(ops), 'operation')}, {count(len(timed), 'timing')}", "", "ops"),
    ]
    if checks:
        passed, failed = totals(checks)
        text = (
            f"{failed:,} of {count(passed + failed, 'result')} outside tolerance"
            if failed
            else f"{count(passed, 'result')} within tolerance"
        )
        found.append(State("Correct", text, "bad" if failed else "good" if passed else "", "checks"))
    if wrong:
        peers = sum(r["peer"] for r in wrong)
        of = f"{len(wrong) - peers:,} of Ridgeline's, {peers:,} of alternatives"
        text = f"{of}: their results were wrong, or they raised an error"
        found.append(State("Not timed", text, "bad" if len(wrong) > peers else "", "ops"))
    if kernels:
        rows = [row for table in kernels for row in table["rows"]]
        spills = sum(row["spilled"] for row in rows)
        spilled = f", {spills:,} of them spill registers" if spills else ", none spills registers" if rows else ""
        text = (
            f"{count(len(rows), 'kernel')} for {count(len({row['arch'] for row in rows}), 'GPU architecture')}{spilled}"
        )
        found.append(State("Compiled", text, "", "kernels"))
    if changes:
        found.append(State("Since last run", changes["short"], "", "changes"))
    if left:
        what = ", ".join(f"{item.count:,} {item.what}" for item in left)
        found.append(State("Left out", f"to keep to {minutes:g} minutes: {what}", "", "left"))
    return found


def overview(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per architecture: its first known GPU, and what was compiled for it."""
    from ridgeline.device import ARCHES

    found = []
    for arch, gpu in ARCHES.items():
        rows = [row for table in kernels for row in table["rows"] if row["arch"] == arch]
        found.append(
            {
                "arch": arch,
                "gpu": gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce "),
                "kernels": len(rows),
                "spills": sum(row["spilled"] for row in rows),
                "unsupported": sum(row["arch"] == arch for table in kernels for row in table["not_built"]),
                "left": sum(table["left"].get(arch, 0) for table in kernels),
            }
        )
    return found


def facts(source: Source) -> list[tuple[str, str]]:
    """The machine's particulars, those that are known."""
    m, run = source.machine, source.run
    shown = [
        ("GPU", f"{m['gpu']} ({m['arch']})" if source.gpu else "none"),
        ("CPU", f"{m['cpu']}, {m['cores']} cores"),
        ("Memory", units.size(m["memory_bytes"])),
        ("PyTorch", m["torch"]),
        ("Triton", m["triton"]),
        ("CUDA", m["cuda"]),
        ("Driver", m["driver"]),
        ("Python", m["python"]),
        ("System", m["os"]),
        ("Measured", run["time"].replace("T", " ").replace("+00:00", "").removesuffix("Z") + " UTC"),
        ("Commit", run["commit"] + (", with changes" if run["dirty"] else "")),
        ("Command", run["command"]),
    ]
    return [(name, str(value)) for name, value in shown if value]


def tiles(source: Source) -> list[tuple[str, str, str]]:
    """The roof in a few large figures: (figure, unit, what it is)."""
    roof = source.roof
    halves = [(d, f) for d, f in roof["matmul"].items() if d not in CODES]
    dtype, rate = max(halves, key=lambda item: item[1]["median"])
    copy = roof["copy"]["median"]
    ends = " and ".join(f"{units.scaled(roof[name]['median'], 'B/s')} to {name}" for name in ("read", "write"))
    shape = " x ".join(str(n) for n in rate["shape"])
    shown = [
        (units.scaled(copy, "B/s"), f"memory bandwidth of a copy; {ends}"),
        (units.scaled(rate["median"], "FLOP/s"), f"{dtype} matrix product, {shape}"),
        (f"{units.digits(rate['median'] / copy)} FLOP/B", "ridge point: memory limits work below it, arithmetic above"),
        (units.seconds(roof["launch_us"] / 1e6), "an empty kernel" if source.gpu else "a call that does nothing"),
    ]
    return [(text.split()[0], text.split()[1], what) for text, what in shown]


def names(sources: list[Source]) -> list[str]:
    """The ops that any source has timed: in the registry's order, then those that it no longer has."""
    from ridgeline.op import op_modules

    timed = dict.fromkeys(row["op"] for source in sources for row in source.bench)
    known = op_modules()
    return [op for op in known if op in timed] + [op for op in timed if op not in known]


def line(row: Row, source: Source, siblings: list[Row]) -> dict[str, Any]:
    """One timed rung."""
    low, high = row["seconds"]["low"], row["seconds"]["high"]
    return {
        "impl": row["impl"],
        "group": roofline.group(row),
        "time": units.seconds(row["seconds"]["median"]),
        "spread": units.spread(row["seconds"]),
        "interval": f"95% interval {units.seconds(low)} to {units.seconds(high)}",
        "rate": units.rate(row),
        "share": row["share"],
        "percent": units.share(row),
        "ratio": figure(row["ratio"], units.times),
        "host": figure(row["host_us"], lambda us: units.seconds(us / 1e6)),
        "peak": units.size(row["peak_bytes"]),
        "law": figure(row["law"], units.digits),
        "throttled": bool(row["throttled"]),
        "verdict": verdict.sentence(row, siblings, source.roof["launch_us"], source.gpu),
    }


def left_out(rows: list[Row]) -> list[dict[str, str]]:
    """The rungs that were not timed, together where they have one reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            status: str = row["status"]
            found.setdefault((STATUS.get(status, status), row["reason"] or "no reason given"), []).append(row["impl"])
    return [
        {"impls": ", ".join(impls), "status": status, "reason": reason} for (status, reason), impls in found.items()
    ]


def tables(source: Source, op: str) -> list[dict[str, Any]]:
    """One table per work: its timed rungs in order, the best of them, and what was left out."""
    found = []
    for (_, case, dtype, direction), rows in source.works(op).items():
        lines = {row["impl"]: line(row, source, rows) for row in rows if row["status"] == "ok"}
        top = best(rows)
        table = {
            "case": case,
            "dtype": dtype,
            "direction": direction,
            "rows": list(lines.values()),
            "out": left_out(rows),
        }
        found.append(table | {"best": lines[top["impl"]] if top else None})
    return found


def ladder(source: Source, op: str, ideas: dict[str, str]) -> dict[str, Any] | None:
    """The op's implementations in the case that timed most of them, each with its gain over the one before.

    Of several such cases, the one with most hardware counters, then the largest; None if nothing was timed. "out" says
    why others were not timed.
    """
    works = {work: rows for work, rows in ladders.ladder(source.rows, op).items() if best(rows)}
    if not works:
        return None

    def worth(work: tuple[str, str, str, str]) -> tuple[Any, ...]:
        timed, counted = (
            sum(map(bool, found))
            for found in zip(*[(r["status"] == "ok", r["counted"]) for r in works[work]], strict=True)
        )
        return work[3] == "forward", timed, counted, works[work][0]["bytes"], work[2] == "bfloat16"

    work = max(works, key=worth)
    steps = []
    for row in works[work]:
        if row["status"] == "ok":
            gain = row["gain"] or 0
            tone = "" if not gain or 0.98 < gain < 1.02 else "more" if gain > 1 else "less"
            climbed = {"idea": ideas.get(row["impl"], ""), "gain": units.times(gain) if gain else "", "tone": tone}
            climbed["counted"] = ladders.counted(row["counted"]) if row["counted"] else ""
            climbed["older"] = row["run"] if row["type"] == "older" else ""
            steps.append(line(row, source, works[work]) | climbed)
    return {"work": " ".join(work[1:]), "steps": steps, "out": left_out(works[work])}


def largest(source: Source, op: str) -> dict[str, Any] | None:
    """The op's fastest implementation in its largest case, in bfloat16 if that was timed; None if nothing was timed.

    Forward and backward together if they were timed so, as a loss is: its forward pass may do the backward's work.
    """
    works = {work: top for work, rows in source.works(op).items() if (top := best(rows))}
    if not works:
        return None
    work = max(works, key=lambda w: (RANK.index(w[3]), w[2] == "bfloat16", works[w]["bytes"]))
    row = works[work]
    return {
        "impl": row["impl"],
        "group": roofline.group(row),
        "share": row["share"],
        "percent": units.share(row),
        "ratio": "" if row["peer"] else figure(row["ratio"], units.times),
        "work": f"{' '.join(work[1:])}: {units.seconds(row['seconds']['median'])}",
    }


def checked(title: str, rows: list[Row]) -> dict[str, Any]:
    """How many checks passed, those that did not, and what could not be checked."""
    done = [row for row in rows if row["ok"] is not None]
    failed = [row for row in done if not row["ok"]]
    shown = [
        {name: row[name] for name in ("op", "case", "dtype", "impl")} | {"reason": row["reason"] or "no reason given"}
        for row in failed
    ]
    unable: dict[str, list[str]] = {}
    for impl, reason in sorted({(row["impl"], row["reason"] or "") for row in rows if row["ok"] is None}):
        unable.setdefault(reason, []).append(impl)
    return {
        "title": title,
        "passed": len(done) - len(failed),
        "failed": shown,
        "unable": [f"{', '.join(impls)}: {why}" for why, impls in unable.items()],
    }


def changes(now: Source, before: Source) -> dict[str, Any]:
    """This run against an earlier one: what is slower or faster by more than both intervals, largest change first."""
    both = [row for row in compare(before.rows, now.rows) if row["gain"]]
    moved = sorted((row for row in both if row["change"] != "same"), key=lambda row: -max(row["gain"], 1 / row["gain"]))
    rows = [
        {
            "op": row["op"],
            "work": " ".join(query.key(row)[1:]),
            "impl": row["impl"],
            "before": timing(row["before"]),
            "now": timing(row["after"]),
            "change": f"{units.times(max(row['gain'], 1 / row['gain']))} {row['change']}",
            "tone": row["change"],
        }
        for row in moved
    ]
    slower = sum(row["tone"] == "slower" for row in rows)
    since = f"Against run {before.run['run']} (commit {before.run['commit']}), {count(len(both), 'time')} in both:"
    if not rows:
        return {"sentence": f"{since} none lies outside the other's interval.", "short": "no difference", "rows": []}
    largest = f" The {MOST} largest differences:" if len(rows) > MOST else ""
    short = f"{slower:,} slower, {len(rows) - slower:,} faster"
    sentence = f"{since} {short}, by more than the 95% intervals.{largest}"
    return {"sentence": sentence, "short": short, "rows": rows[:MOST]}
