"""The same by `torch.library.custom_op`, which reads the schema from the types and checks for aliases at each call."""

import torch
from common import backward, checked, reference, setup_context
from plain_triton import forward


@torch.library.custom_op("ridgeline_custom_op::silu", mutates_args=(), device_types="cuda")
def silu(x: torch.Tensor) -> torch.Tensor:
    return forward(x)


@silu.register_kernel("cpu")
def _(x: torch.Tensor) -> torch.Tensor:
    return reference(checked(x))


silu.register_fake(torch.empty_like)
silu.register_autograd(backward, setup_context=setup_context)
