"""Kernels, launchers and checks of concat_kv and repeat_kv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.cuda import CTYPE, CudaKernel
from ridgeline.op import RidgelineError

CONCAT, REPEAT = (Path(__file__).with_name(name) for name in ("concat_kv.cu", "repeat_kv.cu"))
ONE = CudaKernel(CONCAT, "concat_kv_one", "PPPqqqqqqqqqqqqqq")
BOTH = CudaKernel(CONCAT, "concat_kv_both", "PPPPPqqqqqqqqq")
UNIT = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 16: "uint4"}
INDEX = {torch.int32: "int", torch.int64: "long long"}


def check_index(name: str, t: Any, like: torch.Tensor) -> None:
    """Raises RidgelineError if t is not a vector of integers, one per sequence of `like`, on its device."""
    if not isinstance(t, torch.Tensor) or t.dtype not in INDEX or t.shape != like.shape[:1] or t.device != like.device:
        found = f"{t.dtype} {tuple(t.shape)} on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise RidgelineError(f"{name} must be int32 or int64, ({like.shape[0]},) on {like.device}, but are {found}")


def append_one(packed: bool, *args: torch.Tensor) -> None:
    """One launch per tensor, any strides. packed: moves 16 bytes per thread."""
    *_, positions = args
    for cache, new in zip(args[:2], args[2:4], strict=True):
        (_, rows, heads, size), each = new.shape, 16 // new.element_size() if packed else 1
        steps = [s // each if n < 3 else s for t in (cache, new) for n, s in enumerate(t.stride())]
        count = new.numel() // each
        facts: dict[str, Any] = {"UNIT": UNIT[each * new.element_size()], "INDEX": INDEX[positions.dtype], "UNROLL": 1}
        facts["NUMBER"] = "unsigned int" if count < 1 << 32 else "unsigned long long"
        sizes = count, rows, heads, size // each, cache.shape[1]
        given = cache, new, positions, positions.stride(0)
        launch(ONE, (triton.cdiv(count, 256),), *given, *sizes, *steps, block=256, **facts)


def append_both(
    cache_k: torch.Tensor, cache_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> None:
    (batch, rows, heads, size), each = k.shape, 16 // k.element_size()
    width = heads * size // each
    block, unroll = (256, 4) if rows * width > 256 else (128, 1)  # decoding has few packs: use more warps, no loop
    steps = [t.stride(0) // each for t in (cache_k, cache_v, k, v)]
    grid = triton.cdiv(rows * width, block * unroll), min(batch, 65535), 2
    facts: dict[str, Any] = {"UNIT": "uint4", "INDEX": INDEX[positions.dtype], "UNROLL": unroll, "block": block}
    given = cache_k, cache_v, k, v, positions, positions.stride(0)
    sizes = batch, rows, width, cache_k.shape[1]
    launch(BOTH, grid if k.numel() else (0,), *given, *sizes, *steps, NUMBER="unsigned int", **facts)


def appends_packs(*args: Any) -> str | None:
    """Why a tensor's heads are not whole packs of 16 bytes, or None."""
    for t in args[:4]:
        each = 16 // t.element_size()
        steps = [s for n, s in zip(t.shape[:3], t.stride(), strict=False) if n > 1]
        strided = t.stride(3) != 1 and t.shape[3] > 1
        if t.data_ptr() % 16 or t.shape[3] % each or strided or any([s % each for s in steps]):
            return "it copies 16 bytes at a time: tensors and their heads must begin and end at multiples of 16 bytes"
    return None


def appends_pieces(*args: Any) -> str | None:
    """Why a sequence's rows are not one piece of memory made of such packs, or None."""
    for t in args[:4]:
        _, rows, heads, size = t.shape
        if (heads > 1 and t.stride(2) != size) or (rows > 1 and t.stride(1) != heads * size):
            return "it copies a sequence's rows as one piece: rows and heads must be contiguous in memory"
    return appends_packs(*args)


EACH = {d: CudaKernel(REPEAT, f"repeat_kv_{d}", "PPPqqqqqqqqq") for d in ("fwd", "bwd")}
ONCE = {d: CudaKernel(REPEAT, f"repeat_kv_once_{d}", "PPPqqqqqqqq") for d in ("fwd", "bwd")}


@triton.jit
def _turn(
    out, x, lengths, step, heads, rows, size, x_b, x_h, x_s, x_d,
    N: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reads a block of a head once and stores it N times; with BACK, adds it over N heads and stores the sum once."""
    end = tl.cast(rows, tl.int64) * size
    blocks = tl.cdiv(end, BLOCK)
    head = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = i < end
    valid = inside
    if lengths is not None:
        valid = inside & (i // size < tl.load(lengths + head // heads * step))
    at = x + head // heads * x_b + head % heads * (N if BACK else 1) * x_h + i // size * x_s + i % size * x_d
    if BACK:
        total = tl.zeros((BLOCK,), tl.float32)
        for j in range(N):
            total += tl.load(at + j * x_h, mask=valid, other=0).to(tl.float32)
        tl.store(out + head * end + i, total.to(out.dtype.element_ty), mask=inside)
    else:
        value = tl.load(at, mask=valid, other=0)
        for j in range(N):
            tl.store(out + (head * N + j) * end + i, value, mask=inside)


def repeat_triton(direction: str, out: torch.Tensor, x: torch.Tensor, n: int, lengths: torch.Tensor | None) -> None:
    back = direction == "bwd"
    (batch, heads, rows, size), step = (out if back else x).shape, 0 if lengths is None else lengths.stride(0)
    grid = (triton.cdiv(rows * size, 1024) * batch * heads,)
    launch(_turn, grid, out, x, lengths, step, heads, rows, size, *x.stride(), N=n, BACK=back, BLOCK=1024, num_warps=4)


def repeat_cuda(
    direction: str, once: bool, pack: bool, out: torch.Tensor, x: torch.Tensor, n: int, lengths: torch.Tensor | None
) -> None:
    """Launches a thread per pack of the larger tensor or, with `once`, of the smaller one, in both directions.

    x: the tensor to read. It is copied first if its packs of 16 bytes are not whole.
    """
    each, small = 16 // x.element_size() if pack else 1, out if direction == "bwd" else x
    steps = [s for m, s in zip(x.shape[:3], x.stride(), strict=False) if m > 1]
    if pack and (x.data_ptr() % 16 or (x.stride(3) != 1 and x.shape[3] > 1) or any([s % each for s in steps])):
        x = x.clone(memory_format=torch.contiguous_format)
    (batch, heads, rows, size), count = small.shape, small.numel() // each
    size //= each
    strides = [s // each for s in x.stride()[:3]]
    masked = int(lengths is not None)
    facts: dict[str, Any] = {"XTYPE": CTYPE[x.dtype], "PACK": each, "COPIES": n, "MASKED": masked, "block": 256}
    facts |= {"LENGTH": "int" if lengths is not None and lengths.dtype == torch.int32 else "long long"}
    facts |= {"NUMBER": "unsigned int" if count * n < 1 << 32 else "unsigned long long"}
    given = out, x, lengths, 0 if lengths is None else lengths.stride(0)
    if once:
        unroll = 4 if direction == "fwd" else max(1, 4 // n)
        facts |= {"UNROLL": unroll, "DENSE": int(rows == 1 or strides[2] == size)}
        grid = triton.cdiv(rows * size, 256 * unroll), min(batch * heads, 65535)
        launch(ONCE[direction], grid if count else (0,), *given, batch, heads, rows, size, *strides, **facts)
    else:
        facts |= {"UNROLL": 1, "DENSE": 0}
        grid = (triton.cdiv(count * (n if direction == "fwd" else 1), 256),)
        launch(EACH[direction], grid, *given, count, heads, rows, size, *strides, x.stride(3), **facts)


def repeats_packs(x: torch.Tensor, *_: Any) -> str | None:
    if x.shape[3] * x.element_size() % 16:
        return "it moves 16 bytes at a time: a row of a head must be a multiple of 16 bytes"
    large = x.shape[2] * x.shape[3] * x.element_size() >> 35
    return "it takes heads of fewer than 2^31 packs of 16 bytes" if large else None
