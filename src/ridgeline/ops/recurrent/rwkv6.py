"""rwkv6: RWKV-6's time mixing.

    o_t = scale (S_{t-1} + diag(u) k_t v_t^T)^T r_t        S_t = diag(e^{w_t}) S_{t-1} + k_t v_t^T

A token's own pair counts u times; the gate is per channel of k.
Source: Peng et al., Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence, 2024 (arXiv:2404.05892).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Op, Spec
from ridgeline.ops.recurrent.common.arguments import Decay, check
from ridgeline.ops.recurrent.common.calls import (
    IDEA,
    KERNEL,
    Found,
    Given,
    cost,
    engine,
    formulas,
    found,
    recurrence,
    served,
)
from ridgeline.select import by_kind

Maybe = torch.Tensor | None
through = engine("rwkv6", narrow=("g",))


def reference(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, u: torch.Tensor, *, initial_state: Maybe = None,
    return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False, scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    return recurrence(r, k, v, w, u, given, 1.0 if scale is None else scale)


def rwkv6(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor, u: torch.Tensor, *, initial_state:
    torch.Tensor | None = None, return_state: bool = False, cu_seqlens: torch.Tensor | None = None, inplace: bool =
    False, scale: float | None = None, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns RWKV-6's time mixing: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    r, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of r and k.
    w: (B, T, H, K): the logarithm of the decay, at most 0. u: (H, K). Both in any floating-point dtype.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; 1 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    known = _look(r, k, v, w, u, initial_state, cu_seqlens, return_state, inplace, scale, impl)
    return served(through, known, impl, r, k, v, w, u, initial_state, return_state, cu_seqlens, inplace)


@by_kind(7, optional=2, strides=True, gradients=True, sure=True)
def _look(
    r: Any, k: Any, v: Any, w: Any, u: Any, initial_state: Any, cu_seqlens: Any, return_state: bool,
    inplace: bool, scale: float | None, impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    check("rwkv6", {"r": r, "k": k}, ("v", v), {"w": (w, ("BTHK",)), "u": (u, ("HK",))}, given)
    return found(OP, impl, given, r, k, v, 1.0, w, u)


_small, _grouped, _large = Spec(2, 7, 1, 8), Spec(2, 18, 2, 8), Spec(8, 4096, 32, 64)
_states = {"initial_state": Spec(2, 4, 8, 12, dtype="float32", grad=False), "return_state": True}
# In float32 w's gradient, sums that cancel, has up to 1.4 times the law's error: test_recurrent.py checks it.
CASES = [
    Case("2x7x1x8/12", (_small, _small, Spec(2, 7, 1, 12), Decay(2, 7, 1, 8, grad=False), Spec(1, 8))),
    Case("2x18x2/4x8/12 states", (_grouped, _grouped, Spec(2, 18, 4, 12), Decay(2, 18, 2, 8), Spec(2, 8)), _states),
    Case("1x48x2x16", (*(Spec(1, 48, 2, 16),) * 3, Decay(1, 48, 2, 16), Spec(2, 16)), {}, ("float32",), "quick"),
    Case("8x4096x32x64", (*(_large,) * 3, Decay(8, 4096, 32, 64), Spec(32, 64)), {}, ("bfloat16",), "bench"),
]

OP = Op(
    rwkv6,
    reference=reference,
    cost=cost,
    sharding=lambda cu_seqlens=None, **_: (
        "r bThK, k bThK, v bThV, w bThK, u hK, initial_state bhKV -> bThV, bhKV" if cu_seqlens is None else None
    ),
    flops=formulas("rwkv6", cost),
    residue=2e-6,
    cases=CASES,
)
OP.eager("naive", "the recurrence, a token at a time", reference, served=True)
OP.kernel("triton", IDEA, **KERNEL)
