"""Online softmax: the maximum and the sum of exponentials of a stream, kept together in one pass.

Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

import triton
import triton.language as tl


@triton.jit
def exp(x, dtype: tl.constexpr):
    """exp of a float32 by the GPU's exp2, for data of that dtype.

    For float32 data log2 e has two parts: one rounded constant would bias sums of many terms.
    """
    if dtype == tl.float32:
        return tl.exp2(x * 1.4426950216293335 + x * 1.9259629911266174e-8)
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def exact_exp(x, dtype: tl.constexpr):
    """exp for x <= 0, for sums of terms with different bases.

    On an H100 exp2 of an exponent that is not near 0 is 5e-8 too small on average. So for float32 data it takes the
    exponent's fraction, within 1/2, where the error is 5e-9, times 2**k.
    """
    if dtype == tl.float32:
        x = tl.where(x < -200.0, -200.0, x)  # -inf has no fraction; a NaN stays
        k = tl.floor(x * 1.4426950216293335 + 0.5)
        return tl.exp2(tl.fma(x, 1.4426950216293335, -k) + x * 1.9259629911266174e-8) * tl.exp2(k)
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def rounded_exp(x):
    """exp for float32 x <= 0, to an ulp. Equal arguments share exp2's error, up to two ulps, so many of them show it.

    2**a with |a| <= 1/2 is 1 plus a times a polynomial, fitted by least squares to the relative error."""
    x = tl.where(x < -200.0, -200.0, x)
    k = tl.floor(x * 1.4426950216293335 + 0.5)
    a = tl.fma(x, 1.4426950216293335, -k) + x * 1.9259629911266174e-8
    p = tl.fma(tl.fma(a, 0.000153707049, 0.00133998482), a, 0.00961837359)
    p = tl.fma(tl.fma(tl.fma(p, a, 0.0555032901), a, 0.240226477), a, 0.693147182)
    return tl.fma(p, a, 1.0) * tl.exp2(k)


@triton.jit
def exp_below(x, columns: tl.constexpr, dtype: tl.constexpr):
    """exp of the differences from a row's maximum, for a row that one pass holds.

    The largest term, exp(0) = 1, is exact. In a short row the other terms' bias would stand out against it; in a long
    row nearly all terms share the bias.
    """
    if columns <= 512:
        return exact_exp(x, dtype)
    return exp(x, dtype)


@triton.jit
def log(x):
    """The natural logarithm of a positive normal float32, to about an ulp; the GPU's own is off by up to 2**-22 of it.

    x = m 2**k with m in [1/sqrt 2, sqrt 2), and log m = 2 artanh s, s = (m - 1) / (m + 1), by its series. A NaN stays
    NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    tail = 2.0 * s * q * (((q * 0.11111111 + 0.14285714) * q + 0.2) * q + 0.33333333)
    return k.to(tl.float32) * 0.69314718 + (2.0 * s + tail) + (x - x)


@triton.jit
def divide(e, total, dtype: tl.constexpr):
    """e / total for a result of that dtype.

    A float32 result is rounded like a division: the rounding of a reciprocal alone would bias a whole row.
    """
    r = 1.0 / total
    q = e * r
    if dtype == tl.float32:
        q = tl.fma(tl.fma(-q, total, e), r, q)
    return q.to(dtype)


@triton.jit
def update(top, total, values, dtype: tl.constexpr):
    """Updates the running maximum and the running sum of exp(value - maximum) with float32 `values`, elementwise."""
    new = tl.maximum(top, values)
    base = tl.where(new == float("-inf"), 0.0, new)  # all -inf so far: exponentials are 0, not exp(-inf + inf)
    return new, total * exact_exp(top - base, dtype) + exact_exp(values - base, dtype)


@triton.jit
def merge(top, total, dtype: tl.constexpr):
    """The maximum and the sum over all streams; if all are -inf, the sum is NaN."""
    most = tl.max(top, 0)
    return most, tl.sum(total * exact_exp(top - most, dtype), 0)
