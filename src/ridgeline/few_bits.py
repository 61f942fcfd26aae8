"""Linear layers of few bits in models: made from a model's own layers, or filled from a folder of GPTQ's or AWQ's.

    quantized(linear, "int4")        the layer that takes a linear layer's place
    layout(config, where)            what a config.json says of its weights: GPTQ or AWQ, their group, their version
    take(model, weights, found, ...) puts layers of 4 bits where `weights` has X.qweight, and takes their tensors out

`tensors(folder)` reads the files. Only nn.Linear itself is replaced: no subclass, no adapter, nothing with a hook.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ridgeline.nn import Fp8InferenceLinear, Int4Linear, Int8Linear
from ridgeline.op import RidgelineError

KINDS = {"int8": "int8_linear", "int4": "int4_linear", "fp8": "fp8_matmul"}  # and the op that computes each
TRAINING = "fp8-training"  # keeps the weights; `hf.patch` alone takes it
EXPERTS = "mxfp4"  # for experts; linear layers stay in full. `hf.patch` alone takes it
LAYERS: dict[type, str] = {Int8Linear: "int8_linear", Int4Linear: "int4_linear", Fp8InferenceLinear: "fp8_matmul"}
GROUPS = (128, 64, 32)
INDEX = "model.safetensors.index.json"


def check_kind(op: str, kind: Any, models: bool = False) -> None:
    """models: of transformers, whose experts and whose training are quantised too."""
    kinds = [*KINDS, *([EXPERTS, TRAINING] if models else [])]
    if kind not in kinds:
        raise RidgelineError(f"{op}: quantize must be None or one of {', '.join(map(repr, kinds))}, got {kind!r}")


def refusal(linear: nn.Module, kind: str) -> str | None:
    """Returns why a layer cannot be quantised so, or None."""
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return "it is no plain nn.Linear"
    if kind == EXPERTS:
        return f"{kind} is for experts"
    columns, rows = linear.in_features, linear.out_features
    if columns % 8 or rows % 8:
        return f"its sizes {rows} x {columns} are no multiples of 8"
    if kind == "int4" and not any(columns % g == 0 for g in GROUPS):
        return f"no group of {', '.join(map(str, GROUPS))} divides its {columns} columns"
    return None


def quantized(linear: nn.Linear, kind: str) -> nn.Module:
    """Returns the layer of few bits that takes a linear layer's place; `refusal` says which layers have one.

    kind: "int8" (a scale a row), "int4" (groups of 128 columns, else of 64 or 32) or "fp8" (e4m3, a scale a row)."""
    if kind == "int8":
        return Int8Linear.of(linear)
    if kind == "fp8":
        return Fp8InferenceLinear.of(linear)
    return Int4Linear.of(linear, group=next(g for g in GROUPS if linear.in_features % g == 0))


def replaced(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts a layer in the place of a model's module of that name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer.train(model.training))


def quantize(model: nn.Module, kind: str, wanted: Callable[[str], bool]) -> list[str]:
    """Replaces the wanted linear layers of a model by those of few bits, and returns their names."""
    found = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and wanted(n) and not refusal(m, kind)]
    for name in found:
        linear: Any = model.get_submodule(name)
        replaced(model, name, quantized(linear, kind))
    return found


class Layout(NamedTuple):
    """layout: "gptq", "gptq_v2" or "awq", as in `nn.Int4Linear`. group: None: a group a row."""

    layout: str
    group: int | None


def layout(config: dict[str, Any], where: str) -> Layout:
    """Returns how a config.json's quantization_config says that weights are stored.

    Raises RidgelineError if it has none, or one of a kind or a number of bits other than GPTQ's and AWQ's 4."""
    told = config.get("quantization_config")
    if not isinstance(told, dict):
        raise RidgelineError(f"{where} has no quantization_config, so its weights are not quantised")
    kind, bits, group = told.get("quant_method"), told.get("bits"), told.get("group_size", 128)
    if kind not in ("gptq", "awq"):
        raise RidgelineError(
            f"{where} has quant_method {kind!r}; the methods are 'gptq', 'awq' and, for experts, 'mxfp4'"
        )
    if bits != 4:
        raise RidgelineError(f"{where} has weights of {bits!r} bits, and only 4 are supported")
    if type(group) is not int or (group < 1 and group != -1):
        raise RidgelineError(f"{where} has group_size {group!r}; it must be a positive number, or -1 for a whole row")
    version = told.get("checkpoint_format" if kind == "gptq" else "version", "gemm" if kind == "awq" else "gptq")
    accepted = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}[kind]
    if str(version).lower() not in accepted:
        raise RidgelineError(f"{where} stores {kind} in the format {version!r}; accepted is {' or '.join(accepted)}")
    return Layout("awq" if kind == "awq" else str(version).lower(), None if group == -1 else group)


def config_of(folder: Path) -> dict[str, Any]:
    """Returns a folder's config.json. Raises RidgelineError if there is none or if it is damaged."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise RidgelineError(f"{folder} holds no config.json, so it is no model's folder") from None
    except (OSError, ValueError) as error:
        raise RidgelineError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise RidgelineError(f"{path} holds a {type(found).__name__}, and a config is an object")
    return found


def files(folder: Path) -> dict[Path, list[str] | None]:
    """Returns a folder's files of weights, and the tensors that an index says are in each; None: all that are there."""
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise RidgelineError(f"{folder} holds no *.safetensors")
        return dict.fromkeys(found)
    try:
        places = json.loads(index.read_text())["weight_map"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RidgelineError(f"{index} is no index of safetensors: {error!r}") from None
    parts: dict[Path, list[str] | None] = {}
    for name, file in places:
        path = folder / file
        if not path.is_file():
            raise RidgelineError(f"{index} says that the tensor {name} is in {file}, which is not there")
        parts[path] = [*(parts.get(path) or ()), name]
    return parts


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns a folder's tensors by name. Raises RidgelineError if a file is missing or damaged."""
    package = "safetensors.torch"
    try:
        load = import_module(package).load_file
    except ModuleNotFoundError:
        raise RidgelineError("a model's folder needs safetensors; install it with: pip install safetensors") from None
    weights: dict[str, torch.Tensor] = {}
    for path, names in files(folder).items():
        try:
            held = load(path)
        except Exception as error:  # the package's own error type, and the system's
            raise RidgelineError(f"{path} is damaged or cannot be read: {error}") from None
        for name in held if names is None else names:
            if name not in held:
                raise RidgelineError(f"{path} lacks the tensor {name}, which the index says is there")
            weights[name] = held[name]
    return weights


def take(
    model: nn.Module, weights: dict[str, torch.Tensor], found: Layout, folder: Path, device: Any = "cpu"
) -> list[str]:  # fmt: skip
    """Puts layers of 4 bits where weights has X.qweight, and takes their tensors out of weights. Returns their names.

    device: where they are repacked and stay.
    Raises RidgelineError that names the tensor or the layer that is missing, unknown, damaged or of a wrong shape."""
    names = [n.removesuffix(".qweight") for n in weights if n.endswith(".qweight")]
    if not names:
        raise RidgelineError(f"{folder} holds no tensor X.qweight, but its config says that it is quantised")
    modules: dict[str, Any] = dict(model.named_modules())
    for name in names:
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            kind = "unknown here" if linear is None else f"a {type(linear).__name__}"
            raise RidgelineError(f"{folder} holds the tensor {name}.qweight, but {name} is {kind}, no linear layer")
        stored = [weights.pop(f"{name}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")]
        for part, tensor in zip(("qweight", "qzeros", "scales"), stored):
            if tensor is None:
                raise RidgelineError(f"{folder} lacks the tensor {name}.{part}")
        stored = [None if t is None else t.to(device) for t in stored]
        if not bool(stored[2].isfinite().all()):  # type: ignore[union-attr]
            raise RidgelineError(f"the tensor {name}.scales of {folder} is damaged: it holds infinities or NaN")
        bias = weights.pop(f"{name}.bias", None)
        if bias is not None and linear.bias is None and not bool(bias.count_nonzero()):
            bias = None  # AutoGPTQ writes zeros for layers without a bias
        try:
            group = found.group or linear.in_features
            made = Int4Linear(linear.in_features, linear.out_features, False, device, group=group, layout=found.layout)
            made.take(stored[: 3 if found.layout == "awq" else 4])
        except RidgelineError as error:
            raise RidgelineError(f"the layer {name} of {folder} does not fit: {error}") from None
        if (bias is None) != (linear.bias is None) or (bias is not None and bias.shape != (linear.out_features,)):
            has = "lacks" if bias is None else "has, or has of a wrong shape,"
            raise RidgelineError(f"{folder} {has} the tensor {name}.bias")
        made.bias = None if bias is None else bias.to(device)
        replaced(model, name, made)
    return names
