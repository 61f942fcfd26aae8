"""The ladder on an op's page: charts for each GPU, and each rung's idea, source and machine code's figures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.analysis.ladder import ladder
from ridgeline.lab.presentation.served import serving
from ridgeline.lab.presentation.site import chart, compiled, kernels
from ridgeline.lab.presentation.site.markdown import fence, fold, plain, table
from ridgeline.lab.presentation.site.recorded import Gpu, gpus, shown
from ridgeline.op import Implementation, Op

Row = dict[str, Any]
LINES = 400  # of the functions that a kernel calls; a page shows no more of them


def charts(op: Op, root: Path) -> str:
    """The charts of the op's largest case on each GPU; the first GPU's are open."""
    made = list[str]()
    for gpu in gpus(root):
        figures = of_gpu(op, gpu)
        if figures:
            case = next(work[1:3] for work in gpu.largest if work[0] == op.name)
            words = f"{gpu.name}, {' in '.join(case)}"
            body = f'<div class="ladders">\n{figures}\n</div>'
            opened = "" if made else " open"
            made.append(f'<details class="gpu"{opened}><summary>{words}</summary>\n{body}\n</details>')
    return "\n\n".join(made)


def of_gpu(op: Op, gpu: Gpu) -> str:
    """The figures of the directions of an op's largest case on one GPU."""
    found, steps = [], ladder(gpu.rows, op.name)
    for work, rungs in gpu.largest.items():
        if work[0] == op.name:
            ours = serving(op, rungs)
            peers = [r for r in rungs if r["peer"] and r["impl"] not in ("torch", "compile")]
            found.append(chart.draw(work[3], steps.get(work, []), peers, ours["impl"] if ours else None))
    return "\n".join(found)


def rungs(op: Op, root: Path, until: float) -> str:
    """A section for each rung. until: see `compiled.figures`."""
    (case, dtype), known = shown(op, root), compiled.recorded(root)
    return "\n\n".join(_rung(op, rung, case, dtype, known, until) for rung in op.implementations.values())


def _rung(op: Op, rung: Implementation, case: Any, dtype: str, known: dict[str, Row], until: float) -> str:
    facts = [rung.kind, "served" if rung.served else "by name only"]
    facts += [] if rung.differentiable else ["no backward"]
    facts += [] if rung.deterministic else ["reruns may differ"]
    facts += [f"sm_{rung.arch} and later" if rung.arch != rung.newest else f"sm_{rung.arch} only"] if rung.arch else []
    facts += [f"{rung.shared >> 10} KiB of shared memory"] if rung.shared else []
    gain = f" It should gain at least {units.times(rung.gain)}." if rung.gain else ""
    text = [f"### `{rung.name}`", f"{plain(sentence(rung.idea))}.{gain}", f"*{', '.join(facts)}*"]
    if rung.is_kernel:
        made = kernels.call(op, rung, case, dtype)
        text += _compiled(made, compiled.figures(made, known, until))
        text += _sources(made)
    else:
        text += [fold("Source", python_source(op, rung))]
    return "\n\n".join(text)


def sentence(text: str) -> str:
    """A text with a large first letter, if it begins with a word and not with a name or a formula."""
    return text[:1].upper() + text[1:] if re.match(r"[A-Za-z'-]+[ ,:;]", text) else text


def python_source(op: Op, rung: Implementation) -> str:
    """The text of a rung in PyTorch."""
    function = op.reference if rung.kind == "compile" else rung.call
    try:
        text = inspect.getsource(inspect.unwrap(function))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return f"`{rung.name}` is a function without a text of its own."
    lines = text.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return fence("\n".join(line[indent:] if line[:indent].isspace() else line for line in lines), "python")


def _compiled(made: kernels.Call, found: list[tuple[str, Row | None]]) -> list[str]:
    """What the compiler made of the kernels of a call."""
    if not made.launches:
        return [f"It starts no kernel on {kernels.ARCH}: {plain(made.reason)}."] if made.reason else []
    rows, compilers = [], dict[str, None]()
    for direction, row in found:
        if row is None:
            rows.append([f"{direction}: not compiled in this build", *[units.DASH] * 5])
            continue
        compilers[row["compiler"]] = None
        spills = row["spill_stores"] + row["spill_loads"]
        occupancy = units.percent(row["occupancy"]) + (f" ({row['limit']})" if row["limit"] else "")
        rows.append(
            [f"`{row['kernel']}`, {direction}", str(row["registers"]), f"{spills} B" if spills else "none",
             units.size(row["shared"]) if row["shared"] else "none", occupancy, _mix(row)]
        )  # fmt: skip
    head = ["kernel", "registers", "spilled", "shared", "occupancy", "instructions in the code"]
    by = f", {' and '.join(compilers)}" if compilers else ""
    title = f"What the compiler made of it ({kernels.ARCH}, {made.case} in {made.dtype}{by})"
    return [fold(title, table(head, rows, (1, 2)))]


def _mix(row: Row) -> str:
    parts = [f"{count} x {name.replace('_', ' ')}" for name, count in row["matrix"].items()]
    for what in ("loads", "stores"):
        counts = [f"{n} x {'the copy engine' if w == 'tma' else f'{w} B'}" for w, n in row[what].items()]
        parts += [f"{what}: {', '.join(counts)}"] if counts else []
    parts += [f"atomics: {row['atomics']}"] if row["atomics"] else []
    return "; ".join(parts) or "arithmetic alone"


def _sources(made: kernels.Call) -> list[str]:
    """The folded sources of the different kernels of a call, each with the functions that it calls."""
    texts, seen = [], set[tuple[Path, int]]()
    for _, launch in made.launches:
        own, *called = kernels.sources(launch.kernel)
        if (own.path, own.line) in seen:
            continue
        seen.add((own.path, own.line))
        parts, lines = [fence(own.text, own.language, f"{own.where}, line {own.line}")], 0
        for other in called:
            lines += other.text.count("\n")
            if (other.path, other.line) not in seen and lines <= LINES:
                seen.add((other.path, other.line))
                parts.append(fence(other.text, other.language, f"{other.where}, line {other.line}"))
        texts.append(fold(f"Source of <code>{own.name}</code>", "\n\n".join(parts)))
    return texts
