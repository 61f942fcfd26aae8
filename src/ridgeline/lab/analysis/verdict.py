"""Says in one sentence what limits an implementation, how far it is from the roof, and what would help."""

from __future__ import annotations

from typing import Any

from ridgeline.lab import units
from ridgeline.lab.measurement.query import key, of, one

Row = dict[str, Any]
LAUNCH = 3.0  # launch latencies; a kernel that takes less is bounded by the launch
NEAR = 0.9  # share of the roof from which a kernel is at it
FAR = 0.6  # share of the roof below which a fused kernel is limited by something else
WAYS = {
    "cuda": "wider loads and stores (16 bytes) and more bytes in flight would help",
    "triton": "other tile sizes or numbers of warps may help (`ridgeline tune`)",
    "gluon": "more pipeline stages or other tile sizes may help",
}


def bound(row: Row, launch_us: float, gpu: bool) -> str:
    """Returns what bounds a timed implementation: "host", "launch", "memory" or "compute"."""
    microseconds = row["seconds"]["median"] * 1e6
    if gpu and (row["host_us"] or 0) > microseconds:
        return "host"
    if microseconds < LAUNCH * launch_us:
        return "launch"
    return row["bound"]


def sentence(row: Row, siblings: list[Row], launch_us: float, gpu: bool) -> str:
    """Returns the verdict on a row.

    siblings: the rows of all implementations of the same work. launch_us: the machine's launch latency."""
    if row["status"] != "ok":
        return f"Not timed ({row['status']}): {row['reason'] or 'no reason given'}."
    time = units.seconds(row["seconds"]["median"])
    limit = bound(row, launch_us, gpu)
    if limit == "host":
        host = units.seconds(row["host_us"] / 1e6)
        return (
            f"Bounded by the host, which takes {host} to launch {time} of GPU work. "
            "Batch the work or capture a CUDA graph."
        )
    if limit == "launch":
        empty = units.seconds(launch_us / 1e6)
        hint = "Batch it, fuse it with a neighbour or capture a CUDA graph." if gpu else "Give it more work per call."
        empty_one = "an empty kernel" if gpu else "an empty call"
        return f"Bounded by launch overhead: {time}, and {empty_one} takes {empty}. {hint}"
    cache = " (helped by the cache)" if row.get("cached") and limit == "memory" else ""
    return f"{_place(row, limit)}{cache}: {_help(row, limit)}{_faster(row, siblings)}."


def _place(row: Row, limit: str) -> str:
    share = units.percent(row["share"])
    if row["share"] >= NEAR:
        return f"At the {limit} roof ({share})"
    if row["share"] < FAR and row["kind"] in WAYS:
        return f"Bounded by its own instructions or by latency, at {share} of the {limit} roof"
    return f"Bounded by {limit}, at {share} of the roof"


def _help(row: Row, limit: str) -> str:
    """Returns what would help an implementation, from the facts in its row."""
    share, kind = row["share"], row["kind"]
    if share >= NEAR and limit == "memory":
        return "only moving fewer bytes would help, so fuse it with its neighbours"
    if share >= NEAR:
        return "only fewer or narrower operations would help"
    if limit == "compute":
        idle = units.percent(1 - share)
        return f"the matrix units are idle {idle} of the time; larger tiles and deeper pipelines would feed them"
    if kind in WAYS:
        look = "" if share >= FAR else f"; `ridgeline inspect {row['op']} --impl {row['impl']}` shows its instructions"
        return WAYS[kind] + look
    moved = f"its time would suffice to move {units.times(1 / share)} the bytes of a perfect kernel"
    if kind == "eager" and not row["peer"]:
        return f"{moved}; one fused kernel would keep intermediate results in registers"
    return moved


def _faster(row: Row, siblings: list[Row]) -> str:
    timed = [s for s in siblings if s["status"] == "ok" and s["impl"] != row["impl"]]
    best = min(timed, key=lambda s: s["seconds"]["median"], default=None)
    gain = row["seconds"]["median"] / best["seconds"]["median"] if best else 0
    return f"; {best['impl']} is {units.times(gain)} as fast" if best and gain > 1.05 else ""


def judged(rows: list[Row]) -> list[dict[str, Any]]:
    """Returns for each bench row: op, case, dtype, direction, impl, intensity (FLOP/B), share, bound, verdict."""
    launch_us, gpu = one(rows, "roof")["launch_us"], one(rows, "run")["machine"]["gpu"] is not None
    works: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in of(rows, "bench"):
        works.setdefault(key(row), []).append(row)
    return [
        {
            **dict(zip(("op", "case", "dtype", "direction"), work, strict=True)),
            "impl": row["impl"],
            "intensity": row["flops"] / row["bytes"],
            "share": row.get("share"),
            "bound": bound(row, launch_us, gpu) if row["status"] == "ok" else None,
            "verdict": sentence(row, siblings, launch_us, gpu),
        }
        for work, siblings in works.items()
        for row in siblings
    ]
