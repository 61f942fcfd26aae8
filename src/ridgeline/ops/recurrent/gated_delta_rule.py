"""gated_delta_rule: a decaying state that each key corrects towards its value.

    S' = diag(e^{g_t}) S_{t-1}        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T        o_t = scale S_t^T q_t

g is a number per head (Gated DeltaNet) or per channel of k (Kimi Delta Attention).
Chunks are solved as triangular systems; `triton/delta.py` has the equations.
Sources: Yang, Kautz and Hatamizadeh, Gated delta networks, 2024 (arXiv:2412.06464); Kimi Team, Kimi Linear, 2025
(arXiv:2510.26692).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Op, RidgelineError, Spec
from ridgeline.ops.recurrent.common.arguments import Decay, check
from ridgeline.ops.recurrent.common.calls import Found, Given, engine
from ridgeline.ops.recurrent.common.delta_calls import (
    DELTA_IDEA,
    DELTA_KERNEL,
    Delta,
    delta_cost,
    delta_flops,
    delta_found,
    delta_recurrence,
    delta_served,
)
from ridgeline.select import by_kind

Maybe = torch.Tensor | None
through = engine("gated_delta_rule", ("g", "beta", "a", "b"), ("g", "a", "b"), "bool normalize, ")


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, normalize: bool = False,
    initial_state: Maybe = None, return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False,
    scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return delta_recurrence(Delta(q, k, v, g, beta, normalize=normalize), given, factor)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *, normalize: bool = False,
    initial_state: torch.Tensor | None = None, return_state: bool = False, cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False, scale: float | None = None, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gated delta rule: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    q, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of q and k.
    g: (B, T, H) or (B, T, H, K), or HV heads in place of H: the logarithm of the decay, at most 0. beta: (B, T, H) or
    (B, T, HV): how far a key's value is corrected, 0 to 1 or 2. Both in any floating-point dtype.
    normalize: q and k are divided by their L2 norms, (sum of squares + 1e-6)^1/2.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; K^-1/2 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    known = _look(q, k, v, g, beta, initial_state, cu_seqlens, normalize, return_state, inplace, scale, impl)
    tensors = q, k, v, g, beta, None, None
    return delta_served(through, known, impl, tensors, normalize, initial_state, return_state, cu_seqlens, inplace)


@by_kind(7, optional=2, strides=True, gradients=True, sure=True)
def _look(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, normalize: bool, return_state: bool,
    inplace: bool, scale: float | None, impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    gates = {"g": (g, ("BTH", "BTHK", "BTR", "BTRK")), "beta": (beta, ("BTH", "BTR"))}
    check("gated_delta_rule", {"q": q, "k": k}, ("v", v), gates, given)
    if type(normalize) is not bool:
        raise RidgelineError(f"gated_delta_rule: normalize must be True or False, but is {normalize!r}")
    return delta_found(OP, impl, Delta(q, k, v, g, beta), given, q.shape[-1] ** -0.5)


def cost(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
) -> tuple[Any, Any]:  # fmt: skip
    return delta_cost(Delta(q, k, v, g, beta), given)


class Beta(Spec):
    """Random numbers from 0 to 2."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return (2 * made.detach().sigmoid()).requires_grad_(made.requires_grad)


class Ends(Spec):
    """cu_seqlens of sequences of `high` tokens each."""

    def make(self, dtype: Any, device: Any, generator: Any) -> torch.Tensor:
        return torch.arange(self.shape[0], dtype=torch.int32, device=device) * self.high


def _long(B: int, T: int, H: int, HV: int, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    keys = Spec(B, T, H, 128), Spec(B, T, H, 128)
    return (*keys, Spec(B, T, HV, 128), Decay(B, T, HV), Beta(B, T, HV)), {"normalize": True, **options}


_short = Spec(2, 7, 1, 8), Spec(2, 7, 1, 8), Spec(2, 7, 1, 12)
_qkv = Spec(2, 19, 1, 8), Spec(2, 19, 1, 8), Spec(2, 19, 1, 12)
_grouped = Spec(2, 18, 2, 8), Spec(2, 18, 2, 8), Spec(2, 18, 4, 12)
_states = {"initial_state": Spec(2, 4, 8, 12, dtype="float32", grad=False), "return_state": True, "normalize": True}
_large, _unit = (Spec(8, 4096, 16, 128),) * 3, {"normalize": True}
# A gate's gradient is a sum of terms that cancel: in float32 up to 1.15 times the law's error where each channel has a
# gate, by the CPU's rounding of the reference. tests/test_delta.py checks it.
CASES = [
    Case("2x7x1x8/12 per head", (*_short, Decay(2, 7, 1), Beta(2, 7, 1)), _unit),
    Case("2x19x1x8/12 per channel", (*_qkv, Decay(2, 19, 1, 8, grad=False), Beta(2, 19, 1)), _unit),
    Case("2x18x2/4x8/12 per head, states", (*_grouped, Decay(2, 18, 4), Beta(2, 18, 4)), _states),
    Case("2x18x2/4x8/12 per channel, states", (*_grouped, Decay(2, 18, 2, 8, grad=False), Beta(2, 18, 2)), _states),
    Case("1x64x2x16 per head", (*(Spec(1, 64, 2, 16),) * 3, Decay(1, 64, 2), Beta(1, 64, 2)), _unit, ("float32",),
         "quick"),
    Case("8x4096x16x128 per head", (*_large, Decay(8, 4096, 16), Beta(8, 4096, 16)), _unit, ("bfloat16",), "bench"),
    Case("8x4096x16x128 per channel", (*_large, Decay(8, 4096, 16, 128), Beta(8, 4096, 16)), _unit, ("bfloat16",),
         "bench"),
    Case("4x8192x16/32x128 per head, packed",
         *_long(1, 32768, 16, 32, cu_seqlens=Ends(5, dtype="int32", grad=False, high=8192)), ("bfloat16",), "bench"),
    Case("1x32768x16/32x128 per head", *_long(1, 32768, 16, 32), ("bfloat16",), "bench"),
    Case("1x32768x4x128 per head", *_long(1, 32768, 4, 4), ("bfloat16",), "bench"),
]  # fmt: skip

OP = Op(
    gated_delta_rule, reference=reference, cost=cost, flops=delta_flops("gated_delta_rule"), residue=2e-6, cases=CASES
)
OP.eager("naive", "the recurrence, a token at a time", reference, served=True)
OP.kernel("triton", DELTA_IDEA, **DELTA_KERNEL)
