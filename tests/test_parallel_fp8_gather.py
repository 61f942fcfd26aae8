"""Weights that FSDP2 gathers in 8 bits: one process' codes, half of bfloat16's bytes, and nothing kept for backward."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ridgeline.nn import Fp8Linear
from ridgeline.op import RidgelineError
from ridgeline.parallel import apply, fp8_gathering, groups, load, save
from ridgeline.parallel.rung import observed

E4M3 = torch.float8_e4m3fn


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, recipe: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = Fp8Linear(width, hidden, recipe=recipe)
        self.down = Fp8Linear(hidden, width, bias=False, recipe=recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recipe: str = "tensor", width: int = 24, hidden: int = 51) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, hidden, recipe) for _ in range(2))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


SIZES = {"tensor": (24, 51), "block": (256, 512)}  # 51 rows are split unevenly


def inputs(n: int, ranks: int, width: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(n)
    return [torch.randn(6, width, generator=dice) for _ in range(ranks)]


def same(net: nn.Module, one: nn.Module) -> bool:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return all(torch.equal(p, q) for p, q in zip(whole, one.parameters(), strict=True))


def trained(recipe: str, steps: int, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Trains beside one process that sums the ranks' gradients: all bits are equal, step for step."""
    world, sizes = groups.size(), options.pop("sizes", SIZES[recipe])
    where = {"device": "cuda" if dist.get_backend() == "nccl" else "cpu", "dtype": dtype}
    bits = 0.0 if world == 2 else 1e-5  # sums of four have an order
    one, net = (Net(recipe, *sizes).to(**where) for _ in range(2))
    if options.pop("replicas", False):
        options["mesh"] = groups.mesh(replicate=2, shard=world // 2)
    apply(net, fp8_gather=True, **options)
    plain, sharded = (torch.optim.SGD(m.parameters(), lr=0.02) for m in (one, net))
    for n in range(steps):
        data = [x.to(**where) for x in inputs(n, world, sizes[0])]
        for x in data:
            wanted = one(x)
            (wanted.square().sum() / world).backward()
            if x is data[groups.rank()]:
                mine = wanted.detach()
        found = net(data[groups.rank()])
        assert torch.equal(found.detach(), mine)
        found.square().sum().backward()
        for own, p in zip(net.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), p.grad, rtol=bits, atol=bits)
            if bits:
                p.grad = own.grad.full_tensor()
        for o in (plain, sharded):
            o.step()
            o.zero_grad()
        assert same(net, one)


WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("tensor", 2, {}), ("tensor", 2, {"checkpointing": True}), ("tensor", 2, {"reshard": False}), ("block", 2, {}),
    ("tensor", 4, {"replicas": True}), ("tensor", 4, {}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "world", "options"), WAYS, ids=str)
def test_steps_are_those_of_one_process(recipe: str, world: int, options: dict[str, Any]) -> None:
    groups.spawn(trained, world, recipe, 3, options)


def kept() -> None:
    """A layer keeps no copy of its weight's codes: they go with the gathered memory, and come back for backward."""
    net = apply(Net(), fp8_gather=True)
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        loss = net(inputs(0, 1, 24)[0]).square().sum()
    shapes = [tuple(layer.weight.shape) for m in net.layers for layer in (m.up, m.down)]
    codes = [t for t in seen if t.dtype == E4M3 and tuple(t.shape) in shapes]
    assert len(codes) == 4
    assert all(t.untyped_storage().size() == 0 for t in codes)
    loss.backward()


def test_backward_keeps_no_codes() -> None:
    groups.spawn(kept, 2)


def changed() -> None:
    """Scales follow weights that change: after a step, a write, and where a unit runs without the root."""
    net = apply(Net(), fp8_gather=True)
    one, x = Net(), inputs(0, 1, 24)[0]
    assert torch.equal(net(x), one(x))
    for factor in (64.0, 1 / 512):
        with torch.no_grad():
            for model in (net, one):
                for p in model.parameters():
                    p.mul_(factor)
        # The first way runs no hook of the root, so each weight is agreed on by itself.
        for found, wanted in ((net.layers[0](x), one.layers[0](x)), (net(x), one(x))):
            assert torch.equal(found, wanted)
    with torch.no_grad():
        one.layers[0].up.weight[50, 3] = torch.nan
        shard = net.layers[0].up.weight.to_local()
        if groups.rank() == groups.size() - 1:  # rows 26 to 50
            shard[24, 3] = torch.nan
    assert net(x).isnan().all() == one(x).isnan().all()
    assert one(x).isnan().all()


def test_scales_follow_the_weights() -> None:
    groups.spawn(changed, 2)


def narrow() -> None:
    """Weights in float32 are quantised from float32, whatever the dtype of the computation."""
    net = apply(Net(), fp8_gather=True, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one, x = Net(), inputs(0, 1, 24)[0]
    for name, p in one.named_parameters():
        if "norm" in name or "head" in name or "bias" in name:
            p.data = p.data.bfloat16()
    found = net(x)
    assert torch.equal(found, one(x.bfloat16()))
    found.square().sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_weights_are_rounded_once() -> None:
    groups.spawn(narrow, 2)


def moved(recipe: str, width: int, hidden: int, fp8: bool, dtype: torch.dtype | None) -> tuple[int, int, int, int]:
    """Returns a step's gathered bytes, predicted and seen, and its all-reduces and their bytes."""
    net, mesh = Net(recipe, width, hidden), groups.mesh(shard=groups.size())
    apply(net, mesh, fp8_gather=fp8, compute_dtype=dtype)
    with observed() as traffic:
        net(inputs(0, 1, width)[0]).sum().backward()
    whole = fp8_gathering.gathered_bytes(net, mesh, dtype)
    padded = sum(-(-p.shape[0] // mesh.size()) * mesh.size() * p[0].numel() for p in net.head.parameters())
    predicted = 2 * whole - padded * (dtype or torch.float32).itemsize  # the root's weights stay
    return predicted, traffic.bytes["all_gather"], traffic.calls["all_reduce"], traffic.bytes["all_reduce"]


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_half_of_the_bytes_of_bfloat16(recipe: str) -> None:
    width, hidden = {"tensor": (256, 1030), "block": (256, 512)}[recipe]
    wide, narrow = (groups.spawn(moved, 2, recipe, width, hidden, fp8, torch.bfloat16)[0] for fp8 in (False, True))
    assert wide[0] == wide[1]
    assert narrow[0] == narrow[1]
    weights = 2 * 2 * 2 * width * hidden  # elements of two products in two layers, gathered twice
    squares = 0 if recipe == "tensor" else 4 * weights // 128**2
    assert wide[1] - narrow[1] == weights - squares
    assert narrow[2:] == ((1, 4 * 4) if recipe == "tensor" else (0, 0))
    assert wide[2:] == (0, 0)


def test_bytes_in_a_world_of_64() -> None:
    with groups.pretend(64):
        wide, narrow = (moved("tensor", 128, 640, fp8, torch.bfloat16) for fp8 in (False, True))
    assert wide[0] == wide[1]
    assert narrow[0] == narrow[1]
    assert wide[1] - narrow[1] == 2 * 2 * 2 * 128 * 640


def saved(folder: str) -> dict[str, torch.Tensor]:
    net = apply(Net(), fp8_gather=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
        model(inputs(n, 2, 24)[groups.rank()]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(net, optimizer, 0)
    whole = {n: p.full_tensor().detach().clone() for n, p in net.named_parameters()}
    save(folder, net, optimizer, 1).wait()
    step(net, optimizer, 1)
    again = apply(Net(), fp8_gather=True)
    for p in again.parameters():
        nn.init.zeros_(p)
    resumed = torch.optim.AdamW(again.parameters(), lr=0.5)
    assert load(folder, again, resumed) == 1
    assert isinstance(again.layers[0].up.weight._local_tensor, fp8_gathering.Shard)
    states = [s for state in optimizer.state.values() for s in state.values() if hasattr(s, "to_local")]
    assert states
    assert {type(s.to_local()) for s in states} == {torch.Tensor}
    step(again, resumed, 1)
    for p, q in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
    state = again.state_dict()
    other = apply(Net(), fp8_gather=True)
    other.load_state_dict(state, assign=True)
    x = inputs(0, 1, 24)[0]
    with observed() as traffic:
        found = other(x)
    with observed() as before:
        assert torch.equal(found, again(x))
    assert traffic.bytes == before.bytes  # still in 8 bits
    shard = again.layers[0].up.weight._local_tensor
    copied = pickle.loads(pickle.dumps(shard))
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, fp8_gathering.plain(shard))
    return whole


def loaded(folder: str, sharded: bool) -> dict[str, torch.Tensor]:
    net = apply(Net(), fp8_gather=True) if sharded else Net()
    assert load(folder, net, torch.optim.AdamW(net.parameters())) == 1
    return {n: p.full_tensor() if sharded else p.detach() for n, p in net.named_parameters()}


def test_checkpoints_resume_bitwise_and_load_elsewhere(tmp_path: Path) -> None:
    folder = str(tmp_path / "step1")
    wanted = groups.spawn(saved, 2, folder, timeout=120)[0]
    for world, sharded in ((1, False), (4, True)):
        found = groups.spawn(loaded, world, folder, sharded, timeout=120)[0]
        assert all(torch.equal(found[n], p) for n, p in wanted.items())


def refusals() -> None:
    with pytest.raises(RidgelineError, match="nothing to gather in Sequential: it has no layer that trains in 8 bits"):
        apply(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fp8_gather=True)
    with pytest.raises(RidgelineError, match="nothing to gather in Net: the recipe 'row' has other codes in backward"):
        apply(Net("row"), fp8_gather=True)
    with pytest.raises(RidgelineError, match="128 rows over 2 ranks cut squares of 128 x 128"):
        apply(Net("block", 384, 128), fp8_gather=True)
    with pytest.raises(RidgelineError, match="keeps no 8-bit weights on 2 ranks; with fp8_gather, reshard is True"):
        apply(Net(), fp8_gather=True, reshard=2)
    net = Net()
    net.layers[1].up.recipe = "row"
    with pytest.warns(UserWarning, match=r"layers\.1\.up keeps the ordinary gather: the recipe 'row'"):
        apply(net, fp8_gather=True)
    x = inputs(0, 1, 24)[0]
    one = Net()
    one.layers[1].up.recipe = "row"
    assert torch.equal(net(x), one(x))
    tied = Net(hidden=24)
    tied.layers[0].up.weight = tied.layers[0].down.weight
    tied.layers[1].other = nn.Linear(24, 24)
    tied.layers[1].other.weight = tied.layers[1].up.weight
    one = copy.deepcopy(tied)
    with pytest.warns(UserWarning, match="another layer has the same weight and reads it in full precision"):
        apply(tied, fp8_gather=True)
    y, wanted = tied(x), one(x)
    assert torch.equal(y, wanted)
    (y.sum() + wanted.sum()).backward()
    grads = [m.layers[0].up.weight.grad for m in (tied, one)]
    assert torch.equal(grads[0].full_tensor(), grads[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = apply(Net(), fp8_gather=True)
    net.layers[0].up.forward = lambda x: nn.functional.linear(x, net.layers[0].up.weight)
    with pytest.raises(RidgelineError, match="cannot read 8-bit codes now"):
        net(x)
    net = apply(Net(), fp8_gather=True)
    up = net.layers[0].up
    up.register_forward_pre_hook(lambda m, _: m.weight.abs())
    assert "8 bits" in repr(up.weight) or "DTensor" in repr(up.weight)
    with pytest.raises(RidgelineError, match=r"abs.* reads a weight that was gathered as 8-bit codes"):
        net(x)


def test_refusals() -> None:
    groups.spawn(refusals, 2)


@pytest.mark.kernels
def test_our_kernels_make_the_same_codes(device: str) -> None:
    if device == "cuda":
        pytest.skip("its ranks are processes on the CPU")
    groups.spawn(trained, 2, "tensor", 1, {}, timeout=120)
