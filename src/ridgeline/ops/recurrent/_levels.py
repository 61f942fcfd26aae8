"""Gates per channel within a chunk, in half precision: halves of halves, with one decay for both sides.

At level l rows of a right block of 2^l rows see the rows of the left block beside it. With M the running sum of the
gates at the left block's last row, one factor serves both: e^-|G - M|. So a tile of rows, q in right blocks and k in
left ones, times the symmetric matrix of their pairs gives dq in right blocks and dk in left ones.
A gate's gradient sums the pairs on its two sides. At each level one side is the rows of a block after or before the
gate, so the terms of these sums do not cancel. Differences of running sums round in float32, far below half precision.
The loops over levels stay loops: unrolled, the masks of all levels would be kept in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def right_rows(level, C: tl.constexpr):
    return (((tl.arange(0, C) >> level) & 1) == 1)[:, None]


@triton.jit
def joined(level, C: tl.constexpr):
    """Pairs of a row in a block of 2^level rows and one in the block that it is joined with."""
    return ((tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]) >> level) == 1


@triton.jit
def edge_decay(since, G, level, C: tl.constexpr, W: tl.constexpr):
    """Of rows with the sum `since` in right blocks the decay since the edge between the blocks, of left ones until it.
    G: the running sums of the gates, as `since` times log2(e)."""
    row = tl.arange(0, C)
    edge = (((row >> level) | 1) << level) - 1
    M = tl.gather(G, tl.broadcast_to(edge[:, None], (C, W)), 0)
    return tl.exp2(-tl.abs(since - M))


@triton.jit
def crossings(level, C: tl.constexpr, SHIFT: tl.constexpr):
    """Ones for the rows whose pairs at a level lie on both sides of a gate: after it in a right block (with SHIFT not
    itself), before it in a left one."""
    t, r = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    right = ((t >> level) & 1) == 1
    after = r > t if SHIFT else r >= t
    return (((t ^ r) >> level) == 0) & ((right & after) | ((right == 0) & (r < t)))


@triton.jit
def chosen_sums(chosen, x, like):
    """The sums of the chosen rows of x, in bfloat16's range."""
    if like.dtype == tl.bfloat16:
        found = tl.dot(chosen.to(tl.bfloat16), x.to(tl.bfloat16))
    else:
        found = tl.dot(chosen.to(tl.float32), x, input_precision="tf32")
    return found
