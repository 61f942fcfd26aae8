"""Products with weights of 4 or 8 bits, y = activation(x W^T + b), W = (q - zero) * scale: the kernels and launchers.

Codes are integers, or mxfp4's floating-point numbers in blocks of 32 with powers of two as scales. A program takes some
rows of W and a part of K. Codes become numbers of x's dtype in registers, exactly, and are the left operand of the
matrix units; x, padded to 16 rows, is the right one. The float32 sum over a group is multiplied by the group's scale;
mxfp4's scales multiply the numbers first, which is exact. If rows of W are few, K is split, and a second kernel adds
the parts in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import INTERPRETED, Function, differentiate, early, first_order, kernel_op, launch
from ridgeline.op import Cost, Implementation, Op, RidgelineError, dtype_name, get, nbytes, readable
from ridgeline.ops.matmul._epilogue import ACTIVATIONS, Epilogue, finish
from ridgeline.ops.matmul._operands import Matrix, Sizes
from ridgeline.ops.matmul.matmul import in_autocast, rows_of
from ridgeline.replay import Sure
from ridgeline.select import eager, run
from ridgeline.tiles.few_bits import (
    Rules,
    Weight,
    group_of,
    kind_of,
    plain,
    scales_of,
    step,
    step_of,
    unpack,
    words,
    words_of,
)
from ridgeline.tiles.float8 import decoded

FLOATS = torch.float32, torch.float16, torch.bfloat16
MANY = 64  # rows of x from which a dequantised copy of the weight and a plain product are quicker
ROOM = 1 << 21  # float32 elements for partial sums: fixed, since allocations cannot depend on tuning
_Maybe = torch.Tensor | None
BENCH = [(m, *shape) for m in (1, 8, 16) for shape in ((14336, 4096), (4096, 14336), (28672, 8192))]
BENCH += [(m, 28672, 8192) for m in (32, 64, 256)]
# The dtypes of a case, by its use.
DTYPES = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}


@triton.jit
def _fwd(
    y,
    parts,
    weight,
    x,
    x_scale,
    epilogue,
    sizes,
    RULES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    M, N, K = sizes
    deep = tl.cdiv(M, BM)
    m = tl.program_id(0) % deep * BM + tl.arange(0, BM)
    n = tl.program_id(0) // deep * BN + tl.arange(0, BN)
    row = n % N
    length = tl.cdiv(K, BK * SPLITS) * BK
    begin = tl.program_id(1) * length
    end = tl.minimum(K, begin + length)
    total = tl.zeros((BN, BM), tl.float32)
    SHARED: tl.constexpr = RULES.KIND != "int8" and BK <= RULES.GROUP  # a row of a step has one scale
    at_x = x.data + m[:, None].to(tl.int64) * x.row_stride
    at_q = weight.q + row[:, None].to(tl.int64) * words_of(K, RULES)
    if SHARED:
        scale, zero = scales_of(weight, row, begin, end, K, RULES)
    for start in range(begin, end, BK):
        k = start + tl.arange(0, BK)[None, :]
        if RULES.EVEN:
            rows = tl.load(at_x + k, mask=m[:, None] < M, other=0.0)
        else:
            rows = tl.load(at_x + k, mask=(m[:, None] < M) & (k < K), other=0.0)
        if RULES.KIND == "w4a8" and rows.dtype == tl.uint8:
            rows = decoded(rows, False).to(tl.float16)
        if SHARED:
            next_scale, next_zero = scales_of(weight, row, start + BK, end, K, RULES)  # in flight during the product
            total = step(total, weight, at_q, row, rows, start, scale, zero, K, RULES)
            scale, zero = next_scale, next_zero
        else:
            total = step(total, weight, at_q, row, rows, start, None, None, K, RULES)
    if RULES.KIND == "int8":
        total *= tl.load(weight.scale + row).to(tl.float32)[:, None]
    if x_scale is not None:
        total *= tl.load(x_scale + m, mask=m < M, other=0.0)[None, :]
    if RULES.PDL:
        gdc_launch_dependents()
    if SPLITS == 1:
        finish(tl.trans(total), y, epilogue, m, n, M, N, 0, ACTIVATION)
    else:
        at = parts + (tl.program_id(1) * M + m[None, :]).to(tl.int64) * N + n[:, None]
        tl.store(at, total, mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def _add(
    y, parts, epilogue, M, N, PDL: tl.constexpr, ACTIVATION: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the parts of K in order, for a row of x and BLOCK rows of W."""
    if PDL:
        gdc_wait()
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((1, BLOCK), tl.float32)
    for part in tl.static_range(SPLITS):
        at = parts + (part * M + m[:, None]).to(tl.int64) * N + n[None, :]
        total += tl.load(at, mask=n[None, :] < N, other=0.0)
    finish(total, y, epilogue, m, n, M, N, 0, ACTIVATION)


def fwd(
    y: torch.Tensor, parts: torch.Tensor, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe,
    bias: _Maybe, activation: str, x_scale: _Maybe = None
) -> None:  # fmt: skip
    """Fills y (M, N). x: (M, K) with contiguous rows, e4m3 codes if x_scale is given. q, scale, zero: contiguous."""
    (M, K), N, gpu = x.shape, q.shape[0], device.of(x)
    kind, group = kind_of(q, scale) if x_scale is None else "w4a8", group_of(q, scale)
    whole = kind == "int8" or (kind == "mxfp4" and x.dtype != torch.float16)  # float16 cannot hold the scales
    deep = 128 if whole else step_of(group)

    def rule() -> tuning.Config:
        """Splits K until there are four programs for each multiprocessor, of at least eight steps each."""
        rows = min(64, max(16, triton.next_power_of_2(M)))
        columns, threads = (64 if N <= 64 * gpu.multiprocessors else 128, 128) if M <= 32 else (128, 256)
        tiles, steps = triton.cdiv(N, columns) * triton.cdiv(M, rows), triton.cdiv(K, deep)
        most = max(1, min(triton.cdiv(4 * gpu.multiprocessors, max(1, tiles)), steps // 8, 16))
        stages = 4 if gpu.backend == "cuda" and (x.element_size() <= 2 or rows <= 32) else 2
        return {"BM": rows, "BN": columns, "SPLITS": most, "num_warps": threads // gpu.warp, "num_stages": stages}

    def config() -> dict[str, Any]:
        sizes = [str(triton.next_power_of_2(n)) for n in (M, N, K)]
        key = " ".join([dtype_name(x), str(deep), *sizes])
        chosen = tuning.config(gpu, f"{kind}_linear", "fwd", key, rule, lambda: _space(rule()))
        return chosen | {"BK": deep, "SPLITS": max(1, min(chosen["SPLITS"], ROOM // max(1, M * N)))}

    key = M, N, K, group
    native = gpu.backend == "cuda" and gpu.capability >= 80 and not INTERPRETED
    facts = early(gpu)
    rules = Rules(kind, native, K % deep == 0, "ieee", facts["PDL"], group)
    weight, epilogue = Weight(q.view(torch.int16), scale, zero), Epilogue(None, bias, None)
    if kind == "w4a8" and (not native or y.dtype == torch.float32):  # 8-bit units add in 14 bits: too few for float32
        x = x.view(torch.uint8)
    given = y, parts, weight, Matrix(x, *x.stride()), x_scale, epilogue, Sizes(M, N, K)
    launch(
        _fwd,
        lambda c: (triton.cdiv(M, c["BM"]) * triton.cdiv(N, c["BN"]), c["SPLITS"]),
        *given,
        RULES=rules,
        ACTIVATION=activation,
        config=config,
        key=key,
    )
    add(y, parts, bias, activation, lambda: config()["SPLITS"], key)


def add(
    y: torch.Tensor, parts: torch.Tensor, bias: _Maybe, activation: str, splits: Callable[[], int], key: Any,
    least: int = 2,
) -> None:  # fmt: skip
    """y = activation(the sum of the parts of K + bias), if there are at least so many parts."""
    M, N = y.shape

    def adders(c: dict[str, Any]) -> tuple[int, int]:
        return (triton.cdiv(N, c["BLOCK"]) if c["SPLITS"] >= least else 0, M)

    launch(
        _add,
        adders,
        *(y, parts, Epilogue(None, bias, None), M, N),
        ACTIVATION=activation,
        BLOCK=256,
        **early(device.of(y)),
        config=lambda: {"SPLITS": splits()},
        key=key,
    )


def _space(c: tuning.Config) -> list[tuning.Config]:
    """Returns the rule's tile with other rows of W, parts of K and stages."""
    rows, parts = sorted({64, 128, c["BN"]}), [max(1, c["SPLITS"] // 2), c["SPLITS"], 2 * c["SPLITS"]]
    return [
        c | {"BN": n, "SPLITS": s, "num_stages": stages}
        for n in rows
        for s in sorted(set(parts))
        for stages in (3, 4, 6)
    ]


@kernel_op("few_bits_weight(Tensor q, Tensor scale, Tensor? zero, ScalarType dtype) -> Tensor")
def _weight(q: torch.Tensor, scale: torch.Tensor, zero: _Maybe, dtype: torch.dtype) -> torch.Tensor:
    N, K = q.shape[0], q.shape[1] * (2 if q.dtype == torch.uint8 else 1)
    w = torch.empty((N, K), dtype=dtype, device=q.device)
    weight, gpu = Weight(q, scale, zero), device.of(q)
    facts: dict[str, Any] = {
        "KIND": kind_of(q, scale),
        "GROUP": group_of(q, scale),
        "BN": 4,
        "BK": 1024,
        "num_warps": 256 // gpu.warp,
    }
    grid = triton.cdiv(N, 4), triton.cdiv(K, 1024)
    if w.numel():
        launch(unpack, grid, w, weight, N, K, **facts)
    return w


def dequantised(
    q: torch.Tensor, scale: torch.Tensor, zero: _Maybe, dtype: torch.dtype, g_idx: _Maybe = None
) -> torch.Tensor:
    """Returns the weight (N, K) in a dtype, rounded once: by a kernel on a GPU if groups are in order."""
    if g_idx is None and dtype != torch.float64 and scale.dtype != torch.float64 and q.is_cuda:
        return _weight(q, scale, zero, dtype)
    return plain(q, scale, zero, dtype, g_idx)


def product(x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, activation: str | None) -> torch.Tensor:
    """Returns activation(x W^T + bias) in plain PyTorch."""
    return ACTIVATIONS[activation or ""](torch.nn.functional.linear(x, weight, bias))


def cast(x: Any, bias: Any) -> tuple[Any, Any]:
    """Returns x and bias in autocast's dtype, if that is on."""
    made = in_autocast(x, bias)
    return made[0], made[1]


def check(
    op: str, x: Any, q: Any, scale: Any, bias: Any, activation: Any, code: torch.dtype,
    scales: tuple[torch.dtype, ...] = FLOATS, **others: Any,
) -> None:  # fmt: skip
    """Raises RidgelineError unless the arguments fit. scales: their dtypes. others: tensors by name, or None."""
    for name, t in {"x": x, "q": q, "scale": scale, "bias": bias, **others}.items():
        if t is None and name not in ("x", "q", "scale"):
            continue
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.layout is not torch.strided or t.is_nested:
            raise RidgelineError(f"{op}: it takes dense tensors, but {name} is {'nested' if t.is_nested else t.layout}")
        if t.device != x.device:
            raise RidgelineError(f"{op}: all tensors must be on one device; {name} is on {t.device}, x on {x.device}")
    double = x.dtype == torch.float64 and scale.dtype in (torch.float64, torch.uint8)  # the reference
    if x.dtype not in FLOATS and not double:
        raise RidgelineError(f"{op}: x must be float32, float16 or bfloat16, got {x.dtype}")
    if scale.dtype not in scales and not double:
        wanted = "float32, float16 or bfloat16" if scales == FLOATS else "uint8"
        raise RidgelineError(f"{op}: scale must be {wanted}, got {scale.dtype}")
    if q.dtype != code or q.dim() != 2:
        raise RidgelineError(f"{op}: q must be {code} with two dimensions, got {q.dtype} {tuple(q.shape)}")
    K = q.shape[1] * (2 if code == torch.uint8 else 1)
    if not x.dim() or x.shape[-1] != K:
        raise RidgelineError(f"{op}: x must be (..., {K}) for q {tuple(q.shape)}, got {tuple(x.shape)}")
    if bias is not None and (bias.shape != q.shape[:1] or bias.dtype != x.dtype):
        given = f"{bias.dtype} {tuple(bias.shape)}"
        raise RidgelineError(f"{op}: bias must be {x.dtype} {tuple(q.shape[:1])}, got {given}")
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS or not activation):
        raise RidgelineError(f"{op}: activation must be None, 'silu', 'gelu' or 'gelu_tanh', got {activation!r}")


def check_groups(op: str, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe, g_idx: _Maybe = None) -> None:
    """Raises RidgelineError unless the scales and zeros of groups fit 4-bit codes."""
    K = 2 * q.shape[1]
    if scale.dim() != 2 or scale.shape[0] != q.shape[0] or not scale.shape[1] or (g_idx is None and K % scale.shape[1]):
        wanted = f"(N, K / group) with N = {q.shape[0]} and a group that divides K = {K}"
        raise RidgelineError(f"{op}: scale must be {wanted}, got {tuple(scale.shape)}")
    if zero is not None and (zero.dtype != torch.uint8 or zero.shape != scale.shape):
        raise RidgelineError(f"{op}: zero must be uint8 {tuple(scale.shape)}, got {zero.dtype} {tuple(zero.shape)}")
    if g_idx is not None and (g_idx.dtype not in (torch.int32, torch.int64) or tuple(g_idx.shape) != (K,)):
        raise RidgelineError(f"{op}: g_idx must be int32 ({K},), got {g_idx.dtype} {tuple(g_idx.shape)}")
    if g_idx is not None and readable(g_idx) and K and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < scale.shape[1]:
        found = f"{int(g_idx.min())} to {int(g_idx.max())}"
        raise RidgelineError(f"{op}: g_idx must count groups from 0 to {scale.shape[1] - 1}, got {found}")


def unfit(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *rest: Any) -> str | None:
    """Returns why the kernel does not take a call, or None."""
    if x.shape[-1] != q.shape[1] * (2 if q.dtype == torch.uint8 else 1):
        return f"q must have x's {x.shape[-1]} columns"
    if q.dtype == torch.int8 and x.shape[-1] % 2:
        return "it reads two columns at once, and their number is odd"
    if q.dtype == torch.uint8 and group_of(q, scale) % 32:
        return f"it takes groups of a multiple of 32 columns, and these are of {group_of(q, scale)}"
    return None


def plain_rung(op: Op, impl: str | None, x: torch.Tensor, reason: str | None) -> Implementation | None:
    """Returns the plain PyTorch implementation that serves a call, or None if a kernel does.

    reason: why kernels cannot; raises it if one of them is named."""
    plain = eager(op, impl, x)
    if plain is not None or reason is None:
        return plain
    if impl is not None:
        raise RidgelineError(f"{op.name}: impl={impl!r} cannot run this call: {reason}")
    return op.implementations["torch"]


FORWARD: dict[str, Callable[..., torch.Tensor]] = {}  # of each op, by `register`


def register(name: str) -> None:
    """Registers `<name>_fwd`, which `call` runs for x (M, K)."""
    weight = "Tensor q, Tensor scale, Tensor? zero, Tensor? bias"

    @kernel_op(f"{name}_fwd(Tensor x, {weight}, str activation, str? impl) -> Tensor")
    def forward(x: torch.Tensor, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        *given, impl = rest
        y = x.new_empty((x.shape[0], q.shape[0]))
        parts = torch.empty(ROOM, dtype=torch.float32, device=x.device)
        run(get(name), "fwd", impl, (y, parts), x, words(q), *given)
        return y

    FORWARD[name] = forward


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, op: str, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe, bias: _Maybe,
        impl: str | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(q, scale, zero)
        return FORWARD[op](x, q, scale, zero, bias, "", impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, scale, zero = ctx.saved_tensors
        dx = dy @ dequantised(q, scale, zero, dy.dtype) if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None, dy.sum(0) if ctx.needs_input_grad[5] else None, None


def settled(x: torch.Tensor, *others: _Maybe) -> bool:
    """Returns whether a call wants no gradients, and has contiguous tensors and some rows."""
    given = [t for t in (x, *others) if t is not None]
    wanted = torch.is_grad_enabled() and any([t.requires_grad for t in given])
    return not wanted and all([t.is_contiguous() for t in given]) and x.dim() > 1 and x.numel() > 0


def call(
    op: str, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe, bias: _Maybe, activation: str | None,
    impl: str | None, settled: bool, sure: Sure | None,
) -> torch.Tensor:  # fmt: skip
    """Calls an op's kernels for x (..., K), with gradients to x and bias if they are wanted.

    settled: that no gradient is wanted, and that all tensors are contiguous. sure: what a guard knows of the call."""
    if settled:
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        y = FORWARD[op](rows, q, scale, zero, bias, activation or "", impl, sure)
        return y if rows is x else y.view(*x.shape[:-1], q.shape[0])
    rows = rows_of(x).contiguous()
    zero, bias = (None if t is None else t.contiguous() for t in (zero, bias))
    weight = q.contiguous(), scale.detach().contiguous(), zero, bias
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        y = ACTIVATIONS[activation or ""](differentiate(_Product, op, rows, *weight, impl))
    else:
        y = FORWARD[op](rows, *weight, activation or "", impl)
    return y.view(*x.shape[:-1], q.shape[0])


def few(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    """Returns why a call is left to a dequantised copy of the weight, or None."""
    many = x.numel() > MANY * max(1, x.shape[-1])
    return "for many rows a dequantised weight and a plain product are quicker" if many else None


def cost(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, zero: _Maybe = None, **options: Any
) -> tuple[Cost, Cost]:  # fmt: skip
    """One read of x, of the weight and of the bias, one write of y; backward reads dy and the weight and writes dx."""
    read, write, flops = work(x, q, scale, zero, options.get("bias"))
    size = x.numel() * x.element_size()
    return Cost(read, write, flops), Cost(read - size + write, size, flops)


def work(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *others: Any) -> Any:
    """Returns the bytes read and written and the operations of a product, and of x's gradient."""
    extra = sum([nbytes(t) for t in others if isinstance(t, torch.Tensor)])
    rows, K = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    y, flops = rows * q.shape[0] * x.element_size(), 2 * rows * q.shape[0] * K
    return nbytes(x, q, scale) + extra, y, flops
