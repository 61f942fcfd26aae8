"""Gradients of the groups' weights and biases: dW_g = sum_r a_r^T b_r and db_g = sum_r s_r a_r over a group's rows r.

A program sums a tile of one group's matrix over the group's rows in order, so nothing is added atomically, and a group
without rows gives zeros. The rows of a and b may be gathered. The sum may be added to a float32 buffer instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.ops.experts._products import Maybe, Rows, Sizes, Weights, added, bounds, dot_precision, empty, source


@triton.jit
def _bwd(
    dw,
    a,
    b,
    ends,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sizes: T rows; dW_g is (K, N). ADD: adds to dw, which is float32."""
    T, M, N, G = sizes
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    t = tl.program_id(0)
    g, place = t // (down * across), t % (down * across)
    first = place // (GROUP * across) * GROUP
    size = min(down - first, GROUP)
    m = (first + place % (GROUP * across) % size) * BM + tl.arange(0, BM)
    n = place % (GROUP * across) // size * BN + tl.arange(0, BN)
    begin, end = bounds(ends, g, G, T)
    at_a = a.data + (m % M).to(tl.int64) * a.column
    at_b = b.data + (n % N).to(tl.int64) * b.column
    acc = empty(BM, BN, PRECISION)
    for start in range(begin, end, BR):
        r = start + tl.arange(0, BR)
        here, inside = r < end, tl.minimum(r, end - 1)
        left = tl.load(at_a[None, :] + source(a, inside)[:, None] * a.row, mask=here[:, None], other=0.0)
        right = tl.load(at_b[None, :] + source(b, inside)[:, None] * b.row, mask=here[:, None], other=0.0)
        acc = added(acc, left.T, right, PRECISION)
    at = dw.data + g.to(tl.int64) * dw.group + m[:, None].to(tl.int64) * dw.k + n[None, :].to(tl.int64) * dw.n
    inside = (m[:, None] < M) & (n[None, :] < N)
    if ADD:
        acc += tl.load(at, mask=inside, other=0.0)
        inside &= end > begin
    tl.store(at, acc.to(dw.data.dtype.element_ty), mask=inside)


@triton.jit
def _sums(db, a, scale, ends, sizes, BN: tl.constexpr, BR: tl.constexpr):
    T, _, N, G = sizes
    g, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    begin, end = bounds(ends, g, G, T)
    at = a.data + n.to(tl.int64) * a.column
    total = tl.zeros((BR, BN), tl.float32)
    for start in range(begin, end, BR):
        r = start + tl.arange(0, BR)
        here = r < end
        inside = tl.minimum(r, end - 1)
        x = tl.load(at[None, :] + source(a, inside)[:, None] * a.row, mask=here[:, None] & (n[None, :] < N), other=0.0)
        x = x.to(tl.float32)
        if scale is not None:
            x *= tl.load(scale + tl.load(a.order + inside)).to(tl.float32)[:, None]
        total += x
    tl.store(db + g.to(tl.int64) * N + n, tl.sum(total, 0).to(db.dtype.element_ty), mask=n < N)


def weight_grad(dw: torch.Tensor, a: Rows, b: Rows, T: int, ends: torch.Tensor, precision: str, add: bool) -> None:
    """Fills dw (G, K, N), any strides, from a (T, K) and b (T, N); add: adds to it."""
    G, M, N = dw.shape
    exact = dot_precision(a.data, precision, T, dw.numel())

    def config() -> dict[str, Any]:
        if a.data.dtype == torch.float32:
            return {"BM": 64, "BN": 64, "BR": 32 if exact.startswith("tf32") else 16, "num_warps": 4, "num_stages": 2}
        large = device.of(dw).shared_memory >= 227 << 10
        wide = 256 if large and N >= 1024 else 128
        return {"BM": 128, "BN": wide, "BR": 64 if large else 32, "num_warps": 8, "num_stages": 3}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return (G * triton.cdiv(M, c["BM"]) * triton.cdiv(N, c["BN"]),)

    given = Weights(dw, *dw.stride()), a, b, ends, Sizes(T, M, N, G)
    launch(_bwd, grid, *given, config=config, key=(M, N), GROUP=8, ADD=add, PRECISION=exact)


def bias_grad(db: torch.Tensor, a: Rows, T: int, ends: torch.Tensor, scale: Maybe = None) -> None:
    """Fills db (G, N), contiguous, from a (T, N). scale: a factor for each row that a.order names."""
    G, N = db.shape
    block = 32 if db.dtype == torch.float32 else 64
    launch(
        _sums, (G, triton.cdiv(N, block)), db, a, scale, ends, Sizes(T, 0, N, G), BN=block, BR=64, num_warps=4
    )  # fmt: skip
