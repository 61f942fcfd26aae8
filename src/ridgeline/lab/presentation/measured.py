"""The pages of measured cases, docs/measured/<gpu>.md: each op's table, and the machine that it was measured on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from ridgeline.lab import units
from ridgeline.lab.measurement import query
from ridgeline.lab.measurement.model import table as model_table
from ridgeline.lab.measurement.results import Work, works
from ridgeline.lab.presentation.served import KERNELS, Row, known, serving
from ridgeline.op import Op

DIRECTIONS = ("forward", "backward", "both")
ROOF = (
    "*Roof*: the fastest possible time at the bandwidth and FLOP/s that the same run measured. "
    "*Share*: that time divided by the actual one."
)

STEPS = (
    "Forward, loss, backward and AdamW of Hugging Face models with random weights, in bfloat16 with bfloat16 moments. "
    "*Of floor*: the fastest possible time at the measured roof, divided by the step's; *lasting*: the same at the "
    "rate of matrix products that the GPU keeps up for seconds. *Host*: the time to enqueue a step."
)


def page(path: Path, rows: list[Row], ops: dict[str, Op], others: dict[str, str], noted: set[str]) -> str:
    """The Markdown page of one GPU.

    path: its results; others: the other GPUs' names by their pages; noted: ops with a page in docs/notes/.
    """
    gpu = query.one(rows, "run")["machine"]["gpu"]
    found = {work: rungs for work, rungs in works(rows).items() if work[0] in ops}
    timed = [ops[name] for name in sorted({work[0] for work in found})]
    also = ", ".join(f"[{name}]({page})" for page, name in others.items())
    text = [
        f"# Measured on one {gpu}",
        f"Written by `make readme` from [results/{path.name}](../../results/{path.name})."
        + (f" Other GPUs: {also}." if also else "")
        + " [design.md](../design.md) describes the clock.",
        f"{ROOF} *Speed-up*: the fastest peer's time divided by the default implementation's.",
        "Where PyTorch itself is the default, a second row shows the fastest kernel, marked `impl=`.",
        f"![Each op's largest case under the measured roofs of one {gpu}]({path.stem}.svg)",
        "## Machine",
        machine(rows),
        "## Contents",
        contents(timed),
    ]
    if steps := model_table.markdown(query.of(rows, "model")):
        text += ["## Whole training steps", STEPS, steps]
    for family, members in families(timed):
        text.append(f"## {family.capitalize()} family")
        for op in members:
            links = [f"[what it is](../ops.md#{op.name})"]
            links += [f"[notes](../notes/{op.name}.md)"] if op.name in noted else []
            text += [f"### `{op.name}`", f"{', '.join(links)}", table(op, found)]
    return "\n\n".join(text) + "\n"


def families(ops: Iterable[Op]) -> list[tuple[str, list[Op]]]:
    """The ops of each family, both by name."""
    ordered = sorted(ops, key=lambda op: (op.family, op.name))
    return [(family, list(members)) for family, members in groupby(ordered, lambda op: op.family)]


def contents(ops: Iterable[Op]) -> str:
    """A Markdown list with a line per family and a link per op."""
    lines = []
    for family, members in families(ops):
        links = ", ".join(f"[{op.name}](#{op.name})" for op in members)
        lines.append(f"- [{family}](#{family}-family): {links}")
    return "\n".join(lines)


def table(op: Op, found: dict[Work, list[Row]]) -> str:
    """A Markdown table with a line per case, dtype and direction, in the op's order of cases."""
    lines = [
        "| case | dtype | direction | implementation | time | rate | share | fastest peer | its time | speed-up |",
        "|---|---|---|---|--:|--:|--:|---|--:|--:|",
    ]
    order = {case.name: n for n, case in enumerate(op.cases)}
    works = [work for work in found if work[0] == op.name]
    for work in sorted(works, key=lambda w: (order.get(w[1], len(order)), w[1], w[2], DIRECTIONS.index(w[3]))):
        rungs = found[work]
        ours, peer = serving(op, rungs), next((row for row in rungs if row["peer"]), None)
        shown = [(ours, f"`{ours['impl']}`")] if ours else []
        if ours is None or ours["kind"] not in KERNELS:
            kernels = [row for row in rungs if row["kind"] in KERNELS and not row["peer"]]
            shown += [(row, f'`impl="{row["impl"]}"`') for row in kernels[:1]]
        for row, name in shown:
            cells = [work[1], work[2], "both in one" if work[3] == "both" else work[3], name, *_figures(row, peer)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(row: Row, peer: Row | None) -> list[str]:
    seconds = row["seconds"]["median"]
    own = [units.seconds(seconds), units.rate(row), f"{row['share']:.2f}"]
    if peer is None:
        return [*own, "none", "", ""]
    theirs = peer["seconds"]["median"]
    return [*own, known(peer), units.seconds(theirs), f"**{units.times(theirs / seconds)}**"]


def machine(rows: list[Row]) -> str:
    """What the timed rows were measured on: GPU, driver, versions, and the roofs of their runs, as Markdown."""
    timed = {row["run"] for row in query.of(rows, "bench")}
    runs = [row for row in query.of(rows, "run") if row["run"] in timed]
    roofs = [row for row in query.of(rows, "roof") if row["run"] in timed]
    facts = {"GPU": "gpu", "driver": "driver", "CUDA": "cuda", "PyTorch": "torch", "Triton": "triton"}
    lines = ["| | |", "|---|---|"]
    for name, field in facts.items():
        values = dict.fromkeys(str(run["machine"][field]) for run in reversed(runs))
        lines.append(f"| {name} | {', '.join(values)} |")
    lines.append(f"| memory bandwidth, copy | {between([roof['copy']['median'] for roof in roofs], 'B/s')} |")
    for dtype in dict.fromkeys(dtype for roof in roofs for dtype in roof["matmul"]):
        rates = [roof["matmul"][dtype] for roof in roofs if dtype in roof["matmul"]]
        said = " (at least twice bfloat16's)" if any("twice" in rate for rate in rates) else ""
        figures = between([rate["median"] for rate in rates], "FLOP/s")
        lines.append(f"| matrix products, {dtype} | {figures}{said} |")
    first, last = min(run["time"] for run in runs)[:10], max(run["time"] for run in runs)[:10]
    days = first if first == last else f"{first} to {last}"
    lines.append(f"| runs | {len(runs)}, {days} |")
    text = "\n".join(lines)
    dirty = sum(run["dirty"] for run in runs)
    if dirty:
        text += f"\n\n{dirty} run{'s lack' if dirty > 1 else ' lacks'} a verified commit."
    return text


def between(values: list[float], unit: str) -> str:
    """The least and the most of some figures, in one if they read alike: "3.01 to 3.02 TB/s"."""
    low, high = units.scaled(min(values), unit), units.scaled(max(values), unit)
    if low == high:
        return low
    return f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"
