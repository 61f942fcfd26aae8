"""Tiny models with random weights, one of each architecture, and comparisons of a patched one with an unpatched one."""

import copy
from typing import Any

import torch

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOWS},
    "Qwen3": {},
    "Gemma2": {"query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, **WINDOWS},
    "Gemma3Text": WINDOWS,
    "Phi3": {"partial_rotary_factor": 0.5},
    "Olmo2": {},
    "Glm4": {"partial_rotary_factor": 0.5},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "Granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "Cohere": {"logit_scale": 0.5},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
}


def build(name: str, seed: int = 0, **more: Any) -> Any:
    """Returns a causal language model of an architecture, in training mode, with random norms' weights too."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SMALL | OPTIONS.get(name, {}) | more)
    model = getattr(transformers, name.removesuffix("Text") + "ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    return model.train()


def pair(name: str, **more: Any) -> tuple[Any, Any]:
    model = build(name, **more)
    return model, copy.deepcopy(model)


def tokens(batch: int = 2, length: int = 21) -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (batch, length))


def step(model: Any, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns logits, loss and gradients of a training step."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    grads = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out.logits, out.loss, grads


def assert_same(own: Any, ours: Any, live: torch.Tensor | None = None, tolerance: float = 2e-5) -> None:
    """Holds logits (where `live`), loss and every gradient of two steps against each other."""
    (logits, loss, grads), (other, their, found) = own, ours
    live = torch.ones(logits.shape[:2], dtype=torch.bool) if live is None else live
    torch.testing.assert_close(other[live], logits[live], rtol=tolerance, atol=tolerance)
    assert their.dtype == torch.float32
    torch.testing.assert_close(their, loss, rtol=tolerance, atol=tolerance)
    assert grads.keys() == found.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(
            found[name],
            grad,
            rtol=tolerance,
            atol=tolerance * max(1, float(grad.abs().max())),
            msg=lambda m, n=name: f"{n}: {m}",
        )
