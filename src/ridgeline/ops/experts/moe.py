"""moe: y_t = sum_j w_tj down_e act(gate_e x_t) (up_e x_t), e = index_tj: the chosen experts of each token.

    backward: g = down_e^T dy_t,  dw_tj = g . h,  dz = w_tj g h'(z),  dx_t = sum_j gate_up_e^T dz
              dgate_up_e = sum of its dz x_t^T,  ddown_e = sum of its w_tj dy_t h^T

Pairs (token, expert) get places by expert without a sort, products gather tokens where they read them, and each token's
results are summed in order. Backward keeps z = gate_up x alone: no copies of tokens, and no outputs of experts.
Source: Shazeer et al., Outrageously large neural networks, 2017 (arXiv:1701.06538); Gale et al., MegaBlocks, 2022
(arXiv:2211.15841); the weights' gradients as in Guo et al., SonicMoE, 2025 (arXiv:2512.14080).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, alone, differentiate, first_order, kernel_op, last_backward
from ridgeline.op import Cost, Implementation, Op, RidgelineError, get, nbytes
from ridgeline.ops.experts import _checks, _experts, _plain
from ridgeline.ops.experts._arguments import cast, precision
from ridgeline.ops.experts._cases import CASES
from ridgeline.replay import Sure
from ridgeline.select import by_kind, eager, run
from ridgeline.tiles.few_bits import words

_T = torch.Tensor
_Maybe = torch.Tensor | None
_GIVEN = (
    "Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
)
_OPTIONS = "str activation, float? limit, bool interleaved"


@kernel_op(
    f"moe_fwd({_GIVEN}, {_OPTIONS}, bool keep, str precision, str? impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _fwd_op(x: _T, weights: _T, indices: _T, gate_up: _T, *rest: Any) -> tuple[_T, ...]:
    """Returns y, z (or nothing), and the pairs' order, places and ends of groups."""
    return _outputs(x, weights, indices, gate_up, *rest)


@kernel_op(f"moe_alone({_GIVEN}, {_OPTIONS}, str precision, str? impl) -> Tensor")
def _alone_op(x: _T, *rest: Any) -> _T:
    """`moe_fwd`'s y, where no gradient is wanted."""
    *given, how, impl = rest
    return _outputs(x, *given, False, how, impl)[0]


def _outputs(x: _T, weights: _T, indices: _T, gate_up: _T, *rest: Any) -> tuple[_T, ...]:
    *given, keep, how, impl = rest
    n, (E, width, _) = indices.numel(), gate_up.shape
    z = x.new_empty((n, width) if keep else (0, width))
    order, place, ends = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (n, n, E))
    y = x.new_empty(x.shape)
    run(MOE, "fwd", impl, (y, z, order, place, ends), x, weights, indices, gate_up, *given, how)
    return y, z, order, place, ends


_BACK = (
    "Tensor dy, {given}, Tensor{z} z, Tensor order, Tensor place, Tensor ends, {options}, bool of_x, bool of_weights, "
)
_BACK += "bool of_gate_up, bool of_down, str precision, str? impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


@kernel_op("moe_bwd(" + _BACK.format(given=_GIVEN, options=_OPTIONS, z=""))
def _bwd_op(*given: Any) -> tuple[_T, ...]:
    """Returns the gradients of x, weights, gate_up, down and the biases, empty where they are not wanted."""
    return _gradients(False, *given)


@kernel_op("moe_consume(" + _BACK.format(given=_GIVEN, options=_OPTIONS, z="(a!)"))
def _consume_op(*given: Any) -> tuple[_T, ...]:
    """`moe_bwd`, which leaves z's gradient in z's memory."""
    return _gradients(True, *given)


def _gradients(
    over: bool, dy: _T, x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, gate_up_bias: _Maybe,
    down_bias: _Maybe, *rest: Any
) -> tuple[_T, ...]:  # fmt: skip
    *saved, activation, limit, interleaved, of_x, of_weights, of_gate_up, of_down, how, impl = rest
    nothing = (0, *gate_up.shape[1:])

    def room(like: _Maybe, wanted: bool) -> _T:
        return x.new_empty(nothing) if like is None or not wanted else torch.empty_like(like)

    wanted = (x, of_x), (weights, of_weights), (gate_up, of_gate_up), (down, of_down)
    made = tuple([room(*w) for w in (*wanted, (gate_up_bias, of_gate_up), (down_bias, of_down))])
    given = x, weights, indices, gate_up, down, down_bias
    run(MOE, "bwd", impl, made, dy, *given, *saved, activation, limit, interleaved, how, over)
    return made


@kernel_op(
    "moe_few_bits(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, Tensor gate_up_scale, Tensor down_scale, Tensor? gate_up_zero, Tensor? down_zero, "
    f"{_OPTIONS}, str precision, str? impl) -> Tensor"
)
def _few_op(x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *rest: Any) -> _T:
    gate_up_bias, down_bias, s, t, p, q, *options, impl = rest
    n, E = indices.numel(), gate_up.shape[0]
    order, place, ends = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (n, n, E))
    y, codes = x.new_empty(x.shape), (words(gate_up), words(down))
    given = x, weights, indices, *codes, gate_up_bias, down_bias, *options, s, t, p, q
    run(MOE, "fwd", impl, (y, x.new_empty(0), order, place, ends), *given)
    return y


class _Function(Function):
    @staticmethod
    def forward(
        ctx: Any, x: _T, weights: _T, gate_up: _T, down: _T, gate_up_bias: _Maybe, down_bias: _Maybe, indices: _T,
        activation: str, limit: float | None, interleaved: bool, keep: bool, impl: str | None
    ) -> _T:  # fmt: skip
        given = x, weights, indices, gate_up, down, gate_up_bias, down_bias
        options = activation, limit, interleaved
        y, *saved = _fwd_op(*given, *options, keep, precision(), impl)
        ctx.save_for_backward(*given, *saved)
        ctx.options, ctx.impl, ctx.lone = options, impl, alone(x)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        of = ctx.needs_input_grad
        wanted = of[0], of[1], of[2] or of[4], of[3] or of[5]
        back = _consume_op if ctx.lone and last_backward() else _bwd_op
        made = back(dy.contiguous(), *ctx.saved_tensors, *ctx.options, *wanted, precision(), ctx.impl)
        return *(m if w else None for m, w in zip(made, of[:6], strict=True)), *[None] * 6


def reference(
    x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *, gate_up_bias: _Maybe = None, down_bias: _Maybe = None,
    activation: str = "silu", limit: float | None = None, interleaved: bool = False, scales: Any = None,
    zeros: Any = None
) -> _T:  # fmt: skip
    """Every expert of every token, times the weight with which the token chose it, which is mostly 0."""
    given, E = x.dtype, gate_up.shape[0]
    if scales is not None:
        wide = torch.promote_types(given, torch.float32)
        gate_up, down = _plain.in_full(wide, gate_up, down, scales, zeros)
        x, gate_up_bias, down_bias = (t if t is None else t.to(wide) for t in (x, gate_up_bias, down_bias))
    weights = weights.to(torch.promote_types(x.dtype, weights.dtype))
    known = ((indices >= 0) & (indices < E)).all(-1, keepdim=True)
    y = torch.zeros_like(x, dtype=weights.dtype)
    for e in range(E):
        share = torch.where(indices == e, weights, 0).sum(-1, keepdim=True)
        chosen = (indices == e).any(-1, keepdim=True)
        z = F.linear(torch.where(chosen, x, 0), gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
        out = F.linear(
            _plain.unit(z, activation, limit, interleaved), down[e], None if down_bias is None else down_bias[e]
        )
        y = y + share * out
    return torch.where(known, y, math.nan).to(given)


def moe(
    x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, activation: str = "silu",
    limit: float | None = None, interleaved: bool = False, scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    zeros: tuple[torch.Tensor, torch.Tensor] | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns for each token the weighted sum of its experts, (..., H). Gradients flow to all floating-point tensors.

    x: (..., H). weights: (..., k), any floating dtype; indices: (..., k), int32 or int64, as `topk_gate` returns them.
    gate_up: (E, 2 I, H), an expert's gate rows first, then up's; interleaved: gate and up take turns, as in gpt-oss.
    down: (E, H, I). gate_up_bias: (E, 2 I) or None; down_bias: (E, H) or None. x, experts and biases share one dtype;
    any strides, so gpt-oss's (E, H, 2 I) is given as its mT.
    activation: "silu" for silu(gate) up, or "swiglu_oai" for gpt-oss's (up + 1) gate sigmoid(1.702 gate).
    limit: clamps gate to at most limit and up to [-limit, limit] first; None: no limits.
    scales: gate_up's and down's, for experts of few bits: an expert's codes and scales are those that `int8_linear`,
    `int4_linear` or `mxfp4_linear` takes, stacked, and the dtypes say which. int8 (E, N, K) with scales (E, N); uint8
    (E, N, K / 2) with scales (E, N, K / group) in floating point, or mxfp4's (E, N, K / 32) in uint8, as in gpt-oss's
    files. zeros: int4's, alike and uint8, or None for 8. For inference: nothing then has gradients, and above
    64 rows an expert, on average, copies of the weights in x's dtype are multiplied.
    An expert's sums are float32 or wider and each of its two results is rounded once; a token's sum is float32, in the
    order of its choices, and rounded once. No order depends on a race. The host reads nothing from a GPU: there, an
    index that is no expert's gives its token NaN; on a CPU it raises.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts x, experts and biases first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, gate_up, down, gate_up_bias, down_bias = cast(x, gate_up, down, gate_up_bias, down_bias)
    tensors = x, weights, indices, gate_up, down, gate_up_bias, down_bias
    pairs = _pair(scales) + _pair(zeros)
    if len(pairs) != 4:
        _checks.moe(*tensors, activation, limit, scales, zeros)  # raises
    plain, settled, sure = _look(*tensors, *pairs, activation, limit, impl)
    if settled:
        how = activation, None if limit is None else float(limit), bool(interleaved)
        if scales is not None:
            return _few_op(*tensors, *pairs, *how, precision(), impl, sure)
        return _alone_op(*tensors, *how, precision(), impl, sure)
    shape = x.shape
    x, weights, indices = (t.reshape(-1, t.shape[-1]) for t in (x, weights, indices))
    if scales is not None:
        given = gate_up, down, gate_up_bias, down_bias, scales, zeros, activation, limit, bool(interleaved)
        return _few(plain, x, weights, indices, *given, impl).view(shape)
    if plain is not None and plain.call is not None:
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        options = {"activation": activation, "limit": limit, "interleaved": interleaved}
        return plain.call(x, weights, indices, gate_up, down, **biases, **options).view(shape)
    biased = [None if b is None else b.contiguous() for b in (gate_up_bias, down_bias)]
    floats = x.contiguous(), weights.contiguous(), gate_up, down, *biased
    keep = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in floats])
    options = activation, None if limit is None else float(limit), bool(interleaved)
    return differentiate(_Function, *floats, indices.contiguous(), *options, keep, impl).view(shape)


def _pair(given: Any) -> tuple[Any, ...]:
    """Two tensors, two Nones for None, or nothing for what is no pair."""
    if given is None:
        return None, None
    whole = isinstance(given, tuple | list) and len(given) == 2 and all([isinstance(t, _T) for t in given])
    return tuple(given) if whole else ()


@by_kind(11, optional=6, strides=True, gradients=True, sure=True)
def _look(
    x: Any, weights: Any, indices: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, gate_up_scale: Any,
    down_scale: Any, gate_up_zero: Any, down_zero: Any, activation: str, limit: float | None, impl: str | None,
) -> tuple[Implementation | None, bool, Sure | None]:  # fmt: skip
    """Checks a call and chooses. Returns too whether no gradient is wanted and kernels take all tensors as they are."""
    scales = None if gate_up_scale is None else (gate_up_scale, down_scale)
    zeros = None if gate_up_zero is None else (gate_up_zero, down_zero)
    given = x, weights, indices, gate_up, down, gate_up_bias, down_bias
    _checks.moe(*given, activation, limit, scales, zeros)
    there = [t for t in (*given, *(scales or ())) if t is not None]
    wanted = torch.is_grad_enabled() and any([t.requires_grad for t in there])
    if scales is not None and wanted:
        raise RidgelineError("moe: quantised experts have no gradients; call it under torch.no_grad()")
    biases = gate_up_bias, down_bias
    plain = eager(MOE, impl, x.reshape(-1, x.shape[-1]), *((gate_up, down) if scales is None else ()), *biases)
    reason = None if scales is None else _checks.unfit(gate_up, down, scales, zeros)
    if plain is None and reason is not None:
        if impl is not None:
            raise RidgelineError(f"moe: impl={impl!r} cannot run this call: {reason}")
        plain = MOE.implementations["torch"]
    strided = () if scales is not None else (gate_up, down)
    whole = all([t.is_contiguous() or any([t is s for s in strided]) for t in (*there, *(zeros or ()))])
    return plain, plain is None and not wanted and whole and x.dim() == 2, None


def _few(
    plain: Implementation | None, x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, gate_up_bias: _Maybe,
    down_bias: _Maybe, scales: Any, zeros: Any, activation: str, limit: float | None, interleaved: bool,
    impl: str | None,
) -> _T:  # fmt: skip
    """`moe` with experts of few bits, for x (T, H)."""
    biases = gate_up_bias, down_bias
    if plain is not None and plain.call is not None:
        options: dict[str, Any] = {"activation": activation, "limit": limit, "interleaved": interleaved}
        options |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias, "scales": scales, "zeros": zeros}
        return plain.call(x, weights, indices, gate_up, down, **options)
    whole = [t.contiguous() for t in (x, weights, indices, gate_up, down)]
    others = [None if t is None else t.contiguous() for t in (*biases, *scales, *(zeros or (None, None)))]
    return _few_op(*whole, *others, activation, None if limit is None else float(limit), interleaved, precision(), impl)


def cost(
    x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *, gate_up_bias: _Maybe = None, down_bias: _Maybe = None,
    scales: Any = None, zeros: Any = None, **_: Any
) -> tuple[Cost, Cost | None]:  # fmt: skip
    """As if the pairs reached as many experts as they can. Backward counts z, which forward writes for it."""
    n, E = indices.numel(), gate_up.shape[0]
    held = [gate_up, down, *(scales or ()), *(zeros or ()), *[b for b in (gate_up_bias, down_bias) if b is not None]]
    experts = nbytes(*held) * min(E, n) // max(E, 1)
    given, flops = nbytes(x, weights, indices), 3 * n * x.shape[-1] * gate_up.shape[1]
    if scales is not None:
        return Cost(given + experts, nbytes(x), flops), None
    z = n * gate_up.shape[1] * x.element_size()
    read = 2 * nbytes(x) + nbytes(weights, indices) + experts + 2 * z
    return Cost(given + experts, nbytes(x), flops), Cost(
        read, nbytes(x, weights, gate_up, down), 2 * flops
    )  # fmt: skip


MOE = Op(
    moe,
    reference=reference,
    cost=cost,
    flops={
        **dict.fromkeys(
            ("moe_alone", "moe_few_bits"),
            lambda x, weights, indices, gate_up, *_: 3 * indices.numel() * x.shape[1] * gate_up.shape[1],
        ),
        "moe_consume": lambda dy, x, weights, indices, w, *_: 6 * indices.numel() * x.shape[1] * w.shape[1],
    },
    cases=CASES,
)

SORTED, GROUPED = (
    partial(_plain.sorted_pairs, partial(get("grouped_matmul").function, impl=impl)) for impl in ("naive", "torch")
)
MOE.eager("naive", "every expert of every token", reference)
MOE.eager("torch", "pairs sorted by expert, a product for each expert", SORTED, served=True, reads=True)
MOE.eager("torch_grouped", "pairs sorted by expert, PyTorch's grouped_mm", GROUPED, supports=_plain.not_sorted_pairs)
MOE.kernel(
    "triton",
    "places without a sort; products gather tokens, and gate and up meet in registers; ordered sums",
    kind="triton",
    fwd=_experts.fwd,
    bwd=_experts.bwd,
    served=True,
)
MOE.kernel(
    "triton_tma",
    "Hopper: copies by TMA that end at a group's end, one loop over tiles and steps; backward sorts tokens",
    kind="triton",
    fwd=partial(_experts.fwd, tma=True),
    bwd=partial(_experts.bwd, tma=True),
    supports=_experts.refusal,
    unless=_experts.unless,
    **_experts.HOPPER,
)
