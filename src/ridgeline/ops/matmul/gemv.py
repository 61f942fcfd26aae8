"""gemv: y = a @ x, a matrix times a vector or times up to 16 of them, as in every layer while a model decodes.

    y_mn = sum_k a_nk x_mk            backward: dx_mk = sum_n dy_mn a_nk,  da_nk = sum_m dy_mn x_mk

Each element of a is used only M times, so memory bandwidth is the limit: the roof is reading a once. A program takes a
few rows of a, each thread 16 bytes of every row, with all loads of a step in flight before the first is used; x stays
in L1. If there are too few rows to fill the GPU, K is split and a second kernel adds the parts in order. A transposed a
is read along its columns.
Source: the warp-per-row products of every BLAS; Bell and Garland, Implementing sparse matrix-vector multiplication on
throughput-oriented processors, SC 2009, for reading by rows or by columns.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Columns, Cost, Op, RidgelineError, Spec, dense_only, dtype_name, nbytes
from ridgeline.ops.matmul import _gemv_cuda
from ridgeline.ops.matmul._operands import Matrix, Sizes
from ridgeline.ops.matmul.matmul import matmul, rows_of
from ridgeline.select import eager, run

MOST = 16  # rows of x at most
ROOM = 1 << 20  # float32 elements for partial sums: fixed, since allocations cannot depend on tuning


@triton.jit
def _share(K, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """Returns where this program's part of K begins and ends, in whole steps."""
    length = tl.cdiv(K, STEP * SPLITS) * STEP
    start = tl.program_id(1) * length
    return start, tl.minimum(K, start + length)


@triton.jit
def _put(y, parts, total, m, n, sizes, SPLITS: tl.constexpr):
    """Stores sums at (m, n): in y if over all of K, else in parts as float32."""
    M, N, _ = sizes
    inside = (m < M) & (n < N)
    at = m.to(tl.int64) * N + n
    if SPLITS == 1:
        tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + tl.program_id(1).to(tl.int64) * M * N + at, total, mask=inside)


@triton.jit
def _fwd(
    y,
    parts,
    a,
    x,
    sizes,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    PACK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A step loads TILES tiles of BN rows and BK columns; a thread first adds the PACK neighbours of one load."""
    M, N, K = sizes
    m = tl.arange(0, BM)[:, None, None]
    n = (tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN))[None, :, None]
    sums = tl.zeros((BM, BN, BK // PACK), tl.float32)
    begin, end = _share(K, BK * TILES, SPLITS)
    for start in range(begin, end, BK * TILES):
        loaded = ()
        for t in tl.static_range(TILES):
            k = start + t * BK + tl.arange(0, BK)[None, None, :]
            at_a = a.data + n * a.row_stride + k.to(tl.int64) * a.column_stride
            left = tl.load(at_a, mask=(n < N) & (k < K), other=0, eviction_policy="evict_first")
            at_x = x.data + m * x.row_stride + k.to(tl.int64) * x.column_stride
            loaded = loaded + (left, tl.load(at_x, mask=(m < M) & (k < K), other=0))
        for t in tl.static_range(TILES):
            products = tl.reshape(
                loaded[2 * t].to(tl.float32) * loaded[2 * t + 1].to(tl.float32), (BM, BN, BK // PACK, PACK)
            )
            sums += tl.sum(products, 3)
    _put(y, parts, tl.sum(sums, 2), tl.arange(0, BM)[:, None], tl.reshape(n, (1, BN)), sizes, SPLITS)


@triton.jit
def _few(y, parts, a, x, sizes, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr):
    """The same on the matrix units, in half precision: from 3 rows of x on, plain FMAs take longer than the reads."""
    M, N, K = sizes
    m = tl.arange(0, BM)[None, :]
    n = (tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN))[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    begin, end = _share(K, BK, SPLITS)
    for start in range(begin, end, BK):
        k = (start + tl.arange(0, BK)).to(tl.int64)
        at_a = a.data + n * a.row_stride + k[None, :] * a.column_stride
        left = tl.load(at_a, mask=(n < N) & (k[None, :] < K), other=0)
        at_x = x.data + m * x.row_stride + k[:, None] * x.column_stride
        right = tl.load(at_x, mask=(m < M) & (k[:, None] < K), other=0)
        total = tl.dot(left, right, total)
    _put(y, parts, total, m, n, sizes, SPLITS)


@triton.jit
def _add(y, parts, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the parts of K in order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    at = parts + i
    for _ in range(SPLITS):
        total += tl.load(at, mask=i < size, other=0)
        at += size
    tl.store(y + i, total.to(y.dtype.element_ty), mask=i < size)


def _launch(y: torch.Tensor, parts: torch.Tensor, a: torch.Tensor, x: torch.Tensor) -> None:
    """y = a @ x or x @ a.T. y, x: (M, N) and (M, K), or (N,) and (K,); a: (N, K), any strides."""
    (N, K), M = a.shape, x.shape[0] if x.dim() == 2 else 1
    gpu, pack, bm = device.of(a), 16 // a.element_size(), triton.next_power_of_2(max(1, M))
    columns = a.stride(1) != 1 and a.stride(0) == 1  # a is read along its columns
    whole = not columns and a.stride(0) % pack == 0  # rows begin at multiples of 16 bytes
    few = bm > 2 and a.dtype != torch.float32
    threads = {"num_warps": 128 // gpu.warp}

    def tile() -> tuning.Config:
        if few:
            return {"BN": 64, "BK": 128, **threads, "num_stages": 4 if gpu.backend == "cuda" else 2}
        if columns:
            return {"BN": 16 * pack, "BK": 8, "TILES": 4 if bm < 8 else 1, **threads}
        rows = (2 if bm == 1 and K > 128 * pack else 4) if whole else max(1, 4 // bm)
        bk = min(128 * pack, max(16, triton.next_power_of_2(K)))
        # One row after another reads fastest.
        tiles = min(rows, triton.next_power_of_2(triton.cdiv(max(1, K), bk))) if bm == 1 else 1
        return {"BN": rows // tiles * 128 * pack // bk, "BK": bk, "TILES": tiles, **threads}

    def rule() -> tuning.Config:
        """Splits K if there are too few rows for eight programs per multiprocessor.

        On the matrix units, which need much shared memory, for one program per multiprocessor, and only if that saves
        it at least 20 steps, the time of the kernel that adds the parts.
        """
        c = tile()
        blocks, steps = max(1, triton.cdiv(N, c["BN"])), triton.cdiv(K, c["BK"] * c.get("TILES", 1))
        most = max(1, min((1 if few else 8) * gpu.multiprocessors // blocks, steps))
        most = 1 << (most.bit_length() - 1)
        return c | {"SPLITS": 1 if few and steps - steps // most < 20 else most}

    def config() -> dict[str, Any]:
        sizes = [str(triton.next_power_of_2(n)) for n in (N, K)]
        key = " ".join([dtype_name(a), str(bm), "columns" if columns else "rows", *sizes])
        chosen = tuning.config(gpu, "gemv", "few" if few else "fwd", key, rule, lambda: _space(rule()))
        chosen = chosen | {"BM": 16 if few else bm, "SPLITS": max(1, min(chosen["SPLITS"], ROOM // max(1, M * N)))}
        return chosen if few else chosen | {"PACK": pack if whole and chosen["BK"] % pack == 0 else 1}

    key = M, N, K, columns, whole
    rows = Matrix(x, x.stride(0) if x.dim() == 2 else 0, x.stride(-1))
    given = y, parts, Matrix(a, *a.stride()), rows, Sizes(M, N, K)
    launch(_few if few else _fwd, lambda c: (triton.cdiv(N, c["BN"]), c["SPLITS"]), *given, config=config, key=key)

    def adders(c: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(M * N, c["BLOCK"]) if c["SPLITS"] > 1 else 0,)

    launch(_add, adders, y, parts, M * N, BLOCK=256, config=lambda: {"SPLITS": config()["SPLITS"]}, key=key)


def _space(c: tuning.Config) -> list[tuning.Config]:
    """Returns the rule's tile with half and twice the rows, warps and parts."""
    half = (-1, 0, 1)
    sizes = [(n, w, s) for n in half for w in half for s in half if min(c["BN"], c["num_warps"]) > 1]
    moved = [
        c | {k: int(c[k] * 2.0**by) for k, by in zip(("BN", "num_warps", "SPLITS"), some, strict=True)}
        for some in sizes
    ]
    return [m for m in moved if m["SPLITS"]]


@kernel_op("gemv_fwd(Tensor a, Tensor x, str? impl) -> Tensor")
def _forward(a: torch.Tensor, x: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = x.new_empty((*x.shape[:-1], a.shape[0]))
    run(GEMV, "fwd", impl, (y, x.new_empty(ROOM, dtype=torch.float32)), a, x)
    return y


class _Gemv(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(a, x)
        ctx.impl = impl
        return _forward(a, x, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        a, x = ctx.saved_tensors
        impl = "triton" if ctx.impl == "triton" else None  # the other kernels need rows of a, but a.mT has columns
        dx = _forward(a.mT, dy, impl) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dx, None
        return dy[:, None] * x if x.dim() == 1 else matmul(dy.mT, x, impl=impl), dx, None


def reference(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, a)


def _torch(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if a.dtype != torch.complex32:
        return reference(a, x)
    return reference(a.to(torch.complex64), x.to(torch.complex64)).to(a.dtype)


def _naive(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    wide = a.to(torch.promote_types(a.dtype, torch.float32))
    rows = [(wide * row).sum(-1) for row in rows_of(x)]
    return torch.stack(rows).view(*x.shape[:-1], a.shape[0]).to(a.dtype) if rows else x.new_empty(0, a.shape[0])


def gemv(a: torch.Tensor, x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Returns the matrix-vector product `a @ x`, or `x @ a.T` for a few vectors. Gradients flow to a and x.

    a: (N, K), floating point or complex, any strides; fastest with contiguous rows or columns.
    x: (K,), or (M, K) with M up to 16, any strides, with a's dtype and device.
    Returns (N,) or (M, N) in that dtype. Sums are float32 (never TF32) and bitwise reproducible.
    PyTorch computes complex products, complex32 as complex64; impl="cuda_complex" reads complex32 directly.
    Autocast casts both inputs first, as for `torch.matmul`.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    if not isinstance(a, torch.Tensor) or not isinstance(x, torch.Tensor):
        raise RidgelineError(f"gemv: a and x must be tensors, got {type(a).__name__} and {type(x).__name__}")
    if not (a.is_floating_point() or a.is_complex()) or not (x.is_floating_point() or x.is_complex()):
        raise RidgelineError(
            f"gemv: a and x must be floating point (float32, float16, bfloat16) or complex, got {a.dtype} and {x.dtype}"
        )
    if a.is_nested or x.is_nested:
        dense_only("gemv", (a, x))
    if a.dim() != 2 or x.dim() not in (1, 2) or a.shape[1] != x.shape[-1]:
        raise RidgelineError(f"gemv: a must be (N, K) and x (K,) or (M, K), got {tuple(a.shape)} and {tuple(x.shape)}")
    if x.dim() == 2 and x.shape[0] > MOST:
        raise RidgelineError(f"gemv: x must have at most {MOST} rows, got {x.shape[0]}; use matmul for more")
    kind = "cuda" if a.is_cuda else "cpu"
    if (
        torch.is_autocast_enabled(kind)
        and a.is_floating_point()
        and x.is_floating_point()
        and a.dtype != torch.float64 != x.dtype
    ):
        a, x = a.to(torch.get_autocast_dtype(kind)), x.to(torch.get_autocast_dtype(kind))
    if a.dtype != x.dtype or a.device != x.device:
        raise RidgelineError(
            f"gemv: a and x must agree in dtype and device, got {a.dtype} on {a.device} and {x.dtype} on {x.device}"
        )
    if a.is_complex():
        a, x = a.resolve_conj(), x.resolve_conj()
    plain = eager(GEMV, impl, a, x)
    if plain is not None and plain.call is not None:
        return plain.call(a, x)
    if torch.is_grad_enabled() and (a.requires_grad or x.requires_grad):
        if a.is_complex():
            raise RidgelineError(
                f"gemv: impl={impl!r} has no gradient for {a.dtype}; use impl='torch' or detach a and x"
            )
        return differentiate(_Gemv, a, x, impl)
    return _forward(a, x, impl)


def cost(a: torch.Tensor, x: torch.Tensor) -> tuple[Cost, Cost]:
    K = max(1, a.shape[1])
    y, flops = x.numel() // K * a.shape[0] * a.element_size(), 2 * a.numel() * x.numel() // K
    return Cost(nbytes(a, x), y, flops), Cost(y + nbytes(a, x), nbytes(a, x), 2 * flops)


def _real(a: torch.Tensor, *_: Any) -> str | None:
    return f"it takes real numbers, but a is {a.dtype}" if a.is_complex() else None


class Halves(Spec):
    """Random complex32 numbers."""

    def make(self, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator | None) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
            return torch.randn(self.shape, dtype=torch.complex64, device=device, generator=generator).to(
                torch.complex32
            )


def _bench(name: str, a: Spec, *m: int, dtypes: tuple[str, ...] = ("bfloat16",)) -> Case:
    return Case(name, (a, Spec(*m, a.shape[1], grad=False)), dtypes=dtypes, use="bench")


GEMV = Op(
    gemv,
    reference=reference,
    cost=cost,
    sharding=lambda x, **_: "a nk, x k -> n" if x.dim() == 1 else "a nk, x mk -> mn",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(129))),
        Case("3 of 40x64", (Spec(40, 64), Spec(3, 64))),
        Case("16 of 70x300", (Spec(70, 300), Spec(16, 300))),
        Case("5 of 130x136", (Spec(130, 136), Spec(5, 136))),
        Case("64x130 by columns", (Columns(64, 130), Spec(130))),
        Case("6 of 72x40 by columns", (Columns(72, 40), Spec(6, 40))),
        Case("5x9000 in parts", (Spec(5, 9000), Spec(9000))),
        Case("1x1", (Spec(1, 1), Spec(1))),
        # bfloat16 only, so that the slow interpreter leaves these two out.
        Case("3 of 1100x1032", (Spec(1100, 1032), Spec(3, 1032)), dtypes=("bfloat16",)),
        Case("1030x1528", (Spec(1030, 1528), Spec(1528)), dtypes=("bfloat16",)),
        Case("33x132 complex", (Halves(33, 132), Halves(132)), dtypes=("float16",)),
        Case("3 of 40x65 complex", (Halves(40, 65), Halves(3, 65)), dtypes=("float16",)),
        Case("8192x8192 complex", (Halves(8192, 8192), Halves(8192)), dtypes=("float16",), use="bench"),
        Case("70x48", (Spec(70, 48), Spec(48))),
        Case("2048x2048", (Spec(2048, 2048, grad=False), Spec(2048, grad=False)), use="quick"),
        *(
            _bench(f"{m[0] if m else 1} of 14336x4096", Spec(14336, 4096, grad=False), *m)
            for m in ((), (2,), (4,), (8,), (16,))
        ),
        *(
            _bench(f"{m[0] if m else 1} of 8192x8192", Spec(8192, 8192, grad=False), *m)
            for m in ((), (2,), (4,), (8,), (16,))
        ),
        _bench("1 of 8192x8192 by columns", Columns(8192, 8192, grad=False)),
        _bench("1 of 1024x8192", Spec(1024, 8192, grad=False)),
        _bench("8192x8192", Spec(8192, 8192, grad=False), dtypes=("float32", "float16")),
        _bench("16384x16384", Spec(16384, 16384, grad=False), dtypes=("float32", "float16")),
        _bench("1048576x64", Spec(1 << 20, 64, grad=False), dtypes=("float16",)),
        _bench("16 of 8192x4096", Spec(8192, 4096, grad=False), 16, dtypes=("float32",)),
    ],
)

GEMV.eager("naive", "multiply, then sum each row, in float32: the products are written and read again", _naive)
GEMV.eager("torch", "PyTorch's own: cuBLAS on an NVIDIA GPU", _torch, served=True)
GEMV.compiled("torch.compile, which calls cuBLAS or generates a kernel that sums", supports=_real)
_gemv_cuda.ladder(GEMV, _launch)
GEMV.kernel(
    "triton",
    "several rows per program, all loads in flight before the first is used; splits K if rows are few",
    kind="triton",
    fwd=_launch,
    bwd=_launch,
    served=True,
)
_gemv_cuda.best(GEMV, _launch)
