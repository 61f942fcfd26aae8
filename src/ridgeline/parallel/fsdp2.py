"""FSDP2 (torch's `fully_shard`) for our models and for patched models of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ridgeline.op import RidgelineError
from ridgeline.parallel import fp8_gathering, groups


def blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers of a model: the members of its longest ModuleList or Sequential of one type.

    Raises RidgelineError if there is none."""
    best: list[nn.Module] = []
    for m in module.modules():
        some = list(m) if isinstance(m, nn.ModuleList | nn.Sequential) else []
        if (
            len(some) > len(best)
            and len({type(one) for one in some}) == 1
            and next(some[0].parameters(), None) is not None
        ):
            best = some
    if not best:
        raise RidgelineError(
            f"parallel: {type(module).__name__} has no list of layers of one type; name them by units=[...]"
        )
    return best


def apply(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: Sequence[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    reshard: bool | int = True,
    fp8_gather: bool = False,
) -> nn.Module:
    """Shards a module in place over a mesh by FSDP2 (`fully_shard`), and returns it.

    mesh: one dimension, or two for replicas of shards ("replicate" before "shard"); None: all ranks.
    units: the modules that are gathered one at a time; None takes the layers of `blocks`. The root keeps the rest:
    embedding, last norm and head, so that a loss may use the head's weight in the root's forward.
    compute_dtype: of gathered weights and of inputs; parameters keep theirs. reduce_dtype: of summed gradients.
    checkpointing: backward computes each unit again from its input; in transformers' models, each of their layers,
    in training mode. `lm` models do it themselves by every=1.
    reshard: whether weights go after forward; a number keeps them on so many ranks. The root's always stay.
    fp8_gather: gathers the weights of `nn.Fp8Linear`, and of layers that `hf.patch(quantize="fp8-training")` changed,
    in 8 bits: a byte a number, by the codes that one process would make. It warns of layers that cannot.
    Weights may be written only by all ranks alike. A rank whose weight alone was written between forward and backward
    enters one more all-reduce, and the collectives do not match."""
    groups.ready()
    if mesh is None:  # over gloo, weights may lie on GPUs too
        on_gpu = any(p.is_cuda for p in module.parameters())
        mesh = groups.mesh("cuda" if on_gpu else None, shard=groups.size())
    if mesh.ndim > 2:
        raise RidgelineError(f"parallel: apply takes a mesh of one or two dimensions, but got {mesh.ndim}")
    chosen = blocks(module) if units is None else list(units)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    if checkpointing and getattr(module, "every", False):
        raise RidgelineError(
            "parallel: the model checkpoints its layers by itself; give either every= or checkpointing="
        )
    if fp8_gather and not isinstance(reshard, bool):
        raise RidgelineError(
            f"parallel: FSDP2 keeps no 8-bit weights on {reshard} ranks; with fp8_gather, reshard is True or False"
        )
    layers = fp8_gathering.mark(module, mesh) if fp8_gather else []
    for unit in chosen:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if layers:
        module.register_forward_pre_hook(fp8_gathering.Agreement(layers, mesh), prepend=True)  # before FSDP2's own
    if checkpointing:
        # transformers' own way also keeps a layer that runs again from adding to the cache of keys and values.
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # the second until version 5
        name = next((name for name in names if hasattr(module, name)), None)
        if name is not None:
            getattr(module, name)({"use_reentrant": False})
        else:
            recompute(chosen)
    return module


def recompute(units: Sequence[nn.Module]) -> None:
    """Has backward compute these modules again from their inputs."""
    for unit in units:
        plain = unit.forward
        unit.forward = _Recomputed(plain)


class _Recomputed:
    """A forward under a checkpoint, inside the hooks that gather the weights."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(self.plain, *args, use_reentrant=False, **kwargs)
