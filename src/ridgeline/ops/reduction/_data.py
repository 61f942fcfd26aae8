"""Random data on which a wrong sum shows."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Spec


class Positive(Spec):
    """Uniform numbers from 0 to 1; integers from their dtype's whole range.

    Sums of normal numbers cancel, and one rounding more may then matter much or little, by luck.
    """

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if self.dtype else dtype
        if dtype.is_floating_point:
            base = torch.float64 if dtype == torch.float64 else torch.float32
            made = torch.rand(self.shape, dtype=base, device=device, generator=generator)
            return made.to(dtype).requires_grad_(self.grad)
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min, ends.max, self.shape, dtype=dtype, device=device, generator=generator)


class Signs(Spec):
    """-1 or 1 in about one element of `high`; 0 in the others."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        signs = torch.randint(0, 2, self.shape, dtype=torch.int8, device=device, generator=generator) * 2 - 1
        if self.high > 1:
            signs *= torch.randint(0, self.high, self.shape, dtype=torch.int16, device=device, generator=generator) == 0
        return signs.to(dtype).requires_grad_(self.grad)


class Strided(Positive):
    """Every second element of a tensor twice as long."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args).detach()
        return torch.stack([made, made], -1)[..., 0].requires_grad_(self.grad)
