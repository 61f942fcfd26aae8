"""writes what the README and docs/ show of recorded GPUs, a roofline and the measured tables; and the README's list of the ops

python -m ridgeline.lab.readme            writes README.md, docs/measured.md and docs/roofline.svg from results/ and the registry
python -m ridgeline.lab.readme --check    exit code 1 where the pages are not those of the newest rows and of the registry
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from ridgeline import nn, optim
from ridgeline.lab import roofline, store, units, verdict
from ridgeline.lab.results import GPU, Work, gpus, newest, works
from ridgeline.op import Op, RidgelineError, get, registry

Row = dict[str, Any]
KERNELS = ("cuda", "triton", "gluon")
MARKED = re.compile(r"(<!-- (measured|ops) -->\n).*?(?=<!-- /\2 -->)", re.DOTALL)


def serving(op: Op, rungs: list[Row]) -> Row | None:
    """Of the timed rungs of a piece of work the one that users get: the last of the ladder that is served.

    That it was timed shows that it took the call; whether such calls are left to another rung, their direction, sizes and options say."""
    timed = {row["impl"]: row for row in rungs}
    for rung in reversed(op.implementations.values()):
        if rung.served and rung.name in timed:
            args, kwargs = op.case(rungs[0]["case"]).make(rungs[0]["dtype"], "meta") if rung.unless else ([], {})
            direction = "bwd" if rungs[0]["direction"] == "backward" else "fwd"
            if rung.unless is None or rung.left(direction, *args, **kwargs) is None:
                return timed[rung.name]
    return None


def chosen(found: dict[Work, list[Row]]) -> dict[tuple[str, str, str], dict[str, list[Row]]]:
    """Of each op one case and dtype with all its directions: bfloat16 where it is timed, and of the cases of the most bytes, in two digits,
    the op's first."""
    best: dict[str, tuple[tuple[bool, float, int], str, str]] = {}
    for (op, case, dtype, _), rungs in found.items():
        place = next((n for n, c in enumerate(get(op).cases) if c.name == case), 0)
        size = dtype == "bfloat16", float(f"{rungs[0]['bytes']:.2g}"), -place
        if op not in best or size > best[op][0]:
            best[op] = size, case, dtype
    works: dict[tuple[str, str, str], dict[str, list[Row]]] = {
        (op, case, dtype): {} for op, (_, case, dtype) in best.items()
    }
    for (op, case, dtype, direction), rungs in found.items():
        if (op, case, dtype) in works:
            works[op, case, dtype][direction] = rungs
    return works


def short(found: dict[Work, list[Row]], ops: dict[str, Op]) -> str:
    """A Markdown table, a line an op: what serves its largest case, forward and backward, beside the fastest peer."""
    lines = [
        "| op | case | served | forward | of the roof | fastest peer | backward | of the roof | fastest peer |",
        "|---|---|---|--:|--:|---|--:|--:|---|",
    ]
    works = chosen({work: rungs for work, rungs in found.items() if work[0] in ops})
    for op, case, dtype in sorted(works, key=lambda w: (ops[w[0]].family, w[0])):
        directions = works[op, case, dtype]
        names, cells = [], []
        for rungs in (
            [directions["both"]]
            if "both" in directions
            else [directions.get("forward", []), directions.get("backward", [])]
        ):
            ours, peer = serving(ops[op], rungs), next((r for r in rungs if r["peer"]), None)
            names += [f"`{ours['impl']}`"] if ours else []
            cells += [units.seconds(ours["seconds"]["median"]), f"**{ours['share']:.2f}**"] if ours else ["", ""]
            cells.append(f"`{peer['impl']}` {peer['share']:.2f}" if peer else "")
        if "both" in directions:
            cells += ["in forward", "", ""]
        lines.append("| " + " | ".join([f"`{op}`", f"{case}, {dtype}", ", ".join(dict.fromkeys(names)), *cells]) + " |")
    return "\n".join(lines) + "\n"


def table(found: dict[Work, list[Row]], ops: dict[str, Op]) -> str:
    """A Markdown table: for each piece of work what serves it beside the fastest peer."""
    lines = [
        "| op | case | | served | time | rate | of the roof | fastest peer | its share |",
        "|---|---|---|---|--:|--:|--:|---|--:|",
    ]
    for (op, case, dtype, direction), rungs in found.items():
        ours = serving(ops[op], rungs) if op in ops else None
        peer = next((r for r in rungs if r["peer"]), None)
        beside = [f"`{peer['impl']}`", f"{peer['share']:.2f}"] if peer else ["none", ""]
        shown = [(ours, "")] if ours else []
        if ours is None or ours["kind"] not in KERNELS:
            shown += [(row, ", if named") for row in rungs if row["kind"] in KERNELS and not row["peer"]][:1]
        for row, when in shown:
            figures = [
                f"`{row['impl']}`{when}",
                units.seconds(row["seconds"]["median"]),
                roofline.rate(row),
                f"**{row['share']:.2f}**",
            ]
            lines.append("| " + " | ".join([f"`{op}`", case, f"{dtype} {direction}", *figures, *beside]) + " |")
    return "\n".join(lines) + "\n"


def between(values: list[float], unit: str) -> str:
    """The least and the most of some figures, or what both are called: "3.01 to 3.02 TB/s"."""
    low, high = units.scaled(min(values), unit), units.scaled(max(values), unit)
    if low == high:
        return low
    return f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"


def header(runs: list[list[Row]]) -> str:
    """Where the figures come from: the machine, its roofs in these runs, and what the runs say of the work tree."""
    machines = [verdict.one(rows, "run")["machine"] for rows in runs]
    roofs = [verdict.one(rows, "roof") for rows in runs]
    names = {
        f"{m['gpu']}, driver {m['driver']}, CUDA {m['cuda']}, PyTorch {m['torch']}, Triton {m['triton']}": None
        for m in reversed(machines)
    }
    dtypes = list(dict.fromkeys(dtype for roof in roofs for dtype in roof["matmul"]))
    said = {d: ", at least twice bfloat16's," for d in dtypes if any("twice" in r["matmul"].get(d, ()) for r in roofs)}
    rates = [
        f"{d}{said.get(d, '')} {between([r['matmul'][d]['median'] for r in roofs if d in r['matmul']], 'FLOP/s')}"
        for d in dtypes
    ]
    dirty = sum(verdict.one(rows, "run")["dirty"] for rows in runs)
    text = f"{'; '.join(names)}. The rows come from {len(runs)} run{'s' * (len(runs) > 1)} in "
    text += f"`results/{store.slug(machines[0]['gpu'])}`; each is held against "
    text += f"its own run's roof: copy {between([r['copy']['median'] for r in roofs], 'B/s')}, matrix products {', '.join(rates)}."
    if dirty:
        text += f" {dirty} of these runs {'is' if dirty == 1 else 'are'} marked `dirty`: the GPU's machine had a copy of the work tree "
        text += "without git's history, so the commit was written in afterwards, and that the tree held just that commit is not proven."
    return text + "\n"


def contents(ops: dict[str, Op]) -> str:
    """The list of the ops, by family: what each computes, in its file's words, and its ladder."""
    lines = ["| family | op | what it computes | implementations, from the naive one on |", "|---|---|---|---|"]
    for family, members in groupby(sorted(ops.values(), key=lambda op: (op.family, op.name)), lambda op: op.family):
        for op in members:
            said = (
                (import_module(op.function.__module__).__doc__ or "")
                .splitlines()[0]
                .removeprefix(f"{op.name}: ")
                .rstrip(".:")
            )
            ladder = [f"**{r.name}**" if r.served else r.name for r in op.implementations.values()]
            lines.append(f"| {family} | `{op.name}` | {said.replace('|', '&#124;')} | {', '.join(ladder)} |")
            family = ""
    lines += ["", "In bold: what a call may get that names none; the others run when `impl=` names them.", ""]
    like_torch = {
        nn: "modules; those that torch has too have torch's names, parameters and state_dicts",
        optim: "torch's constructor and state_dict",
    }
    for module, what in like_torch.items():
        own = [
            f"`{n}`"
            for n, c in vars(module).items()
            if isinstance(c, type) and c.__module__ == module.__name__ and n[0] != "_"
        ]
        lines += [f"`{module.__name__}`, {what}: {', '.join(own)}.", ""]
    return "\n".join(lines[:-1]) + "\n"


def about(folder: Path, rows: list[Row]) -> str:
    """The header of the runs that a GPU's rows come from."""
    timed = {row["run"] for row in verdict.of(rows, "bench")}
    return header([run for path in sorted(folder.glob("*.jsonl")) if (run := store.load(path))[0]["run"] in timed])


def pages(results: Path, readme: str) -> tuple[str, str]:
    """The text of README.md, of one GPU, and of docs/measured.md, with a section for each that is recorded."""
    recorded, ops, first = gpus(results), registry(), results / GPU
    if first not in recorded:
        raise RidgelineError(f"{first} holds no recorded run; `ridgeline bench --record` on that GPU writes one")
    heads = {folder: about(folder, rows) for folder, rows in recorded.items()}
    names = {folder: verdict.one(rows, "run")["machine"]["gpu"] for folder, rows in recorded.items()}
    others = ", ".join(f"[{name}](docs/measured.md#{folder.name})" for folder, name in names.items() if folder != first)
    body = (
        "# Measured\n\nWritten by `make readme` from the newest rows in `results/`, a section for each GPU; the clock is described in "
        "[design.md](design.md). *Served* is the rung that a call gets unless it names another: the last of the ladder's served ones, of "
        "those that the run timed; where that is PyTorch's own, the fastest kernel stands beside it.\n\n"
    )
    parts = {
        "measured": f"{heads[first]}\n{short(works(recorded[first]), ops)}\nEvery case: [docs/measured.md](docs/measured.md)."
        + (f" Other GPUs: {others}.\n" if others else "\n"),
        "ops": contents(ops),
    }
    sections = [
        f"## {folder.name.upper()}\n\n{heads[folder]}\n{table(works(rows), ops)}" for folder, rows in recorded.items()
    ]
    return MARKED.sub(lambda match: match[1] + parts[match[2]], readme), body + "\n".join(sections)


def main() -> int:
    """Writes the pages and the picture, or with --check says whether the pages are current."""
    results, readme, measured = store.HOUSE / "results", store.HOUSE / "README.md", store.HOUSE / "docs/measured.md"
    texts = dict(zip((readme, measured), pages(results, readme.read_text()), strict=True))
    if "--check" in sys.argv:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        print(f"not current: {', '.join(stale)}; write them with: make readme" if stale else "the pages are current")
        return bool(stale)
    for path, text in texts.items():
        roofline.write(path, text.encode())
    roofline.render(newest(results / GPU), measured.parent)
    print(f"wrote {readme}, {measured} and {measured.parent}/roofline.svg")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RidgelineError as error:
        sys.exit(f"ridgeline: {error}")
