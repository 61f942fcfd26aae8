"""What it costs to start kernels, to wait for them, and to use events, graphs and streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.lab.measurement.micro.bench import REPS, Card, Figure, Micro, figure

Found = Iterator[tuple[str, dict[str, Figure]]]
MANY = 400  # kernels of a batch: fewer than the driver's queue holds
STREAMS = (1, 2, 4, 8, 16, 32)
SPIN = 200_000  # cycles of a kernel on one multiprocessor, for streams


def _nothing(card: Card) -> None:
    card.start("instructions:nothing", "", blocks=1, threads=32)


def _clocked(function: Callable[[], Any], many: int = 1) -> Figure:
    """The host's seconds for one call of a function that makes `many`, with an idle GPU before each."""
    import torch

    samples = []
    for _ in range(3 * REPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) / many)
    return figure(samples[REPS:])


def _repeated(function: Callable[[], Any]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(MANY):
            function()

    return several


def _on_gpu(card: Card, function: Callable[[], Any], many: int) -> Figure:
    """The GPU's seconds for one of the `many` kernels that a function starts, behind a delay that hides the host."""
    import torch

    def elapsed() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(40_000_000)  # 20 ms
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    elapsed()
    return figure([elapsed() / many for _ in range(REPS)])


def _graph(card: Card, many: int) -> Any:
    import torch

    _nothing(card)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(many):
            _nothing(card)
    graph.replay()
    return graph


def _launch(card: Card) -> Found:
    yield "", {"s": _clocked(_repeated(lambda: _nothing(card)), MANY)}


def _back_to_back(card: Card) -> Found:
    yield "", {"s": _on_gpu(card, _repeated(lambda: _nothing(card)), MANY)}


def _round_trip(card: Card) -> Found:
    import torch

    def once() -> None:
        _nothing(card)
        torch.cuda.synchronize()

    yield "", {"s": _clocked(once)}


def _synchronise(card: Card) -> Found:
    import torch

    yield "", {"s": _clocked(_repeated(torch.cuda.synchronize), MANY)}


def _graph_host(card: Card) -> Found:
    yield "", {"s": _clocked(_graph(card, MANY).replay)}


def _graph_nodes(card: Card) -> Found:
    yield "", {"s": _on_gpu(card, _graph(card, MANY).replay, MANY)}


def _graph_round_trip(card: Card) -> Found:
    import torch

    graph = _graph(card, 1)

    def once() -> None:
        graph.replay()
        torch.cuda.synchronize()

    yield "", {"s": _clocked(once)}


def _event_record(card: Card) -> Found:
    import torch

    event = torch.cuda.Event()
    yield "", {"s": _clocked(_repeated(event.record), MANY)}


def _event_gap(card: Card) -> Found:
    import torch

    def elapsed() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    elapsed()
    yield "", {"s": figure([elapsed() for _ in range(3 * REPS)])}


def _hop(card: Card) -> Found:
    """A kernel in one stream, then one in another that waits for it, to and fro."""
    import torch

    streams, hops = (torch.cuda.current_stream(), torch.cuda.Stream()), 100
    events = [torch.cuda.Event() for _ in range(hops)]

    def pass_on() -> None:
        for n, event in enumerate(events):
            with torch.cuda.stream(streams[n % 2]):
                _nothing(card)
                event.record(streams[n % 2])
            streams[(n + 1) % 2].wait_event(event)

    yield "", {"s": _on_gpu(card, pass_on, hops)}


def _streams(card: Card) -> Found:
    """32 kernels of one block each, on some streams: the time of all of them."""
    import torch

    nanoseconds = card.bytes(8 << 12, "nanoseconds")
    main = torch.cuda.current_stream()
    for count in STREAMS:
        streams = [torch.cuda.Stream() for _ in range(count)]

        def spread(streams: list[Any] = streams) -> None:
            begin = torch.cuda.Event()
            begin.record()
            for stream in streams:
                stream.wait_event(begin)
            for n in range(STREAMS[-1]):
                with torch.cuda.stream(streams[n % len(streams)]):
                    card.start("instructions:spin", "iP", SPIN, nanoseconds, blocks=1, threads=32)
            for stream in streams:
                main.wait_stream(stream)

        yield str(count), {"s": _on_gpu(card, spread, 1)}


START = "ridgeline's own launch of a kernel that does nothing: one call of the driver from Python"
NOTHING, SPINNING = ("instructions:nothing",), ("instructions:spin",)
MICROS = [
    Micro("launches", "start a kernel, host", START, "the host's seconds / 400 starts", NOTHING, _launch),
    Micro(
        "launches",
        "kernels back to back, GPU",
        "400 empty kernels behind a delay that hides the host",
        "seconds between events / 400",
        NOTHING,
        _back_to_back,
    ),
    Micro(
        "launches",
        "start a kernel and wait for it",
        "from the call until the host knows the end",
        "the host's seconds",
        NOTHING,
        _round_trip,
    ),
    Micro(
        "launches",
        "synchronise an idle GPU",
        "torch.cuda.synchronize() with nothing to wait for",
        "the host's seconds / 400 calls",
        (),
        _synchronise,
    ),
    Micro(
        "launches",
        "start a graph of 400 kernels, host",
        "one replay of a CUDA graph",
        "the host's seconds",
        NOTHING,
        _graph_host,
    ),
    Micro(
        "launches",
        "kernels of a graph, GPU",
        "400 empty kernels, each after the one before",
        "seconds between events / 400",
        NOTHING,
        _graph_nodes,
    ),
    Micro(
        "launches",
        "start a graph of one kernel and wait",
        "from the call until the host knows the end",
        "the host's seconds",
        NOTHING,
        _graph_round_trip,
    ),
    Micro(
        "launches",
        "record an event, host",
        "torch.cuda.Event.record()",
        "the host's seconds / 400 calls",
        (),
        _event_record,
    ),
    Micro(
        "launches",
        "two events in a row, GPU",
        "the least that a pair of events measures",
        "seconds between events",
        (),
        _event_gap,
    ),
    Micro(
        "launches",
        "from stream to stream, GPU",
        "an empty kernel in one stream, an event, and one in another stream that waits",
        "seconds between events / 100 hops",
        NOTHING,
        _hop,
    ),
    Micro(
        "streams",
        "32 small kernels",
        "32 kernels of one block and 200,000 cycles each, dealt to some streams",
        "seconds of all of them",
        SPINNING,
        _streams,
    ),
]
