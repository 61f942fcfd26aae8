"""Joins the parts of a gate's gradient that the Gluon chains leave: the four sums of `triton/scan.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.scan import find_head, find_span

C = tl.constexpr(64)
WIDE = tl.constexpr(128)


class Parts(NamedTuple):
    dg: Any  # (B, T, heads) in float32
    queries: Any  # (2, heads' chunks, C): each row's query with earlier chunks' keys, half of k's columns each
    keys: Any  # its key with later chunks' queries
    own: Any  # pairs around its gate within the chunk
    before: Any  # the state before each chunk, (heads' chunks, WIDE, WIDE)
    after: Any  # the gradient of the state after it
    apart: Any
    ends: Any
    tokens: Any
    heads: Any
    room: Any
    sequences: Any


@triton.jit
def _place_of(ends, n):
    return tl.load(ends + n) // C + n


@triton.jit
def _both(parts, data, place):
    at = data + place * C + tl.arange(0, C)
    return tl.load(at) + tl.load(at + parts.apart)


@triton.jit
def _meet(parts, place):
    """<state, its gradient>."""
    PIECE: tl.constexpr = 32
    both = tl.zeros([PIECE, WIDE], tl.float32)
    spot = place * (WIDE * WIDE) + tl.arange(0, PIECE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    for piece in tl.static_range(WIDE // PIECE):
        at = spot + piece * (PIECE * WIDE)
        both += tl.load(parts.before + at).to(tl.float32) * tl.load(parts.after + at).to(tl.float32)
    return tl.sum(tl.sum(both, 1), 0)


@triton.jit
def join_gates(parts, gate, scale):
    """A chunk's dg. What passes the chunk decays by all of its gates, so nothing cancels."""
    chunk, pair = tl.program_id(0), tl.program_id(1)
    n, h = pair // parts.heads, pair % parts.heads
    place = pair.to(tl.int64) * parts.room + chunk
    if parts.ends is not None:
        n, beyond = 0 * chunk, 0 * chunk + parts.sequences
        while beyond - n > 1:  # the last sequence whose room begins here or before
            middle = (n + beyond) // 2
            here = _place_of(parts.ends, middle) <= chunk
            n, beyond = tl.where(here, middle, n), tl.where(here, beyond, middle)
        chunk -= _place_of(parts.ends, n)
    start, tokens = find_span(parts, n)
    if chunk * C >= tokens:
        return
    inner = tl.arange(0, C)
    token = chunk * C + inner
    spots = find_head(gate, n, h, parts.ends, start) + token.to(tl.int64) * gate.token
    whole = tl.sum(tl.load(spots, mask=token < tokens, other=0.0).to(tl.float32), 0)
    past = tl.exp2(whole * 1.4426950408889634) * _meet(parts, place)
    queries, keys = _both(parts, parts.queries, place), _both(parts, parts.keys, place)
    found = tl.cumsum(queries, 0, reverse=True) + tl.load(parts.own + place * C + inner) + past
    found += tl.sum(tl.where(inner[:, None] < inner[None, :], keys[:, None], 0.0), 0)
    row = start + token
    if parts.ends is None:
        row += n.to(tl.int64) * parts.tokens
    tl.store(parts.dg + row * parts.heads + h, scale * found, mask=token < tokens)
