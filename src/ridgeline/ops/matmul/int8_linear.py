"""int8_linear: y = activation(x W^T + b) with a weight of 8-bit codes, a scale for each row: W = q * scale.

    y_mn = s_n sum_k q_nk x_mk + b_n        backward: dx = dy W

With few rows of x the weight's bytes are the limit: half of bf16's. q is exact in x's dtype, and a row's sum is scaled
in float32. The kernels are in `_few_bits.py`.
Source: Dettmers et al., LLM.int8(), 2022 (arXiv:2208.07339), for scales by rows.
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Implementation, Op, RidgelineError, Spec
from ridgeline.ops.matmul import _few_bits
from ridgeline.ops.matmul._epilogue import ACTIVATIONS
from ridgeline.ops.matmul._scaled import Scale
from ridgeline.replay import Sure
from ridgeline.select import by_kind

_Maybe = torch.Tensor | None


_few_bits.register("int8_linear")


def reference(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, bias: _Maybe = None, activation: str | None = None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ q.to(wide).T * scale.detach().reshape(-1).to(wide)
    return ACTIVATIONS[activation or ""](y if bias is None else y + bias.to(wide)).to(x.dtype)


def _torch(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, bias: _Maybe = None, activation: str | None = None
) -> torch.Tensor:
    return _few_bits.product(x, _few_bits.dequantised(q, scale.detach(), None, x.dtype), bias, activation)


def int8_linear(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None = None,
    activation: str | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(x @ (q * scale).T + bias)`, (..., N). Gradients flow to x and bias.

    x: (..., K), float32, float16 or bfloat16. q: (N, K), int8, as `quantize_int8(w, granularity="row")` returns it.
    scale: (N,) or (N, 1), floating point. bias: (N,), in x's dtype, or None.
    activation: None, "silu", "gelu" or "gelu_tanh".
    q is exact, sums and scales are float32, and the result is rounded once. Autocast casts x and bias first.
    Above 64 rows a copy of the weight is dequantised to x's dtype, which rounds, and multiplied.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, bias = _few_bits.cast(x, bias)
    plain, settled, sure = _look(x, q, scale, bias, activation, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, q, scale, bias=bias, activation=activation)
    return _few_bits.call("int8_linear", x, q, scale, None, bias, activation, impl, settled, sure)


@by_kind(4, optional=1, strides=True, gradients=True, sure=True)
def _look(
    x: Any, q: Any, scale: Any, bias: Any, activation: str | None, impl: str | None
) -> tuple[Implementation | None, bool, Sure | None]:
    """Checks a call and chooses. Returns too whether it is `settled`."""
    _few_bits.check("int8_linear", x, q, scale, bias, activation, torch.int8)
    if tuple(scale.shape) not in ((q.shape[0],), (q.shape[0], 1)):
        raise RidgelineError(
            f"int8_linear: scale must be ({q.shape[0]},) or ({q.shape[0]}, 1), got {tuple(scale.shape)}"
        )
    plain = _few_bits.plain_rung(INT8_LINEAR, impl, x, _few_bits.unfit(x, q, scale))
    return plain, _few_bits.settled(x, q, scale, bias), None


def _case(M: int, N: int, K: int, use: str = "check", bias: bool = False, **options: Any) -> Case:
    what = [f"{M}x{N}x{K}", *["bias"] * bias, *options.values()]
    args = Spec(M, K), Spec(N, K, dtype="int8"), Scale(N, 1, grad=False)
    options |= {"bias": Spec(N)} if bias else {}
    return Case(", ".join(what), args, options, dtypes=_few_bits.DTYPES[use], use=use)


INT8_LINEAR = Op(
    int8_linear,
    reference=reference,
    cost=_few_bits.cost,
    sharding="x ...K, q nK, scale nK, bias n -> ...n",
    cases=[
        _case(3, 40, 256),
        _case(1, 70, 130, bias=True),
        _case(17, 24, 640, bias=True, activation="gelu"),
        _case(40, 24, 640),
        _case(2, 16, 33, activation="silu"),
        _case(16, 1024, 1024, use="quick"),
        *(_case(*shape, use="bench") for shape in _few_bits.BENCH),
    ],
)

INT8_LINEAR.eager("naive", "the formula in float32: a weight of four times the bytes", reference)
INT8_LINEAR.eager("torch", "the weight dequantised to x's dtype, then PyTorch's linear (cuBLAS)", _torch, served=True)
INT8_LINEAR.compiled("the formula, dequantised in passes that torch.compile fuses")
INT8_LINEAR.kernel(
    "triton",
    "8-bit codes become numbers in registers, on the matrix units; splits K if rows of W are few",
    kind="triton",
    fwd=_few_bits.fwd,
    supports=_few_bits.unfit,
    bwd=_few_bits.fwd,
    unless=_few_bits.few,
    leaves=("fwd",),
    served=True,
)
