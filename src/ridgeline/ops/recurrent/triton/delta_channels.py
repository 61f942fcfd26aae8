"""The delta engine's kernels for a gate per channel in half precision: a chunk's matrices, and its gradients.

With bfloat16 rows meet in blocks of 2^n rows by one product: one side has the decay since the block began, the other
its inverse. n is the largest with which no block's decay, in any channel of a slice, passes the halvings that the form
allows; each slice of each chunk finds its own. Blocks are joined by levels, as in `levels.py`: a chunk whose gates
are mild has none. float16 has no range to spare, and takes levels alone.
Each weight of a pair is kept with its mirror image, so one product serves the rows of both sides of an edge.
The gate's gradient adds the pairs of levels as they are. Pairs of one product come as differences, in a block's first
half those that begin before a gate without those that end before it, in the second those that end after it without
those that begin after it. Their terms go into sums in two parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.delta import (
    beta_of,
    diagonal_of,
    find_chunk,
    heads_of,
    keep_decays,
    keep_lengths,
    own_rows,
    rows_of,
    solve_chunk,
    square_of,
    store_rows,
    tile_of,
)
from ridgeline.ops.recurrent.triton.levels import (
    add_chosen,
    add_whole,
    crossings,
    halvings,
    joined,
    mask_at,
    right_rows,
    split_gates,
)
from ridgeline.ops.recurrent.triton.scan import find_head, tile_at


class BlockMasks(NamedTuple):
    """Zeros, ones and signs that products take from memory, by `write_block_masks`, (places, C, C)."""

    gates: Any  # float16: the gates between two rows
    pairs: Any  # in the data's dtype
    signs: Any  # bfloat16, or for float16 data float32
    early_gates: Any  # for rows that see the state before their own gate (RWKV-7's a), or None
    early_signs: Any
    double: Any = None  # RWKV-7's, by `write_double_masks`


@triton.jit
def write_block_masks(masks, C: tl.constexpr, LEVELS: tl.constexpr, SHIFT: tl.constexpr):
    """Of blocks of 2^n rows, n up to LEVELS, the gates since the block began, the pairs of its rows with earlier and
    with later ones, and with which sign a row's pairs with earlier ones, less those with later ones, count for a gate;
    of each level the gates between a row and its edge, the pairs and the rows on a gate's side; of a chunk the gates
    until it ends, and the rows from a gate on and before it."""
    place = tl.program_id(0)
    t, r = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]  # a gate, or a row of a pair; a row
    at, turned, size = t * C + r, r * C + t, C * C
    after = t < r if SHIFT else t <= r
    if place <= LEVELS:
        same, second = ((t ^ r) >> place) == 0, (((t << 1) >> place) & 1) == 1
        tl.store(masks.gates + place * size + turned, tl.where(same & after, 1.0, 0.0))
        tl.store(masks.pairs + (LEVELS + place) * size + at, tl.where(same & (t > r), 1.0, 0.0))
        tl.store(masks.pairs + (2 * LEVELS + 1 + place) * size + at, tl.where(same & (t < r), 1.0, 0.0))
        counted = tl.where(second, tl.where(t <= r, 1.0, 0.0), tl.where(t > r, -1.0, 0.0))
        tl.store(masks.signs + (LEVELS + place) * size + at, tl.where(same, counted, 0.0))
    elif place <= 2 * LEVELS:
        level = place - LEVELS - 1
        chosen = tl.where(crossings(level, C, SHIFT), 1.0, 0.0)
        tl.store(masks.gates + place * size + turned, chosen)
        tl.store(masks.signs + level * size + at, chosen)
        tl.store(masks.pairs + level * size + at, tl.where(joined(level, C), 1.0, 0.0))
    else:
        tl.store(masks.gates + place * size + turned, tl.where(t > r, 1.0, 0.0))
        tl.store(masks.signs + (2 * LEVELS + 1) * size + at, tl.where(after, 1.0, 0.0))
        tl.store(masks.signs + (2 * LEVELS + 2) * size + at, tl.where(t > r, 1.0, 0.0))


@triton.jit
def _in_range(sums, form: tl.constexpr):
    return tl.min(tl.min(sums, 1), 0) >= -form.HALVINGS


@triton.jit
def _blocks(masks, since, high, low, most, WIDE: tl.constexpr, form: tl.constexpr):
    """The logarithm, up to `most`, of how many rows meet in one product, and of each row the halvings since its block
    began, from those since the chunk began. Blocks of one row have nothing to meet, and no halvings."""
    n = most
    inside = _in_range(since, form) & (n == form.LEVELS)
    while (n > 0) & (inside == 0):
        n -= 1
        since = halvings(masks.gates, n, high, low, WIDE, form.C)
        inside = _in_range(since, form)
    return n, tl.where(n > 0, since, 0.0)


@triton.jit
def _pairs_at_once(sums, tq, tk, ta, tb, since, early, n, form: tl.constexpr):
    """Adds some channels' part of the pairs within blocks of 2^n rows: a with b, q with b, a with k, q with k. For the
    whole chunk it leaves something in the pairs of earlier rows with later ones, too."""
    ab, qb, ak, qk = sums
    late, grown = tl.exp2(since), tl.exp2(-since)
    rq, cb = (tq * late).to(tq.dtype), tl.trans((tb * grown).to(tb.dtype))
    ra, ck = (ta * (tl.exp2(early) if form.LOW else late)).to(ta.dtype), cb
    if form.LOW:
        ck = tl.trans((tk * grown).to(tk.dtype))
    if n == form.LEVELS:
        ab, qb = tl.dot(ra, cb, ab), tl.dot(rq, cb, qb)
        if form.LOW:
            ak, qk = tl.dot(ra, ck, ak), tl.dot(rq, ck, qk)
    else:
        i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
        here = ((i ^ j) < (1 << n)) & (i > j)
        ab += tl.where(here, tl.dot(ra, cb), 0.0)
        qb += tl.where(here, tl.dot(rq, cb), 0.0)
        if form.LOW:
            ak += tl.where(here, tl.dot(ra, ck), 0.0)
            qk += tl.where(here, tl.dot(rq, ck), 0.0)
    return ab, qb, ak, qk


@triton.jit
def _pairs_by_level(sums, tq, tk, ta, tb, masks, high, low, start, WIDE: tl.constexpr, form: tl.constexpr):
    """The same for the levels that join blocks of 2^start rows."""
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ab, qb, ak, qk = sums
    for level in range(start, LEVELS):
        here = (((i ^ j) >> level) == 1) & (i > j)
        decay = tl.exp2(halvings(masks.gates, LEVELS + 1 + level, high, low, WIDE, C))
        rq, rb = (tq * decay).to(tq.dtype), (tb * decay).to(tb.dtype)
        ra, cb = rb, tl.trans(rb)
        if form.LOW:
            ra = tl.exp2(halvings(masks.early_gates, LEVELS + 1 + level, high, low, WIDE, C))
            ra = (ta * ra).to(ta.dtype)
        ab += tl.where(here, tl.dot(ra, cb), 0.0)
        qb += tl.where(here, tl.dot(rq, cb), 0.0)
        if form.LOW:
            ck = tl.trans((tk * decay).to(tk.dtype))
            ak += tl.where(here, tl.dot(ra, ck), 0.0)
            qk += tl.where(here, tl.dot(rq, ck), 0.0)
    return ab, qb, ak, qk


@triton.jit
def keep_matrices(
    sums, own, other, of_q, of_k, beta, from_beta, rows, tokens, matrices, spot, form: tl.constexpr
):  # fmt: skip
    """Writes a chunk's matrices, from its pairs. own, other: rows of q with their own b and k; of_q, of_k: the squared
    lengths of rows, if they are normalized."""
    ab, qb, ak, qk = sums
    C: tl.constexpr = form.C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if form.NORMALIZE:
        of_q, of_k = tl.rsqrt(of_q + 1e-6), tl.rsqrt(of_k + 1e-6)
        ab *= of_k[:, None] * of_k[None, :]
        qb *= of_q[:, None] * of_k[None, :]
        own *= of_q * of_k
        keep_lengths(matrices.lengths, spot, of_q, of_k, form)
    else:
        of_q = tl.full([C], 1.0, tl.float32)
        of_k = of_q
    at = spot * (C * C) + square_of(form)
    tl.store(matrices.pair + at, tl.where(i > j, qb, tl.where(i == j, own[:, None], 0.0)))
    factor = tl.full([C], -1.0, tl.float32)
    if form.LOW:
        tl.store(matrices.read + at, tl.where(i > j, ak, 0.0))
        tl.store(matrices.plain + at, tl.where(i > j, qk, tl.where(i == j, other[:, None], 0.0)))
    else:
        factor = beta_of(beta, from_beta, rows, tokens, form)
        keep_decays(matrices, spot, of_q, of_k, of_k, factor, 1.0, form)
    tl.store(matrices.solve + at, solve_chunk(tl.where(i > j, ab, 0.0), factor, matrices.solve.dtype.element_ty, form))


@triton.jit
def out_of_range(whole, form: tl.constexpr):
    """Whether a chunk's decay, in any channel, is below what one product allows, or a NaN."""
    LEAST: tl.constexpr = 2.0**-form.HALVINGS
    return tl.min(tl.where(whole >= LEAST, 1, 0), 0) == 0


@triton.jit
def served_at_once(decays, spot, first, tokens, form: tl.constexpr):
    """Whether a chunk is one for the kernels of `delta_at_once.py`, by its decay."""
    depth = tl.arange(0, form.BK)
    whole = tl.load(decays + spot * form.K + depth, mask=depth < form.K, other=1.0)
    return (first + form.C <= tokens) & (out_of_range(whole, form) == 0)


@triton.jit
def left(decays, spot, first, tokens, form: tl.constexpr):
    """Whether the kernels of `delta_at_once.py` leave a chunk to the others."""
    found = first < tokens
    if found:
        found = served_at_once(decays, spot, first, tokens, form) == 0
    return found


@triton.jit
def any_left(decays, packing, form: tl.constexpr):
    """Whether they leave one of a program's chunks, or it takes a look at each to know that."""
    COUNT: tl.constexpr = form.APART
    found = tl.program_id(0) >= 0
    if packing.ends is None:
        low = tl.program_id(0) * COUNT
        if (low + packing.begin + COUNT) * form.C <= packing.tokens:
            spot = tl.program_id(1).to(tl.int64) * packing.chunks + low + tl.arange(0, COUNT)
            depth = tl.arange(0, form.BK)[None, :]
            whole = tl.load(decays + spot[:, None] * form.K + depth, mask=depth < form.K, other=1.0)
            found = out_of_range(tl.min(tl.where(whole == whole, whole, -1.0), 0), form)
    return found


@triton.jit
def half_pairs_by_channel(q, k, a, b, gate, beta, reads, matrices, masks, packing, form: tl.constexpr):
    """`pairs_by_channel` in half precision."""
    if form.APART == 0:
        place = find_chunk(packing)
        if place[4] * form.C < place[3]:
            spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
            _half_pairs(q, k, a, b, gate, beta, reads, matrices, masks, packing, place, spot, form)
    elif any_left(matrices.whole, packing, form):
        for step in range(form.APART):
            place = find_chunk(packing, form.APART, step)
            spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0) * form.APART + step
            if left(matrices.whole, spot, place[4] * form.C, place[3], form):
                _half_pairs(q, k, a, b, gate, beta, reads, matrices, masks, packing, place, spot, form)


@triton.jit
def _half_pairs(q, k, a, b, gate, beta, reads, matrices, masks, packing, place, spot, form: tl.constexpr):
    n, h, start, tokens, chunk = place
    first = chunk * form.C
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    row = tl.arange(0, C)
    rows, i = first + row, row[:, None]
    from_q, from_k, from_a, from_b, from_g, from_beta = heads_of(q, k, a, b, gate, beta, packing, n, h, start, form)
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    ab, of_q = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    qb, ak, qk, of_k, own, other = ab, ab, ab, of_q, of_q, of_q
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        tq = tile_of(q, from_q, rows, depth, tokens, form.K, form.BK)
        tk = tile_of(k, from_k, rows, depth, tokens, form.K, form.BK)
        ta, tb = tk, tk
        if form.LOW:
            ta = tile_of(a, from_a, rows, depth, tokens, form.K, form.BK)
            tb = tile_of(b, from_b, rows, depth, tokens, form.K, form.BK)
        high, low = split_gates(tile_of(gate, from_g, rows, depth, tokens, form.K, form.BK))
        since = halvings(masks.gates, LEVELS, high, low, WIDE, C)
        late, early = tl.exp2(since), since
        if form.LOW:
            early = halvings(masks.early_gates, LEVELS, high, low, WIDE, C)
        store_rows(reads.q.data, packing, n, h, start, rows, depth, tokens, tq * late, form.K)
        of_a = tl.exp2(early) if form.LOW else late
        store_rows(reads.a.data, packing, n, h, start, rows, depth, tokens, ta * of_a, form.K)
        whole = matrices.whole + spot * form.K + depth[None, :] + 0 * i
        tl.store(whole, late, mask=(i == C - 1) & (depth < form.K)[None, :])
        after = tl.exp2(halvings(masks.gates, 2 * LEVELS + 1, high, low, WIDE, C))
        store_rows(reads.b.data, packing, n, h, start, rows, depth, tokens, tb * after, form.K)
        if form.LOW:
            store_rows(reads.k.data, packing, n, h, start, rows, depth, tokens, tk * after, form.K)
        sums, least = (ab, qb, ak, qk), 0
        if form.HALVINGS > 0:
            least, since = _blocks(masks, since, high, low, tl.full([], LEVELS, tl.int32), WIDE, form)
            if form.LOW:
                early = tl.where(least > 0, halvings(masks.early_gates, least, high, low, WIDE, C), 0.0)
            sums = _pairs_at_once(sums, tq, tk, ta, tb, since, early, least, form)
        ab, qb, ak, qk = _pairs_by_level(sums, tq, tk, ta, tb, masks, high, low, least, WIDE, form)
        wide = tq.to(tl.float32)
        own += tl.sum(wide * tb.to(tl.float32), 1)
        if form.LOW:
            other += tl.sum(wide * tk.to(tl.float32), 1)
        if form.NORMALIZE:
            of_q += tl.sum(wide * wide, 1)
            of_k += tl.sum(tk.to(tl.float32) * tk.to(tl.float32), 1)
    keep_matrices((ab, qb, ak, qk), own, other, of_q, of_k, beta, from_beta, rows, tokens, matrices, spot, form)


@triton.jit
def _own_weights(places, v, rows, tokens, of_q, of_a, of_b, scale, form: tl.constexpr):
    """The gradients of a chunk's weights, q with b, a with b, q with k and a with k, beside their mirror images; and of
    a row of q with its own b and k. of_q, of_a, of_b: what rows are multiplied by."""
    from_do, do_step, from_solved, from_dx, step, from_v = places
    C: tl.constexpr = form.C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    qb, qb_t = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    ab, ab_t, qk, qk_t, ak, ak_t = qb, qb, qb, qb, qb, qb
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        tdo = tile_at(from_do, do_step, rows, columns, tokens, form.V)
        tdx = tile_at(from_dx, step, rows, columns, tokens, form.V)
        tu = tile_at(from_solved, step, rows, columns, tokens, form.V)
        qb += tl.dot(tdo, tl.trans(tu))
        ab += tl.dot(tdx, tl.trans(tu))
        qb_t += tl.dot(tu, tl.trans(tdo))  # Hopper cannot transpose a sum for another product
        ab_t += tl.dot(tu, tl.trans(tdx))
        if form.LOW:
            tv = tile_at(from_v, v.token, rows, columns, tokens, form.V)
            qk += tl.dot(tdo, tl.trans(tv))
            ak += tl.dot(tdx, tl.trans(tv))
            qk_t += tl.dot(tv, tl.trans(tdo))
            ak_t += tl.dot(tv, tl.trans(tdx))
    kind: tl.constexpr = v.data.dtype.element_ty
    qb, ab = of_q[:, None] * of_b[None, :] * qb, of_a[:, None] * of_b[None, :] * ab
    own, other = diagonal_of(qb, form), 0.0
    if form.LOW:
        other = scale * diagonal_of(qk, form)
    qb, qb_t = tl.where(i > j, qb, 0.0), tl.where(i < j, of_b[:, None] * of_q[None, :] * qb_t, 0.0)
    ab, ab_t = tl.where(i > j, ab, 0.0), tl.where(i < j, of_b[:, None] * of_a[None, :] * ab_t, 0.0)
    pairs = qb.to(kind), qb_t.to(kind), ab.to(kind), ab_t.to(kind)
    plain = tl.where(i > j, scale * qk, scale * qk_t).to(kind), tl.where(i > j, ak, ak_t).to(kind)
    return pairs, plain, own, other


@triton.jit
def _by_states(places, v, states, at, rows, depth, tokens, form: tl.constexpr):
    """Rows times the states around a chunk, for the gradients of q, a, b and k; and the state before it times the
    gradient of the one after it, summed over v."""
    from_do, do_step, from_solved, from_dx, step, from_v = places
    C: tl.constexpr = form.C
    BS: tl.constexpr = form.BS
    dq, held = tl.zeros([C, BS], tl.float32), tl.zeros([BS], tl.float32)
    da, db, dk = dq, dq, dq
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        spots = at + columns[:, None] * form.K + depth[None, :]
        inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
        before = tl.load(states.before + spots, mask=inside, other=0.0)
        later = tl.load(states.later + spots, mask=inside, other=0.0)
        dq += tl.dot(tile_at(from_do, do_step, rows, columns, tokens, form.V), before)
        da += tl.dot(tile_at(from_dx, step, rows, columns, tokens, form.V), before)
        db += tl.dot(tile_at(from_solved, step, rows, columns, tokens, form.V), later)
        if form.LOW:
            dk += tl.dot(tile_at(from_v, v.token, rows, columns, tokens, form.V), later)
        held += tl.sum(before.to(tl.float32) * later.to(tl.float32), 0)
    return dq, da, db, dk, held


@triton.jit
def _delta_at_once(sums, tq, tk, weights, masks, since, n, form: tl.constexpr):
    """Adds the gradients of the pairs within blocks of 2^n rows to those of q, k and the gate."""
    dq, dk, dg = sums
    qb, ab = weights
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    late, grown = tl.exp2(since), tl.exp2(-since)
    rq, rk, ck = (tq * late).to(tq.dtype), (tk * late).to(tk.dtype), (tk * grown).to(tk.dtype)
    below, above = mask_at(masks.pairs, LEVELS + n, C), mask_at(masks.pairs, 2 * LEVELS + 1 + n, C)
    of_q, of_a = tl.dot(qb * below, ck), tl.dot(ab * below, ck)
    of_b = tl.dot(ab * above, rk, tl.dot(qb * above, rq))
    dg = add_whole(dg, masks.signs, LEVELS + n, rq * of_q + rk * of_a - ck * of_b, C)
    return dq + late * of_q, dk + late * of_a + grown * of_b, dg


@triton.jit
def _delta_by_level(sums, tq, tk, weights, masks, high, low, start, WIDE: tl.constexpr, form: tl.constexpr):
    """The same for the levels from `start` on."""
    dq, dk, dg = sums
    qb, ab = weights
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    for level in range(start, LEVELS):
        right, pairs = right_rows(level, C), mask_at(masks.pairs, level, C)
        decay = tl.exp2(halvings(masks.gates, LEVELS + 1 + level, high, low, WIDE, C))
        mixed = tl.where(right, tq, tk)
        first = decay * tl.dot(qb * pairs, (mixed * decay).to(tk.dtype))
        second = decay * tl.dot(ab * pairs, (tk * decay).to(tk.dtype))
        dg = add_chosen(dg, masks.signs, level, mixed * first + tk * second, C)
        dq += tl.where(right, first, 0.0)
        dk += tl.where(right, 0.0, first) + second
    return dq, dk, dg


@triton.jit
def _low_at_once(sums, tiles, weights, masks, since, early, n, form: tl.constexpr):
    """`_delta_at_once` for RWKV-7: the gradients of q, k, a, b and the gate."""
    dq, dk, da, db, dg = sums
    tq, tk, ta, tb = tiles
    qb, ab, qk, ak = weights
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    late, grown, early = tl.exp2(since), tl.exp2(-since), tl.exp2(early)
    below, above = mask_at(masks.pairs, LEVELS + n, C), mask_at(masks.pairs, 2 * LEVELS + 1 + n, C)
    ck, cb = (tk * grown).to(tk.dtype), (tb * grown).to(tb.dtype)
    rq, ra = (tq * late).to(tq.dtype), (ta * early).to(ta.dtype)
    of_q = tl.dot(qb * below, cb, tl.dot(qk * below, ck))
    of_a = tl.dot(ab * below, cb, tl.dot(ak * below, ck))
    of_b = tl.dot(ab * above, ra, tl.dot(qb * above, rq))
    of_k = tl.dot(ak * above, ra, tl.dot(qk * above, rq))
    seen = ra * of_a  # before the row's own gate
    dg = add_whole(dg, masks.signs, LEVELS + n, rq * of_q + seen - cb * of_b - ck * of_k, C) - seen
    return dq + late * of_q, dk + grown * of_k, da + early * of_a, db + grown * of_b, dg


@triton.jit
def _low_by_level(sums, tiles, weights, masks, high, low, start, WIDE: tl.constexpr, form: tl.constexpr):
    """`_delta_by_level` for RWKV-7."""
    dq, dk, da, db, dg = sums
    tq, tk, ta, tb = tiles
    qb, ab, qk, ak = weights
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    for level in range(start, LEVELS):
        right, pairs = right_rows(level, C), mask_at(masks.pairs, level, C)
        decay = tl.exp2(halvings(masks.gates, LEVELS + 1 + level, high, low, WIDE, C))
        rows = tl.where(right, tq, tb), tl.where(right, tq, tk)
        first = decay * tl.dot(qb * pairs, (rows[0] * decay).to(tk.dtype))
        second = decay * tl.dot(qk * pairs, (rows[1] * decay).to(tk.dtype))
        dg = add_chosen(dg, masks.signs, level, rows[0] * first + rows[1] * second, C)
        dq += tl.where(right, first + second, 0.0)
        db += tl.where(right, 0.0, first)
        dk += tl.where(right, 0.0, second)
        decay = tl.exp2(halvings(masks.early_gates, LEVELS + 1 + level, high, low, WIDE, C))
        rows = tl.where(right, ta, tb), tl.where(right, ta, tk)
        first = decay * tl.dot(ab * pairs, (rows[0] * decay).to(tk.dtype))
        second = decay * tl.dot(ak * pairs, (rows[1] * decay).to(tk.dtype))
        dg = add_chosen(dg, masks.early_signs, level, rows[0] * first + rows[1] * second, C)
        da += tl.where(right, first + second, 0.0)
        db += tl.where(right, 0.0, first)
        dk += tl.where(right, 0.0, second)
    return dq, dk, da, db, dg


@triton.jit
def _gate_tile(gate, packing, n, h, start, rows, depth, tokens, form: tl.constexpr):
    """Some channels' gates in one or two parts of float16."""
    return split_gates(tile_at(find_head(gate, n, h, packing.ends, start), gate.token, rows, depth, tokens, form.K))


@triton.jit
def _delta_whole(tiles, since, pieces, weights, masks, factors, whole, form: tl.constexpr):
    """`_delta_slice` for a chunk whose rows all meet in one product."""
    tq, tk = tiles
    dq, da, db, _dk, held = pieces
    of_q, of_a, of_b = factors
    qb, qb_t, ab, ab_t = weights
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    late, grown = tl.exp2(since), tl.exp2(-since)
    rq, rk, ck = tq * late, tk * late, tk * grown
    dq, da, db = of_q[:, None] * dq, of_a[:, None] * da, of_b[:, None] * whole[None, :] * db
    dg = add_chosen(tl.zeros_like(dq), masks.signs, 2 * LEVELS + 1, rq * dq + rk * da, C)
    dg = add_chosen(dg, masks.signs, 2 * LEVELS + 2, ck * db, C) + (whole * held)[None, :]
    low_q, low_k, low_c = rq.to(tq.dtype), rk.to(tk.dtype), ck.to(tk.dtype)
    pair_q, pair_a, pair_b = tl.dot(qb, low_c), tl.dot(ab, low_c), tl.dot(ab_t, low_k, tl.dot(qb_t, low_q))
    dg = add_whole(dg, masks.signs, 2 * LEVELS, low_q * pair_q + low_k * pair_a - low_c * pair_b, C)
    return late * (dq + pair_q), late * (da + pair_a) + grown * (db + pair_b), dg


@triton.jit
def _delta_parts(tiles, gates, since, n, pieces, weights, masks, factors, whole, WIDE: tl.constexpr,
                 form: tl.constexpr):  # fmt: skip
    """`_delta_slice` for a chunk whose rows meet in blocks of 2^n rows."""
    tq, tk = tiles
    high, low = gates
    dq, da, db, _dk, held = pieces
    of_q, of_a, of_b = factors
    qb, qb_t, ab, ab_t = weights
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    late = tl.exp2(halvings(masks.gates, LEVELS, high, low, WIDE, C))
    dq, da = of_q[:, None] * late * dq, of_a[:, None] * late * da
    dg = add_chosen(tl.zeros_like(dq), masks.signs, 2 * LEVELS + 1, tq * dq + tk * da, C)
    db *= of_b[:, None] * tl.exp2(halvings(masks.gates, 2 * LEVELS + 1, high, low, WIDE, C))
    dg = add_chosen(dg, masks.signs, 2 * LEVELS + 2, tk * db, C) + (whole * held)[None, :]
    sums, both = (dq, da + db, dg), (qb + qb_t, ab + ab_t)
    if form.HALVINGS > 0:
        sums = _delta_at_once(sums, tq, tk, both, masks, since, n, form)
    return _delta_by_level(sums, tq, tk, both, masks, high, low, n, WIDE, form)


@triton.jit
def _delta_slice(tiles, gates, pieces, weights, masks, factors, whole, full, WIDE: tl.constexpr, form: tl.constexpr):
    """Some channels' gradients of q, k and the gate. pieces: of `_by_states`; full: a chunk of all its rows."""
    high, low = gates
    LEVELS: tl.constexpr = form.LEVELS
    if form.HALVINGS > 0:
        since = halvings(masks.gates, LEVELS, high, low, WIDE, form.C)
        n, since = _blocks(masks, since, high, low, tl.where(full, LEVELS, 0), WIDE, form)
        if n == LEVELS:
            dq, dk, dg = _delta_whole(tiles, since, pieces, weights, masks, factors, whole, form)
        else:
            dq, dk, dg = _delta_parts(
                tiles, gates, since, n, pieces, weights, masks, factors, whole, WIDE, form
            )  # fmt: skip
    else:
        dq, dk, dg = _delta_parts(tiles, gates, 0.0, 0, pieces, weights, masks, factors, whole, WIDE, form)
    return dq, dk, dg


@triton.jit
def _low_slice(tiles, gates, pieces, weights, masks, scale, whole, full, WIDE: tl.constexpr, form: tl.constexpr):
    """The same for RWKV-7: of q, k, a, b and the gate."""
    tq, tk, ta, tb = tiles
    high, low = gates
    dq, da, db, dk, held = pieces
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    since = halvings(masks.gates, LEVELS, high, low, WIDE, C)
    early = halvings(masks.early_gates, LEVELS, high, low, WIDE, C)
    dq, da = scale * tl.exp2(since) * dq, tl.exp2(early) * da
    dg = add_chosen(tl.zeros_like(dq), masks.signs, 2 * LEVELS + 1, tq * dq, C)
    dg = add_chosen(dg, masks.early_signs, 2 * LEVELS + 1, ta * da, C)  # a row's own gate follows its read
    until = tl.exp2(halvings(masks.gates, 2 * LEVELS + 1, high, low, WIDE, C))
    db, dk = until * db, until * dk
    dg = add_chosen(dg, masks.signs, 2 * LEVELS + 2, tb * db + tk * dk, C) + (whole * held)[None, :]
    sums, low_level = (dq, dk, da, db, dg), 0
    if form.HALVINGS > 0:
        most = tl.where(full, LEVELS, 0)
        low_level, since = _blocks(masks, since, high, low, most, WIDE, form)
        early = tl.where(low_level > 0, halvings(masks.early_gates, low_level, high, low, WIDE, C), 0.0)
        sums = _low_at_once(sums, tiles, weights, masks, since, early, low_level, form)
    return _low_by_level(sums, tiles, weights, masks, high, low, low_level, WIDE, form)


@triton.jit
def _through_length(x, product, grad, packing, n, h, start, rows, tokens, form: tl.constexpr):
    """Turns the gradient of rows whose lengths are constants, already written, into that of the rows."""
    place, found = find_head(x, n, h, packing.ends, start), own_rows(grad, packing, n, h, start, form.K)
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        tile = tile_at(place, x.token, rows, depth, tokens, form.K)
        whole = tile_at(found, packing.heads * form.K, rows, depth, tokens, form.K) - tile * product[:, None]
        store_rows(grad, packing, n, h, start, rows, depth, tokens, whole, form.K)


@triton.jit
def half_gradients_by_channel(
    q, k, v, a, b, gate, do, matrices, states, grads, masks, packing, scale, form: tl.constexpr
):  # fmt: skip
    """`gradients_by_channel` in half precision."""
    tensors = q, k, v, a, b, gate, do
    if form.APART == 0:
        place = find_chunk(packing)
        if place[4] * form.C < place[3]:
            spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
            _half_gradients(tensors, matrices, states, grads, masks, packing, place, spot, scale, form)
    elif any_left(matrices.whole, packing, form):
        for step in range(form.APART):
            place = find_chunk(packing, form.APART, step)
            spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0) * form.APART + step
            if left(matrices.whole, spot, place[4] * form.C, place[3], form):
                _half_gradients(tensors, matrices, states, grads, masks, packing, place, spot, scale, form)


@triton.jit
def _half_gradients(tensors, matrices, states, grads, masks, packing, place, spot, scale, form: tl.constexpr):
    q, k, v, a, b, gate, do = tensors
    n, h, start, tokens, chunk = place
    first = chunk * form.C
    C: tl.constexpr = form.C
    rows = first + tl.arange(0, C)
    from_v, from_dx = find_head(v, n, h, packing.ends, start), own_rows(grads.v, packing, n, h, start, form.V)
    shrink_q = tl.full([C], 1.0, tl.float32)
    shrink_k = shrink_q
    if form.NORMALIZE:
        place = matrices.lengths + spot * (2 * C) + tl.arange(0, C)
        shrink_q, shrink_k = tl.load(place), tl.load(place + C)
    of_q, of_a, of_b = scale * shrink_q, shrink_k, shrink_k
    if form.LOW:
        from_dx = own_rows(states.turned, packing, n, h, start, form.V)
    else:
        of_a, of_b = -shrink_k, shrink_k * tl.load(matrices.decays + spot * (4 * C) + 3 * C + tl.arange(0, C))
    from_solved = own_rows(states.solved, packing, n, h, start, form.V)
    from_do, step = find_head(do, n, h, packing.ends, start), packing.heads * form.V
    places = from_do, do.token, from_solved, from_dx, step, from_v
    pairs, plain, own, other = _own_weights(places, v, rows, tokens, of_q, of_a, of_b, scale, form)
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    full = first + C <= tokens
    product_q, product_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for part in range((form.K + form.BS - 1) // form.BS):
        none = tl.minimum(16 * packing.heads - part, 0)  # 0 that keeps the compiler from holding all places
        rows, depth = first + none + tl.arange(0, C), part * form.BS + tl.arange(0, form.BS)
        tq = rows_of(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form)
        tk = rows_of(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form)
        gates = _gate_tile(gate, packing, n, h, start, rows, depth, tokens, form)
        whole = tl.load(matrices.whole + spot * form.K + depth, mask=depth < form.K, other=0.0)
        pieces = _by_states(places, v, states, spot * (form.K * form.V), rows, depth, tokens, form)
        if form.LOW:
            ta = rows_of(a, find_head(a, n, h, packing.ends, start), rows, depth, tokens, form)
            tb = rows_of(b, find_head(b, n, h, packing.ends, start), rows, depth, tokens, form)
            weights = pairs[0] + pairs[1], pairs[2] + pairs[3], plain[0], plain[1]
            dq, dk, da, db, dg = _low_slice(
                (tq, tk, ta, tb), gates, pieces, weights, masks, scale, whole, full, WIDE, form
            )  # fmt: skip
            dq += own * tb + other * tk
            dk += other * tq
            store_rows(grads.a, packing, n, h, start, rows, depth, tokens, da, form.K)
            store_rows(grads.b, packing, n, h, start, rows, depth, tokens, db + own * tq, form.K)
        else:
            dq, dk, dg = _delta_slice(
                (tq, tk), gates, pieces, pairs, masks, (of_q, of_a, of_b), whole, full, WIDE, form
            )  # fmt: skip
            dq += own * tk
            dk += own * tq
        store_rows(grads.g, packing, n, h, start, rows, depth, tokens, dg, form.K)
        store_rows(grads.q, packing, n, h, start, rows, depth, tokens, dq, form.K)
        store_rows(grads.k, packing, n, h, start, rows, depth, tokens, dk, form.K)
        if form.NORMALIZE:
            product_q += tl.sum(tq * dq, 1)
            product_k += tl.sum(tk * dk, 1)
    if form.NORMALIZE:
        tl.debug_barrier()
        shrink_q, shrink_k = shrink_q * shrink_q * product_q, shrink_k * shrink_k * product_k
        _through_length(q, shrink_q, grads.q, packing, n, h, start, rows, tokens, form)
        _through_length(k, shrink_k, grads.k, packing, n, h, start, rows, tokens, form)
