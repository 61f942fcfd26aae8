"""The one door to the GPU: `kernel_op` registers a launcher with torch, `launch` starts a kernel.

A launcher is a function of tensors that allocates its outputs and calls `launch`. While PyTorch traces, `launch` does
nothing, so a launcher is its own fake kernel. For that to hold, no allocation depends on a configuration, a pointer or a
value on the device; grids, configurations and tensor descriptors are given to `launch` as functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import triton
from triton import knobs

from ridgeline import device as devices
from ridgeline.cuda import CudaKernel
from ridgeline.op import RidgelineError

LIBRARY = torch.library.Library("ridgeline", "DEF")
INTERPRETED = bool(triton.knobs.runtime.interpret)

_trace = threading.local()


def kernel_op(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Registers a launcher as `torch.ops.ridgeline.<name>`, for real tensors and, as its own fake kernel, for traced ones.

    schema: as in `torch.library`, e.g. "gelu_fwd(Tensor x, str approximate, str? impl) -> Tensor".
    Returns the registered op's default overload, which is what an `autograd.Function` calls.
    """
    name = schema.split("(")[0]

    def register(launcher: Callable[..., Any]) -> Any:
        def fake(*args: Any) -> Any:
            _trace.on = devices._pretended is None  # meta tensors come here too, and to pretend is to drive them
            try:
                return launcher(*args)
            finally:
                _trace.on = False

        LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ridgeline::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.ridgeline, name).default

    return register


class _FirstOrderOnly(torch.autograd.Function):
    """Passes a gradient through, and raises where someone differentiates it again."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Ridgeline's gradients cannot be differentiated again; for second derivatives use impl='torch'")


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the backward of an `autograd.Function` over kernels: a second derivative raises instead of missing terms.

    Unlike torch's `once_differentiable` it also raises where the incoming gradient needs no gradient itself."""

    @wraps(backward)
    def once(ctx: Any, *incoming: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        with torch.no_grad():
            gradients = backward(ctx, *incoming)
        if isinstance(gradients, torch.Tensor):
            gradients = (gradients,)
        return tuple([g if g is None else _FirstOrderOnly.apply(g.requires_grad_()) for g in gradients])

    return once


def tracing() -> bool:
    """Whether PyTorch is tracing the launcher that runs now: then tensors have no data and nothing must start."""
    return getattr(_trace, "on", False)


@dataclass(frozen=True)
class Launch:
    """What `launch` was asked to start, as observers see it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    device: devices.Device


_observers: list[Callable[[Launch], None]] = []


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Inside, every launch is shown to `observer` before it starts (`explain`, `profile` and `inspect` are built on this)."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


_started: dict[Any, Callable[..., None]] = {}


def launch(kernel: Any, grid: Any, *args: Any, config: Callable[[], dict[str, Any]] | None = None, **constants: Any) -> None:
    """Starts a kernel: Triton, Gluon or CUDA C++.

    kernel: a `triton.jit` or `gluon.jit` function whose constexpr parameters come last, or a `CudaKernel`.
    grid: a tuple, or a function from the constants to one. A grid with a zero in it starts nothing.
    args: the runtime arguments in order; the first is a tensor or a tuple of tensors. A function is called with the constants when the kernel
        really starts (tensor descriptors are made that way).
    config: a function that gives the tile configuration, called when the kernel really starts; merged into `constants`.
    constants: the constexpr parameters and compile options (num_warps, num_stages, ...) by name; for CUDA C++, macros.
    """
    if getattr(_trace, "on", False):
        return
    if config is not None:
        constants |= config()
    if not isinstance(grid, tuple):
        grid = grid(constants)
    if 0 in grid:
        return
    first = args[0]
    if type(first) is tuple:
        first = first[0]
    if devices._pretended is None and not INTERPRETED and not first.is_cuda:
        raise RidgelineError(
            f"a kernel needs a GPU, and the tensor is on {first.device}; on a CPU, Triton kernels run with TRITON_INTERPRET=1"
        )
    args = tuple([a(constants) if callable(a) else a for a in args])
    if _observers:
        for observer in _observers:
            observer(Launch(kernel, grid, args, constants, devices.of(first)))
    if devices._pretended is not None:
        return
    if INTERPRETED and not isinstance(kernel, CudaKernel):
        options = ("num_warps", "num_stages", "maxnreg", "num_ctas")
        kernel[grid](*args, **{k: v for k, v in constants.items() if k not in options})
        return
    index = first.get_device()
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return _start(kernel, grid, args, constants, index)
    _start(kernel, grid, args, constants, index)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], index: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(index)
    if isinstance(kernel, CudaKernel):
        kernel.start(grid, stream, args, constants, index)
        return
    key = (kernel, index, tuple(constants.items()), *[_specialisation(a) for a in args])
    start = _started.get(key)
    if start is None:
        start = _started[key] = _triton_starter(kernel, args, constants)
    start(*grid, *(1,) * (3 - len(grid)), stream, args)


def _specialisation(arg: Any) -> Any:
    """What Triton compiles into a kernel of an argument: a tensor's dtype and alignment; whether an integer is 1, or divides by 16."""
    kind = type(arg)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return arg.dtype, arg.data_ptr() % 16 == 0
    if kind is int:
        return 1 if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    if kind is tuple:
        return tuple([_specialisation(a) for a in arg])
    if arg is None or kind is float or kind is bool:
        return kind
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return kind, arg.base.dtype, tuple(arg.block_shape), getattr(arg, "layout", None)


def _triton_starter(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Callable[..., None]:
    """Compiles the kernel for these arguments; the result starts it without Triton's own look-ups."""
    compiled = kernel.warmup(*args, grid=(1,), **constants)
    run = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    names = kernel.arg_names[len(args) :]
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    trailing = tuple([constants[n] if n in constants else defaults[n] for n in names])
    hooks = knobs.runtime

    def start(x: int, y: int, z: int, stream: int, args: tuple[Any, ...]) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        described = None if enter is None else compiled.launch_metadata((x, y, z), stream, *args, *trailing)
        run(x, y, z, stream, function, metadata, described, enter, leave, *args, *trailing)

    return start
