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


def split(rank: int, nets: list[Any], tokens: torch.Tensor, sequence: bool, patched: str) -> Any:
    net = nets[groups.rank()]
    if patched == "before":
        hf.patch(net)
    made = models.parallelize(net, sequence=sequence)
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
