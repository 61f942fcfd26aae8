"""The kernels of flex_attention as torch ops and as an autograd function.

Users' functions are arguments by their keys; see score.py."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import LOADED, RidgelineError
from ridgeline.ops.attention.common.arguments import Options, precision, refusal
from ridgeline.ops.attention.flex import backward, forward
from ridgeline.ops.attention.flex.blocks import BlockMask
from ridgeline.ops.attention.flex.score import MOST, ScoreMod
from ridgeline.select import run

_READ = "Tensor? rows, Tensor? columns, " + ", ".join(
    [f"Tensor? {what}_{n}" for what in ("score", "mask") for n in "abc"]
)
_GIVEN = (
    "str? forward, str? backward, str? mask, int block, float scale, int left, int right, bool bottom, int prefix, "
    "str precision, str? impl"
)


def _like(t: torch.Tensor) -> torch.Tensor:
    """Allocates a result in t's order of dimensions: heads within tokens if t has them so."""
    order = (0, 2, 1, 3) if t.stride(1) < t.stride(2) else (0, 1, 2, 3)
    return torch.empty_permuted(t.shape, order, dtype=t.dtype, device=t.device)


@kernel_op(f"flex_attention_fwd(Tensor q, Tensor k, Tensor v, {_READ}, {_GIVEN}) -> (Tensor, Tensor)")
def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (B, Hq, Sq, D) and lse (B, Hq, Sq), float32. rows, columns: a mask's lists, for forward and dQ, and
    for dK and dV. forward, backward, mask: keys of functions, which read score_a to score_c, and mask_a to mask_c."""
    o, lse = _like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run(LOADED["flex_attention"], "fwd", rest[-1], (o, lse), q, k, v, *rest[:-1])
    return o, lse


@kernel_op(
    "flex_attention_bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_READ}, {_GIVEN}) -> (Tensor, Tensor, Tensor)"
)
def _backward(do: torch.Tensor, dlse: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dv."""
    grads = tuple([_like(t) for t in rest[:3]])
    do = do if do.stride(-1) == 1 else do.contiguous()
    dlse = dlse if dlse is None or dlse.is_contiguous() else dlse.contiguous()
    run(LOADED["flex_attention"], "bwd", rest[-1], grads, do, dlse, *rest[:-1])
    return grads


class _Flex(Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        read, facts = rest[: 2 + 2 * MOST], rest[2 + 2 * MOST :]
        o, lse = _forward(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, o, lse, *read)
        ctx.facts = facts
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        nothing = (None,) * (2 + 2 * MOST + len(ctx.facts))
        if do is None and dlse is None:
            return None, None, None, *nothing
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[3]) if do is None else do
        return *_backward(do, dlse, *saved, *ctx.facts), *nothing


def by_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: ScoreMod | None, block_mask: BlockMask | None,
    chosen: Options, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse, both differentiable if the score_mod is."""
    read: list[torch.Tensor | None] = [None, None]
    if block_mask is not None:
        read = [block_mask.rows, block_mask.columns]
    for one in (score_mod, block_mask):
        tensors = () if one is None else one.tensors
        read += [*tensors, *[None] * (MOST - len(tensors))]
    keys = (None, None) if score_mod is None else (score_mod.forward, score_mod.backward)
    mask, block = (None, 0) if block_mask is None else (block_mask.function, block_mask.block)
    scale, _, left, right, bottom, prefix = chosen
    facts = *keys, mask, block, scale, left, right, bottom, prefix, precision(), impl
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if score_mod is not None and not score_mod.differentiable:
            raise RidgelineError(
                f"flex_attention: the derivative of {score_mod.name} is not known; give its ScoreMod backward=, "
                "or additive=True if it only adds to the score"
            )
        return differentiate(_Flex, q, k, v, *read, *facts)
    return _forward(q, k, v, *read, *facts)


def _flops(q: Any, k: Any, v: Any, *rest: Any) -> int:
    """Returns the operations of the forward pass of a torch op: whole blocks of a mask, whose lists are read."""
    read, block = 2 + 2 * MOST, rest[2 + 2 * MOST + 3]
    if block:
        lists = rest[0]
        seen = int(lists[..., :2].sum()) * block * block * (q.shape[0] * q.shape[1]) // lists[..., 0, 0].numel()
        return 4 * q.shape[3] * min(seen, q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
    scale, left, right, bottom, prefix = rest[read + 4 : read + 9]
    band = Options(scale, 0.0, left, right, bottom, prefix).band(q.shape[2], k.shape[2])
    each = q.shape[2] * k.shape[2] if band is None else band.pairs(q.shape[2], k.shape[2])
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * each


FLOPS: dict[str, Any] = {
    "flex_attention_fwd": _flops,
    "flex_attention_bwd": lambda do, dlse, q, k, v, o, lse, *rest: _flops(q, k, v, *rest) * 5 // 2,
}
TRITON: dict[str, Any] = {
    "kind": "triton",
    "fwd": forward.fwd,
    "bwd": backward.bwd,
    "supports": refusal,
    "served": True,
}
