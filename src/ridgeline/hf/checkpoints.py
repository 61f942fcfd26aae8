"""Models of transformers from folders of GPTQ, AWQ or mxfp4: built without memory, filled, and patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline import few_bits
from ridgeline.hf.experts import FewBitExperts
from ridgeline.hf.patching import experts_to_quantize, patch
from ridgeline.op import RidgelineError


def load_quantized(folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """Returns the causal language model of a folder of quantised safetensors, patched, for inference.

    folder: config.json with a quantization_config of 4 bits (GPTQ in its versions 1 and 2, with or without act-order;
    AWQ's GEMM version; or mxfp4, as gpt-oss's files have it), and *.safetensors, in one file or with an index. GPTQ's
    and AWQ's layers become `nn.Int4Linear`. mxfp4's experts keep their codes and scales, bit for bit.
    dtype: of what is not quantised; None: as the file has it.
    Raises RidgelineError if transformers does not know the model, or with the name of a tensor that is missing,
    unknown, damaged or of a wrong shape.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise RidgelineError("ridgeline.hf needs transformers; install it with: pip install 'ridgeline[hf]'") from None
    folder = Path(folder)
    told = few_bits.config_of(folder)
    stored = told.get("quantization_config")
    coded = isinstance(stored, dict) and stored.get("quant_method") == few_bits.EXPERTS
    found = None if coded else few_bits.layout(told, str(folder / "config.json"))
    weights = few_bits.tensors(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # these are plain layers, and ours take their places
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RidgelineError(f"{folder} gives no causal language model of transformers: {first}") from None
    if found is None:
        _take_experts(model, weights, folder, dtype)
    else:
        few_bits.take(model, weights, found, folder, device)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    _fill(model, weights, folder, dtype)
    model.to(device).eval()
    patch(model)
    return model


def _take_experts(
    model: Any, weights: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype | None
) -> None:  # fmt: skip
    """Puts experts of codes in the place of those whose codes are in weights, and takes their tensors out of weights.

    dtype: of biases; None: as they are. Raises RidgelineError that names the tensor that is missing or wrong."""
    for name, form in experts_to_quantize(model, few_bits.EXPERTS).items():
        if f"{name}.{form['names']['gate_up']}" in weights:
            continue  # in full

        def take(own: str, wanted: torch.dtype | None, shape: tuple[int, ...], name: str = name) -> torch.Tensor:
            found = weights.pop(f"{name}.{own}", None)
            if found is None:
                raise RidgelineError(f"{folder} lacks the tensor {name}.{own}")
            right = found.is_floating_point() if wanted is None else found.dtype == wanted
            if not right or found.shape != shape:
                shapes = f"{wanted or 'floating point'} {shape}, got {found.dtype} {tuple(found.shape)}"
                raise RidgelineError(f"the tensor {name}.{own} of {folder} must be {shapes}")
            return found.to(dtype) if wanted is None and dtype is not None else found

        few_bits.replaced(model, name, FewBitExperts.stored(model.get_submodule(name), take, **form))


def _fill(model: Any, weights: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    """Gives a model on the meta device its other tensors and the constants that no file holds."""
    model.tie_weights()
    places: dict[int, list[str]] = {}  # a tied weight has several names
    wanted = dict(model.named_parameters(remove_duplicate=False))
    kept = {n: b for n, b in model.named_buffers() if b.is_meta and _persistent(model, n)}
    for name, tensor in (wanted | kept).items():
        places.setdefault(id(tensor), []).append(name)
    for names in places.values():
        given = [n for n in names if n in weights]
        if not given:
            raise RidgelineError(f"{folder} lacks the tensor {names[0]}")
        found, tensor = weights[given[0]], (wanted | kept)[names[0]]
        if found.shape != tensor.shape:
            shapes = f"{tuple(found.shape)}, but its config says {tuple(tensor.shape)}"
            raise RidgelineError(f"the tensor {given[0]} of {folder} has the shape {shapes}")
        if found.is_floating_point() and dtype is not None:
            found = found.to(dtype)
        filled: Any = nn.Parameter(found, requires_grad=False) if names[0] in wanted else found
        for name in names:
            parent, _, own = name.rpartition(".")
            owner = model.get_submodule(parent)
            (owner._parameters if names[0] in wanted else owner._buffers)[own] = filled
            weights.pop(name, None)
    unknown = [n for n in weights if not n.endswith(("rotary_emb.inv_freq", ".g_idx"))]  # old files keep these
    if unknown:
        raise RidgelineError(f"{folder} holds the unknown tensor {unknown[0]}")
    _constants(model, folder)


def _persistent(model: nn.Module, name: str) -> bool:
    parent, _, own = name.rpartition(".")
    return own not in model.get_submodule(parent)._non_persistent_buffers_set


def _constants(model: Any, folder: Path) -> None:
    """Lets transformers make the buffers that files do not hold, such as rotary frequencies."""
    for module in model.modules():
        held = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in held.items():
            fill = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, fill, device="cpu")
        if held:
            model._init_weights(module)
        for name in held:
            if module._buffers[name].isnan().any():
                kind = type(module).__name__
                raise RidgelineError(f"{folder}: transformers makes no {name} for {kind}, and no file holds it")
