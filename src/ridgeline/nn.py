"""`torch.nn` modules that call Ridgeline's functions: same names, arguments, parameters, state_dicts and repr.

Those that torch has are subclasses of torch's, so `isinstance(m, nn.LayerNorm)` holds, and torch documents their
arguments. Only `forward` differs. One rule is Ridgeline's own: `CrossEntropyLoss` takes the classes in the last
dimension, while torch takes them in dimension 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline import formats
from ridgeline.op import RidgelineError
from ridgeline.recomputation import autocast, gated_mlp


def _normalised(
    norm: Any, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], *parameters: Any, **options: Any
) -> Any:
    """Returns `function` of the inputs, with the dimensions of the module's normalized_shape flattened into one."""
    shape = norm.normalized_shape
    many = len(shape)
    for x in inputs:
        if x.shape[-many:] != shape:
            raise RidgelineError(
                f"{type(norm).__name__}: the last dimensions must be {shape}, and the input is {tuple(x.shape)}"
            )
    if many == 1:
        return function(*inputs, *parameters, **options)
    result = function(
        *[x.flatten(-many) for x in inputs], *[p if p is None else p.flatten() for p in parameters], **options
    )
    return tuple(y.unflatten(-1, shape) for y in result) if isinstance(result, tuple) else result.unflatten(-1, shape)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, by `ridgeline.rms_norm`. As in torch, half precision has the default eps of float32.

    offset, rounding: as in `ridgeline.rms_norm`. offset=1.0 is Gemma's norm, rounding="llama" Llama's. The weight is
    stored without the offset, and starts at 1 - offset."""

    offset = 0.0
    rounding = "once"

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        offset: float = 0.0,
        rounding: str = "once",
    ) -> None:
        if not isinstance(offset, int | float):
            raise RidgelineError(f"{type(self).__name__}: offset must be a number, but is {offset!r}")
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.offset, self.rounding = float(offset), rounding
        if offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1 - self.offset)

    def extra_repr(self) -> str:
        given = {"offset": (self.offset, 0.0), "rounding": (self.rounding, "once")}
        return ", ".join([super().extra_repr(), *(f"{k}={v!r}" for k, (v, usual) in given.items() if v != usual)])

    def _options(self, x: torch.Tensor) -> dict[str, Any]:
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return {"eps": eps, "offset": self.offset, "rounding": self.rounding}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalised(self, ridgeline.rms_norm, (x,), self.weight, **self._options(x))


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, by `ridgeline.layer_norm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _normalised(self, ridgeline.layer_norm, (input,), self.weight, self.bias, eps=self.eps)


class AddRMSNorm(RMSNorm):
    """RMSNorm of x + residual, by `ridgeline.add_rms_norm`. Returns the norm, and the sum as the next residual."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _normalised(self, ridgeline.add_rms_norm, (x, residual), self.weight, **self._options(x))


class AddLayerNorm(LayerNorm):
    """LayerNorm of x + residual, by `ridgeline.add_layer_norm`. Returns the norm, and the sum as the next residual."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _normalised(self, ridgeline.add_layer_norm, (x, residual), self.weight, self.bias, eps=self.eps)


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, by `ridgeline.group_norm`. NCHW or channels_last; the output has the input's format.

    activation="silu" applies SiLU in the same pass."""

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"eps": self.eps, "activation": self.activation}
        return ridgeline.group_norm(input, self.num_groups, self.weight, self.bias, **options)

    # Torch's arguments, which differ between its versions, and one more.
    __signature__ = inspect.signature(nn.GroupNorm).replace(
        parameters=[
            *inspect.signature(nn.GroupNorm).parameters.values(),
            inspect.Parameter("activation", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"),
        ]
    )


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def forward(self, input: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        self._check_input_dim(input)
        training = self.training or self.running_mean is None
        momentum = 0.0 if self.momentum is None else self.momentum
        running = (
            (self.running_mean, self.running_var) if not self.training or self.track_running_stats else (None, None)
        )
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        options: dict[str, Any] = {"training": training, "momentum": momentum, "eps": self.eps}
        options |= {"add": add, "activation": self.activation}
        return ridgeline.batch_norm(input, *running, self.weight, self.bias, **options)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, by `ridgeline.batch_norm`, for (images, channels) or (images, channels, length).

    `forward(input, add)` adds a residual, and activation="relu" cuts the sum off. Neither costs a pass of its own. The
    output has the input's format."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, by `ridgeline.batch_norm`. NCHW or channels_last; the output has the input's format.

    `forward(input, add)` adds a residual, and activation="relu" cuts the sum off. Neither costs a pass of its own."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, as `BatchNorm2d` is of `torch.nn.BatchNorm2d`."""


class GELU(nn.GELU):
    """`torch.nn.GELU`, by `ridgeline.gelu`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ridgeline.gelu(input, self.approximate)


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), by `ridgeline.quick_gelu`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ridgeline.quick_gelu(x)


class SiLUMul(nn.Module):
    """silu(gate) * up, as in SwiGLU, by `ridgeline.silu_mul`."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return ridgeline.silu_mul(gate, up)


class GELUMul(nn.Module):
    """gelu(gate) * up, as in GeGLU, by `ridgeline.gelu_mul`. approximate: "tanh" or "none", as in `torch.nn.GELU`."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return ridgeline.gelu_mul(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class Softmax(nn.Softmax):
    """`torch.nn.Softmax`, by `ridgeline.softmax`. `dim` is required: torch's guess from the shape is deprecated."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ridgeline.softmax(input, _dim(self))


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax`, by `ridgeline.log_softmax`. `dim` is required, as in `Softmax`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ridgeline.log_softmax(input, _dim(self))


def _dim(module: Any) -> int:
    if module.dim is None:
        raise RidgelineError(
            f"{type(module).__name__}: dim is None; pass a dimension, such as {type(module).__name__}(dim=-1)"
        )
    return module.dim


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, by `ridgeline.dropout`, never in place. The same seed gives other masks than in torch."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if inplace:
            raise RidgelineError(
                "Dropout: inplace=True is not supported; use inplace=False, which returns a new tensor"
            )
        super().__init__(p)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ridgeline.dropout(input, self.p, training=self.training)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` for class indices, by `ridgeline.cross_entropy`.

    Classes are the LAST dimension: logits (..., classes), target (...). A language model's logits (batch, seq,
    vocabulary) and target (batch, seq) need no reshaping. With more than two dimensions, torch takes the classes in
    dimension 1; for such logits pass `logits.movedim(1, -1)`.
    z_loss, softcap, logit_scale: as in `ridgeline.cross_entropy`.
    Raises RidgelineError if class weights are given; they are not supported.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ) -> None:
        if weight is not None:
            raise RidgelineError(
                "CrossEntropyLoss: class weights are not supported, so weight must be None; torch's loss takes them"
            )
        super().__init__(None, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap, self.logit_scale = z_loss, softcap, logit_scale

    def extra_repr(self) -> str:
        """Returns Ridgeline's options; torch prints none of its own."""
        own = [f"z_loss={self.z_loss}"] * bool(self.z_loss) + [f"softcap={self.softcap}"] * (self.softcap is not None)
        own += [f"logit_scale={self.logit_scale}"] * (self.logit_scale != 1)
        return ", ".join(own)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ridgeline.cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            reduction=self.reduction,
        )


class Linear(nn.Linear):
    """`torch.nn.Linear`, by `ridgeline.linear`: activation(x W^T + b) + residual.

    activation: None, "silu", "gelu" or "gelu_tanh", applied to the product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", activation={self.activation!r}" if self.activation else "")

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return ridgeline.linear(input, self.weight, self.bias, activation=self.activation, residual=residual)


class Fp8Linear(nn.Linear):
    """`torch.nn.Linear` trained in 8 bits, by `ridgeline.fp8_linear`: the same parameters and state_dict.

    recipe: "tensor", "row" or "block", what shares a scale. The weight keeps its dtype; each call quantises it.
    fuse_main_grad: backward adds the weight's gradient to `weight.main_grad`, a float32 buffer that the caller puts
    there, and leaves `weight.grad` None, as Megatron-LM's gradient_accumulation_fusion does.
    `Fp8Linear.of(linear)` takes a layer's own parameters.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        recipe: str = "tensor", fuse_main_grad: bool = False,
    ) -> None:  # fmt: skip
        if recipe not in ("tensor", "row", "block"):
            raise RidgelineError(f"Fp8Linear: recipe must be 'tensor', 'row' or 'block', got {recipe!r}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe, self.fuse_main_grad = recipe, fuse_main_grad

    @classmethod
    def of(cls, linear: nn.Linear, **options: Any) -> Fp8Linear:
        weight, bias = linear.weight, linear.bias
        made = cls(weight.shape[1], weight.shape[0], bias is not None, "meta", weight.dtype, **options)
        made.weight, made.bias = weight, bias
        return made.train(linear.training)

    def extra_repr(self) -> str:
        fused = ", fuse_main_grad=True" if self.fuse_main_grad else ""
        return f"{super().extra_repr()}, recipe={self.recipe!r}{fused}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        total = None
        if self.fuse_main_grad and torch.is_grad_enabled():
            total = getattr(self.weight, "main_grad", None)
            if total is None:
                raise RidgelineError(
                    "Fp8Linear: fuse_main_grad needs the float32 buffer weight.main_grad; set it first"
                )
        return fp8_forward(self, input, recipe=self.recipe, main_grad=total)


def fp8_forward(
    module: nn.Linear, x: torch.Tensor, *, recipe: str = "tensor", main_grad: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear layer trained in 8 bits. A weight that ranks gathered in 8 bits brings its codes along."""
    weight = module.weight
    codes = getattr(weight, "quantized", None)
    return ridgeline.fp8_linear(x, weight, module.bias, recipe=recipe, main_grad=main_grad, quantized=codes)


def fp8_recipe(module: nn.Module) -> str | None:
    """Returns the recipe of a layer that trains in 8 bits, an `Fp8Linear` or one that `hf.patch` changed, or None."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func is fp8_forward:
        return forward.keywords.get("recipe", "tensor")
    return module.recipe if isinstance(module, Fp8Linear) and forward is None else None


class Int8Linear(nn.Module):
    """A linear layer with a weight of int8 codes, by `ridgeline.int8_linear`: a scale for each row of the weight.

    state_dict: weight, int8 (out_features, in_features); scale, float32 (out_features,); bias, if there is one.
    `Int8Linear.of(linear)` quantises a layer's weight. Gradients flow to the input alone.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        activation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        codes = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        self.register_buffer("weight", codes)
        self.register_buffer("scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear, **options: Any) -> Int8Linear:
        weight, bias = linear.weight, linear.bias
        made = cls(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype, **options)
        made.weight, scale = ridgeline.quantize_int8(weight, granularity="row")
        made.scale = scale.reshape(-1)
        if bias is not None:
            made.bias = bias.detach().clone()
        return made

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return ridgeline.int8_linear(input, self.weight, self.scale, bias=bias, activation=self.activation)


class Int4Linear(nn.Module):
    """A linear layer with a weight of 4-bit codes, by `ridgeline.int4_linear`. Gradients flow to the input alone.

    group: the columns that share a scale and a zero. layout: "gptq" (zeros stored minus 1), "gptq_v2" or "awq".
    state_dict: the layout's tensors: qweight, qzeros, scales and, of GPTQ, g_idx; and bias, if there is one. Loading
    repacks them once for the kernel, and puts the columns of GPTQ's act-order into the groups' order; saving packs them
    again, bit for bit. `Int4Linear.of(linear)` quantises a layer's weight by rounding to nearest.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        group: int = 128, layout: str = "gptq", activation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if layout not in ("gptq", "gptq_v2", "awq"):
            raise RidgelineError(f"Int4Linear: layout must be 'gptq', 'gptq_v2' or 'awq', got {layout!r}")
        if not isinstance(group, int) or group < 1 or in_features % group or in_features % 8 or out_features % 8:
            sizes = f"group={group!r}, in_features={in_features}, out_features={out_features}"
            raise RidgelineError(f"Int4Linear: group must divide in_features, and 8 both features, got {sizes}")
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.group, self.layout = group, layout
        groups = out_features, in_features // group
        codes = torch.full((out_features, in_features // 2), 0x88, dtype=torch.uint8, device=device)
        self.register_buffer("q", codes, persistent=False)
        self.register_buffer("scale", torch.ones(groups, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("zero", torch.full(groups, 8, dtype=torch.uint8, device=device), persistent=False)
        self.register_buffer("order", None, persistent=False)  # of columns: x[..., order] has the groups in order
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear, *, group: int = 128, **options: Any) -> Int4Linear:
        weight, bias = linear.weight, linear.bias
        facts: dict[str, Any] = {"group": group, "layout": "gptq_v2"} | options
        made = cls(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype, **facts)
        made.q, made.scale, made.zero = ridgeline.quantize_int4(weight, group=group)  # type: ignore[assignment]
        if made.layout == "gptq" and not made.zero.is_meta and not made.zero.all():
            raise RidgelineError(
                "Int4Linear.of: a group without negative weights has zero 0, which layout 'gptq' cannot store; "
                "use 'gptq_v2'"
            )
        if bias is not None:
            made.bias = bias.detach().clone()
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        q, g_idx = self.q, None
        if self.order is not None:
            place = self.order.argsort()  # of each stored column
            q, g_idx = formats.pairs(formats.nibbles(q)[:, place]), (place // self.group).int()
        version = 1 if self.layout == "gptq" else 2
        packed: tuple[torch.Tensor, ...] = (
            formats.pack_awq(q, self.scale, self.zero)
            if self.layout == "awq"
            else formats.pack_gptq(q, self.scale, self.zero, g_idx, version=version)
        )
        destination.update({prefix + n: t for n, t in zip(self._names(), packed, strict=True)})

    def _names(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", *(() if self.layout == "awq" else ("g_idx",)))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        names = [prefix + n for n in self._names()]
        optional = [] if self.layout == "awq" else names[-1:]
        lost = [n for n in names if n not in state_dict and n not in optional]
        rest = {k: v for k, v in state_dict.items() if k not in names}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        missing += lost
        if not lost:
            try:
                self.take([state_dict.get(n) for n in names])
            except RidgelineError as error:
                errors.append(f"{prefix}: {error}")

    def take(self, stored: Sequence[Any]) -> None:
        """Repacks a layer's tensors, as `state_dict` has them, for the kernel. g_idx may be missing or None.

        Raises RidgelineError if they do not fit together or are of another layer."""
        order = None
        if self.layout == "awq":
            q, scale, zero = formats.unpack_awq(*stored)
        else:
            q, scale, zero, g_idx = formats.unpack_gptq(*stored, version=1 if self.layout == "gptq" else 2)
            if g_idx is not None:
                if int(g_idx.min()) < 0:
                    raise RidgelineError(f"Int4Linear: g_idx must count groups from 0, but holds {int(g_idx.min())}")
                sizes = torch.bincount(g_idx.long(), minlength=scale.shape[1])
                if sizes.tolist() != [self.group] * scale.shape[1]:
                    raise RidgelineError(f"Int4Linear: g_idx must have {self.group} columns in each of its groups")
                order = torch.argsort(g_idx.long(), stable=True)
                q = formats.pairs(formats.nibbles(q)[:, order])
        if q.shape != self.q.shape or scale.shape != self.scale.shape:
            given = f"{tuple(q.shape)} and {tuple(scale.shape)}"
            wanted = f"{tuple(self.q.shape)} and {tuple(self.scale.shape)}"
            raise RidgelineError(f"Int4Linear: its codes and scales are {wanted}, and the stored ones {given}")
        device = self.q.device
        self.q, self.scale, self.zero = q.to(device), scale.to(device), zero.to(device)
        self.order = None if order is None else order.to(device)

    def extra_repr(self) -> str:
        facts = f"bias={self.bias is not None}, group={self.group}, layout={self.layout!r}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {facts}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input if self.order is None else input.index_select(-1, self.order)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return ridgeline.int4_linear(x, self.q, self.scale, self.zero, bias=bias, activation=self.activation)


class Fp8InferenceLinear(nn.Module):
    """A linear layer with a weight of e4m3 numbers, by `ridgeline.fp8_matmul`, for inference: it has no gradients.

    Each call quantises its input to e4m3 too, with a scale for each row; the weight has a scale for each of its rows.
    state_dict: weight, float8_e4m3fn (out_features, in_features); scale, float32 (out_features,); bias, if any.
    `Fp8InferenceLinear.of(linear)` quantises a layer's weight.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        codes = torch.zeros(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        self.register_buffer("weight", codes)
        self.register_buffer("scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear) -> Fp8InferenceLinear:
        weight, bias = linear.weight, linear.bias
        made = cls(weight.shape[1], weight.shape[0], bias is not None, "meta", weight.dtype)
        made.weight, scale = ridgeline.quantize_fp8(weight.detach(), block="row")
        made.scale = scale.reshape(-1)
        if bias is not None:
            made.bias = bias.detach().clone()
        return made

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            raise RidgelineError("Fp8InferenceLinear: it has no gradients; call it under torch.no_grad()")
        dtype = autocast(input) or input.dtype
        rows, scale = ridgeline.quantize_fp8(input.detach().reshape(-1, self.in_features), block="row")
        y = ridgeline.fp8_matmul(rows, self.weight.mT, scale, self.scale, bias=self.bias, out_dtype=dtype)
        return y.view(*input.shape[:-1], self.out_features)


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)): a gated feed-forward layer, with Llama's names of parameters.

    x: (..., hidden_size). activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GEGLU). Backward makes the gated product
    again; with recompute_products also the products before it, which saves more and costs two products.
    Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        device: Any = None,
        dtype: Any = None,
        *,
        recompute_products: bool = False,
    ) -> None:
        super().__init__()
        where = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **where)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **where)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **where)
        self.activation, self.recompute_products = activation, recompute_products

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" + ", recompute_products=True" * self.recompute_products

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return gated_mlp(x, *weights, activation=self.activation, recompute_products=self.recompute_products)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of q and k, by `ridgeline.rope`; the angles of `max_length` positions are buffers.

    head_dim: even. theta: the base of the frequencies theta^(-2 i / rotary_dim). rotary_dim: how many dimensions turn,
    from the first on; None means all. interleaved: pairs are (2i, 2i + 1); by default (i, i + rotary_dim / 2).
    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021 (arXiv:2104.09864).
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        max_length: int,
        theta: float = 10000.0,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        width = head_dim if rotary_dim is None else rotary_dim
        if width % 2 or not 0 < width <= head_dim:
            raise RidgelineError(f"RotaryEmbedding: rotary_dim must be even and at most {head_dim}, got {width}")
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        angles = torch.arange(max_length, dtype=torch.float32, device=device)[:, None] * theta**-steps
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.interleaved = interleaved

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (b, hq, s, head_dim); k: (b, hk, s, head_dim); positions: (s) or (b, s), int64; None means 0, 1, ..."""
        return ridgeline.rope(q, k, self.cos, self.sin, positions=positions, interleaved=self.interleaved)


class Attention(nn.Module):
    """Self-attention with shared heads: o_proj(attention(q_proj(x), k_proj(x), v_proj(x))), with Llama's names.

    x: (b, s, hidden_size). num_kv_heads: None means num_heads. head_dim: None means hidden_size / num_heads.
    causal, scale, window, softcap: as in `ridgeline.attention`. rotary: turns q and k, if given to forward.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        shared = num_heads if num_kv_heads is None else num_kv_heads
        if (head_dim is None and hidden_size % num_heads) or num_heads % shared:
            raise RidgelineError(
                f"Attention: hidden_size must be a multiple of num_heads, and that one of num_kv_heads, got "
                f"{hidden_size}, {num_heads} and {shared}"
            )
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        where = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, **where)
        self.k_proj = nn.Linear(hidden_size, shared * self.head_dim, **where)
        self.v_proj = nn.Linear(hidden_size, shared * self.head_dim, **where)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, **where)
        self.options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}

    def extra_repr(self) -> str:
        return ", ".join([f"{n}={v!r}" for n, v in self.options.items() if v is not None])

    def forward(
        self, x: torch.Tensor, rotary: RotaryEmbedding | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        heads = *x.shape[:-1], -1, self.head_dim
        q, k, v = [p(x).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)]
        if rotary is not None:
            q, k = rotary(q, k, positions)
        o: Any = ridgeline.attention(q, k, v, **self.options)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward layer, by `ridgeline.topk_gate` and `ridgeline.moe`.

    Each token goes to k of the experts, gated units of `intermediate` columns, and to the shared ones if there are any.
    score, groups, top_groups, normalize, scale: as in `ridgeline.topk_gate`. activation, limit: as in `ridgeline.moe`.
    shared: columns of a gated unit that every token passes, as DeepSeek's shared experts; 0: none.
    auxiliary: the factor of Switch's loss of balance, E / (k T) sum_e count_e mean_t s_te, where s are the scores,
    divided by their sum for sigmoid. After a forward in training it is in `auxiliary_loss`; add it to the loss.
    balance: the step by which `update_bias` changes DeepSeek-V3's bias of the choice; 0: there is no bias.
    router_dtype: of the router's weight and product; None is `dtype`.
    Parameters: router (E, H), gate_up_proj (E, 2 I, H) with the gate first, down_proj (E, H, I), and of the shared unit
    shared_gate_up (2 S, H) and shared_down (H, S). Buffers: with balance, bias (E,), float32; counts (E,), int64, the
    tokens of each expert since the last `update_bias`, which the state_dict leaves out.
    """

    bias: torch.Tensor | None
    counts: torch.Tensor
    spread_moe: Any = None  # stands for `ridgeline.moe` over several ranks, by `parallel.models`

    def __init__(
        self, hidden: int, intermediate: int, experts: int, k: int, *, score: str = "softmax", groups: int = 1,
        top_groups: int = 1, normalize: bool = True, scale: float = 1.0, activation: str = "silu",
        limit: float | None = None, shared: int = 0, auxiliary: float = 0.0, balance: float = 0.0,
        router_dtype: torch.dtype | None = None, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (("hidden", hidden), ("intermediate", intermediate), ("experts", experts), ("k", k)):
            if type(value) is not int or value < 1:
                raise RidgelineError(f"MoE: {name} must be an int of at least 1, got {value!r}")
        self.k, self.auxiliary, self.balance = k, auxiliary, balance
        self.gate: dict[str, Any] = {"score": score, "groups": groups, "top_groups": top_groups}
        self.gate |= {"normalize": normalize, "scale": scale}
        self.unit: dict[str, Any] = {"activation": activation, "limit": limit}

        def parameter(*shape: int, kind: Any = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=kind))

        self.router = parameter(experts, hidden, kind=router_dtype or dtype)
        self.gate_up_proj = parameter(experts, 2 * intermediate, hidden)
        self.down_proj = parameter(experts, hidden, intermediate)
        self.shared_gate_up = parameter(2 * shared, hidden) if shared else None
        self.shared_down = parameter(hidden, shared) if shared else None
        chosen = torch.zeros(experts, dtype=torch.float32, device=device) if balance else None
        self.register_buffer("bias", chosen)
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64, device=device), persistent=False)
        self.auxiliary_loss: torch.Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills every weight as nn.Linear does: uniform within 1 / sqrt(its inputs)."""
        for p in self.parameters():
            bound = p.shape[-1] ** -0.5
            nn.init.uniform_(p, -bound, bound)

    def extra_repr(self) -> str:
        E, width, H = self.gate_up_proj.shape
        return f"hidden={H}, intermediate={width // 2}, experts={E}, k={self.k}, score={self.gate['score']!r}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = ridgeline.linear(rows.to(self.router.dtype), self.router)
        weights, indices, counts = ridgeline.topk_gate(logits, self.k, bias=self.bias, **self.gate)
        y = self.chosen(rows, weights, indices)
        self.auxiliary_loss = None
        if self.training:
            self.counts += counts
            if self.auxiliary:
                self.auxiliary_loss = self.auxiliary * self._imbalance(logits, counts)
        if self.shared_gate_up is not None and self.shared_down is not None:
            y = y + gated_mlp(rows, self.shared_gate_up, None, self.shared_down)
        return y.view(x.shape)

    def chosen(self, rows: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of each row's experts."""
        moe = self.spread_moe or ridgeline.moe
        return moe(rows, weights, indices, self.gate_up_proj, self.down_proj, **self.unit)

    def _imbalance(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        if self.gate["score"] == "softmax":
            scores = wide.softmax(-1)
        else:
            scores = wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True)
        return logits.shape[1] / (self.k * max(1, logits.shape[0])) * (counts * scores.mean(0)).sum()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Raises the bias of experts with fewer tokens than the mean by `balance`, lowers others', and clears counts.

        Call it after an optimizer's step; with data parallelism, first sum `counts` over the ranks (all_reduce).
        """
        if self.bias is not None:
            wide = self.counts.float()
            self.bias += self.balance * (wide.mean() - wide).sign()
        self.counts.zero_()


class QuantizedMoE(MoE):
    """`MoE` with experts of few bits, by `ridgeline.moe` with scales, for inference: it has no gradients.

    kind: "int8" (a scale a row), "int4" (scales and zeros by groups of columns) or "mxfp4". group: int4's; None: the
    largest of 128, 64 and 32 that divides a weight's columns. The other arguments are MoE's.
    `QuantizedMoE.of(moe, "int4")` quantises a layer's experts, and shares its router and shared experts.
    state_dict: gate_up_proj and down_proj hold codes, gate_up_scale and down_scale scales, gate_up_zero and down_zero
    int4's zeros, each an expert's tensors stacked as `quantize_int8`, `quantize_int4` or `formats.pack_mxfp4` makes
    them; the rest is MoE's.
    """

    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor
    gate_up_zero: torch.Tensor | None
    down_zero: torch.Tensor | None

    def __init__(
        self, hidden: int, intermediate: int, experts: int, k: int, *, kind: str = "int4", group: int | None = None,
        device: Any = None, dtype: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(hidden, intermediate, experts, k, device="meta", dtype=dtype, **options)
        self.kind, self.hidden = kind, hidden
        where = torch.get_default_device() if device is None else device
        for name, N, K in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            delattr(self, f"{name}_proj")
            own = self.group_of(kind, group, K)
            codes = (K, torch.int8) if kind == "int8" else (K // 2, torch.uint8)
            scales = (experts, N) if kind == "int8" else (experts, N, K // own)
            self.register_buffer(f"{name}_proj", torch.empty(experts, N, codes[0], dtype=codes[1], device="meta"))
            wide = torch.uint8 if kind == "mxfp4" else torch.float32
            self.register_buffer(f"{name}_scale", torch.empty(scales, dtype=wide, device="meta"))
            zeros = torch.empty(scales, dtype=torch.uint8, device="meta") if kind == "int4" else None
            self.register_buffer(f"{name}_zero", zeros)
        self.to_empty(device=where)
        self.reset_parameters()
        for buffer in self.buffers():
            buffer.zero_()

    @staticmethod
    def group_of(kind: str, group: int | None, K: int) -> int:
        """Returns the columns that share a scale. Raises RidgelineError for a kind or group that is none."""
        if kind not in ("int8", "int4", "mxfp4"):
            raise RidgelineError(f"QuantizedMoE: kind must be 'int8', 'int4' or 'mxfp4', got {kind!r}")
        if kind == "int8":
            return K
        tried = (32,) if kind == "mxfp4" else (group,) if group else (128, 64, 32)
        fitting = [g for g in tried if K % g == 0]
        if not fitting or K % 2:
            wanted = f"group={group!r}" if group and kind == "int4" else "no group of 128, 64 or 32"
            raise RidgelineError(f"QuantizedMoE: {wanted} divides {K} columns of {kind} codes")
        return fitting[0]

    @staticmethod
    def codes(weight: torch.Tensor, kind: str, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the codes, scales and zeros of experts (E, N, K), made one expert after the other."""
        found: list[tuple[Any, ...]] = []
        for w in weight.detach():
            if kind == "int8":
                q, scale = ridgeline.quantize_int8(w, granularity="row")[:2]
                found.append((q, scale.reshape(-1), None))
            elif kind == "int4":
                found.append(ridgeline.quantize_int4(w, group=group))
            else:
                found.append((*formats.pack_mxfp4(w), None))
        stacked: Any = [None if p[0] is None else torch.stack(p) for p in zip(*found, strict=True)]
        return stacked[0], stacked[1], stacked[2]

    @classmethod
    def of(cls, moe: MoE, kind: str = "int4", *, group: int | None = None) -> QuantizedMoE:
        (E, width, H), shared = moe.gate_up_proj.shape, moe.shared_down
        facts: dict[str, Any] = {"shared": 0 if shared is None else shared.shape[1], "auxiliary": moe.auxiliary}
        facts |= {"balance": moe.balance, "router_dtype": moe.router.dtype, "dtype": moe.down_proj.dtype}
        made = cls(H, width // 2, E, moe.k, kind=kind, group=group, device="meta", **moe.gate, **moe.unit, **facts)
        made.router, made.shared_gate_up, made.shared_down = moe.router, moe.shared_gate_up, moe.shared_down
        made.bias, made.counts = None if moe.bias is None else moe.bias.clone(), moe.counts.clone()
        for name, weight in (("gate_up", moe.gate_up_proj), ("down", moe.down_proj)):
            coded = cls.codes(weight, kind, cls.group_of(kind, group, weight.shape[2]))
            for part, tensor in zip(("proj", "scale", "zero"), coded, strict=True):
                setattr(made, f"{name}_{part}", tensor)
        return made.train(moe.training)

    def extra_repr(self) -> str:
        E, N, _ = self.gate_up_proj.shape
        sizes = f"hidden={self.hidden}, intermediate={N // 2}, experts={E}, k={self.k}"
        return f"{sizes}, score={self.gate['score']!r}, kind={self.kind!r}"

    def chosen(self, rows: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if self.spread_moe is not None:
            raise RidgelineError("QuantizedMoE: quantised experts cannot be split over ranks")
        few: dict[str, Any] = {"scales": (self.gate_up_scale, self.down_scale)}
        few["zeros"] = None if self.gate_up_zero is None else (self.gate_up_zero, self.down_zero)
        return ridgeline.moe(rows, weights, indices, self.gate_up_proj, self.down_proj, **self.unit, **few)
