"""Peers of experts, grouped products and 8-bit layers: stand-ins with the packages' own arguments give what ours do."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ridgeline
from ridgeline.lab.measurement import peers
from ridgeline.lab.measurement.peers import liger, torchao, triton_kernels
from ridgeline.op import RidgelineError, get

TOKENS, EXPERTS, CHOSEN, WIDTH, HIDDEN = 9, 5, 2, 8, 6


def packages(monkeypatch: pytest.MonkeyPatch, **modules: SimpleNamespace) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.split("__")[0], SimpleNamespace())
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


def experts() -> tuple[torch.Tensor, ...]:
    x, gate_up, down = (
        torch.randn(shape, requires_grad=True)
        for shape in ((TOKENS, WIDTH), (EXPERTS, 2 * HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN))
    )
    weights = torch.rand(TOKENS, CHOSEN, requires_grad=True)
    return x, weights, torch.randint(EXPERTS, (TOKENS, CHOSEN)), gate_up, down


def test_ligers_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(x, gate_up, down, indices, weights):
        assert indices.dtype == torch.int32
        return ridgeline.moe(x, weights, indices, gate_up, down, impl="torch")

    package = SimpleNamespace(LigerFusedMoEFunction=SimpleNamespace(apply=apply))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", SimpleNamespace())
    packages(monkeypatch, liger_kernel__ops__fused_moe=package)
    given = experts()
    y, expected = liger._moe(*given, interleaved=False, limit=None), ridgeline.moe(*given, impl="torch")
    torch.testing.assert_close(y, expected)
    assert y.requires_grad
    bias = torch.zeros(EXPERTS, WIDTH)
    for options in ({"down_bias": bias}, {"activation": "swiglu_oai"}, {"interleaved": True}, {"scales": (bias, bias)}):
        with pytest.raises(RidgelineError, match="timed with silu, without biases, limits and scales"):
            liger._moe(*given, **options)


def test_triton_kernels_has_the_groups_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul(a, b, bias, a_ragged_metadata):
        assert bias is None
        assert not a.requires_grad
        assert not torch.is_grad_enabled()
        rows = a.split(a_ragged_metadata.tolist())
        return torch.cat([part.float() @ w.float() for part, w in zip(rows, b, strict=True)]).to(a.dtype)

    def metadata(sizes, rows):
        assert sizes.dtype == torch.int32
        assert rows == TOKENS
        return sizes

    packages(
        monkeypatch,
        triton_kernels__matmul=SimpleNamespace(matmul=matmul),
        triton_kernels__tensor=SimpleNamespace(make_ragged_tensor_metadata=metadata),
    )
    x, w = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(4, WIDTH, HIDDEN).bfloat16()
    ends = torch.tensor([3, 3, 7, TOKENS], dtype=torch.int32)
    found = triton_kernels._grouped_matmul(x.requires_grad_(), w, ends)
    torch.testing.assert_close(found, ridgeline.grouped_matmul(x.detach(), w, ends, impl="naive"))
    for args, options in (((x, w), {"bias": x}), ((x, w), {"main_grad": w.float()}), ((x.float(), w.float()), {})):
        with pytest.raises(RidgelineError, match="in 16 bits, without bias and without main_grad"):
            triton_kernels._grouped_matmul(*args, ends, **options)


@pytest.mark.parametrize(("op", "name", "differentiable"), [
    ("grouped_matmul", "triton_kernels", False),
    ("fp8_linear", "torchao", True),
    ("moe", "liger", True),
])  # fmt: skip
def test_who_has_a_backward(op: str, name: str, differentiable: bool) -> None:
    ((peer, missing),) = [found for found in peers.of(get(op)) if found[0].name == name]
    assert peer.differentiable is differentiable
    assert missing is None or "pip install" in missing


@pytest.mark.parametrize(("recipe", "theirs"), [("tensor", "tensorwise"), ("row", "rowwise")])
@pytest.mark.parametrize("biased", [False, True])
def test_torchaos_layer_takes_the_given_weight(
    recipe: str, theirs: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    @dataclass(frozen=True)
    class Config:
        name: str = ""
        round_scales_to_power_of_2: bool = True

        @staticmethod
        def from_recipe_name(name: str) -> "Config":
            return Config(name)

    def convert(module, *, config):
        said.append(config)
        return module

    packages(
        monkeypatch, torchao__float8=SimpleNamespace(Float8LinearConfig=Config, convert_to_float8_training=convert)
    )
    monkeypatch.setattr(torch, "compile", lambda call, **options: said.append(options) or call)
    torchao._layer.cache_clear()
    x, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(HIDDEN, WIDTH, requires_grad=True)
    bias = torch.randn(HIDDEN, requires_grad=True) if biased else None
    try:
        y = torchao._fp8_linear(x, weight, bias, recipe=recipe)
        torchao._fp8_linear(x, weight, bias, recipe=recipe)  # made once
    finally:
        torchao._layer.cache_clear()
    assert said == [Config(theirs, False), {"dynamic": False}]
    given = [t for t in (x, weight, bias) if t is not None]
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(y, expected)
    for found, wanted in zip(*(torch.autograd.grad(t.square().sum(), given) for t in (y, expected)), strict=True):
        torch.testing.assert_close(found, wanted)
    for options in ({"recipe": "block"}, {"recipe": recipe, "main_grad": weight}):
        with pytest.raises(RidgelineError, match="neither main_grad nor given codes"):
            torchao._fp8_linear(x, weight, **options)
