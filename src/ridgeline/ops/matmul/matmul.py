"""matmul: y = a @ b, by tiles in shared memory, visited in groups that reuse the L2 cache.

A program computes one BM x BN tile of y: it walks K in steps of BK, multiplies on the matrix units and sums in float32.
Programs are numbered down GROUP rows of tiles before the next column, so that a wave of programs shares the tiles of a
and b that it reads (for 9 tiles of a 9 x 9 grid: 54 loads instead of 90).
Source: Tillet, Kung and Cox, Triton, MAPL 2019; the grouped order is from Stanford CS336's lecture on kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Columns, Cost, Op, RidgelineError, Spec, dense_only, dtype_name, get, nbytes
from ridgeline.ops.matmul import _cluster, _half, _hopper, _persistent
from ridgeline.ops.matmul._epilogue import Epilogue, finish
from ridgeline.select import eager, run


class Matrices(NamedTuple):
    """A batch of matrices with its strides; batch_stride is 0 if all are one."""

    data: Any
    batch_stride: int
    row_stride: int
    column_stride: int


@triton.jit
def _fwd(
    y,
    epilogue,
    a,
    b,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    LONG: tl.constexpr,
    CHAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    M, N, K = sizes
    a_k, b_k = a.column_stride, b.row_stride
    if LONG:  # steps along K overflow 32 bits
        a_k, b_k = tl.cast(a_k, tl.int64), tl.cast(b_k, tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * across) * GROUP
    size = min(down - first, GROUP)
    m = (first + pid % (GROUP * across) % size) * BM + tl.arange(0, BM)
    n = pid % (GROUP * across) // size * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Rows past the edge wrap around and are never stored: an index in range costs less than a mask.
    at_a = a.data + batch * a.batch_stride + (m % M)[:, None].to(tl.int64) * a.row_stride + k[None, :] * a_k
    at_b = b.data + batch * b.batch_stride + k[:, None] * b_k + (n % N)[None, :].to(tl.int64) * b.column_stride
    total = tl.zeros((BM, BN), tl.float32)
    before = total
    for start in range(0, K, BK):
        if EVEN:
            left, right = tl.load(at_a), tl.load(at_b)
        else:
            left = tl.load(at_a, mask=k[None, :] < K - start, other=0.0)
            right = tl.load(at_b, mask=k[:, None] < K - start, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        at_a += BK * a_k
        at_b += BK * b_k
        # Sums of sums: a single chain of 65536 additions has six times torch's error.
        if CHAIN and (start + BK) % CHAIN == 0:
            before += total
            total = tl.zeros((BM, BN), tl.float32)
    if CHAIN:
        total += before
    finish(total, y, epilogue, m, n, M, N, batch * M * N, ACTIVATION)


GRID_Y = 65535  # CUDA's limit on blocks along y, one for each matrix of a batch


def by_triton(
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    precision: str,
    *,
    z: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
) -> None:
    """z = a @ b + bias and y = activation(z) + residual, without a batch if z or residual is given.

    a: (B, M, K) or (M, K); b: (B, K, N) or (K, N), any strides; y, z, residual: contiguous. precision: of float32
    products, "ieee" or "tf32".
    """
    if a.dim() == 3 and a.shape[0] > GRID_Y:
        for some in zip(y.split(GRID_Y), a.split(GRID_Y), b.split(GRID_Y), strict=True):
            by_triton(*some, precision)
        return
    M, K, N = a.shape[-2], a.shape[-1], b.shape[-1]
    more = z is not None or residual is not None or activation != ""

    def config() -> dict[str, Any]:
        sizes = [str(min(16384, triton.next_power_of_2(d))) for d in (M, N, K)]
        key = " ".join([dtype_name(a), *sizes, *(["more"] * more)])
        gpu = device.of(a)
        chosen = tuning.config(
            gpu, "matmul", "fwd", key, lambda: _rule(gpu, a.dtype, precision, M, N, K, more), lambda: _SPACE
        )
        return chosen | {"EVEN": K % chosen["BK"] == 0}

    def grid(c: dict[str, Any]) -> tuple[int, ...]:
        return triton.cdiv(M, c["BM"]) * triton.cdiv(N, c["BN"]), a.shape[0] if a.dim() == 3 else 1

    left, right = _strided(a), _strided(b)
    facts = {
        "LONG": max(left.column_stride, right.row_stride) >= 1 << 24,
        "CHAIN": 512 if a.dtype == torch.float32 and precision == "ieee" and K > 1024 else 0,
        "PRECISION": precision,
        "ACTIVATION": activation,
    }
    given = y, Epilogue(z, bias, residual), left, right, _half.Sizes(M, N, K)
    launch(_fwd, grid, *given, config=config, key=(M, N, K, more), **facts)


def _strided(t: torch.Tensor) -> Matrices:
    """Returns a matrix or a batch of matrices as kernels take it."""
    return Matrices(t, t.stride(0) if t.dim() == 3 else 0, *t.stride()[-2:])


def _rule(gpu: device.Device, dtype: torch.dtype, precision: str, M: int, N: int, K: int, more: bool) -> tuning.Config:
    """Returns the tile. more: an epilogue follows, for which a thread with 128 sums has no registers."""
    stages = 3 if gpu.backend == "cuda" else 2
    if dtype == torch.float32 and precision == "ieee":
        return {
            "BM": 64 if K % 16 or gpu.capability >= 100 else 128,
            "BN": 64,
            "BK": 16,
            "GROUP": 8,
            "num_warps": 8,
            "num_stages": stages,
        }
    if (
        dtype == torch.float32
        or gpu.backend != "cuda"
        or K % 64
        or N % 16
        or more
        or M * N < gpu.multiprocessors * 128 * 256
    ):
        wide = 64 if more and N % 16 else 128  # rows of no multiple of 32 bytes need an address per element
        return {"BM": 128, "BN": wide, "BK": 32, "GROUP": 8, "num_warps": 8, "num_stages": stages}
    deep = 64 if gpu.shared_memory >= 227 << 10 else 32
    return {"BM": 128, "BN": 256, "BK": deep, "GROUP": 8, "num_warps": 8, "num_stages": 3}


_SPACE = [
    {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8, "num_warps": warps, "num_stages": stages}
    for bm, bn, warps in ((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4), (64, 128, 4))
    for bk, stages in ((64, 3), (64, 4), (32, 3))
]


@kernel_op("matmul_fwd(Tensor a, Tensor b, str precision, str? impl) -> Tensor")
def _fwd_op(a: torch.Tensor, b: torch.Tensor, precision: str, impl: str | None) -> torch.Tensor:
    y = a.new_empty((*a.shape[:-1], b.shape[-1]))
    run(MATMUL, "fwd", impl, (y,), a, b, precision)
    return y


@torch.compiler.assume_constant_result  # torch.compile guards on the setting
def precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def product(a: torch.Tensor, b: torch.Tensor, impl: str | None, half: bool = False) -> torch.Tensor:
    """Returns a @ b. The precision is an argument, since a launcher may depend on its arguments only.

    half: sums may be float16."""
    return _fwd_op(a, b, "float16" if half else precision(), impl)


def of_any_strides(impl: str | None) -> str | None:
    """Returns the implementation for backward's products, whose incoming gradient may have other strides."""
    return "gluon_padded" if impl in ("gluon", "cuda_cluster") else impl


def in_lines(dy: torch.Tensor) -> torch.Tensor:
    """Returns a gradient of any strides, or a copy of it, with rows of a multiple of 16 bytes."""
    pitch = -(-dy.shape[-1] // 8) * 8
    return (
        dy
        if dy.is_contiguous() and dy.shape[-1] == pitch
        else dy.new_empty((*dy.shape[:-1], pitch))[..., : dy.shape[-1]].copy_(dy)
    )


class _Function(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, impl: str | None, half: bool) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.impl, ctx.half = impl, half
        return product(a, b, impl, half)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        impl = of_any_strides(ctx.impl)
        dy = in_lines(dy) if impl == "triton_persistent" else dy
        da = product(dy, b.mT, impl, ctx.half) if ctx.needs_input_grad[0] else None
        db = product(a.mT, dy, impl, ctx.half) if ctx.needs_input_grad[1] else None
        return da, db, None, None


def in_autocast(*given: Any) -> tuple[Any, ...]:
    """Returns tensors cast to autocast's dtype if it is enabled for the first one's device; others unchanged."""
    first = given[0]
    kind = "cuda" if isinstance(first, torch.Tensor) and first.is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind) or not isinstance(first, torch.Tensor) or first.device.type != kind:
        return given
    to = torch.get_autocast_dtype(kind)
    floats = [isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64 for t in given]
    return tuple([t.to(to) if cast else t for t, cast in zip(given, floats, strict=True)])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Returns x as a matrix of rows, also if they have no elements."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]


def sum_of_rows(dy: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a matrix's rows, a bias's gradient. torch's own sum needs twice the matrix's memory."""
    if torch.compiler.is_compiling():  # Dynamo lets no backward ask for a layout, as public functions do
        return dy.sum(0)
    if dy.shape[0] == 1:
        return dy[0].clone()  # sum_to's would be a view, and gradients are added to in place
    found: torch.Tensor = get("sum_to").function(dy, dy.shape[1:])
    return found.to(dy.dtype)  # autocast sums to float32


def agree(op: str, **tensors: Any) -> None:
    """Raises RidgelineError unless all are dense tensors with the dtype and device of the first."""
    first, x = next(iter(tensors.items()))
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.is_nested:  # before anything asks for its shape
            dense_only(op, (t,))
        if t.dtype != x.dtype or t.device != x.device:
            given = f"{x.dtype} on {x.device} and {t.dtype} on {t.device}"
            raise RidgelineError(f"{op}: {first} and {name} must agree in dtype and device, got {given}")


def reference(a: torch.Tensor, b: torch.Tensor, *, accumulate: str = "float32") -> torch.Tensor:
    return torch.matmul(a, b)


PRODUCTS = 1 << 28  # at most, in memory for `naive` on a CPU; on a GPU eight times as many


def _naive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows, columns = a if a.dim() > 1 else a[None], b if b.dim() > 1 else b[:, None]
    wide = torch.promote_types(a.dtype, torch.float32) if a.is_floating_point() else a.dtype
    y = (rows.to(wide)[..., :, :, None] * columns.to(wide)[..., None, :, :]).sum(-2, dtype=wide).to(a.dtype)
    y = y if b.dim() > 1 else y.squeeze(-1)
    return y if a.dim() > 1 else y.squeeze(-1 if b.dim() == 1 else -2)


def _many(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why `naive` does not take a call, or None."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel()
    count = batch * (a.shape[-2] if a.dim() > 1 else 1) * a.shape[-1] * (b.shape[-1] if b.dim() > 1 else 1)
    most = 8 * PRODUCTS if a.is_cuda else PRODUCTS
    return (
        f"it holds every product in memory, at most {most} on {a.device.type}, but there are {count}"
        if count > most
        else None
    )


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, accumulate: str = "float32", impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """Returns the matrix product `a @ b`, as `torch.matmul`. Gradients flow to a and b.

    a: (..., M, K) or (K,); b: (..., K, N) or (K,); one numeric dtype and device, any strides; leading dimensions
    broadcast. Kernels take float32, float16 and bfloat16; PyTorch multiplies the rest. Returns (..., M, N), without the
    dimension of a vector. float32 products follow `torch.get_float32_matmul_precision()`. Autocast casts both first.
    accumulate: "float32", or "float16" for float16 inputs: then sums of up to 64 products, also of gradients, may be
    float16, rounded after each 16, before they are added in float32. Products up to 65504 in sum stay finite. It is
    chosen on GeForce cards, which add in float16 at twice the rate; other cards' sums stay float32.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    a, b = in_autocast(a, b)
    agree("matmul", a=a, b=b)
    if a.dtype == torch.bool:
        raise RidgelineError("matmul: a and b must be numbers, got torch.bool")
    if not a.dim() or not b.dim() or a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise RidgelineError(f"matmul: the inner sizes of {tuple(a.shape)} and {tuple(b.shape)} must agree")
    if any([m != n and 1 not in (m, n) for m, n in zip(a.shape[:-2][::-1], b.shape[:-2][::-1], strict=False)]):
        raise RidgelineError(f"matmul: the leading sizes of {tuple(a.shape)} and {tuple(b.shape)} must broadcast")
    half = accumulate != "float32"
    if half:
        _half.check(accumulate, a)
    plain = eager(MATMUL, impl, a, b, accumulate) if half else eager(MATMUL, impl, a, b)
    if plain is not None:
        return plain.call(a, b)  # type: ignore[misc]
    if a.dim() == 1:
        return matmul(a[None], b, accumulate=accumulate, impl=impl).squeeze(-2 if b.dim() > 1 else -1)
    if b.dim() == 1:
        return matmul(a, b[:, None], accumulate=accumulate, impl=impl).squeeze(-1)
    half = half and impl in (None, "triton_half")  # other kernels by name have float32 sums, which are allowed too
    if b.dim() == 2:
        return differentiate(_Function, rows_of(a), b, impl, half).view(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (t.expand(*batch, *t.shape[-2:]).reshape(batch.numel(), *t.shape[-2:]) for t in (a, b))
    return differentiate(_Function, left, right, impl, half).view(*batch, a.shape[-2], b.shape[-1])


def untimed(rows: int, N: int, K: int) -> str | None:
    """Returns why Hopper's kernels are not chosen for products of these sizes, or None if they lead on an H100."""
    if rows < 1024 or N < 1024 or K < 1024:
        return "it is not measured to be faster below 1024 rows, columns or inner elements"
    if N % 8 == 0 == K % 8 and (N % 64 or K % 64):
        return "it is measured to be faster only for rows of a multiple of 128 bytes, or of no multiple of 16"
    return None


def _unless(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why a call is left to PyTorch, or None: cuBLAS is slow only for rows that are no multiple of 16 bytes."""
    N, K = b.shape[-1] if b.dim() > 1 else 1, a.shape[-1]
    if reason := _hopper.empty(a, b):
        return reason
    if N % 8 == 0 and K % 8 == 0:
        return "cuBLAS is as fast where N and K are multiples of 8"
    return (
        untimed(a.shape[-2] if b.dim() > 2 else a.numel() // K if K else 0, N, K)
        if a.dim() > 1
        else "a single row does not fill tiles"
    )


def cost(a: torch.Tensor, b: torch.Tensor, *, accumulate: str = "float32") -> tuple[Cost, Cost]:
    y = torch.matmul(a.detach().to("meta"), b.detach().to("meta"))
    flops = 2 * y.numel() * a.shape[-1]
    return Cost(nbytes(a, b), nbytes(y), flops), Cost(nbytes(y, a, b), nbytes(a, b), 2 * flops)


def _square(n: int, use: str, *dtypes: str) -> Case:
    return Case(f"{n}", (Spec(n, n), Spec(n, n)), dtypes=dtypes, use=use)


def _sample() -> Iterator[Case]:
    """Yields 30 sizes for `tune --sample`, log-uniform, with rows of a multiple of 16 bytes.

    `_hopper.rule` was fitted to the sizes of seeds 30 to 32, so the seed here is another.
    """
    dice = random.Random(33)
    for _ in range(30):
        M, N, K = (round(math.exp(dice.uniform(math.log(low), math.log(16384))) / 8) * 8 for low in (64, 512, 512))
        yield _bench(M, N, K, "nn", use="sample")


def _bench(M: int, N: int, K: int, how: str = "", use: str = "bench") -> Case:
    """how: BLAS's letters, "t" for a transposed operand; without it the case has gradients."""
    given = [
        (Columns if t == "t" else Spec)(*size, grad=not how)
        for t, size in zip(how or "nn", ((M, K), (K, N)), strict=True)
    ]
    return Case(" ".join([f"{M}x{N}x{K}", *([how] if how else [])]), tuple(given), dtypes=("bfloat16",), use=use)


SHAPES = (*((n, n, n) for n in (1024, 2048, 4096, 8192)), (8192, 14336, 4096), (8192, 4096, 14336), (16384, 2048, 2048))
RAGGED = ((4097, 4100, 4104), (8192, 50257, 2048), (1000, 1000, 1000), (5000, 3000, 7000))
HALF = {"accumulate": "float16"}
MATMUL = Op(
    matmul,
    reference=reference,
    cost=cost,
    sharding=lambda a, b, **_: None if min(a.dim(), b.dim()) < 2 else "a ...mk, b ...kn -> ...mn",
    cases=[
        Case("67x45 @ 45x35", (Spec(67, 45), Spec(45, 35))),
        Case("1x1 @ 1x1", (Spec(1, 1), Spec(1, 1))),
        Case("2x3x33x64 @ 3x64x17", (Spec(2, 3, 33, 64), Spec(3, 64, 17))),
        Case("5x32 @ 32", (Spec(5, 32), Spec(32))),
        Case("2x72x40 @ 40x136", (Spec(2, 72, 40), Spec(40, 136)), dtypes=("float16", "bfloat16")),
        Case("70x200 @ 200x90 float16", (Spec(70, 200), Spec(200, 90)), HALF, dtypes=("float16",)),
        _square(256, "quick", "float32"),
        _square(1024, "quick", "float32"),
        *(_bench(*shape) for shape in SHAPES),
        _square(4096, "bench", "float16", "float32"),
        *(_bench(*shape, how) for shape in SHAPES for how in ("nt", "tn", "tt")),
        *(_bench(*shape, how) for shape in RAGGED for how in ("nn", "nt")),
        *(_bench(rows, 4096, 14336, "nt") for rows in (1, 16, 64)),  # the sizes of a decode step
        *(Case(f"{n} float16", (Spec(n, n), Spec(n, n)), HALF, dtypes=("float16",), use="bench") for n in (2048, 4096)),
        *_sample(),
    ],
)

MATMUL.eager("naive", "every product in memory, in float32, then their sums", _naive, supports=_many)
MATMUL.eager("torch", "PyTorch's own torch.matmul: cuBLAS on an NVIDIA GPU", torch.matmul, served=True)
MATMUL.kernel(
    "triton", "one tile per program on the matrix units, in grouped order", kind="triton", fwd=by_triton, bwd=by_triton
)
MATMUL.kernel(
    "triton_half",
    "float16 sums over 64 columns, added in float32: twice the rate on GeForce cards",
    kind="triton",
    fwd=_half.fwd,
    bwd=_half.fwd,
    supports=_half.refusal,
    unless=_half.unless,
    dtypes=("float16",),
    served=True,
)
MATMUL.kernel(
    "triton_persistent",
    "persistent programs and tensor descriptors: TMA loads the next tile while one is stored",
    kind="triton",
    fwd=_persistent.fwd,
    bwd=_persistent.fwd,
    supports=_persistent.refusal,
    arch=90,
    gain=1.02,
    counter="smsp__inst_executed_pipe_lsu.sum",
)
HOPPER: dict[str, Any] = {"kind": "gluon", "dtypes": ("float16", "bfloat16"), "arch": 90, "newest": 90, "served": True}
PADDED = "`gluon`, after copying operands whose rows TMA cannot load"
MATMUL.kernel(
    "gluon_padded", PADDED, fwd=_hopper.padded, bwd=_hopper.padded, supports=_hopper.empty, unless=_unless, **HOPPER
)
MATMUL.kernel(
    "gluon",
    "Hopper, persistent: a warp loads with TMA; one warpgroup multiplies while another stores",
    fwd=_hopper.fwd,
    bwd=_hopper.fwd,
    supports=_hopper.refusal,
    unless=_unless,
    **HOPPER,
)
MATMUL.kernel(
    "cuda_cluster",
    "the same in CUDA C++ by clusters whose blocks multicast shared tiles: 1/3 to 1/2 less L2 traffic",
    kind="cuda",
    fwd=_cluster.fwd,
    bwd=_hopper.padded,
    supports=_cluster.refusal,
    dtypes=("float16", "bfloat16"),
    arch=90,
    newest=90,
)
