"""The end of a tile of queries in attention's Hopper forward: o and lse leave the registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ridgeline.ops.attention.hopper.pipeline import ROWS
from ridgeline.ops.attention.hopper.products import Sums, store_sums
from ridgeline.tiles.hopper import store
from ridgeline.tiles.warpgroup import rescale


@gluon.jit
def add_sink(row_sum, row_max, sink):
    """Lets a head's sink join rows' sums. Returns the new sums and maxima, and what sums of values are rescaled by."""
    sink = sink.to(gl.float32) * 1.4426950408889634
    new = gl.maximum(row_max, sink)
    rescale = gl.exp2(row_max - new)
    return row_sum * rescale + gl.exp2(sink - new), new, rescale


@gluon.jit
def first_row(tile, scheduler):
    """Returns the number of the first row of a tile's head, or packed sequence, over all heads; 64 bits."""
    if scheduler.PACKED:
        first = tile.head.to(gl.int64) * scheduler.rows + tile.start
    else:
        first = (tile.start * scheduler.heads + tile.head).to(gl.int64) * scheduler.rows
    return first


@gluon.jit
def store_lse(lse, sinks, row_max, row_sum, row, tile, scheduler):
    """Stores the rows' lse, -inf for rows that see no key or sink, and returns the divisors of their sums of values."""
    rows: gl.constexpr = row_max.type.layout
    divisor = gl.convert_layout(gl.sum(row_sum, 1), rows)
    if sinks is not None:
        divisor, row_max, rescale = add_sink(divisor, row_max, gl.load(sinks + tile.head))
    some = divisor != 0.0
    divisor = gl.where(some, divisor, 1.0)
    i = row + gl.arange(0, ROWS, rows)
    sums = gl.where(some, (row_max + gl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    gl.store(lse + first_row(tile, scheduler) + i, sums, mask=i < tile.length)
    if sinks is not None:
        divisor = divisor / rescale  # infinite if the sink is all that counts
    return divisor


@gluon.jit
def store_output(acc, divisor, ring, n, row, tile, out, scheduler):
    """Stores o = acc / divisor through the place of the n-th tile of q, and releases it. Returns o.

    With FLOAT, the true D, o leaves the registers in float32 for a contiguous tensor."""
    where = ring.tile(n)  # q's place, now free
    main = rescale(acc.main, 1.0 / divisor)
    D: gl.constexpr = main.shape[1]
    FLOAT: gl.constexpr = scheduler.RULES.FLOAT
    if len(acc.rest) > 0:
        rest = rescale(acc.rest[0], 1.0 / divisor)
        others = (rest,)
        if not FLOAT:
            where.slice(0, D, 1).store(main.to(out.dtype))
            where.slice(D, rest.shape[1], 1).store(rest.to(out.dtype))
    else:
        others = ()
        if not FLOAT:
            where.store(main.to(out.dtype))
    sums = Sums(main, others)
    if FLOAT:
        store_sums(out + (first_row(tile, scheduler) + row) * FLOAT, sums, tile.length - row, FLOAT)
    else:
        fence_async_shared()
        at = scheduler.coordinates(tile.head, row, tile.start, tile.length)
        store(out, at, ring.tiles.index(n % ring.SIZE))
        tma.store_wait(0)
    ring.release(n)
    return sums
