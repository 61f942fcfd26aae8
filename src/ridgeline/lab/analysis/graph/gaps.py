"""The gaps between kernels, from a profiler's trace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ridgeline.lab.analysis.flame import GPU

LONGEST = 5  # gaps that are named


@dataclass(frozen=True)
class Gap:
    """The idle time between two kernels that follow each other, per call, and how often it comes in a call."""

    before: str
    after: str
    us: float
    times: float


@dataclass(frozen=True)
class Timeline:
    """What the GPU did in a call: kernels and copies, microseconds in which any of them ran, and the longest gaps."""

    kernels: float
    busy_us: float
    gaps: tuple[Gap, ...]


def timeline(trace: dict[str, Any], calls: int) -> Timeline:
    """The timeline of a Chrome trace of that many calls, as a mean over the calls.

    Kernels that overlap on several streams count once. A gap lies between the end of all that began before it and the
    next start.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in GPU]
    events.sort(key=lambda e: (e["ts"], e["ts"] + e["dur"]))
    busy, end, last = 0.0, float("-inf"), ""
    idle: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end and last:
            idle[last, event["name"]].append(start - end)
        busy += max(0.0, stop - max(start, end))
        if stop > end:
            end, last = stop, event["name"]
    found = [Gap(*pair, sum(times) / calls, len(times) / calls) for pair, times in idle.items()]
    found.sort(key=lambda gap: -gap.us)
    return Timeline(len(events) / calls, busy / calls, tuple(found[:LONGEST]))
