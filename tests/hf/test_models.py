"""Each model in float32, patched against unpatched: logits, loss and every gradient."""

import pytest
import torch
from models import OPTIONS, assert_same, pair, step, tokens

from ridgeline import hf

LEFT = torch.tensor([[0] * 5 + [1] * 16, [1] * 21])
RIGHT = torch.tensor([[1] * 16 + [0] * 5, [1] * 21])
TARGETS = {"left padding": LEFT.cumsum(1) > 1, "right padding": RIGHT > 0}  # a token after padding has no prediction
INPUTS = {"plain": None, "left padding": LEFT, "right padding": RIGHT}
PATCHED = {
    "Llama": {"norm", "rotary", "mlp", "attention", "loss"},
    "GptOss": {"norm", "rotary", "experts", "attention", "loss"},
    "Qwen3Moe": {"norm", "rotary", "experts", "attention", "loss"},
    "Mixtral": {"norm", "rotary", "experts", "attention", "loss"},
    "Cohere": {"rotary", "mlp", "attention", "loss"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_same_as_unpatched(name: str) -> None:
    own, ours = pair(name)
    report = hf.patch(ours)
    assert {r.part for r in report.patched()} == PATCHED.get(name, PATCHED["Llama"]), str(report)
    ids = tokens()
    for kind, mask in INPUTS.items():
        labels = ids if mask is None else ids.masked_fill(~TARGETS[kind], -100)
        given = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        assert_same(step(own, **given), step(ours, **given), None if mask is None else mask == 1)
    assert not report.fallbacks
    assert not [r for r in report.left() if r.part == "experts"]
    assert 0 < report.share_of_flops < 1


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GptOss"])
def test_packed_sequences(name: str) -> None:
    own, ours = pair(name)
    hf.patch(ours)
    places = torch.cat([torch.arange(n) for n in (5, 11, 7)])[None]
    ids = tokens(1, 23)
    given = {"input_ids": ids, "labels": ids, "position_ids": places, "use_cache": False}
    assert_same(step(own, **given), step(ours, **given))


def test_a_mask_of_four_dimensions() -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    ids, seen = tokens(), torch.rand(2, 1, 21, 21) < 0.6
    seen |= torch.eye(21, dtype=torch.bool)
    given = {"input_ids": ids, "labels": ids, "attention_mask": seen}
    assert_same(step(own, **given), step(ours, **given))


def test_bert_is_left_alone_with_reasons() -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=2)).eval()
    ids = tokens()
    mask = RIGHT
    before = model(input_ids=ids, attention_mask=mask).logits
    report = hf.patch(model)
    assert {r.part for r in report.patched()} == {"attention", "norm"}
    assert all(r.reason for r in report.left())
    assert next(r.reason for r in report.left() if r.part == "loss") == "the model computes its loss itself"
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[mask == 1], before[mask == 1])
