"""The command line: `ridgeline VERB`. Each verb is a module of the lab, imported when chosen, so help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import ridgeline.translation as translation
from ridgeline.translation import told

# verb: (module of ridgeline.lab, or a module's whole name; what the verb does, the first line of its docstring).
# A module of one verb has `arguments(parser)` and `main(options)`; a module of several has `<verb>_arguments` and
# `<verb>_main` for each.
VERBS = {
    "doctor": (
        "analysis.doctor",
        "describe this machine: hardware, software, what can run, measured bandwidth and FLOP/s",
    ),
    "micro": (
        "presentation.micro",
        "measure the card's own numbers: latency, bandwidth, conflicts, instructions, atomics, launches",
    ),
    "list": ("analysis.catalogue", "list the ops and their implementations"),
    "explain": ("analysis.catalogue", "show which implementation a call runs, and why not the others"),
    "check": ("measurement.check", "check outputs and gradients against a float64 reference"),
    "bench": (
        "measurement.bench",
        "check implementations, then time them against each other and the limits of the hardware",
    ),
    "compare": ("measurement.compare", "compare two recorded runs, and tell real differences from noise"),
    "ladder": ("analysis.ladder", "show what each implementation of an op gained over the one before"),
    "roofline": ("analysis.roofline", "place every implementation on the machine's roofline, and say what limits it"),
    "profile": (
        "analysis.profile",
        "profile an op or your own function: a table, a Chrome trace, flame graphs, Nsight tools",
    ),
    "graph": (
        "analysis.graph.command",
        "show the gaps between a function's kernels, before and after a CUDA graph, and what breaks its capture",
    ),
    "inspect": (
        "analysis.inspect",
        "compile a kernel, with or without a GPU: PTX, SASS, registers, spills, shared memory",
    ),
    "mamf": (
        "analysis.mamf.command",
        "find the largest reachable rate of matrix products over a range of shapes, and explain its dips",
    ),
    "tune": ("measurement.tune", "search tile configurations on this GPU, and save the best"),
    "lesson": (
        "analysis.lesson.command",
        "list the lessons, open one, or check your own kernel against its exercise",
    ),
    "lm": (
        "ridgeline.lm.command",
        "the language-model lab: where the time and the memory of a training step go, by `ridgeline lm VERB`",
    ),
    "parallel": (
        "ridgeline.parallel.command",
        "several GPUs: check and time strategies, plan layouts, simulate steps, by `ridgeline parallel VERB`",
    ),
    "report": ("presentation.report", "check and time everything on this machine, and write one HTML page"),
}
# Packages that the lab needs beyond torch and triton, by their import names.
EXTRA = ("rich", "jinja2", "altair", "vl_convert", "numpy", "cuda")


# The sentences of `ridgeline --help`, of every verb's help, and of argparse's errors.
HELP = (
    "usage: ridgeline VERB [options]",
    "Measure GPU kernels for language models against the limits of this machine.",
    "`ridgeline VERB --help` shows the options of a verb.",
    "Every verb takes --lang zh (Chinese) or --lang en; the default is the locale's language, else English.",
    "usage: ",
    "show this help message and exit",
    "{0} (see {1} --help)",
    "unrecognized arguments: {0}",
    "the following arguments are required: {0}",
    "argument {0}: expected one argument",
    "argument {0}: invalid choice: {1} (choose from {2})",
    "argument {0}: invalid int value: {1}",
    "argument {0}: invalid float value: {1}",
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help is in the chosen language."""

    def format_help(self) -> str:
        if translation.language() == "en":
            return super().format_help()
        self.description = sentence(self.description or "")
        for group in self._action_groups:
            group.title = told(group.title or "")
        for action in self._actions:
            action.help = told(action.help) if action.help and action.help != argparse.SUPPRESS else action.help
            for choice in getattr(action, "_choices_actions", ()):
                choice.help = told(choice.help)
        return super().format_help().replace("usage: ", told("usage: "), 1)

    def error(self, message: str) -> NoReturn:
        fail(f"{told(message)} (see {self.prog} --help)")


def sentence(line: str) -> str:
    """Returns a verb's line as a sentence of the chosen language."""
    plain = line[:1].lower() + line[1:].removesuffix(".")
    if translation.language() == "en" or (found := told(plain)) == plain:
        return told(line)
    return f"{found}。"


def fail(message: str) -> NoReturn:
    print(f"ridgeline: {told(message)}", file=sys.stderr)
    raise SystemExit(2)


def help_text() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {told(line)}" for verb, (_, line) in VERBS.items()]
    usage, what, more, languages = map(told, HELP[:4])
    return "\n".join([usage, "", what, "", *lines, "", more, languages])


def spoken(arguments: Sequence[str]) -> list[str]:
    """Chooses the language that the arguments ask for, else the locale's; returns the arguments without `--lang`."""
    rest, asked = list[str](), None
    words = iter(arguments)
    for word in words:
        if word == "--lang":
            asked = next(words, "")
        elif word.startswith("--lang="):
            asked = word.removeprefix("--lang=")
        else:
            rest.append(word)
    try:
        translation.choose(translation.of_locale() if asked is None else asked)
    except ValueError as error:
        fail(str(error))
    return rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. Invalid input prints one line on stderr and gives exit code 2."""
    verb, *rest = spoken(sys.argv[1:] if arguments is None else arguments) or ["--help"]
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
    except BrokenPipeError:  # the reader of our output has gone: drop the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def module_of(name: str) -> str:
    """Returns the whole name of a module in `VERBS`."""
    return name if name.startswith("ridgeline.") else f"ridgeline.lab.{name}"


def run(verb: str, arguments: Sequence[str]) -> int:
    name, line = VERBS[verb]
    try:
        module = import_module(module_of(name))
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
    """Tells the user which package of the lab's extra to install. Any other missing module is our bug, and raises."""
    package = (error.name or "").split(".")[0]
    if package not in (*EXTRA, "torch", "triton"):
        raise error
    fail(
        f"{verb} needs the package {package}, which is not installed; "
        "install the lab's packages with: pip install 'ridgeline[lab]'"
    )
