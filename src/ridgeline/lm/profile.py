"""Shows where the time of inference and of a training step goes: by layer, module, kind of work and kernel."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.lm import lab, owners
from ridgeline.lm.bench import Stopwatch, fits
from ridgeline.lm.lab import units
from ridgeline.lm.owners import Item, Ranges
from ridgeline.lm.setup import Setup, build, chosen_device, flags, named
from ridgeline.op import RidgelineError

PHASES = ("inference", "forward", "recompute", "backward", "optimizer")
TRAINING = PHASES[1:]
DEMOS = ("print-loss",)
# The assignment's flags. Recording starts at cudaProfilerStart, after the warm-up.
NSYS = (
    "--trace=cuda,cudnn,cublas,osrt,nvtx",
    "--pytorch=functions-trace,autograd-shapes-nvtx",
    "--cudabacktrace=all",
    "--python-backtrace=cuda",
    "--gpu-metrics-devices=0",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--force-overwrite=true",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser, mode=None)
    add = parser.add_argument
    add("--steps", type=lab.positive, default=3, metavar="N", help="steps to profile, of inference and of training (3)")
    add("--warmups", type=lab.whole, default=2, metavar="N", help="steps before them (2)")
    add("--top", type=lab.positive, default=10, metavar="N", help="rows of the longest kernels (10)")
    add("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    add("--nvtx", action="store_true", help="also open NVTX ranges, for nsys and ncu")
    add("--nsys", type=Path, metavar="FILE", help="record the same steps with Nsight Systems, if it is installed")
    add("--demo", choices=DEMOS, help="print-loss: what it costs to print the loss each step")
    add("--record", type=Path, metavar="FILE", help="append the figures to this file of JSON lines")
    add("--bare", action="store_true", help=argparse.SUPPRESS)  # only the steps, for nsys


def infer(setup: Setup, ranges: Ranges) -> None:
    """Runs a forward pass without gradients."""
    with ranges.phase("inference"):
        setup.step("forward")


def train(setup: Setup, ranges: Ranges, after: Callable[[torch.Tensor], Any] = lambda loss: None) -> None:
    """Runs a training step, each phase in its range."""
    with ranges.phase("forward"), setup.context():
        loss = setup.model(setup.tokens, setup.target)
    with ranges.phase("backward"):
        loss.backward()
    with ranges.phase("optimizer"):
        setup.optimizer.step()
        setup.plain.zero_grad(set_to_none=True)
    after(loss.detach())


def steps(setup: Setup, ranges: Ranges, count: int) -> None:
    """Runs `count` forward passes, then `count` training steps."""
    device = setup.tokens.device
    for run in (infer, train):
        for _ in range(count):
            run(setup, ranges)
        lab.synchronize(device)


def recorded(setup: Setup, ranges: Ranges, count: int, trace: Path | None) -> tuple[list[Item], list[Any]]:
    """Returns the work of `count` steps with its owners, and the profiler's events."""
    gpu = setup.tokens.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * gpu
    with torch.profiler.profile(activities=activities) as profiler:
        steps(setup, ranges, count)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = list(profiler.events() or [])
    return owners.items(events, gpu), events


def summed(items: Iterable[Item], key: Callable[[Item], str], count: int) -> dict[str, dict[str, float]]:
    """Returns microseconds per step by a key and phase, in the order in which the keys first come."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for item in items:
        found[key(item)][item.owner.phase] += item.us / count
    return dict(found)


def share_of_products(kinds: dict[str, dict[str, float]], phases: Sequence[str]) -> float:
    """Returns the share of the phases' time that is matrix products, without the host's own time."""
    work = {kind: sum(row[p] for p in phases) for kind, row in kinds.items() if kind != "host"}
    return work.get("products", 0.0) / (sum(work.values()) or 1.0)


def top_kernels(items: Iterable[Item], phases: Sequence[str], count: int, most: int) -> list[dict[str, Any]]:
    """Returns the names with the most time: calls and microseconds per step, and the kind of work."""
    us: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    for item in items:
        if item.owner.phase in phases and item.kind != "host":
            us[item.kind, item.name] += item.us / count
            calls[item.kind, item.name] += 1
    longest = sorted(us, key=us.__getitem__, reverse=True)[:most]
    return [{"kind": k, "name": n, "us": us[k, n], "calls": calls[k, n] / count} for k, n in longest]


def softmax_against_products(items: Iterable[Item], setup: Setup, count: int) -> dict[str, Any]:
    """Returns time and operations of attention's two halves in a forward pass that writes all scores.

    Softmax counts five operations a score: subtract the maximum, which takes a comparison, exp, sum and divide."""
    inside = [i for i in items if i.owner.op == "attention" and i.owner.phase == "inference"]
    us = {True: 0.0, False: 0.0}
    for item in inside:
        if item.kind == "attention":
            us[bool(owners.PRODUCT.search(item.name))] += item.us / count
    batch, context = setup.tokens.shape
    pairs = batch * setup.size.heads * setup.size.layers * context**2
    return {
        "products": {"us": us[True], "flops": setup.size.scores(batch, context, causal=False)},
        "softmax": {"us": us[False], "flops": 5 * pairs},
    }


class Reads(TorchDispatchMode):
    """A context that counts where the host reads a tensor's values: on a GPU it waits there until they are known."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.lines = device, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = [a for a in args if isinstance(a, torch.Tensor)]
        if inputs and inputs[0].device.type == self.device.type:
            target = given.get("device")
            away = name == "_to_copy" and target is not None and torch.device(target).type != self.device.type
            if name == "copy_" and len(inputs) > 1:
                away = inputs[1].device.type != self.device.type
            if name in ("_local_scalar_dense", "nonzero", "equal", "masked_select") or away:
                self.lines[caller()] += 1
        elif name == "copy_" and len(inputs) > 1 and inputs[1].device.type == self.device.type:
            self.lines[caller()] += 1
        return func(*args, **given)


def caller() -> str:
    """Returns file:line, with its text, of the innermost frame outside of torch and of this counter."""
    torchs = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()[:-2]):
        if not frame.filename.startswith(torchs) and not frame.filename.startswith("<"):
            return f"{short(frame.filename)}:{frame.lineno}: {frame.line}"
    return "autograd's own thread"


def short(path: str) -> str:
    """Returns a path from the package's folder on, or as it is."""
    root = Path(__file__).parents[2]
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def print_loss(loss: torch.Tensor) -> None:
    print(f"loss {loss.item():.4f}", file=sys.stderr)  # the trap: the host waits here for the whole step


def reads(setup: Setup, ranges: Ranges, demo: str | None) -> dict[str, int]:
    """Returns how often a training step reads values on the host, by line of code."""
    with Reads(setup.tokens.device) as counter:
        train(setup, ranges, print_loss if demo else lambda loss: None)
    return dict(counter.lines.most_common())


def demonstrate(setup: Setup, ranges: Ranges, count: int) -> dict[str, Any]:
    """Returns seconds per training step without and with a printed loss: `count` steps each, one wait at the end."""
    found: dict[str, Any] = {}
    for name, after in (("quiet", lambda loss: None), ("printing", print_loss)):
        lab.synchronize(setup.tokens.device)
        start = time.perf_counter()
        for _ in range(count):
            train(setup, ranges, after)
        host = time.perf_counter() - start
        lab.synchronize(setup.tokens.device)
        found |= {name: (time.perf_counter() - start) / count, f"{name}_host": host / count}
    return found


def overhead(setup: Setup, ranges: Ranges) -> dict[str, float]:
    """Returns the ranges of a training step, the seconds of each, and their share of the step at most.

    On a GPU the host runs ahead, so a step seldom pays for them at all."""
    before = ranges.entered
    seconds = Stopwatch(setup, "step").whole
    entered = ranges.entered - before
    each = owners.seconds_per_range()
    return {"ranges": entered, "seconds_each": each, "share": entered * each / seconds}


def by_timer(setup: Setup, mode: str) -> float:
    """Returns the microseconds of a step without the profiler, from an idle device to an idle device."""
    return 1e6 * lab.median([Stopwatch(setup, mode).whole for _ in range(5)])


def waits(events: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the gaps between kernels, summed by what the host did then, the longest first."""
    device, host = [], []
    for event in events:
        if "CPU" in str(event.device_type):
            host.append(event)
        elif not event.is_user_annotation:
            device.append((event.time_range.start, event.time_range.end))
    us: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for length, what in owners.gaps(device, host):
        us[what] += length
        times[what] += 1
    return [{"host": w, "us": us[w], "gaps": times[w]} for w in sorted(us, key=us.__getitem__, reverse=True)]


def nsys(options: argparse.Namespace) -> str:
    """Records the steps with Nsight Systems, and returns a sentence: the report's file, or why there is none."""
    program = shutil.which("nsys")
    words = lab.command("profile", options, ("nsys", "trace", "json", "record", "demo"), bare=True, nvtx=True)
    line = ["nsys", "profile", *NSYS, f"--output={options.nsys}", *words]
    if program is None:
        return f"nsys is not installed here; where it is, this records the same: {' '.join(line)}"
    if chosen_device(options).type == "cpu":
        return "nsys records the GPU, and this run is on the CPU"
    done = subprocess.run([program, *line[1:]], env=lab.environment(), capture_output=True, text=True)
    if done.returncode:
        return f"nsys failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
    return f"nsys wrote {options.nsys}; nsys stats -r cuda_gpu_kern_sum,nvtx_gpu_proj_sum shows its tables"


def bare(options: argparse.Namespace) -> int:
    """Runs only the steps, between cudaProfilerStart and Stop."""
    setup = build(options)
    ranges = Ranges(setup.plain, nvtx=options.nvtx)
    steps(setup, ranges, options.warmups)
    with torch.cuda.profiler.profile() if setup.tokens.is_cuda else nullcontext():
        steps(setup, ranges, options.steps)
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all figures of the profile; times are microseconds per step."""
    setup, count = build(options), options.steps
    gpu = setup.tokens.is_cuda
    ranges = Ranges(setup.plain, nvtx=options.nvtx)
    steps(setup, ranges, options.warmups)
    items, events = recorded(setup, ranges, count, options.trace)
    kinds = summed(items, lambda i: i.kind, count)
    figures: dict[str, Any] = {
        "device": setup.tokens.device.type,
        "kinds": {kind: kinds[kind] for kind in owners.KINDS if kind in kinds},
        "layers": summed(items, lambda i: i.owner.part, count),
        "modules": summed(items, lambda i: i.owner.place, count),
        "kernels": {
            "inference": top_kernels(items, ("inference",), count, options.top),
            "training": top_kernels(items, TRAINING, count, options.top),
        },
        "products_share": {
            "inference": share_of_products(kinds, ("inference",)),
            "training": share_of_products(kinds, TRAINING),
        },
        "timer": {
            name: {"timed": by_timer(setup, mode), "summed": sum(sum(row[p] for p in phases) for row in kinds.values())}
            for name, mode, phases in (("inference", "forward", ("inference",)), ("training", "step", TRAINING))
        },
        "gaps": waits(events) if gpu else None,
        "reads": reads(setup, ranges, None),
        "overhead": overhead(setup, ranges),
    }
    if options.impl == "naive":
        figures["attention"] = softmax_against_products(items, setup, count)
    if options.demo:
        figures["demo"] = demonstrate(setup, ranges, max(count, 5)) | {"reads": reads(setup, ranges, options.demo)}
    ranges.remove()
    return figures


def _phases(title: str, rows: dict[str, dict[str, float]]) -> None:
    shown = [p for p in PHASES if any(row[p] for row in rows.values())]
    whole = sum(row[p] for row in rows.values() for p in TRAINING) or 1.0
    cells = []
    for name, row in rows.items():
        times = [units.seconds(row[p] / 1e6) if row[p] else units.DASH for p in shown]
        cells.append([name, *times, units.percent(sum(row[p] for p in TRAINING) / whole)])
    lab.print_table(title, ["part"], [*shown, "of training"], cells)


def show(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the tables."""
    where = "GPU time" if figures["device"] == "cuda" else "CPU time, operators' own"
    for name, title in (("kinds", "kind of work"), ("layers", "layer"), ("modules", "module")):
        _phases(f"{where} per step, by {title}", figures[name])
    for name, rows in figures["kernels"].items():
        cells = [[r["kind"], f"{r['calls']:g}", units.seconds(r["us"] / 1e6), r["name"][:80]] for r in rows]
        lab.print_table(f"longest in {name}, per step", ["kind"], ["calls", "time", "name"], cells)
    for name, found in figures["timer"].items():
        timed, total = (units.seconds(found[key] / 1e6) for key in ("timed", "summed"))
        lab.say(f"{name} takes {timed} by the timer without the profiler, and {total} by the sum of the rows above")
    for name, share in figures["products_share"].items():
        lab.say(f"matrix products, without attention's, take {units.percent(share)} of {name}")
    if halves := figures.get("attention"):
        a, b = halves["products"], halves["softmax"]
        lab.say(
            f"in attention, forward: softmax and mask take {units.seconds(b['us'] / 1e6)} for {b['flops']:.3g} "
            f"operations, the products {units.seconds(a['us'] / 1e6)} for {a['flops']:.3g}: "
            f"{b['us'] / (a['us'] or 1):.2f} times the time for {b['flops'] / a['flops']:.3f} times the operations"
        )
    if figures["gaps"] is None:
        lab.say("gaps: on a CPU there is no GPU that waits for the host")
    for gap in (figures["gaps"] or [])[:5]:
        lab.say(f"the GPU waited {units.seconds(gap['us'] / 1e6)} in {gap['gaps']} gaps; the host did: {gap['host']}")
    waits_ = "waits for the GPU there" if figures["device"] == "cuda" else "would wait there for a tensor on a GPU"
    found = figures.get("demo", figures)["reads"]
    lab.say(f"lines where the host reads values, and {waits_}:{'' if found else ' none'}")
    for line, times in found.items():
        lab.say(f"  {times} times a step: {line}")
    if demo := figures.get("demo"):
        lab.say(
            f"a step takes {units.seconds(demo['quiet'])}, and the host is done after "
            f"{units.seconds(demo['quiet_host'])}; if it prints the loss each step, they are "
            f"{units.seconds(demo['printing'])} and {units.seconds(demo['printing_host'])}"
        )
    o = figures["overhead"]
    each, most = units.seconds(o["seconds_each"]), units.percent(o["share"])
    lab.say(f"the {o['ranges']} ranges of a step take {each} each: at most {most} of it")


def main(options: argparse.Namespace) -> int:
    """Prints the tables, and writes the files that the flags name."""
    os.environ.update(KINETO_LOG_LEVEL="6")
    if options.compile:
        raise RidgelineError("lm profile: a compiled model has no modules to time; leave --compile out")
    if options.nvtx and chosen_device(options).type == "cpu":
        raise RidgelineError("lm profile: --nvtx marks a GPU's timeline, and this run is on the CPU")
    if options.trace and not options.trace.parent.is_dir():
        raise RidgelineError(f"lm profile: --trace {options.trace} cannot be written: there is no such folder")
    if why := fits(argparse.Namespace(**vars(options) | {"mode": "step"})):
        raise RidgelineError(f"lm profile: {why}")
    if options.bare:
        return bare(options)
    said = nsys(options) if options.nsys else None
    figures = measured(options) | {"nsys": said}
    if options.record:
        about = named(argparse.Namespace(**vars(options) | {"mode": "step"}))
        lab.record(options.record, [about | figures], "profile")
    if options.json:
        print(json.dumps(figures))
        return 0
    show(figures, options)
    for text in filter(None, (said, options.trace and f"trace: {options.trace}")):
        lab.say(text)
    return 0
