"""moe: y_t = sum_j w_tj down_e act(gate_e x_t) (up_e x_t), e = index_tj: the chosen experts of each token.

    backward: g = down_e^T dy_t,  dw_tj = g . h,  dz = w_tj g act'(z),  dx_t = sum_j gate_up_e^T dz,  dgate_up_e = sum dz x_t^T

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

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.experts import _gated, _products, _route, _weight_grads
from ridgeline.ops.experts._arguments import WHOLE, alike, cast, precision, tensors
from ridgeline.ops.experts.grouped_matmul import grouped_matmul
from ridgeline.select import eager, run

_T = torch.Tensor
_Maybe = torch.Tensor | None
ACTIVATIONS = ("silu", "swiglu_oai")
_GIVEN = "Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
_OPTIONS = "str activation, float? limit, bool interleaved"


@kernel_op(f"moe_fwd({_GIVEN}, {_OPTIONS}, bool keep, str precision, str? impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
def _fwd_op(x: _T, weights: _T, indices: _T, gate_up: _T, *rest: Any) -> tuple[_T, ...]:
    """Returns y, z (or nothing), and the pairs' order, places and ends of groups."""
    *given, keep, how, impl = rest
    n, (E, width, _) = indices.numel(), gate_up.shape
    z = x.new_empty((n, width) if keep else (0, width))
    order, place, ends = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (n, n, E))
    y = x.new_empty(x.shape)
    run(MOE, "fwd", impl, (y, z, order, place, ends), x, weights, indices, gate_up, *given, how)
    return y, z, order, place, ends


@kernel_op(
    "moe_bwd(Tensor dy, Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, Tensor z, Tensor order, Tensor place, Tensor ends, str activation, float? limit, "
    "bool interleaved, bool of_x, bool of_weights, bool of_gate_up, bool of_down, str precision, str? impl) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _bwd_op(
    dy: _T, x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, gate_up_bias: _Maybe, down_bias: _Maybe, *rest: Any
) -> tuple[_T, ...]:
    """Returns the gradients of x, weights, gate_up, down and the biases, empty where they are not wanted."""
    *saved, activation, limit, interleaved, of_x, of_weights, of_gate_up, of_down, how, impl = rest
    nothing = (0, *gate_up.shape[1:])

    def room(like: _Maybe, wanted: bool) -> _T:
        return x.new_empty(nothing) if like is None or not wanted else torch.empty_like(like)

    wanted = (x, of_x), (weights, of_weights), (gate_up, of_gate_up), (down, of_down)
    made = tuple([room(*w) for w in (*wanted, (gate_up_bias, of_gate_up), (down_bias, of_down))])
    given = x, weights, indices, gate_up, down, down_bias
    run(MOE, "bwd", impl, made, dy, *given, *saved, activation, limit, interleaved, how)
    return made


def _triton(
    y: _T, z: _T, order: _T, place: _T, ends: _T, x: _T, weights: _T, indices: _T, gate_up: _T, down: _T,
    gate_up_bias: _Maybe, down_bias: _Maybe, activation: str, limit: float | None, interleaved: bool, how: str,
) -> None:  # fmt: skip
    n, k, (E, width, H) = indices.numel(), indices.shape[1], gate_up.shape
    pairs = _route.Pairs(indices, order, place, ends)
    _route.route(pairs, torch.empty((_route.SPANS, _products.power(E)), dtype=torch.int32, device=x.device))
    h, rows = x.new_empty((n, width // 2)), x.new_empty((n, H))
    tokens, oai = _products.rows_of(x, order, k), activation == "swiglu_oai"
    _gated.gated(h, z if z.numel() else None, tokens, gate_up, ends, gate_up_bias, oai, limit, interleaved, how)
    _products.product(rows, _products.rows_of(h), down.mT, ends, down_bias, how)
    _route.combine(y, rows, weights, pairs, k)


def _triton_grads(
    dx: _T, dweights: _T, dgate_up: _T, ddown: _T, dgate_up_bias: _T, ddown_bias: _T, dy: _T, x: _T, weights: _T,
    indices: _T, gate_up: _T, down: _T, down_bias: _Maybe, z: _T, order: _T, place: _T, ends: _T, activation: str,
    limit: float | None, interleaved: bool, how: str,
) -> None:  # fmt: skip
    n, k, (_, H, I) = indices.numel(), indices.shape[1], down.shape
    pairs = _route.Pairs(indices, order, place, ends)
    incoming, tokens = _products.rows_of(dy, order, k), _products.rows_of(x, order, k)
    dh, h, dz = (x.new_empty((n, size)) for size in (I, I, 2 * I))
    sums = torch.empty((n,), dtype=torch.float32, device=x.device)
    _products.product(dh, incoming, down, ends, None, how)
    _gated.ungated(dz, h, sums, dh, z, weights, order, ends, activation == "swiglu_oai", limit, interleaved)
    if dweights.numel():
        _route.weight_grads(dweights, sums, dy, down_bias, pairs)
    if dx.numel():
        rows = x.new_empty((n, H))
        _products.product(rows, _products.rows_of(dz), gate_up, ends, None, how)
        _route.combine(dx, rows, None, pairs, k)
    if dgate_up.numel():
        _weight_grads.weight_grad(dgate_up, _products.rows_of(dz), tokens, n, ends, how, False)
    if ddown.numel():
        _weight_grads.weight_grad(ddown, incoming, _products.rows_of(h), n, ends, how, False)
    if dgate_up_bias.numel():
        _weight_grads.bias_grad(dgate_up_bias, _products.rows_of(dz), n, ends)
    if ddown_bias.numel():
        _weight_grads.bias_grad(ddown_bias, incoming, n, ends, weights)


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
        ctx.options, ctx.impl = options, impl
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        of = ctx.needs_input_grad
        wanted = of[0], of[1], of[2] or of[4], of[3] or of[5]
        made = _bwd_op(dy.contiguous(), *ctx.saved_tensors, *ctx.options, *wanted, precision(), ctx.impl)
        return *(m if w else None for m, w in zip(made, of[:6], strict=True)), *[None] * 6


def _unit(z: _T, activation: str, limit: float | None, interleaved: bool) -> _T:
    gate, up = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up if activation == "silu" else (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def reference(
    x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *, gate_up_bias: _Maybe = None, down_bias: _Maybe = None,
    activation: str = "silu", limit: float | None = None, interleaved: bool = False
) -> _T:  # fmt: skip
    """Every expert of every token, times the weight with which the token chose it, which is mostly 0."""
    E = gate_up.shape[0]
    weights = weights.to(torch.promote_types(x.dtype, weights.dtype))
    known = ((indices >= 0) & (indices < E)).all(-1, keepdim=True)
    y = torch.zeros_like(x, dtype=weights.dtype)
    for e in range(E):
        share = torch.where(indices == e, weights, 0).sum(-1, keepdim=True)
        chosen = (indices == e).any(-1, keepdim=True)
        z = F.linear(torch.where(chosen, x, 0), gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
        out = F.linear(_unit(z, activation, limit, interleaved), down[e], None if down_bias is None else down_bias[e])
        y = y + share * out
    return torch.where(known, y, math.nan).to(x.dtype)


def _grouped(
    impl: str, x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *, gate_up_bias: _Maybe = None,
    down_bias: _Maybe = None, activation: str = "silu", limit: float | None = None, interleaved: bool = False
) -> _T:  # fmt: skip
    """Pairs sorted by expert, two grouped products and a gather; impl: the products'."""
    (T, k), E = indices.shape, gate_up.shape[0]
    known = (indices >= 0) & (indices < E)
    expert = torch.where(known, indices, E).flatten()
    order = expert.argsort(stable=True)
    ends = (expert[:, None] == torch.arange(E, device=x.device)).sum(0).cumsum(0).to(torch.int32)
    z = grouped_matmul(x[order // k], gate_up.mT, ends, bias=gate_up_bias, impl=impl)
    rows = grouped_matmul(_unit(z, activation, limit, interleaved), down.mT, ends, bias=down_bias, impl=impl)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (rows[order.argsort()].view(T, k, -1).to(wide) * weights.to(wide)[..., None]).sum(1)
    return torch.where(known.all(-1, keepdim=True), y, math.nan).to(x.dtype)


def _unlike_torch(x: _T, *_: Any, **__: Any) -> str | None:
    if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and x.shape[-1] % 8 == 0:
        return None
    return f"torch's grouped_mm takes bfloat16 on a GPU, with rows of multiples of 16 bytes, not {x.dtype} {tuple(x.shape)} on {x.device.type}"  # fmt: skip


def _check(
    x: Any, weights: Any, indices: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, activation: Any,
    limit: Any
) -> None:  # fmt: skip
    biases = {n: t for n, t in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)) if t is not None}
    tensors("moe", x=x, weights=weights, indices=indices, gate_up=gate_up, down=down, **biases)
    alike("moe", x=x, gate_up=gate_up, down=down, **biases)
    if gate_up.dim() != 3 or down.dim() != 3 or x.shape[-1:] != gate_up.shape[2:] or 0 in gate_up.shape:
        shapes = f"{tuple(x.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        raise RidgelineError(f"moe: x must be (..., H), gate_up (E, 2 I, H) and down (E, H, I), got {shapes}")
    E, width, H = gate_up.shape
    if width % 2 or down.shape != (E, H, width // 2):
        wanted = f"gate_up (E, 2 I, H) and down (E, H, I) with H = {H}"
        raise RidgelineError(f"moe: weights must be {wanted}, got {tuple(gate_up.shape)} and {tuple(down.shape)}")
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
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf):
        raise RidgelineError(f"moe: limit must be None or a finite number above 0, got {limit!r}")
    if readable(indices) and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < E:
        found = f"{int(indices.min())} to {int(indices.max())}"
        raise RidgelineError(f"moe: indices must be from 0 to {E - 1}, got {found}")


def moe(
    x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *,
    gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None, activation: str = "silu",
    limit: float | None = None, interleaved: bool = False, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns for each token the weighted sum of its experts, (..., H). Gradients flow to all floating-point tensors.

    x: (..., H). weights: (..., k), any floating dtype; indices: (..., k), int32 or int64, as `topk_gate` returns them.
    gate_up: (E, 2 I, H), an expert's gate rows first, then up's; interleaved: gate and up take turns, as in gpt-oss.
    down: (E, H, I). gate_up_bias: (E, 2 I) or None; down_bias: (E, H) or None. x, experts and biases share one dtype;
    any strides, so gpt-oss's (E, H, 2 I) is given as its mT.
    activation: "silu" for silu(gate) up, or "swiglu_oai" for gpt-oss's (up + 1) gate sigmoid(1.702 gate).
    limit: clamps gate to at most limit and up to [-limit, limit] first; None: no limits.
    An expert's sums are float32 and each of its two results is rounded once; a token's sum is float32, in the order of
    its choices, and rounded once. No order depends on a race. The host reads nothing from a GPU: there, an index that is
    no expert's gives its token NaN; on a CPU it raises.
    float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts x, experts and biases first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, gate_up, down, gate_up_bias, down_bias = cast(x, gate_up, down, gate_up_bias, down_bias)
    _check(x, weights, indices, gate_up, down, gate_up_bias, down_bias, activation, limit)
    shape = x.shape
    x, weights, indices = (t.reshape(-1, t.shape[-1]) for t in (x, weights, indices))
    plain = eager(MOE, impl, x, gate_up, down, gate_up_bias, down_bias)
    if plain is not None and plain.call is not None:
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        options = {"activation": activation, "limit": limit, "interleaved": interleaved}
        return plain.call(x, weights, indices, gate_up, down, **biases, **options).view(shape)
    biased = [None if b is None else b.contiguous() for b in (gate_up_bias, down_bias)]
    floats = x.contiguous(), weights.contiguous(), gate_up, down, *biased
    keep = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in floats])
    options = activation, None if limit is None else float(limit), bool(interleaved)
    return differentiate(_Function, *floats, indices.contiguous(), *options, keep, impl).view(shape)


def cost(
    x: _T, weights: _T, indices: _T, gate_up: _T, down: _T, *, gate_up_bias: _Maybe = None, down_bias: _Maybe = None,
    **_: Any
) -> tuple[Cost, Cost]:  # fmt: skip
    """As if the pairs reached as many experts as they can. Backward counts z, which forward writes for it."""
    n, E = indices.numel(), gate_up.shape[0]
    experts = nbytes(gate_up, down, *[b for b in (gate_up_bias, down_bias) if b is not None]) * min(E, n) // max(E, 1)
    given, flops = nbytes(x, weights, indices), 6 * n * down[0].numel() if E else 0
    z = n * gate_up.shape[1] * x.element_size()
    read = 2 * nbytes(x) + nbytes(weights, indices) + experts + 2 * z
    return Cost(given + experts, nbytes(x), flops), Cost(
        read, nbytes(x, weights, gate_up, down), 2 * flops
    )  # fmt: skip


def _case(T: int, E: int, k: int, H: int, I: int, use: str = "check", bias: bool = False, **options: Any) -> Case:
    name = [f"{T} tokens, {k} of {E} experts, {H} -> {I}", *(str(v) if n == "activation" else n for n, v in options.items())]  # fmt: skip
    tensors = Spec(T, H), Spec(T, k, dtype="float32"), Spec(T, k, dtype="int64", high=E), Spec(E, 2 * I, H), Spec(E, H, I)
    options |= {"gate_up_bias": Spec(E, 2 * I), "down_bias": Spec(E, H)} if bias else {}
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    return Case(", ".join([*name, *["biases"] * bias]), tensors, options, dtypes=dtypes, use=use)


QWEN3, MIXTRAL = (128, 8, 2048, 768), (8, 2, 4096, 14336)
MOE = Op(
    moe,
    reference=reference,
    cost=cost,
    cases=[
        _case(21, 5, 2, 24, 19),
        _case(6, 4, 3, 33, 16, bias=True, activation="swiglu_oai", limit=1.5, interleaved=True),
        _case(40, 3, 1, 16, 8, bias=True),
        _case(3, 9, 2, 17, 13, interleaved=True, limit=0.5),
        _case(128, 8, 2, 128, 64, "quick"),
        *(_case(T, *QWEN3, "bench") for T in (1, 64, 1024, 8192)),
        *(_case(T, *MIXTRAL, "bench") for T in (1, 64, 8192)),
    ],
)

MOE.eager("naive", "every expert of every token", reference)
MOE.eager("torch", "pairs sorted by expert, a product for each expert", partial(_grouped, "naive"), served=True, reads=True)
MOE.eager("torch_grouped", "pairs sorted by expert, PyTorch's grouped_mm", partial(_grouped, "torch"), supports=_unlike_torch)
MOE.kernel(
    "triton",
    "places without a sort; products gather tokens, and gate and up meet in registers; ordered sums",
    kind="triton",
    fwd=_triton,
    bwd=_triton_grads,
    served=True,
)
