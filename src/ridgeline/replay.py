"""Repeats the work of a launcher without running it, for calls of a kind that `kernel_op` has seen before.

The kind of a call is its tensors' shapes, strides, dtypes, device and alignment, and the values of its other arguments.
`SymInt` arguments, such as a seed, are not part of the kind; they are passed on. A launcher must allocate and start the
same for every call of a kind. The second call of a kind is recorded: every allocation, and every kernel's parameters as
pointers into arguments and allocations, or as tensor maps of them. For later calls a few generated lines of Python
repeat this, in about a third of the host's time.

Some torch operations are recorded too, on views of the arguments and allocations: products and sums into a tensor given
as `out`, copies into a tensor, and filling one with a number; and what other registered ops of ours do. A launcher that
does anything else (another torch operation, a copy of a strided input, Triton's own launcher) is not recorded and runs
each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import tuning
from ridgeline.codegen import Before, Loose, PlanWriter, Seen, Step, front
from ridgeline.cuda import Arranged, TensorMap, cleared, encoded


class Start(Protocol):
    """What starts a kernel, such as a `cuda.Starter`."""

    def __call__(self, x: int, y: int, z: int, stream: int, values: Sequence[Any], /) -> None:
        """values: the kernel's parameters."""


_ALLOCATIONS = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)
_WRITING: dict[Any, Callable[..., Any]] = {  # what a recorder sees: the faster way to call it
    torch.ops.aten.mm.out: torch.mm,
    torch.ops.aten.addmm.out: torch.addmm,
    torch.ops.aten.sum.IntList_out: torch.sum,
    torch.ops.aten.add.out: torch.add,
    torch.ops.aten.mm.dtype_out: torch.mm,
    torch.ops.aten.addmm.dtype_out: torch.addmm,
    torch.ops.aten.copy_.default: torch.Tensor.copy_,
    torch.ops.aten.fill_.Scalar: torch.Tensor.fill_,
}
_OF_DTYPES = frozenset((torch.ops.aten.promote_types.default, torch.ops.aten.result_type.Tensor))
_view = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]  # faster than as_strided
_empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]  # as in the code of torch.compile
_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
KINDS = 4096  # kinds of calls that an op remembers
_STEPS = 1000  # most steps of a plan, which keeps some 6 KiB for each


inner: dict[Any, Callable[..., Any]] = {}  # launchers by registered op: another launcher may call the op


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def recorder() -> Recorder | None:
    """Returns the recorder of the launcher that this thread runs, or None if it is not being recorded."""
    return _local.recorder


class Recorder(TorchDispatchMode):
    """Records the work of a launcher: allocations, torch operations that write to them and, by `started`, kernels."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], loose: Sequence[str] = ()) -> None:
        super().__init__()
        self.known: list[torch.Tensor | None] = list(tensors)  # arguments, then allocations
        self.given, self.loose = len(tensors), loose
        self.aligned = [None if t is None else t.data_ptr() & 15 for t in tensors]
        self.steps: list[Step] = []
        places = [(t.data_ptr(), t.untyped_storage().data_ptr()) for t in tensors if t is not None and t.numel()]
        pointers, stored = [p for p, _ in places], [s for _, s in places]
        self.repeatable = len(set(pointers)) == len(pointers)  # else a pointer could belong to two arguments
        self.shared = {s for s in stored if stored.count(s) > 1}  # such as q, k and v of one packed tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in inner and not self.loose and not kwargs:  # a loose number would come out as a plain one
            with self:
                return inner[function](*args)
        result = function(*args, **(kwargs or {}))
        self.repeatable &= len(self.steps) <= _STEPS
        if not self.repeatable:
            return result
        if function in _ALLOCATIONS:
            self.known.append(result)
        elif function in _WRITING and not self.loose:
            named = {k: self.seen(v) for k, v in (kwargs or {}).items()}
            self.steps.append(Step(_WRITING[function], None, [self.seen(a) for a in args], named))
        elif not (function.is_view or function in _OF_DTYPES):
            self.repeatable = False
        return result

    def seen(self, arg: Any) -> Any:
        """Returns an argument of a torch operation, with a tensor as the `Seen` of a known one."""
        if not isinstance(arg, torch.Tensor):
            return arg
        number = self.owner(arg) if arg.numel() else None
        whole = None if number is None else self.known[number]
        if number is None or whole is None or whole.dtype != arg.dtype or arg.is_conj() or arg.is_neg():
            self.repeatable = False
            return None
        form, offset = (tuple(arg.shape), arg.stride()), int(arg.storage_offset() - whole.storage_offset())
        return (
            Seen(number) if (tuple(whole.shape), whole.stride(), 0) == (*form, offset) else Seen(number, *form, offset)
        )

    def started(
        self, start: Start | None, grid: tuple[int, int, int], args: Sequence[Any], values: Sequence[Any]
    ) -> None:
        """Records the start of a kernel with these arguments; `values` holds the tensors' pointers."""
        if start is None or not self.repeatable:
            self.repeatable = False
            return
        sources = [self.source(a, v) for a, v in zip(_leaves(args), values, strict=True)]
        if isinstance(start, Arranged):
            sources = [sources[n] if view is None else (*sources[n], view(values[n])) for n, view in start.takes]
            start = start.starter
        self.steps.append(Step(start, grid, sources, {}))

    def source(self, arg: Any, value: Any) -> Any:
        """Returns the parameter itself or, for a tensor or tensor map, (number of a known tensor, offset in bytes)."""
        if isinstance(arg, TensorMap):
            arg, value = arg.tensor, arg.tensor.data_ptr()
        if not isinstance(arg, torch.Tensor):
            self.repeatable &= arg is None or isinstance(arg, int | float)  # anything else may be of this call only
            return value
        if not arg.numel():
            return 0
        number = self.owner(arg)
        whole = None if number is None else self.known[number]
        if number is None or whole is None:
            self.repeatable = False
            return 0, 0
        return number, value - whole.data_ptr()

    def owner(self, arg: torch.Tensor) -> int | None:
        """Returns the number of the known tensor that holds this one, or None."""
        storage = arg.untyped_storage().data_ptr()
        for number, tensor in enumerate(self.known):
            if tensor is arg or (
                tensor is not None and storage not in self.shared and tensor.untyped_storage().data_ptr() == storage
            ):
                return number
        return None

    def plan(self, result: Any, index: int) -> Callable[..., Any] | None:
        """Returns a function that repeats the steps on a GPU, or None if one cannot be repeated."""
        made = [t for t in self.known[self.given :] if t is not None]
        kinds = [(tuple(t.shape), t.stride(), t.dtype) for t in made]
        returned = result if isinstance(result, tuple | list) else [] if result is None else [result]
        places = [(t.data_ptr(), *kind) for t, kind in zip(made, kinds, strict=True)]
        wanted = [(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in returned if isinstance(t, torch.Tensor)]
        if not self.repeatable or len(wanted) < len(returned) or any(w not in places for w in wanted):
            return None
        if set(self.loose) != {v.name for step in self.steps for v in step.sources if type(v) is Loose}:
            return None  # a kernel took a value computed from it
        names = {
            "empty": _empty,
            "stream": torch._C._cuda_getCurrentRawStream,
            "current": torch._C._cuda_getDevice,
            "encoded": encoded,
            "cleared": cleared,
            "view": _view,
        }
        writer = PlanWriter(self.aligned, index, kinds, self.loose, names)
        return writer.plan(self.steps, [places.index(w) for w in wanted], isinstance(result, tuple | list))


class Guarded:
    """What is known of calls, behind guards: torch compares all the facts of a call's tensors with those of an earlier
    call's in one step, much faster than a key of them is made, hashed and compared.

    found: by the first tensor's shape and dtype and the other arguments, an entry for each guard. The facts are the
    tensors' types, shapes, strides, dtypes, devices, dispatch keys (layouts, negations, transforms) and whether they
    require gradients. A call in which two arguments are one tensor passes no guard."""

    MOST, ADDED = 4, 64  # entries of a key, and how many a key ever gets: calls of so many kinds are better off without

    def __init__(self) -> None:
        self.found: dict[Any, tuple[Any, ...]] = {}
        self.added: dict[Any, int] = {}

    def add(
        self, near: Any, tensors: Sequence[torch.Tensor | None], entry: Callable[[Callable[..., bool]], Any]
    ) -> None:  # fmt: skip
        """Adds entry(a guard's check) for calls whose tensors are like these; it replaces the oldest of many."""
        there = [t for t in tensors if t is not None]
        if _Guards is None or len({id(t) for t in there}) < len(there):
            return
        if len(self.added) >= KINDS:
            self.clear()
        added = self.added[near] = self.added.get(near, 0) + 1
        if added > self.ADDED:
            self.found.pop(near, None)
            return
        try:
            guard = _Guards(*there, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        except (RuntimeError, TypeError):  # tensors without strides
            return
        self.found[near] = (entry(guard.check), *self.found.get(near, ())[: self.MOST - 1])

    def clear(self) -> None:
        self.found.clear()
        self.added.clear()


class Sure:
    """What the front of a registered op did last for the calls that pass one guard of a public function.

    Such calls hand the op tensors of one kind, so that their plan needs no second guard; it checks addresses alone.
    kept: the version of the configurations with the op's other arguments, which must be the same, and the plan without
    a guard. They are one object, which another thread replaces as a whole.
    """

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: tuple[Any, Any] = (None, None)

    def keep(self, near: Any, plan: Any) -> None:
        self.kept = near, plan.sure()


class Plans:
    """The plans of one launcher, by kind of call.

    leading: how many of the first arguments are tensors, or None.
    loose: positions of the numbers that are not part of the kind. Kernels take them as they are, unspecialised."""

    def __init__(self, launcher: Callable[..., Any], leading: int, loose: Sequence[int] = ()):
        self.launcher, self.leading = launcher, leading
        self.loose = {n: f"a{n - leading}" for n in loose}
        self.found: dict[Any, Callable[..., Any]] = {}
        self.seen: dict[Any, int] = {}
        self.guarded = Guarded()

    def front(
        self,
        count: int,
        before: Before | None = None,
        names: dict[str, Any] | None = None,
        failed: str | None = None,
    ) -> Callable[..., Any]:
        """Returns a function of the launcher's arguments (t0, t1, ..., a0, a1, ...) that calls it or repeats its work.

        before: as `codegen.front` has it. names: the globals that these lines use.
        failed: a line to run if anything after the first line raises a RuntimeError, before that is raised again."""
        known = {"launcher": self.launcher, "learn": self.learn, "found": self.found.get, "tuning": tuning}
        known |= {"quick": self.guarded.found.get, "remember": self.remember}
        known["current"] = getattr(torch._C, "_cuda_getDevice", None)  # absent in builds without CUDA
        return front(self.leading, count, list(self.loose.values()), before or Before(), failed, known | (names or {}))

    def remember(self, near: Any, plan: Callable[..., Any], *tensors: torch.Tensor | None) -> None:
        """Lets calls like this one find their plan by a guard."""
        self.guarded.add(near, tensors, lambda check: (plan, check))

    def learn(self, key: Any, *args: Any) -> Any:
        """Runs the first call of a kind and records the second; if two recordings fail, all later calls run."""
        if len(self.seen) >= KINDS:
            self.seen.clear()
            self.found.clear()
            self.guarded.clear()
        seen = self.seen[key] = self.seen.get(key, 0) + 1
        if not 2 <= seen <= 3:
            return self.launcher(*args)
        args = tuple([Loose.of(a, self.loose[n]) if n in self.loose else a for n, a in enumerate(args)])
        _local.recorder = watch = Recorder(args[: self.leading], list(self.loose.values()))
        try:
            with watch:
                result = self.launcher(*args)
        finally:
            _local.recorder = None
        plan = watch.plan(result, args[0].get_device())
        if plan is not None:
            self.found[key] = plan
        return result


def _leaves(args: Sequence[Any]) -> list[Any]:
    return [leaf for a in args for leaf in (_leaves(a) if isinstance(a, tuple) else (a,))]
