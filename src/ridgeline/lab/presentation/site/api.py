"""The reference of the public modules, with types: from the live objects and the texts of their files."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import ridgeline
from ridgeline.lab.presentation.measured import families
from ridgeline.lab.presentation.site.markdown import docstring
from ridgeline.lab.presentation.site.prose import lead, linked_op
from ridgeline.lab.presentation.site.verbs import toctree
from ridgeline.lab.presentation.stubs import signature_of
from ridgeline.op import Op

# Public modules beside those that `ridgeline` itself names, and the names of those that have others too.
ALSO = ("ridgeline.recomputation", "ridgeline.parallel", "ridgeline.lm.model")
ONLY = {"ridgeline.op": ("Op", "Case", "Spec", "Cost", "Implementation", "RidgelineError")}


def modules() -> list[str]:
    """The public modules that are there."""
    own = [f"ridgeline.{name}" for name in vars(ridgeline)["_SUBMODULES"]]
    return [*own, *(name for name in ALSO if name not in own and find_spec(name))]


def pages(ops: dict[str, Op]) -> dict[str, str]:
    """The Markdown pages of the public modules by their names, `api/index.md` among them."""
    made, link = {}, linked_op("", "../ops/")
    for name in modules():
        module, only = import_module(name), ONLY.get(name, ())
        text = [f"# {name}", docstring(inspect.cleandoc(module.__doc__ or ""), link=link)]
        text += [entry(label, value, name, link) for label, value in members(module, only)]
        made[f"api/{name}.md"] = "\n\n".join(text) + "\n"
    listed = []
    for family, of_family in families(ops.values()):
        lines = "\n".join(f"- [`ridgeline.{op.name}`](../ops/{op.name}.md): {lead(op)}" for op in of_family)
        listed.append(f"### {family.capitalize()}\n\n{lines}")
    named = "\n".join(
        f"- [`{name}`]({name}.md): {docstring((import_module(name).__doc__ or '').strip().splitlines()[0])}"
        for name in modules()
    )
    text = ["# API reference", "## Modules", named, "## Functions", *listed, toctree(modules())]
    return made | {"api/index.md": "\n\n".join(text) + "\n"}


def members(module: ModuleType, only: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The public functions and classes of a module with docstrings: its own, or those that its `__all__` names."""
    named = getattr(module, "__all__", None)
    names = only or named or [n for n in dir(module) if n[0] != "_"]
    for name in names:
        try:
            value = getattr(module, name)
        except ModuleNotFoundError as error:
            print(f"{module.__name__}.{name} has no entry in the reference: {error}", file=sys.stderr)
            continue
        own = getattr(value, "__module__", "").startswith(module.__name__) or only or named
        if own and (inspect.isclass(value) or inspect.isfunction(value)) and value.__doc__:
            yield name, value


def entry(name: str, value: Any, module: str, link: Callable[[str], str]) -> str:
    """A function or a class with its public methods, as entries that other pages can link to."""
    if inspect.isfunction(value):
        return directive("function", name + arguments(value), value, module, link)
    methods = [
        directive("method", label + arguments(method, own=True), method, "", link, ticks=4)
        for label, method in vars(value).items()
        if label[0] != "_" and inspect.isfunction(method) and method.__doc__
    ]
    constructor = vars(value).get("__init__")
    declared = arguments(constructor, own=True) if inspect.isfunction(constructor) else fields(value)
    return directive("class", name + declared.split(" -> ")[0], value, module, link, "\n\n".join(methods))


def fields(value: type) -> str:
    """The arguments of a class whose constructor Python writes, such as a dataclass."""
    try:
        return str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        return ""


def directive(
    kind: str, declared: str, value: Any, module: str, link: Callable[[str], str], inside: str = "", ticks: int = 5
) -> str:
    """An entry of Sphinx's Python domain."""
    names = parameters_of(value)
    names += getattr(value, "__annotations__", ()) if inspect.isclass(value) else ()
    body = docstring(inspect.cleandoc(value.__doc__ or ""), names, link)
    where = f":module: {module}\n" if module else ""
    fence = "`" * ticks
    return f"{fence}{{py:{kind}}} {declared}\n{where}\n{body}\n\n{inside}\n{fence}"


def parameters_of(value: Any) -> list[str]:
    """The names of the parameters of a function or of a class's constructor."""
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []


def arguments(function: Any, own: bool = False) -> str:
    """The arguments and the result of a function as its file states them. own: without `self`."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        node = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
        text = " ".join(signature_of(node, source).removesuffix(":").split())
    except (OSError, TypeError, StopIteration, SyntaxError):
        return str(inspect.signature(function))
    text = text.removeprefix(f"def {node.name}").replace("( ", "(").replace(", )", ")")
    return text.replace("(self, ", "(", 1).replace("(self)", "()", 1) if own else text
