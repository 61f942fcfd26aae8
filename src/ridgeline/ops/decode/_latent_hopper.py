"""mla_decode in Gluon for Hopper: 64 rows of queries and a part of a sequence's keys a program, in three roles.

The producer warp loads tiles of 64 tokens with TMA into two places of shared memory, each in three pieces: columns 0 to
255, 256 to 511, and the 64 rotated ones. Two consumer groups share each pair of tiles. Group 0 makes the scores and
probabilities of the first tile, group 1 those of the second. Group 0 adds up columns 0 to 255 of the values of both
tiles, group 1 columns 256 to 511: half of a result of 64 x 512 fits in a group's registers. A group reads its own
probabilities from registers and the other's from shared memory, where the tile's rotated columns were; with them comes
the maximum that they are relative to. So one group's softmax runs beside the other's products.
Source: DeepSeek-AI, FlashMLA, 2025 (two groups that share a tile's result); Shah et al., FlashAttention-3, 2024.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ridgeline.tiles.hopper import barrier, load, make_barriers
from ridgeline.tiles.warpgroup import (
    column_chunks,
    cut_columns,
    flat,
    operand_layout,
    rescale,
    sequence_row,
    sums_layout,
    uniform,
)

ROWS = gl.constexpr(64)  # of queries a program
BN = gl.constexpr(64)  # tokens of a tile
HALF = gl.constexpr(256)  # columns of the result that a group has
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
PIECES = gl.constexpr(3)  # of a tile of tokens: two halves of the latent columns, and the rotated ones
NO_KEYS = gl.constexpr(-1.0e30)  # the maximum of rows that have seen no key; not -inf, since differences would be NaN


class Maps(NamedTuple):
    """Tensor maps: q (B, S H, D); the cache and new tokens as sequences whose boxes end where these do."""

    q: Any
    q_rope: Any
    cache: Any
    cache_rope: Any
    new: Any  # or None
    new_rope: Any
    tokens: Any  # the cache itself


class Results(NamedTuple):
    o: Any  # (B, S, H, 512), contiguous
    lse: Any  # (B, H, S), float32
    pieces: Any  # float32: values, maxima and sums of each part; None if there is one part


class Sizes(NamedTuple):
    heads: Any
    queries: Any
    parts: Any
    capacity: Any
    factor: Any  # scale times log2(e)
    gap: Any  # from the capacity to the next multiple of 64
    step: Any  # between sequences of the cache


class Work(NamedTuple):
    """What a program does."""

    b: Any
    row: Any  # the first of 64
    part: Any
    known: Any  # tokens in the cache that may be read
    total: Any  # and tokens that the cache has no room for
    first: Any  # the place of the first query
    begin: Any  # the part's first token
    pairs: Any  # of tiles
    active: Any  # whether the part exists


class Room(NamedTuple):
    """Shared memory. A piece p of the tile in place n has the barriers n * PIECES + p."""

    q: Any  # two halves
    q_rope: Any
    halves: Any  # two of each place
    rope: Any  # of each place; later the probabilities of its tile
    tops: Any  # maxima after each of a pair's tiles
    sums: Any  # of each group's probabilities
    begun: Any  # barrier: q is there
    ready: Any
    free: Any
    made: Any  # barriers: the probabilities and maxima of a tile are there
    ended: Any  # barrier: both groups' sums are there


@gluon.jit
def share_out(lengths, sizes, APPENDED: gl.constexpr, FIXED: gl.constexpr):
    """What this program does. Parts are those that `span` in _parts.py makes with tiles of 128 tokens."""
    rows = sizes.heads * sizes.queries
    tiles = gl.cdiv(rows, ROWS)
    tile, turn = gl.program_id(0) % tiles, gl.program_id(0) // tiles
    part, b = turn % sizes.parts, turn // sizes.parts
    length = gl.minimum(gl.load(lengths + b), sizes.capacity)
    count, least = sizes.parts, 2 * BN
    if FIXED:
        count, least = 64, 4 * BN
    size = gl.maximum(length, 0)
    share = gl.maximum(gl.cdiv(gl.cdiv(size, count), 2 * BN) * (2 * BN), least)
    active = gl.maximum(gl.cdiv(size, share), 1)
    first, total = length - sizes.queries, length
    if APPENDED:
        first, total = length, length + sizes.queries
    begin = part * share
    end = gl.minimum(begin + share, length)
    known = gl.minimum(total, sizes.capacity)
    blocks = gl.cdiv(gl.maximum(end - begin, 0), BN)
    if APPENDED:  # noqa: SIM102  # the last part also has the new tokens; those past the cache's end are a tile more
        if part == active - 1:
            blocks = gl.cdiv(gl.maximum(known - begin, 0), BN) + (total > sizes.capacity).to(gl.int32)
    pairs = (blocks + 1) // 2
    pairs = gl.where((length < 0) | (part >= active), 0, pairs)
    return Work(b, tile * ROWS, part, known, total, first, begin, pairs, (part < active).to(gl.int32))


@gluon.jit
def fill(source, source_rope, b, end, row, n, odd, room):
    """Loads the tile of 64 tokens from `row` of a sequence that ends at `end` into place n."""
    far, last, inside = sequence_row(0, end, row)
    for p in gl.static_range(PIECES):
        at = n * PIECES + p
        mbarrier.wait(room.free.index(at), odd ^ 1)
        if p < 2:
            mbarrier.expect(room.ready.index(at), source.block_type.nbytes)
            load(source, [far, last, b, inside, p * HALF], room.ready.index(at), room.halves.index(n * 2 + p))
        else:
            mbarrier.expect(room.ready.index(at), source_rope.block_type.nbytes)
            load(source_rope, [far, last, b, inside, LATENT], room.ready.index(at), room.rope.index(n))


@gluon.constexpr_function
def fetching_code():
    """PTX that brings 64 tokens of 1152 bytes, which follow one another, into L2: 128 bytes a lane and instruction."""
    steps = BN.value * (LATENT.value + ROPE.value) * 2 // 4096
    return " ".join(f"prefetch.global.L2 [$1+{4096 * n}];" for n in range(steps)) + " mov.u32 $0, 0;"


@gluon.jit
def fetch(maps, row, work, sizes):
    """Brings the tile of 64 tokens from `row` into L2; the copy engine would wait for memory with its place empty."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    first = maps.tokens + work.b.to(gl.int64) * sizes.step + row.to(gl.int64) * (LATENT + ROPE)
    lines = (first + 64 * lane).to(gl.int64)
    gl.inline_asm_elementwise(fetching_code(), "=r,l", [lines], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def producer(maps, room, work, sizes, PDL: gl.constexpr, AHEAD: gl.constexpr):
    if PDL:
        gdc_wait()  # new tokens are in the cache
    pairs = uniform(work.pairs)
    if pairs > 0:
        mbarrier.expect(room.begun.index(0), 2 * maps.q.block_type.nbytes + maps.q_rope.block_type.nbytes)
        for p in gl.static_range(2):
            load(maps.q, [work.b, work.row, p * HALF], room.begun.index(0), room.q.index(p))
        load(maps.q_rope, [work.b, work.row, LATENT], room.begun.index(0), room.q_rope.index(0))
    for i in range(pairs):
        for n in gl.static_range(2):
            row = work.begin + (2 * i + n) * BN
            if AHEAD > 0:  # noqa: SIM102  # one of the programs that share the tokens
                if (work.row == 0) & (row + (AHEAD + 1) * BN <= work.known):
                    fetch(maps, row + AHEAD * BN, work, sizes)
            if maps.new is not None:
                if row >= sizes.capacity:
                    at = row - sizes.gap - work.first
                    fill(maps.new, maps.new_rope, work.b, sizes.queries, at, n, i & 1, room)
                else:
                    fill(maps.cache, maps.cache_rope, work.b, work.known, row, n, i & 1, room)
            else:
                fill(maps.cache, maps.cache_rope, work.b, work.known, row, n, i & 1, room)


@gluon.jit
def piece(n, p: gl.constexpr, room):
    """The columns of piece p of the tile in place n."""
    if p < 2:
        columns = flat(room.halves.index(n * 2 + p))
    else:
        columns = flat(room.rope.index(n))
    return columns


@gluon.jit
def scores(n, odd, zero, room):
    """The products of all queries with the tile in place n."""
    here = uniform(0)  # else each instruction's descriptor is kept in registers, more than there are
    mbarrier.wait(room.ready.index(n * PIECES), odd)
    s = warpgroup_mma(
        flat(room.q.index(here)), piece(here + n, 0, room).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(room.ready.index(n * PIECES + 1), odd)
    s = warpgroup_mma(flat(room.q.index(here + 1)), piece(here + n, 1, room).permute((1, 0)), s, is_async=True)
    mbarrier.wait(room.ready.index(n * PIECES + 2), odd)
    s = warpgroup_mma(flat(room.q_rope.index(here)), piece(here + n, 2, room).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def hide(s, row, work, sizes):
    """Scores, -inf where a query does not see a token. row: the tile's place among the part's tiles."""
    past = row >= sizes.capacity
    place = gl.where(past, row - sizes.gap, row)
    if place + BN > work.first:
        j = (work.row + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))) // sizes.heads
        last = gl.minimum(work.first + j, gl.where(past, work.total, work.known) - 1)
        s = cut_columns(s, last - place)
    return s


@gluon.jit
def publish(n, p, top, room):
    """Gives the other group the probabilities of the tile in place n, and what they are relative to."""
    barrier()  # all warps have read the tile's rotated columns
    room.tops.index(n).store(top)
    flat(room.rope.index(n)).store(p)
    fence_async_shared()
    barrier()
    mbarrier.arrive(room.made.index(n), count=1)


@gluon.jit
def received(n, odd, ME: gl.constexpr, layout: gl.constexpr, room):
    """Waits for the other group's probabilities of the tile in place n. Returns what they are relative to."""
    mbarrier.wait(room.made.index(n), odd)
    mbarrier.wait(room.ready.index(n * PIECES + ME), odd)
    return room.tops.index(n).load(layout)


@gluon.jit
def add_values(p, n, acc, ME: gl.constexpr, room):
    """Starts acc + p V, of the tile in place n and this group's half of the columns."""
    return warpgroup_mma(p, piece(n, ME, room), acc, is_async=True)


@gluon.jit
def release(n, ME: gl.constexpr, room):
    """Gives back this group's half of the tile in place n, and the rotated columns if they are the other group's."""
    barrier()  # all warps have read what they hold
    mbarrier.arrive(room.free.index(n * PIECES + ME), count=1)
    if n != ME:
        mbarrier.arrive(room.free.index(n * PIECES + 2), count=1)


@gluon.jit
def consumer(ME: gl.constexpr, results, room, work, sizes):
    S: gl.constexpr = sums_layout(BN)
    O: gl.constexpr = sums_layout(HALF)
    row_layout: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = room.rope.dtype
    zero = gl.zeros([ROWS, BN], gl.float32, S)
    acc = gl.zeros([ROWS, HALF], gl.float32, O)
    top = gl.full([ROWS], NO_KEYS, gl.float32, row_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    pairs = uniform(work.pairs)
    mbarrier.wait(room.begun.index(0), 0, pred=pairs > 0)
    for i in range(pairs):
        odd = i & 1
        s = scores(ME, odd, zero, room)
        s = hide(s, work.begin + (2 * i + ME) * BN, work, sizes)
        if ME == 1:
            before = received(0, odd, ME, row_layout, room)
            shrink = gl.exp2(top - before)
            total *= shrink
            pending = add_values(flat(room.rope.index(0)), 0, rescale(acc, shrink), ME, room)
            top = before
        after = gl.maximum(top, gl.max(s, 1) * sizes.factor)
        p = gl.exp2(s * sizes.factor - after[:, None])
        shrink = gl.exp2(top - after)
        total = total * shrink + gl.sum(p, 1)
        top = after
        half = p.to(dtype)
        publish(ME, half, top, room)
        if ME == 1:
            acc = warpgroup_mma_wait(0, deps=(pending,))
            release(0, ME, room)
        left = gl.convert_layout(half, operand_layout(O))
        pending = add_values(left, ME, rescale(acc, shrink), ME, room)
        acc = warpgroup_mma_wait(0, deps=(pending,))
        release(ME, ME, room)
        if ME == 0:
            after = received(1, odd, ME, row_layout, room)
            shrink = gl.exp2(top - after)
            total *= shrink
            top = after
            pending = add_values(flat(room.rope.index(1)), 1, rescale(acc, shrink), ME, room)
            acc = warpgroup_mma_wait(0, deps=(pending,))
            release(1, ME, room)
    room.sums.index(ME).store(total)
    barrier()
    mbarrier.arrive(room.ended.index(0), count=1)
    mbarrier.wait(room.ended.index(0), 0)
    total = room.sums.index(0).load(row_layout) + room.sums.index(1).load(row_layout)
    finish(ME, results, acc, top, total, work, sizes)


@gluon.jit
def finish(ME: gl.constexpr, results, acc, top, total, work, sizes):
    """Writes this group's columns: finished if there is one part, else as pieces."""
    size = sizes.heads * sizes.queries
    r = work.row + gl.arange(0, ROWS, top.type.layout)
    known = (r < size) & (work.active != 0)
    empty = total == 0.0
    whole = gl.where(empty, 1.0, total)
    CHUNK: gl.constexpr = 64
    if results.pieces is None:
        acc = rescale(acc, 1.0 / whole)
        base = results.o
        at = (work.b * size).to(gl.int64)
        if ME == 0:
            lse = gl.where(empty, float("-inf"), (top + gl.log2(whole)) * 0.6931471805599453)
            where = (work.b * sizes.heads + r % sizes.heads) * sizes.queries + r // sizes.heads
            gl.store(results.lse + where, lse, mask=known)
    else:
        base = results.pieces
        at = (work.b * sizes.parts + work.part).to(gl.int64) * size
        if ME == 0:
            count = (gl.num_programs(0) // gl.cdiv(size, ROWS)).to(gl.int64) * size
            gl.store(base + count * LATENT + at + r, gl.where(empty, float("-inf"), top), mask=known)
            gl.store(base + count * (LATENT + 1) + at + r, total, mask=known)
    base += at * LATENT + ME * HALF
    chunks = column_chunks(acc, HALF // CHUNK)
    for c in gl.static_range(HALF // CHUNK):
        x = chunks[c]
        i = work.row + gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
        d = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, x.type.layout))
        inside = (i < size) & (work.active != 0)
        gl.store(base + i[:, None] * LATENT + d[None, :], x.to(base.dtype.element_ty), mask=inside[:, None])


@gluon.jit
def attend(
    results, maps, lengths, sizes, APPENDED: gl.constexpr, FIXED: gl.constexpr, PDL: gl.constexpr, AHEAD: gl.constexpr
):
    work = share_out(lengths, sizes, APPENDED, FIXED)
    dtype: gl.constexpr = maps.q.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = Room(
        gl.allocate_shared_memory(dtype, [2] + maps.q.block_type.shape, maps.q.layout),
        gl.allocate_shared_memory(dtype, [1] + maps.q_rope.block_type.shape, maps.q_rope.layout),
        gl.allocate_shared_memory(dtype, [4] + maps.cache.block_type.shape, maps.cache.layout),
        gl.allocate_shared_memory(dtype, [2] + maps.cache_rope.block_type.shape, maps.cache_rope.layout),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
        make_barriers(1, 1),
        make_barriers(2 * PIECES, 1),
        make_barriers(2 * PIECES, 1),
        make_barriers(2, 1),
        make_barriers(1, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (0, results, room, work, sizes)),
            (consumer, (1, results, room, work, sizes)),
            (producer, (maps, room, work, sizes, PDL, AHEAD)),
        ],
        [4, 1],
        [240, 24],
    )
