"""sparse_matmul in Triton, for any card: a program makes tiles of the weight dense in registers and multiplies them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.ops.matmul._operands import Matrix, Sizes
from ridgeline.ops.matmul._scaled import finish, grid, line, place
from ridgeline.ops.matmul._sparse import expanded


@triton.jit
def _fwd(
    y, x, values, metadata, bias, scale_x, scale_w, sizes, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    M, N, K = sizes
    m, n = place(M, N, BM, BN, GROUP)
    k, half = tl.arange(0, 64), tl.arange(0, 32)
    row, at_n = (m % M)[:, None].to(tl.int64), (n % N)[:, None].to(tl.int64)
    at_x = x.data + row * x.row_stride + k[None, :] * x.column_stride
    at_values = values.data + at_n * values.row_stride + half[None, :] * values.column_stride
    at_bytes = metadata + at_n * 8 + tl.arange(0, 8)[None, :]
    total = tl.zeros((BM, BN), tl.float32 if scale_x.data is None else tl.int32)
    for start in range(0, K, 64):
        left = tl.load(at_x, mask=k[None, :] < K - start, other=0)
        pairs = tl.load(at_values, mask=half[None, :] < (K - start) // 2, other=0)
        right = tl.trans(expanded(pairs, tl.load(at_bytes)))
        if scale_x.data is None:
            total = tl.dot(left, right, total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        at_x += 64 * x.column_stride
        at_values += 32 * values.column_stride
        at_bytes += N.to(tl.int64) * 8
    sums = total.to(tl.float32)
    if scale_x.data is not None:
        sums *= tl.load(scale_x.data + m.to(tl.int64) * scale_x.stride, mask=m < M, other=0)[:, None]
        sums *= tl.load(scale_w.data + n.to(tl.int64) * scale_w.stride, mask=n < N, other=0)[None, :]
    finish(y, sums, bias, m, n, M, N)


def fwd(
    y: torch.Tensor, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: torch.Tensor | None,
    scale_x: torch.Tensor | None = None, scale_w: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """y = x W^T + bias. y, metadata: contiguous. scales, of int8: float32 (M,) and (N,)."""
    (M, K), N = x.shape, values.shape[0]
    lines = line(bias, 0), line(scale_x, 0), line(scale_w, 0)
    given = Matrix(x, *x.stride()), Matrix(values, *values.stride()), metadata, *lines, Sizes(M, N, K)
    side = 32 if x.dtype == torch.float32 else 64  # float32 products need more registers
    tall = min(side, max(16, triton.next_power_of_2(M)))
    launch(_fwd, grid(M, N), y, *given, BM=tall, BN=side, GROUP=8, num_stages=2, num_warps=256 // side)
