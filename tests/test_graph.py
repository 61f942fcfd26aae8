"""`ridgeline graph` and `lab.graph`: what breaks a capture and where, gaps from traces, and captures on a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ridgeline import cli
from ridgeline.lab import graph
from ridgeline.lab.analysis.graph import capture, gaps, outcome, watch
from ridgeline.lab.analysis.graph.pace import Pace
from ridgeline.lab.measurement import query, store
from ridgeline.op import RidgelineError

HERE = Path(__file__)
x = torch.randn(8, 8)


def line_of(text: str) -> int:
    """The number of the one line of this file that holds a text."""
    (found,) = [n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.rstrip().endswith(f"# {text}")]
    return found


def reads() -> float:
    return (x * 2).sum().item()  # reads


def branches() -> torch.Tensor:
    if (x > 0).any():  # branches
        return x + 1
    return x


def selects() -> torch.Tensor:
    return x[x > 0]  # selects


def sets() -> None:
    y = x.clone()
    y[y > 0] = torch.zeros(int((y > 0).sum()))


def fills() -> None:
    """torch fills by the mask, so no size is needed."""
    y = x.clone()
    y[y > 0] = 0.0


def sizes() -> torch.Tensor:
    return torch.repeat_interleave(x, torch.arange(8), dim=0)  # sizes


def known_size() -> torch.Tensor:
    return torch.repeat_interleave(x, torch.ones(8, dtype=torch.long), dim=0, output_size=8)


def waits() -> torch.Tensor:
    torch.cuda.synchronize()  # waits
    return x + 1


def uploads() -> torch.Tensor:
    return x + torch.tensor(3.0)  # uploads


def draws() -> torch.Tensor:
    return torch.rand(3, generator=torch.Generator().manual_seed(0))  # draws


def clean() -> torch.Tensor:
    return torch.where(x > 0, torch.relu(x @ x), torch.rand(8, 8))[torch.arange(4)]


@pytest.mark.parametrize(
    ("function", "kind", "operation"),
    [
        (reads, "read", "aten::_local_scalar_dense"),
        (branches, "read", "aten::_local_scalar_dense"),
        (selects, "size", "aten::index"),
        (sizes, "size", "aten::repeat_interleave"),
        (waits, "wait", "torch.cuda.synchronize"),
        (uploads, "copy", "torch.tensor"),
        (draws, "generator", "aten::rand"),
    ],
)
def test_a_watched_call_names_the_line_and_the_operation(function, kind: str, operation: str) -> None:
    (hazard,) = watch.watch(function, pretend=True)
    assert (hazard.kind, hazard.operation) == (kind, operation)
    assert hazard.place.file == str(HERE)
    assert hazard.place.line == line_of(function.__name__)
    assert hazard.place.text.endswith(f"# {function.__name__}")


@pytest.mark.parametrize("function", [clean, known_size, fills])
def test_what_a_graph_holds_is_no_hazard(function) -> None:
    assert watch.watch(function, pretend=True) == {}


def test_a_masked_store_is_found() -> None:
    assert "aten::index_put_" in {h.operation for h in watch.watch(sets, pretend=True)}


def test_times_are_counted_and_everything_is_put_back() -> None:
    before = torch.cuda.synchronize, torch.cuda.Event.record, torch.cuda.Stream.wait_event
    (count,) = watch.watch(lambda: [reads() for _ in range(3)], pretend=True).values()
    assert count == 3
    with pytest.raises(ZeroDivisionError):
        watch.watch(lambda: 1 / 0, pretend=True)
    assert before == (torch.cuda.synchronize, torch.cuda.Event.record, torch.cuda.Stream.wait_event)


def test_an_operation_in_another_thread_has_the_line_that_waits_for_it() -> None:
    """A backward on a GPU runs in a thread of its own."""
    seen = []

    def call() -> None:
        started = threading.Event()
        other = threading.Thread(target=lambda: (started.wait(), time.sleep(0.1), seen.append(watched._here())))
        other.start()
        started.set(), other.join()  # joins

    with watch.Watch(pretend=True) as watched:
        call()
    assert seen[0].line == line_of("joins")


def test_libraries_are_not_the_user_s_code() -> None:
    site = Path(torch.__file__).parents[1]
    assert watch.library(torch.nn.__file__)
    assert watch.library(json.__file__)
    assert watch.library(watch.__file__)
    assert watch.library("<string>")
    assert not watch.library(str(HERE))
    assert not watch.library(str(site / "someone/model.py"))
    assert not watch.library(f"{sys.prefix}/lib/python3/site-packages/x.py")


def test_streams_that_waited_belong_to_the_capture() -> None:
    place = watch.Place("a.py", 3, "y = x")
    streams = watch.Streams("main")
    assert streams.works("main", place)
    assert not streams.works("side", place), "it has not waited"
    streams.records("forked", "main")
    streams.waits("side", "forked")
    assert streams.works("side", place)
    assert streams.dirty == {"side": place}, "nobody has waited for the side stream"
    streams.records("joined", "side")
    streams.waits("main", "joined")
    assert not streams.dirty
    streams.records("elsewhere", "far")
    streams.waits("farther", "elsewhere")
    assert not streams.works("farther", place), "it waited for a stream that is not in the capture"


def test_waiting_streams_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own wait_stream and wait_event, over events and streams that need no GPU."""
    done: list[str] = []

    class Event:
        def record(self, stream: object) -> None:
            torch.cuda.Event.record(self, stream)

        def wait(self, stream: object) -> None:
            torch.cuda.Event.wait(self, stream)

    class Stream:
        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

        wait_event, wait_stream = torch.cuda.Stream.wait_event, torch.cuda.Stream.wait_stream

    main, side = Stream(), Stream()
    monkeypatch.setattr(torch.cuda.Event, "record", lambda event, stream: done.append("record"))
    monkeypatch.setattr(torch.cuda.Event, "wait", lambda event, stream: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    place = watch.Place("a.py", 1, "")
    with watch.Watch() as watched:
        side.wait_stream(main)
        assert watched.streams.works(side, place)
        (x + 1).sum()
    assert done == ["record", "wait"]
    assert [hazard.kind for hazard in watched.found] == ["unjoined"]
    with watch.Watch() as watched:
        side.wait_stream(main)
        watched.streams.works(side, place)
        main.wait_event(side.record_event())
    assert not watched.found


def test_copies() -> None:
    name, host = "aten::_to_copy", torch.ones(1)
    assert watch.kind_of(name, (host,), {"device": torch.device("cuda")}, False) == "copy"
    assert watch.kind_of(name, (host,), {"device": torch.device("cpu")}, False) is None
    assert watch.kind_of(name, (host,), {"dtype": torch.float64}, False) is None
    meta = {"device": torch.device("cuda"), "non_blocking": True}
    assert watch.kind_of(name, (host,), meta, False) == "copy", "pageable memory waits all the same"


def event(name: str, start: float, length: float, kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}


def test_the_gaps_of_a_trace() -> None:
    """Two calls; kernels overlap on two streams, and a copy counts as work."""
    one = [event("a", 0, 10), event("b", 5, 2), event("c", 30, 5), event("m", 36, 4, "gpu_memcpy")]
    two = [{**e, "ts": e["ts"] + 100} for e in one]
    other = [event("aten::mm", 0, 500, "cpu_op"), {"ph": "M", "name": "process_name"}]
    found = gaps.timeline({"traceEvents": [*two, *other, *one]}, 2)
    assert (found.kernels, found.busy_us) == (4, 19)
    pairs = [(gap.before, gap.after, gap.us, gap.times) for gap in found.gaps]
    assert pairs == [("m", "a", 30, 0.5), ("a", "c", 20, 1), ("c", "m", 0.5 * 2, 1)]


def pace(median: float, busy: float, *longest: gaps.Gap) -> Pace:
    seconds = {"median": median, "low": median, "high": median}
    return Pace(seconds, median * 1e6, gaps.Timeline(4, busy, longest))


def test_the_words_of_a_capture() -> None:
    calls = pace(100e-6, 20, gaps.Gap("k" * 60, "after", 50, 1))
    found = outcome.Graph("step", None, calls, pace(25e-6, 20), None, {}, True)
    text = str(found)
    assert "the GPU idles 80% of the time" in text
    assert "50.0 us, 1 a call: from " + "k" * 47 + "... to after" in text
    assert "A replay is 4.0x as fast as a call. Replays give the results of calls, bit for bit." in text
    assert found.figures()["calls"]["idle_us"] == pytest.approx(80)
    assert pace(10e-6, 20).idle_us == 0, "never negative"


def test_the_words_of_a_broken_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE.parents[1])
    hazards = watch.watch(lambda: (reads(), selects()), pretend=True)
    try:
        raise_in_torch()
    except RuntimeError as error:
        broken = capture.blame(error, hazards)
    assert broken.place.line == line_of("calls torch")
    assert broken.operation == "an operation"
    assert broken.error.startswith("RuntimeError: ")
    first = next(iter(hazards))
    at_end = capture.blame(RuntimeError("CUDA error: operation failed due to a previous error"), hazards)
    assert (at_end.operation, at_end.place) == (first.operation, first.place), "the end of a capture has no line"
    text = str(outcome.Graph("step", None, pace(1e-4, 20), None, at_end, hazards, None))
    assert f"The capture broke at tests/test_graph.py:{line_of('reads')}: return (x * 2).sum().item()" in text
    assert "No graph holds these either:" in text
    assert text.count("_local_scalar_dense") == 1, "what broke it is not repeated"


def raise_in_torch() -> None:
    torch.ones(2).view(3)  # calls torch


def test_the_exception_of_a_line_is_explained_by_what_was_seen_there() -> None:
    hazards = watch.watch(reads, pretend=True)

    def fails() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    try:
        fails()
    except RuntimeError as error:
        here = watch.raised(error)
        moved = {watch.Hazard("read", "aten::x", watch.Place(here.file, here.line, "")): 1}
        assert capture.blame(error, hazards | moved).operation == "aten::x"


def test_without_a_gpu_the_call_is_watched(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = str(graph(reads))
    assert outcome.NO_GPU in text
    assert f"test_graph.py:{line_of('reads')}: return" in text
    assert "Nothing in a call keeps it from being captured." in str(graph(clean))
    assert cli.main(["graph", f"{HERE}:reads", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hazards"][0]["kind"] == "read"
    assert told["calls"] is None


@pytest.mark.parametrize(("given", "said"), [(3, "not int"), (lambda a: a, "needs some")])
def test_bad_input(given, said: str) -> None:
    with pytest.raises(RidgelineError, match=said):
        graph(given)


STREAMS = HERE.parents[1] / "examples/streams.py"


def test_the_lesson_s_tables_are_what_the_example_times() -> None:
    marks = re.findall(r"<!-- figures streams \| (\w+) -->", (HERE.parents[1] / "docs/lessons/15.md").read_text())
    assert sorted(marks) == sorted(set(re.findall(r'yield "(\w+)"', STREAMS.read_text())))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_example_needs_a_gpu() -> None:
    done = subprocess.run([sys.executable, str(STREAMS)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "examples/streams.py needs a GPU" in done.stderr


@pytest.mark.gpu
def test_the_example_records(tmp_path: Path) -> None:
    path = tmp_path / "streams.jsonl"
    done = subprocess.run([sys.executable, str(STREAMS), "--record", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = query.of(store.load(path), "figure")
    assert {row["group"] for row in rows} == {"concurrency", "copies", "priorities", "graphs", "waiting"}


@pytest.mark.gpu
class TestOnTheGpu:
    """Real captures."""

    def step(self) -> torch.Tensor:
        a = torch.ones(64, 64, device="cuda")
        for _ in range(20):
            a = torch.relu(a * 1.01)
        return a

    def test_a_capture(self) -> None:
        found = graph(self.step)
        assert found.broken is None
        assert found.same is True
        assert found.replays.timeline.kernels == found.calls.timeline.kernels == 41
        assert found.speedup > 1.5
        assert torch.equal(found.replay(), self.step())

    @pytest.mark.parametrize("way", ["read", "select", "upload", "synchronize", "generator"])
    def test_what_breaks_it(self, way: str) -> None:
        a = torch.ones(64, device="cuda")
        own = torch.Generator("cuda")

        def step() -> torch.Tensor:
            b = a * 2
            if way == "read":
                b.sum().item()  # breaks by read
            if way == "select":
                b[b > 1] * 2  # breaks by select
            if way == "upload":
                b += torch.tensor([3.0], device="cuda")  # breaks by upload
            if way == "synchronize":
                torch.cuda.synchronize()  # breaks by synchronize
            if way == "generator":
                torch.rand(3, device="cuda", generator=own)  # breaks by generator
            return b

        found = graph(step)
        assert found.replay is None
        assert found.broken.place.line == line_of(f"breaks by {way}"), str(found)
        assert found.broken.why != watch.KINDS["other"][0], str(found)
        assert torch.rand(3, device="cuda").isfinite().all(), "random numbers can be drawn after a broken capture"
        assert graph(self.step).broken is None, "the next capture works"

    def test_a_side_stream_that_did_not_wait(self) -> None:
        side, a = torch.cuda.Stream(), torch.zeros(8, device="cuda")

        def step() -> torch.Tensor:
            with torch.cuda.stream(side):
                a.add_(1)  # on the side
            return a * 1

        found = graph(step)
        assert found.broken is None
        assert {h.kind for h in found.hazards} == {"stream"}, str(found)
        assert next(iter(found.hazards)).place.line == line_of("on the side")
