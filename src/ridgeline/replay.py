"""Repeats a launcher's work without running it: what `kernel_op` does with a call whose kind it has seen before.

A launcher allocates tensors and starts kernels, and what it allocates and starts depends on the kinds of its arguments alone:
the tensors' shapes, strides, dtypes, device and alignment, and the other arguments' values. The second call of a kind is
recorded: every allocation, and every kernel's parameters as pointers into arguments and allocations. Later calls allocate and
start the same by a few lines of Python, which is a third of the host's time. A launcher that does anything else (another torch
operation, a copy of a strided input, Triton's own launcher) is not recorded and runs each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import tuning

Start = Callable[[int, int, int, int, Sequence[Any]], None]  # grid x, y, z, stream, the kernel's parameters

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
_empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]  # as code that torch.compile makes does
_KINDS = 4096  # of calls that an op remembers


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def recorder() -> Recorder | None:
    """What records the launcher that this thread runs, if it is being recorded."""
    return _local.recorder


class Recorder(TorchDispatchMode):
    """Watches a launcher: the tensors that it allocates, and by `started` the kernels that it starts."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.known: list[torch.Tensor | None] = list(tensors)  # the arguments, then what is allocated
        self.given = len(tensors)
        self.starts: list[tuple[Start, tuple[int, int, int], list[Any]]] = []
        stored = [t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()]
        self.repeatable = len(set(stored)) == len(stored)  # else pointers would not say which argument they came from

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.known.append(result)
        elif not function.is_view:
            self.repeatable = False
        return result

    def started(self, start: Start | None, grid: tuple[int, int, int], args: Sequence[Any], values: Sequence[Any]) -> None:
        """A kernel was started with these arguments, whose tensors lie at the pointers in `values`."""
        if start is None:
            self.repeatable = False
            return
        self.starts.append((start, grid, [self.source(a, v) for a, v in zip(_leaves(args), values, strict=True)]))

    def source(self, arg: Any, value: Any) -> Any:
        """The parameter itself; for a tensor (which of the known ones it lies in, bytes from its beginning)."""
        if not isinstance(arg, torch.Tensor):
            self.repeatable &= arg is None or isinstance(arg, int | float)  # else it was made for this call, such as a tensor map
            return value
        if not arg.numel():
            return 0
        storage = arg.untyped_storage().data_ptr()
        for number, tensor in enumerate(self.known):
            if tensor is not None and tensor.untyped_storage().data_ptr() == storage:
                return number, value - tensor.data_ptr()
        self.repeatable = False
        return 0

    def plan(self, result: Any) -> Plan | None:
        """What repeats all this, or None where something cannot be repeated."""
        made = [t for t in self.known[self.given :] if t is not None]
        kinds = [(tuple(t.shape), t.stride(), t.dtype) for t in made]
        returned = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, torch.Tensor)]
        places = [(t.data_ptr(), *kind) for t, kind in zip(made, kinds, strict=True)]
        wanted = [(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in returned]
        single = isinstance(result, torch.Tensor)
        if not self.repeatable or len(returned) < (1 if single else len(result)) or any(w not in places for w in wanted):
            return None
        where = [places.index(w) for w in wanted]
        return Plan(kinds, self.given, self.starts, itemgetter(*where) if single else lambda made: tuple([made[n] for n in where]))


class Plan:
    """Allocations, and kernels to start on them and on the arguments.

    A kernel's parameters are picked by one call from a pool: pointers of arguments, of allocations, views of those, constants.
    """

    def __init__(self, made: list[Any], given: int, starts: list[Any], pick: Callable[[list[torch.Tensor]], Any]):
        self.made, self.pick = made, pick
        self.views: list[tuple[int, int]] = []
        self.constants: list[Any] = []
        self.starts: list[tuple[Start, int, int, int, Callable[[Any], Any]]] = []
        pointers = given + len(made)
        views = sorted({s for *_, sources in starts for s in sources if isinstance(s, tuple) and s[1]})
        self.views.extend(views)
        for start, grid, sources in starts:
            at = []
            for source in sources:
                if not isinstance(source, tuple):
                    at.append(pointers + len(views) + len(self.constants))
                    self.constants.append(source)
                else:
                    at.append(pointers + views.index(source) if source[1] else source[0])
            self.starts.append((start, *grid, itemgetter(*at) if len(at) > 1 else lambda pool, only=at[0]: (pool[only],)))

    def __call__(self, pool: list[Any], index: int) -> Any:
        """Does it all again. pool: the arguments' pointers; index: the current GPU."""
        made = [_empty(*kind) for kind in self.made]
        pool += [tensor.data_ptr() for tensor in made]
        for source, offset in self.views:
            pool.append(pool[source] + offset)
        pool += self.constants
        stream = torch._C._cuda_getCurrentRawStream(index)
        for start, x, y, z, parameters in self.starts:
            start(x, y, z, stream, parameters(pool))
        return self.pick(made)


class Plans:
    """A launcher, and its plans by kind of call."""

    def __init__(self, launcher: Callable[..., Any], leading: int):
        self.launcher, self.leading = launcher, leading  # the first `leading` arguments are tensors, or None
        self.plans: dict[Any, Plan | int] = {}

    def __call__(self, *args: Any) -> Any:
        """Calls the launcher, or does what it did for such arguments."""
        index = args[0].get_device()
        if index < 0 or index != torch._C._cuda_getDevice():
            return self.launcher(*args)
        pool: list[Any] = []
        kind: list[Any] = [args[self.leading :], index, tuning.version]
        for t in args[: self.leading]:
            if t is None:
                pool.append(0)
                kind.append(None)
                continue
            pointer = t.data_ptr()
            pool.append(pointer)
            kind += t.shape, t.stride(), t.dtype, pointer & 15, t.get_device()
        key = tuple(kind)
        plan = self.plans.get(key, 0)
        return plan(pool, index) if type(plan) is Plan else self.learn(key, plan, args)

    def learn(self, key: Any, seen: Any, args: tuple[Any, ...]) -> Any:
        """The first call of a kind runs; the second is recorded; after two recordings in vain all run."""
        if len(self.plans) >= _KINDS:
            self.plans.clear()
        self.plans[key] = seen + 1
        if not 1 <= seen <= 2:
            return self.launcher(*args)
        _local.recorder = watch = Recorder(args[: self.leading])
        try:
            with watch:
                result = self.launcher(*args)
        finally:
            _local.recorder = None
        plan = watch.plan(result)
        if plan is not None:
            self.plans[key] = plan
        return result


def _leaves(args: Sequence[Any]) -> list[Any]:
    return [leaf for a in args for leaf in (_leaves(a) if isinstance(a, tuple) else (a,))]
