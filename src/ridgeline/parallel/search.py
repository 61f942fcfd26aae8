"""The search over layouts: all that divide a job, their costs, and the best that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.op import RidgelineError
from ridgeline.parallel import footprint
from ridgeline.parallel.compute import AGAIN
from ridgeline.parallel.cost import Cost, Job, Layout, fits, predict
from ridgeline.parallel.wording import gpus_of

MICROS = (1, 2, 4, 8)
VIRTUALS = (1, 2, 4)
OURS = tuple(again for again in AGAIN if again != "half")  # what our own model can make again


@dataclass(frozen=True)
class Wanted:
    """What a search may choose from; None leaves a size free. precisions: of products. memory: bytes of a GPU."""

    gpus: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    precisions: tuple[str, ...] = ("bf16",)
    agains: tuple[str, ...] = OURS
    memory: float | None = None


def divisors(n: int, most: int) -> list[int]:
    """Returns the divisors of n up to a bound."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def meshes(job: Job, wanted: Wanted) -> Iterator[Layout]:
    """Yields the sizes of every mesh of the job's GPUs that divides the job, without their modes."""
    s, node = job.shape, job.cluster.node
    tps = [wanted.tp] if wanted.tp else divisors(wanted.gpus, min(node, s.heads, 16))
    for tp in tps:
        pps = [wanted.pp] if wanted.pp else divisors(max(1, wanted.gpus // tp), min(s.layers, 64))
        for pp in pps:
            left = wanted.gpus // (tp * pp)
            most = 16 if job.seq >= 32768 else 2 if job.seq >= 8192 else 1
            cps = [wanted.cp] if wanted.cp else [c for c in divisors(left, most) if c & (c - 1) == 0]
            for cp in cps:
                dp = left // cp
                if dp * cp * tp * pp != wanted.gpus or (wanted.dp and dp != wanted.dp):
                    continue
                eps = divisors(s.experts, dp * cp) if s.experts else [1]
                for ep in [wanted.ep] if wanted.ep else eps:
                    yield Layout(dp, tp, pp, cp, ep)


def layouts(job: Job, wanted: Wanted) -> Iterator[Layout]:
    """Yields every layout that divides the job."""
    node = job.cluster.node
    for mesh in meshes(job, wanted):
        data = mesh.dp * mesh.cp
        near = divisors(data, node // mesh.tp or 1)[-1]  # GPUs that share a copy in hsdp: a node's, or fewer
        modes = ["zero1"] if data > 1 else ["ddp"]
        if mesh.pp == 1 and data > 1:
            modes = ["fsdp", "zero1", "ddp", *(["hsdp"] if data > near > 1 else [])]
        for micro in MICROS:
            one = replace(mesh, micro=micro)
            if fits(job, one):
                continue
            for virtual in VIRTUALS if mesh.pp > 1 else (1,):
                two = replace(one, virtual=virtual)
                if virtual > 1 and fits(job, two):
                    continue
                for mode in modes:
                    for again in wanted.agains:
                        for precision in wanted.precisions:
                            shard = near if mode == "hsdp" else 0
                            yield replace(two, mode=mode, again=again, precision=precision, shard=shard)


@dataclass(frozen=True)
class Found:
    """A layout and its cost."""

    layout: Layout
    cost: Cost


@dataclass(frozen=True)
class Result:
    """What a search saw. best: the layouts that fit, the quickest first. seen: how many divide the job. least: the
    fewest bytes that any needs. roomier: the quickest of those that need up to twice the memory."""

    best: Sequence[Found]
    seen: int
    least: tuple[float, Layout] | None
    roomier: Found | None


def bytes_of(job: Job, layout: Layout) -> float:
    """Returns the bytes that a layout needs on a GPU."""
    m = job.sequences // layout.dp // layout.micro
    return sum(footprint.memory(job.shape, layout, job.seq, m, job.stack.state, fused=job.stack.fused).values())


def search(job: Job, wanted: Wanted) -> Result:
    """Returns the layouts of a job's GPUs that fit, the quickest first."""
    limit = wanted.memory or job.cluster.memory
    found: list[Found] = []
    roomier: Found | None = None
    least: tuple[float, Layout] | None = None
    seen = 0
    for layout in layouts(job, wanted):
        seen += 1
        need = bytes_of(job, layout)
        if least is None or need < least[0]:
            least = need, layout
        if need > 2 * limit:
            continue
        one = Found(layout, predict(job, layout))
        if need <= limit:
            found.append(one)
        elif roomier is None or one.cost.seconds < roomier.cost.seconds:
            roomier = one
    found.sort(key=lambda f: f.cost.seconds)
    return Result(found, seen, least, roomier)


def distinct(found: Sequence[Found], count: int) -> list[Found]:
    """Returns the quickest of each mesh and mode."""
    kept: dict[tuple[object, ...], Found] = {}
    for one in found:
        x = one.layout
        kept.setdefault((x.dp, x.tp, x.pp, x.cp, x.ep, x.mode), one)
    return list(kept.values())[:count]


def nearest(job: Job, wanted: Wanted) -> str:
    """Returns a sentence that says why no layout serves, and the nearest that does."""
    for name, total, what in (
        ("tp", job.shape.heads, "heads"),
        ("cp", job.seq // 2, "half sequences' tokens"),
        ("pp", job.shape.layers, "layers"),
        ("ep", job.shape.experts, "experts"),
    ):
        given = getattr(wanted, name)
        if not given or given == 1:
            continue
        if not total:
            return f"{name} {given} needs experts, and {job.shape.name} has none; leave --{name} out"
        fine = [d for d in range(1, total + 1) if (d <= total if name == "pp" else total % d == 0)]
        if given not in fine:
            near = min(fine, key=lambda d: abs(d - given), default=1)
            return f"{name} {given} does not go into {total} {what}; the nearest that does is {near}"
    for size in ("tp", "pp", "cp", "dp"):
        given = getattr(wanted, size)
        if given and wanted.gpus % given:
            near = min(divisors(wanted.gpus, wanted.gpus), key=lambda d: abs(d - given))
            return f"{size} {given} does not divide {wanted.gpus} GPUs; the nearest that does is {near}"
    for change in range(1, 4096):
        for gpus in (wanted.gpus - change, wanted.gpus + change):
            if gpus > 0 and next(layouts(job, replace(wanted, gpus=gpus)), None):
                return (
                    f"no layout of {gpus_of(wanted.gpus)} divides a step of {job.sequences} sequences; "
                    f"the nearest number that does is {gpus_of(gpus)}"
                )
    return f"no layout of {gpus_of(wanted.gpus)} or of a number near it divides a step of {job.sequences} sequences"


def checked(job: Job, wanted: Wanted) -> Result:
    """Returns a search's result. Raises RidgelineError if no layout divides the job or fits, with the nearest."""
    if job.cluster.most and wanted.gpus > job.cluster.most:
        raise RidgelineError(
            f"parallel: the cluster {job.cluster.name} has {gpus_of(job.cluster.most)}, and {wanted.gpus} are asked "
            f"for; the nearest is {job.cluster.most}"
        )
    result = search(job, wanted)
    if not result.seen:
        raise RidgelineError(f"parallel: {nearest(job, wanted)}")
    if not result.best:
        assert result.least is not None
        need, layout = result.least
        limit = wanted.memory or job.cluster.memory
        more = fitting(job, wanted)
        enough = f", and {more} GPUs are enough" if more else ""
        raise RidgelineError(
            f"parallel: no layout of {gpus_of(wanted.gpus)} fits into {limit / 1e9:.0f} GB a GPU; the nearest, "
            f"{layout.text}, needs {need / 1e9:.0f} GB{enough}"
        )
    return result


def fitting(job: Job, wanted: Wanted) -> int | None:
    """Returns the first doubling of the GPUs with a layout that fits, or None up to 131,072."""
    limit, gpus = wanted.memory or job.cluster.memory, wanted.gpus
    free = replace(wanted, dp=None, tp=None, pp=None, cp=None, ep=None)
    while (gpus := 2 * gpus) <= (job.cluster.most or 131_072):
        wider = replace(job, sequences=max(job.sequences, gpus))
        if any(bytes_of(wider, layout) <= limit for layout in layouts(wider, replace(free, gpus=gpus))):
            return gpus
    return None
