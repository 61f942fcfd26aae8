"""What a warpgroup of a Gluon kernel for Hopper does with its tiles: layouts, masks, rows of factors, chunks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FAR = gl.constexpr(1 << 30)  # `TensorMap.FAR`


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
def flat(tile):
    """Returns a tile in shared memory as a matrix."""
    return tile.reshape([tile.type.shape[-2], tile.type.shape[-1]])


@gluon.jit
def uniform(x):
    """Tells the compiler that all threads of a warp have the same number."""
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sequence_row(start, length, row):
    """Returns a sequence row's first two and last-but-one coordinates in a ragged tensor map (`TensorMap`)."""
    return FAR, start + length, FAR - length + row


@gluon.constexpr_function
def sums_layout(columns):
    """The layout of a warpgroup's sums: 64 rows in groups of 16 per warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(parent):
    """The layout of a left operand in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=parent, k_width=2)


@gluon.jit
def rescale(sums, factors):
    """Multiplies sums by a number per row."""
    LAYOUT: gl.constexpr = sums.type.layout
    return sums * gl.convert_layout(factors, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def column_chunks(x, COUNT: gl.constexpr):
    """Splits a tensor's columns into COUNT equal pieces."""
    if COUNT == 1:
        return (x,)
    else:  # the compiler also compiles what follows a return
        left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        return column_chunks(left, COUNT // 2) + column_chunks(right, COUNT // 2)
