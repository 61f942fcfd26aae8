"""The closed-form limits of the assignment: how many GPUs before communication takes longer than compute.

docs/parallel_limits.md derives each. S: bytes. W: bytes/s that a GPU sends. C: FLOP/s. B: tokens of a step, D: width,
F: hidden size of an MLP of three products; 16-bit numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


def ring_gather(n: int, nbytes: float, w: float) -> float:
    """Returns the seconds of a ring's all-gather or reduce-scatter: n - 1 rounds of a part of S / n."""
    return (n - 1) / n * nbytes / w


def ring_all_reduce(n: int, nbytes: float, w: float) -> float:
    """Returns the seconds of a ring's all-reduce: a reduce-scatter and an all-gather."""
    return 2 * ring_gather(n, nbytes, w)


def alternate_all_reduce(n: int, nbytes: float, w: float) -> float:
    """Returns the seconds of the ring that passes whole tensors on: n - 1 rounds of S."""
    return (n - 1) * nbytes / w


def bucket_overhead(buckets: float, nbytes: float, w: float, call: float) -> float:
    """Returns the seconds that gradients in buckets add to backward, if computing a bucket takes as long as moving it:
    the last bucket's transfer, which nothing hides, and `call` seconds for each bucket."""
    return nbytes / (buckets * w) + buckets * call


def best_buckets(nbytes: float, w: float, call: float) -> tuple[float, float]:
    """Returns the number of buckets with the least overhead, sqrt(S / (W o)), and the bytes of each, sqrt(S W o)."""
    return (nbytes / (w * call)) ** 0.5, (nbytes * w * call) ** 0.5


@dataclass(frozen=True)
class Ffn:
    """The model of the assignment of 2025: blocks of two products, D x F and F x D, and nothing else."""

    width: int
    hidden: int
    blocks: int

    @property
    def parameters(self) -> int:
        return 2 * self.width * self.hidden * self.blocks

    def states(self, ranks: int = 1) -> float:
        """Returns the bytes of weights, gradients and two moments in float32, of one of so many ranks."""
        return 16 * self.parameters / ranks

    def saved(self, tokens: float) -> float:
        """Returns the bytes that a step of these tokens keeps for backward in 16 bits: each product's input."""
        return 2 * tokens * (self.width + self.hidden) * self.blocks

    def forward(
        self, tokens: float, fsdp: int, tensor: int, flops: float, egress: float, links: tuple[int, int] = (1, 1)
    ) -> tuple[float, float, float]:
        """Returns a block's seconds of forward: compute, FSDP's gather of weights, tensor parallelism's of activations.

        tokens: of all ranks. links: each of `egress` bytes/s, that the two axes have. For large groups: (N - 1) / N is
        1."""
        compute = 4 * tokens * self.width * self.hidden / (fsdp * tensor * flops)
        weights = 4 * self.width * self.hidden / (tensor * links[0] * egress)
        return compute, weights, 4 * tokens * self.width / (fsdp * links[1] * egress)

    def least_tokens(self, fsdp: int, flops: float, egress: float, links: int = 1) -> float:
        """Returns the fewest tokens of all ranks whose products hide FSDP's gathers: B >= X C / (M W)."""
        return fsdp * flops / (links * egress)

    def hides_tensor(self, tensor: int, flops: float, egress: float, links: int = 1) -> bool:
        """Returns whether products hide tensor parallelism's transfers, whatever the tokens: Y <= M F W / C."""
        return tensor <= links * self.hidden * egress / flops


@dataclass(frozen=True)
class Mlp:
    """The assignment's MLP. tokens: B, of all GPUs; width: D; hidden: F; flops: C; egress: W."""

    tokens: float
    width: int
    hidden: int
    flops: float
    egress: float

    def data(self, n: int) -> tuple[float, float]:
        """Returns data parallelism's seconds of backward on n GPUs: compute, and the all-reduce of three gradients."""
        compute = 12 * self.tokens * self.width * self.hidden / n / self.flops
        return compute, ring_all_reduce(n, 6 * self.width * self.hidden, self.egress)

    def sharded(self, n: int, *, backward: bool = False) -> tuple[float, float]:
        """Returns FSDP's seconds on n GPUs: compute, and the gather of three weights (and their gradients' scatter)."""
        one = ring_gather(n, 6 * self.width * self.hidden, self.egress)
        work = 6 * self.tokens * self.width * self.hidden / n / self.flops
        return (2 * work, 2 * one) if backward else (work, one)

    def tensor(self, n: int, *, backward: bool = False) -> tuple[float, float]:
        """Returns tensor parallelism's seconds on n GPUs: compute, and one all-reduce of activations."""
        work = 6 * self.tokens * self.width * self.hidden / n / self.flops
        moved = ring_all_reduce(n, 2 * self.tokens * self.width, self.egress)
        return (2 * work if backward else work), moved

    def both(self, fsdp: int, tensor: int, *, together: bool = True) -> tuple[float, float]:
        """Returns forward's seconds of FSDP over `fsdp` times tensor parallelism over `tensor` GPUs: compute, and the
        longer of the two communications if they run together, else their sum. For large groups: (N - 1) / N is 1."""
        work = 6 * self.tokens * self.width * self.hidden / (fsdp * tensor) / self.flops
        weights = 6 * self.width * self.hidden / (tensor * self.egress)
        activations = 4 * self.tokens * self.width / (fsdp * self.egress)
        return work, max(weights, activations) if together else weights + activations

    @property
    def most_data(self) -> float:
        """The most GPUs of data parallelism, and of FSDP forward and backward: N <= 1 + B W / C."""
        return 1 + self.tokens * self.egress / self.flops

    def most_tensor(self, *, backward: bool = False) -> float:
        """Returns the most GPUs of tensor parallelism: N <= 1 + 1.5 F W / C, backward twice as many."""
        return 1 + (3 if backward else 1.5) * self.hidden * self.egress / self.flops

    def most_both(self, *, together: bool = True) -> float:
        """Returns the most GPUs of both at once: N <= 1.5 B F W^2 / C^2; a quarter of it one after the other."""
        found = 1.5 * self.tokens * self.hidden * (self.egress / self.flops) ** 2
        return found if together else found / 4

    def split(self, *, together: bool = True) -> tuple[float, float]:
        """Returns how `most_both` divides: GPUs of FSDP, and of tensor parallelism."""
        fsdp, tensor = self.tokens * self.egress / self.flops, 1.5 * self.hidden * self.egress / self.flops
        return (fsdp, tensor) if together else (fsdp / 2, tensor / 2)
