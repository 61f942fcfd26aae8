"""Data whose sum says something of a kernel that makes it."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Spec


class Positive(Spec):
    """Numbers from 0 to 1; whole ones from all that there are. A sum of normal ones cancels, and how near it comes to zero decides
    whether one rounding more is much."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if self.dtype else dtype
        if dtype.is_floating_point:
            base = torch.float64 if dtype == torch.float64 else torch.float32
            return (
                torch.rand(self.shape, dtype=base, device=device, generator=generator)
                .to(dtype)
                .requires_grad_(self.grad)
            )
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min, ends.max, self.shape, dtype=dtype, device=device, generator=generator)


class Signs(Spec):
    """-1 and 1, one element in `high`; the others are 0."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        signs = torch.randint(0, 2, self.shape, dtype=torch.int8, device=device, generator=generator) * 2 - 1
        if self.high > 1:
            signs *= torch.randint(0, self.high, self.shape, dtype=torch.int16, device=device, generator=generator) == 0
        return signs.to(dtype).requires_grad_(self.grad)


class Strided(Positive):
    """Every second element of twice as many."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args).detach()
        return torch.stack([made, made], -1)[..., 0].requires_grad_(self.grad)
