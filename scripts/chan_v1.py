"""Gradients of q, k and the gates in chunks of the delta rule with a gate per channel, in Gluon for Hopper, in bfloat16.

A program goes through whole chunks with mild gates, as `_at_once.py` has them, and leaves all others. Two warpgroups
share a chunk, each with half of the channels; all is turned, so what a product leaves in registers is the next one's
left side. TMA brings the next chunk's tiles where this one's have been read. A row's decay, its length and beta are one
factor, and a pair's weight is the plain product of its two rows over v's columns.
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

from ridgeline.ops.recurrent._delta_hopper_gradients import coordinates, room_of, sequence_at
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import column_chunks, flat, operand_layout, uniform

C = gl.constexpr(64)  # rows of a chunk
WIDTH = gl.constexpr(128)  # channels, and columns of v
HALF = gl.constexpr(64)


class ChannelMaps(NamedTuple):
    """Tensor maps: rows (B, heads, T, columns), and states (B, heads, chunks, V, K)."""

    q: Any
    k: Any
    g: Any
    do: Any  # half of the columns
    dv: Any
    u: Any
    before: Any
    later: Any
    dq: Any
    dk: Any
    dg: Any


class ChannelNumbers(NamedTuple):
    decays: Any  # (B, heads, chunks, 4, C) in float32
    whole: Any  # (B, heads, chunks, K)
    ends: Any  # cu_seqlens or None
    sequences: Any
    tokens: Any
    heads: Any
    chunks: Any  # room of a head
    begin: Any
    count: Any  # chunks of a head in this launch
    everything: Any  # chunks of all heads
    group: Any
    gate_group: Any


class Chunk(NamedTuple):
    """Where a chunk is."""

    batch: Any
    n: Any
    h: Any
    spot: Any
    start: Any
    tokens: Any
    first: Any
    place: Any  # among all


class Tiles(NamedTuple):
    """Shared memory. The gradients of q and k take the places of q and k, and that of the gates the place of pairs."""

    seen: Any  # do above dv, quarters
    u: Any  # this chunk's and the next one's
    before: Any
    later: Any
    q: Any
    k: Any
    g: Any
    pairs: Any  # q's rows above k's
    upto: Any  # ones for rows up to a column's
    strict: Any  # before it
    signs: Any
    ready: Any
    zero: Any  # that the compiler does not know


@gluon.constexpr_function
def wide_layout(columns):
    """The layout of two warpgroups' sums: 128 rows in groups of 16 per warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, columns, 16])


@gluon.jit
def _chunk_of(numbers, step):
    at = gl.program_id(0) + step * gl.num_programs(0)
    head, spot = at // numbers.count, at % numbers.count
    n, h = head // numbers.heads, head % numbers.heads
    batch, chunk, start, tokens = n, numbers.begin + spot, 0 * n, 0 * n + numbers.tokens
    if numbers.ends is not None:
        n = sequence_at(numbers.ends, numbers.sequences, chunk, C)
        chunk -= room_of(numbers.ends, n, C)
        start = gl.load(numbers.ends + n)
        tokens = gl.load(numbers.ends + n + 1) - start
    place = (batch * numbers.heads + h).to(gl.int64) * numbers.chunks + spot
    return Chunk(batch, n, h, spot, start, tokens, chunk * C, place)


@gluon.jit
def _row_at(numbers, where, head, column):
    return coordinates(numbers.ends, where.n, where.start, where.tokens, head, where.first, column)


@gluon.jit
def _bring_first(maps, numbers, tiles, where, odd):
    """Rows that were seen, U, the state before the chunk, and gates."""
    ready = tiles.ready.index(0)
    mbarrier.expect(ready, 4 * maps.do.block_type.nbytes + maps.u.block_type.nbytes)
    for part in gl.static_range(2):
        load(maps.do, _row_at(numbers, where, where.h, part * HALF), ready, tiles.seen.index(tiles.zero + 2 * part))
        load(maps.dv, _row_at(numbers, where, where.h, part * HALF), ready, tiles.seen.index(tiles.zero + 2 * part + 1))
    load(maps.u, _row_at(numbers, where, where.h, 0), ready, tiles.u.index(odd))
    _bring_state(maps.before, where, tiles.ready.index(1), tiles.before)
    _bring_rows(maps.g, numbers, where, where.h // numbers.gate_group, tiles.ready.index(3), tiles.g)


@gluon.jit
def _bring_state(source, where, ready, tile):
    mbarrier.expect(ready, source.block_type.nbytes)
    load(source, [where.batch, where.h, where.spot, 0, 0], ready, tile)


@gluon.jit
def _bring_rows(source, numbers, where, head, ready, tile):
    mbarrier.expect(ready, source.block_type.nbytes)
    load(source, _row_at(numbers, where, head, 0), ready, tile)


@gluon.jit
def _whole_of(numbers, where, LAYOUT: gl.constexpr):
    return gl.load(numbers.whole + where.place * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT)))


@gluon.jit
def _write_masks(tiles, kind: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    none = gl.zeros([C, C], gl.float32, LAYOUT)
    r, t = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    tiles.upto.store(gl.where(r <= t, 1.0, none).to(kind))
    tiles.strict.store(gl.where(r < t, 1.0, none).to(kind))
    second = (t >= C // 2) & (r >= 0)
    tiles.signs.store(gl.where(second & (r >= t), 1.0, gl.where((second == 0) & (r < t), -1.0, none)).to(kind))


@gluon.jit
def _factors(numbers, where, ROW: gl.constexpr, zero, LAYOUT: gl.constexpr):
    """zero: another one keeps the compiler from holding what it has loaded before."""
    place = numbers.decays + (where.place + zero) * (4 * C) + ROW * C
    return gl.load(place + gl.arange(0, C, gl.SliceLayout(0, LAYOUT)))[None, :]


@gluon.jit
def _writing_factors(numbers, where, zero, LAYOUT: gl.constexpr):
    """One over the lengths of k's rows, times beta."""
    return _factors(numbers, where, 1, zero, LAYOUT) * _factors(numbers, where, 3, zero, LAYOUT)


@gluon.jit
def _turned(tile, LAYOUT: gl.constexpr):
    return flat(tile).permute((1, 0)).load(LAYOUT).to(gl.float32)


@gluon.jit
def _product_sums(one, other):
    """For each column the sum of two tiles' product over the rows."""
    PART: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    sums = gl.zeros([PART, WIDTH], gl.float32, LAYOUT)
    for n in gl.static_range(WIDTH // PART):
        x, y = one.slice(n * PART, PART).load(LAYOUT), other.slice(n * PART, PART).load(LAYOUT)
        sums += x.to(gl.float32) * y.to(gl.float32)
    return gl.sum(sums, 0)


@gluon.jit
def _rounded(x):
    """To bfloat16, two at a time even where the numbers are used again."""
    code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _exp2(x):
    """Without subnormal numbers: a chunk's decay has none."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _inverse(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _by_states(maps, numbers, tiles, where, odd, more, after):
    """Makes the pairs; returns the parts of the state before the chunk in the gradients of q's rows and k's, the sum of
    both states' product for each channel, and the decays; and brings what comes next. after: the next chunk, if
    `more`."""
    LAYOUT: gl.constexpr = wide_layout(C)
    BOTH: gl.constexpr = wide_layout(WIDTH)
    kind: gl.constexpr = maps.k.dtype
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    none = gl.zeros([WIDTH, C], gl.float32, LAYOUT)
    seen = tiles.seen._reinterpret(kind, [1, WIDTH, WIDTH], square).index(tiles.zero)
    before, later = flat(tiles.before), flat(tiles.later)
    mbarrier.wait(tiles.ready.index(0), odd)
    pairs = warpgroup_mma(seen, flat(tiles.u.index(odd)).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(tiles.ready.index(1), odd)
    wide = gl.zeros([WIDTH, WIDTH], gl.float32, BOTH)
    both = warpgroup_mma(before.permute((1, 0)), seen.permute((1, 0)), wide, use_acc=False, is_async=True)
    tma.store_wait(0)  # the gradients of the chunk before have left
    barrier()
    _bring_rows(maps.k, numbers, where, where.h // numbers.group, tiles.ready.index(4), tiles.k)
    _bring_rows(maps.q, numbers, where, where.h // numbers.group, tiles.ready.index(5), tiles.q)
    pairs = warpgroup_mma_wait(1, deps=(pairs,))
    row, j = gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    row += tiles.zero
    meet = (j < row % C) | ((j == row % C) & (row < C))
    tiles.pairs.store(gl.where(meet, pairs, 0.0).to(kind))
    fence_async_shared()
    mbarrier.wait(tiles.ready.index(3), odd)
    gates = flat(tiles.g).permute((1, 0)).load(operand_layout(LAYOUT))
    both = warpgroup_mma_wait(0, deps=(both,))
    since = warpgroup_mma(gates, tiles.upto, none, use_acc=False, is_async=True)
    mbarrier.wait(tiles.ready.index(2), odd)
    held = gl.convert_layout(_product_sums(before, later), gl.SliceLayout(1, LAYOUT))
    since = warpgroup_mma_wait(0, deps=(since,))
    barrier()  # all have read these tiles and written the pairs
    if more:
        _bring_first(maps, numbers, tiles, after, odd ^ 1)
    dq, da = column_chunks(both, 2)
    dq, da = gl.convert_layout(dq, LAYOUT), gl.convert_layout(da, LAYOUT)
    return dq, da, held, _exp2(since * 1.4426950408889634)


@gluon.jit
def _through_lengths(found, tile, numbers, where, ROW: gl.constexpr, zero):
    """From the gradient of turned rows whose lengths are constants that of the rows."""
    LAYOUT: gl.constexpr = found.type.layout
    sums = gl.sum(found * _turned(tile, LAYOUT), 0)[None, :]
    shrink = _factors(numbers, where, ROW, zero, LAYOUT)
    return found - _turned(tile, LAYOUT) * (shrink * shrink * sums)


@gluon.jit
def _of_chunk(maps, numbers, tiles, where, odd, more, after, whole, scale, NORMALIZE: gl.constexpr):
    LAYOUT: gl.constexpr = wide_layout(C)
    LEFT: gl.constexpr = operand_layout(LAYOUT)
    kind: gl.constexpr = maps.k.dtype
    none = gl.zeros([WIDTH, C], gl.float32, LAYOUT)
    dq, dk, held, late = _by_states(maps, numbers, tiles, where, odd, more, after)
    pairs = tiles.pairs._reinterpret(kind, [2, C, C], gl.NVMMASharedLayout(128, 16, 2))
    of_q, of_k = pairs.index(0), pairs.index(1)
    mbarrier.wait(tiles.ready.index(4), odd)
    low_c = _rounded(_turned(tiles.k, LAYOUT) * (_writing_factors(numbers, where, 0, LAYOUT) * _inverse(late)))
    left_c = gl.convert_layout(low_c, LEFT)
    found = warpgroup_mma(left_c, of_q.permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(tiles.ready.index(5), odd)
    found = warpgroup_mma_wait(0, deps=(found,))
    tq = _turned(tiles.q, LAYOUT)
    factor = late * (scale * _factors(numbers, where, 0, 0, LAYOUT))
    low_q = _rounded(tq * factor)
    terms = _rounded(tq * factor * dq)
    across = low_q.to(gl.float32) * found
    dq = factor * (dq + found)
    if NORMALIZE:
        dq = _through_lengths(dq, tiles.q, numbers, where, 0, tiles.zero)
    flat(tiles.q).permute((1, 0)).store(dq.to(kind))
    left_q = gl.convert_layout(low_q, LEFT)
    found = warpgroup_mma(left_c, of_k.permute((1, 0)), none, use_acc=False, is_async=True)
    found = warpgroup_mma_wait(0, deps=(found,))
    factor = late * -_factors(numbers, where, 1, tiles.zero, LAYOUT)
    tk = _turned(tiles.k, LAYOUT) * factor
    low_k = _rounded(tk)
    terms = _rounded(terms.to(gl.float32) + tk * dk)
    across += low_k.to(gl.float32) * found
    dk = factor * (dk + found)
    found = warpgroup_mma(left_q, of_q, none, use_acc=False, is_async=True)
    found = warpgroup_mma(gl.convert_layout(low_k, LEFT), of_k, found, is_async=True)
    found = warpgroup_mma_wait(0, deps=(found,))
    later, u = flat(tiles.later), flat(tiles.u.index(odd))
    db = warpgroup_mma(later.permute((1, 0)), u.permute((1, 0)), none, use_acc=False, is_async=True)
    across -= low_c.to(gl.float32) * found
    high = _rounded(across)
    low = _rounded(across - high.to(gl.float32))
    db = warpgroup_mma_wait(0, deps=(db,))
    db *= whole[:, None]
    late += tiles.zero.to(gl.float32)
    dk += _writing_factors(numbers, where, tiles.zero, LAYOUT) * _inverse(late) * (db + found)
    own = gl.convert_layout((low_c.to(gl.float32) * db).to(kind), LEFT)
    terms = gl.convert_layout(terms, LEFT)
    sums = warpgroup_mma(terms, tiles.upto.permute((1, 0)), none, use_acc=False, is_async=True)
    sums = warpgroup_mma(own, tiles.strict, sums, is_async=True)
    sums = warpgroup_mma(gl.convert_layout(high, LEFT), tiles.signs, sums, is_async=True)
    sums = warpgroup_mma(gl.convert_layout(low, LEFT), tiles.signs, sums, is_async=True)
    if NORMALIZE:
        dk = _through_lengths(dk, tiles.k, numbers, where, 1, tiles.zero)
    flat(tiles.k).permute((1, 0)).store(dk.to(kind))
    sums = warpgroup_mma_wait(0, deps=(sums,))
    barrier()  # all have read the pairs and the later state
    dg_tile = tiles.pairs._reinterpret(kind, tiles.k.type.shape, tiles.k.type.layout)
    flat(dg_tile).permute((1, 0)).store((sums + (whole * held)[:, None]).to(kind))
    fence_async_shared()
    barrier()
    at = _row_at(numbers, where, where.h, 0)
    store(maps.dq, at, tiles.q)
    store(maps.dk, at, tiles.k)
    store(maps.dg, at, dg_tile)
    if more:
        _bring_state(maps.later, after, tiles.ready.index(2), tiles.later)


@gluon.jit
def _tile(source, COUNT: gl.constexpr = 1):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit
def _opened(tiles, zero):
    """The tiles, at addresses that the compiler does not hold through the loop."""
    masks = tiles.signs
    return Tiles(
        tiles.seen, tiles.u, tiles.before.index(zero), tiles.later.index(zero),
        tiles.q.index(zero), tiles.k.index(zero), tiles.g.index(zero), tiles.pairs.index(zero),
        masks.index(zero), masks.index(zero + 1), masks.index(zero + 2), tiles.ready, zero,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["scale"])
def channel_gradients(numbers, maps, scale, LEAST: gl.constexpr, NORMALIZE: gl.constexpr):
    """Whole chunks whose decay is at least LEAST in every channel."""
    kind: gl.constexpr = maps.k.dtype
    LAYOUT: gl.constexpr = wide_layout(C)
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    seen = gl.allocate_shared_memory(kind, [4] + maps.do.block_type.shape, maps.do.layout)
    masks = gl.allocate_shared_memory(kind, [3, C, C], square)
    pairs = gl.allocate_shared_memory(kind, [1, 2 * C, C], square)
    rings = Tiles(
        seen, _tile(maps.u, 2), _tile(maps.before), _tile(maps.later), _tile(maps.q), _tile(maps.k), _tile(maps.g),
        pairs, masks, masks, masks, make_barriers(6, 1), 0,
    )  # fmt: skip
    tiles = _opened(rings, gl.program_id(0) * 0)
    _write_masks(tiles, kind)
    fence_async_shared()
    barrier()
    steps = (numbers.everything - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    where = _chunk_of(numbers, 0)
    _bring_first(maps, numbers, tiles, where, 0)
    _bring_state(maps.later, where, tiles.ready.index(2), tiles.later)
    whole = _whole_of(numbers, where, LAYOUT)
    for step in range(steps):
        where = _chunk_of(numbers, step)
        tiles = _opened(rings, uniform(step * 0))
        more = step + 1 < steps
        after = _chunk_of(numbers, gl.minimum(step + 1, steps - 1))
        odd = step & 1
        next_whole = _whole_of(numbers, after, LAYOUT)
        served = (gl.min(gl.where(whole >= LEAST, 1, 0), 0) == 1) & (where.first + C <= where.tokens)
        if served:
            _of_chunk(maps, numbers, tiles, where, odd, more, after, whole, scale, NORMALIZE)
        else:
            _pass_by(maps, numbers, tiles, where, odd, more, after)
        whole = next_whole
    tma.store_wait(0)


@gluon.jit
def _pass_by(maps, numbers, tiles, where, odd, more, after):
    """Brings what comes next, without a look at this chunk's tiles."""
    tma.store_wait(0)
    barrier()
    _bring_rows(maps.k, numbers, where, where.h // numbers.group, tiles.ready.index(4), tiles.k)
    _bring_rows(maps.q, numbers, where, where.h // numbers.group, tiles.ready.index(5), tiles.q)
    for n in gl.static_range(6):
        mbarrier.wait(tiles.ready.index(n), odd)
    barrier()
    if more:
        _bring_first(maps, numbers, tiles, after, odd ^ 1)
        _bring_state(maps.later, after, tiles.ready.index(2), tiles.later)
