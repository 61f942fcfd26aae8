"""quantize_fp8: 8-bit floating-point numbers (e4m3) and their scales, per block, per row or per tensor.

    scale = max |x| / 448            q = x / scale, rounded to e4m3

DeepSeek-V3 gives activations a scale per 1 x 128 numbers and weights one per 128 x 128, so an outlier costs precision
only within its block. A block lies in one program's registers, so x is read once. The floor is one read of x and one
byte written per number. The kernels are in `_groups.py`.
Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024 (arXiv:2412.19437), section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.quantization._groups import (
    BLOCK,
    LEAST,
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


def _launch(q: torch.Tensor, scale: torch.Tensor, parts: torch.Tensor, x: torch.Tensor, down: int, across: int) -> None:
    quantize(q, scale, None, parts, x, (down, across))


def _shape(x: torch.Tensor, group: Group) -> tuple[int, ...]:
    """The scales' shape."""
    if group == TENSOR:
        return ()
    last = -(-x.shape[-1] // BLOCK) if group[1] else 1
    return (-(-x.shape[0] // BLOCK), last) if group[0] > 1 else (*x.shape[:-1], last)


@kernel_op("quantize_fp8_fwd(Tensor x, int down, int across, str? impl) -> (Tensor, Tensor)")
def _forward(x: torch.Tensor, down: int, across: int, impl: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(_shape(x, (down, across)), dtype=torch.float32, device=x.device)
    if not x.numel():
        return q, scale.fill_(LEAST)
    parts = torch.empty((0 if down else 2 * PARTS,), dtype=torch.float32, device=x.device)
    run(QUANTIZE_FP8, "fwd", impl, (q, scale, parts), x, down, across)
    return q, scale


def reference(x: torch.Tensor, *, block: tuple[int, int] | str = (1, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    v, group = x.detach().float(), GROUPS[block]
    scale = (extremes(v.abs(), group)[1] * (1 / 448)).clamp(min=LEAST)
    return (v / spread(scale, v, group)).to(torch.float8_e4m3fn), scale.to(torch.promote_types(x.dtype, torch.float32))


def quantize_fp8(
    x: torch.Tensor, *, block: tuple[int, int] | str = (1, 128), impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x as 8-bit floating-point numbers, e4m3: (q, scale), with x about q times the scale of its block.

    x: (..., K), floating point, any strides. block: which numbers share a scale: (1, 128) of a row, (128, 128) of a
    matrix (blocks at the end may be smaller), "row" or "tensor".
    Returns q, float8_e4m3fn, contiguous, of x's shape; and scale, float32: (..., ceil(K / 128)),
    (ceil(M / 128), ceil(K / 128)), (..., 1) or (). A block's largest number becomes 448 or -448. It has no gradients.
    x / scale is rounded to float32, then to the nearest e4m3 number, ties to even. A scale is at least 2^-126 (all
    zeros), and infinite if its numbers hold an infinity or NaN; `dequantize` then gives NaN. GPUs without e4m3 give the
    same codes, slower.
    Raises RidgelineError if x is not floating point, if `block` is none of these, or if `impl` cannot run the call.
    """
    x = checked("quantize_fp8", x)
    block = tuple(block) if isinstance(block, list) else block
    if not isinstance(block, str | tuple) or block not in GROUPS:
        raise RidgelineError(f'quantize_fp8: block must be (1, 128), (128, 128), "row" or "tensor", but is {block!r}')
    if (block != "tensor" and not x.dim()) or (block == (BLOCK, BLOCK) and x.dim() != 2):
        wanted = "a matrix" if block[0] == BLOCK else "rows"
        raise RidgelineError(f"quantize_fp8: block {block} needs {wanted}, but x is {tuple(x.shape)}")
    plain = eager(QUANTIZE_FP8, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x.detach(), block=block)
    return _forward(x.detach(), *GROUPS[block], impl)


def cost(x: torch.Tensor, *, block: tuple[int, int] | str = (1, 128)) -> tuple[Cost, None]:
    return Cost(nbytes(x), x.numel() + 4 * torch.Size(_shape(x, GROUPS[block])).numel(), 3 * x.numel()), None


BLOCKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    (" 128x128", {"block": (128, 128)}),
    (" row", {"block": "row"}),
    (" tensor", {"block": "tensor"}),
)
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
        Case("no rows", (Spec(0, 4, grad=False),)),
        Case("1024x1024", (Spec(1024, 1024, grad=False),), use="quick"),
        *(
            Case(f"{m}x{n}{name}", (Spec(m, n, grad=False),), options, dtypes=("bfloat16",), use="bench")
            for m, n in ((16384, 4096), (8192, 14336))
            for name, options in BLOCKS
        ),
    ],
)

QUANTIZE_FP8.eager("naive", "the formula in eager PyTorch: about six passes over memory", reference, served=True)
QUANTIZE_FP8.compiled("the formula fused by torch.compile, with correctly rounded quotients", options=RIGHT)
idea = "a program's blocks or row stay in registers: one read, native rounding, one write"
QUANTIZE_FP8.kernel("triton", idea, kind="triton", fwd=_launch, served=True)
