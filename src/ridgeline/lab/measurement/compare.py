"""Compare two recorded runs, and tell real differences from noise."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ridgeline.lab import units
from ridgeline.lab.measurement import store
from ridgeline.lab.measurement.query import key
from ridgeline.lab.tables import console, print_table, table, timing

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
STYLES = {"faster": "green", "slower": "red", "gone": "yellow", "new": "yellow", "same": "dim"}


def compare(before: list[Row], after: list[Row]) -> list[Row]:
    """A row for each implementation and piece of work that either run timed, with its change.

    A whole training step stands under its model's name, in the direction "step".
    The change is "faster" or "slower" if the intervals do not overlap, else "same". It is "new" or "gone" if only one
    run timed it. Each row has op, case, dtype, direction, impl, before, after, gain and change: before and after are
    the seconds with their intervals, or None, and gain is the time before over the time after.
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
    timed = (row for row in rows if row["type"] in ("older", "bench") and row["status"] == "ok")
    found: dict[tuple[str, ...], dict[str, float]] = {(*key(row), row["impl"]): row["seconds"] for row in timed}
    for row in rows:
        if row["type"] == "model" and row["status"] == "ok":
            found[row["model"], f"{row['batch']}x{row['seq']}", row["dtype"], "step", row["variant"]] = row["seconds"]
        elif row["type"] == "lm" and row["status"] == "ok" and row.get("seconds"):
            found[_place(row)] = row["seconds"]
    return found


def _place(row: Row) -> tuple[str, ...]:
    return f"lm {row['part']}", row["case"], row["dtype"], row["direction"], row["impl"]


LEAST = 0.01  # a peak of memory that differs by less is the same: the allocator rounds


def memory(before: list[Row], after: list[Row]) -> list[Row]:
    """A row for each piece of work of `ridgeline lm` whose peak of memory both runs measured.

    Each has op, case, dtype, direction, impl, before_bytes, after_bytes and change: "less", "more" or, within LEAST,
    "same"."""

    def peaks(rows: list[Row]) -> dict[tuple[str, ...], int]:
        return {_place(row): row["peak_bytes"] for row in rows if row["type"] == "lm" and row.get("peak_bytes")}

    old, new = peaks(before), peaks(after)
    found = []
    for place in (p for p in old if p in new):
        ratio = new[place] / old[place]
        word = "same" if abs(ratio - 1) <= LEAST else "less" if ratio < 1 else "more"
        row: Row = dict(zip(("op", "case", "dtype", "direction", "impl"), place, strict=True))
        found.append(row | {"before_bytes": old[place], "after_bytes": new[place], "change": word})
    return found


def change(was: dict[str, float] | None, now: dict[str, float] | None) -> str:
    """One word for a difference: "faster", "slower", "same", "new" or "gone"."""
    if was is None or now is None:
        return "new" if was is None else "gone"
    if now["high"] < was["low"]:
        return "faster"
    return "slower" if now["low"] > was["high"] else "same"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "before",
        metavar="RUN",
        help='a run (its file, its name or how its name starts; "latest": the newest) or a recorded GPU, such as h100',
    )
    parser.add_argument("after", metavar="RUN", help="the run to compare it with")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def main(options: argparse.Namespace) -> int:
    runs = [store.load(store.find(name)) for name in (options.before, options.after)]
    rows, peaks = compare(*runs), memory(*runs)
    if options.json:
        print(json.dumps(rows + peaks))
    else:
        show(rows, *runs)
        if peaks:
            show_memory(peaks)
    return 0


def show(rows: list[Row], before: list[Row], after: list[Row]) -> None:
    """The table of the differences, and how many there are of each kind."""
    out = console()
    out.print(listing(f"{title(before)}, then {title(after)}", rows))
    counts = {word: sum(row["change"] == word for row in rows) for word in STYLES}
    out.print(", ".join(f"{count} {word}" for word, count in counts.items() if count) or "neither run timed anything")


def show_memory(rows: list[Row]) -> None:
    """The table of the peaks of memory that differ, and how many there are of each kind."""
    out = console()
    moved = [row for row in rows if row["change"] != "same"]
    if moved:
        shown = []
        for row in moved:
            sizes = [units.size(row[end]) for end in ("before_bytes", "after_bytes")]
            ratio = f"{row['after_bytes'] / row['before_bytes']:.3f}x"
            shown.append((" ".join(key(row)), row["impl"], row["change"], *sizes, ratio))
        print_table("peak of memory", ["work", "impl", ""], ["before", "after", "ratio"], shown, out)
    words = ("less", "more", "same")
    counts = {word: sum(row["change"] == word for row in rows) for word in words}
    out.print("peaks of memory: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count))


def listing(heading: str, rows: list[Row]) -> Table:
    """A table of differences, in their order."""
    from rich.text import Text

    made = table(heading, ["work", "impl", ""], ["before", "after", "gain"])
    last = None
    for row in rows:
        work = " ".join(key(row))
        times = [units.DASH if row[end] is None else timing(row[end]) for end in ("before", "after")]
        gain = units.DASH if row["gain"] is None else f"{row['gain']:.3f}x"
        word = Text(row["change"], style=STYLES[row["change"]])
        made.add_row(Text(work if work != last else ""), Text(row["impl"]), word, *times, gain)
        last = work
    return made


def title(rows: list[Row]) -> str:
    """A run's name, or how many runs the rows come from, and their machine."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    return f"{runs[0] if len(runs) == 1 else f'{len(runs)} recorded runs'} on {machine(rows)}"


def machine(rows: list[Row]) -> str:
    """The name of the machine that rows were measured on."""
    about: Row = next((row["machine"] for row in rows if row["type"] == "run"), {})
    return about.get("gpu") or about.get("cpu") or "an unknown machine"
