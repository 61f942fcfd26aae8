"""Experts whose weights are codes of 4 or 8 bits, for inference: the kernel, its launchers, and the weights in full.

A program takes some rows of one expert's weight and up to 64 of its tokens. Codes become numbers in registers, as in
the dense products of few bits, so an expert's bytes are read once for its tokens. With gate and up a program multiplies
a tile of each, and they meet in registers. If experts have more rows, all weights are dequantised first, one matrix
after the other into the same memory, and the products are those of experts in full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import INTERPRETED, launch
from ridgeline.op import RidgelineError
from ridgeline.ops.experts._gated import Halves, halves_of, unit
from ridgeline.ops.experts._products import Maybe, Rows, Sizes, find, last_tiles, power, source
from ridgeline.tiles.few_bits import (
    Rules,
    Weight,
    group_of,
    kind_of,
    plain,
    powers_of,
    scales_of,
    step,
    step_of,
    unpack,
    words_of,
)

MANY = 64  # rows of an expert from which weights in full and a plain product are quicker
Pair = tuple[torch.Tensor, torch.Tensor]


class Codes(NamedTuple):
    """An expert weight's codes (E, N, K / 2) or (E, N, K), scales (E, N, groups), and zeros alike or None."""

    q: torch.Tensor
    scale: torch.Tensor
    zero: Maybe

    @property
    def columns(self) -> int:
        return self.q.shape[2] * (2 if self.q.dtype == torch.uint8 else 1)

    @property
    def flat(self) -> Weight:
        """All experts' rows below each other, as one weight."""
        flat = [None if t is None else t.reshape(-1, t.shape[2] if t.dim() == 3 else 1) for t in self]
        return Weight(*flat)


@triton.jit
def _ahead(weight, row, k, K, BK: tl.constexpr, RULES: tl.constexpr):
    """What `step` needs of scales and zeros for the columns from k on; past the last one any."""
    if RULES.KIND == "int8":  # none: a row has one scale
        scale = tl.zeros((1,), tl.int32)
        zero = scale
    elif BK <= RULES.GROUP:
        scale, zero = scales_of(weight, row, k, K, K, RULES)
    else:
        scale = powers_of(weight, row, k, K, BK, RULES)
        zero = scale
    return scale, zero


@triton.jit
def _stepped(total, weight, at_q, row, rows, k, scale, zero, K, RULES: tl.constexpr):
    """`step`, and the next step's scales and zeros, which are in flight during the product."""
    next_scale, next_zero = _ahead(weight, row, k + rows.shape[1], K, rows.shape[1], RULES)
    total = step(total, weight, at_q, row, rows, k, scale, zero, K, RULES)
    return total, next_scale, next_zero


@triton.jit
def _finished(total, weight, bias, row, here, RULES: tl.constexpr):
    """The rows' products with what comes after the sum: int8's scales, and the bias."""
    if RULES.KIND == "int8":
        total *= tl.load(weight.scale + row).to(tl.float32)[:, None]
    if bias is not None:
        total += tl.load(bias + row, mask=here, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["limit"])
def _fwd(
    y,
    x,
    weight,
    bias,
    ends,
    sizes,
    halves,
    limit,
    RULES: tl.constexpr,
    OAI: tl.constexpr,
    POW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y (T, N) = rows of x times their experts' weights; with halves, of gate and up, which meet: act(gate) up."""
    T, K, N, G = sizes
    across = tl.cdiv(N, BN)
    last = last_tiles(ends, G, T, BM, POW)
    tiles = tl.max(last, 0) * across
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        g, first, end, column = find(last, ends, t, across, sizes, BM, BN, 8)
        r, n = first + tl.arange(0, BM), column + tl.arange(0, BN)
        expert = tl.minimum(g, G - 1).to(tl.int64)
        if halves is None:
            row = expert * N + n % N
        else:
            row = expert * 2 * N + n % N * halves.step
            other_row = row + halves.up
            other_q = weight.q + other_row[:, None] * words_of(K, RULES)
        at_x = x.data + source(x, tl.minimum(r, end - 1))[:, None] * x.row
        at_q = weight.q + row[:, None] * words_of(K, RULES)
        depth = tl.where(g < G, K, 0)
        total = tl.zeros((BN, BM), tl.float32)
        other = total
        scale, zero = _ahead(weight, row, 0, K, BK, RULES)
        if halves is not None:
            other_scale, other_zero = _ahead(weight, other_row, 0, K, BK, RULES)
        for start in range(0, depth, BK):
            k = start + tl.arange(0, BK)[None, :]
            if RULES.EVEN:
                rows = tl.load(at_x + k)
            else:
                rows = tl.load(at_x + k, mask=k < K, other=0.0)
            total, scale, zero = _stepped(total, weight, at_q, row, rows, start, scale, zero, K, RULES)
            if halves is not None:
                other, other_scale, other_zero = _stepped(
                    other, weight, other_q, other_row, rows, start, other_scale, other_zero, K, RULES
                )
        here = (n < N) & (g < G)
        total = _finished(total, weight, bias, row, here, RULES)
        if halves is not None:
            other = _finished(other, weight, bias, other_row, here, RULES)
            total, _, _ = unit(total, other, limit, OAI, y.dtype.element_ty)
        at_y = y + r[None, :].to(tl.int64) * N + n[:, None]
        tl.store(at_y, total.to(y.dtype.element_ty), mask=(r[None, :] < end) & (n[:, None] < N))


def many(T: int, G: int) -> bool:
    """Whether T rows of G experts are so many that weights in full are quicker."""
    return T > MANY * G


def product(
    y: torch.Tensor, x: Rows, codes: Codes, ends: torch.Tensor, bias: Maybe, halves: Halves | None = None,
    oai: bool = False, limit: float | None = None
) -> None:  # fmt: skip
    """Fills y (T, N) from rows of x and codes (G, N, K), or (G, 2 N, K) with halves. All are contiguous."""
    (T, N), G, K, gpu = y.shape, codes.q.shape[0], codes.columns, device.of(y)
    weight = codes.flat
    kind, group = kind_of(weight.q, weight.scale), group_of(weight.q, weight.scale)
    whole = kind == "int8" or (kind == "mxfp4" and y.dtype != torch.float16)  # float16 cannot hold the scales
    short = kind == "int8" and K % 16 > 0 and not 90 <= gpu.capability < 120  # many registers for odd rows
    deep = (64 if short else 128) if whole else step_of(group)
    native = gpu.backend == "cuda" and gpu.capability >= 80 and not INTERPRETED
    rules = Rules(kind, native, K % deep == 0, "ieee", False, group)

    def config() -> dict[str, Any]:
        return tile(gpu, y.dtype, T, G, deep * (8 if kind == "int8" else 4) // 8 * (1 if halves is None else 2), deep)

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return (min((T // c["BM"] + min(G + 1, T)) * triton.cdiv(N, c["BN"]), 1 << 16),)

    given = x, Weight(weight.q.view(torch.int16), weight.scale, weight.zero), bias, ends, Sizes(T, K, N, G), halves
    key = T, G, K, group, kind, halves is None
    launch(_fwd, grid, y, *given, limit, RULES=rules, OAI=oai, POW=power(G), config=config, key=key)


def tile(gpu: device.Device, dtype: torch.dtype, T: int, G: int, row_bytes: int, deep: int) -> dict[str, Any]:
    """Returns the tile: as many rows as most experts have, and the stages that shared memory holds, up to four.

    row_bytes: of a row of W, in a step."""
    average = T / max(1, min(G, T))
    wide = gpu.backend == "cuda" and 90 <= gpu.capability < 100 and dtype != torch.float32  # has wgmma
    rows = 16 if average <= 8 else 32 if average <= 20 or not wide else 64
    columns, threads = (64, 128) if rows < 64 else (128, 256)
    held = columns * row_bytes + rows * deep * dtype.itemsize
    stages = max(2, min(4, (gpu.shared_memory - 8192) // held)) if gpu.backend == "cuda" else 2
    return {"BM": rows, "BN": columns, "BK": deep, "num_warps": threads // gpu.warp, "num_stages": stages}


def gated(
    h: torch.Tensor, x: Rows, codes: Codes, ends: torch.Tensor, bias: Maybe, oai: bool, limit: float | None,
    interleaved: bool
) -> None:  # fmt: skip
    """Fills h (T, I) from rows of x and the codes of gate and up (G, 2 I, K)."""
    product(h, x, codes, ends, bias, halves_of(h.shape[1], interleaved), oai, limit)


def in_full(room: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Returns the weight (E, N, K), rounded once to the dtype of room, a vector that it lies in."""
    E, N, _ = codes.q.shape
    K, weight = codes.columns, codes.flat
    w = room[: E * N * K].view(E, N, K)
    facts: dict[str, Any] = {"KIND": kind_of(weight.q, weight.scale), "GROUP": group_of(weight.q, weight.scale)}
    grid, warps = (triton.cdiv(E * N, 4), triton.cdiv(K, 1024)), 256 // device.of(room).warp
    launch(unpack, grid, w, weight, E * N, K, **facts, BN=4, BK=1024, num_warps=warps)
    return w


def dense(dtype: torch.dtype, gate_up: Codes, down: Codes) -> Pair:
    """Returns both weights in a dtype, by PyTorch's own operations."""
    whole = []
    for codes in (gate_up, down):
        w = plain(*codes.flat, dtype)
        whole.append(w.view(*codes.q.shape[:2], codes.columns))
    return whole[0], whole[1]


def codes_of(gate_up: Any, down: Any, scales: Any, zeros: Any) -> tuple[Codes, Codes]:
    none = zeros if zeros is not None else (None, None)
    return Codes(gate_up, scales[0].detach(), none[0]), Codes(down, scales[1].detach(), none[1])


def unfit(*both: Codes) -> str | None:
    """Returns why kernels do not take weights, or None."""
    for codes in both:
        weight = codes.flat
        if weight.q.dtype == torch.int8 and codes.columns % 2:
            return "it reads two columns at once, and their number is odd"
        if weight.q.dtype == torch.uint8 and group_of(weight.q, weight.scale) % 32:
            return f"it takes groups of a multiple of 32 columns, and these are of {group_of(weight.q, weight.scale)}"
    return None


FORMS = "int8 codes with floating-point scales, uint8 with floating-point ones (int4) or with uint8 ones (mxfp4)"


def check(x: Any, gate_up: Any, down: Any, scales: Any, zeros: Any) -> None:
    """Raises RidgelineError unless scales and zeros fit the codes, whose first two dimensions are right."""
    for name, given in (("scales", scales), ("zeros", zeros)):
        if name == "zeros" and given is None:
            continue
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise RidgelineError(f"moe: {name} must be a pair, gate_up's and down's, got {type(given).__name__}")
        for t in given:
            if not isinstance(t, torch.Tensor) or t.device != x.device:
                found = f"one on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
                raise RidgelineError(f"moe: {name} must be two tensors on {x.device}, got {found}")
    kinds = []
    for name, q, scale in (("gate_up", gate_up, scales[0]), ("down", down, scales[1])):
        if q.dtype not in (torch.int8, torch.uint8) or not (
            scale.is_floating_point() or (q.dtype == scale.dtype == torch.uint8)
        ):
            raise RidgelineError(f"moe: with scales, {name} must be {FORMS}, got {q.dtype} and {scale.dtype}")
        kinds.append(kind_of(q, scale))
        _check_scale(name, q, scale, kinds[-1])
    if kinds[0] != kinds[1]:
        raise RidgelineError(f"moe: gate_up and down must have codes of one kind, got {kinds[0]} and {kinds[1]}")
    for name, scale, zero in zip(("gate_up", "down"), scales, zeros or (), strict=False):
        if kinds[0] != "int4":
            raise RidgelineError(f"moe: zeros must be None for {kinds[0]} codes; only int4 codes take them")
        if zero.dtype != torch.uint8 or zero.shape != scale.shape:
            found = f"{zero.dtype} {tuple(zero.shape)}"
            raise RidgelineError(f"moe: {name}'s zeros must be uint8 {tuple(scale.shape)}, got {found}")


def _check_scale(name: str, q: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    E, N, given = *q.shape[:2], tuple(scale.shape)
    K = q.shape[2] * (1 if kind == "int8" else 2)
    if kind == "int8":
        right, wanted = given in ((E, N), (E, N, 1)), f"{(E, N)} or {(E, N, 1)}"
    elif kind == "mxfp4":
        right, wanted = not K % 32 and given == (E, N, K // 32), f"(E, N, K / 32) with K = {K}, a multiple of 32"
    else:
        right = len(given) == 3 and given[:2] == (E, N) and given[2] > 0 and not K % given[2]
        wanted = f"({E}, {N}, K / group) with a group that divides K = {K}"
    if not right:
        raise RidgelineError(f"moe: {name}'s scales must be {wanted}, got {given}")
