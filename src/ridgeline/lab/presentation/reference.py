"""The list of all ops, docs/ops.md, taken from the registry and the ops' source files."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

from ridgeline import nn, optim
from ridgeline.lab.presentation.measured import contents, families
from ridgeline.lab.presentation.stubs import signature_of
from ridgeline.op import Op, RidgelineError

LIKE_TORCH = {
    nn: "Modules. Those that PyTorch has too take its names, parameters and state dicts",
    optim: "An optimizer with PyTorch's constructor and state dict",
}


def page(ops: dict[str, Op], pages: dict[str, tuple[str, set[str]]], noted: set[str]) -> str:
    """The Markdown page of all ops, by family.

    pages: the name and the timed ops of each GPU, by its page in docs/measured/; noted: ops with a page in docs/notes/.
    """
    text = [
        "# All ops",
        "Written by `make readme` from the registry. [guide.md](guide.md) tells how to use them.",
        "Implementations go from the naive one to the best one. Bold: chosen automatically; the others need `impl=`. "
        "`ridgeline explain <op>` says which one a call gets, and why.",
        contents(ops.values()),
    ]
    for family, members in families(ops.values()):
        text.append(f"## {family.capitalize()} family")
        for op in members:
            text += [f"### `{op.name}`", *_about(op, pages, noted)]
    text.append("## Modules and optimizers")
    for module, what in LIKE_TORCH.items():
        named = [
            f"`{name}`"
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__ and name[0] != "_"
        ]
        text.append(f"`{module.__name__}`: {', '.join(named)}. {what}.")
    return "\n\n".join(text) + "\n"


def _about(op: Op, pages: dict[str, tuple[str, set[str]]], noted: set[str]) -> list[str]:
    ladder = ", ".join(f"**{rung.name}**" if rung.served else rung.name for rung in op.implementations.values())
    source = Path(inspect.getfile(op.function))
    links = [f"[source](../src/ridgeline/ops/{op.family}/{source.name})"]
    links += [f"[notes](notes/{op.name}.md)"] if op.name in noted else []
    links += [
        f"[measured on {name}](measured/{page}#{op.name})" for page, (name, timed) in pages.items() if op.name in timed
    ]
    return [
        computed(op),
        f"```python\n{signature(source.read_text(), op.name)}\n```",
        f"Implementations: {ladder}.",
        ", ".join(links),
    ]


def computed(op: Op) -> str:
    """What an op computes, as the first line of its file says it."""
    said = (import_module(op.function.__module__).__doc__ or "").strip().splitlines()[0]
    said = said.removeprefix(f"{op.name}: ").rstrip(".:")
    sentence = re.match(r"[a-z]{2,} (?!=)", said)  # a formula keeps its letters
    return f"{said[:1].upper() if sentence else said[:1]}{said[1:]}."


def signature(source: str, name: str) -> str:
    """The text of a function's signature, as in `__init__.pyi`. Raises RidgelineError if its file has none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return signature_of(node, source).removesuffix(":").removeprefix("def ")
    raise RidgelineError(f"the file of {name} has no function of that name")
