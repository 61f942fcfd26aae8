"""The experts of so few tokens that hardly two share one, as in a step of decoding: two kernels, and no routing.

Each pair (token, expert) reads its own expert: a program of the first kernel makes some columns of one pair's h, and
one of the second some columns of a token's result, the sum of its choices in order. Sums are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.ops.experts._gated import unit
from ridgeline.ops.experts._products import Maybe, Weights


class Chosen(NamedTuple):
    """The choices of all tokens: experts (T, k) and their weights; k and the number of experts."""

    indices: Any
    weights: Any
    k: Any
    E: Any


@triton.jit
def _expert(chosen, pair):
    """A pair's expert, as int64, and whether it is one; else 0."""
    e = tl.load(chosen.indices + pair).to(tl.int64)
    known = (e >= 0) & (e < chosen.E)
    return tl.where(known, e, 0), known


@triton.jit
def _summed(at_w, at_x, w_k, K, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr):
    """Sums over K of BN rows of a weight times one row of x."""
    k = tl.arange(0, BK)
    at_w += k[None, :].to(tl.int64) * w_k
    total = tl.zeros((BN, BK), tl.float32)
    for start in tl.range(0, K, BK, loop_unroll_factor=UNROLL):
        if EVEN:
            row, tile = tl.load(at_x + start + k), tl.load(at_w)
        else:
            row = tl.load(at_x + start + k, mask=k < K - start, other=0.0)
            tile = tl.load(at_w, mask=k[None, :] < K - start, other=0.0)
        total += tile.to(tl.float32) * row.to(tl.float32)[None, :]
        at_w += BK * tl.cast(w_k, tl.int64)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["limit"])
def _up(
    h,
    x,
    w,
    bias,
    chosen,
    K,
    N,
    limit,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    OPTIONS: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """h (T k, I). x: (T, K). OPTIONS: (gate and up take turns, swiglu_oai)."""
    if PDL:
        gdc_launch_dependents()
    pair, column = tl.program_id(1), tl.program_id(0) * BN
    e, _known = _expert(chosen, pair)
    at_x, n = x + (pair // chosen.k).to(tl.int64) * K, column + tl.arange(0, BN)
    if OPTIONS[0]:
        c = 2 * column + tl.arange(0, 2 * BN)
    else:
        c = tl.arange(0, 2 * BN)
        c = c // BN * N + (column + c % BN) % N
    c = c % (2 * N)
    at_w = w.data + e * w.group + c[:, None].to(tl.int64) * w.n
    both = _summed(at_w, at_x, w.k, K, 2 * BN, BK, EVEN, UNROLL)
    if bias is not None:
        both += tl.load(bias + e * 2 * N + c).to(tl.float32)
    gate, up = both.reshape(BN, 2).split() if OPTIONS[0] else both.reshape(2, BN).trans().split()
    y, _, _ = unit(gate, up, limit, OPTIONS[1], h.dtype.element_ty)
    tl.store(h + pair.to(tl.int64) * N + n, y.to(h.dtype.element_ty), mask=n < N)


@triton.jit
def _fetch(at_w, w_k, K, BK: tl.constexpr):
    """Asks for the first BK columns of a weight's rows, to be in L2 soon."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    k = tl.arange(0, BK // 64) * 64
    at = (at_w + tl.minimum(k, K - 1)[None, :].to(tl.int64) * w_k).to(tl.uint64)
    tl.inline_asm_elementwise(code, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _down(
    y,
    h,
    w,
    bias,
    chosen,
    K,
    N,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    UNROLL: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y (T, N), the sum of each token's experts, in the order of its choices."""
    t, n = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    at_w = w.data + (n % N)[:, None].to(tl.int64) * w.n
    if PDL:
        if FETCH > 0:
            for j in range(chosen.k):
                e, _known = _expert(chosen, t * chosen.k + j)
                _fetch(at_w + e * w.group, w.k, K, FETCH)
        gdc_wait()
    k, steps = tl.arange(0, BK), tl.cdiv(K, BK)
    at_w += k[None, :].to(tl.int64) * w.k
    total, first = tl.zeros((BN, BK), tl.float32), (t * chosen.k).to(tl.int64)
    for s in tl.range(0, chosen.k * steps, loop_unroll_factor=UNROLL):
        pair, start = first + s // steps, s % steps * BK
        e, known = _expert(chosen, pair)
        share = tl.where(known, tl.load(chosen.weights + pair).to(tl.float32), float("nan"))
        at_h, here_w = h + pair * K + start + k, at_w + e * w.group + start.to(tl.int64) * w.k
        if EVEN:
            row, tile = tl.load(at_h), tl.load(here_w)
        else:
            row = tl.load(at_h, mask=k < K - start, other=0.0)
            tile = tl.load(here_w, mask=k[None, :] < K - start, other=0.0)
        total += tile.to(tl.float32) * (row.to(tl.float32) * share)[None, :]
    result = tl.sum(total, 1)
    if bias is not None:
        for j in range(chosen.k):
            e, _known = _expert(chosen, first + j)
            b = tl.load(bias + e * N + n, mask=n < N, other=0.0).to(tl.float32)
            result += b * tl.load(chosen.weights + first + j).to(tl.float32)
    total = result
    tl.store(y + t.to(tl.int64) * N + n, total.to(y.dtype.element_ty), mask=n < N)


def few(x: torch.Tensor, indices: torch.Tensor, E: int) -> bool:
    """Whether hardly two of the tokens share an expert, and the kernels here take x: 16 bits, on NVIDIA's cards."""
    T, k = indices.shape
    return x.dtype != torch.float32 and 0 < T * k and 4 * (T - 1) * k <= E and device.of(x).backend != "hip"


def tile(n_step: int, up: bool) -> dict[str, Any]:
    """The tile of a product whose weight's neighbours run along K, or along its rows (n_step 1)."""
    if n_step == 1:
        return {"BN": 16, "BK": 256, "num_warps": 4, "UNROLL": 1} | ({} if up else {"FETCH": 0})
    if up:
        return {"BN": 1, "BK": 256, "num_warps": 1, "UNROLL": 4}
    return {"BN": 4, "BK": 1024, "num_warps": 4, "UNROLL": 2, "FETCH": 1024}


def fwd(
    y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, gate_up_bias: Maybe, down_bias: Maybe, oai: bool, limit: float | None, interleaved: bool,
    first: Any = None, second: Any = None,
) -> None:  # fmt: skip
    """Fills y (T, H), of whole tensors but for the experts' weights, which have any strides."""
    (T, k), (E, H, I) = indices.shape, down.shape
    h, chosen, after = x.new_empty((T * k, I)), Chosen(indices, weights, k, E), early(device.of(x))
    one, other = tile(gate_up.stride(1), True) | (first or {}), tile(down.stride(1), False) | (second or {})
    given = Weights(gate_up, gate_up.stride(0), gate_up.stride(2), gate_up.stride(1)), gate_up_bias, chosen, H, I
    even = {"EVEN": H % one["BK"] == 0, "OPTIONS": (interleaved, oai), "PDL": after["PDL"]}
    launch(_up, (triton.cdiv(I, one["BN"]), T * k), h, x, *given, limit, **one, **even)
    given = Weights(down, down.stride(0), down.stride(2), down.stride(1)), down_bias, chosen, I, H
    launch(_down, (triton.cdiv(H, other["BN"]), T), y, h, *given, **other, EVEN=I % other["BK"] == 0, **after)
