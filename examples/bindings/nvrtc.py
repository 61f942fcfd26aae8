"""CUDA C++ compiled at run time by NVRTC, as Ridgeline's own .cu files are: no nvcc, no C++ compiler, 50 ms."""

from pathlib import Path

import torch
from common import checked, differentiable

from ridgeline.lab import Inline

kernel = Inline(Path(__file__).with_name("silu.cu").read_text(), "silu_kernel")


def forward(x: torch.Tensor) -> torch.Tensor:
    x = checked(x)
    y = torch.empty_like(x)
    kernel[(x.numel() + 255) // 256, 256](y, x, x.numel())
    return y


silu = differentiable(forward)
