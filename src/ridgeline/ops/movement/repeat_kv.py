"""repeat_kv: every head of keys or values n times, for attention that wants as many of them as of queries.

    y[b, h n + j, s] = x[b, h, s] for j < n, or 0 from the sequence's length on          backward: dx[b, h, s] = sum_j dy[b, h n + j, s]

The floor is one read of x and one write of y; backward the other way round, its sums in float32. With `lengths` what lies beyond a
sequence's end is zeros, as a mask would make it, and is not read.
Source: the function of that name in Hugging Face's models; Ainslie et al., GQA, 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.movement._kv import repeat_cuda, repeat_triton, repeats_packs
from ridgeline.select import eager, run


@kernel_op("repeat_kv_fwd(Tensor x, Tensor? lengths, int n, str? impl) -> Tensor")
def _forward(x: torch.Tensor, lengths: torch.Tensor | None, n: int, impl: str | None) -> torch.Tensor:
    y = x.new_empty((x.shape[0], x.shape[1] * n, *x.shape[2:]))
    if y.numel():
        run(REPEAT_KV, "fwd", impl, (y,), x, n, lengths)
    return y


@kernel_op("repeat_kv_bwd(Tensor dy, Tensor? lengths, int n, str? impl) -> Tensor")
def _backward(dy: torch.Tensor, lengths: torch.Tensor | None, n: int, impl: str | None) -> torch.Tensor:
    dx = dy.new_empty((dy.shape[0], dy.shape[1] // n, *dy.shape[2:]))
    if dx.numel():
        run(REPEAT_KV, "bwd", impl, (dx,), dy, n, lengths)
    return dx


class _RepeatKV(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: torch.Tensor | None, n: int, impl: str | None) -> torch.Tensor:
        ctx.save_for_backward(lengths)
        ctx.facts = n, impl
        return _forward(x, lengths, n, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _backward(dy, *ctx.saved_tensors, *ctx.facts), None, None, None


def reference(x: torch.Tensor, n: int, *, lengths: torch.Tensor | None = None) -> torch.Tensor:
    y = x.repeat_interleave(n, 1)
    if lengths is None:
        return y
    return y.masked_fill((torch.arange(x.shape[2], device=x.device) >= lengths[:, None])[:, None, :, None], 0)


def _torch(x: torch.Tensor, n: int, *, lengths: torch.Tensor | None = None) -> torch.Tensor:
    if lengths is not None:
        x = x.masked_fill((torch.arange(x.shape[2], device=x.device) >= lengths[:, None])[:, None, :, None], 0)
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n, s, d).clone(memory_format=torch.contiguous_format).view(b, h * n, s, d)


def repeat_kv(x: torch.Tensor, n: int, *, lengths: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
    """Every head n times, one after the other: (B, H, S, D) becomes a new tensor (B, H n, S, D). Gradients flow to x.

    x: any strides. n: from 1 on. lengths: (B,), int32 or int64: rows from a sequence's length on are zeros, and have no gradient; on a CPU,
    and with RIDGELINE_CHECK=1, a length outside 0 to S raises. Raises RidgelineError where an argument is none of these, or `impl` cannot
    run the call.
    """
    if not isinstance(x, torch.Tensor) or x.dim() != 4:
        raise RidgelineError(
            f"repeat_kv: x must be a tensor (B, H, S, D), and is {tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__}"
        )
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise RidgelineError(f"repeat_kv: n must be a whole number from 1 on, and is {n!r}")
    if lengths is not None:
        if (
            not isinstance(lengths, torch.Tensor)
            or lengths.dtype not in (torch.int32, torch.int64)
            or lengths.shape != x.shape[:1]
            or lengths.device != x.device
        ):
            found = (
                f"{lengths.dtype} {tuple(lengths.shape)} on {lengths.device}"
                if isinstance(lengths, torch.Tensor)
                else type(lengths).__name__
            )
            raise RidgelineError(
                f"repeat_kv: lengths must be int32 or int64, ({x.shape[0]},) on {x.device}, and are {found}"
            )
        if readable(lengths) and lengths.numel() and not (0 <= lengths.min() and lengths.max() <= x.shape[2]):
            raise RidgelineError(
                f"repeat_kv: lengths must be from 0 to {x.shape[2]}, and are from {lengths.min()} to {lengths.max()}"
            )
    plain = eager(REPEAT_KV, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x, n, lengths=lengths)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_RepeatKV, x, lengths, n, impl)
    return _forward(x, lengths, n, impl)


def cost(x: torch.Tensor, n: int, *, lengths: torch.Tensor | None = None) -> tuple[Cost, Cost]:
    """With lengths, what is read at the least, which is none of a tensor's rows: how many are valid, the shapes do not say."""
    once, copies = (nbytes(x), n * nbytes(x)) if lengths is None else (nbytes(lengths),) * 2
    return Cost(once, n * nbytes(x), 0), Cost(copies, nbytes(x), (n - 1) * x.numel())


def _bench(name: str, *shape: int, grad: bool = True, **kwargs: Any) -> Case:
    return Case(name, (Spec(*shape, grad=grad), 4), kwargs, dtypes=("bfloat16",), use="bench")


REPEAT_KV = Op(
    repeat_kv,
    reference=reference,
    cost=cost,
    cases=[
        Case("3x2x5x16 by 3", (Spec(3, 2, 5, 16), 3)),
        Case("2x3x7x5 by 2", (Spec(2, 3, 7, 5), 2)),
        Case("5x2x9x8 by 4, lengths", (Spec(5, 2, 9, 8), 4), {"lengths": Spec(5, dtype="int64", high=10)}),
        Case("3x1x70x24 by 1, lengths", (Spec(3, 1, 70, 24), 1), {"lengths": Spec(3, dtype="int32", high=71)}),
        Case("4x2x1x64 by 4", (Spec(4, 2, 1, 64), 4)),
        Case("3x2x1x24 by 3, lengths", (Spec(3, 2, 1, 24), 3), {"lengths": Spec(3, dtype="int64", high=2)}),
        Case("2x4x256x64 by 4", (Spec(2, 4, 256, 64), 4), use="quick"),
        _bench("64x8x8192x128 by 4", 64, 8, 8192, 128, grad=False),
        _bench("16x8x8192x128 by 4", 16, 8, 8192, 128),
        _bench("16x8x8192x128 by 4, lengths", 16, 8, 8192, 128, lengths=Spec(16, dtype="int64", high=8193)),
    ],
)
DRAM, ISSUED = "dram__throughput.avg.pct_of_peak_sustained_elapsed", "smsp__inst_executed.sum"


def _rung(name: str, idea: str, launcher: Any, *given: Any, **facts: Any) -> None:
    REPEAT_KV.kernel(name, idea, fwd=partial(launcher, "fwd", *given), bwd=partial(launcher, "bwd", *given), **facts)


REPEAT_KV.eager(
    "naive", "repeat_interleave, and a mask over the result: a pass for each, and an index for the heads", reference
)
REPEAT_KV.eager("torch", "a mask over the input, expand and one copy", _torch, served=True)
REPEAT_KV.compiled("the copy and the mask in one kernel by torch.compile", _torch)
_rung(
    "triton",
    "a block of elements a program, read once and stored n times; any strides",
    repeat_triton,
    kind="triton",
    served=True,
)
_rung(
    "cuda",
    "a thread for every element of the result, which reads it again for every copy",
    repeat_cuda,
    False,
    False,
    kind="cuda",
)
_rung(
    "cuda_packed",
    "16 bytes a thread: fewer loads, stores and divisions for the same bytes",
    repeat_cuda,
    False,
    True,
    kind="cuda",
    served=True,
    supports=repeats_packs,
    gain=2.0,
    counter=ISSUED,
)
_rung(
    "cuda_once",
    "every 16 bytes read once and stored n times, four of them on their way a thread",
    repeat_cuda,
    True,
    True,
    kind="cuda",
    supports=repeats_packs,
    gain=1.1,
    counter=DRAM,
)
