"""Compare two recorded runs, and tell real differences from noise."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ridgeline.lab import store, units
from ridgeline.lab.tables import console, table, timing
from ridgeline.lab.verdict import key

Row = dict[str, Any]
STYLES = {"faster": "green", "slower": "red", "gone": "yellow", "new": "yellow", "same": "dim"}


def compare(before: list[Row], after: list[Row]) -> list[Row]:
    """What each timed rung of either run became: "faster" or "slower" where the intervals are disjoint, else "same"; "new" or "gone".

    Each row has op, case, dtype, direction, impl, before and after (seconds, or None), gain (time before over time after) and change.
    """
    old, new = _timed(before), _timed(after)
    rows = []
    for place in dict.fromkeys([*old, *new]):
        was, now = old.get(place), new.get(place)
        gain = was["median"] / now["median"] if was and now else None
        row: Row = dict(zip(("op", "case", "dtype", "direction", "impl"), place, strict=True))
        rows.append(row | {"before": was, "after": now, "gain": gain, "change": change(was, now)})
    return rows


def _timed(rows: list[Row]) -> dict[tuple[str, ...], dict[str, float]]:
    return {
        (*key(row), row["impl"]): row["seconds"] for row in rows if row["type"] == "bench" and row["status"] == "ok"
    }


def change(was: dict[str, float] | None, now: dict[str, float] | None) -> str:
    """One difference in a word."""
    if was is None or now is None:
        return "new" if was is None else "gone"
    if now["high"] < was["low"]:
        return "faster"
    return "slower" if now["low"] > was["high"] else "same"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "before", metavar="RUN", help='a run: its file, its name, or how its name starts; "latest" is the newest'
    )
    parser.add_argument("after", metavar="RUN", help="the run to compare it with")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(options: argparse.Namespace) -> int:
    runs = [store.load(store.find(name)) for name in (options.before, options.after)]
    rows = compare(*runs)
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows, *runs)
    return 0


def show(rows: list[Row], before: list[Row], after: list[Row]) -> None:
    from rich.text import Text

    names = [f"{run[0]['run']} on {machine(run)}" for run in (before, after)]
    made = table(f"{names[0]}, then {names[1]}", ["work", "impl", ""], ["before", "after", "gain"])
    last = None
    for row in rows:
        work = " ".join(key(row))
        times = [units.DASH if row[end] is None else timing(row[end]) for end in ("before", "after")]
        gain = units.DASH if row["gain"] is None else f"{row['gain']:.3f}x"
        word = Text(row["change"], style=STYLES[row["change"]])
        made.add_row(Text(work if work != last else ""), Text(row["impl"]), word, *times, gain)
        last = work
    out = console()
    out.print(made)
    counts = {word: sum(row["change"] == word for row in rows) for word in STYLES}
    out.print(
        ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "nothing was timed in either run"
    )


def machine(rows: list[Row]) -> str:
    """The name of the machine that a run was made on."""
    about: Row = next((row["machine"] for row in rows if row["type"] == "run"), {})
    return about.get("gpu") or about.get("cpu") or "an unknown machine"
