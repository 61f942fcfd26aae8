"""Times a language model's forward, backward and whole step."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from ridgeline.lm.setup import Setup, build, flags


def arguments(parser: argparse.ArgumentParser) -> None:
    flags(parser)
    parser.add_argument("--warmups", type=int, default=5, metavar="N", help="steps before the timed ones (5)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps (10)")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(setup: Setup, mode: str, steps: int) -> list[float]:
    """Returns the seconds of each step, from an idle device to an idle device."""
    seconds = []
    for _ in range(steps):
        synchronize(setup.tokens.device)
        start = time.perf_counter()
        setup.step(mode)
        synchronize(setup.tokens.device)
        seconds.append(time.perf_counter() - start)
    return seconds


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Returns one row: seconds, tokens/s, peak memory and what was run."""
    setup = build(options)
    for _ in range(options.warmups):
        setup.step(options.mode)
    cuda = setup.tokens.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(setup, options.mode, options.steps)
    median = statistics.median(seconds)
    return {
        "size": options.size,
        "mode": options.mode,
        "seconds": {
            "median": median,
            "mean": statistics.mean(seconds),
            "deviation": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        },
        "tokens_per_second": setup.tokens.numel() / median,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def main(options: argparse.Namespace) -> int:
    row = measured(options)
    if options.json:
        print(json.dumps(row))
        return 0
    seconds = row["seconds"]
    print(f"{row['size']} {row['mode']}: {seconds['median'] * 1e3:.2f} ms (mean {seconds['mean'] * 1e3:.2f}, "
          f"deviation {seconds['deviation'] * 1e3:.2f}), {row['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
    return 0
