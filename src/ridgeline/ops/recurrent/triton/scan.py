"""The chunk engine of states that only decay: one Triton kernel that is the forward pass and each of its gradients.

With G the running sum of the log gates, all of them are

    out_i = scale * sum over j of (a_i . b_j) e^(G_i - G_j) c_j

over j <= i (o from q, k, v; dq from do, v, k), or with time reversed over j >= i (dk from v, do, q; dv from k, q, do).
A program keeps the state, the sum over all earlier chunks, in registers in float32, and takes a chunk at a time.
A gate per channel weighs the channels of a and b (o, dv), or those of c and out (dq, dk).

No factor exceeds 1. A scalar gate is a matrix of e^(G_i - G_j). For gates per channel a chunk is halved again and
again: at a level with blocks of n rows, rows of a right block see columns of the left block beside it, with the factors
e^(decay since the block's edge) and e^(decay until the edge). So the exponents are sums of gates, never differences.
The gradient of a gate is the sum over the pairs of an earlier row and this row or a later one, (k_j . q_i) and what
they carry. As the difference of two sums of all pairs its roundings would add up over time, so it is four sums in which
nothing cancels: pairs within a chunk, on the gate's two sides; earlier chunks' keys with the chunk's q, a suffix sum of
q dq from the state alone; the chunk's k with later chunks' queries, a prefix sum of k dk from the state's gradient
alone; and keys before the chunk with queries after it, <state, its gradient>, for which each chunk's state is kept.

Mamba-2 weighs each token's v by its step size, and adds D v to o. The weight is a factor of the pairs and of what the
state gets, so no weighted v is written. The pass that makes dv also sums the gradients of step sizes and D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.tiles.online_softmax import exact_exp


class Rows(NamedTuple):
    """A tensor (B, T, heads, columns) with its steps; `group` value heads share one of its heads."""

    data: Any
    batch: Any
    token: Any
    head: Any
    group: Any


class States(NamedTuple):
    """States (sequences * heads, ...) in float32; steps of a state's rows and columns."""

    starts: Any  # states before each segment, (segments, sequences * heads, D, N); None for one segment
    first: Any  # the scan begins with it; None for zeros
    last: Any  # written at the end, or None
    row: Any
    column: Any
    marks: Any  # states before chunks, (sequences * heads, marks, D, N), or packed (heads, marks, D, N), or None
    decays: Any  # sums of the gates in each segment


class Gradient(NamedTuple):
    """For the gradient of the gate: q, or k, and dg, to which each pass brings its part."""

    data: Any  # q or k, with the fields of Rows
    batch: Any
    token: Any
    head: Any
    group: Any
    sums: Any  # dg, (B, T, heads, columns), float32; one column a slice for a gate per token
    sums_batch: Any
    sums_token: Any
    sums_head: Any
    bonus: Any  # partial sums of du (programs, N), float32, or None


class Steps(NamedTuple):
    """Mamba-2's step sizes (B, T, heads), with the fields of Rows, and D (heads,), both float32; D may be None."""

    data: Any
    batch: Any
    token: Any
    head: Any
    group: Any
    skip: Any


class Sequences(NamedTuple):
    ends: Any  # cu_seqlens or None
    tokens: Any  # of each sequence without cu_seqlens
    heads: Any
    segment: Any  # tokens of a segment
    segments: Any
    marks: Any  # of a head, per sequence or in all packed ones


class Form(NamedTuple):
    """What a kernel is compiled for."""

    D: int  # columns of a and b
    N: int  # columns of c and out
    BD: int
    BN: int
    C: int  # rows of a chunk
    LEVELS: int  # log2 of C
    GATE: int  # 0: none, 1: per token, 2: per channel
    INSIDE: bool  # whether the channels of a gate are those of a and b
    REVERSE: bool
    SHIFT: bool  # rows see the state before their own gate (RWKV-6)
    SINGLE: bool  # float32 data
    PRECISION: str
    GRADIENT: bool  # whether the gate has one
    BONUS: bool  # whether du, or D's gradient, is summed
    STEP: int = 0  # Mamba-2's step sizes weigh 1: b's rows, 2: a's rows, 3: the results, and their gradients are summed
    SKIP: bool = False  # whether there is a D, by which c's rows join the results


@triton.jit
def find_head(rows, n, h, ends, start):
    """Where a sequence's head begins in a tensor of rows."""
    base = rows.data + (h // rows.group).to(tl.int64) * rows.head
    if ends is None:
        base += n.to(tl.int64) * rows.batch
    return base + start * rows.token


@triton.jit
def tile_at(base, step, rows, columns, tokens, width):
    here = (rows < tokens)[:, None] & (columns < width)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * step + columns[None, :], mask=here, other=0.0)


@triton.jit
def decay_of(x, form: tl.constexpr):
    return exact_exp(x, tl.float32 if form.SINGLE else tl.bfloat16)


@triton.jit
def half_sums(g, level: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """The sums of g over the left and over the right block of each pair of blocks of 2^level rows, for each row."""
    pairs: tl.constexpr = C >> (level + 1)
    both: tl.constexpr = 2 << level
    blocks = tl.reshape(g, (pairs, both, W))
    right = (tl.arange(0, both) >> level)[None, :, None] == 1
    left = tl.sum(tl.where(right, 0.0, blocks), 1)
    other = tl.sum(tl.where(right, blocks, 0.0), 1)
    left = tl.reshape(tl.broadcast_to(left[:, None, :], (pairs, both, W)), (C, W))
    other = tl.reshape(tl.broadcast_to(other[:, None, :], (pairs, both, W)), (C, W))
    return left, other


@triton.jit
def _by_matrix(a, b, c, g, weight, own, form: tl.constexpr, CROSSING: tl.constexpr):
    """The part of a chunk's rows that comes from the chunk itself, with at most a gate per token, and each row's decay
    since the chunk began and until it ends. With CROSSING and time reversed also each gate's gradient from the chunk's
    own pairs: the sum over pairs of an earlier row and this row or a later one. weight: of rows, where form.STEP is."""
    C: tl.constexpr = form.C
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    seen = j >= i if form.REVERSE else i >= j
    scores = tl.dot(a, tl.trans(b), input_precision=form.PRECISION)
    before = tl.zeros([C], tl.float32)
    after = before
    if form.GATE == 1:
        before = tl.cumsum(g, 0)
        after = tl.sum(tl.where(i > j, g[:, None], 0.0), 0)
        if form.SINGLE:  # sums of the gates between two rows, which differences of running sums would round
            if form.REVERSE:
                apart = tl.cumsum(tl.where(j > i, g[None, :], 0.0), 1)
            else:
                apart = tl.cumsum(tl.where(i > j, g[:, None], 0.0), 0)
        else:
            apart = before[None, :] - before[:, None] if form.REVERSE else before[:, None] - before[None, :]
        scores *= decay_of(tl.where(seen, apart, 0.0), form)
    if form.STEP == 1:
        scores *= weight[None, :]
    elif form.STEP == 2:
        scores *= weight[:, None]
    scores = tl.where(seen, scores, 0.0)
    out = tl.dot(scores.to(c.dtype), c, input_precision=form.PRECISION)
    crossing = tl.zeros([C], tl.float32)
    if CROSSING and form.REVERSE:  # rows are keys and columns queries
        later = tl.cumsum(scores * tl.dot(own, tl.trans(c), input_precision=form.PRECISION), 1, reverse=True)
        crossing = tl.sum(tl.where(i < j, later, 0.0), 0)
    return out, before, after, crossing


@triton.jit
def _between(same, x, like, form: tl.constexpr):
    """Each row's sum of a pass's terms x over the rows `same` on the gate's side: q's rows from this one on (with SHIFT
    without it), and with time reversed k's rows before it."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    if form.REVERSE:
        chosen = same & (j < i)
    elif form.SHIFT:
        chosen = same & (j > i)
    else:
        chosen = same & (j >= i)
    return sums_of(chosen, x, like, form)


@triton.jit
def to_tf32(x):
    """Rounds to TF32, halves away from zero. A product cuts the other bits off, which makes sums 0.03% too small."""
    power = (x.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)  # sign and exponent alone
    return ((x + power * 0.00048828125).to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def sums_of(chosen, x, like, form: tl.constexpr):
    """The sums of the chosen rows of x, for each row."""
    if like.dtype == tl.float16:  # x may be beyond its range
        found = tl.dot(chosen.to(tl.float32), to_tf32(x), input_precision="tf32")
    else:
        found = tl.dot(chosen.to(like.dtype), x.to(like.dtype), input_precision=form.PRECISION)
    return found


@triton.jit
def _by_halves(a, b, c, g, u, own, form: tl.constexpr, CROSSING: tl.constexpr):
    """As `_by_matrix` without the diagonal, for a gate per channel; and the diagonal's weights. With CROSSING each pass
    of the two finds its side of the chunk's own pairs."""
    C: tl.constexpr = form.C
    BN: tl.constexpr = form.BN
    LEVELS: tl.constexpr = form.LEVELS
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    W: tl.constexpr = form.BD if form.INSIDE else form.BN
    before = tl.zeros([C, W], tl.float32) if form.SHIFT else g
    after = tl.zeros([C, W], tl.float32)
    products = a.to(tl.float32) * b.to(tl.float32)
    crossing = tl.zeros([C, W], tl.float32)
    if form.INSIDE:
        diagonal = tl.sum(products if u is None else products * u[None, :], 1)
        scores = tl.zeros([C, C], tl.float32)
        out = tl.zeros([C, BN], tl.float32)
    else:
        diagonal = tl.sum(products, 1)
        scores = tl.dot(a, tl.trans(b), input_precision=form.PRECISION)
        out = tl.zeros([C, BN], tl.float32)
    for level in tl.static_range(LEVELS):
        beside = (i >> level) - (j >> level) == (-1 if form.REVERSE else 1)
        beside = beside & (((i >> level) & 1) == (0 if form.REVERSE else 1))
        late, soon = decay_of(before, form), decay_of(after, form)
        if form.REVERSE:
            late, soon = soon, late
        if form.INSIDE:
            left, right = (a * late).to(a.dtype), (b * soon).to(b.dtype)
            scores += tl.where(beside, tl.dot(left, tl.trans(right), input_precision=form.PRECISION), 0.0)
        else:
            some = tl.where(beside, scores, 0.0).to(c.dtype)
            found = late * tl.dot(some, (c * soon).to(c.dtype), input_precision=form.PRECISION)
            out += found
            if CROSSING:
                crossing += _between((i >> level) == (j >> level), own.to(tl.float32) * found, own, form)
        left, right = half_sums(g, level, C, W)
        second = ((row >> level) & 1)[:, None] == 1
        before += tl.where(second, left, 0.0)
        after += tl.where(second, 0.0, right)
    if form.INSIDE:
        out = tl.dot(scores.to(c.dtype), c, input_precision=form.PRECISION)
    return out, diagonal, before, after, crossing


@triton.jit
def _across(state, a, b, c, g, weight, before, after, up, down, form: tl.constexpr):
    """What a chunk's rows get from the state (times `down`), and the state after the chunk (new pairs times `up`).
    weight: of rows, where form.STEP is."""
    left, right = a, c
    late, soon, whole = 1.0, 1.0, 1.0
    if form.GATE > 0:
        late, soon = (
            (decay_of(after, form), decay_of(before, form))
            if form.REVERSE
            else (decay_of(before, form), decay_of(after, form))
        )
        whole = decay_of(tl.sum(g, 0), form)
    if form.STEP == 1:
        soon *= weight
    elif form.STEP == 2:
        late *= weight
    if form.GATE == 1:
        late = late[:, None]  # type: ignore[index]
        right = (c * soon[:, None]).to(c.dtype)  # type: ignore[index]
    elif form.GATE == 2 and form.INSIDE:
        left = (a * late).to(a.dtype)
        late = 1.0
        b = (b * soon).to(b.dtype)
        whole = whole[:, None]  # type: ignore[index]
    elif form.GATE == 2:
        right = (c * soon).to(c.dtype)
        whole = whole[None, :]  # type: ignore[index]
    out = late * tl.dot(left, state.to(a.dtype), input_precision=form.PRECISION)
    new = tl.dot(tl.trans(b), right, input_precision=form.PRECISION)
    return out * down, state * whole + up * new


@triton.jit
def _meet(mark, state, g, inside, form: tl.constexpr):
    """Forward: keeps the state before a chunk. Reversed: what keys before the chunk bring to its gates' gradients with
    queries after it, the decayed product of that state and `state`, its gradient after the chunk."""
    held = tl.zeros_like(tl.sum(g, 0))
    if form.REVERSE:
        both = tl.load(mark, mask=inside, other=0.0).to(tl.float32) * state
        held = decay_of(tl.sum(g, 0), form) * (tl.sum(both, 0) if form.GATE == 2 else tl.sum(tl.sum(both, 0), 0))
    else:
        tl.store(mark, state, mask=inside)
    return held


@triton.jit
def _gate_sums(place, rows, columns, part, end, step, own, beyond, crossing, held, form: tl.constexpr):
    """Brings to a chunk's dg what a pass knows: of its rows `own` what they have with the state alone, `beyond`; of the
    chunk's own pairs `crossing`; and reversed, of pairs around the chunk, `held`."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    mine = own.to(tl.float32) * beyond
    if form.GATE == 1:
        spots = rows.to(tl.int64) * step + part
        here = rows < end
        mine = tl.sum(mine, 1)
        found = tl.sum(tl.where(i < j if form.REVERSE else i >= j, mine[:, None], 0.0), 0) + crossing
    else:
        spots = rows.to(tl.int64)[:, None] * step + columns[None, :]
        here = (rows < end)[:, None] & (columns < form.N)[None, :]
        found = _between(j >= 0, mine, own, form) + crossing
    if form.REVERSE:
        found += tl.load(place + spots, mask=here, other=0.0)
        found += held if form.GATE == 1 else held[None, :]
    tl.store(place + spots, found, mask=here)


@triton.jit
def _step_sizes(steps, n, h, sequences, start, rows, end, form: tl.constexpr):
    """The step sizes of a chunk's rows; zeros without."""
    C: tl.constexpr = form.C
    weight = tl.zeros([C], tl.float32)
    if form.STEP > 0:
        at = find_head(steps, n, h, sequences.ends, start)
        weight = tl.load(at + rows.to(tl.int64) * steps.token, mask=rows < end, other=0.0)
    return weight


@triton.jit
def _skip_of(steps, h, form: tl.constexpr):
    """D of a head; 0 without."""
    skip = tl.cast(0.0, tl.float32)
    if form.SKIP:
        skip = tl.load(steps.skip + h)
    return skip


@triton.jit
def find_span(sequences, n):
    """Where a sequence begins, and its tokens."""
    start, tokens = tl.cast(0, tl.int64), sequences.tokens
    if sequences.ends is not None:
        start = tl.load(sequences.ends + n).to(tl.int64)
        tokens = (tl.load(sequences.ends + n + 1) - start).to(tl.int32)
    return start, tokens


@triton.jit
def _gates(gate, place, rows, channels, end, form: tl.constexpr):
    """The gates of a chunk in float32: for each row, or row and channel. A row's decay is 0 from -110 on: sums that had
    come to -inf would have no differences."""
    C: tl.constexpr = form.C
    g = tl.zeros([C], tl.float32)
    if form.GATE == 1:
        g = tl.load(place + rows.to(tl.int64) * gate.token, mask=rows < end, other=0.0).to(tl.float32)
        g = tl.where(g < -110.0, -110.0, g)
    elif form.GATE == 2:
        g = tile_at(place, gate.token, rows, channels, end, form.D if form.INSIDE else form.N).to(tl.float32)
    return g


@triton.jit
def first_state(states, given, segment, ours, inside, form: tl.constexpr, OUT: tl.constexpr):
    """The state before a segment."""
    BD: tl.constexpr = form.BD
    BN: tl.constexpr = form.BN
    state = tl.zeros([BD, BN], tl.float32)
    if states.starts is not None:
        if OUT:
            at = states.starts + segment.to(tl.int64) * tl.num_programs(1) * (form.D * form.N) + ours
            state = tl.load(at, mask=inside, other=0.0)
    elif states.first is not None:
        state = tl.load(states.first + given, mask=inside, other=0.0)
    return state


@triton.jit
def finish(
    states, state, decay, given, segment, ours, inside, channels, form: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """Writes the last state, or without OUT what a segment makes from zero and its decay."""
    if not OUT:
        at = states.starts + segment.to(tl.int64) * tl.num_programs(1) * (form.D * form.N) + ours
        tl.store(at, state, mask=inside)
        spot = segment.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        if form.GATE == 2:
            most: tl.constexpr = form.D if form.INSIDE else form.N
            tl.store(states.decays + spot * most + channels, decay, mask=channels < most)
        elif form.GATE == 1:
            tl.store(states.decays + spot, decay)
    elif states.last is not None and states.starts is None:
        tl.store(states.last + given, state, mask=inside)


@triton.jit
def _of_gradient(gradient, sequences, n, h, pair, start, form: tl.constexpr):
    """Where a head's rows of q, k or v begin, its sums, and the number of its first mark."""
    mine = find_head(gradient, n, h, sequences.ends, start)
    sums = h.to(tl.int64) * gradient.sums_head + start * gradient.sums_token
    if sequences.ends is None:
        sums += n.to(tl.int64) * gradient.sums_batch
        room = pair.to(tl.int64) * sequences.marks
    else:  # each sequence has room for one chunk more than it may need
        room = h.to(tl.int64) * sequences.marks + start // form.C + n
    return mine, sums, room


@triton.jit
def _weigh(found, of_bonus, gradient, sums, rows, end, own, c, weight, skip, form: tl.constexpr):
    """Adds D's part to a chunk's results. In the pass to v, `found` is the gradient of weighted rows and c that of o:
    rows of v, `own`, bring the step sizes' gradients to `gradient`, and D's to `of_bonus`."""
    if form.STEP == 3:
        spots = gradient.sums + sums + rows.to(tl.int64) * gradient.sums_token
        tl.store(spots, tl.sum(own.to(tl.float32) * found, 1), mask=rows < end)
        found *= weight[:, None]
        if form.BONUS:
            of_bonus += tl.sum(own.to(tl.float32) * c.to(tl.float32), 0)
    if form.SKIP:
        found += skip * c
    return found, of_bonus


@triton.jit
def scan_chunks(
    a, b, c, out, gate, bonus, steps, states, gradient, sequences, scale, form: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    """A segment of a sequence and head, and BN columns. Without OUT only the state after it is written."""
    BN: tl.constexpr = form.BN
    slices: tl.constexpr = (form.N + form.BN - 1) // form.BN
    segment, part = tl.program_id(0) // slices, tl.program_id(0) % slices
    pair = tl.program_id(1)
    n, h = pair // sequences.heads, pair % sequences.heads
    start, tokens = find_span(sequences, n)
    depth, columns, inner = tl.arange(0, form.BD), part * BN + tl.arange(0, BN), tl.arange(0, form.C)
    wide: tl.constexpr = form.BD if form.INSIDE else form.BN
    channels = depth if form.INSIDE else columns
    most: tl.constexpr = form.D if form.INSIDE else form.N
    inside = (depth < form.D)[:, None] & (columns < form.N)[None, :]
    plain = depth[:, None] * form.N + columns[None, :]  # in a buffer of ours
    whole = pair.to(tl.int64) * (form.D * form.N)
    given = whole + depth[:, None] * states.row + columns[None, :] * states.column
    state = first_state(states, given, segment, whole + plain, inside, form, OUT)
    u = None
    if bonus is not None:
        u = tl.load(bonus + h // gate.group * most + channels, mask=channels < most, other=0.0).to(tl.float32)
    from_a, from_b = find_head(a, n, h, sequences.ends, start), find_head(b, n, h, sequences.ends, start)
    from_c, to = find_head(c, n, h, sequences.ends, start), find_head(out, n, h, sequences.ends, start)
    from_g = from_a
    if form.GATE > 0:
        from_g = find_head(gate, n, h, sequences.ends, start)
    mine, sums, room = from_a, start, start
    if OUT and (form.GRADIENT or form.STEP == 3):
        mine, sums, room = _of_gradient(gradient, sequences, n, h, pair, start, form)
    up, down = (scale, 1.0) if form.REVERSE else (1.0, scale)
    skip = _skip_of(steps, h, form)
    decay = tl.zeros([wide], tl.float32) if form.GATE == 2 else tl.cast(0.0, tl.float32)
    of_bonus = tl.zeros([BN], tl.float32)
    begin, end = segment * sequences.segment, tl.minimum((segment + 1) * sequences.segment, tokens)
    chunks = tl.maximum(tl.cdiv(end - begin, form.C), 0)
    for step in range(chunks):
        first = begin + (chunks - 1 - step if form.REVERSE else step) * form.C
        rows = first + inner
        ta, tb = tile_at(from_a, a.token, rows, depth, end, form.D), tile_at(from_b, b.token, rows, depth, end, form.D)
        tc = tile_at(from_c, c.token, rows, columns, end, form.N)
        g = _gates(gate, from_g, rows, channels, end, form)
        weight = _step_sizes(steps, n, h, sequences, start, rows, end, form)
        own = tc
        if OUT and form.GRADIENT:
            mark = states.marks + (room + first // form.C) * (form.D * form.N) + plain
            held = _meet(mark, state, g, inside, form)
        if OUT and (form.GRADIENT or form.STEP == 3):
            own = tile_at(mine, gradient.token, rows, columns, end, form.N)
        if form.GATE == 2:
            found, diagonal, before, after, crossing = _by_halves(ta, tb, tc, g, u, own, form, OUT and form.GRADIENT)
        else:
            found, before, after, crossing = _by_matrix(ta, tb, tc, g, weight, own, form, OUT and form.GRADIENT)
        beyond, other = _across(state, ta, tb, tc, g, weight, before, after, up, down, form)
        if OUT:
            found = scale * found + beyond
            if form.GRADIENT:
                _gate_sums(
                    gradient.sums + sums, rows, columns, part, end, gradient.sums_token, own, beyond, scale * crossing,
                    held, form,
                )  # fmt: skip
                if form.BONUS:
                    of_bonus += scale * tl.sum(own.to(tl.float32) * tc.to(tl.float32) * diagonal[:, None], 0)
            if form.GATE == 2:
                own_pair = scale * diagonal[:, None] * tc
                if not form.INSIDE and u is not None:
                    own_pair *= u[None, :]
                found += own_pair
            if form.STEP > 0:
                found, of_bonus = _weigh(
                    found, of_bonus, gradient, sums + part, rows, end, own, tc, weight, skip, form
                )  # fmt: skip
            there = (rows < end)[:, None] & (columns < form.N)[None, :]
            tl.store(to + rows.to(tl.int64)[:, None] * out.token + columns[None, :], found, mask=there)
        state = other
        decay += tl.sum(g, 0)
    if OUT and form.BONUS:
        spot = (segment.to(tl.int64) * tl.num_programs(1) + pair) * form.N
        tl.store(gradient.bonus + spot + columns, of_bonus, mask=columns < form.N)
    finish(states, state, decay, given, segment, whole + plain, inside, channels, form, OUT)


@triton.jit
def chain_segments(states, segments, form: tl.constexpr):
    """Turns the states that segments make from zero into the states before them, in order, and writes the last one."""
    BD: tl.constexpr = form.BD
    BN: tl.constexpr = form.BN
    pair, columns = tl.program_id(1), tl.program_id(0) * form.BN + tl.arange(0, form.BN)
    depth = tl.arange(0, form.BD)
    inside = (depth < form.D)[:, None] & (columns < form.N)[None, :]
    plain = depth[:, None] * form.N + columns[None, :]
    whole = pair.to(tl.int64) * (form.D * form.N)
    given = whole + depth[:, None] * states.row + columns[None, :] * states.column
    state = tl.zeros([BD, BN], tl.float32)
    if states.first is not None:
        state = tl.load(states.first + given, mask=inside, other=0.0)
    channels = depth if form.INSIDE else columns
    most: tl.constexpr = form.D if form.INSIDE else form.N
    for step in range(segments):
        segment = tl.cast(segments - 1 - step if form.REVERSE else step, tl.int64)
        at = states.starts + segment * tl.num_programs(1) * (form.D * form.N) + whole + plain
        made = tl.load(at, mask=inside, other=0.0)
        tl.store(at, state, mask=inside)
        if form.GATE == 1:
            state *= decay_of(tl.load(states.decays + segment * tl.num_programs(1) + pair), form)
        elif form.GATE == 2:
            spot = (segment * tl.num_programs(1) + pair) * most + channels
            decay = decay_of(tl.load(states.decays + spot, mask=channels < most, other=0.0), form)
            state *= decay[:, None] if form.INSIDE else decay[None, :]
        state += made
    if states.last is not None:
        tl.store(states.last + given, state, mask=inside)
