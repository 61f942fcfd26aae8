"""int8_sparse_matmul: y = x W^T * scale_x * scale_w + bias for int8 and a 2:4 sparse weight, with exact sums.

    y_mn = s_m t_n sum_g (v_{n, 2g} x_{m, 4g + i0} + v_{n, 2g+1} x_{m, 4g + i1}) + b_n

As `sparse_matmul`, whose kernels these are: bytes in place of halves are twice as many columns in the same tiles, and
an instruction takes 64 of K. Sums are int32, scaled in registers. The roof is M N K operations at the rate of 8 bits.
Source: Mishra et al., Accelerating sparse deep neural networks, 2021 (arXiv:2104.08378).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Op, OwnDtype, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _sparse, _sparse_cuda, _sparse_triton
from ridgeline.ops.matmul._scaled import OUT, Scale, along_rows
from ridgeline.ops.matmul.int8_matmul import MOST, int8_matmul
from ridgeline.select import eager, run

_Maybe = torch.Tensor | None


@kernel_op(
    "int8_sparse_matmul_fwd(Tensor x, Tensor values, Tensor metadata, Tensor scale_x, Tensor scale_w, Tensor? bias, "
    "ScalarType dtype, str? impl) -> Tensor"
)
def _forward(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor,
    bias: _Maybe, dtype: torch.dtype, impl: str | None,
) -> torch.Tensor:  # fmt: skip
    y = torch.empty((x.shape[0], values.shape[0]), dtype=dtype, device=x.device)
    run(INT8_SPARSE_MATMUL, "fwd", impl, (y,), x, values, metadata, bias, scale_x, scale_w, dtype)
    return y


def reference(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, *,
    bias: _Maybe = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:  # fmt: skip
    sums = x.double() @ _sparse.plain_densify(values, metadata).double().T
    y = sums.to(scale_x.dtype) * scale_x.reshape(-1, 1) * scale_w.reshape(1, -1)
    return (y if bias is None else y + bias).to(out_dtype)


def int8_sparse_matmul(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, *,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `(x @ W.T) * scale_x * scale_w + bias`, (M, N), for the int8 2:4 sparse weight of (values, metadata).

    x: (M, K) and values: (N, K / 2), int8, any strides; K is at most 65536, so that int32 sums are exact. metadata:
    uint8 (ceil(K / 64), N, 8), not validated. To make them: `values, metadata = sparsify(w)`, then
    `quantize_int8(values, granularity="row")`.
    scale_x: float32, one number or one per row of x, (M,) or (M, 1); scale_w: alike for the rows of W. bias: (N,),
    out_dtype, or None. out_dtype: torch.bfloat16, float16 or float32. CUDA C++ takes 16 bits, K a multiple of 32; other
    calls multiply a dense copy. Sums are scaled in float32 and rounded once. No gradients flow.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    _check(x, values, metadata, scale_x, scale_w, bias, out_dtype)
    plain = eager(INT8_SPARSE_MATMUL, impl, x, values, metadata, bias, scale_x, scale_w, out_dtype)
    if plain is None and impl is None and scale_x.dtype == torch.float64:
        plain = INT8_SPARSE_MATMUL.implementations["naive"]
    if plain is not None and plain.call is not None:
        return plain.call(x, values, metadata, scale_x, scale_w, bias=bias, out_dtype=out_dtype)
    given = x.contiguous(), values.contiguous(), metadata.contiguous()
    scales = _each(scale_x, x.shape[0]), _each(scale_w, values.shape[0])
    return _forward(*given, *scales, None if bias is None else bias.detach().contiguous(), out_dtype, impl)


def _each(scale: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a number for each row, contiguous."""
    return scale.detach().reshape(-1).expand(count).contiguous()


def _check(x: Any, values: Any, metadata: Any, scale_x: Any, scale_w: Any, bias: Any, out_dtype: Any) -> None:
    """Raises RidgelineError unless the arguments fit."""
    others = {"x": x, "scale_x": scale_x, "scale_w": scale_w, **({} if bias is None else {"bias": bias})}
    _sparse.check("int8_sparse_matmul", values, metadata, **others)
    double = out_dtype == torch.float64 == scale_x.dtype == scale_w.dtype  # the reference
    reason, K = None, 2 * values.shape[1]
    if x.dtype != torch.int8 or values.dtype != torch.int8:
        reason = f"x and values must be int8, got {x.dtype} and {values.dtype}"
    elif x.dim() != 2 or x.shape[1] != K:
        reason = f"x must be (M, {K}) for values {tuple(values.shape)}, got {tuple(x.shape)}"
    elif K > MOST:
        reason = f"K must be at most {MOST}, so that int32 sums are exact, got {K}"
    elif scale_x.dtype != scale_w.dtype or scale_x.dtype not in (torch.float32, torch.float64):
        reason = f"scale_x and scale_w must be float32, got {scale_x.dtype} and {scale_w.dtype}"
    elif not along_rows(scale_x, x.shape[0]):
        reason = f"scale_x must be one number or one for each of {x.shape[0]} rows, got {tuple(scale_x.shape)}"
    elif not along_rows(scale_w, values.shape[0]):
        reason = f"scale_w must be one number or one for each of {values.shape[0]} rows, got {tuple(scale_w.shape)}"
    elif out_dtype not in OUT and not double:
        reason = f"out_dtype must be torch.bfloat16, float16 or float32, got {out_dtype!r}"
    elif bias is not None and (bias.shape != values.shape[:1] or bias.dtype != out_dtype):
        reason = f"bias must be {out_dtype} {tuple(values.shape[:1])}, got {bias.dtype} {tuple(bias.shape)}"
    if reason:
        raise RidgelineError(f"int8_sparse_matmul: {reason}")


def cost(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor,
    **options: Any,
) -> tuple[Cost, None]:  # fmt: skip
    bias, size = options.get("bias"), options.get("out_dtype", torch.bfloat16).itemsize
    read = nbytes(x, values, metadata, scale_x, scale_w) + (0 if bias is None else nbytes(bias))
    return Cost(read, x.shape[0] * values.shape[0] * size, 2 * x.shape[0] * values.numel()), None


def _dense(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    weight = _sparse.plain_densify(values, metadata)
    across = scale_w.reshape(1, -1) if scale_w.numel() > 1 else scale_w
    return int8_matmul(x, weight.T, scale_x, across, **options, impl=None if x.is_cuda else "naive")


def _unlike(x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, *rest: Any) -> str | None:
    if x.shape[-1] != 2 * values.shape[1]:
        return f"x has {x.shape[-1]} columns, and values are half of another K"
    return _double(rest) or _sparse.unlike(values, metadata)


def _double(rest: tuple[Any, ...]) -> str | None:
    """Returns why kernels do not take scales, which follow the bias, or None."""
    return "it takes float32 scales, but one is float64" if torch.float64 in [s.dtype for s in rest[1:3]] else None


def _slow(*_: Any, **__: Any) -> str:
    return "a dense copy of the weight, or the matrix units' sparse products, are quicker"


def _wide(given: tuple[Any, ...]) -> str | None:
    """Returns why CUDA C++ does not write the result, whose dtype is the last argument, or None."""
    return "it writes 16 bits a number, and out_dtype is float32" if torch.float32 in given[-1:] else None


def _unfit(*given: Any) -> str | None:
    return _wide(given) or _double(given[3:]) or _sparse_cuda.unfit(*given)


def _unfit_wgmma(*given: Any) -> str | None:
    return _wide(given) or _double(given[3:]) or _sparse_cuda.unfit_wgmma(*given)


def _left(*given: Any, **_: Any) -> str | None:
    return _wide(given) or _sparse_cuda.left(*given)


def _left_wgmma(*given: Any, **_: Any) -> str | None:
    return _wide(given) or _sparse_cuda.left_wgmma(*given)


def _mma(y: torch.Tensor, *given: Any) -> None:
    _sparse_cuda.mma(y, *given[:-1])


def _wgmma(y: torch.Tensor, *given: Any) -> None:
    _sparse_cuda.wgmma(y, *given[:-1])


def _triton(y: torch.Tensor, *given: Any) -> None:
    _sparse_triton.fwd(y, *given[:-1])


def _case(M: int, N: int, K: int, bias: bool = False, **facts: Any) -> Case:
    args = Spec(M, K, dtype="int8"), Spec(N, K // 2, dtype="int8"), _sparse.Metadata(N, K), Scale(M, 1), Scale(N, 1)
    own = facts.get("use") != "bench"  # benchmarks: the case's dtype names the matrix units; the result is bfloat16
    options: dict[str, Any] = {"bias": Spec(N, grad=False)} if bias else {}
    options["out_dtype"] = OwnDtype() if own else torch.bfloat16
    return Case(f"{M}x{N}x{K}{' bias' * bias}", args, options, **facts)


INT8_SPARSE_MATMUL = Op(
    int8_sparse_matmul,
    reference=reference,
    cost=cost,
    sharding="x mK, values nK, metadata BnE, scale_x mK, scale_w nK, bias n -> mn",
    cases=[
        _case(33, 40, 128, bias=True),
        _case(150, 136, 416),
        _case(5, 35, 72),
        _case(300, 264, 96, bias=True),
        _case(256, 256, 256, use="quick"),
        *(_case(n, n, n, dtypes=("int8",), use="bench") for n in (4096, 8192)),
    ],
)

INT8_SPARSE_MATMUL.eager(
    "naive", "the formula in eager PyTorch, with an exact product in float64", reference, served=True
)
INT8_SPARSE_MATMUL.eager("dense", "the weight made dense, then int8_matmul", _dense, served=True)
KERNEL: dict[str, Any] = {"dtypes": ("int8",)}  # the CUDA kernels by name alone: no GPU has run them yet
INT8_SPARSE_MATMUL.kernel(
    "triton", "tiles of the weight become dense in registers", kind="triton", fwd=_triton, supports=_unlike,
    unless=_slow, served=True, **KERNEL,
)  # fmt: skip
INT8_SPARSE_MATMUL.kernel(
    "cuda_mma", "mma.sp: 64 of K in the time of 32", kind="cuda", fwd=_mma, supports=_unfit, unless=_left, arch=80,
    **KERNEL,
)  # fmt: skip
INT8_SPARSE_MATMUL.kernel(
    "cuda_wgmma",
    "Hopper, wgmma.sp: a warp loads with TMA, clusters multicast, two warpgroups multiply",
    kind="cuda",
    fwd=_wgmma,
    supports=_unfit_wgmma,
    unless=_left_wgmma,
    arch=90,
    newest=90,
    **KERNEL,
)
