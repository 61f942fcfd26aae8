"""The chunk engine of `_scan.py` for a gate per channel in half precision.

Kernels that run over all chunks side by side do what needs no state. Before the scans, one makes q and k with their
decays and the weights of q with k. After the scans of dq and dk, one adds the chunks' own pairs and makes the gate's
gradient, by `_levels.py`. So a scan has no gates but the decay of a whole chunk, and two or three products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent._delta import find_chunk
from ridgeline.ops.recurrent._levels import chosen_sums, crossings, edge_decay, joined, right_rows
from ridgeline.ops.recurrent._scan import decay_of, find_head, find_span, finish, first_state, tile_at


class PairForm(NamedTuple):
    """What the kernels of a chunk's own pairs are compiled for."""

    K: int
    V: int
    BS: int  # channels at a time
    BV: int  # columns of v at a time
    C: int  # rows of a chunk
    LEVELS: int  # log2 of C
    SHIFT: bool  # rows see the state before their own gate (RWKV-6)


class Prepared(NamedTuple):
    """Of all chunks, (sequences, heads, chunks, ...), or packed (heads, chunks, ...)."""

    pairs: Any  # the weights of q with k, (C, C)
    q: Any  # times its decay since the chunk began, (C, K)
    k: Any  # times its decay until the chunk ends
    sums: Any  # of the gates, (K,) in float32


class Own(NamedTuple):
    """(B, T, value heads, K), contiguous: dq and dk hold what the states bring, without its rows'
    decays, and then the gradients."""

    q: Any
    k: Any
    g: Any  # float32
    ends: Any  # of all chunks: states times the later chunks' gradient of them, summed over v, float32
    bonus: Any  # each chunk's part of du (chunks, heads, K), or None


@triton.jit
def _channels(gate, place, rows, depth, tokens, form: tl.constexpr):
    """A chunk's gates times log2(e): their running sums, those when a row sees the state, and their sums."""
    g = tile_at(place, gate.token, rows, depth, tokens, form.K).to(tl.float32) * 1.4426950408889634
    G = tl.cumsum(g, 0)
    early = G
    if form.SHIFT:
        early = G - g
    return G, early, tl.sum(g, 0)


@triton.jit
def _bonus(bonus, gate, h, depth, form: tl.constexpr):
    BS: tl.constexpr = form.BS
    u = tl.full([BS], 1.0, tl.float32)
    if bonus is not None:
        u = tl.load(bonus + h // gate.group * form.K + depth, mask=depth < form.K, other=0.0).to(tl.float32)
    return u


@triton.jit
def own_pairs(q, k, gate, bonus, made, packing, form: tl.constexpr):
    """What the scans need of a chunk: the weights of q with k, q and k with their decays, and the gates' sums."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    from_q, from_k = find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start)
    from_g = find_head(gate, n, h, packing.ends, start)
    found, diagonal = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        tq = tile_at(from_q, q.token, first + row, depth, tokens, form.K)
        tk = tile_at(from_k, k.token, first + row, depth, tokens, form.K)
        G, early, total = _channels(gate, from_g, first + row, depth, tokens, form)
        u = _bonus(bonus, gate, h, depth, form)
        here = (depth < form.K)[None, :]
        spots = spot * (C * form.K) + row[:, None] * form.K + depth[None, :]
        until = tl.minimum(total[None, :] - G, 0.0)
        tl.store(made.q + spots, (tq * tl.exp2(tl.minimum(early, 0.0))).to(tq.dtype), mask=here)
        tl.store(made.k + spots, (tk * tl.exp2(until)).to(tk.dtype), mask=here)
        tl.store(made.sums + spot * form.K + depth, total * 0.6931471805599453, mask=depth < form.K)
        diagonal += tl.sum(tq.to(tl.float32) * tk.to(tl.float32) * u[None, :], 1)
        for level in range(form.LEVELS):
            right = right_rows(level, C)
            decay = edge_decay(tl.where(right, early, G), G, level, C, form.BS)
            mixed = (tl.where(right, tq, tk) * decay).to(tq.dtype)
            found += tl.where(joined(level, C), tl.dot(mixed, tl.trans(mixed)), 0.0)
    found = tl.where(i > j, found, tl.where(i == j, diagonal[:, None], 0.0))
    tl.store(made.pairs + spot * (C * C) + i * C + j, found)


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
def own_gradients(q, k, v, gate, bonus, do, grads, packing, scale, form: tl.constexpr):
    """Adds to a chunk's dq and dk their own pairs' part, and makes the gate's gradient."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    BS: tl.constexpr = form.BS
    rows = first + tl.arange(0, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    both = scale * _products(do, v, n, h, start, rows, tokens, packing, form)
    diagonal = tl.sum(tl.where(i == j, both, 0.0), 1)[:, None]
    both = both.to(v.data.dtype.element_ty)
    from_q, from_k = find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start)
    from_g = find_head(gate, n, h, packing.ends, start)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    base = start if packing.ends is not None else start + n.to(tl.int64) * packing.tokens
    ours = ((base + rows) * packing.heads + h)[:, None] * form.K
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, BS)
        inside = (rows < tokens)[:, None] & (depth < form.K)[None, :]
        at = ours + depth[None, :]
        tq = tile_at(from_q, q.token, rows, depth, tokens, form.K)
        tk = tile_at(from_k, k.token, rows, depth, tokens, form.K)
        G, early, total = _channels(gate, from_g, rows, depth, tokens, form)
        u = _bonus(bonus, gate, h, depth, form)
        mine = diagonal * u[None, :]
        dq = tl.load(grads.q + at, mask=inside, other=0.0).to(tl.float32)
        dk = tl.load(grads.k + at, mask=inside, other=0.0).to(tl.float32)
        dq *= tl.exp2(tl.minimum(early, 0.0))
        dk *= tl.exp2(tl.minimum(total[None, :] - G, 0.0))
        dg = tl.load(grads.ends + spot * form.K + depth, mask=depth < form.K, other=0.0)[None, :]
        dg += chosen_sums(j > i if form.SHIFT else j >= i, tq * dq, tq) + chosen_sums(j < i, tk * dk, tq)
        dq += mine * tk
        dk += mine * tq
        for level in range(form.LEVELS):
            right = right_rows(level, C)
            decay = edge_decay(tl.where(right, early, G), G, level, C, BS)
            mixed = tl.where(right, tq, tk)
            found = decay * tl.dot(tl.where(joined(level, C), both, 0.0), (mixed * decay).to(tq.dtype))
            dq += tl.where(right, found, 0.0)
            dk += tl.where(right, 0.0, found)
            dg += chosen_sums(crossings(level, C, form.SHIFT), mixed * found, tq)
        tl.store(grads.q + at, dq, mask=inside)
        tl.store(grads.k + at, dk, mask=inside)
        tl.store(grads.g + at, dg, mask=inside)
        if grads.bonus is not None:
            pair = tl.sum(diagonal * tq.to(tl.float32) * tk.to(tl.float32), 0)
            tl.store(grads.bonus + (spot * form.K + depth), pair, mask=depth < form.K)


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
