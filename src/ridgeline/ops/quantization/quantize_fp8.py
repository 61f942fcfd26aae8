"""quantize_fp8: floating-point numbers of 8 bits (e4m3) and scales for them, of blocks, of rows or of a tensor.

    scale = max |x| / 448            q = x / scale, rounded to e4m3

DeepSeek-V3 gives activations a scale for every 1 x 128 numbers and weights one for every 128 x 128, so that one outlier costs its
neighbours alone their precision. A block lies in the registers of one program: x is read once. The floor is x read and a byte a number
written. The kernels are in `_groups.py`. Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024 (arXiv:2412.19437), section 3.3.
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
    """x as floating-point numbers of 8 bits, e4m3: (q, scale), where x is about q times the scale of its block.

    x: (..., K), any strides, floating point. block: what shares a scale: (1, 128) numbers of a row, (128, 128) of a matrix (the last ones
    may be fewer), "row" or "tensor".
    Returns q, float8_e4m3fn, of x's shape and contiguous; scale, float32: (..., ceil(K / 128)), (ceil(M / 128), ceil(K / 128)),
    (..., 1) or (). No gradients flow. The largest number of a block becomes 448 or -448.
    Quotients x / scale are those of float32, rounded to the nearest number of e4m3, to even between two; a scale is at least
    2^-126 (of zeros), and infinite where its numbers hold an infinity or NaN: `dequantize` then gives NaN. GPUs without e4m3 get the
    same codes, slower.
    Raises RidgelineError on a tensor that is not floating point, another block, or an `impl` that cannot run the call.
    """
    x = checked("quantize_fp8", x)
    block = tuple(block) if isinstance(block, list) else block
    if not isinstance(block, str | tuple) or block not in GROUPS:
        raise RidgelineError(f'quantize_fp8: block must be (1, 128), (128, 128), "row" or "tensor", and is {block!r}')
    if (block != "tensor" and not x.dim()) or (block == (BLOCK, BLOCK) and x.dim() != 2):
        raise RidgelineError(
            f"quantize_fp8: block {block} needs {'a matrix' if block[0] == BLOCK else 'rows'}, and x is {tuple(x.shape)}"
        )
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

QUANTIZE_FP8.eager("naive", "the formula in eager PyTorch: some six passes over memory", reference, served=True)
QUANTIZE_FP8.compiled("the formula fused by torch.compile, its quotients correctly rounded", options=RIGHT)
QUANTIZE_FP8.kernel(
    "triton",
    "a program's blocks or row lie in its registers: read once, divided, rounded by the GPU's own instruction and written",
    kind="triton",
    fwd=_launch,
    served=True,
)
