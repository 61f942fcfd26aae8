"""Which tile of queries or keys a program of the Triton kernels has, and which blocks of the other side it walks.

Tiles are numbered so that the heads of a section share the L2 cache, the heaviest tiles first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sequences(NamedTuple):
    """Where packed sequences begin and end: cu_seqlens of queries and keys."""

    q: Any
    k: Any


class Sizes(NamedTuple):
    """The numbers of a call that kernels do not specialise on."""

    rows: Any  # queries per head, or tokens if packed
    columns: Any  # keys
    heads: Any  # that have tiles: of queries or of keys
    batch: Any  # or the number of packed sequences
    section: Any  # heads that share the L2 cache
    window_left: Any
    window_right: Any
    prefix: Any


class Tile(NamedTuple):
    """A program's tile, and the sequence that it belongs to."""

    start: Any  # its first row within the sequence
    head: Any  # counted over the batch
    batch: Any
    head_in_batch: Any
    q_start: Any  # where the sequence begins among the queries
    rows: Any  # the sequence's queries
    k_start: Any
    columns: Any


class Band(NamedTuple):
    """Query i sees the keys i - left to i + right of its sequence, and those before `prefix`."""

    rows: Any
    columns: Any
    left: Any
    right: Any
    prefix: Any


class Blocks(NamedTuple):
    """The blocks that a tile walks: from `low` to `high`, and from `full` to `edge` those that all its rows see."""

    low: Any
    full: Any
    edge: Any
    high: Any


@triton.jit
def tile_count(length, batch, cu, SIZE: tl.constexpr):
    """Returns the tiles per head; for packed sequences an upper bound."""
    return tl.cdiv(length, SIZE) if cu is None else length // SIZE + batch + 1


@triton.jit
def place(item, tiles, heads, section, REVERSED: tl.constexpr):
    """Returns an item's tile and head: all tiles of a section of heads come before the next section's."""
    whole = section * tiles
    first = item // whole * section
    within = item % whole
    size = min(heads - first, section)
    tile = within // size
    return tiles - 1 - tile if REVERSED else tile, first + within % size


@triton.jit
def find_sequence(tile, cu, other_cu, tokens, others, batch, SIZE: tl.constexpr):
    """For packed sequences: returns a tile's number in its sequence, and the sequence's begin and length on both sides.

    A sequence's tiles are numbered from cu // SIZE + its own number on, which leaves enough room, so bisection finds
    the sequence. Tokens after the last sequence count as one more, which sees nothing. Whatever cu holds, results are
    within bounds.
    """
    mine, high = 0, batch
    while mine < high:
        middle = (mine + high + 1) // 2
        later = tl.load(cu + middle) // SIZE + middle > tile
        mine = tl.where(later, mine, middle)
        high = tl.where(later, middle - 1, high)
    begin = tl.minimum(tl.maximum(tl.load(cu + mine), 0), tokens)
    tile = tl.maximum(tile - begin // SIZE - mine, 0)
    known = mine < batch
    end = tl.minimum(tl.maximum(tl.load(cu + mine + 1, mask=known, other=tokens), begin), tokens)
    other_begin = tl.minimum(tl.maximum(tl.load(other_cu + mine, mask=known, other=0), 0), others)
    other_end = tl.minimum(tl.maximum(tl.load(other_cu + mine + 1, mask=known, other=0), other_begin), others)
    return tile, begin, end - begin, other_begin, other_end - other_begin


@triton.jit
def query_tile(cu, sizes, RULES: tl.constexpr, BM: tl.constexpr):
    """Returns the program's tile of BM queries."""
    PACKED: tl.constexpr = cu is not None
    tiles = tl.cdiv(sizes.rows, BM)
    heads = sizes.batch * sizes.heads
    if PACKED:
        tiles = sizes.rows // BM + sizes.batch + 1
        heads = sizes.heads
    tile, head = place(tl.program_id(0), tiles, heads, sizes.section, RULES.RIGHT and not PACKED)
    q_start, rows, k_start, columns = 0, sizes.rows, 0, sizes.columns
    if PACKED:
        tile, q_start, rows, k_start, columns = find_sequence(tile, cu.q, cu.k, rows, columns, sizes.batch, BM)
    return Tile(tile * BM, head, head // sizes.heads, head % sizes.heads, q_start, rows, k_start, columns)


@triton.jit
def key_tile(cu, sizes, BN: tl.constexpr):
    """Returns the program's tile of BN keys."""
    PACKED: tl.constexpr = cu is not None
    tiles = tl.cdiv(sizes.columns, BN)
    heads = sizes.batch * sizes.heads
    if PACKED:
        tiles = sizes.columns // BN + sizes.batch + 1
        heads = sizes.heads
    tile, head = place(tl.program_id(0), tiles, heads, sizes.section, False)
    q_start, rows, k_start, columns = 0, sizes.rows, 0, sizes.columns
    if PACKED:
        tile, k_start, columns, q_start, rows = find_sequence(tile, cu.k, cu.q, columns, rows, sizes.batch, BN)
    return Tile(tile * BN, head, head // sizes.heads, head % sizes.heads, q_start, rows, k_start, columns)


@triton.jit
def seen_band(tile, sizes, RULES: tl.constexpr):
    """Returns the band of keys that a sequence's queries see."""
    shift = tile.columns - tile.rows if RULES.BOTTOM else 0
    prefix = sizes.prefix if RULES.PREFIX else 0  # Triton 3.6 cannot return None in a tuple
    return Band(tile.rows, tile.columns, sizes.window_left - shift, sizes.window_right + shift, prefix)


@triton.jit
def in_band(i, j, band, RULES: tl.constexpr):
    """Returns whether queries i see keys j by their positions alone."""
    seen = j < band.columns
    if RULES.LEFT:
        seen = seen & (j >= i - band.left)
    if RULES.PREFIX:
        seen = seen & (j <= tl.maximum(i + band.right, band.prefix - 1))
    elif RULES.RIGHT:
        seen = seen & (j <= i + band.right)
    return seen


@triton.jit
def span(first, last, end, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
         MASK: tl.constexpr):  # fmt: skip
    """Returns the `Blocks` of positions p < end with x - left <= p <= x + right for some x in first..last."""
    low, full = 0, 0
    high, edge = end, end // BLOCK * BLOCK
    if LEFT:
        low = tl.maximum(first - left, 0) // BLOCK * BLOCK
        full = (tl.maximum(last - left, 0) + BLOCK - 1) // BLOCK * BLOCK
    if RIGHT:
        high = tl.minimum(end, last + right + 1)
        edge = tl.minimum(edge, tl.maximum(first + right + 1, 0) // BLOCK * BLOCK)
    if MASK:  # any block may be masked
        full = low
        edge = low
    return Blocks(low, full, edge, high)


@triton.jit
def key_blocks(tile, band, RULES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr):
    """Returns the blocks of BN keys that a tile of queries sees."""
    last = tl.minimum(tile.start + BM, band.rows) - 1
    return seen_keys(tile.start, last, band, RULES, BN, MASK)


@triton.jit
def seen_keys(first, last, band, RULES: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr):
    """Returns the blocks of BN keys that the queries first..last see."""
    left, right = band.left, band.right
    blocks = span(first, last, band.columns, left, right, RULES.LEFT, RULES.RIGHT, BN, MASK)
    if RULES.PREFIX:  # without LEFT
        end = tl.minimum(band.prefix, band.columns)
        edge = blocks.edge if MASK else tl.maximum(blocks.edge, end // BN * BN)
        blocks = Blocks(blocks.low, blocks.full, edge, tl.maximum(blocks.high, end))
    return blocks


@triton.jit
def query_blocks(tile, band, RULES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr):
    """Returns the blocks of BM queries that see a tile of keys."""
    last = tl.minimum(tile.start + BN, band.columns) - 1
    blocks = span(tile.start, last, band.rows, band.right, band.left, RULES.RIGHT, RULES.LEFT, BM, MASK)
    if RULES.PREFIX:  # without LEFT
        low = tl.where(tile.start < band.prefix, 0, blocks.low)
        full = low if MASK else tl.where(last < band.prefix, 0, blocks.full)
        blocks = Blocks(low, full, low if MASK else blocks.edge, blocks.high)
    return blocks


@triton.jit
def section_of(blocks, SECTION: tl.constexpr):
    """Returns where a section of the blocks begins and ends.

    The sections are 0, the left edge of a window; 1, the blocks that all rows see, which need no comparisons; and 2,
    the diagonal and the ragged end.
    """
    first, end = blocks.full, blocks.edge
    if SECTION == 0:
        first, end = blocks.low, tl.minimum(blocks.full, blocks.high)
    elif SECTION == 2:
        first, end = tl.maximum(blocks.full, blocks.edge), blocks.high
    return first, end


@triton.jit
def row_tile(tile, rows, cu, batch, BM: tl.constexpr):
    """Returns where the n-th tile of BM rows begins, and how many rows follow.

    For packed sequences it is a tile of one sequence, numbered as in `find_sequence`.
    """
    start, limit = tile * BM, rows - tile * BM
    if cu is not None:
        tile, begin, length, _, _ = find_sequence(tile, cu, cu, rows, rows, batch, BM)
        start, limit = begin + tile * BM, length - tile * BM
    return start, limit
