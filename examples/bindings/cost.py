"""Times what each way of binding a kernel costs the host per call, and how long it takes to build.

python examples/bindings/cost.py                                         prints the table
python examples/bindings/cost.py --record results/bindings/h200.jsonl    also writes it
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from ridgeline.lab.measurement.clock import interval
from ridgeline.lab.measurement.machine import facts
from ridgeline.lab.measurement.sheet import Sheet

HERE = Path(__file__).parent
WAYS = ("plain_triton", "nvrtc", "inline", "stable", "library", "custom_op", "triton_op")
ON_CPU = ("inline", "stable", "library", "custom_op", "triton_op")  # the others have kernels for a GPU alone
ROUNDS, CALLS = 15, 200
Silu = Callable[[torch.Tensor], torch.Tensor]


def microseconds(works: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The host's microseconds per call in each round. Ways take turns, and each round begins with an empty queue."""
    gpu = torch.cuda.is_available()
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            if gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                work()
            if number:
                found[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return found


def built(way: str, x: torch.Tensor) -> tuple[Silu, float]:
    """The function of a template, and the seconds until its first result, without anything cached."""
    start = time.perf_counter()
    silu = importlib.import_module(way).silu
    result = silu(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.testing.assert_close(result, torch.nn.functional.silu(x))
    return silu, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Time what each way of binding a kernel costs the host.")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also write the figures here, as JSON lines")
    parser.add_argument("--commit", help="the commit, where this is a copy without git")
    parser.add_argument(
        "--ways", default="", help=f"comma-separated (default: all that run here, of {', '.join(WAYS)})"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ways = options.ways.split(",") if options.ways else list(WAYS if device == "cuda" else ON_CPU)
    if unknown := set(ways) - set(WAYS):
        print(f"there is no way {', '.join(sorted(unknown))}; the ways are {', '.join(WAYS)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(HERE))
    x = torch.randn(1024, device=device)
    leaf = x.clone().requires_grad_()
    calls: dict[str, Silu] = {"torch": torch.nn.functional.silu}
    builds: dict[str, float] = {}
    for way in ways:
        calls[way], builds[way] = built(way, x)
        print(f"{way:14} first result after {builds[way]:.2f} s", flush=True)
    plain = microseconds({name: (lambda call=call: call(x)) for name, call in calls.items()})
    training = microseconds({name: (lambda call=call: call(leaf)) for name, call in calls.items()})
    sheet = Sheet(options.record, "bindings", facts(device), options.commit) if options.record else None
    for name in calls:
        rows = {}
        for what, samples in (("plain", plain[name]), ("training", training[name])):
            low, high = interval(samples)
            rows[what] = {"median": median(samples) / 1e6, "low": low / 1e6, "high": high / 1e6}
        us = [rows[what]["median"] * 1e6 for what in ("plain", "training")]
        print(f"{name:14} {us[0]:6.1f} us, with a gradient {us[1]:6.1f} us")
        if sheet:
            sheet.write(name, seconds=rows["plain"], training=rows["training"], build_seconds=builds.get(name))
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # so that everything is built anew
        import os

        os.environ |= {"TORCH_EXTENSIONS_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        sys.exit(main())
