"""What a microbenchmark is, and the card that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import ridgeline.device as devices

HERE = Path(__file__).parent
Row = dict[str, Any]
Figure = dict[str, float]
DIGITS = 5  # significant digits of a recorded figure
REPS = 7


@dataclass(frozen=True)
class Micro:
    """One microbenchmark: `measure(card)` yields rows: the place in a sweep ("" if there is none), figures by unit.

    idea: what the kernel does. divides: what by what, so that anyone can repeat it. kernels: names of what it starts.
    refuses: takes a compute capability (90 for sm_90), and returns why it cannot run there, or None.
    """

    part: str
    name: str
    idea: str
    divides: str
    kernels: tuple[str, ...]
    measure: Callable[[Card], Iterator[tuple[str, dict[str, Figure]]]] = field(repr=False, compare=False)
    refuses: Callable[[int], str | None] = field(default=lambda capability: None, repr=False, compare=False)


@dataclass(frozen=True)
class Timed:
    """One kernel's runs: the median cycles of its blocks, and the seconds between events around it, per run."""

    cycles: list[float]
    seconds: list[float]

    def per_cycle(self, work: float) -> Figure:
        """Work per cycle: of a block, as the kernel counts its cycles."""
        return figure([work / cycles for cycles in self.cycles])

    def cycles_per(self, work: float) -> Figure:
        return figure([cycles / work for cycles in self.cycles])

    def per_second(self, work: float) -> Figure:
        return figure([work / seconds for seconds in self.seconds])


def figure(samples: list[float]) -> Figure:
    """The median of samples and its 95% interval, rounded."""
    from ridgeline.lab.measurement.clock import interval

    low, high = interval(samples)
    found = {"median": median(samples), "low": low, "high": high}
    return {name: rounded(value) for name, value in found.items()}


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def scaled(found: Figure, factor: float) -> Figure:
    """A figure times a factor."""
    return {name: rounded(value * factor) for name, value in found.items()}


@cache
def sources(name: str, arguments: str) -> Any:
    """A kernel of this folder, by "file:kernel". Before its arguments it takes where cycles go, and its sink.

    It is kept, because `boundary.launch` knows a kernel by its identity."""
    from ridgeline.cuda import CudaKernel

    file, _, kernel = name.partition(":")
    return CudaKernel(HERE / f"{file}.cu", kernel, "PP" + arguments)


class Card:
    """The current GPU: starts kernels, reads their clocks, and lends memory.

    mhz: the clock that `tick` measured last.
    """

    def __init__(self) -> None:
        import torch

        self.gpu = devices.here()
        self.device = "cuda"
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.threads = properties.max_threads_per_multi_processor
        self.memory = properties.total_memory
        self._prepare()

    def _prepare(self) -> None:
        import torch

        self.out = torch.zeros(1 << 16, dtype=torch.int64, device=self.device)
        self.sink = torch.zeros(1 << 12, dtype=torch.int32, device=self.device)
        self.lent: dict[str, Any] = {}
        self.mhz = 0.0

    @property
    def multiprocessors(self) -> int:
        return self.gpu.multiprocessors

    def bytes(self, size: int, name: str = "data") -> Any:
        """Memory of at least this many bytes, filled with ones; the same memory whenever the name is the same."""
        import torch

        if name not in self.lent or self.lent[name].numel() < size:
            self.lent[name] = None
            self.lent[name] = torch.ones(size, dtype=torch.uint8, device=self.device)
        return self.lent[name]

    def most(self, wanted: int) -> int:
        """Bytes to work on: those wanted, but at most a sixteenth of the card's memory."""
        return min(wanted, self.memory // 16 // (1 << 20) * (1 << 20))

    def start(self, name: str, arguments: str, *args: Any, blocks: int, threads: int, **options: Any) -> None:
        """Starts a kernel of this folder once."""
        from ridgeline import boundary

        boundary.launch(sources(name, arguments), (blocks,), self.out, self.sink, *args, block=threads, **options)

    def run(
        self,
        name: str,
        arguments: str,
        *args: Any,
        blocks: int = 1,
        threads: int = 32,
        reps: int = REPS,
        ready: bool = False,
        **options: Any,
    ) -> Timed:
        """Runs a kernel once unmeasured, unless all is `ready` as it should be, then `reps` times."""

        def once() -> float:
            return self.elapsed(lambda: self.start(name, arguments, *args, blocks=blocks, threads=threads, **options))

        if not ready:
            once()
        cycles, seconds = [], []
        for _ in range(reps):
            seconds.append(once())
            cycles.append(float(median(self.out[:blocks].tolist())))
        return Timed(cycles, seconds)

    def elapsed(self, function: Callable[[], None]) -> float:
        """The seconds of what a function starts, between two events behind a short delay, so that the host is ahead."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def tick(self) -> float:
        """The clock in MHz while every multiprocessor is busy: cycles beside nanoseconds over some milliseconds."""
        nanoseconds = self.bytes(8 << 12, "nanoseconds")
        timed = self.run("instructions:spin", "iP", 8_000_000, nanoseconds, blocks=self.multiprocessors, reps=3)
        took = nanoseconds.view(dtype=self.out.dtype)[0].item()
        self.mhz = rounded(1e3 * timed.cycles[-1] / max(took, 1))
        return self.mhz

    def cycles_and_time(self, found: Figure) -> dict[str, Figure]:
        """A figure in cycles, and the same in seconds at the measured clock."""
        return {"cycles": found, "s": scaled(found, 1e-6 / self.mhz)}
