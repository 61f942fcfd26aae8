"""Random arguments of a decoder's step."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Spec


class Filled(Spec):
    """Lengths of which every one is `high`, or with a step counts down from it."""

    def make(self, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
        return torch.full(self.shape, self.high, dtype=torch.int32, device=device)


class Table(Spec):
    """A block table (B, most) that owns every block once, in a mixed order."""

    def make(self, dtype: torch.dtype, device: Any, generator: Any) -> torch.Tensor:
        count = self.shape[0] * self.shape[1]
        if torch.device(device).type == "meta":
            return torch.empty(self.shape, dtype=torch.int32, device=device)
        return torch.randperm(count, device=device, generator=generator).to(torch.int32).view(self.shape)
