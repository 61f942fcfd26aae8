"""The form of a function: its source with names replaced, so that copies of one formula in many models are one form."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple


class Form(NamedTuple):
    """digest: 12 hexadecimal digits of the normalised source. attributes: what it reads of `self`, in that order."""

    digest: str
    attributes: tuple[str, ...]
    text: str


class _Renamer(ast.NodeTransformer):
    """Replaces arguments, local variables and the attributes of self by v0, v1, ... and a0, a1, ..."""

    def __init__(self, local: set[str], methods: Callable[[str], bool]):
        self.local, self.is_method = local, methods
        self.names: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.methods: list[str] = []

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.local and node.id != "self":
            node.id = self.names.setdefault(node.id, f"v{len(self.names)}")
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        if node.arg != "self":
            node.arg = self.names.setdefault(node.arg, f"v{len(self.names)}")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            if self.is_method(node.attr):
                if node.attr not in self.methods:
                    self.methods.append(node.attr)
                node.attr = f"m{self.methods.index(node.attr)}"
            else:
                node.attr = self.attributes.setdefault(node.attr, f"a{len(self.attributes)}")
            return node
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node))


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function!r} is no function with a source")
    tree.name, tree.decorator_list, tree.returns = "f", [], None
    first = tree.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        tree.body = tree.body[1:] or [ast.Pass()]
    return tree


def _locals(tree: ast.FunctionDef) -> set[str]:
    given = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    rest = [a for a in (tree.args.vararg, tree.args.kwarg) if a is not None]
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {a.arg for a in [*given, *rest]} | stored


@lru_cache(maxsize=1024)
def form(function: Callable[..., Any], owner: type | None = None) -> Form | None:
    """Returns the form of a function, with the methods of `owner` that it calls; None if it has no source."""
    renamer = _Renamer(set(), lambda name: inspect.isfunction(getattr(owner, name, None)))
    texts, seen, todo = [], set(), [function]
    while todo:
        try:
            tree = _tree(todo.pop())
        except (OSError, TypeError, SyntaxError):
            return None
        renamer.local, renamer.names = _locals(tree), {}
        texts.append(ast.unparse(ast.fix_missing_locations(renamer.visit(tree))))
        new = [m for m in renamer.methods if m not in seen]
        seen.update(new)
        todo += [getattr(owner, m) for m in new]
    text = "\n".join(texts)
    return Form(hashlib.sha256(text.encode()).hexdigest()[:12], tuple(renamer.attributes), text)


def class_form(kind: Any) -> Form | None:
    """Returns the form of a module class's forward."""
    return form(kind.forward, kind)


def interface_keywords(kind: Any) -> frozenset[str] | None:
    """Returns the keywords that an attention class gives to the attention interface, or None if it does not call it."""
    return _keywords(kind.forward)


@lru_cache(maxsize=1024)
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    calls = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "attention_interface"]
    if len(calls) != 1:
        return None
    return frozenset(k.arg for k in calls[0].keywords if k.arg is not None)


@lru_cache(maxsize=1024)
def only_passes_on(function: Callable[..., Any], name: str) -> bool:
    """Whether a function uses a variable only as an argument of the attention interface."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    calls = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "attention_interface"]
    given = [a for c in calls for a in (*c.args, *(k.value for k in c.keywords)) if isinstance(a, ast.Name)]
    return all(any(u is g for g in given) for u in used)


@lru_cache(maxsize=1024)
def made_if_none(function: Callable[..., Any], name: str) -> str | None:
    """Returns the digest of what a forward does if an argument is None, or None if it assigns that elsewhere too."""
    try:
        tree = _tree(function)
    except (OSError, TypeError, SyntaxError):
        return None
    blocks = [s for s in tree.body if isinstance(s, ast.If) and ast.unparse(s.test) == f"{name} is None"]
    if len(blocks) != 1 or blocks[0].orelse:
        return None

    def stores(node: ast.AST) -> int:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
        return sum([isinstance(n.ctx, ast.Store) for n in names])

    if stores(tree) != stores(blocks[0]):
        return None
    renamer = _Renamer(_locals(tree), lambda _: False)
    text = "\n".join([ast.unparse(ast.fix_missing_locations(renamer.visit(s))) for s in blocks[0].body])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=1024)
def layers_of_one_input(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the layers `self.*_proj` that a forward always calls, each once, with one variable that never changes.

    Empty if there are fewer than two, or if the forward has no source.
    """
    try:
        tree = _tree(function)
    except (OSError, TypeError, SyntaxError):
        return ()
    always = [s for s in tree.body if isinstance(s, ast.Assign | ast.AnnAssign | ast.Expr)]
    found: dict[str, list[str]] = {}
    names = [name for name, _ in _layer_calls(tree)]
    for statement in always:
        for name, variable in _layer_calls(statement):
            if variable is not None and names.count(name) == 1:
                found.setdefault(variable, []).append(name)
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    groups = [g for v, g in found.items() if v not in stored and len(g) > 1]
    return tuple(groups[0]) if len(groups) == 1 else ()


def _layer_calls(tree: ast.AST) -> list[tuple[str, str | None]]:
    """The calls `self.NAME_proj(VARIABLE)` in a tree, in order; no variable if the argument is anything else."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    found: list[tuple[str, str | None]] = []
    for call in calls:
        layer: Any = call.func
        if isinstance(layer.value, ast.Name) and layer.value.id == "self" and layer.attr.endswith("_proj"):
            plain = len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Name)
            found.append((layer.attr, call.args[0].id if plain else None))  # type: ignore[attr-defined]
    return found
