"""Profile an op or your own function: a table, a Chrome trace, flame graphs, Nsight tools.

`ridgeline profile gelu --impl triton` profiles an op; `ridgeline profile train.py:step` a function without arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.boundary import Launch
    from ridgeline.op import Case, Op

STEP = "step"
WARMUP = 3


@dataclass(frozen=True)
class Target:
    """The function to profile: a name, and a function without arguments that does one step."""

    name: str
    step: Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """A row of the table: an operator on the host or a kernel on the GPU. Own time per step, in microseconds."""

    name: str
    where: str
    calls: float
    cpu_us: float
    gpu_us: float


def target(
    text: str, impl: str | None = None, case: str | None = None, dtype: str | None = None, verb: str = "profile"
) -> Target:
    """Returns the target of the name of an op (forward and backward of one implementation) or of FILE.py:FUNCTION.

    Raises RidgelineError if there is no such op, file or function, or if the function needs arguments."""
    from ridgeline.op import RidgelineError, get

    path, colon, function = text.rpartition(":")
    if colon or text.endswith(".py"):
        if not colon:
            raise RidgelineError(f"{verb} takes an op or FILE.py:FUNCTION, and {text!r} names no function")
        return Target(text, user_function(Path(path), function, verb))
    op = get(text)
    return _of_op(op, impl, *_case(op, case, dtype))


def user_function(path: Path, name: str, verb: str = "profile") -> Callable[[], Any]:
    """Returns a function of a user's file, importing the file."""
    import importlib.util
    import inspect
    import sys

    from ridgeline.op import RidgelineError

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise RidgelineError(f"there is no Python file {str(path)!r} for {verb}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    with blaming(f"importing {path}"):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        others = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == path.stem]
        raise RidgelineError(f"{path} has no function {name!r}; it has {', '.join(others) or 'none'}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise RidgelineError(
            f"{verb} calls a function without arguments, and {path}:{name} needs some ({error})"
        ) from error
    return function


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Turns an exception of the user's code into a RidgelineError of one sentence that says where."""
    import traceback

    from ridgeline.op import RidgelineError

    try:
        yield
    except RidgelineError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        raise RidgelineError(f"{what} failed: {type(error).__name__}: {error} ({place})") from error


def _case(op: Op, name: str | None, dtype: str | None) -> tuple[Case, str]:
    """Returns the named case and dtype; by default the first benchmark on a GPU, or the first quick case on a CPU."""
    import torch

    from ridgeline.op import RidgelineError

    use = "bench" if torch.cuda.is_available() else "quick"
    case = op.case(name) if name else next((c for c in op.cases if c.use == use), op.cases[0])
    if dtype is not None and dtype not in case.dtypes:
        raise RidgelineError(f"{op.name}: case {case.name!r} has no dtype {dtype!r}; it has {', '.join(case.dtypes)}")
    preferred = "bfloat16" if torch.cuda.is_available() else "float32"
    return case, dtype or (preferred if preferred in case.dtypes else case.dtypes[0])


def _of_op(op: Op, impl: str | None, case: Case, dtype: str) -> Target:
    import torch

    from ridgeline.lab.measurement.law import as_tuple, leaves
    from ridgeline.select import find

    call = find(op, impl) if impl else op.function
    args, kwargs = case.make(dtype, "cuda" if torch.cuda.is_available() else "cpu")
    wanted = leaves(args)
    backward = impl is None or find(op, impl).differentiable
    incoming: list[torch.Tensor] = []

    def step() -> None:
        with span(f"{op.name} forward"):
            outputs = [o for o in as_tuple(call(*args, **kwargs)) if o.requires_grad]
        if backward and wanted and outputs:
            if not incoming:
                incoming.extend(torch.randn_like(o) for o in outputs)
            with span(f"{op.name} backward"):
                torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)

    return Target(f"{op.name}{' ' + impl if impl else ''}, {case.name} {dtype}", step)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Opens a named range in PyTorch's profiler and, on a GPU, in NVTX for nsys and ncu."""
    import torch

    on_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    if on_gpu:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            torch.cuda.nvtx.range_pop()


def _mark(launch: Launch) -> None:
    """Marks the start of a kernel for nsys."""
    import torch

    if torch.cuda.is_available() and torch.version.cuda is not None:
        torch.cuda.nvtx.mark(f"{getattr(launch.kernel, 'name', None) or launch.kernel.__name__} {launch.grid}")


def steps(what: Target, count: int, name: str = STEP) -> None:
    """Runs `count` steps, each in a range of its own, and synchronises with the GPU."""
    import torch

    from ridgeline import boundary

    with blaming(f"running {what.name}"), boundary.observe(_mark):
        for _ in range(count):
            with span(name):
                what.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def bare(what: Target, count: int) -> None:
    """Runs only the steps, for nsys and ncu, which record between `cudaProfilerStart` and `Stop`."""
    import torch

    steps(what, WARMUP, "warm-up")
    with torch.cuda.profiler.profile() if torch.cuda.is_available() else nullcontext():
        steps(what, count)


def profile(what: Target, count: int, folder: Path) -> tuple[list[Line], dict[str, str]]:
    """Profiles `count` steps and returns the table and the files written.

    They are trace.json for Perfetto, and for the host (cpu) and the GPU a flame graph, flame-*.svg, and the same stacks
    for speedscope, stacks-*.folded. Call stacks slow the host, so the table comes from a run without them.
    """
    import json

    import torch
    from torch.profiler import ProfilerActivity

    from ridgeline.lab.analysis import flame

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    steps(what, WARMUP, "warm-up")
    with torch.profiler.profile(activities=activities) as quick:
        steps(what, count)
    with torch.profiler.profile(activities=activities, with_stack=True) as full:
        steps(what, count)
    folder.mkdir(parents=True, exist_ok=True)
    files = {"trace": "trace.json"}
    trace = folder / files["trace"]
    full.export_chrome_trace(str(trace))
    host, gpu = flame.stacks(json.loads(trace.read_text()), STEP)
    for where, stacks, title in (("cpu", host, "host time"), ("gpu", gpu, "GPU time")):
        if stacks:
            files |= {f"flame_{where}": f"flame-{where}.svg", f"stacks_{where}": f"stacks-{where}.folded"}
            (folder / files[f"flame_{where}"]).write_text(flame.svg(stacks, f"{what.name}: {title}", count))
            (folder / files[f"stacks_{where}"]).write_text(flame.folded(stacks))
    return _table(quick, count), {name: str(folder / file) for name, file in files.items()}


def _table(profiler: Any, count: int) -> list[Line]:
    """Returns the own time per step of each operator and kernel, the longest first."""
    lines = []
    for event in profiler.key_averages():
        on_gpu = "CPU" not in str(event.device_type)
        if event.key in (STEP, "warm-up") or (on_gpu and event.is_user_annotation):
            continue
        gpu = event.self_device_time_total if on_gpu else 0.0
        cpu = 0.0 if on_gpu else event.self_cpu_time_total
        lines.append(Line(event.key, "gpu" if on_gpu else "cpu", event.count / count, cpu / count, gpu / count))
    return sorted(lines, key=lambda line: (-line.gpu_us, -line.cpu_us))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="OP | FILE.py:FUNCTION", help="an op, or a function of your own that takes no arguments"
    )
    parser.add_argument(
        "--impl", metavar="NAME", help="an implementation of the op (default: the one chosen automatically)"
    )
    parser.add_argument(
        "--case", metavar="NAME", help="a case of the op (default: its first benchmark; on a CPU its first quick case)"
    )
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU, if the case has it")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps to profile (default: 10)")
    parser.add_argument(
        "--out", type=Path, default=Path("profile"), metavar="FOLDER", help="write the files here (default: profile)"
    )
    parser.add_argument("--nsys", action="store_true", help="also record a timeline with Nsight Systems")
    parser.add_argument(
        "--ncu", action="store_true", help="also measure every kernel with Nsight Compute, without locking clocks"
    )
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)  # only the steps, for nsys and ncu
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(options: argparse.Namespace) -> int:
    import json
    import os
    from dataclasses import asdict

    os.environ.update(KINETO_LOG_LEVEL="6")  # before torch is imported; quiets its profiler

    from ridgeline.lab.measurement import nsight
    from ridgeline.op import RidgelineError

    if options.steps < 1:
        raise RidgelineError(f"--steps must be 1 or more, and is {options.steps}")
    what = target(options.target, options.impl, options.case, options.dtype)
    if options.bare:
        bare(what, options.steps)
        return 0
    try:
        lines, files = profile(what, options.steps, options.out)
    except OSError as error:
        raise RidgelineError(f"--out {options.out} cannot be written: {error.strerror}") from error
    tools = []
    if options.nsys:
        tools.append(nsight.nsys(_again(options, options.steps), options.out))
    if options.ncu:
        tools.append(nsight.ncu(_again(options, 1), options.out))
    if options.json:
        figures = {
            "target": what.name,
            "steps": options.steps,
            "lines": [asdict(line) for line in lines],
            "files": files,
        }
        print(json.dumps(figures | {"tools": [asdict(tool) for tool in tools]}, indent=1))
    else:
        _print(what, lines, files, tools)
    return 0


def _again(options: argparse.Namespace, count: int) -> list[str]:
    """Returns the command that runs the same steps in a process of its own."""
    import sys

    chosen = [f"--{name}={value}" for name in ("impl", "case", "dtype") if (value := getattr(options, name))]
    return [sys.executable, "-m", "ridgeline", "profile", options.target, *chosen, f"--steps={count}", "--bare"]


def _print(what: Target, lines: list[Line], files: dict[str, str], tools: list[Any]) -> None:
    from ridgeline.lab.tables import console, print_table

    out = console()
    for where, title in (("gpu", "kernels on the GPU"), ("cpu", "on the host")):
        some = [line for line in lines if line.where == where][:20]
        if some:
            total = sum(line.gpu_us + line.cpu_us for line in lines if line.where == where) or 1.0
            times = [(line, line.gpu_us + line.cpu_us) for line in some]
            rows = [(line.name[:90], f"{line.calls:g}", f"{us:.1f}", f"{us / total:.0%}") for line, us in times]
            print_table(f"{what.name}: {title}, own time per step", ["name"], ["calls", "us", ""], rows, out)
    for name, path in files.items():
        out.print(f"{name.replace('_', ' ')}: {path}", soft_wrap=True, highlight=False)
    for tool in tools:
        out.print(f"{tool.name}: {tool.said}", soft_wrap=True, highlight=False)
        for row in tool.rows:
            out.print("  " + ", ".join(f"{k} {v}" for k, v in row.items()), soft_wrap=True, highlight=False)
