"""A chunk's P and L with rows brought by TMA."""
from __future__ import annotations
from typing import Any, NamedTuple
import triton
import triton.language as tl
from ridgeline.ops.recurrent._delta import _apart, _decays, _dot, _length, beta_of, find_chunk, keep_decays, keep_lengths, solve_chunk, _sequence_at, _room
from ridgeline.ops.recurrent._scan import find_head, find_span

FAR = tl.constexpr(1 << 30)


class PairMaps(NamedTuple):
    q: Any
    k: Any
    squares: Any


@triton.jit
def _rows_to_cache(x, n, h, ends, start, first, tokens, C: tl.constexpr):
    at = tl.arange(0, 2 * C)
    row = tl.minimum(first + at // 2, tokens - 1)
    places = find_head(x, n, h, ends, start) + row.to(tl.int64) * x.token + 64 * (at % 2)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _bring_nearer(q, k, packing, C: tl.constexpr, AHEAD: tl.constexpr):
    item = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) + AHEAD
    if item < tl.num_programs(0) * tl.num_programs(1):
        head, chunk = item // tl.num_programs(0), item % tl.num_programs(0) + packing.begin
        n, h = head // packing.heads, head % packing.heads
        if packing.ends is not None:
            n = _sequence_at(packing, chunk, packing.unit)
            chunk = chunk - _room(packing, n, packing.unit)
        start, tokens = find_span(packing, n)
        if chunk * C < tokens:
            _rows_to_cache(q, n, h, packing.ends, start, chunk * C, tokens, C)
            _rows_to_cache(k, n, h, packing.ends, start, chunk * C, tokens, C)


@triton.jit
def pairs_by_tma(gate, beta, matrices, packing, maps, q, k, form: tl.constexpr, STORE: tl.constexpr, AHEAD: tl.constexpr):
    """The delta rule with a gate per token: a chunk's P and L, its decays, and one over the lengths of q and k."""
    n, h, start, tokens, chunk = find_chunk(packing)
    first = chunk * form.C
    if first >= tokens:
        return
    C: tl.constexpr = form.C
    row = tl.arange(0, C)
    rows = first + row
    end, far = (start + tokens).to(tl.int32), (FAR - tokens + first).to(tl.int32)
    if packing.ends is None:
        tk = maps.k.load([n, h // q.group, first, 0]).reshape(C, form.BK)
        tq = maps.q.load([n, h // q.group, first, 0]).reshape(C, form.BK)
    else:
        tk = maps.k.load([FAR, end, h // q.group, far, 0]).reshape(C, form.BK)
        tq = maps.q.load([FAR, end, h // q.group, far, 0]).reshape(C, form.BK)
    if AHEAD:
        _bring_nearer(q, k, packing, C, AHEAD)
    spot = tl.program_id(1).to(tl.int64) * packing.chunks + tl.program_id(0)
    A = _dot(tk, tl.trans(tk), tk, form)
    shrink_q, shrink_k = _length(tq, _dot(tq, tl.trans(tq), tq, form), form), _length(tk, A, form)
    g, late, _early, after, whole = _decays(
        gate, find_head(gate, n, h, packing.ends, start), first, row, tokens, form
    )  # fmt: skip
    keep_lengths(matrices.lengths, spot, shrink_q, shrink_k, form)
    factor = beta_of(beta, find_head(beta, n, h, packing.ends, start), rows, tokens, form)
    keep_decays(matrices, spot, late * shrink_q, late * shrink_k, after * shrink_k, factor, whole, form)
    tl.store(matrices.decays + spot * (5 * C) + (4 * C + row), tl.cumsum(g, 0) * 1.4426950408889634)
    weights = _apart(g, form) * shrink_k[None, :]
    P = (weights * shrink_q[:, None] * _dot(tq, tl.trans(tk), tk, form)).to(tk.dtype)
    A *= tl.where(row[:, None] > row[None, :], weights * shrink_k[:, None], 0.0)
    if STORE:
        if packing.ends is None:
            maps.squares.store([n, h, first, 0], P.reshape(1, 1, C, C))
        else:
            maps.squares.store([FAR, end, h, far, 0], P.reshape(1, 1, 1, C, C))
    else:
        place = start
        if packing.ends is None:
            place += n.to(tl.int64) * packing.tokens
        step = packing.heads * matrices.width
        at = (place * packing.heads + h) * matrices.width + tl.cast(chunk, tl.int64) * (C * step) + (row * step)[:, None] + row[None, :]
        tl.store(matrices.pair + at, P, mask=(rows < tokens)[:, None])
    L = solve_chunk(A, factor, tk.dtype, form).to(tk.dtype)
    if STORE:
        if packing.ends is None:
            maps.squares.store([n, h, first, C], L.reshape(1, 1, C, C))
        else:
            maps.squares.store([FAR, end, h, far, C], L.reshape(1, 1, 1, C, C))
    else:
        tl.store(matrices.solve + at, L, mask=(rows < tokens)[:, None])
