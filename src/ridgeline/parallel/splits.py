"""Tensor parallelism of `lm`'s model as a ladder: blocks alone, with split tokens, with a split vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.lm.model import Transformer
from ridgeline.parallel.models import OURS, TensorParallel, parallelize
from ridgeline.parallel.rung import Held, Traffic, nbytes


@dataclass(frozen=True)
class Split:
    """A rung of tensor parallelism. Every rank is given the same batch."""

    name: str
    idea: str
    sequence: bool = False
    vocab: bool = False

    def wrap(self, model: Transformer, group: Any = None) -> TensorParallel:
        """Splits the model over the ranks, in place. Raises RidgelineError if they do not divide it."""
        return parallelize(model, group, sequence=self.sequence, vocab=self.vocab)

    def refuses(self, model: Transformer, world: int, context: int) -> str | None:
        """Returns why the ranks cannot share the model so, or None."""
        size = model.size
        parts = [("heads of keys", size.groups), ("hidden units", size.hidden)]
        parts += [("vocabulary", size.vocabulary)] * self.vocab + [("tokens", context)] * self.sequence
        found = next((f"the {many} {what}" for what, many in parts if many % world), None)
        return f"{world} ranks must divide {found}" if found else None

    def parts(self, model: Transformer, world: int) -> tuple[int, int]:
        """Returns the bytes of the split parameters, as one rank has them, and of those that stay whole."""
        split = whole = 0
        for name, p in model.named_parameters():
            if any(f"{layer}." in name for layer in OURS) or (self.vocab and p.shape[0] == model.size.vocabulary):
                split += p.nbytes // world
            else:
                whole += p.nbytes
        return split, whole

    def traffic(self, model: Transformer, world: int, batch: int, context: int) -> Traffic:
        """Returns what a rank's step moves."""
        traffic, layers = Traffic(), model.size.layers
        if world == 1:
            return traffic
        rows = batch * context
        whole = rows * model.size.width * next(model.parameters()).element_size()  # the residual stream
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        if self.sequence:  # of each of a layer's two blocks, forward and backward; then the stream's two ends
            traffic.add("all_gather", (4 * layers + 2) * whole, 4 * layers + 2)
            traffic.add("reduce_scatter", 4 * layers * whole, 4 * layers)
            traffic.add("all_reduce", nbytes(norms), len(norms))
        else:
            inside = [p for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name]
            traffic.add("all_reduce", 4 * layers * whole + nbytes(inside), 4 * layers + len(inside))
        if self.vocab:  # the embedding's sum, four numbers a row of the loss, and the last stream's gradient
            traffic.add("all_reduce", 2 * whole, 2).add("all_gather", world * rows * 4 * 4)
        return traffic

    def held(self, model: Transformer, world: int, moments: int = 2) -> Held:
        """Returns the bytes that a rank holds."""
        own = sum(self.parts(model, world))
        return Held(own, own, moments * own)

    def share(self, model: Transformer, world: int) -> float:
        """Returns a rank's part of the products with weights."""
        size = model.size
        head = size.vocabulary * size.width
        blocks = sum(p.numel() for name, p in model.named_parameters() if any(f"{layer}." in name for layer in OURS))
        return (blocks / world + (head / world if self.vocab else head)) / (blocks + head)


LADDER = [
    Split("blocks", "attention and MLP by heads and hidden units; their results are summed"),
    Split("sequence", "between the blocks a rank has its tokens: the same bytes, less memory", sequence=True),
    Split("vocabulary", "the embedding, the head and the loss are split too", sequence=True, vocab=True),
]
