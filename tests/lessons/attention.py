import torch
import triton
import triton.language as tl


@triton.jit
def kernel(
    o_ptr, q_ptr, k_ptr, v_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    heads, queries, keys, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    o_ptr += (batch * heads + head) * queries * D
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
    tl.store(o_ptr + rows[:, None] * D + d[None, :], o, mask=rows[:, None] < queries)


def attention(q, k, v, causal=False):
    batch, heads, queries, D = q.shape
    o = torch.empty((batch, heads, queries, D), dtype=q.dtype, device=q.device)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    grid = triton.cdiv(queries, 128), batch * heads
    kernel[grid](
        o, q, k, v, *strides, heads, queries, k.shape[2], D**-0.5, D=D, BM=128, BN=64, CAUSAL=causal, num_warps=8
    )
    return o
