"""The sizes of language models, by name: those of the Stanford assignment, of Llama 3 and of Qwen3."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ridgeline.op import RidgelineError


@dataclass(frozen=True)
class Size:
    """The shape of a decoder-only Transformer.

    width: of the residual stream. hidden: of the gated MLP. key_heads: of keys and values; None means `heads`.
    head_dim: None means width / heads. tied: whether the last layer's weight is the embedding's.
    stretch: of rotary positions, as Llama 3.1: (factor, low, high, old context); None for none.
    Raises RidgelineError if a number is not positive or if the heads do not divide.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int = 10_000
    theta: float = 10_000.0
    eps: float = 1e-5
    qk_norm: bool = False
    tied: bool = False
    stretch: tuple[float, float, float, float] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) in (int, float) and not value > 0:
                raise RidgelineError(f"lm: {field.name} must be positive, but is {value}")
        if self.heads % self.groups:
            raise RidgelineError(f"lm: heads must be a multiple of key_heads, but are {self.heads} and {self.groups}")
        if self.head_dim is None and self.width % self.heads:
            raise RidgelineError(f"lm: width must be a multiple of heads, but they are {self.width} and {self.heads}")
        if self.dim % 2:
            raise RidgelineError(f"lm: head_dim must be even for rotary embeddings, but is {self.dim}")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def dim(self) -> int:
        """Columns of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers the model holds."""
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.layers * self.per_layer + self.width

    @property
    def per_layer(self) -> int:
        """How many numbers a layer holds."""
        attention = self.width * self.dim * (2 * self.heads + 2 * self.groups) + 2 * self.dim * self.qk_norm
        return attention + 3 * self.width * self.hidden + 2 * self.width

    def products(self, tokens: int) -> int:
        """The operations of a forward pass's matrix products with weights, for this many tokens."""
        return 2 * tokens * (self.layers * (self.per_layer - 2 * self.width) + self.vocabulary * self.width)

    def scores(self, batch: int, context: int, causal: bool = True) -> int:
        """The operations of a forward pass's attention: both products, over the pairs that see each other."""
        pairs = context * (context + 1) // 2 if causal else context * context
        return 4 * batch * self.layers * self.heads * self.dim * pairs

    def step(self, batch: int, context: int) -> int:
        """The operations of forward and backward without recomputation: backward's products are twice forward's, and
        its attention makes the scores again (2.5 times forward's)."""
        return 3 * self.products(batch * context) + self.scores(batch, context) * 7 // 2


# The assignment's (Stanford CS336, assignment 2, version 26.1.1 and, "-2025", the edition before): gated MLPs, untied.
SIZES = {
    "tiny": Size(2, 64, 128, 4, vocabulary=256),
    "small": Size(12, 768, 3072, 12),
    "medium": Size(24, 1024, 4096, 16),
    "large": Size(36, 1280, 5120, 20),
    "xl": Size(32, 2560, 10240, 32),
    "10b": Size(50, 4608, 12288, 36),
    "xl-2025": Size(48, 1600, 6400, 25),
    "2.7b-2025": Size(32, 2560, 10240, 32),
    "leaderboard": Size(34, 4096, 11008, 32, vocabulary=151_936),
    "llama-1b": Size(16, 2048, 8192, 32, 8, 64, 128_256, 500_000.0, tied=True),
    "llama-8b": Size(32, 4096, 14336, 32, 8, 128, 128_256, 500_000.0),
    "qwen3-0.6b": Size(28, 1024, 3072, 16, 8, 128, 151_936, 1_000_000.0, 1e-6, qk_norm=True, tied=True),
}


def size(name: str, **changes: Any) -> Size:
    """Returns the size of that name, with the changes that are not None. Raises RidgelineError on an unknown name."""
    if name not in SIZES:
        raise RidgelineError(f"lm: there is no size {name!r}; the sizes are {', '.join(SIZES)}")
    return replace(SIZES[name], **{k: v for k, v in changes.items() if v is not None})


def described(size: Size) -> dict[str, Any]:
    """Returns the size as plain values, for rows and checkpoints."""
    return asdict(size)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the rows to this file of JSON lines")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace) -> int:
    """Prints every named size."""
    rows = {n: described(s) | {"parameters": s.parameters, "step_flops": s.step(1, 512)} for n, s in SIZES.items()}
    if options.record:
        from ridgeline.lm import lab  # here, because it imports torch

        lab.recordable(options.record)
        lab.record(options.record, [{"size": name} | row for name, row in rows.items()], "sizes")
    if options.json:
        print(json.dumps(rows))
        return 0
    from ridgeline.lm import lab

    figures = "parameters", "layers", "width", "hidden", "heads/keys", "head", "vocabulary", "step of 512 tokens"
    shown = []
    for name, s in SIZES.items():
        counts = s.layers, s.width, s.hidden, f"{s.heads}/{s.groups}", s.dim, s.vocabulary
        step = f"{s.step(1, 512) / 1e12:.2f} TFLOP"
        shown.append([name, f"{s.parameters / 1e6:.1f} M", *map(str, counts), step])
    lab.print_table(None, ["size"], figures, shown)
    return 0
