"""grouped_matmul and moe in PyTorch's own operations: a product for each group, or torch's grouped_mm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.ops.experts import _few_bits
from ridgeline.ops.experts._arguments import Into, values

_T = torch.Tensor
_Maybe = torch.Tensor | None


def by_group(x: _T, w: _T, offsets: _T, *, bias: _Maybe = None, main_grad: _Maybe = None) -> _T:
    """A product for each group. Without values of the offsets, as while tracing: of all rows, by masks."""
    ends = values(offsets)
    w = w if main_grad is None else Into.apply(w, main_grad)
    if ends is None:
        return _by_masks(x, w, offsets, bias)
    parts = [x[s:e] @ one for s, e, one in zip([0, *ends], ends, w.unbind(), strict=False)]
    parts = parts if bias is None else [part + one for part, one in zip(parts, bias.unbind(), strict=True)]
    tail = x.shape[0] - (ends[-1] if ends else 0)
    return torch.cat([*parts, x.new_zeros((tail, w.shape[2]))])


def _by_masks(x: _T, w: _T, offsets: _T, bias: _Maybe) -> _T:
    """Each group's product of all rows, kept where a row is in the group."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    y = x.new_zeros((x.shape[0], w.shape[2]))
    for g in range(w.shape[0]):
        inside = (row < offsets[g]) & (row >= (offsets[g - 1] if g else 0))
        part = torch.where(inside, x, 0) @ w[g]
        y = y + torch.where(inside, part if bias is None else part + bias[g], 0)
    return y


def grouped_mm(x: _T, w: _T, offsets: _T, *, bias: _Maybe = None, main_grad: _Maybe = None) -> _T:
    """torch leaves rows past the last end as they were, in y and in dx."""
    w = w if main_grad is None else Into.apply(w, main_grad)
    row = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    inside = (row < offsets[-1])[:, None]
    y = F.grouped_mm(torch.where(inside, x, 0), w, offs=offsets)
    if bias is not None:
        y = y + bias[torch.searchsorted(offsets, row, right=True).clamp(max=w.shape[0] - 1)]
    return torch.where(inside, y, 0)


def not_grouped_mm(x: _T, w: _T, *_: Any, **__: Any) -> str | None:
    """Returns why torch's grouped_mm does not take a call, or None."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return f"torch's grouped_mm takes bfloat16 on a GPU, and x is {x.dtype} on {x.device.type}"
    if w.numel() >= 1 << 31:
        return "torch's grouped_mm is not called for a w of 2^31 elements or more: 2.11 broke the GPU's context"
    for t in (x, w):
        *_, row, column = t.stride()
        if 1 not in (row, column) or max(row, column) % 8 or t.data_ptr() % 16 or 0 in t.shape:
            return "torch's grouped_mm takes rows or columns of multiples of 16 bytes"
    return None if w.shape[0] and x.shape[1] % 8 == 0 == w.shape[2] % 8 else "torch's grouped_mm takes K and N by 8"


def in_full(dtype: torch.dtype, gate_up: _T, down: _T, scales: Any, zeros: Any) -> tuple[_T, _T]:
    """Returns codes of both matrices as weights in a dtype."""
    return _few_bits.dense(dtype, *_few_bits.codes_of(gate_up, down, scales, zeros))


def unit(z: _T, activation: str, limit: float | None, interleaved: bool) -> _T:
    gate, up = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up if activation == "silu" else (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def sorted_pairs(
    product: Callable[..., _T], x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *, gate_up_bias: _Maybe = None,
    down_bias: _Maybe = None, activation: str = "silu", limit: float | None = None, interleaved: bool = False,
    scales: Any = None, zeros: Any = None
) -> _T:  # fmt: skip
    """Pairs sorted by expert, two grouped products and a gather. Codes become weights in x's dtype first."""
    if scales is not None:
        gate_up, down = in_full(x.dtype, gate_up, down, scales, zeros)
    (T, k), E = indices.shape, gate_up.shape[0]
    known = (indices >= 0) & (indices < E)
    expert = torch.where(known, indices, E).flatten()
    order = expert.argsort(stable=True)
    ends = (expert[:, None] == torch.arange(E, device=x.device)).sum(0).cumsum(0).to(torch.int32)
    z = product(x[order // k], gate_up.mT, ends, bias=gate_up_bias)
    rows = product(unit(z, activation, limit, interleaved), down.mT, ends, bias=down_bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (rows[order.argsort()].view(T, k, x.shape[1]).to(wide) * weights.to(wide)[..., None]).sum(1)
    return torch.where(known.all(-1, keepdim=True), y, math.nan).to(x.dtype)


def not_sorted_pairs(x: _T, *_: Any, **__: Any) -> str | None:
    if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and x.shape[-1] % 8 == 0:
        return None
    found = f"{x.dtype} {tuple(x.shape)} on {x.device.type}"
    return f"torch's grouped_mm takes bfloat16 on a GPU, with rows of multiples of 16 bytes, not {found}"
