"""RWKV-7: the two rows of a sequence whose gradients are one number times a row of another input.

The last row's b gets scale (do . u) q, and the second row's a gets (v . dx) k of the first row, where no state is given
before the sequence. Where such a number cancels, all that U, or the gradient of X, was rounded by is left. So it is
made again in float32, by the recurrence, from a state kept at least LOOK rows away.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.recurrent._delta import own_rows, room_of_chunks
from ridgeline.ops.recurrent._scan import find_head, find_span

LOOK = tl.constexpr(16)


@triton.jit
def _row(x, place, t, columns, WIDTH: tl.constexpr):
    return tl.load(place + t.to(tl.int64) * x.token + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _rows_at(tensors, places, t, depth, columns, form: tl.constexpr, REVERSE: tl.constexpr):
    """What a step of the recurrence from row t takes: the row that reads, the one that writes what was read, the gate,
    and the two of the plain product, which with time reversed are those of the row before."""
    q, k, v, a, b, gate, do = tensors
    at_q, at_k, at_v, at_a, at_b, at_gate, at_do = places
    one, other = _row(a, at_a, t, depth, form.K), _row(b, at_b, t, depth, form.K)
    decay = tl.exp2(_row(gate, at_gate, t, depth, form.K) * 1.4426950408889634)
    if REVERSE:
        before = tl.maximum(t - 1, 0)
        found = other, one, decay, _row(q, at_q, before, depth, form.K), _row(do, at_do, before, columns, form.V)
    else:
        found = one, other, decay, _row(k, at_k, t, depth, form.K), _row(v, at_v, t, columns, form.V)
    return found


@triton.jit
def end_rows(q, k, v, a, b, gate, do, states, grad, packing, scale, form: tl.constexpr, REVERSE: tl.constexpr):
    """The last row's gradient of b, from the states before chunks, or the second row's of a, from the gradients of those
    after chunks."""
    n, h = tl.program_id(0) // packing.heads, tl.program_id(0) % packing.heads
    start, tokens = find_span(packing, n)
    if tokens < 2:
        return
    BV: tl.constexpr = form.BV
    depth = tl.arange(0, form.BK)
    room = tl.program_id(0).to(tl.int64) * packing.chunks
    if packing.ends is not None:
        room = h.to(tl.int64) * packing.chunks + room_of_chunks(packing, n)
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
            left, right = _row(do, places[6], first, columns, form.V), _row(q, places[0], first, depth, form.K)
            state += left[:, None] * (scale * right)[None, :]
        one, other, decay, outer, values = _rows_at(tensors, places, first, depth, columns, form, REVERSE)
        for step in range(tl.abs(last - first)):
            t = first - step - 1 if REVERSE else first + step + 1  # the next row, under way while this one is used
            next_one, next_other, next_decay, next_outer, next_values = _rows_at(
                tensors, places, t, depth, columns, form, REVERSE
            )  # fmt: skip
            seen = tl.sum(state * one[None, :], 1)
            state = state * decay[None, :] + seen[:, None] * other[None, :]
            state += (of_outer * values)[:, None] * outer[None, :]
            one, other, decay, outer, values = next_one, next_other, next_decay, next_outer, next_values
        seen = tl.sum(state * one[None, :], 1)
        if REVERSE:
            sums += tl.sum(seen * _row(v, places[2], last - 1, columns, form.V), 0)
        else:
            sums += tl.sum(seen * _row(do, places[6], last, columns, form.V), 0)
    if REVERSE:
        found = sums * _row(k, places[1], last - 1, depth, form.K)
    else:
        found = scale * sums * _row(q, places[0], last, depth, form.K)
    to = own_rows(grad, packing, n, h, start, form.K) + last.to(tl.int64) * (packing.heads * form.K)
    tl.store(to + depth, found, mask=depth < form.K)
