"""Rows of one piece of work in one run as columns: how a line of a recorded file holds them.

A column is a field's values, or the value itself where all rows hold the same. Times are columns in a column. Fields
that only timed rows have, and the reason that only the others have, list those rows alone.
"""

from __future__ import annotations

from itertools import compress
from typing import Any

Row = dict[str, Any]
# Fields of a timed row that may be None; a row without one is read as if it held None.
UNTIMED: Row = dict.fromkeys(
    ("seconds", "host_us", "share", "peak_bytes", "held_bytes", "law", "ratio", "mhz", "throttled")
)
USUAL: Row = {"status": "ok", "peer": False, "throttled": False}  # what a line without the column means


def pack(rows: list[Row]) -> Row:
    """Returns rows as columns. A field that is None is taken for one that the row does not have."""
    timed = [row.get("status") == "ok" for row in rows]
    columns: Row = {"impl": [row.get("impl") for row in rows]}
    for name in dict.fromkeys([name for row in rows for name in row] + [*USUAL]):
        cells = [row.get(name) for row in rows]
        holders = _holders(name, timed)
        if all(cell is None for cell, holds in zip(cells, holders, strict=True) if not holds):
            column = _column(list(compress(cells, holders)))
        else:
            column = cells
        if name not in columns and (column is not None or name in USUAL) and column != []:
            columns[name] = column
    return {name: column for name, column in columns.items() if name not in USUAL or not _same(column, USUAL[name])}


def unpack(columns: Row) -> list[Row]:
    """Returns the rows that columns hold. Raises ValueError, TypeError or KeyError if they are not columns."""
    rows: list[Row] = [{} for _ in columns["impl"]]
    columns = columns | {name: value for name, value in USUAL.items() if name not in columns}
    timed = [status == "ok" for status in _cells(columns["status"], len(rows))]
    for name, column in columns.items():
        holders = _holders(name, timed)
        some = rows if isinstance(column, list) and len(column) == len(rows) else list(compress(rows, holders))
        for row, cell in zip(some, _cells(column, len(some)), strict=True):
            if cell is not None:
                row[name] = cell
    return rows


def _holders(name: str, timed: list[bool]) -> list[bool]:
    """Which rows may have a field."""
    if name in UNTIMED:
        return timed
    return [not here for here in timed] if name == "reason" else [True] * len(timed)


def _column(cells: list[Any]) -> Any:
    first = cells[0] if cells else []
    if isinstance(first, dict) and first and all(isinstance(c, dict) and c.keys() == first.keys() for c in cells):
        return {name: _column([cell[name] for cell in cells]) for name in first}
    same = not isinstance(first, list | dict) and all(_same(cell, first) for cell in cells)
    return first if same else cells


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one in JSON too: False is not 0, and 1.0 is not 1."""
    return type(one) is type(other) and one == other


def _cells(column: Any, count: int) -> list[Any]:
    if isinstance(column, dict):
        parts = [_cells(part, count) for part in column.values()]
        return [dict(zip(column, cell, strict=True)) for cell in zip(*parts, strict=True)]
    return column if isinstance(column, list) else [column] * count
