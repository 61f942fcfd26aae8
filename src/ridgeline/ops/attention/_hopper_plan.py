"""The schedule of attention's forward on Hopper: which tiles of queries a program takes, when, and what they see.

The host's rules for it are here too.
"""

import math
from functools import lru_cache

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from ridgeline.ops.attention._hopper_rings import ROWS, _in, _read
from ridgeline.ops.attention._hopper_softmax import _cut


@aggregate
class Plan:
    """Which tiles of queries a program takes, in which order, and what each sees.

    In causal calls, tiles of the first 2 x `couples` heads come in pairs: a heavy tile of one head and an equally light
    one of another, so that all pairs have as many blocks. Neighbouring programs' pairs have the same heads, which stay
    in L2. The remaining tiles, two to four rounds, are dealt to the programs from left to right and back, the heaviest
    first, so that all end together; a program with an extra pair skips the first round. Without pairs all tiles come in
    that order, one section of heads after the other; but see `place`.
    """

    turns: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    couples: gl.tensor
    section: gl.tensor
    tiles: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    shift: gl.tensor
    left: gl.tensor
    right: gl.tensor
    factor: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    PACKED: gl.constexpr
    # Which blocks may have keys that some of a group's rows do not see: 0 none, 1 its first, 2 any, 3 its first and
    # those at a window's left edge.
    MASKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, turns, heads, group, couples, section, tiles, rows, columns, shift, left, right, factor, BM, BN, LEFT,
        RIGHT, PACKED, MASKS
    ):  # fmt: skip
        self.turns = turns
        self.heads = heads
        self.group = group
        self.couples = couples
        self.section = section
        self.tiles = tiles
        self.rows = rows
        self.columns = columns
        self.shift = shift
        self.left = left
        self.right = right
        self.factor = factor
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.PACKED = gl.constexpr(PACKED)
        self.MASKS = gl.constexpr(MASKS)

    @gluon.jit
    def step(self, n):
        """Returns the number of this program's n-th tile; pairs come first."""
        program, programs = gl.program_id(0), gl.num_programs(0)
        pairs = self.couples * self.tiles
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
        if not self.LEFT and not self.RIGHT:
            # A section is one head. With three groups, tiles that leave a group without rows come last.
            early = self.tiles
            if (self.BM > 2 * ROWS) & (self.rows <= self.tiles * self.BM - ROWS):
                early -= 1
            if t < self.turns * early:
                turn = t // early
                tile = early - 1 - t % early
            else:
                turn = t - self.turns * early
                tile = early
        else:
            pairs = self.couples * self.tiles
            if t < 2 * pairs:
                turn = t // 2 // self.tiles * 2 + (t & 1)
                tile = t // 2 % self.tiles
                if (t & 1) == 0:
                    tile = self.tiles - 1 - tile
            else:
                t -= 2 * pairs
                first = t // (self.section * self.tiles) * self.section
                within = t - first * self.tiles
                size = gl.minimum(self.section, self.turns - 2 * self.couples - first)
                turn = 2 * self.couples + first + within % size
                tile = self.tiles - 1 - within // size
        return turn, tile * self.BM

    @gluon.jit
    def find(self, listed, t):
        """`place` for packed sequences: returns (head, row, begin, rows, begins, columns).

        They are a tile's head and first row, where its sequence's queries begin and how many there are, and the same
        for its keys. A sequence's tiles come by sections of heads.
        """
        at = listed + 8 + t // self.heads * 8
        base, tiles = gl.load(at), gl.load(at + 1)
        begin, rows = gl.load(at + 2), gl.load(at + 3)
        begins, columns = gl.load(at + 4), gl.load(at + 5)
        within = t - base * self.heads
        first = within // (self.section * tiles) * self.section
        within -= first * tiles
        size = gl.minimum(self.section, self.heads - first)
        tile = within // size
        if self.RIGHT:
            tile = tiles - 1 - tile
        return first + within % size, tile * self.BM, begin, rows, begins, columns

    @gluon.jit
    def at(self, head, row, begin, length):
        """Returns a row's coordinates in a tensor map: in a batch's head, or in the sequence that begins there."""
        if self.PACKED:
            far, end, last = _in(begin, length, row)
            at = (far, end, head, last, 0)
        else:
            at = (begin, head, row, 0)
        return at

    @gluon.jit
    def reach(self, row, columns, shift):
        """Returns the range of key blocks that a tile's rows see, at least one block."""
        high = gl.cdiv(columns, self.BN)
        if self.RIGHT:
            high = gl.minimum(high, gl.maximum(row + self.BM - 1 + shift + self.right + self.BN, 0) // self.BN)
        low = 0
        if self.LEFT:
            low = gl.maximum(row + shift - self.left, 0) // self.BN
        high = gl.maximum(high, 1)
        return gl.minimum(low, high - 1), high

    @gluon.jit
    def read(self, board, n):
        """Reads the board's entry for a program's n-th tile."""
        head, row, low, high, begin, length, columns, shift = _read(board, n, self.PACKED)
        if not self.PACKED:
            length, columns, shift = self.rows, self.columns, self.shift
        return head, row, low, high, begin, length, columns, shift

    @gluon.jit
    def seen_by(self, row, low, high, shift):
        """Returns the end of the key blocks that a group's rows see, within its tile's; at least one block."""
        if self.RIGHT and (self.MASKS == 2 or self.BM > self.BN):
            last = gl.maximum(row + ROWS - 1 + shift + self.right + self.BN, 0) // self.BN
            high = gl.minimum(gl.maximum(last, low + 1), high)
        return high

    @gluon.jit
    def whole(self, row, low, columns, shift):
        """Returns the range of blocks of which all of a group's rows see every key."""
        high = columns // self.BN
        if self.RIGHT:
            high = gl.minimum(high, gl.maximum(row + shift + self.right + 1, 0) // self.BN)
        if self.LEFT:
            low = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - self.left, 0), self.BN)
        return low, high

    @gluon.jit
    def hide_last(self, s, row, block, columns, shift):
        """`hide` for a tile's first block, its last keys: the diagonal in causal calls, else the ragged end."""
        if self.MASKS == 0:
            pass
        elif self.MASKS == 1 or self.RIGHT:
            s = self.hide(s, row, block, columns, shift)
        else:
            low, high = self.whole(row, 0, columns, shift)
            if (block >= high) | (block < low):
                s = self.hide(s, row, block, columns, shift)
        return s

    @gluon.jit
    def hide(self, s, row, block, columns, shift):
        """Sets the scores of keys that a row does not see to -inf."""
        i = row + shift + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        last = 0 * i + columns - 1
        if self.RIGHT:
            last = gl.minimum(last, i + self.right)
        s = _cut(s, last - block * self.BN)
        if self.LEFT:
            s = self.hide_left(s, row, block, shift)
        return s

    @gluon.jit
    def hide_left(self, s, row, block, shift):
        """`hide` for the keys before a window only."""
        i = row + shift + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        return _cut(s, i - self.left - 1 - block * self.BN, False)


def _groups(D: int, turns: int, rows: int, ahead: bool, packed: bool, programs: int) -> int:
    """Returns the number of consumer warpgroups per block, two or three.

    At D <= 96 three multiply 1.1 times as fast as two (above D 64 by 64 keys, to save registers). But with tiles of 192
    rows the heaviest program may have more rows than with 128, and causal tiles of up to 4096 queries (1024 above D 64)
    then see fewer of their keys.
    """
    if D > 96 or (ahead and rows <= (4096 if D <= 64 else 1024)) or (packed and rows <= 1536):
        return 2
    two, three = (triton.cdiv(turns * triton.cdiv(rows, tile), programs) * tile for tile in (128, 192))
    return 3 if packed or three < 1.1 * two else 2


@lru_cache(1024)
def _couples(heads: int, tiles: int, programs: int, most: int, more: int) -> int:
    """Returns how many couples of causal heads go by pairs of tiles (`Plan`), so that the programs end together.

    It tries the numbers that leave one or two rounds of other tiles, with at most `most` heads if they fill a round;
    and none, if there are few tiles. A tile costs its position, the tiles of keys that all rows see (`more`), and 1.5
    for its prologue and epilogue.
    """
    least = 2 * programs / tiles
    first = min(heads // 2, math.ceil(max(0, heads - max(least, min(2 * least, most))) / 2))
    last = max(first, int((heads - least) / 2))
    few = heads * tiles <= 8 * programs
    pair, ends = tiles + 4.0 + 2 * more, {}
    for couples in {*range(first, last + 1, max(1, (last - first) // 16)), 0 if few else first}:
        rounds, extra = divmod(couples * tiles, programs)
        busy = [rounds * pair] * programs
        rest = [tile + 1.5 + more for tile in range(tiles, 0, -1) for _ in range(heads - 2 * couples)]
        for n, cost in enumerate([pair] * extra + rest):
            turn, program = divmod(n, programs)
            busy[programs - 1 - program if turn % 2 else program] += cost
        ends[couples] = max(busy)
    return min(ends, key=lambda couples: (ends[couples], -couples))


def _masks(
    BM: int, BN: int, columns: int, shift: int, right: int, back: bool, ahead: bool, bottom: bool, packed: bool
) -> int:
    """Returns `Plan.MASKS`: 1 or 3 if the causal edge, or the keys' end, is in the first block that a group sees."""
    if ahead and not (packed and bottom):  # packed sequences have different shifts
        return 2 if (shift + right) % (ROWS.value if BM > BN else BN) else 3 if back else 1
    if ahead or back:
        return 2
    return 1 if packed or columns % BN else 0
