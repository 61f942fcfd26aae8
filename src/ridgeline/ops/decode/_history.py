"""What a step of decoding attends to, in plain PyTorch: the tokens of caches, then the new ones, and who sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ridgeline.op import get
from ridgeline.ops.decode._cache import Half, Maybe, capacity, places


def query_places(cache: torch.Tensor, lengths: torch.Tensor, table: Maybe, queries: int, new: bool) -> torch.Tensor:
    """The place of each query in its sequence, (B, S)."""
    before = lengths.long().clamp(0, capacity(cache, table))
    return (before if new else before - queries)[:, None] + torch.arange(queries, device=lengths.device)


def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: Any, interleaved: bool) -> Any:
    """q and k (B, S, heads, D), rotated as `rope` does at places (B, S)."""
    places = at.long().clamp(0, cos.shape[0] - 1)
    images = q.transpose(1, 2), k.transpose(1, 2)
    q, k = get("rope").reference(*images, cos, sin, positions=places, interleaved=interleaved)
    return q.transpose(1, 2), k.transpose(1, 2)


def halves(*caches: tuple[torch.Tensor, Maybe, Maybe]) -> list[Half]:
    """Caches from their numbers, scales and zeros."""
    return [Half(*cache) for cache in caches]


def history(
    caches: Sequence[Half], new: Sequence[torch.Tensor] | None, lengths: torch.Tensor, table: Maybe,
    place: torch.Tensor, dtype: torch.dtype,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:  # fmt: skip
    """Writes the new tokens (B, S, heads, D) of each cache, and returns every cache's tokens (B, n, heads, D), which of
    them exist, (B, n), and their places, (B, n). Tokens that do not exist are 0."""
    cache = caches[0].data
    B, room = len(lengths), capacity(cache, table)
    before = lengths.long().clamp(0, room)
    index = torch.arange(room, device=lengths.device).expand(B, room)
    known = index < before[:, None]
    owned = None
    if table is not None:  # past a sequence's end the table holds anything
        used = torch.arange(table.shape[1], device=lengths.device) * cache.shape[1] < before[:, None]
        owned = torch.where(used, table, 0)
    at = places(index, owned, cache)
    held = [torch.where(known[:, :, None, None], c.read(at, dtype), 0) for c in caches]
    if new is None:
        return held, known, index
    fresh = (lengths >= 0)[:, None].expand_as(place)
    row, step = (fresh & (place < room)).nonzero(as_tuple=True)
    to = places(place.clamp(0, room - 1), table, cache)
    to = to[0][row, step], to[1][row, step]
    for n, (half, made) in enumerate(zip(caches, new, strict=True)):
        kept = made.to(held[n].dtype).clone()
        kept[row, step] = half.write(to, made[row, step]).to(kept.dtype)
        held[n] = torch.cat((held[n], kept), 1)
    return held, torch.cat((known, fresh), 1), torch.cat((index, place), 1)


def seen_keys(
    index: torch.Tensor, place: torch.Tensor, known: torch.Tensor, tree: Maybe = None, window: int | None = None
) -> torch.Tensor:
    """Which keys each query sees, (B, S, keys)."""
    (B, S), apart = place.shape, place[:, :, None] - index[:, None]
    if tree is None:
        seen = apart >= 0 if window is None else (apart >= 0) & (apart <= window)
    else:
        branch = index - place[:, :1]  # of the newest S keys
        path = tree.gather(2, branch.clamp(0, S - 1)[:, None].expand(B, S, -1))
        seen = (branch < 0)[:, None] | path
    return seen & known[:, None]
