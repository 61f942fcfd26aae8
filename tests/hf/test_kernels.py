"""Patched models on kernels: in Triton's interpreter in float32, and in bfloat16 on a GPU."""

import copy
from typing import Any

import pytest
import torch
from models import OPTIONS, assert_same, pair, step, tokens

from ridgeline import hf


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "memory"), [("Llama", "recompute"), ("Gemma3Text", None), ("GptOss", None)])
def test_float32(name: str, memory: str | None, device: str) -> None:
    own, ours = (m.to(device) for m in pair(name))
    report = hf.patch(ours, memory=memory)
    ids = tokens().to(device)
    mask = torch.tensor([[0] * 5 + [1] * 16, [1] * 21], device=device)
    given = {"input_ids": ids, "labels": ids.masked_fill(mask.cumsum(1) < 2, -100), "attention_mask": mask}
    assert_same(step(own, **given), step(ours, **given), mask == 1, tolerance=1e-4)
    assert not report.fallbacks


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm())


def _errors(found: Any, own: Any, oracle: Any, ids: torch.Tensor) -> list[str]:
    """Returns a line for each logits, loss and gradient that errs by more than twice the model's own, plus rounding.

    Rounding is half an ulp of the oracle's values, or of all gradients' root mean square where that is more: a gradient
    that ought to be zero is noise. A loss is one number, which may be right by chance: the mean error of the tokens'
    losses bounds it.
    """
    half = torch.finfo(torch.bfloat16).eps / 2
    grads = oracle[2]
    count = sum([g.numel() for g in grads.values()])
    typical = (sum([float(g.double().square().sum()) for g in grads.values()]) / count) ** 0.5
    rows = {"logits": (_apart(found[0], oracle[0]), _apart(own[0], oracle[0]), half * float(oracle[0].detach().norm()))}
    token = [
        torch.nn.functional.cross_entropy(logits[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        for logits in (own[0], oracle[0])
    ]
    rows["loss"] = (abs(float(found[1].detach() - oracle[1].detach())), float((token[0] - token[1]).abs().mean()), 1e-6)
    for name, g in grads.items():
        rounding = half * max(float(g.double().norm()), typical * g.numel() ** 0.5)
        rows[name] = (_apart(found[2][name], g), _apart(own[2][name], g), rounding)
    return [
        f"{name} errs by {ours:.3g}, the model's own by {theirs:.3g}, rounding {rounding:.3g}"
        for name, (ours, theirs, rounding) in rows.items()
        if not ours <= 2 * theirs + rounding
    ]


def _wrong_in_bfloat16(name: str, memory: str | None, device: str, harm: float = 0.0) -> list[str]:
    """The lines of `_errors` for a patched model, whose first norm's weight is `harm` off."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
    if "num_experts_per_tok" in OPTIONS[name]:
        sizes["num_experts_per_tok"] = 4  # all: rounding decides which expert a token goes to, so a choice is no law
    model, ours = pair(name, **sizes)
    ids = torch.randint(3, 1000, (2, 100), device=device)
    model, ours = model.to(device, torch.bfloat16), ours.to(device, torch.bfloat16)
    oracle = step(copy.deepcopy(model).float(), input_ids=ids, labels=ids)
    own = step(model, input_ids=ids, labels=ids)
    report = hf.patch(ours, memory=memory)
    with torch.no_grad():
        next(p for n, p in ours.named_parameters() if "layernorm" in n).mul_(1 + harm)
    found = step(ours, input_ids=ids, labels=ids)
    assert found[1].dtype == torch.float32
    assert found[2].keys() == own[2].keys()
    return _errors(found, own, oracle, ids) + [f"fell back: {line}" for line in report.fallbacks]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("memory", [None, "recompute"])
def test_bfloat16_errs_no_more_than_the_models_own(name: str, memory: str | None) -> None:
    wrong = _wrong_in_bfloat16(name, memory, "cuda")
    assert not wrong, f"{name}: {len(wrong)} wrong: " + "; ".join(wrong)


def test_the_bounds_of_bfloat16_find_a_wrong_norm() -> None:
    assert _wrong_in_bfloat16("Llama", None, "cpu", harm=0.05)


@pytest.mark.kernels
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_gate_is_undone_in_one_pass(activation: str, device: str) -> None:
    from ridgeline.op import get
    from ridgeline.ops.matmul._epilogue import ACTIVATIONS

    get("gated_linear")
    dy, z, up = (torch.randn(37, 50, device=device) for _ in range(3))
    exact_z, exact_up = (t.double().requires_grad_() for t in (z, up))
    again = torch.ops.ridgeline.gated_linear_again
    want = ACTIVATIONS[activation](exact_z) * exact_up
    slopes = torch.autograd.grad(want, (exact_z, exact_up), dy.double())
    for found, exact in zip(again(dy, z, up, activation), (*slopes, want), strict=True):
        torch.testing.assert_close(found, exact.detach().float(), rtol=1e-5, atol=1e-6)
