"""Several GPUs: check and time strategies, plan layouts, simulate steps, by `ridgeline parallel VERB`."""

from __future__ import annotations

import argparse
from importlib import import_module

# verb: (module with `arguments(parser)` and `main(options)`, what it does).
VERBS: dict[str, tuple[str, str]] = {
    "bench": (
        "ridgeline.lab.measurement.parallel_bench",
        "check strategies on several processes, then time them beside what is predicted",
    ),
    "plan": (
        "ridgeline.parallel.plan",
        "find the quickest layouts of a model on a cluster: time, memory, what binds, what would help",
    ),
    "simulate": (
        "ridgeline.parallel.simulate",
        "draw a step's timeline, and predict slow links, stops, and the public runs",
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="parallel_verb", required=True, metavar="VERB")
    for verb, (module, line) in VERBS.items():
        one = verbs.add_parser(verb, help=line, description=line[0].upper() + line[1:] + ".")
        import_module(module).arguments(one)


def main(options: argparse.Namespace) -> int:
    return import_module(VERBS[options.parallel_verb][0]).main(options)
