"""The rules of docs/design.md: who imports whom, the budgets, and that generated files are current."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.lab.presentation import readme, stubs

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src/ridgeline"
PYTHON = sorted(SRC.rglob("*.py"))
CODE = sorted(p for p in SRC.rglob("*") if p.suffix in (".py", ".cu", ".cuh"))
OPS = [p for p in PYTHON if p.parent.parent.name == "ops" and not p.name.startswith("_")]

CORE = {"op", "boundary", "replay", "codegen", "select", "tuning", "device", "cuda", "flops", "tiles"}
MODELS = {"transformers", "liger_kernel"}  # imported only in the processes that measure whole training steps
LAB = {"torch", "triton", "numpy", "cuda", "rich", "jinja2", "markupsafe", "altair", "vl_convert"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields every module that a file imports, also by import_module("..."), and whether at its top level."""
    package = ["ridgeline", *path.relative_to(SRC).parts[:-1]]

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            top, children = False, node.body + node.orelse
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((a.name, top) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (
                ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield from ((f"{module}.{a.name}", top) for a in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), False
        for child in children:
            yield from walk(child, top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return walk(ast.parse(path.read_text()), True)


def allowed(path: Path, module: str) -> bool:
    """Returns whether this file may import this module of ridgeline."""
    where, target = path.relative_to(SRC).parts, module.split(".")[1:]
    if where[0] == "ops":
        return target[0] in CORE or target[:2] == ["ops", where[1]]
    if where[0] == "tiles":
        return target[0] == "tiles"
    if where[0] == "lab":
        return target[0] != "ops"
    if where == ("lm", "lab.py"):
        return target[0] in ("lab", "op")
    return target[0] not in ("lab", "ops")


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(SRC)))
def test_who_may_import_whom(path: Path) -> None:
    found = list(imports(path))
    wrong = [m for m, _ in found if m.startswith("ridgeline.") and not allowed(path, m)]
    assert not wrong, f"{path.relative_to(ROOT)} may not import {wrong}"


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(SRC)))
def test_packages(path: Path) -> None:
    where = path.relative_to(SRC).parts
    for module, at_top in imports(path):
        package = module.split(".")[0]
        if package in sys.stdlib_module_names or package == "ridgeline":
            continue
        if "peers" in where:
            assert package in LAB or not at_top, f"{module} is a peer's: imported inside functions"
        elif where[0] == "lab":
            assert package in LAB or (package in MODELS and not at_top), module
        elif where[0] == "hf":
            assert package == "torch" or (package == "transformers" and not at_top), module
        else:
            assert package in ("torch", "triton") or (package == "cuda" and not at_top), module


def test_detects_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    path = tmp_path / "ops/rowwise/a.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from ridgeline.ops.pointwise import mul\nfrom ridgeline.op import Op\n"
        "def f():\n    from ridgeline.lab import clock\n"
    )
    assert [m for m, _ in imports(path) if not allowed(path, m)] == [
        "ridgeline.ops.pointwise.mul",
        "ridgeline.lab.clock",
    ]


# --- the rooms of a folder: see "Who may import whom"

ROOMS = ("measurement", "analysis", "presentation")  # of the lab; each imports only itself and the rooms before it
NEIGHBOURS = 5  # files of its own folder that a file may import
CROWDED = {"lab/measurement/record.py": 9}  # files that import more of them; entries only shrink and go


def home(module: str) -> Path | None:
    """Returns the file that a dotted name of ridgeline is in: "ridgeline.op.Op" is in op.py."""
    parts = module.split(".")[1:]
    for n in range(len(parts), 0, -1):
        for path in (SRC.joinpath(*parts[:n]).with_suffix(".py"), SRC.joinpath(*parts[:n], "__init__.py")):
            if path.is_file():
                return path
    return None


def imported(path: Path) -> set[Path]:
    """Returns the other files of ridgeline that a file imports from."""
    return {found for module, _ in imports(path) if module.startswith("ridgeline.") and (found := home(module))} - {
        path
    }


def neighbours(path: Path) -> set[Path]:
    """Returns the files of its own folder, and the packages in it, that a file imports from."""
    return {p for p in imported(path) if path.parent in (p.parent, p.parent.parent if p.stem == "__init__" else None)}


def private(path: Path) -> list[str]:
    """Returns the private names of other files of ridgeline that a file imports or reaches through their module."""
    ours = [m for m, _ in imports(path) if m.startswith("ridgeline.")]
    modules = {m for m in ours if (found := home(m)) and m.split(".")[-1] in (found.stem, found.parent.name)}
    names = [m for m in ours if m.split(".")[-1].startswith("_") and m not in modules]
    tree = ast.parse(path.read_text())
    last = {m.split(".")[-1] for m in modules}
    bound = {
        a.asname or a.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for a in node.names
        if a.name.split(".")[-1] in last
    }
    reached = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)]
    return names + [ast.unparse(n) for n in reached if ast.unparse(n.value) in bound]


def subject(path: Path) -> str:
    """Returns the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def structure(folder: Path) -> dict[str, list[str]]:
    """Returns what breaks the rules of rooms in the files of a folder, per rule."""
    files = sorted(folder.rglob("*.py"))
    subjects = {p: subject(p) for p in files}
    crowds = {p: len(neighbours(p)) for p in files}
    return {
        "imports too many neighbours": [f"{p.relative_to(SRC)}: {n}" for p, n in crowds.items() if n > NEIGHBOURS],
        "has no docstring that names one subject in one sentence": [
            f"{p.relative_to(SRC)}: {line}"
            for p, line in subjects.items()
            if not re.fullmatch(r"[^;]+?[^;.]\.", line)
            or re.search(r"\. [A-Z]", line)
            or list(subjects.values()).count(line) > 1
        ],
    }


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(SRC)))
def test_private_names_stay_in_their_files(path: Path) -> None:
    assert not private(path), f"{path.relative_to(ROOT)} takes private names of other files"


def test_the_structure_of_the_lab() -> None:
    crowded = [f"{name}: {n}" for name, n in CROWDED.items() if name.startswith("lab/")]
    found = structure(SRC / "lab")
    assert found.pop("imports too many neighbours") == crowded, "CROWDED says how many each may import, to the number"
    assert not [f"{rule}: {which}" for rule, whiches in found.items() for which in whiches]


def test_the_rooms_of_the_lab() -> None:
    """Each room imports only itself and those before it, and no two files of the lab import each other."""
    files = sorted((SRC / "lab").rglob("*.py"))
    for path in files:
        room, *_ = path.relative_to(SRC / "lab").parts
        place = ROOMS.index(room) if room in ROOMS else -1
        later = [p for p in imported(path) if p.parts[: len(SRC.parts) + 1] == (*SRC.parts, "lab")]
        later = [p for p in later if (r := p.relative_to(SRC / "lab").parts[0]) in ROOMS and ROOMS.index(r) > place]
        assert not later, f"{path.relative_to(ROOT)} imports {later} of a later room"
    TopologicalSorter({path: imported(path) & {*files} for path in files}).prepare()  # raises for a cycle


def test_detects_what_breaks_the_rules_of_rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    folder = tmp_path / "lab"
    (folder / "sub").mkdir(parents=True)
    for name in ("b", "c", "d", "e", "_f"):
        (folder / f"{name}.py").write_text(f'"""The {name} of the lab."""\n')
    (folder / "sub/__init__.py").write_text('"""One subject. And another."""\n')
    lines = [
        "from ridgeline.lab import b as bee, c, d, e, _f",
        "import ridgeline.lab.sub",
        "x = bee._hidden, _f.x, c.y, ridgeline.lab.sub._deep",
    ]
    (folder / "a.py").write_text("\n".join(['"""The b of the lab."""', *lines, "from ridgeline.lab.d import _name"]))
    assert private(folder / "a.py") == ["ridgeline.lab.d._name", "bee._hidden", "ridgeline.lab.sub._deep"]
    assert structure(folder) == {
        "imports too many neighbours": ["lab/a.py: 6"],
        "has no docstring that names one subject in one sentence": [
            "lab/a.py: The b of the lab.",
            "lab/b.py: The b of the lab.",
            "lab/sub/__init__.py: One subject. And another.",
        ],
    }


def test_the_library_needs_torch_and_triton_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[<>=~! ]", d)[0] for d in project["dependencies"]] == ["torch", "triton"]


def fresh(code: str) -> str:
    """Returns what a new Python process prints that runs this code."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()


def test_importing_ridgeline_imports_no_torch() -> None:
    assert fresh("import sys, ridgeline; print('torch' in sys.modules)") == "False"


def test_the_labs_public_names_are_functions_whatever_was_imported() -> None:
    """A room or a module named like one of them would hide it."""
    modules = [".".join(("ridgeline", *p.relative_to(SRC).with_suffix("").parts)) for p in (SRC / "lab").glob("*/*.py")]
    code = "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)
    code += "\nfrom ridgeline.lab import Law, benchmark, check, differs, measure\n"
    assert fresh(f"{code}print([type(f).__name__ for f in (Law, benchmark, check, differs, measure)])") == str(
        ["type", *["function"] * 4]
    )


def test_help_is_instant() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ridgeline", "--help"], check=True, capture_output=True, cwd=ROOT)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.3


def test_verbs_are_light() -> None:
    """Importing the modules of all verbs, for their help, imports none of the heavy packages."""
    modules = sorted({cli.module_of(module) for module, _ in cli.VERBS.values()})
    heavy = ("torch", "triton", "numpy", "rich", "jinja2", "altair")
    everything = "\n".join(f"import {m}" for m in modules)
    assert fresh(f"import sys\n{everything}\nprint([h for h in {heavy} if h in sys.modules])") == "[]"


def test_the_table_of_verbs_is_current() -> None:
    modules = [name for name, _ in cli.VERBS.values()]
    for verb, (name, line) in cli.VERBS.items():
        module = import_module(cli.module_of(name))
        if modules.count(name) > 1:
            assert hasattr(module, f"{verb}_main"), f"{name} has several verbs"
        else:
            first = (module.__doc__ or "").splitlines()[0].rstrip(".")
            assert first[0].lower() + first[1:] == line, verb


def test_the_stub_is_current() -> None:
    assert stubs.STUB.read_text() == stubs.stub(), "run: make pyi"


def test_the_measured_tables_are_current() -> None:
    assert readme.stale(ROOT) == [], "run: make readme"


# --- the budgets


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_op_files_are_short() -> None:
    assert statistics.median(map(lines, OPS)) <= 150, {p.stem: lines(p) for p in OPS}


COLUMNS = 120
# Ruff holds Python to the same width, but for pragmas.
WRITTEN = [
    path
    for folder in ("src", "docs", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cu", ".cuh", ".js", ".css", ".j2")
]


def wide(path: Path) -> list[str]:
    """Returns the lines of a file that have too many columns, with their numbers."""
    rows = enumerate(path.read_text().splitlines(), 1)
    return [f"{path.name}:{n}: {len(row)} columns" for n, row in rows if len(row) > COLUMNS]


def test_lines_have_at_most_120_columns() -> None:
    assert {path.suffix for path in WRITTEN} == {".cu", ".cuh", ".js", ".css", ".j2"}
    assert not [line for path in WRITTEN for line in wide(path)]


def test_detects_a_line_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a.cuh"
    path.write_text(f"{'x' * COLUMNS}\n{'ü' * COLUMNS}\n{'x' * (COLUMNS + 1)}\n")
    assert wide(path) == ["a.cuh:3: 121 columns"]


def test_few_environment_variables() -> None:
    read = re.compile(r"""(?:environ(?:\.get\(|\.setdefault\(|\.pop\(|\[)|getenv\()\s*["'](\w+)["']""")
    names = {name for path in PYTHON for name in read.findall(path.read_text())}
    assert len(names) <= 5, names


def significant(path: Path) -> list[str]:
    """Returns a file's lines without comments, docstrings, imports, blank lines and lone brackets, evenly spaced."""
    text = path.read_text()
    if path.suffix == ".py":
        rows = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            documented = isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and ast.get_docstring(node)
            for gone in (
                [node.body[0]] if documented else [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
            ):
                rows[gone.lineno - 1 : gone.end_lineno] = [""] * (gone.end_lineno - gone.lineno + 1)
        rows = [re.sub(r"(^|\s)#.*", "", row) for row in rows]
    else:
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        rows = [re.sub(r"//.*|^\s*#include.*", "", row) for row in text.splitlines()]
    return [" ".join(row.split()) for row in rows if re.search(r"\w", row)]


def repeated(files: dict[str, list[str]], run: int = 6) -> tuple[float, list[str]]:
    """Returns the share of lines in a run of `run` lines seen before, in any file, and where these lines are."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    copies: set[tuple[str, int]] = set()
    for name, rows in files.items():
        for i in range(len(rows) - run + 1):
            first = seen.setdefault(tuple(rows[i : i + run]), (name, i))
            if first != (name, i) and not (first[0] == name and i - first[1] < run):
                copies.update((name, i + k) for k in range(run))
    return len(copies) / max(1, sum(map(len, files.values()))), sorted(
        {f"{name}: {files[name][i]}" for name, i in copies}
    )


def test_little_is_repeated() -> None:
    share, where = repeated({str(p.relative_to(SRC)): significant(p) for p in CODE})
    assert share < 0.03, f"{share:.1%} is repeated:\n" + "\n".join(where)


def test_detects_repetition(tmp_path: Path) -> None:
    block = [f"x{i} = f({i})" for i in range(7)]
    assert repeated({"a": [*block, "y = 1"], "b": ["z = 2", *block]})[0] == 7 / 16
    assert repeated({"a": block, "b": block[:5]})[0] == 0
    path = tmp_path / "a.py"
    path.write_text(
        '"""Doc."""\nimport os\n\n\ndef f(x):  # why\n    """Doc\n    string."""\n    return (\n        x\n    )\n'
    )
    assert significant(path) == ["def f(x):", "return (", "x"]


# --- how the code reads, family by family of ops

FAMILIES = sorted(p.name for p in (SRC / "ops").iterdir() if p.is_dir() and p.name != "__pycache__")
PARAMETERS, FUNCTION_LINES = 14, 80


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon compiles the function."""
    return any(re.match(r"(triton|gluon)\.(jit|constexpr_function)\b", ast.unparse(d)) for d in function.decorator_list)


def long_signatures(path: Path) -> list[str]:
    return [f.name for f in functions(path) if is_kernel(f) and len(f.args.args) > PARAMETERS]


def long_functions(path: Path) -> list[str]:
    return [f.name for f in functions(path) if (f.end_lineno or 0) - f.lineno >= FUNCTION_LINES]


def of_the_family(family: str) -> list[Path]:
    return sorted((SRC / "ops" / family).rglob("*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_take_few_arguments(family: str) -> None:
    wrong = {str(p): names for p in of_the_family(family) if (names := long_signatures(p))}
    assert not wrong, wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_are_short(family: str) -> None:
    wrong = {str(p): names for p in of_the_family(family) if (names := long_functions(p))}
    assert not wrong, wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_files_import_few_of_their_family(family: str) -> None:
    files = of_the_family(family)
    crowds = {str(p): sorted(imported(p) & {*files}) for p in files}
    wrong = {p: others for p, others in crowds.items() if len(others) > NEIGHBOURS}
    assert not wrong, wrong


def test_detects_what_reads_badly(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    many = ", ".join(f"a{n}" for n in range(PARAMETERS + 1))
    body = "    x = 1\n" * FUNCTION_LINES
    path.write_text(f"@triton.jit(debug=True)\ndef f({many}):\n    pass\ndef g():\n{body}")
    assert (long_signatures(path), long_functions(path)) == (["f"], ["g"])
