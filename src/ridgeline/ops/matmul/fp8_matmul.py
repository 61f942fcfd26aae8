"""fp8_matmul: y = (a * scale_a) @ (b * scale_b) + bias, for fp8 (e4m3, e5m2) with scales by rows or by blocks.

    rows:     y_mn = s_m t_n sum_k a_mk b_kn              blocks:   y_mn = sum_j s_mj t_jn sum_{k in block j} a_mk b_kn

Hopper's matrix units add 8-bit products in about 14 bits, so sums move to float32 every 128 of K, times their block's
scales if there are any. That is too coarse for a float32 result: then the operands are converted to float16, which is
exact, and multiplied at half the rate or less. With few rows K is split, so that every multiprocessor reads, and a
second kernel adds the parts in order. The roof is 2 M N K operations at the rate of 8-bit products.
Source: DeepSeek-AI, DeepSeek-V3 technical report, 2024 (arXiv:2412.19437), section 3.3.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline import device
from ridgeline.boundary import INTERPRETED, kernel_op, launch
from ridgeline.op import Case, Columns, Cost, Op, OwnDtype, RidgelineError, Spec, nbytes
from ridgeline.ops.matmul import _hopper8
from ridgeline.ops.matmul._operands import Matrix, Sizes
from ridgeline.ops.matmul._scaled import (
    BLOCK,
    Inside,
    Scale,
    ScaleColumns,
    blocks,
    config,
    fault,
    finish,
    grid,
    line,
    place,
    step,
    unlike,
)
from ridgeline.select import eager, run
from ridgeline.tiles.float8 import halves

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = "float8_e4m3fn", "float8_e5m2"
FEW = 64  # the most rows of a for which K is split


class Scales(NamedTuple):
    """Those of a's rows and b's columns, with their strides; a block is one of K."""

    a: Any
    b: Any
    a_row_stride: int
    a_block_stride: int
    b_block_stride: int
    b_column_stride: int


class Rules(NamedTuple):
    """What the compiler knows."""

    WIDE: int  # columns of b that share a block's scale: 1, or at least a tile's width; 0 for scales by rows
    NATIVE: bool  # multiply on 8-bit matrix units; else decode a and b to float16, which is exact
    DECODE: bool  # the GPU has an instruction that converts fp8 to float16
    A_E5M2: bool
    B_E5M2: bool
    ADD: bool  # add to what y holds


@triton.jit
def _fwd(
    y,
    a,
    b,
    scales,
    bias,
    sizes,
    RULES: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """y: the product (M, N), or its parts over K (SPLITS, M, N)."""
    M, N, K = sizes
    m, n = place(M, N, BM, BN, GROUP)
    length = tl.cdiv(K, BK * SPLITS) * BK
    begin = tl.program_id(1) * length
    k = begin + tl.arange(0, BK).to(tl.int64)
    at_a = a.data + (m % M)[:, None].to(tl.int64) * a.row_stride + k[None, :] * a.column_stride
    at_b = b.data + k[:, None] * b.row_stride + (n % N)[None, :].to(tl.int64) * b.column_stride
    scale_a = scales.a + (m % M).to(tl.int64) * scales.a_row_stride
    if RULES.WIDE > 1:
        scale_b = scales.b + tl.min(n, 0).to(tl.int64) // RULES.WIDE * scales.b_column_stride
    else:
        scale_b = scales.b + (n % N).to(tl.int64) * scales.b_column_stride
    if RULES.WIDE > 0:
        scale_a += begin // BK * scales.a_block_stride
        scale_b += begin // BK * scales.b_block_stride
    total = tl.zeros((BM, BN), tl.float32)
    ahead = tl.full((), BK, tl.int64)  # BK strides may exceed 2^31
    for start in range(begin, tl.minimum(K, begin + length), BK):
        if EVEN:
            left, right = tl.load(at_a), tl.load(at_b)
        else:
            left = tl.load(at_a, mask=k[None, :] < K - start + begin, other=0.0)
            right = tl.load(at_b, mask=k[:, None] < K - start + begin, other=0.0)
        if not RULES.NATIVE:
            left, right = halves(left, RULES.A_E5M2, RULES.DECODE), halves(right, RULES.B_E5M2, RULES.DECODE)
        if RULES.WIDE == 0:
            total = tl.dot(left, right, total, max_num_imprecise_acc=BK if RULES.NATIVE else 0)
        else:
            rows, columns = tl.load(scale_a), tl.load(scale_b)
            part = tl.dot(left, right)
            if RULES.WIDE == 1:
                total += part * (rows[:, None] * columns[None, :])
            else:
                total += part * (rows * columns)[:, None]
            scale_a += scales.a_block_stride
            scale_b += scales.b_block_stride
        at_a += a.column_stride * ahead
        at_b += b.row_stride * ahead
    if RULES.WIDE == 0:
        total = total * tl.load(scale_a)[:, None] * tl.load(scale_b)[None, :]
    finish(y + tl.program_id(1).to(tl.int64) * M * N, total, bias, m, n, M, N, RULES.ADD and SPLITS == 1)


@triton.jit
def _add(y, parts, bias, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Adds the parts of K in order, for one row and BLOCK columns, and the bias."""
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((1, BLOCK), tl.float32)
    for part in tl.static_range(SPLITS):
        at = parts + (part * M + m[:, None]).to(tl.int64) * N + n[None, :]
        total += tl.load(at, mask=n[None, :] < N, other=0.0)
    finish(y, total, bias, m, n, M, N, ADD)


def _launch(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any, _: Any
) -> None:
    """y = the product. a: (M, K); b: (K, N), any strides; y: contiguous."""
    by_triton(y, a, b, scale_a, scale_b, bias, exact=y.dtype == torch.float32)


def by_triton(
    y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
    bias: torch.Tensor | None, *, exact: bool, add: bool = False,
) -> None:  # fmt: skip
    """y = the product, or y += the product if `add`. a: (M, K); b: (K, N), any strides; y: contiguous.

    exact: multiply in float16 with float32 sums, where 8-bit matrix units would add in about 14 bits.
    """
    (M, K), N = a.shape, b.shape[1]
    wide, gpu = blocks(a, b, scale_a, scale_b) or 0, device.of(a)
    decode = gpu.backend == "cuda" and not INTERPRETED
    native = decode and not exact
    codes = (a, b) if native else (a.view(torch.uint8), b.view(torch.uint8))
    steps = (scale_a.stride(), scale_b.stride()) if wide else ((step(scale_a, 0), 0), (0, step(scale_b, -1)))
    operands = [Matrix(code, *t.stride()) for code, t in zip(codes, (a, b), strict=True)]
    scales = Scales(scale_a, scale_b, *steps[0], *steps[1])
    splits = _splits(gpu, M, N, K)
    configured: dict[str, Any] = {
        "config": lambda: config("fp8_matmul", a, b, wide=False, whole=native, single=wide == 1) | {"SPLITS": splits},
        "key": (M, N, K, a.stride(), b.stride()),
    }
    out = y if splits == 1 else torch.empty(splits * M * N, dtype=torch.float32, device=y.device)
    added = line(bias if splits == 1 else None, 0)
    cells = grid(M, N)
    rules = Rules(wide, native, decode, a.dtype == E5M2, b.dtype == E5M2, add)
    launch(
        _fwd, lambda c: (*cells(c), splits), out, *operands, scales, added, Sizes(M, N, K), RULES=rules, **configured
    )
    if splits > 1:
        launch(_add, (triton.cdiv(N, 256), M), y, out, line(bias, 0), M, N, SPLITS=splits, BLOCK=256, ADD=add)


def _splits(gpu: device.Device, M: int, N: int, K: int) -> int:
    """Returns the parts of K if rows are few: two programs for each multiprocessor, of at least 8 steps each."""
    tiles = triton.cdiv(N, 64)
    if M > FEW or tiles >= 2 * gpu.multiprocessors:
        return 1
    return max(1, min(2 * gpu.multiprocessors // max(1, tiles), triton.cdiv(K, BLOCK) // 8, 16))


@kernel_op(
    "fp8_matmul_fwd(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType dtype, str? impl) "
    "-> Tensor"
)
def _forward(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    *given, dtype, impl = rest
    y = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    run(FP8_MATMUL, "fwd", impl, (y,), a, b, *given, dtype)
    return y


def reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    wide = blocks(a, b, scale_a, scale_b)
    left, right = a.to(scale_a.dtype), b.to(scale_a.dtype)
    if wide:
        left = left * scale_a.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        right = right * scale_b.repeat_interleave(BLOCK, 0)[: b.shape[0]].repeat_interleave(wide, 1)[:, : b.shape[1]]
        y = left @ right
    else:
        y = (left @ right) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (y if bias is None else y + bias).to(out_dtype)


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> torch.Tensor:
    """Returns the dequantised product of quantised matrices, `(a * scale_a) @ (b * scale_b) + bias`.

    a: (M, K) and b: (K, N), float8_e4m3fn or float8_e5m2 each, any strides. Fastest with K contiguous in both: for a
    weight quantised as q (N, K), pass b = q.T.
    scale_a, scale_b: float32, any strides. By rows: scale_a is one number, (M, 1) or (M,); scale_b is one number,
    (1, N) or (N,).
    By blocks: scale_a is (M, ceil(K / 128)), as `quantize_fp8` returns it. scale_b is (ceil(K / 128), ceil(N / 128)),
    the scale.T of a weight quantised in 128 x 128 blocks, or (ceil(K / 128), N), of one quantised in 1 x 128 blocks.
    bias: (N,), floating point, or None.
    Returns (M, N), contiguous, in out_dtype: torch.bfloat16, float16 or float32. Sums move to float32 every 128 of K;
    a float32 result is accumulated in float32 throughout, which is slower. No gradients flow.
    Raises RidgelineError if shapes, dtypes or devices do not match the above, or if `impl` cannot run the call. No
    kernel runs on NVIDIA GPUs before sm_89, which have no 8-bit floating-point matrix units.
    """
    wrong = fault((E4M3, E5M2), a, b, bias, out_dtype, scale_a=scale_a, scale_b=scale_b)
    if wrong is None and blocks(a, b, scale_a, scale_b) is None:
        (M, K), N = a.shape, b.shape[1]
        deep = -(-K // BLOCK)
        wrong = (
            f"scale_a and scale_b must be single numbers, or by rows, ({M}, 1) and (1, {N}), or by blocks, "
            f"({M}, {deep}) and ({deep}, {-(-N // BLOCK)}), got {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"
        )
    if wrong:
        raise RidgelineError(f"fp8_matmul: {wrong}")
    plain = eager(FP8_MATMUL, impl, a, b)
    if plain is None and impl is None and unlike(a, b, scale_a, scale_b):
        plain = FP8_MATMUL.implementations["naive"]
    if plain is not None and plain.call is not None:
        return plain.call(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    return _forward(a, b, scale_a.detach(), scale_b.detach(), None if bias is None else bias.detach(), out_dtype, impl)


def cost(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> tuple[Cost, None]:
    bias, size = options.get("bias"), a.shape[0] * b.shape[1]
    given = nbytes(a, b, *scales) + (0 if bias is None else nbytes(bias))
    return Cost(given, size * options.get("out_dtype", torch.bfloat16).itemsize, 2 * size * a.shape[1]), None


def _case(
    M: int, N: int, K: int, how: str, a: type[Spec] = Spec, b: type[Spec] = Columns, bias: bool = False, **facts: Any
) -> Case:
    deep = -(-K // BLOCK)
    scales = {
        "rows": (Scale(M, 1), Scale(1, N)),
        "one": (Scale(), Scale()),
        "blocks": (Scale(M, deep), Scale(deep, -(-N // BLOCK))),
        "blocks by columns": (ScaleColumns(M, deep), ScaleColumns(deep, -(-N // BLOCK))),
        "1x128": (Scale(M, deep), Scale(deep, N)),
    }[how]
    options: dict[str, Any] = {"bias": Spec(N, grad=False)} if bias else {}
    # In benchmarks the case's dtype names the matrix units; the result is bfloat16.
    options["out_dtype"] = torch.bfloat16 if facts.get("use") == "bench" else OwnDtype()
    kinds = facts.pop("codes", DTYPES[:1] * 2)
    codes = a(M, K, dtype=kinds[0], grad=False), b(K, N, dtype=kinds[1], grad=False)
    named = f", {kinds[0][7:11]} and {kinds[1][7:11]}" if kinds != DTYPES[:1] * 2 else ""
    return Case(f"{M}x{N}x{K} {how}{', bias' * bias}{named}", (*codes, *scales), options, **facts)


BENCH = [(n, n, n) for n in (1024, 2048, 4096, 8192)] + [(8192, 14336, 4096), (8192, 4096, 14336), (16384, 2048, 2048)]
FP8_MATMUL = Op(
    fp8_matmul,
    reference=reference,
    cost=cost,
    sharding="a mK, b Kn, scale_a mK, scale_b Kn, bias n -> mn",
    roof="float8_e4m3fn",
    cases=[
        _case(33, 40, 129, "rows"),
        _case(33, 40, 129, "rows", bias=True),
        _case(70, 130, 300, "blocks"),
        _case(70, 130, 300, "1x128", bias=True),
        _case(20, 24, 64, "one", b=Spec),
        _case(70, 131, 257, "rows", a=Inside, bias=True),
        _case(150, 131, 257, "blocks", a=Inside, b=Inside),
        _case(1, 1, 1, "rows"),
        _case(70, 130, 300, "rows", codes=DTYPES[::-1]),
        _case(70, 130, 300, "blocks", codes=DTYPES, bias=True),
        _case(33, 40, 129, "one", codes=DTYPES[1:] * 2),
        _case(5, 40, 2100, "rows", bias=True),
        _case(5, 40, 2100, "blocks"),
        _case(256, 256, 256, "blocks", use="quick"),
        *(
            _case(*shape, how, dtypes=("float8_e4m3fn",), use="bench")
            for how in ("rows", "blocks by columns")
            for shape in BENCH
        ),
        _case(
            4096, 4096, 4096, "blocks", dtypes=("float8_e4m3fn",), use="bench"
        ),  # scales as quantize_fp8 returns them
        *(
            _case(m, 8192, 8192, how, dtypes=("float8_e4m3fn",), use="bench")
            for how in ("rows", "blocks")
            for m in (1, 16, 64)
        ),
        _case(4095, 4093, 4097, "blocks", dtypes=("float8_e4m3fn",), use="bench"),
    ],
)


def _cublas(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why torch._scaled_mm does not take these, or None."""
    gpu = device.of(a)
    if gpu.backend != "cuda" or gpu.capability < 89:
        return (
            f"torch._scaled_mm with these scales needs a GPU with 8-bit floats (sm_89 or later), but this is {gpu.name}"
        )
    if a.shape[1] % 16 or b.shape[1] % 16 or not a.numel() * b.numel():
        return (
            f"torch._scaled_mm takes K and N that are multiples of 16, but a is {tuple(a.shape)} and b {tuple(b.shape)}"
        )
    if a.dtype == b.dtype == E5M2:
        return "torch._scaled_mm takes at most one operand in float8_e5m2"
    return None


def _torch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
) -> torch.Tensor:
    """torch._scaled_mm wants scales in column-major order and K contiguous in both operands."""
    reason = _cublas(a, b)
    if reason is None:
        left, right = scale_a, scale_b
        if blocks(a, b, scale_a, scale_b):
            left, right = left.mT.contiguous().mT, right.mT.contiguous().mT
        elif scale_a.numel() > 1 or scale_b.numel() > 1:
            left, right = scale_a.reshape(-1, 1).expand(a.shape[0], 1), scale_b.reshape(1, -1).expand(1, b.shape[1])
            left, right = left.contiguous(), right.contiguous()
        given = {"bias": options.get("bias"), "out_dtype": options.get("out_dtype", torch.bfloat16)}
        try:
            return torch._scaled_mm(a.contiguous(), b.mT.contiguous().mT, left, right, **given)
        except RuntimeError as error:
            reason = f"torch._scaled_mm raises: {str(error).splitlines()[0]}"
    raise RidgelineError(f"fp8_matmul: impl='torch' cannot run this call: {reason}")


def lacks(a: torch.Tensor, *rest: Any) -> str | None:
    gpu = device.of(a)
    if gpu.backend == "cuda" and gpu.capability < 89:
        return f"{gpu.name} ({gpu.arch}) has no matrix units for 8-bit floats; sm_89 and later have"
    return unlike(a, *rest)


FP8_MATMUL.eager(
    "naive",
    "the formula in eager PyTorch: dequantises both matrices, then multiplies in float32",
    reference,
    served=True,
)
FP8_MATMUL.eager("torch", "PyTorch's own torch._scaled_mm (cuBLAS, CUTLASS)", _torch, supports=_cublas)
FP8_MATMUL.kernel(
    "triton",
    "one tile per program on 8-bit matrix units; sums move to float32, scaled, every 128 of K",
    kind="triton",
    fwd=_launch,
    supports=lacks,
    dtypes=DTYPES,
    served=True,
)
FP8_MATMUL.kernel("gluon_padded", _hopper8.IDEA, fwd=_hopper8.fp8_padded, dtypes=DTYPES, **_hopper8.PADDED)
FP8_MATMUL.kernel(
    "gluon",
    "Hopper, K contiguous: a warp loads with TMA; one warpgroup multiplies while another adds and scales",
    fwd=_hopper8.fp8,
    dtypes=DTYPES,
    **_hopper8.WHOLE,
)
