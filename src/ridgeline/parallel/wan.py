"""Sites joined by slow links: local steps, 8-bit exchange, and what an exchange in the background makes stale."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of a number on its way between sites
LOCAL = (1, 10, 50, 100, 500)  # steps between exchanges


@dataclass(frozen=True)
class Exchange:
    """Training over sites that average their weights every `local` steps (DiLoCo).

    step: seconds of a step at a site; move: seconds of an exchange; stale: steps by which what arrives is old, where
    an exchange runs in the background."""

    local: int
    step: float
    move: float

    @property
    def utilisation(self) -> float:
        """The share of time that computes, where all wait for the exchange."""
        return self.local * self.step / (self.local * self.step + self.move)

    @property
    def hidden(self) -> float:
        """The share of time that computes, where the exchange runs under the local steps that follow."""
        return min(1.0, self.local * self.step / self.move) if self.move else 1.0

    @property
    def stale(self) -> int:
        """Steps that pass while an exchange in the background is on its way."""
        return math.ceil(self.move / self.step)


def move_seconds(sites: int, nbytes: float, egress: float, latency: float) -> float:
    """Returns the seconds of an all-reduce over sites by a ring: 2 (N - 1) rounds of a part. egress: bytes/s."""
    if sites < 2:
        return 0.0
    return 2 * (sites - 1) * (latency + nbytes / sites / egress)


def exchanges(step: float, parameters: float, sites: int, egress: float, latency: float) -> dict[str, list[Exchange]]:
    """Returns the exchanges by their number format, for each number of local steps."""
    return {
        name: [Exchange(h, step, move_seconds(sites, width * parameters, egress, latency)) for h in LOCAL]
        for name, width in BYTES.items()
    }


def fewest(step: float, move: float, share: float) -> int:
    """Returns the fewest local steps with which at least this share of the time computes."""
    return max(1, math.ceil(move * share / (1 - share) / step))
