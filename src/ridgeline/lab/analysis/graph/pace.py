"""Times a function as a loop of a program calls it: the queue starts empty, and nothing hides the host."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ridgeline.lab.analysis.graph.gaps import Timeline, timeline
from ridgeline.lab.measurement.clock import interval

ROUND = 0.02  # seconds of a round of calls
ROUNDS = 15
PROFILED = 5  # calls under the profiler

Function = Callable[[], Any]


@dataclass(frozen=True)
class Pace:
    """How a function runs, call after call.

    seconds: of a call, the median over rounds with its 95% interval. host_us: the host's time to enqueue a call.
    timeline: what the GPU did in a call.
    """

    seconds: dict[str, float]
    host_us: float
    timeline: Timeline

    @property
    def idle_us(self) -> float:
        """The microseconds of a call in which no kernel ran."""
        return max(0.0, self.seconds["median"] * 1e6 - self.timeline.busy_us)

    @property
    def idle(self) -> float:
        """The share of the time in which no kernel ran."""
        return self.idle_us / (self.seconds["median"] * 1e6)


def paces(functions: Mapping[str, Function]) -> dict[str, Pace]:
    """The pace of each function on the current GPU. They take turns, round by round."""
    calls = {name: max(3, min(1000, round(ROUND / _round(function, 3)[0]))) for name, function in functions.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            samples[name].append(_round(function, calls[name]))
    found = {}
    for name, function in functions.items():
        seconds = [gpu for gpu, _ in samples[name]]
        low, high = interval(seconds)
        host = min(host for _, host in samples[name]) * 1e6
        found[name] = Pace({"median": median(seconds), "low": low, "high": high}, host, profiled(function))
    return found


def _round(function: Function, calls: int) -> tuple[float, float]:
    """Seconds of a call on the GPU's clock, and of its enqueueing on the host's."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    begun = time.perf_counter()
    for _ in range(calls):
        function()
    host = time.perf_counter() - begun
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls, host / calls


def profiled(function: Function) -> Timeline:
    """What the GPU does in a call, from PyTorch's profiler."""
    return timeline(trace_of(function, PROFILED), PROFILED)


def trace_of(function: Function, calls: int) -> dict[str, Any]:
    """The Chrome trace of what the GPU did in some calls, after one that is not traced."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        made: dict[str, Any] = json.loads(path.read_text())
        return made
