import torch
import triton
import triton.language as tl


@triton.jit
def kernel(
    c_ptr, a_ptr, b_ptr, M, N, K, a_row, a_column, b_row, b_column, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_mask = (rows[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (columns[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * a_row + k[None, :] * a_column, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * b_row + columns[None, :] * b_column, mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=inside)


def matmul(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    grid = triton.cdiv(M, 64), triton.cdiv(N, 64)
    kernel[grid](c, a, b, M, N, K, *a.stride(), *b.stride(), BM=64, BN=64, BK=64, num_warps=4)
    return c
