"""Weights of 4 or 8 bits on the matrix units: what the kernels of dense products and of experts share.

Codes are integers, or mxfp4's floating-point numbers in blocks of 32 with powers of two as scales. They become numbers
of x's dtype in registers, exactly, and are the left operand. The float32 sum over a group is multiplied by the group's
scale; mxfp4's scales multiply the numbers first, which is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.tiles import float4
from ridgeline.tiles.float4 import power
from ridgeline.tiles.integers import halves, quarters

Maybe = torch.Tensor | None


class Weight(NamedTuple):
    """q: (N, K / 2) uint8 or (N, K) int8. scale, zero: (N, K / group), or (N,) without groups; zero None is 8 or 0.
    A scale of uint8 is a power of two, and the codes are mxfp4's."""

    q: Any
    scale: Any
    zero: Any


class Rules(NamedTuple):
    """What the compiler knows."""

    KIND: Any  # "int4", "int8" or "mxfp4"
    PACKED: Any  # the GPU has the instructions of `quarters`
    EVEN: Any  # steps divide K
    PRECISION: Any
    PDL: Any
    GROUP: Any  # columns that share a scale; a multiple of a step


@triton.jit
def scales_of(weight, n, k, end, K, RULES: tl.constexpr):
    """The scales and zeros of rows n in the group of column k; past the end of this part any."""
    at = n.to(tl.int64) * (K // RULES.GROUP) + k // RULES.GROUP
    scale = tl.load(weight.scale + at, mask=(n >= 0) & (k < end), other=0)
    scale = power(scale, tl.float32) if RULES.KIND == "mxfp4" else scale.to(tl.float32)
    if weight.zero is None:
        zero = tl.full(n.shape, 8, tl.int32)
    else:
        zero = tl.load(weight.zero + at, mask=(n >= 0) & (k < end), other=0).to(tl.int32)
    return scale, zero


@triton.jit
def dot4(raw, rows, zero, RULES: tl.constexpr):
    """A tile of 4-bit codes minus their zeros, four to a word, times a tile of x."""
    TO: tl.constexpr = tl.float16 if RULES.KIND == "w4a8" else rows.dtype
    if RULES.KIND == "mxfp4":
        w = float4.quarters(raw, TO, RULES.PACKED)
    else:
        w = quarters(raw, tl.broadcast_to(zero[:, None], raw.shape), TO, RULES.PACKED)
    if RULES.KIND == "w4a8":  # whole numbers up to 16 are exact in e4m3
        w = (w[0].to(rows.dtype), w[1].to(rows.dtype), w[2].to(rows.dtype), w[3].to(rows.dtype))
    return _four(w, rows, RULES)


@triton.jit
def dot_scaled(raw, rows, scale, RULES: tl.constexpr):
    """A tile of mxfp4's codes, four to a word, with their blocks' scales (uint8), times a tile of x."""
    eighths: tl.constexpr = raw.shape[1] // scale.shape[1]  # words of a block
    by = tl.broadcast_to(power(scale, rows.dtype)[:, :, None], (raw.shape[0], scale.shape[1], eighths))
    by = tl.reshape(by, raw.shape)
    w0, w1, w2, w3 = float4.quarters(raw, rows.dtype, RULES.PACKED)
    return _four((w0 * by, w1 * by, w2 * by, w3 * by), rows, RULES)


@triton.jit
def _four(w, rows, RULES: tl.constexpr):
    """Four tiles, with every fourth column of the weight each, times a tile of x."""
    BM: tl.constexpr = rows.shape[0]
    WORDS: tl.constexpr = w[0].shape[1]
    if WORDS < 16 or WORDS * rows.dtype.primitive_bitwidth < 256:  # the least columns of a product
        whole = tl.reshape(tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3])), (w[0].shape[0], 4 * WORDS))
        total = tl.dot(whole, tl.trans(rows), input_precision=RULES.PRECISION)
    else:
        even, odd = tl.split(tl.reshape(rows, (BM, WORDS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        if rows.dtype == tl.float32:  # short sums, each by itself: one long sum in order would round too often
            one = tl.dot(w[0], tl.trans(x0), input_precision=RULES.PRECISION)
            one += tl.dot(w[1], tl.trans(x1), input_precision=RULES.PRECISION)
            other = tl.dot(w[2], tl.trans(x2), input_precision=RULES.PRECISION)
            other += tl.dot(w[3], tl.trans(x3), input_precision=RULES.PRECISION)
            return one + other
        total = tl.dot(w[0], tl.trans(x0), input_precision=RULES.PRECISION)
        total = tl.dot(w[1], tl.trans(x1), total, input_precision=RULES.PRECISION)
        total = tl.dot(w[2], tl.trans(x2), total, input_precision=RULES.PRECISION)
        total = tl.dot(w[3], tl.trans(x3), total, input_precision=RULES.PRECISION)
    return total


@triton.jit
def dot8(raw, rows, total, RULES: tl.constexpr):
    """A tile of 8-bit codes, two to a word, times a tile of x, added to the total."""
    even, odd = tl.split(tl.reshape(rows, (rows.shape[0], raw.shape[1], 2)))
    low, high = halves(raw, rows.dtype, RULES.PACKED)
    if rows.dtype == tl.float32:
        part = tl.dot(low, tl.trans(even), input_precision=RULES.PRECISION)
        return total + (part + tl.dot(high, tl.trans(odd), input_precision=RULES.PRECISION))
    total = tl.dot(low, tl.trans(even), total, input_precision=RULES.PRECISION)
    return tl.dot(high, tl.trans(odd), total, input_precision=RULES.PRECISION)


@triton.jit
def words_of(K, RULES: tl.constexpr):
    """The 16-bit words of a row of K codes. Rows of 4-bit codes have whole blocks of 32: the compiler shall know it."""
    return K // 2 if RULES.KIND == "int8" else K // 32 * 8


@triton.jit
def powers_of(weight, row, k, K, BK: tl.constexpr, RULES: tl.constexpr):
    """The codes of mxfp4's scales of these rows, in BK columns from k on."""
    block = k // RULES.GROUP + tl.arange(0, BK // RULES.GROUP)[None, :]
    at = weight.scale + row[:, None].to(tl.int64) * (K // RULES.GROUP) + block
    return tl.load(at, mask=block < K // RULES.GROUP, other=0)


@triton.jit
def step(total, weight, at_q, row, rows, k, scale, zero, K, RULES: tl.constexpr):
    """Adds to total the product of a step's codes, from column k on, with a tile of x: (rows of W, rows of x).

    at_q: where the rows' words begin. scale, zero: of these rows, if a row of a step has one scale; else mxfp4's scales
    of the step, or None, to be read here."""
    BK: tl.constexpr = rows.shape[1]
    each: tl.constexpr = 2 if RULES.KIND == "int8" else 4  # codes of a word of 16 bits
    word = k // each + tl.arange(0, BK // each)[None, :]
    if RULES.EVEN:
        raw = tl.load(at_q + word).to(tl.uint16, bitcast=True)
    else:
        raw = tl.load(at_q + word, mask=word < words_of(K, RULES), other=0).to(tl.uint16, bitcast=True)
    if RULES.KIND != "int8" and BK <= RULES.GROUP:
        total += dot4(raw, rows, zero, RULES) * scale[:, None]
    elif RULES.KIND == "mxfp4":
        if scale is None:
            scale = powers_of(weight, row, k, K, BK, RULES)
        total += dot_scaled(raw, rows, scale, RULES)
    else:
        total = dot8(raw, rows, total, RULES)
    return total


@triton.jit
def unpack(w, weight, N, K, KIND: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """w (N, K) = the weight, scaled in float32 and rounded once."""
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None]
    per: tl.constexpr = 1 if KIND == "int8" else 2  # codes in a byte
    width: tl.constexpr = BK // per
    byte = tl.program_id(1) * width + tl.arange(0, width)[None, :]
    inside = (n < N) & (byte < K // per)
    place = n * (K // GROUP) + byte * per // GROUP
    scale = tl.load(weight.scale + place, mask=inside, other=0)
    code = tl.load(weight.q + n * (K // per) + byte, mask=inside, other=0).to(tl.int32)
    if KIND == "int8":
        v = code.to(tl.float32) * scale.to(tl.float32)
    else:
        if KIND == "mxfp4":
            by = power(scale, tl.float32)
            low, high = float4.number(code & 15, tl.float32) * by, float4.number((code >> 4) & 15, tl.float32) * by
        else:
            by = scale.to(tl.float32)
            zero = tl.full((BN, width), 8, tl.int32)
            if weight.zero is not None:
                zero = tl.load(weight.zero + place, mask=inside, other=0).to(tl.int32)
            low, high = ((code & 15) - zero).to(tl.float32) * by, (((code >> 4) & 15) - zero).to(tl.float32) * by
        v = tl.reshape(tl.join(low, high), (BN, BK))
    column = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]
    tl.store(w + n * K + column, v.to(w.dtype.element_ty), mask=(n < N) & (column < K))


def kind_of(q: torch.Tensor, scale: torch.Tensor) -> str:
    """Returns what a weight's codes are, by the dtypes of codes and scales: "int8", "int4" or "mxfp4"."""
    return "int8" if q.dtype == torch.int8 else "mxfp4" if scale.dtype == torch.uint8 else "int4"


def group_of(q: torch.Tensor, scale: torch.Tensor) -> int:
    """Returns the columns of a weight that share a scale: K / groups, or K."""
    K = q.shape[1] * (2 if q.dtype == torch.uint8 else 1)
    return max(1, K // max(1, scale.shape[1] if scale.dim() == 2 else 1))


def step_of(group: int) -> int:
    """Returns the largest power of two up to 128 that divides a group: the columns of a step."""
    return min(128, group & -group)


def plain(q: torch.Tensor, scale: torch.Tensor, zero: Maybe, dtype: torch.dtype, g_idx: Maybe = None) -> torch.Tensor:
    """Returns the weight (N, K) in a dtype, rounded once, by PyTorch's own operations."""
    if kind_of(q, scale) == "mxfp4":
        return float4.weight(q, scale, dtype)
    wide = torch.promote_types(scale.dtype, torch.float32)
    codes, K = q, q.shape[1] * (2 if q.dtype == torch.uint8 else 1)
    if q.dtype == torch.uint8:
        codes = torch.stack((q & 15, q >> 4), -1).flatten(1)
    scale = scale.reshape(q.shape[0], -1)
    group = torch.arange(K, device=q.device) // group_of(q, scale) if g_idx is None else g_idx.long()
    away: Any = (8 if q.dtype == torch.uint8 else 0) if zero is None else zero.to(wide)[:, group]
    return ((codes.to(wide) - away) * scale.to(wide)[:, group]).to(dtype)


def words(q: torch.Tensor) -> torch.Tensor:
    """Returns codes as kernels read them: contiguous, from an even address on."""
    return q.clone(memory_format=torch.contiguous_format) if q.storage_offset() % 2 else q.contiguous()
