"""8-bit floating-point numbers in OCP's e4m3 and e5m2, as codes.

e4m3 has a sign, 4 exponent bits with bias 7 and 3 mantissa bits; the largest number is 448, and there are no
infinities. e5m2 is the upper half of a float16: 5 exponent bits and 2 mantissa bits, up to 57344.
NATIVE: by the GPU's own instruction (NVIDIA, from sm_89 on); else by integer arithmetic on the bits of a float32, with
the same result.
Source: Micikevicius et al., FP8 formats for deep learning, 2022 (arXiv:2209.05433).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encoded(v, NATIVE: tl.constexpr):
    """The codes (uint8) nearest to float32 values, ties to even; 448's beyond 448; 0x7f for NaN."""
    if NATIVE:
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Drops 20 mantissa bits, and lowers the exponent's bias by 120.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # The last bit of 2^14 is 2^-9.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)  # below 2^-6 codes are evenly spaced
        code = (tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.constexpr_function
def _four(FORMAT):
    signs = " ".join(f"copysign.f32 v{n}, ${n + 5}, ${n + 1};" for n in range(4))
    pairs = " ".join(f"cvt.rn.satfinite.{FORMAT}x2.f32 {to}, v{n + 1}, v{n};" for n, to in ((0, "low"), (2, "high")))
    return f"{{ .reg .f32 v<4>; .reg .b16 low, high; {signs} {pairs} mov.b32 $0, {{low, high}}; }}"


@triton.jit
def encoded_in_fours(v, sign, FORMAT: tl.constexpr):
    """As `encoded` on NVIDIA GPUs from sm_89 on, for "e4m3" or "e5m2", where a thread has a multiple of four numbers:
    their codes come in one register. sign: whose signs the codes have."""
    kinds: tl.constexpr = "=r,f,f,f,f,f,f,f,f"
    return tl.inline_asm_elementwise(_four(FORMAT), kinds, [v, sign], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def decoded(code, NATIVE: tl.constexpr):
    """The float32 values of codes (uint8)."""
    if NATIVE:
        v = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.uint32)
        v = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        v = tl.where((bits & 0x7F) == 0x7F, float("nan"), v)
    return v


@triton.jit
def encoded_e5m2(v):
    """The codes (uint8) nearest to float32 values, ties to even; 57344's beyond 57344; 0x7f for NaN."""
    bits = v.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Drops 21 mantissa bits, and lowers the exponent's bias by 112.
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - 448
    # The last bit of 2^7 is 2^-16.
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
    code = tl.minimum(tl.where(size < 0x38800000, small, normal), 0x7B)  # below 2^-14 codes are evenly spaced
    return (tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def halves(code, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """The float16 values of codes (uint8), exact in both formats."""
    if E5M2:
        v = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        v = decoded(code, NATIVE).to(tl.float16)
    return v
