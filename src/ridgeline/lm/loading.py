"""Models to generate with, by a size's name or a folder, and how text becomes their tokens and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline import few_bits
from ridgeline.lm import folder as files
from ridgeline.lm.model import Transformer
from ridgeline.lm.sizes import SIZES, Size
from ridgeline.lm.snapshots import Snapshots
from ridgeline.lm.tokens import coder
from ridgeline.op import RidgelineError


class Loaded(NamedTuple):
    """A model with its coder. stops: tokens after which a sequence ends."""

    model: Transformer
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    stops: frozenset[int]


def load(
    name: str, device: torch.device, dtype: torch.dtype | None = None, *, tokenizer: Path | None = None, seed: int = 0
) -> Loaded:
    """Returns the model of a size's name, with random weights; of a folder of Hugging Face's, Llama or Qwen3, of full
    weights or of GPTQ's or AWQ's; or of a folder of `lm train`'s checkpoints, the newest.

    dtype: None: a folder's own; for random weights bfloat16 on a GPU. tokenizer: None: the folder's tokenizer.json, or
    bytes. Raises RidgelineError if there is no such model, or a file or a tensor does not fit."""
    path, stops = Path(name), frozenset[int]()
    if (path / files.CONFIG).is_file():
        model, stops = _from_folder(path, device), _stops(path)
        tokenizer = tokenizer or next((p for p in [path / "tokenizer.json"] if p.is_file()), None)
    elif path.is_dir() and Snapshots(path).files():
        model = _from_training(path)
    elif name in SIZES:
        torch.manual_seed(seed)
        with torch.device(device):
            model = Transformer(SIZES[name])
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    else:
        kinds = "no folder with a config.json or with checkpoints of `ridgeline lm train`"
        raise RidgelineError(f"lm: {name} is {kinds}, and none of the sizes {', '.join(SIZES)}")
    if dtype is not None:
        for parameter in model.parameters():  # scales of few bits keep their dtype
            parameter.data = parameter.data.to(dtype)
    text = coder(tokenizer, special=True)
    if text.vocabulary > model.size.vocabulary:
        raise RidgelineError(
            f"lm: {name} has a vocabulary of {model.size.vocabulary}, but its text has tokens up to "
            f"{text.vocabulary - 1}; give its tokenizer.json by --tokenizer"
        )
    return Loaded(model.to(device).eval().requires_grad_(False), text.encode, text.decode, stops)


def _from_folder(path: Path, device: torch.device) -> Transformer:
    size, weights = files.read(path)
    with torch.device("meta"):
        model = Transformer(size)
    told = few_bits.config_of(path)
    if told.get("quantization_config") is not None:
        few_bits.take(model, weights, few_bits.layout(told, str(path / files.CONFIG)), path, device)
    files.fill(model, weights, path)
    return model


def _from_training(path: Path) -> Transformer:
    """The newest checkpoint of `lm train`."""
    snapshots = Snapshots(path)
    state = snapshots.newest()
    marks = {k.removeprefix("size's "): v for k, v in state.get("identity", {}).items() if k.startswith("size's ")}
    try:
        if marks.get("stretch") is not None:
            marks["stretch"] = tuple(marks["stretch"])
        with torch.device("meta"):
            model = Transformer(Size(**marks))
        model.load_state_dict(state["model"], assign=True)
    except (KeyError, TypeError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise RidgelineError(f"lm: {snapshots.files()[-1]} is no checkpoint of `lm train`: {first}") from None
    if model.size.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _stops(path: Path) -> frozenset[int]:
    """The ends of a text, as a folder's generation_config.json or config.json names them."""
    for name in ("generation_config.json", files.CONFIG):
        try:
            told: Any = json.loads((path / name).read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):  # the first is optional, and the second has been read before
            continue
        if told is not None:
            return frozenset([told] if isinstance(told, int) else told)
    return frozenset()
