"""transpose: y_..cr = x_..rc, the last two dimensions swapped, in a tensor of its own.

A warp that reads along a row of x writes along a column of y, a sector a number; so tiles go through shared memory, where they are
turned. There a column lies in one bank unless rows are padded or swizzled. What is left is to have enough on the way, in pieces long
enough for memory: boxes that the copy engine brings and takes, then squares of 16-byte packs that threads turn in their registers.
Source: Ruetsch and Micikevicius, Optimizing matrix transpose in CUDA, NVIDIA 2009.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.movement._bytes import DTYPES, aligned
from ridgeline.ops.movement._transpose import NAIVE, TILE, boxes, packed, small, too_large
from ridgeline.select import eager, run


@kernel_op("transpose_fwd(Tensor x, str? impl) -> Tensor")
def _forward(x: torch.Tensor, impl: str | None) -> torch.Tensor:
    y = x.new_empty((*x.shape[:-2], x.shape[-1], x.shape[-2]))
    if x.numel():
        run(TRANSPOSE, "fwd", impl, (y,), x)
    return y


class _Transpose(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, impl: str | None) -> torch.Tensor:
        ctx.impl = impl
        return _forward(x, impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _forward(dy.contiguous(), ctx.impl), None


def reference(x: torch.Tensor) -> torch.Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format)


def transpose(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """x with its last two dimensions swapped, in a contiguous tensor of its own. Gradients flow to x.

    x: two dimensions or more, any strides and dtype; contiguous is quickest, and quickest of all with rows of a multiple of 16 bytes.
    Raises RidgelineError where x is no dense tensor or has fewer dimensions, or `impl` cannot run the call.
    """
    if not isinstance(x, torch.Tensor):
        raise RidgelineError(f"transpose: x must be a tensor, and is {type(x).__name__}")
    if x.dim() < 2:
        raise RidgelineError(f"transpose: x must have two dimensions or more, and its shape is {tuple(x.shape)}")
    plain = eager(TRANSPOSE, impl, x)
    if plain is not None and plain.call is not None:
        return plain.call(x)
    return differentiate(_Transpose, x, impl) if torch.is_grad_enabled() and x.requires_grad else _forward(x, impl)


def cost(x: torch.Tensor) -> tuple[Cost, Cost]:
    return Cost(nbytes(x), nbytes(x), 0), Cost(nbytes(x), nbytes(x), 0)


def _contiguous(x: torch.Tensor, *_: Any) -> str | None:
    return too_large(x) if x.is_contiguous() else "it takes a contiguous tensor"


def _boxes(x: torch.Tensor, *_: Any) -> str | None:
    """What tensor maps take, of x and of its transpose."""
    if any(n * x.element_size() % 16 for n in x.shape[-2:]):
        return "it takes matrices whose sides are multiples of 16 bytes"
    return too_large(x) or aligned(x)


def _gluon(y: torch.Tensor, x: torch.Tensor) -> None:
    from ridgeline.ops.movement._transpose_hopper import fwd

    fwd(y, x)


def _bench(name: str, *shape: int, dtypes: tuple[str, ...] = ("float32",)) -> Case:
    return Case(name, (Spec(*shape, grad=False),), dtypes=dtypes, use="bench")


TRANSPOSE = Op(
    transpose,
    reference=reference,
    cost=cost,
    cases=[
        Case("33x129", (Spec(33, 129),)),
        Case("72x200", (Spec(72, 200),)),
        Case("3 of 136x264", (Spec(3, 136, 264),)),
        Case("2x2 of 70x34", (Spec(2, 2, 70, 34),)),
        *(
            Case(f"{shape} of {d}", (Spec(*shape, dtype=d, high=high),), dtypes=("float32",))
            for d, high in (("int8", 0), ("int16", 1 << 15), ("int64", 1 << 40))
            for shape in ((2, 160, 272), (35, 130), (36, 132))
        ),
        Case("1x5", (Spec(1, 5),)),
        Case("3 of 0x5", (Spec(3, 0, 5),)),
        Case("1024x1024", (Spec(1024, 1024),), use="quick"),
        _bench("8192x8192", 8192, 8192, dtypes=("float32", "bfloat16")),
        _bench("16384x8192", 16384, 8192, dtypes=("bfloat16",)),
        _bench("32768x32768", 32768, 32768),
        _bench("8191x8193", 8191, 8193, dtypes=("float32", "bfloat16")),
        _bench("64 of 1024x2048", 64, 1024, 2048, dtypes=("bfloat16",)),
    ],
)
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


def _rung(name: str, idea: str, start: Any, supports: Any = _contiguous, **facts: Any) -> None:
    TRANSPOSE.kernel(name, idea, fwd=start, bwd=start, supports=supports, **{"kind": "cuda", "dtypes": DTYPES, **facts})


TRANSPOSE.eager("torch", "PyTorch's own: mT and a copy of it", reference, served=True)
TRANSPOSE.compiled("as torch.compile has it: a tile of Triton, whose layout the compiler turns")
_rung(
    "cuda",
    "an element a thread, by squares of 32 x 32: rows of x are read whole, those of y written a sector an element",
    partial(small, NAIVE, 0),
    gain=1.0,
    counter="l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
)
_rung(
    "cuda_tile",
    "through a tile of shared memory: rows of both are whole, and a column of the tile lies in one bank",
    partial(small, TILE, 0),
    gain=2.0,
    counter="l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
)
_rung(
    "cuda_padded",
    "a 33rd column: a column of the tile lies in 32 banks",
    partial(small, TILE, 1),
    gain=1.3,
    counter=_CONFLICTS,
)
_rung(
    "cuda_swizzled",
    "columns swizzled by xor with the row: as free of conflicts, and no shared memory lost",
    partial(small, TILE, 2),
    gain=1.0,
    counter=_CONFLICTS,
)
_rung(
    "cuda_tma",
    "the copy engine brings and takes boxes, several on their way in a ring; persistent blocks only turn",
    boxes,
    _boxes,
    arch=90,
    gain=1.2,
    counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
_rung(
    "gluon",
    "as cuda_tma in Gluon: who turns which square is a layout, and loads, turns and stores are a line each",
    _gluon,
    _boxes,
    kind="gluon",
    dtypes=("float32", "float16", "bfloat16", "int32", "int16"),
    arch=90,
    newest=90,
    gain=1.0,
    counter="dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
_rung(
    "cuda_packed",
    "16 bytes a load and a store in every dtype: threads turn squares of packs in registers, tiles are 256 bytes wide; "
    "what is strided PyTorch copies first",
    packed,
    too_large,
    served=True,
    unless=too_large,
    gain=1.05,
    counter="smsp__inst_executed.sum",
)
