"""A Transformer that decodes with a paged cache: prompts in chunks, then steps of a few tokens for a whole batch.

Layer n's keys of a sequence's tokens from i * block on lie in block table[i] of keys[n]; all layers, and a draft beside
its target, share one table. A step's functions read and write fixed tensors, so that a GPU replays it as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

import ridgeline
from ridgeline import few_bits
from ridgeline.lm.model import MLP, Transformer
from ridgeline.op import RidgelineError

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MOST = 16  # tokens of a step, as decode_attention takes them


def quantize(model: Transformer, kind: str) -> None:
    """Replaces the linear layers of a model, but the last, by layers of few bits.

    Raises RidgelineError if one has sizes that do not fit, or if the model has layers of few bits already."""
    if any(type(m) in few_bits.LAYERS for m in model.modules()):
        raise RidgelineError(f"lm: the model's weights are quantised already; leave --quantize {kind} out")
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear) and (reason := few_bits.refusal(module, kind)):
            raise RidgelineError(f"lm: --quantize {kind} does not take {name}: {reason}")
    few_bits.quantize(model.model, kind, lambda name: True)


def gated(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    if type(mlp.gate_proj) is nn.Linear and type(mlp.up_proj) is nn.Linear:
        return mlp(x)
    return mlp.down_proj(ridgeline.silu_mul(mlp.gate_proj(x), mlp.up_proj(x)))


class Decoder:
    """model: in inference. blocks, block: how many blocks the cache has, and a block's tokens. longest: tokens of the
    longest sequence. invariant: as in `decode_attention`."""

    def __init__(self, model: Transformer, blocks: int, block: int, longest: int, invariant: bool = False) -> None:
        self.model, self.size, self.invariant = model, model.size, invariant
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        shape = self.size.layers, blocks, block, self.size.groups, self.size.dim
        self.keys, self.values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        self.cos, self.sin = (t.to(self.dtype) for t in model.rotations(longest, self.device))

    @cached_property
    def token_bytes(self) -> int:
        """What the cache holds of a token."""
        return 2 * self.size.layers * self.size.groups * self.size.dim * self.keys.element_size()

    @cached_property
    def weight_bytes(self) -> int:
        """What a step reads of the weights: all but the embedding, of which it reads a row a token."""
        embedding = self.model.model.embed_tokens.weight
        held = {t.data_ptr(): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        if not self.size.tied:
            held.pop(embedding.data_ptr(), None)
        return sum(held.values())

    def run(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Returns the last layer's input (B, S, width) for tokens (B, S). attend: takes a layer's number and its
        q (B, S, heads, dim), k and v before rotation, and returns what q sees, alike."""
        body = self.model.model
        x, stream = body.embed_tokens(tokens), None
        for number, layer in enumerate(body.layers):
            part: Any = layer
            n, stream = (part.input_layernorm(x), x) if stream is None else part.input_layernorm(x, stream)
            own = part.self_attn
            q, k, v = (p(n).unflatten(-1, (-1, self.size.dim)) for p in (own.q_proj, own.k_proj, own.v_proj))
            if self.size.qk_norm:
                q, k = own.q_norm(q), own.k_norm(k)
            seen = attend(number, q, k, v)
            n, stream = part.post_attention_layernorm(own.o_proj(seen.flatten(2)), stream)
            x = gated(part.mlp, n)
        return body.norm(x, stream)[0]

    @torch.no_grad()
    def prefill(self, tokens: torch.Tensor, start: int, table: torch.Tensor) -> None:
        """Writes the keys and values of a sequence's tokens (1, S) from place start on. table: int32 (1, most)."""
        count, block = tokens.shape[1], self.keys.shape[2]
        at = torch.arange(start, start + count, device=self.device)
        slots = table[0].long()[at // block] * block + at % block
        ends = torch.tensor([0, count], dtype=torch.int32, device=self.device)
        held = torch.tensor([start + count], dtype=torch.int32, device=self.device)

        def attend(n: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k = ridgeline.rope(q.transpose(1, 2), k.transpose(1, 2), self.cos, self.sin, positions=at)
            self.keys[n].flatten(0, 1).index_copy_(0, slots, k.transpose(1, 2)[0])
            self.values[n].flatten(0, 1).index_copy_(0, slots, v[0])
            cache = {"block_table": table, "lengths": held, "max_seqlen_q": count}
            rows = q.transpose(1, 2)[0].contiguous()
            o: Any = ridgeline.attention_varlen(
                rows, self.keys[n], self.values[n], ends, causal=True, **cache  # type: ignore[arg-type]
            )  # fmt: skip
            return o[None]

        self.run(tokens, attend)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, logits: bool = True) -> Any:
        """Caches the S newest tokens (B, S) of each sequence, and returns their logits (B, S, vocabulary), or None.

        lengths: int32 (B,), the tokens cached before; -1 for a row of padding. table: int32 (B, most)."""

        def attend(n: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            o: Any = ridgeline.decode_attention(
                q, self.keys[n], self.values[n], lengths, k=k, v=v, block_table=table, cos=self.cos, sin=self.sin,
                invariant=self.invariant,
            )  # fmt: skip
            return o

        last = self.run(tokens, attend)
        return self.model.lm_head(last) if logits else None


def _views(buffer: torch.Tensor, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Cuts a buffer of int32 into tensors. Those of 8 bytes must come first."""
    views, start = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize // 4
        views[name] = buffer[start : start + size].view(dtype).view(shape)
        start += size
    return views


class Graphed:
    """A function of tensors at fixed addresses, which one copy fills from the host: on a GPU a CUDA graph, captured at
    the first call; elsewhere the function itself. shapes: of the tensors, by name, those of 8 bytes first."""

    def __init__(
        self, function: Callable[..., Any], shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        self.function, self.graph = function, device.type == "cuda"
        words = sum(math.prod(shape) * dtype.itemsize // 4 for dtype, shape in shapes.values())
        self.host = torch.zeros(words, dtype=torch.int32, pin_memory=self.graph)
        self.there = self.host.to(device)
        self.mine, self.inputs = _views(self.host, shapes), _views(self.there, shapes)
        self.captured: Any = None
        self.outputs: Any = None

    def __call__(self, given: dict[str, list[Any]]) -> Any:
        for name, values in given.items():
            self.mine[name].copy_(torch.tensor(values, dtype=self.mine[name].dtype))
        self.there.copy_(self.host, non_blocking=True)  # reading the outputs waits for it
        if not self.graph:
            return self.function(**self.inputs)
        if self.captured is None:
            self._capture()
        self.captured.replay()
        return self.outputs

    def _capture(self) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels are compiled, and a step only writes the same again
            for _ in range(3):
                self.function(**self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self.captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.captured):
            self.outputs = self.function(**self.inputs)
