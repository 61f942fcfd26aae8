"""The language-model lab: where the time and the memory of a training step go, by `ridgeline lm VERB`."""

from __future__ import annotations

import argparse
from importlib import import_module

# verb: (module of ridgeline.lm with `arguments(parser)` and `main(options)`, what it does).
VERBS: dict[str, tuple[str, str]] = {
    "sizes": ("sizes", "list the named sizes with their parameters and operations"),
    "bench": ("bench", "time forward, backward and the whole step: tokens/s, MFU, peak memory"),
    "attention": ("attention", "time attention over the assignment's grids: forward, backward, memory"),
    "profile": ("profile", "show where the time goes, by layer, module, kind of work and kernel"),
    "scale": ("scale", "time matrix products and an MLP as they grow, and fit the exponents"),
    "leaderboard": ("leaderboard", "run the leaderboard's step of 8.1 B parameters beside its floor; plan its memory"),
    "survey": ("survey", "time several sizes plain, compiled and ours, and keep each row as it comes"),
    "report": ("report", "answer all of this for one size on one HTML page"),
    "train": ("train", "train a model on a text file, with checkpoints that resume bitwise, and sample from it"),
    "memory": ("memory", "predict and measure where the memory of a step goes, by kind and module"),
    "checkpoint": ("checkpoint", "compare ways of keeping less for backward: memory, operations and time"),
    "generate": ("generate", "generate text: batches that change, paged caches, few bits, a draft model, the floor"),
    "precision": ("precision", "show what number formats do to sums, to autocast's dtypes and to numbers"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="lm_verb", required=True, metavar="VERB")
    for verb, (module, line) in VERBS.items():
        one = verbs.add_parser(verb, help=line, description=line[0].upper() + line[1:] + ".")
        import_module(f"ridgeline.lm.{module}").arguments(one)


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Returns a parser of a verb's own flags."""
    parser = argparse.ArgumentParser(prog=f"ridgeline lm {verb}")
    import_module(f"ridgeline.lm.{VERBS[verb][0]}").arguments(parser)
    return parser


def main(options: argparse.Namespace) -> int:
    return import_module(f"ridgeline.lm.{VERBS[options.lm_verb][0]}").main(options)
