"""Softmax of a group of warps in attention's forward kernel for Hopper: a block's exponentials, and what is subtracted from their scores.

Softmax is the same whatever number is subtracted from all scores of a row, as long as no exponential overflows. So that number is the maximum
of the first block of which the row sees a key, and stays: exponentials of later blocks begin as their scores arrive, without maxima, and no
sum shrinks. A group looks at each block's sums. Only where one is beyond what the dtype may hold are that block's scores made again, for new
maxima of all of the group's rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NONE = gl.constexpr(-1.0e30)  # of a row that has seen no key: no -inf, for their difference would be NaN


@gluon.jit
def _rise(s, top, factor):
    """What is subtracted from now on (base 2, scaled): where this block has a larger score, that."""
    return gl.maximum(top, gl.max(s, 1) * factor)


@gluon.jit
def _begin(s, top, factor):
    """`_rise` of the rows alone that have seen no key, whose sums are 0."""
    return gl.where(top > NONE, top, _rise(s, top, factor))


@gluon.jit
def _soften(s, top, factor):
    """Exponentials of scores."""
    return gl.exp2(s * factor - top[:, None])


@gluon.jit
def _sums(s):
    """(rows, 8): sums of each row over every 8th column, which one thread has."""
    return gl.sum(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1)


@gluon.jit
def _shrink(sums, factors):
    """Sums times a number a row."""
    LAYOUT: gl.constexpr = sums.type.layout
    return sums * gl.convert_layout(factors, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.constexpr_function
def _cutting(N, KEEP):
    """Of a thread's N numbers, in the layout of a matrix instruction two rows': a bit for each column up to a row's last, so that a machine
    instruction makes eight predicates of them. `room` is the last one, counted from the thread's first."""
    lines = [
        "{ .reg .b32 first, room, part, mask; .reg .pred seen; mov.u32 first, %laneid; and.b32 first, first, 3; shl.b32 first, first, 1;"
    ]
    for row in (0, 1):
        lines.append(
            f"sub.s32 room, ${2 * N + 2 * row}, first; and.b32 part, room, 7; min.s32 part, part, 1; shr.s32 room, room, 3;"
        )
        lines.append(
            "shl.b32 room, room, 1; add.s32 room, room, part; add.s32 room, room, 1; max.s32 room, room, 0; min.s32 room, room, 32;"
        )
        lines.append("bmsk.clamp.b32 mask, 0, room;")
        for k in range(N // 2):  # two of every eight columns
            n = 4 * (k // 2) + 2 * row + k % 2
            lines.append(
                f"and.b32 part, mask, {1 << k}; setp.{'ne' if KEEP else 'eq'}.b32 seen, part, 0; selp.f32 ${n}, ${n}, 0fFF800000, seen;"
            )
    return " ".join(lines) + " }", ",".join(["=f"] * N + [str(n) for n in range(N)] + ["r"] * N)


@gluon.jit
def _cut(s, last, KEEP: gl.constexpr = True):
    """Scores of columns beyond each row's last become -inf; or else, those up to it."""
    N: gl.constexpr = s.shape[1] // 2
    LAYOUT: gl.constexpr = s.type.layout
    lasts = last[:, None] + gl.zeros(s.shape, gl.int32, LAYOUT)
    return gl.inline_asm_elementwise(
        _cutting(N, KEEP)[0], _cutting(N, KEEP)[1], [s, lasts], dtype=gl.float32, is_pure=True, pack=N
    )


# What `_watch` finds is a number of the group's, and Gluon makes such a number of a tensor by way of shared memory. So it lies in a register of
# PTX with a name, which `_declare` declares and `_beyond` reads. A sum that is not a number is beyond, too.
@gluon.constexpr_function
def _lines(ME, dtype=None):
    most = (
        "0f47000000" if dtype == gl.float16 else "0f5D800000"
    )  # 2^15, float16's end is 65504; else 2^60: o's sums are as much larger than v
    declare = f".reg .pred beyond{ME}; setp.ne.s32 beyond{ME}, 0, 0; mov.u32 $0, 0;"
    above = [
        f"setp.gtu{'.or' if n else ''}.f32 beyond{ME}, ${n}, {most}{f', beyond{ME}' if n else ''};" for n in range(4)
    ]
    watch = f"{' '.join(above)} barrier.cta.red.or.pred beyond{ME}, {10 + ME}, 128, beyond{ME};"
    return declare, watch, f"selp.s32 $0, 1, 0, beyond{ME};"


@gluon.jit
def _declare(ME: gl.constexpr):
    gl.inline_asm_elementwise(_lines(ME)[0], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _watch(ME: gl.constexpr, sums, dtype: gl.constexpr):
    """Sums as they are; `_beyond` then tells whether any of the group's is too large for its probabilities to be of that dtype. Being a barrier
    of the group it also keeps what follows in the source behind the exponentials: else ptxas waits for products before them, though only
    their packing has to."""
    return gl.inline_asm_elementwise(
        _lines(ME, dtype)[1], "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def _beyond(ME: gl.constexpr):
    return gl.inline_asm_elementwise(_lines(ME)[2], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0
