"""mlp's kernel, both products of a layer with hidden values in registers, and its backward by PyTorch's products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, first_order, kernel_op, launch
from ridgeline.op import LOADED, dtype_name
from ridgeline.ops.matmul._activated import bend, unbend
from ridgeline.ops.matmul._operands import Matrix
from ridgeline.ops.matmul.matmul import precision, sum_of_rows
from ridgeline.select import run

WIDEST = 256  # columns of x and of y: a row of either must fit in registers


FEW, HEAVY = 1024, 1 << 16  # rows that leave most multiprocessors idle; numbers of both weights that one reads slowly


def few(rows: int, weights: int) -> bool:
    """Returns whether two products are faster: few programs would each walk large weights."""
    return rows <= FEW and weights > HEAVY


class Biases(NamedTuple):
    first: Any
    second: Any


@triton.jit
def _fwd(
    y,
    x,
    w1,
    w2,
    biases,
    sizes,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """BM rows of y. BK and BN hold all columns of x and of y; EVEN: these, and BH steps of H, are exact."""
    M, K, H, N = sizes
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k, n, h = tl.arange(0, BK), tl.arange(0, BN), tl.arange(0, BH)
    at_x = x.data + (m % M)[:, None].to(tl.int64) * x.row_stride + k[None, :] * x.column_stride
    rows = tl.load(at_x) if EVEN else tl.load(at_x, mask=(k < K)[None, :], other=0.0)
    at_1 = w1.data + h[None, :].to(tl.int64) * w1.row_stride + k[:, None] * w1.column_stride
    at_2 = w2.data + n[None, :].to(tl.int64) * w2.row_stride + h[:, None] * w2.column_stride
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, H, BH):
        if EVEN:
            first, second = tl.load(at_1), tl.load(at_2)
        else:
            here = start + h < H
            first = tl.load(at_1, mask=(k < K)[:, None] & here[None, :], other=0.0)
            second = tl.load(at_2, mask=here[:, None] & (n < N)[None, :], other=0.0)
        hidden = tl.dot(rows, first, input_precision=PRECISION)
        if biases.first is not None:
            hidden += tl.load(biases.first + start + h, mask=start + h < H, other=0.0).to(tl.float32)[None, :]
        hidden = bend(hidden, ACTIVATION, y.dtype.element_ty)
        total = tl.dot(hidden.to(y.dtype.element_ty), second, total, input_precision=PRECISION)
        at_1 += BH * tl.cast(w1.row_stride, tl.int64)
        at_2 += BH * tl.cast(w2.column_stride, tl.int64)
    if biases.second is not None:
        total += tl.load(biases.second + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at_y = y + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at_y, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


_Maybe = torch.Tensor | None


def forward(
    y: torch.Tensor, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b1: _Maybe, b2: _Maybe, activation: str,
    precision: str
) -> None:  # fmt: skip
    """Fills y, contiguous; x and the weights have any strides, the biases are contiguous."""
    (M, K), (N, H) = x.shape, w2.shape
    gpu = device.of(x)
    wide, tall = (max(16, triton.next_power_of_2(n)) for n in (K, N))

    def config() -> dict[str, Any]:
        key = " ".join([dtype_name(x), *[str(min(1 << 20, triton.next_power_of_2(d))) for d in (M, K, H, N)]])
        rule = lambda: _rule(gpu, x.dtype, M, H, max(wide, tall))  # noqa: E731
        chosen = tuning.config(gpu, "mlp", "fwd", key, rule, lambda: _SPACE)
        return chosen | {"EVEN": K == wide and N == tall and H % chosen["BH"] == 0}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(M, c["BM"]),)

    matrices = [Matrix(t, *t.stride()) for t in (x, w1, w2)]
    facts = {"BK": wide, "BN": tall, "PRECISION": precision, "ACTIVATION": activation}
    launch(_fwd, grid, y, *matrices, Biases(b1, b2), (M, K, H, N), config=config, key=(M, K, H, N), **facts)


def _rule(gpu: device.Device, dtype: torch.dtype, M: int, H: int, wide: int) -> tuning.Config:
    """Returns the tile: rows for each multiprocessor, and hidden columns so that weights fit in shared memory."""
    if dtype == torch.float32:
        return {"BM": 32, "BH": 16, "num_warps": 4, "num_stages": 1 if wide > 128 else 2}
    roomy = gpu.capability in (90, 100)
    bm = 128 if roomy or wide <= 128 else 64
    while bm > 16 and triton.cdiv(M, bm) < gpu.multiprocessors:
        bm //= 2
    bh = 64 if roomy or wide <= 64 else 32
    warps = 8 if bm == 128 and (wide > 64 or roomy) else 4
    return {"BM": bm, "BH": min(bh, max(16, triton.next_power_of_2(H))), "num_warps": warps, "num_stages": 2}


_SPACE = [
    {"BM": bm, "BH": bh, "num_warps": warps, "num_stages": stages}
    for bm, warps in ((128, 8), (128, 4), (64, 4), (32, 4), (16, 4))
    for bh, stages in ((64, 2), (64, 3), (128, 2), (32, 3))
]


@kernel_op(
    "mlp_fwd(Tensor x, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, str activation, str precision, str? impl) "
    "-> Tensor"
)
def _fwd_op(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: _Maybe,
    b2: _Maybe,
    activation: str,
    how: str,
    impl: str | None,
) -> torch.Tensor:
    y = x.new_empty((x.shape[0], w2.shape[0]))
    run(LOADED["mlp"], "fwd", impl, (y,), x, w1, w2, b1, b2, activation, how)
    return y


@kernel_op("mlp_again(Tensor dh, Tensor z, str activation) -> (Tensor, Tensor)")
def _again_op(dh: torch.Tensor, z: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dz = dh activation'(z) and h = activation(z); all are contiguous."""
    dz, h = torch.empty_like(z), torch.empty_like(z)
    unbend(dz, h, dh, z, activation)
    return dz, h


class Layer(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b1: _Maybe, b2: _Maybe, activation: str,
        impl: str | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, w1, w2, b1)
        ctx.activation = activation
        return _fwd_op(x, w1, w2, b1, b2, activation, precision(), impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w1, w2, b1 = ctx.saved_tensors
        to_x, to_1, to_2, to_b1, to_b2 = ctx.needs_input_grad[:5]
        dx = dw1 = dw2 = db1 = None
        if to_x or to_1 or to_2 or to_b1:
            dz, h = _again_op(dy @ w2, F.linear(x, w1, b1), ctx.activation)
            dx = dz @ w1 if to_x else None
            dw1 = dz.mT @ x if to_1 else None
            dw2 = dy.mT @ h if to_2 else None
            db1 = sum_of_rows(dz) if to_b1 else None
        return dx, dw1, dw2, db1, sum_of_rows(dy) if to_b2 else None, None, None
