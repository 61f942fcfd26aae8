"""quantize_int8: 8-bit integers and their scales, per tensor or per row.

    symmetric:   scale = max |x| / 127             q = round(x / scale)
    asymmetric:  scale = (max - min) / 255         q = round(x / scale) + zero,   zero = round(-128 - min / scale)

Rows that fit in registers are read once. A tensor's extremes are needed before its first code, so it is read twice, the
second time from its end, which L2 still holds. The floor is one read of x and one byte written per number. The kernels
are in `_groups.py`.
Source: Jacob et al., Quantization and training of neural networks for efficient integer-arithmetic-only inference, 2018
(arXiv:1712.05877).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.quantization._groups import LEAST, PARTS, RIGHT, ROW, TENSOR, checked, extremes, quantize
from ridgeline.select import eager, run


def _launch(q: Any, scale: Any, zero: Any, parts: Any, x: torch.Tensor, rows: bool, symmetric: bool) -> None:
    quantize(q, scale, None if symmetric else zero, parts, x, ROW if rows else TENSOR)


@kernel_op("quantize_int8_fwd(Tensor x, bool rows, bool symmetric, str? impl) -> (Tensor, Tensor, Tensor)")
def _forward(
    x: torch.Tensor, rows: bool, symmetric: bool, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    shape = (*x.shape[:-1], 1) if rows else ()
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    zero = torch.empty((0,) if symmetric else shape, dtype=torch.int32, device=x.device)
    if not x.numel():
        return q, scale.fill_(LEAST), zero.fill_(-128)
    parts = torch.empty((0 if rows else 2 * PARTS,), dtype=torch.float32, device=x.device)
    run(QUANTIZE_INT8, "fwd", impl, (q, scale, zero, parts), x, rows, symmetric)
    return q, scale, zero


def reference(x: torch.Tensor, *, granularity: str = "tensor", symmetric: bool = True) -> tuple[torch.Tensor, ...]:
    v, wide = x.detach().float(), torch.promote_types(x.dtype, torch.float32)
    low, high = extremes(v.abs() if symmetric else v, ROW if granularity == "row" else TENSOR)

    def whole(t: torch.Tensor) -> torch.Tensor:
        return torch.where(t.isnan(), 0, t).clamp(-1024, 1024).round()

    if symmetric:
        scale = (high * (1 / 127)).clamp(min=LEAST)
        return whole(v / scale).to(torch.int8), scale.to(wide)
    scale = ((high * 0.5 - low * 0.5) * (2 / 255)).clamp(min=LEAST)
    zero = whole(-128 - low / scale).clamp(-128, 127)
    return (whole(v / scale) + zero).clamp(-128, 127).to(torch.int8), scale.to(wide), zero.to(torch.int32)


def quantize_int8(
    x: torch.Tensor, *, granularity: str = "tensor", symmetric: bool = True, impl: str | None = None
) -> tuple[torch.Tensor, ...]:
    """x as 8-bit integers: (q, scale) or, with symmetric=False, (q, scale, zero); x is about (q - zero) * scale.

    x: floating point, any shape and strides. granularity: "tensor", or "row" for a scale per row of the last dimension.
    symmetric: q is in -127 to 127, without zeros; else -128 to 127 cover the range of x, extended to include 0.
    Returns q, int8, contiguous, of x's shape; scale, float32, () or (..., 1); zero, int32, shaped like scale. It has no
    gradients.
    x / scale is rounded to float32, then to the nearest integer, ties to even, and saturates. A scale is at least
    2^-126 (all zeros), and infinite if its numbers hold an infinity or NaN; `dequantize` then gives NaN.
    Raises RidgelineError if x is not floating point, if `granularity` is invalid, or if `impl` cannot run the call.
    """
    x = checked("quantize_int8", x)
    if granularity not in ("tensor", "row") or (granularity == "row" and not x.dim()):
        wanted = '"tensor", or "row" for a tensor with rows'
        raise RidgelineError(f"quantize_int8: granularity must be {wanted}, but is {granularity!r}")
    if not isinstance(symmetric, bool):
        raise RidgelineError(f"quantize_int8: symmetric must be True or False, but is {symmetric!r}")
    plain = eager(QUANTIZE_INT8, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x.detach(), granularity=granularity, symmetric=symmetric)
    q, scale, zero = _forward(x.detach(), granularity == "row", symmetric, impl)
    return (q, scale) if symmetric else (q, scale, zero)


def cost(x: torch.Tensor, *, granularity: str = "tensor", symmetric: bool = True) -> tuple[Cost, None]:
    scales = (x.numel() // max(1, x.shape[-1]) if granularity == "row" else 1) * (4 if symmetric else 8)
    return Cost(nbytes(x), x.numel() + scales, 4 * x.numel()), None


ROWS, ZERO = {"granularity": "row"}, {"symmetric": False}
QUANTIZE_INT8 = Op(
    quantize_int8,
    reference=reference,
    cost=cost,
    sharding=lambda granularity="tensor", **_: "x ...K -> ...K" if granularity == "row" else None,
    cases=[
        Case("33x129", (Spec(33, 129, grad=False),)),
        Case("33x129 rows", (Spec(33, 129, grad=False),), ROWS),
        Case("3x5x70 asymmetric", (Spec(3, 5, 70, grad=False),), ZERO),
        Case("3x5x70 rows asymmetric", (Spec(3, 5, 70, grad=False),), ROWS | ZERO),
        Case("3x20000 rows", (Spec(3, 20000, grad=False),), ROWS),
        Case("no rows", (Spec(0, 4, grad=False),), ZERO),
        Case("1", (Spec(1, grad=False),)),
        Case("1024x1024 rows", (Spec(1024, 1024, grad=False),), ROWS, use="quick"),
        *(
            Case(f"{m}x{n}{name}", (Spec(m, n, grad=False),), options, dtypes=("bfloat16",), use="bench")
            for m, n in ((16384, 4096), (8192, 14336))
            for name, options in (("", {}), (" asymmetric", ZERO), (" rows", ROWS))
        ),
    ],
)

QUANTIZE_INT8.eager("naive", "the formula in eager PyTorch: about eight passes over memory", reference, served=True)
QUANTIZE_INT8.compiled("the formula fused by torch.compile, with correctly rounded quotients", options=RIGHT)
idea = "a row in registers, read once; a tensor's extremes in 512 parts, merged by each program"
QUANTIZE_INT8.kernel("triton", idea, kind="triton", fwd=_launch, served=True)
