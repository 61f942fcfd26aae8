"""The chunk engine of states that decay and are corrected: the delta rules and RWKV-7.

    S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        o_t = scale S_t^T q_t

With G the running sum of the log gates in a chunk, R = read rows times S (the state before the chunk), and U the rows
that the chunk corrects by:

    delta rule:  X = V - R      Y = X - L (beta X)   U = beta Y   A_ij = (k_i . k_j) e^(G_i - G_j),     j < i
    RWKV-7:      X = R + M V    U = X + L X                       A_ij = (a_i . b_j) e^(G_{i-1} - G_j), j < i
    o = scale (e^G q S + P U + N V),  S' = e^{G_C} S + (e^{G_C - G} b)^T U + (e^{G_C - G} k)^T V

Rows read by e^G k (delta) or e^{G_{i-1}} a. The delta rule has b = k there, and no M, N and last term. P, N and M weigh
q with b, q with k and a with k. L, below its diagonal, has (I + A beta)^-1 = I - L beta and (I + beta A)^-1 =
I - beta L; RWKV-7 has -1 for beta. So one matrix serves both ways, nothing is divided by beta, and the diagonal of ones
is exact.
The kernels: the matrices of all chunks, the states in order, their gradients in reverse order, and all other gradients,
a chunk each. Where few chains would leave multiprocessors idle, sequences are cut into segments: S after a segment is M
S + N. N is the chain from zeros, and M the same chain without v from the identity. `chain_segments` finds the state
before each segment, and all segments run side by side; in reverse a segment's M is transposed. L is made by halves:
that of blocks of n rows, then pairs of them joined, so that beta of 2 and keys that are alike lose nothing; up to 16
rows all blocks are a batch of products. No factor exceeds 1, as in `scan.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.levels import chosen_sums, crossings
from ridgeline.ops.recurrent.triton.scan import decay_of, find_head, find_span, half_sums, sums_of, tile_at


class Matrices(NamedTuple):
    """Of all chunks, (B, heads, chunks, C, C) in the data's dtype; with a gate per token a row of each in a row of
    (B, T, heads, width)."""

    solve: Any  # L
    pair: Any  # P
    read: Any  # M, RWKV-7 only
    plain: Any  # N, RWKV-7 only
    lengths: Any  # one over the lengths of q and k, (B, heads, chunks, 2, C) in float32, if they are normalized
    # (B, heads, chunks, 4, C) in float32, not RWKV-7: factors of rows of q and k that read, and of k; beta; with a gate
    # per token a fifth row: the gates' sums since the chunk began, times log2(e)
    decays: Any
    whole: Any  # a chunk's decay, (B, heads, chunks) or, per channel, (B, heads, chunks, K), in float32
    width: Any  # columns of the tensor whose rows hold L and P, with a gate per token


class Reads(NamedTuple):
    """The rows that read states and that write them; per channel with their decays, made by `pairs_by_channel`."""

    q: Any
    a: Any  # k for the delta rule
    b: Any  # likewise
    k: Any  # RWKV-7 only


class ChunkStates(NamedTuple):
    first: Any  # (sequences, heads, K, V) in float32, or None: the initial state, or the last state's gradient
    last: Any  # what a pass ends with, or None
    before: Any  # the state before each chunk, (B, heads, chunks, V, K) in the data's dtype, or None
    later: Any  # the gradient of the state after each chunk, likewise
    solved: Any  # rows (B, T, heads, V): U, or U / beta for the delta rule; None where they are not kept
    turned: Any  # the gradient of X, for RWKV-7; the delta rule has it in dv
    made: Any  # N and M of each segment, turned: (B, heads, rooms, V + K, K) in float32; None without segments
    starts: Any  # the state before each segment, (B, heads, rooms, V, K) in float32, or None


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
    begin: Any = 0  # the first chunk of the launch
    span: Any = 1  # chunks of a segment; more than a sequence has where it is not cut
    rooms: Any = 1  # for segments, per batch entry
    slices: Any = 1  # programs that share a segment's columns


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
    ENDS: bool  # only what segments end with is wanted
    HALVINGS: int = 0  # the most halvings of a block's decay with which its rows meet in one product, per channel
    APART: int = 0  # chunks of a program, where those that meet in one product are other kernels' (`delta_at_once.py`)


LOOK = tl.constexpr(16)


@triton.jit
def _dot(x, y, like, form: tl.constexpr):
    return tl.dot(x.to(like.dtype), y.to(like.dtype), input_precision=form.PRECISION)


@triton.jit
def _room(packing, n, unit):
    """Where the chunks, or segments, of packed sequence n are kept: each has room for one more than it may need."""
    return tl.load(packing.ends + n) // unit + n


@triton.jit
def _sequence_at(packing, spot, unit):
    """The last packed sequence whose room begins at `spot` or before."""
    n, beyond = 0 * spot, 0 * spot + packing.sequences
    while beyond - n > 1:
        middle = (n + beyond) // 2
        here = _room(packing, middle, unit) <= spot
        n, beyond = tl.where(here, middle, n), tl.where(here, beyond, middle)
    return n


@triton.jit
def find_chunk(packing, COUNT: tl.constexpr = 1, step=0):
    """A program's sequence and head, where the sequence begins, its tokens, and its chunk, or one of COUNT."""
    chunk = tl.program_id(0) * COUNT + step + packing.begin
    n, h = tl.program_id(1) // packing.heads, tl.program_id(1) % packing.heads
    if packing.ends is not None:
        n = _sequence_at(packing, chunk, packing.unit)
        chunk = chunk - _room(packing, n, packing.unit)
    start, tokens = find_span(packing, n)
    return n, h, start, tokens, chunk


@triton.jit
def _of_chain(packing):
    """A program's sequence and head, where the sequence begins, its tokens, where its chunks and its segment are kept,
    the segment and the sequence's last one, the segment's first chunk and the one after it."""
    spot = tl.program_id(0) // packing.slices
    n, h, segment = tl.program_id(1) // packing.heads, tl.program_id(1) % packing.heads, spot
    kept = tl.program_id(1).to(tl.int64) * packing.chunks
    unit = packing.span * packing.unit
    if packing.ends is not None:
        n = _sequence_at(packing, spot, unit)
        segment = spot - _room(packing, n, unit)
        kept += _room(packing, n, packing.unit)
    start, tokens = find_span(packing, n)
    room = tl.program_id(1).to(tl.int64) * packing.rooms + spot
    low = packing.begin + segment * packing.span
    high = tl.minimum(low + packing.span, tl.cdiv(tokens, packing.unit))
    return n, h, start, tokens, kept, room, segment, tl.maximum(tl.cdiv(tokens, unit), 1) - 1, low, high


@triton.jit
def heads_of(q, k, a, b, gate, beta, packing, n, h, start, form: tl.constexpr):
    """Where a sequence's head begins in the inputs; k's place stands for those that are not there."""
    from_q, from_k = find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start)
    from_a, from_b, from_beta = from_k, from_k, from_k
    if form.LOW:
        from_a, from_b = find_head(a, n, h, packing.ends, start), find_head(b, n, h, packing.ends, start)
    if beta is not None:
        from_beta = find_head(beta, n, h, packing.ends, start)
    return from_q, from_k, from_a, from_b, find_head(gate, n, h, packing.ends, start), from_beta


@triton.jit
def _read_heads(reads, packing, n, h, start, form: tl.constexpr):
    """Where a sequence's head begins in the rows of the chains."""
    from_q, from_a = find_head(reads.q, n, h, packing.ends, start), find_head(reads.a, n, h, packing.ends, start)
    from_b, from_k = from_a, from_a
    if form.GATE == 2:
        from_b = find_head(reads.b, n, h, packing.ends, start)
    if form.LOW:
        from_k = find_head(reads.k, n, h, packing.ends, start)
    return from_q, from_a, from_b, from_k


@triton.jit
def tile_of(x, place, rows, columns, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of some columns; blocks that divide the columns need no mask of them."""
    here = (rows < tokens)[:, None]
    if WIDTH % BLOCK != 0:
        here = here & (columns < WIDTH)[None, :]
    return tl.load(place + rows.to(tl.int64)[:, None] * x.token + columns[None, :], mask=here, other=0.0)


@triton.jit
def _turned_tile(x, place, rows, columns, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """As `tile_of`, transposed."""
    return tl.trans(tile_of(x, place, rows, columns, tokens, WIDTH, BLOCK))


@triton.jit
def rows_of(x, place, rows, depth, end, form: tl.constexpr):
    """Rows of K columns."""
    return tile_of(x, place, rows, depth, end, form.K, form.BK)


@triton.jit
def _shrink(x, form: tl.constexpr):
    """One over the lengths of the rows, if asked."""
    C: tl.constexpr = form.C
    shrink = tl.full([C], 1.0, tl.float32)
    if form.NORMALIZE:
        wide = x.to(tl.float32)
        shrink = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
    return shrink


@triton.jit
def _length(x, pairs, form: tl.constexpr):
    """As `_shrink`; in half precision from the diagonal of the rows' products, where the sums are cheap."""
    if form.NORMALIZE and not form.SINGLE:
        i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
        shrink = tl.rsqrt(tl.sum(tl.where(i == j, pairs, 0.0), 1) + 1e-6)
    else:
        shrink = _shrink(x, form)
    return shrink


@triton.jit
def _unit(x, form: tl.constexpr):
    """The rows by their length, if asked, and one over it."""
    shrink = _shrink(x, form)
    if form.NORMALIZE:
        x = (x.to(tl.float32) * shrink[:, None]).to(x.dtype)
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
        g = tl.load(at, mask=here, other=0.0).to(tl.float32)
        if not form.SINGLE:  # differences of running sums: -inf would be NaN. e^-1000 is 0 already; a NaN stays
            g = tl.where(g < -1000.0, -1000.0, g)
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
def solve_chunk(A, factor, KIND: tl.constexpr, form: tl.constexpr):
    """L of a chunk, from A below its diagonal and beta: with `part` of A between two halves, that of both halves
    together is L + (I - L beta) part (I - beta L). Up to 16 rows in float32, then what these products change of `part`
    is rounded to the data's dtype, as L is."""
    C: tl.constexpr = form.C
    LEVELS: tl.constexpr = form.LEVELS
    BLOCKS: tl.constexpr = C // 16
    own = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    square = tl.sum(tl.where(own, tl.reshape(A, (BLOCKS, 16, BLOCKS, 16)), 0.0), 2)
    some = tl.reshape(factor, (BLOCKS, 16))
    L = tl.where(_beside(0, 16)[None, :, :], square, 0.0)
    for level in tl.static_range(1, 4):
        part = tl.where(_beside(level, 16)[None, :, :], square, 0.0)
        part -= tl.dot(L * some[:, None, :], part, input_precision=form.PRECISION)
        L += part - tl.dot(part, some[:, :, None] * L, input_precision=form.PRECISION)
    L = tl.reshape(tl.where(own, L[:, :, None, :], 0.0), (C, C))
    for level in tl.static_range(4, LEVELS):
        part = tl.where(_beside(level, C), A, 0.0)
        part -= tl.dot((L * factor[None, :]).to(KIND), part.to(KIND), input_precision=form.PRECISION)
        L += part - tl.dot(part.to(KIND), (factor[:, None] * L).to(KIND), input_precision=form.PRECISION)
    return L


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
def square_of(form: tl.constexpr):
    return tl.arange(0, form.C)[:, None] * form.C + tl.arange(0, form.C)[None, :]


@triton.jit
def _load_square(x, place, step, chunk, rows, tokens, form: tl.constexpr):
    """A chunk's matrix. place, step: by `_squares`."""
    inner = tl.arange(0, form.C)
    if form.GATE == 1:
        at = place + (inner * step)[:, None] + inner[None, :]
        found = tl.load(x + tl.cast(chunk, tl.int64) * (form.C * step) + at, mask=(rows < tokens)[:, None], other=0.0)
    else:
        found = tl.load(x + place + tl.cast(chunk, tl.int64) * (form.C * form.C) + square_of(form))
    return found


@triton.jit
def _squares(matrices, packing, n, h, start, kept, form: tl.constexpr):
    """Where the matrices of a sequence and head begin, and the step from row to row with a gate per token."""
    place, step = kept * (form.C * form.C), packing.heads
    if form.GATE == 1:
        step = packing.heads * matrices.width
        place = start
        if packing.ends is None:
            place += n.to(tl.int64) * packing.tokens
        place = (place * packing.heads + h) * matrices.width
    return place, step


@triton.jit
def beta_of(beta, place, rows, tokens, form: tl.constexpr):
    C: tl.constexpr = form.C
    found = tl.full([C], 1.0, tl.float32)
    if not form.LOW:
        found = tl.load(place + rows.to(tl.int64) * beta.token, mask=rows < tokens, other=0.0).to(tl.float32)
    return found


@triton.jit
def keep_lengths(lengths, spot, of_q, of_k, form: tl.constexpr):
    if form.NORMALIZE:
        place = lengths + spot * (2 * form.C) + tl.arange(0, form.C)
        tl.store(place, of_q)
        tl.store(place + form.C, of_k)


@triton.jit
def keep_decays(matrices, spot, of_q, of_a, of_b, factor, whole, form: tl.constexpr):
    place = matrices.decays + spot * ((5 if form.GATE == 1 else 4) * form.C) + tl.arange(0, form.C)
    tl.store(place, of_q)
    tl.store(place + form.C, of_a)
    tl.store(place + 2 * form.C, of_b)
    tl.store(place + 3 * form.C, factor)
    if form.GATE == 1:
        tl.store(matrices.whole + spot, whole)


class PairMaps(NamedTuple):
    """Tensor maps with which TMA moves a chunk's rows, (B, heads, T, columns), where sequences are not packed."""

    q: Any
    k: Any
    squares: Any  # P in the first columns of a row, and L in the next


@triton.jit
def pairs_by_token(q, k, gate, beta, matrices, packing, maps, form: tl.constexpr):
    """The delta rule with a gate per token: a chunk's P and L, its decays, and one over the lengths of q and k. maps:
    for TMA, or None."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    depth, row = tl.arange(0, form.BK), tl.arange(0, form.C)
    rows = first + row
    if maps is None:
        tq = tile_of(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form.K, form.BK)
        tk = tile_of(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form.K, form.BK)
    else:
        tk = maps.k.load([n, h // k.group, first, 0]).reshape(form.C, form.K)
        tq = maps.q.load([n, h // q.group, first, 0]).reshape(form.C, form.K)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    A = _dot(tk, tl.trans(tk), tk, form)
    shrink_q, shrink_k = _length(tq, _dot(tq, tl.trans(tq), tq, form), form), _length(tk, A, form)
    g, late, _early, after, whole = _decays(
        gate, find_head(gate, n, h, packing.ends, start), first, depth, tokens, form
    )  # fmt: skip
    keep_lengths(matrices.lengths, spot, shrink_q, shrink_k, form)
    factor = beta_of(beta, find_head(beta, n, h, packing.ends, start), rows, tokens, form)
    keep_decays(matrices, spot, late * shrink_q, late * shrink_k, after * shrink_k, factor, whole, form)
    tl.store(matrices.decays + spot * (5 * form.C) + (4 * form.C + row), tl.cumsum(g, 0) * 1.4426950408889634)
    weights = _apart(g, form) * shrink_k[None, :]
    place, step = _squares(matrices, packing, n, h, start, spot, form)
    at = place + tl.cast(chunk, tl.int64) * (form.C * step) + (row * step)[:, None] + row[None, :]
    kind: tl.constexpr = matrices.solve.dtype.element_ty
    P = (weights * shrink_q[:, None] * _dot(tq, tl.trans(tk), tk, form)).to(kind)
    A *= tl.where(row[:, None] > row[None, :], weights * shrink_k[:, None], 0.0)
    if maps is None:
        tl.store(matrices.pair + at, P, mask=(rows < tokens)[:, None])
        tl.store(matrices.solve + at, solve_chunk(A, factor, kind, form), mask=(rows < tokens)[:, None])
    else:
        maps.squares.store([n, h, first, 0], P.reshape(1, 1, form.C, form.C))
        L = solve_chunk(A, factor, kind, form).to(kind)
        maps.squares.store([n, h, first, form.C], L.reshape(1, 1, form.C, form.C))


@triton.jit
def pairs_by_channel(q, k, a, b, gate, beta, reads, matrices, packing, form: tl.constexpr):
    """A chunk's matrices with a gate per channel, its rows with their decays, and one over the lengths; in float32.
    `delta_channels.py` has this and `gradients_by_channel` in half precision."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    rows = first + tl.arange(0, C)
    from_q, from_k, from_a, from_b, from_g, from_beta = heads_of(q, k, a, b, gate, beta, packing, n, h, start, form)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    ab, of_q = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    qb, ak, qk, of_k = ab, ab, ab, of_q
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        tq = tile_of(q, from_q, rows, depth, tokens, form.K, form.BK)
        tk = tile_of(k, from_k, rows, depth, tokens, form.K, form.BK)
        ta, tb = tk, tk
        if form.LOW:
            ta = tile_of(a, from_a, rows, depth, tokens, form.K, form.BK)
            tb = tile_of(b, from_b, rows, depth, tokens, form.K, form.BK)
        gates, late, early, after, whole = _decays(gate, from_g, first, depth, tokens, form)
        store_rows(reads.q.data, packing, n, h, start, rows, depth, tokens, tq * late, form.K)
        store_rows(reads.a.data, packing, n, h, start, rows, depth, tokens, ta * early, form.K)
        store_rows(reads.b.data, packing, n, h, start, rows, depth, tokens, tb * after, form.K)
        if form.LOW:
            store_rows(reads.k.data, packing, n, h, start, rows, depth, tokens, tk * after, form.K)
        tl.store(matrices.whole + spot * form.K + depth, whole, mask=depth < form.K)
        ab, qb, ak, qk = _by_levels((ab, qb, ak, qk), tq, tk, ta, tb, gates, form)
        if form.NORMALIZE:
            of_q += tl.sum(tq.to(tl.float32) * tq.to(tl.float32), 1)
            of_k += tl.sum(tk.to(tl.float32) * tk.to(tl.float32), 1)
    if not form.NORMALIZE:
        of_q, of_k = of_q + 1.0, of_k + 1.0
    else:
        of_q, of_k = tl.rsqrt(of_q + 1e-6), tl.rsqrt(of_k + 1e-6)
        ab *= of_k[:, None] * of_k[None, :]
        qb *= of_q[:, None] * of_k[None, :]
        keep_lengths(matrices.lengths, spot, of_q, of_k, form)
    at = spot * (C * C) + square_of(form)
    tl.store(matrices.pair + at, qb)
    factor = tl.full([C], -1.0, tl.float32)
    if form.LOW:
        tl.store(matrices.read + at, ak)
        tl.store(matrices.plain + at, qk)
    else:
        factor = beta_of(beta, from_beta, rows, tokens, form)
        keep_decays(matrices, spot, of_q, of_k, of_k, factor, 1.0, form)
    tl.store(matrices.solve + at, solve_chunk(ab, factor, matrices.solve.dtype.element_ty, form))


@triton.jit
def own_rows(tensor, packing, n, h, start, width):
    """Where a sequence's head begins in a tensor (B, T, heads, width) of ours."""
    base = start
    if packing.ends is None:
        base += n.to(tl.int64) * packing.tokens
    return tensor + (base * packing.heads + h) * width


@triton.jit
def store_rows(tensor, packing, n, h, start, rows, columns, tokens, found, width):
    at = own_rows(tensor, packing, n, h, start, width) + (rows.to(tl.int64) * packing.heads)[:, None] * width
    tl.store(at + columns[None, :], found, mask=(rows < tokens)[:, None] & (columns < width)[None, :])


@triton.jit
def _store_turned(tensor, packing, n, h, start, rows, columns, tokens, found, WIDTH: tl.constexpr):
    at = own_rows(tensor, packing, n, h, start, WIDTH) + (rows.to(tl.int64) * packing.heads)[None, :] * WIDTH
    tl.store(at + columns[:, None], found, mask=(rows < tokens)[None, :] & (columns < WIDTH)[:, None])


@triton.jit
def _chunk_decays(matrices, spot, depth, form: tl.constexpr):
    """What the rows of a chunk are multiplied by in the chains, and what the state is."""
    of_q, of_a, of_b, factor = 1.0, 1.0, 1.0, 1.0
    if not form.LOW:
        place = matrices.decays + spot * ((5 if form.GATE == 1 else 4) * form.C) + tl.arange(0, form.C)
        of_q, of_a, of_b = tl.load(place), tl.load(place + form.C), tl.load(place + 2 * form.C)
        of_q, of_a, of_b, factor = of_q[None, :], of_a[None, :], of_b[None, :], tl.load(place + 3 * form.C)[None, :]
    if form.GATE == 1:
        whole = tl.load(matrices.whole + spot)
    else:
        whole = tl.load(matrices.whole + spot * form.K + depth, mask=depth < form.K, other=0.0)[None, :]
    return of_q, of_a, of_b, factor, whole


@triton.jit
def _first_state(states, pair, room, here, turn, depth, columns, form: tl.constexpr):
    """The state a program begins with, turned to (V, K): the given one if `here`, else zeros, with `turn` the rows of
    the identity, or what `chain_segments` found."""
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    state = tl.zeros([BV, BK], tl.float32)
    inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
    if states.first is not None:
        at = states.first + pair.to(tl.int64) * (form.K * form.V) + depth[None, :] * form.V + columns[:, None]
        state = tl.load(at, mask=inside & here, other=0.0)
    if form.ENDS:
        state = tl.where(turn & (depth[None, :] == columns[:, None]), 1.0, state)
    elif states.starts is not None:
        at = states.starts + room * (form.K * form.V) + columns[:, None] * form.K + depth[None, :]
        state += tl.load(at, mask=inside & (here == 0), other=0.0)
    return state


@triton.jit
def _keep_last(states, pair, room, there, turn, state, depth, columns, tokens, form: tl.constexpr):
    """Writes the state that a pass ends with if `there`, or N or, with `turn`, M of a segment."""
    none = tl.minimum(tokens, 0)  # 0 that keeps the compiler from holding these places through the loop
    depth, columns = depth + none, columns + none
    if form.ENDS:
        row = columns + tl.where(turn, form.V, 0)
        inside = (depth < form.K)[None, :] & (columns < tl.where(turn, form.K, form.V))[:, None]
        at = states.made + room * (form.K * (form.V + form.K)) + row[:, None] * form.K + depth[None, :]
        tl.store(at, state, mask=inside)
    elif states.last is not None:
        inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
        at = states.last + pair.to(tl.int64) * (form.K * form.V) + depth[None, :] * form.V + columns[:, None]
        tl.store(at, state, mask=inside & there)


@triton.jit
def _keep_state(place, state, depth, columns, form: tl.constexpr):
    """A chunk's state of (V, K)."""
    at = place + columns[:, None] * form.K + depth[None, :]
    if form.K % form.BK == 0 and form.V % form.BV == 0:
        tl.store(at, state)
    else:
        tl.store(at, state, mask=(depth < form.K)[None, :] & (columns < form.V)[:, None])


@triton.jit
def chain_states(reads, v, o, matrices, states, packing, scale, form: tl.constexpr):
    """A sequence, or a segment of it, and head and BV columns of v, a chunk at a time: the outputs, or the state before
    each chunk, or N and M of a segment.

    All is transposed: what one product leaves in registers is the left side of the next, without a way through shared
    memory."""
    n, h, start, tokens, kept, room, segment, end, lowest, beyond = _of_chain(packing)
    size: tl.constexpr = form.K * form.V
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    parts: tl.constexpr = (form.V + BV - 1) // BV
    part = tl.program_id(0) % packing.slices
    here, there, turn = part >= 0, part >= 0, part < 0
    if states.made is not None:
        turn = part >= parts
        here, there = (segment == 0) & (part < parts), segment == end
        if segment > end:
            return
        if form.ENDS and (segment == end) | (turn & (segment == 0)):
            return
    depth, columns = tl.arange(0, BK), (part - tl.where(turn, parts, 0)) * BV + tl.arange(0, BV)
    pair = n * packing.heads + h
    state = _first_state(states, pair, room, here, turn, depth, columns, form)
    from_q, from_a, from_b, from_k = _read_heads(reads, packing, n, h, start, form)
    from_v = find_head(v, n, h, packing.ends, start)
    with_v = tokens
    if form.ENDS:
        with_v = tl.where(turn, 0, tokens)
    to = from_v
    if form.OUT:
        to = find_head(o, n, h, packing.ends, start)
    place, step = _squares(matrices, packing, n, h, start, kept, form)
    for chunk in range(lowest, beyond):
        rows = chunk * form.C + tl.arange(0, form.C)
        spot = kept + chunk
        of_q, of_a, of_b, factor, whole = _chunk_decays(matrices, spot, depth, form)
        tv = _turned_tile(v, from_v, rows, columns, with_v, form.V, BV)
        low = state.to(tv.dtype)
        if not form.OUT and not form.ENDS:
            _keep_state(states.before + spot * size, low, depth, columns, form)
        ta = tile_of(reads.a, from_a, rows, depth, tokens, form.K, BK)
        tb = ta
        if form.GATE == 2:
            tb = tile_of(reads.b, from_b, rows, depth, tokens, form.K, BK)
        x = of_a * _dot(low, tl.trans(ta), tv, form)
        solve = tl.trans(_load_square(matrices.solve, place, step, chunk, rows, tokens, form))
        if form.LOW:
            read = _load_square(matrices.read, place, step, chunk, rows, tokens, form)
            x += _dot(tv, tl.trans(read), tv, form)
            u = x + _dot(x, solve, tv, form)
            solved = u
        else:
            x = tv - x
            solved = x - _dot(factor * x, solve, tv, form)
            u = factor * solved
        if form.OUT:
            tq = tile_of(reads.q, from_q, rows, depth, tokens, form.K, BK)
            out = of_q * _dot(low, tl.trans(tq), tv, form)
            pairs = _load_square(matrices.pair, place, step, chunk, rows, tokens, form)
            out += _dot(u, tl.trans(pairs), tv, form)
            if form.LOW:
                plain = _load_square(matrices.plain, place, step, chunk, rows, tokens, form)
                out += _dot(tv, tl.trans(plain), tv, form)
            seen = (rows < tokens)[None, :] & (columns < form.V)[:, None]
            tl.store(to + rows.to(tl.int64)[None, :] * o.token + columns[:, None], scale * out, mask=seen)
        elif not form.ENDS:
            _store_turned(states.solved, packing, n, h, start, rows, columns, tokens, solved, form.V)
        state = state * whole + _dot(of_b * u, tb, tv, form)
        if form.LOW:
            tk = tile_of(reads.k, from_k, rows, depth, tokens, form.K, BK)
            state += _dot(tv, tk, tv, form)
    _keep_last(states, pair, room, there, turn, state, depth, columns, tokens, form)


@triton.jit
def chain_segments(both, starts, packing, form: tl.constexpr, REVERSE: tl.constexpr):
    """From N and M of a sequence's segments, in `both`, the state before each, in order; or with time reversed the
    gradient of the state after each, where M is transposed."""
    n, h = tl.program_id(1) // packing.heads, tl.program_id(1) % packing.heads
    _start, tokens = find_span(packing, n)
    unit = packing.span * packing.unit
    room = tl.program_id(1).to(tl.int64) * packing.rooms
    if packing.ends is not None:
        room = h.to(tl.int64) * packing.rooms + _room(packing, n, unit)
    count = tl.cdiv(tokens, unit)
    if count < 2:
        return
    depth, columns = tl.arange(0, form.BK), tl.program_id(0) * form.BV + tl.arange(0, form.BV)
    own = columns[:, None] * form.K + depth[None, :]
    inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
    square = tl.arange(0, form.BK)[:, None] * form.K + depth[None, :]
    within = (depth < form.K)[:, None] & (depth < form.K)[None, :]
    size: tl.constexpr = form.K * (form.V + form.K)
    first = count - 1 if REVERSE else 0
    state = tl.load(both + (room + first) * size + own, mask=inside, other=0.0)
    at = both + (room + (count - 2 if REVERSE else 1)) * size
    more = count > 2
    move = tl.load(at + form.V * form.K + square, mask=within & more, other=0.0)
    made = tl.load(at + own, mask=inside & more, other=0.0)
    for step in range(1, count - 1):
        segment = count - 1 - step if REVERSE else step
        tl.store(starts + (room + segment) * (form.K * form.V) + own, state, mask=inside)
        at = both + (room + (segment - 1 if REVERSE else segment + 1)) * size
        more = step < count - 2  # the next segment's, under way while this one's product runs
        next_move = tl.load(at + form.V * form.K + square, mask=within & more, other=0.0)
        next_made = tl.load(at + own, mask=inside & more, other=0.0)
        if REVERSE:
            move = tl.trans(move)
        state = made + tl.dot(state, move, input_precision=form.PRECISION)
        move, made = next_move, next_made
    tl.store(starts + (room + count - 1 - first) * (form.K * form.V) + own, state, mask=inside)


@triton.jit
def chain_gradients(reads, do, matrices, states, grads, packing, scale, form: tl.constexpr):
    """As `chain_states` with time reversed: the gradient of the state after each chunk, of the initial state, and of
    v and beta."""
    n, h, start, tokens, kept, room, segment, end, lowest, beyond = _of_chain(packing)
    size: tl.constexpr = form.K * form.V
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    part = tl.program_id(0) % packing.slices
    here, there, turn = part >= 0, part >= 0, part < 0
    if states.made is not None:
        here, there = segment == end, segment == 0
        if segment > end:
            return
        if form.ENDS and segment == 0:
            return
    depth, columns = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    pair = n * packing.heads + h
    state = _first_state(states, pair, room, here, turn, depth, columns, form)
    from_q, from_a, from_b, from_k = _read_heads(reads, packing, n, h, start, form)
    from_do = find_head(do, n, h, packing.ends, start)
    zero = tl.arange(0, 1)
    place, step = _squares(matrices, packing, n, h, start, kept, form)
    for turned in range(beyond - lowest):
        chunk = beyond - 1 - turned
        rows = chunk * form.C + tl.arange(0, form.C)
        spot = kept + chunk
        of_q, of_a, of_b, factor, whole = _chunk_decays(matrices, spot, depth, form)
        tdo = _turned_tile(do, from_do, rows, columns, tokens, form.V, BV)
        low = state.to(tdo.dtype)
        if not form.ENDS:
            _keep_state(states.later + spot * size, low, depth, columns, form)
        ta = tile_of(reads.a, from_a, rows, depth, tokens, form.K, BK)
        tb = ta
        if form.GATE == 2:
            tb = tile_of(reads.b, from_b, rows, depth, tokens, form.K, BK)
        pairs = _load_square(matrices.pair, place, step, chunk, rows, tokens, form)
        du = of_b * _dot(low, tl.trans(tb), tdo, form) + scale * _dot(tdo, pairs, tdo, form)
        solve = _load_square(matrices.solve, place, step, chunk, rows, tokens, form)
        if form.LOW:
            dx = du + _dot(du, solve, tdo, form)
            if not form.ENDS:
                _store_turned(states.turned, packing, n, h, start, rows, columns, tokens, dx, form.V)
                tk = tile_of(reads.k, from_k, rows, depth, tokens, form.K, BK)
                read = _load_square(matrices.read, place, step, chunk, rows, tokens, form)
                dv = _dot(dx, read, tdo, form) + _dot(low, tl.trans(tk), tdo, form)
                plain = _load_square(matrices.plain, place, step, chunk, rows, tokens, form)
                dv += scale * _dot(tdo, plain, tdo, form)
                _store_turned(grads.v, packing, n, h, start, rows, columns, tokens, dv, form.V)
        else:
            dx = du - _dot(factor * du, solve, tdo, form)
            dv = factor * dx
            if not form.ENDS:
                from_solved = own_rows(states.solved, packing, n, h, start, form.V)
                seen = (rows < tokens)[None, :] & (columns < form.V)[:, None]
                at = from_solved + (rows.to(tl.int64) * packing.heads)[None, :] * form.V + columns[:, None]
                solved = tl.load(at, mask=seen, other=0.0)
                sums = grads.beta + part.to(tl.int64) * packing.all_rows
                store_rows(sums, packing, n, h, start, rows, zero, tokens, tl.sum(dx * solved, 0)[:, None], 1)
                _store_turned(grads.v, packing, n, h, start, rows, columns, tokens, dv, form.V)
            dx = -dv
        tq = tile_of(reads.q, from_q, rows, depth, tokens, form.K, BK)
        state = state * whole + _dot(scale * of_q * tdo, tq, tdo, form)
        state += _dot(of_a * dx, ta, tdo, form)
    _keep_last(states, pair, room, there, turn, state, depth, columns, tokens, form)


@triton.jit
def _sum_by_states(x, step, states, at, rows, depth, tokens, form: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (of V columns) times the transposed states of a chunk, WIDTH of their rows."""
    C: tl.constexpr = form.C
    found = tl.zeros([C, WIDTH], tl.float32)
    for part in range((form.V + form.BV - 1) // form.BV):
        columns = part * form.BV + tl.arange(0, form.BV)
        tile = tile_at(x, step, rows, columns, tokens, form.V)
        inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
        state = tl.load(states + at + columns[:, None] * form.K + depth[None, :], mask=inside, other=0.0)
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
        spots = columns[:, None] * form.K + depth[None, :]
        inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
        before = tl.load(states.before + at + spots, mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(before * tl.load(states.later + at + spots, mask=inside, other=0.0).to(tl.float32), 0)
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
def diagonal_of(x, form: tl.constexpr):
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    return tl.sum(tl.where(i == j, x, 0.0), 1)[:, None]


@triton.jit
def _across_gates(both, form: tl.constexpr):
    """For each gate the sum over pairs of an earlier row and this row or a later one."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    if form.SINGLE:
        later = tl.cumsum(both, 0, reverse=True)
    else:
        later = chosen_sums(j >= i, both, both.to(tl.float16) if form.PRECISION == "tf32x3" else both.to(tl.bfloat16))
    return tl.sum(tl.where(i > j, later, 0.0), 1)


@triton.jit
def _through_lengths(found, x, shrink, form: tl.constexpr):
    """From the gradient of rows whose lengths are constants that of the rows."""
    if form.NORMALIZE:
        wide = x.to(tl.float32)
        found -= wide * (shrink * shrink * tl.sum(found * wide, 1))[:, None]
    return found


@triton.jit
def gradients_by_token(q, k, gate, do, matrices, states, grads, packing, scale, form: tl.constexpr):
    """The delta rule with a gate per token: a chunk's gradients of q, k and the gate. One over the lengths of q and k
    is part of the weights of pairs and of the rows' decays."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    BK: tl.constexpr = form.BK
    C: tl.constexpr = form.C
    depth = tl.arange(0, BK)
    rows = first + tl.arange(0, C)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    at = spot * (form.K * form.V)
    of_q, of_a, of_b, factor, whole = _chunk_decays(matrices, spot, depth, form)
    of_q, of_a, of_b = tl.reshape(of_q, (C,)), tl.reshape(of_a, (C,)), tl.reshape(of_b * factor, (C,))
    shrink_q, shrink_k = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    if form.NORMALIZE:
        place = matrices.lengths + spot * (2 * C) + tl.arange(0, C)
        shrink_q, shrink_k = tl.load(place), tl.load(place + C)
    from_do, step = find_head(do, n, h, packing.ends, start), packing.heads * form.V
    from_dv = own_rows(grads.v, packing, n, h, start, form.V)
    from_solved = own_rows(states.solved, packing, n, h, start, form.V)
    tq = rows_of(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form)
    tk = rows_of(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form)
    g = _gates(gate, find_head(gate, n, h, packing.ends, start), first, depth, tokens, 0, form)
    weights = _apart(g, form) * factor * shrink_k[None, :]
    pairs_q = weights * (scale * shrink_q)[:, None]
    pairs_q *= _sum_of_pairs(from_do, do.token, from_solved, step, rows, tokens, form)
    both = _dot(tq, tl.trans(tk), tk, form) * pairs_q
    pairs_k = tl.where(i > j, -weights * shrink_k[:, None], 0.0)
    pairs_k *= _sum_of_pairs(from_dv, step, from_solved, step, rows, tokens, form)
    both += _dot(tk, tl.trans(tk), tk, form) * pairs_k
    dg = _across_gates(both, form)
    pairs_q, pairs_k = pairs_q.to(tk.dtype), pairs_k.to(tk.dtype)
    dq = (scale * of_q)[:, None] * _sum_by_states(
        from_do, do.token, states.before, at, rows, depth, tokens, form, BK
    )  # fmt: skip
    dk = -of_a[:, None] * _sum_by_states(from_dv, step, states.before, at, rows, depth, tokens, form, BK)
    since = tl.sum(tq * dq + tk * dk, 1)
    dq = _through_lengths(dq + _dot(pairs_q, tk, tk, form), tq, shrink_q, form)
    db = of_b[:, None] * _sum_by_states(from_solved, step, states.later, at, rows, depth, tokens, form, BK)
    until = tl.sum(tk * db, 1)
    dk += db + _dot(pairs_k, tk, tk, form)
    turned = _dot(tl.trans(tq), pairs_q, tk, form)  # Hopper cannot transpose a sum for another product
    dk += tl.trans(turned + _dot(tl.trans(tk), pairs_k, tk, form))
    dg += whole * tl.sum(_held(states, at, depth, form, BK), 0)
    dg += tl.cumsum(since, 0, reverse=True) + tl.sum(tl.where(i > j, until[None, :], 0.0), 1)
    tl.debug_barrier()  # all have read `solved`, which may lie in dq
    store_rows(grads.q, packing, n, h, start, rows, depth, tokens, dq, form.K)
    dk = _through_lengths(dk, tk, shrink_k, form)
    store_rows(grads.k, packing, n, h, start, rows, depth, tokens, dk, form.K)
    store_rows(grads.g, packing, n, h, start, rows, tl.arange(0, 1), tokens, dg[:, None], 1)


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
    tq = rows_of(q, find_head(q, n, h, packing.ends, start), rows, depth, tokens, form)
    tk = rows_of(k, find_head(k, n, h, packing.ends, start), rows, depth, tokens, form)
    if form.NORMALIZE:
        tq, tk = (tq * shrink_q[:, None]).to(tq.dtype), (tk * shrink_k[:, None]).to(tk.dtype)
    ta, tb = tk, tk
    sign = -1.0
    if form.LOW:
        sign = 1.0
        ta = rows_of(a, find_head(a, n, h, packing.ends, start), rows, depth, tokens, form)
        tb = rows_of(b, find_head(b, n, h, packing.ends, start), rows, depth, tokens, form)
    place = find_head(gate, n, h, packing.ends, start)
    g, late, early, after, whole = _decays(gate, place, first, depth, tokens, form)
    dq = scale * late * _sum_by_states(from_do, do_step, states.before, at, rows, depth, tokens, form, BS)
    da = sign * early * _sum_by_states(from_dx, step, states.before, at, rows, depth, tokens, form, BS)
    db = after * _sum_by_states(from_solved, step, states.later, at, rows, depth, tokens, form, BS)
    db *= factor[:, None]
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    dg = tl.zeros_like(late) + (whole * _held(states, at, depth, form, BS))[None, :]
    dk = db
    if form.LOW:
        from_v = find_head(v, n, h, packing.ends, start)
        dk = after * _sum_by_states(from_v, v.token, states.later, at, rows, depth, tokens, form, BS)
        dg += sums_of(j >= i, tq * dq, tb, form) + sums_of(j < i, tb * db + tk * dk, tb, form)
        dg += sums_of(j > i, ta * da, tb, form)  # a row's own gate follows its read
    else:
        dg += sums_of(j >= i, tq * dq + ta * da, tb, form) + sums_of(j < i, tb * db, tb, form)
    dq, da, db, dk, dg = _inner_by_channel((dq, da, db, dk, dg), tq, tk, ta, tb, g, pairs, form)
    store_rows(grads.g, packing, n, h, start, rows, depth, tokens, dg, form.K)
    own = diagonal_of(pairs[0], form)
    dq += own * tb
    db += own * tq
    if form.LOW:
        own = diagonal_of(pairs[4], form)
        dq += own * tk
        dk += own * tq
        store_rows(grads.a, packing, n, h, start, rows, depth, tokens, da, form.K)
        store_rows(grads.b, packing, n, h, start, rows, depth, tokens, db, form.K)
    else:
        dk = da + db
    store_rows(grads.q, packing, n, h, start, rows, depth, tokens, dq, form.K)
    store_rows(grads.k, packing, n, h, start, rows, depth, tokens, dk, form.K)
    return tl.sum(tq * dq, 1), tl.sum(tk * dk, 1)


@triton.jit
def _through_length(x, shrink, product, grad, packing, n, h, start, rows, tokens, form: tl.constexpr):
    """Turns the gradient of normalized rows, already written, into that of the rows."""
    place, found = find_head(x, n, h, packing.ends, start), own_rows(grad, packing, n, h, start, form.K)
    for part in range((form.K + form.BS - 1) // form.BS):
        depth = part * form.BS + tl.arange(0, form.BS)
        unit = rows_of(x, place, rows, depth, tokens, form) * shrink[:, None]
        whole = tile_at(found, packing.heads * form.K, rows, depth, tokens, form.K)
        whole = shrink[:, None] * (whole - unit * product[:, None])
        store_rows(grad, packing, n, h, start, rows, depth, tokens, whole, form.K)


@triton.jit
def gradients_by_channel(
    q, k, v, a, b, gate, beta, do, matrices, states, grads, packing, scale, form: tl.constexpr
):  # fmt: skip
    """A gate per channel: a chunk's gradients of q, k, a, b and the gate, some channels at a time; in float32."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    rows = first + tl.arange(0, C)
    factor = tl.full([C], 1.0, tl.float32)
    from_do, step = find_head(do, n, h, packing.ends, start), packing.heads * form.V
    from_solved = own_rows(states.solved, packing, n, h, start, form.V)
    sign, from_dx = 1.0, own_rows(grads.v, packing, n, h, start, form.V)
    if form.LOW:
        from_dx = own_rows(states.turned, packing, n, h, start, form.V)
    else:
        sign, factor = -1.0, beta_of(beta, find_head(beta, n, h, packing.ends, start), rows, tokens, form)
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


@triton.jit
def _one_row(x, place, t, columns, WIDTH: tl.constexpr):
    return tl.load(place + t.to(tl.int64) * x.token + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _rows_of_step(tensors, places, t, depth, columns, form: tl.constexpr, REVERSE: tl.constexpr):
    """What a step of the recurrence from row t takes: the row that reads, the one that writes what was read, the gate,
    and the two of the plain product, which with time reversed are those of the row before."""
    q, k, v, a, b, gate, do = tensors
    at_q, at_k, at_v, at_a, at_b, at_gate, at_do = places
    one, other = _one_row(a, at_a, t, depth, form.K), _one_row(b, at_b, t, depth, form.K)
    decay = tl.exp2(_one_row(gate, at_gate, t, depth, form.K) * 1.4426950408889634)
    if REVERSE:
        before = tl.maximum(t - 1, 0)
        outer, values = _one_row(q, at_q, before, depth, form.K), _one_row(do, at_do, before, columns, form.V)
        found = other, one, decay, outer, values
    else:
        found = one, other, decay, _one_row(k, at_k, t, depth, form.K), _one_row(v, at_v, t, columns, form.V)
    return found


@triton.jit
def end_rows(q, k, v, a, b, gate, do, states, grad, packing, scale, form: tl.constexpr, REVERSE: tl.constexpr):
    """RWKV-7: the last row's gradient of b, from the states before chunks, or the second row's of a, from the gradients
    of those after chunks.

    They are one number times a row of another input: scale (do . u) q, and (v . dx) k of the first row, where no state
    is given. Where such a number cancels, all that U or the gradient of X was rounded by is left. So the recurrence
    makes it again, in float32, from a state that is kept LOOK rows away or more."""
    n, h = tl.program_id(0) // packing.heads, tl.program_id(0) % packing.heads
    start, tokens = find_span(packing, n)
    if tokens < 2:
        return
    BV: tl.constexpr = form.BV
    depth = tl.arange(0, form.BK)
    room = tl.program_id(0).to(tl.int64) * packing.chunks
    if packing.ends is not None:
        room = h.to(tl.int64) * packing.chunks + _room(packing, n, packing.unit)
    tensors = q, k, v, a, b, gate, do
    places = (
        find_head(q, n, h, packing.ends, start), find_head(k, n, h, packing.ends, start),
        find_head(v, n, h, packing.ends, start), find_head(a, n, h, packing.ends, start),
        find_head(b, n, h, packing.ends, start), find_head(gate, n, h, packing.ends, start),
        find_head(do, n, h, packing.ends, start),
    )  # fmt: skip
    of_outer = 1.0
    if REVERSE:
        of_outer = scale
        chunk = tl.minimum(1 + LOOK, tokens - 1) // form.C
        first = tl.minimum(chunk * form.C + form.C, tokens) - 1
        last = 0 * tokens + 1
    else:
        chunk = tl.maximum(tokens - 1 - LOOK, 0) // form.C
        first, last = chunk * form.C, tokens - 1
    sums = 0.0
    for part in range((form.V + BV - 1) // BV):
        columns = part * BV + tl.arange(0, BV)
        at = states + (room + chunk) * (form.K * form.V) + columns[:, None] * form.K + depth[None, :]
        inside = (depth < form.K)[None, :] & (columns < form.V)[:, None]
        state = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if REVERSE:
            left, right = _one_row(do, places[6], first, columns, form.V), _one_row(q, places[0], first, depth, form.K)
            state += left[:, None] * (scale * right)[None, :]
        one, other, decay, outer, values = _rows_of_step(tensors, places, first, depth, columns, form, REVERSE)
        for step in range(tl.abs(last - first)):
            t = first - step - 1 if REVERSE else first + step + 1  # the next row, under way while this one is used
            next_one, next_other, next_decay, next_outer, next_values = _rows_of_step(
                tensors, places, t, depth, columns, form, REVERSE
            )  # fmt: skip
            seen = tl.sum(state * one[None, :], 1)
            state = state * decay[None, :] + seen[:, None] * other[None, :]
            state += (of_outer * values)[:, None] * outer[None, :]
            one, other, decay, outer, values = next_one, next_other, next_decay, next_outer, next_values
        seen = tl.sum(state * one[None, :], 1)
        if REVERSE:
            sums += tl.sum(seen * _one_row(v, places[2], last - 1, columns, form.V), 0)
        else:
            sums += tl.sum(seen * _one_row(do, places[6], last, columns, form.V), 0)
    if REVERSE:
        found = sums * _one_row(k, places[1], last - 1, depth, form.K)
    else:
        found = scale * sums * _one_row(q, places[0], last, depth, form.K)
    to = own_rows(grad, packing, n, h, start, form.K) + last.to(tl.int64) * (packing.heads * form.K)
    tl.store(to + depth, found, mask=depth < form.K)
