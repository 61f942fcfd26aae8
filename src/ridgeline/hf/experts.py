"""Forwards that replace those of experts and their routers, and an entry in transformers' table of experts.

`patch` sets them on instances, as `modules` has it. `register` adds "ridgeline" to the table, so that a model may also
be told `set_experts_implementation("ridgeline")`. With `patch(quantize=)` a module `FewBitExperts` takes their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ridgeline
from ridgeline.few_bits import GROUPS
from ridgeline.hf.report import fall_back
from ridgeline.nn import QuantizedMoE

NAME = "ridgeline"
CODES = ("int8", "int4", "mxfp4")  # what `moe` takes


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


class FewBitExperts(nn.Module):
    """A model's experts in few bits, by `ridgeline.moe` with scales, for inference. Its routers stay the model's.

    Buffers: gate_up_proj and down_proj hold codes (E, 2 I, H) and (E, H, I) of `kind`, gate_up_scale and down_scale
    scales, gate_up_zero and down_zero int4's zeros or None, as in `nn.QuantizedMoE`; gate_up_bias and down_bias too.
    unit: the activation and limit that `moe` takes."""

    def __init__(self, kind: str, unit: dict[str, Any], **tensors: torch.Tensor | None):
        super().__init__()
        self.kind, self.unit = kind, unit
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def of(
        cls, module: nn.Module, kind: str, *, names: dict[str, str], unit: dict[str, Any], transposed: bool
    ) -> FewBitExperts:  # fmt: skip
        """Quantises a module's experts. `experts` says what the other arguments are; `refusal`, what is left."""
        given: Any = {role: getattr(module, name) for role, name in names.items()}
        made: dict[str, torch.Tensor | None] = {}
        for role in ("gate_up", "down"):
            weight = (given[role].mT if transposed else given[role]).detach()
            coded = QuantizedMoE.codes(weight, kind, QuantizedMoE.group_of(kind, None, weight.shape[2]))
            bias = given.get(f"{role}_bias")
            made |= cls._held(role, *coded, None if bias is None else bias.detach())
        return cls(kind, cls._limited(unit, given), **made).train(module.training)

    @classmethod
    def stored(
        cls, module: nn.Module, take: Callable[[str, torch.dtype | None, tuple[int, ...]], torch.Tensor], *,
        names: dict[str, str], unit: dict[str, Any], transposed: bool
    ) -> FewBitExperts:  # fmt: skip
        """Takes a module's experts in mxfp4 as gpt-oss's files have them: 32 numbers' codes in 16 bytes of X_blocks
        (E, N, K / 32, 16), the even number low, and the codes of scales in X_scales (E, N, K / 32).

        take: returns the tensor of a name in the module; of that dtype, None: of any floating one, and of that shape.
        """
        given: Any = {role: getattr(module, name) for role, name in names.items()}
        made: dict[str, torch.Tensor | None] = {}
        for role in ("gate_up", "down"):
            E, N, K = (given[role].mT if transposed else given[role]).shape
            codes = take(f"{names[role]}_blocks", torch.uint8, (E, N, K // 32, 16))
            scale = take(f"{names[role]}_scales", torch.uint8, (E, N, K // 32))
            bias = take(names[f"{role}_bias"], None, (E, N)) if f"{role}_bias" in given else None
            made |= cls._held(role, codes.flatten(2), scale, None, bias)
        return cls("mxfp4", cls._limited(unit, given), **made)

    @staticmethod
    def _held(role: str, *tensors: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        return {f"{role}_{part}": t for part, t in zip(("proj", "scale", "zero", "bias"), tensors, strict=True)}

    @staticmethod
    def _limited(unit: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        return unit | {"limit": float(given["limit"]) if given.get("limit") else None}

    def forward(self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        held: Any = self
        zeros = None if held.gate_up_zero is None else (held.gate_up_zero, held.down_zero)
        given = {"scales": (held.gate_up_scale, held.down_scale), "zeros": zeros, **self.unit}
        given |= {"gate_up_bias": held.gate_up_bias, "down_bias": held.down_bias}
        return ridgeline.moe(hidden_states, weights, indices, held.gate_up_proj, held.down_proj, **given)

    def numel(self) -> int:
        """The number of the experts' weights."""
        held: Any = self
        return (held.gate_up_proj.numel() + held.down_proj.numel()) * (1 if self.kind == "int8" else 2)

    def extra_repr(self) -> str:
        E, width, _ = self.get_buffer("gate_up_proj").shape
        hidden = self.get_buffer("down_proj").shape[1]
        return f"experts={E}, hidden={hidden}, intermediate={width // 2}, kind={self.kind!r}"


def refusal(module: nn.Module, kind: str, *, names: dict[str, str], transposed: bool, **_: Any) -> str | None:
    """Returns why experts of a known form cannot be quantised so, or None."""
    if getattr(module, "_is_expert_parallel", False) or getattr(module, "spread_moe", None):
        return "its experts are spread over ranks"
    if kind not in CODES:
        return f"moe has no experts of {kind}"
    for role in ("gate_up", "down"):
        weight: Any = getattr(module, names[role])
        columns = weight.shape[1 if transposed else 2]
        sizes = (2,) if kind == "int8" else (32,) if kind == "mxfp4" else GROUPS
        if not any(columns % g == 0 for g in sizes):
            return f"no group of {', '.join(map(str, sizes))} divides {columns} columns"
    return None


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
