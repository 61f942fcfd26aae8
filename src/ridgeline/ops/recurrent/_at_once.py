"""The delta engine's kernels for chunks whose rows all meet in one product: a gate per channel, mild gates, bfloat16.

`_delta_channels.py` has the equations, and serves the chunks that these kernels leave out: each kernel looks at the
decay of its whole chunk and returns where that is out of range. So no path by levels is compiled beside this one, all
channels are taken at once, and a warp meets a tenth of the barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.recurrent._delta import find_chunk, heads_of, own_rows, solve_chunk, square_of, tile_of
from ridgeline.ops.recurrent._delta_channels import keep_matrices, out_of_range, served_at_once
from ridgeline.ops.recurrent._levels import add_chosen, add_whole, mask_at, split_gates
from ridgeline.ops.recurrent._scan import find_head, to_tf32


@triton.jit
def _tile(place, step, rows, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows that are all there."""
    at = place + rows.to(tl.int64)[:, None] * step + columns[None, :]
    if WIDTH % BLOCK == 0:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def _keep(tensor, packing, n, h, start, rows, columns, tokens, found, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = own_rows(tensor, packing, n, h, start, WIDTH) + (rows.to(tl.int64) * packing.heads)[:, None] * WIDTH
    here = (rows < tokens)[:, None]
    if WIDTH % BLOCK != 0:
        here = here & (columns < WIDTH)[None, :]
    tl.store(at + columns[None, :], found, mask=here)


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
def pairs_at_once(q, k, a, b, gate, beta, reads, matrices, masks, packing, form: tl.constexpr):
    """`half_pairs_by_channel` for whole chunks with mild gates. Of all others it leaves the decay, by which that kernel
    knows them, and in the rows with their decays what that kernel writes over."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    BS: tl.constexpr = form.BS
    K: tl.constexpr = form.K
    LEVELS: tl.constexpr = form.LEVELS
    rows = first + tl.arange(0, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    from_q, from_k, from_a, from_b, from_g, from_beta = heads_of(q, k, a, b, gate, beta, packing, n, h, start, form)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    ab, of_q, missed = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32), tl.program_id(0) < 0
    qb, ak, qk, of_k, own, other = ab, ab, ab, of_q, of_q, of_q
    for part in range((K + BS - 1) // BS):
        depth = part * BS + tl.arange(0, BS)
        g = tl.load(
            from_g + rows.to(tl.int64)[:, None] * gate.token + depth[None, :],
            mask=(rows < tokens)[:, None] & (depth < K)[None, :],
            other=0.0,
        )
        tq, tk = tile_of(q, from_q, rows, depth, tokens, K, BS), tile_of(k, from_k, rows, depth, tokens, K, BS)
        ta, tb = tk, tk
        if form.LOW:
            ta, tb = tile_of(a, from_a, rows, depth, tokens, K, BS), tile_of(b, from_b, rows, depth, tokens, K, BS)
        high, low = g, g
        if WIDE:
            high, low = split_gates(g)
        chosen = mask_at(masks.signs, 2 * LEVELS + 1, C).to(high.dtype)
        since = tl.dot(tl.trans(chosen), high)
        if WIDE:
            since = tl.dot(tl.trans(chosen), low, since)
        since *= 1.4426950408889634
        late, grown = tl.exp2(since), tl.exp2(-since)
        whole = tl.sum(tl.where(i == C - 1, late, 0.0), 0)
        tl.store(matrices.whole + spot * K + depth, whole, mask=depth < K)
        missed = missed | out_of_range(tl.where(depth < K, whole, 1.0), form)
        rq, cb = (tq * late).to(tq.dtype), (tb * grown).to(tb.dtype)
        _keep(reads.q.data, packing, n, h, start, rows, depth, tokens, rq, K, BS)
        after = grown * whole[None, :]
        _keep(reads.b.data, packing, n, h, start, rows, depth, tokens, (tb * after).to(tb.dtype), K, BS)
        qb = tl.dot(rq, tl.trans(cb), qb)
        ra = rq
        if form.LOW:
            chosen = mask_at(masks.signs, 2 * LEVELS + 2, C).to(high.dtype)
            early = tl.dot(chosen, high)
            if WIDE:
                early = tl.dot(chosen, low, early)
            ra = (ta * tl.exp2(early * 1.4426950408889634)).to(ta.dtype)
            ck = (tk * grown).to(tk.dtype)
            _keep(reads.k.data, packing, n, h, start, rows, depth, tokens, (tk * after).to(tk.dtype), K, BS)
            qk = tl.dot(rq, tl.trans(ck), qk)
            ak = tl.dot(ra, tl.trans(ck), ak)
        else:
            ra = (ta * late).to(ta.dtype)
        ab = tl.dot(ra, tl.trans(cb), ab)
        _keep(reads.a.data, packing, n, h, start, rows, depth, tokens, ra, K, BS)
        wide = tq.to(tl.float32)
        own += tl.sum(wide * tb.to(tl.float32), 1)
        if form.LOW:
            other += tl.sum(wide * tk.to(tl.float32), 1)
        if form.NORMALIZE:
            of_q += tl.sum(wide * wide, 1)
            of_k += tl.sum(tk.to(tl.float32) * tk.to(tl.float32), 1)
    if missed | (first + C > tokens):
        return
    keep_matrices((ab, qb, ak, qk), own, other, of_q, of_k, beta, from_beta, rows, tokens, matrices, spot, form)


@triton.jit
def _weigh(one, other, factors, LATER: tl.constexpr, OWN: tl.constexpr, C: tl.constexpr):
    """The gradients of the weights of a chunk's pairs: of rows with later ones, or with earlier ones; with OWN of rows
    with themselves, too."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    found = factors * tl.dot(one, tl.trans(other))
    if OWN:
        here = i <= j if LATER else i >= j
    else:
        here = i < j if LATER else i > j
    return tl.where(here, found, 0.0).to(one.dtype)


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
def _delta_weights(values, factors, room, C: tl.constexpr):
    """Writes the delta rule's weights to a room: of q and of k with k, for rows with earlier ones; then with later ones.

    A product takes its left side from there through shared memory, and registers are free for other things."""
    tdo, tu, tdx = values
    of_q, of_a, of_b = factors
    of_q, of_a = of_q[:, None] * of_b[None, :], of_a[:, None] * of_b[None, :]
    at = room + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(at, _weigh(tdo, tu, of_q, False, True, C))
    tl.store(at + C * C, _weigh(tdx, tu, of_a, False, False, C))
    of_q, of_a, of_b = factors
    of_q, of_a = of_b[:, None] * of_q[None, :], of_b[:, None] * of_a[None, :]
    tl.store(at + 2 * C * C, _weigh(tu, tdo, of_q, True, True, C))
    tl.store(at + 3 * C * C, _weigh(tu, tdx, of_a, True, False, C))
    tl.debug_barrier()


@triton.jit
def _delta_at_once(
    tiles, values, weights, states, gates, signs, factors, whole, WIDE: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """Some channels' gradients of q, k and the gate. values: do, U and the gradient of X."""
    tdo, tu, tdx = values
    before, later, held = states
    of_q, of_a, of_b = factors
    high, low = gates
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    upper = mask_at(signs, 2 * LEVELS + 1, C)
    chosen = tl.trans(upper.to(high.dtype))
    since = tl.dot(chosen, high)
    if WIDE:
        since = tl.dot(chosen, low, since)
    since *= 1.4426950408889634
    late, grown = tl.exp2(since), tl.exp2(-since)
    tq, tk = (tiles[0] * late).to(tdo.dtype), (tiles[1] * late).to(tdo.dtype)
    tc = (tiles[1] * grown).to(tdo.dtype)
    pair = tl.dot(mask_at(weights, 0, C), tc)
    given = of_q[:, None] * tl.dot(tdo, before)
    reading, terms = tq * given, tq * pair
    given += pair
    dq, product_q = late * given, tl.sum(tq * given, 1)
    pair = tl.dot(mask_at(weights, 1, C), tc)
    given = of_a[:, None] * tl.dot(tdx, before)
    reading += tk * given
    terms += tk * pair
    given += pair
    dk, product_k = late * given, tk * given
    pair = tl.dot(mask_at(weights, 3, C), tk, tl.dot(mask_at(weights, 2, C), tq))
    given = of_b[:, None] * whole[None, :] * tl.dot(tu, later)
    dk += grown * (given + pair)
    product_k = tl.sum(product_k + tc * (given + pair), 1)
    dg = add_chosen(tl.zeros_like(dq), signs, 2 * LEVELS + 1, reading, C)
    dg = add_chosen(dg, signs, 2 * LEVELS + 2, tc * given, C)
    dg = add_whole(dg, signs, 2 * LEVELS, terms - tc * pair, C)
    return dq, dk, dg + held[None, :], product_q, product_k


@triton.jit
def _low_weights(values, scale, C: tl.constexpr):
    """RWKV-7's weights: of q with b and k and of a with b and k, for rows with later ones; then with earlier ones."""
    tdo, tu, tdx, tv = values
    qb_t, qk_t = _weigh(tu, tdo, scale, True, True, C), _weigh(tv, tdo, scale, True, True, C)
    ab_t, ak_t = _weigh(tu, tdx, 1.0, True, False, C), _weigh(tv, tdx, 1.0, True, False, C)
    qb, ab = _weigh(tdo, tu, scale, False, True, C), _weigh(tdx, tu, 1.0, False, False, C)
    qk, ak = _weigh(tdo, tv, scale, False, True, C), _weigh(tdx, tv, 1.0, False, False, C)
    return qb_t, qk_t, ab_t, ak_t, qb, ab, qk, ak


@triton.jit
def _low_at_once(
    tiles, values, weights, states, gates, masks, scale, whole, where, WIDE: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """RWKV-7: writes the gradients of q, k, a and b, and returns that of the gate, turned."""
    tdo, tu, tdx, tv = values
    qb_t, qk_t, ab_t, ak_t, qb, ab, qk, ak = weights
    before, later, held = states
    grads, packing, n, h, start, rows, depth, tokens = where
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BS: tl.constexpr = form.BS
    LEVELS: tl.constexpr = form.LEVELS
    upper, lower = mask_at(masks.signs, 2 * LEVELS + 1, C), mask_at(masks.signs, 2 * LEVELS + 2, C)
    since, early = _halvings(gates, upper, WIDE), tl.exp2(_halvings(gates, tl.trans(lower), WIDE))
    late, grown = tl.exp2(since), tl.exp2(-since)
    tq, ta = (tl.trans(tiles[0]) * late).to(tdo.dtype), (tl.trans(tiles[2]) * early).to(tdo.dtype)
    tk, tb = (tl.trans(tiles[1]) * grown).to(tdo.dtype), (tl.trans(tiles[3]) * grown).to(tdo.dtype)
    pair = tl.dot(tk, qk_t, tl.dot(tb, qb_t))
    given = scale * tl.dot(tl.trans(before), tl.trans(tdo))
    dq = (late * (given + pair)).to(grads.q.dtype.element_ty)
    _keep(grads.q, packing, n, h, start, rows, depth, tokens, tl.trans(dq), K, BS)
    dg = _sums(tl.zeros_like(pair), tq * given, tl.trans(upper))
    terms = tq * pair
    pair = tl.dot(tk, ak_t, tl.dot(tb, ab_t))
    given = tl.dot(tl.trans(before), tl.trans(tdx))
    da = (early * (given + pair)).to(grads.a.dtype.element_ty)
    _keep(grads.a, packing, n, h, start, rows, depth, tokens, tl.trans(da), K, BS)
    dg = _sums(dg, ta * given, lower)  # a row's own gate follows its read
    seen = ta * pair
    terms += seen
    dg -= seen
    pair = tl.dot(ta, ab, tl.dot(tq, qb))
    given = whole[:, None] * tl.dot(tl.trans(later), tl.trans(tu))
    db = (grown * (given + pair)).to(grads.b.dtype.element_ty)
    _keep(grads.b, packing, n, h, start, rows, depth, tokens, tl.trans(db), K, BS)
    terms -= tb * pair
    until = tb * given
    pair = tl.dot(ta, ak, tl.dot(tq, qk))
    given = whole[:, None] * tl.dot(tl.trans(later), tl.trans(tv))
    dk = (grown * (given + pair)).to(grads.k.dtype.element_ty)
    _keep(grads.k, packing, n, h, start, rows, depth, tokens, tl.trans(dk), K, BS)
    terms -= tk * pair
    dg = _sums(dg, until + tk * given, tl.trans(lower))
    dg = _whole_sums(dg, terms, tl.trans(mask_at(masks.signs, 2 * LEVELS, C)))
    return dg + held[:, None]


@triton.jit
def _through_length(x, product, grad, packing, n, h, start, rows, depth, tokens, form: tl.constexpr):
    """Turns some channels' gradient of rows whose lengths are constants, already written, into that of the rows."""
    tile = tile_of(x, find_head(x, n, h, packing.ends, start), rows, depth, tokens, form.K, form.BS)
    found = own_rows(grad, packing, n, h, start, form.K)
    found += (rows.to(tl.int64) * packing.heads)[:, None] * form.K + depth[None, :]
    whole = tl.load(found, mask=(depth < form.K)[None, :], other=0.0) - tile * product[:, None]
    _keep(grad, packing, n, h, start, rows, depth, tokens, whole, form.K, form.BS)


@triton.jit
def gradients_at_once(
    q, k, v, a, b, gate, do, matrices, states, grads, masks, packing, scale, form: tl.constexpr
):  # fmt: skip
    """`half_gradients_by_channel` for whole chunks with mild gates."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    if served_at_once(matrices.whole, spot, first, tokens, form) == 0:
        return
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BS: tl.constexpr = form.BS
    V: tl.constexpr = form.V
    BV: tl.constexpr = form.BV
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    columns, rows, step = tl.arange(0, BV), first + tl.arange(0, C), packing.heads * V
    from_dx = own_rows(states.turned if form.LOW else grads.v, packing, n, h, start, V)
    tdo = _tile(find_head(do, n, h, packing.ends, start), do.token, rows, columns, V, BV)
    tu = _tile(own_rows(states.solved, packing, n, h, start, V), step, rows, columns, V, BV)
    tdx = _tile(from_dx, step, rows, columns, V, BV)
    tv = tdo
    if form.LOW:
        tv = _tile(find_head(v, n, h, packing.ends, start), v.token, rows, columns, V, BV)
    shrink_q = tl.full([C], 1.0, tl.float32)
    shrink_k, of_b = shrink_q, shrink_q
    if form.NORMALIZE:
        place = matrices.lengths + spot * (2 * C) + tl.arange(0, C)
        shrink_q, shrink_k = tl.load(place), tl.load(place + C)
    if not form.LOW:
        of_b = shrink_k * tl.load(matrices.decays + spot * (4 * C) + 3 * C + tl.arange(0, C))
    factors = scale * shrink_q, -shrink_k, of_b
    if form.LOW:
        weights = _low_weights((tdo, tu, tdx, tv), scale, C)
        tl.debug_barrier()
    else:
        mine = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        weights = matrices.read + mine * (4 * C * C)
        _delta_weights((tdo, tu, tdx), factors, weights, C)
    product_q, product_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for part in range((K + BS - 1) // BS):
        none = tl.minimum(16 * packing.heads - part, 0)  # 0 that keeps the compiler from holding all places
        rows, depth = first + none + tl.arange(0, C), part * BS + tl.arange(0, BS)
        columns = none + tl.arange(0, BV)
        g = tile_of(gate, find_head(gate, n, h, packing.ends, start), rows, depth, tokens, K, BS)
        gates = g, g
        if WIDE:
            gates = split_gates(g)
        tq = tile_of(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, K, BS)
        tk = tile_of(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, K, BS)
        whole = tl.load(matrices.whole + spot * K + depth, mask=depth < K, other=1.0)
        at = spot * (K * V) + columns[:, None] * K + depth[None, :]
        if K % BS == 0 and V % BV == 0:
            before, later = tl.load(states.before + at), tl.load(states.later + at)
        else:
            inside = (depth < K)[None, :] & (columns < V)[:, None]
            before = tl.load(states.before + at, mask=inside, other=0.0)
            later = tl.load(states.later + at, mask=inside, other=0.0)
        states_here = before, later, whole * _held(before, later)
        if form.LOW:
            ta = tile_of(a, find_head(a, n, h, packing.ends, start), rows, depth, tokens, K, BS)
            tb = tile_of(b, find_head(b, n, h, packing.ends, start), rows, depth, tokens, K, BS)
            where = grads, packing, n, h, start, rows, depth, tokens
            dg = _low_at_once(
                (tq, tk, ta, tb), (tdo, tu, tdx, tv), weights, states_here, (tl.trans(gates[0]), tl.trans(gates[1])),
                masks, scale, whole, where, WIDE, form,
            )  # fmt: skip
            dg = tl.trans(dg)
        else:
            dq, dk, dg, one, other = _delta_at_once(
                (tq, tk), (tdo, tu, tdx), weights + 64 * none, states_here, gates, masks.signs + 64 * none, factors, whole, WIDE, form
            )  # fmt: skip
            if form.NORMALIZE:
                product_q += one
                product_k += other
            _keep(grads.q, packing, n, h, start, rows, depth, tokens, dq, K, BS)
            _keep(grads.k, packing, n, h, start, rows, depth, tokens, dk, K, BS)
        _keep(grads.g, packing, n, h, start, rows, depth, tokens, dg, K, BS)
    if form.NORMALIZE:
        product_q, product_k = shrink_q * shrink_q * product_q, shrink_k * shrink_k * product_k
        tl.debug_barrier()
        for part in range((K + BS - 1) // BS):
            depth = part * BS + tl.arange(0, BS)
            _through_length(q, product_q, grads.q, packing, n, h, start, rows, depth, tokens, form)
            _through_length(k, product_k, grads.k, packing, n, h, start, rows, depth, tokens, form)


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
def low_gradients_at_once(
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
    _keep(grads.g, packing, n, h, start, first + tl.arange(0, C), depth, tokens, dg, K, BK)


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
