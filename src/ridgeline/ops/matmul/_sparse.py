"""Weights of which two in four are kept: the format, in plain PyTorch and in Triton.

values: (N, K / 2), the two kept numbers of each four along K, in order. metadata: uint8 (ceil(K / 64), N, 8); byte b of
[j, n] holds two groups of four: columns 64 j + 8 b on in its low half, the next four in its high half. A half is
i0 | i1 << 2 with the kept columns i0 < i1. Groups past K have the half 4, columns 0 and 1. This is the order of the
bits that tensor cores read, and a tile's bytes of 64 columns are contiguous, so nothing is packed again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.op import RidgelineError, Spec
from ridgeline.ops.matmul._operands import Matrix, Sizes

BLOCK = 64  # columns that a block of metadata describes
HALVES = (4, 8, 12, 9, 13, 14)  # the six pairs: 01 02 03 12 13 23
ROWS = 32  # of a program


def packed(kept: torch.Tensor) -> torch.Tensor:
    """Returns metadata of the kept columns (N, K / 4, 2), sorted, 0 to 3."""
    halves = kept[..., 0] | kept[..., 1] << 2
    blocks = -(-halves.shape[1] // 16)
    halves = torch.nn.functional.pad(halves, (0, 16 * blocks - halves.shape[1]), value=HALVES[0]).to(torch.uint8)
    return (halves[:, ::2] | halves[:, 1::2] << 4).unflatten(1, (blocks, 8)).transpose(0, 1).contiguous()


def kept(metadata: torch.Tensor, K: int) -> torch.Tensor:
    """Returns the kept columns (N, K / 4, 2), 0 to 3, of metadata."""
    halves = torch.stack((metadata & 15, metadata >> 4), -1).transpose(0, 1).flatten(1)[:, : K // 4].long()
    return torch.stack((halves & 3, halves >> 2), -1)


def plain_sparsify(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = w.unflatten(1, (-1, 4))
    size = groups.detach().abs()
    order = torch.where(size.isnan(), float("inf"), size).sort(dim=-1, descending=True, stable=True).indices
    columns = order[..., :2].sort(-1).values
    return groups.gather(-1, columns).flatten(1), packed(columns)


def plain_densify(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    pairs = values.unflatten(1, (-1, 2))
    columns = kept(metadata, 2 * values.shape[1])
    return pairs.new_zeros((*pairs.shape[:2], 4)).scatter(-1, columns, pairs).flatten(1)


@triton.jit
def halves_of(bytes_of):
    """The 16 halves of each row of 8 bytes."""
    low, high = bytes_of & 15, bytes_of >> 4
    return tl.reshape(tl.join(low, high), (bytes_of.shape[0], 2 * bytes_of.shape[1]))


@triton.jit
def expanded(values, bytes_of):
    """The dense tile (R, 64) of values (R, 32) and bytes (R, 8)."""
    R: tl.constexpr = values.shape[0]
    first, second = tl.split(tl.reshape(values, (R, 16, 2)))
    halves = halves_of(bytes_of).to(tl.int32)
    at_first, at_second = halves & 3, halves >> 2
    zero = tl.zeros_like(first)
    d0 = tl.where(at_first == 0, first, zero)
    d1 = tl.where(at_first == 1, first, tl.where(at_second == 1, second, zero))
    d2 = tl.where(at_first == 2, first, tl.where(at_second == 2, second, zero))
    d3 = tl.where(at_second == 3, second, zero)
    return tl.reshape(tl.join(tl.join(d0, d2), tl.join(d1, d3)), (R, 64))


@triton.jit
def _quarters(tile):
    """The four columns of each group of a tile (R, 64), each (R, 16)."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 16, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def _picked(c0, c1, c2, c3, at):
    return tl.where(at == 0, c0, tl.where(at == 1, c1, tl.where(at == 2, c2, c3)))


@triton.jit
def _size(c):
    size = tl.abs(c.to(tl.float32))
    return tl.where(size == size, size, float("inf"))


@triton.jit
def _place(sizes, ROWS: tl.constexpr):
    """This program's block of columns, its rows and the place of their bytes."""
    N, K = sizes.N, sizes.K
    blocks = tl.cdiv(K, 64)
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    return block, n, (block.to(tl.int64) * N + n)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _sparsify(values, metadata, w, sizes, ROWS: tl.constexpr):
    block, n, at_bytes = _place(sizes, ROWS)
    row, k = n[:, None].to(tl.int64), block * 64 + tl.arange(0, 64)[None, :]
    inside = (n[:, None] < sizes.N) & (k < sizes.K)
    c0, c1, c2, c3 = _quarters(tl.load(w.data + row * w.row_stride + k * w.column_stride, mask=inside, other=0.0))
    s0, s1, s2, s3 = _size(c0), _size(c1), _size(c2), _size(c3)
    # How many beat a column; of equals, the earlier.
    r0 = (s1 > s0).to(tl.int32) + (s2 > s0).to(tl.int32) + (s3 > s0).to(tl.int32)
    r1 = (s0 >= s1).to(tl.int32) + (s2 > s1).to(tl.int32) + (s3 > s1).to(tl.int32)
    r2 = (s0 >= s2).to(tl.int32) + (s1 >= s2).to(tl.int32) + (s3 > s2).to(tl.int32)
    r3 = (s0 >= s3).to(tl.int32) + (s1 >= s3).to(tl.int32) + (s2 >= s3).to(tl.int32)
    first = tl.where(r0 < 2, 0, tl.where(r1 < 2, 1, 2))
    second = tl.where(r3 < 2, 3, tl.where(r2 < 2, 2, 1))
    pairs = tl.join(_picked(c0, c1, c2, c3, first), _picked(c0, c1, c2, c3, second))
    half = block * 32 + tl.arange(0, 32)[None, :]
    at = row * (sizes.K // 2) + half
    tl.store(values + at, tl.reshape(pairs, (ROWS, 32)), mask=(n[:, None] < sizes.N) & (half < sizes.K // 2))
    low, high = tl.split(tl.reshape(first | second << 2, (ROWS, 8, 2)))
    tl.store(metadata + at_bytes, (low | high << 4).to(tl.uint8), mask=n[:, None] < sizes.N)


@triton.jit
def _densify(w, values, metadata, sizes, ROWS: tl.constexpr):
    block, n, at_bytes = _place(sizes, ROWS)
    row, half = n[:, None].to(tl.int64), block * 32 + tl.arange(0, 32)[None, :]
    inside = n[:, None] < sizes.N
    at = values.data + row * values.row_stride + half * values.column_stride
    pairs = tl.load(at, mask=inside & (half < sizes.K // 2), other=0)
    tile = expanded(pairs, tl.load(metadata + at_bytes, mask=inside, other=0))
    k = block * 64 + tl.arange(0, 64)[None, :]
    tl.store(w + row * sizes.K + k, tile, mask=inside & (k < sizes.K))


@triton.jit
def _gather(values, w, metadata, sizes, ROWS: tl.constexpr):
    block, n, at_bytes = _place(sizes, ROWS)
    row, k = n[:, None].to(tl.int64), block * 64 + tl.arange(0, 64)[None, :]
    inside = n[:, None] < sizes.N
    at = w.data + row * w.row_stride + k * w.column_stride
    c0, c1, c2, c3 = _quarters(tl.load(at, mask=inside & (k < sizes.K), other=0))
    halves = halves_of(tl.load(metadata + at_bytes, mask=inside, other=0)).to(tl.int32)
    pairs = tl.join(_picked(c0, c1, c2, c3, halves & 3), _picked(c0, c1, c2, c3, halves >> 2))
    half = block * 32 + tl.arange(0, 32)[None, :]
    tl.store(values + row * (sizes.K // 2) + half, tl.reshape(pairs, (ROWS, 32)), mask=inside & (half < sizes.K // 2))


def _start(kernel: Any, *given: Any, N: int, K: int) -> None:
    launch(kernel, (-(-N // ROWS) * -(-K // BLOCK),), *given, Sizes(0, N, K), ROWS=ROWS, num_warps=4)


def sparsify(values: torch.Tensor, metadata: torch.Tensor, w: torch.Tensor) -> None:
    """values and metadata, contiguous, of w (N, K), any strides."""
    N, K = w.shape
    _start(_sparsify, values, metadata, Matrix(w, *w.stride()), N=N, K=K)


def densify(w: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor) -> None:
    """w (N, K), contiguous, of values, any strides, and metadata, contiguous."""
    N, K = w.shape
    _start(_densify, w, Matrix(values, *values.stride()), metadata, N=N, K=K)


def gather(values: torch.Tensor, w: torch.Tensor, metadata: torch.Tensor) -> None:
    """values, contiguous, of w (N, K), any strides, at the columns of metadata, contiguous."""
    N, K = w.shape
    _start(_gather, values, Matrix(w, *w.stride()), metadata, N=N, K=K)


def blocks_of(values: torch.Tensor) -> tuple[int, int, int]:
    """Returns the shape of the metadata of values (N, K / 2)."""
    return -(-2 * values.shape[1] // BLOCK), values.shape[0], 8


def unlike(given: torch.Tensor, metadata: torch.Tensor | None = None, *_: Any) -> str | None:
    """Returns why kernels do not take a weight, or values with metadata, or None."""
    if metadata is None:
        return None if given.shape[1] % 4 == 0 else f"K must be a multiple of 4, and is {given.shape[1]}"
    N, columns = given.shape  # K / 2 of values, K of a weight
    if columns % 2 or tuple(metadata.shape) not in [(-(-K // BLOCK), N, 8) for K in (columns, 2 * columns)]:
        return f"metadata of {tuple(metadata.shape)} is of another weight than {tuple(given.shape)}"
    return None


def check(op: str, values: Any, metadata: Any, **others: Any) -> None:
    """Raises RidgelineError unless values and metadata fit, and all tensors are dense and on one device."""
    for name, t in {"values": values, "metadata": metadata, **others}.items():
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.layout is not torch.strided or t.is_nested:
            raise RidgelineError(f"{op}: it takes dense tensors, but {name} is {'nested' if t.is_nested else t.layout}")
        if t.device != values.device:
            given = f"{name} is on {t.device}, values on {values.device}"
            raise RidgelineError(f"{op}: all tensors must be on one device; {given}")
    if values.dim() != 2 or values.shape[1] % 2 or values.dtype == torch.bool or values.is_complex():
        given = f"{values.dtype} {tuple(values.shape)}"
        raise RidgelineError(f"{op}: values must be numbers (N, K / 2) with K a multiple of 4, got {given}")
    if metadata.dtype != torch.uint8 or tuple(metadata.shape) != blocks_of(values):
        given = f"{metadata.dtype} {tuple(metadata.shape)}"
        raise RidgelineError(f"{op}: metadata must be uint8 {blocks_of(values)}, as sparsify returns it, got {given}")


class Metadata(Spec):
    """Random metadata of a weight (N, K)."""

    def __init__(self, N: int, K: int):
        super().__init__(-(-K // BLOCK), N, 8, dtype="uint8")

    def make(self, dtype: torch.dtype, device: Any, generator: torch.Generator | None) -> torch.Tensor:
        low, high = (torch.randint(0, len(HALVES), self.shape, device=device, generator=generator) for _ in range(2))
        halves = torch.tensor(HALVES, dtype=torch.uint8, device=device)
        return halves[low] | halves[high] << 4
