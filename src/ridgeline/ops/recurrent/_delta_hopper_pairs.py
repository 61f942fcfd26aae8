"""The delta rule with a gate per channel in Gluon for Hopper: rows with their decays, and a chunk's pairs, in bfloat16.

A warpgroup takes a whole chunk of 64 rows whose gates are mild, as `pairs_at_once` does, and leaves all others to the
same kernel. The sums of gates are a product with ones. Pairs of k with itself are left in float32 for `solve_pairs`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.ops.recurrent._delta_hopper_channels import exp2_of, inverse_of, rounded
from ridgeline.ops.recurrent._delta_hopper_gradients import coordinates, room_of, sequence_at
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import flat, operand_layout, sums_layout

C = gl.constexpr(64)  # rows of a chunk
WIDTH = gl.constexpr(128)  # channels


class PairMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, channels), and squares (B, heads, chunks, C, C)."""

    q: Any
    k: Any
    g: Any
    read_q: Any  # written: rows with their decays
    read_k: Any
    write_k: Any
    pair: Any


class PairNumbers(NamedTuple):
    pairs_of_k: Any  # (B, heads, chunks, C, C) in float32
    lengths: Any  # (B, heads, chunks, 2, C), or None
    decays: Any  # (B, heads, chunks, 4, C)
    whole: Any  # (B, heads, chunks, channels)
    ends: Any  # cu_seqlens or None
    sequences: Any
    tokens: Any
    heads: Any
    chunks: Any  # room of a head
    group: Any
    gate_group: Any


@gluon.jit
def _rows_by_channel(tiles, ready, left, place, LAYOUT: gl.constexpr):
    """Rows with their decays: of q and k as left sides, and what k's are multiplied by to write, after the last row's
    decay has gone through memory; the squared lengths of q and k, and q times k."""
    q, k, g, by_inverse = tiles
    none = gl.zeros([C, WIDTH], gl.float32, LAYOUT)
    i, depth = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    mbarrier.wait(ready.index(0), 0)
    since = warpgroup_mma(left, g, none, use_acc=False, is_async=True)
    since = warpgroup_mma_wait(0, deps=(since,))
    late = exp2_of(since * 1.4426950408889634)
    gl.store(place + depth[None, :] + 0 * i, late, mask=(i == C - 1) & (depth >= 0)[None, :])
    mbarrier.wait(ready.index(1), 0)
    tq, tk = q.load(LAYOUT).to(gl.float32), k.load(LAYOUT).to(gl.float32)
    sums = gl.sum(tq * tq, 1), gl.sum(tk * tk, 1), gl.sum(tq * tk, 1)
    rows_q, rows_k = rounded(tq * late), rounded(tk * late)
    barrier()  # the last row's decay is there, and all have read g, q and k
    whole = gl.load(place + depth)
    q.store(rows_q)
    k.store(rows_k)
    tk = tk * inverse_of(late)
    by_inverse.store(rounded(tk))
    g.store(rounded(tk * whole[None, :]))
    fence_async_shared()
    return rows_q, rows_k, whole, sums


@gluon.jit
def _keep(numbers, maps, tile, at, found, sums, beta, place, NORMALIZE: gl.constexpr):
    """Writes a chunk's pairs, and the factors of its rows."""
    LAYOUT: gl.constexpr = sums_layout(C)
    pairs, of_k = found
    row: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    square_q, square_k, own = sums
    rows = gl.arange(0, C, row)
    shrink_q, shrink_k = gl.full([C], 1.0, gl.float32, row), gl.full([C], 1.0, gl.float32, row)
    own = gl.convert_layout(own, row)
    if NORMALIZE:
        shrink_q = gl.rsqrt(gl.convert_layout(square_q, row) + 1e-6)
        shrink_k = gl.rsqrt(gl.convert_layout(square_k, row) + 1e-6)
        gl.store(numbers.lengths + place * (2 * C) + rows, shrink_q)
        gl.store(numbers.lengths + place * (2 * C) + C + rows, shrink_k)
    decays = numbers.decays + place * (4 * C) + rows
    gl.store(decays, shrink_q)
    gl.store(decays + C, shrink_k)
    gl.store(decays + 2 * C, shrink_k)
    gl.store(decays + 3 * C, beta)
    across = gl.convert_layout(shrink_k, gl.SliceLayout(0, LAYOUT))[None, :]
    i, j = rows[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    pairs = gl.where(i > j, pairs, gl.where(i == j, own[:, None], 0.0)) * (shrink_q[:, None] * across)
    flat(tile).store(pairs.to(tile.dtype))
    of_k = gl.where(i > j, of_k * (shrink_k[:, None] * across), 0.0)
    gl.store(numbers.pairs_of_k + place * (C * C) + (i * C + j), of_k)
    fence_async_shared()
    barrier()
    store(maps.pair, at, tile)


@gluon.jit
def channel_pairs(numbers, maps, beta, LEAST: gl.constexpr, NORMALIZE: gl.constexpr):
    """A chunk of a head."""
    kind: gl.constexpr = maps.k.dtype
    LAYOUT: gl.constexpr = sums_layout(WIDTH)
    NARROW: gl.constexpr = sums_layout(C)
    head, spot = gl.program_id(1), gl.program_id(0)
    n, h = head // numbers.heads, head % numbers.heads
    batch, chunk, start, tokens = n, spot, 0 * n, 0 * n + numbers.tokens
    if numbers.ends is not None:
        n = sequence_at(numbers.ends, numbers.sequences, chunk, C)
        chunk -= room_of(numbers.ends, n, C)
        start = gl.load(numbers.ends + n)
        tokens = gl.load(numbers.ends + n + 1) - start
    first = chunk * C
    if first + C <= tokens:
        q = gl.allocate_shared_memory(kind, maps.q.block_type.shape, maps.q.layout)
        k = gl.allocate_shared_memory(kind, maps.k.block_type.shape, maps.k.layout)
        g = gl.allocate_shared_memory(kind, maps.g.block_type.shape, maps.g.layout)
        by_inverse = gl.allocate_shared_memory(kind, maps.k.block_type.shape, maps.k.layout)
        pair = gl.allocate_shared_memory(kind, maps.pair.block_type.shape, maps.pair.layout)
        ready = make_barriers(2, 1)
        fence_async_shared()
        barrier()
        mbarrier.expect(ready.index(0), maps.g.block_type.nbytes)
        load(maps.g, coordinates(numbers.ends, n, start, tokens, h // numbers.gate_group, first, 0), ready.index(0), g)
        mbarrier.expect(ready.index(1), maps.q.block_type.nbytes + maps.k.block_type.nbytes)
        shared = coordinates(numbers.ends, n, start, tokens, h // numbers.group, first, 0)
        load(maps.q, shared, ready.index(1), q)
        load(maps.k, shared, ready.index(1), k)
        row = gl.arange(0, C, gl.SliceLayout(1, NARROW))
        i, j = row[:, None], gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
        left = gl.where(j <= i, gl.full([C, C], 1.0, gl.float32, NARROW), 0.0).to(kind)
        left = gl.convert_layout(left, operand_layout(LAYOUT))
        at_beta = beta.data + (h // beta.group).to(gl.int64) * beta.head + (start + first).to(gl.int64) * beta.token
        if numbers.ends is None:
            at_beta += n.to(gl.int64) * beta.batch
        factor = gl.load(at_beta + row * beta.token).to(gl.float32)
        place = (batch * numbers.heads + h).to(gl.int64) * numbers.chunks + spot
        tiles = flat(q), flat(k), flat(g), flat(by_inverse)
        rows_q, rows_k, whole, sums = _rows_by_channel(tiles, ready, left, numbers.whole + place * WIDTH, LAYOUT)
        if gl.min(gl.where(whole >= LEAST, 1, 0), 0) == 1:
            barrier()
            own = coordinates(numbers.ends, n, start, tokens, h, first, 0)
            store(maps.read_q, own, q)
            store(maps.read_k, own, k)
            store(maps.write_k, own, g)
            none = gl.zeros([C, C], gl.float32, NARROW)
            left_q = gl.convert_layout(rows_q, operand_layout(NARROW))
            left_k = gl.convert_layout(rows_k, operand_layout(NARROW))
            pairs = warpgroup_mma(left_q, flat(by_inverse).permute((1, 0)), none, use_acc=False, is_async=True)
            of_k = warpgroup_mma(left_k, flat(by_inverse).permute((1, 0)), none, use_acc=False, is_async=True)
            found = warpgroup_mma_wait(0, deps=(pairs, of_k))
            _keep(numbers, maps, pair, [batch, h, spot, 0, 0], found, sums, factor, place, NORMALIZE)
            tma.store_wait(0)
