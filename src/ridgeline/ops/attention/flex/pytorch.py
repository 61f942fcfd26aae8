"""PyTorch's own FlexAttention on flex_attention's arguments: compiled by Inductor on a GPU, not compiled on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ridgeline.ops.attention.common.arguments import options
from ridgeline.ops.attention.common.band import Band
from ridgeline.ops.attention.flex.arguments import BlockMask, ScoreMod

MANY = 1 << 20
_translated: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@cache
def _function(on_gpu: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    function: Any = flex_attention
    return torch.compile(function, dynamic=False, fullgraph=True) if on_gpu else function


def _compiling() -> AbstractContextManager[Any]:
    """Lets each function, mask and size compile, where torch.compile would stop at 8, and backward run twice.

    The lab has done so already when it times a call: this takes 40 us."""
    import torch._dynamo.config
    import torch._functorch.config

    if torch._dynamo.config.recompile_limit >= MANY:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY))
    stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
    return stack


@cache
def _banded(band: Band, queries: int, keys: int, device: str) -> Any:
    """Returns a band of keys as FlexAttention's mask by blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((j - i >= band.low) & (j - i <= band.high)) | (j < band.prefix)

    return create_block_mask(seen, None, None, queries, keys, device=device)


def _mod(given: ScoreMod) -> Any:
    """Returns a ScoreMod in FlexAttention's form, from its function in PyTorch; the same for every call."""
    if given not in _translated:
        read, function = given.tensors, given.eager
        assert function is not None
        _translated[given] = lambda score, b, h, i, j: function(score, b, h, i, j, *read)
    return _translated[given]


def _mask(given: BlockMask) -> Any:
    """Returns a BlockMask in FlexAttention's form; the same for every call."""
    from torch.nn.attention.flex_attention import create_block_mask

    if given not in _translated:
        batch, heads, *lengths = given.shape
        read, function = given.tensors, given.eager or _looked_up(given.dense())
        sizes: Any = batch if batch > 1 else None, heads if heads > 1 else None, *lengths
        facts: dict[str, Any] = {"device": str(given.counts.device), "BLOCK_SIZE": max(given.block, 128)}
        _translated[given] = create_block_mask(lambda b, h, i, j: function(b, h, i, j, *read), *sizes, **facts)
    return _translated[given]


def _looked_up(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    batch, heads = [n - 1 for n in mask.shape[:2]]
    return lambda b, h, i, j, *_: mask[b.clamp(max=batch), h.clamp(max=heads), i, j]


def torch_flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, score_mod: Any = None, block_mask: Any = None,
    return_lse: bool = False, **given: Any,
) -> Any:  # fmt: skip
    chosen = options(q.shape[-1], **given)
    band, mask = chosen.band(q.shape[2], k.shape[2]), None
    if block_mask is not None:
        mask = _mask(block_mask)
    elif band is not None:
        mask = _banded(band, q.shape[2], k.shape[2], str(q.device))
    mod = None if score_mod is None else _mod(score_mod)
    with warnings.catch_warnings(), _compiling():
        warnings.filterwarnings("ignore", message=".*without torch.compile.*")  # on a CPU
        call = _function(q.is_cuda)
        more: dict[str, Any] = {"scale": chosen.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        if q.is_cuda:  # below 128 queries torch picks its template for decoding, which may have no tile for a mask
            more["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
        return call(q, k, v, mod, mask, return_lse=return_lse, **more)


def torch_refuses(q: torch.Tensor, *rest: Any, **given: Any) -> str | None:
    """Returns why FlexAttention does not take a call, or None."""
    if not q.is_cuda and q.requires_grad:
        return "FlexAttention has no backward on a CPU"
    if not q.shape[0]:
        return "FlexAttention takes no empty batch"
    for one in (*rest, *given.values()):
        if isinstance(one, ScoreMod) and one.eager is None:
            return "FlexAttention needs the ScoreMod's eager=, its function in PyTorch"
    return None
