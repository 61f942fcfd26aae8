"""Gradients of a chunk of the delta rule with a gate per token, each tile read once (variants under test)."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.recurrent._delta import (
    _apart,
    _dot,
    _gates,
    _through_lengths,
    find_chunk,
    own_rows,
    rows_of,
    store_rows,
    tile_of,
)
from ridgeline.ops.recurrent._levels import chosen_sums
from ridgeline.ops.recurrent._scan import decay_of, find_head


@triton.jit
def _own_tile(place, step, inner, columns, left, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A chunk's rows of V columns, from where the chunk begins; offsets have 32 bits."""
    here = (inner < left)[:, None]
    if WIDTH % BLOCK != 0:
        here = here & (columns < WIDTH)[None, :]
    return tl.load(place + (inner[:, None] * step + columns[None, :]), mask=here, other=0.0)


@triton.jit
def _state_tile(states, at, columns, depth, form: tl.constexpr):
    spots = states + at + (columns[:, None] * form.K + depth[None, :])
    if form.K % form.BK == 0 and form.V % form.BV == 0:
        return tl.load(spots)
    else:
        return tl.load(spots, mask=(depth < form.K)[None, :] & (columns < form.V)[:, None], other=0.0)


@triton.jit
def _apart_both(g, form: tl.constexpr, TURNED: tl.constexpr):
    """e^(G_i - G_j) for j <= i, else 0; TURNED its transpose."""
    sums = tl.cumsum(g, 0) * 1.4426950408889634
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    if TURNED:
        return tl.exp2(tl.where(i <= j, sums[None, :] - sums[:, None], float("-inf")))
    else:
        return tl.exp2(tl.where(i >= j, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _of_gates(both, since, until, form: tl.constexpr):
    """For each gate the sum over pairs of an earlier row and this row or a later one, and of these rows' own sums."""
    i, j = tl.arange(0, form.C)[:, None], tl.arange(0, form.C)[None, :]
    later = chosen_sums(j >= i, both, both.to(tl.float16) if form.PRECISION == "tf32x3" else both.to(tl.bfloat16))
    return tl.sum(tl.where(i > j, later + until[None, :], since[None, :]), 1)


@triton.jit
def _stored(tensor, packing, n, h, start, first, inner, columns, left, found, width):
    """Writes rows of a gradient; offsets have 32 bits."""
    at = own_rows(tensor, packing, n, h, start, width) + first.to(tl.int64) * (packing.heads * width)
    spots = at + (inner[:, None] * (packing.heads * width) + columns[None, :])
    tl.store(spots, found, mask=(inner < left)[:, None] & (columns < width)[None, :])


@triton.jit
def whole_gradients(q, k, gate, do, matrices, states, grads, packing, scale, form: tl.constexpr, HELD: tl.constexpr):
    """A chunk's gradients of q, k and the gate."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    BK: tl.constexpr = form.BK
    BV: tl.constexpr = form.BV
    C: tl.constexpr = form.C
    depth, columns, inner = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    i, j = inner[:, None], inner[None, :]
    left = tokens - first
    far = first.to(tl.int64)
    step = packing.heads * form.V
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    at = spot * (form.K * form.V)
    tu = _own_tile(own_rows(states.solved, packing, n, h, start, form.V) + far * step, step, inner, columns, left, form.V, BV)
    tdo = _own_tile(find_head(do, n, h, packing.ends, start) + far * do.token, do.token, inner, columns, left, form.V, BV)
    tdv = _own_tile(own_rows(grads.v, packing, n, h, start, form.V) + far * step, step, inner, columns, left, form.V, BV)
    tq = _own_tile(find_head(q, n, h, packing.ends, start) + far * q.token, q.token, inner, depth, left, form.K, BK)
    tk = _own_tile(find_head(k, n, h, packing.ends, start) + far * k.token, k.token, inner, depth, left, form.K, BK)
    of = matrices.decays + spot * (4 * C) + inner
    of_q, of_a, of_b, factor = tl.load(of), tl.load(of + C), tl.load(of + 2 * C), tl.load(of + 3 * C)
    whole = tl.load(matrices.whole + spot)
    of_b *= factor
    shrink_q, shrink_k = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    if form.NORMALIZE:
        place = matrices.lengths + spot * (2 * C) + inner
        shrink_q, shrink_k = tl.load(place), tl.load(place + C)
    g = _gates(gate, find_head(gate, n, h, packing.ends, start), first, depth, tokens, 0, form)
    kind = tk.dtype
    per_q, per_k = scale * shrink_q, factor * shrink_k
    weights = _apart_both(g, form, False) * per_k[None, :]
    pairs_q = weights * per_q[:, None] * _dot(tdo, tl.trans(tu), tk, form)
    both = _dot(tq, tl.trans(tk), tk, form) * pairs_q
    pairs_q = pairs_q.to(kind)
    pairs_k = tl.where(i > j, -weights * shrink_k[:, None], 0.0) * _dot(tdv, tl.trans(tu), tk, form)
    both += _dot(tk, tl.trans(tk), tk, form) * pairs_k
    if form.PRECISION != "tf32x3":
        both = both.to(tl.bfloat16)
    weights = _apart_both(g, form, True) * per_k[:, None]
    turned_q = (weights * per_q[None, :] * _dot(tu, tl.trans(tdo), tk, form)).to(kind)
    pairs_k += tl.where(i < j, -weights * shrink_k[None, :], 0.0) * _dot(tu, tl.trans(tdv), tk, form)
    pairs_k = pairs_k.to(kind)
    state = _state_tile(states.before, at, columns, depth, form)
    dq = (scale * of_q)[:, None] * _dot(tdo, state, tk, form)
    since = tl.sum(tq * dq, 1)
    dq += _dot(pairs_q, tk, tk, form)
    dq = _through_lengths(dq, tq, shrink_q, form)
    _stored(grads.q, packing, n, h, start, first, inner, depth, left, dq, form.K)
    dk = -of_a[:, None] * _dot(tdv, state, tk, form)
    since += tl.sum(tk * dk, 1)
    later = _state_tile(states.later, at, columns, depth, form)
    db = of_b[:, None] * _dot(tu, later, tk, form)
    until = tl.sum(tk * db, 1)
    if HELD == 0:
        held = tl.sum(state.to(tl.float32) * later.to(tl.float32))
    else:
        sums = tl.zeros([BV // HELD, BK], tl.float32)
        some = tl.arange(0, BV // HELD)
        for part in range(HELD):
            one = _state_tile(states.before, at, part * (BV // HELD) + some, depth, form).to(tl.float32)
            sums += one * _state_tile(states.later, at, part * (BV // HELD) + some, depth, form).to(tl.float32)
        held = tl.sum(sums)
    dk += db
    dk += _dot(pairs_k, tk, tk, form)
    dk += _dot(turned_q, tq, tk, form)
    dg = _of_gates(both, since, until, form) + whole * held
    dk = _through_lengths(dk, tk, shrink_k, form)
    _stored(grads.k, packing, n, h, start, first, inner, depth, left, dk, form.K)
    store_rows(grads.g, packing, n, h, start, first + inner, tl.arange(0, 1), tokens, dg[:, None], 1)
