"""Says which module, op and phase of a training step each event of PyTorch's profiler belongs to.

Modules and ops run in named ranges. Backward's events have none: the autograd node that starts them has the sequence
number of the forward call that made it, so they belong to the module and op of that call. Ranges that open inside
backward are a checkpoint's recomputation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

MODULE, OP, PHASE = "lm::module:", "lm::op:", "lm::phase:"
NODE = "autograd::engine::evaluate_function:"
# Attributes of the model's modules that hold ops: what the op is to a table.
OPS = {"attend": "attention", "rotate": "rope", "gated": "gated_linear", "loss": "loss"}
OPS |= {"norm": "norm", "add_norm": "norm"}
KINDS = ("products", "attention", "norms", "loss", "optimizer", "elementwise", "copies", "host")
PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|cublas|matmul|splitK|aten::(add|b|badd|_scaled_)?mm$", re.I)
COPY = re.compile(r"memcpy|memset|copy|aten::(clone|contiguous|fill_|zero_|cat|to|_to_copy)$", re.I)
FUSED = ("_fwd", "_stay")  # kernels of gated_linear that multiply; its passes are _gate and _ungate


@dataclass(frozen=True)
class Owner:
    """The phase ("inference", "forward", "backward", "recompute", "optimizer"), module and op that own an event."""

    phase: str = ""
    module: str = ""
    op: str = ""

    @property
    def part(self) -> str:
        """The row of a table by layer: "layer 3", "embedding", "last norm", "loss" or "optimizer"."""
        if self.phase == "optimizer":
            return "optimizer"
        if found := re.search(r"layers\.(\d+)", self.module):
            return f"layer {found[1]}"
        if self.op == "loss":
            return "loss"
        return {"model.embed_tokens": "embedding", "model.norm": "last norm"}.get(self.module, "between modules")

    @property
    def place(self) -> str:
        """The row of a table by module: its name without the layer's number."""
        inner = re.sub(r"^model\.layers\.\d+\.?", "", self.module).removeprefix("model.")
        return f"{inner or 'layer'}" if self.part.startswith("layer") else self.part


@dataclass(frozen=True)
class Item:
    """Work of one kernel or, on a CPU, an operator's own time. us: microseconds."""

    name: str
    us: float
    owner: Owner
    kind: str


class Ranges:
    """Puts the model's modules, and the ops they call, into named ranges; `remove` takes them out.

    nvtx: also opens ranges that nsys and ncu see."""

    def __init__(self, model: nn.Module, nvtx: bool = False) -> None:
        self.entered, self.nvtx = 0, nvtx
        self.undo: list[tuple[nn.Module, str, Any]] = []
        for name, module in model.named_modules():
            self._wrap(module, "forward", MODULE + name, "forward" in vars(module))
            for attribute, op in OPS.items():
                if callable(vars(module).get(attribute)):
                    self._wrap(module, attribute, OP + op, True)

    def _wrap(self, module: nn.Module, attribute: str, label: str, own: bool) -> None:
        function = getattr(module, attribute)
        self.undo.append((module, attribute, function if own else None))
        setattr(module, attribute, self._ranged(label, function))

    def _ranged(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        fast: Any = torch._C._profiler._RecordFunctionFast  # a tenth of record_function's time

        def ranged(*args: Any, **kwargs: Any) -> Any:
            self.entered += 1
            if self.nvtx:
                with torch.cuda.nvtx.range(label), fast(label):
                    return function(*args, **kwargs)
            with fast(label):
                return function(*args, **kwargs)

        return ranged

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Opens the range of a phase."""
        if self.nvtx:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch._C._profiler._RecordFunctionFast(PHASE + name):
                yield
        finally:
            if self.nvtx:
                torch.cuda.nvtx.range_pop()

    def remove(self) -> None:
        for module, attribute, function in reversed(self.undo):
            if function is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, function)
        self.undo.clear()


def seconds_per_range() -> float:
    """Returns the host's seconds per range while nothing is profiled, measured now."""
    holder = nn.Identity()
    ranges, x = Ranges(holder), torch.ones(1)
    forward, plain = holder.forward, type(holder).forward

    def once(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(1000):
            call()
        return time.perf_counter() - start

    ranged = min(once(lambda: forward(x)) for _ in range(5))
    bare = min(once(lambda: plain(holder, x)) for _ in range(5))
    ranges.remove()
    return max(0.0, ranged - bare) / 1000


def owners(events: Sequence[Any]) -> dict[int, Owner]:
    """Returns the owner of each of the profiler's events on the host, by the event's id()."""
    found: dict[int, Owner] = {}
    calls: dict[tuple[int, int], Owner] = {}  # (thread, sequence number) of forward: its owner
    latest: dict[int, Owner] = {}  # of each thread's last node: gradients are added up right after their node
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        owner = found.get(id(event.cpu_parent), Owner())
        name = event.name
        if name.startswith(PHASE):
            owner = Owner(name.removeprefix(PHASE))
        elif name.startswith(MODULE):
            phase = "recompute" if owner.phase in ("backward", "recompute") else owner.phase
            owner = Owner(phase, name.removeprefix(MODULE))
        elif name.startswith(OP):
            phase = "recompute" if owner.phase == "backward" else owner.phase
            owner = replace(owner, phase=phase, op=name.removeprefix(OP))
        elif name.startswith(NODE):
            made = calls.get((event.fwd_thread, event.sequence_nr)) if event.sequence_nr >= 0 else None
            made = made or latest.get(event.thread, Owner())
            owner = latest[event.thread] = replace(made, phase="backward")
        elif event.sequence_nr >= 0 and owner.phase in ("forward", "recompute"):
            calls[event.thread, event.sequence_nr] = owner
        found[id(event)] = owner
    return found


def kind_of(name: str, owner: Owner, gpu: bool) -> str:
    """Returns the kind of work, one of KINDS, of a kernel or an operator of that name."""
    if not gpu and not name.startswith("aten::"):
        return "host"
    if owner.phase == "optimizer":
        return "optimizer"
    if owner.op == "attention":
        return "attention"
    if owner.op == "norm":
        return "norms"
    if PRODUCT.search(name) or (owner.op == "gated_linear" and name in FUSED):
        return "products"
    if owner.op == "loss":
        return "loss"
    return "copies" if COPY.search(name) else "elementwise"


def items(events: Iterable[Any], gpu: bool) -> list[Item]:
    """Returns the work of a profile with its owners: kernels on a GPU, or the own time of operators on a CPU."""
    host = [e for e in events if "CPU" in str(e.device_type) and not e.is_async]
    whose = owners(host)
    made = []
    for event in host:
        owner = whose[id(event)]
        work = [(k.name, k.duration) for k in event.kernels] if gpu else [(event.name, event.self_cpu_time_total)]
        made += [Item(name, us, owner, kind_of(name, owner, gpu)) for name, us in work]
    return [item for item in made if item.owner.phase and item.us > 0]


def gaps(device: Sequence[tuple[float, float]], host: Sequence[Any], least: float = 5.0) -> list[tuple[float, str]]:
    """Returns the microseconds of each gap of at least `least` between kernels, and what the host did then.

    device: (start, end) of kernels. host: the profiler's events. The innermost event over the gap's middle says it."""
    found: list[tuple[float, float]] = []
    busy_until = None
    for start, end in sorted(device):
        if busy_until is not None and start - busy_until >= least:
            found.append((busy_until, start))
        busy_until = end if busy_until is None else max(busy_until, end)
    ordered = sorted(host, key=lambda e: e.time_range.start)
    said, open_, at = [], [], 0
    for start, end in found:
        middle = (start + end) / 2
        while at < len(ordered) and ordered[at].time_range.start <= middle:
            open_.append(ordered[at])
            at += 1
        open_ = [e for e in open_ if e.time_range.end >= middle]
        inner = max(open_, key=lambda e: e.time_range.start, default=None)
        said.append((end - start, _doing(inner)))
    return said


def _doing(event: Any) -> str:
    """Returns what the host did: the innermost event and the range around it."""
    if event is None:
        return "Python outside all ranges"
    outer = event
    while outer is not None and not outer.name.startswith((MODULE, PHASE, OP)):
        outer = outer.cpu_parent
    where = "" if outer is None else f" in {re.sub('^lm::[a-z]+:', '', outer.name) or 'the model'}"
    return f"Python{where}" if outer is event else f"{event.name}{where}"
