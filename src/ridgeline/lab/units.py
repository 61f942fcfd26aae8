"""Formats figures for people: seconds, bytes, rates and shares as short text."""

from __future__ import annotations

from typing import Any

PREFIXES = ("", "k", "M", "G", "T", "P")
DASH = "\N{EN DASH}"


def digits(value: float) -> str:
    """Returns three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1230."""
    if value == 0:
        return "0"
    size = abs(value)
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.09995 else 4
    return f"{value:.{places}f}"


def scaled(value: float, unit: str) -> str:
    """Returns a value with a decimal prefix: scaled(3.02e12, "B/s") is "3.02 TB/s"."""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{digits(value)} {PREFIXES[power]}{unit}"


def seconds(value: float) -> str:
    """Returns a time such as 12.3 us, 4.56 ms or 7.89 s."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale * 0.9995:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value * 1e9)} ns"


def spread(figure: dict[str, float]) -> str:
    """Returns half the width of a figure's 95% interval as a share of its median: "±0.4%"."""
    if not figure["median"]:
        return ""
    half = 50 * (figure["high"] - figure["low"]) / figure["median"]
    return f"±{half:.0f}%" if half >= 9.95 else f"±{half:.1f}%"


def size(value: float | None) -> str:
    """Returns bytes with a binary prefix, such as 1.5 GiB."""
    if value is None:
        return DASH
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{digits(value / (1 << power))} {unit}"
    return f"{value:.0f} B"


def percent(share: float) -> str:
    """Returns a share as a whole percentage, with one decimal below 10%."""
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def share(row: dict[str, Any]) -> str:
    """Returns a row's share of the roof, with a star if the working set is small enough for the cache to help."""
    return percent(row["share"]) + ("*" if row.get("cached") else "")


def times(ratio: float) -> str:
    """Returns a ratio such as "1.04x", without decimals from ten on."""
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"


def rate(row: dict[str, Any]) -> str:
    """The figure that people compare: TFLOP/s of compute-bound work, GB/s of the rest."""
    median = row["seconds"]["median"]
    return (
        scaled(row["flops"] / median, "FLOP/s") if row["bound"] == "compute" else scaled(row["bytes"] / median, "B/s")
    )
