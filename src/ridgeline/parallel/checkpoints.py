"""Checkpoints of a training that load on any number of ranks, by torch.distributed.checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ridgeline.op import RidgelineError
from ridgeline.parallel import groups


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(module, optimizer)
    return {"model": weights, "optimizer": states}


_kept: dict[str, Any] = {}


def _group(purpose: str) -> Any:
    """Returns a group of all ranks over the CPU, or None without ranks: "ask" for this thread, "write" for the one that
    writes, whose collectives must not mix. Training's own group may have no way for tensors on the CPU, as NCCL."""
    if not dist.is_initialized():
        return None
    if _kept.get("whole") is not dist.group.WORLD:
        _kept.clear()
        _kept["whole"] = dist.group.WORLD
    if purpose not in _kept:
        _kept[purpose] = dist.new_group(backend="gloo")
    return _kept[purpose]


class Saving:
    """A checkpoint that is being written. `wait` returns its folder once it is complete."""

    def __init__(self, folder: Path, part: Path, future: Any) -> None:
        self.folder, self.part, self.future = folder, part, future

    def wait(self) -> Path:
        if self.future is not None:
            self.future.result()
            self.future = None
            dist.barrier(_group("ask"))
            if groups.rank() == 0:
                os.replace(self.part, self.folder)
            dist.barrier(_group("ask"))
        return self.folder


def save(
    folder: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0, **more: torch.Tensor
) -> Saving:
    """Begins to save a checkpoint, and returns once the tensors are copied: training may go on at once.

    Each rank writes its shards, so the folder must be one that all see. It appears under its name when `wait` has
    found it complete. more: further tensors, equal on all ranks. A collective.
    Raises RidgelineError if the folder exists."""
    groups.ready()
    folder = Path(folder)
    part = folder.with_name(folder.name + ".part")
    exists = torch.tensor(int(folder.exists()))
    dist.broadcast(exists, 0, group=_group("ask"))
    if exists:
        raise RidgelineError(f"parallel: the checkpoint {folder} exists already; give another name")
    state = _state(module, optimizer) | {"step": torch.tensor(step), "more": more}
    return Saving(folder, part, dcp.async_save(state, checkpoint_id=str(part), process_group=_group("write")))


def load(folder: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer, **more: torch.Tensor) -> int:
    """Loads a checkpoint that `save` wrote, on any number of ranks, into a sharded or whole module. Returns the step.

    more: the further tensors, which are filled. A collective. Raises RidgelineError if there is no checkpoint."""
    folder = Path(folder)
    if not (folder / ".metadata").is_file():
        raise RidgelineError(f"parallel: {folder} is no checkpoint, or one that was not finished")
    state = _state(module, optimizer) | {"step": torch.tensor(0), "more": more}
    dcp.load(state, checkpoint_id=str(folder), process_group=_group("ask"))
    options = StateDictOptions(strict=True)
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    return int(state["step"])
