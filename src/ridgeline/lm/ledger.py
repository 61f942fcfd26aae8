"""An account of the memory of a training step that is not run: fake tensors stand for real ones.

Each storage counts once, from the operation that makes it to its last reference. The launchers of our kernels are
entered, so that their work memory counts too; what happens inside PyTorch's own operations does not.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import boundary
from ridgeline import device as devices

KINDS = ("weights", "moments", "gradients", "data", "activations", "temporaries")
BLOCK = 512  # bytes: PyTorch's allocator for GPUs rounds up to a multiple


@dataclass(eq=False)
class Record:
    """A storage: bytes, when it was made and freed (numbers of events), and what made it.

    kind: one of KINDS. module: the innermost module that ran, by name; op: the operation."""

    nbytes: int
    born: int
    kind: str
    module: str
    op: str
    died: int | None = None


class Ledger(TorchDispatchMode):
    """Keeps a record of each storage that operations inside this context make. rounding: of bytes, upwards."""

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self.rounding = rounding
        self.records: list[Record] = []
        self.live: dict[int, Record] = {}
        self.events = 0
        self.kind = "temporaries"
        self.modules: list[tuple[str, int]] = []  # that run now: name, and the event at which each began
        self.at = ""  # the innermost one
        self.inside: Any = None  # the op of ours whose launcher runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        launcher = boundary.launchers.get(name) if func.namespace == "ridgeline" else None
        if launcher is not None and devices.pretended() is not None:
            outer, self.inside = self.inside, name
            try:
                with self:
                    return launcher(*args, **(kwargs or {}))
            finally:
                self.inside = outer
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.note(value, self.inside or name)
        return out

    def note(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        nbytes = -(-storage.nbytes() // self.rounding) * self.rounding
        record = Record(nbytes, self.tick(), self.kind, self.at, op)
        self.records.append(record)
        self.live[key] = record

        def gone() -> None:
            record.died = self.tick()
            del self.live[key]

        weakref.finalize(storage, gone)

    def tick(self) -> int:
        self.events += 1
        return self.events

    def of(self, tensor: torch.Tensor) -> Record | None:
        """Returns the record of a tensor's storage."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def keep(self, since: int) -> None:
        """Calls what has been made since an event, and is still there, activations."""
        for record in self.live.values():
            if record.born > since and record.kind == "temporaries":
                record.kind = "activations"

    def watch(self, model: nn.Module, layers: set[nn.Module]) -> None:
        """Notes which module runs. Tensors that outlive the forward of such a layer, or of the model, are kept."""
        for name, module in model.named_modules():

            def enter(_: Any, __: Any, name: str = name) -> None:
                self.modules.append((name, self.events))
                self.at = name

            def leave(of: Any, _: Any, __: Any) -> None:
                _name, since = self.modules.pop()
                self.at = self.modules[-1][0] if self.modules else ""
                if (of in layers or of is model) and torch.is_grad_enabled():
                    self.keep(since)

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)  # a checkpoint stops its recomputation early

    def curve(self, since: int = 0) -> tuple[list[int], dict[str, list[int]]]:
        """Returns the events and, for each kind, the bytes that are live after each, from an event on."""
        changes = [(r.born, r.kind, r.nbytes) for r in self.records]
        changes += [(r.died, r.kind, -r.nbytes) for r in self.records if r.died is not None]
        now, whens = dict.fromkeys(KINDS, 0), []
        found: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for when, kind, change in sorted(changes):
            now[kind] += change
            if when >= since:
                whens.append(when)
                for name in KINDS:
                    found[name].append(now[name])
        return whens, found

    def live_at(self, event: int) -> list[Record]:
        """Returns what is live after an event."""
        return [r for r in self.records if r.born <= event and (r.died is None or r.died > event)]


def embody(model: nn.Module) -> None:
    """Replaces a model's parameters on the meta device by new ones on the default device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"))
                module._parameters[name] = made[id(p)]


@contextmanager
def account(card: str | None) -> Iterator[Ledger]:
    """Inside, tensors are fake, and operations are those of a card ("h100"), or of the CPU if it is None."""
    pretended = devices.pretend(card) if card else nullcontext()
    with warnings.catch_warnings(), pretended, FakeTensorMode(), Ledger(BLOCK if card else 1) as ledger:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # launchers ask how it is aligned
        yield ledger
