"""What timed products say: rates by shape, the best, and the dips with their reasons."""

from __future__ import annotations

from statistics import median
from typing import Any

from ridgeline.lab.analysis.mamf import waves
from ridgeline.lab.analysis.mamf.shapes import Shape

Row = dict[str, Any]
WIDTH = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


def of(rows: list[Row], dtype: str) -> list[Row]:
    """The timed products of a dtype."""
    return [row for row in rows if row["what"] == "product" and row["dtype"] == dtype and row["status"] == "ok"]


def rates(rows: list[Row]) -> dict[Shape, float]:
    """The median rate of each timed shape."""
    return {_shape(row): row["rate"] for row in rows}


def _shape(row: Row) -> Shape:
    m, n, k = row["shape"]
    return m, n, k


def kernels(rows: list[Row], dtype: str) -> dict[Shape, Row]:
    """The rows that name the kernels of some shapes."""
    return {_shape(row): row for row in rows if row["what"] == "kernel" and row["dtype"] == dtype}


def summary(rows: list[Row], products: list[Row], dtype: str) -> Row:
    """What the products of a dtype reached: the best median rate, where, the median over shapes, and the dips.

    rows: of the whole file, which name kernels; products: the timed ones to look at. Only a GPU's dips are explained.
    """
    own = of(products, dtype)
    best = max(own, key=lambda row: row["rate"])
    facts = {"shape": best["shape"], "way": best["way"], "rate": best["rate"], "best": best["best"]}
    known, said = kernels(rows, dtype), []
    for dip in waves.dips(rates(own)):
        if dip.shape in known:
            row = known[dip.shape]
            said.append(waves.explain(dip, row["kernel"], row["multiprocessors"], WIDTH[dtype]))
    return {"dtype": dtype, "shapes": len(own), "median": median(row["rate"] for row in own), **facts, "dips": said}
