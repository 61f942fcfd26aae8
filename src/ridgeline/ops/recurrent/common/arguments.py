"""What the arguments of the recurrent ops must be, and gates for their cases."""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.op import RidgelineError, Spec, dense_only, readable

FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float64
MOST = 256  # columns of q, k and v
LOGS = "g", "w"  # the logarithms of decays


class Decay(Spec):
    """Random logarithms of decays, from about -1 to 0."""

    def make(self, *args: Any) -> torch.Tensor:
        made = super().make(*args)
        return torch.nn.functional.logsigmoid(made.detach() + 2).requires_grad_(made.requires_grad)


def check(
    name: str, keys: dict[str, Any], v: tuple[str, Any], gates: dict[str, tuple[Any, tuple[str, ...]]], given: Any
) -> None:
    """Raises RidgelineError if the arguments do not fit together.

    keys: q and k by name, (B, T, H, K). v: its name and value, (B, T, HV, V). gates: tensors by name, with the forms
    they may have, such as "BTHK", whose letters are those sizes. given: a `Given`."""
    dense_only(name, [*keys.values(), v[1], *[t for t, _ in gates.values()], *given])
    wrong = _fault(keys, v, gates, given)
    if wrong:
        raise RidgelineError(f"{name}: {wrong}")


def _fault(keys: dict[str, Any], v: tuple[str, Any], gates: dict[str, Any], given: Any) -> str | None:
    named = {**keys, v[0]: v[1], **{n: t for n, (t, _) in gates.items()}}
    optional = {"initial_state": given.initial_state, "cu_seqlens": given.cu_seqlens}
    for name, t in (named | optional).items():
        if not isinstance(t, torch.Tensor) and (t is not None or name in named):
            return f"{name} must be a tensor, but is {type(t).__name__}"
    (qn, q), vn, value = next(iter(keys.items())), *v
    for name, t in [*keys.items(), v]:
        if t.dtype != q.dtype or t.dtype not in FLOATS:
            kinds = ", ".join(str(x.dtype) for x in (*keys.values(), value))
            return f"{', '.join([*keys, vn])} must share one dtype, float32, float16 or bfloat16, but have {kinds}"
        if t.dim() != 4 or t.shape[:2] != q.shape[:2]:
            return f"{name} must be (B, T, heads, columns) with {qn}'s B and T, but is {tuple(t.shape)}"
        if not 1 <= t.shape[3] <= MOST:
            return f"{name} must have 1 to {MOST} columns, but has {t.shape[3]}"
    if any(t.shape != q.shape for t in keys.values()):
        both = " and ".join(str(tuple(t.shape)) for t in keys.values())
        return f"{' and '.join(keys)} must have one shape, but are {both}"
    if not q.shape[2] or value.shape[2] % q.shape[2]:
        return f"{vn} must have a multiple of {qn}'s heads, but has {value.shape[2]} for {q.shape[2]}"
    for name, t in named.items():
        if t.device != q.device:
            return f"{name} is on {t.device} but {qn} on {q.device}; they must share one device"
        if t.dim() > 2 and t.stride(-1) != 1 and t.shape[-1] > 1 and name not in gates:
            return f"the last dimension of {name} must be contiguous (stride 1), but has stride {t.stride(-1)}"
    sizes = dict(zip("BTHKRV", (*q.shape, *value.shape[2:]), strict=True))  # R: v's heads
    for name, (t, forms) in gates.items():
        shapes: list[Any] = [tuple(sizes[letter] for letter in form) for form in forms]
        # By elements: torch.compile of PyTorch 2.11 cannot compare tuples of symbolic sizes.
        fits = any([len(s) == t.dim() and all([a == b for a, b in zip(t.shape, s, strict=True)]) for s in shapes])
        if not t.is_floating_point() or not fits:
            accepted = " or ".join(dict.fromkeys(map(str, shapes)))
            return f"{name} must be {accepted} in a floating-point dtype, but is {t.dtype} {tuple(t.shape)}"
        if name in LOGS and readable(t) and bool((t > 0).any()):
            return f"{name} is the logarithm of a decay and must be at most 0, but its largest is {t.max().item():g}"
    if given.inplace and torch.is_grad_enabled() and any([t.requires_grad for t in named.values()]):
        return "inplace has no gradients; call it under torch.no_grad() or without inplace"
    return _state_fault(q, value, given)


def _state_fault(q: torch.Tensor, v: torch.Tensor, given: Any) -> str | None:
    first, ends = given.initial_state, given.cu_seqlens
    if given.scale is not None and not (isinstance(given.scale, int | float) and math.isfinite(given.scale)):
        return f"scale must be None or a finite number, but is {given.scale!r}"
    sequences = q.shape[0]
    if ends is not None:
        if ends.dtype != torch.int32 or ends.dim() != 1 or not ends.numel() or ends.device != q.device:
            return (
                f"cu_seqlens must be (sequences + 1,) in int32 on {q.device}, but is {ends.dtype} {tuple(ends.shape)}"
            )
        if q.shape[0] != 1:
            return f"packed sequences need a batch of 1, but it is {q.shape[0]}"
        sequences = ends.numel() - 1
        if readable(ends):
            places = ends.tolist()
            if places[0] or places[-1] != q.shape[1] or sorted(places) != places:
                return f"cu_seqlens must rise from 0 to the {q.shape[1]} tokens, but is {places}"
    if first is not None:
        shape = (sequences, v.shape[2], q.shape[3], v.shape[3])
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if first.shape != shape or first.dtype != wide or first.device != q.device:
            kind = str(wide)[6:]
            return f"initial_state must be {shape} in {kind} on {q.device}, but is {first.dtype} {tuple(first.shape)}"
    if given.inplace:
        if first is None:
            return "inplace needs an initial_state, and it is None"
        if torch.is_grad_enabled() and first.requires_grad:
            return "inplace has no gradients; call it under torch.no_grad() or without inplace"
        if not first.is_contiguous() and not (q.shape[1] == 1 and first.mT.is_contiguous()):
            return f"inplace needs a contiguous initial_state, but its strides are {first.stride()}"
    return None
