"""bias_mask_scale_add: y = (x + bias) mask scale + add: the end of a layer with dropout and a residual.

    backward: dx = dy mask scale,  dbias = the sum of dx over all rows,  dadd = dy

The dropout mask is an input. One pass reads three tensors and the mask's bytes; backward reads dy and the mask, writes
dx and accumulates dbias; dadd is dy itself. Source: the fused elementwise kernels of OneFlow.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401 - Triton's interpreter looks for it in a kernel's module

from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.pointwise._generator import Pointwise, promoted


@triton.jit
def _fwd(x, bias, mask, add, scale):
    return (x + bias) * mask * scale + add


@triton.jit
def _bwd(dy, mask, scale):
    dx = dy * mask * scale
    return dx, dx


KERNELS = Pointwise(
    "bias_mask_scale_add",
    ["x", "bias", "mask", "add"],
    {"": _fwd},
    {"": _bwd},
    saves=["mask"],
    passes=["add"],
    fixed=["mask"],
    floating=True,
)


def reference(x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float, add: torch.Tensor) -> torch.Tensor:
    return (x + bias) * mask * scale + add


def bias_mask_scale_add(
    x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float, add: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """`(x + bias) * mask * scale + add`, element by element.

    x: (..., n). bias: (n). mask: boolean or floating point, without a gradient. scale: a number. add: like x.
    mask and add may broadcast. All are on one device; the result has PyTorch's promoted dtype.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """
    if type(scale) is not float:
        if not isinstance(scale, int | float):
            raise RidgelineError(f"bias_mask_scale_add: scale must be a number, but is {type(scale).__name__}")
        scale = float(scale)
    (plain,) = KERNELS.look(x, bias, mask, add, impl)
    if mask.requires_grad and torch.is_grad_enabled():
        raise RidgelineError("bias_mask_scale_add: mask has no gradient, but requires one; give mask.detach()")
    if bias.dim() != 1 or x.shape[-1:] != bias.shape:
        found = f"x is {tuple(x.shape)} and bias {tuple(bias.shape)}"
        raise RidgelineError(f"bias_mask_scale_add: bias must be as long as x's last dimension, but {found}")
    return plain(x, bias, mask, scale, add) if plain else KERNELS(impl, x, bias, mask, add, scalars=(scale,))


def cost(x: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, scale: float, add: torch.Tensor) -> tuple[Cost, Cost]:
    count = torch.broadcast_shapes(x.shape, mask.shape, add.shape).numel()
    y = count * promoted((x, bias, mask, add)).itemsize
    return Cost(nbytes(x, bias, mask, add), y, 4 * count), Cost(y + nbytes(mask), nbytes(x, bias), 3 * count)


def _case(name: str, rows: int, columns: int, mask: Spec, use: str = "check", **facts: Any) -> Case:
    return Case(name, (Spec(rows, columns), Spec(columns), mask, 1.25, Spec(rows, columns)), use=use, **facts)


def _mask(*shape: int) -> Spec:
    return Spec(*shape, dtype="bool", high=2)


KERNELS.op = BIAS_MASK_SCALE_ADD = Op(
    bias_mask_scale_add,
    reference=reference,
    cost=cost,
    sharding="x *, bias *, mask *, add * -> *",
    flops={
        "bias_mask_scale_add_fwd": lambda x, bias, mask, add, *_: cost(x, bias, mask, 1.0, add)[0].flops,
        "bias_mask_scale_add_bwd": lambda dy, *_: 3 * dy.numel(),
    },
    cases=[
        _case("33x129", 33, 129, _mask(33, 129)),
        _case("33x128 mask of floats", 33, 128, Spec(33, 128, grad=False)),
        _case("33x129 mask of rows", 33, 129, _mask(33, 1)),
        _case("1024x1024", 1024, 1024, _mask(1024, 1024), "quick"),
        _case("16384x4096", 16384, 4096, _mask(16384, 4096), "bench", dtypes=("float16", "bfloat16")),
    ],
)

BIAS_MASK_SCALE_ADD.eager("naive", "the formula in eager PyTorch: four passes over memory", reference, served=True)
BIAS_MASK_SCALE_ADD.compiled("the formula fused by torch.compile; in backward, another kernel for the sum")
KERNELS.triton("one pass; the backward kernel that writes dx also accumulates the bias's gradient")
