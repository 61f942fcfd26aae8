"""The recipes of fp8_linear, and its forward and backward passes by kernels and in plain PyTorch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl  # noqa: F401 - Triton's interpreter looks it up in a kernel's module

from ridgeline.boundary import Function, first_order, kernel_op
from ridgeline.op import LOADED, get
from ridgeline.ops.matmul._scaled import BLOCK
from ridgeline.ops.matmul.fp8_matmul import E4M3, E5M2, by_triton
from ridgeline.ops.matmul.fp8_matmul import reference as dequantised_product
from ridgeline.ops.matmul.matmul import sum_of_rows
from ridgeline.select import run

_T = torch.Tensor
_Maybe = torch.Tensor | None


class Recipe(NamedTuple):
    """What shares a scale, in x and dy and in the weight, and dy's format."""

    rows: tuple[int, int] | str
    weight: tuple[int, int] | str
    gradient: torch.dtype


RECIPES = {
    "tensor": Recipe("tensor", "tensor", E5M2),
    "row": Recipe("row", "row", E4M3),
    "block": Recipe((1, BLOCK), (BLOCK, BLOCK), E4M3),
}
QUANTIZE_FP8, TRANSPOSE = get("quantize_fp8"), get("transpose")
GROUPS = {"tensor": (0, 0), "row": (1, 0)}  # as the registered op takes them


@kernel_op(
    "fp8_linear_fwd(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType dtype, bool exact, "
    "str? impl) -> Tensor"
)
def _product(a: _T, b: _T, *rest: Any) -> _T:
    """Returns a @ b * scale_a * scale_b + bias in dtype. a: (M, K), b: (K, N): 8-bit codes."""
    *given, dtype, exact, impl = rest
    y = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    run(LOADED["fp8_linear"], "fwd", impl, (y,), a, b, *given, dtype, exact)
    return y


@kernel_op("fp8_linear_add(Tensor(a!) total, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, bool exact) -> ()")
def _add(total: _T, a: _T, b: _T, scale_a: _T, scale_b: _T, exact: bool) -> None:
    """Adds a @ b * scale_a * scale_b to total, float32, in the product's epilogue."""
    by_triton(total, a, b, scale_a, scale_b, None, exact=exact, add=True)


@kernel_op("fp8_linear_collect(Tensor(a!) total, Tensor more) -> ()")
def _collect(total: _T, more: _T) -> None:
    """Adds to a buffer. A registered op, since torch.compile of PyTorch 2.11 drops an add_ of a Function's backward."""
    total.add_(more)


def _quantized(t: _T, block: Any, dtype: torch.dtype, both: bool, impl: str | None) -> tuple[_T, ...]:
    """Returns (codes, scales, codes of the transpose, its scales); the last two are empty if not wanted."""
    how = impl and "triton"
    if torch.compiler.is_compiling():  # Dynamo lets no backward ask for a layout, as public functions do
        registered = torch.ops.ridgeline.quantize_fp8_both if both else torch.ops.ridgeline.quantize_fp8_fwd
        made = registered(t, *GROUPS.get(block, block), dtype, how)
    else:
        made = QUANTIZE_FP8.function(t, block=block, dtype=dtype, transpose=both, impl=how)
    return made if both else (*made, t.new_empty(0), t.new_empty(0))


def _turned(codes: _T, scale: _T) -> tuple[_T, _T]:
    """Returns the codes and scales of the transpose of a matrix with one scale, or with one for each square."""
    if torch.compiler.is_compiling() or codes.device.type == "meta":
        return codes.mT.contiguous(), _across(scale).contiguous()
    return TRANSPOSE.function(codes.view(torch.int8)).view(codes.dtype), _across(scale).contiguous()


class Training(Function):
    @staticmethod
    def forward(
        ctx: Any, x: _T, weight: _T, bias: _Maybe, recipe: str, main_grad: _Maybe, keep: tuple[bool, bool],
        impl: str | None, given: _Maybe = None, given_scale: _Maybe = None,
    ) -> _T:  # fmt: skip
        how, exact = RECIPES[recipe], x.dtype == torch.float32
        wants_x, wants_weight = keep
        q, scale, *turned = _quantized(x, how.rows, E4M3, wants_weight, impl)
        if given is not None and given_scale is not None:
            w, scale_w = w_turned = given, given_scale  # backward turns them: they are not this call's to copy
        else:
            w, scale_w, *w_turned = _quantized(weight, how.weight, E4M3, wants_x, impl)
        y = _product(q, w.mT, scale, _across(scale_w), bias, x.dtype, exact, impl)
        ctx.save_for_backward(*turned, *w_turned)
        ctx.main_grad, ctx.dtypes = main_grad, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.recipe, ctx.impl, ctx.exact, ctx.given = recipe, impl, exact, given is not None
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        x, scale, weight, scale_w = ctx.saved_tensors
        how, (dtype, of_weight, of_bias) = RECIPES[ctx.recipe], ctx.dtypes
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx = dw = db = None
        if wants_x or wants_weight:
            d, scale_d, turned, scale_turned = _quantized(dy, how.rows, how.gradient, wants_weight, ctx.impl)
        if wants_x:
            if ctx.given:
                weight, scale_w = _turned(weight, scale_w)
            dx = _product(d, weight.mT, scale_d, _across(scale_w), None, dtype, ctx.exact, ctx.impl)
        if wants_weight and ctx.main_grad is not None:
            _add(ctx.main_grad, turned, x.mT, scale_turned, _across(scale), ctx.exact)
        elif wants_weight:
            # Only triton takes blocks of single columns.
            impl = "triton" if ctx.impl and ctx.recipe == "block" else ctx.impl
            dw = _product(turned, x.mT, scale_turned, _across(scale), None, of_weight, ctx.exact, impl)
        if ctx.needs_input_grad[2]:
            db = sum_of_rows(dy).to(of_bias)
        return dx, dw, db, *[None] * 6


def _across(scale: _T) -> _T:
    """Returns the scales of a matrix as those of its transpose, a product's second operand."""
    return scale.mT if scale.dim() == 2 else scale


class Plain(Function):
    """The formula in plain PyTorch: 8-bit numbers by conversion, products in float32, or in float64 for float64."""

    @staticmethod
    def forward(
        ctx: Any, x: _T, weight: _T, bias: _Maybe, recipe: str, main_grad: _Maybe, given: _Maybe = None,
        given_scale: _Maybe = None,
    ) -> _T:  # fmt: skip
        how, ctx.given = RECIPES[recipe], given is not None
        q, scale, *turned = _formula(x, how.rows, E4M3)
        if given is not None and given_scale is not None:
            w, scale_w = w_turned = given, given_scale
        else:
            w, scale_w, *w_turned = _formula(weight, how.weight, E4M3)
        ctx.save_for_backward(*turned, *w_turned)
        ctx.main_grad, ctx.how, ctx.dtypes = main_grad, how, (weight.dtype, None if bias is None else bias.dtype)
        return _in_full(q, w.mT, scale, _across(scale_w), x.dtype, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        x, scale, weight, scale_w = ctx.saved_tensors
        d, scale_d, turned, scale_turned = _formula(dy, ctx.how.rows, ctx.how.gradient)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            if ctx.given:
                weight, scale_w = _turned(weight, scale_w)
            dx = _in_full(d, weight.mT, scale_d, _across(scale_w), dy.dtype)
        if ctx.needs_input_grad[1]:
            wide = ctx.dtypes[0] if ctx.main_grad is None else ctx.main_grad.dtype
            dw = _in_full(turned, x.mT, scale_turned, _across(scale), wide)
        if dw is not None and ctx.main_grad is not None:
            _collect(ctx.main_grad, dw)
            dw = None
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(dy.dtype, torch.float32)
            db = dy.sum(0, dtype=wide).to(ctx.dtypes[1])
        return dx, dw, db, *[None] * 4


def _in_full(a: _T, b: _T, scale_a: _T, scale_b: _T, dtype: torch.dtype, bias: _Maybe = None) -> _T:
    with torch.autocast(a.device.type, enabled=False):  # which would round the operands
        return dequantised_product(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype)


def _formula(t: _T, block: Any, dtype: torch.dtype) -> tuple[_T, ...]:
    return QUANTIZE_FP8.reference(t, block=block, dtype=dtype, transpose=True)
