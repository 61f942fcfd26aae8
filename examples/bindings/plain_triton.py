"""A Triton kernel, started from Python. Nothing is registered; `torch.compile` sees the kernel all the same."""

import torch
import triton
import triton.language as tl
from common import checked, differentiable


@triton.jit
def kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x / (1 + tl.exp(-x)), mask=i < n)


def forward(x: torch.Tensor) -> torch.Tensor:
    x = checked(x)
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 256),)](y, x, x.numel(), BLOCK=256)
    return y


silu = differentiable(forward)
