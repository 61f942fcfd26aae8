"""Shared by softmax and log_softmax: kernels, launchers, torch ops and autograd; `log` tells the two apart.

A row that fits a block's registers, or the shared memory of a thread-block cluster, is read once. Otherwise a first
pass finds the maximum and the sum online. The floor is one read of x and one write of y; backward reads dy and y and
writes dx.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch, tracing
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Case, Implementation, Op, RidgelineError, Spec
from ridgeline.ops.rowwise._rows import BENCH, TILE_LIMIT, as_rows, ceil, empty_rows, key_of, power, tiles
from ridgeline.select import by_kind, eager, run
from ridgeline.tiles import cluster_rows
from ridgeline.tiles.online_softmax import divide, exact_exp, exp, exp_below, log, merge, update


@triton.jit
def _fwd(y, x, rows, columns, x_stride, LOG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    column = tl.arange(0, BN)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        values = tl.load(x + row * x_stride + column, mask=mask, other=float("-inf")).to(tl.float32)
        below = values - tl.max(values, 1)[:, None]
        e = exp_below(below, BN, x.dtype.element_ty)
        total = tl.sum(e, 1)[:, None]
        if LOG:
            result = (below - log(total)).to(y.dtype.element_ty)
        else:
            result = divide(e, total, y.dtype.element_ty)
        tl.store(y + row * columns + column, result, mask=mask)


@triton.jit
def _probability(y, mask, LOG: tl.constexpr):
    """softmax, loaded from y."""
    value = tl.load(y, mask=mask, other=0).to(tl.float32)
    if LOG:
        return exp(value, y.dtype.element_ty)
    return value


@triton.jit
def _gradient(slope, p, total, LOG: tl.constexpr):
    """dx from dy, softmax and the row's sum of dy or, for softmax, of dy times softmax."""
    if LOG:
        return slope - p * total
    # Not p * (slope - total), which cancels before it is rounded if one p is nearly 1.
    return tl.fma(-total, p, slope * p)


@triton.jit
def _bwd(
    dx,
    dy,
    y,
    rows,
    columns,
    dy_stride,
    y_stride,
    LOG: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BN)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < columns)
        p = _probability(y + row * y_stride + column, mask, LOG)
        slope = tl.load(dy + row * dy_stride + column, mask=mask, other=0).to(tl.float32)
        total = tl.sum(slope if LOG else slope * p, 1)[:, None]
        result = _gradient(slope, p, total, LOG)
        tl.store(dx + row * columns + column, result.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_wide(y, x, rows, columns, x_stride, LOG: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)
    dtype: tl.constexpr = x.dtype.element_ty
    x += row * x_stride
    y += row * columns
    top = tl.full((BN,), float("-inf"), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, columns, BN):
        values = tl.load(x + start + column, mask=start + column < columns, other=float("-inf")).to(tl.float32)
        top, total = update(top, total, values, dtype)
    most, whole = merge(top, total, dtype)
    for start in range(0, columns, BN):
        mask = start + column < columns
        below = tl.load(x + start + column, mask=mask, other=0).to(tl.float32) - most
        if LOG:
            result = (below - log(whole)).to(y.dtype.element_ty)
        else:
            result = divide(exact_exp(below, dtype), whole, y.dtype.element_ty)
        tl.store(y + start + column, result, mask=mask)


@triton.jit
def _bwd_wide(dx, dy, y, rows, columns, dy_stride, y_stride, LOG: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)
    dy += row * dy_stride
    y += row * y_stride
    dx += row * columns
    sums = tl.zeros((BN,), tl.float32)
    for start in range(0, columns, BN):
        mask = start + column < columns
        slope = tl.load(dy + start + column, mask=mask, other=0).to(tl.float32)
        sums += slope if LOG else slope * tl.load(y + start + column, mask=mask, other=0).to(tl.float32)
    total = tl.sum(sums, 0)
    for start in range(0, columns, BN):
        mask = start + column < columns
        slope = tl.load(dy + start + column, mask=mask, other=0).to(tl.float32)
        result = _gradient(slope, _probability(y + start + column, mask, LOG), total, LOG)
        tl.store(dx + start + column, result.to(dx.dtype.element_ty), mask=mask)


FILE = Path(__file__).with_name("softmax.cu")
CUDA = {"fwd": CudaKernel(FILE, "softmax_fwd", "PPqiq"), "bwd": CudaKernel(FILE, "softmax_bwd", "PPPqiqq")}
TILED, WIDE = {"fwd": _fwd, "bwd": _bwd}, {"fwd": _fwd_wide, "bwd": _bwd_wide}
ROW_LIMIT = 16384  # the most columns for a row per program: 64 values of each input per thread
CLUSTER_BYTES = 2 << 20  # the most bytes of a row's inputs: 128 KiB for each of 16 blocks
CLUSTER_COLUMNS = 1024, 1 << 19  # more than the first; at most the second, 32 for each of 16 x 1024 threads
# Up to so many columns tiles are as fast forward, except with unaligned rows, which they load by single elements.
CLUSTER_FORWARD = 2048
TILES_FORWARD = 8192, 16384  # as fast, and 1 to 6% faster on an H200, with more columns than the first
# The same backward, by log and size of elements: log_softmax's tiles hold exponentials too.
CLUSTER_BACKWARD = {(False, 2): 16384, (True, 2): 8192, (False, 4): 16384, (True, 4): 16384}
TILE_WASTE = 1.25  # tiles are a power of two wide: clusters are faster if that is more than so many times the columns


def cluster_rule(size: int, backward: bool, shifted: bool) -> tuning.Config:
    """How the cluster kernels take rows of `size` bytes, all inputs together.

    It sets blocks per row (CLUSTER), threads per block, blocks per multiprocessor, rows that a block prefetches
    (STAGES) and rows per cluster (ROWS). Other blocks, not prefetched rows, fill the time in which a block waits. But
    backward, a cluster takes several unaligned (shifted) rows that begin at the same offset.
    """
    cluster = min(16, power(ceil(size, 32768 if backward else 16384 if size <= 65536 else 65536)))
    part, most, each, resident, rows = ceil(size, cluster), 512, 128, 2048, 1
    if backward:  # both inputs stay in registers: 80 per thread, or 64 for half as much
        most, each, resident = (1024, 64, 1024) if cluster > 1 or shifted else (256, 128, 768)
    threads = min(most, max(128, power(ceil(part, each))))
    blocks = max(1 if backward else 2, min(resident // threads, 221184 // (part + 1024)))
    if backward and shifted:
        rows = 8
    stages = 1 if rows == 1 else max(1, min(3, 221184 // (blocks * part)))
    return {"CLUSTER": cluster, "THREADS": threads, "BLOCKS": blocks, "STAGES": stages, "ROWS": rows}


def cluster_space(size: int, backward: bool, where: device.Device) -> list[tuning.Config]:
    found = cluster_rows.space(size, where.shared_memory, 256, (1, 2, 3) if backward else (1,))
    return [c | {"ROWS": r} for c in found for r in ((1,) if c["STAGES"] == 1 else (4, 16))]


class Softmax:
    """The torch ops, the autograd function and the launchers of softmax or, with `log`, log_softmax.

    Call it as the public function. A launcher takes a direction, an output and inputs of shape (rows, columns) with
    contiguous rows, see `as_rows`.
    """

    op: Op

    def __init__(self, name: str, log: bool):
        self.name, self.log = name, log
        fwd = self.fwd = kernel_op(f"{name}_fwd(Tensor x, int dim, ScalarType? dtype, str? impl) -> Tensor")(
            self._forward
        )
        bwd = kernel_op(f"{name}_bwd(Tensor dy, Tensor y, int dim, ScalarType dtype, str? impl) -> Tensor")(
            self._backward
        )

        class Differentiable(Function):
            @staticmethod
            def forward(
                ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None, impl: str | None
            ) -> torch.Tensor:
                y = fwd(x, dim, dtype, impl)
                ctx.save_for_backward(y)
                ctx.facts = dim, x.dtype, impl
                return y

            @staticmethod
            @first_order
            def backward(ctx: Any, dy: torch.Tensor) -> Any:
                (y,) = ctx.saved_tensors
                return bwd(dy, y, *ctx.facts), None, None, None

        Differentiable.__name__ = Differentiable.__qualname__ = name
        self.function = Differentiable
        self.look = by_kind(1)(self._look)

    def __call__(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None, impl: str | None) -> torch.Tensor:
        plain, cast, dtype = self.look(x, dim, dtype, impl)
        if cast is not None:
            x = x.to(cast)
        if plain is not None and plain.call is not None:
            return plain.call(x, dim, dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            return differentiate(self.function, x, dim, dtype, impl)
        return self.fwd(x, dim, dtype, impl)

    def _look(
        self, x: torch.Tensor, dim: int, dtype: torch.dtype | None, impl: str | None
    ) -> tuple[Implementation | None, torch.dtype | None, torch.dtype | None]:
        """Checks a call and chooses. Returns too to which dtype x is cast, and that of the result if it differs."""
        name, cast = self.name, None
        if not isinstance(x, torch.Tensor):
            raise RidgelineError(f"{name}: x must be a tensor, but is {type(x).__name__}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            wanted = "a torch.dtype such as torch.float32, or None"
            raise RidgelineError(f"{name}: dtype must be {wanted}, but is {dtype!r}")
        if not (dtype or x.dtype).is_floating_point:
            found = f"would be {dtype or x.dtype}; give dtype=torch.float32"
            raise RidgelineError(f"{name}: the result must be floating point, but {found}")
        many = max(x.dim(), 1)
        if not isinstance(dim, int) or not -many <= dim < many:
            wanted = f"an int from {-many} to {many - 1} for a tensor of {x.dim()} dimensions"
            raise RidgelineError(f"{name}: dim must be {wanted}, but is {dim!r}")
        if dtype is None and x.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.promote_types(x.dtype, torch.float32)  # as autocast does for torch's own
        if dtype is not None and (dtype != torch.float32 or x.dtype not in (torch.float16, torch.bfloat16)):
            x, cast, dtype = x.to(dtype), dtype, None
        return eager(self.op, impl, x, dim, dtype), cast, dtype

    def _forward(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None, impl: str | None) -> torch.Tensor:
        y = empty_rows(x, dim, dtype)
        self._fill("fwd", impl, y, (x,), dim)
        return y

    def _backward(
        self, dy: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype, impl: str | None
    ) -> torch.Tensor:
        dx = empty_rows(y, dim, dtype)
        self._fill("bwd", impl, dx, (dy, y), dim)
        return dx

    def _fill(
        self, direction: str, impl: str | None, out: torch.Tensor, inputs: tuple[torch.Tensor, ...], dim: int
    ) -> None:
        """Fills `out` with the implementation that is chosen for the call."""
        if out.numel() and not tracing():
            run(self.op, direction, impl, (as_rows(out, dim),), *[as_rows(t, dim) for t in inputs])

    def row(self, direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        """One row per program."""
        rows, columns = out.shape
        bn, warps = power(columns), 4 * len(inputs) * (1 + power(columns) // ROW_LIMIT)
        strides = [t.stride(0) for t in inputs]
        launch(
            TILED[direction],
            (rows,),
            out,
            *inputs,
            rows,
            columns,
            *strides,
            LOG=self.log,
            BM=1,
            BN=bn,
            STAGES=1,
            num_warps=warps,
        )

    def tiled(self, direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Tiles of whole rows if they fit a block's registers, else chunks of a row."""
        rows, columns = out.shape
        strides, bn = [t.stride(0) for t in inputs], power(columns)
        given = out, *inputs, rows, columns, *strides
        if bn * 4 * len(inputs) > TILE_LIMIT:
            launch(WIDE[direction], (rows,), *given, LOG=self.log, BN=8192 // len(inputs), num_warps=8)
            return
        config, grid = tiles(self.name, TILED[direction], rows, bn, *inputs)
        launch(TILED[direction], grid, *given, LOG=self.log, config=config, key=(self.name, bn))

    def cluster(self, direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Rows spread over clusters, in CUDA C++; rows that tiles are as fast on go to tiles."""
        rows, columns = out.shape
        backward, kernel = direction == "bwd", CUDA[direction]
        even = power(columns) <= TILE_WASTE * columns and not cluster_rows.shifted(columns, inputs[0].element_size())
        low, high = (0, CLUSTER_BACKWARD[self.log, inputs[0].element_size()]) if backward else TILES_FORWARD
        if even and low < columns <= high:
            self.tiled(direction, out, *inputs)
            return
        x, y = (out.dtype, inputs[0].dtype) if backward else (inputs[0].dtype, out.dtype)
        read, written = (y, x) if backward else (x, y)
        where, size = device.of(out), cluster_rows.whole(columns, read.itemsize) * read.itemsize * len(inputs)

        def config() -> dict[str, Any]:
            key = key_of(x, y, columns)
            shifted = cluster_rows.shifted(columns, read.itemsize)
            rule, space = partial(cluster_rule, size, backward, shifted), partial(cluster_space, size, backward, where)
            found = tuning.config(where, self.name, kernel.name, key, rule, space)
            plan = cluster_rows.plan(columns, len(inputs), read.itemsize, written.itemsize, **found)
            return plan | {"XTYPE": CTYPE[x], "YTYPE": CTYPE[y]}

        def grid(c: dict[str, Any]) -> tuple[int]:
            resident = max(1, where.multiprocessors * c["BLOCKS"] // c["CLUSTER"])
            return (c["CLUSTER"] * min(rows, max(resident, ceil(rows, c["ROWS"]))),)

        strides = [t.stride(0) for t in inputs]
        launch(
            kernel,
            grid,
            out,
            *inputs,
            rows,
            columns,
            *strides,
            LOG=int(self.log),
            config=config,
            key=(self.name, columns),
        )

    def tiles_rung(self) -> None:
        """Registers `triton`, which takes all calls."""
        self.op.kernel(
            "triton",
            "several short rows per program, more warps for long ones, online softmax in chunks for wide ones",
            kind="triton",
            served=True,
            **both(self.tiled),
        )

    def cluster_rung(self) -> None:
        """Registers `cuda_cluster`, which serves wide rows."""
        self.op.kernel(
            "cuda_cluster",
            "a row spread over a cluster's shared memory and read once; where that is no faster, in tiles",
            kind="cuda",
            served=True,
            arch=90,
            shared=227 << 10,
            supports=_fits_cluster,
            gain=1.5,  # for rows too long for registers: two passes over memory instead of three
            counter="dram__bytes_read.sum",
            **both(self.cluster),
        )


def both(launcher: Any) -> dict[str, Any]:
    """A launcher's two directions."""
    return {direction: partial(launcher, direction) for direction in ("fwd", "bwd")}


def columns_of(x: torch.Tensor, *rest: Any) -> int:
    """The length of a row, for a public call (x, dim, dtype) or a launcher's inputs, whose rows are last."""
    dim = rest[0] if rest and isinstance(rest[0], int) else -1
    return x.shape[dim] if x.dim() else 1


def _fits_cluster(x: torch.Tensor, *rest: Any) -> str | None:
    columns, (low, high) = columns_of(x, *rest), CLUSTER_COLUMNS
    if x.element_size() == 4:
        low = 4 * CLUSTER_FORWARD  # float32 must agree on a row's maximum before its sum
    elif not cluster_rows.shifted(columns, x.element_size()):
        low = CLUSTER_FORWARD
    return cluster_rows.refusal(
        columns, (low, high), CLUSTER_BYTES, [x, *[t for t in rest if isinstance(t, torch.Tensor)]]
    )


def full_precision(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Why the formula in eager PyTorch is not precise enough, or None."""
    return (
        "in half precision, rounding after every pass exceeds the tolerance"
        if x.dtype in (torch.float16, torch.bfloat16)
        else None
    )


class Infinite(Spec):
    """Random data with -inf in every third column, and one row of -inf alone."""

    def make(self, *args: Any) -> torch.Tensor:
        x = super().make(*args)
        with torch.no_grad():
            x[..., ::3] = float("-inf")
            x[..., 1, :] = float("-inf")
        return x


CASES = [
    Case("33x129", (Spec(33, 129),)),
    Case("7x1", (Spec(7, 1),)),
    Case("3x5x70 dim 1", (Spec(3, 5, 70), 1)),
    Case("130x3 dim 0", (Spec(130, 3), 0)),
    Case("scalar", (Spec(),)),
    Case("no rows", (Spec(0, 4),)),
    Case("5x1000 float32", (Spec(5, 1000),), {"dtype": torch.float32}, dtypes=("float16", "bfloat16")),
    Case("40x100 -inf", (Infinite(40, 100),)),
    Case("33x8200", (Spec(33, 8200),)),
    Case("33x20003", (Spec(33, 20003),)),
    Case("33x65544", (Spec(33, 65544),)),
    Case("1024x1024", (Spec(1024, 1024),), use="quick"),
    Case("512x4096", (Spec(512, 4096),), use="quick"),
    Case("16384x16384", (Spec(16384, 16384),), dtypes=("float32",), use="bench"),
    *(Case(f"{m}x{n}", (Spec(m, n),), dtypes=("bfloat16",), use="bench") for m, n in BENCH),
]
