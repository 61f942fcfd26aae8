"""ridgeline.nn's layers of a Transformer, which torch has not: against the formula in plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline import nn
from ridgeline.op import RidgelineError

pytestmark = pytest.mark.kernels
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def compare(layer: torch.nn.Module, formula: Any, x: torch.Tensor) -> None:
    """Holds a layer's result and all gradients against a formula's."""
    found, want = layer(x), formula(x)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    dy, given = torch.randn_like(want), [x, *layer.parameters()]
    for a, b in zip(torch.autograd.grad(found, given, dy), torch.autograd.grad(want, given, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("again", [False, True])
def test_gated_mlp(activation: str, again: bool, device: str) -> None:
    mlp = nn.GatedMLP(24, 40, activation, recompute_products=again).to(device)
    assert list(mlp.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    x = torch.randn(2, 7, 24, device=device, requires_grad=True)
    compare(mlp, lambda x: mlp.down_proj(ACTIVATIONS[activation](mlp.gate_proj(x)) * mlp.up_proj(x)), x)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mlp(x))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear(activation: str | None, device: str) -> None:
    layer = nn.Linear(24, 16, activation=activation).to(device)
    x = torch.randn(5, 24, device=device, requires_grad=True)
    compare(layer, lambda x: ACTIVATIONS.get(str(activation), lambda y: y)(F.linear(x, layer.weight, layer.bias)), x)
    residual = torch.randn(5, 16, device=device)
    torch.testing.assert_close(layer(x, residual), layer(x) + residual)


def test_attention_with_rotary_embedding(device: str) -> None:
    layer = nn.Attention(32, 4, 2, 16, window=(4, 0)).to(device)
    rotary = nn.RotaryEmbedding(16, 12, rotary_dim=8, device=device)
    assert not rotary.state_dict()
    x = torch.randn(2, 9, 32, device=device, requires_grad=True)

    def turned(t: torch.Tensor) -> torch.Tensor:
        a, b, rest = t.split((4, 4, 8), -1)
        angles = torch.arange(9.0, device=device)[:, None] / 10000 ** (torch.arange(4.0, device=device) / 4)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    def formula(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        at = torch.arange(9, device=device)
        seen = (at <= at[:, None]) & (at >= at[:, None] - 4)
        o = F.scaled_dot_product_attention(turned(q), turned(k), v, seen, enable_gqa=True)
        return layer.o_proj(o.transpose(1, 2).flatten(2))

    found, want = layer(x, rotary), formula(x)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    given, dy = [x, *layer.parameters()], torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(found, given, dy), torch.autograd.grad(want, given, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    later = layer(x[:, 3:4], rotary, torch.tensor([3], device=device))
    assert later.shape == (2, 1, 32)


def test_wrong_sizes() -> None:
    with pytest.raises(RidgelineError, match="rotary_dim must be even"):
        nn.RotaryEmbedding(16, 12, rotary_dim=7)
    with pytest.raises(RidgelineError, match="multiple of num_heads"):
        nn.Attention(33, 4)
