"""Repeats a launcher's work without running it: what `kernel_op` does with a call whose kind it has seen before.

A launcher allocates tensors and starts kernels, and what it allocates and starts depends on the kinds of its arguments alone:
the tensors' shapes, strides, dtypes, device and alignment, and the other arguments' values (but `SymInt` ones, such as a seed,
which are handed on). The second call of a kind is recorded: every allocation, and every kernel's parameters as pointers into arguments
and allocations, or as tensor maps of these. Later calls allocate and start the same by a few lines of Python, which is a third of the
host's time. So are torch's products and sums into a tensor that is given as `out`, its copies into a tensor and numbers put into one,
on views of the same arguments and allocations. A launcher that does anything else (another torch operation, a copy of a strided input,
Triton's own launcher) is not recorded and runs each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import tuning
from ridgeline.cuda import Arranged, TensorMap, encoded

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
_WRITING: dict[Any, Callable[..., Any]] = {  # by what a recorder sees, the faster way to call it
    torch.ops.aten.mm.out: torch.mm,
    torch.ops.aten.addmm.out: torch.addmm,
    torch.ops.aten.sum.IntList_out: torch.sum,
    torch.ops.aten.add.out: torch.add,
    torch.ops.aten.mm.dtype_out: torch.mm,
    torch.ops.aten.addmm.dtype_out: torch.addmm,
    torch.ops.aten.copy_.default: torch.Tensor.copy_,
    torch.ops.aten.fill_.Scalar: torch.Tensor.fill_,
}
_view = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]  # in half the time of as_strided
_empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]  # as code that torch.compile makes does
_KINDS = 4096  # of calls that an op remembers
_STEPS = 1000  # of a plan, at most: it keeps some 6 KiB of each


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def recorder() -> Recorder | None:
    """What records the launcher that this thread runs, if it is being recorded."""
    return _local.recorder


class Loose(int):
    """An argument that may be any number in a kind of call, such as a seed: a plan takes it anew each time."""

    name: str

    @classmethod
    def of(cls, value: int, name: str) -> Loose:
        loose = cls(value)
        loose.name = name
        return loose


class _Seen(NamedTuple):
    """A tensor that a torch operation takes: which of the known ones it is or, with a shape, a view of."""

    number: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


class Recorder(TorchDispatchMode):
    """Watches a launcher: the tensors that it allocates, the torch operations that write to them, and by `started` the kernels that it
    starts."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], loose: Sequence[str] = ()) -> None:
        super().__init__()
        self.known: list[torch.Tensor | None] = list(tensors)  # the arguments, then what is allocated
        self.given, self.loose = len(tensors), loose
        self.steps: list[
            tuple[Callable[..., Any], tuple[int, int, int] | None, list[Any], dict[str, Any]]
        ] = []  # a kernel's have a grid
        places = [(t.data_ptr(), t.untyped_storage().data_ptr()) for t in tensors if t is not None and t.numel()]
        pointers, stored = [p for p, _ in places], [s for _, s in places]
        self.repeatable = len(set(pointers)) == len(pointers)  # else these would not say which argument they came from
        self.shared = {
            s for s in stored if stored.count(s) > 1
        }  # by arguments, such as q, k and v of one packed tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.repeatable &= len(self.steps) <= _STEPS
        if not self.repeatable:
            return result
        if function in _ALLOCATIONS:
            self.known.append(result)
        elif function in _WRITING and not self.loose:
            named = {k: self.seen(v) for k, v in (kwargs or {}).items()}
            self.steps.append((_WRITING[function], None, [self.seen(a) for a in args], named))
        elif not function.is_view:
            self.repeatable = False
        return result

    def seen(self, arg: Any) -> Any:
        """What a torch operation takes: a tensor as what it is of the known ones."""
        if not isinstance(arg, torch.Tensor):
            return arg
        number = self.owner(arg) if arg.numel() else None
        whole = None if number is None else self.known[number]
        if number is None or whole is None or whole.dtype != arg.dtype or arg.is_conj() or arg.is_neg():
            self.repeatable = False
            return None
        form, offset = (tuple(arg.shape), arg.stride()), int(arg.storage_offset() - whole.storage_offset())
        return (
            _Seen(number)
            if (tuple(whole.shape), whole.stride(), 0) == (*form, offset)
            else _Seen(number, *form, offset)
        )

    def started(
        self, start: Start | None, grid: tuple[int, int, int], args: Sequence[Any], values: Sequence[Any]
    ) -> None:
        """A kernel was started with these arguments, whose tensors lie at the pointers in `values`."""
        if start is None or not self.repeatable:
            self.repeatable = False
            return
        sources = [self.source(a, v) for a, v in zip(_leaves(args), values, strict=True)]
        if isinstance(start, Arranged):
            sources = [sources[n] if view is None else (*sources[n], view(values[n])) for n, view in start.takes]
            start = start.starter
        self.steps.append((start, grid, sources, {}))

    def source(self, arg: Any, value: Any) -> Any:
        """The parameter itself; for a tensor (which of the known ones it lies in, bytes from its beginning), and of a tensor map too."""
        if isinstance(arg, TensorMap):
            arg, value = arg.tensor, arg.tensor.data_ptr()
        if not isinstance(arg, torch.Tensor):
            self.repeatable &= arg is None or isinstance(arg, int | float)  # else it was made for this call
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
        """Which of the known tensors it lies in."""
        storage = arg.untyped_storage().data_ptr()
        for number, tensor in enumerate(self.known):
            if tensor is arg or (
                tensor is not None and storage not in self.shared and tensor.untyped_storage().data_ptr() == storage
            ):
                return number
        return None

    def plan(self, result: Any) -> Callable[..., Any] | None:
        """A function of the tensors and their pointers that repeats all this, or None where something cannot be repeated."""
        made = [t for t in self.known[self.given :] if t is not None]
        kinds = [(tuple(t.shape), t.stride(), t.dtype) for t in made]
        returned = result if isinstance(result, tuple | list) else [] if result is None else [result]
        places = [(t.data_ptr(), *kind) for t, kind in zip(made, kinds, strict=True)]
        wanted = [(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in returned if isinstance(t, torch.Tensor)]
        if not self.repeatable or len(wanted) < len(returned) or any(w not in places for w in wanted):
            return None
        if set(self.loose) != {v.name for _, _, sources, _ in self.steps for v in sources if type(v) is Loose}:
            return None  # a kernel took something else that was made of it
        names: dict[str, Any] = {
            "empty": _empty,
            "stream": torch._C._cuda_getCurrentRawStream,
            "encoded": encoded,
            "view": _view,
        }

        def name(value: Any) -> str:
            names[f"n{len(names)}"] = value
            return f"n{len(names) - 1}"

        def parameter(source: Any) -> str:
            if isinstance(source, tuple):
                number, offset, *view = source
                pointer = f"p{number} + {offset}" if offset else f"p{number}"
                return f"encoded({pointer}, {name(view[0])})" if view else pointer
            return source.name if type(source) is Loose else name(source)

        seen = [s for _, _, sources, named in self.steps for s in (*sources, *named.values()) if isinstance(s, tuple)]
        used = {s[0] - self.given for s in seen} | {places.index(w) for w in wanted}  # not those of no elements
        lines = [
            f"    m{n} = empty({', '.join(map(name, kind))}); p{self.given + n} = m{n}.data_ptr()"
            for n, kind in enumerate(kinds)
            if n in used
        ]
        views: dict[_Seen, str] = {}

        def operand(value: Any) -> str:
            """One view of a kind, so that torch sees that what it adds to is what it writes to, and copies nothing."""
            if type(value) is not _Seen:
                return name(value)
            whole = f"t{value.number}" if value.number < self.given else f"m{value.number - self.given}"
            if value.shape is None:
                return whole
            if value not in views:
                views[value] = f"v{len(views)}"
                lines.append(
                    f"    {views[value]} = view({whole}, {name(value.shape)}, {name(value.stride)}, {value.offset})"
                )
            return views[value]

        lines += ["    s = stream(i)"] if any(grid for _, grid, _, _ in self.steps) else []
        for step, grid, sources, named in self.steps:
            if grid:
                taken = f"{', '.join(map(str, grid))}, s, ({', '.join(map(parameter, sources))},)"
            else:
                taken = ", ".join([*map(operand, sources), *(f"{k}={operand(v)}" for k, v in named.items())])
            lines.append(f"    {name(step)}({taken})")
        results = [f"m{places.index(w)}" for w in wanted]
        lines.append(
            f"    return ({', '.join(results)},)"
            if isinstance(result, tuple | list)
            else f"    return {', '.join(results)}"
        )
        return _function(
            "plan", ["i", *(f"{kind}{n}" for kind in "tp" for n in range(self.given)), *self.loose], lines, names
        )


def _function(name: str, parameters: Sequence[str], lines: Sequence[str], names: dict[str, Any]) -> Callable[..., Any]:
    """Written out for what it does, without loops or packed arguments: a third of a call's time would go there."""
    exec("\n".join([f"def {name}({', '.join(parameters)}):", *lines]), names)
    return names[name]


class Plans:
    """What a launcher did, by kind of call. The first `leading` of its arguments are tensors, or None; those at `loose` places
    are numbers that are not part of the kind: they go to kernels as they are, which are not specialised for them."""

    def __init__(self, launcher: Callable[..., Any], leading: int, loose: Sequence[int] = ()):
        self.launcher, self.leading = launcher, leading
        self.loose = {n: f"a{n - leading}" for n in loose}
        self.found: dict[Any, Callable[..., Any]] = {}
        self.seen: dict[Any, int] = {}

    def front(
        self, count: int, before: Sequence[str] = (), names: dict[str, Any] | None = None, failed: str | None = None
    ) -> Callable[..., Any]:
        """A function of the launcher's arguments (t0, t1, ..., a0, a1, ...) that calls the launcher, or repeats what it did.

        before: lines to run first, which may return; names: what they mention. failed: a line to run where anything after the
        first of them raises a RuntimeError, which is raised on."""
        tensors = [f"t{n}" for n in range(self.leading)]
        args = [*tensors, *(f"a{n}" for n in range(count - self.leading))]
        whole = ", ".join(args)
        lines = ["    " + line.format(args=whole) for line in before]
        lines.append("    i = t0.get_device()")
        lines.append(f"    if i < 0 or i != current(): return launcher({whole})")
        for n, t in enumerate(tensors):
            kind = f"p{n} = {t}.data_ptr(); k{n} = {t}.shape, {t}.stride(), {t}.dtype, p{n} & 15, {t}.get_device()"
            lines += [f"    if {t} is None: p{n} = 0; k{n} = None", f"    else: {kind}"] if n else [f"    {kind}"]
        kept = [a for a in args[self.leading :] if a not in self.loose.values()]
        lines.append(f"    key = {', '.join(f'k{n}' for n in range(self.leading))}, tuning.version, {', '.join(kept)}")
        lines.append("    plan = found(key)")
        lines.append(f"    if plan is None: return learn(key, {whole})")
        lines.append(
            f"    return plan({', '.join(['i', *tensors, *(f'p{n}' for n in range(self.leading)), *self.loose.values()])})"
        )
        if failed is not None:
            last = "        " + failed.format(tensors=", ".join(tensors))
            lines[1:] = [
                "    try:",
                *["    " + line for line in lines[1:]],
                "    except RuntimeError:",
                last,
                "        raise",
            ]
        names = {
            "launcher": self.launcher,
            "learn": self.learn,
            "found": self.found.get,
            "tuning": tuning,
            **(names or {}),
        }
        names["current"] = getattr(torch._C, "_cuda_getDevice", None)  # of a build without CUDA nothing is on a GPU
        return _function("call", args, lines, names)

    def learn(self, key: Any, *args: Any) -> Any:
        """The first call of a kind runs; the second is recorded; after two recordings in vain all run."""
        if len(self.seen) >= _KINDS:
            self.seen.clear()
            self.found.clear()
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
        plan = watch.plan(result)
        if plan is not None:
            self.found[key] = plan
        return result


def _leaves(args: Sequence[Any]) -> list[Any]:
    return [leaf for a in args for leaf in (_leaves(a) if isinstance(a, tuple) else (a,))]
