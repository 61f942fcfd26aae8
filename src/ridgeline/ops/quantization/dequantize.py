"""dequantize: the numbers that quantised codes stand for: x = (q - zero) * scale.

Each number has the scale of its block, its row or the whole tensor, as the scale's shape says. One pass reads a byte
and writes a number per element. The kernel is in `_groups.py`; it decodes e4m3 by the GPU's own instruction if there is
one.
Source: the inverse of `quantize_int8` and `quantize_fp8`.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, OwnDtype, RidgelineError, Spec, nbytes
from ridgeline.ops.quantization import _groups
from ridgeline.ops.quantization._groups import group_of, spread
from ridgeline.select import eager, run

FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def _launch(y: Any, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, dtype: torch.dtype) -> None:
    _groups.dequantize(y, q, scale, zero, group_of(q, scale) or (0, 0))


@kernel_op("dequantize_fwd(Tensor q, Tensor scale, Tensor? zero, ScalarType dtype, str? impl) -> Tensor")
def _forward(q: Any, scale: Any, zero: torch.Tensor | None, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
    y = torch.empty(q.shape, dtype=dtype, device=q.device)
    if q.numel():
        run(DEQUANTIZE, "fwd", impl, (y,), q, scale, zero, dtype)
    return y


def reference(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    group = group_of(q, scale) or (0, 0)
    v = q.to(scale.dtype) if zero is None else q.to(scale.dtype) - zero.to(scale.dtype)
    return (v * spread(scale.detach(), q, group)).to(dtype or scale.dtype)


def _fault(q: Any, scale: Any, zero: Any, dtype: Any) -> str | None:
    """Why the arguments are refused, or None."""
    for name, t in (("q", q), ("scale", scale), *(() if zero is None else (("zero", zero),))):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, but is {type(t).__name__}"
        if t.is_nested:
            return f"it takes dense tensors, but {name} is nested; give its to_padded_tensor(0)"
        if t.device != q.device:
            return f"{name} is on {t.device} but q on {q.device}; they must share one device"
    if q.dtype not in (torch.int8, *FP8):
        return f"q must be int8, float8_e4m3fn or float8_e5m2, but is {q.dtype}"
    if scale.dtype not in (torch.float32, torch.float64):
        return f"scale must be float32, but is {scale.dtype}"
    integers = torch.int8, torch.int32
    if zero is not None and (q.dtype in FP8 or zero.shape != scale.shape or zero.dtype not in integers):
        found = f"it is {zero.dtype} {tuple(zero.shape)}, and q {q.dtype}"
        return f"zero must be int32 or int8, of the scale's shape {tuple(scale.shape)}, with q int8; {found}"
    if group_of(q, scale) is None:
        found = f"{tuple(scale.shape)} for q {tuple(q.shape)}"
        return f"scale must be (), or hold one number for each row, 1 x 128 or 128 x 128 block of q, but is {found}"
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        return f"dtype must be None or a floating one (torch.float32, float16, bfloat16), but is {dtype!r}"
    return None


def dequantize(
    q: torch.Tensor | tuple[torch.Tensor, ...],
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """(q - zero) * scale: the floating-point numbers that `quantize_int8` or `quantize_fp8` encoded.

    q: the tuple that they return; or its first tensor (int8, float8_e4m3fn or float8_e5m2, any shape and strides),
    followed by the others.
    scale: float32, () or (1,) for all of q; (..., 1) for rows; (..., ceil(K / 128)) for 1 x 128 blocks of (..., K);
    (ceil(M / 128), ceil(K / 128)) for 128 x 128 blocks of (M, K). zero: int32 or int8, of the scale's shape, for int8.
    dtype: of the result; None is the scale's. Computed in float32 and rounded once. Returns a contiguous tensor of q's
    shape. It has no gradients.
    Raises RidgelineError if shapes, dtypes or devices are none of these, or if `impl` cannot run the call.
    """
    if isinstance(q, tuple | list):
        if scale is not None or zero is not None or len(q) not in (2, 3):
            found = f"a tuple of {len(q)}{' and more arguments' * (scale is not None or zero is not None)}"
            raise RidgelineError(f"dequantize: q must be a tensor, (q, scale) or (q, scale, zero), but is {found}")
        q, scale, zero = (*q, None)[:3]
    fault = _fault(q, scale, zero, dtype)
    if fault or not isinstance(scale, torch.Tensor) or not isinstance(q, torch.Tensor):
        raise RidgelineError(f"dequantize: {fault}")
    plain = eager(DEQUANTIZE, impl, q)
    if plain is None and impl is None and _unlike(q, scale):
        plain = DEQUANTIZE.implementations["naive"]
    if plain is not None and plain.call is not None:
        return plain.call(q, scale, zero, dtype=dtype)
    return _forward(q, scale.detach(), zero, dtype or scale.dtype, impl)


def _unlike(q: torch.Tensor, scale: torch.Tensor, *_: Any) -> str | None:
    return None if scale.dtype == torch.float32 else f"it takes float32 scales, but these are {scale.dtype}"


def cost(
    q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
) -> tuple[Cost, None]:
    given = nbytes(q, scale) + (0 if zero is None else nbytes(zero))
    return Cost(given, q.numel() * (dtype or scale.dtype).itemsize, 2 * q.numel()), None


def _case(shape: tuple[int, ...], scales: tuple[int, ...], fp8: bool, zero: bool = False, **facts: Any) -> Case:
    dtype, of = ("float8_e4m3fn", "fp8") if fp8 else ("int8", "int8")
    name = f"{'x'.join(map(str, shape))} {of}, {' x '.join(map(str, scales)) or 'one'} scales{' and zeros' * zero}"
    args = Spec(*shape, dtype=dtype, grad=False), Spec(*scales, dtype="float32", grad=False)
    zeros = (Spec(*scales, dtype="int32", high=99),) * zero
    return Case(name, (*args, *zeros), {"dtype": OwnDtype()}, **facts)


DEQUANTIZE = Op(
    dequantize,
    reference=reference,
    cost=cost,
    cases=[
        _case((33, 129), (33, 1), False),
        _case((33, 129), (), False, zero=True),
        _case((5, 3, 70), (5, 3, 1), False, zero=True),
        _case((5, 3, 300), (5, 3, 3), True),
        _case((140, 260), (2, 3), True),
        _case((33, 129), (33, 1), True),
        _case((33, 129), (1,), True),
        _case((0, 4), (0, 1), False),
        _case((1024, 1024), (1024, 1), False, use="quick"),
        *(
            _case((16384, 4096), scales, fp8, dtypes=("bfloat16",), use="bench")
            for scales, fp8 in (((), False), ((16384, 1), False), ((16384, 32), True), ((128, 32), True))
        ),
    ],
)

DEQUANTIZE.eager("naive", "the formula in eager PyTorch: expand the scales, then multiply", reference, served=True)
DEQUANTIZE.compiled("the formula, fused by torch.compile")
idea = "one pass; a block's scale is loaded once for all of its numbers"
facts: dict[str, Any] = {"supports": _unlike, "dtypes": ("int8", "float8_e4m3fn", "float8_e5m2"), "served": True}
DEQUANTIZE.kernel("triton", idea, kind="triton", fwd=_launch, **facts)
