"""Measures the limits (the roof) of a machine: the highest bandwidth and FLOP/s that any function here reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.boundary import INTERPRETED, launch
from ridgeline.lab.measurement.clock import Function, Measurement, Timer, device_timer, last_level_cache, measure
from ridgeline.lab.measurement.products import codes, precision, products, rungs

Figure = dict[str, float]
CHUNKS = (1, 16, 128, 512)  # blocks of 16 KiB
BLOCKS = ((1024, 4), (2048, 8), (4096, 8), (8192, 16))
SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (16384, 2048, 2048),
    (16384, 8192, 8192),
    (16384, 16384, 16384),
)
CPU_SIDES = (256, 512, 1024, 2048, 4096)


@triton.jit
def _stream(  # type: ignore[no-untyped-def]
    a, b, out, n, READS: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr
):
    """Reads zero, one or two arrays and writes one array or, without WRITE, one sum per program."""
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = i.to(tl.float32)
    if READS > 0:
        x = tl.load(a + i, mask=inside, other=0.0)
    if READS > 1:
        x += tl.load(b + i, mask=inside, other=0.0)
    if WRITE:
        tl.store(out + i, x, mask=inside)
    else:
        tl.store(out + program, tl.sum(x, 0))


@triton.jit
def _spread(a, out, COPIES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes COPIES copies of an array, chunk after chunk of CHUNK blocks: only the first read of a chunk misses L2."""
    program = tl.program_id(0).to(tl.int64)
    source = program // (COPIES * CHUNK) * CHUNK + program % CHUNK
    i = tl.arange(0, BLOCK)
    tl.store(out + program * BLOCK + i, tl.load(a + source * BLOCK + i))


def _triton(a: Tensor, b: Tensor, out: Tensor, reads: int, write: bool) -> dict[str, Function]:
    def start(block: int, warps: int) -> None:
        grid = (triton.cdiv(a.numel(), block),)
        launch(_stream, grid, a, b, out, a.numel(), READS=reads, WRITE=write, BLOCK=block, num_warps=warps)

    return {f"triton {block}": partial(start, block, warps) for block, warps in BLOCKS}


def _spreads(a: Tensor, out: Tensor) -> dict[str, Function]:
    def start(chunk: int) -> None:
        launch(_spread, (out.numel() // 4096,), a, out, COPIES=4, CHUNK=chunk, BLOCK=4096, num_warps=8)

    return {f"triton {chunk}": partial(start, chunk) for chunk in CHUNKS}


def _streams(a: Tensor, b: Tensor, out: Tensor) -> dict[str, tuple[float, dict[str, Function]]]:
    """Returns for each bandwidth the number of arrays that one run moves, and the functions to time.

    The functions are PyTorch's, Triton's and, for the copy, the kernels of the op with roof="copy"."""
    quarter = a[: a.numel() // 4]
    ways: dict[str, tuple[float, dict[str, Function]]] = {
        "read": (1, {"sum": a.sum, "amax": a.amax, "norm": lambda: torch.linalg.vector_norm(a)}),
        "write": (
            1,
            {"fill_": lambda: out.fill_(1.5), "zero_": out.zero_, "arange": lambda: torch.arange(out.numel(), out=out)},
        ),
        "copy": (2, {"copy_": lambda: out.copy_(a), "neg": lambda: torch.neg(a, out=out)}),
        "spread": (1.25, {"copy_": lambda: out.view(4, -1).copy_(quarter)}),
        "add": (3, {"add": lambda: torch.add(a, b, out=out), "mul": lambda: torch.mul(a, b, out=out)}),
    }
    if a.is_cuda and not INTERPRETED:
        for name, reads, write in (("read", 1, False), ("write", 0, True), ("copy", 1, True), ("add", 2, True)):
            ways[name][1].update(_triton(a, b, out, reads, write))
        ways["spread"][1].update(_spreads(quarter, out))
        for rung in rungs("copy", a):
            ways["copy"][1][f"{rung.op.name} {rung.name}"] = partial(rung.launchers["fwd"], out, a)
    else:
        del ways["write"][1]["arange"]
    return ways


def _rate(work: float, found: Measurement) -> Figure:
    seconds = found.seconds
    return {"median": work / seconds["median"], "low": work / seconds["high"], "high": work / seconds["low"]}


def measure_roof(device: str, quick: bool = False, report: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Returns the fields of a roof row: bandwidths in bytes/s, matrix rates in FLOP/s, launch latency in microseconds.

    Arrays have 2 GiB on a GPU (less on a small one), and four times the last-level cache on a CPU. It takes about 20 s
    on a GPU and 10 s on a CPU.
    quick: takes about a third of that. report: called with the name of each measurement.
    """
    timer = device_timer(device)
    dice = torch.Generator(device).manual_seed(0)
    roof: dict[str, Any] = {}
    for name, figure in _bandwidths(timer, dice, quick):
        report(f"{name} bandwidth")
        roof[name] = figure()
    roof["matmul"] = {}
    for name in (
        ("float32", "tf32", "float16", "bfloat16") if device.startswith("cuda") else ("float32", "float16", "bfloat16")
    ):
        report(f"{name} matrix rate")
        with precision(name):
            roof["matmul"][name] = _matrix_rate(name, timer, dice, 0.6 if quick else 1.5)
    for name in codes(device):
        report(f"{name} matrix rate")
        roof["matmul"][name] = _rate_of_codes(name, roof["matmul"]["bfloat16"], timer, dice, 0.6 if quick else 1.5)
    report("launch latency")
    one = torch.ones(1, device=device)
    empty = _triton(one, one, one, 0, True)["triton 1024"] if one.is_cuda and not INTERPRETED else lambda: one.add_(1)
    roof["launch_us"] = measure({"empty": empty}, budget=0.2, timer=timer, details=False)["empty"].median * 1e6
    return roof


def _bandwidths(timer: Timer, dice: torch.Generator, quick: bool) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yields each bandwidth's name, and a function that measures it as the best of several functions."""
    gpu = dice.device.type == "cuda"
    if gpu:
        size = min(2 << 30, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory // 16)
    else:
        size = min(max(64 << 20, 4 * last_level_cache()), 256 << 20)
    a, b = (torch.randn(size >> 25 << 23, device=dice.device, generator=dice) for _ in range(2))
    for name, (arrays, ways) in _streams(a, b, torch.empty_like(a)).items():

        def figure(
            arrays: float = arrays, ways: dict[str, Function] = ways, writes: int | None = 0 if name == "read" else None
        ) -> Figure:
            budget = 0.3 if quick else 0.8
            found = measure(ways, budget=budget, min_reps=10 if gpu else 5, timer=timer, details=False, writes=writes)
            return _rate(arrays * a.nbytes, min(found.values(), key=lambda m: m.median))

        yield name, figure


def _rate_of_codes(
    name: str, half: dict[str, Any], timer: Timer, dice: torch.Generator, budget: float
) -> dict[str, Any]:
    """Returns the best rate of 8-bit matrix products, but at least twice the bfloat16 rate measured just before.

    The matrix units take two 8-bit numbers for each bfloat16 one. If no product reaches that rate, the roof is the
    stricter one, and `found` holds the rate and shape that products reached."""
    found = _matrix_rate(name, timer, dice, budget)
    if found["median"] >= 2 * half["median"]:
        return found
    return {**half, **{end: 2 * half[end] for end in ("median", "low", "high")}, "twice": "bfloat16", "found": found}


def _matrix_rate(name: str, timer: Timer, dice: torch.Generator, budget: float) -> dict[str, Any]:
    """Returns the best rate of a matrix product over a list of shapes, without those that would take too long.

    The products are torch's and, in 8 bits, also those of the op with this roof."""
    gpu = dice.device.type == "cuda"
    reps = 10 if gpu else 3
    shapes = SHAPES if gpu else [(side, side, side) for side in CPU_SIDES]
    best: dict[str, Any] = {"median": 0.0}
    for m, n, k in shapes:
        work = 2 * m * n * k
        if best["median"] and 2 * (reps + 4) * work / best["median"] > budget:
            continue
        ways, written = products(name, m, n, k, dice)
        found = measure(ways, budget=budget / len(shapes), min_reps=reps, timer=timer, details=False, writes=written)
        rate = _rate(work, min(found.values(), key=lambda f: f.median))
        if rate["median"] > best["median"]:
            best = {**rate, "shape": [m, n, k]}
    return best
