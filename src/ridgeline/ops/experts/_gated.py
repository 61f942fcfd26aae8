"""The first half of an expert: act(x G^T + b) (x U^T + c) for groups of gathered rows, and its backward.

A program multiplies its rows with a tile of the gate's weight and one of up's in one loop, and the two meet in
registers: h is written once, and both products z only if backward needs them. swiglu_oai is gpt-oss's
(up + 1) gate sigmoid(1.702 gate), with limits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import launch
from ridgeline.ops.experts._products import (
    Maybe,
    Rows,
    Sizes,
    Weights,
    added,
    dot_precision,
    empty,
    find,
    last_tiles,
    power,
    programs,
    rule,
    source,
)
from ridgeline.tiles.activations import sigmoid_slope, silu_slope

ALPHA = tl.constexpr(1.702)


class Halves(NamedTuple):
    """Where the rows of a gate_up weight are: the gate's at `step` apart, up's `up` rows further. z has that order."""

    step: Any
    up: Any


class Written(NamedTuple):
    """The results: h (n, I), and z (n, 2I), or None."""

    h: Any
    z: Any


@triton.jit
def unit(gate, up, limit, OAI: tl.constexpr, dtype: tl.constexpr):
    """act(gate) * up with limits, and its derivatives by gate and by up."""
    g, u = gate, up
    if limit is not None:  # by comparisons that are false for a NaN, which stays
        g = tl.where(gate > limit, limit, gate)
        u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if OAI:
        share, by_share = sigmoid_slope(g * ALPHA, dtype, limit is not None)
        # Not silu's product divided by ALPHA: an approximate division errs one way, in every element.
        y, slope = g * share, share + g * ALPHA * by_share
        u += 1.0
    else:
        y, slope = silu_slope(g, dtype, limit is not None)
    by_gate, by_up = slope * u, y
    if limit is not None:
        by_gate = tl.where(gate > limit, 0.0, by_gate)
        by_up = tl.where(tl.abs(up) > limit, 0.0, by_up)
    return y * u, by_gate, by_up


@triton.jit
def _halves(both, BM: tl.constexpr, BN: tl.constexpr):
    """The even and the odd columns of a tile. A thread of a matrix unit holds neighbours, so no data moves."""
    return both.reshape(BM, BN, 2).split()


@triton.jit
def _biased(total, bias, group, c, N, G, g):
    """total plus columns c of the group's 2 N biases."""
    if bias is not None:
        b = tl.load(bias + group * 2 * N + c, mask=(c < 2 * N) & (g < G), other=0.0)
        total += b.to(tl.float32)[None, :]
    return total.to(tl.float32)


@triton.jit
def _keep(out, total, r, c, end, below, N):
    """Stores columns c of z, up to column `below`."""
    if out.z is not None:
        inside = (r[:, None] < end) & (c[None, :] < below)
        tl.store(out.z + r[:, None] * (2 * N) + c[None, :], total.to(out.z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["limit"])
def _fwd(
    out,
    x,
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
    """sizes: n rows, K, I and the experts. OPTIONS: (power of the experts, even K, precision, swiglu_oai, long,
    interleaved). Columns that take turns are one tile of twice the width, so they are loaded, and stored in z, as they
    lie."""
    T, K, N, G = sizes
    POW: tl.constexpr = OPTIONS[0]
    EVEN: tl.constexpr = OPTIONS[1]
    PRECISION: tl.constexpr = OPTIONS[2]
    MIXED: tl.constexpr = OPTIONS[5]
    WIDE: tl.constexpr = 2 * BN if MIXED else BN
    w_k, w_n = w.k, w.n
    if OPTIONS[4]:  # offsets in an expert's weight overflow 32 bits
        w_k, w_n = tl.cast(w_k, tl.int64), tl.cast(w_n, tl.int64)
    across = tl.cdiv(N, BN)
    last = last_tiles(ends, G, T, BM, POW)
    tiles = tl.max(last, 0) * across
    k = tl.arange(0, BK)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        g, row, end, column = find(last, ends, t, across, sizes, BM, BN, GROUP)
        r, n = row + tl.arange(0, BM), column + tl.arange(0, BN)
        c = column * (WIDE // BN) + tl.arange(0, WIDE)  # z's columns and the weight's
        rows = source(x, tl.minimum(r, end - 1))
        group = tl.minimum(g, G - 1).to(tl.int64)
        at_x = x.data + rows[:, None] * x.row + k[None, :].to(tl.int64) * x.column
        at_w = w.data + group * w.group
        here_w = k[:, None] * w_k + (c % (N * (WIDE // BN)))[None, :] * w_n
        gate, up = empty(BM, WIDE, PRECISION), empty(BM, BN, PRECISION)
        for start in range(0, tl.where(g < G, K, 0), BK):
            if EVEN:
                left, right = tl.load(at_x), tl.load(at_w + here_w)
            else:
                left = tl.load(at_x, mask=k[None, :] < K - start, other=0.0)
                right = tl.load(at_w + here_w, mask=k[:, None] < K - start, other=0.0)
            gate = added(gate, left, right, PRECISION)
            if not MIXED:
                if EVEN:
                    other = tl.load(at_w + N * w_n + here_w)
                else:
                    other = tl.load(at_w + N * w_n + here_w, mask=k[:, None] < K - start, other=0.0)
                up = added(up, left, other, PRECISION)
            at_x += BK * tl.cast(x.column, tl.int64)
            at_w += BK * tl.cast(w_k, tl.int64)
        gate = _biased(gate, bias, group, c, N, G, g)
        r = r.to(tl.int64)
        _keep(out, gate, r, c, end, N * (WIDE // BN), N)
        if MIXED:
            gate, up = _halves(gate, BM, BN)
        else:
            up = _biased(up, bias, group, N + c, N, G, g)
            _keep(out, up, r, N + c, end, 2 * N, N)
        h, _, _ = unit(gate, up, limit, OPTIONS[3], out.h.dtype.element_ty)
        inside = (r[:, None] < end) & (n[None, :] < N)
        tl.store(out.h + r[:, None] * N + n[None, :], h.to(out.h.dtype.element_ty), mask=inside)


class Undone(NamedTuple):
    """dz (n, 2I); h (n, I), times the pair's weight, or None; sums (n,), float32: the gradients of the weights."""

    dz: Any
    h: Any
    sums: Any


@triton.jit
def _row(z, start, N, BLOCK: tl.constexpr, MIXED: tl.constexpr):
    """The gates and ups of columns start to start + BLOCK, in float32, from a row of z."""
    if MIXED:
        c = 2 * start + tl.arange(0, 2 * BLOCK)
        gate, up = tl.load(z + c, mask=c < 2 * N, other=0.0).reshape(BLOCK, 2).split()
    else:
        n = start + tl.arange(0, BLOCK)
        gate, up = tl.load(z + n, mask=n < N, other=0.0), tl.load(z + N + n, mask=n < N, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit(do_not_specialize=["limit"])
def _bwd(out, dh, z, weights, order, last_end, N, limit, OAI: tl.constexpr, BLOCK: tl.constexpr, MIXED: tl.constexpr):
    """dh (n, I): the gradient of h without the pair's weight. A program has one row. dz may lie in z, and h in dh.
    MIXED: gates and ups take turns in z."""
    r = tl.program_id(0).to(tl.int64)
    factor = tl.load(weights + tl.load(order + r)).to(tl.float32)
    factor = tl.where(r < tl.load(last_end), factor, 0.0)  # rows of no expert
    dtype = out.dz.dtype.element_ty
    sums = tl.zeros((BLOCK,), tl.float32)
    z, dz = z + r * (2 * N), out.dz + r * (2 * N)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        gate, up = _row(z, start, N, BLOCK, MIXED)
        d = tl.load(dh + r * N + n, mask=n < N, other=0.0).to(tl.float32)
        h, by_gate, by_up = unit(gate, up, limit, OAI, dtype)
        sums += d * h
        if out.h is not None:
            tl.store(out.h + r * N + n, (h * factor).to(dtype), mask=n < N)
        by_gate, by_up = (d * factor * by_gate).to(dtype), (d * factor * by_up).to(dtype)
        if MIXED:
            c = 2 * start + tl.arange(0, 2 * BLOCK)
            tl.store(dz + c, tl.join(by_gate, by_up).reshape(2 * BLOCK), mask=c < 2 * N)
        else:
            tl.store(dz + n, by_gate, mask=n < N)
            tl.store(dz + N + n, by_up, mask=n < N)
    tl.store(out.sums + r, tl.sum(sums, 0))


def halves_of(I: int, interleaved: bool) -> Halves:
    return Halves(2, 1) if interleaved else Halves(1, I)


def gated(
    h: torch.Tensor, z: Maybe, x: Rows, w: torch.Tensor, ends: torch.Tensor, bias: Maybe, oai: bool,
    limit: float | None, interleaved: bool, precision: str, room: Maybe = None
) -> None:  # fmt: skip
    """Fills h (n, I) and z (n, 2 I) from gathered rows x and w (E, 2 I, K), any strides; bias: contiguous. room: memory
    (n, K) for copies of x's rows, which other rungs make."""
    (T, N), (G, _, K) = h.shape, w.shape
    exact = dot_precision(h, precision, K, 2 * T * N)
    w = w.mT
    long = (K + 128) * w.stride(1) + 2 * N * w.stride(2) >= 1 << 31

    def config() -> dict[str, Any]:
        gpu = device.of(h)
        chosen = _tile(gpu, h.element_size(), rule(gpu, h.dtype, exact, T, 2 * N, K, G))
        return chosen | {"OPTIONS": (power(G), K % chosen["BK"] == 0, exact, oai, long, interleaved)}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return (programs(device.of(h), c, h.element_size(), T, N, G, wide=2),)

    where = x, Weights(w, *w.stride()), bias, ends, Sizes(T, K, N, G)
    launch(_fwd, grid, Written(h, z), *where, limit, config=config, key=(T, N, K, G, oai, long, exact, interleaved))


def _tile(gpu: device.Device, size: int, one: tuning.Config) -> tuning.Config:
    """The tile of a product of half the columns, since there are two; for few rows of as many, if they fit."""
    held = (one["BM"] + 2 * one["BN"]) * one["BK"] * size * (one["num_stages"] - 1)
    whole = size < 4 and one["BM"] < 64 and held < gpu.shared_memory // 2 and gpu.backend == "cuda"
    return one if whole else one | {"BN": max(32, one["BN"] // 2)}


def ungated(
    dz: torch.Tensor, h: Maybe, sums: torch.Tensor, dh: torch.Tensor, z: torch.Tensor, weights: torch.Tensor,
    order: torch.Tensor, ends: torch.Tensor, oai: bool, limit: float | None, interleaved: bool
) -> None:  # fmt: skip
    n, N = dh.shape
    block = min(1024, triton.next_power_of_2(N))
    given, warps = (Undone(dz, h, sums), dh, z, weights, order, ends[-1:], N, limit), max(1, min(4, block // 256))
    launch(_bwd, (n,), *given, OAI=oai, BLOCK=block, MIXED=interleaved, num_warps=warps)
