"""sparse_matmul: y = x W^T + b for a weight W of which two in each four along K are kept (2:4 sparsity).

    y_mn = sum_g v_{n, 2g} x_{m, 4g + i0} + v_{n, 2g+1} x_{m, 4g + i1} + b_n
    backward: dx = dy W        dv = (dy^T x) at the kept columns        db = sum of dy's rows

The matrix units select the x that a kept number meets, and take 32 of K in the time of 16: the roof is M N K operations
instead of 2 M N K, and 9/16 of the weight's bytes. W is sparse along K alone, so backward's products are dense.
Source: Mishra et al., Accelerating sparse deep neural networks, 2021 (arXiv:2104.08378); NVIDIA's PTX ISA for the
fragments of mma.sp and wgmma.sp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _sparse, _sparse_cuda, _sparse_triton
from ridgeline.ops.matmul.densify import densify, expanded, gathered
from ridgeline.ops.matmul.matmul import in_autocast, rows_of
from ridgeline.select import eager, run

_Maybe = torch.Tensor | None


@kernel_op("sparse_matmul_fwd(Tensor x, Tensor values, Tensor metadata, Tensor? bias, str? impl) -> Tensor")
def _forward(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: _Maybe, impl: str | None
) -> torch.Tensor:
    y = x.new_empty((x.shape[0], values.shape[0]))
    run(SPARSE_MATMUL, "fwd", impl, (y,), x, values, metadata, bias)
    return y


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: _Maybe, impl: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, values, metadata)
        return _forward(x, values, metadata, bias, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, values, metadata = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx = dy @ expanded(values, metadata, None) if needs[0] else None
        dv = gathered(dy.T @ x, metadata, None) if needs[1] else None
        return dx, dv, None, dy.sum(0) if needs[3] else None, None


def reference(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *, bias: _Maybe = None
) -> torch.Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ _sparse.plain_densify(values, metadata).to(wide).T
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def sparse_matmul(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *, bias: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `x @ W.T + bias`, (..., N), for the 2:4 sparse weight W of (values, metadata) = `sparsify(w)`.

    x: (..., K); values: (N, K / 2) and bias: (N,) or None, in x's dtype; any strides. metadata: uint8
    (ceil(K / 64), N, 8), not validated. Kernels take float16 and bfloat16, with K a multiple of 16, and with `triton`
    any K and float32; else PyTorch multiplies by `densify(values, metadata)`. Sums are float32, rounded once.
    Gradients flow to x, values and bias. Their products are dense: W is sparse along K, and dx sums along N. Pruned
    numbers get no gradient, so they do not return; to choose again, keep w and call `sparsify(w)` in each step.
    Autocast casts x, values and bias first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, values, bias = in_autocast(x, values, bias)
    _check(x, values, metadata, bias)
    plain = eager(SPARSE_MATMUL, impl, x, values)
    if plain is not None and plain.call is not None:
        return plain.call(x, values, metadata, bias=bias)
    given = rows_of(x).contiguous(), values.contiguous(), metadata.contiguous()
    bias = None if bias is None else bias.contiguous()
    return differentiate(_Product, *given, bias, impl).view(*x.shape[:-1], values.shape[0])


def _check(x: Any, values: Any, metadata: Any, bias: Any) -> None:
    _sparse.check("sparse_matmul", values, metadata, x=x, **({} if bias is None else {"bias": bias}))
    if not x.is_floating_point() or x.dtype != values.dtype:
        raise RidgelineError(
            f"sparse_matmul: x and values must be of one floating dtype, got {x.dtype} and {values.dtype}"
        )
    if not x.dim() or x.shape[-1] != 2 * values.shape[1]:
        K = 2 * values.shape[1]
        raise RidgelineError(
            f"sparse_matmul: x must be (..., {K}) for values {tuple(values.shape)}, got {tuple(x.shape)}"
        )
    if bias is not None and (bias.shape != values.shape[:1] or bias.dtype != x.dtype):
        given = f"{bias.dtype} {tuple(bias.shape)}"
        raise RidgelineError(f"sparse_matmul: bias must be {x.dtype} {tuple(values.shape[:1])}, got {given}")


def cost(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *, bias: _Maybe = None
) -> tuple[Cost, Cost]:  # fmt: skip
    """Returns the costs: forward multiplies what is kept; both of backward's products are dense."""
    rows, more = x.numel() // max(1, x.shape[-1]), 0 if bias is None else nbytes(bias)
    weight, y, kept = nbytes(values, metadata), rows * values.shape[0] * x.element_size(), 2 * rows * values.numel()
    return Cost(nbytes(x) + weight + more, y, kept), Cost(nbytes(x) + weight + y, nbytes(x, values) + more, 4 * kept)


def _case(M: int, N: int, K: int, bias: bool = False, use: str = "check", grad: bool = True) -> Case:
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    args = Spec(M, K, grad=grad), Spec(N, K // 2, grad=grad), _sparse.Metadata(N, K)
    options = {"bias": Spec(N, grad=grad)} if bias else {}
    name = f"{M}x{N}x{K}{' bias' * bias}{' training' * (use == 'bench' and grad)}"
    return Case(name, args, options, dtypes=dtypes, use=use)


TIMED = 2048  # rows of x from which the sparse product is known to be quicker
BENCH = (
    *((n, n, n) for n in (2048, 4096, 8192)),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 2048, 2048),
    (64, 14336, 4096),
)
SPARSE_MATMUL = Op(
    sparse_matmul,
    reference=reference,
    cost=cost,
    sharding="x ...K, values nK, metadata BnE, bias n -> ...n",
    cases=[
        _case(33, 40, 128, bias=True),
        _case(150, 136, 208),
        _case(300, 264, 80, bias=True),
        _case(5, 35, 72),
        _case(1, 8, 16),
        _case(256, 256, 256, use="quick"),
        *(_case(*shape, use="bench", grad=False) for shape in BENCH),
        _case(8192, 8192, 8192, bias=True, use="bench", grad=False),
        _case(8192, 8192, 8192, use="bench"),
    ],
)


def _torch(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *, bias: _Maybe = None
) -> torch.Tensor:  # fmt: skip
    return F.linear(x, densify(values, metadata), bias)


def _unlike(x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *_: Any) -> str | None:
    odd = x.shape[-1] != 2 * values.shape[1]
    return f"x has {x.shape[-1]} columns, and values are half of another K" if odd else _sparse.unlike(values, metadata)


def _slow(*_: Any, **__: Any) -> str:
    return "a dense copy of the weight, or the matrix units' sparse products, are quicker"


def _few(x: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> str | None:
    few = x.numel() < TIMED * x.shape[-1]
    return f"it has no times below {TIMED} rows of x" if few else _sparse_cuda.left_wgmma(x, values)


CUDA: dict[str, Any] = {"kind": "cuda", "dtypes": ("float16", "bfloat16"), "leaves": ("fwd",)}
SPARSE_MATMUL.eager("naive", "the formula in float32: a dense weight of four times the bytes", reference)
SPARSE_MATMUL.eager("torch", "the weight made dense, then PyTorch's linear (cuBLAS)", _torch, served=True)
SPARSE_MATMUL.compiled("the formula, made dense in passes that torch.compile fuses")
SPARSE_MATMUL.kernel(
    "triton",
    "tiles of the weight become dense in registers: its bytes fall, its operations do not",
    kind="triton",
    fwd=_sparse_triton.fwd,
    bwd=_sparse_triton.fwd,
    supports=_unlike,
    unless=_slow,
    leaves=("fwd",),
    served=True,
)
SPARSE_MATMUL.kernel(
    "cuda_mma",
    "mma.sp: 32 of K in the time of 16; cp.async fills a ring, and the tile turns in shared memory",
    fwd=_sparse_cuda.mma,
    bwd=_sparse_cuda.mma,
    supports=_sparse_cuda.unfit,
    unless=_sparse_cuda.left,
    arch=80,
    **CUDA,
)
SPARSE_MATMUL.kernel(
    "cuda_wgmma",
    "Hopper, wgmma.sp: a warp loads with TMA, clusters multicast, two warpgroups multiply 64 x 256 each",
    fwd=_sparse_cuda.wgmma,
    bwd=_sparse_cuda.wgmma,
    supports=_sparse_cuda.unfit_wgmma,
    unless=_few,
    arch=90,
    newest=90,
    served=True,
    counter="sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    **CUDA,
)
