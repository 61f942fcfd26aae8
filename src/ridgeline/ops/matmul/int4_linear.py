"""int4_linear: y = activation(x W^T + b) with a weight of 4-bit codes in groups of K: W = (q - zero) * scale.

    y_mn = sum_g s_ng sum_{k in g} (q_nk - z_ng) x_mk + b_n        backward: dx = dy W

With few rows of x the weight's bytes are the limit: a quarter of bf16's. q - z is exact in x's dtype, a group's sum is
float32, and so is its scale. The kernels are in `_few_bits.py` and, for few rows, `int4.cu`.
Source: Frantar et al., GPTQ, 2022 (arXiv:2210.17323); Lin et al., AWQ, 2023 (arXiv:2306.00978).
"""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.op import Case, Implementation, Op, Spec
from ridgeline.ops.matmul import _few_bits, _int4_cuda
from ridgeline.ops.matmul._epilogue import ACTIVATIONS
from ridgeline.ops.matmul._scaled import Scale
from ridgeline.replay import Sure
from ridgeline.select import by_kind

_Maybe = torch.Tensor | None


_few_bits.register("int4_linear")


def reference(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe = None, *,
    g_idx: _Maybe = None, bias: _Maybe = None, activation: str | None = None
) -> torch.Tensor:  # fmt: skip
    codes = torch.stack((q & 15, q >> 4), -1).flatten(1)
    group = torch.arange(codes.shape[1], device=q.device) // _few_bits.group_of(q, scale) if g_idx is None else g_idx
    wide = torch.promote_types(x.dtype, torch.float32)
    zeros: Any = 8 if zero is None else zero[:, group.long()].to(wide)
    weight = (codes.to(wide) - zeros) * scale.detach()[:, group.long()].to(wide)
    y = x.to(wide) @ weight.T
    return ACTIVATIONS[activation or ""](y if bias is None else y + bias.to(wide)).to(x.dtype)


def _torch(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe = None, *,
    g_idx: _Maybe = None, bias: _Maybe = None, activation: str | None = None
) -> torch.Tensor:  # fmt: skip
    weight = _few_bits.dequantised(q, scale.detach(), zero, x.dtype, g_idx)
    return _few_bits.product(x, weight, bias, activation)


def int4_linear(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None, *,
    g_idx: torch.Tensor | None = None, bias: torch.Tensor | None = None, activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `activation(x @ W.T + bias)`, (..., N), for W = (q - zero) * scale. Gradients flow to x and bias.

    x: (..., K), float32, float16 or bfloat16. q: (N, K / 2), uint8, the even k in the low half of a byte, as
    `quantize_int4` returns it. scale: (N, K / group), floating point. zero: uint8, of the scale's shape, at most 128;
    None is 8. bias: (N,), in x's dtype, or None.
    g_idx: (K,), the group of each k, for groups out of order (GPTQ's desc_act); plain PyTorch then computes, and
    `nn.Int4Linear` avoids that: it puts the groups in order once. None: k // group.
    activation: None, "silu", "gelu" or "gelu_tanh". Kernels take groups of multiples of 32.
    q - zero is exact, sums and scales are float32, and the result is rounded once. Autocast casts x and bias first.
    Above 64 rows a copy of the weight is dequantised to x's dtype, which rounds, and multiplied.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, bias = _few_bits.cast(x, bias)
    plain, settled, sure = _look(x, q, scale, zero, g_idx, bias, activation, impl)
    if plain is not None and plain.call is not None:
        return plain.call(x, q, scale, zero, g_idx=g_idx, bias=bias, activation=activation)
    return _few_bits.call("int4_linear", x, q, scale, zero, bias, activation, impl, settled, sure)


@by_kind(6, optional=3, strides=True, gradients=True, sure=True)
def _look(
    x: Any, q: Any, scale: Any, zero: Any, g_idx: Any, bias: Any, activation: str | None, impl: str | None
) -> tuple[Implementation | None, bool, Sure | None]:
    """Checks a call and chooses. Returns too whether it is `settled`."""
    _few_bits.check("int4_linear", x, q, scale, bias, activation, torch.uint8, zero=zero, g_idx=g_idx)
    _few_bits.check_groups("int4_linear", q, scale, zero, g_idx)
    reason = "it takes groups in order, without g_idx" if g_idx is not None else _few_bits.unfit(x, q, scale)
    return _few_bits.plain_rung(INT4_LINEAR, impl, x, reason), _few_bits.settled(x, q, scale, zero, bias), None


def _case(
    M: int, N: int, K: int, group: int = 128, use: str = "check", zero: bool = False, bias: bool = False, **options: Any
) -> Case:
    what = [f"{M}x{N}x{K}", f"groups of {group}", *["zeros"] * zero, *["bias"] * bias, *options.values()]
    args = [Spec(M, K), Spec(N, K // 2, dtype="uint8", high=256), Scale(N, K // group, grad=False)]
    args += [Spec(N, K // group, dtype="uint8", high=17)] * zero
    options |= {"bias": Spec(N)} if bias else {}
    return Case(", ".join(what), tuple(args), options, dtypes=_few_bits.DTYPES[use], use=use)


INT4_LINEAR = Op(
    int4_linear,
    reference=reference,
    cost=_few_bits.cost,
    sharding="x ...K, q nK, scale nK, zero nK, g_idx K, bias n -> ...n",
    flops={"few_bits_weight": lambda *_: 0},  # a copy of the weight; the products are matmul's or torch's
    cases=[
        _case(3, 40, 256),
        _case(1, 70, 512, zero=True),
        _case(17, 24, 192, 64, zero=True, bias=True, activation="gelu"),
        _case(2, 16, 96, 32, activation="silu"),
        _case(11, 70, 768, 256, zero=True, bias=True, activation="silu"),
        _case(16, 1024, 1024, use="quick"),
        *(_case(*shape, use="bench") for shape in _few_bits.BENCH),
        _case(1, 14336, 4096, use="bench", zero=True),
    ],
)

INT4_LINEAR.eager("naive", "the formula in float32: a weight of eight times the bytes", reference)
INT4_LINEAR.eager("torch", "the weight dequantised to x's dtype, then PyTorch's linear (cuBLAS)", _torch, served=True)
INT4_LINEAR.compiled("the formula, dequantised in passes that torch.compile fuses")
INT4_LINEAR.kernel(
    "triton",
    "4-bit codes become numbers in registers, on the matrix units; groups are scaled in float32",
    kind="triton",
    fwd=_few_bits.fwd,
    supports=_few_bits.unfit,
    bwd=_few_bits.fwd,
    unless=_few_bits.few,
    leaves=("fwd",),
    served=True,
)
INT4_LINEAR.kernel(
    "cuda_mma",
    "up to 16 rows: 16 bytes of codes a lane go straight into mma's registers, and warps wait for nothing",
    kind="cuda",
    fwd=_int4_cuda.fwd,
    supports=_int4_cuda.unfit,
    bwd=_few_bits.fwd,
    unless=_int4_cuda.left,
    leaves=("fwd",),
    arch=80,
    dtypes=("float16", "bfloat16"),
    served=True,
)
