"""Shared by attention and attention_varlen: checks, the formula, the torch ops and the autograd function.

In a sequence of sq queries and sk keys, row i of q sees the keys j with i + off - left <= j <= i + off + right, where
off is sk - sq with `bottom`, else 0. The public options causal and window reduce to left, right and bottom.
Packed sequences use the same ops as (1, heads, tokens, D) views with cu_q and cu_k. If both are the same tensor, cu_k
is None, since torch.compile and replayed calls need distinct tensors as arguments.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Op, RidgelineError, dense_only
from ridgeline.ops.attention import _few, _hopper, _hopper_backward, _triton
from ridgeline.ops.attention._triton import UNBOUNDED
from ridgeline.select import run

HEAD_DIMS = 16, 256  # D is a multiple of 8 in this range
PIECE = 1 << 27  # scores that the reference holds in memory at a time
OPS: dict[bool, Op] = {}  # by whether sequences are packed
# Benchmarks off the grid: the default backward, and one with unordered sums, as peers have.
ORDERS: tuple[dict[str, Any], ...] = ({}, {"note": " out of order", "deterministic": False})


class Options(NamedTuple):
    """The public options, reduced, in the torch ops' order."""

    scale: float
    softcap: float  # 0 for none
    left: int
    right: int
    bottom: bool

    def band(self, sq: int, sk: int) -> tuple[int, int] | None:
        """Returns (low, high), so that row i sees the keys i + low to i + high; None if every row sees every key."""
        off = sk - sq if self.bottom else 0
        return (off - self.left, off + self.right) if min(self.left, self.right) < UNBOUNDED else None


def options(
    D: int, causal: bool | str = False, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None, **_: Any,
) -> Options:  # fmt: skip
    left, right = [UNBOUNDED if w is None or w < 0 else min(w, UNBOUNDED) for w in window or (None, None)]
    right = min(right, 0) if causal else right
    return Options(
        D**-0.5 if scale is None else float(scale), float(softcap or 0), left, right, causal == "bottom_right"
    )


def precision() -> str:
    """Returns the precision of float32 products, by PyTorch's setting."""
    return _precision()


@torch.compiler.assume_constant_result  # torch.compile guards on the setting
def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def fault(
    dims: int, q: Any, k: Any, v: Any, causal: Any, scale: Any, window: Any, softcap: Any, deterministic: Any
) -> str | None:  # fmt: skip
    """Returns what is wrong with a call, or None. dims: 4 for (batch, heads, tokens, D), 3 for packed sequences."""
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
    wrong = isinstance(deterministic, torch.Tensor) or deterministic not in (None, True, False)
    return f"deterministic must be None, True or False, got {deterministic!r}" if wrong else None


def usual(
    kernels: set[torch.dtype], dims: int, q: Any, k: Any, v: Any, causal: Any, deterministic: Any
) -> Options | None:
    """Returns the options of a call with only these arguments if kernels serve it and nothing needs a closer check.

    It is the fast path of the public functions; None means that the full checks decide.
    """
    if not (
        type(q) is type(k) is type(v) is torch.Tensor
        and q.is_cuda
        and q.layout is k.layout is v.layout is torch.strided
    ):
        return None
    device, shape, other = q.get_device(), q.shape, k.shape
    if (
        len(shape) != dims
        or q.dtype not in kernels
        or k.get_device() != device
        or v.get_device() != device
        or other != v.shape
    ):
        return None
    D, first = shape[-1], shape[0] == other[0] or dims == 3
    if (
        not first
        or len(other) != dims
        or other[-1] != D
        or D & 7
        or not 16 <= D <= 256
        or not other[1]
        or shape[1] % other[1]
    ):
        return None
    if not (q.dtype is k.dtype is v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1):
        return None
    if type(causal) is not bool or type(deterministic) not in (bool, type(None)) or torch.is_autocast_enabled("cuda"):
        return None
    return Options(D**-0.5, 0.0, UNBOUNDED, 0 if causal else UNBOUNDED, False)


def in_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors cast to autocast's dtype if it is enabled; anything else passes, and is refused later."""
    if not all([isinstance(t, torch.Tensor) for t in tensors]):
        return tensors
    kind = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind) or tensors[0].device.type != kind:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple([t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors])


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


def rounds_scores(q: torch.Tensor, *_: Any, return_lse: bool = False, **__: Any) -> str | None:
    """Returns why the formula in eager PyTorch does not take a call, or None."""
    half = return_lse and q.dtype in (torch.float16, torch.bfloat16)
    return "it rounds scores to half precision, which is too coarse for lse in float32" if half else None


# --- the formula


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    band: tuple[int, int] | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and lse, with all scores in memory. A row that sees no key has o 0 and lse -inf."""
    (batch, heads, rows, D), groups, columns = q.shape, k.shape[1], k.shape[2]
    # Queries that share keys become more rows of one head.
    folded = q.reshape(batch, groups, heads // max(groups, 1) * rows, D)
    s = (folded @ k.mT).view(batch, heads, rows, columns) * scale
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if band is not None:
        s = s.masked_fill(~seen(rows, columns, band, q.device), -math.inf)
    most = s.detach().amax(-1, keepdim=True) if columns else s.new_full((*s.shape[:-1], 1), -math.inf)
    empty = most == -math.inf
    most = most.masked_fill(empty, 0)
    e = (s - most).exp()
    total = e.sum(-1, keepdim=True).masked_fill(empty, 1)
    p = (e / total).to(q.dtype)
    o = (p.view(batch, groups, folded.shape[2], columns) @ v).view(q.shape)
    return o, (most + total.log()).masked_fill(empty, -math.inf)[..., 0]


def seen(rows: int, columns: int, band: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Returns (rows, columns), True where a row sees a column of its band."""
    apart = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    return (apart >= band[0]) & (apart <= band[1])


def in_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    band: tuple[int, int] | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`formula`, by heads and rows of queries if the scores would take too much memory; backward recomputes them."""
    (batch, heads, rows, _), groups, columns = q.shape, k.shape[1], k.shape[2]
    if batch * heads * rows * columns <= PIECE:
        return formula(q, k, v, mask, band, scale, softcap)
    size = max(1, PIECE // (heads // groups * columns))
    whole = None if mask is None else mask.expand(batch, heads, rows, columns)
    found: list[list[torch.Tensor]] = [[], []]
    for b, images in enumerate(zip(q.split(1), k.split(1), v.split(1), strict=True)):
        per_head = [t.split(t.shape[1] // groups, 1) for t in images]
        for h, (queries, keys, values) in enumerate(zip(*per_head, strict=True)):
            made = []
            for n, some in enumerate(queries.split(size, 2)):
                first, own = n * size, slice(h * (heads // groups), (h + 1) * (heads // groups))
                hidden = None if whole is None else whole[b : b + 1, own, first : first + size]
                moved = None if band is None else (band[0] + first, band[1] + first)
                args = some, keys, values, hidden, moved, scale, softcap
                made.append(checkpoint(formula, *args, use_reentrant=False, preserve_rng_state=False))
            for kept, pieces in zip(found, zip(*made, strict=True), strict=True):
                kept.append(torch.cat(pieces, 2))
    o, lse = [torch.cat(pieces, 1).view(batch, heads, *pieces[0].shape[2:]) for pieces in found]
    return o, lse


# --- the torch ops


def _like(t: torch.Tensor) -> torch.Tensor:
    """Allocates a result in t's order of dimensions: heads within tokens if t has them so."""
    order = (0, 2, 1, 3) if t.stride(1) < t.stride(2) else (0, 1, 2, 3)
    return torch.empty_permuted(t.shape, order, dtype=t.dtype, device=t.device)


_OPTIONS = "float scale, float softcap, int left, int right, bool bottom, int max_q, int max_k, str precision"


@kernel_op(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? cu_q, Tensor? cu_k, {_OPTIONS}, str? impl) "
    "-> (Tensor, Tensor)"
)
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_q: Any, cu_k: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (B, Hq, Sq, D) and lse (B, Hq, Sq), float32. max_q, max_k: the longest packed lengths, 0 if unknown."""
    o, lse = _like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run(OPS[cu_q is not None], "fwd", rest[-1], (o, lse), q, k, v, mask, cu_q, cu_k, *rest[:-1])
    return o, lse


@kernel_op(
    "attention_bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? mask, "
    f"Tensor? cu_q, Tensor? cu_k, {_OPTIONS}, bool deterministic, str? impl) -> (Tensor, Tensor, Tensor)"
)
def _backward(
    do: torch.Tensor, dlse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    mask: Any, cu_q: Any, cu_k: Any, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    do = do if do.stride(-1) == 1 else do.contiguous()
    dlse = dlse if dlse is None or dlse.is_contiguous() else dlse.contiguous()
    grads = _like(q), _like(k), _like(v)
    run(OPS[cu_q is not None], "bwd", rest[-1], grads, do, dlse, q, k, v, o, lse, mask, cu_q, cu_k, *rest[:-1])
    return grads


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        cu_q: Any,
        cu_k: Any,
        numbers: tuple[Any, ...],
        deterministic: bool,
        impl: Any,
    ) -> Any:
        o, lse = _forward(q, k, v, mask, cu_q, cu_k, *numbers, impl)
        ctx.save_for_backward(q, k, v, o, lse, mask, cu_q, cu_k)
        ctx.facts = *numbers, deterministic, impl
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        if do is None and dlse is None:
            return (None,) * 9
        saved = ctx.saved_tensors
        return *_backward(torch.zeros_like(saved[3]) if do is None else do, dlse, *saved, *ctx.facts), *(None,) * 6


def by_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, cu_q: Any, cu_k: Any, chosen: Options,
    longest: tuple[int, int], deterministic: bool | None, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o and lse, both differentiable.

    Raises RidgelineError inside `context_parallel`."""
    if sharded_sequence(torch.nn.functional.scaled_dot_product_attention):
        raise RidgelineError(
            "attention: inside torch's context_parallel a kernel would see this rank's keys only; "
            "call torch.nn.functional.scaled_dot_product_attention there"
        )
    numbers = *chosen, *longest, precision()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        same = deterministic is not False or torch.are_deterministic_algorithms_enabled()
        return differentiate(_Attention, q, k, v, mask, cu_q, cu_k, numbers, same, impl)
    return _forward(q, k, v, mask, cu_q, cu_k, *numbers, impl)


@torch.compiler.assume_constant_result
def sharded_sequence(function: Any) -> bool:
    """Returns whether torch's `context_parallel` is active: it shards sequences, and patches torch's own attention.

    function: that attention, as it is now. It is an argument so that torch.compile guards on it."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    replaced: Any = getattr(module, "_replaced_functions", None) or ()
    return function in replaced


def check(name: str, dims: int, q: Any, k: Any, v: Any, *given: Any) -> None:
    """Raises RidgelineError if q, k, v or the options are wrong."""
    dense_only(name, (q, k, v))
    wrong = fault(dims, q, k, v, *given)
    if wrong:
        raise RidgelineError(f"{name}: {wrong}")


def pairs(sq: int, sk: int, chosen: Options) -> int:
    """Returns how many pairs of a query and a key see each other."""
    band = chosen.band(sq, sk)
    if band is None:
        return sq * sk
    i = torch.arange(sq)
    return int(((i + band[1]).clamp(max=sk - 1) - (i + band[0]).clamp(min=0) + 1).clamp(min=0).sum())


def count(q: Any, k: Any, mask: Any, cu_q: Any, cu_k: Any, chosen: Options) -> int:
    """Returns the operations of the forward pass in the torch ops' arguments; lengths of packed sequences are read."""
    if mask is not None:
        seen = q.shape[2] * k.shape[2]
    elif cu_q is None:
        seen = pairs(q.shape[2], k.shape[2], chosen)
    else:
        lengths = [cu.diff().tolist() for cu in (cu_q, cu_q if cu_k is None else cu_k)]
        seen = sum(pairs(sq, sk, chosen) for sq, sk in zip(*lengths, strict=True))
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * seen


FLOPS: dict[str, Any] = {
    "attention_fwd": lambda q, k, v, mask, cu_q, cu_k, *o: count(q, k, mask, cu_q, cu_k, Options(*o[:5])),
    "attention_bwd": lambda do, dlse, q, k, v, o, lse, mask, cu_q, cu_k, *options: (
        count(q, k, mask, cu_q, cu_k, Options(*options[:5])) * 5 // 2
    ),
}

# Facts of the implementations that both ops have.
TRITON: dict[str, Any] = {"kind": "triton", "fwd": _few.fwd, "bwd": _triton.bwd, "supports": refusal, "served": True}
GLUON: dict[str, Any] = {
    "kind": "gluon",
    "dtypes": ("float16", "bfloat16"),
    "arch": 90,
    "newest": 90,
    "fwd": _hopper.fwd,
    "bwd": _hopper_backward.bwd,
    "supports": _hopper.refusal,
    "served": True,
    "unless": _few.aside,
    "leaves": ("fwd",),
}
