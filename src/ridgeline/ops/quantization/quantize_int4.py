"""quantize_int4: 4-bit codes of a weight in groups along K, with a scale for each group, and a zero.

    symmetric:   scale = max |w| / 7              q = round(w / scale) + 8                 zero is 8
    asymmetric:  scale = (max - min) / 15         q = round(w / scale) + zero,             zero = round(-min / scale)

0 is always in the range, and has a code of its own. Two codes are a byte, the even k in its low half. This is done once
for a weight, so it is plain PyTorch, or torch.compile.
Source: Frantar et al., GPTQ, 2022 (arXiv:2210.17323), for the codes; rounding to nearest.
"""

from __future__ import annotations

import torch

from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.quantization._groups import LEAST, RIGHT, checked
from ridgeline.select import eager


def reference(
    w: torch.Tensor, *, group: int = 128, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    wide = torch.promote_types(w.dtype, torch.float32)
    v = w.detach().float().unflatten(1, (-1, group))  # codes are defined by float32 arithmetic

    def code(t: torch.Tensor) -> torch.Tensor:
        return torch.where(t.isnan(), 0, t).clamp(-64, 64).round()

    if symmetric:
        scale = (_most(v.abs()) * (1 / 7)).clamp(min=LEAST)
        away = torch.full_like(scale, 8)
    else:
        low, high = _most(-v).clamp(min=0), _most(v).clamp(min=0)
        scale = ((high * 0.5 + low * 0.5) * (2 / 15)).clamp(min=LEAST)
        away = code(low / scale).clamp(0, 15)
    q = (code(v / scale) + away).clamp(0, 15).to(torch.uint8).flatten(1)
    zero = None if symmetric else away.squeeze(-1).to(torch.uint8)
    return q[:, ::2] | q[:, 1::2] << 4, scale.squeeze(-1).to(wide), zero


def _most(v: torch.Tensor) -> torch.Tensor:
    """Returns the largest number of each group, infinity for NaN."""
    return torch.where(v.isnan(), float("inf"), v).amax(-1, keepdim=True)


def quantize_int4(
    w: torch.Tensor, *, group: int = 128, symmetric: bool = False, impl: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A weight as 4-bit codes: (q, scale, zero) for `int4_linear`; w is about (q - zero) * scale.

    w: (N, K), floating point, any strides. group: the columns that share a scale; it divides K, and K is even.
    symmetric: codes are 1 to 15, and the zero is 8, returned as None; else 0 to 15 cover the range, extended by 0.
    Returns q, uint8 (N, K / 2), the even k in the low half of a byte; scale, float32 (N, K / group); zero, uint8,
    alike, or None. It has no gradients.
    w / scale is rounded to float32, then to the nearest integer, ties to even. A scale is at least 2^-126 (all zeros),
    and infinite if its numbers hold an infinity or NaN.
    Raises RidgelineError if w is not a floating-point matrix, if group does not divide K, or if `impl` cannot run.
    """
    w = checked("quantize_int4", w)
    if w.dim() != 2:
        raise RidgelineError(f"quantize_int4: w must be (N, K), but is {tuple(w.shape)}")
    if not isinstance(symmetric, bool):
        raise RidgelineError(f"quantize_int4: symmetric must be True or False, but is {symmetric!r}")
    if not isinstance(group, int) or group < 1 or w.shape[1] % group or w.shape[1] % 2 or not w.shape[1]:
        raise RidgelineError(f"quantize_int4: group must divide K, which is even, but is {group!r} with K {w.shape[1]}")
    plain = eager(QUANTIZE_INT4, impl, w)
    assert plain is not None  # it has no kernels
    return plain.call(w.detach(), group=group, symmetric=symmetric)  # type: ignore[misc]


def cost(w: torch.Tensor, *, group: int = 128, symmetric: bool = False) -> tuple[Cost, None]:
    scales = w.numel() // group * (4 if symmetric else 5)
    return Cost(nbytes(w), w.numel() // 2 + scales, 4 * w.numel()), None


QUANTIZE_INT4 = Op(
    quantize_int4,
    reference=reference,
    cost=cost,
    sharding="w nK -> nK",
    cases=[
        Case("5x256", (Spec(5, 256, grad=False),)),
        Case("5x192 groups of 64", (Spec(5, 192, grad=False),), {"group": 64}),
        Case("1024x1024", (Spec(1024, 1024, grad=False),), use="quick"),
        Case("14336x4096", (Spec(14336, 4096, grad=False),), dtypes=("bfloat16",), use="bench"),
    ],
)

QUANTIZE_INT4.eager("naive", "the formula in eager PyTorch: about ten passes over memory", reference, served=True)
QUANTIZE_INT4.compiled("the formula fused by torch.compile, with correctly rounded quotients", options=RIGHT)
