"""Products of a warpgroup on the tensor cores: layouts, operands in registers, and the products for scores."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ridgeline.tiles.warpgroup import operand_layout, sums_layout


class Sums(NamedTuple):
    """A warpgroup's sums: of the main columns, and of the rest in a tuple, which is empty if there is no rest."""

    main: Any
    rest: Any


@gluon.jit
def pack_pairs(p, dtype: gl.constexpr):
    """Packs two neighbours into a register: single halves carried around a loop take a register and two moves each."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    return packed


@gluon.jit
def pairs_to_operand(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks two per register, as the left operand of a product."""
    even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


@gluon.jit
def pairs_to_float(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks two per register, to float32."""
    if dtype == gl.bfloat16:
        even = (packed << 16).to(gl.float32, bitcast=True)
        odd = (packed & -65536).to(gl.float32, bitcast=True)
    else:
        even = (packed & 0xFFFF).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        odd = (packed >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [packed.shape[0], packed.shape[1] * 2]), layout)


@gluon.jit
def start_scores(q, keys, zero, REST: gl.constexpr):
    """Starts q K^T; with REST over half of the dimensions and REST more, since the others are zeros."""
    if REST:
        HALF: gl.constexpr = q.shape[1] // 2
        s = warpgroup_mma(
            q.slice(0, HALF, 1), keys.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q.slice(HALF, REST, 1), keys.slice(HALF, REST, 1).permute((1, 0)), s, is_async=True)
    else:
        s = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s


@gluon.jit
def no_sums(ROWS: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr):
    """Returns sums of zero, without a rest if REST is 0."""
    if REST:
        main = gl.zeros([ROWS, MAIN], gl.float32, sums_layout(MAIN))
        return Sums(main, (gl.zeros([ROWS, REST], gl.float32, sums_layout(REST)),))
    else:  # the compiler also compiles what follows a return
        return Sums(gl.zeros([ROWS, MAIN], gl.float32, sums_layout(MAIN)), ())


@gluon.jit
def start_sums(left, x, sums):
    """Starts sums + left x. left: in registers, in any layout."""
    left = gl.convert_layout(left, operand_layout(sums.main.type.layout))
    if len(sums.rest) > 0:
        D: gl.constexpr = sums.main.shape[1]
        REST: gl.constexpr = sums.rest[0].shape[1]
        rest_left: gl.constexpr = operand_layout(sums.rest[0].type.layout)
        main = warpgroup_mma(left, x.slice(0, D, 1), sums.main, is_async=True)
        rest = warpgroup_mma(gl.convert_layout(left, rest_left), x.slice(D, REST, 1), sums.rest[0], is_async=True)
        return Sums(main, (rest,))
    else:
        return Sums(warpgroup_mma(left, x, sums.main, is_async=True), ())


@gluon.jit
def await_sums(pending, LATER: gl.constexpr):
    """Waits for `start_sums`, after which LATER others were started."""
    if len(pending.rest) > 0:
        main, rest = warpgroup_mma_wait(2 * LATER, deps=(pending.main, pending.rest[0]))
        return Sums(main, (rest,))
    else:
        return Sums(warpgroup_mma_wait(LATER, deps=(pending.main,)), ())


@gluon.jit
def store_columns(to, x, limit, COLUMN: gl.constexpr, D: gl.constexpr):
    """Stores a warpgroup's float32 sums from column COLUMN on, in rows of D; rows below `limit`."""
    i = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    j = COLUMN + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(to + (i * D + j), x, mask=(i < limit) & (j < D))


@gluon.jit
def store_sums(to, sums, limit, D: gl.constexpr):
    """Stores a warpgroup's sums in float32, in contiguous rows of D columns; rows below `limit`."""
    store_columns(to, sums.main, limit, 0, D)
    if len(sums.rest) > 0:
        store_columns(to, sums.rest[0], limit, sums.main.shape[1], D)
