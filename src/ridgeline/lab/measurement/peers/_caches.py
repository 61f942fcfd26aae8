"""A decoder's step as other packages take it: queries that attend to full caches, and nothing else.

No peer reads lengths on the host, so those that take none attend to the whole cache. The law finds a wrong result if a
cache is not full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

WORDS = {
    "k": "appends no tokens: it would be another kernel",
    "cos": "rotates nothing",
    "k_scale": "reads no quantised cache",
    "sinks": "has no sinks",
    "tree": "is timed without a tree",
    "softcap": "is timed without a softcap",
    "window": "is timed without a window",
    "return_lse": "is timed without lse",
    "invariant": "does not promise a result that is independent of the batch",
    "block_table": "is timed without a block table",
}
ALWAYS = tuple(name for name in WORDS if name != "block_table")


@dataclass
class Step:
    """The arguments of decode_attention. q: (B, S, Hq, D), k, v: the caches."""

    package: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    options: dict[str, Any]

    @classmethod
    def of(
        cls, package: str, q: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, lengths: torch.Tensor, /,
        **options: Any,
    ) -> Step:  # fmt: skip
        """Returns the step. Raises RidgelineError if it does more than to attend to a cache of q's dtype."""
        step = cls(package, q, cache_k, cache_v, lengths, options)
        step.refuse(*ALWAYS)
        if step.k.dtype != step.q.dtype:
            raise RidgelineError(f"{package} {WORDS['k_scale']}")
        return step

    def refuse(self, *names: str) -> None:
        """Raises RidgelineError, with the reason, if the call has one of these options."""
        for name in names:
            if self.options.get(name) is not None and self.options[name] is not False:
                raise RidgelineError(f"{self.package} {WORDS[name]}")

    @property
    def scale(self) -> float | None:
        return self.options.get("scale")

    @property
    def table(self) -> torch.Tensor | None:
        return self.options.get("block_table")

    def heads_first(self) -> list[torch.Tensor]:
        """Returns q, k and v as (B, heads, tokens, D)."""
        return [t.transpose(1, 2) for t in (self.q, self.k, self.v)]
