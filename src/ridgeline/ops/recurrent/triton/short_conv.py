"""Kernels of the short causal convolution: a program walks through a piece of a sequence, a few channels to a thread.

    z_t = bias + sum over j < WIDTH of w_j x_{t-WIDTH+1+j}          y = z or silu(z)

The last inputs stay in registers, so each input is read once, and so is each incoming gradient in backward, which keeps
the unfinished gradients of the last inputs there too. STEP rows are loaded before the first of them is used, so that
their loads are in flight together.

Instructions bound backward as much as bytes do. So a row's address is that of the row before it plus a step, rows are
counted from the piece's first in 32 bits, and half precision takes its sigmoid in four instructions.

A piece is what a sequence has between two multiples of `length` tokens, so that no piece crosses a sequence's edge.
With packed sequences, those of sequence n have the numbers from start_n // length + n on; some numbers stay unused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ridgeline.tiles.activations import quick_sigmoid, silu, silu_slope

LONGEST = tl.constexpr(1 << 30)


class Line(NamedTuple):
    """A tensor (B, T, C) whose channels are contiguous, with its steps."""

    data: Any
    batch: Any
    token: Any


class Filters(NamedTuple):
    """weight (C, WIDTH) with its steps, and bias or None."""

    weight: Any
    channel: Any
    tap: Any
    bias: Any


class Windows(NamedTuple):
    """States (sequences, C, WIDTH), contiguous, or None: of inputs before the first token, and after the last one."""

    first: Any
    last: Any


class Pieces(NamedTuple):
    ends: Any  # cu_seqlens or None
    tokens: Any  # of each sequence without cu_seqlens
    sequences: Any
    length: Any  # tokens of a piece
    count: Any  # all pieces, unused numbers too


class Sums(NamedTuple):
    """For each program a part of the gradients of the weight and the bias, (programs, WIDTH + 1, C), or None."""

    parts: Any


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    WIDTH: int
    SILU: bool
    BC: int
    STEP: int
    ROUNDS: int  # halvings that find one of the sequences
    SINGLE: bool  # float32 data
    QUICK: bool  # half precision on an NVIDIA GPU


@triton.jit
def _piece(pieces, number, shape: tl.constexpr):
    """A piece's sequence, the tokens between which that lies, and its own."""
    if pieces.ends is None:
        each = tl.maximum(tl.cdiv(pieces.tokens, pieces.length), 1)
        n = number // each
        begin, end = tl.cast(0, tl.int64), tl.cast(pieces.tokens, tl.int64)
        first = (number % each).to(tl.int64) * pieces.length
    else:
        low, high = tl.cast(0, tl.int32), tl.cast(pieces.sequences, tl.int32)
        for _ in range(shape.ROUNDS):  # the last sequence whose first piece is not after this one
            middle = (low + high) // 2
            before = tl.load(pieces.ends + middle) // pieces.length + middle <= number
            go = before & (middle < pieces.sequences)
            low, high = tl.where(go, middle, low), tl.where(go, high, middle)
        n = low
        begin, end = tl.load(pieces.ends + n).to(tl.int64), tl.load(pieces.ends + n + 1).to(tl.int64)
        block = begin // pieces.length + (number - begin // pieces.length - n)
        first = tl.maximum(begin, block * pieces.length)
    last = tl.minimum(end, (first // pieces.length + 1) * pieces.length)
    return n, begin, end, first, tl.maximum(first, last)


@triton.jit
def _before(line, place, windows, n, t, begin, channels, here, C, shape: tl.constexpr):
    """The inputs of the WIDTH - 1 tokens before t, in float32: from the state before the sequence's first."""
    WIDTH: tl.constexpr = shape.WIDTH
    past = ()
    for back in tl.static_range(WIDTH - 1, 0, -1):
        at = t - back
        row = tl.load(place + at * line.token + channels, mask=here & (at >= begin), other=0.0).to(tl.float32)
        if windows.first is not None:
            spot = (n.to(tl.int64) * C + channels) * WIDTH + WIDTH + (at - begin)
            row += tl.load(windows.first + spot, mask=here & (at < begin), other=0.0).to(tl.float32)
        past = past + (row,)
    return past


@triton.jit
def _rows(at, step, r, count, here, shape: tl.constexpr):
    """STEP rows, the first at the pointers `at` and number r of `count`, zeros beyond; and the pointers behind them."""
    STEP: tl.constexpr = shape.STEP
    rows = ()
    for i in tl.static_range(STEP):
        rows = rows + (tl.load(at, mask=here & (r + i < count), other=0.0),)
        at += step
    return rows, at


@triton.jit
def _slope(z, shape: tl.constexpr):
    """The derivative of silu at z."""
    if shape.QUICK:
        p = quick_sigmoid(z)
        slope = p + z * p * (1 - p)
    else:
        kind: tl.constexpr = tl.float32 if shape.SINGLE else tl.bfloat16
        slope = silu_slope(z, kind)[1]
    return slope


@triton.jit
def _filters(filters, channels, here, shape: tl.constexpr):
    BC: tl.constexpr = shape.BC
    WIDTH: tl.constexpr = shape.WIDTH
    taps = ()
    for j in tl.static_range(WIDTH):
        tap = tl.load(filters.weight + channels.to(tl.int64) * filters.channel + j * filters.tap, mask=here, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    bias = tl.zeros([BC], tl.float32)
    if filters.bias is not None:
        bias += tl.load(filters.bias + channels, mask=here, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def _last_window(windows, line, place, n, begin, end, channels, here, C, shape: tl.constexpr):
    """Writes the state after a sequence: its last WIDTH inputs, after those of the state before it."""
    WIDTH: tl.constexpr = shape.WIDTH
    final = ()
    for back in tl.static_range(WIDTH, 0, -1):
        at = end - back
        row = tl.load(place + at * line.token + channels, mask=here & (at >= begin), other=0.0)
        if windows.first is not None:
            spot = (n.to(tl.int64) * C + channels) * WIDTH + WIDTH + (at - begin)
            old = tl.load(windows.first + spot, mask=here & (at < begin), other=0.0)
            row = tl.where(at < begin, old.to(row.dtype), row)
        final = final + (row,)
    tl.debug_barrier()  # the state may be written over the one that was read
    for j in tl.static_range(WIDTH):
        tl.store(windows.last + (n.to(tl.int64) * C + channels) * WIDTH + j, final[j], mask=here)


@triton.jit
def conv_forward(y, x, filters, windows, pieces, C, shape: tl.constexpr):
    BC: tl.constexpr = shape.BC
    WIDTH: tl.constexpr = shape.WIDTH
    STEP: tl.constexpr = shape.STEP
    blocks = tl.cdiv(C, BC)
    number = tl.program_id(0) // blocks
    channels = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    here = channels < C
    n, begin, end, first, last = _piece(pieces, number, shape)
    place, to = x.data, y.data
    if pieces.ends is None:
        place += n.to(tl.int64) * x.batch
        to += n.to(tl.int64) * y.batch
    taps, bias = _filters(filters, channels, here, shape)
    past = _before(x, place, windows, n, first, begin, channels, here, C, shape)
    kind: tl.constexpr = tl.float32 if shape.SINGLE else tl.bfloat16
    count = (last - first).to(tl.int32)
    at, to = place + first * x.token + channels, to + first * y.token + channels
    for r in range(0, count, STEP):
        rows, at = _rows(at, x.token, r, count, here, shape)
        for i in tl.static_range(STEP):
            past = past + (rows[i].to(tl.float32),)
            z = bias
            for j in tl.static_range(WIDTH):
                z += taps[j] * past[j]
            if shape.SILU:
                z = z * quick_sigmoid(z) if shape.QUICK else silu(z, kind)
            tl.store(to, z.to(rows[i].dtype), mask=here & (r + i < count))
            to += y.token
            past = past[1:]
    if windows.last is not None:  # noqa: SIM102
        if (last == end) & ((first < last) | (begin == end)):
            _last_window(windows, x, place, n, begin, end, channels, here, C, shape)


@triton.jit
def _settle(dx, dwindow, to, incoming, value, r, piece, channels, here, C, shape: tl.constexpr):
    """Writes, at the pointers `to`, the finished gradient of a piece's input number r, which may be one of the inputs
    before it: in the piece before, which writes it itself, or in the state before the sequence."""
    n, begin, end, first, last = piece
    if incoming is not None:
        at = first + r
        spot = (n.to(tl.int64) * C + channels) * shape.WIDTH + shape.WIDTH + (at - end)
        late = tl.load(incoming + spot, mask=here & (at >= end - shape.WIDTH) & (at < end), other=0.0)
        value += late.to(tl.float32)
    mine = (r >= 0) & (r < (last - first).to(tl.int32))
    tl.store(to, value.to(dx.data.dtype.element_ty), mask=here & mine)
    if dwindow is not None:
        spot = (n.to(tl.int64) * C + channels) * shape.WIDTH + shape.WIDTH + (first + r - begin)
        tl.store(dwindow + spot, value.to(dwindow.dtype.element_ty), mask=here & (r < 0) & (first == begin))


@triton.jit
def conv_backward(dx, sums, dy, x, filters, windows, dwindows, pieces, C, shape: tl.constexpr):
    """A few channels of pieces i, i + n, i + 2n, ... of all. dwindows: the states' gradients, written and given."""
    BC: tl.constexpr = shape.BC
    WIDTH: tl.constexpr = shape.WIDTH
    STEP: tl.constexpr = shape.STEP
    blocks = tl.cdiv(C, BC)
    own = tl.program_id(0) // blocks
    channels = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    here = channels < C
    taps, bias = _filters(filters, channels, here, shape)
    zero = tl.zeros([BC], tl.float32)
    totals = ()
    for _ in tl.static_range(WIDTH + 1):
        totals = totals + (zero,)
    for number in range(own, pieces.count, tl.num_programs(0) // blocks):
        n, begin, end, first, last = _piece(pieces, number, shape)
        piece = n, begin, end, first, last
        place, slope, to = x.data, dy.data, dx.data
        if pieces.ends is None:
            place += n.to(tl.int64) * x.batch
            slope += n.to(tl.int64) * dy.batch
            to += n.to(tl.int64) * dx.batch
        past = _before(x, place, windows, n, first, begin, channels, here, C, shape)
        pending = ()  # unfinished gradients of the last WIDTH - 1 inputs
        for _ in tl.static_range(WIDTH - 1):
            pending = pending + (zero,)
        count, seen = (last - first).to(tl.int32), tl.minimum(end - first, LONGEST).to(tl.int32)
        at, slope = place + first * x.token + channels, slope + first * dy.token + channels
        to += (first - (WIDTH - 1)) * dx.token + channels
        for r in range(0, count + WIDTH - 1, STEP):
            rows, at = _rows(at, x.token, r, seen, here, shape)
            slopes, slope = _rows(slope, dy.token, r, seen, here, shape)
            for i in tl.static_range(STEP):
                past = past + (rows[i].to(tl.float32),)
                dz = slopes[i].to(tl.float32)
                if shape.SILU:
                    z = bias
                    for j in tl.static_range(WIDTH):
                        z += taps[j] * past[j]
                    dz = tl.where(r + i < seen, dz * _slope(z, shape), 0.0)
                pending = pending + (zero,)
                later = ()
                for j in tl.static_range(WIDTH):
                    later = later + (pending[j] + taps[j] * dz,)
                done = later[0]  # type: ignore[misc]
                _settle(
                    dx, dwindows.first, to, dwindows.last, done, r + i - (WIDTH - 1), piece, channels, here, C, shape
                )
                to += dx.token
                pending = later[1:]
                if sums.parts is not None:
                    dz = tl.where(r + i < count, dz, 0.0)
                    more = ()
                    for j in tl.static_range(WIDTH):
                        more = more + (totals[j] + dz * past[j],)
                    totals = more + (totals[WIDTH] + dz,)
                past = past[1:]
        if dwindows.first is not None:  # noqa: SIM102
            if first == begin:  # its oldest input is seen by no token, and is kept only where no token follows
                spot = (n.to(tl.int64) * C + channels) * WIDTH
                value = zero
                if dwindows.last is not None:
                    value += tl.load(dwindows.last + spot, mask=here & (begin == end), other=0.0).to(tl.float32)
                tl.store(dwindows.first + spot, value.to(dwindows.first.dtype.element_ty), mask=here)
    if sums.parts is not None:
        for j in tl.static_range(WIDTH + 1):
            spot = (own.to(tl.int64) * (WIDTH + 1) + j) * C
            tl.store(sums.parts + spot + channels, totals[j], mask=here)


@triton.jit
def conv_sums(dweight, dbias, parts, programs, C, WIDTH: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """Adds up what programs left of the gradients of one tap, or of the bias, for BC channels."""
    if PDL:
        gdc_wait()
    blocks = tl.cdiv(C, BC)
    j = tl.program_id(0) // blocks
    channels = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    here = channels < C
    total = tl.zeros([BP, BC], tl.float32)
    for first in range(0, programs, BP):
        part = first + tl.arange(0, BP)
        at = (part.to(tl.int64) * (WIDTH + 1) + j) * C
        total += tl.load(parts + at[:, None] + channels[None, :], mask=(part < programs)[:, None] & here, other=0.0)
    found = tl.sum(total, 0)
    if j < WIDTH:
        tl.store(dweight + channels * WIDTH + j, found.to(dweight.dtype.element_ty), mask=here)
    elif dbias is not None:
        tl.store(dbias + channels, found.to(dbias.dtype.element_ty), mask=here)
