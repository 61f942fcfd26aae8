"""The command line: `ridgeline VERB`. Each verb is a module of the lab, imported when it is chosen, so that help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

# verb: (module of ridgeline.lab, what it does: the first line of the module's docstring, or of the verb's own function)
# A module with one verb has `arguments(parser)` and `main(options)`; one with several has `<verb>_arguments` and `<verb>_main`.
VERBS = {
    "doctor": ("machine", "what this machine is, what can run on it, and its measured roof"),
    "list": ("catalogue", "every op and its implementations"),
    "explain": ("catalogue", "which implementation serves a call, and why not the others"),
    "check": ("check", "hold implementations against the law of tolerance"),
    "bench": (
        "bench",
        "time implementations against each other and against the roof, after they have passed the check",
    ),
    "compare": ("compare", "two recorded runs side by side, each difference judged against its interval"),
    "ladder": ("ladder", "an op's rungs in order, with what each gained over the one before"),
    "roofline": ("roofline", "every rung on the machine's roofline, with a verdict"),
    "profile": (
        "profile",
        "where the time of an op or of your own function goes: a table, a Chrome trace, flame graphs; nsys and ncu",
    ),
    "inspect": (
        "inspect",
        "what the compilers made of a kernel: PTX, SASS, registers, spills, shared memory, access widths; without a GPU",
    ),
    "tune": ("tune", "search tile configurations on this GPU"),
    "report": ("report", "the main job: measure, check and time everything, and write one HTML file"),
}
# What the lab needs beyond torch and triton, by the names that Python imports.
EXTRA = ("rich", "jinja2", "altair", "vl_convert", "numpy", "cuda")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see {self.prog} --help)")


def fail(message: str) -> NoReturn:
    print(f"ridgeline: {message}", file=sys.stderr)
    raise SystemExit(2)


def help_text() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {line}" for verb, (_, line) in VERBS.items()]
    return "usage: ridgeline VERB [options]    (ridgeline VERB --help tells a verb's options)\n\n" + "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code. A wrong input is one line on stderr and exit code 2."""
    verb, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    try:
        if verb in ("-h", "--help", "help"):
            print(help_text())
            return 0
        if verb == "--version":
            print("ridgeline", import_module("ridgeline").__version__)
            return 0
        if verb not in VERBS:
            fail(f"there is no verb {verb!r}; the verbs are {', '.join(VERBS)}")
        code = run(verb, rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("ridgeline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left: what remains goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def run(verb: str, arguments: Sequence[str]) -> int:
    name, line = VERBS[verb]
    try:
        module = import_module(f"ridgeline.lab.{name}")
        shared = [v for v, (n, _) in VERBS.items() if n == name] != [verb]
        prefix = f"{verb}_" if shared else ""
        parser = Parser(prog=f"ridgeline {verb}", description=line[0].upper() + line[1:] + ".")
        getattr(module, prefix + "arguments")(parser)
        options = parser.parse_args(arguments)
        from ridgeline.op import RidgelineError  # imports torch, so not before a verb runs
    except ModuleNotFoundError as error:
        missing(verb, error)
    try:
        return getattr(module, prefix + "main")(options)
    except RidgelineError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        missing(verb, error)


def missing(verb: str, error: ModuleNotFoundError) -> NoReturn:
    """A package of the lab's extra that is not installed is the user's to install; any other missing module is our mistake."""
    package = (error.name or "").split(".")[0]
    if package not in (*EXTRA, "torch", "triton"):
        raise error
    fail(
        f"{verb} needs the package {package}, which is not installed; the lab's packages come with: pip install 'ridgeline[lab]'"
    )
