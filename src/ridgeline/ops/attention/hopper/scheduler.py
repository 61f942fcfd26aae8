"""The tile scheduler of attention's forward on Hopper: which tiles of queries a program takes, when, and their keys.

The host's rules for it are here too.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention.common.arguments import UNBOUNDED
from ridgeline.ops.attention.hopper.pipeline import ROWS, read_record
from ridgeline.tiles.warpgroup import sequence_row


class Sizes(NamedTuple):
    """The numbers of a call that the kernel does not specialise on."""

    all_heads: Any  # over the batch
    heads: Any
    group: Any  # heads of queries per head of keys
    head_pairs: Any
    section: Any  # heads whose tiles come together
    tiles: Any  # per head
    rows: Any  # queries per head, or tokens if packed
    columns: Any
    shift: Any  # of the diagonal; for packed sequences 1 if it ends at the last key
    window_left: Any  # with PREFIX the first keys, which all queries see
    window_right: Any


class Rules(NamedTuple):
    """What the kernel is compiled for."""

    GROUPS: int  # consumer groups
    TURNS: bool  # whether two groups take turns at starting products
    STAGES: int  # of the rings of keys and values
    LEFT: bool  # whether queries see a limited number of keys before them
    RIGHT: bool  # and after them
    BN: int  # keys per block
    REST: int  # columns beyond the first half of a tile, 0 if D fills the tile
    MASKS: int  # see mask.py
    PREFIX: bool = False  # whether all queries see a number of first keys; without LEFT
    FLOAT: int = 0  # D if o leaves in float32, which the registers store; 0 if it has q's dtype
    CAP: bool = False  # whether scores have a softcap


class Scale(NamedTuple):
    factor: Any  # of scores, or of their tanh, for exponentials of base 2
    share: Any  # with CAP, of scores for the exponential in their tanh


class Tile(NamedTuple):
    """A tile of queries: its head (-1: no more tiles), first row, range of key blocks, and its sequence.

    For packed sequences `start` is where the sequence's queries begin, else the number in the batch.
    """

    head: Any
    row: Any
    low: Any
    high: Any
    start: Any
    length: Any
    columns: Any
    shift: Any


@aggregate
class TileScheduler:
    """Which tiles of queries a program takes, in which order, and what each sees.

    In causal calls, tiles of the first 2 x `head_pairs` heads come in pairs: a heavy tile of one head and an equally
    light one of another, so that all pairs have as many blocks. Neighbouring programs' pairs have the same heads, which
    stay in L2. The remaining tiles, two to four rounds, are dealt to the programs from left to right and back, the
    heaviest first, so that all end together; a program with an extra pair skips the first round. Without pairs all
    tiles come in that order, one section of heads after the other; but see `place`.
    """

    all_heads: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    head_pairs: gl.tensor
    section: gl.tensor
    tiles: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    shift: gl.tensor
    window_left: gl.tensor
    window_right: gl.tensor
    factor: gl.tensor
    share: gl.tensor
    RULES: gl.constexpr
    BM: gl.constexpr
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, sizes, scale, RULES, BM, PACKED):
        # Triton 3.6 drops the names of a NamedTuple here.
        self.all_heads, self.heads, self.group, self.head_pairs, self.section, self.tiles, *others = sizes
        self.rows, self.columns, self.shift, self.window_left, self.window_right = others
        self.factor, self.share = scale
        self.RULES = gl.constexpr(RULES)
        self.BM = gl.constexpr(BM)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def nth(self, n):
        """Returns the number of this program's n-th tile; pairs come first."""
        program, programs = gl.program_id(0), gl.num_programs(0)
        pairs = self.head_pairs * self.tiles
        rounds, more = pairs // programs, pairs % programs
        extra = gl.where(program < more, 1, 0)
        if n < 2 * (rounds + extra):
            t = 2 * (program + n // 2 * programs) + (n & 1)
        else:
            time = n - 2 * rounds - extra
            place = gl.where((time & 1) == 1, programs - 1 - program, program)
            t = 2 * pairs + time * programs + place - more
        return t

    @gluon.jit
    def place(self, t):
        """Returns a tile's head, counted over the batch, and its first row."""
        if not self.RULES.LEFT and not self.RULES.RIGHT:
            # A section is one head. With three groups, tiles that leave a group without rows come last.
            early = self.tiles
            if (self.BM > 2 * ROWS) & (self.rows <= self.tiles * self.BM - ROWS):
                early -= 1
            if t < self.all_heads * early:
                head = t // early
                tile = early - 1 - t % early
            else:
                head = t - self.all_heads * early
                tile = early
        else:
            pairs = self.head_pairs * self.tiles
            if t < 2 * pairs:
                head = t // 2 // self.tiles * 2 + (t & 1)
                tile = t // 2 % self.tiles
                if (t & 1) == 0:
                    tile = self.tiles - 1 - tile
            else:
                t -= 2 * pairs
                first = t // (self.section * self.tiles) * self.section
                within = t - first * self.tiles
                size = gl.minimum(self.section, self.all_heads - 2 * self.head_pairs - first)
                head = 2 * self.head_pairs + first + within % size
                tile = self.tiles - 1 - within // size
        return head, tile * self.BM

    @gluon.jit
    def packed_place(self, listed, t):
        """`place` for packed sequences: returns (head, row, q_start, rows, k_start, columns).

        They are a tile's head and first row, where its sequence's queries begin and how many there are, and the same
        for its keys. A sequence's tiles come by sections of heads.
        """
        at = listed + 8 + t // self.heads * 8
        base, tiles = gl.load(at), gl.load(at + 1)
        q_start, rows = gl.load(at + 2), gl.load(at + 3)
        k_start, columns = gl.load(at + 4), gl.load(at + 5)
        within = t - base * self.heads
        first = within // (self.section * tiles) * self.section
        within -= first * tiles
        size = gl.minimum(self.section, self.heads - first)
        tile = within // size
        if self.RULES.RIGHT:
            tile = tiles - 1 - tile
        return first + within % size, tile * self.BM, q_start, rows, k_start, columns

    @gluon.jit
    def coordinates(self, head, row, start, length):
        """Returns a row's coordinates in a tensor map: in a batch's head, or in the sequence that begins there."""
        if self.PACKED:
            far, end, last = sequence_row(start, length, row)
            at = (far, end, head, last, 0)
        else:
            at = (start, head, row, 0)
        return at

    @gluon.jit
    def key_blocks(self, row, columns, shift):
        """Returns the range of key blocks that a tile's rows see, at least one block."""
        BN: gl.constexpr = self.RULES.BN
        high = gl.cdiv(columns, BN)
        if self.RULES.RIGHT:
            last = gl.maximum(row + self.BM - 1 + shift + self.window_right + BN, 0) // BN
            if self.RULES.PREFIX:
                last = gl.maximum(last, gl.cdiv(self.window_left, BN))
            high = gl.minimum(high, last)
        low = 0
        if self.RULES.LEFT:
            low = gl.maximum(row + shift - self.window_left, 0) // BN
        high = gl.maximum(high, 1)
        return gl.minimum(low, high - 1), high

    @gluon.jit
    def read_tile(self, records, n):
        """Reads the record of this program's n-th tile."""
        head, row, low, high, start, length, columns, shift = read_record(records, n, self.PACKED)
        if not self.PACKED:
            length, columns, shift = self.rows, self.columns, self.shift
        return Tile(head, row, low, high, start, length, columns, shift)

    @gluon.jit
    def last_block(self, row, tile):
        """Returns the end of the key blocks that a group's rows see, within its tile's; at least one block."""
        BN: gl.constexpr = self.RULES.BN
        high = tile.high
        if self.RULES.RIGHT and (self.RULES.MASKS == 2 or self.BM > BN):
            last = gl.maximum(row + ROWS - 1 + tile.shift + self.window_right + BN, 0) // BN
            if self.RULES.PREFIX:
                last = gl.maximum(last, gl.cdiv(self.window_left, BN))
            high = gl.minimum(gl.maximum(last, tile.low + 1), high)
        return high

    @gluon.jit
    def full_blocks(self, row, low, tile):
        """Returns the range of blocks of which all of a group's rows see every key."""
        BN: gl.constexpr = self.RULES.BN
        high = tile.columns // BN
        if self.RULES.RIGHT:
            seen = gl.maximum(row + tile.shift + self.window_right + 1, 0)
            if self.RULES.PREFIX:
                seen = gl.maximum(seen, self.window_left)
            high = gl.minimum(high, seen // BN)
        if self.RULES.LEFT:
            low = gl.cdiv(gl.maximum(row + ROWS - 1 + tile.shift - self.window_left, 0), BN)
        return low, high


def consumer_groups(D: int, heads: int, rows: int, left: int, right: int, packed: bool, programs: int) -> int:
    """Returns the number of consumer warpgroups per block, two or three.

    At D <= 96 three multiply 1.1 times as fast as two (above D 64 by 64 keys, to save registers). But with tiles of 192
    rows the heaviest program may have more rows than with 128, and causal tiles of up to 4096 queries (1024 above D 64)
    then see fewer of their keys.

    At D 128 three groups of 64 keys take longer for the same keys, but hide a part of the time between tiles. So they
    serve causal windows whose tiles are short: on an H200 they take 0.88 to 0.95 of two groups' time at 16384 queries
    and windows of 256 to 2048, and 0.94 and 0.98 at 4096 and windows of 256 and 512. There 1024 takes 1.06.
    """
    two, three = (triton.cdiv(heads * triton.cdiv(rows, tile), programs) * tile for tile in (128, 192))
    if D == 128 and right == 0 and 256 <= left <= 2048 and not packed:
        return 3 if rows >= max(4096, 8 * left) and three < 1.05 * two else 2
    ahead = right < UNBOUNDED
    if D > 96 or (ahead and rows <= (4096 if D <= 64 else 1024)) or (packed and rows <= 1536):
        return 2
    return 3 if packed or three < 1.1 * two else 2


@lru_cache(1024)
def paired_heads(heads: int, tiles: int, programs: int, most: int, more: int) -> int:
    """Returns how many pairs of causal heads go by pairs of tiles (`TileScheduler`), so that the programs end together.

    It tries the numbers that leave one or two rounds of other tiles, with at most `most` heads if they fill a round;
    and none, if there are few tiles. A tile costs its position, the tiles of keys that all rows see (`more`), and 1.5
    for its prologue and epilogue.
    """
    least = 2 * programs / tiles
    first = min(heads // 2, math.ceil(max(0, heads - max(least, min(2 * least, most))) / 2))
    last = max(first, int((heads - least) / 2))
    few = heads * tiles <= 8 * programs
    pair, ends = tiles + 4.0 + 2 * more, {}
    for pairs in {*range(first, last + 1, max(1, (last - first) // 16)), 0 if few else first}:
        rounds, extra = divmod(pairs * tiles, programs)
        busy = [rounds * pair] * programs
        rest = [tile + 1.5 + more for tile in range(tiles, 0, -1) for _ in range(heads - 2 * pairs)]
        for n, cost in enumerate([pair] * extra + rest):
            turn, program = divmod(n, programs)
            busy[programs - 1 - program if turn % 2 else program] += cost
        ends[pairs] = max(busy)
    return min(ends, key=lambda pairs: (ends[pairs], -pairs))


def masked_blocks(
    BM: int, BN: int, columns: int, shift: int, right: int, back: bool, ahead: bool, bottom: bool, packed: bool,
    prefix: int = 0
) -> int:  # fmt: skip
    """Returns `Rules.MASKS`: 1 or 3 if the causal edge, or the keys' end, is in the first block that a group sees."""
    if prefix:
        return 2
    if ahead and not (packed and bottom):  # packed sequences have different shifts
        return 2 if (shift + right) % (ROWS.value if BM > BN else BN) else 3 if back else 1
    if ahead or back:
        return 2
    return 1 if packed or columns % BN else 0
