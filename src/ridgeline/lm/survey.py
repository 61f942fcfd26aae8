"""Times sizes plain, compiled, ours, and ours in a CUDA graph, and finds the largest context that fits.

Rows are kept as they come."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ridgeline.lm import lab, memory, profile
from ridgeline.lm.bench import Stopwatch, operations
from ridgeline.lm.lab import units
from ridgeline.lm.setup import MODES, PRECISIONS, Setup, build, chosen_device, flags, shape
from ridgeline.lm.sizes import SIZES
from ridgeline.op import RidgelineError

IMPLS: dict[str, dict[str, Any]] = {  # flags of `lm bench`
    "ours": {"impl": "ridgeline"},
    "plain": {"impl": "naive"},
    "graph": {"impl": "ridgeline", "graph": True},
    "compiled": {"impl": "naive", "compile": True},
}
WHAT = ("bench", "predict", "context", "overhead")
SECONDS = 3.0  # for the timed steps of a row


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sizes", type=lab.names, default=["xl", "small", "medium", "large"], metavar="NAMES", help="in this order")
    add("--precisions", type=lab.names, default=["bfloat16", "float32"], metavar="NAMES", help="bfloat16,float32")
    add(
        "--impls",
        type=lab.names,
        default=list(IMPLS),
        metavar="NAMES",
        help=f"of {', '.join(IMPLS)} (all; graph needs a GPU)",
    )
    add("--context", type=lab.positive, default=512, metavar="N", help="tokens of a sequence (512)")
    add("--batch", type=lab.positive, default=4, metavar="N", help="sequences (4)")
    add("--minutes", type=float, default=4.0, metavar="N", help="the time to keep to (4)")
    add("--limit", type=float, default=90.0, metavar="S", help="end a job that says nothing for so long (90)")
    add("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    add("--most", type=lab.positive, default=65_536, metavar="N", help="the longest context to try (65536)")
    add("--record", type=Path, metavar="FILE", help="append each row at once to this run's file")
    add("--commit", metavar="SHA", help="the commit, where the source tree is a copy without git")
    add("--json", action="store_true", help="print JSON")
    add("--jobs", help=argparse.SUPPRESS)  # this process does these, and prints a row a line


def jobs(options: argparse.Namespace) -> list[str]:
    """Returns the jobs, "what:size:precision:implementation", the most telling first and compilers last."""
    sizes, half = options.sizes, options.precisions[:1]

    def bench(precisions: Sequence[str], impls: Sequence[str]) -> list[str]:
        return [f"bench:{s}:{p}:{i}" for p in precisions for s in sizes for i in impls if i in options.impls]

    eager, last = ["ours", "plain"], ["compiled"]
    if chosen_device(options).type == "cuda":
        last = ["graph", *last]
    found = bench(half, eager)
    found += [f"context:{sizes[0]}:{half[0]}:{i}" for i in eager if i in options.impls]
    found += [f"overhead:{s}:{half[0]}:ours" for s in sizes[:2] if "ours" in options.impls]
    return found + bench(options.precisions[1:], eager) + bench(options.precisions, last)


def options_of(job: str, options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Returns the flags of `lm bench` for a job."""
    parser = argparse.ArgumentParser()
    flags(parser)
    _, size, precision, impl = job.split(":")
    given = {"size": size, "precision": precision, "card": None} | IMPLS[impl]
    shared = {name: getattr(options, name) for name in ("context", "batch", "device")}
    return argparse.Namespace(**vars(parser.parse_args([])) | given | shared | changes)


def named(job: str, mode: str, one: argparse.Namespace) -> dict[str, Any]:
    """Returns what names a row of a run: `ridgeline compare` holds rows of the same names against each other."""
    what, size, precision, impl = job.split(":")
    case = f"{size} {one.batch} x {one.context}"
    part = "bench" if what == "predict" else what
    return {"part": part, "case": case, "dtype": precision, "direction": mode, "impl": impl, "status": "ok"}


def timed(setup: Setup, mode: str) -> list[Stopwatch]:
    """Returns the runs of a step, after two that do not count: ten, or as many as SECONDS take and at least three.

    Where the second, which compiles nothing, takes longer than that, it is the only run."""
    Stopwatch(setup, mode)
    second = Stopwatch(setup, mode)
    if second.whole > SECONDS:
        return [second]
    return [Stopwatch(setup, mode) for _ in range(max(3, min(10, int(SECONDS / second.whole))))]


def bench(job: str, options: argparse.Namespace, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yields a row for forward, backward and the step: seconds, parts, tokens/s, MFU and peak memory of our tensors."""
    one = options_of(job, options)
    device, size, gpu = chosen_device(one), shape(one), chosen_device(one).type == "cuda"
    if gpu and one.precision not in rates:
        rates[one.precision] = lab.product_rate(device, PRECISIONS[one.precision], 0.5)
        lab.release(device)
    setup, started = build(one, device), time.perf_counter()
    for mode in MODES:
        runs = timed(setup, mode)
        seconds = lab.figures([run.whole for run in runs])
        flops = operations(size, mode, one.batch, one.context)
        rate = rates.get(one.precision)
        yield named(job, mode, one) | {
            "seconds": seconds,
            "parts": {part: lab.median([run.parts[part] for run in runs]) for part in runs[0].parts},
            "tokens_per_second": setup.tokens.numel() / seconds["median"],
            "flops": flops,
            "mfu": flops / seconds["median"] / rate if rate else None,
            "roof_flops_per_second": rate,
            "peak_bytes": memory.peak_of(setup, mode) if gpu else None,
            "since_start_seconds": time.perf_counter() - started,
        }


def predict(job: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the predicted peak of forward, backward and the step."""
    for mode in reversed(MODES):
        one = options_of(job, options, mode=mode)
        one.card = "cpu" if chosen_device(one).type == "cpu" else None
        use = memory.predicted(shape(one), one, memory.card_of(one))
        yield named(job, mode, one) | {"predicted_bytes": use.peak, "kinds": use.kinds}


def context(job: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each context that was tried in a search for the largest that fits, then one with that."""
    one = options_of(job, options)
    device = chosen_device(one)
    setup, low, high = build(one, device), 0, None
    given = options.context
    while (high is None and low < options.most) or (high is not None and high - low > max(64, low // 32)):
        tried = given if not low and high is None else 2 * low if high is None else (low + high) // 2
        if tried < 16:
            break
        row = named(job, "step", one) | {"case": f"{one.size} {one.batch} x {tried}", "tokens": tried}
        setup.tokens = torch.randint(setup.size.vocabulary, (one.batch, tried), device=device)
        setup.target = setup.tokens.clone()
        start = time.perf_counter()
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            setup.step("step")
            lab.synchronize(device)
            low = tried
            row["took_seconds"] = time.perf_counter() - start
            row["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        except (RuntimeError, MemoryError) as error:
            if not lab.out_of_memory(error):
                raise
            row |= {"status": "out of memory", "reason": (str(error).splitlines() or ["no more is known"])[0]}
            high = tried
        if row["status"] != "ok":
            setup.plain.zero_grad(set_to_none=True)
            lab.release(device)
        yield row
    found = {"fits": low, "fails": high, "case": f"{one.size}, batch {one.batch}"}
    yield named(job, "largest", one) | found


def overhead(job: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the time of a step with the ranges of `lm profile` on, without tracing, over that of a step alone."""
    one = options_of(job, options)
    setup = build(one)
    device, found = setup.tokens.device, {"without": [], "with": []}  # type: ignore[var-annotated]
    for _ in range(12):
        found["without"].append(Stopwatch(setup, "step").whole)
        ranges = profile.Ranges(setup.plain, nvtx=False)
        lab.synchronize(device)
        start = time.perf_counter()
        profile.train(setup, ranges)
        lab.synchronize(device)
        found["with"].append(time.perf_counter() - start)
        ranges.remove()
    with_, without = (lab.figures(found[name][2:]) for name in ("with", "without"))
    ratio = with_["median"] / without["median"] - 1
    yield named(job, "step with ranges", one) | {"seconds": with_, "without": without, "overhead": ratio}


def work(options: argparse.Namespace) -> None:
    """Does the jobs in this process and prints a row a line. A job that fails is a row that says why."""
    rates: dict[str, float] = {}
    does = {"bench": lambda j: bench(j, options, rates), "predict": lambda j: predict(j, options)}
    does |= {"context": lambda j: context(j, options), "overhead": lambda j: overhead(j, options)}
    for job in options.jobs.split(","):
        one, said = options_of(job, options), None
        try:
            for row in does[job.split(":")[0]](job):
                lab.say(json.dumps(row))
        except Exception as error:  # a job that fails is a row, and the next one may work
            first = (str(error).splitlines() or [type(error).__name__])[0]
            out = lab.out_of_memory(error)
            said = {"status": "out of memory" if out else "failed", "reason": first[:300]}
        if said:
            lab.say(json.dumps(named(job, "all", one) | said))
        torch._dynamo.reset()
        lab.release(torch.device(chosen_device(one)))
        lab.say(json.dumps({"done": job}))


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of all jobs, from processes that do one after the other; a job that hangs ends its process."""
    end = time.monotonic() + 60 * options.minutes
    left = jobs(options)
    guesses = [f"predict:{s}:{p}:{i}" for p in options.precisions for s in options.sizes for i in ("ours", "plain")
               if i in options.impls]  # fmt: skip
    drop = ("record", "json", "minutes", "limit", "jobs", "commit")
    listed = {name: ",".join(getattr(options, name)) for name in ("sizes", "precisions", "impls")}

    def words(given: Sequence[str]) -> list[str]:
        return lab.command("survey", options, drop, jobs=",".join(given), **listed)

    beside = lab.Lines(words(guesses)) if guesses else None
    while left and time.monotonic() < end:
        lines = lab.Lines(words(left))
        said = f"nothing came for {options.limit:g} s"
        try:
            while left:
                row = lines.next(min(options.limit, end - time.monotonic()))
                if beside:
                    yield from filter(lambda r: "done" not in r, beside.ready())
                if row is None:
                    said = lines.fault() or said
                    break
                if "done" in row:
                    left.remove(row["done"])
                else:
                    yield row
        finally:
            lines.end()
        if left and time.monotonic() < end:  # the process died or hung in the first of them
            one = options_of(left[0], options)
            yield named(left.pop(0), "all", one) | {"status": "failed", "reason": said}
    if beside:
        while (row := beside.next(max(0.1, end - time.monotonic()))) is not None:
            if "done" not in row:
                yield row
        beside.end()
    for job in left:
        yield named(job, "all", options_of(job, options)) | {"status": "left out", "reason": "for time"}


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    what = f"{row['part']:8} {row['case']:18} {row['dtype']:8} {row['impl']:8} {row['direction']:8}"
    if row["status"] != "ok":
        return f"{what} {row['status']}: {row.get('reason')}"
    found = []
    if seconds := row.get("seconds"):
        found.append(f"{units.seconds(seconds['median'])} {units.spread(seconds)}")
    if row.get("tokens_per_second"):
        found.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("mfu"):
        found.append(f"MFU {units.percent(row['mfu'])}")
    if row.get("took_seconds"):
        found.append(f"fits, {units.seconds(row['took_seconds'])}")
    if row.get("peak_bytes"):
        found.append(f"peak {units.size(row['peak_bytes'])}")
    if row.get("predicted_bytes"):
        found.append(f"predicted peak {units.size(row['predicted_bytes'])}")
    if "fits" in row:
        found.append(f"{row['fits']} tokens fit, {row['fails'] or 'none'} do not")
    if "overhead" in row:
        found.append(f"{row['overhead']:+.2%} over a step without ranges")
    return f"{what} {', '.join(found)}"


def check(options: argparse.Namespace) -> None:
    """Raises RidgelineError if a list names what is not there, or the time is none."""
    known: dict[str, Iterable[str]] = {"sizes": SIZES, "precisions": PRECISIONS, "impls": IMPLS}
    for name, there in known.items():
        for given in getattr(options, name):
            if given not in [*there]:
                raise RidgelineError(f"lm survey: --{name} takes some of {', '.join(there)}, and got {given!r}")
        if not getattr(options, name):
            raise RidgelineError(f"lm survey: --{name} is empty")
    if not 0 < options.minutes < 1440:
        raise RidgelineError(f"lm survey: --minutes must be above 0 and under a day (1440), and is {options.minutes:g}")
    if not options.limit > 0:
        raise RidgelineError(f"lm survey: --limit must be above 0 seconds, and is {options.limit:g}")
    if chosen_device(options).type == "cpu" and options.impls == ["graph"]:
        raise RidgelineError("lm survey: graph makes a step a CUDA graph, which needs a GPU")


def main(options: argparse.Namespace) -> int:
    """Prints each row as it comes, and keeps it."""
    check(options)
    if options.jobs:
        with suppress(BrokenPipeError):
            work(options)
        return 0
    device = chosen_device(options).type
    run = lab.Recording(options.record, device, options.commit) if options.record else None
    found = []
    for row in rows(options):
        found.append(row)
        if run:
            run.write(row)
        if not options.json:
            lab.say(line(row))
    if options.json:
        print(json.dumps(found))
    return int(any(row["status"] == "failed" for row in found))
