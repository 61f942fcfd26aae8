"""The delta engine's kernels for chunks whose rows all meet in one product: a gate per channel, mild gates, bfloat16.

`delta_channels.py` has the equations, and serves the chunks that these kernels leave out. Each kernel looks at the
decay of its whole chunk, and returns where that is out of range. So no path by levels is compiled beside this one, and
few barriers are met: for RWKV-7 all channels are a slice, and rows that read (q above a) and rows that write (b above
k) are a tile each, so that one product makes four matrices, or two gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.delta import (
    find_chunk,
    heads_of,
    own_rows,
    solve_chunk,
    square_of,
    store_rows,
    tile_of,
)
from ridgeline.ops.recurrent.triton.delta_channels import keep_matrices, out_of_range, served_at_once
from ridgeline.ops.recurrent.triton.levels import mask_at, split_gates
from ridgeline.ops.recurrent.triton.scan import find_head, to_tf32


@triton.jit
def _halvings(gates, chosen, WIDE: tl.constexpr):
    """Of each row, turned, the sum of the gates that a mask chooses, times log2(e)."""
    high, low = gates
    chosen = chosen.to(high.dtype)
    found = tl.dot(high, chosen)
    if WIDE:
        found = tl.dot(low, chosen, found)
    return found * 1.4426950408889634


@triton.jit
def pairs_at_once(q, k, gate, beta, reads, matrices, masks, packing, form: tl.constexpr):
    """The delta rule: `half_pairs_by_channel` for whole chunks with mild gates. Of all others it leaves the decay, by
    which that kernel knows them, and in the rows with their decays what that kernel writes over."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    BS: tl.constexpr = form.BS
    K: tl.constexpr = form.K
    rows = first + tl.arange(0, C)
    i = tl.arange(0, C)[:, None]
    from_q, from_k, _, _, from_g, from_beta = heads_of(q, k, k, k, gate, beta, packing, n, h, start, form)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    ab, of_q, missed = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32), tl.program_id(0) < 0
    qb, of_k, own = ab, of_q, of_q
    for part in range((K + BS - 1) // BS):
        depth = part * BS + tl.arange(0, BS)
        g = tile_of(gate, from_g, rows, depth, tokens, K, BS)
        tq, tk = tile_of(q, from_q, rows, depth, tokens, K, BS), tile_of(k, from_k, rows, depth, tokens, K, BS)
        high, low = g, g
        if WIDE:
            high, low = split_gates(g)
        chosen = tl.trans(mask_at(masks.signs, 2 * form.LEVELS + 1, C).to(high.dtype))
        since = tl.dot(chosen, high)
        if WIDE:
            since = tl.dot(chosen, low, since)
        since *= 1.4426950408889634
        late, grown = tl.exp2(since), tl.exp2(-since)
        whole = tl.sum(tl.where(i == C - 1, late, 0.0), 0)
        tl.store(matrices.whole + spot * K + depth, whole, mask=depth < K)
        missed = missed | out_of_range(tl.where(depth < K, whole, 1.0), form)
        rq, ra, cb = (tq * late).to(tq.dtype), (tk * late).to(tk.dtype), tl.trans((tk * grown).to(tk.dtype))
        store_rows(reads.q.data, packing, n, h, start, rows, depth, tokens, rq, K)
        after = (tk * (grown * whole[None, :])).to(tk.dtype)
        store_rows(reads.b.data, packing, n, h, start, rows, depth, tokens, after, K)
        qb, ab = tl.dot(rq, cb, qb), tl.dot(ra, cb, ab)
        store_rows(reads.a.data, packing, n, h, start, rows, depth, tokens, ra, K)
        wide, other = tq.to(tl.float32), tk.to(tl.float32)
        own += tl.sum(wide * other, 1)
        if form.NORMALIZE:
            of_q += tl.sum(wide * wide, 1)
            of_k += tl.sum(other * other, 1)
    if missed | (first + C > tokens):
        return
    keep_matrices((ab, qb, ab, ab), own, own, of_q, of_k, beta, from_beta, rows, tokens, matrices, spot, form)


@triton.jit
def _sums(found, x, chosen):
    """Adds for each row, turned, the sum of the rows of x that a mask chooses, in bfloat16's range."""
    if chosen.dtype == tl.bfloat16:
        found = tl.dot(x.to(tl.bfloat16), chosen, found)
    else:
        found = tl.dot(to_tf32(x), chosen, found, input_precision="tf32")
    return found


@triton.jit
def _whole_sums(found, x, chosen):
    """The same in two parts: what cancels is summed so."""
    if chosen.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        found = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), chosen, tl.dot(high, chosen, found))
    else:
        found = tl.dot(to_tf32(x), chosen, found, input_precision="tf32")
    return found


@triton.jit
def _held(before, later):
    return tl.sum(before.to(tl.float32) * later.to(tl.float32), 0)


@triton.jit
def write_double_masks(masks, C: tl.constexpr):
    """Zeros, ones and signs for RWKV-7's rows that read, q above a, and those that write, b above k, by a chunk's gates
    or turned. The gates that decay rows that read; that decay rows that write; for gates the rows that write before;
    the signs of readers' pairs and of writers'."""
    t, r = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :]
    row, late = r % C, r >= C
    second = t >= C // 2
    size: tl.constexpr = 2 * C * C
    wide, turned = masks + t * (2 * C) + r, masks + r * C + t
    tl.store(wide, tl.where((t < row) | ((t == row) & (late == 0)), 1.0, 0.0))
    tl.store(wide + size, tl.where(t <= row, 1.0, 0.0))
    tl.store(turned + 2 * size, tl.where(row < t, 1.0, 0.0))
    of_q = tl.where(second, tl.where(row >= t, 1.0, 0.0), tl.where(row < t, -1.0, 0.0))
    of_a = tl.where(second, tl.where(row > t, 1.0, 0.0), tl.where(row <= t, -1.0, 0.0))
    tl.store(turned + 3 * size, tl.where(late, of_a, of_q))
    tl.store(turned + 4 * size, -of_q)


@triton.jit
def _double_mask(masks, place, M: tl.constexpr, N: tl.constexpr):
    return tl.load(masks + place * (M * N) + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])


@triton.jit
def _double_rows(one, one_step, other, other_step, first, columns, C: tl.constexpr, WIDTH: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """A chunk's rows of one tensor above those of another."""
    r = tl.arange(0, 2 * C)
    row = (first + r % C).to(tl.int64)
    place = tl.where(r < C, one + row * one_step, other + row * other_step)[:, None] + columns[None, :]
    if WIDTH % BLOCK == 0:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=(columns < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def _keep_double(one, other, step, first, columns, found, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.arange(0, 2 * C)
    row = (first + r % C).to(tl.int64) * step
    place = tl.where(r < C, one + row, other + row)[:, None] + columns[None, :]
    if WIDTH % BLOCK == 0:
        tl.store(place, found)
    else:
        tl.store(place, found, mask=(columns < WIDTH)[None, :])


@triton.jit
def low_pairs_at_once(q, k, a, b, gate, reads, matrices, masks, packing, form: tl.constexpr):
    """RWKV-7: `pairs_at_once`, with all four matrices as one product of rows that read and rows that write."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BK: tl.constexpr = form.BK
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    from_q, from_k, from_a, from_b, from_g, _ = heads_of(q, k, a, b, gate, None, packing, n, h, start, form)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    depth, r = tl.arange(0, BK), tl.arange(0, 2 * C)
    rows, step = (first + r % C).to(tl.int64), packing.heads * K
    here = (rows < tokens)[:, None] & (depth < K)[None, :]
    g = tile_of(gate, from_g, first + tl.arange(0, C), depth, tokens, K, BK)
    place = tl.where(r < C, from_q + rows * q.token, from_a + rows * a.token)
    tr = tl.load(place[:, None] + depth[None, :], mask=here, other=0.0)
    place = tl.where(r < C, from_b + rows * b.token, from_k + rows * k.token)
    tw = tl.load(place[:, None] + depth[None, :], mask=here, other=0.0)
    high, low = g, g
    if WIDE:
        high, low = split_gates(g)
    of_readers = tl.trans(_double_mask(masks.double, 0, C, 2 * C).to(high.dtype))
    of_writers = tl.trans(_double_mask(masks.double, 1, C, 2 * C).to(high.dtype))
    since, until = tl.dot(of_readers, high), tl.dot(of_writers, high)
    if WIDE:
        since, until = tl.dot(of_readers, low, since), tl.dot(of_writers, low, until)
    decay, grown = tl.exp2(since * 1.4426950408889634), tl.exp2(until * -1.4426950408889634)
    whole = tl.sum(tl.where((r == C - 1)[:, None], decay, 0.0), 0)
    tl.store(matrices.whole + spot * K + depth, whole, mask=depth < K)
    to_q, to_a = own_rows(reads.q.data, packing, n, h, start, K), own_rows(reads.a.data, packing, n, h, start, K)
    to_b, to_k = own_rows(reads.b.data, packing, n, h, start, K), own_rows(reads.k.data, packing, n, h, start, K)
    tr = (tr * decay).to(tr.dtype)
    place = tl.where(r < C, to_q + rows * step, to_a + rows * step)
    tl.store(place[:, None] + depth[None, :], tr, mask=here)
    place = tl.where(r < C, to_b + rows * step, to_k + rows * step)
    tl.store(place[:, None] + depth[None, :], (tw * (grown * whole[None, :])).to(tw.dtype), mask=here)
    found = tl.dot(tr, tl.trans((tw * grown).to(tw.dtype)))
    if out_of_range(tl.where(depth < K, whole, 1.0), form) | (first + C > tokens):
        return
    x, y = r[:, None], r[None, :]
    found = tl.where((y % C < x % C) | ((x % C == y % C) & (x < C)), found, 0.0)
    at = spot * (C * C) + (x % C) * C + y % C
    reader = tl.where(y < C, matrices.solve + at, matrices.read + at)
    place = tl.where(x < C, tl.where(y < C, matrices.pair + at, matrices.plain + at), reader)
    tl.store(place, found, mask=(x < C) | (y >= C))
    i, j = tl.arange(0, 2)[:, None, None, None], tl.arange(0, 2)[None, None, :, None]
    ab = tl.where((i == 1) & (j == 0), tl.reshape(found, (2, C, 2, C)), 0.0)
    ab = tl.sum(tl.sum(ab, 2), 0)
    factor = tl.full([C], -1.0, tl.float32)
    place = matrices.solve + spot * (C * C) + square_of(form)
    tl.store(place, solve_chunk(ab, factor, matrices.solve.dtype.element_ty, form))


@triton.jit
def gradients_at_once(
    q, k, v, a, b, gate, do, matrices, states, grads, masks, packing, scale, form: tl.constexpr
):  # fmt: skip
    """RWKV-7: `half_gradients_by_channel` for whole chunks with mild gates. Rows that read (q above a) and rows that
    write (b above k) are a tile each, all turned, so a product leaves the next one's left side in registers."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    if served_at_once(matrices.whole, spot, first, tokens, form) == 0:
        return
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BK: tl.constexpr = form.BK
    V: tl.constexpr = form.V
    BV: tl.constexpr = form.BV
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    depth, columns, step = tl.arange(0, BK), tl.arange(0, BV), packing.heads * V
    from_do, from_v = find_head(do, n, h, packing.ends, start), find_head(v, n, h, packing.ends, start)
    from_dx, from_u = own_rows(states.turned, packing, n, h, start, V), own_rows(states.solved, packing, n, h, start, V)
    from_q, from_k, from_a, from_b, from_g, _ = heads_of(q, k, a, b, gate, None, packing, n, h, start, form)
    seen = _double_rows(from_do, do.token, from_dx, step, first, columns, C, V, BV)
    written = _double_rows(from_u, step, from_v, v.token, first, columns, C, V, BV)
    g = tile_of(gate, from_g, first + tl.arange(0, C), depth, tokens, K, BK)
    tr = _double_rows(from_q, q.token, from_a, a.token, first, depth, C, K, BK)
    tw = _double_rows(from_b, b.token, from_k, k.token, first, depth, C, K, BK)
    at = spot * (K * V) + columns[:, None] * K + depth[None, :]
    inside = (depth < K)[None, :] & (columns < V)[:, None]
    if K % BK == 0 and V % BV == 0:
        before, later = tl.load(states.before + at), tl.load(states.later + at)
    else:
        before = tl.load(states.before + at, mask=inside, other=0.0)
        later = tl.load(states.later + at, mask=inside, other=0.0)
    whole = tl.load(matrices.whole + spot * K + depth, mask=depth < K, other=1.0)
    held = whole * _held(before, later)
    gates = g, g
    if WIDE:
        gates = split_gates(g)
    gates = tl.trans(gates[0]), tl.trans(gates[1])
    of_readers = _double_mask(masks.double, 0, C, 2 * C)
    decay = tl.exp2(_halvings(gates, of_readers, WIDE))
    grown = tl.exp2(-_halvings(gates, _double_mask(masks.double, 1, C, 2 * C), WIDE))
    tr, tw = (tl.trans(tr) * decay).to(seen.dtype), (tl.trans(tw) * grown).to(seen.dtype)
    x, y = tl.arange(0, 2 * C)[:, None], tl.arange(0, 2 * C)[None, :]
    scales = tl.where(tl.arange(0, 2 * C) < C, scale, 1.0)
    meet = (x % C < y % C) | ((x % C == y % C) & (y < C))
    pairs = tl.where(meet, scales[None, :] * tl.dot(written, tl.trans(seen)), 0.0).to(seen.dtype)
    pair = tl.dot(tw, pairs)
    given = scales[None, :] * tl.dot(tl.trans(before), tl.trans(seen))
    dr = (decay * (given + pair)).to(grads.q.dtype.element_ty)
    _keep_double(
        own_rows(grads.q, packing, n, h, start, K), own_rows(grads.a, packing, n, h, start, K), packing.heads * K,
        first, depth, tl.trans(dr), C, K, BK,
    )  # fmt: skip
    dg = _sums(tl.zeros([BK, C], tl.float32), tr * given, tl.trans(of_readers))
    dg = _whole_sums(dg, tr * pair, _double_mask(masks.double, 3, 2 * C, C))
    meet = (y % C < x % C) | ((x % C == y % C) & (x < C))
    pairs = tl.where(meet, scales[:, None] * tl.dot(seen, tl.trans(written)), 0.0).to(seen.dtype)
    pair = tl.dot(tr, pairs)
    given = whole[:, None] * tl.dot(tl.trans(later), tl.trans(written))
    dw = (grown * (given + pair)).to(grads.b.dtype.element_ty)
    _keep_double(
        own_rows(grads.b, packing, n, h, start, K), own_rows(grads.k, packing, n, h, start, K), packing.heads * K,
        first, depth, tl.trans(dw), C, K, BK,
    )  # fmt: skip
    dg = _sums(dg, tw * given, _double_mask(masks.double, 2, 2 * C, C))
    dg = _whole_sums(dg, tw * pair, _double_mask(masks.double, 4, 2 * C, C)) + held[:, None]
    dg = tl.trans(dg.to(grads.g.dtype.element_ty))
    store_rows(grads.g, packing, n, h, start, first + tl.arange(0, C), depth, tokens, dg, K)
