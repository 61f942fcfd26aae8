"""cumsum: y_i = x_0 + x_1 + ... + x_i, along one dimension.

    backward: dx_i = dy_i + dy_(i+1) + ..., the same from the end

A row is summed in one pass: a block sums a tile in its registers, and looks back at what the tiles before it add up to, as far as they have
said, instead of waiting for a pass of its own. The floor is a read and a write. Floats are added in one order whatever block is first.
Source: Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back, 2016 (NVR-2016-002).
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import FLOATS, Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("cumsum.cu")
_TILES, _TOTALS = CudaKernel(FILE, "cumsum_tiles", "PPPqqq"), CudaKernel(FILE, "cumsum_totals", "Pq")
_ROWS, _COLUMNS = CudaKernel(FILE, "cumsum_rows", "PPq"), CudaKernel(FILE, "cumsum_columns", "PPPqqqqq")
_CLEAR = CudaKernel(FILE, "cumsum_clear", "Pq")
WHOLE = {"int32": "int", "int64": "long long", "int16": "short", "int8": "signed char", "uint8": "unsigned char"}
KINDS = CTYPE | {getattr(torch, name): ctype for name, ctype in WHOLE.items()}
GROUP = 32  # tiles, in cumsum.cu
FEW = 32  # columns that are turned into rows where they are long, and bytes of a row by thread, four times


def _sizes(x: torch.Tensor, dim: int) -> tuple[int, int, int]:
    shape = x.shape or (1,)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _macros(y: torch.Tensor, x: torch.Tensor, rows: int, n: int, reverse: bool, packed: bool, threads: int) -> dict[str, Any]:
    """Packs of 16 bytes of the wider type, where rows begin at such; as many of them as leave a multiprocessor 1024 threads' registers."""
    pack = 16 // max(y.element_size(), x.element_size())
    whole = packed and (n % pack == 0 or (rows == 1 and not reverse))
    pack = pack if whole and not any([t.data_ptr() % (pack * t.element_size()) for t in (y, x)]) else 1
    floating, wide = y.is_floating_point(), y.element_size() == 8
    sums = ("float", "double") if floating else ("unsigned long long" if wide else "unsigned", "unsigned long long")
    macros = {"XTYPE": KINDS[x.dtype], "YTYPE": KINDS[y.dtype], "STYPE": sums[0], "TTYPE": sums[1], "PACK": pack}
    return macros | {"ITEMS": {8: 4, 4: 6, 2: 8, 1: 16}[pack], "THREADS": threads, "REVERSE": int(reverse), "PHASE": 0, "block": threads}


def _tiled(phased: bool, packed: bool, y: torch.Tensor, x: torch.Tensor, dim: int, reverse: bool) -> None:
    """Rows by tiles: in one pass, or in three."""
    x = x.contiguous()
    rows, n, _ = _sizes(x, dim)
    macros = _macros(y, x, rows, n, reverse, packed, 256)
    tiles = -(-n // (256 * macros["PACK"] * macros["ITEMS"]))
    every = rows * tiles
    state = torch.empty(2 * (1 + every + rows * -(-tiles // GROUP)), dtype=torch.int64, device=x.device)
    if phased:
        for phase in (1, 2):
            launch(_TILES, (every,), y, x, state, rows, n, tiles, **macros | {"PHASE": phase})
            if phase == 1:
                launch(_TOTALS, (rows,), state, tiles, **macros | {"block": 1024})
        return
    launch(_CLEAR, (-(-state.numel() // 256),), state, state.numel(), **macros | {"block": 256})
    launch(_TILES, (every,), y, x, state, rows, n, tiles, **macros)


def _columns(y: torch.Tensor, x: torch.Tensor, dim: int, reverse: bool) -> None:
    """A thread a column, or where these are few a thread a chunk of one, in two passes."""
    outer, n, inner = _sizes(x, dim)
    macros = _macros(y, x, 1, 1, reverse, False, 256)
    many = 2048 * device.of(x).multiprocessors
    chunks = 1 if n < 256 else max(1, min(256, n // 64, many // (outer * inner)))
    chunk = -(-n // chunks)
    chunks = -(-n // chunk)
    totals = torch.empty(outer * chunks * inner if chunks > 1 else 0, dtype=torch.int64, device=x.device)
    grid = (-(-outer * chunks * inner // 256),)
    for out in (None, y) if chunks > 1 else (y,):
        launch(_COLUMNS, grid, *((x, None, x)[1:] if out is None else (y, x)), totals, outer, n, inner, chunk, chunks, **macros)


def _best(y: torch.Tensor, x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool) -> None:
    x = x.contiguous()
    outer, n, inner = _sizes(x, dim)
    if inner > 1 and n >= 1024 and inner < FEW and outer * inner < 1 << 14:
        turned = x.view(outer, n, inner).mT.contiguous()
        made = torch.empty_like(turned, dtype=y.dtype)
        _best(made, turned, 2, dtype, reverse)
        y.view(outer, n, inner).copy_(made.mT)
    elif inner > 1 or n * y.element_size() <= 4 * FEW:
        _columns(y, x, dim, reverse)
    else:
        macros = _macros(y, x, outer, n, reverse, True, 256)
        warps = -(-n // (32 * macros["PACK"] * macros["ITEMS"]))
        if warps > 8 and outer < 2 * device.of(x).multiprocessors:
            _tiled(False, True, y, x, dim, reverse)
        else:
            threads = min(256, 32 << (warps - 1).bit_length())
            launch(_ROWS, (outer,), y, x, n, **macros | {"THREADS": threads, "block": threads})


def _teach(phased: bool, y: torch.Tensor, x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool) -> None:
    _tiled(phased, False, y, x, dim, reverse)


@kernel_op("cumsum_fwd(Tensor x, int dim, ScalarType dtype, bool reverse, str? impl) -> Tensor")
def _forward(x: torch.Tensor, dim: int, dtype: torch.dtype, reverse: bool, impl: str | None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        run(CUMSUM, "bwd" if reverse else "fwd", impl, (y,), x, dim, dtype, reverse)
    return y


class _Cumsum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype, impl: str | None) -> torch.Tensor:
        ctx.facts = dim, dtype, True, impl
        return _forward(x, dim, dtype, False, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _forward(dy, *ctx.facts), None, None, None


def reference(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.cumsum(x, dim, dtype=dtype)


def cumsum(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, impl: str | None = None) -> torch.Tensor:
    """The sums of x from the first element along `dim` up to each, as `torch.cumsum`. Gradients flow to x.

    x: any shape and strides, of real numbers. dtype: what x is cast to first, and the result's type; None is x's, or int64 where x holds
    integers. Integers are exact, and wrap around in their type; halves add in float32; floats give the same bits every time.
    Returns a contiguous tensor of x's shape. Raises RidgelineError on a `dim` that x does not have, complex numbers, or an `impl` that
    cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.is_complex():
        raise RidgelineError(
            f"cumsum: x must be a tensor of real numbers, and is {x.dtype if isinstance(x, torch.Tensor) else type(x).__name__}"
        )
    most = max(1, x.dim())
    if not isinstance(dim, int | torch.SymInt) or not -most <= dim < most:
        raise RidgelineError(f"cumsum: dim must be an int from {-most} to {most - 1} for an x of {x.dim()} dimensions, and is {dim!r}")
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype.is_complex):
        raise RidgelineError(f"cumsum: dtype must be None or a real one (torch.float32, int32, ...), and is {dtype!r}")
    result = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if x.dtype not in KINDS or result.is_floating_point or x.is_floating_point() or result.itemsize < x.dtype.itemsize:
        x = x.to(result)
    plain = eager(CUMSUM, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x, dim, result)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_Cumsum, x, dim % most, result, impl)
    return _forward(x, dim % most, result, False, impl)


def cost(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> tuple[Cost, Cost]:
    size = (dtype or (x.dtype if x.is_floating_point() else torch.int64)).itemsize
    return Cost(nbytes(x), size * x.numel(), x.numel()), Cost(size * x.numel(), nbytes(x), x.numel())


def _whole(*shape: int, high: int = 1 << 20) -> Spec:
    return Spec(*shape, dtype="int32", high=high)


INT32, ONE = {"dtype": torch.int32}, ("int32",)
CUMSUM = Op(
    cumsum,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129), -1)),
        Case("33x129 dim 0", (Spec(33, 129), 0)),
        Case("3x1000x5 dim 1", (Spec(3, 1000, 5), 1)),
        Case("2x4000x3 dim 1", (Spec(2, 4000, 3), 1)),
        Case("100001", (Spec(100001), 0)),
        Case("3x300000", (Spec(3, 300000), 1)),
        Case("7x3", (Spec(7, 3), 1)),
        Case("1", (Spec(1), 0)),
        Case("4x0", (Spec(4, 0), 1)),
        Case("70000 int32", (_whole(70000, high=1 << 30), 0), dtypes=ONE),
        Case("70001 int32 to int32", (_whole(70001, high=1 << 30), 0), INT32, dtypes=ONE),
        Case("600000 uint8", (Spec(600000, dtype="uint8", high=255), 0), dtypes=("uint8",)),
        Case("2^20 int32", (_whole(1 << 20), 0), INT32, dtypes=ONE, use="quick"),
        Case("1024x4096", (Spec(1024, 4096), 1), use="quick"),
        Case("2^30 int32 to int32", (_whole(1 << 30), 0), INT32, dtypes=ONE, use="bench"),
        Case("2^28", (Spec(1 << 28, grad=False), 0), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x16384", (Spec(16384, 16384), -1), dtypes=("float32", "bfloat16"), use="bench"),
        Case("16384x4096 dim 0", (Spec(16384, 4096, grad=False), 0), dtypes=("float32",), use="bench"),
    ],
)

CUMSUM.eager("torch", "PyTorch's own: one pass that looks back, or a block for some rows", reference, served=True)
CUMSUM.compiled("torch.compile's scan, where it makes one")


def _last(x: torch.Tensor, dim: int = 0, *rest: Any) -> str | None:
    shape = x.shape or (1,)
    return None if math.prod(shape[dim % len(shape) + 1 :]) == 1 else "it takes the last dimension, and what follows this has sizes"


def _rung(name: str, idea: str, start: Any, **facts: Any) -> None:
    CUMSUM.kernel(name, idea, kind="cuda", fwd=start, bwd=start, dtypes=(*FLOATS, *WHOLE), **facts)


_rung("cuda_phases", "tiles' totals, their sums, then the tiles again: x is read twice", partial(_teach, True), supports=_last)
_rung("cuda_lookback", "one pass: a tile looks back at the totals of those before it, in a fixed order", partial(_teach, False),
      supports=_last, gain=1.5, counter="dram__bytes_read.sum")  # fmt: skip
_rung("cuda", "16-byte loads; a block a row where they are many, a thread a column along other dimensions", _best, served=True,
      gain=1.1, counter="smsp__inst_executed.sum")  # fmt: skip
