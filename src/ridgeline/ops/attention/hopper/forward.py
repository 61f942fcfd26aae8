"""The implementation `gluon` of attention: a persistent, warp-specialised forward kernel for Hopper.

The producer warp loads tiles of q, k and v with TMA into rings in shared memory. Two or three consumer warpgroups have
64 rows of queries each, keep their sums in registers and share the keys. A group starts the products for a block's
scores, then those for its output with the previous block's probabilities. It computes exponentials while the latter
run, then packs them into the registers that those products read. After a tile's first block, maxima are computed only
if a sum gets too large (softmax.py). Other groups use the matrix units meanwhile, and two groups may take turns at
starting products. Each program takes tiles of queries in an order that balances the work (scheduler.py), and starts the
next tile's scores before it finishes a tile.
Source: Shah et al., FlashAttention-3, 2024 (arXiv:2407.08608).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from ridgeline.boundary import launch
from ridgeline.ops.attention.hopper.epilogue import store_lse, store_output
from ridgeline.ops.attention.hopper.pipeline import ROWS, make_ring, write_record
from ridgeline.ops.attention.hopper.products import Sums, no_sums, pack_pairs, pairs_to_operand, start_scores
from ridgeline.ops.attention.hopper.scheduler import Rules, Scale, Sizes, Tile, TileScheduler
from ridgeline.ops.attention.hopper.softmax import (
    State,
    declare_overflow,
    first_exponentials,
    later_exponentials,
    overflowed,
    partial_sums,
    raised_exponentials,
    watch_overflow,
)
from ridgeline.tiles.warpgroup import operand_layout, rescale, sums_layout, uniform


class Maps(NamedTuple):
    """Tensor maps, whose boxes are tiles; with FLOAT, o is the tensor."""

    q: Any
    k: Any
    v: Any
    o: Any


class Rings(NamedTuple):
    """Shared memory: rings of tiles of q, k and v, and the records of tiles, whose places share q's barriers."""

    q: Any
    k: Any
    v: Any
    records: Any


@gluon.jit
def describe(records, n, tile, PACKED: gl.constexpr):
    """Writes the record of the n-th tile."""
    if PACKED:
        write_record(
            records, n, tile.head, tile.row, tile.low, tile.high, tile.start, tile.length, tile.columns, tile.shift
        )
    else:
        write_record(records, n, tile.head, tile.row, tile.low, tile.high, tile.start, 0, 0, 0)


@gluon.jit
def producer(listed, maps, rings, scheduler):
    """The producer warp: fills the rings and describes each tile.

    For packed sequences it takes the next untaken tile of the list.
    """
    GROUPS: gl.constexpr = scheduler.RULES.GROUPS
    n, block = 0, 0
    if scheduler.PACKED:
        gdc_wait()  # for the list; nothing is written before
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        count = gl.load(listed + 1) * scheduler.heads
        t = gl.program_id(0)
    else:
        count = scheduler.all_heads * scheduler.tiles
        t = scheduler.nth(0)
    while t < count:
        if scheduler.PACKED:
            taken = gl.atomic_add(listed + 0 * lane, 0 * lane + 1, mask=lane == 0, sem="relaxed")
            head, row, start, rows, k_start, columns = scheduler.packed_place(listed, t)
            shift = scheduler.shift * (columns - rows)
        else:
            of_all, row = scheduler.place(t)
            start, rows, columns, shift = of_all // scheduler.heads, scheduler.rows, scheduler.columns, scheduler.shift
            head, k_start = of_all - start * scheduler.heads, start
        low, high = scheduler.key_blocks(row, columns, shift)
        for g in gl.static_range(GROUPS):
            rings.q.await_free(n * GROUPS + g)
        describe(rings.records, n, Tile(head, row, low, high, start, rows, columns, shift), scheduler.PACKED)
        for g in gl.static_range(GROUPS):
            rings.q.fill(maps.q, n * GROUPS + g, scheduler.coordinates(head, row + g * ROWS, start, rows))
        for past in range(high - low):
            k_row = (high - 1 - past) * scheduler.RULES.BN
            at = scheduler.coordinates(head // scheduler.group, k_row, k_start, columns)
            rings.k.fill(maps.k, block, at)
            rings.v.fill(maps.v, block, at)
            block += 1
        n += 1
        if scheduler.PACKED:
            t = gl.num_programs(0) + uniform(gl.sum(gl.where(lane == 0, taken, 0), 0))
        else:
            t = scheduler.nth(n)
    for g in gl.static_range(GROUPS):
        rings.q.await_free(n * GROUPS + g)
    write_record(rings.records, n, -1, 0, 0, 1, 0, 0, 0, 0)
    for g in gl.static_range(GROUPS):
        rings.q.end(n * GROUPS + g)


@gluon.constexpr_function
def named_barrier_code(ME, WAIT):
    return f"bar.{'sync' if WAIT else 'arrive'} {13 + ME}, 256; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(ME: gl.constexpr, WAIT: gl.constexpr):
    """A named barrier between two groups: waits at it, or arrives without waiting."""
    gl.inline_asm_elementwise(named_barrier_code(ME, WAIT), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_turn(ME: gl.constexpr, scheduler):
    """Waits, if groups take turns at starting products, until it is this group's turn."""
    if scheduler.RULES.TURNS:
        named_barrier(ME, True)


@gluon.jit
def end_turn(ME: gl.constexpr, scheduler):
    if scheduler.RULES.TURNS:
        named_barrier(1 - ME, False)


@gluon.jit
def skip_block(ME: gl.constexpr, rings, block, LAG: gl.constexpr, scheduler):
    """Releases a block's keys, and the values LAG blocks before. Returns the number of the next block."""
    rings.k.take(block)
    rings.v.take(block - LAG)
    begin_turn(ME, scheduler)
    end_turn(ME, scheduler)
    rings.k.release(block)
    rings.v.release(block - LAG)
    return block + 1


@gluon.jit
def take_tile(ME: gl.constexpr, n, block, rings, scheduler):
    """Waits for the n-th tile, and skips its last blocks, which no row of this group sees.

    Returns the queries, the first keys, the tile with the blocks that the group sees, and the number of the first.
    """
    q = rings.q.take(n * scheduler.RULES.GROUPS + ME)
    tile = scheduler.read_tile(rings.records, n)
    wanted = tile.head >= 0
    high = scheduler.last_block(tile.row + ME * ROWS, tile)
    if wanted:
        for _ in range(tile.high - high):
            block = skip_block(ME, rings, block, 0, scheduler)
    tile = Tile(tile.head, tile.row, tile.low, high, tile.start, tile.length, tile.columns, tile.shift)
    return q, rings.k.take(block, wanted), tile, block


@gluon.jit
def first_block(ME: gl.constexpr, q, keys, tile, block, zero, rings, scheduler):
    """Computes the probabilities of a tile's first block, and releases its keys."""
    begin_turn(ME, scheduler)
    products = start_scores(q, keys, zero, scheduler.RULES.REST)
    end_turn(ME, scheduler)
    s = warpgroup_mma_wait(0, deps=(products,))
    rings.k.release(block, tile.head >= 0)
    s, row_max = first_exponentials(s, tile.row + ME * ROWS, tile, scheduler)
    return State(pack_pairs(s, q.dtype), row_max, partial_sums(s))


@gluon.jit
def start_output(left, p, values, acc, more):
    """Starts acc + p V, without acc unless `more`. left: p as the left operand for the main columns."""
    if len(acc.rest) > 0:
        D: gl.constexpr = acc.main.shape[1]
        REST: gl.constexpr = acc.rest[0].shape[1]
        layout: gl.constexpr = operand_layout(acc.rest[0].type.layout)
        main = warpgroup_mma(left, values.slice(0, D, 1), acc.main, use_acc=more, is_async=True)
        rest_left = pairs_to_operand(p, values.dtype, layout)
        rest = warpgroup_mma(rest_left, values.slice(D, REST, 1), acc.rest[0], use_acc=more, is_async=True)
        return Sums(main, (rest,))
    else:
        return Sums(warpgroup_mma(left, values, acc.main, use_acc=more, is_async=True), ())


@gluon.jit
def await_output(pending, s):
    """Waits for `start_output`. s: what must not be computed later."""
    if len(pending.rest) > 0:
        main, rest, s = warpgroup_mma_wait(0, deps=(pending.main, pending.rest[0], s))
        return Sums(main, (rest,)), s
    else:
        main, s = warpgroup_mma_wait(0, deps=(pending.main, s))
        return Sums(main, ()), s


@gluon.jit
def repeat_block(q, keys, tile, row, block, state, acc, zero, scheduler):
    """Computes a block's exponentials again, for new maxima, and rescales the sums."""
    products = start_scores(q, keys, zero, scheduler.RULES.REST)
    s = warpgroup_mma_wait(0, deps=(products,))
    s, row_max = raised_exponentials(s, row, block, state.row_max, tile, scheduler)
    less = gl.exp2(state.row_max - row_max)
    sums = partial_sums(s)
    row_sum = rescale(state.row_sum, less)
    main = rescale(acc.main, less)
    rest = acc.rest
    if len(rest) > 0:
        rest = (rescale(rest[0], less),)
    return s, sums, State(state.p, row_max, row_sum), Sums(main, rest)


@gluon.jit
def later_blocks(ME: gl.constexpr, q, tile, state, acc, block, zero, rings, scheduler):
    """Computes a tile's later blocks: the scores of each run beside the output of the one before."""
    REST: gl.constexpr = scheduler.RULES.REST
    row = tile.row + ME * ROWS
    full = scheduler.full_blocks(row, tile.low, tile)
    for past in range(1, tile.high - tile.low):
        here = tile.high - 1 - past
        values = rings.v.take(block - 1)
        keys = rings.k.take(block)
        left = pairs_to_operand(state.p, q.dtype, operand_layout(acc.main.type.layout))
        begin_turn(ME, scheduler)
        products = start_scores(q, keys, zero, REST)
        pending = start_output(left, state.p, values, acc, past > 1)
        end_turn(ME, scheduler)
        s = warpgroup_mma_wait(2 if REST else 1, deps=(products,))
        s, row_max = later_exponentials(s, row, here, full, state.row_max, tile, scheduler)
        sums = watch_overflow(ME, partial_sums(s), q.dtype)
        acc, s = await_output(pending, s)  # the next p lies where this product reads the last
        state = State(state.p, row_max, state.row_sum)
        if overflowed(ME):
            s, sums, state, acc = repeat_block(q, keys, tile, row, here, state, acc, zero, scheduler)
        rings.k.release(block)
        rings.v.release(block - 1)
        state = State(pack_pairs(s, q.dtype), state.row_max, state.row_sum + sums)
        block += 1
    return state, acc, block


@gluon.jit
def last_output(ME: gl.constexpr, n, tile, state, acc, block, zero, rings, scheduler, AHEAD: gl.constexpr):
    """Adds the last block's output. With AHEAD, the first scores of the n-th tile, the next one, run beside it.

    Returns the output, the next tile, its state (without AHEAD those given), and the number of its first block.
    """
    REST: gl.constexpr = scheduler.RULES.REST
    last, more = block - 1, tile.high - tile.low > 1
    following, after = tile, state
    if AHEAD:
        q, keys, following, block = take_tile(ME, n, block, rings, scheduler)
    values = rings.v.take(last)
    left = pairs_to_operand(state.p, values.dtype, operand_layout(acc.main.type.layout))
    begin_turn(ME, scheduler)
    if AHEAD:
        products = start_scores(q, keys, zero, REST)
    pending = start_output(left, state.p, values, acc, more)
    end_turn(ME, scheduler)
    if AHEAD:
        s = warpgroup_mma_wait(2 if REST else 1, deps=(products,))
        s, row_max = first_exponentials(s, following.row + ME * ROWS, following, scheduler)
        row_sum = partial_sums(s)
        acc, s = await_output(pending, s)
        rings.v.release(last)
        rings.k.release(block, following.head >= 0)
        after = State(pack_pairs(s, values.dtype), row_max, row_sum)
    else:
        acc = Sums(warpgroup_mma_wait(0, deps=(pending.main,)), ())
        rings.v.release(last)
    return acc, following, after, block


@gluon.jit
def consumer(ME: gl.constexpr, out, lse, sinks, rings, scheduler):
    """A consumer group: its rows of all tiles of this program.

    With REST, D is half of a tile's columns plus at most REST, and o is in two parts. If q has room for only one tile
    (D > 128), the next one begins when this one has released it.
    """
    GROUPS: gl.constexpr = scheduler.RULES.GROUPS
    REST: gl.constexpr = scheduler.RULES.REST
    BN: gl.constexpr = scheduler.RULES.BN
    AHEAD: gl.constexpr = rings.q.SIZE > GROUPS
    WIDE: gl.constexpr = rings.q.tiles.type.shape[-1]
    D: gl.constexpr = WIDE // 2 if REST else WIDE
    zero = gl.zeros([ROWS, BN], gl.float32, sums_layout(BN))
    acc = no_sums(ROWS, D, REST)
    n, block = 0, 0
    if scheduler.RULES.TURNS and ME == 1:
        named_barrier(0, False)
    q, keys, tile, block = take_tile(ME, 0, block, rings, scheduler)
    state = first_block(ME, q, keys, tile, block, zero, rings, scheduler)
    declare_overflow(ME)
    block += 1
    while tile.head >= 0:
        row, low = tile.row + ME * ROWS, tile.low
        q = rings.q.tile(n * GROUPS + ME)
        if GROUPS == 3:  # noqa: SIM102  # decided at compile time; two groups gain nothing
            # Without rows this group computes only the tile's first block, with the values of the last.
            if row >= tile.length:
                for _ in range(1, tile.high - low):
                    block = skip_block(ME, rings, block, 1, scheduler)
                low = tile.high - 1
        tile = Tile(tile.head, tile.row, low, tile.high, tile.start, tile.length, tile.columns, tile.shift)
        state, acc, block = later_blocks(ME, q, tile, state, acc, block, zero, rings, scheduler)
        acc, following, after, block = last_output(ME, n + 1, tile, state, acc, block, zero, rings, scheduler, AHEAD)
        divisor = store_lse(lse, sinks, state.row_max, state.row_sum, row, tile, scheduler)
        acc = store_output(acc, divisor, rings.q, n * GROUPS + ME, row, tile, out, scheduler)
        if not AHEAD:
            q, keys, following, block = take_tile(ME, n + 1, block, rings, scheduler)
            after = first_block(ME, q, keys, following, block, zero, rings, scheduler)
        tile, state = following, after
        block += 1
        n += 1
    if scheduler.RULES.TURNS and ME == 0:
        named_barrier(0, True)


@gluon.jit(do_not_specialize=["sizes"])
def _fwd(lse, sinks, listed, maps, sizes, scale, RULES: gl.constexpr):
    GROUPS: gl.constexpr = RULES.GROUPS
    STAGES: gl.constexpr = RULES.STAGES
    scheduler = TileScheduler(sizes, scale, RULES, GROUPS * ROWS, listed is not None)
    q = make_ring(maps.q, GROUPS if maps.q.block_type.shape[-1] > 128 else 2 * GROUPS, 1)
    k = make_ring(maps.k, STAGES, GROUPS)
    v = make_ring(maps.v, STAGES, GROUPS)
    records = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = Rings(q, k, v, records)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (0, maps.o, lse, sinks, rings, scheduler)),
                (consumer, (1, maps.o, lse, sinks, rings, scheduler)),
                (producer, (listed, maps, rings, scheduler)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, maps.o, lse, sinks, rings, scheduler)),
                (consumer, (1, maps.o, lse, sinks, rings, scheduler)),
                (consumer, (2, maps.o, lse, sinks, rings, scheduler)),
                (producer, (listed, maps, rings, scheduler)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def start(
    programs: int, lse: Any, sinks: Any, listed: Any, maps: Any, sizes: Sizes, scale: Scale, rules: Rules,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Starts the kernel with so many programs. maps: of q, k, v and o; options: of the compiler."""
    launch(_fwd, (programs,), lse, sinks, listed, Maps(*maps), sizes, scale, RULES=rules, **options)
