"""topk_gate: each token's k experts and their weights, from the router's logits.

    s = softmax(l) or sigmoid(l),  chosen: the k largest of s + bias, in the best groups,  w = scale s / sum of chosen s
    backward: dl_i = w_i (dw_i - sum_j dw_j w_j / scale) for the chosen i of a normalised softmax; zeros elsewhere

A program holds whole rows in registers, in float32: one read of the logits, and nothing of their size is written.
Source: Fedus et al., Switch Transformers, 2021 (arXiv:2101.03961); DeepSeek-AI, DeepSeek-V3, 2024 (arXiv:2412.19437).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, Spec, nbytes
from ridgeline.ops.experts import _checks, _gate
from ridgeline.select import by_kind, eager, run

_T = torch.Tensor
_Maybe = torch.Tensor | None
_OPTIONS = "int k, bool softmax, int groups, int top_groups, bool normalize, float scale, str? impl"


@kernel_op(f"topk_gate_fwd(Tensor logits, Tensor? bias, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
def _fwd_op(logits: _T, bias: _Maybe, k: int, *rest: Any) -> tuple[_T, _T, _T]:
    *options, impl = rest
    weights = torch.empty((logits.shape[0], k), dtype=torch.float32, device=logits.device)
    indices = torch.empty((logits.shape[0], k), dtype=torch.int64, device=logits.device)
    counts = torch.empty((logits.shape[1],), dtype=torch.int32, device=logits.device)
    run(TOPK_GATE, "fwd", impl, (weights, indices, counts), logits, bias, k, *options)
    return weights, indices, counts


@kernel_op(f"topk_gate_bwd(Tensor dweights, Tensor logits, Tensor indices, {_OPTIONS}) -> Tensor")
def _bwd_op(dweights: _T, logits: _T, indices: _T, *rest: Any) -> _T:
    *options, impl = rest
    dlogits = logits.new_empty(logits.shape)
    run(TOPK_GATE, "bwd", impl, (dlogits,), logits, dweights, indices, *options)
    return dlogits


class _Function(Function):
    @staticmethod
    def forward(ctx: Any, logits: _T, bias: _Maybe, *options: Any) -> tuple[_T, _T, _T]:
        weights, indices, counts = _fwd_op(logits, bias, *options)
        ctx.mark_non_differentiable(indices, counts)
        ctx.save_for_backward(logits, indices)
        ctx.options = options
        return weights, indices, counts

    @staticmethod
    @first_order
    def backward(ctx: Any, dweights: _T, *_: Any) -> Any:
        return _bwd_op(dweights.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * (1 + len(ctx.options))


def reference(
    logits: _T, k: int, *, score: str = "softmax", bias: _Maybe = None, groups: int = 1, top_groups: int = 1,
    normalize: bool = True, scale: float = 1.0
) -> tuple[_T, _T, _T]:  # fmt: skip
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x + torch.where(x.isnan().any(-1, keepdim=True), math.nan, 0)  # one NaN is the row's
    scores = x.softmax(-1) if score == "softmax" else x.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias
    wrong = choice.isnan().any(-1, keepdim=True)
    choice = torch.where(wrong, 0, choice)
    if top_groups < groups:
        parts = choice.unflatten(-1, (groups, -1))
        best = parts.topk(2).values.sum(-1) if score == "sigmoid" else parts.amax(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        keep = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
        choice = torch.where(keep[..., None], parts, -math.inf).flatten(-2)
    indices = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
    counts = counts.index_add(0, indices.flatten(), torch.ones_like(indices, dtype=torch.int32).flatten())
    return torch.where(wrong, math.nan, weights * scale), indices, counts


def topk_gate(
    logits: torch.Tensor, k: int, *, score: str = "softmax", bias: torch.Tensor | None = None, groups: int = 1,
    top_groups: int = 1, normalize: bool = True, scale: float = 1.0, impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Chooses k experts for each token. Gradients flow to the logits through the weights.

    logits: (T, E), floating point, any strides, at most 1024 experts.
    score: "softmax" over all experts, or "sigmoid".
    bias: (E,), added to the scores for the choice alone (DeepSeek-V3's balance), or None. It gets no gradient.
    groups, top_groups: experts in groups of E / groups neighbours; only the best top_groups of them are chosen from. A
    group's score is the sum of its two best with sigmoid (DeepSeek-V3), and its best with softmax (DeepSeek-V2).
    normalize: whether a token's weights are divided by their sum (plus 1e-20). scale: a factor for them at the end.
    Returns weights (T, k), float32; indices (T, k), int64, the best first and equal ones by index; counts (E,), int32:
    the tokens of each expert. A row whose scores hold NaN, as softmax's do for +inf, gives NaN and the first experts.
    Raises RidgelineError if arguments do not fit together, or if `impl` cannot run the call.
    """
    plain, wanted, sure = _look(logits, bias, k, score, groups, top_groups, scale, impl)
    bias = None if bias is None else bias.detach().contiguous()
    if plain is not None and plain.call is not None:
        given: Any = {"score": score, "bias": bias, "groups": groups, "top_groups": top_groups, "normalize": normalize}
        return plain.call(logits, k, **given, scale=scale)
    options = k, score == "softmax", groups, top_groups, bool(normalize), float(scale), impl
    return differentiate(_Function, logits, bias, *options) if wanted else _fwd_op(logits, bias, *options, sure)


@by_kind(2, optional=1, gradients=True, sure=True)
def _look(x: Any, bias: Any, k: int, score: str, groups: int, top_groups: int, scale: float, impl: str | None) -> Any:
    _checks.topk_gate(x, k, score, bias, groups, top_groups, scale)
    return eager(TOPK_GATE, impl, x), torch.is_grad_enabled() and x.requires_grad, None


def cost(logits: _T, k: int, *, bias: _Maybe = None, **_: Any) -> tuple[Cost, Cost]:
    """Five operations for a logit's score, and one for each of the k searches."""
    (T, E), chosen = logits.shape, 12 * logits.shape[0] * k
    read = nbytes(logits) + (0 if bias is None else nbytes(bias))
    return Cost(read, chosen + 4 * E, T * E * (5 + k)), Cost(nbytes(logits) + chosen, nbytes(logits), T * E * (7 + k))


def _case(T: int, E: int, k: int, use: str = "check", bias: bool = False, **options: Any) -> Case:
    name = [f"{T}x{E}, {k} of them", *(str(v) if n == "score" else f"{n} {v}" for n, v in options.items())]
    options |= {"bias": Spec(E, dtype="float32", grad=False)} if bias else {}
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    return Case(", ".join([*name, *["bias"] * bias]), (Spec(T, E), k), options, dtypes=dtypes, use=use)


V3: dict[str, Any] = {"score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5, "bias": True}
TOPK_GATE = Op(
    topk_gate,
    reference=reference,
    cost=cost,
    graphed=True,
    cases=[
        _case(9, 13, 1, normalize=False, scale=0.5),
        _case(7, 16, 3),
        _case(5, 24, 4, score="sigmoid", groups=4, top_groups=2, bias=True, scale=2.5),
        _case(3, 12, 2, groups=3, top_groups=2, bias=True),
        _case(512, 64, 6, "quick"),
        *(_case(T, *sizes, "bench") for sizes in ((128, 8), (8, 2)) for T in (1, 64, 8192)),
        *(_case(T, 256, 8, "bench", **V3) for T in (1, 8192)),
    ],
)

TOPK_GATE.eager("torch", "PyTorch's passes: scores, stable sorts, a gather and a count", reference, served=True)
TOPK_GATE.compiled("the same, with the passes over the scores fused by torch.compile")
FUSED = "rows in registers: scores, groups, k searches, weights and counts in one kernel"
TOPK_GATE.kernel("triton", FUSED, kind="triton", fwd=_gate.fwd, bwd=_gate.bwd, served=True)
