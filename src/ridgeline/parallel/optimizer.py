"""An optimizer whose states are sharded over the ranks (ZeRO-1), as a ladder: by whole parameters, by flat shards.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.op import RidgelineError
from ridgeline.parallel import data, groups
from ridgeline.parallel.rung import Held, Rung, Traffic, nbytes, trainable


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of which each rank updates whole parameters, about 1/N of all, and sends them to the others.

    params, kind, options: as `kind(params, **options)` takes them. Gradients must be equal on all ranks already.
    A parameter goes to the rank that has the fewest bytes so far. state_dict() gathers the states of all ranks into the
    host's memory, so it is a collective; it loads on any number of ranks and any device, and into a plain `kind`."""

    def __init__(self, params: Iterable[Any], kind: type[torch.optim.Optimizer], *, group: Any = None, **options: Any):
        self.group, self.world, self.here = group, groups.size(group), groups.rank(group)
        self.owner: dict[torch.Tensor, int] = {}
        self.load = [0] * self.world  # bytes that each rank has
        self.local: torch.optim.Optimizer | None = None
        super().__init__(params, options)
        self.local = kind([self._mine(g) for g in self.param_groups], **options)
        for own, whole in zip(self.local.param_groups, self.param_groups, strict=True):
            whole |= {name: value for name, value in own.items() if name != "params"}

    def _mine(self, group: dict[str, Any]) -> dict[str, Any]:
        return group | {"params": [p for p in group["params"] if self.owner[p] == self.here]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in sorted(group["params"], key=lambda p: -p.nbytes):
            rank = self.load.index(min(self.load))
            self.owner[p] = rank
            self.load[rank] += p.nbytes
        if self.local is not None:
            self.local.add_param_group(self._mine(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Updates this rank's parameters, then broadcasts each from its owner, all at the same time."""
        assert self.local is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own, whole in zip(self.local.param_groups, self.param_groups, strict=True):
            own |= {name: value for name, value in whole.items() if name != "params"}  # schedulers change these
        self.local.step(**options)
        with groups.answered("the broadcast of parameters"):
            works = []
            for p, owner in self.owner.items():
                if p.requires_grad:
                    works.append(dist.broadcast(p.detach(), group=self.group, group_src=owner, async_op=True))
            for work in works:
                work.wait()
        return loss

    def _numbered(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        assert self.local is not None
        own = {n: _on_host(self.local.state[p]) for n, p in enumerate(self._numbered()) if p in self.local.state}
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, own, group=self.group)
        state: dict[int, Any] = {}
        for some in everyone:
            state |= some
        return super().state_dict() | {"state": dict(sorted(state.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.local is not None
        super().load_state_dict(state_dict | {"state": {}})
        mine = [n for n, p in enumerate(self._numbered()) if self.owner[p] == self.here]
        place = {n: k for k, n in enumerate(mine)}
        saved_groups = self.local.state_dict()["param_groups"]
        for saved, whole in zip(saved_groups, self.param_groups, strict=True):
            saved |= {name: value for name, value in whole.items() if name != "params"}
        state = {place[n]: value for n, value in state_dict["state"].items() if n in place}
        self.local.load_state_dict({"state": state, "param_groups": saved_groups})


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state whose tensors are on the CPU: pickled, those of a GPU would arrive on the sender's."""
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


class FlatShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of flat shards: a reduce-scatter of gradients, an update of this rank's part, a gather of weights.

    It averages the gradients itself, so the model is not wrapped in data parallelism: two volumes move instead of
    three. `kind` must be elementwise, such as SGD or AdamW, since it sees flat parts of N-th size, not parameters.
    Parameters become views of flat tensors, one for each group and dtype. group["params"] are the flat shards.
    state_dict() is a collective, and is a plain `kind`'s of the same params: it loads on any number of ranks."""

    def __init__(self, params: Iterable[Any], kind: type[torch.optim.Optimizer], *, group: Any = None, **options: Any):
        self.group, self.world, self.here = group, groups.size(group), groups.rank(group)
        self.flats: list[tuple[torch.Tensor, nn.Parameter, list[nn.Parameter]]] = []
        given = [g if isinstance(g, dict) else {"params": g} for g in _as_groups(params)]
        given = [g | {"params": list(g["params"])} for g in given]
        self.plain = [g["params"] for g in given]  # the parameters as they were given
        shards = [one | {"params": self._shards(list(one["params"]))} for one in given]
        self.local = kind(shards, **options)
        super().__init__(self.local.param_groups, self.local.defaults)
        self.param_groups = self.local.param_groups  # one list, which schedulers change
        self.state = self.local.state

    @torch.no_grad()
    def _shards(self, params: list[nn.Parameter]) -> list[nn.Parameter]:
        kinds: dict[Any, list[nn.Parameter]] = {}
        for p in params:
            if p.requires_grad:
                kinds.setdefault((p.device, p.dtype), []).append(p)
        found = []
        for some in kinds.values():
            count = sum(p.numel() for p in some)
            flat = torch.nn.functional.pad(torch.cat([p.reshape(-1) for p in some]), (0, -count % self.world))
            for p, view in zip(some, flat[:count].split([p.numel() for p in some]), strict=True):
                p.data = view.view(p.shape)
            shard = nn.Parameter(flat.chunk(self.world)[self.here])
            self.flats.append((flat, shard, some))
            found.append(shard)
        return found

    def state_dict(self) -> dict[str, Any]:
        numbers = {p: n for n, p in enumerate(p for group in self.plain for p in group)}
        state: dict[int, dict[str, Any]] = {}
        for flat, shard, params in self.flats:
            for name, value in self.local.state.get(shard, {}).items():
                parts: Any = [value] * len(params)
                if isinstance(value, torch.Tensor) and value.shape == shard.shape:
                    whole = value.new_empty(flat.shape)
                    groups.all_gather(whole, value.contiguous(), group=self.group)
                    sizes = [p.numel() for p in params]
                    parts = [t.view(p.shape) for t, p in zip(whole.split([*sizes, flat.numel() - sum(sizes)]), params)]
                for p, part in zip(params, parts, strict=True):
                    state.setdefault(numbers[p], {})[name] = part
        saved = [own | {"params": [numbers[p] for p in params]}
                 for own, params in zip(self.local.param_groups, self.plain, strict=True)]  # fmt: skip
        host = {n: {k: v.clone() if torch.is_tensor(v) else v for k, v in _on_host(state[n]).items()} for n in state}
        return {"state": dict(sorted(host.items())), "param_groups": saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, state = state_dict["param_groups"], state_dict["state"]
        if [len(g["params"]) for g in saved] != [len(params) for params in self.plain]:
            raise RidgelineError("parallel: the saved optimizer has other groups of parameters than this one")
        pairs = zip((n for g in saved for n in g["params"]), (p for group in self.plain for p in group), strict=True)
        place = {p: n for n, p in pairs}
        own: dict[int, dict[str, Any]] = {}
        for k, (flat, shard, params) in enumerate(self.flats):
            theirs = [state.get(place[p], {}) for p in params]
            for name, value in theirs[0].items():
                values = [one.get(name) for one in theirs]
                if name == "step" or not all(torch.is_tensor(v) and v.shape == p.shape for v, p in zip(values, params)):
                    own.setdefault(k, {})[name] = value
                    continue
                whole = torch.cat([v.reshape(-1).to(shard.device) for v in values])
                whole = torch.nn.functional.pad(whole, (0, flat.numel() - whole.numel()))
                own.setdefault(k, {})[name] = whole.chunk(self.world)[self.here].clone()
        counts = iter(range(len(self.flats)))
        mine = [g | {"params": [next(counts) for _ in local["params"]]}
                for g, local in zip(saved, self.local.param_groups, strict=True)]  # fmt: skip
        self.local.load_state_dict({"state": own, "param_groups": mine})
        self.param_groups, self.state = self.local.param_groups, self.local.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, shard, params in self.flats:
            for p in (shard, *params):
                if set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Averages gradients into shards, updates them, and gathers the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with groups.answered("the reduction of gradients"):
            works = []
            for flat, shard, params in self.flats:
                missing = next((p for p in params if p.grad is None), None)
                if missing is not None:
                    raise RidgelineError(
                        f"parallel: a flat shard needs all gradients, but a parameter of shape {tuple(missing.shape)} "
                        "has none"
                    )
                whole = torch.cat([data.gradient(p).reshape(-1) for p in params])
                whole = torch.nn.functional.pad(whole, (0, flat.numel() - whole.numel()))
                shard.grad = torch.empty_like(shard)
                works.append((shard, groups.reduce_scatter(shard.grad, whole, group=self.group, async_op=True), whole))
            for shard, work, _ in works:
                work.wait()
                assert shard.grad is not None
                shard.grad.div_(self.world)
        self.local.step(**options)
        for _, shard, _ in self.flats:
            shard.grad = None
        with groups.answered("the gather of parameters"):
            gathers = [groups.all_gather(flat, s.detach().clone(), group=self.group, async_op=True)
                       for flat, s, _ in self.flats]  # fmt: skip
            for work in gathers:
                work.wait()
        return loss


def _as_groups(params: Iterable[Any]) -> list[Any]:
    params = list(params)
    return params if params and isinstance(params[0], dict) else [{"params": params}]


# --- the ladder


@dataclass
class Whole(Rung):
    """Every rank keeps all states. Gradients are averaged in buckets during backward, here and in `ByParameters`."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return data.BucketReplicas(module)

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        return data.buckets(25.0).traffic(module, world)

    def held(self, module: nn.Module, world: int, moments: int = 2) -> Held:
        return data.buckets(25.0).held(module, world, moments)


@dataclass
class ByParameters(Whole):
    """The engine's is ZeroRedundancyOptimizer, which broadcasts too."""

    ours: bool = True

    def optimizer(self, wrapped: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        params = trainable(wrapped)
        if self.ours:
            return ShardedOptimizer(params, kind, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(params, kind, **options)

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        params = trainable(module)
        return super().traffic(module, world).add("broadcast", nbytes(params), len(params))

    def held(self, module: nn.Module, world: int, moments: int = 2) -> Held:
        held = super().held(module, world, moments)
        load = [0] * world
        for p in sorted(trainable(module), key=lambda p: -p.nbytes):
            load[load.index(min(load))] += p.nbytes
        held.states = moments * max(load)
        return held


@dataclass
class Flat(Rung):
    """The model runs unwrapped; the optimizer does all."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return _Plain(module)

    def optimizer(self, wrapped: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        return FlatShardedOptimizer(trainable(wrapped), kind, **options)

    def finish(self, wrapped: nn.Module) -> None:
        pass  # the optimizer's step reduces the gradients

    def traffic(self, module: nn.Module, world: int) -> Traffic:
        kinds: dict[Any, int] = {}
        for p in trainable(module):
            kinds[p.dtype] = kinds.get(p.dtype, 0) + p.numel()
        traffic = Traffic()
        for dtype, count in kinds.items():
            size = (count + -count % world) * dtype.itemsize
            traffic.add("reduce_scatter", size).add("all_gather", size)
        return traffic

    def held(self, module: nn.Module, world: int, moments: int = 2) -> Held:
        held = super().held(module, world, moments)
        grads = held.gradients
        held.states = moments * -(-grads // world)
        held.buffers = grads + -(-grads // world)
        return held


class _Plain(nn.Module):
    """A module with rank 0's parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = data.Replicas(module).module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


LADDER: list[Rung] = [
    Whole("whole", "every rank keeps the states of all parameters"),
    ByParameters("parameters", "a rank keeps and updates whole parameters, and broadcasts them"),
    Flat("flat", "a rank keeps an N-th of one flat tensor: scatter, update, gather"),
    ByParameters("engine", "torch's ZeroRedundancyOptimizer", ours=False),
]
