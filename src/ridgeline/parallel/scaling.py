"""Scaling curves from 8 to 100,000 GPUs, strong and weak, dense and with experts, with the reason at each bend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.parallel import pictures, search
from ridgeline.parallel.cost import Job, Layout, mfu
from ridgeline.parallel.pictures import Bend, Curve
from ridgeline.parallel.search import Found, Wanted
from ridgeline.parallel.shapes import shape
from ridgeline.parallel.wording import figure, percent

GPUS = tuple(8 << k for k in range(14)) + (98_304,)  # 8 to 65,536, and three quarters of the next
OTHER = {True: "llama3-70b", False: "qwen3-235b-a22b"}  # beside a model with experts, and beside one without
PER_GPU = 16_384  # tokens of a GPU in weak scaling
BENDS = 5


@dataclass(frozen=True)
class Point:
    """The quickest layout of some GPUs: its share of the datasheet's rate, and its job."""

    gpus: int
    share: float
    job: Job
    found: Found


def jobs(job: Job, weak: bool) -> list[tuple[int, Job]]:
    """Returns the jobs of a curve: the same step on more GPUs (strong), or a step that grows with them (weak)."""
    if not weak:
        return [(n, job) for n in GPUS]
    return [(n, replace(job, sequences=max(1, PER_GPU * n // job.seq))) for n in GPUS]


def points(job: Job, weak: bool) -> list[Point]:
    """Returns the quickest layout for each number of GPUs that has one."""
    found = []
    for gpus, one in jobs(job, weak):
        result = search.search(one, Wanted(gpus, agains=("keep", "cheap", "full")))
        if result.best:
            best = result.best[0]
            found.append(Point(gpus, mfu(one, best.layout, best.cost.seconds), one, best))
    return found


def lost(point: Point) -> dict[str, float]:
    """Returns the shares of a step that are neither products nor attention."""
    c = point.found.cost
    parts = {**c.exposed, **{n: c.work[n] for n in ("bubble", "slowed", "again", "optimizer", "rest")}}
    work = (c.work["products"] + c.work["attention"] + c.work["head"]) / c.seconds
    found = {name: value / c.seconds for name, value in parts.items()}
    ideal = point.share  # what small products lose shows as a lower rate of the work itself
    return found | {"small": max(0.0, work - ideal / (c.seconds and 1) / max(rate(point), 1e-9))}


def rate(point: Point) -> float:
    """Returns the share of the datasheet's rate that lasts on this cluster with this software."""
    c = point.job.cluster
    return c.lasting / c.peak * point.job.stack.compute


def sizes(layout: Layout) -> str:
    """Returns a layout's sizes in words."""
    names = ("dp", "tp", "pp", "cp", "ep")
    return " ".join(f"{n} {getattr(layout, n)}" for n in names if getattr(layout, n) > 1) + f", {layout.mode}"


def why(cause: str, point: Point) -> str:
    """Returns why a cause grows at a point."""
    x, job = point.found.layout, point.job
    m = point.found.cost.microbatches
    tokens = job.tokens // point.gpus
    reasons = {
        "data": f"{figure(tokens)} tokens a GPU are too few to hide the weights' gathers and the gradients' scatters",
        "tensor": f"too few sequences are left for data parallelism, so tensor parallelism of {x.tp} splits each",
        "bubble": f"{m} micro-batches are few for a pipeline of {x.pp} stages",
        "pipeline": f"transfers between {x.pp} stages of few tokens are exposed",
        "expert": f"tokens travel to experts on {x.ep} GPUs, over the network",
        "context": f"a ring of {x.cp} has little attention to hide keys and values under",
        "jitter": f"stragglers of {max(1, point.gpus // job.cluster.node):,} nodes",
        "slowed": "communication holds multiprocessors during more of the step",
        "again": "memory is short, so backward makes results again",
        "optimizer": "each step updates weights for few tokens",
        "rest": "norms, rotations and launches of many small kernels weigh more",
        "small": "products are too small to fill the GPU's multiprocessors",
    }
    return reasons[cause]


NOUNS = {
    "data": "exposed gathers and scatters", "tensor": "tensor parallelism's collectives", "bubble": "the bubble",
    "pipeline": "transfers between stages", "expert": "all-to-alls", "context": "the exposed ring", "jitter": "stragglers",
    "slowed": "slowed compute", "again": "recomputation", "optimizer": "the optimizer", "rest": "bytes and launches",
    "small": "small products",
}  # fmt: skip


def bends(found: Sequence[Point]) -> list[Bend]:
    """Returns the points where a curve turns most, with the cause that changes most there."""
    scored = []
    for before, here in zip(found, found[1:]):
        fall = math.log(before.share / here.share)
        scored.append((abs(fall), here, before))
    chosen = sorted(sorted(scored, key=lambda s: -s[0])[:BENDS], key=lambda s: s[1].gpus)
    marks = []
    for size, here, before in chosen:
        if size < 0.02:
            continue
        now, then = lost(here), lost(before)
        up = here.share > before.share
        cause = (min if up else max)(now, key=lambda name: now[name] - then[name])
        change = f"{NOUNS[cause]} {'fall' if up else 'grow'} from {percent(then[cause])} to {percent(now[cause])} of the step"
        reason = f"{here.gpus:,} GPUs ({sizes(here.found.layout)}): {change}"
        reason += "." if up else f": {why(cause, here)}."
        marks.append(Bend(here.gpus, here.share, reason))
    return marks


def start(found: Sequence[Point]) -> Bend | None:
    """Returns a mark where the curve begins, if fewer GPUs have too little memory."""
    first = found[0]
    if first.gpus == GPUS[0]:
        return None
    reason = f"{first.gpus:,} GPUs: fewer have no room for {first.job.shape.name}'s weights and moments."
    return Bend(first.gpus, first.share, reason)


def curve(job: Job, weak: bool, spread: float) -> Curve:
    """Returns a model's curve."""
    found = points(job, weak)
    marks = [mark for mark in (start(found), *bends(found)) if mark]
    s = job.shape
    kind = f"{s.experts} experts, {s.active} a token" if s.experts else "dense"
    return Curve(f"{s.name}, {kind}", [(p.gpus, p.share) for p in found], spread, marks)


def picture(job: Job, weak: bool, spread: float) -> str:
    """Returns the picture of strong or weak scaling: the job's model, and one of the other kind."""
    other = replace(job, shape=shape(OTHER[bool(job.shape.experts)]))
    curves = [curve(one, weak, spread) for one in (job, other)]
    what = (
        f"A step grows with the GPUs: {PER_GPU:,} tokens each, in sequences of {job.seq:,}"
        if weak
        else f"One step of {job.tokens / 2**20:g} Mi tokens in sequences of {job.seq:,}, on more and more GPUs"
    )
    title = f"{'Weak' if weak else 'Strong'} scaling on {job.cluster.title}: model FLOP/s, share of the datasheet"
    under = f"{what}; the quickest layout that fits at each number of GPUs. Predicted."
    return pictures.scaling(title, under, curves, 0.7)


def write(job: Job, folder: Path, spread: float) -> list[Path]:
    """Writes strong.svg and weak.svg into a folder, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, weak in (("strong", False), ("weak", True)):
        path = folder / f"{name}.svg"
        path.write_text(picture(job, weak, spread))
        paths.append(path)
    return paths
