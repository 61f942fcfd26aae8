"""Linear attention over a split sequence: each rank's state goes to the ranks after it in one all-gather.

    S_r = sum over the rank's tokens t of exp(G_T - G_t) k_t v_t^T,  G = cumsum(g);   A_r = exp(G_T)
    state before rank r = sum over ranks j < r of A_{j+1} ... A_{r-1} S_j

The states of all ranks are as large as they are few, so every rank gathers them and sums those before it: no rank waits
for the one before. Then the op runs once, from that state.
Source: Sun et al., LASP-2: Rethinking Sequence Parallelism for Linear Attention, 2025 (arXiv:2502.07563).
"""

from __future__ import annotations

from typing import Any

import torch

import ridgeline
from ridgeline.parallel import groups
from ridgeline.parallel.agreement import agree
from ridgeline.parallel.sequence import Gather


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, scale: float | None = None,
    impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `ridgeline.linear_attention` of a sequence split in layout "plain", for this rank's tokens.

    q, k: (B, T / ranks, H, K); v: (B, T / ranks, HV, V). Gradients flow to q, k and v. group: None means all ranks.
    Raises RidgelineError, on every rank, if the arguments do not match.
    """
    before = _state_before("linear_attention", k, v, None, group)
    o: Any = ridgeline.linear_attention(q, k, v, initial_state=before, scale=scale, impl=impl)
    return o


def gated_linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *, group: Any = None,
    scale: float | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `ridgeline.gated_linear_attention` of a sequence split in layout "plain", for this rank's tokens.

    q, k: (B, T / ranks, H, K); v: (B, T / ranks, HV, V); g: (B, T / ranks, H) or (B, T / ranks, H, K). Gradients flow
    to all. group: None means all ranks. Raises RidgelineError, on every rank, if the arguments do not match.
    """
    before = _state_before("gated_linear_attention", k, v, g, group)
    o: Any = ridgeline.gated_linear_attention(q, k, v, g, initial_state=before, scale=scale, impl=impl)
    return o


def _state_before(name: str, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, group: Any) -> torch.Tensor:
    """Returns the state (B, HV, K, V) that the ranks before leave, in float32."""
    gates = None if g is None else tuple(g.shape)
    alike = {"shape of k": tuple(k.shape), "shape of v": tuple(v.shape), "shape of g": gates, "dtype": str(k.dtype)}
    agree(name, group, k, _fault(k, v, g), **alike)
    rank = groups.rank(group)
    shared = v.shape[2] // k.shape[2]
    keys = k.to(torch.promote_types(k.dtype, torch.float32))
    decay = keys.new_zeros((k.shape[0], k.shape[2], 1))  # its logarithm, over all tokens of the rank
    if g is not None:
        passed = g.to(keys.dtype).cumsum(1)
        passed = passed[..., None] if g.dim() == 3 else passed
        decay = passed[:, -1]
        keys = keys * (decay[:, None] - passed).exp()
    state = torch.einsum("bthk,bthjv->bhjkv", keys, v.to(keys.dtype).unflatten(2, (-1, shared)))
    sent = torch.cat([state.flatten(1), decay.flatten(1)], 1)
    found = Gather.apply(sent, group)
    before = (found * 0.0)[0, :, : state[0].numel()].view(state.shape)  # so that rank 0 takes part in backward
    for other in range(rank):
        theirs = found[other, :, : state[0].numel()].view(state.shape)
        lost = found[other, :, state[0].numel() :].view(decay.shape).exp()[:, :, None, :, None]
        before = before * lost + theirs
    return before.flatten(1, 2)


def _fault(k: Any, v: Any, g: Any) -> str | None:
    """Returns what is wrong with the tensors, as far as the states need them, or None."""
    given = {"k": k, "v": v} | ({} if g is None else {"g": g})
    for name, t in given.items():
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return f"{name} must be a floating-point tensor, got {getattr(t, 'dtype', type(t).__name__)}"
    if k.dim() != 4 or v.dim() != 4 or k.shape[:2] != v.shape[:2] or not k.shape[2] or v.shape[2] % k.shape[2]:
        return (
            "k must be (batch, tokens, heads, K) and v (batch, tokens, a multiple of these heads, V), "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if g is not None and g.shape not in (k.shape, k.shape[:3]):
        return f"g must be (batch, tokens, heads) or k's shape, got {tuple(g.shape)} beside {tuple(k.shape)}"
    return None if k.shape[1] else "each rank needs at least one token, got 0"
