"""linear: y = activation(x W^T + b) + residual in one kernel, without intermediate results in memory.

    backward: dz = dy activation'(z),  dx = dz W,  dW = dz^T x,  db = sum of dz's rows,  dresidual = dy,  z = x W^T + b

The product is matmul's. Its epilogue works on the float32 sums in registers, so nothing is rounded or written in
between. z is written too if an activation needs it for backward, whose products are matmul's again.
Source: the fused epilogues of cuBLASLt and CUTLASS.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl  # noqa: F401 - Triton's interpreter looks it up in a kernel's module

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _linear, _main_grad
from ridgeline.ops.matmul._epilogue import ACTIVATIONS, undo
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
    sum_of_rows,
)
from ridgeline.select import by_kind, eager, run

_Maybe = torch.Tensor | None


def _triton(
    y: torch.Tensor, z: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, residual: _Maybe,
    activation: str, how: str
) -> None:  # fmt: skip
    """Fills y, and z if it has elements."""
    by_triton(y, x, weight.mT, how, z=z if z.numel() else None, bias=bias, residual=residual, activation=activation)


@kernel_op(
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str activation, bool keep, str precision, "
    "str? impl) -> (Tensor, Tensor)"
)
def _fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: _Maybe,
    residual: _Maybe,
    activation: str,
    keep: bool,
    how: str,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x.shape[0], weight.shape[0]
    y, z = x.new_empty(shape), x.new_empty(shape if keep else (0,))
    run(LINEAR, "fwd", impl, (y, z), x, weight, bias, residual, activation, how)
    return y, z


@kernel_op("linear_bwd(Tensor dy, Tensor z, str activation) -> Tensor")
def _bwd_op(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    dz = torch.empty_like(z)
    undo(dz, dy, z, activation)
    return dz


class _Function(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: _Maybe,
        residual: _Maybe,
        activation: str,
        keep: bool,
        impl: str | None,
    ) -> torch.Tensor:
        y, z = _fwd_op(x, weight, bias, residual, activation, keep, precision(), impl)
        ctx.save_for_backward(x, weight, z)
        ctx.activation, ctx.impl = activation, of_any_strides(impl)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, z = ctx.saved_tensors
        dz = _bwd_op(dy.contiguous(), z, ctx.activation) if ctx.activation and any(ctx.needs_input_grad[:3]) else dy
        dx = product(dz, weight, ctx.impl) if ctx.needs_input_grad[0] else None
        dw = product(dz.mT, x, ctx.impl) if ctx.needs_input_grad[1] else None
        db = sum_of_rows(dz) if ctx.needs_input_grad[2] else None
        return dx, dw, db, dy if ctx.needs_input_grad[3] else None, None, None, None


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: _Maybe = None,
    *,
    activation: str | None = None,
    residual: _Maybe = None,
) -> torch.Tensor:
    y = ACTIVATIONS[activation or ""](F.linear(x, weight, bias))
    return y if residual is None else y + residual


def _check(x: Any, weight: Any, bias: Any, activation: Any, residual: Any) -> None:
    agree("linear", x=x, weight=weight, **{n: t for n, t in (("bias", bias), ("residual", residual)) if t is not None})
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS or not activation):
        raise RidgelineError(f"linear: activation must be None, 'silu', 'gelu' or 'gelu_tanh', got {activation!r}")
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise RidgelineError(
            f"linear: x must be (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RidgelineError(f"linear: bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        shape = *x.shape[:-1], weight.shape[0]
        raise RidgelineError(f"linear: residual must have y's shape {shape}, got {tuple(residual.shape)}")


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None,
    residual: torch.Tensor | None = None, main_grad: torch.Tensor | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(x @ weight.T + bias) + residual`, (..., N). Gradients flow to all tensors.

    x: (..., K); weight: (N, K); bias: (N,) or None; residual: (..., N) or None; one dtype and device, any strides.
    activation: None, "silu", "gelu" or "gelu_tanh". Sums, activation and residual are float32 inside and rounded once.
    main_grad: a contiguous float32 buffer (N, K). Backward adds the weight's gradient to it, in the product's epilogue,
    and weight.grad stays as it is; an activation is then a pass of its own. None: the weight gets its gradient.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts all inputs first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    given = x, weight, bias, residual = in_autocast(x, weight, bias, residual)
    (plain,) = _look(*given, activation, impl)
    if main_grad is not None:
        _main_grad.check(main_grad, weight)
        if torch.is_grad_enabled() and weight.requires_grad:
            z = linear(x, weight.detach(), bias, impl=impl)
            z = ACTIVATIONS[activation or ""](differentiate(_main_grad.Tap, z, weight, x, main_grad, impl == "triton"))
            return z if residual is None else z + residual
    if plain is not None:
        return plain.call(x, weight, bias, activation=activation, residual=residual)
    keep = activation is not None and torch.is_grad_enabled()
    keep = keep and any([t is not None and t.requires_grad for t in given[:3]])
    flat = None if residual is None else rows_of(residual).contiguous()
    bias = None if bias is None else bias.contiguous()
    y = differentiate(_Function, rows_of(x), weight, bias, flat, activation or "", keep, impl)
    return y.view(*x.shape[:-1], weight.shape[0])


@by_kind(4, optional=2, plain=True)
def _look(
    x: Any, weight: Any, bias: Any, residual: Any, activation: str | None, impl: str | None
) -> tuple[Implementation | None]:
    """Checks a call and chooses."""
    _check(x, weight, bias, activation, residual)
    return (eager(LINEAR, impl, x, weight, bias, residual, activation=activation),)


def cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: _Maybe = None,
    *,
    activation: str | None = None,
    residual: _Maybe = None,
) -> tuple[Cost, Cost]:
    """Returns the costs. An activation's input, written forward and read backward, is counted in backward."""
    rows = x.numel() // max(1, x.shape[-1])
    flops, y = 2 * rows * weight.numel(), rows * weight.shape[0] * x.element_size()
    extra = sum([nbytes(t) for t in (bias, residual) if t is not None])
    inputs, kept = nbytes(x, weight), y if activation else 0
    return Cost(inputs + extra, y, flops), Cost(
        y + inputs + kept, inputs + (nbytes(bias) if bias is not None else 0), 2 * flops
    )


def _case(
    rows: int, N: int, K: int, use: str = "bench", bias: bool = False, residual: bool = False, **options: Any
) -> Case:
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    what = [f"{rows}x{K} -> {N}", *(["bias"] * bias), *options.values(), *(["residual"] * residual)]
    more = {"residual": Spec(rows, N)} if residual else {}
    return Case(
        " ".join(what), (Spec(rows, K), Spec(N, K), *([Spec(N)] * bias)), more | options, dtypes=dtypes, use=use
    )


LINEAR = Op(
    linear,
    reference=reference,
    cost=cost,
    sharding=lambda bias=None, activation=None, residual=None, **_: (
        "x ...k, weight nk -> ...n"
        if bias is None and activation is None and residual is None
        else "x ...K, weight nK, bias n, residual ...n -> ...n"
    ),
    flops={
        "linear_bwd": lambda *_: 0,  # the activation alone; the products are matmul's or torch's
        "linear_add": lambda main, dy, x, *_: 2 * dy.numel() * x.shape[1],
    },
    cases=[
        _case(67, 40, 45, "check", activation="gelu"),
        _case(33, 24, 64, "check", activation="silu", residual=True),
        _case(33, 17, 32, "check", bias=True, activation="gelu_tanh"),
        _case(20, 16, 24, "check"),
        _case(512, 512, 512, "quick", bias=True, activation="gelu"),
        _case(8192, 4096, 4096),
        _case(8192, 14336, 4096, activation="silu"),
        _case(8192, 16384, 4096, bias=True, activation="gelu"),
        _case(8192, 4096, 16384, bias=True, residual=True),
    ],
)

LINEAR.eager(
    "torch", "PyTorch's linear (cuBLAS), then a pass for an activation and one for a residual", reference, served=True
)
LINEAR.compiled("the product, then activation and residual fused into one pass by torch.compile")
LINEAR.kernel(
    "triton",
    "activation and residual fused into the product, on the sums in registers",
    kind="triton",
    fwd=_triton,
    bwd=_triton,
)
LINEAR.kernel("gluon_padded", PADDED, **_linear.PADDED, **HOPPER)
FUSED = "Hopper: one warpgroup's epilogue overlaps the other's products; TMA loads the residual"
LINEAR.kernel("gluon", FUSED, **_linear.WHOLE, **HOPPER)
