"""An op whose kernels `torch.compile` and export look into: `triton_op`, with each kernel wrapped."""

import torch
import triton
from common import backward, checked, reference, setup_context
from plain_triton import kernel


@torch.library.triton_op("ridgeline_triton_op::silu", mutates_args=())
def silu(x: torch.Tensor) -> torch.Tensor:
    x = checked(x)
    y = torch.empty_like(x)
    torch.library.wrap_triton(kernel)[(triton.cdiv(x.numel(), 256),)](y, x, x.numel(), BLOCK=256)
    return y


@silu.register_kernel("cpu")
def _(x: torch.Tensor) -> torch.Tensor:
    return reference(checked(x))


silu.register_autograd(backward, setup_context=setup_context)
