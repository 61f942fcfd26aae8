"""What the ways to split a sequence move: collectives and bytes that a rank sends, in closed form.

docs/notes/ring_attention.md derives the forms, and a test holds them in a pretended world of 64.
"""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """Collectives that a rank takes part in, and the bytes that it sends to other ranks."""

    calls: int
    bytes: int


def context_traffic(
    how: str, world: int, q: tuple[int, int, int, int], kv_heads: int, *, size: int = 2, hops: int | None = None
) -> tuple[Traffic, Traffic]:
    """Returns the traffic of forward and of backward.

    how: "ring", "gathered" or "ulysses". q: the shape of a rank's queries, (B, Hq, S / ranks, D). size: bytes of an
    element. hops: how far the ring turns, all ranks but one by default; a window with layout "plain" needs
    ceil(window / (S / ranks)). Gradients of k and v travel in float32.
    """
    batch, heads, tokens, D = q
    keys = 2 * batch * kv_heads * tokens * D
    turns = world - 1 if hops is None else hops
    if how == "ring":
        return Traffic(turns, turns * keys * size), Traffic(2 * turns, turns * keys * (size + 4))
    if how == "gathered":
        return Traffic(1, (world - 1) * keys * size), Traffic(2, (world - 1) * keys * (size + 4))
    queries = batch * heads * tokens * D
    moved = Traffic(2, (world - 1) * (keys + 2 * queries) * size // world)
    return moved, moved
