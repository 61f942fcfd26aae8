"""A step as events: the stages of a pipeline, or the two streams of one rank, one after the other in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.op import RidgelineError
from ridgeline.parallel.cost import HIDES, SLOWS, Cost, Job, Layout, predict
from ridgeline.parallel.layered import Parts, parts

MOST = 400_000  # events of a simulation


@dataclass(frozen=True)
class Span:
    """Something that takes time. lane: a stage, or a stream; start, end: seconds; kind: as in pictures.KINDS."""

    lane: str
    start: float
    end: float
    kind: str
    label: str


@dataclass(frozen=True)
class Timeline:
    """A simulated step: its spans, and its seconds."""

    spans: Sequence[Span]
    seconds: float

    def lanes(self) -> dict[str, list[Span]]:
        """Returns the spans by lane, in the order in which lanes first appear."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.lane, []).append(span)
        return found


def order(stage: int, stages: int, virtual: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
    """Yields what a stage does, as ("forward" or "backward", micro-batch, part): 1F1B, and interleaved with parts.

    The order of Narayanan et al. 2021: forwards to fill the pipeline, then one forward and one backward in turn."""
    total = microbatches * virtual

    def which(k: int, backward: bool) -> tuple[str, int, int]:
        if virtual == 1:
            return ("backward" if backward else "forward"), k, 0
        part = k // stages % virtual
        micro = k // (stages * virtual) * stages + k % stages
        return ("backward", micro, virtual - 1 - part) if backward else ("forward", micro, part)

    fill = stages - stage - 1 if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages
    fill = min(fill, total)
    for k in range(fill):
        yield which(k, False)
    for k in range(total - fill):
        yield which(fill + k, False)
        yield which(k, True)
    for k in range(total - fill, total):
        yield which(k, True)


def pipeline(job: Job, layout: Layout, cost: Cost) -> Timeline:
    """Returns the timeline of all stages of a pipeline, for a predicted cost.

    Raises RidgelineError if it has too many events."""
    p, v, m = layout.pp, layout.virtual, cost.microbatches
    if 2 * p * v * m > MOST:
        raise RidgelineError(
            f"parallel simulate: {m} micro-batches on {p} stages of {v} parts are {2 * p * v * m:,} events, and "
            f"at most {MOST:,} are simulated; the nearest that does is a step of {MOST // (2 * p * v)} micro-batches"
        )
    talk = sum(cost.exposed[name] for name in ("tensor", "expert", "context", "host")) / m
    whole = cost.forward + cost.backward
    lengths = {
        "forward": (cost.forward + talk * cost.forward / whole) / v,
        "backward": (cost.backward + talk * cost.backward / whole) / v,
    }
    queues = [list(order(s, p, v, m)) for s in range(p)]
    place, clock = [0] * p, [0.0] * p
    done: dict[tuple[str, int, int], float] = {}
    spans: list[Span] = []
    left = sum(map(len, queues))
    while left:
        moved = False
        for s in range(p):
            while place[s] < len(queues[s]):
                what, micro, part = queues[s][place[s]]
                at = part * p + s  # place among all parts of the model
                before = at - 1 if what == "forward" else at + 1
                ready = 0.0
                if 0 <= before < p * v:
                    if (what, micro, before) not in done:
                        break
                    ready = done[what, micro, before] + cost.transfer
                elif what == "backward":
                    if ("forward", micro, at) not in done:
                        break
                    ready = done["forward", micro, at]
                start = max(clock[s], ready)
                clock[s] = done[what, micro, at] = start + lengths[what]
                label = f"{micro + 1}" if v == 1 else f"{micro + 1}.{part + 1}"
                spans.append(Span(f"stage {s + 1}", start, clock[s], what, label))
                place[s] += 1
                left -= 1
                moved = True
        if not moved:
            raise RidgelineError("parallel simulate: the schedule deadlocks: each stage waits for another")
    end = max(clock)
    once = cost.exposed["data"] + cost.work["slowed"]
    for s in range(p):
        spans += tail(f"stage {s + 1}", end, once, cost)
    return Timeline(spans, end + once + cost.work["optimizer"] + cost.exposed["jitter"])


def tail(lane: str, end: float, once: float, cost: Cost) -> list[Span]:
    """Returns what follows the last micro-batch: exposed communication, the optimizer, and waiting for stragglers."""
    spans = []
    for kind, length, label in (
        ("exposed", once, "gradients and weights"),
        ("optimizer", cost.work["optimizer"], "optimizer"),
        ("stragglers", cost.exposed["jitter"], "stragglers"),
    ):
        if length > 0:
            spans.append(Span(lane, end, end + length, kind, label))
            end += length
    return spans


def rank(job: Job, layout: Layout, cost: Cost) -> Timeline:
    """Returns the timeline of one rank's two streams, compute and communication, of a layout without a pipeline.

    Gathers run one layer ahead of compute. Communication under compute slows it, as in the cost model."""
    one: Parts = parts(job, layout)
    m = cost.microbatches
    if m * one.layers * 6 > MOST:
        raise RidgelineError(
            f"parallel simulate: {m} micro-batches of {one.layers} layers are too many events; "
            f"the nearest that does is a step of {MOST // (6 * one.layers)} micro-batches"
        )
    spans: list[Span] = []
    compute = network = 0.0

    def run(kind: str, length: float, ready: float, label: str, hidden: float = 0.0) -> float:
        nonlocal compute
        start = max(compute, ready)
        if start > compute + 1e-9 and spans:
            spans.append(Span("compute", compute, start, "exposed", "waits"))
        compute = start + length + SLOWS * min(hidden, length)
        spans.append(Span("compute", start, compute, kind, label))
        return compute

    def move(length: float, ready: float, label: str, under: bool = True) -> float:
        nonlocal network
        start = max(network, ready)
        network = start + (length / HIDES if under else length)
        if length:
            spans.append(Span("communication", start, network, "communication", label))
        return network

    started = 0.0
    for _ in range(m):
        arrived = move(one.gather, started, "gather 1", under=False) if one.gather else started
        for layer in range(one.layers):
            following = 0.0
            if one.gather and layer + 1 < one.layers:
                following = move(one.gather, compute, f"gather {layer + 2}")
            run("forward", one.forward, arrived, f"layer {layer + 1}", one.gather)
            if one.talk_forward:
                run("exposed", one.talk_forward, compute, "collectives")
            arrived = following
        run("forward", one.head_forward, compute, "head")
        run("backward", one.head_backward, compute, "head")
        arrived = compute
        scattered = compute
        for layer in reversed(range(one.layers)):
            following = 0.0
            if one.gather and layer:
                following = move(one.gather, compute, f"gather {layer}")
            run("backward", one.backward, arrived, f"layer {layer + 1}", one.gather + one.scatter)
            if one.talk_backward:
                run("exposed", one.talk_backward, compute, "collectives")
            if one.scatter:
                scattered = move(one.scatter, compute, f"scatter {layer + 1}", under=bool(layer))
            arrived = following
        if cost.exposed["host"]:
            run("exposed", cost.exposed["host"] / m, compute, "the host")
        started = max(compute, scattered) if one.scatter else compute
        compute = started
    end, kinds = compute, one.once
    slowed = SLOWS * min(kinds, m * (one.forward + one.backward) * one.layers) if one.overlaps else 0.0
    hidden = max(0.0, kinds - one.exposed_once)
    if hidden:
        begin = max(0.0, end - hidden)
        spans.append(Span("communication", begin, end, "communication", "gradients and weights"))
    spans += tail("compute", end, one.exposed_once + slowed, cost)
    return Timeline(spans, end + one.exposed_once + slowed + cost.work["optimizer"] + cost.exposed["jitter"])


def simulate(job: Job, layout: Layout, whole: bool = False) -> tuple[Timeline, Cost]:
    """Returns a step's timeline, and the closed form's cost of it. whole: all stages rather than one rank.

    With a pipeline, all stages are simulated in any case, since each waits for others."""
    cost = predict(job, layout)
    if layout.pp == 1:
        return rank(job, layout, cost), cost
    found = pipeline(job, layout, cost)
    if whole:
        return found, cost
    first = [span for span in found.spans if span.lane == "stage 1"]
    return Timeline(first, found.seconds), cost
