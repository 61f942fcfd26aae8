"""grouped_matmul: y_r = x_r W_g + b_g for the rows r of each group g, where the groups' ends are on the device.

    backward: dx_r = dy_r W_g^T,  dW_g = sum_{r in g} x_r^T dy_r,  db_g = sum_{r in g} dy_r

The products of a mixture of experts. One kernel walks the tiles of all groups; another sums each group's rows in order.
Source: Gale et al., MegaBlocks, 2022 (arXiv:2211.15841); the interface is torch's grouped_mm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ridgeline.boundary import Function, differentiate, first_order, kernel_op
from ridgeline.op import Case, Columns, Cost, Op, Piece, Spec, nbytes
from ridgeline.ops.experts import _checks, _grouped, _plain
from ridgeline.ops.experts._arguments import cast, precision
from ridgeline.select import eager, run

_T = torch.Tensor
_Maybe = torch.Tensor | None


@kernel_op("grouped_matmul_fwd(Tensor x, Tensor w, Tensor offsets, Tensor? bias, str precision, str? impl) -> Tensor")
def _fwd_op(x: _T, w: _T, offsets: _T, bias: _Maybe, how: str, impl: str | None) -> _T:
    y = x.new_empty((x.shape[0], w.shape[2]))
    run(GROUPED_MATMUL, "fwd", impl, (y,), x, w, offsets, bias, how)
    return y


@kernel_op(
    "grouped_matmul_bwd(Tensor dy, Tensor x, Tensor w, Tensor offsets, bool weight, bool bias, str precision, "
    "str? impl) -> (Tensor, Tensor)"
)
def _bwd_op(dy: _T, x: _T, w: _T, offsets: _T, weight: bool, bias: bool, how: str, impl: str | None) -> tuple[_T, _T]:
    """Returns dW in w's layout and db, empty if they are not wanted."""
    dw = torch.empty_like(w) if weight else w.new_empty((0, 0, 0))
    db = dy.new_empty((w.shape[0], w.shape[2]) if bias else (0, 0))
    run(GROUPED_MATMUL, "bwd", impl, (dw, db), dy, x, offsets, how, False)
    return dw, db


@kernel_op(
    "grouped_matmul_add(Tensor(a!) main_grad, Tensor dy, Tensor x, Tensor offsets, str precision, str? impl) -> ()"
)
def _add_op(main_grad: _T, dy: _T, x: _T, offsets: _T, how: str, impl: str | None) -> None:
    run(GROUPED_MATMUL, "bwd", impl, (main_grad, dy.new_empty((0, 0))), dy, x, offsets, how, True)


def _no_tma(first: _T, second: _T, *_: Any, **__: Any) -> str | None:
    """first, second: x and w, or dy and x."""
    if not _grouped.whole(first):
        return f"it copies rows of x as they lie, and its strides are {tuple(first.stride())}"
    return _grouped.refusal(first, second)


def _few_rows(first: _T, second: _T, offsets: _T, *_: Any, **__: Any) -> str | None:
    return _grouped.unless(first.shape[0], offsets.numel())


class _Function(Function):
    @staticmethod
    def forward(ctx: Any, x: _T, w: _T, bias: _Maybe, offsets: _T, main_grad: _Maybe, impl: str | None) -> _T:
        ctx.save_for_backward(x, w, offsets, main_grad)
        ctx.impl = impl
        return _fwd_op(x, w, offsets, bias, precision(), impl)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: _T) -> Any:
        x, w, offsets, main_grad = ctx.saved_tensors
        (wants_x, wants_w, wants_b), how, impl = ctx.needs_input_grad[:3], precision(), ctx.impl
        dy = dy.contiguous()
        dx = _fwd_op(dy, w.mT, offsets, None, how, impl) if wants_x else None
        dw = db = None
        if wants_w and main_grad is not None:
            _add_op(main_grad, dy, x, offsets, how, impl)
            wants_w = False
        if wants_w or wants_b:
            dw, db = _bwd_op(dy, x, w, offsets, wants_w, wants_b, how, impl)
        return dx, dw if wants_w else None, db if wants_b else None, None, None, None


def reference(x: _T, w: _T, offsets: _T, *, bias: _Maybe = None, main_grad: _Maybe = None) -> _T:
    """A product for each group, whose rows the host reads."""
    return _plain.by_group(x, w, offsets, bias=bias, main_grad=main_grad)


def pieces(x: _T, w: _T, offsets: _T, *, bias: _Maybe = None, main_grad: _Maybe = None) -> Iterator[Piece]:
    """A call for each group. The last one has the rows past the last end too."""
    ends = offsets.tolist()
    for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        one, rows = slice(g, g + 1), slice(start, end if g < len(ends) - 1 else x.shape[0])
        slices = {"x": rows, "out": rows, "w": one, "bias": one, "main_grad": one}
        yield Piece(slices, {"offsets": offsets.new_tensor([end - start])})


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns the products of groups of rows with a matrix each, (T, N). Gradients flow to x, w and bias.

    x: (T, K); w: (G, K, N); bias: (G, N) or None; one dtype and device, any strides.
    offsets: (G,), int32: the end of each group's rows, rising; group g has the rows from the end before it to its own.
    They stay on the device: the host reads them on a CPU alone. A group may have no rows. Rows past the last end give
    zeros. On a GPU, offsets that do not rise give unspecified rows, and nothing outside is read or written.
    main_grad: a float32 buffer (G, K, N), any strides. Backward adds w's gradient to it, in the product's epilogue, and
    w.grad stays as it is; None: w gets its gradient.
    Sums are float32, in the order of rows and of K, and rounded once. float32 products follow
    `torch.get_float32_matmul_precision()`. Autocast casts x, w and bias first.
    Raises RidgelineError if shapes, dtypes or devices do not match, or if `impl` cannot run the call.
    """
    x, w, bias = cast(x, w, bias)
    _checks.grouped_matmul(x, w, offsets, bias, main_grad)
    plain = eager(GROUPED_MATMUL, impl, x, w, bias)
    if plain is not None and plain.call is not None:
        return plain.call(x, w, offsets, bias=bias, main_grad=main_grad)
    bias = None if bias is None else bias.contiguous()
    return differentiate(_Function, x, w, bias, offsets.contiguous(), main_grad, impl)


def cost(x: _T, w: _T, offsets: _T, *, bias: _Maybe = None, main_grad: _Maybe = None) -> tuple[Cost, Cost]:
    """As if every row were in a group and every group had rows."""
    y, flops = x.shape[0] * w.shape[2] * x.element_size(), 2 * x.numel() * w.shape[2]
    b = 0 if bias is None else nbytes(bias)
    kept = nbytes(w) if main_grad is None else 4 * w.numel()
    read = y + nbytes(x, w) + (0 if main_grad is None else kept)
    return Cost(nbytes(x, w) + b, y, flops), Cost(read, nbytes(x) + kept + b, 2 * flops)


class Ends(Spec):
    """Ends of groups that share `high` rows in the ratio of `parts`; a last part, `tail`, is past the last end."""

    parts: tuple[int, ...]

    def __init__(self, *parts: int, tail: int = 0):
        super().__init__(len(parts), dtype="int32", grad=False, high=sum(parts) + tail)
        object.__setattr__(self, "parts", (*parts, tail))

    def make(self, dtype: torch.dtype, device: Any, generator: Any) -> _T:
        total = max(sum(self.parts), 1)
        ends = [sum(self.parts[: n + 1]) * self.high // total for n in range(len(self.parts) - 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device)


def _case(sizes: tuple[int, ...], K: int, N: int, use: str = "check", tail: int = 0, bias: bool = False) -> Case:
    """tail: rows past the last end."""
    T, G = sum(sizes) + tail, len(sizes)
    what = f"{T} rows in {G} groups" if use != "check" else "rows " + " ".join(map(str, sizes))
    name = [what, *["one with half"] * (use == "bench" and len(set(sizes)) > 1), f"{K} -> {N}", *["bias"] * bias]
    dtypes = {"bench": ("bfloat16",), "quick": ("float32",), "check": ("float32", "float16", "bfloat16")}[use]
    weight = (Columns if use != "check" or tail else Spec)(G, K, N)  # columns: as layers store (N, K)
    given = Spec(T, K), weight, Ends(*sizes, tail=tail)
    return Case(", ".join(name), given, {"bias": Spec(G, N)} if bias else {}, dtypes=dtypes, use=use)


def _skewed(G: int, T: int) -> tuple[int, ...]:
    """One group has half of the rows, and the others share the rest."""
    rest = T // 2 // (G - 1) // 8 * 8
    return (T - rest * (G - 1), *[rest] * (G - 1))


BENCH = [(G, K, N) for G in (8, 128) for K, N in ((2048, 2048), (4096, 14336))]
GROUPED_MATMUL = Op(
    grouped_matmul,
    reference=reference,
    cost=cost,
    pieces=pieces,
    flops={
        "grouped_matmul_collect": lambda total, more: total.numel(),
        "grouped_matmul_bwd": lambda dy, x, w, offsets, weight, *_: 2 * weight * x.shape[0] * w[0].numel(),
        "grouped_matmul_add": lambda main, dy, x, *_: 2 * x.shape[0] * main[0].numel(),
    },
    cases=[
        _case((5, 0, 27, 1), 45, 35, tail=3, bias=True),
        _case((0, 33, 0), 24, 40),
        _case((17, 18), 40, 17, bias=True),
        _case((64,) * 8, 256, 256, "quick"),
        *(_case((32768 // G,) * G, K, N, "bench") for G, K, N in BENCH),
        *(_case(_skewed(G, 32768), K, N, "bench") for G, K, N in BENCH),
    ],
)

READS = "a product for each group, whose ends the host reads"
GROUPED_MATMUL.eager("naive", READS, _plain.by_group, served=True, reads=True)
GROUPED_MATMUL.eager(
    "torch",
    "PyTorch's grouped_mm (CUTLASS), and zeros for rows past the last end",
    _plain.grouped_mm,
    supports=_plain.not_grouped_mm,
)
GROUPED_MATMUL.kernel(
    "triton",
    "programs walk the tiles of all groups and find each tile's group from the ends on the device",
    kind="triton",
    fwd=_grouped.fwd,
    bwd=_grouped.bwd,
    served=True,
)
GROUPED_MATMUL.kernel(
    "triton_tma",
    "Hopper: copies by TMA that end at a group's end; one loop over tiles and steps",
    kind="triton",
    fwd=partial(_grouped.fwd, tma=True),
    bwd=partial(_grouped.bwd, tma=True),
    supports=_no_tma,
    unless=_few_rows,
    **_grouped.HOPPER,
)
