"""Times attention alone over the assignment's grids: forward, backward and both, and what stays in memory between."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch.autograd.graph import saved_tensors_hooks

from ridgeline.lm import lab
from ridgeline.lm.lab import units
from ridgeline.lm.setup import PRECISIONS
from ridgeline.op import RidgelineError, get

# Our name of an implementation: the op's name of it.
IMPLS = {name: name for name in ("tiled", "torch", "triton", "gluon")} | {"plain": "naive", "compiled": "compile"}
DIMS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Point:
    """A call of attention: `batch` matrices q, k and v of (seq, dim), without heads."""

    batch: int
    seq: int
    dim: int
    dtype: str
    causal: bool

    @property
    def flops(self) -> int:
        """Operations of a forward pass: both products, over the pairs that see each other."""
        pairs = self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2
        return 4 * self.batch * self.dim * pairs

    @property
    def scores(self) -> int:
        """Bytes of one matrix of scores for each of the batch, in the dtype."""
        return self.batch * self.seq**2 * PRECISIONS[self.dtype].itemsize

    def kept(self, impl: str) -> int | None:
        """Returns the bytes that backward needs, by formula; None for compiled, where the compiler decides.

        plain: q, k, v, the exponentials and each row's sum in float32, the probabilities in the dtype and, if causal, a
        mask of a byte per pair. Others: q, k, v, the output and the logarithm of each row's sum in float32."""
        width, rows = PRECISIONS[self.dtype].itemsize, self.batch * self.seq
        if impl == "compiled":
            return None
        if impl == "plain":
            mask = self.causal * self.seq**2
            return 3 * rows * self.dim * width + rows * self.seq * 4 + self.scores + mask + 4 * rows
        return 4 * rows * self.dim * width + 4 * rows


# The assignment's: pytorch_attention has 20 points, flash_benchmarking 80.
GRIDS: dict[str, list[Point]] = {
    "small": [Point(2, seq, dim, "float32", True) for seq in (64, 256) for dim in (16, 64)],
    "20": [Point(8, seq, dim, "float32", False) for seq in (256, 1024, 4096, 8192, 16384) for dim in DIMS],
    "80": [
        Point(1, 1 << power, dim, dtype, True)
        for power in range(7, 17)
        for dim in DIMS
        for dtype in ("bfloat16", "float32")
    ],
}
DEFAULTS = {"small": "plain,tiled,torch", "20": "plain,compiled", "80": "plain,triton"}


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid", choices=GRIDS, default="small", help="small; 20: pytorch_attention's; 80: flash_benchmarking's")
    add("--impls", type=lab.names, metavar="NAMES", help=f"some of {', '.join(IMPLS)} (the problem's own)")
    add("--dim", type=lab.names, metavar="N", help="only these head dimensions, with commas")
    add("--seq", type=lab.names, metavar="N", help="only these lengths, with commas")
    add("--dtype", choices=("bfloat16", "float32"), help="only this dtype")
    add("--steps", type=lab.positive, metavar="N", help="runs of each (as many as the budget takes; at least 5)")
    add("--budget", type=float, default=0.5, metavar="S", help="seconds for the timing of each row (0.5)")
    add("--limit", type=float, default=2.0, metavar="S", help="leave out a row if a call takes longer (2)")
    add("--device", choices=("cuda", "cpu"), help="the GPU if there is one")
    lab.record_flag(parser)
    add("--json", action="store_true", help="print JSON")


def implementation(name: str) -> Callable[..., torch.Tensor]:
    """Returns attention by an implementation of IMPLS. Raises RidgelineError if there is none of that name."""
    if name not in IMPLS:
        raise RidgelineError(f"lm attention: there is no implementation {name!r}; there are {', '.join(IMPLS)}")
    return partial(get("attention").function, impl=IMPLS[name])


def points(options: argparse.Namespace) -> list[Point]:
    """Returns the grid's points that the flags leave. Raises RidgelineError if they leave none."""
    chosen = [
        p
        for p in GRIDS[options.grid]
        if (not options.dim or str(p.dim) in options.dim)
        and (not options.seq or str(p.seq) in options.seq)
        and options.dtype in (None, p.dtype)
    ]
    if not chosen:
        raise RidgelineError(f"lm attention: grid {options.grid} has no point with that --dim, --seq and --dtype")
    return chosen


def kept_bytes(run: Callable[[], Any]) -> int:
    """Returns the bytes of all tensors that a forward pass keeps for backward, each storage once."""
    seen: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # so that no other tensor takes its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    del out
    return sum(seen.values())


def row_of(point: Point, impl: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Returns a row: seconds of forward, backward and both, or "error" with the reason why there are none."""
    row: dict[str, Any] = asdict(point) | {"impl": impl, "device": device.type}
    row |= {"formula_bytes": point.kept(impl), "score_bytes": point.scores}
    try:
        return row | _figures(point, impl, device, options)
    except RidgelineError as error:
        row["error"] = f"unsupported: {error}"
    except Exception as error:  # a point that fails is a row, and the exit code tells
        first = (str(error).splitlines() or [""])[0]
        kind = "out of memory" if lab.out_of_memory(error) else f"failed: {type(error).__name__}"
        row["error"] = f"{kind}: {first}"
    return row


def _figures(point: Point, impl: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    if impl == "plain" and 3 * point.scores > lab.memory_of(device):
        raise MemoryError(f"three matrices of scores take {units.size(3 * point.scores)}")
    attend, gpu = implementation(impl), device.type == "cuda"
    made = partial(torch.randn, point.batch, 1, point.seq, point.dim, device=device, dtype=PRECISIONS[point.dtype])
    if gpu:  # its workspace, which cuBLAS keeps, is none of attention's
        torch.mm(*[made().flatten(0, 2)[:16, :16].contiguous()] * 2)
    do, before = made(), torch.cuda.memory_allocated() if gpu else 0
    q, k, v = (made(requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return attend(q, k, v, causal=point.causal)

    def backward(o: torch.Tensor, keep: bool = False) -> Any:
        return torch.autograd.grad(o, (q, k, v), do, retain_graph=keep)

    start = time.perf_counter()
    backward(forward())
    lab.synchronize(device)
    if (first := time.perf_counter() - start) > options.limit:
        start = time.perf_counter()  # the first call may have compiled
        backward(forward())
        lab.synchronize(device)
        first = time.perf_counter() - start
        if first > options.limit:
            return {"error": f"too slow: forward and backward take {units.seconds(first)}, above --limit"}
    o = forward()
    in_use = torch.cuda.memory_allocated() - before if gpu else kept_bytes(forward)
    ways = {"forward": forward, "backward": lambda: backward(o, True), "both": lambda: backward(forward())}
    reps = {"min_reps": options.steps, "max_reps": options.steps} if options.steps else {}
    found = lab.measure(ways, device, options.budget, **reps)
    flops = {"forward": point.flops, "backward": point.flops * 5 // 2, "both": point.flops * 7 // 2}
    return {
        "seconds": {name: one.seconds for name, one in found.items()},
        "flops_per_second": {name: flops[name] / one.median for name, one in found.items()},
        "in_use_bytes": in_use,
    }


def measured(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields the rows of the flags, point by point, and records each at once: an interruption keeps those before."""
    for point in points(options):
        for impl in options.impls:
            # A compiled graph is kept for several backwards.
            kept = torch._functorch.config.patch(donated_buffer=False) if impl == "compiled" else nullcontext()
            with kept:
                row = row_of(point, impl, device, options)
            if options.record:
                lab.record(options.record, [row], "attention")
            yield row
            if impl == "compiled":
                torch._dynamo.reset()  # torch.compile refuses a function after eight shapes
            lab.release(device)


def _cells(row: dict[str, Any]) -> list[str]:
    what = [row["impl"], row["dtype"], str(row["seq"]), str(row["dim"])]
    memory = [units.size(row["formula_bytes"]), units.size(row["score_bytes"])]
    if "error" in row:
        return [*what, row["error"].partition(":")[0], units.DASH, units.DASH, units.DASH, units.DASH, *memory]
    times = [units.seconds(row["seconds"][name]["median"]) for name in ("forward", "backward", "both")]
    rate = units.scaled(row["flops_per_second"]["both"], "FLOP/s")
    return [*what, *times, rate, units.size(row["in_use_bytes"]), *memory]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the table, then each reason for a row without figures once."""
    one = rows[0]
    title = f"attention, batch {one['batch']}, {'causal' if one['causal'] else 'not causal'}, on {one['device']}"
    figures = ["seq", "d", "forward", "backward", "both", "rate", "before backward", "by formula", "scores"]
    lab.print_table(title, ["impl", "dtype"], figures, [_cells(row) for row in rows])
    lab.say("before backward: inputs and what forward keeps; by formula: the same, counted; scores: one matrix of them")
    for why in dict.fromkeys(f"{row['impl']}: {row['error']}" for row in rows if "error" in row):
        lab.say(why)


def main(options: argparse.Namespace) -> int:
    """Prints a row for each point and implementation."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RidgelineError("lm attention: --device cuda needs a GPU, and PyTorch sees none")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.impls = options.impls or DEFAULTS[options.grid].split(",")
    for name in options.impls:
        implementation(name)
    lab.recordable(options.record)
    rows = list(measured(options, device))
    if options.json:
        print(json.dumps(rows))
    else:
        show(rows)
    return int(any(row.get("error", "").startswith("failed") for row in rows))
