"""Times products of many shapes into a file that a later run continues, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ridgeline.lab.analysis.mamf.shapes import Shape
from ridgeline.lab.measurement.clock import device_timer, measure
from ridgeline.lab.measurement.products import codes, precision, products
from ridgeline.lab.measurement.sheet import Sheet
from ridgeline.op import RidgelineError

Row = dict[str, Any]
NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "tf32": "tf32",
    "f32": "float32",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}
SUBJECT = "mamf"
EACH = 0.02  # seconds of timing for a shape, at least
REPS = 10


def dtypes(text: str | None, device: str) -> list[str]:
    """The dtypes that a list of short names such as "bf16,fp8" means; by default all that the device multiplies.

    Raises RidgelineError for a name that is not known, or that the device has no products for.
    """
    gpu = device.startswith("cuda")
    can = ["bfloat16", "float16", "float32"] if gpu else ["float32", "bfloat16"]
    if gpu and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0):
        can.insert(2, "tf32")
    can += codes(device)[::-1]
    if text is None:
        return can
    names = [part.strip() for part in text.split(",")]
    if wrong := [name for name in names if name not in NAMES]:
        raise RidgelineError(f"there is no dtype {wrong[0]!r} here; the dtypes are {', '.join(NAMES)}")
    if cannot := [name for name in names if NAMES[name] not in can]:
        able = ", ".join(short for short, name in NAMES.items() if name in can)
        raise RidgelineError(f"this {'GPU' if gpu else 'CPU'} has no fast products of {cannot[0]}; it has {able}")
    return [NAMES[name] for name in names]


def run(
    shapes: list[Shape],
    names: list[str],
    sheet: Sheet,
    seconds: float,
    device: str,
    report: Callable[[str, int, int], None],
) -> Iterator[Row]:
    """Times what the sheet does not hold yet until the seconds are over, but at least one; yields the new rows.

    A row has the median and the best time of the best layout, and rates in FLOP/s. A product that fails, for example
    because memory runs out, is a row with the reason.
    """
    known = {(row["dtype"], *row["shape"]) for row in sheet.rows if row["what"] == "product"}
    left = [(shape, name) for shape in shapes for name in names if (name, *shape) not in known]
    timer, dice = device_timer(device), torch.Generator(device).manual_seed(0)
    until = time.monotonic() + seconds
    for number, (shape, name) in enumerate(left):
        if number and time.monotonic() > until:
            return
        report(f"{name} {'x'.join(map(str, shape))}", number, len(left))
        try:
            yield sheet.write("product", **_timed(name, shape, timer, dice))
        except (RuntimeError, RidgelineError) as error:  # also what is out of memory
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            yield sheet.write("product", "failed", dtype=name, shape=list(shape), reason=reason)


def _timed(name: str, shape: Shape, timer: Any, dice: torch.Generator) -> Row:
    m, n, k = shape
    with precision(name):
        ways, written = products(name, m, n, k, dice)
        reps = REPS if dice.device.type == "cuda" else 3
        found = measure(ways, budget=EACH, min_reps=reps, timer=timer, details=False, writes=written)
    way, best = min(found.items(), key=lambda item: item[1].median)
    work = 2 * m * n * k
    return {
        "dtype": name,
        "shape": [m, n, k],
        "way": way,
        "seconds": best.seconds,
        "rate": work / best.median,
        "best": work / min(best.samples),
    }


def kernel_of(row: Row) -> str | None:
    """The name of the kernel that computes a product on the GPU, from PyTorch's profiler."""
    from ridgeline.lab.analysis.graph.pace import trace_of

    m, n, k = row["shape"]
    with precision(row["dtype"]):
        ways, _ = products(row["dtype"], m, n, k, torch.Generator("cuda").manual_seed(0))
        trace = trace_of(ways[row["way"]], 1)
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    return max(kernels, key=lambda e: e["dur"])["name"] if kernels else None
