"""softmax by CUDA C++ in three regimes of row lengths (softmax_regimes.cu), and as FasterTransformer had it: a block per (batch, head).

Source: the softmax of OneFlow and of FasterTransformer, of which these are the ideas written anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Op
from ridgeline.ops.rowwise._rows import ceil, power
from ridgeline.ops.rowwise._softmax import both, columns_of

FILE = Path(__file__).with_name("softmax_regimes.cu")
CODES = {"fwd": "PPqiq", "bwd": "PPPqiqq"}
WARP, BLOCK, UNCACHED = (
    {d: CudaKernel(FILE, f"softmax_{name}_{d}", codes) for d, codes in CODES.items()}
    for name in ("warp", "block", "uncached")
)
WARP_COLUMNS = 1024  # what a warp holds in registers
MOST = (1 << 31) - 1024  # columns that an int counts, and a block's threads beyond them
FEW = 120  # (batch, head) pairs, of which FasterTransformer gives each row a block


def _pack(columns: int, *tensors: torch.Tensor) -> int:
    """Elements of a load: 16 bytes of the widest where all rows are aligned to them, or half as many, or less."""
    pack = 16 // max([t.element_size() for t in tensors])
    while any(
        [
            n % (pack * t.element_size())
            for t in tensors
            for n in (t.data_ptr(), (columns | t.stride(0)) * t.element_size())
        ]
    ):
        pack //= 2
    return pack


def _start(
    kernels: dict[str, CudaKernel], direction: str, blocks: int, out: torch.Tensor, *inputs: torch.Tensor, **facts: Any
) -> None:
    x, y = (out, inputs[0]) if direction == "bwd" else (inputs[0], out)
    types: dict[str, Any] = {"XTYPE": CTYPE[x.dtype], "YTYPE": CTYPE[y.dtype], "block": facts["THREADS"]}
    launch(kernels[direction], (blocks,), out, *inputs, *out.shape, *[t.stride(0) for t in inputs], **types, **facts)


def warp(direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """As many lanes as a row has packs, at most 32; two rows for each where these are short, for more loads on their way."""
    (rows, columns), threads = out.shape, 128
    pack = _pack(columns, out, *inputs)
    lanes = min(32, power(columns // pack))
    packs = ceil(columns // pack, lanes)
    several = 2 if pack * packs * len(inputs) <= 8 else 1
    blocks = ceil(rows, threads // lanes * several)
    _start(WARP, direction, blocks, out, *inputs, PACK=pack, LANES=lanes, PACKS=packs, ROWS=several, THREADS=threads)


def block(direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """The most threads that leave a multiprocessor as many blocks as its shared memory does."""
    rows, columns = out.shape
    gpu, shared = device.of(out), 4 * columns * len(inputs)
    resident = max(1, min(16, gpu.shared_memory // (shared + 1024)))
    threads = next(t for t in (1024, 512, 256, 128) if t * resident <= 2048)
    _start(
        BLOCK, direction, rows, out, *inputs, PACK=_pack(columns, out, *inputs), THREADS=threads, EACH=1, shared=shared
    )


def uncached(direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    rows, columns = out.shape
    pack = _pack(columns, out, *inputs)
    threads = min(1024, max(32, power(columns // pack)))
    _start(UNCACHED, direction, rows, out, *inputs, PACK=pack, THREADS=threads, EACH=1)


def heads(direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """A thread per column; a block takes a square's rows one after the other, or one row where squares are few."""
    rows, columns = out.shape
    each = columns if ceil(rows, columns) > FEW else 1
    _start(UNCACHED, direction, ceil(rows, each), out, *inputs, PACK=1, THREADS=max(32, power(columns)), EACH=each)


def _narrow(x: torch.Tensor, *rest: Any) -> str | None:
    return (
        None
        if columns_of(x, *rest) <= WARP_COLUMNS
        else f"it takes rows of at most {WARP_COLUMNS} columns, and these have {columns_of(x, *rest)}"
    )


def _countable(x: torch.Tensor, *rest: Any) -> str | None:
    return (
        None
        if columns_of(x, *rest) <= MOST
        else f"it counts columns up to 2^31 - 1024, and these rows have {columns_of(x, *rest)}"
    )


def _fits_shared(x: torch.Tensor, *rest: Any) -> str | None:
    most = (device.of(x).shared_memory - 2048) // 8
    if columns_of(x, *rest) <= most:
        return None
    return f"it keeps a row in shared memory, and backward two: at most {most} columns, and these rows have {columns_of(x, *rest)}"


SYNCED, READ = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "lts__t_sectors_op_read.sum"


def ladder(op: Op) -> None:
    """Registers these rungs."""

    def rung(name: str, idea: str, launcher: Any, supports: Any, **facts: Any) -> None:
        op.kernel(name, idea, kind="cuda", supports=supports, **both(launcher), **facts)

    rung(
        "cuda_bh",
        "as FasterTransformer: a block per (batch, head), a thread per column, row after row",
        heads,
        _narrow,
        counter=SYNCED,
    )
    rung(
        "cuda_uncached",
        "a block per row and 16 bytes a load; any length; the row is read three times, backward twice",
        uncached,
        _countable,
        gain=1.2,
        counter=SYNCED,
    )
    rung(
        "cuda_block",
        "the row kept in shared memory, [pack][packs] against bank conflicts, and read once",
        block,
        _fits_shared,
        gain=1.2,
        counter=READ,
    )
    rung(
        "cuda_warp",
        "rows of up to 1024 columns in the registers of a warp, or of a part of one: no barrier, no shared memory",
        warp,
        _narrow,
        gain=1.5,
        counter=SYNCED,
    )
