"""Forwards that replace those of experts and their routers, and an entry in transformers' table of experts.

`patch` sets them on instances, as `modules` has it. `register` adds "ridgeline" to the table, so that a model may also
be told `set_experts_implementation("ridgeline")`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ridgeline
from ridgeline.hf.report import fall_back

NAME = "ridgeline"


def experts(
    module: nn.Module, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *,
    names: dict[str, str], unit: dict[str, Any], transposed: bool,
) -> torch.Tensor:  # fmt: skip
    """The weighted sum of each token's experts by `ridgeline.moe`. names: the module's attribute for each role."""
    if getattr(module, "_is_expert_parallel", False):
        fall_back(module, "experts", "its experts are spread over ranks")
        return type(module).forward(module, hidden_states, indices, weights)
    given: Any = {role: getattr(module, name) for role, name in names.items()}
    gate_up, down = given["gate_up"], given["down"]
    biases = {role: given[role] for role in ("gate_up_bias", "down_bias") if role in given}
    limit = float(given["limit"]) if given.get("limit") else None
    gate_up, down = (gate_up.mT, down.mT) if transposed else (gate_up, down)
    # Over several ranks, `parallel.models` puts another function there.
    moe: Any = getattr(module, "spread_moe", None) or ridgeline.moe
    return moe(hidden_states, weights, indices, gate_up, down, **biases, limit=limit, **unit)


def router(
    module: nn.Module, hidden_states: torch.Tensor, *, names: dict[str, str], score: str, wide: bool, cast: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, weights and indices of a router, by `ridgeline.topk_gate`.

    wide: the product is in float32. cast: the weights have the logits' dtype.
    """
    given: Any = {role: getattr(module, name) for role, name in names.items()}
    x, weight, bias = hidden_states.reshape(-1, hidden_states.shape[-1]), given["weight"], given.get("bias")
    logits = F.linear(x.float(), weight.float(), bias) if wide else F.linear(x, weight, bias)
    options: dict[str, Any] = {"groups": given.get("groups") or 1, "top_groups": given.get("top_groups") or 1}
    options |= {"normalize": bool(given.get("normalize", True)), "scale": float(given.get("scale", 1.0))}
    weights, indices, _ = ridgeline.topk_gate(
        logits, given["k"], score=score, bias=given.get("correction"), **options
    )  # fmt: skip
    return logits, weights.to(logits.dtype) if cast else weights, indices


def fault(module: Any, names: dict[str, str], activation: str | None, oai: bool) -> str | None:
    """Returns why experts of a known form are left alone, or None."""
    if not oai and activation != "silu":
        return f"their activation is {activation or 'not known'}, and moe has silu"
    if oai and getattr(module, names["alpha"]) != 1.702:
        return f"their swiglu has alpha {getattr(module, names['alpha'])}, and moe has 1.702"
    return None


def _by_interface(module: Any, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> Any:
    """An entry of transformers' table: experts of a known form by `ridgeline.moe`; it raises for others."""
    from ridgeline.hf import patching

    return experts(module, hidden_states, indices, weights, **patching.expert_facts(module))


def register() -> None:
    """Puts "ridgeline" into transformers' table of experts."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _by_interface)
