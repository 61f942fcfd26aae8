"""The chunk engine of `scan.py` for a gate per token and head, or none, in half precision: all chunks side by side.

Only the states need order. `write_states` walks a head's chunks, makes nothing but them, and writes the state before
each chunk; reversed, with q and do for k and v, the gradient of the state after each chunk. `write_outputs`,
`write_query_gradients` and `write_key_gradients` then take all chunks at once. A chunk has one block of rows or two,
and a program takes one block of one head, so states are written half as often as a block's own pairs would need. Where
heads share q and k, each writes its part of dq and dk.

No factor exceeds 1: pairs within a block decay by e^(G_i - G_j), those of two blocks by the decay since the edge
between them times the decay until it. The gate's gradient is the four sums of `scan.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.scan import find_head, find_span, finish, first_state, to_tf32


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


class Decays(NamedTuple):
    """Of all chunks, (heads, chunks, rows) in float32: sums of the gates, times log2(e), and e^sums."""

    sums: Any  # since the row's block began
    soon: Any  # e^sums until the block ends
    since: Any  # e^sums since the chunk began
    until: Any  # e^sums until the chunk ends
    whole: Any  # the gates' sum, (heads, chunks)


class HeadGrads(NamedTuple):
    """(B, T, value heads, columns), contiguous; q's and k's are of each value head too."""

    q: Any
    k: Any
    v: Any
    g: Any  # (B, T, value heads) in float32, or None
    step: Any  # of each token's factor, as g's
    skip: Any  # <do, v> of each token, as g's
    rows: Any  # what each row brings to its gates, (5, heads, chunks, rows) in float32: the numbers below
    stride: Any
    past: Any  # what goes past each chunk, in float32


QUERY = tl.constexpr(0)  # pairs of a row's query with keys of earlier blocks
KEY = tl.constexpr(1)  # pairs of its key with queries of later blocks
OWN = tl.constexpr(2)  # pairs around its gate within the block
FAR_QUERY = tl.constexpr(3)  # pairs of its query with keys of earlier chunks
FAR_KEY = tl.constexpr(4)  # pairs of its key with queries of later chunks


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _first_chunk(room, n):
    return tl.load(room.ends + n) // room.unit + n


@triton.jit
def _place(room, chunk, pair):
    """Of a sequence's head and one of the chunks it has room for: the sequence, the head, where the sequence begins,
    its tokens, the chunk's first token, and its place among all chunks."""
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
def _gates(at, there):
    """Gates in float32, whose decay is 0 from -110 on: sums that had come to -inf would have no differences."""
    found = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return tl.where(found < -110.0, -110.0, found)


@triton.jit
def write_decays(gate, made, room, form: tl.constexpr):
    """The decays of a chunk. They are sums, never differences."""
    R: tl.constexpr = form.R
    C: tl.constexpr = form.R * form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0), tl.program_id(1))
    if first >= tokens:
        return
    base = find_head(gate, n, h, room.ends, start)
    blocks = tl.arange(0, form.BLOCKS)[:, None] * R + tl.arange(0, R)[None, :]
    row = tl.arange(0, C)
    at, blocks_at = base + (first + row).to(tl.int64) * gate.token, base + (first + blocks).to(tl.int64) * gate.token
    own = _gates(at, first + row < tokens)
    later = _gates(at + gate.token, (row < C - 1) & (first + row + 1 < tokens))
    sums = tl.cumsum(_gates(blocks_at, first + blocks < tokens), 1)
    there = (blocks % R < R - 1) & (first + blocks + 1 < tokens)
    soon = tl.cumsum(_gates(blocks_at + gate.token, there), 1, reverse=True)
    tl.store(made.sums + place * C + blocks, sums * 1.4426950408889634)
    tl.store(made.soon + place * C + blocks, _exp(soon))
    tl.store(made.since + place * C + row, _exp(tl.cumsum(own, 0)))
    tl.store(made.until + place * C + row, _exp(tl.cumsum(later, 0, reverse=True)))
    tl.store(made.whole + place, tl.sum(own, 0))


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
def write_states(a, c, decays, step, states, room, length, factor, form: tl.constexpr, OUT: tl.constexpr):
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
    from_step = from_a
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
            weights = (decays.since if form.REVERSE else decays.until) + (place + first // C) * C
            tc = (tc * tl.load(weights + inner)[:, None]).to(tc.dtype)
            total = tl.load(decays.whole + (place + first // C))
            state *= _exp(total)
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
        scores *= tl.exp2(tl.where(seen, apart, 0.0))
    return tl.where(seen, scores, 0.0)


@triton.jit
def _state_at(marks, place, form: tl.constexpr):
    depth, columns = tl.arange(0, form.BK), tl.arange(0, form.BV)
    inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
    return tl.load(marks + place * (form.K * form.V) + depth[:, None] * form.V + columns[None, :], inside, other=0.0)


@triton.jit
def _of_rows(rows_of, place, part, form: tl.constexpr):
    """A block's numbers, or ones without a gate."""
    R: tl.constexpr = form.R
    found = tl.full([R], 1.0, tl.float32)
    if form.GATE:
        found = tl.load(rows_of + (place * form.BLOCKS + part) * R + tl.arange(0, R))
    return found


@triton.jit
def _decay(decays, place, part, form: tl.constexpr):
    """A block's sums of gates, e^sums, and e^sums until its end, since its chunk's begin and until the chunk's end."""
    R: tl.constexpr = form.R
    sums = tl.zeros([R], tl.float32)
    soon, since, until = sums + 1.0, sums + 1.0, sums + 1.0
    if form.GATE:
        sums, soon = _of_rows(decays.sums, place, part, form), _of_rows(decays.soon, place, part, form)
        since, until = _of_rows(decays.since, place, part, form), _of_rows(decays.until, place, part, form)
    return sums, tl.exp2(sums), soon, since, until


@triton.jit
def write_outputs(q, k, v, out, decays, step, skip, marks, room, scale, form: tl.constexpr):
    """A block's outputs, from the state before its chunk and the chunk's rows. skip: D or None."""
    R: tl.constexpr = form.R
    part = tl.program_id(0) % form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0) // form.BLOCKS, tl.program_id(1))
    first += part * R
    if first >= tokens:
        return
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, to = find_head(v, n, h, room.ends, start), find_head(out, n, h, room.ends, start)
    from_step = from_q
    if step is not None:
        from_step = find_head(step, n, h, room.ends, start)
    sums, late, _, since, _ = _decay(decays, place, part, form)
    tq = _tile(from_q, q.token, first, depth, tokens, R, form.K)
    found = tl.dot(tq, _state_at(marks, place, form).to(tq.dtype))
    if form.GATE:
        found *= since[:, None]
    if part > 0:  # the block before
        weights = tl.dot(tq, tl.trans(_tile(from_k, k.token, first - R, depth, tokens, R, form.K)))
        if form.GATE:
            weights *= late[:, None] * _decay(decays, place, part - 1, form)[2][None, :]
        if step is not None:
            weights *= _factors(step, from_step, rows - R, tokens)[None, :]
        found += tl.dot(weights.to(tq.dtype), _tile(from_v, v.token, first - R, columns, tokens, R, form.V))
    weights = tl.dot(tq, tl.trans(_tile(from_k, k.token, first, depth, tokens, R, form.K)))
    weights = _own(weights, sums, form, False)
    if step is not None:
        weights *= _factors(step, from_step, rows, tokens)[None, :]
    found += tl.dot(weights.to(tq.dtype), _tile(from_v, v.token, first, columns, tokens, R, form.V))
    found *= scale
    if skip is not None:
        found += tl.load(skip + h) * _tile(from_v, v.token, first, columns, tokens, R, form.V).to(tl.float32)
    there = (rows < tokens)[:, None] & (columns < form.V)[None, :]
    at = to + first.to(tl.int64) * out.token + (tl.arange(0, R)[:, None] * out.token + columns[None, :])
    tl.store(at, found, mask=there)


@triton.jit
def _rows_of(grad, where, room, columns, R: tl.constexpr, WIDTH: tl.constexpr):
    """Where a block's rows are in a gradient."""
    n, h, start, first = where[0], where[1], where[2], where[4]
    row = start + first
    if room.ends is None:
        row += n.to(tl.int64) * room.tokens
    inner = tl.arange(0, R)[:, None] * (room.heads * WIDTH)
    return grad + (row * room.heads + h) * WIDTH + (inner + columns[None, :])


@triton.jit
def _put(grad, found, where, room, WIDTH: tl.constexpr, form: tl.constexpr):
    """Writes a block's rows of dq or dk."""
    R: tl.constexpr = form.R
    rows, depth = where[4] + tl.arange(0, R), tl.arange(0, form.BK)
    here = (rows < where[3])[:, None] & (depth < WIDTH)[None, :]
    tl.store(_rows_of(grad, where, room, depth, R, WIDTH), found, mask=here)


@triton.jit
def _bring(grads, number, where, part, x, y, form: tl.constexpr):
    """Keeps each row's product of two tiles."""
    R: tl.constexpr = form.R
    at = grads.rows + number * grads.stride + (where[5] * form.BLOCKS + part) * R + tl.arange(0, R)
    tl.store(at, tl.sum(x.to(tl.float32) * y, 1))


@triton.jit
def _queries(q, k, v, do, decays, step, marks, grads, where, room, scale, form: tl.constexpr):
    """Writes a block's dq."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    part = (first // R) % form.BLOCKS
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, from_do = find_head(v, n, h, room.ends, start), find_head(do, n, h, room.ends, start)
    from_step = from_q
    if step is not None:
        from_step = find_head(step, n, h, room.ends, start)
    sums, late, _, since, _ = _decay(decays, place, part, form)
    tdo = _tile(from_do, do.token, first, columns, tokens, R, form.V)
    found = tl.dot(tdo, tl.trans(_state_at(marks, place, form).to(tdo.dtype)))
    if form.GATE:
        found *= since[:, None]
    if part > 0:  # keys of the block before
        if form.GATE:
            _bring(grads, FAR_QUERY, where, part, _tile(from_q, q.token, first, depth, tokens, R, form.K), found, form)
        weights = tl.dot(tdo, tl.trans(_tile(from_v, v.token, first - R, columns, tokens, R, form.V)))
        if form.GATE:
            weights *= late[:, None] * _decay(decays, place, part - 1, form)[2][None, :]
        if step is not None:
            weights *= _factors(step, from_step, rows - R, tokens)[None, :]
        found += tl.dot(weights.to(tdo.dtype), _tile(from_k, k.token, first - R, depth, tokens, R, form.K))
    if form.GATE:
        _bring(grads, QUERY, where, part, _tile(from_q, q.token, first, depth, tokens, R, form.K), found, form)
    weights = tl.dot(tdo, tl.trans(_tile(from_v, v.token, first, columns, tokens, R, form.V)))
    weights = _own(weights, sums, form, False)
    if step is not None:
        weights *= _factors(step, from_step, rows, tokens)[None, :]
    found += tl.dot(weights.to(tdo.dtype), _tile(from_k, k.token, first, depth, tokens, R, form.K))
    _put(grads.q, scale * found, where, room, form.K, form)


@triton.jit
def _pairs(q, k, v, do, decays, step, grads, where, room, scale, form: tl.constexpr):
    """A block's weights of keys (rows) with queries in dk and in dv; keeps what its pairs bring to its gates."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    part = (first // R) % form.BLOCKS
    depth, columns = tl.arange(0, form.BK), tl.arange(0, form.BV)
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, from_do = find_head(v, n, h, room.ends, start), find_head(do, n, h, room.ends, start)
    sums = _decay(decays, place, part, form)[0]
    tk = _tile(from_k, k.token, first, depth, tokens, R, form.K)
    tv = _tile(from_v, v.token, first, columns, tokens, R, form.V)
    scores = tl.dot(tk, tl.trans(_tile(from_q, q.token, first, depth, tokens, R, form.K)))
    scores = _own(scale * scores, sums, form, True)
    products = tl.dot(tv, tl.trans(_tile(from_do, do.token, first, columns, tokens, R, form.V)))
    if step is not None:
        from_step = find_head(step, n, h, room.ends, start)
        products *= _factors(step, from_step, first + tl.arange(0, R), tokens)[:, None]
    if form.GATE:  # rows are gates, and columns queries: the sum over keys before the gate
        if tv.dtype == tl.float16:  # whose range they may leave
            earlier = tl.dot((j < i).to(tl.float32), to_tf32(scores * products), input_precision="tf32")
        else:
            earlier = tl.dot((j < i).to(tv.dtype), (scores * products).to(tv.dtype))
        _bring(grads, OWN, where, part, (j >= i).to(tl.float32), earlier, form)
    return _own(scale * products, sums, form, True).to(tv.dtype), scores.to(tv.dtype)


@triton.jit
def _keys(q, k, v, do, decays, step, marks, products, grads, where, room, scale, form: tl.constexpr):
    """Writes a block's dk. products: the block's weights of keys with queries."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    part = (first // R) % form.BLOCKS
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_v, from_do = find_head(v, n, h, room.ends, start), find_head(do, n, h, room.ends, start)
    _, _, soon, _, until = _decay(decays, place, part, form)
    if step is not None:
        factor = _factors(step, find_head(step, n, h, room.ends, start), rows, tokens)
        soon *= factor
        until *= factor
    tv = _tile(from_v, v.token, first, columns, tokens, R, form.V)
    found = tl.dot(tv, tl.trans(_state_at(marks, place, form).to(tv.dtype)))
    if form.GATE or step is not None:
        found *= until[:, None]
    if part < form.BLOCKS - 1:  # queries of the block after
        if form.GATE:
            _bring(grads, FAR_KEY, where, part, _tile(from_k, k.token, first, depth, tokens, R, form.K), found, form)
        weights = scale * tl.dot(tv, tl.trans(_tile(from_do, do.token, first + R, columns, tokens, R, form.V)))
        if form.GATE or step is not None:
            weights *= soon[:, None] * _decay(decays, place, part + 1, form)[1][None, :]
        found += tl.dot(weights.to(tv.dtype), _tile(from_q, q.token, first + R, depth, tokens, R, form.K))
    if form.GATE:
        _bring(grads, KEY, where, part, _tile(from_k, k.token, first, depth, tokens, R, form.K), found, form)
    found += tl.dot(products, _tile(from_q, q.token, first, depth, tokens, R, form.K))
    _put(grads.k, found, where, room, form.K, form)


@triton.jit
def _per_token(grad, found, where, room, form: tl.constexpr):
    """Writes a number for each row of a block."""
    at = _rows_of(grad, where, room, tl.arange(0, 1), form.R, 1)
    tl.store(at, found[:, None], mask=(where[4] + tl.arange(0, form.R) < where[3])[:, None])


@triton.jit
def _values(q, k, v, do, decays, step, skip, marks, scores, grads, where, room, scale, form: tl.constexpr):
    """Writes a block's dv, and the gradients of its tokens' factors. scores: the block's weights of keys with
    queries."""
    R: tl.constexpr = form.R
    n, h, start, tokens, first, place = where
    part = (first // R) % form.BLOCKS
    rows, depth, columns = first + tl.arange(0, R), tl.arange(0, form.BK), tl.arange(0, form.BV)
    from_q, from_k = find_head(q, n, h, room.ends, start), find_head(k, n, h, room.ends, start)
    from_do = find_head(do, n, h, room.ends, start)
    _, _, soon, _, until = _decay(decays, place, part, form)
    tk = _tile(from_k, k.token, first, depth, tokens, R, form.K)
    found = tl.dot(tk, _state_at(marks, place, form).to(tk.dtype))
    if form.GATE:
        found *= until[:, None]
    if part < form.BLOCKS - 1:  # queries of the block after
        weights = scale * tl.dot(tk, tl.trans(_tile(from_q, q.token, first + R, depth, tokens, R, form.K)))
        if form.GATE:
            weights *= soon[:, None] * _decay(decays, place, part + 1, form)[1][None, :]
        found += tl.dot(weights.to(tk.dtype), _tile(from_do, do.token, first + R, columns, tokens, R, form.V))
    found += tl.dot(scores, _tile(from_do, do.token, first, columns, tokens, R, form.V))
    if step is not None:
        tv = _tile(find_head(v, n, h, room.ends, start), v.token, first, columns, tokens, R, form.V).to(tl.float32)
        _per_token(grads.step, tl.sum(tv * found, 1), where, room, form)
        found *= _factors(step, find_head(step, n, h, room.ends, start), rows, tokens)[:, None]
        if skip is not None:
            tdo = _tile(from_do, do.token, first, columns, tokens, R, form.V).to(tl.float32)
            _per_token(grads.skip, tl.sum(tv * tdo, 1), where, room, form)
            found += tl.load(skip + h) * tdo
    here = (rows < tokens)[:, None] & (columns < form.V)[None, :]
    tl.store(_rows_of(grads.v, where, room, columns, R, form.V), found, mask=here)


@triton.jit
def _past(before, after, decays, place, form: tl.constexpr):
    """What keys before a chunk bring to its gates with queries after it: the decayed <state, its gradient>."""
    PIECE: tl.constexpr = 16
    BV: tl.constexpr = form.BV
    both = tl.zeros([PIECE, BV], tl.float32)
    columns = tl.arange(0, BV)
    for piece in range(form.BK // PIECE):
        depth = piece * PIECE + tl.arange(0, PIECE)
        inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
        at = place * (form.K * form.V) + depth[:, None] * form.V + columns[None, :]
        one = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        both += one * tl.load(after + at, mask=inside, other=0.0).to(tl.float32)
    return _exp(tl.load(decays.whole + place)) * tl.sum(tl.sum(both, 1), 0)


@triton.jit
def write_query_gradients(q, k, v, do, decays, step, before, grads, room, scale, form: tl.constexpr):
    """A block's dq. before: the states before each chunk."""
    part = tl.program_id(0) % form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0) // form.BLOCKS, tl.program_id(1))
    first += part * form.R
    if first >= tokens:
        return
    _queries(q, k, v, do, decays, step, before, grads, (n, h, start, tokens, first, place), room, scale, form)


@triton.jit
def write_key_gradients(q, k, v, do, decays, step, skip, before, after, grads, room, scale, form: tl.constexpr):
    """A block's dk and dv, and what its gates get of pairs and states. after: the gradients of the states after each
    chunk."""
    part = tl.program_id(0) % form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0) // form.BLOCKS, tl.program_id(1))
    first += part * form.R
    if first >= tokens:
        return
    where = (n, h, start, tokens, first, place)
    products, scores = _pairs(q, k, v, do, decays, step, grads, where, room, scale, form)
    _keys(q, k, v, do, decays, step, after, products, grads, where, room, scale, form)
    _values(q, k, v, do, decays, step, skip, after, scores, grads, where, room, scale, form)
    if form.GATE and part == 0:
        tl.store(grads.past + place, _past(before, after, decays, place, form))


@triton.jit
def join_gates(grads, room, scale, form: tl.constexpr):
    """A block's dg: queries from each gate on, keys before it, and what goes past the block."""
    R: tl.constexpr = form.R
    part = tl.program_id(0) % form.BLOCKS
    n, h, start, tokens, first, place = _place(room, tl.program_id(0) // form.BLOCKS, tl.program_id(1))
    first += part * R
    if first >= tokens:
        return
    inner = tl.arange(0, R)
    at = grads.rows + (place * form.BLOCKS + part) * R + inner
    i, j = inner[:, None], inner[None, :]
    of_k = tl.load(at + KEY * grads.stride)
    found = scale * tl.cumsum(tl.load(at + QUERY * grads.stride), 0, reverse=True) + tl.load(at + OWN * grads.stride)
    found += tl.sum(tl.where(i < j, of_k[:, None], 0.0), 0) + tl.load(grads.past + place)
    if form.BLOCKS > 1:
        late = part == 0 and first + R < tokens
        found += scale * tl.sum(tl.load(at + R + FAR_QUERY * grads.stride, mask=(inner < R) & late, other=0.0), 0)
        found += tl.sum(tl.load(at - R + FAR_KEY * grads.stride, mask=(inner < R) & (part > 0), other=0.0), 0)
    _per_token(grads.g, found, (n, h, start, tokens, first, place), room, form)
