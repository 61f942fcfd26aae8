"""Which scores of a block a row does not see: they become -inf, in as few instructions as possible.

A tile's first block has its last keys: the diagonal in causal calls, else the ragged end. `Rules.MASKS` says which
blocks may have keys that some of a group's rows do not see: 0 none, 1 its first, 2 any, 3 its first and those at a
window's left edge.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.tiles.warpgroup import cut_columns


@gluon.jit
def hide(s, row, block, tile, scheduler):
    """Sets the scores of keys that a row does not see to -inf. row: the group's first; block: of keys."""
    i = row + tile.shift + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    last = 0 * i + tile.columns - 1
    if scheduler.RULES.RIGHT:
        edge = i + scheduler.window_right
        if scheduler.RULES.PREFIX:
            edge = gl.maximum(edge, scheduler.window_left - 1)
        last = gl.minimum(last, edge)
    s = cut_columns(s, last - block * scheduler.RULES.BN)
    if scheduler.RULES.LEFT:
        s = hide_left(s, row, block, tile, scheduler)
    return s


@gluon.jit
def hide_left(s, row, block, tile, scheduler):
    """`hide` for the keys before a window only."""
    i = row + tile.shift + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    return cut_columns(s, i - scheduler.window_left - 1 - block * scheduler.RULES.BN, False)


@gluon.jit
def hide_first(s, row, block, tile, scheduler):
    """`hide` for a tile's first block."""
    if scheduler.RULES.MASKS == 0:
        pass
    elif scheduler.RULES.MASKS == 1 or scheduler.RULES.RIGHT:
        s = hide(s, row, block, tile, scheduler)
    else:
        low, high = scheduler.full_blocks(row, 0, tile)
        if (block >= high) | (block < low):
            s = hide(s, row, block, tile, scheduler)
    return s
