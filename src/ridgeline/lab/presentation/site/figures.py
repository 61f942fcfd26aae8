"""The figures of an op's page: what answers at a glance, the errors against the law, and the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.presentation.served import comparisons, serving
from ridgeline.lab.presentation.site.markdown import fold, html, table
from ridgeline.lab.presentation.site.recorded import Gpu, gpus
from ridgeline.op import Implementation, Op

Row = dict[str, Any]
WAYS = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
BOUNDS = {"memory": "memory bandwidth", "compute": "arithmetic"}


def glance(op: Op, root: Path, checked: list[Row]) -> str:
    """Three answers in HTML: whether the op is right, how fast it is, and why."""
    cards = {"Is it right?": right(op, root, checked), "How fast is it?": fast(op, root), "Why?": why(op, root)}
    body = "\n".join(f"<section><h3>{title}</h3>{text}</section>" for title, text in cards.items())
    return f'<div class="glance">\n{body}\n</div>'


def laws(op: Op, gpu: Gpu) -> list[float]:
    """The worst error of each timed call of the default implementation, divided by the error allowed."""
    found = [serving(op, rungs) for work, rungs in gpu.works.items() if work[0] == op.name]
    return [row["law"] for row in found if row and row.get("law") is not None]


def right(op: Op, root: Path, checked: list[Row]) -> str:
    """The worst recorded error of the default implementation, and whether reruns agree."""
    said = [
        f"<p><strong>{units.digits(max(found))}</strong> of the error allowed, at worst of "
        f"{len(found)} timed calls on one {gpu.short}</p>"
        for gpu in gpus(root)
        if (found := laws(op, gpu))
    ]
    if checked and not said:
        worst = max(max(row["forward"], row["backward"]) for row in checked)
        said = [
            f"<p><strong>{units.digits(worst)}</strong> of the error allowed, at worst of {len(checked)} "
            "implementations on a CPU and in Triton's interpreter; no GPU has timed it on record</p>"
        ]
    if not said:
        said = ["<p>Checked against the float64 reference by the tests; no timed call is recorded yet.</p>"]
    served = [r for r in op.implementations.values() if r.served]
    loose = [r.name for r in served if not r.deterministic]
    said.append(
        f"<p>Reruns may differ in {html(', '.join(f'`{n}`' for n in loose))}.</p>"
        if loose
        else "<p>Reruns are bitwise equal.</p>"
    )
    return "".join(said)


def fast(op: Op, root: Path) -> str:
    """The default implementation's time, share and speed-up in the op's largest case, on each GPU."""
    said = []
    for gpu in gpus(root):
        of_op = {work: rungs for work, rungs in gpu.largest.items() if work[0] == op.name}
        parts = []
        for one in comparisons(of_op, {op.name: op}):
            against = f", {units.times(one.speedup)} as fast as {one.against}" if one.speedup else ""
            time = units.seconds(one.ours["seconds"]["median"])
            parts.append(f"{WAYS[one.direction]} <strong>{time}</strong>, {units.share(one.ours)} of the roof{against}")
        if parts:
            case = next(iter(of_op))[1:3]
            said.append(f"<p>{gpu.short}: {'; '.join(parts)}<br><small>{html(' '.join(case))}</small></p>")
    return "".join(said) or "<p>Not timed yet on a recorded GPU.</p>"


def why(op: Op, root: Path) -> str:
    """What limits the op, and the idea of the implementation that serves its largest case."""
    said = []
    for gpu in gpus(root)[:1]:
        for work, rungs in gpu.largest.items():
            if work[0] == op.name and work[3] != "backward":
                said.append(f"<p>The limit is {BOUNDS.get(rungs[0]['bound'], rungs[0]['bound'])}.</p>")
                row = serving(op, rungs)
                rung = op.implementations[row["impl"]] if row else None
                said += [_idea(rung)] if rung else []
    if not said:
        served = [r for r in op.implementations.values() if r.served]
        said = [_idea(served[-1])] if served else ["<p>PyTorch computes it.</p>"]
    return "".join(said)


def _idea(rung: Implementation) -> str:
    return f"<p>{html(f'`{rung.name}`: {rung.idea}')}</p>"


def errors(op: Op, root: Path) -> str:
    """A table of errors and memory in the op's largest case on each GPU, and a folded one of all cases; or empty.

    The rows are the default implementation's, with PyTorch's memory beside. An error is divided by the error allowed.
    Memory is the peak beyond the inputs.
    """
    head = ["GPU", "direction", "error / allowed", "peak memory", "PyTorch's peak", "kept for backward", "case"]
    order = {case.name: n for n, case in enumerate(op.cases)}
    short, whole = list[list[str]](), list[list[str]]()
    for gpu in gpus(root):
        of_op = [work for work in gpu.works if work[0] == op.name]
        for work in sorted(of_op, key=lambda w: (order.get(w[1], len(order)), w[2], [*WAYS].index(w[3]))):
            if row := _memory(op, gpu, work):
                whole.append(row)
                short += [row] if work in gpu.largest else []
    right = (2, 3, 4, 5)
    if len(whole) <= len(short):
        return table(head, whole, right) if whole else ""
    return table(head, short, right) + "\n\n" + fold(f"All {len(whole)} timed calls", table(head, whole, right))


def computed(checked: list[Row]) -> str:
    """A table of errors that were computed without a GPU; empty if there are none."""
    rows = [
        [f"`{row['impl']}`", row["case"], row["dtype"], units.digits(row["forward"]), units.digits(row["backward"])]
        for row in checked
    ]
    said = "Computed for this page on a CPU, kernels in Triton's interpreter; no GPU has timed this op on record:"
    head = ["implementation", "case", "dtype", "forward, error / allowed", "backward"]
    return f"{said}\n\n{table(head, rows, (3, 4))}" if rows else ""


def _memory(op: Op, gpu: Gpu, work: tuple[str, str, str, str]) -> list[str]:
    """The cells of one piece of work; empty if the default implementation was not timed."""
    rungs = gpu.works[work]
    ours, torch = serving(op, rungs), next((r for r in rungs if r["impl"] == "torch"), {})
    if not ours:
        return []
    held = ours.get("held_bytes") if work[3] == "backward" else None
    law = units.digits(ours["law"]) if ours.get("law") is not None else units.DASH
    sizes = (ours.get("peak_bytes"), torch.get("peak_bytes"), held)
    return [gpu.short, work[3], law, *map(units.size, sizes), f"{work[1]} {work[2]}"]


def links(op: Op, root: Path) -> str:
    """Links to the pages of every measured case."""
    found = [
        f"[{gpu.short}](../measured/{gpu.stem}.md#{op.name})"
        for gpu in gpus(root)
        if any(work[0] == op.name for work in gpu.works)
    ]
    return f"Every measured case: {', '.join(found)}." if found else ""
