"""FSDP2 over our models by `parallel.apply`, and checkpoints that load on any number of ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ridgeline
import ridgeline.optim
from ridgeline.lm.model import Transformer
from ridgeline.op import RidgelineError
from ridgeline.parallel import apply, groups, load, save
from test_parallel_ladders import SIZE, batch, mine


def model(impl: str = "torch", **options: Any) -> Transformer:
    torch.manual_seed(0)
    size = replace(SIZE, tied=options.pop("tied", False))
    return Transformer(size, impl, options.pop("every", 0))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(*data)
    loss.backward()
    optimizer.step()
    return loss.detach()


def full(net: nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {k: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for k, p in net.named_parameters()}


def ways() -> None:
    world = groups.size()
    for options, own in (
        ({}, {}), ({"checkpointing": True}, {}), ({}, {"tied": True}), ({}, {"every": 1}), ({"reshard": False}, {}),
        ({"units": None, "mesh": groups.mesh(replicate=2, shard=world // 2)}, {}),
    ):  # fmt: skip
        one, net = model(**own), apply(model(**own), **options)
        plain, sharded = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, net))
        for n in range(3):
            wanted, loss = step(one, plain, batch(n)), step(net, sharded, mine(n))
            dist.all_reduce(loss)
            torch.testing.assert_close(loss / world, wanted, rtol=1e-6, atol=0)
        found = full(net)
        for name, p in one.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-7)
    net = apply(model(), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert step(net, torch.optim.SGD(net.parameters(), lr=0.1), mine(0)).isfinite()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("world", [2, 4])
def test_apply_trains_as_one_process(world: int) -> None:
    groups.spawn(ways, world)


def kept_layers() -> int:
    """Returns how many tensors autograd keeps under checkpointing."""
    seen = []
    net = apply(model(), checkpointing=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        net(*mine(0))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(None) or t, lambda t: t):
        apply(model())(*mine(0))
    return 2 * sum(t is not None for t in seen) < sum(t is None for t in seen)


def test_checkpointing_keeps_less() -> None:
    assert all(groups.spawn(kept_layers, 2))


def saved(folder: str, kind: type[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Trains three steps, saves while two more run, goes back, and trains these again."""
    net = apply(model())
    optimizer = kind(net.parameters(), lr=0.01)
    for n in range(3):
        step(net, optimizer, mine(n))
    dice = torch.arange(4.0)
    at_three = full(net)
    saving = save(folder, net, optimizer, 3, dice=dice)
    dice.zero_()  # what is saved was copied
    for n in (3, 4):
        step(net, optimizer, mine(n))
    assert not Path(folder).exists()
    assert saving.wait() == Path(folder)
    wanted = full(net)
    again = apply(model())
    for p in again.parameters():
        nn.init.zeros_(p)
    resumed = kind(again.parameters(), lr=0.5)
    assert load(folder, again, resumed, dice=dice) == 3
    assert dice.tolist() == [0, 1, 2, 3]
    assert resumed.param_groups[0]["lr"] == 0.01
    assert all(torch.equal(p, at_three[k]) for k, p in full(again).items())
    for n in (3, 4):
        step(again, resumed, mine(n))
    assert all(torch.equal(p, wanted[k]) for k, p in full(again).items()), "the resumed run differs"
    with pytest.raises(RidgelineError, match="exists already"):
        save(folder, net, optimizer)
    with pytest.raises(RidgelineError, match="no checkpoint"):
        load(folder + "x", net, optimizer)
    return at_three


def loaded(folder: str, sharded: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    net: nn.Module = apply(model()) if sharded else model()
    optimizer = torch.optim.AdamW(net.parameters())
    assert load(folder, net, optimizer, dice=torch.zeros(4)) == 3
    moments = [optimizer.state[p]["exp_avg"] for p in net.parameters()]
    return full(net), [m.full_tensor() if hasattr(m, "full_tensor") else m for m in moments]


def test_checkpoints_resume_bitwise_and_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "step3")
    wanted = groups.spawn(saved, 2, folder, torch.optim.AdamW)[0]
    found = [groups.spawn(loaded, world, folder, sharded)[0] for world, sharded in ((1, False), (2, True), (4, True))]
    for weights, moments in found:
        assert all(torch.equal(weights[k], p) for k, p in wanted.items())
        assert all(torch.equal(a, b) for a, b in zip(moments, found[0][1], strict=True))


def refusals() -> None:
    with pytest.raises(RidgelineError, match=r"Linear has no list of layers of one type; name them by units"):
        apply(nn.Linear(2, 2))
    with pytest.raises(RidgelineError, match=r"either every= or checkpointing="):
        apply(model(every=1), checkpointing=True)
    with pytest.raises(RidgelineError, match="one or two dimensions, but got 3"):
        apply(model(), groups.mesh(a=1, b=1, c=2))


def test_checkpoints_beside_a_group_that_moves_no_cpu_tensors(tmp_path: Path) -> None:
    """As NCCL's: a save began with a broadcast on the CPU, by training's own group."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cuda:gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        save(tmp_path / "step3", model, optimizer, 3).wait()
        kept = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert load(tmp_path / "step3", model, optimizer) == 3
        assert model.weight.equal(kept)
    finally:
        dist.destroy_process_group()


def test_refusals() -> None:
    groups.spawn(refusals, 2)
    with pytest.raises(RidgelineError, match=r"no process group yet; call parallel.start\(\)"):
        apply(model())


def with_our_kernels() -> None:
    """One layer through the interpreter: our ops and our optimizer on shards, checkpointed, clipped."""
    torch.manual_seed(0)
    small = replace(SIZE, layers=1, width=32, hidden=16, heads=2, key_heads=1, vocabulary=37)
    one, net = Transformer(small, "torch"), Transformer(small, "ridgeline")
    net.load_state_dict(one.state_dict())
    apply(net, checkpointing=True)
    plain, sharded = torch.optim.AdamW(one.parameters(), lr=0.01), ridgeline.optim.AdamW(net.parameters(), lr=0.01)
    data = [t[:2, :4] % 37 for t in batch(0)]
    shards = [t[groups.rank() : groups.rank() + 1] for t in data]
    for m, optimizer, some in ((one, plain, data), (net, sharded, shards)):
        m(*some).backward()
        clip = torch.nn.utils.clip_grad_norm_ if m is one else ridgeline.clip_grad_norm
        clip(list(m.parameters()), 0.5)
        optimizer.step()
    found = full(net)
    for name, p in one.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-3, atol=2e-4)


@pytest.mark.kernels
def test_our_kernels_and_optimizer_under_fsdp2(device: str) -> None:
    if device == "cuda":
        pytest.skip("its ranks are processes on the CPU")
    groups.spawn(with_our_kernels, 2)
