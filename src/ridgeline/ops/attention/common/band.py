"""Which keys a query sees by its position alone: the one rule that causal, windows and a prefix reduce to."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Band(NamedTuple):
    """Row i sees the columns from i + low to i + high, and those before `prefix`."""

    low: int
    high: int
    prefix: int = 0

    def seen(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Returns (rows, columns), True where a row sees a column."""
        j = torch.arange(columns, device=device)
        apart = j - torch.arange(rows, device=device)[:, None]
        inside = (apart >= self.low) & (apart <= self.high)
        return inside | (j < self.prefix) if self.prefix else inside

    def moved(self, row: int, column: int) -> Band:
        """Returns the band as seen from a piece of the scores that begins at a row and a column."""
        apart = row - column
        return Band(self.low + apart, self.high + apart, max(self.prefix - column, 0))

    def meets(self, rows: slice, columns: slice) -> bool:
        """Returns whether any of the rows sees any of the columns: a causal loop stops at the diagonal."""
        inside = columns.stop > rows.start + self.low and columns.start < rows.stop + self.high
        return inside or columns.start < self.prefix

    def pairs(self, rows: int, columns: int) -> int:
        """Returns how many pairs of a row and a column see each other. A prefix comes without a lower edge."""
        i = torch.arange(rows)
        last = (i + self.high).clamp(min=self.prefix - 1, max=columns - 1)
        return int((last - (i + self.low).clamp(min=0) + 1).clamp(min=0).sum())
