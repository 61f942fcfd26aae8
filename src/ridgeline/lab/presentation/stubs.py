"""Writes src/ridgeline/__init__.pyi from the ops' source files: editors and type checkers see every public function.

python -m ridgeline.lab.presentation.stubs            writes the file
python -m ridgeline.lab.presentation.stubs --check    exits with code 1 if the file is out of date
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import ridgeline
from ridgeline.op import RidgelineError, op_modules

STUB = Path(ridgeline.__file__).with_suffix(".pyi")
COLUMNS = 120


def stub() -> str:
    """Returns the text of `__init__.pyi`: the package's own names, and the signature and docstring of each op."""
    package = Path(ridgeline.__file__).read_text()
    functions, imports = [declaration(package, "register_all")[0]], set[tuple[str, str]]()
    for name, module in op_modules().items():
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise RidgelineError(f"the op {name} has no file")
        text, needs = declaration(Path(spec.origin).read_text(), name)
        functions.append(text)
        imports |= needs
    head = f'"""{ast.get_docstring(ast.parse(package))}\n\nWritten by `make pyi`.\n"""'
    bound: dict[str, list[str]] = {}
    others = vars(ridgeline)["_OTHERS"]
    for module, name in sorted((module, name) for module, name in imports if name not in others):
        bound.setdefault(module, []).append(name)
    lines = [
        f"from {module} import {', '.join(names)}" if names != [""] else f"import {module}"
        for module, names in bound.items()
    ]
    own = [f"from ridgeline import {name} as {name}" for name in sorted(vars(ridgeline)["_SUBMODULES"])]
    own += ["from ridgeline.op import RidgelineError as RidgelineError"]
    lines.append("\n".join([*own, *[f"from {module} import {name} as {name}" for name, module in others.items()]]))
    return "\n\n".join([head, *lines, "__version__: str", *functions]) + "\n"


def declaration(source: str, name: str) -> tuple[str, set[tuple[str, str]]]:
    """Returns the signature and docstring of a function in a source text, and the imports that the signature needs."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and ast.get_docstring(node):
            signature = [n for part in (node.args, node.returns) if part for n in ast.walk(part)]
            names = {n.id for n in signature if isinstance(n, ast.Name)}
            first, last = node.body[0].lineno, node.body[0].end_lineno
            docstring = source.splitlines()[first - 1 : last]
            return "\n".join([signature_of(node, source), *docstring]), set(imports_of(tree, names))
    raise RidgelineError(f"the file of {name} has no function of that name with a docstring")


def signature_of(node: ast.FunctionDef, source: str) -> str:
    """Returns the `def` lines of a function, wrapped as `ruff format` wraps them."""

    def text(part: ast.AST) -> str:
        return " ".join((ast.get_source_segment(source, part) or "").split())

    def parameter(arg: ast.arg, default: ast.expr | None, stars: str = "") -> str:
        equals = " = " if arg.annotation else "="
        return stars + text(arg) + (equals + text(default) if default else "")

    given = node.args
    ordered = given.posonlyargs + given.args
    defaults = [None] * (len(ordered) - len(given.defaults)) + given.defaults
    parts = [parameter(arg, default) for arg, default in zip(ordered, defaults, strict=True)]
    if given.posonlyargs:
        parts.insert(len(given.posonlyargs), "/")
    if given.vararg:
        parts.append(parameter(given.vararg, None, "*"))
    elif given.kwonlyargs:
        parts.append("*")
    parts += [parameter(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        parts.append(parameter(given.kwarg, None, "**"))
    joined = ", ".join(parts)
    end = f") -> {text(node.returns)}:" if node.returns else "):"
    if len(line := f"def {node.name}({joined}{end}") <= COLUMNS:
        return line
    inside = [f"    {joined}"] if len(joined) + 4 <= COLUMNS else [f"    {part}," for part in parts]
    return "\n".join([f"def {node.name}(", *inside, end])


def imports_of(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the module's imports that bind these names: (module, name), or (module, "") for `import module`."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in names:
                    yield (alias.name, "") if isinstance(node, ast.Import) else (node.module or "", alias.name)


def main() -> int:
    """Writes the stub; with --check it only says whether the stub is current."""
    text = stub()
    if "--check" in sys.argv:
        current = STUB.exists() and STUB.read_text() == text
        print(f"{STUB.name} is current" if current else f"{STUB.name} is not current; write it with: make pyi")
        return not current
    STUB.write_text(text)
    print(f"wrote {STUB}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
