"""Shared by layer_norm, rms_norm, and both after a sum: torch ops, autograd and checks.

The kernels are in `_norm_forward.py`, `_norm_backward.py` and, by thread-block clusters, `_cluster.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ridgeline import device
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, tracing
from ridgeline.op import Cost, Op, RidgelineError, nbytes, readable
from ridgeline.ops.rowwise import _norm_backward, _norm_forward
from ridgeline.ops.rowwise._norm_formulas import widened
from ridgeline.ops.rowwise._norm_options import known_eps, known_offset, result_dtype
from ridgeline.ops.rowwise._rows import Maybe, as_rows, dense, empty_rows
from ridgeline.select import by_kind, eager, run


class Norm:
    """The torch ops, the autograd function and the checks of one norm. Calling it runs the norm.

    center: whether a mean is subtracted (layer_norm). add: whether x + residual is normalised, and returned too.
    """

    op: Op

    def __init__(self, name: str, *, center: bool, add: bool):
        self.name, self.center, self.add = name, center, add
        tensors = "Tensor? weight, Tensor? bias"
        self.fwd = fwd = kernel_op(
            f"{name}_fwd(Tensor x, Tensor? residual, {tensors}, float eps, float offset, str rounding, int stats, "
            "str? impl) -> Tensor[]"
        )(self._forward)
        self.bwd = bwd = kernel_op(
            f"{name}_bwd(Tensor dy, Tensor? dsum, Tensor saved, {tensors}, Tensor? mean, Tensor rstd, "
            "float offset, bool from_output, int need, str? impl) -> Tensor[]"
        )(self._backward)
        stats = 2 if center else 1

        class Differentiable(Function):
            @staticmethod
            def forward(
                ctx: Any, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: float, offset: float,
                rounding: str, thrifty: bool, impl: str | None
            ) -> Any:  # fmt: skip
                made = fwd(x, residual, weight, bias, eps, offset, rounding, 1 if thrifty else stats, impl)
                saved = made[0] if thrifty else made[1] if add else x
                ctx.save_for_backward(saved, weight, bias, made[-2] if center and not thrifty else None, made[-1])
                ctx.facts = offset, thrifty, impl
                if not add:
                    return made[0]
                if not torch.compiler.is_compiling():
                    ctx.set_materialize_grads(False)  # no zeros for a result that goes unused
                return made[0], made[1]

            @staticmethod
            @first_order
            def backward(ctx: Any, dy: Maybe, dsum: Maybe = None) -> Any:
                if dy is None:
                    return dsum, dsum, *[None] * 7
                saved, weight, bias, mean, rstd = ctx.saved_tensors
                offset, thrifty, impl = ctx.facts
                _, _, scaled, shifted, *_ = ctx.needs_input_grad
                made = bwd(dy, dsum, saved, weight, bias, mean, rstd, offset, thrifty, scaled + 2 * shifted, impl)
                dx = made[0]
                return dx, dx if add else None, made[1] if scaled else None, made[-1] if shifted else None, *[None] * 5

        Differentiable.__name__ = Differentiable.__qualname__ = name
        self.function = Differentiable
        self.look = by_kind(4, optional=3, gradients=True)(self._look)

    def __call__(
        self,
        impl: str | None,
        x: torch.Tensor,
        residual: Maybe,
        weight: Maybe,
        bias: Maybe,
        eps: float | None,
        thrifty: bool = False,
        offset: float = 0.0,
        rounding: str = "once",
    ) -> Any:
        """Runs `impl`, or the implementation chosen for the call. thrifty: backward uses the output, not the input."""
        plain, eps, offset, widen, wanted = self.look(x, residual, weight, bias, impl, eps, thrifty, offset, rounding)
        if widen:
            wide = x.float(), None if residual is None else residual.float()
            made = self(impl, *wide, weight, bias, eps, thrifty, offset)
            return (made[0], made[1].to(x.dtype)) if self.add else made
        if plain is not None:
            given = (x, *((residual,) if self.add else ()), weight, *((bias,) if self.center else ()))
            return plain(*given, eps, **({} if self.center else {"offset": offset, "rounding": rounding}))
        if wanted:
            return differentiate(self.function, x, residual, weight, bias, eps, offset, rounding, thrifty, impl)
        made = self.fwd(x, residual, weight, bias, eps, offset, rounding, 0, impl)
        return (made[0], made[1]) if self.add else made[0]

    def _invertible(self, x: torch.Tensor, weight: Maybe, offset: float, rounding: str) -> None:
        """Raises RidgelineError if backward could not, or should not, take the normalised row from the result."""
        made = result_dtype(x, weight, rounding)
        if made != x.dtype:
            raise RidgelineError(
                f"{self.name}: memory_efficient=True saves the result in place of x, but rounding='llama' makes it "
                f"{made} where x is {x.dtype}; give a weight in {x.dtype}, or leave memory_efficient out"
            )
        if weight is None or not torch.is_grad_enabled() or not readable(weight):
            return
        if not (widened(weight) + offset if offset else weight).all():
            what = "offset + weight" if offset else "the weight"
            reason = f"memory_efficient=True divides by {what} in backward, but {what} has a zero"
            raise RidgelineError(f"{self.name}: {reason}")

    def _look(
        self, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, impl: str | None, eps: float | None,
        thrifty: bool, offset: float, rounding: str
    ) -> tuple[Callable[..., Any] | None, float, float, bool, bool]:  # fmt: skip
        """Checks a call. Returns what runs it as `_plain` does, eps, offset, whether it runs in float32, and whether
        gradients are wanted.

        Autocast makes half precision float32, as for torch's own; the sum is rounded to the given dtype."""
        plain = self._plain(impl, x, residual, weight, bias)
        if eps is None and self.name == "rms_norm":  # torch's default there, also for half precision
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        eps, offset = known_eps(self.name, eps), known_offset(self.name, offset, rounding, weight)
        if thrifty:
            self._invertible(x, weight, offset, rounding)
        halves = x.dtype in (torch.float16, torch.bfloat16)
        widen = halves and rounding == "once" and x.is_cuda and torch.is_autocast_enabled("cuda")
        given = [t for t in (x, residual, weight, bias) if t is not None]
        return plain, eps, offset, widen, torch.is_grad_enabled() and any([t.requires_grad for t in given])

    def _plain(
        self, impl: str | None, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe
    ) -> Callable[..., Any] | None:
        """The plain-PyTorch implementation that runs a call, or None if kernels do.

        Raises RidgelineError if the inputs do not fit together.
        """
        named = {"x": x, "residual": residual, "weight": weight, "bias": bias}
        for name, t in named.items():
            optional = not (name == "x" or (name == "residual" and self.add) or (name == "weight" and self.add))
            if not isinstance(t, torch.Tensor) and not (t is None and optional):
                wanted = f"a tensor{' or None' if optional else ''}"
                raise RidgelineError(f"{self.name}: {name} must be {wanted}, but is {type(t).__name__}")
        if not x.dim():
            raise RidgelineError(f"{self.name}: x must have at least one dimension, but has none")
        for name, t in named.items():
            if t is None:
                continue
            if not t.is_floating_point():
                wanted = "floating point (float32, float16, bfloat16)"
                raise RidgelineError(f"{self.name}: {name} must be {wanted}, but is {t.dtype}")
            if t.device != x.device:
                found = f"{name} is on {t.device} but x on {x.device}"
                raise RidgelineError(f"{self.name}: {found}; they must share one device")
            if name in ("weight", "bias") and t.shape != x.shape[-1:]:
                wanted, found = f"the shape ({x.shape[-1]},) of x's last dimension", tuple(t.shape)
                raise RidgelineError(f"{self.name}: {name} must have {wanted}, but has {found}")
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise RidgelineError(
                f"{self.name}: residual must have x's shape and dtype, {tuple(x.shape)} in {x.dtype}, "
                f"but has {tuple(residual.shape)} in {residual.dtype}"
            )
        chosen = eager(self.op, impl, *[t for t in named.values() if t is not None])
        return None if chosen is None else chosen.call

    def _forward(
        self, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: float, offset: float,
        rounding: str, stats: int, impl: str | None
    ) -> list[torch.Tensor]:  # fmt: skip
        """y, the sum if there is one, and the last `stats` of each row's mean and rstd."""
        y = empty_rows(x, -1, result_dtype(x, weight, rounding))
        total = empty_rows(x, -1, None) if self.add else None
        mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats > 1 else None
        rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if stats else None
        if not tracing() and x.numel():
            outs: Any = as_rows(y, -1), _rows(total), _flat(mean), _flat(rstd)
            inputs = as_rows(x, -1), _rows(residual), dense(weight), dense(bias)
            run(self.op, "fwd", impl, outs, *inputs, eps, offset, rounding)
        return [t for t in (y, total, mean, rstd) if t is not None]

    def _backward(
        self, dy: torch.Tensor, dsum: Maybe, saved: torch.Tensor, weight: Maybe, bias: Maybe, mean: Maybe,
        rstd: torch.Tensor, offset: float, from_output: bool, need: int, impl: str | None
    ) -> list[torch.Tensor]:  # fmt: skip
        """dx, and dweight and dbias as the bits of `need` say."""
        dx = empty_rows(saved, -1, None)
        dweight = (
            torch.empty(weight.shape, dtype=weight.dtype, device=dy.device) if need & 1 and weight is not None else None
        )
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=dy.device) if need & 2 and bias is not None else None
        made = [t for t in (dx, dweight, dbias) if t is not None]
        if tracing():
            return made
        if not dy.numel():
            return [t.zero_() for t in made]
        parts = None
        if len(made) > 1:
            size = (device.of(dy).multiprocessors, len(made) - 1, dy.shape[-1])
            parts = torch.empty(size, dtype=torch.float32, device=dy.device)
        inputs = (
            as_rows(dy, -1),
            _rows(dsum),
            as_rows(saved, -1),
            dense(weight),
            dense(bias),
            _flat(mean),
            rstd.view(-1),
        )
        outs: Any = as_rows(dx, -1), dweight, dbias, parts
        run(self.op, "bwd", impl, outs, *inputs, offset, from_output)
        return made

    def triton(self) -> None:
        """Registers the Triton kernels as the implementation `triton`."""
        self.op.kernel(
            "triton",
            "a row in registers, read once; backward is persistent and keeps dweight and dbias in registers",
            kind="triton",
            served=True,
            fwd=partial(_norm_forward.launch_fwd, self.name, self.center),
            bwd=partial(_norm_backward.launch_bwd, self.name, self.center),
        )

    def cost(
        self, x: torch.Tensor, residual: Maybe, weight: Maybe, bias: Maybe, rounding: str = "once"
    ) -> tuple[Cost, Cost]:
        """Forward reads x (and the residual) and writes y (and the sum).

        Backward reads what was saved and the gradients of what was written, and writes dx, which is the residual's
        gradient too. Weights are read, and their gradients written, once.
        """
        one, count = nbytes(x), 2 if self.add else 1
        written = x.numel() * result_dtype(x, weight, rounding).itemsize + (count - 1) * one
        weights = sum([nbytes(t) for t in (weight, bias) if t is not None])
        scale = 0 if weight is None else nbytes(weight)
        return (
            Cost(count * one + weights, written, (6 if self.center else 4) * x.numel()),
            Cost(one + written + scale, one + weights, (11 if self.center else 9) * x.numel()),
        )


def _rows(t: Maybe) -> Maybe:
    return None if t is None else as_rows(t, -1)


def _flat(t: Maybe) -> Maybe:
    return None if t is None else t.view(-1)
