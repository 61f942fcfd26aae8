"""batch_norm: y = relu((x - mean) rstd w + b + add), with mean and rstd = 1 / sqrt(variance + eps) of each channel.

    backward, xh = (x - mean) rstd, g = dy where y > 0, means over images and space:
    dx = rstd w (g - mean(g) - xh mean(g xh))        dw = sum of g xh, db = sum of g, dadd = g

In training the statistics are the batch's, so x is read twice; in evaluation they are the running ones. The addition of
a residual and the ReLU are part of the last pass, and cost no more than reading `add`. The floor of training is two
reads of x and one write of y; backward reads dy and x twice and writes dx. The kernels are in `_batch.py`.
Source: Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.boundary import Function, differentiate, first_order, kernel_op, written
from ridgeline.op import Case, Cost, Op, RidgelineError, Spec, nbytes
from ridgeline.ops.rowwise import _batch
from ridgeline.ops.rowwise._channels import empty_in_format
from ridgeline.ops.rowwise._norm_options import known_eps
from ridgeline.ops.rowwise.group_norm import Last
from ridgeline.replay import Sure
from ridgeline.select import by_kind, eager, run


@kernel_op(
    "batch_norm_fwd(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? w, Tensor? b, Tensor? add, "
    "float momentum, float eps, bool relu, str? impl) -> (Tensor, Tensor, Tensor)"
)
def _train(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    *given, momentum, eps, relu, impl = rest
    y = empty_in_format(x)
    mean, rstd = [torch.empty(x.shape[1:2], dtype=torch.float32, device=x.device) for _ in range(2)]
    if not x.numel():  # the running statistics stay, as torch's
        return y, mean.zero_(), rstd.zero_()
    run(BATCH_NORM, "fwd", impl, (y, mean, rstd), x, *given, True, momentum, eps, relu)
    return y, mean, rstd


@kernel_op(
    "batch_norm_eval(Tensor x, Tensor mean, Tensor var, Tensor? w, Tensor? b, Tensor? add, float eps, bool relu, "
    "str? impl) -> Tensor"
)
def _evaluate(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    *given, eps, relu, impl = rest
    y = empty_in_format(x)
    run(BATCH_NORM, "fwd", impl, (y, None, None), x, *given, False, 0.0, eps, relu)
    return y


@kernel_op(
    "batch_norm_bwd(Tensor dy, Tensor x, Tensor? y, Tensor mean, Tensor spread, Tensor? w, ScalarType? bias, "
    "bool training, float eps, int need, str? impl) -> Tensor[]"
)
def _backward(
    dy: torch.Tensor, x: torch.Tensor, y: Any, mean: Any, spread: Any, w: Any, bias: torch.dtype | None,
    training: bool, eps: float, need: int, impl: str | None
) -> list[torch.Tensor]:  # fmt: skip
    """Returns the gradients that `need` names: 1 dx, 2 dw, 4 db (of dtype `bias`), 8 dadd."""
    dx, dadd = [empty_in_format(x) if need & bit else None for bit in (1, 8)]
    dw = x.new_empty(x.shape[1:2], dtype=w.dtype) if need & 2 else None
    db = x.new_empty(x.shape[1:2], dtype=bias) if need & 4 else None
    made = dx, dw, db, dadd
    run(BATCH_NORM, "bwd", impl, made, dy, x, y, mean, spread, w, training, eps, need)
    return [t for t in made if t is not None]


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: Any, b: Any, add: Any, running: Any, numbers: tuple[Any, ...]
    ) -> torch.Tensor:  # fmt: skip
        """running, numbers: in one argument each, since torch inspects each argument."""
        (training, momentum, eps, relu, impl), sure = numbers
        if training:
            y, mean, spread = _train(x, *running, w, b, add, momentum, eps, relu, impl, sure)
        else:
            mean, spread = running
            y = _evaluate(x, mean, spread, w, b, add, eps, relu, impl, sure)
        ctx.save_for_backward(x, y if relu else None, mean, spread, w)
        ctx.facts = training, eps, None if b is None else b.dtype, impl
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        training, eps, bias, impl = ctx.facts
        to_x, to_w, to_b, to_add, *_ = ctx.needs_input_grad
        need = to_x + 2 * to_w + 4 * to_b + 8 * to_add
        made = _backward(dy, *ctx.saved_tensors, bias, training, eps, need, impl)
        if need == 7:
            return *made, None, None, None
        left = list(made)
        return *[left.pop(0) if wanted else None for wanted in (to_x, to_w, to_b, to_add)], None, None


def _each(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Numbers per channel, shaped to broadcast over x."""
    return t.reshape(-1, *[1] * (x.dim() - 2))


def reference(
    x: torch.Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None, *,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, add: Any = None, activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    axes = [0, *range(2, x.dim())]
    if training:
        var, mean = torch.var_mean(wide, axes, correction=0)
        with torch.no_grad():
            count = x.numel() // max(1, x.shape[1])
            if running_mean is not None and count:
                running_mean += momentum * (mean.to(running_mean.dtype) - running_mean)
            if running_var is not None and count:
                running_var += momentum * ((var * count / max(1, count - 1)).to(running_var.dtype) - running_var)
    else:
        mean, var = running_mean.to(wide.dtype), running_var.to(wide.dtype)
    y = (wide - _each(mean, x)) / _each(torch.sqrt(var + eps), x)
    y = y if weight is None else y * _each(weight, x)
    y = y if bias is None else y + _each(bias, x)
    y = y if add is None else y + add
    return (torch.relu(y) if activation == "relu" else y).to(x.dtype)


def _torch(
    x: torch.Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None, *,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, add: Any = None, activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if add is None else y + add
    return torch.relu(y) if activation == "relu" else y


def batch_norm(
    x: torch.Tensor, running_mean: torch.Tensor | None = None, running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5, add: torch.Tensor | None = None, activation: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Each channel normalised over images and space, as `torch.nn.functional.batch_norm`, plus `add`, through ReLU.

    x: (images, channels, ...), floating point, in NCHW or channels_last memory without a copy.
    running_mean, running_var: (channels,), floating point. In evaluation they are the statistics, and needed. In
    training they move towards the batch's by `momentum` (the variance's divisor is then one less), or are None.
    weight, bias: (channels,), floating point, or None. eps: at least 0. add: of x's shape and dtype, or None.
    activation: None or "relu".
    Returns a tensor of x's shape, dtype and memory format. Gradients flow to x, weight, bias and add. Backward saves x,
    and y for "relu".
    Raises RidgelineError if shapes, dtypes or devices do not fit, if a channel has a single number in training, or if
    `impl` cannot run the call.
    """
    statistics = running_mean, running_var
    plain, numbers, wanted, sure = _look(
        x, running_mean, running_var, weight, bias, add, training, momentum, eps, activation, impl
    )
    if plain is not None and plain.call is not None:
        options = {"training": training, "momentum": momentum, "eps": numbers[2], "add": add, "activation": activation}
        return plain.call(x, *statistics, weight, bias, **options)
    if wanted:
        y: torch.Tensor = differentiate(_BatchNorm, x, weight, bias, add, statistics, (numbers, sure))
    else:
        _, *rest = numbers
        y = (
            _train(x, *statistics, weight, bias, add, *rest, sure)[0]
            if training
            else _evaluate(x, *statistics, weight, bias, add, *rest[1:], sure)
        )
    if training:
        written(running_mean, running_var)
    return y


@by_kind(6, optional=5, gradients=True, sure=True)
def _look(
    x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, add: Any, training: bool, momentum: float,
    eps: float, activation: str | None, impl: str | None,
) -> tuple[Any, tuple[Any, ...], bool, Sure | None]:  # fmt: skip
    """Checks a call and chooses. Returns too the options as the launchers take them, and if gradients are wanted."""
    per_channel = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    eps = _check(x, per_channel, training, momentum, eps, add, activation)
    plain = eager(BATCH_NORM, impl, x, **per_channel, add=add)
    wanted = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, weight, bias, add)])
    return plain, (training, float(momentum), eps, activation == "relu", impl), wanted, None


def _check(
    x: Any, per_channel: dict[str, Any], training: Any, momentum: Any, eps: Any, add: Any, activation: Any
) -> float:
    """Returns eps as a float, or raises RidgelineError."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_floating_point():
        given = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise RidgelineError(f"batch_norm: x must be a floating-point tensor (images, channels, ...), but is {given}")
    for name, t in per_channel.items():
        if t is None:
            if not training and name.startswith("running"):
                raise RidgelineError("batch_norm: without training=True it needs running_mean and running_var")
        elif (
            not isinstance(t, torch.Tensor)
            or t.shape != x.shape[1:2]
            or t.device != x.device
            or not t.is_floating_point()
        ):
            given = f"{tuple(t.shape)} {t.dtype} on {t.device}" if isinstance(t, torch.Tensor) else type(t).__name__
            wanted = f"floating point of shape ({x.shape[1]},) on {x.device}"
            raise RidgelineError(f"batch_norm: {name} must be {wanted}, but is {given}")
    if add is not None and (not isinstance(add, torch.Tensor) or (add.shape, add.dtype) != (x.shape, x.dtype)):
        given = f"{tuple(add.shape)} {add.dtype}" if isinstance(add, torch.Tensor) else type(add).__name__
        raise RidgelineError(
            f"batch_norm: add must have x's shape {tuple(x.shape)} and dtype {x.dtype}, but is {given}"
        )
    if add is not None and add.device != x.device:
        raise RidgelineError(f"batch_norm: add is on {add.device}, but x on {x.device}")
    if activation not in (None, "relu"):
        raise RidgelineError(f"batch_norm: activation must be None or 'relu', but is {activation!r}")
    if not isinstance(momentum, int | float) or not 0 <= momentum <= 1:
        raise RidgelineError(f"batch_norm: momentum must be a number from 0 to 1, but is {momentum!r}")
    if training and x.numel() and x.numel() == x.shape[1]:
        raise RidgelineError("batch_norm: training needs more than one number per channel")
    return known_eps("batch_norm", eps)


def cost(
    x: torch.Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    **options: Any
) -> tuple[Cost, Cost]:  # fmt: skip
    """Statistics need all of x before the first result, so training reads x twice, and backward dy and x."""
    parameters = nbytes(*(p for p in (running_mean, running_var, weight, bias) if p is not None))
    size, times = nbytes(x), 2 if options.get("training") else 1
    add, relu = options.get("add") is not None, options.get("activation") == "relu"
    read = times * size + add * size + parameters
    back = times * (2 + relu) * size + parameters
    return Cost(read, size, 8 * x.numel()), Cost(back, size + add * size + parameters, 14 * x.numel())


def _case(name: str, x: Spec, running: bool = False, dtype: str | None = None, **options: Any) -> Case:
    facts = {n: options.pop(n) for n in ("dtypes", "use") if n in options}
    channels = x.shape[1]
    statistics = (Spec(channels, dtype=dtype, grad=False), _Variance(channels, dtype=dtype, grad=False))
    arguments = *(statistics if running else (None, None)), *[Spec(channels, dtype=dtype)] * 2
    if options.pop("add", False):
        options["add"] = type(x)(*x.shape)
    return Case(name, (x, *arguments), {"training": not running} | options, **facts)


class _Variance(Spec):
    """Random positive numbers."""

    def make(self, *args: Any) -> torch.Tensor:
        return super().make(*args).abs() + 0.5


PLAIN_AND_FUSED: tuple[tuple[dict[str, Any], str], ...] = ({}, ""), ({"add": True, "activation": "relu"}, ", add, relu")
BENCH: dict[str, Any] = {"dtypes": ("bfloat16", "float32"), "use": "bench"}
BATCH_NORM = Op(
    batch_norm,
    reference=reference,
    cost=cost,
    sharding=lambda x, training=False, **_: (
        None
        if training  # its statistics are of all images: parallel.norm has them
        else f"x {'bcDEF'[: x.dim()]}, running_mean c, running_var c, weight c, bias c, "
        f"add {'bcDEF'[: x.dim()]} -> {'bcDEF'[: x.dim()]}"
    ),
    cases=[
        _case("3x12x7x9, evaluation", Spec(3, 12, 7, 9), running=True),
        _case("3x12x7x9", Spec(3, 12, 7, 9)),
        _case("3x20x7x5, channels last", Last(3, 20, 7, 5)),
        _case("4x10x24x20, add, relu", Spec(4, 10, 24, 20), add=True, activation="relu"),
        _case("5x70x9x9, channels last, add, relu", Last(5, 70, 9, 9), add=True, activation="relu"),
        _case("3x12x7x9, evaluation, add, relu", Last(3, 12, 7, 9), running=True, add=True, activation="relu"),
        _case("2x8x9, float32 parameters", Spec(2, 8, 9), dtype="float32", dtypes=("float16", "bfloat16")),
        Case("70x40, no parameters", (Spec(70, 40),), {"training": True}),
        _case("no images", Spec(0, 4, 3), running=True),
        _case("16x64x32x32", Spec(16, 64, 32, 32), use="quick"),
        *(
            _case(f"{shape[0]}x{shape[1]}x{shape[2]}x{shape[3]}{last}{how}", kind(*shape), **options, **BENCH)
            for shape in ((256, 64, 112, 112), (256, 256, 56, 56), (256, 512, 28, 28))
            for kind, last in ((Spec, ""), (Last, ", channels last"))
            for options, how in PLAIN_AND_FUSED
        ),
    ],
)  # fmt: skip

BATCH_NORM.eager("naive", "the formula in eager PyTorch, in float32: ten passes over memory", reference)
BATCH_NORM.eager("torch", "PyTorch's own kernels, then one each to add and for ReLU", _torch, served=True)
BATCH_NORM.compiled("the formula fused by torch.compile")
BATCH_NORM.kernel(
    "triton",
    "statistics by parts, merged; one pass normalises, adds and applies ReLU; backward sums, then one pass",
    kind="triton",
    fwd=_batch.launch_fwd,
    bwd=_batch.launch_bwd,
    served=True,
)
