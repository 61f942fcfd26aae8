"""Checks strategies on several processes, then times them beside what is predicted."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.lab import units
from ridgeline.lab.measurement import store
from ridgeline.lab.measurement.parallel_clock import Row, Work
from ridgeline.lab.measurement.parallel_cuts import PARTS as CUTS
from ridgeline.lab.measurement.parallel_rank import row as of_a_pretended_rank
from ridgeline.lab.measurement.parallel_ranks import PARTS, formulas, rows
from ridgeline.lab.measurement.parallel_ranks import ranked as of_one_rank
from ridgeline.lab.tables import print_table
from ridgeline.lm.sizes import SIZES, size
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups
from ridgeline.parallel.cluster import cluster

POWERS = {"K": 10, "M": 20, "G": 30}
GLOO = "gloo on one machine: these are figures of this machine's memory and its cores, and of no network"

SHARED = (
    "ring, tensor, pipeline: predicted is a rank's part of the time alone, and what it moves; idle is the share of the "
    "step beyond an N-th of the time alone; kept: activations of stages and micro-batches"
)

OWN = (
    "step, host, rate and memory are this rank's own; memory's formula is of weights and states; to move is predicted "
    "from {}'s links, and hides under the step where it can"
)


def whole(text: str) -> int:
    """A flag's type: a number of 1 or more."""
    if not text.strip().isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"takes a whole number of 1 or more, and got {text!r}")
    return int(text)


def wholes(text: str) -> tuple[int, ...]:
    """A flag's type: numbers of 1 or more, with commas."""
    return tuple(whole(part) for part in text.split(","))


def amounts(text: str) -> tuple[int, ...]:
    """A flag's type: bytes such as 64K,1M,1G."""
    found = []
    for part in text.upper().split(","):
        number, power = part.strip().rstrip("B"), 0
        if number[-1:] in POWERS:
            number, power = number[:-1], POWERS[number[-1]]
        found.append(whole(number) << power)
    return tuple(found)


def numbers(text: str) -> tuple[float, ...]:
    """A flag's type: positive numbers, with commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise argparse.ArgumentTypeError(f"takes positive numbers, and got {text!r}")
    return found


def words(text: str) -> tuple[str, ...]:
    """A flag's type: names, with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "part",
        nargs="?",
        choices=(*PARTS, "rank"),
        help="only this (all but rank: one rank of a world that is not there)",
    )
    add("--world", type=wholes, metavar="N", help="processes, with commas (2); under torchrun, what it started")
    add("--backend", choices=("gloo", "nccl"), help="gloo on the CPU, nccl on GPUs (nccl if there are enough GPUs)")
    add("--bytes", type=amounts, default=(2**16, 2**20, 2**22), metavar="N", help="of a collective (64K,1M,4M)")
    add("--size", default="tiny", metavar="NAME", help=f"of the model: one of {', '.join(SIZES)} (tiny)")
    add("--layers", type=whole, metavar="N", help="instead of the size's layers")
    add("--context", type=whole, default=128, metavar="N", help="tokens of a sequence (128)")
    add("--batch", type=whole, default=2, metavar="N", help="sequences of each rank (2)")
    add("--buckets", type=numbers, default=(), metavar="MB", help="further buckets of data: 1,10,100,1000")
    add("--microbatches", type=whole, metavar="N", help="of a pipeline, each of --batch sequences (twice the ranks)")
    add("--rungs", type=words, default=(), metavar="NAMES", help="only these rungs")
    add("--budget", type=float, default=0.5, metavar="S", help="seconds for the timing of a row (0.5)")
    add("--warmups", type=whole, default=5, metavar="N", help="runs before those that are timed (5)")
    add("--cluster", default="dgx-h200", metavar="NAME", help="whose links predict what rank's network adds (dgx-h200)")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds until a rank counts as lost (300)")
    add("--dry", action="store_true", help="only print what strategies move and hold, by formula; needs no GPU")
    add("--record", type=Path, metavar="FILE", help="append the rows to this file of JSON lines")
    add("--json", action="store_true", help="print JSON")


def measured(options: argparse.Namespace) -> list[Row] | None:
    """Returns the rows of all worlds; None on a rank of torchrun that has nothing to print."""
    model = size(options.size, layers=options.layers)
    gpus = torch.cuda.device_count()
    launched = all(name in os.environ for name in groups.LAUNCHED)
    parts = (options.part,) if options.part else PARTS

    if options.dry and options.part == "collectives":
        raise RidgelineError(f"parallel bench: --dry is for strategies: {', '.join(PARTS[1:])}")

    def work(backend: str) -> Work:
        impl = "ridgeline" if backend == "nccl" else "torch"
        return Work(parts, options.bytes, model, options.context, options.batch, impl, options.budget,
                    options.buckets, options.rungs, options.warmups, options.microbatches)  # fmt: skip

    if options.part == "rank":
        return pretended(options, replace(work("nccl"), parts=()))
    if options.dry:
        return [row for world in options.world or (2,) for row in formulas(work("nccl"), world)]
    if launched:
        if options.world:
            raise RidgelineError("parallel bench: torchrun has chosen the world already; leave --world out")
        device = groups.start(options.backend, timeout=options.timeout)
        found = rows(work("nccl" if device.type == "cuda" else "gloo"), device)
        here = groups.rank()
        groups.leave()
        return found if here == 0 else None
    found = []
    for world in options.world or (2,):
        backend = options.backend or ("nccl" if gpus >= world else "gloo")
        if backend == "nccl" and gpus < world:
            raise RidgelineError(
                f"parallel bench: nccl needs a GPU for each of {world} processes, and there are {gpus}; "
                "use --backend gloo"
            )
        found += groups.spawn(of_one_rank, world, work(backend), backend=backend, timeout=options.timeout)[0]
    groups.close()
    return found


def pretended(options: argparse.Namespace, work: Work) -> list[Row]:
    """Returns the rows of one rank of each world, by our ops and by torch's; on the CPU by torch's alone."""
    if options.backend or options.dry:
        raise RidgelineError("parallel bench: rank runs one process without a backend; leave --backend and --dry out")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    impls = [name for name in ("ridgeline", "torch")[not gpu :] if not work.only or name in work.only]
    if not impls:
        raise RidgelineError("parallel bench: rank has the rungs ridgeline, on a GPU, and torch")
    links = cluster(options.cluster)
    return [of_a_pretended_rank(replace(work, impl=impl), world, device, links)
            for world in options.world or (8,) for impl in impls]  # fmt: skip


def show_rank(found: list[Row]) -> None:
    """Prints what one rank of each world does."""
    for world in dict.fromkeys(r["world"] for r in found):
        cells = [
            [r["rung"], units.seconds(r["seconds"]["median"]), units.spread(r["seconds"]), units.seconds(r["host"]),
             units.scaled(r["rate"], "tokens/s"), units.size(r["memory"]), units.size(r["memory_predicted"]["after"]),
             units.size(r["sent"]), formula(r), units.seconds(r["predicted"])]
            for r in found if r["world"] == world and not r["wrong"]
        ]  # fmt: skip
        some = next(r for r in found if r["world"] == world)
        figures = ["step", "±", "host", "rate", "memory", "formula", "sends", "formula", "to move"]
        print_table(f"rank 0 of {world} under FSDP2 on {some['device']}, no other rank", ["ops"], figures, cells)
    print(OWN.format(found[0]["cluster"]), flush=True)
    for r in found:
        if r["wrong"]:
            print(f"rank, {r['rung']}, world {r['world']}: {r['wrong']}", flush=True)


def moves(row: Row) -> str:
    return str(sum(row["calls"].values()))


def exposed(row: Row) -> str:
    return "in the noise" if row["exposed"] is None else units.percent(row["exposed"])


def formula(row: Row) -> str:
    """Returns "same" if each collective was called as predicted and moved as many bytes, or what was predicted."""
    if (row["calls"], row["bytes_moved"]) == (row["calls_predicted"], row["bytes_predicted"]):
        return "same"
    return f"{sum(row['calls_predicted'].values())}, {units.size(sum(row['bytes_predicted'].values()))}"


def show_collectives(some: list[Row]) -> None:
    cells = [
        [r["what"], r["rung"], units.size(r["bytes"]), units.seconds(r["seconds"]["median"]),
         units.spread(r["seconds"]), units.seconds(r["predicted"]), units.scaled(r["algorithm"], "B/s"),
         units.scaled(r["bus"], "B/s"), moves(r), formula(r)]
        for r in some if not r["wrong"] and "seconds" in r
    ]  # fmt: skip
    figures = ["bytes", "time", "±", "predicted", "algorithm", "bus", "calls", "formula"]
    print_table(f"collectives, world {some[0]['world']}, {some[0]['backend']}", ["what", "rung"], figures, cells)


def show_strategies(part: str, some: list[Row]) -> None:
    cells, held = [], []
    for r in (r for r in some if not r["wrong"]):
        times = [units.seconds(r["seconds"]["median"]), units.spread(r["seconds"])]
        if "exposed" not in r:
            cells.append([r["rung"], *times, *[units.DASH] * 5])
            continue
        cells.append([r["rung"], *times, exposed(r), units.seconds(r["predicted"]), moves(r),
                      units.size(sum(r["bytes_moved"].values())), formula(r)])  # fmt: skip
        held.append(remembered(r))
    title = f"{part}, world {some[0]['world']}, {some[0]['backend']}, {some[0]['impl']}'s ops"
    figures = ["step", "±", "exposed", "to move, predicted", "calls", "bytes", "formula"]
    print_table(title, ["rung"], figures, cells)
    show_memory(part, some[0], held)


def remembered(row: Row) -> list[str]:
    """Returns the cells of a row of memory."""
    there, said = row["memory"], row["memory_predicted"]
    pairs = [units.size(kind[name]) for name in ("init", "before", "after") for kind in (there, said)]
    return [row["rung"], *pairs, units.size(said["buffers"])]


def show_memory(part: str, one: Row, cells: list[list[str]]) -> None:
    figures = ["init", "formula", "before step", "formula", "after step", "formula", "buffers, formula"]
    gpu = one["device"] != "cpu"
    print_table(f"{part}, memory of a rank" + (", peaks" if gpu else ", counted"), ["rung"], figures, cells)


def show_cuts(part: str, some: list[Row]) -> None:
    """Prints a part whose ranks share one batch."""
    cells, held = [], []
    waits = part == "pipeline"
    for r in (r for r in some if not r["wrong"] and "seconds" in r):
        times = [units.seconds(r["seconds"]["median"]), units.spread(r["seconds"])]
        if "alone" not in r:
            cells.append([r["rung"], *times, *[units.DASH] * (8 if waits else 5)])
            continue
        idle = []
        if waits:
            idle = [units.percent(r["idle"]), units.percent(r["idle_predicted"]), f"{r['live']}, {r['live_predicted']}"]
        moves_ = [moves(r), units.size(sum(r["bytes_moved"].values())), formula(r)]
        cells.append([r["rung"], *times, units.seconds(r["step_predicted"]), *idle,
                      units.seconds(r["predicted"]), *moves_])  # fmt: skip
        if "memory" in r:
            held.append(remembered(r))
    one = some[0]
    title = f"{part}, world {one['world']}, {one['backend']}, {one['impl']}'s ops"
    if waits:
        title += f", {one['layers']} layers, {one['microbatches']} micro-batches; rank 0"
    figures = ["step", "±", "predicted", *(["idle", "predicted", "kept, formula"] if waits else []), "to move",
               "calls", "bytes", "formula"]  # fmt: skip
    print_table(title, ["rung"], figures, cells)
    if held:
        show_memory(part, one, held)


def show_formulas(found: list[Row]) -> None:
    """Prints what strategies move and hold, by formula."""
    for world, part in dict.fromkeys((r["world"], r["part"]) for r in found):
        cells = [
            [r["rung"], str(sum(r["calls_predicted"].values())), units.size(sum(r["bytes_predicted"].values())),
             units.size(r["sent"]),
             *([units.size(n) for n in r["memory_predicted"].values()] if r["memory_predicted"] else [units.DASH] * 4)]
            for r in found if (r["world"], r["part"]) == (world, part)
        ]  # fmt: skip
        figures = ["calls", "bytes", "a rank sends", "init", "before step", "after step", "buffers"]
        print_table(
            f"{part}, world {world}, by formula: traffic of a step, and memory of a rank", ["rung"], figures, cells
        )


def show(found: list[Row]) -> None:
    """Prints the tables of each world and part."""
    for world in dict.fromkeys(r["world"] for r in found):
        here = [r for r in found if r["world"] == world]
        one = here[0]
        link = f"a hop takes {units.seconds(one['latency'])}, a link gives {units.scaled(one['bandwidth'], 'B/s')}"
        print(f"world {world}, {one['backend']} on {one['device']}: {link}, by the engine's all-reduce", flush=True)
        for part in dict.fromkeys(r["part"] for r in here):
            some = [r for r in here if r["part"] == part]
            if part == "collectives":
                show_collectives(some)
            else:
                show_cuts(part, some) if part in CUTS else show_strategies(part, some)
    print("bus: bytes that a rank sends in a ring, per second; exposed: the share of the step beyond the same without "
          "communication; to move, predicted: if nothing overlaps", flush=True)  # fmt: skip
    if any(r["part"] in CUTS for r in found):
        print(SHARED, flush=True)
    if any(r["backend"] == "gloo" for r in found):
        print(GLOO, flush=True)
    for r in found:
        if r["wrong"]:
            print(f"{r['part']}, {r['rung']}, world {r['world']}: wrong, so not timed: {r['wrong']}", flush=True)
    refused = [f"{r['part']}, {r['rung']}, world {r['world']}: not run: {r['refused']}"
               for r in found if r.get("refused")]  # fmt: skip
    for line in dict.fromkeys(refused):  # a collective says it for each size
        print(line, flush=True)


def main(options: argparse.Namespace) -> int:
    """Prints a table for each part and world. The exit code is 1 if a rung is wrong."""
    found = measured(options)
    if found is None:
        return 0
    if options.dry:
        print(json.dumps(found)) if options.json else show_formulas(found)
        return 0
    if options.record:
        about: dict[str, Any] = {"type": "parallel bench", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        store.append(options.record, [about | {"torch": torch.__version__} | store.rounded(row) for row in found])
    if options.json:
        print(json.dumps(found))
    else:
        show_rank(found) if options.part == "rank" else show(found)
    return int(any(row["wrong"] for row in found))
