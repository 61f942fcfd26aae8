"""One plain sentence per rung: what bounds it, how far it is from the roof, and what would help."""

from __future__ import annotations

from typing import Any

from ridgeline.lab import units

Row = dict[str, Any]
CODES = ("int8", "float8_e4m3fn")  # 8 bits, whose matrix rates stand beside the others'
LAUNCH = 3.0  # a kernel that takes fewer launch latencies than this mostly waits to be started
NEAR = 0.9  # from this share on, a kernel is at its roof
FAR = 0.6  # under this share, a fused kernel is held by something other than its roof
WAYS = {
    "cuda": "wider loads and stores (16 bytes) and more bytes in flight would help",
    "triton": "other tile sizes and warps may help (`ridgeline tune`)",
    "gluon": "tiles loaded further ahead of their use, or of another size, may help",
}


def of(rows: list[Row], kind: str) -> list[Row]:
    """The rows of one type."""
    return [row for row in rows if row["type"] == kind]


def one(rows: list[Row], kind: str) -> Row:
    """The last row of a type that every run has. Raises RidgelineError where it has none."""
    from ridgeline.op import RidgelineError

    found = of(rows, kind)
    if not found:
        raise RidgelineError(f"this run has no {kind!r} row; `ridgeline bench` writes runs with one")
    return found[-1]


def key(row: Row) -> tuple[str, str, str, str]:
    """What was timed, whoever ran it: op, case, dtype, direction."""
    return row["op"], row["case"], row["dtype"], row["direction"]


def bound(row: Row, launch_us: float, gpu: bool) -> str:
    """What bounds a timed rung: "host", "launch", "memory" or "compute"."""
    microseconds = row["seconds"]["median"] * 1e6
    if gpu and (row["host_us"] or 0) > microseconds:
        return "host"
    if microseconds < LAUNCH * launch_us:
        return "launch"
    return row["bound"]


def sentence(row: Row, siblings: list[Row], launch_us: float, gpu: bool) -> str:
    """The verdict on a row, given the other rungs' rows of the same work, the machine's launch latency and whether it is a GPU."""
    if row["status"] != "ok":
        return f"Not timed ({row['status']}): {row['reason'] or 'no reason given'}."
    time = units.seconds(row["seconds"]["median"])
    limit = bound(row, launch_us, gpu)
    if limit == "host":
        host = units.seconds(row["host_us"] / 1e6)
        return f"Bounded by the host: it takes {host} to start what the GPU does in {time}. Batch the work or capture a CUDA graph."
    if limit == "launch":
        empty = units.seconds(launch_us / 1e6)
        hint = "Batch it, fuse it with a neighbour or capture a CUDA graph." if gpu else "Give it more work per call."
        return f"Bounded by the launch: {time}, where one that does nothing takes {empty}. {hint}"
    cache = " (with the cache's help)" if row.get("cached") and limit == "memory" else ""
    return f"{_place(row, limit)}{cache}: {_help(row, limit)}{_faster(row, siblings)}."


def _place(row: Row, limit: str) -> str:
    share = units.percent(row["share"])
    if row["share"] >= NEAR:
        return f"At the {limit} roof, {share} of it"
    if row["share"] < FAR and row["kind"] in WAYS:
        return f"Held by its own instructions or by latency, at {share} of the {limit} roof"
    return f"Bounded by {limit}, at {share} of the roof"


def _help(row: Row, limit: str) -> str:
    """What would help a rung, from the facts in its row."""
    share, kind = row["share"], row["kind"]
    if share >= NEAR and limit == "memory":
        return "only fewer bytes would help, so fuse it with its neighbours"
    if share >= NEAR:
        return "only fewer or narrower operations would help"
    if limit == "compute":
        return f"the matrix units wait for {units.percent(1 - share)} of the time; larger tiles and deeper pipelines would feed them"
    if kind in WAYS:
        look = "" if share >= FAR else f"; `ridgeline inspect {row['op']} --impl {row['impl']}` shows its instructions"
        return WAYS[kind] + look
    moved = f"it takes the time of {units.times(1 / share)} the bytes that a perfect kernel moves"
    if kind == "eager" and not row["peer"]:
        return f"{moved}; one fused kernel would keep what lies between in registers"
    return moved


def _faster(row: Row, siblings: list[Row]) -> str:
    timed = [s for s in siblings if s["status"] == "ok" and s["impl"] != row["impl"]]
    best = min(timed, key=lambda s: s["seconds"]["median"], default=None)
    gain = row["seconds"]["median"] / best["seconds"]["median"] if best else 0
    return f"; {best['impl']} is {units.times(gain)} as fast" if best and gain > 1.05 else ""


def judged(rows: list[Row]) -> list[dict[str, Any]]:
    """Every bench row of a run with its verdict: op, case, dtype, direction, impl, intensity (FLOP/B), share, bound, verdict."""
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
