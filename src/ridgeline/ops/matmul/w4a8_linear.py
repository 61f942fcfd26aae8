"""w4a8_linear: y = activation(x W^T + b), x in 8-bit floating point (e4m3), W in 4-bit codes with groups of K.

    y_mn = t_m sum_g s_ng sum_{k in g} (q_nk - z_ng) x_mk + b_n

x has a scale t for each row, W = (q - z) s. q - z is a whole number up to 16 and exact in e4m3, so the product runs on
8-bit matrix units, at twice the rate of 16-bit ones. A group's sum moves to float32 before it is scaled. With few rows
of x the weight's bytes are the limit, as in `int4_linear`. The kernels are in `_few_bits.py`.
Source: Lin et al., QServe: W4A8KV4 quantization and system co-design, 2024 (arXiv:2405.04532).
"""

from __future__ import annotations

from typing import Any

import torch

import ridgeline
from ridgeline import device
from ridgeline.boundary import kernel_op
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _few_bits
from ridgeline.ops.matmul._epilogue import ACTIVATIONS
from ridgeline.ops.matmul._scaled import Scale
from ridgeline.ops.matmul.matmul import rows_of
from ridgeline.select import by_kind, run

_Maybe = torch.Tensor | None
E4M3 = torch.float8_e4m3fn


@kernel_op(
    "w4a8_linear_fwd(Tensor x, Tensor q, Tensor scale, Tensor? zero, Tensor? x_scale, Tensor? bias, str activation, "
    "ScalarType dtype, str? impl) -> Tensor"
)
def _forward(x: torch.Tensor, q: torch.Tensor, *rest: Any) -> torch.Tensor:
    *given, dtype, impl = rest
    y = torch.empty((x.shape[0], q.shape[0]), dtype=dtype, device=x.device)
    parts = torch.empty(_few_bits.ROOM, dtype=torch.float32, device=x.device)
    run(W4A8_LINEAR, "fwd", impl, (y, parts), x, _few_bits.words(q), *given)
    return y


def _launch(
    y: torch.Tensor, parts: torch.Tensor, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe,
    x_scale: _Maybe, bias: _Maybe, activation: str
) -> None:  # fmt: skip
    """Fills y (M, N). x: (M, K), floating point, or e4m3 codes with x_scale (M,)."""
    if x_scale is None:
        x, x_scale = ridgeline.quantize_fp8(x, block="row")
    _few_bits.fwd(y, parts, x, q, scale, zero, bias, activation, x_scale)


def reference(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe = None, *, x_scale: _Maybe = None,
    bias: _Maybe = None, activation: str | None = None, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    x, x_scale, out_dtype = _quantised(x, x_scale, out_dtype)
    wide = torch.promote_types(torch.promote_types(out_dtype, torch.float32), x_scale.dtype)
    weight = _few_bits.dequantised(q, scale.detach().to(wide), zero, wide)
    y = x.to(wide) * x_scale.to(wide).reshape(*x.shape[:-1], 1) @ weight.T
    return ACTIVATIONS[activation or ""](y if bias is None else y + bias.to(wide)).to(out_dtype)


def _quantised(x: torch.Tensor, x_scale: Any, out_dtype: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Returns x in e4m3 with its scales, and the result's dtype."""
    if x_scale is not None:
        return x, x_scale, out_dtype or torch.bfloat16
    codes, scale = ridgeline.quantize_fp8(x, block="row")
    return codes, scale, out_dtype or x.dtype


def w4a8_linear(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *,
    x_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(x @ W.T + bias)`, (..., N), for W = (q - zero) * scale, x in e4m3. It has no gradients.

    x: (..., K), float32, float16 or bfloat16, which `quantize_fp8(x, block="row")` quantises first; or float8_e4m3fn
    with x_scale: (...,) or (..., 1), float32, the scale of each row.
    q: (N, K / 2), uint8, the even k in the low half of a byte, as `quantize_int4` returns it. scale: (N, K / group),
    float32, float16 or bfloat16. zero: uint8, of the scale's shape, at most 16; None is 8. bias: (N,), floating point.
    activation: None, "silu", "gelu" or "gelu_tanh". out_dtype: float32, float16 or bfloat16; None is x's dtype, or
    bfloat16 for codes. Groups are multiples of 32.
    Products are exact. Hopper's 8-bit matrix units add those of a group in about 14 bits, so a float32 result is made
    by 16-bit units instead; sums of groups and scales are float32.
    Raises RidgelineError if shapes, dtypes or devices do not match, if an argument requires a gradient, or if `impl`
    cannot run the call. The kernel needs 8-bit matrix units (NVIDIA, sm_89 or later); elsewhere PyTorch serves.
    """
    (plain,) = _look(x, q, scale, zero, x_scale, bias, activation, out_dtype, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, q, scale, zero, x_scale=x_scale, bias=bias, activation=activation, out_dtype=out_dtype)
    x_scale = None if x_scale is None else x_scale.reshape(-1)
    zero, x_scale, bias = (None if t is None else t.contiguous() for t in (zero, x_scale, bias))
    dtype = out_dtype or (torch.bfloat16 if x.dtype == E4M3 else x.dtype)
    given = rows_of(x.detach()).contiguous(), q.contiguous(), scale.contiguous(), zero, x_scale, bias
    y = _forward(*given, activation or "", dtype, impl)
    return y.view(*x.shape[:-1], q.shape[0])


@by_kind(6, optional=3, strides=True, gradients=True)
def _look(
    x: Any, q: Any, scale: Any, zero: Any, x_scale: Any, bias: Any, activation: str | None,
    out_dtype: torch.dtype | None, impl: str | None,
) -> tuple[Implementation | None]:  # fmt: skip
    """Checks a call and chooses."""
    _check(x, q, scale, zero, x_scale, bias, activation, out_dtype)
    return (_few_bits.plain_rung(W4A8_LINEAR, impl, x, _unfit(x, q, scale)),)


def _check(
    x: Any, q: Any, scale: Any, zero: Any, x_scale: Any, bias: Any, activation: Any, out_dtype: Any
) -> None:  # fmt: skip
    op = "w4a8_linear"
    tensors = {"x": x, "q": q, "scale": scale, "zero": zero, "x_scale": x_scale, "bias": bias}
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor) and torch.is_grad_enabled() and t.requires_grad:
            raise RidgelineError(f"{op}: it has no gradients, but {name} requires one; use torch.no_grad()")
    if isinstance(x, torch.Tensor) and (x.dtype == E4M3) != (x_scale is not None):
        raise RidgelineError(f"{op}: x_scale goes with an x of float8_e4m3fn, and only with it; x is {x.dtype}")
    double = isinstance(x_scale, torch.Tensor) and x_scale.dtype == torch.float64  # the reference
    stand_in = x.to(torch.float64 if double else torch.float32) if x_scale is not None else x
    same = None if not isinstance(bias, torch.Tensor) else bias.to(stand_in.dtype) if bias.is_floating_point() else bias
    _few_bits.check(op, stand_in, q, scale, same, activation, torch.uint8, zero=zero, x_scale=x_scale)
    _few_bits.check_groups(op, q, scale, zero)
    shapes = x.shape[:-1], (*x.shape[:-1], 1)
    if x_scale is not None and (x_scale.shape not in shapes or x_scale.dtype not in (torch.float32, torch.float64)):
        raise RidgelineError(
            f"{op}: x_scale must be float32 {tuple(shapes[0])}, got {x_scale.dtype} {tuple(x_scale.shape)}"
        )
    if out_dtype is not None and out_dtype not in (*_few_bits.FLOATS, torch.float64):
        raise RidgelineError(f"{op}: out_dtype must be torch.bfloat16, float16 or float32, got {out_dtype!r}")


def _unfit(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why the kernel does not take a call, or None."""
    gpu = device.of(q)
    if gpu.backend == "cuda" and gpu.capability < 89:
        return f"{gpu.name} ({gpu.arch}) has no matrix units for 8-bit floats; sm_89 and later have"
    if gpu.backend == "hip":
        return f"its 8-bit numbers are those of NVIDIA GPUs, and this is {gpu.name}"
    if scale.dtype == torch.float64:
        return "it takes scales of up to 32 bits"
    return _few_bits.unfit(x, q, scale)


def cost(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe = None, **options: Any) -> Any:
    """One read of x's codes and scales and of the weight, one write of y."""
    read, _, flops = _few_bits.work(x, q, scale, zero, options.get("x_scale"), options.get("bias"))
    dtype = options.get("out_dtype") or (torch.bfloat16 if x.dtype == E4M3 else x.dtype)
    rows = nbytes(x) // x.element_size() // max(1, x.shape[-1])
    return Cost(read, rows * q.shape[0] * dtype.itemsize, flops, "float8_e4m3fn"), None


def _case(
    M: int, N: int, K: int, group: int = 128, use: str = "check", zero: bool = False, bias: bool = False, **options: Any
) -> Case:
    what = [f"{M}x{N}x{K}", f"groups of {group}", *["zeros"] * zero, *["bias"] * bias, *options.values()]
    args = [Spec(M, K, grad=False), Spec(N, K // 2, dtype="uint8", high=256), Scale(N, K // group, grad=False)]
    args += [Spec(N, K // group, dtype="uint8", high=17)] * zero
    options |= {"bias": Spec(N, grad=False)} if bias else {}
    return Case(", ".join(what), tuple(args), options, dtypes=_few_bits.DTYPES[use], use=use)


W4A8_LINEAR = Op(
    w4a8_linear,
    reference=reference,
    cost=cost,
    sharding=lambda x_scale=None, **_: (
        None if x_scale is not None else "x ...K, q nK, scale nK, zero nK, bias n -> ...n"
    ),
    cases=[
        _case(3, 40, 256),
        _case(17, 24, 192, 64, zero=True, bias=True, activation="gelu"),
        _case(2, 16, 96, 32, activation="silu"),
        _case(16, 1024, 1024, use="quick"),
        *(_case(*shape, use="bench") for shape in _few_bits.BENCH),
    ],
)


def _torch(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe = None, **options: Any) -> torch.Tensor:
    return reference(x, q, scale, zero, **options)


W4A8_LINEAR.eager("torch", "both operands dequantised to float32, then PyTorch's product", _torch, served=True)
W4A8_LINEAR.kernel(
    "triton",
    "x is quantised, 4-bit codes become e4m3 numbers in registers, on 8-bit matrix units; groups scaled in float32",
    kind="triton",
    fwd=_launch,
    supports=_unfit,
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn"),
    served=True,
)
