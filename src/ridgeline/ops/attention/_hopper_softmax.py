"""The softmax of a warpgroup in attention's Hopper forward: exponentials, and the number subtracted from scores.

Softmax does not depend on the number subtracted from a row's scores, as long as no exponential overflows. So it is the
maximum of the first block in which the row sees a key, and it stays: exponentials of later blocks start as their scores
arrive, without maxima, and sums are not rescaled. A group checks each block's sums. Only if one exceeds the dtype's
range are that block's scores computed again, for new maxima of all of the group's rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NONE = gl.constexpr(-1.0e30)  # for rows that have seen no key; not -inf, since differences would be NaN


@gluon.jit
def _rise(s, top, factor):
    """Returns what is subtracted from now on (base 2, scaled): the larger of `top` and this block's maximum."""
    return gl.maximum(top, gl.max(s, 1) * factor)


@gluon.jit
def _begin(s, top, factor):
    """`_rise` only for rows that have seen no key, whose sums are 0."""
    return gl.where(top > NONE, top, _rise(s, top, factor))


@gluon.jit
def _soften(s, top, factor):
    """Returns the exponentials of scores."""
    return gl.exp2(s * factor - top[:, None])


@gluon.jit
def _sums(s):
    """Returns (rows, 8): each row's sums over every 8th column, which one thread holds."""
    return gl.sum(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1)


@gluon.jit
def _shrink(sums, factors):
    """Multiplies sums by a number per row."""
    LAYOUT: gl.constexpr = sums.type.layout
    return sums * gl.convert_layout(factors, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.constexpr_function
def _cutting(N, KEEP):
    """PTX for `_cut` on a thread's N numbers, which a matrix instruction's layout takes from two rows.

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
def _cut(s, last, KEEP: gl.constexpr = True):
    """Sets scores beyond each row's last column to -inf; without KEEP, those up to it."""
    N: gl.constexpr = s.shape[1] // 2
    LAYOUT: gl.constexpr = s.type.layout
    lasts = last[:, None] + gl.zeros(s.shape, gl.int32, LAYOUT)
    return gl.inline_asm_elementwise(
        _cutting(N, KEEP)[0], _cutting(N, KEEP)[1], [s, lasts], dtype=gl.float32, is_pure=True, pack=N
    )


# `_watch` finds one flag per group. As a tensor, Gluon would pass it through shared memory, so it is in a named PTX
# register, which `_declare` declares and `_beyond` reads. NaN sums count as too large.
@gluon.constexpr_function
def _lines(ME, dtype=None):
    # 2^15 (float16 ends at 65504), else 2^60, which leaves room for o's sums: they are up to that much larger than v.
    most = "0f47000000" if dtype == gl.float16 else "0f5D800000"
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
    """Returns sums unchanged; `_beyond` then tells whether any of the group's exceeds the dtype's range.

    As a barrier of the group it also keeps later code behind the exponentials. Otherwise ptxas waits for products
    before them, though only packing must wait.
    """
    return gl.inline_asm_elementwise(
        _lines(ME, dtype)[1], "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def _beyond(ME: gl.constexpr):
    return gl.inline_asm_elementwise(_lines(ME)[2], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0
