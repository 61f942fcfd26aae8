"""gated_linear_attention: linear attention whose state decays by a gate.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

g is a number per head (simple GLA, lightning attention, mLSTM) or per channel of k (GLA).
Source: Yang, Wang, Shen, Panda and Kim, Gated linear attention, 2023 (arXiv:2312.06635).
"""

from __future__ import annotations

from collections.abc import Callable
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
from ridgeline.ops.recurrent.hopper import heads as head_hopper
from ridgeline.ops.recurrent.triton import head_chunks
from ridgeline.select import by_kind

Maybe = torch.Tensor | None
through = engine("gated_linear_attention", narrow=("g",))


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *, initial_state: Maybe = None,
    return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False, scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    return recurrence(q, k, v, g, None, given, q.shape[-1] ** -0.5 if scale is None else scale)


def gated_linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *, initial_state: torch.Tensor | None = None,
    return_state: bool = False, cu_seqlens: torch.Tensor | None = None, inplace: bool = False, scale: float | None =
    None, impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns linear attention whose state decays by a gate: o, (B, T, HV, V).

    Gradients flow to every floating-point argument.
    q, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of q and k.
    g: (B, T, H) or (B, T, H, K): the logarithm of the decay, at most 0, in any floating-point dtype.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; K^-1/2 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    known = _look(q, k, v, g, initial_state, cu_seqlens, return_state, inplace, scale, impl)
    return served(through, known, impl, q, k, v, g, None, initial_state, return_state, cu_seqlens, inplace)


@by_kind(6, optional=2, strides=True, gradients=True, sure=True)
def _look(
    q: Any, k: Any, v: Any, g: Any, initial_state: Any, cu_seqlens: Any, return_state: bool,
    inplace: bool, scale: float | None, impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    check("gated_linear_attention", {"q": q, "k": k}, ("v", v), {"g": (g, ("BTH", "BTHK"))}, given)
    return found(OP, impl, given, q, k, v, q.shape[-1] ** -0.5, g)


def per_head(refusal: Callable[..., str | None]) -> Callable[..., str | None]:
    """Returns why kernels for a gate per head do not take a call, or None. refusal: their other reasons."""

    def why(*args: Any, **given: Any) -> str | None:
        gate = args[5] if len(args) > 10 else args[3]
        return "its gate is one per head, got one per channel" if gate.dim() == 4 else refusal(*args, **given)

    return why


_short = Spec(2, 7, 1, 8), Spec(2, 7, 1, 8), Spec(2, 7, 1, 12)
_qkv = Spec(2, 19, 1, 8), Spec(2, 19, 1, 8), Spec(2, 19, 1, 12)
_grouped = Spec(2, 18, 2, 8), Spec(2, 18, 2, 8), Spec(2, 18, 4, 12)
_states = {"initial_state": Spec(2, 4, 8, 12, dtype="float32", grad=False), "return_state": True}
_large = (Spec(8, 4096, 16, 128),) * 3


def _step(batch: int) -> Case:
    """A decoder's step; the state's bytes are those of a step in place."""
    token, state = Spec(batch, 1, 32, 128, grad=False), Spec(batch, 32, 128, 128, dtype="float32", grad=False)
    options = {"initial_state": state, "return_state": True}
    gate = Decay(batch, 1, 32, grad=False)
    return Case(f"{batch}x1x32x128 step", (token, token, token, gate), options, ("bfloat16",), "bench")


CASES = [
    Case("2x7x1x8/12 per head", (*_short, Decay(2, 7, 1))),
    Case("2x19x1x8/12 per channel", (*_qkv, Decay(2, 19, 1, 8))),
    Case("2x18x2/4x8/12 per head, states", (*_grouped, Decay(2, 18, 2)), _states),
    # Its gradient is a sum of terms that cancel, on some CPUs 1.03 times the law's error; test_recurrent.py holds it.
    Case("2x18x2/4x8/12 per channel, states", (*_grouped, Decay(2, 18, 2, 8, grad=False)), _states),
    Case("1x70x2x128 per head", (*(Spec(1, 70, 2, 128),) * 3, Decay(1, 70, 2)), dtypes=("float16", "bfloat16")),
    Case("1x64x2x16 per head", (*(Spec(1, 64, 2, 16),) * 3, Decay(1, 64, 2)), dtypes=("float32",), use="quick"),
    Case("8x4096x16x128 per head", (*_large, Decay(8, 4096, 16)), {}, ("bfloat16",), "bench"),
    Case("8x4096x16x128 per channel", (*_large, Decay(8, 4096, 16, 128)), {}, ("bfloat16",), "bench"),
    Case("1x32768x4x128 per channel", (*(Spec(1, 32768, 4, 128),) * 3, Decay(1, 32768, 4, 128)), {}, ("bfloat16",),
         "bench"),
    *map(_step, (1, 64, 256)),
]  # fmt: skip

OP = Op(
    gated_linear_attention,
    reference=reference,
    cost=cost,
    sharding=lambda g, cu_seqlens=None, **_: (
        None
        if cu_seqlens is not None
        else f"q bThK, k bThK, v bThV, g {'bThK'[: g.dim()]}, initial_state bhKV -> bThV, bhKV"
    ),
    flops=formulas("gated_linear_attention", cost),
    residue=2e-6,
    cases=CASES,
)
OP.eager("naive", "the recurrence, a token at a time", reference, served=True)
OP.kernel("triton", IDEA, **KERNEL)
OP.kernel(
    "triton_chunks", head_chunks.IDEA, served=True, unless=head_chunks.left_of_gates,
    **head_chunks.KERNEL | {"supports": per_head(head_chunks.refusal)},
)  # fmt: skip
OP.kernel(
    "gluon", head_hopper.IDEA, unless=head_chunks.left_of_gates,
    **head_hopper.KERNEL | {"supports": per_head(head_hopper.refusal)},
)  # fmt: skip
