"""Numbers of rows for `shared_outputs.py`: decays before its kernels, and gradients of gates and steps after."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.scan import find_head, find_span


class TokenGrads(NamedTuple):
    """(B, T, heads) in float32."""

    gate: Any
    step: Any
    skip: Any  # sums over each chunk, (B, chunks, heads), or None


@triton.jit
def _first_chunk(room, n, R: tl.constexpr):
    return tl.load(room.ends + n) // (2 * R) + n


@triton.jit
def _spot(room, HEADS: tl.constexpr, R: tl.constexpr):
    """Of a program's chunk and heads: the batch, the sequence, where it begins, its tokens, the chunk's first token,
    the heads, and where their numbers of the chunk are among all."""
    kept, spot = tl.program_id(0), tl.program_id(1)
    tiles = (room.heads + HEADS - 1) // HEADS
    batch, heads = spot // tiles, spot % tiles * HEADS + tl.arange(0, HEADS)
    n, chunk = batch, kept
    if room.ends is not None:
        n, beyond = 0 * kept, 0 * kept + room.sequences
        while beyond - n > 1:  # the last sequence whose room begins here or before
            middle = (n + beyond) // 2
            here = _first_chunk(room, middle, R) <= kept
            n, beyond = tl.where(here, middle, n), tl.where(here, beyond, middle)
        chunk = kept - _first_chunk(room, n, R)
    start, tokens = find_span(room, n)
    place = (batch * room.heads + heads).to(tl.int64) * room.chunks + kept
    return batch, n, start, tokens, chunk * (2 * R), heads, place


@triton.jit
def _given(t, room, n, start, tokens, row, heads):
    base = find_head(t, n, 0 * n, room.ends, start)
    there = (row < tokens) & (heads < room.heads)
    return tl.load(base + row.to(tl.int64) * t.token + heads.to(tl.int64) * t.head, mask=there, other=0.0)


@triton.jit
def write_numbers(gate, step, made, room, HEADS: tl.constexpr, R: tl.constexpr):
    """Of each row in blocks of R, two of a chunk: the sum of gates since the block began, times log2(e); e^sums until
    the first block ends or, in the second one, since the chunk began; e^sums until the chunk ends; and its step."""
    _, n, start, tokens, first, heads, place = _spot(room, HEADS, R)
    block, row = tl.arange(0, 2)[:, None, None], tl.arange(0, R)[None, :, None]
    heads, at = heads[None, None, :], first + block * R + row
    g = _given(gate, room, n, start, tokens, at, heads).to(tl.float32)
    sums = tl.cumsum(g, 1)
    later = _given(gate, room, n, start, tl.where(row < R - 1, tokens, 0), at + 1, heads).to(tl.float32)
    soon = tl.cumsum(later, 1, reverse=True)
    totals = tl.sum(g, 1)[:, None, :]
    of_first = tl.sum(tl.where(block == 0, totals, 0.0), 0)[None, :, :]
    of_second = tl.sum(tl.where(block == 1, totals, 0.0), 0)[None, :, :]
    edge = tl.exp2(1.4426950408889634 * tl.where(block == 0, soon, sums + of_first))
    until = tl.exp2(1.4426950408889634 * tl.where(block == 0, soon + of_second, soon))
    steps = _given(step, room, n, start, tokens, at, heads).to(tl.float32)
    spots = made + place[None, None, :] * (8 * R) + block * R + row
    here = (heads < room.heads) & (row >= 0) & (block >= 0)
    tl.store(spots, sums * 1.4426950408889634, mask=here)
    tl.store(spots + 2 * R, edge, mask=here)
    tl.store(spots + 4 * R, until, mask=here)
    tl.store(spots + 6 * R, steps, mask=here)


@triton.jit
def join_rows(rows, numbers, grads, room, stride, HEADS: tl.constexpr, R: tl.constexpr):
    """The gradients of gates and steps in a chunk, and its sums for D's.

    A gate gets what goes past the chunk, its row's and later queries with earlier chunks' keys, earlier keys with later
    chunks' queries, and the chunk's own pairs around it: running sums of the pairs that begin without those that end,
    which are the same float32 numbers in both."""
    batch, _, start, tokens, first, heads, place = _spot(room, HEADS, R)
    row = tl.arange(0, 2 * R)[None, :]
    here = (first + row < tokens) & (heads < room.heads)[:, None]
    spots = rows + place[:, None] * (2 * R) + row
    queries = tl.load(spots, mask=here, other=0.0)
    inside = (heads < room.heads)[:, None] & (row >= 0) & (first < tokens)
    past = tl.sum(tl.load(spots + stride, mask=inside, other=0.0), 1)
    whole = tl.load(numbers + place * (8 * R) + (4 * R - 1), mask=(heads < room.heads) & (first < tokens), other=0.0)
    before = here & (row > 0)
    begun = tl.load(spots + 2 * stride - 1, mask=before, other=0.0) + tl.load(spots + 3 * stride - 1, before, other=0.0)
    begun -= tl.load(spots + 4 * stride - 1, mask=before, other=0.0)
    begun -= tl.load(spots + 5 * stride - 1, mask=before & (row > R), other=0.0)
    found = (past * whole)[:, None] + tl.cumsum(queries, 1, reverse=True) + tl.cumsum(begun, 1)
    token = start + first + row
    if room.ends is None:
        token += batch.to(tl.int64) * room.tokens
    to = token.to(tl.int64) * room.heads + heads[:, None]
    tl.store(grads.gate + to, found, mask=here)
    tl.store(grads.step + to, tl.load(spots + 6 * stride, mask=here, other=0.0), mask=here)
    if grads.skip is not None:
        brought = tl.sum(tl.load(spots + 7 * stride, mask=here, other=0.0), 1)
        kept = batch.to(tl.int64) * room.chunks + tl.program_id(0)
        tl.store(grads.skip + kept * room.heads + heads, brought, mask=heads < room.heads)
