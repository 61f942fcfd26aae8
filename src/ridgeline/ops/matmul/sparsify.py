"""sparsify: the two numbers of largest size in each four along K, and where they were: 2:4 sparsity.

    v = the two largest |w| of w_{n, 4g .. 4g+3}, in order of k          backward: dw is dv where w was kept, else 0

Each of four counts those that beat it; the two with a count below 2 stay. Nothing is sorted. The roof is one read of w
and one write of 9/16 of its bytes in 16 bits. The kernels and the format are in `_sparse.py`.
Source: Mishra et al., Accelerating sparse deep neural networks, 2021 (arXiv:2104.08378).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Columns, Cost, Op, RidgelineError, Spec, dense_only, nbytes
from ridgeline.ops.matmul import _sparse
from ridgeline.select import eager, run

BENCH = ((8192, 8192), (14336, 4096), (28672, 8192))


@kernel_op("sparsify_fwd(Tensor w, str? impl) -> (Tensor, Tensor)")
def _forward(w: torch.Tensor, impl: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    values = w.new_empty((w.shape[0], w.shape[1] // 2))
    metadata = w.new_empty(_sparse.blocks_of(values), dtype=torch.uint8)
    run(SPARSIFY, "fwd", impl, (values, metadata), w)
    return values, metadata


@kernel_op("sparsify_bwd(Tensor dv, Tensor metadata, str? impl) -> Tensor")
def _backward(dv: torch.Tensor, metadata: torch.Tensor, impl: str | None) -> torch.Tensor:
    dw = dv.new_empty((dv.shape[0], 2 * dv.shape[1]))
    run(SPARSIFY, "bwd", impl, (dw,), dv, metadata)
    return dw


class _Sparsify(Function):
    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, impl: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        values, metadata = _forward(w, impl)
        ctx.save_for_backward(metadata)
        ctx.mark_non_differentiable(metadata)
        ctx.impl = impl
        return values, metadata

    @staticmethod
    @first_order
    def backward(ctx: Any, dv: torch.Tensor, _: Any) -> Any:
        return _backward(dv, *ctx.saved_tensors, ctx.impl), None


def reference(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _sparse.plain_sparsify(w)


def sparsify(w: torch.Tensor, *, impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (values, metadata) of a weight w pruned to two of each four along K, for `sparse_matmul`.

    w: (N, K), floating point, any strides; K is a multiple of 4. Kernels take float32, float16 and bfloat16.
    The two largest of |w| stay; of equals the earlier. A NaN counts as infinity. Numbers are copied, not rounded.
    values: (N, K / 2), w's dtype: the kept numbers of each four, in order of k.
    metadata: uint8 (ceil(K / 64), N, 8). The low half of byte b of [j, n] is i0 + 4 i1 for the kept columns i0 < i1 of
    the four from column 64 j + 8 b on; the high half describes the next four. Halves past K are 4.
    A gradient flows from values to the kept numbers of w; the pruned ones get 0.
    Raises RidgelineError if w is no such matrix, or if `impl` cannot run the call.
    """
    if not isinstance(w, torch.Tensor):
        raise RidgelineError(f"sparsify: w must be a tensor, got {type(w).__name__}")
    dense_only("sparsify", (w,))
    if w.dim() != 2 or not w.is_floating_point() or w.shape[1] % 4:
        given = f"{w.dtype} {tuple(w.shape)}"
        raise RidgelineError(f"sparsify: w must be floating point (N, K) with K a multiple of 4, got {given}")
    plain = eager(SPARSIFY, impl, w)
    if plain is not None and plain.call is not None:
        return plain.call(w)
    return differentiate(_Sparsify, w, impl)


def cost(w: torch.Tensor) -> tuple[Cost, Cost]:
    values, metadata = nbytes(w) // 2, -(-w.shape[1] // 64) * w.shape[0] * 8
    return Cost(nbytes(w), values + metadata, 3 * w.numel()), Cost(values + metadata, nbytes(w), 0)


SPARSIFY = Op(
    sparsify,
    reference=reference,
    cost=cost,
    sharding="w nK -> nK, BnE",
    flops={"sparsify_bwd": lambda *_: 0},
    cases=[
        Case("33x72", (Spec(33, 72),)),
        Case("5x4", (Spec(5, 4),)),
        Case("70x256 columns", (Columns(70, 256),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        *(Case(f"{n}x{k}", (Spec(n, k),), dtypes=("bfloat16",), use="bench") for n, k in BENCH),
    ],
)

SPARSIFY.eager("naive", "a stable sort of each four and a gather, in eager PyTorch", reference, served=True)
SPARSIFY.compiled("the same, fused by torch.compile as far as the sort allows")
SPARSIFY.kernel(
    "triton",
    "one pass: each of four counts what beats it; values and metadata leave together",
    kind="triton",
    fwd=_sparse.sparsify,
    bwd=_sparse.densify,
    supports=_sparse.unlike,
    served=True,
)
