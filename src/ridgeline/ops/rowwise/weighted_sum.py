"""weighted_sum: y = sum_j x_j w_j over the last dimension: a first kernel with a backward pass.

    dx = dy w          dw = sum over rows of dy x

Forward reads x once. Backward reads x once and writes dx once, in separate kernels, which suits DRAM. In the first,
each program takes a block of columns and a share of the rows and writes its part of dw in float32. In the second, the
first programs add the parts in a fixed order while the others write dx.
Source: the weighted sum of Stanford CS336 (2025), assignment 2, systems.
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
def _fwd(
    y,
    x,
    w,
    rows,
    columns,
    x_stride,
    w_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILES: tl.constexpr,
    PACK: tl.constexpr,
):
    """A step loads TILES blocks of BN columns; PACK neighbours, loaded by one thread at once, are added first."""
    row = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    x += tl.minimum(row, rows - 1) * x_stride
    sums = tl.zeros((BM, BN // PACK), tl.float32)
    for start in range(0, columns, TILES * BN):
        loaded = ()
        for t in tl.static_range(TILES):
            column = start + t * BN + tl.arange(0, BN)[None, :]
            inside = column < columns
            # evict_first: x should displace nothing else in L2.
            values = tl.load(x + column, mask=inside, other=0, eviction_policy="evict_first")
            loaded = loaded + (values, tl.load(w + column * w_stride, mask=inside, other=0))
        for t in tl.static_range(TILES):
            products = tl.reshape(
                loaded[2 * t].to(tl.float32) * loaded[2 * t + 1].to(tl.float32), (BM, BN // PACK, PACK)
            )
            sums += tl.sum(products, 2)
    total = tl.sum(sums, 1)[:, None]
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < rows)


@triton.jit
def _bwd(dy, dx, parts, x, w, rows, columns, dy_stride, x_stride, w_stride, BM: tl.constexpr, BN: tl.constexpr):
    column = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    share, shares = tl.program_id(1), tl.num_programs(1)
    weight = tl.load(w + column * w_stride, mask=column < columns, other=0).to(tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    for tile in range(share, tl.cdiv(rows, BM), shares):
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
def _bwd_dw(parts, dy, x, rows, columns, dy_stride, x_stride, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr):
    """One program's part of dw: BN columns of a share of the rows, BM * TILES rows per step."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    inside = column < columns
    row = tl.arange(0, BM).to(tl.int64)[:, None]
    share = tl.program_id(1).to(tl.int64)
    sums = tl.zeros((BM, BN), tl.float32)
    steps = tl.cdiv(rows, TILES * BM)
    busy = tl.cdiv(steps, tl.cdiv(steps, tl.num_programs(1)))  # the programs used, with equally many steps each
    for step in range(tl.where(share < busy, share, steps), steps, busy):
        loaded = ()
        for t in tl.static_range(TILES):
            start = (step * TILES + t) * BM
            known = row < rows - start
            slope = tl.load(dy + start * dy_stride + row * dy_stride, mask=known, other=0)
            values = tl.load(x + start * x_stride + (row * x_stride + column), mask=known & inside, other=0)
            loaded = loaded + (slope, values)
        # Each step adds up separately: many small terms added to one large sum would each be rounded.
        found = tl.zeros((BM, BN), tl.float32)
        for t in tl.static_range(TILES):
            found += loaded[2 * t].to(tl.float32) * loaded[2 * t + 1].to(tl.float32)
        sums += found
    tl.store(parts + share * columns + column, tl.sum(sums, 0)[None, :], mask=inside)


@triton.jit
def _bwd_dx(
    dy, dx, dw, parts, shares, w, rows, columns, dy_stride, w_stride, DEEP: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """The first programs add dw's parts, WIDE columns each, DEEP parts at a time, while the others write dx."""
    program = tl.program_id(0)
    if dw is not None:
        place = program * WIDE + tl.arange(0, WIDE)[None, :]
        program -= tl.cdiv(columns, WIDE)
        if program < 0:
            sums = tl.zeros((DEEP, WIDE), tl.float32)
            for start in range(0, shares, DEEP):
                part = (start + tl.arange(0, DEEP)).to(tl.int64)[:, None]
                sums += tl.load(parts + part * columns + place, mask=(part < shares) & (place < columns), other=0)
            tl.store(dw + place, tl.sum(sums, 0)[None, :].to(dw.dtype.element_ty), mask=place < columns)
    if dx is not None:  # noqa: SIM102 - one condition would make Triton compile the body without dx too
        if program >= 0:
            across = tl.cdiv(columns, BN)
            row = ((program // across).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
            column = (program % across) * BN + tl.arange(0, BN)[None, :]
            slope = tl.load(dy + row * dy_stride, mask=row < rows, other=0).to(tl.float32)
            weight = tl.load(w + column * w_stride, mask=column < columns, other=0).to(tl.float32)
            tl.store(
                dx + row * columns + column,
                (slope * weight).to(dx.dtype.element_ty),
                mask=(row < rows) & (column < columns),
            )


_BLOCKS = [(m, n, w) for m in (1, 2, 4, 8, 16) for n in (256, 512, 1024, 2048, 4096) for w in (4, 8, 16)]


def _config(kernel: Any, x: torch.Tensor, most: int, rows: int, **tiles: int) -> Any:
    """Blocks of at most `most` columns; by the rule, 256 threads hold 16 bytes of each of `rows` rows."""
    columns, pack = x.shape[1], 16 // x.element_size()

    def rule() -> tuning.Config:
        bn = min(power(columns), most)
        return {"BM": max(1, rows * 256 * pack // bn), "BN": bn, "num_warps": 8, **tiles}

    def space() -> list[tuning.Config]:
        fit = [(m, n, w) for m, n, w in _BLOCKS if n <= power(columns) and m * n // (32 * w * pack) in (1, 2, 4)]
        return [
            {"BM": m, "BN": n, "num_warps": w, **dict.fromkeys(tiles, t)}
            for m, n, w in fit
            for t in ((1, 2, 4) if tiles else (1,))
        ]

    return lambda: tuning.config(
        device.of(x), "weighted_sum", kernel.__name__[1:], key_of(x.dtype, power(columns)), rule, space
    )


def _lecture(x: torch.Tensor, **tiles: int) -> Any:
    """16 rows and a 16th of the columns, but at least one, which the lecture's tile would lack below 16 columns."""
    return lambda: {"BM": 16, "BN": max(1, power(x.shape[1]) // 16), "num_warps": 4, **tiles}


def _launch_fwd(lecture: bool, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    values = as_rows(x, -1)
    rows, columns = values.shape
    pack = 16 // x.element_size()
    config = _lecture(values, TILES=1) if lecture else _config(_fwd, values, 256 * pack, 1, TILES=2)
    given = y.view(-1), values, w, rows, columns, values.stride(0), w.stride(0)
    together = 1 if lecture or values.stride(0) % pack else min(pack, power(columns))
    launch(
        _fwd,
        lambda c: (ceil(rows, c["BM"]),),
        *given,
        PACK=together,
        config=config,
        key=("weighted_sum", lecture, columns),
    )


def _launch_bwd(
    lecture: bool, dx: Any, dw: Any, parts: Any, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> None:
    values, slopes = as_rows(x, -1), dy.reshape(-1)
    rows, columns = values.shape
    pack, key = 16 // x.element_size(), ("weighted_sum", lecture, columns)
    out, dw, some = as_rows(dx, -1) if dx.numel() else None, dw if dw.numel() else None, parts if dw.numel() else None
    shares = device.of(x).multiprocessors if some is None else parts.shape[0]
    if lecture:
        config = _lecture(values)
        given = slopes, out, some, values, w, rows, columns, slopes.stride(0), values.stride(0), w.stride(0)
        launch(_bwd, lambda c: (ceil(columns, c["BN"]), shares), *given, config=config, key=key)
        out = None
    elif some is not None:
        config = _config(_bwd_dw, values, 1024, 1, TILES=4)
        given = some, slopes, values, rows, columns, slopes.stride(0), values.stride(0)
        launch(_bwd_dw, lambda c: (ceil(columns, c["BN"]), shares), *given, config=config, key=key)

    deep = min(32, power(shares))
    adders = 0 if dw is None else ceil(columns, 1024 // deep)

    def grid(c: dict[str, Any]) -> tuple[int]:
        return (adders + (0 if out is None else ceil(rows, c["BM"]) * ceil(columns, c["BN"])),)

    config = _config(_bwd_dx, values, 256 * pack, 4)
    given = slopes, out, dw, some, shares, w, rows, columns, slopes.stride(0), w.stride(0)
    launch(_bwd_dx, grid, *given, DEEP=deep, WIDE=1024 // deep, config=config, key=key)


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
    # Shares of the rows: 4 programs per multiprocessor take 1024 columns each, and at most an eighth of the rows.
    shares = max(8, device.of(x).multiprocessors * 4096 // (columns + 256))
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

    x: (..., D), floating point, any strides. weight: (D,), of any floating dtype, on x's device.
    Returns a tensor of shape (...) in PyTorch's promoted dtype. Under autocast, halves give float32.
    Raises RidgelineError if x or weight is none of these, or if `impl` cannot run the call.
    """
    for name, t in (("x", x), ("weight", weight)):
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"weighted_sum: {name} must be a tensor, but is {type(t).__name__}")
        if not t.is_floating_point():
            wanted = "floating point (float32, float16, bfloat16)"
            raise RidgelineError(f"weighted_sum: {name} must be {wanted}, but is {t.dtype}")
    if weight.dim() != 1 or not x.dim() or x.shape[-1] != weight.shape[0]:
        found = f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise RidgelineError(f"weighted_sum: weight must be a vector as long as x's last dimension, but {found}")
    if x.device != weight.device:
        found = f"weight is on {weight.device} but x on {x.device}"
        raise RidgelineError(f"weighted_sum: {found}; they must share one device")
    plain = eager(WEIGHTED_SUM, impl, x, weight)
    if plain is not None and plain.call is not None:
        return plain.call(x, weight)
    dtype = x.dtype if x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    if x.is_cuda and dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32  # as torch's sum returns there
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
    sharding="x ...k, weight k -> ...",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(129))),
        Case("3x5x70", (Spec(3, 5, 70), Spec(70))),
        Case("1000x1", (Spec(1000, 1), Spec(1))),
        Case("40x17 float32 weight", (Spec(40, 17), Spec(17, dtype="float32"))),
        Case("vector 5", (Spec(5), Spec(5))),
        Case("no rows", (Spec(0, 3, 4), Spec(4))),
        Case("9x9000", (Spec(9, 9000), Spec(9000))),
        Case("512x4096", (Spec(512, 4096), Spec(4096)), use="quick"),
        *(
            Case(f"{m}x{n}", (Spec(m, n), Spec(n)), dtypes=("float32", "bfloat16"), use="bench")
            for m, n in ((16384, 4096), (1024, 262144))
        ),
    ],
)

idea = "a product, then a sum: PyTorch writes the product and reads it again"
WEIGHTED_SUM.eager("torch", idea, reference, served=True)
WEIGHTED_SUM.compiled("the formula fused by torch.compile")


def _narrow(*tensors: torch.Tensor) -> str | None:
    """Why the lecture's tiles cannot run a call, or None: 16 rows and a 16th of the columns must fit in registers.

    The last tensor is the weight, or its gradient.
    """
    columns = tensors[-1].shape[-1] if tensors[-1].dim() else 1
    return None if columns <= 32768 else f"its tiles grow with the columns: at most 32768, but there are {columns}"


for name, idea, lecture in (
    ("triton_lecture", "the lecture's tiles: 16 rows and a 16th of the columns", True),
    ("triton", "64 bytes of loads per thread at a time; backward reads x for dw, then writes dx", False),
):
    launchers = {"fwd": partial(_launch_fwd, lecture), "bwd": partial(_launch_bwd, lecture)}
    WEIGHTED_SUM.kernel(
        name, idea, kind="triton", served=not lecture, supports=_narrow if lecture else None, **launchers
    )
