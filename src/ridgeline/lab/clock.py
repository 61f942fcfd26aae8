"""The clock: cold cache, full queue, implementations interleaved, the median with its 95% interval."""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import torch

from ridgeline import device as devices
from ridgeline.op import RidgelineError

Function = Callable[[], Any]
THROTTLES = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # of NVML's clock event reasons: power cap, slowdown, heat, power brake
_groups = count()


def interval(samples: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """The confidence interval of the median from order statistics (z of the normal distribution: 1.96 is 95%)."""
    ordered, n = sorted(samples), len(samples)
    reach = z * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return ordered[max(low - 1, 0)], ordered[min(high, n - 1)]


def median(samples: Sequence[float]) -> float:
    ordered, n = sorted(samples), len(samples)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


@dataclass(frozen=True)
class Measurement:
    """What the clock says of one function. samples: seconds of each run, in the order of the rounds it shared with its group.

    host_us: the host's own time per call (None on a CPU). peak_bytes: memory beyond what was there before, at its peak. held_bytes: what
    the function keeps from call to call, as a backward does what its forward has saved (None on a CPU).
    mhz: the multiprocessors' clock under this load; throttled: whether the GPU held itself back; None where unknown.
    """

    samples: tuple[float, ...]
    group: int = -1
    host_us: float | None = None
    peak_bytes: int | None = None
    held_bytes: int | None = None
    mhz: int | None = None
    throttled: bool | None = None

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def seconds(self) -> dict[str, float]:
        """The median and its 95% interval, as rows hold it."""
        low, high = interval(self.samples)
        return {"median": self.median, "low": low, "high": high}

    def __str__(self) -> str:
        from ridgeline.lab import units

        host = "" if self.host_us is None else f", host {units.seconds(self.host_us * 1e-6)}"
        return f"{units.seconds(self.median)} {units.spread(self.seconds)} ({len(self.samples)} runs{host})"


def differs(a: Measurement, b: Measurement) -> bool:
    """Whether two functions differ in speed: by the 99% interval of their ratio in each round they shared, else by disjoint intervals."""
    if a.group == b.group >= 0:
        low, high = interval([x / y for x, y in zip(a.samples, b.samples, strict=True)], z=2.58)
        return not low <= 1 <= high
    return apart(a.seconds, b.seconds)


def apart(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    """Whether two figures with intervals are disjoint."""
    return a["high"] < b["low"] or b["high"] < a["low"]


def prepare(function: Function) -> None:
    """Does what a function asks to be done before each run, outside of its time: its attribute `before`, if it has one."""
    before = getattr(function, "before", None)
    if before is not None:
        before()


class Timer(Protocol):
    """What `measure` needs of a device."""

    def round(self, functions: Sequence[Function], writes: int | None = None) -> list[float]:
        """Runs each function once in the given order, each with a cold cache; returns the seconds of each. writes: as in `measure`."""

    def host(self, function: Function, seconds: float) -> float | None:
        """The host's own seconds per call of a function that takes that long."""

    def peak(self, function: Function) -> int | None:
        """Bytes that a call needs beyond what is allocated."""


class CpuTimer:
    """Times on the CPU; the last-level cache is overwritten between runs."""

    def __init__(self) -> None:
        self.buffer = torch.empty(last_level_cache() // 4, dtype=torch.int32)

    def round(self, functions: Sequence[Function], writes: int | None = None) -> list[float]:
        seconds = []
        for function in functions:
            prepare(function)
            self.buffer.fill_(1)
            start = time.perf_counter()
            result = function()
            seconds.append(time.perf_counter() - start)
            del result
        return seconds

    def host(self, function: Function, seconds: float) -> None:
        return None

    def peak(self, function: Function) -> None:
        return None


class GpuTimer:
    """Times on the GPU by events. A delay kernel keeps the queue full while a round is enqueued: the GPU never waits for the host."""

    LONGEST = 0.05  # seconds of delay: a function that still empties the queue waits for the GPU itself

    def __init__(self) -> None:
        self.cache = max(devices.here().l2, 32 << 20)
        self.buffer, self.clean = (torch.zeros(2 * self.cache // 4, dtype=torch.int32, device="cuda") for _ in range(2))
        self.delay = 1e-4

    def cool(self, writes: int | None) -> None:
        """Fills the cache with lines that were written, which whoever comes next pays for; a function that writes as much leaves as much
        behind, unpaid. One that writes less is not to pay for others: so what it lacks is read here, twice over, as what leaves a
        cache is not quite what came first. (A read of 134 MB on an H100: 52 us after writes alone, 47.5 after this, and 45.4
        in a stream of such reads; a copy that writes 64 MiB: 48.5, and 46.5 in a stream.)"""
        self.buffer.fill_(1)
        if writes is not None and writes < self.cache:
            self.clean[: (self.cache - writes) // 2].sum()

    def round(self, functions: Sequence[Function], writes: int | None = None) -> list[float]:
        while True:
            before = time.perf_counter()
            torch.cuda._sleep(int(self.delay * 2e9))
            begin = torch.cuda.Event()
            begin.record()
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in functions]
            for function, (start, end) in zip(functions, events, strict=True):
                prepare(function)
                self.cool(writes)
                start.record()
                result = function()
                end.record()
                del result
            full, host = not begin.query(), time.perf_counter() - before
            torch.cuda.synchronize()
            if full or self.delay >= self.LONGEST:
                self.delay = min(1.5 * host, self.delay) if full else self.delay
                return [start.elapsed_time(end) / 1e3 for start, end in events]
            self.delay = min(2 * max(host, self.delay), self.LONGEST)

    def host(self, function: Function, seconds: float) -> float:
        calls = []
        for number in range(max(5, min(50, int(0.2 / seconds)))):
            if number % 10 == 0:  # the queue never fills, so a call never waits
                torch.cuda.synchronize()
            start = time.perf_counter()
            result = function()
            calls.append(time.perf_counter() - start)
            del result
        torch.cuda.synchronize()
        return median(calls)

    def peak(self, function: Function) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before


def measure(
    functions: Mapping[str, Function],
    *,
    budget: float = 1.5,
    min_reps: int = 10,
    max_reps: int = 1000,
    timer: Timer | None = None,
    details: bool = True,
    writes: int | None = None,
) -> dict[str, Measurement]:
    """Times functions of no arguments against each other, interleaved in changing order.

    budget: seconds of timing for all of them together; each runs at least `min_reps` times. Warming up comes on top.
    details: also host time, peak memory and the clocks. writes: bytes that each of them writes, so that it finds about as much in the
    cache that is yet to be written as it leaves; unknown, it finds the cache full of that.
    """
    timer = timer or device_timer()
    names = list(functions)
    for function in functions.values():
        function()
    if details:
        peaks = {name: timer.peak(function) for name, function in functions.items()}
    timer.round(list(functions.values()), writes)
    start = time.perf_counter()
    rough = dict(zip(names, timer.round(list(functions.values()), writes), strict=True))
    reps = max(min_reps, min(max_reps, int(budget / max(time.perf_counter() - start, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    order, dice, clocks = list(names), random.Random(0), None
    for number in range(reps):
        if number == reps // 4 and details:
            clocks = _ask_clocks()
        dice.shuffle(order)
        for name, seconds in zip(order, timer.round([functions[name] for name in order], writes), strict=True):
            samples[name].append(seconds)
    group = next(_groups)
    found = {name: Measurement(tuple(samples[name]), group) for name in names}
    if not details:
        return found
    mhz, throttled = _told(clocks)
    for name, function in functions.items():
        host = timer.host(function, rough[name])
        host_us = None if host is None else host * 1e6
        found[name] = replace(found[name], host_us=host_us, peak_bytes=peaks[name], mhz=mhz, throttled=throttled)
    return found


def benchmark(function: Function, *, budget: float = 1.0, min_reps: int = 10) -> Measurement:
    """Times one function of no arguments on the current GPU, or on the CPU where there is none.

    >>> ridgeline.lab.benchmark(lambda: ridgeline.softmax(x))
    """
    if not callable(function):
        raise RidgelineError(f"benchmark takes a function of no arguments, and was given {type(function).__name__}")
    return measure({"function": function}, budget=budget, min_reps=min_reps)["function"]


def device_timer(device: str | None = None) -> Timer:
    """The timer of a device ("cpu" or "cuda"); of the GPU where there is one by default."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return GpuTimer() if device.startswith("cuda") else CpuTimer()


def last_level_cache() -> int:
    """Bytes of the CPU's last-level cache; 32 MiB where the system does not say."""
    for level in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        if level in os.sysconf_names and (size := os.sysconf(level)) > 0:
            return size
    return 32 << 20


def cache_bytes(device: str) -> int:
    """The cache that a working set must exceed: the GPU's L2, or the CPU's last level."""
    return devices.here().l2 if device.startswith("cuda") else last_level_cache()


def nvidia_smi(*fields: str) -> subprocess.Popen[str] | None:
    """Starts a query of the current GPU's state; None where it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available() or torch.version.hip:
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def answer(query: subprocess.Popen[str] | None) -> list[str]:
    """What nvidia-smi said, field by field; nothing where it failed."""
    if query is None:
        return []
    try:
        text, _ = query.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        query.kill()
        return []
    return [field.strip() for field in text.strip().split(",")] if query.returncode == 0 else []


def _ask_clocks() -> subprocess.Popen[str] | None:
    return nvidia_smi("clocks.sm", "clocks_event_reasons.active")


def _told(query: subprocess.Popen[str] | None) -> tuple[int | None, bool | None]:
    fields = answer(query)
    if len(fields) != 2 or not fields[0].isdigit() or not fields[1].startswith("0x"):
        return None, None
    return int(fields[0]), bool(int(fields[1], 16) & THROTTLES)
