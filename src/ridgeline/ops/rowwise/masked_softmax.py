"""masked_softmax: y = softmax(z) along the last dimension, z = scale x + bias where the mask keeps, else fill.

    dz = y (dy - sum_j dy_j y_j)          dx = scale dz and dbias = dz where the mask keeps, else 0

One pass reads x and writes y; the mask and the bias are read by their strides and never expanded. With fill = -inf
backward needs no mask, since y is 0 where it hides. Dropout scales kept elements by 1 / (1 - p); backward regenerates
its mask.
Source: Megatron-LM's fused scale, mask and softmax (arXiv:1909.08053), as in OneFlow's fused_scale_mask_softmax.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Implementation, Op, RidgelineError, Spec, dense_only, nbytes
from ridgeline.ops.rowwise._rows import TILE_LIMIT, as_rows, empty_rows, power, tiles
from ridgeline.ops.rowwise._softmax import full_precision
from ridgeline.select import by_kind, eager, run
from ridgeline.tiles.online_softmax import divide, exact_exp, exp_below, update
from ridgeline.tiles.philox import keep, kept, threshold

INF = math.inf
Steps = tuple[int, ...]


class Inputs(NamedTuple):
    """What forward reads; `seed` is None without dropout."""

    x: torch.Tensor
    mask: torch.Tensor
    bias: torch.Tensor | None
    seed: torch.Tensor | None


class Given(NamedTuple):
    """What backward reads; `mask` is None if y is 0 wherever it hides."""

    dy: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor | None
    seed: torch.Tensor | None


class Layout(NamedTuple):
    """The matrix that forward reads, and the step between its rows."""

    rows: int
    columns: int
    x_stride: int


class BackwardLayout(NamedTuple):
    """The same of the two matrices that backward reads."""

    rows: int
    columns: int
    dy_stride: int
    y_stride: int


class Scaling(NamedTuple):
    """What x is multiplied by, and what takes its place where the mask hides it."""

    scale: float
    fill: float


class Dropout(NamedTuple):
    """The least random number whose element stays, and what such an element is multiplied by."""

    least: int
    gain: float


class Outer(NamedTuple):
    """How rows find their mask and bias: the sizes of x's outer dimensions, innermost first, and strides over them.

    Strides begin with that of the last dimension.
    """

    sizes: Steps
    mask: Steps
    bias: Steps | None


@triton.jit
def _offset(row, sizes, strides):
    """Where rows begin in a tensor whose outer dimensions have these sizes and strides, innermost first."""
    offset = row.to(tl.int64) * 0
    for d in tl.static_range(len(sizes)):
        if d + 1 < len(sizes):
            offset += (row % sizes[d]).to(tl.int64) * strides[d]
            row = row // sizes[d]
        else:
            offset += row.to(tl.int64) * strides[d]
    return offset


@triton.jit
def _scores(x, mask, bias, outer, column, inside, scaling):
    """z, and -inf outside the row."""
    z = tl.load(x + column, mask=inside, other=0).to(tl.float32) * scaling.scale
    if bias is not None:
        z += tl.load(bias + column.to(tl.int64) * outer.bias[0], mask=inside, other=0).to(tl.float32)
    z = tl.where(tl.load(mask + column.to(tl.int64) * outer.mask[0], mask=inside, other=0) != 0, z, scaling.fill)
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _finish(y, p, probability, row, start, column, inside, seed, dropout, BN: tl.constexpr):
    """Writes y and, with dropout, the probabilities p that backward needs."""
    if seed is not None:
        tl.store(p + column, probability, mask=inside)
        stays = keep(tl.load(seed), row, start, dropout.least, BN)
        probability = tl.where(stays, probability.to(tl.float32) * dropout.gain, 0.0).to(y.dtype.element_ty)
    tl.store(y + column, probability, mask=inside)


@triton.jit
def _fwd(y, p, inputs, layout, scaling, dropout, outer, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    rows, columns, seed = layout.rows, layout.columns, inputs.seed
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    column = tl.arange(0, BN)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM))[:, None]
        inside = (row < rows) & (column < columns)
        mask = inputs.mask + _offset(row, outer.sizes, outer.mask[1:])
        bias = None if inputs.bias is None else inputs.bias + _offset(row, outer.sizes, outer.bias[1:])
        z = _scores(inputs.x + row.to(tl.int64) * layout.x_stride, mask, bias, outer, column, inside, scaling)
        most = tl.max(z, 1)[:, None]
        e = exp_below(z - tl.where(most == float("-inf"), 0.0, most), BN, dtype)
        total = tl.sum(e, 1)[:, None]
        probability = divide(e, tl.where(total == 0, 1.0, total), y.dtype.element_ty)
        at = row.to(tl.int64) * columns
        _finish(y + at, p if p is None else p + at, probability, row, 0, column, inside, seed, dropout, BN)


@triton.jit
def _fwd_wide(y, p, inputs, layout, scaling, dropout, outer, BN: tl.constexpr):
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    columns, seed = layout.columns, inputs.seed
    columns_here = tl.arange(0, BN)[None, :]
    x = inputs.x + tl.program_id(0).to(tl.int64) * layout.x_stride
    y += tl.program_id(0).to(tl.int64) * columns
    p = p if p is None else p + tl.program_id(0).to(tl.int64) * columns
    mask = inputs.mask + _offset(row, outer.sizes, outer.mask[1:])
    bias = None if inputs.bias is None else inputs.bias + _offset(row, outer.sizes, outer.bias[1:])
    top = tl.full((1, BN), float("-inf"), tl.float32)
    total = tl.zeros((1, BN), tl.float32)
    for start in range(0, columns, BN):
        column = start + columns_here
        z = _scores(x, mask, bias, outer, column, column < columns, scaling)
        top, total = update(top, total, z, dtype)
    most = tl.max(top, 1)[:, None]
    most = tl.where(most == float("-inf"), 0.0, most)
    whole = tl.sum(total * exact_exp(top - most, dtype), 1)[:, None]
    whole = tl.where(whole == 0, 1.0, whole)
    for start in range(0, columns, BN):
        column = start + columns_here
        z = _scores(x, mask, bias, outer, column, column < columns, scaling)
        probability = divide(exact_exp(z - most, dtype), whole, y.dtype.element_ty)
        _finish(y, p, probability, row, start, column, column < columns, seed, dropout, BN)


@triton.jit
def _slope(dy, y, row, start, column, inside, seed, dropout, BN: tl.constexpr):
    """The gradient of the probabilities, and the probabilities."""
    slope = tl.load(dy + column, mask=inside, other=0).to(tl.float32)
    if seed is not None:
        slope = tl.where(keep(tl.load(seed), row, start, dropout.least, BN), slope * dropout.gain, 0.0)
    return slope, tl.load(y + column, mask=inside, other=0).to(tl.float32)


@triton.jit
def _gradients(dx, dz, value, mask, step, column, inside, scale):
    if mask is not None:
        value = tl.where(tl.load(mask + column.to(tl.int64) * step, mask=inside, other=0) != 0, value, 0.0)
    tl.store(dx + column, (value * scale).to(dx.dtype.element_ty), mask=inside)
    if dz is not None:
        tl.store(dz + column, value.to(dz.dtype.element_ty), mask=inside)


@triton.jit
def _bwd(dx, dz, given, layout, scale, dropout, outer, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    rows, columns = layout.rows, layout.columns
    column = tl.arange(0, BN)[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0), num_stages=STAGES):
        row = (tile * BM + tl.arange(0, BM))[:, None]
        long = row.to(tl.int64)
        inside = (row < rows) & (column < columns)
        dy, y = given.dy + long * layout.dy_stride, given.y + long * layout.y_stride
        slope, value = _slope(dy, y, row, 0, column, inside, given.seed, dropout, BN)
        value *= slope - tl.sum(slope * value, 1)[:, None]
        mask = None if given.mask is None else given.mask + _offset(row, outer.sizes, outer.mask[1:])
        at = long * columns
        _gradients(dx + at, dz if dz is None else dz + at, value, mask, outer.mask[0], column, inside, scale)


@triton.jit
def _bwd_wide(dx, dz, given, layout, scale, dropout, outer, BN: tl.constexpr):
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    long = tl.program_id(0).to(tl.int64)
    columns, seed = layout.columns, given.seed
    columns_here = tl.arange(0, BN)[None, :]
    mask = None if given.mask is None else given.mask + _offset(row, outer.sizes, outer.mask[1:])
    dy, y = given.dy + long * layout.dy_stride, given.y + long * layout.y_stride
    dx += long * columns
    dz = dz if dz is None else dz + long * columns
    sums = tl.zeros((1, BN), tl.float32)
    for start in range(0, columns, BN):
        column = start + columns_here
        slope, value = _slope(dy, y, row, start, column, column < columns, seed, dropout, BN)
        sums += slope * value
    total = tl.sum(sums, 1)[:, None]
    for start in range(0, columns, BN):
        column = start + columns_here
        slope, value = _slope(dy, y, row, start, column, column < columns, seed, dropout, BN)
        _gradients(dx, dz, value * (slope - total), mask, outer.mask[0], column, column < columns, scale)


def _steps(shape: torch.Size, *tensors: torch.Tensor | None) -> tuple[Steps, list[Steps]]:
    """The sizes of the dimensions before the last, innermost first, and each tensor's strides.

    Dimensions that all tensors (broadcast to `shape`) can walk as one are merged. The last dimension's stride comes
    first.
    """
    strides = [t.expand(shape).stride() if t is not None else (0,) * len(shape) for t in tensors]
    sizes: list[int] = []
    found = [[s[-1]] for s in strides]
    for d in reversed(range(len(shape) - 1)):
        if shape[d] == 1:
            continue
        if sizes and all(f[-1] * sizes[-1] == s[d] for f, s in zip(found, strides, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for f, s in zip(found, strides, strict=True):
            f.append(s[d])
    return tuple(sizes or [1]), [tuple(f) if sizes else (f[0], 0) for f in found]


def _launch(kernel: Any, wide: Any, inputs: list[torch.Tensor], *given: Any) -> None:
    """Tiles of whole rows if they fit a block's registers, else chunks of a row."""
    rows, columns = inputs[0].shape
    bn = max(8, power(columns))
    if bn * 4 * len(inputs) > TILE_LIMIT:
        launch(wide, (rows,), *given, BN=4096 // len(inputs), num_warps=8)
        return
    config, grid = tiles("masked_softmax", kernel, rows, bn, inputs[0], inputs[-1])  # forward has the mask beside x
    launch(kernel, grid, *given, config=config, key=bn)


def _dropping(p: float) -> Dropout:
    return Dropout(threshold(p), 1 / (1 - p) if p < 1 else 0.0)


def _launch_fwd(
    y: Any, saved: Any, x: Any, mask: Any, bias: Any, seed: Any, scale: float, fill: float, p: float
) -> None:
    sizes, (masks, biases) = _steps(x.shape, mask, bias)
    rows = as_rows(x, -1)
    out = as_rows(y, -1), None if seed is None else as_rows(saved, -1)
    given = Inputs(rows, mask.view(torch.uint8), bias, seed), Layout(rows.shape[0], rows.shape[1], rows.stride(0))
    _launch(_fwd, _fwd_wide, [rows], *out, *given, Scaling(scale, fill), _dropping(p), Outer(sizes, masks, biases))


def _launch_bwd(dx: Any, dz: Any, dy: Any, y: Any, mask: Any, seed: Any, scale: float, fill: float, p: float) -> None:
    sizes, (masks,) = _steps(dx.shape, mask)
    slopes, rows = as_rows(dy, -1), as_rows(y, -1)
    out = as_rows(dx, -1), as_rows(dz, -1) if dz.numel() else None
    hidden = None if fill == -INF else mask.view(torch.uint8)
    given = (
        Given(slopes, rows, hidden, seed),
        BackwardLayout(rows.shape[0], rows.shape[1], slopes.stride(0), rows.stride(0)),
    )
    _launch(_bwd, _bwd_wide, [slopes, rows], *out, *given, scale, _dropping(p), Outer(sizes, masks, None))


_SCALARS = "float scale, float fill, float p"


@kernel_op(
    f"masked_softmax_fwd(Tensor x, Tensor mask, Tensor? bias, Tensor? seed, {_SCALARS}, str? impl) -> (Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, mask: torch.Tensor, bias: Any, seed: Any, scale: float, fill: float, p: float, impl: str | None
) -> Any:
    y = empty_rows(x, -1, None)
    saved = x.new_empty(0) if seed is None else torch.empty_like(y)
    if y.numel():
        run(MASKED_SOFTMAX, "fwd", impl, (y, saved), x, mask, bias, seed, scale, fill, p)
    return y, saved


@kernel_op(
    f"masked_softmax_bwd(Tensor dy, Tensor y, Tensor mask, Tensor? seed, {_SCALARS}, ScalarType? dz, str? impl)"
    " -> (Tensor, Tensor)"
)
def _backward(
    dy: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, seed: Any, scale: float, fill: float, p: float, dtype: Any,
    impl: Any
) -> Any:  # fmt: skip
    dx = empty_rows(y, -1, None)
    dz = y.new_empty(0) if dtype is None else torch.empty_like(dx, dtype=dtype)
    if dx.numel():
        run(MASKED_SOFTMAX, "bwd", impl, (dx, dz), dy, y, mask, seed, scale, fill, p)
    return dx, dz


class _MaskedSoftmax(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, mask: Any, bias: Any, seed: Any, scale: float, fill: float, p: float, impl: str | None
    ) -> torch.Tensor:
        y, saved = _forward(x, mask, bias, seed, scale, fill, p, impl)
        ctx.save_for_backward(y if seed is None else saved, mask, seed)
        ctx.facts = scale, fill, p
        ctx.impl = impl
        ctx.bias = None if bias is None or not bias.requires_grad else (bias.shape, bias.dtype)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        y, mask, seed = ctx.saved_tensors
        shape, dtype = ctx.bias or (None, None)
        dx, dz = _backward(dy, y, mask, seed, *ctx.facts, dtype, ctx.impl)
        return dx, None, dz.sum_to_size(shape) if ctx.bias else None, None, None, None, None, None


def reference(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fill: float = -INF, bias: torch.Tensor | None = None, *,
    dropout_p: float = 0.0, seed: int | torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    z = x * scale if bias is None else x * scale + bias
    z = z.masked_fill(~mask, fill)
    most = z.max(-1, keepdim=True).values.detach()
    e = (z - most.masked_fill(most == -INF, 0)).exp()
    total = e.sum(-1, keepdim=True)
    return _dropped(e / total.masked_fill(total == 0, 1), dropout_p, seed).to(x.dtype)


def _dropped(y: torch.Tensor, p: float, seed: int | torch.Tensor | None) -> torch.Tensor:
    if p == 0:
        return y
    stays = kept(_seed(seed, y), math.prod(y.shape[:-1]), y.shape[-1], p, y.device).view(y.shape)
    return (y * _dropping(p).gain).masked_fill(~stays, 0)


def _seed(seed: int | torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if isinstance(seed, torch.Tensor):
        return seed
    if seed is None:
        return torch.randint(
            1 << 62, (), device=like.device
        )  # on the device, so a CUDA graph draws anew at each replay
    return torch.full((), seed, dtype=torch.int64, device=like.device)


@by_kind(3, optional=1)
def _look(
    x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None, scale: float, fill: float, p: float,
    impl: str | None,
) -> tuple[Implementation | None, float, float, float]:  # fmt: skip
    """Checks a call but for its seed, and chooses. Returns scale, fill and p as floats, too."""
    _check(x, mask, scale, fill, bias, p)
    return eager(MASKED_SOFTMAX, impl, x, bias), float(scale), float(fill), float(p)


def _check(x: Any, mask: Any, scale: Any, fill: Any, bias: Any, p: Any) -> None:
    def broadcasts(t: torch.Tensor) -> bool:
        return t.dim() <= x.dim() and all(
            [n in (1, m) for n, m in zip(reversed(t.shape), reversed(x.shape), strict=False)]
        )

    for name, t in (("x", x), ("mask", mask), ("bias", bias)):
        if not isinstance(t, torch.Tensor) and (t is not None or name != "bias"):
            raise RidgelineError(f"masked_softmax: {name} must be a tensor, but is {type(t).__name__}")
    dense_only("masked_softmax", (x, mask, bias))
    if not x.is_floating_point() or not x.dim():
        found = f"{x.dtype} of shape {tuple(x.shape)}"
        raise RidgelineError(f"masked_softmax: x must be floating point, with at least one dimension, but is {found}")
    if mask.dtype != torch.bool:
        raise RidgelineError(f"masked_softmax: mask must be torch.bool, True where x is kept, but is {mask.dtype}")
    if bias is not None and not bias.is_floating_point():
        raise RidgelineError(f"masked_softmax: bias must be floating point, but is {bias.dtype}")
    for name, t in (("mask", mask), ("bias", bias)):
        if t is not None and t.device != x.device:
            found = f"{name} is on {t.device} but x on {x.device}"
            raise RidgelineError(f"masked_softmax: {found}; they must share one device")
        if t is not None and not broadcasts(t):
            found = f"has shape {tuple(t.shape)}"
            raise RidgelineError(f"masked_softmax: {name} must broadcast to x, {tuple(x.shape)}, but {found}")
    for name, value in (("scale", scale), ("fill", fill), ("dropout_p", p)):
        if not isinstance(value, int | float):
            raise RidgelineError(f"masked_softmax: {name} must be a number, but is {type(value).__name__}")
    if not 0 <= p <= 1:
        raise RidgelineError(f"masked_softmax: dropout_p must be between 0 and 1, but is {p}")


def _check_seed(x: torch.Tensor, seed: Any) -> None:
    if isinstance(seed, torch.Tensor) and (seed.dim() or seed.dtype != torch.int64 or seed.device != x.device):
        found = f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}"
        raise RidgelineError(f"masked_softmax: seed must be an int or a 0-d int64 tensor on {x.device}, but is {found}")
    if not isinstance(seed, torch.Tensor | int | None):
        found = type(seed).__name__
        raise RidgelineError(f"masked_softmax: seed must be an int, a 0-d int64 tensor or None, but is {found}")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise RidgelineError(
            f"masked_softmax: seed must be an int of 64 bits, a 0-d int64 tensor or None, but is {seed}"
        )


def masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fill: float = float("-inf"),
    bias: torch.Tensor | None = None, *, dropout_p: float = 0.0, seed: int | torch.Tensor | None = None,
    impl: str | None = None
) -> torch.Tensor:  # fmt: skip
    """softmax over the last dimension of scale * x + bias where `mask` is True, else of `fill`. Gradients: x and bias.

    x: floating point, at least one dimension, any strides. mask: torch.bool, broadcasts to x; bias: floating, likewise.
    fill: a number; if it is -inf, a row with nothing kept gives 0. dropout_p: each result is dropped with this
    probability (rounded to a multiple of 1/65536), and the others are divided by 1 - p. The same seed (an int or a 0-d
    int64 tensor) drops the same elements; None draws one.
    Returns a tensor of x's shape and dtype. A row with +inf or NaN among its kept elements gives NaN.
    Raises RidgelineError if an argument is none of these, if devices differ, or if `impl` cannot run the call.
    """
    plain, scale, fill, dropout_p = _look(x, mask, bias, scale, fill, dropout_p, impl)
    if seed is not None:
        _check_seed(x, seed)
    if plain is not None and plain.call is not None:
        return plain.call(x, mask, scale, fill, bias, dropout_p=dropout_p, seed=seed)
    drops = _seed(seed, x) if dropout_p else None
    arguments = x, mask, bias, drops, scale, fill, dropout_p, impl
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return differentiate(_MaskedSoftmax, *arguments)
    return _forward(*arguments)[0]


def cost(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fill: float = -INF, bias: torch.Tensor | None = None, *,
    dropout_p: float = 0.0, seed: int | torch.Tensor | None = None,
) -> tuple[Cost, Cost]:  # fmt: skip
    """Backward reads the mask only if fill is finite; dropout writes the probabilities too; dbias is not counted."""
    biases, twice = 0 if bias is None else nbytes(bias), 2 if dropout_p else 1
    forward = Cost(nbytes(x, mask) + biases, twice * nbytes(x), 7 * x.numel())
    return forward, Cost(2 * nbytes(x) + (nbytes(mask) if fill != -INF else 0), nbytes(x), 5 * x.numel())


def _torch(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fill: float = -INF, bias: torch.Tensor | None = None, *,
    dropout_p: float = 0.0, seed: int | torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    z = x * scale if scale != 1 else x
    y = torch.softmax((z if bias is None else z + bias).masked_fill(~mask, fill), -1)
    return _dropped(y.masked_fill(~mask, 0) if fill == -INF else y, dropout_p, seed).to(x.dtype)


def _mask(*shape: int) -> Spec:
    return Spec(*shape, dtype="bool", high=2, grad=False)


HALF, SCORES = ("float16", "bfloat16"), Spec(8, 16, 2048, 2048)
MASKED_SOFTMAX = Op(
    masked_softmax,
    reference=reference,
    cost=cost,
    sharding=lambda dropout_p=0.0, **_: None if dropout_p else "x ...N, mask ...N, bias ...N -> ...N",
    cases=[
        Case("33x129", (Spec(33, 129), _mask(33, 129), 0.7)),
        Case("6x5x64 fill, bias", (Spec(6, 5, 64), _mask(5, 64), 0.5, -1.0, Spec(1, 64))),
        Case("2x3x5x70 over heads", (Spec(2, 3, 5, 70), _mask(2, 1, 5, 70), 0.3)),
        Case("2x3x5x70 over rows", (Spec(2, 3, 5, 70), _mask(2, 1, 1, 70))),
        Case("2x3x40x3 columns, bias", (Spec(2, 3, 40, 3), _mask(40, 1), 1.5, -INF, Spec(3, 1, 3))),
        Case("40x300 dropout", (Spec(40, 300), _mask(300), 0.5), {"dropout_p": 0.3, "seed": 7}),
        Case("3x33000 dropout", (Spec(3, 33000), _mask(3, 33000), 0.5, -9.0), {"dropout_p": 0.1, "seed": 1 << 40}),
        Case("2x8x256x256", (Spec(2, 8, 256, 256), _mask(2, 1, 256, 256), 0.125), use="quick"),
        Case("8x16x2048x2048", (SCORES, _mask(8, 1, 2048, 2048), 0.125), dtypes=HALF, use="bench"),
        Case("8x16x2048x2048 padding", (SCORES, _mask(8, 1, 1, 2048), 0.125), dtypes=HALF, use="bench"),
    ],
)

MASKED_SOFTMAX.eager("naive", "the formula in eager PyTorch: eight passes", reference, supports=full_precision)
MASKED_SOFTMAX.eager(
    "torch", "PyTorch's own kernels: multiply, masked_fill, softmax, and zeros for hidden rows", _torch, served=True
)
MASKED_SOFTMAX.compiled("the formula fused by torch.compile")
MASKED_SOFTMAX.kernel(
    "triton",
    "tiles of whole rows; a broadcast mask is read by its strides, so it comes from the cache",
    kind="triton",
    fwd=_launch_fwd,
    bwd=_launch_bwd,
    served=True,
)
