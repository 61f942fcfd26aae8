"""The arguments of attention and attention_varlen: what is wrong with them, and the options in the kernels' terms.

In a sequence of sq queries and sk keys, row i of q sees the keys j with i + off - left <= j <= i + off + right, where
off is sk - sq with `bottom`, else 0, and those with j < prefix. The public options causal, window and window_align
reduce to left, right and bottom.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ridgeline.op import RidgelineError, dense_only
from ridgeline.ops.attention.common.band import Band

HEAD_DIMS = 16, 256  # D is a multiple of 8 in this range
UNBOUNDED = 1 << 30  # left or right of a query that sees all keys on that side
LOG2E = 1.4426950408889634


class Options(NamedTuple):
    """The public options, reduced, in the torch ops' order."""

    scale: float
    softcap: float  # 0 for none
    left: int
    right: int
    bottom: bool
    prefix: int  # 0 for none

    def band(self, sq: int, sk: int) -> Band | None:
        """Returns what a sequence's rows see; None if every row sees every key."""
        off = sk - sq if self.bottom else 0
        bounded = min(self.left, self.right) < UNBOUNDED
        return Band(off - self.left, off + self.right, self.prefix) if bounded else None


def exponents(scale: float, softcap: float) -> tuple[float, float]:
    """Returns `factor` and `share`: what scores, or their tanh, are multiplied by in exponentials of base 2, and what
    scores are multiplied by in that of the tanh (0 without a softcap)."""
    return (softcap or scale) * LOG2E, 2 * LOG2E * scale / softcap if softcap else 0.0


def options(
    D: int, causal: bool | str = False, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None, window_align: str | None = None, prefix: int | None = None, **_: Any,
) -> Options:  # fmt: skip
    left, right = [UNBOUNDED if w is None or w < 0 else min(w, UNBOUNDED) for w in window or (None, None)]
    right = min(right, 0) if causal else right
    bottom = "bottom_right" in (causal, window_align)
    return Options(D**-0.5 if scale is None else float(scale), float(softcap or 0), left, right, bottom, prefix or 0)


def precision() -> str:
    """Returns the precision of float32 products, by PyTorch's setting."""
    return _precision()


@torch.compiler.assume_constant_result  # torch.compile guards on the setting
def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _tensor_fault(dims: int, q: Any, k: Any, v: Any) -> str | None:
    """Returns what is wrong with q, k and v, or None. dims: 4 for (batch, heads, tokens, D), 3 for packed sequences."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, got {type(t).__name__}"
        form = "(batch, heads, tokens, D)" if dims == 4 else "(tokens, heads, D)"
        if t.dim() != dims:
            return f"{name} must be {form}, got {tuple(t.shape)}"
        if t.dtype != q.dtype or not t.is_floating_point() or t.element_size() < 2:
            kinds = ", ".join([str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in (q, k, v)])
            return f"q, k and v must have one floating-point dtype, float32, float16 or bfloat16, got {kinds}"
        if t.device != q.device:
            return f"{name} and q must be on one device, got {t.device} and {q.device}"
    heads, D = (q.shape[1], k.shape[1]), q.shape[-1]
    if k.shape != v.shape or k.shape[-1] != D or (dims == 4 and k.shape[0] != q.shape[0]):
        same = "batch and D" if dims == 4 else "D"
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        return f"k and v must have the same shape, and q's {same}, got q, k and v of {shapes}"
    if D % 8 or not HEAD_DIMS[0] <= D <= HEAD_DIMS[1]:
        return f"D must be a multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, got {D}"
    if heads[0] % max(heads[1], 1) or (heads[0] and not heads[1]):
        return f"q must have a multiple of k's and v's heads, got {heads[0]} and {heads[1]}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.layout is torch.strided and t.stride(-1) != 1:
            fix = f"got stride {t.stride(-1)}; pass {name}.contiguous()"
            return f"the last dimension of {name} must be contiguous (stride 1), {fix}"
    return None


def _option_fault(
    causal: Any, scale: Any, window: Any, softcap: Any, deterministic: Any, window_align: Any, prefix: Any
) -> str | None:
    """Returns what is wrong with the options, or None."""
    if isinstance(causal, torch.Tensor) or causal not in (False, True, "bottom_right"):
        return f'causal must be False, True (aligned at the top left) or "bottom_right", got {causal!r}'
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        return f"scale must be None for 1/sqrt(D) or a finite number, got {scale!r}"
    if softcap is not None and not (isinstance(softcap, int | float) and 0 < softcap < math.inf):
        return f"softcap must be None or a finite number above 0, got {softcap!r}"
    if window is not None:
        pair = isinstance(window, tuple | list) and len(window) == 2
        if not pair or any(w is not None and (type(w) is not int or w < -1) for w in window):
            return f"window must be None or (left, right), each at least 0, or None or -1 for unbounded, got {window!r}"
    if isinstance(window_align, torch.Tensor) or window_align not in (None, "top_left", "bottom_right"):
        return f'window_align must be None, "top_left" or "bottom_right", got {window_align!r}'
    if window_align is not None and causal and (window_align == "bottom_right") != (causal == "bottom_right"):
        return f"causal aligns the window too, so it and window_align must agree, got {causal!r} and {window_align!r}"
    if prefix is not None:
        if type(prefix) is not int or not 0 <= prefix < UNBOUNDED:
            return f"prefix must be None or a number of keys, an int of at least 0, got {prefix!r}"
        if not causal or window not in (None, (None, None), (-1, -1)):
            return f"prefix needs causal and no window, got causal={causal!r} and window={window!r}"
    wrong = isinstance(deterministic, torch.Tensor) or deterministic not in (None, True, False)
    return f"deterministic must be None, True or False, got {deterministic!r}" if wrong else None


def _sink_fault(q: Any, sinks: Any) -> str | None:
    """Returns what is wrong with the sinks, or None."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor):
        return f"sinks must be a tensor or None, got {type(sinks).__name__}"
    if sinks.shape != (q.shape[1],) or not sinks.is_floating_point() or sinks.element_size() < 2:
        given = f"{sinks.dtype} {tuple(sinks.shape)}"
        return f"sinks must be a floating-point logit for each head of q, ({q.shape[1]},), got {given}"
    return None if sinks.device == q.device else f"sinks and q must be on one device, got {sinks.device} and {q.device}"


def in_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors cast to autocast's dtype if it is enabled; anything else passes, and is refused later."""
    if not all([isinstance(t, torch.Tensor) for t in tensors]):
        return tensors
    kind = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind) or tensors[0].device.type != kind:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple([t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors])


def column_parts(D: int) -> tuple[int, int]:
    """Returns powers of two that hold D: one, or two if their sum is smaller (80 = 64 + 16)."""
    whole = max(16, 1 << (D - 1).bit_length())
    rest = max(16, 1 << (D - whole // 2 - 1).bit_length())
    return (whole // 2, rest) if 16 <= whole // 2 and whole // 2 + rest < whole else (whole, 0)


def whole(t: torch.Tensor) -> bool:
    """Returns whether TMA can address t: it and its rows begin at multiples of 16 bytes, and it is not expanded."""
    return t.data_ptr() % 16 == 0 and not any(
        [n > 1 and (step % 8 or not step) for n, step in zip(t.shape[:-1], t.stride(), strict=False)]
    )


def refusal(x: torch.Tensor, *rest: Any, **_: Any) -> str | None:
    """Returns why kernels do not take a call, or None. Takes public arguments or a launcher's inputs."""
    D = x.shape[-1]
    if D % 8 or not HEAD_DIMS[0] <= D <= HEAD_DIMS[1]:
        return f"D must be a multiple of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, got {D}"
    if any(
        [isinstance(t, torch.Tensor) and t.dim() == x.dim() and t.stride(-1) != 1 and t.numel() for t in (x, *rest[:2])]
    ):
        return "the last dimension of q, k and v must be contiguous"
    return None


def fault(dims: int, q: Any, k: Any, v: Any, sinks: Any, *given: Any) -> str | None:
    """Returns what is wrong with q, k, v, the sinks or the options, or None."""
    return _tensor_fault(dims, q, k, v) or _option_fault(*given) or _sink_fault(q, sinks)


def check(name: str, dims: int, q: Any, k: Any, v: Any, sinks: Any, *given: Any) -> None:
    """Raises RidgelineError if q, k, v, the sinks or the options are wrong."""
    dense_only(name, (q, k, v) if sinks is None else (q, k, v, sinks))
    wrong = fault(dims, q, k, v, sinks, *given)
    if wrong:
        raise RidgelineError(f"{name}: {wrong}")
