"""`generate` with transformers' static caches: a step is one call of `decode_attention`; the tokens stay the same."""

import copy
from typing import Any

import pytest
import torch
from models import build, pair, tokens

import ridgeline
from ridgeline import hf


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    own = ridgeline.decode_attention

    def noted(*given: Any, **named: Any) -> Any:
        seen.append(named)
        return own(*given, **named)

    monkeypatch.setattr(ridgeline, "decode_attention", noted, raising=False)
    return seen


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "cache_implementation": "static"} | options
    return model.eval().generate(ids, attention_mask=options.pop("mask", torch.ones_like(ids)), **options)


@pytest.mark.kernels
def test_kernels_generate_the_same_tokens(device: str, calls: list[dict[str, Any]]) -> None:
    own, ours = (m.to(device) for m in pair("Llama"))
    hf.patch(ours)
    ids = tokens(length=5).to(device)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "disable_compile": True}
    assert torch.equal(generated(ours, ids, **options), generated(own, ids, **options))
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Qwen2", "Gemma2", "Phi3", "Olmo2", "Granite", "Cohere", "GptOss"])
def test_generates_the_same_tokens(name: str, calls: list[dict[str, Any]]) -> None:
    own, ours = pair(name)
    hf.patch(ours)
    ids = tokens()
    wanted = generated(own, ids)
    assert torch.equal(generated(ours, ids), wanted)
    full = sum(kind == "full_attention" for kind in getattr(own.config, "layer_types", None) or ["full_attention"] * 2)
    assert len(calls) == 8 * full
    assert all(c["k"] is not None for c in calls)
    assert torch.equal(generated(ours, ids, cache_implementation="dynamic"), wanted)


def test_left_padding_keeps_its_mask(calls: list[dict[str, Any]]) -> None:
    own, ours = pair("Llama")
    hf.patch(ours)
    ids, mask = tokens(), torch.ones(2, 21, dtype=torch.long)
    mask[1, :5] = 0
    assert torch.equal(generated(ours, ids, mask=mask), generated(own, ids, mask=mask))
    assert not calls


def test_several_tokens_at_once(calls: list[dict[str, Any]]) -> None:
    from transformers import StaticCache

    own, ours = pair("Llama")
    hf.patch(ours)
    ids, found = tokens(length=30), []
    for model in (own.eval(), ours.eval()):
        cache = StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits + 0 for part in ids.split([20, 4, 1, 5], 1)]
        found.append(torch.cat(parts, 1))
        keys = cache.layers[1].keys[:, :, :30]
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-5)
    assert len(calls) == 6
    assert keys.abs().sum(-1).min() > 0


def test_with_few_bits() -> None:
    model = build("Llama")
    hf.patch(model, quantize="int4")
    ids = tokens()
    assert torch.equal(generated(model, ids), generated(model, ids, cache_implementation="dynamic"))


def test_a_compiled_step() -> None:
    from transformers import StaticCache

    own, ours = pair("Llama")
    hf.patch(ours)
    ids = tokens()
    compiled = torch.compile(ours.eval().forward, backend="eager", fullgraph=True)
    found = []
    for model, step in ((own.eval(), own.forward), (ours, compiled)):
        cache = StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            parts = []
            for n in range(3):
                given = model.prepare_inputs_for_generation(
                    ids[:, n : n + 1], past_key_values=cache, attention_mask=torch.ones(2, 22 + n, dtype=torch.long),
                    next_sequence_length=1,
                )  # fmt: skip
                masks = given["attention_mask"]
                if model is ours:
                    masks = masks.values() if isinstance(masks, dict) else [masks]
                    assert all(m.dtype == torch.int32 for m in masks)
                parts.append(step(**given).logits + 0)
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-5)


def test_gradients_leave_the_cache_to_transformers() -> None:
    from transformers import StaticCache

    model = build("Llama").eval()
    hf.patch(model)
    ids = tokens()
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        wanted = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits + 0
    assert torch.allclose(model(ids[:, :1], past_key_values=cache).logits, wanted, atol=2e-5)
