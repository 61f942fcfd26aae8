"""Times a language model's forward, backward and whole step, over sizes and contexts, and studies the warm-up."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from ridgeline import cuda
from ridgeline.lm import lab
from ridgeline.lm.lab import units
from ridgeline.lm.setup import PRECISIONS, Setup, build, chosen_device, flags, named, shape
from ridgeline.lm.sizes import SIZES, Size
from ridgeline.op import RidgelineError

DRIVER = ("cudaMalloc", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAddressReserve")  # calls that allocate
OWN = ("json", "grid", "record", "fresh", "first")  # flags that a row's own process does not take over


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser)
    add = parser.add_argument
    add("--warmups", type=lab.wholes, default=[5], metavar="N", help="steps before timing (5); 0,1,2,5 is a study")
    add("--steps", type=lab.positive, default=10, metavar="N", help="timed steps (10)")
    add("--grid", nargs=2, metavar=("SIZES", "CONTEXTS"), help="a row for each pair, such as: small,medium 128,512")
    add("--fresh", action=argparse.BooleanOptionalAction, help="each row in its own process (on a GPU: yes)")
    lab.record_flag(parser)
    add("--roof", type=float, metavar="FLOPS", help="the rate of matrix products that MFU is held against (measured)")
    add("--graph", action="store_true", help="replay the step as one CUDA graph, so that the host's time is gone")
    add("--first", action="store_true", help="split the first step into compiling, loading, allocating and running")


class Stopwatch:
    """Times one step's parts from an idle device to an idle device, in seconds: by events on a GPU, else on the host.

    parts: seconds of "forward", "backward" and "optimizer". whole: seconds of the step on the host, which waits."""

    def __init__(self, setup: Setup, mode: str) -> None:
        device = setup.tokens.device
        self.cuda = device.type == "cuda"
        lab.synchronize(device)
        start = time.perf_counter()
        self.marks = [("", self._now())]
        setup.step(mode, lambda part: self.marks.append((part, self._now())))
        lab.synchronize(device)
        self.whole = time.perf_counter() - start
        self.parts = {name: self._between(a, b) for (_, a), (name, b) in zip(self.marks, self.marks[1:])}

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self.cuda else b - a


def operations(size: Size, mode: str, batch: int, context: int) -> int:
    """Returns the floating-point operations that a step needs, without recomputation."""
    if mode == "forward":
        return size.products(batch * context) + size.scores(batch, context)
    return size.step(batch, context)


def least_bytes(options: argparse.Namespace) -> int:
    """Returns bytes that a step cannot do without: the weights, and what backward keeps of the residual stream."""
    size, width = shape(options), PRECISIONS[options.precision].itemsize
    stream = options.batch * options.context * size.width * PRECISIONS[options.autocast or options.precision].itemsize
    copies = {"forward": 1, "backward": 2, "step": 4}[options.mode]  # the weights, gradients and two moments
    blocks = 1 if options.mode == "forward" else -(-size.layers // max(1, options.checkpoint))
    scores = options.batch * size.heads * options.context**2 * width if options.impl == "naive" else 0
    return copies * size.parameters * width + 2 * blocks * stream + scores


def fits(options: argparse.Namespace) -> str | None:
    """Returns None, or why the device's memory cannot hold a step."""
    device = chosen_device(options)
    least, there = least_bytes(options), lab.memory_of(device)
    if least <= there:
        return None
    return (
        f"{options.size} with {options.batch} x {options.context} tokens needs at least {units.size(least)} "
        f"for {options.mode}, and the {'GPU' if device.type == 'cuda' else 'CPU'} has {units.size(there)}"
    )


def timed(options: argparse.Namespace) -> dict[str, Any]:
    """Returns one row, timed in this process: seconds and those of each part, tokens/s, MFU, peak memory.

    If memory runs out the row has "error" in place of the figures."""
    row = named(options)
    if why := fits(options):
        return row | {"error": f"out of memory: {why}"}
    device = chosen_device(options)
    try:
        return row | _figures(options, device)
    except (RuntimeError, MemoryError) as error:
        if not lab.out_of_memory(error):
            raise
        said = str(error).splitlines()[0] if str(error) else "no more is known"
    lab.release(device)  # outside the handler, whose traceback holds the model
    return row | {"error": f"out of memory: {said}"}


def _figures(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    setup, gpu = build(options, device), device.type == "cuda"
    if setup.graph:  # it takes its memory when it is made, which is no step to time
        torch.cuda.reset_peak_memory_stats()
        setup.step(options.mode)
    for _ in range(options.warmups[0]):
        setup.step(options.mode)
    if gpu and not setup.graph:
        torch.cuda.reset_peak_memory_stats()
    runs = [Stopwatch(setup, options.mode) for _ in range(options.steps)]
    seconds = lab.figures([run.whole for run in runs])
    flops = operations(setup.size, options.mode, options.batch, options.context)
    return {
        "warmups": options.warmups[0],
        "seconds": seconds,
        "parts": {part: lab.median([run.parts[part] for run in runs]) for part in runs[0].parts},
        "samples": [run.whole for run in runs],
        "tokens_per_second": setup.tokens.numel() / seconds["median"],
        "flops": flops,
        "mfu": flops / seconds["median"] / options.roof if options.roof else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
    }


def roof(options: argparse.Namespace) -> float | None:
    """Returns the measured rate of matrix products on a GPU, in FLOP/s; None on a CPU."""
    device = chosen_device(options)
    if device.type == "cpu":
        return None
    rate = lab.product_rate(device, PRECISIONS[options.autocast or options.precision])
    lab.release(device)
    return rate


def first_step(options: argparse.Namespace) -> dict[str, Any]:
    """Returns where the first step of this process goes, in seconds.

    compiling: by Triton, NVRTC and torch.compile. loading: Triton's and torch's kernels. allocating: memory
    from the driver or, on a CPU, tensors. running: a later step's whole time. other: what is left, such as imports."""
    device = chosen_device(options)
    setup, spent = build(options, device), Spent()
    gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * gpu
    with spent, torch.profiler.profile(activities=activities) as profiler:
        first = Stopwatch(setup, options.mode).whole
    events = profiler.events() or []
    found = {
        "compiling": spent.compiling,
        "loading": spent.loading + _self_seconds(events, ("Lazy Function Loading",)),
        "allocating": _self_seconds(events, DRIVER if gpu else ("aten::empty", "aten::resize_")),
        "running": lab.median([Stopwatch(setup, options.mode).whole for _ in range(3)]),
    }
    return named(options) | {"first": found | {"other": max(0.0, first - sum(found.values())), "whole": first}}


def _self_seconds(events: Any, prefixes: tuple[str, ...]) -> float:
    return sum(event.self_cpu_time_total for event in events if event.name.startswith(prefixes)) / 1e6


class Spent:
    """A context that counts the seconds that compilers take, and those of loading Triton's kernels."""

    def __init__(self) -> None:
        self.compiling = self.loading = 0.0
        self.since = 0.0

    def __enter__(self) -> Spent:
        from triton import knobs

        self.dynamo, self.nvrtc = self._by_dynamo(), cuda.compile_source
        self.before, knobs.compilation.listener = knobs.compilation.listener, self._compiled
        knobs.runtime.kernel_load_start_hook.add(self._begin)
        knobs.runtime.kernel_load_end_hook.add(self._end)
        cuda.compile_source = self._compile_source  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        from triton import knobs

        self.compiling += self._by_dynamo() - self.dynamo
        knobs.compilation.listener = self.before
        knobs.runtime.kernel_load_start_hook.remove(self._begin)
        knobs.runtime.kernel_load_end_hook.remove(self._end)
        cuda.compile_source = self.nvrtc

    @staticmethod
    def _by_dynamo() -> float:
        from torch._dynamo.utils import calculate_time_spent

        return calculate_time_spent().get("entire_frame_compile", 0.0)

    def _compile_source(self, *args: Any) -> Any:
        start = time.perf_counter()
        compiled = self.nvrtc(*args)
        self.compiling += time.perf_counter() - start
        return compiled

    def _compiled(self, *, times: Any, **_: Any) -> None:
        if torch._guards.CompileContext.current_compile_id() is None:  # else torch.compile's time has it
            self.compiling += times.total / 1e6

    def _begin(self, *_: Any) -> None:
        self.since = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.loading += time.perf_counter() - self.since


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of the flags: one, or a grid's, each in its own process if `--fresh` asks for it."""
    if options.roof is None:
        options.roof = roof(options)
    if not options.grid:
        return [_kept(options, _row(options, bool(options.fresh)))]
    sizes, contexts = lab.names(options.grid[0]), options.grid[1].split(",")
    for name in sizes:
        if name not in SIZES:
            raise RidgelineError(f"lm: there is no size {name!r}; the sizes are {', '.join(SIZES)}")
    if not all(c.strip().isdigit() and int(c) for c in contexts):
        raise RidgelineError(f"lm bench: --grid takes contexts of 1 token or more, and got {options.grid[1]!r}")
    fresh = options.fresh if options.fresh is not None else chosen_device(options).type == "cuda"
    rows = []
    for name in sizes:
        for context in map(int, contexts):
            one = argparse.Namespace(**vars(options) | {"size": name, "context": context})
            rows.append(_kept(options, _row(one, fresh)))
            if not options.json:
                lab.say(line(rows[-1]))
    return rows


def _row(options: argparse.Namespace, fresh: bool, first: bool = False) -> dict[str, Any]:
    if fresh:
        if why := fits(options):
            return named(options) | {"error": f"out of memory: {why}"}
        warmups = ",".join(map(str, options.warmups))
        words = lab.command("bench", options, OWN, json=True, warmups=warmups, **({"first": True} if first else {}))
        row = lab.child(words)
        return named(options) | row
    row = first_step(options) if first else timed(options)
    lab.release(chosen_device(options))
    return row


def _kept(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, Any]:
    if options.record:
        lab.record(options.record, [row], "bench")
    return row


def study(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each number of warm-ups, each in a process of its own, then one that splits the first step.

    Each row is printed and recorded as it comes."""
    if options.roof is None:
        options.roof = roof(options)
    each = [argparse.Namespace(**vars(options) | {"warmups": [count]}) for count in options.warmups]
    rows = []
    for one in each:
        rows.append(_kept(options, _row(one, True)))
        if not options.json:
            lab.say(f"warm-ups {one.warmups[0]}: {line(rows[-1])}")
    return [*rows, _kept(options, _row(each[0], True, first=True))]


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    what = f"{row['size']} {row['batch']} x {row['context']} {row['mode']}"
    if "error" in row:
        return f"{what}: {row['error']}"
    seconds = row["seconds"]
    parts = ", ".join(f"{part} {units.seconds(value)}" for part, value in row["parts"].items())
    text = (
        f"{what}: {units.seconds(seconds['median'])} (95%: {units.seconds(seconds['low'])} to "
        f"{units.seconds(seconds['high'])}), mean {units.seconds(seconds['mean'])}, deviation "
        f"{units.seconds(seconds['deviation'])}; {row['tokens_per_second']:,.0f} tokens/s"
    )
    text += "" if row["mfu"] is None else f", MFU {units.percent(row['mfu'])}"
    text += "" if row["peak_bytes"] is None else f", peak {units.size(row['peak_bytes'])}"
    return f"{text}\n    {parts}"


def _table(rows: list[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        what = [row["size"], str(row["context"]), str(row["batch"])]
        if "error" in row:
            shown.append([*what, row["error"].partition(":")[0], *[units.DASH] * 6])
            continue
        s = row["seconds"]
        times = [units.seconds(s[name]) for name in ("median", "mean", "deviation")]
        mfu = units.DASH if row["mfu"] is None else units.percent(row["mfu"])
        rest = [f"{row['tokens_per_second']:,.0f}", mfu, units.size(row["peak_bytes"])]
        shown.append([*what, times[0], units.spread(s), *times[1:], *rest])
    one = rows[0]
    how = f"{one['mode']}, {one['autocast'] or one['precision']}, {one['impl']}{', compiled' * one['compile']}"
    how += ", in a CUDA graph" * one.get("graph", False)
    figures = ["context", "batch", "median", "95%", "mean", "deviation", "tokens/s", "MFU", "peak"]
    lab.print_table(f"{how}, on {one['device']}", ["size"], figures, shown)


def _show_study(rows: list[dict[str, Any]]) -> None:
    shown = []
    for row in rows[:-1]:
        if "error" in row:
            lab.say(line(row))
            continue
        s = row["seconds"]
        times = (row["samples"][0], s["median"], s["mean"], s["deviation"])
        shown.append([str(row["warmups"]), *map(units.seconds, times)])
    if shown:
        title = f"warm-up of {rows[0]['size']}, {rows[0]['mode']}: each row in a process of its own"
        lab.print_table(title, ["warm-ups"], ["first timed step", "median", "mean", "deviation"], shown)
    last = rows[-1]
    if "error" in last:
        lab.say(line(last))
        return
    whole = last["first"]["whole"]
    parts = [[name, units.seconds(s), units.percent(s / whole)] for name, s in last["first"].items() if s]
    lab.print_table("the first step, under the profiler", ["part"], ["time", "share"], parts)


def main(options: argparse.Namespace) -> int:
    """Prints the rows, and returns 1 if the only one failed."""
    shape(options), chosen_device(options)
    lab.recordable(options.record)
    if len(options.warmups) > 1 and options.grid:
        raise RidgelineError("lm bench: --grid takes one number of --warmups; give several without --grid")
    if options.graph and (options.first or len(options.warmups) > 1):
        which = "--first" if options.first else "a study of warm-ups"
        raise RidgelineError(f"lm bench: {which} times steps as the host starts them: leave --graph out")
    if not options.grid and (why := fits(options)):
        raise RidgelineError(f"lm bench: {why}")
    studied = len(options.warmups) > 1
    if options.first:
        rows = [_kept(options, _row(options, False, first=True))]
    else:
        rows = study(options) if studied else rows_of(options)
    if options.json:
        print(json.dumps(rows if studied or options.grid else rows[0]))
    elif studied or options.first:
        _show_study(rows)
    elif options.grid:
        _table(rows)
    else:
        lab.say(line(rows[0]))
    return 1 if len(rows) == 1 and "error" in rows[0] else 0
