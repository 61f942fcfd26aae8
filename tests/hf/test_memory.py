"""What `memory` makes again in backward: the gradients are the same, and less is saved."""

import pytest
import torch
from models import assert_same, pair, step, tokens

import ridgeline
from ridgeline import hf, recomputation


def saved(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """Returns the bytes that a training step saves for backward, each storage once, without parameters."""
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    total = 0

    def pack(t: torch.Tensor) -> torch.Tensor:
        nonlocal total
        storage = t.untyped_storage() if type(t) is torch.Tensor else None
        if storage is not None and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
            kept.append(t)
        return t

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return total


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "Gemma2", "Olmo2"])
@pytest.mark.parametrize("memory", ["recompute", "products", "products:1"])
def test_gradients(name: str, memory: str) -> None:
    own, ours = pair(name)
    hf.patch(ours, memory=memory)
    ids = tokens()
    want = step(own, input_ids=ids, labels=ids)
    assert_same(want, step(ours, input_ids=ids, labels=ids))
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(want, step(ours, input_ids=ids, labels=ids))
    hf.unpatch(ours)
    assert not any("forward" in m.__dict__ for m in ours.modules())


def test_bytes_saved() -> None:
    own, ours = pair("Llama", intermediate_size=256)
    ids = tokens(2, 64)
    used = {"own": saved(own, ids)}
    for memory in (None, "recompute", "products", "products:1", "products:99"):
        report = str(hf.patch(ours, memory=memory))
        used[str(memory)] = saved(ours, ids)
        assert ("backward makes its products again" in report) == str(memory).startswith("products")
    row = 2 * 64 * 4 * own.config.num_hidden_layers  # bytes of a float32 per token and layer
    assert used["None"] <= used["own"] - 256 * row
    assert used["recompute"] == used["None"] - 2 * 64 * row
    assert used["products"] == used["products:99"] == used["recompute"] - 2 * 256 * row
    assert used["products:1"] == used["recompute"] - 2 * 256 * row // own.config.num_hidden_layers
    for wrong in ("products:0", "products:x", "all", 3):
        with pytest.raises(ridgeline.RidgelineError, match="'products:4' for four layers"):
            hf.patch(ours, memory=wrong)  # type: ignore[arg-type]


def test_the_report_says_how_many_layers_took_it() -> None:
    _, ours = pair("Llama")
    layers = ours.config.num_hidden_layers
    for memory in (None, "recompute", "products", "products:1", f"products:{layers}"):
        assert "holds for" not in str(hf.patch(ours, memory=memory))
    assert f"memory='products:99' holds for {layers} of 99 layers" in str(hf.patch(ours, memory="products:99"))
    for memory in ("products", "products:2"):
        assert f"memory='{memory}' holds for no layer" in str(hf.patch(ours, only="norm", memory=memory))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_gated_mlp(activation: str, merged: bool, again: bool) -> None:
    from ridgeline.ops.matmul._epilogue import ACTIVATIONS

    x, first, second, down, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((2, 5, 12), (24, 12), (24, 12), (12, 24), (12,))
    )
    F = torch.nn.functional
    want = F.linear(ACTIVATIONS[activation](F.linear(x, first)) * F.linear(x, second), down, bias)
    weights = (torch.cat([first, second]), None) if merged else (first, second)
    found = recomputation.gated_mlp(x, *weights, down, bias, activation=activation, recompute_products=again)
    torch.testing.assert_close(found, want)
    dy = torch.randn_like(want)
    given = (x, first, second, down, bias)
    for a, b in zip(torch.autograd.grad(found, given, dy), torch.autograd.grad(want, given, dy), strict=True):
        torch.testing.assert_close(a, b)
