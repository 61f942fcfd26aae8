"""The chunk engine of `scan.py` for a gate per channel in half precision.

Kernels that run over all chunks side by side do what needs no state. Before the scans, one makes q and k with their
decays and the weights of q with k. After the scans of dq and dk, one adds the chunks' own pairs and makes the gate's
gradient, by `levels.py`. So a scan has no gates but the decay of a whole chunk, and two or three products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.levels import (
    add_chosen,
    add_sums,
    add_whole,
    add_whole_sums,
    decay_since,
    decay_until,
    edge_decay,
    growth,
    keep_sums,
    mask_at,
    masked_decay,
    right_rows,
    split_gates,
    whole_sums,
)
from ridgeline.ops.recurrent.triton.levels import (
    write_masks as write_masks,  # fills `Masks`, for who starts these kernels
)
from ridgeline.ops.recurrent.triton.scan import decay_of, find_head, find_span, finish, first_state, tile_at


class PairForm(NamedTuple):
    """What the kernels of a chunk's own pairs are compiled for."""

    K: int
    V: int
    BS: int  # channels at a time
    BV: int  # columns of v at a time
    C: int  # rows of a chunk
    LEVELS: int  # log2 of C
    SHIFT: bool  # rows see the state before their own gate (RWKV-6)
    SPAN: int  # the most halvings of a chunk's decay with which its rows meet in one product
    CHOOSE: bool  # whether a load may choose among pointers, which Triton cannot compile for AMD
    APART: bool = False  # chunks that meet in one product are `own_gradients_at_once`'s


class Prepared(NamedTuple):
    """Of all chunks, (sequences, heads, chunks, ...), or packed (heads, chunks, ...)."""

    pairs: Any  # the weights of q with k, (C, C)
    q: Any  # times its decay since the chunk began, (C, K)
    k: Any  # times its decay until the chunk ends
    sums: Any  # of the gates, (K,) in float32
    left: Any = None  # (sequences, heads): the kernels serve those marked 1 alone; None: all


class Own(NamedTuple):
    """(B, T, value heads, K), contiguous: dq and dk hold what the states bring, without its rows'
    decays, and then the gradients."""

    q: Any
    k: Any
    g: Any
    ends: Any  # of all chunks: states times the later chunks' gradient of them, summed over v, float32
    bonus: Any  # each chunk's part of du (chunks, heads, K), or None
    sums: Any = None  # of all chunks: the sums of their gates, (K,) in float32
    left: Any = None  # as in `Prepared`


class Masks(NamedTuple):
    """(levels + 2, C, C) and for crossings (levels + 4, C, C), by `write_masks`."""

    gates: Any  # float16
    joined: Any
    crossings: Any  # in bfloat16, or for float16 data in float32


@triton.jit
def _bonus(bonus, gate, h, depth, form: tl.constexpr):
    u = tl.full(depth.shape, 1.0, tl.float32)
    if bonus is not None:
        u = tl.load(bonus + h // gate.group * form.K + depth, mask=depth < form.K, other=0.0).to(tl.float32)
    return u


@triton.jit
def _find(packing, spot):
    """Of a chunk's place among all chunks, its sequence and head, where the sequence begins, its tokens, and the
    chunk's first token."""
    n, h = spot // packing.chunks // packing.heads, spot // packing.chunks % packing.heads
    chunk = spot % packing.chunks
    if packing.ends is not None:
        kept = chunk
        n, beyond = 0 * kept, 0 * kept + packing.sequences
        while beyond - n > 1:  # the last sequence whose room begins here or before
            middle = (n + beyond) // 2
            here = tl.load(packing.ends + middle) // packing.unit + middle <= kept
            n, beyond = tl.where(here, middle, n), tl.where(here, beyond, middle)
        chunk = kept - (tl.load(packing.ends + n) // packing.unit + n)
    start, tokens = find_span(packing, n)
    return n, h, start, tokens, chunk * packing.unit


@triton.jit
def _any(marks, count):
    """Whether one of them is 1."""
    found = tl.zeros([1024], tl.int32)
    for base in range(0, count, 1024):
        at = base + tl.arange(0, 1024)
        found |= tl.load(marks + at, mask=at < count, other=0)
    return tl.max(found, 0)


@triton.jit
def own_pairs(q, k, gate, bonus, made, packing, room, count, form: tl.constexpr):
    """What the scans need of all chunks: the weights of q with k, q and k with their decays, and the gates' sums.

    room: (programs, C, K) in float32. count: of chunks."""
    if made.left is not None:  # noqa: SIM102  # decided at compile time
        if _any(made.left, packing.sequences * packing.heads) == 0:
            return
    for spot in range(tl.program_id(0), count, tl.num_programs(0)):
        n, h, start, tokens, first = _find(packing, spot)
        rest = first < tokens
        if made.left is not None:
            rest = rest & (tl.load(made.left + n * packing.heads + h) != 0)
        if form.APART:
            rest = rest & (_in_range(made.sums, spot, form) == 0)
        if rest:
            _pairs_of(q, k, gate, bonus, made, packing, room, tl.cast(spot, tl.int64), n, h, start, tokens, first, form)


@triton.jit
def _mild(total, form: tl.constexpr):
    """Whether the sums of a chunk's gates let its rows meet in one product. A NaN does not."""
    return tl.min(tl.where(total * 1.4426950408889634 >= -form.SPAN, 1, 0), 0) == 1


@triton.jit
def _in_range(sums, spot, form: tl.constexpr):
    """The same for a chunk whose sums have been written."""
    BK: tl.constexpr = triton.next_power_of_2(form.K)
    depth = tl.arange(0, BK)
    return _mild(tl.load(sums + tl.cast(spot, tl.int64) * form.K + depth, mask=depth < form.K, other=0.0), form)


@triton.jit
def own_pairs_at_once(q, k, gate, bonus, made, packing, form: tl.constexpr):
    """`own_pairs` for a chunk whose rows meet in one product. Of all others it leaves the sums of gates, by which
    `own_pairs` knows them, and rows that `own_pairs` writes over."""
    n, h, start, tokens, first = _find(packing, tl.program_id(0))
    if first >= tokens:
        return
    spot = tl.program_id(0).to(tl.int64)
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BS: tl.constexpr = form.BS
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    WIDE: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    summed = tl.where(i >= j, 1.0, 0.0).to(tl.float16 if WIDE else gate.data.dtype.element_ty)
    found, diagonal, rest = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32), spot < 0
    for part in range((K + BS - 1) // BS):
        none = tl.minimum(16 * packing.heads - part, 0)  # 0 that keeps the compiler from holding all places
        rows, depth = first + none + row, part * BS + tl.arange(0, BS)
        g = tile_at(find_head(gate, n, h, packing.ends, start), gate.token, rows, depth, tokens, K)
        tq = tile_at(find_head(q, n, h, packing.ends, start), q.token, rows, depth, tokens, K)
        tk = tile_at(find_head(k, n, h, packing.ends, start), k.token, rows, depth, tokens, K)
        if WIDE:
            high, low = split_gates(g)
            since = tl.dot(summed, low, tl.dot(summed, high))
        else:
            since = tl.dot(summed, g)
        since *= 1.4426950408889634
        grown, late = tl.exp2(-since), tl.exp2(since)
        whole = tl.sum(tl.where(i == C - 1, since, 0.0), 0)
        total = whole * 0.6931471805599453
        tl.store(made.sums + spot * K + depth, total, mask=depth < K)
        rest = rest | (_mild(tl.where(depth < K, total, 0.0), form) == 0)
        if form.SHIFT:
            late = tl.exp2(since - g.to(tl.float32) * 1.4426950408889634)
        here = (depth < K)[None, :]
        spots = spot * (C * K) + i * K + depth[None, :]
        mine = (tq * late).to(tq.dtype)
        tl.store(made.q + spots, mine, mask=here)
        tl.store(made.k + spots, (tk * (grown * tl.exp2(whole)[None, :])).to(tk.dtype), mask=here)
        found = tl.dot(mine, tl.trans((tk * grown).to(tk.dtype)), found)
        diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32) * _bonus(bonus, gate, h, depth, form)[None, :], 1)
    if rest:
        return
    found = tl.where(i > j, found, tl.where(i == j, diagonal[:, None], 0.0))
    tl.store(made.pairs + spot * (C * C) + i * C + j, found)


@triton.jit
def _rows_of_both(of_q, of_k, right, depth, there, form: tl.constexpr):
    """q's rows in right blocks and k's in left ones."""
    if form.CHOOSE:
        rows = tl.load(tl.where(right, of_q, of_k) + depth[None, :], mask=there, other=0.0)
    else:
        rows = tl.load(of_q + depth[None, :], mask=there & right, other=0.0)
        rows = tl.where(right, rows, tl.load(of_k + depth[None, :], mask=there & (right == 0), other=0.0))
    return rows


@triton.jit
def _mixed(of_q, of_k, sums, depth, there, level, form: tl.constexpr):
    """q's rows in right blocks and k's in left ones, with their decays to the edges between the blocks."""
    decay = edge_decay(sums, depth, level, form.K, form.C, form.SHIFT)
    mixed = _rows_of_both(of_q, of_k, right_rows(level, form.C), depth, there, form)
    return (mixed * decay).to(mixed.dtype)


@triton.jit
def _keep_rows(tq, tk, until, total, bonus, gate, made, sums, spot, h, depth, form: tl.constexpr):
    """Writes some channels of q and k with their decays. Returns q's, and the pairs of a row with itself."""
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    here = (depth < K)[None, :]
    diagonal = tl.sum(tq.to(tl.float32) * tk.to(tl.float32) * _bonus(bonus, gate, h, depth, form)[None, :], 1)
    spots = spot * (C * K) + tl.arange(0, C)[:, None] * K + depth[None, :]
    mine = (tq * decay_since(sums, depth, K, C, form.SHIFT)).to(tq.dtype)
    tl.store(made.q + spots, mine, mask=here)
    tl.store(made.k + spots, (tk * until).to(tk.dtype), mask=here)
    tl.store(made.sums + spot * K + depth, total * 0.6931471805599453, mask=depth < K)
    return mine, diagonal


@triton.jit
def _pairs_of(q, k, gate, bonus, made, packing, room, spot, n, h, start, tokens, first, form: tl.constexpr):
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BS: tl.constexpr = form.BS
    PIECE: tl.constexpr = min(form.BS, 64)  # of rows that are kept: more would spill
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    from_q, from_k = find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start)
    sums = room + tl.program_id(0) * (C * K)
    keep_sums(sums, gate, find_head(gate, n, h, packing.ends, start), first, tokens, K, BS, C)
    found, diagonal = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    inside = (first + row < tokens)[:, None]
    of_q = from_q + (first + row).to(tl.int64)[:, None] * q.token
    of_k = from_k + (first + row).to(tl.int64)[:, None] * k.token
    least = tl.cast(0.0, tl.float32)
    for part in range((K + BS - 1) // BS):
        least = tl.minimum(least, tl.min(whole_sums(sums, part * BS + tl.arange(0, BS), K, C), 0))
    if least >= -form.SPAN:  # a product at once: the chunk's decay and its inverse are in range
        for part in range((K + PIECE - 1) // PIECE):
            depth = part * PIECE + tl.arange(0, PIECE)
            there = inside & (depth < K)[None, :]
            tq, tk = tl.load(of_q + depth[None, :], there, other=0.0), tl.load(of_k + depth[None, :], there, other=0.0)
            total, grown = whole_sums(sums, depth, K, C), growth(sums, depth, K, C)
            until = grown * tl.exp2(total)[None, :]
            mine, own = _keep_rows(tq, tk, until, total, bonus, gate, made, sums, spot, h, depth, form)
            found += tl.dot(mine, tl.trans((tk * grown).to(tk.dtype)))
            diagonal += own
    else:
        for part in range((K + BS - 1) // BS):
            depth = part * BS + tl.arange(0, BS)
            there = inside & (depth < K)[None, :]
            ours = tl.zeros([C, C], tl.float32)
            mixed = _mixed(of_q, of_k, sums, depth, there, form.LEVELS - 1, form)
            for step in range(1, form.LEVELS):
                scores = tl.dot(mixed, tl.trans(mixed))
                mixed = _mixed(of_q, of_k, sums, depth, there, form.LEVELS - 1 - step, form)
                ours = tl.where((i ^ j) < (2 * C >> step), scores, ours)  # the levels below write over the rest
            found += tl.where((i ^ j) < 2, tl.dot(mixed, tl.trans(mixed)), ours)
        for part in range((K + PIECE - 1) // PIECE):
            depth = part * PIECE + tl.arange(0, PIECE)
            there = inside & (depth < K)[None, :]
            tq, tk = tl.load(of_q + depth[None, :], there, other=0.0), tl.load(of_k + depth[None, :], there, other=0.0)
            total, until = whole_sums(sums, depth, K, C), decay_until(sums, depth, K, C)
            _, own = _keep_rows(tq, tk, until, total, bonus, gate, made, sums, spot, h, depth, form)
            diagonal += own
    found = tl.where(i > j, found, tl.where(i == j, diagonal[:, None], 0.0))
    tl.store(made.pairs + spot * (C * C) + i * C + j, found)
    tl.debug_barrier()  # the next chunk writes over the sums


@triton.jit
def _products(do, v, n, h, start, rows, tokens, packing, form: tl.constexpr):
    """do_i . v_j for j <= i, and its mirror image."""
    C: tl.constexpr = form.C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    from_do, from_v = find_head(do, n, h, packing.ends, start), find_head(v, n, h, packing.ends, start)
    below, above = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        tdo = tile_at(from_do, do.token, rows, columns, tokens, form.V)
        tv = tile_at(from_v, v.token, rows, columns, tokens, form.V)
        below += tl.dot(tdo, tl.trans(tv))
        above += tl.dot(tv, tl.trans(tdo))  # Hopper cannot transpose a sum for another product
    return tl.where(i >= j, below, above)


@triton.jit
def _gradients_by_level(of_q, of_k, both, masks, g, depth, inside, form: tl.constexpr):
    """Some channels' own parts of dq, dk and dg, whatever the gates."""
    C: tl.constexpr = form.C
    BS: tl.constexpr = form.BS
    high, low = split_gates(g)
    wide: tl.constexpr = g.dtype.primitive_bitwidth > 16
    dq, dk, dg = tl.zeros([C, BS], tl.float32), tl.zeros([C, BS], tl.float32), tl.zeros([C, BS], tl.float32)
    for level in range(form.LEVELS):
        right = right_rows(level, C)
        decay = masked_decay(masks, level, high, low, wide, C)
        mixed = _rows_of_both(of_q, of_k, right, depth, inside, form)
        weights = both * mask_at(masks.joined, level, C)
        found = decay * tl.dot(weights, (mixed * decay).to(mixed.dtype))
        dg = add_chosen(dg, masks.crossings, level, mixed * found, C)
        dq += tl.where(right, 1.0, 0.0) * found
        dk += tl.where(right, 0.0, 1.0) * found
    return dq, dk, dg


@triton.jit
def _gradients_at_once(of_q, of_k, both, masks, g, depth, inside, form: tl.constexpr):
    """The same for a whole chunk whose decay and its inverse are in range. A gate's pairs are those that end after it
    without those that begin after it, or in the chunk's first half those that begin before it without those that end
    before it. So few terms cancel, and none for the first token, nor with SHIFT for the last."""
    C: tl.constexpr = form.C
    high, low = split_gates(g)
    wide: tl.constexpr = g.dtype.primitive_bitwidth > 16
    since = masked_decay(masks, form.LEVELS, high, low, wide, C)
    total = tl.sum(g.to(tl.float32), 0) * 1.4426950408889634
    grown = masked_decay(masks, form.LEVELS + 1, high, low, wide, C) * tl.exp2(-total)[None, :]
    tq = tl.load(of_q + depth[None, :], mask=inside, other=0.0)
    tk = tl.load(of_k + depth[None, :], mask=inside, other=0.0)
    dq = since * tl.dot(both * mask_at(masks.joined, form.LEVELS, C), (tk * grown).to(tk.dtype))
    dk = grown * tl.dot(both * mask_at(masks.joined, form.LEVELS + 1, C), (tq * since).to(tq.dtype))
    dg = add_whole(tl.zeros_like(dq), masks.crossings, form.LEVELS + 2, tq * dq, C)
    dg = add_whole(dg, masks.crossings, form.LEVELS + 3, tk * dk, C)
    return dq, dk, dg


@triton.jit
def own_gradients(q, k, v, gate, bonus, do, grads, masks, packing, scale, form: tl.constexpr):
    """Adds to a chunk's dq and dk their own pairs' part, and makes the gate's gradient."""
    spot = tl.program_id(0)
    n, h, start, tokens, first = _find(packing, spot)
    if first >= tokens:
        return
    if grads.left is not None:  # noqa: SIM102  # decided at compile time
        if tl.load(grads.left + n * packing.heads + h) == 0:
            return
    if form.APART and (first + form.C <= tokens) & _in_range(grads.sums, spot, form):
        return
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    BS: tl.constexpr = form.BS
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    both = scale * _products(do, v, n, h, start, first + row, tokens, packing, form)
    diagonal = tl.sum(tl.where(i == j, both, 0.0), 1)[:, None]
    both = both.to(q.data.dtype.element_ty)
    from_q, from_k = find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start)
    from_g = find_head(gate, n, h, packing.ends, start)
    of_q = from_q + (first + row).to(tl.int64)[:, None] * q.token
    of_k = from_k + (first + row).to(tl.int64)[:, None] * k.token
    base = start if packing.ends is not None else start + n.to(tl.int64) * packing.tokens
    ours = ((base + first + row) * packing.heads + h)[:, None] * K
    for part in range((K + BS - 1) // BS):
        depth = part * BS + tl.arange(0, BS)
        inside = (first + row < tokens)[:, None] & (depth < K)[None, :]
        g = tile_at(from_g, gate.token, first + row, depth, tokens, K)
        wide: tl.constexpr = g.dtype.primitive_bitwidth > 16
        least = tl.min(tl.sum(g.to(tl.float32), 0), 0) * 1.4426950408889634
        if (least >= -form.SPAN) & (first + C <= tokens):
            dq, dk, dg = _gradients_at_once(of_q, of_k, both, masks, g, depth, inside, form)
        else:
            dq, dk, dg = _gradients_by_level(of_q, of_k, both, masks, g, depth, inside, form)
        high, low = split_gates(g)
        tq = tl.load(of_q + depth[None, :], mask=inside, other=0.0)
        tk = tl.load(of_k + depth[None, :], mask=inside, other=0.0)
        at = ours + depth[None, :]
        mine = diagonal * _bonus(bonus, gate, h, depth, form)[None, :]
        since = masked_decay(masks, form.LEVELS, high, low, wide, C)
        given = tl.load(grads.q + at, mask=inside, other=0.0) * since
        dg = add_chosen(dg, masks.crossings, form.LEVELS, tq * given, C)
        tl.store(grads.q + at, dq + given + mine * tk, mask=inside)
        until = masked_decay(masks, form.LEVELS + 1, high, low, wide, C)
        given = tl.load(grads.k + at, mask=inside, other=0.0) * until
        dg = add_chosen(dg, masks.crossings, form.LEVELS + 1, tk * given, C)
        tl.store(grads.k + at, dk + given + mine * tq, mask=inside)
        dg += tl.load(grads.ends + spot.to(tl.int64) * K + depth, mask=depth < K, other=0.0)[None, :]
        tl.store(grads.g + at, dg, mask=inside)
        if grads.bonus is not None:
            pair = tl.sum(diagonal * tq.to(tl.float32) * tk.to(tl.float32), 0)
            tl.store(grads.bonus + (spot.to(tl.int64) * K + depth), pair, mask=depth < K)


@triton.jit
def own_gradients_at_once(q, k, v, gate, bonus, do, grads, masks, packing, scale, form: tl.constexpr):
    """`own_gradients` for chunks whose rows all meet in one product. No path by levels is compiled beside this one, so
    that it takes fewer registers and barriers."""
    spot = tl.program_id(0)
    n, h, start, tokens, first = _find(packing, spot)
    if first + form.C > tokens:
        return
    if _in_range(grads.sums, spot, form) == 0:
        return
    C: tl.constexpr = form.C
    K: tl.constexpr = form.K
    V: tl.constexpr = form.V
    BS: tl.constexpr = form.BS
    BV: tl.constexpr = form.BV
    LEVELS: tl.constexpr = form.LEVELS
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    below, above = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    from_do, from_v = find_head(do, n, h, packing.ends, start), find_head(v, n, h, packing.ends, start)
    for part in range((V + BV - 1) // BV):
        columns = part * BV + tl.arange(0, BV)
        tdo = tile_at(from_do, do.token, first + row, columns, tokens, V)
        tv = tile_at(from_v, v.token, first + row, columns, tokens, V)
        below = tl.dot(tdo, tl.trans(tv), below)
        above = tl.dot(tv, tl.trans(tdo), above)  # Hopper cannot transpose a sum for another product
    diagonal = tl.sum(tl.where(i == j, scale * below, 0.0), 1)[:, None]
    kind: tl.constexpr = q.data.dtype.element_ty
    below = tl.where(i > j if form.SHIFT else i >= j, scale * below, 0.0).to(kind)
    above = tl.where(i < j if form.SHIFT else i <= j, scale * above, 0.0).to(kind)
    base = start if packing.ends is not None else start + n.to(tl.int64) * packing.tokens
    wide: tl.constexpr = gate.data.dtype.element_ty.primitive_bitwidth > 16
    between, signs = mask_at(masks.gates, LEVELS, C), masks.crossings
    if not wide:
        between = between.to(gate.data.dtype.element_ty)
    reads, writes = mask_at(signs, LEVELS, C), mask_at(signs, LEVELS + 1, C)
    ours = mask_at(signs, LEVELS + 2, C)
    theirs = mask_at(signs, LEVELS + 3, C) if form.SHIFT else ours
    for part in range((K + BS - 1) // BS):
        none = tl.minimum(16 * packing.heads - part, 0)  # 0 that keeps the compiler from holding all places
        rows, depth = first + none + row, part * BS + tl.arange(0, BS)
        inside = (rows < tokens)[:, None] & (depth < K)[None, :]
        at = ((base + rows) * packing.heads + h)[:, None] * K + depth[None, :]
        g = tile_at(find_head(gate, n, h, packing.ends, start), gate.token, rows, depth, tokens, K)
        tq = tile_at(find_head(q, n, h, packing.ends, start), q.token, rows, depth, tokens, K)
        tk = tile_at(find_head(k, n, h, packing.ends, start), k.token, rows, depth, tokens, K)
        of_q = tl.load(grads.q + at, mask=inside, other=0.0).to(tl.float32)
        of_k = tl.load(grads.k + at, mask=inside, other=0.0).to(tl.float32)
        whole = tl.load(grads.sums + spot.to(tl.int64) * K + depth, mask=depth < K, other=0.0)
        ends = tl.load(grads.ends + spot.to(tl.int64) * K + depth, mask=depth < K, other=0.0)
        if wide:
            high, low = split_gates(g)
            since = tl.dot(between, low, tl.dot(between, high))
        else:
            since = tl.dot(between, g)
        since *= 1.4426950408889634
        grown = tl.exp2(-since - (g.to(tl.float32) * 1.4426950408889634 if form.SHIFT else 0.0))
        late = tl.exp2(since)
        rq, rk = (tq * late).to(kind), (tk * grown).to(kind)
        pair = tl.dot(below, rk)
        dq, terms = late * (of_q + pair), rq * pair
        pair = tl.dot(above, rq)
        of_k *= tl.exp2(whole * 1.4426950408889634)[None, :]
        dk = grown * (of_k + pair)
        dg = add_sums(tl.zeros_like(dq), reads, rq * of_q)
        dg = add_sums(dg, writes, rk * of_k)
        if form.SHIFT:
            dg = add_whole_sums(dg, ours, terms)
            dg = add_whole_sums(dg, theirs, rk * pair)
            mine = diagonal * _bonus(bonus, gate, h, depth, form)[None, :]
            dq += mine * tk
            dk += mine * tq
        else:
            dg = add_whole_sums(dg, ours, terms - rk * pair)
        tl.store(grads.q + at, dq, mask=inside)
        tl.store(grads.k + at, dk, mask=inside)
        tl.store(grads.g + at, dg + ends[None, :], mask=inside)
        if grads.bonus is not None:
            pair = tl.sum(diagonal * tq.to(tl.float32) * tk.to(tl.float32), 0)
            tl.store(grads.bonus + (spot.to(tl.int64) * K + depth), pair, mask=depth < K)


@triton.jit
def _find_room(packing, pair, h, n, start):
    """Where the chunks of a sequence and head are kept: a packed sequence has room for one more than it may need."""
    room = pair.to(tl.int64) * packing.chunks
    if packing.ends is not None:
        room = h.to(tl.int64) * packing.chunks + start // packing.unit + n
    return room


@triton.jit
def _own(pairs, place, c, form: tl.constexpr):
    """The part of a chunk's rows that comes from the chunk itself."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    weights = tl.load(pairs + place * (form.C * form.C) + (j * form.C + i if form.REVERSE else i * form.C + j))
    return tl.dot(weights, c)


@triton.jit
def _of_chunk(x, place, columns, form: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a chunk that were made before the scan."""
    at = (place * form.C + tl.arange(0, form.C))[:, None] * WIDTH + columns[None, :]
    return tl.load(x + at, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def scan_channels(
    a, b, c, out, made, ends, states, packing, length, scale, form: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """`scan_chunks` for a gate per channel in half precision, with q and k that have their decays. If a and b are they,
    out is whole; else it lacks the chunk's own part, and the decays of its rows.

    Forward writes the states before chunks to states.marks, where they are; reversed, `ends`."""
    slices: tl.constexpr = (form.N + form.BN - 1) // form.BN
    segment, part = tl.program_id(0) // slices, tl.program_id(0) % slices
    columns = part * form.BN + tl.arange(0, form.BN)
    pair = tl.program_id(1)
    n, h = pair // packing.heads, pair % packing.heads
    if made.left is not None:  # noqa: SIM102  # decided at compile time
        if tl.load(made.left + pair) == 0:
            return
    start, tokens = find_span(packing, n)
    depth, inner = tl.arange(0, form.BD), tl.arange(0, form.C)
    wide: tl.constexpr = form.BD if form.INSIDE else form.BN
    channels = depth if form.INSIDE else columns
    most: tl.constexpr = form.D if form.INSIDE else form.N
    inside = (depth < form.D)[:, None] & (columns < form.N)[None, :]
    plain = depth[:, None] * form.N + columns[None, :]  # in a buffer of ours
    size: tl.constexpr = form.D * form.N
    given = pair.to(tl.int64) * size + depth[:, None] * states.row + columns[None, :] * states.column
    state = first_state(states, given, segment, pair.to(tl.int64) * size + plain, inside, form, OUT)
    to = find_head(out, n, h, packing.ends, start)
    if form.INSIDE:
        from_c = find_head(c, n, h, packing.ends, start)
    else:
        from_a, from_b = find_head(a, n, h, packing.ends, start), find_head(b, n, h, packing.ends, start)
    room = _find_room(packing, pair, h, n, start)
    up, down = (scale, 1.0) if form.REVERSE else (1.0, scale)
    decay = tl.zeros([wide], tl.float32)
    begin, end = segment * length, tl.minimum((segment + 1) * length, tokens)
    chunks = tl.maximum(tl.cdiv(end - begin, form.C), 0)
    for step in range(chunks):
        first = begin + (chunks - 1 - step if form.REVERSE else step) * form.C
        rows, place = first + inner, room + first // form.C
        if form.INSIDE:
            ta, tb = _of_chunk(a, place, depth, form, form.D), _of_chunk(b, place, depth, form, form.D)
            tc = tile_at(from_c, c.token, rows, columns, end, form.N)
        else:
            ta = tile_at(from_a, a.token, rows, depth, end, form.D)
            tb = tile_at(from_b, b.token, rows, depth, end, form.D)
            tc = _of_chunk(c, place, columns, form, form.N)
        total = tl.load(made.sums + place * most + channels, mask=channels < most, other=0.0)
        whole = decay_of(total, form)
        if OUT:
            found = down * tl.dot(ta, state.to(ta.dtype))
            if form.INSIDE:
                found += scale * _own(made.pairs, place, tc, form)
            there = (rows < end)[:, None] & (columns < form.N)[None, :]
            tl.store(to + rows.to(tl.int64)[:, None] * out.token + columns[None, :], found, mask=there)
            if states.marks is not None:
                spots = states.marks + place * size + plain
                if form.REVERSE:
                    met = whole * tl.sum(tl.load(spots, mask=inside, other=0.0) * state, 0)
                    tl.store(ends + place * form.N + columns, met, mask=columns < form.N)
                else:
                    tl.store(spots, state, mask=inside)
        state *= whole[:, None] if form.INSIDE else whole[None, :]
        state += up * tl.dot(tl.trans(tb), tc)
        decay += total
    finish(states, state, decay, given, segment, pair.to(tl.int64) * size + plain, inside, channels, form, OUT)
