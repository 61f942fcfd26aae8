"""rwkv7: RWKV-7's time mixing.

    S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T r_t

Chunks are solved as triangular systems; `triton/delta.py` has the equations.
Source: Peng et al., RWKV-7 "Goose" with expressive dynamic state evolution, 2025 (arXiv:2503.14456).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Op, Spec
from ridgeline.ops.recurrent.common.arguments import check
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
through = engine("rwkv7", ("g", "beta", "a", "b"), ("g", "a", "b"), "bool normalize, ")


def reference(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
    initial_state: Maybe = None, return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False,
    scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    return delta_recurrence(Delta(r, k, v, w, a=a, b=b), given, 1.0 if scale is None else scale)


def rwkv7(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
    initial_state: torch.Tensor | None = None, return_state: bool = False, cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False, scale: float | None = None, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns RWKV-7's time mixing: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    r, k, a, b: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last
    is 1; K and V from 1 to 256. Value head h uses head h // (HV / H) of the others. a and b are RWKV-7's -kk and kk
    times its rate in context.
    w: (B, T, H, K): the logarithm of the decay, at most 0, in any floating-point dtype.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; 1 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    known = _look(r, w, k, v, a, b, initial_state, cu_seqlens, return_state, inplace, scale, impl)
    tensors = r, k, v, w, None, a, b
    return delta_served(through, known, impl, tensors, False, initial_state, return_state, cu_seqlens, inplace)


@by_kind(8, optional=2, strides=True, gradients=True, sure=True)
def _look(
    r: Any, w: Any, k: Any, v: Any, a: Any, b: Any, initial_state: Any, cu_seqlens: Any, return_state: bool,
    inplace: bool, scale: float | None, impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    check("rwkv7", {"r": r, "k": k, "a": a, "b": b}, ("v", v), {"w": (w, ("BTHK", "BTRK"))}, given)
    return delta_found(OP, impl, Delta(r, k, v, w, a=a, b=b), given, 1.0)


def cost(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **given: Any
) -> tuple[Any, Any]:
    return delta_cost(Delta(r, k, v, w, a=a, b=b), given)


class Decay(Spec):
    """Random logarithms of decays, from -0.607 to 0, as RWKV-7's."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return (-0.6065 * made.detach().sigmoid()).requires_grad_(made.requires_grad)


class Direction(Spec):
    """Random vectors of length 0.7."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return (0.7 * torch.nn.functional.normalize(made.detach(), dim=-1)).requires_grad_(made.requires_grad)


def _case(B: int, T: int, H: int, HV: int, K: int, V: int) -> tuple[Spec, ...]:
    key, way = Spec(B, T, H, K), Direction(B, T, H, K)
    return key, Decay(B, T, H, K), key, Spec(B, T, HV, V), way, way


_states = {"initial_state": Spec(2, 4, 8, 12, dtype="float32", grad=False), "return_state": True}
CASES = [
    Case("2x7x1x8/12", _case(2, 7, 1, 1, 8, 12)),
    Case("2x18x2/4x8/12 states", _case(2, 18, 2, 4, 8, 12), _states),
    Case("1x48x2x16", _case(1, 48, 2, 2, 16, 16), {}, ("float32",), "quick"),
    Case("8x4096x32x64", _case(8, 4096, 32, 32, 64, 64), {}, ("bfloat16",), "bench"),
]

OP = Op(rwkv7, reference=reference, cost=cost, flops=delta_flops("rwkv7"), residue=2e-6, cases=CASES)
OP.eager("naive", "the recurrence, a token at a time", reference, served=True)
OP.kernel("triton", DELTA_IDEA, **DELTA_KERNEL)
