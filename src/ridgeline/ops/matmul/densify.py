"""densify: the dense weight (N, K) of a 2:4 sparse one: zeros where two of each four numbers were dropped.

    w_{n, 4g + i} = v_{n, 2g} if i = i0,  v_{n, 2g+1} if i = i1,  else 0          backward: dv gathers dw at i0, i1

One pass reads 9/16 of the bytes that it writes in 16 bits. Backward is what a product's weight gradient needs. The
format is `sparsify`'s, and the kernels are in `_sparse.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, Spec, nbytes
from ridgeline.ops.matmul import _sparse
from ridgeline.select import eager, run

DTYPES = ("float32", "float16", "bfloat16", "int8")


@kernel_op("densify_fwd(Tensor values, Tensor metadata, str? impl) -> Tensor")
def expanded(values: torch.Tensor, metadata: torch.Tensor, impl: str | None) -> torch.Tensor:
    w = values.new_empty((values.shape[0], 2 * values.shape[1]))
    run(DENSIFY, "fwd", impl, (w,), values, metadata)
    return w


@kernel_op("densify_bwd(Tensor dw, Tensor metadata, str? impl) -> Tensor")
def gathered(dw: torch.Tensor, metadata: torch.Tensor, impl: str | None) -> torch.Tensor:
    dv = dw.new_empty((dw.shape[0], dw.shape[1] // 2))
    run(DENSIFY, "bwd", impl, (dv,), dw, metadata)
    return dv


class _Densify(Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, metadata: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(metadata)
        ctx.impl = impl
        return expanded(values, metadata, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dw: torch.Tensor) -> Any:
        return gathered(dw, *ctx.saved_tensors, ctx.impl), None, None


def reference(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    return _sparse.plain_densify(values, metadata)


def densify(values: torch.Tensor, metadata: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns the dense weight (N, K), contiguous, of (values, metadata) as `sparsify` returns them.

    values: (N, K / 2), any strides; kernels take float32, float16, bfloat16 and int8. metadata: uint8
    (ceil(K / 64), N, 8). Its contents are not validated: a pair of equal columns gives any of its two numbers.
    Gradients flow to values. Raises RidgelineError if the tensors do not fit, or if `impl` cannot run the call.
    """
    _sparse.check("densify", values, metadata)
    plain = eager(DENSIFY, impl, values)
    if plain is not None and plain.call is not None:
        return plain.call(values, metadata)
    return differentiate(_Densify, values, metadata.contiguous(), impl)


def cost(values: torch.Tensor, metadata: torch.Tensor) -> tuple[Cost, Cost]:
    read, write = nbytes(values, metadata), 2 * nbytes(values)
    return Cost(read, write, 0), Cost(write + nbytes(metadata), nbytes(values), 0)


def _case(N: int, K: int, **facts: Any) -> Case:
    values = Spec(N, K // 2, dtype="int8") if facts.get("dtypes") == ("int8",) else Spec(N, K // 2)
    return Case(f"{N}x{K}", (values, _sparse.Metadata(N, K)), **facts)


DENSIFY = Op(
    densify,
    reference=reference,
    cost=cost,
    sharding="values nK, metadata BnE -> nK",
    flops={"densify_bwd": lambda *_: 0},
    cases=[
        _case(33, 72),
        _case(5, 4),
        _case(70, 256),
        _case(1024, 1024, use="quick"),
        *(_case(*shape, dtypes=("bfloat16",), use="bench") for shape in ((8192, 8192), (14336, 4096))),
    ],
)

DENSIFY.eager("naive", "zeros, then a scatter of values, in eager PyTorch", reference, served=True)
DENSIFY.compiled("the same, fused by torch.compile as far as the scatter allows")
DENSIFY.kernel(
    "triton",
    "one pass: each of four columns selects its number, or 0, in registers",
    kind="triton",
    fwd=_sparse.densify,
    bwd=_sparse.gather,
    supports=_sparse.unlike,
    dtypes=DTYPES,
    served=True,
)
