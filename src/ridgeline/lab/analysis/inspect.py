"""Compile a kernel, with or without a GPU: PTX, SASS, registers, spills, shared memory.

The op is called on tensors without data while a GPU is pretended, and every launch it would make is compiled for that
GPU.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ridgeline.device as device

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from ridgeline.boundary import Launch
    from ridgeline.op import Case, Implementation, Op

ARCHES = tuple(device.ARCHES)
DIRECTIONS = ("forward", "backward")
TEXTS = ("ptx", "sass", "ttir", "ttgir", "llir", "amdgcn")


@dataclass(frozen=True)
class Resources:
    """What one kernel of an implementation takes on one architecture.

    registers, stack (bytes of local memory), spill_loads and spill_stores (bytes, as instructions stand in the code)
    are per thread; shared memory is bytes per block. loads and stores count instructions on global memory by their
    width in bytes ("tma": the copy engine). occupancy is the share of a multiprocessor's warps that can be resident,
    limited by `limit`. texts holds the code by kind: ptx, sass, ttir, ...
    """

    op: str
    implementation: str
    case: str
    dtype: str
    direction: str
    arch: str
    kernel: str
    kind: str
    threads: int
    registers: int
    stack: int
    spill_loads: int
    spill_stores: int
    shared_static: int
    shared_dynamic: int
    loads: dict[str, int]
    stores: dict[str, int]
    matrix: dict[str, int]
    atomics: int
    widest_load: int
    occupancy: float
    limit: str
    constants: dict[str, Any]
    texts: dict[str, str] = field(repr=False, compare=False)

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block, static and dynamic."""
        return self.shared_static + self.shared_dynamic

    @property
    def unwritten(self) -> list[str]:
        """Registers that the code reads before it writes them, a fault of the assembler; none without SASS."""
        from ridgeline.lab.analysis.disassembly import unwritten

        return unwritten(self.texts.get("sass", ""))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the code, for JSON."""
        return {k: v for k, v in asdict(replace(self, texts={})).items() if k != "texts"} | {"shared": self.shared}


def launches(
    op: Op, implementation: Implementation, case: Case, dtype: str, arch: str, directions: tuple[str, ...] = DIRECTIONS
) -> list[tuple[str, Launch]]:
    """(direction, launch) of every kernel that this call would start there. Nothing is started.

    arch: the name of a known card or architecture. Raises RidgelineError if there is none, or if the implementation
    cannot run there.
    """
    import torch

    from ridgeline import boundary
    from ridgeline.op import RidgelineError, tensors_of

    device.known(arch)
    if dtype not in case.dtypes:
        raise RidgelineError(f"{op.name}: case {case.name!r} has no dtype {dtype!r}; it has {', '.join(case.dtypes)}")
    if not implementation.is_kernel:
        kernels = ", ".join(i.name for i in op.implementations.values() if i.is_kernel)
        which = f"{op.name}: impl={implementation.name!r}"
        raise RidgelineError(f"{which} is PyTorch and has no kernels of its own; those that have: {kernels}")
    seen: list[tuple[str, Launch]] = []
    with device.pretend(arch):
        args, kwargs = case.make(dtype, "meta")
        with boundary.observe(lambda launch: seen.append(("forward", launch))):
            result = implementation(*args, **kwargs)
        outputs = [t for t in tensors_of([result]) if t.requires_grad]
        wanted = [a for a in tensors_of(args) if a.requires_grad]
        if "backward" in directions and "bwd" in implementation.launchers and outputs and wanted:
            with boundary.observe(lambda launch: seen.append(("backward", launch))):
                torch.autograd.grad(outputs, wanted, [torch.empty_like(t) for t in outputs], allow_unused=True)
    return [(direction, launch) for direction, launch in seen if direction in directions]


def resources(
    op: Op,
    implementation: Implementation,
    case: Case,
    dtype: str,
    arch: str,
    directions: tuple[str, ...] = DIRECTIONS,
    disassemble: bool = False,
) -> list[Resources]:
    """Compiles every kernel of a call, and returns what each takes. Equal kernels are compiled once per process.

    arch: the name of a known card or architecture. disassemble: count instructions in SASS (half a second per kernel)
    instead of in PTX, and keep its text. If the Triton interpreter is on, a process without it does the work.
    """
    from ridgeline.boundary import INTERPRETED

    if INTERPRETED:
        request = (op.name, implementation.name, case.name, dtype, arch, directions, disassemble)
        return _compiling_process().submit(_by_name, *request).result()
    call: dict[str, Any] = {"op": op.name, "implementation": implementation.name, "case": case.name, "dtype": dtype}
    made = launches(op, implementation, case, dtype, arch, directions)
    return [replace(of_launch(launch, disassemble), **call, direction=direction) for direction, launch in made]


@cache
def _compiling_process() -> ProcessPoolExecutor:
    """A process in which Triton compiles, for one in which Triton interprets."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_compile_here)


def _compile_here() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _by_name(op: str, implementation: str, case: str, dtype: str, arch: str, *options: Any) -> list[Resources]:
    from ridgeline.op import get
    from ridgeline.select import find

    return resources(get(op), find(get(op), implementation), get(op).case(case), dtype, arch, *options)


def signature(launch: Launch) -> tuple[Any, ...]:
    """Returns the facts that a launch is compiled from: launches with equal signatures have the same machine code."""
    from ridgeline.cuda import CudaKernel

    args: tuple[Any, ...] = ()
    if not isinstance(launch.kernel, CudaKernel):
        args = _specialised(launch.args, [p.do_not_specialize for p in launch.kernel.params])
    return id(launch.kernel), launch.device.arch, tuple(sorted(launch.constants.items())), args


def _specialised(args: Any, loose: Iterable[bool]) -> tuple[Any, ...]:
    """What Triton may specialise a kernel on, per argument. loose: numbers of which only the type matters."""
    import torch

    found: list[Any] = []
    for arg, free in zip(args, loose, strict=False):
        if isinstance(arg, torch.Tensor):
            found.append((arg.dtype, arg.data_ptr() % 16 == 0, arg.untyped_storage().nbytes() < 2**31))
        elif isinstance(arg, int) and not isinstance(arg, bool):
            found.append((-(2**31) <= arg < 2**31, not free and arg == 1, not free and arg % 16 == 0))
        elif isinstance(arg, tuple | list):
            found.append(_specialised(arg, repeat(free)))
        elif hasattr(arg, "block_shape"):
            found.append((arg.base.dtype, tuple(arg.block_shape), str(getattr(arg, "layout", None))))
        else:
            found.append(type(arg))
    return tuple(found)


_compiled_ones: dict[Any, Resources] = {}
Facts = tuple[dict[str, Any], dict[str, str], bytes | None]


def of_launch(launch: Launch, disassemble: bool = False) -> Resources:
    """Compiles a launch and reads its code. `resources` fills in which call it belongs to."""
    from ridgeline.cuda import CudaKernel
    from ridgeline.lab.analysis.disassembly import READERS, occupancy, sass

    key = (*signature(launch), disassemble)
    if key in _compiled_ones:
        return _compiled_ones[key]
    facts, texts, cubin = (_cuda if isinstance(launch.kernel, CudaKernel) else _triton)(launch)
    if cubin is not None and (disassemble or facts["stack"]):
        texts["sass"] = sass(cubin, facts["kernel"])
    code = next(READERS[kind](texts[kind]) for kind in ("sass", "ptx", "amdgcn") if kind in texts)
    nobody: dict[str, Any] = dict.fromkeys(("op", "implementation", "case", "dtype", "direction"), "")
    share, limit = occupancy(
        launch.device, facts["threads"], facts["registers"], facts["shared_static"] + facts["shared_dynamic"]
    )
    _compiled_ones[key] = Resources(
        **nobody,
        **facts,
        arch=launch.device.arch,
        spill_loads=code.spill_loads,
        spill_stores=code.spill_stores,
        loads=_by_width(code.loads),
        stores=_by_width(code.stores),
        matrix=dict(code.matrix),
        atomics=code.atomics,
        widest_load=code.widest_load,
        occupancy=round(share, 3),
        limit=limit,
        constants={k: _plain(v) for k, v in launch.constants.items()},
        texts=texts,
    )
    return _compiled_ones[key]


def compile_side_by_side(launches: Iterable[Launch], arch: str) -> None:
    """Compiles the Triton kernels among launches in parallel, so that `of_launch` finds them compiled.

    As many threads as processors, at most 4: LLVM and ptxas, which do most of the work, release Python's lock.
    """
    from concurrent.futures import ThreadPoolExecutor

    from triton.runtime._async_compile import AsyncCompileMode

    from ridgeline import boundary
    from ridgeline.cuda import CudaKernel

    kernels = {signature(launch): launch for launch in launches if not isinstance(launch.kernel, CudaKernel)}
    with (
        _triton_for(device.known(arch).arch),
        ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as threads,
        AsyncCompileMode(threads),
    ):
        for launch in kernels.values():
            if "assembler" in launch.constants:  # it must not change while other threads compile
                continue
            boundary.compiled(launch.kernel, launch.args, launch.constants)


def _cuda(launch: Launch) -> Facts:
    from ridgeline.lab.analysis.disassembly import section

    name, constants = launch.kernel.name, launch.constants
    compiled = launch.kernel.compile(launch.device.arch, constants)
    log = section(compiled.log, rf"Compiling entry function '{re.escape(name)}'", r"Compiling entry function")
    numbers = {what: int(number) for number, what in re.findall(r"(\d+) (?:bytes )?(registers|smem|stack frame)", log)}
    facts = {
        "kernel": name,
        "kind": "cuda",
        "threads": int(constants.get("block", 256)),
        "registers": numbers["registers"],
        "stack": numbers["stack frame"],
        "shared_static": numbers.get("smem", 0),
        "shared_dynamic": int(constants.get("shared", 0)),
    }
    ptx = section(compiled.ptx, rf"^\.visible \.entry {re.escape(name)}\(", r"^\s*// \.globl|^\.visible \.entry")
    return facts, {"ptx": ptx}, compiled.cubin


def _triton(launch: Launch) -> Facts:
    from ridgeline import boundary
    from ridgeline.lab.analysis.disassembly import usage

    with _triton_for(launch.device.arch):
        compiled = boundary.compiled(launch.kernel, launch.args, launch.constants)
    name, asm = compiled.metadata.name, compiled.asm
    texts = {kind: asm[kind] for kind in TEXTS if kind in asm}
    threads = compiled.metadata.num_warps * launch.device.warp
    if "amdgcn" in texts:
        numbers = {
            what: int(number)
            for what, number in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", texts["amdgcn"], re.MULTILINE)
        }
        registers, stack = numbers["vgpr_count"], numbers["private_segment_fixed_size"]
    else:
        registers, stack = usage(asm["cubin"], name)
        asked = re.search(r"\.reqntid (\d+)", texts["ptx"])
        threads = int(asked[1]) if asked else threads
    facts = {
        "kernel": name,
        "kind": "gluon" if launch.kernel.is_gluon() else "triton",
        "threads": threads,
        "registers": registers,
        "stack": stack,
        "shared_static": 0,
        "shared_dynamic": compiled.metadata.shared,
    }
    return facts, texts, asm.get("cubin")


def _plain(value: Any) -> Any:
    """A constant as JSON can hold it: a number or a string as it is, a function by its name."""
    return value if isinstance(value, int | float | str | None) else getattr(value, "__name__", str(value))


def _by_width(counts: dict[str, int]) -> dict[str, int]:
    """Widest first, the copy engine before all."""
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "tma", 0 if item[0] == "tma" else -int(item[0]))))


class _NoGpu:
    """Stands in for a GPU's driver in Triton, and answers only what compilation asks.

    Its device is named after the architecture, so that kernels compiled here never mix with those that really run.
    """

    def __init__(self, arch: str):
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return (
            GPUTarget("cuda", int(self.arch[3:]), 32)
            if self.arch.startswith("sm_")
            else GPUTarget("hip", self.arch, 64)
        )

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def _triton_for(arch: str) -> Iterator[None]:
    """Inside, Triton compiles for that architecture; afterwards it has its own driver again."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_NoGpu(arch))
    try:
        yield
    finally:
        driver.set_active(before)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument("--impl", required=True, help="the implementation, as `ridgeline list` names it")
    target = f"the architecture or card to compile for: {', '.join((*ARCHES, *device.KNOWN))} (default: sm_90)"
    parser.add_argument("--arch", default="sm_90", help=target)
    parser.add_argument("--case", help="a case of the op (default: its first benchmark)")
    parser.add_argument("--dtype", help="default: bfloat16 if the case has it, else its first")
    parser.add_argument("--direction", choices=DIRECTIONS, help="default: both")
    parser.add_argument("--show", choices=TEXTS, help="print this code of every kernel")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write all code there, one file each")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def default_case(op: Op, name: str | None, dtype: str | None) -> tuple[Case, str]:
    """The named case or the op's first benchmark, and the named dtype, else bfloat16 if the case has it."""
    case = op.case(name) if name else next((c for c in op.cases if c.use == "bench"), op.cases[0])
    return case, dtype or ("bfloat16" if "bfloat16" in case.dtypes else case.dtypes[0])


def main(options: argparse.Namespace) -> int:
    import json

    from ridgeline.op import RidgelineError, get
    from ridgeline.select import find

    op = get(options.op)
    case, dtype = default_case(op, options.case, options.dtype)
    directions = (options.direction,) if options.direction else DIRECTIONS
    found = resources(op, find(op, options.impl), case, dtype, options.arch, directions, disassemble=True)
    if not found:
        raise RidgelineError(f"{op.name} {options.impl} starts no kernel in {' or '.join(directions)} of {case.name}")
    if options.show and not any(options.show in r.texts for r in found):
        raise RidgelineError(
            f"{op.name} {options.impl} has no {options.show} for {options.arch}; it has {', '.join(found[0].texts)}"
        )
    if options.out:
        _write(found, options.out)
    if options.json:
        print(json.dumps([r.to_dict() for r in found], indent=1))
    elif options.show:
        for r in found:
            print(f"// {r.kernel}, {r.direction}\n{r.texts.get(options.show, '')}")
    else:
        _print(found)
    return 0


def _write(found: list[Resources], folder: Path) -> None:
    from ridgeline.op import RidgelineError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index, r in enumerate(found):
            for kind, text in r.texts.items():
                (folder / f"{index}-{r.op}-{r.implementation}-{r.kernel}-{r.direction}.{r.arch}.{kind}").write_text(
                    text
                )
    except OSError as error:
        raise RidgelineError(f"--out {folder} cannot be written: {error.strerror}") from error


def _print(found: list[Resources]) -> None:
    from ridgeline.lab.tables import print_table

    first = found[0]
    title = f"{first.op} {first.implementation}, {first.case} {first.dtype}, compiled for {first.arch}"
    facts = {
        "threads per block": lambda r: f"{r.threads}",
        "registers per thread": lambda r: f"{r.registers}",
        "spilled, bytes": lambda r: f"{r.spill_stores} out, {r.spill_loads} in" if r.stack else "none",
        "shared memory, bytes": lambda r: f"{r.shared:,}",
        "loads by bytes": lambda r: ", ".join(f"{n} x {w}" for w, n in r.loads.items()) or "none",
        "stores by bytes": lambda r: ", ".join(f"{n} x {w}" for w, n in r.stores.items()) or "none",
        "atomics": lambda r: str(r.atomics),
        "matrix instructions": lambda r: "\n".join(f"{n} x {m}" for m, n in r.matrix.items()) or "none",
        "read before written": lambda r: ", ".join(r.unwritten) or ("none" if "sass" in r.texts else "not looked for"),
        "occupancy": lambda r: f"{r.occupancy:.0%}" + (f" ({r.limit})" if r.limit else ""),
        "constants": lambda r: "\n".join(f"{k}={v}" for k, v in r.constants.items()),
    }
    rows = [(what, *[say(r) for r in found]) for what, say in facts.items()]
    print_table(title, [""], [f"{r.kernel}\n{r.direction}" for r in found], rows)
