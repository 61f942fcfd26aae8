"""Show the gaps between a function's kernels, before and after a CUDA graph, and what breaks its capture."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="OP | FILE.py:FUNCTION", help="an op, or a function of your own that takes no arguments"
    )
    parser.add_argument("--impl", metavar="NAME", help="an implementation of the op (default: the one chosen)")
    parser.add_argument("--case", metavar="NAME", help="a case of the op (default: as `ridgeline profile` chooses)")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU, if the case has it")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(options: argparse.Namespace) -> int:
    import json
    import os

    os.environ.update(KINETO_LOG_LEVEL="6")  # before torch is imported; quiets its profiler

    from ridgeline.lab.analysis.graph.outcome import graph
    from ridgeline.lab.analysis.profile import blaming, target

    what = target(options.target, options.impl, options.case, options.dtype, verb="graph")
    with blaming(f"running {what.name}"):
        found = graph(what.step, what.name)
    print(json.dumps(found.figures(), indent=1) if options.json else found)
    return 0
