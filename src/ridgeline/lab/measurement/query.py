"""Picks rows out of a run: by their type, and by the work that they timed."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def of(rows: list[Row], kind: str) -> list[Row]:
    """Returns the rows of one type."""
    return [row for row in rows if row["type"] == kind]


def one(rows: list[Row], kind: str) -> Row:
    """Returns the last row of a type that every run has. Raises RidgelineError if there is none."""
    from ridgeline.op import RidgelineError

    found = of(rows, kind)
    if not found:
        raise RidgelineError(f"this run has no {kind!r} row; runs of `ridgeline bench` have one")
    return found[-1]


def key(row: Row) -> tuple[str, str, str, str]:
    """Returns what a row timed, apart from the implementation: op, case, dtype, direction."""
    return row["op"], row["case"], row["dtype"], row["direction"]
