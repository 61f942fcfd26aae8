"""Integers of few bits as floating-point numbers for matrix units, exactly.

The bits of an integer become the last bits of a power of two's mantissa; a subtraction then takes the power away. Both
are quicker than to convert integers, and need one instruction for two numbers of 16 bits.
Source: Kim et al., Who says elephants can't run, 2022 (arXiv:2211.10017), section 3.3.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _quarters(kind: str, power: str, one: str) -> tl.constexpr:
    """Assembly: two words' four 4-bit numbers, each behind a power of two, plus $5."""
    text = f"""{{
        .reg .b32 a, b, c, power, one;
        mov.b32 power, {power};
        mov.b32 one, {one};
        shr.u32 a, $4, 4;
        shr.u32 b, $4, 8;
        shr.u32 c, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, power, 0xea;
        lop3.b32 $1, a, 0x000f000f, power, 0xea;
        lop3.b32 $2, b, 0x000f000f, power, 0xea;
        lop3.b32 $3, c, 0x000f000f, power, 0xea;
        fma.rn.{kind} $0, $0, one, $5;
        fma.rn.{kind} $1, $1, one, $5;
        fma.rn.{kind} $2, $2, one, $5;
        fma.rn.{kind} $3, $3, one, $5;
        }}"""
    return tl.constexpr(text)


def _halves(kind: str, power: str, shifted: str, one: str, sixteen: str, away: str) -> tl.constexpr:
    """Assembly: two words' two signed bytes, from 4 bits each: 16 high + low. The sign bit is flipped (shifted)."""
    text = f"""{{
        .reg .b32 a, b, c, d, power, shifted, one, sixteen, away;
        mov.b32 power, {power};
        mov.b32 shifted, {shifted};
        mov.b32 one, {one};
        mov.b32 sixteen, {sixteen};
        mov.b32 away, {away};
        shr.u32 a, $2, 4;
        shr.u32 b, $2, 8;
        shr.u32 c, $2, 12;
        lop3.b32 d, $2, 0x000f000f, power, 0xea;
        lop3.b32 a, a, 0x000f000f, shifted, 0x6a;
        lop3.b32 b, b, 0x000f000f, power, 0xea;
        lop3.b32 c, c, 0x000f000f, shifted, 0x6a;
        fma.rn.{kind} a, a, sixteen, away;
        fma.rn.{kind} c, c, sixteen, away;
        fma.rn.{kind} $0, d, one, a;
        fma.rn.{kind} $1, b, one, c;
        }}"""
    return tl.constexpr(text)


_QUARTERS_BF16 = _quarters("bf16x2", "0x43004300", "0x3f803f80")
_QUARTERS_F16 = _quarters("f16x2", "0x64006400", "0x3c003c00")
# away: -16 * 136 - 128
_HALVES_BF16 = _halves("bf16x2", "0x43004300", "0x43084308", "0x3f803f80", "0x41804180", "0xc510c510")
# float16's mantissa holds a whole byte: prmt puts each behind 1024, and 1152 = 1024 + 128 is taken away.
_HALVES_F16 = tl.constexpr("""{
        .reg .b32 a, power, away;
        mov.b32 power, 0x64646464;
        mov.b32 away, 0x64806480;
        xor.b32 a, $2, 0x80808080;
        prmt.b32 $0, a, power, 0x4240;
        prmt.b32 $1, a, power, 0x4341;
        sub.f16x2 $0, $0, away;
        sub.f16x2 $1, $1, away;
        }""")


@triton.jit
def whole(u, OFFSET: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr):
    """Bytes u, of which BITS bits are used, minus OFFSET, in a floating dtype.

    The bits of u become the last bits of a power of two's mantissa, which is quicker than to convert integers."""
    if TO == tl.bfloat16 and BITS < 8:
        return (u.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
    elif TO == tl.float16:
        return (u.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    else:
        return ((u.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)).to(TO)


@triton.jit
def quarters(raw, zero, TO: tl.constexpr, PACKED: tl.constexpr):
    """The four 4-bit numbers of 16-bit words, lowest first, minus zero (int32, raw's shape), in a floating dtype.

    PACKED: the GPU has packed arithmetic (NVIDIA, from sm_80 on), for 16-bit dtypes: two words take 11 instructions."""
    if PACKED and TO == tl.bfloat16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _QUARTERS_BF16,
            "=&r,=&r,=&r,=&r,r,r",
            [raw, (-128 - zero).to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif PACKED and TO == tl.float16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _QUARTERS_F16,
            "=&r,=&r,=&r,=&r,r,r",
            [raw, (-1024 - zero).to(tl.float16)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        away = zero.to(TO)
        w0 = whole(raw & 15, 0.0, 4, TO) - away
        w1 = whole((raw >> 4) & 15, 0.0, 4, TO) - away
        w2 = whole((raw >> 8) & 15, 0.0, 4, TO) - away
        w3 = whole((raw >> 12) & 15, 0.0, 4, TO) - away
    return w0, w1, w2, w3


@triton.jit
def halves(raw, TO: tl.constexpr, PACKED: tl.constexpr):
    """The two signed bytes of 16-bit words (uint16), lower first, in a floating dtype. PACKED: as in `quarters`."""
    if PACKED and TO == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _HALVES_BF16, "=&r,=&r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif PACKED and TO == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _HALVES_F16, "=&r,=&r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low, high = whole((raw & 255) ^ 128, 128.0, 8, TO), whole((raw >> 8) ^ 128, 128.0, 8, TO)
    return low, high
