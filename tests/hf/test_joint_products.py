"""Products of one input: q, k and v are made together, and backward sums their input's gradients in its products."""

import copy
from typing import Any

import pytest
import torch
from models import assert_same, pair, step, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import hf, recomputation


class Calls(TorchDispatchMode):
    """Counts the operators called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] = self.count.get(func.overloadpacket.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


def backward_calls(model: Any) -> dict[str, int]:
    loss = model(input_ids=tokens(), labels=tokens()).loss
    with Calls() as calls:
        loss.backward()
    return calls.count


def test_backward_sums_in_the_products() -> None:
    _, model = pair("Llama")
    hf.patch(model)
    joint, layers = backward_calls(model), model.config.num_hidden_layers
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            del layer.self_attn.get_submodule(name).forward
    alone = backward_calls(model)
    assert joint["addmm_"] == 3 * layers  # two of q, k and v, and one of gate and up
    assert alone["addmm_"] == layers
    assert alone["add"] - joint["add"] == 2 * layers


def hooked(layer: Any) -> None:
    layer.register_forward_hook(lambda m, args, y: y * 2)


def adapted(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2


def changed_input(layer: Any) -> None:
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


@pytest.mark.parametrize("change", [hooked, adapted, changed_input])
@pytest.mark.parametrize("which", ["q_proj", "k_proj", "v_proj"])
def test_a_layer_that_is_more_than_its_product(change: Any, which: str) -> None:
    own, ours = pair("Qwen2")
    hf.patch(ours)
    for model in (own, ours):
        change(model.model.layers[1].self_attn.get_submodule(which))
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids))


def test_a_copy_reads_its_own_weights() -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    ours(input_ids=tokens(), labels=tokens()).loss.backward()
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    ids = tokens()
    assert_same(step(own, input_ids=ids, labels=ids), step(copied, input_ids=ids, labels=ids))


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1)])
@pytest.mark.parametrize("used", [(0, 1), (1,)])
def test_products_of_one_input(frozen: tuple[int, ...], used: tuple[int, ...]) -> None:
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(n, 12, dtype=torch.float64, requires_grad=i not in frozen) for i, n in enumerate((7, 3))]
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    found = recomputation.linears(x, weights, [bias, None])
    want = [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, (bias, None), strict=True)]
    dys, given = [torch.randn_like(y) for y in want], [x, bias, *(w for w in weights if w.requires_grad)]

    def gradients(ys: Any) -> Any:
        return torch.autograd.grad([ys[i] for i in used], given, [dys[i] for i in used], allow_unused=True)

    for a, b in zip(gradients(found), gradients(want), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
