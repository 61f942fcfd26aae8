"""gated_linear: y = activation(x G^T) * (x U^T), the first half of a gated feed-forward layer (SwiGLU, GEGLU).

    z = x G^T,  up = x U^T
    backward: dz = dy up activation'(z),  dup = dy activation(z),  dx = dz G + dup U,  dG = dz^T x,  dU = dup^T x

The two products share x and meet in registers: x is read once, and z and up are written only if backward needs them.
Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl  # noqa: F401 - Triton's interpreter looks it up in a kernel's module

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _gated
from ridgeline.ops.matmul._epilogue import ACTIVATIONS, gate, ungate
from ridgeline.ops.matmul.matmul import (
    HOPPER,
    PADDED,
    agree,
    by_triton,
    in_autocast,
    of_any_strides,
    precision,
    product,
    rows_of,
)
from ridgeline.select import by_kind, eager, run

_T = torch.Tensor


def _triton(y: _T, z: _T, z_up: _T, x: _T, weight: _T, up: _T, activation: str, how: str) -> None:
    """Fills y, and z and z_up if they have elements."""
    if not z.numel():
        z, z_up = torch.empty_like(y), torch.empty_like(y)
    by_triton(z, x, weight.mT, how)
    by_triton(z_up, x, up.mT, how)
    gate(y, z, z_up, activation)


@kernel_op(
    "gated_linear_fwd(Tensor x, Tensor gate, Tensor up, str activation, bool keep, str precision, str? impl) "
    "-> (Tensor, Tensor, Tensor)"
)
def _fwd_op(x: _T, weight: _T, up: _T, activation: str, keep: bool, how: str, impl: str | None) -> tuple[_T, _T, _T]:
    shape = x.shape[0], weight.shape[0]
    y, z, z_up = x.new_empty(shape), x.new_empty(shape if keep else (0,)), x.new_empty(shape if keep else (0,))
    run(GATED_LINEAR, "fwd", impl, (y, z, z_up), x, weight, up, activation, how)
    return y, z, z_up


@kernel_op("gated_linear_bwd(Tensor dy, Tensor z, Tensor up, str activation) -> (Tensor, Tensor)")
def _bwd_op(dy: _T, z: _T, up: _T, activation: str) -> tuple[_T, _T]:
    dz, dup = torch.empty_like(z), torch.empty_like(z)
    ungate(dz, dup, dy, z, up, activation)
    return dz, dup


@kernel_op("gated_linear_again(Tensor dy, Tensor z, Tensor up, str activation) -> (Tensor, Tensor, Tensor)")
def _again_op(dy: _T, z: _T, up: _T, activation: str) -> tuple[_T, _T, _T]:
    """Returns dz, dup and y = activation(z) * up itself, for a backward that has not saved y; all are contiguous."""
    dz, dup, y = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z)
    ungate(dz, dup, dy, z, up, activation, y)
    return dz, dup, y


class _Function(Function):
    @staticmethod
    def forward(ctx: Any, x: _T, weight: _T, up: _T, activation: str, keep: bool, impl: str | None) -> _T:
        y, *kept = _fwd_op(x, weight, up, activation, keep, precision(), impl)
        ctx.save_for_backward(x, weight, up, *kept)
        ctx.activation, ctx.impl = activation, of_any_strides(impl)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        x, weight, up, *kept = ctx.saved_tensors
        dz, dup = _bwd_op(dy.contiguous(), *kept, ctx.activation)
        wanted = ctx.needs_input_grad
        dx = product(dz, weight, ctx.impl) + product(dup, up, ctx.impl) if wanted[0] else None
        dweight = product(dz.mT, x, ctx.impl) if wanted[1] else None
        return dx, dweight, product(dup.mT, x, ctx.impl) if wanted[2] else None, None, None, None


def reference(x: _T, gate: _T, up: _T, *, activation: str = "silu") -> _T:
    return ACTIVATIONS[activation](F.linear(x, gate)) * F.linear(x, up)


def gated_linear(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, activation: str = "silu", return_products: bool = False,
    impl: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns `activation(x @ gate.T) * (x @ up.T)`, (..., N). Gradients flow to x, gate and up.

    x: (..., K); gate, up: (N, K), laid out as the weights of `torch.nn.Linear`; one dtype and device, any strides.
    activation: "silu", "gelu" or "gelu_tanh". Fused implementations round once; PyTorch also rounds both products.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts all inputs first.
    return_products: returns (y, x @ gate.T, x @ up.T), for a backward pass of the caller's own; no gradients flow then.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, gate, up = in_autocast(x, gate, up)
    (plain,) = _look(x, gate, up, activation, impl)
    if return_products:
        return _with_products(plain, x.detach(), gate.detach(), up.detach(), activation, impl)
    if plain is not None:
        return plain.call(x, gate, up, activation=activation)
    keep = torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or up.requires_grad)
    y = differentiate(_Function, rows_of(x), gate, up, activation, keep, impl)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], gate.shape[0])


def _with_products(
    plain: Implementation | None, x: _T, weight: _T, up: _T, activation: str, impl: str | None
) -> tuple[_T, _T, _T]:
    if plain is not None:
        z, z_up = F.linear(x, weight), F.linear(x, up)
        return ACTIVATIONS[activation](z) * z_up, z, z_up
    shape = *x.shape[:-1], weight.shape[0]
    y, z, z_up = _fwd_op(rows_of(x), weight, up, activation, True, precision(), impl)
    return y.view(shape), z.view(shape), z_up.view(shape)


@by_kind(3, plain=True)
def _look(x: _T, gate: _T, up: _T, activation: str, impl: str | None) -> tuple[Implementation | None]:
    agree("gated_linear", x=x, gate=gate, up=up)
    if not isinstance(activation, str) or activation not in ACTIVATIONS or not activation:
        raise RidgelineError(f"gated_linear: activation must be 'silu', 'gelu' or 'gelu_tanh', got {activation!r}")
    if gate.dim() != 2 or not x.dim() or x.shape[-1] != gate.shape[1] or gate.shape != up.shape:
        shapes = f"{tuple(x.shape)}, {tuple(gate.shape)} and {tuple(up.shape)}"
        raise RidgelineError(f"gated_linear: x must be (..., K), gate and up (N, K), got {shapes}")
    return (eager(GATED_LINEAR, impl, x, gate, up),)


def cost(x: _T, gate: _T, up: _T, *, activation: str = "silu") -> tuple[Cost, Cost]:
    rows = x.numel() // max(1, x.shape[-1])
    flops, y, inputs = 4 * rows * gate.numel(), rows * gate.shape[0] * x.element_size(), nbytes(x, gate, up)
    return Cost(inputs, y, flops), Cost(3 * y + inputs, inputs, 2 * flops)


def _case(rows: int, N: int, K: int, use: str, **options: Any) -> Case:
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    weight = Spec(N, K)
    name = " ".join([f"{rows}x{K} -> {N}", *options.values()])
    return Case(name, (Spec(rows, K), weight, weight), options, dtypes=dtypes, use=use)


GATED_LINEAR = Op(
    gated_linear,
    reference=reference,
    cost=cost,
    sharding="x ...K, gate nK, up nK -> ...n",
    # The activation alone; the products are matmul's or torch's.
    flops={"gated_linear_bwd": lambda *_: 0, "gated_linear_again": lambda *_: 0},
    cases=[
        _case(67, 40, 45, "check"),
        _case(33, 17, 64, "check", activation="gelu"),
        _case(33, 24, 32, "check", activation="gelu_tanh"),
        _case(512, 512, 512, "quick"),
        _case(8192, 14336, 4096, "bench"),
        _case(16384, 8192, 2048, "bench"),
    ],
)

GATED_LINEAR.eager(
    "torch", "PyTorch's own in four kernels: two cuBLAS products, then two passes", reference, served=True
)
GATED_LINEAR.compiled("two products; activation and multiplication fused into one pass by torch.compile")
GATED_LINEAR.kernel("triton", "two Triton products, then one pass", kind="triton", fwd=_triton, bwd=_triton)
GATED_LINEAR.kernel("gluon_padded", PADDED, **_gated.PADDED, **HOPPER)
FUSED = "both products in one Hopper kernel: half of each tile is the gate's, and they meet in registers"
GATED_LINEAR.kernel("gluon", FUSED, **_gated.WHOLE, **HOPPER)
