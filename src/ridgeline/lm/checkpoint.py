"""Activation checkpointing: the memory and the operations of each way of keeping less, and the best for a memory."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.lm import lab
from ridgeline.lm.memory import GIB, card_of, gib, measured, predicted
from ridgeline.lm.setup import build, flags, named, shape
from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError

SECONDS = 3.0  # for the timed steps of a way


@dataclass(frozen=True)
class Way:
    """A way of keeping less for backward, as `Transformer` takes it."""

    every: int = 0
    nested: bool = False
    remake: str | None = None

    @property
    def name(self) -> str:
        if self.remake:
            return "cheap results again"
        if self.nested:
            return "nested halves"
        return f"{self.every} a checkpoint" if self.every else "keep everything"

    @property
    def flags(self) -> dict[str, Any]:
        """The options that choose it."""
        return {"checkpoint": self.every, "nested": self.nested, "remake": self.remake}

    def recomputed(self, layers: int) -> int:
        """Returns how many forwards of a layer backward adds.

        A checkpoint runs its forward again only up to the last tensor that it needs: the input of its last half."""
        leaf = max(1, self.every)

        def again(count: int) -> int:
            if count <= leaf:
                return count
            half = max(leaf, math.ceil(count / 2))
            parts = [min(half, count - start) for start in range(0, count, half)]
            return sum(parts[:-1]) + sum(map(again, parts))

        if not (self.every or self.nested):
            return 0
        if not self.nested or layers <= leaf:
            return layers
        half = max(leaf, math.ceil(layers / 2))
        return sum(again(min(half, layers - start)) for start in range(0, layers, half))

    def operations(self, size: Size, batch: int, context: int) -> int:
        """Returns the operations of a step. The cheap results' own, which only read and write memory, do not count."""
        head = 2 * batch * context * size.vocabulary * size.width
        forward = size.products(batch * context) - head + size.scores(batch, context)
        return size.step(batch, context) + forward * self.recomputed(size.layers) // size.layers


def ways(layers: int) -> list[Way]:
    """Returns the ways to compare: block sizes that are powers of two, the square root of the layers, and others."""
    sizes = {1 << n for n in range(layers.bit_length()) if 1 << n < layers} | {round(math.sqrt(layers))} - {layers}
    blocks = [Way(every) for every in sorted(sizes)]
    return [Way(), Way(remake="cheap"), *blocks, *([Way(1, nested=True)] if layers > 2 else [])]


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser, mode="step")
    add = parser.add_argument
    add("--card", metavar="NAME", help="predict for this card, or cpu (the GPU here, else h100)")
    add("--memory", type=float, metavar="GIB", help="say which way is quickest within so much memory")
    add("--steps", type=int, default=5, metavar="N", help="timed steps of each way, on a GPU, fewer if slow (5)")
    lab.record_flag(parser)


def run(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the peak, the median time of a step and how many were timed on this GPU, or that memory ran out.

    The step whose memory is measured is the first that is timed; it follows a warm-up. No step begins after SECONDS."""
    found: list[float] = []
    try:
        setup = build(argparse.Namespace(**vars(options) | way.flags))

        def timed() -> None:
            lab.synchronize(setup.tokens.device)
            start = time.perf_counter()
            setup.step(options.mode)
            lab.synchronize(setup.tokens.device)
            found.append(time.perf_counter() - start)

        peak = measured(setup, options.mode, timed)
        while len(found) < options.steps and sum(found) < SECONDS:
            timed()
        return {"measured_bytes": peak, "seconds": statistics.median(found), "steps": len(found)}
    except torch.OutOfMemoryError:
        return {"why": "out of memory"}
    finally:
        torch.cuda.empty_cache()


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each way: bytes at the peak, the most that activations take, operations and, on a GPU, what was
    measured."""
    size, card = shape(options), card_of(options)
    for way in ways(size.layers):
        use = predicted(size, argparse.Namespace(**vars(options) | way.flags), card)
        operations = way.operations(size, options.batch, options.context)
        row = {"way": way.name, "every": way.every, "nested": way.nested, "remake": way.remake, "peak_bytes": use.peak,
               "kept_bytes": max(use.curve["activations"]), "operations": operations}  # fmt: skip
        row["more"] = operations / Way().operations(size, options.batch, options.context)
        if torch.cuda.is_available() and options.device != "cpu" and options.card is None:
            row |= run(way, options)
        yield row


def best(found: list[dict[str, Any]], nbytes: float) -> dict[str, Any]:
    """Returns the way with the fewest operations, then the least memory, that fits.

    Measured peaks and times count before predicted ones. Raises RidgelineError if none fits."""
    fits = [r for r in found if r.get("measured_bytes", r["peak_bytes"]) <= nbytes and "why" not in r]
    if not fits:
        least = min(found, key=lambda r: r["peak_bytes"])
        raise RidgelineError(
            f"lm: no way fits into {gib(nbytes)}; the least is {least['way']!r} with {gib(least['peak_bytes'])}"
        )
    return min(fits, key=lambda r: (r.get("seconds", 0), r["operations"], r["remake"] is not None, r["peak_bytes"]))


def main(options: argparse.Namespace) -> int:
    """Prints a table of the ways, and the best for a memory."""
    if options.mode == "forward":
        raise RidgelineError("lm: checkpoint needs --mode backward or step: forward alone keeps nothing")
    if options.checkpoint or options.nested or options.remake:
        raise RidgelineError("lm: `lm checkpoint` tries all ways: leave --checkpoint, --nested and --remake out")
    if options.memory is not None and not options.memory > 0:
        raise RidgelineError(f"lm: --memory must be above 0, but is {options.memory}")
    for name in ("context", "batch", "steps"):
        if getattr(options, name) < 1:
            raise RidgelineError(f"lm: --{name} must be at least 1, but is {getattr(options, name)}")
    lab.recordable(options.record)
    about, found = named(options) | {"card": card_of(options) or "cpu"}, []
    for row in rows(options):
        found.append(row)
        if options.record:
            lab.record(options.record, [about | row], "checkpoint")
        if not options.json and "measured_bytes" in row:
            lab.say(f"{row['way']}: {gib(row['measured_bytes'])}, {row['seconds'] * 1e3:.1f} ms")
    chosen = best(found, options.memory * GIB) if options.memory else None
    if options.json:
        print(json.dumps({"ways": found, "best": chosen}))
        return 0
    title = f"{options.size}, {options.mode}, {options.batch} x {options.context} tokens, {card_of(options) or 'cpu'}"
    shown = []
    for row in found:
        there = gib(row["measured_bytes"]) if "measured_bytes" in row else "-"
        took = f"{row['seconds'] * 1e3:.1f} ms" if "seconds" in row else "-"
        peak, kept = gib(row["peak_bytes"]), gib(row["kept_bytes"])
        shown.append(
            [row["way"], peak, kept, there, f"{row['operations'] / 1e12:.2f} TF", f"{row['more']:.2f} x", took]
        )
    figures = "peak, predicted", "activations", "measured", "operations", "of a plain step", "time"
    lab.print_table(title, ["way"], figures, shown)
    for row in found:
        if "why" in row:
            lab.say(f"{row['way']}: {row['why']}")
    if chosen:
        print(f"quickest within {options.memory:g} GiB: {chosen['way']}")
    return 0
