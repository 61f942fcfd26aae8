"""int8_matmul: y = (a - zero_a) @ b * scale_a * scale_b + bias, for int8, with exact sums.

    sum_k (a_mk - z_m) b_kn = sum_k a_mk b_kn - z_m sum_k b_kn

A program multiplies one tile on the matrix units into int32 sums and scales them in registers: the sums never reach
memory, while a separate dequantising pass writes and reads 4 bytes more per element. With zero_a, a kernel sums b's
columns first. The roof is 2 M N K operations at the rate of 8-bit products.
Source: Jacob et al., 2018 (arXiv:1712.05877), section 2.3; Dettmers et al., LLM.int8(), 2022 (arXiv:2208.07339).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.boundary import kernel_op, launch
from ridgeline.op import Case, Columns, Cost, Op, OwnDtype, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _hopper8
from ridgeline.ops.matmul._operands import Matrix, Sizes
from ridgeline.ops.matmul._scaled import (
    Inside,
    Scale,
    add_columns,
    along_columns,
    along_rows,
    config,
    fault,
    finish,
    grid,
    line,
    place,
    unlike,
)
from ridgeline.select import eager, run

MOST = 65536  # of K: 255 * 128 * 65536 still fits in 32 bits


@triton.jit
def _fwd(
    y,
    a,
    b,
    scale_a,
    scale_b,
    zero_a,
    sums,
    bias,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    M, N, K = sizes
    m, n = place(M, N, BM, BN, GROUP)
    k = tl.arange(0, BK).to(tl.int64)
    at_a = a.data + (m % M)[:, None].to(tl.int64) * a.row_stride + k[None, :] * a.column_stride
    at_b = b.data + k[:, None] * b.row_stride + (n % N)[None, :].to(tl.int64) * b.column_stride
    total = tl.zeros((BM, BN), tl.int32)
    ahead = tl.full((), BK, tl.int64)  # BK strides may exceed 2^31
    for start in range(0, K, BK):
        if EVEN:
            left, right = tl.load(at_a), tl.load(at_b)
        else:
            left = tl.load(at_a, mask=k[None, :] < K - start, other=0)
            right = tl.load(at_b, mask=k[:, None] < K - start, other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        at_a += a.column_stride * ahead
        at_b += b.row_stride * ahead
    if zero_a.data is not None:
        zero = tl.load(zero_a.data + m.to(tl.int64) * zero_a.stride, mask=m < M, other=0).to(tl.int32)
        total -= zero[:, None] * tl.load(sums + n, mask=n < N, other=0)[None, :]
    v = total.to(tl.float32) * tl.load(scale_a.data + m.to(tl.int64) * scale_a.stride, mask=m < M, other=0)[:, None]
    v *= tl.load(scale_b.data + n.to(tl.int64) * scale_b.stride, mask=n < N, other=0)[None, :]
    finish(y, v, bias, m, n, M, N)


def _launch(y: torch.Tensor, sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> None:
    """y = the product. a: (M, K); b: (K, N), any strides; y: contiguous; sums: (N,), int32, with zero_a."""
    scale_a, scale_b, zero_a, bias, _ = rest
    (M, K), N = a.shape, b.shape[1]
    if zero_a is not None:
        add_columns(sums, b)
    lines = line(scale_a, 0), line(scale_b, -1), line(zero_a, 0)
    operands = Matrix(a, *a.stride()), Matrix(b, *b.stride())
    given = y, *operands, *lines, None if zero_a is None else sums, line(bias, 0), Sizes(M, N, K)
    launch(
        _fwd,
        grid(M, N),
        *given,
        config=lambda: config("int8_matmul", a, b, wide=True),
        key=(M, N, K, a.stride(), b.stride()),
    )


@kernel_op(
    "int8_matmul_fwd(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? zero_a, Tensor? bias, "
    "ScalarType dtype, str? impl) -> Tensor"
)
def _forward(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    *given, dtype, impl = rest
    y = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    sums = torch.empty((0 if given[2] is None else b.shape[1],), dtype=torch.int32, device=a.device)
    run(INT8_MATMUL, "fwd", impl, (y, sums), a, b, *given, dtype)
    return y


def _finished(
    sums: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any, out_dtype: torch.dtype
) -> torch.Tensor:
    """Returns the exact sums times their scales, plus the bias, in out_dtype."""
    y = sums.to(scale_a.dtype) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (y if bias is None else y + bias).to(out_dtype)


def reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *,
    zero_a: torch.Tensor | None = None, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:  # fmt: skip
    whole = a.double() if zero_a is None else a.double() - zero_a.reshape(-1, 1)
    return _finished(whole @ b.double(), scale_a, scale_b, bias, out_dtype)


def int8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    zero_a: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns the dequantised product of quantised matrices, `((a - zero_a) @ b) * scale_a * scale_b + bias`.

    a: (M, K) and b: (K, N), int8, any strides. Fastest with K contiguous in both: for a weight quantised as q (N, K),
    pass b = q.T. K is at most 65536, so that int32 sums are exact.
    scale_a: float32, one number or one per row, (M, 1) or (M,). scale_b: float32, one number or one per column, (1, N)
    or (N,): the scale.T of a weight quantised by rows.
    zero_a: int32 or int8, shaped as scale_a, or None: a's zero points, -128 to 127. Values on the GPU are not validated
    (that would synchronise): others may overflow int32.
    bias: (N,), floating point, or None.
    Returns (M, N), contiguous, in out_dtype: torch.bfloat16, float16 or float32. Sums are scaled in float32 and rounded
    once. No gradients flow.
    Raises RidgelineError if shapes, dtypes or devices do not match the above, or if `impl` cannot run the call.
    """
    wrong = fault((torch.int8,), a, b, bias, out_dtype, scale_a=scale_a, scale_b=scale_b, zero_a=zero_a) or _fault(
        a, b, scale_a, scale_b, zero_a
    )
    if wrong:
        raise RidgelineError(f"int8_matmul: {wrong}")
    plain = eager(INT8_MATMUL, impl, a, b)
    if plain is None and impl is None and unlike(a, b, scale_a, scale_b):
        plain = INT8_MATMUL.implementations["naive"]
    if plain is not None and plain.call is not None:
        return plain.call(a, b, scale_a, scale_b, zero_a=zero_a, bias=bias, out_dtype=out_dtype)
    return _forward(
        a, b, scale_a.detach(), scale_b.detach(), zero_a, None if bias is None else bias.detach(), out_dtype, impl
    )


def _fault(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, zero_a: torch.Tensor | None
) -> str | None:
    (M, K), N = a.shape, b.shape[1]
    if K > MOST:
        return f"K must be at most {MOST}, so that int32 sums are exact, got {K}"
    if not along_rows(scale_a, M):
        return f"scale_a must be one number or one for each of {M} rows, ({M}, 1), got {tuple(scale_a.shape)}"
    if not along_columns(scale_b, N):
        return f"scale_b must be one number or one for each of {N} columns, (1, {N}), got {tuple(scale_b.shape)}"
    if zero_a is not None and (not along_rows(zero_a, M) or zero_a.dtype not in (torch.int8, torch.int32)):
        given = f"{zero_a.dtype} {tuple(zero_a.shape)}"
        return f"zero_a must be int32 or int8, one number or one for each of {M} rows, ({M}, 1), got {given}"
    return None


def cost(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> tuple[Cost, None]:
    extra = [t for t in (options.get("zero_a"), options.get("bias")) if t is not None]
    size = a.shape[0] * b.shape[1]
    return Cost(
        nbytes(a, b, *scales, *extra), size * options.get("out_dtype", torch.bfloat16).itemsize, 2 * size * a.shape[1]
    ), None


def _case(M: int, N: int, K: int, what: str = "", a: type[Spec] = Spec, b: type[Spec] = Columns, **facts: Any) -> Case:
    """what: any of "zero", "bias" and "one" (a single scale)."""
    scales = (Scale(1), Scale(1)) if "one" in what else (Scale(M, 1), Scale(1, N))
    options: dict[str, Any] = {"zero_a": Spec(M, 1, dtype="int32", high=128)} if "zero" in what else {}
    own = facts.get("use") != "bench"  # benchmarks: the case's dtype names the matrix units; the result is bfloat16
    options |= {"bias": Spec(N, dtype=None if own else "bfloat16", grad=False)} if "bias" in what else {}
    args = (a(M, K, dtype="int8"), b(K, N, dtype="int8"), *scales)
    return Case(
        f"{M}x{N}x{K}{' ' * bool(what)}{what}",
        args,
        options | {"out_dtype": OwnDtype() if own else torch.bfloat16},
        **facts,
    )


BENCH = [(n, n, n) for n in (1024, 2048, 4096, 8192)] + [
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 2048, 2048),
    (16, 8192, 8192),
]
INT8_MATMUL = Op(
    int8_matmul,
    reference=reference,
    cost=cost,
    sharding="a mK, b Kn, scale_a mK, scale_b Kn, zero_a mK, bias n -> mn",
    roof="int8",
    cases=[
        _case(33, 40, 129),
        _case(33, 40, 129, "zero, bias"),
        _case(70, 130, 64, "one, bias"),
        _case(33, 72, 129, b=Spec),
        _case(70, 131, 257, "zero, bias", a=Inside),
        _case(150, 40, 256, "zero", a=Inside, b=Inside),
        _case(1, 1, 1),
        _case(20, 24, 5000, "zero"),
        _case(256, 256, 256, use="quick"),
        *(_case(*shape, dtypes=("int8",), use="bench") for shape in BENCH),
        _case(4096, 4096, 4096, "zero, bias", dtypes=("int8",), use="bench"),
        _case(4095, 4093, 4097, dtypes=("int8",), use="bench"),
    ],
)


def _cublas(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why torch._int_mm does not take these, or None."""
    if a.is_cuda and (a.shape[0] <= 16 or a.shape[1] % 8 or b.shape[1] % 8 or not a.numel() * b.numel()):
        shapes = f"a is {tuple(a.shape)} and b {tuple(b.shape)}"
        return f"torch._int_mm takes more than 16 rows, and K and N that are multiples of 8, but {shapes}"
    if a.is_cuda and any([t.data_ptr() % 4 or max(t.stride()) % 4 for t in (a, b)]):
        strides = f"the strides are {a.stride()} and {b.stride()}"
        return f"torch._int_mm takes tensors and rows that begin at multiples of 4 bytes; {strides}"
    return None


def _torch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
) -> torch.Tensor:
    reason = _cublas(a, b)
    if reason:
        raise RidgelineError(f"int8_matmul: impl='torch' cannot run this call: {reason}")
    zero, bias, out_dtype = options.get("zero_a"), options.get("bias"), options.get("out_dtype", torch.bfloat16)
    sums = torch._int_mm(a, b)
    if zero is not None:
        sums = sums - zero.reshape(-1, 1) * b.sum(0, dtype=torch.int32)
    if bias is not None or torch.compiler.is_compiling():
        return _finished(sums, scale_a, scale_b, bias, out_dtype)
    y = torch.empty(sums.shape, dtype=out_dtype, device=a.device)  # saves a pass: the second multiplication converts
    return torch.mul(sums * scale_a.detach().reshape(-1, 1), scale_b.detach().reshape(1, -1), out=y)


INT8_MATMUL.eager("naive", "the formula in eager PyTorch, with an exact product in float64", reference, served=True)
INT8_MATMUL.eager(
    "torch",
    "PyTorch's own torch._int_mm (cuBLAS); its int32 sums are written, then read to be scaled",
    _torch,
    supports=_cublas,
)
INT8_MATMUL.compiled("torch._int_mm, with the scaling fused into one pass by torch.compile", _torch, supports=_cublas)
INT8_MATMUL.kernel(
    "triton",
    "one tile per program on 8-bit matrix units, in grouped order; sums are scaled in registers",
    kind="triton",
    fwd=_launch,
    supports=unlike,
    dtypes=("int8",),
    served=True,
)
INT8_MATMUL.kernel("gluon_padded", _hopper8.IDEA, fwd=_hopper8.int8_padded, dtypes=("int8",), **_hopper8.PADDED)
INT8_MATMUL.kernel(
    "gluon",
    "Hopper, K contiguous: a warp loads with TMA; one warpgroup multiplies while another stores",
    fwd=_hopper8.int8,
    dtypes=("int8",),
    **_hopper8.WHOLE,
)
