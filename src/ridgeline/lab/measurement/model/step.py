"""A training step of a Hugging Face model with random weights: sizes by name, the variants, and the least work.

The step is forward, loss, backward and AdamW, in bfloat16 with bfloat16 moments, always on the same batch of random
tokens. transformers and the peers are imported only by the functions that build a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LLAMA: Row = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}


@dataclass(frozen=True)
class Size:
    """A model by its sizes. kind: transformers' model_type; fields: of its configuration."""

    title: str
    kind: str
    fields: Row


def _size(title: str, kind: str, hidden: int, layers: int, heads: tuple[int, int, int], inner: int, vocabulary: int,
          tied: bool, **more: Any) -> Size:  # fmt: skip
    """heads: of queries, of keys, and the dimensions of one. inner: the features between the MLP's products."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "tie_word_embeddings")
    fields = dict(zip(names, (hidden, layers, inner, vocabulary, tied), strict=True))
    fields |= dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    return Size(title, kind, fields | more)


def _rope(theta: float, **scaling: Any) -> Row:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


# Sizes are those of the models' published config.json files; cut ones have fewer layers.
SIZES = {
    "llama-1b": _size(
        "Llama 3.2 1B", "llama", 2048, 16, (32, 8, 64), 8192, 128256, True, max_position_embeddings=131072, **LLAMA,
        **_rope(5e5, rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192),
    ),
    "qwen3-0.6b": _size(
        "Qwen3 0.6B", "qwen3", 1024, 28, (16, 8, 128), 3072, 151936, True, max_position_embeddings=40960, **_rope(1e6)
    ),
    "llama-8b-8l": _size(
        "Llama 3 8B, 8 of 32 layers", "llama", 4096, 8, (32, 8, 128), 14336, 128256, False,
        max_position_embeddings=8192, **LLAMA, **_rope(5e5),
    ),
    "gpt-oss-6l": _size(
        "gpt-oss 20B, 6 of 24 layers", "gpt_oss", 2880, 6, (64, 8, 64), 2880, 201088, False, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072,
        **_rope(150000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=4096),
    ),
    "gemma2-2b": _size(
        "Gemma 2 2B", "gemma2", 2304, 26, (8, 4, 256), 9216, 256000, True, query_pre_attn_scalar=256,
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, max_position_embeddings=8192,
        **_rope(1e4),
    ),
}  # fmt: skip
VARIANTS = {
    "ridgeline": "the model after ridgeline.hf.patch, with ridgeline.optim.AdamW",
    "liger": "the model after Liger's apply_liger_kernel_to_*, with torch's fused AdamW",
    "compile": "torch.compile of the model, with torch's fused AdamW",
    "eager": "the model as transformers makes it, with torch's fused AdamW",
}
# AdamW's, beside its rate, which follows from the width, so that the loss falls in each of the first steps, but slowly.
# Where it falls to a tenth in a few steps, kernels an ulp apart disagree by more than the tolerance, and the check
# judges noise. A step changes the logits by about rate times width. Below some 6e-5 larger bfloat16 weights stay where
# they are, as less than half an ulp is rounded away, so the loss falls with the square of the rate (docs/notes/hf.md).
LEARNING: Row = {"betas": (0.9, 0.95), "weight_decay": 0.1}
RATES = ((1024, 2e-4), (3072, 2e-5), (1 << 62, 1e-5))  # up to a width


class Missing(Exception):
    """A variant cannot run. status: "skipped" if its package is not installed, else "unsupported"."""

    def __init__(self, reason: str, status: str = "unsupported"):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Task:
    """What one process measures. model: a name in SIZES or a folder with a config.json; memory: for hf.patch."""

    model: str
    batch: int
    seq: int
    variant: str
    device: str
    memory: str | None = None
    graph: bool = False
    small: bool = False

    @property
    def label(self) -> str:
        """The variant's name with its options, under which its row is kept."""
        options = [f"memory={self.memory}"] if self.memory and self.variant == "ridgeline" else []
        options += ["graph"] if self.graph else []
        return self.variant + (f" ({', '.join(options)})" if options else "")


def known(model: str) -> str:
    """The model's title. Raises RidgelineError if it is no name in SIZES and no folder with a config.json."""
    from ridgeline.op import RidgelineError

    if model in SIZES:
        return SIZES[model].title
    if (Path(model) / "config.json").is_file():
        return Path(model).resolve().name
    raise RidgelineError(
        f"--model {model!r} is neither a folder with a config.json nor a known size; the sizes are {', '.join(SIZES)}"
    )


def configuration(model: str) -> Any:
    """transformers' configuration of a model."""
    from transformers import AutoConfig

    if model in SIZES:
        size = SIZES[model]
        return AutoConfig.for_model(size.kind, **size.fields)
    return AutoConfig.from_pretrained(model)


def rate(config: Any) -> float:
    """AdamW's learning rate for a model: that of its width."""
    width = getattr(config.get_text_config(), "hidden_size", 0)
    return next(rate for most, rate in RATES if width <= most)


def plain(task: Task) -> Any:
    """The model as transformers makes it, in training mode, in bfloat16; its weights follow from the seed alone."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(task.device):
        model = AutoModelForCausalLM.from_config(configuration(task.model), dtype=torch.bfloat16)
    return model.to(task.device).train()


def tokens(task: Task, vocabulary: int, batch: int, seq: int) -> Any:
    """A batch of random tokens (batch, seq), int64, the same for every variant."""
    import torch

    dice = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (batch, seq), generator=dice).to(task.device)


def varied(task: Task, model: Any) -> tuple[Any, Any, str | None]:
    """The variant's model, its optimizer, and what hf.patch reports. Raises Missing if the variant cannot run here."""
    import torch

    report = None
    if task.variant == "liger":
        _liger(model)
    elif task.variant == "ridgeline":
        if find_spec("ridgeline.hf") is None:
            raise Missing("this Ridgeline has no module ridgeline.hf", "skipped")
        report = str(import_module("ridgeline.hf").patch(model, memory=task.memory))
    parameters = list(model.parameters())
    how: Row = LEARNING | {"lr": rate(model.config)} | ({"capturable": True} if task.graph else {})
    if task.variant == "ridgeline":
        from ridgeline.optim import AdamW

        return model, AdamW(parameters, **how), report
    optimizer = torch.optim.AdamW(parameters, fused=True, **how)
    return (torch.compile(model) if task.variant == "compile" else model), optimizer, report


def _liger(model: Any) -> None:
    if find_spec("liger_kernel") is None:
        raise Missing("the package liger_kernel is not installed (pip install liger-kernel)", "skipped")
    appliers = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in appliers:
        raise Missing(f"Liger has no kernels for the model type {kind!r}")
    appliers[kind](model=model)


def stepper(model: Any, optimizer: Any, ids: Any) -> Callable[[], Any]:
    """A function that makes one training step on a batch of tokens and returns its loss, a detached scalar."""

    def step() -> Any:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# --- the least work of a step


def work(model: Any, batch: int, seq: int) -> Row:
    """The operations of a step's matrix products and attention, and the bytes that the rest moves at least.

    Products: 6 operations per weight and token, an expert's weights counted for the tokens that reach it. Attention: 14
    per pair of query and key that may meet, and head dimension: two products forward and five backward, without what is
    made again. Bytes are in 16 bits, each fusion done: gate 16 per inner feature and token; a norm that adds the
    residual 16 per feature, any further one 10; rotary embedding 8, with the norm of q and k in the same pass; the
    loss 4 per class and token; the table of embeddings 4 per weight, and 10 per feature and token; AdamW 14 per weight.
    """
    c, count = model.config, batch * seq
    weights = dict(model.named_parameters())
    parameters = sum(p.numel() for p in weights.values())
    chosen = getattr(c, "num_experts_per_tok", None) or 0
    experts = sum(p.numel() for name, p in weights.items() if p.dim() == 3)
    total = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None) or 1
    linear = sum(m.weight.numel() for m in model.modules() if type(m).__name__ == "Linear")
    router = sum(p.numel() for name, p in weights.items() if name.endswith("router.weight"))
    layers, hidden = c.num_hidden_layers, c.hidden_size
    heads, keys = c.num_attention_heads, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    dimension = getattr(c, "head_dim", None) or hidden // heads
    inner = (getattr(c, "moe_intermediate_size", None) or c.intermediate_size) * max(chosen, 1)
    norms = sum(
        type(m).__name__.endswith("Norm") and getattr(m, "weight", None) is not None and m.weight.numel() == hidden
        for m in model.modules()
    )
    further = max(norms - 1 - 2 * layers, 0)
    moved = {
        "gate": 16 * inner * layers * count,
        "norms": (16 * 2 * layers + 10 * further) * hidden * count,
        "rope": 8 * (heads + keys) * dimension * layers * count,
        "loss": 4 * c.vocab_size * count,
        "embedding": 10 * hidden * count + 4 * c.vocab_size * hidden,
        "adamw": 14 * parameters,
    }
    products = 6 * (linear + router + experts * chosen // total) * count
    attention = sum(14 * pairs(seq, window) * dimension * heads * batch for window in windows(c))
    return {"parameters": parameters, "products": products, "attention": attention, "bytes": moved}


def windows(config: Any) -> list[int | None]:
    """The window of each layer's attention, None where a query meets all keys before it."""
    size, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds:
        return [size if kind == "sliding_attention" else None for kind in kinds]
    return [size] * config.num_hidden_layers


def pairs(seq: int, window: int | None) -> int:
    """How many pairs of a query and a key causal attention has, where a query meets at most `window` keys."""
    width = min(window or seq, seq)
    return width * (width + 1) // 2 + (seq - width) * width


def floor(least: Row, roof: Row) -> Row:
    """The seconds of products, attention and memory-bound work at a machine's measured roof, one after another.

    "seconds" is at the burst rate of products, "lasting" at the rate that the machine keeps up for seconds.
    """
    from ridgeline.lab.measurement.limits import bandwidth

    burst = roof["matmul"]["bfloat16"]["median"]
    lasting = roof.get("lasting", {}).get("bfloat16", roof["matmul"]["bfloat16"])["median"]
    memory = sum(least["bytes"].values()) / bandwidth(roof, 2, 1)
    parts = {"products": least["products"] / burst, "attention": least["attention"] / burst, "memory": memory}
    slow = (least["products"] + least["attention"]) / lasting + memory
    return parts | {"seconds": sum(parts.values()), "lasting": slow}
