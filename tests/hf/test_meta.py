"""Patched models on the meta device: shapes and dtypes are an unpatched one's, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import OPTIONS, SMALL

from ridgeline import hf


def made(name: str, **more: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SMALL | OPTIONS.get(name, {}) | more)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).train()


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
@pytest.mark.parametrize("inside", [True, False])
def test_shapes_are_an_unpatched_model_s(name: str, inside: bool) -> None:
    """inside: patched and called inside torch.device("meta")."""
    own, ours = made(name), made(name)
    with torch.device("meta" if inside else "cpu"):
        report = hf.patch(ours)
        inner = "experts" if name == "GptOss" else "mlp"
        assert {r.part for r in report.patched()} == {"norm", "rotary", "attention", "loss", inner}, str(report)
        ids = torch.empty(2, 21, dtype=torch.int64, device="meta")
        wanted, found = (model(input_ids=ids, labels=ids) for model in (own, ours))
        for out in (wanted, found):
            out.loss.backward()
    for a, b in ((wanted.logits, found.logits), (wanted.loss, found.loss)):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    assert found.logits.float().is_meta, "logits are made on the meta device, too"
    for (n, p), q in zip(own.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        assert p.grad is None or (p.grad.shape, p.grad.dtype) == (q.grad.shape, q.grad.dtype), n


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_padding_and_generation_steps_have_shapes(name: str) -> None:
    model = made(name)
    hf.patch(model)
    ids = torch.empty(2, 21, dtype=torch.int64, device="meta")
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 21, SMALL["vocab_size"])
    with torch.no_grad():
        assert model(input_ids=ids).logits.argmax(-1).shape == (2, 21)
