"""Which form of a module is which op, with which facts: data, read off the sources of transformers 5.17 to 5.24.

A form is the digest of a normalised source (`syntax.form`). A module whose form is not here is left alone, so a formula
that upstream changes is never computed in its old way. `roles` names what the source reads of `self`, in that order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ridgeline.hf import syntax

ROTARY = "apply_rotary_pos_emb"


class Norm(NamedTuple):
    """weight * x / sqrt(mean x^2 + eps). rounding "llama": x / rms is rounded to x's dtype before the product."""

    roles: tuple[str, ...]
    offset: float = 0.0
    rounding: str = "once"


class GatedNorm(NamedTuple):
    """A norm with a gate: weight * x / rms * act(gate), or with the gate first. The attribute of a role
    "norm_before_gate" decides that instead; "groups" or "group_size" says which columns have a mean square together."""

    roles: tuple[str, ...]
    norm_before_gate: bool = True


class MLP(NamedTuple):
    """down(activation(gate(x)) * up(x)). merged: one product has gate in its first half and up in its second."""

    roles: tuple[str, ...]
    merged: bool = False


class Rotary(NamedTuple):
    """table: how cos and sin hold an angle per pair: "halves" (all, then all again), "pairs" (each twice) or "once"."""

    interleaved: bool = False
    table: str = "halves"


class Experts(NamedTuple):
    """Gated experts. oai: gpt-oss's swiglu, with gate and up in turns and weights (E, inputs, outputs)."""

    roles: tuple[str, ...]
    oai: bool = False


class Router(NamedTuple):
    """topk_gate of a product. wide: the product is in float32. cast: the weights have the logits' dtype."""

    roles: tuple[str, ...]
    score: str = "softmax"
    wide: bool = False
    cast: bool = False


NORMS = {
    "cb0b0907d506": Norm(("eps", "weight"), rounding="llama"),  # Llama
    "f932e0a925a7": Norm(("eps", "weight")),  # OLMo 2, gpt-oss
    "5e9bdf02f231": Norm(("eps", "weight")),  # Helium: the weight in float32
    "3b745395ceef": Norm(("weight", "eps"), offset=1.0),  # Gemma
    "3a495b2d0df3": Norm(("eps",)),  # without a weight: Llama 4's L2 norm
}
GATED_NORMS = {
    "83ca7d3a7786": GatedNorm(("eps", "weight", "activation")),  # Qwen3-Next
    "31495586c3aa": GatedNorm(("eps", "weight", "activation")),  # Kimi Linear: the weight in float32
    "7111906b6507": GatedNorm(("group_size", "eps", "weight"), norm_before_gate=False),  # Mamba-2
    "042275514390": GatedNorm(("norm_before_gate", "groups", "eps", "weight")),  # Falcon-H1
}
# Functions that recurrent layers find in their file, by name and digest, and what computes them.
RECURRENT = {
    ("causal_conv1d_fn", "c3ec9569e879"): "causal_conv1d",
    ("causal_conv1d_update", "a4b6d574317b"): "causal_conv1d",
    ("mamba2_split_conv1d_scan_combined", "b029f8cdf1e5"): "ssd",
    ("mamba2_chunk_scan", "900d8cf1b2a6"): "ssd",
    ("mamba2_selective_state_update", "7341d3877b08"): "ssd",
    ("torch_chunk_gated_delta_rule", "dec74ba2abf0"): "gated_delta_rule",
    ("torch_recurrent_gated_delta_rule", "ef2ee0a63fd1"): "gated_delta_rule",
}
MLPS = {
    "be1d38b5026f": MLP(("down", "activation", "gate", "up")),  # Llama
    "86518074e95e": MLP(("gate_up", "activation", "down"), merged=True),  # Phi3, GLM
    "d1c31854d331": MLP(("gate_up", "activation", "down"), merged=True),  # Granite's shared experts
}
EXPERTS = {
    "a274d90fd7d9": Experts(("experts", "gate_up", "activation", "down")),  # Qwen3-MoE, Mixtral, DeepSeek-V3
    "3fe8343eb047": Experts(  # gpt-oss
        ("experts", "gate_up", "gate_up_bias", "down", "down_bias", "limit", "alpha"), oai=True
    ),
}
ROUTERS = {
    "3838becf6139": Router(("width", "weight", "k", "normalize"), cast=True),  # Qwen3-MoE
    "8198ab6ea819": Router(("width", "weight", "k")),  # Mixtral
    "86e6f6f724c6": Router(  # DeepSeek-V3
        ("width", "weight", "correction", "groups", "experts", "top_groups", "k", "normalize", "scale"),
        score="sigmoid",
        wide=True,
    ),
    "07ad02c73fac": Router(("weight", "bias", "k"), cast=True),  # gpt-oss
}
# Digests of apply_rotary_pos_emb and of the function that it calls.
HALVES, INTERLEAVED, COHERE = "3d488c0cec66", "6f3523dffdca", "7f8ef8d4ac78"
ROTARIES = {
    ("be80094eafa5", HALVES): Rotary(),  # Llama
    ("7eaf8d324cc4", HALVES): Rotary(),  # GPT-NeoX, GLM-4 MoE: part of a head
    ("33e92bf9aa90", HALVES): Rotary(),  # Nemotron: part of a head
    ("24f8d9a2e4fe", HALVES): Rotary(),  # Phi3: part of a head
    ("05991b40438a", HALVES): Rotary(),  # OLMo 2: float32 tables, cast back
    ("092e097bf36a", INTERLEAVED): Rotary(interleaved=True),  # GLM-4: part of a head
    ("b7a7d38556e0", INTERLEAVED): Rotary(interleaved=True),  # ERNIE 4.5: float32 inside, cast back
    ("9fb401b5b413", INTERLEAVED): Rotary(interleaved=True),  # Helium
    ("613cf3a05c96", COHERE): Rotary(interleaved=True, table="pairs"),  # Cohere: float32 inside, cast back
    ("be80094eafa5", COHERE): Rotary(interleaved=True, table="pairs"),  # BLT
    ("53e758234267", "6e04c918052c"): Rotary(table="once"),  # gpt-oss
}
# Digests of the forwards of rotary embeddings, which make the tables. 5.17 computes the angles as a product.
TABLES = {
    "9b4b109d2bb0": "halves",  # Llama
    "b23fab0dc26c": "halves",  # Llama in 5.17
    "a6a2ce7e4b08": "halves",  # Gemma 2 in 5.17
    "2fe7d66f02f9": "halves",  # Gemma 3 in 5.17
    "c9e94d789cb2": "halves",  # OLMo 2 in 5.17
    "2f56b4dd687c": "pairs",  # Cohere in 5.17
    "60158c1fa509": "once",  # gpt-oss in 5.17
    "5f98d5fbbfa0": "halves",  # Gemma 3: a theta per type of layer
    "03330b719d31": "halves",  # OLMo 2
    "341ac6ed4f41": "halves",  # OLMo 3
    "a2677416331e": "pairs",  # Cohere
    "ecf0db5b7af5": "once",  # gpt-oss
}
# Digests of the block in which a forward makes the position_ids that it was not given: they rise by one.
POSITIONS = {
    "e937a47477bb",  # Llama and nearly all
    "c70a9304dd13",  # Bamba
}
LOSSES = {"1ae595492bcf 53e5856f21cf"}  # ForCausalLMLoss and fixed_cross_entropy
HELPERS = ("rotate_half", "_apply_rotary_emb", "fixed_cross_entropy")


def of_function(function: Callable[..., Any]) -> tuple[str, str]:
    """Returns the digests of a function and of the helper that it calls, "" where there is none."""
    found, plain = syntax.form(function), inspect.unwrap(function)
    names = [n for n in HELPERS if n in getattr(getattr(plain, "__code__", None), "co_names", ())]
    helper = syntax.form(plain.__globals__[names[0]]) if names else None
    return found.digest if found else "", helper.digest if helper else ""


def calls_rotary(attention: type) -> bool:
    """Whether an attention class calls the rotary function of its file."""
    code = getattr(inspect.unwrap(attention.forward), "__code__", None)  # type: ignore[attr-defined]
    return code is not None and ROTARY in code.co_names


def recurrent(layer: type) -> dict[str, str | None]:
    """Returns the functions of `RECURRENT` that a layer's forward calls, with the op of each; None for a new form."""
    forward = inspect.unwrap(layer.forward)  # type: ignore[attr-defined]
    code, found = getattr(forward, "__code__", None), {}
    for name in dict.fromkeys(n for n, _ in RECURRENT):
        if code is not None and name in code.co_names and callable(forward.__globals__.get(name)):
            own = syntax.form(forward.__globals__[name])
            found[name] = RECURRENT.get((name, own.digest)) if own else None
    return found


def rotary(attention: type) -> Rotary | None:
    """Returns the facts of the rotary function that an attention class calls, or None if its form is unknown."""
    function = inspect.unwrap(attention.forward).__globals__.get(ROTARY)  # type: ignore[attr-defined]
    return ROTARIES.get(of_function(function)) if callable(function) else None


def known_loss(function: Callable[..., Any]) -> bool:
    """Whether a loss function is a form of transformers' loss of causal language models."""
    return " ".join(of_function(function)) in LOSSES


def named(roles: tuple[str, ...], attributes: tuple[str, ...]) -> dict[str, str]:
    """Returns a module's attribute for each role."""
    return dict(zip(roles, attributes, strict=True))
