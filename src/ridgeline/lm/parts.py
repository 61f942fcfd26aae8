"""The parts of `ridgeline lm report`: what each measures, as rows of a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.lm import lab, memory, precision
from ridgeline.lm.command import parser_of
from ridgeline.lm.setup import chosen_device, shape
from ridgeline.op import RidgelineError

Row = dict[str, Any]
POINTS = 240  # of the memory's timeline


def row(part: str, options: argparse.Namespace, **more: Any) -> Row:
    """Returns a row of a run, named by the options."""
    case = f"{options.size} {options.batch} x {options.context}"
    dtype = options.autocast or options.precision
    base = {"part": part, "case": case, "dtype": dtype, "direction": "step", "impl": options.impl, "status": "ok"}
    return base | more


def answer(verb: str, *words: str) -> Any:
    """Returns what a verb prints as JSON, from this process."""
    return lab.printed(parser_of(verb).parse_args([*words, "--json"]), verb)


def model(options: argparse.Namespace) -> list[str]:
    """Returns the flags that name the model and how it runs."""
    words = [f"--size={options.size}", f"--context={options.context}", f"--batch={options.batch}"]
    words += [f"--precision={options.precision}"]
    words += [f"--{n.replace('_', '-')}={v}" for n in ("layers", "width", "hidden", "heads", "key_heads", "head_dim",
              "vocabulary", "autocast", "device") if (v := getattr(options, n)) is not None]  # fmt: skip
    return words


def profiled(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the profile of our ops, then that of the formulas, which alone shows softmax against products."""
    for impl in ("ridgeline", "naive"):
        demo = ["--demo=print-loss"] if impl == "ridgeline" else []
        data = answer("profile", *model(options), f"--impl={impl}", "--steps=2", "--warmups=1", *demo)
        data["modules"] = dict(list(data["modules"].items())[:40])
        yield row("profile", options, impl=impl, data=data)


def thinned(use: memory.Use) -> dict[str, list[int]]:
    """Returns the memory's timeline by kind at POINTS moments, each the fullest of its stretch."""
    totals = [sum(values) for values in zip(*use.curve.values())]
    step = max(1, len(totals) // POINTS)
    kept = [max(range(n, min(n + step, len(totals))), key=totals.__getitem__) for n in range(0, len(totals), step)]
    return {kind: [values[n] for n in kept] for kind, values in use.curve.items() if any(values)}


def remembered(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the memory of a step: predicted, measured, over time, and what a layer saves."""
    one = parser_of("memory").parse_args(model(options))
    one.card = "cpu" if chosen_device(one).type == "cpu" else None
    found = memory.report(one)
    use = found.pop("use")
    measured = found.get("measured_bytes")
    yield row("memory", options, peak_bytes=measured, predicted_bytes=found["peak_bytes"],
              data=found | {"curve": thinned(use)})  # fmt: skip


def attended(options: argparse.Namespace) -> Iterator[Row]:
    """Yields attention's times: on a GPU some of the assignment's 80 points, on a CPU the small grid."""
    if chosen_device(options).type == "cpu":
        found = answer("attention", "--grid=small", "--device=cpu", "--budget=0.1")
    else:
        some = ("--grid=80", "--dim=64,128", "--seq=1024,4096,16384", "--dtype=bfloat16", "--budget=0.1")
        found = answer("attention", *some, "--impls=plain,compiled,triton,gluon")
    for one in found:
        named = {"case": f"{one['batch']} x {one['seq']} x {one['dim']}", "dtype": one["dtype"], "impl": one["impl"]}
        if "error" in one:
            status, _, reason = one["error"].partition(": ")
            yield row("attention", options, **named, direction="all", status=status)  | {"reason": reason}  # fmt: skip
            continue
        for way, seconds in one["seconds"].items():
            ends = {end: seconds[end] for end in ("median", "low", "high")}
            yield row("attention", options, **named, direction=way, seconds=ends,
                      flops_per_second=one["flops_per_second"][way],
                      held_bytes=one["in_use_bytes"], formula_bytes=one["formula_bytes"])  # fmt: skip


def checkpointed(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each way of keeping less for backward."""
    card = ["--card=cpu"] if chosen_device(options).type == "cpu" else []
    for way in answer("checkpoint", *model(options), *card, "--steps=3")["ways"]:
        why = way.get("why")
        yield row("checkpoint", options, impl=way["way"], status=why or "ok", predicted_bytes=way["peak_bytes"],
                  peak_bytes=way.get("measured_bytes"), data=way)  # fmt: skip


def formats(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the sums, the dtypes under autocast and the formats."""
    device = chosen_device(options).type
    sums, table = precision.accumulated(), precision.table()
    for one in table:
        one["rounded"] = [x if abs(x) < float("inf") else str(x) for x in one["rounded"]]
    cast = {name: precision.autocast_dtypes(getattr(lab.torch, name), device) for name in ("float16", "bfloat16")}
    yield row("precision", options, data={"sums": sums, "device": device, "autocast": cast, "formats": table})


def scaled(options: argparse.Namespace) -> Iterator[Row]:
    """Yields matrix products and an MLP as they grow, with the exponents."""
    words = [f"--precision={options.precision}", "--budget=0.15"]
    if chosen_device(options).type == "cpu":
        words += ["--sides=256,512,1024", "--factors=1,2,3", "--device=cpu"]
    for table in answer("scale", *words):
        for one in table.pop("rows"):
            seconds = {end: ms / 1e3 for end, ms in one["ms"].items()}
            yield row("scale", options, case=f"{table['name']} {one['size']}", direction="", impl="torch",
                      seconds=seconds, flops_per_second=one["flops_per_second"])  # fmt: skip
        yield row("scale", options, case=table["name"], direction="fit", impl="torch", data=table)


def begun(options: argparse.Namespace) -> Iterator[Row]:
    """Yields where the first step of a process goes."""
    yield row("first", options, data=answer("bench", *model(options), "--first")["first"])


def boards(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the leaderboard's plan and the board of attention; the step too, where it fits."""
    plan, device = answer("leaderboard", "--dry"), chosen_device(options)
    named = {"case": f"{plan['batch']} x {plan['context']}", "dtype": "bfloat16"}
    yield row("leaderboard", options, **named, direction="plan", data=plan)
    words = [] if device.type == "cuda" else ["--device=cpu", "--context=512"]
    found = answer("leaderboard", "--attention", "--steps=1", *words)
    for impl, seconds in found["seconds"].items():
        yield row("leaderboard", options, case=f"attention 1 x {found['context']}", dtype="bfloat16", impl=impl,
                  direction="both", seconds=seconds,
                  floor_seconds=found["floor_seconds"] if device.type == "cuda" else None)  # fmt: skip
    if lab.memory_of(device) < plan["limit_bytes"] or device.type == "cpu":
        why = f"it needs a GPU with {plan['limit_bytes'] / 1e9:.0f} GB"
        yield row("leaderboard", options, **named, status="left out", reason=why)
        return
    step = answer("leaderboard")
    yield row("leaderboard", options, **named, seconds=step["seconds"], peak_bytes=step["peak_memory_bytes"],
              floor_seconds=sum(step["floor_seconds"].values()))  # fmt: skip


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[Row]], float]] = {
    "precision": (formats, 0.05),
    "memory": (remembered, 0.1),
    "profile": (profiled, 0.2),
    "attention": (attended, 0.1),
    "checkpoint": (checkpointed, 0.15),
    "scale": (scaled, 0.1),
    "first": (begun, 0.05),
    "leaderboard": (boards, 0.15),
}  # with the share of the report's time that each may take


def work(options: argparse.Namespace) -> None:
    """Measures one part in this process, and prints a row a line."""
    shape(options)
    try:
        for found in PARTS[options.part][0](options):
            lab.say(json.dumps(found, allow_nan=False))
    except (RuntimeError, MemoryError, RidgelineError) as error:
        if not lab.out_of_memory(error) and not isinstance(error, RidgelineError):
            raise
        first = (str(error).splitlines() or ["no more is known"])[0]
        lab.say(json.dumps(row(options.part, options, direction="all", status="left out", reason=first)))
    lab.say(json.dumps({"done": options.part}))
