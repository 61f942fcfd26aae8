"""Check outputs and gradients against a float64 reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.cases import choice, chosen_implementations, chosen_ops, chosen_work
from ridgeline.lab.measurement.judge import check_row, compiling
from ridgeline.lab.measurement.machine import default_device

if TYPE_CHECKING:
    from ridgeline.op import Op

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    choice(parser)


def main(options: argparse.Namespace) -> int:
    """Prints a table of verdicts. Returns 1 if an implementation is wrong or one named by --impl cannot be checked."""
    device = default_device(options.device)
    with compiling():
        rows = list(sweep(chosen_ops(options.ops), device, options))
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows)
    unchecked = options.impl and {row["impl"] for row in rows} - {row["impl"] for row in rows if row["ok"] is not None}
    return int(bool(unchecked) or any(row["ok"] is False for row in rows))


def sweep(ops: list[Op], device: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the row of every selected case, dtype and implementation."""
    from rich.console import Console

    from ridgeline.lab.measurement.law import Law

    with Console(stderr=True).status("") as status:
        work = chosen_work(ops, ("check", "quick"), options.case, options.dtype)
        rungs = {op.name: chosen_implementations(op, options.impl) for op in ops}
        for op, case, dtype in work:
            law = Law.of(op, case.name, dtype, device)
            for rung in rungs[op.name]:
                status.update(f"{op.name} {case.name} {dtype} {rung.name}")
                yield check_row(law, rung, case.name, dtype, device)[0]


def show(rows: list[Row]) -> None:
    """Prints a line per implementation: for each dtype, its largest ratio of error to allowed error over all cases."""
    from rich.text import Text

    from ridgeline.lab.tables import console, print_table

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        lines.setdefault((row["op"], row["impl"]), {}).setdefault(row["dtype"], []).append(row)
    shown = []
    for (op, impl), cells in lines.items():
        own = [row for found in cells.values() for row in found]
        ran = [row for row in own if row["ok"] is not None]
        count = f"{len(ran)}" if len(ran) == len(own) else f"{len(ran)} of {len(own)}"
        shown.append((op, impl, count, *[Text(*_cell(cells.get(dtype, []))) for dtype in dtypes]))
    out = console()
    print_table("largest error / allowed error (broken above 1)", ["op", "impl", "cases"], dtypes, shown, out)
    for op, impl, reason in dict.fromkeys((r["op"], r["impl"], r["reason"]) for r in rows if r["ok"] is None):
        out.print(f"{op} {impl}: not run: {reason}", style="dim", markup=False)
    broken = [row for row in rows if row["ok"] is False]
    for row in broken:
        out.print(
            f"{row['op']} {row['impl']}, {row['case']} {row['dtype']}: {row['reason']}", style="red", markup=False
        )
    out.print(f"{sum(row['ok'] is not None for row in rows)} checked, {len(broken)} broken")


def _cell(rows: list[Row]) -> tuple[str, str]:
    worst = [finding["worst"] for row in rows for finding in row["outputs"].values()]
    return (f"{max(worst):.2f}", "bold red" if max(worst) > 1 else "green") if worst else ("\N{EN DASH}", "dim")
