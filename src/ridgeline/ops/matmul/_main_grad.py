"""The gradient of a linear layer's weight, added to a float32 buffer in the product's epilogue.

    main_grad += dy^T x

Nothing of the weight's size is written in half precision, and no pass adds it. cuBLAS does it by beta = 1 and an output
in float32; the Triton product of `matmul` takes the buffer as its residual and its result.
Source: gradient_accumulation_fusion of Megatron-LM.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import Function, first_order, kernel_op
from ridgeline.op import RidgelineError
from ridgeline.ops.matmul.matmul import by_triton, precision


@kernel_op("linear_add(Tensor(a!) main_grad, Tensor dy, Tensor x, str precision, bool triton) -> ()")
def _add(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, how: str, triton: bool) -> None:
    if triton:
        by_triton(main_grad, dy.mT, x, how, residual=main_grad)
    elif x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(main_grad, dy.mT, x, out_dtype=torch.float32, out=main_grad)
    elif x.dtype == torch.float32:
        torch.addmm(main_grad, dy.mT, x, out=main_grad)
    else:  # a CPU's products have no other output, and float64 has no such buffer
        wide = torch.promote_types(x.dtype, torch.float32)
        main_grad.add_(dy.mT.to(wide) @ x.to(wide))


class Tap(Function):
    """Passes a layer's product on. Backward adds the weight's gradient to the buffer; the weight itself gets none."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, triton: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x.detach())
        ctx.triton, ctx.main_grad = triton, main_grad  # not saved: another use of the weight may add to it before
        return y.view_as(y)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        if rows.numel():
            _add(ctx.main_grad, rows, x.reshape(-1, x.shape[-1]), precision(), ctx.triton)
        return dy, None, None, None, None


def check(main_grad: Any, weight: torch.Tensor, op: str = "linear") -> None:
    if not isinstance(main_grad, torch.Tensor):
        raise RidgelineError(f"{op}: main_grad must be a tensor or None, got {type(main_grad).__name__}")
    right = main_grad.dtype == torch.float32 and main_grad.shape == weight.shape and main_grad.is_contiguous()
    if not right or main_grad.requires_grad or main_grad.device != weight.device:
        wanted = f"a contiguous float32 buffer {tuple(weight.shape)} on {weight.device} that needs no gradient"
        found = f"{main_grad.dtype} {tuple(main_grad.shape)} with strides {main_grad.stride()} on {main_grad.device}"
        raise RidgelineError(f"{op}: main_grad must be {wanted}, got {found}")
