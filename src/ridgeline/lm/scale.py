"""Times matrix products and an MLP as they grow, and fits how time follows size. All times are milliseconds.

The MLP is that of Stanford CS336, lecture 6: linear layers and GELU, the mean as loss, gradients that add up, and no
optimizer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline.lm import lab
from ridgeline.lm.lab import units
from ridgeline.lm.setup import PRECISIONS, chosen_device

SIDES = {"cuda": (1024, 2048, 4096, 8192, 16384), "cpu": (1024, 2048)}  # the lecture's
FACTORS = (1, 2, 3, 4, 5)
AXES = ("steps", "layers", "batch", "width")


@dataclass(frozen=True)
class Stack:
    """The lecture's MLP: square layers of `width`, a batch, and steps of forward and backward."""

    width: int = 256
    layers: int = 4
    batch: int = 256
    steps: int = 2

    @property
    def flops(self) -> int:
        """Operations of all steps: a product forward and two backward, one in the first layer, whose input needs no
        gradient."""
        return 2 * self.batch * self.width**2 * (3 * self.layers - 1) * self.steps

    def function(self, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
        """Returns a function without arguments that runs the steps."""
        layers = [m for _ in range(self.layers) for m in (nn.Linear(self.width, self.width), nn.GELU())]
        model, x = nn.Sequential(*layers).to(device, dtype), torch.randn(self.batch, self.width)
        x = x.to(device, dtype)

        def run() -> None:
            for _ in range(self.steps):
                model(x).mean().backward()

        return run


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--what", choices=("all", "products", "mlp"), default="all", help="what is timed (all)")
    add("--sides", type=lab.wholes, metavar="N", help="sides of the square products, with commas (the lecture's)")
    add("--factors", type=lab.wholes, default=list(FACTORS), metavar="N", help="multiples of the MLP (1,2,3,4,5)")
    for name, value in asdict(Stack()).items():
        add(f"--{name}", type=lab.positive, default=value, metavar="N", help=f"of the MLP at 1 ({value})")
    add("--precision", choices=PRECISIONS, default="float32", help="of all tensors (float32)")
    add("--budget", type=float, default=0.5, metavar="S", help="seconds for the timing of each row (0.5)")
    add("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    add("--record", type=Path, metavar="FILE", help="append the tables to this file of JSON lines")
    add("--json", action="store_true", help="print JSON")


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float | None:
    """Returns p of the fit time = c size^p, by least squares of the logarithms; None for fewer than two sizes."""
    if len(set(sizes)) < 2:
        return None
    x, y = [math.log(s) for s in sizes], [math.log(t) for t in times]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def overhead(flops: Sequence[float], times: Sequence[float]) -> float:
    """Returns the time of the smallest size beyond what its operations take at the best rate of all sizes."""
    smallest = min(range(len(flops)), key=flops.__getitem__)
    best = max(f / t for f, t in zip(flops, times))
    return times[smallest] - flops[smallest] / best


def table(name: str, sizes: Sequence[int], flops: Sequence[int], found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns a table: rows with size, median and interval in ms, and FLOP/s; the exponent over all sizes and over the
    larger half; and the overhead at the smallest size, in ms."""
    times = [s["median"] for s in found]
    half = len(sizes) // 2
    rows = [
        {"size": n, "ms": {end: s[end] * 1e3 for end in ("median", "low", "high")}, "flops_per_second": f / s["median"]}
        for n, f, s in zip(sizes, flops, found, strict=True)
    ]
    return {
        "name": name,
        "rows": rows,
        "exponent": exponent(sizes, times),
        "exponent_of_larger_half": exponent(sizes[half:], times[half:]),
        "overhead_ms": overhead(flops, times) * 1e3,
    }


def seconds_of(run: Callable[[], Any], device: torch.device, budget: float) -> dict[str, float]:
    """Returns the median of a function's times with its 95% interval, in seconds."""
    return lab.measure({"run": run}, device, budget)["run"].seconds


def product_table(sides: Sequence[int], device: torch.device, dtype: torch.dtype, budget: float) -> dict[str, Any]:
    """Returns the table of square matrix products."""
    found = []
    for side in sides:
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        found.append(seconds_of(partial(torch.matmul, a, b), device, budget))
        del a, b
        lab.release(device)
    return table("products", sides, [2 * side**3 for side in sides], found)


def stack_table(
    base: Stack, axis: str, factors: Sequence[int], device: torch.device, dtype: torch.dtype, budget: float
) -> dict[str, Any]:
    """Returns the table of the MLP along one of AXES."""
    stacks = [replace(base, **{axis: getattr(base, axis) * factor}) for factor in factors]
    found = [seconds_of(stack.function(device, dtype), device, budget) for stack in stacks]
    return table(axis, [getattr(s, axis) for s in stacks], [s.flops for s in stacks], found)


def tables(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the tables of the flags."""
    device, dtype = chosen_device(options), PRECISIONS[options.precision]
    made = []
    if options.what != "mlp":
        sides = options.sides or SIDES[device.type]
        made.append(product_table(sides, device, dtype, options.budget))
    if options.what != "products":
        base = Stack(options.width, options.layers, options.batch, options.steps)
        made += [stack_table(base, axis, options.factors, device, dtype, options.budget) for axis in AXES]
    return made


def show(made: dict[str, Any]) -> None:
    """Prints a table with what was fitted."""
    rows = []
    for row in made["rows"]:
        spread = units.spread(row["ms"])
        rate = units.scaled(row["flops_per_second"], "FLOP/s")
        rows.append([str(row["size"]), f"{units.digits(row['ms']['median'])} ms", spread, rate])
    title = "square matrix products, by side" if made["name"] == "products" else f"MLP, by {made['name']}"
    lab.print_table(title, ["size"], ["time", "95%", "rate"], rows)
    whole, half = made["exponent"], made["exponent_of_larger_half"]
    if whole is not None:
        larger = "" if half is None else f", as size^{half:.2f} over the larger half"
        lab.say(f"time grows as size^{whole:.2f}{larger}")
    lab.say(f"overhead at the smallest size, against the best rate of all: {units.digits(made['overhead_ms'])} ms")


def main(options: argparse.Namespace) -> int:
    """Prints the tables."""
    lab.above_zero("scale", sides=options.sides or [1], factors=options.factors)
    lab.recordable(options.record)
    made = tables(options)
    if options.record:
        lab.record(options.record, made, "scale")
    if options.json:
        print(json.dumps(made))
        return 0
    for one in made:
        show(one)
    return 0
