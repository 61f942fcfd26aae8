"""The checks of fp8_linear's arguments, the launchers of its products, and which of these they take."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import RidgelineError, dense_only
from ridgeline.ops.matmul import _hopper8, _main_grad
from ridgeline.ops.matmul._fp8_training import RECIPES
from ridgeline.ops.matmul._scaled import BLOCK
from ridgeline.ops.matmul.fp8_matmul import E4M3, E5M2, by_triton, lacks

_T = torch.Tensor
_Maybe = torch.Tensor | None
LOSES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)  # seen with 2.11; 2.13 keeps it


def check_sums(plain: Any, main_grad: Any) -> None:
    """Raises RidgelineError where torch.compile loses what a backward in plain PyTorch adds to a buffer."""
    if plain is not None and main_grad is not None and torch.compiler.is_compiling() and LOSES:
        raise RidgelineError(
            f"fp8_linear: torch.compile of PyTorch {torch.__version__} loses what plain PyTorch's backward adds to "
            "main_grad; use impl='triton', PyTorch 2.13, or no main_grad"
        )


def check(x: Any, weight: Any, bias: Any, recipe: Any, main_grad: Any, quantized: Any = None) -> None:
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"fp8_linear: {name} must be a tensor, got {type(t).__name__}")
        dense_only("fp8_linear", (t,))
        if not t.is_floating_point() or t.element_size() < 2:
            raise RidgelineError(f"fp8_linear: {name} must be float32, float16 or bfloat16, got {t.dtype}")
        if t.device != x.device:
            raise RidgelineError(f"fp8_linear: x is on {x.device} and {name} on {t.device}; they must share one device")
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise RidgelineError(f"fp8_linear: recipe must be 'tensor', 'row' or 'block', got {recipe!r}")
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        given = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise RidgelineError(f"fp8_linear: x must be (..., K) and weight (N, K), got {given}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RidgelineError(f"fp8_linear: bias must be {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if main_grad is not None:
        _main_grad.check(main_grad, weight, "fp8_linear")
    if quantized is not None:
        _check_quantized(quantized, weight, recipe)


def _check_quantized(quantized: Any, weight: _T, recipe: str) -> None:
    """Raises RidgelineError if these are no codes and scales of a weight that both products can take."""
    if not isinstance(quantized, tuple | list) or len(quantized) != 2 or not all(map(torch.is_tensor, quantized)):
        raise RidgelineError("fp8_linear: quantized must be (codes, scales), two tensors, or None")
    if recipe == "row":
        raise RidgelineError(
            "fp8_linear: quantized needs the recipe 'tensor' or 'block', since rows of the transpose have other codes"
        )
    codes, scale = quantized
    wanted = () if recipe == "tensor" else tuple([-(-n // BLOCK) for n in weight.shape])
    if codes.dtype != E4M3 or codes.shape != weight.shape or not codes.is_contiguous():
        given = f"{str(codes.dtype)[6:]} {tuple(codes.shape)} with strides {codes.stride()}"
        raise RidgelineError(
            f"fp8_linear: the codes must be contiguous float8_e4m3fn {tuple(weight.shape)}, got {given}"
        )
    if scale.dtype != torch.float32 or tuple(scale.shape) != wanted:
        given = f"{str(scale.dtype)[6:]} {tuple(scale.shape)}"
        raise RidgelineError(f"fp8_linear: the scales of recipe {recipe!r} must be float32 {wanted}, got {given}")
    if {codes.device, scale.device} != {weight.device}:
        raise RidgelineError(f"fp8_linear: the codes and scales must be on {weight.device} with the weight")


def triton(y: _T, a: _T, b: _T, scale_a: _T, scale_b: _T, bias: _Maybe, dtype: torch.dtype, exact: bool) -> None:
    by_triton(y, a, b, scale_a, scale_b, bias, exact=exact)


def gluon(y: _T, a: _T, b: _T, scale_a: _T, scale_b: _T, bias: _Maybe, dtype: torch.dtype, exact: bool) -> None:
    _hopper8.fp8_padded(y, a, b, scale_a, scale_b, bias, dtype)


def _public(x: Any) -> bool:
    """Returns whether these are public arguments, not a product's 8-bit operands."""
    return x.dtype not in (E4M3, E5M2)


def unfit(x: _T, *rest: Any, **_: Any) -> str | None:
    """Returns why `triton` does not take a call or a product, or None."""
    return lacks(x) if _public(x) else lacks(x, *rest)


def unfit_gluon(x: _T, *rest: Any, **_: Any) -> str | None:
    if _public(x):
        return None
    b, scale_a, scale_b, _bias, _dtype, exact = rest
    if exact:
        return "the matrix units add 8-bit floats in about 14 bits over 128 of K, too coarse for a float32 x"
    return _hopper8.odd(x, b, scale_a, scale_b)


def unless_gluon(x: _T, *rest: Any, **_: Any) -> str | None:
    """Returns why `gluon` is left out of a call, by its forward product, or out of a product."""
    if not _public(x):
        return _hopper8.padded_unless(x, *rest[:3])
    N, K = rest[0].shape
    copies = [torch.empty((n, K), dtype=E4M3, device="meta") for n in (x.numel() // max(1, K), N)]
    return _hopper8.padded_unless(copies[0], copies[1].mT)
