"""`torch.nn` modules that call Ridgeline's functions: same names, arguments, parameters, state_dicts and repr.

Those that torch has are subclasses of torch's, so `isinstance(m, nn.LayerNorm)` holds, and torch documents their
arguments. Only `forward` differs. One rule is Ridgeline's own: `CrossEntropyLoss` takes the classes in the last
dimension, while torch takes them in dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline.op import RidgelineError
from ridgeline.recomputation import gated_mlp


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
    """`torch.nn.GroupNorm`, by `ridgeline.group_norm`. NCHW or channels_last; the output has the input's format."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ridgeline.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


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
