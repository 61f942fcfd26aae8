"""Scaling curves from 8 to 100,000 GPUs, strong and weak, dense and with experts, with the reason at each bend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ridgeline.parallel import links, pictures, published, search
from ridgeline.parallel.cost import Job, Layout, fits, mfu, predict
from ridgeline.parallel.pictures import Bend, Curve
from ridgeline.parallel.search import Found, Wanted
from ridgeline.parallel.shapes import shape
from ridgeline.parallel.wording import percent

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


def lost(job: Job, found: Found) -> dict[str, float]:
    """Returns the shares of a step that are neither products nor attention."""
    c = found.cost
    parts = {**c.exposed, **{n: c.work[n] for n in ("bubble", "slowed", "again", "optimizer", "rest")}}
    shares = {name: value / c.seconds for name, value in parts.items()}
    work = (c.work["products"] + c.work["attention"] + c.work["head"]) / c.seconds
    best = job.cluster.lasting / job.cluster.peak * job.stack.compute  # the share of the datasheet's rate that lasts
    return shares | {"small": max(0.0, work - mfu(job, found.layout, c.seconds) / best)}


def sizes(layout: Layout) -> str:
    """Returns a layout's sizes in words."""
    names = ("dp", "tp", "pp", "cp", "ep")
    return " ".join(f"{n} {getattr(layout, n)}" for n in names if getattr(layout, n) > 1) + f", {layout.mode}"


def why(cause: str, job: Job, found: Found) -> str:
    """Returns why a cause weighs on a layout."""
    x, c = found.layout, job.cluster
    data = links.group(c, x.dp * x.cp, x.tp)
    weights = 2 * job.shape.dense_weights / x.tp
    slow = links.hops(c, data) > weights / links.rate(c, data, job.stack.link)
    reasons = {
        "data": f"a ring over {data.members:,} GPUs takes longer for its hops than for a layer's bytes"
        if slow and x.mode == "fsdp"
        else f"{job.tokens // x.world:,} tokens a GPU are too few to hide weights and gradients under",
        "tensor": f"nothing hides the collectives of {x.tp} GPUs",
        "bubble": f"{found.cost.microbatches} micro-batch{'es are' if found.cost.microbatches > 1 else ' is'} little "
        f"for a pipeline of {x.pp} stages",
        "pipeline": f"nothing hides the first transfers through {x.pp} stages",
        "expert": f"tokens travel to experts on {x.ep} GPUs"
        + (", over the network" if x.ep * x.tp > c.node else ", over NVLink"),
        "context": f"a ring of {x.cp} has little attention to hide keys and values under",
        "jitter": f"a step waits for the slowest of {max(1, x.world // c.node):,} nodes",
        "slowed": "communication holds multiprocessors during more of the step",
        "again": "memory is short, so backward recomputes results",
        "optimizer": "each GPU updates many weights for few tokens",
        "host": "the host starts kernels slower than the GPU runs them",
        "rest": "norms, rotations and launches of small kernels weigh more",
        "small": "products are too small to fill the GPU",
    }
    return reasons[cause]


NOUNS = {
    "data": "exposed gathers and scatters", "tensor": "tensor parallelism's collectives", "bubble": "the bubble",
    "pipeline": "transfers between stages", "expert": "all-to-alls", "context": "the exposed ring",
    "jitter": "stragglers",
    "slowed": "slowed compute", "again": "recomputation", "optimizer": "the optimizer", "rest": "bytes and launches",
    "small": "small products", "host": "waiting for the host",
}  # fmt: skip


def kept(before: Point, here: Point) -> Found | str:
    """Returns the layout of the point before with more data parallelism, on this point's GPUs, or why it cannot be."""
    old = before.found.layout
    wider = replace(old, dp=here.gpus // (old.tp * old.pp * old.cp))
    if wider.world != here.gpus:
        return f"{here.gpus:,} GPUs are no multiple of the layout before"
    if reason := fits(here.job, wider):
        few = here.job.sequences < wider.dp * wider.micro
        return f"{here.job.sequences:,} sequences are too few for dp {wider.dp:,}" if few else reason
    return Found(wider, predict(here.job, wider))


def reason(before: Point, here: Point) -> str:
    """Returns why a curve turns at a point: what changes there, and what the layout before would have cost."""
    now, then = lost(here.job, here.found), lost(before.job, before.found)
    up = here.share > before.share
    cause = (min if up else max)(now, key=lambda name: now[name] - then[name])
    change = f"{NOUNS[cause]}, {percent(then[cause])} of the step before, {percent(now[cause])} here"
    same = kept(before, here)
    said = f"{here.gpus:,} GPUs ({sizes(here.found.layout)}): {change}"
    if up:
        return f"{said}; there is memory for it." if cause == "again" else f"{said}."
    if isinstance(same, str):
        return f"{said}: {same}, and {why(cause, here.job, here.found)}."
    if sizes(same.layout) == sizes(here.found.layout):
        return f"{said}: {why(cause, here.job, here.found)}."
    other = lost(here.job, same)
    worst = max(other, key=lambda name: other[name] - then[name])
    return (
        f"{said}. With {sizes(same.layout)}, {NOUNS[worst]} would be {percent(other[worst])}: "
        f"{why(worst, here.job, same)}."
    )


def bends(found: Sequence[Point]) -> list[Bend]:
    """Returns the points where a curve turns most, with the reason for each."""
    falls = {here.gpus: math.log(before.share / here.share) for before, here in pairwise(found)}
    turns = []
    for n in range(1, len(found)):
        before = falls.get(found[n - 1].gpus, 0.0)
        turns.append((abs(falls[found[n].gpus] - before) + 0.5 * abs(falls[found[n].gpus]), n))
    turns = [(turn, n) for turn, n in turns if abs(falls[found[n].gpus]) >= 0.025]
    chosen = sorted(n for turn, n in sorted(turns, reverse=True)[:BENDS] if turn >= 0.03)
    return [Bend(found[n].gpus, found[n].share, reason(found[n - 1], found[n])) for n in chosen]


def start(found: Sequence[Point]) -> Bend | None:
    """Returns a mark where the curve begins, if fewer GPUs have too little memory."""
    first = found[0]
    if first.gpus == GPUS[0]:
        return None
    reason = f"{first.gpus:,} GPUs: fewer have no room for {first.job.shape.name}'s weights and moments."
    return Bend(first.gpus, first.share, reason)


def curve(job: Job, weak: bool) -> Curve:
    """Returns a model's curve."""
    found = points(job, weak)
    marks = [mark for mark in (start(found), *bends(found)) if mark]
    s = job.shape
    band = published.band(job.stack.name, bool(s.experts))
    kind = f"{s.experts} experts, {s.active} a token" if s.experts else "dense"
    return Curve(f"{s.name}, {kind}", [(p.gpus, p.share) for p in found], band, marks)


def picture(job: Job, weak: bool) -> str:
    """Returns the picture of strong or weak scaling: the job's model, and one of the other kind."""
    other = replace(job, shape=shape(OTHER[bool(job.shape.experts)]))
    curves = [curve(one, weak) for one in (job, other)]
    what = (
        f"A step of {PER_GPU:,} tokens a GPU, in sequences of {job.seq:,}"
        if weak
        else f"A step of {job.tokens / 2**20:g} Mi tokens for all GPUs, in sequences of {job.seq:,}"
    )
    title = f"{'Weak' if weak else 'Strong'} scaling on {job.cluster.title}"
    return pictures.scaling(title, f"{what}. MFU of the quickest layout that fits, predicted.", curves, 0.7)


def write(job: Job, folder: Path) -> list[Path]:
    """Writes strong.svg and weak.svg into a folder, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, weak in (("strong", False), ("weak", True)):
        path = folder / f"{name}.svg"
        path.write_text(picture(job, weak))
        paths.append(path)
    return paths
