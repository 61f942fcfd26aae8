"""gated_rms_norm: the norm at the end of linear attention and state space layers.

    norm first:  y = rms_norm(x) weight act(gate)        gate first:  y = rms_norm(x act(gate)) weight

    backward:  n the normalised row, d its gradient,  dn = rstd (d - n average(d n)),  and the product's two factors

The gate is applied where the row is normalised, in registers. The floor is one read of x and gate and one write of y;
backward reads dy, x and gate and writes dx and dgate.
Source: Gated DeltaNet (arXiv:2412.06464) has the norm first, Mamba-2 (arXiv:2405.21060) the gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline import device
from ridgeline.boundary import Function, differentiate, first_order, kernel_op, tracing
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.rowwise._gated_norm import PROGRAMS, launch_bwd, launch_fwd
from ridgeline.ops.rowwise._norm_formulas import widened
from ridgeline.ops.rowwise._norm_options import known_eps
from ridgeline.ops.rowwise._rows import as_rows, dense, empty_rows
from ridgeline.select import by_kind, eager, run

ACTIVATIONS = ("silu", "sigmoid")
Found = tuple[torch.Tensor, torch.Tensor]


@kernel_op(
    "gated_rms_norm_fwd(Tensor x, Tensor gate, Tensor weight, float eps, str activation, bool norm_before_gate, "
    "int? group_size, str? impl) -> (Tensor, Tensor)"
)
def _forward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str, norm_before_gate: bool,
    group_size: int | None, impl: str | None,
) -> Found:  # fmt: skip
    """y, and one over the root mean square of each row's groups."""
    groups = 1 if group_size is None else x.shape[-1] // group_size
    y = empty_rows(x, -1, None)
    rstd = torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device)
    if not tracing() and x.numel():
        inputs = as_rows(x, -1), as_rows(gate, -1), dense(weight)
        options = eps, activation, norm_before_gate, groups
        run(OP, "fwd", impl, (as_rows(y, -1), rstd.view(-1, groups)), *inputs, *options)
    return y, rstd


@kernel_op(
    "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, str activation, "
    "bool norm_before_gate, bool need, str? impl) -> (Tensor, Tensor, Tensor)"
)
def _backward(
    dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, activation: str,
    norm_before_gate: bool, need: bool, impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dx, dgate and dweight; need: whether dweight is computed."""
    dx, dgate = empty_rows(x, -1, None), empty_rows(gate, -1, None)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=dy.device)
    if tracing():
        return dx, dgate, dweight
    if not dy.numel():
        return dx, dgate, dweight.zero_()
    parts = None
    if need:
        programs = device.of(dy).multiprocessors * PROGRAMS
        parts = torch.empty((programs, 1, dy.shape[-1]), dtype=torch.float32, device=dy.device)
    inputs = *(as_rows(t, -1) for t in (dy, x, gate)), dense(weight), rstd.view(-1, rstd.shape[-1])
    outs: Any = as_rows(dx, -1), as_rows(dgate, -1), dweight, parts
    run(OP, "bwd", impl, outs, *inputs, activation, norm_before_gate, rstd.shape[-1])
    return dx, dgate, dweight


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        y, rstd = _forward(*args)
        ctx.save_for_backward(*args[:3], rstd)
        ctx.facts = args[4], args[5], args[7]
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, gate, weight, rstd = ctx.saved_tensors
        activation, norm_first, impl = ctx.facts
        need = bool(ctx.needs_input_grad[2])
        dx, dgate, dweight = _backward(dy, x, gate, weight, rstd, activation, norm_first, need, impl)
        return dx, dgate, dweight if need else None, *(None,) * 5


def reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, activation: str = "silu",
    norm_before_gate: bool = True, group_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    v, g = widened(x), widened(gate).to(widened(x).dtype)
    act = g * torch.sigmoid(g) if activation == "silu" else torch.sigmoid(g)
    v = v if norm_before_gate else v * act
    rows = v if group_size is None else v.unflatten(-1, (v.shape[-1] // group_size, group_size))
    v = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)).view(v.shape) * weight
    return (v * act if norm_before_gate else v).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, activation: str = "silu",
    norm_before_gate: bool = True, group_size: int | None = None, impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns `rms_norm` of x over its last dimension, gated: rms_norm(x) * weight * act(gate), in x's shape and dtype.

    Gradients flow to x, gate and weight; backward saves them and a float32 per row.
    x: at least one dimension, any strides, floating point. gate: x's shape, in any floating-point dtype.
    weight: (columns,), in any floating-point dtype. eps: at least 0, added to the mean square.
    activation: "silu" or "sigmoid", of the gate.
    norm_before_gate: True as in Qwen3-Next; False as in Mamba-2: rms_norm(x * act(gate)) * weight.
    group_size: columns that have a mean square of their own, a divisor of x's columns; None for all of them.
    All is computed in float32 and rounded once.
    Raises RidgelineError if the arguments do not fit together, or if `impl` cannot run the call.
    """
    plain, eps = _look(x, gate, weight, eps, activation, norm_before_gate, group_size, impl)
    if plain is not None:
        options: dict[str, Any] = {"norm_before_gate": norm_before_gate, "group_size": group_size}
        return plain(x, gate, weight, eps, activation=activation, **options)
    args = x, gate, weight, eps, activation, norm_before_gate, group_size, impl
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad or weight.requires_grad):
        return differentiate(_Gated, *args)
    return _forward(*args)[0]


@by_kind(3)
def _look(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str, norm_before_gate: bool,
    group_size: int | None, impl: str | None,
) -> Any:  # fmt: skip
    """Checks a call. Returns the plain PyTorch function that runs it, or None, and eps."""
    named = {"x": x, "gate": gate, "weight": weight}
    for name, t in named.items():
        if not isinstance(t, torch.Tensor):
            raise RidgelineError(f"gated_rms_norm: {name} must be a tensor, but is {type(t).__name__}")
        if not t.is_floating_point():
            wanted = "floating point (float32, float16, bfloat16)"
            raise RidgelineError(f"gated_rms_norm: {name} must be {wanted}, but is {t.dtype}")
        if t.device != x.device:
            found = f"{name} is on {t.device} but x on {x.device}"
            raise RidgelineError(f"gated_rms_norm: {found}; they must share one device")
    if not x.dim():
        raise RidgelineError("gated_rms_norm: x must have at least one dimension, but has none")
    if gate.shape != x.shape:
        raise RidgelineError(f"gated_rms_norm: gate must have x's shape {tuple(x.shape)}, but has {tuple(gate.shape)}")
    if weight.shape != x.shape[-1:]:
        wanted, found = f"the shape ({x.shape[-1]},) of x's last dimension", tuple(weight.shape)
        raise RidgelineError(f"gated_rms_norm: weight must have {wanted}, but has {found}")
    if activation not in ACTIVATIONS:
        raise RidgelineError(f"gated_rms_norm: activation must be 'silu' or 'sigmoid', but is {activation!r}")
    if type(norm_before_gate) is not bool:
        raise RidgelineError(f"gated_rms_norm: norm_before_gate must be True or False, but is {norm_before_gate!r}")
    if group_size is not None:
        fits = type(group_size) is int and group_size > 0 and x.shape[-1] % group_size == 0
        if not fits:
            wanted = f"None or a divisor of x's {x.shape[-1]} columns"
            raise RidgelineError(f"gated_rms_norm: group_size must be {wanted}, but is {group_size!r}")
    eps = known_eps("gated_rms_norm", eps)
    chosen = eager(OP, impl, x, gate, weight)
    return None if chosen is None else chosen.call, eps


def _torch(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, activation: str = "silu",
    norm_before_gate: bool = True, group_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    act = (F.silu if activation == "silu" else torch.sigmoid)(gate)
    size = x.shape[-1] if group_size is None else group_size
    rows = (x if norm_before_gate else (x * act).to(x.dtype)).unflatten(-1, (x.shape[-1] // size, size))
    y = F.rms_norm(rows, (size,), None, eps).flatten(-2) * weight
    return (y * act if norm_before_gate else y).to(x.dtype)


def cost(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, activation: str = "silu",
    norm_before_gate: bool = True, group_size: int | None = None,
) -> tuple[Cost, Cost]:  # fmt: skip
    """Forward reads x, gate and weight and writes y; backward also reads dy, and writes a gradient for each."""
    some = nbytes(x, gate, weight)
    return Cost(some, nbytes(x), 9 * x.numel()), Cost(some + nbytes(x), some, 20 * x.numel())


HALF = ("float16", "bfloat16")
_gated = Spec(33, 130), Spec(33, 130), Spec(130)
OP = Op(
    gated_rms_norm,
    reference=reference,
    cost=cost,
    sharding="x ...N, gate ...N, weight N -> ...N",
    cases=[
        Case("33x129", (Spec(33, 129), Spec(33, 129), Spec(129))),
        Case("33x130 gate first", _gated, {"norm_before_gate": False}),
        Case("3x9x130 sigmoid, groups of 26", (Spec(3, 9, 130), Spec(3, 9, 130), Spec(130)),
             {"activation": "sigmoid", "group_size": 26}),
        Case("33x130 gate first, groups of 65", _gated, {"norm_before_gate": False, "group_size": 65}),
        Case("33x128 float32 gate and weight",
             (Spec(33, 128), Spec(33, 128, dtype="float32"), Spec(128, dtype="float32")), dtypes=HALF),
        Case("33x72 frozen weight", (Spec(33, 72), Spec(33, 72), Spec(72, grad=False))),
        Case("7x8200 gate first", (Spec(7, 8200), Spec(7, 8200), Spec(8200)), {"norm_before_gate": False}),
        Case("5x17000", (Spec(5, 17000), Spec(5, 17000), Spec(17000)), dtypes=HALF),
        Case("1024x1024", (Spec(1024, 1024), Spec(1024, 1024), Spec(1024)), use="quick"),
        Case("1048576x128", (Spec(1048576, 128), Spec(1048576, 128), Spec(128)), dtypes=("bfloat16",), use="bench"),
        Case("32768x5120 gate first", (Spec(32768, 5120), Spec(32768, 5120), Spec(5120)),
             {"norm_before_gate": False}, dtypes=("bfloat16",), use="bench"),
    ],
)  # fmt: skip
OP.eager("naive", "the formula in eager PyTorch, in float32: a pass for each operation", reference)
OP.eager("torch", "PyTorch's own norm, between two products", _torch, served=True)
OP.compiled("the formula fused by torch.compile")
OP.kernel(
    "triton",
    "the gate where the row is normalised, in registers; backward keeps its part of dweight there",
    kind="triton",
    fwd=launch_fwd,
    bwd=launch_bwd,
    served=True,
)
