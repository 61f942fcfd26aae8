"""The kernels of attention as torch ops and as an autograd function, and the facts of their implementations.

Packed sequences use the same ops as (1, heads, tokens, D) views with cu_q and cu_k. If both are the same tensor, cu_k
is None, since torch.compile and replayed calls need distinct tensors as arguments.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Op, RidgelineError
from ridgeline.ops.attention.common.arguments import Options, precision, refusal
from ridgeline.ops.attention.hopper import backward_launcher as hopper_backward
from ridgeline.ops.attention.hopper import launcher as hopper_forward
from ridgeline.ops.attention.triton import backward as triton_backward
from ridgeline.ops.attention.triton import split_keys
from ridgeline.select import run

OPS: dict[bool, Op] = {}  # by whether sequences are packed


def _like(t: torch.Tensor) -> torch.Tensor:
    """Allocates a result in t's order of dimensions: heads within tokens if t has them so."""
    order = (0, 2, 1, 3) if t.stride(1) < t.stride(2) else (0, 1, 2, 3)
    return torch.empty_permuted(t.shape, order, dtype=t.dtype, device=t.device)


_OPTIONS = (
    "Tensor? sinks, float scale, float softcap, int left, int right, bool bottom, int prefix, int max_q, int max_k, "
    "str precision"
)


@kernel_op(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_q, Tensor? cu_k, {_OPTIONS}, str? impl) "
    "-> (Tensor, Tensor)"
)
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_q: Any, cu_k: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (B, Hq, Sq, D) and lse (B, Hq, Sq), float32. max_q, max_k: the longest packed lengths, 0 if unknown."""
    o, lse = _like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run(OPS[cu_q is not None], "fwd", rest[-1], (o, lse), q, k, v, mask, cu_q, cu_k, *rest[:-1])
    return o, lse


_SAVED = "Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? mask, Tensor? cu_q, "
_GIVEN = f"{_SAVED}Tensor? cu_k, {_OPTIONS}, bool deterministic, str? impl"


@kernel_op(f"attention_bwd({_GIVEN}) -> (Tensor, Tensor, Tensor)")
def _backward(do: torch.Tensor, dlse: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dv."""
    grads = tuple([_like(t) for t in rest[:3]])
    _fill((*grads, None), do, dlse, *rest)
    return grads


@kernel_op(f"attention_bwd_sinks({_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
def _backward_with_sinks(do: torch.Tensor, dlse: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk, dv and dsinks."""
    grads = *[_like(t) for t in rest[:3]], torch.empty_like(rest[_SINKS])
    _fill(grads, do, dlse, *rest)
    return grads


_SINKS = 8  # where sinks stand among what follows dlse


def _fill(grads: tuple[Any, ...], do: torch.Tensor, dlse: Any, *rest: Any) -> None:
    do = do if do.stride(-1) == 1 else do.contiguous()
    dlse = dlse if dlse is None or dlse.is_contiguous() else dlse.contiguous()
    run(OPS[rest[6] is not None], "bwd", rest[-1], grads, do, dlse, *rest[:-1])


# For results that are sums of several calls' (ring attention): o and the gradients leave in float32, contiguous. left
# and right may be negative.
_PARTIAL = "Tensor? cu, float scale, float softcap, int left, int right, str precision, str? impl=None"


@kernel_op(f"attention_partial_fwd(Tensor q, Tensor k, Tensor v, {_PARTIAL}) -> (Tensor, Tensor)")
def _partial_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, scale: float, softcap: float,
    left: int, right: int, precision: str, impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse, both float32, where query i sees the keys i - left to i + right."""
    o, lse = [torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (q.shape, q.shape[:3])]
    given: tuple[Any, ...] = (None, cu, None, None, scale, softcap, left, right, False, 0, 0, 0, precision)
    run(OPS[cu is not None], "fwd", impl, (o, lse), q, k, v, *given)
    return o, lse


@kernel_op(
    "attention_partial_bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_PARTIAL}) -> (Tensor, Tensor, Tensor)"
)
def _partial_backward(
    do: torch.Tensor, dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, cu: torch.Tensor | None, scale: float, softcap: float, left: int, right: int, precision: str,
    impl: str | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns dq, dk and dv in float32, of o and lse over more keys than these."""
    grads = tuple([torch.empty(t.shape, dtype=torch.float32, device=q.device) for t in (q, k, v)])
    given: tuple[Any, ...] = (None, cu, None, None, scale, softcap, left, right, False, 0, 0, 0, precision)
    outputs: Any = (*grads, None)
    run(OPS[cu is not None], "bwd", impl, outputs, do, dlse, q, k, v, o, lse, *given, True)
    return grads


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, sinks: Any, numbers: tuple[Any, ...],
        deterministic: bool, impl: Any,
    ) -> Any:  # fmt: skip
        o, lse = _forward(q, k, v, mask, cu_q, cu_k, sinks, *numbers, impl)
        ctx.save_for_backward(q, k, v, o, lse, mask, cu_q, cu_k, sinks)
        ctx.facts = *numbers, deterministic, impl
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        if do is None and dlse is None:
            return (None,) * 10
        saved = ctx.saved_tensors
        given = torch.zeros_like(saved[3]) if do is None else do, dlse, *saved, *ctx.facts
        if saved[_SINKS] is None or not ctx.needs_input_grad[6]:
            return *_backward(*given), *(None,) * 7
        *grads, dsinks = _backward_with_sinks(*given)
        return *grads, None, None, None, dsinks, None, None, None


def by_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_q: Any, cu_k: Any, sinks: Any, chosen: Options,
    longest: tuple[int, int], deterministic: bool | None, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse, both differentiable.

    Raises RidgelineError inside `context_parallel`."""
    if sharded_sequence(torch.nn.functional.scaled_dot_product_attention):
        raise RidgelineError(
            "attention: inside torch's context_parallel a kernel would see this rank's keys only; "
            "call torch.nn.functional.scaled_dot_product_attention there"
        )
    numbers = *chosen, *longest, precision()
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        same = deterministic is not False or torch.are_deterministic_algorithms_enabled()
        return differentiate(_Attention, q, k, v, mask, cu_q, cu_k, sinks, numbers, same, impl)
    return _forward(q, k, v, mask, cu_q, cu_k, sinks, *numbers, impl)


@torch.compiler.assume_constant_result
def sharded_sequence(function: Any) -> bool:
    """Returns whether torch's `context_parallel` is active: it shards sequences, and patches torch's own attention.

    function: that attention, as it is now. It is an argument so that torch.compile guards on it."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    replaced: Any = getattr(module, "_replaced_functions", None) or ()
    return function in replaced


# Facts of the implementations that both ops have.
TRITON: dict[str, Any] = {
    "kind": "triton",
    "fwd": split_keys.fwd,
    "bwd": triton_backward.bwd,
    "supports": refusal,
    "served": True,
}
GLUON: dict[str, Any] = {
    "kind": "gluon",
    "dtypes": ("float16", "bfloat16"),
    "arch": 90,
    "newest": 90,
    "fwd": hopper_forward.fwd,
    "bwd": hopper_backward.bwd,
    "supports": hopper_forward.refusal,
    "served": True,
    "unless": split_keys.aside,
    "leaves": ("fwd",),
}
