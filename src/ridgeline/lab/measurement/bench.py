"""Check implementations, then time them against each other and the limits of the hardware."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.measurement.cases import choice, chosen_ops
from ridgeline.lab.measurement.machine import default_device
from ridgeline.lab.measurement.merging import merge_files, tell
from ridgeline.lab.measurement.model import bench as model_bench
from ridgeline.lab.measurement.query import key
from ridgeline.lab.measurement.record import record
from ridgeline.lab.tables import CACHED, console, figure, progress, table, timing

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    choice(parser)
    parser.add_argument(
        "--peers", action="store_true", help="also time other packages that have the op, where installed"
    )
    parser.add_argument("--quick", action="store_true", help="small cases and short timing")
    parser.add_argument("--grid", action="store_true", help="the cases of each op's grid of sizes")
    parser.add_argument(
        "--record", action="store_true", help="also merge the run into results/<gpu>.jsonl, and say what it replaces"
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        metavar="RUN",
        help="measure nothing: merge runs made elsewhere into results/ (files or names)",
    )
    parser.add_argument(
        "--commit", metavar="SHA", help="the commit of a source tree without git; the run is marked `dirty`"
    )
    parser.add_argument("--without", metavar="NAMES", help="leave out these implementations, separated by commas")
    parser.add_argument(
        "--counters", action="store_true", help="also read each implementation's own counter, with Nsight Compute (ncu)"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="seconds of timing per case, dtype and direction"
    )
    model_bench.arguments(parser)


def main(options: argparse.Namespace) -> int:
    if options.merge:
        return merge_files(options)
    if options.model is not None:
        return model_bench.main(options)
    device = default_device(options.device)
    names = ("quick", "grid", "peers", "budget", "impl", "without", "case", "dtype", "record", "counters", "commit")
    chosen = {name: getattr(options, name) for name in names}
    with ExitStack() as last:  # what was merged is told at the end, also after an error
        with progress() as report:
            ops = chosen_ops(options.ops)
            run = record(ops, device, **chosen, report=report, merged=lambda merge: last.callback(tell, merge))
        if options.json:
            print(json.dumps(run.rows))
        else:
            show(run.rows)
        print(f"ridgeline: the run is {run.path}", file=sys.stderr)
    return 0


def show(rows: list[Row]) -> None:
    """Prints a table per case, dtype and direction, then what was not timed, with the reason."""
    from rich.text import Text

    out = console()
    bench = [row for row in rows if row["type"] == "bench"]
    for work in dict.fromkeys(key(row) for row in bench):
        group = [row for row in bench if key(row) == work and row["status"] == "ok"]
        if not group:
            continue
        best = min(row["seconds"]["median"] for row in group)
        made = table(
            " ".join(work), ["impl"], ["time", "rate", "of roof", "to peer", "host us", "memory", "held", "law"]
        )
        for row in group:
            cells = (
                units.rate(row),
                units.share(row),
                figure(row["ratio"], units.times),
                figure(row["host_us"], units.digits),
            )
            style = "green" if row["seconds"]["median"] == best else ""
            sizes = units.size(row["peak_bytes"]), units.size(row.get("held_bytes"))
            made.add_row(
                Text(row["impl"]), timing(row["seconds"]), *cells, *sizes, units.digits(row["law"]), style=style
            )
        out.print(made)
    lost: dict[tuple[str, str, str, str], list[str]] = {}
    for row in bench:
        if row["status"] != "ok":
            lost.setdefault((row["op"], row["impl"], row["status"], row["reason"]), []).append(
                f"{row['case']} {row['dtype']} {row['direction']}"
            )
    for (op, impl, status, reason), where in lost.items():
        place = where[0] if len(where) == 1 else f"{len(where)} times"
        style = "dim" if status in ("unsupported", "skipped") else "red"
        out.print(f"{op} {impl}: {status} ({place}): {reason}", style=style, markup=False)
    if any(row["cached"] for row in bench):
        out.print(CACHED, style="dim")
