"""What the Gluon chains of a gate per head or none share: places, rings of tiles, and a chunk's decays."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ridgeline.ops.recurrent.hopper.delta_chains import coordinates
from ridgeline.tiles.hopper import barrier

C = gl.constexpr(64)  # rows of a chunk
HALF = gl.constexpr(64)  # columns of a warpgroup
WIDE = gl.constexpr(128)  # columns of a tensor
SUMS = gl.constexpr(0)  # rows of a chunk's decays: sums of its gates, times log2(e)
SINCE = gl.constexpr(1)  # e^sums since the chunk began
UNTIL = gl.constexpr(2)  # until it ends
WHOLE = gl.constexpr(3)  # of the whole chunk, in each row


class Place(NamedTuple):
    """A program's sequence and head."""

    n: Any
    h: Any
    start: Any  # the sequence's first token
    tokens: Any
    kept: Any  # its first chunk's number among all heads'
    count: Any  # its chunks


@gluon.jit
def place_of(scan):
    pair = gl.program_id(0)
    n, h = pair // scan.heads, pair % scan.heads
    start, tokens, kept = 0 * n, 0 * n + scan.tokens, pair.to(gl.int64) * scan.room
    if scan.ends is not None:
        start = gl.load(scan.ends + n)
        tokens = gl.load(scan.ends + n + 1) - start
        kept = h.to(gl.int64) * scan.room + start // C + n
    return Place(n, h, start, tokens, kept, (tokens + C - 1) // C)


@gluon.jit
def at(scan, place, head, chunk, column):
    """The coordinates of a chunk's rows in a tensor map."""
    return coordinates(scan.ends, place.n, place.start, place.tokens, head, chunk * C, column)


@gluon.jit
def put(data, scan, place, chunk, ME: gl.constexpr, found):
    """Writes half of a chunk's columns to a contiguous (B, T, value heads, WIDE)."""
    LAYOUT: gl.constexpr = found.type.layout
    row = chunk * C + gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None]
    column = ME * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    token = (place.start + row).to(gl.int64)
    if scan.ends is None:
        token += place.n.to(gl.int64) * scan.tokens
    gl.store(data + ((token * scan.heads + place.h) * WIDE + column), found, mask=row < place.tokens)


@gluon.jit
def ring(source, COUNT: gl.constexpr):
    return gl.allocate_shared_memory(source.dtype, [COUNT] + source.block_type.shape, source.layout)


@gluon.jit
def numbers(COUNT: gl.constexpr):
    """Room for the decays of COUNT chunks."""
    return gl.allocate_shared_memory(gl.float32, [COUNT * 4, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _numbers_at(decays, stage, row: gl.constexpr):
    return decays.index(stage * 4 + row)


@gluon.jit
def of_rows(decays, stage, row: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each row of a tile of that layout."""
    return decays.index(stage * 4 + row).load(gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def of_columns(decays, stage, row: gl.constexpr, LAYOUT: gl.constexpr):
    return decays.index(stage * 4 + row).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _gates(at, there):
    """Gates times log2(e), whose decay is 0 from -160 on: sums that had come to -inf would have no differences."""
    found = gl.load(at, mask=there, other=0.0).to(gl.float32) * 1.4426950408889634
    return gl.where(found < -160.0, -160.0, found)


@gluon.jit
def fill_decays(scan, decays, ready, free, REVERSE: gl.constexpr):
    """The warp that sums gates. All decays are e^ of sums, never of differences of sums."""
    STAGES: gl.constexpr = ready.type.shape[0]
    place = place_of(scan)
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    row = gl.arange(0, C, LAYOUT)
    base = scan.gate + (place.h // scan.gate_group).to(gl.int64) * scan.gate_head
    if scan.ends is None:
        base += place.n.to(gl.int64) * scan.gate_batch
    base += place.start.to(gl.int64) * scan.gate_token
    for t in range(place.count):
        stage, odd = t % STAGES, (t // STAGES) & 1
        chunk = t
        if REVERSE:
            chunk = place.count - 1 - t
        token = chunk * C + row
        spots = base + token.to(gl.int64) * scan.gate_token
        own = _gates(spots, token < place.tokens)
        next = _gates(spots + scan.gate_token, (row < C - 1) & (token + 1 < place.tokens))
        sums = gl.associative_scan(own, 0, _add)
        later = gl.associative_scan(next, 0, _add, reverse=True)
        whole = gl.zeros([C], gl.float32, LAYOUT) + gl.exp2(gl.sum(own, 0))
        mbarrier.wait(free.index(stage), odd ^ 1)
        _numbers_at(decays, stage, SUMS).store(sums)
        _numbers_at(decays, stage, SINCE).store(gl.exp2(sums))
        _numbers_at(decays, stage, UNTIL).store(gl.exp2(later))
        _numbers_at(decays, stage, WHOLE).store(whole)
        barrier()
        mbarrier.arrive(ready.index(stage), count=1)
