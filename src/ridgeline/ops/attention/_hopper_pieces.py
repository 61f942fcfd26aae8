"""Attention's backward on Hopper, for all D: pieces of work, the producer warp, and the warpgroup that computes dQ.

A piece is some keys and the blocks of 64 queries that see any of them. This module decides in which order programs take
pieces, and how many pieces add to a block of dQ before each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention._hopper_rings import ROWS, _add, _await, _flat, _in, _load, _look, _place, _same


@aggregate
class Call:
    """What all pieces of work share, or all those of one packed sequence."""

    pieces: gl.tensor
    entire: gl.tensor  # with SPLIT, so many pieces are whole; later ones are split into `parts`
    parts: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    turns: gl.tensor
    tiles: gl.tensor  # blocks of queries per head; if packed, an upper bound, or those of one sequence
    columns: gl.tensor
    shift: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    factor: gl.tensor  # scale for exponentials of base 2; computed here, ptxas would repeat it at every use
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    DOWN: gl.constexpr
    GROUP: gl.constexpr
    PACKED: gl.constexpr
    SPAN: gl.constexpr  # keys per piece
    SPLIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, pieces, entire, parts, heads, section, turns, tiles, columns, shift, left, right, scale, factor, LEFT,
        RIGHT, DOWN, GROUP, PACKED, SPAN, SPLIT
    ):  # fmt: skip
        self.pieces = pieces
        self.entire = entire
        self.parts = parts
        self.heads = heads
        self.section = section
        self.turns = turns
        self.tiles = tiles
        self.columns = columns
        self.shift = shift
        self.left = left
        self.right = right
        self.scale = scale
        self.factor = factor
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.DOWN = gl.constexpr(DOWN)
        self.GROUP = gl.constexpr(GROUP)
        self.PACKED = gl.constexpr(PACKED)
        self.SPAN = gl.constexpr(SPAN)
        self.SPLIT = gl.constexpr(SPLIT)

    @gluon.jit
    def of(self, tiles, columns, shift):
        """Returns this for a packed sequence: its blocks of queries, keys, and shift (keys beyond queries)."""
        return Call(
            self.pieces,
            self.entire,
            self.parts,
            self.heads,
            self.section,
            self.turns,
            tiles,
            columns,
            shift,
            self.left,
            self.right,
            self.scale,
            self.factor,
            self.LEFT,
            self.RIGHT,
            self.DOWN,
            self.GROUP,
            self.PACKED,
            self.SPAN,
            self.SPLIT,
        )

    @gluon.jit
    def find(self, item, listed):
        """Returns the piece, or part of a piece, with that number."""
        if self.PACKED:
            item = _same(item)
            at = listed + 8 + item // self.turns * 8
            tile, begins, columns = (
                gl.load(at),
                gl.load(at + 2),
                gl.load(at + 3),
            )  # all in flight before the first is used
            begin, rows, number = gl.load(at + 4), gl.load(at + 5), gl.load(at + 6)
            item -= _same(tile) * self.turns
            begins, columns, begin, rows = _same(begins), _same(columns), _same(begin), _same(rows)
            base = begin // ROWS + _same(number)
            work = self.of(gl.cdiv(rows, ROWS), columns, self.shift * (columns - rows)).work(
                item, base, begin, rows, begins
            )
        else:
            work = self.work(item, item, item, item, item)  # the last four matter only to packed sequences
        return work

    @gluon.jit
    def work(self, item, base, begin, rows, begins):
        """Returns the piece, or part of a piece, with that number; for packed sequences, counted within the sequence.

        A section of heads comes before the next, so that active heads share the L2 cache. In causal calls the heaviest
        pieces come first, with DOWN the lightest. With SPLIT the last pieces are in parts, each with some of the blocks
        of queries.
        """
        share = 0 * item - 1
        if self.SPLIT:
            share = item - self.entire
            item = gl.where(share >= 0, self.entire + share // self.parts, item)
        blocks = gl.cdiv(self.columns, self.SPAN)
        first = item // (self.section * blocks) * self.section
        within = item - first * blocks
        size = gl.minimum(self.section, self.turns - first)
        turn = first + within % size
        n = within // size
        if self.DOWN:
            n = blocks - 1 - n
        n *= self.SPAN
        low, high = 0, self.tiles
        if self.RIGHT:
            low = gl.minimum(gl.maximum(n - self.right - self.shift, 0) // ROWS, self.tiles)
        if self.LEFT:
            high = gl.minimum(high, gl.maximum(n + self.SPAN - 1 + self.left - self.shift + ROWS, 0) // ROWS)
        many = gl.maximum(high - low, 0)
        if self.SPLIT:
            # In the order in which a whole piece walks its blocks.
            part = share % self.parts if self.DOWN else self.parts - 1 - share % self.parts
            end = gl.where(share >= 0, (part + 1) * many // self.parts, many)
            skipped = gl.where(share >= 0, part * many // self.parts, 0)
            low, many = low + skipped, end - skipped
        shared = self.heads // self.GROUP
        return Work(self, turn // shared, turn % shared, n, low, many, share, base, begin, rows, begins)

    @gluon.jit
    def count(self, listed):
        pieces = self.pieces
        if self.PACKED:
            pieces = _same(gl.load(listed + 1)) * self.turns
        return pieces


@aggregate
class Work:
    """A piece of work: 128 or 64 keys, and all or part of the blocks of queries that see any of them.

    It covers all heads of queries that share the keys.
    """

    call: Call
    batch: gl.tensor
    head: gl.tensor
    first: gl.tensor  # key
    low: gl.tensor  # first block of queries
    blocks: gl.tensor
    share: gl.tensor  # a part's number among all parts; negative for a whole piece
    # For packed sequences:
    base: gl.tensor  # number of the sequence's first block of queries
    begin: gl.tensor  # where the sequence's queries begin
    rows: gl.tensor  # how many there are
    begins: gl.tensor  # where its keys begin

    @gluon.constexpr_function
    def __init__(self, call, batch, head, first, low, blocks, share, base, begin, rows, begins):
        self.call = call
        self.batch = batch
        self.head = head
        self.first = first
        self.low = low
        self.blocks = blocks
        self.share = share
        self.base = base
        self.begin = begin
        self.rows = rows
        self.begins = begins

    @gluon.jit
    def queries(self, g, block):
        """Returns the coordinates of a block of queries."""
        if self.call.PACKED:
            far, end, last = _in(self.begin, self.rows, block * ROWS)
            at = far, end, self.head * self.call.GROUP + g, last, 0
        else:
            at = self.batch, self.head * self.call.GROUP + g, block * ROWS, 0
        return at

    @gluon.jit
    def keys(self, row):
        """Returns the coordinates of keys, from a row on."""
        if self.call.PACKED:
            far, end, last = _in(self.begins, self.call.columns, row)
            at = far, end, self.head, last, 0
        else:
            at = self.batch, self.head, row, 0
        return at

    @gluon.jit
    def numbered(self, block):
        """Returns a block's number among a head's blocks of queries."""
        if self.call.PACKED:
            block += self.base
        return block

    @gluon.jit
    def block(self, n):
        """Returns the n-th block of queries of a head."""
        if not self.call.DOWN:
            n = self.blocks - 1 - n
        return self.low + n

    @gluon.jit
    def turn(self, g):
        """Returns the g-th head of queries that shares the keys, counted over the batch."""
        return self.batch * self.call.heads + self.head * self.call.GROUP + g

    @gluon.jit
    def before(self, block):
        """Returns how many pieces add to a block of queries before this one does.

        Those pieces have lower numbers, so they have started, and they reach the block earlier. With DOWN, the last
        keys come first, one block earlier for every 64 keys. Otherwise all pieces of a head, or all parts with the same
        number, start at about the same block, and their first waits make them follow each other.
        """
        me = self.first // self.call.SPAN
        if self.call.DOWN:
            high = gl.cdiv(self.call.columns, self.call.SPAN) - 1
            if self.call.RIGHT:
                high = gl.minimum(high, ((block + 1) * ROWS - 1 + self.call.shift + self.call.right) // self.call.SPAN)
            found = high - me
        else:
            low = 0
            if self.call.LEFT:
                unseen = block * ROWS - self.call.SPAN + 1 - self.call.left + self.call.shift
                low = gl.minimum(gl.cdiv(gl.maximum(unseen, 0), self.call.SPAN), me)
            found = me - low
        return found

    @gluon.jit
    def hide(self, p, row, first):
        """Sets the probabilities of keys (down, from `first`) that a query (across) does not see to 0."""
        j = first + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))[:, None]
        i = row + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
        if self.call.LEFT:
            i += self.call.shift
            seen = (j + 0 * i < self.call.columns) & (j >= i - self.call.left)
            if self.call.RIGHT:
                seen = seen & (j <= i + self.call.right)
        elif self.call.RIGHT:
            # One comparison each, with a key's first query; two such limits, for a window, would spill registers.
            seen = i >= gl.where(j < self.call.columns, j - self.call.right - self.call.shift, 0x7FFFFFFF)
        else:
            seen = j < self.call.columns
        return gl.where(seen, p, 0.0)

    @gluon.jit
    def edge(self, row):
        """Returns whether some query of the block that begins with this row does not see all of the keys."""
        found = self.first + self.call.SPAN > self.call.columns
        if self.call.RIGHT:
            found = found | (row + self.call.shift + self.call.right < self.first + self.call.SPAN - 1)
        if self.call.LEFT:
            found = found | (row + ROWS - 1 + self.call.shift - self.call.left > self.first)
        return found


@gluon.jit
def _fetch(queries, do, tops, deltas, keys, values, here, counter, listed, call):
    """The producer warp, which fills shared memory."""
    TILES: gl.constexpr = here.ks.type.shape[0]
    n, done = 0, 0
    pieces = call.count(listed)
    item = here.tickets.draw(0, counter)
    while item < pieces:
        work = call.find(item, listed)
        if call.PACKED:
            own = work.call
            here.tickets.write(
                n, work.head, work.first, work.low, work.blocks, work.base, work.begins, own.columns, own.shift
            )
        some = work.blocks > 0
        block = work.block(0)
        if some:
            here.qs.fill(queries, tops, done, work.queries(0, block), work.turn(0) * call.tiles + work.numbered(block))
        mbarrier.wait(here.k_free, (n & 1) ^ 1)
        mbarrier.expect(here.k_ready, TILES * keys.block_type.nbytes)
        for w in gl.static_range(TILES):
            _load(keys, work.keys(work.first + w * ROWS), here.k_ready, here.ks.index(w))
        if some:
            here.dos.fill(do, deltas, done, work.queries(0, block), work.turn(0) * call.tiles + work.numbered(block))
        mbarrier.wait(here.v_free, (n & 1) ^ 1)
        mbarrier.expect(here.v_ready, TILES * keys.block_type.nbytes)
        for w in gl.static_range(TILES):
            _load(values, work.keys(work.first + w * ROWS), here.v_ready, here.vs.index(w))
        for g in range(call.GROUP):
            for t in range(gl.where(g == 0, 1, 0), work.blocks):
                block = work.block(t)
                at = work.turn(g) * call.tiles + work.numbered(block)
                here.qs.fill(queries, tops, done + t, work.queries(g, block), at)
                here.dos.fill(do, deltas, done + t, work.queries(g, block), at)
            done += work.blocks
        n += 1
        item = here.tickets.draw(n, counter) if here.tickets.STAY else pieces
    if call.PACKED:
        here.tickets.write(n, call.pieces, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def _piece(here, n, item, call):
    """Returns the program's n-th piece; if packed, without its queries' place, which only the producer warp needs."""
    if call.PACKED:
        head, first, low, blocks, base, begins, columns, shift = here.tickets.read(n)
        work = Work(
            call.of(call.tiles, columns, shift),
            0 * head,
            head,
            first,
            low,
            blocks,
            0 * head - 1,
            base,
            head,
            head,
            begins,
        )
    else:
        work = call.find(item, None)
    return work


@gluon.jit
def _by_keys(here, place, COLUMN: gl.constexpr, zero):
    """Starts dS^T K for dQ's columns from COLUMN on."""
    TILES: gl.constexpr = here.ks.type.shape[0]
    COLUMNS: gl.constexpr = zero.shape[1]
    dq = zero
    for w in gl.static_range(TILES):
        ds, keys = here.ds.index(TILES * place + w).permute((1, 0)), _flat(here.ks.index(w))
        dq = warpgroup_mma(ds, keys.slice(COLUMN, COLUMNS, 1), dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _leave(dq, dq_sums, number, COLUMN: gl.constexpr, rooms, before):
    """Adds a tile of dQ's columns, from COLUMN on, to memory, through as many rooms in turn as they need."""
    ROOMS: gl.constexpr = rooms.type.shape[0]
    ROOM: gl.constexpr = rooms.type.shape[2] // 2
    W: gl.constexpr = dq.shape[1]
    if W <= ROOM:
        tma.store_wait(ROOMS - 1)
        _add(dq, dq_sums, [number, COLUMN * 2, 0], rooms.index(COLUMN // ROOM % ROOMS), before)
    else:
        left, right = gl.split(dq.reshape([ROWS, 2, W // 2]).permute((0, 2, 1)))
        _leave(left, dq_sums, number, COLUMN, rooms, before)
        _leave(right, dq_sums, number, COLUMN + W // 2, rooms, before)


@gluon.jit
def _queries(W: gl.constexpr, dq_sums, rooms, here, order, call, ORDERED: gl.constexpr, REST: gl.constexpr):
    """The third group: dQ for all keys, added to memory through buffers in shared memory (`rooms`).

    The first piece that adds to a block stores instead, and the others wait for it; with ORDERED each waits for all
    pieces before it. `order` counts the additions to each block. W columns are multiplied at a time (the last time
    REST), and leave through as many rooms as they need.

    `_tell` announces a block once all of TMA's additions to it are written. Two things are assumed. First, an addition
    that TMA makes after a relaxed load (`seen`) of the count comes after the additions counted there: the load decides
    whether TMA is asked to add at all. Second, if a piece is a program (from D 72 on), lower numbers start first.
    """
    TILES: gl.constexpr = here.ks.type.shape[0]
    STAGES: gl.constexpr = here.ds.type.shape[0] // TILES
    PARTS: gl.constexpr = here.ks.type.shape[-1] // W
    NEED: gl.constexpr = 2 * W // rooms.type.shape[2]  # rooms per part
    # A block is announced one part into the next if later pieces follow closely: those of 64 keys, and causal ones with
    # the heaviest first. Otherwise it is announced a block later, when TMA has finished sooner (as measured).
    EARLY: gl.constexpr = NEED > 1 or (call.RIGHT and not call.DOWN)
    TELLS: gl.constexpr = 0 if EARLY else PARTS - 1  # after this part of a block, the one before is announced
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(REST, 16), 16]
    )
    zero, rest_zero = gl.zeros([ROWS, W], gl.float32, layout), gl.zeros([ROWS, max(REST, 16)], gl.float32, rest_layout)
    n, done, said = 0, 0, 0
    item = here.tickets.take(0)
    while item < call.pieces:
        work = _piece(here, n, item, call)
        mbarrier.wait(here.k_ready, n & 1)
        last, tell = 0, False
        for g in range(call.GROUP):
            first, seen = work.turn(g) * call.tiles, -1
            for t in range(work.blocks):
                block = work.block(t)
                place, odd = _place(done, STAGES)
                before, number = work.before(block), first + work.numbered(block)
                _await(order + number, before if ORDERED else gl.minimum(before, 1), seen)
                mbarrier.wait(here.ds_ready.index(place), odd)
                for part in gl.static_range(PARTS):
                    dq = _by_keys(here, place, part * W, zero if part == 0 or not REST else rest_zero)
                    if part == 0:
                        next_ = work.block(gl.minimum(t + 1, work.blocks - 1))
                        seen = _look(order + first + work.numbered(next_))
                    dq = warpgroup_mma_wait(0, deps=(dq,))
                    if part == PARTS - 1:
                        mbarrier.arrive(here.ds_free.index(place), count=1)
                    _leave(dq, dq_sums, number, part * W, rooms, before)
                    if part == TELLS:  # noqa: SIM102  # decided at compile time
                        if tell:  # the block before this one is in memory now
                            here.told.say(said, last, (TELLS + 1) * NEED)
                            said += 1
                tell = ORDERED or before == 0
                last = number
                done += 1
        mbarrier.arrive(here.k_free, count=1)
        if tell:
            here.told.say(said, last, 0)
            said += 1
        n += 1
        item = here.tickets.take(n) if here.tickets.STAY else call.pieces
    here.told.say(said, -1, 0)


@gluon.jit
def _tell(order, told):
    """The warp that announces additions to blocks of dQ to other programs.

    The announcement must be a release: TMA reports a write before all others can see it, and a relaxed announcement
    overtook the write once in a hundred calls at D 256. The release waits for visibility, a third of a block's time or
    more, but no other warp here waits for this one unless it is two blocks behind.
    """
    n = 0
    number = told.hear(0)
    while number >= 0:
        gl.atomic_add(order + number, 1, sem="release", scope="gpu")
        n += 1
        number = told.hear(n)
