"""OCP's mxfp4: numbers of 4 bits (e2m1) in blocks of 32 that share a power of two (e8m0), as floating-point numbers.

A number has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A code c of a block's scale
stands for 2^(c - 127); 255 is NaN. Both are exact in bfloat16 and float32, and so is their product.
Source: Rouhani et al., Microscaling data formats for deep learning, 2023 (arXiv:2310.10537).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 32  # numbers that share a scale


def _quarters(kind: str, up: int, mask: str, power: str) -> tl.constexpr:
    """Assembly: two words' four numbers. Exponent and mantissa move `up` bits, to where a 16-bit number has the last
    bits of its exponent and the first of its mantissa, and the sign moves to the top. That number times `power` is the
    code's value."""
    lines = []
    for place in range(4):
        shift = up - 4 * place
        lines.append(f"{'shl.b32' if shift >= 0 else 'shr.u32'} size, $4, {abs(shift)};")
        lines.append(f"and.b32 size, size, {mask};")
        lines.append(f"shl.b32 sign, $4, {12 - 4 * place};")
        lines.append(f"lop3.b32 ${place}, sign, 0x80008000, size, 0xea;")
    lines += [f"fma.rn.{kind} ${place}, ${place}, power, zero;" for place in range(4)]
    first = [".reg .b32 size, sign, power, zero;", f"mov.b32 power, {power};", "mov.b32 zero, 0x80008000;"]
    return tl.constexpr("\n".join(["{", *first, *lines, "}"]))


QUARTERS_BF16 = _quarters("bf16x2", 6, "0x01c001c0", "0x7e807e80")  # 2^126
QUARTERS_F16 = _quarters("f16x2", 9, "0x0e000e00", "0x74007400")  # 2^14


@triton.jit
def number(code, TO: tl.constexpr):
    """The values of codes of 4 bits."""
    exponent, mantissa = ((code >> 1) & 3).to(tl.int32), (code & 1).to(tl.int32)
    twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    size = twice.to(tl.float32) * 0.5
    return tl.where((code & 8) != 0, -size, size).to(TO)


@triton.jit
def quarters(raw, TO: tl.constexpr, PACKED: tl.constexpr):
    """The four numbers of 16-bit words, lowest first, in a floating dtype.

    PACKED: the GPU has packed arithmetic (NVIDIA, from sm_80 on), for 16-bit dtypes."""
    if PACKED and TO == tl.bfloat16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            QUARTERS_BF16,
            "=&r,=&r,=&r,=&r,r",
            [raw],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif PACKED and TO == tl.float16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            QUARTERS_F16,
            "=&r,=&r,=&r,=&r,r",
            [raw],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        w0, w1 = number(raw & 15, TO), number((raw >> 4) & 15, TO)
        w2, w3 = number((raw >> 8) & 15, TO), number((raw >> 12) & 15, TO)
    return w0, w1, w2, w3


@triton.jit
def power(code, TO: tl.constexpr):
    """2^(code - 127) of scales' codes (uint8) in a floating dtype; NaN for 255."""
    bits = tl.where(code == 0, 0x00400000, code.to(tl.int32) << 23)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True).to(TO)


def weight(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers (N, K) of codes (N, K / 2) and scales (N, K / 32), both uint8, by the formula."""
    sizes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=q.device)
    numbers = torch.cat((sizes, -sizes))[torch.stack((q & 15, q >> 4), -1).flatten(1).long()]
    powers = torch.ldexp(torch.ones(scale.shape, device=q.device), scale.int() - 127).where(scale != 255, float("nan"))
    return (numbers.unflatten(1, (-1, BLOCK)) * powers[:, :, None]).flatten(1).to(dtype)
