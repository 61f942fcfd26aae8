"""CUDA graphs over a whole small training step of our ops, and `make_graphed_callables` over its model."""

import copy
from typing import Any

import pytest
import torch

import ridgeline
from graphs import captured
from ridgeline import optim
from ridgeline.op import RidgelineError
from test_compiled_training import Model

pytestmark = pytest.mark.gpu


def inputs(step: int) -> tuple[torch.Tensor, ...]:
    dice = torch.Generator().manual_seed(step)
    angle = torch.arange(8)[:, None] / 10 ** torch.linspace(0, 3, 8)
    tokens, target = torch.randint(40, (2, 2, 8), generator=dice)
    return tuple(t.cuda() for t in (tokens, target, angle.cos(), angle.sin()))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Model().cuda().bfloat16()


def stepper(net: Any, optimizer: torch.optim.Optimizer, given: tuple[torch.Tensor, ...]) -> Any:
    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = net(*given)
        loss.backward()
        ridgeline.clip_grad_norm(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def test_a_whole_step_in_a_graph() -> None:
    """Replays train as plain steps do, to the bit: forward, backward, clipping and the optimizer."""
    nets = model(), model()
    options: dict[str, Any] = {"lr": 1e-2, "capturable": True, "master_weights": True, "rounding": "stochastic"}
    optimizers = [optim.AdamW(net.parameters(), **options) for net in nets]
    static = inputs(0)
    start, state = copy.deepcopy(nets[1].state_dict()), None
    replay = captured(stepper(nets[1], optimizers[1], static))
    # Warm-up and capture have moved the parameters; both begin at the same place again.
    with torch.no_grad():
        for name, p in nets[1].named_parameters():
            p.copy_(start[name])
            state = optimizers[1].state[p]
            state["master"].copy_(p)
            for moment in ("exp_avg", "exp_avg_sq", "step"):
                state[moment].zero_()
    for step in range(4):
        for t, fresh in zip(static, inputs(step), strict=True):
            t.copy_(fresh)
        loss = replay().clone()
        wanted = stepper(nets[0], optimizers[0], inputs(step))()
        assert torch.equal(loss, wanted), step
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)


def test_graphed_callables() -> None:
    plain, graphed = model(), model()
    fast = torch.cuda.make_graphed_callables(graphed, inputs(0))
    for step in range(3):
        losses = [net(*inputs(step)) for net in (plain, fast)]
        assert torch.equal(*losses), step
        for loss in losses:
            loss.backward()
        for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            a.grad = b.grad = None


def test_a_step_that_counts_on_the_host_raises_before_it_is_captured() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    graph, before = torch.cuda.CUDAGraph(), net.norm.weight.detach().clone()
    with pytest.raises(RidgelineError, match="capturable=True"), torch.cuda.graph(graph):
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.equal(net.norm.weight, before)
    x = torch.ones(8, 64, device="cuda")
    assert captured(lambda: ridgeline.softmax(x))()[0, 0] == 1 / 64  # the next capture works


def test_values_are_not_read_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """RIDGELINE_CHECK=1 cannot read values in a capture: it validates the calls outside one."""
    from ridgeline import op

    monkeypatch.setattr(op, "CHECK", True)
    target, seen = torch.zeros(4, dtype=torch.int64, device="cuda"), []
    assert op.readable(target)
    captured(lambda: seen.append(op.readable(target)))
    assert seen[-1] is False
