"""block_sparse_matmul: y = x W^T for a weight that stores only some of its square blocks, in time proportional to them.

    y_mr = sum_{i in row r} x_{m, c_i} B_i^T
    backward: dx_mc = sum_{i: c_i = c} dy_{m, r_i} B_i        dB_i = dy_{r_i}^T x_{c_i}

r and c count rows and columns of blocks. A program takes some rows of x and one row of blocks, and walks these: no work
is done for what is absent. dx does the same with the columns of blocks, whose order is found on the device; dB has a
program for each block, which walks the rows of x. The roof is 2 M operations for each number of W that is there.
Source: Gray, Radford and Kingma, GPU kernels for block-sparse weights, 2017.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.matmul._operands import Matrix, Sizes
from ridgeline.ops.matmul.matmul import in_autocast, rows_of
from ridgeline.select import eager, run

SIDES = (16, 32, 64, 128)
_Maybe = torch.Tensor | None


@triton.jit
def _walk(
    y,
    x,
    blocks,
    starts,
    others,
    order,
    sizes,
    TURNED: tl.constexpr,
    BM: tl.constexpr,
    SIDE: tl.constexpr,
    BAND: tl.constexpr,
):
    """A tile of y: the sum over the blocks of a row (or, TURNED, of a column) of x's columns times a block.

    others: the column (row) of blocks of each, order: where each is in `blocks`, None if in order. sizes: M, the
    columns of y, the columns of x. Bands of BAND tiles of rows walk all lines of blocks before the next, so that their
    rows of x stay in L2.
    """
    M, N, K = sizes
    lines, pid = N // SIDE, tl.program_id(0)
    first = pid // (BAND * lines) * BAND
    size = tl.minimum(tl.cdiv(M, BM) - first, BAND)
    line = pid % (BAND * lines) // size
    m = (first + pid % (BAND * lines) % size) * BM + tl.arange(0, BM)
    i = tl.arange(0, SIDE)
    if TURNED:
        at_block = i[:, None] * SIDE + i[None, :]
    else:
        at_block = i[None, :] * SIDE + i[:, None]
    at_x = x.data + (m % M)[:, None].to(tl.int64) * x.row_stride
    total = tl.zeros((BM, SIDE), tl.float32)
    block = tl.full((), SIDE * SIDE, tl.int64)
    for entry in range(tl.load(starts + line), tl.load(starts + line + 1)):
        k = tl.load(others + entry).to(tl.int64) * SIDE + i
        if order is None:
            at = blocks + entry * block
        else:
            at = blocks + tl.load(order + entry) * block
        left = tl.load(at_x + k[None, :] * x.column_stride, mask=(k[None, :] >= 0) & (k[None, :] < K), other=0.0)
        right = tl.load(at + at_block)
        total = tl.dot(left, right, total, input_precision="ieee")
    n = line * SIDE + i
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], total.to(y.dtype.element_ty), mask=m[:, None] < M)


@triton.jit
def _blocks(db, dy, x, rows, columns, M, N, BM: tl.constexpr, SIDE: tl.constexpr):
    """The gradient of a block: its columns of dy, transposed, times its columns of x."""
    at, i, m = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE), tl.arange(0, BM)
    n, k = tl.load(rows + at).to(tl.int64) * SIDE + i, tl.load(columns + at).to(tl.int64) * SIDE + i
    at_dy = dy.data + n[:, None] * dy.column_stride + m[None, :].to(tl.int64) * dy.row_stride
    at_x = x.data + m[:, None].to(tl.int64) * x.row_stride + k[None, :] * x.column_stride
    total = tl.zeros((SIDE, SIDE), tl.float32)
    ahead = tl.full((), BM, tl.int64)  # BM strides may exceed 2^31
    for start in range(0, M, BM):
        left = tl.load(at_dy, mask=(m[None, :] < M - start) & (n[:, None] < N), other=0.0)
        right = tl.load(at_x, mask=m[:, None] < M - start, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        at_dy += ahead * dy.row_stride
        at_x += ahead * x.row_stride
    to = db + at * SIDE * SIDE + i[:, None] * SIDE + i[None, :]
    tl.store(to, total.to(db.dtype.element_ty))


def _tile(x: torch.Tensor, side: int) -> dict[str, Any]:
    wide = x.dtype == torch.float32
    return {
        "BM": 32 if wide else 128 if side > 32 else 64,
        "num_warps": 8 if side > 32 else 4,
        "num_stages": 1 if wide else 3,
    }


def _walked(
    y: torch.Tensor, x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, others: Any, order: Any
) -> None:
    side, (M, N) = blocks.shape[-1], y.shape
    tile = _tile(x, side)
    grid = (triton.cdiv(M, tile["BM"]) * (N // side),)
    given = y, Matrix(x, *x.stride()), blocks, starts, others, order, Sizes(M, N, x.shape[1])
    launch(_walk, grid, *given, TURNED=order is not None, SIDE=side, BAND=16, **tile)


def _fwd(y: torch.Tensor, x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor) -> None:
    _walked(y, x, blocks, starts, columns, None)


def _bwd(dx: _Maybe, db: _Maybe, x: torch.Tensor, blocks: torch.Tensor, *index: torch.Tensor) -> None:
    _, columns, dy, rows, ends, order, others = index
    if dx is not None:
        _walked(dx, dy, blocks, ends, others, order)
    if db is not None:
        side = blocks.shape[-1]
        tile = _tile(x, side) | {"BM": 64 if side > 32 and x.element_size() == 2 else 32}
        given = db, Matrix(dy, *dy.stride()), Matrix(x, *x.stride()), rows, columns, *dy.shape
        launch(_blocks, (blocks.shape[0],), *given, SIDE=side, **tile)


@kernel_op("block_sparse_matmul_fwd(Tensor x, Tensor blocks, Tensor starts, Tensor columns, str? impl) -> Tensor")
def _forward(
    x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor, impl: str | None
) -> Any:
    y = x.new_empty((x.shape[0], (starts.shape[0] - 1) * blocks.shape[-1]))
    run(BLOCK_SPARSE_MATMUL, "fwd", impl, (y,), x, blocks, starts, columns)
    return y


@kernel_op(
    "block_sparse_matmul_bwd(Tensor x, Tensor blocks, Tensor starts, Tensor columns, Tensor dy, Tensor rows, "
    "Tensor ends, Tensor order, Tensor others, bool wants_x, bool wants_blocks, str? impl) -> (Tensor, Tensor)"
)
def _backward(x: torch.Tensor, blocks: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *index, wants_x, wants_blocks, impl = rest
    dx = x.new_empty(x.shape if wants_x else (0,))
    db = blocks.new_empty(blocks.shape if wants_blocks else (0,))
    outputs = dx if wants_x else None, db if wants_blocks else None
    run(BLOCK_SPARSE_MATMUL, "bwd", impl, outputs, x, blocks, *index)
    return dx, db


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor, impl: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, blocks, starts, columns)
        ctx.impl = impl
        return _forward(x, blocks, starts, columns, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, blocks, starts, columns = ctx.saved_tensors
        rows = _rows(blocks, starts)
        order = columns.argsort(stable=True)
        across = torch.arange(x.shape[1] // blocks.shape[-1] + 1, device=x.device, dtype=columns.dtype)
        ends = torch.searchsorted(columns[order], across)
        index = starts, columns, dy, rows, ends, order, rows[order]
        dx, db = _backward(x, blocks, *index, *ctx.needs_input_grad[:2], ctx.impl)
        return dx if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None, None, None, None


def _rows(blocks: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns each block's row of blocks, one past the last for blocks that belong to none."""
    numbers = torch.arange(blocks.shape[0], device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts[1:].contiguous(), numbers, right=True)


def dense(x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns the weight (N, K), with zeros where no block is; blocks at one place add up."""
    down, side = starts.shape[0] - 1, blocks.shape[-1]
    w = blocks.new_zeros((down + 1, x.shape[-1] // side, side, side))
    w = w.index_put((_rows(blocks, starts), columns.long()), blocks, accumulate=True)[:down]
    return w.transpose(1, 2).reshape(down * side, x.shape[-1])


def reference(x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ dense(x, blocks.to(wide), starts, columns).T).to(x.dtype)


def block_sparse_matmul(
    x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns `x @ W.T`, (..., N), for a weight W (N, K) given by its square blocks, row of blocks by row of blocks.

    x: (..., K), any strides; blocks: (count, B, B), B 16, 32, 64 or 128, in x's dtype. K is a multiple of B.
    starts: (N / B + 1,) and columns: (count,), int32 or int64: row r of blocks has those from starts[r] to
    starts[r + 1] - 1, and block i lies in column columns[i], as in `torch.sparse_bsr_tensor`. Columns need no order;
    blocks at one place add up; blocks past the last start belong to no row. On a CPU both are validated, on a GPU not.
    Gradients flow to x and blocks. Sums are float32, rounded once. Kernels take float32, float16 and bfloat16. Autocast
    casts x and blocks first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, blocks = in_autocast(x, blocks)
    _check(x, blocks, starts, columns)
    plain = eager(BLOCK_SPARSE_MATMUL, impl, x, blocks, ends=starts.shape[0])
    if plain is not None and plain.call is not None:
        return plain.call(x, blocks, starts, columns)
    given = rows_of(x), blocks.contiguous(), starts.contiguous(), columns.contiguous()
    return differentiate(_Product, *given, impl).view(*x.shape[:-1], (starts.shape[0] - 1) * blocks.shape[-1])


def _check(x: Any, blocks: Any, starts: Any, columns: Any) -> None:
    """Raises RidgelineError unless the arguments fit."""
    for name, t in {"x": x, "blocks": blocks, "starts": starts, "columns": columns}.items():
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"block_sparse_matmul: {name} must be a tensor, got {type(t).__name__}")
        if t.layout is not torch.strided or t.is_nested:
            given = "nested" if t.is_nested else t.layout
            raise RidgelineError(f"block_sparse_matmul: it takes dense tensors, but {name} is {given}")
        if t.device != x.device:
            given = f"{name} is on {t.device}, x on {x.device}"
            raise RidgelineError(f"block_sparse_matmul: all tensors must be on one device; {given}")
        if name in ("starts", "columns") and (t.dim() != 1 or t.dtype not in (torch.int32, torch.int64)):
            given = f"{t.dtype} {tuple(t.shape)}"
            raise RidgelineError(f"block_sparse_matmul: {name} must be int32 or int64 with one dimension, got {given}")
    if not x.is_floating_point() or x.dtype != blocks.dtype:
        given = f"{x.dtype} and {blocks.dtype}"
        raise RidgelineError(f"block_sparse_matmul: x and blocks must be of one floating dtype, got {given}")
    if blocks.dim() != 3 or blocks.shape[1] != blocks.shape[2] or blocks.shape[2] not in SIDES:
        given = tuple(blocks.shape)
        raise RidgelineError(f"block_sparse_matmul: blocks must be (count, B, B), B 16, 32, 64 or 128, got {given}")
    reason = _unfit(x, blocks, starts, columns) if x.dim() else "x must have a dimension"
    if reason:
        raise RidgelineError(f"block_sparse_matmul: {reason}")
    if readable(starts) and readable(columns):
        low, high = (int(columns.min()), int(columns.max())) if columns.numel() else (0, 0)
        if starts[0] != 0 or starts[-1] > blocks.shape[0] or bool((starts.diff() < 0).any()):
            given = f"{blocks.shape[0]}, got {starts.tolist()[:8]}"
            raise RidgelineError(f"block_sparse_matmul: starts must rise from 0 to at most {given}")
        if low < 0 or (columns.numel() and high * blocks.shape[-1] >= x.shape[-1]):
            most = x.shape[-1] // blocks.shape[-1] - 1
            raise RidgelineError(f"block_sparse_matmul: columns must be 0 to {most}, got {low} to {high}")


def _unfit(x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor, *_: Any) -> str | None:
    """Returns why sizes do not fit, or None."""
    if x.shape[-1] % blocks.shape[-1]:
        given = f"{blocks.shape[-1]}, but there are {x.shape[-1]}"
        return f"the columns of x must be a multiple of the side of blocks, {given}"
    if columns.shape[0] != blocks.shape[0] or starts.shape[0] < 1:
        given = f"{tuple(columns.shape)} for {blocks.shape[0]} blocks, and starts {tuple(starts.shape)}"
        return f"columns must be (count,) and starts (N / B + 1,), got columns {given}"
    return None


# The dense product of a full weight takes 1. The walk takes so much for all blocks, forward and with both gradients.
WALKED = {128: (1.9, 1.9), 64: (1.9, 2.3), 32: (3.7, 5.6), 16: (7.4, 11.2)}
# A dense weight is made in the time of so many rows of its product, and of so many more for all blocks.
MADE, FILLED = 550, 1600


def _unless(x: torch.Tensor, blocks: torch.Tensor, starts: Any = None, *_: Any, ends: int = 0) -> str | None:
    """Returns why a call is left to a dense product, or None: many blocks, and rows enough to make a dense weight.

    ends: the length of starts, whose dtype is no kernel's."""
    side, rows = blocks.shape[-1], x.numel() // max(1, x.shape[-1])
    places = ((ends or starts.shape[0]) - 1) * (x.shape[-1] // side)
    train = torch.is_grad_enabled() and (x.requires_grad or blocks.requires_grad)
    each = WALKED[side][train]
    if x.dtype == torch.float32 or blocks.shape[0] * (rows * each - FILLED) <= places * (rows + MADE):
        return None
    return "so many of the blocks are there that a dense product is faster"


def cost(
    x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor
) -> tuple[Cost, Cost]:  # fmt: skip
    rows, index = x.numel() // max(1, x.shape[-1]), nbytes(starts, columns)
    y, flops = rows * (starts.shape[0] - 1) * blocks.shape[-1] * x.element_size(), 2 * rows * blocks.numel()
    return Cost(nbytes(x, blocks) + index, y, flops), Cost(nbytes(x, blocks) + y + index, nbytes(x, blocks), 2 * flops)


class _Places(Spec):
    """Starts of `count` places among `down` x `across`, drawn once for these sizes; or their columns."""

    def __init__(self, down: int, across: int, count: int, columns: bool = False):
        super().__init__(count if columns else down + 1, dtype="int32")
        object.__setattr__(self, "among", (down, across, count, columns))

    def make(self, dtype: torch.dtype, device: Any, generator: torch.Generator | None) -> torch.Tensor:
        down, across, count, columns = self.among  # type: ignore[attr-defined]
        place = torch.randperm(down * across, generator=torch.Generator().manual_seed(count))[:count].sort().values
        place[-1] = down * across - 1  # so that no gradient's last row or column is 0
        made = place % across if columns else torch.searchsorted(place // across, torch.arange(down + 1))
        return made.int().to(device)


def _case(M: int, N: int, K: int, side: int, share: float, **facts: Any) -> Case:
    """share: of the blocks that are there."""
    down, across = N // side, K // side
    count = max(1, round(down * across * share))
    args = Spec(M, K), Spec(count, side, side), _Places(down, across, count), _Places(down, across, count, True)
    return Case(f"{M}x{N}x{K} {side}s {share:g}", args, **facts)


BENCH: dict[str, Any] = {"dtypes": ("bfloat16",), "use": "bench"}
BLOCK_SPARSE_MATMUL = Op(
    block_sparse_matmul,
    reference=reference,
    cost=cost,
    sharding="x ...K, blocks CDE, starts S, columns C -> ...N",
    cases=[
        _case(37, 48, 80, 16, 0.4),
        _case(70, 96, 64, 32, 0.5),
        _case(33, 128, 192, 64, 0.5, dtypes=("float16", "bfloat16")),
        _case(33, 256, 384, 128, 0.5, dtypes=("float16", "bfloat16")),
        _case(256, 256, 256, 32, 0.5, use="quick", dtypes=("float32",)),
        *(_case(8192, 8192, 8192, side, share, **BENCH) for side in (32, 64, 128) for share in (0.1, 0.5)),
        _case(8192, 8192, 8192, 128, 1.0, **BENCH),
    ],
)


def _torch(x: torch.Tensor, blocks: torch.Tensor, starts: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return F.linear(x, dense(x, blocks, starts, columns))


BLOCK_SPARSE_MATMUL.eager("naive", "the formula in float32, with a dense weight", reference, served=True)
BLOCK_SPARSE_MATMUL.eager("torch", "a dense weight with zeros, then PyTorch's linear (cuBLAS)", _torch, served=True)
BLOCK_SPARSE_MATMUL.compiled("the formula; torch.compile fuses the copy of the weight")
BLOCK_SPARSE_MATMUL.kernel(
    "triton",
    "a program walks the blocks of its row alone; x's gradient walks columns, a block's the rows of x",
    kind="triton",
    fwd=_fwd,
    bwd=_bwd,
    supports=_unfit,
    unless=_unless,
    leaves=("fwd",),
    served=True,
)
