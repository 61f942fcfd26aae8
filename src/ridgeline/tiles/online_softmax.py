"""Online softmax: the maximum and the sum of exponentials of a stream, kept together in one pass.

Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """exp of float32 by the chip's exp2. log2 e, rounded to one float32, would bias sums of many terms; it is given in two parts,
    the second large enough to count whether or not the compiler fuses the sum."""
    return tl.exp2(x * 1.4423828125 + x * 0.000312228388963387)


@triton.jit
def divide(e, total, dtype: tl.constexpr):
    """e / total for a result of that dtype. A float32 is rounded as a division is: a reciprocal's rounding alone would put
    one bias on a whole row."""
    r = 1.0 / total
    q = e * r
    if dtype == tl.float32:
        q = tl.fma(tl.fma(-q, total, e), r, q)
    return q.to(dtype)


@triton.jit
def update(top, total, values):
    """Takes float32 `values` into the running maximum and the running sum of exp(value - maximum), element by element."""
    new = tl.maximum(top, values)
    base = tl.where(new == float("-inf"), 0.0, new)  # only -inf so far: every exponential is 0, not exp(-inf + inf)
    return new, total * exp(top - base) + exp(values - base)


@triton.jit
def merge(top, total):
    """The maximum and the sum of all elements' streams; a stream of nothing but -inf makes the sum NaN."""
    most = tl.max(top, 0)
    return most, tl.sum(total * exp(top - most), 0)
