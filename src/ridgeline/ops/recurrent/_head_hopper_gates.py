"""Joins the parts of a gate's gradient that the Gluon chains leave: the four sums of `_scan.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent._scan import find_span

C = tl.constexpr(64)
EVERY = tl.constexpr(2)
WIDE = tl.constexpr(128)


class Parts(NamedTuple):
    dg: Any  # (B, T, heads) in float32
    queries: Any  # (2, heads' chunks, C): each row's query with earlier chunks' keys, half of k's columns each
    keys: Any  # its key with later chunks' queries
    own: Any  # pairs around its gate within the chunk
    meets: Any  # <state, its gradient> where states are kept, by rows
    apart: Any
    ends: Any
    tokens: Any
    heads: Any
    room: Any
    sequences: Any


@triton.jit
def _place_of(ends, n):
    return EVERY * (tl.load(ends + n) // (EVERY * C) + 2 * n)


@triton.jit
def _both(parts, data, place):
    at = data + place * C + tl.arange(0, C)
    return tl.load(at) + tl.load(at + parts.apart)


@triton.jit
def join_gates(parts, scale):
    """A chunk's dg. Where no state is kept before it, what passes it is what meets after it without its own keys."""
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
    queries, keys = _both(parts, parts.queries, place), _both(parts, parts.keys, place)
    late = chunk % EVERY
    meets = parts.meets + (place + late) // EVERY * WIDE + tl.arange(0, WIDE)
    past = tl.sum(tl.load(meets), 0)
    if late > 0:
        if (chunk + 1) * C < tokens:
            past += tl.sum(_both(parts, parts.queries, place + 1), 0)
        past -= tl.sum(keys, 0)
    inner = tl.arange(0, C)
    found = tl.cumsum(queries, 0, reverse=True) + tl.load(parts.own + place * C + inner) + past
    found += tl.sum(tl.where(inner[:, None] < inner[None, :], keys[:, None], 0.0), 0)
    row = start + chunk * C + inner
    if parts.ends is None:
        row += n.to(tl.int64) * parts.tokens
    tl.store(parts.dg + row * parts.heads + h, scale * found, mask=chunk * C + inner < tokens)
