"""Epilogues of matrix products on float32 sums: bias, activation and residual; and the backward of an activation."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ridgeline import device
from ridgeline.boundary import early, launch
from ridgeline.tiles.activations import gelu, gelu_slope, gelu_tanh, gelu_tanh_slope, silu, silu_slope

ACTIVATIONS: dict[str, Any] = {
    "": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    if ACTIVATION == "silu":
        x = silu(x, dtype)
    elif ACTIVATION == "gelu":
        x = gelu(x, dtype)
    elif ACTIVATION == "gelu_tanh":
        x = gelu_tanh(x, dtype)
    return x


@triton.jit
def slope(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    if ACTIVATION == "silu":
        y, by = silu_slope(x, dtype)
    elif ACTIVATION == "gelu":
        y, by = gelu_slope(x, dtype)
    else:
        y, by = gelu_tanh_slope(x, dtype)
    return y, by


class Epilogue(NamedTuple):
    """What follows a product x: z = x + bias and y = activation(z) + residual. None where there is no such tensor."""

    z: Any
    bias: Any
    residual: Any


@triton.jit
def finish(x, y, epilogue, m, n, M, N, first, ACTIVATION: tl.constexpr):
    """Stores rows m and columns n of y, and of z (the activation's input), from the sums x.

    first: offset of their matrix in the batch.
    """
    if epilogue.bias is not None:
        x += tl.load(epilogue.bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if epilogue.z is not None:
        at_z = epilogue.z + first + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at_z, x.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
    x = activate(x, ACTIVATION, y.dtype.element_ty)
    if epilogue.residual is not None:
        at_r = epilogue.residual + first + m[:, None].to(tl.int64) * N + n[None, :]
        x += tl.load(at_r, mask=(m[:, None] < M) & (n[None, :] < N), other=0.0).to(tl.float32)
    at_y = y + first + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at_y, x.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit(do_not_specialize=["parts"])
def _sum(
    y,
    epilogue,
    sums,
    M,
    N,
    pitch,
    parts,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    across = tl.cdiv(N, COLUMNS)
    m = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    here = (m[:, None] < M) & (n[None, :] < N)
    size = tl.cast(size, tl.int64)
    at = sums + batch * M * pitch + m[:, None].to(tl.int64) * pitch + n[None, :]
    x = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(0, parts, 4):  # four loads in flight
        x0 = tl.load(at, mask=here, other=0.0)
        x1 = tl.load(at + size, mask=here & (part + 1 < parts), other=0.0)
        x2 = tl.load(at + 2 * size, mask=here & (part + 2 < parts), other=0.0)
        x3 = tl.load(at + 3 * size, mask=here & (part + 3 < parts), other=0.0)
        x = x + x0 + x1 + x2 + x3
        at += 4 * size
    finish(x, y, epilogue, m, n, M, N, batch * M * N, ACTIVATION)


def add_up(y: torch.Tensor, sums: torch.Tensor, epilogue: Epilogue, activation: str) -> None:
    """Adds the partial sums (parts, batch, M, pitch) over the parts of K, in order, into y (batch, M, N)."""
    parts, batch, M, pitch = sums.shape
    N = y.shape[-1]
    tile = 2048 if batch * M * N >= 1 << 20 else 512  # smaller tiles keep every multiprocessor busy on small outputs
    columns = min(tile // 2, triton.next_power_of_2(N))
    rows = tile // columns
    grid = triton.cdiv(M, rows) * triton.cdiv(N, columns), batch
    facts = {"ROWS": rows, "COLUMNS": columns, "ACTIVATION": activation, "num_warps": 4, **early(device.of(y))}
    launch(_sum, grid, y, epilogue, sums, M, N, pitch, parts, batch * M * pitch, **facts)


@triton.jit
def _slope(dz, dy, z, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, by = slope(tl.load(z + i, mask=i < size).to(tl.float32), ACTIVATION, z.dtype.element_ty)
    d = tl.load(dy + i, mask=i < size).to(tl.float32) * by
    tl.store(dz + i, d.to(dz.dtype.element_ty), mask=i < size)


@triton.jit
def _gate(y, z, up, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = activate(tl.load(z + i, mask=i < size).to(tl.float32), ACTIVATION, y.dtype.element_ty)
    x *= tl.load(up + i, mask=i < size).to(tl.float32)
    tl.store(y + i, x.to(y.dtype.element_ty), mask=i < size)


@triton.jit
def _ungate(dz, dup, y, dy, z, up, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """y: activation(z) * up again, or None."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < size
    x, by = slope(tl.load(z + i, mask=here).to(tl.float32), ACTIVATION, z.dtype.element_ty)
    d = tl.load(dy + i, mask=here).to(tl.float32)
    factor = tl.load(up + i, mask=here).to(tl.float32)
    tl.store(dup + i, (d * x).to(dup.dtype.element_ty), mask=here)
    tl.store(dz + i, (d * by * factor).to(dz.dtype.element_ty), mask=here)
    if y is not None:
        tl.store(y + i, (x * factor).to(y.dtype.element_ty), mask=here)


def gate(y: torch.Tensor, z: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """y = activation(z) * up; all contiguous."""
    launch(_gate, (triton.cdiv(z.numel(), 1024),), y, z, up, z.numel(), BLOCK=1024, ACTIVATION=activation, num_warps=4)


def ungate(
    dz: torch.Tensor, dup: torch.Tensor, dy: torch.Tensor, z: torch.Tensor, up: torch.Tensor, activation: str,
    y: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """dup = dy * activation(z), dz = dy * up * activation'(z) and, if given, y = activation(z) * up; all contiguous."""
    tensors, blocks = (dz, dup, y, dy, z, up), triton.cdiv(z.numel(), 1024)
    launch(_ungate, (blocks,), *tensors, z.numel(), BLOCK=1024, ACTIVATION=activation, num_warps=4)


def undo(dz: torch.Tensor, dy: torch.Tensor, z: torch.Tensor, activation: str) -> None:
    """dz = dy * activation'(z); all contiguous."""
    launch(
        _slope, (triton.cdiv(z.numel(), 1024),), dz, dy, z, z.numel(), BLOCK=1024, ACTIVATION=activation, num_warps=4
    )
