"""The first half of an expert on Hopper: `_gated` with weights by tensor descriptors, as in `_products_tma`.

One product of 2 x 128 columns makes gate and up, whose weights' rows come in one box: 256 neighbours where gate and up
take turns, 128 of each where they are halves. So x's tile is read once for both. Its rows are gathered by pointers, or
come by TMA where `_route.gather` has copied them. h and z leave by TMA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import launch
from ridgeline.cuda import TensorMap
from ridgeline.ops.experts import _gated, _route
from ridgeline.ops.experts._gated import unit
from ridgeline.ops.experts._products import Maybe, Rows, Sizes, find, last_tiles, power, source
from ridgeline.ops.experts._products_tma import FAR, rows_from, whole


@triton.jit
def _biases(bias, g, column, N, G, BN: tl.constexpr, MIXED: tl.constexpr):
    """The biases of a tile's 2 BN columns, in their order. Of columns past the last gate any, which are not stored."""
    c = tl.arange(0, 2 * BN)
    c = 2 * column + c if MIXED else column + c % BN + c // BN * N
    return tl.load(bias + g.to(tl.int64) * 2 * N + c, mask=(c < 2 * N) & (g < G), other=0.0).to(tl.float32)[None, :]


@triton.jit
def _keep(z, both, end, row, column, BM: tl.constexpr, BN: tl.constexpr, MIXED: tl.constexpr):
    """Stores a tile of z. Halves are two planes of z's map."""
    one, other = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
    at = FAR - end + row
    if MIXED:
        z.store([FAR, end, 0, at, 2 * column], one.to(z.dtype).reshape(1, 1, 1, BM, BN))
        z.store([FAR, end, 0, at, 2 * column + BN], other.to(z.dtype).reshape(1, 1, 1, BM, BN))
    else:
        z.store([FAR, end, 0, at, column], one.to(z.dtype).reshape(1, 1, 1, BM, BN))
        z.store([FAR, end, 1, at, column], other.to(z.dtype).reshape(1, 1, 1, BM, BN))


@triton.jit(do_not_specialize=["limit"])
def _fwd(
    x,
    lines,
    h,
    z,
    w,
    bias,
    ends,
    sizes,
    limit,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """lines: a ragged map of x's rows in their places, or None: they are gathered. h, z: ragged maps of the results, z
    or None. w: a map of the weights. OPTIONS: (power of the experts, weights' rows run along K, interleaved, oai)."""
    T, K, N, G = sizes
    BY_K: tl.constexpr = OPTIONS[1]
    MIXED: tl.constexpr = OPTIONS[2]
    across, steps = tl.cdiv(N, BN), tl.cdiv(K, BK)
    last = last_tiles(ends, G, T, BM, OPTIONS[0])
    mine = tl.cdiv(tl.max(last, 0) * across - tl.program_id(0), tl.num_programs(0))
    t, k = tl.program_id(0) - tl.num_programs(0), 0
    g, row, end, column = 0, 0, 0, 0
    rows, ks = tl.zeros((BM,), tl.int64), tl.arange(0, BK)
    both = tl.zeros((BM, 2 * BN), tl.float32)
    for _ in range(mine * steps):
        if k == 0:
            t += tl.num_programs(0)
            g, row, end, column = find(last, ends, t, across, sizes, BM, BN, GROUP)
            if lines is None:
                rows = source(x, tl.minimum(row + tl.arange(0, BM), end - 1))
        if lines is None:
            left = tl.load(x.data + rows[:, None] * x.row + (tl.multiple_of(k, BK) + ks)[None, :])
        else:
            left = rows_from(lines, tl.where(g < G, end, row), row, k)
        if MIXED and BY_K:
            both = tl.dot(left, w.load([g, 2 * column, k]).reshape(2 * BN, BK).T, both)
        elif MIXED:
            both = tl.dot(left, w.load([g, k, 2 * column]).reshape(BK, 2 * BN), both)
        else:
            both = tl.dot(left, w.load([g, 0, column, k]).reshape(2 * BN, BK).T, both)
        k += BK
        if k >= K:
            if bias is not None:
                both += _biases(bias, g, column, N, G, BN, MIXED)
            both = tl.where(g < G, both, 0.0)  # pairs of no expert
            if z is not None:
                _keep(z, both, end, row, column, BM, BN, MIXED)
            if MIXED:
                gate, up = both.reshape(BM, BN, 2).split()
            else:
                gate, up = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
            y, _by_gate, _by_up = unit(gate, up, limit, OPTIONS[3], h.dtype)
            h.store([FAR, end, 0, FAR - end + row, column], y.to(h.dtype).reshape(1, 1, 1, BM, BN))
            both = tl.zeros((BM, 2 * BN), tl.float32)
            k = 0


COPIED = 1536  # results a row from which copied rows are quicker than gathered ones
ungated = _gated.ungated
TILE: dict[str, Any] = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "num_warps": 8, "num_stages": 4}


def takes(x: torch.Tensor, w: torch.Tensor, interleaved: bool) -> bool:
    """Whether TMA can fetch the tiles of weights (E, 2 I, K): halves only where their rows run along K."""
    return whole(x) and x.shape[1] % 64 == 0 and (whole(w) or (interleaved and whole(w.mT)))


def gated(
    h: torch.Tensor, z: Maybe, x: Rows, lines: Maybe, w: torch.Tensor, ends: torch.Tensor, bias: Maybe, oai: bool,
    limit: float | None, interleaved: bool, **tile: Any
) -> None:  # fmt: skip
    """`_gated.gated` in 16 bits, for what `takes` says. lines: x's rows (n, K) in their places, or None."""
    (T, N), (G, _, K), tile = h.shape, w.shape, TILE | tile
    BM, BN, BK = tile["BM"], tile["BN"], tile["BK"]
    by_k = whole(w)

    def ragged(t: torch.Tensor, columns: int) -> TensorMap:
        return TensorMap(t[None, None] if t.dim() == 2 else t[None], (1, 1, 1, BM, columns), ragged=True)

    if interleaved:
        weight = TensorMap(w, (1, 2 * BN, BK)) if by_k else TensorMap(w.mT, (1, BK, 2 * BN))
        kept = None if z is None else ragged(z, BN)
    else:
        weight = TensorMap(w.unflatten(1, (2, N)), (1, 2, BN, BK))
        kept = None if z is None else ragged(z.unflatten(1, (2, N)).transpose(0, 1), BN)
    most = (T // BM + min(G + 1, T)) * triton.cdiv(N, BN)
    grid = (min(most, device.of(h).multiprocessors),)
    placed = None if lines is None else ragged(lines, BK)
    given = x, placed, ragged(h, BN), kept, weight, bias, ends, Sizes(T, K, N, G), limit
    launch(_fwd, grid, *given, **tile, OPTIONS=(power(G), by_k, interleaved, oai))


def first(tma: bool) -> Callable[..., None]:
    """`_gated.gated`, or with tma what takes the same arguments and leaves to it what TMA cannot move."""
    return _served if tma else _gated.gated


def _served(
    h: torch.Tensor, z: Maybe, x: Rows, w: torch.Tensor, ends: torch.Tensor, bias: Maybe, oai: bool,
    limit: float | None, interleaved: bool, precision: str, room: torch.Tensor
) -> None:  # fmt: skip
    unit = oai, limit, interleaved
    if not takes(x.data, w, interleaved):
        return _gated.gated(h, z, x, w, ends, bias, *unit, precision, room)
    lines = _route.gather(room, x.data, x.order, x.each) if h.shape[1] >= COPIED else None
    gated(h, z, x, lines, w, ends, bias, *unit)
