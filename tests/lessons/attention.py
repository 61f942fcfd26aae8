import torch
import triton
import triton.language as tl


@triton.jit
def kernel(
    o_ptr, q_ptr, k_ptr, v_ptr, q_row, k_row, v_row, o_row, queries, keys, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * q_row + d[None, :], mask=rows[:, None] < queries, other=0.0)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), tl.float32)
    o = tl.zeros((BM, D), tl.float32)
    for start in range(0, keys, BN):
        columns = start + tl.arange(0, BN)
        there = columns[:, None] < keys
        k = tl.load(k_ptr + columns[:, None] * k_row + d[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + columns[:, None] * v_row + d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(columns[None, :] < keys, s, float("-inf"))
        if CAUSAL:
            s = tl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp(s - new_max[:, None])
        shrink = tl.exp(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    o = o / row_sum[:, None]
    tl.store(o_ptr + rows[:, None] * o_row + d[None, :], o, mask=rows[:, None] < queries)


def attention(q, k, v, causal=False):
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    queries, keys, D = q.shape[2], k.shape[2], q.shape[3]
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            mine = o[batch, head], q[batch, head], k[batch, head], v[batch, head]
            strides = [t.stride(0) for t in (mine[1], mine[2], mine[3], mine[0])]
            kernel[(triton.cdiv(queries, 64),)](
                *mine, *strides, queries, keys, D**-0.5, D=D, BM=64, BN=32, CAUSAL=causal, num_warps=4
            )
    return o
