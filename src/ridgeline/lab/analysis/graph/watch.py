"""Watches one call of a function for operations that no CUDA graph can hold, and names the lines they stand on."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

# kind: (what happens, what to do instead)
KINDS = {
    "read": (
        "the host reads a value from the GPU and waits for it",
        "keep the value on the GPU (torch.where, a mask), or read it after the replay",
    ),
    "size": (
        "the size of the result depends on values, so the host waits to learn it",
        "use a mask, torch.where, torch.nonzero_static, or output_size= where the function has it",
    ),
    "copy": (
        "a copy between the GPU and the host's pageable memory makes the host wait",
        "copy into a tensor on the GPU before the replay, or use pinned memory and non_blocking=True",
    ),
    "wait": (
        "the host waits for the GPU",
        "leave it out, or wait after the replay",
    ),
    "stream": (
        "work goes to a stream that has not waited for the captured one, so the graph does not hold it",
        "begin with side.wait_stream(torch.cuda.current_stream()), and let the current stream wait for side at the end",
    ),
    "unjoined": (
        "work of a side stream is not joined again",
        "end with torch.cuda.current_stream().wait_stream(side)",
    ),
    "generator": (
        "random numbers come from a generator that the graph does not know",
        "use the default generator, or graph.register_generator_state(generator)",
    ),
    "other": ("CUDA refuses it while a stream is captured", "move it out of the function"),
}
READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}
SIZES = {"aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
         "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount"}  # fmt: skip
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
MASKS = (torch.bool, torch.uint8)
WAITS = ("Stream.synchronize", "Stream.query", "Event.synchronize", "Event.query", "Event.elapsed_time")
SYNC = "called a synchronizing CUDA operation"  # torch's own warning, under set_sync_debug_mode
LIBRARY = tuple(
    str(Path(path).resolve())
    for path in (
        Path(torch.__file__).parent,
        Path(triton.__file__).parent,
        Path(__file__).parents[3],
        sysconfig.get_paths()["stdlib"],
    )
)


@dataclass(frozen=True)
class Place:
    """A line of a user's code: its file, its number and its text."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        path = Path(self.file)
        file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{file}:{self.line}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True)
class Hazard:
    """An operation that cannot be captured, or would be lost. kind: a key of KINDS."""

    kind: str
    operation: str
    place: Place | None

    @property
    def why(self) -> str:
        """What happens there."""
        return KINDS[self.kind][0]

    @property
    def advice(self) -> str:
        """What to do instead."""
        return KINDS[self.kind][1]


def library(file: str) -> bool:
    """Whether a file belongs to torch, triton, ridgeline, or Python's own library (but not its site-packages)."""
    path = str(Path(file).resolve()) if not file.startswith("<") else file
    return path.startswith("<") or any(path.startswith(home) for home in LIBRARY if not _site(path, home))


def _site(path: str, home: str) -> bool:
    """Whether a path below Python's library is a package that was installed there."""
    return home == LIBRARY[-1] and "-packages" in path[len(home) :]


def place_of(code: types.CodeType, line: int) -> Place:
    """The place of a line of some code."""
    file = code.co_filename
    return Place(file, line, linecache.getline(file, line).strip())


def here(frame: types.FrameType | None) -> Place | None:
    """The innermost line outside libraries, from a frame outwards; if there is none, None."""
    while frame is not None:
        if not library(frame.f_code.co_filename):
            return place_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def raised(error: BaseException) -> Place | None:
    """The innermost line outside libraries that an exception passed."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if not library(trace.tb_frame.f_code.co_filename):
            found = place_of(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


@dataclass
class Streams:
    """Which streams belong to a capture that began on `first`: those that waited for one of its events.

    Streams and events may be any objects that compare equal if they are the same.
    """

    first: Any
    inside: list[Any] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # an event, and the stream that recorded it
    dirty: dict[Any, Place | None] = field(default_factory=dict)  # side streams with work that nobody waited for

    def __post_init__(self) -> None:
        self.inside.append(self.first)

    def records(self, event: Any, stream: Any) -> None:
        """An event is recorded in a stream."""
        self.marks = [(e, s) for e, s in self.marks if e is not event] + [(event, stream)]

    def waits(self, stream: Any, event: Any) -> None:
        """A stream waits for an event."""
        source = next((s for e, s in self.marks if e is event), None)
        if source not in self.inside:
            return
        if stream not in self.inside:
            self.inside.append(stream)
        self.dirty.pop(source, None)

    def works(self, stream: Any, place: Place | None) -> bool:
        """An operation goes to a stream; returns whether the capture holds it."""
        if stream not in self.inside:
            return False
        if stream != self.first:
            self.dirty[stream] = place
        return True


def kind_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], pretend: bool) -> str | None:
    """Why an operation cannot be captured: a key of KINDS, or None. pretend: CPU tensors count as the GPU's."""
    tensors = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)]
    on_gpu = pretend or any(t.is_cuda for t in tensors)
    if name in READS and on_gpu:
        return "read"
    if (name in SIZES or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None)) and on_gpu:
        return "size"
    if name in INDEXED and on_gpu and any(t is not None and t.dtype in MASKS for t in args[1]):
        number = name != "aten::index" and args[2].numel() == 1 and args[2].device.type == "cpu"
        return None if number and sum(t is not None for t in args[1]) == 1 else "size"  # torch fills by the mask
    generator = kwargs.get("generator")
    if generator is not None and (pretend or generator.device.type == "cuda") and generator not in _defaults():
        return "generator"
    return "copy" if name in COPIES and _pageable(name, args, kwargs) else None


def _defaults() -> list[torch.Generator]:
    return [torch.default_generator, *torch.cuda.default_generators]


def _pageable(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes between a GPU and memory of the host that is not pinned, or waits."""
    source = args[1] if name == "aten::copy_" else args[0]
    target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or args[0].device)
    if {source.device.type, target.type} != {"cpu", "cuda"}:
        return False
    waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    host = source if source.device.type == "cpu" else args[0] if name == "aten::copy_" else None
    return waits or host is None or not host.is_pinned()


class Watch(TorchDispatchMode):
    """A context in which a call's operations are watched; `found` has what no graph can hold, in order.

    pretend: there is no GPU, and CPU tensors count as if they were on one.
    """

    def __init__(self, pretend: bool = False):
        super().__init__()
        self.pretend, self.thread = pretend, threading.get_ident()
        self.found: dict[Hazard, int] = {}
        self.streams = None if pretend else Streams(torch.cuda.current_stream())
        self._open = ExitStack()

    def add(self, kind: str, operation: str, place: Place | None = None) -> None:
        """Counts a hazard at a place, or where the watched thread is now."""
        hazard = Hazard(kind, operation, place or self._here())
        self.found[hazard] = self.found.get(hazard, 0) + 1

    def _here(self) -> Place | None:
        mine = threading.get_ident() == self.thread  # a backward runs in a thread of its own, while this one waits
        return here(sys._getframe(1) if mine else sys._current_frames().get(self.thread))

    def __enter__(self) -> Any:
        for name, replacement in self._replaced().items():
            owner, _, attribute = name.rpartition(".")
            self._open.enter_context(mock.patch.object(_named(owner), attribute, replacement))
        self._open.enter_context(warnings.catch_warnings())
        if not self.pretend:
            warnings.simplefilter("always")
            self._open.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            self._open.close()
            for place in self.streams.dirty.values() if self.streams else ():
                self.add("unjoined", "a side stream's last operation", place)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        kind = kind_of(name, args, kwargs, self.pretend)
        if kind:
            self.add(kind, name)
        if self.pretend:
            return func(*args, **kwargs)
        with _told() as said:
            result = func(*args, **kwargs)
        if said and not kind:
            self.add("wait", name)
        tensors = [t for t in (*args, *kwargs.values(), result) if isinstance(t, torch.Tensor)]
        if self.streams and any(t.is_cuda for t in tensors):
            place = self._here()
            if not self.streams.works(torch.cuda.current_stream(), place):
                self.add("stream", name, place)
        return result

    def _replaced(self) -> dict[str, Callable[..., Any]]:
        """The functions of torch that are watched too, by their names."""
        made = {f"cuda.{name}": self._waiting(f"torch.cuda.{name}") for name in ("synchronize", *WAITS)}
        made |= {"tensor": self._uploading("tensor"), "as_tensor": self._uploading("as_tensor")}
        if self.streams is None:
            return made
        streams, record, wait = self.streams, torch.cuda.Event.record, torch.cuda.Event.wait

        def recorded(event: Any, stream: Any = None) -> Any:
            streams.records(event, stream or torch.cuda.current_stream())
            return record(event, stream)

        def waited(event: Any, stream: Any = None) -> Any:  # Stream.wait_event and wait_stream come here too
            streams.waits(stream or torch.cuda.current_stream(), event)
            return wait(event, stream)

        return made | {"cuda.Event.record": recorded, "cuda.Event.wait": waited}

    def _waiting(self, name: str) -> Callable[..., Any]:
        original = _named(name.removeprefix("torch."))

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.add("wait", name)
            return None if self.pretend else original(*args, **kwargs)

        return watched

    def _uploading(self, name: str) -> Callable[..., Any]:
        """torch.tensor and its like, which on a GPU copy numbers of the host, unseen by the dispatcher."""
        original = _named(name)

        def watched(data: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(data, *args, **kwargs)
            if not isinstance(data, torch.Tensor) and (self.pretend or made.is_cuda):
                self.add("copy", f"torch.{name}")
            return made

        return watched


def _named(name: str) -> Any:
    """An object of torch by its dotted name."""
    found: Any = torch
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


@contextmanager
def _told() -> Iterator[list[str]]:
    """Collects torch's warnings about operations that wait for the GPU."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield said
        finally:
            torch.cuda.set_sync_debug_mode("default")
            said += [str(w.message) for w in seen if SYNC in str(w.message)]


def watch(function: Callable[[], Any], pretend: bool = False) -> dict[Hazard, int]:
    """Calls a function once; returns what no graph can hold, and how often it came."""
    with Watch(pretend) as seen:
        function()
    return seen.found
