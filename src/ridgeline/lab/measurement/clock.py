"""The clock: times functions with a cold cache and a full queue, interleaved, as medians with 95% intervals."""

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
from statistics import median
from typing import Any, Protocol

import torch

from ridgeline import device as devices
from ridgeline.op import RidgelineError

Function = Callable[[], Any]
THROTTLES = 0x4 | 0x8 | 0x20 | 0x40 | 0x80  # NVML's clock event reasons: power cap, slowdown, heat, power brake
_groups = count()


def interval(samples: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """Returns the confidence interval of the median, from order statistics. z: normal quantile; 1.96 gives 95%."""
    ordered, n = sorted(samples), len(samples)
    reach = z * math.sqrt(n) / 2
    low, high = math.floor(n / 2 - reach), math.ceil(n / 2 + reach)
    return ordered[max(low - 1, 0)], ordered[min(high, n - 1)]


@dataclass(frozen=True)
class Measurement:
    """The timing of one function.

    samples: seconds of each run, in the order of the rounds.
    group: the call of `measure` that timed it; functions of one group ran in the same rounds.
    host_us: the host's time per call in microseconds (None on a CPU).
    peak_bytes: peak memory of a call, beyond what was allocated before (None on a CPU).
    held_bytes: memory that the function keeps between calls, such as a backward's saved tensors (None on a CPU).
    mhz: the clock of the multiprocessors under this load, and throttled: whether the GPU limited it; None if unknown.
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
        """Returns the median and its 95% interval, in the form of a result row."""
        low, high = interval(self.samples)
        return {"median": self.median, "low": low, "high": high}

    def __str__(self) -> str:
        from ridgeline.lab import units

        host = "" if self.host_us is None else f", host {units.seconds(self.host_us * 1e-6)}"
        return f"{units.seconds(self.median)} {units.spread(self.seconds)} ({len(self.samples)} runs{host})"


def differs(a: Measurement, b: Measurement) -> bool:
    """Returns whether two functions differ in speed.

    In one group: the 99% interval of the ratio of their times in each round excludes 1. Else: their intervals are
    disjoint.
    """
    if a.group == b.group >= 0:
        low, high = interval([x / y for x, y in zip(a.samples, b.samples, strict=True)], z=2.58)
        return not low <= 1 <= high
    return apart(a.seconds, b.seconds)


def apart(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    """Returns whether the intervals of two figures are disjoint."""
    return a["high"] < b["low"] or b["high"] < a["low"]


def prepare(function: Function) -> None:
    """Calls the attribute `before` of a function, if it has one: untimed work before each run."""
    before = getattr(function, "before", None)
    if before is not None:
        before()


def calls(function: Function) -> int:
    """Returns how many calls a function makes: its attribute `calls`, or 1. Its time is divided by that."""
    return getattr(function, "calls", 1)


def one(function: Function) -> Function:
    """Returns the single call of a function that makes several: its attribute `one`, or the function itself."""
    single: Function = getattr(function, "one", function)
    return single


class Timer(Protocol):
    """The interface to a device that `measure` needs."""

    def round(self, functions: Sequence[Function], writes: int | None = None) -> list[float]:
        """Runs each function once in this order, with a cold cache, and returns the seconds of each.

        They are those of all of its `calls`.

        writes: as in `measure`."""

    def host(self, function: Function, seconds: float) -> float | None:
        """Returns the host's seconds per call of a function that takes `seconds`."""

    def peak(self, function: Function) -> int | None:
        """Returns the bytes that a call needs beyond what is allocated."""


class CpuTimer:
    """Times on the CPU. Overwrites the last-level cache before each run."""

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
    """Times on the GPU by events. A delay kernel runs while a round is enqueued: the GPU never waits for the host."""

    LONGEST = 0.05  # seconds of delay; a function that still drains the queue synchronises by itself

    def __init__(self) -> None:
        self.cache = max(devices.here().l2, 32 << 20)
        self.buffer, self.clean = (torch.zeros(2 * self.cache // 4, dtype=torch.int32, device="cuda") for _ in range(2))
        self.delay = 1e-4

    def cool(self, writes: int | None) -> None:
        """Fills L2 with as many dirty bytes as the function itself leaves, or entirely if that is unknown.

        A function pays for writing back the dirty lines that it finds, and leaves its own unpaid: the two should
        balance. So dirty lines fill L2 first, and reading clean ones then replaces those that are too many. Both
        buffers are twice as large as needed, since L2 does not evict strictly in order."""
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
            if number % 10 == 0:  # keeps the queue short, so that no call waits
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
    """Times functions without arguments against each other, interleaved in changing order.

    Returns a Measurement for each name. A function that makes several `calls` is timed by the call.
    budget: seconds of timing for all functions together, without warm-up; each runs at least `min_reps` times.
    details: also measure host time, peak memory and clocks.
    writes: bytes that each function writes. Before each run L2 is filled with as many dirty bytes as the function
        itself leaves; if unknown (None), all of L2 is dirty.
    """
    timer = timer or device_timer()
    names = list(functions)
    for function in functions.values():
        function()
    if details:
        peaks = {name: timer.peak(one(function)) for name, function in functions.items()}
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
            samples[name].append(seconds / calls(functions[name]))
    group = next(_groups)
    found = {name: Measurement(tuple(samples[name]), group) for name in names}
    if not details:
        return found
    mhz, throttled = _told(clocks)
    for name, function in functions.items():
        host = timer.host(one(function), rough[name] / calls(function))
        host_us = None if host is None else host * 1e6
        found[name] = replace(found[name], host_us=host_us, peak_bytes=peaks[name], mhz=mhz, throttled=throttled)
    return found


def benchmark(function: Function, *, budget: float = 1.0, min_reps: int = 10) -> Measurement:
    """Returns the timing of a function without arguments, on the current GPU or else on the CPU.

    budget: seconds of timing; it runs at least `min_reps` times.
    >>> ridgeline.lab.benchmark(lambda: ridgeline.softmax(x))
    """
    if not callable(function):
        raise RidgelineError(f"benchmark takes a function without arguments, not {type(function).__name__}")
    return measure({"function": function}, budget=budget, min_reps=min_reps)["function"]


def device_timer(device: str | None = None) -> Timer:
    """Returns the timer of a device, "cpu" or "cuda" (default: the GPU if there is one)."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return GpuTimer() if device.startswith("cuda") else CpuTimer()


def last_level_cache() -> int:
    """Returns the bytes of the CPU's last-level cache; 32 MiB if the system does not tell."""
    for level in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        if level in os.sysconf_names and (size := os.sysconf(level)) > 0:
            return size
    return 32 << 20


def cache_bytes(device: str) -> int:
    """Returns the bytes of the cache that a working set must exceed: the GPU's L2, or the CPU's last level."""
    return devices.here().l2 if device.startswith("cuda") else last_level_cache()


def nvidia_smi(*fields: str) -> subprocess.Popen[str] | None:
    """Starts nvidia-smi to query the current GPU; returns None if it is not available."""
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available() or torch.version.hip:
        return None
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def answer(query: subprocess.Popen[str] | None) -> list[str]:
    """Returns the fields that nvidia-smi printed, or nothing if it failed."""
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
