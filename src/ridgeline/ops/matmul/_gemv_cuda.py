"""gemv in CUDA C++ (gemv.cu): implementations with rows per warp, and persistent blocks fed by bulk copies (TMA)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import Op, dtype_name

FILE = Path(__file__).with_name("gemv.cu")
ROWS, BULK = CudaKernel(FILE, "gemv_rows", "PPPqqqq"), CudaKernel(FILE, "gemv_bulk", "PPPqiqq")
MANY, VECTOR = 4, 128 << 10  # at most so many rows of x, and so many bytes of them in float32
FEWEST, SHORTEST = 1024, 2048  # at least so many rows of a, of so many bytes: fewer leave multiprocessors idle


def _x_in_packs(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a copy of it, with contiguous rows that begin at multiples of 16 bytes."""
    strided = x.stride(-1) != 1 or (x.dim() == 2 and x.stride(0) * x.element_size() % 16)
    return x.clone(memory_format=torch.contiguous_format) if strided or x.data_ptr() % 16 else x


def _rows(pack: bool, short: bool, y: torch.Tensor, _: torch.Tensor, a: torch.Tensor, x: torch.Tensor) -> None:
    """One warp per row. pack: 16 bytes per load. short: as many lanes per row as it has packs."""
    (N, K), each = a.shape, 16 // a.element_size() if pack else 1
    x = _x_in_packs(x)
    lanes = min(32, triton.next_power_of_2(max(1, K // each))) if short else 32
    steps = 16 if not pack else 4 if short else 8
    facts: dict[str, Any] = {
        "XTYPE": CTYPE.get(a.dtype, "__half2"),
        "PACK": each,
        "LANES": lanes,
        "STEPS": steps,
        "block": 128,
    }
    grid = triton.cdiv(N, 128 // lanes), x.shape[0] if x.dim() == 2 else 1
    launch(ROWS, grid, y, a, x, N, K // each, a.stride(0), x.stride(0) if x.dim() == 2 else 0, **facts)


def _complex(y: torch.Tensor, parts: torch.Tensor, a: torch.Tensor, x: torch.Tensor) -> None:
    """Four complex numbers per load if rows of a are whole packs, else one."""
    _rows(_in_packs(a) is None, False, y, parts, a, x)


def _shared(c: tuning.Config, many: int, K: int) -> int:
    """Returns the bytes of a block's rings, barriers and x in shared memory."""
    ring = c["WARPS"] * c["STAGES"] * c["ROWS"] * c["PIECE"]
    return ring + triton.cdiv(c["WARPS"] * c["STAGES"] * 8, 16) * 16 + 4 * many * K


def _bulk(y: torch.Tensor, _: torch.Tensor, a: torch.Tensor, x: torch.Tensor) -> None:
    (N, K), many, gpu = a.shape, x.shape[0] if x.dim() == 2 else 1, device.of(a)
    x, pack = _x_in_packs(x), 16 // a.element_size()

    def fits(c: tuning.Config) -> bool:
        return _shared(c, many, K) <= gpu.shared_memory - 1024

    def rule() -> tuning.Config:
        """128 KiB in flight per multiprocessor, or what x leaves; two rows of a share the reads of several of x."""
        c = {"WARPS": 8, "ROWS": 1 if many == 1 else 2, "PIECE": 2048}
        return c | {"STAGES": max(s for s in range(2, 9 if many == 1 else 5) if s == 2 or fits(c | {"STAGES": s}))}

    def space() -> list[tuning.Config]:
        named = [
            dict(zip(("WARPS", "ROWS", "PIECE", "STAGES"), c, strict=True))
            for c in product((4, 8, 16), (1, 2, 4), (1024, 2048, 4096), (2, 3, 4, 6, 8))
        ]
        return [c for c in named if fits(c) and 49152 <= _shared(c, 0, 0) <= 200 << 10]

    def config() -> dict[str, Any]:
        key = " ".join([dtype_name(a), str(many), *(str(triton.next_power_of_2(n)) for n in (N, K))])
        c = tuning.config(gpu, "gemv", "bulk", key, rule, space)
        return c | {"block": 32 * c["WARPS"], "shared": _shared(c, many, K)}

    facts: dict[str, Any] = {"XTYPE": CTYPE[a.dtype], "PACK": pack, "MANY": many}
    grid = (min(gpu.multiprocessors, N),)
    launch(
        BULK,
        grid,
        y,
        a,
        x,
        N,
        K // pack,
        a.stride(0),
        x.stride(0) if x.dim() == 2 else 0,
        config=config,
        key=(N, K),
        **facts,
    )


def _in_rows(a: torch.Tensor, *_: Any) -> str | None:
    return None if a.stride(1) == 1 or a.shape[1] < 2 else "the rows of a must be contiguous"


def _in_packs(a: torch.Tensor, *_: Any) -> str | None:
    whole = not any([n * a.element_size() % 16 for n in (a.shape[1], *a.stride()[: a.shape[0] > 1])])
    return _in_rows(a) or (
        None
        if whole and a.data_ptr() % 16 == 0
        else "it reads 16 bytes at a time: rows of a must begin and end at multiples of 16 bytes"
    )


def _short(a: torch.Tensor, *_: Any) -> str | None:
    return _in_packs(a) or (
        None if a.shape[1] * a.element_size() <= 256 else "it takes rows of at most 256 bytes, half a warp's load"
    )


def _fits_bulk(a: torch.Tensor, x: torch.Tensor) -> str | None:
    (N, K), many = a.shape, x.shape[0] if x.dim() == 2 else 1
    if N < FEWEST or K * a.element_size() < SHORTEST:
        return f"it takes at least {FEWEST} rows of at least {SHORTEST} bytes; less keeps too few bytes in flight"
    if not 0 < many <= MANY or 4 * many * K > VECTOR:
        return f"it keeps x in shared memory as float32: at most {MANY} rows and {VECTOR} bytes"
    return _in_packs(a)


DRAM, ISSUED = "dram__throughput.avg.pct_of_peak_sustained_elapsed", "smsp__inst_executed.sum"
FULL = "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio"


def ladder(op: Op, by_triton: Callable[..., None]) -> None:
    """Registers the implementations before Triton's. Triton's kernel is the backward, which reads a by columns."""

    def rung(name: str, idea: str, launcher: Any, supports: Any, **facts: Any) -> None:
        op.kernel(name, idea, kind="cuda", fwd=launcher, bwd=by_triton, supports=supports, **facts)

    rung(
        "cuda_warp",
        "one warp per row, one element per lane: coalesced reads",
        partial(_rows, False, False),
        _in_rows,
        counter=ISSUED,
    )
    rung(
        "cuda_packed",
        "16 bytes per load: a quarter of the loads in float32, an eighth in half precision",
        partial(_rows, True, False),
        _in_packs,
        gain=1.1,
        counter=ISSUED,
    )
    rung(
        "cuda_short",
        "several short rows per warp, so that no lane is idle",
        partial(_rows, True, True),
        _short,
        gain=1.5,
        counter=FULL,
    )
    rung(
        "cuda_complex",
        "complex32: four numbers per load of 16 bytes, four multiplications each",
        _complex,
        _in_rows,
        dtypes=("complex32",),
        counter=DRAM,
    )


def best(op: Op, by_triton: Callable[..., None]) -> None:
    """Registers the implementation after Triton's."""
    op.kernel(
        "cuda_bulk",
        "persistent blocks: warps read rows from shared-memory rings filled by TMA, 128 KiB in flight per SM",
        kind="cuda",
        fwd=_bulk,
        bwd=by_triton,
        supports=_fits_bulk,
        arch=90,
        shared=227 << 10,
        gain=1.1,
        counter=DRAM,
    )
