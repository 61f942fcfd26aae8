"""Find the largest reachable rate of matrix products over a range of shapes, and explain its dips."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.lab.analysis.mamf.shapes import Shape

Row = dict[str, Any]
RANGE, CPU_RANGE = "1024:8192:1024", "256:1024:256"


def arguments(parser: argparse.ArgumentParser) -> None:
    form = "start:end:step with the end included, or sizes such as 512,4096"
    parser.add_argument("--range", metavar="A:B:STEP", help=f"sides m and n: {form} (default: {RANGE})")
    parser.add_argument("--m", metavar="SIDES", help="rows of the result, in the same form (default: --range)")
    parser.add_argument("--n", metavar="SIDES", help="columns of the result (default: --range)")
    parser.add_argument("--k", metavar="SIDES", help="terms of each sum (default: 4096; 512 on a CPU)")
    parser.add_argument("--square", action="store_true", help="m = n = k over --range")
    parser.add_argument("--dtype", metavar="NAMES", help="of bf16,f16,tf32,f32,fp8,int8 (default: what the card has)")
    parser.add_argument("--seconds", type=float, default=60, metavar="S", help="stop after that time (default: 60)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("mamf.jsonl"),
        metavar="FILE",
        help="the figures, as JSON lines; a run goes on where the file ends (default: mamf.jsonl)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the first dtype's heat map, as SVG")
    parser.add_argument("--device", help="cpu or cuda (default: the GPU if there is one)")
    parser.add_argument("--commit", metavar="SHA", help="the commit, where the source tree is a copy without git")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(options: argparse.Namespace) -> int:
    import json
    import math

    from ridgeline import device as devices
    from ridgeline.lab.analysis.mamf import found as figures
    from ridgeline.lab.analysis.mamf import timing
    from ridgeline.lab.measurement.machine import default_device, facts
    from ridgeline.lab.measurement.sheet import Sheet
    from ridgeline.lab.tables import progress
    from ridgeline.op import RidgelineError

    if not (math.isfinite(options.seconds) and options.seconds > 0):
        raise RidgelineError(f"--seconds must be a number of seconds above 0, and is {options.seconds}")
    device = default_device(options.device)
    shapes, names = _shapes(options, device), timing.dtypes(options.dtype, device)
    sheet = Sheet(options.out, timing.SUBJECT, facts(device), options.commit, resume=True)
    with progress() as report:
        new = len([*timing.run(shapes, names, sheet, options.seconds, device, report)])
    wanted = {(name, *shape) for name in names for shape in shapes}
    rows = [r for r in sheet.rows if r["what"] == "product" and (r["dtype"], *r["shape"]) in wanted]
    if device == "cuda":
        _look_up(rows, names, sheet, devices.here().multiprocessors)
    found = [figures.summary(sheet.rows, rows, name) for name in names if figures.of(rows, name)]
    if options.picture and found:
        _draw(options.picture, rows, found[0]["dtype"], facts(device)["gpu"] or "CPU")
    failed = [r for r in rows if r["status"] != "ok"]
    left = len(wanted) - len(rows)
    if options.json:
        print(json.dumps({"found": found, "failed": failed, "left": left, "new": new, "file": str(options.out)}))
    else:
        show(found, rows, failed, left, options.out)
    return 0


def _shapes(options: argparse.Namespace, device: str) -> list[Shape]:
    from ridgeline.lab.analysis.mamf.shapes import chosen, sides
    from ridgeline.op import RidgelineError

    if options.square and (options.m or options.n or options.k):
        raise RidgelineError("--square takes its sides from --range: leave out --m, --n and --k")
    common = options.range or (RANGE if device == "cuda" else CPU_RANGE)
    m, n, k = (
        sides(given or default, f"--{name}" if given else "--range")
        for name, given, default in (
            ("m", options.m, common),
            ("n", options.n, common),
            ("k", options.k, "4096" if device == "cuda" else "512"),
        )
    )
    return chosen(m, n, k, options.square)


def _look_up(rows: list[Row], names: list[str], sheet: Any, multiprocessors: int) -> None:
    """Asks the profiler for the kernel of each dip, once, and keeps its name in the sheet."""
    from ridgeline.lab.analysis.mamf import found, timing, waves

    for name in names:
        own = {tuple(row["shape"]): row for row in found.of(rows, name)}
        kept = found.kernels(sheet.rows, name)
        for dip in waves.dips(found.rates([*own.values()])):
            if dip.shape not in kept:
                facts = {"kernel": timing.kernel_of(own[dip.shape]), "multiprocessors": multiprocessors}
                sheet.write("kernel", dtype=name, shape=list(dip.shape), **facts)


def _draw(path: Path, rows: list[Row], dtype: str, machine: str) -> None:
    from ridgeline.lab.analysis.mamf import found, heat
    from ridgeline.op import RidgelineError

    try:
        path.write_text(heat.svg(found.rates(found.of(rows, dtype)), f"Matrix products in {dtype} on one {machine}"))
    except OSError as error:
        raise RidgelineError(f"--picture {path} cannot be written: {error.strerror}") from error


def show(found: list[Row], rows: list[Row], failed: list[Row], left: int, path: Path) -> None:
    """Prints the rates, the heat maps, the dips, and what is left to do."""
    from ridgeline.lab import units
    from ridgeline.lab.analysis.mamf import found as figures
    from ridgeline.lab.analysis.mamf import heat
    from ridgeline.lab.tables import console, print_table

    out = console()
    lines = [
        (
            about["dtype"],
            "x".join(map(str, about["shape"])),
            about["way"],
            *(units.scaled(about[rate], "FLOP/s") for rate in ("rate", "best", "median")),
            str(about["shapes"]),
        )
        for about in found
    ]
    print_table(
        "largest reachable rates",
        ["dtype", "at m x n x k", "layout"],
        ["median", "best run", "median of shapes", "shapes"],
        lines,
        out,
    )
    for about in found:
        own = figures.rates(figures.of(rows, about["dtype"]))
        if len(own) > 2 and len({shape[:2] for shape in own}) > 2 and not all(len({*s}) == 1 for s in own):
            heads, cells = heat.table(own)
            print_table(f"{about['dtype']}: median rate, of the best", heads[:1], heads[1:], cells, out)
        for text in about["dips"]:
            out.print(f"{about['dtype']}: {text}", markup=False, highlight=False)
    for row in failed[:3]:
        shape = "x".join(map(str, row["shape"]))
        out.print(f"{row['dtype']} {shape} failed: {row['reason']}", markup=False, highlight=False)
    if left:
        out.print(f"{left} products are left; the same command goes on with {path}", markup=False, highlight=False)
