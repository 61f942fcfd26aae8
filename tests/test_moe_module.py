"""nn.MoE: its formula, the loss of balance, the update of the bias, the state_dict."""

import copy

import pytest
import torch
import torch.nn.functional as F

from ridgeline.nn import MoE
from ridgeline.op import RidgelineError


def own(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """A layer's result, one token and one expert at a time."""
    rows, found = x.flatten(0, -2), []
    scores = (
        (rows @ layer.router.T).softmax(-1) if layer.gate["score"] == "softmax" else (rows @ layer.router.T).sigmoid()
    )
    for row, s in zip(rows, scores, strict=True):
        choice = s if layer.bias is None else s + layer.bias
        best = choice.topk(layer.k).indices
        shares = s[best] / s[best].sum() * layer.gate["scale"]
        y = torch.zeros_like(row)
        for e, share in zip(best, shares, strict=True):
            gate, up = (layer.gate_up_proj[e] @ row).chunk(2)
            y = y + share * (layer.down_proj[e] @ (F.silu(gate) * up))
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            gate, up = (layer.shared_gate_up @ row).chunk(2)
            y = y + layer.shared_down @ (F.silu(gate) * up)
        found.append(y)
    return torch.stack(found).view(x.shape)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shared", [0, 6])
def test_formula(score: str, shared: int) -> None:
    layer = MoE(8, 5, 7, 3, score=score, shared=shared, scale=1.5, balance=0.1)
    assert layer.bias is not None
    layer.bias.normal_()
    x = torch.randn(2, 4, 8, requires_grad=True)
    torch.testing.assert_close(layer(x), own(layer, x))
    dy = torch.randn_like(x)
    grads = torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
    for one, other in zip(grads, torch.autograd.grad(own(layer, x), [x, *layer.parameters()], dy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_loss_of_balance_is_least_for_even_experts() -> None:
    layer = MoE(8, 5, 4, 1, auxiliary=1.0)
    even = torch.eye(4, 8).repeat(5, 1)
    with torch.no_grad():
        layer.router.copy_(torch.eye(4, 8) * 0.01)
    layer(even)
    assert layer.auxiliary_loss is not None
    torch.testing.assert_close(layer.auxiliary_loss, torch.tensor(1.0))
    layer(torch.eye(4, 8)[:1].repeat(20, 1) * 100)
    assert layer.auxiliary_loss > 1.4
    (grad,) = torch.autograd.grad(layer.auxiliary_loss, layer.router)
    assert grad.any()
    layer.eval()
    layer(even)
    assert layer.auxiliary_loss is None


def test_the_bias_evens_the_load() -> None:
    layer = MoE(8, 4, 6, 2, score="sigmoid", balance=0.02)
    x = torch.randn(200, 8) + 0.5
    spread = []
    for _ in range(60):
        with torch.no_grad():
            layer(x)
        assert int(layer.counts.sum()) == 400
        spread.append(int(layer.counts.max() - layer.counts.min()))
        layer.update_bias()
        assert not layer.counts.any()
    assert min(spread[-10:]) < spread[0] / 2


def test_state_and_copies() -> None:
    layer = MoE(8, 4, 6, 2, balance=0.1, shared=4, dtype=torch.bfloat16, router_dtype=torch.float32)
    names = {"router", "gate_up_proj", "down_proj", "shared_gate_up", "shared_down", "bias"}
    assert layer.state_dict().keys() == names
    assert layer.router.dtype == torch.float32
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(layer(x), other(x))
    assert "experts=6, k=2" in repr(layer)


def test_compile() -> None:
    torch._dynamo.reset()
    layer = MoE(8, 5, 4, 2, auxiliary=0.1)
    x = torch.randn(6, 8)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("sizes", [(0, 4, 2, 1), (8, 4, 2.0, 1)])
def test_bad_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(RidgelineError, match="must be an int of at least 1"):
        MoE(*sizes)
