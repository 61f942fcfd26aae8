"""weighted_sum: y = sum_j x_j w_j over the last dimension, the first kernel with a backward that one writes.

    dx = dy w          dw = sum over rows of dy x

Forward reads x once. Backward reads x once too, for dx and dw together: programs take a block of columns and a share of the rows,
and write their part of dw in float32; a second kernel adds the parts up in a fixed order. x is read and dx written once.
Source: the weighted sum of Stanford CS336, assignment 2, 2025 (systems), as a document on Triton explains it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.rowwise._rows import as_rows, ceil, empty_rows, key_of, power
from ridgeline.select import eager, run


@triton.jit
def _fwd(y, x, w, rows, columns, x_stride, w_stride, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, columns, BN, num_stages=STAGES):
        column = start + tl.arange(0, BN)[None, :]
        values = tl.load(x + row * x_stride + column, mask=(row < rows) & (column < columns), other=0).to(tl.float32)
        sums += values * tl.load(w + column * w_stride, mask=column < columns, other=0).to(tl.float32)
    total = tl.sum(sums, 1)[:, None]
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < rows)


@triton.jit
def _bwd(dy, dx, parts, x, w, rows, columns, dy_stride, x_stride, w_stride, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    column = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    share, shares = tl.program_id(1), tl.num_programs(1)
    weight = tl.load(w + column * w_stride, mask=column < columns, other=0).to(tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    for tile in tl.range(share, tl.cdiv(rows, BM), shares, num_stages=STAGES):
        place = (tile * BM + tl.arange(0, BM)).to(tl.int64)
        slope = tl.load(dy + place * dy_stride, mask=place < rows, other=0).to(tl.float32)[:, None]
        row = place[:, None]
        mask = (row < rows) & (column < columns)
        if parts is not None:
            sums += slope * tl.load(x + row * x_stride + column, mask=mask, other=0).to(tl.float32)
        if dx is not None:
            tl.store(dx + row * columns + column, (slope * weight).to(dx.dtype.element_ty), mask=mask)
    if parts is not None:
        tl.store(parts + share.to(tl.int64) * columns + column, tl.sum(sums, 0)[None, :], mask=column < columns)


@triton.jit
def _add(dw, parts, shares, columns, BM: tl.constexpr, BN: tl.constexpr):
    column = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, shares, BM):
        row = (start + tl.arange(0, BM)).to(tl.int64)[:, None]
        sums += tl.load(parts + row * columns + column, mask=(row < shares) & (column < columns), other=0)
    tl.store(dw + column, tl.sum(sums, 0)[None, :].to(dw.dtype.element_ty), mask=column < columns)


_SPACE = [{"BM": m, "BN": n, "num_warps": w, "STAGES": s} for m in (1, 2, 4, 8, 16, 32) for n in (256, 512, 1024, 2048, 4096) for w in (4, 8, 16) for s in (1, 2, 3)]  # fmt: skip


def _space(columns: int) -> list[tuning.Config]:
    return [c for c in _SPACE if c["BN"] <= power(columns) and 8 <= c["BM"] * c["BN"] // (32 * c["num_warps"]) <= 64]


def _config(kernel: Any, x: torch.Tensor, most: int) -> Any:
    """Tiles of 8192 elements, up to `most` columns wide."""
    columns = x.shape[1]

    def rule() -> tuning.Config:
        bn = min(power(columns), most)
        return {"BM": 8192 // bn, "BN": bn, "num_warps": 8, "STAGES": 1}

    key = key_of(x.dtype, columns)
    return lambda: dict(tuning.config(device.of(x), "weighted_sum", kernel.__name__[1:], key, rule, lambda: _space(columns)))


def _lecture(x: torch.Tensor) -> Any:
    """16 rows, and a 16th of the columns: of fewer than 16 columns the lecture's tile would be empty."""
    return lambda: {"BM": 16, "BN": max(1, power(x.shape[1]) // 16), "num_warps": 4, "STAGES": 1}


def _launch_fwd(lecture: bool, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    values = as_rows(x, -1)
    rows, columns = values.shape
    config = _lecture(values) if lecture else _config(_fwd, values, 4096)
    given = y.view(-1), values, w, rows, columns, values.stride(0), w.stride(0)
    launch(_fwd, lambda c: (ceil(rows, c["BM"]),), *given, config=config, key=("weighted_sum", lecture, columns))


def _launch_bwd(lecture: bool, dx: Any, dw: Any, parts: Any, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    values, slopes = as_rows(x, -1), dy.reshape(-1)
    rows, columns = values.shape
    out = as_rows(dx, -1) if dx.numel() else None
    config = _lecture(values) if lecture else _config(_bwd, values, 512)
    given = values, w, rows, columns, slopes.stride(0), values.stride(0), w.stride(0)
    some, shares = (parts, parts.shape[0]) if dw.numel() else (None, device.of(x).multiprocessors)
    launch(
        _bwd, lambda c: (ceil(columns, c["BN"]), shares), slopes, out, some, *given, config=config, key=("weighted_sum", lecture, columns)
    )
    if some is not None:
        launch(_add, (ceil(columns, 32),), dw, some, shares, columns, BM=32, BN=32, num_warps=4)


@kernel_op("weighted_sum_fwd(Tensor x, Tensor w, ScalarType dtype, str? impl) -> Tensor")
def _forward(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
    y = x.new_empty(x.shape[:-1], dtype=dtype)
    if not x.numel():
        return y.zero_()
    run(WEIGHTED_SUM, "fwd", impl, (y,), x, w)
    return y


@kernel_op("weighted_sum_bwd(Tensor dy, Tensor x, Tensor w, bool for_x, bool for_w, str? impl) -> (Tensor, Tensor)")
def _backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, for_x: bool, for_w: bool, impl: str | None) -> Any:
    columns = w.shape[0]
    dx = empty_rows(x, -1, None) if for_x else x.new_empty(0)
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if for_w else w.new_empty(0)
    # 4096 columns or fewer leave a part of the rows to a multiprocessor, wider ones larger parts.
    shares = device.of(x).multiprocessors * 4096 // (columns + 4096) + 1
    parts = x.new_empty((shares, columns) if for_w else 0, dtype=torch.float32)
    if not x.numel():
        return dx, dw.zero_()
    run(WEIGHTED_SUM, "bwd", impl, (dx, dw, parts), dy, x, w)
    return dx, dw


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.impl = impl
        return _forward(x, w, dtype, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        for_x, for_w = ctx.needs_input_grad[:2]
        dx, dw = _backward(dy, *ctx.saved_tensors, for_x, for_w, ctx.impl)
        return dx if for_x else None, dw if for_w else None, None, None


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum(-1)


def weighted_sum(x: torch.Tensor, weight: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """The sum of x times weight over the last dimension, as `(x * weight).sum(-1)`. Gradients flow to both.

    x: (..., D), any strides. weight: (D,), in x's dtype or another floating one. Returns a tensor of shape (...) in PyTorch's
    promoted dtype, on x's device.
    Raises RidgelineError on a weight of another size or device, a tensor that is not floating point, or an `impl` that cannot run.
    """
    for name, t in (("x", x), ("weight", weight)):
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"weighted_sum: {name} must be a tensor, and is {type(t).__name__}")
        if not t.is_floating_point():
            raise RidgelineError(f"weighted_sum: {name} must be floating point (float32, float16, bfloat16), and is {t.dtype}")
    if weight.dim() != 1 or not x.dim() or x.shape[-1] != weight.shape[0]:
        shapes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise RidgelineError(f"weighted_sum: weight must be a vector as long as x's last dimension; the shapes are {shapes}")
    if x.device != weight.device:
        raise RidgelineError(f"weighted_sum: weight is on {weight.device} and x on {x.device}; one device is needed")
    plain = eager(WEIGHTED_SUM, impl, x, weight)
    if plain is not None and plain.call is not None:
        return plain.call(x, weight)
    dtype = x.dtype if x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return differentiate(_WeightedSum, x, weight, dtype, impl)
    return _forward(x, weight, dtype, impl)


def cost(x: torch.Tensor, weight: torch.Tensor) -> tuple[Cost, Cost]:
    y = x.numel() // max(1, x.shape[-1]) * torch.promote_types(x.dtype, weight.dtype).itemsize
    return Cost(nbytes(x, weight), y, 2 * x.numel()), Cost(y + nbytes(x, weight), nbytes(x, weight), 3 * x.numel())


WEIGHTED_SUM = Op(
    weighted_sum,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129), Spec(129))),
        Case("3x5x70", (Spec(3, 5, 70), Spec(70))),
        Case("1000x1", (Spec(1000, 1), Spec(1))),
        Case("40x17 float32 weight", (Spec(40, 17), Spec(17, dtype="float32"))),
        Case("vector 300", (Spec(300), Spec(300))),
        Case("no rows", (Spec(0, 3, 4), Spec(4))),
        Case("9x9000", (Spec(9, 9000), Spec(9000))),
        Case("512x4096", (Spec(512, 4096), Spec(4096)), use="quick"),
        *(Case(f"{m}x{n}", (Spec(m, n), Spec(n)), dtypes=("float32", "bfloat16"), use="bench") for m, n in ((16384, 4096), (1024, 262144))),
    ],
)

WEIGHTED_SUM.eager("torch", "a product and a sum: PyTorch writes the product and reads it again", reference, served=True)
WEIGHTED_SUM.compiled("the formula fused by torch.compile")


def _narrow(*tensors: torch.Tensor) -> str | None:
    """What the lecture's tiles support: 16 rows and a 16th of more columns than these leave no registers. The last tensor is the weight,
    or its gradient."""
    columns = tensors[-1].shape[-1] if tensors[-1].dim() else 1
    return None if columns <= 32768 else f"its tiles grow with the columns: it takes at most 32768, and these are {columns}"


for name, idea, lecture in (
    ("triton_lecture", "the lecture's tiles: 16 rows and a 16th of the columns", True),
    ("triton", "tiles of 8192 elements at any width; as many parts of the rows as fill the machine", False),
):
    launchers = {"fwd": partial(_launch_fwd, lecture), "bwd": partial(_launch_bwd, lecture)}
    WEIGHTED_SUM.kernel(name, idea, kind="triton", served=not lecture, supports=_narrow if lecture else None, **launchers)
