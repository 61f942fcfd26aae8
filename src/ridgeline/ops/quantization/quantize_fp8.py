"""quantize_fp8: 8-bit floating-point numbers (e4m3, e5m2) and their scales, per block, per row or per tensor.

    scale = max |x| / 448 (e4m3) or / 57344 (e5m2)            q = x / scale, rounded

DeepSeek-V3 gives activations a scale per 1 x 128 numbers and weights one per 128 x 128, so an outlier costs precision
only within its block. A block lies in one program's registers, so x is read once. The floor is one read of x and one
byte written per number. The kernels are in `_groups.py`, and in `_both_ways.py` for a matrix and its transpose.
Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024 (arXiv:2412.19437), section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.quantization._both_ways import quantize_both, room
from ridgeline.ops.quantization._groups import (
    BLOCK,
    LEAST,
    MOST,
    PARTS,
    RIGHT,
    ROW,
    TENSOR,
    Group,
    checked,
    extremes,
    quantize,
    spread,
)
from ridgeline.select import eager, run

GROUPS: dict[Any, Group] = {"tensor": TENSOR, "row": ROW, (1, BLOCK): (1, BLOCK), (BLOCK, BLOCK): (BLOCK, BLOCK)}


Codes = tuple[torch.Tensor, torch.Tensor]
Both = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _launch(q: torch.Tensor, scale: torch.Tensor, parts: torch.Tensor, *rest: Any) -> None:
    """rest: x and its group's sizes; before them, for both layouts, the transpose's codes and scales."""
    *turned, x, down, across = rest
    if turned:
        quantize_both(q, turned[0], scale, turned[1], parts, x, (down, across))
    else:
        quantize(q, scale, None, parts, x, (down, across))


def _shape(x: torch.Tensor, group: Group) -> tuple[int, ...]:
    """The scales' shape."""
    if group == TENSOR:
        return ()
    last = -(-x.shape[-1] // BLOCK) if group[1] else 1
    return (-(-x.shape[0] // BLOCK), last) if group[0] > 1 else (*x.shape[:-1], last)


def _empty(x: torch.Tensor, group: Group, dtype: torch.dtype) -> Codes:
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    return codes, torch.empty(_shape(x, group), dtype=torch.float32, device=x.device)


@kernel_op("quantize_fp8_fwd(Tensor x, int down, int across, ScalarType dtype, str? impl) -> (Tensor, Tensor)")
def _forward(x: torch.Tensor, down: int, across: int, dtype: torch.dtype, impl: str | None) -> Codes:
    q, scale = _empty(x, (down, across), dtype)
    if not x.numel():
        return q, scale.fill_(LEAST)
    parts = torch.empty((0 if down else 2 * PARTS,), dtype=torch.float32, device=x.device)
    run(QUANTIZE_FP8, "fwd", impl, (q, scale, parts), x, down, across)
    return q, scale


@kernel_op(
    "quantize_fp8_both(Tensor x, int down, int across, ScalarType dtype, str? impl) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _both(x: torch.Tensor, down: int, across: int, dtype: torch.dtype, impl: str | None) -> Both:
    q, scale = _empty(x, (down, across), dtype)
    turned, scale_turned = _empty(x.mT, (down, across), dtype)
    if not x.numel():
        return q, scale.fill_(LEAST), turned, scale_turned.fill_(LEAST)
    parts = torch.empty((room((down, across), *x.shape),), dtype=torch.float32, device=x.device)
    run(QUANTIZE_FP8, "fwd", impl, (q, scale, parts, turned, scale_turned), x, down, across)
    return q, scale, turned, scale_turned


@kernel_op("quantize_fp8_shared(Tensor x, Tensor largest, ScalarType dtype, str? impl) -> (Tensor, Tensor)")
def _shared(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, impl: str | None) -> Codes:
    """Codes by a largest size that is known: nothing is searched."""
    q, scale = _empty(x, TENSOR, dtype)
    if not x.numel():
        return q, scale.copy_(_scale(largest, dtype))
    run(QUANTIZE_FP8, "fwd", impl, (q, scale, largest.expand(2).contiguous()), x, *TENSOR)
    return q, scale


def _scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (largest * (1 / MOST[dtype])).clamp(min=LEAST)


def reference(
    x: torch.Tensor, *, block: tuple[int, int] | str = (1, 128), dtype: torch.dtype = torch.float8_e4m3fn,
    transpose: bool = False, largest: torch.Tensor | None = None,
) -> Codes | Both:  # fmt: skip
    v, group = x.detach().float(), GROUPS[block]
    scale = _scale(extremes(v.abs(), group)[1] if largest is None else largest, dtype)
    v = v / spread(scale, v, group)
    if largest is not None:  # torch's conversions need not saturate
        v = v.clamp(-MOST[dtype], MOST[dtype])
    made = v.to(dtype).contiguous(), scale.to(torch.promote_types(x.dtype, torch.float32))
    if transpose:
        codes, scales = reference(x.mT, block=block, dtype=dtype)  # type: ignore[misc]
        return *made, codes.contiguous(), scales
    return made


def quantize_fp8(
    x: torch.Tensor, *, block: tuple[int, int] | str = (1, 128), dtype: torch.dtype = torch.float8_e4m3fn,
    transpose: bool = False, largest: torch.Tensor | None = None, impl: str | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """x as 8-bit floating-point numbers, e4m3 or e5m2: (q, scale), with x about q times the scale of its block.

    x: (..., K), floating point, any strides. block: which numbers share a scale: (1, 128) of a row, (128, 128) of a
    matrix (blocks at the end may be smaller), "row" or "tensor". dtype: torch.float8_e4m3fn or float8_e5m2.
    transpose: also quantises the transpose of a matrix x, in the same pass: (q, scale, q_t, scale_t), the last two as
    `quantize_fp8(x.mT, block=block, dtype=dtype)` returns them; q_t is (K, M), contiguous.
    largest: with block "tensor", a largest size to take instead of x's own, float32, (): that of a whole tensor of
    which x is a part. Larger numbers become 448 or -448. Parts so quantised are bitwise the parts of the whole's codes.
    Returns q, contiguous, of x's shape; and scale, float32: (..., ceil(K / 128)), (ceil(M / 128), ceil(K / 128)),
    (..., 1) or (). A block's largest number becomes 448 or -448 (e5m2: 57344). It has no gradients.
    x / scale is rounded to float32, then to the nearest 8-bit number, ties to even. A scale is at least 2^-126 (all
    zeros), and infinite if its numbers hold an infinity or NaN; `dequantize` then gives NaN. GPUs without 8-bit floats
    give the same codes, slower.
    Raises RidgelineError if x is not floating point, if `block`, `dtype`, `transpose` or `largest` is none of these, or
    if `impl` cannot run the call.
    """
    x = checked("quantize_fp8", x)
    block = tuple(block) if isinstance(block, list) else block
    if not isinstance(block, str | tuple) or block not in GROUPS:
        raise RidgelineError(f'quantize_fp8: block must be (1, 128), (128, 128), "row" or "tensor", but is {block!r}')
    if (block != "tensor" and not x.dim()) or (block == (BLOCK, BLOCK) and x.dim() != 2):
        wanted = "a matrix" if block[0] == BLOCK else "rows"
        raise RidgelineError(f"quantize_fp8: block {block} needs {wanted}, but x is {tuple(x.shape)}")
    if not isinstance(dtype, torch.dtype) or dtype not in MOST:
        raise RidgelineError(f"quantize_fp8: dtype must be torch.float8_e4m3fn or float8_e5m2, but is {dtype!r}")
    if not isinstance(transpose, bool) or (transpose and x.dim() != 2):
        given = f"{transpose!r}, and x is {tuple(x.shape)}"
        raise RidgelineError(f"quantize_fp8: transpose must be False, or True for a matrix, but is {given}")
    if largest is not None:
        _check_largest(x, largest, block, transpose)
    plain = eager(QUANTIZE_FP8, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x.detach(), block=block, dtype=dtype, transpose=transpose, largest=largest)
    if largest is not None:
        return _shared(x.detach(), largest, dtype, impl)
    return (_both if transpose else _forward)(x.detach(), *GROUPS[block], dtype, impl)


def _check_largest(x: torch.Tensor, largest: object, block: object, transpose: bool) -> None:
    if block != "tensor" or transpose:
        given = f"block is {block!r} and transpose {transpose}"
        raise RidgelineError(f'quantize_fp8: largest needs block="tensor" and transpose=False, but {given}')
    if not isinstance(largest, torch.Tensor):
        raise RidgelineError(f"quantize_fp8: largest must be a tensor or None, but is {type(largest).__name__}")
    if largest.dtype != torch.float32 or largest.dim() or largest.device != x.device:
        given = f"{str(largest.dtype)[6:]} {tuple(largest.shape)} on {largest.device}"
        raise RidgelineError(f"quantize_fp8: largest must be float32 () on {x.device}, but is {given}")


def cost(
    x: torch.Tensor, *, block: tuple[int, int] | str = (1, 128), dtype: torch.dtype = torch.float8_e4m3fn,
    transpose: bool = False, largest: torch.Tensor | None = None,
) -> tuple[Cost, None]:  # fmt: skip
    layouts = (x, x.mT) if transpose else (x,)
    written = sum([x.numel() + 4 * torch.Size(_shape(t, GROUPS[block])).numel() for t in layouts])
    return Cost(nbytes(x), written, 3 * x.numel()), None


BLOCKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    (" 128x128", {"block": (128, 128)}),
    (" row", {"block": "row"}),
    (" tensor", {"block": "tensor"}),
)
E5M2 = {"dtype": torch.float8_e5m2}
QUANTIZE_FP8 = Op(
    quantize_fp8,
    reference=reference,
    cost=cost,
    sharding=lambda block=(1, 128), **_: "x ...K -> ...K" if isinstance(block, tuple) and block[0] == 1 else None,
    cases=[
        *(Case(f"33x129{name}", (Spec(33, 129, grad=False),), options) for name, options in BLOCKS),
        Case("3x5x300", (Spec(3, 5, 300, grad=False),)),
        Case("140x260 128x128", (Spec(140, 260, grad=False),), BLOCKS[1][1]),
        Case("3x20000 row", (Spec(3, 20000, grad=False),), BLOCKS[2][1]),
        *(
            Case(f"140x260{name} e5m2, both", (Spec(140, 260, grad=False),), options | E5M2 | {"transpose": True})
            for name, options in BLOCKS
        ),
        *(Case(f"33x129{name} e5m2", (Spec(33, 129, grad=False),), options | E5M2) for name, options in BLOCKS[:3:2]),
        Case("70x129 both", (Spec(70, 129, grad=False),), {"transpose": True}),
        Case("no rows", (Spec(0, 4, grad=False),)),
        Case("1024x1024", (Spec(1024, 1024, grad=False),), use="quick"),
        *(
            Case(f"{m}x{n}{name}", (Spec(m, n, grad=False),), options, dtypes=("bfloat16",), use="bench")
            for m, n in ((16384, 4096), (8192, 14336))
            for name, options in BLOCKS
        ),
        *(
            Case(
                f"16384x4096{name} both",
                (Spec(16384, 4096, grad=False),),
                options | {"transpose": True},
                dtypes=("bfloat16",),
                use="bench",
            )
            for name, options in BLOCKS
        ),
    ],
)

QUANTIZE_FP8.eager("naive", "the formula in eager PyTorch: about six passes over memory", reference, served=True)
QUANTIZE_FP8.compiled("the formula fused by torch.compile, with correctly rounded quotients", options=RIGHT)
idea = "a program's blocks or row stay in registers: one read, native rounding, one write"
QUANTIZE_FP8.kernel("triton", idea, kind="triton", fwd=_launch, served=True)
