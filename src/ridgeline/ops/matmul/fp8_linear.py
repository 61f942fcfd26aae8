"""fp8_linear: y = x W^T + b for training, whose three products run on 8-bit matrix units.

    y = Q(x) Q(W)^T + b            dx = Q(dy) Q(W)            dW = Q(dy)^T Q(x)            db = sum of dy's rows

Q rounds to 8 bits with scales. Each product quantises along its own sum, so a matrix in two products has two copies.
One pass over a matrix makes both (`quantize_fp8(transpose=True)`), with scales found on the device. Backward keeps
8-bit copies of x and W, not x itself.
Source: Micikevicius et al., FP8 formats for deep learning, 2022 (arXiv:2209.05433); blocks as in DeepSeek-AI,
DeepSeek-V3 technical report, 2024 (arXiv:2412.19437), section 3.3.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ridgeline.boundary import differentiate
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _fp8_linear
from ridgeline.ops.matmul._fp8_training import RECIPES, Plain, Training
from ridgeline.ops.matmul.matmul import in_autocast, rows_of
from ridgeline.select import eager, find, why_not

_T = torch.Tensor
_Maybe = torch.Tensor | None
_Pair = tuple[torch.Tensor, torch.Tensor] | None  # codes and scales
E4M3 = "float8_e4m3fn"


def reference(
    x: _T, weight: _T, bias: _Maybe = None, *, recipe: str = "tensor", main_grad: _Maybe = None, quantized: _Pair = None
) -> _T:  # fmt: skip
    compiling = torch.compiler.is_compiling()
    if not compiling and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        raise RidgelineError(
            "fp8_linear: it has no forward-mode derivatives and cannot be differentiated inside torch.func's "
            "transforms, since its gradients are products of 8-bit numbers; call backward"
        )
    y = differentiate(Plain, rows_of(x), weight, bias, recipe, main_grad, *(quantized or ()))
    return y.view(*x.shape[:-1], weight.shape[0])


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, recipe: str = "tensor",
    main_grad: torch.Tensor | None = None, quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
    impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `x @ weight.T + bias`, (..., N), by products of 8-bit numbers, forward and backward.

    x: (..., K), float32, float16 or bfloat16; weight: (N, K) and bias: (N,) or None, each in any of these dtypes. Any
    strides and sizes; sizes that are multiples of 16 need no copies. The result has x's dtype, a gradient its tensor's.
    recipe: what shares a scale, a largest size that the device finds in each call.
    "tensor": all of a matrix; e4m3 forward, e5m2 for dy (TransformerEngine's hybrid format, torchao's "tensorwise").
    "row": a row or a column along the sum; e4m3 throughout (torchao's "rowwise").
    "block": 1 x 128 of x and dy along the sum, 128 x 128 of the weight; e4m3 throughout (DeepSeek-V3).
    main_grad: a contiguous float32 buffer (N, K), or None. Backward adds the weight's gradient to it in the product's
    epilogue and gives the weight none: `weight.grad` stays None, as with TransformerEngine's fuse_wgrad_accumulation.
    quantized: the weight's codes and scales as `quantize_fp8` makes them for the recipe "tensor" or "block", or None.
    Products take them, and the values of `weight` are not read. Backward transposes the codes, and keeps no copy.
    Sums move to float32 every 128 of the summed dimension; for a float32 x all sums are float32, which is slower.
    Autocast casts x alone: the weight is quantised from its own dtype. Gradients flow to x, weight and bias, once.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call. No kernel runs on
    NVIDIA GPUs before sm_89, which have no 8-bit floating-point matrix units; `impl="naive"` emulates them there.
    """
    (x,) = in_autocast(x)
    _fp8_linear.check(x, weight, bias, recipe, main_grad, quantized)
    plain = eager(FP8_LINEAR, impl, x, weight)
    _fp8_linear.check_sums(plain, main_grad)
    if plain is not None and plain.call is not None:
        return plain.call(x, weight, bias, recipe=recipe, main_grad=main_grad, quantized=quantized)
    if impl is not None and not torch.compiler.is_compiling():
        reasons = [why_not(find(FP8_LINEAR, impl), t) for t in (x, weight)]
        if reason := reasons[0] or reasons[1]:
            raise RidgelineError(f"fp8_linear: impl={impl!r} cannot run this call: {reason}")
    enabled = torch.is_grad_enabled()
    keep = enabled and x.requires_grad, enabled and weight.requires_grad
    bias = None if bias is None else bias.contiguous()
    y = differentiate(Training, rows_of(x), weight, bias, recipe, main_grad, keep, impl, *(quantized or ()))
    return y.view(*x.shape[:-1], weight.shape[0])


def cost(
    x: _T, weight: _T, bias: _Maybe = None, *, recipe: str = "tensor", main_grad: _Maybe = None, quantized: _Pair = None
) -> tuple[Cost, Cost]:  # fmt: skip
    """Returns the costs: each matrix read once in its dtype, and what backward keeps once in 8 bits."""
    rows = x.numel() // max(1, x.shape[-1])
    y, more = rows * weight.shape[0], 0 if bias is None else nbytes(bias)
    product, kept = 2 * rows * weight.numel(), x.numel() + weight.numel()
    forward = Cost(nbytes(x, *(quantized or (weight,))) + more, y * x.element_size(), product + 3 * kept, E4M3)
    read = y * x.element_size() + kept + (0 if main_grad is None else nbytes(main_grad))
    made = nbytes(x) + more + nbytes(weight if main_grad is None else main_grad)
    return forward, Cost(read, made, 2 * product + 3 * y, E4M3)


def _case(rows: int, N: int, K: int, recipe: str, use: str = "check", bias: bool = False) -> Case:
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    args = Spec(rows, K), Spec(N, K), *([Spec(N)] * bias)
    return Case(f"{rows}x{K} -> {N} {recipe}{' bias' * bias}", args, {"recipe": recipe}, dtypes=dtypes, use=use)


SHAPES = ((8192, 14336, 4096), (8192, 4096, 14336), (16384, 2048, 2048), (16384, 8192, 2048))
FP8_LINEAR = Op(
    fp8_linear,
    reference=reference,
    cost=cost,
    flops={
        "fp8_linear_fwd": lambda a, b, *_: 2 * a.shape[0] * b.shape[0] * b.shape[1],
        "fp8_linear_add": lambda total, a, *_: 2 * total.numel() * a.shape[1],
        "fp8_linear_collect": lambda total, more: total.numel(),
    },
    cases=[
        _case(33, 40, 129, "tensor", bias=True),
        _case(33, 40, 129, "row"),
        _case(150, 140, 260, "block", bias=True),
        _case(140, 24, 64, "tensor"),
        _case(70, 130, 24, "row", bias=True),
        _case(1, 1, 1, "block"),
        _case(256, 256, 256, "tensor", use="quick"),
        *(_case(*shape, recipe, use="bench") for recipe in RECIPES for shape in SHAPES),
    ],
)


CODES = E4M3, "float8_e5m2"  # the dtypes of the products' operands
FP8_LINEAR.eager(
    "naive", "the formula in eager PyTorch: 8-bit numbers by conversion, products in float32", reference, served=True
)
FP8_LINEAR.kernel(
    "triton",
    "one pass quantises a matrix and its transpose; products on 8-bit matrix units, scaled in registers",
    kind="triton",
    fwd=_fp8_linear.triton,
    bwd=_fp8_linear.triton,
    supports=_fp8_linear.unfit,
    dtypes=("float32", "float16", "bfloat16", *CODES),
    served=True,
)
FP8_LINEAR.kernel(
    "gluon",
    "Hopper: products of a warp that loads with TMA and two warpgroups; dW by blocks is `triton`'s",
    kind="gluon",
    fwd=_fp8_linear.gluon,
    bwd=_fp8_linear.gluon,
    supports=_fp8_linear.unfit_gluon,
    unless=_fp8_linear.unless_gluon,
    dtypes=("float16", "bfloat16", *CODES),
    arch=90,
    newest=90,
    served=True,
)
