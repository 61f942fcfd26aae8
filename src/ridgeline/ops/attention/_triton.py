"""The implementation `triton` of attention: kernels for any GPU, for equally long and for packed sequences.

A program takes a tile of queries and walks the keys that they see. It keeps a running maximum and sum per row, in base
2, and rescales its sums when the maximum grows. Blocks of keys that every row of the tile sees in full come in a loop
without comparisons; those at the diagonal, at a window's edge or at the ragged end have loops of their own. Backward
takes two passes and no atomics: a tile of keys walks the queries for dK and dV, then a tile of queries walks the keys
for dQ. Both recompute the probabilities from lse. Tiles are numbered so that the heads of a section share the L2 cache,
the heaviest tiles first.
"""

from __future__ import annotations

from ctypes import c_float
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.op import dtype_name
from ridgeline.tiles.activations import capped
from ridgeline.tiles.online_softmax import exact_exp, log

LOG2E = 1.4426950408889634
UNBOUNDED = 1 << 30
LOOSE = ("rows", "columns", "heads", "batch", "section", "left", "right")  # not worth specialised kernels


@triton.jit
def _count(length, batch, cu, SIZE: tl.constexpr):
    """Returns the tiles per head; for packed sequences an upper bound."""
    return tl.cdiv(length, SIZE) if cu is None else length // SIZE + batch + 1


@triton.jit
def _turn(item, tiles, heads, section, REVERSED: tl.constexpr):
    """Returns which tile of which head an item is: all tiles of a section of heads come before the next section's."""
    whole = section * tiles
    first = item // whole * section
    within = item % whole
    size = min(heads - first, section)
    tile = within // size
    return tiles - 1 - tile if REVERSED else tile, first + within % size


@triton.jit
def _sequence(tile, cu, other_cu, tokens, others, batch, SIZE: tl.constexpr):
    """For packed sequences: returns a tile's number in its sequence, and the sequence's begin and length on both sides.

    A sequence's tiles are numbered from cu // SIZE + its own number on, which leaves enough room, so bisection finds
    the sequence. Tokens after the last sequence count as one more, which sees nothing. Whatever cu holds, results are
    within bounds.
    """
    mine, high = 0, batch
    while mine < high:
        middle = (mine + high + 1) // 2
        beyond = tl.load(cu + middle) // SIZE + middle > tile
        mine = tl.where(beyond, mine, middle)
        high = tl.where(beyond, middle - 1, high)
    begin = tl.minimum(tl.maximum(tl.load(cu + mine), 0), tokens)
    tile = tl.maximum(tile - begin // SIZE - mine, 0)
    known = mine < batch
    end = tl.minimum(tl.maximum(tl.load(cu + mine + 1, mask=known, other=tokens), begin), tokens)
    begins = tl.minimum(tl.maximum(tl.load(other_cu + mine, mask=known, other=0), 0), others)
    ends = tl.minimum(tl.maximum(tl.load(other_cu + mine + 1, mask=known, other=0), begins), others)
    return tile, begin, end - begin, begins, ends - begins


@triton.jit
def _span(
    first, last, end, back, ahead, BACK: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr
):
    """Returns the blocks of positions p < end with x - back <= p <= x + ahead for some x in first..last.

    They are (low, full, edge, high): where the blocks begin, the range that all x see in full, and where they end.
    """
    low, full = 0, 0
    high, edge = end, end // BLOCK * BLOCK
    if BACK:
        low = tl.maximum(first - back, 0) // BLOCK * BLOCK
        full = (tl.maximum(last - back, 0) + BLOCK - 1) // BLOCK * BLOCK
    if AHEAD:
        high = tl.minimum(end, last + ahead + 1)
        edge = tl.minimum(edge, tl.maximum(first + ahead + 1, 0) // BLOCK * BLOCK)
    if MASK:  # any block may be masked
        full = low
        edge = low
    return low, full, edge, high


@triton.jit
def _tile(x, row, step, d, limit, D: tl.constexpr, UNIT: tl.constexpr, ALL: tl.constexpr):
    """Loads rows of a head; 0 from row `limit` on (unless ALL are below it), and from dimension D on."""
    at = x + row[:, None] * (step * UNIT) + d[None, :]
    EVEN: tl.constexpr = d.shape[0] <= D
    if ALL and EVEN:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=d[None, :] < D, other=0.0)
    if EVEN:
        return tl.load(at, mask=row[:, None] < limit, other=0.0)
    return tl.load(at, mask=(row[:, None] < limit) & (d[None, :] < D), other=0.0)


@triton.jit
def _tiles(x, row, step, d, e, limit, D: tl.constexpr, UNIT: tl.constexpr, ALL: tl.constexpr):
    """Loads rows of a head in two parts, dimensions d and then e; without e the first is returned twice."""
    first = _tile(x, row, step, d, limit, D, UNIT, ALL)
    return first, first if e is None else _tile(x + d.shape[0], row, step, e, limit, D - d.shape[0], UNIT, ALL)


@triton.jit
def _save(x, first, second, row, step, d, e, limit, D: tl.constexpr, UNIT: tl.constexpr):
    at = x + row[:, None] * (step * UNIT)
    tl.store(at + d[None, :], first.to(x.dtype.element_ty), mask=(row[:, None] < limit) & (d[None, :] < D))
    if e is not None:
        mask = (row[:, None] < limit) & (e[None, :] < D - d.shape[0])
        tl.store(at + d.shape[0] + e[None, :], second.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _scores(a, a2, b, b2, e, PRECISION: tl.constexpr):
    """Returns a b^T, over both parts of the dimensions."""
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return s if e is None else tl.dot(a2, tl.trans(b2), s, input_precision=PRECISION)


@triton.jit
def _add(acc, acc2, p, x, x2, e, PRECISION: tl.constexpr):
    """Returns acc + p x, in both parts."""
    acc = _sum(acc, p, x, PRECISION)
    return acc, acc2 if e is None else _sum(acc2, p, x2, PRECISION)


@triton.jit
def _sum(acc, p, x, PRECISION: tl.constexpr):
    """Returns acc + p x. In full float32 a block is summed apart: one chain over all blocks would round more."""
    if x.dtype == tl.float32 and PRECISION == "ieee":
        # fma, since the compiler turns a plain addition into one chain.
        acc = tl.fma(tl.dot(p, x, input_precision=PRECISION), 1.0, acc)
    else:
        acc = tl.dot(p.to(x.dtype), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _zeros(ROWS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    return tl.zeros((ROWS, BD), tl.float32), tl.zeros((ROWS, BE if BE else 1), tl.float32)


@triton.jit
def _head(x, steps, batch, head, row, UNIT: tl.constexpr):
    """Returns the address of a row of a head."""
    return (
        x
        + (tl.cast(batch, tl.int64) * steps[0] + tl.cast(head, tl.int64) * steps[1] + tl.cast(row, tl.int64) * steps[2])
        * UNIT
    )


@triton.jit
def _scaled(x, scale, factor, APART: tl.constexpr):
    """Returns x times the scale. With APART, factor is its rounding error, which would bias all scores alike."""
    return tl.fma(x, scale, x * factor) if APART else x * scale


@triton.jit
def _score(
    s, i, j, rows, columns, mask, mask_steps, scale, factor, cap, back, ahead, MASKED: tl.constexpr, BACK: tl.constexpr,
    AHEAD: tl.constexpr, CAP: tl.constexpr, APART: tl.constexpr
):  # fmt: skip
    """Returns the scores of products s of queries i and keys j, -inf where a key is not seen, and the softcap's slope.

    With APART they are scaled and capped here; otherwise `_power` scales them.
    """
    slope = 1.0
    if CAP:
        s, slope = capped(_scaled(s, scale, factor, APART), cap, True)
    elif APART:
        s = _scaled(s, scale, factor, APART)
    if MASKED:
        seen = j < columns
        if BACK:
            seen = seen & (j >= i - back)
        if AHEAD:
            seen = seen & (j <= i + ahead)
        if mask is not None:
            bias = tl.load(
                mask + i.to(tl.int64) * mask_steps[2] + j.to(tl.int64) * mask_steps[3], mask=seen & (i < rows), other=0
            )
            if bias.dtype == tl.uint8:
                seen = seen & (bias != 0)
            else:
                s += bias.to(tl.float32)
        s = tl.where(seen, s, float("-inf"))
    return s, slope


@triton.jit
def _power(s, top, factor, APART: tl.constexpr, dtype: tl.constexpr):
    """Returns the exponentials of scores relative to `top`, which is scaled and in base 2 unless APART."""
    return exact_exp(s - top, dtype) if APART else tl.exp2(s * factor - top)


@triton.jit
def _absorb(
    acc, acc2, total, top, q, q2, k, v, start, i, n, d, e, rows, columns, k_step, v_step, mask, mask_steps, scale,
    factor, cap, back, ahead, MASKED: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr, CAP: tl.constexpr,
    APART: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds a block of keys and values to the running sums."""
    at = tl.cast(start, tl.int64) * UNIT
    keys, keys2 = _tiles(k + at * k_step, n, k_step, d, e, columns - start, D, UNIT, not MASKED)
    s = _scores(q, q2, keys, keys2, e, PRECISION)
    j = start + n[None, :]
    s, _ = _score(
        s,
        i[:, None],
        j,
        rows,
        columns,
        mask,
        mask_steps,
        scale,
        factor,
        cap,
        back,
        ahead,
        MASKED,
        BACK,
        AHEAD,
        CAP,
        APART,
    )
    most = tl.max(s, 1) if APART else tl.max(s, 1) * factor
    most = tl.maximum(top, most)
    base = tl.where(most == float("-inf"), 0.0, most) if MASKED else most  # a row that has seen no key yet
    p = _power(s, base[:, None], factor, APART, q.dtype)
    shrink = exact_exp(top - base, q.dtype) if APART else tl.exp2(top - base)
    values, values2 = _tiles(v + at * v_step, n, v_step, d, e, columns - start, D, UNIT, not MASKED)
    acc = acc * shrink[:, None]
    if e is not None:
        acc2 = acc2 * shrink[:, None]
    acc, acc2 = _add(acc, acc2, p, values, values2, e, PRECISION)
    return acc, acc2, total * shrink + tl.sum(p, 1), most


@triton.jit
def _end(top, total, APART: tl.constexpr):
    """Returns the final factor of rows' sums of values, and lse, -inf for rows that saw no key."""
    total = tl.where(total == 0, 1.0, total)
    return 1.0 / total, top + log(total) if APART else (top + tl.log2(total)) * 0.6931471805599453


@triton.jit(do_not_specialize=LOOSE)
def _fwd(
    o, lse, q, k, v, mask, cu_q, cu_k, o_steps, q_steps, k_steps, v_steps, mask_steps, rows, columns, heads, group,
    batch, section, scale, factor, cap, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM: tl.constexpr,
    CAP: tl.constexpr, APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    tile, turn = _turn(
        tl.program_id(0),
        _count(rows, batch, cu_q, BM),
        batch * heads if cu_q is None else heads,
        section,
        RIGHT and cu_q is None,
    )
    b, h = turn // heads, turn % heads
    lse += turn.to(tl.int64) * rows
    begin, begins = 0, 0
    if cu_q is not None:
        tile, begin, rows, begins, columns = _sequence(tile, cu_q, cu_k, rows, columns, batch, BM)
    m0 = tile * BM
    m, n, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE) if BE else None
    i = m0 + m
    q, q2 = _tiles(_head(q, q_steps, b, h, begin + m0, UNIT), m, q_steps[2], d, e, rows - m0, D, UNIT, False)
    k = _head(k, k_steps, b, h // group, begins, UNIT)
    v = _head(v, v_steps, b, h // group, begins, UNIT)
    if mask is not None:
        mask += b.to(tl.int64) * mask_steps[0] + h.to(tl.int64) * mask_steps[1]
    shift = columns - rows if BOTTOM else 0
    back, ahead = left - shift, right + shift
    low, full, edge, high = _span(
        m0, tl.minimum(m0 + BM, rows) - 1, columns, back, ahead, LEFT, RIGHT, BN, mask is not None
    )
    acc, acc2 = _zeros(BM, BD, BE)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    if LEFT:
        for start in range(low, tl.minimum(full, high), BN):
            acc, acc2, total, top = _absorb(
                acc,
                acc2,
                total,
                top,
                q,
                q2,
                k,
                v,
                start,
                i,
                n,
                d,
                e,
                rows,
                columns,
                k_steps[2],
                v_steps[2],
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                True,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    if mask is None:
        for start in range(full, edge, BN):
            acc, acc2, total, top = _absorb(
                acc,
                acc2,
                total,
                top,
                q,
                q2,
                k,
                v,
                start,
                i,
                n,
                d,
                e,
                rows,
                columns,
                k_steps[2],
                v_steps[2],
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                False,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    if TAIL:
        for start in range(tl.maximum(full, edge), high, BN):
            acc, acc2, total, top = _absorb(
                acc,
                acc2,
                total,
                top,
                q,
                q2,
                k,
                v,
                start,
                i,
                n,
                d,
                e,
                rows,
                columns,
                k_steps[2],
                v_steps[2],
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                True,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    share, top = _end(top, total, APART)
    share = share[:, None]
    _save(_head(o, o_steps, b, h, begin + m0, UNIT), acc * share, acc2 * share, m, o_steps[2], d, e, rows - m0, D, UNIT)
    tl.store(lse + begin + i, top, mask=i < rows)


@triton.jit
def _lies(m0, rows, cu, batch, BM: tl.constexpr):
    """Returns where the tile with numbers from m0 on begins, and how many rows follow.

    For packed sequences it is a tile of one sequence, numbered as in `_sequence`.
    """
    start, limit = m0, rows - m0
    if cu is not None:
        tile, begin, length, _, _ = _sequence(m0 // BM, cu, cu, rows, rows, batch, BM)
        start, limit = begin + tile * BM, length - tile * BM
    return start, limit


@triton.jit(do_not_specialize=(*LOOSE, "padded"))
def _delta(
    delta, power, o, do, dlse, lse, order, cu, o_steps, do_steps, rows, padded, heads, batch, APART: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Computes delta = rowsum(o do) - dlse, and lse in base 2 or, with APART, unchanged; sets `order` to 0.

    A row that sees no key, or is padding up to `padded`, gets an infinite lse, so that its probabilities are 0. With
    cu, tiles end with their packed sequence, and results are stored by tile number.
    """
    turn = tl.program_id(0) % heads[0]
    m0 = tl.program_id(0) // heads[0] * BM
    b, h = turn // heads[1], turn % heads[1]
    m, d, e = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE) if BE else None
    start, limit = _lies(m0, rows, cu, batch, BM)
    inside = m < limit
    one, one2 = _tiles(_head(o, o_steps, b, h, start, UNIT), m, o_steps[2], d, e, limit, D, UNIT, False)
    other, other2 = _tiles(_head(do, do_steps, b, h, start, UNIT), m, do_steps[2], d, e, limit, D, UNIT, False)
    products = tl.sum(one.to(tl.float32) * other.to(tl.float32), 1)
    if e is not None:
        products += tl.sum(one2.to(tl.float32) * other2.to(tl.float32), 1)
    if dlse is not None:
        products -= tl.load(dlse + turn.to(tl.int64) * rows + start + m, mask=inside, other=0.0)
    top = tl.load(lse + turn.to(tl.int64) * rows + start + m, mask=inside, other=float("-inf"))
    products = tl.where(top == float("-inf"), 0.0, products)  # whatever its dlse
    if not APART:
        top *= 1.4426950408889634
    at = turn.to(tl.int64) * padded + m0
    tl.store(delta + at + m, products, mask=m < padded - m0)
    tl.store(power + at + m, tl.where(top == float("-inf"), float("inf"), top), mask=m < padded - m0)
    if order is not None:
        tl.store(order + 1 + at // 64 + m // 64, 0, mask=m < padded - m0)
        tl.store(order, 0, mask=tl.program_id(0) == 0)


@triton.jit
def _add_keys(
    dk, dk2, dv, dv2, k, k2, v, v2, q, do, power, delta, t, first, blocks, whole, m, j, d, e, rows, columns, q_steps,
    do_steps, mask, mask_steps, scale, factor, cap, back, ahead, MASKED: tl.constexpr, BACK: tl.constexpr,
    AHEAD: tl.constexpr, CAP: tl.constexpr, APART: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Adds block t of queries to dK and dV; each head of the group has `blocks`, from row `first` on.

    Scores are transposed: keys down, queries across.
    """
    # The pipeliner computes the first addresses even of a loop that does not run.
    blocks = tl.maximum(blocks, 1)
    g = tl.cast(t // blocks, tl.int64)
    start = first + t % blocks * m.shape[0]
    i = start + m
    queries, queries2 = _tiles(
        _head(q, q_steps, 0, g, start, UNIT), m, q_steps[2], d, e, rows - start, D, UNIT, not MASKED
    )
    power += g * whole + start
    delta += g * whole + start
    if MASKED:
        top = tl.load(power + m, mask=i < rows, other=float("inf"))
        deltas = tl.load(delta + m, mask=i < rows, other=0.0)
    else:
        top = tl.load(power + m)
        deltas = tl.load(delta + m)
    if mask is not None:
        mask += g * mask_steps[1]
    s = _scores(k, k2, queries, queries2, e, PRECISION)
    s, slope = _score(
        s,
        i[None, :],
        j[:, None],
        rows,
        columns,
        mask,
        mask_steps,
        scale,
        factor,
        cap,
        back,
        ahead,
        MASKED,
        BACK,
        AHEAD,
        CAP,
        APART,
    )
    p = _power(s, top[None, :], factor, APART, k.dtype)
    slopes, slopes2 = _tiles(
        _head(do, do_steps, 0, g, start, UNIT), m, do_steps[2], d, e, rows - start, D, UNIT, not MASKED
    )
    dv, dv2 = _add(dv, dv2, p, slopes, slopes2, e, PRECISION)
    ds = p * (_scores(v, v2, slopes, slopes2, e, PRECISION) - deltas[None, :])
    if CAP:
        ds = ds * slope
    dk, dk2 = _add(dk, dk2, ds, queries, queries2, e, PRECISION)
    return dk, dk2, dv, dv2


@triton.jit(do_not_specialize=LOOSE)
def _bwd(
    dk, dv, q, k, v, do, power, delta, mask, cu_q, cu_k, dk_steps, dv_steps, q_steps, k_steps, v_steps, do_steps,
    mask_steps, rows, columns, heads, group, batch, section, scale, factor, cap, left, right, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BOTTOM: tl.constexpr, CAP: tl.constexpr, APART: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Computes dK and dV: a program per tile of keys, over all queries of its group's heads that see it."""
    tile, turn = _turn(
        tl.program_id(0), _count(columns, batch, cu_k, BN), batch * heads if cu_q is None else heads, section, False
    )
    b, h = turn // heads, turn % heads
    whole = rows
    begin, begins = 0, 0
    if cu_q is not None:
        tile, begins, columns, begin, rows = _sequence(tile, cu_k, cu_q, columns, rows, batch, BN)
    n0 = tile * BN
    m, n, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE) if BE else None
    j = n0 + n
    keys, keys2 = _tiles(_head(k, k_steps, b, h, begins + n0, UNIT), n, k_steps[2], d, e, columns - n0, D, UNIT, False)
    values, values2 = _tiles(
        _head(v, v_steps, b, h, begins + n0, UNIT), n, v_steps[2], d, e, columns - n0, D, UNIT, False
    )
    shift = columns - rows if BOTTOM else 0
    back, ahead = left - shift, right + shift
    low, full, edge, high = _span(
        n0, tl.minimum(n0 + BN, columns) - 1, rows, ahead, back, RIGHT, LEFT, BM, mask is not None
    )
    q = _head(q, q_steps, b, h * group, begin, UNIT)
    do = _head(do, do_steps, b, h * group, begin, UNIT)
    at = (b * heads + h).to(tl.int64) * group * whole + begin
    power += at
    delta += at
    if mask is not None:
        mask += b.to(tl.int64) * mask_steps[0] + (h * group).to(tl.int64) * mask_steps[1]
    dks, dks2 = _zeros(BN, BD, BE)
    dvs, dvs2 = _zeros(BN, BD, BE)
    if RIGHT:
        blocks = tl.cdiv(tl.maximum(tl.minimum(full, high) - low, 0), BM)
        for t in range(group * blocks):
            dks, dks2, dvs, dvs2 = _add_keys(
                dks,
                dks2,
                dvs,
                dvs2,
                keys,
                keys2,
                values,
                values2,
                q,
                do,
                power,
                delta,
                t,
                low,
                blocks,
                whole,
                m,
                j,
                d,
                e,
                rows,
                columns,
                q_steps,
                do_steps,
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                True,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    if mask is None:
        blocks = tl.maximum(edge - full, 0) // BM
        for t in range(group * blocks):
            dks, dks2, dvs, dvs2 = _add_keys(
                dks,
                dks2,
                dvs,
                dvs2,
                keys,
                keys2,
                values,
                values2,
                q,
                do,
                power,
                delta,
                t,
                full,
                blocks,
                whole,
                m,
                j,
                d,
                e,
                rows,
                columns,
                q_steps,
                do_steps,
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                False,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    if TAIL:
        last = tl.maximum(full, edge)
        blocks = tl.cdiv(tl.maximum(high - last, 0), BM)
        for t in range(group * blocks):
            dks, dks2, dvs, dvs2 = _add_keys(
                dks,
                dks2,
                dvs,
                dvs2,
                keys,
                keys2,
                values,
                values2,
                q,
                do,
                power,
                delta,
                t,
                last,
                blocks,
                whole,
                m,
                j,
                d,
                e,
                rows,
                columns,
                q_steps,
                do_steps,
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                True,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    dks, dks2 = _scaled(dks, scale, factor, APART), _scaled(dks2, scale, factor, APART)
    _save(_head(dk, dk_steps, b, h, begins + n0, UNIT), dks, dks2, n, dk_steps[2], d, e, columns - n0, D, UNIT)
    _save(_head(dv, dv_steps, b, h, begins + n0, UNIT), dvs, dvs2, n, dv_steps[2], d, e, columns - n0, D, UNIT)


@triton.jit
def _add_queries(
    dq, dq2, q, q2, do, do2, top, deltas, k, v, start, i, n, d, e, rows, columns, k_step, v_step, mask, mask_steps,
    scale, factor, cap, back, ahead, MASKED: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr, CAP: tl.constexpr,
    APART: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds a block of keys to dQ."""
    at = tl.cast(start, tl.int64) * UNIT
    keys, keys2 = _tiles(k + at * k_step, n, k_step, d, e, columns - start, D, UNIT, not MASKED)
    values, values2 = _tiles(v + at * v_step, n, v_step, d, e, columns - start, D, UNIT, not MASKED)
    s = _scores(q, q2, keys, keys2, e, PRECISION)
    j = start + n[None, :]
    s, slope = _score(
        s,
        i[:, None],
        j,
        rows,
        columns,
        mask,
        mask_steps,
        scale,
        factor,
        cap,
        back,
        ahead,
        MASKED,
        BACK,
        AHEAD,
        CAP,
        APART,
    )
    p = _power(s, top[:, None], factor, APART, q.dtype)
    ds = p * (_scores(do, do2, values, values2, e, PRECISION) - deltas[:, None])
    if CAP:
        ds = ds * slope
    return _add(dq, dq2, ds, keys, keys2, e, PRECISION)


@triton.jit(do_not_specialize=LOOSE)
def _bwd_dq(
    dq, q, k, v, do, power, delta, mask, cu_q, cu_k, dq_steps, q_steps, k_steps, v_steps, do_steps, mask_steps, rows,
    columns, heads, group, batch, section, scale, factor, cap, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BOTTOM: tl.constexpr, CAP: tl.constexpr, APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    tile, turn = _turn(
        tl.program_id(0),
        _count(rows, batch, cu_q, BM),
        batch * heads if cu_q is None else heads,
        section,
        RIGHT and cu_q is None,
    )
    b, h = turn // heads, turn % heads
    power += turn.to(tl.int64) * rows
    delta += turn.to(tl.int64) * rows
    begin, begins = 0, 0
    if cu_q is not None:
        tile, begin, rows, begins, columns = _sequence(tile, cu_q, cu_k, rows, columns, batch, BM)
    m0 = tile * BM
    m, n, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE) if BE else None
    i = m0 + m
    q, q2 = _tiles(_head(q, q_steps, b, h, begin + m0, UNIT), m, q_steps[2], d, e, rows - m0, D, UNIT, False)
    do, do2 = _tiles(_head(do, do_steps, b, h, begin + m0, UNIT), m, do_steps[2], d, e, rows - m0, D, UNIT, False)
    top = tl.load(power + begin + i, mask=i < rows, other=float("inf"))
    deltas = tl.load(delta + begin + i, mask=i < rows, other=0.0)
    k = _head(k, k_steps, b, h // group, begins, UNIT)
    v = _head(v, v_steps, b, h // group, begins, UNIT)
    if mask is not None:
        mask += b.to(tl.int64) * mask_steps[0] + h.to(tl.int64) * mask_steps[1]
    shift = columns - rows if BOTTOM else 0
    back, ahead = left - shift, right + shift
    low, full, edge, high = _span(
        m0, tl.minimum(m0 + BM, rows) - 1, columns, back, ahead, LEFT, RIGHT, BN, mask is not None
    )
    acc, acc2 = _zeros(BM, BD, BE)
    if LEFT:
        for start in range(low, tl.minimum(full, high), BN):
            acc, acc2 = _add_queries(
                acc,
                acc2,
                q,
                q2,
                do,
                do2,
                top,
                deltas,
                k,
                v,
                start,
                i,
                n,
                d,
                e,
                rows,
                columns,
                k_steps[2],
                v_steps[2],
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                True,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    if mask is None:
        for start in range(full, edge, BN):
            acc, acc2 = _add_queries(
                acc,
                acc2,
                q,
                q2,
                do,
                do2,
                top,
                deltas,
                k,
                v,
                start,
                i,
                n,
                d,
                e,
                rows,
                columns,
                k_steps[2],
                v_steps[2],
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                False,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    if TAIL:
        for start in range(tl.maximum(full, edge), high, BN):
            acc, acc2 = _add_queries(
                acc,
                acc2,
                q,
                q2,
                do,
                do2,
                top,
                deltas,
                k,
                v,
                start,
                i,
                n,
                d,
                e,
                rows,
                columns,
                k_steps[2],
                v_steps[2],
                mask,
                mask_steps,
                scale,
                factor,
                cap,
                back,
                ahead,
                True,
                LEFT,
                RIGHT,
                CAP,
                APART,
                D,
                UNIT,
                PRECISION,
            )
    acc, acc2 = _scaled(acc, scale, factor, APART), _scaled(acc2, scale, factor, APART)
    _save(_head(dq, dq_steps, b, h, begin + m0, UNIT), acc, acc2, m, dq_steps[2], d, e, rows - m0, D, UNIT)


def _steps(x: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides, 0 for dimensions of size 1."""
    return tuple([0 if size == 1 else step for size, step in zip(x.shape, x.stride())])


def _unit(tensors: tuple[torch.Tensor, ...]) -> int:
    """Returns 8 if rows begin at multiples of 8 elements, which lets the compiler move 16 bytes at a time, else 1."""
    return 1 if any([step % 8 for t in tensors for step in _steps(t)[:3]]) else 8


def _parts(D: int) -> tuple[int, int]:
    """Returns powers of two that hold D: one, or two if their sum is smaller (80 = 64 + 16)."""
    whole = max(16, 1 << (D - 1).bit_length())
    rest = max(16, 1 << (D - whole // 2 - 1).bit_length())
    return (whole // 2, rest) if 16 <= whole // 2 and whole // 2 + rest < whole else (whole, 0)


def _rule(
    gpu: device.Device, kernel: str, dtype: torch.dtype, precision: str, width: int, masked: bool
) -> tuning.Config:
    """Returns a kernel's tiles for heads of `width` dimensions: BM rows of queries, BN of keys.

    With a mask they are smaller, since its tiles, in float32 too, share shared memory with those of keys and values.
    """
    found = _half(gpu, kernel, width) if dtype != torch.float32 else _single(gpu, kernel, width, precision)
    if masked and kernel == "fwd" and dtype != torch.float32 and gpu.backend == "cuda":
        rows, columns, warps, stages = found
        found = (64, 32, warps, 2) if width > 128 else (rows, min(columns, 64), warps, min(stages, 2))
        found = (*found[:3], found[3] if _roomy(gpu) else 1)
    return dict(zip(("BM", "BN", "num_warps", "num_stages"), found))


def _roomy(gpu: device.Device) -> bool:
    """Whether a block can have the 227 KiB of shared memory that the tiles for sm_90 and sm_100 were chosen for."""
    return gpu.shared_memory >= 227 << 10


def _half(gpu: device.Device, kernel: str, width: int) -> tuple[int, int, int, int]:
    if gpu.backend == "cpu":  # the interpreter: few programs, with several blocks
        return 32, 16, 4, 1
    if gpu.backend == "hip":
        small = (64, 32, 4, 1) if width > 128 else (128, 64, 4, 1)
        return small if kernel == "fwd" else (32, 32, 4, 1) if width > 128 else (64, 64, 4, 1)
    if not _roomy(gpu):  # not timed: tiles without register spills, smaller ones on consumer cards (99 KiB)
        small = gpu.shared_memory < 128 << 10
        if kernel == "fwd":
            return (64, 32, 8, 2) if width > 128 else (64, 32 if small else 64, 4, 2) if width > 64 else (128, 64, 8, 2)
        if kernel == "bwd" and 64 < width < (129 if small else 128):
            return 32, 64, 8, 2
        return ((32, 32, 8, 2) if small and kernel == "bwd" else (32, 32, 4, 1)) if width > 128 else (64, 64, 8, 2)
    if kernel == "fwd" and gpu.capability >= 100:  # not timed either
        return (128, 32, 8, 2) if width > 128 else (128, 64, 8, 3) if width > 64 else (128, 64, 8, 2)
    if kernel == "fwd":
        return (128, 64, 8, 2) if width > 128 else (128, 128, 8, 3) if width > 64 else (128, 64, 8, 3)
    if kernel == "bwd":
        return (32, 64, 8, 2) if width > 128 else (32, 64, 4, 3) if width > 64 else (64, 64, 4, 3)
    return (64, 32, 8, 2) if width > 128 else (64, 64, 4, 2) if width > 64 else (64, 64, 4, 3)


def _single(gpu: device.Device, kernel: str, width: int, precision: str) -> tuple[int, int, int, int]:
    if gpu.backend == "cpu":
        return 32, 16, 4, 1
    if precision == "ieee" or gpu.backend == "hip":
        return (32, 16, 4, 1) if width > 128 else (32, 32, 4, 1)
    return (32, 32, 4, 1) if width > 128 else (64, 32, 4, 2) if kernel == "fwd" else (32, 32, 4, 2)


def _space() -> list[tuning.Config]:
    sizes = [
        (128, 128, 8),
        (128, 64, 8),
        (128, 64, 4),
        (64, 128, 8),
        (64, 128, 4),
        (64, 64, 4),
        (64, 32, 4),
        (32, 64, 4),
    ]
    return [
        {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}
        for bm, bn, warps in sizes
        for stages in (1, 2, 3, 4)
    ]


def _start(
    kernel: Any, name: str, given: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], tail: bool, q: torch.Tensor,
    k: torch.Tensor, mask: torch.Tensor | None, cu: torch.Tensor | None, options: tuple[Any, ...]
) -> None:  # fmt: skip
    """Starts a kernel with one program per tile of queries, or of keys if its name is "bwd".

    given: its pointers; tensors: those with strides; tail: whether its last blocks need comparisons whatever the sizes.
    """
    scale, softcap, left, right, bottom, precision = options
    (batch, heads, rows, D), columns, group = q.shape, k.shape[2], q.shape[1] // max(k.shape[1], 1)
    keys = name == "bwd"
    turns = k.shape[1] if keys else heads
    across, along = (columns, rows) if keys else (rows, columns)
    shared = 2 * along * D * q.element_size() * (group if keys else 1)  # bytes that all tiles of a head read
    gpu, unit, (width, rest) = device.of(q), _unit(tensors), _parts(D)
    section = max(1, min(batch * turns, gpu.l2 // 2 // max(shared, 1) * (1 if keys else group)))
    apart = _apart(q, mask, scale, softcap)
    packed, masked = cu is not None, mask is not None
    sequences = cu.numel() - 1 if cu is not None else batch

    def config() -> dict[str, Any]:
        words = [dtype_name(q), *([precision] if q.dtype == torch.float32 else []), str(width + rest)]
        key = " ".join([*words, *(["causal"] * (right < UNBOUNDED)), *(["mask"] * masked)])
        chosen = tuning.config(
            gpu, "attention", name, key, partial(_rule, gpu, name, q.dtype, precision, width + rest, masked), _space
        )
        ragged = packed or along % chosen["BM" if keys else "BN"] != 0
        return chosen | {"TAIL": tail or masked or ragged}

    def grid(c: dict[str, Any]) -> tuple[int]:
        size = c["BN" if keys else "BM"]
        tiles = across // size + sequences + 1 if packed else triton.cdiv(across, size)
        return (tiles * turns * (1 if packed else batch),)

    steps = [tuple(s // unit for s in _steps(t)[:3]) for t in tensors]
    hidden = None if mask is None else _steps(mask)
    factor = rounded_off(scale) if apart else scale * LOG2E
    numbers = rows, columns, turns, group, sequences, section, scale, factor, softcap, left, right
    flags = {"LEFT": left < UNBOUNDED, "RIGHT": right < UNBOUNDED, "BOTTOM": bottom, "CAP": softcap > 0, "APART": apart}
    flags |= {"D": D, "BD": width, "BE": rest, "UNIT": unit, "PRECISION": precision}
    launch(kernel, grid, *given, *steps, hidden, *numbers, config=config, key=(name, rows, columns), **flags)


def rounded_off(scale: float) -> float:
    """Returns what float32 rounds off the scale."""
    return scale - c_float(scale).value


def _apart(q: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float) -> bool:
    """Returns whether scores are scaled separately from the exponential.

    They are if a mask or softcap follows, or if folding the scale in would cost float32's last bits.
    """
    return mask is not None or softcap > 0 or scale <= 0 or q.dtype == torch.float32


def _masked(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Returns a view of the mask with the shape of all heads' scores."""
    if mask is None:
        return None
    return (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(*q.shape[:3], k.shape[2])


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, scale: float, softcap: float, left: int, right: int,
    bottom: bool, max_q: int, max_k: int, precision: str
) -> None:  # fmt: skip
    """Fills o and lse; see `attention_fwd` in _attention.py. max_q and max_k are not used."""
    cu_k = cu_q if cu_k is None else cu_k
    mask, options = _masked(mask, q, k), (scale, softcap, left, right, bottom, precision)
    _start(_fwd, "fwd", (o, lse, q, k, v, mask, cu_q, cu_k), (o, q, k, v), right < UNBOUNDED, q, k, mask, cu_q, options)


def _start_delta(
    delta: torch.Tensor, power: torch.Tensor, o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None,
    lse: torch.Tensor, order: torch.Tensor | None = None, cu: torch.Tensor | None = None, apart: bool = False
) -> None:  # fmt: skip
    """Fills delta and power, with at least the rows of each head; zeroes `order` (1 + one number per 64 rows) if given.

    With cu it goes by 64 rows of a packed sequence, numbered as in `_sequence`.
    """
    (batch, heads, rows, D), (width, rest) = o.shape, _parts(o.shape[-1])
    padded, unit, size = delta.numel() // max(batch * heads, 1), _unit((o, do)), max(16, 4096 // width)
    if cu is not None:
        size = 64
    steps, warps = [tuple(s // unit for s in _steps(t)[:3]) for t in (o, do)], 8 if size * width > 4096 else 4
    facts: dict[str, Any] = {"APART": apart, "D": D, "BD": width, "BE": rest, "UNIT": unit}
    facts |= {"BM": size, "num_warps": warps}
    numbers = rows, padded, (batch * heads, heads), None if cu is None else cu.numel() - 1
    given = delta, power, o, do, dlse, lse, order, cu, *steps, *numbers
    launch(_delta, (triton.cdiv(padded, size) * batch * heads,), *given, **facts)


def bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, scale: float, softcap: float, left: int, right: int,
    bottom: bool, max_q: int, max_k: int, precision: str, deterministic: bool
) -> None:  # fmt: skip
    """Fills dq, dk and dv; see `attention_bwd` in _attention.py. Always deterministic."""
    delta, power = torch.empty_like(lse), torch.empty_like(lse)
    _start_delta(delta, power, o, do, dlse, lse, apart=_apart(q, mask, scale, softcap))
    mask, options = _masked(mask, q, k), (scale, softcap, left, right, bottom, precision)
    cu_k = cu_q if cu_k is None else cu_k
    shared = q, k, v, do, power, delta, mask, cu_q, cu_k
    _start(_bwd, "bwd", (dk, dv, *shared), (dk, dv, q, k, v, do), left < UNBOUNDED, q, k, mask, cu_k, options)
    _start(_bwd_dq, "bwd_dq", (dq, *shared), (dq, q, k, v, do), right < UNBOUNDED, q, k, mask, cu_q, options)
