"""Weights of `nn.Fp8Linear` gathered in 8 bits under FSDP2: a byte a number, and bitwise one process' codes.

A rank quantises its shard, and the product takes the gathered codes: nobody has the weight in 16 bits. With one scale a
weight, ranks first agree on the largest sizes: one all-reduce for all layers at the start of a forward. Squares of
128 x 128 need no agreement, and their scales travel along. Backward gathers and takes the same codes.
FSDP2 asks a shard what to send (`fsdp_pre_all_gather`) and what arrived (`fsdp_post_all_gather`). So a shard is a
tensor of a class of its own, with memory like any other: optimizers, checkpoints and kernels take it as it is.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import ridgeline
from ridgeline.nn import fp8_recipe
from ridgeline.op import RidgelineError

SQUARE = 128
aten = torch.ops.aten
# Results that are shards again; those of all other operations are plain tensors.
SAME = {
    aten.detach.default, aten.alias.default, aten.slice.Tensor, aten.new_zeros.default, aten.empty_like.default,
    aten._to_copy.default,
}  # fmt: skip


class Agreed(NamedTuple):
    """The largest size in a weight over all ranks, the weight and the versions it holds for, and when it is there."""

    largest: torch.Tensor
    weight: ref[torch.Tensor]
    versions: tuple[int, int]
    ready: Any


_agreed: WeakKeyDictionary[nn.Module, Agreed] = WeakKeyDictionary()


class Shard(torch.Tensor):
    """A rank's rows of a weight that are gathered in 8 bits. It is saved and pickled as a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Shard:
        return torch.Tensor._make_subclass(cls, data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if any(kind is not cls for kind in types):
            return NotImplemented
        with torch._C._DisableTorchDispatch():
            found = func(*args, **(kwargs or {}))
        return cls(found) if func in SAME and type(found) is torch.Tensor else found

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Returns what is gathered: codes, padded to the rows of the first rank, and the scales of squares."""
        recipe, rows = fp8_recipe(module), plain(self)
        if recipe == "block":
            codes, scale = ridgeline.quantize_fp8(rows, block=(SQUARE, SQUARE))
            return (codes.view(torch.uint8), scale), (outer_size, None)
        if recipe != "tensor":
            raise RidgelineError(
                f"parallel: a {type(module).__name__} was changed after apply(fp8_gather=True), and cannot read 8-bit "
                "codes now; change the model first, then call apply"
            )
        codes, scale = ridgeline.quantize_fp8(rows, block="tensor", largest=self._largest(module, mesh))
        missing = -(-outer_size[0] // mesh.size()) - len(rows)
        sent = codes.view(torch.uint8)
        return ((nn.functional.pad(sent, (0, 0, 0, missing)) if missing else sent),), (outer_size, scale)

    def _largest(self, module: nn.Module, mesh: DeviceMesh) -> torch.Tensor:
        """Returns the agreed size, or agrees on this weight alone: if it changed, or the root never ran."""
        known, weight = _agreed.get(module), module.weight
        if known is None or known.weight() is not weight or known.versions != _versions(weight, self):
            return _sizes([plain(self)], mesh.get_group())[0]
        if known.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(known.ready)
        return known.largest

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        size, scale = metadata
        if scale is None:
            scale = outputs[1]
        elif scale.is_cuda:  # made on the stream of gathers
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is not None:  # its codes are in the same memory again
            out.scale = scale
            return None
        return Gathered(outputs[0][: size[0]].view(torch.float8_e4m3fn), scale, param_dtype), ()


class Gathered(torch.Tensor):
    """A whole weight of which only 8-bit codes are here. It has the dtype of its gradient, and `fp8_linear` takes it.

    Any other use raises RidgelineError: values in full precision are nowhere."""

    codes: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Gathered:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @property
    def quantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes, self.scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)}, dtype={self.dtype}, in 8 bits)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0] if args else None
        if isinstance(own, cls):
            if func in (aten.detach.default, aten.alias.default) or (
                func is aten.as_strided.default and list(args[1]) == list(own.shape)
            ):
                return cls(own.codes, own.scale, own.dtype)
            if func is aten.zeros_like.default:  # the gradient of a weight that had no part in the loss
                return torch.zeros(own.shape, dtype=own.dtype, device=own.device)
        raise RidgelineError(
            f"parallel: {func} reads a weight that was gathered as 8-bit codes, which only the layer's own forward can "
            "read; leave out fp8_gather"
        )


def plain(shard: torch.Tensor) -> torch.Tensor:
    """Returns a shard as a plain tensor in the same memory."""
    return shard.view(shard.shape) if isinstance(shard, Shard) else shard


def _versions(weight: Any, shard: torch.Tensor) -> tuple[int, int]:
    """Returns how often a weight was written: torch counts for a DTensor and for its shard apart."""
    return weight._version, shard._version


def _sizes(shards: list[torch.Tensor], group: Any) -> torch.Tensor:
    """Returns the largest size in each weight over all ranks, infinite for NaN. A collective."""
    found = torch.zeros(len(shards), device=shards[0].device)
    here = [n for n, t in enumerate(shards) if t.numel()]
    if here:
        sizes = torch._foreach_norm([shards[n] for n in here], math.inf)
        found[here] = torch.stack([s.float() for s in sizes]).nan_to_num(math.inf, math.inf)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


class Agreement:
    """Runs before the root's forward: agrees on the largest sizes of all weights that have one scale."""

    def __init__(self, layers: list[nn.Module], mesh: DeviceMesh) -> None:
        self.layers, self.mesh = layers, mesh

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        some: list[tuple[Any, Shard]] = []
        for layer in self.layers:
            weight = layer.weight
            if isinstance(weight, DTensor):  # else it is gathered still
                shard = weight._local_tensor
                if not isinstance(shard, Shard):  # a weight put in its place, as by load_state_dict(assign=True)
                    shard = weight._local_tensor = Shard(shard)
                if fp8_recipe(layer) == "tensor":
                    some.append((layer, shard))
        if not some:
            return
        sizes = _sizes([plain(t) for _, t in some], self.mesh.get_group(self.mesh.ndim - 1))
        ready = torch.cuda.current_stream(sizes.device).record_event() if sizes.is_cuda else None
        for (layer, shard), largest in zip(some, sizes.unbind(), strict=True):
            _agreed[layer] = Agreed(largest, ref(layer.weight), _versions(layer.weight, shard), ready)


def mark(module: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Makes the weights of a module's 8-bit layers shards, before `fully_shard`. Returns the layers.

    It warns of layers whose weights it leaves to the ordinary gather, one sentence for each reason. Raises
    RidgelineError if it leaves all."""
    ranks = mesh.size(mesh.ndim - 1)
    users: dict[torch.Tensor, list[nn.Module]] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            users.setdefault(p, []).append(m)
    chosen: list[nn.Module] = []
    left: dict[str, list[str]] = {}
    for name, layer in module.named_modules():
        recipe = fp8_recipe(layer)
        if recipe is not None:
            reason = _unfit(layer.weight, recipe, ranks, users[layer.weight])
            if reason is None:
                chosen.append(layer)
            else:
                left.setdefault(reason, []).append(name)
    if not chosen:
        why = next(
            iter(left), "it has no layer that trains in 8 bits, as nn.Fp8Linear or hf.patch(..., 'fp8-training')"
        )
        raise RidgelineError(f"parallel: fp8_gather has nothing to gather in {type(module).__name__}: {why}")
    for reason, names in left.items():
        who = f"{names[0]} and {len(names) - 1} more keep" if names[1:] else f"{names[0]} keeps"
        warnings.warn(f"parallel: {who} the ordinary gather: {reason}", stacklevel=3)
    made: dict[torch.Tensor, nn.Parameter] = {}
    for layer in chosen:
        old: Any = layer.weight
        if old not in made:
            made[old] = nn.Parameter(Shard(old.detach()), old.requires_grad)
        layer.weight = made[old]
    return chosen


def _unfit(weight: Any, recipe: str, ranks: int, users: list[nn.Module]) -> str | None:
    """Returns why a weight cannot be gathered in 8 bits, or None."""
    if recipe == "row":
        return "the recipe 'row' has other codes in backward than in forward, so both would travel"
    if isinstance(weight, DTensor):
        return "the weight is a DTensor, split over another mesh"
    if any(fp8_recipe(m) != recipe for m in users):
        return "another layer has the same weight and reads it in full precision"
    if recipe == "block" and ranks > 1 and weight.shape[0] % (SQUARE * ranks):
        return f"{weight.shape[0]} rows over {ranks} ranks cut squares of {SQUARE} x {SQUARE}, which share a scale"
    return None


def gathered_bytes(module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of all weights of a sharded module when they are gathered once, with what pads them.

    A rank receives (N - 1) / N of them. compute_dtype: as `apply` was given it."""
    ranks, total = mesh.size(mesh.ndim - 1), 0
    for p in module.parameters():
        whole = -(-p.shape[0] // ranks) * ranks * p[0].numel()
        if isinstance(p, DTensor) and isinstance(p._local_tensor, Shard):
            total += whole
        else:
            total += whole * (compute_dtype or p.dtype).itemsize
    squares: set[Any] = {layer.weight for layer in module.modules() if fp8_recipe(layer) == "block"}
    for weight in squares:
        if isinstance(getattr(weight, "_local_tensor", None), Shard):
            total += 4 * math.prod([-(-n // SQUARE) for n in weight.shape])
    return total
