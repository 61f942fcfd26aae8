"""Tensor and sequence parallelism of transformers' models, plain and patched, against one process."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ridgeline import hf
from ridgeline.op import RidgelineError
from ridgeline.parallel import groups, models, tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import run_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 50,
}  # fmt: skip


def trained(net: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = net(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def split(rank: int, nets: list[Any], tokens: torch.Tensor, sequence: bool, patched: str, experts: bool = False) -> Any:
    net = nets[groups.rank()]
    if patched == "before":
        hf.patch(net)
    made = models.parallelize(net, sequence=sequence, experts=experts)
    if patched == "after":
        hf.patch(net)
    loss, grads = trained(net, tokens)
    return loss, {n: tensor.gathered(g, None, made.splits[n]) if n in made.splits else g for n, g in grads.items()}


@pytest.mark.parametrize("patched", ["never", "before", "after"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
def test_equals_one_process(family: str, sequence: bool, patched: str) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES)
    config._attn_implementation = "sdpa"
    net = getattr(transformers, f"{family}ForCausalLM")(config)
    tokens = torch.randint(50, (2, 8))
    loss, grads = trained(copy.deepcopy(net), tokens)
    nets = [copy.deepcopy(net) for _ in range(4)]
    for found, theirs in run_ranks(4, split, nets, tokens, sequence, patched):
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
        assert theirs.keys() == grads.keys()
        for n, g in grads.items():
            torch.testing.assert_close(theirs[n], g, rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")


MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize(
    ("family", "sequence"), [(f, s) for f in MIXTURES for s in (False, True) if (f, s) != ("GptOss", True)]
)
def test_spread_experts_equal_one_process(family: str, sequence: bool) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES | MIXTURES[family])
    config._attn_implementation = "eager" if family == "GptOss" else "sdpa"
    net = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(0, 0.2)
    tokens = torch.randint(50, (2, 8))
    loss, grads = trained(copy.deepcopy(net), tokens)
    nets = [copy.deepcopy(net) for _ in range(2)]
    for own in nets:
        hf.patch(own)
    for found, theirs in run_ranks(2, split, nets, tokens, sequence, "already", True):
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
        assert theirs.keys() == grads.keys()
        for n, g in grads.items():
            torch.testing.assert_close(theirs[n], g, rtol=1e-3, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


def test_attention_that_no_plan_splits_is_refused() -> None:
    config = transformers.GptOssConfig(**SIZES | MIXTURES["GptOss"])
    net = transformers.GptOssForCausalLM(config)
    with pytest.raises(RidgelineError, match="experts=True needs nn.MoE, or experts that hf.patch has patched"):
        models.parallelize(net, experts=True)
    hf.patch(net)
    with pytest.raises(
        RidgelineError, match=r"sequence=True needs a plan that splits the GptOssAttention model\.layers\.0\.self_attn"
    ):
        models.parallelize(net, sequence=True, experts=True)
