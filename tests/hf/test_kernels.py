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


def _distance(grads: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the error of all gradients over that of the gradients."""
    error = sum([float((grads[n].double() - g.double()).square().sum()) for n, g in oracle.items()])
    return (error / sum([float(g.double().square().sum()) for g in oracle.values()])) ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("memory", [None, "recompute"])
def test_bfloat16_errs_no_more_than_the_models_own(name: str, memory: str | None) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
    own, ours = pair(name, **sizes)
    ids = torch.randint(3, 1000, (2, 100), device="cuda")
    own, ours = own.to("cuda", torch.bfloat16), ours.to("cuda", torch.bfloat16)
    oracle = step(copy.deepcopy(own).float(), input_ids=ids, labels=ids)
    torch_step = step(own, input_ids=ids, labels=ids)
    report = hf.patch(ours, memory=memory)
    found = step(ours, input_ids=ids, labels=ids)
    assert found[1].dtype == torch.float32
    assert not report.fallbacks
    assert _distance(found[2], oracle[2]) <= 1.5 * _distance(torch_step[2], oracle[2])
    assert abs(found[1] - oracle[1]) <= 2 * abs(torch_step[1] - oracle[1]) + 1e-3
