"""Attention over a split sequence as a ladder: each way's traffic, and how much of the work its busiest rank does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.parallel import context
from ridgeline.parallel.rung import Traffic


@dataclass(frozen=True)
class Way:
    """A rung of split attention. how: the function of `context`; layout: which tokens a rank holds."""

    name: str
    idea: str
    how: str
    layout: str

    def run(self, *qkv: Any, **options: Any) -> Any:
        """Returns o of this rank's tokens. Raises RidgelineError as the functions of `context` do."""
        return getattr(context, f"{self.how}_attention")(*qkv, layout=self.layout, **options)

    def refuses(self, heads: int, kv_heads: int, world: int) -> str | None:
        """Returns why the ranks cannot share these heads so, or None."""
        if self.how == "ulysses" and (heads % world or kv_heads % world):
            return f"{world} ranks must divide the {heads} heads of q and the {kv_heads} of k"
        return None

    def traffic(self, q: tuple[int, int, int, int], kv_heads: int, world: int, size: int) -> Traffic:
        """Returns what forward and backward of a causal call move. q: the shape of a rank's queries; size: bytes."""
        batch, heads, tokens, D = q
        keys, queries = 2 * batch * kv_heads * tokens * D, batch * heads * tokens * D
        wide, traffic = max(size, 4), Traffic()  # of the gradients of keys that travel
        if world == 1:
            return traffic
        if self.how == "ring":
            turns = world - 1
            return traffic.add("send", turns * keys * (2 * size + wide), 3 * turns)
        if self.how == "gathered":
            traffic.add("all_gather", 2 * world * keys * size, 2)
            return traffic.add("reduce_scatter", world * keys * wide)
        return traffic.add("all_to_all", 2 * (keys + 2 * queries) * size, 4)

    def share(self, world: int) -> float:
        """Returns the busiest rank's part of a causal call's pairs of a query and a key, in long sequences."""
        return (2 * world - 1) / world**2 if self.layout == "plain" and self.how != "ulysses" else 1 / world


LADDER = [
    Way("gathered-plain", "each rank gathers all keys; the last rank works most", "gathered", "plain"),
    Way("ring-plain", "keys go round, each hop under a block: no rank holds them all", "ring", "plain"),
    Way("gathered", "each rank holds an early and a late piece, so that all work alike", "gathered", "zigzag"),
    Way("ring", "keys go round, and all ranks work alike in every hop", "ring", "zigzag"),
    Way("ulysses", "two all-to-alls: whole sequences of some heads", "ulysses", "plain"),
]
