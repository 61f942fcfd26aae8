"""Softmax of a group of warps in attention's forward kernel for Hopper: a block's exponentials, and what is subtracted from their scores.

Softmax is the same whatever number is subtracted from all scores of a row, as long as no exponential overflows. So that number is the maximum
of the first block that the row sees, and stays: exponentials of later blocks begin as their scores arrive, without maxima, and no sum shrinks.
A group looks at each block's sums. Only where one is beyond 2^15 are that block's scores made again, for new maxima (`_rise`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _rise(s, top, factor):
    """The maximum of each row so far (base 2, scaled), and what its sums are to shrink by."""
    most = gl.maximum(top, gl.max(s, 1) * factor)
    return most, gl.exp2(top - most)


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


# What `_watch` finds is a number of the group's, and Gluon makes such a number of a tensor by way of shared memory. So it lies in a register of
# PTX with a name, which `_declare` declares and `_beyond` reads.
@gluon.constexpr_function
def _lines(ME):
    declare = f".reg .pred beyond{ME}; setp.ne.s32 beyond{ME}, 0, 0; mov.u32 $0, 0;"
    # 0f47000000 is 2^15, below float16's largest number; a sum that is not a number is beyond it
    above = [f"setp.gtu{'.or' if n else ''}.f32 beyond{ME}, ${n}, 0f47000000{f', beyond{ME}' if n else ''};" for n in range(4)]
    watch = f"{' '.join(above)} barrier.cta.red.or.pred beyond{ME}, {10 + ME}, 128, beyond{ME};"
    return declare, watch, f"selp.s32 $0, 1, 0, beyond{ME};"


@gluon.jit
def _declare(ME: gl.constexpr):
    gl.inline_asm_elementwise(_lines(ME)[0], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _watch(ME: gl.constexpr, sums):
    """Sums as they are; `_beyond` then tells whether any of the group's is beyond 2^15. Being a barrier of the group it also keeps what
    follows in the source behind the exponentials: else ptxas waits for products before them, though only their packing has to."""
    return gl.inline_asm_elementwise(_lines(ME)[1], "=f,=f,=f,=f,0,1,2,3", [sums], dtype=gl.float32, is_pure=False, pack=4)


@gluon.jit
def _beyond(ME: gl.constexpr):
    return gl.inline_asm_elementwise(_lines(ME)[2], "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0
