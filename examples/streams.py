"""Times what streams, priorities, graphs and waiting cost on this GPU: the figures of lesson 15.

python examples/streams.py                                         prints them
python examples/streams.py --record results/streams/h200.jsonl     also writes them
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ridgeline.lab import graph, units
from ridgeline.lab.measurement.clock import interval
from ridgeline.lab.measurement.machine import facts
from ridgeline.lab.measurement.sheet import Sheet

ROUNDS = 15
Work = Callable[[], Any]
Found = Iterator[tuple[str, str, list[float]]]  # a group of figures, what was timed, and its seconds


def on_gpu(work: Work, rounds: int = ROUNDS) -> list[float]:
    """Seconds of some work on the GPU's clock. A delay lets the host enqueue all of it before any of it runs."""
    seconds = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds[2:]


def on_host(work: Work, rounds: int = ROUNDS, calls: int = 100) -> list[float]:
    """Seconds of the host for a call, with an empty queue."""
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        seconds.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return seconds[1:]


def spread(works: list[Work], streams: list[torch.cuda.Stream]) -> Work:
    """All works, dealt out to the streams in turn; without streams, one after the other."""

    def run() -> None:
        main = torch.cuda.current_stream()
        for side in streams:
            side.wait_stream(main)
        for n, work in enumerate(works):
            with torch.cuda.stream(streams[n % len(streams)] if streams else main):
                work()
        for side in streams:
            main.wait_stream(side)

    return run


def concurrency() -> Found:
    """Eight kernels on one stream and on several: of one block, of few blocks, and of many."""
    a, b = (torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outs = [torch.empty(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    large = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    larges = [torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(8)]
    kinds: dict[str, list[Work]] = {
        "8 kernels of one block": [lambda: torch.cuda._sleep(100_000)] * 8,
        "8 products of 256 x 256 x 4096": [lambda o=o: torch.mm(a, b.T, out=o) for o in outs],
        "2 products of 8192 x 8192 x 8192": [lambda o=o: torch.mm(*large, out=o) for o in larges],
    }
    for what, works in kinds.items():
        for count in (0, 2, 8)[: 2 if len(works) == 2 else 3]:
            name = f"{what}, {f'{count} streams' if count else 'one stream'}"
            yield "concurrency", name, on_gpu(spread(works, streams[:count]))


def copies() -> Found:
    """A copy from the host beside products: in order, on two streams, and from memory that is not pinned."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out, there = torch.empty_like(a), torch.empty(64 << 20, device="cuda", dtype=torch.uint8)
    pinned, pageable = torch.empty(64 << 20, dtype=torch.uint8).pin_memory(), torch.ones(64 << 20, dtype=torch.uint8)
    side = torch.cuda.Stream()

    def products() -> None:
        for _ in range(8):
            torch.mm(a, a, out=out)

    def copy(source: torch.Tensor) -> None:
        there.copy_(source, non_blocking=True)

    def in_order() -> None:
        copy(pinned)
        products()

    def overlapped(source: torch.Tensor) -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        products()
        with torch.cuda.stream(side):
            copy(source)
        main.wait_stream(side)

    yield "copies", "8 products of 4096 x 4096 x 4096", on_gpu(products)
    yield "copies", "copy of 64 MiB from pinned memory", on_gpu(lambda: copy(pinned))
    yield "copies", "copy of 64 MiB from pageable memory", on_gpu(lambda: copy(pageable))
    yield "copies", "pinned copy, then products, one stream", on_gpu(in_order)
    yield "copies", "pinned copy beside products, two streams", on_gpu(lambda: overlapped(pinned))
    yield "copies", "pageable copy beside products, two streams", on_gpu(lambda: overlapped(pageable))


def priorities() -> Found:
    """A short kernel while kernels of many blocks keep the GPU busy: its time from start to end, by priority."""
    busy, short = torch.ones(512 << 20, device="cuda"), torch.ones(1024, device="cuda")

    def latency(side: torch.cuda.Stream | None) -> list[float]:
        seconds = []
        for n in range(ROUNDS + 1):
            start, end, begun = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda.synchronize()
            begun.record()
            if side is not None:
                side.wait_event(begun)
                for _ in range(6):
                    busy.mul_(1.0)
            with torch.cuda.stream(side or torch.cuda.current_stream()):
                if side is not None:
                    # One block, while the others take the rest of the GPU. Of a different length each time: a large
                    # kernel takes 1 ms, and a wait of 1 ms would end just where the next one begins.
                    torch.cuda._sleep(300_000 + 97_000 * n)
                start.record()
                short.mul_(1.0)
                end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return seconds[1:]

    yield "priorities", "short kernel, idle GPU", latency(None)
    yield "priorities", "short kernel, busy GPU, same priority", latency(torch.cuda.Stream(priority=0))
    yield "priorities", "short kernel, busy GPU, high priority", latency(torch.cuda.Stream(priority=-1))


def graphs() -> Found:
    """A hundred small kernels as calls, and as a graph."""
    x = torch.ones(4096, device="cuda")

    def step() -> torch.Tensor:
        y = x
        for _ in range(100):
            y = y * 1.0
        return y

    found = graph(step)
    print(found)
    for what, pace in (("calls", found.calls), ("replays", found.replays)):
        if pace is not None:
            seconds = [pace.seconds[end] for end in ("low", "median", "high")]
            yield "graphs", f"100 kernels, {what}", seconds
            yield "graphs", f"100 kernels, {what}: the host", [pace.host_us / 1e6]
            yield "graphs", f"100 kernels, {what}: a kernel runs", [pace.timeline.busy_us / 1e6]


def waiting() -> Found:
    """What the host pays to wait for an empty queue, and to record."""
    x, event = torch.ones(1, device="cuda"), torch.cuda.Event()
    ways: dict[str, Work] = {
        "a kernel's launch (x.add_)": lambda: x.add_(1),
        "event.record()": event.record,
        "torch.cuda.synchronize(), empty queue": torch.cuda.synchronize,
        "x.item()": x.item,
        "a kernel, then x.item()": lambda: x.add_(1).item(),
    }
    for what, work in ways.items():
        yield "waiting", what, on_host(work)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time streams, priorities, graphs and waiting on this GPU.")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the figures here, as JSON lines")
    parser.add_argument("--commit", help="the commit, where this is a copy without git")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("examples/streams.py needs a GPU, and PyTorch finds none on this machine", file=sys.stderr)
        return 2
    sheet = Sheet(options.record, "streams", facts("cuda"), options.commit) if options.record else None
    for part in (concurrency, copies, priorities, graphs, waiting):
        for group, what, seconds in part():
            low, high = interval(seconds) if len(seconds) > 3 else (min(seconds), max(seconds))
            figure = {"median": median(seconds), "low": low, "high": high}
            print(f"{group:12} {what:55} {units.seconds(figure['median'])} {units.spread(figure)}", flush=True)
            if sheet:
                sheet.write(what, group=group, seconds=figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
