"""The softmax of a warpgroup in attention's Hopper forward: exponentials, and the number subtracted from scores.

Softmax does not depend on the number subtracted from a row's scores, as long as no exponential overflows. So it is the
maximum of the first block in which the row sees a key, and it stays: exponentials of later blocks start as their scores
arrive, without maxima, and sums are not rescaled. A group checks each block's sums. Only if one exceeds the dtype's
range are that block's scores computed again, for new maxima of all of the group's rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.ops.attention.hopper.mask import hide, hide_first, hide_left

NO_KEYS = gl.constexpr(-1.0e30)  # for rows that have seen no key; not -inf, since differences would be NaN


class State(NamedTuple):
    """What a group keeps of its rows: the last block's probabilities in pairs, maxima, and partial sums of all."""

    p: Any
    row_max: Any
    row_sum: Any


@gluon.jit
def soft_cap(s, share):
    """Returns tanh(s share / (2 log2 e)) and its slope, 1 - tanh^2, by one exponential and one reciprocal.

    The tanh is off by 3e-7 at most, and capped scores by that times the cap. The slope is no difference."""
    e = gl.exp2(-gl.abs(s * share))
    part = 1.0 / (e + 1.0)
    size = (1.0 - e) * part
    return gl.where(s < 0.0, -size, size), 4.0 * (e * part) * part


@gluon.jit
def cap_scores(s, scheduler):
    """Returns scores as `factor` expects them: with a softcap their tanh, else unchanged."""
    if scheduler.RULES.CAP:
        s, _slope = soft_cap(s, scheduler.share)
    return s


@gluon.jit
def raise_max(s, row_max, factor):
    """Returns what is subtracted from now on (base 2, scaled): the larger of `row_max` and this block's maximum."""
    return gl.maximum(row_max, gl.max(s, 1) * factor)


@gluon.jit
def first_max(s, row_max, factor):
    """`raise_max` only for rows that have seen no key, whose sums are 0."""
    return gl.where(row_max > NO_KEYS, row_max, raise_max(s, row_max, factor))


@gluon.jit
def exponentials(s, row_max, factor):
    """Returns the exponentials of scores."""
    return gl.exp2(s * factor - row_max[:, None])


@gluon.jit
def first_exponentials(s, row, tile, scheduler):
    """Returns the exponentials of a tile's first block, and the maxima that they are relative to."""
    s = cap_scores(s, scheduler)
    s = hide_first(s, row, tile.high - 1, tile, scheduler)
    none = gl.full([s.shape[0]], NO_KEYS, gl.float32, gl.SliceLayout(1, s.type.layout))
    row_max = raise_max(s, none, scheduler.factor)
    return exponentials(s, row_max, scheduler.factor), row_max


@gluon.jit
def later_exponentials(s, row, block, full, row_max, tile, scheduler):
    """Returns the exponentials of a later block, relative to the same numbers. full: the range of unmasked blocks."""
    s = cap_scores(s, scheduler)
    # Decided at compile time: where the inner branch ends, ptxas waits for all products.
    if scheduler.RULES.MASKS == 2:
        if (block >= full[1] - 1) | (block < full[0]):
            s = hide(s, row, block, tile, scheduler)
            row_max = first_max(s, row_max, scheduler.factor)
    elif scheduler.RULES.MASKS == 3:  # noqa: SIM102
        if block < full[0]:  # every row has seen a key in the first block
            s = hide_left(s, row, block, tile, scheduler)
    return exponentials(s, row_max, scheduler.factor), row_max


@gluon.jit
def raised_exponentials(s, row, block, row_max, tile, scheduler):
    """Returns the exponentials of a later block relative to new maxima, and these."""
    s = cap_scores(s, scheduler)
    if scheduler.RULES.MASKS == 2:
        s = hide(s, row, block, tile, scheduler)
    elif scheduler.RULES.MASKS == 3:
        s = hide_left(s, row, block, tile, scheduler)
    row_max = raise_max(s, row_max, scheduler.factor)
    return exponentials(s, row_max, scheduler.factor), row_max


@gluon.jit
def partial_sums(s):
    """Returns (rows, 8): each row's sums over every 8th column, which one thread holds."""
    return gl.sum(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1)


# `watch_overflow` finds one flag per group. As a tensor, Gluon would pass it through shared memory, so it is in a named
# PTX register, which `declare_overflow` declares and `overflowed` reads. NaN sums count as too large.
@gluon.constexpr_function
def overflow_code(ME, dtype=None):
    # 2^15 (float16 ends at 65504), else 2^60, which leaves room for o's sums: they are up to that much larger than v.
    most = "0f47000000" if dtype == gl.float16 else "0f5D800000"
    declare = f".reg .pred overflow{ME}; setp.ne.s32 overflow{ME}, 0, 0; mov.u32 $0, 0;"
    above = [
        f"setp.gtu{'.or' if n else ''}.f32 overflow{ME}, ${n}, {most}{f', overflow{ME}' if n else ''};"
        for n in range(4)
    ]
    watch = f"{' '.join(above)} barrier.cta.red.or.pred overflow{ME}, {10 + ME}, 128, overflow{ME};"
    return declare, watch, f"selp.s32 $0, 1, 0, overflow{ME};"


@gluon.jit
def declare_overflow(ME: gl.constexpr):
    gl.inline_asm_elementwise(overflow_code(ME)[0], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def watch_overflow(ME: gl.constexpr, sums, dtype: gl.constexpr):
    """Returns sums unchanged; `overflowed` then tells whether any of the group's exceeds the dtype's range.

    As a barrier of the group it also keeps later code behind the exponentials. Otherwise ptxas waits for products
    before them, though only packing must wait.
    """
    return gl.inline_asm_elementwise(
        overflow_code(ME, dtype)[1], "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.jit
def overflowed(ME: gl.constexpr):
    return gl.inline_asm_elementwise(overflow_code(ME)[2], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0
