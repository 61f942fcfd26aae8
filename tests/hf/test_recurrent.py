"""Mamba-2's and Qwen3-Next's layers, patched as unpatched: in training, with padding, and token by token."""

import copy
from typing import Any

import pytest
import torch
from models import assert_same, step, tokens

from ridgeline import hf
from ridgeline.op import op_modules

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "Qwen3Next": {
        "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": LAYERS,
    },
}  # fmt: skip
MASK = torch.tensor([[0] * 4 + [1] * 9, [1] * 13])


def pair(kind: str, **more: Any) -> tuple[Any, Any]:
    """Returns two equal models, with random weights of norms, and small steps that keep the states apart."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind] | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    return model.train(), copy.deepcopy(model)


def computed(report: hf.Report) -> dict[str, str | None]:
    return {r.kind: r.op for r in report.rows if r.part in ("norm", "recurrent")}


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step(kind: str, device: str) -> None:
    own, ours = (m.to(device) for m in pair(kind))
    report = hf.patch(ours)
    ids, mask = tokens(*MASK.shape).to(device), MASK.to(device)
    given = {"input_ids": ids, "labels": ids.masked_fill(mask.cumsum(1) < 2, -100), "attention_mask": mask}
    assert_same(step(own, **given), step(ours, **given), mask == 1, tolerance=1e-4)
    assert not report.fallbacks


def test_what_computes_the_parts() -> None:
    found = computed(hf.patch(pair("Mamba2")[1]))
    assert found["Mamba2Mixer"] == "causal_conv1d, ssd"
    assert found["MambaRMSNormGated"] == "gated_rms_norm"
    found = computed(hf.patch(pair("Qwen3Next")[1]))
    delta = ", gated_delta_rule" if "gated_delta_rule" in op_modules() else ""
    assert found["Qwen3NextGatedDeltaNet"] == f"causal_conv1d{delta}"
    assert found["Qwen3NextRMSNormGated"] == "gated_rms_norm"


@pytest.mark.kernels
@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind: str, device: str) -> None:
    """A cache filled by the prompt, then steps that replace the states in place."""
    own, ours = (m.to(device).eval() for m in pair(kind))
    hf.patch(ours)
    ids = tokens(2, 6).to(device)
    found = []
    for model in (own, ours):
        out, logits = model(ids[:, :3], use_cache=True), []
        cache = getattr(out, "past_key_values", None)
        name = "past_key_values" if cache is not None else "cache_params"
        if cache is None:
            name, cache = next((n, out[n]) for n in ("cache_params", "cache") if n in out)
        for t in range(3, 6):
            with torch.no_grad():
                logits.append(model(ids[:, t : t + 1], use_cache=True, **{name: cache}).logits)
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_limits_of_the_steps() -> None:
    own, ours = pair("Mamba2", time_step_limit=(0.05, 0.2))
    hf.patch(ours)
    ids = tokens(1, 9)
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids), tolerance=1e-4)


def test_packed_sequences_are_the_models_own() -> None:
    """transformers refuses them without mamba_ssm, in a sentence of its own; no replacement hides that."""
    _, ours = pair("Mamba2")
    hf.patch(ours)
    with pytest.raises(ValueError, match="packed sequences"):
        ours.backbone.layers[0].mixer(torch.randn(1, 5, 32), seq_idx=torch.zeros(1, 5, dtype=torch.int32))


def test_unpatch_and_only() -> None:
    own, ours = pair("Mamba2")
    before = [(n, sorted(m.__dict__)) for n, m in ours.named_modules()]
    hf.patch(ours)
    hf.unpatch(ours)
    assert [(n, sorted(m.__dict__)) for n, m in ours.named_modules()] == before
    report = hf.patch(ours, only="recurrent")
    assert {r.part for r in report.patched()} == {"recurrent"}
    ids = tokens(1, 7)
    assert_same(step(own, input_ids=ids, labels=ids), step(ours, input_ids=ids, labels=ids), tolerance=1e-4)


def test_a_changed_form_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mamba2 import modeling_mamba2

    def causal_conv1d_fn(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None) -> Any:
        return x + weight.sum()

    monkeypatch.setattr(modeling_mamba2, "causal_conv1d_fn", causal_conv1d_fn)
    from ridgeline.hf import forms

    found = forms.recurrent(modeling_mamba2.Mamba2Mixer)
    assert found["causal_conv1d_fn"] is None
    assert found["mamba2_chunk_scan"] == "ssd"


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: str) -> None:
    """No form of the replacements breaks a graph that the model's own functions do not break."""
    _, ours = pair(kind)
    hf.patch(ours)
    ids = tokens(1, 5)
    mixer = (ours.backbone.layers[0].mixer if kind == "Mamba2" else ours.model.layers[0].linear_attn).eval()
    x = torch.randn(1, ids.shape[1], 32)
    made = torch.compile(mixer, backend="eager")(x)
    torch.testing.assert_close(made, mixer(x), rtol=1e-4, atol=1e-5)
