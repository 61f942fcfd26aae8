"""What split sequences and spread experts move: collectives and bytes that a rank sends, in closed form.

docs/notes/ring_attention.md and moe.md derive the forms, and tests hold them in a pretended world of 64.
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


def expert_traffic(
    world: int, experts: int, leave: int, come: int, H: int, *, size: int = 2, weight_size: int = 4,
    of_x: bool = True, of_weights: bool = True, training: bool = True,
) -> tuple[Traffic, Traffic]:  # fmt: skip
    """Returns the traffic of forward and of backward of `experts.moe`.

    experts: of all ranks. leave: this rank's pairs (token, expert) whose expert is on another rank, T k (N - 1) / N if
    they are spread evenly; come: the pairs of other ranks for this one's experts. H: the tokens' width. size,
    weight_size: bytes of an element of x and of weights. of_x, of_weights: whether these need gradients. training:
    whether anything does.
    """
    counts = (world - 1) * (experts // world) * 4
    first = counts + (leave + come) * H * size + training * leave * weight_size
    if not training:
        return Traffic(3, first), Traffic(0, 0)
    back = leave * H * size + of_x * come * H * size + of_weights * come * weight_size
    return Traffic(4, first), Traffic(1 + of_x + of_weights, back)
