"""The shapes of models that are planned for: by name, or from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ridgeline.lm.sizes import SIZES
from ridgeline.op import RidgelineError


@dataclass(frozen=True)
class Shape:
    """A decoder-only Transformer: its layers and their products.

    width: of the residual stream. hidden: of the MLP, or of one expert. groups: heads of keys and values. dim: columns
    of a head. gated: whether the MLP has a gate, and so three products. experts: of a layer, 0 for a dense MLP;
    active: experts that a token visits. shared: hidden size of an expert that every token visits."""

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    dim: int
    vocabulary: int
    tied: bool = False
    gated: bool = True
    experts: int = 0
    active: int = 0
    shared: int = 0

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention."""
        return self.width * self.dim * 2 * (self.heads + self.groups)

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's dense MLP, or of one expert."""
        return (3 if self.gated else 2) * self.width * self.hidden

    @property
    def shared_weights(self) -> int:
        """Weights of what every token of a layer with experts visits: the router and the shared expert."""
        return self.width * (self.experts + 3 * self.shared) if self.experts else 0

    @property
    def expert_weights(self) -> int:
        """Weights of a layer's experts."""
        return self.experts * self.mlp_weights

    @property
    def dense_weights(self) -> int:
        """Weights of a layer without its experts."""
        mlp = self.shared_weights if self.experts else self.mlp_weights
        return self.attention_weights + mlp + 2 * self.width

    @property
    def layer_weights(self) -> int:
        """Weights of a layer."""
        return self.dense_weights + self.expert_weights

    @property
    def head_weights(self) -> int:
        """Weights of the last layer's product."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.head_weights + self.width

    @property
    def tensors(self) -> int:
        """Parameter tensors of the model: those of `lm`, or with experts those of `nn.MoE`."""
        mlp = (3 + 2 * bool(self.shared)) if self.experts else 3 if self.gated else 2
        return self.layers * (4 + 2 + mlp) + (2 if self.tied else 3)

    @property
    def active_weights(self) -> int:
        """Weights that a token's products use."""
        mlp = self.active * self.mlp_weights + self.shared_weights if self.experts else self.mlp_weights
        return self.layers * (self.attention_weights + mlp) + self.head_weights

    def flops(self, tokens: int, seq: int) -> float:
        """Returns the FLOP of forward and backward without recomputation: 6 a weight and token, and causal attention's
        6 heads dim seq a layer and token (two products forward and four backward, over half of the pairs)."""
        return tokens * (6.0 * self.active_weights + 6.0 * self.layers * self.heads * self.dim * seq)


def of_size(name: str) -> Shape:
    """Returns the shape of one of the language-model lab's sizes."""
    s = SIZES[name]
    return Shape(name, s.layers, s.width, s.hidden, s.heads, s.groups, s.dim, s.vocabulary, s.tied)


def gpt(name: str, layers: int, width: int, heads: int, vocabulary: int) -> Shape:
    """Returns the shape of a GPT with an MLP of four widths without a gate, and a tied embedding."""
    return Shape(name, layers, width, 4 * width, heads, heads, width // heads, vocabulary, True, False)


NAMED = {
    s.name: s
    for s in (
        *map(of_size, SIZES),
        replace(of_size("llama-1b"), name="llama3-1b"),
        replace(of_size("llama-8b"), name="llama3-8b"),
        Shape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128_256),
        Shape("llama3-405b", 126, 16384, 53248, 128, 8, 128, 128_256),
        Shape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32_000),
        Shape("llama2-13b", 40, 5120, 13824, 40, 40, 128, 32_000),
        Shape("llama2-70b", 80, 8192, 28672, 64, 8, 128, 32_000),
        Shape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151_936),
        Shape("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32_000, experts=8, active=2),
        Shape("mixtral-8x22b", 56, 6144, 16384, 48, 8, 128, 32_768, experts=8, active=2),
        Shape("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 128, 151_936, experts=128, active=8),
        Shape("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, 128, 151_936, experts=128, active=8),
        gpt("mpt-1b", 24, 2048, 16, 50_368),
        gpt("mpt-3b", 32, 2560, 20, 50_368),
        gpt("mpt-7b", 32, 4096, 32, 50_368),
        gpt("mpt-13b", 40, 5120, 40, 50_368),
        gpt("mpt-30b", 48, 7168, 56, 50_368),
        gpt("mpt-70b", 80, 8192, 64, 50_368),
        gpt("gpt-1.7b", 24, 2304, 24, 51_200),
        gpt("gpt-3.6b", 30, 3072, 32, 51_200),
        gpt("gpt-7.5b", 36, 4096, 32, 51_200),
        gpt("gpt-18b", 40, 6144, 48, 51_200),
        gpt("gpt-39b", 48, 8192, 64, 51_200),
        gpt("gpt-76b", 60, 10240, 80, 51_200),
        gpt("gpt-145b", 80, 12288, 96, 51_200),
        gpt("gpt-310b", 96, 16384, 128, 51_200),
        gpt("gpt-530b", 105, 20480, 128, 51_200),
        gpt("gpt-1t", 128, 25600, 160, 51_200),
        gpt("gpt3-175b", 96, 12288, 96, 51_200),
    )
}
GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "phi3", "olmo2")
TIED = ("gemma", "gemma2", "gpt2", "gpt_bigcode", "mpt", "opt", "falcon")  # unless the config says otherwise
PLAIN = ("gpt2", "gpt_neox", "gpt_bigcode", "mpt", "opt", "falcon")


def shape(name: str) -> Shape:
    """Returns the shape of that name, or of a Hugging Face config.json (or the folder with one).

    Raises RidgelineError if there is none, or if the config's kind of model is not known."""
    if name in NAMED:
        return NAMED[name]
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return from_config(path / "config.json" if path.is_dir() else path)
    near = get_close_matches(name, NAMED, 1, 0.0)[0]
    raise RidgelineError(
        f"parallel: there is no model {name!r} (the nearest is {near!r}); give a config.json, or one of "
        f"{', '.join(NAMED)}"
    )


def from_config(path: Path) -> Shape:
    """Returns the shape of a Hugging Face config.json. Raises RidgelineError as `shape` does."""
    if not path.is_file():
        raise RidgelineError(f"parallel: there is no file {str(path)!r}")
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise RidgelineError(f"parallel: {str(path)!r} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise RidgelineError(f"parallel: {str(path)!r} holds no JSON object, as a config.json does")
    kind = read.get("model_type", "")
    if kind not in GATED + PLAIN:
        known = ", ".join(GATED + PLAIN)
        raise RidgelineError(f"parallel: {str(path)!r} is of model_type {kind!r}; known are {known}")

    def get(*keys: str) -> int:
        for key in keys:
            if isinstance(value := read.get(key), int):
                if value < 1:
                    raise RidgelineError(f"parallel: {str(path)!r} needs a {key} of at least 1, and has {value}")
                return value
        raise RidgelineError(f"parallel: {str(path)!r} has no {' or '.join(keys)}")

    width, heads = get("hidden_size", "n_embd", "d_model"), get("num_attention_heads", "n_head", "n_heads")
    experts = read.get("num_local_experts") or read.get("num_experts") or 0
    hidden = read.get("moe_intermediate_size") if experts else None
    hidden = hidden or read.get("intermediate_size") or read.get("n_inner") or read.get("ffn_dim") or 4 * width
    return Shape(
        read.get("_name_or_path") or path.resolve().parent.name,
        get("num_hidden_layers", "n_layer", "n_layers"),
        width,
        int(hidden),
        heads,
        read.get("num_key_value_heads") or (1 if read.get("multi_query") else heads),
        read.get("head_dim") or width // heads,
        get("vocab_size"),
        bool(read.get("tie_word_embeddings", kind in TIED)),
        kind in GATED,
        experts,
        get("num_experts_per_tok") if experts else 0,
        read.get("shared_expert_intermediate_size") or 0,
    )
