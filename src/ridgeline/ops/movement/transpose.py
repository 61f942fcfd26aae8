"""transpose: y_..cr = x_..rc, the last two dimensions swapped, or any permutation, in a new contiguous tensor.

Dimensions that stay neighbours are merged. If one matrix or a batch of them is left, this ladder takes it; other
permutations move rows, or tiles that are wide on both sides, by strides (`_permute.py`). A warp that reads a row of x
writes a column of y, one sector per element. So tiles go through shared memory and are transposed there, padded or
swizzled against bank conflicts. The last implementations keep more bytes in flight: tiles moved by TMA, then 16-byte
packs that threads transpose in registers.
Source: Ruetsch and Micikevicius, Optimizing matrix transpose in CUDA, NVIDIA 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Implementation, Op, Spec, nbytes
from ridgeline.ops.movement import _permute
from ridgeline.ops.movement._bytes import DRAM, DTYPES, ISSUED, SECTORS
from ridgeline.ops.movement._transpose import NAIVE, TILE, boxes, packed, small
from ridgeline.select import by_kind, eager, run


@kernel_op("transpose_fwd(Tensor x, int[] dims, str? impl) -> Tensor")
def _forward(x: torch.Tensor, dims: tuple[int, ...], impl: str | None) -> torch.Tensor:
    y = x.new_empty([x.shape[d] for d in dims])
    if x.numel():
        run(TRANSPOSE, "fwd", impl, (y,), x, dims)
    return y


class _Transpose(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, ...], impl: str | None) -> torch.Tensor:
        ctx.dims, ctx.impl = dims, impl
        return _forward(x, dims, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dy = dy if ctx.impl in (None, "triton") else dy.contiguous()
        return _forward(dy, _permute.inverse(ctx.dims), ctx.impl), None, None


def reference(x: torch.Tensor, dims: Any = None) -> torch.Tensor:
    return (x.mT if dims is None else x.permute(dims)).clone(memory_format=torch.contiguous_format)


def transpose(x: torch.Tensor, dims: Sequence[int] | None = None, *, impl: str | None = None) -> torch.Tensor:
    """x with its dimensions in another order, as a new contiguous tensor. Gradients flow to x.

    x: any shape, strides and dtype. dims: x's dimensions in their new order, as for `torch.permute`, negative ones
    counted from the end; None swaps the last two. Fastest are 32 or more contiguous bytes on both sides.
    Raises RidgelineError if x is not a dense tensor, if it has fewer than two dimensions and `dims` is None, if `dims`
    does not name each dimension once, or if `impl` cannot run the call.
    """
    plain, order = _look(x, dims, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, order)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_Transpose, x, order, impl)
    return _forward(x, order, impl)


@by_kind(1)
def _look(x: Any, dims: Sequence[int] | None, impl: str | None) -> tuple[Implementation | None, tuple[int, ...]]:
    """Checks a call and chooses. Returns too the dimensions in their new order, at least 0."""
    order = _permute.checked_order(x, dims)
    return eager(TRANSPOSE, impl, x, dims=order), order


def cost(x: torch.Tensor, dims: Any = None) -> tuple[Cost, Cost]:
    return Cost(nbytes(x), nbytes(x), 0), Cost(nbytes(x), nbytes(x), 0)


def _gluon(y: torch.Tensor, x: torch.Tensor) -> None:
    from ridgeline.ops.movement._transpose_hopper import fwd

    fwd(y, x)


def _as_matrices(start: Any, y: torch.Tensor, x: torch.Tensor, dims: tuple[int, ...]) -> None:
    start(y, _permute.matrices(x, dims))


def _bench(name: str, *shape: int, dims: Any = None, dtypes: tuple[str, ...] = ("float32",)) -> Case:
    return Case(name, (Spec(*shape, grad=False), *([] if dims is None else [dims])), dtypes=dtypes, use="bench")


TRANSPOSE = Op(
    transpose,
    reference=reference,
    cost=cost,
    sharding=_permute.letters,
    cases=[
        *(Case(f"{rows}x{columns}", (Spec(rows, columns),)) for rows, columns in ((33, 129), (72, 200), (1, 5))),
        Case("3 of 136x264", (Spec(3, 136, 264),)),
        Case("2x2 of 70x34", (Spec(2, 2, 70, 34),)),
        *(
            Case(f"{shape} of {d}", (Spec(*shape, dtype=d, high=high),), dtypes=("float32",))
            for d, high in (("int8", 0), ("int16", 1 << 15), ("int64", 1 << 40))
            for shape in ((2, 160, 272), (35, 130), (36, 132))
        ),
        *(Case(f"7x33x20 to {str(d)[1:-1]}", (Spec(7, 33, 20), d)) for d in ((1, 0, 2), (2, 0, 1), (2, 1, 0))),
        Case("3x5x6x40 to 0, 2, 1, 3", (Spec(3, 5, 6, 40), (0, 2, 1, 3))),
        Case("3x5x6x40 to 3, 1, 0, 2", (Spec(3, 5, 6, 40), (3, 1, 0, -2))),
        Case("300x3x2 to 0, 2, 1", (Spec(300, 3, 2), (0, 2, 1))),
        Case("3 of 0x5", (Spec(3, 0, 5),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        _bench("8192x8192", 8192, 8192, dtypes=("float32", "bfloat16")),
        _bench("16384x8192", 16384, 8192, dtypes=("bfloat16",)),
        _bench("32768x32768", 32768, 32768),
        _bench("8191x8193", 8191, 8193, dtypes=("float32", "bfloat16")),
        _bench("64 of 1024x2048", 64, 1024, 2048, dtypes=("bfloat16",)),
        _bench("32x4096x32x128 to 0, 2, 1, 3", 32, 4096, 32, 128, dims=(0, 2, 1, 3), dtypes=("bfloat16",)),
        _bench("4096x2048x16 to 1, 0, 2", 4096, 2048, 16, dims=(1, 0, 2), dtypes=("float32", "bfloat16")),
        _bench("256x512x1024 to 2, 1, 0", 256, 512, 1024, dims=(2, 1, 0), dtypes=("float32", "bfloat16")),
        _bench("64x256x56x56 to 0, 2, 3, 1", 64, 256, 56, 56, dims=(0, 2, 3, 1), dtypes=("bfloat16",)),
    ],
)
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


def _rung(
    name: str, idea: str, start: Any, gain: float, counter: str, supports: Any = _permute.contiguous_only, **facts: Any
) -> None:
    facts = {"kind": "cuda", "dtypes": DTYPES, "gain": gain, "counter": counter, **facts}
    start = start if start is _permute.permute else partial(_as_matrices, start)
    TRANSPOSE.kernel(name, idea, fwd=start, bwd=start, supports=supports, **facts)


TRANSPOSE.eager("torch", "PyTorch's own: permuted, then a contiguous copy", reference, served=True)
TRANSPOSE.compiled("torch.compile: a Triton tile whose layout the compiler transposes")
_rung("cuda", "one element per thread: loads coalesce, stores do not", partial(small, NAIVE, 0), 1.0, SECTORS)
_rung("cuda_tile", "shared memory tile: stores coalesce too, but reads conflict", partial(small, TILE, 0), 2.0, SECTORS)
_rung("cuda_padded", "a 33rd column: no bank conflicts", partial(small, TILE, 1), 1.3, CONFLICTS)
_rung("cuda_swizzled", "an xor swizzle: no conflicts and no padding", partial(small, TILE, 2), 1.0, CONFLICTS)
TMA = {"supports": _permute.boxes_only, "arch": 90, "shared": 227 << 10}
_rung("cuda_tma", "TMA moves tiles through a ring; persistent blocks transpose", boxes, 1.2, DRAM, **TMA)
WIDE = "float32", "float16", "bfloat16", "int32", "int16"
GLUON: dict[str, Any] = {"supports": _permute.boxes_only, "kind": "gluon", "dtypes": WIDE, "arch": 90, "newest": 90}
_rung("gluon", "cuda_tma in Gluon: a layout assigns squares to threads", _gluon, 1.0, DRAM, **GLUON)
SERVED: dict[str, Any] = {"unless": _permute.too_large, "served": True}
idea = "any permutation of any strides: rows, or tiles wide on both sides; other rungs take matrices"
_rung("triton", idea, _permute.permute, 0.0, DRAM, _permute.too_large, kind="triton", **SERVED)
idea = "16 bytes per load and store; threads transpose squares in registers"
_rung("cuda_packed", idea, packed, 1.05, ISSUED, **SERVED)
