"""The kernels that an implementation starts, with the source of each and of the functions that it calls."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.boundary import Launch
from ridgeline.cuda import CudaKernel
from ridgeline.lab.analysis.inspect import launches
from ridgeline.op import Case, Implementation, Op, RidgelineError

SRC = Path(ridgeline.__file__).parent
ARCH = "sm_90"  # the architecture that most of the kernels were written for


@dataclass(frozen=True)
class Source:
    """A function of a kernel: its name, its file, the line where it starts, its text and its language."""

    name: str
    path: Path
    line: int
    text: str
    language: str

    @property
    def where(self) -> str:
        """The file within the package, such as "ops/rowwise/_rows.py"."""
        return str(self.path.relative_to(SRC)) if self.path.is_relative_to(SRC) else self.path.name


@dataclass(frozen=True)
class Call:
    """The launches of an implementation in one call, (direction, launch) each; else the reason why there are none."""

    case: str
    dtype: str
    launches: list[tuple[str, Launch]]
    reason: str = ""


def call(op: Op, rung: Implementation, first: Case, dtype: str) -> Call:
    """What an implementation in kernels launches on ARCH: in the given case, else in the first one that it supports."""
    reason = ""
    others = sorted((c for c in op.cases if c is not first), key=lambda c: c.use != "bench")
    for case in (first, *others):
        names = [d for d in (dtype, *case.dtypes) if d in case.dtypes and d in rung.dtypes] or list(case.dtypes)
        try:
            found = launches(op, rung, case, names[0], ARCH)
        except RidgelineError as error:
            reason = reason or str(error).split("cannot run this call: ")[-1]
        else:
            if found:
                return Call(case.name, names[0], found)
    return Call(first.name, dtype, [], reason)


def sources(kernel: Any) -> list[Source]:
    """The kernel's own function first, then the package's functions that it calls, in the order of their calls."""
    if isinstance(kernel, CudaKernel):
        text = kernel.path.read_text()
        own, line = cuda_function(text, kernel.name)
        return [Source(kernel.name, kernel.path, line, own, "cuda")]
    found: dict[int, Source] = {}
    walk(kernel, found)
    return list(found.values())


def walk(function: Any, found: dict[int, Source]) -> None:
    """Adds a Triton or Gluon function and, depth first, those of the package that it calls."""
    python = getattr(function, "fn", None)
    if python is None or id(function) in found:
        return
    lines, start = inspect.getsourcelines(python)
    path = Path(inspect.getsourcefile(python) or "")
    if not path.is_relative_to(SRC):
        return
    found[id(function)] = Source(python.__name__, path, start, "".join(lines), "python")
    for value in used(python, "".join(lines)):
        walk(value, found)


def used(python: Any, text: str) -> Iterator[Any]:
    """The jitted functions that a function's text names, also those reached through a module."""
    scope = python.__globals__ | inspect.getclosurevars(python).nonlocals
    for name in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", text)):
        head, *rest = name.split(".")
        value = scope.get(head)
        for part in rest:
            value = getattr(value, part, None)
        if hasattr(value, "fn") and hasattr(value, "params"):
            yield value


def cuda_function(text: str, name: str) -> tuple[str, int]:
    """A __global__ function of a CUDA C++ text with its template line, and the line where it starts."""
    match = re.search(rf"^(?:template[^\n]*\n)?[^\n;{{}}]*__global__[^;{{}}]*?\b{name}\s*\(", text, re.MULTILINE)
    if match is None:  # a macro makes it: the whole file is the source
        return text, 1
    depth = 0
    for end in range(text.index("{", match.end()), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            break
    return text[match.start() : end + 1], text.count("\n", 0, match.start()) + 1


def digest(launch: Launch) -> str:
    """Names what a launch's machine code depends on: the sources, the constants and the kinds of arguments."""
    if isinstance(launch.kernel, CudaKernel):
        texts = [path.read_text() for path in sorted(launch.kernel.path.parent.glob("*.cu*"))]
        texts += [path.read_text() for path in sorted((SRC / "tiles").glob("*.cuh"))]
        texts.append(launch.kernel.name)
    else:
        texts = [source.text for source in sources(launch.kernel)]
    constants = sorted((k, str(getattr(v, "__name__", v))) for k, v in launch.constants.items())
    kinds = [str(getattr(arg, "dtype", type(arg).__name__)) for arg in launch.args]
    return hashlib.sha256(repr((launch.device.arch, texts, constants, kinds)).encode()).hexdigest()[:16]
