"""repeat_kv: repeats each head of keys or values n times, for attention kernels that need one per query head.

    y[b, h n + j, s] = x[b, h, s] for j < n and s < lengths[b], else 0          dx[b, h, s] = sum_j dy[b, h n + j, s]

The floor is one read of x and one write of y; backward reads dy, adds in float32 and writes dx. With `lengths`, rows
past a sequence's end are zeros, as a mask would make them, and are not read.
Source: Hugging Face's function of that name; Ainslie et al., GQA, 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes, readable
from ridgeline.ops.movement._bytes import DRAM, ISSUED
from ridgeline.ops.movement._kv import check_index, repeat_cuda, repeat_triton, repeats_packs
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
    """Each head repeated n times in a row: (B, H, S, D) becomes a new tensor (B, H n, S, D). Gradients flow to x.

    x: any dtype and strides. n: 1 or more. lengths: (B,), int32 or int64; rows from a sequence's length on are zeros
    and get no gradient. Values on a GPU are not validated; on a CPU, or with RIDGELINE_CHECK=1, lengths outside 0 to S
    raise.
    Raises RidgelineError if an argument is none of these, or if `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor) or x.dim() != 4:
        found = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"repeat_kv: x must be a tensor (B, H, S, D), but is {found}")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise RidgelineError(f"repeat_kv: n must be an int of at least 1, but is {n!r}")
    if lengths is not None:
        check_index("repeat_kv: lengths", lengths, x)
        if readable(lengths) and lengths.numel() and not (0 <= lengths.min() and lengths.max() <= x.shape[2]):
            found = f"{lengths.min()} to {lengths.max()}"
            raise RidgelineError(f"repeat_kv: lengths must be from 0 to {x.shape[2]}, but are from {found}")
    plain = eager(REPEAT_KV, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x, n, lengths=lengths)
    if torch.is_grad_enabled() and x.requires_grad:
        return differentiate(_RepeatKV, x, lengths, n, impl)
    return _forward(x, lengths, n, impl)


def cost(x: torch.Tensor, n: int, *, lengths: torch.Tensor | None = None) -> tuple[Cost, Cost]:
    """With lengths, the least that may be read: none of x or dy, since shapes do not say how many rows are valid."""
    once, copies = (nbytes(x), n * nbytes(x)) if lengths is None else (nbytes(lengths),) * 2
    return Cost(once, n * nbytes(x), 0), Cost(copies, nbytes(x), (n - 1) * x.numel())


def _bench(name: str, *shape: int, grad: bool = True, **kwargs: Any) -> Case:
    return Case(name, (Spec(*shape, grad=grad), 4), kwargs, dtypes=("bfloat16",), use="bench")


REPEAT_KV = Op(
    repeat_kv,
    reference=reference,
    cost=cost,
    sharding="x bhSD, lengths b -> bhSD",
    flops={"repeat_kv_bwd": lambda dy, lengths, n, _: dy.numel() // n * (n - 1)},
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


def _rung(name: str, idea: str, start: Any, *given: Any, kind: str = "cuda", **facts: Any) -> None:
    fwd, bwd = (partial(start, direction, *given) for direction in ("fwd", "bwd"))
    REPEAT_KV.kernel(name, idea, kind=kind, fwd=fwd, bwd=bwd, **facts)


REPEAT_KV.eager("naive", "repeat_interleave, then a mask over the result", reference)
REPEAT_KV.eager("torch", "a mask over the input, then expand and one copy", _torch, served=True)
REPEAT_KV.compiled("torch.compile: copy and mask in one kernel", _torch)
_rung("triton", "a block of elements read once and stored n times", repeat_triton, kind="triton", served=True)
_rung("cuda", "one thread per output element; each copy reads its input again", repeat_cuda, False, False)
PACKED: dict[str, Any] = {"supports": repeats_packs, "gain": 2.0, "counter": ISSUED, "served": True}
_rung("cuda_packed", "16 bytes per thread: fewer loads, stores and divisions", repeat_cuda, False, True, **PACKED)
ONCE: dict[str, Any] = {"supports": repeats_packs, "gain": 1.1, "counter": DRAM}
_rung("cuda_once", "each 16 bytes read once, stored n times, four in flight", repeat_cuda, True, True, **ONCE)
