"""Ops on DTensors: each op's rule says which dimensions the ranks of a mesh may split, and the op runs on local parts.

A rule is `Op(sharding=...)`, such as "x ...N, weight N -> ...N" for rms_norm:

    b, h     a dimension that ranks may split; arguments with the same letter are split together
    N, K     one that must be whole; an argument that is split there is gathered first
    ...      all dimensions before the named ones, counted from the right
    *        all dimensions;  *!dim: but the one that the argument `dim` names;  */dim: without it, in a result

Where ranks split a dimension that a result lacks, results are partial sums; where an argument lacks it, its gradient
is. A letter is split only if each argument's size divides and the parts match, so parts are always even; anything else
is gathered. After `enable()`, ridgeline's functions take DTensors so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import ridgeline
from ridgeline.op import Op, RidgelineError, registry

OWN = ("adamw", "clip_grad_norm")  # these take DTensors by themselves

Names = tuple[str | None, ...]  # of a tensor's dimensions; None: whole, a capital too


class Call(NamedTuple):
    """A call's DTensors by argument, and the names of their dimensions and of the results'."""

    tensors: dict[str, DTensor]
    names: dict[str, Names]
    results: list[Names]


def enable() -> None:
    """Lets ridgeline's functions take DTensors, by their ops' rules.

    An op without a rule, and a call that its rule does not allow, raise RidgelineError. Calls on plain tensors pass one
    more function than before."""
    for name, op in registry().items():
        if name not in OWN and not hasattr(getattr(ridgeline, name), "sharded"):
            setattr(ridgeline, name, on_dtensors(op))


def disable() -> None:
    """Undoes `enable`."""
    for name, op in registry().items():
        setattr(ridgeline, name, op.function)


def on_dtensors(op: Op) -> Callable[..., Any]:
    """Returns an op's public function that takes DTensors, too."""
    function = op.function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for a in (*args, *kwargs.values()):
            if isinstance(a, DTensor):
                return _sharded(op, args, kwargs)
        return function(*args, **kwargs)

    call.sharded = True  # type: ignore[attr-defined]
    return call


def _sharded(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op on the local parts of its DTensors."""
    bound = inspect.signature(op.function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    call = _read(op, given)
    mesh = next(iter(call.tensors.values())).device_mesh
    if any(t.device_mesh != mesh for t in call.tensors.values()):
        raise RidgelineError(f"{op.name}: its DTensors must be on one mesh")
    split = chosen(call, mesh.ndim, [mesh.size(n) for n in range(mesh.ndim)])
    lost = [name for name in split if name is not None and any(name not in names for names in call.results)]
    if lost and given.get("reduction") == "mean":
        return _mean(op, given)
    for name, t in call.tensors.items():
        given[name] = _local(t, call.names[name], split)
    found = op.function(*bound.args, **bound.kwargs)
    several = isinstance(found, tuple)
    results = list(found) if several else [found]
    if len(call.results) < len(results):
        call.results.extend(call.results[-1:] * (len(results) - len(call.results)))
    wrapped = [
        DTensor.from_local(t, mesh, _placed(names, split), run_check=False) if isinstance(t, torch.Tensor) else t
        for t, names in zip(results, call.results, strict=False)
    ]
    return tuple(wrapped) if several else wrapped[0]


def _mean(op: Op, given: dict[str, Any]) -> Any:
    """Returns the mean of losses whose rows are split: ranks may ignore different numbers of them."""
    name = "x" if "x" in given else "logits"
    dtype = given["dtype"] or (given[name].dtype if name == "logits" else torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    total = _sharded(op, (), given | {"reduction": "sum", "dtype": wide})
    count = (given["target"] != given["ignore_index"]).sum()
    mesh, whole = total.device_mesh, [Replicate()] * total.device_mesh.ndim
    parts = [t.redistribute(mesh, whole) if isinstance(t, DTensor) else t for t in (total, count)]
    return (parts[0] / parts[1]).to(dtype)


def _read(op: Op, given: dict[str, Any]) -> Call:
    """Reads an op's rule for these arguments. Raises RidgelineError if there is none, or if it does not fit."""
    rule = op.sharding
    text = rule(**given) if callable(rule) else rule
    if text is None:
        why = "it has no rule for DTensors" if rule is None else "its rule for DTensors does not allow this call"
        raise RidgelineError(f"{op.name}: {why}; give local shards (x.to_local())")
    left, _, right = text.partition("->")
    specs = dict(part.split() for part in left.split(","))
    tensors, names = {}, {}
    for name, value in given.items():
        if isinstance(value, DTensor):
            if name not in specs:
                raise RidgelineError(f"{op.name}: {name} must be a plain tensor or a number, not a DTensor")
            tensors[name], names[name] = value, named(specs[name], value, given)
        elif isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise RidgelineError(
                f"{op.name}: {name} needs a gradient and is a plain tensor, but others are DTensors; pass it through "
                "distribute_tensor"
            )
        elif isinstance(value, torch.Tensor) and name in specs:
            names[name] = named(specs[name], value, given)
    biggest = max((t for n, t in given.items() if n in names), key=lambda t: t.dim())
    lead = max((given[n].dim() - len(specs[n]) + 3 for n in names if specs[n].startswith("...")), default=0)
    results = [named(spec.strip(), biggest, given, int(lead)) for spec in right.split(",")]
    call = Call(tensors, names, results)
    for name in [n for n in names if n not in tensors]:  # plain tensors are whole on every rank
        for letter, size in zip(names[name], given[name].shape, strict=True):
            if letter and size > 1:
                _made_whole(call, letter)
    return call


def _made_whole(call: Call, letter: str) -> None:
    for name, names in call.names.items():
        call.names[name] = tuple([None if n == letter else n for n in names])


def named(spec: str, t: Any, given: dict[str, Any], lead: int | None = None) -> Names:
    """Returns the names of a tensor's dimensions, None for those that must be whole.

    For a result, t is the argument with the most dimensions, of which `*` means the same, and lead what `...` means."""
    dims = t.dim()
    ordinals = [str(n - dims) for n in range(dims)]
    if spec.startswith("*"):
        how, which = spec[1:2], spec[2:]
        out = {d % dims for d in _dims(given[which], dims)} if which and dims else set()
        if how == "/":
            kept = [None if n in out else o for n, o in enumerate(ordinals)]
            return tuple(kept) if given.get("keepdim") else tuple(o for o in kept if o)
        return tuple([None if n in out else o for n, o in enumerate(ordinals)])
    if spec.startswith("..."):
        letters = spec[3:]
        lead = dims - len(letters) if lead is None else lead
        whole = [f"-{lead - n}" for n in range(lead)] + list(letters)
    else:
        whole = list(spec[max(0, len(spec) - dims) :] if lead is None else spec)
    return tuple([None if n.isupper() else n for n in whole])


def _dims(value: Any, dims: int) -> Sequence[int]:
    return range(dims) if value is None else [value] if isinstance(value, int) else value


def chosen(call: Call, many: int, ranks: list[int]) -> list[str | None]:
    """Returns, for each dimension of the mesh, the name of the tensors' dimension that its ranks split, or None.

    It is the first argument's that is split there and may be."""
    split: list[str | None] = []
    for axis in range(many):
        wanted = None
        for name, t in call.tensors.items():
            where = t.placements[axis]
            if isinstance(where, Shard) and (letter := call.names[name][where.dim]) is not None:
                parts = ranks[axis]
                for other, size in zip(split, ranks, strict=False):
                    parts *= size if other == letter else 1
                if _divides(call, letter, parts):
                    wanted = letter
                    break
        split.append(wanted)
    return split


def _divides(call: Call, letter: str, parts: int) -> bool:
    """Returns whether every argument's dimension of that name can be cut into so many parts that belong together."""
    sizes = [t.shape[n] for a, t in call.tensors.items() for n, name in enumerate(call.names[a]) if name == letter]
    sizes = [s for s in sizes if s != 1]
    return bool(sizes) and all(s % parts == 0 and s % min(sizes) == 0 for s in sizes)


def _local(t: DTensor, names: Names, split: list[str | None]) -> torch.Tensor:
    """Returns the local part of a DTensor where the ranks split so; its gradient comes back as the rule says."""
    where: list[Placement] = []
    back: list[Placement] = []
    for letter in split:
        at = names.index(letter) if letter in names and letter is not None else -1
        if at >= 0 and t.shape[at] > 1:
            where.append(Shard(at))
            back.append(Shard(at))
        else:
            where.append(Replicate())
            back.append(Replicate() if letter is None else Partial())
    if tuple(where) != tuple(t.placements):
        t = t.redistribute(t.device_mesh, where)
    return t.to_local(grad_placements=back)


def _placed(names: Names, split: list[str | None]) -> list[Placement]:
    """Returns the placements of a result."""
    return [
        Replicate() if letter is None else Shard(names.index(letter)) if letter in names else Partial()
        for letter in split
    ]
