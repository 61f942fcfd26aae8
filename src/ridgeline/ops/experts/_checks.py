"""The checks of the arguments of grouped_matmul, topk_gate and moe."""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.op import RidgelineError, readable
from ridgeline.ops.experts import _few_bits
from ridgeline.ops.experts._arguments import alike, check_main_grad, tensors

WHOLE = (torch.int32, torch.int64)
ACTIVATIONS = ("silu", "swiglu_oai")
MOST = 1024  # experts of a gate, which a program holds in registers


def unfit(gate_up: Any, down: Any, scales: Any, zeros: Any) -> str | None:
    """Returns why kernels do not take codes, or None."""
    return _few_bits.unfit(*_few_bits.codes_of(gate_up, down, scales, zeros))


def grouped_matmul(x: Any, w: Any, offsets: Any, bias: Any, main_grad: Any) -> None:
    given = {n: t for n, t in (("bias", bias), ("main_grad", main_grad)) if t is not None}
    tensors("grouped_matmul", x=x, w=w, offsets=offsets, **given)
    alike("grouped_matmul", x=x, w=w, **({} if bias is None else {"bias": bias}))
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(w.shape)}"
        raise RidgelineError(f"grouped_matmul: x must be (T, K) and w (G, K, N), got {shapes}")
    if offsets.dtype != torch.int32 or offsets.shape != w.shape[:1]:
        found = f"{offsets.dtype} {tuple(offsets.shape)}"
        raise RidgelineError(f"grouped_matmul: offsets must be int32 ({w.shape[0]},), a group's end each, got {found}")
    if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
        wanted = w.shape[0], w.shape[2]
        raise RidgelineError(f"grouped_matmul: bias must be {tuple(wanted)}, got {tuple(bias.shape)}")
    if main_grad is not None:
        check_main_grad("grouped_matmul", main_grad, w)
    if readable(offsets):
        ends = [0, *offsets.tolist(), x.shape[0]]
        if ends != sorted(ends):
            found = str(ends[1:-1]) if len(ends) < 18 else f"{ends[1:9]} and so on"
            raise RidgelineError(f"grouped_matmul: offsets must rise from 0 to at most {x.shape[0]} rows, got {found}")


def topk_gate(logits: Any, k: Any, score: Any, bias: Any, groups: Any, top_groups: Any, scale: Any) -> None:
    tensors("topk_gate", logits=logits, **({} if bias is None else {"bias": bias}))
    fault = _gate_fault(logits, k, score, bias, groups, top_groups, scale)
    if fault:
        raise RidgelineError(f"topk_gate: {fault}")


def _gate_fault(logits: Any, k: Any, score: Any, bias: Any, groups: Any, top_groups: Any, scale: Any) -> str | None:
    if not logits.is_floating_point() or logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST:
        return (
            f"logits must be floating point (T, E) with 1 to {MOST} experts, got {logits.dtype} {tuple(logits.shape)}"
        )
    E = logits.shape[1]
    if score not in ("softmax", "sigmoid"):
        return f"score must be 'softmax' or 'sigmoid', got {score!r}"
    if bias is not None and (bias.shape != (E,) or not bias.is_floating_point()):
        return f"bias must be floating point ({E},), got {bias.dtype} {tuple(bias.shape)}"
    if type(groups) is not int or groups < 1 or E % groups:
        return f"groups must be an int that divides {E} experts, got {groups!r}"
    if type(top_groups) is not int or not 1 <= top_groups <= groups:
        return f"top_groups must be an int from 1 to {groups} groups, got {top_groups!r}"
    if score == "sigmoid" and top_groups < groups and E // groups < 2:
        return f"with sigmoid, groups need two experts or more, got {groups} groups of one"
    most = top_groups * (E // groups)
    if type(k) is not int or not 1 <= k <= most:
        return f"k must be an int from 1 to {most}, the experts of {top_groups} groups, got {k!r}"
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < abs(scale) < math.inf:
        return f"scale must be a finite number other than 0, got {scale!r}"
    return None


def moe(
    x: Any, weights: Any, indices: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, activation: Any,
    limit: Any, scales: Any, zeros: Any
) -> None:  # fmt: skip
    biases = {n: t for n, t in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)) if t is not None}
    tensors("moe", x=x, weights=weights, indices=indices, gate_up=gate_up, down=down, **biases)
    alike("moe", x=x, **({"gate_up": gate_up, "down": down} if scales is None else {}), **biases)
    each = 2 if scales is not None and gate_up.dtype == torch.uint8 else 1  # codes of an element
    sizes = ("(E, 2 I, H)", "(E, H, I)") if each == 1 else ("(E, 2 I, H / 2)", "(E, H, I / 2)")
    if gate_up.dim() != 3 or down.dim() != 3 or x.shape[-1] != each * gate_up.shape[2] or 0 in gate_up.shape:
        shapes = f"{tuple(x.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise RidgelineError(f"moe: x must be (..., H), gate_up {sizes[0]} and down {sizes[1]}, got {shapes}")
    (E, width, _), H = gate_up.shape, x.shape[-1]
    if width % 2 or down.shape != (E, H, width // 2 // each) or width // 2 % each:
        wanted = f"gate_up {sizes[0]} and down {sizes[1]} with H = {H}"
        raise RidgelineError(f"moe: weights must be {wanted}, got {tuple(gate_up.shape)} and {tuple(down.shape)}")
    if scales is not None:
        _few_bits.check(x, gate_up, down, scales, zeros)
    elif zeros is not None:
        raise RidgelineError("moe: zeros needs scales, but scales is None")
    rows = x.shape[:-1]
    if indices.dtype not in WHOLE or indices.shape[:-1] != rows or indices.dim() != x.dim() or not indices.shape[-1]:
        found = f"{indices.dtype} {tuple(indices.shape)}"
        raise RidgelineError(f"moe: indices must be int32 or int64 {(*rows, 'k')}, got {found}")
    if weights.shape != indices.shape or not weights.is_floating_point():
        found = f"{weights.dtype} {tuple(weights.shape)}"
        raise RidgelineError(f"moe: weights must be floating point {tuple(indices.shape)}, got {found}")
    for (name, bias), size in zip(biases.items(), [width] * (gate_up_bias is not None) + [H], strict=False):
        if bias.shape != (E, size):
            raise RidgelineError(f"moe: {name} must be {(E, size)}, got {tuple(bias.shape)}")
    if activation not in ACTIVATIONS:
        raise RidgelineError(f"moe: activation must be 'silu' or 'swiglu_oai', got {activation!r}")
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf
    ):
        raise RidgelineError(f"moe: limit must be None or a finite number above 0, got {limit!r}")
    if readable(indices) and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < E:
        found = f"{int(indices.min())} to {int(indices.max())}"
        raise RidgelineError(f"moe: indices must be from 0 to {E - 1}, got {found}")
