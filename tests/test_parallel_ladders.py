"""The ladders of `ridgeline.parallel` against one process, against each other and against their formulas."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ridgeline.lm.model import Transformer
from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError
from ridgeline.parallel import collectives, data, fsdp, groups, optimizer, sharded
from ridgeline.parallel.rung import Rung, observed

SIZE = Size(2, 64, 48, 4, 2, vocabulary=101)
RUNGS: dict[str, Rung] = {
    f"{kind}-{rung.name}": rung
    for kind, ladder in (
        ("data", [*data.LADDER, data.buckets(0.05)]),
        ("optimizer", optimizer.LADDER),
        ("fsdp", sharded.LADDER),
    )
    for rung in ladder
}


class Net(nn.Module):
    """Uneven rows, a frozen bias, tied weights and a parameter that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 16)
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList([nn.Linear(16, 33), nn.Linear(33, 16)])
        self.head = nn.Linear(16, 101, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].bias.requires_grad_(False)
        self.still = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.embed(x))
        y = self.head(self.layers[1](torch.relu(self.layers[0](y))))
        return nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())


def model(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(SIZE, "torch")


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randint(0, 101, (rows, 6), generator=dice), torch.randint(0, 101, (rows, 6), generator=dice)


def mine(step: int) -> tuple[torch.Tensor, ...]:
    return tuple(t.chunk(groups.size())[groups.rank()] for t in batch(step))


@torch.no_grad()
def whole(wrapped: Any) -> dict[str, torch.Tensor]:
    """Returns all parameters of a wrapped module by their plain names."""
    if isinstance(wrapped, fsdp.FSDP):
        return {k: v.clone() for k, v in wrapped.full_state_dict().items()}
    found = wrapped.module.named_parameters(remove_duplicate=False)
    return {k: (p.full_tensor() if hasattr(p, "full_tensor") else p.detach()).clone() for k, p in found}


def train(rung: Rung, make: Callable[[int], nn.Module], kind: Any = torch.optim.SGD, steps: int = 3, **options: Any):
    """Trains on each rank's part. Ranks but the first start from other weights, which rank 0's must replace."""
    wrapped = rung.wrap(make(groups.rank()))
    opt = rung.optimizer(wrapped, kind, **(options or {"lr": 0.1}))
    for step in range(steps):
        opt.zero_grad()
        wrapped(*mine(step)).backward()
        rung.finish(wrapped)
        opt.step()
    return whole(wrapped)


def alone(make: Callable[[int], nn.Module], kind: Any = torch.optim.SGD, steps: int = 3, **options: Any):
    one = make(0)
    opt = kind(one.parameters(), **(options or {"lr": 0.1}))
    for step in range(steps):
        opt.zero_grad()
        one(*batch(step)).backward()
        opt.step()
    return {k: p.detach() for k, p in one.named_parameters(remove_duplicate=False)}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], steps: int = 3) -> str | None:
    """Returns None, or the parameter that is off by more than an ulp of its largest number for each step."""
    for name, p in wanted.items():
        if (found[name] - p).abs().max() > steps * torch.finfo(p.dtype).eps * p.abs().max():
            return name
    return None


# --- collectives


def run_collectives() -> None:
    world, here = groups.size(), groups.rank()
    for rung in collectives.LADDER:
        if refused := rung.refuses(torch.device("cpu")):
            assert rung.kernel
            assert refused == "symmetric memory needs GPUs, but the tensors are on the cpu"
            continue
        made = [torch.randint(0, 9, (2 * world, 3), generator=torch.Generator().manual_seed(n)).float()
                for n in range(world)]  # fmt: skip
        before = made[here].clone()
        with observed() as seen:
            found = rung.run(made[here])
        total = torch.stack(made).sum(0)
        wanted = {"all_gather": torch.cat(made), "all_reduce": total, "reduce_scatter": total.chunk(world)[here]}
        assert torch.equal(found, wanted[rung.what]), rung
        assert torch.equal(made[here], before), rung
        formula = rung.traffic(before.nbytes * (world if rung.what == "all_gather" else 1), world)
        assert seen == formula, (rung.name, rung.what, str(seen), str(formula))
    odd = torch.full((5,), float(here))
    assert torch.equal(collectives.ring_all_reduce(odd), torch.full((5,), world * (world - 1) / 2))


@pytest.mark.parametrize("world", [2, 4])
def test_collectives(world: int) -> None:
    groups.spawn(run_collectives, world)


# --- values


def same_as_one_process() -> None:
    results = {name: train(rung, model) for name, rung in RUNGS.items()}
    results |= {f"net {name}": train(rung, net) for name, rung in RUNGS.items() if not name.startswith("fsdp")}
    results["net fsdp"] = train(RUNGS["fsdp-blocks"], net)
    for name, found in results.items():
        first = results["net data-naive" if name.startswith("net") else "data-naive"]
        # A sum of two numbers has one order, so all rungs agree to the bit.
        assert all(torch.equal(found[k], first[k]) for k in first), name
    assert close(results["data-naive"], alone(model)) is None
    assert close(results["net data-naive"], alone(net)) is None
    assert results["net data-naive"]["still"].tolist() == [2, 2]


def test_every_rung_trains_as_one_process_with_tied_and_frozen_parameters() -> None:
    groups.spawn(same_as_one_process, 2)


def four() -> None:
    for name in ("data-buckets-0.05", "optimizer-flat", "fsdp-parts", "fsdp-engine"):
        assert close(train(RUNGS[name], model), alone(model)) is None, name
    for name in ("data-hooks", "optimizer-parameters", "fsdp-blocks"):  # 33 rows over 4 ranks: the last has 6
        assert close(train(RUNGS[name], net), alone(net)) is None, name


def test_four_ranks_and_uneven_shards() -> None:
    groups.spawn(four, 4)


class Branch(nn.Module):
    """Rank 1 leaves out one layer, and all leave out another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if groups.rank() == 0 else self.b(x)


def unused() -> None:
    x = torch.ones(2, 4)
    for make in (data.NaiveReplicas, data.FlatReplicas, data.BucketReplicas):
        torch.manual_seed(0)
        own = Branch()
        wrapped = make(own, unused=True)
        plain = deepcopy(own)
        with observed() as seen:
            wrapped(x).sum().backward()
            wrapped.finish_gradient_synchronization()
        assert own.c.weight.grad is None
        plain(x).sum().backward()
        mean = plain.a.weight.grad if groups.rank() == 0 else torch.zeros(4, 4)
        dist.all_reduce(mean := mean / 2)
        assert torch.equal(own.a.weight.grad, mean)
        assert seen.bytes["all_reduce"] >= 2 * 4 * 20
        strict = make(Branch())
        strict(x).sum().backward()
        with pytest.raises(RidgelineError, match=r"(a|c)\.weight has no gradient .*unused=True"):
            strict.finish_gradient_synchronization()
        dist.barrier()


def accumulated() -> None:
    for name in ("data-flat", "data-hooks", "data-buckets-25", "fsdp-parts", "fsdp-engine"):
        own = RUNGS[name].wrap(model())
        parts = [mine(0), mine(1)]
        if isinstance(own, data.Replicas):
            with own.accumulate():
                own(*parts[0]).backward()
        else:
            own(*parts[0]).backward()
        own(*parts[1]).backward()
        RUNGS[name].finish(own)
        one = model()
        for step in (0, 1):
            one(*batch(step)).backward()
        for (key, p), q in zip(one.named_parameters(), own.module.parameters(), strict=True):
            grad = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
            if grad.shape == p.shape:
                rows = 0
            else:
                rows = -(-p.shape[0] // groups.size()) * groups.rank()
            wanted = p.grad[rows : rows + len(grad)]
            assert torch.allclose(grad, wanted, rtol=1e-5, atol=1e-7), (name, key)
    twice = data.BucketReplicas(model())
    twice(*mine(0)).backward()
    with pytest.raises(RidgelineError, match=r"second gradient .*accumulate\(\)"):
        twice(*mine(0)).backward()


def test_unused_parameters() -> None:
    groups.spawn(unused, 2)


def test_accumulation() -> None:
    groups.spawn(accumulated, 2)


# --- optimizers


def optimizers() -> dict[str, Any]:
    adamw = {"lr": 0.01, "weight_decay": 0.1}
    plain = train(RUNGS["optimizer-whole"], net, torch.optim.AdamW, 10, **adamw)
    for name in ("parameters", "flat", "engine"):
        found = train(RUNGS[f"optimizer-{name}"], net, torch.optim.AdamW, 10, **adamw)
        assert all(torch.equal(found[k], plain[k]) for k in plain), name
    own = data.FlatReplicas(net())
    sharded = optimizer.ShardedOptimizer(
        [{"params": [own.module.embed.weight]}, {"params": list(own.module.layers.parameters()), "lr": 0.5}],
        torch.optim.AdamW, lr=0.01,
    )  # fmt: skip
    sharded.add_param_group({"params": list(own.module.norm.parameters()), "weight_decay": 0.5})
    assert [g["lr"] for g in sharded.param_groups] == [0.01, 0.5, 0.01]
    schedule = torch.optim.lr_scheduler.StepLR(sharded, 1, gamma=0.5)

    def step() -> torch.Tensor:
        sharded.zero_grad()
        loss = own(*mine(0))
        loss.backward()
        own.finish_gradient_synchronization()
        return loss

    assert sharded.step(step).item() > 0
    schedule.step()
    assert [g["lr"] for g in sharded.local.param_groups] == [0.01, 0.5, 0.01]  # copied at the next step
    sharded.step(step)
    assert [g["lr"] for g in sharded.local.param_groups] == [0.005, 0.25, 0.005]
    held = sum(len(g["params"]) for g in sharded.local.param_groups)
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert 0 < held < total == 7
    moved = []
    with mock.patch.object(torch.Tensor, "cpu", lambda t: moved.append(t) or t):
        state = sharded.state_dict()
    assert sum(t.is_floating_point() for t in moved) == sum(map(len, sharded.local.state.values()))
    weights = {k: v.clone() for k, v in own.module.state_dict().items()}
    sharded.step(step)
    wanted = whole(own)
    own.module.load_state_dict(weights)
    again = optimizer.ShardedOptimizer(
        [{"params": [own.module.embed.weight]}, {"params": list(own.module.layers.parameters())},
         {"params": list(own.module.norm.parameters())}], torch.optim.AdamW,
    )  # fmt: skip
    again.load_state_dict(state)
    again.zero_grad()
    own(*mine(0)).backward()
    own.finish_gradient_synchronization()
    again.step()
    assert all(torch.equal(wanted[k], v) for k, v in whole(own).items())
    return state


def test_sharded_optimizers_and_their_state() -> None:
    state = groups.spawn(optimizers, 2)[0]
    one = net()
    plain = torch.optim.AdamW(
        [{"params": [one.embed.weight]}, {"params": list(one.layers.parameters())},
         {"params": list(one.norm.parameters())}]
    )  # fmt: skip
    plain.load_state_dict(state)  # all ranks' states, as one process has them
    assert len(plain.state) == 6


def flat_run(folder: str | None) -> dict[str, Any]:
    """Trains by flat shards for two steps, and returns the state; with a folder, goes on from one that it holds."""
    own = net()
    dice = torch.Generator().manual_seed(7)
    groups_ = [{"params": [own.embed.weight, own.still]}, {"params": [*own.layers.parameters()], "lr": 0.5}]
    flat = optimizer.FlatShardedOptimizer(groups_, torch.optim.AdamW, lr=0.01)
    if folder:
        saved = torch.load(folder, weights_only=True)
        own.load_state_dict(saved["model"])
        flat.load_state_dict(saved["optimizer"])
    for _ in range(2):
        flat.zero_grad()
        for p in own.parameters():
            if p.requires_grad:
                p.grad = torch.rand(p.shape, generator=dice)
        flat.step()
    with pytest.raises(RidgelineError, match="other groups of parameters"):
        flat.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    return {"model": {k: v.clone() for k, v in own.state_dict().items()}, "optimizer": flat.state_dict()}


def test_flat_shards_save_whole_states_that_load_anywhere(tmp_path: Any) -> None:
    first = groups.spawn(flat_run, 2, None)[0]
    torch.save(first, tmp_path / "state")
    wanted = groups.spawn(flat_run, 2, str(tmp_path / "state"))[0]
    one = net()
    one.load_state_dict(first["model"])
    plain = torch.optim.AdamW([{"params": [one.embed.weight, one.still]}, {"params": [*one.layers.parameters()]}])
    plain.load_state_dict(first["optimizer"])
    dice = torch.Generator().manual_seed(7)
    for _ in range(2):
        for p in one.parameters():
            if p.requires_grad:
                p.grad = torch.rand(p.shape, generator=dice)
        plain.step()
    assert [g["lr"] for g in plain.param_groups] == [0.01, 0.5]
    for found in (groups.spawn(flat_run, 4, str(tmp_path / "state"))[3], wanted):
        assert all(torch.equal(found["model"][k], v) for k, v in one.state_dict().items() if "norm" not in k)
        assert all(torch.equal(v["exp_avg"], wanted["optimizer"]["state"][n]["exp_avg"])
                   for n, v in found["optimizer"]["state"].items())  # fmt: skip


# --- FSDP


def fsdp_details() -> None:
    rung = RUNGS["fsdp-parts"]
    wrapped: Any = rung.wrap(model())
    events: list[tuple[str, int]] = []
    number = {unit: n for n, unit in enumerate(wrapped.units)}
    begin = fsdp.Unit.begin_gather

    def begun(unit: Any) -> None:
        if unit.coming is None and unit.sharded:
            events.append(("gather", number[unit]))
        begin(unit)

    for unit in wrapped.units:
        unit.module.register_forward_hook(lambda m, a, y, n=number[unit]: events.append(("end", n)))
    wrapped(*mine(0)).backward()
    with mock.patch.object(fsdp.Unit, "begin_gather", begun):
        events.clear()
        loss = wrapped(*mine(0))
        forward = list(events)
        events.clear()
        loss.backward()
    order = [number[unit] for unit in wrapped.order]
    assert order == sorted(order)
    gathers = [forward.index(("gather", n)) for n in order]
    inner = order[1:]  # the root runs around all others
    for n, place in zip(inner[2:], gathers[3:], strict=True):
        assert place > forward.index(("end", n - 2)), "a gather began before the unit two before had ended"
    for n, place in zip(inner[1:], gathers[2:], strict=True):
        assert place < forward.index(("end", n - 1)), "a gather did not begin while the unit before ran"
    backward = [n for what, n in events if what == "gather"]
    assert backward == [order[0], *reversed(inner)]
    for unit in wrapped.units:
        assert unit.again is None
        assert unit.coming is None
        assert not [name for m in unit.module.modules() for name in ("weight",) if name in m.__dict__]
    for name, p in wrapped.module.named_parameters():
        assert p.grad.shape == p.shape, name
        assert p.grad.dtype == p.dtype == torch.float32
    with torch.no_grad():
        a = wrapped(*mine(0))
    assert a.isfinite()
    checked = Transformer(SIZE, "torch", every=1)
    with pytest.raises(RidgelineError, match="activation checkpoints; use parallel.apply"):
        fsdp.FSDP(checked, units=[*checked.model.layers])(*mine(0))


def test_fsdp_gathers_no_earlier_and_no_later() -> None:
    groups.spawn(fsdp_details, 2)


# --- bytes


@pytest.mark.parametrize("name", [name for name in RUNGS if name != "data-engine"])  # which refuses a fake group
def test_calls_and_bytes_in_a_world_of_64_are_the_formulas(name: str) -> None:
    rung = RUNGS[name]
    with groups.pretend(64, 3):
        plain = model()
        formula, held = rung.traffic(plain, 64), rung.held(plain, 64)
        wrapped = rung.wrap(plain)
        opt = rung.optimizer(wrapped, torch.optim.AdamW)
        with observed() as seen:
            wrapped(*batch(0)).backward()
            rung.finish(wrapped)
            opt.step()
        assert seen == formula, f"{seen} against {formula}"
        assert seen.sent(64) > 0
        local = [p.to_local() if hasattr(p, "to_local") else p for p in wrapped.parameters()]
        # The last rank may have fewer rows than the formula's.
        assert 0.7 * held.weights <= sum(t.nbytes for t in local) <= held.weights


def engine_traffic() -> None:
    rung = RUNGS["data-engine"]
    wrapped = rung.wrap(model())
    for _ in range(3):
        with observed() as seen:
            wrapped(*mine(0)).backward()
    assert seen == rung.traffic(model(), 2)


def test_calls_and_bytes_of_the_engine() -> None:
    groups.spawn(engine_traffic, 2)


# --- mutants: what a faulty strategy would do must not pass the checks above


@contextmanager
def faulty(kind: str) -> Iterator[None]:
    """Bends a strategy."""
    reduce, gather = dist.all_reduce, fsdp.Unit.gathered
    calls = iter(range(10**6))
    done = mock.Mock()

    def dropped(*args: Any, **kwargs: Any) -> Any:
        return done if next(calls) == 2 else reduce(*args, **kwargs)

    def stale(unit: Any) -> Any:
        unit.kept = getattr(unit, "kept", None) or [t.clone() for t in gather(unit)]
        return unit.kept

    patches = {
        "a dropped hook": (dist, "all_reduce", dropped),
        "no division": (torch.Tensor, "div_", lambda sums, world: sums),
        "stale weights": (fsdp.Unit, "gathered", stale),
        "no broadcast": (dist, "broadcast", lambda *a, **k: done),
    }
    with mock.patch.object(*patches[kind]):
        yield


def mutant(kind: str, name: str) -> str | None:
    rung = RUNGS[name]
    wrapped = rung.wrap(model())
    opt = rung.optimizer(wrapped, torch.optim.SGD, lr=0.1)
    with faulty(kind):
        for step in range(3):
            opt.zero_grad()
            wrapped(*mine(step)).backward()
            rung.finish(wrapped)
            opt.step()
    return close(whole(wrapped), alone(model))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("a dropped hook", "data-hooks"), ("a dropped hook", "data-naive"), ("no division", "data-buckets-25"),
     ("no division", "data-flat"), ("stale weights", "fsdp-blocks"), ("no broadcast", "optimizer-parameters")],
)  # fmt: skip
def test_detects_a_faulty_strategy(kind: str, name: str) -> None:
    assert any(groups.spawn(mutant, 2, kind, name))


def test_the_ladders_explain_themselves() -> None:
    for rung in [*RUNGS.values(), *collectives.LADDER]:
        assert 0 < len(rung.idea) <= 100
    for ladder in (data.LADDER, optimizer.LADDER, sharded.LADDER):
        assert ladder[-1].name == "engine"
        assert len({rung.name for rung in ladder}) == len(ladder)
    assert [len(data.buckets_of(list(net().parameters()), mb * data.MB)) for mb in (1e-6, 1)] == [8, 1]
    assert all(a.idea != b.idea for a, b in pairwise(data.LADDER))
