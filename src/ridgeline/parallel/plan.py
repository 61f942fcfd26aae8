"""`ridgeline parallel plan`: how many GPUs, in which layout, how fast."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ridgeline.op import RidgelineError
from ridgeline.parallel import footprint, limits, metered, published, scaling, search
from ridgeline.parallel.cluster import cluster, facts, names
from ridgeline.parallel.cost import Cost, Job, flops_rate, mfu, predict, stack
from ridgeline.parallel.search import Found, Result, Wanted
from ridgeline.parallel.shapes import shape
from ridgeline.parallel.wording import count, figure, giga, gpus_of, percent, positive, seconds, table

Band = tuple[float, float]  # how far below and above a prediction a speed may be, as shares

CAUSES = {
    "tensor": "tensor parallelism's collectives",
    "data": "gathers and scatters of weights and gradients",
    "expert": "the experts' all-to-alls",
    "context": "the ring of keys and values",
    "pipeline": "transfers between stages",
    "jitter": "stragglers and contention",
    "bubble": "the pipeline's bubble",
    "slowed": "multiprocessors that communication holds",
    "again": "recomputation",
    "optimizer": "the optimizer",
    "host": "the host, which starts kernels slower than the GPU runs them",
}


def flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a job and a layout."""
    add = parser.add_argument
    add("--model", default="llama3-8b", metavar="NAME", help="a name, or a Hugging Face config.json (llama3-8b)")
    add("--gpus", type=count, default=64, metavar="N", help="GPUs (64)")
    add("--cluster", default="dgx-h100", metavar="NAME", help=f"{', '.join(names())}, or a JSON file (dgx-h100)")
    add("--tokens", type=count, default=4 << 20, metavar="N", help="tokens of a step, 4M for 4 x 2^20 (4M)")
    add("--seq", type=count, default=8192, metavar="N", help="tokens of a sequence (8192)")
    add("--memory", type=positive, metavar="GB", help="of a GPU, in 10^9 bytes (the cluster's)")
    add("--stack", default="ridgeline", metavar="NAME", help="whose software and constants (ridgeline)")
    add("--state", choices=("mixed", "bf16"), help="weights and moments: float32 masters, or all bfloat16 (mixed)")
    for name in ("dp", "tp", "pp", "cp", "ep"):
        add(f"--{name}", type=count, metavar="N", help="this size alone")
    add("--fp8", action="store_true", help="8-bit products too")
    add("--json", action="store_true", help="print JSON")


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser)
    add = parser.add_argument
    add("--top", type=count, default=8, metavar="N", help="meshes to show, each in its quickest form (8)")
    add("--sources", action="store_true", help="print each fact of the cluster, with its source")
    add("--meta", action="store_true", help="run a layer on meta tensors, and compare what it saves with the formula")
    add("--curves", type=Path, metavar="FOLDER", help="write the scaling curves of this model there, as SVG")


def job_of(options: argparse.Namespace) -> Job:
    """Returns the job of the flags. Raises RidgelineError if a name is unknown or the tokens do not divide."""
    model, where, software = shape(options.model), cluster(options.cluster), stack(options.stack)
    if options.state:
        software = replace(software, state=options.state)
    if options.tokens % options.seq:
        near = max(1, round(options.tokens / options.seq)) * options.seq
        raise RidgelineError(
            f"parallel: {options.tokens} tokens are not whole sequences of {options.seq}; the nearest are {near} tokens"
        )
    return Job(model, where, software, options.seq, options.tokens // options.seq)


def wanted_of(options: argparse.Namespace) -> Wanted:
    """Returns what the flags leave to the search."""
    sizes = {name: getattr(options, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    precisions = ("bf16", "fp8") if options.fp8 else ("bf16",)
    if options.fp8 and not cluster(options.cluster).peak_fp8:
        raise RidgelineError(f"parallel: the GPUs of {options.cluster} have no 8-bit products; leave --fp8 out")
    return Wanted(options.gpus, **sizes, precisions=precisions, memory=options.memory and options.memory * 1e9)


def shares(cost: Cost) -> dict[str, float]:
    """Returns what keeps a step from being products and attention alone, as shares of its time, the largest first."""
    lost = {**cost.exposed, **{name: cost.work[name] for name in ("bubble", "slowed", "again", "optimizer")}}
    found = {name: value / cost.seconds for name, value in lost.items() if value / cost.seconds >= 0.001}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def binds(cost: Cost) -> str:
    """Returns in words what takes most of a step beside products and attention."""
    lost = shares(cost)
    compute = (cost.work["products"] + cost.work["attention"] + cost.work["head"]) / cost.seconds
    first = next(iter(lost.items()), None)
    if first is None or compute > 0.85:
        return f"compute: products and attention are {percent(compute)} of the step"
    return f"{CAUSES[first[0]]}: {percent(first[1])} of the step; products and attention are {percent(compute)}"


def trials(job: Job, found: Found, result: Result) -> dict[str, float]:
    """Returns the share of a step that would be saved, by the model with one thing changed, the most first."""
    now, c, x = found.cost.seconds, job.cluster, found.layout
    changed = {
        "compute": replace(c, lasting=2 * c.lasting, roof=2 * c.roof),
        "bandwidth": replace(c, bandwidth=2 * c.bandwidth),
    }
    if x.world > c.node:
        changed["network"] = replace(c, nic=2 * c.nic)
    if x.world > 1:
        changed["NVLink"] = replace(c, collective=2 * c.collective, nvlink=2 * c.nvlink)
    seconds_ = {name: predict(replace(job, cluster=other), x).seconds for name, other in changed.items()}
    if not job.stack.asynchronous and x.tp > 1:
        seconds_["overlap"] = predict(replace(job, stack=replace(job.stack, asynchronous=True)), x).seconds
    if job.stack.host_tensor:
        free = replace(job.stack, host_tensor=0.0, host_step=0.0)
        seconds_["host"] = predict(replace(job, stack=free), x).seconds
    if x.world > 1:
        seconds_["batch"] = predict(replace(job, sequences=2 * job.sequences), x).seconds / 2
    if result.roomier:
        seconds_["memory"] = result.roomier.cost.seconds
    return dict(sorted(((n, 1 - s / now) for n, s in seconds_.items() if 1 - s / now >= 0.001), key=lambda t: -t[1]))


TRIALS = {
    "compute": "products and attention at twice the rate",
    "bandwidth": "twice the memory's bandwidth",
    "network": "twice the network",
    "NVLink": "twice NVLink",
    "overlap": "tensor parallelism's collectives under products",
    "host": "no waiting for the host, as in a CUDA graph",
    "batch": "a step of twice the tokens, for each token",
    "memory": "twice the memory, by another layout",
}


def helps(job: Job, found: Found, result: Result) -> list[str]:
    """Returns what would shorten the step, by how much, the most first."""
    return [f"{TRIALS[name]}: {percent(gain)} less time" for name, gain in trials(job, found, result).items()]


def closed_forms(job: Job) -> list[str]:
    """Returns the assignment's closed-form limits for this job's MLP on this cluster, as lines."""
    c, s = job.cluster, job.shape
    hidden = s.hidden * (s.active or 1) * (1 if s.gated else 2 / 3)
    lines = []
    for name, egress in (("NVLink", c.nvlink), ("the network", c.nic)):
        if not egress or c.node == 1:
            continue
        m = limits.Mlp(job.tokens, s.width, int(hidden), c.peak, egress)
        lines.append(
            f"at {figure(egress / 1e9)} GB/s, {name}: data or FSDP up to {figure(m.most_data)} GPUs; tensor up to "
            f"{figure(m.most_tensor())} (backward {figure(m.most_tensor(backward=True))}); both up to "
            f"{figure(m.most_both())} together, {figure(m.most_both(together=False))} one after the other"
        )
    return lines


def row(job: Job, found: Found, band: Band, helped: list[str]) -> dict[str, Any]:
    """Returns a layout as plain values. helped: what would shorten its step."""
    cost, layout = found.cost, found.layout
    return {
        "layout": asdict(layout), "text": layout.text, "seconds": cost.seconds, "band": band,
        "tokens_per_second_per_gpu": job.tokens / cost.seconds / layout.world,
        "flops_per_second": flops_rate(job, layout, cost.seconds), "mfu": mfu(job, layout, cost.seconds),
        "work": cost.work, "exposed": cost.exposed, "memory": cost.memory, "peak_bytes": cost.peak,
        "binds": binds(cost), "helps": helped,
    }  # fmt: skip


def margin(band: Band) -> str:
    """Returns the error of a time, of which `band` is that of the speed."""
    low, high = band
    return f"±{percent(low)}" if low == high else f"-{percent(1 - 1 / (1 + high))} +{percent(1 / (1 - low) - 1)}"


def cells(job: Job, found: Found, band: Band, result: Result) -> list[str]:
    """Returns a layout as a line of the table."""
    cost, x = found.cost, found.layout
    lost = shares(cost)
    moved = cost.exposed.keys() - {"jitter", "host"}  # communication
    exposed = ", ".join(f"{n} {percent(v)}" for n, v in lost.items() if n in moved) or "none"
    work = (cost.work["products"] + cost.work["attention"] + cost.work["head"]) / cost.seconds
    first = next(iter(lost), "compute")
    gains = trials(job, found, result)
    helping = next(((n, g) for n, g in gains.items() if n not in ("compute", "memory") and g >= 0.005), None)
    return [
        x.text,
        f"{seconds(cost.seconds)} {margin(band)}",
        figure(job.tokens / cost.seconds / x.world),
        percent(mfu(job, x, cost.seconds)),
        exposed,
        percent(lost.get("bubble", 0.0)),
        giga(cost.peak),
        "compute" if work > 0.85 else first,
        f"{helping[0]} -{percent(helping[1])}" if helping else "compute alone" if gains.get("compute") else "nothing",
    ]


def say(job: Job, wanted: Wanted, result: Result, top: int, band: Band) -> None:
    """Prints a plan."""
    s, c = job.shape, job.cluster
    active = f", {figure(s.active_weights / 1e9)} B of them for each token" if s.experts else ""
    print(
        f"{s.name}: {figure(s.parameters / 1e9)} B parameters{active}; a step of {job.sequences:,} x {job.seq:,} tokens"
    )
    gpus = f"{gpus_of(wanted.gpus)} of {giga(wanted.memory or c.memory)}"
    print(f"{c.title}; {gpus}; software {job.stack.name}\n")
    head = "layout", "step", "tokens/s/GPU", "MFU", "exposed communication", "bubble", "memory", "binds", "2x helps"
    print(table(head, [cells(job, one, band, result) for one in search.distinct(result.best, top)]))
    best = result.best[0]
    print(f"\n{len(result.best):,} of {result.seen:,} layouts fit. The quickest: {best.layout.text}")
    print(f"  binds: {binds(best.cost)}")
    for n, line in enumerate(helps(job, best, result)[:4]):
        print(f"  {'helps:' if not n else '      '} {line}")
    parts = ", ".join(f"{name} {giga(b)}" for name, b in best.cost.memory.items() if b >= 5e7)
    print(f"  memory: {parts}")
    if lines := closed_forms(job):
        print("\nClosed forms of the MLP alone (docs/parallel_limits.md):")
        print("\n".join(f"  {line}" for line in lines))
    k = job.stack
    constants = f"compute {figure(k.compute)}, link {figure(k.link)}, jitter {figure(k.jitter, 2)} a doubling of nodes"
    print(f"\nConstants: {constants}; {k.source}.")
    if s.experts:
        low, high = percent(1 - band[0]), percent(1 + band[1])
        print(f"Public runs with experts: two thirds reach {low} to {high} of the predicted speed, small ones least.")
    else:
        print(f"Two thirds of the public runs that calibrated nothing are predicted within ±{percent(band[0])}.")


def band_of(job: Job) -> tuple[float, float]:
    """Returns how far below and above its prediction the job's speed may be, as shares."""
    return published.band(job.stack.name, bool(job.shape.experts))


def main(options: argparse.Namespace) -> int:
    """Prints the quickest layouts, what binds, what would help, and the closed-form limits."""
    job, wanted = job_of(options), wanted_of(options)
    result = search.checked(job, wanted)
    band = band_of(job)
    if options.curves:
        for path in scaling.write(job, options.curves):
            print(path)
        return 0
    met = metered.saved(job.shape, options.seq) if options.meta else None
    if options.json:
        best = [row(job, one, band, helps(job, one, result)) for one in search.distinct(result.best, options.top)]
        closed = closed_forms(job)
        print(
            json.dumps(
                {"seen": result.seen, "fit": len(result.best), "layouts": best, "closed_forms": closed, "saved": met}
            )
        )
        return 0
    say(job, wanted, result, options.top, band)
    if met is not None:
        formula = footprint.kept(job.shape, "keep")
        print(f"A layer saves {figure(met / 1e3)} kB a token on meta tensors; by formula {figure(formula / 1e3)} kB.")
    if options.sources:
        print(f"\nFacts of {job.cluster.name}:")
        for name, fact in facts(options.cluster).items():
            print(
                f"  {name} {fact['value']:g}" if isinstance(fact["value"], float) else f"  {name} {fact['value']}",
                end="",
            )
            print(f": {fact['source']}")
    return 0
