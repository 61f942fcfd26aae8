"""Everything there is to know about an operation: one `Op`, read by the library, the tests, the lab and the docs.

An op file makes one `Op` and registers its implementations on it, from the naive one to the best one.
Their order is the op's ladder; the last one that is `served` and supports a call is what users get.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch

OPS = Path(__file__).with_name("ops")
FLOATS = ("float32", "float16", "bfloat16")
CHECK = os.environ.get("RIDGELINE_CHECK") == "1"  # values on a GPU are read to validate them, at the price of a sync
_OWN = (torch.Tensor, torch.nn.Parameter)


class RidgelineError(ValueError):
    """An input that is not accepted: the message names what was given and what is accepted."""


@dataclass(frozen=True)
class Spec:
    """A tensor of a case: `Spec(4, 8)` is normal random data in the case's dtype; integers are uniform in [0, high), and without a
    `high` those of 8 bits in all they can be."""

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
    """A matrix whose columns are contiguous, as a transposed one's are."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return made.detach().mT.contiguous().mT.requires_grad_(made.requires_grad)


class OwnDtype(Spec):
    """Stands for the case's dtype itself, as an argument such as `out_dtype`."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> Any:
        return dtype


@dataclass(frozen=True)
class Case:
    """One call of an op. `use` says what for: "check" (small, awkward), "bench" (recorded on a GPU), "quick" (timed on a laptop),
    "grid" (timed when asked for: many sizes, for a picture of how time and memory grow), "sample" (sizes that no configuration was made
    for: `tune --sample` tries the rules on them).

    args, kwargs: the public arguments; a `Spec`, or a list of them, stands for random tensors."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = FLOATS
    use: str = "check"

    def make(self, dtype: str, device: str | torch.device = "cpu", seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
        """Fresh random arguments of this case: (args, kwargs). The same seed gives the same data on the same device."""
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
    """The least that a perfect kernel must do: bytes read from and written to memory, and floating-point operations."""

    read: int
    write: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read + self.write


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors' elements, each counted once."""
    return sum(t.numel() * t.element_size() for t in tensors)


def readable(tensor: torch.Tensor) -> bool:
    """Whether the host may read a tensor's values to validate them: on a CPU, anywhere with RIDGELINE_CHECK=1; not while tracing."""
    return (tensor.is_cpu or CHECK) and not (tensor.is_meta or torch.compiler.is_compiling()) and type(tensor) in _OWN


def dense_only(op: str, values: Iterable[Any]) -> None:
    """Raises RidgelineError where a tensor among the values is sparse or nested, or its layout has no strides for another reason."""
    for t in values:
        if isinstance(t, torch.Tensor) and (t.layout is not torch.strided or t.is_nested):
            kind, instead = ("nested", "to_padded_tensor(0)") if t.is_nested else (str(t.layout)[6:], "to_dense()")
            raise RidgelineError(f"{op}: it takes dense tensors, and one is {kind}; give its {instead}")


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments, those in lists too, in order."""
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
    """Such as "bfloat16"."""
    return str(tensor.dtype)[6:]


@dataclass(frozen=True)
class Implementation:
    """A rung of an op's ladder.

    kind: "eager" (plain PyTorch), "compile" (torch.compile), "cuda", "triton" or "gluon".
    call: for eager and compile, a function of the public arguments.
    launchers: for kernels, {"fwd": f(outputs..., inputs...), "bwd": ...}, started from inside the registered torch op.
    supports: f(first tensor, *rest of the inputs, and of eager and compile the options by keyword) -> None, or the reason why not.
    unless: of a served kernel, f(public arguments, or a launcher's inputs) -> why a call that names no rung is left to another rung, plain
        PyTorch where every served kernel says so, or None. It looks at sizes and options alone, and its sentence names no number, so that
        it can be traced: a size in a sentence would be a graph of its own. Where it says None, a served kernel must support the call, and
        its backward.
    leaves: the directions in which `unless` is asked.
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
    gain: float = (
        0.0  # how many times as fast as the rung before it must be by what it saves, counted, not measured; 0: not said
    )
    counter: str = ""  # the metric of Nsight Compute that shows the idea at work
    arch: int = 0  # the oldest compute capability that it runs on, as 90
    newest: int = 0  # the newest, where it uses what later ones have not; 0 for any

    @property
    def is_kernel(self) -> bool:
        return self.call is None

    def left(self, direction: str, *args: Any, **options: Any) -> str | None:
        """Why a call that names no rung is left to another in this direction, "fwd" or "bwd", or None."""
        return self.unless(*args, **options) if self.unless and direction in self.leaves else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs this implementation on the op's public arguments, or raises with the reason why it cannot."""
        return self.op.function(*args, **kwargs, impl=self.name)


class Op:
    """An operation: its public function, its reference, its cases, its cost and its implementations.

    function: the public function; it takes `impl=None` as its last keyword.
    reference: plain PyTorch with the function's arguments; in float64 it is the oracle.
    cost: f(*args, **kwargs) -> (forward Cost, backward Cost or None), without touching data (meta tensors will do); a third Cost is of
        forward and backward in one step, where together they need less than each alone.
    roof: "copy", "int8" or "float8_e4m3fn" for an op whose kernels are among what measures that roof of the machine.
    standards: the rungs whose errors set what the law of tolerance allows: the first of them that takes a call.
    residue: what a row that is zero by cancelling may hold, as a share of the largest row.
    mutates: positions of the arguments (tensors, or lists of them) that the function changes in place: they count as results
    after what it returns.
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
    ):
        self.function, self.reference, self.cases, self.cost, self.roof = function, reference, cases, cost, roof
        self.standards, self.residue, self.mutates = standards, residue, mutates
        self.name = function.__name__
        self.family = function.__module__.removeprefix("ridgeline.ops.").split(".")[0]
        self.implementations: dict[str, Implementation] = {}
        self.kernel_dtypes: set[torch.dtype] = set()  # what served kernels take; calls in others go to plain PyTorch
        self.always = False  # whether Triton, which every GPU and the interpreter run, serves all calls
        _registry[self.name] = self

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
        """Registers torch.compile of the reference, or of another function of the same arguments, as the rung `compile`.

        options: of Inductor, by the names of its configuration; those that this torch has not are left out."""

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
        """Registers an implementation in kernels: launchers that fill given outputs."""
        launchers = {"fwd": fwd} | ({"bwd": bwd} if bwd else {})
        implementation = Implementation(
            self, name, idea, kind, launchers=launchers, differentiable=bwd is not None, **facts
        )
        self.implementations[name] = implementation
        if implementation.served:
            self.kernel_dtypes |= {getattr(torch, d) for d in implementation.dtypes}
            self.always |= implementation.kind == "triton" and implementation.unless is None

    def fresh(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, with copies of what a call changes in place."""
        return [_copy(a) if n in self.mutates else a for n, a in enumerate(args)]

    def case(self, name: str) -> Case:
        for case in self.cases:
            if case.name == name:
                return case
        raise RidgelineError(f"{self.name} has no case {name!r}; its cases are {', '.join(c.name for c in self.cases)}")


_registry: dict[str, Op] = {}


def op_modules() -> dict[str, str]:
    """Every op's name and the module it lives in, from the files alone: nothing is imported."""
    found = {}
    for path in sorted(OPS.glob("*/[!_]*")):
        if path.suffix == ".py" or (path / "__init__.py").exists():
            found[path.stem] = f"ridgeline.ops.{path.parent.name}.{path.stem}"
    return found


def get(name: str) -> Op:
    """The op of that name, its module imported."""
    modules = op_modules()
    if name not in modules:
        alike = get_close_matches(name, modules)
        meant = f" (perhaps {' or '.join(alike)} is meant)" if alike else ""
        raise RidgelineError(f"there is no op {name!r}{meant}; the ops are {', '.join(modules)}")
    importlib.import_module(modules[name])
    return _registry[name]


def registry() -> dict[str, Op]:
    """All ops by name, every op's module imported."""
    return {name: get(name) for name in op_modules()}
