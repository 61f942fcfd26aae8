"""DTensors in an optimizer's lists: their local shards, and norms summed over their meshes.

Kernels read tensors by address, and a wrapper subclass has none: its `data_ptr()` is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridgeline.op import RidgelineError, dtensor

OWN = {torch.Tensor, torch.nn.Parameter}
Lists = Sequence[Sequence[torch.Tensor]]


def all_plain(lists: Lists) -> bool:
    """Returns whether all tensors are torch's own, so that `local` has nothing to do."""
    return all(OWN.issuperset(map(type, some)) for some in lists)


def local(op: str, names: Sequence[str], lists: Lists) -> list[list[torch.Tensor]]:
    """Returns the lists with each DTensor replaced by its local shard.

    Raises RidgelineError for other wrapper subclasses, and for tensors of one row that are sharded differently."""
    for n, row in enumerate(zip(*lists, strict=False)):
        layouts = [(t.device_mesh, tuple(t.placements)) if dtensor(t) else None for t in row]
        for name, layout in zip(names, layouts, strict=True):
            if layout != layouts[0]:
                raise RidgelineError(
                    f"{op}: tensors of one parameter must be sharded alike; number {n} of {name} is {_says(layout)}, "
                    f"and of {names[0]} {_says(layouts[0])}"
                )
        if layouts[0] and any(p.is_partial() for p in layouts[0][1]):
            raise RidgelineError(f"{op}: number {n} of {names[0]} is a DTensor of partial sums; redistribute it first")
    return [[_memory(op, name, t) for t in some] for name, some in zip(names, lists, strict=True)]


def _says(layout: Any) -> str:
    return "a plain tensor" if layout is None else f"a DTensor placed {', '.join(map(str, layout[1]))}"


def _says_where(where: Any) -> str:
    """Returns the same words on all ranks for gradients of one kind of mesh and placements, to sort by."""
    return "" if where is None else f"{where[0].mesh_dim_names} {tuple(where[0].shape)} {where[1]}"


def changed(lists: Sequence[torch.Tensor]) -> None:
    """Tells autograd that DTensors are changed in place: kernels count only the versions of their shards."""
    some = [t for t in lists if dtensor(t)]
    if some and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(some)


def _memory(op: str, name: str, t: Any) -> Any:
    """Returns the tensor that holds the values."""
    if dtensor(t):
        with torch.no_grad():
            t = t.to_local()
    wait = getattr(t, "trigger_wait", None)  # an AsyncCollectiveTensor
    if wait is not None:
        t = wait()
    if isinstance(t, torch.Tensor) and hasattr(t, "__tensor_flatten__"):
        raise RidgelineError(
            f"{op}: {name} must be plain tensors or DTensors, and one is a {type(t).__name__}, "
            "a wrapper subclass whose memory a kernel cannot read"
        )
    return t


def sharded_norm(
    grads: Sequence[Any], norm_type: float, norm: Callable[[list[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """Returns the norm of all gradients as one vector, the same 0-d tensor on each rank of their meshes.

    norm: returns the norm of local tensors on one device. Gradients with the same mesh and placements are taken
    together, and summed over the mesh's dimensions that shard them; replicas count once. The order of the collectives
    and their dtype do not depend on which gradients a rank has first, or which of its shards are empty."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for g, own in zip(grads, local("clip_grad_norm", ("tensors",), (grads,))[0], strict=True):
        where = (g.device_mesh, tuple(g.placements)) if dtensor(g) else None
        groups.setdefault(where, []).append(own)
    places = sorted({str(t.device) for tensors in groups.values() for t in tensors})
    if len(places) > 1:
        raise RidgelineError(f"clip_grad_norm: the gradients are on {', '.join(places)}; they must share one device")
    norms = []
    for where, tensors in sorted(groups.items(), key=lambda group: _says_where(group[0])):
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        found = norm(tensors).to(wide)
        mesh, placements = where or (None, ())  # type: Any, Any
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate():
                found = _over(found, norm_type, mesh.get_group(dimension))
        norms.append(found)
    if len(norms) == 1:
        return norms[0]
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([n.to(wide) for n in norms]), norm_type)


def _over(norm: torch.Tensor, norm_type: float, group: Any) -> torch.Tensor:
    """Returns the norm over all ranks of a group, from each one's."""
    from torch.distributed import ReduceOp, all_reduce

    largest = norm_type == math.inf
    value = norm.clone() if largest else norm**norm_type
    all_reduce(value, ReduceOp.MAX if largest else ReduceOp.SUM, group=group)
    return value if largest else value ** (1 / norm_type)
