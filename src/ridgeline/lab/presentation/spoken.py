"""What the command line says that a catalogue can translate: help, errors, and the sentences of lessons."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from ridgeline import cli
from ridgeline.lab.analysis.lesson.exercises import EXERCISES
from ridgeline.lab.analysis.lesson.wording import MESSAGES, REASONS
from ridgeline.lab.presentation.report import chinese

TO_CHINESE = "[中文](README.zh.md)"
TO_ENGLISH = "[English](README.md)"
ERRORS = ("RidgelineError", "fail", "told")  # calls whose argument is shown to a user
# Files whose errors a user of the command line meets.
WHERE = ("cli.py", "select.py", "op.py", "device.py", "lab/**/*.py", "lm/**/*.py", "parallel/command.py")


def messages(src: Path) -> list[str]:
    """Returns the messages, in order and each once."""
    found = [*help_texts(), *MESSAGES.values(), *REASONS, *(p.name for e in EXERCISES.values() for p in e.probes)]
    files = [path for where in WHERE for path in sorted(src.glob(where))]
    found += [*chinese.messages(), *chinese.PARTS]
    found += [text for path in files for text in errors(path)]
    return list(dict.fromkeys(text for text in found if any(c.isalpha() for c in text)))


def help_texts() -> Iterator[str]:
    """Yields the texts of all parsers' help."""
    yield from cli.HELP
    for verb, (name, line) in cli.VERBS.items():
        yield line
        module, alone = import_module(cli.module_of(name)), [n for n, _ in cli.VERBS.values()].count(name) == 1
        parser = argparse.ArgumentParser(prog=f"ridgeline {verb}")
        getattr(module, "arguments" if alone else f"{verb}_arguments")(parser)
        yield from of_parser(parser)


def of_parser(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the texts of a parser and of those below it."""
    for text in (parser.description, parser.epilog):
        if text:
            yield text
    for group in parser._action_groups:
        yield group.title or ""
    for action in parser._actions:
        if action.help and action.help != argparse.SUPPRESS:
            yield action.help
        if isinstance(action, argparse._SubParsersAction):
            yield from (choice.help or "" for choice in action._choices_actions)
            for below in action.choices.values():
                yield from of_parser(below)


def errors(path: Path) -> list[str]:
    """Returns the texts of a file's errors, with places for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in ERRORS:
            text = template(node.args[0])
            if text and len(text.split()) > 1:
                found.append(text)
    return found


def template(node: ast.expr) -> str:
    """Returns a text of Python's with places: "no {0} here" of f"no {name} here"; empty if it is no text."""
    parts, places = list[str](), list[ast.expr]()

    def walk(part: ast.expr) -> bool:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.JoinedStr):
            return all([walk(value) for value in part.values])
        elif isinstance(part, ast.FormattedValue):
            parts.append(f"{{{len(places)}}}")
            places.append(part)
        elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            return walk(part.left) and walk(part.right)
        else:
            return False
        return True

    return "".join(parts) if walk(node) else ""
