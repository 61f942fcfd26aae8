"""Which scores of a block a row does not see: they become -inf, in as few instructions as possible.

A tile's first block has its last keys: the diagonal in causal calls, else the ragged end. `Rules.MASKS` says which
blocks may have keys that some of a group's rows do not see: 0 none, 1 its first, 2 any, 3 its first and those at a
window's left edge.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def cutting_code(N, KEEP):
    """PTX for `cut_columns` on a thread's N numbers, which a matrix instruction's layout takes from two rows.

    It makes a bit for each column up to a row's last, so that one machine instruction makes eight predicates from them.
    `room` is that last column, counted from the thread's first.
    """
    lines = [
        "{ .reg .b32 first, room, part, mask; .reg .pred seen; mov.u32 first, %laneid; and.b32 first, first, 3; "
        "shl.b32 first, first, 1;"
    ]
    for row in (0, 1):
        lines.append(
            f"sub.s32 room, ${2 * N + 2 * row}, first; and.b32 part, room, 7; min.s32 part, part, 1; "
            "shr.s32 room, room, 3;"
        )
        lines.append(
            "shl.b32 room, room, 1; add.s32 room, room, part; add.s32 room, room, 1; max.s32 room, room, 0; "
            "min.s32 room, room, 32;"
        )
        lines.append("bmsk.clamp.b32 mask, 0, room;")
        for k in range(N // 2):  # two of every eight columns
            n = 4 * (k // 2) + 2 * row + k % 2
            lines.append(
                f"and.b32 part, mask, {1 << k}; setp.{'ne' if KEEP else 'eq'}.b32 seen, part, 0; "
                f"selp.f32 ${n}, ${n}, 0fFF800000, seen;"
            )
    return " ".join(lines) + " }", ",".join(["=f"] * N + [str(n) for n in range(N)] + ["r"] * N)


@gluon.jit
def cut_columns(s, last, KEEP: gl.constexpr = True):
    """Sets scores beyond each row's last column to -inf; without KEEP, those up to it."""
    N: gl.constexpr = s.shape[1] // 2
    LAYOUT: gl.constexpr = s.type.layout
    lasts = last[:, None] + gl.zeros(s.shape, gl.int32, LAYOUT)
    return gl.inline_asm_elementwise(
        cutting_code(N, KEEP)[0], cutting_code(N, KEEP)[1], [s, lasts], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.jit
def hide(s, row, block, tile, scheduler):
    """Sets the scores of keys that a row does not see to -inf. row: the group's first; block: of keys."""
    i = row + tile.shift + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    last = 0 * i + tile.columns - 1
    if scheduler.RULES.RIGHT:
        last = gl.minimum(last, i + scheduler.window_right)
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
