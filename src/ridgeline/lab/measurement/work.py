"""The rows of one piece of work: what all of its implementations share, and what cannot be true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.lab import units
from ridgeline.lab.measurement.columns import UNTIMED
from ridgeline.lab.measurement.limits import roof_seconds

if TYPE_CHECKING:
    from ridgeline.lab.measurement.clock import Measurement
    from ridgeline.op import Cost, Implementation

Row = dict[str, Any]
ABOVE = 1.03  # a figure this far above the interval of its roof (the machine's measured limit) is a mistake
PEERS = ("torch", "compile")


@dataclass
class Work:
    """One case of one op in one dtype and direction: what its rows have in common."""

    op: str
    case: str
    dtype: str
    direction: str
    cost: Cost
    roof: Row
    cache: int

    @property
    def units(self) -> str:
        """The dtype whose rate of matrix products bounds the work."""
        return self.cost.units or self.dtype

    @property
    def cached(self) -> bool:
        """Whether the working set is small enough for the cache to help."""
        return self.cost.bytes < 4 * self.cache

    def row(
        self,
        rung: Implementation,
        status: str,
        reason: str | None = None,
        found: Measurement | None = None,
        law: float | None = None,
    ) -> Row:
        from ridgeline.lab.measurement.peers import Peer

        cost = self.cost
        least, bound = roof_seconds(self.roof, self.units, cost.read, cost.write, cost.flops)
        row: Row = {"type": "bench", "op": self.op, "case": self.case, "dtype": self.dtype, "direction": self.direction}
        row |= {
            "impl": rung.name,
            "kind": rung.kind,
            "peer": rung.name in PEERS or isinstance(rung, Peer),
            "status": status,
            "reason": reason,
        }
        row |= {"bytes": cost.bytes, "read": cost.read, "write": cost.write, "flops": cost.flops}
        row |= {"roof_seconds": least, "bound": bound, "cached": self.cached} | UNTIMED | {"law": law}
        if found is None:
            return row
        row |= {
            "seconds": found.seconds,
            "host_us": found.host_us,
            "share": least / found.median,
            "peak_bytes": found.peak_bytes,
        }
        row |= {"held_bytes": found.held_bytes, "mhz": found.mhz, "throttled": found.throttled}
        if refusal := self._too_good(found.median):
            row |= {"status": "refused", "reason": refusal}
        return row

    def _too_good(self, seconds: float) -> str | None:
        """The reason why a time cannot be true (it beats the roof and no cache explains it), or None."""
        least, bound = roof_seconds(self.roof, self.units, self.cost.read, self.cost.write, self.cost.flops, end="high")
        if least < seconds * ABOVE or (bound == "memory" and self.cached):
            return None
        above = units.percent(least / seconds - 1)
        return f"{units.seconds(seconds)} is {above} above the measured roof's interval, which cannot be"
