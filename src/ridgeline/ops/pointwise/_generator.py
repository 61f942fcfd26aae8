"""Makes an op of a scalar function: strides, broadcasting, type promotion and backward in one place.

A pointwise op's file gives the function and its gradient as `triton.jit` functions of float32 scalars:

    y = f(a, b, ..., scalars...)                   da, db, ... = g(dy, a, b, ..., scalars...)

Two kernels serve every layout. `_flat` walks memory where all tensors lie in the same dense order; `_rows` walks the
innermost dimension in tiles and finds each row's offset from its index, so that broadcast and strided inputs still load
whole vectors. Both are bounded by memory: the floor is each input read once and each output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline import device, tuning
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, launch
from ridgeline.cuda import CudaKernel
from ridgeline.op import FLOATS, Op, RidgelineError, dtype_name
from ridgeline.select import eager, run

Tensors = tuple[torch.Tensor, ...]


@triton.jit
def _store(pointers, values, mask, NEED: tl.constexpr):
    """Writes what is needed: bit k of NEED says whether output k is."""
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
    """Where elements (row, column) of a strided tensor lie; `sizes` are the outer dimensions, innermost first."""
    offset = column * strides[0]
    for d in tl.static_range(len(sizes)):
        offset += (row % sizes[d]) * strides[d + 1]
        row = row // sizes[d]
    return offset


@triton.jit
def _rows(outs, ins, scalars, rows, columns, sizes, out_strides, in_strides, FN: tl.constexpr, NEED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
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


def collapse(shape: Sequence[int], strides: list[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Orders dimensions by the first tensor's strides, innermost first, drops those of size 1, merges neighbours that all
    tensors step through in one go. Returns the sizes and, for each tensor, its strides."""
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


def _launch(op: str, direction: str, fn: Any, outs: Tensors, ins: Tensors, scalars: tuple[float, ...], need: int = 1) -> None:
    """Starts `_flat` where all tensors lie in memory alike, else `_rows` over the inputs expanded to the output's shape."""
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
                _launch_rows(fn, outs, ins, scalars, need, sizes, steps)
                return
            n = sizes[0]
            break

    def rule() -> tuning.Config:
        """8 warps; 16 bytes a thread of two tensors, 8 of more: more of them keep more loads in flight."""
        each = (16 if len(ins) + len(outs) == 2 else 8) // max([t.element_size() for t in (y, *ins)])
        return {"BLOCK": 256 * each, "num_warps": 8}

    def config() -> tuning.Config:
        return tuning.config(device.of(y), op, direction, dtype_name(y), rule, lambda: _SPACE)

    launch(_flat, lambda c: (-(-n // c["BLOCK"]),), outs, ins, scalars, n, FN=fn, NEED=need, config=config, key=op)


def _launch_rows(
    fn: Any, outs: Tensors, ins: Tensors, scalars: tuple[float, ...], need: int, sizes: list[int], steps: list[list[int]]
) -> None:
    columns, outer = sizes[0], tuple(sizes[1:])
    rows = 1
    for size in outer:
        rows *= size
    bn = min(1024, triton.next_power_of_2(columns))
    bm = max(1, min(2048 // bn, triton.next_power_of_2(rows)))
    y, *xs = [tuple(t) for t in steps]
    grid = (triton.cdiv(rows, bm) * triton.cdiv(columns, bn),)
    launch(_rows, grid, outs, ins, scalars, rows, columns, outer, y, tuple(xs), FN=fn, NEED=need, BM=bm, BN=bn)


_SPACE = [{"BLOCK": 32 * warps * each, "num_warps": warps} for warps in (4, 8, 16) for each in (2, 4, 8, 16, 32)]


class Pointwise:
    """The torch ops, the autograd function and the launchers of a pointwise op.

    name: the op's name. inputs: its tensors' names. forward, backward: for each mode, the scalar function and its gradient
    (for one input the gradient returns one value, else a tuple). Call it with the op's tensors to run the kernels.
    """

    op: Op

    def __init__(self, name: str, inputs: Sequence[str], forward: dict[str, Any], backward: dict[str, Any]):
        self.name, self.inputs, self.count, self.functions = name, inputs, len(inputs), {"fwd": forward, "bwd": backward}
        tensors = ", ".join(f"Tensor {i}" for i in inputs)
        results = f"({', '.join(['Tensor'] * self.count)})" if self.count > 1 else "Tensor"
        self.fwd = kernel_op(f"{name}_fwd({tensors}, float[] scalars, str mode, str? impl) -> Tensor")(self._forward)
        self.bwd = kernel_op(f"{name}_bwd(Tensor dy, {tensors}, float[] scalars, str mode, int need, str? impl) -> {results}")(
            self._backward
        )
        fwd, bwd, count = self.fwd, self.bwd, self.count

        class Differentiable(Function):
            @staticmethod
            def forward(ctx: Any, impl: str | None, mode: str, scalars: tuple[float, ...], *tensors: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(*tensors)
                ctx.facts = impl, mode, scalars
                return fwd(*tensors, scalars, mode, impl)

            @staticmethod
            @first_order
            def backward(ctx: Any, dy: torch.Tensor) -> Any:
                (impl, mode, scalars), tensors = ctx.facts, ctx.saved_tensors
                wanted = ctx.needs_input_grad[3:]
                need = sum(w << k for k, w in enumerate(wanted))
                grads = bwd(dy, *tensors, scalars, mode, need, impl)
                if count == 1:
                    return None, None, None, grads
                return None, None, None, *(_reduced(g, t) if w else None for g, t, w in zip(grads, tensors, wanted, strict=True))

        Differentiable.__name__ = Differentiable.__qualname__ = name
        self.function = Differentiable

    def plain(self, impl: str | None, *tensors: torch.Tensor) -> Callable[..., Any] | None:
        """The plain-PyTorch implementation that serves a call, or None where kernels do. Raises where the inputs do not fit."""
        x = tensors[0]
        if impl is None:
            for t in tensors:
                if type(t) is not torch.Tensor or not t.is_cuda or t.dtype not in self.op.kernel_dtypes:
                    break
                if t is not x and (t.shape != x.shape or t.device != x.device):
                    break
            else:  # nothing to look at more closely
                return None
        for name, t in zip(self.inputs, tensors, strict=True):
            if not isinstance(t, torch.Tensor):
                raise RidgelineError(f"{self.name}: {name} must be a tensor, and is {type(t).__name__}")
            if t.device != x.device:
                raise RidgelineError(f"{self.name}: {name} is on {t.device} and {self.inputs[0]} on {x.device}; one device is needed")
        if any([t.shape != x.shape for t in tensors]):
            shapes = [tuple(t.shape) for t in tensors]
            try:
                torch.broadcast_shapes(*shapes)
            except RuntimeError as error:
                raise RidgelineError(f"{self.name}: shapes must broadcast together, and are {', '.join(map(str, shapes))}") from error
        found = eager(self.op, impl, *tensors)
        return None if found is None else found.call

    def __call__(self, impl: str | None, *tensors: torch.Tensor, scalars: tuple[float, ...] = (), mode: str = "") -> torch.Tensor:
        """Runs what serves the call: `impl`, or the best there is."""
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
        *tensors, scalars, mode, need, impl = args
        if self.count == 1:
            grads: Any = torch.empty_like(tensors[0])
            run(self.op, "bwd", impl, (grads,), dy, *tensors, scalars, mode)
            return grads
        alike = all([t.shape == dy.shape and t.stride() == dy.stride() for t in tensors])
        grads = tuple([_gradient(dy, t, alike) if need >> k & 1 else dy.new_empty(0) for k, t in enumerate(tensors)])
        run(self.op, "bwd", impl, grads, dy, *tensors, scalars, mode)
        return grads

    def triton(self, idea: str) -> None:
        """Registers the generated kernels as the rung `triton`."""

        def fwd(y: torch.Tensor, *args: Any) -> None:
            *tensors, scalars, mode = args
            _launch(self.name, "fwd", self.functions["fwd"][mode], (y,), tuple(tensors), tuple(scalars))

        def bwd(*args: Any) -> None:
            grads, (dy, *tensors, scalars, mode) = args[: self.count], args[self.count :]
            need = sum((g.numel() > 0) << k for k, g in enumerate(grads))
            if need:
                _launch(self.name, "bwd", self.functions["bwd"][mode], grads, (dy, *tensors), tuple(scalars), need)

        self.op.kernel("triton", idea, kind="triton", fwd=fwd, bwd=bwd, supports=floats if self.count > 1 else None, served=True)


def _output(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """An empty result of several inputs: PyTorch's broadcast shape and promoted dtype, in the inputs' own layout where they agree."""
    x = tensors[0]
    dtype = x.dtype
    if len(tensors) == 2 and tensors[1].dtype == dtype and tensors[1].shape == x.shape and tensors[1].stride() == x.stride():
        return torch.empty_like(x)
    for t in tensors[1:]:
        if t.dtype != dtype:
            dtype = promoted(tensors)
            break
    if all([t.shape == x.shape and t.stride() == x.stride() for t in tensors]):
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(torch.broadcast_shapes(*[t.shape for t in tensors]), dtype=dtype, device=x.device)


def _gradient(dy: torch.Tensor, x: torch.Tensor, alike: bool) -> torch.Tensor:
    """An empty gradient of x: in its own dtype, or where x was broadcast in the result's, to be summed after. All gradients
    of a call lie in one layout: the inputs' where they are alike, else row by row."""
    if alike:
        return torch.empty_like(x)
    return torch.empty(dy.shape, dtype=x.dtype if x.shape == dy.shape else dy.dtype, device=dy.device)


def _reduced(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.shape == x.shape else gradient.sum_to_size(x.shape).to(x.dtype)


def promoted(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of a result of these tensors, by PyTorch's rules (a 0-d tensor does not promote a larger one of its kind)."""
    dtype = tensors[0].dtype
    if len(tensors) == 2:
        return torch.result_type(*tensors)
    for group in ([t for t in tensors if t.dim()], [t for t in tensors if not t.dim()]):
        for t in group:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def start_cuda(kernel: CudaKernel, outs: Tensors, ins: Tensors, *, packed: bool, **macros: Any) -> None:
    """Starts an elementwise kernel of CUDA C++, which takes (outputs..., inputs..., count).

    packed: 128-bit packs (PACK elements of the widest operand, at most 8) in a grid-stride loop, one element at a time where
    a pointer is not aligned to them; else one element per thread. Inputs that are strided are copied first.
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
    """What the CUDA C++ rungs support. Of several tensors the first (an incoming gradient, say) may be strided: it is copied."""
    others = [t for t in rest if isinstance(t, torch.Tensor)]
    if any(t.shape != first.shape for t in others) or not all(t.is_contiguous() for t in others or [first]):
        return "it takes contiguous tensors of one shape"
    return floats(first, *others)


def floats(*args: Any) -> str | None:
    for t in args:
        if isinstance(t, torch.Tensor) and dtype_name(t) not in FLOATS:
            return f"it takes {', '.join(FLOATS)}, and an input is {dtype_name(t)}"
    return None
