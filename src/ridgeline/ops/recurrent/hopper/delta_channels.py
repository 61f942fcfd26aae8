"""Gradients of q, k and gates in chunks of the delta rule with a gate per channel, in Gluon for Hopper, in bfloat16.

A program goes through whole chunks with mild gates, as `triton/delta_at_once.py` has them, and leaves all others. Two
warpgroups share a chunk, each with half of the channels; all is turned, so what a product leaves in registers is the
next one's left side. TMA brings the next chunk's tiles where this one's have been read. A row's decay, its length and
beta are one factor, and a pair's weight is the plain product of its two rows over v's columns.
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

from ridgeline.ops.recurrent.hopper.delta_gradients import coordinates, room_of, sequence_at
from ridgeline.tiles.hopper import barrier, load, make_barriers, store
from ridgeline.tiles.warpgroup import column_chunks, flat, operand_layout, uniform

C = gl.constexpr(64)  # rows of a chunk
WIDTH = gl.constexpr(128)  # channels, and columns of v
HALF = gl.constexpr(64)
SOME = gl.constexpr(32)  # rows at a time, which registers hold


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
    onward: Any  # ones for rows from a column's on
    before_it: Any  # before it
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
def _bring_seen(maps, numbers, tiles, where):
    ready = tiles.ready.index(0)
    mbarrier.expect(ready, 4 * maps.do.block_type.nbytes)
    for part in gl.static_range(2):
        load(maps.do, _row_at(numbers, where, where.h, part * HALF), ready, tiles.seen.index(tiles.zero + 2 * part))
        load(maps.dv, _row_at(numbers, where, where.h, part * HALF), ready, tiles.seen.index(tiles.zero + 2 * part + 1))


@gluon.jit
def _bring_early(maps, numbers, tiles, where, odd):
    _bring_rows(maps.u, numbers, where, where.h, tiles.ready.index(6), tiles.u.index(odd))
    _bring_rows(maps.g, numbers, where, where.h // numbers.gate_group, tiles.ready.index(3), tiles.g)


@gluon.jit
def _bring_states(maps, tiles, where):
    _bring_state(maps.before, where, tiles.ready.index(1), tiles.before)
    _bring_state(maps.later, where, tiles.ready.index(2), tiles.later)


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
    tiles.onward.store(gl.where(r >= t, 1.0, none).to(kind))
    tiles.before_it.store(gl.where(r < t, 1.0, none).to(kind))
    second = (t >= C // 2) & (r >= 0)
    tiles.signs.store(gl.where(second & (r >= t), 1.0, gl.where((second == 0) & (r < t), -1.0, none)).to(kind))


@gluon.jit
def _factors(numbers, where, ROW: gl.constexpr, PART: gl.constexpr, zero, LAYOUT: gl.constexpr):
    """zero: another one keeps the compiler from holding what it has loaded before."""
    place = numbers.decays + (where.place + zero) * (4 * C) + (ROW * C + PART * SOME)
    SIZE: gl.constexpr = LAYOUT.instr_shape[1]
    return gl.load(place + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)))[None, :]


@gluon.jit
def _writing_factors(numbers, where, zero, LAYOUT: gl.constexpr):
    """One over the lengths of k's rows, times beta."""
    return _factors(numbers, where, 1, 0, zero, LAYOUT) * _factors(numbers, where, 3, 0, zero, LAYOUT)


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
def _held_back(tile, zero):
    """A tile's place for sums that registers do not hold, rows of the chunk by channels."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    return tile._reinterpret(gl.float32, [1, C, WIDTH], layout).index(zero)


@gluon.jit
def _by_states(maps, numbers, tiles, where, odd, more, after):
    """Makes the pairs, and the part of the state before the chunk in the gradients of q's rows and of k's, which lie in
    the place of the rows that were seen; the decays lie in the state's. Returns the first, in parts, and for each
    channel the sum of both states' product. after: the next chunk, if `more`."""
    LAYOUT: gl.constexpr = wide_layout(C)
    BOTH: gl.constexpr = wide_layout(WIDTH)
    kind: gl.constexpr = maps.k.dtype
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    none = gl.zeros([WIDTH, C], gl.float32, LAYOUT)
    seen = tiles.seen._reinterpret(kind, [1, WIDTH, WIDTH], square).index(tiles.zero)
    before, later = flat(tiles.before), flat(tiles.later)
    mbarrier.wait(tiles.ready.index(6), odd)
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
    row = gl.arange(0, WIDTH, gl.SliceLayout(1, LAYOUT))[:, None] + tiles.zero
    j = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))[None, :]
    meet = (j < row % C) | ((j == row % C) & (row < C))
    tiles.pairs.store(gl.where(meet, pairs, 0.0).to(kind))
    fence_async_shared()
    mbarrier.wait(tiles.ready.index(3), odd)
    gates = flat(tiles.g).permute((1, 0)).load(operand_layout(LAYOUT))
    both = warpgroup_mma_wait(0, deps=(both,))
    since = warpgroup_mma(gates, tiles.onward.permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(tiles.ready.index(2), odd)
    held = gl.convert_layout(_product_sums(before, later), gl.SliceLayout(1, LAYOUT))
    since = warpgroup_mma_wait(0, deps=(since,))
    barrier()  # all have read these tiles and written the pairs
    if more:
        _bring_early(maps, numbers, tiles, after, odd ^ 1)
    _held_back(tiles.before, tiles.zero).permute((1, 0)).store(_exp2(since * 1.4426950408889634))
    q0, q1, k0, k1 = _parts(both, 4)
    of_k = _held_back(tiles.seen, tiles.zero)
    of_k.slice(0, SOME).permute((1, 0)).store(k0)
    of_k.slice(SOME, SOME).permute((1, 0)).store(k1)
    return q0, q1, held


@gluon.jit
def _part_of(tile, PART: gl.constexpr):
    return flat(tile).slice(PART * SOME, SOME).permute((1, 0))


@gluon.jit
def _parts(x, COUNT: gl.constexpr):
    """Columns of turned rows."""
    made = column_chunks(x, COUNT)
    converted = ()
    for n in gl.static_range(COUNT):
        converted = converted + (gl.convert_layout(made[n], wide_layout(SOME)),)
    return converted


@gluon.jit
def _through_lengths(found, tile, numbers, where, ROW: gl.constexpr, PART: gl.constexpr, zero):
    """From the gradient of turned rows whose lengths are constants that of the rows."""
    LAYOUT: gl.constexpr = found.type.layout
    sums = gl.sum(found * _part_of(tile, PART).load(LAYOUT).to(gl.float32), 0)[None, :]
    shrink = _factors(numbers, where, ROW, PART, zero, LAYOUT)
    return found - _part_of(tile, PART).load(LAYOUT).to(gl.float32) * (shrink * shrink * sums)


@gluon.jit
def _reading(found, state, tiles, tile, numbers, where, scale, ROW: gl.constexpr, PART: gl.constexpr):
    """Some rows that read: with their factor and rounded, their terms by the state and by pairs, and their gradient."""
    LAYOUT: gl.constexpr = found.type.layout
    zero = tiles.zero
    factor = _held_back(tiles.before, zero).slice(PART * SOME, SOME).permute((1, 0)).load(LAYOUT) * (
        scale * _factors(numbers, where, ROW, PART, zero, LAYOUT)
    )
    rows = _part_of(tile, PART).load(LAYOUT).to(gl.float32) * factor
    low = _rounded(rows)
    return low, rows * state, low.to(gl.float32) * found, factor * (state + found)


@gluon.jit
def _rows_of_q(found, state, tiles, numbers, where, scale, PART: gl.constexpr, NORMALIZE: gl.constexpr):
    low, terms, across, dq = _reading(found, state, tiles, tiles.q, numbers, where, scale, 0, PART)
    if NORMALIZE:
        dq = _through_lengths(dq, tiles.q, numbers, where, 0, PART, tiles.zero)
    _part_of(tiles.q, PART).store(dq.to(tiles.q.dtype))
    return gl.convert_layout(low, operand_layout(found.type.layout)), _rounded(terms), across


@gluon.jit
def _rows_of_k(found, terms, across, tiles, numbers, where, PART: gl.constexpr):
    """Adds to the terms of as many rows of q."""
    state = _held_back(tiles.seen, tiles.zero).slice(PART * SOME, SOME).permute((1, 0)).load(found.type.layout)
    low, more, further, dk = _reading(found, state, tiles, tiles.k, numbers, where, -1.0, 1, PART)
    terms = _rounded(terms.to(gl.float32) + more)
    return gl.convert_layout(low, operand_layout(found.type.layout)), terms, across + further, dk


@gluon.jit
def _of_chunk(maps, numbers, tiles, where, odd, more, after, whole, scale, NORMALIZE: gl.constexpr):
    LAYOUT: gl.constexpr = wide_layout(C)
    LEFT: gl.constexpr = operand_layout(LAYOUT)
    kind: gl.constexpr = maps.k.dtype
    none = gl.zeros([WIDTH, C], gl.float32, LAYOUT)
    some = gl.zeros([WIDTH, SOME], gl.float32, wide_layout(SOME))
    q0, q1, held = _by_states(maps, numbers, tiles, where, odd, more, after)
    pairs = tiles.pairs._reinterpret(kind, [4, SOME, C], gl.NVMMASharedLayout(128, 16, 2))
    mbarrier.wait(tiles.ready.index(4), odd)
    late = _held_back(tiles.before, tiles.zero).permute((1, 0)).load(LAYOUT)
    low_c = _turned(tiles.k, LAYOUT) * (_writing_factors(numbers, where, 0, LAYOUT) * _inverse(late))
    low_c = _rounded(low_c)
    left = gl.convert_layout(low_c, LEFT)
    one = warpgroup_mma(left, pairs.index(0).permute((1, 0)), some, use_acc=False, is_async=True)
    other = warpgroup_mma(left, pairs.index(1).permute((1, 0)), some, use_acc=False, is_async=True)
    mbarrier.wait(tiles.ready.index(5), odd)
    one = warpgroup_mma_wait(1, deps=(one,))
    q0, terms0, across0 = _rows_of_q(one, q0, tiles, numbers, where, scale, 0, NORMALIZE)
    one = warpgroup_mma(left, pairs.index(2).permute((1, 0)), some, use_acc=False, is_async=True)
    other = warpgroup_mma_wait(1, deps=(other,))
    q1, terms1, across1 = _rows_of_q(other, q1, tiles, numbers, where, scale, 1, NORMALIZE)
    other = warpgroup_mma(left, pairs.index(3).permute((1, 0)), some, use_acc=False, is_async=True)
    one = warpgroup_mma_wait(1, deps=(one,))
    k0, terms0, across0, dk0 = _rows_of_k(one, terms0, across0, tiles, numbers, where, 0)
    other = warpgroup_mma_wait(0, deps=(other,))
    found = warpgroup_mma(q0, pairs.index(0), none, use_acc=False, is_async=True)
    found = warpgroup_mma(q1, pairs.index(1), found, is_async=True)
    found = warpgroup_mma(k0, pairs.index(2), found, is_async=True)
    k1, terms1, across1, dk1 = _rows_of_k(other, terms1, across1, tiles, numbers, where, 1)
    found = warpgroup_mma(k1, pairs.index(3), found, is_async=True)
    fence_async_shared()
    barrier()  # all have read what lay with the rows that were seen
    if more:
        _bring_seen(maps, numbers, tiles, after)
    found = warpgroup_mma_wait(0, deps=(found,))
    later, u = flat(tiles.later), flat(tiles.u.index(odd))
    db = warpgroup_mma(later.permute((1, 0)), u.permute((1, 0)), none, use_acc=False, is_async=True)
    away0, away1 = _parts(low_c.to(gl.float32) * found, 2)
    across0, across1 = across0 - away0, across1 - away1
    db = warpgroup_mma_wait(0, deps=(db,))
    db *= whole[:, None]
    sums = _sums_of_gates(tiles, gl.convert_layout(_rounded(low_c.to(gl.float32) * db), LEFT), (terms0, terms1),
                          (across0, across1))  # fmt: skip
    late = _held_back(tiles.before, tiles.zero).permute((1, 0)).load(LAYOUT)
    db = _writing_factors(numbers, where, tiles.zero, LAYOUT) * _inverse(late) * (db + found)
    db0, db1 = _parts(db, 2)
    dk0, dk1 = dk0 + db0, dk1 + db1
    if NORMALIZE:
        dk0 = _through_lengths(dk0, tiles.k, numbers, where, 1, 0, tiles.zero)
        dk1 = _through_lengths(dk1, tiles.k, numbers, where, 1, 1, tiles.zero)
    _part_of(tiles.k, 0).store(dk0.to(kind))
    _part_of(tiles.k, 1).store(dk1.to(kind))
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
        _bring_states(maps, tiles, after)


@gluon.jit
def _sums_of_gates(tiles, own, terms, across):
    """Starts the sums of a chunk's gates: rows that write count before a gate, those that read from it on, and pairs in
    two parts with their signs."""
    NARROW: gl.constexpr = operand_layout(wide_layout(SOME))
    kind: gl.constexpr = own.dtype
    square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sums = gl.zeros([WIDTH, C], gl.float32, wide_layout(C))
    sums = warpgroup_mma(own, tiles.before_it, sums, use_acc=False, is_async=True)
    onward, signs = (
        tiles.onward._reinterpret(kind, [2, SOME, C], square), tiles.signs._reinterpret(kind, [2, SOME, C], square)
    )  # fmt: skip
    for n in gl.static_range(2):
        sums = warpgroup_mma(gl.convert_layout(terms[n], NARROW), onward.index(n), sums, is_async=True)
        high = _rounded(across[n])
        low = _rounded(across[n] - high.to(gl.float32))
        sums = warpgroup_mma(gl.convert_layout(high, NARROW), signs.index(n), sums, is_async=True)
        sums = warpgroup_mma(gl.convert_layout(low, NARROW), signs.index(n), sums, is_async=True)
    return sums


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
        pairs, masks, masks, masks, make_barriers(7, 1), 0,
    )  # fmt: skip
    tiles = _opened(rings, gl.program_id(0) * 0)
    _write_masks(tiles, kind)
    fence_async_shared()
    barrier()
    steps = (numbers.everything - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    where = _chunk_of(numbers, 0)
    _bring_early(maps, numbers, tiles, where, 0)
    _bring_seen(maps, numbers, tiles, where)
    _bring_states(maps, tiles, where)
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
    for n in gl.static_range(7):
        mbarrier.wait(tiles.ready.index(n), odd)
    barrier()
    if more:
        _bring_early(maps, numbers, tiles, after, odd ^ 1)
        _bring_seen(maps, numbers, tiles, after)
        _bring_states(maps, tiles, after)
