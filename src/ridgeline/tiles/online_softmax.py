"""Online softmax: the maximum and the sum of exponentials of a stream, kept together in one pass.

Milakov and Gimelshein, Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).
"""

import triton
import triton.language as tl


@triton.jit
def update(top, total, values):
    """Takes float32 `values` into the running maximum and the running sum of exp(value - maximum), element by element."""
    new = tl.maximum(top, values)
    base = tl.where(new == float("-inf"), 0.0, new)  # only -inf so far: every exponential is 0, not exp(-inf + inf)
    return new, total * tl.exp(top - base) + tl.exp(values - base)


@triton.jit
def merge(top, total):
    """The maximum and the sum of all elements' streams; a stream of nothing but -inf makes the sum NaN."""
    most = tl.max(top, 0)
    return most, tl.sum(total * tl.exp(top - most), 0)
