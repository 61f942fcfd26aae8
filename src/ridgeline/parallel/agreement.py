"""The question whether all ranks of a group make the same call, asked before its first collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ridgeline.op import CHECK, RidgelineError
from ridgeline.parallel import groups


def asks(tensor: torch.Tensor, group: Any) -> bool:
    """Returns whether ranks compare their calls: on a CPU, and with RIDGELINE_CHECK=1 on any device.

    A question costs two small gathers and synchronises. It is not put while PyTorch traces or intercepts the call, and
    not in a pretended world."""
    if groups.size(group) == 1 or not (tensor.is_cpu or CHECK):
        return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return dist.get_backend(group) != "fake"


def agree(op: str, group: Any, tensor: torch.Tensor, fault: str | None, **facts: Any) -> None:
    """Raises RidgelineError on every rank if one rank's call is wrong, or if the ranks' facts differ.

    fault: what is wrong with this rank's own call, or None. facts: by name, what all ranks must have alike."""
    if not asks(tensor, group):
        if fault:
            raise RidgelineError(f"{op}: {fault}")
        return
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (fault, facts), group=group)
    for rank, (wrong, _) in enumerate(said):
        if wrong:
            alike = all([s[0] == wrong for s in said])
            raise RidgelineError(f"{op}: {wrong}" if alike else f"{op}: on rank {rank}: {wrong}")
    for rank, (_, theirs) in enumerate(said):
        for name, value in said[0][1].items():
            if theirs[name] != value:
                raise RidgelineError(
                    f"{op}: all ranks must have the same {name}, but rank 0 has {value} and rank {rank} {theirs[name]}"
                )
