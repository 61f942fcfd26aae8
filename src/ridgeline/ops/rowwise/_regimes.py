"""softmax in CUDA C++ in three regimes of row length, and as in FasterTransformer: one block per (batch, head).

The first regime is log_softmax's too. The kernels are in softmax_regimes.cu.
Source: the softmax of OneFlow and of FasterTransformer, whose ideas are reimplemented here.
"""

from __future__ import annotations

from functools import partial
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
WARP_COLUMNS = 1024  # a warp holds at most so many in registers
MOST = (1 << 31) - 1024  # columns that an int can count, with a block's threads past the end
FEW = 120  # (batch, head) pairs: for at most so many FasterTransformer uses one block per row


def _pack(columns: int, *tensors: torch.Tensor) -> int:
    """Elements per load: 16 bytes of the widest dtype if all rows are so aligned, else fewer."""
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


def warp(log: bool, direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """As many lanes as a row has packs, at most 32; two short rows per group of lanes, for more loads in flight."""
    (rows, columns), threads = out.shape, 128
    pack = _pack(columns, out, *inputs)
    lanes = min(32, power(columns // pack))
    packs = ceil(columns // pack, lanes)
    several = 2 if pack * packs * len(inputs) <= 8 else 1
    blocks = ceil(rows, threads // lanes * several)
    facts = {"PACK": pack, "LANES": lanes, "PACKS": packs, "ROWS": several, "THREADS": threads, "LOG": int(log)}
    _start(WARP, direction, blocks, out, *inputs, **facts)


def block(direction: str, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """As many threads as let a multiprocessor hold all the blocks that its shared memory can."""
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
    """One thread per column; a block takes a square's rows in turn, or a single row if squares are few."""
    rows, columns = out.shape
    each = columns if ceil(rows, columns) > FEW else 1
    _start(UNCACHED, direction, ceil(rows, each), out, *inputs, PACK=1, THREADS=max(32, power(columns)), EACH=each)


def _narrow(x: torch.Tensor, *rest: Any) -> str | None:
    columns = columns_of(x, *rest)
    if columns <= WARP_COLUMNS:
        return None
    return f"it takes rows of at most {WARP_COLUMNS} columns, but these have {columns}"


def _in_pieces(x: torch.Tensor, *rest: Any, **_: Any) -> str | None:
    """Why tiles serve a row, or None: lanes would load less than 16 bytes at a time."""
    size = columns_of(x, *rest) * x.element_size()
    return None if size % 16 == 0 else f"rows of {size} bytes are loaded in pieces of less than 16 bytes"


def _countable(x: torch.Tensor, *rest: Any) -> str | None:
    columns = columns_of(x, *rest)
    return None if columns <= MOST else f"it takes rows of at most 2^31 - 1024 columns, but these have {columns}"


def _fits_shared(x: torch.Tensor, *rest: Any) -> str | None:
    most = (device.of(x).shared_memory - 2048) // 8
    columns = columns_of(x, *rest)
    if columns <= most:
        return None
    return f"it keeps a row (backward: two) in shared memory: at most {most} columns, but there are {columns}"


SYNCED, READ = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "lts__t_sectors_op_read.sum"


def ladder(op: Op) -> None:
    """Registers these implementations."""

    def rung(name: str, idea: str, launcher: Any, supports: Any, **facts: Any) -> None:
        op.kernel(name, idea, kind="cuda", supports=supports, **both(launcher), **facts)

    rung(
        "cuda_bh",
        "as in FasterTransformer: one block per (batch, head), one thread per column, row after row",
        heads,
        _narrow,
        counter=SYNCED,
    )
    rung(
        "cuda_uncached",
        "one block per row, 16-byte loads, any length; reads the row three times, backward twice",
        uncached,
        _countable,
        gain=1.2,
        counter=SYNCED,
    )
    rung(
        "cuda_block",
        "the row in shared memory, read once, in a layout without bank conflicts",
        block,
        _fits_shared,
        gain=1.2,
        counter=READ,
    )


def warp_rung(op: Op, log: bool) -> None:
    """Registers `cuda_warp`, which serves narrow rows."""
    op.kernel(
        "cuda_warp",
        "rows of up to 1024 columns in the registers of a warp or less: no barrier, no shared memory",
        kind="cuda",
        served=True,
        supports=_narrow,
        unless=_in_pieces,
        gain=1.05,
        counter=SYNCED,
        **both(partial(warp, log)),
    )
