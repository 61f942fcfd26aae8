"""The chunk engine of `_scan.py` for a gate per token and head, or none, in half precision: all chunks side by side.

Only the states need order. `write_states` walks a head's chunks, makes nothing but them, and writes the state before
each chunk; reversed, with q and do for k and v, the gradient of the state after each chunk. `write_outputs` and
`write_gradients` then take all chunks at once. A chunk has one block of rows or two, and a program takes one block, so
states are written half as often as a block's own pairs would need.

No factor exceeds 1: pairs within a block decay by e^(G_i - G_j), those of two blocks by the decay since the edge
between them times the decay until it. The gate's gradient is the four sums of `_scan.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent._scan import find_head, find_span, finish, first_state


class BlockForm(NamedTuple):
    """What the kernels of a block of rows are compiled for."""

    K: int
    V: int
    BK: int
    BV: int
    R: int  # rows of a block
    BLOCKS: int  # of a chunk, 1 or 2
    GATE: int  # 0: none, 1: per token


class Room(NamedTuple):
    """Where sequences and their chunks are."""

    ends: Any  # cu_seqlens or None
    tokens: Any  # T
    heads: Any  # of v
    chunks: Any  # that a head has room for; of packed sequences each has room for one more than it may need
    sequences: Any
    unit: Any  # rows of a chunk


class HeadGrads(NamedTuple):
    """(B, T, value heads, columns), contiguous."""

    q: Any
    k: Any
    v: Any  # of v times its token's factor
    g: Any  # (B, T, value heads) in float32, or None
    alone: Any  # what a block's queries and keys bring to the other block's gates, (chunks, BLOCKS, 2) in float32
    held: Any  # what goes past each chunk, in float32


@triton.jit
def _halved(x):
    """e^x for x <= 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _first_chunk(room, n):
    return tl.load(room.ends + n) // room.unit + n


@triton.jit
def _place(room, chunk):
    """Of a program's head and one of the chunks it has room for: the sequence, the head, where the sequence begins, its
    tokens, the chunk's first token, and its place among all chunks."""
    pair = tl.program_id(1)
    n, h = pair // room.heads, pair % room.heads
    kept = chunk
    if room.ends is not None:
        n, beyond = 0 * chunk, 0 * chunk + room.sequences
        while beyond - n > 1:  # the last sequence whose room begins here or before
            middle = (n + beyond) // 2
            here = _first_chunk(room, middle) <= kept
            n, beyond = tl.where(here, middle, n), tl.where(here, beyond, middle)
        chunk = kept - _first_chunk(room, n)
    start, tokens = find_span(room, n)
    return n, h, start, tokens, chunk * room.unit, pair.to(tl.int64) * room.chunks + kept


@triton.jit
def _decays(gate, place, first, end, C: tl.constexpr):
    """Sums of the gates of C rows: through each row, after it, and of all. They are sums, never differences."""
    inner = tl.arange(0, C)
    rows = first + inner
    at = place + rows.to(tl.int64) * gate.token
    own = tl.load(at, mask=rows < end, other=0.0).to(tl.float32)
    later = tl.load(at + gate.token, mask=(inner < C - 1) & (rows + 1 < end), other=0.0).to(tl.float32)
    return tl.cumsum(own, 0), tl.cumsum(later, 0, reverse=True), tl.sum(own, 0)


@triton.jit
def _factors(step, place, rows, end):
    """Each token's factor of v."""
    return tl.load(place + rows.to(tl.int64) * step.token, mask=rows < end, other=0.0).to(tl.float32)


@triton.jit
def _tile(base, step, first, columns, end, C: tl.constexpr, WIDTH: tl.constexpr):
    """C rows; their offsets have 32 bits beside a base for all, which takes half the registers."""
    inner = tl.arange(0, C)
    here = (first + inner < end)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + first.to(tl.int64) * step + (inner[:, None] * step + columns[None, :]), mask=here, other=0.0)


@triton.jit
def write_states(a, c, gate, step, states, room, length, factor, form: tl.constexpr, OUT: tl.constexpr):
    """S = S e^(gates of the chunk) + factor a^T (c times its decays) over a segment of a sequence and head, for BN
    columns: c decays until the chunk's end, or reversed since its begin. With OUT the state before each chunk is
    written to states.marks, else the one after the segment alone."""
    C: tl.constexpr = form.C
    slices: tl.constexpr = (form.N + form.BN - 1) // form.BN
    segment, part = tl.program_id(0) // slices, tl.program_id(0) % slices
    columns, depth, inner = part * form.BN + tl.arange(0, form.BN), tl.arange(0, form.BD), tl.arange(0, C)
    pair = tl.program_id(1)
    n, h = pair // room.heads, pair % room.heads
    start, tokens = find_span(room, n)
    inside = (depth < form.D)[:, None] & (columns < form.N)[None, :]
    plain = depth[:, None] * form.N + columns[None, :]  # in a buffer of ours
    ours = pair.to(tl.int64) * (form.D * form.N)
    given = ours + depth[:, None] * states.row + columns[None, :] * states.column
    state = first_state(states, given, segment, ours + plain, inside, form, OUT)
    from_a, from_c = find_head(a, n, h, room.ends, start), find_head(c, n, h, room.ends, start)
    from_g, from_step = from_a, from_a
    if form.GATE:
        from_g = find_head(gate, n, h, room.ends, start)
    if step is not None:
        from_step = find_head(step, n, h, room.ends, start)
    place = pair.to(tl.int64) * room.chunks
    if room.ends is not None:
        place = h.to(tl.int64) * room.chunks + start // room.unit + n
    decay = tl.cast(0.0, tl.float32)
    begin, end = segment * length, tl.minimum((segment + 1) * length, tokens)
    chunks = tl.maximum(tl.cdiv(end - begin, C), 0)
    for turn in range(chunks):
        first = begin + (chunks - 1 - turn if form.REVERSE else turn) * C
        rows = first + inner
        ta = _tile(from_a, a.token, first, depth, end, C, form.D)
        tc = _tile(from_c, c.token, first, columns, end, C, form.N)
        if OUT:
            spots = states.marks + (place + first // C) * (form.D * form.N) + plain
            tl.store(spots, state, mask=inside)
        if form.GATE:
            before, after, total = _decays(gate, from_g, first, end, C)
            tc = (tc * _halved(before if form.REVERSE else after)[:, None]).to(tc.dtype)
            state *= _halved(total)
            decay += total
        if step is not None:
            tc = (tc * _factors(step, from_step, rows, end)[:, None]).to(tc.dtype)
        state += factor * tl.dot(tl.trans(ta), tc)
    channels = depth  # of a gate per channel, which `finish` knows too
    finish(states, state, decay, given, segment, ours + plain, inside, channels, form, OUT)


@triton.jit
def _own(scores, before, form: tl.constexpr, TURNED: tl.constexpr):
    """A block's own pairs with their decays: rows are queries and columns keys, or TURNED the other way."""
    row = tl.arange(0, form.R)
    i, j = row[:, None], row[None, :]
    seen = j >= i if TURNED else i >= j
    if form.GATE:
        apart = before[None, :] - before[:, None] if TURNED else before[:, None] - before[None, :]
        scores *= _halved(tl.where(seen, apart, 0.0))
    return tl.where(seen, scores, 0.0)


@triton.jit
def _state_at(marks, place, form: tl.constexpr):
    depth, columns = tl.arange(0, form.BK), tl.arange(0, form.BV)
    inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
    return tl.load(marks + place * (form.K * form.V) + depth[:, None] * form.V + columns[None, :], inside, other=0.0)


@triton.jit
def write_outputs(q, k, v, out, gate, step, marks, room, scale, form: tl.constexpr):
    """A block's outputs, from the state before its chunk and the chunk's rows."""
    R: tl.constexpr = form.R
    part = tl.program_id(0) % form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0) // form.BLOCKS)
    first += part * R
    if first >= tokens:
        return
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, to = find_head(v, n, h, room.ends, start), find_head(out, n, h, room.ends, start)
    from_g, from_step = from_q, from_q
    if form.GATE:
        from_g = find_head(gate, n, h, room.ends, start)
    if step is not None:
        from_step = find_head(step, n, h, room.ends, start)
    tq = _tile(from_q, q.token, first, depth, tokens, R, form.K)
    found = tl.dot(tq, _state_at(marks, place, form).to(tq.dtype))
    if part > 0:  # the block before
        weights = tl.dot(tq, tl.trans(_tile(from_k, k.token, first - R, depth, tokens, R, form.K)))
        if form.GATE:
            since, after, total = _decays(gate, from_g, first - R, tokens, R)
            weights *= _halved(after)[None, :]
            found *= _halved(total)
        if step is not None:
            weights *= _factors(step, from_step, rows - R, tokens)[None, :]
        found += tl.dot(weights.to(tq.dtype), _tile(from_v, v.token, first - R, columns, tokens, R, form.V))
    weights = tl.dot(tq, tl.trans(_tile(from_k, k.token, first, depth, tokens, R, form.K)))
    before = tl.zeros([R], tl.float32)
    if form.GATE:
        before, _, _ = _decays(gate, from_g, first, tokens, R)
        found *= _halved(before)[:, None]
    weights = _own(weights, before, form, False)
    if step is not None:
        weights *= _factors(step, from_step, rows, tokens)[None, :]
    found += tl.dot(weights.to(tq.dtype), _tile(from_v, v.token, first, columns, tokens, R, form.V))
    there = (rows < tokens)[:, None] & (columns < form.V)[None, :]
    at = to + first.to(tl.int64) * out.token + (tl.arange(0, R)[:, None] * out.token + columns[None, :])
    tl.store(at, scale * found, mask=there)


@triton.jit
def _rows_of(grad, where, room, rows, columns, WIDTH: tl.constexpr):
    """Where a block's rows are in a gradient."""
    n, h, start, first = where[0], where[1], where[2], where[4]
    row = start + first
    if room.ends is None:
        row += n.to(tl.int64) * room.tokens
    return grad + (row * room.heads + h) * WIDTH + ((rows - first)[:, None] * (room.heads * WIDTH) + columns[None, :])


@triton.jit
def _queries(q, k, v, do, gate, step, marks, grads, where, room, scale, form: tl.constexpr):
    """Writes a block's dq. Returns what its queries bring to their gates, but for pairs within the block, and the sum
    of what they have with the state alone."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, from_do = find_head(v, n, h, room.ends, start), find_head(do, n, h, room.ends, start)
    from_g, from_step = from_q, from_q
    before = tl.zeros([R], tl.float32)
    if form.GATE:
        from_g = find_head(gate, n, h, room.ends, start)
        before, _, _ = _decays(gate, from_g, first, tokens, R)
    if step is not None:
        from_step = find_head(step, n, h, room.ends, start)
    tdo = _tile(from_do, do.token, first, columns, tokens, R, form.V)
    found = tl.dot(tdo, tl.trans(_state_at(marks, place, form).to(tdo.dtype)))
    alone, mine = tl.cast(0.0, tl.float32), before
    if (first // R) % form.BLOCKS > 0:  # keys of the block before
        since, after, total = before, before, 0.0
        if form.GATE:
            since, after, total = _decays(gate, from_g, first - R, tokens, R)
            found *= _halved(total)
            tq = _tile(from_q, q.token, first, depth, tokens, R, form.K).to(tl.float32)
            alone = tl.sum(tl.sum(tq * found, 1) * _halved(before), 0)
        weights = tl.dot(tdo, tl.trans(_tile(from_v, v.token, first - R, columns, tokens, R, form.V)))
        if form.GATE:
            weights *= _halved(after)[None, :]
        if step is not None:
            weights *= _factors(step, from_step, rows - R, tokens)[None, :]
        found += tl.dot(weights.to(tdo.dtype), _tile(from_k, k.token, first - R, depth, tokens, R, form.K))
    if form.GATE:
        found *= _halved(before)[:, None]
        tq = _tile(from_q, q.token, first, depth, tokens, R, form.K).to(tl.float32)
        mine = scale * tl.cumsum(tl.sum(tq * found, 1), 0, reverse=True)  # queries from each gate on
    weights = tl.dot(tdo, tl.trans(_tile(from_v, v.token, first, columns, tokens, R, form.V)))
    weights = _own(weights, before, form, False)
    if step is not None:
        weights *= _factors(step, from_step, rows, tokens)[None, :]
    found += tl.dot(weights.to(tdo.dtype), _tile(from_k, k.token, first, depth, tokens, R, form.K))
    here = (rows < tokens)[:, None] & (depth < form.K)[None, :]
    tl.store(_rows_of(grads.q, where, room, rows, depth, form.K), scale * found, mask=here)
    return mine, scale * alone


@triton.jit
def _pairs(q, k, v, do, gate, step, where, room, scale, form: tl.constexpr):
    """A block's weights of keys (rows) with queries in dk and in dv, and what its pairs bring to its gates."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    row = tl.arange(0, R)
    depth, columns = tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, from_do = find_head(v, n, h, room.ends, start), find_head(do, n, h, room.ends, start)
    before = tl.zeros([R], tl.float32)
    if form.GATE:
        before = _decays(gate, find_head(gate, n, h, room.ends, start), first, tokens, R)[0]
    tk, tq = (
        _tile(from_k, k.token, first, depth, tokens, R, form.K),
        _tile(from_q, q.token, first, depth, tokens, R, form.K),
    )
    scores = _own(scale * tl.dot(tk, tl.trans(tq)), before, form, True)
    tv = _tile(from_v, v.token, first, columns, tokens, R, form.V)
    products = tl.dot(tv, tl.trans(_tile(from_do, do.token, first, columns, tokens, R, form.V)))
    if step is not None:
        products *= _factors(step, find_head(step, n, h, room.ends, start), first + row, tokens)[:, None]
    mine = before
    if form.GATE:
        later = tl.cumsum(scores * products, 1, reverse=True)
        mine = tl.sum(tl.where(row[:, None] < row[None, :], later, 0.0), 0)
    return mine, _own(scale * products, before, form, True).to(tv.dtype), scores.to(tv.dtype)


@triton.jit
def _keys(q, k, v, do, gate, step, marks, products, grads, where, room, scale, form: tl.constexpr):
    """Writes a block's dk. products: the block's weights of keys with queries. Returns what its keys bring to their
    gates, but for pairs within the block, and the sum of what they have with the state's gradient alone."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    row = tl.arange(0, R)
    rows, depth, columns = first + row, tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, from_do = find_head(v, n, h, room.ends, start), find_head(do, n, h, room.ends, start)
    from_g = from_q
    mine, alone = tl.zeros([R], tl.float32), tl.cast(0.0, tl.float32)
    weight = mine + 1.0  # of v's rows
    if form.GATE:
        from_g = find_head(gate, n, h, room.ends, start)
        weight = _halved(_decays(gate, from_g, first, tokens, R)[1])
    if step is not None:
        weight *= _factors(step, find_head(step, n, h, room.ends, start), rows, tokens)
    tv = _tile(from_v, v.token, first, columns, tokens, R, form.V)
    found = tl.dot(tv, tl.trans(_state_at(marks, place, form).to(tv.dtype)))
    if form.BLOCKS - 1 > (first // R) % form.BLOCKS:  # queries of the block after
        late, until, total = mine, mine, 0.0
        if form.GATE:
            late, until, total = _decays(gate, from_g, first + R, tokens, R)
            found *= _halved(total)
            tk = _tile(from_k, k.token, first, depth, tokens, R, form.K).to(tl.float32)
            alone = tl.sum(tl.sum(tk * found, 1) * weight, 0)
        weights = scale * tl.dot(tv, tl.trans(_tile(from_do, do.token, first + R, columns, tokens, R, form.V)))
        if form.GATE:
            weights *= _halved(late)[None, :]
        found += tl.dot(weights.to(tv.dtype), _tile(from_q, q.token, first + R, depth, tokens, R, form.K))
    found *= weight[:, None]
    if form.GATE:
        tk = _tile(from_k, k.token, first, depth, tokens, R, form.K).to(tl.float32)
        mine = tl.sum(tl.where(row[:, None] < row[None, :], tl.sum(tk * found, 1)[:, None], 0.0), 0)
    found += tl.dot(products, _tile(from_q, q.token, first, depth, tokens, R, form.K))
    here = (rows < tokens)[:, None] & (depth < form.K)[None, :]
    tl.store(_rows_of(grads.k, where, room, rows, depth, form.K), found, mask=here)
    return mine, alone


@triton.jit
def _values(q, k, do, gate, marks, scores, grads, where, room, scale, form: tl.constexpr):
    """Writes a block's dv. scores: the block's weights of keys with queries."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_do = find_head(do, n, h, room.ends, start)
    from_g = from_q
    if form.GATE:
        from_g = find_head(gate, n, h, room.ends, start)
    tk = _tile(from_k, k.token, first, depth, tokens, R, form.K)
    found = tl.dot(tk, _state_at(marks, place, form).to(tk.dtype))
    if form.BLOCKS - 1 > (first // R) % form.BLOCKS:  # queries of the block after
        weights = scale * tl.dot(tk, tl.trans(_tile(from_q, q.token, first + R, depth, tokens, R, form.K)))
        if form.GATE:
            late, until, total = _decays(gate, from_g, first + R, tokens, R)
            weights *= _halved(late)[None, :]
            found *= _halved(total)
        found += tl.dot(weights.to(tk.dtype), _tile(from_do, do.token, first + R, columns, tokens, R, form.V))
    if form.GATE:
        _, after, _ = _decays(gate, from_g, first, tokens, R)
        found *= _halved(after)[:, None]
    found += tl.dot(scores, _tile(from_do, do.token, first, columns, tokens, R, form.V))
    here = (rows < tokens)[:, None] & (columns < form.V)[None, :]
    tl.store(_rows_of(grads.v, where, room, rows, columns, form.V), found, mask=here)


@triton.jit
def _past(before, after, gate, from_g, first, end, place, form: tl.constexpr):
    """What keys before a chunk bring to its gates with queries after it: the decayed <state, its gradient>."""
    PIECE: tl.constexpr = 16
    BV: tl.constexpr = form.BV
    both = tl.zeros([PIECE, BV], tl.float32)
    columns = tl.arange(0, form.BV)
    for piece in range(form.BK // PIECE):
        depth = piece * PIECE + tl.arange(0, PIECE)
        inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
        at = place * (form.K * form.V) + depth[:, None] * form.V + columns[None, :]
        one = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        both += one * tl.load(after + at, mask=inside, other=0.0).to(tl.float32)
    rows = first + tl.arange(0, form.R * form.BLOCKS)
    g = tl.load(from_g + rows.to(tl.int64) * gate.token, mask=rows < end, other=0.0).to(tl.float32)
    return _halved(tl.sum(g, 0)) * tl.sum(tl.sum(both, 1), 0)


@triton.jit
def write_gradients(q, k, v, do, gate, step, before, after, grads, room, scale, form: tl.constexpr):
    """A block's gradients. before, after: the states before each chunk and the gradients of those after it."""
    part = tl.program_id(0) % form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0) // form.BLOCKS)
    first += part * form.R
    if first >= tokens:
        return
    where = (n, h, start, tokens, first, place)
    mine, alone = _queries(q, k, v, do, gate, step, before, grads, where, room, scale, form)
    both, products, scores = _pairs(q, k, v, do, gate, step, where, room, scale, form)
    keys, other = _keys(q, k, v, do, gate, step, after, products, grads, where, room, scale, form)
    _values(q, k, do, gate, after, scores, grads, where, room, scale, form)
    if form.GATE:
        rows = first + tl.arange(0, form.R)
        at = _rows_of(grads.g, where, room, rows, tl.arange(0, 1), 1)
        tl.store(at, (mine + both + keys)[:, None], mask=(rows < tokens)[:, None])
        spot = grads.alone + (place * form.BLOCKS + part) * 2
        tl.store(spot, alone)
        tl.store(spot + 1, other)
        if part == 0:
            from_g = find_head(gate, n, h, room.ends, start)
            tl.store(grads.held + place, _past(before, after, gate, from_g, first, tokens, place, form))


@triton.jit
def join_gates(grads, room, form: tl.constexpr):
    """Adds to a chunk's dg what goes past it, and what a block's queries and keys bring to the other block."""
    n, h, start, tokens, first, place = _place(room, tl.program_id(0))
    if first >= tokens:
        return
    inner = tl.arange(0, form.R * form.BLOCKS)
    rows, here = (first + inner)[:, None], (first + inner < tokens)[:, None]
    at = _rows_of(grads.g, (n, h, start, tokens, first, place), room, first + inner, tl.arange(0, 1), 1)
    found = tl.load(at, mask=here, other=0.0) + tl.load(grads.held + place)
    if form.BLOCKS > 1:
        late, spots = (inner >= form.R)[:, None], grads.alone + place * 4 + 0 * rows
        found += tl.load(spots + 2, mask=(late == 0) & (first + form.R < tokens), other=0.0)
        found += tl.load(spots + 1, mask=late, other=0.0)
    tl.store(at, found, mask=here)
