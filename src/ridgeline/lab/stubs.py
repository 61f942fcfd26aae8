"""writes src/ridgeline/__init__.pyi from the ops' source files, so that editors and type checkers see every public function

python -m ridgeline.lab.stubs            writes it
python -m ridgeline.lab.stubs --check    exit code 1 where it is not current
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


def stub() -> str:
    """The text of `__init__.pyi`: the package's own names, and each op's signature and docstring."""
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
    for module, name in sorted(imports):
        bound.setdefault(module, []).append(name)
    lines = [
        f"from {module} import {', '.join(names)}" if names != [""] else f"import {module}"
        for module, names in bound.items()
    ]
    own = [f"from ridgeline import {name} as {name}" for name in sorted(vars(ridgeline)["_SUBMODULES"])]
    lines.append("\n".join([*own, "from ridgeline.op import RidgelineError as RidgelineError"]))
    return "\n\n".join([head, *lines, "__version__: str", *functions]) + "\n"


def declaration(source: str, name: str) -> tuple[str, set[tuple[str, str]]]:
    """The text of the function of that name up to the end of its docstring, and the imports that its signature needs."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and ast.get_docstring(node):
            signature = [n for part in (node.args, node.returns) if part for n in ast.walk(part)]
            names = {n.id for n in signature if isinstance(n, ast.Name)}
            return "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].end_lineno]), set(
                imports_of(tree, names)
            )
    raise RidgelineError(f"the file of {name} has no function of that name with a docstring")


def imports_of(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """The module's imports that bind these names: (module, name), or (module, "") where it is the module that is imported."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in names:
                    yield (alias.name, "") if isinstance(node, ast.Import) else (node.module or "", alias.name)


def main() -> int:
    """Writes the stub, or with --check says whether it is current."""
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
