"""One sentence on what to try next, from what the compiler shows of a learner's kernel and of our rungs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ridgeline.lab import units
from ridgeline.lab.analysis.lesson.exercises import Exercise
from ridgeline.lab.analysis.lesson.wording import say

Row = dict[str, Any]
BANKS = 32
LOOP = 8  # starts of one kernel in a call that show a loop where a grid belongs
SHARED = re.compile(r"__shared__\s+(?:float|int|unsigned)\s+\w+\s*\[[^\]]+\]\s*\[\s*(\d+)\s*\]")


def advise(exercise: Exercise, rows: list[Row], timed: list[Row], path: Path) -> str:
    """Returns what to try next.

    rows: the resources of the learner's kernels (`impl` "yours") and of our rungs, the best one last.
    timed: bench rows, if there is a GPU. path: the learner's file.
    """
    mine = [row for row in rows if row["impl"] == "yours"]
    best = [row for row in rows if row["impl"] == exercise.rungs[-1]]
    return _arithmetic(exercise, mine) or _access(exercise, mine, best, path) or _measured(exercise, timed)


def _arithmetic(exercise: Exercise, mine: list[Row]) -> str | None:
    for row in mine:
        kernel = row["kernel"]
        if row["occupancy"] == 0:
            return say("next.shared", kernel=kernel, shared=f"{row['shared']:,}")
        if row["double"]:
            return say("next.double", kernel=kernel, count=row["double"])
        if row["spill_stores"]:
            return say("next.spill", kernel=kernel, bytes=row["spill_stores"])
        if exercise.dtype == "bfloat16" and any("TF32" in name for name in row["matrix"]):
            return say("next.tf32", kernel=kernel, dtype=exercise.dtype)
        if any(not re.search("F32|S32|f32|s32|IMMA", name) for name in row["matrix"]):
            return say("next.half-sums", kernel=kernel)
    names = [name for row in mine for name in row["matrix"]]
    if not exercise.products:
        return None
    if not names:
        return say("next.no-matrix", kernel=mine[0]["kernel"])
    if not any(name.startswith(("HGMMA", "wgmma")) for name in names):
        return say("next.no-wgmma", kernel=mine[0]["kernel"], found=names[0])
    return None


def _access(exercise: Exercise, mine: list[Row], best: list[Row], path: Path) -> str | None:
    columns = [int(width) for width in SHARED.findall(path.read_text())]
    if bad := [width for width in columns if width % BANKS == 0]:
        return say("next.bank", columns=bad[0], padded=bad[0] + 1)
    main = max(mine, key=lambda row: sum(row["loads"].values()))
    if main["widest_load"] < (ours := max(row["widest_load"] for row in best)) and main["widest_load"] < 16:
        return say("next.width", kernel=main["kernel"], width=main["widest_load"], ours=min(ours, 16))
    width, ours = _widest(mine), _widest(best)
    if exercise.stores and width < min(ours, 16):
        return say("next.store", kernel=main["kernel"], width=width, ours=min(ours, 16))
    if len(mine) >= LOOP and len(best) == len({row["kernel"] for row in mine}) == 1:
        return say("next.launches", kernel=main["kernel"], count=len(mine))
    if len(mine) > len(best):
        return say("next.kernels", count=len(mine), ours=len(best))
    shared, most = (max(row["shared"] for row in some) for some in (mine, best))
    if exercise.products and 2 * shared < most:
        return say("next.tile", kernel=main["kernel"], shared=f"{shared:,}", ours=f"{most:,}")
    if not exercise.products and main["occupancy"] < 0.5 * max(row["occupancy"] for row in best):
        share = units.percent(main["occupancy"])
        return say("next.occupancy", kernel=main["kernel"], share=share, limit=main["limit"] or "the grid")
    return None


def _widest(rows: list[Row]) -> int:
    """Returns the bytes of the widest store; the copy engine counts as 128."""
    return max([128 if width == "tma" else int(width) for row in rows for width in row["stores"]], default=0)


def _measured(exercise: Exercise, timed: list[Row]) -> str:
    """Compares with the quickest of our rungs, if both were timed."""
    found = {row["impl"]: row["seconds"]["median"] for row in timed if row["status"] == "ok"}
    yours = found.pop("yours", None)
    ours = {name: time for name, time in found.items() if name in exercise.rungs}
    if yours is None or not ours:
        return say("next.gpu")
    name = min(ours, key=lambda impl: ours[impl])
    share = ours[name] / yours
    return say("next.done") if share > 0.97 else say("next.rung", op=exercise.op, impl=name, share=units.percent(share))
