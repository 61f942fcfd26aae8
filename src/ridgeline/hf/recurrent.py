"""Layers of linear attention and state spaces keep their forwards, which find our functions in place of their file's.

Each replacement takes what transformers' function takes, after that function itself, which gets the calls that ours
does not compute: packed sequences, other activations, a number per column where Mamba-2 has one per head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline.hf import forms, modules
from ridgeline.op import get, op_modules

Maybe = torch.Tensor | None
ACTIVATIONS: dict[Any, str | None] = {"silu": "silu", "swish": "silu", None: None}


def _packed(named: dict[str, Any]) -> bool:
    return any(named.get(n) is not None for n in ("cu_seqlens", "seq_idx"))


def _learns(*tensors: Maybe) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """(B, C, T) as (B, T, C) with contiguous channels."""
    x = x.transpose(1, 2)
    return x if x.stride(2) == 1 else x.contiguous()


def causal_conv1d(
    own: Callable[..., Any], hidden_states: torch.Tensor, weight: torch.Tensor, bias: Maybe = None,
    activation: str | None = None, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """transformers' causal_conv1d_fn. hidden_states: (B, C, T)."""
    if _packed(named) or activation not in ACTIVATIONS:
        return own(hidden_states, weight, bias, activation, **named)
    x = _channels_last(hidden_states)
    y: Any = ridgeline.causal_conv1d(x, weight, bias, activation=ACTIVATIONS[activation])
    return y.transpose(1, 2)


def causal_conv1d_update(
    own: Callable[..., Any], hidden_states: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor,
    bias: Maybe = None, activation: str | None = None, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """transformers' causal_conv1d_update: conv_state (B, C, width) is replaced in place."""
    fits = conv_state.shape[1:] == weight.shape and conv_state.dtype == hidden_states.dtype
    if not fits or activation not in ACTIVATIONS:
        return own(hidden_states, conv_state, weight, bias, activation, **named)
    x = _channels_last(hidden_states)
    options: dict[str, Any] = {"activation": ACTIVATIONS[activation], "initial_state": conv_state}
    y: Any
    if conv_state.is_contiguous() and not _learns(hidden_states, weight, bias, conv_state):
        y = ridgeline.causal_conv1d(x, weight, bias, inplace=True, **options)
        return y.transpose(1, 2)
    y, state = ridgeline.causal_conv1d(x, weight, bias, return_state=True, **options)
    conv_state.copy_(state.detach())
    return y.transpose(1, 2)


def no_fused_layer(own: Callable[..., Any], *_: Any, **__: Any) -> None:
    """In place of mamba_ssm's whole layer: None sends the forward through its parts, which are ours."""


def ssd(
    own: Callable[..., Any], hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, chunk_size: int, D: Maybe = None, dt_bias: Maybe = None, initial_states: Maybe = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    z: Maybe = None, **named: Any,
) -> Any:  # fmt: skip
    """transformers' mamba2_chunk_scan. States are (B, H, P, N), ours transposed."""
    if _packed(named) or max(hidden_states.shape[3], B.shape[3]) > 256:
        given: dict[str, Any] = {
            "dt_bias": dt_bias,
            "initial_states": initial_states,
            "dt_softplus": dt_softplus,
            "z": z,
            "D": D,
        }
        given |= {"dt_limit": dt_limit, "return_final_states": return_final_states}
        return own(hidden_states, dt, A, B, C, chunk_size, **given, **named)
    if tuple(dt_limit) != (0.0, float("inf")):
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = (nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        dt_bias, dt_softplus = None, False
    state = None if initial_states is None else initial_states.float().transpose(2, 3)
    options: dict[str, Any] = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    found: Any = ridgeline.ssd(
        hidden_states, dt, A, B, C, initial_state=state, return_state=return_final_states, **options
    )
    return (found[0], found[1].transpose(2, 3)) if return_final_states else found


def ssd_update(
    own: Callable[..., Any], state: torch.Tensor, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,
    B: torch.Tensor, C: torch.Tensor, D: Maybe = None, dt_bias: Maybe = None, dt_softplus: bool = False,
    z: Maybe = None, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """transformers' mamba2_selective_state_update: a token (B, H, P); dt, A, D and dt_bias hold a head's number again
    for each column. The state (B, H, P, N) is replaced in place."""
    heads = dt, A.transpose(1, 2), A, D, dt_bias
    once = all(t is None or t.stride(-1) == 0 or t.shape[-1] == 1 for t in heads)
    if not once or max(state.shape[2:]) > 256:
        return own(state, hidden_states, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **named)
    options: dict[str, Any] = {"D": None if D is None else D[:, 0], "z": None if z is None else z.unsqueeze(1)}
    options |= {"dt_bias": None if dt_bias is None else dt_bias[:, 0], "dt_softplus": dt_softplus}
    args = hidden_states.unsqueeze(1), dt[..., 0].unsqueeze(1), A[:, 0, 0], B.unsqueeze(1), C.unsqueeze(1)
    plain = state.dtype == torch.float32 and state.is_contiguous()
    if plain and not _learns(*args, state, *(t for t in options.values() if isinstance(t, torch.Tensor))):
        y: Any = ridgeline.ssd(*args, initial_state=state.transpose(2, 3), inplace=True, **options)
        return y.squeeze(1)
    y, last = ridgeline.ssd(*args, initial_state=state.float().transpose(2, 3), return_state=True, **options)
    state.copy_(last.detach().transpose(2, 3))
    return y.squeeze(1)


def gated_delta_rule(
    own: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, initial_state: Maybe = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **named: Any,
) -> tuple[torch.Tensor, Maybe]:  # fmt: skip
    """transformers' torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule."""
    if max(query.shape[3], value.shape[3]) > 256:
        given: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "initial_state": initial_state}
        return own(query, key, value, g, beta, output_final_state=output_final_state, **given, **named)
    ends = named.get("cu_seqlens")
    options: dict[str, Any] = {"normalize": use_qk_l2norm_in_kernel, "return_state": output_final_state}
    options["initial_state"] = None if initial_state is None else initial_state.float()
    options["cu_seqlens"] = None if ends is None else ends.to(torch.int32)
    found = get("gated_delta_rule").function(query, key, value, g, beta, **options)
    return found if output_final_state else (found, None)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
    "mamba2_split_conv1d_scan_combined": no_fused_layer,
    "mamba2_chunk_scan": ssd,
    "mamba2_selective_state_update": ssd_update,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
}
_FORWARDS: dict[type, Callable[..., Any]] = {}


def served(kind: type) -> dict[str, str | None]:
    """Returns the functions that a layer's forward calls, and the op that computes each, or None."""
    there = op_modules()
    return {name: op if op in there else None for name, op in forms.recurrent(kind).items()}


def prepare(kind: type) -> Callable[..., Any]:
    """Returns the forward of a class of layers with our functions; made once a class."""
    if kind not in _FORWARDS:
        names = inspect.unwrap(kind.forward).__globals__  # type: ignore[attr-defined]
        mine: dict[str, Callable[..., Any]] = {
            n: partial(REPLACEMENTS[n], names[n]) for n, op in served(kind).items() if op
        }
        _FORWARDS[kind] = modules.rebound(kind.forward, mine)  # type: ignore[attr-defined]
    return _FORWARDS[kind]


def layer(module: nn.Module, *given: Any, **named: Any) -> Any:
    """A layer's own forward, which finds our functions under their names."""
    return prepare(type(module))(module, *given, **named)
