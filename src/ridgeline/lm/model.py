"""A decoder-only Transformer of Ridgeline's ops: pre-norm, rotary embeddings, grouped heads, a gated MLP.

    h = x + attention(rms_norm(x)) W_o        q, k, v = rms_norm(x) W_q, W_k, W_v; q and k are rotated
    x = h + (silu(n W_gate) * (n W_up)) W_down        n = rms_norm(h)
    loss = cross_entropy(rms_norm(x) W_head, target)

Names in the state dict are those of Llama and Qwen3 in Hugging Face, so their checkpoints load. Three ways of keeping
less for backward: checkpoints of several layers, nested checkpoints, and making the cheap results again.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ridgeline.lm.remaking import Remade
from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError, get
from ridgeline.recomputation import autocast

IMPLS = ("ridgeline", "torch", "naive")
REMAKES = ("cheap",)  # norms and silu(gate) * up, which only read and write memory
_PREFERRED = {"torch": ("torch", "naive"), "naive": ("naive", "torch")}


def called(op: str, impl: str) -> Any:
    """Returns the public function of an op. impl: "ridgeline" for its default implementation, "torch" for PyTorch's own
    functions, "naive" for the formula, each where the op has it."""
    if impl not in IMPLS:
        raise RidgelineError(f"lm: impl must be one of {', '.join(IMPLS)}, but is {impl!r}")
    found = get(op)
    if impl == "ridgeline":
        return found.function
    return partial(found.function, impl=next(name for name in _PREFERRED[impl] if name in found.implementations))


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings; queries of several heads share a head of keys and values."""

    def __init__(self, size: Size, impl: str) -> None:
        super().__init__()
        self.size, dim = size, size.dim
        self.attend, self.rotate, self.norm = (called(op, impl) for op in ("attention", "rope", "rms_norm"))
        self.q_proj = nn.Linear(size.width, size.heads * dim, bias=False)
        self.k_proj = nn.Linear(size.width, size.groups * dim, bias=False)
        self.v_proj = nn.Linear(size.width, size.groups * dim, bias=False)
        self.o_proj = nn.Linear(size.heads * dim, size.width, bias=False)
        if size.qk_norm:
            self.q_norm, self.k_norm = Norm(dim, size.eps, impl), Norm(dim, size.eps, impl)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size.dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.size.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))
        y = self.attend(q, k, v.transpose(1, 2), causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The gated MLP, SwiGLU."""

    def __init__(self, size: Size, impl: str) -> None:
        super().__init__()
        self.gated, self.apart = called("gated_linear", impl), called("silu_mul", impl)
        self.gate_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.up_proj = nn.Linear(size.width, size.hidden, bias=False)
        self.down_proj = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gated(x, self.gate_proj.weight, self.up_proj.weight))

    def remade(self, x: torch.Tensor, again: Remade) -> torch.Tensor:
        """As `forward`, but backward makes silu(gate) * up again instead of keeping it."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(again.of(self.apart(gate, up), self.apart, gate, up))


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float, impl: str) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps
        self.norm, self.add_norm = called("rms_norm", impl), called("add_rms_norm", impl)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Returns the norm of x or, with a residual, the norm of the sum, and the sum."""
        if residual is None:
            return self.norm(x, self.weight, self.eps)
        return self.add_norm(x, residual, self.weight, self.eps)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x."""
        return self.norm(x, self.weight, self.eps)


class Layer(nn.Module):
    """Attention and the MLP, each behind a norm of the residual stream."""

    def __init__(self, size: Size, impl: str) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(size.width, size.eps, impl), Attention(size, impl)
        self.post_attention_layernorm, self.mlp = Norm(size.width, size.eps, impl), MLP(size, impl)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: what the layer before adds to the stream. Returns what this layer adds, and the stream without it."""
        n, stream = (self.input_layernorm(x), x) if stream is None else self.input_layernorm(x, stream)
        n, stream = self.post_attention_layernorm(self.self_attn(n, cos, sin), stream)
        return self.mlp(n), stream

    def remade(
        self, x: torch.Tensor, stream: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, but backward makes both norms and silu(gate) * up again from what it keeps in any case."""
        with Remade() as again:
            n, stream = (self.input_layernorm(x), x) if stream is None else self.input_layernorm(x, stream)
            again.of(n, self.input_layernorm.alone, stream)
            n, stream = self.post_attention_layernorm(self.self_attn(n, cos, sin), stream)
            again.of(n, self.post_attention_layernorm.alone, stream)
            return self.mlp.remade(n, again), stream


class Body(nn.Module):
    """Everything before the last layer."""

    def __init__(self, size: Size, impl: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size, impl) for _ in range(size.layers))
        self.norm = Norm(size.width, size.eps, impl)


def stretched(turns: torch.Tensor, factor: float, low: float, high: float, context: float) -> torch.Tensor:
    """Slows rotations for longer contexts, as Llama 3.1: those that turn fewer than `low` times in the old context by
    `factor`, those that turn more than `high` times not at all, and those between in part."""
    often = context * turns / (2 * math.pi)
    kept = ((often - low) / (high - low)).clamp(0, 1)
    return turns * kept + turns / factor * (1 - kept)


class Transformer(nn.Module):
    """The language model. `forward(tokens)` gives logits; `forward(tokens, target)` gives the mean loss in float32.

    tokens, target: (batch, context) integers; a target of -100 does not count. impl: "ridgeline", "torch" or "naive".
    every: layers per checkpoint: backward computes them again from their input; 0 keeps everything.
    nested: halves the layers again and again, down to `every` of them; each half is a checkpoint. Backward then keeps
        few inputs at a time, in proportion to the logarithm of the layers, and computes each layer once per halving.
    remake: "cheap" makes norms and silu(gate) * up again in backward, and keeps everything else.
    Raises RidgelineError if these do not go together.
    """

    def __init__(
        self, size: Size, impl: str = "ridgeline", every: int = 0, *, nested: bool = False, remake: str | None = None
    ) -> None:
        super().__init__()
        if every < 0:
            raise RidgelineError(f"lm: layers per checkpoint must be at least 0, but are {every}")
        if remake not in (None, *REMAKES):
            raise RidgelineError(f"lm: remake must be None or one of {', '.join(REMAKES)}, but is {remake!r}")
        if remake and (every or nested):
            raise RidgelineError("lm: remake saves nothing inside a checkpoint: give either remake or a checkpoint")
        self.size, self.impl, self.every, self.nested, self.remake = size, impl, every, nested, remake
        self.model = Body(size, impl)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.loss = called("linear_cross_entropy", impl)
        self.apply(self._begin)

    def _begin(self, module: nn.Module) -> None:
        """Draws weights from a normal distribution of deviation 0.02, cut at three deviations."""
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            nn.init.trunc_normal_(module.weight, std=0.02, a=-0.06, b=0.06)

    def rotations(self, context: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, (context, head_dim / 2), float32."""
        steps = torch.arange(0, self.size.dim, 2, device=device, dtype=torch.float32) / self.size.dim
        turns = 1.0 / self.size.theta**steps
        if self.size.stretch is not None:
            turns = stretched(turns, *self.size.stretch)
        angles = torch.outer(torch.arange(context, device=device, dtype=torch.float32), turns)
        return angles.cos(), angles.sin()

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the last layer's input, (batch, context, width)."""
        x, stream = self.model.embed_tokens(tokens), None
        cast = autocast(x)
        x = x if cast is None else x.to(cast)
        cos, sin = (t.to(x.dtype) for t in self.rotations(tokens.shape[1], tokens.device))  # once for all layers
        x, stream = self._span(0, self.size.layers, x, stream, cos, sin)
        return self.model.norm(x, stream)[0]

    def _span(self, first: int, count: int, *args: Any) -> Any:
        """Runs `count` layers, in checkpoints as asked for. args: x, stream, cos and sin."""
        if not self.training or not (self.every or self.nested):
            return self._block(first, count, *args)
        part = max(1, self.every)
        if self.nested and count > part:
            part = max(part, math.ceil(count / 2))
        for start in range(first, first + count, part):
            size = min(part, first + count - start)
            run = partial(self._span if self.nested and size > max(1, self.every) else self._block, start, size)
            x, stream, *rotations = args
            x = x if stream is None else x + stream  # a checkpoint keeps one tensor, not two
            args = *checkpoint(run, x, None, *rotations, use_reentrant=False, preserve_rng_state=False), *rotations
        return args[:2]

    def _block(self, first: int, count: int, x: torch.Tensor, stream: Any, cos: Any, sin: Any) -> Any:
        remade = self.remake is not None and self.training
        for layer in self.model.layers[first : first + count]:
            assert isinstance(layer, Layer)
            x, stream = layer.remade(x, stream, cos, sin) if remade else layer(x, stream, cos, sin)
        return x, stream

    def forward(self, tokens: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = self.hidden(tokens)
        if target is None:
            return self.lm_head(x)
        return self.loss(x.flatten(0, 1), self.lm_head.weight, target.flatten(), dtype=torch.float32)


def load(folder: str | Path, impl: str = "ridgeline", device: str | torch.device = "cpu") -> Transformer:
    """Returns the model of a folder in Hugging Face's layout: config.json and *.safetensors, of Llama or Qwen3.

    The weights keep the file's dtype. Raises RidgelineError if the folder, its config or a tensor does not fit."""
    from ridgeline.lm import folder as files

    size, weights = files.read(Path(folder))
    with torch.device("meta"):
        model = Transformer(size, impl)
    files.fill(model, weights, Path(folder))
    return model.to(device)
