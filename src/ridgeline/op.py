"""The definition of an operation: one `Op`, read by the library, the tests, the lab and the docs.

An op file makes one `Op` and registers its implementations, from the naive one to the best one.
This order is the op's ladder, and each implementation is a rung of it. Unless a call names an implementation, it runs
the last rung that is `served` (that is, ever chosen automatically) and supports the call.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch

OPS = Path(__file__).with_name("ops")
FLOATS = ("float32", "float16", "bfloat16")
CHECK = os.environ.get("RIDGELINE_CHECK") == "1"  # also validate values on a GPU, at the cost of a synchronisation
OWN = frozenset((torch.Tensor, torch.nn.Parameter))  # the types of tensors that no other package has changed


class RidgelineError(ValueError):
    """Invalid input. The message names what was given and what is accepted."""


@dataclass(frozen=True)
class Spec:
    """A tensor argument of a case: `Spec(4, 8)` is normally distributed random data in the case's dtype.

    Integers are uniform in [0, high); int8 without `high` covers its whole range."""

    shape: tuple[int, ...]
    dtype: str | None = None
    grad: bool = True
    high: int = 0

    def __init__(self, *shape: int, dtype: str | None = None, grad: bool = True, high: int = 0):
        for name, value in (("shape", shape), ("dtype", dtype), ("grad", grad), ("high", high)):
            object.__setattr__(self, name, value)

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if self.dtype else dtype
        if dtype.is_floating_point:
            base = torch.float32 if dtype != torch.float64 else dtype
            tensor = torch.randn(self.shape, dtype=base, device=device, generator=generator).to(dtype)
            return tensor.requires_grad_(self.grad)
        low, high = (-128, 128) if dtype == torch.int8 and not self.high else (0, max(self.high, 1))
        return torch.randint(low, high, self.shape, dtype=dtype, device=device, generator=generator)


class Columns(Spec):
    """A matrix with contiguous columns, like a transposed one."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return made.detach().mT.contiguous().mT.requires_grad_(made.requires_grad)


class OwnDtype(Spec):
    """Stands for the case's dtype itself, for an argument such as `out_dtype`."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> Any:
        return dtype


@dataclass(frozen=True)
class Case:
    """One call of an op.

    args, kwargs: the public arguments; a `Spec`, or a list of them, stands for random tensors.
    use: the purpose of the case:
        "check": small and awkward; only checked.
        "bench": timed and recorded on a GPU.
        "quick": timed on a laptop.
        "grid": many sizes, to plot how time and memory grow; timed by `bench --grid` only.
        "sample": sizes for which no tile configuration is committed; `tune --sample` tests the rules on them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = FLOATS
    use: str = "check"

    def make(self, dtype: str, device: str | torch.device = "cpu", seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
        """Returns fresh random arguments (args, kwargs). The same seed gives the same data on the same device."""
        generator = None
        if torch.device(device).type != "meta":
            generator = torch.Generator(device).manual_seed(seed)

        def made(value: Any) -> Any:
            if isinstance(value, list):
                return [made(v) for v in value]
            return value.make(getattr(torch, dtype), device, generator) if isinstance(value, Spec) else value

        return [made(a) for a in self.args], {k: made(v) for k, v in self.kwargs.items()}


@dataclass(frozen=True)
class Cost:
    """The minimal work of a perfect kernel: bytes read from and written to memory, and floating-point operations.

    units: the dtype that the matrix units multiply, where it is not the arguments'."""

    read: int
    write: int
    flops: int
    units: str | None = None

    @property
    def bytes(self) -> int:
        return self.read + self.write


@dataclass(frozen=True)
class Piece:
    """A call that makes up a larger one with others, and shares no sum with them.

    slices: what it takes of the first dimension of each tensor, by the argument's name, and of the results: "out". The
        same parts of the gradients are its own. values: arguments that it has instead of the larger call's."""

    slices: dict[str, slice]
    values: dict[str, Any] = field(default_factory=dict)


def nbytes(*tensors: torch.Tensor) -> int:
    """Returns the bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def readable(tensor: torch.Tensor) -> bool:
    """Returns whether the host may read a tensor's values to validate them.

    It may on a CPU, and with RIDGELINE_CHECK=1 on any device; never while tracing, capturing a graph or in `vmap`."""
    if not (tensor.is_cpu or CHECK) or tensor.is_meta or torch.compiler.is_compiling() or type(tensor) not in OWN:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def dense_only(op: str, values: Iterable[Any]) -> None:
    """Raises RidgelineError if a tensor among the values is sparse, nested or in another layout without strides."""
    for t in values:
        if isinstance(t, torch.Tensor) and (t.layout is not torch.strided or t.is_nested):
            kind, instead = ("nested", "to_padded_tensor(0)") if t.is_nested else (str(t.layout)[6:], "to_dense()")
            raise RidgelineError(f"{op}: it takes dense tensors, and one is {kind}; give its {instead}")


def dtensor(value: Any) -> bool:
    """Returns whether a value is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the values and in lists among them, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return [_copy(v) for v in value] if isinstance(value, list | tuple) else value


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the name of a tensor's dtype, such as "bfloat16"."""
    return str(tensor.dtype)[6:]


@dataclass(frozen=True)
class Implementation:
    """An implementation of an op: one rung of its ladder.

    idea: one line on what it does differently from the rung before.
    kind: "eager" (plain PyTorch), "compile" (torch.compile), "cuda", "triton" or "gluon".
    call: for eager and compile, a function of the public arguments.
    launchers: for kernels, {"fwd": f(outputs..., inputs...), "bwd": ...}, called inside the registered torch op.
    supports: f(inputs...) -> None if it can run the call, else the reason. Options come by keyword (eager and compile).
    served: whether it may be chosen automatically. Other rungs run only by `impl=`.
    unless: for a served kernel, f(public arguments or a launcher's inputs) -> None if automatic choice may take it,
        else the reason to prefer another rung. If every served kernel gives a reason, plain PyTorch runs. To be
        traceable it depends only on sizes and options, and its sentence contains no number: each size would compile a
        graph of its own. Where it returns None, the kernel must support the call and its backward.
    leaves: the directions to which `unless` applies.
    reads: whether the host reads values from the GPU, so that no CUDA graph can hold a call.
    gain: the least speed-up over the rung before, from counting the work it saves, not from timing; 0 if not stated.
    counter: the Nsight Compute metric that shows the idea at work.
    arch: the oldest compute capability it runs on, such as 90.
    newest: the newest one, if it uses features that later GPUs lack; 0 for any.
    shared: the bytes of shared memory that a block must be able to have, if that is more than 99 KiB.
    """

    op: Op
    name: str
    idea: str
    kind: str
    call: Callable[..., Any] | None = None
    launchers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    supports: Callable[..., str | None] | None = None
    dtypes: tuple[str, ...] = FLOATS
    served: bool = False
    unless: Callable[..., str | None] | None = None
    leaves: tuple[str, ...] = ("fwd", "bwd")
    differentiable: bool = True
    deterministic: bool = True
    reads: bool = False
    gain: float = 0.0
    counter: str = ""
    arch: int = 0
    newest: int = 0
    shared: int = 0

    @property
    def is_kernel(self) -> bool:
        return self.call is None

    def left(self, direction: str, *args: Any, **options: Any) -> str | None:
        """Returns why automatic choice leaves a call in this direction ("fwd" or "bwd") to another rung, or None."""
        return self.unless(*args, **options) if self.unless and direction in self.leaves else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs this implementation on the op's public arguments. Raises RidgelineError with the reason if it cannot."""
        return self.op.function(*args, **kwargs, impl=self.name)


class Op:
    """An operation: its public function, its reference, its cases, its cost and its implementations.

    function: the public function; it takes `impl=None` as its last keyword.
    reference: plain PyTorch with the function's arguments; in float64 it is the oracle.
    cost: f(*args, **kwargs) -> (forward Cost, backward Cost or None); it touches no data, so meta tensors are enough.
        A third Cost is for forward and backward in one step, if together they need less than the sum of both.
    roof: "copy", "int8" or "float8_e4m3fn" if the op's kernels help to measure that limit of the machine.
    standards: rungs whose errors set the tolerance (see `ridgeline.lab.Law`): the first of them that supports the call.
    residue: the error allowed in a row that cancels to zero, as a share of the norm of the largest row.
    mutates: positions of the arguments (tensors or lists of them) that the function changes in place. They count as
        results, after the returned ones.
    graphed: time forward in a CUDA graph of calls over copies of the arguments, as a decoder runs its short kernels.
        A second call must then give what the first gave.
    flops: for registered torch ops whose arguments `cost` cannot take by name, functions that count their operations,
        for `FlopCounterMode` (see `flops.py`).
    pieces: for calls whose copies in float64 fit in no memory: f(*args, **kwargs) -> calls that make up this one, each
        checked on its own (see `Piece`).
    sharding: which dimensions of a call the ranks of a mesh may split, for DTensors (see `parallel/sharding.py`):
        "x ...N, weight N -> ...N" names the dimensions of the arguments and of the results. A capital must be whole.
        Where a rank has a part of a dimension that a result lacks, results are summed. A function of the arguments
        returns such a string, or None if they allow none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        reference: Callable[..., Any],
        cases: list[Case],
        cost: Callable[..., tuple[Cost, Cost | None] | tuple[Cost, Cost | None, Cost | None]],
        roof: str | None = None,
        standards: tuple[str, ...] = ("torch",),
        residue: float = 0.0,
        mutates: tuple[int, ...] = (),
        graphed: bool = False,
        flops: dict[str, Callable[..., int]] | None = None,
        sharding: str | Callable[..., str | None] | None = None,
        pieces: Callable[..., Iterable[Piece]] | None = None,
    ):
        self.function, self.reference, self.cases, self.cost, self.roof = function, reference, cases, cost, roof
        self.standards, self.residue, self.mutates, self.graphed = standards, residue, mutates, graphed
        self.flops, self.sharding, self.pieces = flops or {}, sharding, pieces
        self.name = function.__name__
        self.family = function.__module__.removeprefix("ridgeline.ops.").split(".")[0]
        self.implementations: dict[str, Implementation] = {}
        self.kernel_dtypes: set[torch.dtype] = set()  # of served kernels; other dtypes run plain PyTorch
        self.always = False  # whether a Triton kernel, which runs on any GPU, serves all calls
        LOADED[self.name] = self

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def eager(self, name: str, idea: str, call: Callable[..., Any], *, kind: str = "eager", **facts: Any) -> None:
        """Registers an implementation in plain PyTorch: a function of the public arguments."""
        self.implementations[name] = Implementation(self, name, idea, kind, call, **facts)

    def compiled(
        self,
        idea: str,
        function: Callable[..., Any] | None = None,
        supports: Callable[..., str | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Registers torch.compile of the reference, or of another function of the same arguments, as rung `compile`.

        options: Inductor's configuration by name; names that this version of torch lacks are ignored."""

        @cache
        def compiled() -> Callable[..., Any]:
            from torch._inductor import list_options

            known = {k: v for k, v in (options or {}).items() if k in list_options()}
            return torch.compile(function or self.reference, dynamic=False, fullgraph=True, options=known or None)

        self.eager(
            "compile", idea, lambda *args, **kwargs: compiled()(*args, **kwargs), kind="compile", supports=supports
        )

    def kernel(
        self,
        name: str,
        idea: str,
        *,
        kind: str,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any] | None = None,
        **facts: Any,
    ) -> None:
        """Registers an implementation in kernels: launchers that fill the outputs given to them."""
        launchers = {"fwd": fwd} | ({"bwd": bwd} if bwd else {})
        implementation = Implementation(
            self, name, idea, kind, launchers=launchers, differentiable=bwd is not None, **facts
        )
        self.implementations[name] = implementation
        if implementation.served:
            self.kernel_dtypes |= {getattr(torch, d) for d in implementation.dtypes}
            self.always |= implementation.kind == "triton" and implementation.unless is None

    def fresh(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments, with copies of those that a call changes in place."""
        return [_copy(a) if n in self.mutates else a for n, a in enumerate(args)]

    def case(self, name: str) -> Case:
        for case in self.cases:
            if case.name == name:
                return case
        raise RidgelineError(f"{self.name} has no case {name!r}; its cases are {', '.join(c.name for c in self.cases)}")


LOADED: dict[str, Op] = {}  # the ops that have been made, perhaps in a module whose import still runs
COMPLETE: dict[str, Op] = {}  # those that `get` may return at once: their modules' imports have ended


def op_modules() -> dict[str, str]:
    """Returns every op's name and module, from the file names alone; it imports nothing."""
    found = {}
    for path in sorted(OPS.glob("*/[!_]*")):
        if path.suffix == ".py" or (path / "__init__.py").exists():
            found[path.stem] = f"ridgeline.ops.{path.parent.name}.{path.stem}"
    return found


def get(name: str) -> Op:
    """Returns the op of that name, importing its module. Raises RidgelineError, with the known names, if unknown."""
    if (op := COMPLETE.get(name)) is not None:  # backwards ask at every step, and must not read folders
        return op
    modules = op_modules()
    if name not in modules:
        if name in LOADED:  # of no file
            return LOADED[name]
        alike = get_close_matches(name, modules)
        meant = f" (perhaps {' or '.join(alike)} is meant)" if alike else ""
        raise RidgelineError(f"there is no op {name!r}{meant}; the ops are {', '.join(modules)}")
    module = importlib.import_module(modules[name])  # waits for another thread's import
    if not getattr(module.__spec__, "_initializing", False):  # else this thread's own import of it is under way
        COMPLETE[name] = LOADED[name]
    return LOADED[name]


def registry() -> dict[str, Op]:
    """Returns all ops by name, importing every op's module."""
    return {name: get(name) for name in op_modules()}
