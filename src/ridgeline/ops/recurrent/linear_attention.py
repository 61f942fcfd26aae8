"""linear_attention: causal linear attention.

    S_t = S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

Chunks of 64 tokens are matrix products; the state between them stays in float32. In float32 a ladder on CUDA cores goes
a token at a time, which takes half of a chunk's operations.
Source: Katharopoulos, Vyas, Pappas and Fleuret, Transformers are RNNs, 2020 (arXiv:2006.16236).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.op import Case, Op, Spec
from ridgeline.ops.recurrent.common.arguments import check
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
from ridgeline.ops.recurrent.cuda import causal_product
from ridgeline.ops.recurrent.hopper import heads as head_hopper
from ridgeline.ops.recurrent.triton import head_chunks
from ridgeline.select import by_kind

Maybe = torch.Tensor | None
through = engine("linear_attention")


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, initial_state: Maybe = None,
    return_state: bool = False, cu_seqlens: Maybe = None, inplace: bool = False, scale: float | None = None,
) -> Any:  # fmt: skip
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    return recurrence(q, k, v, None, None, given, 1.0 if scale is None else scale)


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, initial_state: torch.Tensor | None = None, return_state:
    bool = False, cu_seqlens: torch.Tensor | None = None, inplace: bool = False, scale: float | None = None, impl: str
    | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns causal linear attention: o, (B, T, HV, V). Gradients flow to every floating-point argument.

    q, k: (B, T, H, K); v: (B, T, HV, V), HV a multiple of H; float32, float16 or bfloat16, any strides whose last is 1;
    K and V from 1 to 256. Value head h uses head h // (HV / H) of q and k.
    initial_state: (B, HV, K, V), float32; zeros if None. return_state: returns (o, final state).
    cu_seqlens: (sequences + 1,), int32: B is 1, and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1
    and the state n. inplace: the final state is also written over initial_state; without gradients only.
    scale: multiplies o; 1 if None.
    Values on a GPU are not validated (that would synchronise).
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    known = _look(q, k, v, initial_state, cu_seqlens, return_state, inplace, scale, impl)
    return served(through, known, impl, q, k, v, None, None, initial_state, return_state, cu_seqlens, inplace)


@by_kind(5, optional=2, strides=True, gradients=True, sure=True)
def _look(
    q: Any, k: Any, v: Any, initial_state: Any, cu_seqlens: Any, return_state: bool,
    inplace: bool, scale: float | None, impl: str | None,
) -> Found:  # fmt: skip
    """Checks a call and chooses."""
    given = Given(initial_state, return_state, cu_seqlens, inplace, scale)
    check("linear_attention", {"q": q, "k": k}, ("v", v), {}, given)
    return found(OP, impl, given, q, k, v, 1.0)


CASES = [
    Case("2x7x1x8/12", (Spec(2, 7, 1, 8), Spec(2, 7, 1, 8), Spec(2, 7, 1, 12))),
    Case("2x18x2/4x8/12 states", (Spec(2, 18, 2, 8), Spec(2, 18, 2, 8), Spec(2, 18, 4, 12)),
         {"initial_state": Spec(2, 4, 8, 12, dtype="float32", grad=False), "return_state": True}),
    Case("1x70x2x128", (Spec(1, 70, 2, 128),) * 3, dtypes=("float16", "bfloat16")),
    Case("1x64x2x16", (Spec(1, 64, 2, 16),) * 3, dtypes=("float32",), use="quick"),
    Case("8x4096x16x128", (Spec(8, 4096, 16, 128),) * 3, dtypes=("bfloat16",), use="bench"),
    Case("8x4096x16x64", (Spec(8, 4096, 16, 64),) * 3, dtypes=("float32",), use="bench"),
]  # fmt: skip

OP = Op(
    linear_attention,
    reference=reference,
    cost=cost,
    sharding=lambda cu_seqlens=None, **_: (
        "q bThK, k bThK, v bThV, initial_state bhKV -> bThV, bhKV" if cu_seqlens is None else None
    ),
    flops=formulas("linear_attention", cost),
    residue=2e-6,
    cases=CASES,
)
OP.eager("naive", "the recurrence, a token at a time", reference, served=True)
for name, idea in (
    ("cuda", "a thread for each column of the state, which lies in shared memory; each reads q and k by itself"),
    ("cuda_registers", "the state in registers; q and k come into shared memory once, and from there by 16 bytes"),
    ("cuda_segments", "segments of a sequence side by side; two lanes share two columns and half as many loads"),
):
    way = causal_product.WAYS[name]
    fwd, bwd = partial(causal_product.fwd, way), partial(causal_product.bwd, way)
    OP.kernel(name, idea, kind="cuda", fwd=fwd, bwd=bwd, supports=causal_product.unfit, dtypes=("float32",))
OP.kernel("triton", IDEA, **KERNEL)
OP.kernel("triton_chunks", head_chunks.IDEA, **head_chunks.KERNEL)
OP.kernel("gluon", head_hopper.IDEA, unless=head_chunks.left_of_gates, **head_hopper.KERNEL)
