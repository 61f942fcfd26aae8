"""The scheduler of attention's backward on Hopper: pieces of work, their order, and which of them add to dQ before.

A piece is some keys and the blocks of 64 queries that see any of them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention.hopper.pipeline import ROWS
from ridgeline.ops.attention.hopper.softmax import soft_cap
from ridgeline.tiles.warpgroup import sequence_row, uniform


class Sizes(NamedTuple):
    """The numbers of a call that kernels do not specialise on."""

    pieces: Any
    entire: Any  # with SPLIT, so many pieces are whole; later ones are split into `parts`
    parts: Any
    heads: Any  # of queries
    section: Any  # heads whose pieces come together
    key_heads: Any  # over the batch
    tiles: Any  # blocks of queries per head; if packed, an upper bound, or those of one sequence
    columns: Any
    shift: Any  # of the diagonal; for packed sequences 1 if it ends at the last key
    window_left: Any  # with PREFIX the first keys, which all queries see
    window_right: Any


class Scale(NamedTuple):
    scale: Any
    factor: Any  # scale, or the softcap, for exponentials of base 2; here, since ptxas would repeat it at every use
    share: Any  # with CAP, of scores for the exponential in their tanh


class Rules(NamedTuple):
    """What a kernel is compiled for."""

    LEFT: bool  # whether queries see a limited number of keys before them
    RIGHT: bool  # and after them
    DOWN: bool  # whether the last keys come first
    GROUP: int  # heads of queries that a piece walks
    APART: int  # so many parts of a piece each have some of the heads of queries that share its keys
    ORDERED: bool  # whether dQ's sums are added in a fixed order
    TIGHT: bool  # whether keys and values stay in shared memory, since there are too few registers
    STAY: bool  # whether programs take several pieces
    STAGES: int  # of the rings
    REST: int  # columns beyond the first half of a tile, 0 if D fills the tile
    PREFIX: bool = False  # whether all queries see a number of first keys; without LEFT
    FLOAT: int = 0  # D if dK and dV leave in float32, which the registers store; 0 if they have k's dtype
    CAP: bool = False  # whether scores have a softcap


@aggregate
class WorkScheduler:
    """What all pieces of work share, or all those of one packed sequence."""

    pieces: gl.tensor
    entire: gl.tensor
    parts: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    key_heads: gl.tensor
    tiles: gl.tensor
    columns: gl.tensor
    shift: gl.tensor
    window_left: gl.tensor
    window_right: gl.tensor
    scale: gl.tensor
    factor: gl.tensor
    share: gl.tensor
    RULES: gl.constexpr
    PACKED: gl.constexpr
    SPAN: gl.constexpr  # keys per piece
    SPLIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sizes, scale, RULES, PACKED, SPAN, SPLIT):
        # Triton 3.6 drops the names of a NamedTuple here.
        self.pieces, self.entire, self.parts, self.heads, self.section, self.key_heads, *others = sizes
        self.tiles, self.columns, self.shift, self.window_left, self.window_right = others
        self.scale, self.factor, self.share = scale
        self.RULES = gl.constexpr(RULES)
        self.PACKED = gl.constexpr(PACKED)
        self.SPAN = gl.constexpr(SPAN)
        self.SPLIT = gl.constexpr(SPLIT)

    @gluon.jit
    def of_sequence(self, tiles, columns, shift):
        """Returns this for a packed sequence: its blocks of queries, keys, and shift (keys beyond queries)."""
        sizes = Sizes(
            self.pieces, self.entire, self.parts, self.heads, self.section, self.key_heads, tiles, columns, shift,
            self.window_left, self.window_right
        )  # fmt: skip
        scale = Scale(self.scale, self.factor, self.share)
        return WorkScheduler(sizes, scale, self.RULES, self.PACKED, self.SPAN, self.SPLIT)

    @gluon.jit
    def find(self, item, listed):
        """Returns the piece, or part of a piece, with that number."""
        if self.PACKED:
            item = uniform(item)
            at = listed + 8 + item // self.key_heads * 8
            # All in flight before the first is used.
            tile, k_offset, columns = gl.load(at), gl.load(at + 2), gl.load(at + 3)
            q_offset, rows, number = gl.load(at + 4), gl.load(at + 5), gl.load(at + 6)
            item -= uniform(tile) * self.key_heads
            k_offset, columns, q_offset, rows = uniform(k_offset), uniform(columns), uniform(q_offset), uniform(rows)
            block_base = q_offset // ROWS + uniform(number)
            own = self.of_sequence(gl.cdiv(rows, ROWS), columns, self.shift * (columns - rows))
            work = own.work(item, block_base, q_offset, rows, k_offset)
        else:
            work = self.work(item, item, item, item, item)  # the last four matter only to packed sequences
        return work

    @gluon.jit
    def work(self, item, block_base, q_offset, rows, k_offset):
        """Returns the piece, or part of a piece, with that number; for packed sequences, counted within the sequence.

        A section of heads comes before the next, so that active heads share the L2 cache. In causal calls the heaviest
        pieces come first, with DOWN the lightest. With SPLIT the last pieces are in parts, each with some of the blocks
        of queries.
        """
        share = 0 * item - 1
        if self.SPLIT and self.RULES.APART == 1:
            share = item - self.entire
            item = gl.where(share >= 0, self.entire + share // self.parts, item)
        blocks = gl.cdiv(self.columns, self.SPAN)
        first = item // (self.section * blocks) * self.section
        within = item - first * blocks
        size = gl.minimum(self.section, self.key_heads - first)
        head = first + within % size
        n = within // size
        if self.RULES.DOWN:
            n = blocks - 1 - n
        n *= self.SPAN
        low, high = 0, self.tiles
        if self.RULES.RIGHT:
            low = gl.minimum(gl.maximum(n - self.window_right - self.shift, 0) // ROWS, self.tiles)
            if self.RULES.PREFIX:
                low = gl.where(n < self.window_left, 0, low)
        if self.RULES.LEFT:
            high = gl.minimum(high, gl.maximum(n + self.SPAN - 1 + self.window_left - self.shift + ROWS, 0) // ROWS)
        many = gl.maximum(high - low, 0)
        if self.SPLIT and self.RULES.APART == 1:
            # In the order in which a whole piece walks its blocks.
            part = share % self.parts if self.RULES.DOWN else self.parts - 1 - share % self.parts
            end = gl.where(share >= 0, (part + 1) * many // self.parts, many)
            skipped = gl.where(share >= 0, part * many // self.parts, 0)
            low, many = low + skipped, end - skipped
        if self.RULES.APART > 1:
            share = (head // self.RULES.APART * blocks + n // self.SPAN) * self.RULES.APART + head % self.RULES.APART
        shared = self.heads // self.RULES.GROUP
        batch = head // shared
        return Work(self, batch, head % shared, n, low, many, share, block_base, q_offset, rows, k_offset)

    @gluon.jit
    def count(self, listed):
        pieces = self.pieces
        if self.PACKED:
            pieces = uniform(gl.load(listed + 1)) * self.key_heads
        return pieces


@aggregate
class Work:
    """A piece of work: 128 or 64 keys, and all or part of the blocks of queries that see any of them.

    It covers all heads of queries that share the keys.
    """

    scheduler: WorkScheduler
    batch: gl.tensor
    head: gl.tensor
    k_start: gl.tensor
    low: gl.tensor  # first block of queries
    blocks: gl.tensor
    share: gl.tensor  # a part's number among all parts; negative for a whole piece
    # For packed sequences:
    block_base: gl.tensor  # number of the sequence's first block of queries
    q_offset: gl.tensor  # where the sequence's queries begin
    rows: gl.tensor  # how many there are
    k_offset: gl.tensor  # where its keys begin

    @gluon.constexpr_function
    def __init__(self, scheduler, batch, head, k_start, low, blocks, share, block_base, q_offset, rows, k_offset):
        self.scheduler = scheduler
        self.batch = batch
        self.head = head
        self.k_start = k_start
        self.low = low
        self.blocks = blocks
        self.share = share
        self.block_base = block_base
        self.q_offset = q_offset
        self.rows = rows
        self.k_offset = k_offset

    @gluon.jit
    def queries(self, g, block):
        """Returns the coordinates of a block of queries."""
        head = self.head * self.scheduler.RULES.GROUP + g
        if self.scheduler.PACKED:
            far, end, last = sequence_row(self.q_offset, self.rows, block * ROWS)
            at = far, end, head, last, 0
        else:
            at = self.batch, head, block * ROWS, 0
        return at

    @gluon.jit
    def keys(self, row):
        """Returns the coordinates of keys, from a row on."""
        if self.scheduler.PACKED:
            far, end, last = sequence_row(self.k_offset, self.scheduler.columns, row)
            at = far, end, self.head, last, 0
        else:
            at = self.batch, self.head // self.scheduler.RULES.APART, row, 0
        return at

    @gluon.jit
    def key_number(self, row, tokens):
        """Returns a key's number over all heads of `tokens` keys, 64 bits."""
        head = self.batch * (self.scheduler.heads // self.scheduler.RULES.GROUP) + self.head
        first = (head // self.scheduler.RULES.APART).to(gl.int64) * tokens
        if self.scheduler.PACKED:
            first += self.k_offset
        return first + row

    @gluon.jit
    def block(self, n):
        """Returns the n-th block of queries of a head."""
        if not self.scheduler.RULES.DOWN:
            n = self.blocks - 1 - n
        return self.low + n

    @gluon.jit
    def number(self, g, block, tiles):
        """Returns the number of a block of the g-th head of queries that shares the keys, over the batch.

        tiles: blocks of queries per head, or all sequences' upper bound.
        """
        head = self.batch * self.scheduler.heads + self.head * self.scheduler.RULES.GROUP + g
        if self.scheduler.PACKED:
            block += self.block_base
        return head * tiles + block

    @gluon.jit
    def before(self, block):
        """Returns how many pieces add to a block of queries before this one does.

        Those pieces have lower numbers, so they have started, and they reach the block earlier. With DOWN, the last
        keys come first, one block earlier for every 64 keys. Otherwise all pieces of a head, or all parts with the same
        number, start at about the same block, and their first waits make them follow each other.
        """
        SPAN: gl.constexpr = self.scheduler.SPAN
        me = self.k_start // SPAN
        shift = self.scheduler.shift
        if self.scheduler.RULES.DOWN:
            high = gl.cdiv(self.scheduler.columns, SPAN) - 1
            if self.scheduler.RULES.RIGHT:
                last = (block + 1) * ROWS - 1 + shift + self.scheduler.window_right
                if self.scheduler.RULES.PREFIX:
                    last = gl.maximum(last, self.scheduler.window_left - 1)
                high = gl.minimum(high, last // SPAN)
            found = high - me
        else:
            low = 0
            if self.scheduler.RULES.LEFT:
                unseen = block * ROWS - SPAN + 1 - self.scheduler.window_left + shift
                low = gl.minimum(gl.cdiv(gl.maximum(unseen, 0), SPAN), me)
            found = me - low
        return found

    @gluon.jit
    def hide(self, p, row, first):
        """Sets the probabilities of keys (down, from `first`) that a query (across) does not see to 0."""
        j = first + gl.arange(0, p.shape[0], gl.SliceLayout(1, p.type.layout))[:, None]
        i = row + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))[None, :]
        columns, right = self.scheduler.columns, self.scheduler.window_right
        if self.scheduler.RULES.LEFT:
            i += self.scheduler.shift
            seen = (j + 0 * i < columns) & (j >= i - self.scheduler.window_left)
            if self.scheduler.RULES.RIGHT:
                seen = seen & (j <= i + right)
        elif self.scheduler.RULES.RIGHT:
            # One comparison each, with a key's first query; two such limits, for a window, would spill registers.
            if self.scheduler.RULES.PREFIX:
                first = gl.where(j < self.scheduler.window_left, 0, j - right - self.scheduler.shift)
                seen = i >= gl.where(j < columns, first, 0x7FFFFFFF)
            else:
                seen = i >= gl.where(j < columns, j - right - self.scheduler.shift, 0x7FFFFFFF)
        else:
            seen = j < columns
        return gl.where(seen, p, 0.0)

    @gluon.jit
    def masked(self, row):
        """Returns whether some query of the block that begins with this row does not see all of the keys."""
        SPAN: gl.constexpr = self.scheduler.SPAN
        shift = self.scheduler.shift
        found = self.k_start + SPAN > self.scheduler.columns
        if self.scheduler.RULES.RIGHT:
            if self.scheduler.RULES.PREFIX:
                beyond = row + shift + self.scheduler.window_right < self.k_start + SPAN - 1
                found = found | (beyond & (self.k_start + SPAN > self.scheduler.window_left))
            else:
                found = found | (row + shift + self.scheduler.window_right < self.k_start + SPAN - 1)
        if self.scheduler.RULES.LEFT:
            found = found | (row + ROWS - 1 + shift - self.scheduler.window_left > self.k_start)
        return found


@gluon.jit
def read_work(queue, n, item, scheduler):
    """Returns the program's n-th piece; if packed, without its queries' place, which only the producer warp needs."""
    if scheduler.PACKED:
        head, k_start, low, blocks, block_base, k_offset, columns, shift = queue.read(n)
        own = scheduler.of_sequence(scheduler.tiles, columns, shift)
        work = Work(own, 0 * head, head, k_start, low, blocks, 0 * head - 1, block_base, head, head, k_offset)
    else:
        work = scheduler.find(item, None)
    return work


@gluon.jit
def probabilities(s, lse, row, first, work, scheduler):
    """Returns probabilities, keys down from `first` and queries across from `row`, and what dP - delta multiplies.

    s: products of keys and queries. The second is the first, with a softcap times the slope of its tanh.
    """
    if scheduler.RULES.CAP:
        s, slope = soft_cap(s, scheduler.share)
        p = gl.exp2(s * scheduler.factor - lse[None, :])
        if work.masked(row):
            p = work.hide(p, row, first)
        return p, p * slope
    else:
        p = gl.exp2(s * scheduler.factor - lse[None, :])
        if work.masked(row):
            p = work.hide(p, row, first)
        return p, p
