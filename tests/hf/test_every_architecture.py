"""Every causal language model of transformers that a small configuration builds, patched against unpatched."""

import copy
import warnings
from typing import Any

import pytest
import torch
from models import SMALL, step, tokens
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ridgeline import hf

MASK = torch.tensor([[0] * 4 + [1] * 9, [1] * 13])
PARTS = 6
LARGE = 3e7  # parameters; a larger model does not heed the small sizes
SLOW = {"falcon_h1"}  # its own scan takes minutes in transformers 5.17
COMPARED = 14  # at least, of each part


def build(name: str, given: dict[str, torch.Tensor]) -> Any:
    """Returns a small model that does a training step, or None: many need more than sizes, or other inputs."""
    torch.manual_seed(0)
    try:
        config = CONFIG_MAPPING[name](**SMALL)
        with torch.device("meta"):
            size = sum([p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()])
        if size > LARGE:
            return None
        model = AutoModelForCausalLM.from_config(config).eval()
        step(model, **given)
        return model
    except Exception:
        return None


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_same_as_unpatched(part: int) -> None:
    ids = tokens(*MASK.shape)
    given = {"input_ids": ids, "labels": ids.masked_fill(MASK.cumsum(1) < 2, -100), "attention_mask": MASK}
    compared, wrong = 0, []
    for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - SLOW)[part::PARTS]:
        own = build(name, given)
        if own is None:
            continue
        ours = copy.deepcopy(own)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf.patch(ours)
            (logits, loss, grads), (made, found, others) = step(own, **given), step(ours, **given)
        near = {"logits": (made - logits)[MASK == 1].abs().max() < 1e-4, "loss": abs(found - loss) < 1e-4}
        near["names"] = grads.keys() == others.keys()
        for key, grad in grads.items():
            near[key] = (others[key] - grad).abs().max() <= 1e-2 * max(1e-3, grad.abs().max())
        compared += 1
        wrong += [f"{name}: {key}" for key, good in near.items() if not good]
    assert not wrong
    assert compared >= COMPARED
