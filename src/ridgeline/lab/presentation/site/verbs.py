"""A page for each verb of the command line, written from its parser."""

from __future__ import annotations

import argparse
import re
from importlib import import_module

from ridgeline import cli
from ridgeline.lab.presentation.site.markdown import fence, plain, table

WIDTH = 100  # columns of a usage line


def pages() -> dict[str, str]:
    """The Markdown pages by their names: `cli/index.md`, and one for each verb and each verb below a verb."""
    made = {}
    for verb, (_, line) in cli.VERBS.items():
        top = parser(verb)
        inner = below(top)
        made[f"cli/{verb}.md"] = page(verb, line, top, {f"{verb}-{name}": said for name, (_, said) in inner.items()})
        for name, (sub, said) in inner.items():
            made[f"cli/{verb}-{name}.md"] = page(f"{verb} {name}", said, sub, {})
    listed = "\n".join(f"- [`ridgeline {verb}`]({verb}.md): {plain(line)}." for verb, (_, line) in cli.VERBS.items())
    made["cli/index.md"] = "\n\n".join(
        ["# Command line", "Written from the parsers. `ridgeline VERB --help` prints the same.", listed]
        + [toctree(list(cli.VERBS))]
    )
    return {name: f"{text}\n" for name, text in made.items()}


def below(made: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """The verbs below a verb, with their parsers and what they do; empty if there are none."""
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return {name: (sub, said.get(name, "")) for name, sub in action.choices.items()}
    return {}


def parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb, as the command line makes it."""
    name, line = cli.VERBS[verb]
    module = import_module(cli.module_of(name))
    shared = [v for v, (n, _) in cli.VERBS.items() if n == name] != [verb]
    made = argparse.ArgumentParser(prog=f"ridgeline {verb}", description=line)
    getattr(module, f"{verb}_arguments" if shared else "arguments")(made)
    return made


def page(verb: str, line: str, made: argparse.ArgumentParser, inner: dict[str, str]) -> str:
    """The Markdown of a verb: what it does, how it is called, and its arguments. inner: pages of the verbs
    below it, and what those do.
    """
    made.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
    text = [f"# ridgeline {verb}", f"{line[0].upper()}{plain(line[1:])}.", fence(made.format_usage().strip())]
    groups = {"Arguments": [], "Options": []}  # type: dict[str, list[list[str]]]
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = [
                f"- [`ridgeline {name.replace('-', ' ', 1)}`]({name}.md): {plain(said)}."
                for name, said in inner.items()
            ]
            text += ["## Verbs", "\n".join(listed)]
        elif not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            groups["Options" if action.option_strings else "Arguments"].append(row(action))
    for title, rows in groups.items():
        if rows:
            text += [f"## {title}", table(["", "meaning"], rows)]
    return "\n\n".join([*text, *([toctree(list(inner))] if inner else [])])


def row(action: argparse.Action) -> list[str]:
    """The names and values of an argument, and its meaning."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = f"{{{','.join(map(str, action.choices))}}}" if action.choices and action.metavar is None else name
    takes = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    shown = [f"`{option}{f' {value}' if takes else ''}`" for option in action.option_strings] or [f"`{value}`"]
    help_text = (action.help or "") % {**vars(action), "prog": "ridgeline"} if action.help else ""
    said = plain(re.sub(r"\s+", " ", help_text))
    if action.required and action.option_strings:
        said = f"{said} (required)"
    default = action.default
    if default not in (None, False, True, [], argparse.SUPPRESS) and "default" not in said and takes:
        said = f"{said} (default: {plain(str(default))})"
    return [", ".join(shown).replace("|", r"\|"), said.strip()]


def toctree(names: list[str]) -> str:
    """A hidden list of pages, for the side bar."""
    return "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
