"""mxfp4_linear: y = activation(x W^T + b) with a weight in OCP's mxfp4: 4-bit numbers, a power of two for each 32.

    y_mn = sum_j 2^(c_nj - 127) sum_{k in block j} q_nk x_mk + b_n        backward: dx = dy W

q is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 or its negative. With few rows of x the weight's 4.25 bits a number are the
limit. Numbers and scales multiply exactly in bfloat16 and float32, so the files of gpt-oss are read as they are. The
kernels are in `_few_bits.py`.
Source: Rouhani et al., Microscaling data formats for deep learning, 2023 (arXiv:2310.10537).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Implementation, Op, RidgelineError, Spec
from ridgeline.ops.matmul import _few_bits
from ridgeline.ops.matmul._epilogue import ACTIVATIONS
from ridgeline.replay import Sure
from ridgeline.select import by_kind
from ridgeline.tiles import float4

_Maybe = torch.Tensor | None


_few_bits.register("mxfp4_linear")


def reference(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, bias: _Maybe = None, activation: str | None = None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ float4.weight(q, scale, wide).T
    return ACTIVATIONS[activation or ""](y if bias is None else y + bias.to(wide)).to(x.dtype)


def _torch(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, bias: _Maybe = None, activation: str | None = None
) -> torch.Tensor:
    return _few_bits.product(x, _few_bits.dequantised(q, scale, None, x.dtype), bias, activation)


def mxfp4_linear(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None = None,
    activation: str | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(x @ W.T + bias)`, (..., N), for a weight W in mxfp4. Gradients flow to x and bias.

    x: (..., K), float32, float16 or bfloat16; K is a multiple of 32. q: (N, K / 2), uint8, the even k in the low half
    of a byte: a layer's `blocks` (N, K / 32, 16) in gpt-oss's files, flattened. scale: (N, K / 32), uint8, e8m0 codes:
    its `scales`. `formats.pack_mxfp4` makes both from a weight. bias: (N,), in x's dtype, or None.
    activation: None, "silu", "gelu" or "gelu_tanh".
    The weight is exact, sums are float32, and the result is rounded once. Autocast casts x and bias first.
    Above 64 rows a copy of the weight in x's dtype, exact but for float16, is multiplied.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, bias = _few_bits.cast(x, bias)
    plain, settled, sure = _look(x, q, scale, bias, activation, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, q, scale, bias=bias, activation=activation)
    return _few_bits.call("mxfp4_linear", x, q, scale, None, bias, activation, impl, settled, sure)


@by_kind(4, optional=1, strides=True, gradients=True, sure=True)
def _look(
    x: Any, q: Any, scale: Any, bias: Any, activation: str | None, impl: str | None
) -> tuple[Implementation | None, bool, Sure | None]:
    """Checks a call and chooses. Returns too whether it is `settled`."""
    _few_bits.check("mxfp4_linear", x, q, scale, bias, activation, torch.uint8, (torch.uint8,))
    wanted = q.shape[0], q.shape[1] // 16
    if q.shape[1] % 16 or tuple(scale.shape) != wanted:
        given = f"q {tuple(q.shape)} and scale {tuple(scale.shape)}"
        raise RidgelineError(
            f"mxfp4_linear: q must be (N, K / 2) and scale (N, K / 32), K a multiple of 32, got {given}"
        )
    plain = _few_bits.plain_rung(MXFP4_LINEAR, impl, x, _few_bits.unfit(x, q, scale))
    return plain, _few_bits.settled(x, q, scale, bias), None


class _Powers(Spec):
    """Codes of scales from 2^-8 to 1."""

    def make(self, *args: Any) -> torch.Tensor:
        return super().make(*args) + 119


def _case(M: int, N: int, K: int, use: str = "check", bias: bool = False, **options: Any) -> Case:
    what = [f"{M}x{N}x{K}", *["bias"] * bias, *options.values()]
    args = Spec(M, K), Spec(N, K // 2, dtype="uint8", high=256), _Powers(N, K // 32, dtype="uint8", high=9)
    options |= {"bias": Spec(N)} if bias else {}
    return Case(", ".join(what), args, options, dtypes=_few_bits.DTYPES[use], use=use)


MXFP4_LINEAR = Op(
    mxfp4_linear,
    reference=reference,
    cost=_few_bits.cost,
    sharding="x ...K, q nK, scale nK, bias n -> ...n",
    flops={"few_bits_weight": lambda *_: 0},  # a copy of the weight; the products are matmul's or torch's
    cases=[
        _case(3, 40, 256),
        _case(1, 70, 96, bias=True),
        _case(17, 24, 640, bias=True, activation="gelu"),
        _case(2, 16, 32, activation="silu"),
        _case(16, 1024, 1024, use="quick"),
        *(_case(*shape, use="bench") for shape in _few_bits.BENCH),
    ],
)

MXFP4_LINEAR.eager("naive", "the formula in float32: a weight of eight times the bytes", reference)
MXFP4_LINEAR.eager("torch", "the weight dequantised to x's dtype, then PyTorch's linear (cuBLAS)", _torch, served=True)
MXFP4_LINEAR.compiled("the formula, dequantised in passes that torch.compile fuses")
MXFP4_LINEAR.kernel(
    "triton",
    "4-bit floating-point codes become numbers in registers by shifts, on the matrix units",
    kind="triton",
    fwd=_few_bits.fwd,
    supports=_few_bits.unfit,
    bwd=_few_bits.fwd,
    unless=_few_bits.few,
    leaves=("fwd",),
    served=True,
)
