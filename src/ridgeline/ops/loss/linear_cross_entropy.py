"""linear_cross_entropy: cross_entropy(x W^T + b, target), the last layer of a language model and its loss, in one.

    logits = x W^T + b,   loss = cross_entropy(logits, target);   dlogits as cross_entropy has it,
    dx = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

The logits are the largest tensor of a training step: 8192 x 128256 are 2.1 GB in half precision, and their gradient as much again. Here they
are made by chunks of rows: the product (cuBLAS), the loss and its gradient in their place (cross_entropy's kernels: one reading, one
writing), the two products of the gradient. For a mean or a sum all of it is forward's: three products a step, as without chunks.
Sources: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv:2411.09009); Hsu et al., Liger Kernel, 2024
(arXiv:2410.10989), which also takes chunks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.loss import _cluster, cross_entropy
from ridgeline.ops.loss.cross_entropy import CROSS_ENTROPY, Ignored
from ridgeline.select import eager, run, why_not

ROUNDINGS = 4  # of dW at most: it is added up in its own dtype over so many chunks, over more of them in float32
LEAST = 256 << 20  # bytes of logits below which a chunk does not get smaller by itself


def _size(x: torch.Tensor, weight: torch.Tensor, memory: int) -> int:
    """Rows of a chunk: of `memory` bytes of logits or, where that is 0, a fourth of all and LEAST bytes."""
    rows, row = x.shape[0], weight.shape[0] * x.element_size()
    return max(1, min(rows, (memory or max(LEAST, -(-rows // ROUNDINGS) * row)) // row))


def _chunks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, t: torch.Tensor, size: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Chunks of rows: which they are, their logits, in memory that the next chunk's will have, and their targets; as cross_entropy's
    kernels take them, (1, rows, classes) and (1, rows)."""
    rows = t.numel()
    memory = torch.empty((min(size, rows), weight.shape[0]), dtype=x.dtype, device=x.device)
    for start in range(0, rows, size):
        some = slice(start, min(start + size, rows))
        logits = memory[: some.stop - start]
        if bias is None:
            torch.mm(x[some], weight.mT, out=logits)
        else:
            torch.addmm(bias, x[some], weight.mT, out=logits)
        yield some, logits[None], t[:, some]


def _differentiate(some: slice, d: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dx: Any, dw: Any, db: Any, sums: Any) -> None:
    """The gradients of a chunk of rows, of its logits' d; dx, dw and db where they are wanted; sums: dw's in float32, or None."""
    if dx is not None:
        torch.mm(d, weight, out=dx[some])
    if dw is not None and sums is not None:
        product = (
            torch.mm(d.mT, x[some], out_dtype=torch.float32) if d.is_cuda and d.dtype != torch.float32 else d.mT.float() @ x[some].float()
        )
        sums += product
    elif dw is not None and some.start:
        dw.addmm_(d.mT, x[some])
    elif dw is not None:
        torch.mm(d.mT, x[some], out=dw)
    if db is not None:
        db += d.sum(0, dtype=torch.float32)


def _sums(dw: torch.Tensor | None, rows: int, size: int) -> torch.Tensor | None:
    return torch.zeros(dw.shape, dtype=torch.float32, device=dw.device) if dw is not None and rows > ROUNDINGS * size else None


def _wanted(t: torch.Tensor) -> torch.Tensor | None:
    """An output that has no elements is none."""
    return t if t.numel() else None


def _fwd(
    loss: torch.Tensor, dx: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, saved: torch.Tensor, x: torch.Tensor,
    weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, need: int, memory: int, *options: Any,
) -> None:  # fmt: skip
    """Fills loss, what backward needs of each row and, with need 2, the gradients for an upstream one of 1."""
    size = _size(x, weight, memory)
    sums = _sums(_wanted(dw), target.numel(), size)

    def each(losses: Any, stats: Any, _d: Any, planes: Any, t: Any, counts: Any, ignore: int, smoothing: float, z: float, cap: float, need: int, flags: Any) -> None:  # fmt: skip
        hidden = planes[0]
        clusters = CROSS_ENTROPY.implementations["cuda_cluster"]
        for some, logits, labels in _chunks(hidden, weight, bias, t, size):
            kept = stats[2 * some.start : 2 * some.stop]
            refused = why_not(
                clusters, logits[0], labels[0], need, ignore, smoothing, z, cap, "mean" if losses.dtype == torch.float32 else "none"
            )
            by = cross_entropy._rows if refused else _cluster.rows
            given = (
                (losses[some], kept, logits, logits, labels)
                if by is cross_entropy._rows
                else (losses[some], kept, logits, logits[0], labels[0])
            )
            by(*given, counts, ignore, smoothing, z, cap, need, flags)
            if need == 2:
                _differentiate(some, logits[0], hidden, weight, _wanted(dx), _wanted(dw), _wanted(db), sums)

    nothing = torch.empty((0,), dtype=x.dtype, device=x.device)
    flat = loss if loss.dim() == 0 else loss.view(-1)
    cross_entropy._launch_fwd(each, flat, nothing, saved, x, target, need, *options)
    if sums is not None and need == 2:
        dw.copy_(sums)


def _bwd(
    dx: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    target: torch.Tensor, dloss: torch.Tensor, saved: torch.Tensor, memory: int, ignore: int, smoothing: float, z: float, cap: float,
    reduction: str,
) -> None:  # fmt: skip
    """Makes the logits again, and of them the gradients."""
    each, flags = reduction == "none", cross_entropy._flags(z, cap, reduction)
    size = _size(x, weight, memory)
    sums = _sums(_wanted(dw), target.numel(), size)
    counts, stats = cross_entropy._split(saved, target.numel(), reduction)
    if flags["MEAN"] and not counts.numel():  # of few rows forward keeps none
        counts, planes = torch.empty((cross_entropy.PARTS.value,), dtype=torch.int32, device=x.device), target[None]
        given = planes, target.numel(), target.numel(), *planes.stride(), ignore
        launch(cross_entropy._count, (counts.numel(),), counts, *given, BLOCK=256, num_warps=4)
    upstream = dloss.reshape(1, -1) if each else dloss
    for some, logits, labels in _chunks(x, weight, bias, target[None], size):
        g = upstream[:, some] if each else upstream
        steps = *logits.stride()[:2], *labels.stride(), *(g.stride() if each else (0, 0))
        sizes = labels.numel(), logits.shape[2], labels.shape[1], *steps, ignore, smoothing, z, cap
        kept = stats[2 * some.start : 2 * some.stop]
        cross_entropy._launch_rows(
            cross_entropy._bwd, logits, logits, logits, labels, g, kept, counts, *sizes, MADE=False, EACH=each, FEW=0, **flags
        )
        _differentiate(some, logits[0], x, weight, _wanted(dx), _wanted(dw), _wanted(db), sums)
    if sums is not None:
        dw.copy_(sums)


@triton.jit(do_not_specialize=["n"])
def _scale(x, dloss, n, BLOCK: tl.constexpr):
    """x times dloss; where that is 1, nothing but a look."""
    factor = tl.load(dloss).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK, tl.where(factor == 1, 0, n), tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        tl.store(x + at, (tl.load(x + at, mask=at < n).to(tl.float32) * factor).to(x.dtype.element_ty), mask=at < n)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction"


@kernel_op(
    "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, ScalarType dtype, int need, bool[] wanted, int memory, "
    f"{_OPTIONS}, str? impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, dtype: torch.dtype, need: int, wanted: list[bool],
    memory: int, *options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """need: as cross_entropy's. Returns the loss, the gradients of x, weight and bias (in float32) as far as wanted, and what is kept."""
    *options, reduction, impl = options
    loss = torch.empty((target.numel(),) if reduction == "none" else (), dtype=dtype, device=x.device)
    outputs = loss, *_gradients(x, weight, bias, [w and need == 2 for w in wanted])
    kept = cross_entropy._parts(target.numel(), reduction) + (2 * target.numel() if need else 0)
    saved = torch.empty((kept,), dtype=torch.float32, device=x.device)
    run(LINEAR_CROSS_ENTROPY, "fwd", impl, (*outputs, saved), x, weight, bias, target, need, memory, *options, reduction)
    return *outputs, saved


@kernel_op(
    "linear_cross_entropy_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor dloss, Tensor saved, bool[] wanted, int memory, "
    f"{_OPTIONS}, str? impl) -> (Tensor, Tensor, Tensor)"
)
def _backward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, dloss: torch.Tensor, saved: torch.Tensor, wanted: list[bool], memory: int, *options: Any) -> tuple[torch.Tensor, ...]:  # fmt: skip
    *options, impl = options
    grads = _gradients(x, weight, bias, wanted)
    run(LINEAR_CROSS_ENTROPY, "bwd", impl, grads, x, weight, bias, target, dloss, saved, memory, *options)
    return grads


def _gradients(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: list[bool]) -> tuple[torch.Tensor, ...]:
    """Memory for the gradients that are wanted, of no elements for the others."""
    new = torch.empty if x.shape[0] else torch.zeros  # of no rows nothing is added up
    dx, dw = (new(t.shape if w else (0,), dtype=t.dtype, device=t.device) for t, w in zip((x, weight), wanted, strict=False))
    return dx, dw, torch.zeros(bias.shape if bias is not None and wanted[2] else (0,), dtype=torch.float32, device=x.device)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, target: torch.Tensor, dtype: torch.dtype, memory: int, *options: Any) -> torch.Tensor:  # fmt: skip
        need, wanted = 1 if options[-2] == "none" else 2, [*ctx.needs_input_grad[:3]]
        loss, *made, saved = _forward(x, weight, bias, target, dtype, need, wanted, memory, *options)
        ctx.save_for_backward(x, weight, bias, target, saved)
        ctx.facts, ctx.made = (wanted, memory, options), made if need == 2 else None
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        x, weight, bias, target, saved = ctx.saved_tensors
        wanted, memory, options = ctx.facts
        made, ctx.made = ctx.made, None  # given away once, to be the caller's own; a second backward makes others
        if made is None:
            made = _backward(x, weight, bias, target, dloss, saved, wanted, memory, *options)
        elif torch.compiler.is_compiling():
            made = [m * dloss for m in made]
        else:
            for t in made:
                if t.numel():
                    launch(_scale, (min(4096, triton.cdiv(t.numel(), 4096)),), t, dloss, t.numel(), BLOCK=4096, num_warps=8)
        dx, dw, db = [m if w else None for m, w in zip(made, wanted, strict=True)]
        return dx, dw, db if bias is None or db is None else db.to(bias.dtype), *(None,) * (3 + len(options))


def reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    options.pop("chunk_memory", None)
    return cross_entropy.reference(F.linear(x, weight, bias), target, **options)


def _torch(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    options.pop("chunk_memory", None)
    return cross_entropy._torch(F.linear(x, weight, bias), target, **options)


def _fault(x: Any, weight: Any, target: Any, bias: Any, chunk_memory: Any) -> str | None:
    """What is wrong with the layer's part of a call, or None."""
    for name, t in (("x", x), ("weight", weight), *([("bias", bias)] if bias is not None else [])):
        if not isinstance(t, torch.Tensor):
            return f"{name} must be a tensor, and is {type(t).__name__}"
        if not t.is_floating_point() or t.dtype != x.dtype or t.device != x.device:
            return f"x, weight and bias must agree in a floating-point dtype and the device; {name} is {t.dtype} on {t.device}, x {x.dtype} on {x.device}"
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return f"x must be (..., H) and weight (V, H); they are {tuple(x.shape)} and {tuple(weight.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be ({weight.shape[0]},), and is {tuple(bias.shape)}"
    if chunk_memory is not None and (not isinstance(chunk_memory, int) or chunk_memory <= 0):
        return f"chunk_memory must be None or a number of bytes above 0, and is {chunk_memory!r}"
    return None


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    chunk_memory: int | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """cross_entropy(x @ weight.T + bias, target), without all logits in memory. Gradients flow to x, weight and bias.

    x: (..., H); weight: (V, H); bias: (V,) or None; of one dtype, float32, float16 or bfloat16. target: (...), int64.
    ignore_index, label_smoothing, z_loss, softcap, reduction: as in `cross_entropy`.
    chunk_memory: bytes of logits that are in memory at a time, by default a fourth of them all and 256 MiB at least. Over more than four
    chunks weight's gradient is added up in float32, 4 bytes for each of its elements; over fewer in its own dtype, rounded once a chunk.
    Products and sums are in float32. For "mean" and "sum" forward makes the gradients, so that a step has three products; for "none"
    backward makes the logits again. Returns the dtype of x, float32 under autocast (which does not cast x and weight).
    Raises RidgelineError on shapes, dtypes, devices or options other than these, or an `impl` that cannot run the call.
    """
    fault = _fault(x, weight, target, bias, chunk_memory)
    if fault is None:
        logits = torch.empty((), dtype=x.dtype, device=x.device).expand(*x.shape[:-1], weight.shape[0])
        fault = cross_entropy._fault(logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction)
    if fault:
        raise RidgelineError(f"linear_cross_entropy: {fault}")
    found = eager(LINEAR_CROSS_ENTROPY, impl, x)
    if readable(target) and ((target != ignore_index) & ((target < 0) | (target >= weight.shape[0]))).any():
        raise RidgelineError(
            f"linear_cross_entropy: targets must be 0 to {weight.shape[0] - 1} or ignore_index {ignore_index}, and others are given"
        )
    if found is not None and found.call is not None:
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        return found.call(x, weight, target, bias, z_loss=z_loss, softcap=softcap, **options)
    dtype = torch.float32 if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu") else x.dtype
    rows = x.reshape(-1, x.shape[-1])
    options = ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0), reduction, impl
    labels = target.reshape(-1)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
        loss = differentiate(_LinearCrossEntropy, rows, weight, bias, labels, dtype, chunk_memory or 0, *options)
    else:
        loss = _forward(rows, weight, bias, labels, dtype, 0, [False] * 3, chunk_memory or 0, *options)[0]
    return loss.view(target.shape) if reduction == "none" else loss


def cost(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None, *, reduction: str = "mean", **_: Any) -> tuple[Cost, Cost | None, Cost | None]:  # fmt: skip
    """Three products, of which forward alone is one; the logits are not in memory."""
    given = nbytes(x, weight, target) + (0 if bias is None else nbytes(bias))
    losses, product = (target.numel() if reduction == "none" else 1) * x.element_size(), 2 * x.numel() * weight.shape[0]
    grads = nbytes(x, weight) + (0 if bias is None else nbytes(bias))
    again = product if reduction == "none" else 0
    return Cost(given, losses, product), Cost(given, grads, 2 * product + again), Cost(given, losses + grads, 3 * product + again)


def _labels(*shape: int, high: int, some: type[Spec] = Spec) -> Spec:
    return some(*shape, dtype="int64", high=high)


ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}
HALF = "float32", "float16"  # in bfloat16 the formula's own error of a few rows is luck
LINEAR_CROSS_ENTROPY = Op(
    linear_cross_entropy,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x16x129", (Spec(33, 16), Spec(129, 16), _labels(33, high=129))),
        Case("2x9x24x300 bias, all", (Spec(2, 9, 24), Spec(300, 24), _labels(2, 9, high=300, some=Ignored), Spec(300)), ALL, HALF),
        Case(
            "40x16x100 sum, chunks",
            (Spec(40, 16), Spec(100, 16), _labels(40, high=100, some=Ignored)),
            {"reduction": "sum", "chunk_memory": 4400},
        ),
        Case("30x16x200 none", (Spec(30, 16), Spec(200, 16), _labels(30, high=200)), {"reduction": "none", "chunk_memory": 9000}),
        Case("8192x4096x128256", (Spec(8192, 4096), Spec(128256, 4096), _labels(8192, high=128256)), dtypes=("bfloat16",), use="bench"),
        Case("16384x2048x32000", (Spec(16384, 2048), Spec(32000, 2048), _labels(16384, high=32000)), dtypes=("bfloat16",), use="bench"),
        Case("256x128x4096", (Spec(256, 128), Spec(4096, 128), _labels(256, high=4096)), use="quick"),
    ],
)
LINEAR_CROSS_ENTROPY.eager("naive", "the layer, then the formula of cross_entropy in eager PyTorch", reference)
LINEAR_CROSS_ENTROPY.eager("torch", "PyTorch's own layer and loss: logits and their gradient in memory", _torch, served=True)
LINEAR_CROSS_ENTROPY.compiled("layer and loss fused by torch.compile, as far as it does: the logits are in memory")
LINEAR_CROSS_ENTROPY.kernel(
    "triton",
    "by chunks of rows: cuBLAS for the products, cross_entropy's kernels for the loss and the gradient where the logits were",
    kind="triton",
    fwd=_fwd,
    bwd=_bwd,
    served=True,
)
