"""Experts and routers of transformers by `ridgeline.moe` and `ridgeline.topk_gate`, against the models' own code."""

from typing import Any

import pytest
import torch
from models import assert_same, pair, step, tokens

from ridgeline import hf
from ridgeline.hf import experts
from ridgeline.op import RidgelineError

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
ROUTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3Moe", "TopKRouter", {"num_experts": 16, "num_experts_per_tok": 3}),
    "Qwen3-MoE, normalised": (
        "Qwen3Moe",
        "TopKRouter",
        {"num_experts": 16, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "Mixtral": ("Mixtral", "TopKRouter", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", "TopKRouter", {"num_local_experts": 12, "num_experts_per_tok": 4}),
    "DeepSeek-V3": (
        "DeepseekV3",
        "TopkRouter",
        {"n_routed_experts": 32, "num_experts_per_tok": 5, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 2.5},
    ),
}


def modeling(name: str) -> Any:
    from importlib import import_module

    import transformers

    config = getattr(transformers, f"{name}Config")
    return import_module(config.__module__.replace("configuration", "modeling")), config


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers(name: str, dtype: torch.dtype) -> None:
    from ridgeline.hf import forms, syntax

    prefix, suffix, sizes = ROUTERS[name]
    module, config = modeling(prefix)
    router = getattr(module, prefix + suffix)(config(**SMALL | sizes)).to(dtype)
    with torch.no_grad():
        for p in [*router.parameters(), *router.buffers()]:
            p.copy_(torch.randn(p.shape) / (4 if p.dim() > 1 else 8))
    form = syntax.class_form(type(router))
    assert form is not None
    facts = forms.ROUTERS[form.digest]
    x = torch.randn(300, 32, dtype=dtype)
    given = {"names": forms.named(facts.roles, form.attributes), "score": facts.score}
    found = experts.router(router, x, **given, wide=facts.wide, cast=facts.cast)
    own = router(x)
    assert torch.equal(found[0], own[0])
    assert found[1].dtype == own[1].dtype
    if dtype == torch.bfloat16 and not facts.wide:  # torch.topk takes any of equal logits
        best = own[0].topk(own[2].shape[1] + 1).values
        clear = best[:, -1] != best[:, -2]
        assert clear.float().mean() > 0.8
        found, own = ([t[clear] for t in some] for some in (found, own))
    order, other = (t[2].sort(-1) for t in (found, own))  # DeepSeek's own order is not defined
    assert torch.equal(order.values, other.values)
    torch.testing.assert_close(found[1].gather(1, order.indices), own[1].gather(1, other.indices))


def deepseek() -> tuple[Any, Any]:
    import copy

    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "n_shared_experts": 1}
    sizes |= {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, first_k_dense_replace=1, pad_token_id=0)).train()
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
                p.copy_(torch.randn(p.shape) / 4)
    return model, copy.deepcopy(model)


def test_deepseek_v3() -> None:
    own, ours = deepseek()
    report = hf.patch(ours, only="experts")
    assert sorted(r.op for r in report.patched() if r.op) == ["moe", "topk_gate"]
    ids = tokens()
    given = {"input_ids": ids, "labels": ids}
    assert_same(step(own, **given), step(ours, **given))
    hf.unpatch(ours)
    one, other = step(own, **given), step(ours, **given)
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "Mixtral"])
def test_by_the_table_of_experts(name: str) -> None:
    own, ours = pair(name)
    experts.register()
    try:
        ours.set_experts_implementation(experts.NAME)
    except (KeyError, ValueError) as error:  # this version takes none but its own
        pytest.skip(str(error))
    ids = tokens()
    given = {"input_ids": ids, "labels": ids}
    assert_same(step(own, **given), step(ours, **given))


def test_reasons() -> None:
    _, ours = pair("Qwen3Moe", hidden_act="gelu")
    left = [r.reason for r in hf.explain(ours).left() if r.part == "experts"]
    assert left == ["their activation is gelu, and moe has silu"] * 2
    with pytest.raises(RidgelineError, match="activation is gelu"):
        hf.patch(ours, only="experts", strict=True)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_on_kernels(name: str, device: str) -> None:
    own, ours = (m.to(device) for m in pair(name))
    hf.patch(ours, only="experts")
    ids = tokens(1, 9).to(device)
    given = {"input_ids": ids, "labels": ids}
    assert_same(step(own, **given), step(ours, **given), tolerance=1e-4)
