"""Attention forward for few queries of many keys, as in a decoder with a cache: flash decoding, in Triton.

    part p of the keys gives each row a maximum m_p, a sum l_p and values a_p
    m = max m_p,  o = sum 2^(m_p - m) a_p / sum 2^(m_p - m) l_p

Reading keys and values takes nearly all the time. One program per head would use few multiprocessors, and read keys
once for each head that shares them. Here a tile of rows holds the queries of all heads that share keys, and the keys
are split into parts, one program each. A second kernel combines the parts in order, as the online softmax does, so
results are bitwise reproducible. A single part is written directly.
Source: Dao, Haziza, Massa and Sizov, Flash-Decoding for long-context inference, 2023
(https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import early, launch
from ridgeline.op import dtype_name
from ridgeline.ops.attention import _triton
from ridgeline.ops.attention._triton import (
    LOG2E,
    LOOSE,
    UNBOUNDED,
    _absorb,
    _apart,
    _end,
    _head,
    _masked,
    _parts,
    _power,
    _save,
    _span,
    _steps,
    _tiles,
    _unit,
    _zeros,
    rounded_off,
)

ROWS, TILE, KEYS = 64, 32768, 512  # at most so many rows and bytes of a tile; at least so many keys to split
BUSY = 264  # heads that keep a GPU busy: two per multiprocessor of an H100
GRAIN, LEAST, MOST = 128, 256, 128  # parts have a multiple of so many keys, at least so many; the most parts


@triton.jit(do_not_specialize=(*LOOSE, "group", "parts"))
def _fwd(
    o, lse, pieces, q, k, v, mask, o_steps, q_steps, k_steps, v_steps, mask_steps, rows, columns, heads, group, parts,
    scale, factor, cap, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM: tl.constexpr, CAP: tl.constexpr,
    APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Row r of a tile is query r // group of head r % group, among the heads that share keys."""
    part, turn = tl.program_id(0) % parts, tl.program_id(0) // parts
    b, h = turn // heads, turn % heads
    r, n, d, e = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE) if BE else None
    size, i, own = rows * group, r // group, h * group + r % group
    q, q2 = _tiles(_head(q, q_steps, b, own, i, UNIT)[:, None], r, 0, d, e, size, D, UNIT, False)
    k, v = _head(k, k_steps, b, h, 0, UNIT), _head(v, v_steps, b, h, 0, UNIT)
    if mask is not None:
        mask = _head(mask, mask_steps, b, own, 0, 1)[:, None]
    shift = columns - rows if BOTTOM else 0
    back, ahead = left - shift, right + shift
    low, _, _, high = _span(0, rows - 1, columns, back, ahead, LEFT, RIGHT, BN, True)
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), parts), BN) * BN
    low += part * share
    acc, acc2 = _zeros(BM, BD, BE)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    for start in range(low, tl.minimum(low + share, high), BN):
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
    if PDL:
        gdc_launch_dependents()
    if pieces is None:
        scaled, sums = _end(top, total, APART)
        _save(
            _head(o, o_steps, b, own, i, UNIT)[:, None],
            acc * scaled[:, None],
            acc2 * scaled[:, None],
            r,
            0,
            d,
            e,
            size,
            D,
            UNIT,
        )
        tl.store(lse + (turn.to(tl.int64) * group + r % group) * rows + i, sums, mask=r < size)
    else:
        count = tl.num_programs(0) * size
        at = tl.program_id(0) * size
        _save(pieces + at * D, acc, acc2, r, D // UNIT, d, e, size, D, UNIT)
        tl.store(pieces + count * D + at + r, top, mask=r < size)
        tl.store(pieces + count * (D + 1) + at + r, total, mask=r < size)


@triton.jit(do_not_specialize=(*LOOSE, "group", "parts"))
def _join(
    o, lse, pieces, o_steps, rows, heads, group, parts, APART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr, SOME: tl.constexpr
):  # fmt: skip
    """Combines a row's parts into o and lse, SOME at a time."""
    size = rows * group
    turn, r = tl.program_id(0) // size, tl.program_id(0) % size
    count = tl.num_programs(0) * parts
    p, d = tl.arange(0, SOME), tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    total, top = 0.0, float("-inf")
    if PDL:
        gdc_wait()
    for start in range(0, parts, SOME):
        inside = start + p < parts
        at = (turn * parts + start + p) * size + r
        tops = tl.load(pieces + count * D + at, mask=inside, other=float("-inf"))
        totals = tl.load(pieces + count * (D + 1) + at, mask=inside, other=0.0)
        some = tl.load(pieces + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        most = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(most == float("-inf"), 0.0, most)  # no key seen yet
        weights = _power(tops, base, 1.0, APART, o.dtype.element_ty)
        shrink = _power(top, base, 1.0, APART, o.dtype.element_ty)
        acc = acc * shrink + tl.sum(some * weights[:, None], 0)
        total = total * shrink + tl.sum(totals * weights, 0)
        top = most
    scaled, sums = _end(top, total, APART)
    at = _head(o, o_steps, turn // heads, turn % heads * group + r % group, r // group, UNIT)
    tl.store(at + d, (acc * scaled).to(o.dtype.element_ty), mask=d < D)
    tl.store(lse + (turn.to(tl.int64) * group + r % group) * rows + r // group, sums)


def few(q: torch.Tensor, k: torch.Tensor, packed: bool = False) -> bool:
    """Returns whether a call has few queries of many keys, by sizes alone.

    The rows of a key head must fit a tile. In addition, heads must share keys, which a tile per head would read again,
    or be too few to keep a GPU busy.
    """
    if packed or not k.shape[1]:
        return False
    (batch, heads, rows, D), (_, shared, columns, _) = q.shape, k.shape
    most = min(ROWS, TILE // (D * q.element_size())) * shared
    return (
        columns >= KEYS
        and 0 < batch * rows * heads
        and rows * heads <= most
        and (heads > shared or batch * heads < BUSY)
    )


def aside(q: torch.Tensor, k: torch.Tensor, *rest: Any, **_: Any) -> str | None:
    """Returns why forward is left to this kernel, or None. Takes public arguments or a launcher's inputs."""
    packed = q.dim() == 3 or (len(rest) > 2 and rest[2] is not None)
    return (
        "for few queries of many keys, `triton` is faster forward, since it splits the keys"
        if few(q, k, packed)
        else None
    )


@lru_cache(1 << 10)
def _split(multiprocessors: int, turns: int, rows: int, columns: int, left: int, right: int, bottom: bool) -> int:
    """Returns into how many parts a head's keys are split.

    The aim is one program per multiprocessor, or two if there are too many heads for two parts each; two everywhere is
    slower (docs/notes/attention.md).
    """
    shift = columns - rows if bottom else 0
    low, high = max(shift - left, 0), min(columns, rows + shift + right)
    blocks = triton.cdiv(max(high - low, 1), GRAIN)
    share = multiprocessors // turns
    parts = max(1, min(share if share > 1 else 2 * multiprocessors // turns, blocks * GRAIN // LEAST, MOST))
    return triton.cdiv(blocks, triton.cdiv(blocks, parts))


def _rule(gpu: device.Device, dtype: torch.dtype, rows: int, width: int) -> tuning.Config:
    """Returns tiles of keys of up to 16 KiB: two programs fit three stages on an H100, or two on an A100.

    Eight warps if four would have too few registers. Not timed.
    """
    if gpu.backend == "cpu":
        return {"BN": 16, "num_warps": 4, "num_stages": 1}
    most = min(16384 // dtype.itemsize // width, 4096 // rows, 128)
    deep = gpu.shared_memory >= 227 << 10 and dtype != torch.float32
    warps = 8 if rows * width * dtype.itemsize >= 10240 else 4
    return {"BN": max(16, 1 << most.bit_length() - 1), "num_warps": warps, "num_stages": 3 if deep else 2}


def _space() -> list[tuning.Config]:
    return [
        {"BN": bn, "num_warps": warps, "num_stages": stages}
        for bn in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
    ]


def fwd(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, scale: float, softcap: float, left: int, right: int,
    bottom: bool, max_q: int, max_k: int, precision: str
) -> None:  # fmt: skip
    """Fills o and lse, by `_triton.fwd` if the queries are not few."""
    if not few(q, k, cu_q is not None):
        return _triton.fwd(
            o, lse, q, k, v, mask, cu_q, cu_k, scale, softcap, left, right, bottom, max_q, max_k, precision
        )
    (batch, heads, rows, D), shared, columns = q.shape, k.shape[1], k.shape[2]
    gpu, unit, (width, rest), group = device.of(q), _unit((o, q, k, v)), _parts(D), heads // shared
    BM = max(16, triton.next_power_of_2(rows * group))
    apart = _apart(q, mask, scale, softcap)
    parts = _split(gpu.multiprocessors, batch * shared, rows, columns, left, right, bottom)
    pieces = q.new_empty(parts * batch * heads * rows * (D + 2), dtype=torch.float32) if parts > 1 else None

    def config() -> dict[str, Any]:
        key = f"{dtype_name(q)}{'' if q.dtype != torch.float32 else ' ' + precision} {BM}x{width + rest}"
        return tuning.config(gpu, "attention", "few", key, partial(_rule, gpu, q.dtype, BM, width + rest), _space)

    o_steps, *steps = [tuple(s // unit for s in _steps(t)[:3]) for t in (o, q, k, v)]
    mask = _masked(mask, q, k)
    hidden = None if mask is None else _steps(mask)
    numbers = (
        rows,
        columns,
        shared,
        group,
        parts,
        scale,
        rounded_off(scale) if apart else scale * LOG2E,
        softcap,
        left,
        right,
    )
    flags = {"LEFT": left < UNBOUNDED, "RIGHT": right < UNBOUNDED, "BOTTOM": bottom, "CAP": softcap > 0, "APART": apart}
    facts = {"D": D, "BD": width, "BE": rest, "UNIT": unit, "PRECISION": precision, "BM": BM}
    second = early(gpu)
    flags["PDL"] = parts > 1 and second["PDL"]
    given = o, lse, pieces, q, k, v, mask, o_steps, *steps, hidden, *numbers
    launch(_fwd, (parts * batch * shared,), *given, config=config, key=("few",), **flags, **facts)
    if pieces is None:
        return None
    joined: dict[str, Any] = {
        "APART": apart,
        "D": D,
        "BD": triton.next_power_of_2(D),
        "UNIT": unit,
        "SOME": 32,
        "num_warps": 4,
    }
    launch(_join, (batch * heads * rows,), o, lse, pieces, o_steps, rows, shared, group, parts, **joined, **second)
