"""FlexAttention, compiled by Inductor: its decoding kernel splits the keys."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ridgeline.lab.measurement.peers._caches import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

PACKAGE, INSTALL, KIND = "torch", "torch", "compile"


@cache
def _compiled() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def _aligned(queries: int, keys: int, device: str) -> Any:
    """The mask of queries at the end of the keys, by blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i + (keys - queries) >= j

    return create_block_mask(seen, None, None, queries, keys, device=device)


def _decode(*args: torch.Tensor, **options: Any) -> torch.Tensor:
    step = Step.of("FlexAttention", *args, **options)
    step.refuse("block_table")
    q, k, v = step.heads_first()
    mask = None if q.shape[2] == 1 else _aligned(q.shape[2], k.shape[2], str(q.device))
    given = {"scale": step.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    found: torch.Tensor = _compiled()(q, k, v, block_mask=mask, **given)
    return found.transpose(1, 2)


PEERS = {"decode_attention": _decode}
