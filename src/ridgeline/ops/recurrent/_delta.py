"""The chunk engine of states that decay and are corrected: the delta rules and RWKV-7.

    S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t

With G the running sum of the log gates in a chunk, R = read rows times S (the state before the chunk), and U the rows
that the chunk corrects by:

    delta rule:  X = beta (V - R)     U = T X    T = (I + beta A)^-1    A_ij = (k_i . k_j) e^(G_i - G_j),     j < i
    RWKV-7:      X = R + M V          U = T X    T = (I - A)^-1         A_ij = (a_i . b_j) e^(G_{i-1} - G_j), j < i
    o = scale (e^G q S + P U + N V),  S' = e^{G_C} S + (e^{G_C - G} b)^T U + (e^{G_C - G} k)^T V

Rows read by e^G k (delta) or e^{G_{i-1}} a. The delta rule has b = k there, and no M, N and last term. P, N and M weigh
q with b, q with k and a with k. The kernels: the matrices P, M and N of all chunks, T, the states in order, their
gradients in reverse order, and all other gradients, a chunk each. T is made by halves: blocks of n rows are inverted,
then pairs of them joined, so that beta of 2 and keys that are alike lose nothing.
No factor exceeds 1, as in `_scan.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent._levels import crossings
from ridgeline.ops.recurrent._scan import decay_of, find_head, find_span, half_sums, sums_of, tile_at


class Matrices(NamedTuple):
    """Of all chunks, (B, heads, chunks, C, C) in the data's dtype."""

    inverse: Any  # T
    pair: Any  # P
    read: Any  # M for RWKV-7; for the delta rule A
    plain: Any  # N, RWKV-7 only
    lengths: Any  # one over the lengths of q and k, (B, heads, chunks, 2, C) in float32, if they are normalized


class ChunkStates(NamedTuple):
    first: Any  # (sequences, heads, K, V) in float32, or None: the initial state, or the last state's gradient
    last: Any  # what a pass ends with, or None
    before: Any  # the state before each chunk, (B, heads, chunks, K, V) in the data's dtype, or None
    later: Any  # the gradient of the state after each chunk, likewise
    solved: Any  # rows (B, T, heads, V): U, or U / beta for the delta rule; None where they are not kept
    turned: Any  # the gradient of X, for RWKV-7; the delta rule has it in dv


class Grads(NamedTuple):
    """(B, T, value heads, ...), contiguous; None for inputs that are not there."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    a: Any
    b: Any


class Packing(NamedTuple):
    ends: Any  # cu_seqlens or None
    tokens: Any  # T
    heads: Any  # of v
    chunks: Any  # room for chunks, per batch entry
    sequences: Any
    unit: Any  # rows of a chunk
    all_rows: Any  # B T heads


class DeltaForm(NamedTuple):
    """What a kernel is compiled for."""

    K: int
    V: int
    BK: int
    BV: int
    BS: int  # channels at a time where each has its gate
    C: int  # rows of a chunk
    LEVELS: int  # log2 of C
    GATE: int  # 1: per token, 2: per channel
    LOW: bool  # a and b of their own (RWKV-7)
    NORMALIZE: bool
    SINGLE: bool  # float32 data
    PRECISION: str
    OUT: bool  # the states' pass writes o, else the states before chunks


@triton.jit
def _dot(x, y, like, form: tl.constexpr):
    return tl.dot(x.to(like.dtype), y.to(like.dtype), input_precision=form.PRECISION)


@triton.jit
def _room(packing, n):
    """Where the chunks of packed sequence n are kept: each has room for one more than it may need."""
    return tl.load(packing.ends + n) // packing.unit + n


@triton.jit
def find_chunk(packing):
    """A program's sequence and head, where the sequence begins, its tokens, and the program's chunk."""
    chunk = tl.program_id(0)
    n, h = tl.program_id(1) // packing.heads, tl.program_id(1) % packing.heads
    if packing.ends is not None:
        spot = chunk
        n, beyond = 0 * spot, 0 * spot + packing.sequences
        while beyond - n > 1:  # the last sequence whose room begins here or before
            middle = (n + beyond) // 2
            here = _room(packing, middle) <= spot
            n, beyond = tl.where(here, middle, n), tl.where(here, beyond, middle)
        chunk = spot - _room(packing, n)
    start, tokens = find_span(packing, n)
    return n, h, start, tokens, chunk


@triton.jit
def _of_chain(packing):
    """A program's sequence and head, where the sequence begins, its tokens, and where its chunks are kept."""
    pair = tl.program_id(1)
    n, h = pair // packing.heads, pair % packing.heads
    start, tokens = find_span(packing, n)
    kept = pair.to(tl.int64) * packing.chunks
    if packing.ends is not None:
        kept = h.to(tl.int64) * packing.chunks + _room(packing, n)
    return n, h, start, tokens, kept


@triton.jit
def _heads(q, k, a, b, gate, beta, packing, n, h, start, form: tl.constexpr):
    """Where a sequence's head begins in the inputs; k's place stands for those that are not there."""
    from_q, from_k = find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start)
    from_a, from_b, from_beta = from_k, from_k, from_k
    if form.LOW:
        from_a, from_b = find_head(a, n, h, packing.ends, start), find_head(b, n, h, packing.ends, start)
    if beta is not None:
        from_beta = find_head(beta, n, h, packing.ends, start)
    return from_q, from_k, from_a, from_b, find_head(gate, n, h, packing.ends, start), from_beta


@triton.jit
def _rows(x, place, rows, depth, end, form: tl.constexpr):
    """Rows of K columns."""
    return tile_at(place, x.token, rows, depth, end, form.K)


@triton.jit
def _unit(x, form: tl.constexpr):
    """The rows by their length, if asked, and one over it."""
    C: tl.constexpr = form.C
    shrink = tl.full([C], 1.0, tl.float32)
    if form.NORMALIZE:
        wide = x.to(tl.float32)
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
        x = (wide * shrink[:, None]).to(x.dtype)
    return x, shrink


@triton.jit
def _unit_gradient(found, x, shrink, form: tl.constexpr):
    if form.NORMALIZE:
        wide = x.to(tl.float32)
        found = shrink[:, None] * (found - wide * tl.sum(found * wide, 1)[:, None])
    return found


@triton.jit
def _gates(gate, place, first, depth, end, SHIFT: tl.constexpr, form: tl.constexpr):
    """The gates of a chunk's rows, SHIFT rows on; zero beyond the chunk."""
    row = tl.arange(0, form.C) + SHIFT
    here = (row >= 0) & (row < form.C) & (first + row < end)
    at = place + (first + row).to(tl.int64) * gate.token
    if form.GATE == 1:
        g = tl.load(at, mask=here, other=0.0)
    else:
        g = tl.load(at[:, None] + depth[None, :], mask=here[:, None] & (depth < form.K)[None, :], other=0.0)
    return g.to(tl.float32)


@triton.jit
def _decays(gate, place, first, depth, end, form: tl.constexpr):
    """Of each row the decay since the chunk began, that without its own gate for RWKV-7's a, and that until the end;
    and the whole chunk's."""
    g = _gates(gate, place, first, depth, end, 0, form)
    late = decay_of(tl.cumsum(g, 0), form)
    early = late
    if form.LOW:
        early = decay_of(tl.cumsum(_gates(gate, place, first, depth, end, -1, form), 0), form)
    after = decay_of(tl.cumsum(_gates(gate, place, first, depth, end, 1, form), 0, reverse=True), form)
    return g, late, early, after, decay_of(tl.sum(g, 0), form)


@triton.jit
def _weigh(x, decay, form: tl.constexpr):
    return x * (decay[:, None] if form.GATE == 1 else decay)


@triton.jit
def _reads(x, decay, state, form: tl.constexpr):
    """What rows read from a state: decay x S."""
    if form.GATE == 1:
        found = decay[:, None] * _dot(x, state, x, form)
    else:
        found = _dot(x * decay, state, x, form)
    return found


@triton.jit
def _writes(x, decay, rows, form: tl.constexpr):
    """What rows add to a state: (decay x)^T rows."""
    if form.GATE == 1:
        found = _dot(tl.trans(x), rows * decay[:, None], x, form)
    else:
        found = _dot(tl.trans((x * decay).to(x.dtype)), rows, x, form)
    return found


@triton.jit
def _beside(level, C: tl.constexpr, TURNED: tl.constexpr = False):
    """Pairs of a row in a right block of 2^level rows and a column in the left block beside it; or turned."""
    i, j = tl.arange(0, C)[:, None] >> level, tl.arange(0, C)[None, :] >> level
    if TURNED:
        i, j = j, i
    return (i - j == 1) & ((i & 1) == 1)


@triton.jit
def _apart(g, form: tl.constexpr):
    """e^(G_i - G_j) for j <= i, else 0, for a gate per token."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    if form.SINGLE:  # differences of running sums would round
        apart = tl.cumsum(tl.where(i > j, g[:, None], 0.0), 0)
    else:
        apart = tl.cumsum(g, 0)[:, None] - tl.cumsum(g, 0)[None, :]
    return tl.where(i >= j, decay_of(tl.where(i > j, apart, 0.0), form), 0.0)


@triton.jit
def _edges(late, early, soon, g, level, form: tl.constexpr):
    """From a level's sums of gates since and until a block's edge, those of the next level."""
    C: tl.constexpr = form.C
    BS: tl.constexpr = form.BS
    LEVELS: tl.constexpr = form.LEVELS
    for n in tl.static_range(LEVELS - 1):  # a shape for each level; the caller's loop stays a loop
        if level == n:
            left, right = half_sums(g, n, C, BS)
            second = ((tl.arange(0, C) >> n) & 1)[:, None] == 1
            late += tl.where(second, left, 0.0)
            early += tl.where(second, left, 0.0)
            soon += tl.where(second, 0.0, right)
    return late, early, soon


@triton.jit
def _inverse(A, form: tl.constexpr):
    """(I - A)^-1 of a matrix below its diagonal, by halves."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    T = tl.where(i == j, 1.0, 0.0) + tl.where(_beside(0, form.C), A, 0.0)
    for level in range(1, form.LEVELS):
        part = tl.where(_beside(level, form.C), A, 0.0)
        part = tl.dot(T, part, input_precision=form.PRECISION)
        T += tl.dot(part, T, input_precision=form.PRECISION)
    return T


@triton.jit
def _by_levels(sums, tq, tk, ta, tb, g, form: tl.constexpr):
    """Adds some channels' part of a chunk's pairs, with a gate per channel: a with b, q with b, a with k, q with k."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    C: tl.constexpr = form.C
    ab, qb, ak, qk = sums
    late, early, soon = g, tl.zeros_like(g) if form.LOW else g, tl.zeros_like(g)
    for level in range(form.LEVELS):
        here = _beside(level, C)
        rq, until = (tq * decay_of(late, form)).to(tq.dtype), decay_of(soon, form)
        ra = (ta * decay_of(early, form)).to(ta.dtype)
        cb = tl.trans((tb * until).to(tb.dtype))
        ab += tl.where(here, _dot(ra, cb, tb, form), 0.0)
        qb += tl.where(here, _dot(rq, cb, tb, form), 0.0)
        if form.LOW:
            ck = tl.trans((tk * until).to(tk.dtype))
            ak += tl.where(here, _dot(ra, ck, tk, form), 0.0)
            qk += tl.where(here, _dot(rq, ck, tk, form), 0.0)
        late, early, soon = _edges(late, early, soon, g, level, form)
    wide = tq.to(tl.float32)
    qb += tl.where(i == j, tl.sum(wide * tb.to(tl.float32), 1)[:, None], 0.0)
    if form.LOW:
        qk += tl.where(i == j, tl.sum(wide * tk.to(tl.float32), 1)[:, None], 0.0)
    return ab, qb, ak, qk


@triton.jit
def _square(form: tl.constexpr):
    return tl.arange(0, form.C)[:, None] * form.C + tl.arange(0, form.C)[None, :]


@triton.jit
def _beta(beta, place, rows, tokens, form: tl.constexpr):
    C: tl.constexpr = form.C
    found = tl.full([C], 1.0, tl.float32)
    if not form.LOW:
        found = tl.load(place + rows.to(tl.int64) * beta.token, mask=rows < tokens, other=0.0).to(tl.float32)
    return found


@triton.jit
def _keep_lengths(lengths, spot, of_q, of_k, form: tl.constexpr):
    if form.NORMALIZE:
        place = lengths + spot * (2 * form.C) + tl.arange(0, form.C)
        tl.store(place, of_q)
        tl.store(place + form.C, of_k)


@triton.jit
def pairs_by_token(q, k, gate, matrices, packing, form: tl.constexpr):
    """The delta rule with a gate per token: P and A of a chunk, and one over the lengths of its q and k."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    depth, row = tl.arange(0, form.BK), tl.arange(0, form.C)
    rows = first + row
    tq, shrink_q = _unit(_rows(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form), form)
    tk, shrink_k = _unit(_rows(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form), form)
    g = _gates(gate, find_head(gate, n, h, packing.ends, start), first, depth, tokens, 0, form)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    at = spot * (form.C * form.C) + _square(form)
    weights = _apart(g, form)
    tl.store(matrices.pair + at, weights * _dot(tq, tl.trans(tk), tk, form))
    weights = tl.where(row[:, None] > row[None, :], weights, 0.0)
    tl.store(matrices.read + at, weights * _dot(tk, tl.trans(tk), tk, form))
    _keep_lengths(matrices.lengths, spot, shrink_q, shrink_k, form)


@triton.jit
def pairs_by_channel(q, k, a, b, gate, matrices, packing, form: tl.constexpr):
    """A chunk's matrices but T with a gate per channel (for RWKV-7 T's place holds A), and one over the lengths."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    rows = first + tl.arange(0, C)
    from_q, from_k, from_a, from_b, from_g, _beta_at = _heads(q, k, a, b, gate, None, packing, n, h, start, form)
    ab, of_q = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    qb, ak, qk, of_k = ab, ab, ab, of_q
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        tq, tk = _rows(q, from_q, rows, depth, tokens, form), _rows(k, from_k, rows, depth, tokens, form)
        ta, tb = tk, tk
        if form.LOW:
            ta, tb = _rows(a, from_a, rows, depth, tokens, form), _rows(b, from_b, rows, depth, tokens, form)
        g = _gates(gate, from_g, first, depth, tokens, 0, form)
        ab, qb, ak, qk = _by_levels((ab, qb, ak, qk), tq, tk, ta, tb, g, form)
        if form.NORMALIZE:
            of_q += tl.sum(tq.to(tl.float32) * tq.to(tl.float32), 1)
            of_k += tl.sum(tk.to(tl.float32) * tk.to(tl.float32), 1)
    if form.NORMALIZE:
        of_q, of_k = tl.rsqrt(of_q + 1e-6), tl.rsqrt(of_k + 1e-6)
        ab *= of_k[:, None] * of_k[None, :]
        qb *= of_q[:, None] * of_k[None, :]
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    at = spot * (C * C) + _square(form)
    tl.store(matrices.pair + at, qb)
    if form.LOW:
        tl.store(matrices.inverse + at, ab)
        tl.store(matrices.read + at, ak)
        tl.store(matrices.plain + at, qk)
    else:
        tl.store(matrices.read + at, ab)
    _keep_lengths(matrices.lengths, spot, of_q, of_k, form)


@triton.jit
def invert_chunks(source, beta, matrices, packing, form: tl.constexpr):
    """T of a chunk of two times form.C rows, from A in `source`: each half's, and what joins them."""
    n, h, start, tokens, chunk = find_chunk(packing)
    C: tl.constexpr = form.C
    if chunk * (2 * C) >= tokens:
        return
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    corner = spot * (4 * C * C) + tl.arange(0, C)[:, None] * (2 * C) + tl.arange(0, C)[None, :]
    other = tl.zeros([C, C], tl.float32)
    for half in range(2):
        within = corner + half * (2 * C * C + C)
        beyond = corner + half * (2 * C * C) + (1 - half) * C  # all zeros for the first half
        rows = chunk * (2 * C) + half * C + tl.arange(0, C)
        factor = tl.full([C], 1.0, tl.float32)
        if beta is not None:
            factor = -_beta(beta, find_head(beta, n, h, packing.ends, start), rows, tokens, form)
        inverse = _inverse(tl.load(source + within).to(tl.float32) * factor[:, None], form)
        across = tl.load(source + beyond).to(tl.float32) * factor[:, None]
        across = tl.dot(inverse, across, input_precision=form.PRECISION)
        across = tl.dot(across, other, input_precision=form.PRECISION)
        tl.store(matrices.inverse + within, inverse)
        tl.store(matrices.inverse + beyond, across)
        other = inverse


@triton.jit
def _own_rows(tensor, packing, n, h, start, WIDTH: tl.constexpr):
    """Where a sequence's head begins in a tensor (B, T, heads, WIDTH) of ours."""
    base = start
    if packing.ends is None:
        base += n.to(tl.int64) * packing.tokens
    return tensor + (base * packing.heads + h) * WIDTH


@triton.jit
def _store_rows(tensor, packing, n, h, start, rows, columns, tokens, found, WIDTH: tl.constexpr):
    at = _own_rows(tensor, packing, n, h, start, WIDTH) + (rows.to(tl.int64) * packing.heads)[:, None] * WIDTH
    tl.store(at + columns[None, :], found, mask=(rows < tokens)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _shrink(late, early, after, lengths, chunk, form: tl.constexpr):
    """The decays of a chunk's rows times one over the rows' lengths, if q and k are normalized."""
    if form.NORMALIZE:
        place = lengths + chunk * (2 * form.C) + tl.arange(0, form.C)
        of_q, of_k = tl.load(place), tl.load(place + form.C)
        if form.GATE == 2:
            of_q, of_k = of_q[:, None], of_k[:, None]
        late, early, after = late * of_q, early * of_k, after * of_k
    return late, early, after


@triton.jit
def chain_states(q, k, v, a, b, gate, beta, o, matrices, states, packing, scale, form: tl.constexpr):
    """A sequence and head and BV columns of v, a chunk at a time: the outputs, or the state before each chunk."""
    n, h, start, tokens, kept = _of_chain(packing)
    depth, columns = tl.arange(0, form.BK), tl.program_id(0) * form.BV + tl.arange(0, form.BV)
    spots = depth[:, None] * form.V + columns[None, :]
    inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
    size: tl.constexpr = form.K * form.V
    ours = tl.program_id(1).to(tl.int64) * size + spots
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    state = tl.zeros([BK, BV], tl.float32)
    if states.first is not None:
        state = tl.load(states.first + ours, mask=inside, other=0.0)
    from_q, from_k, from_a, from_b, from_g, from_beta = _heads(q, k, a, b, gate, beta, packing, n, h, start, form)
    from_v = find_head(v, n, h, packing.ends, start)
    to = from_v
    if form.OUT:
        to = find_head(o, n, h, packing.ends, start)
    for chunk in range(tl.cdiv(tokens, form.C)):
        first = chunk * form.C
        rows = first + tl.arange(0, form.C)
        at = (kept + chunk) * (form.C * form.C) + _square(form)
        if not form.OUT:
            tl.store(states.before + (kept + chunk) * size + spots, state, mask=inside)
        tk = _rows(k, from_k, rows, depth, tokens, form)
        tv = tile_at(from_v, v.token, rows, columns, tokens, form.V)
        _g, late, early, after, whole = _decays(gate, from_g, first, depth, tokens, form)
        late, early, after = _shrink(late, early, after, matrices.lengths, kept + chunk, form)
        ta, tb = tk, tk
        if form.LOW:
            ta, tb = _rows(a, from_a, rows, depth, tokens, form), _rows(b, from_b, rows, depth, tokens, form)
        x = _reads(ta, early, state, form)
        missing = tv - x
        if form.LOW:
            x += _dot(tl.load(matrices.read + at), tv, tv, form)
        else:
            x = _beta(beta, from_beta, rows, tokens, form)[:, None] * missing
        u = _dot(tl.load(matrices.inverse + at), x, tv, form)
        if not form.OUT:
            kept_rows = u
            if not form.LOW:
                kept_rows = missing - _dot(tl.load(matrices.read + at), u, tv, form)
            _store_rows(states.solved, packing, n, h, start, rows, columns, tokens, kept_rows, form.V)
        if form.OUT:
            tq = _rows(q, from_q, rows, depth, tokens, form)
            out = _reads(tq, late, state, form) + _dot(tl.load(matrices.pair + at), u, tv, form)
            if form.LOW:
                out += _dot(tl.load(matrices.plain + at), tv, tv, form)
            there = (rows < tokens)[:, None] & (columns < form.V)[None, :]
            tl.store(to + rows.to(tl.int64)[:, None] * o.token + columns[None, :], scale * out, mask=there)
        state = state * (whole if form.GATE == 1 else whole[:, None]) + _writes(tb, after, u, form)
        if form.LOW:
            state += _writes(tk, after, tv, form)
    if states.last is not None:
        tl.store(states.last + ours, state, mask=inside)


@triton.jit
def chain_gradients(q, k, a, b, gate, beta, do, matrices, states, grads, packing, scale, form: tl.constexpr):
    """As `chain_states` with time reversed: the gradient of the state after each chunk, of the initial state, and of
    v and beta."""
    n, h, start, tokens, kept = _of_chain(packing)
    depth, columns = tl.arange(0, form.BK), tl.program_id(0) * form.BV + tl.arange(0, form.BV)
    spots = depth[:, None] * form.V + columns[None, :]
    inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
    size: tl.constexpr = form.K * form.V
    ours = tl.program_id(1).to(tl.int64) * size + spots
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    state = tl.zeros([BK, BV], tl.float32)
    if states.first is not None:
        state = tl.load(states.first + ours, mask=inside, other=0.0)
    from_q, from_k, from_a, from_b, from_g, from_beta = _heads(q, k, a, b, gate, beta, packing, n, h, start, form)
    from_do = find_head(do, n, h, packing.ends, start)
    zero = tl.arange(0, 1)
    chunks = tl.cdiv(tokens, form.C)
    for step in range(chunks):
        chunk = chunks - 1 - step
        first = chunk * form.C
        rows = first + tl.arange(0, form.C)
        at = (kept + chunk) * (form.C * form.C) + _square(form)
        tl.store(states.later + (kept + chunk) * size + spots, state, mask=inside)
        tq = _rows(q, from_q, rows, depth, tokens, form)
        tdo = tile_at(from_do, do.token, rows, columns, tokens, form.V)
        _g, late, early, after, whole = _decays(gate, from_g, first, depth, tokens, form)
        late, early, after = _shrink(late, early, after, matrices.lengths, kept + chunk, form)
        tk = _rows(k, from_k, rows, depth, tokens, form)
        ta, tb = tk, tk
        if form.LOW:
            ta, tb = _rows(a, from_a, rows, depth, tokens, form), _rows(b, from_b, rows, depth, tokens, form)
        du = scale * _dot(tl.trans(tl.load(matrices.pair + at)), tdo, tdo, form) + _reads(tb, after, state, form)
        dx = _dot(tl.trans(tl.load(matrices.inverse + at)), du, tdo, form)
        if form.LOW:
            _store_rows(states.turned, packing, n, h, start, rows, columns, tokens, dx, form.V)
            dv = _dot(tl.trans(tl.load(matrices.read + at)), dx, tdo, form) + _reads(tk, after, state, form)
            dv += scale * _dot(tl.trans(tl.load(matrices.plain + at)), tdo, tdo, form)
        else:
            from_solved = _own_rows(states.solved, packing, n, h, start, form.V)
            solved = tile_at(from_solved, packing.heads * form.V, rows, columns, tokens, form.V)
            part = grads.beta + tl.program_id(0).to(tl.int64) * packing.all_rows
            _store_rows(part, packing, n, h, start, rows, zero, tokens, tl.sum(dx * solved, 1)[:, None], 1)
            dv = _beta(beta, from_beta, rows, tokens, form)[:, None] * dx
            dx = -dv
        _store_rows(grads.v, packing, n, h, start, rows, columns, tokens, dv, form.V)
        state *= whole if form.GATE == 1 else whole[:, None]
        state += scale * _writes(tq, late, tdo, form) + _writes(ta, early, dx, form)
    if states.last is not None:
        tl.store(states.last + ours, state, mask=inside)


@triton.jit
def _sum_by_states(x, step, states, at, rows, depth, tokens, form: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (of V columns) times the transposed states of a chunk, WIDTH of their rows."""
    C: tl.constexpr = form.C
    found = tl.zeros([C, WIDTH], tl.float32)
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        tile = tile_at(x, step, rows, columns, tokens, form.V)
        inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
        state = tl.load(states + at + depth[None, :] * form.V + columns[:, None], mask=inside, other=0.0)
        found += _dot(tile, state, tile, form)
    return found


@triton.jit
def _sum_of_pairs(x, x_step, y, y_step, rows, tokens, form: tl.constexpr):
    """Rows times rows, over V columns."""
    C: tl.constexpr = form.C
    found = tl.zeros([C, C], tl.float32)
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        left = tile_at(x, x_step, rows, columns, tokens, form.V)
        found += _dot(left, tl.trans(tile_at(y, y_step, rows, columns, tokens, form.V)), left, form)
    return found


@triton.jit
def _held(states, at, depth, form: tl.constexpr, WIDTH: tl.constexpr):
    """The sum over v's columns of the state before a chunk times the gradient of the state after it."""
    found = tl.zeros([WIDTH], tl.float32)
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        spots = depth[:, None] * form.V + columns[None, :]
        inside = (depth < form.K)[:, None] & (columns < form.V)[None, :]
        before = tl.load(states.before + at + spots, mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(before * tl.load(states.later + at + spots, mask=inside, other=0.0).to(tl.float32), 1)
    return found


@triton.jit
def _inner_by_channel(sums, tq, tk, ta, tb, g, pairs, form: tl.constexpr):
    """Adds to the gradients of q, a, b, k and the gate those of a chunk's pairs, without those of a row with itself."""
    dqb, dqb_t, dab, dab_t, dqk, dqk_t, dak, dak_t = pairs
    C: tl.constexpr = form.C
    dq, da, db, dk, dg = sums
    late, early, soon = g, tl.zeros_like(g) if form.LOW else g, tl.zeros_like(g)
    for level in range(form.LEVELS):
        here, there = _beside(level, C), _beside(level, C, True)
        since, since_a, until = decay_of(late, form), decay_of(early, form), decay_of(soon, form)
        rq, ra, cb = (tq * since).to(tq.dtype), (ta * since_a).to(ta.dtype), (tb * until).to(tb.dtype)
        of_q = since * _dot(tl.where(here, dqb, 0.0), cb, tb, form)
        of_a = since_a * _dot(tl.where(here, dab, 0.0), cb, tb, form)
        of_b = until * (
            _dot(tl.where(there, dqb_t, 0.0), rq, tb, form) + _dot(tl.where(there, dab_t, 0.0), ra, tb, form)
        )
        db += of_b
        terms = tb * of_b  # of left blocks; those of q and a are of right ones
        if form.LOW:
            ck = (tk * until).to(tk.dtype)
            of_q += since * _dot(tl.where(here, dqk, 0.0), ck, tb, form)
            of_a += since_a * _dot(tl.where(here, dak, 0.0), ck, tb, form)
            of_k = until * (
                _dot(tl.where(there, dqk_t, 0.0), rq, tb, form) + _dot(tl.where(there, dak_t, 0.0), ra, tb, form)
            )
            dk += of_k
            terms += tk * of_k
            dg += sums_of(crossings(level, C, True), ta * of_a, tb, form)
        else:
            terms += ta * of_a
        dq += of_q
        da += of_a
        dg += sums_of(crossings(level, C, False), terms + tq * of_q, tb, form)
        late, early, soon = _edges(late, early, soon, g, level, form)
    return dq, da, db, dk, dg


@triton.jit
def _diagonal(x, form: tl.constexpr):
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    return tl.sum(tl.where(i == j, x, 0.0), 1)[:, None]


@triton.jit
def gradients_by_token(q, k, gate, beta, do, states, grads, packing, scale, form: tl.constexpr):
    """The delta rule with a gate per token: a chunk's gradients of q, k and the gate."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    BK: tl.constexpr = form.BK
    depth = tl.arange(0, BK)
    rows = first + tl.arange(0, form.C)
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    tq, shrink_q = _unit(_rows(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form), form)
    tk, shrink_k = _unit(_rows(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form), form)
    factor = _beta(beta, find_head(beta, n, h, packing.ends, start), rows, tokens, form)
    place = find_head(gate, n, h, packing.ends, start)
    g, late, _early, after, whole = _decays(gate, place, first, depth, tokens, form)
    from_do, step = find_head(do, n, h, packing.ends, start), packing.heads * form.V
    from_dv = _own_rows(grads.v, packing, n, h, start, form.V)
    from_solved = _own_rows(states.solved, packing, n, h, start, form.V)
    at = (tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)) * (form.K * form.V)
    weights = _apart(g, form) * factor[None, :]
    of_q = weights * scale * _sum_of_pairs(from_do, do.token, from_solved, step, rows, tokens, form)
    of_k = tl.where(i > j, -weights, 0.0) * _sum_of_pairs(from_dv, step, from_solved, step, rows, tokens, form)
    both = _dot(tq, tl.trans(tk), tk, form) * of_q + _dot(tk, tl.trans(tk), tk, form) * of_k
    later = tl.cumsum(both, 0, reverse=True)  # over pairs of an earlier row and this row or a later one
    dg = tl.sum(tl.where(i > j, later, 0.0), 1) + whole * tl.sum(_held(states, at, depth, form, BK), 0)
    of_q, of_k = of_q.to(tk.dtype), of_k.to(tk.dtype)
    dq = (scale * late)[:, None] * _sum_by_states(from_do, do.token, states.before, at, rows, depth, tokens, form, BK)
    since = tl.sum(tq * dq, 1)
    dq = _unit_gradient(dq + _dot(of_q, tk, tk, form), tq, shrink_q, form)
    _store_rows(grads.q, packing, n, h, start, rows, depth, tokens, dq, form.K)
    dk = -late[:, None] * _sum_by_states(from_dv, step, states.before, at, rows, depth, tokens, form, BK)
    since += tl.sum(tk * dk, 1)
    db = (after * factor)[:, None] * _sum_by_states(from_solved, step, states.later, at, rows, depth, tokens, form, BK)
    until = tl.sum(tk * db, 1)
    dk += db + _dot(of_k, tk, tk, form)
    turned = _dot(tl.trans(tq), of_q, tk, form)  # Hopper cannot transpose a sum for another product
    dk += tl.trans(turned + _dot(tl.trans(tk), of_k, tk, form))
    dk = _unit_gradient(dk, tk, shrink_k, form)
    _store_rows(grads.k, packing, n, h, start, rows, depth, tokens, dk, form.K)
    dg += tl.cumsum(since, 0, reverse=True) + tl.sum(tl.where(i > j, until[None, :], 0.0), 1)
    _store_rows(grads.g, packing, n, h, start, rows, tl.arange(0, 1), tokens, dg[:, None], 1)


@triton.jit
def _slice_gradients(
    q, k, v, a, b, gate, places, pairs, states, grads, packing, where, depth, form: tl.constexpr
):  # fmt: skip
    """Some channels' gradients with a gate per channel; for normalized q and k those of the normalized ones, and the
    rows' sums of them times q and k."""
    n, h, start, tokens, chunk, at, shrink_q, shrink_k, factor, scale = where
    from_do, do_step, from_solved, from_dx, step = places
    BS: tl.constexpr = form.BS
    first = chunk * form.C
    rows = first + tl.arange(0, form.C)
    tq = _rows(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form)
    tk = _rows(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form)
    if form.NORMALIZE:
        tq, tk = (tq * shrink_q[:, None]).to(tq.dtype), (tk * shrink_k[:, None]).to(tk.dtype)
    ta, tb = tk, tk
    sign = -1.0
    if form.LOW:
        sign = 1.0
        ta = _rows(a, find_head(a, n, h, packing.ends, start), rows, depth, tokens, form)
        tb = _rows(b, find_head(b, n, h, packing.ends, start), rows, depth, tokens, form)
    place = find_head(gate, n, h, packing.ends, start)
    g, late, early, after, whole = _decays(gate, place, first, depth, tokens, form)
    dq = scale * late * _sum_by_states(from_do, do_step, states.before, at, rows, depth, tokens, form, BS)
    da = sign * early * _sum_by_states(from_dx, step, states.before, at, rows, depth, tokens, form, BS)
    db = after * _sum_by_states(from_solved, step, states.later, at, rows, depth, tokens, form, BS)
    db *= factor[:, None]
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    dg = tl.zeros_like(g) + (whole * _held(states, at, depth, form, BS))[None, :]
    dk = db
    if form.LOW:
        from_v = find_head(v, n, h, packing.ends, start)
        dk = after * _sum_by_states(from_v, v.token, states.later, at, rows, depth, tokens, form, BS)
        dg += sums_of(j >= i, tq * dq, tb, form) + sums_of(j < i, tb * db + tk * dk, tb, form)
        dg += sums_of(j > i, ta * da, tb, form)  # a row's own gate follows its read
    else:
        dg += sums_of(j >= i, tq * dq + ta * da, tb, form) + sums_of(j < i, tb * db, tb, form)
    dq, da, db, dk, dg = _inner_by_channel((dq, da, db, dk, dg), tq, tk, ta, tb, g, pairs, form)
    _store_rows(grads.g, packing, n, h, start, rows, depth, tokens, dg, form.K)
    own = _diagonal(pairs[0], form)
    dq += own * tb
    db += own * tq
    if form.LOW:
        own = _diagonal(pairs[4], form)
        dq += own * tk
        dk += own * tq
        _store_rows(grads.a, packing, n, h, start, rows, depth, tokens, da, form.K)
        _store_rows(grads.b, packing, n, h, start, rows, depth, tokens, db, form.K)
    else:
        dk = da + db
    _store_rows(grads.q, packing, n, h, start, rows, depth, tokens, dq, form.K)
    _store_rows(grads.k, packing, n, h, start, rows, depth, tokens, dk, form.K)
    return tl.sum(tq * dq, 1), tl.sum(tk * dk, 1)


@triton.jit
def _through_length(x, shrink, product, grad, packing, n, h, start, rows, tokens, form: tl.constexpr):
    """Turns the gradient of normalized rows, already written, into that of the rows."""
    place, found = find_head(x, n, h, packing.ends, start), _own_rows(grad, packing, n, h, start, form.K)
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        unit = _rows(x, place, rows, depth, tokens, form) * shrink[:, None]
        whole = tile_at(found, packing.heads * form.K, rows, depth, tokens, form.K)
        whole = shrink[:, None] * (whole - unit * product[:, None])
        _store_rows(grad, packing, n, h, start, rows, depth, tokens, whole, form.K)


@triton.jit
def gradients_by_channel(
    q, k, v, a, b, gate, beta, do, matrices, states, grads, packing, scale, form: tl.constexpr
):  # fmt: skip
    """A gate per channel: a chunk's gradients of q, k, a, b and the gate, some channels at a time."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    rows = first + tl.arange(0, C)
    factor = tl.full([C], 1.0, tl.float32)
    from_do, step = find_head(do, n, h, packing.ends, start), packing.heads * form.V
    from_solved = _own_rows(states.solved, packing, n, h, start, form.V)
    sign, from_dx = 1.0, _own_rows(grads.v, packing, n, h, start, form.V)
    if form.LOW:
        from_dx = _own_rows(states.turned, packing, n, h, start, form.V)
    else:
        sign, factor = -1.0, _beta(beta, find_head(beta, n, h, packing.ends, start), rows, tokens, form)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    qb = scale * factor[None, :] * _sum_of_pairs(from_do, do.token, from_solved, step, rows, tokens, form)
    qb_t = scale * factor[:, None] * _sum_of_pairs(from_solved, step, from_do, do.token, rows, tokens, form)
    ab = sign * factor[None, :] * _sum_of_pairs(from_dx, step, from_solved, step, rows, tokens, form)
    ab_t = sign * factor[:, None] * _sum_of_pairs(from_solved, step, from_dx, step, rows, tokens, form)
    qk, qk_t, ak, ak_t = qb, qb_t, ab, ab_t
    if form.LOW:
        from_v = find_head(v, n, h, packing.ends, start)
        qk = scale * _sum_of_pairs(from_do, do.token, from_v, v.token, rows, tokens, form)
        qk_t = scale * _sum_of_pairs(from_v, v.token, from_do, do.token, rows, tokens, form)
        ak = _sum_of_pairs(from_dx, step, from_v, v.token, rows, tokens, form)
        ak_t = _sum_of_pairs(from_v, v.token, from_dx, step, rows, tokens, form)
    kind: tl.constexpr = v.data.dtype.element_ty
    pairs = (
        qb.to(kind), qb_t.to(kind), ab.to(kind), ab_t.to(kind), qk.to(kind), qk_t.to(kind), ak.to(kind), ak_t.to(kind)
    )  # fmt: skip
    of_q, of_k = factor, factor
    if form.NORMALIZE:
        place = matrices.lengths + spot * (2 * C) + tl.arange(0, C)
        of_q, of_k = tl.load(place), tl.load(place + C)
    where = n, h, start, tokens, chunk, spot * (form.K * form.V), of_q, of_k, factor, scale
    places = from_do, do.token, from_solved, from_dx, step
    product_q, product_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        one, other = _slice_gradients(
            q, k, v, a, b, gate, places, pairs, states, grads, packing, where, depth, form
        )  # fmt: skip
        product_q += one
        product_k += other
    if form.NORMALIZE:
        tl.debug_barrier()
        _through_length(q, of_q, product_q, grads.q, packing, n, h, start, rows, tokens, form)
        _through_length(k, of_k, product_k, grads.k, packing, n, h, start, rows, tokens, form)
