"""Which shapes of products are timed, and in which order."""

from __future__ import annotations

import random
import re

from ridgeline.op import RidgelineError

Shape = tuple[int, int, int]
MOST = 20_000  # shapes of one run


def sides(text: str, option: str) -> list[int]:
    """The sides that "512:8192:512" (start, end included, step), "512,4096" or "4096" name, ascending.

    Raises RidgelineError for anything else.
    """
    if re.fullmatch(r"\d+:\d+:\d+", text):
        start, stop, step = map(int, text.split(":"))
        found = [*range(start, stop + 1, step)] if step else []
    elif re.fullmatch(r"\d+(,\d+)*", text):
        found = sorted({int(part) for part in text.split(",")})
    else:
        found = []
    if not found or found[0] < 1:
        raise RidgelineError(
            f"{option} takes start:end:step such as 512:8192:512, or sizes of at least 1 such as 4096 or 512,1024, "
            f"and is {text!r}"
        )
    return found


def chosen(m: list[int], n: list[int], k: list[int], square: bool) -> list[Shape]:
    """The shapes (m, n, k) in a fixed random order, so that a run that is cut short covers them evenly.

    square: m = n = k, over the sides of m alone.
    """
    made = [(side, side, side) for side in m] if square else [(a, b, c) for a in m for b in n for c in k]
    if len(made) > MOST:
        raise RidgelineError(f"these ranges name {len(made)} shapes, and one run times at most {MOST}; widen the steps")
    random.Random(0).shuffle(made)
    return made
