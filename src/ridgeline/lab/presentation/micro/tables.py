"""The tables of a record of `ridgeline micro`: plain text in cells, for a terminal and for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.measurement.micro import memory, parts, published

Row = dict[str, Any]
Figure = dict[str, float]
HEADS = {"s": "time", "op/clk/SM": "results/clk/SM"}  # of units that are not their own heads
RATES = ("B/s", "FLOP/s", "op/s")
AT = {
    "chase": "working set",
    "banks": "stride",
    "coalescing": "stride",
    "occupancy": "warps",
    "atomics": "measured",
    "streams": "streams",
}
COLUMNS = {  # the units of a part's table with a line for each microbenchmark
    "latency": ("cycles", "s"),
    "bandwidth": ("B/clk/SM", "B/clk", "B/s"),
    "instructions": ("op/clk/SM",),
    "matrix": ("cycles", "FLOP/clk/SM", "FLOP/s"),
    "launches": ("s",),
}
BESIDE = ("latency", "bandwidth", "instructions", "matrix")  # parts with published figures


@dataclass
class Table:
    """One part: its title, what its kernels do, heads of words and of figures, and rows of cells.

    left: what could not be measured, with the reason.
    """

    part: str
    title: str
    lead: str
    words: list[str]
    figures: list[str]
    rows: list[list[str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def heads(self) -> list[str]:
        return [*self.words, *self.figures]


def cell(unit: str, found: Figure | None) -> str:
    """A figure in its unit, with half the width of its interval if that is 2% or more."""
    if found is None:
        return units.DASH
    value = found["median"]
    if unit == "s":
        text = units.seconds(value)
    elif unit in RATES:
        text = units.scaled(value, unit)
    else:
        text = units.digits(value)
    wide = value and "low" in found and found["high"] - found["low"] >= 0.04 * value
    return f"{text} {units.spread(found)}" if wide else text


def said(row: Row, units_: tuple[str, ...], card: str) -> str:
    """The published figures of a row on a card, each source's together, with its number in brackets."""
    found: dict[str, list[str]] = {}
    for unit in units_:
        for value, source in published.values(row["part"], row["name"], row["at"], unit, card):
            text = cell(unit, {"median": value}) if unit in RATES else f"{value:g}"
            text = text.removesuffix("FLOP/s")  # too wide beside the cycles; the table's lead says it
            found.setdefault(source, []).append(text)
    numbers = list(published.sources())
    return ", ".join(f"{'; '.join(texts)} [{numbers.index(source) + 1}]" for source, texts in found.items())


def tables(record: Row) -> list[Table]:
    """A table for each part of a record, in the record's order."""
    return [_table(record, part) for part in record["parts"] if part in parts.PARTS]


def _table(record: Row, part: str) -> Table:
    rows = [row for row in record["rows"] if row["part"] == part]
    about = {(m.part, m.name): m for m in parts.micros([part])}
    measured = [row for row in rows if "figures" in row]
    ideas = dict.fromkeys(
        f"{about[key].idea}; {about[key].divides}" for row in rows if (key := (part, row["name"])) in about
    )
    # Where every line has another idea, the names say it.
    lead = f"{next(iter(ideas))}." if len(ideas) == 1 else ""
    left = [f"{row['name']}: {row['reason']}" for row in rows if "reason" in row]
    made = (_sweep if part in AT else _lines)(part, measured)
    if part == "matrix":
        lead = "The published figures are cycles; operations a second."
    made.lead, made.left = lead[:1].upper() + lead[1:], left
    return made


def _lines(part: str, rows: list[Row]) -> Table:
    columns = COLUMNS[part]
    shown = [unit for unit in columns if any(unit in row["figures"] for row in rows)]
    table = Table(part, parts.PARTS[part], "", ["measured"], [HEADS.get(unit, unit) for unit in shown])
    beside = part in BESIDE
    if beside:
        table.figures += ["A100, published", "Hopper, published"]
    for row in rows:
        cells = [cell(unit, row["figures"].get(unit)) for unit in shown]
        cells += [said(row, columns, card) for card in published.CARDS] if beside else []
        table.rows.append([row["name"], *cells])
    return table


def _sweep(part: str, rows: list[Row]) -> Table:
    if part == "atomics":
        return _atomics(rows)
    table = Table(part, parts.PARTS[part], "", [AT[part]], [])
    names = list(dict.fromkeys(row["name"] for row in rows))
    places = sorted({row["at"] for row in rows}, key=float)
    by = {(row["name"], row["at"]): row["figures"] for row in rows}
    for name in names:
        table.figures += _heads(part, name)
    for at in places:
        cells = []
        for name in names:
            cells += _cells(part, name, at, by)
        table.rows.append([units.size(float(at)) if part == "chase" else at, *cells])
    return table


def width(name: str) -> int:
    """The bytes in the name of a microbenchmark such as "16 bytes a thread"."""
    return int(name.split()[0])


def short(name: str) -> str:
    """ "16 bytes", "2 loads": the name of a line of a sweep without what the table's title says."""
    return name.removesuffix(" a thread").removesuffix(" in flight")


def _heads(part: str, name: str) -> list[str]:
    return {
        "chase": ["cycles", "time"],
        "banks": [short(name), "rule"],
        "coalescing": [short(name), "share", "rule"],
        "occupancy": ["KiB in flight", short(name)],
        "streams": ["time", "of one stream's"],
    }[part]


def _cells(part: str, name: str, at: str, by: dict[tuple[str, str], dict[str, Figure]]) -> list[str]:
    found, first = by.get((name, at), {}), by.get((name, "1"), {})
    if part == "chase":
        return [cell("cycles", found.get("cycles")), cell("s", found.get("s"))]
    if part == "banks":
        return [cell("cycles", found.get("cycles")), str(memory.ways(width(name), int(at)))]
    unit = "s" if part == "streams" else "B/s"
    if part == "occupancy":
        flight = found.get("B/SM")
        return [units.digits(flight["median"] / 1024) if flight else units.DASH, cell(unit, found.get(unit))]
    share = found[unit]["median"] / first[unit]["median"] if unit in found and unit in first else None
    shown = [cell(unit, found.get(unit)), units.DASH if share is None else units.percent(share)]
    return shown if part == "streams" else [*shown, units.percent(memory.useful(width(name), int(at)))]


def _atomics(rows: list[Row]) -> Table:
    places = sorted({row["at"] for row in rows}, key=int)
    heads = ["1 address" if at == "1" else f"{int(at):,}" for at in places]
    table = Table("atomics", parts.PARTS["atomics"], "", ["measured"], [*heads, ""])
    for name in dict.fromkeys(row["name"] for row in rows):
        by = {row["at"]: row["figures"] for row in rows if row["name"] == name}
        unit = next(iter(next(iter(by.values()))))
        cells = [cell(unit, by.get(at, {}).get(unit)).removesuffix("op/s").rstrip() for at in places]
        table.rows.append([name, *cells, "/clk/SM" if unit == "op/clk/SM" else "/s"])
    return table


def named(shown: list[Table]) -> list[str]:
    """The sources that tables name, each with its number."""
    cells = " ".join(cell for table in shown for row in table.rows for cell in row)
    listed = enumerate(published.sources().values(), 1)
    return [f"[{number}] {title}" for number, title in listed if f"[{number}]" in cells]


def show(record: Row, note: str) -> None:
    """Prints the tables of a record, with a note before them."""
    from ridgeline.lab.tables import console, print_table

    out = console()
    clocks = [about["mhz"] for about in record["parts"].values()]
    took = sum(about["seconds"] for about in record["parts"].values())
    if note:
        out.print(note, markup=False, highlight=False)
    ends = " to ".join(dict.fromkeys(f"{clock:.0f}" for clock in (min(clocks), max(clocks)))) + " MHz"
    facts = f"{record['gpu']}: {record['multiprocessors']} multiprocessors, {ends}, {took:.0f} s"
    out.print(facts, markup=False, highlight=False)
    made = tables(record)
    for table in made:
        out.print()
        print_table(table.title, table.words, table.figures, table.rows, out)
        for text in filter(None, [table.lead, *table.left]):
            out.print(text, markup=False, highlight=False, style="dim")
    out.print()
    for source in named(made):
        out.print(source, markup=False, highlight=False, style="dim")
