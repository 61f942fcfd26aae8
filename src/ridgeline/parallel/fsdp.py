"""Fully sharded data parallelism, to teach: a rank keeps an N-th of each weight, and gathers a layer when it runs.

Before a unit runs, its weights are gathered; after it they go. Autograd keeps a note in place of a gathered weight,
and backward gathers it again. The gradients of a unit are reduced and scattered while the units before it go on.
Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups

SHARDED = (nn.Linear, nn.Embedding)


@dataclass
class Slot:
    """A parameter of a unit. shape: of the whole. places: the modules that have it, and its name there."""

    param: nn.Parameter
    shape: torch.Size
    sharded: bool
    places: list[tuple[nn.Module, str]]

    def rows(self, world: int) -> int:
        """Rows of a rank's part with its padding."""
        return -(-self.shape[0] // world)


@dataclass
class Note:
    """What autograd keeps of a gathered weight."""

    unit: Unit
    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Unit:
    """A module whose weights are gathered together: one all-gather, and one reduce-scatter of its gradients."""

    def __init__(self, module: nn.Module, slots: list[Slot], whole: FSDP) -> None:
        self.module, self.slots, self.whole = module, slots, whole
        self.world, self.here = groups.size(whole.group), groups.rank(whole.group)
        self.dtype = whole.compute_dtype
        self.sharded = [n for n, slot in enumerate(slots) if slot.sharded]
        self.coming: tuple[torch.Tensor, Any] | None = None  # a gather on its way
        self.again: list[torch.Tensor] | None = None  # gathered for backward
        self.noted = False
        self.live: list[int] = []  # addresses of the gathered weights' storages, in forward
        self.hooks: Any = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def begin_gather(self) -> None:
        """Starts to gather the sharded weights, in the dtype of the computation."""
        if self.coming is None and self.sharded:
            parts = []
            for n in self.sharded:
                slot, own = self.slots[n], self.slots[n].param.detach()
                own = own.to(self.dtype) if self.dtype else own
                missing = slot.rows(self.world) - own.shape[0]
                parts.append(torch.nn.functional.pad(own, [0, 0] * (own.dim() - 1) + [0, missing]).reshape(-1))
            mine = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
            out = mine.new_empty(self.world * mine.numel())
            self.coming = out, groups.all_gather(out, mine, group=self.whole.group, async_op=True)

    def gathered(self) -> list[torch.Tensor]:
        """Returns the whole weights of the sharded slots."""
        self.begin_gather()
        if self.coming is None:
            return []
        (flat, work), self.coming = self.coming, None
        with groups.answered("the gather of weights"):
            work.wait()
        sizes = [self.slots[n].rows(self.world) * self.slots[n].shape[1:].numel() for n in self.sharded]
        found = []
        for n, columns in zip(self.sharded, flat.view(self.world, -1).split(sizes, 1), strict=True):
            shape = self.slots[n].shape
            found.append(columns.reshape(-1, *shape[1:])[: shape[0]])
        return found

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.whole.enter(self)
        wholes = Gathered.apply(self, *[slot.param for slot in self.slots])
        for slot, weight in zip(self.slots, wholes, strict=True):
            for owner, name in slot.places:
                owner.__dict__[name] = weight  # found before the parameter, which the optimizer keeps
        self.live = [wholes[n].untyped_storage().data_ptr() for n in self.sharded]
        self.whole.live |= {address: (self, k) for k, address in enumerate(self.live)}
        self.hooks = saved_tensors_hooks(self.whole.pack, _unpack)
        self.hooks.__enter__()
        if self.dtype and self.whole.leaf(module):
            args = tuple(self._cast(a) for a in args)
        return args, kwargs

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        for slot in self.slots:
            for owner, name in slot.places:
                owner.__dict__.pop(name, None)
        for address in self.live:
            self.whole.live.pop(address, None)
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
            self.hooks = None

    def for_backward(self) -> list[torch.Tensor]:
        """Returns the weights gathered again, and starts the gather of the unit that backward comes to next."""
        if self.again is None:
            self.again = self.gathered()
            self.whole.at_the_end()
            if before := self.whole.before(self):
                before.begin_gather()
        return self.again

    def scatter(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Starts to average the gradients of the whole weights into those of the shards."""
        self.again = None
        self.whole.at_the_end()
        self.whole.complete(2)  # or whole gradients of all units would be held at once
        shards = [n for n in self.sharded if grads[n] is not None]
        if shards:
            parts = []
            for n in shards:
                grad, rows = grads[n], self.slots[n].rows(self.world)
                assert grad is not None
                grad = grad / self.world if grad.dtype == torch.float16 else grad  # before the sum, which may overflow
                missing = self.world * rows - grad.shape[0]
                padded = torch.nn.functional.pad(grad, [0, 0] * (grad.dim() - 1) + [0, missing])
                parts.append(padded.reshape(self.world, -1))
            flat = torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()
            mine = flat.new_empty(flat.shape[1])
            work = groups.reduce_scatter(mine, flat.view(-1), group=self.whole.group, async_op=True)
            self.whole.pending.append((work, mine, flat, [self.slots[n] for n in shards]))
        copies = [n for n, slot in enumerate(self.slots) if not slot.sharded and grads[n] is not None]
        for dtype in sorted({str(grads[n].dtype) for n in copies}):  # type: ignore[union-attr]
            some = [n for n in copies if str(grads[n].dtype) == dtype]  # type: ignore[union-attr]
            flat = torch.cat([grads[n].reshape(-1) for n in some])  # type: ignore[union-attr]
            work = dist.all_reduce(flat, group=self.whole.group, async_op=True)
            self.whole.pending.append((work, flat, flat, [self.slots[n] for n in some]))


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, Note):
        return kept
    return kept.unit.for_backward()[kept.number].as_strided(kept.shape, kept.stride, kept.offset)


class Gathered(torch.autograd.Function):
    """Parameters in, whole weights out; backward hands the gradients to the unit, which reduces them."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        wholes = [p.detach().view_as(p) for p in params]
        for n, weight in zip(unit.sharded, unit.gathered(), strict=True):
            wholes[n] = weight
        if following := unit.whole.after(unit):
            following.begin_gather()
        ctx.mark_non_differentiable(*[w for w, p in zip(wholes, params, strict=True) if not p.requires_grad])
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            ctx.unit.scatter(grads)
        return None, *[None] * len(grads)


Places = list[tuple[nn.Module, str]]


def divided(
    module: nn.Module, chosen: Sequence[nn.Module], layers: tuple[type, ...]
) -> list[tuple[nn.Module, list[tuple[nn.Parameter, Places, bool]]]]:
    """Returns the units with their parameters: each with its places, and whether it is sharded.

    A parameter belongs to the innermost chosen module around it; one tied across units belongs to the root."""
    units = [m for m in module.modules() if m is module or any(m is c for c in chosen)]
    inner = {m: unit for unit in units for m in unit.modules()}  # inner units come later
    places: dict[nn.Parameter, Places] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                places.setdefault(p, []).append((m, name))
    slots: dict[nn.Module, list[tuple[nn.Parameter, Places, bool]]] = {m: [] for m in units}
    for p, where in places.items():
        owners = {inner[m] for m, _ in where}
        owner = next(iter(owners)) if len(owners) == 1 else module
        slots[owner].append((p, where, p.dim() > 0 and any(isinstance(m, layers) for m, _ in where)))
    return [(m, slots[m]) for m in units if slots[m]]


class FSDP(nn.Module):
    """A module of which each rank keeps an N-th: Linear and Embedding weights by rows; all other parameters whole.

    compute_dtype: of gathered weights, of what travels, and of the inputs of a layer that is a unit by itself. Shards
        and their gradients keep their dtype (float32).
    units: the modules whose weights are gathered together, each before those around it; None makes each Linear and
        each Embedding one. A weight must be used within its unit's forward, as `lm`'s head in the root's.
    layers: the types that are sharded.
    A unit's gather starts when the unit before it begins, so after the one two before has ended. Gradients are complete
    when backward returns; they add up over several backward passes. Each rank must run the same units in one order.
    Raises RidgelineError under activation checkpointing; `parallel.apply` supports it."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None, *, group: Any = None,
                 units: Sequence[nn.Module] | None = None, layers: tuple[type, ...] = SHARDED) -> None:  # fmt: skip
        super().__init__()
        self.module, self.compute_dtype, self.group, self.layers = module, compute_dtype, group, layers
        self.order: list[Unit] = []  # in which the last forward ran them
        self.ran: list[Unit] = []
        self.pending: list[tuple[Any, torch.Tensor, torch.Tensor, list[Slot]]] = []
        self.ending = False
        self.live: dict[int, tuple[Unit, int]] = {}
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                whole = t.detach().contiguous()
                dist.broadcast(whole, group=group, group_src=0)
                t.detach().copy_(whole)
        chosen = [m for m in module.modules() if isinstance(m, layers)] if units is None else list(units)
        self.units = []
        for unit, slots in divided(module, chosen, layers):
            made = [Slot(self._shard(p, where) if cut else p, p.shape, cut, where) for p, where, cut in slots]
            self.units.append(Unit(unit, made, self))

    def _shard(self, p: nn.Parameter, where: list[tuple[nn.Module, str]]) -> nn.Parameter:
        world, here = groups.size(self.group), groups.rank(self.group)
        rows = -(-p.shape[0] // world)
        part = p.detach()[here * rows : (here + 1) * rows].clone()
        shard = nn.Parameter(part, requires_grad=p.requires_grad)
        for m, name in where:
            m._parameters[name] = shard
        return shard

    def leaf(self, module: nn.Module) -> bool:
        return isinstance(module, self.layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is not None and torch.is_grad_enabled() and top(False) is not None:
            raise RidgelineError(_NO_CHECKPOINTS)
        self.ran, self.live, self.ending, self.pending = [], {}, False, []
        for unit in self.units:
            unit.coming, unit.noted, unit.again = None, False, None
        out = self.module(*args, **kwargs)
        self.order, self.ran = self.ran, []
        return out

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins."""
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        hooks = top(False) if top is not None and torch.is_grad_enabled() else None
        if hooks is not None and hooks[1] is not _unpack:
            raise RidgelineError(_NO_CHECKPOINTS)
        self.ran.append(unit)

    def pack(self, t: torch.Tensor) -> Any:
        """Returns what autograd keeps of a tensor."""
        unit, number = self.live.get(t.untyped_storage().data_ptr(), (None, 0)) if t.numel() else (None, 0)
        if unit is None:
            return t
        unit.noted = True
        return Note(unit, number, t.shape, t.stride(), int(t.storage_offset()))

    def after(self, unit: Unit) -> Unit | None:
        """Returns the unit that runs next, if it ran next the last time."""
        n = len(self.ran)
        return self.order[n] if self.ran == self.order[:n] and n < len(self.order) else None

    def before(self, unit: Unit) -> Unit | None:
        """Returns the unit that backward needs next: the last one before with a weight that autograd noted."""
        if unit not in self.order:
            return None
        earlier = self.order if unit.module is self.module else self.order[: self.order.index(unit)]
        return next((u for u in reversed(earlier) if u.noted and u.again is None), None)

    def at_the_end(self) -> None:
        """Has this backward pass end with the gradients of the shards."""
        if not self.ending:
            self.ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.ending = False
        for unit in self.units:
            unit.again = unit.coming = None
        self.complete(0)

    @torch.no_grad()
    def complete(self, left: int) -> None:
        """Waits for the oldest reductions until no more than `left` are on their way, and adds them to gradients."""
        world = groups.size(self.group)
        while len(self.pending) > left:
            work, flat, sent, slots = self.pending.pop(0)
            with groups.answered("the reduction of gradients"):
                work.wait()
            whole = flat.float() if flat.dtype.itemsize < 4 else flat
            whole = whole if sent.dtype == torch.float16 and slots[0].sharded else whole.div_(world)
            start = 0
            for slot in slots:
                size = slot.rows(world) * slot.shape[1:].numel() if slot.sharded else slot.param.numel()
                grad = whole[start : start + size][: slot.param.numel()].view_as(slot.param).to(slot.param.dtype)
                grad = grad.clone() if len(slots) > 1 else grad
                slot.param.grad = grad if slot.param.grad is None else slot.param.grad + grad
                start += size

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do, since gradients are complete when backward returns. Raises RidgelineError if not."""
        if self.pending or self.ending:
            raise RidgelineError("parallel: the last backward pass did not end; it raised, or is still running")

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all parameters whole, and the buffers, by the plain module's names. A collective."""
        found: dict[str, torch.Tensor] = dict(self.module.state_dict())
        wholes: dict[nn.Parameter, torch.Tensor] = {}
        for unit in self.units:
            dtype, unit.dtype, unit.coming = unit.dtype, None, None
            for n, weight in zip(unit.sharded, unit.gathered(), strict=True):
                wholes[unit.slots[n].param] = weight.clone()
            unit.dtype = dtype
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if p in wholes:
                found[name] = wholes[p]
        return found


_NO_CHECKPOINTS = (
    "parallel: the FSDP that teaches replaces what autograd keeps, so it runs neither inside nor around activation "
    "checkpoints; use parallel.apply, which supports them"
)
