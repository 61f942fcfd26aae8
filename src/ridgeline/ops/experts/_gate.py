"""The kernels of topk_gate: a program holds whole rows of logits in registers, and finds the largest one by one.

Columns are laid out as (groups, columns of a group), each padded to a power of two, so that a group's scores are along
an axis of their own. The k largest are found in k steps; equal ones go by the lower index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import launch
from ridgeline.tiles.online_softmax import exact_exp

SMALL = tl.constexpr(1e-20)  # as DeepSeek's code adds to a sum before the division


class Gate(NamedTuple):
    """The options: experts in groups, of which the best stay; how scores become weights. None or 1 are compiled in."""

    experts: Any
    per_group: Any
    groups: Any
    top_groups: Any
    limited: Any
    softmax: Any
    normalize: Any


class Logits(NamedTuple):
    """(T, E) with strides."""

    data: Any
    row: Any
    column: Any


@triton.jit
def _scores(x, t, T, gate, GP: tl.constexpr, PP: tl.constexpr):
    """The columns' experts, which of them exist, and the scores of rows t: softmax or sigmoid, 0 elsewhere."""
    c = tl.arange(0, GP * PP)
    expert = c // PP * gate.per_group + c % PP
    there = (c // PP < gate.groups) & (c % PP < gate.per_group)
    at = x.data + t[:, None].to(tl.int64) * x.row + expert[None, :].to(tl.int64) * x.column
    value = tl.load(at, mask=there[None, :] & (t[:, None] < T), other=float("-inf")).to(tl.float32)
    if gate.softmax is not None:
        top = tl.max(value, 1)
        # A NaN or +inf makes the whole row NaN by its sum; a row of -inf too.
        e = tl.where(value == top[:, None], value - top[:, None], exact_exp(value - top[:, None], tl.float32))
        e = tl.where((value == top[:, None]) & (tl.abs(top[:, None]) < float("inf")), 1.0, e)
        score = tl.div_rn(e, tl.sum(e, 1)[:, None])
    else:
        e = exact_exp(-tl.abs(value), tl.float32)
        near = tl.div_rn(1.0, 1 + e)
        score = tl.where(value < 0, e * near, near)
        score = tl.where(value == value, score, value)
    return expert, there, score


@triton.jit
def _largest(choice, c, END: tl.constexpr):
    """For each row, the first position of the largest value."""
    best = tl.max(choice, 1)
    return tl.min(tl.where(choice == best[:, None], c[None, :], END), 1)


@triton.jit
def _keep_groups(choice, gate, ROWS: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr):
    """Leaves the choice of the best groups; -inf elsewhere. A group's score: the sum of its two best, or its best."""
    parts = choice.reshape(ROWS, GP, PP)
    best = tl.max(parts, 2)
    if gate.softmax is None:
        p = tl.arange(0, PP)[None, None, :]
        first = tl.min(tl.where(parts == best[:, :, None], p, PP), 2)
        best += tl.max(tl.where(p == first[:, :, None], float("-inf"), parts), 2)
    group = tl.arange(0, GP)
    left = tl.where(group[None, :] < gate.groups, best, float("-inf"))
    kept = tl.zeros((ROWS, GP), tl.int32)
    for _ in range(gate.top_groups):
        free = tl.where(kept == 0, left, float("-inf"))
        most = tl.max(free, 1)
        taken = tl.min(tl.where((kept == 0) & (free == most[:, None]), group[None, :], GP), 1)
        kept = tl.where(group[None, :] == taken[:, None], 1, kept)
    return tl.where(kept[:, :, None] != 0, parts, float("-inf")).reshape(ROWS, GP * PP)


@triton.jit(do_not_specialize=["scale", "k"])
def _fwd(
    weights,
    indices,
    counts,
    x,
    bias,
    gate,
    T,
    k,
    scale,
    ROWS: tl.constexpr,
    GP: tl.constexpr,
    PP: tl.constexpr,
    KP: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, there, score = _scores(x, t, T, gate, GP, PP)
    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)[None, :]
    wrong = tl.max(tl.where(there[None, :] & (choice != choice), 1, 0), 1)
    # In a row with NaN all are equal, so its experts are the first k.
    choice = tl.where((wrong[:, None] != 0), 0.0, choice)
    if gate.limited is not None:
        choice = _keep_groups(tl.where(there[None, :], choice, float("-inf")), gate, ROWS, GP, PP)
    c, j = tl.arange(0, GP * PP), tl.arange(0, KP)
    taken = tl.zeros((ROWS, GP * PP), tl.int32) + tl.where(there, 0, 1)[None, :]
    found = tl.zeros((ROWS, KP), tl.int32)
    share = tl.zeros((ROWS, KP), tl.float32)
    for step in range(k):
        free = tl.where(taken == 0, choice, float("-inf"))
        best = tl.max(free, 1)
        first = tl.min(tl.where((taken == 0) & (free == best[:, None]), c[None, :], GP * PP), 1)
        here = c[None, :] == first[:, None]
        taken = tl.where(here, 1, taken)
        value = tl.sum(tl.where(here, score, 0.0), 1)
        found = tl.where(j[None, :] == step, (first // PP * gate.per_group + first % PP)[:, None], found)
        share = tl.where(j[None, :] == step, value[:, None], share)
    if gate.normalize is not None:
        share = tl.div_rn(share, (tl.sum(share, 1) + SMALL)[:, None])
    share = tl.where(wrong[:, None] != 0, float("nan"), share * scale)
    inside = (t[:, None] < T) & (j[None, :] < k)
    at = t[:, None].to(tl.int64) * k + j[None, :]
    tl.store(weights + at, share, mask=inside)
    tl.store(indices + at, found.to(tl.int64), mask=inside)
    # Whole numbers: their sum has no order.
    chosen = tl.sum(tl.where((t[:, None] < T) & there[None, :], taken, 0), 0)
    tl.atomic_add(counts + expert, chosen, mask=there & (chosen > 0), sem="relaxed")


@triton.jit(do_not_specialize=["scale", "k"])
def _bwd(dx, dw, x, indices, gate, T, k, scale, ROWS: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr):
    """dw: (T, k), float32, contiguous."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, there, score = _scores(x, t, T, gate, GP, PP)
    given = tl.zeros((ROWS, GP * PP), tl.float32)
    chosen = tl.zeros((ROWS, GP * PP), tl.int32)
    for j in range(k):
        at = t.to(tl.int64) * k + j
        here = expert[None, :] == tl.load(indices + at, mask=t < T, other=-1)[:, None]
        here &= there[None, :]
        given = tl.where(here, tl.load(dw + at, mask=t < T, other=0.0)[:, None] * scale, given)
        chosen = tl.where(here, 1, chosen)
    if gate.normalize is not None:
        total = tl.sum(tl.where(chosen != 0, score, 0.0), 1) + SMALL
        mean = tl.div_rn(tl.sum(tl.where(chosen != 0, given * score, 0.0), 1), total)
        given = tl.where(chosen != 0, tl.div_rn(given - mean[:, None], total[:, None]), 0.0)
    if gate.softmax is not None:
        if gate.normalize is None:  # else this sum is 0
            given -= tl.sum(given * score, 1)[:, None]
        d = score * given
    else:
        d = score * (1 - score) * given
    wrong = tl.max(tl.where(there[None, :] & (score != score), 1, 0), 1)
    d = tl.where(wrong[:, None] != 0, float("nan"), d)
    at = dx + t[:, None].to(tl.int64) * gate.experts + expert[None, :]
    tl.store(at, d.to(dx.dtype.element_ty), mask=there[None, :] & (t[:, None] < T))


def _gate(E: int, groups: int, top_groups: int, *flags: bool) -> Gate:
    return Gate(E, E // groups, groups, top_groups, *(1 if f else None for f in (top_groups < groups, *flags)))


def _tile(logits: torch.Tensor, groups: int) -> dict[str, Any]:
    """A program's rows: about 2048 numbers in the registers of 4 warps."""
    GP = triton.next_power_of_2(groups)
    PP = triton.next_power_of_2(logits.shape[1] // groups)
    return {"ROWS": max(1, min(16, 2048 // (GP * PP))), "GP": GP, "PP": PP, "num_warps": 4}


def fwd(
    weights: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor | None,
    k: int, softmax: bool, groups: int, top_groups: int, normalize: bool, scale: float
) -> None:  # fmt: skip
    T, E = logits.shape
    counts.fill_(0)
    tile = _tile(logits, groups)
    gate = _gate(E, groups, top_groups, softmax, normalize)
    tile["KP"] = triton.next_power_of_2(k)
    given = weights, indices, counts, Logits(logits, *logits.stride()), bias, gate, T, k, scale
    launch(_fwd, (triton.cdiv(T, tile["ROWS"]),), *given, **tile)


def bwd(
    dlogits: torch.Tensor, logits: torch.Tensor, dweights: torch.Tensor, indices: torch.Tensor, k: int, softmax: bool,
    groups: int, top_groups: int, normalize: bool, scale: float
) -> None:  # fmt: skip
    T, E = logits.shape
    tile = _tile(logits, groups)
    gate = _gate(E, groups, top_groups, softmax, normalize)
    given = dlogits, dweights, Logits(logits, *logits.stride()), indices, gate, T, k, scale
    launch(_bwd, (triton.cdiv(T, tile["ROWS"]),), *given, **tile)
