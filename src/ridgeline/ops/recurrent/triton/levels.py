"""Gates per channel within a chunk, in half precision: halves of halves, with one decay for both sides.

At level l rows of a right block of 2^l rows see the rows of the left block beside it. With M the running sum of the
gates at the left block's last row, one factor serves both: e^-|G - M|. So a tile of rows, q in right blocks and k in
left ones, times the symmetric matrix of their pairs gives dq in right blocks and dk in left ones.
A program writes a chunk's running sums to memory of its own, and reads them back from the nearest cache: an edge's sum
is an address there, and in registers it would be another thread's. Differences of running sums round in float32, far
below half precision.
A gate's gradient sums the pairs on its two sides. At each level one side is the rows of a block after or before the
gate, so the terms of these sums do not cancel.
The loops over levels stay loops: unrolled, the masks of all levels would be kept in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.recurrent.triton.scan import tile_at, to_tf32


@triton.jit
def keep_sums(place, gate, from_g, first, tokens, K: tl.constexpr, BS: tl.constexpr, C: tl.constexpr):
    """Writes the running sums of a chunk's gates, times log2(e), to `place`, (C, K) in float32.

    The sums are products with a matrix of zeros and ones. float16 holds the gates: in one part, or in two if they are
    wider."""
    row = tl.arange(0, C)
    summed = tl.where(row[:, None] >= row[None, :], 1.0, 0.0).to(tl.float16)
    for part in range((K + BS - 1) // BS):
        depth = part * BS + tl.arange(0, BS)
        g = tile_at(from_g, gate.token, first + row, depth, tokens, K)
        high, low = split_gates(g)
        G = tl.dot(summed, high)
        if g.dtype.primitive_bitwidth > 16:
            G = tl.dot(summed, low, G)
        tl.store(place + row[:, None] * K + depth[None, :], G * 1.4426950408889634, mask=(depth < K)[None, :])
    tl.debug_barrier()


@triton.jit
def _sums_at(place, row, depth, K: tl.constexpr):
    return tl.load(place + row[:, None] * K + depth[None, :], mask=(depth < K)[None, :], other=0.0)


@triton.jit
def whole_sums(place, depth, K: tl.constexpr, C: tl.constexpr):
    """The sums of all gates of a chunk, times log2(e)."""
    return tl.load(place + (C - 1) * K + depth, mask=depth < K, other=0.0)


@triton.jit
def decay_since(place, depth, K: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr):
    """Of each row the decay since the chunk began; with SHIFT without the row's own gate."""
    row = tl.arange(0, C)
    if SHIFT:
        G = tl.where((row > 0)[:, None], _sums_at(place, tl.maximum(row - 1, 0), depth, K), 0.0)
    else:
        G = _sums_at(place, row, depth, K)
    return tl.exp2(G)


@triton.jit
def decay_until(place, depth, K: tl.constexpr, C: tl.constexpr):
    """Of each row the decay until the chunk ends."""
    return tl.exp2(whole_sums(place, depth, K, C)[None, :] - _sums_at(place, tl.arange(0, C), depth, K))


@triton.jit
def growth(place, depth, K: tl.constexpr, C: tl.constexpr):
    """Of each row the inverse of the decay since the chunk began."""
    return tl.exp2(-_sums_at(place, tl.arange(0, C), depth, K))


@triton.jit
def edge_decay(place, depth, level, K: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr):
    """Of rows in right blocks the decay since the edge between the blocks (with SHIFT without the row's own gate), of
    left ones until it."""
    row = tl.arange(0, C)
    right = ((row >> level) & 1) == 1
    edge = (((row >> level) | 1) << level) - 1
    later = tl.where(right, row - 1 if SHIFT else row, edge)
    earlier = tl.where(right, edge, row)
    return tl.exp2(_sums_at(place, later, depth, K) - _sums_at(place, earlier, depth, K))


@triton.jit
def right_rows(level, C: tl.constexpr):
    return (((tl.arange(0, C) >> level) & 1) == 1)[:, None]


@triton.jit
def joined(level, C: tl.constexpr):
    """Pairs of a row in a block of 2^level rows and one in the block that it is joined with."""
    return ((tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]) >> level) == 1


@triton.jit
def crossings(level, C: tl.constexpr, SHIFT: tl.constexpr):
    """Ones for the rows whose pairs at a level lie on both sides of a gate: after it in a right block (with SHIFT not
    itself), before it in a left one."""
    t, r = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    found = (((t ^ r) >> level) == 0) & ((r < t) != (((t >> level) & 1) == 1))
    if SHIFT:
        found = found & (t != r)
    return found


@triton.jit
def write_masks(masks, C: tl.constexpr, LEVELS: tl.constexpr, SHIFT: tl.constexpr):
    """Zeros and ones that products take from memory, which costs less than to compare rows again and again. Of a level
    the gates between a row and its edge, and the pairs that it joins. After all levels the gates since the chunk began
    and those until it ends, with the pairs of later and of earlier rows; and the signs with which the later rows' pairs
    and the earlier rows' count for a gate, in the chunk's two halves."""
    level = tl.program_id(0)
    t, r = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]  # a gate, or a row of a pair; a row
    at = t * C + r
    if level < LEVELS:
        between, pairs = crossings(level, C, SHIFT), joined(level, C)
    elif level == LEVELS:
        between, pairs = t < r if SHIFT else t <= r, t > r
    else:
        between, pairs = t > r, t < r
    chosen = tl.where(between, 1.0, 0.0)
    if level < LEVELS + 2:
        tl.store(masks.joined + level * (C * C) + at, tl.where(pairs, 1.0, 0.0))
        tl.store(masks.gates + level * (C * C) + r * C + t, chosen)
    elif level == LEVELS + 2:
        before, after = t >= r if SHIFT else t > r, t < r if SHIFT else t <= r
        chosen = tl.where(t < C // 2, tl.where(before, -1.0, 0.0), tl.where(after, 1.0, 0.0))
    else:
        chosen = tl.where(t < C // 2, tl.where(t > r, 1.0, 0.0), tl.where(t <= r, -1.0, 0.0))
    tl.store(masks.crossings + level * (C * C) + at, chosen)


@triton.jit
def mask_at(masks, level, C: tl.constexpr):
    return tl.load(masks + level * (C * C) + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def split_gates(g):
    """Gates as one float16 tile, or where they are wider as two that add up to them."""
    wide = g.to(tl.float32)
    wide = tl.where(wide < -104.0, -104.0, wide)  # where e^g is 0 already; a NaN stays
    high = wide.to(tl.float16)
    return high, (wide - high.to(tl.float32)).to(tl.float16)


@triton.jit
def halvings(gates, place, high, low, WIDE: tl.constexpr, C: tl.constexpr):
    """Of each row the sum of the gates that a mask chooses, times log2(e), where products leave their sums."""
    chosen = mask_at(gates, place, C)
    found = tl.dot(chosen, high)
    if WIDE:
        found = tl.dot(chosen, low, found)
    return found * 1.4426950408889634


@triton.jit
def masked_decay(masks, level, high, low, WIDE: tl.constexpr, C: tl.constexpr):
    """Of each row e to the sum of the gates that a mask chooses, where products leave their sums."""
    return tl.exp2(halvings(masks.gates, level, high, low, WIDE, C))


@triton.jit
def add_chosen(found, masks, place, x, C: tl.constexpr):
    """Adds the sums of the rows of x that a mask chooses, in bfloat16's range."""
    return add_sums(found, mask_at(masks, place, C), x)


@triton.jit
def add_sums(found, chosen, x):
    """The same with a mask that has been loaded."""
    if chosen.dtype == tl.bfloat16:
        found = tl.dot(chosen, x.to(tl.bfloat16), found)
    else:
        found = tl.dot(chosen, to_tf32(x), found, input_precision="tf32")
    return found


@triton.jit
def add_whole(found, masks, place, x, C: tl.constexpr):
    """The same in float32's precision, or for float16 data in tf32's: what cancels is summed so."""
    return add_whole_sums(found, mask_at(masks, place, C), x)


@triton.jit
def add_whole_sums(found, chosen, x):
    """The same with a mask that has been loaded."""
    if chosen.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        found = tl.dot(chosen, (x - high.to(tl.float32)).to(tl.bfloat16), tl.dot(chosen, high, found))
    else:
        found = tl.dot(chosen, to_tf32(x), found, input_precision="tf32")
    return found


@triton.jit
def chosen_sums(chosen, x, like):
    """The sums of the chosen rows of x, in bfloat16's range."""
    if like.dtype == tl.bfloat16:
        found = tl.dot(chosen.to(tl.bfloat16), x.to(tl.bfloat16))
    else:
        found = tl.dot(chosen.to(tl.float32), to_tf32(x), input_precision="tf32")
    return found
