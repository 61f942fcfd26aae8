"""The fastest possible time of a piece of work, from the measured limits (the roof) of a machine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Row = dict[str, Any]
CODES = ("int8", "float8_e4m3fn")  # 8-bit dtypes with a matrix rate of their own
# Bandwidths by the share of writes in the bytes moved. Old runs have no "spread".
SEGMENTS = ((0.0, "read"), (1 / 3, "add"), (1 / 2, "copy"), (4 / 5, "spread"), (1.0, "write"))


def bandwidth(roof: Row, read: float, write: float, end: str = "median") -> float:
    """The measured bandwidth in bytes/s for a mix of bytes read and written.

    Between two measured mixes the seconds per byte are interpolated linearly. end: "median", or "low" or "high" of the
    measured intervals.
    """
    share = write / (read + write)
    for (left, before), (right, after) in pairwise([(at, name) for at, name in SEGMENTS if name in roof]):
        if share <= right:
            part = (share - left) / (right - left)
            return 1 / ((1 - part) / roof[before][end] + part / roof[after][end])
    raise ValueError(f"bytes read and written must not be negative, and are {read} and {write}")


def roof_seconds(roof: Row, dtype: str, read: int, write: int, flops: int, end: str = "median") -> tuple[float, str]:
    """The fastest possible time for that work at the measured rates, and what bounds it: "memory" or "compute".

    The matrix rate is the higher of the dtype's and float32's, since an op may compute in float32.
    """
    rates = [roof["matmul"][d][end] for d in (dtype, "float32") if d in roof["matmul"]]
    compute = flops / max(rates) if rates else 0.0
    memory = (read + write) / bandwidth(roof, read, write, end) if read + write else 0.0
    return max((memory, "memory"), (compute, "compute"))
