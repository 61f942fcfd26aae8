"""Reads and writes models as folders in Hugging Face's layout: config.json and *.safetensors."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lm.sizes import Size
from ridgeline.op import RidgelineError

if TYPE_CHECKING:
    import torch

    from ridgeline.lm.model import Transformer

KINDS = ("llama", "qwen3")
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def package(name: str, what: str) -> Any:
    """Returns a module of an optional package. Raises RidgelineError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        base = name.partition(".")[0]
        if error.name != base:
            raise
        raise RidgelineError(
            f"lm: {what} needs the package {base}, which is not installed; install it with: pip install {base}"
        ) from None


def size_of(config: dict[str, Any], path: Path) -> Size:
    """Returns the shape that a config of Llama or Qwen3 describes. Raises RidgelineError if it is of another kind."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise RidgelineError(f"lm: {path} is of model_type {kind!r}; the model types are {', '.join(KINDS)}")
    for name, usual in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(name, usual) not in (usual, None):
            raise RidgelineError(f"lm: {path} has {name} {config[name]!r}, and this model has {usual!r} alone")
    if config.get("use_sliding_window"):
        raise RidgelineError(f"lm: {path} uses a sliding window, and this model attends to all earlier tokens")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind_of_rope = rotary.get("rope_type", rotary.get("type", "default"))
    try:
        stretch = None
        if kind_of_rope == "llama3":
            names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
            stretch = tuple(float(rotary[name]) for name in names)
        elif kind_of_rope != "default":
            raise RidgelineError(f"lm: {path} has rope_type {kind_of_rope!r}; the types are default and llama3")
        return Size(
            config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"],
            config["num_attention_heads"], config.get("num_key_value_heads"), config.get("head_dim"),
            config["vocab_size"], float(rotary.get("rope_theta", config.get("rope_theta", 10_000.0))),
            config["rms_norm_eps"], kind == "qwen3", bool(config.get("tie_word_embeddings", False)),
            stretch,  # type: ignore[arg-type]
        )  # fmt: skip
    except KeyError as error:
        raise RidgelineError(f"lm: {path} lacks {error.args[0]!r}") from None


def config_of(size: Size) -> dict[str, Any]:
    """Returns the config.json of a size, as transformers 4 and 5 read it."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if size.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if size.qk_norm else "llama",
        "num_hidden_layers": size.layers, "hidden_size": size.width, "intermediate_size": size.hidden,
        "num_attention_heads": size.heads, "num_key_value_heads": size.groups, "head_dim": size.dim,
        "vocab_size": size.vocabulary, "rms_norm_eps": size.eps, "rope_theta": size.theta, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": size.tied, "max_position_embeddings": 1 << 17,
    }  # fmt: skip
    if size.stretch:
        names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        config["rope_scaling"] = {"rope_type": "llama3"} | dict(zip(names, size.stretch, strict=True))
    return config


def read(folder: Path) -> tuple[Size, dict[str, torch.Tensor]]:
    """Returns a folder's shape and tensors by name. Raises RidgelineError if a file is missing or damaged."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise RidgelineError(f"lm: {folder} holds no {CONFIG}, so it is no model's folder") from None
    except (OSError, ValueError) as error:
        raise RidgelineError(f"lm: {path} cannot be read as JSON: {error}") from None
    size, files = size_of(config, path), sorted(folder.glob("*.safetensors"))
    if not files:
        raise RidgelineError(f"lm: {folder} holds no *.safetensors")
    load = package("safetensors.torch", "a model's folder").load_file
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights |= load(file)
        except Exception as error:  # the package's own error type, and the system's
            raise RidgelineError(f"lm: {file} is damaged or cannot be read: {error}") from None
    return size, weights


def fill(model: Transformer, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Gives a model on the meta device these weights. Raises RidgelineError that names a tensor that does not fit."""
    wanted = dict(model.named_parameters(remove_duplicate=False))  # layers of few bits are filled before
    if model.size.tied:
        weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight"))  # type: ignore[arg-type]
    for name, tensor in wanted.items():
        found = weights.get(name)
        if found is None:
            raise RidgelineError(f"lm: {folder} lacks the tensor {name}")
        if found.shape != tensor.shape:
            shapes = f"{tuple(found.shape)}, but its config says {tuple(tensor.shape)}"
            raise RidgelineError(f"lm: the tensor {name} of {folder} has the shape {shapes}")
    for name in weights:
        if name not in wanted and not name.endswith("rotary_emb.inv_freq"):  # old files keep this constant
            raise RidgelineError(f"lm: {folder} holds the unknown tensor {name}")
    model.load_state_dict({name: weights[name] for name in wanted}, strict=False, assign=True)
    if model.size.tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def write(model: Transformer, folder: Path) -> None:
    """Writes a model as a folder: a tied weight once, each file whole or not at all."""
    save = package("safetensors.torch", "saving a model's folder").save_file
    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    if model.size.tied:
        del state["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save(state, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
    os.replace(folder / f"{WEIGHTS}.part", folder / WEIGHTS)
    (folder / f"{CONFIG}.part").write_text(json.dumps(config_of(model.size), indent=2))
    os.replace(folder / f"{CONFIG}.part", folder / CONFIG)
