"""Softmax of a group of warps in attention's forward kernel for Hopper: maxima, exponentials and sums of rows, block by block of keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _far(most, top):
    """`most` where it is 2^8 times beyond `top` (base 2) in any row of a warp, else `top`."""
    text: gl.constexpr = (
        "{ .reg .pred far, any; .reg .f32 one, two; sub.f32 one, $2, $4; sub.f32 two, $3, $5; max.f32 one, one, two; "
        "setp.gt.f32 far, one, 0f41000000; vote.sync.any.pred any, far, -1; selp.f32 $0, $2, $4, any; selp.f32 $1, $3, $5, any; }"
    )
    return gl.inline_asm_elementwise(text, "=&f,=&f,f,f,f,f", [most, top], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _rise(s, top, factor, LAZY: gl.constexpr):
    """The running maximum of scores (base 2, scaled), and what sums shrink by. With LAZY it may lie up to 8 below: probabilities are then
    up to 2^8, o and its divisor alike, and sums seldom shrink."""
    most = gl.maximum(top, gl.max(s, 1) * factor)
    if LAZY:
        most = _far(most, top)
    return most, gl.exp2(top - most)


@gluon.constexpr_function
def _times(n):
    """Instructions that multiply n numbers of a thread, of two rows, unless all of the warp's rows are to be multiplied by 1."""
    lines = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    test = f"setp.neu.f32 some, ${2 * n}, 0f3F800000; setp.neu.or.f32 some, ${2 * n + 2}, 0f3F800000, some;"
    return f"{{ .reg .pred some, any; {test} vote.sync.any.pred any, some, -1; @!any bra same; {' '.join(lines)} same: }}"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _rescale(sums, shrink, LAZY: gl.constexpr):
    """Sums times a number a row."""
    factors = gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
    if LAZY:
        N: gl.constexpr = sums.shape[1] // 2  # of a thread
        factors += gl.zeros(sums.shape, gl.float32, sums.type.layout)
        sums = gl.inline_asm_elementwise(_times(N), _operands(N), [sums, factors], dtype=gl.float32, is_pure=True, pack=N)
    else:
        sums = sums * factors
    return sums


@gluon.jit
def _soften(s, most, factor):
    """Exponentials of scores."""
    return gl.exp2(s * factor - most[:, None])


@gluon.jit
def _after(total):
    """Keeps what follows in the source behind these sums in the machine code: else ptxas waits for the products before the exponentials,
    though only the packing has to (docs/notes/attention.md). Sums below 2^127 let nobody arrive, and for others' arrival nobody waits."""
    never: gl.constexpr = "{ .reg .pred never; setp.gt.f32 never, $1, 0f7F000000; @never bar.arrive 15, 256; mov.f32 $0, $1; }"
    return gl.inline_asm_elementwise(never, "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1)
