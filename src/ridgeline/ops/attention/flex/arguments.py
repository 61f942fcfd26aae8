"""The arguments of flex_attention: what is wrong with its functions, and the facts that a kind of call depends on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ridgeline.op import RidgelineError
from ridgeline.ops.attention.common.arguments import Options, check, in_autocast, options
from ridgeline.ops.attention.common.cost import pairs
from ridgeline.ops.attention.flex.blocks import BlockMask
from ridgeline.ops.attention.flex.score import ScoreMod, as_score_mod

__all__ = ["BlockMask", "Facts", "Options", "ScoreMod", "as_score_mod", "check_call", "facts_of", "in_autocast"]
__all__ += ["options", "pairs_of", "without_formula"]


class Facts(NamedTuple):
    """What a call's checks depend on, of its functions. It holds no tensors, so that remembered checks hold none."""

    score_device: str  # of what the score function reads, "" for nothing
    formula: bool  # whether the score function has one in PyTorch, or there is none
    mask_device: str
    mask_shape: tuple[int, ...]  # () for no mask


def facts_of(score_mod: ScoreMod | None, block_mask: Any) -> Facts:
    """Raises RidgelineError if block_mask is no BlockMask."""
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        made = "made by ridgeline.block_mask"
        raise RidgelineError(f"flex_attention: block_mask must be a BlockMask, {made}, got {type(block_mask).__name__}")
    read = () if score_mod is None else score_mod.tensors
    formula = score_mod is None or score_mod.eager is not None
    where, shape = ("", ()) if block_mask is None else (str(block_mask.counts.device), block_mask.shape)
    return Facts(str(read[0].device) if read else "", formula, where, shape)


def _mask_fault(q: torch.Tensor, k: torch.Tensor, facts: Facts, wants: tuple[Any, ...]) -> str | None:
    """Returns what is wrong with the functions of a call whose tensors are right, or None."""
    if facts.score_device not in ("", str(q.device)):
        return f"score_mod reads tensors on {facts.score_device}, and q is on {q.device}"
    if not facts.mask_shape:
        return None
    if facts.mask_device != str(q.device):
        return f"block_mask is on {facts.mask_device}, and q is on {q.device}"
    shape, made = (*q.shape[:3], k.shape[2]), facts.mask_shape
    if shape[2:] != made[2:] or any([n not in (1, m) for n, m in zip(made[:2], shape[:2], strict=True)]):
        return f"block_mask is for (batch, heads, queries, keys) of {made}, B and H may be 1, and the call has {shape}"
    if any([o not in (False, None, (None, None), (-1, -1)) for o in wants]):
        return "block_mask alone says what is seen, so causal, window and prefix must not be given with it"
    return None


def check_call(
    q: Any, k: Any, v: Any, facts: Facts, causal: Any, scale: Any, window: Any, window_align: Any, prefix: Any
) -> None:
    """Raises RidgelineError if the tensors, the options or the functions of a call are wrong."""
    check("flex_attention", 4, q, k, v, None, causal, scale, window, None, None, window_align, prefix)
    wrong = _mask_fault(q, k, facts, (causal, window, window_align, prefix))
    if wrong:
        raise RidgelineError(f"flex_attention: {wrong}")


def without_formula(*given: Any, **named: Any) -> str | None:
    """Returns why plain PyTorch does not take a call, or None."""
    mods = [a for a in (*given, *named.values()) if isinstance(a, ScoreMod)]
    missing = any([m.eager is None for m in mods])
    return "plain PyTorch needs the ScoreMod's eager=, its function in PyTorch" if missing else None


def pairs_of(q: torch.Tensor, k: torch.Tensor, mask: BlockMask | None, chosen: Options) -> int:
    """Returns how many pairs of a query and a key see each other, over all batches and heads."""
    batch, heads, rows, _ = q.shape
    if mask is None:
        return batch * heads * pairs(rows, k.shape[2], chosen)
    return mask.pairs * (batch // mask.shape[0]) * (heads // mask.shape[1])
