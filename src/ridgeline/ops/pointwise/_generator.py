"""Turns a scalar function into an op: strides, broadcasting, type promotion and backward in one place.

A pointwise op's file gives the function and its gradient as `triton.jit` functions of float32 scalars:

    y = f(a, b, ..., scalars...)                   da, db, ... = g(dy, a, b, ..., scalars...)

Three kernels serve every layout. `_flat` walks memory if all tensors have the same dense layout. `_rows` walks the
innermost dimension in tiles and computes each row's offset from its index, so broadcast and strided inputs still load
whole vectors. `_columns` serves gradients of inputs that are one row, such as a bias: it walks down columns and
accumulates. All are bound by memory: the floor is one read of each input and one write of each output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, early, first_order, kernel_op, launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import FLOATS, Cost, Op, RidgelineError, dense_only, dtype_name, nbytes
from ridgeline.select import by_kind, eager, run

Tensors = tuple[torch.Tensor, ...]


@triton.jit
def _store(pointers, values, mask, NEED: tl.constexpr):
    """Writes the needed outputs: bit k of NEED says whether output k is one."""
    if len(pointers) == 1:
        tl.store(pointers[0], values.to(pointers[0].dtype.element_ty), mask=mask)
    else:
        for k in tl.static_range(len(pointers)):
            if (NEED >> k) & 1:
                tl.store(pointers[k], values[k].to(pointers[k].dtype.element_ty), mask=mask)


@triton.jit
def _flat(outs, ins, scalars, n, FN: tl.constexpr, NEED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    xs = ()
    for k in tl.static_range(len(ins)):
        xs = xs + (tl.load(ins[k] + i, mask=mask).to(tl.float32),)
    targets = ()
    for k in tl.static_range(len(outs)):
        targets = targets + (outs[k] + i,)
    _store(targets, FN(*xs, *scalars), mask, NEED)


@triton.jit
def _offsets(row, column, sizes, strides):
    """The offsets of elements (row, column) of a strided tensor; `sizes` are the outer dimensions, innermost first."""
    offset = column * strides[0]
    for d in tl.static_range(len(sizes)):
        if d + 1 == len(sizes):
            offset += row * strides[d + 1]
        else:
            offset += (row % sizes[d]) * strides[d + 1]
            row = row // sizes[d]
    return offset


@triton.jit
def _rows(
    outs, ins, scalars, rows, columns, sizes, out_strides, in_strides, FN: tl.constexpr, NEED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(columns, BN)
    pid = tl.program_id(0)
    row = ((pid // across).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    column = ((pid % across).to(tl.int64) * BN + tl.arange(0, BN))[None, :]
    mask = (row < rows) & (column < columns)
    xs = ()
    for k in tl.static_range(len(ins)):
        xs = xs + (tl.load(ins[k] + _offsets(row, column, sizes, in_strides[k]), mask=mask).to(tl.float32),)
    targets = ()
    for k in tl.static_range(len(outs)):
        targets = targets + (outs[k] + _offsets(row, column, sizes, out_strides),)
    _store(targets, FN(*xs, *scalars), mask, NEED)


@triton.jit
def _columns(
    outs, ins, scalars, rows, columns, strides, FN: tl.constexpr, NEED: tl.constexpr, SUMS: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """For matrices: writes output k whole or, if bit k of SUMS is set, its sum over the rows of this program.

    A step handles TILES tiles: all their loads, then all their stores. WIDE: offsets within a tile need 64 bits.
    """
    row = tl.arange(0, BM)[:, None]
    column = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    if WIDE:
        row = row.to(tl.int64)
        column = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[None, :]
    inside = column < columns
    totals = ()
    for _ in tl.static_range(len(outs)):
        totals = totals + (tl.zeros((BM, BN), tl.float32),)
    share = tl.program_id(1).to(tl.int64)
    steps = tl.cdiv(rows, TILES * BM)
    busy = tl.cdiv(steps, tl.cdiv(steps, tl.num_programs(1)))  # the programs used, with equally many steps each
    for step in range(tl.where(share < busy, share, steps), steps, busy):
        start = step * (TILES * BM)
        left = tl.minimum(rows - start, TILES * BM).to(tl.int32)
        loaded = ()
        for t in tl.static_range(TILES):
            mask = (row < left - t * BM) & inside
            for k in tl.static_range(len(ins)):
                base = ins[k] + (start + t * BM) * strides[k][0]
                loaded = loaded + (tl.load(base + (row * strides[k][0] + column * strides[k][1]), mask=mask, other=0),)
        for t in tl.static_range(TILES):
            mask = (row < left - t * BM) & inside
            xs = ()
            for k in tl.static_range(len(ins)):
                xs = xs + (loaded[t * len(ins) + k].to(tl.float32),)
            values = FN(*xs, *scalars)
            raised = ()
            targets = ()
            for k in tl.static_range(len(outs)):
                targets = targets + (outs[k] + (start + t * BM) * columns + (row * columns + column),)
                if (SUMS >> k) & 1:
                    raised = raised + (totals[k] + tl.where(mask, values[k], 0.0),)
                else:
                    raised = raised + (totals[k],)
            totals = raised
            _store(targets, values, mask, NEED & ~SUMS)
    if PDL:
        gdc_launch_dependents()
    place = share * columns + column
    for k in tl.static_range(len(outs)):
        if (SUMS >> k) & 1:
            tl.store(outs[k] + place, tl.sum(totals[k], 0)[None, :], mask=inside)


@triton.jit
def _sum(y, parts, count, columns, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    """The sums of the columns of a matrix of at most BM rows."""
    if PDL:
        gdc_wait()
    row = tl.arange(0, BM)[:, None]
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    values = tl.load(parts + row * columns + column[None, :], mask=(row < count) & (column < columns)[None, :], other=0)
    tl.store(y + column, tl.sum(values, 0).to(y.dtype.element_ty), mask=column < columns)


def collapse(shape: Sequence[int], strides: list[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Sorts dimensions by the first tensor's strides, innermost first; drops size 1; merges where all tensors can.

    Returns the sizes and, for each tensor, its strides.
    """
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (strides[0][d], -d))
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d in order:
        if sizes and all(t[-1] * sizes[-1] == s[d] for t, s in zip(steps, strides, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for t, s in zip(steps, strides, strict=True):
            t.append(s[d])
    return sizes or [1], [t or [1] for t in steps]


def _launch(
    op: str, direction: str, fn: Any, outs: Tensors, ins: Tensors, scalars: tuple[float, ...], need: int = 1
) -> None:
    """Launches `_flat` if all tensors share one dense layout, else `_rows` on inputs expanded to the output's shape."""
    y = outs[0] if need & 1 else next(o for k, o in enumerate(outs) if need >> k & 1)
    n = y.numel()
    shape = y.shape
    for x in ins:
        if not x.is_contiguous() or x.shape != shape:
            if n == 0:
                return
            views = [x if x.shape == shape else x.expand(shape) for x in ins]
            sizes, steps = collapse(shape, [y.stride(), *(v.stride() for v in views)])
            if len(sizes) > 1 or any(t != [1] for t in steps):
                _launch_rows(op, direction, fn, outs, ins, scalars, need, sizes, steps)
                return
            n = sizes[0]
            break

    def config() -> tuning.Config:
        rule = {"BLOCK": 256 * _each(y, outs, ins), "num_warps": 8}
        return tuning.config(device.of(y), op, direction, dtype_name(y), lambda: rule, lambda: _SPACE)

    launch(_flat, lambda c: (-(-n // c["BLOCK"]),), outs, ins, scalars, n, FN=fn, NEED=need, config=config, key=op)


def _each(y: torch.Tensor, outs: Tensors, ins: Tensors) -> int:
    """Elements per thread: 16 bytes of two tensors, or 8 of more, which keep more loads in flight anyway."""
    return (16 if len(ins) + len(outs) == 2 else 8) // max([t.element_size() for t in (y, *ins)])


def _launch_rows(
    op: str,
    direction: str,
    fn: Any,
    outs: Tensors,
    ins: Tensors,
    scalars: tuple[float, ...],
    need: int,
    sizes: list[int],
    steps: list[list[int]],
) -> None:
    columns, outer = sizes[0], tuple(sizes[1:])
    rows = 1
    for size in outer:
        rows *= size
    y, *xs = [tuple(t) for t in steps]
    first = outs[0] if need & 1 else ins[0]
    bn = min(1024, triton.next_power_of_2(columns))
    most = triton.next_power_of_2(rows)

    def config() -> tuning.Config:
        elements = 256 * _each(first, outs, ins)
        rule = {"BM": max(1, min(elements // bn, most)), "BN": min(bn, elements), "num_warps": 8}
        return tuning.config(
            device.of(first),
            op,
            f"{direction} rows",
            f"{dtype_name(first)} {bn} {min(most, 16)}",
            lambda: rule,
            lambda: _TILES,
        )

    def grid(c: tuning.Config) -> tuple[int]:
        return (triton.cdiv(rows, c["BM"]) * triton.cdiv(columns, c["BN"]),)

    launch(
        _rows,
        grid,
        outs,
        ins,
        scalars,
        rows,
        columns,
        outer,
        y,
        tuple(xs),
        FN=fn,
        NEED=need,
        config=config,
        key=(op, bn, most),
    )


def _launch_columns(
    op: str, fn: Any, outs: Tensors, ins: Tensors, scalars: tuple[float, ...], need: int, sums: int
) -> None:
    """Launches `_columns` and adds its partial sums, as many per column as there are multiprocessors."""
    shape = ins[0].shape
    columns, where = shape[-1], device.of(ins[0])
    rows, parts = ins[0].numel() // columns, max(16, where.multiprocessors)  # keeps sums short in the interpreter too
    flat = tuple([t.expand(shape).reshape(rows, columns) for t in ins])
    found = tuple(
        [ins[0].new_empty((parts, columns), dtype=torch.float32) if sums >> k & 1 else o for k, o in enumerate(outs)]
    )
    # Two inputs leave registers for programs of four warps with four vectors of each input per thread.
    few = len(ins) == 2 and columns % 16 == 0
    bn = min(1024, max(128, triton.next_power_of_2(columns) // (1 if few else 4)))
    last = early(where)

    def config() -> dict[str, Any]:
        rule = {
            "BM": max(1, (2048 if few else 4096) // ins[0].element_size() // bn),
            "BN": bn,
            "num_warps": 4 if few else 8,
            "TILES": 4 if few else 1,
        }
        key = f"{dtype_name(ins[0])} {bn}{'' if few else ' many'}"
        return tuning.config(
            where, op, "columns", key, lambda: rule, lambda: [{**c, "TILES": t} for c in _TILES for t in (1, 2, 4)]
        )

    def grid(c: tuning.Config) -> tuple[int, int]:
        return triton.cdiv(columns, c["BN"]), parts

    strides = tuple([t.stride() for t in flat])
    facts = {
        "FN": fn,
        "NEED": need,
        "SUMS": sums,
        "WIDE": 32 * columns + max([32 * a + columns * b for a, b in strides]) >= 2**31,
    }
    launch(
        _columns,
        grid,
        found,
        flat,
        scalars,
        rows,
        columns,
        strides,
        **facts,
        PDL=last["PDL"],
        config=config,
        key=(op, bn),
    )
    for k, out in enumerate(outs):
        if sums >> k & 1:
            launch(
                _sum,
                (triton.cdiv(columns, 32),),
                out,
                found[k],
                parts,
                columns,
                BM=triton.next_power_of_2(parts),
                BN=32,
                **last,
            )


_TILES = [
    {"BM": m, "BN": n, "num_warps": w}
    for n in (256, 512, 1024, 2048)
    for w in (2, 4, 8, 16)
    for m in (1, 2, 4, 8, 16)
    if 4 <= m * n // (32 * w) <= 32
]
_SPACE = [{"BLOCK": 32 * warps * each, "num_warps": warps} for warps in (4, 8, 16) for each in (2, 4, 8, 16, 32)]


class Pointwise:
    """The torch ops, the autograd function and the launchers of a pointwise op. Calling it runs the kernels.

    name: the op's name. inputs: its tensors' names. forward, backward: the scalar function and its gradient, by mode.
    saves: the inputs that the gradient takes; by default all. The gradient returns a value per input (for one input a
    value, else a tuple), except for inputs in `passes`, whose gradient is dy itself, and in `fixed`, which have none
    and may be boolean. floating: whether the other inputs must be floating point.
    """

    op: Op

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        forward: dict[str, Any],
        backward: dict[str, Any],
        *,
        saves: Sequence[str] | None = None,
        passes: Sequence[str] = (),
        fixed: Sequence[str] = (),
        floating: bool = False,
    ):
        self.name, self.inputs, self.count = name, inputs, len(inputs)
        self.functions = {"fwd": forward, "bwd": backward}
        self.fixed, self.floating = fixed, floating
        # The inputs whose gradients the kernel writes.
        made = [k for k, i in enumerate(inputs) if i not in passes and i not in fixed]
        self.made = len(made)
        passed = [k for k, i in enumerate(inputs) if i in passes]
        kept = None if saves is None else [k for k, i in enumerate(inputs) if i in saves]
        tensors, saved = (", ".join(f"Tensor {i}" for i in some) for some in (inputs, saves or inputs))
        results = f"({', '.join(['Tensor'] * len(made))})" if self.count > 1 else "Tensor"
        self.fwd = kernel_op(f"{name}_fwd({tensors}, float[] scalars, str mode, str? impl) -> Tensor")(self._forward)
        schema = f"Tensor dy, {saved}, float[] scalars, str mode, int need, int sums, str? dtypes, str? impl"
        self.bwd = kernel_op(f"{name}_bwd({schema}) -> {results}")(self._backward)
        fwd, bwd, count = self.fwd, self.bwd, self.count

        class Differentiable(Function):
            @staticmethod
            def forward(
                ctx: Any, impl: str | None, mode: str, scalars: tuple[float, ...], *tensors: torch.Tensor
            ) -> torch.Tensor:
                if kept is None:
                    ctx.save_for_backward(*tensors)
                    ctx.facts = impl, mode, scalars, None
                else:
                    ctx.save_for_backward(*[tensors[k] for k in kept])
                    ctx.facts = impl, mode, scalars, tuple([(t.shape, t.dtype) for t in tensors])
                return fwd(*tensors, scalars, mode, impl)

            @staticmethod
            @first_order
            def backward(ctx: Any, dy: torch.Tensor) -> Any:
                (impl, mode, scalars, kinds), tensors = ctx.facts, ctx.saved_tensors
                if count == 1:
                    return None, None, None, bwd(dy, *tensors, scalars, mode, 1, 0, None, impl)
                wanted, shape = ctx.needs_input_grad[3:], dy.shape
                need, sums, bit = 0, 0, 1
                for k in made:
                    if wanted[k]:
                        need |= bit
                        mine = tensors[k].shape if kinds is None else kinds[k][0]
                        if mine != shape and _one_row(mine, shape):
                            sums |= bit
                    bit <<= 1
                dtypes = None
                if kinds is not None:
                    own = [
                        kinds[k][1] if kinds[k][0] == shape or sums >> j & 1 else dy.dtype for j, k in enumerate(made)
                    ]
                    dtypes = " ".join([str(d)[6:] for d in own])
                grads: list[torch.Tensor | None] = [None] * count
                if need:
                    for k, g in zip(made, bwd(dy, *tensors, scalars, mode, need, sums, dtypes, impl), strict=True):
                        if wanted[k]:
                            grads[k] = _reduced(
                                g, *((tensors[k].shape, tensors[k].dtype) if kinds is None else kinds[k])
                            )
                # dy itself or a copy, never a view: autograd takes a view for new memory and writes into it.
                for k in passed:
                    if wanted[k]:
                        mine, dtype = (tensors[k].shape, tensors[k].dtype) if kinds is None else kinds[k]
                        grads[k] = (dy if mine == shape else dy.sum_to_size(mine)).to(dtype)
                return None, None, None, *grads

        Differentiable.__name__ = Differentiable.__qualname__ = name
        self.function = Differentiable
        self.look = by_kind(self.count, others=("str | None",))(self._look)

    def _look(self, *args: Any) -> tuple[Callable[..., Any] | None]:
        """Checks the tensors, after which `impl` comes. Returns what runs the call: plain PyTorch, or None for kernels.

        Raises RidgelineError if the tensors do not fit together. It does not look at whether they require gradients.
        """
        *tensors, impl = args
        x = tensors[0]
        for name, t in zip(self.inputs, tensors, strict=True):
            if not isinstance(t, torch.Tensor):
                raise RidgelineError(f"{self.name}: {name} must be a tensor, but is {type(t).__name__}")
            if t.device != x.device:
                found = f"{name} is on {t.device} but {self.inputs[0]} on {x.device}"
                raise RidgelineError(f"{self.name}: {found}; they must share one device")
            if self.floating and not t.is_floating_point() and not (name in self.fixed and t.dtype == torch.bool):
                also = " or boolean" if name in self.fixed else ""
                wanted = f"floating point{also} (float32, float16, bfloat16)"
                raise RidgelineError(f"{self.name}: {name} must be {wanted}, but is {t.dtype}")
        dense_only(self.name, tensors)
        if any([t.shape != x.shape for t in tensors]):
            shapes = [tuple(t.shape) for t in tensors]
            try:
                torch.broadcast_shapes(*shapes)
            except RuntimeError as error:
                found = ", ".join(map(str, shapes))
                raise RidgelineError(f"{self.name}: shapes must broadcast together, but are {found}") from error
        chosen = eager(self.op, impl, *[t for t in tensors if not self.fixed or t.dtype != torch.bool])
        return (None if chosen is None else chosen.call,)

    def __call__(
        self, impl: str | None, *tensors: torch.Tensor, scalars: tuple[float, ...] = (), mode: str = ""
    ) -> torch.Tensor:
        """Runs `impl`, or the implementation that is chosen for the call."""
        if torch.is_grad_enabled():
            for t in tensors:
                if t.requires_grad:
                    return differentiate(self.function, impl, mode, scalars, *tensors)
        return self.fwd(*tensors, scalars, mode, impl)

    def _forward(self, *args: Any) -> torch.Tensor:
        *tensors, scalars, mode, impl = args
        x = tensors[0]
        if len(tensors) == 1:
            y = torch.empty_like(x)
        else:
            y = _output(tensors)
        run(self.op, "fwd", impl, (y,), *tensors, scalars, mode)
        return y

    def _backward(self, dy: torch.Tensor, *args: Any) -> Any:
        *tensors, scalars, mode, need, sums, dtypes, impl = args
        if self.count == 1:
            grads: Any = torch.empty_like(tensors[0])
            run(self.op, "bwd", impl, (grads,), dy, *tensors, scalars, mode)
            return grads
        alike = not sums and all([t.shape == dy.shape and t.stride() == dy.stride() for t in tensors])
        if dtypes is None:
            dtypes = [t.dtype if t.shape == dy.shape or sums >> k & 1 else dy.dtype for k, t in enumerate(tensors)]
        else:
            dtypes = [getattr(torch, name) for name in dtypes.split()]
        grads = tuple(
            [
                _gradient(dy, dtype, alike, sums >> k & 1) if need >> k & 1 else dy.new_empty(0)
                for k, dtype in enumerate(dtypes)
            ]
        )
        run(self.op, "bwd", impl, grads, dy, *tensors, scalars, mode)
        return grads

    def triton(self, idea: str) -> None:
        """Registers the generated kernels as the implementation `triton`."""

        def fwd(y: torch.Tensor, *args: Any) -> None:
            *tensors, scalars, mode = args
            _launch(self.name, "fwd", self.functions["fwd"][mode], (y,), tuple(tensors), tuple(scalars))

        def bwd(*args: Any) -> None:
            grads, (dy, *tensors, scalars, mode) = args[: self.made], args[self.made :]
            need = sum((g.numel() > 0) << k for k, g in enumerate(grads))
            sums = sum((g.shape != dy.shape and g.numel() > 0) << k for k, g in enumerate(grads))
            function, ins = self.functions["bwd"][mode], (dy, *tensors)
            if sums:
                _launch_columns(self.name, function, grads, ins, tuple(scalars), need, sums)
            elif need:
                _launch(self.name, "bwd", function, grads, ins, tuple(scalars), need)

        supports = None if self.count == 1 else partial(floats, also=(torch.bool,)) if self.fixed else floats
        self.op.kernel("triton", idea, kind="triton", fwd=fwd, bwd=bwd, supports=supports, served=True)


def _output(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """An empty result with PyTorch's broadcast shape and promoted dtype, in the inputs' layout if they agree."""
    x = tensors[0]
    dtype = x.dtype
    if (
        len(tensors) == 2
        and tensors[1].dtype == dtype
        and tensors[1].shape == x.shape
        and tensors[1].stride() == x.stride()
    ):
        return torch.empty_like(x)
    for t in tensors[1:]:
        if t.dtype != dtype:
            dtype = promoted(tensors)
            break
    if all([t.shape == x.shape and t.stride() == x.stride() for t in tensors]):
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(torch.broadcast_shapes(*[t.shape for t in tensors]), dtype=dtype, device=x.device)


def _gradient(dy: torch.Tensor, dtype: torch.dtype, alike: bool, row: int) -> torch.Tensor:
    """An empty gradient: one row, or of dy's shape, in the inputs' layout if they are alike, else contiguous."""
    if alike:
        return torch.empty_like(dy, dtype=dtype)
    return torch.empty(dy.shape[-1:] if row else dy.shape, dtype=dtype, device=dy.device)


def _one_row(own: torch.Size, shape: torch.Size) -> bool:
    """Whether an input of shape `own` is one row, repeated for a result of `shape`."""
    return len(own) > 0 and own[-1] == shape[-1] == own.numel() and shape.numel() > 0


def _reduced(gradient: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in its input's shape and dtype, summed over broadcast dimensions."""
    if gradient.shape != shape:
        gradient = gradient.view(shape) if gradient.numel() == shape.numel() else gradient.sum_to_size(shape)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def pair_cost(a: torch.Tensor, b: torch.Tensor, forward: int, backward: int) -> tuple[Cost, Cost]:
    """The costs of an op of two tensors that broadcast, from its operations per element."""
    count = torch.broadcast_shapes(a.shape, b.shape).numel()
    y = count * promoted((a, b)).itemsize
    return Cost(nbytes(a, b), y, forward * count), Cost(y + nbytes(a, b), nbytes(a, b), backward * count)


def promoted(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of a result of these tensors, by PyTorch's rules: 0-d tensors do not promote others of their kind."""
    dtype = tensors[0].dtype
    if len(tensors) == 2:
        return torch.result_type(*tensors)
    for group in ([t for t in tensors if t.dim()], [t for t in tensors if not t.dim()]):
        for t in group:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def start_cuda(kernel: CudaKernel, outs: Tensors, ins: Tensors, *, packed: bool, **macros: Any) -> None:
    """Launches an elementwise CUDA C++ kernel, which takes (outputs..., inputs..., count).

    packed: 16-byte packs (PACK elements of the widest operand, at most 8) in a grid-stride loop, or single elements if
    a pointer is not aligned. Otherwise one element per thread. Strided inputs are copied first.
    """
    tensors = (*outs, *[t.contiguous() for t in ins])
    pack = min(8, 16 // max(t.element_size() for t in tensors)) if packed else 1
    if any(t.data_ptr() % (pack * t.element_size()) for t in tensors):
        pack = 1
    n = tensors[0].numel()
    blocks = triton.cdiv(n, 256 * pack)
    if packed:
        blocks = min(blocks, device.of(tensors[0]).multiprocessors * 8 * 32)
    launch(kernel, (blocks,), *tensors, n, block=256, PACK=pack, **macros)


def alike(first: torch.Tensor, *rest: Any) -> str | None:
    """Why the CUDA C++ kernels cannot take the tensors, or None. The first of several may be strided: it is copied."""
    others = [t for t in rest if isinstance(t, torch.Tensor)]
    if any(t.shape != first.shape for t in others) or not all(t.is_contiguous() for t in others or [first]):
        return "it takes contiguous tensors of one shape"
    return floats(first, *others)


def floats(*args: Any, also: tuple[torch.dtype, ...] = ()) -> str | None:
    for t in args:
        if isinstance(t, torch.Tensor) and dtype_name(t) not in FLOATS and t.dtype not in also:
            return f"it takes {', '.join(FLOATS)}, but an input is {dtype_name(t)}"
    return None
