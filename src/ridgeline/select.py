"""Chooses the implementation of a call: the last served one of the op that this machine runs and that supports it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch

from ridgeline import codegen, cuda
from ridgeline import device as devices
from ridgeline.boundary import INTERPRETED, tracing
from ridgeline.op import CHECK, LOADED, OWN, Implementation, Op, RidgelineError, dense_only
from ridgeline.replay import KINDS, Guarded, Sure


@cache
def cannot_run(kind: str, device: devices.Device) -> str | None:
    """Returns why this machine cannot run implementations of a kind on this device, or None if it can."""
    if (
        kind == "compile"
        and device.backend == "cpu"
        and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"))
    ):
        return "torch.compile on a CPU needs a C++ compiler (g++), and none is installed"
    if kind in ("eager", "compile"):
        return None
    if kind == "triton":
        return (
            None
            if device.backend != "cpu" or INTERPRETED
            else "Triton runs on a GPU; on a CPU only with TRITON_INTERPRET=1"
        )
    if device.backend != "cuda":
        return f"{'CUDA C++' if kind == 'cuda' else 'Gluon'} runs on an NVIDIA GPU, and this is {device.name}"
    return cuda.unavailable() if kind == "cuda" else None


def never(implementation: Implementation, direction: str, dtype: torch.dtype, device: devices.Device) -> str | None:
    """Returns why an implementation can run no call of this direction and dtype on this device, or None if it can."""
    if implementation.kind == "eager":
        return None
    reason = cannot_run(implementation.kind, device)
    # On a CPU Triton is interpreted, for any architecture.
    if reason is None and implementation.arch > device.capability and device.backend != "cpu":
        reason = f"it needs sm_{implementation.arch} or later, and {device.name} is {device.arch}"
    if reason is None and 0 < implementation.newest < device.capability:
        reason = f"it is written for sm_{implementation.newest}, and {device.name} is {device.arch}"
    if reason is None and implementation.shared > device.shared_memory and device.backend != "cpu":
        most, needed = device.shared_memory >> 10, implementation.shared >> 10
        reason = f"it needs {needed} KiB of shared memory per block, and {device.name} has {most}"
    if reason is None and implementation.is_kernel and str(dtype)[6:] not in implementation.dtypes:
        reason = f"it takes {', '.join(implementation.dtypes)}, and the input is {str(dtype)[6:]}"
    if reason is None and implementation.is_kernel and direction not in implementation.launchers:
        reason = "it has no backward"
    return reason


def why_not(implementation: Implementation, *args: Any, direction: str = "fwd", **options: Any) -> str | None:
    """Returns why an implementation cannot run a call on these inputs, or None if it can.

    args: the first is a tensor or a list of tensors."""
    x = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    reason = never(implementation, direction, x.dtype, devices.of(x))
    return reason or (implementation.supports(*args, **options) if implementation.supports else None)


def find(op: Op, impl: str) -> Implementation:
    """Returns the implementation of that name. Raises RidgelineError, with the names there are, if there is none."""
    if impl not in op.implementations:
        raise RidgelineError(f"{op.name} has no implementation {impl!r}; it has {', '.join(op.implementations)}")
    return op.implementations[impl]


_DENSE = torch.strided
_candidates: dict[Any, list[Implementation]] = {}


def select(op: Op, impl: str | None, *args: Any, direction: str = "fwd", kernels: bool = False) -> Implementation:
    """Returns the implementation that serves a call: the named one, or by default the best one that can run it.

    kernels: choose among kernels only. The registered op sets it, since `eager` has already chosen kernels.
    Raises RidgelineError, with the reason, if the named implementation or every one of them cannot run the call.
    """
    x = args[0]
    key = op, impl, direction, kernels, x.dtype, x.get_device(), devices.stand_in
    candidates = _candidates.get(key)
    if candidates is None:
        device = devices.of(x)
        candidates = [i for i in _eligible(op, impl, kernels) if never(i, direction, x.dtype, device) is None]
        _candidates[key] = candidates
    able = None
    for implementation in candidates:
        if implementation.supports is None or implementation.supports(*args) is None:
            if impl is not None or implementation.unless is None or implementation.left(direction, *args) is None:
                return implementation
            able = able or implementation
    if able is not None:
        return able
    reasons = [f"{i.name}: {why_not(i, *args, direction=direction)}" for i in _eligible(op, impl, kernels)]
    if impl is not None:
        raise RidgelineError(f"{op.name}: impl={impl!r} cannot run this call: {reasons[0].removeprefix(impl + ': ')}")
    raise RidgelineError(f"{op.name}: no implementation serves this call ({'; '.join(reasons)})")


def _eligible(op: Op, impl: str | None, kernels: bool) -> list[Implementation]:
    """Returns the implementations that may be chosen, best first."""
    if impl is not None:
        return [find(op, impl)]
    return [i for i in reversed(op.implementations.values()) if i.served and (i.is_kernel or not kernels)]


@torch.compiler.assume_constant_result  # what a device can run does not change
def _runs_here(op: str, impl: str, dtype: torch.dtype, index: int | None) -> bool:
    device = devices.stand_in or (devices.CPU if index is None else devices.gpu(index))
    return never(LOADED[op].implementations[impl], "fwd", dtype, device) is None


def _kernels_serve(op: Op, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Returns whether a kernel serves a call without `impl`, for an op that Triton does not always serve."""
    dtype, index = args[0].dtype, args[0].device.index if args[0].is_cuda else None
    able = _able_here(op, dtype, index) if torch.compiler.is_compiling() else _able(op, dtype, index, devices.stand_in)
    for i in able:
        if i.left("fwd", *args, **options) is None:
            return True
    return False


def _able_here(op: Op, dtype: torch.dtype, index: int | None) -> list[Implementation]:
    return [
        i for i in op.implementations.values() if i.served and i.is_kernel and _runs_here(op.name, i.name, dtype, index)
    ]


@cache
def _able(op: Op, dtype: torch.dtype, index: int | None, pretended: devices.Device | None) -> list[Implementation]:
    """Returns `_able_here`, cached; `pretended` is part of the key because the result depends on it."""
    return _able_here(op, dtype, index)


def run(op: Op, direction: str, impl: str | None, outputs: tuple[torch.Tensor | None, ...], *inputs: Any) -> Any:
    """Inside a registered op, fills the outputs by the implementation that serves the call; does nothing while tracing.

    Returns what the launcher returns."""
    if tracing():
        return None
    implementation = select(op, impl, *inputs, direction=direction, kernels=True)
    return implementation.launchers[direction](*outputs, *inputs)


def eager(op: Op, impl: str | None, *args: Any, **options: Any) -> Implementation | None:
    """Returns the plain PyTorch implementation that serves a call of a public function, or None if a kernel does.

    So that PyTorch can trace it, it depends only on the device, dtypes and layouts of `args` and on the facts that
    `Implementation.unless` uses. The kernel itself is chosen later, inside the registered op.
    args, options: the public arguments that `supports` of plain implementations and `unless` need.
    Raises RidgelineError if a tensor is sparse or nested, or if the named plain implementation cannot run the call.
    """
    known = all([t.dtype in op.kernel_dtypes and t.layout is _DENSE for t in args if isinstance(t, torch.Tensor)])
    if not known:
        dense_only(op.name, args)
    if impl is not None:
        implementation = find(op, impl)
        if implementation.is_kernel:
            return None
        reason = why_not(implementation, *args, **options)
        if reason:
            raise RidgelineError(f"{op.name}: impl={impl!r} cannot run this call: {reason}")
        return implementation
    if (
        known
        and (args[0].is_cuda or INTERPRETED or devices.stand_in is not None)
        and (op.always or _kernels_serve(op, args, options))
    ):
        return None
    plain = [i for i in reversed(op.implementations.values()) if i.served and not i.is_kernel]
    return next((i for i in plain[:-1] if i.supports is None or i.supports(*args, **options) is None), plain[-1])


def by_kind(
    leading: int,
    *,
    optional: int = 0,
    others: Sequence[str] | None = None,
    strides: bool = False,
    gradients: bool = False,
    plain: bool = False,
    sure: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for a function that examines an op's arguments: it caches the findings by kind of call.

    The first `leading` arguments are tensors; the last `optional` of these may be None. The function returns a tuple
    that starts with the result of `eager`, or raises. Its result is cached if kernels serve the call on a GPU. The key
    is the tensors' shapes, dtypes, layouts and devices, with `strides` those too, the other arguments' values and
    types, and whether autocast is on. With `gradients` it is also whether gradients are on and which tensors require
    them. The function may use nothing else: it checks values only if they are `readable`.
    others: the annotations of the other arguments, if the function takes any number. The function raises for an
    argument that its annotation does not allow.
    plain: also cache calls on a GPU that plain PyTorch serves; its rungs' `supports` may then use the same facts alone.
    sure: the findings end with None, and with a `replay.Sure` for calls that pass a guard. The public function may give
    that to one registered op, if all tensors of the op's call follow from the tensors here.
    """

    def decorate(look: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        if CHECK:
            return look
        known: dict[Any, tuple[Any, ...]] = {}
        guarded = Guarded()

        def remember(near: Any, found: tuple[Any, ...], *tensors: torch.Tensor | None) -> tuple[Any, ...]:
            fits = codegen.fitting(tuple([t is not None for t in tensors]))
            if sure:
                found = (*found[:-1], Sure())
            guarded.add(near, tensors, lambda check: (fits, check, found))
            return found

        def learn(key: Any, *args: Any) -> tuple[Any, ...]:
            found = look(*args)
            if found[0] is None or plain:
                if len(known) >= KINDS:
                    known.clear()
                    guarded.clear()
                known[key] = found
            return found

        names: dict[str, Any] = {"look": look, "learn": learn, "get": known.get, "own": OWN, "devices": devices}
        names |= {"quick": guarded.found.get, "remember": remember}
        names |= {"compiling": torch.compiler.is_compiling, "autocast": torch.is_autocast_enabled}
        names |= {"enabled": torch.is_grad_enabled}
        rest = [*signature(look).parameters.values()][leading:] if others is None else ()
        annotations = others or ["" if p.annotation is p.empty else str(p.annotation) for p in rest]
        return codegen.looked(leading, optional, annotations, strides, gradients, names)

    return decorate
