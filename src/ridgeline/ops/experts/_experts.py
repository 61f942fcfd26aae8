"""The launchers of moe in Triton: which kernels make the result and the gradients, in which order.

With tma, weights come by the copy engine (`_gated_tma`, `_products_tma`); backward copies the tokens into the pairs'
order.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.ops.experts import _few_bits, _gated_tma, _grouped, _pairs, _route

HOPPER = _grouped.HOPPER
_T = torch.Tensor
_Maybe = torch.Tensor | None


def fwd(
    y: _T, z: _T, order: _T, place: _T, ends: _T, x: _T, weights: _T, indices: _T, gate_up: _T, down: _T,
    gate_up_bias: _Maybe, down_bias: _Maybe, activation: str, limit: float | None, interleaved: bool, how: str,
    *few: _Maybe, tma: bool = False,
) -> None:  # fmt: skip
    """few: the scales and zeros of gate_up and down, if these are codes."""
    n, k, (E, width, _), H = indices.numel(), indices.shape[1], gate_up.shape, x.shape[1]
    if not few and not z.numel() and _pairs.few(x, indices, E):
        given = x, weights, indices, gate_up, down, gate_up_bias, down_bias
        return _pairs.fwd(y, *given, activation == "swiglu_oai", limit, interleaved)
    pairs = _route.Pairs(indices, order, place, ends)
    _route.route(pairs)
    h, rows = x.new_empty((n, width // 2)), x.new_empty((n, H))
    tokens, unit = _grouped.rows_of(x, order, k), (activation == "swiglu_oai", limit, interleaved)
    codes = _few_bits.codes_of(gate_up, down, few[:2], few[2:]) if few else None
    if codes is not None and not _few_bits.many(n, E):
        _few_bits.gated(h, tokens, codes[0], ends, gate_up_bias, *unit)
        _few_bits.product(rows, _grouped.rows_of(h), codes[1], ends, down_bias)
    else:
        room = x.new_empty(E * width * H if codes else 0)  # for one matrix after the other
        gate_up = _few_bits.in_full(room, codes[0]) if codes else gate_up
        kept = z if z.numel() else None
        _gated_tma.first(tma)(h, kept, tokens, gate_up, ends, gate_up_bias, *unit, how, rows)
        down = _few_bits.in_full(room, codes[1]) if codes else down
        _grouped.product(tma)(rows, _grouped.rows_of(h), down.mT, ends, down_bias, how)
    _route.combine(y, rows, weights, pairs, k)


def bwd(
    dx: _T, dweights: _T, dgate_up: _T, ddown: _T, dgate_up_bias: _T, ddown_bias: _T, dy: _T, x: _T, weights: _T,
    indices: _T, gate_up: _T, down: _T, down_bias: _Maybe, z: _T, order: _T, place: _T, ends: _T, activation: str,
    limit: float | None, interleaved: bool, how: str, over: bool, tma: bool = False,
) -> None:  # fmt: skip
    """over: dz lies in z's memory. h lies in dh's, and that in dgate_up's, which is written last."""
    n, k, (_, H, I) = indices.numel(), indices.shape[1], down.shape
    pairs = _route.Pairs(indices, order, place, ends)
    incoming, tokens = _grouped.rows_of(dy, order, k), _grouped.rows_of(x, order, k)
    product, weight_grad = _grouped.product(tma), _grouped.weight_grad(tma)
    dz = z if over else torch.empty_like(z)
    sums = torch.empty((n,), dtype=torch.float32, device=x.device)
    dh, rows = _lent(dgate_up, x, (n, I), (n, 0 if tma or not dx.numel() else H))
    rows = x.new_empty((n, H)) if tma else rows  # with tma of dy, then of dx, then of x

    def placed(source: _T, gathered: Any) -> Any:
        return _grouped.rows_of(_route.gather(rows, source, order, k)) if tma else gathered

    lines, h = placed(dy, incoming), dh if ddown.numel() else None
    product(dh, lines, down, ends, None, how)
    _gated_tma.ungated(dz, h, sums, dh, z, weights, order, ends, activation == "swiglu_oai", limit, interleaved)
    if dweights.numel():
        _route.weight_grads(dweights, sums, dy, down_bias, pairs)
    if h is not None:
        weight_grad(ddown, lines, _grouped.rows_of(h), n, ends, how, False)
    if dx.numel():
        product(rows, _grouped.rows_of(dz), gate_up, ends, None, how)
        _route.combine(dx, rows, None, pairs, k)
    if dgate_up.numel():
        weight_grad(dgate_up, _grouped.rows_of(dz), placed(x, tokens), n, ends, how, False)
    if dgate_up_bias.numel():
        _grouped.bias_grad(dgate_up_bias, _grouped.rows_of(dz), n, ends)
    if ddown_bias.numel():
        _grouped.bias_grad(ddown_bias, incoming, n, ends, weights)


def _lent(owner: _T, like: _T, *shapes: tuple[int, int]) -> list[_T]:
    """Returns matrices in the memory of a new tensor that is written after their last use, or in a new one."""
    sizes = [rows * columns for rows, columns in shapes]
    enough = sum(sizes) <= owner.numel()
    flat = owner.as_strided((owner.numel(),), (1,)) if enough else like.new_empty((sum(sizes),))
    return [part.view(s) for part, s in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def _given(*given: Any) -> tuple[_T, _T, _T]:
    """Returns indices, gate_up and down of a call's public arguments or of a launcher's inputs."""
    at = 3 if given[2].is_floating_point() else 2  # backward's begin with dy
    return given[at], given[at + 1], given[at + 2]


def refusal(*given: Any, **_: Any) -> str | None:
    """Returns why products with tma do not take a call, or None."""
    indices, gate_up, down = _given(*given)
    if not gate_up.is_floating_point():
        return "its experts are in full, and these are codes"
    if not indices.numel():
        return "there are no tokens"
    return _grouped.refusal(gate_up, down)


def unless(*given: Any, **_: Any) -> str | None:
    """Returns why automatic choice leaves a call to `triton`, or None."""
    indices, gate_up, _down = _given(*given)
    return _grouped.unless(indices.numel(), gate_up.shape[0])
