"""transpose: y_..cr = x_..rc, the last two dimensions swapped, in a tensor of its own.

A warp that reads along a row of x writes along a column of y, a sector a number; so tiles go through shared memory, where they are
turned. There a column lies in one bank unless rows are padded or swizzled. What is left is to have enough on the way, in pieces long
enough for memory: squares of 16-byte packs that threads turn in their registers, then boxes that the copy engine brings and takes.
Source: Ruetsch and Micikevicius, Optimizing matrix transpose in CUDA, NVIDIA 2009.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CudaKernel, TensorMap
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, dtype_name, nbytes
from ridgeline.ops.movement._bytes import DTYPES, UNITS, aligned, unit_of
from ridgeline.select import eager, run

FILE = Path(__file__).with_name("transpose.cu")
_NAIVE, _TILE = CudaKernel(FILE, "transpose_naive", "PPii"), CudaKernel(FILE, "transpose_tile", "PPii")
_PACKED, _TMA = CudaKernel(FILE, "transpose_packed", "PPii"), CudaKernel(FILE, "transpose_tma", "PMMiii")
GROUP = 16  # tiles across a band


def _tiles(x: torch.Tensor, high: int, wide: int) -> int:
    rows, columns = x.shape[-2:]
    return prod(x.shape[:-2]) * -(-rows // high) * -(-columns // wide)


def _small(kernel: CudaKernel, layout: int, y: torch.Tensor, x: torch.Tensor) -> None:
    """Tiles of 32 x 32, an element at a time."""
    launch(kernel, (_tiles(x, 32, 32),), y, x, *x.shape[-2:], block=256, UNIT=UNITS[x.element_size()], LAYOUT=layout)


def _packed(y: torch.Tensor, x: torch.Tensor) -> None:
    """In the widest packs that divide the rows of both; what is strided is made contiguous first, and of a transposed x only copied."""
    if x.mT.is_contiguous():
        y.copy_(x.mT)
        return
    x = x.contiguous()
    size, (rows, columns) = x.element_size(), x.shape[-2:]
    pack = unit_of(rows * size, columns * size, x.data_ptr(), y.data_ptr())
    pack = pack if pack >= 4 else size  # registers are turned by words
    side = max(64, 16 * pack // size) if pack < 16 else 256 // size
    launch(
        _PACKED, (_tiles(x, side, side),), y, x, rows, columns, block=256, shared=side * side * size, UNIT=UNITS[size], PACK=pack, SIDE=side,
        GROUP=GROUP,
    )  # fmt: skip


def _rule(size: int) -> tuning.Config:
    """Tiles of 256 bytes' width, of 16 KB (32 in half precision), six or so a block, and as many blocks as a multiprocessor has room for."""
    squares = {1: (1, 1), 2: (2, 2), 4: (2, 2), 8: (4, 2)}[size]
    heavy = size == 2
    return {"DOWN": squares[0], "ACROSS": squares[1], "STAGES": 4, "OUTS": 2, "BLOCKS": 1 if heavy else 2, "GROUP": GROUP}


def _space() -> list[tuning.Config]:
    """Tiles, rings and orders to try."""
    tiles, rings, orders = ((1, 1), (1, 2), (2, 1), (2, 2)), ((4, 2, 1), (4, 2, 2), (3, 1, 2), (6, 2, 1), (2, 2, 3)), (1, 8, 16, 1 << 20)
    names = "DOWN", "ACROSS", "STAGES", "OUTS", "BLOCKS", "GROUP"
    return [dict(zip(names, (*t, *r, o), strict=True)) for t in tiles for r in rings for o in orders]


def _tma(y: torch.Tensor, x: torch.Tensor) -> None:
    """Persistent blocks; a tile's squares are 128 bytes long and as many rows high."""
    gpu, size, (rows, columns), batches = device.of(x), x.element_size(), x.shape[-2:], prod(x.shape[:-2])
    edge = 128 // size
    views = y.view(batches, columns, rows), x.view(batches, rows, columns)
    box = {"Y_HIGH": "ACROSS", "X_HIGH": "DOWN"}

    def config() -> dict[str, Any]:
        c = tuning.config(gpu, "transpose", "tma", dtype_name(x), partial(_rule, size), _space)
        bytes_, squares = c["DOWN"] * c["ACROSS"] * edge * 128, c["DOWN"] * c["ACROSS"]
        shared = (c["STAGES"] + c["OUTS"]) * bytes_ + 1024
        return c | {"block": min(256, 64 * squares), "shared": shared} | {k: c[v] * edge for k, v in box.items()}

    def grid(c: dict[str, Any]) -> tuple[int]:
        return (min(gpu.multiprocessors * c["BLOCKS"], _tiles(x, c["X_HIGH"], c["Y_HIGH"])),)

    maps = TensorMap(views[0], (1, "Y_HIGH", edge), 128), TensorMap(views[1], (1, "X_HIGH", edge), 128)
    launch(_TMA, grid, y, *maps, batches, rows, columns, config=config, key=dtype_name(x), UNIT=UNITS[size])


@kernel_op("transpose_fwd(Tensor x, str? impl) -> Tensor")
def _forward(x: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))
    if x.numel():
        run(TRANSPOSE, "fwd", impl, (y,), x)
    return y


class _Transpose(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.impl = impl
        return _forward(x, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _forward(dy.contiguous(), ctx.impl), None


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format)


def transpose(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """x with its last two dimensions swapped, in a contiguous tensor of its own. Gradients flow to x.

    x: two dimensions or more, any strides and dtype; contiguous is quickest, and quickest of all with rows of a multiple of 16 bytes.
    Raises RidgelineError where x is no dense tensor or has fewer dimensions, or `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"transpose: x must be a tensor, and is {type(x).__name__}")
    if x.dim() < 2:
        raise RidgelineError(f"transpose: x must have two dimensions or more, and its shape is {tuple(x.shape)}")
    plain = eager(TRANSPOSE, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x)
    return differentiate(_Transpose, x, impl) if torch.is_grad_enabled() and x.requires_grad else _forward(x, impl)


def cost(x: torch.Tensor) -> tuple[Cost, Cost]:
    return Cost(nbytes(x), nbytes(x), 0), Cost(nbytes(x), nbytes(x), 0)


def _contiguous(x: torch.Tensor, *_: Any) -> str | None:
    return None if x.is_contiguous() else "it takes a contiguous tensor"


def _boxes(x: torch.Tensor, *_: Any) -> str | None:
    """What tensor maps take, of x and of its transpose."""
    if any(n * x.element_size() % 16 for n in x.shape[-2:]):
        return "it takes matrices whose sides are multiples of 16 bytes"
    return aligned(x)


def _bench(name: str, *shape: int, dtypes: tuple[str, ...] = ("float32",)) -> Case:
    return Case(name, (Spec(*shape, grad=False),), dtypes=dtypes, use="bench")


TRANSPOSE = Op(
    transpose,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129),)),
        Case("72x200", (Spec(72, 200),)),
        Case("3 of 136x264", (Spec(3, 136, 264),)),
        Case("2x2 of 70x34", (Spec(2, 2, 70, 34),)),
        *(
            Case(f"{shape} of {d}", (Spec(*shape, dtype=d, high=high),), dtypes=("float32",))
            for d, high in (("int8", 0), ("int16", 1 << 15), ("int64", 1 << 40))
            for shape in ((2, 160, 272), (35, 130), (36, 132))
        ),
        Case("1x5", (Spec(1, 5),)),
        Case("3 of 0x5", (Spec(3, 0, 5),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        _bench("8192x8192", 8192, 8192, dtypes=("float32", "bfloat16")),
        _bench("16384x8192", 16384, 8192, dtypes=("bfloat16",)),
        _bench("32768x32768", 32768, 32768),
        _bench("8191x8193", 8191, 8193, dtypes=("float32", "bfloat16")),
        _bench("64 of 1024x2048", 64, 1024, 2048, dtypes=("bfloat16",)),
    ],
)
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


def _rung(name: str, idea: str, start: Any, supports: Any = _contiguous, **facts: Any) -> None:
    TRANSPOSE.kernel(name, idea, kind="cuda", fwd=start, bwd=start, supports=supports, dtypes=DTYPES, **facts)


TRANSPOSE.eager("torch", "PyTorch's own: mT and a copy of it", reference, served=True)
TRANSPOSE.compiled("as torch.compile has it: a tile of Triton, whose layout the compiler turns")
_rung(
    "cuda", "an element a thread, by squares of 32 x 32: rows of x are read whole, those of y written a sector an element", partial(_small, _NAIVE, 0),
    gain=1.0, counter="l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
)  # fmt: skip
_rung(
    "cuda_tile", "through a tile of shared memory: rows of both are whole, and a column of the tile lies in one bank", partial(_small, _TILE, 0),
    gain=2.0, counter="l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
)  # fmt: skip
_rung("cuda_padded", "a 33rd column: a column of the tile lies in 32 banks", partial(_small, _TILE, 1), gain=1.3, counter=_CONFLICTS)
_rung("cuda_swizzled", "columns swizzled by xor with the row: as free of conflicts, and no shared memory lost", partial(_small, _TILE, 2), gain=1.0, counter=_CONFLICTS)  # fmt: skip
_rung(
    "cuda_packed", "16 bytes a load and a store in every dtype: threads turn squares of packs in registers, tiles are 256 bytes wide", _packed,
    None, served=True, gain=1.2, counter="smsp__inst_executed.sum",
)  # fmt: skip
_rung(
    "cuda_tma", "the copy engine brings and takes boxes, several on their way in a ring; persistent blocks only turn", _tma, _boxes, served=True, arch=90,
    gain=1.05, counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)  # fmt: skip
